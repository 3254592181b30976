/* consumers.h - the messages of consumer groups: GROUP and DEAD. */
#ifndef PURGATORYD_FRONT_CONSUMERS_H
#define PURGATORYD_FRONT_CONSUMERS_H

#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/front/request.h"

/* Handle a GROUP, and write the groups of its reply to `out`. *again: the message has to be handled
 * again, because a deleted group still has jobs, or a group is a draft. False: refused. */
bool consumers_group(struct pg_arena *a, const struct request *q, struct sink *out, uint32_t *count,
                     bool *again, struct refusal *why);
/* Let the draft, if there is one, take notices of the replay buffer, the oldest first, as far as its
 * budget allows. After the last one the group exists. Return whether it can take more at once. */
bool consumers_draft_step(struct pg_arena *a);
/* Return the time of the next step; INT64_MAX = there is no draft. */
int64_t consumers_draft_next_ns(const struct pg_arena *a);
/* Handle a DEAD, and write the dead letters of its reply to `out`. False: refused. */
bool consumers_dead(struct pg_arena *a, const struct request *q, struct sink *out, uint32_t *count,
                    uint64_t detail[2], struct refusal *why);
/* Let the next pg_jobs send the message of the last one again. False: the member has ended. */
bool consumers_jobs_again(struct pg_arena *a);

#endif

/* consumers.h - the messages of consumer groups: GROUP and DEAD. */
#ifndef PURGATORYD_FRONT_CONSUMERS_H
#define PURGATORYD_FRONT_CONSUMERS_H

#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/front/request.h"

/* Handle a GROUP, and write the groups of its reply to `out`. *again: the message has to be handled
 * again, because the group still has jobs. False: refused. */
bool consumers_group(struct pg_arena *a, const struct request *q, struct sink *out, uint32_t *count,
                     bool *again, struct refusal *why);
/* Handle a DEAD, and write the dead letters of its reply to `out`. False: refused. */
bool consumers_dead(struct pg_arena *a, const struct request *q, struct sink *out, uint32_t *count,
                    uint64_t detail[2], struct refusal *why);
/* Let the next pg_jobs send the message of the last one again. False: the member has ended. */
bool consumers_jobs_again(struct pg_arena *a);

#endif

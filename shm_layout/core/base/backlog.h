/* backlog.h - the backlogs of the wheel: one queue of due timers per topic. */
#ifndef PURGATORYD_BASE_BACKLOG_H
#define PURGATORYD_BASE_BACKLOG_H

#include "core/base/chunks.h"
#include "core/base/common.h"

/* A backlog uses chunks of the wheel. A timer in it is linked: wheel_remove takes it out. The oldest
 * member then moves into its cell, so a cancel may change the order of one other timer. */

/* Make all backlogs empty. Their chunks are not given back. */
void backlogs_init(struct wheel *w);
/* Append a due slot, which must not be linked, to the backlog of its topic. */
void backlog_push(struct wheel *w, uint32_t slot);
/* Unlink a slot that is in the backlog of its topic. */
void backlog_remove(struct wheel *w, uint32_t slot);
/* Return the n-th member of a topic's backlog, for n = 0 (the oldest) or 1; PG_NIL = there is
 * none. */
uint32_t backlog_peek(const struct wheel *w, uint32_t topic, uint32_t n);
/* Return the members in the chunk of the oldest member, and store their number in *count. */
const uint32_t *backlog_soon(const struct wheel *w, uint32_t topic, uint32_t *count);
/* For wheel_check: walk all backlogs. Add the number of members to *linked, the number of chunks to
 * *chunks, and the mixed ids of the chunks to *chunk_sum. */
bool backlogs_check(const struct wheel *w, uint32_t *linked, uint32_t *chunks, uint64_t *chunk_sum,
                    struct pg_fault *fault);

/* Number of members of a topic's backlog, and of all backlogs. */
static inline uint32_t backlog_count(const struct wheel *w, uint32_t topic)
{
    return w->backlogs[topic].count;
}
/* Cell of the oldest member; PG_NIL = there is none. */
static inline uint32_t backlog_head(const struct wheel *w, uint32_t topic)
{
    return w->backlogs[topic].head;
}
static inline uint32_t backlogs_count(const struct wheel *w) { return w->state->backlog; }
static inline bool in_backlog(const struct pg_hot *h) { return h->bucket == PG_BACKLOG_BUCKET; }

#endif

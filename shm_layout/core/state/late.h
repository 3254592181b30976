/* late.h - due timers that do not fire at once: pauses, late policies, and paced catch-up. */
#ifndef PURGATORYD_STATE_LATE_H
#define PURGATORYD_STATE_LATE_H

#include "core/base/common.h"
#include "core/arena.h"

/* Return whether a due timer has to wait in the backlog of its topic. */
bool late_waits(const struct pg_arena *a, uint32_t slot);
/* Link a due timer into the backlog of its topic. */
void late_hold(struct pg_arena *a, uint32_t slot);
/* Fire, skip or coalesce timers of the backlogs, at most `budget`. Return the number of timers
 * handled; *more is true if the next call may continue at once. The wheel must have no due timers
 * left: otherwise COALESCE would not find the last late timer of a topic. */
uint32_t late_catch_up(struct pg_arena *a, uint32_t budget, bool *more);
/* Note that a pause or a rate has changed, so that the next advance looks at all backlogs. */
void late_changed(struct pg_arena *a);
/* Note an outage that ended at now_ns: timers that came due before it are fired at a limited rate. */
void late_outage(struct pg_arena *a, int64_t now_ns);
/* For a rebuild: forget all backlogs, and complete the coalescing that a kill interrupted. */
void late_rebuild(struct pg_arena *a);
/* Return pg_topic.missed as a rebuild would complete it. */
uint64_t late_missed(const struct pg_arena *a, const struct pg_topic *t);
/* Return a topic's or namespace's setting of its late policy. */
static inline uint64_t late_setting(unsigned policy, int64_t grace_ns)
{
    return (uint64_t)grace_ns << PG_LATE_SHIFT | policy;
}
static inline unsigned late_policy(uint64_t late) { return late & ((1u << PG_LATE_SHIFT) - 1); }
static inline int64_t late_grace_ns(uint64_t late) { return (int64_t)(late >> PG_LATE_SHIFT); }
/* Return whether a setting of a late policy is in bounds. */
bool late_sound(unsigned policy, int64_t grace_ns);

#endif

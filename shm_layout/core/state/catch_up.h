/* catch_up.h - the end of timers that wait in backlogs. */
#ifndef PURGATORYD_STATE_CATCH_UP_H
#define PURGATORYD_STATE_CATCH_UP_H

#include "core/base/common.h"
#include "core/arena.h"

/* Fire, skip or coalesce timers of the backlogs, at most `budget`. Return the number of timers
 * handled; *more is true if the next call may continue at once. The wheel must have no due timers
 * left: otherwise COALESCE would not find the last late timer of a topic. */
uint32_t late_catch_up(struct pg_arena *a, uint32_t budget, bool *more);
/* For a rebuild: forget all backlogs, and complete the coalescing that a kill interrupted. */
void late_rebuild(struct pg_arena *a);
/* Return pg_topic.missed as a rebuild would complete it. */
uint64_t late_missed(const struct pg_arena *a, const struct pg_topic *t);

#endif

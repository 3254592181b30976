/* schedule_rows.h - which schedule an occurrence belongs to, and the lists of schedules that need
 * something. */
#ifndef PURGATORYD_STATE_SCHEDULE_ROWS_H
#define PURGATORYD_STATE_SCHEDULE_ROWS_H

#include "core/base/common.h"
#include "core/arena.h"

/* Return the item PG_EXT_SCHEDULE of a timer; NULL = the timer is no occurrence. */
const struct pg_ext *occurrence_item(const struct pg_arena *a, uint32_t slot);
/* Return the row of the schedule of which the slot is the armed occurrence; PG_NIL = the slot is
 * none. */
uint32_t schedule_of_slot(const struct pg_arena *a, uint32_t slot);
/* Note that an armed occurrence has ended. Its schedule then arms the next one. */
void schedule_unarmed(struct pg_arena *a, uint32_t slot);
/* Return true if no schedule has this occurrence any more, so that it must not fire. */
bool schedule_stale(const struct pg_arena *a, uint32_t slot);
/* Return whether an occurrence has to be armed and may be. */
static inline bool schedules_waiting(const struct pg_arena *a)
{
    return a->state.schedules_due != PG_NIL && !a->state.schedules_stuck;
}
/* Return whether an occurrence may be armed soon, or the daemon has to compute one first. */
static inline bool schedules_pending(const struct pg_arena *a)
{
    return schedules_waiting(a) || a->state.schedules_asked != PG_NIL;
}
static inline bool nominal_is_known(int64_t t) { return t != PG_NOMINAL_UNKNOWN; }
/* Return whether the daemon has to compute a time of the schedule. */
bool schedule_lacks_times(const struct pg_schedule_fields *f);
/* Add a row to the lists that it belongs to. A row that needs nothing leaves them later. */
void schedule_queue(struct pg_arena *a, uint32_t row);
/* Add a row to the list of schedules whose occurrence has to be armed, or take it from there.
 * `before`: the row before it in the list; PG_NIL = it is the first one. */
void schedule_due(struct pg_arena *a, uint32_t row);
void schedule_due_take(struct pg_arena *a, uint32_t before, uint32_t row);
/* Add a row to the list of schedules whose times have to be computed, or take the first one from
 * it. */
void schedule_ask(struct pg_arena *a, uint32_t row);
void schedule_ask_take(struct pg_arena *a);

#endif

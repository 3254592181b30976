/* schedule_rows.h - which schedule an occurrence or a job belongs to, and the lists of schedules that
 * need something. */
#ifndef PURGATORYD_STATE_SCHEDULE_ROWS_H
#define PURGATORYD_STATE_SCHEDULE_ROWS_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"

/* Return the row of a schedule; PG_NIL = there is none with this key. */
uint32_t schedule_find(const struct pg_arena *a, uint32_t namespace_row, struct name key);
uint32_t schedule_hash(const struct pg_arena *a, const struct pg_schedule_fields *f);
/* Let schedule_find lead to a row, or lead to it no more. */
void schedule_hashed(struct pg_arena *a, uint32_t row);
void schedule_unhashed(struct pg_arena *a, uint32_t row);

/* Return the item PG_EXT_SCHEDULE of a timer; NULL = the timer is no occurrence. */
const struct pg_ext *occurrence_item(const struct pg_arena *a, uint32_t slot);
/* Return the row of the schedule of which the slot is the armed occurrence; PG_NIL = the slot is
 * none. */
uint32_t schedule_of_slot(const struct pg_arena *a, uint32_t slot);
/* Store the beginning of a delay in its schedule's row. Call this before the end of an armed
 * occurrence or of an open job is stored. After a kill between the two stores, the later end stores
 * another beginning. */
void schedule_slot_ending(struct pg_arena *a, uint32_t slot);
void schedule_job_ending(struct pg_arena *a, const struct pg_job *j);
/* Prepare the deletion of a group: after a kill in the middle, nothing shows when its jobs ended.
 * Return false if the WAL buffer is full. */
bool schedules_group_ending(struct pg_arena *a);
/* Note that an armed occurrence has ended. Its schedule then arms the next one. */
void schedule_unarmed(struct pg_arena *a, uint32_t slot);
/* Return true if no schedule has this occurrence any more, so that it must not fire. */
bool schedule_stale(const struct pg_arena *a, uint32_t slot);
/* Return the length of the schedule's key at the start of the key of an occurrence. */
uint32_t occurrence_prefix(const uint8_t *key, uint32_t len);
/* Return the row of the schedule whose open jobs the job counts among; PG_NIL = there is none. */
uint32_t schedule_of_job(const struct pg_arena *a, const struct pg_job *j);
/* Count a job of a group while it is neither acknowledged, dropped nor dead. */
void schedule_job_opens(struct pg_arena *a, const struct pg_job *j);
void schedule_job_ends(struct pg_arena *a, const struct pg_job *j);
/* Return whether open jobs stop the schedule from arming or firing an occurrence. */
bool schedule_holds(const struct pg_arena *a, uint32_t row);
/* Return whether open jobs let an occurrence end as skipped. */
bool schedule_skips(const struct pg_arena *a, uint32_t slot);
/* Store new fields. They are in use once `version` is stored. `put`: the blob is new as well. */
void schedule_store(struct pg_arena *a, uint32_t row, const struct pg_schedule_fields *f, bool put);
/* Store that an occurrence was skipped. Call this once its slot is free: after a kill between the
 * two steps, the occurrence counts as fired. */
void schedule_skipped(struct pg_arena *a, uint32_t row);
/* Take the armed occurrence of a row back. Its ticket is older than the new since_ticket. */
void fields_unarm(const struct pg_arena *a, uint32_t row, struct pg_schedule_fields *f);
/* Take a due occurrence back, so that its schedule arms it again. The caller frees its slot. */
void schedule_take_back(struct pg_arena *a, uint32_t slot);
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

/* schedules.h - schedules: named objects that arm one timer after another. */
#ifndef PURGATORYD_STATE_SCHEDULES_H
#define PURGATORYD_STATE_SCHEDULES_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"

uint32_t schedules_of(const struct pg_arena *a, uint32_t uid);  /* number of schedules of a uid */
/* Return the current time on the wall clock. */
int64_t schedule_wall_ns(const struct pg_arena *a);

/* Return the newest nominal time that has fired under the key of a schedule; 0 = none. `row`: PG_NIL =
 * a new schedule. */
int64_t schedule_fired_ns(const struct pg_arena *a, uint32_t row);

/* Return the time after which a cron schedule begins to count: the current time, but not before the
 * newest occurrence that has fired under its key. */
int64_t schedule_begin_ns(const struct pg_arena *a, uint32_t row);

/* ---- changes. The caller checks before that the WAL buffer has space. ---- */

/* Put a schedule. `wanted` has its settings, its names' rows and the lengths of its bytes, which are
 * key, spec, zone, tag and payload. With a cron expression, the schedule counts from wanted->base_ns on,
 * and after_ns and then_ns are its first times. `row`: the schedule with this key, or PG_NIL. Return
 * ADDED, REPLACED, KEPT (same settings), or the reason of a refusal. *row receives the row. */
unsigned schedule_put(struct pg_arena *a, const struct pg_schedule_fields *wanted,
                      const uint8_t *bytes, uint32_t *row);
/* Return whether the schedule has these settings. */
bool schedule_same(const struct pg_arena *a, uint32_t row, const struct pg_schedule_fields *wanted,
                   const uint8_t *bytes);
void schedule_delete(struct pg_arena *a, uint32_t row);
void schedule_pause(struct pg_arena *a, uint32_t row);
/* Arm occurrences again, from the first one after the current time on. `after_ns` and `then_ns` are
 * the first times of a cron expression after `base_ns`. */
void schedule_resume(struct pg_arena *a, uint32_t row, int64_t base_ns, int64_t after_ns,
                     int64_t then_ns);
/* Arm an additional occurrence, due at once. *result is the answer to a PUT with mode KEEP. Without
 * `repeat`, it is also KEPT if the notice of this occurrence is in the replay buffer. */
void schedule_extra(struct pg_arena *a, uint32_t row, int64_t nominal_ns, bool limited,
                    bool repeat, struct pg_result *result);
/* Return whether a backfill of the schedule may fire an occurrence with this nominal time. */
bool schedule_has_nominal(const struct pg_schedule_fields *f, int64_t time_ns);
/* Count the occurrences from one nominal time to another as fired. The caller has armed additional
 * ones: after a kill between the two steps, a rebuild finds them armed and counts them. */
void schedule_fired(struct pg_arena *a, uint32_t row, int64_t first_ns, int64_t last_ns);

/* ---- for catch_up.c ---- */

/* Return the deadline on the boot clock of the occurrence that follows an armed one; INT64_MAX =
 * none follows, the daemon has to compute it first, or the slot is no armed occurrence. */
int64_t schedule_follower_ns(const struct pg_arena *a, uint32_t slot);

/* ---- for loop.c ---- */

/* Arm at most `budget` occurrences. Return whether one of them is due, or schedules are left. */
bool schedules_step(struct pg_arena *a, uint32_t budget);
/* Write the nominal times of an `every` schedule from the first one at or after `from_ns` to
 * `until_ns`, at most `most`. Return how many. */
uint32_t schedule_steps(const struct pg_schedule_fields *f, int64_t from_ns, int64_t until_ns,
                        uint32_t most, int64_t *times);

/* ---- init, rebuild, check, copies ---- */

void schedules_init(struct pg_arena *a);
bool schedules_rebuild(struct pg_arena *a, struct pg_fault *why);
/* Note a live slot that is an occurrence. Call this for each of them after schedules_rebuild. */
void schedule_note(struct pg_arena *a, uint32_t slot);
/* Complete what a kill interrupted. Call this after all slots have been noted and linked. */
void schedules_settle(struct pg_arena *a);
bool schedules_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);
/* Return whether lengths, state and blob of a row may be read. */
bool schedule_sound(const struct pg_arena *a, const struct pg_schedule_fields *f);
/* Write a row that was found in a frame or in another arena. */
void schedule_restore(struct pg_arena *a, uint32_t row, uint64_t version,
                      const struct pg_schedule_fields *fields);

#endif

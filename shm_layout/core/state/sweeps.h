/* sweeps.h - the table of sweeps, which cancel or move all timers of a selection. */
#ifndef PURGATORYD_STATE_SWEEPS_H
#define PURGATORYD_STATE_SWEEPS_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/select.h"

static inline struct pg_sweep *sweep_at(const struct pg_arena *a, uint32_t row)
{
    return &a->sweeps[row];
}
static inline uint32_t sweep_slot(const struct pg_sweep *w) { return (uint32_t)(w->progress >> 32); }
static inline uint32_t sweep_done(const struct pg_sweep *w) { return (uint32_t)w->progress; }

/* Return the row of a sweep; PG_NIL = there is no such sweep. */
uint32_t sweep_find(const struct pg_arena *a, const uint8_t id[16]);
/* Begin a sweep in a free row, or in that of the sweep that ended and began first. Return the row;
 * PG_NIL = all rows have running sweeps. */
uint32_t sweep_begin(struct pg_arena *a, const struct pg_sweep_ask *ask, const struct selection *s,
                     uint32_t uid);
void sweep_stop(struct pg_arena *a, uint32_t row);
/* Do a bounded part of the running sweep that began first. Return whether it can go on at once. */
bool sweeps_iteration(struct pg_arena *a);
/* Return the time at which sweeps_iteration has work; INT64_MAX = no sweep is running. */
int64_t sweeps_next_ns(const struct pg_arena *a);

/* Count the timer that a kill interrupted, and find out whether a sweep is running. */
bool sweeps_rebuild(struct pg_arena *a, struct pg_fault *why);
/* Copy all sweeps to an arena with other slots. Running sweeps end, with their counts. */
bool sweeps_migrate(struct pg_arena *to, const struct pg_arena *from);
bool sweeps_check(const struct pg_arena *a, struct pg_fault *fault);

#endif

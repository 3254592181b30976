/* in_doubt.h - find out what a kill interrupted: whether the effect of the last frame in the WAL
 * buffer happened, and whether the current record of each session was applied. */
#ifndef PURGATORYD_RECOVER_IN_DOUBT_H
#define PURGATORYD_RECOVER_IN_DOUBT_H

#include "core/base/common.h"
#include "core/arena.h"

/* Keep or drop the frame in doubt. The caller must call this before it rebuilds any derived state.
 * Return false and fill *why if the WAL buffer is damaged. */
bool in_doubt_settle(struct pg_arena *a, struct pg_fault *why);

/* Settle the interrupted record of each session. rebuild_end calls this after it has linked all
 * slots. */
void sessions_recover(struct pg_arena *a);

#endif

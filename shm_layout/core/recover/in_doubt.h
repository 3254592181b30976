/* in_doubt.h - what a kill interrupted: whether the change of the last frame in the ring was made,
 * and that of the record under way of each session. */
#ifndef PURGATORYD_RECOVER_IN_DOUBT_H
#define PURGATORYD_RECOVER_IN_DOUBT_H

#include "core/base/common.h"
#include "core/arena.h"

/* Before anything is rebuilt: keeps or drops that frame. */
bool in_doubt_settle(struct pg_arena *a, struct pg_fault *why);

void sessions_recover(struct pg_arena *a);

#endif

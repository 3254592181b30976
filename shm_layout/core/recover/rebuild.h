/* rebuild.h - all derived state, from authoritative state. */
#ifndef PURGATORYD_RECOVER_REBUILD_H
#define PURGATORYD_RECOVER_REBUILD_H

#include "core/base/common.h"
#include "core/arena.h"

/* What an armed slot or an outcome names is there; of its blob only the size is looked at. */
bool slot_sound(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c);
bool slot_blob_inside(const struct pg_arena *a, const struct pg_cold *c);

/* The steps of pg_rebuild, in this order. `keys` and `places` need nothing of each other and may
 * run at the same time in two threads, each with a fault of its own. */
int rebuild_begin(struct pg_arena *a, int64_t now_ns, struct pg_fault *why);
int rebuild_keys(struct pg_arena *a, struct pg_fault *why);
int rebuild_places(struct pg_arena *a, struct pg_fault *why);
int rebuild_end(struct pg_arena *a, struct pg_fault *why);

#endif

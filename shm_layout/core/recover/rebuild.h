/* rebuild.h - build all derived state from the authoritative state. */
#ifndef PURGATORYD_RECOVER_REBUILD_H
#define PURGATORYD_RECOVER_REBUILD_H

#include "core/base/common.h"
#include "core/arena.h"

/* True if all rows to which an armed slot or an outcome refers exist, and the lengths of extension,
 * key and payload are valid. The position and the bytes of the blob are not checked. */
bool slot_sound(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c);

/* The steps of pg_rebuild, in this order. Each returns 1, or fills *why and returns 0. rebuild_keys
 * and rebuild_places are independent: two threads may run them at the same time, each with its own
 * *why. */
int rebuild_begin(struct pg_arena *a, int64_t now_ns, struct pg_fault *why);
int rebuild_keys(struct pg_arena *a, struct pg_fault *why);
int rebuild_places(struct pg_arena *a, struct pg_fault *why);
int rebuild_end(struct pg_arena *a, struct pg_fault *why);

#endif

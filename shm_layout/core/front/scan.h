/* scan.h - readers of a live arena. They copy first, and trust a copy only if its source did not
 * change in the meantime. */
#ifndef PURGATORYD_FRONT_SCAN_H
#define PURGATORYD_FRONT_SCAN_H

#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"

/* Write one struct pg_info with names, key and payload. Write nothing and return false if there is
 * no space for this or the slot has changed. */
bool info_write(const struct pg_arena *a, uint32_t slot, uint64_t ctl, struct sink *out);
/* Write the struct pg_info of an armed or parked timer without its payload. Only the daemon may call
 * it, because it does not check for changes. */
void info_write_bare(const struct pg_arena *a, uint32_t slot, struct sink *out);

#endif

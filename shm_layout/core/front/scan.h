/* scan.h - readers of a live arena: copy first, and trust only what did not change meanwhile. */
#ifndef PURGATORYD_FRONT_SCAN_H
#define PURGATORYD_FRONT_SCAN_H

#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"

/* Write one struct pg_info with names, key and payload. Returns false, with nothing written, if it
 * does not fit or the slot has changed. */
bool info_write(const struct pg_arena *a, uint32_t slot, uint64_t ctl, struct sink *out);

#endif

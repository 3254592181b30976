/* compaction.h - moves blobs, so that free memory lies in large blocks. */
#ifndef PURGATORYD_STATE_COMPACTION_H
#define PURGATORYD_STATE_COMPACTION_H

#include "core/base/common.h"
#include "core/arena.h"

/* Do a bounded part of the work, between two calls that change slots or entries. Return true if work
 * is left. */
bool compaction_step(struct pg_arena *a);
/* Begin a pass that empties the granules [at, end). No pass may be running. */
void compaction_begin(struct pg_arena *a, uint32_t at, uint32_t end);
/* True if a step has work to do. Memory of the running pass counts as neither free nor used, so a
 * request that finds no block has to be repeated. */
bool compaction_due(const struct pg_arena *a);
/* True if enough memory is free, but all passes have failed to join it to a large block. */
bool compaction_failed(const struct pg_arena *a);
/* The answer to a record for whose blob no block is large enough. */
static inline unsigned payload_refusal(const struct pg_arena *a)
{
    return compaction_due(a) ? PG_ST_BUSY : PG_ST_FULL_PAYLOAD;
}

#endif

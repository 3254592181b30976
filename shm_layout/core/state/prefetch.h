/* prefetch.h - fetches the memory that coming work will touch, a group of ids at a time. */
#ifndef PURGATORYD_STATE_PREFETCH_H
#define PURGATORYD_STATE_PREFETCH_H

#include "core/base/common.h"
#include "core/arena.h"

#define PG_PREFETCH_MAX 32        /* most ids that one of these calls takes */

/* What operations on watch keys will touch. hashes[places[i]] is the i-th key's, reach[i] up to
 * which watermark its watchers will be visited; rows[places[i]] = the row that it may have. */
void prefetch_watermarks(const struct pg_arena *a, const uint32_t *hashes, const uint32_t *places,
                         const uint64_t *reach, uint32_t count, uint32_t *rows);
void prefetch_ends(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* What putting operations into their places touches first. */
void prefetch_links(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
void prefetch_outcomes(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* To be called before each outcome of an inbox is looked at: the list leads only from blob to
 * blob. The order is that of all inboxes together. */
void prefetch_news(struct pg_arena *a);
/* Key and payload, of what is short. */
void prefetch_bytes(const struct pg_arena *a, uint32_t slot);

#endif

/* prefetch.h - fetches the memory that coming work will touch, for a set of ids at a time. */
#ifndef PURGATORYD_STATE_PREFETCH_H
#define PURGATORYD_STATE_PREFETCH_H

#include "core/base/common.h"
#include "core/arena.h"

#define PG_PREFETCH_MAX 32        /* most ids in one of these calls */

/* Fetch what records on watch keys will touch. The i-th key has hash hashes[places[i]] and visits
 * watchers up to watermark reach[i]. Sets rows[places[i]] to the row that it probably has. */
void prefetch_watermarks(const struct pg_arena *a, const uint32_t *hashes, const uint32_t *places,
                         const uint64_t *reach, uint32_t count, uint32_t *rows);
/* Fetch what ending these timers and operations will touch. */
void prefetch_ends(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* Fetch what linking these operations touches first. */
void prefetch_links(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* Fetch what freeing these outcomes will touch. */
void prefetch_outcomes(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* Call this before reading each outcome of an inbox. It prefetches outcomes that will be read soon,
 * in any inbox: the list of an inbox leads to the next outcome too late. */
void prefetch_news(struct pg_arena *a);
/* Fetch key and payload of an outcome, if they are short. */
void prefetch_bytes(const struct pg_arena *a, uint32_t slot);

#endif

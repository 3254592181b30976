/* prefetch.h - fetches the memory that later calls will access, for a set of ids at a time. */
#ifndef PURGATORYD_STATE_PREFETCH_H
#define PURGATORYD_STATE_PREFETCH_H

#include "core/base/common.h"
#include "core/arena.h"

#define PG_PREFETCH_MAX 32        /* maximum number of ids in one of these calls */

/* Fetch what records on watch keys will access. The key of the i-th record has hash
 * hashes[places[i]]; the record visits watchers up to watermark reach[i]. Set rows[places[i]] to
 * the row that the key probably has. */
void prefetch_watermarks(const struct pg_arena *a, const uint32_t *hashes, const uint32_t *places,
                         const uint64_t *reach, uint32_t count, uint32_t *rows);
/* Fetch what records on timers and operations will access. The key of the i-th record has hash
 * hashes[places[i]]. */
void prefetch_timers(const struct pg_arena *a, const uint32_t *hashes, const uint32_t *places,
                     uint32_t count);
/* Fetch what the expiry of these timers and operations will access, and what the notices that give
 * way to theirs will access. */
void prefetch_expiries(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* Fetch what the end of these operations will access. */
void prefetch_ends(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* Fetch keys, items and payloads of these timers. */
void prefetch_blobs(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* Fetch what a cancel or another deadline of these timers will access. */
void prefetch_changes(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* Fetch what operations_link will access first for these operations. */
void prefetch_links(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* Fetch what will be accessed when these outcomes are freed. */
void prefetch_outcomes(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* Call this before each outcome of an inbox is read. It prefetches outcomes that will soon be read,
 * in any inbox. The list of one inbox would show the next outcome too late for a prefetch. */
void prefetch_news(struct pg_arena *a);
/* Fetch the key and the payload of an outcome if they are short. */
void prefetch_bytes(const struct pg_arena *a, uint32_t slot);

#endif

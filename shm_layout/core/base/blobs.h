/* blobs.h - an allocator of keys and payloads. */
#ifndef PURGATORYD_BASE_BLOBS_H
#define PURGATORYD_BASE_BLOBS_H

#include "core/base/common.h"

/* A segregated-fit allocator over granules of 16 bytes without headers on used blobs:
 * the owner knows the size. A bit per granule tells used from free; free blocks carry
 * their own size at both ends and their list links. All but the blobs' bytes is derived state. */
struct blob_pool {
    struct pg_blob_heap *heap;
    uint64_t *map;                /* a bit per granule: 1 = used */
    uint8_t *bytes;
    uint32_t granules;
};

static inline uint32_t blob_granules(uint64_t bytes)
{
    return (uint32_t)((bytes + PG_GRANULE - 1) / PG_GRANULE);
}
uint64_t blob_map_words(uint32_t granules);
void blobs_init(struct blob_pool *p);                              /* all free */
uint32_t blobs_take(struct blob_pool *p, uint32_t granules);       /* PG_NIL when none fits */
void blobs_give(struct blob_pool *p, uint32_t blob, uint32_t granules);
/* Rebuild: begin (nothing used), mark each living blob, end (free lists from the map).
 * mark returns false if the blob is out of bounds or overlaps one marked before. */
void blobs_rebuild_begin(struct blob_pool *p);
bool blobs_rebuild_mark(struct blob_pool *p, uint32_t blob, uint32_t granules);
void blobs_rebuild_end(struct blob_pool *p);
static inline void blobs_prefetch_mark(const struct blob_pool *p, uint32_t blob)
{
    fetch(&p->map[blob / 64]);
}
static inline uint8_t *blob_at(const struct blob_pool *p, uint32_t blob)
{
    return p->bytes + (uint64_t)blob * PG_GRANULE;
}
/* Map, free lists, size tags and totals agree, no two free blocks touch;
 * used_granules = the sum over all owners. */
bool blobs_check(const struct blob_pool *p, uint64_t used_granules, struct pg_fault *fault);
/* Whether so many bytes of a blob are inside the pool. */
bool blob_inside(const struct blob_pool *p, uint32_t blob, uint64_t bytes);
uint64_t blobs_used(const struct blob_pool *p);                    /* granules in use */

#endif

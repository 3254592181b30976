/* blobs.h - the allocator of keys and payloads. */
#ifndef PURGATORYD_BASE_BLOBS_H
#define PURGATORYD_BASE_BLOBS_H

#include "core/base/check.h"
#include "core/base/common.h"

/* A segregated-fit allocator over granules of 16 bytes. Used blobs have no header: the owner knows
 * the size. One bit per granule says whether the granule is used. A free block stores its list
 * links, and its size at both ends. Only the bytes of used blobs are authoritative state. */
struct blob_pool {
    struct pg_blob_heap *heap;
    uint64_t *map;                /* one bit per granule: 1 = used */
    uint8_t *bytes;
    uint32_t granules;
};

static inline uint32_t blob_granules(uint64_t bytes)
{
    return (uint32_t)((bytes + PG_GRANULE - 1) / PG_GRANULE);
}
/* Number of 64-bit words in the map of a pool. */
uint64_t blob_map_words(uint32_t granules);
/* Make all granules free. */
void blobs_init(struct blob_pool *p);
/* Allocate adjacent granules (at least one). Return PG_NIL if no free block is large enough. */
uint32_t blobs_take(struct blob_pool *p, uint32_t granules);
/* Free a blob. `granules` must be the size with which it was allocated. */
void blobs_give(struct blob_pool *p, uint32_t blob, uint32_t granules);
/* Copy a blob into the pool `to`. Return PG_NIL if `to` has no free block that is large enough. */
uint32_t blobs_copy(struct blob_pool *to, const struct blob_pool *from, uint32_t blob,
                    uint32_t granules);
/* Rebuild the derived state in three steps. blobs_rebuild_begin makes all granules free,
 * blobs_rebuild_mark marks one blob as used, and blobs_rebuild_end builds the free lists from the
 * map. blobs_rebuild_mark returns false if the blob is out of bounds or overlaps a blob that is
 * already marked. */
void blobs_rebuild_begin(struct blob_pool *p);
bool blobs_rebuild_mark(struct blob_pool *p, uint32_t blob, uint32_t granules);
void blobs_rebuild_end(struct blob_pool *p);
static inline void blobs_prefetch_mark(const struct blob_pool *p, uint32_t blob)
{
    fetch(&p->map[blob / 64]);
}
/* Prefetch the sizes of the free neighbours of a blob that will be freed. Its word of the map should
 * be in the cache. */
void blobs_prefetch_give(const struct blob_pool *p, uint32_t blob, uint32_t granules);
/* Address of a blob for a prefetch. The number may come from a free slot or a free block, so nobody
 * may read the bytes at the address. */
static inline const uint8_t *blob_hint(const struct blob_pool *p, uint32_t blob)
{
    return p->bytes + (uint64_t)blob * PG_GRANULE;
}
/* Bytes of a blob. A reader of a changing arena checks the number with blob_inside first, which
 * admits zero bytes at the pool's end. */
static inline uint8_t *blob_at(const struct blob_pool *p, uint32_t blob)
{
    PG_ASSERT_IN_TESTS(blob <= p->granules, "blobs", "a blob begins inside the pool");
    return p->bytes + (uint64_t)blob * PG_GRANULE;
}
/* Check that map, free lists, size tags and totals agree, that no two free blocks are adjacent, and
 * that `used_granules`, the total size of the owners' blobs, is the number of used granules. */
bool blobs_check(const struct blob_pool *p, uint64_t used_granules, struct pg_fault *fault);
/* True if `bytes` bytes from granule `blob` on are inside the pool. */
bool blob_inside(const struct blob_pool *p, uint32_t blob, uint64_t bytes);
/* Number of granules in use. */
uint64_t blobs_used(const struct blob_pool *p);

#endif

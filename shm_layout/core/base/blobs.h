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
    /* Zone that a compaction empties: [zone_begin, zone_end). Its free granules are in no list, so
     * nobody gets them. Only this process knows the zone. */
    uint32_t zone_begin, zone_end;
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
/* Number of granules that one blob can get for certain. */
uint32_t blobs_largest(const struct blob_pool *p);

/* ---- compaction: empty a zone, so that its free granules become one block ---- */

/* Size of the free block that compaction keeps: PG_BLOCK_GOAL, or a zone of a small pool. */
uint32_t blobs_goal(const struct blob_pool *p);
/* Size of a zone: a sixteenth of the pool, at most ZONE_MAX granules. */
uint32_t blobs_zone_granules(const struct blob_pool *p);
/* True if an eighth of the pool is free, but no free block has blobs_goal granules. */
bool blobs_fragmented(const struct blob_pool *p);
/* True if the share of free granules in [at, at + granules) is at least that of the pool. */
bool blobs_worth_emptying(const struct blob_pool *p, uint32_t at, uint32_t granules);
/* Begin a zone with the first used granule of [at, limit). Return false if there is none. */
bool blobs_zone_open(struct blob_pool *p, uint32_t at, uint32_t limit);
/* Take up to `blocks` more free blocks into the zone. Return true once the zone reaches `limit`. */
bool blobs_zone_grow(struct blob_pool *p, uint32_t limit, uint32_t blocks);
/* Copy a blob that lies inside the zone to a place outside. Return the copy; PG_NIL if the blob does
 * not lie inside the zone, or if there is no space. The caller lets the owner refer to the copy with
 * a store-release, and gives the old blob back. */
uint32_t blobs_evacuate(struct blob_pool *p, uint32_t blob, uint32_t granules);
/* Raise `passes`, which notifies readers that the memory of moved blobs will change. Call this before
 * the zone shrinks. */
void blobs_pass_end(struct blob_pool *p);
/* A reader of a changing arena reads `passes` with acquire order before it reads a blob's number, and
 * again after an acquire fence behind its copy of the blob. If the values differ, the copy may have
 * foreign bytes. */
static inline const struct pg_blob_heap *blobs_heap(const struct blob_pool *p) { return p->heap; }
/* Return up to `blocks` free blocks of the zone to the lists. Return true once the zone is gone. */
bool blobs_zone_shrink(struct blob_pool *p, uint32_t blocks);

#endif

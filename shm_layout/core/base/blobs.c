/* blobs.c - the allocator of key and payload bytes.
 *
 * It is a two-level segregated-fit allocator (TLSF: Masmano, Ripoll, Crespo, Real 2004) over
 * granules. A map has one bit per granule, which is 1 if the granule is used. A used blob therefore
 * needs no header: the allocator finds free neighbours in the map, and their sizes in the boundary
 * tags of these blocks. Two free blocks are never adjacent. blobs_take and blobs_give cost a
 * constant number of steps.
 *
 * A compaction empties a zone of the pool. Free granules of the zone leave the lists first, so that
 * they are neither used nor joined with a block outside. After the owners' blobs have moved out,
 * the free granules return to the lists, ideally as one block.
 */
#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"

/* blobs_take examines this many blocks of the request's own size class if all larger classes are
 * empty. A class holds the sizes from its lower bound up to the lower bound of the next class.
 * Below 64 granules (1 KiB) a class has a single size, so every block in it is large enough. A
 * larger request can fail although a block in the list is large enough, if that block is not among
 * those examined. */
#define OWN_CLASS_BLOCKS 32

/* Largest zone in granules: 16 MiB. */
#define ZONE_MAX ((uint32_t)1 << 20)
/* A pool has at least this many zones. */
#define ZONES 16
/* Compaction needs at least a FREE_SHARE-th of the pool as free memory. */
#define FREE_SHARE 8

#define WORD 64
/* Number of granules of a block that are prefetched: four cache lines. */
#define FETCHED_GRANULES 16

/* Number of low bits of the size that do not affect its class. The class depends on the leading 1
 * bit and the five bits after it. Below 64 granules the result is 0. */
static inline uint32_t step_bits(uint32_t granules)
{
    return 26 - (uint32_t)__builtin_clz(granules | 32);
}

/* Class of a size: first level * 32 + second level. */
static inline uint32_t class_of(uint32_t granules)
{
    uint32_t bits = step_bits(granules);
    return (bits << 5) + (granules >> bits);
}

/* Lowest class in which each block has at least `granules` granules. */
static inline uint32_t class_above(uint32_t granules)
{
    uint32_t below = ((uint32_t)1 << step_bits(granules)) - 1;
    return class_of(granules) + ((granules & below) != 0);
}

static inline struct pg_blob_free *free_at(const struct blob_pool *p, uint32_t granule)
{
    return (struct pg_blob_free *)(void *)blob_at(p, granule);
}

/* ---- the map ---------------------------------------------------------------------- */

/* Number of 64-bit words of the map. The bits past the last granule are 1, so that the last block
 * has a used neighbour on its right, as every other block has. */
uint64_t blob_map_words(uint32_t granules) { return (uint64_t)granules / WORD + 1; }

static inline bool is_used(const struct blob_pool *p, uint32_t granule)
{
    return p->map[granule / WORD] >> (granule % WORD) & 1;
}

static inline bool in_zone(const struct blob_pool *p, uint32_t granule)
{
    return granule - p->zone_begin < p->zone_end - p->zone_begin;
}

/* True if the granule belongs to a block in the lists. */
static inline bool is_listed(const struct blob_pool *p, uint32_t granule)
{
    return !is_used(p, granule) && !in_zone(p, granule);
}

/* Mask of the bits [from, from + count) of one word; count is 1 .. 64. */
static inline uint64_t word_bits(uint32_t from, uint32_t count)
{
    return ~(uint64_t)0 >> (WORD - count) << from;
}

/* Return how many of the `granules` granules from `at` on have their bits in the same word of the
 * map as granule `at`. */
static inline uint32_t in_word(uint32_t at, uint32_t granules)
{
    uint32_t space = WORD - at % WORD;
    return granules < space ? granules : space;
}

static inline void map_flip(struct blob_pool *p, uint32_t at, uint32_t granules)
{
    if (LIKELY(granules <= WORD - at % WORD)) {
        p->map[at / WORD] ^= word_bits(at % WORD, granules);
        return;
    }
    while (granules) {
        uint32_t count = in_word(at, granules);
        p->map[at / WORD] ^= word_bits(at % WORD, count);
        at += count;
        granules -= count;
    }
}

static bool map_is_clear(const struct blob_pool *p, uint32_t at, uint32_t granules)
{
    while (granules) {
        uint32_t count = in_word(at, granules);
        if (p->map[at / WORD] & word_bits(at % WORD, count))
            return false;
        at += count;
        granules -= count;
    }
    return true;
}

#ifdef PG_ASSERT_ALL
static bool map_is_set(const struct blob_pool *p, uint32_t at, uint32_t granules)
{
    for (uint32_t i = at; i < at + granules; i++)
        if (!is_used(p, i))
            return false;
    return true;
}
#endif

/* First granule of [at, end) that is used (or free, if `used` is false); `end` if there is none. */
static uint32_t map_find(const struct blob_pool *p, uint32_t at, uint32_t end, bool used)
{
    const uint64_t flip = used ? 0 : ~(uint64_t)0;
    uint64_t word = at / WORD, bits = (p->map[word] ^ flip) & ~(uint64_t)0 << (at % WORD);
    while (!bits && ++word < blob_map_words(end))
        bits = p->map[word] ^ flip;
    const uint64_t found = bits ? word * WORD + (uint32_t)__builtin_ctzll(bits) : end;
    return found < end ? (uint32_t)found : end;
}

/* Return the number of granules of the first free run in [at, end); 0 = none. Set *start to the
 * first granule of the run. */
static inline uint32_t free_run(const struct blob_pool *p, uint32_t at, uint32_t end,
                                uint32_t *start)
{
    *start = map_find(p, at, end, false);
    return map_find(p, *start, end, true) - *start;
}

/* ---- the free lists ------------------------------------------------------------------ */

static inline void link_block(struct blob_pool *p, uint32_t block, uint32_t granules)
{
    struct pg_blob_heap *heap = p->heap;
    uint32_t class = class_of(granules), head = heap->heads[class];
    struct pg_blob_free *b = free_at(p, block);

    b->size = granules;
    b->next = head;
    b->previous = PG_NIL;
    free_at(p, block + granules - 1)->size_at_end = granules;
    if (head != PG_NIL)
        free_at(p, head)->previous = block;
    heap->heads[class] = block;
    heap->second[class / 32] |= (uint32_t)1 << (class % 32);
    heap->first |= (uint32_t)1 << (class / 32);
    heap->free_blocks++;
}

static void class_emptied(struct pg_blob_heap *heap, uint32_t class)
{
    heap->second[class / 32] &= ~((uint32_t)1 << (class % 32));
    if (heap->second[class / 32] == 0)
        heap->first &= ~((uint32_t)1 << (class / 32));
}

static inline void unlink_block(struct blob_pool *p, uint32_t block)
{
    struct pg_blob_heap *heap = p->heap;
    const struct pg_blob_free *b = free_at(p, block);

    if (b->next != PG_NIL)
        free_at(p, b->next)->previous = b->previous;
    if (b->previous != PG_NIL) {
        free_at(p, b->previous)->next = b->next;
    } else {
        uint32_t class = class_of(b->size);
        heap->heads[class] = b->next;
        if (b->next == PG_NIL)
            class_emptied(heap, class);
    }
    heap->free_blocks--;
}

/* First block in the list of this class, or of the nearest larger class that has a block; PG_NIL =
 * none. */
static inline uint32_t block_from(const struct pg_blob_heap *heap, uint32_t class)
{
    uint32_t level = class / 32, bits;
    if (level >= PG_BLOB_FIRST_LEVELS)
        return PG_NIL;
    bits = heap->second[level] & ~(uint32_t)0 << (class % 32);
    if (!bits) {
        uint32_t levels = heap->first & ~(uint32_t)1 << level;
        if (!levels)
            return PG_NIL;
        level = (uint32_t)__builtin_ctz(levels);
        bits = heap->second[level];
    }
    return heap->heads[level * 32 + (uint32_t)__builtin_ctz(bits)];
}

static uint32_t block_of_own_class(const struct blob_pool *p, uint32_t granules)
{
    uint32_t block = p->heap->heads[class_of(granules)];
    for (uint32_t i = 0; block != PG_NIL && i < OWN_CLASS_BLOCKS; i++) {
        if (free_at(p, block)->size >= granules)
            return block;
        block = free_at(p, block)->next;
    }
    return PG_NIL;
}

static uint32_t block_for(const struct blob_pool *p, uint32_t granules)
{
    uint32_t block = block_from(p->heap, class_above(granules));
    return LIKELY(block != PG_NIL) ? block : block_of_own_class(p, granules);
}

/* ---- take and give ------------------------------------------------------------------- */

void blobs_init(struct blob_pool *p)
{
    blobs_rebuild_begin(p);
    blobs_rebuild_end(p);
}

bool blob_inside(const struct blob_pool *p, uint32_t blob, uint64_t bytes)
{
    return bytes <= (uint64_t)PG_GRANULE * p->granules &&
           (uint64_t)blob * PG_GRANULE <= (uint64_t)PG_GRANULE * p->granules - bytes;
}

uint64_t blobs_used(const struct blob_pool *p) { return p->heap->used; }

/* Prefetch the block that is likely to be taken next. Its first cache line is left out, because
 * unlinking the block reads that line anyway. */
static inline void next_fetch(const struct blob_pool *p, uint32_t block, uint32_t granules)
{
    const uint32_t lines = granules < FETCHED_GRANULES ? granules : FETCHED_GRANULES;
    for (uint32_t at = 4; at < lines; at += 4)
        __builtin_prefetch(blob_hint(p, block + at), 1);
}

uint32_t blobs_take(struct blob_pool *p, uint32_t granules)
{
    uint32_t block = block_for(p, granules), size;
    PG_ASSERT_IN_TESTS(granules != 0, "blobs", "a blob has bytes");
    if (UNLIKELY(block == PG_NIL))
        return PG_NIL;
    PG_ASSERT(granules <= p->granules && block <= p->granules - granules, "blobs",
              "a taken blob is inside the pool");
    PG_ASSERT_IN_TESTS(map_is_clear(p, block, granules), "blobs",
                       "the granules of a taken blob are free");
    size = free_at(p, block)->size;
    next_fetch(p, free_at(p, block)->next, granules);
    unlink_block(p, block);
    if (size > granules)
        link_block(p, block + granules, size - granules);
    map_flip(p, block, granules);
    p->heap->used += granules;
    return block;
}

/* List the free granules [start, end), joined with the listed blocks on both sides. */
static inline void list_free(struct blob_pool *p, uint32_t start, uint32_t end)
{
    if (is_listed(p, end)) {
        uint32_t right = end;
        end += free_at(p, right)->size;
        unlink_block(p, right);
    }
    if (start > 0 && is_listed(p, start - 1)) {
        start -= free_at(p, start - 1)->size_at_end;
        unlink_block(p, start);
    }
    link_block(p, start, end - start);
}

/* List those of the free granules [start, end) that are not in the zone. */
RARE static void list_outside_zone(struct blob_pool *p, uint32_t start, uint32_t end)
{
    if (start < p->zone_begin)
        list_free(p, start, p->zone_begin);
    if (end > p->zone_end)
        list_free(p, p->zone_end, end);
}

void blobs_give(struct blob_pool *p, uint32_t blob, uint32_t granules)
{
    const uint32_t end = blob + granules;

    PG_ASSERT(blob < p->granules && granules - 1 < p->granules - blob, "blobs",
              "what is given back is inside the pool");
    PG_ASSERT_IN_TESTS(map_is_set(p, blob, granules), "blobs", "a freed blob was allocated");
    map_flip(p, blob, granules);
    p->heap->used -= granules;
    if (UNLIKELY(blob < p->zone_end && end > p->zone_begin))
        list_outside_zone(p, blob, end);
    else
        list_free(p, blob, end);
}

void blobs_prefetch_give(const struct blob_pool *p, uint32_t blob, uint32_t granules)
{
    const uint64_t end = (uint64_t)blob + granules;
    if (end > p->granules)
        return;
    if (is_listed(p, (uint32_t)end))
        fetch(blob_hint(p, (uint32_t)end));
    if (blob != 0 && is_listed(p, blob - 1))
        fetch(blob_hint(p, blob - 1));
}

uint32_t blobs_copy(struct blob_pool *to, const struct blob_pool *from, uint32_t blob,
                    uint32_t granules)
{
    const uint32_t copy = blobs_take(to, granules);
    if (copy != PG_NIL)
        memcpy(blob_at(to, copy), blob_at(from, blob), (size_t)granules * PG_GRANULE);
    return copy;
}

/* ---- compaction ----------------------------------------------------------------------- */

uint32_t blobs_largest(const struct blob_pool *p)
{
    const struct pg_blob_heap *heap = p->heap;
    if (heap->first == 0)
        return 0;
    const uint32_t level = 31 - (uint32_t)__builtin_clz(heap->first);
    const uint32_t step = 31 - (uint32_t)__builtin_clz(heap->second[level]);
    return level == 0 ? step : (32 + step) << (level - 1);
}

uint32_t blobs_zone_granules(const struct blob_pool *p)
{
    return p->granules / ZONES < ZONE_MAX ? p->granules / ZONES : ZONE_MAX;
}

uint32_t blobs_goal(const struct blob_pool *p)
{
    const uint32_t zone = blobs_zone_granules(p);
    return zone < PG_BLOCK_GOAL ? zone : PG_BLOCK_GOAL;
}

bool blobs_fragmented(const struct blob_pool *p)
{
    return blobs_largest(p) < blobs_goal(p) &&
           p->granules - p->heap->used >= p->granules / FREE_SHARE;
}

bool blobs_worth_emptying(const struct blob_pool *p, uint32_t at, uint32_t granules)
{
    uint64_t used = 0;
    for (uint32_t left = granules, count; left != 0; at += count, left -= count) {
        count = in_word(at, left);
        used += (uint64_t)__builtin_popcountll(p->map[at / WORD] & word_bits(at % WORD, count));
    }
    return used * p->granules <= (uint64_t)p->heap->used * granules;
}

/* The first granule of a zone is used, so the first free granule found from zone_end on is always
 * the first granule of a listed block. */
bool blobs_zone_open(struct blob_pool *p, uint32_t at, uint32_t limit)
{
    const uint32_t used = map_find(p, at, limit, true);
    if (used == limit)
        return false;
    p->zone_begin = used;
    p->zone_end = used + 1;
    return true;
}

bool blobs_zone_grow(struct blob_pool *p, uint32_t limit, uint32_t blocks)
{
    while (p->zone_end < limit && blocks-- > 0) {
        const uint32_t start = map_find(p, p->zone_end, limit, false);
        const uint32_t end = start < limit ? start + free_at(p, start)->size : limit;
        if (start < limit)
            unlink_block(p, start);
        p->zone_end = end < limit ? end : limit;
        if (end > limit)
            link_block(p, limit, end - limit);
    }
    return p->zone_end >= limit;
}

uint32_t blobs_evacuate(struct blob_pool *p, uint32_t blob, uint32_t granules)
{
    if (blob < p->zone_begin || blob + granules > p->zone_end)
        return PG_NIL;
    return blobs_copy(p, p, blob, granules);
}

void blobs_pass_end(struct blob_pool *p)
{
    STORE_RELEASE(&p->heap->passes, p->heap->passes + 1);
    atomic_thread_fence(memory_order_release);   /* the fence precedes reuse of moved blobs */
}

bool blobs_zone_shrink(struct blob_pool *p, uint32_t blocks)
{
    while (p->zone_begin < p->zone_end && blocks-- > 0) {
        uint32_t start;
        const uint32_t granules = free_run(p, p->zone_begin, p->zone_end, &start);
        p->zone_begin = start + granules;
        if (granules != 0)
            list_free(p, start, start + granules);
    }
    if (p->zone_begin < p->zone_end)
        return false;
    p->zone_begin = p->zone_end = 0;
    return true;
}

/* ---- rebuild ------------------------------------------------------------------------- */

void blobs_rebuild_begin(struct blob_pool *p)
{
    uint64_t words = blob_map_words(p->granules);
    blobs_pass_end(p);            /* a kill may have ended a pass */
    p->zone_begin = p->zone_end = 0;
    memset(p->heap, 0, offsetof(struct pg_blob_heap, passes));
    for (uint32_t class = 0; class < PG_BLOB_CLASSES; class++)
        p->heap->heads[class] = PG_NIL;
    touch(p->map, words * sizeof *p->map);
    memset(p->map, 0, words * sizeof *p->map);
    p->map[words - 1] = ~(uint64_t)0 << (p->granules % WORD);
}

bool blobs_rebuild_mark(struct blob_pool *p, uint32_t blob, uint32_t granules)
{
    if (granules == 0 || blob >= p->granules || granules > p->granules - blob)
        return false;
    if (!map_is_clear(p, blob, granules))
        return false;
    map_flip(p, blob, granules);
    p->heap->used += granules;
    return true;
}

void blobs_rebuild_end(struct blob_pool *p)
{
    uint32_t start, granules;
    uint32_t at = 0;
    for (; (granules = free_run(p, at, p->granules, &start)) != 0; at = start + granules)
        link_block(p, start, granules);
}

/* ---- check --------------------------------------------------------------------------- */

static bool bad(struct pg_fault *fault, const char *detail, uint64_t where, uint64_t expected,
                uint64_t found)
{
    return fault_set(fault, "blobs", detail, where, expected, found);
}

/* Return the part of the next free run at or after `at` that is entirely inside or entirely outside
 * the zone; 0 = none. */
static uint32_t part_run(const struct blob_pool *p, uint32_t at, uint32_t *start)
{
    const uint32_t granules = free_run(p, at, p->granules, start), end = *start + granules;
    if (*start < p->zone_begin && end > p->zone_begin)
        return p->zone_begin - *start;
    return *start < p->zone_end && end > p->zone_end ? p->zone_end - *start : granules;
}

/* Check that the free runs of the map outside the zone match the free blocks: in the sizes at both
 * ends of each block, in number and in total size. */
static bool check_runs(const struct blob_pool *p, struct pg_fault *fault)
{
    uint64_t free = 0;
    uint32_t runs = 0, start, granules;
    uint64_t past = p->map[blob_map_words(p->granules) - 1] >> (p->granules % WORD);

    if (past != ~(uint64_t)0 >> (p->granules % WORD))
        return bad(fault, "granules past the end are not marked used", p->granules, ~(uint64_t)0,
                   past);
    for (uint32_t at = 0; (granules = part_run(p, at, &start)) != 0; at = start + granules) {
        free += granules;
        if (in_zone(p, start))
            continue;
        uint32_t size_at_end = free_at(p, start + granules - 1)->size_at_end;
        if (free_at(p, start)->size != granules)
            return bad(fault, "size at a free block's start", start, granules,
                       free_at(p, start)->size);
        if (size_at_end != granules)
            return bad(fault, "size at a free block's end", start, granules, size_at_end);
        runs++;
    }
    if (runs != p->heap->free_blocks)
        return bad(fault, "free blocks", 0, runs, p->heap->free_blocks);
    return free + p->heap->used == p->granules
        || bad(fault, "used granules of the map", 0, p->granules - free, p->heap->used);
}

/* Check that a block in a free list is the start of a free run, belongs to the class and has the
 * right back link. */
static bool check_block(const struct blob_pool *p, uint32_t class, uint32_t block,
                        uint32_t previous, struct pg_fault *fault)
{
    if (block >= p->granules)
        return bad(fault, "a free list leads outside the pool", class, p->granules, block);
    if (!is_listed(p, block) || (block > 0 && is_listed(p, block - 1)))
        return bad(fault, "a listed block is not free", block, 0, class);
    if (class_of(free_at(p, block)->size) != class)
        return bad(fault, "class of a listed block", block, class_of(free_at(p, block)->size),
                   class);
    return free_at(p, block)->previous == previous
        || bad(fault, "back link of a listed block", block, previous, free_at(p, block)->previous);
}

/* Check one free list. A block has only one back link, so the check fails at a block that is listed
 * twice. A cycle therefore fails as well, and the loop ends. */
static bool check_list(const struct blob_pool *p, uint32_t class, uint64_t *listed,
                       struct pg_fault *fault)
{
    uint32_t head = p->heap->heads[class], previous = PG_NIL;
    bool bit = p->heap->second[class / 32] >> (class % 32) & 1;

    if (bit != (head != PG_NIL))
        return bad(fault, "second-level bit of a class", class, head != PG_NIL, bit);
    for (uint32_t block = head; block != PG_NIL; block = free_at(p, block)->next) {
        if (!check_block(p, class, block, previous, fault))
            return false;
        previous = block;
        ++*listed;
    }
    return true;
}

static bool check_lists(const struct blob_pool *p, struct pg_fault *fault)
{
    uint64_t listed = 0;
    for (uint32_t level = 0; level < PG_BLOB_FIRST_LEVELS; level++) {
        bool bit = p->heap->first >> level & 1;
        if (bit != (p->heap->second[level] != 0))
            return bad(fault, "first-level bit", level, p->heap->second[level] != 0, bit);
    }
    for (uint32_t class = 0; class < PG_BLOB_CLASSES; class++)
        if (!check_list(p, class, &listed, fault))
            return false;
    return listed == p->heap->free_blocks
        || bad(fault, "blocks in the free lists", 0, p->heap->free_blocks, listed);
}

bool blobs_check(const struct blob_pool *p, uint64_t used_granules, struct pg_fault *fault)
{
    if (!check_runs(p, fault) || !check_lists(p, fault))
        return false;
    return p->heap->used == used_granules
        || bad(fault, "granules of the owners' blobs", 0, used_granules, p->heap->used);
}

/* The key index: hash -> ids, in buckets of one cache line.
 *
 * An id goes to the first bucket with an empty cell from its home on.  Every bucket that
 * it found full on the way counts it in `overflowed`, so a lookup ends at the first bucket
 * that nobody passed: at 8 of 15 cells that is the home itself for 99 of 100 keys.  Erasing
 * takes the id out of those counts again; nothing is moved and no tombstone is left.
 */
#include "core.h"

/* A bucket is read as vectors (the generic ones of GCC and Clang: compilers do not find
 * this loop's vector form by themselves). Lane 0 is the count, lane i + 1 is cell i. */
#define VECTORS 4
typedef uint32_t lanes __attribute__((vector_size(16)));
typedef int32_t truths __attribute__((vector_size(16)));   /* of each lane: -1 or 0 */

#ifdef __SSE2__
#include <emmintrin.h>

/* Bit i: lane i is true. */
static inline uint32_t bits_of(const truths t[VECTORS])
{
    const __m128i low = _mm_packs_epi32((__m128i)t[0], (__m128i)t[1]);
    const __m128i high = _mm_packs_epi32((__m128i)t[2], (__m128i)t[3]);
    return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(low, high));
}
#else
static inline uint32_t bits_of(const truths t[VECTORS])
{
    uint32_t bits = 0;
    for (unsigned i = 0; i < 4 * VECTORS; i++)
        bits |= (uint32_t)(t[i / 4][i % 4] & 1) << i;
    return bits;
}
#endif

uint32_t index_buckets(uint64_t ids)
{
    uint64_t count = (ids * 8 + sizeof(struct pg_index_bucket) - 1)
                   / sizeof(struct pg_index_bucket);
    return count ? (uint32_t)count : 1;
}

uint32_t index_id_bits(uint64_t ids)
{
    return 64 - (uint32_t)__builtin_clzll(ids | 1);
}

void index_init(struct key_index *x)
{
    memset(x->buckets, 0, (size_t)x->count * sizeof *x->buckets);
}

static inline uint32_t home_of(const struct key_index *x, uint32_t hash)
{
    return (uint32_t)((uint64_t)hash * x->count >> 32);
}

static inline uint32_t next_of(const struct key_index *x, uint32_t bucket)
{
    return bucket + 1 == x->count ? 0 : bucket + 1;
}

/* Low bits of the hash above the id; the home is made of the high ones. */
static inline uint32_t tag_of(const struct key_index *x, uint32_t hash)
{
    return hash << x->id_bits;
}

static inline uint32_t cell_of(const struct key_index *x, uint32_t hash, uint32_t id)
{
    return tag_of(x, hash) | (id + 1);
}

static inline uint32_t id_mask(const struct key_index *x)
{
    return ((uint32_t)1 << x->id_bits) - 1;
}

static inline lanes lanes_at(const struct pg_index_bucket *b, unsigned i)
{
    lanes words;
    memcpy(&words, (const char *)b + i * sizeof words, sizeof words);
    return words;
}

/* Bit i of the mask: cell i has this value. */
static inline uint32_t cells_with(const struct pg_index_bucket *b, uint32_t value)
{
    truths found[VECTORS];
    for (unsigned i = 0; i < VECTORS; i++)
        found[i] = lanes_at(b, i) == value;
    return bits_of(found) >> 1;
}

/* Bit i of the mask: cell i has this tag; if that is 0, it may be empty. */
static inline uint32_t cells_tagged(const struct pg_index_bucket *b, uint32_t tag, uint32_t mask)
{
    truths found[VECTORS];
    for (unsigned i = 0; i < VECTORS; i++)
        found[i] = (lanes_at(b, i) & ~mask) == tag;
    return bits_of(found) >> 1;
}

/* To the next bucket where an id of this home can stand; false when there is none. */
static inline bool probe_step(const struct key_index *x, struct probe *at)
{
    if (LIKELY(x->buckets[at->bucket].overflowed == 0))
        return false;
    at->bucket = next_of(x, at->bucket);
    return at->bucket != at->home;
}

/* The first candidate from at->bucket on, there among the cells of `allowed`. */
RARE static uint32_t candidate_search(const struct key_index *x, uint32_t hash, uint32_t allowed,
                                      struct probe *at)
{
    uint32_t tag = tag_of(x, hash), mask = id_mask(x);
    do {
        const struct pg_index_bucket *b = &x->buckets[at->bucket];
        for (uint32_t hits = cells_tagged(b, tag, mask) & allowed; hits; hits &= hits - 1) {
            at->cell = (uint32_t)__builtin_ctz(hits);
            if (LIKELY(b->cells[at->cell] != 0))
                return (b->cells[at->cell] & mask) - 1;
        }
        allowed = ~(uint32_t)0;
    } while (probe_step(x, at));
    return PG_NIL;
}

/* The same; nearly always the answer is in the first bucket. */
static inline uint32_t candidate(const struct key_index *x, uint32_t hash, uint32_t allowed,
                                 struct probe *at)
{
    const struct pg_index_bucket *b = &x->buckets[at->bucket];
    const uint32_t mask = id_mask(x), hits = cells_tagged(b, tag_of(x, hash), mask) & allowed;
    at->cell = (uint32_t)__builtin_ctz(hits | 1u << PG_INDEX_CELLS);
    if (LIKELY(hits == 0 && b->overflowed == 0))
        return PG_NIL;
    if (LIKELY(hits != 0 && b->cells[at->cell] != 0))
        return (b->cells[at->cell] & mask) - 1;
    return candidate_search(x, hash, allowed, at);
}

uint32_t index_first(const struct key_index *x, uint32_t hash, struct probe *at)
{
    at->home = at->bucket = home_of(x, hash);
    return candidate(x, hash, ~(uint32_t)0, at);
}

uint32_t index_next(const struct key_index *x, uint32_t hash, struct probe *at)
{
    return candidate(x, hash, ~(uint32_t)1 << at->cell, at);
}

/* Changes the count of every bucket between an id's home and where it stands. */
static inline void count_passed(struct key_index *x, uint32_t home, uint32_t bucket, uint32_t by)
{
    for (; home != bucket; home = next_of(x, home))
        x->buckets[home].overflowed += by;
}

uint32_t index_insert(struct key_index *x, uint32_t hash, uint32_t id)
{
    uint32_t home = home_of(x, hash), bucket = home, empty;
    while (UNLIKELY((empty = cells_with(&x->buckets[bucket], 0)) == 0)) {
        bucket = next_of(x, bucket);
        if (bucket == home)
            return PG_NIL;
    }
    const uint32_t cell = (uint32_t)__builtin_ctz(empty);
    x->buckets[bucket].cells[cell] = cell_of(x, hash, id);
    count_passed(x, home, bucket, 1);
    return bucket * (PG_INDEX_CELLS + 1) + cell;
}

bool index_find_id(const struct key_index *x, uint32_t hash, uint32_t id, struct probe *at)
{
    at->home = at->bucket = home_of(x, hash);
    do {
        uint32_t hits = cells_with(&x->buckets[at->bucket], cell_of(x, hash, id));
        if (hits) {
            at->cell = (uint32_t)__builtin_ctz(hits);
            return true;
        }
    } while (probe_step(x, at));
    return false;
}

void index_replace(struct key_index *x, uint32_t hash, const struct probe *at, uint32_t id)
{
    x->buckets[at->bucket].cells[at->cell] = cell_of(x, hash, id);
}

void index_erase(struct key_index *x, const struct probe *at)
{
    x->buckets[at->bucket].cells[at->cell] = 0;
    count_passed(x, at->home, at->bucket, (uint32_t)-1);
}

void index_erase_at(struct key_index *x, uint32_t hash, uint32_t place)
{
    const uint32_t bucket = place / (PG_INDEX_CELLS + 1), cell = place % (PG_INDEX_CELLS + 1);
    index_erase(x, &(struct probe){home_of(x, hash), bucket, cell});
}

/* Ids in one bucket, or PG_NIL when a cell holds a tag without an id. */
static uint32_t bucket_ids(const struct key_index *x, const struct pg_index_bucket *b)
{
    uint32_t ids = 0;
    for (uint32_t i = 0; i < PG_INDEX_CELLS; i++) {
        if (b->cells[i] && !(b->cells[i] & id_mask(x)))
            return PG_NIL;
        ids += b->cells[i] != 0;
    }
    return ids;
}

bool index_check(const struct key_index *x, uint64_t ids, struct pg_fault *fault)
{
    uint64_t found = 0;
    for (uint32_t i = 0; i < x->count; i++) {
        const struct pg_index_bucket *b = &x->buckets[i];
        uint32_t before = x->buckets[i ? i - 1 : x->count - 1].overflowed;
        uint32_t here = bucket_ids(x, b);
        if (here == PG_NIL)
            return fault_set(fault, "index", "a cell holds a tag without an id", i, 0, 0);
        /* Who passed the bucket before stands here or passed this one too. */
        if (before > (uint64_t)b->overflowed + here)
            return fault_set(fault, "index", "ids passed a bucket and stand nowhere", i,
                             (uint64_t)b->overflowed + here, before);
        if (b->overflowed > ids)
            return fault_set(fault, "index", "more ids passed a bucket than there are", i, ids,
                             b->overflowed);
        found += here;
    }
    return found == ids || fault_set(fault, "index", "ids in the index", 0, ids, found);
}

/* index.h - the key index: which slots may hold a key.
 *
 * The common case, a key in its home bucket, is inline; index.c handles all other cases. */
#ifndef PURGATORYD_BASE_INDEX_H
#define PURGATORYD_BASE_INDEX_H

#include "core/base/common.h"

struct key_index {
    struct pg_index_bucket *buckets;
    uint32_t count;               /* number of buckets */
    /* Number of low bits of a cell that hold id + 1. An empty cell is 0. */
    uint32_t id_bits;
};

/* Position of a candidate in the index. index_next, index_replace and index_erase need it. */
struct probe {
    uint32_t home, bucket, cell;
};

/* Number of buckets that `ids` ids need: 8 bytes per id. */
uint32_t index_buckets(uint64_t ids);
/* Number of bits that id + 1 needs if every id is below `ids`. */
uint32_t index_id_bits(uint64_t ids);
/* Make the index empty. */
void index_init(struct key_index *x);
/* Next candidate after the candidate that index_first or index_next returned last; PG_NIL =
 * none. */
uint32_t index_next(const struct key_index *x, uint32_t hash, struct probe *at);
/* Find the cell of this id. Return false if the index does not contain the id. */
bool index_find_id(const struct key_index *x, uint32_t hash, uint32_t id, struct probe *at);
/* Replace the id in the cell of a candidate by another id with the same hash. */
void index_replace(struct key_index *x, uint32_t hash, const struct probe *at, uint32_t id);
/* Erase a candidate. No other id moves. */
void index_erase(struct key_index *x, const struct probe *at);
static inline void index_prefetch(const struct key_index *x, uint32_t hash)
{
    fetch(&x->buckets[((uint64_t)hash * x->count) >> 32]);
}
/* Check overflow counts and bounds, and that the index holds `ids` ids. Keys are not compared. */
bool index_check(const struct key_index *x, uint64_t ids, struct pg_fault *fault);
/* A bucket is read with the vector extensions of GCC and Clang, because neither compiler vectorizes
 * a loop over its cells. Lane 0 is `overflowed`; lane i + 1 is cell i. */
#define VECTORS 4
typedef uint32_t lanes __attribute__((vector_size(16)));
/* Result of a comparison, per lane: -1 = equal, 0 = not equal. */
typedef int32_t truths __attribute__((vector_size(16)));

#ifdef __SSE2__
#include <emmintrin.h>

/* Bit mask of the lanes that are true. */
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

static inline uint32_t index_home(const struct key_index *x, uint32_t hash)
{
    return (uint32_t)((uint64_t)hash * x->count >> 32);
}

static inline uint32_t index_after(const struct key_index *x, uint32_t bucket)
{
    return bucket + 1 == x->count ? 0 : bucket + 1;
}

/* Tag of a hash: its low bits, shifted left so that the id fits below. The high bits of the hash
 * select the home bucket. */
static inline uint32_t index_tag(const struct key_index *x, uint32_t hash)
{
    return hash << x->id_bits;
}

static inline uint32_t index_cell(const struct key_index *x, uint32_t hash, uint32_t id)
{
    return index_tag(x, hash) | (id + 1);
}

static inline uint32_t index_mask(const struct key_index *x)
{
    return ((uint32_t)1 << x->id_bits) - 1;
}

static inline lanes lanes_at(const struct pg_index_bucket *b, unsigned i)
{
    lanes words;
    memcpy(&words, (const char *)b + i * sizeof words, sizeof words);
    return words;
}

/* Mask of the cells that have this value: bit i is cell i. */
static inline uint32_t cells_with(const struct pg_index_bucket *b, uint32_t value)
{
    truths found[VECTORS];
    for (unsigned i = 0; i < VECTORS; i++)
        found[i] = lanes_at(b, i) == value;
    return bits_of(found) >> 1;
}

/* Mask of the cells that have this tag: bit i is cell i. With tag 0 the mask includes empty
 * cells. */
static inline uint32_t cells_tagged(const struct pg_index_bucket *b, uint32_t tag, uint32_t mask)
{
    truths found[VECTORS];
    for (unsigned i = 0; i < VECTORS; i++)
        found[i] = (lanes_at(b, i) & ~mask) == tag;
    return bits_of(found) >> 1;
}

/* First candidate from at->bucket on. In bucket at->bucket only the cells in `allowed` are
 * searched. */
uint32_t index_search(const struct key_index *x, uint32_t hash, uint32_t allowed,
                      struct probe *at);
/* Do what index_insert does, for an id whose home bucket is full. */
uint32_t index_insert_beyond(struct key_index *x, uint32_t hash, uint32_t id);
/* Correct the overflow counts after an id was erased outside of its home bucket. */
void index_erase_beyond(struct key_index *x, uint32_t home, uint32_t bucket);

/* Return the first slot whose tag matches, or PG_NIL. index_next returns the further slots.
 * Different keys can have the same tag, so the caller compares the keys. */
static inline uint32_t index_first(const struct key_index *x, uint32_t hash, struct probe *at)
{
    at->home = at->bucket = index_home(x, hash);
    const struct pg_index_bucket *b = &x->buckets[at->bucket];
    const uint32_t hits = cells_tagged(b, index_tag(x, hash), index_mask(x));
    if (LIKELY(hits == 0 && b->overflowed == 0))
        return PG_NIL;
    at->cell = (uint32_t)__builtin_ctz(hits | 1u << PG_INDEX_CELLS);
    if (LIKELY(hits != 0 && b->cells[at->cell] != 0))
        return (b->cells[at->cell] & index_mask(x)) - 1;
    return index_search(x, hash, ~(uint32_t)0, at);
}

static inline void index_erase_at(struct key_index *x, uint32_t hash, uint32_t place)
{
    const uint32_t home = index_home(x, hash), bucket = place / (PG_INDEX_CELLS + 1);
    x->buckets[bucket].cells[place % (PG_INDEX_CELLS + 1)] = 0;
    if (UNLIKELY(bucket != home))
        index_erase_beyond(x, home, bucket);
}

/* Insert an id. Return the place of the id, which index_erase_at takes, or PG_NIL if the index is
 * full. The place stays valid until the id is erased. */
static inline uint32_t index_insert(struct key_index *x, uint32_t hash, uint32_t id)
{
    const uint32_t home = index_home(x, hash), empty = cells_with(&x->buckets[home], 0);
    if (UNLIKELY(empty == 0))
        return index_insert_beyond(x, hash, id);
    const uint32_t cell = (uint32_t)__builtin_ctz(empty);
    x->buckets[home].cells[cell] = index_cell(x, hash, id);
    return home * (PG_INDEX_CELLS + 1) + cell;
}

#endif

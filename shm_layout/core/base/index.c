/* index.c - the key index: hash to ids, in buckets of one cache line.
 *
 * An id goes to the first bucket with an empty cell, starting at its home bucket. Each full bucket
 * on the way counts that id in `overflowed`. A lookup therefore ends at the first bucket with
 * `overflowed` 0. If 8 of 15 cells are used, the lookup ends in the home bucket for 99 of 100 keys.
 * Erasing an id decrements the counts that its insertion incremented; no other id moves, and no
 * tombstone is left.
 */
#include "core/base/index.h"
#include "core/base/check.h"
#include "core/base/common.h"

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
    const size_t bytes = (size_t)x->count * sizeof *x->buckets;
    touch(x->buckets, bytes);
    memset(x->buckets, 0, bytes);
}

/* Move to the next bucket that can hold an id with the same home bucket. Return false if there is
 * none. */
static inline bool probe_step(const struct key_index *x, struct probe *at)
{
    if (LIKELY(x->buckets[at->bucket].overflowed == 0))
        return false;
    at->bucket = index_after(x, at->bucket);
    return at->bucket != at->home;
}

uint32_t index_search(const struct key_index *x, uint32_t hash, uint32_t allowed,
                      struct probe *at)
{
    uint32_t tag = index_tag(x, hash), mask = index_mask(x);
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

uint32_t index_next(const struct key_index *x, uint32_t hash, struct probe *at)
{
    return index_search(x, hash, ~(uint32_t)1 << at->cell, at);
}

/* Add `by` to the overflow count of each bucket from an id's home bucket to the one before the
 * bucket that holds the id. */
static inline void count_passed(struct key_index *x, uint32_t home, uint32_t bucket, uint32_t by)
{
    for (; home != bucket; home = index_after(x, home))
        x->buckets[home].overflowed += by;
}

RARE uint32_t index_insert_beyond(struct key_index *x, uint32_t hash, uint32_t id)
{
    uint32_t home = index_home(x, hash), bucket = home, empty;
    while ((empty = cells_with(&x->buckets[bucket], 0)) == 0) {
        bucket = index_after(x, bucket);
        if (bucket == home)
            return PG_NIL;
    }
    const uint32_t cell = (uint32_t)__builtin_ctz(empty);
    x->buckets[bucket].cells[cell] = index_cell(x, hash, id);
    count_passed(x, home, bucket, 1);
    return bucket * (PG_INDEX_CELLS + 1) + cell;
}

bool index_find_id(const struct key_index *x, uint32_t hash, uint32_t id, struct probe *at)
{
    at->home = at->bucket = index_home(x, hash);
    do {
        uint32_t hits = cells_with(&x->buckets[at->bucket], index_cell(x, hash, id));
        if (hits) {
            at->cell = (uint32_t)__builtin_ctz(hits);
            return true;
        }
    } while (probe_step(x, at));
    return false;
}

void index_replace(struct key_index *x, uint32_t hash, const struct probe *at, uint32_t id)
{
    x->buckets[at->bucket].cells[at->cell] = index_cell(x, hash, id);
}

void index_erase(struct key_index *x, const struct probe *at)
{
    x->buckets[at->bucket].cells[at->cell] = 0;
    count_passed(x, at->home, at->bucket, (uint32_t)-1);
}

RARE void index_erase_beyond(struct key_index *x, uint32_t home, uint32_t bucket)
{
    count_passed(x, home, bucket, (uint32_t)-1);
}

/* Number of ids in one bucket; PG_NIL if a cell holds a tag without an id. */
static uint32_t bucket_ids(const struct key_index *x, const struct pg_index_bucket *b)
{
    uint32_t ids = 0;
    for (uint32_t i = 0; i < PG_INDEX_CELLS; i++) {
        if (b->cells[i] && !(b->cells[i] & index_mask(x)))
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
        /* An id that overflowed the previous bucket is in this bucket or has overflowed it as
         * well. */
        if (before > (uint64_t)b->overflowed + here)
            return fault_set(fault, "index",
                             "more ids overflowed a bucket than the next one accounts for",
                             i, (uint64_t)b->overflowed + here, before);
        if (b->overflowed > ids)
            return fault_set(fault, "index", "more ids overflowed a bucket than exist", i, ids,
                             b->overflowed);
        found += here;
    }
    return found == ids || fault_set(fault, "index", "ids in the index", 0, ids, found);
}

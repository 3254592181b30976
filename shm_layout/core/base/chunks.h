/* chunks.h - the memory of a wheel, and the pool of its chunks. */
#ifndef PURGATORYD_BASE_CHUNKS_H
#define PURGATORYD_BASE_CHUNKS_H

#include "core/base/check.h"
#include "core/base/common.h"

struct wheel {
    struct pg_wheel *state;
    struct pg_bucket *buckets;
    struct pg_chunk *chunks;
    uint32_t *free_chunks;        /* free_chunks[0] = number of free chunks */
    /* The wheel reads deadline_ns and slack of each slot, and owns its `where` and `bucket`. */
    struct pg_hot *hot;
    uint32_t capacity;            /* slots */
    uint32_t topics;              /* number of backlogs; 0 for a wheel outside of an arena */
    struct pg_backlog *backlogs;  /* one per topic (backlog.h) */
};

enum { CHUNK_WORDS = 16 };        /* number of 32-bit words in a chunk; word 0 is `previous` */
/* Take a free chunk. wheel_chunks() guarantees that one is free. */
static inline uint32_t chunk_take(struct wheel *w)
{
    PG_ASSERT(w->free_chunks[0] != 0, "wheel", "a free chunk is left");
    return w->free_chunks[w->free_chunks[0]--];
}
static inline void chunk_give(struct wheel *w, uint32_t chunk)
{
    PG_ASSERT(w->free_chunks[0] < w->state->chunk_count, "wheel",
              "no chunk is given back twice");
    w->free_chunks[++w->free_chunks[0]] = chunk;
}

#endif

/* Test the blob allocator against a plain list of owners. With the argument "bench", print times
 * instead. */
#include "bench.h"
#include "check.h"
#include "core/core.h"

/* Size of the largest blob in granules: its key, payload and extension have their maximum
 * lengths. */
#define LARGEST 4113

struct blob {
    uint32_t at, granules;
    uint8_t fill;
};

/* The phases of the model: each names what the next call of model_compact does. */
enum phase { OPEN, GROW, MOVE, SHRINK };

struct model {
    struct blob_pool pool;
    struct blob *blobs;
    uint32_t count;
    uint32_t used;
    enum phase phase;
    uint32_t limit;               /* granule at which the zone may end */
    uint32_t moved;               /* blobs that compaction moved */
};

static struct model model_new(uint32_t granules)
{
    struct model m = {.pool = {.granules = granules}};
    uint64_t words = blob_map_words(granules);
    m.pool.heap = malloc(sizeof *m.pool.heap);
    m.pool.map = malloc(words * sizeof *m.pool.map);
    m.pool.bytes = malloc((size_t)granules * PG_GRANULE);
    m.blobs = calloc(granules, sizeof *m.blobs);
    CHECK(m.pool.heap && m.pool.map && m.pool.bytes && m.blobs);
    memset(m.pool.heap, 0xa5, sizeof *m.pool.heap);
    memset(m.pool.map, 0xa5, words * sizeof *m.pool.map);
    blobs_init(&m.pool);
    return m;
}

static void model_free(struct model *m)
{
    free(m->pool.heap);
    free(m->pool.map);
    free(m->pool.bytes);
    free(m->blobs);
}

static void model_check(const struct model *m)
{
    struct pg_fault fault = {0};
    if (!blobs_check(&m->pool, m->used, &fault))
        fprintf(stderr, "%s at %" PRIu64 ": %" PRIu64 ", not %" PRIu64 "\n", fault.detail,
                fault.where, fault.found, fault.expected);
    CHECK(fault.detail[0] == 0);
    CHECK_EQUAL(blobs_used(&m->pool), m->used);
}

/* Return the length of the longest free run outside the zone, in granules. */
static uint32_t longest_run(const struct model *m)
{
    uint32_t longest = 0, run = 0;
    bool *used = calloc(m->pool.granules, sizeof *used);
    CHECK(used);
    for (uint32_t i = 0; i < m->count; i++)
        memset(used + m->blobs[i].at, true, m->blobs[i].granules);
    memset(used + m->pool.zone_begin, true, m->pool.zone_end - m->pool.zone_begin);
    for (uint32_t g = 0; g < m->pool.granules; g++) {
        run = used[g] ? 0 : run + 1;
        longest = run > longest ? run : longest;
    }
    free(used);
    return longest;
}

/* Take a blob. The pool may refuse it only if no free run is long enough. This rule is exact only
 * while each size class lists fewer than 32 free blocks. */
static bool model_take(struct model *m, uint32_t granules, uint8_t fill)
{
    uint32_t at = blobs_take(&m->pool, granules);
    if (at == PG_NIL) {
        CHECK(longest_run(m) < granules);
        return false;
    }
    CHECK(at < m->pool.granules && granules <= m->pool.granules - at);
    memset(blob_at(&m->pool, at), fill, (size_t)granules * PG_GRANULE);
    m->blobs[m->count++] = (struct blob){at, granules, fill};
    m->used += granules;
    return true;
}

/* Free a blob. Check first that its bytes are unchanged, which shows that no other blob overlaps
 * it. */
static void model_give(struct model *m, uint32_t index)
{
    struct blob b = m->blobs[index];
    const uint8_t *bytes = blob_at(&m->pool, b.at);
    for (size_t i = 0; i < (size_t)b.granules * PG_GRANULE; i++)
        CHECK(bytes[i] == b.fill);
    blobs_give(&m->pool, b.at, b.granules);
    m->blobs[index] = m->blobs[--m->count];
    m->used -= b.granules;
}

static void model_move(struct model *m, struct blob *b)
{
    const uint32_t old = b->at, copy = blobs_evacuate(&m->pool, old, b->granules);
    if (copy == PG_NIL)
        return;
    b->at = copy;
    blobs_give(&m->pool, old, b->granules);
    m->moved++;
}

/* Do one act of a compaction: open a random zone, take a free block into it, move a blob, end the
 * pass, or return a free block. */
static void model_compact(struct model *m, struct rng *r)
{
    const uint32_t at = (uint32_t)rng_below(r, m->pool.granules);
    switch (m->phase) {
    case OPEN:
        m->limit = at + 1 + (uint32_t)rng_below(r, m->pool.granules - at);
        m->phase = blobs_zone_open(&m->pool, at, m->limit) ? GROW : OPEN;
        break;
    case GROW: m->phase = blobs_zone_grow(&m->pool, m->limit, 1) ? MOVE : GROW; break;
    case MOVE:
        for (uint32_t i = 0; i < m->count; i += 1 + (uint32_t)rng_below(r, 4))
            model_move(m, &m->blobs[i]);
        m->phase = rng_below(r, 4) ? MOVE : SHRINK;
        if (m->phase == SHRINK)
            blobs_pass_end(&m->pool);
        break;
    case SHRINK: m->phase = blobs_zone_shrink(&m->pool, 1) ? OPEN : SHRINK; break;
    }
}

static void model_empty(struct model *m)
{
    while (!blobs_zone_shrink(&m->pool, 1))
        continue;
    while (m->count)
        model_give(m, m->count - 1);
    model_check(m);
    CHECK_EQUAL(m->pool.heap->free_blocks, 1);
}

/* Destroy the derived state, as after a crash, and rebuild it from the blobs. */
static void model_rebuild(struct model *m)
{
    memset(m->pool.heap, 0x5a, sizeof *m->pool.heap);
    memset(m->pool.map, 0x5a, blob_map_words(m->pool.granules) * sizeof *m->pool.map);
    blobs_rebuild_begin(&m->pool);
    m->phase = OPEN;
    for (uint32_t i = 0; i < m->count; i++)
        CHECK(blobs_rebuild_mark(&m->pool, m->blobs[i].at, m->blobs[i].granules));
    blobs_rebuild_end(&m->pool);
    model_check(m);
}

/* Return a random size: usually a small one, sometimes any size up to `largest`. */
static uint32_t random_size(struct rng *r, uint32_t largest)
{
    uint32_t bound = rng_below(r, 8) ? (largest < 6 ? largest : 6) : largest;
    return 1 + (uint32_t)rng_below(r, bound);
}

/* Run random acts. One act in `compact` is an act of a compaction; 0 = none. */
static uint32_t model_run_acts(uint32_t granules, uint32_t largest, uint32_t steps,
                               uint32_t compact)
{
    struct model m = model_new(granules);
    struct rng r = {granules * 31u + largest};
    for (uint32_t step = 0; step < steps; step++) {
        bool grow = rng_below(&r, 100) < (step / 512 % 2 ? 75 : 35);
        if (compact != 0 && rng_below(&r, compact) == 0)
            model_compact(&m, &r);
        else if (grow || m.count == 0)
            model_take(&m, random_size(&r, largest), (uint8_t)step);
        else
            model_give(&m, (uint32_t)rng_below(&r, m.count));
        if (step % 64 == 0)
            model_check(&m);
        if (step % 2048 == 2047)
            model_rebuild(&m);
    }
    model_empty(&m);
    model_free(&m);
    return m.moved;
}

static void model_run(uint32_t granules, uint32_t largest, uint32_t steps)
{
    model_run_acts(granules, largest, steps, 0);
}

/* Blobs come and go between any two acts of a compaction. Compaction changes no blob. */
static void test_random_compactions(void)
{
    static const uint32_t pools[] = {1, 2, 17, 64, 65, 129, 500, 1920};
    uint32_t moved = 0;
    for (size_t i = 0; i < sizeof pools / sizeof *pools; i++) {
        moved += model_run_acts(pools[i], 1 + pools[i] / 8, 20000, 2);
        moved += model_run_acts(pools[i], 1 + pools[i] / 8, 20000, 8);
        moved += model_run_acts(pools[i], 1 + pools[i] / 64, 20000, 2);
    }
    CHECK(moved > 1000);
}

static void test_random_tiny_pools(void)
{
    static const uint32_t pools[] = {1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 500, 1920};
    for (size_t i = 0; i < sizeof pools / sizeof *pools; i++) {
        model_run(pools[i], 1, 5000);
        model_run(pools[i], pools[i], 10000);
        model_run(pools[i], 1 + pools[i] / 8, 20000);
    }
}

/* A request fits into an empty pool that is exactly as large as the request, no matter how the size
 * class of the request is rounded. */
static void test_exact_fit(void)
{
    for (uint32_t granules = 1; granules <= LARGEST; granules += granules < 300 ? 1 : 37) {
        struct model m = model_new(granules);
        CHECK(!model_take(&m, granules + 1, 1));
        CHECK(model_take(&m, granules, 2));
        CHECK(!model_take(&m, 1, 3));
        model_check(&m);
        model_empty(&m);
        model_free(&m);
    }
}

/* Fill a pool with blobs of one granule. Freeing every second blob leaves no hole for a larger one;
 * freeing the rest joins all holes into one block. */
static void test_fragmentation_and_joining(void)
{
    struct model m = model_new(256);
    for (uint32_t i = 0; i < 256; i++)
        CHECK(model_take(&m, 1, (uint8_t)i));
    for (uint32_t i = 0; i < 256; i += 2)
        blobs_give(&m.pool, i, 1);
    m.used = 128;
    model_check(&m);
    CHECK_EQUAL(m.pool.heap->free_blocks, 128);
    CHECK_EQUAL(blobs_take(&m.pool, 2), PG_NIL);
    for (uint32_t i = 1; i < 256; i += 2)
        blobs_give(&m.pool, i, 1);
    m.used = m.count = 0;
    model_empty(&m);
    model_free(&m);
}

/* Make free blocks of 64 granules, and one of 65 at position `depth` in the list of their common
 * size class. Return whether a request for 65 granules finds that block. */
static bool finds_exact_fit_at(uint32_t depth)
{
    uint32_t blocks = 40, stride = 66, exact = blocks - 1 - depth;
    struct model m = model_new(blocks * stride);
    bool found;

    blobs_rebuild_begin(&m.pool);
    for (uint32_t i = 0; i < blocks; i++) {
        uint32_t wall = i == exact ? 1 : 2;
        CHECK(blobs_rebuild_mark(&m.pool, (i + 1) * stride - wall, wall));
        m.used += wall;
    }
    blobs_rebuild_end(&m.pool);
    model_check(&m);
    found = blobs_take(&m.pool, 65) == exact * stride;
    m.used += found ? 65 : 0;
    model_check(&m);
    model_free(&m);
    return found;
}

/* Test the documented limit of the search in the list of the request's own size class. */
static void test_own_class_bound(void)
{
    CHECK(finds_exact_fit_at(0));
    CHECK(finds_exact_fit_at(31));
    CHECK(!finds_exact_fit_at(32));
}

static void test_mark_refuses(void)
{
    struct model m = model_new(200);
    blobs_rebuild_begin(&m.pool);
    CHECK(blobs_rebuild_mark(&m.pool, 60, 80));
    CHECK(!blobs_rebuild_mark(&m.pool, 139, 1));
    CHECK(!blobs_rebuild_mark(&m.pool, 0, 61));
    CHECK(!blobs_rebuild_mark(&m.pool, 100, 100));
    CHECK(!blobs_rebuild_mark(&m.pool, 0, 0));
    CHECK(!blobs_rebuild_mark(&m.pool, 0, 201));
    CHECK(!blobs_rebuild_mark(&m.pool, 199, 2));
    CHECK(!blobs_rebuild_mark(&m.pool, 200, 1));
    CHECK(!blobs_rebuild_mark(&m.pool, PG_NIL, 1));
    CHECK(!blobs_rebuild_mark(&m.pool, 150, PG_NIL));
    CHECK(blobs_rebuild_mark(&m.pool, 140, 60));
    CHECK(blobs_rebuild_mark(&m.pool, 0, 60));
    blobs_rebuild_end(&m.pool);
    m.used = 200;
    model_check(&m);
    CHECK_EQUAL(m.pool.heap->free_blocks, 0);
    model_free(&m);
}

/* The words of the allocator that the test damages, one at a time. The pool has free blocks of 2
 * granules at 0 (listed second) and at 4 (listed first), and one of 56 granules at 8. */
enum spoilt { SIZE, SIZE_AT_END, BACK_LINK, LOOP, OUTSIDE, MAP_BIT, PAST_END, FIRST, SECOND, USED,
              BLOCKS };

static void spoil(struct blob_pool *p, enum spoilt detail)
{
    struct pg_blob_free *bytes = (struct pg_blob_free *)(void *)p->bytes;
    switch (detail) {
    case SIZE: bytes[8].size = 55; break;
    case SIZE_AT_END: bytes[63].size_at_end = 55; break;
    case BACK_LINK: bytes[0].previous = 8; break;
    case LOOP: bytes[0].next = 4; break;
    case OUTSIDE: bytes[0].next = 64; break;
    case MAP_BIT: p->map[0] ^= 4; break;
    case PAST_END: p->map[1] = 0; break;
    case FIRST: p->heap->first ^= 4; break;
    case SECOND: p->heap->second[0] ^= 8; break;
    case USED: p->heap->used--; break;
    case BLOCKS: p->heap->free_blocks++; break;
    }
}

static void expect_fault(enum spoilt detail, uint64_t used, const char *message)
{
    struct model m = model_new(64);
    struct pg_fault fault = {0};
    CHECK(model_take(&m, 8, 0));
    blobs_give(&m.pool, 0, 2);
    blobs_give(&m.pool, 4, 2);
    m.used = 4;
    model_check(&m);
    spoil(&m.pool, detail);
    CHECK(!blobs_check(&m.pool, used, &fault));
    CHECK(strcmp(fault.part, "blobs") == 0);
    if (strcmp(fault.detail, message) != 0)
        fprintf(stderr, "found: %s\n", fault.detail);
    CHECK(strcmp(fault.detail, message) == 0);
    model_free(&m);
}

static void test_check_names_the_fault(void)
{
    expect_fault(SIZE, 4, "size at a free block's start");
    expect_fault(SIZE_AT_END, 4, "size at a free block's end");
    expect_fault(BACK_LINK, 4, "back link of a listed block");
    expect_fault(LOOP, 4, "back link of a listed block");
    expect_fault(OUTSIDE, 4, "a free list leads outside the pool");
    expect_fault(MAP_BIT, 4, "size at a free block's start");
    expect_fault(PAST_END, 4, "granules past the end are not marked used");
    expect_fault(FIRST, 4, "first-level bit");
    expect_fault(SECOND, 4, "second-level bit of a class");
    expect_fault(USED, 4, "used granules of the map");
    expect_fault(BLOCKS, 4, "free blocks");
}

/* Measure times with blobs of 64 bytes: fill the pool, replace random blobs while an eighth of the
 * pool is free, and rebuild. */
static void bench(uint32_t blobs)
{
    struct model m = model_new(blobs * 4);
    uint32_t *at = calloc(blobs, sizeof *at), iterations = 1000000, live = blobs - blobs / 8;
    struct rng r = {1};
    double since;

    CHECK(at);
    memset(m.pool.bytes, 1, (size_t)blobs * 64);
    blobs_init(&m.pool);
    since = bench_now_ns();
    for (uint32_t i = 0; i < blobs; i++)
        at[i] = blobs_take(&m.pool, 4);
    bench_print("take, fresh", since, blobs);
    for (uint32_t i = blobs - 1; i > 0; i--) {
        uint32_t other = (uint32_t)rng_below(&r, i + 1), swap = at[i];
        at[i] = at[other];
        at[other] = swap;
    }
    since = bench_now_ns();
    for (uint32_t i = live; i < blobs; i++)
        blobs_give(&m.pool, at[i], 4);
    bench_print("give, random", since, blobs - live);
    since = bench_now_ns();
    for (uint32_t i = 0; i < iterations; i++) {
        uint32_t victim = (uint32_t)rng_below(&r, live);
        blobs_give(&m.pool, at[victim], 4);
        at[victim] = blobs_take(&m.pool, 4);
    }
    bench_print("give + take, random", since, iterations);
    since = bench_now_ns();
    blobs_rebuild_begin(&m.pool);
    for (uint32_t i = 0; i < live; i++)
        CHECK(blobs_rebuild_mark(&m.pool, at[i], 4));
    bench_print("rebuild, mark", since, live);
    since = bench_now_ns();
    blobs_rebuild_end(&m.pool);
    bench_print("rebuild, end, per free block", since, m.pool.heap->free_blocks);
    m.used = live * 4;
    model_check(&m);
    free(at);
    model_free(&m);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "bench") == 0) {
        bench(argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 1000000);
        return 0;
    }
    RUN(test_random_tiny_pools);
    RUN(test_random_compactions);
    RUN(test_exact_fit);
    RUN(test_fragmentation_and_joining);
    RUN(test_own_class_bound);
    RUN(test_mark_refuses);
    RUN(test_check_names_the_fault);
    return 0;
}

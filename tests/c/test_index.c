/* Test the key index against a table of its ids. With the argument "bench", print times instead. */
#include "bench.h"
#include "check.h"
#include "core/core.h"

/* Expected content of the index: the hash of each id, and whether the index contains the id. */
struct model {
    struct key_index x;
    uint32_t ids;
    uint32_t *hashes;
    bool *in;
    uint32_t count;
};

static struct model model_new(uint32_t ids, uint32_t buckets)
{
    struct model m = {.x = {.count = buckets, .id_bits = index_id_bits(ids)}, .ids = ids};
    m.x.buckets = aligned_alloc(64, buckets * sizeof *m.x.buckets);
    m.hashes = calloc(ids, sizeof *m.hashes);
    m.in = calloc(ids, sizeof *m.in);
    CHECK(m.x.buckets && m.hashes && m.in);
    index_init(&m.x);
    return m;
}

static void model_free(struct model *m)
{
    free(m->x.buckets);
    free(m->hashes);
    free(m->in);
}

static bool model_insert(struct model *m, uint32_t id, uint32_t hash)
{
    if (index_insert(&m->x, hash, id) == PG_NIL)
        return false;
    m->hashes[id] = hash;
    m->in[id] = true;
    m->count++;
    return true;
}

static void model_erase(struct model *m, uint32_t id)
{
    struct probe at;
    CHECK(index_find_id(&m->x, m->hashes[id], id, &at));
    index_erase(&m->x, &at);
    CHECK(!index_find_id(&m->x, m->hashes[id], id, &at));
    m->in[id] = false;
    m->count--;
}

/* Return true if the id is among the candidates for its hash. Check that every candidate is in the
 * index and appears once. */
static bool is_candidate(const struct model *m, uint32_t id)
{
    struct probe at;
    uint32_t found = 0, steps = 0;
    for (uint32_t c = index_first(&m->x, m->hashes[id], &at); c != PG_NIL;
         c = index_next(&m->x, m->hashes[id], &at)) {
        CHECK(c < m->ids && m->in[c]);
        CHECK(++steps <= m->count);
        found += c == id;
    }
    CHECK(found <= 1);
    return found == 1;
}

/* Check that all ids are found, and that every bucket's overflow count is the number of ids that
 * were stored in a later bucket because this one was full. */
static void model_check(const struct model *m)
{
    struct pg_fault fault = {0};
    uint32_t *passed = calloc(m->x.count, sizeof *passed);
    CHECK(passed);
    CHECK(index_check(&m->x, m->count, &fault));
    for (uint32_t id = 0; id < m->ids; id++) {
        struct probe at;
        CHECK(is_candidate(m, id) == m->in[id]);
        CHECK(index_find_id(&m->x, m->hashes[id], id, &at) == m->in[id]);
        for (uint32_t b = at.home; m->in[id] && b != at.bucket; b = (b + 1) % m->x.count)
            passed[b]++;
    }
    for (uint32_t b = 0; b < m->x.count; b++)
        CHECK_EQUAL(m->x.buckets[b].overflowed, passed[b]);
    free(passed);
}

/* Make one random change: insert an id, erase an id, or give the cell of an id to another id with
 * the same hash. */
static void model_step(struct model *m, struct rng *r, uint32_t hash_mask)
{
    uint32_t id = (uint32_t)rng_below(r, m->ids), other = (uint32_t)rng_below(r, m->ids);
    struct probe at;
    if (!m->in[id]) {
        bool space = m->count < m->x.count * PG_INDEX_CELLS;
        CHECK(model_insert(m, id, (uint32_t)rng_next(r) & hash_mask) == space);
    } else if (!m->in[other] && rng_below(r, 4) == 0) {
        CHECK(index_find_id(&m->x, m->hashes[id], id, &at));
        index_replace(&m->x, m->hashes[id], &at, other);
        m->hashes[other] = m->hashes[id];
        m->in[id] = false;
        m->in[other] = true;
    } else {
        model_erase(m, id);
    }
}

static void model_run(uint32_t ids, uint32_t buckets, uint32_t hash_mask, uint32_t steps)
{
    struct model m = model_new(ids, buckets);
    struct rng r = {ids * 977u + buckets + hash_mask};
    for (uint32_t step = 0; step < steps; step++) {
        model_step(&m, &r, hash_mask);
        if (step % (steps / 8) == 0)
            model_check(&m);
    }
    model_check(&m);
    for (uint32_t id = 0; id < ids; id++)
        if (m.in[id])
            model_erase(&m, id);
    for (uint32_t b = 0; b < buckets; b++)
        CHECK_EQUAL(m.x.buckets[b].overflowed, 0);
    model_check(&m);
    model_free(&m);
}

static void test_sizes(void)
{
    CHECK_EQUAL(index_buckets(0), 1);
    CHECK_EQUAL(index_buckets(8), 1);
    CHECK_EQUAL(index_buckets(9), 2);
    CHECK_EQUAL(index_buckets(PG_CAPACITY_MAX), PG_CAPACITY_MAX / 8);
    CHECK_EQUAL(index_id_bits(1), 1);
    CHECK_EQUAL(index_id_bits(255), 8);
    CHECK_EQUAL(index_id_bits(256), 9);
    CHECK_EQUAL(index_id_bits(PG_CAPACITY_MAX), 28);
}

static void test_random_at_design_load(void)
{
    model_run(1, index_buckets(1), ~0u, 1000);
    model_run(64, index_buckets(64), ~0u, 100000);
    model_run(20000, index_buckets(20000), ~0u, 2000000);
}

/* If there are as many ids as cells, an insert fails exactly when no cell is empty. */
static void test_random_nearly_full(void)
{
    model_run(18, 1, ~0u, 20000);
    model_run(47, 3, ~0u, 100000);
    model_run(1000, 1010 / PG_INDEX_CELLS, ~0u, 100000);
}

/* Use few home buckets, including the last bucket, and few tags, so that probe sequences are long
 * and wrap around. */
static void test_random_colliding_hashes(void)
{
    model_run(150, 10, 0, 20000);
    model_run(150, 10, 0x80000001u, 20000);
    model_run(160, 10, 0xf0000000u, 20000);
}

static void test_full_table_refuses(void)
{
    struct model m = model_new(40, 2);
    for (uint32_t id = 0; id < 30; id++)
        CHECK(model_insert(&m, id, id << 28));
    CHECK(!model_insert(&m, 30, 0));
    model_check(&m);
    model_erase(&m, 7);
    CHECK(model_insert(&m, 30, ~0u));
    model_check(&m);
    model_free(&m);
}

static void expect_fault(const struct key_index *x, uint64_t ids, const char *detail)
{
    struct pg_fault fault = {0};
    CHECK(!index_check(x, ids, &fault));
    CHECK(strcmp(fault.part, "index") == 0);
    CHECK(strcmp(fault.detail, detail) == 0);
}

static void test_check_names_the_fault(void)
{
    struct model m = model_new(64, 8);
    for (uint32_t id = 0; id < 20; id++)
        CHECK(model_insert(&m, id, 5));
    expect_fault(&m.x, 21, "ids in the index");
    m.x.buckets[0].overflowed += 1;
    expect_fault(&m.x, 20, "more ids overflowed a bucket than the next one accounts for");
    m.x.buckets[0].overflowed -= 1;
    m.x.buckets[7].overflowed = 21;
    m.x.buckets[0].overflowed = 21;
    expect_fault(&m.x, 20, "more ids overflowed a bucket than exist");
    m.x.buckets[3].cells[4] = 1u << m.x.id_bits;
    m.x.buckets[7].overflowed = 0;
    m.x.buckets[0].overflowed = 5;
    expect_fault(&m.x, 20, "a cell holds a tag without an id");
    model_free(&m);
}

static void bench(uint32_t ids)
{
    struct model m = model_new(ids, index_buckets(ids));
    struct rng r = {1}, again = r;
    struct probe at;
    uint64_t sum = 0, further = 0;
    double since = bench_now_ns();

    for (uint32_t id = 0; id < ids; id++)
        CHECK(model_insert(&m, id, (uint32_t)rng_next(&r)));
    bench_print("insert", since, ids);
    since = bench_now_ns();
    for (uint32_t id = 0; id < ids; id++)
        sum += index_first(&m.x, (uint32_t)rng_next(&again), &at) + (at.bucket != at.home);
    bench_print("lookup, hit", since, ids);
    since = bench_now_ns();
    for (uint32_t id = 0; id < ids; id++) {
        sum += index_first(&m.x, (uint32_t)rng_next(&r), &at);
        further += at.bucket != at.home;
    }
    bench_print("lookup, miss", since, ids);
    since = bench_now_ns();
    for (uint32_t id = 0; id < ids; id++) {
        CHECK(index_find_id(&m.x, m.hashes[id], id, &at));
        index_erase(&m.x, &at);
    }
    bench_print("find and erase", since, ids);
    printf("misses beyond the home: %.2f %% (sum %" PRIu64 ")\n", 100.0 * (double)further / ids,
           sum);
    model_free(&m);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "bench") == 0) {
        bench(1000000);
        return 0;
    }
    RUN(test_sizes);
    RUN(test_random_at_design_load);
    RUN(test_random_nearly_full);
    RUN(test_random_colliding_hashes);
    RUN(test_full_table_refuses);
    RUN(test_check_names_the_fault);
    return 0;
}

/* Test the buckets of the histograms, and how a duration changes a histogram. */
#include "check.h"
#include "core/core.h"

static uint64_t first_of(uint32_t bucket)
{
    const uint32_t shift = bucket < 16 ? 0 : bucket / 8 - 1;
    return (uint64_t)(bucket - 8 * shift) << shift;
}

static void buckets_follow_one_another(void)
{
    for (uint32_t b = 0; b + 1 < PG_HISTOGRAM_BUCKETS; b++) {
        const uint64_t first = first_of(b), last = first_of(b + 1) - 1;
        CHECK(first <= last);
        CHECK_EQUAL(histogram_bucket(first), b);
        CHECK_EQUAL(histogram_bucket(last), b);
        CHECK(last - first <= first / 8);
    }
    CHECK_EQUAL(histogram_bucket(INT64_MAX), PG_HISTOGRAM_BUCKETS - 1);
}

static void spans_add_up(void)
{
    static struct pg_histogram histograms[PG_HISTOGRAMS];
    static struct pg_arena a = {.histograms = histograms};
    const struct pg_histogram *h = &histograms[PG_HG_SEND];

    measure(&a, PG_HG_SEND, 1000, 3);
    measure(&a, PG_HG_SEND, -5, 1);
    CHECK_EQUAL(h->counts[histogram_bucket(1000)], 3);
    CHECK_EQUAL(h->counts[0], 1);
    CHECK_EQUAL(h->sum_ns, 3000);
    CHECK_EQUAL(h->max_ns, 1000);
    measure(&a, PG_HG_SEND, INT64_MAX, 4);
    CHECK_EQUAL(h->sum_high, 2);              /* the sum is 2^65 - 4 + 3000 */
    CHECK_EQUAL(h->sum_ns, 3000 - 4);
    CHECK_EQUAL(h->max_ns, INT64_MAX);
    CHECK_EQUAL(histograms[PG_HG_LOCAL].sum_ns, 0);
}

int main(void)
{
    RUN(buckets_follow_one_another);
    RUN(spans_add_up);
    return 0;
}

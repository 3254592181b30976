/* histograms.c - latency histograms. */

#include "core/base/histograms.h"
#include "core/base/common.h"

static uint32_t buckets_used(const struct pg_histogram *h)
{
    uint32_t used = 0;
    for (uint32_t b = 0; b < PG_HISTOGRAM_BUCKETS; b++)
        used += h->counts[b] != 0;
    return used;
}

uint32_t histograms_used(const struct pg_histogram *histograms)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < PG_HISTOGRAMS; i++)
        used += buckets_used(&histograms[i]);
    return used;
}

/* Write the non-empty buckets of a histogram. Return the address after the last one. */
static struct pg_wal_bucket *buckets_write(const struct pg_histogram *h, struct pg_wal_bucket *to)
{
    for (uint32_t b = 0; b < PG_HISTOGRAM_BUCKETS; b++)
        if (h->counts[b] != 0)
            *to++ = (struct pg_wal_bucket){.count = h->counts[b], .bucket = b};
    return to;
}

void histograms_write(const struct pg_histogram *histograms, struct pg_wal_histogram *to)
{
    struct pg_wal_bucket *buckets = (struct pg_wal_bucket *)(to + PG_HISTOGRAMS);
    for (uint32_t i = 0; i < PG_HISTOGRAMS; i++) {
        const struct pg_histogram *h = &histograms[i];
        to[i] = (struct pg_wal_histogram){.sum_ns = h->sum_ns, .sum_high = h->sum_high,
                                          .max_ns = h->max_ns, .buckets = buckets_used(h)};
        buckets = buckets_write(h, buckets);
    }
}

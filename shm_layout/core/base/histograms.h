/* histograms.h - latency histograms. */
#ifndef PURGATORYD_BASE_HISTOGRAMS_H
#define PURGATORYD_BASE_HISTOGRAMS_H

#include "core/base/common.h"

/* Bucket of a duration in ns. There are eight buckets per power of two, so a bucket's width is at
 * most 1/8 of its lower bound. */
static inline uint32_t histogram_bucket(uint64_t ns)
{
    const uint32_t shift = 60 - (uint32_t)__builtin_clzll(ns | 8);
    return shift * 8 + (uint32_t)(ns >> shift);
}

/* Add a duration `times` times. A negative duration, from a clock that stepped back, counts as
 * 0. */
static inline void histogram_add(struct pg_histogram *h, int64_t ns, uint64_t times)
{
    __extension__ typedef unsigned __int128 uint128;
    const uint64_t value = ns < 0 ? 0 : (uint64_t)ns;
    uint64_t sum;
    h->counts[histogram_bucket(value)] += times;
    if (UNLIKELY(__builtin_mul_overflow(value, times, &sum)))
        h->sum_high += (uint64_t)((uint128)value * times >> 64);
    h->sum_high += __builtin_add_overflow(h->sum_ns, sum, &h->sum_ns);
    if (value > h->max_ns)
        h->max_ns = value;
}

/* Functions that build the body of a METRICS record. histograms_used returns the number of
 * non-empty buckets of all histograms. histograms_write writes the histograms, followed by these
 * buckets. */
uint32_t histograms_used(const struct pg_histogram *histograms);
void histograms_write(const struct pg_histogram *histograms, struct pg_wal_histogram *to);

#endif

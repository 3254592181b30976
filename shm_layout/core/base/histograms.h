/* histograms.h - durations, counted by how long they are. */
#ifndef PURGATORYD_BASE_HISTOGRAMS_H
#define PURGATORYD_BASE_HISTOGRAMS_H

#include "core/base/common.h"

static inline uint32_t histogram_bucket(uint64_t ns)
{
    const uint32_t shift = 60 - (uint32_t)__builtin_clzll(ns | 8);
    return shift * 8 + (uint32_t)(ns >> shift);
}

/* Adds a duration so many times; a negative one, of a clock that went back, counts as 0. */
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

/* As in a METRICS record: how many buckets of all histograms are not empty; the histograms with these. */
uint32_t histograms_used(const struct pg_histogram *histograms);
void histograms_write(const struct pg_histogram *histograms, struct pg_wal_histogram *to);

#endif

/* bench.h - print the mean time of an operation, as a first estimate. Nothing is asserted. */
#ifndef PURGATORYD_BENCH_H
#define PURGATORYD_BENCH_H

#include <stdint.h>
#include <stdio.h>
#include <time.h>

static inline double bench_now_ns(void)
{
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* Print the mean time of one operation, measured from since_ns until the call. */
static inline void bench_print(const char *subject, double since_ns, uint32_t operations)
{
    printf("%-28s %7.1f ns\n", subject, (bench_now_ns() - since_ns) / operations);
}

#endif

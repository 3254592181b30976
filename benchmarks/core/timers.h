/* timers.h - interface of the measured timer structures: keyed timers, the wheel alone, two
 * baselines, and the timers of two event loops. */
#ifndef PURGATORYD_BENCH_TIMERS_H
#define PURGATORYD_BENCH_TIMERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NIL UINT32_MAX

struct timers;

/* Functions of one structure. Ids are below the capacity; the benchmark never exceeds the capacity.
 * Functions take whole batches, so that a structure can prefetch memory. */
struct kind {
    const char *name;
    struct timers *(*create)(uint32_t capacity, int64_t tick_ns);
    void (*destroy)(struct timers *);
    void (*add)(struct timers *, const int64_t *deadlines_ns, uint32_t *ids, uint32_t count);
    void (*cancel)(struct timers *, const uint32_t *ids, uint32_t count);
    uint64_t (*expire)(struct timers *, int64_t now_ns);   /* fires due timers; returns their
                                                              number */
    int64_t (*next_ns)(const struct timers *);   /* time of the next call of expire; INT64_MAX =
                                                    never */
    uint64_t (*bytes)(const struct timers *);    /* size of all memory of the structure */
    /* Give timers other deadlines; NULL = the structure has no such function. `extend` needs later
     * deadlines than before. */
    void (*replace)(struct timers *, const int64_t *deadlines_ns, const uint32_t *ids,
                    uint32_t count);
    void (*extend)(struct timers *, const int64_t *deadlines_ns, const uint32_t *ids,
                   uint32_t count);
};

/* The kind of a library that is not installed has no name. */
extern const struct kind wheel_kind, heap_kind, linked_kind, keyed_kind, libuv_kind, libevent_kind;

/* Clock that the running workload measures with, and the time on this clock that a structure spent
 * on work of the benchmark itself, such as packing messages. */
extern clockid_t measured_clock;
extern int64_t outside_ns;

static inline int64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Return zeroed memory that starts at a cache line and whose pages are allocated. If there is no
 * memory, end the benchmark. */
static inline void *memory(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p)
        abort();
    return memset(p, 0, bytes);
}

/* Return a stack of free ids, for structures that do not manage free ids themselves; the first id
 * is 0. */
static inline uint32_t *free_ids(uint32_t capacity)
{
    uint32_t *stack = memory((size_t)capacity * sizeof *stack);
    for (uint32_t i = 0; i < capacity; i++)
        stack[i] = capacity - 1 - i;
    return stack;
}

#endif

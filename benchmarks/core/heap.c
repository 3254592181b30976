/*
 * heap.c - baseline: a 4-ary heap that tracks the position of each timer, so that a cancel removes
 * the timer at once. Deadlines are stored in the heap itself; four siblings share a cache line.
 */
#include "timers.h"

enum { FETCH_PLACE = 32, FETCH_ENTRY = 16, FETCH_FREE = 8 };

struct entry {
    int64_t deadline_ns;
    uint32_t id;
    uint32_t unused;
};

/* The fields of a timer that are not in the heap: half a cache line, as in the arena. */
struct record {
    uint64_t ctl;
    uint64_t unused[3];
};

struct timers {
    struct record *records;
    struct entry *entries;        /* entries[0] has the earliest deadline */
    uint32_t *places;             /* index in entries, for each id */
    uint32_t *free;
    uint32_t count, capacity, free_count;
    void *block;                  /* allocated memory of `entries`, placed so that entries[1] starts
                                     a cache line */
};

static struct timers *create(uint32_t capacity, int64_t tick_ns)
{
    struct timers *t = memory(sizeof *t);
    (void)tick_ns;
    t->block = memory(((size_t)capacity + 3) * sizeof *t->entries);
    t->entries = (struct entry *)t->block + 3;
    t->records = memory((size_t)capacity * sizeof *t->records);
    t->places = memory((size_t)capacity * sizeof *t->places);
    t->free = free_ids(capacity);
    t->capacity = t->free_count = capacity;
    return t;
}

static void destroy(struct timers *t)
{
    free(t->block);
    free(t->records);
    free(t->places);
    free(t->free);
    free(t);
}

static void put(struct timers *t, uint32_t i, struct entry e)
{
    t->entries[i] = e;
    t->places[e.id] = i;
}

static void rise(struct timers *t, uint32_t i, struct entry e)
{
    while (i > 0 && e.deadline_ns < t->entries[(i - 1) / 4].deadline_ns) {
        put(t, i, t->entries[(i - 1) / 4]);
        i = (i - 1) / 4;
    }
    put(t, i, e);
}

static uint32_t least_child(const struct timers *t, uint32_t first)
{
    uint32_t end = first + 4 < t->count ? first + 4 : t->count, least = first;
    for (uint32_t child = first + 1; child < end; child++)
        if (t->entries[child].deadline_ns < t->entries[least].deadline_ns)
            least = child;
    return least;
}

/* Move an entry down to its place. Prefetch the four groups of grandchildren while comparing the
 * children. */
static void sink(struct timers *t, uint32_t i, struct entry e)
{
    for (uint32_t first; (first = 4 * i + 1) < t->count;) {
        for (uint32_t child = first; child < first + 4; child++)
            __builtin_prefetch(&t->entries[4 * (size_t)child + 1]);
        uint32_t least = least_child(t, first);
        if (e.deadline_ns <= t->entries[least].deadline_ns)
            break;
        put(t, i, t->entries[least]);
        i = least;
    }
    put(t, i, e);
}

static void erase(struct timers *t, uint32_t i)
{
    struct entry last = t->entries[--t->count];
    if (i == t->count)
        return;
    if (i > 0 && last.deadline_ns < t->entries[(i - 1) / 4].deadline_ns)
        rise(t, i, last);
    else
        sink(t, i, last);
}

static void release(struct timers *t, uint32_t id)
{
    t->records[id].ctl = 0;
    t->free[t->free_count++] = id;
}

static void add(struct timers *t, const int64_t *deadlines_ns, uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (t->free_count > FETCH_FREE)
            __builtin_prefetch(&t->records[t->free[t->free_count - FETCH_FREE]], 1);
        ids[i] = t->free[--t->free_count];
        t->records[ids[i]].ctl = 1;
        rise(t, t->count++, (struct entry){deadlines_ns[i], ids[i], 0});
    }
}

static void cancel(struct timers *t, const uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (i + FETCH_PLACE < count) {
            __builtin_prefetch(&t->places[ids[i + FETCH_PLACE]]);
            __builtin_prefetch(&t->records[ids[i + FETCH_PLACE]], 1);
        }
        if (i + FETCH_ENTRY < count)
            __builtin_prefetch(&t->entries[4 * (size_t)t->places[ids[i + FETCH_ENTRY]] + 1]);
        erase(t, t->places[ids[i]]);
        release(t, ids[i]);
    }
}

static uint64_t expire(struct timers *t, int64_t now_ns)
{
    uint64_t fired = 0;
    for (; t->count > 0 && t->entries[0].deadline_ns <= now_ns; fired++) {
        release(t, t->entries[0].id);
        erase(t, 0);
    }
    return fired;
}

static int64_t next_ns(const struct timers *t)
{
    return t->count > 0 ? t->entries[0].deadline_ns : INT64_MAX;
}

static uint64_t bytes(const struct timers *t)
{
    return t->capacity * (sizeof *t->records + sizeof *t->entries + sizeof *t->places
                          + sizeof *t->free);
}

const struct kind heap_kind = {"heap", create, destroy, add, cancel, expire, next_ns, bytes, NULL,
                               NULL};

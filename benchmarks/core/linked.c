/*
 * linked.c - baseline: a wheel with 64 buckets per level and a word of occupancy bits per level.
 * Buckets are doubly linked lists of node indices. When the clock enters a bucket of a coarse
 * level, all its timers are moved to finer levels at once.
 */
#include "timers.h"

enum { BITS = 6, WAY = 1 << BITS, LEVELS = 11 };
enum { FETCH_NODE = 32, FETCH_NEIGHBOURS = 12, FETCH_FREE = 8 };

/* A timer: half a cache line, like a slot of the arena. */
struct node {
    uint64_t ctl;
    uint64_t tick;                /* tick of the deadline */
    uint32_t next, previous;      /* indices of nodes; NIL at the ends of the list */
    uint32_t list;                /* level * WAY + position */
    uint32_t unused;
};

struct timers {
    struct node *nodes;
    uint32_t *free;
    uint64_t clock;               /* current tick */
    int64_t tick_ns;
    uint32_t capacity, free_count;
    uint64_t occupied[LEVELS];
    uint32_t heads[LEVELS * WAY];
};

static struct timers *create(uint32_t capacity, int64_t tick_ns)
{
    struct timers *t = memory(sizeof *t);
    t->nodes = memory((size_t)capacity * sizeof *t->nodes);
    t->free = free_ids(capacity);
    t->capacity = t->free_count = capacity;
    t->tick_ns = tick_ns;
    memset(t->heads, 0xff, sizeof t->heads);
    return t;
}

static void destroy(struct timers *t)
{
    free(t->nodes);
    free(t->free);
    free(t);
}

/* Link a node. Its level is the number of the highest base-64 digit in which tick and clock
 * differ. */
static void link_node(struct timers *t, uint32_t id)
{
    struct node *n = &t->nodes[id];
    uint64_t differs = (n->tick ^ t->clock) | 1;
    uint32_t level = (63 - (uint32_t)__builtin_clzll(differs)) / BITS;
    uint32_t position = (uint32_t)(n->tick >> (level * BITS)) % WAY, list = level * WAY + position;

    n->list = list;
    n->previous = NIL;
    n->next = t->heads[list];
    if (n->next != NIL)
        t->nodes[n->next].previous = id;
    t->heads[list] = id;
    t->occupied[level] |= 1ull << position;
}

static void unlink_node(struct timers *t, uint32_t id)
{
    const struct node *n = &t->nodes[id];
    if (n->next != NIL)
        t->nodes[n->next].previous = n->previous;
    if (n->previous != NIL)
        t->nodes[n->previous].next = n->next;
    else if ((t->heads[n->list] = n->next) == NIL)
        t->occupied[n->list / WAY] &= ~(1ull << n->list % WAY);
}

static void add(struct timers *t, const int64_t *deadlines_ns, uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (t->free_count > FETCH_FREE)
            __builtin_prefetch(&t->nodes[t->free[t->free_count - FETCH_FREE]], 1);
        ids[i] = t->free[--t->free_count];
        t->nodes[ids[i]].tick = (uint64_t)(deadlines_ns[i] + t->tick_ns - 1) / (uint64_t)t->tick_ns;
        t->nodes[ids[i]].ctl = 1;
        link_node(t, ids[i]);
    }
}

static void release(struct timers *t, uint32_t id)
{
    t->nodes[id].ctl = 0;
    t->free[t->free_count++] = id;
}

static void fetch_neighbours(const struct timers *t, uint32_t id)
{
    const struct node *n = &t->nodes[id];
    if (n->next != NIL)
        __builtin_prefetch(&t->nodes[n->next], 1);
    if (n->previous != NIL)
        __builtin_prefetch(&t->nodes[n->previous], 1);
}

static void cancel(struct timers *t, const uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (i + FETCH_NODE < count)
            __builtin_prefetch(&t->nodes[ids[i + FETCH_NODE]], 1);
        if (i + FETCH_NEIGHBOURS < count)
            fetch_neighbours(t, ids[i + FETCH_NEIGHBOURS]);
        unlink_node(t, ids[i]);
        release(t, ids[i]);
    }
}

/* Find the list with the earliest timers; NIL = all lists are empty. The finest occupied level has
 * this list. */
static uint32_t next_list(const struct timers *t, uint64_t *tick)
{
    for (uint32_t level = 0; level < LEVELS; level++)
        if (t->occupied[level]) {
            uint32_t shift = level * BITS, position = (uint32_t)__builtin_ctzll(t->occupied[level]);
            uint64_t above = shift + BITS < 64 ? t->clock >> (shift + BITS) << (shift + BITS) : 0;
            *tick = above | (uint64_t)position << shift;
            return level * WAY + position;
        }
    return NIL;
}

/* Fire the timers of a list, or link them in finer levels. Return the number of fired timers. */
static uint64_t empty_list(struct timers *t, uint32_t list)
{
    uint32_t id = t->heads[list], next;
    uint64_t fired = 0;
    t->heads[list] = NIL;
    t->occupied[list / WAY] &= ~(1ull << list % WAY);
    for (; id != NIL; id = next) {
        next = t->nodes[id].next;
        if (next != NIL)
            __builtin_prefetch(&t->nodes[next], 1);
        if (list >= WAY) {
            link_node(t, id);
            continue;
        }
        release(t, id);
        fired++;
    }
    return fired;
}

static uint64_t expire(struct timers *t, int64_t now_ns)
{
    uint64_t now = (uint64_t)(now_ns / t->tick_ns), tick, fired = 0;
    uint32_t list;
    while ((list = next_list(t, &tick)) != NIL && tick <= now) {
        t->clock = tick;
        fired += empty_list(t, list);
    }
    t->clock = now;
    return fired;
}

static int64_t next_ns(const struct timers *t)
{
    uint64_t tick;
    return next_list(t, &tick) == NIL ? INT64_MAX : (int64_t)tick * t->tick_ns;
}

static uint64_t bytes(const struct timers *t)
{
    return t->capacity * (sizeof *t->nodes + sizeof *t->free) + sizeof *t;
}

const struct kind linked_kind = {"linked", create, destroy, add, cancel, expire, next_ns, bytes, NULL,
                                 NULL};

/* wheel_kind.c - the structure `wheel`: the timing wheel of shm_layout, used as the daemon uses
 * it. */
#include "core/core.h"
#include "timers.h"

enum { TAKE_PREFETCH = 8, FANOUT = 256 };

struct timers {
    struct slots slots;
    struct wheel wheel;
    struct wheel_shape shape;
    uint64_t fired;               /* number of timers fired by the current call of expire */
};

static struct timers *create(uint32_t capacity, int64_t tick_ns)
{
    struct timers *t = memory(sizeof *t);
    t->shape = (struct wheel_shape){tick_ns, FANOUT, capacity, 0};
    t->slots.capacity = capacity;
    t->slots.hot = memory((size_t)capacity * sizeof *t->slots.hot);
    t->slots.free = memory(((size_t)capacity + 1) * sizeof *t->slots.free);
    t->wheel.hot = t->slots.hot;
    t->wheel.capacity = capacity;
    t->wheel.state = memory(sizeof *t->wheel.state);
    t->wheel.buckets = memory(wheel_buckets(&t->shape) * sizeof *t->wheel.buckets);
    t->wheel.chunks = memory(wheel_chunks(&t->shape) * sizeof *t->wheel.chunks);
    t->wheel.free_chunks = memory((wheel_chunks(&t->shape) + 1) * sizeof *t->wheel.free_chunks);
    slots_init(&t->slots);
    wheel_init(&t->wheel, &t->shape, 0);
    return t;
}

static void destroy(struct timers *t)
{
    free(t->slots.hot);
    free(t->slots.free);
    free(t->wheel.state);
    free(t->wheel.buckets);
    free(t->wheel.chunks);
    free(t->wheel.free_chunks);
    free(t);
}

static void add(struct timers *t, const int64_t *deadlines_ns, uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        slots_prefetch(&t->slots, TAKE_PREFETCH);
        ids[i] = slots_take(&t->slots);
        t->slots.hot[ids[i]].deadline_ns = deadlines_ns[i];
        t->slots.hot[ids[i]].ctl = ctl_of(i, PG_S_ARMED);
        wheel_place(&t->wheel, ids[i]);
    }
}

static void release(struct timers *t, uint32_t id)
{
    t->slots.hot[id].ctl = PG_S_FREE;
    slots_give(&t->slots, id);
}

static void cancel(struct timers *t, const uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        wheel_remove(&t->wheel, ids[i]);
        release(t, ids[i]);
    }
}

static bool on_due(void *context, uint32_t id)
{
    struct timers *t = context;
    release(t, id);
    t->fired++;
    return true;
}

static uint64_t expire(struct timers *t, int64_t now_ns)
{
    bool more;
    t->fired = 0;
    do
        wheel_advance(&t->wheel, now_ns, UINT32_MAX, on_due, t, &more);
    while (more);
    return t->fired;
}

static int64_t next_ns(const struct timers *t) { return wheel_next_ns(&t->wheel); }

static uint64_t bytes(const struct timers *t)
{
    return t->slots.capacity * (sizeof *t->slots.hot + sizeof *t->slots.free)
           + wheel_chunks(&t->shape) * (sizeof *t->wheel.chunks + sizeof *t->wheel.free_chunks)
           + wheel_buckets(&t->shape) * sizeof *t->wheel.buckets + sizeof *t->wheel.state;
}

const struct kind wheel_kind = {"wheel", create, destroy, add, cancel, expire, next_ns, bytes, NULL,
                                NULL};

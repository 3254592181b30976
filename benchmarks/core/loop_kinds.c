/*
 * loop_kinds.c - the structures `libuv` and `libevent`: the timers of two event loops, if their
 * headers are installed.
 *
 * Both libraries read CLOCK_MONOTONIC. While one of them runs, the function clock_gettime of this
 * file gives it the time of the workload.
 */
#if __has_include(<uv.h>) || __has_include(<event2/event.h>)
#define _GNU_SOURCE
#include <dlfcn.h>

#include "timers.h"

enum { MS_NS = 1000000, US_NS = 1000, SECOND_US = 1000000 };

static int64_t workload_ns;       /* time of the last expire */
static bool inside;               /* a library runs */

static int (*system_gettime(void))(clockid_t, struct timespec *)
{
    static int (*function)(clockid_t, struct timespec *);
    if (!function)
        *(void **)&function = dlsym(RTLD_NEXT, "clock_gettime");
    return function;
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    if (!inside)
        return system_gettime()(clock, time);
    *time = (struct timespec){workload_ns / (1000 * MS_NS), workload_ns % (1000 * MS_NS)};
    return 0;
}

/* Free ids, and the number of timers that the current call of expire has fired. */
struct ids {
    uint32_t *free, free_count, capacity;
    uint64_t fired;
};

static struct ids ids_new(uint32_t capacity)
{
    return (struct ids){free_ids(capacity), capacity, capacity, 0};
}

static uint32_t id_take(struct ids *ids) { return ids->free[--ids->free_count]; }

static void id_give(struct ids *ids, uint32_t id) { ids->free[ids->free_count++] = id; }

static void fire(struct ids *ids, uint32_t id)
{
    id_give(ids, id);
    ids->fired++;
}
#endif

/* ---- libuv ------------------------------------------------------------------------------------ */

#if __has_include(<uv.h>)
#include <uv.h>

struct uv_timers {
    struct ids ids;
    uv_loop_t loop;
    uv_timer_t *timers;
};

static void uv_due(uv_timer_t *timer)
{
    struct uv_timers *t = timer->data;
    fire(&t->ids, (uint32_t)(timer - t->timers));
}

static struct timers *uv_create(uint32_t capacity, int64_t tick_ns)
{
    struct uv_timers *t = memory(sizeof *t);
    (void)tick_ns;
    t->ids = ids_new(capacity);
    t->timers = memory((size_t)capacity * sizeof *t->timers);
    workload_ns = 0;
    inside = true;
    if (uv_loop_init(&t->loop))
        abort();
    for (uint32_t id = 0; id < capacity; id++) {
        uv_timer_init(&t->loop, &t->timers[id]);
        t->timers[id].data = t;
    }
    inside = false;
    return (struct timers *)t;
}

static void uv_destroy(struct timers *timers)
{
    struct uv_timers *t = (struct uv_timers *)timers;
    for (uint32_t id = 0; id < t->ids.capacity; id++)
        uv_close((uv_handle_t *)&t->timers[id], NULL);
    uv_run(&t->loop, UV_RUN_DEFAULT);
    if (uv_loop_close(&t->loop))
        abort();
    free(t->timers);
    free(t->ids.free);
    free(t);
}

static void uv_add(struct timers *timers, const int64_t *deadlines_ns, uint32_t *ids,
                   uint32_t count)
{
    struct uv_timers *t = (struct uv_timers *)timers;
    int64_t now_ms = workload_ns / MS_NS;
    inside = true;
    for (uint32_t i = 0; i < count; i++) {
        int64_t due_ms = (deadlines_ns[i] + MS_NS - 1) / MS_NS;
        ids[i] = id_take(&t->ids);
        uv_timer_start(&t->timers[ids[i]], uv_due, (uint64_t)(due_ms - now_ms), 0);
    }
    inside = false;
}

static void uv_cancel_all(struct timers *timers, const uint32_t *ids, uint32_t count)
{
    struct uv_timers *t = (struct uv_timers *)timers;
    for (uint32_t i = 0; i < count; i++) {
        uv_timer_stop(&t->timers[ids[i]]);
        id_give(&t->ids, ids[i]);
    }
}

static uint64_t uv_expire(struct timers *timers, int64_t now_ns)
{
    struct uv_timers *t = (struct uv_timers *)timers;
    workload_ns = now_ns;
    t->ids.fired = 0;
    inside = true;
    uv_run(&t->loop, UV_RUN_NOWAIT);
    inside = false;
    return t->ids.fired;
}

static int64_t uv_next_ns(const struct timers *timers)
{
    const struct uv_timers *t = (const struct uv_timers *)timers;
    int wait_ms = t->ids.free_count < t->ids.capacity ? uv_backend_timeout(&t->loop) : -1;
    return wait_ms < 0 ? INT64_MAX : (workload_ns / MS_NS + wait_ms) * MS_NS;
}

static uint64_t uv_bytes(const struct timers *timers)
{
    const struct uv_timers *t = (const struct uv_timers *)timers;
    return t->ids.capacity * (sizeof *t->timers + sizeof *t->ids.free);
}

const struct kind libuv_kind = {"libuv", uv_create, uv_destroy, uv_add, uv_cancel_all, uv_expire,
                                uv_next_ns, uv_bytes, NULL, NULL};
#else
#include "timers.h"
const struct kind libuv_kind = {0};
#endif

/* ---- libevent --------------------------------------------------------------------------------- */

#if __has_include(<event2/event.h>)
#include <event2/event.h>
#include <event2/event_struct.h>

struct event_timers {
    struct ids ids;
    struct event_base *base;
    struct event *events;
};

static struct event_timers *the_events;   /* a callback gets its event's id, not the structure */

static void event_due(evutil_socket_t fd, short what, void *id)
{
    (void)fd;
    (void)what;
    fire(&the_events->ids, (uint32_t)(uintptr_t)id);
}

static struct timers *event_create(uint32_t capacity, int64_t tick_ns)
{
    struct event_timers *t = memory(sizeof *t);
    (void)tick_ns;
    t->ids = ids_new(capacity);
    t->events = memory((size_t)capacity * sizeof *t->events);
    workload_ns = 0;
    inside = true;
    t->base = event_base_new();
    for (uint32_t id = 0; id < capacity; id++)
        evtimer_assign(&t->events[id], t->base, event_due, (void *)(uintptr_t)id);
    inside = false;
    the_events = t;
    return (struct timers *)t;
}

static void event_destroy(struct timers *timers)
{
    struct event_timers *t = (struct event_timers *)timers;
    for (uint32_t id = 0; id < t->ids.capacity; id++)
        evtimer_del(&t->events[id]);
    event_base_free(t->base);
    free(t->events);
    free(t->ids.free);
    free(t);
}

static void event_add_all(struct timers *timers, const int64_t *deadlines_ns, uint32_t *ids,
                          uint32_t count)
{
    struct event_timers *t = (struct event_timers *)timers;
    inside = true;
    for (uint32_t i = 0; i < count; i++) {
        int64_t delay_us = (deadlines_ns[i] - workload_ns + US_NS - 1) / US_NS;
        struct timeval delay = {delay_us / SECOND_US, delay_us % SECOND_US};
        ids[i] = id_take(&t->ids);
        evtimer_add(&t->events[ids[i]], &delay);
    }
    inside = false;
}

static void event_cancel_all(struct timers *timers, const uint32_t *ids, uint32_t count)
{
    struct event_timers *t = (struct event_timers *)timers;
    for (uint32_t i = 0; i < count; i++) {
        evtimer_del(&t->events[ids[i]]);
        id_give(&t->ids, ids[i]);
    }
}

static uint64_t event_expire(struct timers *timers, int64_t now_ns)
{
    struct event_timers *t = (struct event_timers *)timers;
    workload_ns = now_ns;
    t->ids.fired = 0;
    inside = true;
    event_base_loop(t->base, EVLOOP_NONBLOCK);
    inside = false;
    return t->ids.fired;
}

/* libevent does not say when the next timer is due. The caller expires the timers of a second at
 * once, which is cheaper than to wake up for each. */
static int64_t event_next_ns(const struct timers *timers)
{
    const struct event_timers *t = (const struct event_timers *)timers;
    return t->ids.free_count < t->ids.capacity ? workload_ns + 1000LL * MS_NS : INT64_MAX;
}

static uint64_t event_bytes(const struct timers *timers)
{
    const struct event_timers *t = (const struct event_timers *)timers;
    return t->ids.capacity * (sizeof *t->events + sizeof *t->ids.free + sizeof(void *));
}

const struct kind libevent_kind = {"libevent", event_create, event_destroy, event_add_all,
                                   event_cancel_all, event_expire, event_next_ns, event_bytes, NULL,
                                   NULL};
#else
#include "timers.h"
const struct kind libevent_kind = {0};
#endif

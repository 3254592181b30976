/* ring_loop.c - the place where the loop sleeps, and the iterations that only fire timers and serve
 * clients.
 *
 * Such an iteration does what the caller's iteration does: fire due timers, show their notices to
 * readers of the arena, put leased jobs into rings, then apply messages. It ends the sleep as soon as
 * there is anything else to do. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>

#include "core/base/common.h"
#include "core/arena.h"
#include "core/front/ring_replies.h"
#include "core/ring/ring.h"
#include "core/wal/wal_buffer.h"

#define SECOND_NS 1000000000
#define WALL_ROUNDING_NS 1000     /* the offset of the wall clock is rounded down to this */
#define POLL_NONE INT64_MIN
#define LOOK_NS 5000              /* time between looks at descriptors while the loop polls */

/* ---- descriptors --------------------------------------------------------------------------- */

int pg_bell_watch(int bells, int eventfd, struct pg_ring_client *c)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = c};
    return epoll_ctl(bells, EPOLL_CTL_ADD, eventfd, &event);
}

void pg_bells_take(int bells, struct pg_ring_server *s)
{
    struct epoll_event events[PG_READY_MAX];
    const int count = epoll_wait(bells, events, PG_READY_MAX, 0);
    for (int i = 0; i < count; i++)
        pg_rings_rouse(s, events[i].data.ptr);
}

static int timer_set(struct pg_waiter *w, int64_t until_boot_ns)
{
    if (until_boot_ns < 1)
        until_boot_ns = 1;        /* 0 disarms */
    if (until_boot_ns == w->set_boot_ns)
        return 0;
    const struct itimerspec at = {.it_value = {until_boot_ns / SECOND_NS,
                                               until_boot_ns % SECOND_NS}};
    if (timerfd_settime(w->timer, TFD_TIMER_ABSTIME, &at, NULL) != 0)
        return -1;
    w->set_boot_ns = until_boot_ns;
    return 0;
}

int pg_wait(struct pg_waiter *w, int64_t until_boot_ns)
{
    struct epoll_event events[PG_READY_MAX];
    int count;
    w->count = 0;
    if (until_boot_ns != POLL_NONE && timer_set(w, until_boot_ns) != 0)
        return -1;
    do                            /* a signal also makes a descriptor readable */
        count = epoll_wait(w->epoll, events, PG_READY_MAX, until_boot_ns == POLL_NONE ? 0 : -1);
    while (count < 0 && errno == EINTR);
    for (int i = 0; i < count; i++)
        if (events[i].data.fd != w->timer)
            w->ready[w->count++] = events[i].data.fd;
    return count < 0 ? -1 : 0;
}

/* ---- the loop ------------------------------------------------------------------------------ */

static int64_t wall_ns(const struct pg_loop *l)
{
    const struct pg_loop_calls *calls = l->server->calls;
    struct timespec now;
    if (calls != NULL)
        return calls->wall_ns(calls->context);
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * (int64_t)SECOND_NS + now.tv_nsec;
}

/* Return wall time minus boot time, rounded down so that the pause between the two readings does
 * not look like a step of the wall clock. */
static int64_t wall_offset_ns(const struct pg_loop *l, int64_t now_ns)
{
    const int64_t offset_ns = wall_ns(l) - now_ns;
    const int64_t rest_ns = offset_ns % WALL_ROUNDING_NS;
    return offset_ns - rest_ns - (rest_ns < 0 ? WALL_ROUNDING_NS : 0);
}

/* Return whether the end of a commit needs the caller. */
static bool commit_needs_caller(const struct pg_ring_server *s)
{
    return s->commits == NULL || s->callers_pending != 0 || pg_group_commit_pausing(s->commits->commit);
}

/* Return whether a descriptor that is ready needs no caller. */
static bool ready_is_ours(const struct pg_loop *l, int fd)
{
    const struct pg_ring_server *s = l->server;
    return fd == l->waiter->bells || (s->router != NULL && fd == s->router->fd) ||
           (fd == l->waiter->commits && !commit_needs_caller(s));
}

/* Take the descriptors that ended the sleep, and note which clients have messages. Returns enum
 * pg_woken; if one of the descriptors needs the caller, all are left to it. */
static int ready_take(struct pg_loop *l)
{
    eventfd_t commits;
    struct pg_waiter *w = l->waiter;
    for (uint32_t i = 0; i < w->count; i++)
        if (!ready_is_ours(l, w->ready[i]))
            return PG_WOKEN_FOR_CALLER;
    for (uint32_t i = 0; i < w->count; i++) {
        if (w->ready[i] == w->bells)
            pg_bells_take(w->bells, l->server);
        else if (w->ready[i] == w->commits)
            eventfd_read(w->commits, &commits);
        else
            l->server->router->quiet = false;
    }
    w->count = 0;
    return PG_WOKEN_BY_RINGS;
}

/* Sleep, and note which clients have messages. Returns enum pg_woken, or -1 with errno. */
static int sleep_or_poll(struct pg_loop *l, int64_t until_boot_ns)
{
    const struct pg_loop_calls *calls = l->server->calls;
    struct pg_waiter *w = l->waiter;
    if (calls != NULL)
        return calls->wait(calls->context, l->server, until_boot_ns);
    if (pg_wait(w, until_boot_ns) != 0)
        return -1;
    if (w->count == 0)
        return until_boot_ns == POLL_NONE ? PG_WOKEN_BY_RINGS : PG_WOKEN_BY_TIME;
    return ready_take(l);
}

/* Show new notices to readers of the arena, and note that no socket wants them. */
static void notices_show(struct pg_arena *a, const struct pg_loop *l)
{
    if (a->header->published == a->header->replay_tail)
        return;
    pg_show(a);
    const int64_t now_ns = loop_boot_ns(l->server->calls);
    pg_published(a, pg_sendable(a), now_ns, now_ns);
}

/* Return whether the caller has to send something other than a reply. */
static bool has_news(const struct pg_arena *a)
{
    return a->state.inbox_news || a->state.jobs_unsent || a->state.schedules_asked != PG_NIL ||
           a->header->published != a->header->replay_tail;
}

/* Fire timers that are due, and show their notices. Returns false if that is left to the caller. */
static bool fire(struct pg_arena *a, const struct pg_loop *l, int64_t now_ns, int *more)
{
    const uint32_t done = pg_advance(a, now_ns, wall_offset_ns(l, now_ns), now_ns, l->budget, more);
    if (l->fires)
        notices_show(a, l);
    return l->fires || (done == 0 && !*more);
}

static int64_t commit_at_ns(const struct pg_loop *l)
{
    return l->server->commits != NULL ? l->server->commits->until_boot_ns : INT64_MAX;
}

/* Put the replies that a commit allows. False = the caller has to send one. */
static bool replies_release(struct pg_arena *a, struct pg_ring_server *s)
{
    const uint64_t callers = s->pending.count;
    const bool left = pg_pending_release(a, s);
    if (s->pending.count != callers)
        pg_commit_allowed(a, s->commits, callers);
    return !left;
}

/* Request the next commit if it is time. False = the caller has work: the WAL has stopped, or it is
 * full. */
static bool commit_request(struct pg_arena *a, struct pg_ring_server *s, int64_t now_ns)
{
    if (s->commits == NULL)
        return true;
    if (pg_commit_is_due(a, s->commits, s->pending.count + s->callers_pending, now_ns)) {
        pg_rings_replied(a, s);
        pg_commit_request(a, s->commits);
    }
    return !wal_stopped(a) && !wal_buffer_full(a);
}

/* Do one iteration that begins at `now_ns`. Returns whether another may follow. *more = 1: timers
 * that are due are left. */
static bool iterate(struct pg_arena *a, struct pg_loop *l, int64_t now_ns, int *more)
{
    l->iterations++;
    l->begun_boot_ns = l->planned_boot_ns = now_ns;
    pg_time_shares_begin(l->shares, now_ns);
    if (!replies_release(a, l->server) || !fire(a, l, now_ns, more))
        return false;
    ring_jobs(a, l->server);
    const uint32_t event = pg_rings_serve(a, l->server, l->shares, l->most);
    if (l->fires)
        notices_show(a, l);
    if (event == PG_RE_NONE || event == PG_RE_ENOUGH)
        return commit_request(a, l->server, now_ns) && !has_news(a);
    l->server->left = event;
    l->server->applied = 0;
    l->server->unseen = l->server->awake;                /* the caller sees this ring again */
    return false;
}

static int64_t earlier(int64_t a, int64_t b) { return a < b ? a : b; }

/* Return 0 to the caller, who looks at rings and socket: messages ended the sleep. */
static int rings_are_ready(struct pg_loop *l)
{
    if (l->waiter != NULL) {
        l->waiter->count = 1;
        l->waiter->ready[0] = l->waiter->bells;
    }
    return 0;
}

/* Return whether a descriptor is readable. A look is a system call, so looks are `LOOK_NS` apart. */
static bool descriptor_ready(struct pg_waiter *w, int64_t *look_ns, int64_t now_ns)
{
    if (now_ns < *look_ns)
        return false;
    *look_ns = now_ns + LOOK_NS;
    return pg_wait(w, POLL_NONE) != 0 || w->count != 0;
}

/* Look for a message for at most `spin_ns` and not beyond `until_boot_ns`, if the last iteration had
 * one. Returns whether there is one, a readable descriptor, or an outage. */
static bool message_soon(struct pg_loop *l, int64_t until_boot_ns)
{
    if (l->spin_ns == 0 || l->server->applied == 0 || l->server->calls != NULL)
        return false;
    int64_t now_ns = pg_boot_ns(), look_ns = now_ns + LOOK_NS;
    const int64_t end_ns = earlier(until_boot_ns, now_ns + l->spin_ns);
    while (!pg_rings_ready(l->server) && !descriptor_ready(l->waiter, &look_ns, now_ns)) {
        l->planned_boot_ns = now_ns;
        now_ns = pg_boot_ns();
        if (now_ns - l->planned_boot_ns >= l->late_ns)
            break;
        if (now_ns >= end_ns)
            return false;
    }
    return true;
}

/* Return whether an iteration that begins at `now_ns` may be done without the caller. `due_ns`: the
 * wheel needs it. */
static bool is_ours(const struct pg_loop *l, int64_t until_boot_ns, int64_t due_ns, int64_t now_ns)
{
    return now_ns < until_boot_ns && (l->fires || now_ns < due_ns) &&
           now_ns - l->planned_boot_ns < l->late_ns;
}

int pg_loop_wait(struct pg_arena *a, struct pg_loop *l, int64_t until_boot_ns)
{
    int more = has_news(a);       /* messages that the caller has applied may have ended operations */
    l->iterations = l->wakeups = 0;
    l->begun_boot_ns = 0;
    l->planned_boot_ns = loop_boot_ns(l->server->calls);
    for (int64_t now_ns = INT64_MIN;;) {                 /* the caller has looked at the time */
        const int64_t due_ns = pg_next_ns(a) - l->spin_ns;
        const int64_t until_ns = earlier(earlier(until_boot_ns, due_ns), commit_at_ns(l));
        const bool sleeps = !more && now_ns < until_ns && !message_soon(l, until_ns) &&
                            pg_rings_sleep(l->server);
        if (sleeps)
            l->planned_boot_ns = until_ns;
        const int how = sleep_or_poll(l, sleeps ? until_ns : POLL_NONE);
        now_ns = loop_boot_ns(l->server->calls);
        if (how <= PG_WOKEN_FOR_CALLER)
            return how;
        if (!is_ours(l, until_boot_ns, due_ns, now_ns))
            return how == PG_WOKEN_BY_TIME ? 0 : rings_are_ready(l);
        if (how == PG_WOKEN_BY_TIME)
            pg_measure(a, PG_HG_WAKEUP_LATENESS, now_ns - until_ns);
        if (!iterate(a, l, now_ns, &more))
            return rings_are_ready(l);
        l->wakeups += sleeps;
        now_ns = loop_boot_ns(l->server->calls);
    }
}

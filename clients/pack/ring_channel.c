/* ring_channel.c - direct calls over two rings in shared memory (channel.h). */

#define _GNU_SOURCE
#include "channel.h"

#include <errno.h>
#include <sys/socket.h>

#include "core/base/common.h"
#include "core/ring/ring.h"

#ifdef __x86_64__
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ volatile("" ::: "memory")
#endif

static void ring_open(struct channel *c) { c->in->recalled = 0; }

/* The sleep word is read first, without a system call: an awake daemon has not ended, and one that
 * has ended nearly always announced its sleep. */
static bool ring_ended(struct channel *c)
{
    char byte;
    if (LOAD_RELAXED(&c->out->words->taker_sleeps) == PG_RING_AWAKE)
        return false;
    const ssize_t bytes = recv(c->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return bytes == 0 || (bytes < 0 && errno != EAGAIN && errno != EINTR);
}

static bool ring_put(struct channel *c, const void *message, uint64_t bytes)
{
    return !is_large(c->out, bytes) && pg_ring_put(c->out, message, bytes);
}

static void ring_rouse(struct channel *c)
{
    if (pg_ring_rouse_taker(c->out) != PG_RING_AWAKE)
        pg_ring_signal(c->bell);
}

/* Return whether the next call spins. */
static bool spins(struct spin *s)
{
    if (s->longest_ns == 0 || s->omitted == 0)
        return s->longest_ns != 0;
    s->omitted--;
    return false;
}

/* Note whether a spin has found its answer. Spins become rare if fewer than two of three succeed: a
 * daemon that waits for the CPU of the caller is only delayed by them. */
static void spin_note(struct spin *s, bool found)
{
    enum { MISSES_MAX = 10 };
    if (!s->adapts)
        return;
    if (found && s->misses != 0)
        s->misses--;
    if (!found)
        s->misses = s->misses + 2 < MISSES_MAX ? s->misses + 2 : MISSES_MAX;
    s->omitted = ((uint32_t)1 << s->misses) - 1;
}

static void ring_spin(struct channel *c)
{
    bool found;
    if (!spins(&c->spin))
        return;
    const int64_t start_ns = clock_ns(CLOCK_MONOTONIC);
    while (!(found = pg_ring_next(c->in) != 0) && LOAD_RELAXED(&c->in->recalled) == 0 &&
           clock_ns(CLOCK_MONOTONIC) - start_ns < c->spin.longest_ns)
        for (int i = 0; i < 8; i++)
            PAUSE();
    spin_note(&c->spin, found);
}

static bool ring_sleep(struct channel *c, int64_t end_ns)
{
    while (pg_ring_next(c->in) == 0) {
        const int64_t left_ns = end_ns - clock_ns(CLOCK_MONOTONIC);
        if (left_ns <= 0 || c->in->broken || LOAD_RELAXED(&c->in->recalled) != 0)
            return false;
        if (!pg_ring_sleep_unless_recalled(c->in))
            continue;
        const bool interrupted = !pg_ring_sleep(c->in, left_ns);
        EXCHANGE_RELAXED(&c->in->words->taker_sleeps, PG_RING_AWAKE);
        if (interrupted)
            return false;
    }
    return true;
}

static bool ring_wait(struct channel *c, int64_t limit_ns)
{
    const int64_t end_ns = clock_ns(CLOCK_MONOTONIC) + limit_ns;
    ring_spin(c);
    return ring_sleep(c, end_ns);
}

static void ring_recall(struct channel *c)
{
    pg_ring_wake(pg_ring_recall(c->in), &c->in->words->taker_sleeps, -1);
}

static uint64_t ring_next(struct channel *c)
{
    const uint64_t bytes = pg_ring_next(c->in);
    return is_large(c->in, bytes) ? 0 : bytes;
}

static void ring_peek(struct channel *c, void *to, uint64_t bytes)
{
    pg_ring_peek(c->in, to, bytes);
}

/* Also wake the daemon if it waits for the space. */
static void ring_take(struct channel *c, void *to)
{
    pg_ring_take(c->in, to);
    if (pg_ring_rouse_putter(c->in) != PG_RING_AWAKE)
        pg_ring_signal(c->bell);
}

static bool ring_announce(struct channel *c)
{
    return pg_ring_sleep_taker(c->in, PG_RING_POLL);
}

static bool ring_drain(struct channel *c)
{
    char bytes[64];
    return recv(c->socket, bytes, sizeof bytes, MSG_DONTWAIT) != 0;
}

const struct channel_kind ring_channel = {
    .open = ring_open,
    .ended = ring_ended,
    .put = ring_put,
    .rouse = ring_rouse,
    .wait = ring_wait,
    .spin = ring_spin,
    .recall = ring_recall,
    .next = ring_next,
    .peek = ring_peek,
    .take = ring_take,
    .announce = ring_announce,
    .drain = ring_drain,
};

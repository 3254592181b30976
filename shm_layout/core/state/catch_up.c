/* catch_up.c - the end of timers that wait in backlogs (lateness.c).
 *
 * Each timer of a backlog ends once: its notice is committed (it fires), or its control word is
 * stored (it is skipped or coalesced). The count of coalesced timers is a second word. Therefore
 * pg_topic.coalescing names the timer until this count is stored, and a rebuild completes it. */

#include "core/state/catch_up.h"
#include "core/base/backlog.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/lateness.h"
#include "core/state/prefetch.h"
#include "core/state/rows.h"
#include "core/state/schedule_rows.h"
#include "core/state/schedules.h"
#include "core/state/timers.h"

#define SECOND_NS 1000000000
#define BURST_NS 10000000         /* a namespace may fire the late timers of this time at once */
#define SLICE_NS 1000000          /* shortest pause between two parts of a catch-up */
#define MOST 256                  /* timers of the backlogs that one advance handles */
#define QUANTUM 64                /* timers of one topic that one advance handles */

/* ---- the end of a late timer ----------------------------------------------------------------- */

static void late_end(struct pg_arena *a, uint32_t slot, enum pg_end_cause cause)
{
    struct probe at;
    if (index_find_id(&a->index, slot_hot(a, slot)->hash, slot, &at))
        timer_end(a, slot, &at, cause);
}

static void late_skip(struct pg_arena *a, uint32_t slot)
{
    const uint32_t row = schedule_of_slot(a, slot);
    late_end(a, slot, PG_END_SKIPPED);
    if (row != PG_NIL)
        schedule_skipped(a, row);
    a->metrics->skipped++;
}

static void coalesced_end(struct pg_arena *a, uint32_t slot)
{
    struct pg_topic *t = topic_at(a, slot_hot(a, slot)->topic);
    const uint64_t missed = t->missed + 1;
    STORE_RELEASE(&t->coalescing, ctl_ticket(slot_hot(a, slot)->ctl) << 8 | (missed & 0xff));
    late_end(a, slot, PG_END_COALESCED);
    STORE_RELEASE(&t->missed, missed);
    STORE_RELEASE(&t->coalescing, 0ull);
    a->metrics->coalesced++;
}

/* Return a number that decides between timers with equal deadlines: the ticket, above that of any
 * other timer the row of an occurrence's schedule. A recovery may give an occurrence another
 * ticket, but finds the same row. */
static uint64_t order_of(const struct pg_arena *a, uint32_t slot)
{
    const uint32_t row = schedule_of_slot(a, slot);
    return row != PG_NIL ? (1ull << 63) + row : ctl_ticket(slot_hot(a, slot)->ctl);
}

/* Return whether slot x comes before slot y in the order in which COALESCE looks for the last
 * timer. */
static bool comes_before(const struct pg_arena *a, uint32_t x, uint32_t y)
{
    const int64_t x_ns = slot_hot(a, x)->deadline_ns, y_ns = slot_hot(a, y)->deadline_ns;
    return x_ns != y_ns ? x_ns < y_ns : order_of(a, x) < order_of(a, y);
}

/* Return whether a timer coalesces with the next occurrence of its schedule, which is armed when
 * this one has ended. */
static bool follower_coalesces(const struct pg_arena *a, uint32_t slot)
{
    return late_policy_at(a, slot, schedule_follower_ns(a, slot)) == PG_LATE_COALESCE;
}

/* Coalesce the oldest timer of a topic's backlog with the next one: the earlier of the two ends. An
 * occurrence without such a timer coalesces with the one that follows in its schedule. Return false
 * if there is neither. */
static bool late_coalesce(struct pg_arena *a, uint32_t topic, uint32_t oldest)
{
    const uint32_t next = backlog_peek(&a->wheel, topic, 1);
    if (next != PG_NIL && late_policy_now(a, next) == PG_LATE_COALESCE && wall_is_reached(a, next))
        coalesced_end(a, comes_before(a, oldest, next) ? oldest : next);
    else if (follower_coalesces(a, oldest))
        coalesced_end(a, oldest);
    else
        return false;
    return true;
}

static int64_t interval_ns(const struct pg_namespace *n)
{
    const uint64_t per_s = n->late_per_s != 0 ? n->late_per_s : PG_LATE_PER_S;
    return (int64_t)(SECOND_NS / per_s);
}

/* Return whether the namespace may fire a late timer at this moment, by its rate (GCRA: ITU-T
 * I.371). If not, *next_ns becomes the time of the next attempt, unless it is earlier. */
static bool rate_admits(const struct pg_arena *a, const struct pg_namespace *n, int64_t *next_ns)
{
    const int64_t now_ns = a->state.now_ns, at_ns = n->caught_up_ns - BURST_NS;
    if (a->header->clock_kind != PG_CLOCK_BOOT || at_ns <= now_ns)
        return true;
    const int64_t then_ns = at_ns > now_ns + SLICE_NS ? at_ns : now_ns + SLICE_NS;
    *next_ns = then_ns < *next_ns ? then_ns : *next_ns;
    return false;
}

static void rate_charge(const struct pg_arena *a, struct pg_namespace *n)
{
    const int64_t now_ns = a->state.now_ns;
    n->caught_up_ns = (n->caught_up_ns > now_ns ? n->caught_up_ns : now_ns) + interval_ns(n);
}

/* ---- catch-up -------------------------------------------------------------------------------- */

struct catch_up {
    struct pg_arena *a;
    uint32_t left;                /* timers that the call may still handle */
    int64_t next_ns;              /* next attempt of a namespace that has used up its rate */
    bool full;                    /* the replay buffer or the WAL buffer has no space */
};

/* Fire the oldest timer of a backlog. Return false if it has to wait. */
static bool oldest_fire(struct catch_up *c, uint32_t slot)
{
    struct pg_arena *a = c->a;
    struct pg_namespace *n = namespace_at(a, slot_namespace(a, slot));
    if (!rate_admits(a, n, &c->next_ns))
        return false;
    if (!timer_fire_due(a, slot)) {
        c->full = true;
        return false;
    }
    backlog_remove(&a->wheel, slot);
    rate_charge(a, n);
    return true;
}

/* End the oldest timer of a topic's backlog. Return false if it has to wait. */
static bool oldest_end(struct catch_up *c, uint32_t topic, uint32_t slot)
{
    struct pg_arena *a = c->a;
    if (UNLIKELY(wal_buffer_full(a))) {
        c->full = true;
        return false;
    }
    if (UNLIKELY(!wall_is_reached(a, slot))) {    /* the wall clock has gone back */
        backlog_remove(&a->wheel, slot);
        wall_postpone(a, slot);
        return true;
    }
    const unsigned policy = late_policy_now(a, slot);
    if (policy == PG_LATE_SKIP)
        late_skip(a, slot);
    else if (policy != PG_LATE_COALESCE)
        return oldest_fire(c, slot);
    else if (!late_coalesce(a, topic, slot))     /* a pending occurrence may coalesce with this */
        return !schedules_pending(a) && oldest_fire(c, slot);
    return true;
}

/* Handle the oldest timers of a topic's backlog. Return whether it may go on at once. */
static bool topic_catch_up(struct catch_up *c, uint32_t topic)
{
    struct pg_arena *a = c->a;
    uint32_t quantum = a->header->clock_kind == PG_CLOCK_BOOT ? QUANTUM : UINT32_MAX, soon = 0;
    if (late_paused(a, topic))
        return false;
    for (; quantum > 0 && c->left > 0; quantum--, c->left--) {
        const uint32_t slot = backlog_peek(&a->wheel, topic, 0);
        if (slot == PG_NIL) {
            a->state.backlogs[topic / 64] &= ~(1ull << topic % 64);
            return false;
        }
        if (soon == 0)
            prefetch_expiries(a, backlog_soon(&a->wheel, topic, &soon), soon);
        soon--;
        if (!oldest_end(c, topic, slot))
            return c->full;
    }
    return true;
}

/* Return the first topic at or after `topic` that may have a backlog; PG_NIL = none. */
static uint32_t topic_from(const struct pg_arena *a, uint32_t topic)
{
    const uint32_t words = (a->topic_rows + 63) / 64;
    for (uint32_t word = topic / 64; word < words; word++, topic = word * 64) {
        const uint64_t bits = a->state.backlogs[word] >> topic % 64;
        if (bits != 0)
            return topic + (uint32_t)__builtin_ctzll(bits);
    }
    return PG_NIL;
}

/* Visit each topic with a backlog once, beginning at the cursor. Return whether timers are left that
 * may be handled at once. */
static bool topics_catch_up(struct catch_up *c)
{
    struct pg_arena *a = c->a;
    const uint32_t begin = a->state.backlog_cursor;
    bool wrapped = false, more = false;
    for (uint32_t topic = begin; !c->full; topic++) {
        topic = topic_from(a, topic);
        if (topic == PG_NIL && !wrapped) {
            wrapped = true;
            topic = topic_from(a, 0);
        }
        if (topic == PG_NIL || (wrapped && topic >= begin))
            return more;
        a->state.backlog_cursor = topic;
        if (c->left == 0)
            return true;
        more |= topic_catch_up(c, topic);
        a->state.backlog_cursor = topic + 1;
    }
    return true;
}

uint32_t late_catch_up(struct pg_arena *a, uint32_t budget, bool *more)
{
    const bool paced = a->header->clock_kind == PG_CLOCK_BOOT;
    const uint32_t most = paced && budget > MOST ? MOST : budget;
    struct catch_up c = {.a = a, .left = most, .next_ns = INT64_MAX};
    *more = topics_catch_up(&c);
    a->state.catch_up_ns = *more ? a->state.now_ns : c.next_ns;
    return most - c.left;
}

uint64_t pg_paused_due(const struct pg_arena *a)
{
    uint64_t due = 0;
    for (uint32_t topic = topic_from(a, 0); topic != PG_NIL; topic = topic_from(a, topic + 1))
        if (late_paused(a, topic))
            due += backlog_count(&a->wheel, topic);
    return due;
}

/* ---- rebuild --------------------------------------------------------------------------------- */

/* The low byte of `coalescing` shows whether the count was stored: a kill leaves at most one
 * increment undone. */
uint64_t late_missed(const struct pg_arena *a, const struct pg_topic *t)
{
    const bool stored = (t->missed & 0xff) == (t->coalescing & 0xff);
    if (LIKELY(t->coalescing == 0) || stored)
        return t->missed;
    const uint32_t slot = slot_of_ticket(a, t->coalescing >> 8);
    return t->missed + (slot == PG_NIL || !ctl_live(slot_hot(a, slot)->ctl));
}

void late_rebuild(struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->topic_rows; i++) {
        struct pg_topic *t = topic_at(a, i);
        STORE_RELEASE(&t->missed, late_missed(a, t));
        STORE_RELEASE(&t->coalescing, 0ull);
    }
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        namespace_at(a, i)->caught_up_ns = 0;
    memset(a->state.backlogs, 0, sizeof a->state.backlogs);
    a->state.backlog_cursor = 0;
    a->state.catch_up_ns = INT64_MAX;
    a->state.outage_end_ns = INT64_MIN;
    late_outage(a, a->state.now_ns);
}

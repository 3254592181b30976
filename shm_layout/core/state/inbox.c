/* inbox.c - the inbox of a session: outcomes, and CHECKs of CLIENT conditions, that the owner of
 * the operations should receive.
 *
 * The inbox is a linked list of operation slots, oldest first. `inbox_next` of the session is the
 * first entry that has not been sent in the current round. Entries leave the list when they are
 * acknowledged or when their session ends. In the second case they become orphans. Each orphan is
 * freed with its own WAL record. */

#include "core/state/inbox.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/delivery.h"
#include "core/state/operation_bytes.h"
#include "core/state/prefetch.h"
#include "core/state/quotas.h"
#include "core/state/records.h"
#include "core/state/rows.h"
#include "core/state/timers.h"

/* ---- the list ---------------------------------------------------------------------------- */

static void link_last(struct pg_arena *a, struct pg_session *s, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    op->inbox_next = PG_NIL;
    op->inbox_previous = s->inbox_tail;
    op->in_inbox = 1;
    if (s->inbox_tail == PG_NIL)
        s->inbox_head = slot;
    else
        operation_at(a, s->inbox_tail)->inbox_next = slot;
    s->inbox_tail = slot;
    if (s->inbox_next == PG_NIL)
        s->inbox_next = slot;
    s->inbox_count++;
    a->state.inbox_news = true;
    if (a->state.news_count < PG_NEWS)
        a->state.news[a->state.news_count++] = slot;
}

static void unlink_from(struct pg_arena *a, struct pg_session *s, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    if (op->inbox_previous == PG_NIL)
        s->inbox_head = op->inbox_next;
    else
        operation_at(a, op->inbox_previous)->inbox_next = op->inbox_next;
    if (op->inbox_next == PG_NIL)
        s->inbox_tail = op->inbox_previous;
    else
        operation_at(a, op->inbox_next)->inbox_previous = op->inbox_previous;
    if (s->inbox_next == slot)
        s->inbox_next = op->inbox_next;
    op->in_inbox = 0;
    s->inbox_count--;
}

void inbox_remove(struct pg_arena *a, uint32_t slot)
{
    struct pg_session *s = session_find(a, operation_at(a, slot)->session);
    if (s != NULL && operation_at(a, slot)->in_inbox)
        unlink_from(a, s, slot);
}

static void outcome_free(struct pg_arena *a, uint32_t slot)
{
    a->metrics->outcomes--;
    slot_free(a, slot, slot_granules(slot_cold(a, slot)));
}

static void orphan_free(struct pg_arena *a, uint32_t slot)
{
    if (has_wal(a))
        wal_append_end(a, slot, PG_END_DROPPED);
    a->metrics->outcomes_dropped++;
    outcome_free(a, slot);
}

/* Free an outcome that belongs to no inbox. If the WAL buffer is full, leave this to
 * orphans_free. */
static void orphan_add(struct pg_arena *a, uint32_t slot)
{
    if (!wal_buffer_full(a)) {
        orphan_free(a, slot);
        return;
    }
    operation_at(a, slot)->in_inbox = 1;
    operation_at(a, slot)->inbox_next = a->state.orphans;
    a->state.orphans = slot;
}

void inbox_add(struct pg_arena *a, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    struct pg_session *s = session_find(a, op->session);
    if (s != NULL && op->in_inbox)
        unlink_from(a, s, slot);  /* this CHECK became an outcome, which has to be sent again */
    if (s != NULL)
        link_last(a, s, slot);
    else if (ctl_state(slot_hot(a, slot)->ctl) == PG_S_OUTCOME && !op->in_inbox)
        orphan_add(a, slot);      /* in_inbox is set if the outcome is an orphan already */
}

/* ---- when a session ends ----------------------------------------------------------------- */

#define ORPHANS_PER_CALL 1024     /* orphans freed per call, in about 30 us */

bool orphans_free(struct pg_arena *a)
{
    for (uint32_t n = 0; n < ORPHANS_PER_CALL && !wal_buffer_full(a); n++) {
        if (a->state.orphans == PG_NIL)
            break;
        const uint32_t slot = a->state.orphans;
        a->state.orphans = operation_at(a, slot)->inbox_next;
        operation_at(a, slot)->in_inbox = 0;
        if (ctl_state(slot_hot(a, slot)->ctl) == PG_S_OUTCOME)
            orphan_free(a, slot);
    }
    return a->state.orphans != PG_NIL;
}

/* A rebuild needs no list of orphans, because it frees every outcome whose session has ended. */
void inbox_drop(struct pg_arena *a, struct pg_session *s)
{
    if (s->inbox_tail != PG_NIL) {
        operation_at(a, s->inbox_tail)->inbox_next = a->state.orphans;
        a->state.orphans = s->inbox_head;
    }
    s->inbox_head = s->inbox_tail = s->inbox_next = PG_NIL;
    s->inbox_count = 0;
    orphans_free(a);
}

void inboxes_init(struct pg_arena *a, uint64_t inbox_max)
{
    a->purgatory->inbox_max = inbox_max;
}

void inboxes_reset(struct pg_arena *a)
{
    a->state.orphans = PG_NIL;
    for (uint32_t i = 0; i < a->state.session_rows; i++) {
        struct pg_session *s = session_at(a, i);
        s->inbox_head = s->inbox_tail = s->inbox_next = PG_NIL;
        s->inbox_count = s->repeats = s->away = s->evicted = 0;
    }
}

/* ---- acknowledgements ----------------------------------------------------------------------- */

bool inbox_acknowledge(struct pg_arena *a, struct pg_session *s, const struct pg_ack *ack)
{
    const uint64_t ctl = ack->slot < a->slots.capacity ? slot_hot(a, ack->slot)->ctl : 0;
    if (ctl_state(ctl) == PG_S_FREE || ctl_ticket(ctl) != ack->ticket ||
        !is_operation(a, ack->slot))
        return false;
    const struct pg_operation *op = operation_at(a, ack->slot);
    const bool outcome = ctl_state(ctl) == PG_S_OUTCOME;
    s->inbox_boot_ns = a->call.real_boot_ns;
    s->repeats = 0;
    if (op->session != s->id || !op->in_inbox)
        return false;
    if (!outcome)
        return ack->version == op->version;
    if (ack->version == 0) {
        unlink_from(a, s, ack->slot);
        if (has_wal(a) && !wal_buffer_full(a))     /* optional: recovery does not need it */
            wal_append_end(a, ack->slot, PG_END_ACKNOWLEDGED);
        account_operation_counted(a, s, -1);
        outcome_free(a, ack->slot);
    }
    return false;
}

/* ---- sending ------------------------------------------------------------------------------ */

#define PER_MESSAGE 512
#define BYTES_PREFETCH 8             /* prefetch bytes this many outcomes in advance */

static void outcome_write(const struct pg_arena *a, uint32_t slot, struct pg_outcome *to)
{
    const struct pg_hot *h = slot_hot(a, slot);
    const struct pg_cold *c = slot_cold(a, slot);
    const struct pg_operation *op = operation_at(a, slot);
    *to = (struct pg_outcome){.ticket = ctl_ticket(h->ctl) << 8 | op->cause,
                              .deadline_ns = h->deadline_ns, .armed_ns = op->armed_ns,
                              .ended_ns = op->ended_ns,
                              .version = op->cause == 0 ? op->version : 0, .error = op->error,
                              .payload_len = c->payload_len, .keys = op->keys,
                              .bitmap_bytes = op->cause == 0 ? 0 : (uint16_t)((op->keys + 7) / 8),
                              .key_len = c->key_len, .key_type = c->key_type, .slot = slot};
}

/* Number of bytes that the watch keys of an outcome need in the message; a CHECK needs none. */
static uint32_t end_bytes(const struct pg_operation *op)
{
    return op->cause == 0 ? 0 : operation_end_bytes(op->keys);
}

static void outcome_bytes(const struct pg_arena *a, uint32_t slot, struct sink *out)
{
    const struct pg_cold *c = slot_cold(a, slot);
    const struct pg_operation *op = operation_at(a, slot);
    const uint64_t bytes = (uint64_t)c->key_len + c->payload_len;
    uint8_t *to = sink_take(out, bytes + end_bytes(op));
    memcpy(to, (const uint8_t *)op + c->ext_len, bytes);
    memcpy(to + bytes, op + 1, end_bytes(op));
}

/* Pick the entries that fit into one message. Return the number of entries. */
static uint32_t fitting(struct pg_arena *a, const struct pg_session *s, uint64_t size,
                        uint32_t slots[PER_MESSAGE])
{
    uint64_t used = sizeof(struct pg_frame);
    uint32_t n = 0, slot = s->inbox_next;
    for (; slot != PG_NIL && n < PER_MESSAGE; n++) {
        prefetch_news(a);
        const struct pg_cold *c = slot_cold(a, slot);
        const struct pg_operation *op = operation_at(a, slot);
        used += sizeof(struct pg_outcome) + c->key_len + c->payload_len + end_bytes(op);
        if (used > size)
            break;
        slots[n] = slot;
        slot = op->inbox_next;
    }
    return n;
}

static uint64_t inbox_write(struct pg_arena *a, struct pg_session *s, struct sink *out)
{
    uint32_t slots[PER_MESSAGE];
    const uint32_t count = fitting(a, s, out->size, slots);
    const struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                               .message = PG_M_OUTCOMES, .session = s->id, .count = count};
    sink_put(out, &f, sizeof f);
    struct pg_outcome *heads = sink_take(out, count * sizeof *heads);
    for (uint32_t n = 0; n < count; n++) {
        if (n + BYTES_PREFETCH < count)
            prefetch_bytes(a, slots[n + BYTES_PREFETCH]);
        outcome_write(a, slots[n], &heads[n]);
        outcome_bytes(a, slots[n], out);
    }
    a->call.notified_first = s->inbox_next;
    a->call.notified_count = count;
    if (count != 0)
        s->inbox_next = operation_at(a, slots[count - 1])->inbox_next;
    s->inbox_boot_ns = a->call.real_boot_ns;
    return out->used;
}

uint64_t pg_inbox(struct pg_arena *a, uint64_t *session, void *bytes, uint64_t size)
{
    struct sink out = {bytes, 0, size, false};
    *session = 0;
    a->call.notified_count = 0;
    if (!a->state.inbox_news)
        return 0;
    for (uint32_t i = 0; i < a->state.session_rows; i++) {
        struct pg_session *s = session_at(a, i);
        if (s->id == 0 || s->inbox_next == PG_NIL || s->away)
            continue;
        *session = s->id;
        return inbox_write(a, s, &out);
    }
    a->state.inbox_news = false;
    a->state.news_count = a->state.news_seen = 0;
    return 0;
}

#define AGAIN_NS 1000000000       /* time until outcomes are sent again; then doubled */
#define REPEATS_DOUBLING 6        /* number of doublings; the longest time is about a minute */

static void inbox_repeat(struct pg_arena *a, struct pg_session *s)
{
    s->inbox_next = s->inbox_head;
    a->metrics->outcomes_repeated += s->inbox_count;
    a->state.inbox_news = true;
}

void pg_inbox_again(struct pg_arena *a, int64_t real_boot_ns)
{
    a->state.jobs_unsent |= a->metrics->jobs != 0 || a->state.evicted_session != PG_NIL;
    for (uint32_t i = 0; i < a->state.session_rows; i++) {
        struct pg_session *s = session_at(a, i);
        const uint32_t doubled = s->repeats < REPEATS_DOUBLING ? s->repeats : REPEATS_DOUBLING;
        if (s->id == 0 || s->inbox_head == PG_NIL || s->away || s->inbox_next != PG_NIL ||
            real_boot_ns - s->inbox_boot_ns < (int64_t)AGAIN_NS << doubled)
            continue;
        s->repeats++;
        inbox_repeat(a, s);
    }
}

void pg_inbox_to(struct pg_arena *a, uint64_t session)
{
    struct pg_session *s = session_find(a, session);
    if (s == NULL)
        return;
    session_returns(a, s);
    s->repeats = 0;
    if (s->inbox_head != PG_NIL)
        inbox_repeat(a, s);
}

void pg_inbox_away(struct pg_arena *a, uint64_t session)
{
    struct pg_session *s = session_find(a, session);
    if (s == NULL)
        return;
    s->away = 1;
    members_leave(a, session, true);
    wal_buffer_settle(a);
}

/* pending.c - the messages LIST and SWEEP, about the pending timers of a selection. */

#include "core/base/answer.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/names.h"
#include "core/state/quotas.h"
#include "core/state/select.h"
#include "core/state/sweeps.h"
#include "core/state/timers.h"
#include "core/front/request.h"
#include "core/front/scan.h"

/* ---- the selection of a message ------------------------------------------------------------- */

static bool lengths_sound(const struct pg_select *s)
{
    const bool prefix = (s->fields & PG_SEL_PREFIX) != 0, tag = (s->fields & PG_SEL_TAG) != 0;
    return s->fields < PG_SEL_FIELDS && s->key_type < PG_KEY_UUID && s->namespace_len != 0 &&
           s->namespace_len <= PG_NAMESPACE_MAX && (s->prefix_len != 0) == prefix &&
           (prefix || s->key_type == 0) && s->topic_len <= PG_TOPIC_MAX &&
           (s->topic_len == 0 || (s->fields & PG_SEL_TOPIC) != 0) && (s->tag_len != 0) == tag &&
           s->tag_len <= PG_TAG_MAX;
}

/* Read the struct pg_select at offset `at` of a message, and the names behind it. */
static bool select_read(const struct request *q, uint64_t at, struct selection *s,
                        struct refusal *why)
{
    if (q->len < at + sizeof s->about)
        return refused(why, PG_ERR_MALFORMED, q->len, at + sizeof s->about);
    memcpy(&s->about, q->bytes + at, sizeof s->about);
    s->text = q->bytes + at + sizeof s->about;
    if (!lengths_sound(&s->about) || q->len != at + sizeof s->about + select_text_len(&s->about))
        return refused(why, PG_ERR_MALFORMED, at, q->len);
    const char *text = (const char *)s->text;
    const uint32_t names = (uint32_t)s->about.namespace_len + s->about.prefix_len;
    return (name_sound((struct name){text, s->about.namespace_len}) &&
            name_sound((struct name){text + names, (uint32_t)s->about.topic_len + s->about.tag_len})) ||
           refused(why, PG_ERR_MALFORMED, at + sizeof s->about, 0);
}

/* Look up the names of a selection. *none = there is no such namespace or topic. */
static bool select_resolve(struct pg_arena *a, const struct request *q, struct selection *s,
                           bool *none, struct refusal *why)
{
    const struct pg_select *about = &s->about;
    const char *text = (const char *)s->text;
    const struct name ns = {text, about->namespace_len};
    if (names_elsewhere(a, ns))
        return wrong_shard(a, why);
    s->namespace_row = names_find_namespace(a, ns);
    if (access_of(a, s->namespace_row, q->uid) == ACCESS_DENIED) {
        pg_refused(a, PG_ST_DENIED);
        return refused(why, PG_ERR_DENIED, q->uid, 0);
    }
    const struct name topic = {text + about->namespace_len + about->prefix_len, about->topic_len};
    s->topic = PG_NIL;
    if (s->namespace_row != PG_NIL && (about->fields & PG_SEL_TOPIC))
        s->topic = names_find_topic(a, s->namespace_row, topic);
    *none = s->namespace_row == PG_NIL || (s->topic == PG_NIL && (about->fields & PG_SEL_TOPIC));
    if (about->tickets == 0 || about->tickets > next_number(a->header))
        s->about.tickets = next_number(a->header);
    return true;
}

/* ---- LIST ------------------------------------------------------------------------------------- */

#define LIST_BYTES (1 << 18)      /* a reply of this size gets no further timer */

struct list {
    struct pg_list_ask ask;
    struct pg_listed head;
    uint32_t count;
};

static bool after(int64_t deadline_ns, uint64_t ticket, int64_t than_ns, uint64_t than)
{
    return deadline_ns > than_ns || (deadline_ns == than_ns && ticket > than);
}

static bool wanted(const struct pg_arena *a, const struct pg_list_ask *ask, uint32_t slot)
{
    const int64_t deadline_ns = timers_deadline_ns(a, slot);
    const uint64_t ticket = ctl_ticket(slot_hot(a, slot)->ctl);
    return after(deadline_ns, ticket, ask->after_ns, ask->after_ticket) &&
           after(ask->before_ns, ask->before_ticket, deadline_ns, ticket);
}

static void list_write(const struct pg_arena *a, const struct list *l, uint32_t slot,
                       struct sink *out)
{
    if (l->ask.payloads != 0)
        info_write(a, slot, slot_hot(a, slot)->ctl, out);
    else
        info_write_bare(a, slot, out);
}

/* Add the timers of the slots to the reply. Return false if the reply is full; head.slot is then the
 * first slot that is left. */
static bool list_some(const struct pg_arena *a, struct list *l, const uint32_t *slots,
                      uint32_t count, struct sink *out)
{
    for (uint32_t i = 0; i < count; i++) {
        if (!wanted(a, &l->ask, slots[i]))
            continue;
        if (l->ask.max != 0 && (l->count == l->ask.max || out->used > LIST_BYTES)) {
            l->head.slot = slots[i];
            return false;
        }
        l->head.matched++;
        if (l->ask.max == 0)
            continue;
        list_write(a, l, slots[i], out);
        l->count++;
    }
    return true;
}

static void list_walk(const struct pg_arena *a, const struct selection *s, struct list *l,
                      struct sink *out)
{
    uint32_t slots[PG_PREFETCH_MAX], work = PG_SELECT_SLOTS, next = l->ask.slot;
    while (work != 0 && next < a->slots.capacity) {
        const uint32_t count = select_some(a, s, &next, &work, slots);
        if (!list_some(a, l, slots, count, out))
            return;
        work -= l->ask.max != 0 && count < work ? count : 0;
    }
    l->head.slot = next < a->slots.capacity ? next : PG_NIL;
}

bool handle_list(struct pg_arena *a, struct request *q, struct sink *out, struct refusal *why)
{
    struct pg_session *session;
    struct selection s;
    struct list l = {.head = {.now_ns = a->state.now_ns, .slot = PG_NIL}};
    bool none;
    if (!session_of(a, q, &session, why))
        return false;
    if (q->len < sizeof q->frame + sizeof l.ask)
        return refused(why, PG_ERR_MALFORMED, q->len, sizeof q->frame + sizeof l.ask);
    memcpy(&l.ask, q->bytes + sizeof q->frame, sizeof l.ask);
    if (!select_read(q, sizeof q->frame + sizeof l.ask, &s, why) ||
        !select_resolve(a, q, &s, &none, why))
        return false;
    l.head.tickets = s.about.tickets;
    l.head.wall_offset_ns = a->header->wall_offset_ns;
    const uint64_t begin = out->used;
    if (sink_take(out, sizeof(struct pg_frame) + sizeof l.head) == NULL)
        return refused(why, PG_ERR_INTERNAL, 0, 0);
    if (!none)
        list_walk(a, &s, &l, out);
    struct sink head = {out->bytes + begin, 0, sizeof(struct pg_frame) + sizeof l.head, false};
    reply_head(q, &head, l.count);
    sink_put(&head, &l.head, sizeof l.head);
    return true;
}

/* ---- SWEEP ------------------------------------------------------------------------------------ */

static bool ask_sound(const struct pg_sweep_ask *ask)
{
    static const uint8_t none[sizeof ask->id];
    const bool begins = ask->action == PG_SA_BEGIN, moves = ask->change == PG_SC_MOVE;
    if (ask->action != PG_SA_STATUS && memcmp(ask->id, none, sizeof none) == 0)
        return false;
    return ask->action < PG_SWEEP_ACTIONS && ask->change < PG_SWEEP_CHANGES &&
           ask->time_kind < PG_T_KINDS && (begins || ask->change == 0) &&
           (moves || ask->time_kind == 0) &&
           (ask->time_ns != 0 ? ask->change != PG_SC_CANCEL : ask->change != PG_SC_SHIFT);
}

static void info_put(const struct pg_arena *a, const struct pg_sweep *w, struct sink *out)
{
    const bool running = w->state == PG_SW_RUNNING;
    struct pg_sweep_info info = {.done = sweep_done(w), .time_ns = w->time_ns,
                                 .begun_ns = w->begun_ns, .slots = a->slots.capacity,
                                 .slot = running ? sweep_slot(w) : a->slots.capacity,
                                 .uid = w->uid, .state = w->state, .change = w->change,
                                 .time_kind = w->time_kind};
    memcpy(info.id, w->id, sizeof info.id);
    sink_put(out, &info, sizeof info);
    sink_put(out, &w->select, sizeof w->select);
    sink_put(out, w->text, select_text_len(&w->select));
}

/* Return whether the sender may see the sweep: those of a namespace that is gone, or that another
 * uid owns, are not shown. */
static bool visible(const struct pg_arena *a, const struct pg_sweep *w, uint32_t uid)
{
    return w->state != PG_SW_NONE && w->namespace_row < a->namespace_rows &&
           access_of(a, w->namespace_row, uid) != ACCESS_DENIED;
}

static bool sweeps_answer(const struct pg_arena *a, const struct request *q, uint32_t first,
                          uint32_t end, struct sink *out)
{
    uint32_t count = 0;
    for (uint32_t row = first; row < end; row++)
        count += visible(a, sweep_at(a, row), q->uid);
    reply_head(q, out, count);
    for (uint32_t row = first; row < end; row++)
        if (visible(a, sweep_at(a, row), q->uid))
            info_put(a, sweep_at(a, row), out);
    return true;
}

/* Answer with one sweep, or with all sweeps if the id is 0. */
static bool status_answer(const struct pg_arena *a, const struct request *q,
                          const struct pg_sweep_ask *ask, struct sink *out)
{
    static const uint8_t none[sizeof ask->id];
    if (memcmp(ask->id, none, sizeof none) == 0)
        return sweeps_answer(a, q, 0, PG_SWEEPS, out);
    const uint32_t row = sweep_find(a, ask->id);
    return sweeps_answer(a, q, row == PG_NIL ? 0 : row, row == PG_NIL ? 0 : row + 1, out);
}

/* Let the deadline of a MOVE be one of a clock. */
static bool time_fix(const struct pg_arena *a, struct pg_sweep_ask *ask, struct refusal *why)
{
    const struct put p = {.time_kind = ask->time_kind, .time_ns = ask->time_ns};
    if (ask->change != PG_SC_MOVE || ask->time_kind != PG_T_DELAY)
        return true;
    ask->time_kind = PG_T_BOOT;
    return time_resolve(a, &p, &ask->time_ns) ||
           refused(why, PG_ERR_MALFORMED, offsetof(struct pg_sweep_ask, time_ns),
                   (uint64_t)ask->time_ns);
}

static bool sweep_start(struct pg_arena *a, const struct request *q, struct pg_sweep_ask *ask,
                        struct sink *out, struct refusal *why)
{
    struct selection s;
    bool none;
    if (!select_read(q, sizeof q->frame + sizeof *ask, &s, why) ||
        !select_resolve(a, q, &s, &none, why) || !time_fix(a, ask, why))
        return false;
    if (sweep_find(a, ask->id) != PG_NIL)
        return status_answer(a, q, ask, out);
    if (wal_buffer_refusal(a) == PG_ST_WAL)
        return refused(why, PG_ERR_BUSY, PG_ST_WAL, 0);
    if (none) {
        /* A sweep of nothing has no namespace in which a row could remember it. */
        const struct pg_sweep done = {.time_ns = ask->time_ns, .begun_ns = a->state.now_ns,
                                      .uid = q->uid, .state = PG_SW_DONE, .change = ask->change,
                                      .time_kind = ask->time_kind, .select = s.about};
        struct pg_sweep w = done;
        memcpy(w.id, ask->id, sizeof w.id);
        memcpy(w.text, s.text, select_text_len(&s.about));
        reply_head(q, out, 1);
        info_put(a, &w, out);
        return true;
    }
    const uint32_t row = sweep_begin(a, ask, &s, q->uid);
    if (row == PG_NIL)
        return refused(why, PG_ERR_BUSY, PG_ST_FULL, PG_SWEEPS);
    return sweeps_answer(a, q, row, row + 1, out);
}

bool handle_sweep(struct pg_arena *a, struct request *q, struct sink *out, struct refusal *why)
{
    struct pg_session *session;
    struct pg_sweep_ask ask;
    if (!session_of(a, q, &session, why))
        return false;
    if (q->len < sizeof q->frame + sizeof ask)
        return refused(why, PG_ERR_MALFORMED, q->len, sizeof q->frame + sizeof ask);
    memcpy(&ask, q->bytes + sizeof q->frame, sizeof ask);
    if (!ask_sound(&ask))
        return refused(why, PG_ERR_MALFORMED, sizeof q->frame, ask.action);
    if (ask.action == PG_SA_BEGIN)
        return sweep_start(a, q, &ask, out, why);
    if (q->len != sizeof q->frame + sizeof ask)
        return refused(why, PG_ERR_MALFORMED, q->len, sizeof q->frame + sizeof ask);
    const uint32_t row = sweep_find(a, ask.id);
    if (ask.action == PG_SA_STOP && row != PG_NIL && visible(a, sweep_at(a, row), q->uid))
        sweep_stop(a, row);
    return status_answer(a, q, &ask, out);
}

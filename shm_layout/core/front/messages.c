/* messages.c - handles each message of the command socket and writes its reply. */

#include "core/base/answer.h"
#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/base/late_policy.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/bulk_loads.h"
#include "core/state/delivery.h"
#include "core/state/inbox.h"
#include "core/state/keys.h"
#include "core/state/names.h"
#include "core/state/operations.h"
#include "core/state/prefetch.h"
#include "core/state/quotas.h"
#include "core/state/replay_buffer.h"
#include "core/state/session.h"
#include "core/state/timers.h"
#include "core/front/consumers.h"
#include "core/front/cursor_requests.h"
#include "core/front/request.h"
#include "core/front/scan.h"

/* ---- replies ------------------------------------------------------------------------------ */

static void reply_refusal(const struct request *q, struct sink *out, const struct refusal *why)
{
    struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                         .message = q->frame.message, .session = q->frame.session,
                         .sequence = q->frame.sequence, .error = (uint16_t)why->error,
                         .detail = {why->detail[0], why->detail[1]}};
    out->used = 0;
    out->full = false;
    sink_put(out, &f, sizeof f);
}

static void reply_write(const struct pg_arena *a, const struct request *q, struct sink *out,
                        const struct pg_reply_memory *m)
{
    reply_head(q, out, m->count);
    if (m->count != 0)
        sink_put(out, reply_results(a, m), (uint64_t)m->count * sizeof(struct pg_result));
    if (m->extra_blob != PG_NIL)
        sink_put(out, blob_at(&a->blobs, m->extra_blob), m->extra_bytes);
}

/* ---- messages ------------------------------------------------------------------------------ */

static bool hello_read(const struct request *q, struct pg_hello *hello, struct name *worker,
                       struct refusal *why)
{
    const uint64_t fixed = sizeof q->frame + sizeof *hello;
    if (q->len < fixed || q->frame.count != 0)
        return refused(why, PG_ERR_MALFORMED, q->len, fixed);
    memcpy(hello, q->bytes + sizeof q->frame, sizeof *hello);
    *worker = (struct name){(const char *)q->bytes + fixed, hello->name_len};
    if (hello->name_len > PG_WORKER_MAX || q->len != fixed + hello->name_len)
        return refused(why, PG_ERR_MALFORMED, q->len, fixed + hello->name_len);
    if (hello->grace_ns < 0 || hello->grace_ns > PG_GRACE_MAX_NS)
        return refused(why, PG_ERR_MALFORMED,
                       sizeof q->frame + offsetof(struct pg_hello, grace_ns),
                       (uint64_t)hello->grace_ns);
    return name_sound(*worker) || refused(why, PG_ERR_MALFORMED, fixed, hello->name_len);
}

/* Refuse a message whose sender already holds its share of the rows of a table, and count the
 * refusal. `r` is the answer that a record would get that needs such a row. */
static bool share_refused(struct pg_arena *a, const struct pg_result *r, struct refusal *why)
{
    pg_refused(a, PG_ST_QUOTA);
    return refused(why, PG_ERR_QUOTA, r->ticket >> 8, (uint64_t)r->deadline_ns);
}

static bool handle_hello(struct pg_arena *a, struct request *q, struct sink *out,
                         struct refusal *why)
{
    struct pg_hello hello;
    struct name worker;
    if (!hello_read(q, &hello, &worker, why))
        return false;
    struct pg_result share;
    struct pg_session *s = session_open(a, hello.nonce, q->uid, q->pid, hello.grace_ns, worker,
                                        &share);
    if (s == NULL && share.ticket != 0)
        return share_refused(a, &share, why);
    if (s == NULL)
        return refused(why, PG_ERR_SESSIONS_FULL, a->secret->sessions,
                       (uint64_t)sessions_silence_ns(a));
    s->used_boot_ns = a->call.real_boot_ns;
    session_returns(a, s);
    const struct pg_placement *placed = &a->header->placement;
    struct pg_welcome w = {.session = s->id, .stream_id = a->header->stream_id,
                           .layout_id = a->header->layout_id, .epoch = a->header->epoch,
                           .now_ns = a->state.now_ns, .wall_offset_ns = a->header->wall_offset_ns,
                           .last = s->last, .tick_ns = a->header->tick_ns,
                           .clock_kind = a->header->clock_kind, .window = PG_WINDOW,
                           .batch_records = PG_BATCH_RECORDS, .message_bytes = PG_MESSAGE_MAX,
                           .real_boot_ns = a->call.real_boot_ns,
                           .node = placed->memory_node != 0 ? placed->memory_node : placed->node,
                           .reaper_cpu = placed->reaper_cpu,
                           .first_id = s->first_id != 0 ? s->first_id : s->id,
                           .wal = has_wal(a), .term = a->header->term};
    memcpy(w.uuid, a->header->uuid, sizeof w.uuid);
    q->frame.session = s->id;
    reply_head(q, out, 0);
    sink_put(out, &w, sizeof w);
    return true;
}

static bool handle_repeated(struct pg_arena *a, const struct request *q,
                            const struct pg_session *s, uint32_t sum, struct sink *out,
                            struct refusal *why)
{
    const struct pg_reply_memory *m = session_reply(a, s, q->frame.sequence);
    if (m->sequence != q->frame.sequence || answer_granules(m) != m->count)
        return refused(why, PG_ERR_STALE, s->last >= PG_WINDOW ? s->last - PG_WINDOW + 1 : 1,
                       q->frame.sequence);
    if (m->checksum != sum)
        return refused(why, PG_ERR_CHANGED, m->checksum, sum);
    reply_write(a, q, out, m);
    /* The reply memory does not store whether the batch was durable, so assume that it was. */
    a->call.durable = true;
    a->metrics->batches_repeated++;
    return true;
}

static bool time_allowed(const struct pg_arena *a, const struct request *q, struct refusal *why)
{
    if (!(q->frame.flags & PG_W_AT))
        return true;
    if (a->header->clock_kind == PG_CLOCK_VIRTUAL && q->frame.at_ns >= a->state.now_ns)
        return true;
    return refused(why, PG_ERR_CLOCK, (uint64_t)a->state.now_ns, (uint64_t)q->frame.at_ns);
}

static bool namespaces_full(const struct pg_arena *a, struct refusal *why)
{
    return refused(why, PG_ERR_NAMESPACES_FULL, pg_namespace_fill(a).rows, 0);
}

/* Refuse a message whose namespace could not be created. */
static bool namespace_refused(struct pg_arena *a, const struct pg_result *r, struct refusal *why)
{
    const unsigned status = r->ticket & 0xff;
    if (status == PG_ST_FULL_NAMESPACES)
        return namespaces_full(a, why);
    return status == PG_ST_QUOTA ? share_refused(a, r, why) : refused(why, PG_ERR_BUSY, status, 0);
}

/* A message for another shard is refused as a whole. The client then sends it and all later
 * messages again, so the order is kept. */
static bool names_here(const struct pg_arena *a, const struct request *q, struct refusal *why)
{
    const uint8_t *at = q->names;
    for (uint32_t i = 0; a->state.confined && i < q->frame.names; i++) {
        struct name ns, topic;
        at = names_next(at, &ns, &topic);
        if (names_elsewhere(a, ns))
            return wrong_shard(a, why);
    }
    return true;
}

static bool handle_batch(struct pg_arena *a, struct request *q, struct sink *out,
                         struct refusal *why, int64_t *wait_ns)
{
    struct pg_session *s;
    if (!session_of(a, q, &s, why) || !tables_read(q, why))
        return false;
    if (!names_here(a, q, why))
        return false;
    a->call.durable = (q->frame.flags & PG_W_DURABLE) != 0;
    if (a->call.durable && !has_wal(a))
        return refused(why, PG_ERR_NO_WAL, 0, 0);
    const uint32_t sum = fingerprint(q->bytes, q->len, s);
    if (q->frame.sequence == 0)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_frame, sequence), 0);
    if (q->frame.detail[1] >= PG_WINDOW || q->frame.detail[1] >= q->frame.sequence)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_frame, detail) + 8,
                       q->frame.detail[1]);
    if (q->frame.sequence <= s->last)
        return handle_repeated(a, q, s, sum, out, why);
    if (q->frame.sequence != s->last + 1)
        return refused(why, PG_ERR_OUT_OF_ORDER, s->last + 1, q->frame.sequence);
    if (s->current != q->frame.sequence && !time_allowed(a, q, why))
        return false;             /* once a batch has begun, it continues whatever the clock says */
    if ((q->frame.flags & PG_W_AT) && q->frame.at_ns > a->state.now_ns) {
        *wait_ns = q->frame.at_ns;
        return true;
    }
    if (!batch_begin(a, s, q, sum))
        return refused(why, PG_ERR_BUSY, a->secret->answers, 0);
    if (batch_apply(a, q, s))
        reply_write(a, q, out, session_reply(a, s, q->frame.sequence));
    return true;
}

static void info_absent(struct sink *out, unsigned status)
{
    sink_put(out, &(struct pg_info){.ticket = status, .wall_ns = NO_WALL},
             sizeof(struct pg_info));
}

/* A GET creates no names: a namespace that does not exist has no timers. */
static uint32_t query_namespace(const struct pg_arena *a, const struct request *q, uint32_t index)
{
    const uint8_t *at = q->names;
    struct name ns, topic;
    for (uint32_t i = 0; i <= index; i++)
        at = names_next(at, &ns, &topic);
    return names_find_namespace(a, ns);
}

static bool handle_query(struct pg_arena *a, struct request *q, struct sink *out,
                         struct refusal *why)
{
    struct pg_session *s;
    if (!session_of(a, q, &s, why) || !tables_read(q, why) || !names_here(a, q, why))
        return false;
    reply_head(q, out, q->frame.count);
    const uint8_t *at = q->area;
    for (uint32_t i = 0; i < q->frame.count; i++) {
        const wire_record *r = record_at(q, i);
        const uint32_t ns = query_namespace(a, q, r->name);
        const struct key key = {at, key_hash(a, ns, r->key_type, at, r->key_len), ns, PG_NIL,
                                r->key_len, r->key_type};
        const uint32_t slot = ns == PG_NIL ? PG_NIL : timers_find(a, &key);
        if (access_of(a, ns, q->uid) == ACCESS_DENIED) {
            pg_refused(a, PG_ST_DENIED);
            info_absent(out, PG_ST_DENIED);
        } else if (slot == PG_NIL || !info_write(a, slot, slot_hot(a, slot)->ctl, out)) {
            info_absent(out, PG_ST_UNKNOWN);
        }
        if (out->full)
            return refused(why, PG_ERR_TOO_LARGE, i, q->frame.count);
        at += r->key_len;
    }
    return true;
}

static struct pg_ack ack_at(const struct request *q, uint32_t i)
{
    struct pg_ack ack;
    memcpy(&ack, q->bytes + sizeof q->frame + i * sizeof ack, sizeof ack);
    return ack;
}

static void acks_prefetch(const struct pg_arena *a, const struct request *q, uint32_t first)
{
    uint32_t slots[PG_PREFETCH_MAX], count = 0;
    for (uint32_t i = first; i < q->frame.count && i < first + PG_PREFETCH_MAX; i++) {
        slots[count] = ack_at(q, i).slot;
        count += slots[count] < a->slots.capacity;
    }
    prefetch_outcomes(a, slots, count);
}

/* An ACK has no reply. Free the outcomes that the ACK names; all other outcomes will be sent
 * again. */
static bool handle_ack(struct pg_arena *a, struct request *q, struct refusal *why)
{
    struct pg_session *s;
    const uint64_t bytes = q->frame.count * (uint64_t)sizeof(struct pg_ack);
    if (!session_of(a, q, &s, why))
        return false;
    if (q->frame.count > PG_BATCH_RECORDS)
        return refused(why, PG_ERR_TOO_LARGE, PG_BATCH_RECORDS, q->frame.count);
    if (q->len != sizeof q->frame + bytes)
        return refused(why, PG_ERR_MALFORMED, q->len, sizeof q->frame + bytes);
    for (uint32_t i = 0; i < q->frame.count; i++) {
        const struct pg_ack ack = ack_at(q, i);
        if (i % PG_PREFETCH_MAX == 0)
            acks_prefetch(a, q, i);
        if (inbox_acknowledge(a, s, &ack))
            operation_answered_no(a, ack.slot);
    }
    return true;
}

static bool handle_bye(struct pg_arena *a, struct request *q, struct sink *out,
                       struct refusal *why)
{
    struct pg_session *s;
    if (!session_of(a, q, &s, why))
        return false;
    if (!session_may_end(a))
        return true;              /* BYE is handled again when the WAL buffer has space */
    session_end(a, s, false);
    reply_head(q, out, 0);
    return true;
}

/* ---- bulk loads --------------------------------------------------------------------------- */

static bool bulk_load_ask_read(const uint8_t *body, uint64_t bytes, struct pg_bulk_load_ask *ask,
                               struct refusal *why)
{
    static const uint8_t none[sizeof ask->bulk_load];
    if (bytes < sizeof *ask)
        return refused(why, PG_ERR_MALFORMED, bytes, sizeof *ask);
    memcpy(ask, body, sizeof *ask);
    const bool named = ask->action == PG_LA_OPEN || ask->action == PG_LA_CLOSE;
    if (ask->action >= PG_BULK_LOAD_ACTIONS || memcmp(ask->bulk_load, none, sizeof none) == 0 ||
        (!named && ask->fencing_token != 0) || (ask->action != PG_LA_STATUS && ask->from != 0))
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_bulk_load_ask, action),
                       ask->action);
    if (bytes != sizeof *ask + ask->name_len || named != (ask->name_len != 0) ||
        ask->name_len > PG_NAMESPACE_MAX ||
        !name_sound((struct name){(const char *)body + sizeof *ask, ask->name_len}))
        return refused(why, PG_ERR_MALFORMED, bytes, sizeof *ask + ask->name_len);
    return true;
}

static bool bulk_load_refused(struct pg_arena *a, const struct pg_bulk_load_ask *ask,
                              uint32_t bulk_load,
                              unsigned status, uint32_t uid, struct refusal *why)
{
    struct pg_result share;
    switch (status) {
    case PG_ST_NONE: return true;
    case PG_ST_DENIED: return refused(why, PG_ERR_DENIED, uid, 0);
    case PG_ST_FENCED:
        return refused(why, PG_ERR_FENCED, bulk_load_at(a, bulk_load)->fencing_token,
                       ask->fencing_token);
    case PG_ST_QUOTA: bulk_load_over_share(a, &share); return share_refused(a, &share, why);
    case PG_ST_FULL_BULK_LOADS: return refused(why, PG_ERR_BULK_LOADS_FULL, a->bulk_load_rows, 0);
    default: return refused(why, PG_ERR_BUSY, status, 0);
    }
}

/* Apply the action OPEN or CLOSE. */
static bool bulk_load_begun(struct pg_arena *a, const struct pg_bulk_load_ask *ask,
                            const uint8_t *body, uint32_t uid, struct refusal *why)
{
    const struct name name = {(const char *)body + sizeof *ask, ask->name_len};
    struct pg_bulk_load wanted = {.fencing_token = ask->fencing_token, .uid = uid,
                                  .state = ask->action == PG_LA_OPEN ? PG_BULK_LOAD_OPEN
                                                                     : PG_BULK_LOAD_CLOSED};
    struct pg_result lacking;
    unsigned refusal;
    if (access_of(a, names_find_namespace(a, name), uid) == ACCESS_DENIED)
        return refused(why, PG_ERR_DENIED, uid, 0);
    if (names_elsewhere(a, name))
        return wrong_shard(a, why);
    wanted.namespace_row = names_namespace(a, name, &lacking);
    if (wanted.namespace_row == PG_NIL)
        return namespace_refused(a, &lacking, why);
    memcpy(wanted.id, ask->bulk_load, sizeof wanted.id);
    const uint32_t bulk_load = bulk_load_claim(a, &wanted, &refusal);
    a->call.durable |= namespace_at(a, wanted.namespace_row)->durability != 0;
    return bulk_load_refused(a, ask, bulk_load, refusal, uid, why);
}

/* Check that a uid may request STATUS or FORGET. The uid PG_NIL is an administrator. */
static bool bulk_load_allowed(const struct pg_arena *a, uint32_t bulk_load, uint32_t uid,
                              struct refusal *why)
{
    return bulk_load == PG_NIL || uid == PG_NIL || bulk_load_at(a, bulk_load)->uid == uid ||
           refused(why, PG_ERR_DENIED, uid, 0);
}

static bool bulk_load_apply(struct pg_arena *a, const struct pg_bulk_load_ask *ask,
                            const uint8_t *body, uint32_t uid, struct refusal *why)
{
    const uint32_t bulk_load = bulk_load_find(a, ask->bulk_load);
    if (ask->action == PG_LA_OPEN || ask->action == PG_LA_CLOSE)
        return bulk_load_begun(a, ask, body, uid, why);
    if (!bulk_load_allowed(a, bulk_load, uid, why))
        return false;
    if (ask->action == PG_LA_STATUS || bulk_load == PG_NIL)
        return true;
    if (wal_buffer_full(a))
        return refused(why, PG_ERR_BUSY, PG_ST_BUSY, 0);
    bulk_load_forget(a, bulk_load);
    return true;
}

/* Pick the blocks to report. Return the number of blocks, which follow the info in the reply. Set
 * `next` of the info to the block from which the next request should continue. */
static uint32_t bulk_load_report(const struct pg_arena *a, const struct pg_bulk_load_ask *ask,
                                 struct pg_bulk_load_info *info, uint32_t picked[BULK_LOAD_PARTS])
{
    const uint32_t bulk_load = bulk_load_find(a, ask->bulk_load);
    *info = (struct pg_bulk_load_info){.next = UINT64_MAX};
    memcpy(info->bulk_load, ask->bulk_load, sizeof info->bulk_load);
    if (bulk_load == PG_NIL)
        return 0;
    *info = bulk_load_info(a, bulk_load);
    return ask->action == PG_LA_STATUS
               ? bulk_load_pick(a, bulk_load, ask->from, picked, &info->next)
               : 0;
}

static void bulk_load_reply(const struct pg_arena *a, const struct pg_bulk_load_info *info,
                            const uint32_t *picked, uint32_t count, struct sink *out)
{
    sink_put(out, info, sizeof *info);
    for (uint32_t i = 0; i < count; i++) {
        const struct pg_bulk_load_part part = bulk_load_part(a, picked[i]);
        sink_put(out, &part, sizeof part);
    }
}

static bool handle_bulk_load(struct pg_arena *a, struct request *q, struct sink *out,
                             struct refusal *why)
{
    const uint8_t *body = q->bytes + sizeof q->frame;
    struct pg_session *s;
    struct pg_bulk_load_ask ask;
    struct pg_bulk_load_info info;
    uint32_t picked[BULK_LOAD_PARTS];
    if (!session_of(a, q, &s, why) ||
        !bulk_load_ask_read(body, q->len - sizeof q->frame, &ask, why) ||
        !bulk_load_apply(a, &ask, body, q->uid, why))
        return false;
    const uint32_t count = bulk_load_report(a, &ask, &info, picked);
    reply_head(q, out, count);
    bulk_load_reply(a, &info, picked, count, out);
    return true;
}

int pg_bulk_load_admin(struct pg_arena *a, const void *body, uint64_t bytes, void *out_bytes,
                       uint64_t *used, uint64_t detail[2])
{
    struct refusal why = {PG_ERR_NONE, {0, 0}};
    struct sink out = {out_bytes, 0, PG_MESSAGE_MAX, false};
    struct pg_bulk_load_ask ask;
    struct pg_bulk_load_info info;
    uint32_t picked[BULK_LOAD_PARTS];
    if (bulk_load_ask_read(body, bytes, &ask, &why) && ask.name_len != 0)
        refused(&why, PG_ERR_MALFORMED, offsetof(struct pg_bulk_load_ask, action), ask.action);
    if (why.error == PG_ERR_NONE && bulk_load_apply(a, &ask, body, PG_NIL, &why)) {
        const uint32_t count = bulk_load_report(a, &ask, &info, picked);
        bulk_load_reply(a, &info, picked, count, &out);
    }
    wal_buffer_settle(a);
    *used = out.used;
    memcpy(detail, why.detail, sizeof why.detail);
    return (int)why.error;
}

/* ---- consumer groups ------------------------------------------------------------------------- */

/* Write the head of a reply whose items follow it already. */
static void reply_head_fill(const struct request *q, struct sink *out, uint32_t count,
                            const uint64_t detail[2])
{
    const struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                               .message = q->frame.message, .session = q->frame.session,
                               .sequence = q->frame.sequence, .count = count,
                               .detail = {detail[0], detail[1]}};
    memcpy(out->bytes, &f, sizeof f);
}

static bool handle_group(struct pg_arena *a, struct request *q, struct sink *out,
                         struct refusal *why)
{
    static const uint64_t none[2];
    struct pg_session *s;
    uint32_t count;
    bool again;
    if (!session_of(a, q, &s, why))
        return false;
    sink_take(out, sizeof q->frame);
    if (!consumers_group(a, q, out, &count, &again, why))
        return false;
    if (again)
        out->used = 0;
    else
        reply_head_fill(q, out, count, none);
    return true;
}

static bool handle_dead(struct pg_arena *a, struct request *q, struct sink *out,
                        struct refusal *why)
{
    struct pg_session *s;
    uint64_t detail[2];
    uint32_t count;
    if (!session_of(a, q, &s, why))
        return false;
    sink_take(out, sizeof q->frame);
    if (!consumers_dead(a, q, out, &count, detail, why))
        return false;
    reply_head_fill(q, out, count, detail);
    return true;
}

static bool handle_schedule(struct pg_arena *a, struct request *q, struct sink *out,
                            struct refusal *why)
{
    struct pg_session *s;
    uint32_t count = 0;
    a->call.durable = (q->frame.flags & PG_W_DURABLE) != 0;
    if (!session_of(a, q, &s, why))
        return false;
    if (a->call.durable && !has_wal(a))
        return refused(why, PG_ERR_NO_WAL, 0, 0);
    reply_head(q, out, 0);
    if (!schedule_handle(a, q, out, &count, why))
        return false;
    if (out->full)
        return refused(why, PG_ERR_TOO_LARGE, PG_MESSAGE_MAX, count);
    if (out->used == sizeof(struct pg_frame))
        out->used = 0;            /* the message has to be handled again */
    else
        ((struct pg_frame *)out->bytes)->count = count;
    return true;
}

/* ---- cursors ------------------------------------------------------------------------------- */

static bool handle_cursor(struct pg_arena *a, struct request *q, struct sink *out,
                          struct refusal *why)
{
    struct cursor_request c;
    struct pg_session *s;
    struct pg_result lacking = {0, 0};
    if (!session_of(a, q, &s, why) || !cursor_read(q, &c, why))
        return false;
    c.namespace_row = names_find_namespace(a, c.ns);
    if (access_of(a, c.namespace_row, q->uid) == ACCESS_DENIED ||
        (c.namespace_row == PG_NIL && name_reserved(c.ns)))
        return refused(why, PG_ERR_DENIED, q->uid, 0);
    if (names_elsewhere(a, c.ns))
        return wrong_shard(a, why);
    if ((q->frame.flags & PG_W_DURABLE) && !has_wal(a))
        return refused(why, PG_ERR_NO_WAL, 0, 0);
    if (wal_buffer_refusal(a) != PG_ST_NONE)
        return refused(why, PG_ERR_BUSY, wal_buffer_refusal(a), 0);
    if (c.ask.action == PG_CA_OPEN)
        c.namespace_row = names_namespace(a, c.ns, &lacking);
    if (c.namespace_row == PG_NIL && lacking.ticket != 0)
        return namespace_refused(a, &lacking, why);
    if (!cursor_apply(a, &c, s, &lacking, why))
        return lacking.ticket != 0 ? share_refused(a, &lacking, why) : false;
    a->call.durable = (q->frame.flags & PG_W_DURABLE) != 0 ||
                      (c.namespace_row != PG_NIL &&
                       namespace_at(a, c.namespace_row)->durability != 0);
    reply_head(q, out, cursor_positions(a, &c));
    cursor_positions_write(a, &c, out);
    return true;
}

/* A PING with a session also lets the daemon learn through which connection the session's owner can
 * be reached. */
static bool handle_ping(struct pg_arena *a, struct request *q, struct sink *out,
                        struct refusal *why)
{
    struct pg_session *s;
    if (q->frame.session != 0 && !session_of(a, q, &s, why))
        return false;
    reply_head(q, out, 0);
    return true;
}

static bool dispatch(struct pg_arena *a, struct request *q, struct sink *out,
                     struct refusal *why, int64_t *wait_ns)
{
    if (!frame_read(q, why))
        return false;
    switch (q->frame.message) {
    case PG_M_HELLO: return handle_hello(a, q, out, why);
    case PG_M_BATCH: return handle_batch(a, q, out, why, wait_ns);
    case PG_M_QUERY: return handle_query(a, q, out, why);
    case PG_M_BYE: return handle_bye(a, q, out, why);
    case PG_M_ACK: return handle_ack(a, q, why);
    case PG_M_PING: return handle_ping(a, q, out, why);
    case PG_M_BULK_LOAD: return handle_bulk_load(a, q, out, why);
    case PG_M_GROUP: return handle_group(a, q, out, why);
    case PG_M_DEAD: return handle_dead(a, q, out, why);
    case PG_M_LIST: return handle_list(a, q, out, why);
    case PG_M_SWEEP: return handle_sweep(a, q, out, why);
    case PG_M_SCHEDULE: return handle_schedule(a, q, out, why);
    case PG_M_CURSOR: return handle_cursor(a, q, out, why);
    default: return refused(why, PG_ERR_UNKNOWN_MESSAGE, q->frame.message, 0);
    }
}

#define VISITS_PER_CALL 1024      /* maximum number of watchers that one call visits (< 1 ms) */

int pg_handle(struct pg_arena *a, const void *message, uint64_t message_bytes, uint32_t uid,
              uint32_t pid, int64_t received_boot_ns, int64_t real_boot_ns, void *reply,
              uint64_t *reply_bytes, int64_t *wait_ns)
{
    struct request q = {.bytes = message, .len = message_bytes, .uid = uid, .pid = pid,
                        .received_boot_ns = received_boot_ns};
    struct sink out = {reply, 0, PG_MESSAGE_MAX, false};
    struct refusal why = {PG_ERR_INTERNAL, {0, 0}};

    time_set(a, a->state.now_ns, real_boot_ns);
    a->call.visits_left = VISITS_PER_CALL;
    a->call.uid = uid;
    a->call.durable = false;
    a->call.begun_boot_ns = 0;
    a->call.worked = NULL;
    a->call.armed_count = 0;
    *wait_ns = INT64_MIN;
    if (!dispatch(a, &q, &out, &why, wait_ns)) {
        reply_refusal(&q, &out, &why);
        a->metrics->batches_refused++;
    }
    replay_show(a);
    wal_buffer_settle(a);
    a->call.uid = PG_NIL;
    a->call.batch_timestamps = (struct pg_timestamps){0};
    a->call.sequence = 0;
    a->call.durable_lsn = a->call.durable && has_wal(a) ? wal_next_lsn(a) - 1 : 0;
    *reply_bytes = out.used;
    if (out.used != 0)
        return PG_H_REPLY;
    if (*wait_ns != INT64_MIN)
        return PG_H_WAIT;
    return q.frame.message == PG_M_ACK ? PG_H_SILENT : PG_H_AGAIN;
}

/* ---- settings of a namespace ---------------------------------------------------------------- */

static bool settings_sound(const struct pg_namespace_set *s, uint64_t bytes, struct refusal *why)
{
    if (bytes != sizeof *s + s->name_len || s->name_len == 0 || s->name_len > PG_NAMESPACE_MAX)
        return refused(why, PG_ERR_MALFORMED, bytes, sizeof *s + s->name_len);
    if (s->fields >= PG_N_FIELDS)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_namespace_set, fields), s->fields);
    if (s->durability > 1)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_namespace_set, durability),
                       s->durability);
    if (s->quota_timers > PG_QUOTA_MAX || s->quota_bytes > PG_QUOTA_MAX)
        return refused(why, PG_ERR_TOO_LARGE, PG_QUOTA_MAX,
                       s->quota_timers > PG_QUOTA_MAX ? s->quota_timers : s->quota_bytes);
    if (s->late_per_s > PG_LATE_PER_S_MAX)
        return refused(why, PG_ERR_TOO_LARGE, PG_LATE_PER_S_MAX, s->late_per_s);
    if (s->paused > 1)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_namespace_set, paused), s->paused);
    return s->quota_ops <= PG_QUOTA_OPS_MAX ||
           refused(why, PG_ERR_TOO_LARGE, PG_QUOTA_OPS_MAX, s->quota_ops);
}

static bool settings_apply(struct pg_arena *a, const uint8_t *body, uint64_t bytes,
                           struct pg_namespace_set *s, struct refusal *why)
{
    const struct name name = {(const char *)body + sizeof *s, (uint32_t)(bytes - sizeof *s)};
    struct pg_result lacking;
    if (!name_sound(name))
        return refused(why, PG_ERR_MALFORMED, sizeof *s, name.len);
    if (!has_wal(a) && (((s->fields & PG_N_DURABILITY) && s->durability != 0) ||
                                  ((s->fields & PG_N_PARK) && s->park_beyond_ns != 0)))
        return refused(why, PG_ERR_NO_WAL, 0, 0);
    if (wal_buffer_refusal(a) != PG_ST_NONE)
        return refused(why, PG_ERR_BUSY, wal_buffer_refusal(a), 0);
    const uint32_t row = names_namespace(a, name, &lacking);
    if (row == PG_NIL)
        return namespace_refused(a, &lacking, why);
    names_configure(a, row, s);
    const struct pg_namespace *n = namespace_at(a, row);
    *s = (struct pg_namespace_set){PG_N_FIELDS - 1, n->owner_uid, n->durability, n->name_len,
                                   n->quota_timers, n->quota_bytes, n->quota_ops,
                                   n->park_beyond_ns, n->late_per_s, n->paused};
    return true;
}

int pg_set_namespace(struct pg_arena *a, const void *body, uint64_t bytes, uint32_t uid,
                     struct pg_namespace_set *now, uint64_t detail[2])
{
    struct refusal why = {PG_ERR_NONE, {0, 0}};
    *now = (struct pg_namespace_set){0};
    if (bytes < sizeof *now)
        refused(&why, PG_ERR_MALFORMED, bytes, sizeof *now);
    else
        memcpy(now, body, sizeof *now);
    a->call.uid = uid;
    if (why.error == PG_ERR_NONE && settings_sound(now, bytes, &why))
        settings_apply(a, body, bytes, now, &why);
    a->call.uid = PG_NIL;
    memcpy(detail, why.detail, sizeof why.detail);
    return (int)why.error;
}

/* ---- settings of a topic --------------------------------------------------------------------- */

static bool topic_set_sound(const struct pg_topic_set *s, const char *names, uint64_t bytes,
                            struct refusal *why)
{
    if (bytes != sizeof *s + s->namespace_len + s->topic_len || s->namespace_len == 0 ||
        s->namespace_len > PG_NAMESPACE_MAX || s->topic_len > PG_TOPIC_MAX)
        return refused(why, PG_ERR_MALFORMED, bytes,
                       sizeof *s + s->namespace_len + s->topic_len);
    if (s->fields >= PG_TF_FIELDS || s->paused > 1 || s->priority > PG_PRIORITY_MAX)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_topic_set, fields), s->fields);
    if (s->slack_ns < 0 || s->slack_ns > PG_SLACK_MAX_NS)
        return refused(why, PG_ERR_TOO_LARGE, PG_SLACK_MAX_NS, (uint64_t)s->slack_ns);
    if (!late_sound(s->policy, s->grace_ns))
        return refused(why, PG_ERR_TOO_LARGE, PG_LATE_GRACE_MAX_NS, (uint64_t)s->grace_ns);
    return (name_sound((struct name){names, s->namespace_len}) &&
            name_sound((struct name){names + s->namespace_len, s->topic_len})) ||
           refused(why, PG_ERR_MALFORMED, sizeof *s, bytes - sizeof *s);
}

/* Change settings of the topic, or answer with the reason why nothing was changed. */
static void topic_set(struct pg_arena *a, const struct pg_topic_set *s, const char *names,
                      struct pg_result *r)
{
    const struct name ns = {names, s->namespace_len};
    const struct name topic = {names + s->namespace_len, s->topic_len};
    if (wal_buffer_refusal(a) != PG_ST_NONE)
        answer(r, 0, wal_buffer_refusal(a), 0);
    else if (names_elsewhere(a, ns))
        answer(r, 0, PG_ST_WRONG_SHARD, 0);
    else {
        const uint32_t row = names_topic(a, ns, topic, r);
        if (row == PG_NIL)
            return;
        topic_configure(a, row, s);
        answer(r, 0, PG_ST_DONE, 0);
    }
}

int pg_set_topic(struct pg_arena *a, const void *body, uint64_t bytes, uint32_t uid,
                 struct pg_result *result, uint64_t detail[2])
{
    struct refusal why = {PG_ERR_NONE, {0, 0}};
    struct pg_topic_set set = {0};
    const char *names = (const char *)body + sizeof set;
    *result = (struct pg_result){0, 0};
    if (bytes < sizeof set)
        refused(&why, PG_ERR_MALFORMED, bytes, sizeof set);
    else
        memcpy(&set, body, sizeof set);
    a->call.uid = uid;
    if (why.error == PG_ERR_NONE && topic_set_sound(&set, names, bytes, &why))
        topic_set(a, &set, names, result);
    pg_refused(a, result->ticket & 0xff);
    a->call.uid = PG_NIL;
    memcpy(detail, why.detail, sizeof why.detail);
    return (int)why.error;
}

/* ---- one timer without a message --------------------------------------------------------- */

static uint32_t put_topic(struct pg_arena *a, const struct pg_put *p, struct pg_result *why)
{
    return names_topic(a, (struct name){p->namespace_name, p->namespace_len},
                       (struct name){p->topic_name, p->topic_len}, why);
}

static struct key put_key(const struct pg_arena *a, const struct pg_put *p, uint32_t ns)
{
    return (struct key){p->key, key_hash(a, ns, p->key_type, p->key, p->key_len), ns, PG_NIL,
                        p->key_len, p->key_type};
}

void pg_put(struct pg_arena *a, const struct pg_put *p, struct pg_result *result)
{
    const uint32_t topic = put_topic(a, p, result);
    if (topic == PG_NIL) {
        pg_refused(a, result->ticket & 0xff);
        return;
    }
    struct put put = {.key = put_key(a, p, topic_at(a, topic)->namespace_row),
                      .payload = p->payload, .payload_len = p->payload_len, .topic = topic,
                      .mode = p->mode, .time_kind = p->time_kind, .slack = p->slack,
                      .time_ns = p->time_ns};
    if (!has_wal(a) || wal_buffer_admits(a, result))
        timers_put(a, &put, result);
    pg_refused(a, result->ticket & 0xff);
    wal_buffer_settle(a);
}

void pg_cancel(struct pg_arena *a, const struct pg_put *p, uint64_t ticket,
               struct pg_result *result)
{
    const uint32_t ns = names_find_namespace(a, (struct name){p->namespace_name,
                                                              p->namespace_len});
    const struct key key = put_key(a, p, ns);
    if (!key_cancel(a, &key, ticket, result))
        answer(result, 0, PG_ST_BUSY, 0);
    wal_buffer_settle(a);
}

uint64_t pg_get(struct pg_arena *a, const struct pg_put *p, void *bytes, uint64_t size)
{
    struct sink out = {bytes, 0, size, false};
    const uint32_t ns = names_find_namespace(a, (struct name){p->namespace_name,
                                                              p->namespace_len});
    const struct key key = put_key(a, p, ns);
    const uint32_t slot = ns == PG_NIL ? PG_NIL : timers_find(a, &key);
    if (slot == PG_NIL || !info_write(a, slot, slot_hot(a, slot)->ctl, &out))
        info_absent(&out, PG_ST_UNKNOWN);
    return out.used;
}

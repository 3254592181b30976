/* batch.c - the command lane: decode, validate, apply.
 *
 * A message is hostile until proven whole: everything is bounds-checked before the first
 * record is applied, and a message that fails changes nothing. The caller owns the bytes;
 * nobody writes them while they are read. */

#include "core.h"

struct request {
    const uint8_t *bytes;
    uint64_t len;
    struct pg_frame frame;        /* copied: the bytes may be unaligned */
    const uint8_t *names, *records, *area;
    uint32_t uid, pid;
};

struct refusal {
    enum pg_error error;
    uint64_t detail[2];
};

static bool refused(struct refusal *why, enum pg_error error, uint64_t first, uint64_t second)
{
    *why = (struct refusal){error, {first, second}};
    return false;
}

static struct pg_record record_at(const struct request *q, uint32_t i)
{
    struct pg_record record;
    memcpy(&record, q->records + (uint64_t)i * sizeof record, sizeof record);
    return record;
}

/* ---- decoding ------------------------------------------------------------------------- */

static bool frame_read(struct request *q, struct refusal *why)
{
    if (q->len > PG_MESSAGE_MAX)
        return refused(why, PG_ERR_TOO_LARGE, PG_MESSAGE_MAX, q->len);
    if (q->len < sizeof q->frame)
        return refused(why, PG_ERR_MALFORMED, q->len, sizeof q->frame);
    memcpy(&q->frame, q->bytes, sizeof q->frame);
    if (q->frame.magic != PG_WIRE_MAGIC)
        return refused(why, PG_ERR_MALFORMED, 0, q->frame.magic);
    if (q->frame.version != PG_WIRE_VERSION)
        return refused(why, PG_ERR_VERSION, PG_WIRE_VERSION, q->frame.version);
    if (q->frame.error != 0 || (q->frame.flags & ~(uint32_t)PG_W_AT) != 0)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_frame, flags), q->frame.flags);
    return true;
}

static bool tables_read(struct request *q, struct refusal *why)
{
    const struct pg_frame *f = &q->frame;
    if (f->count > PG_BATCH_RECORDS || f->count == 0)
        return refused(why, PG_ERR_TOO_LARGE, PG_BATCH_RECORDS, f->count);
    if (f->names > PG_BATCH_NAMES || f->names == 0)
        return refused(why, PG_ERR_TOO_LARGE, PG_BATCH_NAMES, f->names);
    if (f->names_bytes % 8 != 0)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_frame, names_bytes),
                       f->names_bytes);
    const uint64_t fixed = sizeof *f + f->names_bytes + f->count * sizeof(struct pg_record);
    if (fixed > q->len)
        return refused(why, PG_ERR_MALFORMED, q->len, fixed);
    q->names = q->bytes + sizeof *f;
    q->records = q->names + f->names_bytes;
    q->area = q->bytes + fixed;
    return true;
}

/* Bytes of the UTF-8 character at `b`; 0 = it is none, or NUL. RFC 3629, section 4. */
static uint32_t character_len(const uint8_t *b, uint32_t left)
{
    const uint32_t len = b[0] == 0 ? 0 : b[0] < 0x80 ? 1 : b[0] < 0xc2 ? 0 : b[0] < 0xe0 ? 2
                         : b[0] < 0xf0 ? 3 : b[0] < 0xf5 ? 4 : 0;
    if (len > left)
        return 0;
    for (uint32_t i = 1; i < len; i++)
        if ((b[i] & 0xc0) != 0x80)
            return 0;
    const bool overlong = (b[0] == 0xe0 && b[1] < 0xa0) || (b[0] == 0xf0 && b[1] < 0x90);
    const bool outside = (b[0] == 0xed && b[1] > 0x9f) || (b[0] == 0xf4 && b[1] > 0x8f);
    return overlong || outside ? 0 : len;
}

static bool name_sound(struct name name)
{
    const uint8_t *b = (const uint8_t *)name.bytes;
    uint32_t left = name.len;
    while (left != 0) {
        const uint32_t len = character_len(b, left);
        if (len == 0)
            return false;
        b += len;
        left -= len;
    }
    return true;
}

/* Only a PUT gives birth to names. Their rows are held, so that a later name of the table
 * does not take an earlier one's. */
static void name_resolve(struct pg_arena *a, uint32_t i, struct name ns, struct name topic)
{
    a->name_rows[i] = a->name_puts[i] ? names_topic(a, ns, topic, &a->name_status[i]) : PG_NIL;
    a->name_namespaces[i] = names_find_namespace(a, ns);
    if (a->name_rows[i] != PG_NIL)
        names_hold(a, a->name_rows[i]);
}

/* Walks the name table; calls with a NULL arena only check. */
static bool names_walk(struct request *q, struct pg_arena *resolve, struct refusal *why)
{
    const uint8_t *at = q->names, *end = q->records;
    for (uint32_t i = 0; i < q->frame.names; i++) {
        if (end - at < 2 || end - at < 2 + at[0] + at[1])
            return refused(why, PG_ERR_MALFORMED, (uint64_t)(at - q->bytes), i);
        const struct name ns = {(const char *)at + 2, at[0]};
        const struct name topic = {(const char *)at + 2 + at[0], at[1]};
        if (ns.len == 0 || ns.len > PG_NAMESPACE_MAX || topic.len > PG_TOPIC_MAX ||
            !name_sound(ns) || !name_sound(topic))
            return refused(why, PG_ERR_MALFORMED, (uint64_t)(at - q->bytes), i);
        if (resolve != NULL)
            name_resolve(resolve, i, ns, topic);
        at += 2 + ns.len + topic.len;
    }
    return end - at < 8 || refused(why, PG_ERR_MALFORMED, (uint64_t)(at - q->bytes), 0);
}

static bool op_allowed(const struct pg_frame *f, unsigned op)
{
    return f->message == PG_M_BATCH ? op == PG_OP_PUT || op == PG_OP_CANCEL : op == PG_OP_GET;
}

static bool record_sound(const struct request *q, const struct pg_record *r)
{
    const bool put = r->op == PG_OP_PUT;
    return op_allowed(&q->frame, r->op) && r->key_len != 0 && r->key_type < PG_KEY_TYPES &&
           (r->key_type != PG_KEY_UUID || r->key_len == 16) && r->name < q->frame.names &&
           r->reserved0 == 0 && r->reserved1 == 0 && r->payload_len <= PG_PAYLOAD_MAX &&
           r->mode < PG_MODES && r->time_kind < PG_T_KINDS &&
           (put ? r->value == 0 : r->mode == 0 && r->time_kind == 0 && r->payload_len == 0 &&
                                  r->time_ns == 0);
}

static bool records_walk(const struct request *q, struct refusal *why)
{
    const uint64_t area = (uint64_t)(q->bytes + q->len - q->area);
    uint64_t used = 0;
    for (uint32_t i = 0; i < q->frame.count; i++) {
        const struct pg_record r = record_at(q, i);
        if (!record_sound(q, &r))
            return refused(why, PG_ERR_MALFORMED, (uint64_t)(q->records - q->bytes) +
                           (uint64_t)i * sizeof r, i);
        used += (uint64_t)r.key_len + r.payload_len;
    }
    return used == area || refused(why, PG_ERR_MALFORMED, q->len - area + used, q->len);
}

static bool batch_read(struct request *q, struct refusal *why)
{
    return tables_read(q, why) && names_walk(q, NULL, why) && records_walk(q, why);
}

/* Four independent lanes, eight bytes a step: catches a client that re-sends another batch
 * under the same sequence, not an attacker (who can only hurt his own session). */
static uint32_t fingerprint(const uint8_t *bytes, uint64_t len)
{
    uint64_t lanes[4] = {len, 0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9};
    uint64_t word = 0;
    for (uint64_t i = 0; i + 8 <= len; i += 8) {
        memcpy(&word, bytes + i, 8);
        uint64_t *lane = &lanes[i / 8 % 4];
        *lane = (*lane ^ word) * 0xff51afd7ed558ccd;
        *lane ^= *lane >> 32;     /* or the top byte would never leave its place */
    }
    memcpy(&word, bytes + (len & ~7ull), len & 7);
    const uint64_t sum = (lanes[0] ^ lanes[1] >> 7) + (lanes[2] ^ lanes[3] >> 11) + word;
    return (uint32_t)((sum * 0xc4ceb9fe1a85ec53) >> 32);
}

/* ---- applying -------------------------------------------------------------------------- */

static void hash_ahead(struct pg_arena *a, const struct request *q, uint32_t from)
{
    const uint8_t *at = q->area;
    for (uint32_t i = 0; i < q->frame.count; i++) {
        const struct pg_record r = record_at(q, i);
        if (i >= from)
            a->hashes[i] = key_hash(a, a->name_namespaces[r.name], r.key_type, at, r.key_len);
        at += r.key_len + r.payload_len;
    }
}

static void record_apply(struct pg_arena *a, const struct pg_record *r, const uint8_t *bytes,
                         uint32_t hash, struct pg_result *result)
{
    const struct key key = {bytes, hash, a->name_namespaces[r->name], r->key_len, r->key_type};
    const uint32_t topic = a->name_rows[r->name];
    if (r->op == PG_OP_CANCEL) {
        timers_cancel(a, &key, r->value, result);
        return;
    }
    if (topic == PG_NIL) {
        a->metrics->refused_names++;
        *result = (struct pg_result){a->name_status[r->name], 0};
        return;
    }
    const struct put put = {key, bytes + r->key_len, r->payload_len, topic,
                            r->mode, r->time_kind, r->time_ns};
    timers_put(a, &put, result);
}

/* Result first, then the count of applied records: what counts as applied is answered. */
static void records_apply(struct pg_arena *a, const struct request *q, struct pg_session *s,
                          struct pg_result *results)
{
    enum { AHEAD = 8 };
    const uint8_t *at = q->area;
    hash_ahead(a, q, s->applied);
    for (uint32_t i = 0; i < q->frame.count; i++) {
        const struct pg_record r = record_at(q, i);
        if (i + AHEAD < q->frame.count)
            index_prefetch(&a->index, a->hashes[i + AHEAD]);
        if (i >= s->applied) {
            record_apply(a, &r, at, a->hashes[i], &results[i]);
            STORE_RELEASE(&s->applied, i + 1);
        }
        at += r.key_len + r.payload_len;
    }
}

static void batch_begin(struct pg_session *s, const struct request *q, struct pg_reply_memory *m,
                        uint32_t sum)
{
    if (s->current == q->frame.sequence && m->checksum == sum && s->count == q->frame.count)
        return;                   /* resumed after the daemon died in the midst of it */
    STORE_RELEASE(&m->sequence, 0ull);
    m->checksum = sum;
    m->count = q->frame.count;
    s->applied = 0;
    s->count = q->frame.count;
    STORE_RELEASE(&s->current, q->frame.sequence);
}

static void names_begin(struct pg_arena *a, struct request *q)
{
    struct refusal never;
    memset(a->name_puts, 0, sizeof a->name_puts);
    for (uint32_t i = 0; i < q->frame.count; i++) {
        const struct pg_record r = record_at(q, i);
        a->name_puts[r.name] |= r.op == PG_OP_PUT;
    }
    names_walk(q, a, &never);
}

static void names_end(struct pg_arena *a, const struct request *q)
{
    for (uint32_t i = 0; i < q->frame.names; i++)
        if (a->name_rows[i] != PG_NIL)
            names_release(a, a->name_rows[i]);
}

static void batch_apply(struct pg_arena *a, struct request *q, struct pg_session *s,
                        uint32_t sum)
{
    struct pg_reply_memory *m = session_reply(a, s, q->frame.sequence);

    batch_begin(s, q, m, sum);
    names_begin(a, q);
    records_apply(a, q, s, m->results);
    names_end(a, q);
    STORE_RELEASE(&m->sequence, q->frame.sequence);
    STORE_RELEASE(&s->last, q->frame.sequence);
    STORE_RELEASE(&s->current, 0ull);
    a->metrics->batches++;
    a->metrics->records += q->frame.count;
}

/* ---- replies ------------------------------------------------------------------------------ */

static void reply_head(const struct request *q, struct sink *out, uint32_t count)
{
    struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                         .message = q->frame.message, .session = q->frame.session,
                         .sequence = q->frame.sequence, .count = count};
    sink_put(out, &f, sizeof f);
}

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

static void reply_results(const struct request *q, struct sink *out,
                          const struct pg_reply_memory *m)
{
    reply_head(q, out, m->count);
    sink_put(out, m->results, (uint64_t)m->count * sizeof(struct pg_result));
}

/* ---- messages ------------------------------------------------------------------------------ */

static bool handle_hello(struct pg_arena *a, struct request *q, struct sink *out,
                         struct refusal *why)
{
    struct pg_hello hello;
    if (q->len != sizeof q->frame + sizeof hello || q->frame.count != 0)
        return refused(why, PG_ERR_MALFORMED, q->len, sizeof q->frame + sizeof hello);
    memcpy(&hello, q->bytes + sizeof q->frame, sizeof hello);
    struct pg_session *s = session_open(a, hello.nonce, q->uid, q->pid);
    if (s == NULL)
        return refused(why, PG_ERR_SESSIONS_FULL, a->secret->sessions,
                       (uint64_t)sessions_silence_ns(a));
    s->used_boot_ns = a->real_boot_ns;
    struct pg_welcome w = {.session = s->id, .stream_id = a->header->stream_id,
                           .layout_id = a->header->layout_id, .epoch = a->header->epoch,
                           .now_ns = a->now_ns, .wall_offset_ns = a->header->wall_offset_ns,
                           .last = s->last, .tick_ns = a->header->tick_ns,
                           .clock_kind = a->header->clock_kind, .window = PG_WINDOW,
                           .batch_records = PG_BATCH_RECORDS, .message_bytes = PG_MESSAGE_MAX};
    memcpy(w.uuid, a->header->uuid, sizeof w.uuid);
    q->frame.session = s->id;
    reply_head(q, out, 0);
    sink_put(out, &w, sizeof w);
    return true;
}

static bool session_of(struct pg_arena *a, const struct request *q, struct pg_session **s,
                       struct refusal *why)
{
    *s = session_find(a, q->frame.session);
    if (*s == NULL)
        return refused(why, PG_ERR_SESSION_EXPIRED, q->frame.session, 0);
    if ((*s)->uid != q->uid)
        return refused(why, PG_ERR_DENIED, q->uid, 0);
    (*s)->used_boot_ns = a->real_boot_ns;
    return true;
}

static bool handle_repeated(struct pg_arena *a, const struct request *q,
                            const struct pg_session *s, uint32_t sum, struct sink *out,
                            struct refusal *why)
{
    const struct pg_reply_memory *m = session_reply(a, s, q->frame.sequence);
    if (m->sequence != q->frame.sequence)
        return refused(why, PG_ERR_STALE, s->last >= PG_WINDOW ? s->last - PG_WINDOW + 1 : 1,
                       q->frame.sequence);
    if (m->checksum != sum)
        return refused(why, PG_ERR_CHANGED, m->checksum, sum);
    reply_results(q, out, m);
    a->metrics->batches_repeated++;
    return true;
}

static bool time_allowed(const struct pg_arena *a, const struct request *q, struct refusal *why)
{
    if (!(q->frame.flags & PG_W_AT))
        return true;
    if (a->header->clock_kind == PG_CLOCK_VIRTUAL && q->frame.at_ns >= a->now_ns)
        return true;
    return refused(why, PG_ERR_CLOCK, (uint64_t)a->now_ns, (uint64_t)q->frame.at_ns);
}

static bool handle_batch(struct pg_arena *a, struct request *q, struct sink *out,
                         struct refusal *why, int64_t *wait_ns)
{
    struct pg_session *s;
    if (!session_of(a, q, &s, why) || !batch_read(q, why))
        return false;
    const uint32_t sum = fingerprint(q->bytes, q->len);
    if (q->frame.sequence == 0)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_frame, sequence), 0);
    if (q->frame.sequence <= s->last)
        return handle_repeated(a, q, s, sum, out, why);
    if (q->frame.sequence != s->last + 1)
        return refused(why, PG_ERR_OUT_OF_ORDER, s->last + 1, q->frame.sequence);
    if (!time_allowed(a, q, why))
        return false;
    if ((q->frame.flags & PG_W_AT) && q->frame.at_ns > a->now_ns) {
        *wait_ns = q->frame.at_ns;
        return true;
    }
    batch_apply(a, q, s, sum);
    reply_results(q, out, session_reply(a, s, q->frame.sequence));
    return true;
}

static void info_unknown(struct sink *out)
{
    sink_put(out, &(struct pg_info){.ticket = PG_ST_UNKNOWN, .wall_ns = NO_WALL},
             sizeof(struct pg_info));
}

/* GET creates no names: a namespace that is not there has no timers. */
static uint32_t query_namespace(const struct pg_arena *a, const struct request *q, uint32_t index)
{
    const uint8_t *at = q->names;
    for (uint32_t i = 0; i < index; i++)
        at += 2 + at[0] + at[1];
    return names_find_namespace(a, (struct name){(const char *)at + 2, at[0]});
}

static bool handle_query(struct pg_arena *a, struct request *q, struct sink *out,
                         struct refusal *why)
{
    struct pg_session *s;
    if (!session_of(a, q, &s, why) || !batch_read(q, why))
        return false;
    reply_head(q, out, q->frame.count);
    const uint8_t *at = q->area;
    for (uint32_t i = 0; i < q->frame.count; i++) {
        const struct pg_record r = record_at(q, i);
        const uint32_t ns = query_namespace(a, q, r.name);
        const struct key key = {at, key_hash(a, ns, r.key_type, at, r.key_len), ns, r.key_len,
                                r.key_type};
        const uint32_t slot = ns == PG_NIL ? PG_NIL : timers_find(a, &key);
        if (slot == PG_NIL || !info_write(a, slot, a->slots.hot[slot].ctl, out))
            info_unknown(out);
        if (out->full)
            return refused(why, PG_ERR_TOO_LARGE, i, q->frame.count);
        at += r.key_len;
    }
    return true;
}

static bool handle_bye(struct pg_arena *a, struct request *q, struct sink *out,
                       struct refusal *why)
{
    struct pg_session *s;
    if (!session_of(a, q, &s, why))
        return false;
    session_end(a, s);
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
    case PG_M_PING: reply_head(q, out, 0); return true;
    default: return refused(why, PG_ERR_UNKNOWN_MESSAGE, q->frame.message, 0);
    }
}

int pg_handle(struct pg_arena *a, const void *message, uint64_t message_bytes, uint32_t uid,
              uint32_t pid, int64_t real_boot_ns, void *reply, uint64_t *reply_bytes,
              int64_t *wait_ns)
{
    struct request q = {.bytes = message, .len = message_bytes, .uid = uid, .pid = pid};
    struct sink out = {reply, 0, PG_MESSAGE_MAX, false};
    struct refusal why = {PG_ERR_INTERNAL, {0, 0}};

    a->real_boot_ns = real_boot_ns;
    *wait_ns = INT64_MIN;
    if (!dispatch(a, &q, &out, &why, wait_ns)) {
        reply_refusal(&q, &out, &why);
        a->metrics->batches_refused++;
    }
    *reply_bytes = out.used;
    return *wait_ns == INT64_MIN ? PG_H_REPLY : PG_H_WAIT;
}

/* ---- one timer without a message --------------------------------------------------------- */

static uint32_t put_topic(struct pg_arena *a, const struct pg_put *p, uint32_t *status)
{
    return names_topic(a, (struct name){p->namespace_name, p->namespace_len},
                       (struct name){p->topic_name, p->topic_len}, status);
}

static struct key put_key(const struct pg_arena *a, const struct pg_put *p, uint32_t ns)
{
    return (struct key){p->key, key_hash(a, ns, p->key_type, p->key, p->key_len), ns, p->key_len,
                        p->key_type};
}

void pg_put(struct pg_arena *a, const struct pg_put *p, struct pg_result *result)
{
    uint32_t status;
    const uint32_t topic = put_topic(a, p, &status);
    if (topic == PG_NIL) {
        a->metrics->refused_names++;
        *result = (struct pg_result){status, 0};
        return;
    }
    const struct put put = {put_key(a, p, a->topics[topic].namespace_row), p->payload,
                            p->payload_len, topic, p->mode, p->time_kind, p->time_ns};
    timers_put(a, &put, result);
}

void pg_cancel(struct pg_arena *a, const struct pg_put *p, uint64_t ticket,
               struct pg_result *result)
{
    const uint32_t ns = names_find_namespace(a, (struct name){p->namespace_name,
                                                              p->namespace_len});
    const struct key key = put_key(a, p, ns);
    timers_cancel(a, &key, ticket, result);
}

uint64_t pg_get(struct pg_arena *a, const struct pg_put *p, void *bytes, uint64_t size)
{
    struct sink out = {bytes, 0, size, false};
    const uint32_t ns = names_find_namespace(a, (struct name){p->namespace_name,
                                                              p->namespace_len});
    const struct key key = put_key(a, p, ns);
    const uint32_t slot = ns == PG_NIL ? PG_NIL : timers_find(a, &key);
    if (slot == PG_NIL || !info_write(a, slot, a->slots.hot[slot].ctl, &out))
        info_unknown(&out);
    return out.used;
}

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

/* What each op may carry, and what of its name has to exist or is born; a field that an op
 * does not use is 0. */
enum { USES_TIME = 1, USES_VALUE = 2, USES_KEYS = 4, IN_QUERY = 8, NEEDS_TOPIC = 16,
       NEEDS_NAMESPACE = 32 };
static const struct op_rule {
    uint8_t uses, modes, time_kinds;
    uint64_t value_max;
} rules[] = {
    [PG_OP_PUT] = {USES_TIME | NEEDS_TOPIC, PG_MODES, PG_T_KINDS, 0},
    [PG_OP_CANCEL] = {USES_VALUE, 1, 1, UINT64_MAX},
    [PG_OP_GET] = {IN_QUERY, 1, 1, 0},
    [PG_OP_WATCH] = {USES_TIME | USES_VALUE | USES_KEYS | NEEDS_TOPIC, PG_CONDITIONS, PG_T_WALL,
                     UINT64_MAX},
    [PG_OP_ADVANCE_KEY] = {USES_VALUE | NEEDS_NAMESPACE, 1, 1, PG_LEVEL_MAX},
    [PG_OP_BUMP] = {USES_VALUE | NEEDS_NAMESPACE, 1, 1, PG_LEVEL_MAX},
    [PG_OP_FAIL] = {USES_VALUE | NEEDS_NAMESPACE, 1, 1, UINT32_MAX},
    [PG_OP_CLEAR] = {0, 1, 1, 0},
    [PG_OP_FORGET] = {0, 1, 1, 0},
    [PG_OP_CANCEL_FOR_KEY] = {0, 1, 1, 0},
    [PG_OP_COMPLETE] = {USES_VALUE, 1, 1, UINT64_MAX},
};

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

/* Only what arms or advances gives birth to names. Their rows are held, so that a later name of the table
 * does not take an earlier one's. */
static void name_resolve(struct pg_arena *a, uint32_t i, struct name ns, struct name topic)
{
    const unsigned uses = a->name_uses[i];
    a->name_rows[i] = uses & NEEDS_TOPIC ? names_topic(a, ns, topic, &a->name_status[i]) : PG_NIL;
    a->name_namespaces[i] = uses & NEEDS_NAMESPACE && a->name_rows[i] == PG_NIL
                                ? names_namespace(a, ns, &a->name_status[i])
                                : names_find_namespace(a, ns);
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

static bool key_sound(unsigned type, unsigned len)
{
    return len != 0 && type < PG_KEY_TYPES && (type != PG_KEY_UUID || len == 16);
}

static bool fields_sound(const struct pg_record *r, const struct op_rule *rule)
{
    const bool time = rule->uses & USES_TIME;
    return r->mode < rule->modes && r->time_kind < rule->time_kinds &&
           r->value <= rule->value_max && (r->op != PG_OP_FAIL || r->value != 0) &&
           (time || (r->time_ns == 0 && r->payload_len == 0)) &&
           r->flags <= (r->op == PG_OP_WATCH) &&
           ((rule->uses & USES_KEYS) != 0) == (r->ext_len != 0);
}

static bool record_sound(const struct request *q, const struct pg_record *r)
{
    if (r->op == 0 || r->op > PG_OP_COMPLETE)
        return false;
    const struct op_rule *rule = &rules[r->op];
    return ((rule->uses & IN_QUERY) != 0) == (q->frame.message == PG_M_QUERY) &&
           key_sound(r->key_type, r->key_len) && r->name < q->frame.names &&
           r->payload_len <= PG_PAYLOAD_MAX && fields_sound(r, rule);
}

/* Number of watch keys in an extension; 0 = malformed. */
static uint32_t watch_keys_count(const uint8_t *at, uint32_t bytes)
{
    const uint8_t *end = at + bytes;
    uint32_t count = 0;
    while (at != end) {
        struct pg_watch_key k;
        if ((uint64_t)(end - at) < sizeof k || ++count > PG_WATCH_KEYS_MAX)
            return 0;
        memcpy(&k, at, sizeof k);
        if (!key_sound(k.key_type, k.key_len) || (uint64_t)(end - at) < sizeof k + k.key_len)
            return 0;
        at += sizeof k + k.key_len;
    }
    return count;
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
        const uint64_t fixed = (uint64_t)r.key_len + r.payload_len;
        if (used + fixed + r.ext_len > area)
            return refused(why, PG_ERR_MALFORMED, q->len, i);
        if (r.ext_len != 0 && watch_keys_count(q->area + used + fixed, r.ext_len) == 0)
            return refused(why, PG_ERR_MALFORMED, q->len - area + used + fixed, i);
        used += fixed + r.ext_len;
    }
    return used == area || refused(why, PG_ERR_MALFORMED, q->len - area + used, q->len);
}

static bool batch_read(struct request *q, struct refusal *why)
{
    return tables_read(q, why) && names_walk(q, NULL, why) && records_walk(q, why);
}

static uint64_t fold(uint64_t lane, const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    lane = (lane ^ word) * 0xff51afd7ed558ccd;
    return lane ^ lane >> 32;     /* or the top byte would never leave its place */
}

/* Four independent lanes, eight bytes of each a step; the last step ends with the message, which
 * is a frame at least. Catches a client that re-sends another batch under the same sequence, not
 * an attacker (who can only hurt his own session). */
static uint32_t fingerprint(const uint8_t *bytes, uint64_t len)
{
    uint64_t a = len, b = 0x9e3779b97f4a7c15, c = 0xc2b2ae3d27d4eb4f, d = 0x165667b19e3779f9;
    const uint8_t *at = bytes, *last = bytes + len - 32;
    for (;; at = at + 32 < last ? at + 32 : last) {
        a = fold(a, at);
        b = fold(b, at + 8);
        c = fold(c, at + 16);
        d = fold(d, at + 24);
        if (at == last)
            break;
    }
    return (uint32_t)((((a ^ b >> 7) + (c ^ d >> 11)) * 0xc4ceb9fe1a85ec53) >> 32);
}

/* ---- applying -------------------------------------------------------------------------- */

/* Records whose memory is fetched together, before the first of them is applied. */
struct group {
    uint32_t first, end;          /* numbers of the records */
    uint32_t keys[PG_AHEAD + 1];  /* of each: its first hash in key_hashes[]; last: the end */
    uint32_t level_count;
    uint32_t levels[PG_AHEAD];    /* places in the group, of records on watch keys */
    uint64_t reach[PG_AHEAD];     /* of each: up to which level it visits watchers */
    uint32_t rows[PG_AHEAD];      /* by place: the row that the watch key may have */
};

static bool of_level(unsigned op) { return op >= PG_OP_ADVANCE_KEY && op <= PG_OP_CANCEL_FOR_KEY; }

static uint64_t reach_of(const struct pg_record *r)
{
    if (r->op == PG_OP_ADVANCE_KEY)
        return r->value;
    return r->op == PG_OP_FORGET || r->op == PG_OP_CLEAR ? 0 : UINT64_MAX;
}

/* Returns how many there are. */
static uint32_t watch_keys_hash(struct pg_arena *a, uint32_t ns, const uint8_t *at,
                                uint32_t bytes, uint32_t *hashes)
{
    const uint8_t *end = at + bytes;
    uint32_t count = 0;
    while (at != end) {
        struct pg_watch_key k;
        memcpy(&k, at, sizeof k);
        at += sizeof k;
        hashes[count] = key_hash(a, ns, k.key_type, at, k.key_len);
        index_prefetch(&a->level_index, hashes[count++]);
        at += k.key_len;
    }
    return count;
}

/* Hashes all keys of a record; returns how many watch keys a WATCH has. */
static uint32_t record_hash(struct pg_arena *a, struct group *g, const struct pg_record *r,
                            const uint8_t *at, uint32_t n)
{
    const uint32_t ns = a->name_namespaces[r->name], place = n - g->first;
    a->hashes[n] = key_hash(a, ns, r->key_type, at, r->key_len);
    g->rows[place] = PG_NIL;
    if (of_level(r->op)) {
        g->levels[g->level_count] = place;
        g->reach[g->level_count++] = reach_of(r);
        index_prefetch(&a->level_index, a->hashes[n]);
        return 0;
    }
    index_prefetch(&a->index, a->hashes[n]);
    return watch_keys_hash(a, ns, at + r->key_len + r->payload_len, r->ext_len,
                           &a->key_hashes[g->keys[place]]);
}

/* Watch keys of a WATCH, at most: each has a byte at least. */
static uint32_t watch_keys_most(const struct pg_record *r)
{
    return r->ext_len / (sizeof(struct pg_watch_key) + 1);
}

/* The group that begins with the record whose bytes stand at `at`. */
static void group_begin(struct pg_arena *a, const struct request *q, struct group *g,
                        const uint8_t *at)
{
    uint32_t n = g->first;
    g->level_count = g->keys[0] = 0;
    for (; n < q->frame.count && n < g->first + PG_AHEAD; n++) {
        const struct pg_record r = record_at(q, n);
        uint32_t *keys = &g->keys[n - g->first];
        if (keys[0] + watch_keys_most(&r) > PG_WATCH_KEYS_MAX && n != g->first)
            break;
        keys[1] = keys[0] + record_hash(a, g, &r, at, n);
        at += (uint64_t)r.key_len + r.payload_len + r.ext_len;
    }
    g->end = n;
    ahead_levels(a, &a->hashes[g->first], g->levels, g->reach, g->level_count, g->rows);
}

/* ---- applying one record ------------------------------------------------------------------ */

struct step {
    const struct request *q;
    struct pg_session *session;
    struct pg_reply_memory *memory;
    struct pg_record record;
    struct put put;               /* as far as the record has one */
    const uint8_t *ext;
    uint32_t n;                   /* number of the record */
    struct group group;           /* which it is in */
};

static bool watch_apply(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    const uint32_t *keys = &s->group.keys[s->n - s->group.first];
    const struct watch w = {.put = s->put, .session = s->session->id,
                            .threshold = s->record.value, .keys = s->ext,
                            .keys_bytes = s->record.ext_len,
                            .hashes = &a->key_hashes[keys[0]], .count = keys[1] - keys[0],
                            .condition = s->record.mode, .notice = s->record.flags != 0};
    return operations_watch(a, &w, result);
}

/* What a rebuild, or the next call, has to know of the record under way: whose number stands
 * in intent[0]. Overwritten by the next such record, voided by the next batch. */
static void intend(const struct step *s, uint64_t value)
{
    uint64_t *intent = s->session->intent;
    STORE_RELEASE(&intent[0], 0ull);
    intent[1] = value;
    intent[2] = s->record.op;
    STORE_RELEASE(&intent[0], s->n + 1ull);
}

/* What a record arms takes the next ticket: by that a rebuild sees whether it did. */
static bool arm_apply(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    intend(s, a->header->next_ticket);
    if (s->record.op == PG_OP_PUT)
        timers_put(a, &s->put, result);
    else if (!watch_apply(a, s, result))
        STORE_RELEASE(&s->session->intent[0], 0ull);
    return s->session->intent[0] != 0;
}

/* A bump is an advance to a level that is computed once: the session's intent remembers it
 * until the record is applied whole. */
static bool bump_apply(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    uint64_t *intent = s->session->intent;
    if (intent[0] != s->n + 1u) {
        const uint32_t row = level_find(a, &s->put.key);
        const uint64_t level = row == PG_NIL ? 0 : a->levels[row].level;
        if (s->record.value > PG_LEVEL_MAX - level) {
            answer(result, 0, PG_ST_OVERFLOW, 0);
            return true;
        }
        intend(s, level + s->record.value);
    }
    return operations_advance(a, &s->put.key, intent[1], result);
}

/* The ended keys are kept with the reply: u32 record number, u32 bytes, the keys. */
static void cancel_for_key_apply(struct pg_arena *a, const struct step *s,
                                 struct pg_result *result)
{
    struct pg_reply_memory *m = s->memory;
    if (m->extra_blob == PG_NIL) {
        m->extra_bytes = 0;
        m->extra_blob = blobs_take(&a->blobs, blob_granules(PG_ENDED_KEYS_BYTES));
        if (m->extra_blob == PG_NIL) {
            answer(result, 0, PG_ST_FULL_PAYLOAD, 0);
            return;
        }
        a->metrics->blob_bytes += PG_ENDED_KEYS_BYTES;
    }
    struct sink out = {blob_at(&a->blobs, m->extra_blob), m->extra_bytes, PG_ENDED_KEYS_BYTES, false};
    uint32_t head[2] = {s->n, 0};
    uint8_t *at = sink_take(&out, sizeof head);
    if (at == NULL) {
        answer(result, 0, PG_ST_MORE, 0);
        return;
    }
    operations_cancel_for_key(a, &s->put.key, &out, result);
    head[1] = (uint32_t)(out.used - m->extra_bytes - sizeof head);
    memcpy(at, head, sizeof head);
    m->extra_bytes = (uint32_t)out.used;
}

/* Gives back what the ended keys did not need. */
static void extra_trim(struct pg_arena *a, struct pg_reply_memory *m)
{
    const uint32_t used = blob_granules(m->extra_bytes), all = blob_granules(PG_ENDED_KEYS_BYTES);
    if (m->extra_blob == PG_NIL || used == all)
        return;
    blobs_give(&a->blobs, m->extra_blob + used, all - used);
    a->metrics->blob_bytes -= (uint64_t)(all - used) * PG_GRANULE;
}

/* False: the bounded work of this call is used up; the same again continues. */
static bool op_apply(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    const struct key *key = &s->put.key;
    switch (s->record.op) {
    case PG_OP_PUT:
    case PG_OP_WATCH: return arm_apply(a, s, result);
    case PG_OP_CANCEL: return timers_cancel(a, key, s->record.value, result);
    case PG_OP_ADVANCE_KEY: return operations_advance(a, key, s->record.value, result);
    case PG_OP_BUMP: return bump_apply(a, s, result);
    case PG_OP_FAIL: return operations_fail(a, key, (uint32_t)s->record.value, result);
    case PG_OP_CLEAR: operations_clear(a, key, result); return true;
    case PG_OP_FORGET: operations_forget(a, key, result); return true;
    case PG_OP_CANCEL_FOR_KEY: cancel_for_key_apply(a, s, result); return true;
    default: return operations_complete(a, key, s->session->id, s->record.value, result);
    }
}

static bool name_missing(const struct pg_arena *a, const struct pg_record *r)
{
    const unsigned uses = rules[r->op].uses;
    return (uses & NEEDS_TOPIC && a->name_rows[r->name] == PG_NIL) ||
           (uses & NEEDS_NAMESPACE && a->name_namespaces[r->name] == PG_NIL);
}

static bool record_apply(struct pg_arena *a, struct step *s, const uint8_t *at,
                         struct pg_result *result)
{
    const struct pg_record *r = &s->record;
    const struct key key = {at, a->hashes[s->n], a->name_namespaces[r->name],
                            s->group.rows[s->n - s->group.first], r->key_len, r->key_type};
    if (name_missing(a, r)) {
        a->metrics->refused_names++;
        *result = (struct pg_result){a->name_status[r->name], 0};
        return true;
    }
    s->put = (struct put){key, at + r->key_len, r->payload_len, a->name_rows[r->name], r->mode,
                          r->time_kind, r->time_ns};
    s->ext = at + r->key_len + r->payload_len;
    return op_apply(a, s, result);
}

/* Result first, then the count of applied records: what counts as applied is answered.
 * False: not all are applied yet. */
static bool records_apply(struct pg_arena *a, const struct request *q, struct pg_session *session,
                          struct pg_reply_memory *m)
{
    struct step s = {.q = q, .session = session, .memory = m};
    const uint8_t *at = q->area;
    for (s.n = 0; s.n < q->frame.count; s.n++) {
        s.record = record_at(q, s.n);
        if (s.n >= session->applied) {
            if (s.n >= s.group.end) {
                s.group.first = s.n;
                group_begin(a, q, &s.group, at);
            }
            if (!record_apply(a, &s, at, &m->results[s.n]))
                return false;
            STORE_RELEASE(&session->applied, s.n + 1);
        }
        at += (uint64_t)s.record.key_len + s.record.payload_len + s.record.ext_len;
    }
    return true;
}

static void batch_begin(struct pg_arena *a, struct pg_session *s, const struct request *q,
                        struct pg_reply_memory *m, uint32_t sum)
{
    if (s->current == q->frame.sequence && m->checksum == sum && s->count == q->frame.count)
        return;                   /* continued: its work was over the bound, or the daemon died */
    reply_forget(a, m);
    m->checksum = sum;
    m->count = q->frame.count;
    m->extra_blob = PG_NIL;
    memset(m->results, 0, q->frame.count * sizeof(struct pg_result));
    STORE_RELEASE(&s->intent[0], 0ull);
    s->applied = 0;
    s->count = q->frame.count;
    STORE_RELEASE(&s->current, q->frame.sequence);
}

static void names_begin(struct pg_arena *a, struct request *q)
{
    struct refusal never;
    memset(a->name_uses, 0, sizeof a->name_uses);
    for (uint32_t i = 0; i < q->frame.count; i++) {
        const struct pg_record r = record_at(q, i);
        a->name_uses[r.name] |= rules[r.op].uses & (NEEDS_TOPIC | NEEDS_NAMESPACE);
    }
    names_walk(q, a, &never);
}

static void names_end(struct pg_arena *a, const struct request *q)
{
    for (uint32_t i = 0; i < q->frame.names; i++)
        if (a->name_rows[i] != PG_NIL)
            names_release(a, a->name_rows[i]);
}

static bool batch_apply(struct pg_arena *a, struct request *q, struct pg_session *s,
                        uint32_t sum)
{
    struct pg_reply_memory *m = session_reply(a, s, q->frame.sequence);

    batch_begin(a, s, q, m, sum);
    names_begin(a, q);
    const bool whole = records_apply(a, q, s, m);
    names_end(a, q);
    if (!whole)
        return false;
    extra_trim(a, m);
    STORE_RELEASE(&m->sequence, q->frame.sequence);
    STORE_RELEASE(&s->last, q->frame.sequence);
    STORE_RELEASE(&s->current, 0ull);
    a->metrics->batches++;
    a->metrics->records += q->frame.count;
    return true;
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

static void reply_results(const struct pg_arena *a, const struct request *q, struct sink *out,
                          const struct pg_reply_memory *m)
{
    reply_head(q, out, m->count);
    sink_put(out, m->results, (uint64_t)m->count * sizeof(struct pg_result));
    if (m->extra_blob != PG_NIL)
        sink_put(out, blob_at(&a->blobs, m->extra_blob), m->extra_bytes);
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
    reply_results(a, q, out, m);
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
    if (s->current != q->frame.sequence && !time_allowed(a, q, why))
        return false;             /* what was begun goes on, wherever the clock is by now */
    if ((q->frame.flags & PG_W_AT) && q->frame.at_ns > a->now_ns) {
        *wait_ns = q->frame.at_ns;
        return true;
    }
    if (batch_apply(a, q, s, sum))
        reply_results(a, q, out, session_reply(a, s, q->frame.sequence));
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
        const struct key key = {at, key_hash(a, ns, r.key_type, at, r.key_len), ns, PG_NIL,
                                r.key_len, r.key_type};
        const uint32_t slot = ns == PG_NIL ? PG_NIL : timers_find(a, &key);
        if (slot == PG_NIL || !info_write(a, slot, a->slots.hot[slot].ctl, out))
            info_unknown(out);
        if (out->full)
            return refused(why, PG_ERR_TOO_LARGE, i, q->frame.count);
        at += r.key_len;
    }
    return true;
}

static struct pg_ack ack_at(const struct request *q, uint32_t i)
{
    struct pg_ack ack;
    memcpy(&ack, q->bytes + sizeof q->frame + i * sizeof ack, sizeof ack);
    return ack;
}

static void acks_ahead(const struct pg_arena *a, const struct request *q, uint32_t first)
{
    uint32_t slots[PG_AHEAD], count = 0;
    for (uint32_t i = first; i < q->frame.count && i < first + PG_AHEAD; i++) {
        slots[count] = ack_at(q, i).slot;
        count += slots[count] < a->slots.capacity;
    }
    ahead_outcomes(a, slots, count);
}

/* Answered with nothing: what an ACK names is gone, or it is sent again. */
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
        if (i % PG_AHEAD == 0)
            acks_ahead(a, q, i);
        inbox_acknowledge(a, s, &ack);
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

/* With a session it also says where its owner is to be reached. */
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
    default: return refused(why, PG_ERR_UNKNOWN_MESSAGE, q->frame.message, 0);
    }
}

#define VISITS_PER_CALL 1024      /* watchers that one call looks at: under a millisecond */

int pg_handle(struct pg_arena *a, const void *message, uint64_t message_bytes, uint32_t uid,
              uint32_t pid, int64_t real_boot_ns, void *reply, uint64_t *reply_bytes,
              int64_t *wait_ns)
{
    struct request q = {.bytes = message, .len = message_bytes, .uid = uid, .pid = pid};
    struct sink out = {reply, 0, PG_MESSAGE_MAX, false};
    struct refusal why = {PG_ERR_INTERNAL, {0, 0}};

    a->real_boot_ns = real_boot_ns;
    a->visits_left = VISITS_PER_CALL;
    *wait_ns = INT64_MIN;
    if (!dispatch(a, &q, &out, &why, wait_ns)) {
        reply_refusal(&q, &out, &why);
        a->metrics->batches_refused++;
    }
    *reply_bytes = out.used;
    if (out.used != 0)
        return PG_H_REPLY;
    if (*wait_ns != INT64_MIN)
        return PG_H_WAIT;
    return q.frame.message == PG_M_ACK ? PG_H_SILENT : PG_H_AGAIN;
}

/* ---- one timer without a message --------------------------------------------------------- */

static uint32_t put_topic(struct pg_arena *a, const struct pg_put *p, uint32_t *status)
{
    return names_topic(a, (struct name){p->namespace_name, p->namespace_len},
                       (struct name){p->topic_name, p->topic_len}, status);
}

static struct key put_key(const struct pg_arena *a, const struct pg_put *p, uint32_t ns)
{
    return (struct key){p->key, key_hash(a, ns, p->key_type, p->key, p->key_len), ns, PG_NIL,
                        p->key_len, p->key_type};
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
    if (!timers_cancel(a, &key, ticket, result))
        answer(result, 0, PG_ST_BUSY, 0);
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

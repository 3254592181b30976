/* decode.c - checks the messages of the command socket: bounds and rules.
 *
 * Messages may be hostile, so every byte of a message is checked before the first record is
 * applied. A message that fails a check therefore changes nothing. */

#include "core/base/common.h"
#include "core/base/slots.h"
#include "core/state/items.h"
#include "core/state/names.h"
#include "core/state/operations.h"
#include "core/front/request.h"

const struct op_rule op_rules[] = {
    [PG_OP_PUT] = {USES_TIME | USES_PAYLOAD | USES_ITEMS | NEEDS_TOPIC, PG_MODES, PG_T_KINDS,
                   PG_TICKET_MAX},
    [PG_OP_CANCEL] = {USES_VALUE, 1, 1, UINT64_MAX},
    [PG_OP_GET] = {IN_QUERY, 1, 1, 0},
    [PG_OP_WATCH] = {USES_TIME | USES_VALUE | USES_PAYLOAD | USES_KEYS | NEEDS_TOPIC, PG_CONDITIONS,
                     PG_T_WALL, UINT64_MAX},
    [PG_OP_ADVANCE_KEY] = {USES_VALUE | NEEDS_NAMESPACE, 1, 1, PG_WATERMARK_MAX},
    [PG_OP_BUMP] = {USES_VALUE | NEEDS_NAMESPACE, 1, 1, PG_WATERMARK_MAX},
    [PG_OP_FAIL] = {USES_VALUE | NEEDS_NAMESPACE, 1, 1, UINT32_MAX},
    [PG_OP_CLEAR] = {0, 1, 1, 0},
    [PG_OP_FORGET] = {0, 1, 1, 0},
    [PG_OP_CANCEL_FOR_KEY] = {0, 1, 1, 0},
    [PG_OP_COMPLETE] = {USES_VALUE, 1, 1, UINT64_MAX},
    [PG_OP_UNPARK] = {USES_VALUE | USES_PAYLOAD | NEEDS_NAMESPACE, 1, 1, PG_TICKET_MAX},
    [PG_OP_JOIN] = {USES_VALUE | USES_TIME, 1, 1, PG_CREDITS_MAX},
    [PG_OP_JOB_ACK] = {OF_LEASE, 1, 1, 0},
    [PG_OP_JOB_NACK] = {OF_LEASE | USES_TIME | USES_PAYLOAD, 1, 1, 0},
    [PG_OP_JOB_EXTEND] = {OF_LEASE | USES_TIME, 1, 1, 0},
    [PG_OP_JOB_RELEASE] = {OF_LEASE, 1, 1, 0},
    [PG_OP_JOB_REJECT] = {OF_LEASE | USES_PAYLOAD, 1, 1, 0},
};

/* ---- frame and tables ---------------------------------------------------------------- */

bool frame_read(struct request *q, struct refusal *why)
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
    const bool waits = q->frame.message == PG_M_SCHEDULE || q->frame.message == PG_M_CURSOR;
    const uint32_t known = q->frame.message == PG_M_BATCH ? PG_W_AT | PG_W_DURABLE | PG_W_BULK_LOAD
                           : waits                        ? PG_W_AT | PG_W_DURABLE
                                                          : PG_W_AT;
    if (q->frame.error != 0 || (q->frame.flags & ~known) != 0)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_frame, flags), q->frame.flags);
    return true;
}

static bool rows_sound(const struct request *q)
{
    static const uint8_t none[sizeof q->rows.bulk_load];
    return memcmp(q->rows.bulk_load, none, sizeof none) != 0 &&
           q->rows.first_row <= PG_BULK_LOAD_ROW_MAX &&
           q->frame.count <= PG_BULK_LOAD_ROW_MAX - q->rows.first_row;
}

/* If the batch has the flag PG_W_BULK_LOAD, read the bulk load and the row number of the first
 * record. */
static bool rows_read(struct request *q, struct refusal *why)
{
    q->in_bulk_load = (q->frame.flags & PG_W_BULK_LOAD) != 0;
    if (!q->in_bulk_load)
        return true;
    if (q->len < sizeof q->frame + sizeof q->rows)
        return refused(why, PG_ERR_MALFORMED, q->len, sizeof q->frame + sizeof q->rows);
    memcpy(&q->rows, q->bytes + sizeof q->frame, sizeof q->rows);
    return rows_sound(q) || refused(why, PG_ERR_MALFORMED, sizeof q->frame, q->rows.first_row);
}

static bool tables_find(struct request *q, struct refusal *why)
{
    const struct pg_frame *f = &q->frame;
    if (f->count > PG_BATCH_RECORDS || f->count == 0)
        return refused(why, PG_ERR_TOO_LARGE, PG_BATCH_RECORDS, f->count);
    if (f->names > PG_BATCH_NAMES || f->names == 0)
        return refused(why, PG_ERR_TOO_LARGE, PG_BATCH_NAMES, f->names);
    if (f->names_bytes % 8 != 0)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_frame, names_bytes),
                       f->names_bytes);
    const uint64_t head = sizeof *f + (q->in_bulk_load ? sizeof q->rows : 0);
    const uint64_t fixed = head + f->names_bytes + f->count * sizeof(struct pg_record);
    if (fixed > q->len)
        return refused(why, PG_ERR_MALFORMED, q->len, fixed);
    q->names = q->bytes + head;
    q->records = q->names + f->names_bytes;
    q->area = q->bytes + fixed;
    return true;
}

/* ---- names ---------------------------------------------------------------------------- */

/* Return the number of bytes of the UTF-8 character at `b`; 0 = the character is invalid or NUL.
 * Source: RFC 3629, section 4. */
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

bool name_sound(struct name name)
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

static bool names_walk(const struct request *q, struct refusal *why)
{
    const uint8_t *at = q->names, *end = q->records;
    for (uint32_t i = 0; i < q->frame.names; i++) {
        struct name ns, topic;
        if (end - at < 2 || end - at < 2 + at[0] + at[1])
            return refused(why, PG_ERR_MALFORMED, (uint64_t)(at - q->bytes), i);
        const uint8_t *next = names_next(at, &ns, &topic);
        if (ns.len == 0 || ns.len > PG_NAMESPACE_MAX || topic.len > PG_TOPIC_MAX ||
            !name_sound(ns) || !name_sound(topic))
            return refused(why, PG_ERR_MALFORMED, (uint64_t)(at - q->bytes), i);
        at = next;
    }
    return end - at < 8 || refused(why, PG_ERR_MALFORMED, (uint64_t)(at - q->bytes), 0);
}

/* ---- records -------------------------------------------------------------------------- */

bool key_sound(unsigned type, unsigned len)
{
    return len != 0 && type < PG_KEY_TYPES && (type != PG_KEY_UUID || len == 16);
}

static unsigned flags_max(unsigned op)
{
    return op == PG_OP_WATCH || op == PG_OP_CANCEL ? 1 : op == PG_OP_PUT ? 1 + PG_SLACK_LOG2_MAX : 0;
}

/* Return whether the time of a record on jobs is in bounds: a lease, a delay, or -1. */
static bool job_time_sound(const wire_record *r)
{
    const int64_t least_ns = r->op == PG_OP_JOB_NACK ? -1 : 1;
    const bool has_time = r->op == PG_OP_JOIN || r->op == PG_OP_JOB_NACK ||
                          r->op == PG_OP_JOB_EXTEND;
    return !has_time || (r->time_ns >= least_ns && r->time_ns <= PG_GROUP_TIME_MAX_NS);
}

static bool job_fields_sound(const wire_record *r, const struct op_rule *rule)
{
    if (rule->uses & OF_LEASE && (r->key_type != PG_KEY_BYTES ||
                                  r->key_len != sizeof(struct pg_lease) ||
                                  r->payload_len > PG_JOB_ERROR_MAX))
        return false;
    return r->op < PG_OP_JOIN || job_time_sound(r);
}

static bool fields_sound(const wire_record *r, const struct op_rule *rule)
{
    const bool time = rule->uses & USES_TIME;
    return r->mode < rule->modes && r->time_kind < rule->time_kinds &&
           r->value <= rule->value_max && (r->op != PG_OP_FAIL || r->value != 0) &&
           (time || r->time_ns == 0) && (rule->uses & USES_PAYLOAD || r->payload_len == 0) &&
           r->flags <= flags_max(r->op) &&
           (r->op != PG_OP_PUT || r->value == 0 || r->mode == PG_MODE_EXTEND) &&
           ((rule->uses & USES_ITEMS) || ((rule->uses & USES_KEYS) != 0) == (r->ext_len != 0)) &&
           job_fields_sound(r, rule);
}

static bool record_sound(const struct request *q, const wire_record *r)
{
    if (r->op == 0 || r->op > PG_OP_JOB_REJECT)
        return false;
    const struct op_rule *rule = &op_rules[r->op];
    if (q->in_bulk_load && r->op != PG_OP_PUT && r->op != PG_OP_CANCEL && r->op != PG_OP_UNPARK)
        return false;
    return ((rule->uses & IN_QUERY) != 0) == (q->frame.message == PG_M_QUERY) &&
           key_sound(r->key_type, r->key_len) && r->name < q->frame.names &&
           r->payload_len <= PG_PAYLOAD_MAX && fields_sound(r, rule);
}

/* Return the number of watch keys in an extension; 0 = the extension is malformed. */
static uint32_t watch_keys_count(const uint8_t *at, uint32_t bytes, uint64_t target_max)
{
    const uint8_t *end = at + bytes;
    uint32_t count = 0;
    while (at != end) {
        const wire_watch_key *k = (const wire_watch_key *)at;
        if ((uint64_t)(end - at) < sizeof *k || ++count > PG_WATCH_KEYS_MAX)
            return 0;
        if (!key_sound(k->key_type, k->key_len) || k->flags > PG_WK_OWN ||
            k->target > target_max || (uint64_t)(end - at) < sizeof *k + k->key_len)
            return 0;
        at += sizeof *k + k->key_len;
    }
    return count;
}

static bool watch_keys_sound(const wire_record *r, const uint8_t *at)
{
    const uint64_t target_max = has_targets(r->mode) ? PG_TARGET_MAX : UINT64_MAX;
    const uint32_t count = watch_keys_count(at, r->ext_len, target_max);
    return count != 0 && (r->mode != PG_C_QUORUM || (r->value != 0 && r->value <= count));
}

static bool put_items_sound(struct items items, uint32_t key_len)
{
    struct pg_ext item;
    struct item_text text;
    if (items.bytes > PG_ITEMS_MAX || !items_sound(items) || !items_unique_put(items, key_len) ||
        items_have(items.at, items.bytes, PG_EXT_SCHEDULE))
        return false;             /* only a schedule arms its occurrences */
    while (item_next(&items, &item, &text))
        if (!name_sound((struct name){(const char *)text.bytes, text.len}))
            return false;
    return true;
}

static bool ext_sound(const wire_record *r, const uint8_t *at)
{
    return r->op == PG_OP_PUT ? put_items_sound((struct items){at, r->ext_len}, r->key_len)
                              : watch_keys_sound(r, at);
}

static bool records_walk(const struct request *q, struct refusal *why)
{
    const uint64_t area = (uint64_t)(q->bytes + q->len - q->area);
    uint64_t used = 0;
    for (uint32_t i = 0; i < q->frame.count; i++) {
        const wire_record *r = record_at(q, i);
        if (!record_sound(q, r))
            return refused(why, PG_ERR_MALFORMED, (uint64_t)((const uint8_t *)r - q->bytes), i);
        const uint64_t fixed = (uint64_t)r->key_len + r->payload_len;
        if (used + fixed + r->ext_len > area)
            return refused(why, PG_ERR_MALFORMED, q->len, i);
        if (r->ext_len != 0 && !ext_sound(r, q->area + used + fixed))
            return refused(why, PG_ERR_MALFORMED, q->len - area + used + fixed, i);
        used += fixed + r->ext_len;
    }
    return used == area || refused(why, PG_ERR_MALFORMED, q->len - area + used, q->len);
}

bool tables_read(struct request *q, struct refusal *why)
{
    return rows_read(q, why) && tables_find(q, why) && names_walk(q, why) && records_walk(q, why);
}

/* ---- a batch that is sent again ---------------------------------------------------------- */

static uint64_t fold(uint64_t lane, const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    lane = (lane ^ word) * 0xff51afd7ed558ccd;
    return lane ^ lane >> 32;     /* without this, the top byte affects no lower bits */
}

/* Return a fingerprint of a message of at least one frame. Each step takes eight bytes into each of
 * four independent lanes. The last step takes the last 32 bytes of the message, which may overlap
 * the step before it. The fingerprint detects a client that sends a different batch under the same
 * sequence. It does not stop an attacker, but an attacker can only harm his own session. */
uint32_t fingerprint(const uint8_t *bytes, uint64_t len, const struct pg_session *s)
{
    const uint64_t renamed = UNLIKELY(s->first_id != 0) ? s->first_id ^ s->id : 0;
    uint64_t a = len, b = 0x9e3779b97f4a7c15, c = 0xc2b2ae3d27d4eb4f, d = 0x165667b19e3779f9;
    _Static_assert(offsetof(struct pg_frame, session) == 8, "the id is the first word of lane b");
    b ^= renamed;
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

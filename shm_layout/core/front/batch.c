/* batch.c - applies the records of a batch, each exactly once. decode.c has checked the whole
 * batch. */

#include "core/base/answer.h"
#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/hash.h"
#include "core/base/index.h"
#include "core/base/sink.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/bulk_loads.h"
#include "core/state/groups.h"
#include "core/state/jobs.h"
#include "core/state/compaction.h"
#include "core/state/keys.h"
#include "core/state/members.h"
#include "core/state/names.h"
#include "core/state/operations.h"
#include "core/state/prefetch.h"
#include "core/state/quotas.h"
#include "core/state/session.h"
#include "core/state/timers.h"
#include "core/state/watermarks.h"
#include "core/front/request.h"

/* ---- groups ---------------------------------------------------------------------------- */

/* Records whose memory is prefetched together before the first of them is applied. */
struct group {
    uint32_t first, end;          /* first record, and the record after the last one */
    /* Per record: index of its first hash in key_hashes[]. One extra element marks the end. */
    uint32_t keys[PG_PREFETCH_MAX + 1];
    uint32_t arms;                /* number of records that may take a slot */
    uint32_t timer_count;         /* number of records on timers and operations */
    /* Positions, within the record group, of the records on timers and operations. */
    uint32_t timers[PG_PREFETCH_MAX];
    uint32_t watermark_count;     /* number of records on watch keys */
    /* Positions, within the record group, of the records on watch keys. */
    uint32_t watermarks[PG_PREFETCH_MAX];
    /* Per record on a watch key: watermark up to which it visits watchers. */
    uint64_t reach[PG_PREFETCH_MAX];
    uint32_t rows[PG_PREFETCH_MAX];      /* per record: probable row of its watch key */
    /* Scope of the key that was hashed last, and the hash state at the start of that scope. */
    uint64_t scope;
    struct hash_scope begin;
};

#define NO_SCOPE UINT64_MAX

static bool of_watermark(unsigned op)
{
    return op >= PG_OP_ADVANCE_KEY && op <= PG_OP_CANCEL_FOR_KEY;
}

static uint64_t reach_of(const wire_record *r)
{
    if (r->op == PG_OP_ADVANCE_KEY)
        return r->value;
    return r->op == PG_OP_FORGET || r->op == PG_OP_CLEAR ? 0 : UINT64_MAX;
}

/* Return the hash of a key. Most keys have the same scope as the previous key. */
static uint32_t group_hash(const struct pg_arena *a, struct group *g, uint32_t ns, unsigned type,
                           const uint8_t *bytes, size_t len)
{
    const uint64_t scope = key_scope(ns, type);
    if (UNLIKELY(scope != g->scope)) {
        g->scope = scope;
        g->begin = hash_begin(a->secret->secret, scope);
    }
    return key_hash_of(hash_in(&g->begin, bytes, len));
}

/* Hash the watch keys of a WATCH. Return the number of watch keys. */
static uint32_t watch_keys_hash(struct pg_arena *a, struct group *g, uint32_t ns,
                                const uint8_t *at, uint32_t bytes, uint32_t *hashes)
{
    const uint8_t *end = at + bytes;
    uint32_t count = 0;
    while (at != end) {
        const wire_watch_key *k = (const wire_watch_key *)at;
        at += sizeof *k;
        hashes[count] = group_hash(a, g, ns, k->key_type, at, k->key_len);
        watermark_fetch(a, hashes[count++]);
        at += k->key_len;
    }
    return count;
}

/* Length in bytes of the watch keys of a record. */
static inline uint32_t watch_keys_len(const wire_record *r)
{
    return op_rules[r->op].uses & USES_KEYS ? r->ext_len : 0;
}

/* Hash all keys of a record. Return the number of watch keys of a WATCH; 0 for other records. */
static uint32_t record_hash(struct pg_arena *a, struct group *g, const wire_record *r,
                            const uint8_t *at, uint32_t n)
{
    const uint32_t ns = a->call.name_namespaces[r->name], place = n - g->first;
    a->call.hashes[n] = group_hash(a, g, ns, r->key_type, at, r->key_len);
    g->rows[place] = PG_NIL;
    if (of_watermark(r->op)) {
        g->watermarks[g->watermark_count] = place;
        g->reach[g->watermark_count++] = reach_of(r);
        watermark_fetch(a, a->call.hashes[n]);
        return 0;
    }
    g->timers[g->timer_count++] = place;
    index_prefetch(&a->index, a->call.hashes[n]);
    slots_prefetch(&a->slots, g->arms);
    g->arms += op_rules[r->op].uses / NEEDS_TOPIC % 2;
    return watch_keys_hash(a, g, ns, at + r->key_len + r->payload_len, watch_keys_len(r),
                           &a->call.key_hashes[g->keys[place]]);
}

/* Return the largest number of watch keys that a WATCH of this size can have. Each key has at least
 * one byte. */
static uint32_t watch_keys_most(const wire_record *r)
{
    return watch_keys_len(r) / (sizeof(struct pg_watch_key) + 1);
}

/* Begin the record group of record g->first, whose key begins at `at`. */
static void group_begin(struct pg_arena *a, const struct request *q, struct group *g,
                        const uint8_t *at)
{
    uint32_t n = g->first;
    g->watermark_count = g->timer_count = g->arms = g->keys[0] = 0;
    for (; n < q->frame.count && n < g->first + PG_PREFETCH_MAX; n++) {
        const wire_record *r = record_at(q, n);
        uint32_t *keys = &g->keys[n - g->first];
        if (keys[0] + watch_keys_most(r) > PG_WATCH_KEYS_MAX && n != g->first)
            break;
        keys[1] = keys[0] + record_hash(a, g, r, at, n);
        at += record_bytes(r);
    }
    g->end = n;
    prefetch_timers(a, &a->call.hashes[g->first], g->timers, g->timer_count);
    prefetch_watermarks(a, &a->call.hashes[g->first], g->watermarks, g->reach, g->watermark_count,
                        g->rows);
}

/* ---- applying one record ------------------------------------------------------------------ */

struct step {
    const struct request *q;
    struct pg_session *session;
    struct pg_reply_memory *memory;
    const wire_record *record;
    struct put put;               /* the timer or operation, if the record has one */
    const uint8_t *ext;
    uint32_t n;                   /* index of the record in the batch */
    struct group group;           /* record group that contains the record */
};

static bool watch_apply(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    const uint32_t *keys = &s->group.keys[s->n - s->group.first];
    struct watch w = {.put = &s->put, .session = s->session->id,
                      .threshold = s->record->value, .keys = s->ext,
                      .keys_bytes = s->record->ext_len,
                      .hashes = &a->call.key_hashes[keys[0]], .count = keys[1] - keys[0],
                      .condition = s->record->mode, .notice = s->record->flags != 0};
    return operations_watch(a, &w, result);
}

/* ---- records on watch keys ---------------------------------------------------------------- */

/* While a record on a watch key is being applied, the session's `intent` stores what the record has
 * to do. If a kill or the work limit of a call interrupts the record, the next call continues from
 * `intent` and from the answer stored so far. intent[0] = index of the record + 1, [1] = the
 * record's watermark or the offset of its ended keys, [2] = op, [3] = row of the watch key. */
static void intend(const struct step *s, uint64_t value, uint32_t row)
{
    uint64_t *intent = s->session->intent;
    STORE_RELEASE(&intent[0], 0ull);
    intent[1] = value;
    intent[2] = s->record->op;
    intent[3] = row;
    STORE_RELEASE(&intent[0], s->n + 1ull);
}

static bool gives_birth(unsigned op)
{
    return op == PG_OP_ADVANCE_KEY || op == PG_OP_BUMP || op == PG_OP_FAIL;
}

/* Return the row of the record's watch key. PG_NIL = there is none, and the record has been
 * answered. */
static uint32_t watermark_row(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    const uint32_t row = watermark_find(a, &s->put.key);
    if (row == PG_NIL && gives_birth(s->record->op))
        return watermark_born(a, &s->put.key, false, result);
    if (row == PG_NIL)
        answer(result, 0, PG_ST_UNKNOWN, 0);
    return row;
}

/* Allocate space for the keys of operations that this batch ends. Return false if no space is
 * free. */
static bool extra_take(struct pg_arena *a, struct pg_reply_memory *m)
{
    if (m->extra_blob != PG_NIL)
        return true;
    m->extra_bytes = 0;
    STORE_RELEASE(&m->extra_blob, blobs_take(&a->blobs, blob_granules(PG_ENDED_KEYS_BYTES)));
    if (m->extra_blob == PG_NIL)
        return false;
    a->metrics->blob_bytes += PG_ENDED_KEYS_BYTES;
    return true;
}

/* Decide, once per record, what the record has to do, and store it in `intent`. Return false if the
 * record has been answered. */
static bool watermark_begin(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    const uint32_t row = watermark_row(a, s, result);
    uint64_t value = s->record->value;
    if (row == PG_NIL)
        return false;
    if (s->record->op == PG_OP_BUMP &&
        __builtin_add_overflow(value, watermark_at(a, row)->watermark, &value))
        value = UINT64_MAX;
    if (s->record->op == PG_OP_CANCEL_FOR_KEY && !extra_take(a, s->memory)) {
        answer(result, 0, payload_refusal(a), 0);
        return false;
    }
    if (s->record->op == PG_OP_CANCEL_FOR_KEY)
        value = s->memory->extra_bytes;
    if (value > PG_WATERMARK_MAX) {
        answer(result, 0, PG_ST_OVERFLOW, 0);
        return false;
    }
    answer(result, 0, PG_ST_DONE, 0);
    intend(s, value, row);
    return true;
}

/* Store the ended keys with the reply: u32 index of the record, u32 number of bytes, the keys. */
static void cancel_for_key(struct pg_arena *a, const struct step *s, uint32_t row, uint32_t begin,
                           struct pg_result *result)
{
    struct pg_reply_memory *m = s->memory;
    struct sink out = {blob_at(&a->blobs, m->extra_blob), begin, PG_ENDED_KEYS_BYTES, false};
    uint32_t head[2] = {s->n, 0};
    uint8_t *at = sink_take(&out, sizeof head);
    if (at == NULL) {
        answer(result, 0, PG_ST_MORE, 0);
        return;
    }
    operations_cancel_for_key(a, row, &out, result);
    head[1] = (uint32_t)(out.used - begin - sizeof head);
    memcpy(at, head, sizeof head);
    STORE_RELEASE(&m->extra_bytes, (uint32_t)out.used);
}

/* Bit in intent[1] of FAIL and CLEAR, set once the key has its new state. */
#define FAILURE_SET (1ull << 63)

static bool failure_apply(struct pg_arena *a, const struct step *s, uint32_t row,
                          struct pg_result *result)
{
    uint64_t *value = &s->session->intent[1];
    /* After a kill, the rebuild may have ended operations for this record, and forgotten the key
     * together with the key's last operation. */
    const bool goes_on = (*value & FAILURE_SET) != 0 || result->deadline_ns != 0;
    const bool done = s->record->op == PG_OP_CLEAR
                          ? operations_clear(a, row, goes_on, result)
                          : operations_fail(a, row, (uint32_t)*value, goes_on, result);
    if (!done)
        STORE_RELEASE(value, *value | FAILURE_SET);
    return done;
}

static bool watermark_apply(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    const uint64_t *intent = s->session->intent;
    const bool goes_on = intent[0] == s->n + 1ull;
    if (!goes_on && !watermark_begin(a, s, result))
        return true;
    const uint32_t row = (uint32_t)intent[3];
    /* The key may have been forgotten when this record ended the key's last watcher in an earlier
     * call. */
    const bool gone = goes_on && !watermark_has_key(a, row, &s->put.key);
    if (s->record->op == PG_OP_CANCEL_FOR_KEY) {
        cancel_for_key(a, s, gone ? PG_NIL : row, (uint32_t)intent[1], result);
        return true;
    }
    if (gone)
        return true;
    switch (s->record->op) {
    case PG_OP_ADVANCE_KEY:
    case PG_OP_BUMP: return operations_advance(a, row, intent[1], result);
    case PG_OP_FAIL:
    case PG_OP_CLEAR: return failure_apply(a, s, row, result);
    default: watermark_drop(a, row); return true;
    }
}

/* Free the space that the ended keys did not need, before the reply counts as complete. */
static void extra_trim(struct pg_arena *a, struct pg_reply_memory *m)
{
    const uint32_t used = blob_granules(m->extra_bytes), all = blob_granules(PG_ENDED_KEYS_BYTES);
    if (m->sequence != 0 || m->extra_blob == PG_NIL || used == all)
        return;
    blobs_give(&a->blobs, m->extra_blob + used, all - used);
    a->metrics->blob_bytes -= (uint64_t)(all - used) * PG_GRANULE;
}

static void timer_apply(struct pg_arena *a, struct step *s, struct pg_result *result)
{
    if (UNLIKELY(s->record->op == PG_OP_UNPARK))
        timers_unpark(a, &s->put, s->record->value, result);
    else
        timers_put(a, &s->put, result);
}

/* Apply a row of a bulk load unless it was applied before, and mark the row as done. */
static void row_apply(struct pg_arena *a, struct step *s, struct pg_result *result)
{
    if (!bulk_load_admits(a, &s->put.key, s->session->bulk_load_first + s->n, result))
        return;
    timer_apply(a, s, result);
    bulk_load_settle(a, result);
}

/* ---- records on jobs ------------------------------------------------------------------------ */

static void join_apply(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    const struct key *key = &s->put.key;
    const struct name name = {(const char *)key->bytes, key->len};
    const uint32_t group =
        key->namespace_row == PG_NIL ? PG_NIL : group_find(a, key->namespace_row, name);
    if (group == PG_NIL || group_at(a, group)->incarnation == 0)
        answer(result, 0, PG_ST_NO_GROUP, 0);
    else if (!member_join(a, s->session->id, group, (uint32_t)s->record->value,
                          s->record->time_ns))
        answer(result, a->member_rows, PG_ST_FULL_MEMBERS, 0);
    else
        answer(result, group, PG_ST_DONE, 0);
}

/* Return the row of the lease that the record names; PG_NIL = the session does not have it. */
static uint32_t lease_row(const struct pg_arena *a, const struct step *s)
{
    struct pg_lease lease;
    memcpy(&lease, s->put.key.bytes, sizeof lease);
    if (lease.row >= a->job_slots.capacity)
        return PG_NIL;
    const struct pg_job *j = job_at(a, lease.row);
    const bool held = job_state(j) == PG_JOB_LEASED && j->ticket >> 8 == lease.ticket &&
                      job_leases(j) == lease.lease && j->session == s->session->id &&
                      group_at(a, j->group)->namespace_row == s->put.key.namespace_row;
    return held ? lease.row : PG_NIL;
}

static void job_change(struct pg_arena *a, const struct step *s, uint32_t row)
{
    const wire_record *r = s->record;
    const struct job_failure f = {s->put.payload, r->payload_len, r->time_ns};
    switch (r->op) {
    case PG_OP_JOB_ACK: job_ack(a, row); break;
    case PG_OP_JOB_NACK: job_failed(a, row, &f); break;
    case PG_OP_JOB_EXTEND: job_extend(a, row, a->state.now_ns + r->time_ns); break;
    case PG_OP_JOB_RELEASE: job_release(a, row); break;
    default: job_reject(a, row, &f); break;
    }
}

/* Time from now to the end of the lease, if the record extends it; else 0. It is no point in time,
 * because a client on another host has another clock. */
static int64_t lease_left_ns(const struct pg_arena *a, const wire_record *r, uint32_t row)
{
    const int64_t now_ns = a->state.now_ns;
    return r->op == PG_OP_JOB_EXTEND ? job_extended_ns(a, row, now_ns + r->time_ns) - now_ns : 0;
}

/* Answer a job. Before its effect, `intent` stores the job's row and control word. If a kill comes
 * in between, the rebuild thereby finds out whether the effect exists. */
static void job_apply(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    const uint32_t row = lease_row(a, s);
    if (row == PG_NIL) {
        answer(result, 0, PG_ST_LEASE_LOST, 0);
        return;
    }
    intend(s, job_at(a, row)->control, row);
    answer(result, job_at(a, row)->ticket >> 8, PG_ST_DONE, lease_left_ns(a, s->record, row));
    job_change(a, s, row);
}

static bool arms(unsigned op)
{
    return op == PG_OP_PUT || op == PG_OP_WATCH || op == PG_OP_UNPARK;
}

static bool arm_apply(struct pg_arena *a, struct step *s, struct pg_result *result)
{
    if (has_wal(a) && !wal_buffer_admits(a, result))
        return true;
    if (s->record->op == PG_OP_WATCH)
        return watch_apply(a, s, result);
    if (UNLIKELY(s->q->in_bulk_load))
        row_apply(a, s, result);
    else
        timer_apply(a, s, result);
    return true;
}

/* ---- cancels ------------------------------------------------------------------------------- */

/* Return whether the timer that a CANCEL names is armed. */
static bool is_pending(const struct pg_arena *a, const struct step *s)
{
    const uint32_t slot = timers_find(a, &s->put.key);
    return slot != PG_NIL && (s->record->value == 0 ||
                              s->record->value == ctl_ticket(slot_hot(a, slot)->ctl));
}

/* Return whether the CANCEL concerns jobs. Answer it with LEASED if a member holds one of them, else
 * with CANCELLED if the flag asks for that, else with FIRED. `intent` stores the first job of a
 * CANCELLED, so that the rebuild finds out whether it has ended. */
static bool cancels_jobs(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    if (on_cancel(s->session))
        return true;              /* the record continues */
    const uint32_t row =
        is_pending(a, s) ? PG_NIL : job_of_key(a, &s->put.key, s->record->value);
    if (row == PG_NIL)
        return false;
    const struct pg_job *j = job_at(a, row);
    if (job_state(j) == PG_JOB_LEASED) {
        answer(result, j->ticket >> 8, PG_ST_LEASED, j->deadline_ns);
    } else if (s->record->flags == 0) {
        a->metrics->cancels_fired++;
        answer(result, j->ticket >> 8, PG_ST_FIRED, j->deadline_ns);
    } else {
        intend(s, j->control, row);
        answer(result, j->ticket >> 8, PG_ST_CANCELLED, j->deadline_ns);
    }
    return true;
}

/* End the jobs of the key that no member holds, if the CANCEL was answered with CANCELLED. Return
 * false if the WAL buffer is full; the next call continues. */
static bool jobs_drop(struct pg_arena *a, const struct step *s)
{
    uint32_t row = on_cancel(s->session) ? (uint32_t)s->session->intent[3] : PG_NIL;
    if (row != PG_NIL && job_at(a, row)->control != s->session->intent[1])
        row = job_of_key(a, &s->put.key, s->record->value);
    while (row != PG_NIL && job_state(job_at(a, row)) != PG_JOB_LEASED) {
        if (wal_buffer_full(a))
            return false;
        job_drop(a, row);
        row = job_of_key(a, &s->put.key, s->record->value);
    }
    return true;
}

static bool cancel_apply(struct pg_arena *a, const struct step *s, struct pg_result *result)
{
    const struct key *key = &s->put.key;
    if (s->q->in_bulk_load && !bulk_load_void(a, key, s->session->bulk_load_first + s->n, result))
        return true;
    if (UNLIKELY(a->metrics->jobs != 0 || on_cancel(s->session)) && cancels_jobs(a, s, result))
        return jobs_drop(a, s);
    return key_cancel(a, key, s->record->value, result);
}

/* Apply a record. Return false if the work limit of this call is reached; the next call for the
 * same batch continues. */
static bool op_apply(struct pg_arena *a, struct step *s, struct pg_result *result)
{
    const struct key *key = &s->put.key;
    if (arms(s->record->op))
        return arm_apply(a, s, result);
    if (wal_buffer_full(a))
        return wal_buffer_gives_up(a, result);
    if (UNLIKELY(s->record->op >= PG_OP_JOIN)) {
        if (s->record->op == PG_OP_JOIN)
            join_apply(a, s, result);
        else
            job_apply(a, s, result);
        return true;
    }
    switch (s->record->op) {
    case PG_OP_CANCEL: return cancel_apply(a, s, result);
    case PG_OP_COMPLETE:
        return operations_complete(a, key, s->session->id, s->record->value, result);
    default: return watermark_apply(a, s, result);
    }
}

/* Assign field by field. A copy of the whole struct would have to wait for the stores to its
 * fields. */
static void put_read(const struct pg_arena *a, struct step *s, const uint8_t *at)
{
    const wire_record *r = s->record;
    struct put *p = &s->put;
    p->key.bytes = at;
    p->key.hash = a->call.hashes[s->n];
    p->key.namespace_row = a->call.name_namespaces[r->name];
    p->key.row_guess = s->group.rows[s->n - s->group.first];
    p->key.len = r->key_len;
    p->key.type = r->key_type;
    p->payload = at + r->key_len;
    p->payload_len = r->payload_len;
    p->topic = a->call.name_rows[r->name];
    p->mode = r->mode;
    p->ticket = r->op == PG_OP_PUT ? r->value : 0;
    p->time_kind = r->time_kind;
    p->slack = r->op == PG_OP_PUT ? r->flags : 0;
    p->time_ns = r->time_ns;
    p->items = s->ext = p->payload + r->payload_len;
    p->items_len = r->op == PG_OP_PUT ? (uint16_t)r->ext_len : 0;
}

/* Return true if the owner and the quotas allow the record. False: the record has been answered. A
 * daemon that is stopping, or whose arena files are unlinked, arms nothing. A record that is
 * charged to the quotas of operations per second is charged only once, even if it needs several
 * calls. */
static bool record_allowed(struct pg_arena *a, struct step *s, struct pg_result *result)
{
    const wire_record *r = s->record;
    const unsigned access = a->call.name_access[r->name];
    s->put.limited = access == ACCESS_QUOTA;
    if ((a->state.draining || a->state.nameless) && arms(r->op)) {
        answer(result, 0, a->state.draining ? PG_ST_STOPPING : PG_ST_ARENA, 0);
        return false;
    }
    if (access == ACCESS_DENIED ||
        (access == ACCESS_RESERVED && op_rules[r->op].uses & (NEEDS_TOPIC | NEEDS_NAMESPACE))) {
        answer(result, 0, PG_ST_DENIED, 0);
        return false;
    }
    if (!s->put.limited || s->n < s->session->charged ||
        (op_rules[r->op].uses & (NEEDS_TOPIC | NEEDS_NAMESPACE)) == 0)
        return true;
    if (has_wal(a) && arms(r->op) && !wal_buffer_admits(a, result))
        return false;             /* a record that is sent again is not charged twice */
    s->session->charged = s->n + 1;
    return quota_charge(a, a->call.name_namespaces[r->name], a->call.account, result);
}

/* ---- busy keys ------------------------------------------------------------------------------ */

/* If a record is answered BUSY, the client sends the record again. Until the client has seen that
 * answer, later records on the same keys are answered BUSY as well, even if their batches were
 * already sent. The client sends all these records again in their order, so the records of each key
 * stay in order.
 *
 * The set of busy keys has one bit per hash value. If two keys share a bit, a record is repeated
 * without need. Keys that share a bit in one set usually do not share one in the next set, because
 * the bit depends on `busy_first`. */

static bool busy_key(struct pg_session *s, uint32_t hash, bool watched, bool add)
{
    const uint32_t mixed = (hash ^ (watched ? 0x5bd1e995u : 0) ^ (uint32_t)s->busy_first) *
                           0x9e3779b1u;
    const uint32_t place = mixed / (UINT32_MAX / PG_BUSY_KEYS + 1);
    const uint64_t bit = 1ull << place % 64;
    if (add)
        s->busy_keys[place / 64] |= bit;
    return (s->busy_keys[place / 64] & bit) != 0;
}

/* Return true if the set contains a key of the record. With `add`, add all its keys to the set. */
static bool busy_keys(const struct pg_arena *a, const struct step *s, bool add)
{
    const uint32_t *keys = &s->group.keys[s->n - s->group.first];
    bool found = busy_key(s->session, a->call.hashes[s->n], of_watermark(s->record->op), add);
    for (uint32_t i = keys[0]; i < keys[1]; i++)
        found |= busy_key(s->session, a->call.key_hashes[i], true, add);
    return found;
}

/* The store of busy_last makes the set valid. A kill may come before that store, or before the
 * record counts as applied. Such a kill leaves at most the bits of this record, which will be
 * answered BUSY again. The keys of a namespace have other hashes once the namespace exists. If the
 * record's namespace does not exist yet, every key therefore counts as busy. */
RARE static void busy_add(const struct pg_arena *a, const struct step *s)
{
    struct pg_session *session = s->session;
    if (session->busy_last == 0) {
        memset(session->busy_keys, 0, sizeof session->busy_keys);
        session->busy_first = s->q->frame.sequence;
    }
    if (a->call.name_namespaces[s->record->name] == PG_NIL)
        memset(session->busy_keys, 0xff, sizeof session->busy_keys);
    else
        busy_keys(a, s, true);
    STORE_RELEASE(&session->busy_last, s->q->frame.sequence);
}

/* Answer the record BUSY if the set contains one of its keys, or if its namespace does not exist.
 * The namespace may be created, with other hashes for its keys, before the client sends the earlier
 * busy records again. */
RARE static bool busy_refuses(const struct pg_arena *a, const struct step *s,
                              struct pg_result *result)
{
    const bool refused =
        a->call.name_namespaces[s->record->name] == PG_NIL || busy_keys(a, s, false);
    if (refused)
        answer(result, 0, PG_ST_BUSY, 0);
    return refused;
}

/* Empty the set if all batches whose keys it contains come before the oldest batch that the client
 * waits for. The client has then seen the answers to all these batches. */
static void busy_forget(struct pg_session *s, const struct request *q)
{
    if (UNLIKELY(s->busy_last != 0) && q->frame.sequence - q->frame.detail[1] > s->busy_last)
        STORE_RELEASE(&s->busy_last, 0ull);
}

static bool record_apply(struct pg_arena *a, struct step *s, const uint8_t *at,
                         struct pg_result *result)
{
    if (UNLIKELY(name_refused(result)))
        return true;
    if (UNLIKELY(s->session->busy_last != 0) && busy_refuses(a, s, result))
        return true;
    if (UNLIKELY(a->state.restricted | a->state.draining | a->state.nameless | a->call.reserved) &&
        !record_allowed(a, s, result))
        return true;
    put_read(a, s, at);
    return op_apply(a, s, result);
}

static bool refuses(const struct pg_result *r)
{
    const unsigned status = r->ticket & 0xff;
    return status >= PG_ST_FULL || status == PG_ST_EXISTS;
}

/* Count a refusal by its reason. The reason for BUSY is the inbox, a compaction, the WAL or an
 * earlier record. */
RARE static void refusal_note(struct pg_arena *a, const struct step *s, const struct pg_result *r)
{
    const unsigned status = r->ticket & 0xff;
    const bool inbox = r->deadline_ns != 0;          /* the session owns too many operations */
    const bool wal = has_wal(a) && !inbox && !compaction_due(a);
    pg_refused(a, status == PG_ST_BUSY && wal ? PG_ST_WAL : status);
    if (status == PG_ST_BUSY)
        busy_add(a, s);
}

/* Apply the records. Each result is stored before the count of applied records, so each applied
 * record has its answer. Return false if some records are not applied yet. */
static bool records_apply(struct pg_arena *a, const struct request *q, struct pg_session *session,
                          struct pg_reply_memory *m)
{
    struct step s = {.q = q, .session = session, .memory = m, .put.account = a->call.account,
                     .group.scope = NO_SCOPE};
    struct pg_result *results = reply_results(a, m);
    const uint8_t *at = q->area;
    for (s.n = 0; s.n < q->frame.count; s.n++) {
        s.record = record_at(q, s.n);
        if (s.n >= session->applied) {
            if (s.n >= s.group.end) {
                s.group.first = s.n;
                group_begin(a, q, &s.group, at);
            }
            if (!record_apply(a, &s, at, &results[s.n]))
                return false;
            if (UNLIKELY(refuses(&results[s.n])))
                refusal_note(a, &s, &results[s.n]);
            STORE_RELEASE(&session->applied, s.n + 1);
        }
        at += record_bytes(s.record);
    }
    return true;
}

/* ---- names --------------------------------------------------------------------------------- */

/* Return the needs of an operation that names meet. A daemon that arms nothing needs no topics: it
 * refuses the records that arm for this reason, whatever names they have. */
static unsigned needs_of(const struct pg_arena *a, unsigned uses)
{
    return uses & (a->state.draining || a->state.nameless ? NEEDS_NAMESPACE : ~0u);
}

/* Find or create the names in an entry of the name table. Only PUT, WATCH, UNPARK, ADVANCE_KEY,
 * BUMP and FAIL create names. names_hold keeps each topic row, so that a later name of the table
 * cannot reuse the row of an earlier name. */
static void name_resolve(struct pg_arena *a, uint32_t i, struct name ns, struct name topic,
                         uint32_t uid)
{
    const unsigned uses = needs_of(a, a->call.name_uses[i]);
    a->call.name_rows[i] = a->call.name_namespaces[i] = PG_NIL;
    a->call.name_refusals[i] = (struct pg_result){0, 0};
    a->call.name_access[i] =
        a->state.restricted ? access_of(a, names_find_namespace(a, ns), uid) : 0;
    if (UNLIKELY(a->call.name_access[i] == ACCESS_DENIED))
        return;                   /* a sender without access creates no name */
    if (UNLIKELY(name_reserved(ns) || name_reserved(topic))) {
        a->call.name_access[i] = ACCESS_RESERVED;
        a->call.name_namespaces[i] = names_find_namespace(a, ns);
        a->call.reserved = true;
        return;
    }
    a->call.name_rows[i] = uses & NEEDS_TOPIC ? names_topic(a, ns, topic, &a->call.name_refusals[i])
                                         : PG_NIL;
    a->call.name_namespaces[i] = uses & NEEDS_NAMESPACE && a->call.name_rows[i] == PG_NIL
                                ? names_namespace(a, ns, &a->call.name_refusals[i])
                                : names_find_namespace(a, ns);
    if (a->call.name_rows[i] != PG_NIL)
        names_hold(a, a->call.name_rows[i]);
    if (a->call.name_namespaces[i] != PG_NIL &&
        (a->call.name_rows[i] != PG_NIL || !(uses & NEEDS_TOPIC)))
        a->call.name_refusals[i] = (struct pg_result){0, 0};
    if (a->call.name_namespaces[i] != PG_NIL)
        a->call.durable |= namespace_at(a, a->call.name_namespaces[i])->durability != 0;
}

/* Look up again the namespaces that were not found: a later entry of the name table may have
 * created them. */
static void names_again(struct pg_arena *a, const struct request *q)
{
    const uint8_t *at = q->names;
    for (uint32_t i = 0; i < q->frame.names; i++) {
        struct name ns, topic;
        at = names_next(at, &ns, &topic);
        if (a->call.name_namespaces[i] == PG_NIL && a->call.name_access[i] != ACCESS_DENIED)
            a->call.name_namespaces[i] = names_find_namespace(a, ns);
    }
}

/* Prepare the name table. Return true if some names could not be created. */
static bool names_begin(struct pg_arena *a, const struct request *q,
                        const struct pg_reply_memory *m)
{
    const struct pg_result *results = reply_results(a, m);
    const uint8_t *at = q->names;
    bool unknown = false, lacking = false;
    account_begin(a);
    a->call.reserved = false;
    memset(a->call.name_uses, 0, sizeof a->call.name_uses);
    for (uint32_t i = 0; i < q->frame.count; i++) {
        const wire_record *r = record_at(q, i);
        if (LIKELY(!name_refused(&results[i])))
            a->call.name_uses[r->name] |= op_rules[r->op].uses & (NEEDS_TOPIC | NEEDS_NAMESPACE);
    }
    for (uint32_t i = 0; i < q->frame.names; i++) {
        struct name ns, topic;
        at = names_next(at, &ns, &topic);
        name_resolve(a, i, ns, topic, q->uid);
        unknown |= a->call.name_namespaces[i] == PG_NIL;
        lacking |= a->call.name_refusals[i].ticket != 0;
    }
    if (UNLIKELY(unknown))
        names_again(a, q);
    return lacking;
}

static bool name_lacks(const struct pg_arena *a, const wire_record *r)
{
    const unsigned uses = needs_of(a, op_rules[r->op].uses);
    return a->call.name_refusals[r->name].ticket != 0 &&
           ((uses & NEEDS_TOPIC && a->call.name_rows[r->name] == PG_NIL) ||
            (uses & NEEDS_NAMESPACE && a->call.name_namespaces[r->name] == PG_NIL));
}

/* Refuse the records whose names could not be created: see name_refused(). */
RARE static void names_refuse(struct pg_arena *a, const struct request *q,
                              const struct pg_session *s, const struct pg_reply_memory *m)
{
    struct pg_result *results = reply_results(a, m);
    for (uint32_t n = s->applied; n < q->frame.count; n++) {
        const struct pg_result *why = &a->call.name_refusals[record_at(q, n)->name];
        if (name_lacks(a, record_at(q, n)))
            answer(&results[n], why->ticket >> 8, why->ticket & 0xff, why->deadline_ns);
    }
}

static void names_end(struct pg_arena *a, const struct request *q)
{
    for (uint32_t i = 0; i < q->frame.names; i++)
        if (a->call.name_rows[i] != PG_NIL)
            names_release(a, a->call.name_rows[i]);
}

/* ---- the batch ------------------------------------------------------------------------------ */

bool batch_begin(struct pg_arena *a, struct pg_session *s, const struct request *q, uint32_t sum)
{
    struct pg_reply_memory *m = session_reply(a, s, q->frame.sequence);
    if (s->current == q->frame.sequence && m->checksum == sum && s->count == q->frame.count)
        /* The batch continues: a call reached its work limit, or the daemon died. */
        return true;
    STORE_RELEASE(&s->current, 0ull);         /* from here on no batch is running */
    reply_forget(a, m);
    if (!reply_begin(a, s, m, q->frame.count))
        return false;
    m->checksum = sum;
    STORE_RELEASE(&s->intent[0], 0ull);
    s->applied = 0;
    s->bulk_load = 0;
    s->charged = 0;
    busy_forget(s, q);
    s->count = q->frame.count;
    s->begun_boot_ns = a->call.real_boot_ns;
    s->worked_ns = 0;
    measure(a, PG_HG_REQUEST_QUEUE, a->call.real_boot_ns - q->received_boot_ns, 1);
    STORE_RELEASE(&s->current, q->frame.sequence);
    return true;
}

/* Set the timestamps of the batch. After a kill, a batch continues when it is received again. The
 * start of its application is then the time of that receipt. */
static void timestamps_learn(struct pg_arena *a, const struct request *q,
                             const struct pg_session *s)
{
    const bool before = s->begun_boot_ns < q->received_boot_ns;
    a->call.sequence = q->frame.sequence;
    a->call.batch_timestamps = (struct pg_timestamps){
        .session = s->id, .sent_boot_ns = (int64_t)q->frame.detail[0],
        .received_boot_ns = q->received_boot_ns,
        .applied_boot_ns = before ? q->received_boot_ns : s->begun_boot_ns};
}

/* Begin the bulk load of the batch. It belongs to the first namespace of the name table that
 * exists. A batch of cancels only looks up the bulk load. */
static void rows_begin(struct pg_arena *a, struct pg_session *s, const struct request *q)
{
    uint32_t ns = PG_NIL;
    unsigned uses = 0;
    for (uint32_t i = q->frame.names; i-- > 0;)
        ns = a->call.name_namespaces[i] != PG_NIL ? a->call.name_namespaces[i] : ns;
    for (uint32_t i = 0; i < q->frame.count; i++)
        uses |= op_rules[record_at(q, i)->op].uses;
    const bool arms = (uses & (NEEDS_TOPIC | NEEDS_NAMESPACE)) != 0;
    bulk_load_begin(a, s, &q->rows, arms && !a->state.draining && !a->state.nameless ? ns : PG_NIL);
}

bool batch_apply(struct pg_arena *a, const struct request *q, struct pg_session *s)
{
    struct pg_reply_memory *m = session_reply(a, s, q->frame.sequence);

    a->call.worked = s;
    timestamps_learn(a, q, s);
    const bool lacking = names_begin(a, q, m);
    if (q->in_bulk_load)
        rows_begin(a, s, q);
    if (UNLIKELY(lacking))
        names_refuse(a, q, s, m);
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
    a->call.begun_boot_ns = a->call.batch_timestamps.applied_boot_ns;
    return true;
}

/* wal_columns.c - WAL records as columns, one array per column, in the layout of Apache Arrow.
 *
 * One function per record type writes the columns of a record. A record of an unknown type, or
 * whose length does not fit its type, still becomes a row with its LSN and time. */

#include "core/base/common.h"
#include "core/wal/frames.h"
#include "core/state/jobs.h"
#include "core/state/timers.h"

/* The record that is being written to row number c->rows. */
struct row {
    struct pg_columns *c;
    struct pg_births *births;
    const struct pg_frame_head *frame;
    uint64_t wall_offset_ns;  /* group's wall time = arena's clock + this offset */
    bool live;                    /* the arena's clock is the real boot clock */
};

_Static_assert(PG_WAL_TYPES <= 32, "kinds[] has an element per type");
_Static_assert(PG_LONG_COLUMNS == 38 && PG_INT_COLUMNS == 21 && PG_BYTES_COLUMNS == 6,
               "sizes in struct pg_columns");
_Static_assert((int)PG_CAUSE_ACKNOWLEDGED > (int)PG_CAUSE_PUBLISHED, "causes are distinct");

static void mark(uint8_t *valid, uint32_t row)
{
    valid[row / 8] |= (uint8_t)(1u << row % 8);
}

static void put(const struct row *r, enum pg_long_column column, int64_t value)
{
    struct pg_longs *l = &r->c->longs[column];
    l->values[r->c->rows] = value;
    mark(l->valid, r->c->rows);
    l->count++;
}

static void put_int(const struct row *r, enum pg_int_column column, uint32_t value)
{
    struct pg_ints *i = &r->c->ints[column];
    i->values[r->c->rows] = (int32_t)value;
    mark(i->valid, r->c->rows);
    i->count++;
}

static void put_flag(const struct row *r, enum pg_int_column column, uint32_t value)
{
    if (UNLIKELY(value != 0))
        put_int(r, column, 1);
}

/* Write a value that stands for one of `count` words. If it stands for none of them, leave the
 * column empty. */
static void put_word(const struct row *r, enum pg_int_column column, unsigned value, unsigned count)
{
    if (value < count)
        put_int(r, column, value);
}

static void put_bytes(const struct row *r, enum pg_bytes_column column, const void *bytes,
                      uint32_t size)
{
    struct pg_bytes *b = &r->c->bytes[column];
    memcpy(b->bytes + b->used, bytes, size);
    b->used += size;
    mark(b->valid, r->c->rows);
    b->count++;
}

/* ---- what several types have ----------------------------------------------------------------- */

static void put_unless(const struct row *r, enum pg_long_column column, uint64_t value,
                       uint64_t none)
{
    if (value != none)
        put(r, column, (int64_t)value);
}

/* Write a time on the arena's clock, and the corresponding wall time. */
static void put_at(const struct row *r, int64_t at_ns)
{
    put(r, PG_LC_AT_NS, at_ns);
    r->c->longs[PG_LC_AT].values[r->c->rows] = (int64_t)((uint64_t)at_ns + r->wall_offset_ns) / 1000;
}

/* Write the time of a record whose only time is on the real boot clock. If the arena has another
 * clock, write nothing. */
static void put_real_at(const struct row *r, int64_t at_boot_ns)
{
    if (r->live)
        put_at(r, at_boot_ns);
}

/* Write the timestamps of the record's timer, or of the timer that the record replaces. */
static void put_timestamps(const struct row *r, const struct pg_timestamps *timestamps,
                           const enum pg_long_column columns[7])
{
    put_unless(r, columns[0], timestamps->add_lsn, 0);
    put_unless(r, columns[1], timestamps->session, 0);
    put_unless(r, columns[2], (uint64_t)timestamps->sent_boot_ns, 0);
    put_unless(r, columns[3], (uint64_t)timestamps->received_boot_ns, 0);
    put_unless(r, columns[4], (uint64_t)timestamps->applied_boot_ns, 0);
    put(r, columns[5], timestamps->armed_ns);
    put_unless(r, columns[6], (uint64_t)timestamps->done_boot_ns, 0);
}

/* Write all timestamps. Return false if the record has none, for example in an export of an arena
 * without a WAL. */
static bool put_all_timestamps(const struct row *r)
{
    static const enum pg_long_column own[7] = {
        PG_LC_ADD_LSN, PG_LC_SESSION, PG_LC_SENT_NS, PG_LC_RECEIVED_NS, PG_LC_APPLIED_NS,
        PG_LC_ARMED_NS, PG_LC_DONE_NS};
    static const enum pg_long_column other[7] = {
        PG_LC_REPLACED_ADD_LSN, PG_LC_REPLACED_SESSION, PG_LC_REPLACED_SENT_NS,
        PG_LC_REPLACED_RECEIVED_NS, PG_LC_REPLACED_APPLIED_NS, PG_LC_REPLACED_ARMED_NS,
        PG_LC_REPLACED_DONE_NS};
    const struct pg_timestamps *replaced, *timestamps = pg_frame_timestamps(r->frame, &replaced);
    if (timestamps != NULL)
        put_timestamps(r, timestamps, own);
    if (replaced != NULL)
        put_timestamps(r, replaced, other);
    return timestamps != NULL;
}

/* Write the session and batch that ended a timer, and the deadline and bulk load flag that were
 * recorded for that timer. */
static void put_asked(const struct row *r, enum pg_long_column deadline,
                      enum pg_int_column bulk_loaded)
{
    const struct pg_asked *asked = pg_frame_asked(r->frame);
    if (asked == NULL)
        return;
    put_unless(r, PG_LC_ENDED_BY, asked->session, 0);
    put_unless(r, PG_LC_ENDED_BATCH, asked->sequence, 0);
    put(r, deadline, asked->deadline_ns);
    put_flag(r, bulk_loaded, asked->bulk_loaded);
}

/* Write when the timer or operation ended, and its timestamps. */
static void put_ended(const struct row *r, int64_t ended_boot_ns)
{
    put_unless(r, PG_LC_ENDED_BOOT_NS, (uint64_t)ended_boot_ns, 0);
    put_all_timestamps(r);
}

static void put_uid(const struct row *r, uint32_t uid)
{
    if (uid != PG_NIL)
        put_int(r, PG_IC_UID, uid);
}

static void put_namespace(const struct row *r, uint32_t row)
{
    if (row < 65536 && r->births->namespaces[row] != PG_NIL)
        put_int(r, PG_IC_NAMESPACE, row);
}

static void put_topic(const struct row *r, uint32_t row)
{
    if (row >= 65536 || r->births->topics[row] == PG_NIL)
        return;
    put_int(r, PG_IC_TOPIC, row);
    put_namespace(r, r->births->topics[row]);
}

static void put_key(const struct row *r, unsigned type, const void *key, uint32_t size)
{
    put_bytes(r, PG_BC_KEY, key, size);
    put_word(r, PG_IC_KEY_TYPE, type, PG_KEY_TYPES);
}

static void put_payload(const struct row *r, const void *payload, uint32_t size)
{
    put_int(r, PG_IC_PAYLOAD_LEN, size);
    if (r->c->payloads)
        put_bytes(r, PG_BC_PAYLOAD, payload, size);
}

/* Write the slack of a timer. If the timer has none, or if the record is damaged, write nothing. */
static void put_slack(const struct row *r, uint32_t log2)
{
    if (UNLIKELY(log2 != 0) && log2 <= PG_SLACK_LOG2_MAX)
        put(r, PG_LC_SLACK_NS, 1ll << log2);
}

static void put_slot(const struct row *r, uint64_t ticket, uint32_t slot)
{
    put(r, PG_LC_TICKET, (int64_t)ticket);
    put_int(r, PG_IC_SLOT, slot);
}

/* ---- names ----------------------------------------------------------------------------------- */

static void namespace_row(const struct row *r, const void *body)
{
    const struct pg_wal_namespace *j = body;
    if (j->row < 65536)
        r->births->namespaces[j->row] = j->row;
    put_int(r, PG_IC_ROW, j->row);
    put_uid(r, j->owner_uid);
    put_namespace(r, j->row);
    put_bytes(r, PG_BC_NAME, j + 1, j->name_len);
}

static void topic_row(const struct row *r, const void *body)
{
    const struct pg_wal_topic *j = body;
    if (j->row < 65536)
        r->births->topics[j->row] = j->namespace_row;
    put_int(r, PG_IC_ROW, j->row);
    put(r, PG_LC_SEQUENCE, (int64_t)j->sequence);
    put_unless(r, PG_LC_POSITION, j->last_position - 1, UINT64_MAX);
    put_topic(r, j->row);
    put_bytes(r, PG_BC_NAME, j + 1, j->name_len);
}

/* ---- timers ---------------------------------------------------------------------------------- */

/* If the timer came from a row of a bulk load, write the bulk load and the row number. Return the
 * address of the bytes after them. */
static const uint8_t *put_bulk_load(const struct row *r, const void *at, uint32_t in_bulk_load)
{
    const struct pg_wal_row *j = at;
    if (in_bulk_load == 0)
        return at;
    put_bytes(r, PG_BC_BULK_LOAD, j->bulk_load, sizeof j->bulk_load);
    put(r, PG_LC_BULK_LOAD_ROW, (int64_t)j->row);
    return (const uint8_t *)(j + 1);
}

static void arm_row(const struct row *r, const void *body)
{
    const struct pg_wal_arm *j = body;
    const uint8_t *key = put_bulk_load(r, j + 1, j->in_bulk_load) + j->ext_len;
    put_slot(r, j->ticket, j->slot);
    put_at(r, j->armed_ns);
    if (!put_all_timestamps(r))
        put(r, PG_LC_ARMED_NS, j->armed_ns);
    put(r, PG_LC_DEADLINE_NS, j->deadline_ns);
    put_slack(r, j->slack_log2);
    put_unless(r, PG_LC_WALL_DEADLINE_NS, (uint64_t)j->wall_ns, (uint64_t)NO_WALL);
    put_unless(r, PG_LC_REPLACED, j->replaced, 0);
    if (j->replaced != 0)
        put_unless(r, PG_LC_ENDED_BOOT_NS, (uint64_t)j->armed_boot_ns, 0);
    put_asked(r, PG_LC_REPLACED_DEADLINE_NS, PG_IC_REPLACED_BULK_LOADED);
    put_flag(r, PG_IC_PARKED, j->parked);
    put_flag(r, PG_IC_BULK_LOADED, j->bulk_loaded | j->in_bulk_load);
    put_uid(r, j->uid);
    put_topic(r, j->topic);
    put_key(r, j->key_type, key, j->key_len);
    put_payload(r, key + j->key_len, j->payload_len);
}

static void unpark_row(const struct row *r, const void *body)
{
    const struct pg_wal_unpark *j = body;
    const uint8_t *key = put_bulk_load(r, j + 1, j->in_bulk_load) + j->ext_len;
    put_slot(r, j->ticket, j->slot);
    put_at(r, j->at_ns);
    put_all_timestamps(r);
    put_flag(r, PG_IC_BULK_LOADED, j->bulk_loaded);
    put(r, PG_LC_DEADLINE_NS, j->deadline_ns);
    put_slack(r, j->slack_log2);
    put_unless(r, PG_LC_WALL_DEADLINE_NS, (uint64_t)j->wall_ns, (uint64_t)NO_WALL);
    put_uid(r, j->uid);
    put_topic(r, j->topic);
    put_key(r, j->key_type, key, j->key_len);
    put_payload(r, key + j->key_len, j->payload_len);
}

static void move_row(const struct row *r, const void *body)
{
    const struct pg_wal_move *j = body;
    put_slot(r, j->ticket, j->slot);
    put_at(r, j->at_ns);
    put(r, PG_LC_DEADLINE_NS, j->deadline_ns);
    put_unless(r, PG_LC_WALL_DEADLINE_NS, (uint64_t)j->wall_ns, (uint64_t)NO_WALL);
    put_uid(r, j->uid);
    put_bulk_load(r, j + 1, j->in_bulk_load);
}

static uint32_t cause_of_end(uint32_t cause)
{
    switch (cause) {
    case PG_END_CANCELLED: return PG_CAUSE_CANCELLED;
    case PG_END_ACKNOWLEDGED: return PG_CAUSE_ACKNOWLEDGED;
    case PG_END_SKIPPED: return PG_CAUSE_SKIPPED;
    case PG_END_COALESCED: return PG_CAUSE_COALESCED;
    default: return PG_CAUSE_DROPPED;
    }
}

static void end_row(const struct row *r, const void *body)
{
    const struct pg_wal_end *j = body;
    put_slot(r, j->ticket, j->slot);
    put_at(r, j->at_ns);
    put_ended(r, j->ended_boot_ns);
    put_asked(r, PG_LC_DEADLINE_NS, PG_IC_BULK_LOADED);
    put_topic(r, j->topic);
    put_uid(r, j->uid);
    put_int(r, PG_IC_CAUSE, cause_of_end(j->cause));
}

static void fire_row(const struct row *r, const void *body)
{
    const struct pg_wal_fire *j = body;
    put_slot(r, j->ticket, j->slot);
    put_at(r, j->fired_ns);
    put_ended(r, j->ended_boot_ns);
    put(r, PG_LC_DEADLINE_NS, j->deadline_ns);
    put_slack(r, j->slack_log2);
    put(r, PG_LC_POSITION, (int64_t)j->position);
    put(r, PG_LC_SEQUENCE, (int64_t)j->sequence);
    put_topic(r, j->topic);
    put_int(r, PG_IC_FLAGS, j->flags);
    put_flag(r, PG_IC_BULK_LOADED, j->bulk_loaded);
    put_int(r, PG_IC_CAUSE, PG_CAUSE_EXPIRED);
}

static void sent_row(const struct row *r, const void *body)
{
    const struct pg_wal_sent *j = body;
    put_at(r, j->built_ns);
    put(r, PG_LC_BUILT_NS, j->built_boot_ns);
    put(r, PG_LC_HANDED_NS, j->handed_boot_ns);
    put(r, PG_LC_POSITIONS_FROM, (int64_t)j->from);
    put(r, PG_LC_POSITIONS_UPTO, (int64_t)j->upto);
    put_int(r, PG_IC_COUNT, (uint32_t)(j->upto - j->from));
}

static void entry_row(const struct row *r, const void *body)
{
    const struct pg_wal_entry *j = body;
    const uint8_t *key =
        (const uint8_t *)(j + 1) + j->jobs * sizeof(struct pg_wal_born);
    put(r, PG_LC_TICKET, (int64_t)(j->ticket >> 8));
    put_at(r, j->fired_ns);
    put(r, PG_LC_DEADLINE_NS, j->deadline_ns);
    put(r, PG_LC_POSITION, (int64_t)j->position);
    put(r, PG_LC_SEQUENCE, (int64_t)j->sequence);
    put_unless(r, PG_LC_ENDED_BOOT_NS, (uint64_t)j->ended_boot_ns, 0);
    put_topic(r, j->topic);
    put_uid(r, j->uid);
    put_int(r, PG_IC_FLAGS, j->meta >> 4);
    put_word(r, PG_IC_CAUSE, j->ticket & 255, PG_CAUSE_ACKNOWLEDGED);
    put_key(r, j->meta & 7, key, j->key_len);
    put_payload(r, key + j->key_len, j->payload_len);
}

/* ---- operations ------------------------------------------------------------------------------ */

static void put_watch_keys(const struct row *r, const struct pg_wal_watch_key *keys, uint32_t count)
{
    struct pg_watch_lists *w = &r->c->watch;
    for (uint32_t n = 0; n < count; n++, w->used++) {
        w->row[w->used] = (int32_t)keys[n].row;
        w->flags[w->used] = (int32_t)keys[n].flags;
        w->target[w->used] = (int64_t)keys[n].target;
        w->base[w->used] = (int64_t)keys[n].base;
        w->cap[w->used] = (int64_t)keys[n].cap;
    }
    mark(w->valid, r->c->rows);
    w->count++;
}

static void watch_row(const struct row *r, const void *body)
{
    const struct pg_wal_watch *j = body;
    const struct pg_wal_watch_key *keys = (const void *)(j + 1);
    const uint8_t *key = (const uint8_t *)(keys + j->keys);
    put_slot(r, j->ticket, j->slot);
    put_at(r, j->armed_ns);
    if (!put_all_timestamps(r)) {
        put(r, PG_LC_ARMED_NS, j->armed_ns);
        put(r, PG_LC_SESSION, (int64_t)j->session);
    }
    put(r, PG_LC_DEADLINE_NS, j->deadline_ns);
    put_word(r, PG_IC_CONDITION, j->condition, PG_CONDITIONS);
    if (j->condition == PG_C_SUM || j->condition == PG_C_QUORUM)
        put(r, PG_LC_THRESHOLD, (int64_t)j->threshold);
    put_uid(r, j->uid);
    put_topic(r, j->topic);
    put_watch_keys(r, keys, j->keys);
    put_key(r, j->key_type, key, j->key_len);
    put_payload(r, key + j->key_len, j->payload_len);
}

static void outcome_row(const struct row *r, const void *body)
{
    const struct pg_wal_outcome *j = body;
    put_slot(r, j->ticket, j->slot);
    put_at(r, j->ended_ns);
    put_ended(r, j->ended_boot_ns);
    put(r, PG_LC_DEADLINE_NS, j->deadline_ns);
    if (j->position != 0) {
        put(r, PG_LC_POSITION, (int64_t)j->position - 1);
        put(r, PG_LC_SEQUENCE, (int64_t)j->sequence);
    }
    put_topic(r, j->topic);
    put_int(r, PG_IC_ERROR, j->error);
    put_int(r, PG_IC_FLAGS, j->flags);
    put_word(r, PG_IC_CAUSE, j->cause, PG_CAUSE_ACKNOWLEDGED);
    put_bytes(r, PG_BC_MISSING, j + 1, (j->keys + 7u) / 8);
}

static void watermark_row(const struct row *r, const void *body)
{
    const struct pg_wal_watermark *j = body;
    put(r, PG_LC_WATERMARK, (int64_t)j->watermark);
    put_int(r, PG_IC_ROW, j->row);
    put_int(r, PG_IC_ERROR, j->error);
    put_int(r, PG_IC_FLAGS, j->flags);
    put_namespace(r, j->namespace_row);
    if (j->flags & PG_WM_BORN)
        put_key(r, j->key_type, j + 1, j->key_len);
}

static void gone_row(const struct row *r, const void *body)
{
    put_int(r, PG_IC_ROW, ((const struct pg_wal_gone *)body)->row);
}

static void session_row(const struct row *r, const void *body)
{
    const struct pg_wal_session *j = body;
    put_real_at(r, j->at_boot_ns);
    put(r, PG_LC_SESSION, (int64_t)j->session);
    put_uid(r, j->uid);
    put_int(r, PG_IC_COUNT, (uint32_t)j->dropped);
}

/* The name column has the name of the worker. If a client has no worker name, uid and pid identify
 * it. */
static void opened_row(const struct row *r, const void *body)
{
    const struct pg_wal_opened *j = body;
    put_real_at(r, j->at_boot_ns);
    put(r, PG_LC_SESSION, (int64_t)j->session);
    put_uid(r, j->uid);
    put_int(r, PG_IC_ROW, j->pid);
    put_bytes(r, PG_BC_NAME, j + 1, j->name_len);
}

static void replied_row(const struct row *r, const void *body)
{
    const struct pg_wal_replied *j = body;
    put_real_at(r, j->built_boot_ns);
    put(r, PG_LC_SESSION, (int64_t)j->session);
    put(r, PG_LC_SEQUENCE, (int64_t)j->sequence);
    put(r, PG_LC_BUILT_NS, j->built_boot_ns);
    put(r, PG_LC_HANDED_NS, j->handed_boot_ns);
    put_int(r, PG_IC_COUNT, j->count);
}

/* The payload column has the histograms in the same form as the record. */
static void metrics_row(const struct row *r, const void *body)
{
    const struct pg_wal_metrics *j = body;
    put_real_at(r, j->at_boot_ns);
    put_int(r, PG_IC_COUNT, j->histogram_count);
    put_payload(r, j + 1, (uint32_t)(j->histogram_count * sizeof(struct pg_wal_histogram) +
                                     j->bucket_count * sizeof(struct pg_wal_bucket)));
}

/* ---- a snapshot's first and last ------------------------------------------------------------- */

static void head_row(const struct row *r, const void *body)
{
    const struct pg_wal_head *j = body;
    put_at(r, j->now_ns);
    put(r, PG_LC_POSITIONS_FROM, (int64_t)j->published);
    put(r, PG_LC_POSITIONS_UPTO, (int64_t)j->replay_tail);
    put(r, PG_LC_ADD_LSN, (int64_t)j->start_lsn);
    put_int(r, PG_IC_COUNT, j->capacity);
    put(r, PG_LC_PAYLOAD_BYTES, (int64_t)j->payload_bytes);
}

static void last_row(const struct row *r, const void *body)
{
    const struct pg_wal_last *j = body;
    put(r, PG_LC_ADD_LSN, (int64_t)j->end_lsn);
    put_int(r, PG_IC_COUNT, (uint32_t)j->frames);
}

/* ---- bulk loads ---------------------------------------------------------------------------- */

static void bulk_load_row(const struct row *r, const void *body)
{
    const struct pg_wal_bulk_load *j = body;
    put_at(r, j->at_ns);
    put_bytes(r, PG_BC_BULK_LOAD, j->bulk_load, sizeof j->bulk_load);
    put_int(r, PG_IC_FLAGS, j->state);
    put_uid(r, j->uid);
    put_namespace(r, j->namespace_row);
}

static void done_row(const struct row *r, const void *body)
{
    const struct pg_wal_done *j = body;
    put_at(r, j->at_ns);
    put_bulk_load(r, &j->row, 1);
}

static void schedule_row(const struct row *r, const void *body)
{
    const struct pg_wal_schedule *j = body;
    put_int(r, PG_IC_ROW, j->row);
    put_at(r, j->at_ns);
    put_uid(r, j->fields.uid);
    put_topic(r, j->fields.topic);
    if (j->has_blob)
        put_key(r, PG_KEY_STR, (const uint8_t *)(j + 1), j->fields.key_len);
}

/* For a block in a snapshot, the row column has the number of the block's first row. */
static void block_row(const struct row *r, const void *body)
{
    const struct pg_wal_block *j = body;
    put_bytes(r, PG_BC_BULK_LOAD, j->bulk_load, sizeof j->bulk_load);
    put(r, PG_LC_BULK_LOAD_ROW, (int64_t)(j->number * PG_BULK_LOAD_BLOCK_ROWS));
}

static void cursor_row(const struct row *r, const void *body)
{
    const struct pg_wal_cursor *j = body;
    put_int(r, PG_IC_FLAGS, j->state);
    put_uid(r, j->uid);
    put_bytes(r, PG_BC_NAME, j + 1, j->name_len);
    if (j->state != PG_CURSOR_POSITION) {
        put_namespace(r, j->namespace_row);
        return;
    }
    put(r, PG_LC_SEQUENCE, (int64_t)j->sequence);
    put_topic(r, j->topic);
}

/* ---- consumer groups ------------------------------------------------------------------------- */

/* The name of a consumer group is in the key column. */
static void consumer_group_row(const struct row *r, const void *body)
{
    const struct pg_wal_consumer_group *j = body;
    put_at(r, j->at_ns);
    put(r, PG_LC_INCARNATION, (int64_t)j->incarnation);
    put_int(r, PG_IC_COUNT, j->topics);
    put_uid(r, j->created_uid);
    put_namespace(r, j->namespace_row);
    put_key(r, PG_KEY_STR, (const uint32_t *)(j + 1) + j->topics, j->name_len);
}

/* Write what the control word of a job describes. That of a job that has ended counts nothing. */
static void put_job_state(const struct row *r, const struct pg_job *j, bool acked)
{
    put_word(r, PG_IC_JOB_STATE, job_state(j), PG_JOB_STATES);
    if (job_state(j) == PG_JOB_FREE) {
        put_int(r, PG_IC_CAUSE, acked ? PG_CAUSE_ACKNOWLEDGED : PG_CAUSE_DROPPED);
        return;
    }
    if (job_state(j) == PG_JOB_DEAD)
        put_word(r, PG_IC_DEAD_REASON, job_reason(j), PG_JR_TOO_OLD + 1);
    put_int(r, PG_IC_LEASES, job_leases(j));
    put_int(r, PG_IC_FAILURES, job_failures(j));
}

static void job_row(const struct row *r, const void *body)
{
    const struct pg_wal_job *j = body;
    const uint8_t *error = (const uint8_t *)(j + 1), *key = error + j->error_len;
    put(r, PG_LC_TICKET, (int64_t)(j->ticket >> 8));
    put_at(r, j->at_ns);
    put(r, PG_LC_DEADLINE_NS, j->deadline_ns);
    put(r, PG_LC_INCARNATION, (int64_t)j->incarnation);
    put_unless(r, PG_LC_LEASED_NS, (uint64_t)j->leased_ns, 0);
    put_unless(r, PG_LC_SESSION, j->session, 0);
    put_job_state(r, &(struct pg_job){.control = j->control}, j->acked != 0);
    put_uid(r, j->uid);
    put_topic(r, j->topic);
    if (j->error_len != 0)
        put_bytes(r, PG_BC_ERROR_TEXT, error, j->error_len);
    if (j->key_len == 0)
        return;
    put_key(r, j->meta & 7, key, j->key_len);
    put_payload(r, key + j->key_len, j->payload_len);
}

/* ---- rows in order --------------------------------------------------------------------------- */

static const struct rule {
    void (*write)(const struct row *r, const void *body);
    bool names;
} rules[PG_WAL_TYPES] = {
    [PG_WAL_NAMESPACE] = {namespace_row, true}, [PG_WAL_TOPIC] = {topic_row, true},
    [PG_WAL_ARM] = {arm_row, false}, [PG_WAL_MOVE] = {move_row, false},
    [PG_WAL_END] = {end_row, false}, [PG_WAL_FIRE] = {fire_row, false},
    [PG_WAL_SENT] = {sent_row, false}, [PG_WAL_WATCH] = {watch_row, false},
    [PG_WAL_WATERMARK] = {watermark_row, false}, [PG_WAL_GONE] = {gone_row, false},
    [PG_WAL_OUTCOME] = {outcome_row, false}, [PG_WAL_SESSION] = {session_row, false},
    [PG_WAL_HEAD] = {head_row, false}, [PG_WAL_ENTRY] = {entry_row, false},
    [PG_WAL_LAST] = {last_row, false}, [PG_WAL_OPENED] = {opened_row, true},
    [PG_WAL_REPLIED] = {replied_row, false}, [PG_WAL_BULK_LOAD] = {bulk_load_row, false},
    [PG_WAL_DONE] = {done_row, false}, [PG_WAL_BLOCK] = {block_row, false},
    [PG_WAL_UNPARK] = {unpark_row, false}, [PG_WAL_METRICS] = {metrics_row, false},
    [PG_WAL_SCHEDULE] = {schedule_row, false}, [PG_WAL_CURSOR] = {cursor_row, false},
    [PG_WAL_CONSUMER_GROUP] = {consumer_group_row, false}, [PG_WAL_JOB] = {job_row, false},
};

static void row_begin(const struct row *r, const struct pg_frame_head *f, const struct pg_walk *w)
{
    put(r, PG_LC_LSN, (int64_t)f->lsn);
    put(r, PG_LC_AT, w->wall_ns / 1000);
    put_int(r, PG_IC_CLOCK, w->header.clock_kind == PG_CLOCK_VIRTUAL);
}

static void row_end(struct pg_columns *c)
{
    c->rows++;
    for (unsigned n = 0; n < PG_BYTES_COLUMNS; n++)
        c->bytes[n].offsets[c->rows] = (int32_t)c->bytes[n].used;
    c->watch.offsets[c->rows] = (int32_t)c->watch.used;
}

static void row_write(struct pg_columns *c, struct pg_births *births,
                      const struct pg_frame_head *f, const struct pg_walk *w)
{
    const struct row r = {c, births, f, (uint64_t)w->wall_ns - (uint64_t)w->boot_ns,
                          w->header.clock_kind == PG_CLOCK_BOOT};
    const unsigned kind = frame_fits(f) ? f->type : 0;
    row_begin(&r, f, w);
    put_int(&r, PG_IC_KIND, kind);
    c->kinds[kind]++;
    if (kind != 0 && rules[kind].write != NULL)
        rules[kind].write(&r, f + 1);
    row_end(c);
}

/* A record adds to each column of bytes, and to the lists of watch keys, at most as many bytes as
 * its frame has. */
static bool has_space(const struct pg_columns *c)
{
    uint64_t used = (uint64_t)c->watch.used * sizeof(struct pg_wal_watch_key);
    for (unsigned n = 0; n < PG_BYTES_COLUMNS; n++)
        if (c->bytes[n].used > used)
            used = c->bytes[n].used;
    return c->rows < c->capacity && used + PG_WAL_FRAME_MAX <= c->bytes_max;
}

static bool names_something(const struct pg_frame_head *f)
{
    return f->type < PG_WAL_TYPES && rules[f->type].names;
}

static int fill(struct pg_columns *c, struct pg_births *births, struct pg_walk *walk, bool names)
{
    const struct pg_frame_head *f;
    while (has_space(c)) {
        if ((f = pg_walk_next(walk)) == NULL)
            return 0;
        if (!names || names_something(f))
            row_write(c, births, f, walk);
    }
    return 1;
}

int pg_columns_fill(struct pg_columns *c, struct pg_births *births, struct pg_walk *walk)
{
    return fill(c, births, walk, false);
}

int pg_columns_names(struct pg_columns *c, struct pg_births *births, struct pg_walk *walk)
{
    return fill(c, births, walk, true);
}

/* migrate.c - copy the complete authoritative state of an arena into a new one that has other
 * sizes or a later ABI.
 *
 * Names, tickets, sequences, sessions and replay buffer positions are preserved, so clients notice
 * no difference. With other sizes, slots, blobs and derived rows are assigned again. pg_migrate
 * does not change `from`. */

#include "core/recover/migrate.h"
#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/bulk_loads.h"
#include "core/state/groups.h"
#include "core/state/jobs.h"
#include "core/state/cursors.h"
#include "core/state/names.h"
#include "core/state/operations.h"
#include "core/state/quotas.h"
#include "core/state/replay_buffer.h"
#include "core/state/schedules.h"
#include "core/state/session.h"
#include "core/state/sweeps.h"
#include "core/state/timers.h"
#include "core/state/watermarks.h"
#include "core/recover/in_doubt.h"

static bool fits(struct pg_fault *why, const char *detail, uint64_t needed, uint64_t available)
{
    return needed <= available || fault_set(why, "migrate", detail, 0, needed, available);
}

static bool no_memory(const struct pg_arena *to, const struct pg_arena *from,
                      struct pg_fault *why)
{
    return fault_set(why, "migrate", "payload memory in use", 0, from->metrics->blob_bytes,
                     (uint64_t)to->blobs.granules * PG_GRANULE);
}

/* Copy namespaces and topics. Their row numbers stay the same, because slots and entries refer to
 * them. */
static bool names_migrate(struct pg_arena *to, const struct pg_arena *from, struct pg_fault *why)
{
    for (uint32_t i = to->namespace_rows; i < from->namespace_rows; i++)
        if (namespace_at(from, i)->name_len != 0)
            return fits(why, "namespaces in use", i + 1, to->namespace_rows);
    for (uint32_t i = to->topic_rows; i < from->topic_rows; i++)
        if (topic_at(from, i)->name_len != 0)
            return fits(why, "topics in use", i + 1, to->topic_rows);
    for (uint32_t i = 0; i < from->namespace_rows && i < to->namespace_rows; i++)
        *namespace_at(to, i) = *namespace_at(from, i);
    for (uint32_t i = 0; i < from->topic_rows && i < to->topic_rows; i++)
        *topic_at(to, i) = *topic_at(from, i);
    return true;
}

static bool account_migrate(struct pg_arena *to, const struct pg_arena *from, uint16_t *account,
                            struct pg_fault *why)
{
    return account_carry(to, from, account) ||
           fits(why, "accounts in use", to->account_rows + 1ull, to->account_rows);
}

/* Copy the account of a slot and count the slot in it, so that the account does not look idle and
 * is not reused. An outcome has no account. */
static bool slot_account_migrate(struct pg_arena *to, const struct pg_arena *from, uint32_t slot,
                                 struct pg_fault *why)
{
    struct pg_cold *c = slot_cold(to, slot);
    if (!ctl_counted(slot_hot(to, slot)->ctl))
        c->account = 0;
    if (!account_migrate(to, from, &c->account, why))
        return false;
    if (c->account != 0)
        account_counted(to, c->account, 1, 0);
    return true;
}

static void header_migrate(struct pg_header *to, const struct pg_header *from)
{
    to->stream_id = from->stream_id;
    to->epoch = from->epoch;
    to->wall_origin_ns = from->wall_origin_ns;
    to->wall_offset_ns = from->wall_offset_ns;
    to->now_ns = from->now_ns;
    to->next_ticket = from->next_ticket;
    to->next_incarnation = from->next_incarnation;
    to->quota_timers = from->quota_timers;
    to->quota_bytes = from->quota_bytes;
    to->quota_ops = from->quota_ops;
    to->uid_share = from->uid_share;
    to->own_uid = from->own_uid;
}

/* ---- timers ------------------------------------------------------------------------------ */

uint32_t blob_copy(struct pg_arena *to, const struct pg_arena *from, uint32_t blob,
                   uint32_t granules)
{
    return blobs_copy(&to->blobs, &from->blobs, blob, granules);
}

/* Copy an operation's notice. The operation's watch records keep their rows and receive the number
 * of its new slot. */
static bool operation_migrate(struct pg_arena *to, const struct pg_arena *from, uint32_t i,
                              uint32_t slot, struct pg_fault *why)
{
    struct pg_operation *op = operation_at(to, slot);
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(to, x)->sibling)
        watch_at(to, x)->slot = slot;
    if (op->notice_blob == PG_NIL)
        return true;
    op->notice_blob = blob_copy(to, from, op->notice_blob,
                                (uint32_t)operation_granules(from, i));
    return op->notice_blob != PG_NIL || fits(why, "payload memory in use",
                                             from->metrics->blob_bytes,
                                             (uint64_t)to->blobs.granules * PG_GRANULE);
}

static bool watches_migrate(struct pg_arena *to, const struct pg_arena *from,
                            struct pg_fault *why)
{
    for (uint32_t x = 0; x < from->watch_rows; x++) {
        if (watch_at(from, x)->slot == PG_NIL)
            continue;
        if (x >= to->watch_rows)
            return fits(why, "watches in use", x + 1, to->watch_rows);
        *watch_at(to, x) = *watch_at(from, x);
    }
    return true;
}

static bool watermark_migrate(struct pg_arena *to, const struct pg_arena *from, uint32_t row,
                              struct pg_fault *why)
{
    const struct pg_watermark *l = watermark_at(from, row);
    *watermark_at(to, row) = *l;
    if (!account_migrate(to, from, &watermark_at(to, row)->account, why))
        return false;
    account_watch_key_counted(to, watermark_at(to, row)->account, 1);
    if (watermark_granules(l) == 0)
        return true;
    const uint32_t blob = blob_copy(to, from, watermark_blob(l), watermark_granules(l));
    if (blob == PG_NIL)
        return fits(why, "payload memory in use", from->metrics->blob_bytes,
                    (uint64_t)to->blobs.granules * PG_GRANULE);
    memcpy(watermark_at(to, row)->key, &blob, sizeof blob);
    return true;
}

static bool watermarks_migrate(struct pg_arena *to, const struct pg_arena *from,
                               struct pg_fault *why)
{
    for (uint32_t row = 0; row < from->watermark_rows; row++) {
        if (watermark_at(from, row)->key_len == 0)
            continue;
        if (row >= to->watermark_rows)
            return fits(why, "watch keys in use", row + 1, to->watermark_rows);
        if (!watermark_migrate(to, from, row, why))
            return false;
    }
    return true;
}

/* Copy the bulk loads. Their row numbers stay the same, because blocks and sessions refer to
 * them. */
static bool bulk_loads_migrate(struct pg_arena *to, const struct pg_arena *from,
                               struct pg_fault *why)
{
    for (uint32_t i = to->bulk_load_rows; i < from->bulk_load_rows; i++)
        if (bulk_load_at(from, i)->state != PG_BULK_LOAD_NONE)
            return fits(why, "bulk loads in use", i + 1, to->bulk_load_rows);
    for (uint32_t i = 0; i < from->bulk_load_rows && i < to->bulk_load_rows; i++)
        *bulk_load_at(to, i) = *bulk_load_at(from, i);
    return true;
}

static bool bulk_load_blocks_migrate(struct pg_arena *to, const struct pg_arena *from,
                                     struct pg_fault *why)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < from->bulk_load_block_rows; i++) {
        if (bulk_load_block_at(from, i)->bulk_load == 0)
            continue;
        if (used == to->bulk_load_block_rows)
            return fits(why, "rows of bulk loads in use", used + 1, to->bulk_load_block_rows);
        bulk_load_block_copy(to, used++, from, i);
    }
    return true;
}

/* Copy the schedules. Their row numbers stay the same, because their occurrences refer to them. */
static bool schedules_migrate(struct pg_arena *to, const struct pg_arena *from,
                              struct pg_fault *why)
{
    for (uint32_t row = 0; row < from->schedule_rows; row++) {
        struct pg_schedule_fields f = *schedule_fields(from, row);
        const bool used = f.state != PG_SCHEDULE_NONE;
        if (row >= to->schedule_rows && used)
            return fits(why, "schedules in use", row + 1, to->schedule_rows);
        if (row >= to->schedule_rows)
            continue;
        if (used)
            f.blob = blob_copy(to, from, f.blob, blob_granules(schedule_bytes(&f)));
        if (used && f.blob == PG_NIL)
            return no_memory(to, from, why);
        schedule_restore(to, row, schedule_at(from, row)->version, &f);
    }
    return true;
}

/* Copy the cursors and their positions. Their row numbers stay the same. */
static bool cursors_migrate(struct pg_arena *to, const struct pg_arena *from,
                            struct pg_fault *why)
{
    for (uint32_t i = 0; i < from->cursor_rows; i++) {
        if (cursor_at(from, i)->state == PG_CURSOR_FREE)
            continue;
        if (i >= to->cursor_rows)
            return fits(why, "rows of cursors in use", i + 1, to->cursor_rows);
        *cursor_at(to, i) = *cursor_at(from, i);
    }
    return true;
}

static bool slot_migrate(struct pg_arena *to, const struct pg_arena *from, uint32_t i,
                         uint32_t slot, struct pg_fault *why)
{
    const uint32_t granules = slot_granules(slot_cold(from, i));
    const uint32_t blob = blob_copy(to, from, slot_cold(from, i)->blob, granules);
    if (blob == PG_NIL)
        return no_memory(to, from, why);
    *slot_cold(to, slot) = *slot_cold(from, i);
    slot_cold(to, slot)->blob = blob;
    *slot_hot(to, slot) = *slot_hot(from, i);
    if (has_wal(to) && has_wal(from))
        *timestamps_at(to, slot) = *timestamps_at(from, i);
    if (!slot_account_migrate(to, from, slot, why))
        return false;
    return !is_operation(from, i) || operation_migrate(to, from, i, slot, why);
}

/* Number of slots in use. They are counted one by one, because the derived state of `from` may be
 * out of date. */
static uint64_t slots_used(const struct pg_arena *a)
{
    uint64_t used = 0;
    for (uint32_t i = 0; i < a->slots.capacity; i++)
        used += ctl_state(slot_hot(a, i)->ctl) != PG_S_FREE;
    return used;
}

static bool slots_migrate(struct pg_arena *to, const struct pg_arena *from, struct pg_fault *why)
{
    uint32_t slot = 0;
    if (!fits(why, "timers armed", slots_used(from), to->slots.capacity - 1))
        return false;
    for (uint32_t i = 0; i < from->slots.capacity; i++) {
        if (ctl_state(slot_hot(from, i)->ctl) == PG_S_FREE)
            continue;
        if (!slot_migrate(to, from, i, slot++, why))
            return false;
    }
    return true;
}

/* ---- consumer groups ------------------------------------------------------------------------- */

/* Copy the groups. Their row numbers stay the same, because jobs refer to them. */
static bool groups_migrate(struct pg_arena *to, const struct pg_arena *from, struct pg_fault *why)
{
    uint32_t links = 0;
    for (uint32_t i = 0; i < from->group_rows; i++) {
        if (!group_exists(from, i))
            continue;
        if (i >= to->group_rows)
            return fits(why, "consumer groups in use", i + 1, to->group_rows);
        *group_at(to, i) = *group_at(from, i);
    }
    for (uint32_t i = 0; i < from->group_topic_rows; i++) {
        if (group_topic_at(from, i)->group == 0)
            continue;
        if (links == to->group_topic_rows)
            return fits(why, "topics of consumer groups", links + 1, to->group_topic_rows);
        *group_topic_at(to, links++) = *group_topic_at(from, i);
    }
    return true;
}

static bool error_migrate(struct pg_arena *to, const struct pg_arena *from, struct pg_job *j)
{
    const uint32_t len = job_error_len(j);
    if (len == 0)
        return true;
    const uint32_t blob = blob_copy(to, from, (uint32_t)j->error, blob_granules(len));
    j->error = (uint64_t)len << 32 | blob;
    return blob != PG_NIL;
}

/* Copy the jobs. Their row numbers stay the same, because members refer to them. All jobs with one
 * ticket use one copy of their blob. */
static bool jobs_migrate(struct pg_arena *to, const struct pg_arena *from, struct pg_fault *why)
{
    for (uint32_t row = 0; row < from->job_slots.capacity; row++) {
        const struct pg_job *j = job_at(from, row);
        if (job_state(j) == PG_JOB_FREE)
            continue;
        if (row >= to->job_slots.capacity)
            return fits(why, "jobs in use", row + 1, to->job_slots.capacity);
        struct pg_job copy = *j;
        copy.blob = job_blob(to, j->hash, j->ticket >> 8);
        if (copy.blob == PG_NIL)
            copy.blob = blob_copy(to, from, j->blob, job_granules(j));
        if (copy.blob == PG_NIL || !error_migrate(to, from, &copy))
            return no_memory(to, from, why);
        *job_at(to, row) = copy;
        index_insert(&to->job_index, copy.hash, row);
    }
    return true;
}

bool budgets_fit(const struct pg_arena *to, struct pg_fault *why)
{
    uint64_t budgets = 0;
    for (uint32_t i = 0; i < to->group_rows; i++)
        budgets += group_exists(to, i) ? group_at(to, i)->settings.max_jobs : 0;
    return fits(why, "budgets of consumer groups", budgets, to->job_slots.capacity);
}

/* ---- replay buffer ------------------------------------------------------------------------- */

/* Position of the oldest entry that is copied. The newest entries are copied, as many as fit into
 * `to`, and keep their positions. Older entries are dropped. If an unsent entry would be dropped,
 * replay_migrate fails. */
static uint64_t oldest_retained(const struct pg_arena *to, const struct pg_arena *from)
{
    uint64_t bytes = 0, p = from->header->replay_tail;
    while (p > from->header->replay_head &&
           from->header->replay_tail - p < to->header->replay_capacity) {
        bytes += (uint64_t)entry_granules(replay_at(from, p - 1)) * PG_GRANULE;
        if (bytes > to->header->replay_bytes_max && p < from->header->replay_tail)
            /* The newest entry is copied even if it alone exceeds replay_bytes_max, as in
             * replay_make_space. */
            break;
        p--;
    }
    return p;
}

/* Copy the blob of an entry. A blob that jobs use was copied with them. */
static uint32_t entry_blob_copy(struct pg_arena *to, const struct pg_arena *from,
                                const struct pg_entry *e)
{
    return entry_has_jobs(e) ? job_blob(to, e->hash, e->ticket >> 8)
                             : blob_copy(to, from, e->blob, entry_granules(e));
}

static bool replay_migrate(struct pg_arena *to, const struct pg_arena *from, struct pg_fault *why)
{
    const struct pg_header *h = from->header;
    const uint64_t head = oldest_retained(to, from);
    if (head > h->published)
        return fits(why, "notices not sent yet", h->replay_tail - h->published,
                    h->replay_tail - head);
    for (uint64_t p = head; p < h->replay_tail; p++) {
        const struct pg_entry *e = replay_at(from, p);
        const uint32_t blob = entry_blob_copy(to, from, e);
        if (blob == PG_NIL)
            return no_memory(to, from, why);
        *replay_at(to, p) = *e;
        replay_at(to, p)->blob = blob;
    }
    to->header->replay_head = head;
    to->header->published = h->published;
    to->header->replay_tail = h->replay_tail;
    return true;
}

/* ---- sessions ------------------------------------------------------------------------------ */

static bool answers_migrate(struct pg_arena *to, const struct pg_arena *from,
                            struct pg_reply_memory *m, struct pg_fault *why)
{
    const uint32_t granules = answer_granules(m);
    if (granules == 0)
        return true;
    m->answers = answers_copy(to, from, m->answers, granules);
    return m->answers != PG_NIL ||
           fits(why, "answers remembered", answers_used(from), to->secret->answers);
}

bool replies_migrate(struct pg_arena *to, const struct pg_arena *from, uint32_t session,
                     struct pg_fault *why)
{
    for (uint64_t n = 0; n < PG_WINDOW; n++) {
        struct pg_reply_memory *m = session_reply(to, session_at(to, session), n);
        if (!answers_migrate(to, from, m, why))
            return false;
        if (reply_granules(m) == 0)
            continue;
        m->extra_blob = blob_copy(to, from, m->extra_blob, reply_granules(m));
        if (m->extra_blob == PG_NIL)
            return fits(why, "payload memory in use", from->metrics->blob_bytes,
                        (uint64_t)to->blobs.granules * PG_GRANULE);
    }
    return true;
}

static bool sessions_migrate(struct pg_arena *to, const struct pg_arena *from,
                             struct pg_fault *why)
{
    memcpy(to->secret->secret, from->secret->secret, sizeof to->secret->secret);
    to->secret->next_session = from->secret->next_session;
    for (uint32_t i = 0; i < from->secret->sessions; i++) {
        if (session_at(from, i)->id == 0)
            continue;
        if (i >= to->secret->sessions)
            return fits(why, "sessions open", i + 1, to->secret->sessions);
        *session_at(to, i) = *session_at(from, i);
        memcpy(session_reply(to, session_at(to, i), 0), session_reply(from, session_at(from, i), 0),
               PG_WINDOW * sizeof(struct pg_reply_memory));
        if (!replies_migrate(to, from, i, why))
            return false;
    }
    return true;
}

int pg_migrate(struct pg_arena *to, const struct pg_arena *from, struct pg_fault *why)
{
    memset(why, 0, sizeof *why);
    header_migrate(to->header, from->header);
    wal_buffer_migrate(to, from);
    *to->metrics = *from->metrics;
    memcpy(to->histograms, from->histograms, PG_HISTOGRAMS * sizeof *to->histograms);
    return names_migrate(to, from, why) && sessions_migrate(to, from, why) &&
           groups_migrate(to, from, why) && budgets_fit(to, why) && jobs_migrate(to, from, why) &&
           replay_migrate(to, from, why) && watches_migrate(to, from, why) &&
           watermarks_migrate(to, from, why) && bulk_loads_migrate(to, from, why) &&
           bulk_load_blocks_migrate(to, from, why) && cursors_migrate(to, from, why) &&
           schedules_migrate(to, from, why) && slots_migrate(to, from, why) &&
           sweeps_migrate(to, from) &&
           pg_rebuild(to, from->header->now_ns, why);
}

/* ---- a later ABI -------------------------------------------------------------------------- */

/* Copy rows of an earlier minor ABI. The only differences of an earlier minor ABI are missing
 * regions and missing fields at the ends of structs. Missing fields keep the values of a new arena.
 * If such a value is wrong for a field, this function has to set the field. */
static bool rows_convert(uint8_t *to, uint32_t to_bytes, const uint8_t *from, uint32_t from_bytes,
                         uint64_t rows)
{
    if (from_bytes == 0 || from_bytes > to_bytes)
        return false;
    for (uint64_t i = 0; i < rows; i++)
        memcpy(to + i * to_bytes, from + i * from_bytes, from_bytes);
    return true;
}

static bool region_convert(struct pg_arena *to, const struct pg_arena *from,
                           enum pg_region_id id, struct pg_fault *why)
{
    const struct pg_region *t = &to->header->regions[id], *f = &from->header->regions[id];
    if (f->length == 0)
        return true;
    /* PG_R_HOT has a row per slot, then a row per job. An arena without jobs may get some. */
    if (id == PG_R_HOT ? t->count < f->count : t->count != f->count)
        return fault_set(why, "convert", "elements of a region", id, t->count, f->count);
    return rows_convert((uint8_t *)to->header + t->offset, t->stride,
                        (const uint8_t *)from->header + f->offset, f->stride, f->count) ||
           fault_set(why, "convert", "stride of a region", id, t->stride, f->stride);
}

static bool regions_convert(struct pg_arena *to, const struct pg_arena *from,
                            struct pg_fault *why)
{
    static const enum pg_region_id authoritative[] = {
        PG_R_METRICS, PG_R_HISTOGRAMS, PG_R_HOT, PG_R_COLD, PG_R_BLOBS, PG_R_NAMESPACES,
        PG_R_TOPICS, PG_R_ACCOUNTS, PG_R_REPLAY_BUFFER, PG_R_WATCHES, PG_R_WATERMARKS,
        PG_R_TIMESTAMPS, PG_R_BULK_LOADS, PG_R_BULK_LOAD_BLOCKS, PG_R_BULK_LOAD_BITS,
        PG_R_GROUPS, PG_R_GROUP_TOPICS, PG_R_JOBS, PG_R_GROUP_CHANGE, PG_R_SWEEPS,
        PG_R_SCHEDULES, PG_R_CURSORS,
    };
    for (uint32_t i = 0; i < sizeof authoritative / sizeof authoritative[0]; i++)
        if (!region_convert(to, from, authoritative[i], why))
            return false;
    return true;
}

static bool private_convert(struct pg_arena *to, const struct pg_arena *from,
                            struct pg_fault *why)
{
    struct pg_private *t = to->secret;
    const struct pg_private *f = from->secret;
    if (t->sessions != f->sessions || t->answers != f->answers)
        return fault_set(why, "convert", "sessions", 0, t->sessions, f->sessions);
    memcpy(t->secret, f->secret, sizeof t->secret);
    t->next_session = f->next_session;
    return (rows_convert((uint8_t *)t + t->rows_offset, t->session_bytes,
                         (const uint8_t *)f + f->rows_offset, f->session_bytes, f->sessions) &&
            rows_convert((uint8_t *)t + t->replies_offset, t->reply_bytes,
                         (const uint8_t *)f + f->replies_offset, f->reply_bytes,
                         (uint64_t)f->sessions * PG_WINDOW) &&
            rows_convert((uint8_t *)t + t->answers_offset, PG_GRANULE,
                         (const uint8_t *)f + f->answers_offset, PG_GRANULE, f->answers)) ||
           fault_set(why, "convert", "bytes of a session", 0, t->session_bytes, f->session_bytes);
}

/* Copy the namespaces and topics back: when the frame in doubt was settled, the settings of one of
 * them may have been completed. */
static void names_finish(const struct pg_arena *to, struct pg_arena *from)
{
    const struct pg_region *n = &from->header->regions[PG_R_NAMESPACES];
    const struct pg_region *t = &from->header->regions[PG_R_TOPICS];
    uint8_t *base = (uint8_t *)from->header;
    for (uint32_t i = 0; i < n->count; i++)
        memcpy(base + n->offset + (uint64_t)i * n->stride, namespace_at(to, i), n->stride);
    for (uint32_t i = 0; i < t->count; i++)
        memcpy(base + t->offset + (uint64_t)i * t->stride, topic_at(to, i), t->stride);
}

/* Decide the frame in doubt in `to`, where its effect can be checked. Record the decision in
 * `from`, because the frame belongs to the WAL of `from`. */
static bool wal_buffer_convert(struct pg_arena *to, struct pg_arena *from, struct pg_fault *why)
{
    if (!has_wal(to) || !has_wal(from))
        return true;
    if (!region_convert(to, from, PG_R_WAL_BUFFER, why) || !names_sound(to, why) ||
        !in_doubt_settle(to, why))
        return false;
    if (wal_buffer_doubts(from)) {
        names_finish(to, from);
        wal_buffer_decide_as(from, to);
    }
    wal_buffer_init(to);
    wal_buffer_number(to, wal_next_lsn(from));
    return true;
}

int pg_convert(struct pg_arena *to, struct pg_arena *from, struct pg_fault *why)
{
    memset(why, 0, sizeof *why);
    header_migrate(to->header, from->header);
    to->header->replay_head = from->header->replay_head;
    to->header->published = from->header->published;
    to->header->replay_tail = from->header->replay_tail;
    return regions_convert(to, from, why) && private_convert(to, from, why) &&
           group_change_finish(to, why) && wal_buffer_convert(to, from, why);
}

/* snapshot.c - copy all authoritative state of a live arena into frames, as a reader.
 *
 * The arena changes during the copy, so the parts of a snapshot are from different moments. Every
 * change after the start LSN is redone from the WAL, and the frame of a change describes the
 * complete state after the change. It is therefore harmless if a row is copied in the middle of a
 * change, as long as each copy stays within bounds. A slot is copied whole or not at all. */

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/wal/frames.h"
#include "core/wal/wal_buffer.h"
#include "core/state/bulk_loads.h"
#include "core/state/groups.h"
#include "core/state/cursors.h"
#include "core/state/inbox.h"
#include "core/state/items.h"
#include "core/state/jobs.h"
#include "core/state/operation_bytes.h"
#include "core/state/records.h"
#include "core/state/replay_buffer.h"
#include "core/state/schedules.h"
#include "core/state/timers.h"
#include "core/state/watermarks.h"

/* The order in which the parts are copied. Slots come before watermarks, because an operation that
 * ends forgets its own watch keys. Slots come before replay buffer entries, so that a timer that
 * fires in the meantime is found as a slot or as an entry, and before jobs for the same reason. */
enum phase { HEAD, NAMESPACES, TOPICS, GROUPS, SLOTS, WATERMARKS, ENTRIES, JOBS, BULK_LOADS,
             BLOCKS, SCHEDULES, CURSORS, LAST };

/* Begin a frame and return its body; NULL if there is no space for the frame. If `timestamps` is
 * not NULL, copy them to the end of the frame. */
static void *frame_begin_with(const struct pg_snapshot *s, struct sink *out,
                              enum pg_wal_type type, uint64_t extra,
                              const struct pg_timestamps *timestamps)
{
    const uint64_t bytes = frame_bytes(type, extra);
    const uint64_t whole = bytes + (timestamps == NULL ? 0 : sizeof *timestamps);
    struct pg_frame_head *f = sink_take(out, whole);
    if (f == NULL)
        return NULL;
    memset((uint8_t *)f + bytes - 8, 0, 8);
    *f = (struct pg_frame_head){.bytes = (uint32_t)whole, .lsn = s->frames + 1,
                                .type = (uint16_t)type};
    if (timestamps != NULL)
        memcpy((uint8_t *)f + bytes, timestamps, sizeof *timestamps);
    return f + 1;
}

static void *frame_begin(const struct pg_snapshot *s, struct sink *out, enum pg_wal_type type,
                         uint64_t extra)
{
    return frame_begin_with(s, out, type, extra, NULL);
}

static bool frame_end(struct pg_snapshot *s)
{
    s->frames++;
    return true;
}

/* ---- head and last ------------------------------------------------------------------------- */

/* Set the start LSN. If the arena may change during the snapshot, redo includes the newest frame,
 * because its effect may not have happened yet. */
static void lsns_begin(const struct pg_arena *a, struct pg_snapshot *s)
{
    if (!has_wal(a))
        return;
    const uint64_t next = wal_next_lsn(a);
    s->start_lsn = s->quiet ? next : next - 1;
}

static void head_sizes(const struct pg_arena *a, struct pg_wal_head *j)
{
    const struct pg_header *h = a->header;
    j->payload_bytes = h->payload_bytes;
    j->replay_bytes_max = h->replay_bytes_max;
    j->wal_buffer_bytes = h->regions[PG_R_WAL_BUFFER].length;
    if (j->wal_buffer_bytes != 0)
        j->wal_buffer_bytes -= PG_WAL_BUFFER_HEAD;
    j->watermark_ttl_ns = watermark_ttl_ns(a);
    j->inbox_max = inbox_max(a);
    j->tick_ns = (int64_t)h->tick_ns;
    j->capacity = h->capacity;
    j->replay_capacity = h->replay_capacity;
    j->fanout = h->fanout;
    j->namespaces = h->regions[PG_R_NAMESPACES].count;
    j->topics = h->regions[PG_R_TOPICS].count;
    j->watches = h->regions[PG_R_WATCHES].count;
    j->watermarks = h->regions[PG_R_WATERMARKS].count;
    j->accounts = h->regions[PG_R_ACCOUNTS].count;
    j->bulk_loads = h->regions[PG_R_BULK_LOADS].count;
    j->bulk_load_blocks = h->regions[PG_R_BULK_LOAD_BLOCKS].count;
    j->groups = h->regions[PG_R_GROUPS].count;
    j->jobs = h->regions[PG_R_JOBS].count;
    j->schedules = h->regions[PG_R_SCHEDULES].count;
    j->cursors = h->regions[PG_R_CURSORS].count;
}

static void head_identity(const struct pg_header *h, struct pg_wal_head *j)
{
    memcpy(j->uuid, h->uuid, sizeof j->uuid);
    memcpy(j->boot_id, h->boot_id, sizeof j->boot_id);
    j->stream_id = h->stream_id;
    j->epoch = LOAD_RELAXED(&h->epoch);
    j->clock_kind = h->clock_kind;
    j->shard = h->shard;
    j->shards = h->shards;
    j->created_wall_ns = h->created_wall_ns;
    j->wall_origin_ns = h->wall_origin_ns;
}

/* Read the tail first and `published` second. The two values then differ by at most the replay
 * buffer's capacity. */
static void head_counters(const struct pg_header *h, struct pg_wal_head *j)
{
    j->now_ns = LOAD_RELAXED(&h->now_ns);
    j->wall_offset_ns = LOAD_RELAXED(&h->wall_offset_ns);
    j->next_ticket = LOAD_ACQUIRE(&h->next_ticket);
    j->next_incarnation = h->next_incarnation;
    j->replay_tail = LOAD_ACQUIRE(&h->replay_tail);
    j->published = LOAD_ACQUIRE(&h->published);
    if (j->replay_tail < j->published)
        j->replay_tail = j->published;
}

static bool head_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    struct pg_wal_head *j = frame_begin(s, out, PG_WAL_HEAD, 0);
    if (j == NULL)
        return false;
    lsns_begin(a, s);
    memset(j, 0, sizeof *j);
    j->start_lsn = s->start_lsn;
    head_sizes(a, j);
    head_identity(a->header, j);
    head_counters(a->header, j);
    return frame_end(s);
}

/* Set the end LSN. A frame gets its LSN before readers can see its effect. Redo up to the end LSN
 * therefore includes every effect that was copied. */
static bool last_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    struct pg_wal_last *j = frame_begin(s, out, PG_WAL_LAST, 0);
    if (j == NULL)
        return false;
    /* This acquire fence comes after the whole copy. */
    atomic_thread_fence(memory_order_acquire);
    if (has_wal(a))
        s->end_lsn = wal_next_lsn(a) - 1;
    *j = (struct pg_wal_last){.frames = s->frames, .start_lsn = s->start_lsn,
                              .end_lsn = s->end_lsn};
    s->done = 1;
    return frame_end(s);
}

/* ---- names ----------------------------------------------------------------------------------- */

static bool namespace_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    const uint32_t row = (uint32_t)s->next;
    const struct pg_namespace *n = namespace_at(a, row);
    const uint32_t len = LOAD_ACQUIRE(&n->name_len);
    if (len == 0 || len > PG_NAMESPACE_MAX)
        return true;
    struct pg_wal_namespace *j = frame_begin(s, out, PG_WAL_NAMESPACE, len);
    if (j == NULL)
        return false;
    *j = wal_namespace_of(row, n, len);
    memcpy(j + 1, n->name, len);
    return frame_end(s);
}

static bool topic_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    const uint32_t row = (uint32_t)s->next;
    const struct pg_topic *t = topic_at(a, row);
    const uint32_t len = LOAD_ACQUIRE(&t->name_len);
    if (len == 0 || len > PG_TOPIC_MAX + 1)
        return true;
    struct pg_wal_topic *j = frame_begin(s, out, PG_WAL_TOPIC, len - 1);
    if (j == NULL)
        return false;
    *j = wal_topic_of(row, t, len - 1);
    memcpy(j + 1, t->name, len - 1);
    return frame_end(s);
}

/* ---- slots -------------------------------------------------------------------------------- */

static const struct pg_timestamps *known_timestamps(const struct pg_arena *a, uint64_t slot)
{
    return !has_wal(a) ? NULL : timestamps_at(a, slot);
}

static bool timer_copy(const struct pg_arena *a, struct pg_snapshot *s, const struct pg_hot *h,
                       const struct pg_cold *c, struct sink *out)
{
    const uint32_t bytes = put_item_bytes(h, c) + c->key_len + c->payload_len;
    struct pg_wal_arm *j =
        frame_begin_with(s, out, PG_WAL_ARM, bytes, known_timestamps(a, s->next));
    if (j == NULL)
        return false;
    *j = wal_arm_of(a, (uint32_t)s->next, h, c, ctl_ticket(h->ctl));
    j->armed_ns = armed_ns_of(h, c);
    memcpy(j + 1, blob_at(&a->blobs, c->blob) + c->ext_len - put_item_bytes(h, c), bytes);
    return true;
}

/* Copy a slot that keeps its key unique, as a timer without a payload. The key follows the item
 * UNIQUE, whether or not the daemon has counted it as the key of the blob. */
static bool unique_copy(const struct pg_arena *a, struct pg_snapshot *s, const struct pg_hot *h,
                        const struct pg_cold *c, struct sink *out)
{
    uint8_t *blob = blob_at(&a->blobs, c->blob);
    const struct pg_ext *item = ext_unique(blob, c->ext_len);
    if (item == NULL)
        return true;
    const uint32_t wall = wall_item_bytes(h), from = (uint32_t)((uint8_t *)(item + 1) - blob);
    const uint32_t ext_len = from - wall + unique_space(c->key_len);
    struct pg_wal_arm *j = frame_begin_with(s, out, PG_WAL_ARM, ext_len + c->key_len,
                                            known_timestamps(a, s->next));
    if (j == NULL)
        return false;
    *j = wal_arm_of(a, (uint32_t)s->next, h, c, ctl_ticket(h->ctl));
    j->deadline_ns = LOAD_RELAXED(&item->value);
    j->armed_ns = armed_ns_of(h, c);
    j->ext_len = ext_len;
    j->payload_len = 0;
    memcpy(j + 1, blob + wall, ext_len);
    memcpy((uint8_t *)(j + 1) + ext_len, blob + from, c->key_len);
    return true;
}

static bool operation_copy(const struct pg_arena *a, struct pg_snapshot *s,
                           const struct pg_hot *h, const struct pg_cold *c,
                           const struct pg_operation *op, struct sink *out)
{
    const uint32_t bytes = c->key_len + c->payload_len;
    const uint8_t *blob = blob_at(&a->blobs, c->blob);
    struct pg_wal_watch *j = frame_begin_with(s, out, PG_WAL_WATCH,
                                              wal_watch_extra(op->keys, bytes),
                                              known_timestamps(a, s->next));
    if (j == NULL)
        return false;
    struct pg_wal_watch_key *keys = (struct pg_wal_watch_key *)(j + 1);
    *j = wal_watch_of((uint32_t)s->next, h, c, op, ctl_ticket(h->ctl));
    operation_keys_copy(a, op, blob, keys);
    memcpy(keys + op->keys, blob + c->ext_len, bytes);
    return true;
}

/* Read the head of an operation's blob. Return false if the bytes cannot be such a head. */
static bool operation_read(const struct pg_arena *a, const struct pg_cold *c,
                           struct pg_operation *op)
{
    if (c->ext_len < sizeof *op)
        return false;
    memcpy(op, blob_at(&a->blobs, c->blob), sizeof *op);
    return op->keys <= PG_WATCH_KEYS_MAX && operation_ext_bytes(op) == c->ext_len;
}

/* Copy a slot. Return false if there is no space. A slot that fails a bounds check has changed
 * during the copy and is left out. */
static bool slot_copy(const struct pg_arena *a, struct pg_snapshot *s, const struct pg_hot *h,
                      const struct pg_cold *c, struct sink *out)
{
    struct pg_operation op;
    if (!slot_copy_bounded(a, h, c))
        return true;
    if (h->flags & PG_F_OPERATION)
        return !operation_read(a, c, &op) || operation_copy(a, s, h, c, &op, out);
    if ((h->flags & PG_F_WALL) && c->ext_len < sizeof(struct pg_ext))
        return true;
    return ctl_unique(h->ctl) ? unique_copy(a, s, h, c, out) : timer_copy(a, s, h, c, out);
}

/* Return whether a timer ended during the copy of its slot, and the slot keeps its key unique. No
 * frame after the start of the snapshot has this key. */
static bool became_unique(uint64_t before, uint64_t after)
{
    return UNLIKELY(after != before) && ctl_unique(after);
}

static bool slot_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    const uint32_t passes = LOAD_ACQUIRE(&blobs_heap(&a->blobs)->passes);
    const uint64_t ctl = LOAD_ACQUIRE(&slot_hot(a, s->next)->ctl), before = out->used;
    if (!ctl_counted(ctl))
        return true;
    const struct pg_hot h = *slot_hot(a, s->next);
    const struct pg_cold c = slot_cold_copy(a, (uint32_t)s->next, ctl);
    if (!slot_copy(a, s, &h, &c, out))
        return false;
    atomic_thread_fence(memory_order_acquire);
    const uint64_t after = LOAD_ACQUIRE(&slot_hot(a, s->next)->ctl);
    if (UNLIKELY(LOAD_RELAXED(&blobs_heap(&a->blobs)->passes) != passes) ||
        became_unique(ctl, after)) {
        out->used = before;
        return slot_write(a, s, out);
    }
    if (h.ctl != ctl || after != ctl)
        out->used = before;
    return out->used == before || frame_end(s);
}

/* ---- watermarks ---------------------------------------------------------------------------- */

static bool watermark_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    struct pg_watermark l = *watermark_at(a, s->next);
    l.key_len = LOAD_ACQUIRE(&watermark_at(a, s->next)->key_len);
    const uint8_t *key = l.key;
    if (l.key_len == 0 || l.namespace_row >= a->namespace_rows)
        return true;
    if (watermark_granules(&l) != 0) {
        if ((uint64_t)watermark_blob(&l) + watermark_granules(&l) > a->blobs.granules)
            return true;
        key = blob_at(&a->blobs, watermark_blob(&l));
    }
    struct pg_wal_watermark *j = frame_begin(s, out, PG_WAL_WATERMARK, l.key_len);
    if (j == NULL)
        return false;
    *j = wal_watermark_of(a, (uint32_t)s->next, &l, true);
    memcpy(j + 1, key, l.key_len);
    return frame_end(s);
}

/* ---- the replay buffer --------------------------------------------------------------------- */

static bool entry_copy(const struct pg_arena *a, struct pg_snapshot *s, const struct pg_entry *e,
                       struct sink *out)
{
    const uint32_t bytes = e->key_len + e->payload_len;
    struct pg_wal_entry *j = frame_begin(s, out, PG_WAL_ENTRY, bytes);
    if (j == NULL)
        return false;
    *j = wal_entry_of(s->next, e);
    memcpy(j + 1, blob_at(&a->blobs, e->blob), bytes);
    return true;
}

/* Copy an entry: one that was not sent, or that a cursor has not committed, or that follows such an
 * entry. If the entry is gone, it has been sent in the meantime and is left out. */
static bool entry_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    const struct pg_entry *live = replay_at(a, s->next);
    const uint32_t passes = LOAD_ACQUIRE(&blobs_heap(&a->blobs)->passes);
    const uint64_t commit = LOAD_ACQUIRE(&live->commit), before = out->used;
    const struct pg_entry e = *live;
    atomic_thread_fence(memory_order_acquire);   /* the fence precedes reads of a moved blob */
    if (commit != s->next + 1 || e.payload_len > PG_PAYLOAD_MAX + PG_VERDICT_MAX ||
        (uint64_t)e.blob + entry_granules(&e) > a->blobs.granules)
        return true;
    if (!entry_copy(a, s, &e, out))
        return false;
    atomic_thread_fence(memory_order_acquire);
    if (UNLIKELY(LOAD_RELAXED(&blobs_heap(&a->blobs)->passes) != passes)) {
        out->used = before;
        return entry_write(a, s, out);
    }
    if (LOAD_ACQUIRE(&live->commit) != commit)
        out->used = before;
    return out->used == before || frame_end(s);
}

/* ---- bulk loads ---------------------------------------------------------------------------- */

static bool bulk_load_frame_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    struct pg_bulk_load l = *bulk_load_at(a, s->next);
    l.state = LOAD_ACQUIRE(&bulk_load_at(a, s->next)->state);
    if (l.state == PG_BULK_LOAD_NONE || l.state > PG_BULK_LOAD_CLOSED)
        return true;
    struct pg_wal_bulk_load *j = frame_begin(s, out, PG_WAL_BULK_LOAD, 0);
    if (j == NULL)
        return false;
    *j = wal_bulk_load_of(&l);
    return frame_end(s);
}

/* Copy a block of bulk load rows. If the block is reused for another bulk load during the copy, it
 * is left out or copied with wrong bits. Both results are harmless: the WAL removes the old
 * bulk load and contains all rows of the new bulk load. */
static bool block_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    const struct pg_bulk_load_block *b = bulk_load_block_at(a, s->next);
    const uint32_t bulk_load = LOAD_ACQUIRE(&b->bulk_load);
    if (bulk_load == 0 || bulk_load > a->bulk_load_rows)
        return true;
    struct pg_wal_block *j = frame_begin(s, out, PG_WAL_BLOCK, 0);
    if (j == NULL)
        return false;
    const struct pg_bulk_load_part part = bulk_load_part(a, (uint32_t)s->next);
    j->number = part.number;
    memcpy(j->bulk_load, bulk_load_at(a, bulk_load - 1)->id, sizeof j->bulk_load);
    memcpy(j->bits, part.bits, sizeof j->bits);
    return frame_end(s);
}

/* ---- consumer groups ------------------------------------------------------------------------- */

/* Copy a group. If it changes during the copy, the WAL has a frame with its new settings. */
static bool group_frame_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    const uint32_t row = (uint32_t)s->next;
    const struct pg_consumer_group *g = group_at(a, row);
    uint32_t topics[PG_GROUP_TOPICS_MAX];
    const uint32_t len = LOAD_ACQUIRE(&g->name_len), count = group_topics(a, row, topics);
    if (len == 0 || len > PG_GROUP_NAME_MAX || count == 0)
        return true;
    struct pg_wal_consumer_group *j =
        frame_begin(s, out, PG_WAL_CONSUMER_GROUP, count * sizeof *topics + len);
    if (j == NULL)
        return false;
    *j = wal_group_of(row, g);
    j->topics = count;
    j->name_len = len;
    memcpy(j + 1, topics, count * sizeof *topics);
    memcpy((uint8_t *)(j + 1) + count * sizeof *topics, g->name, len);
    return frame_end(s);
}

static bool job_bounded(const struct pg_arena *a, const struct pg_job *j)
{
    return j->payload_len <= PG_PAYLOAD_MAX + PG_VERDICT_MAX &&
           (uint64_t)j->blob + job_granules(j) <= a->blobs.granules &&
           job_error_len(j) <= PG_JOB_ERROR_MAX &&
           (j->error == 0 || (uint64_t)(uint32_t)j->error + blob_granules(job_error_len(j)) <=
                                 a->blobs.granules);
}

static bool job_copy(const struct pg_arena *a, struct pg_snapshot *s, const struct pg_job *j,
                     uint64_t lsn, struct sink *out)
{
    const uint32_t error = job_error_len(j), bytes = j->key_len + j->payload_len;
    struct pg_wal_job *to = frame_begin(s, out, PG_WAL_JOB, (uint64_t)error + bytes);
    if (to == NULL)
        return false;
    *to = wal_job_of(a, (uint32_t)s->next, j);
    to->lsn = lsn;
    to->key_len = j->key_len;
    to->payload_len = j->payload_len;
    if (error != 0)
        memcpy(to + 1, job_error(a, j), error);
    memcpy((uint8_t *)(to + 1) + error, blob_at(&a->blobs, j->blob), bytes);
    return true;
}

/* Copy a job. A job that changes during the copy is left out if it has ended; the WAL has its other
 * changes. */
static bool job_frame_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    const struct pg_job *live = job_at(a, s->next);
    const uint32_t passes = LOAD_ACQUIRE(&blobs_heap(&a->blobs)->passes);
    /* The newest record may not have its effect yet, but all older ones have. */
    const uint64_t lsn = has_wal(a) ? wal_next_lsn(a) - 1 : 0;
    const uint64_t control = LOAD_ACQUIRE(&live->control), ticket = LOAD_RELAXED(&live->ticket);
    const uint64_t before = out->used;
    if ((control & 0xff) == PG_JOB_FREE)
        return true;
    const struct pg_job j = *live;
    atomic_thread_fence(memory_order_acquire);   /* the fence precedes reads of a moved blob */
    if (!job_bounded(a, &j))
        return true;
    if (!job_copy(a, s, &j, lsn, out))
        return false;
    atomic_thread_fence(memory_order_acquire);
    if (UNLIKELY(LOAD_RELAXED(&blobs_heap(&a->blobs)->passes) != passes ||
                 LOAD_ACQUIRE(&live->control) != control || j.control != control ||
                 LOAD_RELAXED(&live->ticket) != ticket || j.ticket != ticket)) {
        out->used = before;
        return job_frame_write(a, s, out);
    }
    return frame_end(s);
}

/* ---- schedules ----------------------------------------------------------------------------- */

/* Copy a row. If the row changes during the copy, it is copied again. */
static bool schedule_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    const struct pg_schedule *row = schedule_at(a, s->next);
    const uint64_t version = LOAD_ACQUIRE(&row->version), before = out->used;
    const struct pg_schedule_fields f = row->fields[version % 2];
    if (f.state == PG_SCHEDULE_NONE || !schedule_sound(a, &f))
        return true;
    struct pg_wal_schedule *j = frame_begin(s, out, PG_WAL_SCHEDULE, schedule_bytes(&f));
    if (j == NULL)
        return false;
    *j = (struct pg_wal_schedule){.version = version, .row = (uint32_t)s->next, .has_blob = 1,
                                  .fields = f};
    memcpy(j + 1, blob_at(&a->blobs, f.blob), schedule_bytes(&f));
    atomic_thread_fence(memory_order_acquire);
    if (LOAD_ACQUIRE(&row->version) != version) {
        out->used = before;
        return schedule_write(a, s, out);
    }
    return frame_end(s);
}

/* ---- cursors ------------------------------------------------------------------------------- */

/* Copy a cursor or a position. If a row changes hands during the copy, the frame may mix two rows.
 * This is harmless: the WAL contains the end of the old cursor, and all positions of the new
 * cursor. */
static bool cursor_write(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out)
{
    struct pg_cursor c = *cursor_at(a, s->next);
    c.state = LOAD_ACQUIRE(&cursor_at(a, s->next)->state);
    const uint32_t row = c.state == PG_CURSOR_HEAD ? (uint32_t)s->next : c.cursor;
    if (c.state == PG_CURSOR_FREE || row >= a->cursor_rows)
        return true;
    const struct pg_cursor head = *cursor_at(a, row);
    if (LOAD_ACQUIRE(&cursor_at(a, row)->state) != PG_CURSOR_HEAD || head.name_len == 0 ||
        head.name_len > PG_CURSOR_MAX)
        return true;
    struct pg_wal_cursor *j = frame_begin(s, out, PG_WAL_CURSOR, head.name_len);
    if (j == NULL)
        return false;
    *j = wal_cursor_of(&head, &c);
    memcpy(j + 1, head.name, head.name_len);
    return frame_end(s);
}

/* ---- the whole snapshot -------------------------------------------------------------------- */

typedef bool (*write_fn)(const struct pg_arena *a, struct pg_snapshot *s, struct sink *out);

static const write_fn writes[] = {
    [HEAD] = head_write, [NAMESPACES] = namespace_write, [TOPICS] = topic_write,
    [SLOTS] = slot_write, [WATERMARKS] = watermark_write, [ENTRIES] = entry_write,
    [BULK_LOADS] = bulk_load_frame_write, [BLOCKS] = block_write, [GROUPS] = group_frame_write,
    [JOBS] = job_frame_write, [SCHEDULES] = schedule_write, [CURSORS] = cursor_write,
    [LAST] = last_write,
};

static void phase_begin(const struct pg_arena *a, struct pg_snapshot *s)
{
    const struct pg_header *h = a->header;
    const uint64_t counts[] = {[HEAD] = 1, [NAMESPACES] = a->namespace_rows,
                               [TOPICS] = a->topic_rows, [SLOTS] = a->slots.capacity,
                               [WATERMARKS] = a->watermark_rows, [ENTRIES] = 0,
                               [BULK_LOADS] = a->bulk_load_rows,
                               [BLOCKS] = a->bulk_load_block_rows, [GROUPS] = a->group_rows,
                               [JOBS] = a->job_slots.capacity, [SCHEDULES] = a->schedule_rows,
                               [CURSORS] = a->cursor_rows, [LAST] = 1};
    s->next = s->phase == ENTRIES ? pg_cursors_oldest(a, LOAD_ACQUIRE(&h->published)) : 0;
    s->end = s->phase == ENTRIES ? LOAD_ACQUIRE(&h->replay_tail) : counts[s->phase];
}

uint64_t pg_snapshot(const struct pg_arena *a, struct pg_snapshot *s, void *bytes, uint64_t size)
{
    struct sink out = {bytes, 0, size, false};
    if (s->frames == 0)
        phase_begin(a, s);
    while (!s->done) {
        if (s->next == s->end) {
            s->phase++;
            phase_begin(a, s);
        } else if (writes[s->phase](a, s, &out)) {
            s->next++;
        } else {
            break;
        }
    }
    return out.used;
}

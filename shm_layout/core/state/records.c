/* records.c - the records of the WAL: one for each change of the arena, and the frame bodies of
 * snapshots. */

#include "core/state/records.h"
#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/histograms.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/wal/frames.h"
#include "core/wal/wal_buffer.h"
#include "core/state/items.h"
#include "core/state/keys.h"
#include "core/state/operation_bytes.h"
#include "core/state/quotas.h"
#include "core/state/rows.h"
#include "core/state/watches.h"

/* ---- the bodies of frames ------------------------------------------------------------------- */

struct pg_wal_namespace wal_namespace_of(uint32_t row, const struct pg_namespace *n,
                                         uint32_t name_len)
{
    return (struct pg_wal_namespace){.row = row, .shard = n->shard, .owner_uid = n->owner_uid,
                                     .durability = n->durability, .quota_timers = n->quota_timers,
                                     .quota_bytes = n->quota_bytes, .quota_ops = n->quota_ops,
                                     .park_beyond_ns = n->park_beyond_ns,
                                     .late_per_s = n->late_per_s, .paused = n->paused,
                                     .created_uid = n->created_uid, .name_len = name_len};
}

struct pg_wal_topic wal_topic_of(uint32_t row, const struct pg_topic *t, uint32_t name_len)
{
    return (struct pg_wal_topic){.incarnation = t->incarnation, .sequence = t->sequence,
                                 .last_position = t->last_position, .slack_ns = t->slack_ns,
                                 .late = t->late, .missed = t->missed, .paused = t->paused,
                                 .priority = t->priority,
                                 .row = row,
                                 .namespace_row = t->namespace_row,
                                 .created_uid = t->created_uid, .name_len = name_len};
}

struct pg_wal_arm wal_arm_of(const struct pg_arena *a, uint32_t slot, const struct pg_hot *h,
                             const struct pg_cold *c, uint64_t ticket)
{
    int64_t wall_ns = NO_WALL;
    if (h->flags & PG_F_WALL)
        wall_ns = ((const struct pg_ext *)blob_at(&a->blobs, c->blob))->value;
    return (struct pg_wal_arm){.ticket = ticket, .deadline_ns = h->deadline_ns, .wall_ns = wall_ns,
                               .slot = slot, .replaced_slot = PG_NIL, .topic = h->topic,
                               .uid = account_uid(a, c->account), .payload_len = c->payload_len,
                               .parked = ctl_state(h->ctl) == PG_S_PARKED,
                               .bulk_loaded = is_bulk_loaded(h), .unique = ctl_unique(h->ctl),
                               .counted = c->account != 0, .key_len = c->key_len,
                               .key_type = c->key_type,
                               .ext_len = put_item_bytes(h, c),
                               .slack_log2 = h->flags >> PG_SLACK_SHIFT};
}

struct pg_wal_watch wal_watch_of(uint32_t slot, const struct pg_hot *h, const struct pg_cold *c,
                                 const struct pg_operation *op, uint64_t ticket)
{
    return (struct pg_wal_watch){.ticket = ticket, .deadline_ns = h->deadline_ns,
                                 .armed_ns = op->armed_ns, .threshold = op->threshold,
                                 .session = op->session, .slot = slot, .topic = h->topic,
                                 .uid = op->uid, .counted = c->account != 0,
                                 .payload_len = c->payload_len, .keys = op->keys,
                                 .condition = op->condition, .notice = op->notice_blob != PG_NIL,
                                 .key_len = c->key_len, .key_type = c->key_type};
}

struct pg_wal_watermark wal_watermark_of(const struct pg_arena *a, uint32_t row,
                                         const struct pg_watermark *l, bool born)
{
    return (struct pg_wal_watermark){.watermark = l->watermark, .row = row, .error = l->error,
                                     .namespace_row = l->namespace_row,
                                     .flags = (uint16_t)((born ? PG_WM_BORN : 0) |
                                                         (l->touched_s == PG_NIL ? PG_WM_FORGOTTEN
                                                                                 : 0)),
                                     .key_len = l->key_len, .key_type = l->key_type,
                                     .uid = account_uid(a, l->account)};
}

struct pg_wal_entry wal_entry_of(uint64_t position, const struct pg_entry *e)
{
    return (struct pg_wal_entry){.position = position, .ticket = e->ticket,
                                 .deadline_ns = e->deadline_ns, .fired_ns = e->fired_ns,
                                 .sequence = e->sequence, .missed = e->missed,
                                 .previous = entry_previous(e, position), .topic = e->topic, .payload_len = e->payload_len,
                                 .key_len = e->key_len, .meta = e->meta & (uint8_t)~PG_ENTRY_JOBS, .uid = PG_NIL};
}

struct pg_wal_bulk_load wal_bulk_load_of(const struct pg_bulk_load *l)
{
    struct pg_wal_bulk_load j = {.fencing_token = l->fencing_token,
                                 .namespace_row = l->namespace_row, .uid = l->uid,
                                 .state = l->state};
    memcpy(j.bulk_load, l->id, sizeof j.bulk_load);
    return j;
}

/* Copy the watch keys of an operation, at most op->keys. A reader may follow watch records that are
 * reused in the meantime, so the chain itself gives no limit. */
void operation_keys_copy(const struct pg_arena *a, const struct pg_operation *op,
                         const uint8_t *blob, struct pg_wal_watch_key *out)
{
    const uint8_t *own = blob + sizeof *op + operation_end_bytes(op->keys);
    const uint8_t *shares = blob + sizeof *op + bitmaps_space(op->keys, op->has_own);
    uint32_t x = op->first_watch;
    memset(out, 0, op->keys * sizeof *out);
    for (uint32_t n = 0; n < op->keys && x < a->watch_rows; n++, x = watch_at(a, x)->sibling) {
        struct pg_share share = {0, 0};
        if (op->condition == PG_C_SUM)
            memcpy(&share, shares + n * sizeof share, sizeof share);
        out[n] = (struct pg_wal_watch_key){.target = watch_target(watch_at(a, x)->target),
                                           .base = share.base, .cap = share.cap,
                                           .row = watch_at(a, x)->key_row};
        if (op->has_own && own[n / 8] >> n % 8 & 1)
            out[n].flags = PG_WK_OWN;
    }
}

struct pg_wal_cursor wal_cursor_of(const struct pg_cursor *cursor, const struct pg_cursor *row)
{
    return (struct pg_wal_cursor){.sequence = row->sequence, .incarnation = row->incarnation,
                                  .state = row->state, .namespace_row = cursor->namespace_row,
                                  .topic = row->topic, .uid = cursor->uid,
                                  .every_topic = cursor->every_topic,
                                  .name_len = cursor->name_len};
}

/* ---- timestamps ------------------------------------------------------------------------- */

enum {
    BEGUN = sizeof(struct pg_timestamps),
    ENDED = sizeof(struct pg_asked) + sizeof(struct pg_timestamps)
};

/* Return the timestamps at the end of the frame with this body. After them, `n` further timestamps
 * follow. */
static struct pg_timestamps *frame_timestamps(void *body, uint32_t n)
{
    const struct pg_frame_head *f = (const struct pg_frame_head *)body - 1;
    return (struct pg_timestamps *)((uint8_t *)body + f->bytes - sizeof *f) - 1 - n;
}

/* Write the timestamps of a timer or operation into the frame and into the slot's row, before the
 * control word is stored. */
static void timestamps_begin(struct pg_arena *a, uint32_t slot, void *body)
{
    struct pg_timestamps timestamps = a->call.batch_timestamps;
    timestamps.add_lsn = wal_next_lsn(a);
    timestamps.armed_ns = a->call.moment_ns;
    *timestamps_at(a, slot) = timestamps;
    *frame_timestamps(body, 0) = timestamps;
    if (a->call.sequence != 0 && a->call.armed_count < PG_BATCH_RECORDS)
        a->call.armed[a->call.armed_count++] = slot;
}

static void timestamps_write(const struct pg_arena *a, uint32_t slot, void *body)
{
    *frame_timestamps(body, 0) = *timestamps_at(a, slot);
}

/* Write which batch ends a timer. This is stored before the `count` timestamps at the end of the
 * frame. */
static void asked_write(const struct pg_arena *a, uint32_t slot, void *body, uint32_t count,
                        bool asked)
{
    const struct pg_hot *h = slot_hot(a, slot);
    struct pg_asked *at = (struct pg_asked *)(frame_timestamps(body, 0) + 1 - count) - 1;
    *at = (struct pg_asked){.session = asked ? a->call.batch_timestamps.session : 0,
                            .sequence = asked ? a->call.sequence : 0,
                            .deadline_ns = h->deadline_ns, .bulk_loaded = is_bulk_loaded(h)};
}

/* ---- changes ------------------------------------------------------------------------------- */

void wal_append_namespace(struct pg_arena *a, uint32_t row, const struct pg_namespace *fields,
                          struct name name)
{
    struct pg_wal_namespace *body = wal_frame_begin(a, PG_WAL_NAMESPACE, name.len);
    *body = wal_namespace_of(row, fields, name.len);
    memcpy(body + 1, name.bytes, name.len);
    wal_frame_end(a);
}

void wal_append_topic(struct pg_arena *a, uint32_t row, const struct pg_topic *fields,
                      struct name name)
{
    struct pg_wal_topic *body = wal_frame_begin(a, PG_WAL_TOPIC, name.len);
    *body = wal_topic_of(row, fields, name.len);
    memcpy(body + 1, name.bytes, name.len);
    wal_frame_end(a);
}

static struct pg_wal_row row_of(const struct pg_arena *a, uint32_t bulk_load, uint64_t row)
{
    struct pg_wal_row j = {.row = row};
    memcpy(j.bulk_load, bulk_load_at(a, bulk_load)->id, sizeof j.bulk_load);
    return j;
}

/* If the current record is a row of a bulk load, write the row. Return the address of the bytes
 * after it. */
static void *row_write(const struct pg_arena *a, void *at)
{
    if (LIKELY(!a->call.in_bulk_load))
        return at;
    *(struct pg_wal_row *)at = row_of(a, a->call.bulk_load, a->call.bulk_load_row);
    return (struct pg_wal_row *)at + 1;
}

/* The timer keeps its ticket and timestamps, and has its payload again. */
void wal_append_unpark(struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    const struct pg_cold *c = slot_cold(a, slot);
    const struct pg_wal_arm j = wal_arm_of(a, slot, h, c, ctl_ticket(h->ctl));
    const uint32_t bytes = j.ext_len + c->key_len + c->payload_len;
    struct pg_wal_unpark *body =
        wal_frame_begin_with(a, PG_WAL_UNPARK, wal_row_bytes(a->call.in_bulk_load) + bytes, BEGUN);
    *body = (struct pg_wal_unpark){.ticket = j.ticket, .deadline_ns = j.deadline_ns,
                                   .wall_ns = j.wall_ns, .at_ns = a->call.moment_ns, .slot = slot,
                                   .topic = j.topic, .uid = j.uid, .payload_len = j.payload_len,
                                   .counted = j.counted, .in_bulk_load = a->call.in_bulk_load,
                                   .key_len = j.key_len, .key_type = j.key_type,
                                   .bulk_loaded = j.bulk_loaded, .ext_len = j.ext_len,
                                   .slack_log2 = j.slack_log2};
    memcpy(row_write(a, body + 1), blob_at(&a->blobs, c->blob) + wall_item_bytes(h), bytes);
    timestamps_write(a, slot, body);
    wal_frame_end(a);
}

/* Write items, key and payload from the message: the arena has no payload of a timer that is
 * parked. */
static void arm_bytes(const struct pg_arena *a, const struct put *p, struct pg_wal_arm *body)
{
    uint8_t *at = row_write(a, body + 1);
    if (UNLIKELY(p->items_len != 0))
        memcpy(at, p->items, p->items_len);
    at += p->items_len;
    memcpy(at, p->key.bytes, p->key.len);
    if (p->payload_len != 0)
        memcpy(at + p->key.len, p->payload, p->payload_len);
}

void wal_append_arm(struct pg_arena *a, uint32_t slot, const struct put *p, uint64_t ticket,
                    uint32_t replaced)
{
    const uint64_t extra =
        wal_row_bytes(a->call.in_bulk_load) + p->items_len + p->key.len + p->payload_len;
    struct pg_wal_arm *body =
        wal_frame_begin_with(a, PG_WAL_ARM, extra, replaced == PG_NIL ? BEGUN : ENDED + BEGUN);
    *body = wal_arm_of(a, slot, slot_hot(a, slot), slot_cold(a, slot), ticket);
    body->payload_len = p->payload_len;
    body->parked = p->parks;
    body->armed_ns = a->call.moment_ns;
    body->armed_boot_ns = a->call.real_boot_ns;
    body->uid = a->call.uid;
    if (replaced != PG_NIL) {
        body->replaced = ctl_ticket(slot_hot(a, replaced)->ctl);
        body->replaced_slot = replaced;
        *frame_timestamps(body, 1) = *timestamps_at(a, replaced);
        asked_write(a, replaced, body, 2, true);
    }
    body->in_bulk_load = a->call.in_bulk_load;
    arm_bytes(a, p, body);
    timestamps_begin(a, slot, body);
    wal_frame_end(a);
}

void wal_append_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns, int64_t wall_ns)
{
    struct pg_wal_move *body = wal_frame_begin(a, PG_WAL_MOVE, wal_row_bytes(a->call.in_bulk_load));
    *body = (struct pg_wal_move){.ticket = ctl_ticket(slot_hot(a, slot)->ctl),
                                 .deadline_ns = deadline_ns, .wall_ns = wall_ns,
                                 .at_ns = a->call.moment_ns, .slot = slot, .uid = a->call.uid,
                                 .in_bulk_load = a->call.in_bulk_load};
    row_write(a, body + 1);
    wal_frame_end(a);
}

void wal_append_end(struct pg_arena *a, uint32_t slot, enum pg_end_cause cause)
{
    const struct pg_hot *h = slot_hot(a, slot);
    /* An END record with cause DROPPED may be written after a restart, so it contains no sender. */
    const bool asked = cause == PG_END_CANCELLED || cause == PG_END_ACKNOWLEDGED;
    struct pg_wal_end *body = wal_frame_begin_with(a, PG_WAL_END, 0, ENDED);
    *body = (struct pg_wal_end){.ticket = ctl_ticket(h->ctl), .at_ns = a->call.moment_ns,
                                .slot = slot, .cause = cause,
                                .uid = asked ? a->call.uid : PG_NIL, .topic = h->topic,
                                .ended_boot_ns = a->call.real_boot_ns};
    if (cause == PG_END_COALESCED)
        body->missed = topic_at(a, h->topic)->missed + 1;
    timestamps_write(a, slot, body);
    asked_write(a, slot, body, 1, asked);
    wal_frame_end(a);
}

void wal_append_freed(struct pg_arena *a, uint32_t slot)
{
    struct pg_wal_freed *body = wal_frame_begin(a, PG_WAL_FREED, 0);
    *body = (struct pg_wal_freed){.ticket = ctl_ticket(slot_hot(a, slot)->ctl), .slot = slot};
    wal_frame_end(a);
}

/* Write the rows that the jobs of a notice will take, in the order in which they will begin. */
static void births_write(const struct pg_arena *a, uint32_t topic, const struct job_traits *traits,
                         void *at)
{
    struct pg_wal_born *born = at;
    uint32_t count = 0;
    EACH_GROUP_OF_TOPIC(link, a, topic) {
        born[count] = (struct pg_wal_born){job_row_born(a, count), (uint16_t)(link->group - 1),
                                           traits->priority, traits->own_order,
                                           traits->order};
        count++;
    }
}

void wal_append_fire(struct pg_arena *a, uint32_t slot, const struct pg_entry *e,
                     const struct job_traits *traits)
{
    const struct pg_topic *t = topic_at(a, e->topic);
    const uint32_t jobs = topic_group_count(a, e->topic);
    struct pg_wal_fire *body =
        wal_frame_begin_with(a, PG_WAL_FIRE, jobs * sizeof(struct pg_wal_born), BEGUN);
    *body = (struct pg_wal_fire){.ticket = e->ticket >> 8, .deadline_ns = e->deadline_ns,
                                 .fired_ns = e->fired_ns, .position = a->header->replay_tail,
                                 .sequence = t->sequence + 1, .previous = t->last_position,
                                 .slot = slot, .topic = e->topic, .flags = entry_flags(e),
                                 .slack_log2 = slot_hot(a, slot)->flags >> PG_SLACK_SHIFT,
                                 .bulk_loaded = is_bulk_loaded(slot_hot(a, slot)),
                                 .ended_boot_ns = a->call.real_boot_ns, .missed = e->missed,
                                 .jobs = jobs};
    births_write(a, e->topic, traits, body + 1);
    timestamps_write(a, slot, body);
    wal_frame_end(a);
}

void wal_append_entry(struct pg_arena *a, const struct pg_entry *e,
                      const struct job_traits *traits)
{
    const struct pg_topic *t = topic_at(a, e->topic);
    const uint32_t bytes = e->key_len + e->payload_len, jobs = topic_group_count(a, e->topic);
    const uint64_t births = jobs * sizeof(struct pg_wal_born);
    struct pg_wal_entry *body = wal_frame_begin(a, PG_WAL_ENTRY, births + bytes);
    *body = wal_entry_of(a->header->replay_tail, e);
    body->jobs = jobs;
    births_write(a, e->topic, traits, body + 1);
    body->sequence = t->sequence + 1;
    body->previous = t->last_position;
    body->uid = a->call.uid;
    body->ended_boot_ns = a->call.real_boot_ns;
    memcpy((uint8_t *)(body + 1) + births, blob_at(&a->blobs, e->blob), bytes);
    wal_frame_end(a);
}

void wal_append_sent(struct pg_arena *a, uint64_t upto, int64_t built_boot_ns,
                     int64_t handed_boot_ns)
{
    struct pg_wal_sent *body = wal_frame_begin(a, PG_WAL_SENT, 0);
    *body = (struct pg_wal_sent){.from = a->header->published, .upto = upto,
                                 .built_ns = a->state.now_ns, .built_boot_ns = built_boot_ns,
                                 .handed_boot_ns = handed_boot_ns};
    wal_frame_end(a);
}

void wal_append_watch(struct pg_arena *a, uint32_t slot, uint64_t ticket)
{
    const struct pg_cold *c = slot_cold(a, slot);
    const struct pg_operation *op = operation_at(a, slot);
    const uint32_t bytes = c->key_len + c->payload_len;
    struct pg_wal_watch *body =
        wal_frame_begin_with(a, PG_WAL_WATCH, wal_watch_extra(op->keys, bytes), BEGUN);
    struct pg_wal_watch_key *keys = (struct pg_wal_watch_key *)(body + 1);
    *body = wal_watch_of(slot, slot_hot(a, slot), c, op, ticket);
    operation_keys_copy(a, op, (const uint8_t *)op, keys);
    memcpy(keys + op->keys, (const uint8_t *)op + c->ext_len, bytes);
    timestamps_begin(a, slot, body);
    wal_frame_end(a);
}

void wal_append_watermark(struct pg_arena *a, uint32_t row, const struct pg_watermark *fields,
                          const struct key *key)
{
    struct pg_wal_watermark *body = wal_frame_begin(a, PG_WAL_WATERMARK, key == NULL ? 0 : key->len);
    *body = wal_watermark_of(a, row, fields, key != NULL);
    if (key != NULL) {
        body->key_len = key->len;
        memcpy(body + 1, key->bytes, key->len);
    }
    wal_frame_end(a);
}

void wal_append_gone(struct pg_arena *a, uint32_t row)
{
    struct pg_wal_gone *body = wal_frame_begin(a, PG_WAL_GONE, 0);
    *body = (struct pg_wal_gone){.row = row};
    wal_frame_end(a);
}

void wal_append_outcome(struct pg_arena *a, uint32_t slot, const struct job_traits *traits)
{
    const struct pg_hot *h = slot_hot(a, slot);
    struct pg_operation *op = operation_at(a, slot);
    const struct pg_topic *t = topic_at(a, h->topic);
    const uint32_t bitmap = (op->keys + 7u) / 8;
    const uint32_t jobs = op->notice_blob == PG_NIL ? 0 : topic_group_count(a, h->topic);
    struct pg_wal_outcome *body =
        wal_frame_begin_with(a, PG_WAL_OUTCOME, wal_outcome_extra(op->keys, jobs), BEGUN);
    *body = (struct pg_wal_outcome){.ticket = ctl_ticket(h->ctl), .deadline_ns = h->deadline_ns,
                                    .ended_ns = op->ended_ns, .slot = slot, .topic = h->topic,
                                    .error = op->error, .keys = op->keys, .cause = op->cause,
                                    .flags = (uint8_t)(PG_E_OPERATION | late_flag(a, h)),
                                    .ended_boot_ns = a->call.real_boot_ns, .jobs = jobs};
    if (op->notice_blob != PG_NIL) {
        body->position = a->header->replay_tail + 1;
        body->sequence = t->sequence + 1;
        body->previous = t->last_position;
    }
    memcpy(body + 1, operation_missing(op), bitmap);
    if (jobs != 0)
        births_write(a, h->topic, traits, (uint8_t *)(body + 1) + (bitmap + 7u) / 8 * 8);
    timestamps_write(a, slot, body);
    wal_frame_end(a);
}

void wal_append_session(struct pg_arena *a, const struct pg_session *s)
{
    struct pg_wal_session *body = wal_frame_begin(a, PG_WAL_SESSION, 0);
    *body = (struct pg_wal_session){.session = s->id, .at_boot_ns = a->call.real_boot_ns,
                                    .uid = s->uid, .pid = s->pid, .dropped = s->inbox_count};
    wal_frame_end(a);
}

void wal_append_opened(struct pg_arena *a, const struct pg_session *s, uint64_t id,
                       struct name name)
{
    struct pg_wal_opened *body = wal_frame_begin(a, PG_WAL_OPENED, name.len);
    *body = (struct pg_wal_opened){.session = id, .at_boot_ns = a->call.real_boot_ns, .uid = s->uid,
                                   .pid = s->pid, .name_len = name.len};
    if (name.len != 0)
        memcpy(body + 1, name.bytes, name.len);
    wal_frame_end(a);
}

void pg_replied(struct pg_arena *a, uint64_t session, uint64_t sequence, uint32_t count,
                int64_t built_boot_ns, int64_t handed_boot_ns)
{
    if (!has_wal(a) || wal_buffer_full(a))   /* the record is optional: recovery does not need it */
        return;
    struct pg_wal_replied *body = wal_frame_begin(a, PG_WAL_REPLIED, 0);
    *body = (struct pg_wal_replied){.session = session, .sequence = sequence, .count = count,
                                    .built_boot_ns = built_boot_ns,
                                    .handed_boot_ns = handed_boot_ns};
    wal_frame_end(a);
    wal_buffer_settle(a);
}

/* Metrics are optional, so they leave the last space in the WAL buffer to other records. */
void pg_wal_append_metrics(struct pg_arena *a, int64_t real_boot_ns)
{
    if (wal_buffer_refusal(a) != PG_ST_NONE || !has_wal(a))
        return;
    const uint32_t buckets = histograms_used(a->histograms);
    const uint64_t extra = PG_HISTOGRAMS * sizeof(struct pg_wal_histogram) +
                           buckets * sizeof(struct pg_wal_bucket);
    struct pg_wal_metrics *body = wal_frame_begin(a, PG_WAL_METRICS, extra);
    *body = (struct pg_wal_metrics){.at_boot_ns = real_boot_ns, .histogram_count = PG_HISTOGRAMS,
                                    .bucket_count = buckets};
    histograms_write(a->histograms, (struct pg_wal_histogram *)(body + 1));
    wal_frame_end(a);
    wal_buffer_settle(a);
}

struct pg_wal_consumer_group wal_group_of(uint32_t row, const struct pg_consumer_group *g)
{
    return (struct pg_wal_consumer_group){.incarnation = g->incarnation, .settings = g->settings,
                                          .at_ns = g->created_ns, .row = row,
                                          .namespace_row = g->namespace_row,
                                          .created_uid = g->created_uid};
}

void wal_append_group(struct pg_arena *a, uint32_t row, const struct pg_consumer_group *fields,
                      struct name name, const uint32_t *topics, uint32_t count)
{
    const uint64_t extra = count * sizeof *topics + name.len;
    struct pg_wal_consumer_group *body = wal_frame_begin(a, PG_WAL_CONSUMER_GROUP, extra);
    *body = wal_group_of(row, fields);
    body->topics = count;
    body->name_len = name.len;
    if (count != 0)
        memcpy(body + 1, topics, count * sizeof *topics);
    memcpy((uint8_t *)(body + 1) + count * sizeof *topics, name.bytes, name.len);
    wal_frame_end(a);
}

struct pg_wal_job wal_job_of(const struct pg_arena *a, uint32_t row, const struct pg_job *j)
{
    return (struct pg_wal_job){.control = j->control, .ticket = j->ticket, .position = j->position,
                               .deadline_ns = j->deadline_ns, .fired_ns = j->fired_ns,
                               .due_ns = j->due_ns, .leased_ns = j->leased_ns,
                               .first_failed_ns = j->first_failed_ns,
                               .last_failed_ns = j->last_failed_ns, .session = j->session,
                               .order = j->order,
                               .incarnation = group_at(a, j->group)->incarnation, .row = row,
                               .error_len = (uint32_t)(j->error >> 32), .group = j->group,
                               .topic = j->topic, .meta = j->meta, .priority = j->priority,
                               .uid = PG_NIL, .missed = j->missed,
                               .own_order = j->own_order};
}

void wal_append_job(struct pg_arena *a, uint32_t row, const struct pg_job *fields, bool acked,
                    bool whole)
{
    struct pg_wal_job j = wal_job_of(a, row, fields);
    if (j.control == PG_JOB_FREE)
        j.error_len = 0;
    j.key_len = whole ? fields->key_len : 0;
    j.payload_len = whole ? fields->payload_len : 0;
    const uint32_t bytes = j.key_len + j.payload_len;
    struct pg_wal_job *body = wal_frame_begin(a, PG_WAL_JOB, (uint64_t)j.error_len + bytes);
    j.at_ns = a->call.moment_ns;
    j.acked = acked;
    j.uid = a->call.uid;
    *body = j;
    if (j.error_len != 0)
        memcpy(body + 1, blob_at(&a->blobs, (uint32_t)fields->error), j.error_len);
    if (whole)
        memcpy((uint8_t *)(body + 1) + j.error_len, blob_at(&a->blobs, fields->blob), bytes);
    wal_frame_end(a);
}

void wal_append_bulk_load(struct pg_arena *a, const struct pg_bulk_load *fields)
{
    struct pg_wal_bulk_load *body = wal_frame_begin(a, PG_WAL_BULK_LOAD, 0);
    *body = wal_bulk_load_of(fields);
    body->at_ns = a->call.moment_ns;
    wal_frame_end(a);
}

void wal_append_schedule(struct pg_arena *a, uint32_t row, uint64_t version,
                         const struct pg_schedule_fields *f, bool has_blob)
{
    const uint64_t bytes = has_blob ? schedule_bytes(f) : 0;
    struct pg_wal_schedule *body = wal_frame_begin(a, PG_WAL_SCHEDULE, bytes);
    *body = (struct pg_wal_schedule){.version = version, .row = row, .has_blob = has_blob,
                                     .at_ns = a->call.moment_ns, .fields = *f};
    if (bytes != 0)
        memcpy(body + 1, blob_at(&a->blobs, f->blob), bytes);
    wal_frame_end(a);
}

void wal_append_done(struct pg_arena *a, uint32_t bulk_load, uint64_t row)
{
    struct pg_wal_done *body = wal_frame_begin(a, PG_WAL_DONE, 0);
    *body = (struct pg_wal_done){.row = row_of(a, bulk_load, row), .at_ns = a->call.moment_ns};
    wal_frame_end(a);
}

void wal_append_cursor(struct pg_arena *a, const struct pg_cursor *cursor,
                       const struct pg_cursor *row)
{
    struct pg_wal_cursor *body = wal_frame_begin(a, PG_WAL_CURSOR, cursor->name_len);
    *body = wal_cursor_of(cursor, row);
    memcpy(body + 1, cursor->name, cursor->name_len);
    wal_frame_end(a);
}

/* frames.c - what a frame of the WAL says of the arena, for the WAL buffer and for snapshots. */

#include "core/core.h"

static const uint16_t body_bytes[PG_WAL_TYPES] = {
    [PG_WAL_COMMIT_GROUP] = sizeof(struct pg_wal_group),
    [PG_WAL_NAMESPACE] = sizeof(struct pg_wal_namespace),
    [PG_WAL_TOPIC] = sizeof(struct pg_wal_topic),
    [PG_WAL_ARM] = sizeof(struct pg_wal_arm),
    [PG_WAL_MOVE] = sizeof(struct pg_wal_move),
    [PG_WAL_END] = sizeof(struct pg_wal_end),
    [PG_WAL_FIRE] = sizeof(struct pg_wal_fire),
    [PG_WAL_SENT] = sizeof(struct pg_wal_sent),
    [PG_WAL_WATCH] = sizeof(struct pg_wal_watch),
    [PG_WAL_WATERMARK] = sizeof(struct pg_wal_watermark),
    [PG_WAL_GONE] = sizeof(struct pg_wal_gone),
    [PG_WAL_OUTCOME] = sizeof(struct pg_wal_outcome),
    [PG_WAL_SESSION] = sizeof(struct pg_wal_session),
    [PG_WAL_HEAD] = sizeof(struct pg_wal_head),
    [PG_WAL_ENTRY] = sizeof(struct pg_wal_entry),
    [PG_WAL_LAST] = sizeof(struct pg_wal_last),
    [PG_WAL_OPENED] = sizeof(struct pg_wal_opened),
    [PG_WAL_REPLIED] = sizeof(struct pg_wal_replied),
    [PG_WAL_BULK_LOAD] = sizeof(struct pg_wal_bulk_load),
    [PG_WAL_DONE] = sizeof(struct pg_wal_done),
    [PG_WAL_BLOCK] = sizeof(struct pg_wal_block),
    [PG_WAL_UNPARK] = sizeof(struct pg_wal_unpark),
    [PG_WAL_METRICS] = sizeof(struct pg_wal_metrics),
};

uint64_t frame_bytes(enum pg_wal_type type, uint64_t extra)
{
    return (sizeof(struct pg_frame_head) + body_bytes[type] + extra + 7) & ~7ull;
}

static uint64_t metrics_extra(const struct pg_wal_metrics *j)
{
    return j->histogram_count * (uint64_t)sizeof(struct pg_wal_histogram) +
           j->bucket_count * (uint64_t)sizeof(struct pg_wal_bucket);
}

/* How many bytes stand behind the body, by what the body says. */
static uint64_t extra_bytes(const struct pg_frame_head *f)
{
    const void *body = f + 1;
    const struct pg_wal_arm *arm = body;
    const struct pg_wal_unpark *unpark = body;
    const struct pg_wal_watch *watch = body;
    const struct pg_wal_watermark *watermark = body;
    const struct pg_wal_entry *entry = body;
    switch (f->type) {
    case PG_WAL_NAMESPACE: return ((const struct pg_wal_namespace *)body)->name_len;
    case PG_WAL_TOPIC: return ((const struct pg_wal_topic *)body)->name_len;
    case PG_WAL_ARM: return wal_row_bytes(arm->in_bulk_load) + arm->key_len + arm->payload_len;
    case PG_WAL_UNPARK:
        return wal_row_bytes(unpark->in_bulk_load) + unpark->key_len + unpark->payload_len;
    case PG_WAL_MOVE: return wal_row_bytes(((const struct pg_wal_move *)body)->in_bulk_load);
    case PG_WAL_WATCH:
        return wal_watch_extra(watch->keys, (uint64_t)watch->key_len + watch->payload_len);
    case PG_WAL_WATERMARK: return watermark->flags & PG_WM_BORN ? watermark->key_len : 0;
    case PG_WAL_OUTCOME: return (((const struct pg_wal_outcome *)body)->keys + 7u) / 8;
    case PG_WAL_ENTRY: return (uint64_t)entry->key_len + entry->payload_len;
    case PG_WAL_OPENED: return ((const struct pg_wal_opened *)body)->name_len;
    case PG_WAL_METRICS: return metrics_extra(body);
    default: return 0;
    }
}

/* How many pg_timestamps may stand at the end of a frame. */
static uint32_t timestamps_of(const struct pg_frame_head *f)
{
    switch (f->type) {
    case PG_WAL_ARM: return 1 + (((const struct pg_wal_arm *)(f + 1))->replaced != 0);
    case PG_WAL_WATCH:
    case PG_WAL_UNPARK:
    case PG_WAL_END:
    case PG_WAL_FIRE:
    case PG_WAL_OUTCOME: return 1;
    default: return 0;
    }
}

/* How many bytes of pg_asked stand before them. */
static uint64_t asked_bytes(const struct pg_frame_head *f)
{
    return f->type == PG_WAL_END || timestamps_of(f) == 2 ? sizeof(struct pg_asked) : 0;
}

bool frame_fits(const struct pg_frame_head *f)
{
    if (f->type <= PG_WAL_SEAL || f->type >= PG_WAL_TYPES || f->bytes > PG_WAL_FRAME_MAX ||
        f->bytes < frame_bytes(f->type, 0))
        return false;
    const uint64_t bytes = frame_bytes(f->type, extra_bytes(f));
    const uint64_t tail = timestamps_of(f) * sizeof(struct pg_timestamps) + asked_bytes(f);
    return f->bytes == bytes || f->bytes == bytes + tail;
}

const struct pg_timestamps *pg_frame_timestamps(const struct pg_frame_head *f,
                                                const struct pg_timestamps **replaced)
{
    const struct pg_timestamps *timestamps =
        (const struct pg_timestamps *)((const uint8_t *)f + f->bytes - sizeof *timestamps);
    *replaced = NULL;
    if (timestamps_of(f) == 0 || f->bytes == frame_bytes(f->type, extra_bytes(f)))
        return NULL;
    if (timestamps_of(f) == 2)
        *replaced = timestamps - 1;
    return timestamps;
}

const struct pg_asked *pg_frame_asked(const struct pg_frame_head *f)
{
    const uint64_t bytes = timestamps_of(f) * sizeof(struct pg_timestamps);
    if (asked_bytes(f) == 0 || f->bytes <= frame_bytes(f->type, extra_bytes(f)) + bytes)
        return NULL;
    return (const struct pg_asked *)((const uint8_t *)f + f->bytes - bytes) - 1;
}

/* ---- bodies ------------------------------------------------------------------------------ */

struct pg_wal_namespace wal_namespace_of(uint32_t row, const struct pg_namespace *n,
                                         uint32_t name_len)
{
    return (struct pg_wal_namespace){.row = row, .shard = n->shard, .owner_uid = n->owner_uid,
                                     .durability = n->durability, .quota_timers = n->quota_timers,
                                     .quota_bytes = n->quota_bytes, .quota_ops = n->quota_ops,
                                     .park_beyond_ns = n->park_beyond_ns,
                                     .created_uid = n->created_uid, .name_len = name_len};
}

struct pg_wal_topic wal_topic_of(uint32_t row, const struct pg_topic *t, uint32_t name_len)
{
    return (struct pg_wal_topic){.incarnation = t->incarnation, .sequence = t->sequence,
                                 .last_position = t->last_position, .row = row,
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
                               .bulk_loaded = is_bulk_loaded(h),
                               .counted = c->account != 0, .key_len = c->key_len,
                               .key_type = c->key_type};
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
                                         const struct pg_watched *l, bool born)
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
                                 .sequence = e->sequence, .previous = e->previous,
                                 .topic = e->topic, .payload_len = e->payload_len,
                                 .key_len = e->key_len, .meta = e->meta, .uid = PG_NIL};
}

struct pg_wal_bulk_load wal_bulk_load_of(const struct pg_bulk_load *l)
{
    struct pg_wal_bulk_load j = {.fencing_token = l->fencing_token,
                                 .namespace_row = l->namespace_row, .uid = l->uid,
                                 .state = l->state};
    memcpy(j.bulk_load, l->id, sizeof j.bulk_load);
    return j;
}

/* frames.c - the sizes of WAL frames, and the optional fields at their ends. */

#include "core/wal/frames.h"
#include "core/base/common.h"

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
    [PG_WAL_CONSUMER_GROUP] = sizeof(struct pg_wal_consumer_group),
    [PG_WAL_JOB] = sizeof(struct pg_wal_job),
    [PG_WAL_SCHEDULE] = sizeof(struct pg_wal_schedule),
    [PG_WAL_CURSOR] = sizeof(struct pg_wal_cursor),
    [PG_WAL_FREED] = sizeof(struct pg_wal_freed),
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

static uint64_t births_bytes(uint32_t jobs) { return (uint64_t)jobs * sizeof(struct pg_wal_born); }

static uint64_t group_extra(const struct pg_wal_consumer_group *j)
{
    return j->topics * (uint64_t)sizeof(uint32_t) + j->name_len;
}

static uint64_t job_extra(const struct pg_wal_job *j)
{
    return (uint64_t)j->error_len + j->key_len + j->payload_len;
}

static uint64_t outcome_extra(const struct pg_wal_outcome *j)
{
    return wal_outcome_extra(j->keys, j->jobs);
}

static uint64_t schedule_extra_bytes(const struct pg_wal_schedule *j)
{
    const struct pg_schedule_fields *f = &j->fields;
    return j->has_blob == 0 ? 0
                            : (uint64_t)f->key_len + f->spec_len + f->zone_len + f->tag_len +
                                  f->payload_len;
}

/* Number of bytes after the body, computed from the type and the body. */
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
    case PG_WAL_ARM:
        return wal_row_bytes(arm->in_bulk_load) + arm->ext_len + arm->key_len + arm->payload_len;
    case PG_WAL_UNPARK:
        return wal_row_bytes(unpark->in_bulk_load) + unpark->ext_len + unpark->key_len +
               unpark->payload_len;
    case PG_WAL_MOVE: return wal_row_bytes(((const struct pg_wal_move *)body)->in_bulk_load);
    case PG_WAL_WATCH:
        return wal_watch_extra(watch->keys, (uint64_t)watch->key_len + watch->payload_len);
    case PG_WAL_WATERMARK: return watermark->flags & PG_WM_BORN ? watermark->key_len : 0;
    case PG_WAL_FIRE: return births_bytes(((const struct pg_wal_fire *)body)->jobs);
    case PG_WAL_OUTCOME: return outcome_extra(body);
    case PG_WAL_ENTRY:
        return births_bytes(entry->jobs) + entry->key_len + entry->payload_len;
    case PG_WAL_CONSUMER_GROUP: return group_extra(body);
    case PG_WAL_JOB: return job_extra(body);
    case PG_WAL_OPENED: return ((const struct pg_wal_opened *)body)->name_len;
    case PG_WAL_METRICS: return metrics_extra(body);
    case PG_WAL_SCHEDULE: return schedule_extra_bytes(body);
    case PG_WAL_CURSOR: return ((const struct pg_wal_cursor *)body)->name_len;
    default: return 0;
    }
}

/* Number of pg_timestamps that a frame of this type can have at its end. */
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

/* Size of the optional pg_asked before the pg_timestamps at the end of the frame. */
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


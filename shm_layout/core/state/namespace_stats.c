/* namespace_stats.c - counts and digests of the contents of each namespace. The digests do not
 * include the numbers of slots, rows and positions, or key hashes, because these differ between
 * arenas with the same contents. */

#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/hash.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/state/bulk_loads.h"
#include "core/state/items.h"
#include "core/state/jobs.h"
#include "core/state/names.h"
#include "core/state/operations.h"
#include "core/state/quotas.h"
#include "core/state/replay_buffer.h"
#include "core/state/rows.h"
#include "core/state/session.h"
#include "core/state/timers.h"
#include "core/state/watches.h"
#include "core/state/watermarks.h"

/* Hash two words and some bytes. `kind` makes the hashes of different kinds of objects distinct. */
static uint64_t mark(uint64_t kind, uint64_t x, uint64_t y, const void *bytes, size_t len)
{
    const uint64_t secret[2] = {x, y};
    return keyed_hash(secret, kind, bytes, len);
}

enum { TOPIC = 1, TIMER, OPERATION, KEY, WATERMARK, NOTICE, BULK_LOAD, BLOCK, SETTINGS, STREAM,
       JOB, SCHEDULE };

static uint64_t topic_mark(const struct pg_arena *a, uint32_t topic)
{
    const struct name name = topic_name(a, topic);
    return mark(TOPIC, name.len, 0, name.bytes, name.len);
}

/* ---- slots ----------------------------------------------------------------------------------- */

/* Digest of key and payload, and of `items` bytes before them. */
static uint64_t key_mark(const struct pg_arena *a, uint32_t slot, size_t items)
{
    const struct pg_cold *c = slot_cold(a, slot);
    const uint8_t *key = blob_at(&a->blobs, c->blob) + c->ext_len;
    return mark(KEY, c->key_type, c->key_len, key - items, items + c->key_len + c->payload_len);
}

/* The digest of a wall timer includes its wall time instead of its deadline. */
static uint64_t timer_mark(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    const struct pg_cold *c = slot_cold(a, slot);
    const struct pg_ext *ext = (const struct pg_ext *)blob_at(&a->blobs, c->blob);
    const int64_t at = h->flags & PG_F_WALL ? ext->value : h->deadline_ns;
    /* The item of an occurrence has the number of a row. The digest of the schedule covers it. */
    const size_t items = h->flags & PG_F_SCHEDULE ? 0 : put_item_bytes(h, slot_cold(a, slot));
    const uint64_t about[] = {key_mark(a, slot, items), topic_mark(a, h->topic), h->flags,
                              account_uid(a, c->account)};
    return mark(TIMER, h->ctl, (uint64_t)at, about, sizeof about);
}

/* The digest of a SUM or CLIENT operation includes no targets, because its targets follow from the
 * watermarks. */
static uint64_t watch_mark(const struct pg_arena *a, const struct pg_operation *op, uint32_t watch)
{
    const struct pg_watch *w = watch_at(a, watch);
    const struct pg_watermark *l = watermark_at(a, w->key_row);
    const uint8_t *key = watermark_granules(l) == 0 ? l->key
                                                    : blob_at(&a->blobs, watermark_blob(l));
    const uint64_t target = has_targets(op->condition) ? watch_target(w->target) : 0;
    return mark(KEY, l->key_type, target, key, l->key_len);
}

static uint64_t owner_mark(const struct pg_arena *a, const struct pg_operation *op)
{
    const struct pg_session *s = session_find(a, op->session);
    return s == NULL ? 0 : mark(KEY, s->uid, 0, s->nonce, sizeof s->nonce);
}

static uint64_t operation_mark(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    const struct pg_operation *op = operation_at(a, slot);
    const size_t behind = slot_cold(a, slot)->ext_len - sizeof *op;
    uint64_t about[] = {key_mark(a, slot, 0), owner_mark(a, op), op->threshold, (uint64_t)op->armed_ns,
                        (uint64_t)op->ended_ns, op->keys, op->condition, op->cause, op->error,
                        op->notice_blob != PG_NIL, mark(OPERATION, 0, 0, op + 1, behind), 0};
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(a, x)->sibling)
        about[11] = mark(OPERATION, about[11], watch_mark(a, op, x), NULL, 0);
    return mark(OPERATION, h->ctl, (uint64_t)h->deadline_ns, about, sizeof about);
}

static void slot_stats(const struct pg_arena *a, uint32_t slot, struct pg_namespace_stats *row)
{
    if (!is_operation(a, slot)) {
        ++*(is_parked(a, slot) ? &row->parked : &row->timers);
        row->digest += timer_mark(a, slot);
        return;
    }
    ++*(ctl_live(slot_hot(a, slot)->ctl) ? &row->operations : &row->outcomes);
    row->digest += operation_mark(a, slot);
}

static bool slots_stats(const struct pg_arena *a, struct pg_namespace_stats *rows,
                        struct pg_fault *why)
{
    for (uint32_t slot = 0; slot < a->slots.capacity; slot++) {
        if (ctl_state(slot_hot(a, slot)->ctl) == PG_S_FREE)
            continue;
        const uint32_t ns = slot_home(a, slot);
        if (ns == PG_NIL)
            return fault_set(why, "slots", "an outcome belongs to no namespace", slot, 0, 0);
        slot_stats(a, slot, &rows[ns]);
    }
    return true;
}

/* ---- the rest ----------------------------------------------------------------------------- */

static void watermarks_stats(const struct pg_arena *a, struct pg_namespace_stats *rows)
{
    for (uint32_t i = 0; i < a->watermark_rows; i++) {
        const struct pg_watermark *l = watermark_at(a, i);
        if (l->key_len == 0)
            continue;
        const uint8_t *key = watermark_granules(l) == 0 ? l->key
                                                        : blob_at(&a->blobs, watermark_blob(l));
        const uint64_t about[] = {mark(KEY, l->key_type, 0, key, l->key_len),
                                  account_uid(a, l->account)};
        rows[l->namespace_row].watermarks++;
        rows[l->namespace_row].digest += mark(WATERMARK, l->watermark, l->error, about,
                                              sizeof about);
    }
}

static void notices_stats(const struct pg_arena *a, struct pg_namespace_stats *rows)
{
    for (uint64_t p = a->header->published; p < a->header->replay_tail; p++) {
        const struct pg_entry *e = replay_at(a, p);
        struct pg_namespace_stats *row = &rows[topic_at(a, e->topic)->namespace_row];
        const uint64_t bytes = (uint64_t)e->key_len + e->payload_len;
        const uint64_t meta = e->meta & ~PG_ENTRY_JOBS;
        const uint64_t about[] = {mark(KEY, meta, e->key_len, blob_at(&a->blobs, e->blob), bytes),
                                  topic_mark(a, e->topic), (uint64_t)e->fired_ns, e->missed};
        row->notices++;
        row->digest += mark(NOTICE, e->ticket, (uint64_t)e->deadline_ns, about, sizeof about);
    }
}

/* The digest of a job does not include its state, because a merge ends all leases. */
static uint64_t job_mark(const struct pg_arena *a, const struct pg_job *j)
{
    const struct pg_consumer_group *g = group_at(a, j->group);
    const uint64_t bytes = (uint64_t)j->key_len + j->payload_len;
    const uint64_t about[] = {mark(KEY, j->meta, j->key_len, blob_at(&a->blobs, j->blob), bytes),
                              topic_mark(a, j->topic), mark(KEY, 0, 0, g->name, g->name_len),
                              (uint64_t)j->fired_ns, job_failures(j), job_leases(j)};
    return mark(JOB, j->ticket, (uint64_t)j->deadline_ns, about, sizeof about);
}

static void jobs_stats(const struct pg_arena *a, struct pg_namespace_stats *rows)
{
    for (uint32_t row = 0; row < a->job_slots.capacity; row++) {
        const struct pg_job *j = job_at(a, row);
        if (job_state(j) == PG_JOB_FREE)
            continue;
        struct pg_namespace_stats *found = &rows[group_at(a, j->group)->namespace_row];
        found->jobs++;
        found->digest += job_mark(a, j);
    }
}

static void bulk_loads_stats(const struct pg_arena *a, struct pg_namespace_stats *rows)
{
    for (uint32_t i = 0; i < a->bulk_load_rows; i++) {
        const struct pg_bulk_load *l = bulk_load_at(a, i);
        const uint64_t about[] = {l->uid, l->state, l->rows};
        if (l->state == PG_BULK_LOAD_NONE)
            continue;
        rows[l->namespace_row].bulk_loads++;
        rows[l->namespace_row].streams +=
            mark(BULK_LOAD, l->fencing_token, mark(BULK_LOAD, 0, 0, l->id, sizeof l->id), about,
                 sizeof about);
    }
    for (uint32_t i = 0; i < a->bulk_load_block_rows; i++) {
        if (bulk_load_block_at(a, i)->bulk_load == 0)
            continue;
        const struct pg_bulk_load *l = bulk_load_at(a, bulk_load_block_at(a, i)->bulk_load - 1);
        const struct pg_bulk_load_part part = bulk_load_part(a, i);
        rows[l->namespace_row].streams +=
            mark(BLOCK, mark(BULK_LOAD, 0, 0, l->id, sizeof l->id), part.number, part.bits,
                 sizeof part.bits);
    }
}

static void schedules_stats(const struct pg_arena *a, struct pg_namespace_stats *rows)
{
    for (uint32_t i = 0; i < a->schedule_rows; i++) {
        const struct pg_schedule_fields *f = schedule_fields(a, i);
        if (f->state == PG_SCHEDULE_NONE)
            continue;
        const uint32_t slot = schedule_at(a, i)->slot;
        const uint64_t about[] = {
            mark(KEY, f->key_len, f->spec_len, blob_at(&a->blobs, f->blob), schedule_bytes(f)),
            topic_mark(a, f->topic), f->count, f->armed, (uint64_t)f->base_ns,
            (uint64_t)f->every_ns, (uint64_t)f->due_ns, (uint64_t)f->until_ns,
            (uint64_t)f->jitter_ns, f->uid, f->state, f->tag_len, f->has_priority, f->priority,
            slot == PG_NIL ? 0 : slot_hot(a, slot)->ctl};
        struct pg_namespace_stats *row = &rows[topic_at(a, f->topic)->namespace_row];
        row->schedules++;
        row->digest += mark(SCHEDULE, f->revision, (uint64_t)f->nominal_ns, about, sizeof about);
    }
}

static void names_stats(const struct pg_arena *a, struct pg_namespace_stats *rows)
{
    for (uint32_t i = 0; i < a->namespace_rows; i++) {
        const struct pg_namespace *n = namespace_at(a, i);
        const uint64_t about[] = {n->owner_uid, n->durability, n->quota_timers, n->quota_bytes,
                                  n->quota_ops, n->park_beyond_ns, n->late_per_s, n->paused};
        rows[i].settings = mark(SETTINGS, 0, 0, about, sizeof about);
    }
    for (uint32_t i = 0; i < a->topic_rows; i++) {
        const struct pg_topic *t = topic_at(a, i);
        const uint64_t about[] = {t->incarnation, t->sequence};
        if (t->name_len == 0)
            continue;
        rows[t->namespace_row].topics++;
        rows[t->namespace_row].streams += mark(STREAM, topic_mark(a, i), 0, about, sizeof about);
    }
}

int pg_namespace_stats(const struct pg_arena *a, struct pg_namespace_stats *rows,
                       struct pg_fault *why)
{
    memset(why, 0, sizeof *why);
    memset(rows, 0, a->namespace_rows * sizeof *rows);
    names_stats(a, rows);
    watermarks_stats(a, rows);
    notices_stats(a, rows);
    bulk_loads_stats(a, rows);
    jobs_stats(a, rows);
    schedules_stats(a, rows);
    return slots_stats(a, rows, why);
}

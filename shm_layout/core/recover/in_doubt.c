/* in_doubt.c - find out what a kill interrupted: whether the effect of the last frame in the WAL
 * buffer happened, and whether the current record of each session was applied. */

#include "core/recover/in_doubt.h"
#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/bulk_loads.h"
#include "core/state/groups.h"
#include "core/state/jobs.h"
#include "core/state/names.h"
#include "core/state/cursors.h"
#include "core/state/operations.h"
#include "core/state/records.h"
#include "core/state/replay_buffer.h"
#include "core/state/session.h"
#include "core/state/timers.h"

/* True if the effect that a frame describes is visible in the arena. Each frame type has its own
 * function. The function first checks that everything the frame refers to exists. */
typedef bool (*visible_fn)(const struct pg_arena *a, const void *body);

static bool slot_is(const struct pg_arena *a, uint32_t slot, uint64_t ticket, unsigned state)
{
    return slot < a->slots.capacity && slot_hot(a, slot)->ctl == ctl_of(ticket, state);
}

static bool entry_is(const struct pg_arena *a, uint64_t position, uint64_t ticket)
{
    const struct pg_entry *e = replay_at(a, position);
    return e->commit == position + 1 && e->ticket >> 8 == ticket;
}

static bool namespace_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_namespace *j = body;
    if (j->row >= a->namespace_rows || namespace_at(a, j->row)->name_len == 0)
        return false;
    const struct pg_wal_namespace found = wal_namespace_of(j->row, namespace_at(a, j->row),
                                                           j->name_len);
    return memcmp(&found, j, sizeof found) == 0;
}

static bool topic_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_topic *j = body;
    return j->row < a->topic_rows && topic_at(a, j->row)->name_len != 0 &&
           topic_at(a, j->row)->incarnation == j->incarnation &&
           topic_at(a, j->row)->slack_ns == j->slack_ns &&
           topic_at(a, j->row)->late == j->late && topic_at(a, j->row)->paused == j->paused;
}

static bool arm_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_arm *j = body;
    return slot_is(a, j->slot, j->ticket, j->parked ? PG_S_PARKED : PG_S_ARMED);
}

static bool unpark_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_unpark *j = body;
    return slot_is(a, j->slot, j->ticket, PG_S_ARMED);
}

static bool watch_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_watch *j = body;
    return slot_is(a, j->slot, j->ticket, PG_S_ARMED);
}

/* For a wall timer, the wall-clock deadline decides, because the deadline on the arena's clock is
 * derived from the wall-clock deadline. */
static bool move_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_move *j = body;
    if (!slot_is(a, j->slot, j->ticket, PG_S_ARMED) &&
        !slot_is(a, j->slot, j->ticket, PG_S_PARKED))
        return false;
    if (j->wall_ns == NO_WALL)
        return slot_hot(a, j->slot)->deadline_ns == j->deadline_ns;
    return ((const struct pg_ext *)blob_at(&a->blobs, slot_cold(a, j->slot)->blob))->value ==
           j->wall_ns;
}

static bool end_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_end *j = body;
    return slot_is(a, j->slot, j->ticket, PG_S_FREE) ||
           slot_is(a, j->slot, j->ticket, PG_S_UNIQUE);
}

static bool freed_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_freed *j = body;
    return slot_is(a, j->slot, j->ticket, PG_S_FREE);
}

static bool fire_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_fire *j = body;
    return entry_is(a, j->position, j->ticket);
}

static bool sent_visible(const struct pg_arena *a, const void *body)
{
    return a->header->published >= ((const struct pg_wal_sent *)body)->upto;
}

static bool watermark_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_watermark *j = body;
    if (j->row >= a->watermark_rows || watermark_at(a, j->row)->key_len == 0)
        return false;
    const struct pg_watermark *l = watermark_at(a, j->row);
    return l->watermark == j->watermark && l->error == j->error &&
           (!(j->flags & PG_WM_FORGOTTEN) || l->touched_s == PG_NIL);
}

static bool gone_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_gone *j = body;
    return j->row < a->watermark_rows && watermark_at(a, j->row)->key_len == 0;
}

/* The effect of an OUTCOME frame is visible in one of three ways: as the entry of the operation's
 * notice, as a slot in state OUTCOME, or, if the operation has no owner, as a free slot. */
static bool outcome_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_outcome *j = body;
    return (j->position != 0 && entry_is(a, j->position - 1, j->ticket)) ||
           slot_is(a, j->slot, j->ticket, PG_S_OUTCOME) ||
           slot_is(a, j->slot, j->ticket, PG_S_FREE);
}

static bool session_visible(const struct pg_arena *a, const void *body)
{
    return session_find(a, ((const struct pg_wal_session *)body)->session) == NULL;
}

static bool opened_visible(const struct pg_arena *a, const void *body)
{
    return session_find(a, ((const struct pg_wal_opened *)body)->session) != NULL;
}

static bool published_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_entry *j = body;
    return entry_is(a, j->position, j->ticket >> 8);
}

/* Some frames have no effect in the arena. They count as applied. */
static bool always_visible(const struct pg_arena *a, const void *body)
{
    (void)a, (void)body;
    return true;
}

static bool bulk_load_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_bulk_load *j = body;
    const uint32_t bulk_load = bulk_load_find(a, j->bulk_load);
    if (bulk_load == PG_NIL || j->state == PG_BULK_LOAD_NONE)
        return bulk_load == PG_NIL && j->state == PG_BULK_LOAD_NONE;
    return bulk_load_at(a, bulk_load)->fencing_token == j->fencing_token &&
           bulk_load_at(a, bulk_load)->state == j->state;
}

static bool done_visible(const struct pg_arena *a, const void *body)
{
    return bulk_load_row_visible(a, &((const struct pg_wal_done *)body)->row);
}

/* For a deleted group, the row may be free or in use by another group. */
static bool group_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_consumer_group *j = body;
    if (!group_exists(a, j->row))
        return j->topics == 0;
    const struct pg_consumer_group *g = group_at(a, j->row);
    if (j->topics == 0)
        return g->incarnation != j->incarnation;
    return g->incarnation == j->incarnation &&
           memcmp(&g->settings, &j->settings, sizeof g->settings) == 0;
}

static bool job_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_job *j = body;
    if (j->row >= a->job_slots.capacity)
        return false;
    const struct pg_job *found = job_at(a, j->row);
    if (j->control == PG_JOB_FREE)
        return found->control == PG_JOB_FREE || found->ticket != j->ticket;
    return found->control == j->control && found->ticket == j->ticket &&
           found->due_ns == j->due_ns;
}

/* A version is stored once, so it shows the change that the frame describes. */
static bool schedule_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_schedule *j = body;
    return j->row < a->schedule_rows && schedule_at(a, j->row)->version == j->version;
}

static bool cursor_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_cursor *j = body;
    const struct name name = {(const char *)(j + 1), j->name_len};
    return cursor_agrees(a, j, name);
}

static const visible_fn visible[PG_WAL_TYPES] = {
    [PG_WAL_NAMESPACE] = namespace_visible, [PG_WAL_TOPIC] = topic_visible,
    [PG_WAL_ARM] = arm_visible, [PG_WAL_MOVE] = move_visible, [PG_WAL_END] = end_visible,
    [PG_WAL_FIRE] = fire_visible, [PG_WAL_SENT] = sent_visible, [PG_WAL_WATCH] = watch_visible,
    [PG_WAL_WATERMARK] = watermark_visible, [PG_WAL_GONE] = gone_visible,
    [PG_WAL_OUTCOME] = outcome_visible,
    [PG_WAL_SESSION] = session_visible, [PG_WAL_ENTRY] = published_visible,
    [PG_WAL_OPENED] = opened_visible, [PG_WAL_REPLIED] = always_visible,
    [PG_WAL_BULK_LOAD] = bulk_load_visible, [PG_WAL_DONE] = done_visible,
    [PG_WAL_UNPARK] = unpark_visible, [PG_WAL_METRICS] = always_visible,
    [PG_WAL_CONSUMER_GROUP] = group_visible, [PG_WAL_JOB] = job_visible,
    [PG_WAL_SCHEDULE] = schedule_visible, [PG_WAL_CURSOR] = cursor_visible,
    [PG_WAL_FREED] = freed_visible,
};

/* Store all settings of the frame again. They were stored one by one, so a kill may have left some
 * of them unchanged. */
static void settings_finish(struct pg_arena *a, const struct pg_wal_namespace *j)
{
    if (j->row >= a->namespace_rows || namespace_at(a, j->row)->name_len == 0)
        return;
    namespace_settings_store(namespace_at(a, j->row), j);
}

static void topic_settings_finish(struct pg_arena *a, const struct pg_wal_topic *j)
{
    if (j->row < a->topic_rows && topic_at(a, j->row)->name_len != 0 &&
        topic_at(a, j->row)->incarnation == j->incarnation)
        topic_settings_store(topic_at(a, j->row), j);
}

bool in_doubt_settle(struct pg_arena *a, struct pg_fault *why)
{
    const struct pg_frame_head *f;
    if (!has_wal(a))
        return true;
    if (!wal_buffer_in_doubt(a, &f, why))
        return false;
    if (f == NULL)
        return true;
    if (f->type == PG_WAL_NAMESPACE)
        settings_finish(a, (const void *)(f + 1));
    if (f->type == PG_WAL_TOPIC)
        topic_settings_finish(a, (const void *)(f + 1));
    wal_buffer_decide(a, f, visible[f->type](a, f + 1));
    return true;
}

/* ---- interrupted records ------------------------------------------------------------------ */

/* True if the effect that a stored answer reports is visible. An answer is stored before its
 * effect. If an answer reports no effect, return false: applying the record again gives the same
 * answer. */
static bool answer_holds(const struct pg_arena *a, const struct pg_result *r)
{
    const uint32_t slot = slot_of_ticket(a, r->ticket >> 8);
    const struct pg_hot *h = slot_hot(a, slot != PG_NIL ? slot : 0);
    const bool armed = slot != PG_NIL && ctl_live(h->ctl);
    switch (r->ticket & 0xff) {
    case PG_ST_ADDED:
    case PG_ST_REPLACED:
    case PG_ST_PARKED: return slot != PG_NIL;
    case PG_ST_UNPARKED: return armed && !is_parked(a, slot);
    case PG_ST_EXTENDED: return armed && h->deadline_ns == r->deadline_ns;
    case PG_ST_CANCELLED:
    case PG_ST_DONE: return !armed;
    default: return false;
    }
}

/* True if the current row of a bulk load was answered without an effect on timers. The row's answer
 * is stored before its bit is set, so a row whose bit is set has an answer. */
static bool row_answered(const struct pg_arena *a, const struct pg_session *s,
                         const struct pg_result *r)
{
    const unsigned status = r->ticket & 0xff;
    return (status == PG_ST_KEPT || status == PG_ST_UNKNOWN) && bulk_load_has_row(a, s);
}

/* True if the answer to a job had its effect: the job is not in the state in which it was. */
static bool job_answered(const struct pg_arena *a, const struct pg_session *s,
                         const struct pg_result *r)
{
    const uint64_t row = s->intent[3];
    return row >= a->job_slots.capacity || job_at(a, row)->ticket >> 8 != r->ticket >> 8 ||
           job_at(a, row)->control != s->intent[1];
}

/* Take a CANCEL of jobs back, unless it has ended the first job. */
static void cancel_recover(const struct pg_arena *a, struct pg_session *s, struct pg_result *r)
{
    if (r->ticket >> 8 != 0 && job_answered(a, s, r))
        return;
    *r = (struct pg_result){0, 0};
    STORE_RELEASE(&s->intent[0], 0ull);   /* later: without it, the answer would count */
}

/* Settle the record that a kill interrupted. A record on a watch key, or a CANCEL of jobs, continues
 * from its stored state when the client sends the batch again. Any other record was applied completely or not at
 * all. If it was not applied, its answer is cleared, so that a later recovery does not count it as
 * applied. */
static void record_recover(struct pg_arena *a, struct pg_session *s)
{
    struct pg_result *r = &reply_results(a, session_reply(a, s, s->current))[s->applied];
    if (on_watch_key(s)) {
        trigger_recover(a, r);
    } else if (on_cancel(s)) {
        cancel_recover(a, s, r);
    } else if (on_job(s) && r->ticket >> 8 != 0) {
        if (job_answered(a, s, r))
            STORE_RELEASE(&s->applied, s->applied + 1);
        else
            *r = (struct pg_result){0, 0};
    } else if ((r->ticket >> 8 != 0 && answer_holds(a, r)) || row_answered(a, s, r)) {
        if (bulk_load_counts(r->ticket & 0xff))
            bulk_load_recover(a, s);
        STORE_RELEASE(&s->applied, s->applied + 1);
    } else if (!name_refused(r)) {
        *r = (struct pg_result){0, 0};
    }
}

void sessions_recover(struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->secret->sessions; i++)
        if (record_under_way(session_at(a, i)))
            record_recover(a, session_at(a, i));
}

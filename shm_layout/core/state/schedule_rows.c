/* schedule_rows.c - which schedule an occurrence or a job belongs to, and the lists of schedules that
 * need something.
 *
 * The lists and the counts of open jobs are derived: a rebuild puts each schedule into the lists that
 * it belongs to, and counts each job. */

#include "core/state/schedule_rows.h"
#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/hash.h"
#include "core/base/tickets.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/fired_spans.h"
#include "core/state/items.h"
#include "core/state/records.h"
#include "core/state/rows.h"

const struct pg_ext *occurrence_item(const struct pg_arena *a, uint32_t slot)
{
    if ((slot_hot(a, slot)->flags & PG_F_SCHEDULE) == 0)
        return NULL;
    return slot_item(a, slot, PG_EXT_SCHEDULE);
}

uint32_t schedule_of_slot(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_ext *item = occurrence_item(a, slot);
    const uint32_t row = item == NULL ? PG_NIL : item->extra;
    return row < a->schedule_rows && schedule_at(a, row)->slot == slot ? row : PG_NIL;
}

/* ---- keys ---------------------------------------------------------------------------------- */

static uint32_t row_hash(const struct pg_arena *a, uint32_t namespace_row, struct name key)
{
    return key_hash_of(keyed_hash(a->secret->secret, key_scope(namespace_row, PG_KEY_STR),
                                  key.bytes, key.len));
}

uint32_t schedule_hash(const struct pg_arena *a, const struct pg_schedule_fields *f)
{
    return row_hash(a, topic_at(a, f->topic)->namespace_row,
                    (struct name){(const char *)blob_at(&a->blobs, f->blob), f->key_len});
}

static uint32_t *bucket_of(const struct pg_arena *a, uint32_t hash)
{
    return &schedule_at(a, hash % a->schedule_rows)->first_hashed;
}

void schedule_hashed(struct pg_arena *a, uint32_t row)
{
    struct pg_schedule *s = schedule_at(a, row);
    s->hash = schedule_hash(a, schedule_fields(a, row));
    uint32_t *first = bucket_of(a, s->hash);
    s->next_hashed = *first;
    *first = row;
}

void schedule_unhashed(struct pg_arena *a, uint32_t row)
{
    uint32_t *at = bucket_of(a, schedule_at(a, row)->hash);
    while (*at != row)
        at = &schedule_at(a, *at)->next_hashed;
    *at = schedule_at(a, row)->next_hashed;
}

static bool row_is(const struct pg_arena *a, uint32_t row, uint32_t namespace_row, uint32_t hash,
                   struct name key)
{
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    return schedule_at(a, row)->hash == hash && f->key_len == key.len &&
           topic_at(a, f->topic)->namespace_row == namespace_row &&
           memcmp(blob_at(&a->blobs, f->blob), key.bytes, key.len) == 0;
}

uint32_t schedule_find(const struct pg_arena *a, uint32_t namespace_row, struct name key)
{
    if (namespace_row == PG_NIL || a->schedule_rows == 0)
        return PG_NIL;
    const uint32_t hash = row_hash(a, namespace_row, key);
    uint32_t row = *bucket_of(a, hash);
    while (row != PG_NIL && !row_is(a, row, namespace_row, hash, key))
        row = schedule_at(a, row)->next_hashed;
    return row;
}

/* ---- open jobs ----------------------------------------------------------------------------- */

uint32_t occurrence_prefix(const uint8_t *key, uint32_t len)
{
    while (len != 0 && key[len - 1] != '@')
        len--;
    return len == 0 ? 0 : len - 1;
}

uint32_t schedule_of_job(const struct pg_arena *a, const struct pg_job *j)
{
    if (LIKELY((j->meta >> 4 & PG_E_SCHEDULE) == 0))
        return PG_NIL;
    const uint8_t *key = blob_at(&a->blobs, j->blob);
    const uint32_t namespace_row = group_at(a, j->group)->namespace_row;
    const struct name prefix = {(const char *)key, occurrence_prefix(key, j->key_len)};
    const uint32_t row = schedule_find(a, namespace_row, prefix);
    const bool older = row != PG_NIL && ticket_older(j->ticket >> 8,
                                                     schedule_fields(a, row)->first_ticket);
    return older ? PG_NIL : row;
}

void schedule_job_opens(struct pg_arena *a, const struct pg_job *j)
{
    const uint32_t row = schedule_of_job(a, j);
    if (UNLIKELY(row != PG_NIL))
        schedule_at(a, row)->open++;
}

void schedule_job_ends(struct pg_arena *a, const struct pg_job *j)
{
    const uint32_t row = schedule_of_job(a, j);
    if (UNLIKELY(row != PG_NIL) && --schedule_at(a, row)->open == 0)
        schedule_queue(a, row);
}

bool schedule_holds(const struct pg_arena *a, uint32_t row)
{
    const unsigned overlap = schedule_fields(a, row)->overlap;
    return (overlap == PG_OVERLAP_QUEUE || overlap == PG_OVERLAP_DELAY) &&
           schedule_at(a, row)->open != 0;
}

bool schedule_skips(const struct pg_arena *a, uint32_t slot)
{
    const uint32_t row = schedule_of_slot(a, slot);
    return row != PG_NIL && schedule_fields(a, row)->overlap == PG_OVERLAP_SKIP &&
           schedule_at(a, row)->open != 0;
}

/* ---- changes ------------------------------------------------------------------------------- */

void schedule_store(struct pg_arena *a, uint32_t row, const struct pg_schedule_fields *f, bool put)
{
    struct pg_schedule *s = schedule_at(a, row);
    const uint64_t version = s->version + 1;
    s->fields[version % 2] = *f;
    if (has_wal(a))
        wal_append_schedule(a, row, version, f, put);
    STORE_RELEASE(&s->version, version);
}

/* Store the beginning of the delay of a row. */
static void delay_begin(struct pg_arena *a, uint32_t row, int64_t due_ns)
{
    struct pg_schedule_fields f = *schedule_fields(a, row);
    if (f.overlap != PG_OVERLAP_DELAY || f.state != PG_SCHEDULE_ACTIVE || f.due_ns == due_ns)
        return;
    f.due_ns = due_ns;
    schedule_store(a, row, &f, false);
}

void schedule_slot_ending(struct pg_arena *a, uint32_t slot)
{
    const uint32_t row = schedule_of_slot(a, slot);
    if (row != PG_NIL)
        delay_begin(a, row, a->call.moment_ns);
}

void schedule_job_ending(struct pg_arena *a, const struct pg_job *j)
{
    const uint32_t row = schedule_of_job(a, j);
    if (UNLIKELY(row != PG_NIL) && schedule_at(a, row)->open == 1)
        delay_begin(a, row, a->call.moment_ns);
}

bool schedules_group_ending(struct pg_arena *a)
{
    uint32_t row = 0;
    for (; row < a->schedule_rows && !wal_buffer_full(a); row++)
        if (schedule_used(a, row) && schedule_at(a, row)->open != 0)
            delay_begin(a, row, PG_NOMINAL_UNKNOWN);
    return row == a->schedule_rows;
}

void fields_unarm(const struct pg_arena *a, uint32_t row, struct pg_schedule_fields *f)
{
    if (schedule_at(a, row)->slot != PG_NIL) {
        spans_remove(f, f->nominal_ns, f->base_ns);
        f->armed--;
        f->nominal_ns = f->base_ns;
        if (__builtin_sub_overflow(f->due_ns, f->every_ns, &f->due_ns))
            f->due_ns = PG_NOMINAL_UNKNOWN + 1;
    }
    f->since_ticket = a->header->next_ticket;
}

void schedule_skipped(struct pg_arena *a, uint32_t row)
{
    struct pg_schedule_fields f = *schedule_fields(a, row);
    spans_remove(&f, f.nominal_ns, f.base_ns);
    schedule_store(a, row, &f, false);
}

void schedule_take_back(struct pg_arena *a, uint32_t slot)
{
    const uint32_t row = schedule_of_slot(a, slot);
    if (row == PG_NIL)
        return;
    struct pg_schedule_fields f = *schedule_fields(a, row);
    f.then_ns = f.after_ns;
    f.after_ns = f.nominal_ns;
    fields_unarm(a, row, &f);
    schedule_store(a, row, &f, false);
}

/* ---- lists --------------------------------------------------------------------------------- */

void schedule_due(struct pg_arena *a, uint32_t row)
{
    struct pg_schedule *s = schedule_at(a, row);
    if (s->is_due)
        return;
    s->is_due = 1;
    a->state.schedules_stuck = false;
    s->next_due = PG_NIL;
    if (a->state.schedules_due == PG_NIL)
        a->state.schedules_due = row;
    else
        schedule_at(a, a->state.schedules_due_last)->next_due = row;
    a->state.schedules_due_last = row;
}

void schedule_due_take(struct pg_arena *a, uint32_t before, uint32_t row)
{
    struct pg_schedule *s = schedule_at(a, row);
    if (before == PG_NIL)
        a->state.schedules_due = s->next_due;
    else
        schedule_at(a, before)->next_due = s->next_due;
    if (a->state.schedules_due_last == row)
        a->state.schedules_due_last = before;
    s->is_due = 0;
}

void schedule_ask(struct pg_arena *a, uint32_t row)
{
    struct pg_schedule *s = schedule_at(a, row);
    if (s->is_asked)
        return;
    s->is_asked = 1;
    s->next_asked = PG_NIL;
    if (a->state.schedules_asked == PG_NIL)
        a->state.schedules_asked = row;
    else
        schedule_at(a, a->state.schedules_asked_last)->next_asked = row;
    a->state.schedules_asked_last = row;
}

void schedule_ask_take(struct pg_arena *a)
{
    struct pg_schedule *s = schedule_at(a, a->state.schedules_asked);
    a->state.schedules_asked = s->next_asked;
    s->is_asked = 0;
}

bool schedule_lacks_times(const struct pg_schedule_fields *f)
{
    return f->every_ns == 0 && (!nominal_is_known(f->after_ns) || !nominal_is_known(f->then_ns));
}

void schedule_queue(struct pg_arena *a, uint32_t row)
{
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    if (f->state != PG_SCHEDULE_ACTIVE)
        return;
    if (schedule_at(a, row)->slot == PG_NIL)
        schedule_due(a, row);
    if (schedule_lacks_times(f))
        schedule_ask(a, row);
}

void schedule_unarmed(struct pg_arena *a, uint32_t slot)
{
    const uint32_t row = schedule_of_slot(a, slot);
    if (row == PG_NIL)
        return;
    schedule_at(a, row)->slot = PG_NIL;
    a->metrics->schedules_armed--;
    schedule_queue(a, row);
}

bool schedule_stale(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_ext *item = occurrence_item(a, slot);
    return item != NULL && item->extra != PG_NIL && schedule_of_slot(a, slot) == PG_NIL;
}

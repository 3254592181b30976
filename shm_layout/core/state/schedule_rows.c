/* schedule_rows.c - which schedule an occurrence belongs to, and the lists of schedules that need
 * something.
 *
 * The lists are derived: a rebuild puts each schedule into those that it belongs to. */

#include "core/state/schedule_rows.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/items.h"
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

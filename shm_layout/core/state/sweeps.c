/* sweeps.c - sweeps, which cancel or move all timers of a selection.
 *
 * The loop does a bounded part of a sweep in each iteration. The row names the next timer before the
 * timer changes, and one store counts the timer and leaves its slot. After a kill between the change
 * and this store, the rebuild finds the change and counts the timer, so a shift is not repeated. */

#include "core/state/sweeps.h"
#include "core/base/check.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/wal/wal_buffer.h"
#include "core/state/items.h"
#include "core/state/rows.h"
#include "core/state/timers.h"

#define CHANGES_PER_ITERATION 1024 /* about 0.5 ms */
/* A sweep leaves half of the WAL buffer to messages and due timers, in percent. */
#define WAL_SHARE 50
#define WAIT_NS 1000000           /* time between two looks at the WAL buffer */

uint32_t sweep_find(const struct pg_arena *a, const uint8_t id[16])
{
    for (uint32_t row = 0; row < PG_SWEEPS; row++)
        if (sweep_at(a, row)->state != PG_SW_NONE &&
            memcmp(sweep_at(a, row)->id, id, sizeof sweep_at(a, row)->id) == 0)
            return row;
    return PG_NIL;
}

/* Return the row whose sweep began first among those that are running, or among the others. A row
 * without a sweep has begun first of all. PG_NIL = there is none. */
static uint32_t oldest(const struct pg_arena *a, bool running)
{
    uint32_t best = PG_NIL;
    for (uint32_t row = 0; row < PG_SWEEPS; row++) {
        const struct pg_sweep *w = sweep_at(a, row);
        if ((w->state == PG_SW_RUNNING) != running)
            continue;
        if (w->state == PG_SW_NONE)
            return row;
        if (best == PG_NIL || w->begun_ns < sweep_at(a, best)->begun_ns)
            best = row;
    }
    return best;
}

static void state_set(struct pg_arena *a, struct pg_sweep *w, enum pg_sweep_state state)
{
    STORE_RELEASE(&w->state, (uint8_t)state);
    a->state.sweeping = oldest(a, true) != PG_NIL;
    a->state.sweep_waits = false;
}

uint32_t sweep_begin(struct pg_arena *a, const struct pg_sweep_ask *ask, const struct selection *s,
                     uint32_t uid)
{
    const uint32_t row = oldest(a, false);
    if (row == PG_NIL)
        return PG_NIL;
    struct pg_sweep *w = sweep_at(a, row);
    STORE_RELEASE(&w->state, (uint8_t)PG_SW_NONE);
    atomic_thread_fence(memory_order_release);   /* the fence precedes the other fields */
    *w = (struct pg_sweep){.time_ns = ask->time_ns, .begun_ns = a->state.now_ns, .uid = uid,
                           .namespace_row = s->namespace_row, .topic = s->topic,
                           .change = ask->change, .time_kind = ask->time_kind,
                           .select = s->about};
    memcpy(w->id, ask->id, sizeof w->id);
    memcpy(w->text, s->text, select_text_len(&s->about));
    state_set(a, w, PG_SW_RUNNING);
    a->metrics->sweeps++;
    return row;
}

void sweep_stop(struct pg_arena *a, uint32_t row)
{
    if (sweep_at(a, row)->state == PG_SW_RUNNING)
        state_set(a, sweep_at(a, row), PG_SW_STOPPED);
}

/* ---- changing one timer -------------------------------------------------------------------- */

/* Return the value that the change stores: the deadline, or for a wall timer its wall deadline. */
static int64_t value_after(const struct pg_arena *a, const struct pg_sweep *w, uint32_t slot)
{
    const bool wall = (slot_hot(a, slot)->flags & PG_F_WALL) != 0;
    const int64_t offset_ns = a->header->wall_offset_ns;
    const int64_t now = wall ? slot_item(a, slot, PG_EXT_WALL)->value
                             : slot_hot(a, slot)->deadline_ns;
    int64_t value = w->change == PG_SC_SHIFT ? add_clamped(now, w->time_ns) : w->time_ns;
    if (w->change == PG_SC_MOVE && wall != (w->time_kind == PG_T_WALL))
        value = add_clamped(value, wall ? offset_ns : -offset_ns);
    return wall || value > 0 ? value : 0;
}

static void cancel(struct pg_arena *a, uint32_t slot)
{
    struct probe at;
    if (index_find_id(&a->index, slot_hot(a, slot)->hash, slot, &at))
        cancel_timer(a, slot, &at);
}

static void move(struct pg_arena *a, uint32_t slot, int64_t value)
{
    const bool wall = (slot_hot(a, slot)->flags & PG_F_WALL) != 0;
    timer_move(a, slot, wall ? wall_deadline(a, value) : value, value);
    a->metrics->reschedules++;
}

static void advance(struct pg_sweep *w, uint32_t next_slot, uint32_t changed)
{
    STORE_RELEASE(&w->progress, (uint64_t)next_slot << 32 | (sweep_done(w) + changed));
}

static void change(struct pg_arena *a, struct pg_sweep *w, uint32_t slot)
{
    w->new_ns = w->change == PG_SC_CANCEL ? 0 : value_after(a, w, slot);
    w->slot = slot;
    STORE_RELEASE(&w->ticket, ctl_ticket(slot_hot(a, slot)->ctl));
    atomic_thread_fence(memory_order_release);   /* the fence precedes the change */
    if (w->change == PG_SC_CANCEL)
        cancel(a, slot);
    else
        move(a, slot, w->new_ns);
    advance(w, slot + 1, 1);
}

/* ---- in the loop ------------------------------------------------------------------------------ */

/* Change some timers. Return their number, or PG_NIL if the WAL buffer has no space for them. */
static uint32_t change_some(struct pg_arena *a, struct pg_sweep *w, const struct selection *s,
                            uint32_t *work)
{
    uint32_t slots[PG_PREFETCH_MAX], next = sweep_slot(w);
    if (has_wal(a) && wal_buffer_over(a, WAL_SHARE))
        return PG_NIL;
    const uint32_t count = select_some(a, s, &next, work, slots);
    prefetch_changes(a, slots, count);
    for (uint32_t i = 0; i < count; i++)
        change(a, w, slots[i]);
    advance(w, next, 0);
    return count;
}

static void part(struct pg_arena *a, struct pg_sweep *w)
{
    const struct selection s = {w->select, w->text, w->namespace_row, w->topic};
    uint32_t work = PG_SELECT_SLOTS, changed = 0;
    while (work != 0 && changed < CHANGES_PER_ITERATION && sweep_slot(w) < a->slots.capacity) {
        const uint32_t count = change_some(a, w, &s, &work);
        a->state.sweep_waits = count == PG_NIL;
        if (a->state.sweep_waits)
            return;
        changed += count;
    }
    if (sweep_slot(w) >= a->slots.capacity)
        state_set(a, w, PG_SW_DONE);
}

int64_t sweeps_next_ns(const struct pg_arena *a)
{
    const bool waits = a->state.sweep_waits && a->header->clock_kind == PG_CLOCK_BOOT;
    return !a->state.sweeping ? INT64_MAX : a->state.now_ns + (waits ? WAIT_NS : 0);
}

bool sweeps_iteration(struct pg_arena *a)
{
    const uint32_t row = oldest(a, true), uid = a->call.uid;
    if (row != PG_NIL && wal_buffer_refusal(a) == PG_ST_WAL) {
        state_set(a, sweep_at(a, row), PG_SW_CUT);
    } else if (row != PG_NIL) {
        a->call.uid = sweep_at(a, row)->uid;
        part(a, sweep_at(a, row));
        a->call.uid = uid;
    }
    return a->state.sweeping && !a->state.sweep_waits;
}

/* ---- recovery ------------------------------------------------------------------------------- */

/* Return whether the change of the row's timer took effect. */
static bool changed(const struct pg_arena *a, const struct pg_sweep *w)
{
    const struct pg_hot *h = slot_hot(a, w->slot);
    if (!ctl_live(h->ctl) || ctl_ticket(h->ctl) != w->ticket)
        return true;
    if (w->change == PG_SC_CANCEL || !slot_blob_inside(a, slot_cold(a, w->slot)))
        return false;
    const struct pg_ext *wall = slot_item(a, w->slot, PG_EXT_WALL);
    return (wall != NULL ? wall->value : h->deadline_ns) == w->new_ns;
}

/* Count the timer of the row if it was changed but not counted. `a`: the arena of its slot. */
static void settle(const struct pg_arena *a, struct pg_sweep *w)
{
    if (w->state == PG_SW_RUNNING && w->ticket != 0 && w->slot >= sweep_slot(w) && changed(a, w))
        advance(w, w->slot + 1, 1);
}

static bool row_sound(const struct pg_arena *a, const struct pg_sweep *w)
{
    return w->state == PG_SW_NONE ||
           (w->state < PG_SWEEP_STATES && w->change < PG_SWEEP_CHANGES &&
            w->time_kind < PG_T_KINDS && w->select.fields < PG_SEL_FIELDS &&
            select_text_len(&w->select) <= sizeof w->text && w->select.tickets != 0 &&
            (w->state != PG_SW_RUNNING ||
             (sweep_slot(w) <= a->slots.capacity && w->slot < a->slots.capacity &&
              w->namespace_row < a->namespace_rows &&
              (w->topic < a->topic_rows || w->topic == PG_NIL))));
}

bool sweeps_rebuild(struct pg_arena *a, struct pg_fault *why)
{
    for (uint32_t row = 0; row < PG_SWEEPS; row++) {
        if (!row_sound(a, sweep_at(a, row)))
            return fault_set(why, "sweeps", "a sweep's state or selection is invalid", row, 0,
                             sweep_at(a, row)->state);
        settle(a, sweep_at(a, row));
    }
    a->state.sweeping = oldest(a, true) != PG_NIL;
    return true;
}

bool sweeps_migrate(struct pg_arena *to, const struct pg_arena *from)
{
    for (uint32_t row = 0; row < PG_SWEEPS; row++) {
        struct pg_sweep w = *sweep_at(from, row);
        if (!row_sound(from, &w))
            continue;
        settle(from, &w);
        w.state = w.state == PG_SW_RUNNING ? PG_SW_CUT : w.state;
        *sweep_at(to, row) = w;
    }
    return true;
}

bool sweeps_check(const struct pg_arena *a, struct pg_fault *fault)
{
    for (uint32_t row = 0; row < PG_SWEEPS; row++)
        if (!row_sound(a, sweep_at(a, row)))
            return fault_set(fault, "sweeps", "a sweep's state or selection is invalid", row, 0,
                             sweep_at(a, row)->state);
    return true;
}

/* rebuild.c - build all derived state from the authoritative state.
 *
 * A rebuild waits for memory most of the time. Therefore two independent passes visit the slots,
 * and two threads may run them at the same time. The first pass rebuilds keys (used blobs, the key
 * index, counts), the second pass places (free slots, the wheel, watchers).
 *
 * A kill leaves at most two slots half done, and rebuild_end handles both. The first is the slot
 * whose notice is committed; it counts as ended. The second is the slot with the newest ticket,
 * whose timer may have been about to replace another slot with the same key. All other slots have
 * distinct keys. */

#include <pthread.h>

#include "core/recover/rebuild.h"
#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/base/wheel.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/bulk_loads.h"
#include "core/state/catch_up.h"
#include "core/state/delivery.h"
#include "core/state/groups.h"
#include "core/state/items.h"
#include "core/state/jobs.h"
#include "core/state/cursors.h"
#include "core/state/names.h"
#include "core/state/operations.h"
#include "core/state/prefetch.h"
#include "core/state/quotas.h"
#include "core/state/replay_buffer.h"
#include "core/state/schedules.h"
#include "core/state/session.h"
#include "core/state/sweeps.h"
#include "core/state/timers.h"
#include "core/state/watches.h"
#include "core/state/watermarks.h"
#include "core/recover/in_doubt.h"

/* ---- validation of slots ----------------------------------------------------------------- */

/* True if the extension at the blob's start is large enough for the struct that the flags
 * declare. */
static bool ext_sound(const struct pg_hot *h, const struct pg_cold *c)
{
    const uint64_t least = h->flags & PG_F_OPERATION ? sizeof(struct pg_operation)
                           : h->flags & PG_F_WALL    ? sizeof(struct pg_ext)
                                                     : 0;
    return c->ext_len >= least && c->ext_len % PG_GRANULE == 0;
}

/* True if the rows that a slot refers to are in use. An outcome does not keep its topic and account
 * in use, so these rows may have been reused. */
static bool state_sound(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c)
{
    if (ctl_state(h->ctl) == PG_S_OUTCOME)
        return (h->flags & PG_F_OPERATION) != 0;
    return ctl_counted(h->ctl) && topic_at(a, h->topic)->name_len != 0 &&
           c->account <= a->account_rows &&
           (ctl_state(h->ctl) == PG_S_ARMED || !(h->flags & PG_F_OPERATION));
}

bool slot_sound(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c)
{
    return h->topic < a->topic_rows && state_sound(a, h, c) && ext_sound(h, c) && c->key_len != 0 &&
           c->payload_len <= PG_PAYLOAD_MAX;
}

/* True if the blob and the rows that the slot refers to may be read. If not, rebuild_keys reports a
 * fault. */
static bool slot_readable(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = slot_cold(a, slot);
    return slot_sound(a, slot_hot(a, slot), c) && slot_blob_inside(a, c);
}

/* True if the slot's notice is committed. If the slot is unsound, return false; rebuild_keys
 * reports the fault. */
static inline bool is_fired(const struct pg_arena *a, uint32_t slot)
{
    const uint64_t ctl = slot_hot(a, slot)->ctl;
    return UNLIKELY(ctl == a->state.rebuild.fired) && ctl != 0 && slot_readable(a, slot);
}

/* Return whether a slot that has fired keeps its key unique. An operation never does. */
static bool fired_keeps_key(const struct pg_arena *a, uint32_t slot)
{
    return UNLIKELY(unique_until_ns(a, slot) >
                    replay_at(a, a->header->replay_tail - 1)->fired_ns) &&
           unique_sound(a, slot);
}

/* Return whether a slot keeps its key unique and may be read. */
static bool unique_readable(const struct pg_arena *a, uint32_t slot)
{
    return UNLIKELY(ctl_unique(slot_hot(a, slot)->ctl)) && slot_readable(a, slot) &&
           unique_sound(a, slot);
}

/* ---- keys -------------------------------------------------------------------------------- */

/* Mark the second blob of an operation. The operation owns this blob until its notice is
 * written. */
static bool notice_mark(struct pg_arena *a, uint32_t slot)
{
    if (!is_operation(a, slot) || operation_granules(a, slot) == 0)
        return true;
    return blobs_rebuild_mark(&a->blobs, operation_at(a, slot)->notice_blob,
                              (uint32_t)operation_granules(a, slot));
}

/* Mark the blobs that a slot owns. If the slot has fired, the replay buffer entry owns the blob of
 * a timer or the notice blob of an operation, so this blob is not marked here. */
static bool blobs_mark(struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = slot_cold(a, slot);
    const bool fired = is_fired(a, slot);
    if (ctl_unique(slot_hot(a, slot)->ctl) || (fired && fired_keeps_key(a, slot)))
        return blobs_rebuild_mark(&a->blobs, c->blob, unique_granules(a, slot));
    if (fired && !is_operation(a, slot))
        return true;
    return blobs_rebuild_mark(&a->blobs, c->blob, slot_granules(c)) &&
           (fired || notice_mark(a, slot));
}

static bool newest_note(struct pg_arena *a, uint32_t slot, struct pg_fault *why)
{
    if (a->state.rebuild.newest != PG_NIL)
        return fault_set(why, "slots", "two slots hold the same ticket", slot,
                         a->state.rebuild.newest, slot);
    a->state.rebuild.newest = slot;
    return true;
}

/* A kill may have interrupted the call that made the key unique; rebuild_end completes it, because
 * rebuild_places reads the slot at the same time. */
static void unique_rebuild(struct pg_arena *a, uint32_t slot)
{
    if (!unique_settled(a, slot))
        a->state.rebuild.unsettled_key = slot;
    unique_link(a, slot);
}

static bool key_rebuild(struct pg_arena *a, uint32_t slot, struct pg_fault *why)
{
    const struct pg_hot *h = slot_hot(a, slot);
    struct pg_cold *c = slot_cold(a, slot);
    if (ctl_state(h->ctl) == PG_S_FREE)
        return true;
    if (UNLIKELY(is_parked(a, slot)))
        c->payload_len = 0;       /* a kill interrupted the UNPARK of this slot */
    if (!slot_sound(a, h, c))
        return fault_set(why, "slots",
                         "an armed slot's topic, state, key or payload is invalid",
                         slot, 0, h->topic);
    if (UNLIKELY(ctl_unique(h->ctl)) && !unique_readable(a, slot))
        return fault_set(why, "slots", "a unique key is malformed", slot, 0, c->ext_len);
    if (!blobs_mark(a, slot))
        return fault_set(why, "blobs", "a slot's blob overlaps another or lies outside the pool",
                         slot, 0, c->blob);
    if (UNLIKELY(ctl_unique(h->ctl)))
        unique_rebuild(a, slot);
    if (!ctl_live(h->ctl) || is_fired(a, slot))
        return true;
    if (UNLIKELY((h->flags & PG_F_EXT) != 0) && !slot_items_sound(a, slot))
        return fault_set(why, "slots", "a timer's extension items are malformed", slot, 0,
                         c->ext_len);
    if (UNLIKELY(ctl_ticket(h->ctl) + 1 == a->header->next_ticket))
        return newest_note(a, slot, why);
    timers_link_own(a, slot);
    return true;
}

/* Prefetch distances, in slots. Software prefetching is needed because hardware prefetchers stop at
 * the end of a page. */
enum { NEAR = 24, FAR = 64 };

/* Prefetch the slot that is FAR slots ahead, and the memory to which the slot that is NEAR slots
 * ahead refers. */
static inline void key_fetch(const struct pg_arena *a, uint32_t slot)
{
    if (UNLIKELY(slot + FAR >= a->slots.capacity))
        return;
    fetch(slot_hot(a, slot + FAR));
    fetch(slot_cold(a, slot + FAR));
    index_prefetch(&a->index, slot_hot(a, slot + NEAR)->hash);
    blobs_prefetch_mark(&a->blobs, slot_cold(a, slot + NEAR)->blob);
    operation_prefetch(a, slot + NEAR);
}

int rebuild_keys(struct pg_arena *a, struct pg_fault *why)
{
    memset(why, 0, sizeof *why);
    index_init(&a->index);
    if (!jobs_rebuild(a, why) || !replay_rebuild(a, why))
        return 0;
    for (uint32_t slot = 0; slot < a->slots.capacity; slot++) {
        key_fetch(a, slot);
        if (!key_rebuild(a, slot, why))
            return 0;
    }
    return 1;
}

/* ---- places ------------------------------------------------------------------------------ */

/* True if the deadline may be read. For a slot with PG_F_WALL, the deadline is in the blob. */
static bool has_deadline(const struct pg_arena *a, uint32_t slot)
{
    return LIKELY(!(slot_hot(a, slot)->flags & PG_F_WALL)) || slot_readable(a, slot);
}

static int64_t earlier(int64_t a_ns, int64_t b_ns) { return a_ns < b_ns ? a_ns : b_ns; }

/* Find the free slots, the first outcome and the slot that has fired. Return the earliest deadline.
 * The scan runs downwards, so that the lowest free slot is taken first. */
static int64_t slots_scan(struct pg_arena *a)
{
    int64_t earliest_ns = INT64_MAX;
    uint32_t outcome = PG_NIL;
    slots_free_none(&a->slots);
    for (uint32_t slot = a->slots.capacity; slot-- > 0;) {
        fetch(slot_hot(a, slot < FAR ? 0 : slot - FAR));
        const unsigned state = ctl_state(slot_hot(a, slot)->ctl);
        if (state == PG_S_FREE)
            slots_give(&a->slots, slot);
        else if (state == PG_S_OUTCOME)
            outcome = slot;
        else if (is_fired(a, slot))
            a->state.rebuild.fired_slot = slot;
        else if (unique_readable(a, slot))
            earliest_ns = earlier(earliest_ns, unique_until_ns(a, slot));
        else if (state == PG_S_ARMED && has_deadline(a, slot))
            earliest_ns = earlier(earliest_ns, timers_deadline_ns(a, slot));
    }
    a->state.rebuild.outcome = outcome;
    return earliest_ns;
}

/* Set the wheel's clock before the earliest deadline. Timers that became due while no daemon was
 * running are then in the buckets of their own ticks and fire in order. */
static void wheel_rebuild(struct pg_arena *a, int64_t earliest_ns)
{
    const struct wheel_shape shape = {(int64_t)a->header->tick_ns, a->header->fanout,
                                      a->wheel.capacity, a->topic_rows};
    wheel_init(&a->wheel, &shape,
               earliest_ns <= a->state.now_ns ? earliest_ns - 1 : a->state.now_ns);
    a->state.wall_placed_by_ns = a->header->wall_offset_ns;
    a->state.wall_cursor = PG_NIL;
}

static void place_rebuild(struct pg_arena *a, uint32_t slot)
{
    if (!has_deadline(a, slot))
        return;
    const int64_t deadline_ns = timers_deadline_ns(a, slot);
    if (deadline_ns != slot_hot(a, slot)->deadline_ns)
        deadline_move(a, slot, deadline_ns);
    if (LIKELY(!is_parked(a, slot)))
        wheel_place(&a->wheel, slot);
}

static void unique_place(struct pg_arena *a, uint32_t slot)
{
    slot_hot(a, slot)->deadline_ns = unique_until_ns(a, slot);
    wheel_place(&a->wheel, slot);
}

int rebuild_places(struct pg_arena *a, struct pg_fault *why)
{
    uint32_t group[PG_PREFETCH_MAX], count = 0;
    memset(why, 0, sizeof *why);
    watches_unclaim(a);
    wheel_rebuild(a, earlier(slots_scan(a), jobs_earliest_ns(a)));
    jobs_place(a);
    for (uint32_t slot = 0; slot < a->slots.capacity; slot++) {
        fetch(slot_hot(a, slot + FAR < a->slots.capacity ? slot + FAR : slot));
        if (unique_readable(a, slot))
            unique_place(a, slot);
        if (!ctl_live(slot_hot(a, slot)->ctl) || is_fired(a, slot))
            continue;
        place_rebuild(a, slot);
        if (UNLIKELY((slot_hot(a, slot)->flags & PG_F_SCHEDULE) != 0) && slot_readable(a, slot))
            schedule_note(a, slot);
        if (!is_operation(a, slot) || !slot_readable(a, slot))
            continue;
        operation_prefetch(a, slot);
        group[count++] = slot;
        if (count == PG_PREFETCH_MAX && !operations_link(a, group, &count, why))
            return 0;
    }
    return operations_link(a, group, &count, why);
}

/* ---- begin and end -------------------------------------------------------------------------- */

static void counters_reset(struct pg_arena *a)
{
    a->metrics->live = a->metrics->live_wall = a->metrics->parked = 0;
    a->metrics->operations = a->metrics->outcomes = a->metrics->unique_keys = 0;
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        namespace_at(a, i)->live = namespace_at(a, i)->bytes = 0;
    for (uint32_t i = 0; i < a->topic_rows; i++)
        topic_at(a, i)->live = topic_at(a, i)->bytes = topic_at(a, i)->unique_keys = 0;
}

/* True if the wall offset can be subtracted from any time without an overflow. */
static bool wall_sound(const struct pg_header *h, struct pg_fault *why)
{
    return h->wall_offset_ns >= -(INT64_MAX / 2) ||
           fault_set(why, "header", "offset of the wall clock", 0, 0,
                     (uint64_t)h->wall_offset_ns);
}

/* Return the control word of the slot whose entry is the newest committed one; 0 = none. */
static uint64_t fired_ctl(const struct pg_arena *a)
{
    const uint64_t tail = a->header->replay_tail;
    if (tail == 0 || replay_at(a, tail - 1)->commit != tail)
        return 0;
    return ctl_of(replay_at(a, tail - 1)->ticket >> 8, PG_S_ARMED);
}

int rebuild_begin(struct pg_arena *a, int64_t now_ns, struct pg_fault *why)
{
    memset(why, 0, sizeof *why);
    if (!wall_sound(a->header, why))
        return 0;
    STORE_RELEASE(&a->header->daemon_state, PG_D_RECOVERING);
    STORE_RELEASE(&a->header->state, PG_REBUILDING);
    a->state.started_ns = now_ns;
    a->state.first_number = next_number(a->header);
    a->header->now_ns = now_ns;
    time_set(a, now_ns, a->call.real_boot_ns);
    counters_reset(a);
    a->state.compaction = (struct compaction){0};
    quotas_rebuild(a);
    if (!names_sound(a, why) || !group_change_finish(a, why) || !in_doubt_settle(a, why))
        return 0;
    names_rebuild(a);
    late_rebuild(a);
    blobs_rebuild_begin(&a->blobs);
    if (!replay_settle(a, why) || !names_check(a, why) || !groups_rebuild(a, why) ||
        !jobs_void(a, why) || !watermarks_rebuild(a, why) || !bulk_loads_rebuild(a, why) ||
        !schedules_rebuild(a, why) || !sweeps_rebuild(a, why) || !cursors_rebuild(a, why) ||
        !sessions_rebuild(a, why))
        return 0;
    a->state.rebuild = (struct rebuild){.fired = fired_ctl(a), .fired_slot = PG_NIL,
                                        .newest = PG_NIL, .outcome = PG_NIL,
                                        .unsettled = PG_NIL, .unsettled_key = PG_NIL};
    return 1;
}

/* Complete the firing of a timer whose slot keeps its key unique. */
static void fired_end_unique(struct pg_arena *a, uint32_t slot)
{
    struct pg_hot *h = slot_hot(a, slot);
    slot_state_set(h, ctl_ticket(h->ctl), PG_S_UNIQUE);
    unique_settle(a, slot);
    unique_link(a, slot);
    wheel_place(&a->wheel, slot);
}

/* Complete the call that made the key of a slot unique. */
static void unsettled_end(struct pg_arena *a, uint32_t slot)
{
    wheel_remove(&a->wheel, slot);
    unique_settle(a, slot);
    wheel_place(&a->wheel, slot);
}

/* Complete the firing of a slot. The entry owns a timer's blob, so the timer's slot becomes free.
 * From an operation the entry took only the notice blob, so the operation's slot becomes an
 * outcome. */
static void fired_end(struct pg_arena *a, uint32_t slot)
{
    struct pg_hot *h = slot_hot(a, slot);
    if (fired_keeps_key(a, slot)) {
        fired_end_unique(a, slot);
        return;
    }
    if (!is_operation(a, slot)) {
        slot_state_set(h, ctl_ticket(h->ctl), PG_S_FREE);
        slots_give(&a->slots, slot);
        return;
    }
    operation_at(a, slot)->notice_blob = PG_NIL;
    slot_state_set(h, ctl_ticket(h->ctl), PG_S_OUTCOME);
    if (slot < a->state.rebuild.outcome)
        a->state.rebuild.outcome = slot;
}

int rebuild_end(struct pg_arena *a, struct pg_fault *why)
{
    const struct rebuild *r = &a->state.rebuild;
    memset(why, 0, sizeof *why);
    if (r->fired_slot != PG_NIL)
        fired_end(a, r->fired_slot);
    if (r->unsettled_key != PG_NIL)
        unsettled_end(a, r->unsettled_key);
    blobs_rebuild_end(&a->blobs);
    a->metrics->blob_bytes = blobs_used(&a->blobs) * PG_GRANULE;
    if (r->newest != PG_NIL && !timers_link_newest(a, r->newest, why))
        return 0;
    schedules_settle(a);
    sessions_recover(a);
    operations_settle(a, r->outcome, r->unsettled);
    quotas_rebuild_operations(a);
    members_rebuild(a);
    jobs_settle(a);
    wal_buffer_settle(a);
    return 1;
}

int pg_rebuild(struct pg_arena *a, int64_t now_ns, struct pg_fault *why)
{
    return rebuild_begin(a, now_ns, why) && rebuild_keys(a, why) && rebuild_places(a, why) &&
           rebuild_end(a, why);
}

/* ---- in two threads ------------------------------------------------------------------------ */

struct keys {
    struct pg_arena *a;
    struct pg_fault why;
    int done;
};

static void *keys_run(void *argument)
{
    struct keys *k = argument;
    k->done = rebuild_keys(k->a, &k->why);
    return NULL;
}

int pg_rebuild_threaded(struct pg_arena *a, int64_t now_ns, struct pg_fault *why)
{
    struct keys keys = {.a = a};
    pthread_t thread;
    if (!rebuild_begin(a, now_ns, why))
        return 0;
    const bool alone = pthread_create(&thread, NULL, keys_run, &keys) != 0;
    const int placed = rebuild_places(a, why);
    if (alone)
        keys_run(&keys);
    else
        pthread_join(thread, NULL);
    if (!keys.done)
        *why = keys.why;
    return placed && keys.done && rebuild_end(a, why);
}

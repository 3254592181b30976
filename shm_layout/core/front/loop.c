/* loop.c - one iteration of the loop: handle due timers and operations. */

#include "core/base/common.h"
#include "core/base/wheel.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/front/consumers.h"
#include "core/state/catch_up.h"
#include "core/state/compaction.h"
#include "core/state/delivery.h"
#include "core/state/jobs.h"
#include "core/state/replay_buffer.h"
#include "core/state/inbox.h"
#include "core/state/lateness.h"
#include "core/state/operations.h"
#include "core/state/prefetch.h"
#include "core/state/schedule_rows.h"
#include "core/state/schedules.h"
#include "core/state/sweeps.h"
#include "core/state/timers.h"

#define OUTAGE_NS 2500000000      /* the loop advances at least once a second, unless it is stopped
                                     or the host is suspended */

static bool expire(void *context, uint32_t slot)
{
    struct pg_arena *a = context;
    if (UNLIKELY(slot >= a->slots.capacity))
        return job_due(a, slot - a->slots.capacity);
    if (!is_operation(a, slot))
        return timer_expire(a, slot);
    if (UNLIKELY(a->state.holding) && operation_waits(a, slot)) {
        wheel_hold(&a->wheel, slot);
        return true;
    }
    return operation_expire(a, slot);
}

static void expire_soon(void *context, const uint32_t *slots, uint32_t count)
{
    prefetch_expiries(context, slots, count);
}

uint32_t pg_advance(struct pg_arena *a, int64_t now_ns, int64_t wall_offset_ns,
                    int64_t real_boot_ns, uint32_t budget, int *more)
{
    bool left = false;
    if (now_ns < a->header->now_ns)
        now_ns = a->header->now_ns;
    if (now_ns - a->state.now_ns > OUTAGE_NS)
        late_outage(a, now_ns);
    time_set(a, now_ns, real_boot_ns);
    STORE_RELAXED(&a->header->now_ns, now_ns);
    a->call.visits_left = budget;
    if (wall_offset_ns != a->header->wall_offset_ns)
        wall_note(a, wall_offset_ns);
    const bool stepping = wall_iteration(a, budget), freeing = orphans_free(a);
    uint32_t released = 0;
    bool waiting = false, catching_up = false;
    if (UNLIKELY(wheel_holds(&a->wheel)) && !a->state.holding)
        released = wheel_release(&a->wheel, budget, expire, a, &waiting);
    const uint64_t moved = wheel_moved(&a->wheel);
    uint32_t done = released + wheel_advance_prefetch(&a->wheel, now_ns, budget - released,
                                                      expire, expire_soon, a, &left);
    if (UNLIKELY(a->state.catch_up_ns <= now_ns) && !left)
        done += late_catch_up(a, budget - done, &catching_up);
    left |= schedules_step(a, budget);
    a->metrics->backlog = backlogs_count(&a->wheel);
    const bool drafting = consumers_draft_step(a), serving = members_serve(a, budget);
    const bool sweeping = UNLIKELY(a->state.sweeping) && sweeps_iteration(a);
    wal_buffer_settle(a);
    const bool compacting = compaction_step(a);
    a->metrics->largest_free_bytes = (uint64_t)blobs_largest(&a->blobs) * PG_GRANULE;
    a->metrics->moved += wheel_moved(&a->wheel) - moved;
    a->metrics->iterations++;
    a->metrics->iterations_full += done == budget;
    a->metrics->iteration_work += done;
    a->metrics->iteration_budget += done != 0 ? budget : 0;
    *more = left || stepping || freeing || waiting || sweeping || compacting || catching_up ||
            serving || drafting;
    a->header->next_deadline_ns = wheel_next_deadline_ns(&a->wheel);
    replay_show(a);
    return done;
}

int pg_hold_operations(struct pg_arena *a, int64_t after_ns, int64_t upto_ns, int again)
{
    const bool waiting = wheel_holds(&a->wheel);
    if (waiting && !a->state.holding && !again)
        return false;
    if (!waiting && !a->state.holding)
        a->state.hold_after_ns = after_ns;
    a->state.holding = true;
    a->state.hold_upto_ns = upto_ns;
    return !waiting;
}

int pg_fragmented(const struct pg_arena *a) { return compaction_failed(a); }

void pg_release_operations(struct pg_arena *a) { a->state.holding = false; }

static int64_t earlier(int64_t x_ns, int64_t y_ns) { return x_ns < y_ns ? x_ns : y_ns; }

int64_t pg_next_ns(const struct pg_arena *a)
{
    const bool at_once = a->state.wall_cursor != PG_NIL || a->state.orphans != PG_NIL ||
                         compaction_due(a) || a->state.jobs_wait || schedules_waiting(a) ||
                         (!a->state.holding && wheel_holds(&a->wheel));
    const int64_t next_ns = at_once ? a->state.now_ns : earlier(sweeps_next_ns(a),
                                                                wheel_next_ns(&a->wheel));
    return earlier(earlier(next_ns, consumers_draft_next_ns(a)),
                   earlier(a->state.catch_up_ns, a->state.jobs_again_ns));
}

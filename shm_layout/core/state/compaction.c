/* compaction.c - moves blobs of slots and of replay buffer entries, so that free memory lies in
 * large blocks.
 *
 * A pass empties one zone of the pool. It takes the zone's free blocks out of the lists, copies each
 * blob inside the zone to a place outside, and returns the zone to the lists. Used blobs have no
 * header, so the pass finds the blobs of a zone by visiting all slots and entries. New blobs are
 * never inside the zone, so one visit is enough. Blobs of long watch keys and of replies stay where
 * they are, and so does a blob that fits nowhere else.
 *
 * One store of the blob's number moves the blob: a kill before or after it leaves a blob with the
 * right bytes, and the rebuild marks the other copy as free. Nothing uses the old bytes again before
 * `passes` has risen, which tells a reader that its copy of a blob may be wrong. The WAL does not
 * name blobs, so a move needs no frame.
 */
#include "core/state/compaction.h"

#include "core/base/blobs.h"
#include "core/state/jobs.h"
#include "core/state/replay_buffer.h"
#include "core/state/rows.h"

enum { IDLE, GROWING, SLOTS, JOBS, ENTRIES, SHRINKING };

/* Work of a step, in visited rows. A moved blob costs as much as MOVE_WORK rows, and as one row more
 * for every ROW_GRANULES granules. */
#define STEP_WORK 4096
#define MOVE_WORK 24
#define ROW_GRANULES 4
/* Number of free blocks that a step takes out of the lists or returns to them. */
#define STEP_BLOCKS 256

/* Give the old place of a moved blob back. Return the work that the move took. */
static uint32_t moved(struct pg_arena *a, uint32_t old, uint32_t granules)
{
    blobs_give(&a->blobs, old, granules);
    a->metrics->compacted_bytes += (uint64_t)granules * PG_GRANULE;
    return MOVE_WORK + granules / ROW_GRANULES;
}

static uint32_t notice_visit(struct pg_arena *a, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    const uint32_t granules = (uint32_t)operation_granules(a, slot), old = op->notice_blob;
    const uint32_t blob = granules == 0 ? PG_NIL : blobs_evacuate(&a->blobs, old, granules);
    if (blob == PG_NIL)
        return 0;
    STORE_RELEASE(&op->notice_blob, blob);
    return moved(a, old, granules);
}

static uint32_t slot_visit(struct pg_arena *a, uint32_t slot)
{
    struct pg_cold *c = slot_cold(a, slot);
    if (ctl_state(slot_hot(a, slot)->ctl) == PG_S_FREE)
        return 1;
    const uint32_t old = c->blob, blob = blobs_evacuate(&a->blobs, old, slot_granules(c));
    uint32_t work = 1;
    if (blob != PG_NIL) {
        STORE_RELEASE(&c->blob, blob);
        work += moved(a, old, slot_granules(c));
    }
    return is_operation(a, slot) ? work + notice_visit(a, slot) : work;
}

static uint32_t job_visit(struct pg_arena *a, uint32_t row)
{
    const uint32_t granules = job_evacuate(a, row);
    a->metrics->compacted_bytes += (uint64_t)granules * PG_GRANULE;
    return granules == 0 ? 1 : 1 + MOVE_WORK + granules / ROW_GRANULES;
}

static uint32_t entry_visit(struct pg_arena *a, uint32_t position)
{
    struct pg_entry *e = replay_at(a, position);
    const uint32_t old = e->blob;
    const uint32_t blob =
        e->commit == 0 || entry_has_jobs(e) ? PG_NIL : blobs_evacuate(&a->blobs, old, entry_granules(e));
    if (blob == PG_NIL)
        return 1;
    STORE_RELEASE(&e->blob, blob);
    return 1 + moved(a, old, entry_granules(e));
}

/* Visit rows until the step's work is done. Return true once all rows have been visited. */
static bool rows_visit(struct pg_arena *a, uint32_t rows,
                       uint32_t (*visit)(struct pg_arena *, uint32_t))
{
    struct compaction *s = &a->state.compaction;
    for (uint32_t work = 0; work < STEP_WORK && s->next_row < rows; s->next_row++)
        work += visit(a, s->next_row);
    return s->next_row == rows;
}

/* ---- passes ---------------------------------------------------------------------------------- */

static uint32_t zones(const struct blob_pool *p)
{
    return (p->granules - 1) / blobs_zone_granules(p) + 1;
}

/* Passes have failed at every zone, and since then no more memory has become free than a block
 * needs. */
static bool gave_up(const struct pg_arena *a)
{
    const struct compaction *s = &a->state.compaction;
    return s->failures != 0 && s->failures >= 2 * zones(&a->blobs) &&
           blobs_used(&a->blobs) + blobs_goal(&a->blobs) > s->used_at_failure;
}

bool compaction_failed(const struct pg_arena *a)
{
    return a->state.compaction.phase == IDLE && blobs_fragmented(&a->blobs) && gave_up(a);
}

bool compaction_due(const struct pg_arena *a)
{
    return a->state.compaction.phase != IDLE || (blobs_fragmented(&a->blobs) && !gave_up(a));
}

void compaction_begin(struct pg_arena *a, uint32_t at, uint32_t end)
{
    a->state.compaction.limit = end;
    a->state.compaction.phase = blobs_zone_open(&a->blobs, at, end) ? GROWING : IDLE;
}

/* Look at the next zone, and begin a pass there if it is worth it. */
static void zone_choose(struct pg_arena *a)
{
    struct compaction *s = &a->state.compaction;
    const struct blob_pool *p = &a->blobs;
    const uint32_t size = blobs_zone_granules(p), at = s->zone * size;
    const uint32_t end = p->granules - at < size ? p->granules : at + size;
    s->zone = (s->zone + 1) % zones(p);
    if (!blobs_worth_emptying(p, at, end - at))
        return;
    compaction_begin(a, at, end);
}

static void pass_finish(struct pg_arena *a)
{
    struct compaction *s = &a->state.compaction;
    a->metrics->compactions++;
    s->phase = IDLE;
    s->failures = blobs_fragmented(&a->blobs) ? s->failures + 1 : 0;
    s->used_at_failure = (uint32_t)blobs_used(&a->blobs);
}

/* Do a part of the current phase. Return true at its end. */
static bool phase_step(struct pg_arena *a)
{
    switch (a->state.compaction.phase) {
    case GROWING: return blobs_zone_grow(&a->blobs, a->state.compaction.limit, STEP_BLOCKS);
    case SLOTS: return rows_visit(a, a->slots.capacity, slot_visit);
    case JOBS: return rows_visit(a, a->job_slots.capacity, job_visit);
    case ENTRIES: return rows_visit(a, a->header->replay_capacity, entry_visit);
    default: return blobs_zone_shrink(&a->blobs, STEP_BLOCKS);
    }
}

RARE static void pass_step(struct pg_arena *a)
{
    struct compaction *s = &a->state.compaction;
    if (s->phase == IDLE) {
        zone_choose(a);
        return;
    }
    if (!phase_step(a))
        return;
    s->next_row = 0;
    if (s->phase == SHRINKING) {
        pass_finish(a);
        return;
    }
    if (s->phase == ENTRIES)
        blobs_pass_end(&a->blobs);
    s->phase++;
}

bool compaction_step(struct pg_arena *a)
{
    if (LIKELY(!compaction_due(a)))
        return false;
    pass_step(a);
    return compaction_due(a);
}

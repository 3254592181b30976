/* wheel.h - the hierarchical timing wheel. */
#ifndef PURGATORYD_BASE_WHEEL_H
#define PURGATORYD_BASE_WHEEL_H

#include "core/base/backlog.h"
#include "core/base/chunks.h"
#include "core/base/common.h"

/* Called with a due slot, which is in no bucket at that moment. The callback frees or re-places the
 * slot and returns true. If it returns false, the wheel keeps the slot and stops the advance: the
 * timer is late, never lost. */
typedef bool (*wheel_due_fn)(void *context, uint32_t slot);
/* Called with up to PG_CHUNK_CELLS slots that are due next, so that the callback can prefetch their
 * data. */
typedef void (*wheel_soon_fn)(void *context, const uint32_t *slots, uint32_t count);

struct wheel_shape {
    int64_t tick_ns;              /* 1000 .. 100000000 */
    uint32_t fanout;              /* 2 .. 256 */
    uint32_t capacity;            /* slots */
    uint32_t topics;              /* backlogs */
};

/* Number of levels of the wheel that cover all 63-bit times. */
uint32_t wheel_levels(const struct wheel_shape *shape);
/* Number of buckets: the rings of all levels of the wheel, and PG_DUE_BUCKETS for due timers. */
uint32_t wheel_buckets(const struct wheel_shape *shape);
/* Number of chunks that suffices for any distribution of timers. */
uint32_t wheel_chunks(const struct wheel_shape *shape);
/* Make an empty wheel whose clock is at now_ns. */
void wheel_init(struct wheel *w, const struct wheel_shape *shape, int64_t now_ns);
/* Link the slot into the bucket of slot_fires_ns(). A slot that is already due goes to the due
 * bucket. */
void wheel_place(struct wheel *w, uint32_t slot);
/* Link a slot that is due immediately, even if its tick has not ended. */
void wheel_place_due(struct wheel *w, uint32_t slot);
/* Unlink a slot. It must be linked, in a bucket or in the backlog of its topic. */
void wheel_remove(struct wheel *w, uint32_t slot);
/* Link a due slot that has to wait until wheel_release fires it. on_due callbacks call this.
 * wheel_advance skips the slot. */
void wheel_hold(struct wheel *w, uint32_t slot);
/* True if any slot waits for wheel_release. */
bool wheel_holds(const struct wheel *w);
/* Fire waiting slots, at most `budget`, in no particular order. Return the number of slots fired;
 * *more is true if waiting slots are left. */
uint32_t wheel_release(struct wheel *w, uint32_t budget, wheel_due_fn on_due, void *context,
                       bool *more);
/* Prefetch the slots that will move to other cells when `slots` are removed from the wheel. */
void wheel_fetch_last(const struct wheel *w, const uint32_t *slots, uint32_t count);
/* Cell of the member that moves when a linked slot is removed. */
static inline uint32_t wheel_tail_of(const struct wheel *w, const struct pg_hot *h)
{
    if (UNLIKELY(h->bucket == PG_BACKLOG_BUCKET))
        return h->topic < w->topics ? backlog_head(w, h->topic) : PG_NIL;
    return w->buckets[h->bucket].tail;
}
/* Prefetch the cell of a linked slot. */
static inline void wheel_fetch_cell(const struct wheel *w, const struct pg_hot *h)
{
    fetch(&w->chunks[h->where / CHUNK_WORDS]);
}
/* Prefetch the cell of a linked slot, and the last cell of its bucket. */
static inline void wheel_fetch_cells(const struct wheel *w, const struct pg_hot *h)
{
    wheel_fetch_cell(w, h);
    fetch(&w->chunks[wheel_tail_of(w, h) / CHUNK_WORDS]);
}
/* Number of timers that the wheel has moved to a finer level. */
static inline uint64_t wheel_moved(const struct wheel *w) { return w->state->moved; }
/* Time at which wheel_advance has to be called next, to fire timers, to cascade or to drain
 * gradually. A time in the past means immediately; INT64_MAX = the wheel is empty. */
int64_t wheel_next_ns(const struct wheel *w);
/* Lower bound of the time at which the next timer fires. If the earliest deadline is in level 0,
 * the bound is that deadline rounded up to a tick. */
int64_t wheel_next_deadline_ns(const struct wheel *w);
/* Fire the timers that are due at now_ns, and drain coarse buckets. `budget` limits the number of
 * timers fired plus timers moved; the next call continues. Return the number of timers handled;
 * *more is true if due timers are left. If now_ns is before the wheel's clock, the clock is used
 * instead. */
uint32_t wheel_advance(struct wheel *w, int64_t now_ns, uint32_t budget, wheel_due_fn on_due,
                       void *context, bool *more);
/* Do the same as wheel_advance, and call on_soon before each group of on_due calls. */
uint32_t wheel_advance_prefetch(struct wheel *w, int64_t now_ns, uint32_t budget,
                                wheel_due_fn on_due, wheel_soon_fn on_soon, void *context,
                                bool *more);
/* Check that every armed slot is linked exactly once, in a bucket that its deadline allows, and
 * that chains, counts, bitmaps and pool agree. `armed_count` is the expected number of linked
 * slots. */
bool wheel_check(const struct wheel *w, uint32_t armed_count, struct pg_fault *fault);

#endif

/* wheel.h - the hierarchical timing wheel. */
#ifndef PURGATORYD_BASE_WHEEL_H
#define PURGATORYD_BASE_WHEEL_H

#include "core/base/common.h"

/* Called with a slot that is due and stands in no bucket any more. It must free or
 * re-place the slot and return true; false = it cannot be taken now: the wheel keeps it
 * and stops (a timer is late, never lost). */
typedef bool (*wheel_due_fn)(void *context, uint32_t slot);
/* Called with at most PG_CHUNK_CELLS slots that are due next, to fetch what is theirs. */
typedef void (*wheel_soon_fn)(void *context, const uint32_t *slots, uint32_t count);

struct wheel {
    struct pg_wheel *state;
    struct pg_bucket *buckets;
    struct pg_chunk *chunks;
    uint32_t *free_chunks;        /* free_chunks[0] = count, as in struct slots */
    struct pg_hot *hot;           /* of each slot: deadline_ns (read), where and bucket (owned) */
};

struct wheel_shape {
    int64_t tick_ns;              /* 1000 .. 100000000 */
    uint32_t fanout;              /* 2 .. 256 */
    uint32_t capacity;            /* slots */
};

uint32_t wheel_levels(const struct wheel_shape *shape);
uint32_t wheel_buckets(const struct wheel_shape *shape);   /* pseudo buckets included */
uint32_t wheel_chunks(const struct wheel_shape *shape);    /* enough for any distribution */
void wheel_init(struct wheel *w, const struct wheel_shape *shape, int64_t now_ns);
/* Links the slot by its deadline_ns; one that is due already goes to the due bucket. */
void wheel_place(struct wheel *w, uint32_t slot);
/* Links a slot that is due now, though its tick may not have ended. */
void wheel_place_due(struct wheel *w, uint32_t slot);
void wheel_remove(struct wheel *w, uint32_t slot);
/* For on_due: links a slot that is due and is to wait; wheel_advance does not come to it again. */
void wheel_hold(struct wheel *w, uint32_t slot);
/* True if any such slot is linked. */
bool wheel_holds(const struct wheel *w);
/* Fires the slots that wait, in no order. Returns how many, at most `budget`; *more tells whether
 * some are left. */
uint32_t wheel_release(struct wheel *w, uint32_t budget, wheel_due_fn on_due, void *context,
                       bool *more);
/* Fetches what removing these slots will move into their cells. */
void wheel_fetch_last(const struct wheel *w, const uint32_t *slots, uint32_t count);
/* When advance has to be called next, for a firing, a cascade or a gradual drain that
 * should not wait: now or earlier = at once; INT64_MAX = nothing is armed. */
int64_t wheel_next_ns(const struct wheel *w);
/* Lower bound of the next firing; equals the earliest deadline rounded up to a tick while
 * that deadline stands in level 0. */
int64_t wheel_next_deadline_ns(const struct wheel *w);
/* Fires what is due at now_ns and drains coarse buckets. `budget` bounds fired + moved
 * timers; what is left is done by the next call. Returns timers handled; *more tells
 * whether due work is left. now_ns before the wheel's clock is taken as the clock. */
uint32_t wheel_advance(struct wheel *w, int64_t now_ns, uint32_t budget, wheel_due_fn on_due,
                       void *context, bool *more);
/* The same; on_soon comes before each group of on_due. */
uint32_t wheel_advance_prefetch(struct wheel *w, int64_t now_ns, uint32_t budget,
                                wheel_due_fn on_due, wheel_soon_fn on_soon, void *context,
                                bool *more);
/* True if every slot for which armed(ctl state) holds is linked exactly once, in a bucket
 * that its deadline allows, and chains, counts, bitmaps and pool agree. `armed_count` is
 * how many slots must be linked. */
bool wheel_check(const struct wheel *w, uint32_t capacity, uint32_t armed_count,
                 struct pg_fault *fault);

#endif

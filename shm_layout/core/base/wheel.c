/* wheel.c - an exact hierarchical timing wheel (Varghese, Lauck 1987).
 *
 * Time is counted in ticks. A timer fires at tick ceil(t / tick), never early, where t is its
 * deadline rounded up by its slack (slot_fires_ns). A bucket of level l covers fanout^l ticks. A
 * timer is in the finest level whose ring reaches its tick. When
 * the clock enters a coarse bucket, the members of the bucket must already be in finer levels. Most
 * of them are moved gradually before the bucket's first tick (`drain`); the rest are moved at this
 * tick (`cascade`).
 *
 * A bucket is a chain of chunks. A chunk is a cache line of cells; a cell holds the id of a slot.
 * Each slot stores the number of its cell. Removing a slot moves the newest member of the bucket
 * into the free cell. Firing and moving take the members one by one from the end of the chain. The
 * wheel is therefore consistent whenever a callback runs or the budget is spent, and the next call
 * can continue without any saved position.
 */
#include "core/base/wheel.h"
#include "core/base/backlog.h"
#include "core/base/check.h"
#include "core/base/chunks.h"
#include "core/base/common.h"
#include "core/base/slots.h"

enum {
    DRAIN_EXTRA = 512,                   /* added to each batch of moves, so that prefetching pays
                                            off */
    DRAIN_SMALL = 1024,                  /* at most this many members may wait for the cascade */
    DRAIN_PIECE = 16384                  /* number of members that justifies an extra wake-up */
};
enum { MOVE_PREFETCH = 32 };                /* number of slots that move() prefetches in advance */

/* ---- division by constants of the arena ---------------------------------------------- */

__extension__ typedef unsigned __int128 uint128;

/* Multiplier and shift for a division by a constant (Granlund, Montgomery 1994). The result is
 * exact for n < 2^63, which holds for all times and ticks. */
static void divisor_set(uint64_t divisor, uint64_t *multiplier, uint32_t *shift)
{
    *shift = divisor == 1 ? 0 : 64 - (uint32_t)__builtin_clzll(divisor - 1);
    *multiplier = (uint64_t)((((uint128)1 << (63 + *shift)) + divisor - 1) / divisor);
}

static inline uint64_t divide(uint64_t n, uint64_t multiplier, uint32_t shift)
{
    return (uint64_t)((uint128)(n << 1) * multiplier >> 64) >> shift;
}

static inline uint64_t deadline_tick(const struct pg_wheel *s, int64_t deadline_ns)
{
    if (UNLIKELY(deadline_ns <= 0))
        return 0;
    return divide((uint64_t)deadline_ns - 1, s->multiplier, s->shift) + 1;
}

static inline struct pg_hot *hot_at(const struct wheel *w, uint32_t slot)
{
    PG_ASSERT_IN_TESTS(slot < w->capacity, "wheel", "a slot is inside the table");
    return &w->hot[slot];
}

static inline uint64_t slot_tick(const struct wheel *w, uint32_t slot)
{
    return deadline_tick(w->state, slot_fires_ns(hot_at(w, slot)));
}

static int64_t tick_to_ns(const struct pg_wheel *s, uint64_t tick)
{
    int64_t ns;
    return __builtin_mul_overflow((int64_t)tick, s->tick_ns, &ns) ? INT64_MAX : ns;
}

/* ---- geometry ------------------------------------------------------------------------ */

/* Number of levels that cover all 63-bit times. With this number, the ring of the top level spans 2
 * * fanout^levels > 2^63 / tick ticks. If a tick is 1 us or longer, every limit is below 2^62. */
uint32_t wheel_levels(const struct wheel_shape *shape)
{
    uint64_t last = INT64_MAX / (uint64_t)shape->tick_ns + 1, span = 2;
    uint32_t levels = 0;
    for (; span <= last; levels++)
        span *= shape->fanout;
    return levels;
}

uint32_t wheel_buckets(const struct wheel_shape *shape)
{
    return wheel_levels(shape) * 2 * shape->fanout + PG_DUE_BUCKETS;
}

/* Number of chunks for the worst distribution of members: no chunk is empty, and only the last
 * chunk of a bucket, and the first and the last of a backlog, may have empty cells. */
uint32_t wheel_chunks(const struct wheel_shape *shape)
{
    uint32_t spread = shape->capacity / PG_CHUNK_CELLS + wheel_buckets(shape) + 2 * shape->topics;
    return spread < shape->capacity ? spread : shape->capacity;
}

static inline uint32_t position_of(const struct pg_wheel *s, const struct pg_level *v,
                                   uint64_t tick)
{
    uint32_t position = (uint32_t)divide(tick - v->origin, v->multiplier, v->shift);
    return position < s->ring ? position : position - s->ring;
}

/* Set the position of a level. The coarser level must be set first, because it determines where the
 * ring of the finer level begins. */
static void level_enter(const struct pg_wheel *s, struct pg_level *v, uint64_t tick)
{
    uint64_t revolution = divide(tick, v->multiplier, v->shift);
    v->start = revolution * v->width;
    v->here = position_of(s, v, v->start);
    if (v > s->levels) {
        v[-1].limit = v->start + 2 * v->width;
        v[-1].origin = v->start - (revolution & 1) * v->width;
    }
}

/* Set the clock. A level enters a new bucket only at a tick at which all finer levels do so. */
static void clock_set(struct pg_wheel *s, uint64_t tick)
{
    struct pg_level *v = s->levels;
    uint32_t l = 1;
    while (l < s->level_count && tick >= v[l].start + v[l].width)
        l++;
    while (--l > 0)
        level_enter(s, &v[l], tick);
    s->clock = v->start = tick;
    v->here = (uint32_t)(tick - v->origin);
}

void wheel_init(struct wheel *w, const struct wheel_shape *shape, int64_t now_ns)
{
    struct pg_wheel *s = w->state;
    uint64_t width = 1;

    memset(s, 0, sizeof *s);
    s->tick_ns = shape->tick_ns;
    s->ring = 2 * shape->fanout;
    s->level_count = wheel_levels(shape);
    s->due = s->level_count * s->ring;
    s->chunk_count = wheel_chunks(shape);
    divisor_set((uint64_t)s->tick_ns, &s->multiplier, &s->shift);
    s->clock = s->drained = now_ns > 0 ? divide((uint64_t)now_ns, s->multiplier, s->shift) : 0;
    for (uint32_t l = 0; l < s->level_count; l++, width *= shape->fanout) {
        struct pg_level *v = &s->levels[l];
        v->width = width;
        v->limit = UINT64_MAX;
        v->first = l * s->ring;
        divisor_set(width, &v->multiplier, &v->shift);
    }
    for (uint32_t l = s->level_count; l-- > 0;)
        level_enter(s, &s->levels[l], s->clock);
    for (uint32_t i = 0; i < wheel_buckets(shape); i++)
        w->buckets[i] = (struct pg_bucket){PG_NIL, 0};
    backlogs_init(w);
    touch(w->chunks, (uint64_t)s->chunk_count * sizeof *w->chunks);
    touch(w->free_chunks, (uint64_t)s->chunk_count * sizeof *w->free_chunks);
    w->free_chunks[0] = s->chunk_count;
    for (uint32_t i = 0; i < s->chunk_count; i++)
        w->free_chunks[1 + i] = s->chunk_count - 1 - i;
}

/* Bucket for a tick that is not before the clock. */
static inline uint32_t bucket_at(const struct pg_wheel *s, uint64_t tick)
{
    const struct pg_level *v = s->levels;
    while (tick >= v->limit)
        v++;
    return v->first + position_of(s, v, tick);
}

static inline uint32_t bucket_here(const struct pg_level *v) { return v->first + v->here; }

static inline uint32_t bucket_coming(const struct pg_wheel *s, const struct pg_level *v)
{
    return v->first + (v->here + 1 < s->ring ? v->here + 1 : 0);
}

/* ---- occupancy ----------------------------------------------------------------------- */

static void mark_occupied(struct pg_wheel *s, uint32_t bucket)
{
    uint32_t l = bucket / s->ring, position = bucket % s->ring;
    if (bucket >= s->due)
        return;
    s->levels[l].occupied[position >> 6] |= 1ull << (position & 63);
    s->levels[l].summary |= 1ull << (position >> 6);
    s->occupied |= 1ull << l;
}

static void mark_empty(struct pg_wheel *s, uint32_t bucket)
{
    uint32_t l = bucket / s->ring, position = bucket % s->ring;
    struct pg_level *v = &s->levels[l];
    if (bucket >= s->due)
        return;
    if ((v->occupied[position >> 6] &= ~(1ull << (position & 63))) == 0
        && (v->summary &= ~(1ull << (position >> 6))) == 0)
        s->occupied &= ~(1ull << l);
}

/* First occupied position at or after `from`; the search wraps around the ring. The level must have
 * members. */
static uint32_t occupied_from(const struct pg_level *v, uint32_t from)
{
    uint32_t word = from >> 6;
    uint64_t bits = v->occupied[word] & ~0ull << (from & 63);
    if (bits == 0) {
        uint64_t later = v->summary & ~1ull << word;
        word = (uint32_t)__builtin_ctzll(later ? later : v->summary);
        bits = v->occupied[word];
    }
    return word * 64 + (uint32_t)__builtin_ctzll(bits);
}

/* Tick at which the level's next bucket with members begins. The level must have members. */
static uint64_t level_next(const struct pg_wheel *s, const struct pg_level *v)
{
    uint32_t next = occupied_from(v, v->here);
    uint32_t buckets = next >= v->here ? next - v->here : next + s->ring - v->here;
    return v->start + buckets * v->width;
}

/* Next tick that has timers to fire or to cascade; UINT64_MAX = none. While the clock is inside a
 * bucket of level 1, no coarser bucket begins, so only level 0 matters. At the first tick of the
 * bucket a cascade may be unfinished, so all levels matter. */
static uint64_t next_event(const struct pg_wheel *s)
{
    uint64_t next = UINT64_MAX, levels = s->occupied;
    if (levels & 1) {
        next = level_next(s, &s->levels[0]);
        if (s->clock > s->levels[1].start && next < s->levels[1].start + s->levels[1].width)
            return next;
        levels &= levels - 1;
    }
    for (; levels; levels &= levels - 1) {
        uint64_t border = level_next(s, &s->levels[__builtin_ctzll(levels)]);
        next = border < next ? border : next;
    }
    return next;
}

/* ---- buckets ------------------------------------------------------------------------- */

static inline uint32_t *cell_at(const struct wheel *w, uint32_t cell)
{
    PG_ASSERT_IN_TESTS(cell / CHUNK_WORDS < w->state->chunk_count, "wheel",
                       "a cell is inside the chunks");
    return (uint32_t *)(void *)w->chunks + cell;
}

static inline struct pg_bucket *bucket_row(const struct wheel *w, uint32_t bucket)
{
    PG_ASSERT_IN_TESTS(bucket < w->state->due + PG_DUE_BUCKETS, "wheel",
                       "a bucket is inside the wheel");
    return &w->buckets[bucket];
}

/* Start a chunk for one more member. */
static uint32_t bucket_grow(struct wheel *w, uint32_t bucket)
{
    struct pg_bucket *b = bucket_row(w, bucket);
    const uint32_t chunk = chunk_take(w);
    w->chunks[chunk].previous = b->tail;
    if (b->tail == PG_NIL)
        mark_occupied(w->state, bucket);
    return chunk * CHUNK_WORDS + 1;
}

/* Append a slot to a bucket. One test finds both a full chunk and an empty chain, because `tail`
 * modulo 16 is 15 for the last cell of a chunk and for PG_NIL. */
static inline void bucket_push(struct wheel *w, uint32_t bucket, uint32_t slot)
{
    struct pg_bucket *b = bucket_row(w, bucket);
    b->tail = b->tail % CHUNK_WORDS == PG_CHUNK_CELLS ? bucket_grow(w, bucket) : b->tail + 1;
    b->count++;
    *cell_at(w, b->tail) = slot;
    hot_at(w, slot)->where = b->tail;
    hot_at(w, slot)->bucket = (uint16_t)bucket;
}

/* Take the newest member. The bucket must have one. */
static inline uint32_t bucket_pop(struct wheel *w, uint32_t bucket)
{
    struct pg_bucket *b = bucket_row(w, bucket);
    PG_ASSERT(b->count != 0, "wheel", "a bucket that a slot leaves has members");
    uint32_t slot = *cell_at(w, b->tail), chunk = b->tail / CHUNK_WORDS;
    b->count--;
    if (b->tail % CHUNK_WORDS != 1) {
        b->tail--;
        return slot;
    }
    b->tail = w->chunks[chunk].previous;
    chunk_give(w, chunk);
    if (b->tail == PG_NIL)
        mark_empty(w->state, bucket);
    return slot;
}

/* Prefetch the chunk before the chunk of cell `tail`. Return the last cell of the prefetched chunk,
 * or PG_NIL if there is none. */
static inline uint32_t fetch_chunk(const struct wheel *w, uint32_t tail)
{
    uint32_t before = tail == PG_NIL ? PG_NIL : w->chunks[tail / CHUNK_WORDS].previous;
    if (before != PG_NIL)
        __builtin_prefetch(&w->chunks[before / CHUNK_WORDS], 1);
    return before;
}

/* Prefetch the slots in the chunk of cell `tail`, and the chunk before it. Return the last cell of
 * the chunk before it, or PG_NIL if there is none. */
static inline uint32_t fetch_members(const struct wheel *w, uint32_t tail)
{
    if (tail != PG_NIL)
        for (uint32_t cell = tail & ~(CHUNK_WORDS - 1u); ++cell <= tail;)
            __builtin_prefetch(&w->hot[*cell_at(w, cell)], 1);
    return fetch_chunk(w, tail);
}

/* ---- place and remove ---------------------------------------------------------------- */

void wheel_place(struct wheel *w, uint32_t slot)
{
    const struct pg_wheel *s = w->state;
    uint64_t tick = slot_tick(w, slot);
    bucket_push(w, tick > s->clock ? bucket_at(s, tick) : s->due + s->open, slot);
}

/* If the wheel lags behind real time, timers still have to fire in the order of their ticks. A
 * timer whose tick is more than one after the clock is therefore placed normally. */
void wheel_place_due(struct wheel *w, uint32_t slot)
{
    const struct pg_wheel *s = w->state;
    if (slot_tick(w, slot) > s->clock + 1)
        wheel_place(w, slot);
    else
        bucket_push(w, s->due + s->open, slot);
}

/* ---- due timers that wait -------------------------------------------------------------- */

static inline uint32_t bucket_waiting(const struct pg_wheel *s) { return s->due + 2; }

void wheel_hold(struct wheel *w, uint32_t slot) { bucket_push(w, bucket_waiting(w->state), slot); }

bool wheel_holds(const struct wheel *w)
{
    return w->buckets[bucket_waiting(w->state)].tail != PG_NIL;
}

/* Move the bucket's newest member into the cell of the removed slot. The newest member may be the
 * removed slot itself. */
void wheel_remove(struct wheel *w, uint32_t slot)
{
    const uint32_t hole = hot_at(w, slot)->where;
    PG_ASSERT_IN_TESTS(*cell_at(w, hole) == slot, "wheel", "a slot is in the cell that it names");
    if (UNLIKELY(in_backlog(hot_at(w, slot)))) {
        backlog_remove(w, slot);
        return;
    }
    const uint32_t last = bucket_pop(w, hot_at(w, slot)->bucket);
    *cell_at(w, hole) = last;
    hot_at(w, last)->where = hole;
}

void wheel_fetch_last(const struct wheel *w, const uint32_t *slots, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t tail = wheel_tail_of(w, hot_at(w, slots[i]));
        if (tail != PG_NIL)
            __builtin_prefetch(&w->hot[*cell_at(w, tail)], 1);
    }
    __asm__ volatile("");         /* an effect: without one, compilers drop the call */
}

/* ---- advance ------------------------------------------------------------------------- */

struct advance {                         /* one call of wheel_advance */
    struct wheel *wheel;
    uint32_t budget;                     /* the call may still fire or move this many timers */
    wheel_due_fn on_due;
    wheel_soon_fn on_soon;               /* NULL = none */
    void *context;
};

/* Fire the members of a non-empty bucket; return false if some are left. Slots are prefetched one
 * chunk ahead. If a callback changes the chain, only that prefetch is wasted. */
static bool fire_members(struct advance *t, uint32_t bucket)
{
    struct wheel *w = t->wheel;
    struct pg_bucket *b = bucket_row(w, bucket);
    uint32_t chunk = PG_NIL, prefetched = fetch_members(w, b->tail);
    while (b->tail != PG_NIL) {
        if (t->budget == 0)
            return false;
        if (b->tail / CHUNK_WORDS != chunk) {
            chunk = b->tail / CHUNK_WORDS;
            prefetched = fetch_members(w, prefetched);
            if (t->on_soon != NULL)
                t->on_soon(t->context, w->chunks[chunk].slots, b->tail % CHUNK_WORDS);
        }
        uint32_t slot = bucket_pop(w, bucket);
        if (!t->on_due(t->context, slot)) {
            bucket_push(w, bucket, slot);
            return false;
        }
        t->budget--;
    }
    return true;
}

static inline bool fire(struct advance *t, uint32_t bucket)
{
    return t->wheel->buckets[bucket].tail == PG_NIL || fire_members(t, bucket);
}

/* Take the newest member and prefetch its slot. The first pop from a chunk also prefetches the two
 * chunks before it. */
static inline uint32_t pop_prefetch(struct wheel *w, uint32_t bucket)
{
    uint32_t tail = w->buckets[bucket].tail, slot;
    if (tail % CHUNK_WORDS == PG_CHUNK_CELLS)
        fetch_chunk(w, fetch_chunk(w, tail));
    slot = bucket_pop(w, bucket);
    __builtin_prefetch(&w->hot[slot], 1);
    return slot;
}

/* Move up to `most` members to finer levels; return false if the budget is spent first. While a
 * slot's cache line is fetched, MOVE_PREFETCH other members are handled. */
static bool move(struct advance *t, uint32_t bucket, uint64_t most)
{
    struct wheel *w = t->wheel;
    uint64_t count = w->buckets[bucket].count < most ? w->buckets[bucket].count : most;
    uint32_t n = count < t->budget ? (uint32_t)count : t->budget, prefetched[MOVE_PREFETCH], in = 0;

    for (; in < n && in < MOVE_PREFETCH; in++)
        prefetched[in] = pop_prefetch(w, bucket);
    for (uint32_t out = 0; out < n; out++) {
        uint32_t slot = prefetched[out % MOVE_PREFETCH];
        if (in < n)
            prefetched[in++ % MOVE_PREFETCH] = pop_prefetch(w, bucket);
        bucket_push(w, bucket_at(w->state, slot_tick(w, slot)), slot);
    }
    w->state->moved += n;
    t->budget -= n;
    return n == count;
}

/* Empty the coarse buckets that begin at the clock's tick; return false if the budget is spent
 * first. */
static bool cascade(struct advance *t)
{
    const struct pg_wheel *s = t->wheel->state;
    for (uint32_t l = 1; l < s->level_count && s->levels[l].start == s->clock; l++)
        if (!move(t, bucket_here(&s->levels[l]), UINT64_MAX))
            return false;
    return true;
}

/* Fire everything that is due at the clock's tick. The two due buckets swap roles once per tick. A
 * timer that is placed during the tick and is already due goes to the other due bucket and waits
 * for the next tick. New timers therefore starve neither older timers nor later ticks. */
static bool finish_tick(struct advance *t)
{
    struct pg_wheel *s = t->wheel->state;
    if (!cascade(t) || !fire(t, bucket_here(&s->levels[0])))
        return false;
    if (!s->closing) {
        s->open ^= 1;
        s->closing = 1;
    }
    if (!fire(t, s->due + (s->open ^ 1)))
        return false;
    s->closing = 0;
    return true;
}

/* Advance to `target`. Return false if, before `target`, the budget is spent or a callback refuses
 * a timer. */
static bool catch_up(struct advance *t, uint64_t target)
{
    struct pg_wheel *s = t->wheel->state;
    while (finish_tick(t)) {
        if (s->clock == target)
            return true;
        uint64_t next = next_event(s);
        clock_set(s, next < target ? next : target);
    }
    return false;
}

/* Number of members that this call should move from the level's next bucket, so that the bucket is
 * empty after 3/4 of the remaining ticks. */
static uint64_t quota(const struct pg_wheel *s, const struct pg_level *v, uint64_t count)
{
    uint64_t left = v->start + v->width - s->clock;
    uint64_t since = s->drained > v->start ? s->drained : v->start, passed = s->clock - since;
    if (passed == 0)
        return 0;
    return passed >= left ? count : passed * (count * 4 / (3 * left) + 1) + DRAIN_EXTRA;
}

/* Move members of the next coarse buckets ahead of time, a few for each tick that has passed. */
static void drain(struct advance *t)
{
    struct pg_wheel *s = t->wheel->state;
    for (uint64_t levels = s->occupied & ~1ull; levels; levels &= levels - 1) {
        const struct pg_level *v = &s->levels[__builtin_ctzll(levels)];
        uint32_t bucket = bucket_coming(s, v), count = t->wheel->buckets[bucket].count;
        if (count > 0 && !move(t, bucket, quota(s, v, count)))
            return;
    }
    s->drained = s->clock;
}

uint32_t wheel_release(struct wheel *w, uint32_t budget, wheel_due_fn on_due, void *context,
                       bool *more)
{
    struct advance t = {w, budget, on_due, NULL, context};
    *more = !fire(&t, bucket_waiting(w->state));
    return budget - t.budget;
}

uint32_t wheel_advance_prefetch(struct wheel *w, int64_t now_ns, uint32_t budget,
                                wheel_due_fn on_due, wheel_soon_fn on_soon, void *context,
                                bool *more)
{
    struct pg_wheel *s = w->state;
    struct advance t = {w, budget, on_due, on_soon, context};
    uint64_t now = now_ns > 0 ? divide((uint64_t)now_ns, s->multiplier, s->shift) : 0;

    *more = !catch_up(&t, now > s->clock ? now : s->clock);
    if (!*more) {
        drain(&t);
        *more = w->buckets[s->due + s->open].tail != PG_NIL;
    }
    return budget - t.budget;
}

uint32_t wheel_advance(struct wheel *w, int64_t now_ns, uint32_t budget, wheel_due_fn on_due,
                       void *context, bool *more)
{
    return wheel_advance_prefetch(w, now_ns, budget, on_due, NULL, context, more);
}

/* ---- the next wake-up ---------------------------------------------------------------- */

/* Next tick at which a timer is due or a coarse bucket begins; UINT64_MAX = the wheel is empty. */
static uint64_t next_tick(const struct wheel *w)
{
    const struct pg_wheel *s = w->state;
    bool due = w->buckets[s->due].tail != PG_NIL || w->buckets[s->due + 1].tail != PG_NIL;
    return due ? s->clock : next_event(s);
}

/* Tick of the next wake-up that moves members out of the level's next bucket, which has `count`
 * members. */
static uint64_t drain_tick(const struct pg_wheel *s, const struct pg_level *v, uint32_t count)
{
    uint64_t left = v->start + v->width - s->drained;
    uint64_t wait = left / 4 * 3 / (count / DRAIN_PIECE + 1);
    return s->drained + (wait > 0 ? wait : 1);
}

int64_t wheel_next_ns(const struct wheel *w)
{
    const struct pg_wheel *s = w->state;
    uint64_t next = next_tick(w);

    for (uint64_t levels = s->occupied & ~1ull; levels; levels &= levels - 1) {
        const struct pg_level *v = &s->levels[__builtin_ctzll(levels)];
        uint32_t count = w->buckets[bucket_coming(s, v)].count;
        if (count > DRAIN_SMALL) {
            uint64_t tick = drain_tick(s, v, count);
            next = tick < next ? tick : next;
        }
    }
    return next == UINT64_MAX ? INT64_MAX : tick_to_ns(s, next);
}

int64_t wheel_next_deadline_ns(const struct wheel *w)
{
    uint64_t next = next_tick(w);
    return next == UINT64_MAX ? INT64_MAX : tick_to_ns(w->state, next);
}

/* ---- check --------------------------------------------------------------------------- */

struct audit {
    const struct wheel *wheel;
    uint32_t linked;                     /* number of slots found in buckets */
    /* Number of chunks found in buckets, and the sum of the mixed ids of all chunks. */
    uint32_t chunks;
    uint64_t chunk_sum;
    struct pg_fault *fault;
};

static bool broken(struct audit *a, const char *detail, uint64_t where, uint64_t expected,
                   uint64_t found)
{
    return fault_set(a->fault, "wheel", detail, where, expected, found);
}

static bool check_clock(struct audit *a)
{
    const struct pg_wheel *s = a->wheel->state;
    if (s->level_count < 2 || s->level_count > PG_WHEEL_LEVELS || s->ring < 4 || s->ring > 512)
        return broken(a, "shape of the wheel", 0, s->level_count, s->ring);
    if (s->open > 1 || s->closing > 1)
        return broken(a, "roles of the due buckets", 0, 1, s->open | s->closing);
    if (s->drained > s->clock)
        return broken(a, "gradual draining is past the clock", 0, s->clock, s->drained);
    for (uint32_t l = 0; l < s->level_count; l++) {
        const struct pg_level *v = &s->levels[l];
        uint64_t start = s->clock / v->width * v->width;
        bool top = l + 1 == s->level_count;
        uint64_t block = v->width * (s->ring / 2), begin = s->clock / block * block;
        if (v->start != start)
            return broken(a, "start of the clock's bucket", l, start, v->start);
        if (v->limit != (top ? UINT64_MAX : begin + 2 * block))
            return broken(a, "limit of a level", l, begin + 2 * block, v->limit);
        if (v->origin != (top ? 0 : begin - begin / block % 2 * block))
            return broken(a, "origin of a level", l, begin, v->origin);
        if (v->here != (start - v->origin) / v->width)
            return broken(a, "position of the clock", l, (start - v->origin) / v->width, v->here);
    }
    return true;
}

/* Return the number of ticks that a bucket may hold, and the first of these ticks in *first. */
static uint64_t bucket_span(const struct pg_wheel *s, uint32_t bucket, uint64_t *first)
{
    const struct pg_level *v = &s->levels[bucket / s->ring];
    uint32_t position = bucket % s->ring;
    if (bucket >= s->due) {
        *first = 0;
        /* A due bucket may hold ticks up to clock + 1: see wheel_place_due. */
        return s->clock + 2;
    }
    *first = v->start + (position + s->ring - v->here) % s->ring * v->width;
    return *first < v->limit ? v->width : 0;
}

static bool check_member(struct audit *a, uint32_t bucket, uint32_t cell)
{
    const struct wheel *w = a->wheel;
    uint32_t slot = *cell_at(w, cell);
    uint64_t first, span = bucket_span(w->state, bucket, &first), tick;
    if (slot >= w->capacity)
        return broken(a, "a cell holds an id out of bounds", cell, w->capacity, slot);
    if (w->hot[slot].where != cell)
        return broken(a, "slot's cell", slot, cell, w->hot[slot].where);
    if (w->hot[slot].bucket != bucket)
        return broken(a, "slot's bucket", slot, bucket, w->hot[slot].bucket);
    if (!ctl_placed(w->hot[slot].ctl))
        return broken(a, "state of a linked slot", slot, PG_S_ARMED,
                      ctl_state(w->hot[slot].ctl));
    tick = slot_tick(w, slot);
    if (tick < first || tick - first >= span)
        return broken(a, "a deadline lies outside its bucket", slot, first, tick);
    return true;
}

static bool check_chain(struct audit *a, uint32_t bucket)
{
    const struct wheel *w = a->wheel;
    uint32_t cell = w->buckets[bucket].tail, count = 0;
    for (; cell != PG_NIL && count <= w->capacity; count++) {
        if (cell / CHUNK_WORDS >= w->state->chunk_count || cell % CHUNK_WORDS == 0)
            return broken(a, "a cell lies outside the chunks", bucket, w->state->chunk_count, cell);
        if (!check_member(a, bucket, cell))
            return false;
        if (cell % CHUNK_WORDS != 1) {
            cell--;
            continue;
        }
        a->chunks++;
        a->chunk_sum += id_mix(cell / CHUNK_WORDS);
        cell = w->chunks[cell / CHUNK_WORDS].previous;
        if (cell != PG_NIL && cell % CHUNK_WORDS != PG_CHUNK_CELLS)
            return broken(a, "a chunk inside a chain is not full", bucket, PG_CHUNK_CELLS, cell);
    }
    a->linked += count;
    return count == w->buckets[bucket].count
           || broken(a, "count of a bucket", bucket, count, w->buckets[bucket].count);
}

static bool check_occupancy(struct audit *a)
{
    const struct pg_wheel *s = a->wheel->state;
    for (uint32_t l = 0; l < s->level_count; l++) {
        const struct pg_level *v = &s->levels[l];
        uint64_t summary = 0;
        for (uint32_t word = 0; word < 8; word++) {
            uint64_t bits = 0;
            for (uint32_t p = word * 64; p < word * 64 + 64 && p < s->ring; p++)
                bits |= (uint64_t)(a->wheel->buckets[v->first + p].tail != PG_NIL) << (p & 63);
            if (v->occupied[word] != bits)
                return broken(a, "bits of occupied buckets", l * 8 + word, bits,
                              v->occupied[word]);
            summary |= (uint64_t)(bits != 0) << word;
        }
        if (v->summary != summary)
            return broken(a, "summary of occupied buckets", l, summary, v->summary);
        if ((s->occupied >> l & 1) != (summary != 0))
            return broken(a, "bit of an occupied level", l, summary != 0, s->occupied >> l & 1);
    }
    return true;
}

static bool check_pool(struct audit *a)
{
    const struct wheel *w = a->wheel;
    uint32_t count = w->state->chunk_count, free_count = w->free_chunks[0];
    uint64_t expected = 0;
    if (free_count > count || free_count + a->chunks != count)
        return broken(a, "chunks used and free", a->chunks, count, free_count);
    for (uint32_t i = 1; i <= free_count; i++) {
        if (w->free_chunks[i] >= count)
            return broken(a, "a free chunk is out of bounds", i, count, w->free_chunks[i]);
        a->chunk_sum += id_mix(w->free_chunks[i]);
    }
    for (uint32_t i = 0; i < count; i++)
        expected += id_mix(i);
    return a->chunk_sum == expected
           || broken(a, "a chunk is used or free twice", 0, expected, a->chunk_sum);
}

bool wheel_check(const struct wheel *w, uint32_t armed_count, struct pg_fault *fault)
{
    struct audit a = {w, 0, 0, 0, fault};
    uint32_t armed = 0;

    if (!check_clock(&a))
        return false;
    for (uint32_t bucket = 0; bucket < w->state->due + PG_DUE_BUCKETS; bucket++)
        if (!check_chain(&a, bucket))
            return false;
    if (!backlogs_check(w, &a.linked, &a.chunks, &a.chunk_sum, fault))
        return false;
    for (uint32_t slot = 0; slot < w->capacity; slot++)
        armed += ctl_placed(w->hot[slot].ctl);
    if (armed != armed_count || a.linked != armed)
        return broken(&a, "armed slots that are linked", armed_count, armed, a.linked);
    return check_occupancy(&a) && check_pool(&a);
}

/* Test the timing wheel and its slots against a plain list of deadline ticks. */
#include "check.h"
#include "core/core.h"

#define MS 1000000LL
#define NEVER UINT64_MAX

enum { UNLIMITED = UINT32_MAX, TOPICS = 3 };

/* Model of one slot. */
struct expectation {
    uint64_t tick;
    bool armed;
    bool early;                   /* armed before it was due, so it fires in the order of ticks */
};

struct world {
    struct wheel_shape shape;
    struct wheel wheel;
    struct slots slots;
    struct expectation *expected;
    struct rng rng;
    int64_t now_ns;
    uint64_t now_tick;
    uint64_t fired_tick;          /* tick of the last fired timer that was armed early */
    uint32_t fired;
    bool lively;                  /* callbacks arm timers, remove timers and refuse to fire, at
                                     random */
};

static struct world *world_new(int64_t tick_ns, uint32_t fanout, uint32_t capacity, int64_t now_ns)
{
    struct world *x = calloc(1, sizeof *x);
    CHECK(x);
    x->shape = (struct wheel_shape){tick_ns, fanout, capacity, TOPICS};
    x->slots.capacity = capacity;
    x->slots.hot = malloc(capacity * sizeof *x->slots.hot);
    x->slots.free = malloc((capacity + 1) * sizeof *x->slots.free);
    x->wheel.hot = x->slots.hot;
    x->wheel.capacity = capacity;
    x->wheel.topics = TOPICS;
    x->wheel.backlogs = malloc(TOPICS * sizeof *x->wheel.backlogs);
    x->wheel.state = malloc(sizeof *x->wheel.state);
    x->wheel.buckets = malloc(wheel_buckets(&x->shape) * sizeof *x->wheel.buckets);
    x->wheel.chunks = malloc(wheel_chunks(&x->shape) * sizeof *x->wheel.chunks);
    x->wheel.free_chunks = malloc((wheel_chunks(&x->shape) + 1) * sizeof *x->wheel.free_chunks);
    x->expected = calloc(capacity, sizeof *x->expected);
    x->rng.state = 0x9e3779b97f4a7c15u ^ (uint64_t)tick_ns ^ (uint64_t)fanout << 40;
    x->now_ns = now_ns;
    x->now_tick = (uint64_t)(now_ns / tick_ns);
    CHECK(x->slots.hot && x->slots.free && x->wheel.state && x->wheel.buckets && x->wheel.chunks
          && x->wheel.free_chunks && x->expected);
    slots_init(&x->slots);
    wheel_init(&x->wheel, &x->shape, now_ns);
    return x;
}

static void world_free(struct world *x)
{
    free(x->wheel.backlogs);
    free(x->slots.hot);
    free(x->slots.free);
    free(x->wheel.state);
    free(x->wheel.buckets);
    free(x->wheel.chunks);
    free(x->wheel.free_chunks);
    free(x->expected);
    free(x);
}

static uint64_t tick_of(const struct world *x, int64_t deadline_ns)
{
    return deadline_ns <= 0 ? 0 : (uint64_t)(deadline_ns - 1) / (uint64_t)x->shape.tick_ns + 1;
}

static void verify(const struct world *x)
{
    struct pg_fault fault = {0};
    bool ok = slots_check(&x->slots, &fault)
              && wheel_check(&x->wheel, slots_live(&x->slots), &fault);
    if (!ok)
        fprintf(stderr, "%s: %s: at %" PRIu64 ": expected %" PRIu64 ", found %" PRIu64 "\n",
                fault.part, fault.detail, fault.where, fault.expected, fault.found);
    CHECK(ok);
}

/* ---- arming and disarming, in the model and in the slot ------------------------------- */

static void expect(struct world *x, uint32_t slot, int64_t deadline_ns)
{
    uint64_t tick = tick_of(x, deadline_ns);
    x->slots.hot[slot].ctl = ctl_of(1, PG_S_ARMED);
    x->slots.hot[slot].deadline_ns = deadline_ns;
    x->expected[slot] = (struct expectation){tick, true, tick > x->wheel.state->clock};
}

static uint32_t arm(struct world *x, int64_t deadline_ns)
{
    uint32_t slot = slots_take(&x->slots);
    if (slot != PG_NIL) {
        expect(x, slot, deadline_ns);
        wheel_place(&x->wheel, slot);
    }
    return slot;
}

static void forget(struct world *x, uint32_t slot)
{
    CHECK(x->expected[slot].armed);
    x->expected[slot].armed = false;
    x->slots.hot[slot].ctl = ctl_of(1, PG_S_FREE);
    slots_give(&x->slots, slot);
}

static int64_t random_delay(struct world *x)
{
    int64_t tick = x->shape.tick_ns, span = INT64_MAX - x->now_ns;
    int64_t delay;
    switch (rng_below(&x->rng, 8)) {
    case 0: return 0;
    case 1: return span < 1 ? span : 1;
    case 2: return span;
    case 3: return -(int64_t)rng_below(&x->rng, 3 * (uint64_t)tick);
    case 4: delay = (int64_t)(rng_next(&x->rng) >> (1 + rng_below(&x->rng, 62))); break;
    case 5: delay = (int64_t)rng_below(&x->rng, 5 * (uint64_t)tick); break;
    case 6: delay = (int64_t)rng_below(&x->rng, 4 * x->shape.fanout) * tick; break;
    default: delay = (int64_t)rng_below(&x->rng, 70000) * tick / 3;
    }
    return delay < span ? delay : span;
}

/* Return the first armed slot at or after a random slot; PG_NIL = none. */
static uint32_t random_armed(struct world *x)
{
    uint32_t n = x->slots.capacity, slot = (uint32_t)rng_below(&x->rng, n);
    for (uint32_t i = 0; i < n; i++, slot = (slot + 1) % n)
        if (x->expected[slot].armed)
            return slot;
    return PG_NIL;
}

static void disarm(struct world *x, uint32_t slot)
{
    wheel_remove(&x->wheel, slot);
    forget(x, slot);
}

/* ---- firing --------------------------------------------------------------------------- */

static bool refuses(struct world *x) { return x->lively && rng_below(&x->rng, 16) == 0; }

/* Act as a callback that may remove another timer and may arm a new timer. */
static void meddle(struct world *x, uint32_t slot)
{
    uint32_t other = random_armed(x);
    if (other != PG_NIL && other != slot && rng_below(&x->rng, 8) == 0)
        disarm(x, other);
    if (rng_below(&x->rng, 4) == 0)
        arm(x, x->now_ns + random_delay(x));
}

static bool on_due(void *context, uint32_t slot)
{
    struct world *x = context;
    struct expectation e = x->expected[slot];

    CHECK(e.armed && e.tick <= x->now_tick);
    if (refuses(x))
        return false;
    if (e.early) {
        CHECK(e.tick >= x->fired_tick);
        x->fired_tick = e.tick;
    }
    x->fired++;
    if (x->lively) {
        meddle(x, slot);
        if (rng_below(&x->rng, 4) == 0) {
            expect(x, slot, x->now_ns + random_delay(x));
            wheel_place(&x->wheel, slot);
            return true;
        }
    }
    forget(x, slot);
    return true;
}

static uint64_t earliest(const struct world *x)
{
    uint64_t tick = NEVER;
    for (uint32_t slot = 0; slot < x->slots.capacity; slot++)
        if (x->expected[slot].armed && x->expected[slot].tick < tick)
            tick = x->expected[slot].tick;
    return tick;
}

static int64_t tick_ns_of(const struct world *x, uint64_t tick)
{
    int64_t ns;
    return __builtin_mul_overflow((int64_t)tick, x->shape.tick_ns, &ns) ? INT64_MAX : ns;
}

/* Check the time of the next wake-up. `done` is true if the last advance was to now_ns and left no
 * due timer. */
static void verify_next(const struct world *x, bool done)
{
    uint64_t tick = earliest(x);
    int64_t next = wheel_next_ns(&x->wheel), deadline = wheel_next_deadline_ns(&x->wheel);

    CHECK(next <= deadline);
    if (tick == NEVER) {
        CHECK_EQUAL(next, INT64_MAX);
        return;
    }
    if (tick <= x->wheel.state->clock)
        CHECK(next <= x->now_ns && deadline <= x->now_ns);
    else
        CHECK(next <= tick_ns_of(x, tick) && deadline <= tick_ns_of(x, tick));
    if (done)
        CHECK(tick > x->now_tick && (next > x->now_ns || next == INT64_MAX));
    if (tick > x->wheel.state->clock && x->wheel.state->occupied == 1)
        CHECK_EQUAL(deadline, tick_ns_of(x, tick));
}

static bool advance_to(struct world *x, int64_t now_ns, uint32_t budget)
{
    uint64_t moved = x->wheel.state->moved;
    uint32_t fired = x->fired, handled;
    bool more;

    if (now_ns > x->now_ns)
        x->now_ns = now_ns;
    x->now_tick = (uint64_t)(x->now_ns / x->shape.tick_ns);
    handled = wheel_advance(&x->wheel, now_ns, budget, on_due, x, &more);
    CHECK(handled <= budget);
    CHECK_EQUAL(handled, x->fired - fired + x->wheel.state->moved - moved);
    verify_next(x, !more && now_ns == x->now_ns);
    return more;
}

static void settle(struct world *x, int64_t now_ns, uint32_t budget)
{
    while (advance_to(x, now_ns, budget))
        verify(x);
    verify(x);
}

/* ---- random histories ------------------------------------------------------------------- */

static void random_arms(struct world *x)
{
    const uint32_t count = (uint32_t)rng_below(&x->rng, 60);
    for (uint32_t i = 0; i < count; i++)
        arm(x, x->now_ns + random_delay(x));
}

static void random_removals(struct world *x)
{
    uint32_t most = (uint32_t)rng_below(&x->rng, 60);
    for (uint32_t slot = random_armed(x); slot < x->slots.capacity && most > 0; slot++)
        if (x->expected[slot].armed) {
            disarm(x, slot);
            most--;
        }
    if (random_armed(x) != PG_NIL)
        disarm(x, random_armed(x));
}

static int64_t random_step(struct world *x)
{
    int64_t tick = x->shape.tick_ns, next = wheel_next_ns(&x->wheel), step;
    switch (rng_below(&x->rng, 16)) {
    case 0: return x->now_ns;
    case 1: return x->now_ns - tick;
    case 2: case 3: step = (int64_t)rng_below(&x->rng, 2 * (uint64_t)tick); break;
    case 4: step = (int64_t)rng_below(&x->rng, 3 * x->shape.fanout) * tick; break;
    case 5: step = (int64_t)(rng_next(&x->rng) >> (5 + rng_below(&x->rng, 58))); break;
    case 6: case 7: case 8: step = tick; break;
    default: step = next - x->now_ns < 1LL << 50 ? next - x->now_ns : tick;
    }
    return step < INT64_MAX - x->now_ns ? x->now_ns + step : INT64_MAX;
}

static void random_history(int64_t tick_ns, uint32_t fanout, uint32_t budget, uint32_t steps)
{
    uint32_t capacity = 50 + 450 * (budget != 1);
    struct world *x = world_new(tick_ns, fanout, capacity, fanout % 3 ? 12345 * tick_ns : 0);
    x->lively = true;
    for (uint32_t step = 0; step < steps; step++) {
        if (rng_below(&x->rng, 3) == 0)
            random_arms(x);
        if (rng_below(&x->rng, 5) == 0)
            random_removals(x);
        verify(x);
        advance_to(x, random_step(x), budget);
        verify(x);
    }
    x->lively = false;
    settle(x, INT64_MAX, budget);
    for (uint32_t slot = 0; slot < capacity; slot++)
        CHECK(!x->expected[slot].armed || x->expected[slot].tick > x->now_tick);
    world_free(x);
}

static void test_random_histories(void)
{
    static const int64_t ticks[] = {1000, 65536, MS, 100 * MS};
    static const uint32_t fanouts[] = {2, 3, 20, 64, 255, 256}, budgets[] = {1, 7, UNLIMITED};
    for (unsigned t = 0; t < 4; t++)
        for (unsigned f = 0; f < 6; f++)
            for (unsigned b = 0; b < 3; b++)
                random_history(ticks[t], fanouts[f], budgets[b], 250);
}

/* ---- named cases -------------------------------------------------------------------------- */

static uint32_t level_of(const struct world *x, uint32_t slot)
{
    return x->slots.hot[slot].bucket / x->wheel.state->ring;
}

/* Arm a timer at 0 ms. Check at each millisecond that it descends level by level and fires in
 * time. */
static void descend(int64_t delay_ms, uint32_t top)
{
    struct world *x = world_new(MS, 20, 100, 0);
    uint32_t slot = arm(x, delay_ms * MS), level = top;
    CHECK_EQUAL(level_of(x, slot), top);
    for (int64_t now_ms = 1; now_ms <= delay_ms; now_ms++) {
        CHECK(!advance_to(x, now_ms * MS - 1, UNLIMITED));
        CHECK_EQUAL(x->fired, 0);
        CHECK(!advance_to(x, now_ms * MS, UNLIMITED));
        verify(x);
        if (x->expected[slot].armed) {
            CHECK(level_of(x, slot) == level || level_of(x, slot) == level - 1);
            level = level_of(x, slot);
        }
    }
    CHECK_EQUAL(level, 0);
    CHECK_EQUAL(x->fired, 1);
    world_free(x);
}

static void test_445_ms_comes_down_level_by_level(void)
{
    descend(445, 1);
    descend(8445, 2);
    descend(170445, 3);
}

/* Reach the bucket of 440..459 ms late, because the clock jumps to `late_ms` after the beginning of
 * the bucket. */
static void reach_late(int64_t late_ms)
{
    static const int64_t deadlines_ms[] = {440, 441, 444, 448, 449, 455, 459};
    struct world *x = world_new(MS, 20, 100, 0);
    uint32_t slots[7], due = 0;

    for (unsigned i = 0; i < 7; i++)
        slots[i] = arm(x, deadlines_ms[i] * MS);
    CHECK_EQUAL(level_of(x, slots[0]), 1);
    CHECK(!advance_to(x, (440 + late_ms) * MS, UNLIMITED));
    verify(x);
    for (unsigned i = 0; i < 7; i++) {
        bool fired = deadlines_ms[i] <= 440 + late_ms;
        due += fired;
        CHECK(x->expected[slots[i]].armed == !fired);
        CHECK_EQUAL(x->slots.hot[slots[i]].deadline_ns, deadlines_ms[i] * MS);
    }
    CHECK_EQUAL(x->fired, due);
    for (unsigned i = due; i < 7; i++) {
        CHECK_EQUAL(wheel_next_ns(&x->wheel), deadlines_ms[i] * MS);
        CHECK(!advance_to(x, deadlines_ms[i] * MS - 1, UNLIMITED));
        CHECK_EQUAL(x->fired, i);
        CHECK(!advance_to(x, deadlines_ms[i] * MS, UNLIMITED));
        CHECK_EQUAL(x->fired, i + 1);
    }
    world_free(x);
}

static void test_coarse_bucket_reached_late(void)
{
    reach_late(1);
    reach_late(8);
}

static void test_full_arena_of_one_bucket_and_of_all(void)
{
    struct world *x = world_new(MS, 256, 5000, 0);
    for (uint32_t i = 0; i < 5000; i++)
        CHECK(arm(x, 7200 * 1000 * MS) != PG_NIL);
    CHECK(arm(x, MS) == PG_NIL);
    verify(x);
    settle(x, 7200 * 1000 * MS, 7);
    CHECK_EQUAL(x->fired, 5000);
    for (uint32_t i = 0; i < 5000; i++)
        CHECK(arm(x, x->now_ns + random_delay(x)) != PG_NIL);
    verify(x);
    world_free(x);
}

static void test_huge_jumps(void)
{
    struct world *x = world_new(1000, 2, 64, 0);
    for (int i = 0; i < 63; i++)
        arm(x, 1LL << i);
    settle(x, INT64_MAX, UNLIMITED);
    CHECK_EQUAL(x->fired, 63);
    CHECK_EQUAL(wheel_next_ns(&x->wheel), INT64_MAX);
    arm(x, INT64_MAX);
    CHECK(!advance_to(x, INT64_MAX, UNLIMITED));
    CHECK_EQUAL(x->fired, 63);          /* the tick of INT64_MAX ends after the last representable
                                           time */
    world_free(x);
}

/* Rearm each fired timer so that it is due at once. The timers with deadlines 3 ms - 1 ns and 5 ms
 * are not rearmed. */
static bool rearm_due(void *context, uint32_t slot)
{
    struct world *x = context;
    x->fired++;
    if (x->slots.hot[slot].deadline_ns == 5 * MS || x->slots.hot[slot].deadline_ns == 3 * MS - 1) {
        forget(x, slot);
        return true;
    }
    expect(x, slot, 0);
    wheel_place(&x->wheel, slot);
    return true;
}

static void test_newcomers_that_are_due_starve_nobody(void)
{
    struct world *x = world_new(MS, 256, 100, 4 * MS);
    uint32_t older = arm(x, 3 * MS - 1), later = arm(x, 5 * MS);
    bool more;
    for (int i = 0; i < 20; i++)
        arm(x, 0);
    for (int i = 0; i < 5; i++) {
        wheel_advance(&x->wheel, 6 * MS, 10, rearm_due, x, &more);
        CHECK(more);
        verify(x);
    }
    CHECK(!x->expected[older].armed && !x->expected[later].armed);
    world_free(x);
}

static bool refuse(void *context, uint32_t slot)
{
    struct world *x = context;
    x->fired += slot != PG_NIL;
    return false;
}

static void test_refused_timer_keeps_its_place(void)
{
    struct world *x = world_new(MS, 256, 100, 0);
    bool more = false;
    for (int i = 0; i < 40; i++)
        arm(x, (1 + i / 20) * MS);
    for (int i = 1; i <= 3; i++) {
        CHECK_EQUAL(wheel_advance(&x->wheel, 2 * MS, UNLIMITED, refuse, x, &more), 0);
        CHECK(more && wheel_next_ns(&x->wheel) <= 2 * MS);
        CHECK_EQUAL(x->fired, i);
        verify(x);
    }
    CHECK(!advance_to(x, 2 * MS, UNLIMITED));   /* advance_to checks the order of ticks */
    CHECK_EQUAL(x->fired, 43);
    world_free(x);
}

/* Until `end_ns`, sleep again and again to the time that wheel_next_ns returns; return the number
 * of wake-ups. */
static uint32_t sleep_until(struct world *x, int64_t end_ns)
{
    uint32_t wakes = 0;
    for (int64_t next; (next = wheel_next_ns(&x->wheel)) <= end_ns; wakes++) {
        bool more;
        CHECK(next > x->now_ns);
        x->now_ns = next;
        x->now_tick = (uint64_t)(next / x->shape.tick_ns);
        wheel_advance(&x->wheel, next, UNLIMITED, on_due, x, &more);
        CHECK(!more);
    }
    return wakes;
}

static void test_idle_wheel_sleeps(void)
{
    enum { TIMERS = 300000 };
    static const uint32_t fanouts[] = {20, 256};
    for (unsigned f = 0; f < 2; f++) {
        struct world *x = world_new(MS, fanouts[f], TIMERS, 0);
        int64_t hour_ns = 3600 * 1000 * MS;
        for (uint32_t i = 0; i < TIMERS; i++)
            arm(x, hour_ns + (int64_t)rng_below(&x->rng, 60000) * MS);
        CHECK(sleep_until(x, hour_ns / 2) < 1800);
        CHECK(sleep_until(x, hour_ns - 60000 * MS) < 1800);
        verify(x);
        CHECK_EQUAL(x->fired, 0);
        sleep_until(x, 2 * hour_ns);
        CHECK_EQUAL(x->fired, TIMERS);
        CHECK_EQUAL(wheel_next_ns(&x->wheel), INT64_MAX);
        verify(x);
        world_free(x);
    }
}

/* If the wheel is advanced at every tick, timers move down a few at a time, so that cascades find
 * empty buckets. */
static void test_gradual_drain_spreads_the_work(void)
{
    enum { TIMERS = 100000 };
    struct world *x = world_new(MS, 256, TIMERS, 0);
    uint64_t worst = 0;
    for (uint32_t i = 0; i < TIMERS; i++)
        arm(x, (int64_t)(1 + rng_below(&x->rng, 10000)) * MS);
    for (int64_t tick = 1; tick <= 10000; tick++) {
        uint64_t before = x->wheel.state->moved, moved;
        bool more;
        x->now_tick = (uint64_t)tick;
        x->now_ns = tick * MS;
        wheel_advance(&x->wheel, x->now_ns, UNLIMITED, on_due, x, &more);
        moved = x->wheel.state->moved - before;
        worst = moved > worst ? moved : worst;
    }
    CHECK_EQUAL(x->fired, TIMERS);
    CHECK(worst < 600);                  /* most timers moved in one tick; a coarse bucket has about
                                            2560 */
    verify(x);
    world_free(x);
}

/* ---- the check finds damage ----------------------------------------------------------------- */

static void expect_fault(const struct world *x, const char *detail)
{
    struct pg_fault fault = {0};
    if (slots_check(&x->slots, &fault))
        wheel_check(&x->wheel, slots_live(&x->slots), &fault);
    if (strcmp(fault.detail, detail) != 0)
        fprintf(stderr, "found: %s, expected: %s\n", fault.detail, detail);
    CHECK(strcmp(fault.detail, detail) == 0);
}

/* Break one field, expect the fault, and restore the field. */
#define BREAK(x, field, value, detail)      \
    do {                                  \
        uint64_t good_ = (field);         \
        (field) = (value);                \
        expect_fault((x), (detail));        \
        (field) = good_;                  \
        verify(x);                        \
    } while (0)

static void test_check_names_the_fault(void)
{
    struct world *x = world_new(MS, 20, 300, 0);
    struct wheel *w = &x->wheel;
    struct pg_wheel *s = w->state;
    uint32_t slot = 0, full;
    for (int i = 0; i < 50; i++)
        slot = arm(x, 100 * MS);
    full = w->chunks[s->chunk_count > 0 ? w->hot[slot].where / 16 : 0].previous;
    verify(x);
    BREAK(x, w->hot[slot].where, 1, "slot's cell");
    BREAK(x, w->hot[slot].bucket, 1, "slot's bucket");
    BREAK(x, w->hot[slot].deadline_ns, 3 * MS, "a deadline lies outside its bucket");
    BREAK(x, w->hot[slot].ctl, ctl_of(1, PG_S_PARKED), "state of a linked slot");
    BREAK(x, w->hot[slot].ctl, 0, "height of the free stack");
    BREAK(x, x->slots.free[1], x->slots.free[2], "the free stack holds a slot twice");
    BREAK(x, x->slots.free[1], slot, "the free stack holds a slot in use");
    BREAK(x, x->slots.free[1], 300, "the free stack holds an id out of bounds");
    BREAK(x, x->slots.free[0], 301, "the free stack is larger than the capacity");
    BREAK(x, w->buckets[w->hot[slot].bucket].count, 49, "count of a bucket");
    BREAK(x, w->chunks[w->hot[slot].where / 16].previous, full - 1,
          "a chunk inside a chain is not full");
    BREAK(x, w->chunks[w->hot[slot].where / 16].slots[0], 300, "a cell holds an id out of bounds");
    BREAK(x, w->buckets[0].tail, s->chunk_count * 16 + 1, "a cell lies outside the chunks");
    BREAK(x, w->free_chunks[0], w->free_chunks[0] - 1, "chunks used and free");
    BREAK(x, w->free_chunks[1], s->chunk_count, "a free chunk is out of bounds");
    BREAK(x, w->free_chunks[1], w->free_chunks[2], "a chunk is used or free twice");
    BREAK(x, s->occupied, 0, "bit of an occupied level");
    BREAK(x, s->levels[1].summary, 3, "summary of occupied buckets");
    BREAK(x, s->levels[1].occupied[0], 0, "bits of occupied buckets");
    BREAK(x, s->levels[1].limit, 0, "limit of a level");
    BREAK(x, s->levels[1].origin, 20, "origin of a level");
    BREAK(x, s->levels[1].here, 1, "position of the clock");
    BREAK(x, s->levels[1].start, 20, "start of the clock's bucket");
    BREAK(x, s->drained, 1, "gradual draining is past the clock");
    BREAK(x, s->open, 2, "roles of the due buckets");
    BREAK(x, s->ring, 0, "shape of the wheel");
    world_free(x);
}

/* ---- backlogs ------------------------------------------------------------------------- */

struct queue {                           /* model of a backlog */
    uint32_t slots[300], count;
};

static void queue_remove(struct queue *q, uint32_t n)
{
    if (n != 0)
        q->slots[n] = q->slots[0];       /* the oldest member moves into the hole */
    q->count--;
    for (uint32_t i = 0; i < q->count; i++)
        q->slots[i] = q->slots[i + 1];
}

static void hold(struct world *x, struct queue *q, uint32_t topic)
{
    const uint32_t slot = slots_take(&x->slots);
    if (slot == PG_NIL)
        return;
    expect(x, slot, 0);
    x->slots.hot[slot].topic = (uint16_t)topic;
    backlog_push(&x->wheel, slot);
    q->slots[q->count++] = slot;
}

static void test_a_backlog_is_a_queue(void)
{
    struct world *x = world_new(MS, 20, 300, 0);
    static struct queue queues[TOPICS];
    memset(queues, 0, sizeof queues);
    for (int i = 0; i < 20000; i++) {
        const uint32_t topic = (uint32_t)rng_below(&x->rng, TOPICS);
        struct queue *q = &queues[topic];
        const uint64_t grows = i / 2000 % 2 ? 1 : 5;
        if (rng_below(&x->rng, 6) < grows) {
            hold(x, q, topic);
        } else if (q->count != 0) {
            const uint32_t n = rng_below(&x->rng, 2) ? 0 : (uint32_t)rng_below(&x->rng, q->count);
            disarm(x, q->slots[n]);
            queue_remove(q, n);
        }
        CHECK_EQUAL(backlog_peek(&x->wheel, topic, 0), q->count > 0 ? q->slots[0] : PG_NIL);
        CHECK_EQUAL(backlog_peek(&x->wheel, topic, 1), q->count > 1 ? q->slots[1] : PG_NIL);
        if (i % 16 == 0)
            verify(x);
    }
    CHECK_EQUAL(x->wheel.state->backlog, queues[0].count + queues[1].count + queues[2].count);
    world_free(x);
}

static void test_check_names_the_fault_of_a_backlog(void)
{
    struct world *x = world_new(MS, 20, 300, 0);
    struct wheel *w = &x->wheel;
    struct queue q = {.count = 0};
    for (int i = 0; i < 40; i++)
        hold(x, &q, 1);
    struct pg_hot *h = &w->hot[q.slots[0]];
    struct pg_backlog *backlog = &w->backlogs[1];
    verify(x);
    BREAK(x, h->where, 2, "slot's cell in a backlog");
    BREAK(x, h->bucket, 1, "slot's cell in a backlog");
    BREAK(x, h->topic, 2, "slot's cell in a backlog");
    BREAK(x, h->ctl, ctl_of(1, PG_S_PARKED), "state of a linked slot");
    BREAK(x, backlog->tail, backlog->tail - 1, "tail of a backlog");
    BREAK(x, backlog->head, w->state->chunk_count * 16 + 1, "a cell lies outside the chunks");
    BREAK(x, w->chunks[h->where / 16].slots[0], 300, "a cell holds an id out of bounds");
    BREAK(x, w->state->backlog, 41, "members of all backlogs");
    world_free(x);
}

static void test_rebuild(void)
{
    struct world *x = world_new(MS, 64, 200, 0);
    for (int i = 0; i < 150; i++)
        arm(x, random_delay(x));
    for (int i = 0; i < 70; i++)
        disarm(x, random_armed(x));
    x->slots.free[0] = 7;
    slots_rebuild(&x->slots);
    wheel_init(&x->wheel, &x->shape, 0);
    for (uint32_t slot = 0; slot < 200; slot++)
        if (x->expected[slot].armed)
            wheel_place(&x->wheel, slot);
    verify(x);
    settle(x, INT64_MAX, UNLIMITED);
    world_free(x);
}

int main(void)
{
    RUN(test_445_ms_comes_down_level_by_level);
    RUN(test_coarse_bucket_reached_late);
    RUN(test_full_arena_of_one_bucket_and_of_all);
    RUN(test_huge_jumps);
    RUN(test_newcomers_that_are_due_starve_nobody);
    RUN(test_refused_timer_keeps_its_place);
    RUN(test_idle_wheel_sleeps);
    RUN(test_gradual_drain_spreads_the_work);
    RUN(test_check_names_the_fault);
    RUN(test_a_backlog_is_a_queue);
    RUN(test_check_names_the_fault_of_a_backlog);
    RUN(test_rebuild);
    RUN(test_random_histories);
    return 0;
}

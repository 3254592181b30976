/*
 * bench.c - run one workload on one timer structure, and print a JSON object.
 *
 *   bench STRUCTURE WORKLOAD PENDING SEED
 *
 * STRUCTURE: keyed, wheel, heap, linked, libuv, libevent. WORKLOAD:
 *
 *   ops    PENDING timers due in 1 ms .. 1 h: add all, cancel every second timer in random order,
 *          add as many timers again, replace and extend all timers in random order if the structure
 *          has these functions, then expire all timers; before each call of expire, ask for the
 *          time of that call
 *   mix    steady state of PENDING timers with delays as in a purgatory: lognormal, median 5 s,
 *          sigma 1; 90 % are cancelled at a uniform fraction of their delay; 1 ms ticks
 *   pause  PENDING timers due within 30 s, expired at every 1 ms tick; one value for each tick
 *   bytes  memory per timer
 *
 * All times are nanoseconds. For ops they are processor time per timer. For mix and pause they
 * are real time per tick, because one reading of the processor clock would cost as much as ten
 * timers. Random numbers are drawn, and the cancels of mix are looked up, outside of the measured
 * sections. A batch has at most 1024 timers.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "timers.h"

#define MS 1000000LL
#define HOUR_NS (3600 * 1000 * MS)
enum { BATCH = 1024, PAUSE_TICKS = 30000, MIX_TICKS = 2000, NEXT_CALLS = 64 };

clockid_t measured_clock = CLOCK_MONOTONIC;
int64_t outside_ns;

static uint64_t random_state;

static uint64_t random_bits(void)        /* xorshift64* (Vigna 2016) */
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545f4914f6cdd1du;
}

static double random_unit(void) { return ((double)(random_bits() >> 11) + 0.5) * 0x1p-53; }

static int64_t random_between(int64_t low_ns, int64_t high_ns)
{
    return low_ns + (int64_t)(random_unit() * (double)(high_ns - low_ns));
}

static void expect(int true_or_stop, const char *subject)
{
    if (!true_or_stop) {
        fprintf(stderr, "bench: %s\n", subject);
        exit(1);
    }
}

/* Time on the workload's clock, without the time of the benchmark's own work. */
static int64_t spent_ns(void) { return clock_ns(measured_clock) - outside_ns; }

/* ---- batches ---------------------------------------------------------------------------- */

static void add_all(const struct kind *k, struct timers *t, const int64_t *deadlines_ns,
                    uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i += BATCH)
        k->add(t, deadlines_ns + i, ids + i, count - i < BATCH ? count - i : BATCH);
}

static void cancel_all(const struct kind *k, struct timers *t, const uint32_t *ids,
                       uint32_t count)
{
    for (uint32_t i = 0; i < count; i += BATCH)
        k->cancel(t, ids + i, count - i < BATCH ? count - i : BATCH);
}

/* ---- ops --------------------------------------------------------------------------------- */

static void shuffle(uint32_t *ids, uint32_t count)
{
    for (uint32_t i = count; i > 1; i--) {
        uint32_t j = (uint32_t)(random_bits() % i), id = ids[i - 1];
        ids[i - 1] = ids[j];
        ids[j] = id;
    }
}

static void draw_deadlines(int64_t *deadlines_ns, uint32_t count, int64_t after_ns)
{
    for (uint32_t i = 0; i < count; i++)
        deadlines_ns[i] = after_ns + random_between(MS, HOUR_NS);
}

static void expire_all(const struct kind *k, struct timers *t, uint32_t pending)
{
    uint64_t fired = 0;
    for (int64_t next_ns; (next_ns = k->next_ns(t)) != INT64_MAX;)
        fired += k->expire(t, next_ns);
    expect(fired == pending, "a timer was lost or fired twice");
}

/* Return the time since *mark_ns, and set *mark_ns to the present time. */
static int64_t lap_ns(int64_t *mark_ns)
{
    int64_t before_ns = *mark_ns;
    *mark_ns = spent_ns();
    return *mark_ns - before_ns;
}

typedef void (*move_fn)(struct timers *, const int64_t *deadlines_ns, const uint32_t *ids,
                        uint32_t count);

/* Give all timers, in random order, deadlines after `after_ns`, and print the time per timer. */
static void move_all(move_fn move, const char *name, struct timers *t, int64_t *deadlines_ns,
                     uint32_t *ids, uint32_t count, int64_t after_ns)
{
    int64_t mark_ns = 0;
    if (move == NULL)
        return;
    shuffle(ids, count);
    draw_deadlines(deadlines_ns, count, after_ns);
    lap_ns(&mark_ns);
    for (uint32_t i = 0; i < count; i += BATCH)
        move(t, deadlines_ns + i, ids + i, count - i < BATCH ? count - i : BATCH);
    printf(", \"%s\": %.3f", name, (double)lap_ns(&mark_ns) / count);
}

static void run_ops(const struct kind *k, struct timers *t, uint32_t pending)
{
    uint32_t *ids = memory((size_t)pending * sizeof *ids), half = pending / 2;
    int64_t *deadlines_ns = memory((size_t)pending * sizeof *deadlines_ns), mark_ns = 0;
    double fresh_ns, cancel_ns, recycled_ns;

    measured_clock = CLOCK_THREAD_CPUTIME_ID;
    draw_deadlines(deadlines_ns, pending, 0);
    lap_ns(&mark_ns);
    add_all(k, t, deadlines_ns, ids, pending);
    fresh_ns = (double)lap_ns(&mark_ns) / pending;
    shuffle(ids, pending);
    lap_ns(&mark_ns);
    cancel_all(k, t, ids, half);
    cancel_ns = (double)lap_ns(&mark_ns) / half;
    draw_deadlines(deadlines_ns, half, 0);
    lap_ns(&mark_ns);
    add_all(k, t, deadlines_ns, ids, half);
    recycled_ns = (double)lap_ns(&mark_ns) / half;
    printf("{\"add fresh\": %.3f, \"add recycled\": %.3f, \"cancel\": %.3f", fresh_ns, recycled_ns,
           cancel_ns);
    move_all(k->replace, "replace", t, deadlines_ns, ids, pending, 0);
    move_all(k->extend, "extend", t, deadlines_ns, ids, pending, HOUR_NS);
    lap_ns(&mark_ns);
    expire_all(k, t, pending);
    printf(", \"expire\": %.3f}\n", (double)lap_ns(&mark_ns) / pending);
    free(ids);
    free(deadlines_ns);
}

/* ---- ticks --------------------------------------------------------------------------------- */

static void print_ticks(const char *name, const int64_t *ticks_ns, int count)
{
    printf("\"%s\": [", name);
    for (int i = 0; i < count; i++)
        printf("%s%" PRId64, i ? "," : "", ticks_ns[i]);
    printf("]");
}

/* ---- mix ---------------------------------------------------------------------------------- */

/* Planned cancels and expiries. The timers to cancel are in linked lists, one for each tick. */
struct plan {
    uint32_t lists[MIX_TICKS];    /* id of the first timer to cancel at each tick */
    uint32_t *next;               /* id of the next timer to cancel at the same tick, for each
                                     timer */
    uint64_t expiries;            /* number of expiries within the measured ticks */
};

static void plan_timer(struct plan *p, uint32_t id, double cancel_ms, int64_t deadline_ns)
{
    int64_t due_tick = (deadline_ns + MS - 1) / MS;
    double cancel_tick = ceil(cancel_ms);
    if (cancel_tick >= (double)due_tick) {
        p->expiries += due_tick < MIX_TICKS;
    } else if (cancel_tick < MIX_TICKS) {
        p->next[id] = p->lists[(int)cancel_tick];
        p->lists[(int)cancel_tick] = id;
    }
}

static double random_normal(void)
{
    return sqrt(-2 * log(random_unit())) * cos(6.283185307179586 * random_unit());
}

static double random_delay_ms(double median_ms) { return 1 + median_ms * exp(random_normal()); }

struct draft {                    /* random timers that are not added yet */
    double *cancel_ms;
    int64_t *deadlines_ns;
    uint32_t *ids;
};

static struct draft draft_new(uint32_t size)
{
    return (struct draft){memory(size * sizeof(double)), memory(size * sizeof(int64_t)),
                          memory(size * sizeof(uint32_t))};
}

static void draft_free(struct draft *d)
{
    free(d->cancel_ms);
    free(d->deadlines_ns);
    free(d->ids);
}

static void draft_set(struct draft *d, uint32_t i, double cancel_ms, double due_ms)
{
    d->cancel_ms[i] = cancel_ms;
    d->deadlines_ns[i] = (int64_t)(due_ms * (double)MS);
}

/* Draw a timer that is pending in the steady state, with times relative to the start. The draw
 * accounts for the fact that a timer that stays pending longer is more likely to be pending at any
 * given time. */
static void draw_pending(struct draft *d, uint32_t i)
{
    double delay_ms = random_delay_ms(5000 * exp(1.0));
    bool expires = random_unit() < 0.1 / (0.1 + 0.9 * 0.5);
    double stay_ms = expires ? delay_ms : delay_ms * sqrt(random_unit());
    double age_ms = stay_ms * random_unit();
    draft_set(d, i, expires ? INFINITY : stay_ms - age_ms, delay_ms - age_ms);
}

static void draw_arrival(struct draft *d, uint32_t i, double now_ms)
{
    double delay_ms = random_delay_ms(5000);
    bool expires = random_unit() < 0.1;
    draft_set(d, i, expires ? INFINITY : now_ms + delay_ms * random_unit(), now_ms + delay_ms);
}

static void draft_plan(const struct draft *d, uint32_t count, struct plan *p)
{
    for (uint32_t i = 0; i < count; i++)
        plan_timer(p, d->ids[i], d->cancel_ms[i], d->deadlines_ns[i]);
}

static uint32_t collect(const struct plan *p, uint32_t tick, uint32_t *ids)
{
    uint32_t count = 0;
    for (uint32_t id = p->lists[tick]; id != NIL; id = p->next[id])
        ids[count++] = id;
    return count;
}

/* Fill the structure with the pending timers of the steady state. */
static void stand(const struct kind *k, struct timers *t, uint32_t pending, struct plan *p)
{
    struct draft d = draft_new(pending);
    for (uint32_t i = 0; i < pending; i++)
        draw_pending(&d, i);
    add_all(k, t, d.deadlines_ns, d.ids, pending);
    draft_plan(&d, pending, p);
    draft_free(&d);
}

static double next_call_ns(const struct kind *k, const struct timers *t)
{
    int64_t begin_ns = clock_ns(CLOCK_MONOTONIC);
    for (int i = 0; i < NEXT_CALLS; i++)
        expect(k->next_ns(t) > 0, "no next deadline");
    return (double)(clock_ns(CLOCK_MONOTONIC) - begin_ns) / NEXT_CALLS;
}

/* Run one tick: expire due timers, cancel `cancels`, add the first `adds` timers of `d`. */
static uint64_t mix_tick(const struct kind *k, struct timers *t, uint32_t tick, struct draft *d,
                         uint32_t adds, const uint32_t *cancels, uint32_t cancel_count)
{
    uint64_t fired = k->expire(t, tick * MS);
    cancel_all(k, t, cancels, cancel_count);
    add_all(k, t, d->deadlines_ns, d->ids, adds);
    return fired;
}

static void run_mix(const struct kind *k, struct timers *t, uint32_t pending)
{
    const double stay_ms = (5000 * exp(0.5) + 1) * (0.1 + 0.9 * 0.5);
    uint32_t capacity = pending + pending / 8, adds = (uint32_t)(pending / stay_ms + 0.5);
    uint32_t *cancels = memory((size_t)capacity * sizeof *cancels);
    int64_t ticks_ns[MIX_TICKS] = {0};
    double next_ns = 0;
    uint64_t fired = 0, operations = 0;
    struct draft d = draft_new(adds);
    struct plan *p = memory(sizeof *p);

    p->next = memory((size_t)capacity * sizeof *p->next);
    memset(p->lists, 0xff, sizeof p->lists);
    stand(k, t, pending, p);
    for (uint32_t tick = 1; tick < MIX_TICKS; tick++) {
        uint32_t count = collect(p, tick, cancels);
        for (uint32_t i = 0; i < adds; i++)
            draw_arrival(&d, i, tick);
        ticks_ns[tick] = -spent_ns();
        fired += mix_tick(k, t, tick, &d, adds, cancels, count);
        ticks_ns[tick] += spent_ns();
        draft_plan(&d, adds, p);
        next_ns += next_call_ns(k, t);
        operations += adds + count;
    }
    expect(fired == p->expiries, "a timer was lost or fired twice");
    printf("{\"operations\": %" PRIu64 ", \"next deadline\": %.3f, ", operations + fired,
           next_ns / (MIX_TICKS - 1));
    print_ticks("mix", ticks_ns, MIX_TICKS);
    printf("}\n");
    draft_free(&d);
    free(cancels);
    free(p->next);
    free(p);
}

/* ---- pause --------------------------------------------------------------------------------- */

static void run_pause(const struct kind *k, struct timers *t, uint32_t pending)
{
    int64_t *pauses_ns = memory(PAUSE_TICKS * sizeof *pauses_ns);
    int64_t *deadlines_ns = memory((size_t)pending * sizeof *deadlines_ns);
    uint32_t *ids = memory((size_t)pending * sizeof *ids);
    uint64_t fired = 0;

    for (uint32_t i = 0; i < pending; i++)
        deadlines_ns[i] = random_between(1, PAUSE_TICKS * MS);
    add_all(k, t, deadlines_ns, ids, pending);
    for (int tick = 0; tick < PAUSE_TICKS; tick++) {
        pauses_ns[tick] = -spent_ns();
        fired += k->expire(t, (tick + 1) * MS);
        pauses_ns[tick] += spent_ns();
    }
    expect(fired == pending, "a timer was lost or fired twice");
    printf("{\"operations\": %u, ", pending);
    print_ticks("worst pause", pauses_ns, PAUSE_TICKS);
    printf("}\n");
    free(pauses_ns);
    free(deadlines_ns);
    free(ids);
}

/* ---- main ----------------------------------------------------------------------------------- */

static const struct kind *const kinds[] = {&keyed_kind, &wheel_kind, &heap_kind, &linked_kind,
                                           &libuv_kind, &libevent_kind};

static const struct {
    const char *name;
    void (*run)(const struct kind *, struct timers *, uint32_t pending);
} workloads[] = {{"ops", run_ops}, {"mix", run_mix}, {"pause", run_pause}};

static void run(const struct kind *k, const char *workload, uint32_t pending)
{
    for (size_t i = 0; i < sizeof workloads / sizeof *workloads; i++)
        if (strcmp(workloads[i].name, workload) == 0) {
            struct timers *t = k->create(pending + pending / 8, MS);
            workloads[i].run(k, t, pending);
            k->destroy(t);
            return;
        }
    expect(0, "no such workload");
}

static void print_bytes(const struct kind *k, uint32_t pending)
{
    struct timers *t = k->create(pending, MS);
    printf("{\"bytes\": %.3f}\n", (double)k->bytes(t) / pending);
    k->destroy(t);
}

int main(int argc, char **argv)
{
    expect(argc == 5, "usage: bench STRUCTURE ops|mix|pause|bytes PENDING SEED");
    uint32_t pending = (uint32_t)strtoul(argv[3], NULL, 10);
    random_state = strtoull(argv[4], NULL, 10) * 0x9e3779b97f4a7c15u | 1;
    expect(pending >= 10000 && pending <= 100000000, "PENDING is 10000 to 100000000");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i]->name && strcmp(kinds[i]->name, argv[1]) == 0) {
            if (strcmp(argv[2], "bytes") == 0)
                print_bytes(kinds[i], pending);
            else
                run(kinds[i], argv[2], pending);
            return 0;
        }
    expect(0, "no such structure");
    return 1;
}

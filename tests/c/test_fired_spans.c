/* The spans of fired occurrences, compared with a set of times. Each step adds a span or removes one
 * time, as a schedule does. */
#include "check.h"
#include "core/state/fired_spans.h"

enum { TIMES = 200, STEPS = 400, ROUNDS = 300 };

static bool fired[TIMES];
static struct pg_schedule_fields f;

static uint32_t below(struct rng *r, uint32_t n) { return (uint32_t)(rng_next(r) % n); }

static void step(struct rng *r)
{
    const uint32_t first = below(r, TIMES), len = below(r, 6);
    const uint32_t last = first + len < TIMES ? first + len : TIMES - 1;
    if (below(r, 3) != 0) {
        spans_add(&f, first, last);
        memset(fired + first, true, last - first + 1);
        return;
    }
    spans_remove(&f, first, (int64_t)first - 1);
    fired[first] = false;
}

static uint32_t runs(void)
{
    uint32_t count = fired[0];
    for (uint32_t t = 1; t < TIMES; t++)
        count += fired[t] && !fired[t - 1];
    return count;
}

static void the_spans_are_the_set_while_they_are_few(void)
{
    struct rng r = {7};
    uint32_t compared = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        f = (struct pg_schedule_fields){.spans = 0};
        memset(fired, 0, sizeof fired);
        for (uint32_t n = 0; n < STEPS; n++) {
            step(&r);
            CHECK(spans_sound(&f));
            if (runs() > PG_FIRED_SPANS)
                break;
            CHECK_EQUAL(f.spans, runs());
            for (uint32_t t = 0; t < TIMES; t++)
                CHECK_EQUAL(spans_have(&f, t), fired[t]);
            compared++;
        }
    }
    CHECK(compared > 5 * ROUNDS);
}

static void no_fired_time_is_forgotten_when_spans_are_joined(void)
{
    struct rng r = {8};
    uint32_t most = 0;
    f = (struct pg_schedule_fields){.spans = 0};
    memset(fired, 0, sizeof fired);
    for (uint32_t n = 0; n < ROUNDS * STEPS; n++) {
        step(&r);
        most = runs() > most ? runs() : most;
        CHECK(spans_sound(&f));
        for (uint32_t t = 0; t < TIMES; t++)
            CHECK(!fired[t] || spans_have(&f, t));
    }
    CHECK(most > 2 * PG_FIRED_SPANS);
}

static void the_two_closest_spans_are_joined(void)
{
    f = (struct pg_schedule_fields){.spans = 0};
    for (int64_t t = 0; t <= PG_FIRED_SPANS; t++)
        spans_add(&f, 100 * t, 100 * t + (t == 3 ? 50 : 1));
    CHECK_EQUAL(f.spans, PG_FIRED_SPANS);
    CHECK(spans_have(&f, 380) && !spans_have(&f, 50) && !spans_have(&f, 480));
}

static void the_oldest_of_equal_gaps_is_joined(void)
{
    f = (struct pg_schedule_fields){.spans = 0};
    for (int64_t t = 0; t <= PG_FIRED_SPANS; t++)
        spans_add(&f, 10 * t, 10 * t + 1);
    CHECK_EQUAL(f.spans, PG_FIRED_SPANS);
    CHECK(spans_have(&f, 5));
    for (int64_t t = 1; t < PG_FIRED_SPANS; t++)
        CHECK(!spans_have(&f, 10 * t + 5));
    spans_remove(&f, 10 * PG_FIRED_SPANS + 1, 10 * PG_FIRED_SPANS);
    CHECK(spans_have(&f, 10 * PG_FIRED_SPANS) && !spans_have(&f, 10 * PG_FIRED_SPANS + 1));
}

static void spans_may_have_the_first_and_the_last_time(void)
{
    f = (struct pg_schedule_fields){.spans = 0};
    spans_add(&f, INT64_MAX, INT64_MAX);
    spans_add(&f, INT64_MIN, INT64_MIN);
    CHECK_EQUAL(f.spans, 2);
    spans_remove(&f, INT64_MAX, INT64_MAX - 1);
    spans_remove(&f, INT64_MIN, INT64_MIN);
    CHECK_EQUAL(f.spans, 0);
}

static void unsound_spans_are_found(void)
{
    f = (struct pg_schedule_fields){.spans = 2, .fired = {{1, 2}, {4, 4}}};
    CHECK(spans_sound(&f));
    f.fired[1].first_ns = 3;
    CHECK(!spans_sound(&f));
    f.fired[1] = (struct pg_fired_span){9, 8};
    CHECK(!spans_sound(&f));
    f = (struct pg_schedule_fields){.spans = PG_FIRED_SPANS + 1};
    CHECK(!spans_sound(&f));
}

int main(void)
{
    RUN(the_spans_are_the_set_while_they_are_few);
    RUN(no_fired_time_is_forgotten_when_spans_are_joined);
    RUN(the_two_closest_spans_are_joined);
    RUN(the_oldest_of_equal_gaps_is_joined);
    RUN(spans_may_have_the_first_and_the_last_time);
    RUN(unsound_spans_are_found);
    return 0;
}

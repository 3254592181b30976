/* fired_spans.c - nominal times of the occurrences that have fired or may have fired.
 *
 * Consecutive occurrences share a span, so a schedule without pauses and skips has one. Spans are
 * sorted and apart. Above PG_FIRED_SPANS, the two with the shortest gap are joined, and occurrences
 * between them count as fired. A backfill then leaves these occurrences out, and fires none twice. */

#include "core/state/fired_spans.h"

static bool covers(const struct pg_fired_span *s, int64_t nominal_ns)
{
    return s->first_ns <= nominal_ns && nominal_ns <= s->last_ns;
}

/* Return whether span x ends before y begins, and at least one time lies between them. */
static bool is_apart(const struct pg_fired_span *x, const struct pg_fired_span *y)
{
    return x->last_ns < y->first_ns && x->last_ns < y->first_ns - 1;
}

static uint64_t gap_before(const struct pg_fired_span *s)
{
    return (uint64_t)s->first_ns - (uint64_t)s[-1].last_ns;
}

/* Join the two spans with the shortest gap between them; of equal gaps, the oldest. */
static void spans_join(struct pg_fired_span *spans, uint32_t count)
{
    uint32_t later = 1;
    for (uint32_t i = 2; i < count; i++)
        if (gap_before(&spans[i]) < gap_before(&spans[later]))
            later = i;
    spans[later - 1].last_ns = spans[later].last_ns;
    memmove(&spans[later], &spans[later + 1], (count - later - 1) * sizeof *spans);
}

static void spans_set(struct pg_schedule_fields *f, struct pg_fired_span *spans, uint32_t count)
{
    const bool joins = count > PG_FIRED_SPANS;
    if (joins)
        spans_join(spans, count);
    f->spans = count - joins;
    memcpy(f->fired, spans, f->spans * sizeof *spans);
}

bool spans_have(const struct pg_schedule_fields *f, int64_t nominal_ns)
{
    for (uint32_t i = 0; i < f->spans; i++)
        if (covers(&f->fired[i], nominal_ns))
            return true;
    return false;
}

void spans_add(struct pg_schedule_fields *f, int64_t first_ns, int64_t last_ns)
{
    struct pg_fired_span spans[PG_FIRED_SPANS + 1], added = {first_ns, last_ns};
    uint32_t count = 0, i = 0;
    for (; i < f->spans && is_apart(&f->fired[i], &added); i++)
        spans[count++] = f->fired[i];
    for (; i < f->spans && !is_apart(&added, &f->fired[i]); i++) {
        if (f->fired[i].first_ns < added.first_ns)
            added.first_ns = f->fired[i].first_ns;
        if (f->fired[i].last_ns > added.last_ns)
            added.last_ns = f->fired[i].last_ns;
    }
    spans[count++] = added;
    for (; i < f->spans; i++)
        spans[count++] = f->fired[i];
    spans_set(f, spans, count);
}

void spans_remove(struct pg_schedule_fields *f, int64_t nominal_ns, int64_t before_ns)
{
    struct pg_fired_span spans[PG_FIRED_SPANS + 1];
    uint32_t count = 0;
    for (uint32_t i = 0; i < f->spans; i++) {
        const struct pg_fired_span s = f->fired[i];
        if (!covers(&s, nominal_ns)) {
            spans[count++] = s;
            continue;
        }
        if (s.first_ns <= before_ns && before_ns < nominal_ns)
            spans[count++] = (struct pg_fired_span){s.first_ns, before_ns};
        if (nominal_ns < s.last_ns)
            spans[count++] = (struct pg_fired_span){nominal_ns + 1, s.last_ns};
    }
    spans_set(f, spans, count);
}

bool spans_sound(const struct pg_schedule_fields *f)
{
    bool sound = f->spans <= PG_FIRED_SPANS;
    for (uint32_t i = 0; sound && i < f->spans; i++)
        sound = f->fired[i].first_ns <= f->fired[i].last_ns &&
                (i == 0 || is_apart(&f->fired[i - 1], &f->fired[i]));
    return sound;
}

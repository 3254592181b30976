/* baseline.c - the code that the two earlier purgatory designs share: requests, handling of
 * messages, outcomes and purges. */
#include <time.h>

#include "baseline.h"

/* ---- requests -------------------------------------------------------------------------------- */

void request_drop(struct baseline *b, struct request *r)
{
    if (--r->holders == 0)
        release(b, r);
}

void request_end(struct baseline *b, struct request *r, uint8_t cause)
{
    r->cause = cause;
    r->ended_ns = b->now_ns;
    b->figures.pending--;
    b->kind->completed(b, r);
    rows_leave(b, r);
    r->holders++;
    r->next_outcome = NULL;
    *b->outcomes_end = r;
    b->outcomes_end = &r->next_outcome;
    b->outcome_count++;
}

static bool satisfied(const struct request *r)
{
    for (unsigned n = 0; n < r->keys; n++)
        if (r->watch[n].row->watermark >= r->watch[n].target)
            return true;
    return false;
}

static struct request *request_read(struct baseline *b, const struct pg_record *record,
                                    const uint8_t *area)
{
    struct request *r = allocate(b, sizeof *r + record->payload_len);
    const uint8_t *at = area + record->key_len;
    struct pg_watch_key k;

    memset(r, 0, sizeof *r);
    memcpy(&r->key, area, sizeof r->key);
    memcpy(r->payload, at, record->payload_len);
    r->payload_len = record->payload_len;
    r->ticket = ++b->tickets;
    r->deadline_ns = record->time_ns;
    r->armed_ns = b->now_ns;
    at += record->payload_len;
    for (uint64_t key; at != area + record->key_len + record->payload_len + record->ext_len;
         at += sizeof k + k.key_len) {
        memcpy(&k, at, sizeof k);
        memcpy(&key, at + sizeof k, sizeof key);
        r->watch[r->keys++] = (struct watcher){row_of(b, key), NULL, k.target,
                                                  k.flags == PG_WK_OWN};
    }
    return r;
}

/* Arm a request as the two earlier designs do: evaluate its condition, add it to the list of each
 * key, evaluate the condition again, and arm the timer. */
static void watch(struct baseline *b, const struct pg_record *record, const uint8_t *area)
{
    struct request *r = request_read(b, record, area);
    b->figures.pending++;
    r->holders++;
    if (satisfied(r)) {
        request_end(b, r, PG_CAUSE_SATISFIED);
    } else {
        for (unsigned n = 0; n < r->keys; n++)
            row_watch(r, n);
        if (satisfied(r))
            request_end(b, r, PG_CAUSE_SATISFIED);
        else
            b->kind->add(b, r);
    }
    request_drop(b, r);
}

/* ---- messages ----------------------------------------------------------------------------- */

static void record_apply(struct baseline *b, const struct pg_record *record, const uint8_t *area)
{
    uint64_t key;
    memcpy(&key, area, sizeof key);
    switch (record->op) {
    case PG_OP_WATCH: watch(b, record, area); break;
    case PG_OP_ADVANCE_KEY: row_advance(b, key, record->value); break;
    case PG_OP_FORGET: row_forget(b, key); break;
    default: abort();
    }
}

static int64_t monotonic_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void purge_if_due(struct baseline *b)
{
    if (!b->kind->purge_due(b))
        return;
    const int64_t begin_ns = monotonic_ns();
    b->kind->purge(b);
    const int64_t took_ns = monotonic_ns() - begin_ns;
    b->figures.purges++;
    b->figures.purge_ns += took_ns;
    if (took_ns > b->figures.purge_max_ns)
        b->figures.purge_max_ns = took_ns;
}

/* Apply one BATCH; other messages are ignored. A purge may run between any two records, because the
 * reaper thread of these designs may run at any time. */
void baseline_handle(struct baseline *b, const uint8_t *message)
{
    struct pg_frame f;
    struct pg_record record;
    memcpy(&f, message, sizeof f);
    if (f.message != PG_M_BATCH)
        return;
    const uint8_t *records = message + sizeof f + f.names_bytes;
    const uint8_t *area = records + f.count * sizeof record;
    for (uint32_t i = 0; i < f.count; i++) {
        memcpy(&record, records + i * sizeof record, sizeof record);
        record_apply(b, &record, area);
        area += (uint64_t)record.key_len + record.payload_len + record.ext_len;
        purge_if_due(b);
    }
}

void baseline_advance(struct baseline *b, int64_t now_ns)
{
    b->now_ns = now_ns;
    b->kind->advance(b);
    purge_if_due(b);
}

static uint8_t *outcome_bytes(uint8_t *at, const struct request *r)
{
    memcpy(at, &r->key, sizeof r->key);
    memcpy(at + sizeof r->key, r->payload, r->payload_len);
    at += sizeof r->key + r->payload_len;
    const uint32_t end = r->keys * (uint32_t)sizeof(uint64_t) + 2;
    memset(at, 0, end);           /* these designs store no watermarks, missing keys or failed
                                     keys */
    return at + end;
}

static void outcome_pop(struct baseline *b)
{
    struct request *r = b->outcomes;
    b->outcomes = r->next_outcome;
    if (b->outcomes == NULL)
        b->outcomes_end = &b->outcomes;
    b->outcome_count--;
    request_drop(b, r);
}

/* Write one OUTCOMES message with up to `most` outcomes; return its size, or 0 if there are no
 * outcomes. */
uint64_t baseline_inbox(struct baseline *b, uint8_t *out, uint32_t most)
{
    const uint32_t count = b->outcome_count < most ? (uint32_t)b->outcome_count : most;
    const struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                               .message = PG_M_OUTCOMES, .count = count};
    uint8_t *head = out + sizeof f, *at = head + count * sizeof(struct pg_outcome);
    if (count == 0)
        return 0;
    memcpy(out, &f, sizeof f);
    for (uint32_t i = 0; i < count; i++, head += sizeof(struct pg_outcome)) {
        const struct request *r = b->outcomes;
        const struct pg_outcome o = {.ticket = r->ticket << 8 | r->cause,
                                     .deadline_ns = r->deadline_ns, .armed_ns = r->armed_ns,
                                     .ended_ns = r->ended_ns, .payload_len = r->payload_len,
                                     .keys = r->keys, .bitmap_bytes = 1, .key_len = 8};
        memcpy(head, &o, sizeof o);
        at = outcome_bytes(at, r);
        outcome_pop(b);
    }
    return (uint64_t)(at - out);
}

struct baseline *baseline_make(int is_new, int64_t now_ns)
{
    struct baseline *b = calloc(1, sizeof *b);
    if (b == NULL)
        return NULL;
    b->kind = is_new ? &new_timers : &old_timers;
    b->now_ns = now_ns;
    b->wheel_ns = now_ns / TICK_NS * TICK_NS;
    b->outcomes_end = &b->outcomes;
    return b;
}

void baseline_figures(const struct baseline *b, struct baseline_figures *figures)
{
    *figures = b->figures;
}

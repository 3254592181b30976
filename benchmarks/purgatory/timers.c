/* timers.c - the timers of the two earlier designs: one heap of requests (`old`), and a wheel with
 * a heap of buckets (`new`). The wheel rounds deadlines up to its tick, so that no timer fires
 * early. */
#include "baseline.h"

/* ---- old ----------------------------------------------------------------------------------- */

static void old_add(struct baseline *b, struct request *r)
{
    heap_push(b, &b->heap, r->deadline_ns, r);
    r->holders++;
}

static void old_completed(struct baseline *b, struct request *r)
{
    (void)r;
    b->completed++;
}

static void old_advance(struct baseline *b)
{
    while (b->heap.count > 0 && b->heap.entries[0].expires_ns <= b->now_ns) {
        struct request *r = b->heap.entries[0].item;
        heap_pop(&b->heap);
        if (r->cause == 0)
            request_end(b, r, PG_CAUSE_EXPIRED);
        request_drop(b, r);
    }
}

static bool old_purge_due(const struct baseline *b) { return b->completed > PURGE_INTERVAL; }

static void old_purge(struct baseline *b)
{
    struct heap *h = &b->heap;
    uint64_t retained = 0;
    for (uint64_t i = 0; i < h->count; i++) {
        struct request *r = h->entries[i].item;
        if (r->cause == 0)
            h->entries[retained++] = h->entries[i];
        else
            request_drop(b, r);
    }
    h->count = retained;
    heap_order(h);
    rows_purge(b);
    b->completed = 0;
}

const struct timer_kind old_timers = {old_add, old_completed, old_advance, old_purge_due,
                                      old_purge};

/* ---- new ----------------------------------------------------------------------------------- */

static struct bucket *bucket_for(struct baseline *b, int64_t expires_ns, int64_t *starts_ns)
{
    int64_t width_ns = TICK_NS;
    unsigned level = 0;
    while (expires_ns >= b->wheel_ns / width_ns * width_ns + WHEEL_SLOTS * width_ns &&
           level + 1 < WHEEL_LEVELS) {
        width_ns *= WHEEL_SLOTS;
        level++;
    }
    *starts_ns = expires_ns / width_ns * width_ns;
    return &b->buckets[level][expires_ns / width_ns % WHEEL_SLOTS];
}

static int64_t tick_after(int64_t deadline_ns)
{
    return (deadline_ns + TICK_NS - 1) / TICK_NS * TICK_NS;
}

/* Link a request in its bucket. Return false if the request is already due. */
static bool wheel_link(struct baseline *b, struct request *r)
{
    const int64_t expires_ns = tick_after(r->deadline_ns);
    int64_t starts_ns;
    if (expires_ns < b->wheel_ns + TICK_NS)
        return false;
    struct bucket *bucket = bucket_for(b, expires_ns, &starts_ns);
    r->bucket = bucket;
    r->previous = NULL;
    r->next = bucket->head;
    if (r->next != NULL)
        r->next->previous = r;
    bucket->head = r;
    if (bucket->expires_ns != starts_ns) {
        bucket->expires_ns = starts_ns;
        heap_push(b, &b->heap, starts_ns, bucket);
    }
    return true;
}

static void wheel_unlink(struct request *r)
{
    if (r->bucket == NULL)
        return;
    if (r->previous == NULL)
        r->bucket->head = r->next;
    else
        r->previous->next = r->next;
    if (r->next != NULL)
        r->next->previous = r->previous;
    r->bucket = NULL;
}

static void new_add(struct baseline *b, struct request *r)
{
    b->estimate++;
    if (!wheel_link(b, r))
        request_end(b, r, PG_CAUSE_EXPIRED);
}

static void new_completed(struct baseline *b, struct request *r)
{
    (void)b;
    wheel_unlink(r);
}

static void bucket_flush(struct baseline *b, struct bucket *bucket)
{
    struct request *r = bucket->head;
    bucket->head = NULL;
    bucket->expires_ns = 0;
    for (struct request *next; r != NULL; r = next) {
        next = r->next;
        r->bucket = NULL;
        if (!wheel_link(b, r))
            request_end(b, r, PG_CAUSE_EXPIRED);
    }
}

static void new_advance(struct baseline *b)
{
    while (b->heap.count > 0 && b->heap.entries[0].expires_ns <= b->now_ns) {
        const struct heap_entry due = b->heap.entries[0];
        heap_pop(&b->heap);
        if (due.expires_ns > b->wheel_ns)
            b->wheel_ns = due.expires_ns;
        bucket_flush(b, due.item);
    }
}

static bool new_purge_due(const struct baseline *b)
{
    return b->estimate > b->figures.pending + PURGE_INTERVAL;
}

static void new_purge(struct baseline *b)
{
    b->estimate = b->figures.pending;
    rows_purge(b);
}

const struct timer_kind new_timers = {new_add, new_completed, new_advance, new_purge_due,
                                      new_purge};

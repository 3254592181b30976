/* baseline.h - two earlier designs of a purgatory, with the message format of the core: they read
 * its WATCH, ADVANCE_KEY and FORGET records and write its OUTCOMES messages.
 *
 *   old  one heap of requests; watch lists in a hash map; a completed request stays in the heap
 *        and in its lists until a purge scans all of them
 *   new  a hierarchical wheel of 1 ms x 20 with a heap of its buckets; a completed request leaves
 *        the wheel at once, but its lists only at a purge, which starts when an estimate says that
 *        the lists have too many requests
 *
 * They have only the features that the experiment needs, which makes them faster: one namespace,
 * keys of 8 bytes, condition ANY, no sessions, no validation, no state that survives the
 * process. */
#ifndef BASELINE_H
#define BASELINE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"

enum { KEYS_MAX = 4, PURGE_INTERVAL = 1000 };
enum { TICK_NS = 1000000, WHEEL_SLOTS = 20, WHEEL_LEVELS = 6 };

struct request;

/* A watch key: its watermark and its watchers, newest first. */
struct row {
    struct row *next;             /* next row in the same cell of the hash map */
    struct request *head;
    uint64_t key, watermark;
    bool forgotten;               /* the row is freed with its last watcher */
};

struct watcher {
    struct row *row;
    struct request *next;         /* next request in the row's list of watchers */
    uint64_t target;
    bool own;                     /* the row is freed with the request */
};

struct request {
    uint64_t key, ticket;
    int64_t deadline_ns, armed_ns, ended_ns;
    struct request *previous, *next;      /* design `new`: neighbours in its bucket */
    struct bucket *bucket;                /* design `new`: its bucket; NULL = none */
    struct request *next_outcome;
    uint32_t holders;             /* number of references from lists, timer and outcomes; freed at
                                     0 */
    uint32_t payload_len;
    uint8_t cause;                /* enum pg_cause; 0 = pending */
    uint8_t keys;
    struct watcher watch[KEYS_MAX];
    uint8_t payload[];
};

struct bucket {
    struct request *head;
    int64_t expires_ns;           /* 0 = not in the heap */
};

struct heap_entry {
    int64_t expires_ns;
    void *item;
};

struct heap {                     /* a binary heap, the earliest deadline first */
    struct heap_entry *entries;
    uint64_t count, capacity;
};

struct baseline;

struct timer_kind {
    void (*add)(struct baseline *b, struct request *r);
    void (*completed)(struct baseline *b, struct request *r);
    void (*advance)(struct baseline *b);
    bool (*purge_due)(const struct baseline *b);
    void (*purge)(struct baseline *b);
};

struct baseline_figures {
    uint64_t pending, bytes, bytes_max, purges;
    int64_t purge_ns, purge_max_ns;
};

struct baseline {
    const struct timer_kind *kind;
    struct heap heap;             /* `old`: heap of requests; `new`: heap of buckets */
    struct bucket buckets[WHEEL_LEVELS][WHEEL_SLOTS];
    int64_t wheel_ns;             /* `new`: start of the last popped bucket */
    int64_t now_ns;
    struct row **cells;           /* hash map of the rows */
    uint64_t rows, cell_count;
    uint64_t completed;           /* `old`: requests that ended since the last purge */
    uint64_t estimate;            /* `new`: estimated number of requests on the lists */
    uint64_t tickets;
    struct request *outcomes, **outcomes_end;
    uint64_t outcome_count;
    struct baseline_figures figures;
};

void *allocate(struct baseline *b, size_t bytes);
void release(struct baseline *b, void *memory);

void heap_push(struct baseline *b, struct heap *h, int64_t expires_ns, void *item);
void heap_pop(struct heap *h);
void heap_order(struct heap *h);

void request_end(struct baseline *b, struct request *r, uint8_t cause);
void request_drop(struct baseline *b, struct request *r);

struct row *row_of(struct baseline *b, uint64_t key);
void row_watch(struct request *r, unsigned n);
void row_advance(struct baseline *b, uint64_t key, uint64_t watermark);
void row_forget(struct baseline *b, uint64_t key);
void rows_leave(struct baseline *b, const struct request *r);
void rows_purge(struct baseline *b);

extern const struct timer_kind old_timers, new_timers;

#endif

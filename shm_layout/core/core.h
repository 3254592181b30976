/*
 * core.h - what the parts of the C core know of each other.
 *
 * The core is pure: functions over mapped memory.  But for the group-commit thread and memory.c it
 * makes no system call: it allocates nothing, reads no clock, opens nothing; time is an
 * argument.  One file per part of the arena.  Every part brings its own piece of init, rebuild and
 * check.
 *
 *   base/              memory, and structures that know no timer
 *     hash.c             keyed hash
 *     check.c            the first broken invariant
 *     sink.c             output into a bounded buffer
 *     crc32c.c           checksum of WAL frames
 *     blobs.c            key and payload bytes
 *     index.c            key -> id
 *     slots.c            hot and cold slots, free stack
 *     wheel.c            the timing wheel
 *     local.c            a wheel in private memory
 *     metrics.c          histograms of durations
 *     memory.c           NUMA placement and locking of memory: system calls alone
 *   wal/               the write-ahead log
 *     frames.c           the bytes of a frame
 *     wal_buffer.c       the ring in the arena
 *     wal_segment.c      frames in files
 *     group_commit.c     ring -> files: the only part with a thread
 *   state/             timers, operations and sessions
 *     names.c            namespaces, topics
 *     namespace_stats.c  counts of each namespace
 *     quotas.c           owners, quotas, accounts
 *     bulk_loads.c       rows of bulk loads, each applied once
 *     timers.c           put, cancel, get, expire
 *     replay_buffer.c    fired timers until they are overwritten
 *     operations.c       watch, trigger, end
 *     watches.c          which operations wait for which watermark
 *     watermarks.c       watch keys
 *     inbox.c            outcomes for the owner of a session
 *     session.c          sessions, replies
 *     records.c          what frames say of the arena
 *     prefetch.c         memory fetched early
 *   recover/           an arena opened, rebuilt or copied
 *     arena.c            geometry, create, attach, check
 *     in_doubt.c         whether the last change was made
 *     rebuild.c          derived state from authoritative state
 *     redo.c             WAL frames -> authoritative state
 *     snapshot.c         authoritative state -> WAL frames
 *     migrate.c          authoritative state into an arena of other sizes
 *     merge.c            authoritative state of several arenas into one
 *   front/             what the loop and readers call
 *     loop.c             what comes due
 *     messages.c         messages of the command socket
 *     decode.c           bounds and rules of the bytes of commands
 *     batch.c            records, each applied once
 *     publish.c          notices without a timer
 *     notices.c          replay buffer -> messages
 *     scan.c             reads of other processes
 *     columns.c          WAL frames -> columns
 */
#ifndef PURGATORYD_CORE_H
#define PURGATORYD_CORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "layout.h"
#include "api.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
/* Kept out of its callers, whose common way needs fewer registers then. */
#define RARE __attribute__((noinline, cold))

/* What a message has, read where it stands: at any address. */
typedef struct pg_record wire_record __attribute__((aligned(1)));
typedef struct pg_watch_key wire_watch_key __attribute__((aligned(1)));

/* Starts the way of a line from memory, to be written soon. The empty statement is an effect:
 * without one, compilers drop functions that do nothing else. */
static inline void fetch(const void *at)
{
    __builtin_prefetch(at, 1);
    __asm__ volatile("");
}

/* To be called before memory is written that this process has not touched yet: the kernel maps the
 * pages around one that is read, and only that one when it is written first. */
static inline void touch(const void *at, uint64_t bytes)
{
    enum { AROUND = 65536 };
    for (uint64_t i = 0; i < bytes; i += AROUND)
        (void)*((const volatile uint8_t *)at + i);
}

/* Words that one thread or process stores and others load without a lock. docs/architecture.md has
 * a table of them ("Published words"), which lint compares with the code. RELAXED: nothing else
 * depends on the word. */
#define LOAD_ACQUIRE(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define LOAD_RELAXED(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define STORE_RELEASE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define STORE_RELAXED(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)

/* ---- check: the first broken invariant ------------------------------------------- */

/* Records the first fault only, so that the message names the cause and not an effect. */
bool fault_set(struct pg_fault *fault, const char *part, const char *detail, uint64_t where,
               uint64_t expected, uint64_t found);

/* An invariant that no message, argument or stored byte can break, because those are validated
 * before. If it is broken all the same, the process ends before its next store, and the arena is
 * left to a recovery. */
#define PG_ASSERT(fact, part, invariant)                                                        \
    do {                                                                                        \
        if (UNLIKELY(!(fact)))                                                                  \
            assertion_failed(part, invariant);                                                  \
    } while (0)
/* The same where each call would feel it: in tests, fuzzing and simulated worlds, whose builds have
 * PG_ASSERT_ALL. */
#ifdef PG_ASSERT_ALL
#define PG_ASSERT_IN_TESTS(fact, part, invariant) PG_ASSERT(fact, part, invariant)
#else
#define PG_ASSERT_IN_TESTS(fact, part, invariant) ((void)0)
#endif
_Noreturn void assertion_failed(const char *part, const char *invariant);

/* Spreads an id over 64 bits (the finalizer of MurmurHash3, Appleby): two sets of ids are
 * the same, each id once, if their sums of mixed ids are the same. */
static inline uint64_t id_mix(uint32_t id)
{
    uint64_t x = (uint64_t)id + 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

/* ---- slots ------------------------------------------------------------------------ */

/* free[0] holds how many ids stand in free[1..]. Owner of hot.ctl's state. */
struct slots {
    struct pg_hot *hot;
    struct pg_cold *cold;         /* NULL where there is no arena around the wheel */
    uint32_t *free;
    uint32_t capacity;
};

void slots_init(struct slots *s);                    /* all FREE; id 0 is given out first */
void slots_rebuild(struct slots *s);                 /* the free stack from the control words */
bool slots_check(const struct slots *s, struct pg_fault *fault);
static inline uint32_t slots_live(const struct slots *s) { return s->capacity - s->free[0]; }
static inline uint32_t slots_take(struct slots *s)   /* PG_NIL when full */
{
    return UNLIKELY(s->free[0] == 0) ? PG_NIL : s->free[s->free[0]--];
}
static inline void slots_give(struct slots *s, uint32_t slot)
{
    PG_ASSERT(s->free[0] < s->capacity, "slots", "no slot is given back twice");
    s->free[++s->free[0]] = slot;
}
/* Fetches the slot that slots_take will give `distance` calls from now. */
static inline void slots_prefetch(const struct slots *s, uint32_t distance)
{
    const uint32_t slot = LIKELY(s->free[0] > distance) ? s->free[s->free[0] - distance] : 0;
    fetch(&s->hot[slot]);
    fetch(&s->cold[slot]);
}

static inline uint64_t ctl_of(uint64_t ticket, unsigned state) { return ticket << 8 | state; }
static inline unsigned ctl_state(uint64_t ctl) { return (unsigned)(ctl & 0xff); }
static inline uint64_t ctl_ticket(uint64_t ctl) { return ctl >> 8; }

/* ---- tickets ----------------------------------------------------------------------- */

/* The shard that gave it, and which one of that shard's it is. What was moved to another shard
 * keeps its ticket, and that shard's own begin behind all numbers that were given anywhere. So in
 * one arena the numbers tell which ticket is older. */
static inline uint64_t ticket_shard(uint64_t ticket) { return ticket / PG_TICKET_SHARD; }
static inline uint64_t ticket_number(uint64_t ticket) { return ticket % PG_TICKET_SHARD; }
static inline bool ticket_older(uint64_t ticket, uint64_t than)
{
    return ticket_number(ticket) < ticket_number(than);
}
/* The next ticket's number; when all are given, PG_TICKET_SHARD. */
static inline uint64_t next_number(const struct pg_header *h)
{
    return LOAD_ACQUIRE(&h->next_ticket) - h->shard * PG_TICKET_SHARD;
}
/* The arena gave it, or it came with a timer from another one. */
static inline bool ticket_known(const struct pg_header *h, uint64_t ticket)
{
    return ticket_number(ticket) != 0 && ticket_number(ticket) < next_number(h) &&
           ticket_shard(ticket) < PG_SHARDS_MAX;
}

/* ---- wheel ------------------------------------------------------------------------- */

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

/* ---- key index ---------------------------------------------------------------------- */

struct key_index {
    struct pg_index_bucket *buckets;
    uint32_t count;               /* buckets */
    uint32_t id_bits;             /* an id + 1 is stored, so that 0 means empty */
};

/* Position of a candidate; for index_next, index_replace and index_erase. */
struct probe {
    uint32_t home, bucket, cell;
};

uint32_t index_buckets(uint64_t ids);                /* for so many ids: 8 bytes an id */
uint32_t index_id_bits(uint64_t ids);
void index_init(struct key_index *x);
/* The candidate behind the one that index_first (index.h) or this gave last. */
uint32_t index_next(const struct key_index *x, uint32_t hash, struct probe *at);
bool index_find_id(const struct key_index *x, uint32_t hash, uint32_t id, struct probe *at);
void index_replace(struct key_index *x, uint32_t hash, const struct probe *at, uint32_t id);
void index_erase(struct key_index *x, const struct probe *at);
static inline void index_prefetch(const struct key_index *x, uint32_t hash)
{
    fetch(&x->buckets[((uint64_t)hash * x->count) >> 32]);
}
/* Structure only: overflow counts and bounds. `ids` = how many must stand in it. */
bool index_check(const struct key_index *x, uint64_t ids, struct pg_fault *fault);

/* ---- blobs ---------------------------------------------------------------------------- */

/* A segregated-fit allocator over granules of 16 bytes without headers on used blobs:
 * the owner knows the size. A bit per granule tells used from free; free blocks carry
 * their own size at both ends and their list links. All but the blobs' bytes is derived state. */
struct blob_pool {
    struct pg_blob_heap *heap;
    uint64_t *map;                /* a bit per granule: 1 = used */
    uint8_t *bytes;
    uint32_t granules;
};

static inline uint32_t blob_granules(uint64_t bytes)
{
    return (uint32_t)((bytes + PG_GRANULE - 1) / PG_GRANULE);
}
uint64_t blob_map_words(uint32_t granules);
void blobs_init(struct blob_pool *p);                              /* all free */
uint32_t blobs_take(struct blob_pool *p, uint32_t granules);       /* PG_NIL when none fits */
void blobs_give(struct blob_pool *p, uint32_t blob, uint32_t granules);
/* Rebuild: begin (nothing used), mark each living blob, end (free lists from the map).
 * mark returns false if the blob is out of bounds or overlaps one marked before. */
void blobs_rebuild_begin(struct blob_pool *p);
bool blobs_rebuild_mark(struct blob_pool *p, uint32_t blob, uint32_t granules);
void blobs_rebuild_end(struct blob_pool *p);
static inline void blobs_prefetch_mark(const struct blob_pool *p, uint32_t blob)
{
    fetch(&p->map[blob / 64]);
}
static inline uint8_t *blob_at(const struct blob_pool *p, uint32_t blob)
{
    return p->bytes + (uint64_t)blob * PG_GRANULE;
}
/* Map, free lists, size tags and totals agree, no two free blocks touch;
 * used_granules = the sum over all owners. */
bool blobs_check(const struct blob_pool *p, uint64_t used_granules, struct pg_fault *fault);
/* Whether so many bytes of a blob are inside the pool. */
bool blob_inside(const struct blob_pool *p, uint32_t blob, uint64_t bytes);
uint64_t blobs_used(const struct blob_pool *p);                    /* granules in use */

/* ---- hash ------------------------------------------------------------------------------ */

/* SipHash-1-3 (Aumasson, Bernstein 2012) of scope and key, with a secret. Where keys come
 * from strangers, an attacker who does not know the secret cannot aim at one bucket. */
uint64_t keyed_hash(const uint64_t secret[2], uint64_t scope, const void *bytes, size_t len);

/* The same in two steps, for many keys of one scope: what they begin with, and the rest. */
struct hash_scope {
    uint64_t v0, v1, v2, v3;
};
struct hash_scope hash_begin(const uint64_t secret[2], uint64_t scope);
uint64_t hash_in(const struct hash_scope *scope, const void *bytes, size_t len);

/* ---- checksum --------------------------------------------------------------------------- */

/* What pg_crc32c gives, on any machine. */
uint32_t crc32c_by_table(uint32_t crc, const void *bytes, size_t count);

#include "core/base/index.h"
#include "core/parts.h"

#endif

/* prefetch.c - fetches the memory that later calls will access, for a set of ids at a time.
 *
 * The end of an operation accesses about twenty cache lines. The address of each line is known only
 * from the line before. For one operation at a time, these are twenty memory latencies in sequence.
 * If each step is done for a set of operations before the next step, the latencies overlap (group
 * prefetching: Chen, Ailamaki, Gibbons, Mowry 2004). These functions change nothing. Their fetches
 * are guesses, because an id need not belong to the object that the caller expects. */

#include "core/state/prefetch.h"
#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/wheel.h"
#include "core/arena.h"
#include "core/state/replay_buffer.h"
#include "core/state/rows.h"
#include "core/wal/wal_buffer.h"
#include "core/state/watermarks.h"

#define LINE 64
#define CHAIN 8                   /* number of watch keys per operation that are fetched */

/* Fetch the first and the last cache line of an object that may cross a cache line border. */
static inline void fetch_whole(const void *at, size_t bytes)
{
    fetch(at);
    fetch((const char *)at + bytes - 1);
}

static inline void fetch_watermark(const struct pg_arena *a, uint32_t row)
{
    fetch_whole(watermark_at(a, row), sizeof *watermark_at(a, row));
}

static inline void fetch_watch(const struct pg_arena *a, uint32_t watch)
{
    if (watch != PG_NIL)
        fetch(watch_at(a, watch));
}

static void fetch_slots(const struct pg_arena *a, const uint32_t *slots, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        fetch(slot_hot(a, slots[i]));
        fetch(slot_cold(a, slots[i]));
    }
}

/* ---- ends ------------------------------------------------------------------------------- */

/* Fetch what the operation's end accesses: head of the blob, place in the key index, cell of the
 * wheel. */
static void fetch_operation(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    index_prefetch(&a->index, h->hash);
    wheel_fetch_cell(&a->wheel, h);
    fetch_whole(operation_at(a, slot), sizeof(struct pg_operation) + PG_GRANULE);
}

/* Fetch a watcher's neighbours in the treap and the row of its key. Return the next watcher of the
 * operation. */
static uint32_t fetch_around(const struct pg_arena *a, uint32_t watch)
{
    const struct pg_watch *w = watch_at(a, watch);
    fetch_watch(a, w->sibling);
    fetch_watermark(a, w->key_row);
    fetch_watch(a, w->parent);
    fetch_watch(a, w->left);
    fetch_watch(a, w->right);
    return w->sibling;
}

/* Fetch the watchers of all operations, one link of each chain at a time. A row whose only watcher
 * leaves may be freed, so the row's place in the index is fetched as well, after the row has
 * arrived. */
static void fetch_chains(const struct pg_arena *a, uint32_t *watches, uint32_t count)
{
    for (uint32_t n = 0; n < CHAIN && count > 0; n++) {
        uint32_t rows[PG_PREFETCH_MAX], left = 0;
        for (uint32_t i = 0; i < count; i++) {
            rows[i] = watch_at(a, watches[i])->key_row;
            watches[i] = fetch_around(a, watches[i]);
        }
        for (uint32_t i = 0; i < count; i++) {
            if (watermark_at(a, rows[i])->first == watermark_at(a, rows[i])->latest)
                watermark_fetch(a, watermark_at(a, rows[i])->hash);
            if (watches[i] != PG_NIL)
                watches[left++] = watches[i];
        }
        count = left;
    }
}

void prefetch_ends(const struct pg_arena *a, const uint32_t *slots, uint32_t count)
{
    uint32_t watches[PG_PREFETCH_MAX], found = 0;
    fetch_slots(a, slots, count);
    for (uint32_t i = 0; i < count; i++)
        if (is_operation(a, slots[i]))
            fetch_operation(a, slots[i]);
    wheel_fetch_last(&a->wheel, slots, count);
    for (uint32_t i = 0; i < count; i++) {
        watches[found] = is_operation(a, slots[i]) ? operation_at(a, slots[i])->first_watch : PG_NIL;
        fetch_watch(a, watches[found]);
        found += watches[found] != PG_NIL;
    }
    fetch_chains(a, watches, found);
}

/* ---- timers ------------------------------------------------------------------------------ */

/* Fetch what a record reads and changes outside of the slot's row and the wheel: key, map of the
 * payload memory, timestamps. */
static void fetch_timer(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = slot_cold(a, slot);
    fetch_whole(blob_hint(&a->blobs, c->blob) + c->ext_len, c->key_len + 1u);
    blobs_prefetch_mark(&a->blobs, c->blob);
    if (has_wal(a))
        fetch_whole(timestamps_at(a, slot), sizeof(struct pg_timestamps));
}

/* Collect the slots that the keys probably have, and fetch them. Return their number. */
static uint32_t slots_of(const struct pg_arena *a, const uint32_t *hashes, const uint32_t *places,
                         uint32_t count, uint32_t *slots)
{
    uint32_t found = 0;
    struct probe at;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t id = index_first(&a->index, hashes[places[i]], &at);
        if (id < a->slots.capacity)
            slots[found++] = id;
        else if (id != PG_NIL)
            fetch(replay_of_id(a, id));
    }
    if (found != 0)
        fetch_slots(a, slots, found);
    return found;
}

void prefetch_timers(const struct pg_arena *a, const uint32_t *hashes, const uint32_t *places,
                     uint32_t count)
{
    uint32_t slots[PG_PREFETCH_MAX], armed[PG_PREFETCH_MAX], linked = 0;
    const uint32_t found = slots_of(a, hashes, places, count, slots);
    for (uint32_t i = 0; i < found; i++) {
        const struct pg_hot *h = slot_hot(a, slots[i]);
        fetch_timer(a, slots[i]);
        if (ctl_state(h->ctl) == PG_S_ARMED) {   /* other slots are in no bucket */
            wheel_fetch_cells(&a->wheel, h);
            armed[linked++] = slots[i];
        }
    }
    if (linked != 0)
        wheel_fetch_last(&a->wheel, armed, linked);
    for (uint32_t i = 0; i < found; i++) {
        const struct pg_cold *c = slot_cold(a, slots[i]);
        blobs_prefetch_give(&a->blobs, c->blob, slot_granules(c));
    }
}

/* Fetch what is freed when the next `count` notices give way. */
static void fetch_oldest_notices(const struct pg_arena *a, uint32_t count)
{
    const struct pg_header *h = a->header;
    const uint64_t sent = h->published - h->replay_head;
    if (h->replay_tail - h->replay_head + count <= h->replay_capacity &&
        h->replay_bytes + (uint64_t)count * LINE <= h->replay_bytes_max)
        return;
    count = sent < count ? (uint32_t)sent : count;
    for (uint32_t i = 0; i < count; i++) {
        const struct pg_entry *e = replay_at(a, h->replay_head + i);
        index_prefetch(&a->index, e->hash);
        blobs_prefetch_mark(&a->blobs, e->blob);
        fetch(replay_at(a, h->replay_head + count + i));
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct pg_entry *e = replay_at(a, h->replay_head + i);
        blobs_prefetch_give(&a->blobs, e->blob, entry_granules(e));
    }
}

void prefetch_expiries(const struct pg_arena *a, const uint32_t *slots, uint32_t count)
{
    uint32_t operations[PG_PREFETCH_MAX], found = 0;
    for (uint32_t i = 0; i < count; i++)
        if (UNLIKELY(slots[i] >= a->slots.capacity))
            return;               /* one of them is a job */
    fetch_slots(a, slots, count);
    fetch_oldest_notices(a, count);
    for (uint32_t i = 0; i < count; i++) {
        if (is_operation(a, slots[i])) {
            operations[found++] = slots[i];
            continue;
        }
        index_prefetch(&a->index, slot_hot(a, slots[i])->hash);
        fetch(blob_hint(&a->blobs, slot_cold(a, slots[i])->blob));
    }
    prefetch_ends(a, operations, found);
}

/* ---- links ------------------------------------------------------------------------------ */

/* The rebuild has not checked this state yet. Rows and records that are out of bounds are therefore
 * skipped. */
void prefetch_links(const struct pg_arena *a, const uint32_t *slots, uint32_t count)
{
    uint32_t watches[PG_PREFETCH_MAX], rows[PG_PREFETCH_MAX], found = 0, known = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t first = operation_at(a, slots[i])->first_watch;
        if (first < a->watch_rows)
            fetch_watch(a, watches[found++] = first);
    }
    for (uint32_t i = 0; i < found; i++) {
        const uint32_t row = watch_at(a, watches[i])->key_row;
        if (row < a->watermark_rows)
            fetch_watermark(a, rows[known++] = row);
    }
    for (uint32_t i = 0; i < known; i++)
        fetch_watch(a, watermark_at(a, rows[i])->latest);
    for (uint32_t i = 0; i < known; i++)
        if (watermark_at(a, rows[i])->latest != PG_NIL)
            fetch_watch(a, watch_at(a, watermark_at(a, rows[i])->latest)->parent);
}

/* ---- watermarks ------------------------------------------------------------------------------ */

/* Collect the slots of the first watchers that the advances will reach. Return the number of
 * slots. */
static uint32_t first_reached(const struct pg_arena *a, const uint32_t *first,
                              const uint64_t *reach, uint32_t count, uint32_t *slots)
{
    uint32_t ends = 0;
    for (uint32_t i = 0; i < count; i++)
        if (first[i] != PG_NIL && watch_at(a, first[i])->target <= reach[i])
            slots[ends++] = watch_at(a, first[i])->slot;
    return ends;
}

void prefetch_watermarks(const struct pg_arena *a, const uint32_t *hashes, const uint32_t *places,
                         const uint64_t *reach, uint32_t count, uint32_t *rows)
{
    uint32_t first[PG_PREFETCH_MAX], slots[PG_PREFETCH_MAX];
    struct probe at;
    for (uint32_t i = 0; i < count; i++) {
        rows[places[i]] = watermark_first(a, hashes[places[i]], &at);
        if (rows[places[i]] != PG_NIL)
            fetch_watermark(a, rows[places[i]]);
    }
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t row = rows[places[i]];
        first[i] = row == PG_NIL || reach[i] == 0 ? PG_NIL : watermark_at(a, row)->first;
        fetch_watch(a, first[i]);
    }
    prefetch_ends(a, slots, first_reached(a, first, reach, count, slots));
}

/* ---- timers of a selection --------------------------------------------------------------------- */

void prefetch_blobs(const struct pg_arena *a, const uint32_t *slots, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        fetch(slot_cold(a, slots[i]));
    for (uint32_t i = 0; i < count; i++) {
        const struct pg_cold *c = slot_cold(a, slots[i]);
        fetch_whole(blob_hint(&a->blobs, c->blob), c->ext_len + c->key_len + 1u);
    }
}

void prefetch_changes(const struct pg_arena *a, const uint32_t *slots, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        index_prefetch(&a->index, slot_hot(a, slots[i])->hash);
        wheel_fetch_cells(&a->wheel, slot_hot(a, slots[i]));
        if (has_wal(a))
            fetch_whole(timestamps_at(a, slots[i]), sizeof *timestamps_at(a, slots[i]));
    }
    prefetch_outcomes(a, slots, count);
    wheel_fetch_last(&a->wheel, slots, count);
}

/* ---- outcomes ------------------------------------------------------------------------------ */

/* Fetch the last cache line of each blob, and the line after it, where a free neighbour stores its
 * size. */
void prefetch_outcomes(const struct pg_arena *a, const uint32_t *slots, uint32_t count)
{
    fetch_slots(a, slots, count);
    for (uint32_t i = 0; i < count; i++) {
        const struct pg_cold *c = slot_cold(a, slots[i]);
        const uint8_t *at = blob_hint(&a->blobs, c->blob);
        fetch(at);
        fetch_whole(at + (slot_granules(c) - 1) * PG_GRANULE, 2 * PG_GRANULE);
    }
}

#define FAR 48                    /* prefetch slots this many outcomes in advance */
#define NEAR 24                   /* prefetch operations this many outcomes in advance */

void prefetch_news(struct pg_arena *a)
{
    const uint32_t next = a->state.news_seen++;
    if (next + FAR < a->state.news_count)
        fetch(slot_cold(a, a->state.news[next + FAR]));
    if (next + NEAR < a->state.news_count)
        fetch_whole(blob_hint(&a->blobs, slot_cold(a, a->state.news[next + NEAR])->blob),
                    sizeof(struct pg_operation));
}

void prefetch_bytes(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = slot_cold(a, slot);
    const uint8_t *at = blob_hint(&a->blobs, c->blob);
    fetch(slot_hot(a, slot));
    fetch_whole(at + c->ext_len, LINE);
    fetch(at + (slot_granules(c) - 1) * PG_GRANULE);
}

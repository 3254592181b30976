/* scan.c - readers of a live arena. They copy first, and trust a copy only if its source did not
 * change in the meantime. */

#include "core/front/scan.h"
#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/state/items.h"
#include "core/state/names.h"
#include "core/state/operation_bytes.h"
#include "core/state/operations.h"
#include "core/state/replay_buffer.h"
#include "core/state/timers.h"
#include "core/front/notices.h"

/* ---- armed timers ------------------------------------------------------------------------ */

static int64_t wall_of(const struct pg_hot *h, const uint8_t *blob)
{
    struct pg_ext ext;
    if (!(h->flags & PG_F_WALL))
        return NO_WALL;
    memcpy(&ext, blob, sizeof ext);
    return ext.value;
}

/* Copy the head of an operation. Return false if the slot holds a timer, or if the copy mixes two
 * states of the slot. */
static bool operation_copy(const struct pg_hot *h, const struct pg_cold *c, const uint8_t *blob,
                           struct pg_operation *op)
{
    if (!(h->flags & PG_F_OPERATION) || c->ext_len < sizeof *op)
        return false;
    memcpy(op, blob, sizeof *op);
    return operation_ext_bytes(op) <= c->ext_len;
}

static void info_copy(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c,
                      struct sink *out)
{
    const struct pg_topic *t = topic_at(a, h->topic);
    const struct name ns = namespace_name(a, t->namespace_row), topic = topic_name(a, h->topic);
    const uint8_t *blob = blob_at(&a->blobs, c->blob);
    const unsigned status = ctl_state(h->ctl) == PG_S_PARKED ? PG_ST_PARKED : PG_ST_FOUND;
    struct pg_operation op;
    const bool operation = operation_copy(h, c, blob, &op);
    struct pg_info info = {.ticket = ctl_ticket(h->ctl) << 8 | status,
                           .deadline_ns = h->deadline_ns, .wall_ns = wall_of(h, blob),
                           .payload_len = c->payload_len, .key_len = c->key_len,
                           .key_type = c->key_type, .namespace_len = (uint8_t)ns.len,
                           .topic_len = (uint8_t)topic.len,
                           .slack_log2 = (uint8_t)(h->flags >> PG_SLACK_SHIFT)};
    if (!(h->flags & PG_F_OPERATION))
        info.ext_bytes = put_item_bytes(h, c);
    uint8_t *head = sink_take(out, sizeof info);
    sink_put(out, ns.bytes, ns.len);
    sink_put(out, topic.bytes, topic.len);
    sink_put(out, blob + c->ext_len, (uint64_t)c->key_len + c->payload_len);
    if (operation)
        operation_info(a, &op, blob, &info, out);
    else if (UNLIKELY(info.ext_bytes != 0))
        sink_put(out, blob + c->ext_len - info.ext_bytes, info.ext_bytes);
    if (head != NULL)
        memcpy(head, &info, sizeof info);
}

static bool info_try(const struct pg_arena *a, uint32_t slot, uint64_t ctl, struct sink *out)
{
    const struct pg_hot h = *slot_hot(a, slot);
    const struct pg_cold c = slot_cold_copy(a, slot, ctl);
    const uint64_t before = out->used;

    if (slot_copy_bounded(a, &h, &c))
        info_copy(a, &h, &c, out);
    atomic_thread_fence(memory_order_acquire);
    if (!out->full && out->used != before && LOAD_ACQUIRE(&slot_hot(a, slot)->ctl) == ctl &&
        h.ctl == ctl)
        return true;
    out->used = before;
    return false;
}

/* The loop repeats only if a compaction pass ended during the copy. */
bool info_write(const struct pg_arena *a, uint32_t slot, uint64_t ctl, struct sink *out)
{
    const uint64_t before = out->used;
    uint32_t passes;
    bool found;
    do {
        out->used = before;
        passes = LOAD_ACQUIRE(&blobs_heap(&a->blobs)->passes);
        found = info_try(a, slot, ctl, out);
    } while (UNLIKELY(LOAD_RELAXED(&blobs_heap(&a->blobs)->passes) != passes));
    return found;
}

void info_write_bare(const struct pg_arena *a, uint32_t slot, struct sink *out)
{
    const struct pg_hot h = *slot_hot(a, slot);
    struct pg_cold c = *slot_cold(a, slot);
    const uint64_t before = out->used;
    c.payload_len = 0;
    info_copy(a, &h, &c, out);
    if (out->full)
        out->used = before;
}

uint64_t pg_scan(const struct pg_arena *a, uint32_t *cursor, uint32_t max, void *bytes,
                 uint64_t size)
{
    struct sink out = {bytes, 0, size, false};
    uint32_t found = 0;
    while (*cursor < a->slots.capacity && found < max) {
        const uint64_t ctl = LOAD_ACQUIRE(&slot_hot(a, *cursor)->ctl);
        if (ctl_live(ctl))
            found += info_write(a, *cursor, ctl, &out);
        if (out.full)
            break;
        ++*cursor;
    }
    return out.used;
}

uint64_t pg_overdue(const struct pg_arena *a)
{
    uint64_t overdue = 0;
    for (uint32_t i = 0; i < a->slots.capacity; i++) {
        const struct pg_hot *h = slot_hot(a, i);
        overdue += ctl_state(LOAD_ACQUIRE(&h->ctl)) == PG_S_PARKED &&
                   LOAD_RELAXED(&h->deadline_ns) <= LOAD_RELAXED(&a->header->now_ns);
    }
    return overdue;
}

static int64_t outcome_ended_ns(const struct pg_arena *a, uint32_t slot)
{
    struct pg_operation op;
    const uint64_t ctl = LOAD_ACQUIRE(&slot_hot(a, slot)->ctl);
    const uint32_t blob = LOAD_RELAXED(&slot_cold(a, slot)->blob);
    if (ctl_state(ctl) != PG_S_OUTCOME || !blob_inside(&a->blobs, blob, sizeof op))
        return NO_WALL;
    atomic_thread_fence(memory_order_acquire);   /* the fence precedes reads of a moved blob */
    memcpy(&op, blob_at(&a->blobs, blob), sizeof op);
    atomic_thread_fence(memory_order_acquire);
    return LOAD_ACQUIRE(&slot_hot(a, slot)->ctl) == ctl ? op.ended_ns : NO_WALL;
}

int64_t pg_outcome_ended_ns(const struct pg_arena *a, uint32_t slot)
{
    uint32_t passes;
    int64_t ended_ns;
    if (slot >= a->slots.capacity)
        return NO_WALL;
    do {
        passes = LOAD_ACQUIRE(&blobs_heap(&a->blobs)->passes);
        ended_ns = outcome_ended_ns(a, slot);
    } while (UNLIKELY(LOAD_RELAXED(&blobs_heap(&a->blobs)->passes) != passes));
    return ended_ns;
}

void pg_slots_in_use(const struct pg_arena *a, uint64_t *timers, uint64_t *operations)
{
    *timers = *operations = 0;
    for (uint32_t i = 0; i < a->slots.capacity; i++) {
        const struct pg_hot *h = slot_hot(a, i);
        if (ctl_state(LOAD_ACQUIRE(&h->ctl)) != PG_S_FREE)
            ++*(h->flags & PG_F_OPERATION ? operations : timers);
    }
}

/* ---- notices of the past ------------------------------------------------------------------- */

/* Follow the topic's chain from its newest entry back to the entry with sequence `first`. Return
 * the number of entries found with sequences from `first` to `last`. `positions` receives their
 * positions, newest first. */
static uint64_t chain_walk(const struct pg_arena *a, uint32_t topic, uint64_t first,
                           uint64_t last, uint64_t *positions)
{
    uint64_t at = LOAD_ACQUIRE(&topic_at(a, topic)->last_position), found = 0;
    struct pg_entry e;
    while (at != 0 && replay_copy(a, at - 1, &e) && e.topic == topic && e.sequence >= first) {
        if (e.sequence <= last && found <= last - first)
            positions[found++] = at - 1;
        at = entry_previous(&e, at - 1);
    }
    return found;
}

/* Return how many of the found entries, beginning with the oldest, fit into `size` bytes together
 * with their records. Withdrawn entries at the old end are skipped, and *skip receives the number
 * of skipped entries. */
static uint64_t replay_fit(const struct pg_arena *a, const uint64_t *positions, uint64_t found,
                           uint64_t size, uint64_t *skip)
{
    struct pg_entry e;
    uint64_t count = 0, used = sizeof(struct pg_notices);
    for (*skip = 0; *skip < found && !replay_copy(a, positions[found - 1 - *skip], &e);)
        ++*skip;
    for (uint64_t i = *skip; i < found && replay_copy(a, positions[found - 1 - i], &e); i++) {
        used += sizeof(struct pg_notice) + e.key_len + e.payload_len;
        if (used > size)
            break;
        count++;
    }
    return count;
}

static bool replay_one(const struct pg_arena *a, uint64_t position, struct pg_notice *record,
                       struct sink *out)
{
    struct pg_entry e;
    const uint32_t passes = LOAD_ACQUIRE(&blobs_heap(&a->blobs)->passes);
    if (!replay_copy(a, position, &e))
        return false;
    const uint64_t bytes = (uint64_t)e.key_len + e.payload_len;
    if (!blob_inside(&a->blobs, e.blob, bytes))
        return false;
    *record = notice_of(&e);
    sink_put(out, blob_at(&a->blobs, e.blob), bytes);
    atomic_thread_fence(memory_order_acquire);
    return !out->full && LOAD_ACQUIRE(&replay_at(a, position)->commit) == position + 1 &&
           LOAD_RELAXED(&blobs_heap(&a->blobs)->passes) == passes;
}

/* Write `count` entries, oldest first. Return false if an entry was withdrawn or moved in the
 * meantime. */
static bool replay_write(const struct pg_arena *a, uint32_t topic, uint64_t first,
                         const uint64_t *oldest, uint64_t count, struct sink *out)
{
    const struct pg_notices head = notices_head(a, topic, first, (uint32_t)count);
    struct pg_notice record;
    sink_put(out, &head, sizeof head);
    uint8_t *records = sink_take(out, count * sizeof record);
    for (uint64_t i = 0; i < count; i++) {
        if (!replay_one(a, *(oldest - i), &record, out))
            return false;
        memcpy(records + i * sizeof record, &record, sizeof record);
    }
    return true;
}

uint64_t pg_newest(const struct pg_arena *a, uint32_t topic) { return replay_newest(a, topic); }

uint64_t pg_newest_sent(const struct pg_arena *a, uint32_t topic)
{
    return replay_newest_sent(a, topic);
}

uint32_t pg_changed_topics(const struct pg_arena *a, uint32_t namespace_row, const uint32_t *rows,
                           uint32_t row_count, const struct pg_known_topic *known,
                           struct pg_known_topic *found)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < (rows != NULL ? row_count : a->topic_rows); i++) {
        const uint32_t row = rows != NULL ? rows[i] : i;
        const struct pg_topic *t = topic_at(a, row);
        if (LOAD_ACQUIRE(&t->name_len) == 0 || t->namespace_row != namespace_row)
            continue;
        const uint64_t incarnation = LOAD_ACQUIRE(&t->incarnation);
        const bool same = known[row].incarnation == incarnation;
        if (same && known[row].sequence == UINT64_MAX)
            continue;
        const uint64_t sequence = replay_newest(a, row);
        if (!same || sequence > known[row].sequence)
            found[count++] = (struct pg_known_topic){incarnation, sequence, row, 0};
    }
    return count;
}

uint64_t pg_replay(const struct pg_arena *a, uint32_t topic, uint64_t first, uint64_t last,
                   uint64_t *positions, void *bytes, uint64_t size, uint64_t *lost, uint64_t *got)
{
    const uint64_t newest = replay_newest(a, topic);
    *lost = *got = first - 1;
    if (last > newest)
        last = newest;
    if (last < first)
        return 0;
    /* The loop repeats only if an entry was withdrawn or moved during the previous try. */
    for (int tries = 0; tries < 1000; tries++) {
        struct sink out = {bytes, 0, size, false};
        uint64_t skip;
        const uint64_t found = chain_walk(a, topic, first, last, positions);
        const uint64_t count = replay_fit(a, positions, found, size, &skip);
        *lost = last - (found - skip);
        *got = *lost + count;
        if (count == 0)
            return 0;
        if (replay_write(a, topic, *lost + 1, &positions[found - 1 - skip], count, &out))
            return out.used;
    }
    return 0;
}

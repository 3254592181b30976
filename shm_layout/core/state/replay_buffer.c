/* replay_buffer.c - a ring of notices. Notices are kept until newer notices need their space.
 *
 * Only `commit` decides whether an entry exists: if commit = position + 1, the entry has fired,
 * whatever the header contains. A rebuild completes the steps after the commit: it updates the
 * topic counters and the tail, and frees the slot. */

#include "core/state/replay_buffer.h"
#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/jobs.h"
#include "core/state/operation_bytes.h"
#include "core/state/records.h"

#define NEWEST_TRIES 8            /* more are needed only in a damaged arena */

/* ---- withdrawing ------------------------------------------------------------------------ */

static void entry_forget_key(struct pg_arena *a, uint64_t position, const struct pg_entry *e)
{
    struct probe at;
    if (index_find_id(&a->index, e->hash, replay_id(a, position), &at))
        index_erase(&a->index, &at);
}

/* Withdraw the oldest entry. `commit` is cleared first, so that a reader can see that the entry is
 * gone before the entry's blob changes. */
static void replay_withdraw(struct pg_arena *a)
{
    const uint64_t head = a->header->replay_head;
    struct pg_entry *e = replay_at(a, head);
    const uint32_t granules = entry_granules(e);

    STORE_RELEASE(&e->commit, 0ull);
    atomic_thread_fence(memory_order_release);   /* the fence precedes reuse of the blob */
    STORE_RELEASE(&a->header->replay_head, head + 1);
    entry_forget_key(a, head, e);
    a->header->replay_bytes -= (uint64_t)granules * PG_GRANULE;
    if (LIKELY(!entry_has_jobs(e))) {
        blobs_give(&a->blobs, e->blob, granules);
        a->metrics->blob_bytes -= (uint64_t)granules * PG_GRANULE;
    }
    a->metrics->notices_withdrawn++;
}

static bool has_space(const struct pg_header *h, uint64_t bytes)
{
    return h->replay_tail - h->replay_head < h->replay_capacity &&
           (h->replay_bytes + bytes <= h->replay_bytes_max || h->replay_tail == h->replay_head);
}

bool replay_make_space(struct pg_arena *a, uint64_t bytes)
{
    while (!has_space(a->header, bytes)) {
        if (a->header->replay_head >= a->header->published)
            return false;
        replay_withdraw(a);
    }
    return true;
}

/* ---- appending --------------------------------------------------------------------------- */

/* Store everything that follows from a committed entry. A rebuild repeats this, so it must be
 * idempotent. */
static void entry_settle(struct pg_arena *a, uint64_t position)
{
    const struct pg_entry *e = replay_at(a, position);
    struct pg_topic *t = topic_at(a, e->topic);
    STORE_RELEASE(&t->last_position, position + 1);  /* readers use it to find the entry */
    STORE_RELEASE(&t->sequence, e->sequence);
    if (UNLIKELY(e->missed != 0))
        STORE_RELEASE(&t->missed, 0ull);
    STORE_RELEASE(&a->header->replay_tail, position + 1);
}

/* Append an entry. `fields` has no commit. The commit is stored last; from then on the entry
 * exists. */
uint64_t replay_append(struct pg_arena *a, const struct pg_entry *fields,
                       const struct job_traits *traits)
{
    const uint64_t position = a->header->replay_tail;
    PG_ASSERT(position - a->header->replay_head < a->header->replay_capacity, "replay buffer",
              "an entry has space");
    struct pg_entry *e = replay_at(a, position);
    struct pg_topic *t = topic_at(a, fields->topic);

    /* This store comes before the commit: an additional tail heartbeat is harmless, a missing one
     * is not. */
    t->changed_boot_ns = a->call.real_boot_ns;
    *e = *fields;
    e->sequence = t->sequence + 1;
    e->back = entry_back(position, t->last_position);
    if (UNLIKELY(t->groups != 0) && jobs_born(a, e, position, traits))
        e->meta |= PG_ENTRY_JOBS;
    STORE_RELEASE(&e->commit, position + 1);
    entry_settle(a, position);
    a->header->replay_bytes += (uint64_t)entry_granules(e) * PG_GRANULE;
    return position;
}

void replay_show(struct pg_arena *a)
{
    if (a->header->visible < a->header->replay_tail)
        STORE_RELEASE(&a->header->visible, a->header->replay_tail);
}

void replay_supersede(struct pg_arena *a, uint32_t id)
{
    replay_of_id(a, id)->meta |= PG_E_SUPERSEDED << 4;
}

/* Count the time that entries waited to be sent. Entries that fired in one iteration have the same
 * time, so they are counted together. Under a virtual clock the real time of firing is unknown, so
 * nothing is counted. */
static void queue_measure(struct pg_arena *a, uint64_t upto, int64_t built_boot_ns)
{
    uint64_t p = a->header->published;
    while (p < upto && a->header->clock_kind == PG_CLOCK_BOOT) {
        const int64_t fired_ns = replay_at(a, p)->fired_ns;
        uint64_t same = 1;
        while (p + same < upto && replay_at(a, p + same)->fired_ns == fired_ns)
            same++;
        measure(a, PG_HG_RESPONSE_QUEUE, built_boot_ns - fired_ns, same);
        p += same;
    }
}

void pg_published(struct pg_arena *a, uint64_t upto, int64_t built_boot_ns, int64_t handed_boot_ns)
{
    if (upto <= a->header->published || upto > a->header->visible)
        return;
    queue_measure(a, upto, built_boot_ns);
    measure(a, PG_HG_SEND, handed_boot_ns - built_boot_ns, upto - a->header->published);
    if (has_wal(a))
        wal_append_sent(a, upto, built_boot_ns, handed_boot_ns);
    STORE_RELEASE(&a->header->published, upto);
    wal_buffer_settle(a);
}

/* ---- readers ------------------------------------------------------------------------------ */

bool replay_copy(const struct pg_arena *a, uint64_t position, struct pg_entry *copy)
{
    const struct pg_entry *e = replay_at(a, position);
    const uint64_t commit = LOAD_ACQUIRE(&e->commit);
    *copy = *e;
    atomic_thread_fence(memory_order_acquire);
    return commit == position + 1 && LOAD_ACQUIRE(&e->commit) == commit;
}

/* Find the sequence of the topic's newest notice below the position `upto`. Entries at and above it
 * have to stay in the buffer; return false if one was withdrawn meanwhile. */
static bool newest_below(const struct pg_arena *a, uint32_t topic, uint64_t upto,
                         uint64_t *sequence)
{
    const struct pg_topic *t = topic_at(a, topic);
    *sequence = LOAD_ACQUIRE(&t->sequence);
    uint64_t at = LOAD_ACQUIRE(&t->last_position);
    struct pg_entry e;
    while (at > upto && replay_copy(a, at - 1, &e) && e.topic == topic) {
        *sequence = e.sequence - 1;
        at = entry_previous(&e, at - 1);
    }
    return at <= upto;
}

/* Entries that are not visible yet stay in the buffer. If the walk fails, such an entry has become
 * visible and was withdrawn meanwhile, so the next walk begins at a visible entry. */
uint64_t replay_newest(const struct pg_arena *a, uint32_t topic)
{
    uint64_t sequence;
    for (uint32_t tries = 0; tries < NEWEST_TRIES; tries++)
        if (newest_below(a, topic, LOAD_ACQUIRE(&a->header->visible), &sequence))
            return sequence;
    return 0;
}

uint64_t replay_newest_sent(const struct pg_arena *a, uint32_t topic)
{
    uint64_t sequence;
    const uint64_t sent = LOAD_ACQUIRE(&a->header->published);
    return newest_below(a, topic, sent, &sequence) ? sequence : 0;
}

/* ---- rebuild ------------------------------------------------------------------------------ */

static bool entry_sound(const struct pg_arena *a, const struct pg_entry *e)
{
    return e->topic < a->topic_rows && topic_at(a, e->topic)->name_len != 0 && e->key_len != 0 &&
           e->payload_len <= PG_PAYLOAD_MAX + PG_VERDICT_MAX;
}

/* Index the key of an entry. If several entries have the key, the index leads to the newest entry.
 * If an armed slot has the key, the rebuild later lets the index lead to the slot. */
static void entry_index(struct pg_arena *a, uint64_t position)
{
    const struct pg_entry *e = replay_at(a, position);
    const uint32_t ns = topic_at(a, e->topic)->namespace_row;
    struct probe at;

    if ((entry_flags(e) & (PG_E_SUPERSEDED | PG_E_OPERATION)) ||
        (e->ticket & 0xff) == PG_CAUSE_PUBLISHED)
        return;                   /* a CANCEL of an ended operation answers UNKNOWN, not FIRED */
    for (uint32_t id = index_first(&a->index, e->hash, &at); id != PG_NIL;
         id = index_next(&a->index, e->hash, &at)) {
        const struct pg_entry *old = replay_of_id(a, id);
        if (old->hash == e->hash && topic_at(a, old->topic)->namespace_row == ns &&
            old->key_len == e->key_len && entry_key_type(old) == entry_key_type(e) &&
            memcmp(blob_at(&a->blobs, old->blob), blob_at(&a->blobs, e->blob), e->key_len) == 0) {
            index_replace(&a->index, e->hash, &at, replay_id(a, position));
            return;
        }
    }
    index_insert(&a->index, e->hash, replay_id(a, position));
}

static bool entry_check(const struct pg_arena *a, uint64_t p, struct pg_fault *fault)
{
    const struct pg_entry *e = replay_at(a, p);
    if (e->commit != p + 1)
        return fault_set(fault, "replay buffer", "an entry is not committed", p, p + 1,
                         e->commit);
    if (!entry_sound(a, e))
        return fault_set(fault, "replay buffer",
                         "an entry's topic, key or payload is invalid",
                         p, 0, e->topic);
    const uint64_t previous = entry_previous(e, p);
    if (e->back > p || (e->back == 0 && e->sequence != 1 && p < UINT32_MAX) ||
        (e->back != 0 && e->sequence == 1))
        return fault_set(fault, "replay buffer", "an entry's link to its predecessor is wrong", p,
                         e->sequence, e->back);
    if (previous > a->header->replay_head &&
        replay_at(a, previous - 1)->sequence + 1 != e->sequence)
        return fault_set(fault, "replay buffer", "a topic's sequence has a gap", p, e->sequence,
                         replay_at(a, previous - 1)->sequence);
    if ((e->ticket & 0xff) == PG_CAUSE_EXPIRED && e->fired_ns < e->deadline_ns)
        return fault_set(fault, "replay buffer", "an entry fired early", p,
                         (uint64_t)e->deadline_ns, (uint64_t)e->fired_ns);
    return true;
}

static bool entry_rebuild(struct pg_arena *a, uint64_t position, struct pg_fault *why)
{
    struct pg_entry *e = replay_at(a, position);
    if (!entry_check(a, position, why))
        return false;
    if (!entry_has_jobs(e) && !blobs_rebuild_mark(&a->blobs, e->blob, entry_granules(e)))
        return fault_set(why, "replay buffer",
                         "an entry's blob overlaps another or lies outside the pool",
                         position, 0, e->blob);
    a->header->replay_bytes += (uint64_t)entry_granules(e) * PG_GRANULE;
    entry_index(a, position);
    return true;
}

bool replay_settle(struct pg_arena *a, struct pg_fault *why)
{
    struct pg_header *h = a->header;
    const bool half_done = replay_at(a, h->replay_tail)->commit == h->replay_tail + 1;
    if (half_done && !entry_sound(a, replay_at(a, h->replay_tail)))
        return fault_set(why, "replay buffer",
                         "the newest entry's topic, key or payload is invalid",
                         h->replay_tail, a->topic_rows, replay_at(a, h->replay_tail)->topic);
    if (half_done)
        entry_settle(a, h->replay_tail);
    replay_show(a);               /* the arena may have been made from another one */
    a->state.woken = h->published;
    if (h->replay_head > h->published || h->published > h->visible ||
        h->visible > h->replay_tail ||
        h->replay_tail - h->replay_head > h->replay_capacity)
        return fault_set(why, "replay buffer", "head, published, visible and tail are out of order", 0,
                         h->replay_tail, h->replay_head);
    while (h->replay_head < h->published &&
           replay_at(a, h->replay_head)->commit != h->replay_head + 1)
        h->replay_head++;         /* a withdrawn entry; only sent entries are withdrawn */
    return true;
}

bool replay_rebuild(struct pg_arena *a, struct pg_fault *why)
{
    a->header->replay_bytes = 0;
    for (uint64_t p = a->header->replay_head; p < a->header->replay_tail; p++)
        if (!entry_rebuild(a, p, why))
            return false;
    return true;
}

/* ---- check -------------------------------------------------------------------------------- */

bool replay_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules)
{
    uint64_t own = 0;
    for (uint64_t p = a->header->replay_head; p < a->header->replay_tail; p++) {
        if (!entry_check(a, p, fault))
            return false;
        own += entry_granules(replay_at(a, p));
        *granules += entry_has_jobs(replay_at(a, p)) ? 0 : entry_granules(replay_at(a, p));
    }
    return own * PG_GRANULE == a->header->replay_bytes ||
           fault_set(fault, "replay buffer", "bytes of the blobs in the replay buffer", 0,
                     own * PG_GRANULE, a->header->replay_bytes);
}

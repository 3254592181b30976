/* operations.c - the purgatory. An operation ends when its condition on watch keys holds or when it
 * times out, whichever comes first, and exactly once.
 *
 * The semantics are those of Kafka's DelayedOperationPurgatory. A watermark is stored before its
 * watchers are visited, and an operation that ends leaves all its keys at once. The place of a
 * watcher is the watermark at which the watcher has to be visited next. Watchers that need no visit
 * have places above all possible watermarks: PARKED, the places of failed keys, and MET.
 *
 * Only the keys' watermarks and errors decide whether an operation holds or fails. ALL, ANY and
 * QUORUM never hold and fail at the same time, because a key that has reached its target counts as
 * reached even if it has failed. A SUM that holds and fails at the same time is satisfied. */

#include "core/state/operations.h"
#include "core/base/answer.h"
#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/sink.h"
#include "core/base/slots.h"
#include "core/base/wheel.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/compaction.h"
#include "core/state/groups.h"
#include "core/state/inbox.h"
#include "core/state/jobs.h"
#include "core/state/keys.h"
#include "core/state/operation_bytes.h"
#include "core/state/prefetch.h"
#include "core/state/quotas.h"
#include "core/state/records.h"
#include "core/state/replay_buffer.h"
#include "core/state/session.h"
#include "core/state/timers.h"
#include "core/state/watches.h"
#include "core/state/watermarks.h"

static struct pg_watermark *watermark_of(const struct pg_arena *a, uint32_t x)
{
    return watermark_at(a, watch_at(a, x)->key_row);
}

/* ---- bounded work ------------------------------------------------------------------------ */

#define KEYS_PER_VISIT 8          /* examining this many keys counts as one visit */

static void work_done(struct pg_arena *a, uint32_t visits)
{
    a->call.visits_left -= visits < a->call.visits_left ? visits : a->call.visits_left;
}

/* ---- conditions --------------------------------------------------------------------------- */

static uint64_t gained(const struct pg_share *s, uint64_t watermark)
{
    const uint64_t gain = watermark > s->base ? watermark - s->base : 0;
    return gain < s->cap ? gain : s->cap;
}

/* Return the sum of the keys' gains, at most UINT64_MAX. Set *unfinished to the number of keys
 * below their caps. */
static uint64_t sum_now(const struct pg_arena *a, struct pg_operation *op, uint32_t *unfinished)
{
    const struct pg_share *share = shares_of(op);
    uint64_t sum = 0;
    *unfinished = 0;
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(a, x)->sibling, share++) {
        const uint64_t gain = gained(share, watermark_of(a, x)->watermark);
        *unfinished += gain < share->cap;
        if (__builtin_add_overflow(sum, gain, &sum))
            sum = UINT64_MAX;
    }
    return sum;
}

static bool target_reached(const struct pg_arena *a, uint32_t x)
{
    const uint64_t target = watch_target(watch_at(a, x)->target);
    return target == MET || watermark_of(a, x)->watermark >= target;
}

/* Return the number of keys that have to reach their targets: 1 to all. */
static uint32_t keys_needed(const struct pg_operation *op)
{
    return op->condition == PG_C_ALL ? op->keys : op->condition == PG_C_ANY ? 1
                                                                            : (uint32_t)op->threshold;
}

static bool enough_reached(const struct pg_arena *a, const struct pg_operation *op)
{
    uint32_t needed = keys_needed(op), spare = op->keys - needed;
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(a, x)->sibling) {
        if (target_reached(a, x) && --needed == 0)
            return true;
        if (!target_reached(a, x) && spare-- == 0)
            return false;
    }
    return false;
}

static bool condition_holds(const struct pg_arena *a, struct pg_operation *op)
{
    uint32_t unfinished;
    if (op->condition == PG_C_SUM)
        return sum_now(a, op, &unfinished) >= op->threshold;
    return op->condition != PG_C_CLIENT && enough_reached(a, op);
}

/* If so many keys have failed that the condition can no longer hold, return the error of the first
 * failed key; else 0. SUM and CLIENT need every key. For the other conditions, a key that failed
 * after it reached its target does not count as failed. */
static uint32_t error_now(const struct pg_arena *a, const struct pg_operation *op)
{
    const bool targets = has_targets(op->condition);
    uint32_t spare = targets ? op->keys - keys_needed(op) : 0, error = 0;
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(a, x)->sibling) {
        if (LIKELY(watermark_of(a, x)->error == 0) || (targets && target_reached(a, x)))
            continue;
        error = error != 0 ? error : watermark_of(a, x)->error;
        if (spare-- == 0)
            return error;
    }
    return 0;
}

static enum pg_cause cause_of(uint32_t error)
{
    return error != 0 ? PG_CAUSE_FAILED : PG_CAUSE_SATISFIED;
}

/* Return true if the condition holds (*error = 0) or has failed (*error = the error). */
static bool ends_now(const struct pg_arena *a, struct pg_operation *op, uint32_t *error)
{
    const bool holds = condition_holds(a, op);
    *error = holds ? 0 : error_now(a, op);
    return holds || *error != 0;
}

/* ---- places of watchers ------------------------------------------------------------------- */

static uint64_t clamp_add(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) || sum > PARKED ? PARKED : sum;
}

/* Place of a key in a SUM. Each unfinished key waits for its share of the missing sum, because the
 * sum cannot be reached before some key has gained its share. So the watchers of an operation are
 * visited O(keys x log threshold) times. */
static uint64_t sum_target(const struct pg_share *s, uint64_t watermark, uint64_t share)
{
    const uint64_t gain = gained(s, watermark);
    if (gain >= s->cap)
        return PARKED;
    const uint64_t step = share < s->cap - gain ? share : s->cap - gain;
    return clamp_add(watermark > s->base ? watermark : s->base, step);
}

static uint64_t sum_share(const struct pg_arena *a, struct pg_operation *op)
{
    uint32_t unfinished;
    const uint64_t sum = sum_now(a, op, &unfinished);
    if (unfinished == 0 || sum >= op->threshold)
        return PARKED;
    const uint64_t missing = op->threshold - sum;
    return missing / unfinished + (missing % unfinished != 0);
}

/* Return the place of a watcher of ALL, ANY or QUORUM. In an ANY, a watcher whose target is reached
 * keeps a place at or below the watermark, so that the next visit ends the operation. In an ALL,
 * the watcher of a failed key keeps its place, because the failure ends the operation. */
static uint64_t target_place(const struct pg_arena *a, const struct pg_operation *op, uint32_t x)
{
    const uint64_t target = watch_target(watch_at(a, x)->target);
    const bool any = op->condition == PG_C_ANY, all = op->condition == PG_C_ALL;
    if (target_reached(a, x))
        return any ? target : MET;
    return watermark_of(a, x)->error != 0 && !all ? FAILED_FROM + target : target;
}

static void key_met(struct pg_operation *op) { op->unmet -= op->unmet != 0; }

/* Return the next place of watcher x, which is the n-th watcher of the operation. */
static uint64_t next_target(const struct pg_arena *a, struct pg_operation *op, uint32_t x,
                            uint32_t n, uint64_t share)
{
    const uint64_t watermark = watermark_of(a, x)->watermark;
    if (op->condition == PG_C_SUM)
        return sum_target(&shares_of(op)[n], watermark, share);
    if (op->condition == PG_C_CLIENT)
        return op->check == PG_K_MOVED ? PARKED : watermark + 1;
    return target_place(a, op, x);
}

static void watch_move(struct pg_arena *a, uint32_t x, uint64_t target)
{
    watch_unlink(a, x);
    watch_link(a, x, target);
}

static void watches_place(struct pg_arena *a, struct pg_operation *op, bool linked)
{
    const uint64_t share = op->condition == PG_C_SUM ? sum_share(a, op) : 0;
    uint32_t n = 0;
    op->unmet = keys_needed(op);
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(a, x)->sibling, n++) {
        const uint64_t target = next_target(a, op, x, n, share);
        if (target == MET)
            key_met(op);
        if (linked && target == watch_at(a, x)->target)
            continue;
        if (linked)
            watch_unlink(a, x);
        watch_link(a, x, target);
    }
}

/* ---- ending --------------------------------------------------------------------------------- */

static bool is_missing(const struct pg_arena *a, struct pg_operation *op, uint32_t x, uint32_t n)
{
    switch (op->condition) {
    case PG_C_SUM: return gained(&shares_of(op)[n], watermark_of(a, x)->watermark) == 0;
    case PG_C_CLIENT: return false;
    default: return !target_reached(a, x);
    }
}

/* Record each key's watermark, and which keys are missing or have failed. Mark the operation's own
 * keys as forgotten, so that they are freed with their last watcher. All this comes before the
 * store that ends the operation, so that a crash leaves no own key behind. */
static void keys_leave(struct pg_arena *a, struct pg_operation *op)
{
    const uint8_t *own = own_of(op);
    uint8_t *missing = operation_missing(op), *failed = failed_of(op);
    uint32_t n = 0;
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(a, x)->sibling, n++) {
        const uint8_t bit = (uint8_t)(1u << n % 8);
        last_watermarks_of(op)[n] = watermark_of(a, x)->watermark;
        if (is_missing(a, op, x, n))
            missing[n / 8] |= bit;
        if (UNLIKELY(watermark_of(a, x)->error != 0))
            failed[n / 8] |= bit;
        if (op->has_own && (own[n / 8] & bit))
            watermark_forget(a, watch_at(a, x)->key_row);
    }
}

static void watches_release(struct pg_arena *a, struct pg_operation *op)
{
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(a, x)->sibling) {
        const uint32_t row = watch_at(a, x)->key_row;
        watch_unlink(a, x);
        watermark_left(a, row);
    }
    watches_give(a, op->first_watch);
    op->first_watch = PG_NIL;
}

/* Write the notice into its blob. The blob was allocated when the operation was armed, so that an
 * operation needs no new memory to end. */
struct pg_entry operation_notice(struct pg_arena *a, uint32_t slot, unsigned flags)
{
    const struct pg_hot *h = slot_hot(a, slot);
    const struct pg_cold *c = slot_cold(a, slot);
    struct pg_operation *op = operation_at(a, slot);
    uint8_t *at = blob_at(&a->blobs, op->notice_blob) + c->key_len;
    const struct pg_verdict verdict = {op->ended_ns - op->armed_ns, op->error, op->keys,
                                       (uint16_t)bitmap_bytes(op->keys)};
    const struct pg_entry e = {.ticket = ctl_ticket(h->ctl) << 8 | op->cause,
                               .deadline_ns = h->deadline_ns, .fired_ns = op->ended_ns,
                               .blob = op->notice_blob,
                               .payload_len = notice_payload(op->keys, c->payload_len),
                               .hash = h->hash, .topic = h->topic,
                               .key_len = c->key_len,
                               .meta = (uint8_t)(c->key_type | flags << 4)};
    memcpy(at, &verdict, sizeof verdict);
    memcpy(at + sizeof verdict, operation_missing(op), bitmap_bytes(op->keys));
    return e;
}

static void end_measure(struct pg_arena *a, const struct pg_operation *op, int64_t deadline_ns)
{
    measure(a, PG_HG_REMOTE, op->ended_ns - op->armed_ns, 1);
    if (op->cause == PG_CAUSE_EXPIRED)
        measure(a, PG_HG_STRUCTURAL_LATENESS, op->ended_ns - deadline_ns, 1);
}

static void count_end(struct pg_arena *a, enum pg_cause cause)
{
    uint64_t *counter = cause == PG_CAUSE_SATISFIED ? &a->metrics->satisfied
                        : cause == PG_CAUSE_EXPIRED ? &a->metrics->expired
                        : cause == PG_CAUSE_FAILED  ? &a->metrics->failed
                                                    : &a->metrics->cancelled;
    ++*counter;
    a->metrics->operations--;
}

/* End an operation that is not in the wheel. */
static void operation_close(struct pg_arena *a, uint32_t slot, enum pg_cause cause,
                            uint32_t error)
{
    struct pg_operation *op = operation_at(a, slot);
    struct pg_hot *h = slot_hot(a, slot);
    struct probe at;

    keys_leave(a, op);
    op->error = error;
    op->ended_ns = a->call.moment_ns;
    op->cause = (uint8_t)cause;
    op->check = PG_K_NONE;
    slot_counted(a, slot, -1);
    struct pg_entry e;
    struct job_traits traits = {0};
    if (op->notice_blob != PG_NIL) {
        e = operation_notice(a, slot, PG_E_OPERATION | late_flag(a, h));
        traits = job_traits_of(a, &e, PG_NIL);
    }
    if (has_wal(a))
        wal_append_outcome(a, slot, &traits);
    if (op->notice_blob != PG_NIL) {
        replay_append(a, &e, &traits);
        op->notice_blob = PG_NIL;
    }
    slot_state_set(h, ctl_ticket(h->ctl), PG_S_OUTCOME);
    atomic_thread_fence(memory_order_release);   /* the fence precedes reuse of its watch records */
    watches_release(a, op);
    if (index_find_id(&a->index, h->hash, slot, &at))
        index_erase(&a->index, &at);
    count_end(a, cause);
    end_measure(a, op, h->deadline_ns);
    a->metrics->outcomes++;
    inbox_add(a, slot);
}

void operation_end(struct pg_arena *a, uint32_t slot, enum pg_cause cause, uint32_t error)
{
    wheel_remove(&a->wheel, slot);
    operation_close(a, slot, cause, error);
}

/* Return whether the WAL frame and the notice of the operation's end can be written now. The replay
 * buffer counts only the blobs of its own entries. The notice's blob will count as soon as the
 * notice is an entry, so the replay buffer needs space for it. */
bool operation_may_end(struct pg_arena *a, uint32_t slot)
{
    const uint64_t granules = operation_granules(a, slot);
    return !wal_buffer_full(a) && (granules == 0 || replay_make_space(a, granules * PG_GRANULE));
}

/* Return whether the outage affects the operation. The outage has no effect on an operation that
 * was due before it, or that was armed after it and is due after it. */
bool operation_waits(const struct pg_arena *a, uint32_t slot)
{
    const int64_t deadline_ns = slot_hot(a, slot)->deadline_ns;
    const bool later = operation_at(a, slot)->armed_ns >= a->state.hold_upto_ns;
    return deadline_ns > a->state.hold_after_ns && !(later && deadline_ns > a->state.hold_upto_ns);
}

/* There may be an advance or a failure that has not visited this operation yet. The operation's
 * condition is therefore checked first, and takes precedence over the deadline. */
bool operation_expire(struct pg_arena *a, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    uint32_t error;
    if (a->call.visits_left == 0 || !operation_may_end(a, slot))
        return false;
    work_done(a, op->keys / KEYS_PER_VISIT);
    const bool ends = ends_now(a, op, &error);
    a->metrics->already_true += ends && error == 0;
    operation_close(a, slot, ends ? cause_of(error) : PG_CAUSE_EXPIRED, error);
    return true;
}

/* ---- CLIENT conditions ----------------------------------------------------------------------- */

/* Ask the owner with a CHECK. The owner has at most one CHECK at a time. If a watermark moves
 * before the owner has answered, the owner receives another CHECK later. */
static void ask(struct pg_arena *a, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    if (op->check != PG_K_NONE) {
        op->check = PG_K_MOVED;
    } else {
        op->check = PG_K_ASKED;
        op->version++;
        a->metrics->checks++;
        inbox_add(a, slot);
    }
    watches_place(a, op, true);
}

void operation_answered_no(struct pg_arena *a, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    const bool moved = op->check == PG_K_MOVED;
    PG_ASSERT(op->check != PG_K_NONE, "operations", "an answered CHECK was sent before");
    inbox_remove(a, slot);
    op->check = PG_K_NONE;
    if (moved)
        ask(a, slot);
}

bool key_cancel(struct pg_arena *a, const struct key *k, uint64_t ticket, struct pg_result *r)
{
    struct probe at;
    const uint32_t id = key_find(a, k, &at);
    if (id != PG_NIL && id >= a->slots.capacity) {
        cancel_fired(a, id, ticket, r);
        return true;
    }
    if (id == PG_NIL || (ticket != 0 && ticket != ctl_ticket(slot_hot(a, id)->ctl))) {
        a->metrics->cancels_unknown++;
        answer(r, 0, PG_ST_UNKNOWN, 0);
        return true;
    }
    if (wal_buffer_full(a) || (is_operation(a, id) && !operation_may_end(a, id)))
        return false;
    answer_slot(a, r, id, PG_ST_CANCELLED);
    if (is_operation(a, id))
        operation_end(a, id, PG_CAUSE_CANCELLED, 0);
    else
        cancel_timer(a, id, &at);
    return true;
}

/* Only the owner may complete an operation, because the key may now belong to an operation of
 * another session. */
bool operations_complete(struct pg_arena *a, const struct key *key, uint64_t session,
                         uint64_t version, struct pg_result *r)
{
    const uint32_t slot = timers_find(a, key);
    if (slot == PG_NIL || !is_operation(a, slot) || operation_at(a, slot)->session != session ||
        operation_at(a, slot)->condition != PG_C_CLIENT) {
        answer(r, 0, PG_ST_UNKNOWN, 0);
        return true;
    }
    const bool current = operation_at(a, slot)->version == version;
    if (current && !operation_may_end(a, slot))
        return false;
    answer(r, ctl_ticket(slot_hot(a, slot)->ctl), PG_ST_DONE, current);
    if (current)
        operation_end(a, slot, PG_CAUSE_SATISFIED, 0);
    return true;
}

/* ---- arming ------------------------------------------------------------------------------- */

#define BORN 0x80000000u          /* flag in a->call.rows[]: this call created the row */
#define FEW 8                     /* up to this many rows are compared in pairs; more are hashed */

static uint32_t row_at(const struct pg_arena *a, uint32_t n) { return a->call.rows[n] & ~BORN; }

static bool among_first(const struct pg_arena *a, uint32_t row, uint32_t count)
{
    for (uint32_t n = 0; n < count; n++)
        if (row_at(a, n) == row)
            return true;
    return false;
}

/* Return the number of cells in the hash set for `count` rows. It is a power of two; at most half
 * of the cells are used. */
static uint32_t seen_cells(uint32_t count)
{
    return 1u << (33 - (uint32_t)__builtin_clz(count));
}

/* Add the n-th row to the hash set. Return whether the row was already in the set. */
static bool seen_before(struct pg_arena *a, uint32_t count, uint32_t row, uint32_t n)
{
    const uint32_t mask = seen_cells(count) - 1;
    uint32_t cell = row * 0x9e3779b1u >> 20 & mask;
    if (n == 0)
        memset(a->call.seen, 0, seen_cells(count) * sizeof *a->call.seen);
    for (; a->call.seen[cell] != 0; cell = (cell + 1) & mask)
        if (row_at(a, a->call.seen[cell] - 1u) == row)
            return true;
    a->call.seen[cell] = (uint16_t)(n + 1);
    return false;
}

static bool row_repeats(struct pg_arena *a, uint32_t count, uint32_t row, uint32_t n)
{
    return count <= FEW ? among_first(a, row, n) : seen_before(a, count, row, n);
}

#define ANSWERED PG_ST_NONE       /* instead of a status: the record has been answered */

static unsigned rows_resolve(struct pg_arena *a, struct watch *w, uint32_t *done,
                             struct pg_result *r)
{
    struct key key = {.namespace_row = w->put->key.namespace_row, .row_guess = PG_NIL};
    const uint8_t *at = w->keys;
    uint32_t own = 0;
    for (*done = 0; *done < w->count; ++*done) {
        const wire_watch_key *k = (const wire_watch_key *)at;
        key.bytes = (const uint8_t *)(k + 1);
        key.hash = w->hashes[*done];
        key.len = k->key_len;
        key.type = k->key_type;
        uint32_t row = watermark_find(a, &key), born = 0;
        if (row == PG_NIL) {
            row = watermark_born(a, &key, true, r);
            born = BORN;
        }
        if (row == PG_NIL)
            return ANSWERED;
        if (row_repeats(a, w->count, row, *done))
            return PG_ST_DUPLICATE;
        a->call.rows[*done] = row | born;
        own |= k->flags & PG_WK_OWN;
        at += sizeof *k + key.len;
    }
    w->has_own = own != 0;
    w->ext = ext_bytes(w->condition, w->count, w->has_own);
    return PG_ST_ADDED;
}

static void rows_undo(struct pg_arena *a, uint32_t done)
{
    while (done-- > 0)
        if (a->call.rows[done] & BORN)
            watermark_free(a, row_at(a, done));
}

/* Link a watcher at its first place, and note whether the operation may have to end immediately. */
static inline void target_join(struct pg_arena *a, struct watch *w, struct pg_operation *op,
                               uint32_t x)
{
    const struct pg_watermark *l = watermark_of(a, x);
    const uint64_t place = target_place(a, op, x);
    w->may_end |= (l->watermark >= watch_at(a, x)->target) | (l->error != 0);
    if (place == MET)
        key_met(op);
    watch_link(a, x, place);
}

/* Write base and cap of the n-th key's share of a SUM. */
static inline void share_write(struct pg_operation *op, uint32_t n, const wire_watch_key *k,
                               uint64_t watermark)
{
    shares_of(op)[n] = (struct pg_share){k->target == UINT64_MAX ? watermark : k->target, k->cap};
}

/* Take watch records in the order of the keys, because the bitmaps that the owner receives have
 * this order. The watchers of SUM and CLIENT are placed after all keys are known. */
static void keys_join(struct pg_arena *a, struct watch *w, uint32_t slot, struct pg_operation *op)
{
    const bool targets = has_targets(w->condition);
    const uint8_t *at = w->keys;
    uint32_t x = op->first_watch = watches_take(a, w->count), own = 0;
    w->may_end = !targets;
    op->unmet = keys_needed(op);
    for (uint32_t n = 0; n < w->count; n++, x = watch_at(a, x)->sibling) {
        const wire_watch_key *k = (const wire_watch_key *)at;
        struct pg_watch *watch = watch_at(a, x);
        watch->target = k->target;
        watch->key_row = row_at(a, n);
        watch->slot = slot;
        if (a->call.rows[n] & BORN || watermark_at(a, watch->key_row)->touched_s != PG_NIL)
            watermark_at(a, watch->key_row)->touched_s = a->call.real_s;
        if (targets)
            target_join(a, w, op, x);
        if (w->condition == PG_C_SUM)
            share_write(op, n, k, watermark_of(a, x)->watermark);
        own = own >> 1 | (k->flags & PG_WK_OWN) << 7;         /* eight keys fill the byte */
        if (w->has_own && n % 8 == 7)
            own_of(op)[n / 8] = (uint8_t)own;
        at += sizeof *k + k->key_len;
    }
    if (w->has_own && w->count % 8 != 0)
        own_of(op)[w->count / 8] = (uint8_t)(own >> (8 - w->count % 8));
    if (!targets)
        watches_place(a, op, false);
}

/* The payload directly follows the key in the message, so key and payload are copied together. */
static void blob_fill(struct pg_arena *a, const struct watch *w, uint32_t blob, uint32_t notice)
{
    struct pg_operation *op = (struct pg_operation *)blob_at(&a->blobs, blob);
    const struct put *p = w->put;

    *op = (struct pg_operation){.session = w->session, .threshold = w->threshold,
                                .armed_ns = a->call.moment_ns, .first_watch = PG_NIL,
                                .version = a->header->next_ticket << 32,
                                .notice_blob = notice, .inbox_next = PG_NIL,
                                .inbox_previous = PG_NIL, .keys = (uint16_t)w->count,
                                .condition = w->condition, .has_own = w->has_own,
                                .uid = a->call.uid};
    memset(op + 1, 0, w->ext - sizeof *op);
    memcpy((uint8_t *)op + w->ext, p->key.bytes, p->key.len + p->payload_len);
    if (notice == PG_NIL)
        return;
    uint8_t *at = blob_at(&a->blobs, notice);
    memcpy(at, p->key.bytes, p->key.len);
    memcpy(at + p->key.len + notice_payload(w->count, 0), p->payload, p->payload_len);
}

static uint32_t watch_granules(const struct watch *w)
{
    return blob_granules((uint64_t)w->ext + w->put->key.len + w->put->payload_len);
}

static uint32_t watch_notice_granules(const struct watch *w)
{
    return w->notice ? granules_of_notice(w->put->key.len, w->count, w->put->payload_len) : 0;
}

static bool watch_admitted(struct pg_arena *a, const struct watch *w, struct pg_result *r)
{
    return LIKELY(!w->put->limited) ||
           quota_admits(a, w->put, watch_granules(w) + watch_notice_granules(w), PG_NIL, r);
}

static bool jobs_admitted(struct pg_arena *a, const struct watch *w, struct pg_result *r)
{
    return !has_groups(a, w->put->topic) ||
           jobs_admit(a, w->put->topic, 1, watch_granules(w) + watch_notice_granules(w), r);
}

/* Allocate both blobs or none of them. */
static bool blobs_for(struct pg_arena *a, const struct watch *w, uint32_t *blob, uint32_t *notice)
{
    *notice = PG_NIL;
    *blob = blobs_take(&a->blobs, watch_granules(w));
    if (*blob == PG_NIL)
        return false;
    if (!w->notice)
        return true;
    *notice = blobs_take(&a->blobs, watch_notice_granules(w));
    if (*notice != PG_NIL)
        return true;
    blobs_give(&a->blobs, *blob, watch_granules(w));
    return false;
}

/* Write the authoritative state and the answer of a new operation. The control word is written
 * last. */
static uint32_t operation_write(struct pg_arena *a, struct watch *w, int64_t deadline_ns,
                                uint32_t blob, uint32_t notice, struct pg_result *r)
{
    const uint32_t slot = slots_take(&a->slots);
    const uint64_t ticket = a->header->next_ticket;
    struct pg_hot *h = slot_hot(a, slot);

    blob_fill(a, w, blob, notice);
    STORE_RELEASE(&a->header->next_ticket, ticket + 1);
    answer(r, ticket, PG_ST_ADDED, deadline_ns);
    keys_join(a, w, slot, (struct pg_operation *)blob_at(&a->blobs, blob));
    *slot_cold(a, slot) = (struct pg_cold){
        .blob = blob, .payload_len = w->put->payload_len, .key_len = w->put->key.len,
        .key_type = w->put->key.type, .ext_len = (uint16_t)w->ext, .account = w->put->account};
    h->deadline_ns = deadline_ns;
    h->flags = PG_F_OPERATION;
    h->hash = w->put->key.hash;
    h->topic = (uint16_t)w->put->topic;
    if (has_wal(a))
        wal_append_watch(a, slot, ticket);
    slot_state_set(h, ticket, PG_S_ARMED);
    a->metrics->blob_bytes += slot_bytes(a, slot);
    return slot;
}

/* End a new operation immediately if it does not have to wait. The caller has checked that there is
 * space for its notice. */
static void settle(struct pg_arena *a, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    uint32_t error;
    if (ends_now(a, op, &error))
        operation_end(a, slot, cause_of(error), error);
    else if (op->condition == PG_C_CLIENT)
        ask(a, slot);
}

static unsigned watch_slots_status(const struct pg_arena *a, const struct watch *w,
                                   struct pg_result *r)
{
    const struct pg_session *s = session_find(a, w->session);
    if (s == NULL || inbox_full(a, s))
        return PG_ST_BUSY;
    if (!share_admits_watches(a, w->count, r) || !share_admits_operation(a, r))
        return ANSWERED;
    if (watches_free(a) < w->count)
        return PG_ST_FULL_WATCHES;
    return slots_status(a, false);
}

static unsigned watch_arm(struct pg_arena *a, struct watch *w, int64_t deadline_ns,
                          uint32_t *slot, struct pg_result *r)
{
    uint32_t done = 0, blob, notice;
    unsigned status = watch_slots_status(a, w, r);
    if (status != PG_ST_ADDED)
        return status;
    status = rows_resolve(a, w, &done, r);
    if (status == PG_ST_ADDED && (!watch_admitted(a, w, r) || !jobs_admitted(a, w, r)))
        status = ANSWERED;
    if (status == PG_ST_ADDED && !blobs_for(a, w, &blob, &notice))
        status = payload_refusal(a);
    if (status != PG_ST_ADDED) {
        rows_undo(a, done);
        return status;
    }
    *slot = operation_write(a, w, deadline_ns, blob, notice, r);
    return status;
}

static void operation_bind(struct pg_arena *a, uint32_t slot, uint32_t id, const struct probe *at)
{
    const uint32_t hash = slot_hot(a, slot)->hash;
    if (id == PG_NIL) {
        index_insert(&a->index, hash, slot);
    } else {
        replay_supersede(a, id);
        index_replace(&a->index, hash, at, slot);
    }
    slot_place(a, slot);
    slot_counted(a, slot, 1);
    account_operation_counted(a, session_find(a, operation_at(a, slot)->session), 1);
    a->metrics->watches++;
    a->metrics->operations++;
}

static bool notice_fits(struct pg_arena *a, const struct watch *w)
{
    return !w->notice || replay_make_space(a, (uint64_t)watch_notice_granules(w) * PG_GRANULE);
}

bool operations_watch(struct pg_arena *a, struct watch *w, struct pg_result *r)
{
    struct probe at;
    int64_t deadline_ns;
    uint32_t slot = PG_NIL;
    unsigned status = PG_ST_TOO_FAR;
    if (a->call.visits_left == 0 || !notice_fits(a, w))
        return false;
    work_done(a, w->count / KEYS_PER_VISIT);
    const uint32_t id = key_find(a, &w->put->key, &at);
    const uint32_t other = id < a->slots.capacity ? id : unique_find(a, &w->put->key);
    if (other != PG_NIL) {
        if (other == id)
            answer_slot(a, r, other, PG_ST_EXISTS);
        else
            answer_unique(a, r, other);
        return true;
    }
    if (time_resolve(a, w->put, &deadline_ns))
        status = watch_arm(a, w, deadline_ns, &slot, r);
    if (status == ANSWERED)
        return true;
    if (status != PG_ST_ADDED) {
        answer(r, 0, status,
               status == PG_ST_BUSY ? (int64_t)inbox_max(a) : 0);
        return true;
    }
    operation_bind(a, slot, id, &at);
    if (w->may_end)
        settle(a, slot);
    return true;
}

/* ---- triggers ------------------------------------------------------------------------------ */

/* End an operation and count it in the trigger's answer. The count is the lower half of the
 * answer's deadline_ns. Until the operation is counted, the upper half contains the operation's
 * slot + 1. The rebuild after a kill can therefore decide whether to count the operation. */
static void end_counted(struct pg_arena *a, uint32_t slot, enum pg_cause cause, uint32_t error,
                        struct pg_result *r)
{
    const int64_t count = r->deadline_ns;
    STORE_RELEASE(&r->deadline_ns, (int64_t)(slot + 1ull) << 32 | count);
    operation_end(a, slot, cause, error);
    STORE_RELEASE(&r->deadline_ns, count + 1);
}

void trigger_recover(const struct pg_arena *a, struct pg_result *r)
{
    const uint64_t ending = (uint64_t)r->deadline_ns >> 32;
    const bool ended = ending != 0 && ending <= a->slots.capacity &&
                       ctl_state(slot_hot(a, ending - 1)->ctl) != PG_S_ARMED;
    STORE_RELEASE(&r->deadline_ns, (int64_t)(uint32_t)r->deadline_ns + ended);
}

/* Return whether watcher x, whose target is reached, causes the end of its operation. */
static bool ends_by(const struct pg_arena *a, uint32_t x)
{
    struct pg_operation *op = operation_at(a, watch_at(a, x)->slot);
    uint32_t unfinished;
    switch (op->condition) {
    case PG_C_CLIENT: return false;
    case PG_C_ALL:
    case PG_C_QUORUM: return op->unmet <= 1;
    case PG_C_SUM: return sum_now(a, op, &unfinished) >= op->threshold;
    default: return true;
    }
}

/* Move a watcher whose target is reached to its next place. The operation continues to wait. */
static void waits_on(struct pg_arena *a, uint32_t x)
{
    const uint32_t slot = watch_at(a, x)->slot;
    struct pg_operation *op = operation_at(a, slot);

    if (op->condition == PG_C_CLIENT) {
        ask(a, slot);
    } else if (op->condition == PG_C_SUM) {
        watches_place(a, op, true);
    } else {
        watch_move(a, x, MET);
        key_met(op);
    }
}

/* Return whether this call may make another visit, and if so, count the visit as work of the call.
 * Space in the WAL buffer and the replay buffer is needed only for a visit that ends the operation.
 * A visit examines all keys of the operation, except if an ALL or QUORUM continues to wait. */
static bool visit_allowed(struct pg_arena *a, uint32_t x, bool ends)
{
    const uint32_t slot = watch_at(a, x)->slot;
    const struct pg_operation *op = operation_at(a, slot);
    const bool all_keys = ends || !has_targets(op->condition);
    if (a->call.visits_left == 0 || (ends && !operation_may_end(a, slot)))
        return false;
    work_done(a, 1 + (all_keys ? op->keys / KEYS_PER_VISIT : 0));
    a->metrics->visits++;
    return true;
}

/* Return the first watcher whose target the key's watermark has reached, even if a failure of the
 * key has moved the watcher's place; PG_NIL = none. */
static uint32_t reached_first(const struct pg_arena *a, const struct pg_watermark *l)
{
    const bool reached = l->first != PG_NIL && watch_at(a, l->first)->target <= l->watermark;
    if (reached || l->first == PG_NIL || LIKELY(l->error == 0))
        return reached ? l->first : PG_NIL;
    const uint32_t x = watch_above(a, row_of_watermark(a, l), FAILED_FROM);
    return x == PG_NIL || watch_target(watch_at(a, x)->target) > l->watermark ? PG_NIL : x;
}

/* Visit every watcher whose target is reached. If the key is forgotten, its row may be freed with
 * the last watcher; the row's `first` is then PG_NIL. */
static bool walk(struct pg_arena *a, uint32_t row, struct pg_result *r)
{
    const struct pg_watermark *l = watermark_at(a, row);
    for (uint32_t x; (x = reached_first(a, l)) != PG_NIL;) {
        const bool ends = ends_by(a, x);
        if (!visit_allowed(a, x, ends))
            return false;
        if (ends)
            end_counted(a, watch_at(a, x)->slot, PG_CAUSE_SATISFIED, 0, r);
        else
            waits_on(a, x);
    }
    return true;
}

bool operations_advance(struct pg_arena *a, uint32_t row, uint64_t watermark, struct pg_result *r)
{
    if (watermark > watermark_at(a, row)->watermark) {
        a->metrics->advances++;
        watermark_set(a, row, watermark, watermark_at(a, row)->error);
    }
    return walk(a, row, r);
}

/* Another record that advances this key may be unfinished. Watchers whose target is reached are
 * therefore visited first, and an operation whose condition holds does not fail. */
bool operations_fail(struct pg_arena *a, uint32_t row, uint32_t error, bool goes_on,
                     struct pg_result *r)
{
    const struct pg_watermark *l = watermark_at(a, row);
    /* A continued call must not set the error again, because the key may have been forgotten since
     * the earlier call. */
    if (!goes_on)
        watermark_set(a, row, l->watermark, error);
    if (!walk(a, row, r))
        return false;
    /* If another record clears the error between two calls for this record, no further operation
     * fails. */
    while (l->first != PG_NIL && watch_at(a, l->first)->target <= PARKED && l->error == error) {
        const uint32_t x = l->first, slot = watch_at(a, x)->slot;
        uint32_t why;
        const bool ends = ends_now(a, operation_at(a, slot), &why);
        if (!visit_allowed(a, x, ends))
            return false;
        if (ends)
            end_counted(a, slot, cause_of(why), why, r);
        else
            watch_move(a, x, FAILED_FROM + watch_at(a, x)->target);
    }
    return true;
}

/* While a key was failed, advances skipped its watchers. Watchers whose target was reached while
 * the key was failed are visited at the end of this function. */
bool operations_clear(struct pg_arena *a, uint32_t row, bool goes_on, struct pg_result *r)
{
    const struct pg_watermark *l = watermark_at(a, row);
    uint32_t x;
    if (!goes_on)
        watermark_clear(a, row);
    while (l->error == 0 && (x = watch_above(a, row, FAILED_FROM)) != PG_NIL &&
           watch_at(a, x)->target != MET) {
        if (!visit_allowed(a, x, false))
            return false;
        watch_move(a, x, watch_target(watch_at(a, x)->target));
    }
    return walk(a, row, r);
}

static bool ended_key_write(const struct pg_arena *a, uint32_t slot, struct sink *out)
{
    const struct pg_cold *c = slot_cold(a, slot);
    uint8_t *at = sink_take(out, 2u + c->key_len);
    if (at == NULL)
        return false;
    at[0] = c->key_type;
    at[1] = c->key_len;
    memcpy(at + 2, blob_at(&a->blobs, c->blob) + c->ext_len, c->key_len);
    return true;
}

/* Skip the keys of operations that were ended before a kill. They are at the beginning of `out`. */
static void ended_keys_skip(struct sink *out, int64_t count)
{
    while (count-- > 0 && sink_take(out, 2u + out->bytes[out->used + 1]) != NULL)
        continue;
}

void operations_cancel_for_key(struct pg_arena *a, uint32_t row, struct sink *out,
                               struct pg_result *r)
{
    ended_keys_skip(out, r->deadline_ns);
    while (row != PG_NIL && watermark_at(a, row)->first != PG_NIL) {
        const uint32_t slot = watch_at(a, watermark_at(a, row)->first)->slot;
        if (!visit_allowed(a, watermark_at(a, row)->first, true) ||
            !ended_key_write(a, slot, out)) {
            r->ticket = PG_ST_MORE;
            return;
        }
        end_counted(a, slot, PG_CAUSE_CANCELLED, 0, r);
    }
}

/* ---- the WAL ------------------------------------------------------------------------------ */

static void records_restore(struct pg_arena *a, const struct pg_wal_watch *j,
                            const struct pg_wal_watch_key *keys, struct pg_operation *op)
{
    uint32_t x = op->first_watch = watches_take(a, j->keys);
    for (uint32_t n = 0; n < j->keys; n++, x = watch_at(a, x)->sibling) {
        watch_at(a, x)->target = keys[n].target;
        watch_at(a, x)->key_row = keys[n].row;
        watch_at(a, x)->slot = j->slot;
        if (keys[n].flags & PG_WK_OWN)
            own_of(op)[n / 8] |= (uint8_t)(1u << n % 8);
        if (op->condition == PG_C_SUM)
            shares_of(op)[n] = (struct pg_share){keys[n].base, keys[n].cap};
    }
}

bool operation_restore(struct pg_arena *a, const struct pg_wal_watch *j,
                       const struct pg_wal_watch_key *keys, uint16_t account)
{
    const uint8_t *key = (const uint8_t *)(keys + j->keys);
    const struct put p = {.key = {.bytes = key, .len = j->key_len, .type = j->key_type},
                          .payload = key + j->key_len, .payload_len = j->payload_len};
    struct watch w = {.put = &p, .session = j->session, .threshold = j->threshold,
                      .count = j->keys, .condition = j->condition, .notice = j->notice != 0};
    uint32_t blob, notice;
    for (uint32_t n = 0; n < j->keys; n++)
        w.has_own |= keys[n].flags & PG_WK_OWN;
    w.ext = ext_bytes(w.condition, w.count, w.has_own);
    if (watches_free(a) < j->keys || !blobs_for(a, &w, &blob, &notice))
        return false;
    blob_fill(a, &w, blob, notice);
    struct pg_operation *op = (struct pg_operation *)blob_at(&a->blobs, blob);
    op->armed_ns = j->armed_ns;
    op->uid = j->uid;
    op->version = j->ticket << 32;
    records_restore(a, j, keys, op);
    *slot_cold(a, j->slot) = (struct pg_cold){
        .blob = blob, .payload_len = j->payload_len, .key_len = j->key_len,
        .key_type = j->key_type, .ext_len = (uint16_t)operation_ext_bytes(op),
        .account = account};
    slot_restore(slot_hot(a, j->slot),
                 &(struct pg_hot){.ctl = ctl_of(j->ticket, PG_S_ARMED),
                                  .deadline_ns = j->deadline_ns, .flags = PG_F_OPERATION,
                                  .topic = (uint16_t)j->topic});
    return true;
}

void operation_end_restore(struct pg_arena *a, const struct pg_wal_outcome *j,
                           const uint8_t *missing)
{
    struct pg_operation *op = operation_at(a, j->slot);
    uint32_t n = 0;
    memcpy(operation_missing(op), missing, bitmap_bytes(op->keys));
    op->error = j->error;
    op->ended_ns = j->ended_ns;
    op->cause = j->cause;
    for (uint32_t x = op->first_watch; op->has_own && x != PG_NIL; x = watch_at(a, x)->sibling, n++)
        if (own_of(op)[n / 8] >> n % 8 & 1)
            watermark_forget(a, watch_at(a, x)->key_row);
}

void operation_release(struct pg_arena *a, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    if (op->notice_blob != PG_NIL)
        blobs_give(&a->blobs, op->notice_blob, (uint32_t)operation_granules(a, slot));
    watches_give(a, op->first_watch);
}

/* ---- rebuild ------------------------------------------------------------------------------- */

static bool chain_claim(struct pg_arena *a, uint32_t slot, struct pg_fault *why)
{
    const struct pg_operation *op = operation_at(a, slot);
    uint32_t n = 0;
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(a, x)->sibling, n++) {
        if (x >= a->watch_rows || n >= op->keys || watch_at(a, x)->slot != slot ||
            watch_claimed(a, x) || watch_at(a, x)->key_row >= a->watermark_rows ||
            watermark_of(a, x)->key_len == 0)
            return fault_set(why, "operations",
                             "an operation leads to another operation's watch record", slot, n, x);
        watch_claim(a, x);
    }
    if (n != op->keys)
        return fault_set(why, "operations", "watch records of an operation", slot, op->keys, n);
    return slot_cold(a, slot)->ext_len == operation_ext_bytes(op) ||
           fault_set(why, "operations", "bytes before the key of an operation", slot,
                     operation_ext_bytes(op), slot_cold(a, slot)->ext_len);
}

/* A kill interrupted the end of this operation, and there is no space yet for its frame or notice.
 * Place the watchers of the operation so that the next failure of any of its keys ends the
 * operation. If the condition holds, the next advance of a key ends the operation as well, however
 * small the advance is. In a SUM this can be any key, otherwise any key that has reached its
 * target. */
static void stand_ready(struct pg_arena *a, struct pg_operation *op, bool holds)
{
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(a, x)->sibling) {
        if (holds && (op->condition == PG_C_SUM || target_reached(a, x)))
            watch_move(a, x, 0);
        else if (watch_at(a, x)->target > PARKED)
            watch_move(a, x, watch_target(watch_at(a, x)->target));
    }
    op->unmet = 1;
}

/* Return the answer of the interrupted record that would have ended this operation. */
static struct pg_result *trigger_of(const struct pg_arena *a, const struct pg_operation *op)
{
    struct pg_result *r = NULL;
    for (uint32_t x = op->first_watch; x != PG_NIL && r == NULL; x = watch_at(a, x)->sibling)
        r = session_trigger(a, watch_at(a, x)->key_row);
    return r;
}

/* The owner may have received the CHECK before the kill, and may have answered it. Send the CHECK
 * again. If the owner answers "false", it receives another CHECK, because a watermark may have
 * moved without a CHECK. */
static void ask_again(struct pg_arena *a, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    if ((uint32_t)op->version == 0) {
        ask(a, slot);
        return;
    }
    op->check = PG_K_MOVED;
    inbox_add(a, slot);
    watches_place(a, op, true);
}

/* End an operation if a kill prevented its end. */
static void settle_again(struct pg_arena *a, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    struct pg_result uncounted = {0, 0}, *r;
    uint32_t error;
    if (!ends_now(a, op, &error)) {
        if (op->condition == PG_C_CLIENT)
            ask_again(a, slot);
    } else if (!operation_may_end(a, slot)) {
        stand_ready(a, op, error == 0);
    } else {
        r = trigger_of(a, op);
        end_counted(a, slot, cause_of(error), error, r != NULL ? r : &uncounted);
    }
}

static bool armed_operation(const struct pg_arena *a, uint32_t slot)
{
    return ctl_state(slot_hot(a, slot)->ctl) == PG_S_ARMED && is_operation(a, slot);
}

/* Reset everything that an interrupted end has written. */
static void armed_again(struct pg_arena *a, struct pg_operation *op)
{
    op->cause = 0;
    op->error = 0;
    memset(op + 1, 0, operation_end_bytes(op->keys));
    op->check = PG_K_NONE;
    op->in_inbox = 0;
    watches_place(a, op, false);
}

/* Return whether a kill may have prevented the operation's end, or the owner of the operation has
 * to be asked. */
static bool is_unsettled(const struct pg_arena *a, struct pg_operation *op)
{
    uint32_t error;
    return op->condition == PG_C_CLIENT || ends_now(a, op, &error);
}

static void owner_counts(struct pg_arena *a, const struct pg_operation *op)
{
    struct pg_session *s = a->secret == NULL ? NULL : session_find(a, op->session);
    if (s != NULL)
        s->owned++;
}

bool operations_link(struct pg_arena *a, const uint32_t *slots, uint32_t *count,
                     struct pg_fault *why)
{
    prefetch_links(a, slots, *count);
    for (uint32_t i = 0; i < *count; i++) {
        struct pg_operation *op = operation_at(a, slots[i]);
        if (!chain_claim(a, slots[i], why))
            return false;
        armed_again(a, op);
        owner_counts(a, op);
        if (slots[i] < a->state.rebuild.unsettled && is_unsettled(a, op))
            a->state.rebuild.unsettled = slots[i];
    }
    a->metrics->operations += *count;
    *count = 0;
    return true;
}

static void outcome_rebuild(struct pg_arena *a, uint32_t slot)
{
    operation_at(a, slot)->in_inbox = 0;
    operation_at(a, slot)->first_watch = PG_NIL;
    a->metrics->outcomes++;
    owner_counts(a, operation_at(a, slot));
    inbox_add(a, slot);
}

void operations_settle(struct pg_arena *a, uint32_t outcome, uint32_t unsettled)
{
    inboxes_reset(a);
    for (uint32_t slot = outcome; slot < a->slots.capacity; slot++) {
        operation_prefetch(a, slot + OPERATIONS_PREFETCH);
        if (ctl_state(slot_hot(a, slot)->ctl) == PG_S_OUTCOME)
            outcome_rebuild(a, slot);
    }
    watches_free_unclaimed(a);
    for (uint32_t slot = unsettled; slot < a->slots.capacity; slot++) {
        operation_prefetch(a, slot + OPERATIONS_PREFETCH);
        if (armed_operation(a, slot))
            settle_again(a, slot);
    }
    watermarks_drop_forgotten(a);
}

/* ---- check --------------------------------------------------------------------------------- */

static bool end_noted(const struct pg_arena *a, uint32_t slot)
{
    struct pg_operation *op = operation_at(a, slot);
    bool noted = false;
    for (uint32_t n = 0; n < operation_end_bytes(op->keys); n++)
        noted |= ((uint8_t *)(op + 1))[n] != 0;
    return noted;
}

/* Check that an armed operation has one watch record per key, and an ended operation has none. */
static bool chain_check(const struct pg_arena *a, uint32_t slot, bool armed, struct pg_fault *fault)
{
    const struct pg_operation *op = operation_at(a, slot);
    uint32_t n = 0;
    for (uint32_t x = op->first_watch; x != PG_NIL; x = watch_at(a, x)->sibling, n++)
        if (n >= op->keys || x >= a->watch_rows || watch_at(a, x)->slot != slot)
            return fault_set(fault, "operations",
                             "an operation leads to another operation's watch record", slot, n, x);
    return n == (armed ? op->keys : 0) ||
           fault_set(fault, "operations", "watch records of an operation", slot,
                     armed ? op->keys : 0, n);
}

static bool operation_check(const struct pg_arena *a, uint32_t slot, struct pg_fault *fault)
{
    const struct pg_operation *op = operation_at(a, slot);
    const uint64_t ticket = ctl_ticket(slot_hot(a, slot)->ctl);
    const bool armed = armed_operation(a, slot);
    if (!chain_check(a, slot, armed, fault))
        return false;
    if ((op->cause == 0) != armed || (op->error != 0 && op->cause != PG_CAUSE_FAILED))
        return fault_set(fault, "operations", "cause or error", slot, op->cause, op->error);
    if (armed && end_noted(a, slot))
        return fault_set(fault, "operations", "an operation that has not ended has an outcome",
                         slot, 0, 1);
    return (uint32_t)(op->version >> 32) == (uint32_t)ticket ||
           fault_set(fault, "operations", "the version belongs to another operation", slot, ticket,
                     op->version >> 32);
}

bool operations_check(const struct pg_arena *a, struct pg_fault *fault)
{
    uint64_t armed = 0, ended = 0, owned = 0;
    for (uint32_t slot = 0; slot < a->slots.capacity; slot++) {
        if (ctl_state(slot_hot(a, slot)->ctl) == PG_S_FREE || !is_operation(a, slot))
            continue;
        if (!operation_check(a, slot, fault))
            return false;
        ++*(armed_operation(a, slot) ? &armed : &ended);
        owned += a->secret != NULL && session_find(a, operation_at(a, slot)->session) != NULL;
    }
    for (uint32_t i = 0; a->secret != NULL && i < a->state.session_rows; i++)
        owned -= session_at(a, i)->id != 0 ? session_at(a, i)->owned : 0;
    if (owned != 0)
        return fault_set(fault, "operations", "operations that sessions own", 0, 0, owned);
    if (armed != a->metrics->operations)
        return fault_set(fault, "operations", "count of operations", 0, armed,
                         a->metrics->operations);
    return ended == a->metrics->outcomes ||
           fault_set(fault, "operations", "count of outcomes", 0, ended, a->metrics->outcomes);
}

/* ---- readers ------------------------------------------------------------------------------ */

static struct pg_info_watch watch_info(const struct pg_operation *op, const uint8_t *blob,
                                       uint32_t n, uint64_t place)
{
    const uint8_t *own = blob + sizeof *op + operation_end_bytes(op->keys);
    const uint8_t *shares = blob + sizeof *op + bitmaps_space(op->keys, op->has_own);
    struct pg_info_watch watch = {.own = op->has_own && (own[n / 8] >> n % 8 & 1)};
    struct pg_share share;

    if (has_targets(op->condition))
        watch.target = watch_target(place);
    if (op->condition == PG_C_SUM) {
        memcpy(&share, shares + n * sizeof share, sizeof share);
        watch.target = share.base;
        watch.cap = share.cap;
    }
    return watch;
}

void operation_info(const struct pg_arena *a, const struct pg_operation *op, const uint8_t *blob,
                    struct pg_info *info, struct sink *out)
{
    const uint64_t before = out->used;
    uint32_t x = op->first_watch;

    info->owner = op->session;
    info->owner_uid = op->uid;
    info->threshold = op->threshold;
    info->condition = op->condition;
    for (uint32_t n = 0; n < op->keys && x < a->watch_rows; n++) {
        const struct pg_watch w = *watch_at(a, x);
        struct pg_info_watch watch = watch_info(op, blob, n, w.target);
        if (!watermark_info(a, w.key_row, &watch, out))
            break;
        info->keys++;
        x = w.sibling;
    }
    info->ext_bytes = (uint32_t)(out->used - before);
}

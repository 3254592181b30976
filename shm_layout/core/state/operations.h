/* operations.h - the purgatory. An operation ends when its condition on watch keys holds or when it
 * times out, whichever comes first, and exactly once. */
#ifndef PURGATORYD_STATE_OPERATIONS_H
#define PURGATORYD_STATE_OPERATIONS_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/state/keys.h"
#include "core/state/timers.h"

struct watch {
    const struct put *put;        /* key, payload, topic and time */
    uint64_t session, threshold;
    const uint8_t *keys;          /* struct pg_watch_key and key bytes, validated */
    const uint32_t *hashes;       /* hashes of the keys */
    uint32_t keys_bytes, count;
    uint8_t condition;
    bool notice;
    bool has_own;                 /* set while it is armed: some key is its own */
    bool may_end;                 /* set while it is armed: it may have to end at once */
    uint32_t ext;                 /* bytes of the blob before the key */
};

static inline bool has_targets(unsigned condition)
{
    return condition != PG_C_SUM && condition != PG_C_CLIENT;
}
static inline struct pg_operation *operation_at(const struct pg_arena *a, uint32_t slot)
{
    return (struct pg_operation *)blob_at(&a->blobs, slot_cold(a, slot)->blob);
}
static inline bool is_operation(const struct pg_arena *a, uint32_t slot)
{
    return (slot_hot(a, slot)->flags & PG_F_OPERATION) != 0;
}
static inline bool is_bulk_loaded(const struct pg_hot *h)
{
    return (h->flags & PG_F_BULK_LOADED) != 0;
}
/* For loops over all slots: prefetch the blob of an operation that is this many slots ahead. */
#define OPERATIONS_PREFETCH 16
static inline void operation_prefetch(const struct pg_arena *a, uint32_t slot)
{
    if (slot >= a->slots.capacity || !is_operation(a, slot))
        return;
    fetch(operation_at(a, slot));
    fetch(operation_at(a, slot) + 1);
}
/* Write the keys that an operation waits for to `out`, and the other facts to `info`. `op` is a
 * copy of the blob's head; the operation may have ended meanwhile. */
void operation_info(const struct pg_arena *a, const struct pg_operation *op, const uint8_t *blob,
                    struct pg_info *info, struct sink *out);
/* Arm an operation in a free slot as a WATCH frame describes it, counted in `account`. Returns
 * false if there is no space. */
bool operation_restore(struct pg_arena *a, const struct pg_wal_watch *j,
                       const struct pg_wal_watch_key *keys, uint16_t account);
/* End an armed operation as an OUTCOME frame describes it: cause, missing keys, own keys
 * forgotten. */
void operation_end_restore(struct pg_arena *a, const struct pg_wal_outcome *j,
                           const uint8_t *missing);
/* Return the notice of an operation that has its cause. The caller takes over the notice's blob. */
struct pg_entry operation_notice(struct pg_arena *a, uint32_t slot, unsigned flags);
/* Give back watch records and the notice's blob, before derived state exists. */
void operation_release(struct pg_arena *a, uint32_t slot);
/* Arm an operation. Returns false, with nothing changed, if its notice has no space in the replay
 * buffer now or the work of this call is used up: call again. */
bool operations_watch(struct pg_arena *a, struct watch *w, struct pg_result *result);
/* Return whether the operation's end has space in WAL buffer and replay buffer. */
bool operation_may_end(struct pg_arena *a, uint32_t slot);
/* Cancel the timer or operation of a key. Returns false, with nothing changed, if the WAL buffer is
 * full or the operation's notice has no space in the replay buffer: call again. */
bool key_cancel(struct pg_arena *a, const struct key *key, uint64_t ticket,
                struct pg_result *result);
/* The owner answered the CHECK with "false"; it gets another one if a watermark has moved
 * meanwhile. */
void operation_answered_no(struct pg_arena *a, uint32_t slot);
/* End an armed operation that is in the wheel. */
void operation_end(struct pg_arena *a, uint32_t slot, enum pg_cause cause, uint32_t error);
/* Return whether the operation came due in the outage after which operations are held. */
bool operation_waits(const struct pg_arena *a, uint32_t slot);
/* Called by the wheel: check the condition once more, then end the operation. Returns false if the
 * WAL buffer or the replay buffer has no space now, or the work of this call is used up. */
bool operation_expire(struct pg_arena *a, uint32_t slot);
/* Apply a trigger to the watch key in a row. Each adds the number of operations that it ended to
 * result->deadline_ns. Returns false if the visits of this call are used up; the same call again
 * continues. */
bool operations_advance(struct pg_arena *a, uint32_t row, uint64_t watermark,
                        struct pg_result *result);
/* goes_on = true: a continued call; the key has had its new state since the first one. */
bool operations_fail(struct pg_arena *a, uint32_t row, uint32_t error, bool goes_on,
                     struct pg_result *result);
bool operations_clear(struct pg_arena *a, uint32_t row, bool goes_on, struct pg_result *result);
/* Write the keys of the cancelled operations to `out`: u8 type, u8 length, bytes. Row PG_NIL: the
 * watch key is gone. */
void operations_cancel_for_key(struct pg_arena *a, uint32_t row, struct sink *out,
                               struct pg_result *result);
/* Complete the count of a trigger that a kill interrupted. */
void trigger_recover(const struct pg_arena *a, struct pg_result *result);
/* Answer a CHECK with "true": end the operation as satisfied if `version` is that of its last
 * CHECK. Returns false, with nothing changed, if the end has no space now: call again. */
bool operations_complete(struct pg_arena *a, const struct key *key, uint64_t session,
                         uint64_t version, struct pg_result *result);
/* For a rebuild, once all records exist. operations_link takes a set of armed operations and sets
 * *count to 0. At the end operations_settle does what depends on all of them, for outcomes and
 * unsettled operations from these slots on. */
bool operations_link(struct pg_arena *a, const uint32_t *slots, uint32_t *count,
                     struct pg_fault *why);
void operations_settle(struct pg_arena *a, uint32_t outcome, uint32_t unsettled);
bool operations_check(const struct pg_arena *a, struct pg_fault *fault);
uint64_t notice_granules(const struct pg_arena *a, uint32_t slot);      /* only if it has a
                                                                           notice */
/* Granules of an operation's notice that is not in the replay buffer yet. */
static inline uint64_t operation_granules(const struct pg_arena *a, uint32_t slot)
{
    return LIKELY(operation_at(a, slot)->notice_blob == PG_NIL) ? 0 : notice_granules(a, slot);
}
/* All blob bytes of an armed slot. */
static inline uint64_t slot_bytes(const struct pg_arena *a, uint32_t slot)
{
    const uint64_t notice = is_operation(a, slot) ? operation_granules(a, slot) : 0;
    return (slot_granules(slot_cold(a, slot)) + notice) * PG_GRANULE;
}

#endif

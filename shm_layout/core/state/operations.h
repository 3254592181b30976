/* operations.h - the purgatory: operations that end when a condition on watch keys holds, or when
 * they time out, whichever is first, and exactly once. */
#ifndef PURGATORYD_STATE_OPERATIONS_H
#define PURGATORYD_STATE_OPERATIONS_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/state/keys.h"
#include "core/state/timers.h"

struct watch {
    const struct put *put;        /* key, payload, topic, time */
    uint64_t session, threshold;
    const uint8_t *keys;          /* struct pg_watch_key and bytes, validated */
    const uint32_t *hashes;       /* of the keys */
    uint32_t keys_bytes, count;
    uint8_t condition;
    bool notice;
    bool has_own;                 /* found out while it is armed: some key is its own; */
    bool may_end;                 /* it may have to end at once; */
    uint32_t ext;                 /* bytes of the blob before its key */
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
/* For a walk over all slots: fetches an operation's blob so many slots ahead. */
#define OPERATIONS_PREFETCH 16
static inline void operation_prefetch(const struct pg_arena *a, uint32_t slot)
{
    if (slot >= a->slots.capacity || !is_operation(a, slot))
        return;
    fetch(operation_at(a, slot));
    fetch(operation_at(a, slot) + 1);
}
/* What an operation waits for: its keys go behind the payload, the rest into `info`. `op` is a copy
 * of the blob's head, and may be that of one which ended meanwhile. */
void operation_info(const struct pg_arena *a, const struct pg_operation *op, const uint8_t *blob,
                    struct pg_info *info, struct sink *out);
/* As a frame says that it was armed, in a slot that is free; in whose account. False: no space. */
bool operation_restore(struct pg_arena *a, const struct pg_wal_watch *j,
                       const struct pg_wal_watch_key *keys, uint16_t account);
/* As a frame says that an armed one ended: cause, missing keys; its own ones are forgotten. */
void operation_end_restore(struct pg_arena *a, const struct pg_wal_outcome *j,
                           const uint8_t *missing);
/* The notice of one that has its cause, which takes over the blob for it. */
struct pg_entry operation_notice(struct pg_arena *a, uint32_t slot, unsigned flags);
/* Gives back watch records and the notice's blob, while no derived state is there. */
void operation_release(struct pg_arena *a, uint32_t slot);
/* False: its notice would have no space in the replay buffer now; nothing was changed. */
bool operations_watch(struct pg_arena *a, struct watch *w, struct pg_result *result);
bool operation_may_end(struct pg_arena *a, uint32_t slot);
/* Cancels the timer or the operation that a key has. False: an operation's notice has no space in
 * the replay buffer now; nothing was changed. */
bool key_cancel(struct pg_arena *a, const struct key *key, uint64_t ticket,
                struct pg_result *result);
/* The owner found the condition false; asks him again if a watermark has moved meanwhile. */
void operation_answered_no(struct pg_arena *a, uint32_t slot);
/* Ends an armed operation that is linked in the wheel. */
void operation_end(struct pg_arena *a, uint32_t slot, enum pg_cause cause, uint32_t error);
/* From the wheel: looks once more, then ends. False: the replay buffer has no space now, or the
 * work of this call is used up. */
/* Whether it came due in the outage after which operations are held. */
bool operation_waits(const struct pg_arena *a, uint32_t slot);
bool operation_expire(struct pg_arena *a, uint32_t slot);
/* Each adds what it ended to result->deadline_ns and returns false when the visits of this
 * call are used up; the same call again continues. */
bool operations_advance(struct pg_arena *a, uint32_t row, uint64_t watermark,
                        struct pg_result *result);
/* `goes_on`: the key has its new state from the first call. */
bool operations_fail(struct pg_arena *a, uint32_t row, uint32_t error, bool goes_on,
                     struct pg_result *result);
bool operations_clear(struct pg_arena *a, uint32_t row, bool goes_on, struct pg_result *result);
/* Writes the ended keys to `out`: u8 type, u8 length, bytes. PG_NIL: nobody watches any more. */
void operations_cancel_for_key(struct pg_arena *a, uint32_t row, struct sink *out,
                               struct pg_result *result);
/* The count of a trigger that a kill cut off. */
void trigger_recover(const struct pg_arena *a, struct pg_result *result);
bool operations_complete(struct pg_arena *a, const struct key *key, uint64_t session,
                         uint64_t version, struct pg_result *result);
/* For a rebuild: all records first; then armed operations that may be looked at, in groups, and
 * *count is 0 again; at the end all that waits for the rest, from these slots on. */
bool operations_link(struct pg_arena *a, const uint32_t *slots, uint32_t *count,
                     struct pg_fault *why);
void operations_settle(struct pg_arena *a, uint32_t outcome, uint32_t unsettled);
bool operations_check(const struct pg_arena *a, struct pg_fault *fault);
uint64_t notice_granules(const struct pg_arena *a, uint32_t slot);      /* it has one */
/* Of an operation's notice, while it has not left. */
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

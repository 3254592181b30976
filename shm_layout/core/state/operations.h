/* operations.h - the purgatory. An operation ends when its condition on watch keys holds or when it
 * times out, whichever comes first, and exactly once. */
#ifndef PURGATORYD_STATE_OPERATIONS_H
#define PURGATORYD_STATE_OPERATIONS_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/state/keys.h"
#include "core/state/rows.h"
#include "core/state/timers.h"

struct watch {
    const struct put *put;        /* key, payload, topic and time of the operation */
    uint64_t session, threshold;
    const uint8_t *keys;          /* struct pg_watch_key and key bytes of each key, validated */
    const uint32_t *hashes;       /* hashes of the keys */
    uint32_t keys_bytes, count;
    uint8_t condition;
    bool notice;
    bool has_own;                 /* set at arming: some key is the operation's own */
    bool may_end;                 /* set at arming: the operation may have to end immediately */
    uint32_t ext;                 /* number of bytes before the key in the blob */
};

static inline bool has_targets(unsigned condition)
{
    return condition != PG_C_SUM && condition != PG_C_CLIENT;
}
/* Prefetch distance for loops over all slots: prefetch the blob of an operation this many slots in
 * advance. */
#define OPERATIONS_PREFETCH 16
static inline void operation_prefetch(const struct pg_arena *a, uint32_t slot)
{
    if (slot >= a->slots.capacity || !is_operation(a, slot))
        return;
    fetch(operation_at(a, slot));
    fetch(operation_at(a, slot) + 1);
}
/* Write the watch keys of an operation to `out`, and its other fields to `info`. `op` is a copy of
 * the blob's head, because the operation may end in the meantime. */
void operation_info(const struct pg_arena *a, const struct pg_operation *op, const uint8_t *blob,
                    struct pg_info *info, struct sink *out);
/* Arm an operation in a free slot as a WATCH frame describes it, and count it in `account`. Return
 * false if there is no space. */
bool operation_restore(struct pg_arena *a, const struct pg_wal_watch *j,
                       const struct pg_wal_watch_key *keys, uint16_t account);
/* End an armed operation as an OUTCOME frame describes it: store its cause and missing keys, and
 * forget its own keys. */
void operation_end_restore(struct pg_arena *a, const struct pg_wal_outcome *j,
                           const uint8_t *missing);
/* Return the notice of an operation whose cause is stored. The caller takes over the blob of the
 * notice. */
struct pg_entry operation_notice(struct pg_arena *a, uint32_t slot, unsigned flags);
/* Free an operation's watch records and the blob of its notice. Redo calls this before derived
 * state exists. */
void operation_release(struct pg_arena *a, uint32_t slot);
/* Arm an operation. If the replay buffer has no space for its notice, or the work limit of this
 * call is reached, change nothing and return false; the caller then has to call again. */
bool operations_watch(struct pg_arena *a, struct watch *w, struct pg_result *result);
/* Return whether the WAL buffer and the replay buffer have space for the end of the operation. */
bool operation_may_end(struct pg_arena *a, uint32_t slot);
/* Cancel the timer or operation of a key. If the WAL buffer is full, or the replay buffer has no
 * space for the operation's notice, change nothing and return false; the caller then has to call
 * again. */
bool key_cancel(struct pg_arena *a, const struct key *key, uint64_t ticket,
                struct pg_result *result);
/* The owner has answered the CHECK with "false". If a watermark has moved since the CHECK, the
 * owner receives another CHECK. */
void operation_answered_no(struct pg_arena *a, uint32_t slot);
/* End an armed operation that is in the wheel. */
void operation_end(struct pg_arena *a, uint32_t slot, enum pg_cause cause, uint32_t error);
/* Return whether the operation may not expire yet because the current outage affects it. */
bool operation_waits(const struct pg_arena *a, uint32_t slot);
/* Called by the wheel: check the condition a last time, then end the operation. Return false if the
 * WAL buffer or the replay buffer has no space now, or if the work limit of this call is
 * reached. */
bool operation_expire(struct pg_arena *a, uint32_t slot);
/* Apply a trigger to the watch key in a row. Each of these functions adds the number of operations
 * that it ended to result->deadline_ns. It returns false if the work limit of this call is reached;
 * the same call again continues. */
bool operations_advance(struct pg_arena *a, uint32_t row, uint64_t watermark,
                        struct pg_result *result);
/* goes_on = true: this call continues an earlier call, which has set the key's new state. */
bool operations_fail(struct pg_arena *a, uint32_t row, uint32_t error, bool goes_on,
                     struct pg_result *result);
bool operations_clear(struct pg_arena *a, uint32_t row, bool goes_on, struct pg_result *result);
/* Write the keys of the cancelled operations to `out`: u8 type, u8 length, bytes. Row PG_NIL: the
 * watch key no longer exists. */
void operations_cancel_for_key(struct pg_arena *a, uint32_t row, struct sink *out,
                               struct pg_result *result);
/* Complete the count in the answer of a trigger that a kill interrupted. */
void trigger_recover(const struct pg_arena *a, struct pg_result *result);
/* Answer a CHECK with "true": end the operation as satisfied if `version` is the version of its
 * last CHECK. If there is no space now for the end of the operation, change nothing and return
 * false; the caller then has to call again. */
bool operations_complete(struct pg_arena *a, const struct key *key, uint64_t session,
                         uint64_t version, struct pg_result *result);
/* For a rebuild, after all watch records exist. operations_link links a set of armed operations and
 * sets *count to 0. After all sets, operations_settle settles outcomes, starting at slot `outcome`,
 * and unsettled operations, starting at slot `unsettled`. */
bool operations_link(struct pg_arena *a, const uint32_t *slots, uint32_t *count,
                     struct pg_fault *why);
void operations_settle(struct pg_arena *a, uint32_t outcome, uint32_t unsettled);
bool operations_check(const struct pg_arena *a, struct pg_fault *fault);

#endif

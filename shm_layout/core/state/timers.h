/* timers.h - put, cancel, get and expire: keeps slot, key, blob, wheel and replay buffer
 * consistent. */
#ifndef PURGATORYD_STATE_TIMERS_H
#define PURGATORYD_STATE_TIMERS_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/arena.h"
#include "core/state/keys.h"
#include "core/state/rows.h"

uint32_t key_hash(const struct pg_arena *a, uint32_t namespace_row, unsigned type,
                  const void *bytes, size_t len);
/* Apply a PUT: arm, replace, keep or extend a timer, depending on the mode of the PUT. *result is
 * the answer. */
void timers_put(struct pg_arena *a, struct put *put, struct pg_result *result);
/* Arm the parked timer of a key with the payload in `put`, if `ticket` is the ticket of this
 * timer. */
void timers_unpark(struct pg_arena *a, const struct put *put, uint64_t ticket,
                   struct pg_result *result);
/* Answer a CANCEL of a timer that has fired; `id` is the id of its entry. */
void cancel_fired(struct pg_arena *a, uint32_t id, uint64_t ticket, struct pg_result *r);
/* Cancel the armed or parked timer in a slot. `at` is the slot's place in the index. */
void cancel_timer(struct pg_arena *a, uint32_t slot, const struct probe *at);
/* Give an armed or parked timer another deadline, with its record in the WAL. `wall_ns`: deadline on
 * the wall clock, for a timer that follows it. */
void timer_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns, int64_t wall_ns);
/* End an armed timer without counting it as cancelled by a client. */
void timer_drop(struct pg_arena *a, uint32_t slot);
/* Answer with the ticket and the deadline of a slot. */
void answer_slot(const struct pg_arena *a, struct pg_result *r, uint32_t slot, unsigned status);
/* Answer that unique_for of the timer in a slot refuses the record. */
void answer_unique(const struct pg_arena *a, struct pg_result *r, uint32_t slot);
/* End the linked timer in a slot without a notice. `at` is the slot's place in the index. */
void timer_end(struct pg_arena *a, uint32_t slot, const struct probe *at, enum pg_end_cause cause);
/* Fire a due timer, or let it wait in the backlog of its topic. If the replay buffer or the WAL
 * buffer is full, change nothing and return false; the timer then stays in the wheel. */
bool timer_expire(struct pg_arena *a, uint32_t slot);
/* Fire a timer, which is due, in the same way. The caller unlinks it. */
bool timer_fire_due(struct pg_arena *a, uint32_t slot);
/* Return whether a due timer is due by the wall clock, if it is a wall timer. */
bool wall_is_reached(const struct pg_arena *a, uint32_t slot);
/* Link a wall timer by its deadline on the current wall clock. */
void wall_postpone(struct pg_arena *a, uint32_t slot);
/* Record that the wall clock is offset_ns ahead of the arena's clock. */
void wall_note(struct pg_arena *a, int64_t offset_ns);
/* After a step of the wall clock, place the wall timers again, in at most `budget` slots per call.
 * If another step occurs, begin again at the first slot. Return whether slots are left. */
bool wall_iteration(struct pg_arena *a, uint32_t budget);
/* Return the id of the armed slot or of the replay buffer entry for a key; PG_NIL = neither
 * exists. */
uint32_t key_find(const struct pg_arena *a, const struct key *key, struct probe *at);
/* Return the armed slot of a key; PG_NIL = none. */
uint32_t timers_find(const struct pg_arena *a, const struct key *key);
/* Return the slot whose timer has ended and that keeps the key unique; PG_NIL = none. */
uint32_t unique_find(const struct pg_arena *a, const struct key *key);
/* Return the item UNIQUE of a slot; NULL = none. */
struct pg_ext *slot_unique(const struct pg_arena *a, uint32_t slot);
/* Return until when no other timer may get the key of a slot; INT64_MIN = no item says so. */
int64_t unique_until_ns(const struct pg_arena *a, uint32_t slot);
/* Number of granules that a slot with the item UNIQUE keeps after the end of its timer. */
uint32_t unique_granules(const struct pg_arena *a, uint32_t slot);
/* Give a slot in state UNIQUE its deadline without a slack, and its key as the key of its blob. The
 * slot must not be in the wheel. */
void unique_settle(struct pg_arena *a, uint32_t slot);
/* Settle a slot in state UNIQUE, and give back the rest of its blob, except for the last `keep`
 * granules, which belong to an entry of the replay buffer. Return the number of granules given
 * back. */
uint32_t unique_shrink(struct pg_arena *a, uint32_t slot, uint32_t keep);
/* Return whether unique_settle() has changed a slot in state UNIQUE. */
bool unique_settled(const struct pg_arena *a, uint32_t slot);
/* Add a slot in state UNIQUE to the counts of its topic, namespace and account (sign 1), or remove it
 * (-1). */
void unique_counted(struct pg_arena *a, uint32_t slot, int64_t sign);
/* For a rebuild: return whether the item UNIQUE of a slot is sound; let the key lead to a sound slot
 * in state UNIQUE, and count the slot. */
bool unique_sound(const struct pg_arena *a, uint32_t slot);
void unique_link(struct pg_arena *a, uint32_t slot);
/* Return the slot that has this ticket, in any state except FREE; PG_NIL = none. This visits all
 * slots. */
uint32_t slot_of_ticket(const struct pg_arena *a, uint64_t ticket);
int64_t add_clamped(int64_t a, int64_t b);    /* the sum, limited to the range of int64 */
/* Return a wall deadline on the arena's clock. */
int64_t wall_deadline(const struct pg_arena *a, int64_t wall_ns);
/* Return the deadline of an armed slot by the current wall clock. This uses only authoritative
 * state. */
int64_t timers_deadline_ns(const struct pg_arena *a, uint32_t slot);
/* For a rebuild: let the key lead to a live, sound slot, and count the slot. timers_link_own
 * requires that no other slot has the key. timers_link_newest takes the slot with the newest
 * ticket, and frees an older slot with the same key. It reports a fault if the older slot is an
 * operation, because no PUT replaces an operation. */
void timers_link_own(struct pg_arena *a, uint32_t slot);
bool timers_link_newest(struct pg_arena *a, uint32_t newest, struct pg_fault *why);
/* Check all slots and the key index. Add the number of granules of all slots' blobs to
 * *granules. */
bool timers_check(struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

static inline bool is_parked(const struct pg_arena *a, uint32_t slot)
{
    return ctl_state(slot_hot(a, slot)->ctl) == PG_S_PARKED;
}
/* Return when a timer was armed. The result is the deadline minus the stored wait. The error of the
 * stored wait is at most 2^-24 of the wait. */
static inline int64_t armed_ns_of(const struct pg_hot *h, const struct pg_cold *c)
{
    const uint32_t bits = (uint32_t)c->wait_high << 16 | h->wait_low;
    float wait_ns;
    memcpy(&wait_ns, &bits, sizeof wait_ns);
    const bool sound = (bits & INT32_MAX) < 0x5f000000;       /* 2^63; a NaN is above */
    return (int64_t)((uint64_t)h->deadline_ns - (uint64_t)(sound ? (int64_t)wait_ns : 0));
}
/* Store the arm time of a timer as the time from arming to the deadline. If the deadline moves, the
 * caller has to call this again. */
static inline void armed_note(struct pg_hot *h, struct pg_cold *c, int64_t armed_ns)
{
#ifndef PG_UNMEASURED
    const float wait_ns = (float)(int64_t)((uint64_t)h->deadline_ns - (uint64_t)armed_ns);
    uint32_t bits;
    memcpy(&bits, &wait_ns, sizeof bits);
    h->wait_low = (uint16_t)bits;
    c->wait_high = (uint16_t)(bits >> 16);
#else
    (void)h, (void)c, (void)armed_ns;
#endif
}
/* Free an armed or ended slot, and the first `give` granules of its blob. */
void slot_free(struct pg_arena *a, uint32_t slot, uint32_t give);
void slot_place(struct pg_arena *a, uint32_t slot);      /* links a new slot in the wheel */
/* Set the deadline. The slot keeps its place in the wheel. */
void deadline_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns);
/* Add a live slot to the counts of its topic, namespace and account (sign 1), or remove it (-1). */
void slot_counted(struct pg_arena *a, uint32_t slot, int64_t sign);
/* Compute the deadline on the arena's clock. Return false if the deadline is later than 2^63 - 1
 * ns. */
bool time_resolve(const struct pg_arena *a, const struct put *put, int64_t *deadline_ns);
/* The last free slot is reserved for replacements, because a replacement uses two slots for a
 * moment. */
static inline unsigned slots_status(const struct pg_arena *a, bool replacing)
{
    if (UNLIKELY(slots_left(&a->slots) <= (replacing ? 0u : 1u)))
        return PG_ST_FULL;
    return UNLIKELY(next_number(a->header) == PG_TICKET_SHARD) ? PG_ST_FULL_TICKETS : PG_ST_ADDED;
}
/* Return the namespace of a used slot, even of an outcome; PG_NIL = no namespace matches the hash
 * of the slot's key. */
uint32_t slot_home(const struct pg_arena *a, uint32_t slot);
/* Return a reader's copy of the cold half of a slot. `ctl` is the control word that the reader
 * found. */
struct pg_cold slot_cold_copy(const struct pg_arena *a, uint32_t slot, uint64_t ctl);
/* A reader's copy may mix two timers. Return whether everything that the copy refers to is inside
 * the arena, so that the reader may access it. */
bool slot_copy_bounded(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c);

#endif

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

/* PG_E_LATE if the timer was armed and due before this start of the daemon, else 0. */
static inline unsigned late_flag(const struct pg_arena *a, const struct pg_hot *h)
{
    const bool before = ticket_number(ctl_ticket(h->ctl)) < a->first_number;
    return before && h->deadline_ns < a->started_ns ? PG_E_LATE : 0;
}
#define NO_WALL INT64_MIN

/* The scope in which a key is hashed, and the bits of the hash that are stored. */
static inline uint64_t key_scope(uint32_t namespace_row, unsigned type)
{
    return (uint64_t)type << 32 | namespace_row;
}
static inline uint32_t key_hash_of(uint64_t hash) { return (uint32_t)(hash ^ hash >> 32); }
uint32_t key_hash(const struct pg_arena *a, uint32_t namespace_row, unsigned type,
                  const void *bytes, size_t len);
/* Apply a PUT: arm, replace, keep or extend a timer, as its mode says. *result is the answer. */
void timers_put(struct pg_arena *a, const struct put *put, struct pg_result *result);
/* Arm the parked timer of a key with the payload in `put`, if it has this ticket. */
void timers_unpark(struct pg_arena *a, const struct put *put, uint64_t ticket,
                   struct pg_result *result);
/* Answer a CANCEL whose timer has fired; `id` is its entry. */
void cancel_fired(struct pg_arena *a, uint32_t id, uint64_t ticket, struct pg_result *r);
/* Cancel the armed or parked timer in a slot, which the index has at `at`. */
void cancel_timer(struct pg_arena *a, uint32_t slot, const struct probe *at);
/* Answer with ticket and deadline of a slot. */
void answer_slot(const struct pg_arena *a, struct pg_result *r, uint32_t slot, unsigned status);
/* Fire a due timer. Returns false, with nothing changed, if the replay buffer or the WAL buffer is
 * full; the timer then stays in the wheel. */
bool timer_expire(struct pg_arena *a, uint32_t slot);
/* Record that the wall clock is offset_ns ahead of the arena's clock. */
void wall_note(struct pg_arena *a, int64_t offset_ns);
/* After a step of the wall clock: re-place wall timers in a bounded number of slots. Another step
 * begins the walk again. Returns whether slots are left. */
bool wall_iteration(struct pg_arena *a, uint32_t budget);
/* Return the id of the armed slot or of the replay buffer entry for a key; PG_NIL = neither
 * exists. */
uint32_t key_find(const struct pg_arena *a, const struct key *key, struct probe *at);
/* Return the armed slot of a key; PG_NIL = none. */
uint32_t timers_find(const struct pg_arena *a, const struct key *key);
/* Return the deadline of an armed slot by the current wall clock; needs authoritative state
 * only. */
int64_t timers_deadline_ns(const struct pg_arena *a, uint32_t slot);
/* For a rebuild: let the key lead to a live, sound slot, and count the slot. timers_link_own
 * requires that no other slot has the key. timers_link_newest takes the slot with the newest ticket
 * and frees an older one with the same key; it refuses if the older one is an operation, which no
 * PUT replaces. */
void timers_link_own(struct pg_arena *a, uint32_t slot);
bool timers_link_newest(struct pg_arena *a, uint32_t newest, struct pg_fault *why);
/* Check all slots and the key index. Adds the granules of all slots' blobs to *granules. */
bool timers_check(struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);
static inline uint32_t slot_granules(const struct pg_cold *c)
{
    return blob_granules((uint64_t)c->ext_len + c->key_len + c->payload_len);
}
static inline uint32_t slot_namespace(const struct pg_arena *a, uint32_t slot)
{
    return topic_at(a, slot_hot(a, slot)->topic)->namespace_row;
}

static inline bool is_parked(const struct pg_arena *a, uint32_t slot)
{
    return ctl_state(slot_hot(a, slot)->ctl) == PG_S_PARKED;
}
/* Return when a timer was armed, exact to 2^-24 of its wait. */
static inline int64_t armed_ns_of(const struct pg_hot *h, const struct pg_cold *c)
{
    const uint32_t bits = (uint32_t)c->wait_high << 16 | h->wait_low;
    float wait_ns;
    memcpy(&wait_ns, &bits, sizeof wait_ns);
    const bool sound = (bits & INT32_MAX) < 0x5f000000;       /* 2^63; a NaN is above */
    return (int64_t)((uint64_t)h->deadline_ns - (uint64_t)(sound ? (int64_t)wait_ns : 0));
}
/* Store the arm time as a wait; the caller repeats this when the deadline moves. */
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
/* Free an armed or ended slot, and `give` granules at its blob's start. */
void slot_free(struct pg_arena *a, uint32_t slot, uint32_t give);
void slot_place(struct pg_arena *a, uint32_t slot);      /* links a new slot in the wheel */
void deadline_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns);    /* sets the deadline;
                                                                                  the slot keeps its
                                                                                  place in the
                                                                                  wheel */
/* Add (sign 1) or remove (-1) a live slot in the counts of its topic, namespace and account. */
void slot_counted(struct pg_arena *a, uint32_t slot, int64_t sign);
/* Compute the deadline on the arena's clock. Returns false if it is past 2^63 - 1. */
bool time_resolve(const struct pg_arena *a, const struct put *put, int64_t *deadline_ns);
/* The last free slot is reserved for a replacement, which needs two slots for a moment. */
static inline unsigned slots_status(const struct pg_arena *a, bool replacing)
{
    if (UNLIKELY(slots_left(&a->slots) <= (replacing ? 0u : 1u)))
        return PG_ST_FULL;
    return UNLIKELY(next_number(a->header) == PG_TICKET_SHARD) ? PG_ST_FULL_TICKETS : PG_ST_ADDED;
}
/* Return the namespace of a slot in use, also of an outcome; PG_NIL = no namespace fits its key. */
uint32_t slot_home(const struct pg_arena *a, uint32_t slot);
/* Return a reader's copy of a slot's cold half, where the reader has found this control word. */
struct pg_cold slot_cold_copy(const struct pg_arena *a, uint32_t slot, uint64_t ctl);
/* A reader's copy may mix two timers. Return whether all that it refers to is inside the arena, so
 * that the reader may follow it. */
bool slot_copy_bounded(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c);

#endif

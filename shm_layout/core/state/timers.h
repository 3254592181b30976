/* timers.h - put, cancel, get and expire: what binds slot, key, blob, wheel and replay buffer. */
#ifndef PURGATORYD_STATE_TIMERS_H
#define PURGATORYD_STATE_TIMERS_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/arena.h"
#include "core/state/keys.h"

/* PG_E_LATE of what was armed before this start of the daemon, and due before it; else 0. */
static inline unsigned late_flag(const struct pg_arena *a, const struct pg_hot *h)
{
    const bool before = ticket_number(ctl_ticket(h->ctl)) < a->first_number;
    return before && h->deadline_ns < a->started_ns ? PG_E_LATE : 0;
}
#define NO_WALL INT64_MIN

/* The scope that a key is hashed in, and what is kept of the hash. */
static inline uint64_t key_scope(uint32_t namespace_row, unsigned type)
{
    return (uint64_t)type << 32 | namespace_row;
}
static inline uint32_t key_hash_of(uint64_t hash) { return (uint32_t)(hash ^ hash >> 32); }
uint32_t key_hash(const struct pg_arena *a, uint32_t namespace_row, unsigned type,
                  const void *bytes, size_t len);
void timers_put(struct pg_arena *a, const struct put *put, struct pg_result *result);
/* Arms the parked timer of a key, if it has this ticket, with the payload that comes with it. */
void timers_unpark(struct pg_arena *a, const struct put *put, uint64_t ticket,
                   struct pg_result *result);
/* A key whose timer has fired. */
void cancel_fired(struct pg_arena *a, uint32_t id, uint64_t ticket, struct pg_result *r);
void cancel_timer(struct pg_arena *a, uint32_t slot, const struct probe *at);
void answer_slot(const struct pg_arena *a, struct pg_result *r, uint32_t slot, unsigned status);
/* False: nothing was changed, and the wheel keeps it: the replay buffer or the WAL buffer is
 * full. */
bool timer_expire(struct pg_arena *a, uint32_t slot);
/* The wall clock is so much ahead of the arena's. */
void wall_note(struct pg_arena *a, int64_t offset_ns);
/* After a step of the wall clock: walks the slots, a bounded number of them; a step during the walk
 * begins it again. True: some are left. */
bool wall_iteration(struct pg_arena *a, uint32_t budget);
/* Id of the armed slot or the replay buffer entry that speaks for a key; PG_NIL = neither. */
uint32_t key_find(const struct pg_arena *a, const struct key *key, struct probe *at);
/* The armed slot of a key; PG_NIL = none. */
uint32_t timers_find(const struct pg_arena *a, const struct key *key);
/* Deadline of an armed slot by the wall clock as it stands; needs authoritative state only. */
int64_t timers_deadline_ns(const struct pg_arena *a, uint32_t slot);
/* For a rebuild, of a living slot that is sound: the key leads to it, and it is counted. No other
 * slot has the key; `newest` is the one with the newest ticket, and takes the place of one that
 * has. It refuses to take that of an operation, which no put replaces. */
void timers_link_own(struct pg_arena *a, uint32_t slot);
bool timers_link_newest(struct pg_arena *a, uint32_t newest, struct pg_fault *why);
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
/* When a timer was armed, to a sixteen millionth of its wait. */
static inline int64_t armed_ns_of(const struct pg_hot *h, const struct pg_cold *c)
{
    const uint32_t bits = (uint32_t)c->wait_high << 16 | h->wait_low;
    float wait_ns;
    memcpy(&wait_ns, &bits, sizeof wait_ns);
    const bool sound = (bits & INT32_MAX) < 0x5f000000;       /* 2^63; a NaN is above */
    return (int64_t)((uint64_t)h->deadline_ns - (uint64_t)(sound ? (int64_t)wait_ns : 0));
}
/* To be noted again when its deadline moves. */
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
/* Frees an armed or ended slot with `give` granules at its blob's start. */
void slot_free(struct pg_arena *a, uint32_t slot, uint32_t give);
void slot_place(struct pg_arena *a, uint32_t slot);      /* links a new one in the wheel */
void deadline_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns);    /* and no more */
void slot_counted(struct pg_arena *a, uint32_t slot, int64_t sign);
bool time_resolve(const struct pg_arena *a, const struct put *put, int64_t *deadline_ns);
/* The last free slot is for a replacement, which needs two for a moment. */
static inline unsigned slots_status(const struct pg_arena *a, bool replacing)
{
    if (UNLIKELY(slots_left(&a->slots) <= (replacing ? 0u : 1u)))
        return PG_ST_FULL;
    return UNLIKELY(next_number(a->header) == PG_TICKET_SHARD) ? PG_ST_FULL_TICKETS : PG_ST_ADDED;
}
/* The namespace of a slot in use, also of an outcome; PG_NIL: none has its key. */
uint32_t slot_home(const struct pg_arena *a, uint32_t slot);
/* What a reader copied may be half of one timer and half of the next: whether all that it names
 * is inside, so that it may be read. */
bool slot_copy_bounded(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c);

#endif

/* slots.h - slot allocation and slot states. */
#ifndef PURGATORYD_BASE_SLOTS_H
#define PURGATORYD_BASE_SLOTS_H

#include "core/base/check.h"
#include "core/base/common.h"

/* All slots, and the stack of free slots. free[0] is the number of ids in free[1..]. Only this file
 * changes the state in hot.ctl. */
struct slots {
    struct pg_hot *hot;
    struct pg_cold *cold;         /* NULL for a wheel outside of an arena */
    uint32_t *free;
    uint32_t capacity;
};

/* Make all slots FREE. Slot 0 is taken first. */
void slots_init(struct slots *s);
/* Build the free stack from the control words. */
void slots_rebuild(struct slots *s);
/* Check that the free stack holds exactly the FREE slots, each once. */
bool slots_check(const struct slots *s, struct pg_fault *fault);
/* Empty the free stack, for a rebuild that fills it itself. */
static inline void slots_free_none(struct slots *s) { s->free[0] = 0; }
static inline uint32_t slots_left(const struct slots *s) { return s->free[0]; }
static inline uint32_t slots_live(const struct slots *s) { return s->capacity - s->free[0]; }
static inline uint32_t slots_take(struct slots *s)   /* PG_NIL when no slot is free */
{
    if (UNLIKELY(s->free[0] == 0))
        return PG_NIL;
    const uint32_t slot = s->free[s->free[0]];
    PG_ASSERT(slot < s->capacity, "slots", "a taken slot is inside the table");
    PG_ASSERT_IN_TESTS((s->hot[slot].ctl & 0xff) == PG_S_FREE, "slots", "a taken slot is free");
    s->free[0]--;
    return slot;
}
static inline void slots_give(struct slots *s, uint32_t slot)
{
    PG_ASSERT(s->free[0] < s->capacity, "slots", "no slot is given back twice");
    s->free[++s->free[0]] = slot;
}
/* Prefetch the slot that slots_take will return after `distance` more calls. */
static inline void slots_prefetch(const struct slots *s, uint32_t distance)
{
    const uint32_t slot = LIKELY(s->free[0] > distance) ? s->free[s->free[0] - distance] : 0;
    fetch(&s->hot[slot]);
    fetch(&s->cold[slot]);
}

/* Bit mask of the states from which a slot may enter `state`. Redo writes control words with
 * slot_restore and slot_restore_free. */
static inline uint32_t states_before(unsigned state)
{
    enum { FREE = 1u << PG_S_FREE, ARMED = 1u << PG_S_ARMED, OUTCOME = 1u << PG_S_OUTCOME,
           PARKED = 1u << PG_S_PARKED, UNIQUE = 1u << PG_S_UNIQUE };
    return state == PG_S_FREE ? ARMED | OUTCOME | PARKED | UNIQUE
         : state == PG_S_ARMED ? FREE | PARKED : state == PG_S_OUTCOME ? ARMED
         : state == PG_S_PARKED ? FREE : state == PG_S_UNIQUE ? ARMED : 0;
}
enum { PG_SLACK_LOG2_MAX = 46 };
_Static_assert(PG_SLACK_MAX_NS == 1ll << PG_SLACK_LOG2_MAX, "the largest slack is a power of two");
/* Return the time at which a slot may fire: its deadline, rounded up to a multiple of its slack, so
 * that neighbours share an instant. INT64_MAX if there is no such multiple. */
static inline int64_t slot_fires_ns(const struct pg_hot *h)
{
    const uint64_t mask = (1ull << (h->flags >> PG_SLACK_SHIFT & 63)) - 1;
    const int64_t fires_ns = (int64_t)(((uint64_t)h->deadline_ns + mask) & ~mask);
    return LIKELY(fires_ns >= h->deadline_ns) ? fires_ns : INT64_MAX;
}
static inline uint64_t ctl_of(uint64_t ticket, unsigned state) { return ticket << 8 | state; }
static inline unsigned ctl_state(uint64_t ctl) { return (unsigned)(ctl & 0xff); }
static inline uint64_t ctl_ticket(uint64_t ctl) { return ctl >> 8; }
/* Publish the new state of a slot. The caller must have written the slot's other fields before,
 * because readers load the control word with acquire. */
static inline void slot_state_set(struct pg_hot *h, uint64_t ticket, unsigned state)
{
    /* In a release this check would make a cancel 4 % slower (`make bench-compare`). */
    PG_ASSERT_IN_TESTS((1ull << (ctl_state(h->ctl) & 63) & states_before(state)) != 0, "slots",
                       "a slot's new state may follow its old state");
    STORE_RELEASE(&h->ctl, ctl_of(ticket, state));
}
/* Write a slot that redo found in a frame. Before, redo frees the slot with slot_restore_free, so
 * that what the slot held is given back. */
static inline void slot_restore(struct pg_hot *h, const struct pg_hot *fields)
{
    PG_ASSERT(ctl_state(h->ctl) == PG_S_FREE, "slots", "redo writes to a free slot");
    *h = *fields;
}
/* Free a slot whose last ticket redo knows; 0 = the next step writes the slot. Redo has no readers,
 * and may find the slot free. */
static inline void slot_restore_free(struct pg_hot *h, uint64_t ticket)
{
    h->ctl = ctl_of(ticket, PG_S_FREE);
}
/* Let a slot whose timer has ended keep its key unique. */
static inline void slot_restore_unique(struct pg_hot *h)
{
    h->ctl = ctl_of(ctl_ticket(h->ctl), PG_S_UNIQUE);
}
/* Set the state of a row that uses only the wheel's part of a slot: ARMED = it is in the wheel. No
 * other process reads such a row. */
static inline void slot_mark(struct pg_hot *h, unsigned state) { h->ctl = ctl_of(0, state); }
/* True if the slot is armed or parked. Such a slot owns its key and counts as live. */
static inline bool ctl_live(uint64_t ctl)
{
    return ctl_state(ctl) == PG_S_ARMED || ctl_state(ctl) == PG_S_PARKED;
}
/* True if a timer has ended in the slot, and the slot keeps its key unique. */
static inline bool ctl_unique(uint64_t ctl) { return ctl_state(ctl) == PG_S_UNIQUE; }
/* True if the slot counts for its topic and its account. */
static inline bool ctl_counted(uint64_t ctl) { return ctl_live(ctl) || ctl_unique(ctl); }
/* True if the slot is in the wheel or in a backlog. */
static inline bool ctl_placed(uint64_t ctl)
{
    return ctl_state(ctl) == PG_S_ARMED || ctl_unique(ctl);
}

#endif

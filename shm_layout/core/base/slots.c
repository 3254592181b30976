/* slots.c - the free stack of slots. */
#include "core/base/slots.h"
#include "core/base/check.h"
#include "core/base/common.h"

void slots_init(struct slots *s)
{
    memset(s->hot, 0, (size_t)s->capacity * sizeof *s->hot);
    if (s->cold)
        memset(s->cold, 0, (size_t)s->capacity * sizeof *s->cold);
    slots_rebuild(s);
}

void slots_rebuild(struct slots *s)
{
    slots_free_none(s);
    for (uint32_t slot = s->capacity; slot-- > 0;)   /* downwards, so that the lowest slot is taken
                                                        first */
        if (ctl_state(s->hot[slot].ctl) == PG_S_FREE)
            slots_give(s, slot);
}

bool slots_check(const struct slots *s, struct pg_fault *fault)
{
    uint32_t free_count = 0;
    uint64_t expected = 0, found = 0;

    if (s->free[0] > s->capacity)
        return fault_set(fault, "slots", "the free stack is larger than the capacity", 0,
                         s->capacity, s->free[0]);
    for (uint32_t slot = 0; slot < s->capacity; slot++)
        if (ctl_state(s->hot[slot].ctl) == PG_S_FREE) {
            free_count++;
            expected += id_mix(slot);
        }
    if (free_count != s->free[0])
        return fault_set(fault, "slots", "height of the free stack", 0, free_count, s->free[0]);
    for (uint32_t i = 1; i <= s->free[0]; i++) {
        uint32_t slot = s->free[i];
        if (slot >= s->capacity)
            return fault_set(fault, "slots", "the free stack holds an id out of bounds", i,
                             s->capacity, slot);
        if (ctl_state(s->hot[slot].ctl) != PG_S_FREE)
            return fault_set(fault, "slots", "the free stack holds a slot in use", slot, PG_S_FREE,
                             ctl_state(s->hot[slot].ctl));
        found += id_mix(slot);
    }
    if (found != expected)
        return fault_set(fault, "slots", "the free stack holds a slot twice", 0, expected, found);
    return true;
}

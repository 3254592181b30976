/* local.c - a timing wheel in private memory, for timers inside one process. */

#include "core/base/common.h"
#include "core/base/slots.h"
#include "core/base/wheel.h"

struct pg_local {
    struct wheel wheel;
    struct slots slots;
    uint32_t *due;                /* array for the due slots of the running advance */
    uint32_t due_count, due_max;
};

static uint64_t aligned(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Lay out all parts in one block of memory, and return the size of the block in bytes. If memory is
 * NULL, only compute the size. */
static uint64_t carve(struct pg_local *l, uint8_t *memory, const struct wheel_shape *shape)
{
    const uint64_t sizes[] = {
        aligned(sizeof(struct pg_local)), aligned(sizeof(struct pg_wheel)),
        aligned(wheel_buckets(shape) * sizeof(struct pg_bucket)),
        aligned(wheel_chunks(shape) * sizeof(struct pg_chunk)),
        aligned((wheel_chunks(shape) + 1ull) * sizeof(uint32_t)),
        aligned(shape->capacity * sizeof(struct pg_hot)),
        aligned((shape->capacity + 1ull) * sizeof(uint32_t))};
    uint64_t at[8] = {0};
    for (int i = 0; i < 7; i++)
        at[i + 1] = at[i] + sizes[i];
    if (memory != NULL) {
        l->wheel = (struct wheel){(struct pg_wheel *)(memory + at[1]),
                                  (struct pg_bucket *)(memory + at[2]),
                                  (struct pg_chunk *)(memory + at[3]),
                                  (uint32_t *)(memory + at[4]), (struct pg_hot *)(memory + at[5]),
                                  shape->capacity, 0, NULL};
        l->slots = (struct slots){l->wheel.hot, NULL, (uint32_t *)(memory + at[6]),
                                  shape->capacity};
    }
    return at[7];
}

uint64_t pg_local_bytes(uint32_t capacity, int64_t tick_ns, uint32_t fanout)
{
    return carve(NULL, NULL, &(struct wheel_shape){tick_ns, fanout, capacity, 0});
}

struct pg_local *pg_local_create(void *memory, uint32_t capacity, int64_t tick_ns,
                                 uint32_t fanout, int64_t now_ns)
{
    const struct wheel_shape shape = {tick_ns, fanout, capacity, 0};
    struct pg_local *l = memory;
    carve(l, memory, &shape);
    slots_init(&l->slots);
    wheel_init(&l->wheel, &shape, now_ns);
    return l;
}

uint32_t pg_local_add(struct pg_local *l, int64_t deadline_ns)
{
    const uint32_t slot = slots_take(&l->slots);
    if (slot == PG_NIL)
        return PG_NIL;
    l->slots.hot[slot].deadline_ns = deadline_ns;
    slot_state_set(&l->slots.hot[slot], 1, PG_S_ARMED);
    wheel_place(&l->wheel, slot);
    return slot;
}

void pg_local_cancel(struct pg_local *l, uint32_t slot)
{
    wheel_remove(&l->wheel, slot);
    slot_state_set(&l->slots.hot[slot], 1, PG_S_FREE);
    slots_give(&l->slots, slot);
}

static bool collect(void *context, uint32_t slot)
{
    struct pg_local *l = context;
    if (l->due_count == l->due_max)
        return false;
    l->due[l->due_count++] = slot;
    slot_state_set(&l->slots.hot[slot], 1, PG_S_FREE);
    slots_give(&l->slots, slot);
    return true;
}

uint32_t pg_local_advance(struct pg_local *l, int64_t now_ns, uint32_t *due, uint32_t due_max,
                          int *more)
{
    bool left = false;
    l->due = due;
    l->due_count = 0;
    l->due_max = due_max;
    wheel_advance(&l->wheel, now_ns, due_max, collect, l, &left);
    *more = left;
    return l->due_count;
}

int64_t pg_local_next_ns(const struct pg_local *l) { return wheel_next_ns(&l->wheel); }

int pg_local_check(const struct pg_local *l, struct pg_fault *fault)
{
    memset(fault, 0, sizeof *fault);
    return slots_check(&l->slots, fault) &&
           wheel_check(&l->wheel, slots_live(&l->slots), fault);
}

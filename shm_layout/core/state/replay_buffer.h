/* replay_buffer.h - fired timers, kept in a ring until younger ones need their place. */
#ifndef PURGATORYD_STATE_REPLAY_BUFFER_H
#define PURGATORYD_STATE_REPLAY_BUFFER_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/arena.h"

static inline struct pg_entry *replay_at(const struct pg_arena *a, uint64_t position)
{
    return &a->replay_buffer[position & (a->header->replay_capacity - 1)];
}
/* The entry of an id that replay_id gave. */
static inline struct pg_entry *replay_of_id(const struct pg_arena *a, uint32_t id)
{
    return replay_at(a, id - a->slots.capacity);
}
static inline uint32_t replay_id(const struct pg_arena *a, uint64_t position)
{
    return a->slots.capacity + (uint32_t)(position & (a->header->replay_capacity - 1));
}
static inline unsigned entry_flags(const struct pg_entry *e) { return e->meta >> 4; }
static inline unsigned entry_key_type(const struct pg_entry *e) { return e->meta & 15; }
static inline uint32_t entry_granules(const struct pg_entry *e)
{
    return blob_granules((uint64_t)e->key_len + e->payload_len);
}
/* Whether one more entry with so many blob bytes goes in without withdrawing one that was
 * not handed to the socket yet; withdraws the oldest as needed. */
bool replay_make_space(struct pg_arena *a, uint64_t bytes);
/* Appends; the entry takes the blob over (key at its start). Returns its position. */
uint64_t replay_append(struct pg_arena *a, const struct pg_entry *fields);
void replay_supersede(struct pg_arena *a, uint32_t id);
/* Rolls a half-done append forward and drops the withdrawn. */
bool replay_settle(struct pg_arena *a, struct pg_fault *why);
bool replay_rebuild(struct pg_arena *a, struct pg_fault *why); /* marks blobs, indexes keys */
bool replay_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

#endif

/* replay_buffer.h - a ring of notices. Notices are kept until newer notices need their space. */
#ifndef PURGATORYD_STATE_REPLAY_BUFFER_H
#define PURGATORYD_STATE_REPLAY_BUFFER_H

#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"
#include "core/state/rows.h"

/* Return the entry for an id from replay_id. */
static inline struct pg_entry *replay_of_id(const struct pg_arena *a, uint32_t id)
{
    PG_ASSERT_IN_TESTS(id - a->slots.capacity < a->header->replay_capacity, "replay buffer",
                       "an id names an entry");
    return replay_at(a, id - a->slots.capacity);
}
static inline uint32_t replay_id(const struct pg_arena *a, uint64_t position)
{
    return a->slots.capacity + (uint32_t)(position & (a->header->replay_capacity - 1));
}
/* Withdraw the oldest sent entries until there is space for another entry with that many blob
 * bytes. Return false if unsent entries prevent this. */
bool replay_make_space(struct pg_arena *a, uint64_t bytes);
/* Append an entry, and begin its jobs. It takes over the blob, which begins with the key. Return the
 * entry's position. */
uint64_t replay_append(struct pg_arena *a, const struct pg_entry *fields,
                       const struct job_traits *traits);
/* Let readers take all entries, because their firings are complete. */
void replay_show(struct pg_arena *a);
/* For readers: copy the entry at `position`. Return false if it is not there. */
bool replay_copy(const struct pg_arena *a, uint64_t position, struct pg_entry *copy);
/* For readers: return the sequence of the topic's newest visible notice; 0 = it has none. */
uint64_t replay_newest(const struct pg_arena *a, uint32_t topic);
/* The same for the notices that were handed to the socket, in an arena that no daemon writes. */
uint64_t replay_newest_sent(const struct pg_arena *a, uint32_t topic);
/* Mark an entry whose key has been armed again, so that a CANCEL is not answered FIRED. */
void replay_supersede(struct pg_arena *a, uint32_t id);
/* Complete an interrupted append, and skip withdrawn entries at the head. */
bool replay_settle(struct pg_arena *a, struct pg_fault *why);
bool replay_rebuild(struct pg_arena *a, struct pg_fault *why); /* marks used blobs, indexes keys */
/* Check all entries. Add the number of granules of their blobs to *granules. */
bool replay_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

#endif

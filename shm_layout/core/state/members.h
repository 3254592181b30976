/* members.h - the members of consumer groups, and the lists of the jobs that they hold. */
#ifndef PURGATORYD_STATE_MEMBERS_H
#define PURGATORYD_STATE_MEMBERS_H

#include "core/base/check.h"
#include "core/base/common.h"
#include "core/arena.h"

/* Return the row of a session's member of a group; PG_NIL = there is none. */
uint32_t member_find(const struct pg_arena *a, uint64_t session, uint32_t group);
/* The same, but create the member if there is none. PG_NIL: no row is free. */
uint32_t member_found_or_born(struct pg_arena *a, uint64_t session, uint32_t group);
/* Free the row of a member that holds no job. */
void member_free(struct pg_arena *a, uint32_t row);
/* Let a session take jobs of a group, at most `credits` at a time. The jobs that it holds are sent
 * again. False: no row is free. */
bool member_join(struct pg_arena *a, uint64_t session, uint32_t group, uint32_t credits,
                 int64_t lease_ns);
/* Append a job to the list of its member, or remove it. */
void member_takes(struct pg_arena *a, uint32_t member, uint32_t row);
void member_gives(struct pg_arena *a, uint32_t row);
/* Number of members of a group. */
uint32_t group_members(const struct pg_arena *a, uint32_t group);
void members_init(struct pg_arena *a);
bool members_check(const struct pg_arena *a, struct pg_fault *fault);

#endif

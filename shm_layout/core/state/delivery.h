/* delivery.h - gives jobs to the members of consumer groups, and takes them back. */
#ifndef PURGATORYD_STATE_DELIVERY_H
#define PURGATORYD_STATE_DELIVERY_H

#include "core/base/common.h"
#include "core/arena.h"

/* End all members of a session. Their jobs are released, or with `failed` their attempts have
 * failed. */
void members_leave(struct pg_arena *a, uint64_t session, bool failed);
/* End the members of a group that is deleted. */
void members_forget_group(struct pg_arena *a, uint32_t group);
/* Lease waiting jobs to members, at most `budget`. Return whether more could be leased. */
bool members_serve(struct pg_arena *a, uint32_t budget);
/* Return a member with unsent jobs whose session can receive them; PG_NIL = none. */
uint32_t member_unsent(const struct pg_arena *a);
/* Record that a session needs a message about a deleted consumer group. The message is sent once
 * the session is not away. */
void session_evict(struct pg_arena *a, struct pg_session *s);
/* Record that a session is not away. */
void session_returns(struct pg_arena *a, struct pg_session *s);
/* Return a connected former member of a deleted group that has no message about it; NULL = none. */
struct pg_session *session_evicted(struct pg_arena *a);
/* Find the members that hold jobs. They get no more jobs until they join again. */
void members_rebuild(struct pg_arena *a);

#endif

/* lateness.h - which due timers do not fire at once: pauses, outages and late policies. */
#ifndef PURGATORYD_STATE_LATENESS_H
#define PURGATORYD_STATE_LATENESS_H

#include "core/base/common.h"
#include "core/arena.h"

/* Return whether a due timer has to wait in the backlog of its topic. */
bool late_waits(const struct pg_arena *a, uint32_t slot);
/* Link a due timer into the backlog of its topic. */
void late_hold(struct pg_arena *a, uint32_t slot);
/* Return whether a topic or its namespace is paused. */
bool late_paused(const struct pg_arena *a, uint32_t topic);
/* Return the policy that applies to a due timer: PG_LATE_FIRE if it is within its grace. */
unsigned late_policy_now(const struct pg_arena *a, uint32_t slot);
/* Return the policy that would apply to the timer if it had this deadline. */
unsigned late_policy_at(const struct pg_arena *a, uint32_t slot, int64_t deadline_ns);
/* Note that a pause or a rate has changed, so that the next advance looks at all backlogs. */
void late_changed(struct pg_arena *a);
/* Note an outage that ended at now_ns: timers due until then fire at a limited rate. */
void late_outage(struct pg_arena *a, int64_t now_ns);

#endif

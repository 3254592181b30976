/* delivery.c - gives jobs to the members of consumer groups, and takes them back.
 *
 * A waiting job goes to the member that can take most further jobs; among equal members, to the one
 * that got its last job longest ago. */

#include "core/state/delivery.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/groups.h"
#include "core/state/jobs.h"
#include "core/state/members.h"
#include "core/state/quotas.h"
#include "core/state/rows.h"

/* ---- the end of a member --------------------------------------------------------------------- */

/* Give back all jobs of a member. If the WAL buffer is full, the rest stays leased until the leases
 * end. */
static void jobs_give_back(struct pg_arena *a, uint32_t member, bool failed)
{
    while (member_at(a, member)->first != PG_NIL) {
        const uint32_t row = member_at(a, member)->first;
        if (wal_buffer_full(a))
            member_gives(a, row);
        else if (failed)
            job_expired(a, row);
        else
            job_release(a, row);
    }
}

void members_leave(struct pg_arena *a, uint64_t session, bool failed)
{
    for (uint32_t group = 0; group < a->group_rows; group++) {
        if (!group_exists(a, group))
            continue;
        const uint32_t row = member_find(a, session, group);
        if (row == PG_NIL)
            continue;
        jobs_give_back(a, row, failed);
        member_free(a, row);
    }
}

static void member_evict(struct pg_arena *a, uint32_t row)
{
    struct pg_session *s = session_find(a, member_at(a, row)->session);
    while (member_at(a, row)->first != PG_NIL)
        member_gives(a, member_at(a, row)->first);
    member_free(a, row);
    if (s == NULL)
        return;
    session_evict(a, s);
}

void members_forget_group(struct pg_arena *a, uint32_t group)
{
    while (group_at(a, group)->first_member != PG_NIL)
        member_evict(a, group_at(a, group)->first_member);
}

/* ---- leases ---------------------------------------------------------------------------------- */

static uint32_t free_credits(const struct pg_arena *a, uint32_t row)
{
    const struct pg_member *m = member_at(a, row);
    const struct pg_session *s = session_find(a, m->session);
    return s == NULL || s->away || m->held >= m->credits ? 0 : m->credits - m->held;
}

/* Return the member that gets the next job; PG_NIL = none can take one. The search begins after the
 * member that got the last one, so equal members take jobs in rotation. */
static uint32_t member_choose(const struct pg_arena *a, uint32_t group)
{
    const struct pg_consumer_group *g = group_at(a, group);
    uint32_t best = PG_NIL, most = 0;
    uint32_t start = g->last_member == PG_NIL ? PG_NIL : member_at(a, g->last_member)->next;
    if (start == PG_NIL)
        start = g->first_member;
    for (uint32_t row = start; row != PG_NIL;) {
        const uint32_t credits = free_credits(a, row);
        if (credits > most) {
            best = row;
            most = credits;
        }
        row = member_at(a, row)->next == PG_NIL ? g->first_member : member_at(a, row)->next;
        if (row == start)
            break;
    }
    return best;
}

/* Take a token of the group's rate. If there is none, remember when there will be one. */
static bool rate_admits(struct pg_arena *a, uint32_t group)
{
    struct pg_consumer_group *g = group_at(a, group);
    int64_t again_ns;
    if (g->settings.rate == 0 ||
        tokens_take(&g->tokens, g->settings.rate, a->state.now_ns, &again_ns))
        return true;
    if (again_ns < a->state.jobs_again_ns)
        a->state.jobs_again_ns = again_ns;
    return false;
}

/* Lease jobs of a group while it has members with credits. Return the number of leases. */
static uint32_t group_serve(struct pg_arena *a, uint32_t group, uint32_t budget)
{
    struct pg_consumer_group *g = group_at(a, group);
    uint32_t done = 0;
    while (done < budget && !wal_buffer_full(a) && !(g->settings.flags & PG_G_PAUSED)) {
        const uint32_t row = job_next(a, group);
        const uint32_t member = row == PG_NIL ? PG_NIL : member_choose(a, group);
        if (member == PG_NIL || !rate_admits(a, group))
            break;
        g->last_member = member;
        job_lease(a, row, member, member_at(a, member)->lease_ns);
        done++;
    }
    return done;
}

#define FULL_NS 10000000          /* time until the next attempt if the WAL buffer is full */

bool members_serve(struct pg_arena *a, uint32_t budget)
{
    if (!a->state.jobs_wait && a->state.now_ns < a->state.jobs_again_ns)
        return false;
    a->state.jobs_again_ns = INT64_MAX;
    a->state.jobs_wait = false;
    for (uint32_t i = 0; i < a->group_rows && budget != 0; i++)
        if (group_exists(a, i) && group_at(a, i)->first_member != PG_NIL)
            budget -= group_serve(a, i, budget);
    if (wal_buffer_full(a))
        a->state.jobs_again_ns = a->state.now_ns + FULL_NS;
    a->state.jobs_wait |= budget == 0;
    return budget == 0;
}

uint32_t member_unsent(const struct pg_arena *a)
{
    for (uint32_t row = 0; a->state.jobs_unsent && row < a->member_rows; row++) {
        const struct pg_member *m = member_at(a, row);
        const struct pg_session *s = m->session == 0 ? NULL : session_find(a, m->session);
        if (s != NULL && !s->away && m->unsent != PG_NIL)
            return row;
    }
    return PG_NIL;
}

void session_evict(struct pg_arena *a, struct pg_session *s)
{
    const uint32_t row = (uint32_t)(s - session_at(a, 0));
    s->evicted = 1;
    a->state.jobs_unsent = true;
    if (row < a->state.evicted_session)
        a->state.evicted_session = row;
}

void session_returns(struct pg_arena *a, struct pg_session *s)
{
    s->away = 0;
    if (UNLIKELY(s->evicted))
        session_evict(a, s);
}

struct pg_session *session_evicted(struct pg_arena *a)
{
    for (uint32_t *row = &a->state.evicted_session; *row < a->state.session_rows; ++*row) {
        struct pg_session *s = session_at(a, *row);
        if (s->id != 0 && s->evicted && !s->away)
            return s;
    }
    a->state.evicted_session = PG_NIL;
    return NULL;
}

/* ---- rebuild --------------------------------------------------------------------------------- */

void members_rebuild(struct pg_arena *a)
{
    members_init(a);
    for (uint32_t row = 0; row < a->job_slots.capacity; row++) {
        const struct pg_job *j = job_at(a, row);
        if (job_state(j) != PG_JOB_LEASED || session_find(a, j->session) == NULL)
            continue;
        const uint32_t member = member_found_or_born(a, j->session, j->group);
        if (member != PG_NIL)
            member_takes(a, member, row);
    }
    for (uint32_t row = 0; row < a->member_rows; row++)
        member_at(a, row)->unsent = PG_NIL;
    a->state.evicted_session = PG_NIL;
    a->state.jobs_unsent = false;
    a->state.jobs_wait = true;
}

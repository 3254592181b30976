/* members.c - the members of consumer groups, and the jobs that they hold.
 *
 * A member is a session that joined a group. It has a number of credits, which is the number of jobs
 * that it may hold. */

#include "core/state/members.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/arena.h"

/* ---- rows ------------------------------------------------------------------------------------ */

void members_init(struct pg_arena *a)
{
    a->state.free_member = a->member_rows == 0 ? PG_NIL : 0;
    for (uint32_t i = 0; i < a->member_rows; i++)
        *member_at(a, i) = (struct pg_member){.next = i + 1 < a->member_rows ? i + 1 : PG_NIL};
    for (uint32_t i = 0; i < a->group_rows; i++)
        group_at(a, i)->first_member = group_at(a, i)->last_member = PG_NIL;
}

uint32_t member_find(const struct pg_arena *a, uint64_t session, uint32_t group)
{
    uint32_t row = group_at(a, group)->first_member;
    while (row != PG_NIL && member_at(a, row)->session != session)
        row = member_at(a, row)->next;
    return row;
}

static uint32_t member_born(struct pg_arena *a, uint64_t session, uint32_t group)
{
    const uint32_t row = a->state.free_member;
    if (row == PG_NIL)
        return PG_NIL;
    a->state.free_member = member_at(a, row)->next;
    *member_at(a, row) = (struct pg_member){.session = session, .group = group, .first = PG_NIL,
                                            .last = PG_NIL, .unsent = PG_NIL,
                                            .next = group_at(a, group)->first_member};
    group_at(a, group)->first_member = row;
    return row;
}

uint32_t member_found_or_born(struct pg_arena *a, uint64_t session, uint32_t group)
{
    const uint32_t row = member_find(a, session, group);
    return row != PG_NIL ? row : member_born(a, session, group);
}

void member_free(struct pg_arena *a, uint32_t row)
{
    struct pg_consumer_group *g = group_at(a, member_at(a, row)->group);
    uint32_t *link = &g->first_member;
    PG_ASSERT(member_at(a, row)->held == 0, "members", "a member that ends holds no job");
    while (*link != row)
        link = &member_at(a, *link)->next;
    *link = member_at(a, row)->next;
    if (g->last_member == row)
        g->last_member = PG_NIL;
    *member_at(a, row) = (struct pg_member){.next = a->state.free_member};
    a->state.free_member = row;
}

uint32_t group_members(const struct pg_arena *a, uint32_t group)
{
    uint32_t count = 0;
    for (uint32_t row = group_at(a, group)->first_member; row != PG_NIL;
         row = member_at(a, row)->next)
        count++;
    return count;
}

/* ---- jobs that a member holds ---------------------------------------------------------------- */

void member_takes(struct pg_arena *a, uint32_t member, uint32_t row)
{
    struct pg_member *m = member_at(a, member);
    struct pg_job *j = job_at(a, row);
    j->member = member;
    j->next = PG_NIL;
    j->previous = m->last;
    if (m->last == PG_NIL)
        m->first = row;
    else
        job_at(a, m->last)->next = row;
    m->last = row;
    if (m->unsent == PG_NIL)
        m->unsent = row;
    m->held++;
    a->state.jobs_unsent = true;
}

void member_gives(struct pg_arena *a, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    if (j->member == PG_NIL)
        return;                   /* its session ended while the WAL buffer was full */
    struct pg_member *m = member_at(a, j->member);
    if (j->previous == PG_NIL)
        m->first = j->next;
    else
        job_at(a, j->previous)->next = j->next;
    if (j->next == PG_NIL)
        m->last = j->previous;
    else
        job_at(a, j->next)->previous = j->previous;
    if (m->unsent == row)
        m->unsent = j->next;
    m->held--;
    j->member = PG_NIL;
    a->state.jobs_wait = true;    /* a credit is free */
}

/* ---- joining --------------------------------------------------------------------------------- */

bool member_join(struct pg_arena *a, uint64_t session, uint32_t group, uint32_t credits,
                 int64_t lease_ns)
{
    const uint32_t row = member_found_or_born(a, session, group);
    if (row == PG_NIL)
        return false;
    struct pg_member *m = member_at(a, row);
    m->credits = credits;
    m->lease_ns = lease_ns;
    m->unsent = m->first;
    a->state.jobs_wait = true;
    a->state.jobs_unsent |= m->first != PG_NIL;
    return true;
}

/* ---- check ------------------------------------------------------------------------ */

static bool member_check(const struct pg_arena *a, uint32_t row, struct pg_fault *fault)
{
    const struct pg_member *m = member_at(a, row);
    uint32_t held = 0;
    for (uint32_t job = m->first; job != PG_NIL && held <= m->held; job = job_at(a, job)->next) {
        held++;
        if (job_at(a, job)->member != row || (job_at(a, job)->control & 0xff) != PG_JOB_LEASED ||
            job_at(a, job)->session != m->session || job_at(a, job)->group != m->group)
            return fault_set(fault, "members", "a member holds a job that is not leased to it", row,
                             row, job);
    }
    return held == m->held ||
           fault_set(fault, "members", "number of jobs that a member holds", row, held, m->held);
}

bool members_check(const struct pg_arena *a, struct pg_fault *fault)
{
    for (uint32_t row = 0; row < a->member_rows; row++)
        if (member_at(a, row)->session != 0 && !member_check(a, row, fault))
            return false;
    return true;
}

/* jobs.c - the jobs of consumer groups: their states, queues and payloads.
 *
 * A job begins when a notice is committed in a topic that has groups. `control` of its row decides
 * its state; queues, counts and places in the wheel are derived. A waiting job is in the queue of its
 * priority, or behind another job with the same order key. A leased job is in the list of its
 * member (members.c), a dead letter in that of its group. The wheel ends leases, delays and the
 * time that a job may wait.
 *
 * All jobs with one ticket use one blob. As long as any of them exists, their entry in the replay
 * buffer has the flag PG_ENTRY_JOBS and does not free the blob. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "core/state/jobs.h"
#include "core/base/answer.h"
#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/hash.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/base/wheel.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/groups.h"
#include "core/state/items.h"
#include "core/state/members.h"
#include "core/state/records.h"
#include "core/state/rows.h"
#include "core/state/schedule_rows.h"

/* ---- counts ---------------------------------------------------------------------------------- */

static uint64_t *count_of(struct pg_consumer_group *g, unsigned state)
{
    switch (state) {
    case PG_JOB_WAITING: return &g->waiting;
    case PG_JOB_LEASED: return &g->leased;
    case PG_JOB_DELAYED: return &g->delayed;
    default: return &g->dead;
    }
}

static void job_count(struct pg_arena *a, const struct pg_job *j, int64_t sign)
{
    struct pg_consumer_group *g = group_at(a, j->group);
    const uint64_t granules = job_granules(j) + blob_granules(job_error_len(j));
    *count_of(g, job_state(j)) += (uint64_t)sign;
    g->jobs += (uint64_t)sign;
    g->bytes += (uint64_t)sign * granules * PG_GRANULE;
    a->metrics->jobs += (uint64_t)sign;
}

/* ---- the wheel ------------------------------------------------------------------------------- */

static bool is_placed(const struct pg_arena *a, uint32_t row)
{
    return ctl_state(job_hot(a, row)->ctl) == PG_S_ARMED;
}

static void job_unplace(struct pg_arena *a, uint32_t row)
{
    if (!is_placed(a, row))
        return;
    wheel_remove(&a->wheel, wheel_id_of_job(a, row));
    slot_mark(job_hot(a, row), PG_S_PARKED);
}

static void job_place(struct pg_arena *a, uint32_t row, int64_t at_ns)
{
    struct pg_hot *h = job_hot(a, row);
    job_unplace(a, row);
    h->deadline_ns = at_ns < 0 ? 0 : at_ns;
    h->flags = 0;
    slot_mark(h, PG_S_ARMED);
    wheel_place(&a->wheel, wheel_id_of_job(a, row));
}

/* Return the time at which the wheel has to find the job; INT64_MAX = never. */
static int64_t placed_at_ns(const struct pg_arena *a, const struct pg_job *j)
{
    const int64_t retention_ns = group_at(a, j->group)->settings.retention_ns;
    int64_t at_ns;
    switch (job_state(j)) {
    case PG_JOB_LEASED:
    case PG_JOB_DELAYED: return j->due_ns;
    case PG_JOB_WAITING:
        return retention_ns == 0 || __builtin_add_overflow(j->fired_ns, retention_ns, &at_ns)
                   ? INT64_MAX
                   : at_ns;
    default: return INT64_MAX;
    }
}

static void job_place_again(struct pg_arena *a, uint32_t row)
{
    const int64_t at_ns = placed_at_ns(a, job_at(a, row));
    if (at_ns == INT64_MAX)
        job_unplace(a, row);
    else
        job_place(a, row, at_ns);
}

void jobs_place_again(struct pg_arena *a, uint32_t group)
{
    for (uint32_t row = group_at(a, group)->oldest; row != PG_NIL; row = job_at(a, row)->newer)
        if (job_state(job_at(a, row)) == PG_JOB_WAITING)
            job_place_again(a, row);
}

/* ---- lists ----------------------------------------------------------------------------------- */

static void list_append(struct pg_arena *a, uint32_t *head, uint32_t *tail, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    j->next = PG_NIL;
    j->previous = *tail;
    if (*tail == PG_NIL)
        *head = row;
    else
        job_at(a, *tail)->next = row;
    *tail = row;
}

static void list_remove(struct pg_arena *a, uint32_t *head, uint32_t *tail, uint32_t row)
{
    const struct pg_job *j = job_at(a, row);
    if (j->previous == PG_NIL)
        *head = j->next;
    else
        job_at(a, j->previous)->next = j->next;
    if (j->next == PG_NIL)
        *tail = j->previous;
    else
        job_at(a, j->next)->previous = j->previous;
}

/* Jobs fire in the order of the arena's clock, so the list of a group is in this order. */
static void unacked_append(struct pg_arena *a, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    struct pg_consumer_group *g = group_at(a, j->group);
    j->older = g->newest;
    j->newer = PG_NIL;
    if (g->newest == PG_NIL)
        g->oldest = row;
    else
        job_at(a, g->newest)->newer = row;
    g->newest = row;
    schedule_job_opens(a, j);
}

static void unacked_remove(struct pg_arena *a, uint32_t row)
{
    const struct pg_job *j = job_at(a, row);
    struct pg_consumer_group *g = group_at(a, j->group);
    if (j->older == PG_NIL)
        g->oldest = j->newer;
    else
        job_at(a, j->older)->newer = j->newer;
    if (j->newer == PG_NIL)
        g->newest = j->older;
    else
        job_at(a, j->newer)->older = j->older;
    schedule_job_ends(a, j);
}

static void ready_append(struct pg_arena *a, uint32_t row)
{
    const struct pg_job *j = job_at(a, row);
    struct pg_consumer_group *g = group_at(a, j->group);
    list_append(a, &g->ready_first[j->priority], &g->ready_last[j->priority], row);
    a->state.jobs_wait = true;
}

static void ready_remove(struct pg_arena *a, uint32_t row)
{
    const struct pg_job *j = job_at(a, row);
    struct pg_consumer_group *g = group_at(a, j->group);
    list_remove(a, &g->ready_first[j->priority], &g->ready_last[j->priority], row);
}

/* A waiting job gains one priority in this time, so that no priority waits for ever. */
#define AGING_NS 10000000000

uint32_t job_next(const struct pg_arena *a, uint32_t group)
{
    const struct pg_consumer_group *g = group_at(a, group);
    uint32_t best = PG_NIL;
    int64_t best_ns = INT64_MAX;
    for (int64_t priority = PG_PRIORITY_MAX; priority >= 0; priority--) {
        const uint32_t row = g->ready_first[priority];
        if (row == PG_NIL)
            continue;
        const int64_t rank_ns = job_at(a, row)->due_ns - priority * AGING_NS;
        if (rank_ns < best_ns) {
            best = row;
            best_ns = rank_ns;
        }
    }
    return best;
}

/* ---- order keys ------------------------------------------------------------------------------ */

static bool is_ordered(const struct pg_arena *a, const struct pg_job *j)
{
    return (group_at(a, j->group)->settings.flags & PG_G_ORDERED) != 0;
}

/* Clients choose the hash of an order key, so it is hashed again with the secret. */
static uint32_t order_hash(const struct pg_arena *a, const struct pg_job *j)
{
    return (uint32_t)keyed_hash(a->secret->secret, j->group, &j->order, sizeof j->order);
}

/* Return the first job with the order key of `j` in its group; PG_NIL = none. */
static uint32_t order_first(const struct pg_arena *a, const struct pg_job *j, struct probe *at)
{
    const uint32_t hash = order_hash(a, j);
    uint32_t row = index_first(&a->order_index, hash, at);
    while (row != PG_NIL &&
           (job_at(a, row)->order != j->order || job_at(a, row)->group != j->group))
        row = index_next(&a->order_index, hash, at);
    return row;
}

static bool is_earlier(const struct pg_job *j, const struct pg_job *than)
{
    return j->deadline_ns < than->deadline_ns ||
           (j->deadline_ns == than->deadline_ns && j->ticket < than->ticket);
}

/* Insert a job behind the first job of its order key, in the order of deadlines. Most jobs come
 * last. `from`: the first job, or one behind it that is earlier than this job. */
static void order_insert(struct pg_arena *a, uint32_t first, uint32_t from, uint32_t row)
{
    struct pg_job *head = job_at(a, first), *j = job_at(a, row);
    uint32_t before = head->order_last;
    if (before == first || !is_earlier(j, job_at(a, before))) {
        head->order_last = row;
    } else {
        before = from;
        while (!is_earlier(j, job_at(a, job_at(a, before)->order_next)))
            before = job_at(a, before)->order_next;
    }
    j->order_next = job_at(a, before)->order_next;
    job_at(a, before)->order_next = row;
    j->behind = 1;
}

/* Let the order index lead to a job. */
static void order_lead(struct pg_arena *a, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    index_insert(&a->order_index, order_hash(a, j), row);
    j->in_order = 1;
    j->behind = 0;
}

/* Let a waiting job with an earlier deadline take the place of the first job, if nobody holds the
 * first job. */
static bool order_overtake(struct pg_arena *a, uint32_t first, uint32_t row, const struct probe *at)
{
    struct pg_job *head = job_at(a, first), *j = job_at(a, row);
    if (job_state(head) != PG_JOB_WAITING || !is_earlier(j, head))
        return false;
    ready_remove(a, first);
    index_erase(&a->order_index, at);
    j->order_next = first;
    j->order_last = head->order_last;
    head->in_order = 0;
    head->behind = 1;
    order_lead(a, row);
    return true;
}

/* Enter the order of a key. `from`: an earlier job of this order, at which the search for the place
 * begins; PG_NIL = at the first one. Return whether the job is the first one. */
static bool order_enter_behind(struct pg_arena *a, uint32_t from, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    struct probe at;
    const uint32_t first = order_first(a, j, &at);
    if (first == PG_NIL) {
        j->order_next = PG_NIL;
        j->order_last = row;
        order_lead(a, row);
        return true;
    }
    if (order_overtake(a, first, row, &at))
        return true;
    order_insert(a, first, from == PG_NIL ? first : from, row);
    return false;
}

static bool order_enter(struct pg_arena *a, uint32_t row)
{
    return order_enter_behind(a, PG_NIL, row);
}

static void order_leave_behind(struct pg_arena *a, uint32_t first, uint32_t row)
{
    uint32_t before = first;
    while (job_at(a, before)->order_next != row)
        before = job_at(a, before)->order_next;
    job_at(a, before)->order_next = job_at(a, row)->order_next;
    if (job_at(a, first)->order_last == row)
        job_at(a, first)->order_last = before;
    job_at(a, row)->behind = 0;
}

/* Leave the order of a key. The job behind the first job follows it, and can be leased. */
static void order_leave(struct pg_arena *a, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    struct probe at;
    if (!j->in_order && !j->behind)
        return;
    const uint32_t first = order_first(a, j, &at);
    if (j->behind) {
        order_leave_behind(a, first, row);
        return;
    }
    const uint32_t next = j->order_next;
    index_erase(&a->order_index, &at);
    j->in_order = 0;
    if (next == PG_NIL)
        return;
    job_at(a, next)->order_last = j->order_last;
    order_lead(a, next);
    if (job_state(job_at(a, next)) == PG_JOB_WAITING)
        ready_append(a, next);
}

/* ---- payloads -------------------------------------------------------------------------------- */

static struct pg_entry *entry_of(const struct pg_arena *a, const struct pg_job *j)
{
    if (j->position == 0)
        return NULL;
    struct pg_entry *e = replay_at(a, j->position - 1);
    return e->commit == j->position && e->ticket >> 8 == j->ticket >> 8 ? e : NULL;
}

/* Return another job with the same ticket; PG_NIL = none. */
static uint32_t job_with_ticket(const struct pg_arena *a, uint32_t hash, uint64_t ticket,
                                uint32_t but)
{
    struct probe at;
    uint32_t row = index_first(&a->job_index, hash, &at);
    while (row != PG_NIL && (row == but || job_at(a, row)->ticket >> 8 != ticket))
        row = index_next(&a->job_index, hash, &at);
    return row;
}

uint32_t job_blob(const struct pg_arena *a, uint32_t hash, uint64_t ticket)
{
    const uint32_t row =
        a->group_rows == 0 ? PG_NIL : job_with_ticket(a, hash, ticket, PG_NIL);
    return row == PG_NIL ? PG_NIL : job_at(a, row)->blob;
}

static void error_free(struct pg_arena *a, uint64_t error)
{
    const uint32_t granules = blob_granules(error >> 32);
    if (granules == 0)
        return;
    blobs_give(&a->blobs, (uint32_t)error, granules);
    a->metrics->blob_bytes -= (uint64_t)granules * PG_GRANULE;
}

/* Leave the blob to the entry, or free it, if no other job uses it. The job is not in the index. */
static void payload_leave(struct pg_arena *a, const struct pg_job *j)
{
    if (job_blob(a, j->hash, j->ticket >> 8) != PG_NIL)
        return;
    struct pg_entry *e = entry_of(a, j);
    if (e != NULL) {
        e->meta &= (uint8_t)~PG_ENTRY_JOBS;
        return;
    }
    blobs_give(&a->blobs, j->blob, job_granules(j));
    a->metrics->blob_bytes -= (uint64_t)job_granules(j) * PG_GRANULE;
}

/* Store an error text. Without free memory the job has no text. */
static uint64_t error_write(struct pg_arena *a, const struct job_failure *f)
{
    const uint32_t len = f->len < PG_JOB_ERROR_MAX ? f->len : PG_JOB_ERROR_MAX;
    const uint32_t blob = len == 0 ? PG_NIL : blobs_take(&a->blobs, blob_granules(len));
    if (blob == PG_NIL)
        return 0;
    memcpy(blob_at(&a->blobs, blob), f->text, len);
    a->metrics->blob_bytes += (uint64_t)blob_granules(len) * PG_GRANULE;
    return (uint64_t)len << 32 | blob;
}

/* ---- changes of a state ---------------------------------------------------------------------- */

/* Store the new fields of a job, and its control word last. */
static void job_store(struct pg_arena *a, uint32_t row, struct pg_job to)
{
    struct pg_job *j = job_at(a, row);
    struct pg_group_change *change = a->group_change;
    const uint64_t control = to.control, error = j->error;
    if (has_wal(a))
        wal_append_job(a, row, &to, false, false);
    job_count(a, j, -1);
    change->to = to;
    STORE_RELEASE(&change->job, row + 1);
    atomic_thread_fence(memory_order_release);   /* the job changes after the store above */
    to.control = j->control;
    *j = to;
    STORE_RELEASE(&j->control, control);
    STORE_RELEASE(&change->job, 0u);
    job_count(a, j, 1);
    if (error != to.error)
        error_free(a, error);
}

/* Take a job out of the list of its state. */
static void job_unlist(struct pg_arena *a, uint32_t row)
{
    const struct pg_job *j = job_at(a, row);
    struct pg_consumer_group *g = group_at(a, j->group);
    switch (job_state(j)) {
    case PG_JOB_WAITING:
        if (!j->behind)
            ready_remove(a, row);
        break;
    case PG_JOB_LEASED: member_gives(a, row); break;
    case PG_JOB_DEAD: list_remove(a, &g->dead_first, &g->dead_last, row); break;
    default: break;
    }
}

/* Free the row of a job whose control word is PG_JOB_FREE. */
static void row_free(struct pg_arena *a, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    struct probe at;
    if (index_find_id(&a->job_index, j->hash, row, &at))
        index_erase(&a->job_index, &at);
    payload_leave(a, j);
    error_free(a, j->error);
    slot_mark(job_hot(a, row), PG_S_FREE);
    slots_give(&a->job_slots, row);
}

static void job_end(struct pg_arena *a, uint32_t row, bool acked)
{
    struct pg_job *j = job_at(a, row);
    struct pg_job ended = *j;
    ended.control = PG_JOB_FREE;
    if (job_state(j) != PG_JOB_DEAD)
        schedule_job_ending(a, j);
    if (has_wal(a))
        wal_append_job(a, row, &ended, acked, false);
    job_unplace(a, row);
    job_unlist(a, row);
    if (job_state(j) != PG_JOB_DEAD)
        unacked_remove(a, row);
    order_leave(a, row);
    job_count(a, j, -1);
    STORE_RELEASE(&j->control, (uint64_t)PG_JOB_FREE);
    row_free(a, row);
}

void job_ack(struct pg_arena *a, uint32_t row)
{
    group_at(a, job_at(a, row)->group)->acked++;
    a->metrics->jobs_acked++;
    job_end(a, row, true);
}

void job_drop(struct pg_arena *a, uint32_t row)
{
    group_at(a, job_at(a, row)->group)->dropped++;
    a->metrics->jobs_dropped++;
    job_end(a, row, false);
}

/* Drop the oldest waiting job of a group. False: none waits. */
static bool job_drop_oldest(struct pg_arena *a, uint32_t group)
{
    const struct pg_consumer_group *g = group_at(a, group);
    uint32_t oldest = PG_NIL;
    for (uint32_t i = 0; i <= PG_PRIORITY_MAX; i++) {
        const uint32_t row = g->ready_first[i];
        if (row != PG_NIL &&
            (oldest == PG_NIL || job_at(a, row)->due_ns < job_at(a, oldest)->due_ns))
            oldest = row;
    }
    if (oldest == PG_NIL)
        return false;
    job_drop(a, oldest);
    return true;
}

#define DROPS_PER_ADD 1024

/* A group that needs more drops answers BUSY in between, so that no message stalls others and the
 * WAL buffer has space for each drop. A group that would refuse after all drops drops nothing. */
bool jobs_admit(struct pg_arena *a, uint32_t topic, uint32_t jobs, uint64_t granules,
                struct pg_result *r)
{
    uint32_t full;
    if (LIKELY(groups_admit(a, topic, jobs, granules, false, &full)))
        return true;
    bool may = groups_admit(a, topic, jobs, granules, true, &full);
    for (uint32_t drops = 0; may && !groups_admit(a, topic, jobs, granules, false, &full); drops++) {
        if (drops == DROPS_PER_ADD || wal_buffer_full(a)) {
            answer(r, 0, PG_ST_BUSY, 0);
            return false;
        }
        may = job_drop_oldest(a, full);
    }
    const struct pg_consumer_group *g = group_at(a, full);
    if (!may)
        answer(r, full, PG_ST_FULL_GROUP, (int64_t)(g->jobs + g->pending));
    return may;
}

/* Let a job wait, from `due_ns` on. */
static void job_wait(struct pg_arena *a, uint32_t row, struct pg_job to, unsigned failures)
{
    const struct pg_job *j = job_at(a, row);
    const bool enters = is_ordered(a, j) && !j->in_order && !j->behind;
    to.control = job_control(PG_JOB_WAITING, PG_JR_NONE, failures, job_leases(&to));
    to.session = 0;
    job_unlist(a, row);
    job_store(a, row, to);
    job_place_again(a, row);
    if (enters ? order_enter(a, row) : !j->behind)
        ready_append(a, row);
}

void jobs_drop_dead(struct pg_arena *a, uint32_t group, uint32_t most)
{
    const struct pg_consumer_group *g = group_at(a, group);
    while (most-- > 0 && g->dead > g->settings.max_dead && !wal_buffer_full(a))
        job_drop(a, g->dead_first);
}

/* ---- dead letters in the order of their keys --------------------------------------------------- */

/* Merge two chains of dead letters that are sorted by order key and deadline. Chains are linked by
 * order_next, which is unused until a job enters an order. */
static uint32_t chains_merge(struct pg_arena *a, uint32_t x, uint32_t y)
{
    uint32_t first = PG_NIL, *end = &first;
    while (x != PG_NIL && y != PG_NIL) {
        const struct pg_job *j = job_at(a, x), *k = job_at(a, y);
        uint32_t *from = j->order != k->order ? (j->order < k->order ? &x : &y)
                         : is_earlier(j, k)   ? &x
                                              : &y;
        *end = *from;
        end = &job_at(a, *from)->order_next;
        *from = *end;
    }
    *end = x != PG_NIL ? x : y;
    return first;
}

/* Return the dead letters of a group as a sorted chain. The merge sort needs no memory: chains[n] is
 * empty or has 2^n jobs. */
static uint32_t dead_sort(struct pg_arena *a, const struct pg_consumer_group *g)
{
    uint32_t chains[32], all = PG_NIL;
    memset(chains, 0xff, sizeof chains);
    for (uint32_t row = g->dead_first; row != PG_NIL; row = job_at(a, row)->next) {
        uint32_t chain = row, n = 0;
        job_at(a, row)->order_next = PG_NIL;
        for (; chains[n] != PG_NIL; n++) {
            chain = chains_merge(a, chains[n], chain);
            chains[n] = PG_NIL;
        }
        chains[n] = chain;
    }
    for (uint32_t n = 0; n < 32; n++)
        all = chains_merge(a, chains[n], all);
    return all;
}

/* Let all dead letters of a group enter the orders of their keys. */
static void dead_enter(struct pg_arena *a, const struct pg_consumer_group *g)
{
    uint32_t before = PG_NIL, next;
    for (uint32_t row = dead_sort(a, g); row != PG_NIL; row = next) {
        const bool same = before != PG_NIL && job_at(a, before)->order == job_at(a, row)->order;
        next = job_at(a, row)->order_next;
        order_enter_behind(a, same ? before : PG_NIL, row);
        before = row;
    }
}

/* Let all dead letters that have the order key of this one leave its order. */
static void dead_leave(struct pg_arena *a, uint32_t row)
{
    struct probe at;
    const uint32_t first = order_first(a, job_at(a, row), &at);
    uint32_t before = first, next;
    for (uint32_t behind = job_at(a, first)->order_next; behind != PG_NIL; behind = next) {
        next = job_at(a, behind)->order_next;
        if (job_state(job_at(a, behind)) == PG_JOB_DEAD) {
            job_at(a, before)->order_next = next;
            job_at(a, behind)->behind = 0;
        } else {
            before = behind;
        }
    }
    job_at(a, first)->order_last = before;
    if (job_state(job_at(a, first)) == PG_JOB_DEAD)
        order_leave(a, first);
}

void jobs_order_dead(struct pg_arena *a, uint32_t group)
{
    const struct pg_consumer_group *g = group_at(a, group);
    if (g->settings.flags & PG_G_BLOCK) {
        dead_enter(a, g);
        return;
    }
    for (uint32_t row = g->dead_first; row != PG_NIL; row = job_at(a, row)->next)
        if (job_at(a, row)->in_order || job_at(a, row)->behind)
            dead_leave(a, row);
}

/* ---- dead letters -------------------------------------------------------------------------------- */

#define DEAD_PER_CALL 64

/* Make a job a dead letter. */
static void job_bury(struct pg_arena *a, uint32_t row, struct pg_job to, unsigned reason,
                     unsigned failures)
{
    struct pg_consumer_group *g = group_at(a, to.group);
    to.control = job_control(PG_JOB_DEAD, reason, failures, job_leases(&to));
    to.due_ns = a->state.now_ns;
    to.session = 0;
    schedule_job_ending(a, &to);
    job_unlist(a, row);
    job_store(a, row, to);
    job_place_again(a, row);
    unacked_remove(a, row);
    list_append(a, &g->dead_first, &g->dead_last, row);
    if (!(g->settings.flags & PG_G_BLOCK))
        order_leave(a, row);
    a->metrics->jobs_dead++;
    jobs_drop_dead(a, to.group, DEAD_PER_CALL);
}

/* Return a delay between 0 and the largest delay after so many failures ("full jitter"; Brooker,
 * Exponential Backoff And Jitter, 2015). It depends only on the job, so a redo gives the same. */
static int64_t backoff_ns(const struct pg_arena *a, const struct pg_job *j, uint32_t failures)
{
    const struct pg_group_settings *s = &group_at(a, j->group)->settings;
    const uint64_t words[2] = {j->ticket, (uint64_t)j->group << 32 | failures};
    uint64_t most_ns = (uint64_t)s->backoff_base_ns;
    for (uint32_t n = 1; n < failures && most_ns < (uint64_t)s->backoff_cap_ns; n++)
        most_ns *= 2;
    if (most_ns > (uint64_t)s->backoff_cap_ns)
        most_ns = (uint64_t)s->backoff_cap_ns;
    return (int64_t)(keyed_hash(a->secret->secret, 0, words, sizeof words) % (most_ns + 1));
}

static bool is_too_old(const struct pg_arena *a, const struct pg_job *j)
{
    const int64_t retention_ns = group_at(a, j->group)->settings.retention_ns;
    return retention_ns != 0 && a->state.now_ns - j->fired_ns > retention_ns;
}

/* Let a job wait for its next attempt. */
static void job_delay(struct pg_arena *a, uint32_t row, struct pg_job to, uint32_t failures,
                      int64_t delay_ns)
{
    if (__builtin_add_overflow(a->state.now_ns, delay_ns, &to.due_ns))
        to.due_ns = INT64_MAX;
    if (delay_ns == 0) {
        job_wait(a, row, to, failures);
        return;
    }
    to.control = job_control(PG_JOB_DELAYED, PG_JR_NONE, failures, job_leases(&to));
    to.session = 0;
    job_unlist(a, row);
    job_store(a, row, to);
    job_place_again(a, row);
}

static struct pg_job with_failure(struct pg_arena *a, const struct pg_job *j,
                                  const struct job_failure *f)
{
    struct pg_job to = *j;
    to.last_failed_ns = a->state.now_ns;
    if (to.first_failed_ns == 0)
        to.first_failed_ns = to.last_failed_ns;
    to.error = error_write(a, f);
    return to;
}

void job_failed(struct pg_arena *a, uint32_t row, const struct job_failure *f)
{
    const struct pg_job *j = job_at(a, row);
    struct pg_consumer_group *g = group_at(a, j->group);
    const struct pg_job to = with_failure(a, j, f);
    const uint32_t before = job_failures(j);
    const uint32_t failures = before < PG_ATTEMPTS_MAX ? before + 1 : before;
    if (failures >= g->settings.max_attempts) {
        job_bury(a, row, to, PG_JR_MAX_ATTEMPTS, failures);
    } else if (is_too_old(a, j)) {
        job_bury(a, row, to, PG_JR_TOO_OLD, failures);
    } else {
        job_delay(a, row, to, failures,
                  f->delay_ns < 0 ? backoff_ns(a, j, failures) : f->delay_ns);
        g->retried++;
        a->metrics->jobs_retried++;
    }
}

void job_expired(struct pg_arena *a, uint32_t row)
{
    static const uint8_t text[] = "the lease expired, or its member ended";
    a->metrics->jobs_expired++;
    job_failed(a, row, &(struct job_failure){text, sizeof text - 1, -1});
}

void job_reject(struct pg_arena *a, uint32_t row, const struct job_failure *f)
{
    const struct pg_job *j = job_at(a, row);
    const uint32_t failures = job_failures(j);
    job_bury(a, row, with_failure(a, j, f), PG_JR_REJECTED,
             failures < PG_ATTEMPTS_MAX ? failures + 1 : failures);
}

void job_release(struct pg_arena *a, uint32_t row)
{
    struct pg_job to = *job_at(a, row);
    to.due_ns = a->state.now_ns;
    job_wait(a, row, to, job_failures(&to));
}

void job_requeue(struct pg_arena *a, uint32_t row)
{
    struct pg_job to = *job_at(a, row);
    to.due_ns = to.fired_ns = a->state.now_ns;
    to.first_failed_ns = to.last_failed_ns = 0;
    to.error = 0;
    job_wait(a, row, to, 0);
    unacked_append(a, row);
}

void job_lease(struct pg_arena *a, uint32_t row, uint32_t member, int64_t lease_ns)
{
    struct pg_job to = *job_at(a, row);
    const int64_t most_ns = group_at(a, to.group)->settings.max_lease_ns;
    if (lease_ns > most_ns)
        lease_ns = most_ns;
    to.leased_ns = a->state.now_ns;
    to.due_ns = a->state.now_ns + lease_ns;
    to.session = member_at(a, member)->session;
    to.control =
        job_control(PG_JOB_LEASED, PG_JR_NONE, job_failures(&to), job_leases(&to) + 1);
    job_unlist(a, row);
    job_store(a, row, to);
    job_place_again(a, row);
    member_takes(a, member, row);
    a->metrics->jobs_leased++;
}

int64_t job_extended_ns(const struct pg_arena *a, uint32_t row, int64_t until_ns)
{
    const struct pg_job *j = job_at(a, row);
    const int64_t last_ns = j->leased_ns + group_at(a, j->group)->settings.max_lease_ns;
    const int64_t ends_ns = until_ns < last_ns ? until_ns : last_ns;
    return ends_ns > j->due_ns ? ends_ns : j->due_ns;
}

void job_extend(struct pg_arena *a, uint32_t row, int64_t until_ns)
{
    struct pg_job to = *job_at(a, row);
    to.due_ns = job_extended_ns(a, row, until_ns);
    job_store(a, row, to);
    job_place_again(a, row);
}

bool job_due(struct pg_arena *a, uint32_t row)
{
    struct pg_job to = *job_at(a, row);
    if (wal_buffer_full(a))
        return false;
    slot_mark(job_hot(a, row), PG_S_PARKED);
    switch (job_state(&to)) {
    case PG_JOB_LEASED: job_expired(a, row); break;
    case PG_JOB_DELAYED: job_wait(a, row, to, job_failures(&to)); break;
    default: job_bury(a, row, to, PG_JR_TOO_OLD, job_failures(&to)); break;
    }
    return true;
}

/* ---- birth ----------------------------------------------------------------------------------- */

static uint64_t order_of_key(const struct pg_arena *a, uint32_t namespace_row, const uint8_t *key,
                             uint32_t len)
{
    return keyed_hash(a->secret->secret, namespace_row, key, len);
}

/* A timer without an order key has the order of its key. */
struct job_traits job_traits_of(const struct pg_arena *a, const struct pg_entry *e, uint32_t slot)
{
    const struct pg_topic *t = topic_at(a, e->topic);
    if (LIKELY(t->groups == 0))
        return (struct job_traits){0};
    const struct pg_ext *order = slot == PG_NIL ? NULL : slot_item(a, slot, PG_EXT_ORDER);
    const struct pg_ext *priority = slot == PG_NIL ? NULL : slot_item(a, slot, PG_EXT_PRIORITY);
    return (struct job_traits){
        order != NULL ? (uint64_t)order->value
                      : order_of_key(a, t->namespace_row, blob_at(&a->blobs, e->blob), e->key_len),
        (uint8_t)(priority != NULL ? priority->extra : t->priority), order != NULL};
}

static struct pg_job job_new(uint32_t group, const struct pg_entry *e, uint64_t position,
                             const struct job_traits *traits)
{
    return (struct pg_job){
        .control = job_control(PG_JOB_WAITING, PG_JR_NONE, 0, 0),
        .ticket = e->ticket, .position = position + 1, .deadline_ns = e->deadline_ns,
        .fired_ns = e->fired_ns, .due_ns = e->fired_ns, .order = traits->order, .blob = e->blob,
        .payload_len = e->payload_len, .hash = e->hash, .next = PG_NIL, .previous = PG_NIL,
        .member = PG_NIL, .order_next = PG_NIL, .order_last = PG_NIL, .group = (uint16_t)group,
        .topic = e->topic, .priority = traits->priority, .own_order = traits->own_order,
        .missed = e->missed, .key_len = e->key_len,
        .meta = (uint8_t)(e->meta & ~PG_ENTRY_JOBS)};
}

/* Store a new job, and its control word last. */
static void job_write(struct pg_arena *a, uint32_t row, struct pg_job to)
{
    const uint64_t control = to.control;
    to.control = PG_JOB_FREE;
    *job_at(a, row) = to;
    STORE_RELEASE(&job_at(a, row)->control, control);
}

/* Add a new job to the index, the counts, the wheel and its queue. */
static void job_link(struct pg_arena *a, uint32_t row)
{
    const struct pg_job *j = job_at(a, row);
    index_insert(&a->job_index, j->hash, row);
    slot_mark(job_hot(a, row), PG_S_PARKED);
    job_count(a, j, 1);
    unacked_append(a, row);
    job_place_again(a, row);
    if (!is_ordered(a, j) || order_enter(a, row))
        ready_append(a, row);
}

static void job_begin(struct pg_arena *a, uint32_t group, const struct pg_entry *e,
                      uint64_t position, const struct job_traits *traits)
{
    const uint32_t row = slots_take(&a->job_slots);
    PG_ASSERT(row != PG_NIL, "jobs", "the budget of a group has a row for each of its jobs");
    job_write(a, row, job_new(group, e, position, traits));
    job_link(a, row);
    a->metrics->jobs_born++;
}

bool jobs_born(struct pg_arena *a, const struct pg_entry *e, uint64_t position,
               const struct job_traits *traits)
{
    bool any = false;
    EACH_GROUP_OF_TOPIC(link, a, e->topic) {
        job_begin(a, link->group - 1, e, position, traits);
        any = true;
    }
    return any;
}

/* Return the firing time for the job of an older notice: not in the future, and not before that of
 * the newest job. A notice may break this after a reboot with a wall clock that was set back. */
static int64_t older_fired_ns(const struct pg_arena *a, uint32_t group, int64_t fired_ns)
{
    const uint32_t newest = group_at(a, group)->newest;
    const int64_t least_ns = newest == PG_NIL ? INT64_MIN : job_at(a, newest)->fired_ns;
    if (fired_ns > a->state.now_ns)
        return a->state.now_ns;
    return fired_ns < least_ns ? least_ns : fired_ns;
}

void job_born_of_entry(struct pg_arena *a, uint32_t group, uint64_t position)
{
    struct pg_entry *e = replay_at(a, position), fired = *e;
    const struct job_traits traits = job_traits_of(a, e, PG_NIL);
    fired.fired_ns = older_fired_ns(a, group, e->fired_ns);
    const struct pg_job born = job_new(group, &fired, position, &traits);
    if (has_wal(a))
        wal_append_job(a, job_row_born(a, 0), &born, false, true);
    job_begin(a, group, &fired, position, &traits);
    e->meta |= PG_ENTRY_JOBS;
}

/* ---- cancel ---------------------------------------------------------------------------------- */

static bool job_has_key(const struct pg_arena *a, const struct pg_job *j, const struct key *k)
{
    return j->key_len == k->len && (j->meta & 7) == k->type &&
           group_at(a, j->group)->namespace_row == k->namespace_row &&
           memcmp(blob_at(&a->blobs, j->blob), k->bytes, k->len) == 0;
}

/* Return whether `row` comes before `other`: a leased job first, then the older one. */
static bool comes_first(const struct pg_arena *a, uint32_t row, uint32_t other)
{
    if (other == PG_NIL)
        return true;
    const struct pg_job *j = job_at(a, row), *k = job_at(a, other);
    const bool leased = job_state(j) == PG_JOB_LEASED;
    if (leased != (job_state(k) == PG_JOB_LEASED))
        return leased;
    return j->ticket != k->ticket ? j->ticket < k->ticket : row < other;
}

uint32_t job_of_key(const struct pg_arena *a, const struct key *k, uint64_t ticket)
{
    struct probe at;
    uint32_t found = PG_NIL, row = index_first(&a->job_index, k->hash, &at);
    for (; row != PG_NIL; row = index_next(&a->job_index, k->hash, &at)) {
        const struct pg_job *j = job_at(a, row);
        if (job_state(j) != PG_JOB_DEAD && job_has_key(a, j, k) &&
            (ticket == 0 || j->ticket >> 8 == ticket) && comes_first(a, row, found))
            found = row;
    }
    return found;
}

/* ---- compaction ------------------------------------------------------------------------------ */

/* Let all jobs of a ticket, and their entry, use the new place of their blob. A kill may come between
 * two of the stores: a rebuild then lets all use the same place. */
static void payload_moved(struct pg_arena *a, const struct pg_job *j, uint32_t blob)
{
    struct pg_entry *e = entry_of(a, j);
    struct probe at;
    if (e != NULL)
        STORE_RELEASE(&e->blob, blob);
    for (uint32_t row = index_first(&a->job_index, j->hash, &at); row != PG_NIL;
         row = index_next(&a->job_index, j->hash, &at))
        if (job_at(a, row)->ticket >> 8 == j->ticket >> 8)
            STORE_RELEASE(&job_at(a, row)->blob, blob);
}

static uint32_t error_evacuate(struct pg_arena *a, struct pg_job *j)
{
    const uint32_t granules = blob_granules(job_error_len(j)), old = (uint32_t)j->error;
    const uint32_t blob = granules == 0 ? PG_NIL : blobs_evacuate(&a->blobs, old, granules);
    if (blob == PG_NIL)
        return 0;
    STORE_RELEASE(&j->error, j->error >> 32 << 32 | blob);
    blobs_give(&a->blobs, old, granules);
    return granules;
}

uint32_t job_evacuate(struct pg_arena *a, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    if (job_state(j) == PG_JOB_FREE)
        return 0;
    const uint32_t granules = job_granules(j), old = j->blob;
    const uint32_t blob = blobs_evacuate(&a->blobs, old, granules);
    uint32_t moved = error_evacuate(a, j);
    if (blob != PG_NIL) {
        payload_moved(a, j, blob);
        blobs_give(&a->blobs, old, granules);
        moved += granules;
    }
    return moved;
}

/* ---- redo ------------------------------------------------------------------------------------ */

/* During redo the hashes of keys are unknown, so the index of jobs uses tickets. The part of a row
 * that the wheel uses later has two notes: `deadline_ns` is the LSN of the oldest record that may
 * change the row, and `ctl` the incarnation of the job's group. */
static uint32_t hash_of_ticket(uint64_t ticket) { return (uint32_t)id_mix(ticket >> 8); }

static void restore_note(struct pg_arena *a, uint32_t row, uint64_t lsn, uint64_t incarnation)
{
    job_hot(a, row)->deadline_ns = (int64_t)lsn;
    job_hot(a, row)->ctl = incarnation;
}

/* Return whether the row shows an older state than the record. */
static bool row_wanted(const struct pg_arena *a, uint32_t row, uint64_t lsn)
{
    return (uint64_t)job_hot(a, row)->deadline_ns <= lsn;
}

static void restore_end(struct pg_arena *a, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    struct probe at;
    if (job_state(j) == PG_JOB_FREE)
        return;
    if (index_find_id(&a->job_index, j->hash, row, &at))
        index_erase(&a->job_index, &at);
    payload_leave(a, j);
    error_free(a, j->error);
    j->control = PG_JOB_FREE;
}

void jobs_restore_end_of_group(struct pg_arena *a, uint32_t group, uint64_t incarnation)
{
    for (uint32_t row = 0; row < a->job_slots.capacity; row++)
        if (job_at(a, row)->group == group && job_hot(a, row)->ctl == incarnation)
            restore_end(a, row);
}

static bool has_job(const struct pg_arena *a, uint32_t row, uint64_t ticket)
{
    return job_state(job_at(a, row)) != PG_JOB_FREE && job_at(a, row)->ticket == ticket;
}

bool job_matches(const struct pg_arena *a, const struct pg_wal_job *from)
{
    const struct pg_job j = {.ticket = from->ticket, .position = from->position,
                             .key_len = from->key_len, .payload_len = from->payload_len};
    const uint32_t row = job_with_ticket(a, hash_of_ticket(j.ticket), j.ticket >> 8, PG_NIL);
    const struct pg_entry *e = entry_of(a, &j);
    return (row == PG_NIL || (job_granules(job_at(a, row)) == job_granules(&j) &&
                              job_at(a, row)->position == j.position)) &&
           (e == NULL || entry_granules(e) == job_granules(&j));
}

/* Let an entry use the blob that jobs of its ticket already have. */
static bool entry_joins(struct pg_arena *a, struct pg_entry *e, uint64_t position)
{
    const uint32_t row = job_with_ticket(a, hash_of_ticket(e->ticket), e->ticket >> 8, PG_NIL);
    if (row == PG_NIL)
        return true;
    const struct pg_job *j = job_at(a, row);
    if (job_granules(j) != entry_granules(e) || j->position != position + 1)
        return false;
    if (j->blob != e->blob) {
        blobs_give(&a->blobs, e->blob, entry_granules(e));
        e->blob = j->blob;
    }
    e->meta |= PG_ENTRY_JOBS;
    return true;
}

bool jobs_restore_born(struct pg_arena *a, const struct pg_wal_born *born, uint32_t count,
                       uint64_t position, uint64_t lsn)
{
    struct pg_entry *e = replay_at(a, position);
    if (!entry_joins(a, e, position))
        return false;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t row = born[i].row;
        if (!row_wanted(a, row, lsn) || has_job(a, row, e->ticket))
            continue;
        restore_end(a, row);
        restore_note(a, row, lsn, group_at(a, born[i].group)->incarnation);
        job_write(a, row, job_new(born[i].group, e, position,
                                  &(struct job_traits){born[i].order, born[i].priority,
                                                       born[i].own_order}));
        job_at(a, row)->hash = hash_of_ticket(e->ticket);
        index_insert(&a->job_index, job_at(a, row)->hash, row);
        e->meta |= PG_ENTRY_JOBS;
    }
    return true;
}

static struct pg_job fields_of(const struct pg_wal_job *f, const struct pg_job *j)
{
    struct pg_job to = *j;
    to.control = f->control;
    to.ticket = f->ticket;
    to.position = f->position;
    to.deadline_ns = f->deadline_ns;
    to.fired_ns = f->fired_ns;
    to.due_ns = f->due_ns;
    to.leased_ns = f->leased_ns;
    to.first_failed_ns = f->first_failed_ns;
    to.last_failed_ns = f->last_failed_ns;
    to.session = f->session;
    to.order = f->order;
    to.group = f->group;
    to.topic = f->topic;
    to.meta = f->meta;
    to.priority = f->priority;
    to.missed = f->missed;
    to.own_order = f->own_order;
    return to;
}

/* Write the payload of a job of a snapshot, unless another job or an entry has it. */
static bool payload_restore(struct pg_arena *a, const struct pg_wal_job *from, uint32_t row,
                            const uint8_t *bytes)
{
    struct pg_job *j = job_at(a, row);
    *j = (struct pg_job){.hash = hash_of_ticket(from->ticket), .ticket = from->ticket,
                         .position = from->position, .key_len = from->key_len,
                         .payload_len = from->payload_len};
    const uint32_t other = job_with_ticket(a, j->hash, j->ticket >> 8, row);
    struct pg_entry *e = entry_of(a, j);
    j->blob = other != PG_NIL ? job_at(a, other)->blob : e != NULL ? e->blob : PG_NIL;
    if (e != NULL && other == PG_NIL)
        e->meta |= PG_ENTRY_JOBS;
    if (j->blob == PG_NIL) {
        j->blob = blobs_take(&a->blobs, job_granules(j));
        if (j->blob == PG_NIL)
            return false;
        memcpy(blob_at(&a->blobs, j->blob), bytes, (size_t)j->key_len + j->payload_len);
    }
    index_insert(&a->job_index, j->hash, row);
    return true;
}

bool job_restore(struct pg_arena *a, const struct pg_wal_job *from, const uint8_t *bytes,
                 uint64_t lsn)
{
    struct pg_job *j = job_at(a, from->row);
    const bool born = from->key_len != 0;
    const bool same = has_job(a, from->row, from->ticket) &&
                      (!born || job_hot(a, from->row)->ctl == from->incarnation);
    if (!row_wanted(a, from->row, lsn) || (!same && !born))
        return true;              /* the snapshot is newer, or the job has ended */
    if ((from->control & 0xff) == PG_JOB_FREE) {
        restore_end(a, from->row);
        return true;
    }
    if (!same) {
        restore_end(a, from->row);
        if (!payload_restore(a, from, from->row, bytes + from->error_len))
            return false;
        restore_note(a, from->row, from->lsn == 0 ? lsn : from->lsn, from->incarnation);
    }
    error_free(a, j->error);
    *j = fields_of(from, j);
    j->error = error_write(a, &(struct job_failure){bytes, from->error_len, 0});
    return true;
}

static int64_t shifted(int64_t ns, int64_t by_ns)
{
    return ns == 0 || __builtin_add_overflow(ns, by_ns, &ns) ? 0 : ns;
}

/* A lease that a restart of the host ended is a failed attempt. */
static void lease_restored(struct pg_arena *a, struct pg_job *j)
{
    static const uint8_t text[] = "the host restarted";
    const uint32_t before = job_failures(j);
    const uint32_t failures = before < PG_ATTEMPTS_MAX ? before + 1 : before;
    const bool dead = failures >= group_at(a, j->group)->settings.max_attempts;
    const uint64_t error = j->error;
    *j = with_failure(a, j, &(struct job_failure){text, sizeof text - 1, 0});
    error_free(a, error);
    j->session = 0;
    j->due_ns = a->state.now_ns;
    j->control = job_control(dead ? PG_JOB_DEAD : PG_JOB_WAITING,
                             dead ? PG_JR_MAX_ATTEMPTS : PG_JR_NONE, failures, job_leases(j));
}

static void times_restored(struct pg_job *j, int64_t shift_ns)
{
    j->deadline_ns = shifted(j->deadline_ns, shift_ns);
    j->fired_ns = shifted(j->fired_ns, shift_ns);
    j->due_ns = shifted(j->due_ns, shift_ns);
    j->leased_ns = shifted(j->leased_ns, shift_ns);
    j->first_failed_ns = shifted(j->first_failed_ns, shift_ns);
    j->last_failed_ns = shifted(j->last_failed_ns, shift_ns);
}

/* Hash the key again, because the arena may have another secret. */
static void key_restored(struct pg_arena *a, struct pg_job *j)
{
    const uint32_t namespace_row = group_at(a, j->group)->namespace_row;
    const uint8_t *key = blob_at(&a->blobs, j->blob);
    j->hash = key_hash_of(keyed_hash(a->secret->secret, key_scope(namespace_row, j->meta & 7), key,
                                     j->key_len));
    if (!j->own_order)
        j->order = order_of_key(a, namespace_row, key, j->key_len);
}

static bool group_lives(const struct pg_arena *a, uint32_t row)
{
    const uint32_t group = job_at(a, row)->group;
    return group_exists(a, group) && group_at(a, group)->incarnation == job_hot(a, row)->ctl;
}

void jobs_restored(struct pg_arena *a, int64_t shift_ns)
{
    for (uint32_t row = 0; row < a->job_slots.capacity; row++)
        if (!group_lives(a, row))
            restore_end(a, row);
    for (uint32_t row = 0; row < a->job_slots.capacity; row++) {
        struct pg_job *j = job_at(a, row);
        if (job_state(j) == PG_JOB_FREE)
            continue;
        times_restored(j, shift_ns);
        key_restored(a, j);
        if (job_state(j) == PG_JOB_LEASED)
            lease_restored(a, j);
    }
    for (uint32_t group = 0; group < a->group_rows; group++)
        group_restored(a, group, shift_ns);
}

/* ---- rebuild --------------------------------------------------------------------------------- */

void jobs_init(struct pg_arena *a)
{
    slots_init(&a->job_slots);
    index_init(&a->job_index);
    index_init(&a->order_index);
}

static bool job_sound(const struct pg_arena *a, const struct pg_job *j)
{
    return job_state(j) < PG_JOB_STATES && j->key_len != 0 && j->priority <= PG_PRIORITY_MAX &&
           j->topic < a->topic_rows && topic_at(a, j->topic)->name_len != 0 &&
           j->payload_len <= PG_PAYLOAD_MAX + PG_VERDICT_MAX &&
           job_error_len(j) <= PG_JOB_ERROR_MAX &&
           ticket_known(a->header, j->ticket >> 8);
}

static bool exists(const struct pg_arena *a, const struct pg_job *j)
{
    const bool draft = j->group == a->state.draft.group;
    return (draft || (group_exists(a, j->group) && group_at(a, j->group)->incarnation != 0)) &&
           j->position <= a->header->replay_tail;
}

bool jobs_void(struct pg_arena *a, struct pg_fault *why)
{
    for (uint32_t row = 0; row < a->job_slots.capacity; row++) {
        struct pg_job *j = job_at(a, row);
        if (job_state(j) == PG_JOB_FREE)
            continue;
        if (!exists(a, j))
            STORE_RELEASE(&j->control, (uint64_t)PG_JOB_FREE);
        else if (!job_sound(a, j))
            return fault_set(why, "jobs", "a job's group, topic, state or key is invalid", row,
                             PG_JOB_STATES, job_state(j));
    }
    for (uint64_t p = a->header->replay_head; p < a->header->replay_tail; p++)
        replay_at(a, p)->meta &= (uint8_t)~PG_ENTRY_JOBS;
    for (uint32_t i = 0; i < a->group_rows; i++)
        if (group_exists(a, i) && group_at(a, i)->incarnation == 0)
            group_free(a, i);
    return true;
}

/* Mark the payload of a job, or let the job use the payload of another job with its ticket. */
static bool payload_rebuild(struct pg_arena *a, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    const uint32_t other = job_with_ticket(a, j->hash, j->ticket >> 8, row);
    if (j->error != 0 &&
        !blobs_rebuild_mark(&a->blobs, (uint32_t)j->error, blob_granules(job_error_len(j))))
        return false;
    if (other != PG_NIL) {
        j->blob = job_at(a, other)->blob;
        return true;
    }
    struct pg_entry *e = entry_of(a, j);
    if (e != NULL) {
        e->blob = j->blob;
        e->meta |= PG_ENTRY_JOBS;
    }
    return blobs_rebuild_mark(&a->blobs, j->blob, job_granules(j));
}

/* Order of the jobs in their queues: by the time at which they began to wait, were leased or died. */
static int row_compare(const void *x, const void *y, void *context)
{
    const struct pg_arena *a = context;
    const struct pg_job *j = job_at(a, *(const uint32_t *)x), *k = job_at(a, *(const uint32_t *)y);
    if (j->due_ns != k->due_ns)
        return j->due_ns < k->due_ns ? -1 : 1;
    return j->ticket < k->ticket ? -1 : j->ticket > k->ticket;
}

static int fired_compare(const void *x, const void *y, void *context)
{
    const struct pg_arena *a = context;
    const struct pg_job *j = job_at(a, *(const uint32_t *)x), *k = job_at(a, *(const uint32_t *)y);
    return (j->fired_ns > k->fired_ns) - (j->fired_ns < k->fired_ns);
}

static void job_relink(struct pg_arena *a, uint32_t row)
{
    struct pg_job *j = job_at(a, row);
    struct pg_consumer_group *g = group_at(a, j->group);
    job_count(a, j, 1);
    const bool in_order =
        is_ordered(a, j) && (job_state(j) != PG_JOB_DEAD || g->settings.flags & PG_G_BLOCK);
    const bool first = !in_order || order_enter(a, row);
    if (job_state(j) == PG_JOB_DEAD)
        list_append(a, &g->dead_first, &g->dead_last, row);
    else if (job_state(j) == PG_JOB_WAITING && first)
        ready_append(a, row);
}

static bool is_first(const struct pg_job *j)
{
    return job_state(j) == PG_JOB_LEASED || job_state(j) == PG_JOB_DELAYED;
}

/* Link the jobs that `rows` names. A leased or delayed job is the first one of its order key. */
static void jobs_relink(struct pg_arena *a, uint32_t *rows, uint32_t count)
{
    qsort_r(rows, count, sizeof *rows, row_compare, a);
    for (uint32_t i = 0; i < count; i++)
        if (is_first(job_at(a, rows[i])))
            job_relink(a, rows[i]);
    for (uint32_t i = 0; i < count; i++)
        if (!is_first(job_at(a, rows[i])))
            job_relink(a, rows[i]);
    qsort_r(rows, count, sizeof *rows, fired_compare, a);
    for (uint32_t i = 0; i < count; i++)
        if (job_state(job_at(a, rows[i])) != PG_JOB_DEAD)
            unacked_append(a, rows[i]);
}

/* The memory of the free stack holds the rows to link until the free stack is built. */
bool jobs_rebuild(struct pg_arena *a, struct pg_fault *why)
{
    if (a->group_rows == 0)
        return true;
    uint32_t *rows = &a->job_slots.free[1], count = 0;
    index_init(&a->job_index);
    index_init(&a->order_index);
    a->metrics->jobs = 0;
    for (uint32_t row = 0; row < a->job_slots.capacity; row++) {
        struct pg_job *j = job_at(a, row);
        if (job_state(j) == PG_JOB_FREE)
            continue;
        j->next = j->previous = j->member = j->order_next = j->order_last = PG_NIL;
        j->behind = j->in_order = 0;
        if (j->fired_ns > a->state.now_ns)      /* the wall clock was set back before a reboot */
            j->fired_ns = a->state.now_ns;
        if (!payload_rebuild(a, row))
            return fault_set(why, "jobs", "a job's blob overlaps another or lies outside the pool",
                             row, a->blobs.granules, j->blob);
        index_insert(&a->job_index, j->hash, row);
        rows[count++] = row;
    }
    jobs_relink(a, rows, count);
    slots_free_none(&a->job_slots);
    for (uint32_t row = a->job_slots.capacity; row-- > 0;)
        if (job_state(job_at(a, row)) == PG_JOB_FREE)
            slots_give(&a->job_slots, row);
    return true;
}

int64_t jobs_earliest_ns(const struct pg_arena *a)
{
    int64_t earliest_ns = INT64_MAX;
    for (uint32_t row = 0; row < a->job_slots.capacity; row++) {
        const struct pg_job *j = job_at(a, row);
        const int64_t at_ns = job_state(j) == PG_JOB_FREE ? INT64_MAX : placed_at_ns(a, j);
        earliest_ns = at_ns < earliest_ns ? at_ns : earliest_ns;
    }
    return earliest_ns;
}

void jobs_place(struct pg_arena *a)
{
    for (uint32_t row = 0; row < a->job_slots.capacity; row++) {
        const struct pg_job *j = job_at(a, row);
        slot_mark(job_hot(a, row), job_state(j) == PG_JOB_FREE ? PG_S_FREE : PG_S_PARKED);
        if (job_state(j) != PG_JOB_FREE)
            job_place_again(a, row);
    }
}

void jobs_settle(struct pg_arena *a)
{
    for (uint32_t row = 0; row < a->job_slots.capacity && !wal_buffer_full(a); row++)
        if (job_state(job_at(a, row)) == PG_JOB_LEASED &&
            session_find(a, job_at(a, row)->session) == NULL)
            job_release(a, row);
    for (uint32_t group = 0; group < a->group_rows; group++)
        if (group_exists(a, group))
            jobs_drop_dead(a, group, UINT32_MAX);
}

/* ---- check ----------------------------------------------------------------------------------- */

/* Return whether the older neighbour in the list of jobs without an ack leads to the job, and
 * fired before it. */
static bool unacked_sound(const struct pg_arena *a, uint32_t row)
{
    const struct pg_job *j = job_at(a, row);
    if (job_state(j) == PG_JOB_DEAD)
        return true;
    if (j->older == PG_NIL)
        return group_at(a, j->group)->oldest == row;
    return j->older < a->job_slots.capacity && job_at(a, j->older)->newer == row &&
           job_at(a, j->older)->fired_ns <= j->fired_ns;
}

static bool job_check(const struct pg_arena *a, uint32_t row, struct pg_fault *fault)
{
    const struct pg_job *j = job_at(a, row);
    struct probe at;
    if (!job_sound(a, j) || !exists(a, j))
        return fault_set(fault, "jobs", "a job's group, topic, state or key is invalid", row,
                         PG_JOB_STATES, job_state(j));
    if (!index_find_id(&a->job_index, j->hash, row, &at))
        return fault_set(fault, "jobs", "a job that the index does not lead to", row, row, j->hash);
    if (is_placed(a, row) != (placed_at_ns(a, j) != INT64_MAX))
        return fault_set(fault, "jobs", "a job's place in the wheel", row,
                         placed_at_ns(a, j) != INT64_MAX, is_placed(a, row));
    if (!unacked_sound(a, row))
        return fault_set(fault, "jobs", "a job's place among those without an ack", row, j->older,
                         group_at(a, j->group)->oldest);
    const struct pg_entry *e = entry_of(a, j);
    if (e != NULL && (!entry_has_jobs(e) || e->blob != j->blob))
        return fault_set(fault, "jobs", "a job and its notice use different memory", row, e->blob,
                         j->blob);
    return true;
}

/* Return whether the job is the one of its ticket that counts the blob. */
static bool counts_blob(const struct pg_arena *a, uint32_t row)
{
    const struct pg_job *j = job_at(a, row);
    struct probe at;
    uint32_t first = PG_NIL;
    for (uint32_t r = index_first(&a->job_index, j->hash, &at); r != PG_NIL;
         r = index_next(&a->job_index, j->hash, &at))
        if (job_at(a, r)->ticket >> 8 == j->ticket >> 8 && r < first)
            first = r;
    return first == row;
}

bool jobs_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules,
                uint32_t *in_wheel)
{
    uint64_t jobs = 0;
    if (a->group_rows == 0)
        return true;
    for (uint32_t row = 0; row < a->job_slots.capacity; row++) {
        const struct pg_job *j = job_at(a, row);
        if (job_state(j) == PG_JOB_FREE)
            continue;
        if (!job_check(a, row, fault))
            return false;
        jobs++;
        *in_wheel += is_placed(a, row);
        *granules += blob_granules(job_error_len(j)) + (counts_blob(a, row) ? job_granules(j) : 0);
    }
    if (jobs != a->metrics->jobs)
        return fault_set(fault, "jobs", "count of jobs", 0, jobs, a->metrics->jobs);
    return slots_check(&a->job_slots, fault) && index_check(&a->job_index, jobs, fault);
}

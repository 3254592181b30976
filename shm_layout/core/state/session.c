/* session.c - sessions of clients, and the memory of their last replies. */

#include "core/state/session.h"
#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/hash.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/delivery.h"
#include "core/state/inbox.h"
#include "core/state/names.h"
#include "core/state/quotas.h"
#include "core/state/records.h"

static struct pg_session *session_of_nonce(const struct pg_arena *a, const uint8_t nonce[16],
                                           uint32_t uid)
{
    for (uint32_t i = 0; i < a->state.session_rows; i++)
        if (session_at(a, i)->id != 0 && session_at(a, i)->uid == uid &&
            memcmp(session_at(a, i)->nonce, nonce, sizeof session_at(a, i)->nonce) == 0)
            return session_at(a, i);
    return NULL;
}

static struct pg_reply_memory *reply_at(const struct pg_arena *a, uint64_t i)
{
    PG_ASSERT_IN_TESTS(i < (uint64_t)a->secret->sessions * PG_WINDOW, "sessions",
                       "a reply belongs to a session");
    return &a->replies[i];
}

static struct pg_session *most_silent(const struct pg_arena *a)
{
    struct pg_session *oldest = session_at(a, 0);
    for (uint32_t i = 1; i < a->secret->sessions; i++)
        if (session_at(a, i)->used_boot_ns < oldest->used_boot_ns)
            oldest = session_at(a, i);
    return oldest;
}

int64_t sessions_silence_ns(const struct pg_arena *a)
{
    return a->call.real_boot_ns - most_silent(a)->used_boot_ns;
}

static struct pg_session *row_for_new(const struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->secret->sessions; i++)
        if (session_at(a, i)->id == 0)
            return session_at(a, i);
    return NULL;
}

static void rows_count(struct pg_arena *a)
{
    while (a->state.session_rows != 0 && session_at(a, a->state.session_rows - 1)->id == 0)
        a->state.session_rows--;
}

/* ---- replies ------------------------------------------------------------------------------ */

/* Until a batch is completely applied, its reply has space for all keys that the batch may end. */
uint32_t reply_granules(const struct pg_reply_memory *m)
{
    if (m->count == 0 || m->extra_blob == PG_NIL)
        return 0;
    return blob_granules(m->sequence == 0 ? PG_ENDED_KEYS_BYTES : m->extra_bytes);
}

uint32_t answer_granules(const struct pg_reply_memory *m)
{
    return m->answers == PG_NIL ? 0 : m->count;
}

uint64_t answers_used(const struct pg_arena *a) { return blobs_used(&a->answers); }

uint32_t answers_copy(struct pg_arena *to, const struct pg_arena *from, uint32_t answers,
                      uint32_t granules)
{
    return blobs_copy(&to->answers, &from->answers, answers, granules);
}

static void answers_forget(struct pg_arena *a, struct pg_reply_memory *m)
{
    const uint32_t granules = answer_granules(m), answers = m->answers;
    STORE_RELEASE(&m->answers, PG_NIL);
    if (granules != 0)
        blobs_give(&a->answers, answers, granules);
}

static void extra_forget(struct pg_arena *a, struct pg_reply_memory *m)
{
    const uint32_t granules = reply_granules(m), blob = m->extra_blob;
    STORE_RELEASE(&m->extra_blob, PG_NIL);
    if (granules == 0)
        return;
    blobs_give(&a->blobs, blob, granules);
    a->metrics->blob_bytes -= (uint64_t)granules * PG_GRANULE;
}

/* The results are freed first. If a kill follows, the batch has a stored sequence but no results,
 * and is refused when it is sent again. */
void reply_forget(struct pg_arena *a, struct pg_reply_memory *m)
{
    answers_forget(a, m);
    extra_forget(a, m);
    STORE_RELEASE(&m->sequence, 0ull);
    STORE_RELEASE(&m->count, 0u);
}

/* A client sends a batch again within seconds. Sessions that have sent nothing for longer than
 * RECENT_NS need no results. */
#define RECENT_NS 60000000000

static uint32_t session_answers(const struct pg_arena *a, const struct pg_session *s)
{
    uint32_t granules = 0;
    for (uint64_t i = 0; i < PG_WINDOW; i++)
        granules += answer_granules(session_reply(a, s, i));
    return granules;
}

/* Return the session that has sent nothing for longest, among the sessions with results and without
 * a running batch. NULL = each of these sessions sent something within the last minute. */
static struct pg_session *silent_with_answers(const struct pg_arena *a,
                                              const struct pg_session *but)
{
    struct pg_session *found = NULL;
    for (uint32_t i = 0; i < a->state.session_rows; i++) {
        struct pg_session *s = session_at(a, i);
        if (s->id == 0 || s == but || s->current != 0 ||
            a->call.real_boot_ns - s->used_boot_ns < RECENT_NS ||
            (found != NULL && s->used_boot_ns >= found->used_boot_ns) || session_answers(a, s) == 0)
            continue;
        found = s;
    }
    return found;
}

static uint32_t answers_take(struct pg_arena *a, const struct pg_session *s, uint32_t count)
{
    uint32_t answers;
    while ((answers = blobs_take(&a->answers, count)) == PG_NIL) {
        const struct pg_session *silent = silent_with_answers(a, s);
        if (silent == NULL)
            return PG_NIL;
        for (uint64_t i = 0; i < PG_WINDOW; i++)
            answers_forget(a, session_reply(a, silent, i));
    }
    return answers;
}

bool reply_begin(struct pg_arena *a, const struct pg_session *s, struct pg_reply_memory *m,
                 uint32_t count)
{
    const uint32_t answers = count == 0 ? PG_NIL : answers_take(a, s, count);
    if (answers == PG_NIL && count != 0)
        return false;
    STORE_RELEASE(&m->count, count);
    STORE_RELEASE(&m->answers, answers);
    if (count != 0)
        memset(reply_results(a, m), 0, count * sizeof(struct pg_result));
    return true;
}

static void replies_forget(struct pg_arena *a, const struct pg_session *s)
{
    for (uint64_t i = 0; i < PG_WINDOW; i++)
        reply_forget(a, session_reply(a, s, i));
}

struct pg_session *session_open(struct pg_arena *a, const uint8_t nonce[16], uint32_t uid,
                                uint32_t pid, int64_t grace_ns, struct name worker,
                                struct pg_result *why)
{
    struct pg_session *s = session_of_nonce(a, nonce, uid);
    *why = (struct pg_result){0, 0};
    if (s != NULL) {              /* the client may be another process than before */
        s->pid = pid;
        s->grace_ns = grace_ns;
        return s;
    }
    if (!share_admits(a, PG_Q_UID_SESSIONS, a->secret->sessions, sessions_of(a, uid), why))
        return NULL;
    s = row_for_new(a);
    if (s == NULL)
        return NULL;
    PG_ASSERT_IN_TESTS(session_answers(a, s) == 0, "sessions", "a taken row has no results");
    const uint64_t serial = a->secret->next_session++;
    const uint64_t random = keyed_hash(a->secret->secret, serial, nonce, 16);
    memset(s, 0, sizeof *s);
    memcpy(s->nonce, nonce, sizeof s->nonce);
    s->uid = uid;
    s->pid = pid;
    s->worker_len = (uint8_t)(worker.len <= PG_WORKER_MAX ? worker.len : PG_WORKER_MAX);
    memcpy(s->worker, worker.bytes, s->worker_len);
    s->grace_ns = grace_ns;
    s->opened_boot_ns = s->used_boot_ns = a->call.real_boot_ns;
    s->inbox_head = s->inbox_tail = s->inbox_next = PG_NIL;
    /* Bit 63 is set, so that an id is never 0. */
    const uint64_t id = (random & ~0xffffull) | 1ull << 63 | (uint64_t)(s - a->sessions);
    if (has_wal(a) && !wal_buffer_full(a))   /* the record is optional: recovery does not need it */
        wal_append_opened(a, s, id, worker);
    STORE_RELEASE(&s->id, id);
    if (s - a->sessions >= a->state.session_rows)
        a->state.session_rows = (uint32_t)(s - a->sessions) + 1;
    account_session_opened(a, uid);
    return s;
}

bool session_may_end(const struct pg_arena *a)
{
    return !wal_buffer_full(a) || wal_stopped(a);
}

/* The session has ended when its id is cleared. If a kill follows, a rebuild frees its inbox and
 * replies. `failed`: its leases count as failed attempts, because it did not end by a BYE. */
void session_end(struct pg_arena *a, struct pg_session *s, bool failed)
{
    if (has_wal(a) && !wal_buffer_full(a))
        wal_append_session(a, s);
    const uint64_t session = s->id;
    STORE_RELEASE(&s->id, 0ull);
    account_session_ended(a, s);
    inbox_drop(a, s);
    members_leave(a, session, failed);
    replies_forget(a, s);
    rows_count(a);
}

int64_t pg_session_grace_ns(const struct pg_arena *a, uint64_t session)
{
    const struct pg_session *s = session_find(a, session);
    return s == NULL ? -1 : s->grace_ns;
}

int pg_session_end(struct pg_arena *a, uint64_t session, int64_t real_boot_ns)
{
    struct pg_session *s = session_find(a, session);
    if (s == NULL)
        return 1;
    if (!session_may_end(a))
        return 0;
    time_set(a, a->state.now_ns, real_boot_ns);
    session_end(a, s, true);
    wal_buffer_settle(a);
    return 1;
}

uint32_t pg_sessions(const struct pg_arena *a, uint32_t uid, struct pg_session_info *out,
                     uint32_t out_count)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->state.session_rows && count < out_count; i++) {
        const struct pg_session *s = session_at(a, i);
        if (s->id == 0 || (uid != PG_NIL && s->uid != uid))
            continue;
        out[count++] = (struct pg_session_info){
            .session = s->id, .opened_boot_ns = s->opened_boot_ns,
            .used_boot_ns = s->used_boot_ns, .grace_ns = s->grace_ns, .uid = s->uid,
            .pid = s->pid, .operations = s->owned, .unacknowledged = s->inbox_count};
    }
    return count;
}

struct pg_reply_memory *session_reply(const struct pg_arena *a, const struct pg_session *s,
                                      uint64_t sequence)
{
    return reply_at(a, (uint64_t)(s - a->sessions) * PG_WINDOW + sequence % PG_WINDOW);
}

static bool intent_sound(const struct pg_arena *a, const struct pg_session *s)
{
    const struct pg_reply_memory *m = session_reply(a, s, s->current);
    return s->intent[3] < a->watermark_rows &&
           (s->intent[2] != PG_OP_CANCEL_FOR_KEY ||
            (s->intent[1] <= PG_ENDED_KEYS_BYTES && m->extra_blob != PG_NIL));
}

static bool session_sound(const struct pg_arena *a, uint32_t i, struct pg_fault *fault)
{
    const struct pg_session *s = session_at(a, i);
    if (row_of_session(s->id) != i)
        return fault_set(fault, "sessions", "the session's id belongs to another row", i, i,
                         row_of_session(s->id));
    if (s->current != 0 && s->current != s->last + 1)
        return fault_set(fault, "sessions", "the numbers of batches are out of order", i,
                         s->last + 1, s->current);
    if (s->current != 0 && (s->applied > s->count || s->count > PG_BATCH_RECORDS))
        return fault_set(fault, "sessions", "more items are applied than the batch has", i,
                         s->count, s->applied);
    if (s->current != 0 && s->count != answer_granules(session_reply(a, s, s->current)))
        return fault_set(fault, "sessions", "results of the current batch", i, s->count,
                         answer_granules(session_reply(a, s, s->current)));
    if (s->last != 0 && session_reply(a, s, s->last)->sequence != s->last)
        return fault_set(fault, "sessions", "the reply to the last batch is missing", i, s->last,
                         session_reply(a, s, s->last)->sequence);
    return !on_watch_key(s) || intent_sound(a, s) ||
           fault_set(fault, "sessions", "an intent refers to a row that does not exist", i,
                     a->watermark_rows, s->intent[3]);
}

/* Repeat the steps that follow the last store of a batch, or the store that ends a session. */
static void session_settle(struct pg_arena *a, struct pg_session *s)
{
    if (s->current <= s->last)
        s->current = 0;
    for (uint32_t i = 0; s->id == 0 && i < PG_WINDOW; i++) {
        struct pg_reply_memory *m = session_reply(a, s, i);
        m->count = 0;
        m->answers = m->extra_blob = PG_NIL;
    }
}

/* Mark the results and the ended keys of a reply as in use. */
static bool reply_rebuild(struct pg_arena *a, uint32_t i, struct pg_fault *why)
{
    const struct pg_reply_memory *m = reply_at(a, i);
    if (answer_granules(m) != 0 &&
        !blobs_rebuild_mark(&a->answers, m->answers, answer_granules(m)))
        return fault_set(why, "sessions",
                         "a reply's results overlap others or lie outside the pool",
                         i, a->answers.granules, m->answers);
    return reply_granules(m) == 0 ||
           blobs_rebuild_mark(&a->blobs, m->extra_blob, reply_granules(m)) ||
           fault_set(why, "sessions", "a reply's keys overlap others or lie outside the pool", i, 0,
                     m->extra_blob);
}

void sessions_init(struct pg_arena *a)
{
    blobs_init(&a->answers);
    a->state.session_rows = 0;
}

bool sessions_rebuild(struct pg_arena *a, struct pg_fault *why)
{
    for (uint32_t i = 0; i < a->secret->sessions; i++) {
        session_settle(a, session_at(a, i));
        session_at(a, i)->owned = 0;
        if (session_at(a, i)->id != 0 && !session_sound(a, i, why))
            return false;
    }
    a->state.session_rows = a->secret->sessions;
    rows_count(a);
    quotas_rebuild_sessions(a);
    blobs_rebuild_begin(&a->answers);
    for (uint32_t i = 0; i < a->state.session_rows * PG_WINDOW; i++)
        if (!reply_rebuild(a, i, why))
            return false;
    blobs_rebuild_end(&a->answers);
    return true;
}

struct pg_result *session_trigger(const struct pg_arena *a, uint32_t row)
{
    for (uint32_t i = 0; i < a->state.session_rows; i++) {
        const struct pg_session *s = session_at(a, i);
        if (record_under_way(s) && on_watch_key(s) && s->intent[3] == row &&
            s->intent[2] >= PG_OP_ADVANCE_KEY && s->intent[2] <= PG_OP_CLEAR)
            return &reply_results(a, session_reply(a, s, s->current))[s->applied];
    }
    return NULL;
}

bool sessions_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules)
{
    uint64_t answers = 0;
    for (uint32_t i = 0; i < a->secret->sessions * PG_WINDOW; i++) {
        if (session_at(a, i / PG_WINDOW)->id == 0)
            continue;
        *granules += reply_granules(reply_at(a, i));
        answers += answer_granules(reply_at(a, i));
    }
    for (uint32_t i = 0; i < a->secret->sessions; i++) {
        if (session_at(a, i)->id != 0 && !session_sound(a, i, fault))
            return false;
        if (session_at(a, i)->id != 0 && i >= a->state.session_rows)
            return fault_set(fault, "sessions", "a session is in a row after the last used row", i,
                             a->state.session_rows, i);
    }
    return blobs_check(&a->answers, answers, fault);
}

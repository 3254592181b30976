/* session.h - sessions of clients, and the memory of their last replies. */
#ifndef PURGATORYD_STATE_SESSION_H
#define PURGATORYD_STATE_SESSION_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/names.h"
#include "core/state/rows.h"

/* Find the session of a nonce, or open a session. NULL: if the uid already holds its share of
 * sessions, *why contains the answer; if all rows are in use, why->ticket is 0. */
struct pg_session *session_open(struct pg_arena *a, const uint8_t nonce[16], uint32_t uid,
                                uint32_t pid, int64_t grace_ns, struct name worker,
                                struct pg_result *why);
/* Return the time in ns since the last message of the session that has sent nothing for longest. */
int64_t sessions_silence_ns(const struct pg_arena *a);
/* Return whether a session may end now: there is space for its WAL record, or the WAL has stopped
 * and receives no record. */
bool session_may_end(const struct pg_arena *a);
/* End a session and free its inbox and replies. Its armed operations stay armed. */
void session_end(struct pg_arena *a, struct pg_session *s, bool failed);
/* Return the reply memory for a batch sequence. */
struct pg_reply_memory *session_reply(const struct pg_arena *a, const struct pg_session *s,
                                      uint64_t sequence);
/* Return whether the record was refused because of its name. Such records are answered before the
 * first record of the batch is applied. Otherwise an operation that ends within the batch could
 * make space for the name, and if the batch then continued after a kill, its remaining records
 * would get the name. */
static inline bool name_refused(const struct pg_result *r)
{
    const unsigned quota = r->ticket >> 8 & 0xff;
    if (UNLIKELY((r->ticket & 0xff) == PG_ST_QUOTA))
        return quota == PG_Q_UID_TOPICS || quota == PG_Q_UID_NAMESPACES;
    return r->ticket == PG_ST_FULL_TOPICS || r->ticket == PG_ST_FULL_NAMESPACES ||
           r->ticket == PG_ST_BUSY || r->ticket == PG_ST_WAL;
}
#define PG_ENDED_KEYS_BYTES 16384 /* space for the keys that one batch ends with CANCEL_FOR_KEY */
/* Return the number of granules that the reply's ended keys use. */
uint32_t reply_granules(const struct pg_reply_memory *m);
/* Return the number of granules in the answer pool that the reply's results use. */
uint32_t answer_granules(const struct pg_reply_memory *m);
/* Return the results of a reply; NULL = the reply has none. */
static inline struct pg_result *reply_results(const struct pg_arena *a,
                                              const struct pg_reply_memory *m)
{
    return m->answers == PG_NIL ? NULL : (struct pg_result *)blob_at(&a->answers, m->answers);
}
/* Free the results and the ended keys of a reply, before another batch uses the reply. */
void reply_forget(struct pg_arena *a, struct pg_reply_memory *m);
/* Copy results into the answer pool of another arena. Return PG_NIL if that pool has no space. */
uint32_t answers_copy(struct pg_arena *to, const struct pg_arena *from, uint32_t answers,
                      uint32_t granules);
uint64_t answers_used(const struct pg_arena *a);    /* number of used granules in the answer pool */
/* Prepare an empty reply with `count` results, all 0. If the pool has no space, sessions that sent
 * nothing for a minute lose their results. If all other sessions sent something within the last
 * minute, change nothing and return false. */
bool reply_begin(struct pg_arena *a, const struct pg_session *s, struct pg_reply_memory *m,
                 uint32_t count);
void sessions_init(struct pg_arena *a);
/* Check the rows of sessions, reset their counts, and mark the memory of their replies as used. */
bool sessions_rebuild(struct pg_arena *a, struct pg_fault *why);
/* Return whether the current record is a record on a watch key, which `intent` describes. */
static inline bool on_watch_key(const struct pg_session *s)
{
    return s->current != 0 && s->intent[0] == s->applied + 1ull && s->intent[2] < PG_OP_JOIN &&
           s->intent[2] != PG_OP_CANCEL;
}
/* Return whether the current record cancels jobs, and `intent` describes the first of them. */
static inline bool on_cancel(const struct pg_session *s)
{
    return s->current != 0 && s->intent[0] == s->applied + 1ull && s->intent[2] == PG_OP_CANCEL;
}
/* Return whether the current record answers a job, which `intent` describes. */
static inline bool on_job(const struct pg_session *s)
{
    return s->current != 0 && s->intent[0] == s->applied + 1ull && s->intent[2] > PG_OP_JOIN;
}

/* Return whether a batch of the session has records that are not applied yet. */
static inline bool record_under_way(const struct pg_session *s)
{
    return s->id != 0 && s->current != 0 && s->applied < s->count;
}
/* Return the answer of an interrupted record that ends operations on the watch key in a row; NULL =
 * none. */
struct pg_result *session_trigger(const struct pg_arena *a, uint32_t row);
/* Check sessions and replies. Add the number of granules of ended keys to *granules. */
bool sessions_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

#endif

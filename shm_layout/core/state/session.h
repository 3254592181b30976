/* session.h - clients' sessions and the memory of their last replies. */
#ifndef PURGATORYD_STATE_SESSION_H
#define PURGATORYD_STATE_SESSION_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/names.h"

static inline uint32_t row_of_session(uint64_t id) { return (uint32_t)(id & 0xffff); }
static inline struct pg_session *session_find(const struct pg_arena *a, uint64_t id)
{
    if (id == 0 || row_of_session(id) >= a->secret->sessions)
        return NULL;
    struct pg_session *s = session_at(a, row_of_session(id));
    return s->id == id ? s : NULL;
}
/* Find the session of a nonce, or open one. NULL: the uid holds its share of sessions and *why is
 * the answer, or all rows are in use and why->ticket is 0. */
struct pg_session *session_open(struct pg_arena *a, const uint8_t nonce[16], uint32_t uid,
                                uint32_t pid, int64_t grace_ns, struct name worker,
                                struct pg_result *why);
/* Return how long the most silent session has been silent, ns. */
int64_t sessions_silence_ns(const struct pg_arena *a);
/* Return whether the WAL record of a session's end can be written. A stopped WAL gets none. */
bool session_may_end(const struct pg_arena *a);
/* End a session and free its inbox and replies. Its armed operations stay armed. */
void session_end(struct pg_arena *a, struct pg_session *s);
/* Return the reply memory for a batch sequence. */
struct pg_reply_memory *session_reply(const struct pg_arena *a, const struct pg_session *s,
                                      uint64_t sequence);
/* Return whether the record was refused because of its name. Such records are answered before the
 * batch's first record is applied: an end within the batch may make space for the name, and after a
 * kill the rest of the batch would get it. */
static inline bool name_refused(const struct pg_result *r)
{
    const unsigned quota = r->ticket >> 8 & 0xff;
    if (UNLIKELY((r->ticket & 0xff) == PG_ST_QUOTA))
        return quota == PG_Q_UID_TOPICS || quota == PG_Q_UID_NAMESPACES;
    return r->ticket == PG_ST_FULL_TOPICS || r->ticket == PG_ST_FULL_NAMESPACES ||
           r->ticket == PG_ST_BUSY || r->ticket == PG_ST_WAL;
}
#define PG_ENDED_KEYS_BYTES 16384 /* space for the keys that CANCEL_FOR_KEY ends in one batch */
/* Return the granules that the reply's ended keys use. */
uint32_t reply_granules(const struct pg_reply_memory *m);
/* Return the granules of the answer pool that the reply's results use. */
uint32_t answer_granules(const struct pg_reply_memory *m);
/* Return the reply's results; NULL = it has none. */
static inline struct pg_result *reply_results(const struct pg_arena *a,
                                              const struct pg_reply_memory *m)
{
    return m->answers == PG_NIL ? NULL : (struct pg_result *)blob_at(&a->answers, m->answers);
}
/* Free what a reply remembers, before another batch uses it. */
void reply_forget(struct pg_arena *a, struct pg_reply_memory *m);
/* Copy results into the answer pool of another arena; PG_NIL = it has no space. */
uint32_t answers_copy(struct pg_arena *to, const struct pg_arena *from, uint32_t answers,
                      uint32_t granules);
uint64_t answers_used(const struct pg_arena *a);         /* granules of the answer pool in use */
/* Prepare an empty reply with `count` results, all 0. If the pool has no space, sessions that sent
 * nothing for a minute lose their results. Returns false, with nothing changed, if all others are
 * recent. */
bool reply_begin(struct pg_arena *a, const struct pg_session *s, struct pg_reply_memory *m,
                 uint32_t count);
void sessions_init(struct pg_arena *a);
/* Check session rows, reset their counts, and mark the memory of their replies as in use. */
bool sessions_rebuild(struct pg_arena *a, struct pg_fault *why);
/* Return whether the record under way is one on a watch key, which the intent describes. */
static inline bool on_watch_key(const struct pg_session *s)
{
    return s->current != 0 && s->intent[0] == s->applied + 1ull;
}

/* Return whether a batch of the session is not completely applied. */
static inline bool record_under_way(const struct pg_session *s)
{
    return s->id != 0 && s->current != 0 && s->applied < s->count;
}
/* Return the answer of an interrupted record that ends operations on a watch key; NULL = none. */
struct pg_result *session_trigger(const struct pg_arena *a, uint32_t row);
/* Check sessions and replies. Adds the granules of ended keys to *granules. */
bool sessions_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

#endif

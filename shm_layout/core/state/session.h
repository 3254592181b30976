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
/* The session of a nonce, opened if need be; NULL: the uid holds its share of them and *why says
 * so, or all rows are in use and why->ticket is 0. */
struct pg_session *session_open(struct pg_arena *a, const uint8_t nonce[16], uint32_t uid,
                                uint32_t pid, int64_t grace_ns, struct name worker,
                                struct pg_result *why);
/* How long the most silent session has been silent. */
int64_t sessions_silence_ns(const struct pg_arena *a);
/* Whether the record that it owes can be written; with the WAL stopped it owes none. */
bool session_may_end(const struct pg_arena *a);
void session_end(struct pg_arena *a, struct pg_session *s);
struct pg_reply_memory *session_reply(const struct pg_arena *a, const struct pg_session *s,
                                      uint64_t sequence);
/* A record that has no name is answered before the batch's first one is applied: what the batch
 * itself ends may make space for the name, and after a kill it would be there for the rest. */
static inline bool name_refused(const struct pg_result *r)
{
    const unsigned quota = r->ticket >> 8 & 0xff;
    if (UNLIKELY((r->ticket & 0xff) == PG_ST_QUOTA))
        return quota == PG_Q_UID_TOPICS || quota == PG_Q_UID_NAMESPACES;
    return r->ticket == PG_ST_FULL_TOPICS || r->ticket == PG_ST_FULL_NAMESPACES ||
           r->ticket == PG_ST_BUSY || r->ticket == PG_ST_WAL;
}
#define PG_ENDED_KEYS_BYTES 16384 /* of the keys that CANCEL_FOR_KEY ends in one batch */
/* What its ended keys hold now. */
uint32_t reply_granules(const struct pg_reply_memory *m);
/* Granules of the answer pool that its results hold now. */
uint32_t answer_granules(const struct pg_reply_memory *m);
/* Its results; NULL: it holds none. */
static inline struct pg_result *reply_results(const struct pg_arena *a,
                                              const struct pg_reply_memory *m)
{
    return m->answers == PG_NIL ? NULL : (struct pg_result *)blob_at(&a->answers, m->answers);
}
/* Frees what a reply remembers, before its memory serves another batch. */
void reply_forget(struct pg_arena *a, struct pg_reply_memory *m);
/* Copies results into the answer pool of another arena; PG_NIL: it has no space. */
uint32_t answers_copy(struct pg_arena *to, const struct pg_arena *from, uint32_t answers,
                      uint32_t granules);
uint64_t answers_used(const struct pg_arena *a);         /* granules of the answer pool */
/* Prepares an empty reply for `count` results, all 0. If the pool has no space, sessions that sent
 * nothing for a minute lose their results. False: all others are recent, and nothing changed. */
bool reply_begin(struct pg_arena *a, const struct pg_session *s, struct pg_reply_memory *m,
                 uint32_t count);
void sessions_init(struct pg_arena *a);
bool sessions_rebuild(struct pg_arena *a, struct pg_fault *why);
/* Of each record under way: its answer holds, or it is applied when it is sent again. */
/* The record under way is one on a watch key, whose intent it is. */
static inline bool on_watch_key(const struct pg_session *s)
{
    return s->current != 0 && s->intent[0] == s->applied + 1ull;
}

/* A batch of it was not applied to its end. */
static inline bool record_under_way(const struct pg_session *s)
{
    return s->id != 0 && s->current != 0 && s->applied < s->count;
}
/* The answer of a record under way that ends operations on a watch key; NULL = none. */
struct pg_result *session_trigger(const struct pg_arena *a, uint32_t row);
bool sessions_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

#endif

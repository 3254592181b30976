/* ring_replies.c - put replies into rings, durable replies once their frames are on disk, and send
 * replies through the ROUTER socket.
 *
 * LSNs of pending replies never decrease, because a reply waits for the newest frame. The caller
 * keeps replies for which there is no space here. While it keeps one, it gets all later durable
 * replies, so that they leave in the order of their LSNs. */

#include "core/base/common.h"
#include "core/arena.h"
#include "core/front/consumers.h"
#include "core/front/ring_replies.h"
#include "core/ring/ring.h"
#include "core/ring/router.h"
#include "core/wal/wal_buffer.h"
#include "core/state/delivery.h"
#include "core/state/members.h"

void ring_client_wake(const struct pg_ring_server *s, uint32_t how, uint32_t *word, int socket)
{
    if (LIKELY(how == PG_RING_AWAKE))
        return;
    if (s->calls != NULL)
        s->calls->wake(s->calls->context, how, word, socket);
    else
        pg_ring_wake(how, word, socket);
}

/* ---- REPLIED records ------------------------------------------------------------------------- */

/* Note an answer for its REPLIED record. False = it does not follow the answers that are noted. */
static bool answer_follows(const struct pg_ring_client *c, const struct pg_frame *f)
{
    return c->answers == 0 || (f->session == c->answered_session &&
                               f->sequence == c->first_answer + c->answers);
}

static void answer_note(struct pg_ring_server *s, struct pg_ring_client *c,
                        const struct pg_frame *f, int64_t built_boot_ns)
{
    if (c->answers == 0) {
        c->answered_session = f->session;
        c->first_answer = f->sequence;
        c->built_boot_ns = built_boot_ns;
        c->next_answered = s->answered;
        s->answered = c;
    }
    c->answers++;
    c->handed_boot_ns = s->handed_boot_ns;
}

void pg_rings_replied(struct pg_arena *a, struct pg_ring_server *s)
{
    struct pg_ring_client *c;
    while ((c = s->answered) != NULL && !wal_buffer_full(a)) {
        s->answered = c->next_answered;
        pg_replied(a, c->answered_session, c->first_answer, c->answers, c->built_boot_ns,
                   c->handed_boot_ns);
        c->answers = 0;
    }
}

/* ---- replies that may be sent ---------------------------------------------------------------- */

static bool reply_is_large(const struct pg_ring_server *s, const struct pg_ring_client *c)
{
    return c->putter != NULL ? is_large(c->putter, s->reply_bytes)
                             : s->reply_bytes > s->router->reply_max;
}

/* Return whether the ring, or the socket, took the reply. */
static bool reply_taken(const struct pg_ring_server *s, const struct pg_ring_client *c,
                        const void *reply, uint64_t bytes)
{
    if (c->putter == NULL)
        return router_send(s->router, c, reply, bytes);
    if (!pg_ring_put(c->putter, reply, bytes))
        return false;
    ring_client_wake(s, pg_ring_rouse_taker(c->putter), &c->putter->words->taker_sleeps, c->socket);
    return true;
}

/* Put or send a reply that was complete at `built_boot_ns`. False = the caller has to send it. */
static bool reply_put(struct pg_arena *a, struct pg_ring_server *s, struct pg_ring_client *c,
                      const void *reply, uint64_t bytes, int64_t built_boot_ns)
{
    struct pg_frame f;
    memcpy(&f, reply, sizeof f);
    const bool noted = has_wal(a) && f.message == PG_M_BATCH;
    if (noted && !answer_follows(c, &f))
        return false;
    const int64_t begun_boot_ns = loop_boot_ns(s->calls);
    if (!reply_taken(s, c, reply, bytes))
        return false;
    s->handed_boot_ns = loop_boot_ns(s->calls);
    pg_measure(a, PG_HG_RESPONSE_QUEUE, begun_boot_ns - built_boot_ns);
    pg_measure(a, PG_HG_SEND, s->handed_boot_ns - begun_boot_ns);
    if (noted)
        answer_note(s, c, &f, built_boot_ns);
    return true;
}

/* ---- pending replies -------------------------------------------------------------------------- */

enum { UNIT = sizeof(struct pg_pending_reply) };  /* positions are multiples of this */

static struct pg_pending_reply *pending_at(const struct pg_pending_replies *h, uint64_t position)
{
    return (void *)(h->memory + (position & (h->size - 1)));
}

/* Return the bytes that a reply of `bytes` takes. */
static uint64_t pending_whole(uint64_t bytes)
{
    return UNIT + (bytes + UNIT - 1) / UNIT * UNIT;
}

struct pg_pending_reply *pg_pending_oldest(struct pg_pending_replies *h)
{
    struct pg_pending_reply *r;
    for (; h->head != h->tail; h->head += pending_whole(r->bytes)) {
        r = pending_at(h, h->head);
        if (r->lsn != 0)
            return r;
    }
    h->head = h->tail = 0;        /* the next replies reuse the same memory */
    return NULL;
}

void pg_pending_drop(struct pg_pending_replies *h)
{
    struct pg_pending_reply *r = pg_pending_oldest(h);
    if (r == NULL)
        return;
    r->client->pending--;
    h->count--;
    h->head += pending_whole(r->bytes);
}

/* Keep a reply that waits for frame `lsn`. No reply wraps around: padding fills the rest of the
 * memory. False = there is no space. */
static bool pending_add(struct pg_ring_server *s, struct pg_ring_client *c, uint64_t lsn)
{
    struct pg_pending_replies *h = &s->pending;
    const uint64_t whole = pending_whole(s->reply_bytes);
    const uint64_t to_end = h->size != 0 ? h->size - (h->tail & (h->size - 1)) : 0;
    const uint64_t padding = whole > to_end ? to_end : 0;
    if (padding + whole > h->size - (h->tail - h->head))
        return false;
    if (padding != 0)
        *pending_at(h, h->tail) = (struct pg_pending_reply){.bytes = padding - UNIT};
    h->tail += padding;
    struct pg_pending_reply *r = pending_at(h, h->tail);
    *r = (struct pg_pending_reply){lsn, c, s->built_boot_ns, s->reply_bytes};
    memcpy(r + 1, s->reply, s->reply_bytes);
    h->tail += whole;
    h->count++;
    h->newest_lsn = lsn;
    c->pending++;
    return true;
}

/* Return whether a reply may be sent at once. It must not overtake pending replies that wait for the
 * same frame. */
static bool on_disk(const struct pg_arena *a, const struct pg_ring_server *s,
                    const struct pg_ring_client *c, uint64_t lsn)
{
    return lsn == 0 || (c->pending == 0 && s->commits != NULL &&
                        lsn <= pg_confirmed_lsn(a, s->commits));
}

bool ring_reply(struct pg_arena *a, struct pg_ring_server *s, struct pg_ring_client *c)
{
    struct pg_frame f;
    const uint64_t lsn = pg_durable_lsn(a);
    memcpy(&f, s->reply, sizeof f);
    if (f.error != PG_ERR_NONE || reply_is_large(s, c) ||
        (lsn != 0 && s->callers_pending != 0))
        return false;
    if (on_disk(a, s, c, lsn))
        return reply_put(a, s, c, s->reply, s->reply_bytes, s->built_boot_ns);
    return c->putter != NULL && pending_add(s, c, lsn);
}

static bool release(struct pg_arena *a, struct pg_ring_server *s, struct pg_pending_reply *r)
{
    struct pg_ring_client *c = r->client;
    if (c->gone)
        return true;
    return !c->replies && reply_put(a, s, c, r + 1, r->bytes, r->built_boot_ns);
}

int pg_pending_release(struct pg_arena *a, struct pg_ring_server *s)
{
    struct pg_pending_reply *r;
    if (s->pending.count == 0 || s->commits == NULL)
        return false;
    const uint64_t lsn = pg_confirmed_lsn(a, s->commits);
    while ((r = pg_pending_oldest(&s->pending)) != NULL && r->lsn <= lsn) {
        if (!release(a, s, r))
            return true;
        pg_pending_drop(&s->pending);
    }
    return false;
}

/* ---- leased jobs ------------------------------------------------------------------------------ */

/* Return the client that owns a session, if its rings are awake. */
static struct pg_ring_client *client_awake(const struct pg_ring_server *s, uint64_t session)
{
    struct pg_ring_client *c = s->last;
    for (uint32_t i = 0; i < s->awake; i++, c = c->next)
        if (c->session == session)
            return c;
    return NULL;
}

/* Put as many unsent jobs of a member as one message takes. False = the caller has to send them. */
static bool jobs_put(struct pg_arena *a, struct pg_ring_server *s, uint32_t member)
{
    uint64_t session = member_at(a, member)->session;
    struct pg_ring_client *c = client_awake(s, session);
    if (c == NULL || c->gone || c->replies)
        return false;
    const uint64_t most = (c->putter->size - RING_WORD) / PG_RING_UNIT * PG_RING_UNIT;
    const uint64_t bytes = pg_jobs(a, &session, s->reply, least(most, PG_MESSAGE_MAX));
    if (bytes > sizeof(struct pg_frame) && reply_taken(s, c, s->reply, bytes))
        return true;
    consumers_jobs_again(a);      /* there is no space, or the first job is too large for the ring */
    return false;
}

void ring_jobs(struct pg_arena *a, struct pg_ring_server *s)
{
    uint64_t session;
    while (a->state.jobs_unsent && session_evicted(a) == NULL) {
        const uint32_t member = member_unsent(a);
        if (member == PG_NIL)
            pg_jobs(a, &session, s->reply, PG_MESSAGE_MAX);   /* notes that there are none */
        else if (!jobs_put(a, s, member))
            return;
    }
}

/* ---- clients that have ended ----------------------------------------------------------------- */

/* Make the pending replies of a client padding. */
static void pending_forget(struct pg_pending_replies *h, const struct pg_ring_client *c)
{
    struct pg_pending_reply *r;
    for (uint64_t at = h->head; at != h->tail; at += pending_whole(r->bytes)) {
        r = pending_at(h, at);
        if (r->lsn == 0 || r->client != c)
            continue;
        r->lsn = 0;
        h->count--;
    }
    pg_pending_oldest(h);         /* frees the memory if no other reply is left */
}

void ring_replies_forget(struct pg_ring_server *s, struct pg_ring_client *c)
{
    struct pg_ring_client **link = &s->answered;
    while (*link != NULL && *link != c)
        link = &(*link)->next_answered;
    if (*link != NULL)
        *link = c->next_answered;
    if (c->pending != 0)
        pending_forget(&s->pending, c);
    c->pending = 0;
}

/* ring_server.c - apply the messages of clients without the caller, as long as they are plain.
 *
 * Messages come from rings, and from the ROUTER socket. Each message of a ring is copied before
 * anything in it is read, because the client may change the ring's bytes at any time. */

#include "core/base/common.h"
#include "core/arena.h"
#include "core/front/ring_replies.h"
#include "core/ring/ring.h"
#include "core/ring/router.h"

/* ---- the rings that are awake --------------------------------------------------------------- */

void pg_rings_rouse(struct pg_ring_server *s, struct pg_ring_client *c)
{
    if (c->awake)
        return;
    c->awake = true;
    c->next = s->last != NULL ? s->last->next : c;
    if (s->last != NULL)
        s->last->next = c;
    s->last = c;
    s->awake++;
    s->unseen++;
}

/* Remove the client after `before` from the circle. */
static void circle_remove(struct pg_ring_server *s, struct pg_ring_client *before)
{
    struct pg_ring_client *c = before->next;
    before->next = c->next;
    if (s->last == c)
        s->last = before == c ? NULL : before;
    c->awake = false;
    s->awake--;
    s->unseen = s->unseen < s->awake ? s->unseen : s->awake;
}

void pg_rings_remove(struct pg_ring_server *s, struct pg_ring_client *c)
{
    ring_replies_forget(s, c);
    if (!c->awake)
        return;
    struct pg_ring_client *before = s->last;
    while (before->next != c)
        before = before->next;
    circle_remove(s, before);
}

int pg_rings_ready(struct pg_ring_server *s)
{
    struct pg_ring_client *c = s->last;
    if (s->router != NULL && !s->router->quiet)
        return true;
    for (uint32_t i = 0; i < s->awake; i++, c = c->next)
        if (c->gone || c->taker->broken || pg_ring_next(c->taker) != 0)
            return true;
    return false;
}

int pg_rings_sleep(struct pg_ring_server *s)
{
    if (s->router != NULL && !s->router->quiet)
        return false;
    while (s->last != NULL) {
        struct pg_ring_client *c = s->last->next;
        if (c->gone || !pg_ring_sleep_taker(c->taker, PG_RING_POLL) ||
            (c->replies && !pg_ring_sleep_putter(c->putter, PG_RING_POLL)))
            return false;
        circle_remove(s, s->last);
    }
    return true;
}

/* ---- messages ------------------------------------------------------------------------------- */

/* Return whether a message belongs to the client's own session, and neither begins nor ends it. */
static bool plain(const struct pg_ring_server *s, const struct pg_ring_client *c)
{
    struct pg_frame f;
    if (c->session == 0 || s->message_bytes < sizeof f)
        return false;
    memcpy(&f, s->body, sizeof f);
    return f.session == c->session && (f.message == PG_M_BATCH || f.message == PG_M_QUERY ||
                                       f.message == PG_M_ACK || f.message == PG_M_PING);
}

/* Apply the message that was taken, and put or send its reply. */
static uint32_t apply(struct pg_arena *a, struct pg_ring_server *s,
                      struct pg_time_shares *shares, struct pg_ring_client *c)
{
    int64_t wait_ns;
    const int64_t begun_boot_ns = s->received_boot_ns;
    const int how = pg_handle(a, s->body, s->message_bytes, c->share->uid, c->pid,
                              begun_boot_ns, begun_boot_ns, s->reply, &s->reply_bytes, &wait_ns);
    if (how == PG_H_WAIT)
        return PG_RE_MESSAGE;     /* nothing has changed yet */
    s->built_boot_ns = s->handed_boot_ns = loop_boot_ns(s->calls);
    pg_served(a, s->built_boot_ns);
    const bool done = how == PG_H_SILENT || (how == PG_H_REPLY && ring_reply(a, s, c));
    pg_time_share_charge(shares, c->share, begun_boot_ns, s->handed_boot_ns);
    c->spoke = true;
    s->applied++;
    if (done)
        return PG_RE_NONE;
    return how == PG_H_AGAIN ? PG_RE_AGAIN : PG_RE_REPLY;
}

/* Take the next message of a client, and apply it if that is possible. */
static uint32_t visit(struct pg_arena *a, struct pg_ring_server *s,
                      struct pg_time_shares *shares, struct pg_ring_client *c)
{
    if (UNLIKELY(c->gone || c->replies || c->behind))
        return PG_RE_LOOK;
    if (UNLIKELY(c->session != 0 && pg_time_share_used(shares, c->share)))
        return PG_RE_NONE;
    s->message_bytes = pg_ring_next(c->taker);
    if (UNLIKELY(c->taker->broken || is_large(c->taker, s->message_bytes)))
        return PG_RE_LOOK;
    if (s->message_bytes == 0)
        return PG_RE_NONE;
    pg_ring_take(c->taker, s->message);
    s->body = s->message;
    ring_client_wake(s, pg_ring_rouse_putter(c->taker), &c->taker->words->putter_sleeps,
                     c->socket);
    s->received_boot_ns = loop_boot_ns(s->calls);
    s->unseen = s->awake;
    return plain(s, c) ? apply(a, s, shares, c) : PG_RE_MESSAGE;
}

/* Receive the next message of the ROUTER socket, and apply it if that is possible. */
static uint32_t visit_router(struct pg_arena *a, struct pg_ring_server *s,
                             struct pg_time_shares *shares)
{
    struct pg_router *const r = s->router;
    const bool receives = LIKELY(!r->each && !r->rest);
    const enum router_event event = receives ? router_receive(r) : ROUTER_FAILED;
    if (event == ROUTER_NONE)
        return PG_RE_NONE;
    s->client = NULL;
    s->unseen = s->awake;
    s->received_boot_ns = loop_boot_ns(s->calls);
    if (event != ROUTER_MESSAGE)
        return event == ROUTER_OFFENCE ? PG_RE_OFFENCE : PG_RE_LOOK;
    s->body = r->calls->msg_data(r->message);
    s->message_bytes = r->calls->msg_size(r->message);
    struct pg_ring_client *const c = router_client(r, s->body, s->message_bytes);
    if (c == NULL || c->behind || !plain(s, c) || pg_time_share_used(shares, c->share))
        return PG_RE_MESSAGE;
    return apply(a, s, shares, c);
}

static uint32_t visit_next_ring(struct pg_arena *a, struct pg_ring_server *s,
                                struct pg_time_shares *shares)
{
    s->client = s->last = s->last->next;
    s->unseen--;
    return visit(a, s, shares, s->client);
}

/* Choose whose message is the next one, and return whether there may be one. While the socket and
 * rings have messages, they take turns. */
static bool choose(struct pg_ring_server *s)
{
    const bool socket = s->router != NULL && !s->router->quiet;
    s->from_router = socket && (s->unseen == 0 || !s->from_router);
    return socket || s->unseen != 0;
}

#define SLICE_NS 200000           /* time for messages, after which due timers are looked at */

/* Return whether the messages of this call have used up their time. Timers that come due meanwhile
 * then wait for one message more, not for all that a flood has sent. */
static bool slice_used(const struct pg_ring_server *s, int64_t *begun_ns)
{
    if (s->applied == 0)
        return false;
    if (s->applied == 1)
        *begun_ns = s->received_boot_ns;
    return s->handed_boot_ns - *begun_ns >= SLICE_NS;
}

uint32_t pg_rings_serve(struct pg_arena *a, struct pg_ring_server *s,
                        struct pg_time_shares *shares, uint32_t most)
{
    int64_t begun_ns = 0;
    s->applied = 0;
    while (choose(s)) {
        if (s->applied == most || slice_used(s, &begun_ns))
            return PG_RE_ENOUGH;
        const uint32_t event = s->from_router ? visit_router(a, s, shares)
                                              : visit_next_ring(a, s, shares);
        if (event != PG_RE_NONE)
            return event;
    }
    s->unseen = s->awake;
    return PG_RE_NONE;
}

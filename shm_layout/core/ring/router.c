/* router.c - the ROUTER socket of requests, through functions of libzmq that the caller found. */
#include <errno.h>

#include "core/base/common.h"
#include "core/ring/router.h"

enum { DONTWAIT = 1, SNDMORE = 2, SRCFD = 2 };           /* ZMQ_DONTWAIT and so on in zmq.h */

static int route_receive(struct pg_router *r)
{
    int bytes;
    do                            /* a longer routing id is cut, and its whole length returned */
        bytes = r->calls->recv(r->socket, r->route, sizeof r->route, DONTWAIT);
    while (bytes < 0 && errno == EINTR);
    return bytes;
}

/* Receive the frame after the routing id. libzmq has all frames of a message when it has one. */
static bool body_receive(struct pg_router *r)
{
    int bytes;
    r->calls->msg_init(r->message);
    r->open = true;
    do
        bytes = r->calls->msg_recv(r->message, r->socket, DONTWAIT);
    while (bytes < 0 && errno == EINTR);
    return bytes >= 0;
}

/* Note that the sender sends whole messages. */
static void completed_note(struct pg_router *r)
{
    if (r->connection >= 0 && (uint32_t)r->connection < r->descriptors)
        r->completed[r->connection] = true;
}

enum router_event router_receive(struct pg_router *r)
{
    const struct pg_zmq_calls *const z = r->calls;
    if (r->open)
        z->msg_close(r->message);
    r->open = false;
    const int route_bytes = route_receive(r);
    r->quiet = route_bytes < 0 && errno == EAGAIN;
    if (r->quiet)
        return ROUTER_NONE;
    if (route_bytes < 0 || !body_receive(r))
        return ROUTER_FAILED;
    r->route_bytes = (uint32_t)route_bytes;
    r->connection = z->msg_get(r->message, SRCFD);
    r->user_id = z->msg_gets(r->message, "User-Id");
    r->rest = z->msg_more(r->message) != 0;
    if (r->rest || r->route_bytes > PG_ROUTE_MAX) {
        r->address = z->msg_gets(r->message, "Peer-Address");
        return ROUTER_OFFENCE;
    }
    completed_note(r);
    return ROUTER_MESSAGE;
}

struct pg_ring_client *router_client(const struct pg_router *r, const void *body, uint64_t bytes)
{
    struct pg_frame f;
    if (bytes < sizeof f || r->user_id == NULL)
        return NULL;
    memcpy(&f, body, sizeof f);
    const uint32_t row = (uint16_t)f.session;
    struct pg_ring_client *const c = row < r->rows ? r->clients[row] : NULL;
    const bool is_sender = c != NULL && c->route_bytes == r->route_bytes &&
                           memcmp(c->route, r->route, r->route_bytes) == 0 &&
                           strcmp(c->user_id, r->user_id) == 0;
    return is_sender ? c : NULL;
}

static bool route_send(struct pg_router *r, const struct pg_ring_client *c)
{
    int sent;
    do
        sent = r->calls->send(r->socket, c->route, c->route_bytes, SNDMORE | DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent >= 0;
}

/* After the routing id, libzmq takes or drops the frame. */
static void body_send(struct pg_router *r, void *body)
{
    int sent;
    do
        sent = r->calls->msg_send(body, r->socket, DONTWAIT);
    while (sent < 0 && errno == EINTR);
    if (sent < 0)
        r->calls->msg_close(body);
}

/* The body is allocated first. After a routing id without a body, libzmq would send the next reply,
 * which is for another client, to this client. */
bool router_send(struct pg_router *r, const struct pg_ring_client *c, const void *reply,
                 uint64_t bytes)
{
    uint64_t body[sizeof r->message / sizeof(uint64_t)];
    r->quiet = false;             /* sending may take the event for which `fd` is readable */
    if (r->calls->msg_init_size(body, bytes) != 0)
        return false;
    memcpy(r->calls->msg_data(body), reply, bytes);
    if (!route_send(r, c)) {
        r->calls->msg_close(body);
        return false;
    }
    body_send(r, body);
    return true;
}

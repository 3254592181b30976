/* router.h - receive the requests of a ROUTER socket of ZeroMQ, and send replies. No call blocks. */
#ifndef PURGATORYD_RING_ROUTER_H
#define PURGATORYD_RING_ROUTER_H

#include "core/base/common.h"

enum router_event {
    ROUTER_NONE,                  /* the socket has no message */
    ROUTER_MESSAGE,
    ROUTER_OFFENCE,               /* see PG_RE_OFFENCE */
    ROUTER_FAILED                 /* libzmq refused the call; the caller of the core finds out why */
};

/* Receive the next message, and close the one before. */
enum router_event router_receive(struct pg_router *r);
/* Return the client that owns the session of a received message, if the message came from it; NULL =
 * there is none. */
struct pg_ring_client *router_client(const struct pg_router *r, const void *body, uint64_t bytes);
/* Send a reply to a client. False = the socket did not take it. */
bool router_send(struct pg_router *r, const struct pg_ring_client *c, const void *reply,
                 uint64_t bytes);

#endif

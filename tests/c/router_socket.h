/* router_socket.h - a ROUTER socket of a test, behind the functions of libzmq.
 *
 * It checks the order of the calls. A body has memory of its own, so the sanitizers find accesses
 * beyond it and bodies that are not closed. */
#ifndef PURGATORYD_ROUTER_SOCKET_H
#define PURGATORYD_ROUTER_SOCKET_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"

enum { SOCKET_MESSAGES = 32, SOCKET_ROUTE = 300, SOCKET_REPLY = 1024, SOCKET_SNDMORE = 2 };

struct socket_message {
    uint8_t route[SOCKET_ROUTE];
    uint32_t route_bytes;
    void *body;                   /* malloc */
    size_t bytes;
    uint32_t more;                /* number of frames after the body */
    const char *user_id;
    int connection;
};

struct router_socket {
    struct socket_message waiting[SOCKET_MESSAGES];
    uint32_t first, count;        /* the waiting messages, oldest first */
    struct socket_message taken;  /* its routing id was received */
    uint8_t has_taken;
    uint32_t rest;                /* frames of the last message that were not received */
    int fails, send_fails;        /* errno of the next call; 0 = it succeeds */
    /* the replies */
    uint8_t to[PG_ROUTE_MAX], reply[SOCKET_REPLY];
    uint32_t to_bytes;
    size_t reply_bytes;
    uint32_t replies;
    uint8_t has_to;               /* 1 = the routing id of a reply was sent */
};

static inline void socket_expect(bool good)
{
    if (!good)
        abort();
}

/* Let a call fail once with the errno that the test has set. */
static inline bool socket_fails(int *number)
{
    errno = *number;
    *number = 0;
    return errno != 0;
}

static inline int socket_recv(void *socket, void *buffer, size_t bytes, int flags)
{
    struct router_socket *s = socket;
    socket_expect(flags == 1 && !s->has_taken && s->rest == 0 && !s->has_to);
    if (socket_fails(&s->fails))
        return -1;
    if (s->count == 0) {
        errno = EAGAIN;
        return -1;
    }
    s->taken = s->waiting[s->first];
    s->first = (s->first + 1) % SOCKET_MESSAGES;
    s->count--;
    s->has_taken = true;
    memcpy(buffer, s->taken.route, s->taken.route_bytes < bytes ? s->taken.route_bytes : bytes);
    return (int)s->taken.route_bytes;
}

static inline int socket_msg_init(void *message)
{
    memset(message, 0, 64);
    return 0;
}

static int socket_init_fails;     /* errno of the next msg_init_size; 0 = it succeeds */

static inline int socket_msg_init_size(void *message, size_t bytes)
{
    if (socket_fails(&socket_init_fails))
        return -1;
    struct socket_message *m = calloc(1, sizeof *m);
    socket_expect(m != NULL);
    m->bytes = bytes;
    m->body = malloc(bytes);
    socket_expect(bytes == 0 || m->body != NULL);
    memset(message, 0, 64);
    memcpy(message, &m, sizeof m);
    return 0;
}

static inline struct socket_message *socket_opened(const void *message)
{
    struct socket_message *m;
    memcpy(&m, message, sizeof m);
    socket_expect(m != NULL);
    return m;
}

static inline int socket_msg_recv(void *message, void *socket, int flags)
{
    struct router_socket *s = socket;
    struct socket_message *m = malloc(sizeof *m);
    socket_expect(flags == 1 && s->has_taken && m != NULL);
    *m = s->taken;
    s->has_taken = false;
    s->rest = m->more;
    memcpy(message, &m, sizeof m);
    return (int)m->bytes;
}

static inline int socket_msg_close(void *message)
{
    struct socket_message *m = socket_opened(message);
    free(m->body);
    free(m);
    memset(message, 0, 64);
    return 0;
}

static inline void *socket_msg_data(void *message) { return socket_opened(message)->body; }
static inline size_t socket_msg_size(const void *message) { return socket_opened(message)->bytes; }
static inline int socket_msg_more(const void *message) { return socket_opened(message)->more != 0; }

static inline int socket_msg_get(const void *message, int property)
{
    socket_expect(property == 2);
    return socket_opened(message)->connection;
}

static inline const char *socket_msg_gets(const void *message, const char *property)
{
    return strcmp(property, "User-Id") == 0 ? socket_opened(message)->user_id : "localhost:1:1:1";
}

static inline int socket_send(void *socket, const void *buffer, size_t bytes, int flags)
{
    struct router_socket *s = socket;
    if (socket_fails(&s->send_fails))
        return -1;
    socket_expect(flags == (1 | SOCKET_SNDMORE) && !s->has_to && bytes <= sizeof s->to);
    memcpy(s->to, buffer, bytes);
    s->to_bytes = (uint32_t)bytes;
    s->has_to = true;
    return (int)bytes;
}

static inline int socket_msg_send(void *message, void *socket, int flags)
{
    struct router_socket *s = socket;
    const struct socket_message *m = socket_opened(message);
    const size_t bytes = m->bytes;
    socket_expect(flags == 1 && s->has_to);
    memcpy(s->reply, m->body, bytes < sizeof s->reply ? bytes : sizeof s->reply);
    s->reply_bytes = bytes;
    s->has_to = false;
    s->replies++;
    socket_msg_close(message);
    return (int)bytes;
}

static const struct pg_zmq_calls socket_calls = {
    socket_recv, socket_send, socket_msg_init, socket_msg_init_size, socket_msg_recv,
    socket_msg_send, socket_msg_close, socket_msg_data, socket_msg_size, socket_msg_more,
    socket_msg_get, socket_msg_gets};

/* Let a message wait. A full socket drops it. */
static inline void socket_put(struct router_socket *s, const struct socket_message *message)
{
    if (s->count == SOCKET_MESSAGES)
        return;
    struct socket_message *m = &s->waiting[(s->first + s->count++) % SOCKET_MESSAGES];
    *m = *message;
    m->body = malloc(m->bytes);
    socket_expect(m->bytes == 0 || m->body != NULL);
    if (m->bytes != 0)
        memcpy(m->body, message->body, m->bytes);
}

/* Free the messages that wait, and the one that is open. */
static inline void socket_close(struct router_socket *s, struct pg_router *r)
{
    if (r->open)
        socket_msg_close(r->message);
    r->open = false;
    for (; s->count != 0; s->count--) {
        free(s->waiting[s->first].body);
        s->first = (s->first + 1) % SOCKET_MESSAGES;
    }
}

#endif

/* zmq_channel.c - direct calls over a ZeroMQ socket (channel.h).
 *
 * The socket and libzmq are those of pyzmq. The functions used here, and the size of zmq_msg_t, are
 * the same in all releases of libzmq 4. */
#define _GNU_SOURCE
#include "channel.h"

#include <dlfcn.h>
#include <poll.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { ZMQ_DONTWAIT = 1, ZMQ_EVENTS = 15, ZMQ_POLLIN = 1 };

struct functions {
    int (*send)(void *socket, const void *bytes, size_t size, int flags);
    int (*getsockopt)(void *socket, int option, void *value, size_t *size);
    int (*msg_init)(void *message);
    int (*msg_recv)(void *message, void *socket, int flags);
    void *(*msg_data)(void *message);
    size_t (*msg_size)(const void *message);
    int (*msg_close)(void *message);
};

static struct functions zmq;

bool zmq_find(const char *path)
{
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL)
        return false;
    const struct functions found = {
        (int (*)(void *, const void *, size_t, int))dlsym(library, "zmq_send"),
        (int (*)(void *, int, void *, size_t *))dlsym(library, "zmq_getsockopt"),
        (int (*)(void *))dlsym(library, "zmq_msg_init"),
        (int (*)(void *, void *, int))dlsym(library, "zmq_msg_recv"),
        (void *(*)(void *))dlsym(library, "zmq_msg_data"),
        (size_t(*)(const void *))dlsym(library, "zmq_msg_size"),
        (int (*)(void *))dlsym(library, "zmq_msg_close"),
    };
    const bool whole = found.send && found.getsockopt && found.msg_init && found.msg_recv &&
                       found.msg_data && found.msg_size && found.msg_close;
    if (whole)
        zmq = found;
    else
        dlclose(library);
    return whole;
}

/* The eventfd may be readable, because of an earlier recall(). */
static void zmq_open(struct channel *c)
{
    uint64_t count;
    if (c->kicked_fd >= 0)
        (void)!read(c->kicked_fd, &count, sizeof count);
}

/* Each event of the monitor says that the connection was broken or made again. */
static bool zmq_ended(struct channel *c)
{
    int events = 0;
    size_t size = sizeof events;
    return zmq.getsockopt(c->monitor, ZMQ_EVENTS, &events, &size) != 0 ||
           (events & ZMQ_POLLIN) != 0;
}

static bool zmq_put(struct channel *c, const void *message, uint64_t bytes)
{
    return zmq.send(c->zmq, message, bytes, ZMQ_DONTWAIT) >= 0;
}

static void zmq_rouse(struct channel *c) { (void)c; }

/* Receive a message, unless there is one. The descriptor announces later messages only after a
 * receive that finds none. */
static bool received(struct channel *c)
{
    if (c->holds)
        return true;
    zmq.msg_init(&c->message);
    c->holds = zmq.msg_recv(&c->message, c->zmq, ZMQ_DONTWAIT) >= 0;
    if (!c->holds)
        zmq.msg_close(&c->message);
    return c->holds;
}

/* Sleep until there is something to receive. */
static bool zmq_sleep(struct channel *c, int64_t left_ns)
{
    enum { SECOND_NS = 1000000000 };
    struct pollfd waits[] = {
        {.fd = c->zmq_fd, .events = POLLIN},
        {.fd = c->monitor_fd, .events = POLLIN},
        {.fd = c->kicked_fd, .events = POLLIN},
    };
    const struct timespec limit = {left_ns / SECOND_NS, left_ns % SECOND_NS};
    return left_ns > 0 && ppoll(waits, 3, &limit, NULL) > 0 && waits[1].revents == 0 &&
           waits[2].revents == 0;
}

static bool zmq_wait(struct channel *c, int64_t limit_ns)
{
    const int64_t end_ns = clock_ns(CLOCK_MONOTONIC) + limit_ns;
    while (!received(c))
        if (!zmq_sleep(c, end_ns - clock_ns(CLOCK_MONOTONIC)))
            return false;
    return true;
}

static void zmq_spin(struct channel *c) { (void)c; }

static void zmq_recall(struct channel *c)
{
    const uint64_t one = 1;
    (void)!write(c->kicked_fd, &one, sizeof one);
}

static uint64_t zmq_next(struct channel *c)
{
    return received(c) ? zmq.msg_size(&c->message) : 0;
}

static void zmq_peek(struct channel *c, void *to, uint64_t bytes)
{
    memcpy(to, zmq.msg_data(&c->message), bytes);
}

static void zmq_take(struct channel *c, void *to)
{
    zmq_peek(c, to, zmq_next(c));
    zmq.msg_close(&c->message);
    c->holds = false;
}

static bool zmq_announce(struct channel *c) { return !c->holds; }

static bool zmq_drain(struct channel *c) { return !zmq_ended(c); }

const struct channel_kind zmq_channel = {
    .open = zmq_open,
    .ended = zmq_ended,
    .put = zmq_put,
    .rouse = zmq_rouse,
    .wait = zmq_wait,
    .spin = zmq_spin,
    .recall = zmq_recall,
    .next = zmq_next,
    .peek = zmq_peek,
    .take = zmq_take,
    .announce = zmq_announce,
    .drain = zmq_drain,
};

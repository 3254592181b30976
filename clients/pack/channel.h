/* channel.h - the channel to the daemon as direct calls use it: two rings, or a ZeroMQ socket.
 *
 * One thread at a time uses a channel: the thread of a direct call, or else the engine. One hands it
 * to the other under the GIL, which is the full barrier that a ZeroMQ socket needs. */
#ifndef PURGATORYD_PACK_CHANNEL_H
#define PURGATORYD_PACK_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

struct pg_ring_end;
struct channel;

/* The operations of a kind of channel. Only wait() sleeps. */
struct channel_kind {
    /* Begin to use a channel whose fields were set. */
    void (*open)(struct channel *c);
    /* Return whether the connection has ended. This is a system call. */
    bool (*ended)(struct channel *c);
    /* Send a message. Returns false if it does not fit; nothing has happened then. */
    bool (*put)(struct channel *c, const void *message, uint64_t bytes);
    /* Wake the daemon if it sleeps. */
    void (*rouse)(struct channel *c);
    /* Wait for a message. Returns false after `limit_ns`, at a signal, and after recall(). */
    bool (*wait)(struct channel *c, int64_t limit_ns);
    /* Look for a message as wait() does before it sleeps. */
    void (*spin)(struct channel *c);
    /* End the wait() or spin() of another thread, and each later one until the next open(). */
    void (*recall)(struct channel *c);
    /* Return the bytes of the next message; 0 = there is none, or only a part of it. */
    uint64_t (*next)(struct channel *c);
    /* Copy the first bytes of the next message. */
    void (*peek)(struct channel *c, void *to, uint64_t bytes);
    /* Copy the next message, and remove it. */
    void (*take)(struct channel *c, void *to);
    /* Call this after next() found no message. Returns true if a descriptor becomes readable when
     * one comes; false if one has come already. */
    bool (*announce)(struct channel *c);
    /* Read what made a descriptor readable. Returns false if the connection has ended. */
    bool (*drain)(struct channel *c);
};

/* State of spinning: polling for an answer before the sleep. */
struct spin {
    int64_t longest_ns;           /* longest time of a spin; 0 = no spins */
    bool adapts;                  /* most calls omit spins that seldom succeed */
    uint32_t misses;              /* rises with each spin that finds nothing, else falls */
    uint32_t omitted;             /* number of calls until the next spin */
};

struct channel {
    const struct channel_kind *kind;  /* NULL = no direct call may begin */
    /* rings: the ends of the RingPair, the eventfd of the daemon, and a socket whose end says that
     * the daemon has ended */
    struct pg_ring_end *out, *in;
    int bell, socket;
    struct spin spin;
    /* ZeroMQ: the socket, the monitor of its connection, their descriptors, and an eventfd that
     * ends wait() */
    void *zmq, *monitor;
    int zmq_fd, monitor_fd, kicked_fd;
    bool holds;                       /* `message` has a message that was not taken */
    struct { _Alignas(8) unsigned char bytes[64]; } message; /* a zmq_msg_t */
};

extern const struct channel_kind ring_channel, zmq_channel;

/* Find the functions of libzmq in a mapped library, or in a library that it needs. Returns false if
 * they are not there. */
bool zmq_find(const char *path);

static inline int64_t clock_ns(clockid_t clock)
{
    enum { SECOND_NS = 1000000000 };
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * SECOND_NS + now.tv_nsec;
}

#endif

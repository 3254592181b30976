/* clients.h - what clients in tests of the servers of rings and of the ROUTER socket do. */
#ifndef PURGATORYD_TEST_CLIENTS_H
#define PURGATORYD_TEST_CLIENTS_H

#include "check.h"
#include "core/core.h"

/* Begin a session. `reply`: memory for PG_MESSAGE_MAX bytes. Returns the session. */
static inline uint64_t session_begun(struct pg_arena *a, uint32_t uid, uint8_t nonce,
                                     int64_t now_ns, uint8_t *reply)
{
    const struct {
        struct pg_frame frame;
        struct pg_hello hello;
    } m = {.frame = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION, .message = PG_M_HELLO},
           .hello = {.nonce = {nonce}}};
    uint64_t used;
    int64_t wait_ns;
    struct pg_frame f;
    CHECK_EQUAL(pg_handle(a, &m, sizeof m, uid, 1, now_ns, now_ns, reply, &used, &wait_ns),
                PG_H_REPLY);
    memcpy(&f, reply, sizeof f);
    CHECK_EQUAL(f.error, PG_ERR_NONE);
    return f.session;
}

/* Take an answer of at most 1 KiB out of a ring. Returns its sequence; 0 = there is none. */
static inline uint64_t answer_taken(struct pg_ring_end *taken)
{
    uint8_t bytes[1024];
    struct pg_frame f;
    if (pg_ring_next(taken) == 0)
        return 0;
    CHECK(taken->length <= sizeof bytes && pg_ring_take(taken, bytes));
    memcpy(&f, bytes, sizeof f);
    CHECK_EQUAL(f.error, PG_ERR_NONE);
    return f.sequence;
}

#endif

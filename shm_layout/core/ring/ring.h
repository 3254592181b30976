/* ring.h - a ring of bytes in memory that two processes share. One puts messages, one takes them.
 * Neither trusts the other: each keeps its own position in private memory, reads each word of the
 * other side once, and checks it. */
#ifndef PURGATORYD_RING_RING_H
#define PURGATORYD_RING_RING_H

#include "core/base/common.h"

enum { RING_WORD = sizeof(uint64_t) };   /* the length before each message */

static inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Return the bytes that the bytes of a message take in a ring. */
static inline uint64_t padded(uint64_t bytes)
{
    return (bytes + PG_RING_UNIT - 1) / PG_RING_UNIT * PG_RING_UNIT;
}

/* Return whether a message is larger than the ring, so that it goes in pieces. */
static inline bool is_large(const struct pg_ring_end *end, uint64_t bytes)
{
    return RING_WORD + padded(bytes) > end->size;
}

/* Return CLOCK_BOOTTIME. calls = NULL is the system's clock. */
static inline int64_t loop_boot_ns(const struct pg_loop_calls *calls)
{
    return calls != NULL ? calls->boot_ns(calls->context) : pg_boot_ns();
}

#endif

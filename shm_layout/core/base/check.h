/* check.h - checks and assertions: how a broken invariant is reported. */
#ifndef PURGATORYD_BASE_CHECK_H
#define PURGATORYD_BASE_CHECK_H

#include "core/base/common.h"

/* Record a fault and return false. Only the first fault is kept, so that the message names the
 * cause and not an effect. */
bool fault_set(struct pg_fault *fault, const char *part, const char *detail, uint64_t where,
               uint64_t expected, uint64_t found);

/* Assert an invariant that no message, argument or stored byte can break, because messages,
 * arguments and stored bytes are validated first. If it is broken nevertheless, the process ends
 * before its next store, and the arena is left for recovery. */
#define PG_ASSERT(fact, part, invariant)                                                        \
    do {                                                                                        \
        if (UNLIKELY(!(fact)))                                                                  \
            assertion_failed(part, invariant);                                                  \
    } while (0)
/* An assertion that would slow down every call. Only builds with PG_ASSERT_ALL check it: tests,
 * fuzzing and simulated worlds. */
#ifdef PG_ASSERT_ALL
#define PG_ASSERT_IN_TESTS(fact, part, invariant) PG_ASSERT(fact, part, invariant)
#else
#define PG_ASSERT_IN_TESTS(fact, part, invariant) ((void)0)
#endif
_Noreturn void assertion_failed(const char *part, const char *invariant);

/* Spread an id over 64 bits (the finalizer of MurmurHash3, Appleby). If the sums of the mixed ids
 * of two lists are equal, the lists hold the same ids, each equally often. */
static inline uint64_t id_mix(uint32_t id)
{
    uint64_t x = (uint64_t)id + 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

#endif

/*
 * check.h - the framework of the C tests. A test exits at the first failed check, and its random
 * numbers are the same in every run.
 */
#ifndef PURGATORYD_CHECK_H
#define PURGATORYD_CHECK_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: %s: CHECK(%s) failed\n", __FILE__, __LINE__, __func__, \
                    #condition);                                                           \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

/* Check that two integers are equal. If they differ, print both in decimal and exit. */
#define CHECK_EQUAL(found, expected)                                                       \
    do {                                                                                   \
        int64_t found_ = (int64_t)(found), expected_ = (int64_t)(expected);                \
        if (found_ != expected_) {                                                         \
            fprintf(stderr, "%s:%d: %s: %s = %" PRId64 ", expected %" PRId64 "\n",         \
                    __FILE__, __LINE__, __func__, #found, found_, expected_);              \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

#define RUN(test)                                                                          \
    do {                                                                                   \
        test();                                                                            \
        printf("%s ok\n", #test);                                                          \
    } while (0)

/* Return zeroed pages for an arena. The size is a whole number of pages. */
static inline void *zeroed(uint64_t bytes)
{
    void *memory = aligned_alloc(4096, bytes);
    CHECK(bytes % 4096 == 0 && memory != NULL);
    return memset(memory, 0, bytes);
}

/* xorshift64* (Vigna 2016). The state must not be 0. */
struct rng {
    uint64_t state;
};

static inline uint64_t rng_next(struct rng *r)
{
    r->state ^= r->state >> 12;
    r->state ^= r->state << 25;
    r->state ^= r->state >> 27;
    return r->state * 0x2545f4914f6cdd1du;
}

/* Return a number from 0 to bound - 1, uniform enough for tests. bound must not be 0. */
static inline uint64_t rng_below(struct rng *r, uint64_t bound) { return rng_next(r) % bound; }

#endif

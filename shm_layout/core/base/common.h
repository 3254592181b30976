/* common.h - what every file of the core uses. */
#ifndef PURGATORYD_BASE_COMMON_H
#define PURGATORYD_BASE_COMMON_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "layout.h"
#include "api.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
/* Kept out of its callers, whose common way needs fewer registers then. */
#define RARE __attribute__((noinline, cold))

/* What a message has, read where it stands: at any address. */
typedef struct pg_record wire_record __attribute__((aligned(1)));
typedef struct pg_watch_key wire_watch_key __attribute__((aligned(1)));

/* Starts the way of a line from memory, to be written soon. The empty statement is an effect:
 * without one, compilers drop functions that do nothing else. */
static inline void fetch(const void *at)
{
    __builtin_prefetch(at, 1);
    __asm__ volatile("");
}

/* To be called before memory is written that this process has not touched yet: the kernel maps the
 * pages around one that is read, and only that one when it is written first. */
static inline void touch(const void *at, uint64_t bytes)
{
    enum { AROUND = 65536 };
    for (uint64_t i = 0; i < bytes; i += AROUND)
        (void)*((const volatile uint8_t *)at + i);
}

/* Shared fields that readers poll while the daemon writes. */
#define LOAD_ACQUIRE(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define STORE_RELEASE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

#endif

/* common.h - the includes, macros and helpers that every file of the core uses. */
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
/* Keep a rare path out of its callers, so that their common path needs fewer registers. */
#define RARE __attribute__((noinline, cold))

/* Parts of a message that are read in place. They need no alignment, because a message may begin at
 * any address. */
typedef struct pg_record wire_record __attribute__((aligned(1)));
typedef struct pg_watch_key wire_watch_key __attribute__((aligned(1)));

/* Prefetch a cache line that is about to be written. Compilers drop calls of functions without an
 * effect; the empty asm statement counts as an effect. */
static inline void fetch(const void *at)
{
    __builtin_prefetch(at, 1);
    __asm__ volatile("");
}

/* Read one byte per 64 KiB of memory that is about to be written for the first time. On a read
 * fault the kernel also maps the surrounding pages; on a write fault it maps only one page. */
static inline void touch(const void *at, uint64_t bytes)
{
    enum { AROUND = 65536 };
    for (uint64_t i = 0; i < bytes; i += AROUND)
        (void)*((const volatile uint8_t *)at + i);
}

/* Access to words that one thread or process stores and others load without a lock.
 * docs/architecture.md has a table of these words ("Published words"), which lint compares with the
 * code. RELAXED: the access publishes no other data. */
#define LOAD_ACQUIRE(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define LOAD_RELAXED(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define STORE_RELEASE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define STORE_RELAXED(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define EXCHANGE_RELAXED(p, v) __atomic_exchange_n((p), (v), __ATOMIC_RELAXED)
#define FULL_BARRIER() __atomic_thread_fence(__ATOMIC_SEQ_CST)

#endif

/* stores.c - an alternative to step.c. It stops before every store instead of after every
 * instruction.
 *
 * The core is compiled with -fsanitize=thread, and these functions replace the sanitizer's runtime.
 * This is about ten times faster than the trap flag and works on any processor. It sees the order
 * of stores that the compiler chose; a memcpy or memset counts as one store. */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "step.h"
#include "tsan.h"

static void (*each)(void *);
static void *each_context;
static bool stepping;
static uint64_t steps;

static void before_store(void)
{
    if (!stepping)
        return;
    stepping = false;             /* `each` may run code that calls before_store() */
    steps++;
    each(each_context);
    stepping = true;
}

uint64_t step_run(void (*run)(void *), void (*seen)(void *), void *context)
{
    each = seen;
    each_context = context;
    steps = 0;
    stepping = true;
    run(context);
    before_store();               /* report the state after the last store */
    stepping = false;
    return steps;
}

/* ---- the sanitizer's runtime --------------------------------------------------------------- */

void __tsan_init(void) {}
void __tsan_func_entry(void *caller) { (void)caller; }
void __tsan_func_exit(void *caller) { (void)caller; }
void *__tsan_memcpy(void *to, const void *from, size_t bytes)
{
    before_store();
    return memcpy(to, from, bytes);
}
void *__tsan_memmove(void *to, const void *from, size_t bytes)
{
    before_store();
    return memmove(to, from, bytes);
}
void *__tsan_memset(void *at, int value, size_t bytes)
{
    before_store();
    return memset(at, value, bytes);
}
void __tsan_atomic_thread_fence(int order) { (void)order; }
void __tsan_read_range(void *at, unsigned long bytes) { (void)at, (void)bytes; }
void __tsan_write_range(void *at, unsigned long bytes) { (void)at, (void)bytes, before_store(); }

#define PLAIN(kind, bytes)                                                                        \
    void __tsan_##kind##read##bytes(void *at) { (void)at; }                                       \
    void __tsan_##kind##write##bytes(void *at) { (void)at, before_store(); }

TSAN_EACH_PLAIN(PLAIN)

#define ATOMIC(bits)                                                                              \
    uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t *at, int order)                \
    {                                                                                             \
        (void)order;                                                                              \
        return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                             \
    }                                                                                             \
    void __tsan_atomic##bits##_store(uint##bits##_t *at, uint##bits##_t value, int order)         \
    {                                                                                             \
        (void)order;                                                                              \
        before_store();                                                                           \
        __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                            \
    }                                                                                             \
    uint##bits##_t __tsan_atomic##bits##_exchange(uint##bits##_t *at, uint##bits##_t value,       \
                                                  int order)                                      \
    {                                                                                             \
        (void)order;                                                                              \
        before_store();                                                                           \
        return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);                                  \
    }                                                                                             \
    uint##bits##_t __tsan_atomic##bits##_fetch_add(uint##bits##_t *at, uint##bits##_t value,      \
                                                   int order)                                     \
    {                                                                                             \
        (void)order;                                                                              \
        before_store();                                                                           \
        return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                                   \
    }

TSAN_EACH_ATOMIC(ATOMIC)

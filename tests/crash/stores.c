/* stores.c - replaces step.c: stops before every store instead of after every instruction.
 *
 * The core is compiled with -fsanitize=thread, and these functions stand in for the sanitizer's
 * runtime. It is some ten times faster than the trap flag, on any processor, and sees the order
 * of the stores that the compiler has chosen; what memcpy and memset do is one store. */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "step.h"

static void (*each)(void *);
static void *each_context;
static bool stepping;
static uint64_t steps;

static void before_store(void)
{
    if (!stepping)
        return;
    stepping = false;             /* the function `each` makes such calls as well */
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
    before_store();               /* reports the last store */
    stepping = false;
    return steps;
}

/* ---- functions that the compilers call ------------------------------------------------------ */

void __tsan_init(void);
void __tsan_init(void) {}
void __tsan_func_entry(void *caller);
void __tsan_func_entry(void *caller) { (void)caller; }
void __tsan_func_exit(void *caller);
void __tsan_func_exit(void *caller) { (void)caller; }
void *__tsan_memcpy(void *to, const void *from, size_t bytes);
void *__tsan_memcpy(void *to, const void *from, size_t bytes)
{
    before_store();
    return memcpy(to, from, bytes);
}
void *__tsan_memmove(void *to, const void *from, size_t bytes);
void *__tsan_memmove(void *to, const void *from, size_t bytes)
{
    before_store();
    return memmove(to, from, bytes);
}
void *__tsan_memset(void *at, int value, size_t bytes);
void *__tsan_memset(void *at, int value, size_t bytes)
{
    before_store();
    return memset(at, value, bytes);
}
void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_thread_fence(int order) { (void)order; }
void __tsan_read_range(void *at, unsigned long bytes);
void __tsan_read_range(void *at, unsigned long bytes) { (void)at, (void)bytes; }
void __tsan_write_range(void *at, unsigned long bytes);
void __tsan_write_range(void *at, unsigned long bytes) { (void)at, (void)bytes, before_store(); }

#define PLAIN(kind, bytes)                                                                        \
    void __tsan_##kind##read##bytes(void *at);                                                    \
    void __tsan_##kind##read##bytes(void *at) { (void)at; }                                       \
    void __tsan_##kind##write##bytes(void *at);                                                   \
    void __tsan_##kind##write##bytes(void *at) { (void)at, before_store(); }

PLAIN(, 1)
PLAIN(, 2)
PLAIN(, 4)
PLAIN(, 8)
PLAIN(, 16)
PLAIN(unaligned_, 2)
PLAIN(unaligned_, 4)
PLAIN(unaligned_, 8)
PLAIN(unaligned_, 16)

#define ATOMIC(bits)                                                                              \
    uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t *at, int order);               \
    uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t *at, int order)                \
    {                                                                                             \
        (void)order;                                                                              \
        return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                             \
    }                                                                                             \
    void __tsan_atomic##bits##_store(uint##bits##_t *at, uint##bits##_t value, int order);        \
    void __tsan_atomic##bits##_store(uint##bits##_t *at, uint##bits##_t value, int order)         \
    {                                                                                             \
        (void)order;                                                                              \
        before_store();                                                                           \
        __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                            \
    }                                                                                             \
    uint##bits##_t __tsan_atomic##bits##_exchange(uint##bits##_t *at, uint##bits##_t value,       \
                                                  int order);                                     \
    uint##bits##_t __tsan_atomic##bits##_exchange(uint##bits##_t *at, uint##bits##_t value,       \
                                                  int order)                                      \
    {                                                                                             \
        (void)order;                                                                              \
        before_store();                                                                           \
        return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);                                  \
    }                                                                                             \
    uint##bits##_t __tsan_atomic##bits##_fetch_add(uint##bits##_t *at, uint##bits##_t value,      \
                                                   int order);                                    \
    uint##bits##_t __tsan_atomic##bits##_fetch_add(uint##bits##_t *at, uint##bits##_t value,      \
                                                   int order)                                     \
    {                                                                                             \
        (void)order;                                                                              \
        before_store();                                                                           \
        return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                                   \
    }

ATOMIC(8)
ATOMIC(32)
ATOMIC(64)

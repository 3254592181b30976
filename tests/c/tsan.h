/* tsan.h - declarations of the functions that the core calls if it is compiled with
 * -fsanitize=thread. A program that defines them itself, instead of linking libtsan, sees each
 * memory access. */
#ifndef PURGATORYD_TSAN_H
#define PURGATORYD_TSAN_H

#include <stddef.h>
#include <stdint.h>

void __tsan_init(void);
void __tsan_func_entry(void *caller);
void __tsan_func_exit(void *caller);
void __tsan_read_range(void *at, unsigned long bytes);
void __tsan_write_range(void *at, unsigned long bytes);
void __tsan_atomic_thread_fence(int order);
void *__tsan_memcpy(void *to, const void *from, size_t bytes);
void *__tsan_memmove(void *to, const void *from, size_t bytes);
void *__tsan_memset(void *at, int value, size_t bytes);

/* Plain accesses: prefix for the alignment, size in bytes. */
#define TSAN_EACH_PLAIN(M)                                                                        \
    M(, 1) M(, 2) M(, 4) M(, 8) M(, 16)                                                           \
    M(unaligned_, 2) M(unaligned_, 4) M(unaligned_, 8) M(unaligned_, 16)
/* Atomic accesses: size in bits. */
#define TSAN_EACH_ATOMIC(M) M(8) M(32) M(64)

#define TSAN_PLAIN(kind, bytes)                                                                   \
    void __tsan_##kind##read##bytes(void *at);                                                    \
    void __tsan_##kind##write##bytes(void *at);
#define TSAN_ATOMIC(bits)                                                                         \
    uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t *at, int order);               \
    void __tsan_atomic##bits##_store(uint##bits##_t *at, uint##bits##_t value, int order);        \
    uint##bits##_t __tsan_atomic##bits##_exchange(uint##bits##_t *at, uint##bits##_t value,       \
                                                  int order);                                     \
    uint##bits##_t __tsan_atomic##bits##_fetch_add(uint##bits##_t *at, uint##bits##_t value,      \
                                                   int order);
TSAN_EACH_PLAIN(TSAN_PLAIN)
TSAN_EACH_ATOMIC(TSAN_ATOMIC)
#undef TSAN_PLAIN
#undef TSAN_ATOMIC

#endif

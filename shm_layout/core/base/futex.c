/* futex.c - sleep on words of shared memory, and wake the sleepers.
 *
 * The words are in a shared mapping, so the kernel finds sleepers by file and offset: a sleeper needs
 * only a read-only mapping, and may belong to another user. */
#define _GNU_SOURCE
#include "core/base/futex.h"
#include "core/base/common.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449                          /* since Linux 5.16 */
#endif

enum { FUTEX_U32 = 2, SECOND_NS = 1000000000 };

struct waiter {                   /* struct futex_waitv of newer kernel headers */
    uint64_t value;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};

void futex_wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void pg_wake_all(uint32_t *word)
{
    STORE_RELEASE(word, *word + 1);
    futex_wake(word);
}

void pg_look_at(uint32_t *const *words, uint32_t *values, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        values[i] = LOAD_ACQUIRE(words[i]);
}

int pg_sleep(uint32_t *const *words, const uint32_t *values, uint32_t count, int64_t limit_ns)
{
    struct waiter waiters[PG_SLEEP_WORDS];
    struct timespec end;
    if (count > PG_SLEEP_WORDS)
        return EINVAL;
    for (uint32_t i = 0; i < count; i++)
        waiters[i] = (struct waiter){values[i], (uintptr_t)words[i], FUTEX_U32, 0};
    clock_gettime(CLOCK_MONOTONIC, &end);
    limit_ns += end.tv_nsec;
    end.tv_sec += limit_ns / SECOND_NS;
    end.tv_nsec = limit_ns % SECOND_NS;
    const long woken = syscall(SYS_futex_waitv, waiters, count, 0, &end, CLOCK_MONOTONIC);
    return woken >= 0 || errno == EAGAIN ? 0 : errno;
}

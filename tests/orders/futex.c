/* futex.c - the kernel's side of the calls of core/base/futex.c. As in the kernel, a sleeper enters
 * itself at each word before it compares the word's value, and a waker looks for sleepers after it
 * has stored the value. Both have a full barrier between the two steps. */
#define _GNU_SOURCE
#include "scenarios.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include "check.h"
#include "core/core.h"

enum { WORDS = 2, WOKEN = 1 };    /* WOKEN: the eventfd by which a waker wakes the sleeper */

struct waiter {                   /* struct futex_waitv of newer kernel headers */
    uint64_t value, address;
    uint32_t flags, reserved;
};

static uintptr_t addresses[WORDS];
static uint32_t entered[WORDS];   /* [n]: 1 = the sleeper is entered at addresses[n] */

void futex_watch(uint32_t *const *words, uint32_t count)
{
    CHECK(count <= WORDS);
    for (uint32_t i = 0; i < WORDS; i++)
        addresses[i] = i < count ? (uintptr_t)words[i] : 0;
    model_watch(entered, sizeof entered);
}

static uint32_t *entry_of(uintptr_t address)
{
    for (uint32_t i = 0; i < WORDS; i++)
        if (addresses[i] == address)
            return &entered[i];
    return NULL;
}

static long wake(uintptr_t address)
{
    uint32_t *entry = entry_of(address);
    FULL_BARRIER();
    if (entry == NULL || LOAD_RELAXED(entry) == 0 || EXCHANGE_RELAXED(entry, 0) == 0)
        return 0;
    eventfd_write(WOKEN, 1);
    return 1;
}

/* Return whether the sleeper may sleep: all words have the expected values. */
static bool enter(const struct waiter *waiters, uint32_t count)
{
    bool same = true;
    for (uint32_t i = 0; i < count; i++) {
        EXCHANGE_RELAXED(entry_of(waiters[i].address), 1);
        FULL_BARRIER();
        same &= LOAD_RELAXED((const uint32_t *)(uintptr_t)waiters[i].address) == waiters[i].value;
    }
    return same;
}

static long sleep_on(const struct waiter *waiters, uint32_t count)
{
    eventfd_t woken = 0, taken = 0;
    const bool sleeps = enter(waiters, count);
    if (sleeps)
        eventfd_read(WOKEN, &woken);
    for (uint32_t i = 0; i < count; i++)
        taken += EXCHANGE_RELAXED(entry_of(waiters[i].address), 0) == 0;
    for (eventfd_t more; woken < taken; woken += more)
        eventfd_read(WOKEN, &more);
    errno = EAGAIN;
    return sleeps ? 0 : -1;
}

long __wrap_syscall(long number, ...);

long __wrap_syscall(long number, ...)
{
    va_list arguments;
    va_start(arguments, number);
    const uintptr_t first = (uintptr_t)va_arg(arguments, void *);
    const uint32_t second = va_arg(arguments, uint32_t);
    va_end(arguments);
    return number == SYS_futex ? wake(first) : sleep_on((const struct waiter *)first, second);
}

/* doorbell.c - the clock, the system calls that wake the other side of a ring, and the sleep of a
 * client. A call that wakes does not block: only clients write the eventfd, and a client that is slow
 * to read its socket is awake already. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/base/futex.h"
#include "core/ring/ring.h"

int64_t pg_boot_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

void pg_ring_signal(int eventfd)
{
    const uint64_t one = 1;
    (void)!write(eventfd, &one, sizeof one);
}

void pg_ring_wake(uint32_t how, uint32_t *word, int socket)
{
    if (how == PG_RING_FUTEX)
        futex_wake(word);
    else if (how != PG_RING_AWAKE)
        (void)!send(socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

int pg_ring_sleep(struct pg_ring_end *end, int64_t limit_ns)
{
    enum { SECOND_NS = 1000000000 };
    const struct timespec limit = {limit_ns / SECOND_NS, limit_ns % SECOND_NS};
    uint32_t *word = &end->words->taker_sleeps;
    return syscall(SYS_futex, word, FUTEX_WAIT, PG_RING_FUTEX, &limit, NULL, 0) == 0 ||
           errno != EINTR;
}

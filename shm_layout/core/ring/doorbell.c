/* doorbell.c - the system calls that wake the other side of a ring. None of them blocks: only clients
 * write the eventfd, and a client that is slow to read its socket is awake already. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/ring/ring.h"

void pg_ring_signal(int eventfd)
{
    const uint64_t one = 1;
    (void)!write(eventfd, &one, sizeof one);
}

void pg_ring_wake(uint32_t how, uint32_t *word, int socket)
{
    if (how == PG_RING_FUTEX)
        syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
    else if (how != PG_RING_AWAKE)
        (void)!send(socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

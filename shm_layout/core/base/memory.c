/* memory.c - place memory on a NUMA node and lock it in RAM.
 *
 * Nodes are preferred, never required. If a node is full, the kernel allocates from the nearest
 * other node. With a strict policy the kernel would kill the process instead.
 */
#define _GNU_SOURCE
#include "core/base/common.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { WORD_BITS = 8 * sizeof(unsigned long) };

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22                        /* since Linux 5.14; glibc 2.35 defines it */
#endif

struct nodes {
    unsigned long bits[PG_NODES_MAX / WORD_BITS];
};

static struct nodes only(uint32_t node)
{
    struct nodes n = {{0}};
    n.bits[node / WORD_BITS] = 1ul << node % WORD_BITS;
    return n;
}

/* The kernel ignores the last bit of the mask, hence + 1. */
static const unsigned long NODE_BITS = PG_NODES_MAX + 1;

int pg_memory_prefer(uint32_t node)
{
    const struct nodes n = only(node);
    return syscall(SYS_set_mempolicy, MPOL_PREFERRED, n.bits, NODE_BITS) == 0 ? 0 : errno;
}

static int bind(void *memory, uint64_t bytes, const struct nodes *n, unsigned flags)
{
    const long done = syscall(SYS_mbind, memory, bytes, MPOL_PREFERRED, n->bits, NODE_BITS, flags);
    return done == 0 ? 0 : errno;
}

int pg_memory_bind(void *memory, uint64_t bytes, uint32_t node, int move)
{
    const struct nodes n = only(node);
    if (!move)
        return bind(memory, bytes, &n, 0);
    madvise(memory, bytes, MADV_POPULATE_READ);      /* only mapped pages are moved */
    int error = bind(memory, bytes, &n, MPOL_MF_MOVE_ALL);
    /* Without CAP_SYS_NICE, only pages that no other process maps can be moved. */
    if (error == EPERM)
        error = bind(memory, bytes, &n, MPOL_MF_MOVE);
    return error;
}

int pg_memory_elsewhere(const void *memory, uint64_t bytes, uint32_t node, uint32_t *elsewhere)
{
    void *pages[PG_MEMORY_SAMPLES];
    int found[PG_MEMORY_SAMPLES];
    const uint64_t size = (uint64_t)sysconf(_SC_PAGESIZE), count = bytes / size;

    *elsewhere = 0;
    for (uint64_t i = 0; i < PG_MEMORY_SAMPLES; i++) {
        const volatile uint8_t *page =
            (const uint8_t *)memory + count * i / PG_MEMORY_SAMPLES * size;
        /* Read the page, so that it is mapped: an unmapped page is on no node. */
        (void)*page;
        pages[i] = (void *)(uintptr_t)page;
    }
    if (syscall(SYS_move_pages, 0, PG_MEMORY_SAMPLES, pages, NULL, found, 0) != 0)
        return errno;
    for (uint64_t i = 0; i < PG_MEMORY_SAMPLES; i++)
        *elsewhere += found[i] != (int)node;
    return 0;
}

int pg_thread_slice(uint64_t slice_ns)
{
    struct {                      /* struct sched_attr, which the C library may lack */
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attr = {0};
    if (syscall(SYS_sched_getattr, 0, &attr, sizeof attr, 0) != 0)
        return errno;
    attr.size = sizeof attr;
    attr.policy = 0;
    attr.flags = 0;
    attr.runtime = slice_ns;
    return syscall(SYS_sched_setattr, 0, &attr, 0) == 0 ? 0 : errno;
}

int pg_memory_lock(void) { return mlockall(MCL_CURRENT) == 0 ? 0 : errno; }

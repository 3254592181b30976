/* wall.c - a wall clock that a test steps: LD_PRELOAD it.
 *
 * WALL_SHIFT names a file of 8 bytes: an int64, the nanoseconds to add to the machine's
 * CLOCK_REALTIME. The file is mapped, so a step takes effect at the next reading. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static _Atomic int64_t still;
static _Atomic int64_t *shift = &still;

__attribute__((constructor)) static void shift_map(void)
{
    const int fd = open(getenv("WALL_SHIFT"), O_RDONLY);
    void *bytes = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED)
        abort();
    shift = bytes;
    close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*next)(clockid_t, struct timespec *);
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "clock_gettime");
    const int failed = next(clock, now);
    if (failed != 0 || clock != CLOCK_REALTIME)
        return failed;
    const int64_t ns = now->tv_sec * 1000000000 + now->tv_nsec + atomic_load(shift);
    *now = (struct timespec){ns / 1000000000, ns % 1000000000};
    return 0;
}

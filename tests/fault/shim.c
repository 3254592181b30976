/* shim.c - makes the Nth call of one libc function fail, be delayed or kill the process, or makes
 * every call fail in a forked child. Use it with LD_PRELOAD. These variables control it:
 *
 * FAULT_CALL    name of the function; unset = no call fails, and all calls are counted
 * FAULT_NTH     number of the call that fails, from 1 on
 * FAULT_ERRNO   errno of the failing call, as a number; 0 = the process is killed at the call
 * FAULT_GATE    a FIFO: the call waits until a process has opened it for writing and closed it,
 *               and then succeeds; FAULT_ERRNO is not used
 * FAULT_WALK    "OUT IN EVERY", two descriptors and a number: the first of every EVERY calls fails
 *               in a forked child. When the child has ended, "NTH STATUS" is written to OUT, with
 *               the status of waitpid(2). No call fails in this process, which waits for a byte
 *               from IN before it continues
 * FAULT_UNTIL   a path: when it exists, no more children are forked
 * FAULT_AFTER   a path: calls are counted as soon as it exists; unset = from the beginning
 * FAULT_LOG     a file: "NAME NTH" is written to it when the call fails. Without FAULT_CALL,
 *               "NAME CALLS" is written for each function when the process ends
 *
 * The shim sees only calls from other libraries and the program, not calls inside libc. Nothing
 * here allocates or uses a function that it replaces. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <unistd.h>

/* The number of calls of one function. */
struct calls {
    const char *name;
    _Atomic long count;
    struct calls *next;           /* next function that has been called */
};

static struct calls *_Atomic called;
static _Atomic bool begun;

/* Return whether the path in an environment variable exists. If the variable is not set, return
 * `unset`. */
static bool exists(const char *variable, bool unset)
{
    const char *path = getenv(variable);
    return path == NULL ? unset : syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
}

static bool counting(void)
{
    if (atomic_load(&begun))
        return true;
    if (!exists("FAULT_AFTER", true))
        return false;
    atomic_store(&begun, true);
    return true;
}

static void tell(const char *name, long number)
{
    const char *log = getenv("FAULT_LOG");
    char line[128];
    if (log == NULL)
        return;
    const int bytes = snprintf(line, sizeof line, "%s %ld\n", name, number);
    const long fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    syscall(SYS_write, fd, line, bytes);
    syscall(SYS_close, fd);
}

/* Count the call, and return the new count. At its first call, add the function to the list of
 * called functions. */
static long call_count(struct calls *c)
{
    const long n = atomic_fetch_add(&c->count, 1) + 1;
    if (n == 1) {
        c->next = atomic_load(&called);
        while (!atomic_compare_exchange_weak(&called, &c->next, c))
            continue;
    }
    return n;
}

__attribute__((destructor)) static void calls_tell(void)
{
    for (struct calls *c = atomic_load(&called); c != NULL && getenv("FAULT_CALL") == NULL;
         c = c->next)
        tell(c->name, atomic_load(&c->count));
}

static void gate_pass(const char *gate)
{
    char byte;
    const long fd = syscall(SYS_openat, AT_FDCWD, gate, O_RDONLY | O_CLOEXEC);
    syscall(SYS_read, fd, &byte, 1);
    syscall(SYS_close, fd);
}

/* Apply the fault to the selected call: return the errno to fail with; 0 = succeed. */
static int befall(const struct calls *c, long n)
{
    const char *code = getenv("FAULT_ERRNO"), *gate = getenv("FAULT_GATE");
    if (gate != NULL)
        gate_pass(gate);
    if (gate != NULL || code == NULL)
        return 0;
    tell(c->name, n);
    if (atoi(code) == 0)
        syscall(SYS_kill, getpid(), SIGKILL);
    return atoi(code);
}

static void child_tell(int out, int in, long n, pid_t child)
{
    char line[64], byte;
    int status = -1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        continue;
    const int bytes = snprintf(line, sizeof line, "%ld %d\n", n, status);
    syscall(SYS_write, out, line, bytes);
    syscall(SYS_read, in, &byte, 1);
}

/* Fork a child if this call is selected. Return true only in the child that was forked for this
 * call; the child forks no more children. */
static bool walk(char *how, long n)
{
    static bool made;
    const int out = (int)strtol(how, &how, 10), in = (int)strtol(how, &how, 10);
    if (made || (n - 1) % strtol(how, NULL, 10) != 0 || exists("FAULT_UNTIL", false))
        return false;
    if (syscall(SYS_gettid) != getpid())
        return false;             /* without its main thread, the child might never end */
    /* This is not fork(2), because after fork(2) locks that are held during the call seem to belong
     * to another thread. */
    const pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    made = child == 0;
    if (child > 0)
        child_tell(out, in, n, child);
    return made;
}

/* Count the call and return the errno to fail with; 0 = succeed. */
static int fault(struct calls *c)
{
    const int before = errno;
    const char *call = getenv("FAULT_CALL"), *nth = getenv("FAULT_NTH");
    char *how = getenv("FAULT_WALK");
    const bool meant = (call == NULL || strcmp(call, c->name) == 0) && counting();
    const long n = meant ? call_count(c) : 0;
    const bool hit = call != NULL && n != 0 &&
                     (how != NULL ? walk(how, n) : nth != NULL && n == atol(nth));
    const int error = hit ? befall(c, n) : 0;
    errno = before;
    return error;
}

/* Define a wrapper that returns `failed` and sets errno, or calls the real function. */
#define WRAP(type, name, failed, parameters, arguments)                                          \
    type name parameters                                                                         \
    {                                                                                            \
        static type(*next) parameters;                                                           \
        static struct calls calls = {#name, 0, NULL};                                            \
        const int error = fault(&calls);                                                         \
        if (error != 0) {                                                                        \
            errno = error;                                                                       \
            return failed;                                                                       \
        }                                                                                        \
        if (next == NULL)                                                                        \
            *(void **)&next = dlsym(RTLD_NEXT, #name);                                           \
        return next arguments;                                                                   \
    }

/* ---- memory: dlsym itself allocates, so these call glibc's own names ------------------- */

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);

#define ALLOCATE(name, parameters, arguments)                                                    \
    void *name parameters                                                                        \
    {                                                                                            \
        static struct calls calls = {#name, 0, NULL};                                            \
        const int error = fault(&calls);                                                         \
        if (error == 0)                                                                          \
            return __libc_##name arguments;                                                      \
        errno = error;                                                                           \
        return NULL;                                                                             \
    }

ALLOCATE(malloc, (size_t size), (size))
ALLOCATE(calloc, (size_t count, size_t size), (count, size))
ALLOCATE(realloc, (void *old, size_t size), (old, size))

WRAP(void *, mmap, MAP_FAILED, (void *at, size_t size, int prot, int flags, int fd, off_t offset),
     (at, size, prot, flags, fd, offset))
WRAP(void *, mmap64, MAP_FAILED,
     (void *at, size_t size, int prot, int flags, int fd, off64_t offset),
     (at, size, prot, flags, fd, offset))

/* ---- files ---------------------------------------------------------------------------------- */

/* These functions return their error and do not set errno. */
#define FALLOCATE(name, offset_type)                                                             \
    int name(int fd, offset_type offset, offset_type size)                                       \
    {                                                                                            \
        static int (*next)(int, offset_type, offset_type);                                       \
        static struct calls calls = {#name, 0, NULL};                                            \
        const int error = fault(&calls);                                                         \
        if (error != 0)                                                                          \
            return error;                                                                        \
        if (next == NULL)                                                                        \
            *(void **)&next = dlsym(RTLD_NEXT, #name);                                           \
        return next(fd, offset, size);                                                           \
    }

FALLOCATE(posix_fallocate, off_t)
FALLOCATE(posix_fallocate64, off64_t)

/* Always read a mode. If the caller did not pass one, the kernel ignores the value. */
#define OPEN(name)                                                                               \
    int name(const char *path, int flags, ...)                                                   \
    {                                                                                            \
        static int (*next)(const char *, int, ...);                                              \
        static struct calls calls = {#name, 0, NULL};                                            \
        va_list rest;                                                                            \
        va_start(rest, flags);                                                                   \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;            \
        va_end(rest);                                                                            \
        const int error = fault(&calls);                                                         \
        if (error != 0) {                                                                        \
            errno = error;                                                                       \
            return -1;                                                                           \
        }                                                                                        \
        if (next == NULL)                                                                        \
            *(void **)&next = dlsym(RTLD_NEXT, #name);                                           \
        return next(path, flags, mode);                                                          \
    }

OPEN(open)
OPEN(open64)

int openat(int directory, const char *path, int flags, ...)
{
    static int (*next)(int, const char *, int, ...);
    static struct calls calls = {"openat", 0, NULL};
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    const int error = fault(&calls);
    if (error != 0) {
        errno = error;
        return -1;
    }
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "openat");
    return next(directory, path, flags, mode);
}

WRAP(int, fallocate, -1, (int fd, int mode, off_t offset, off_t size), (fd, mode, offset, size))
WRAP(int, shm_open, -1, (const char *name, int flags, mode_t mode), (name, flags, mode))
WRAP(int, ftruncate, -1, (int fd, off_t size), (fd, size))
WRAP(int, ftruncate64, -1, (int fd, off64_t size), (fd, size))
WRAP(int, rename, -1, (const char *from, const char *to), (from, to))
WRAP(int, renameat, -1, (int from_at, const char *from, int to_at, const char *to),
     (from_at, from, to_at, to))
WRAP(int, unlink, -1, (const char *path), (path))
WRAP(int, fchmod, -1, (int fd, mode_t mode), (fd, mode))
WRAP(int, chmod, -1, (const char *path, mode_t mode), (path, mode))
WRAP(int, fsync, -1, (int fd), (fd))
WRAP(int, fdatasync, -1, (int fd), (fd))
WRAP(ssize_t, read, -1, (int fd, void *bytes, size_t size), (fd, bytes, size))
WRAP(ssize_t, write, -1, (int fd, const void *bytes, size_t size), (fd, bytes, size))
WRAP(ssize_t, pwrite, -1, (int fd, const void *bytes, size_t size, off_t at),
     (fd, bytes, size, at))
WRAP(ssize_t, pwrite64, -1, (int fd, const void *bytes, size_t size, off64_t at),
     (fd, bytes, size, at))

/* ---- descriptors, sockets, threads ---------------------------------------------------------- */

WRAP(int, pipe2, -1, (int fds[2], int flags), (fds, flags))
WRAP(int, eventfd, -1, (unsigned count, int flags), (count, flags))
WRAP(int, epoll_create1, -1, (int flags), (flags))
WRAP(int, epoll_ctl, -1, (int epoll, int op, int fd, struct epoll_event *event),
     (epoll, op, fd, event))
WRAP(int, socket, -1, (int domain, int type, int protocol), (domain, type, protocol))
WRAP(int, bind, -1, (int fd, const struct sockaddr *at, socklen_t size), (fd, at, size))
WRAP(int, listen, -1, (int fd, int backlog), (fd, backlog))
WRAP(int, accept4, -1, (int fd, struct sockaddr *peer, socklen_t *size, int flags),
     (fd, peer, size, flags))
WRAP(ssize_t, send, -1, (int fd, const void *bytes, size_t size, int flags),
     (fd, bytes, size, flags))
WRAP(ssize_t, recv, -1, (int fd, void *bytes, size_t size, int flags), (fd, bytes, size, flags))
WRAP(int, poll, -1, (struct pollfd * fds, nfds_t count, int timeout), (fds, count, timeout))
WRAP(int, timerfd_create, -1, (int clock, int flags), (clock, flags))
WRAP(int, timerfd_settime, -1,
     (int timer, int flags, const struct itimerspec *at, struct itimerspec *before),
     (timer, flags, at, before))
WRAP(int, epoll_wait, -1, (int epoll, struct epoll_event *events, int most, int timeout),
     (epoll, events, most, timeout))

/* This function returns its error and does not set errno. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *argument)
{
    static int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    static struct calls calls = {"pthread_create", 0, NULL};
    const int error = fault(&calls);
    if (error != 0)
        return error;
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
    return next(thread, attributes, run, argument);
}

/* group_commit.c - the thread that writes the WAL buffer to disk. It never takes Python's GIL.
 *
 * All frames that were appended while the last sync ran form the next group. A group is written
 * over zeros that were written shortly before, so that a commit changes no file metadata. The first
 * failed system call stops the thread for good: after a failed sync the content of the disk is
 * unknown, and a retry would hide that. The next start ends the segment and begins a new one. All
 * system calls on files go through struct pg_storage. */
#define _GNU_SOURCE
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/hash.h"
#include "core/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define SLICE 1048576u               /* number of zero bytes per write */
#define PAGE 4096u                   /* page of the page cache; not less than a disk sector */
#define NAME_BYTES 32
#define NEW "segment.new"            /* name of the next segment until its header is written */

struct pg_group_commit {
    struct pg_storage storage;
    struct pg_arena *arena;
    struct pg_wal_buffer *wal_buffer;
    uint64_t position;               /* WAL buffer position; all frames before it are on disk */
    uint64_t lsn;                    /* LSN of the newest frame on disk */
    uint64_t group;                  /* number of the newest group on disk */
    uint64_t at;                     /* offset of the next group in the open segment */
    uint64_t zeros;                  /* zeros have been written up to this offset */
    uint64_t end;                    /* size of the open segment */
    uint32_t salt;                   /* salt of the open segment */
    int directory, file;             /* descriptors, -1 = none; `file` is the open segment */
    uint64_t wal_segment_bytes;      /* size of later segments */
    enum pg_storage_call call;       /* the system call that failed last, and its errno */
    int error;
    int wake, moved;                 /* eventfds: wakes the thread; reports commits to the daemon */
    atomic_bool kicked, stopping;
    /* WAL buffer position up to which the daemon has requested a commit. Later frames, such as
     * REPLIED records, wait for the next request, so that they cost no sync of their own. */
    uint64_t requested;
    /* `pauses`: number of requests to pause or to continue; odd = the last request is to pause.
     * `paused`: the value that `pauses` had when the thread last began to pause. */
    atomic_uint pauses, paused;
    bool threaded;
    pthread_t thread;
    _Alignas(8) uint8_t buffer[PG_GROUP_MAX];
    uint8_t blank[SLICE];            /* zeros */
};

uint64_t pg_group_commit_bytes(void) { return sizeof(struct pg_group_commit); }

/* ---- the system's storage ------------------------------------------------------------------ */

static int system_open(void *context, int directory, const char *name, int flags)
{
    (void)context;
    return openat(directory < 0 ? AT_FDCWD : directory, name, flags | O_CLOEXEC, 0640);
}

static int64_t system_pwrite(void *context, int file, const void *bytes, uint64_t count,
                             uint64_t at)
{
    (void)context;
    return pwrite(file, bytes, count, (off_t)at);
}

/* If the file system cannot preallocate, space is allocated when the zeros are written. */
static int system_fallocate(void *context, int file, uint64_t bytes)
{
    int result = fallocate(file, 0, 0, (off_t)bytes);
    (void)context;
    return result < 0 && errno == EOPNOTSUPP ? 0 : result;
}

static int system_fdatasync(void *context, int file)
{
    (void)context;
    return fdatasync(file);
}

static int system_rename(void *context, int directory, const char *from, const char *to)
{
    (void)context;
    return renameat(directory, from, directory, to);
}

static int system_fsync_dir(void *context, int directory)
{
    (void)context;
    return fsync(directory);
}

static int system_close(void *context, int file)
{
    (void)context;
    return close(file);
}

static int64_t system_clock_ns(void *context)
{
    struct timespec t;
    (void)context;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

static const struct pg_storage system_storage = {
    NULL, system_open, system_pwrite, system_fallocate, system_fdatasync, system_rename,
    system_fsync_dir, system_close, system_clock_ns};

/* ---- calls whose failure is recorded ------------------------------------------------------- */

static bool failed(struct pg_group_commit *c, enum pg_storage_call call, int error)
{
    c->call = call;
    c->error = error;
    return false;
}

/* Repeat a system call that a signal interrupted. An interrupted call has had no effect. */
#define UNINTERRUPTED(result, expression)                                                  \
    do                                                                                     \
        (result) = (expression);                                                           \
    while ((result) < 0 && errno == EINTR)

static bool open_file(struct pg_group_commit *c, int *file, int directory, const char *name,
                      int flags)
{
    UNINTERRUPTED(*file, c->storage.open(c->storage.context, directory, name, flags));
    return *file >= 0 || failed(c, PG_CALL_OPEN, errno);
}

static void close_file(struct pg_group_commit *c, int *file)
{
    if (*file >= 0)
        /* A failed close loses nothing, because all data was synced before. */
        c->storage.close(c->storage.context, *file);
    *file = -1;
}

static bool write_all(struct pg_group_commit *c, int file, const void *bytes, uint64_t count,
                      uint64_t at)
{
    const uint8_t *from = bytes;
    int64_t done;

    for (; count > 0; count -= (uint64_t)done, from += done, at += (uint64_t)done) {
        UNINTERRUPTED(done, c->storage.pwrite(c->storage.context, file, from, count, at));
        if (done <= 0)
            return failed(c, PG_CALL_WRITE, done < 0 ? errno : EIO);
    }
    return true;
}

static bool write_zeros(struct pg_group_commit *c, int file, uint64_t from, uint64_t upto)
{
    for (uint64_t count; from < upto; from += count) {
        count = upto - from < SLICE ? upto - from : SLICE;
        if (!write_all(c, file, c->blank, count, from))
            return false;
    }
    return true;
}

static bool sync_file(struct pg_group_commit *c, int file)
{
    int result;
    UNINTERRUPTED(result, c->storage.fdatasync(c->storage.context, file));
    return result == 0 || failed(c, PG_CALL_SYNC, errno);
}

static bool sync_directory(struct pg_group_commit *c)
{
    int result;
    UNINTERRUPTED(result, c->storage.fsync_dir(c->storage.context, c->directory));
    return result == 0 || failed(c, PG_CALL_SYNC_DIR, errno);
}

/* ---- segments -------------------------------------------------------------------------------- */

static void name_of(uint64_t first_lsn, char name[NAME_BYTES])
{
    snprintf(name, NAME_BYTES, "%016" PRIx64 ".wal", first_lsn);
}

/* Keep at least one slice of zeros after the start of the next group. A call writes at most two
 * slices, so that no commit waits long. */
static bool zeros_keep_ahead(struct pg_group_commit *c)
{
    uint64_t from = c->zeros > c->at ? c->zeros : c->at;
    uint64_t upto = c->at + 2 * SLICE < c->end ? c->at + 2 * SLICE : c->end;

    if (from >= c->end || from >= c->at + SLICE)
        return true;
    if (!write_zeros(c, c->file, from, upto) || !sync_file(c, c->file))
        return false;
    c->zeros = upto;
    return true;
}

/* Return the arena's clock and set *wall_ns to the wall clock: the values that the daemon read
 * last. */
static int64_t clocks(const struct pg_group_commit *c, int64_t *wall_ns)
{
    const struct pg_header *h = c->arena->header;
    int64_t boot_ns = LOAD_RELAXED(&h->now_ns);

    *wall_ns = boot_ns + LOAD_RELAXED(&h->wall_offset_ns);
    return boot_ns;
}

static struct pg_wal_segment header_of(const struct pg_group_commit *c)
{
    const struct pg_header *h = c->arena->header;
    struct pg_wal_segment s = {
        .magic = PG_WAL_SEGMENT_MAGIC, .epoch = h->epoch, .first_lsn = c->lsn + 1,
        .first_group = c->group + 1, .bytes = c->wal_segment_bytes, .clock_kind = h->clock_kind};

    if (s.first_lsn == 1 && c->wal_buffer->began_empty)
        s.flags = PG_WAL_BEGAN_EMPTY;
    s.boot_ns = clocks(c, &s.wall_ns);
    memcpy(s.uuid, h->uuid, sizeof s.uuid);
    memcpy(s.boot_id, h->boot_id, sizeof s.boot_id);
    s.salt = (uint32_t)keyed_hash(c->arena->secret->secret, h->epoch, &s.first_lsn,
                                  sizeof s.first_lsn);
    return s;
}

static bool new_file(struct pg_group_commit *c)
{
    int result;

    if (!open_file(c, &c->file, c->directory, NEW, O_RDWR | O_CREAT | O_TRUNC))
        return false;
    UNINTERRUPTED(result, c->storage.fallocate(c->storage.context, c->file, c->wal_segment_bytes));
    return result == 0 || failed(c, PG_CALL_FALLOCATE, errno);
}

static bool new_file_joins(struct pg_group_commit *c, uint64_t first_lsn)
{
    char name[NAME_BYTES];
    int result;

    name_of(first_lsn, name);
    UNINTERRUPTED(result, c->storage.rename(c->storage.context, c->directory, NEW, name));
    return result == 0 ? sync_directory(c) : failed(c, PG_CALL_RENAME, errno);
}

/* Begin a segment. The header is synced before the rename, so every file with the name of a segment
 * has a valid header. */
static bool segment_begin(struct pg_group_commit *c)
{
    struct pg_wal_segment fields = header_of(c);

    if (!new_file(c))
        return false;
    c->salt = fields.salt;
    c->at = c->zeros = PG_WAL_SEGMENT_HEAD;
    c->end = c->wal_segment_bytes;
    pg_wal_segment_begin(c->buffer, &fields);
    if (!write_all(c, c->file, c->buffer, PG_WAL_SEGMENT_HEAD, 0) || !zeros_keep_ahead(c) ||
        !new_file_joins(c, fields.first_lsn))
        return false;
    c->wal_buffer->segment = fields.first_lsn;
    return true;
}

/* End the open segment with a SEAL. Readers stop at the SEAL. A segment without a SEAL has no
 * successor. */
static bool segment_end(struct pg_group_commit *c)
{
    struct pg_frame_head seal;

    pg_wal_segment_end(&seal, c->salt, c->group, c->lsn);
    if (!write_all(c, c->file, &seal, sizeof seal, c->at) || !sync_file(c, c->file))
        return false;
    close_file(c, &c->file);
    return true;
}

/* Number of bytes left in the open segment, without the space reserved for its SEAL. */
static uint64_t segment_space(const struct pg_group_commit *c)
{
    uint64_t end = c->end - sizeof(struct pg_frame_head);
    return c->file < 0 || end < c->at ? 0 : end - c->at;
}

/* Make sure that the open segment has space for the longest frame. */
static bool segment_ready(struct pg_group_commit *c)
{
    if (segment_space(c) >= PG_GROUP_HEAD + PG_WAL_FRAME_MAX)
        return true;
    return (c->file < 0 || segment_end(c)) && segment_begin(c);
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* Remove the frames that the WAL files already contained before a restart. Return the number of
 * bytes left. */
static uint64_t drop_known(const struct pg_group_commit *c, uint8_t *frames, uint64_t bytes)
{
    uint64_t known = 0;

    while (known < bytes) {
        const struct pg_frame_head *f = (const void *)(frames + known);
        if (f->lsn > c->lsn)
            break;
        known += f->bytes;
    }
    if (known > 0)
        memmove(frames, frames + known, bytes - known);
    return bytes - known;
}

/* Copy the appended frames as one sealed group into c->buffer. Set *upto to the position up to
 * which frames were read, and *bytes to the size of the group. *bytes is 0 if all these frames are
 * already on disk. */
static bool group_collect(struct pg_group_commit *c, uint64_t *bytes, uint64_t *upto, uint64_t *lsn)
{
    uint8_t *frames = c->buffer + PG_GROUP_HEAD;
    uint64_t most = segment_space(c) < PG_GROUP_MAX ? segment_space(c) : PG_GROUP_MAX;
    const struct pg_header *h = c->arena->header;
    struct pg_wal_group fields = {.number = c->group + 1, .term = h->term};

    *lsn = c->lsn;
    *bytes = pg_wal_buffer_copy(c->arena, c->position, frames, most - PG_GROUP_HEAD, upto, lsn);
    *bytes = drop_known(c, frames, *bytes);
    if (*bytes == 0)
        return *upto != c->position || failed(c, PG_CALL_NONE, EUCLEAN);
    if (((struct pg_frame_head *)frames)->lsn != c->lsn + 1)
        return failed(c, PG_CALL_NONE, EUCLEAN);
    *bytes += PG_GROUP_HEAD;
    memcpy(fields.origin, h->boot_id, sizeof fields.origin);
    fields.boot_ns = clocks(c, &fields.wall_ns);
    pg_group_seal(c->buffer, *bytes, c->salt, &fields);
    return true;
}

static bool group_write(struct pg_group_commit *c, uint64_t bytes)
{
    struct pg_wal_buffer *s = c->wal_buffer;
    int64_t since_ns;

    if (!write_all(c, c->file, c->buffer, bytes, c->at))
        return false;
    since_ns = c->storage.clock_ns(c->storage.context);
    if (!sync_file(c, c->file))
        return false;
    s->sync_ns += (uint64_t)(c->storage.clock_ns(c->storage.context) - since_ns);
    s->syncs++;
    s->bytes += bytes;
    s->group = ++c->group;
    c->at += bytes;
    return true;
}

/* Publish a commit. After the two stores the committed frames may be acknowledged, and the daemon
 * may overwrite them in the ring. The release order puts both stores after the sync. */
static void committed(struct pg_group_commit *c, uint64_t position, uint64_t lsn)
{
    c->position = position;
    c->lsn = lsn;
    STORE_RELEASE(&c->wal_buffer->committed_lsn, lsn);
    STORE_RELEASE(&c->wal_buffer->committed, position);
    eventfd_write(c->moved, 1);
}

static bool commit(struct pg_group_commit *c)
{
    uint64_t bytes, upto, lsn;

    if (!segment_ready(c) || !group_collect(c, &bytes, &upto, &lsn) ||
        (bytes > 0 && !group_write(c, bytes)))
        return false;
    committed(c, upto, bytes > 0 ? lsn : c->lsn);
    return zeros_keep_ahead(c);
}

static void stop_for_good(struct pg_group_commit *c)
{
    struct pg_wal_buffer *s = c->wal_buffer;

    /* RUNNING may follow any state, because a killed daemon leaves RUNNING or STOPPED. */
    PG_ASSERT(LOAD_RELAXED(&s->state) == PG_WAL_RUNNING, "wal", "only a running WAL stops");
    s->call = c->call;
    s->error = (uint32_t)c->error;
    s->error_lsn = c->lsn + 1;
    STORE_RELEASE(&s->state, PG_WAL_STOPPED);
    eventfd_write(c->moved, 1);
}

int pg_group_commit_iterate(struct pg_group_commit *c)
{
    if (LOAD_RELAXED(&c->wal_buffer->state) != PG_WAL_RUNNING ||
        LOAD_ACQUIRE(&c->wal_buffer->tail) == c->position)
        return 0;
    if (!commit(c))
        stop_for_good(c);
    return 1;
}

/* ---- opening --------------------------------------------------------------------------------- */

static const char *const call_names[] = {
    [PG_CALL_NONE] = "WAL buffer", [PG_CALL_OPEN] = "open", [PG_CALL_FALLOCATE] = "fallocate",
    [PG_CALL_WRITE] = "pwrite", [PG_CALL_SYNC] = "fdatasync", [PG_CALL_RENAME] = "rename",
    [PG_CALL_SYNC_DIR] = "fsync of the directory"};

/* Check that the WAL files can belong to this arena. `end` is the reader's state after all files
 * were read. */
static bool fits(const struct pg_group_commit *c, const struct pg_walk *end, struct pg_fault *why)
{
    const struct pg_wal_buffer *s = c->wal_buffer;

    if (c->wal_segment_bytes < PG_WAL_SEGMENT_MIN ||
        c->wal_segment_bytes % PG_WAL_SEGMENT_HEAD != 0)
        return fault_set(why, "wal", "bytes of a WAL segment", 0, PG_WAL_SEGMENT_MIN,
                         c->wal_segment_bytes);
    if (end->state == PG_WALK_GROUPS || end->state == PG_WALK_DAMAGED)
        return fault_set(why, "wal", "state of the walk", end->at, PG_WALK_END, end->state);
    if (end->state != PG_WALK_NONE &&
        memcmp(end->header.uuid, c->arena->header->uuid, sizeof end->header.uuid) != 0)
        return fault_set(why, "wal", "the WAL belongs to another arena", 0, s->next_lsn, end->lsn);
    if (end->lsn < s->committed_lsn)
        return fault_set(why, "wal", "the files end before the last committed frame: LSN", 0,
                         s->committed_lsn, end->lsn);
    if (end->lsn >= s->next_lsn)
        return fault_set(why, "wal", "the files hold more frames than the arena: LSN", 0,
                         s->next_lsn - 1, end->lsn);
    return true;
}

/* Offset after the last confirmed group in the last segment. A group is confirmed if the arena's
 * committed_lsn covers it. */
static uint64_t confirmed_end(const struct pg_group_commit *c, const struct pg_walk *end)
{
    struct pg_walk w = {0};
    struct pg_fault why;

    if (!pg_walk_segment(&w, end->bytes, end->size, &why))
        return PG_WAL_SEGMENT_HEAD;
    while (w.lsn < c->wal_buffer->committed_lsn && pg_walk_next(&w) != NULL)
        w.next = w.at;
    return w.at;
}

/* End the last segment after its last whole group. After a failed sync, the page cache may treat
 * bytes as clean that are not on the disk. Therefore everything after the last confirmed group is
 * written again, together with the whole page in which that group ends. The SEAL is written after
 * the sync: a SEAL after a torn group would look like damage. A segment without a group is left
 * unchanged, because the next segment takes its name. */
static bool segment_leave(struct pg_group_commit *c, const struct pg_walk *end)
{
    uint64_t from = confirmed_end(c, end) / PAGE * PAGE;
    char name[NAME_BYTES];

    c->at = end->at;
    c->salt = end->header.salt;
    if (c->at == PG_WAL_SEGMENT_HEAD)
        return true;
    name_of(end->header.first_lsn, name);
    return open_file(c, &c->file, c->directory, name, O_RDWR) &&
           write_all(c, c->file, end->bytes + from, c->at - from, from) &&
           sync_file(c, c->file) && segment_end(c);
}

static bool resume(struct pg_group_commit *c, const struct pg_walk *end, const char *directory)
{
    struct pg_wal_buffer *s = c->wal_buffer;

    c->wake = eventfd(0, EFD_CLOEXEC);
    c->moved = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (c->wake < 0 || c->moved < 0)
        return failed(c, PG_CALL_OPEN, errno);
    if (!open_file(c, &c->directory, -1, directory, O_RDONLY | O_DIRECTORY))
        return false;
    if ((end->state != PG_WALK_NONE && !segment_leave(c, end)) || !segment_begin(c))
        return false;
    s->call = s->error = 0;
    s->error_lsn = 0;
    s->group = c->group;
    s->committed_lsn = c->lsn;
    STORE_RELEASE(&s->state, PG_WAL_RUNNING);
    while (pg_group_commit_iterate(c)) {}
    return s->state == PG_WAL_RUNNING;
}

/* True if no timer was ever armed, no watermark published, no key watched, no bulk load begun and
 * no cursor created. Names alone do not count. */
static bool holds_nothing(const struct pg_arena *a)
{
    const struct pg_header *h = a->header;
    bool used = h->next_ticket != h->shard * PG_TICKET_SHARD + 1 || h->replay_tail != 0;
    for (uint32_t row = 0; row < a->watermark_rows && !used; row++)
        used = watermark_at(a, row)->key_len != 0;
    for (uint32_t row = 0; row < a->bulk_load_rows && !used; row++)
        used = bulk_load_at(a, row)->state != PG_BULK_LOAD_NONE;
    for (uint32_t row = 0; row < a->cursor_rows && !used; row++)
        used = cursor_at(a, row)->state != PG_CURSOR_FREE;
    return !used;
}

int pg_group_commit_open(struct pg_group_commit *c, struct pg_arena *a, const char *directory,
                         uint64_t wal_segment_bytes, const struct pg_walk *end,
                         const struct pg_storage *storage, struct pg_fault *why)
{
    memset(c, 0, sizeof *c);
    *why = (struct pg_fault){0};
    c->directory = c->file = c->wake = c->moved = -1;
    c->storage = storage ? *storage : system_storage;
    c->arena = a;
    c->wal_buffer = a->wal_buffer;
    c->wal_segment_bytes = wal_segment_bytes;
    if (!c->wal_buffer)
        return fault_set(why, "wal", "bytes of the WAL buffer", 0, PG_WAL_BUFFER_MIN, 0);
    if (!fits(c, end, why))
        return 0;
    if (c->wal_buffer->next_lsn == 1)
        c->wal_buffer->began_empty = holds_nothing(a);
    c->position = c->wal_buffer->committed;
    c->lsn = end->lsn;
    c->group = end->group;
    if (resume(c, end, directory))
        return 1;
    pg_group_commit_close(c);
    return fault_set(why, "wal", call_names[c->call], c->lsn + 1, 0, (uint64_t)c->error);
}

void pg_group_commit_close(struct pg_group_commit *c)
{
    close_file(c, &c->file);
    close_file(c, &c->directory);
    if (c->wake >= 0)
        close(c->wake);
    if (c->moved >= 0)
        close(c->moved);
    c->wake = c->moved = -1;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void wait_for_kick(struct pg_group_commit *c)
{
    eventfd_t kicks;

    eventfd_read(c->wake, &kicks);
    /* Clear `kicked` before the WAL buffer is read, so that a later kick is not lost. */
    atomic_exchange(&c->kicked, false);
}

/* The last round commits all frames. */
static bool commit_is_requested(struct pg_group_commit *c, bool last)
{
    return last || LOAD_RELAXED(&c->requested) > c->position;
}

static bool pausing(const struct pg_group_commit *c) { return atomic_load(&c->pauses) % 2 != 0; }

int pg_group_commit_pausing(const struct pg_group_commit *c) { return pausing(c); }

/* Wait until no pause is requested. The daemon may request the next pause before the thread sees
 * that the current pause has ended, so each pause has its own number. */
static void wait_paused(struct pg_group_commit *c)
{
    unsigned pause;

    while ((pause = atomic_load(&c->pauses)) % 2 != 0) {
        atomic_store(&c->paused, pause);
        eventfd_write(c->moved, 1);
        wait_for_kick(c);
    }
}

static void *run(void *context)
{
    struct pg_group_commit *c = context;
    bool last;

    prctl(PR_SET_NAME, "group-commit");
    do {
        last = atomic_load(&c->stopping);
        while (!pausing(c) && commit_is_requested(c, last) && pg_group_commit_iterate(c)) {}
        if (pausing(c)) {
            wait_paused(c);
            last = false;            /* frames may have been appended during the pause */
        } else if (!last) {
            wait_for_kick(c);
        }
    } while (!last);
    return NULL;
}

int pg_group_commit_start(struct pg_group_commit *c, struct pg_fault *why)
{
    sigset_t all, before;
    int error;

    *why = (struct pg_fault){0};
    sigfillset(&all);                    /* only the daemon's main thread handles signals */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&c->thread, NULL, run, c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return fault_set(why, "wal", "pthread_create", 0, 0, (uint64_t)error);
    c->threaded = true;
    return 1;
}

void pg_group_commit_kick(struct pg_group_commit *c)
{
    STORE_RELAXED(&c->requested, c->wal_buffer->tail);   /* the exchange publishes it */
    if (!atomic_exchange(&c->kicked, true))
        eventfd_write(c->wake, 1);
}

int pg_group_commit_pause(struct pg_group_commit *c)
{
    if (!c->threaded)
        return 1;
    if (!pausing(c)) {
        atomic_fetch_add(&c->pauses, 1);
        pg_group_commit_kick(c);
    }
    return atomic_load(&c->paused) == atomic_load(&c->pauses);
}

void pg_group_commit_unpause(struct pg_group_commit *c)
{
    c->wal_buffer = c->arena->wal_buffer;
    atomic_fetch_add(&c->pauses, pausing(c));
    pg_group_commit_kick(c);
}

int pg_group_commit_fd(const struct pg_group_commit *c) { return c->moved; }

void pg_group_commit_stop(struct pg_group_commit *c)
{
    if (!c->threaded)
        return;
    atomic_store(&c->stopping, true);
    atomic_fetch_add(&c->pauses, pausing(c));
    pg_group_commit_kick(c);
    pthread_join(c->thread, NULL);
    c->threaded = false;
}

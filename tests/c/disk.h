/*
 * disk.h - a disk in memory behind struct pg_storage. Calls fail on request, and power can be cut.
 *
 * The state of unsynced data is uncertain: after a power cut each written sector, and the length of
 * the file, may be old or new. File creations and renames since the last sync of the directory may
 * be undone, the newest first.
 *
 * A failed sync leaves the same uncertainty and marks the page cache clean, as on Linux. Later
 * calls still see the written data, and the next sync succeeds without writing it.
 */
#ifndef PURGATORYD_DISK_H
#define PURGATORYD_DISK_H

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "check.h"
#include "core/core.h"

enum { SECTOR = 512, FILE_BYTES = PG_WAL_SEGMENT_MIN, SECTORS = FILE_BYTES / SECTOR, FILES = 192,
       NAMES = 160, HISTORY = 8, DIRECTORY = 1000 };

struct file {
    uint8_t *now, *durable;       /* FILE_BYTES bytes each; zeros after the file's length */
    uint64_t now_bytes, durable_bytes;
    bool dirty[SECTORS];
};

struct directory {
    struct {
        char name[32];
        int file;
    } rows[NAMES];
    unsigned count;
};

struct disk {
    struct rng rng;
    struct file files[FILES];
    unsigned file_count;
    struct directory history[HISTORY]; /* directory versions: history[0] is on the medium, calls see
                                          history[newest] */
    unsigned newest;
    bool clean_directory;         /* a directory sync failed, and the directory has not changed
                                     since then */
    uint64_t calls;               /* count of all calls so far */
    uint64_t fail_at;             /* the call fails with which `calls` becomes this; 0 = none */
    int fail_errno;               /* errno of the failing call; 0 = the call writes only a third of
                                     its bytes */
    bool full;                    /* disk_fallocate fails with ENOSPC */
    uint64_t dead_at;             /* calls fail once `calls` is at least this; 0 = never */
};

/* ---- failures ------------------------------------------------------------------------------- */

/* Count a call. Return true if it fails, with the reason in errno. */
static inline bool disk_fails(struct disk *d)
{
    d->calls++;
    errno = d->dead_at != 0 && d->calls >= d->dead_at ? ENODEV : d->fail_errno;
    return errno == ENODEV || (d->fail_at == d->calls && errno != 0);
}

static inline bool disk_is_dead(const struct disk *d)
{
    return d->dead_at != 0 && d->calls >= d->dead_at;
}

/* ---- the directory ------------------------------------------------------------------------ */

static inline struct directory *disk_directory(struct disk *d) { return &d->history[d->newest]; }

/* Begin a directory version that is not on the medium. If there are too many versions, the oldest
 * unsynced version reaches the medium. */
static inline struct directory *disk_changes_directory(struct disk *d)
{
    d->clean_directory = false;
    if (d->newest + 1 == HISTORY)
        memmove(d->history, d->history + 1, d->newest * sizeof d->history[0]);
    else
        d->newest++;
    d->history[d->newest] = d->history[d->newest - 1];
    return disk_directory(d);
}

static inline int disk_find(struct disk *d, const char *name)
{
    struct directory *dir = disk_directory(d);
    for (unsigned i = 0; i < dir->count; i++)
        if (strcmp(dir->rows[i].name, name) == 0)
            return (int)i;
    return -1;
}

static inline int disk_add(struct disk *d, const char *name, int file)
{
    struct directory *dir = disk_changes_directory(d);
    int row = disk_find(d, name);

    CHECK(strlen(name) < sizeof dir->rows[0].name && dir->count < NAMES);
    if (row < 0)
        row = (int)dir->count++;
    strcpy(dir->rows[row].name, name);
    dir->rows[row].file = file;
    return file;
}

static inline void disk_remove(struct directory *dir, int row)
{
    dir->rows[row] = dir->rows[--dir->count];
}

/* ---- the calls ---------------------------------------------------------------------------- */

static inline int disk_new_file(struct disk *d)
{
    struct file *f = &d->files[d->file_count];

    CHECK(d->file_count < FILES);
    *f = (struct file){.now = calloc(1, FILE_BYTES), .durable = calloc(1, FILE_BYTES)};
    CHECK(f->now != NULL && f->durable != NULL);
    return (int)d->file_count++;
}

static inline int disk_open(void *context, int directory, const char *name, int flags)
{
    struct disk *d = context;
    int row;

    if (disk_fails(d))
        return -1;
    if (directory < 0)
        return DIRECTORY;
    row = disk_find(d, name);
    if (row >= 0 && !(flags & O_TRUNC))
        return disk_directory(d)->rows[row].file;
    CHECK(flags & O_CREAT);
    return disk_add(d, name, disk_new_file(d));
}

static inline int64_t disk_pwrite(void *context, int file, const void *bytes, uint64_t count,
                                  uint64_t at)
{
    struct disk *d = context;
    struct file *f = &d->files[file];
    bool fails = disk_fails(d);

    if (fails && (!disk_is_dead(d) || d->calls > d->dead_at))
        return -1;
    if (fails || (d->fail_at == d->calls && count > 1))
        count = fails ? rng_below(&d->rng, count + 1) : 1 + count / 3;
    CHECK(at + count <= FILE_BYTES);
    memmove(f->now + at, bytes, count);   /* `bytes` may point into this file: recovery passes bytes
                                             that it read there */
    for (uint64_t s = at / SECTOR; s * SECTOR < at + count; s++)
        f->dirty[s] = true;
    f->now_bytes = f->now_bytes > at + count ? f->now_bytes : at + count;
    return fails ? -1 : (int64_t)count;
}

static inline int disk_fallocate(void *context, int file, uint64_t bytes)
{
    struct disk *d = context;

    if (disk_fails(d))
        return -1;
    CHECK(bytes == FILE_BYTES);
    if (d->full) {
        errno = ENOSPC;
        return -1;
    }
    d->files[file].now_bytes = bytes;
    return 0;
}

/* Mark a sector clean. If it is dirty and `written` is true, copy it to the medium first. */
static inline void disk_clean_sector(struct file *f, unsigned sector, bool written)
{
    if (f->dirty[sector] && written)
        memcpy(f->durable + sector * SECTOR, f->now + sector * SECTOR, SECTOR);
    f->dirty[sector] = false;
}

/* Return true if a failed sync marks the page cache clean. A sync that fails with EINTR or on a
 * dead disk leaves it dirty. */
static inline bool disk_loses(const struct disk *d)
{
    return errno != EINTR && !disk_is_dead(d);
}

static inline int disk_fdatasync(void *context, int file)
{
    struct disk *d = context;
    struct file *f = &d->files[file];
    bool fails = disk_fails(d);

    if (fails && !disk_loses(d))
        return -1;
    for (unsigned s = 0; s < SECTORS; s++)
        disk_clean_sector(f, s, !fails || rng_below(&d->rng, 2));
    if (fails) {
        errno = d->fail_errno;
        return -1;
    }
    f->durable_bytes = f->now_bytes;
    return 0;
}

static inline int disk_rename(void *context, int directory, const char *from, const char *to)
{
    struct disk *d = context;
    int row = disk_find(d, from);

    CHECK_EQUAL(directory, DIRECTORY);
    if (disk_fails(d))
        return -1;
    CHECK(row >= 0);
    disk_add(d, to, disk_directory(d)->rows[row].file);
    disk_remove(disk_directory(d), disk_find(d, from));
    return 0;
}

static inline int disk_fsync_dir(void *context, int directory)
{
    struct disk *d = context;

    CHECK_EQUAL(directory, DIRECTORY);
    if (disk_fails(d)) {
        d->clean_directory |= disk_loses(d);
        return -1;
    }
    if (d->clean_directory)
        return 0;
    d->history[0] = *disk_directory(d);
    d->newest = 0;
    return 0;
}

static inline int disk_close(void *context, int file)
{
    (void)file;
    return disk_fails(context) ? -1 : 0;
}

static inline int64_t disk_clock_ns(void *context) { return (int64_t)((struct disk *)context)->calls; }

static inline struct pg_storage disk_storage(struct disk *d)
{
    return (struct pg_storage){d, disk_open, disk_pwrite, disk_fallocate, disk_fdatasync,
                               disk_rename, disk_fsync_dir, disk_close, disk_clock_ns};
}

/* ---- power cuts and readers --------------------------------------------------------------- */

/* Drop the page cache of a file, so that calls see the medium. */
static inline void disk_forget(struct file *f)
{
    memset(f->durable + f->durable_bytes, 0, FILE_BYTES - f->durable_bytes);
    memcpy(f->now, f->durable, FILE_BYTES);
    f->now_bytes = f->durable_bytes;
}

/* Cut the power. A random part of the unsynced changes reaches the medium. */
static inline void disk_power_cut(struct disk *d)
{
    uint64_t retained_of_8 = rng_below(&d->rng, 9);

    d->history[0] = d->history[rng_below(&d->rng, d->newest + 1)];
    d->newest = 0;
    d->clean_directory = false;
    for (unsigned i = 0; i < d->file_count; i++) {
        struct file *f = &d->files[i];
        for (unsigned s = 0; s < SECTORS; s++)
            disk_clean_sector(f, s, rng_below(&d->rng, 8) < retained_of_8);
        if (rng_below(&d->rng, 2) == 0)
            f->durable_bytes = f->now_bytes;
        disk_forget(f);
    }
}

/* Write all dirty data to the medium, then let calls see the medium instead of the page cache. */
static inline void disk_read_medium(struct disk *d)
{
    for (unsigned i = 0; i < d->file_count; i++) {
        struct file *f = &d->files[i];
        for (unsigned s = 0; s < SECTORS; s++)
            disk_clean_sector(f, s, true);
        f->durable_bytes = f->now_bytes;
        disk_forget(f);
    }
}

static inline void disk_free(struct disk *d)
{
    for (unsigned i = 0; i < d->file_count; i++) {
        free(d->files[i].now);
        free(d->files[i].durable);
    }
}

#endif

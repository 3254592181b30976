/* wal.c - scenarios with the loop and the group-commit thread, which share the WAL buffer. A
 * replaced pthread_create only records the function of the product's group-commit thread; the
 * second thread of the model runs this function. Storage is in memory. */
#include "scenarios.h"

#include <errno.h>
#include <pthread.h>
#include <sys/eventfd.h>

#include "check.h"
#include "core/core.h"

enum { LAYOUT = 4711, FRAMES = 2, EXTRA = 8 };    /* EXTRA bytes make a frame 40 bytes long */

static struct pg_arena *a;
static struct pg_group_commit *commit;
static uint8_t *commit_before;
static uint64_t commit_shared;    /* number of bytes of `commit` before its buffers */
static void *(*thread_run)(void *);
static uint64_t on_disk;          /* LSN of the newest frame that has been written */
static uint64_t found_error, found_lsn;
static bool fails, settled;
static uint64_t ring_bytes;

/* ---- storage --------------------------------------------------------------------------------- */

static int fake_open(void *context, int directory, const char *name, int flags)
{
    (void)context, (void)directory, (void)name, (void)flags;
    return 1000;
}

static uint64_t word_for(uint64_t lsn, uint32_t n) { return lsn << 8 | n; }

/* Checks the frames of a group, which follow its GROUP frame. */
static int64_t fake_pwrite(void *context, int file, const void *bytes, uint64_t count, uint64_t at)
{
    const struct pg_frame_head *head = bytes;
    (void)context, (void)file, (void)at;
    if (head->type != PG_WAL_COMMIT_GROUP)
        return (int64_t)count;
    for (uint64_t from = head->bytes; from < count;) {
        const struct pg_frame_head *f = (const struct pg_frame_head *)((const uint8_t *)bytes + from);
        const uint64_t *body = (const uint64_t *)(f + 1);
        if (f->lsn != ++on_disk)
            model_fault("a group lacks a frame");
        for (uint32_t n = 0; n < (f->bytes - sizeof *f) / 8; n++)
            if (body[n] != word_for(f->lsn, n))
                model_fault("a frame is read before it is complete");
        from += f->bytes;
    }
    return (int64_t)count;
}

static int fake_fallocate(void *context, int file, uint64_t bytes)
{
    (void)context, (void)file, (void)bytes;
    return 0;
}

static int fake_fdatasync(void *context, int file)
{
    (void)context, (void)file;
    errno = 5;
    return fails && on_disk >= 2 ? -1 : 0;
}

static int fake_rename(void *context, int directory, const char *from, const char *to)
{
    (void)context, (void)directory, (void)from, (void)to;
    return 0;
}

static int fake_fsync_dir(void *context, int directory)
{
    (void)context, (void)directory;
    return 0;
}

static int fake_close(void *context, int file)
{
    (void)context, (void)file;
    return 0;
}

static int64_t fake_clock_ns(void *context)
{
    (void)context;
    return 0;
}

static const struct pg_storage storage = {
    NULL, fake_open, fake_pwrite, fake_fallocate, fake_fdatasync, fake_rename, fake_fsync_dir,
    fake_close, fake_clock_ns};

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *context);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *context)
{
    (void)thread, (void)attributes, (void)context;
    thread_run = run;
    return 0;
}

/* ---- set-up ---------------------------------------------------------------------------------- */

static void wal_make(void)
{
    const struct pg_config config = {
        .layout_id = LAYOUT, .payload_bytes = 4096, .replay_bytes_max = 2048, .tick_ns = 1000,
        .now_ns = 1000, .stream_id = 1, .secret = {1, 2}, .capacity = 2, .replay_capacity = 16,
        .fanout = 2, .namespaces = 2, .topics = 2, .sessions = 2, .watches = 4, .watermarks = 4,
        .accounts = 2, .inbox_max = 8, .wal_buffer_bytes = PG_WAL_BUFFER_MIN};
    const struct pg_walk none = {0};
    struct pg_fault why;
    void *arena = aligned_alloc(4096, pg_arena_bytes(&config));
    void *secret = aligned_alloc(4096, pg_private_bytes(&config));
    a = malloc(pg_handle_bytes());
    commit = aligned_alloc(64, (pg_group_commit_bytes() + 63) / 64 * 64);
    CHECK(arena != NULL && secret != NULL && a != NULL && commit != NULL);
    memset(arena, 0, pg_arena_bytes(&config));
    memset(secret, 0, pg_private_bytes(&config));
    CHECK(pg_create(a, arena, secret, &config));
    a->wal_buffer->size = ring_bytes;
    CHECK(pg_group_commit_open(commit, a, "", PG_WAL_SEGMENT_MIN, &none, &storage, &why));
    CHECK(pg_group_commit_start(commit, &why));
    commit_shared = pg_group_commit_bytes() - 2 * PG_GROUP_MAX;
    commit_before = malloc(commit_shared);
    CHECK(commit_before != NULL);
    memcpy(commit_before, commit, commit_shared);
    model_watch(arena, pg_arena_bytes(&config));
    model_watch(commit, commit_shared);
}

static void again(void)
{
    memcpy(commit, commit_before, commit_shared);
    on_disk = 0;
    found_error = found_lsn = 0;
    settled = false;
}

/* ---- the threads ----------------------------------------------------------------------------- */

/* Waits for the eventfd of the group commit, on which the daemon waits with epoll. */
static void wait_for_news(void)
{
    eventfd_t news;
    eventfd_read(pg_group_commit_fd(commit), &news);
}

/* Appends a frame, applies its effect, and completes the call, in the order in which the loop does
 * this. */
static void frame_append(void)
{
    const uint64_t lsn = a->wal_buffer->next_lsn;
    uint64_t *body = wal_frame_begin(a, PG_WAL_GONE, EXTRA);
    for (uint32_t n = 0; n < (frame_bytes(PG_WAL_GONE, EXTRA) - sizeof(struct pg_frame_head)) / 8; n++)
        body[n] = word_for(lsn, n);
    wal_frame_end(a);
    a->header->next_incarnation++;
    wal_buffer_settle(a);
    pg_group_commit_kick(commit);
}

/* Appends all frames. While the WAL buffer has no space, the daemon answers BUSY and the client
 * tries again. */
static void loop(void)
{
    struct pg_result r;
    for (uint32_t n = 0; n < FRAMES; n++) {
        while (!wal_buffer_admits(a, &r)) {
            if ((r.ticket & 0xff) == PG_ST_WAL)
                return;
            wait_for_news();
        }
        STORE_RELAXED(&a->header->now_ns, a->header->now_ns + 1);
        frame_append();
    }
    while (LOAD_ACQUIRE(&a->wal_buffer->committed_lsn) != FRAMES)
        wait_for_news();
    settled = true;
}

static void group_commit(void) { thread_run(commit); }

static void commit_end(void)
{
    if (!settled)
        model_fault("the loop waits for a commit, and the group-commit thread for a kick");
}

/* The ring has space for both frames, which are written in one group or in two. */
static void group_setup(void)
{
    ring_bytes = 256;
    wal_make();
}

const struct scenario group_scenario = {
    "group", group_setup, again, {loop, group_commit}, false, false, commit_end};

/* The second frame reuses the bytes of the first frame, after a PAD frame. */
static void reuse_setup(void)
{
    ring_bytes = 64;
    wal_make();
}

const struct scenario reuse_scenario = {
    "reuse", reuse_setup, again, {loop, group_commit}, false, false, commit_end};

/* A loop that does not check for free space. Its scenario must have a fault, which proves that
 * loop() needs the check. */
static void hasty_loop(void)
{
    for (uint32_t n = 0; n < FRAMES; n++)
        frame_append();
}

const struct scenario unasked_scenario = {
    "unasked", reuse_setup, again, {hasty_loop, group_commit}, false, false, NULL};

/* ---- a WAL that stops ------------------------------------------------------------------------ */

static void stopped_setup(void)
{
    fails = true;
    ring_bytes = 256;
    wal_make();
}

static void stopped_loop(void)
{
    struct pg_result r;
    for (uint32_t n = 0; n < 2; n++) {
        CHECK(wal_buffer_admits(a, &r));
        frame_append();
    }
    while (!wal_stopped(a))
        wait_for_news();
    found_error = a->wal_buffer->error;
    found_lsn = a->wal_buffer->error_lsn;
    settled = true;
}

static void stopped_end(void)
{
    if (!settled)
        model_fault("the loop is not notified that the WAL has stopped");
    else if (found_error != 5 || found_lsn == 0)
        model_fault("a stopped WAL has no error or no LSN");
}

const struct scenario stopped_scenario = {
    "stopped", stopped_setup, again, {stopped_loop, group_commit}, false, false, stopped_end};

/* Test group commit on a disk that loses power, and on a disk where any call may fail. Afterwards
 * all acknowledged frames are on disk, and the frames on disk are a prefix of the appended frames.
 * The optional argument is the number of power cuts; the seeds are the same in every run. */
#include "check.h"
#include "core/core.h"
#include "disk.h"

#include <time.h>

enum { RING = 1 << 19, LSNS = 16384, POWER_CUTS = 300 };

struct world {
    struct rng rng;
    struct disk disk;
    struct pg_storage storage;
    struct pg_arena arena;        /* only the fields that the group-commit thread reads are set */
    struct pg_header header;
    struct pg_private secret;
    struct pg_wal_buffer wal_buffer;
    _Alignas(8) uint8_t ring[RING];
    struct pg_frame_head *log[LSNS];   /* newest frame appended with each LSN */
    uint64_t acknowledged;        /* LSN of the last acknowledged frame */
    /* Give all frames the same length, so that a stale frame fits wherever a new frame ends. */
    bool uniform;
    struct pg_group_commit *c;
};

/* ---- a WAL buffer -------------------------------------------------------------------------- */

static void world_fresh_arena(struct world *w, uint64_t next_lsn)
{
    w->wal_buffer = (struct pg_wal_buffer){.size = RING, .next_lsn = next_lsn};
}

static struct world *world_new(uint64_t seed)
{
    struct world *w = calloc(1, sizeof *w);

    CHECK(w != NULL);
    w->rng.state = seed * 0x9e3779b97f4a7c15u + 1;
    w->disk.rng.state = rng_next(&w->rng);
    w->storage = disk_storage(&w->disk);
    w->arena.header = &w->header;
    w->arena.secret = &w->secret;
    w->arena.wal_buffer = &w->wal_buffer;
    w->arena.ring = w->ring;
    w->c = malloc(pg_group_commit_bytes());
    CHECK(w->c != NULL);
    world_fresh_arena(w, 1);
    return w;
}

static void world_free(struct world *w)
{
    disk_free(&w->disk);
    for (unsigned i = 0; i < LSNS; i++)
        free(w->log[i]);
    free(w->c);
    free(w);
}

static uint64_t random_bytes(struct world *w)
{
    uint64_t most = rng_below(&w->rng, 24) == 0 ? PG_WAL_FRAME_MAX : 800;
    return w->uniform ? 32 : most - 8 * rng_below(&w->rng, (most - 24) / 8);
}

/* Append a frame as the WAL buffer does, so that no frame wraps around. Return false if there is no
 * space. */
static bool append_one(struct world *w, uint64_t bytes)
{
    struct pg_wal_buffer *s = &w->wal_buffer;
    uint64_t left = RING - s->appended % RING, at = s->appended + (bytes <= left ? 0 : left);
    struct pg_frame_head *f = (struct pg_frame_head *)(w->ring + at % RING);

    if (at + bytes - s->committed > RING || s->next_lsn == LSNS)
        return false;
    if (bytes > left && left >= sizeof *f)
        *(struct pg_frame_head *)(w->ring + s->appended % RING) =
            (struct pg_frame_head){.bytes = (uint32_t)left, .type = PG_WAL_PAD};
    *f = (struct pg_frame_head){.bytes = (uint32_t)bytes, .lsn = s->next_lsn,
                                .type = (uint16_t)(PG_WAL_SEAL + 1 + s->next_lsn % 12)};
    for (uint64_t i = sizeof *f; i < bytes; i += 8)
        *(uint64_t *)((uint8_t *)f + i) = rng_next(&w->rng);
    free(w->log[f->lsn]);
    w->log[f->lsn] = malloc(bytes);
    CHECK(w->log[f->lsn] != NULL);
    memcpy(w->log[f->lsn], f, bytes);
    s->next_lsn++;
    s->appended = at + bytes;
    STORE_RELEASE(&s->tail, s->appended);
    return true;
}

static void append_some(struct world *w)
{
    for (uint64_t n = rng_below(&w->rng, w->uniform ? 64 : 12); n > 0; n--)
        append_one(w, random_bytes(w));
}

/* ---- content of the disk ------------------------------------------------------------------- */

/* Return the name of the first WAL segment that sorts after the name `after`; NULL = none. */
static const char *next_segment(struct disk *d, const char *after)
{
    struct directory *dir = disk_directory(d);
    const char *next = NULL;

    for (unsigned i = 0; i < dir->count; i++) {
        const char *name = dir->rows[i].name;
        if (strstr(name, ".wal") && strcmp(name, after) > 0 && (!next || strcmp(name, next) < 0))
            next = name;
    }
    return next;
}

static void same_as_appended(const struct world *w, const struct pg_frame_head *f)
{
    const struct pg_frame_head *appended = w->log[f->lsn];

    CHECK(f->lsn < LSNS && appended != NULL);
    CHECK_EQUAL(f->bytes, appended->bytes);
    CHECK_EQUAL(f->type, appended->type);
    CHECK(memcmp(f + 1, appended + 1, f->bytes - sizeof *f) == 0);
}

/* Read all segments. No segment may be refused, and no acknowledged frame may be missing. */
static struct pg_walk wal_read(struct world *w)
{
    struct pg_walk walk = {0};
    const struct pg_frame_head *f;
    struct pg_fault why;
    uint64_t lsn = 0;

    for (const char *name = next_segment(&w->disk, ""); name; name = next_segment(&w->disk, name)) {
        struct file *file = &w->disk.files[disk_directory(&w->disk)->rows[disk_find(&w->disk, name)].file];
        if (!pg_walk_segment(&walk, file->now, file->now_bytes, &why)) {
            fprintf(stderr, "%s: %s at %" PRIu64 ": expected %" PRIu64 ", found %" PRIu64 "\n", name,
                    why.detail, why.where, why.expected, why.found);
            CHECK(!"the segment is sound and goes on where the last one ended");
        }
        while ((f = pg_walk_next(&walk)) != NULL) {
            CHECK_EQUAL(f->lsn, ++lsn);
            same_as_appended(w, f);
        }
        CHECK(walk.state != PG_WALK_DAMAGED);
    }
    CHECK_EQUAL(walk.lsn, lsn);
    CHECK(lsn >= w->acknowledged);
    return walk;
}

static bool wal_open(struct world *w, struct pg_fault *why)
{
    struct pg_walk end = wal_read(w);
    bool opened = pg_group_commit_open(w->c, &w->arena, "dir", FILE_BYTES, &end, &w->storage, why);

    w->acknowledged = w->wal_buffer.committed_lsn;
    if (opened)
        CHECK_EQUAL(w->wal_buffer.committed_lsn, w->wal_buffer.next_lsn - 1);
    return opened;
}

static void work(struct world *w, unsigned iterations)
{
    for (; iterations > 0 && w->wal_buffer.state == PG_WAL_RUNNING; iterations--) {
        append_some(w);
        pg_group_commit_iterate(w->c);
        CHECK(w->wal_buffer.committed_lsn >= w->acknowledged);
        w->acknowledged = w->wal_buffer.committed_lsn;
    }
}

/* ---- power cuts and deaths ----------------------------------------------------------------- */

/* End the process at random by a kill, by a kill that also loses the arena, or by a power cut. */
static void fall(struct world *w)
{
    uint64_t depth = rng_below(&w->rng, 4);
    struct pg_walk end;

    w->disk.dead_at = w->disk.fail_at = 0;
    if (depth == 1)
        disk_read_medium(&w->disk);
    if (depth >= 2) {
        disk_power_cut(&w->disk);
        w->header.boot_id[0]++;
    }
    end = wal_read(w);
    if (depth >= 1) {
        w->acknowledged = end.lsn;
        world_fresh_arena(w, end.lsn + 1);
    }
}

/* Run one world with five power cuts. If `failures` is true, one storage call fails before each end
 * of the process. */
static void world_of_power_cuts(uint64_t seed, bool failures)
{
    struct world *w = world_new(seed);
    struct pg_fault why;
    bool opened;

    w->uniform = seed % 2;
    w->disk.fail_errno = EIO;
    for (unsigned round = 0; round < 5; round++) {
        w->disk.dead_at = w->disk.calls + 1 + rng_below(&w->rng, 1 + 8 * rng_below(&w->rng, 16));
        if (failures)
            w->disk.fail_at = w->disk.calls + 1 + rng_below(&w->rng, w->disk.dead_at - w->disk.calls);
        opened = wal_open(w, &why);
        if (opened)
            work(w, 60);
        CHECK(opened || w->disk.dead_at != 0);
        if (opened)
            pg_group_commit_close(w->c);
        fall(w);
    }
    CHECK(wal_open(w, &why));
    work(w, 3);
    CHECK_EQUAL(w->wal_buffer.state, PG_WAL_RUNNING);
    pg_group_commit_close(w->c);
    wal_read(w);
    world_free(w);
}

static unsigned power_cuts = POWER_CUTS;

static void test_power_cuts(void)
{
    for (unsigned seed = 1; seed <= power_cuts; seed++)
        world_of_power_cuts(seed, false);
    printf("%u seeds with five cuts each\n", power_cuts);
}

static void test_power_cuts_behind_a_failed_call(void)
{
    for (unsigned seed = 1; seed <= power_cuts; seed++)
        world_of_power_cuts(seed, true);
    printf("%u seeds with five cuts each, a failed call before each\n", power_cuts);
}

/* ---- failing calls ------------------------------------------------------------------------- */

/* Open the WAL, fill two segments and begin a third. */
static bool script(struct world *w, struct pg_fault *why)
{
    if (!wal_open(w, why))
        return false;
    for (unsigned i = 0; i < 12 && w->wal_buffer.state == PG_WAL_RUNNING; i++) {
        for (unsigned n = 0; n < 5; n++)
            append_one(w, 8192);
        work(w, 1);
    }
    while (pg_group_commit_iterate(w->c)) {}
    w->acknowledged = w->wal_buffer.committed_lsn;
    return true;
}

/* Check that the WAL has stopped, reports the failed call, error and LSN, and makes no further
 * call. */
static void stopped_well(struct world *w, int error)
{
    uint64_t calls = w->disk.calls, lsn = w->wal_buffer.committed_lsn;

    CHECK_EQUAL(w->wal_buffer.state, PG_WAL_STOPPED);
    CHECK_EQUAL(w->wal_buffer.error, error);
    CHECK(w->wal_buffer.call != PG_CALL_NONE);
    CHECK_EQUAL(w->wal_buffer.error_lsn, lsn + 1);
    append_one(w, 64);
    CHECK_EQUAL(pg_group_commit_iterate(w->c), 0);
    CHECK_EQUAL(w->disk.calls, calls);
    CHECK_EQUAL(w->wal_buffer.committed_lsn, lsn);
}

/* Check that all acknowledged frames survive on a disk where a call failed. */
static void acknowledged_is_there(struct world *w, bool with_arena)
{
    struct pg_fault why;

    if (with_arena) {
        CHECK(wal_open(w, &why));                /* the arena still has the frames that the disk
                                                    lacks */
        CHECK_EQUAL(w->wal_buffer.committed_lsn, w->wal_buffer.next_lsn - 1);
        w->acknowledged = w->wal_buffer.committed_lsn;
        disk_power_cut(&w->disk);
        wal_read(w);
        pg_group_commit_close(w->c);
    } else {
        disk_read_medium(&w->disk);
        wal_read(w);
    }
}

/* Run script() and let storage call number fail_at fail. Return false if script() makes fewer
 * calls. */
static bool script_failing(uint64_t fail_at, int error, bool with_arena, unsigned *stopped)
{
    struct world *w = world_new(fail_at);
    struct pg_fault why;
    bool harmless = error == EINTR || error == 0, reached, opened;

    w->disk.fail_at = fail_at;
    w->disk.fail_errno = error;
    opened = script(w, &why);
    reached = w->disk.calls >= fail_at;
    if (!opened) {
        CHECK_EQUAL(why.found, error);
    } else if (w->wal_buffer.state == PG_WAL_STOPPED) {
        stopped_well(w, error);
    } else {
        CHECK_EQUAL(w->wal_buffer.committed_lsn, w->wal_buffer.next_lsn - 1);
    }
    CHECK(!harmless || (opened && w->wal_buffer.state == PG_WAL_RUNNING));
    *stopped += !opened || w->wal_buffer.state == PG_WAL_STOPPED;
    w->disk.fail_at = 0;
    if (opened)
        pg_group_commit_close(w->c);
    acknowledged_is_there(w, with_arena);
    world_free(w);
    return reached;
}

static void test_every_call_fails(void)
{
    static const int errors[] = {EIO, ENOSPC, EINTR, 0};
    unsigned tried = 0, stopped = 0;

    for (unsigned e = 0; e < 8; e++)
        for (uint64_t n = 1; script_failing(n, errors[e % 4], e / 4, &stopped); n++)
            tried++;
    CHECK(tried > 100 && stopped > 50);
    printf("%u failing calls, %u of them stopped the WAL\n", tried, stopped);
}

/* A full disk does not stop the WAL until the open segment is full. If space is freed before the
 * segment is full, the WAL continues. */
static void test_full_disk(void)
{
    for (unsigned in_time = 0; in_time < 2; in_time++) {
        struct world *w = world_new(1 + in_time);
        struct pg_fault why;

        CHECK(wal_open(w, &why));
        w->disk.full = true;
        for (uint64_t bytes = 0; bytes < FILE_BYTES - PG_WAL_FRAME_MAX - 16384; bytes += 4096) {
            CHECK(append_one(w, 4096 - PG_GROUP_HEAD));
            CHECK(pg_group_commit_iterate(w->c));
            CHECK_EQUAL(w->wal_buffer.state, PG_WAL_RUNNING);
        }
        CHECK_EQUAL(w->wal_buffer.segment, 1);
        w->disk.full = !in_time;
        work(w, 20);
        if (in_time)
            CHECK(w->wal_buffer.segment > 1 && w->wal_buffer.state == PG_WAL_RUNNING);
        else
            stopped_well(w, ENOSPC);
        pg_group_commit_close(w->c);
        w->disk.full = false;
        CHECK(wal_open(w, &why));
        pg_group_commit_close(w->c);
        world_free(w);
    }
}

static void pause_thread(struct world *w)
{
    const struct timespec tick = {.tv_nsec = 1000000};
    unsigned ticks = 0;

    while (!pg_group_commit_pause(w->c)) {
        CHECK(ticks++ < 20000 && "the thread pauses");
        nanosleep(&tick, NULL);
    }
}

/* Request each pause while the thread may still be in the previous pause. */
static void test_a_pause_right_behind_a_pause(void)
{
    struct world *w = world_new(1);
    struct pg_fault why;

    CHECK(wal_open(w, &why));
    CHECK(pg_group_commit_start(w->c, &why));
    for (unsigned round = 0; round < 200; round++) {
        pause_thread(w);
        const uint64_t lsn = w->wal_buffer.committed_lsn;
        append_one(w, 64);
        pg_group_commit_kick(w->c);
        CHECK_EQUAL(w->wal_buffer.committed_lsn, lsn);
        pg_group_commit_unpause(w->c);
    }
    pg_group_commit_stop(w->c);
    CHECK_EQUAL(w->wal_buffer.committed_lsn, w->wal_buffer.next_lsn - 1);
    pg_group_commit_close(w->c);
    world_free(w);
}

/* Set by the main thread: the next sync appends a frame to this world. */
static _Atomic(struct world *) interrupted;
static int (*sync_of_disk)(void *context, int file);

static int sync_and_append(void *context, int file)
{
    struct world *w = atomic_exchange(&interrupted, NULL);
    CHECK(w == NULL || append_one(w, 64));
    return sync_of_disk(context, file);
}

/* A frame that is appended during a sync, without a request, gets no sync of its own. It is written
 * with the frames of the next request. */
static void test_a_frame_waits_for_a_request(void)
{
    const struct timespec tick = {.tv_nsec = 1000000}, long_enough = {.tv_nsec = 20000000};
    struct world *w = world_new(1);
    struct pg_fault why;

    sync_of_disk = w->storage.fdatasync;
    w->storage.fdatasync = sync_and_append;
    CHECK(wal_open(w, &why));
    const uint64_t groups = w->wal_buffer.group, lsn = w->wal_buffer.next_lsn;
    CHECK(pg_group_commit_start(w->c, &why));
    append_one(w, 64);
    atomic_store(&interrupted, w);
    pg_group_commit_kick(w->c);
    while (LOAD_ACQUIRE(&w->wal_buffer.committed_lsn) < lsn)
        nanosleep(&tick, NULL);
    nanosleep(&long_enough, NULL);
    pause_thread(w);
    CHECK_EQUAL(w->wal_buffer.committed_lsn, lsn);
    CHECK_EQUAL(w->wal_buffer.next_lsn, lsn + 2);
    append_one(w, 64);
    pg_group_commit_unpause(w->c);
    while (LOAD_ACQUIRE(&w->wal_buffer.committed_lsn) < lsn + 2)
        nanosleep(&tick, NULL);
    CHECK_EQUAL(w->wal_buffer.group, groups + 2);
    pg_group_commit_stop(w->c);
    pg_group_commit_close(w->c);
    world_free(w);
}

static uint32_t first_flags(struct world *w)
{
    const char *name = next_segment(&w->disk, "");
    CHECK(name != NULL);
    const uint64_t at = disk_directory(&w->disk)->rows[disk_find(&w->disk, name)].file;
    return ((const struct pg_wal_segment *)w->disk.files[at].now)->flags;
}

static uint32_t flags_of(const struct pg_header *header, uint64_t next_lsn)
{
    struct world *w = world_new(3);
    struct pg_watermark watched = {.key_len = header == NULL};
    struct pg_fault why;
    w->header = header != NULL ? *header : (struct pg_header){.next_ticket = 1};
    w->arena.watermarks = &watched;
    w->arena.watermark_rows = 1;
    w->wal_buffer.next_lsn = next_lsn;
    w->wal_buffer.committed_lsn = next_lsn - 1;
    const struct pg_walk end = {.lsn = next_lsn - 1};
    CHECK(pg_group_commit_open(w->c, &w->arena, "dir", FILE_BYTES, &end, &w->storage, &why));
    const uint32_t flags = first_flags(w);
    pg_group_commit_close(w->c);
    world_free(w);
    return flags;
}

/* The flag PG_WAL_BEGAN_EMPTY is set only in a segment that begins with LSN 1, and only if the
 * arena has no tickets, notices and watch keys. */
static void test_the_first_segment_says_whether_the_arena_held_nothing(void)
{
    const struct pg_header fresh = {.next_ticket = 1}, armed = {.next_ticket = 2};
    const struct pg_header shard = {.shard = 2, .next_ticket = 2 * PG_TICKET_SHARD + 1};
    const struct pg_header published = {.next_ticket = 1, .replay_tail = 1};
    CHECK_EQUAL(flags_of(&fresh, 1), PG_WAL_BEGAN_EMPTY);
    CHECK_EQUAL(flags_of(&shard, 1), PG_WAL_BEGAN_EMPTY);
    CHECK_EQUAL(flags_of(&fresh, 2), 0);
    CHECK_EQUAL(flags_of(&armed, 1), 0);
    CHECK_EQUAL(flags_of(&published, 1), 0);
    CHECK_EQUAL(flags_of(NULL, 1), 0);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        power_cuts = (unsigned)strtoul(argv[1], NULL, 10);
    RUN(test_power_cuts);
    RUN(test_power_cuts_behind_a_failed_call);
    RUN(test_every_call_fails);
    RUN(test_full_disk);
    RUN(test_a_pause_right_behind_a_pause);
    RUN(test_a_frame_waits_for_a_request);
    RUN(test_the_first_segment_says_whether_the_arena_held_nothing);
    return 0;
}

/* Each assertion of the core that fails ends the process before the next store. Its message names
 * the part and the broken invariant. */
#define _DEFAULT_SOURCE             /* defined for MAP_ANONYMOUS */
#include "check.h"
#include "core/core.h"
#include "core/state/jobs.h"
#include "core/state/members.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct pg_config config = {
    .layout_id = 1, .payload_bytes = 4096, .replay_bytes_max = 1024, .tick_ns = 1000000,
    .stream_id = 1, .secret = {1, 2}, .capacity = 8, .replay_capacity = 16, .fanout = 64,
    .namespaces = 1, .topics = 1, .sessions = 2, .watches = 8, .watermarks = 8,
    .accounts = 2, .bulk_loads = 1, .bulk_load_blocks = 2, .cursors = 2, .inbox_max = 8,
    .groups = 1, .jobs = 2,
    .clock_kind = PG_CLOCK_VIRTUAL, .wal_buffer_bytes = PG_WAL_BUFFER_MIN};

/* Memory of an arena, which all processes forked later share. */
static void *shared(uint64_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static struct pg_arena *arena_open(void)
{
    void *arena = aligned_alloc(4096, pg_arena_bytes(&config));
    void *secret = aligned_alloc(4096, pg_private_bytes(&config));
    struct pg_arena *a = malloc(pg_handle_bytes());
    CHECK(arena != NULL && secret != NULL && a != NULL);
    memset(arena, 0, pg_arena_bytes(&config));
    memset(secret, 0, pg_private_bytes(&config));
    CHECK(pg_create(a, arena, secret, &config));
    return a;
}

/* ---- actions that break an invariant ------------------------------------------------------- */

static void row_outside(struct pg_arena *a) { slot_hot(a, a->slots.capacity)->hash = 1; }
static void slot_twice(struct pg_arena *a) { slots_give(&a->slots, 0); }
static void slot_taken_outside(struct pg_arena *a)
{
    a->slots.free[a->slots.free[0]] = a->slots.capacity;
    slots_take(&a->slots);
}
static void slot_taken_in_use(struct pg_arena *a)
{
    slot_state_set(slot_hot(a, a->slots.free[a->slots.free[0]]), 1, PG_S_ARMED);
    slots_take(&a->slots);
}
static void outcome_of_a_free_slot(struct pg_arena *a)
{
    slot_state_set(slot_hot(a, 0), 1, PG_S_OUTCOME);
}
static void restored_over_a_timer(struct pg_arena *a)
{
    slot_state_set(slot_hot(a, 0), 1, PG_S_ARMED);
    slot_restore(slot_hot(a, 0), &(struct pg_hot){.ctl = ctl_of(2, PG_S_ARMED)});
}
static void bulk_load_dropped_twice(struct pg_arena *a)
{
    bulk_load_write(a, 0, &(struct pg_bulk_load){.state = PG_BULK_LOAD_OPEN});
    bulk_load_drop(a, 0);
    bulk_load_drop(a, 0);
}
static void blob_without_bytes(struct pg_arena *a) { blobs_take(&a->blobs, 0); }
static void blob_taken_outside(struct pg_arena *a)
{
    const uint32_t size = a->blobs.granules + 1;
    ((struct pg_blob_free *)blob_at(&a->blobs, 0))->size = size;
    blobs_take(&a->blobs, size);
}
static void blob_taken_in_use(struct pg_arena *a)
{
    a->blobs.map[0] |= 1;
    blobs_take(&a->blobs, 1);
}
static void blob_outside(struct pg_arena *a) { blobs_give(&a->blobs, a->blobs.granules, 1); }
static void blob_beyond_the_end(struct pg_arena *a)
{
    blobs_give(&a->blobs, a->blobs.granules - 1, 2);
}
static void blob_not_taken(struct pg_arena *a) { blobs_give(&a->blobs, 0, 1); }
static void chunks_used_up(struct pg_arena *a)
{
    a->wheel.free_chunks[0] = 0;
    wheel_place(&a->wheel, 0);
}
static void chunk_twice(struct pg_arena *a)
{
    wheel_place(&a->wheel, 0);
    a->wheel.free_chunks[0] = a->wheel.state->chunk_count;
    wheel_remove(&a->wheel, 0);
}
static void slot_in_no_bucket(struct pg_arena *a) { wheel_remove(&a->wheel, 1); }
static void slot_in_an_empty_bucket(struct pg_arena *a)
{
    wheel_place(&a->wheel, 0);
    a->wheel.buckets[slot_hot(a, 0)->bucket].count = 0;
    wheel_remove(&a->wheel, 0);
}
static void slot_outside_the_wheel(struct pg_arena *a)
{
    wheel_place(&a->wheel, a->wheel.capacity);
}
static void cell_outside(struct pg_arena *a)
{
    slot_hot(a, 0)->where = a->wheel.state->chunk_count * (PG_CHUNK_CELLS + 1);
    wheel_remove(&a->wheel, 0);
}
static void bucket_outside(struct pg_arena *a)
{
    wheel_place(&a->wheel, 0);
    slot_hot(a, 0)->bucket = UINT16_MAX - 1;
    wheel_remove(&a->wheel, 0);
}
static void slot_in_an_empty_backlog(struct pg_arena *a)
{
    backlog_push(&a->wheel, 0);
    a->wheel.backlogs[slot_hot(a, 0)->topic].count = 0;
    wheel_remove(&a->wheel, 0);
}
static void backlog_of_no_topic(struct pg_arena *a)
{
    slot_hot(a, 0)->topic = (uint16_t)a->wheel.topics;
    backlog_push(&a->wheel, 0);
}
static void blob_of_no_pool(struct pg_arena *a) { blob_at(&a->blobs, a->blobs.granules + 1); }
static void entry_of_a_slot(struct pg_arena *a) { replay_supersede(a, 0); }
static void reply_of_no_session(struct pg_arena *a)
{
    session_reply(a, a->sessions + a->secret->sessions, 0);
}
static void bits_of_no_block(struct pg_arena *a)
{
    bulk_load_block_copy(a, a->bulk_load_block_rows, a, 0);
}
static void name_outside(struct pg_arena *a)
{
    a->name_cells = 0;
    names_find_namespace(a, namespace_name(a, 0));
}
static void histogram_outside(struct pg_arena *a) { measure(a, PG_HISTOGRAMS, 1, 1); }
static void replay_buffer_full(struct pg_arena *a)
{
    a->header->replay_tail = a->header->replay_capacity;
    replay_append(a, &(struct pg_entry){0}, &(struct job_traits){0});
}
static void watches_used_up(struct pg_arena *a) { watches_take(a, watches_free(a) + 1); }
static void no_watch_at_all(struct pg_arena *a) { watches_take(a, 0); }
static void watch_twice(struct pg_arena *a) { watches_give(a, 0); }
static void watermark_twice(struct pg_arena *a) { watermark_free(a, 0); }
static void watermark_taken_in_use(struct pg_arena *a)
{
    struct pg_result why;
    a->call.watch_key_share = UINT32_MAX;
    watermark_at(a, a->purgatory->free_watermark)->key_len = 1;
    watermark_born(a, &(struct key){(const uint8_t *)"k", 0, 0, PG_NIL, 1, 0}, false, &why);
}
static void block_taken_in_use(struct pg_arena *a)
{
    bulk_load_block_at(a, a->state.free_bulk_load_block)->bulk_load = 1;
    bulk_load_mark(a, 0, PG_BULK_LOAD_BLOCK_ROWS);
}
static void block_given_back_in_use(struct pg_arena *a)
{
    bulk_load_block_at(a, 0)->bulk_load = 1;
    bulk_loads_init(a);
}
static void session_uncounted(struct pg_arena *a)
{
    struct pg_session *s = session_at(a, 0);
    account_session_opened(a, s->uid);
    account_session_ended(a, s);
}
static void session_with_results(struct pg_arena *a)
{
    struct pg_result why;
    static const uint8_t nonce[16];
    session_at(a, 0)->uid = 1;
    session_reply(a, session_at(a, 0), 0)->count = 1;
    session_open(a, nonce, 0, 0, 0, (struct name){0}, &why);
}
static void group_freed_with_jobs(struct pg_arena *a)
{
    group_at(a, 0)->jobs = 1;
    group_free(a, 0);
}
static void member_ends_with_jobs(struct pg_arena *a)
{
    member_at(a, 0)->held = 1;
    member_free(a, 0);
}
static void job_without_a_row(struct pg_arena *a)
{
    while (slots_take(&a->job_slots) != PG_NIL)
        continue;
    job_born_of_entry(a, 0, 0);
}
static void answer_without_a_check(struct pg_arena *a) { operation_answered_no(a, 0); }
static void ring_without_a_length(struct pg_arena *a)
{
    struct pg_ring_end end = {0};
    (void)a;
    pg_ring_take(&end, NULL);
}
static void ring_message_beyond_its_length(struct pg_arena *a)
{
    struct pg_ring_end end = {.size = PG_RING_HEAD, .length = PG_RING_UNIT};
    (void)a;
    pg_ring_peek(&end, NULL, PG_RING_UNIT + 1);
}
static void wal_buffer_full_of_frames(struct pg_arena *a)
{
    a->wal_buffer->appended = a->wal_buffer->tail = a->wal_buffer->size;
    wal_frame_begin(a, PG_WAL_GONE, 0);
}

/* A disk that does nothing, until a sync fails and the WAL's state changes meanwhile. */
static bool disk_fails;
static int disk_open(void *a, int directory, const char *name, int flags)
{
    (void)a, (void)directory, (void)name, (void)flags;
    return open("/dev/null", O_RDWR);
}
static int64_t disk_pwrite(void *a, int file, const void *bytes, uint64_t count, uint64_t at)
{
    (void)a, (void)file, (void)bytes, (void)at;
    return (int64_t)count;
}
static int disk_fallocate(void *a, int file, uint64_t bytes)
{
    (void)a, (void)file, (void)bytes;
    return 0;
}
static int disk_sync(void *a, int file)
{
    (void)file;
    if (disk_fails)
        ((struct pg_arena *)a)->wal_buffer->state = PG_WAL_NONE;
    return disk_fails ? -1 : 0;
}
static int disk_rename(void *a, int directory, const char *from, const char *to)
{
    (void)a, (void)directory, (void)from, (void)to;
    return 0;
}
static int disk_fsync_dir(void *a, int directory) { (void)a, (void)directory; return 0; }
static int64_t disk_clock(void *a) { (void)a; return 0; }
static void wal_stopped_twice(struct pg_arena *a)
{
    const struct pg_storage disk = {a, disk_open, disk_pwrite, disk_fallocate, disk_sync,
                                    disk_rename, disk_fsync_dir, disk_fsync_dir, disk_clock};
    const struct pg_walk none = {0};
    const struct pg_put put = {.namespace_name = "n", .namespace_len = 1, .topic_name = "",
                               .key = (const uint8_t *)"a", .key_len = 1,
                               .key_type = PG_KEY_BYTES, .time_ns = 1000000000};
    struct pg_result r;
    struct pg_fault why;
    struct pg_group_commit *c = aligned_alloc(64, (pg_group_commit_bytes() + 63) / 64 * 64);
    CHECK(pg_group_commit_open(c, a, "/", PG_WAL_SEGMENT_MIN, &none, &disk, &why));
    pg_put(a, &put, &r);
    disk_fails = true;
    pg_group_commit_iterate(c);
}

static void cursor_in_a_used_row(struct pg_arena *a)
{
    cursor_create(a, 0, 0, (struct name){"c", 1});
    cursor_create(a, 0, 0, (struct name){"d", 1});
}

static const struct {
    void (*act)(struct pg_arena *a);
    const char *message;
} breaches[] = {
    {row_outside, "slots: a row is inside its table"},
    {slot_twice, "slots: no slot is given back twice"},
    {slot_taken_outside, "slots: a taken slot is inside the table"},
    {slot_taken_in_use, "slots: a taken slot is free"},
    {outcome_of_a_free_slot, "slots: a slot's new state may follow its old state"},
    {restored_over_a_timer, "slots: redo writes to a free slot"},
    {bulk_load_dropped_twice, "bulk loads: a bulk load's new state may follow its old state"},
    {blob_without_bytes, "blobs: a blob has bytes"},
    {blob_taken_outside, "blobs: a taken blob is inside the pool"},
    {blob_taken_in_use, "blobs: the granules of a taken blob are free"},
    {blob_outside, "blobs: what is given back is inside the pool"},
    {blob_beyond_the_end, "blobs: what is given back is inside the pool"},
    {blob_not_taken, "blobs: a freed blob was allocated"},
    {chunks_used_up, "wheel: a free chunk is left"},
    {chunk_twice, "wheel: no chunk is given back twice"},
    {slot_in_no_bucket, "wheel: a slot is in the cell that it names"},
    {slot_in_an_empty_bucket, "wheel: a bucket that a slot leaves has members"},
    {slot_outside_the_wheel, "wheel: a slot is inside the table"},
    {cell_outside, "wheel: a cell is inside the chunks"},
    {bucket_outside, "wheel: a bucket is inside the wheel"},
    {slot_in_an_empty_backlog, "wheel: a backlog that a slot leaves has members"},
    {backlog_of_no_topic, "wheel: a backlog belongs to a topic"},
    {blob_of_no_pool, "blobs: a blob begins inside the pool"},
    {entry_of_a_slot, "replay buffer: an id names an entry"},
    {reply_of_no_session, "sessions: a reply belongs to a session"},
    {bits_of_no_block, "bulk loads: bits belong to a block"},
    {name_outside, "names: a cell is inside the index"},
    {histogram_outside, "histograms: an id names a histogram"},
    {group_freed_with_jobs, "groups: a group that is freed has no jobs"},
    {member_ends_with_jobs, "members: a member that ends holds no job"},
    {job_without_a_row, "jobs: the budget of a group has a row for each of its jobs"},
    {replay_buffer_full, "replay buffer: an entry has space"},
    {watches_used_up, "watches: so many records are free"},
    {no_watch_at_all, "watches: so many records are free"},
    {watch_twice, "watches: no record is given back twice"},
    {watermark_twice, "watermarks: no row is given back twice"},
    {watermark_taken_in_use, "watermarks: a taken row is free"},
    {cursor_in_a_used_row, "cursors: a row for a cursor is free"},
    {block_taken_in_use, "bulk loads: a taken block is free"},
    {block_given_back_in_use, "bulk loads: a block given back belongs to no bulk load"},
    {session_uncounted, "quotas: a session that ends was counted"},
    {session_with_results, "sessions: a taken row has no results"},
    {answer_without_a_check, "operations: an answered CHECK was sent before"},
    {wal_stopped_twice, "wal: only a running WAL stops"},
    {ring_without_a_length, "ring: a message is taken after its length was read"},
    {ring_message_beyond_its_length,
     "ring: the bytes of a message that are read are in the ring"},
    {wal_buffer_full_of_frames, "WAL buffer: a frame has space"},
};

/* ---- the tests ----------------------------------------------------------------------------- */

/* Run one action in a child process. Copy the child's stderr into `said` and return its wait
 * status. */
static int breach_run(size_t i, char said[256])
{
    int ends[2], status;
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        breaches[i].act(arena_open());
        _exit(0);
    }
    close(ends[1]);
    const ssize_t bytes = read(ends[0], said, 255);
    said[bytes < 0 ? 0 : bytes] = 0;
    close(ends[0]);
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static void a_broken_invariant_ends_the_process(void)
{
    for (size_t i = 0; i < sizeof breaches / sizeof *breaches; i++) {
        char said[256];
        const int status = breach_run(i, said);
        if (strstr(said, breaches[i].message) == NULL)
            fprintf(stderr, "breach %zu wrote: %s\n", i, said);
        CHECK(strstr(said, breaches[i].message) != NULL);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    }
}

/* If an assertion fails, the store that follows it is not executed. */
static void nothing_is_stored_after_an_assertion_failed(void)
{
    int status;
    uint32_t *free_ids = mmap(NULL, 64, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(free_ids != MAP_FAILED);
    free_ids[0] = 1, free_ids[1] = 0;
    const pid_t child = fork();
    if (child == 0) {
        struct slots s = {NULL, NULL, free_ids, 1};
        slots_give(&s, 0);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK_EQUAL(free_ids[0], 1);
    CHECK(munmap(free_ids, 64) == 0);
}

/* The process that put one timer fails in the middle of the second put. The arena that it leaves
 * behind can be rebuilt, and is whole. */
static void an_arena_is_rebuilt_after_an_assertion_failed(void)
{
    int status;
    struct pg_fault why;
    struct pg_result r;
    struct pg_put put = {.namespace_name = "n", .namespace_len = 1, .topic_name = "",
                         .key = (const uint8_t *)"a", .key_len = 1, .key_type = PG_KEY_BYTES,
                         .time_ns = 1000000000};
    void *arena = shared(pg_arena_bytes(&config)), *secret = shared(pg_private_bytes(&config));
    struct pg_arena *a = malloc(pg_handle_bytes());
    CHECK(a != NULL && pg_create(a, arena, secret, &config));
    const pid_t child = fork();
    if (child == 0) {
        pg_put(a, &put, &r);
        a->wheel.free_chunks[0] = 0;
        put.key = (const uint8_t *)"b", put.time_ns *= 1000;
        pg_put(a, &put, &r);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(pg_attach(a, arena, pg_arena_bytes(&config), secret, pg_private_bytes(&config),
                    config.layout_id, &why));
    CHECK(!pg_check(a, &why));
    CHECK(pg_rebuild(a, 0, &why));
    CHECK(pg_check(a, &why) && pg_check_live(a, &why));
    CHECK_EQUAL(pg_metrics_of(a)->live, 2);
    CHECK(munmap(arena, pg_arena_bytes(&config)) == 0);
    CHECK(munmap(secret, pg_private_bytes(&config)) == 0);
    free(a);
}

int main(void)
{
    RUN(a_broken_invariant_ends_the_process);
    RUN(nothing_is_stored_after_an_assertion_failed);
    RUN(an_arena_is_rebuilt_after_an_assertion_failed);
    return 0;
}

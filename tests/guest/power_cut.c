/* power_cut.c - the only process of a virtual machine whose power is cut again and again.
 *
 * At each boot it reads the WAL on its disk, reports the last LSN, and appends until the power is
 * cut. The console has one line per fact:
 *   unsynced LSN     content of a file that is written without a sync
 *   recovered LSN    last LSN of the WAL; all frames were checked
 *   ready            appending begins
 *   ack LSN          everything up to this LSN is on disk
 *   broken ...       a failure; no other line follows
 */
#define _GNU_SOURCE
#include "core/core.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { WAL_SEGMENT_BYTES = 1 << 20, PAYLOAD = 96, BATCH = 24, KEYS = 5000 };
#define DISK "/disk"
#define WAL DISK "/WAL"
#define UNSYNCED DISK "/unsynced"

static void broken(const char *subject, const char *detail, uint64_t number)
{
    printf("broken %s %s %" PRIu64 " errno %d\n", subject, detail, number, errno);
    fflush(stdout);
    for (;;)
        pause();
}

/* ---- the machine ---------------------------------------------------------------------------- */

static void *memory(uint64_t bytes)
{
    void *found = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (found == NULL)
        broken("memory", "", bytes);
    return memset(found, 0, bytes);
}

/* Load the kernel modules. The numbers in their names are in the order of their dependencies. */
static void modules_load(void)
{
    char path[32];
    for (unsigned i = 0;; i++) {
        snprintf(path, sizeof path, "/modules/%u", i);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0)
            return;
        if (syscall(SYS_finit_module, file, "", 0) != 0)
            broken("module", path, i);
        close(file);
    }
}

static void disk_mount(void)
{
    for (unsigned tries = 0; access("/dev/vda", F_OK) != 0; tries++) {
        if (tries == 1000)
            broken("disk", "/dev/vda", tries);
        usleep(10000);
    }
    if (mount("/dev/vda", DISK, "ext4", 0, "") != 0)
        broken("mount", DISK, 0);
    mkdir(WAL, 0755);
}

static void machine_start(void)
{
    mkdir("/dev", 0755);
    mkdir("/proc", 0755);
    mkdir(DISK, 0755);
    mount("dev", "/dev", "devtmpfs", 0, "");
    mount("proc", "/proc", "proc", 0, "");
    modules_load();
    disk_mount();
}

/* ---- the disk's content -------------------------------------------------------------------- */

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int is_segment(const struct dirent *entry)
{
    return strstr(entry->d_name, ".wal") != NULL;
}

static uint8_t *file_read(const char *name, uint64_t *bytes)
{
    char path[300];
    struct stat about;
    snprintf(path, sizeof path, "%s/%s", WAL, name);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &about) != 0)
        broken("open", path, 0);
    *bytes = (uint64_t)about.st_size;
    uint8_t *found = memory(*bytes + 1);
    if (read(file, found, *bytes) != about.st_size)
        broken("read", path, *bytes);
    close(file);
    return found;
}

/* Fill a payload with bytes that follow from the LSN of its frame, so that every byte can be
 * checked. */
static void payload_fill(uint8_t payload[PAYLOAD], uint64_t lsn)
{
    for (unsigned i = 0; i < PAYLOAD; i += 8) {
        uint64_t word = (lsn + i) * 0x9e3779b97f4a7c15u;
        memcpy(payload + i, &word, sizeof word);
    }
}

static void frame_check(const struct pg_frame_head *f)
{
    const struct pg_wal_arm *arm = (const void *)(f + 1);
    uint8_t expected[PAYLOAD];

    if (f->type != PG_WAL_ARM || arm->payload_len != PAYLOAD)
        return;
    payload_fill(expected, f->lsn);
    if (memcmp((const uint8_t *)(arm + 1) + arm->key_len, expected, PAYLOAD) != 0)
        broken("payload", "", f->lsn);
}

static struct pg_walk wal_read(void)
{
    static struct pg_walk walk;
    struct dirent **names;
    struct pg_fault why;
    const struct pg_frame_head *f;
    uint8_t *file = NULL;                  /* the last file stays in memory, because its end is
                                              written again */
    uint64_t bytes;
    int count = scandir(WAL, &names, is_segment, by_name);

    for (int i = 0; i < count; i++) {
        free(file);
        file = file_read(names[i]->d_name, &bytes);
        if (!pg_walk_segment(&walk, file, bytes, &why))
            broken(names[i]->d_name, why.detail, why.where);
        while ((f = pg_walk_next(&walk)) != NULL)
            frame_check(f);
        if (walk.state == PG_WALK_DAMAGED)
            broken(names[i]->d_name, "damaged", walk.lost_from);
    }
    return walk;
}

static uint64_t unsynced_read(void)
{
    uint64_t lsn = 0;
    int file = open(UNSYNCED, O_RDONLY | O_CLOEXEC);
    if (file >= 0 && read(file, &lsn, sizeof lsn) < 0)
        lsn = 0;
    close(file);
    return lsn;
}

/* ---- appending ----------------------------------------------------------------------------- */

static struct pg_arena *arena_make(uint64_t next_lsn)
{
    struct pg_config config = {
        .layout_id = 1, .payload_bytes = 1 << 22, .replay_bytes_max = 1 << 16, .now_ns = 1,
        .tick_ns = 1000000, .stream_id = 1, .secret = {next_lsn, 2}, .uuid = "power cut",
        .capacity = 2 * KEYS, .replay_capacity = 16, .fanout = 20, .namespaces = 1, .topics = 1,
        .sessions = 1, .watches = 8, .watermarks = 8, .inbox_max = 8, .shards = 1,
        .wal_buffer_bytes = PG_WAL_BUFFER_MIN, .clock_kind = PG_CLOCK_BOOT};
    struct pg_arena *a = memory(pg_handle_bytes());
    char boot_id[16] = "";
    int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);

    if (file < 0 || read(file, boot_id, sizeof boot_id) != sizeof boot_id)
        broken("boot id", "", 0);
    close(file);
    memcpy(config.boot_id, boot_id, sizeof boot_id);
    if (!pg_create(a, memory(pg_arena_bytes(&config)), memory(pg_private_bytes(&config)), &config))
        broken("arena", "", pg_arena_bytes(&config));
    pg_wal_buffer_of(a)->next_lsn = next_lsn;
    return a;
}

static void put(struct pg_arena *a, uint64_t n, uint32_t payload_len)
{
    uint64_t key = n % KEYS;
    uint8_t payload[PAYLOAD];
    struct pg_result result;
    struct pg_put p = {.namespace_name = "n", .topic_name = "t", .key = (const uint8_t *)&key,
                       .payload = payload, .payload_len = payload_len, .namespace_len = 1,
                       .topic_len = 1, .key_len = sizeof key, .key_type = PG_KEY_BYTES,
                       .mode = PG_MODE_REPLACE, .time_kind = PG_T_DELAY, .time_ns = INT64_MAX / 2};

    payload_fill(payload, pg_wal_buffer_of(a)->next_lsn);
    pg_put(a, &p, &result);
    if ((result.ticket & 0xff) >= PG_ST_FULL)
        broken("put", "status", result.ticket & 0xff);
}

static uint64_t wait_committed(struct pg_arena *a, struct pg_group_commit *c)
{
    const struct pg_wal_buffer *s = pg_wal_buffer_of(a);
    eventfd_t moves;

    while (LOAD_ACQUIRE(&s->committed_lsn) + 1 < s->next_lsn) {
        poll(&(struct pollfd){.fd = pg_group_commit_fd(c), .events = POLLIN}, 1, -1);
        eventfd_read(pg_group_commit_fd(c), &moves);
        if (LOAD_ACQUIRE(&s->state) != PG_WAL_RUNNING)
            broken("stopped", "", s->error);
    }
    return LOAD_ACQUIRE(&s->committed_lsn);
}

static void append(struct pg_arena *a, struct pg_group_commit *c)
{
    int unsynced = open(UNSYNCED, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    put(a, 0, 0);                          /* the first put also appends frames that create the
                                              namespace and the topic */
    printf("ready\n");
    for (uint64_t n = 1;; n++) {
        put(a, n, PAYLOAD);
        if (n % BATCH != 0)
            continue;
        pg_group_commit_kick(c);
        uint64_t lsn = wait_committed(a, c);
        if (pwrite(unsynced, &lsn, sizeof lsn, 0) != sizeof lsn)
            broken("write", UNSYNCED, lsn);
        printf("ack %" PRIu64 "\n", lsn);
    }
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    machine_start();
    struct pg_walk end = wal_read();
    printf("unsynced %" PRIu64 "\n", unsynced_read());
    printf("recovered %" PRIu64 "\n", end.lsn);
    struct pg_arena *a = arena_make(end.lsn + 1);
    struct pg_group_commit *c = memory(pg_group_commit_bytes());
    struct pg_fault why;
    if (!pg_group_commit_open(c, a, WAL, WAL_SEGMENT_BYTES, &end, NULL, &why) ||
        !pg_group_commit_start(c, &why))
        broken("group_commit", why.detail, why.found);
    append(a, c);
}

/* wal.c - fuzz target: a snapshot and a WAL segment with valid checksums and random records. Redo
 * may refuse these files. Otherwise it makes an arena that a rebuild accepts or refuses. No call
 * may access memory outside of its arguments or run forever. */

#include "fuzz.h"

enum { FILE_MAX = 1 << 16, ARENA_MAX = 1 << 22, FRAMES_MAX = 64, BODY_MAX = 600 };
enum flag { F_HEAD = 1, F_LAST = 2 };  /* with its flag, the input may damage the HEAD or LAST
                                          frame; without it, the frame is valid */

static struct file {
    _Alignas(8) uint8_t bytes[FILE_MAX];
    uint64_t used;                /* size of the file's only group in bytes */
    uint64_t frames;
} snapshot, segment;

static struct pg_arena *handle;

/* ---- making files -------------------------------------------------------------------------- */

static void *frame_add(struct file *f, uint16_t type, uint64_t body_bytes)
{
    struct pg_frame_head *head = (void *)(f->bytes + PG_WAL_SEGMENT_HEAD + f->used);
    const uint64_t whole = (sizeof *head + body_bytes + 7) / 8 * 8;
    memset(head, 0, whole);
    *head = (struct pg_frame_head){.bytes = (uint32_t)whole, .lsn = ++f->frames, .type = type};
    f->used += whole;
    return head + 1;
}

/* Add a HEAD frame that describes a small arena. With F_HEAD the input changes some bytes of the
 * frame. */
static void head_add(struct file *f, struct input *in, unsigned flags)
{
    uint8_t *body = frame_add(f, PG_WAL_HEAD, sizeof(struct pg_wal_head));
    const struct pg_config *c = &fuzz_config;
    const struct pg_wal_head head = {
        .payload_bytes = c->payload_bytes, .replay_bytes_max = c->replay_bytes_max,
        .wal_buffer_bytes = 0, .watermark_ttl_ns = c->watermark_ttl_ns, .inbox_max = c->inbox_max,
        .tick_ns = c->tick_ns, .next_ticket = 1000, .next_incarnation = 100,
        .replay_tail = take_byte(in), .published = take_byte(in), .start_lsn = 1,
        .capacity = c->capacity, .replay_capacity = c->replay_capacity, .fanout = c->fanout,
        .namespaces = c->namespaces, .topics = c->topics, .watches = c->watches,
        .watermarks = c->watermarks, .groups = c->groups, .jobs = c->jobs, .clock_kind = c->clock_kind, .shards = 1};
    memcpy(body, &head, sizeof head);
    for (unsigned patches = flags & F_HEAD ? take_byte(in) % 8 : 0; patches > 0; patches--) {
        const uint8_t at = take_byte(in);
        body[at % sizeof head] = take_byte(in);
    }
}

static void last_add(struct file *f)
{
    const struct pg_wal_last last = {.frames = f->frames, .start_lsn = 1};
    memcpy(frame_add(f, PG_WAL_LAST, sizeof last), &last, sizeof last);
}

/* Add frames until a LAST frame, or until the input ends. */
static void frames_add(struct file *f, struct input *in, unsigned flags)
{
    for (unsigned n = 0; n < FRAMES_MAX && in->at != in->end; n++) {
        const uint16_t type = PG_WAL_SEAL + 1 + take_byte(in) % (PG_WAL_TYPES - PG_WAL_SEAL - 1);
        if (type == PG_WAL_LAST && !(flags & F_LAST)) {
            last_add(f);
            return;
        }
        const uint64_t bytes = take_short(in) % BODY_MAX;
        take(in, frame_add(f, type, bytes), bytes);
        if (type == PG_WAL_LAST)
            return;
    }
}

static void file_begin(struct file *f, uint64_t magic)
{
    const struct pg_wal_segment header = {.magic = magic, .first_lsn = 1, .first_group = 1,
                                          .bytes = FILE_MAX, .salt = 7};
    pg_wal_segment_begin(f->bytes, &header);
    f->used = PG_GROUP_HEAD;
    f->frames = 0;
}

static void file_end(struct file *f)
{
    const struct pg_wal_group group = {.number = 1, .boot_ns = 5, .wall_ns = 6};
    uint8_t *begin = f->bytes + PG_WAL_SEGMENT_HEAD;
    if (f->frames > 0)
        pg_group_seal(begin, f->used, 7, &group);
    pg_wal_segment_end((void *)(begin + (f->frames > 0 ? f->used : 0)), 7, f->frames > 0,
                       f->frames);
}

/* ---- the target ------------------------------------------------------------------------------ */

/* Make the empty arena that the snapshot's HEAD describes. Return false if redo refuses the HEAD,
 * or if the arena is larger than ARENA_MAX. */
static bool arena_make(struct pg_config *c, void **arena, void **secret)
{
    const struct pg_frame_head *head =
        (void *)(snapshot.bytes + PG_WAL_SEGMENT_HEAD + PG_GROUP_HEAD);
    struct pg_fault why;
    *c = fuzz_config;
    if (!pg_redo_config(head, head->bytes, c, &why))
        return false;
    const uint64_t bytes = pg_arena_bytes(c), secret_bytes = pg_private_bytes(c);
    if (bytes == 0 || bytes > ARENA_MAX || secret_bytes > ARENA_MAX)
        return false;
    *arena = fuzz_memory(bytes);
    *secret = fuzz_memory(secret_bytes);
    return pg_create(handle, *arena, *secret, c);
}

static bool redone(struct file *f, struct pg_redo *redo)
{
    struct pg_walk walk = {0};
    struct pg_fault why;
    if (!pg_walk_segment(&walk, f->bytes, FILE_MAX, &why))
        abort();
    const bool done = pg_redo_file(handle, redo, &walk, &why);
    if (done && walk.state != PG_WALK_SEALED)
        abort();
    return done;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    struct pg_redo redo = {0};
    struct pg_config config;
    struct pg_fault why;
    void *arena = NULL, *secret = NULL;
    const unsigned flags = take_byte(&in);

    if (handle == NULL)
        handle = fuzz_memory(pg_handle_bytes());
    file_begin(&snapshot, PG_SNAPSHOT_MAGIC);
    head_add(&snapshot, &in, flags);
    frames_add(&snapshot, &in, flags);
    file_end(&snapshot);
    file_begin(&segment, PG_WAL_SEGMENT_MAGIC);
    frames_add(&segment, &in, flags | F_LAST);
    file_end(&segment);
    if (arena_make(&config, &arena, &secret) && redone(&snapshot, &redo) &&
        redone(&segment, &redo) && pg_redo_end(handle, &redo, 1000000000, 1, 0, 0, &why) &&
        pg_rebuild(handle, 1000000000, &why))
        pg_check(handle, &why);
    free(arena);
    free(secret);
    return 0;
}

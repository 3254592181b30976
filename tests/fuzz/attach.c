/* attach.c - fuzz target: an arena with changed bytes. Attach or rebuild may refuse the arena.
 * Otherwise the arena must be sound and stay sound, or pg_check must find the damage; a rebuild may
 * miss damage because it does not read every key. No call of daemon or readers may access memory
 * outside of the arena or run forever. */

#include "fuzz.h"

enum { PATCH_MAX = 8, MESSAGE = 1 << 14 };

struct image {
    uint8_t *arena, *secret;
    uint64_t arena_bytes, secret_bytes;
};

static struct image sound, patched;
static struct pg_arena *handle;
static uint8_t *buffer;

static struct image image_make(void)
{
    struct image i = {NULL, NULL, pg_arena_bytes(&fuzz_config), pg_private_bytes(&fuzz_config)};
    i.arena = fuzz_memory(i.arena_bytes);
    i.secret = fuzz_memory(i.secret_bytes);
    return i;
}

/* ---- an arena with content of every kind ----------------------------------------------------- */

static uint64_t handle_message(uint64_t len)
{
    uint64_t used;
    int64_t wait_ns;
    if (pg_handle(handle, buffer, len, 1, 1, 1, 1, buffer + MESSAGE, &used, &wait_ns) != PG_H_REPLY)
        abort();
    return used;
}

static uint64_t greeted(void)
{
    const struct pg_frame frame = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                                   .message = PG_M_HELLO};
    uint64_t session;
    memcpy(buffer, &frame, sizeof frame);
    memset(buffer + sizeof frame, 0, sizeof(struct pg_hello));
    handle_message(sizeof frame + sizeof(struct pg_hello));
    memcpy(&session, buffer + MESSAGE + offsetof(struct pg_frame, session), sizeof session);
    return session;
}

/* Arm operation `key` with a deadline in 4 ticks. It waits until a watch key's watermark reaches
 * 5. */
static void watch(uint64_t session, uint64_t sequence, uint8_t key, uint8_t watched)
{
    static const uint8_t names[8] = {1, 1, 'n', 't'};
    const struct pg_watch_key k = {.target = 5, .key_len = 1};
    const struct pg_record r = {.op = PG_OP_WATCH, .key_len = 1, .time_kind = PG_T_DELAY,
                                .flags = 1, .ext_len = sizeof k + 1,
                                .time_ns = 4 * FUZZ_TICK_NS};
    const struct pg_frame frame = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                                   .message = PG_M_BATCH, .session = session,
                                   .sequence = sequence, .count = 1, .names = 1,
                                   .names_bytes = sizeof names};
    uint8_t *at = buffer;
    at = (uint8_t *)memcpy(at, &frame, sizeof frame) + sizeof frame;
    at = (uint8_t *)memcpy(at, names, sizeof names) + sizeof names;
    at = (uint8_t *)memcpy(at, &r, sizeof r) + sizeof r;
    *at++ = key;
    at = (uint8_t *)memcpy(at, &k, sizeof k) + sizeof k;
    *at++ = watched;
    handle_message((uint64_t)(at - buffer));
}

static void put(uint8_t key, uint32_t payload_len, unsigned kind, int64_t time_ns)
{
    static const uint8_t payload[100];
    const struct pg_put p = {.namespace_name = "n", .topic_name = "t", .key = &key,
                             .payload = payload, .payload_len = payload_len,
                             .namespace_len = 1, .topic_len = 1, .key_len = 1,
                             .time_kind = (uint8_t)kind, .time_ns = time_ns};
    struct pg_result result;
    pg_put(handle, &p, &result);
    if ((result.ticket & 0xff) != PG_ST_ADDED)
        abort();
}

static void advance(int64_t now_ns)
{
    int more = 1;
    for (uint32_t i = 0; more && i < 100; i++) {
        pg_advance(handle, now_ns, 0, 1, 64, &more);
        pg_published(handle, handle->header->replay_tail, 0, 0);
    }
}

static void sound_make(void)
{
    sound = image_make();
    patched = image_make();
    handle = fuzz_memory(pg_handle_bytes());
    buffer = fuzz_memory(PG_MESSAGE_MAX + MESSAGE);
    if (!pg_create(handle, sound.arena, sound.secret, &fuzz_config))
        abort();
    const uint64_t session = greeted();
    for (uint8_t i = 0; i < 3; i++)
        put((uint8_t)('a' + i), i * 40u, PG_T_BOOT, (i + 1) * FUZZ_TICK_NS);
    watch(session, 1, 'x', 'k');
    watch(session, 2, 'y', 'l');
    put('d', 30, PG_T_WALL, 100 * FUZZ_TICK_NS);
    advance(2 * FUZZ_TICK_NS);
    watch(session, 3, 'z', 'k');
    advance(4 * FUZZ_TICK_NS);
    pg_set_state(handle, PG_READY, 1);
}

/* ---- the target ------------------------------------------------------------------------------ */

/* Apply one patch to an arena file. The input gives the file, the offset, the length and the
 * bytes. */
static void patch(struct image *i, struct input *in)
{
    uint8_t bytes[PATCH_MAX];
    const uint32_t where = (uint32_t)take_short(in) << 8 | take_byte(in);
    const uint8_t kind = take_byte(in);
    const uint64_t limit = kind & 0x80 ? i->secret_bytes : i->arena_bytes;
    const uint64_t at = where % limit, len = 1 + kind % PATCH_MAX;
    take(in, bytes, len);
    memcpy((kind & 0x80 ? i->secret : i->arena) + at, bytes,
           at + len > limit ? limit - at : len);
}

static void read_live(struct image *i)
{
    struct pg_fault why;
    uint64_t positions[16], lost, got;
    uint32_t cursor = 0;
    if (!pg_attach(handle, i->arena, i->arena_bytes, NULL, 0, FUZZ_LAYOUT, &why))
        return;
    pg_check_live(handle, &why);
    pg_scan(handle, &cursor, 64, buffer, PG_MESSAGE_MAX);
    const uint32_t ns = pg_find_namespace(handle, "n", 1);
    pg_find_topic(handle, ns, "t", 1);
    for (uint32_t topic = 0; topic < fuzz_config.topics; topic++)
        pg_replay(handle, topic, 1, 16, positions, buffer, PG_MESSAGE_MAX, &lost, &got);
}

static void rebuild(struct image *i)
{
    struct pg_fault why;
    if (!pg_attach(handle, i->arena, i->arena_bytes, i->secret, i->secret_bytes, FUZZ_LAYOUT,
                   &why) ||
        !pg_rebuild(handle, 4 * FUZZ_TICK_NS, &why))
        return;
    const bool is_whole = pg_check(handle, &why);
    advance(8 * FUZZ_TICK_NS);
    fuzz_expect(pg_check(handle, &why) || !is_whole, &why);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    if (sound.arena == NULL)
        sound_make();
    memcpy(patched.arena, sound.arena, sound.arena_bytes);
    memcpy(patched.secret, sound.secret, sound.secret_bytes);
    while (in.at != in.end)
        patch(&patched, &in);
    read_live(&patched);
    rebuild(&patched);
    return 0;
}

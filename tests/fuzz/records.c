/* records.c - fuzz target: messages of two clients to one arena, with advances and restarts between
 * them. The arena must be sound after each step. */

#include "arena.h"

#include "core/state/jobs.h"

enum step {
    S_ADVANCE, S_RAW, S_FRAMED, S_BATCH, S_QUERY, S_REPEAT, S_ACK, S_HELLO, S_BYE, S_REBUILD,
    S_READ, S_SWEEP, S_GROUP, S_DEAD, STEPS
};

enum { MESSAGE = 1 << 16, RECORDS_MAX = 8 };

static struct world {
    struct fuzz_arena f;
    uint8_t *buffer;
    uint8_t *last;                /* copy of the newest batch, to send it again */
    uint64_t last_len;
    uint64_t sessions[FUZZ_SESSIONS], sequences[FUZZ_SESSIONS];
    int64_t now_ns;
} world;

static void world_open(struct world *w)
{
    if (w->buffer == NULL)
        w->buffer = fuzz_memory(MESSAGE);
    free(w->last);
    w->last = NULL;
    w->last_len = 0;
    w->now_ns = 0;
    fuzz_arena_open(&w->f, &fuzz_config);
}

static void advance(struct world *w, int64_t by_ns, int64_t wall_offset_ns)
{
    int more = 1;
    w->now_ns += by_ns;
    for (uint32_t i = 0; more && i < 100; i++) {
        pg_advance(w->f.a, w->now_ns, wall_offset_ns, w->now_ns, 64, &more);
        pg_published(w->f.a, w->f.a->header->replay_tail, 0, 0);
    }
}

/* Handle a message in an allocation of exactly its size. If the message waits for a virtual time,
 * advance the clock to that time. Return the size of the reply. */
static uint64_t deliver(struct world *w, uint32_t uid, const uint8_t *bytes, uint64_t len)
{
    uint8_t *message = malloc(len + (len == 0));
    uint64_t used = 0;
    int64_t wait_ns;
    int state = PG_H_AGAIN;
    if (message == NULL)
        abort();
    memcpy(message, bytes, len);
    while (state == PG_H_AGAIN || (state == PG_H_WAIT && wait_ns - w->now_ns < 1ll << 40)) {
        if (state == PG_H_WAIT)
            advance(w, wait_ns - w->now_ns, 0);
        state = pg_handle(w->f.a, message, len, uid, 1, w->now_ns, w->now_ns, w->f.reply, &used,
                          &wait_ns);
    }
    free(message);
    return state == PG_H_REPLY ? used : 0;
}

static struct pg_frame frame_of(const struct world *w, uint32_t number, unsigned message)
{
    return (struct pg_frame){.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                             .message = (uint16_t)message, .session = w->sessions[number],
                             .sequence = w->sequences[number] + 1};
}

/* Set the session's sequence to the sequence of the batch that the daemon has answered. */
static void follow(struct world *w, uint32_t number, uint64_t reply_bytes)
{
    struct pg_frame reply;
    if (reply_bytes < sizeof reply)
        return;
    memcpy(&reply, w->f.reply, sizeof reply);
    if (reply.error == PG_ERR_NONE && reply.message == PG_M_BATCH)
        w->sequences[number] = reply.sequence;
}

static void greet(struct world *w, uint32_t number, uint8_t nonce)
{
    struct {
        struct pg_frame frame;
        struct pg_hello hello;
    } m = {.frame = frame_of(w, number, PG_M_HELLO), .hello = {.nonce = {nonce}}};
    struct pg_frame reply;
    struct pg_welcome welcome;
    m.frame.session = 0;
    if (deliver(w, number, (const uint8_t *)&m, sizeof m) != sizeof reply + sizeof welcome)
        return;
    memcpy(&welcome, w->f.reply + sizeof reply, sizeof welcome);
    w->sessions[number] = welcome.session;
    w->sequences[number] = welcome.last;
}

static void raw(struct world *w, struct input *in, uint32_t number)
{
    const uint64_t len = take_short(in) % MESSAGE;
    take(in, w->buffer, len);
    follow(w, number, deliver(w, number, w->buffer, len));
}

/* Send a valid frame head with random bytes after it. */
static void framed(struct world *w, struct input *in, uint32_t number)
{
    struct pg_frame frame = frame_of(w, number, take_byte(in) % (PG_M_ACK + 2));
    frame.count = take_byte(in);
    frame.names = take_byte(in);
    frame.names_bytes = take_byte(in);
    const uint64_t len = take_short(in) % (MESSAGE - sizeof frame);
    memcpy(w->buffer, &frame, sizeof frame);
    take(in, w->buffer + sizeof frame, len);
    follow(w, number, deliver(w, number, w->buffer, sizeof frame + len));
}

/* Write one of a few keys, so that different records use the same key. */
static uint8_t *key_write(struct input *in, uint8_t *at, uint8_t *len, uint8_t *type)
{
    const uint8_t choice = take_byte(in);
    *type = choice / 64 % PG_KEY_TYPES;
    *len = *type == PG_KEY_UUID ? 16 : choice % 64 == 63 ? PG_KEY_MAX : (uint8_t)(1 + choice % 3);
    memset(at, 'a' + choice % 5, *len);
    return at + *len;
}

static uint8_t *watch_keys_write(struct input *in, uint8_t *at, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        struct pg_watch_key k = {0};
        uint8_t *const head = at;
        k.target = take_byte(in);
        k.cap = take_byte(in) % 8;
        if (k.target == 255)
            k.target = UINT64_MAX;
        at = key_write(in, at + sizeof k, &k.key_len, &k.key_type);
        memcpy(head, &k, sizeof k);
    }
    return at;
}

static int64_t time_of(struct input *in)
{
    const uint8_t choice = take_byte(in);
    return choice == 255 ? INT64_MAX : choice == 254 ? -1 : (int64_t)choice * FUZZ_TICK_NS / 4;
}

/* Write the tag of a PUT, or nothing. Some tags are malformed. */
static uint8_t *tag_write(struct input *in, struct pg_record *r, uint8_t *at)
{
    const uint8_t len = take_byte(in);
    const struct pg_ext item = {.kind = PG_EXT_TAG, .extra = len % 80};
    if (len < 128)
        return at;
    r->ext_len = (uint32_t)sizeof item + len % 6 * PG_GRANULE;
    memset(at, 0, r->ext_len);
    memcpy(at, &item, sizeof item);
    memset(at + sizeof item, 't', len % 6 != 0 ? item.extra % (len % 6 * PG_GRANULE) : 0);
    return at + r->ext_len;
}

/* Write the lease of some job of the arena, usually the newest one. */
static uint8_t *lease_write(struct input *in, uint8_t *at, struct pg_record *r)
{
    const uint32_t row = take_byte(in) % world.f.a->job_slots.capacity;
    const struct pg_job *j = job_at(world.f.a, row);
    const struct pg_lease lease = {j->ticket >> 8, row, job_leases(j) - (take_byte(in) == 255)};
    r->key_type = PG_KEY_BYTES;
    r->key_len = sizeof lease;
    memcpy(at, &lease, sizeof lease);
    return at + sizeof lease;
}

static uint8_t *job_record_write(struct input *in, struct pg_record *r, uint8_t *at)
{
    const bool joins = r->op == PG_OP_JOIN;
    r->value = joins ? r->value : 0;
    r->mode = 0;
    at = joins ? key_write(in, at, &r->key_len, &r->key_type) : lease_write(in, at, r);
    if (joins || r->op == PG_OP_JOB_NACK || r->op == PG_OP_JOB_EXTEND)
        r->time_ns = time_of(in);
    if (r->op == PG_OP_JOB_NACK || r->op == PG_OP_JOB_REJECT)
        r->payload_len = take_byte(in) * 4u;
    take(in, at, r->payload_len);
    return at + r->payload_len;
}

static uint8_t *record_write(struct input *in, struct pg_record *r, uint8_t *at, unsigned names)
{
    *r = (struct pg_record){.op = take_byte(in) % (PG_OP_JOB_REJECT + 2), .mode = take_byte(in) % 5};
    r->name = take_byte(in) % (names + 1);
    r->value = take_byte(in);
    if (r->op >= PG_OP_JOIN)
        return job_record_write(in, r, at);
    at = key_write(in, at, &r->key_len, &r->key_type);
    r->flags = r->op == PG_OP_CANCEL ? take_byte(in) % 2 : 0;
    if (r->op != PG_OP_PUT && r->op != PG_OP_WATCH)
        return at;
    r->time_kind = take_byte(in) % (PG_T_KINDS + 1);
    r->time_ns = time_of(in);
    r->flags = r->op == PG_OP_WATCH ? take_byte(in) % 3 : 0;
    r->payload_len = take_byte(in) * 4u;
    take(in, at, r->payload_len);
    at += r->payload_len;
    if (r->op == PG_OP_PUT)
        return tag_write(in, r, at);
    uint8_t *const end = watch_keys_write(in, at, 1 + take_byte(in) % 4u);
    r->ext_len = (uint32_t)(end - at);
    return end;
}

/* Send a valid message; the input may damage one byte of it. */
static void batch(struct world *w, struct input *in, uint32_t number, unsigned message)
{
    static const uint8_t names[16] = {1, 1, 'n', 't', 1, 0, 'n', 2, 1, 'm', 'm', 't'};
    struct pg_frame frame = frame_of(w, number, message);
    const uint8_t size = take_byte(in);
    uint8_t *const records = w->buffer + sizeof frame + sizeof names;
    frame.count = 1 + size % RECORDS_MAX;
    frame.names = 3;
    frame.names_bytes = sizeof names;
    if (size & 0x80) {
        frame.flags = PG_W_AT;
        frame.at_ns = (int64_t)((uint64_t)w->now_ns + (uint64_t)time_of(in));
    }
    uint8_t *at = records + frame.count * sizeof(struct pg_record);
    for (uint32_t i = 0; i < frame.count; i++) {
        struct pg_record r;
        at = record_write(in, &r, at, frame.names);
        memcpy(records + i * sizeof r, &r, sizeof r);
    }
    memcpy(w->buffer, &frame, sizeof frame);
    memcpy(w->buffer + sizeof frame, names, sizeof names);
    const uint64_t len = (uint64_t)(at - w->buffer);
    if (size & 0x40)
        w->buffer[take_short(in) % len] ^= take_byte(in);
    if (message == PG_M_BATCH) {
        free(w->last);
        w->last = malloc(len);
        if (w->last == NULL)
            abort();
        memcpy(w->last, w->buffer, len);
        w->last_len = len;
    }
    follow(w, number, deliver(w, number, w->buffer, len));
}

/* Send a valid GROUP message, for one of a few groups; the input may damage one byte of it. */
static void group(struct world *w, struct input *in, uint32_t number)
{
    const struct pg_frame frame = frame_of(w, number, PG_M_GROUP);
    const uint8_t choice = take_byte(in), damage = take_byte(in);
    struct pg_group_ask ask = {.action = choice % PG_GROUP_ACTIONS, .namespace_len = 1,
                               .name_len = 1};
    if (ask.action == PG_GA_CREATE || ask.action == PG_GA_CHANGE)
        ask.settings = (struct pg_group_settings){
            .max_jobs = 1 + take_byte(in) % 8, .retention_ns = time_of(in) & INT32_MAX,
            .max_lease_ns = 1 + (time_of(in) & INT32_MAX), .backoff_base_ns = FUZZ_TICK_NS,
            .backoff_cap_ns = 4 * FUZZ_TICK_NS, .rate = take_byte(in) % 4,
            .max_attempts = 1 + take_byte(in) % 3, .max_dead = take_byte(in) % 3,
            .flags = take_byte(in) % PG_G_FLAGS};
    ask.topics = ask.action == PG_GA_CREATE ? 1 + choice / 8 % 2 : 0;
    ask.earliest = ask.action == PG_GA_CREATE && choice / 16 % 2;
    uint8_t names[8] = {'n', (uint8_t)('a' + choice / 32 % 3), 1, 't', 1, 'u'};
    const uint64_t len = sizeof frame + sizeof ask + 2 + 2ull * ask.topics;
    memcpy(w->buffer, &frame, sizeof frame);
    memcpy(w->buffer + sizeof frame, &ask, sizeof ask);
    memcpy(w->buffer + sizeof frame + sizeof ask, names, sizeof names);
    if (damage & 0x80)
        w->buffer[sizeof frame + damage % (sizeof ask)] ^= take_byte(in);
    deliver(w, number, w->buffer, len);
}

static void dead(struct world *w, struct input *in, uint32_t number)
{
    const uint8_t choice = take_byte(in);
    struct {
        struct pg_frame frame;
        struct pg_dead_ask ask;
        uint8_t names[2];
    } m = {.frame = frame_of(w, number, PG_M_DEAD),
           .ask = {.action = choice % (PG_DEAD_ACTIONS + 1), .most = choice / 4 % 4,
                   .namespace_len = 1, .name_len = 1},
           .names = {'n', (uint8_t)('a' + choice / 32 % 3)}};
    deliver(w, number, (const uint8_t *)&m, sizeof m.frame + sizeof m.ask + 2);
}

static void jobs_read(struct world *w)
{
    uint64_t session;
    while (pg_jobs(w->f.a, &session, w->f.reply, PG_MESSAGE_MAX) != 0)
        continue;
}

static void repeat(struct world *w, uint32_t number)
{
    if (w->last != NULL)
        follow(w, number, deliver(w, number, w->last, w->last_len));
}

/* Acknowledge the first outcome of the inbox, or answer the CHECK request there; the input may
 * change the ticket. */
static void acknowledge(struct world *w, struct input *in)
{
    uint64_t session;
    struct {
        struct pg_frame frame;
        struct pg_ack ack;
    } m = {.frame = frame_of(w, 0, PG_M_ACK)};
    struct pg_outcome outcome;
    if (pg_inbox(w->f.a, &session, w->f.reply, PG_MESSAGE_MAX) < sizeof m.frame + sizeof outcome)
        return;
    pg_notified(w->f.a, w->now_ns, w->now_ns);
    memcpy(&outcome, w->f.reply + sizeof m.frame, sizeof outcome);
    m.frame.session = session;
    m.frame.count = 1;
    m.ack = (struct pg_ack){outcome.ticket ^ take_byte(in), outcome.version, outcome.slot, 0};
    deliver(w, session == w->sessions[1], (const uint8_t *)&m, sizeof m);
}

static void rebuild(struct world *w)
{
    struct pg_fault why;
    fuzz_expect(pg_attach(w->f.a, w->f.arena, w->f.arena_bytes, w->f.secret, w->f.secret_bytes,
                          FUZZ_LAYOUT, &why), &why);
    fuzz_expect(pg_rebuild(w->f.a, w->now_ns, &why), &why);
}

static void read_all(struct world *w, struct input *in)
{
    static struct pg_part parts[8];
    uint64_t upto, lost, got, positions[16];
    uint32_t cursor = 0;
    pg_notices(w->f.a, w->f.reply, PG_MESSAGE_MAX, parts, 8, &upto);
    pg_tail_heartbeats(w->f.a, 0, &cursor, w->f.reply, PG_MESSAGE_MAX, parts, 8);
    cursor = 0;
    pg_scan(w->f.a, &cursor, 64, w->f.reply, PG_MESSAGE_MAX);
    jobs_read(w);
    const uint64_t first = 1 + take_byte(in) % 16;
    for (uint32_t topic = 0; topic < w->f.a->topic_rows; topic++)
        pg_replay(w->f.a, topic, first, first + 15, positions, w->f.reply, PG_MESSAGE_MAX, &lost,
                  &got);
}

static void step(struct world *w, struct input *in)
{
    const uint8_t choice = take_byte(in);
    const uint32_t number = choice / STEPS % FUZZ_SESSIONS;
    struct pg_frame bye = frame_of(w, number, PG_M_BYE);
    uint32_t cursor = 0;
    switch ((enum step)(choice % STEPS)) {
    case S_ADVANCE: advance(w, time_of(in) & INT32_MAX, (int64_t)take_byte(in) << 22); break;
    case S_RAW: raw(w, in, number); break;
    case S_FRAMED: framed(w, in, number); break;
    case S_BATCH: batch(w, in, number, PG_M_BATCH); break;
    case S_QUERY: batch(w, in, number, PG_M_QUERY); break;
    case S_REPEAT: repeat(w, number); break;
    case S_ACK: acknowledge(w, in); break;
    case S_HELLO: greet(w, number, take_byte(in) % 4); break;
    case S_BYE: deliver(w, number, (const uint8_t *)&bye, sizeof bye); break;
    case S_REBUILD: rebuild(w); break;
    case S_READ: read_all(w, in); break;
    case S_SWEEP: pg_sweep(w->f.a, w->now_ns += 2000000000, &cursor, 8); break;
    case S_GROUP: group(w, in, number); break;
    case S_DEAD: dead(w, in, number); break;
    case STEPS: break;
    }
    fuzz_whole(&w->f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    world_open(&world);
    greet(&world, 0, 1);
    greet(&world, 1, 2);
    while (in.at != in.end)
        step(&world, &in);
    return 0;
}

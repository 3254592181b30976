/* Test the WAL buffer, snapshots and redo. Cases: each type of frame in doubt (the last frame
 * before a kill), with and without its effect, also in a ring that was used before; a stored answer
 * to a record that was not applied; a full ring; a snapshot that another thread takes while the
 * arena changes; damaged frames. */
#include "check.h"
#include "core/core.h"

#include <pthread.h>

enum { LAYOUT = 4711, MS = 1000000, KEYS = 24, WATCHED = 6, TOPICS = 3, FRAMES = 1 << 23,
       WAITED_NS = 5 };           /* time in ns between receipt and application of each message */

struct world {
    struct rng rng;
    struct pg_config config;
    struct pg_arena *a;
    void *arena, *secret;
    uint8_t *reply;
    uint64_t session, sequence;
    uint8_t greeted;
    uint8_t stale;                /* value of all bytes of the ring before the test */
    int64_t now_ns;
    uint8_t *wal;             /* copies of the frames of the WAL buffer */
    uint64_t used, position, lsn;
    uint32_t topics;          /* number of topic names that act() uses; 0 = TOPICS */
};

/* ---- set-up ------------------------------------------------------------------------------ */

static void arena_open(struct world *w)
{
    w->arena = zeroed(pg_arena_bytes(&w->config));
    w->secret = zeroed(pg_private_bytes(&w->config));
    w->a = malloc(pg_handle_bytes());
    CHECK(w->a != NULL && pg_create(w->a, w->arena, w->secret, &w->config));
}

static void arena_close(struct world *w)
{
    free(w->arena);
    free(w->secret);
    free(w->a);
}

static void report(const struct pg_fault *fault)
{
    fprintf(stderr, "%s: %s at %" PRIu64 ": expected %" PRIu64 ", found %" PRIu64 "\n", fault->part,
            fault->detail, fault->where, fault->expected, fault->found);
}

static void whole(struct world *w)
{
    struct pg_fault fault;
    if (pg_check(w->a, &fault) && pg_check_live(w->a, &fault))
        return;
    report(&fault);
    CHECK(!"the arena is whole");
}

/* ---- messages ------------------------------------------------------------------------------ */

static uint64_t send(struct world *w, const void *bytes, uint64_t len)
{
    uint64_t used = 0;
    int64_t wait_ns;
    int state;
    while ((state = pg_handle(w->a, bytes, len, 1, 1, w->now_ns - WAITED_NS, w->now_ns, w->reply,
                              &used, &wait_ns)) == PG_H_AGAIN)
        pg_published(w->a, w->a->header->replay_tail, 0, 0);
    return state == PG_H_REPLY ? used : 0;
}

static struct pg_frame frame_of(const struct world *w, unsigned message)
{
    return (struct pg_frame){.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                             .message = (uint16_t)message, .session = w->session};
}

static void greet(struct world *w)
{
    struct {
        struct pg_frame frame;
        struct pg_hello hello;
        char name[16];
    } message = {.frame = frame_of(w, PG_M_HELLO)};
    message.frame.session = 0;
    message.hello.nonce[0] = ++w->greeted;
    message.hello.name_len = sizeof message.name;
    memset(message.name, 'w', sizeof message.name);
    send(w, &message, sizeof message);
    memcpy(&w->session, w->reply + offsetof(struct pg_frame, session), 8);
    w->sequence = 0;
}

static void bye(struct world *w)
{
    const struct pg_frame f = frame_of(w, PG_M_BYE);
    send(w, &f, sizeof f);
}

/* A record that is the only one of its batch. Its key is a letter and a number. */
struct command {
    struct pg_record record;
    uint32_t key, topic;
    uint32_t watch_keys;          /* a WATCH uses watch keys 0 to watch_keys - 1 */
    uint64_t target;
    bool own, durable;
};

static uint8_t *key_write(uint8_t *at, char kind, uint32_t n)
{
    const uint32_t len = n % 5 == 4 ? 60 : 8;
    memset(at, kind, len);
    at[1] = (uint8_t)n;
    return at + len;
}

static uint8_t *keys_write(uint8_t *at, const struct command *c)
{
    for (uint32_t i = 0; i < c->watch_keys; i++) {
        const struct pg_watch_key k = {.target = c->target, .cap = c->record.mode == PG_C_SUM,
                                       .key_len = i % 5 == 4 ? 60 : 8, .key_type = PG_KEY_BYTES,
                                       .flags = c->own ? PG_WK_OWN : 0};
        memcpy(at, &k, sizeof k);
        at = key_write(at + sizeof k, 'w', i);
    }
    return at;
}

/* Write the tag of a PUT; a part of the keys has none. */
static uint8_t *tag_write(uint8_t *at, uint32_t key)
{
    const uint32_t len = key % 3 * 9;
    const struct pg_ext item = {.kind = PG_EXT_TAG, .extra = len};
    if (len == 0)
        return at;
    memset(at, 0, 3 * sizeof item);
    memcpy(at, &item, sizeof item);
    memset(at + sizeof item, 't', len);
    return at + sizeof item + (len + PG_GRANULE - 1) / PG_GRANULE * PG_GRANULE;
}

static bool on_timer(unsigned op)
{
    return op == PG_OP_PUT || op == PG_OP_WATCH || op == PG_OP_CANCEL || op == PG_OP_COMPLETE ||
           op == PG_OP_UNPARK;
}

/* Send a command; return its enum pg_status, or 256 + enum pg_error. */
static unsigned command(struct world *w, const struct command *c)
{
    static _Alignas(8) uint8_t message[1 << 17];
    struct pg_frame f = frame_of(w, PG_M_BATCH);
    struct pg_record r = c->record;
    uint8_t *names = message + sizeof f, *record = names + 8;
    uint8_t *at = key_write(record + sizeof r, on_timer(r.op) ? 'o' : 'w', c->key);
    struct pg_result result;
    f.sequence = ++w->sequence;
    f.count = f.names = 1;
    f.names_bytes = 8;
    f.flags = c->durable ? PG_W_DURABLE : 0;
    memcpy(names, "\1\1nt\0\0\0", 8);
    names[3] = (uint8_t)('t' + c->topic);
    r.key_len = (uint8_t)(at - record - sizeof r);
    r.key_type = PG_KEY_BYTES;
    memset(at, (int)c->key, r.payload_len);
    uint8_t *ext = at + r.payload_len;
    at = r.op == PG_OP_PUT ? tag_write(ext, c->key) : keys_write(ext, c);
    r.ext_len = (uint32_t)(at - ext);
    memcpy(message, &f, sizeof f);
    memcpy(record, &r, sizeof r);
    send(w, message, (uint64_t)(at - message));
    memcpy(&f, w->reply, sizeof f);
    memcpy(&result, w->reply + sizeof f, sizeof result);
    return f.error != 0 ? 256u + f.error : (unsigned)(result.ticket & 0xff);
}

static unsigned put(struct world *w, uint32_t key, int64_t time_ns, unsigned mode, unsigned kind)
{
    const struct command c = {.record = {.op = PG_OP_PUT, .mode = (uint8_t)mode,
                                         .time_kind = (uint8_t)kind, .time_ns = time_ns,
                                         .payload_len = 40}, .key = key};
    return command(w, &c);
}

static unsigned simple(struct world *w, unsigned op, uint32_t key, uint64_t value)
{
    const struct command c = {.record = {.op = (uint8_t)op, .value = value}, .key = key};
    return command(w, &c);
}

static unsigned watch(struct world *w, uint32_t key, unsigned keys, uint64_t target, bool notice)
{
    const struct command c = {.record = {.op = PG_OP_WATCH, .mode = PG_C_ALL,
                                         .time_kind = PG_T_DELAY, .time_ns = 50 * MS,
                                         .flags = notice, .payload_len = 33},
                              .key = key, .watch_keys = keys, .target = target};
    return command(w, &c);
}

static void acknowledge(struct world *w)
{
    uint64_t session;
    struct pg_frame head;
    struct pg_outcome o;
    uint8_t *mail = w->reply;
    if (pg_inbox(w->a, &session, mail, PG_MESSAGE_MAX) == 0)
        return;
    memcpy(&head, mail, sizeof head);
    for (uint32_t i = 0; i < head.count; i++) {
        struct {
            struct pg_frame frame;
            struct pg_ack ack;
        } message = {.frame = frame_of(w, PG_M_ACK)};
        memcpy(&o, mail + sizeof head + i * sizeof o, sizeof o);
        message.frame.count = 1;
        message.ack = (struct pg_ack){o.ticket >> 8, o.version, o.slot, 0};
        uint64_t used;
        int64_t wait_ns;
        uint8_t none[sizeof head];
        pg_handle(w->a, &message, sizeof message, 1, 1, w->now_ns, w->now_ns, none, &used,
                  &wait_ns);
    }
}

static bool go(struct world *w, int64_t by_ns)
{
    int more;
    w->now_ns += by_ns;
    pg_advance(w->a, w->now_ns, 0, w->now_ns, 1u << 20, &more);
    return more != 0;
}

static void configure(struct world *w, struct pg_namespace_set set)
{
    struct pg_namespace_set now;
    uint64_t detail[2];
    uint8_t body[sizeof set + 1];
    set.name_len = 1;
    memcpy(body, &set, sizeof set);
    body[sizeof set] = 'n';
    CHECK_EQUAL(pg_set_namespace(w->a, body, sizeof body, PG_NIL, &now, detail), PG_ERR_NONE);
}

static struct pg_config config_of_test(void)
{
    return (struct pg_config){
        .layout_id = LAYOUT, .payload_bytes = 1 << 19, .replay_bytes_max = 1 << 17, .tick_ns = MS,
        .stream_id = 1, .secret = {1, 2}, .capacity = KEYS + 8, .replay_capacity = 32,
        .fanout = 20, .namespaces = 2, .topics = TOPICS, .sessions = 2, .watches = 256,
        .watermarks = WATCHED + 2, .watermark_ttl_ns = 1000000000, .inbox_max = 64, .accounts = 2,
        .bulk_loads = 1, .bulk_load_blocks = 1, .schedules = 2, .clock_kind = PG_CLOCK_VIRTUAL,
        .wal_buffer_bytes = PG_WAL_BUFFER_MIN};
}

static void world_open(struct world *w)
{
    w->config = config_of_test();
    w->reply = malloc(PG_MESSAGE_MAX);
    CHECK(w->reply != NULL);
    arena_open(w);
    CHECK_EQUAL(w->a->wal_buffer->next_lsn, 1);
    memset(w->a->ring, w->stale, 1 << 16);
    greet(w);
    CHECK_EQUAL(put(w, KEYS - 1, INT64_MAX, 0, PG_T_BOOT), PG_ST_ADDED);     /* creates the
                                                                                namespace and the
                                                                                topic */
}

static void world_close(struct world *w)
{
    arena_close(w);
    free(w->reply);
    free(w->wal);
}

/* ---- the frame in doubt ------------------------------------------------------------------- */

static void nothing(struct world *w) { (void)w; }
static void a_while(struct world *w) { go(w, MS); }
static void a_timer(struct world *w) { CHECK_EQUAL(put(w, 1, 30 * MS, 0, PG_T_BOOT), PG_ST_ADDED); }
static void a_wall_timer(struct world *w)
{
    CHECK_EQUAL(put(w, 1, 30 * MS, 0, PG_T_WALL), PG_ST_ADDED);
}
static void two_timers(struct world *w)
{
    a_timer(w);
    CHECK_EQUAL(put(w, 2, 90 * MS, 0, PG_T_BOOT), PG_ST_ADDED);
}
static void replaces(struct world *w)
{
    CHECK_EQUAL(put(w, 1, 60 * MS, PG_MODE_REPLACE, PG_T_BOOT), PG_ST_REPLACED);
}
static void extends(struct world *w)
{
    CHECK_EQUAL(put(w, 1, 70 * MS, PG_MODE_EXTEND, PG_T_BOOT), PG_ST_EXTENDED);
}
static void arms(struct world *w) { CHECK_EQUAL(put(w, 3, 40 * MS, 0, PG_T_BOOT), PG_ST_ADDED); }
static void cancels(struct world *w)
{
    CHECK_EQUAL(simple(w, PG_OP_CANCEL, 1, 0), PG_ST_CANCELLED);
}
static void comes_due(struct world *w) { go(w, 31 * MS); }
static void fired(struct world *w)
{
    two_timers(w);
    comes_due(w);
}
static void sent(struct world *w) { pg_published(w->a, w->a->header->replay_tail, 0, 0); }
static void watermarks(struct world *w)
{
    for (uint32_t i = 0; i < 5; i++)
        CHECK_EQUAL(simple(w, PG_OP_ADVANCE_KEY, i, 3), PG_ST_DONE);
}
static void watches(struct world *w) { CHECK_EQUAL(watch(w, 1, 5, 9, false), PG_ST_ADDED); }
static void notified_watches(struct world *w) { CHECK_EQUAL(watch(w, 1, 5, 9, true), PG_ST_ADDED); }
static void an_operation(struct world *w)
{
    watermarks(w);
    watches(w);
}
static void a_notified_operation(struct world *w)
{
    watermarks(w);
    notified_watches(w);
}
static void is_born(struct world *w)
{
    CHECK_EQUAL(simple(w, PG_OP_ADVANCE_KEY, 4, 0), PG_ST_DONE);
}
static void advances(struct world *w)
{
    CHECK_EQUAL(simple(w, PG_OP_ADVANCE_KEY, 1, 8), PG_ST_DONE);
}
static void fails(struct world *w) { CHECK_EQUAL(simple(w, PG_OP_FAIL, 1, 8), PG_ST_DONE); }
static void a_failed_watermark(struct world *w)
{
    watermarks(w);
    fails(w);
}
static void clears(struct world *w) { CHECK_EQUAL(simple(w, PG_OP_CLEAR, 1, 0), PG_ST_DONE); }
static void forgets(struct world *w) { CHECK_EQUAL(simple(w, PG_OP_FORGET, 1, 0), PG_ST_DONE); }
static void one_watermark(struct world *w)
{
    CHECK_EQUAL(simple(w, PG_OP_ADVANCE_KEY, 4, 3), PG_ST_DONE);
}
static void sweeps(struct world *w)
{
    uint32_t cursor = 0;
    pg_sweep(w->a, w->now_ns + 20000000000, &cursor, w->config.watermarks);
}
static void an_outcome(struct world *w)
{
    an_operation(w);
    CHECK_EQUAL(simple(w, PG_OP_CANCEL, 1, 0), PG_ST_CANCELLED);
}
static void a_topic_only(struct world *w)
{
    const struct command c = {.record = {.op = PG_OP_PUT, .time_kind = PG_T_DELAY,
                                         .time_ns = INT64_MAX}, .topic = 1};
    CHECK_EQUAL(command(w, &c), PG_ST_TOO_FAR);
}
static void is_configured(struct world *w)
{
    configure(w, (struct pg_namespace_set){.fields = PG_N_TIMERS, .quota_timers = 5});
}
static void parks(struct world *w)
{
    configure(w, (struct pg_namespace_set){.fields = PG_N_PARK, .park_beyond_ns = 10 * MS});
}
static void arms_far(struct world *w)
{
    CHECK_EQUAL(put(w, 1, 99 * MS, 0, PG_T_BOOT), PG_ST_PARKED);
}
static void a_parked_timer(struct world *w)
{
    parks(w);
    arms_far(w);
}
static void comes_back(struct world *w)
{
    const struct command c = {.record = {.op = PG_OP_UNPARK, .payload_len = 40,
                                         .value = w->a->header->next_ticket - 1}, .key = 1};
    CHECK_EQUAL(command(w, &c), PG_ST_UNPARKED);
}
static void is_published(struct world *w)
{
    const struct pg_publish head = {.payload_len = 27, .key_len = 3, .key_type = PG_KEY_BYTES,
                                    .namespace_len = 1, .topic_len = 1};
    uint8_t body[sizeof head + 32];
    struct pg_result r;
    uint64_t detail[2];
    memcpy(body, &head, sizeof head);
    memcpy(body + sizeof head, "ntkeya payload of 27 bytes here", 32);
    CHECK_EQUAL(pg_publish(w->a, body, sizeof body, 1, w->now_ns, &r, detail), PG_ERR_NONE);
    CHECK_EQUAL(r.ticket & 0xff, PG_ST_DONE);
}
static void is_answered(struct world *w) { pg_replied(w->a, w->session, w->sequence, 1, 5, 6); }
static void is_measured(struct world *w) { pg_wal_append_metrics(w->a, 7); }
static void bulk_load(struct world *w, unsigned action, uint64_t fencing_token)
{
    struct {
        struct pg_frame frame;
        struct pg_bulk_load_ask ask;
        char name;
    } message = {frame_of(w, PG_M_BULK_LOAD),
                 {.bulk_load = {1}, .fencing_token = fencing_token, .action = action,
                                          .name_len = 1}, 'n'};
    CHECK(send(w, &message, offsetof(__typeof__(message), name) + 1) > sizeof message.frame);
}
static void opens_a_bulk_load(struct world *w) { bulk_load(w, PG_LA_OPEN, 1); }
static void runs_it_again(struct world *w) { bulk_load(w, PG_LA_OPEN, 2); }
static void closes_it(struct world *w) { bulk_load(w, PG_LA_CLOSE, 1); }

struct doubt {
    enum pg_wal_type type;
    void (*prepare)(struct world *w);
    void (*act)(struct world *w);
    bool finished;                /* the frame is enough to complete a missing effect */
};

static const struct doubt doubts[] = {
    {PG_WAL_ARM, nothing, arms, false},
    {PG_WAL_ARM, two_timers, replaces, false},
    {PG_WAL_MOVE, a_timer, extends, false},
    {PG_WAL_MOVE, a_wall_timer, extends, false},
    {PG_WAL_END, a_timer, cancels, false},
    {PG_WAL_END, an_outcome, acknowledge, false},
    {PG_WAL_FIRE, two_timers, comes_due, false},
    {PG_WAL_SENT, fired, sent, false},
    {PG_WAL_WATCH, watermarks, watches, false},
    {PG_WAL_WATCH, watermarks, notified_watches, false},
    {PG_WAL_WATERMARK, nothing, is_born, false},
    {PG_WAL_WATERMARK, watermarks, advances, false},
    {PG_WAL_WATERMARK, an_operation, advances, false},
    {PG_WAL_WATERMARK, watermarks, fails, false},
    {PG_WAL_WATERMARK, a_failed_watermark, clears, false},
    {PG_WAL_WATERMARK, an_operation, forgets, false},
    {PG_WAL_GONE, one_watermark, sweeps, false},
    {PG_WAL_OUTCOME, an_operation, cancels, false},
    {PG_WAL_OUTCOME, a_notified_operation, cancels, false},
    {PG_WAL_TOPIC, a_while, a_topic_only, false},
    {PG_WAL_NAMESPACE, nothing, is_configured, true},
    {PG_WAL_SESSION, nothing, bye, false},
    {PG_WAL_OPENED, nothing, greet, false},
    {PG_WAL_REPLIED, nothing, is_answered, true},
    {PG_WAL_METRICS, fired, is_measured, true},
    {PG_WAL_ENTRY, nothing, is_published, false},
    {PG_WAL_ARM, parks, arms_far, false},
    {PG_WAL_UNPARK, a_parked_timer, comes_back, false},
    {PG_WAL_BULK_LOAD, nothing, opens_a_bulk_load, false},
    {PG_WAL_BULK_LOAD, opens_a_bulk_load, runs_it_again, false},
    {PG_WAL_BULK_LOAD, opens_a_bulk_load, closes_it, false},
};

struct image {
    uint8_t *arena, *secret;
};

static struct image image_of(const struct world *w)
{
    struct image i = {malloc(pg_arena_bytes(&w->config)), malloc(pg_private_bytes(&w->config))};
    CHECK(i.arena != NULL && i.secret != NULL);
    memcpy(i.arena, w->arena, pg_arena_bytes(&w->config));
    memcpy(i.secret, w->secret, pg_private_bytes(&w->config));
    return i;
}

static void image_free(struct image i)
{
    free(i.arena);
    free(i.secret);
}

/* Attach to a copy of the arena, as the next daemon does after a kill. */
static void image_load(struct world *w, struct image i)
{
    struct pg_fault fault;
    memcpy(w->arena, i.arena, pg_arena_bytes(&w->config));
    memcpy(w->secret, i.secret, pg_private_bytes(&w->config));
    CHECK(pg_attach(w->a, w->arena, pg_arena_bytes(&w->config), w->secret,
                    pg_private_bytes(&w->config), LAYOUT, &fault));
}

static struct pg_wal_buffer *wal_buffer_of(struct image i)
{
    const struct pg_header *h = (struct pg_header *)i.arena;
    return (struct pg_wal_buffer *)(i.arena + h->regions[PG_R_WAL_BUFFER].offset);
}

static void rebuilt(struct world *w)
{
    struct pg_fault fault;
    if (!pg_rebuild(w->a, w->now_ns, &fault))
        report(&fault);
    whole(w);
}

/* Rebuild. Check that tail, appended and next_lsn have the values of `expected` afterwards. */
static void decided(struct world *w, struct image expected)
{
    rebuilt(w);
    CHECK_EQUAL(w->a->wal_buffer->tail, wal_buffer_of(expected)->tail);
    CHECK_EQUAL(w->a->wal_buffer->appended, wal_buffer_of(expected)->tail);
    CHECK_EQUAL(w->a->wal_buffer->next_lsn, wal_buffer_of(expected)->next_lsn);
}

/* Test a kill before and after the frame's effect. If the effect is missing, a rebuild drops the
 * frame or completes the effect. If the effect is there but `tail` is old, a rebuild keeps the
 * frame. */
static void both_ways(struct world *w, struct image before, struct image after, bool finished)
{
    const struct pg_header *h = (struct pg_header *)before.arena;
    const struct pg_region *region = &h->regions[PG_R_WAL_BUFFER];
    struct pg_wal_buffer *wal_buffer;

    image_load(w, before);
    wal_buffer = w->a->wal_buffer;
    memcpy(wal_buffer, wal_buffer_of(after), region->length);
    wal_buffer->tail = wal_buffer_of(before)->tail;
    decided(w, finished ? after : before);

    image_load(w, after);
    wal_buffer = w->a->wal_buffer;
    wal_buffer->tail = wal_buffer_of(before)->tail;
    /* A kill may come between the stores of `appended` and next_lsn. */
    wal_buffer->next_lsn = wal_buffer_of(before)->next_lsn;
    decided(w, after);
}

static void test_the_frame_in_doubt(void)
{
    for (uint32_t i = 0; i < sizeof doubts / sizeof doubts[0]; i++) {
        struct world w = {.rng = {1}};
        world_open(&w);
        doubts[i].prepare(&w);
        const struct image before = image_of(&w);
        doubts[i].act(&w);
        const struct image after = image_of(&w);
        const struct pg_frame_head *f =
            (const void *)(w.a->ring + wal_buffer_of(before)->tail % w.a->wal_buffer->size);
        CHECK_EQUAL(f->type, doubts[i].type);
        CHECK_EQUAL(wal_buffer_of(after)->tail, wal_buffer_of(before)->tail + f->bytes);
        both_ways(&w, before, after, doubts[i].finished);
        image_free(before);
        image_free(after);
        world_close(&w);
    }
}

/* Frames contain no bytes of the ring's earlier content, neither between their fields nor in their
 * padding. */
static void test_a_frame_in_a_ring_that_was_used(void)
{
    for (uint32_t i = 0; i < sizeof doubts / sizeof doubts[0]; i++) {
        struct world worlds[2] = {{.stale = 0x5a}, {.stale = 0xa5}};
        for (uint32_t n = 0; n < 2; n++) {
            world_open(&worlds[n]);
            doubts[i].prepare(&worlds[n]);
            doubts[i].act(&worlds[n]);
        }
        const uint64_t tail = worlds[0].a->wal_buffer->tail;
        CHECK(tail < 1 << 16 && worlds[1].a->wal_buffer->tail == tail);
        CHECK(memcmp(worlds[0].a->ring, worlds[1].a->ring, tail) == 0);
        world_close(&worlds[0]);
        world_close(&worlds[1]);
    }
}

/* ---- an answer without its effect --------------------------------------------------------- */

/* Return to a state in which the answer to the newest batch's only record is stored, but the record
 * has not been applied. */
static void answer_cut_off(struct world *w)
{
    struct pg_session *s = session_find(w->a, w->session);
    session_reply(w->a, s, s->last)->sequence = 0;
    s->applied = 0;
    s->current = s->last--;
}

/* If a kill loses the effect of a cancel, its timer fires. A client that sends the cancel again
 * gets PG_ST_FIRED, even if a second kill finds the stored answer. */
static void test_a_cancel_that_was_only_answered(void)
{
    struct world w = {.rng = {6}};
    world_open(&w);
    a_timer(&w);
    const struct image before = image_of(&w);
    cancels(&w);
    const struct image after = image_of(&w);
    image_load(&w, (struct image){before.arena, after.secret});
    answer_cut_off(&w);
    rebuilt(&w);
    comes_due(&w);
    rebuilt(&w);
    w.sequence--;
    CHECK_EQUAL(simple(&w, PG_OP_CANCEL, 1, 0), PG_ST_FIRED);
    image_free(before);
    image_free(after);
    world_close(&w);
}

/* ---- a ring that fills -------------------------------------------------------------------- */

static bool takes(struct world *w, uint32_t key)
{
    const struct command c = {.record = {.op = PG_OP_PUT, .mode = PG_MODE_REPLACE,
                                         .time_kind = PG_T_DELAY, .time_ns = 10 * MS,
                                         .payload_len = 9000}, .key = key};
    const unsigned status = command(w, &c);
    CHECK(status == PG_ST_ADDED || status == PG_ST_REPLACED || status == PG_ST_BUSY);
    return status != PG_ST_BUSY;
}

/* Without commits, adds are refused if 75 % of the ring is used, and due timers wait if the ring is
 * full. The next commit resumes adds and timers. */
static void test_a_ring_that_fills(void)
{
    struct world w = {.rng = {2}};
    uint32_t n = 0;
    world_open(&w);
    struct pg_wal_buffer *s = w.a->wal_buffer;
    for (uint32_t round = 0; round < 4; round++) {
        while (takes(&w, n++ % KEYS))
            ;
        CHECK(w.a->metrics->refused_wal == round + 1);
        CHECK(s->appended - s->committed > s->size / 100 * 75);
        CHECK(simple(&w, PG_OP_CANCEL, n % KEYS, 0) == PG_ST_CANCELLED);
        while (!pg_wal_buffer_full(w.a)) {
            CHECK(simple(&w, PG_OP_ADVANCE_KEY, 0, ++w.lsn) == PG_ST_DONE);
            CHECK(s->appended - s->committed <= s->size);
        }
        const uint64_t live = w.a->metrics->live, appended = s->appended;
        CHECK(live > 0 && go(&w, 11 * MS) && w.a->metrics->live == live && s->appended == appended);
        whole(&w);
        s->committed = s->tail;
        while (go(&w, 0))
            pg_published(w.a, w.a->header->replay_tail, 0, 0);
        CHECK_EQUAL(w.a->metrics->live, 0);
    }
    STORE_RELEASE(&s->state, PG_WAL_STOPPED);
    CHECK_EQUAL(put(&w, 1, 5 * MS, 0, PG_T_BOOT), PG_ST_WAL);
    CHECK_EQUAL(watch(&w, 1, 1, 1ull << 60, false), PG_ST_WAL);
    while (!pg_wal_buffer_full(w.a))
        CHECK(simple(&w, PG_OP_ADVANCE_KEY, 0, ++w.lsn) == PG_ST_DONE);
    CHECK_EQUAL(simple(&w, PG_OP_ADVANCE_KEY, 0, ++w.lsn), PG_ST_WAL);
    whole(&w);
    world_close(&w);
}

/* Compute nominal times: each is 10 ms after the one before it. Return the number of questions. */
static uint32_t questions_answer(struct world *w)
{
    struct pg_question q;
    int64_t times[PG_NOMINAL_MAX];
    uint32_t answered = 0;
    for (; pg_schedule_question(w->a, &q); answered++) {
        for (uint32_t n = 0; n < q.count; n++)
            times[n] = q.after_ns + (n + 1) * (int64_t)(10 * MS);
        pg_schedule_answer(w->a, &q, PG_ST_DONE, times, q.count);
    }
    return answered;
}

static void schedule_put_cron(struct world *w, char key)
{
    struct {
        struct pg_frame frame;
        struct pg_schedule_ask ask;
        char names[4];
    } message = {.frame = frame_of(w, PG_M_SCHEDULE),
                 .ask = {.action = PG_SA_PUT, .namespace_len = 1, .topic_len = 1, .key_len = 1,
                         .spec_len = 1, .until = PG_NOMINAL_NONE},
                 .names = {'n', 't', key, '*'}};
    uint64_t used;
    int64_t wait_ns;
    const uint64_t bytes = offsetof(__typeof__(message), names) + sizeof message.names;
    while (pg_handle(w->a, &message, bytes, 1, 1, w->now_ns, w->now_ns, w->reply, &used,
                     &wait_ns) == PG_H_AGAIN)
        CHECK(questions_answer(w) != 0);
    questions_answer(w);
}

static void ring_fill(struct world *w)
{
    while (!pg_wal_buffer_full(w->a))
        simple(w, PG_OP_ADVANCE_KEY, 0, ++w->lsn);
}

/* The wall clock is set back to before the puts while the ring is full. */
static void test_schedules_begin_again_once_a_full_ring_has_space(void)
{
    enum { BACK_NS = 1000 * MS };
    struct world w = {.rng = {8}};
    int more;
    world_open(&w);
    w.now_ns += 2 * BACK_NS; /* wall times are after 1970 */
    pg_advance(w.a, w.now_ns, 0, w.now_ns, 1u << 20, &more);
    schedule_put_cron(&w, 'x');
    schedule_put_cron(&w, 'y');
    CHECK_EQUAL(w.a->metrics->schedules_armed, 2);
    ring_fill(&w);
    w.now_ns += MS;
    pg_advance(w.a, w.now_ns, -(int64_t)BACK_NS, w.now_ns, 1u << 20, &more);
    pg_schedules_recheck(w.a);
    CHECK_EQUAL(questions_answer(&w), 0);
    whole(&w);
    w.a->wal_buffer->committed = w.a->wal_buffer->tail;
    CHECK_EQUAL(questions_answer(&w), 2);
    pg_advance(w.a, w.now_ns, -(int64_t)BACK_NS, w.now_ns, 1u << 20, &more);
    questions_answer(&w);
    CHECK_EQUAL(w.a->metrics->schedules_armed, 2);
    for (uint32_t row = 0; row < 2; row++) {
        const struct pg_schedule_fields *f = schedule_fields(w.a, row);
        CHECK_EQUAL(f->put_ns, w.now_ns - BACK_NS);
        CHECK_EQUAL(f->nominal_ns, w.now_ns - BACK_NS + 10 * MS);
    }
    whole(&w);
    world_close(&w);
}

static void test_durable_replies(void)
{
    struct world w = {.rng = {3}};
    const struct command c = {.record = {.op = PG_OP_PUT, .time_ns = 5 * MS}, .durable = true};
    world_open(&w);
    CHECK_EQUAL(put(&w, 1, 5 * MS, 0, PG_T_BOOT), PG_ST_ADDED);
    CHECK_EQUAL(pg_durable_lsn(w.a), 0);
    CHECK_EQUAL(command(&w, &c), PG_ST_ADDED);
    CHECK_EQUAL(pg_durable_lsn(w.a), w.a->wal_buffer->next_lsn - 1);
    w.a->namespaces[0].durability = 1;
    CHECK_EQUAL(simple(&w, PG_OP_CANCEL, 1, 0), PG_ST_CANCELLED);
    CHECK_EQUAL(pg_durable_lsn(w.a), w.a->wal_buffer->next_lsn - 1);
    world_close(&w);
}

/* ---- random work -------------------------------------------------------------------------- */

/* Copy and commit frames, as the group-commit thread does. */
static void take(struct world *w)
{
    const uint64_t used = pg_wal_buffer_copy(w->a, w->position, w->wal + w->used,
                                             FRAMES - w->used, &w->position, &w->lsn);
    w->used += used;
    CHECK(w->position == w->a->wal_buffer->tail);
    STORE_RELEASE(&w->a->wal_buffer->committed, w->position);
}

static void act(struct world *w)
{
    static const uint8_t ops[] = {PG_OP_CANCEL, PG_OP_ADVANCE_KEY, PG_OP_ADVANCE_KEY, PG_OP_BUMP,
                                  PG_OP_FAIL, PG_OP_CLEAR, PG_OP_CLEAR, PG_OP_FORGET,
                                  PG_OP_CANCEL_FOR_KEY};
    struct rng *r = &w->rng;
    const uint32_t key = (uint32_t)rng_below(r, KEYS), kind = (uint32_t)rng_below(r, 20);
    struct command c = {.record = {.op = PG_OP_PUT, .mode = (uint8_t)rng_below(r, PG_MODES),
                                   .time_kind = (uint8_t)rng_below(r, PG_T_KINDS),
                                   .time_ns = (int64_t)rng_below(r, 40) * MS,
                                   .payload_len = (uint32_t)rng_below(r, 600)},
                        .key = key, .topic = (uint32_t)rng_below(r, w->topics != 0 ? w->topics : TOPICS)};
    if (kind < 8 && kind >= 5) {
        c.record.op = PG_OP_WATCH;
        c.record.mode = (uint8_t)rng_below(r, PG_CONDITIONS);
        c.record.time_kind = PG_T_DELAY;
        c.record.flags = (uint8_t)rng_below(r, 2);
        c.record.value = c.record.mode == PG_C_SUM ? 3 : c.record.mode == PG_C_QUORUM;
        c.watch_keys = 1 + (uint32_t)rng_below(r, WATCHED);
        c.target = rng_below(r, 12);
        c.own = rng_below(r, 3) == 0;
    } else if (kind >= 8 && kind < 16) {
        const uint8_t op = ops[rng_below(r, sizeof ops)];
        const bool valued = op == PG_OP_ADVANCE_KEY || op == PG_OP_BUMP || op == PG_OP_FAIL;
        c = (struct command){.record = {.op = op, .value = valued ? 1 + rng_below(r, 12) : 0},
                             .key = on_timer(op) ? key : key % WATCHED};
    } else if (kind >= 16) {
        if (kind == 16)
            acknowledge(w);
        if (kind == 17)
            pg_published(w->a, w->a->header->replay_tail, 0, 0);
        while (kind >= 18 && go(w, (int64_t)rng_below(r, 9) * MS))
            pg_published(w->a, w->a->header->replay_tail, 0, 0);
        return;
    }
    command(w, &c);
}

/* Redo the snapshot and the WAL in a new arena, which has no WAL buffer and a different secret. */
static int redone(struct world *to, const struct world *from, const uint8_t *snapshot,
                  uint64_t snapshot_bytes, struct pg_fault *why)
{
    struct pg_redo state = {0};
    *to = (struct world){.config = {.layout_id = LAYOUT, .stream_id = 2, .secret = {7, 8},
                                    .sessions = 1}};
    CHECK(pg_redo_config(snapshot, snapshot_bytes, &to->config, why));
    to->config.wal_buffer_bytes = 0;
    arena_open(to);
    return pg_redo(to->a, &state, snapshot, snapshot_bytes, why) &&
           pg_redo(to->a, &state, from->wal, from->used, why) &&
           pg_redo_end(to->a, &state, from->now_ns, from->now_ns, 0, 0, why) &&
           pg_rebuild(to->a, from->now_ns, why);
}

static void slots_are_the_same(const struct pg_arena *x, const struct pg_arena *y)
{
    for (uint32_t i = 0; i < x->slots.capacity; i++) {
        const struct pg_hot *h = &x->slots.hot[i], *g = &y->slots.hot[i];
        const struct pg_cold *c = &x->slots.cold[i], *d = &y->slots.cold[i];
        CHECK((ctl_state(h->ctl) == PG_S_ARMED) == (ctl_state(g->ctl) == PG_S_ARMED));
        if (ctl_state(h->ctl) != PG_S_ARMED)
            continue;
        CHECK(h->ctl == g->ctl && h->deadline_ns == g->deadline_ns && h->topic == g->topic &&
              h->flags == g->flags && c->key_len == d->key_len && c->ext_len == d->ext_len &&
              c->payload_len == d->payload_len);
        CHECK(memcmp(blob_at(&x->blobs, c->blob) + c->ext_len,
                     blob_at(&y->blobs, d->blob) + d->ext_len, c->key_len + c->payload_len) == 0);
        if (!is_operation(x, i)) {
            CHECK(memcmp(blob_at(&x->blobs, c->blob), blob_at(&y->blobs, d->blob), c->ext_len) == 0);
            continue;
        }
        const struct pg_operation *op = operation_at(x, i), *other = operation_at(y, i);
        CHECK(op->keys == other->keys && op->condition == other->condition &&
              op->threshold == other->threshold && op->armed_ns == other->armed_ns);
    }
}

static void watermarks_are_the_same(const struct pg_arena *x, const struct pg_arena *y)
{
    for (uint32_t i = 0; i < x->watermark_rows; i++) {
        const struct pg_watermark *l = &x->watermarks[i], *m = &y->watermarks[i];
        CHECK_EQUAL(l->key_len, m->key_len);
        if (l->key_len != 0)
            CHECK(l->watermark == m->watermark && l->error == m->error &&
                  (l->touched_s == PG_NIL) == (m->touched_s == PG_NIL));
    }
}

static void notices_are_the_same(const struct pg_arena *x, const struct pg_arena *y)
{
    CHECK_EQUAL(x->header->published, y->header->published);
    CHECK_EQUAL(x->header->replay_tail, y->header->replay_tail);
    for (uint64_t p = x->header->published; p < x->header->replay_tail; p++)
        CHECK(replay_at(x, p)->ticket == replay_at(y, p)->ticket &&
              replay_at(x, p)->sequence == replay_at(y, p)->sequence);
    for (uint32_t i = 0; i < x->topic_rows; i++)
        CHECK(x->topics[i].sequence == y->topics[i].sequence &&
              x->topics[i].incarnation == y->topics[i].incarnation);
}

/* ---- requests named in frames -------------------------------------------------------------- */

static struct pg_frame_head *newest(const struct world *w, unsigned type)
{
    struct pg_frame_head *f, *found = NULL;
    for (uint64_t at = 0; at < w->used; at += f->bytes) {
        f = (struct pg_frame_head *)(w->wal + at);
        found = f->type == type ? f : found;
    }
    CHECK(found != NULL);
    return found;
}

/* Remove the optional fields at the end of a frame. An export without a WAL writes frames without
 * these fields, so the shorter frame must be readable. */
static void is_read_without_its_tail(const struct pg_frame_head *f, uint64_t count)
{
    const uint64_t tail = sizeof(struct pg_asked) + count * sizeof(struct pg_timestamps);
    const struct pg_timestamps *replaced;
    struct pg_frame_head *shorter = malloc(f->bytes);
    CHECK(shorter != NULL);
    memcpy(shorter, f, f->bytes);
    shorter->bytes -= (uint32_t)sizeof(struct pg_asked);
    CHECK(!frame_fits(shorter));
    shorter->bytes = f->bytes - (uint32_t)tail;
    CHECK(frame_fits(shorter) && pg_frame_asked(shorter) == NULL);
    CHECK(pg_frame_timestamps(shorter, &replaced) == NULL);
    shorter->bytes += sizeof(struct pg_asked);
    CHECK(!frame_fits(shorter));
    free(shorter);
}

static void was_asked(const struct world *w, const struct pg_frame_head *f, int64_t deadline_ns)
{
    const struct pg_asked *asked = pg_frame_asked(f);
    CHECK(frame_fits(f) && asked != NULL);
    CHECK_EQUAL(asked->session, w->session);
    CHECK_EQUAL(asked->sequence, w->sequence);
    CHECK_EQUAL(asked->deadline_ns, deadline_ns);
    CHECK_EQUAL(asked->bulk_loaded, 0);
}

static void test_an_end_tells_who_asked(void)
{
    struct world w = {.rng = {6}, .wal = malloc(FRAMES)};
    const struct pg_timestamps *timestamps, *replaced;
    CHECK(w.wal != NULL);
    world_open(&w);
    two_timers(&w);
    take(&w);
    CHECK(pg_frame_asked(newest(&w, PG_WAL_ARM)) == NULL);
    replaces(&w);
    take(&w);
    was_asked(&w, newest(&w, PG_WAL_ARM), 30 * MS);
    timestamps = pg_frame_timestamps(newest(&w, PG_WAL_ARM), &replaced);
    CHECK(timestamps != NULL && replaced != NULL && replaced->add_lsn < timestamps->add_lsn);
    is_read_without_its_tail(newest(&w, PG_WAL_ARM), 2);
    extends(&w);
    cancels(&w);
    take(&w);
    was_asked(&w, newest(&w, PG_WAL_END), 70 * MS);
    is_read_without_its_tail(newest(&w, PG_WAL_END), 1);
    an_operation(&w);
    cancels(&w);
    acknowledge(&w);
    take(&w);
    CHECK_EQUAL(pg_frame_asked(newest(&w, PG_WAL_END))->sequence, 0);
    world_close(&w);
}

/* Every timestamp in a frame is that of its event. A frame identifies a replaced timer by ticket
 * and slot. */
static void test_frames_tell_when_and_of_what(void)
{
    struct world w = {.rng = {6}, .wal = malloc(FRAMES)};
    const struct pg_timestamps *replaced;
    CHECK(w.wal != NULL);
    world_open(&w);
    go(&w, 3 * MS);
    a_timer(&w);
    take(&w);
    const struct pg_wal_arm first = *(struct pg_wal_arm *)(newest(&w, PG_WAL_ARM) + 1);
    CHECK_EQUAL(first.armed_ns, w.now_ns);
    CHECK_EQUAL(first.armed_boot_ns, w.now_ns);
    pg_served(w.a, w.now_ns + 70);
    go(&w, MS);
    replaces(&w);
    take(&w);
    const struct pg_wal_arm *second = (void *)(newest(&w, PG_WAL_ARM) + 1);
    CHECK_EQUAL(second->replaced, first.ticket);
    CHECK_EQUAL(second->replaced_slot, first.slot);
    const struct pg_timestamps *timestamps = pg_frame_timestamps(newest(&w, PG_WAL_ARM), &replaced);
    CHECK_EQUAL(timestamps->armed_ns, w.now_ns);
    CHECK_EQUAL(timestamps->received_boot_ns, w.now_ns - WAITED_NS);
    CHECK_EQUAL(timestamps->applied_boot_ns, w.now_ns);
    CHECK_EQUAL(timestamps->done_boot_ns, 0);
    CHECK_EQUAL(replaced->armed_ns, w.now_ns - MS);
    CHECK_EQUAL(replaced->done_boot_ns, w.now_ns - MS + 70);
    go(&w, MS);
    is_published(&w);
    opens_a_bulk_load(&w);
    take(&w);
    CHECK_EQUAL(((struct pg_wal_entry *)(newest(&w, PG_WAL_ENTRY) + 1))->ended_boot_ns, w.now_ns);
    CHECK_EQUAL(((struct pg_wal_bulk_load *)(newest(&w, PG_WAL_BULK_LOAD) + 1))->at_ns, w.now_ns);
    world_close(&w);
}

/* ---- a snapshot during the work ------------------------------------------------------------ */

struct photographer {
    const struct world *world;
    uint8_t *snapshot;
    uint64_t bytes;
    struct pg_snapshot cursor;
};

/* Take the snapshot in small pieces, so that the arena changes often between the pieces. A piece
 * has space for any single frame of this test. */
static void *photograph(void *context)
{
    struct photographer *p = context;
    struct pg_arena *reader = malloc(pg_handle_bytes());
    struct pg_fault fault;
    CHECK(reader != NULL && pg_attach(reader, p->world->arena, pg_arena_bytes(&p->world->config),
                                      NULL, 0, LAYOUT, &fault));
    while (!p->cursor.done)
        p->bytes += pg_snapshot(reader, &p->cursor, p->snapshot + p->bytes, 1500);
    free(reader);
    return NULL;
}

/* Act `count` times at random; commit after each act. */
static void acts(struct world *w, uint64_t count)
{
    for (; count > 0; count--) {
        act(w);
        take(w);
    }
}

/* Fire all timers that are due. */
static void settle(struct world *w)
{
    while (go(w, 0))
        pg_published(w->a, w->a->header->replay_tail, 0, 0);
    take(w);
}

/* Check that redo of the snapshot and the frames restores the arena. */
static void is_restored(const struct world *w, const uint8_t *snapshot, uint64_t bytes)
{
    struct world copy;
    struct pg_fault fault;
    if (!redone(&copy, w, snapshot, bytes, &fault))
        report(&fault);
    whole(&copy);
    slots_are_the_same(w->a, copy.a);
    watermarks_are_the_same(w->a, copy.a);
    notices_are_the_same(w->a, copy.a);
    arena_close(&copy);
}

static void snapshot_while_working(struct world *w)
{
    struct photographer p = {.world = w, .snapshot = malloc(FRAMES)};
    pthread_t thread;
    CHECK(p.snapshot != NULL && pthread_create(&thread, NULL, photograph, &p) == 0);
    acts(w, 300);
    pthread_join(thread, NULL);
    settle(w);
    is_restored(w, p.snapshot, p.bytes);
    free(p.snapshot);
}

static void test_a_snapshot_during_the_work(void)
{
    struct world w = {.rng = {4}, .wal = malloc(FRAMES)};
    CHECK(w.wal != NULL);
    world_open(&w);
    for (uint32_t round = 0; round < 60; round++) {
        w.used = 0;
        simple(&w, PG_OP_ADVANCE_KEY, WATCHED, w.lsn);    /* appends an uncommitted frame */
        snapshot_while_working(&w);
        whole(&w);
    }
    world_close(&w);
}

/* Take a snapshot in small pieces, with up to `most` random acts before each piece. Return the
 * snapshot's size. */
static uint64_t snapshot_between_acts(struct world *w, uint8_t *snapshot, uint64_t most)
{
    struct pg_snapshot cursor = {0};
    uint64_t bytes = 0;
    while (!cursor.done) {
        acts(w, rng_below(&w->rng, most + 1));
        bytes += pg_snapshot(w->a, &cursor, snapshot + bytes, 1500);
    }
    return bytes;
}

/* More topic names than rows are in use, so that rows change their topics during a snapshot. */
static void test_a_snapshot_of_any_length(void)
{
    struct world w = {.rng = {6}, .wal = malloc(FRAMES), .topics = 2 * TOPICS};
    uint8_t *snapshot = malloc(FRAMES);
    CHECK(w.wal != NULL && snapshot != NULL);
    world_open(&w);
    for (uint64_t round = 0; round < 400; round++) {
        w.used = 0;
        simple(&w, PG_OP_ADVANCE_KEY, WATCHED, w.lsn);    /* appends an uncommitted frame */
        const uint64_t bytes = snapshot_between_acts(&w, snapshot, round % 100);
        acts(&w, rng_below(&w.rng, 40));
        settle(&w);
        is_restored(&w, snapshot, bytes);
    }
    world_close(&w);
    free(snapshot);
}

static void fire_and_send(struct world *w, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        CHECK_EQUAL(put(w, 0, w->now_ns, 0, PG_T_BOOT), PG_ST_ADDED);
        go(w, MS);
        sent(w);
        take(w);
    }
}

/* While a snapshot is taken, more notices are sent than the replay buffer holds. Then older timers
 * fire: the snapshot has their notices, and no frame has their payloads. */
static void test_a_snapshot_while_the_replay_buffer_is_used_up(void)
{
    struct world w = {.wal = malloc(FRAMES)};
    struct pg_snapshot cursor = {0};
    uint8_t *snapshot = malloc(FRAMES);
    CHECK(w.wal != NULL && snapshot != NULL);
    world_open(&w);
    for (uint32_t key = 1; key < KEYS - 1; key++)
        CHECK_EQUAL(put(&w, key, 200 * MS, 0, PG_T_BOOT), PG_ST_ADDED);
    uint64_t bytes = pg_snapshot(w.a, &cursor, snapshot, 1500);
    CHECK(!cursor.done);
    fire_and_send(&w, 2 * w.config.replay_capacity);
    go(&w, 200 * MS);
    CHECK(w.a->header->replay_tail - w.a->header->published > 10);
    while (!cursor.done)
        bytes += pg_snapshot(w.a, &cursor, snapshot + bytes, 1500);
    take(&w);
    is_restored(&w, snapshot, bytes);
    free(snapshot);
    world_close(&w);
}

/* ---- outcomes without an owner -------------------------------------------------------------- */

enum { OWNED = 6 };

static uint64_t drops(const struct world *w)
{
    const struct pg_frame_head *f;
    uint64_t count = 0;
    for (uint64_t at = 0; at < w->used; at += f->bytes) {
        f = (const struct pg_frame_head *)(w->wal + at);
        count += f->type == PG_WAL_END &&
                 ((const struct pg_wal_end *)(f + 1))->cause == PG_END_DROPPED;
    }
    return count;
}

static void owned_operations(struct world *w)
{
    for (uint32_t key = 0; key < OWNED; key++)
        CHECK_EQUAL(watch(w, key, 1, 9, false), PG_ST_ADDED);
}

/* Fill the WAL buffer so far that one more frame of an advance, or a larger frame, makes it
 * full. */
static void fill_to_the_limit(struct world *w)
{
    const struct pg_wal_buffer *s = w->a->wal_buffer;
    uint64_t value = 0, before;
    do {
        before = s->appended;
        CHECK_EQUAL(simple(w, PG_OP_ADVANCE_KEY, 1, ++value), PG_ST_DONE);
    } while (2 * s->appended - before - s->committed <= s->size / 100 * 94);
    CHECK(!pg_wal_buffer_full(w->a));
}

static void outcomes_wait(struct world *w, uint64_t count)
{
    CHECK(pg_wal_buffer_full(w->a));
    go(w, 0);
    CHECK_EQUAL(w->a->metrics->outcomes, count);
    whole(w);
    take(w);
    CHECK_EQUAL(drops(w), 0);
}

/* Check that a record is written for each dropped outcome, and that redo of these records restores
 * no outcome. */
static void outcomes_go(struct world *w, const struct photographer *p)
{
    struct pg_fault fault;
    struct world copy;
    while (go(w, 0))
        take(w);
    take(w);
    CHECK_EQUAL(drops(w), OWNED);
    CHECK_EQUAL(w->a->metrics->outcomes_dropped, OWNED);
    CHECK_EQUAL(w->a->metrics->outcomes, 0);
    whole(w);
    if (!redone(&copy, w, p->snapshot, p->bytes, &fault))
        report(&fault);
    CHECK_EQUAL(copy.a->metrics->outcomes, 0);
    CHECK_EQUAL(copy.a->metrics->live, w->a->metrics->live);
    whole(&copy);
    arena_close(&copy);
}

/* The END record of the session fills the buffer. The session's outcomes wait without an owner
 * until the next commit. */
static void a_session_with_outcomes_ends(struct world *w)
{
    owned_operations(w);
    go(w, 51 * MS);
    fill_to_the_limit(w);
    bye(w);
    outcomes_wait(w, OWNED);
}

/* The record of the first expired operation fills the buffer. Its outcome enters no inbox and waits
 * without an owner; the other operations stay armed. */
static void operations_without_a_session_end(struct world *w)
{
    owned_operations(w);
    bye(w);
    greet(w);
    fill_to_the_limit(w);
    go(w, 51 * MS);
    outcomes_wait(w, 1);
}

static void test_each_dropped_outcome_has_a_record_behind_a_full_ring(void)
{
    void (*const ends[])(struct world *) = {a_session_with_outcomes_ends,
                                            operations_without_a_session_end};
    for (uint32_t i = 0; i < 2; i++) {
        struct world w = {.rng = {7}, .wal = malloc(FRAMES)};
        struct photographer p = {.world = &w, .snapshot = malloc(FRAMES)};
        CHECK(w.wal != NULL && p.snapshot != NULL);
        world_open(&w);
        photograph(&p);
        ends[i](&w);
        outcomes_go(&w, &p);
        free(p.snapshot);
        world_close(&w);
    }
}

/* ---- damaged frames ------------------------------------------------------------------------ */

static void spoil(struct rng *r, uint8_t *bytes, uint64_t len)
{
    static const uint8_t values[] = {0, 1, 2, 5, 14, 0x7f, 0x80, 0xff};
    for (uint64_t n = 1 + rng_below(r, 3); n > 0; n--)
        bytes[rng_below(r, len)] = values[rng_below(r, sizeof values)];
}

/* Redo damaged frames. Redo may refuse them with a reason, or the check after redo may find
 * contradictions between frames, such as one key in two rows. Return 1 if either found a fault. */
static uint32_t noise(struct world *w, const uint8_t *snapshot, uint64_t bytes)
{
    struct pg_fault fault = {0};
    struct world copy;
    int done = redone(&copy, w, snapshot, bytes, &fault);
    CHECK((fault.part[0] == 0) == (done != 0));
    done = done && pg_check(copy.a, &fault);
    arena_close(&copy);
    return done == 0;
}

static void test_noise_is_refused(void)
{
    struct world w = {.rng = {5}, .wal = malloc(FRAMES)};
    struct photographer p = {.world = &w, .snapshot = malloc(FRAMES)};
    CHECK(w.wal != NULL && p.snapshot != NULL);
    world_open(&w);
    for (uint32_t i = 0; i < 60; i++)
        act(&w);
    photograph(&p);
    for (uint32_t i = 0; i < 60; i++)
        act(&w);
    take(&w);
    uint8_t *snapshot = malloc(p.bytes), *wal = w.wal;
    uint32_t refusals = 0;
    w.wal = malloc(w.used);
    CHECK(snapshot != NULL && w.wal != NULL);
    for (uint32_t i = 0; i < 3000; i++) {
        memcpy(snapshot, p.snapshot, p.bytes);
        memcpy(w.wal, wal, w.used);
        if (i % 2 == 0)
            spoil(&w.rng, snapshot + frame_bytes(PG_WAL_HEAD, 0),
                  p.bytes - frame_bytes(PG_WAL_HEAD, 0));
        else
            spoil(&w.rng, w.wal, w.used);
        refusals += noise(&w, snapshot, p.bytes);
    }
    CHECK(refusals > 500 && refusals < 2900);
    free(snapshot);
    free(wal);
    free(p.snapshot);
    world_close(&w);
}

int main(void)
{
    RUN(test_the_frame_in_doubt);
    RUN(test_a_frame_in_a_ring_that_was_used);
    RUN(test_a_cancel_that_was_only_answered);
    RUN(test_a_ring_that_fills);
    RUN(test_schedules_begin_again_once_a_full_ring_has_space);
    RUN(test_durable_replies);
    RUN(test_an_end_tells_who_asked);
    RUN(test_frames_tell_when_and_of_what);
    RUN(test_a_snapshot_during_the_work);
    RUN(test_a_snapshot_while_the_replay_buffer_is_used_up);
    RUN(test_a_snapshot_of_any_length);
    RUN(test_each_dropped_outcome_has_a_record_behind_a_full_ring);
    RUN(test_noise_is_refused);
    return 0;
}

/* Test a whole arena against a model of the armed timers, and with hostile bytes. The allocated
 * memory ends where the arena ends, so the sanitizers report every access beyond it. */
#include "check.h"
#include "core/core.h"

enum { KEYS = 48, OUT = 1 << 20, LAYOUT = 4711, KINDS = 3 };

struct timer {
    uint64_t ticket;              /* ticket of the armed timer; 0 = not armed */
    int64_t deadline_ns;          /* deadline on the arena's clock */
    int64_t wall_ns;              /* deadline on the wall clock; NO_WALL = none */
    uint32_t payload_len, topic;
    /* Ticket and position of the key's newest notice; 0 = no notice, or a timer was armed after
     * it. */
    uint64_t fired_ticket;
    uint64_t fired_position;
};

struct world {
    struct rng rng;
    struct pg_config config;
    struct pg_arena *a;
    void *arena, *secret;
    uint8_t *out;
    int64_t now_ns, offset_ns;
    /* Replay buffer entries before this position have been compared with the model. */
    uint64_t seen;
    uint64_t sequences[KINDS];
    struct timer timers[KEYS];
    uint32_t armed;
};

/* ---- set-up ------------------------------------------------------------------------------ */

static struct pg_config config_random(struct rng *r)
{
    static const uint32_t fanouts[] = {2, 3, 20, 64, 255, 256};
    static const int64_t ticks[] = {1000, 7919, 1000000, 100000000};
    return (struct pg_config){
        .layout_id = LAYOUT, .payload_bytes = 4096u << rng_below(r, 6),
        .replay_bytes_max = 64u << rng_below(r, 8), .tick_ns = ticks[rng_below(r, 4)],
        .now_ns = (int64_t)(rng_next(r) >> (3 + rng_below(r, 60))), .stream_id = 1,
        .secret = {rng_next(r), rng_next(r)}, .capacity = 1 + (uint32_t)rng_below(r, KEYS),
        .replay_capacity = 16u << rng_below(r, 3), .fanout = fanouts[rng_below(r, 6)],
        .namespaces = 1, .topics = KINDS, .sessions = 2, .watches = 8, .watermarks = 8,
        .inbox_max = 8, .clock_kind = PG_CLOCK_VIRTUAL};
}

static void world_open(struct world *w, uint64_t seed)
{
    *w = (struct world){.rng = {seed * 0x9e3779b97f4a7c15u + 1}};
    w->config = config_random(&w->rng);
    w->arena = zeroed(pg_arena_bytes(&w->config));
    w->secret = zeroed(pg_private_bytes(&w->config));
    w->a = malloc(pg_handle_bytes());
    w->out = malloc(OUT);
    CHECK(w->a != NULL && w->out != NULL);
    CHECK(pg_create(w->a, w->arena, w->secret, &w->config));
    w->now_ns = w->config.now_ns;
}

static void world_close(struct world *w)
{
    free(w->arena);
    free(w->secret);
    free(w->a);
    free(w->out);
}

static void whole(struct world *w)
{
    struct pg_fault fault;
    if (pg_check(w->a, &fault) && pg_check_live(w->a, &fault))
        return;
    fprintf(stderr, "%s: %s at %" PRIu64 ": expected %" PRIu64 ", found %" PRIu64 "\n", fault.part,
            fault.detail, fault.where, fault.expected, fault.found);
    CHECK(!"the arena is whole");
}

/* ---- the model ------------------------------------------------------------------------------ */

/* All payloads are a prefix of this pattern, which has no zeros. */
static uint8_t pattern[PG_PAYLOAD_MAX];

static struct pg_put put_of(const struct world *w, uint32_t key, uint8_t *bytes)
{
    static const char *const topics[KINDS] = {"", "t", "u"};
    const uint32_t topic = w->timers[key].topic;
    bytes[0] = (uint8_t)key;
    return (struct pg_put){.namespace_name = "n", .namespace_len = 1, .topic_name = topics[topic],
                           .topic_len = (uint8_t)strlen(topics[topic]), .key = bytes,
                           .key_len = (uint8_t)(1 + key * 5), .key_type = PG_KEY_BYTES,
                           .payload = pattern, .payload_len = w->timers[key].payload_len};
}

static int64_t time_random(struct world *w, uint8_t kind)
{
    const int64_t delay = (int64_t)(rng_next(&w->rng) >> (1 + rng_below(&w->rng, 63)));
    if (kind == PG_T_DELAY)
        return delay - (int64_t)rng_below(&w->rng, 3);
    const int64_t base = kind == PG_T_WALL ? w->now_ns + w->offset_ns : w->now_ns;
    int64_t sum;
    return __builtin_add_overflow(base, delay, &sum) ? INT64_MAX : sum;
}

static void model_arm(struct world *w, uint32_t key, const struct pg_put *put,
                      const struct pg_result *r)
{
    struct timer *t = &w->timers[key];
    CHECK(r->ticket >> 8 > t->ticket && r->ticket >> 8 > t->fired_ticket);
    w->armed += t->ticket == 0;
    t->ticket = r->ticket >> 8;
    t->deadline_ns = r->deadline_ns;
    t->wall_ns = put->time_kind == PG_T_WALL ? put->time_ns : NO_WALL;
    t->fired_ticket = 0;
}

static void model_extend(struct timer *t, const struct world *w, const struct pg_put *put,
                         int64_t deadline_ns)
{
    t->deadline_ns = deadline_ns;
    if (t->wall_ns == NO_WALL)
        return;
    if (put->time_kind == PG_T_WALL)
        t->wall_ns = put->time_ns;
    else if (__builtin_add_overflow(deadline_ns, w->offset_ns, &t->wall_ns))
        t->wall_ns = INT64_MAX;
}

static void step_put(struct world *w)
{
    const uint32_t key = (uint32_t)rng_below(&w->rng, KEYS);
    const struct timer before = w->timers[key];
    struct timer *t = &w->timers[key];
    struct pg_result r;
    uint8_t bytes[256] = {0};

    t->payload_len = (uint32_t)(rng_next(&w->rng) >> 48 >> rng_below(&w->rng, 16));
    t->topic = (uint32_t)rng_below(&w->rng, KINDS);
    struct pg_put put = put_of(w, key, bytes);
    put.mode = (uint8_t)rng_below(&w->rng, PG_MODES);
    put.time_kind = (uint8_t)rng_below(&w->rng, PG_T_KINDS);
    put.time_ns = time_random(w, put.time_kind);
    pg_put(w->a, &put, &r);
    const unsigned status = (unsigned)(r.ticket & 0xff);
    if (status == PG_ST_ADDED || status == PG_ST_REPLACED) {
        CHECK_EQUAL(status, before.ticket ? PG_ST_REPLACED : PG_ST_ADDED);
        model_arm(w, key, &put, &r);
        return;
    }
    *t = before;
    if (status == PG_ST_EXTENDED)
        model_extend(t, w, &put, r.deadline_ns);
    if (status == PG_ST_FULL)
        CHECK(before.ticket == 0 && w->armed == w->config.capacity);
    if (status == PG_ST_EXTENDED || status == PG_ST_KEPT || status == PG_ST_EXISTS)
        CHECK_EQUAL(r.ticket >> 8, before.ticket);
    else
        CHECK(status >= PG_ST_FULL);
}

static void step_cancel(struct world *w)
{
    const uint32_t key = (uint32_t)rng_below(&w->rng, KEYS);
    struct timer *t = &w->timers[key];
    struct pg_result r;
    uint8_t bytes[256] = {0};
    const struct pg_put put = put_of(w, key, bytes);
    const bool noticed = t->fired_ticket != 0 && t->fired_position >= w->a->header->replay_head;

    pg_cancel(w->a, &put, 0, &r);
    CHECK_EQUAL(r.ticket & 0xff,
                t->ticket ? PG_ST_CANCELLED : noticed ? PG_ST_FIRED : PG_ST_UNKNOWN);
    CHECK_EQUAL(r.ticket >> 8, t->ticket ? t->ticket : noticed ? t->fired_ticket : 0);
    w->armed -= t->ticket != 0;
    t->ticket = 0;
}

static void model_fire(struct world *w, uint64_t position)
{
    const struct pg_entry *e = replay_at(w->a, position);
    const uint8_t *key = blob_at(&w->a->blobs, e->blob);
    struct timer *t = &w->timers[key[0]];
    CHECK_EQUAL(e->ticket, t->ticket << 8 | PG_CAUSE_EXPIRED);
    CHECK_EQUAL(e->key_len, 1 + key[0] * 5);
    CHECK_EQUAL(e->payload_len, t->payload_len);
    CHECK(memcmp(key + e->key_len, pattern, e->payload_len) == 0);
    CHECK_EQUAL(e->sequence, ++w->sequences[e->topic]);
    CHECK(e->deadline_ns <= e->fired_ns && e->fired_ns <= w->now_ns);
    if (t->wall_ns == NO_WALL)
        CHECK_EQUAL(e->deadline_ns, t->deadline_ns);
    else
        CHECK(t->wall_ns <= w->now_ns + w->offset_ns);
    t->fired_ticket = t->ticket;
    t->fired_position = position;
    t->ticket = 0;
    w->armed--;
}

/* Advance with a random budget. If the budget was large enough, no due timer may still be armed. */
static void step_advance(struct world *w)
{
    const int64_t span = (int64_t)(rng_next(&w->rng) >> (4 + rng_below(&w->rng, 60)));
    int64_t to;
    int more;
    if (rng_below(&w->rng, 8) == 0 && w->now_ns < INT64_MAX / 4)
        w->offset_ns += (int64_t)rng_below(&w->rng, 1u << 30) - (1 << 29);
    if (!__builtin_add_overflow(w->now_ns, span, &to) && to < INT64_MAX / 2)
        w->now_ns = to;
    const uint32_t budget = rng_below(&w->rng, 2) ? UINT32_MAX : (uint32_t)rng_below(&w->rng, 5);
    CHECK(pg_advance(w->a, w->now_ns, w->offset_ns, w->now_ns, budget, &more) <= budget);
    for (; w->seen < w->a->header->replay_tail; w->seen++)
        model_fire(w, w->seen);
    for (uint32_t i = 0; i < KEYS && !more; i++)
        if (w->timers[i].ticket != 0 && w->timers[i].wall_ns == NO_WALL)
            CHECK(w->timers[i].deadline_ns > w->now_ns - w->config.tick_ns);
}

static void step_publish(struct world *w)
{
    struct pg_part parts[8];
    uint64_t upto;
    while (w->a->header->published < w->a->header->replay_tail) {
        CHECK(pg_notices(w->a, w->out, OUT, parts, 8, &upto) > 0);
        CHECK(upto > w->a->header->published);
        pg_published(w->a, upto, 0, 0);
    }
}

static void step_read(struct world *w)
{
    uint64_t positions[64], lost, got, used = 0;
    struct pg_part parts[8];
    uint32_t cursor = 0, topic = (uint32_t)rng_below(&w->rng, KINDS);
    const uint64_t first = 1 + rng_below(&w->rng, 64);
    while (cursor <= w->config.capacity)
        used += pg_scan(w->a, &cursor, 7, w->out, OUT);
    CHECK((used == 0) == (w->armed == 0));
    pg_replay(w->a, topic, first, first + rng_below(&w->rng, 64), positions, w->out,
              sizeof(struct pg_notices) + rng_below(&w->rng, OUT / 2), &lost, &got);
    CHECK(lost + 1 >= first && got >= lost);
    cursor = 0;
    pg_tail_heartbeats(w->a, 0, &cursor, w->out, OUT, parts, 8);
}

static void derived_damage(struct world *w)
{
    static const enum pg_region_id derived[] = {
        PG_R_FREE_SLOTS, PG_R_WHEEL, PG_R_BUCKETS, PG_R_CHUNKS, PG_R_FREE_CHUNKS,
        PG_R_INDEX, PG_R_BLOB_HEAP, PG_R_BLOB_MAP, PG_R_NAME_INDEX};
    for (uint32_t i = 0; i < sizeof derived / sizeof derived[0]; i++) {
        const struct pg_region *r = &w->a->header->regions[derived[i]];
        memset((uint8_t *)w->arena + r->offset, (int)rng_below(&w->rng, 256), r->length);
    }
}

/* Rebuild places before keys, the reverse of the usual order. In a daemon these two passes run at
 * the same time, so neither may depend on the result of the other. */
static int rebuild_in_steps(struct world *w, struct pg_fault *why)
{
    STORE_RELEASE(&w->a->header->state, PG_READY);
    return rebuild_begin(w->a, w->now_ns, why) && w->a->header->state == PG_REBUILDING &&
           rebuild_places(w->a, why) && rebuild_keys(w->a, why) && rebuild_end(w->a, why);
}

typedef int (*rebuild_fn)(struct world *w, struct pg_fault *why);

static int rebuild_in_one(struct world *w, struct pg_fault *why)
{
    return pg_rebuild(w->a, w->now_ns, why);
}

static int rebuild_in_threads(struct world *w, struct pg_fault *why)
{
    return pg_rebuild_threaded(w->a, w->now_ns, why);
}

static void step_restart(struct world *w)
{
    static const rebuild_fn rebuilds[] = {rebuild_in_one, rebuild_in_steps, rebuild_in_threads};
    struct pg_fault why;
    derived_damage(w);
    CHECK(pg_attach(w->a, w->arena, pg_arena_bytes(&w->config), w->secret,
                    pg_private_bytes(&w->config), LAYOUT, &why));
    CHECK(rebuilds[rng_below(&w->rng, 3)](w, &why));
}

static void fresh_open(struct world *to)
{
    to->arena = zeroed(pg_arena_bytes(&to->config));
    to->secret = zeroed(pg_private_bytes(&to->config));
    to->a = malloc(pg_handle_bytes());
    CHECK(to->a != NULL && pg_create(to->a, to->arena, to->secret, &to->config));
}

static void move_to(struct world *w, const struct world *to)
{
    free(w->arena);
    free(w->secret);
    free(w->a);
    w->config = to->config;
    w->arena = to->arena;
    w->secret = to->secret;
    w->a = to->a;
}

/* Migrate into an arena that is at least as large, so that it has space for everything. */
static void step_migrate(struct world *w)
{
    struct world to = {.config = w->config};
    struct pg_fault why;
    to.config.capacity += (uint32_t)rng_below(&w->rng, 10);
    to.config.payload_bytes += rng_below(&w->rng, 3) * 4096;
    to.config.fanout = 2 + (uint32_t)rng_below(&w->rng, 255);
    fresh_open(&to);
    CHECK(pg_migrate(to.a, w->a, &why));
    move_to(w, &to);
}

/* Convert the arena as if it had an earlier ABI. Its derived state is damaged first, because a
 * conversion must not use it. */
static void step_convert(struct world *w)
{
    struct world to = {.config = w->config};
    struct pg_fault why;
    derived_damage(w);
    CHECK(pg_attach_previous(w->a, w->arena, pg_arena_bytes(&w->config), w->secret,
                             pg_private_bytes(&w->config), LAYOUT, &why));
    fresh_open(&to);
    CHECK(pg_convert(to.a, w->a, &why));
    CHECK(pg_rebuild(to.a, w->now_ns, &why));
    move_to(w, &to);
}

static uint64_t worlds = 150;

static void random_steps(void)
{
    enum { STEPS = 400 };
    for (uint64_t seed = 1; seed <= worlds; seed++) {
        struct world w;
        world_open(&w, seed);
        for (int i = 0; i < STEPS; i++) {
            const uint64_t dice = rng_below(&w.rng, 100);
            if (dice < 50) step_put(&w);
            else if (dice < 65) step_cancel(&w);
            else if (dice < 85) step_advance(&w);
            else if (dice < 94) step_publish(&w);
            else if (dice < 97) step_read(&w);
            else if (dice < 98) step_restart(&w);
            else if (dice < 99) step_convert(&w);
            else step_migrate(&w);
            whole(&w);
            CHECK_EQUAL(w.a->metrics->live, w.armed);
        }
        world_close(&w);
    }
}

/* ---- rare cases ------------------------------------------------------------------------- */

/* The wall clock falls behind, but by too little to count as a step. A timer that is due on the
 * arena's clock waits for the wall clock, and the deadline in its notice includes the wait. */
static void a_wall_timer_waits_for_the_wall_clock(void)
{
    enum { SLOWER_NS = 900000 };
    struct world w;
    uint8_t bytes[256] = {0};
    struct pg_result r;
    int more;
    for (uint64_t seed = 1; world_open(&w, seed), w.config.tick_ns >= SLOWER_NS; seed++)
        world_close(&w);
    const int64_t tick_ns = w.config.tick_ns, due_ns = (w.now_ns / tick_ns + 10) * tick_ns;
    struct pg_put put = put_of(&w, 0, bytes);
    put.time_kind = PG_T_WALL;
    put.time_ns = due_ns;
    pg_put(w.a, &put, &r);
    CHECK_EQUAL(r.deadline_ns, due_ns);
    pg_advance(w.a, due_ns + tick_ns / 2, -SLOWER_NS, 0, UINT32_MAX, &more);
    CHECK_EQUAL(w.a->metrics->live, 1);
    pg_advance(w.a, due_ns + 2 * SLOWER_NS, -SLOWER_NS, 0, UINT32_MAX, &more);
    CHECK_EQUAL(w.a->metrics->live, 0);
    CHECK_EQUAL(replay_at(w.a, 0)->deadline_ns, due_ns + SLOWER_NS);
    world_close(&w);
}

/* A rebuild drops a damaged replay buffer entry only if its notice was sent. If the notice was not
 * sent, the rebuild reports the damaged entry. */
static void a_notice_that_was_not_sent_is_not_withdrawn(void)
{
    struct world w;
    struct pg_fault why;
    world_open(&w, 1);
    while (w.a->header->replay_tail == 0) {
        step_put(&w);
        step_advance(&w);
    }
    CHECK_EQUAL(w.a->header->published, 0);
    replay_at(w.a, 0)->commit = 0;
    CHECK(!pg_rebuild(w.a, w.now_ns, &why));
    CHECK_EQUAL(w.a->header->replay_head, 0);
    w.a->header->published = 1;
    CHECK(pg_rebuild(w.a, w.now_ns, &why));
    CHECK_EQUAL(w.a->header->replay_head, 1);
    whole(&w);
    world_close(&w);
}

static void a_rebuild_moves_the_clock_to_its_own_time(void)
{
    struct world w;
    struct pg_fault why;
    world_open(&w, 1);
    w.now_ns += w.config.tick_ns;
    CHECK(pg_rebuild(w.a, w.now_ns, &why));
    CHECK_EQUAL(w.a->header->now_ns, w.now_ns);
    whole(&w);
    world_close(&w);
}

/* ---- hostile messages ------------------------------------------------------------------------ */

static uint8_t *append(uint8_t *at, const void *bytes, size_t len)
{
    memcpy(at, bytes, len);
    return at + len;
}

static uint64_t session_begin(struct world *w, uint8_t *reply)
{
    struct {
        struct pg_frame frame;
        struct pg_hello hello;
    } m = {.frame = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION, .message = PG_M_HELLO}};
    uint64_t bytes;
    int64_t wait_ns;
    struct pg_welcome welcome;
    CHECK_EQUAL(pg_handle(w->a, &m, sizeof m, 0, 0, 0, 0, reply, &bytes, &wait_ns), PG_H_REPLY);
    CHECK_EQUAL(bytes, sizeof(struct pg_frame) + sizeof welcome);
    memcpy(&welcome, reply + sizeof(struct pg_frame), sizeof welcome);
    return welcome.session;
}

/* Make a batch of puts and cancels, or a query; return its size in bytes. */
static uint64_t message_make(struct world *w, uint64_t session, uint64_t sequence, uint8_t *to)
{
    const bool query = rng_below(&w->rng, 4) == 0;
    const uint32_t count = 1 + (uint32_t)rng_below(&w->rng, 6);
    struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                         .message = query ? PG_M_QUERY : PG_M_BATCH, .session = session,
                         .sequence = sequence, .count = count, .names = 2, .names_bytes = 8};
    uint8_t area[512];
    uint32_t used = 0;
    uint8_t *at = append(append(to, &f, sizeof f), "\1\1nt\1\0n", 8);
    for (uint32_t i = 0; i < count; i++) {
        struct pg_record r = {.op = query ? PG_OP_GET : PG_OP_CANCEL, .key_type = PG_KEY_BYTES,
                              .key_len = (uint8_t)(1 + rng_below(&w->rng, 20)),
                              .name = (uint16_t)rng_below(&w->rng, 2)};
        if (!query && rng_below(&w->rng, 3) != 0) {
            r.op = PG_OP_PUT;
            r.mode = (uint8_t)rng_below(&w->rng, PG_MODES);
            r.time_kind = (uint8_t)rng_below(&w->rng, PG_T_KINDS);
            r.time_ns = (int64_t)rng_below(&w->rng, 1u << 30);
            r.payload_len = (uint32_t)rng_below(&w->rng, 40);
        }
        memset(area + used, 'k', r.key_len + r.payload_len);
        used += r.key_len + r.payload_len;
        at = append(at, &r, sizeof r);
    }
    return (uint64_t)(append(at, area, used) - to);
}

/* Change some bytes of a message, or shorten or extend it; often change nothing. Return the new
 * size. */
static uint64_t message_spoil(struct world *w, uint8_t *bytes, uint64_t len)
{
    for (uint64_t n = rng_below(&w->rng, 4); n > 0; n--)
        bytes[rng_below(&w->rng, len)] = (uint8_t)rng_next(&w->rng);
    switch (rng_below(&w->rng, 6)) {
    case 0: return rng_below(&w->rng, len);
    case 1: return len + rng_below(&w->rng, 9);
    default: return len;
    }
}

static void messages(void)
{
    uint8_t *reply = malloc(PG_MESSAGE_MAX);
    CHECK(reply != NULL);
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct world w;
        uint8_t draft[1024] = {0};
        world_open(&w, seed);
        const uint64_t session = session_begin(&w, reply);
        for (int i = 0; i < 400; i++) {
            const uint64_t last = w.a->sessions[session & 0xffff].last;
            const uint64_t made = message_make(&w, session, last + 1, draft);
            const uint64_t len = message_spoil(&w, draft, made);
            uint8_t *exact = malloc(len ? len : 1);
            uint64_t bytes;
            int64_t wait_ns;
            CHECK(exact != NULL);
            memcpy(exact, draft, len);
            if (pg_handle(w.a, exact, len, 0, 0, 0, 0, reply, &bytes, &wait_ns) == PG_H_REPLY)
                CHECK(bytes >= sizeof(struct pg_frame));
            free(exact);
            whole(&w);
        }
        world_close(&w);
    }
    free(reply);
}

/* ---- hostile memory ----------------------------------------------------------------------- */

/* A rebuild of damaged authoritative state makes a sound arena or fails with an error. It never
 * reads outside of the arena. */
static void damaged_authoritative_state(void)
{
    static const enum pg_region_id authoritative[] = {PG_R_HOT, PG_R_COLD, PG_R_NAMESPACES,
                                                      PG_R_TOPICS,
                                                      PG_R_REPLAY_BUFFER};
    for (uint64_t seed = 1; seed <= 600; seed++) {
        struct world w;
        struct pg_fault why;
        world_open(&w, seed);
        for (int i = 0; i < 100; i++) {
            step_put(&w);
            if (i % 10 == 0)
                step_advance(&w);
        }
        for (uint64_t n = 1 + rng_below(&w.rng, 4); n > 0; n--) {
            const struct pg_region *r = &w.a->header->regions[authoritative[rng_below(&w.rng, 5)]];
            const uint64_t used = (uint64_t)r->stride * (1 + rng_below(&w.rng, r->count));
            ((uint8_t *)w.arena)[r->offset + used - 1 - rng_below(&w.rng, r->stride)] =
                (uint8_t)rng_next(&w.rng);
        }
        if (pg_attach(w.a, w.arena, pg_arena_bytes(&w.config), w.secret,
                      pg_private_bytes(&w.config), LAYOUT, &why) &&
            !pg_rebuild(w.a, w.now_ns, &why))
            CHECK(why.part[0] != 0);
        world_close(&w);
    }
}

static void damaged_header(void)
{
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        struct world w;
        struct pg_fault why;
        world_open(&w, seed % 20 + 1);
        w.rng.state += seed;
        step_put(&w);
        for (uint64_t n = 1 + rng_below(&w.rng, 3); n > 0; n--)
            ((uint8_t *)w.arena)[rng_below(&w.rng, sizeof(struct pg_header))] ^=
                (uint8_t)(1u << rng_below(&w.rng, 8));
        if (!pg_attach(w.a, w.arena, pg_arena_bytes(&w.config), w.secret,
                       pg_private_bytes(&w.config), LAYOUT, &why))
            CHECK(why.part[0] != 0 && why.expected != why.found);
        else if (!pg_rebuild(w.a, w.now_ns, &why))
            CHECK(why.part[0] != 0);
        world_close(&w);
    }
}

/* An arena of an earlier ABI whose header is damaged is either refused, or converted without any
 * access outside of the arena. */
static void damaged_previous(void)
{
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        struct world w, to;
        struct pg_fault why;
        world_open(&w, seed % 20 + 1);
        w.rng.state += seed;
        step_put(&w);
        ((uint8_t *)w.arena)[rng_below(&w.rng, sizeof(struct pg_header))] ^=
            (uint8_t)(1u << rng_below(&w.rng, 8));
        to = (struct world){.config = w.config};
        fresh_open(&to);
        if (!pg_attach_previous(w.a, w.arena, pg_arena_bytes(&w.config), w.secret,
                                pg_private_bytes(&w.config), LAYOUT, &why) ||
            !pg_convert(to.a, w.a, &why) || !pg_rebuild(to.a, w.now_ns, &why))
            CHECK(why.part[0] != 0);
        move_to(&w, &to);
        world_close(&w);
    }
}

/* Private tables are converted row by row. A header with a row size of 0 would make the conversion
 * skip every row. */
static void rows_without_bytes_are_refused(void)
{
    static const size_t at[] = {offsetof(struct pg_private, session_bytes),
                                offsetof(struct pg_private, reply_bytes)};
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        struct world w, to;
        struct pg_fault why;
        world_open(&w, 1);
        to = (struct world){.config = w.config};
        fresh_open(&to);
        CHECK(pg_attach_previous(w.a, w.arena, pg_arena_bytes(&w.config), w.secret,
                                 pg_private_bytes(&w.config), LAYOUT, &why));
        memset((uint8_t *)w.secret + at[i], 0, sizeof(uint32_t));
        CHECK(!pg_convert(to.a, w.a, &why));
        CHECK(strcmp(why.part, "convert") == 0);
        move_to(&w, &to);
        world_close(&w);
    }
}

/* The optional argument is the number of random worlds to run. If it is given, the other tests are
 * skipped. */
int main(int argc, char **argv)
{
    memset(pattern, 'p', sizeof pattern);
    if (argc > 1)
        worlds = strtoull(argv[1], NULL, 10);
    RUN(random_steps);
    if (argc > 1)
        return 0;
    RUN(a_wall_timer_waits_for_the_wall_clock);
    RUN(a_notice_that_was_not_sent_is_not_withdrawn);
    RUN(a_rebuild_moves_the_clock_to_its_own_time);
    RUN(messages);
    RUN(damaged_authoritative_state);
    RUN(damaged_header);
    RUN(damaged_previous);
    RUN(rows_without_bytes_are_refused);
    return 0;
}

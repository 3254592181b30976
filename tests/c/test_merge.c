/* Test the tickets of shards, and the merge of those parts of several arenas that belong to one
 * shard. */
#include "check.h"
#include "core/core.h"

enum { LAYOUT = 4711, MS = 1000000, KEYS = 40, SHARDS = 3 };

struct world {
    struct pg_config config;
    struct pg_arena *a;
    void *arena, *secret;
};

/* ---- set-up ------------------------------------------------------------------------------ */

static void world_open(struct world *w, uint32_t shard, uint32_t shards)
{
    w->config = (struct pg_config){
        .layout_id = LAYOUT, .payload_bytes = 65536, .replay_bytes_max = 32768, .tick_ns = MS,
        .stream_id = 1, .secret = {shard + 1, shards}, .capacity = 3 * KEYS,
        .replay_capacity = 128, .fanout = 8, .namespaces = 4, .topics = 8, .sessions = 2,
        .watches = 8, .watermarks = 4, .inbox_max = 8, .clock_kind = PG_CLOCK_VIRTUAL,
        .shard = shard, .shards = shards};
    w->arena = zeroed(pg_arena_bytes(&w->config));
    w->secret = zeroed(pg_private_bytes(&w->config));
    w->a = malloc(pg_handle_bytes());
    CHECK(w->a != NULL && pg_create(w->a, w->arena, w->secret, &w->config));
}

static void sound(struct world *w)
{
    struct pg_fault fault;
    if (!pg_check(w->a, &fault)) {
        fprintf(stderr, "%s: %s\n", fault.part, fault.detail);
        CHECK(false);
    }
}

static void world_close(struct world *w)
{
    sound(w);
    free(w->arena);
    free(w->secret);
    free(w->a);
}

static struct pg_put named(const char *ns, const uint32_t *key)
{
    return (struct pg_put){.namespace_name = ns, .topic_name = "t", .namespace_len = 1,
                           .topic_len = 1, .key = (const uint8_t *)key, .key_len = sizeof *key,
                           .key_type = PG_KEY_BYTES, .time_kind = PG_T_BOOT};
}

static struct pg_result added(struct world *w, const char *ns, uint32_t key, int64_t time_ns)
{
    struct pg_put put = named(ns, &key);
    struct pg_result r;
    put.payload = (const uint8_t *)"payload of a timer";
    put.payload_len = key % 18;
    put.time_ns = time_ns;
    pg_put(w->a, &put, &r);
    return r;
}

static unsigned cancelled(struct world *w, const char *ns, uint32_t key, uint64_t ticket)
{
    const struct pg_put put = named(ns, &key);
    struct pg_result r;
    pg_cancel(w->a, &put, ticket, &r);
    return (unsigned)(r.ticket & 0xff);
}

/* ---- tickets ------------------------------------------------------------------------------- */

static void a_ticket_begins_with_its_shard(void)
{
    for (uint32_t shard = 0; shard < SHARDS; shard++) {
        struct world w;
        world_open(&w, shard, SHARDS);
        for (uint32_t n = 1; n <= 3; n++)
            CHECK_EQUAL(added(&w, "n", n, MS).ticket >> 8, shard * PG_TICKET_SHARD + n);
        CHECK_EQUAL(ticket_shard(w.a->header->next_ticket), shard);
        world_close(&w);
    }
}

static void alone_it_is_a_plain_number(void)
{
    struct world w;
    world_open(&w, 0, 1);
    CHECK_EQUAL(added(&w, "n", 1, MS).ticket >> 8, 1);
    CHECK_EQUAL(added(&w, "n", 2, MS).ticket >> 8, 2);
    world_close(&w);
}

static void the_last_ticket_is_not_followed_by_another_shards(void)
{
    struct world w;
    world_open(&w, 1, SHARDS);
    w.a->header->next_ticket = 2 * PG_TICKET_SHARD - 1;
    CHECK_EQUAL(added(&w, "n", 1, MS).ticket >> 8, 2 * PG_TICKET_SHARD - 1);
    CHECK_EQUAL(added(&w, "n", 2, MS).ticket, PG_ST_FULL_TICKETS);
    CHECK_EQUAL(cancelled(&w, "n", 1, 2 * PG_TICKET_SHARD - 1), PG_ST_CANCELLED);
    world_close(&w);
}

static void a_shard_that_is_not_there_is_refused(void)
{
    struct world w;
    struct pg_fault why;
    world_open(&w, 1, 2);
    w.config.shard = 2;
    CHECK_EQUAL(pg_arena_bytes(&w.config), 0);
    w.config.shards = PG_SHARDS_MAX + 1;
    CHECK_EQUAL(pg_arena_bytes(&w.config), 0);
    w.a->header->shards = 1;
    CHECK(!pg_attach(w.a, w.arena, w.a->header->length, w.secret, pg_private_bytes(&w.config),
                     LAYOUT, &why));
    w.a->header->shards = 2;
    world_close(&w);
}

/* ---- merging ------------------------------------------------------------------------------ */

/* Namespace "n" belongs to shard 0 as a whole; the keys of "p" are spread over all shards. */
static const uint32_t whole[] = {0}, parts[] = {0, 1, 2, 1};

struct scratch {
    uint32_t namespaces[4], topics[8], watermarks[4], sessions[2], bulk_loads[1], schedules[1],
             cursors[4];
    struct pg_route routes[4];
};

static struct pg_source source_of(const struct world *w, struct scratch *s)
{
    *s = (struct scratch){.routes = {{0}}};
    for (uint32_t row = 0; row < w->config.namespaces; row++) {
        const struct pg_namespace *n = &w->a->namespaces[row];
        if (n->name_len != 0 && n->name[0] == 'n')
            s->routes[row] = (struct pg_route){whole, 1, 0};
        if (n->name_len != 0 && n->name[0] == 'p')
            s->routes[row] = (struct pg_route){parts, 4, 1};
    }
    return (struct pg_source){w->a, s->routes, s->namespaces, s->topics, s->watermarks, s->sessions,
                              s->bulk_loads, s->schedules, s->cursors, 0};
}

static void merged(struct world *to, const struct world *from, uint32_t count)
{
    struct scratch scratch[2];
    struct pg_source sources[2];
    struct pg_fault why;
    for (uint32_t i = 0; i < count; i++)
        sources[i] = source_of(&from[i], &scratch[i]);
    CHECK(pg_merge(to->a, sources, count, &why));
    CHECK(pg_rebuild(to->a, from[0].a->header->now_ns, &why));
    sound(to);
}

static uint32_t owner_of(uint32_t key) { return parts[pg_partition(&key, sizeof key, 4)]; }

static void all_keys_are_in_their_shard_once(void)
{
    struct world from[2], to[SHARDS];
    uint64_t tickets[KEYS];
    for (uint32_t i = 0; i < 2; i++)
        world_open(&from[i], i, 2);
    for (uint32_t key = 0; key < KEYS; key++) {
        tickets[key] = added(&from[key % 2], "p", key, (int64_t)(key + 1) * MS).ticket >> 8;
        added(&from[1], "n", key, (int64_t)(key + 1) * MS);
    }
    for (uint32_t i = 0; i < SHARDS; i++) {
        world_open(&to[i], i, SHARDS);
        merged(&to[i], from, 2);
    }
    for (uint32_t key = 0; key < KEYS; key++)
        for (uint32_t i = 0; i < SHARDS; i++) {
            CHECK_EQUAL(cancelled(&to[i], "p", key, tickets[key]),
                        i == owner_of(key) ? PG_ST_CANCELLED : PG_ST_UNKNOWN);
            CHECK_EQUAL(cancelled(&to[i], "n", key, 0),
                        i == 0 ? PG_ST_CANCELLED : PG_ST_UNKNOWN);
        }
    for (uint32_t i = 0; i < SHARDS; i++) {
        const uint64_t fresh = added(&to[i], "n", KEYS, MS).ticket >> 8;
        CHECK_EQUAL(ticket_shard(fresh), i);
        CHECK(ticket_number(fresh) > KEYS);
        world_close(&to[i]);
    }
    for (uint32_t i = 0; i < 2; i++)
        world_close(&from[i]);
}

/* The merged arena has the namespace statistics of its source arena, and sends the notices that the
 * source did not send. */
static void notices_and_their_order_stay(void)
{
    struct world from, to;
    struct pg_namespace_stats before[4], after[4];
    struct pg_fault why;
    int more;
    world_open(&from, 0, 1);
    world_open(&to, 0, 1);
    for (uint32_t key = 0; key < KEYS; key++)
        added(&from, "n", key, (int64_t)(key + 1) * MS);
    pg_advance(from.a, 10 * MS, 0, 10 * MS, 1000, &more);
    pg_published(from.a, from.a->header->replay_tail, 0, 0);
    pg_advance(from.a, 30 * MS, 0, 30 * MS, 1000, &more);
    merged(&to, &from, 1);
    CHECK(pg_namespace_stats(from.a, before, &why) && pg_namespace_stats(to.a, after, &why));
    CHECK_EQUAL(memcmp(before, after, sizeof before), 0);
    CHECK_EQUAL(after[0].notices, 20);
    CHECK_EQUAL(after[0].timers, KEYS - 30);
    CHECK_EQUAL(to.a->header->replay_tail - to.a->header->replay_head, 30);
    CHECK_EQUAL(to.a->topics[0].sequence, 30);
    world_close(&to);
    world_close(&from);
}

int main(void)
{
    RUN(a_ticket_begins_with_its_shard);
    RUN(alone_it_is_a_plain_number);
    RUN(the_last_ticket_is_not_followed_by_another_shards);
    RUN(a_shard_that_is_not_there_is_refused);
    RUN(all_keys_are_in_their_shard_once);
    RUN(notices_and_their_order_stay);
    return 0;
}

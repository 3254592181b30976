/* Test that the server applies messages of a ROUTER socket, and which of them it leaves. */
#include "clients.h"
#include "router_socket.h"

enum { CLIENTS = 2, ROWS = 4, DESCRIPTORS = 16, SIZE = 1024, MS = 1000000, STEP_NS = 100,
       SHARE_NS = 1000, BOOT_NS = 1000000000, REPLY_MAX = 256 };

static const struct pg_config config = {
    .layout_id = 1, .payload_bytes = 65536, .replay_bytes_max = 4096, .tick_ns = MS,
    .stream_id = 1, .secret = {1, 2}, .capacity = 64, .replay_capacity = 16, .fanout = 64,
    .namespaces = 2, .topics = 2, .sessions = CLIENTS, .watches = 8, .watermarks = 8,
    .watermark_ttl_ns = 1000000000000, .inbox_max = 8, .accounts = 2, .now_ns = BOOT_NS,
    .clock_kind = PG_CLOCK_BOOT};

struct client {
    struct pg_ring_client served;
    struct pg_time_share share;
    uint8_t route[5];
    char user_id[16];
    uint64_t session;
};

static struct test {
    struct pg_arena *a;
    void *arena, *secret;
    struct client clients[CLIENTS];
    struct pg_ring_client *rows[ROWS];
    uint8_t completed[DESCRIPTORS];
    struct router_socket socket;
    struct pg_router router;
    struct pg_ring_server server;
    struct pg_time_shares shares;
    struct pg_loop_calls calls;
    struct pg_loop loop;
    uint8_t *reply;
    int64_t now_ns;
    uint32_t waits, waits_max;
} test;

static int64_t boot_ns(void *context) { return ((struct test *)context)->now_ns += STEP_NS; }

static void wake(void *context, uint32_t how, uint32_t *word, int socket)
{
    (void)context, (void)how, (void)word, (void)socket;
}

static struct pg_frame frame_of(const struct client *c, unsigned message, uint64_t sequence)
{
    return (struct pg_frame){.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                             .message = (uint16_t)message, .session = c->session,
                             .sequence = sequence};
}

static struct socket_message message_of(struct client *c, void *body, size_t bytes)
{
    struct socket_message m = {.route_bytes = sizeof c->route, .body = body, .bytes = bytes,
                               .user_id = c->user_id, .connection = 7};
    memcpy(m.route, c->route, sizeof c->route);
    return m;
}

static void put(struct test *t, struct client *c, void *body, size_t bytes)
{
    const struct socket_message m = message_of(c, body, bytes);
    socket_put(&t->socket, &m);
    t->router.quiet = false;
}

static void ping(struct test *t, struct client *c, uint64_t sequence)
{
    struct pg_frame f = frame_of(c, PG_M_PING, sequence);
    put(t, c, &f, sizeof f);
}

static int wait_for_messages(void *context, struct pg_ring_server *s, int64_t until_boot_ns)
{
    struct test *t = context;
    CHECK(s == &t->server);
    if (until_boot_ns == INT64_MIN)
        return PG_WOKEN_BY_RINGS;
    if (t->waits++ == t->waits_max)
        return PG_WOKEN_FOR_CALLER;
    ping(t, &t->clients[0], t->waits);
    return PG_WOKEN_BY_RINGS;
}

static void client_open(struct test *t, uint8_t number)
{
    struct client *c = &t->clients[number];
    *c = (struct client){.share = {.uid = 10u + number}, .route = {0, 1, 2, 3, number}};
    snprintf(c->user_id, sizeof c->user_id, "%u:%u:1", c->share.uid, c->share.uid);
    c->session = session_begun(t->a, c->share.uid, (uint8_t)(number + 1), t->now_ns, t->reply);
    c->served = (struct pg_ring_client){.share = &c->share, .session = c->session, .pid = 1,
                                        .route = c->route, .route_bytes = sizeof c->route,
                                        .user_id = c->user_id};
    CHECK((uint16_t)c->session < ROWS);
    t->rows[(uint16_t)c->session] = &c->served;
}

static struct test *opened(void)
{
    struct test *t = &test;
    socket_close(&t->socket, &t->router);
    free(t->arena);
    free(t->secret);
    free(t->a);
    free(t->reply);
    *t = (struct test){.now_ns = BOOT_NS};
    t->arena = zeroed(pg_arena_bytes(&config));
    t->secret = zeroed(pg_private_bytes(&config));
    t->a = malloc(pg_handle_bytes());
    t->reply = malloc(PG_MESSAGE_MAX);
    CHECK(t->a != NULL && t->reply != NULL && pg_create(t->a, t->arena, t->secret, &config));
    t->calls = (struct pg_loop_calls){t, boot_ns, boot_ns, wake, wait_for_messages};
    t->shares = (struct pg_time_shares){.most_ns = SHARE_NS, .lasts_ns = 1000 * MS};
    t->router = (struct pg_router){.calls = &socket_calls, .socket = &t->socket, .clients = t->rows,
                                   .rows = ROWS, .completed = t->completed,
                                   .descriptors = DESCRIPTORS, .reply_max = REPLY_MAX};
    t->server = (struct pg_ring_server){.calls = &t->calls, .reply = t->reply,
                                        .router = &t->router};
    t->loop = (struct pg_loop){.server = &t->server, .shares = &t->shares, .late_ns = 10 * MS,
                               .budget = 64, .most = 16};
    for (uint8_t i = 0; i < CLIENTS; i++)
        client_open(t, i);
    return t;
}

static uint32_t serve(struct test *t, uint32_t most)
{
    return pg_rings_serve(t->a, &t->server, &t->shares, most);
}

/* Check that the next event is a message for the caller, with this body. */
static void left(struct test *t, const void *body, size_t bytes)
{
    CHECK_EQUAL(serve(t, 16), PG_RE_MESSAGE);
    CHECK(t->server.client == NULL && t->server.applied == 0);
    CHECK_EQUAL(t->server.message_bytes, bytes);
    CHECK(bytes == 0 || memcmp(t->server.body, body, bytes) == 0);
}

static void test_plain_messages_are_applied_and_answered(void)
{
    struct test *t = opened();
    for (uint64_t n = 1; n <= 3; n++)
        ping(t, &t->clients[n % 2], n);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->server.applied, 3);
    CHECK_EQUAL(t->socket.replies, 3);
    CHECK(t->router.quiet && !t->socket.has_to);
    struct pg_frame reply;
    memcpy(&reply, t->socket.reply, sizeof reply);
    CHECK(reply.sequence == 3 && reply.error == PG_ERR_NONE);
    CHECK(t->socket.to_bytes == 5 && t->socket.to[4] == 1);
    CHECK(t->clients[0].served.spoke && t->clients[1].served.spoke);
    CHECK(t->completed[7]);
}

static void test_an_iteration_ends_after_the_most_messages(void)
{
    struct test *t = opened();
    for (uint64_t n = 1; n <= 3; n++)
        ping(t, &t->clients[0], n);
    CHECK_EQUAL(serve(t, 2), PG_RE_ENOUGH);
    CHECK(t->server.applied == 2 && !t->router.quiet);
    CHECK(!pg_rings_sleep(&t->server));
    CHECK_EQUAL(serve(t, 2), PG_RE_NONE);
    CHECK(pg_rings_sleep(&t->server));
}

static void test_other_messages_are_left_to_the_caller(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0], thief = *c, unknown = *c, renamed = *c;
    snprintf(thief.user_id, sizeof thief.user_id, "0:0:1");
    unknown.session += ROWS;      /* a row without a client */
    renamed.route[0] = 9;
    struct pg_frame bye = frame_of(c, PG_M_BYE, 1), stolen = frame_of(&thief, PG_M_PING, 2);
    struct pg_frame other = frame_of(&unknown, PG_M_PING, 3), moved = frame_of(c, PG_M_PING, 4);
    struct pg_frame earlier = frame_of(c, PG_M_PING, 5);
    earlier.session += 1 << 16;   /* the session that had the row before */
    put(t, c, &bye, sizeof bye);
    put(t, &thief, &stolen, sizeof stolen);
    put(t, &unknown, &other, sizeof other);
    put(t, &renamed, &moved, sizeof moved);
    put(t, c, &earlier, sizeof earlier);
    put(t, c, "short", 5);
    put(t, c, "", 0);
    left(t, &bye, sizeof bye);
    left(t, &stolen, sizeof stolen);
    CHECK(strcmp(t->router.user_id, "0:0:1") == 0);
    left(t, &other, sizeof other);
    left(t, &moved, sizeof moved);
    CHECK(t->router.route_bytes == 5 && t->router.route[0] == 9 && t->router.connection == 7);
    left(t, &earlier, sizeof earlier);
    left(t, "short", 5);
    left(t, "", 0);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->socket.replies, 0);
}

static void test_messages_behind_an_unfinished_one_are_left(void)
{
    struct test *t = opened();
    struct pg_frame f = frame_of(&t->clients[0], PG_M_PING, 1);
    t->clients[0].served.behind = true;
    put(t, &t->clients[0], &f, sizeof f);
    ping(t, &t->clients[1], 1);
    left(t, &f, sizeof f);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->server.applied, 1);
}

static void test_messages_of_a_uid_that_has_had_its_share_are_left(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    struct pg_frame f = frame_of(c, PG_M_PING, 1);
    t->shares = (struct pg_time_shares){.most_ns = SHARE_NS, .apply = true, .iteration = 3};
    c->share.iteration = 3;
    c->share.spent_ns = SHARE_NS;
    put(t, c, &f, sizeof f);
    left(t, &f, sizeof f);
}

static void test_time_is_charged_to_the_uid(void)
{
    struct test *t = opened();
    pg_time_shares_begin(&t->shares, t->now_ns);
    ping(t, &t->clients[0], 1);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK(t->clients[0].share.spent_ns > 0 && t->clients[1].share.spent_ns == 0);
    CHECK_EQUAL(t->shares.last_uid, 10);
}

static void test_messages_that_no_client_sends_are_reported(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    struct pg_frame f = frame_of(c, PG_M_PING, 1);
    struct socket_message parts = message_of(c, &f, sizeof f), named = parts;
    parts.more = 3;
    named.route_bytes = PG_ROUTE_MAX + 1;
    socket_put(&t->socket, &parts);
    socket_put(&t->socket, &named);
    CHECK_EQUAL(serve(t, 16), PG_RE_OFFENCE);
    CHECK(t->router.rest && t->router.connection == 7 && t->router.address != NULL);
    CHECK_EQUAL(serve(t, 16), PG_RE_LOOK);               /* the caller drops the other frames */
    CHECK_EQUAL(serve(t, 16), PG_RE_LOOK);
    CHECK(t->server.client == NULL);
    t->socket.rest = t->router.rest = 0;
    CHECK_EQUAL(serve(t, 16), PG_RE_OFFENCE);
    CHECK(!t->router.rest && t->router.route_bytes > PG_ROUTE_MAX);
    CHECK(!t->completed[7] && t->socket.replies == 0);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
}

static void test_a_connection_without_a_usable_descriptor_is_served(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    struct pg_frame f = frame_of(c, PG_M_PING, 1);
    struct socket_message m = message_of(c, &f, sizeof f);
    const int connections[] = {-1, DESCRIPTORS, INT32_MAX};
    for (uint32_t i = 0; i < 3; i++) {
        m.connection = connections[i];
        socket_put(&t->socket, &m);
    }
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->server.applied, 3);
}

static void test_a_message_without_credentials_is_left(void)
{
    struct test *t = opened();
    struct pg_frame f = frame_of(&t->clients[0], PG_M_PING, 1);
    struct socket_message m = message_of(&t->clients[0], &f, sizeof f);
    m.user_id = NULL;
    socket_put(&t->socket, &m);
    left(t, &f, sizeof f);
}

static void test_the_caller_receives_each_message_if_it_wants(void)
{
    struct test *t = opened();
    ping(t, &t->clients[0], 1);
    t->router.each = true;
    CHECK_EQUAL(serve(t, 16), PG_RE_LOOK);
    CHECK(t->server.client == NULL && t->socket.count == 1);
}

static void test_failures_of_the_socket_are_left_to_the_caller(void)
{
    struct test *t = opened();
    ping(t, &t->clients[0], 1);
    t->socket.fails = EINVAL;
    CHECK_EQUAL(serve(t, 16), PG_RE_LOOK);
    CHECK(t->server.client == NULL && !t->router.quiet);
    t->socket.fails = EINTR;                             /* a signal changes nothing */
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->server.applied, 1);
}

static void test_refusals_and_large_replies_are_left_to_the_caller(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    struct pg_frame batch = frame_of(c, PG_M_BATCH, 7);
    put(t, c, &batch, sizeof batch);
    CHECK_EQUAL(serve(t, 16), PG_RE_REPLY);
    CHECK(t->server.applied == 1 && t->server.client == NULL && t->socket.replies == 0);
    CHECK_EQUAL(t->router.route[4], 0);
    t->router.reply_max = sizeof(struct pg_frame) - 1;
    ping(t, c, 8);
    CHECK_EQUAL(serve(t, 16), PG_RE_REPLY);
    CHECK_EQUAL(t->server.reply_bytes, sizeof(struct pg_frame));
}

static void test_a_reply_that_the_socket_refuses_is_left_to_the_caller(void)
{
    struct test *t = opened();
    ping(t, &t->clients[0], 1);
    t->socket.send_fails = EAGAIN;
    CHECK_EQUAL(serve(t, 16), PG_RE_REPLY);
    CHECK(t->server.applied == 1 && t->socket.replies == 0 && !t->socket.has_to);
    ping(t, &t->clients[0], 2);
    t->socket.send_fails = EINTR;
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->socket.replies, 1);
}

static void test_a_reply_without_memory_sends_no_routing_id(void)
{
    struct test *t = opened();
    ping(t, &t->clients[0], 1);
    socket_init_fails = ENOMEM;
    CHECK_EQUAL(serve(t, 16), PG_RE_REPLY);
    CHECK(t->server.applied == 1 && t->socket.replies == 0 && !t->socket.has_to);
    ping(t, &t->clients[1], 1);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->socket.replies, 1);
}

static void test_the_socket_and_rings_alternate(void)
{
    static struct pg_ring_pair words;
    static uint8_t submissions[SIZE], completions[SIZE], message[SIZE];
    struct test *t = opened();
    struct pg_ring_end taker, putter, submit;
    struct client *c = &t->clients[1];
    words = (struct pg_ring_pair){0};
    pg_ring_open(&taker, &words.submissions, submissions, SIZE);
    pg_ring_open(&submit, &words.submissions, submissions, SIZE);
    pg_ring_open(&putter, &words.completions, completions, SIZE);
    struct pg_ring_client ring = {.taker = &taker, .putter = &putter, .share = &c->share,
                                  .session = c->session};
    t->server.message = message;
    pg_rings_rouse(&t->server, &ring);
    for (uint64_t n = 1; n <= 3; n++) {
        const struct pg_frame f = frame_of(c, PG_M_PING, n);
        ping(t, &t->clients[0], n);
        CHECK(pg_ring_put(&submit, &f, sizeof f));
    }
    CHECK_EQUAL(serve(t, 4), PG_RE_ENOUGH);
    CHECK_EQUAL(t->socket.replies, 2);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->socket.replies, 3);
    CHECK_EQUAL(t->server.applied, 2);
    pg_rings_remove(&t->server, &ring);
}

static void test_the_loop_serves_the_socket_while_it_sleeps(void)
{
    struct test *t = opened();
    t->router.quiet = true;
    t->waits_max = 3;
    CHECK_EQUAL(pg_loop_wait(t->a, &t->loop, t->now_ns + 500ll * MS), 0);
    CHECK_EQUAL(t->loop.iterations, 3);
    CHECK_EQUAL(t->socket.replies, 3);
    CHECK_EQUAL(t->server.left, PG_RE_NONE);
}

static void test_a_message_for_the_caller_ends_the_sleep(void)
{
    struct test *t = opened();
    struct pg_frame bye = frame_of(&t->clients[0], PG_M_BYE, 1);
    put(t, &t->clients[0], &bye, sizeof bye);
    CHECK_EQUAL(pg_loop_wait(t->a, &t->loop, t->now_ns + 500ll * MS), 0);
    CHECK_EQUAL(t->server.left, PG_RE_MESSAGE);
    CHECK(t->server.client == NULL && t->waits == 0);
    CHECK_EQUAL(t->server.message_bytes, sizeof bye);
}

int main(void)
{
    RUN(test_plain_messages_are_applied_and_answered);
    RUN(test_an_iteration_ends_after_the_most_messages);
    RUN(test_other_messages_are_left_to_the_caller);
    RUN(test_messages_behind_an_unfinished_one_are_left);
    RUN(test_messages_of_a_uid_that_has_had_its_share_are_left);
    RUN(test_time_is_charged_to_the_uid);
    RUN(test_messages_that_no_client_sends_are_reported);
    RUN(test_a_connection_without_a_usable_descriptor_is_served);
    RUN(test_a_message_without_credentials_is_left);
    RUN(test_the_caller_receives_each_message_if_it_wants);
    RUN(test_failures_of_the_socket_are_left_to_the_caller);
    RUN(test_refusals_and_large_replies_are_left_to_the_caller);
    RUN(test_a_reply_that_the_socket_refuses_is_left_to_the_caller);
    RUN(test_a_reply_without_memory_sends_no_routing_id);
    RUN(test_the_socket_and_rings_alternate);
    RUN(test_the_loop_serves_the_socket_while_it_sleeps);
    RUN(test_a_message_for_the_caller_ends_the_sleep);
    opened();
    return 0;
}

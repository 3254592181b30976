/* Test the server of rings and its loop, with a clock and a doorbell of the test's own. */
#include "clients.h"
#include "core/state/members.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { CLIENTS = 3, SIZE = 1024, MESSAGE = 2 * SIZE, TIMERS = 5, MS = 1000000, SHARE_NS = 1000, STEP_NS = 100,
       BOOT_NS = 1000000000 };

static const struct pg_config config = {
    .layout_id = 1, .payload_bytes = 65536, .replay_bytes_max = 4096, .tick_ns = MS,
    .stream_id = 1, .secret = {1, 2}, .capacity = 64, .replay_capacity = 16, .fanout = 64,
    .namespaces = 2, .topics = 2, .sessions = CLIENTS, .watches = 8, .watermarks = 8,
    .watermark_ttl_ns = 1000000000000, .inbox_max = 8, .accounts = 2, .now_ns = BOOT_NS,
    .clock_kind = PG_CLOCK_BOOT, .groups = 1, .jobs = 16};

struct client {
    struct pg_ring_pair words;
    uint8_t submissions[SIZE], completions[SIZE];
    struct pg_ring_end taker, putter;                    /* the daemon's side */
    struct pg_ring_end taken, put;                       /* the client's side */
    struct pg_ring_client served;
    struct pg_time_share share;
    uint64_t session;
};

static struct test {
    struct pg_arena *a;
    void *arena, *secret;
    struct client clients[CLIENTS];
    struct pg_ring_server server;
    struct pg_time_shares shares;
    struct pg_loop_calls calls;
    struct pg_loop loop;
    uint8_t message[MESSAGE], *reply;
    int64_t now_ns, step_ns;      /* a reading of the clock moves it by step_ns */
    uint32_t wakes, waits, waits_max;
    int64_t waited_until_ns;
    bool timed_out;
    void (*on_wait)(struct test *t);
} test;

static int64_t boot_ns(void *context)
{
    struct test *t = context;
    return t->now_ns += t->step_ns;
}

static int64_t wall_ns(void *context) { return ((struct test *)context)->now_ns - 1; }

static void wake(void *context, uint32_t how, uint32_t *word, int socket)
{
    struct test *t = context;
    CHECK(how == PG_RING_POLL && word != NULL && socket >= 0 && socket < CLIENTS);
    t->wakes++;
}

static int wait_for_rings(void *context, struct pg_ring_server *s, int64_t until_boot_ns)
{
    struct test *t = context;
    CHECK(s == &t->server);
    if (until_boot_ns == INT64_MIN)
        return PG_WOKEN_BY_RINGS;
    t->waited_until_ns = until_boot_ns;
    if (t->waits++ == t->waits_max)
        return PG_WOKEN_FOR_CALLER;
    t->on_wait(t);
    if (t->timed_out)
        return PG_WOKEN_BY_TIME;
    for (uint32_t i = 0; i < CLIENTS; i++)
        pg_rings_rouse(s, &t->clients[i].served);
    return PG_WOKEN_BY_RINGS;
}

static void client_open(struct client *c, uint32_t number)
{
    *c = (struct client){.share = {.uid = 10 + number}};
    pg_ring_open(&c->taker, &c->words.submissions, c->submissions, SIZE);
    pg_ring_open(&c->put, &c->words.submissions, c->submissions, SIZE);
    pg_ring_open(&c->putter, &c->words.completions, c->completions, SIZE);
    pg_ring_open(&c->taken, &c->words.completions, c->completions, SIZE);
    c->served = (struct pg_ring_client){.taker = &c->taker, .putter = &c->putter,
                                        .share = &c->share, .socket = (int32_t)number};
}

static void greet(struct test *t, uint32_t number)
{
    struct client *c = &t->clients[number];
    c->session = c->served.session = session_begun(t->a, c->share.uid, (uint8_t)(number + 1),
                                                   t->now_ns, t->reply);
}

static struct test *opened(void)
{
    struct test *t = &test;
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
    t->step_ns = STEP_NS;
    t->calls = (struct pg_loop_calls){t, boot_ns, wall_ns, wake, wait_for_rings};
    t->shares = (struct pg_time_shares){.most_ns = SHARE_NS, .lasts_ns = 1000 * MS};
    t->server = (struct pg_ring_server){.calls = &t->calls, .message = t->message,
                                        .reply = t->reply};
    t->loop = (struct pg_loop){.server = &t->server, .shares = &t->shares, .late_ns = 10 * MS,
                               .budget = 64, .most = 16};
    for (uint32_t i = 0; i < CLIENTS; i++) {
        client_open(&t->clients[i], i);
        greet(t, i);
        pg_rings_rouse(&t->server, &t->clients[i].served);
    }
    return t;
}

static struct pg_frame frame_of(const struct client *c, unsigned message, uint64_t sequence)
{
    return (struct pg_frame){.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                             .message = (uint16_t)message, .session = c->session,
                             .sequence = sequence};
}

static void ping(struct client *c, uint64_t sequence)
{
    const struct pg_frame f = frame_of(c, PG_M_PING, sequence);
    CHECK(pg_ring_put(&c->put, &f, sizeof f));
}

static uint64_t answered(struct client *c) { return answer_taken(&c->taken); }

static uint32_t serve(struct test *t, uint32_t most)
{
    return pg_rings_serve(t->a, &t->server, &t->shares, most);
}

static void test_clients_are_served_in_rotation(void)
{
    struct test *t = opened();
    for (uint32_t n = 1; n <= 4; n++)
        ping(&t->clients[0], n);
    ping(&t->clients[1], 1);
    ping(&t->clients[2], 1);
    CHECK_EQUAL(serve(t, 3), PG_RE_ENOUGH);
    CHECK_EQUAL(t->server.applied, 3);
    for (uint32_t i = 0; i < CLIENTS; i++)
        CHECK_EQUAL(answered(&t->clients[i]), 1);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->server.applied, 3);
    for (uint32_t n = 2; n <= 4; n++)
        CHECK_EQUAL(answered(&t->clients[0]), n);
    CHECK(t->clients[0].served.spoke && answered(&t->clients[0]) == 0);
}

/* Each message takes over 100 us, so the second one uses up the time of a call. */
static void test_slow_messages_let_due_timers_in(void)
{
    struct test *t = opened();
    t->step_ns = 60000;
    for (uint32_t n = 1; n <= 4; n++)
        ping(&t->clients[0], n);
    CHECK_EQUAL(serve(t, 16), PG_RE_ENOUGH);
    CHECK_EQUAL(t->server.applied, 2);
    CHECK_EQUAL(serve(t, 16), PG_RE_ENOUGH);
    CHECK_EQUAL(t->server.applied, 2);
}

static void test_a_client_that_sleeps_is_woken_once(void)
{
    struct test *t = opened();
    CHECK(pg_ring_sleep_taker(&t->clients[0].taken, PG_RING_POLL));
    ping(&t->clients[0], 1);
    ping(&t->clients[0], 2);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->wakes, 1);
}

static void test_messages_of_other_sessions_are_left_to_the_caller(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    struct pg_frame other = frame_of(&t->clients[1], PG_M_PING, 9), bye = frame_of(c, PG_M_BYE, 0);
    CHECK(pg_ring_put(&c->put, &other, sizeof other) && pg_ring_put(&c->put, &bye, sizeof bye));
    CHECK(pg_ring_put(&c->put, "short", 5));
    const uint64_t lengths[] = {sizeof other, sizeof bye, 5};
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQUAL(serve(t, 16), PG_RE_MESSAGE);
        CHECK(t->server.client == &c->served && t->server.applied == 0);
        CHECK_EQUAL(t->server.message_bytes, lengths[i]);
    }
    CHECK(memcmp(t->message, "short", 5) == 0);
    c->served.session = 0;
    ping(c, 1);
    CHECK_EQUAL(serve(t, 16), PG_RE_MESSAGE);
}

static void test_refusals_are_left_to_the_caller(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    struct pg_frame batch = frame_of(c, PG_M_BATCH, 7), reply;
    CHECK(pg_ring_put(&c->put, &batch, sizeof batch));
    CHECK_EQUAL(serve(t, 16), PG_RE_REPLY);
    CHECK_EQUAL(t->server.applied, 1);
    memcpy(&reply, t->reply, sizeof reply);
    CHECK(reply.error != PG_ERR_NONE && t->server.reply_bytes == sizeof reply);
    CHECK_EQUAL(answered(c), 0);
}

static void test_a_reply_without_space_is_left_to_the_caller(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    uint64_t sequence = 0;
    uint32_t event;
    do {
        ping(c, ++sequence);
        event = serve(t, 16);
    } while (event == PG_RE_NONE && sequence < SIZE);
    CHECK_EQUAL(event, PG_RE_REPLY);
    c->served.replies = true;
    ping(c, sequence + 1);
    CHECK_EQUAL(serve(t, 16), PG_RE_LOOK);
    CHECK(t->server.client == &c->served && pg_ring_next(&c->taker) == sizeof(struct pg_frame));
    for (uint64_t n = 1; n < sequence; n++)
        CHECK_EQUAL(answered(c), n);
}

static void test_the_caller_looks_at_rings_that_are_not_plain(void)
{
    struct test *t = opened();
    struct client *const large = &t->clients[0], *const gone = &t->clients[1];
    struct client *const broken = &t->clients[2];
    uint8_t message[MESSAGE] = {1};
    uint32_t seen = 0;
    pg_ring_put(&large->put, message, sizeof message);
    gone->served.gone = true;
    broken->words.submissions.tail = 3;
    for (uint32_t i = 0; i < CLIENTS; i++) {
        CHECK_EQUAL(serve(t, 16), PG_RE_LOOK);
        seen |= 1u << t->server.client->socket;
    }
    CHECK_EQUAL(seen, 7);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK(broken->taker.broken && !large->taker.broken);
    CHECK(!pg_rings_sleep(&t->server));
}

static void test_a_uid_waits_once_it_has_had_its_share(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    pg_time_shares_begin(&t->shares, t->now_ns);
    pg_time_share_charge(&t->shares, &t->clients[1].share, t->now_ns, t->now_ns);
    for (uint32_t n = 1; n <= 10; n++)
        ping(c, n);
    CHECK_EQUAL(serve(t, 1), PG_RE_ENOUGH);              /* only now is another uid seen */
    pg_time_shares_begin(&t->shares, t->now_ns);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    const uint32_t first = t->server.applied;
    CHECK(first > 0 && first < 9 && c->share.spent_ns >= SHARE_NS);
    ping(&t->clients[1], 1);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(answered(&t->clients[1]), 1);
    CHECK(pg_time_share_used(&t->shares, &c->share));
    pg_time_shares_begin(&t->shares, t->now_ns + 2000ll * MS);
    CHECK(!pg_time_share_used(&t->shares, &c->share));
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->server.applied, 9 - first);
}

static void test_rings_that_sleep_are_not_visited(void)
{
    struct test *t = opened();
    CHECK(pg_rings_sleep(&t->server) && t->server.awake == 0 && t->server.last == NULL);
    ping(&t->clients[1], 1);
    CHECK_EQUAL(pg_ring_rouse_taker(&t->clients[1].put), PG_RING_POLL);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->server.applied, 0);
    pg_rings_rouse(&t->server, &t->clients[1].served);
    pg_rings_rouse(&t->server, &t->clients[1].served);
    CHECK_EQUAL(t->server.awake, 1);
    CHECK(!pg_rings_sleep(&t->server));
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
    CHECK_EQUAL(t->server.applied, 1);
    for (uint32_t i = 0; i < CLIENTS; i++)
        pg_rings_remove(&t->server, &t->clients[i].served);
    CHECK(t->server.awake == 0 && t->server.last == NULL && t->server.unseen == 0);
    CHECK_EQUAL(serve(t, 16), PG_RE_NONE);
}

/* ---- the loop --------------------------------------------------------------------------------- */

static void each_pings(struct test *t)
{
    for (uint32_t i = 0; i < CLIENTS; i++)
        ping(&t->clients[i], t->waits);
}

static void no_one_pings(struct test *t) { (void)t; }

static int loop_wait(struct test *t, int64_t for_ns, uint32_t waits_max)
{
    t->waits = 0;
    t->waits_max = waits_max;
    CHECK(pg_rings_sleep(&t->server));
    return pg_loop_wait(t->a, &t->loop, t->now_ns + for_ns);
}

static void timer_put(struct test *t, uint8_t key, int64_t delay_ns)
{
    const struct pg_put put = {.namespace_name = "n", .topic_name = "t", .namespace_len = 1,
                               .topic_len = 1, .key = &key, .key_len = 1,
                               .time_kind = PG_T_DELAY, .time_ns = delay_ns};
    struct pg_result result;
    pg_put(t->a, &put, &result);
    CHECK_EQUAL(result.ticket & 0xff, PG_ST_ADDED);
}

static void test_the_loop_serves_rings_until_its_time(void)
{
    struct test *t = opened();
    const int64_t until_ns = t->now_ns + 500ll * MS;
    t->on_wait = each_pings;
    CHECK_EQUAL(loop_wait(t, 500ll * MS, 3), 0);
    CHECK_EQUAL(t->loop.iterations, 3);
    CHECK_EQUAL(t->loop.wakeups, 3);
    CHECK_EQUAL(t->waited_until_ns, until_ns);
    CHECK(t->loop.begun_boot_ns > BOOT_NS && t->a->state.now_ns == t->loop.begun_boot_ns);
    CHECK_EQUAL(t->a->header->wall_offset_ns, -1000);    /* rounded down, so never too late */
    for (uint64_t n = 1; n <= 3; n++)
        for (uint32_t i = 0; i < CLIENTS; i++)
            CHECK_EQUAL(answered(&t->clients[i]), n);
    CHECK_EQUAL(t->server.left, PG_RE_NONE);
}

static void test_the_loop_sleeps_no_longer_than_the_next_timer(void)
{
    struct test *t = opened();
    t->on_wait = no_one_pings;
    timer_put(t, 0, 50ll * MS);
    const int64_t due_ns = pg_next_ns(t->a);
    t->loop.spin_ns = MS;
    CHECK_EQUAL(loop_wait(t, 500ll * MS, 1), 0);
    CHECK_EQUAL(t->waited_until_ns, due_ns - MS);
}

static void time_passes(struct test *t)
{
    t->now_ns += 60ll * MS;
    ping(&t->clients[0], 1);
}

static void test_timers_are_left_to_the_caller(void)
{
    struct test *t = opened();
    t->on_wait = time_passes;
    timer_put(t, 0, 50ll * MS);
    CHECK_EQUAL(loop_wait(t, 500ll * MS, 9), 0);
    CHECK(t->loop.iterations == 0 && t->loop.begun_boot_ns == 0 && t->waits == 1);
    CHECK_EQUAL(answered(&t->clients[0]), 0);
    CHECK_EQUAL(t->a->header->published, t->a->header->replay_tail);
}

static void its_time_comes(struct test *t)
{
    t->now_ns = t->waited_until_ns;
    t->timed_out = true;
}

static uint64_t measured(const struct test *t, uint32_t histogram)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < PG_HISTOGRAM_BUCKETS; i++)
        count += t->a->histograms[histogram].counts[i];
    return count;
}

static void test_the_loop_fires_timers_that_no_socket_wants(void)
{
    struct test *t = opened();
    t->loop.fires = true;
    t->on_wait = its_time_comes;
    timer_put(t, 0, 50ll * MS);
    const uint32_t wake = t->a->topics[0].wake;
    const int64_t due_ns = pg_next_ns(t->a);
    CHECK_EQUAL(loop_wait(t, 500ll * MS, 1), 0);
    CHECK(t->loop.iterations == 1 && t->loop.wakeups == 1);
    CHECK(t->a->metrics->expiries == 1 && t->a->metrics->iterations == 1);
    CHECK(t->a->header->visible == 1 && t->a->header->published == 1);
    CHECK_EQUAL(t->a->topics[0].wake, wake + 1);
    CHECK_EQUAL(measured(t, PG_HG_WAKEUP_LATENESS), 1);
    CHECK_EQUAL(measured(t, PG_HG_RESPONSE_QUEUE), 1);
    CHECK(t->loop.begun_boot_ns > due_ns && t->a->header->now_ns == t->loop.begun_boot_ns);
    CHECK_EQUAL(t->loop.planned_boot_ns, t->waited_until_ns);
}

/* ---- leased jobs ---- */

static void handled(struct test *t, const void *message, uint64_t bytes, uint32_t uid)
{
    uint64_t used;
    int64_t wait_ns;
    struct pg_frame f;
    CHECK_EQUAL(pg_handle(t->a, message, bytes, uid, 1, t->now_ns, t->now_ns, t->reply, &used,
                          &wait_ns), PG_H_REPLY);
    memcpy(&f, t->reply, sizeof f);
    CHECK_EQUAL(f.error, PG_ERR_NONE);
}

/* Create the group "g" of the topic "t", and let each client join it with some credits. */
static void group_joined(struct test *t, uint32_t credits)
{
    struct __attribute__((packed)) {
        struct pg_frame frame;
        struct pg_group_ask ask;
        char names[4];
    } m = {.frame = frame_of(&t->clients[0], PG_M_GROUP, 1),
           .ask = {.settings = {.max_jobs = 16, .max_lease_ns = 1000ll * MS, .max_attempts = 2,
                                .max_dead = 1, .backoff_base_ns = MS, .backoff_cap_ns = MS},
                   .action = PG_GA_CREATE, .topics = 1, .namespace_len = 1, .name_len = 1},
           .names = {'n', 'g', 1, 't'}};
    handled(t, &m, sizeof m, t->clients[0].share.uid);
    for (uint32_t i = 0; i < CLIENTS; i++)
        CHECK(member_join(t->a, t->clients[i].session, 0, credits, 100ll * MS));
}

/* Let timers fire in the topic, each with a payload of some bytes. */
static void jobs_fired(struct test *t, uint8_t count, uint32_t payload_bytes)
{
    static const uint8_t payload[SIZE];
    struct pg_result result;
    int more;
    for (uint8_t key = 0; key < count; key++) {
        const struct pg_put put = {.namespace_name = "n", .topic_name = "t", .namespace_len = 1,
                                   .topic_len = 1, .key = &key, .key_len = 1, .payload = payload,
                                   .payload_len = payload_bytes, .time_kind = PG_T_DELAY};
        pg_put(t->a, &put, &result);
        CHECK_EQUAL(result.ticket & 0xff, PG_ST_ADDED);
    }
    t->now_ns += 2ll * MS;
    while (pg_advance(t->a, t->now_ns, 0, t->now_ns, 64, &more) != 0) {}
    pg_show(t->a);
    pg_published(t->a, pg_sendable(t->a), t->now_ns, t->now_ns);
}

/* Take a message out of a client's ring, and return its number of jobs. */
static uint32_t jobs_taken(struct client *c)
{
    uint8_t bytes[SIZE];
    struct pg_frame f;
    if (pg_ring_next(&c->taken) == 0)
        return 0;
    CHECK(pg_ring_take(&c->taken, bytes));
    memcpy(&f, bytes, sizeof f);
    CHECK(f.message == PG_M_JOBS && f.session == c->session && f.error == PG_ERR_NONE);
    return f.count;
}

static void test_leased_jobs_are_put_into_rings_that_are_awake(void)
{
    struct test *t = opened();
    t->on_wait = no_one_pings;
    group_joined(t, 2);
    jobs_fired(t, 9, 1);
    CHECK(t->a->state.jobs_unsent);
    CHECK_EQUAL(pg_loop_wait(t->a, &t->loop, t->now_ns + 50ll * MS), PG_WOKEN_FOR_CALLER);
    CHECK(!t->a->state.jobs_unsent);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        CHECK_EQUAL(jobs_taken(&t->clients[i]), 2);
        CHECK_EQUAL(jobs_taken(&t->clients[i]), 0);
    }
}

/* Check that an iteration leaves the jobs of all members to the caller, and sends none twice. */
static void left_to_the_caller(struct test *t, uint32_t jobs)
{
    uint64_t session;
    struct pg_frame f;
    CHECK_EQUAL(pg_loop_wait(t->a, &t->loop, t->now_ns + 50ll * MS), 0);
    CHECK(t->a->state.jobs_unsent && t->waits == 0);
    for (uint32_t sent = 0; sent < jobs; sent += f.count) {
        CHECK(pg_jobs(t->a, &session, t->reply, PG_MESSAGE_MAX) != 0);
        memcpy(&f, t->reply, sizeof f);
        CHECK(f.count != 0);
    }
    CHECK_EQUAL(pg_jobs(t->a, &session, t->reply, PG_MESSAGE_MAX), 0);
}

static void test_jobs_of_rings_that_sleep_are_left_to_the_caller(void)
{
    struct test *t = opened();
    group_joined(t, 2);
    CHECK(pg_rings_sleep(&t->server));
    jobs_fired(t, 6, 1);
    left_to_the_caller(t, 6);
    for (uint32_t i = 0; i < CLIENTS; i++)
        CHECK_EQUAL(jobs_taken(&t->clients[i]), 0);
}

static void test_jobs_without_space_are_left_to_the_caller(void)
{
    struct test *t = opened();
    const uint8_t filler[SIZE - 64] = {0};
    group_joined(t, 2);
    for (uint32_t i = 0; i < CLIENTS; i++)
        CHECK(pg_ring_put(&t->clients[i].putter, filler, sizeof filler));
    jobs_fired(t, 6, 1);
    left_to_the_caller(t, 6);
}

static void test_jobs_that_are_larger_than_a_ring_are_left_to_the_caller(void)
{
    struct test *t = opened();
    group_joined(t, 2);
    jobs_fired(t, 3, SIZE - 64);
    left_to_the_caller(t, 3);
    for (uint32_t i = 0; i < CLIENTS; i++)
        CHECK_EQUAL(jobs_taken(&t->clients[i]), 0);
}

static void test_jobs_of_a_client_with_waiting_replies_are_left_to_the_caller(void)
{
    struct test *t = opened();
    group_joined(t, 1);
    for (uint32_t i = 0; i < CLIENTS; i++)
        t->clients[i].served.replies = true;
    jobs_fired(t, 3, 1);
    left_to_the_caller(t, 3);
}

static void one_pings_in_time(struct test *t)
{
    its_time_comes(t);
    ping(&t->clients[0], 1);
    pg_rings_rouse(&t->server, &t->clients[0].served);
}

static void test_rings_are_served_while_due_timers_are_left(void)
{
    struct test *t = opened();
    t->loop.fires = true;
    t->loop.budget = t->loop.most = 1;
    t->on_wait = one_pings_in_time;
    for (uint8_t key = 0; key < TIMERS; key++)
        timer_put(t, key, 50ll * MS);
    CHECK_EQUAL(loop_wait(t, 500ll * MS, 1), 0);
    CHECK_EQUAL(t->waits, 2);
    CHECK_EQUAL(t->a->metrics->expiries, TIMERS);
    CHECK_EQUAL(t->a->header->published, TIMERS);
    CHECK(t->loop.iterations >= TIMERS && t->a->metrics->iterations_full >= TIMERS);
    CHECK_EQUAL(answered(&t->clients[0]), 1);
}

static void test_the_time_of_the_caller_is_left_to_the_caller(void)
{
    struct test *t = opened();
    t->loop.fires = true;
    t->on_wait = its_time_comes;
    timer_put(t, 0, 50ll * MS);
    CHECK_EQUAL(loop_wait(t, 20ll * MS, 9), 0);
    CHECK(t->loop.iterations == 0 && t->waits == 1 && t->a->metrics->expiries == 0);
    CHECK_EQUAL(measured(t, PG_HG_WAKEUP_LATENESS), 0);
}

static void time_passes_without_a_message(struct test *t)
{
    t->now_ns = t->waited_until_ns + 20ll * MS;
    t->timed_out = true;
}

static void test_an_iteration_after_an_outage_is_left_to_the_caller(void)
{
    for (uint32_t fires = 0; fires < 2; fires++) {
        struct test *t = opened();
        t->on_wait = fires ? time_passes_without_a_message : time_passes;
        t->loop.late_ns = 10ll * MS;
        t->loop.fires = fires;
        if (fires)
            timer_put(t, 0, 50ll * MS);
        CHECK_EQUAL(loop_wait(t, fires ? 500ll * MS : 20ll * MS, 9), 0);
        CHECK_EQUAL(t->loop.iterations, 0);
        CHECK_EQUAL(t->waits, 1);
    }
}

static void test_messages_are_applied_before_the_sleep(void)
{
    struct test *t = opened();
    t->on_wait = no_one_pings;
    for (uint64_t n = 1; n <= 8; n++)
        ping(&t->clients[0], n);
    t->loop.most = 2;
    CHECK_EQUAL(pg_loop_wait(t->a, &t->loop, t->now_ns + 500ll * MS), 0);
    CHECK_EQUAL(t->loop.iterations, 4);
    CHECK_EQUAL(t->loop.wakeups, 0);
    CHECK_EQUAL(t->waits, 1);
    CHECK_EQUAL(t->loop.planned_boot_ns, t->waited_until_ns);
}

static void one_says_bye(struct test *t)
{
    const struct pg_frame bye = frame_of(&t->clients[1], PG_M_BYE, 0);
    each_pings(t);
    CHECK(pg_ring_put(&t->clients[1].put, &bye, sizeof bye));
}

static void test_a_message_for_the_caller_ends_the_sleep(void)
{
    struct test *t = opened();
    t->on_wait = one_says_bye;
    CHECK_EQUAL(loop_wait(t, 500ll * MS, 9), 0);
    CHECK_EQUAL(t->loop.iterations, 1);
    CHECK_EQUAL(t->server.left, PG_RE_MESSAGE);
    CHECK(t->server.client == &t->clients[1].served);
    CHECK_EQUAL(t->server.message_bytes, sizeof(struct pg_frame));
    CHECK(t->loop.planned_boot_ns == t->loop.begun_boot_ns);
}

static void test_a_ring_for_the_caller_ends_the_sleep_and_is_seen_again(void)
{
    struct test *t = opened();
    uint8_t message[MESSAGE] = {1};
    for (uint32_t i = 0; i < CLIENTS; i += 2)
        pg_rings_remove(&t->server, &t->clients[i].served);
    pg_ring_put(&t->clients[1].put, message, sizeof message);
    CHECK_EQUAL(pg_loop_wait(t->a, &t->loop, t->now_ns + 500ll * MS), 0);
    CHECK_EQUAL(t->server.left, PG_RE_LOOK);
    CHECK_EQUAL(serve(t, 16), PG_RE_LOOK);
    CHECK(t->server.client == &t->clients[1].served);
}

/* Return a descriptor in the waiter's epoll that becomes readable in 10 ms. */
static int readable_soon(const struct pg_waiter *w)
{
    const struct itimerspec soon = {.it_value = {0, 10 * MS}};
    const int fd = timerfd_create(CLOCK_MONOTONIC, 0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    CHECK(timerfd_settime(fd, 0, &soon, NULL) == 0);
    CHECK(epoll_ctl(w->epoll, EPOLL_CTL_ADD, fd, &event) == 0);
    return fd;
}

static void test_a_loop_that_polls_rings_looks_at_descriptors(void)
{
    struct test *t = opened();
    struct pg_waiter w = {.epoll = epoll_create1(0), .timer = timerfd_create(CLOCK_BOOTTIME, 0),
                          .bells = -1, .commits = -1};
    const int64_t until_ns = pg_boot_ns() + 2000ll * MS;
    const int fd = readable_soon(&w);
    t->server.calls = NULL;       /* the system's clock and sleep */
    t->loop.waiter = &w;
    t->loop.spin_ns = t->loop.late_ns = 10000ll * MS;
    ping(&t->clients[0], 1);
    CHECK_EQUAL(pg_loop_wait(t->a, &t->loop, until_ns), 0);
    CHECK_EQUAL(answered(&t->clients[0]), 1);
    CHECK(w.count == 1 && w.ready[0] == fd);
    CHECK(t->loop.planned_boot_ns < until_ns);           /* the loop never slept */
    close(fd);
    close(w.timer);
    close(w.epoll);
}

int main(void)
{
    RUN(test_clients_are_served_in_rotation);
    RUN(test_slow_messages_let_due_timers_in);
    RUN(test_a_client_that_sleeps_is_woken_once);
    RUN(test_messages_of_other_sessions_are_left_to_the_caller);
    RUN(test_refusals_are_left_to_the_caller);
    RUN(test_a_reply_without_space_is_left_to_the_caller);
    RUN(test_the_caller_looks_at_rings_that_are_not_plain);
    RUN(test_a_uid_waits_once_it_has_had_its_share);
    RUN(test_rings_that_sleep_are_not_visited);
    RUN(test_the_loop_serves_rings_until_its_time);
    RUN(test_messages_are_applied_before_the_sleep);
    RUN(test_the_loop_sleeps_no_longer_than_the_next_timer);
    RUN(test_timers_are_left_to_the_caller);
    RUN(test_the_loop_fires_timers_that_no_socket_wants);
    RUN(test_leased_jobs_are_put_into_rings_that_are_awake);
    RUN(test_jobs_of_rings_that_sleep_are_left_to_the_caller);
    RUN(test_jobs_without_space_are_left_to_the_caller);
    RUN(test_jobs_that_are_larger_than_a_ring_are_left_to_the_caller);
    RUN(test_jobs_of_a_client_with_waiting_replies_are_left_to_the_caller);
    RUN(test_rings_are_served_while_due_timers_are_left);
    RUN(test_the_time_of_the_caller_is_left_to_the_caller);
    RUN(test_an_iteration_after_an_outage_is_left_to_the_caller);
    RUN(test_a_message_for_the_caller_ends_the_sleep);
    RUN(test_a_ring_for_the_caller_ends_the_sleep_and_is_seen_again);
    RUN(test_a_loop_that_polls_rings_looks_at_descriptors);
    opened();
    return 0;
}

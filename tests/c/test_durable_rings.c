/* Test durable replies through rings: pending until their frames are on disk, then put in order. The
 * disk is in memory. */
#include "clients.h"
#include "disk.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { CLIENTS = 2, SIZE = 1024, PENDING = 1024, MS = 1000000, BOOT_NS = 1000000000,
       SYNC_NS = 200000 };

static const struct pg_config config = {
    .layout_id = 1, .payload_bytes = 65536, .replay_bytes_max = 4096, .tick_ns = MS,
    .stream_id = 1, .secret = {1, 2}, .capacity = 4096, .replay_capacity = 16, .fanout = 64,
    .namespaces = 2, .topics = 2, .sessions = CLIENTS, .watches = 8, .watermarks = 8,
    .watermark_ttl_ns = 1000000000000, .inbox_max = 8, .accounts = 2, .now_ns = BOOT_NS,
    .clock_kind = PG_CLOCK_BOOT, .wal_buffer_bytes = PG_WAL_BUFFER_MIN};

struct client {
    struct pg_ring_pair words;
    uint8_t submissions[SIZE], completions[SIZE];
    struct pg_ring_end taker, putter, taken, put;
    struct pg_ring_client served;
    struct pg_time_share share;
    uint64_t sequence;
};

static struct test {
    struct pg_arena *a;
    void *arena, *secret;
    struct disk disk;
    struct pg_storage storage;
    struct pg_group_commit *commit;
    struct pg_commit_requests requests;
    struct client clients[CLIENTS];
    struct pg_ring_server server;
    struct pg_time_shares shares;
    struct pg_loop_calls calls;
    struct pg_loop loop;
    _Alignas(8) uint8_t pending[PENDING];
    uint8_t message[2 * SIZE], *reply;
    int64_t now_ns, waited_until_ns;
    uint32_t waits, waits_max;
    void (*on_wait)(struct test *t);
} test;

static int64_t boot_ns(void *context)
{
    struct test *t = context;
    return t->now_ns += 100;
}

static void wake(void *context, uint32_t how, uint32_t *word, int socket)
{
    (void)context, (void)how, (void)word, (void)socket;
}

static int wait_for_events(void *context, struct pg_ring_server *s, int64_t until_boot_ns)
{
    struct test *t = context;
    if (until_boot_ns == INT64_MIN)
        return 1;
    t->waited_until_ns = until_boot_ns;
    if (t->waits++ == t->waits_max)
        return 0;
    t->on_wait(t);
    for (uint32_t i = 0; i < CLIENTS; i++)
        pg_rings_rouse(s, &t->clients[i].served);
    return 1;
}

/* ---- clients --------------------------------------------------------------------------------- */

static struct pg_frame frame_of(const struct client *c, unsigned message)
{
    return (struct pg_frame){.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                             .message = (uint16_t)message, .session = c->served.session,
                             .sequence = c->sequence};
}

static void client_open(struct test *t, uint32_t number)
{
    struct client *c = &t->clients[number];
    const uint64_t session = session_begun(t->a, number, (uint8_t)(number + 1), t->now_ns, t->reply);
    pg_ring_open(&c->taker, &c->words.submissions, c->submissions, SIZE);
    pg_ring_open(&c->put, &c->words.submissions, c->submissions, SIZE);
    pg_ring_open(&c->putter, &c->words.completions, c->completions, SIZE);
    pg_ring_open(&c->taken, &c->words.completions, c->completions, SIZE);
    c->served = (struct pg_ring_client){.taker = &c->taker, .putter = &c->putter,
                                        .share = &c->share, .session = session,
                                        .socket = (int32_t)number};
    pg_rings_rouse(&t->server, &c->served);
}

/* Put a batch with one timer. */
static void add(struct client *c, bool durable)
{
    uint8_t bytes[256];
    struct pg_frame f = frame_of(c, PG_M_BATCH);
    const struct pg_record r = {.op = PG_OP_PUT, .key_len = 4, .key_type = PG_KEY_BYTES,
                                .time_kind = PG_T_DELAY, .time_ns = 3600ll * 1000 * MS};
    f.sequence = ++c->sequence;
    f.flags = durable ? PG_W_DURABLE : 0;
    f.count = f.names = 1;
    f.names_bytes = 8;
    const uint32_t key = (uint32_t)(c->sequence * CLIENTS) + c->share.uid;
    memcpy(bytes, &f, sizeof f);
    memcpy(bytes + sizeof f, "\1\1nt\0\0\0", 8);
    memcpy(bytes + sizeof f + 8, &r, sizeof r);
    memcpy(bytes + sizeof f + 8 + sizeof r, &key, sizeof key);
    CHECK(pg_ring_put(&c->put, bytes, sizeof f + 8 + sizeof r + sizeof key));
}

static uint64_t answered(struct client *c) { return answer_taken(&c->taken); }

/* ---- the daemon ------------------------------------------------------------------------------ */

static void closed(struct test *t)
{
    if (t->commit != NULL) {
        pg_group_commit_stop(t->commit);
        pg_group_commit_close(t->commit);
        disk_free(&t->disk);
    }
    free(t->commit);
    free(t->arena);
    free(t->secret);
    free(t->a);
    free(t->reply);
    memset(t, 0, sizeof *t);
}

static struct test *opened(void)
{
    struct test *t = &test;
    struct pg_walk end = {0};
    struct pg_fault why;
    closed(t);
    t->now_ns = BOOT_NS;
    t->arena = zeroed(pg_arena_bytes(&config));
    t->secret = zeroed(pg_private_bytes(&config));
    t->a = malloc(pg_handle_bytes());
    t->reply = malloc(PG_MESSAGE_MAX);
    t->commit = malloc(pg_group_commit_bytes());
    CHECK(pg_create(t->a, t->arena, t->secret, &config));
    t->storage = disk_storage(&t->disk);
    CHECK(pg_group_commit_open(t->commit, t->a, "dir", FILE_BYTES, &end, &t->storage, &why));
    pg_commit_requests_init(&t->requests, t->a, t->commit);
    t->requests.confirmed = true;
    t->calls = (struct pg_loop_calls){t, boot_ns, boot_ns, wake, wait_for_events};
    t->shares = (struct pg_time_shares){.most_ns = MS};
    t->server = (struct pg_ring_server){.calls = &t->calls, .message = t->message,
                                        .reply = t->reply, .commits = &t->requests,
                                        .pending = {.memory = t->pending, .size = PENDING}};
    t->loop = (struct pg_loop){.server = &t->server, .shares = &t->shares, .late_ns = 10 * MS,
                               .budget = 64, .most = 16};
    for (uint32_t i = 0; i < CLIENTS; i++) {
        t->clients[i].share.uid = i;
        client_open(t, i);
    }
    return t;
}

static uint32_t serve(struct test *t) { return pg_rings_serve(t->a, &t->server, &t->shares, 16); }

static void commit(struct test *t)
{
    while (pg_group_commit_iterate(t->commit)) {}
    CHECK_EQUAL(t->a->wal_buffer->committed_lsn, t->a->wal_buffer->next_lsn - 1);
}

static int release(struct test *t) { return pg_pending_release(t->a, &t->server); }

/* ---- replies --------------------------------------------------------------------------------- */

static void test_a_durable_reply_waits_for_its_frames(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0], *other = &t->clients[1];
    add(c, true);
    CHECK_EQUAL(serve(t), PG_RE_NONE);
    CHECK(t->server.pending.count == 1 && c->served.pending == 1);
    CHECK(!release(t) && answered(c) == 0);
    add(other, false);
    CHECK_EQUAL(serve(t), PG_RE_NONE);
    CHECK_EQUAL(answered(other), 1);
    commit(t);
    add(other, true);
    CHECK_EQUAL(serve(t), PG_RE_NONE);
    CHECK(!release(t));
    CHECK_EQUAL(answered(c), 1);
    CHECK_EQUAL(answered(other), 0);
    CHECK(t->server.pending.count == 1 && c->served.pending == 0);
    commit(t);
    CHECK(!release(t) && t->server.pending.count == 0);
    CHECK_EQUAL(answered(other), 2);
}

static void test_no_reply_leaves_before_a_snapshot_is_confirmed(void)
{
    struct test *t = opened();
    t->requests.confirmed = false;
    add(&t->clients[0], true);
    CHECK_EQUAL(serve(t), PG_RE_NONE);
    commit(t);
    CHECK(!release(t) && answered(&t->clients[0]) == 0);
    t->requests.confirmed = true;
    CHECK(!release(t) && answered(&t->clients[0]) == 1);
}

static void test_replies_leave_in_order_and_reuse_the_memory(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    uint64_t sequence = 0;
    for (uint32_t round = 0; round < 400; round++) {
        commit(t);
        add(c, true);
        add(c, true);
        CHECK_EQUAL(serve(t), PG_RE_NONE);
        CHECK(!release(t));
        if (round != 0) {
            CHECK_EQUAL(answered(c), ++sequence);
            CHECK_EQUAL(answered(c), ++sequence);
        }
        CHECK(answered(c) == 0 && t->server.pending.count == 2);
        pg_rings_replied(t->a, &t->server);
    }
    CHECK(t->server.pending.tail > 4 * PENDING);
}

static void test_replies_without_memory_are_left_to_the_caller(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    uint32_t event;
    do {
        add(c, true);
        event = serve(t);
    } while (event == PG_RE_NONE);
    CHECK_EQUAL(event, PG_RE_REPLY);
    CHECK(t->server.pending.count > 2 && pg_durable_lsn(t->a) == t->a->wal_buffer->next_lsn - 1);
    t->server.callers_pending = 1;
    commit(t);
    CHECK(!release(t) && t->server.pending.count == 0);
    add(c, true);
    CHECK_EQUAL(serve(t), PG_RE_REPLY);                  /* the caller has a pending reply */
    add(c, false);
    CHECK_EQUAL(serve(t), PG_RE_REPLY);                  /* the answers before it were not all put */
    t->server.pending.size = 0;
    t->server.callers_pending = 0;
    add(&t->clients[1], true);
    CHECK_EQUAL(serve(t), PG_RE_REPLY);
}

static void test_a_reply_on_disk_does_not_overtake_pending_replies(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    add(c, true);
    CHECK_EQUAL(serve(t), PG_RE_NONE);
    commit(t);
    c->sequence--;
    add(c, true);                                        /* a repetition appends no frame */
    CHECK_EQUAL(serve(t), PG_RE_NONE);
    CHECK(c->served.pending == 2 && answered(c) == 0);
    CHECK(release(t));
    CHECK_EQUAL(answered(c), 1);
    pg_rings_replied(t->a, &t->server);
    CHECK(!release(t) && answered(c) == 1);
    commit(t);
    c->sequence--;
    add(c, true);
    CHECK_EQUAL(serve(t), PG_RE_REPLY);                  /* its answer is noted already */
    CHECK_EQUAL(c->served.pending, 0);
}

static void test_a_ring_without_space_leaves_the_reply_to_the_caller(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    add(c, true);
    CHECK_EQUAL(serve(t), PG_RE_NONE);
    c->served.replies = true;
    commit(t);
    CHECK(release(t) && release(t) && answered(c) == 0);
    const struct pg_pending_reply *r = pg_pending_oldest(&t->server.pending);
    struct pg_frame f;
    CHECK(r != NULL && r->client == &c->served && r->lsn == t->a->wal_buffer->committed_lsn);
    memcpy(&f, r + 1, sizeof f);
    CHECK(f.sequence == 1 && r->bytes == sizeof f + sizeof(struct pg_result));
    pg_pending_drop(&t->server.pending);
    CHECK(!release(t) && c->served.pending == 0 && pg_pending_oldest(&t->server.pending) == NULL);
    pg_pending_drop(&t->server.pending);
    CHECK_EQUAL(t->server.pending.count, 0);
}

static void test_a_client_that_has_ended_gets_nothing(void)
{
    struct test *t = opened();
    struct client *ended = &t->clients[0], *gone = &t->clients[1];
    add(ended, true);
    add(gone, true);
    CHECK_EQUAL(serve(t), PG_RE_NONE);
    pg_rings_remove(&t->server, &ended->served);
    memset(&ended->served, 0xa5, sizeof ended->served);  /* its memory is used for something else */
    gone->served.gone = true;
    commit(t);
    CHECK(!release(t) && t->server.pending.count == 0);
    CHECK(answered(ended) == 0 && answered(gone) == 0 && ended->served.pending == 0xa5a5a5a5);
}

static void test_successive_answers_share_a_record(void)
{
    struct test *t = opened();
    struct client *c = &t->clients[0];
    for (uint32_t i = 0; i < 3; i++)
        add(c, true);
    CHECK_EQUAL(serve(t), PG_RE_NONE);
    commit(t);
    CHECK(!release(t));
    const uint64_t lsn = t->a->wal_buffer->next_lsn;
    CHECK(c->served.answers == 3 && c->served.answered_session == c->served.session);
    pg_rings_replied(t->a, &t->server);
    CHECK_EQUAL(t->a->wal_buffer->next_lsn, lsn + 1);
    CHECK(c->served.answers == 0 && t->server.answered == NULL);
    pg_rings_replied(t->a, &t->server);
    CHECK_EQUAL(t->a->wal_buffer->next_lsn, lsn + 1);
}

/* ---- requests -------------------------------------------------------------------------------- */

static int due(struct test *t, uint64_t callers, int64_t at_ns)
{
    return pg_commit_is_due(t->a, &t->requests, callers, at_ns);
}

static void frame_append(struct test *t) { pg_wal_append_metrics(t->a, t->now_ns); }

/* Set up a WAL whose last commit took `sync_ns` and allowed replies to `callers`. */
static struct test *after(uint64_t callers, uint64_t sync_ns)
{
    struct test *t = opened();
    frame_append(t);
    pg_commit_request(t->a, &t->requests);
    commit(t);
    t->requests.syncs = t->a->wal_buffer->syncs;
    t->a->wal_buffer->syncs += 2;
    t->a->wal_buffer->sync_ns = t->requests.sync_ns + 2 * sync_ns;
    pg_commit_allowed(t->a, &t->requests, callers);
    frame_append(t);
    return t;
}

static void test_without_callers_a_commit_is_due_at_once(void)
{
    struct test *t = after(8, SYNC_NS);
    CHECK(due(t, 0, 100));
    pg_commit_request(t->a, &t->requests);
    CHECK(!due(t, 0, 100) && !due(t, 8, 100));           /* every frame was requested */
    frame_append(t);
    CHECK(due(t, 0, 100));
}

static void test_one_caller_does_not_wait(void)
{
    struct test *t = after(1, SYNC_NS);
    CHECK(due(t, 1, 100));
    CHECK_EQUAL(t->requests.until_boot_ns, INT64_MAX);
}

static void test_a_commit_waits_for_the_callers_of_the_last_commit(void)
{
    struct test *t = after(3, SYNC_NS);
    CHECK(!due(t, 1, 100) && !due(t, 2, 200));
    CHECK_EQUAL(t->requests.until_boot_ns, 100 + SYNC_NS / 2);
    CHECK(due(t, 3, 300));
    CHECK(due(t, 1, 100 + SYNC_NS / 2) && !due(t, 1, 99 + SYNC_NS / 2));
    pg_commit_request(t->a, &t->requests);
    CHECK_EQUAL(t->requests.until_boot_ns, INT64_MAX);
}

static void test_a_slow_disk_does_not_make_the_wait_longer(void)
{
    struct test *t = after(3, 1000ll * MS);
    CHECK(!due(t, 1, 100));
    CHECK_EQUAL(t->requests.until_boot_ns, 100 + MS);
    pg_commit_allowed(t->a, &t->requests, 3);            /* no sync: the time stays */
    CHECK_EQUAL(t->requests.wait_ns, MS);
}

static void test_the_wait_begins_after_the_running_commit(void)
{
    struct test *t = after(3, SYNC_NS);
    CHECK(due(t, 3, 100));
    pg_commit_request(t->a, &t->requests);
    frame_append(t);
    CHECK(!due(t, 1, 100));
    CHECK_EQUAL(t->requests.until_boot_ns, INT64_MAX);
    commit(t);
    frame_append(t);
    CHECK(!due(t, 1, 1000));
    CHECK_EQUAL(t->requests.until_boot_ns, 1000 + SYNC_NS / 2);
}

static void test_a_stopped_wal_does_not_wait(void)
{
    struct test *t = after(3, SYNC_NS);
    t->a->wal_buffer->state = PG_WAL_STOPPED;
    CHECK(due(t, 1, 100));
}

/* ---- the loop -------------------------------------------------------------------------------- */

static int loop_wait(struct test *t, uint32_t waits_max)
{
    t->waits = 0;
    t->waits_max = waits_max;
    return pg_loop_wait(t->a, &t->loop, t->now_ns + 500ll * MS);
}

static void each_adds_or_disk_commits(struct test *t)
{
    if (t->waits % 2 == 0) {
        CHECK_EQUAL(t->requests.requested, t->a->wal_buffer->tail);
        commit(t);
        return;
    }
    for (uint32_t i = 0; i < CLIENTS; i++)
        add(&t->clients[i], true);
}

static void test_the_loop_commits_and_replies(void)
{
    struct test *t = opened();
    t->on_wait = each_adds_or_disk_commits;
    CHECK_EQUAL(loop_wait(t, 6), 0);
    CHECK_EQUAL(t->loop.iterations, 6);
    CHECK_EQUAL(t->server.left, PG_RE_NONE);
    for (uint64_t n = 1; n <= 3; n++)
        for (uint32_t i = 0; i < CLIENTS; i++)
            CHECK_EQUAL(answered(&t->clients[i]), n);
    CHECK_EQUAL(t->requests.callers, CLIENTS);
}

static void first_adds(struct test *t)
{
    if (t->waits == 1)
        add(&t->clients[0], true);
}

static void test_the_loop_sleeps_no_longer_than_a_commit_may_wait(void)
{
    struct test *t = after(2, SYNC_NS);
    t->on_wait = first_adds;
    pg_commit_request(t->a, &t->requests);
    commit(t);
    CHECK_EQUAL(loop_wait(t, 1), 0);
    CHECK_EQUAL(t->waited_until_ns, t->requests.until_boot_ns);
    CHECK(t->waited_until_ns <= t->now_ns + SYNC_NS / 2);
    t->now_ns = t->requests.until_boot_ns;
    add(&t->clients[0], false);
    pg_rings_rouse(&t->server, &t->clients[0].served);
    CHECK_EQUAL(loop_wait(t, 0), 0);
    CHECK_EQUAL(t->requests.requested, t->a->wal_buffer->tail);
}

static void adds_and_disk_dies(struct test *t)
{
    if (t->waits == 1) {
        add(&t->clients[0], true);
        return;
    }
    t->disk.dead_at = 1;
    pg_group_commit_iterate(t->commit);
    CHECK_EQUAL(t->a->wal_buffer->state, PG_WAL_STOPPED);
}

static void test_a_stopped_wal_is_left_to_the_caller(void)
{
    struct test *t = opened();
    t->on_wait = adds_and_disk_dies;
    CHECK_EQUAL(loop_wait(t, 9), 0);
    CHECK_EQUAL(t->waits, 2);
    CHECK(t->server.pending.count == 1 && answered(&t->clients[0]) == 0);
}

static void test_a_reply_for_the_caller_ends_the_sleep(void)
{
    struct test *t = opened();
    t->on_wait = each_adds_or_disk_commits;
    t->clients[0].served.replies = false;
    CHECK_EQUAL(loop_wait(t, 1), 0);
    t->clients[0].served.replies = true;
    commit(t);
    CHECK_EQUAL(loop_wait(t, 9), 0);
    CHECK_EQUAL(t->waits, 1);
    CHECK_EQUAL(t->server.pending.count, 2);
}

/* The group-commit thread wakes the loop by its eventfd. */
static void test_the_thread_wakes_the_loop(void)
{
    struct test *t = opened();
    struct pg_fault why;
    struct pg_waiter w = {.epoll = epoll_create1(0), .bells = -1,
                          .timer = timerfd_create(CLOCK_BOOTTIME, 0),
                          .commits = pg_group_commit_fd(t->commit)};
    struct epoll_event event = {.events = EPOLLIN, .data.fd = w.timer};
    CHECK(w.epoll >= 0 && w.timer >= 0);
    CHECK(epoll_ctl(w.epoll, EPOLL_CTL_ADD, w.timer, &event) == 0);
    event.data.fd = w.commits;
    CHECK(epoll_ctl(w.epoll, EPOLL_CTL_ADD, w.commits, &event) == 0);
    t->server.calls = NULL;
    t->loop.waiter = &w;
    t->loop.late_ns = INT64_MAX / 2;
    CHECK(pg_group_commit_start(t->commit, &why));
    uint32_t woken = 0;
    for (uint64_t n = 1; n <= 10; n++) {
        add(&t->clients[0], true);
        pg_rings_rouse(&t->server, &t->clients[0].served);
        uint64_t found;
        while ((found = answered(&t->clients[0])) == 0) {
            CHECK_EQUAL(pg_loop_wait(t->a, &t->loop, pg_boot_ns() + 100 * MS), 0);
            woken += t->server.pending.count == 0;
            pg_pending_release(t->a, &t->server);        /* as a caller does if time ends the sleep */
        }
        CHECK_EQUAL(found, n);
    }
    CHECK(woken != 0);
    CHECK_EQUAL(t->server.pending.count, 0);
    t->server.callers_pending = 1;                               /* the next commit needs the caller */
    frame_append(t);
    pg_commit_request(t->a, &t->requests);
    do
        CHECK_EQUAL(pg_loop_wait(t->a, &t->loop, pg_boot_ns() + 5 * MS), 0);
    while (w.count == 0);
    CHECK(w.count == 1 && w.ready[0] == w.commits);
    close(w.epoll);
    close(w.timer);
}

int main(void)
{
    RUN(test_a_durable_reply_waits_for_its_frames);
    RUN(test_no_reply_leaves_before_a_snapshot_is_confirmed);
    RUN(test_replies_leave_in_order_and_reuse_the_memory);
    RUN(test_replies_without_memory_are_left_to_the_caller);
    RUN(test_a_reply_on_disk_does_not_overtake_pending_replies);
    RUN(test_a_ring_without_space_leaves_the_reply_to_the_caller);
    RUN(test_a_client_that_has_ended_gets_nothing);
    RUN(test_successive_answers_share_a_record);
    RUN(test_without_callers_a_commit_is_due_at_once);
    RUN(test_one_caller_does_not_wait);
    RUN(test_a_commit_waits_for_the_callers_of_the_last_commit);
    RUN(test_a_slow_disk_does_not_make_the_wait_longer);
    RUN(test_the_wait_begins_after_the_running_commit);
    RUN(test_a_stopped_wal_does_not_wait);
    RUN(test_the_loop_commits_and_replies);
    RUN(test_the_loop_sleeps_no_longer_than_a_commit_may_wait);
    RUN(test_a_stopped_wal_is_left_to_the_caller);
    RUN(test_a_reply_for_the_caller_ends_the_sleep);
    RUN(test_the_thread_wakes_the_loop);
    closed(&test);
    return 0;
}

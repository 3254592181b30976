/* Limits and lifetimes: quotas of operations and their accounts, the time to live of watch keys and
 * bulk loads, names and their rows. The test moves the clock. */
#include "check.h"
#include "core/core.h"

enum { LAYOUT = 4711, SECOND = 1000000000, MESSAGE = 4096, RECORDS = 4, TTL_S = 10,
      REPLAY_CAPACITY = 16, INBOX_MAX = 8 };

static struct pg_arena *a;
static void *arena, *secret;
static _Alignas(8) uint8_t message[MESSAGE], reply[MESSAGE];
static uint32_t bytes, pid = 1;
static int64_t now_s;
static char in_namespace = 'n';

/* A session of one uid. */
struct client {
    uint32_t uid;
    uint64_t session, sequence;
    uint64_t unanswered;          /* batches sent, counted from the oldest unanswered batch */
};

/* ---- set-up ------------------------------------------------------------------------------ */

static void arena_open(uint32_t accounts, uint64_t ops)
{
    const struct pg_config c = {
        .layout_id = LAYOUT, .payload_bytes = 65536, .replay_bytes_max = 16384, .tick_ns = 1000000,
        .stream_id = 1, .secret = {1, 2}, .capacity = 10, .replay_capacity = REPLAY_CAPACITY,
        .fanout = 8, .namespaces = 1, .topics = 2, .sessions = 4, .watches = 8, .watermarks = 4,
        .watermark_ttl_ns = (int64_t)TTL_S * SECOND, .inbox_max = INBOX_MAX, .bulk_loads = 1,
        .bulk_load_blocks = 1, .accounts = accounts, .clock_kind = PG_CLOCK_VIRTUAL,
        .shard = 1, .shards = 2};
    arena = zeroed(pg_arena_bytes(&c));
    secret = zeroed(pg_private_bytes(&c));
    a = malloc(pg_handle_bytes());
    CHECK(a != NULL && pg_create(a, arena, secret, &c));
    pg_set_quotas(a, 0, 0, ops);
    now_s = 100;
}

static void arena_close(void)
{
    struct pg_fault fault;
    CHECK(pg_check(a, &fault));
    free(arena);
    free(secret);
    free(a);
}

/* ---- messages ------------------------------------------------------------------------------ */

static void append(const void *from, uint32_t len)
{
    CHECK(bytes + len <= sizeof message);
    memcpy(message + bytes, from, len);
    bytes += len;
}

static void frame_begin(const struct client *c, unsigned kind, uint32_t count)
{
    const bool batch = kind == PG_M_BATCH;
    const struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                               .message = (uint16_t)kind, .session = c->session,
                               .sequence = batch ? c->sequence : 0, .count = count,
                               .names = batch, .names_bytes = batch ? 8 : 0,
                               .detail = {0, c->unanswered}};
    bytes = 0;
    append(&f, sizeof f);
    append((char[]){1, 1, in_namespace, 't', 0, 0, 0, 0}, batch ? 8 : 0);
}

static int handle(const struct client *c)
{
    uint64_t used;
    int64_t wait_ns;
    return pg_handle(a, message, bytes, c->uid, pid, now_s * SECOND, now_s * SECOND, reply, &used,
                     &wait_ns);
}

static struct client named(uint32_t uid, const char *worker, int64_t grace_ns)
{
    struct client c = {.uid = uid, .sequence = 1};
    const struct pg_hello hello = {.nonce = {(uint8_t)uid}, .name_len = (uint32_t)strlen(worker),
                                   .grace_ns = grace_ns};
    frame_begin(&c, PG_M_HELLO, 0);
    append(&hello, sizeof hello);
    append(worker, hello.name_len);
    CHECK_EQUAL(handle(&c), PG_H_REPLY);
    memcpy(&c.session, reply + offsetof(struct pg_frame, session), sizeof c.session);
    return c;
}

static struct client greeted(uint32_t uid) { return named(uid, "", 0); }

static void leaves(const struct client *c)
{
    frame_begin(c, PG_M_BYE, 0);
    handle(c);
}

static unsigned status(uint32_t n)
{
    struct pg_result r;
    memcpy(&r, reply + sizeof(struct pg_frame) + n * sizeof r, sizeof r);
    return (unsigned)(r.ticket & 0xff);
}

/* Advance the only watch key by 1, `count` times in one batch. */
static void advances(struct client *c, uint32_t count)
{
    static uint64_t watermark;
    frame_begin(c, PG_M_BATCH, count);
    for (uint32_t i = 0; i < count; i++) {
        const struct pg_record r = {.op = PG_OP_ADVANCE_KEY, .key_len = 1, .value = ++watermark};
        append(&r, sizeof r);
    }
    append("kkkk", count);
    CHECK_EQUAL(handle(c), PG_H_REPLY);
    c->sequence++;
}

/* Send one record for watch key "k", or for operation `o`, which waits for "k". */
static void one(struct client *c, unsigned op, char o)
{
    const bool watermark = op == PG_OP_FORGET;
    const struct pg_watch_key k = {.target = PG_TARGET_MAX, .key_len = 1};
    const struct pg_record r = {.op = (uint8_t)op, .key_len = 1,
                                .ext_len = op == PG_OP_WATCH ? sizeof k + 1 : 0,
                                .time_kind = op == PG_OP_WATCH ? PG_T_BOOT : 0,
                                .time_ns = op == PG_OP_WATCH ? INT64_MAX / 2 : 0};
    frame_begin(c, PG_M_BATCH, 1);
    append(&r, sizeof r);
    append(watermark ? "k" : &o, 1);
    append(&k, op == PG_OP_WATCH ? sizeof k : 0);
    append("k", op == PG_OP_WATCH);
    CHECK_EQUAL(handle(c), PG_H_REPLY);
    c->sequence++;
}

/* ---- quotas -------------------------------------------------------------------------------- */

static void each_record_counts_in_a_quota_of_operations(void)
{
    arena_open(2, 3);
    struct client c = greeted(5);
    advances(&c, 2);
    advances(&c, 2);
    CHECK_EQUAL(status(0), PG_ST_DONE);
    CHECK_EQUAL(status(1), PG_ST_QUOTA);
    now_s++;
    advances(&c, 2);
    CHECK_EQUAL(status(1), PG_ST_DONE);
    arena_close();
}

static void publish(char topic)
{
    const struct pg_publish head = {.key_len = 1, .namespace_len = 1, .topic_len = 1};
    const uint64_t ticket = a->header->next_ticket;
    uint8_t body[sizeof head + 3];
    struct pg_result r;
    uint64_t detail[2];
    memcpy(body, &head, sizeof head);
    memcpy(body + sizeof head, (char[]){'n', topic, 'x'}, 3);
    CHECK_EQUAL(pg_publish(a, body, sizeof body, 0, now_s * SECOND, &r, detail), PG_ERR_NONE);
    CHECK_EQUAL(r.ticket, ticket << 8 | PG_ST_DONE);
    CHECK_EQUAL(a->header->next_ticket, ticket + 1);
    const struct pg_entry *e = replay_at(a, a->header->replay_tail - 1);
    CHECK_EQUAL(e->key_len, 1);
    CHECK_EQUAL(*(const uint8_t *)blob_at(&a->blobs, e->blob), 'x');
}

static void fill_replay_buffer(void)
{
    for (uint32_t i = 0; i < REPLAY_CAPACITY; i++)
        publish('t');
}

static void a_record_that_has_to_wait_counts_once(void)
{
    arena_open(2, 3);
    struct client c = greeted(5);
    const struct pg_watch_key k = {.target = PG_TARGET_MAX, .key_len = 1};
    const struct pg_record watch = {.op = PG_OP_WATCH, .key_len = 1, .flags = 1,
                                    .ext_len = sizeof k + 1, .time_kind = PG_T_BOOT,
                                    .time_ns = INT64_MAX / 2};
    const struct pg_record advance = {.op = PG_OP_ADVANCE_KEY, .key_len = 1, .value = 1};
    fill_replay_buffer();
    frame_begin(&c, PG_M_BATCH, 3);
    append(&watch, sizeof watch);
    append(&advance, sizeof advance);
    append(&advance, sizeof advance);
    append("o", 1);
    append(&k, sizeof k);
    append("kkk", 3);
    CHECK_EQUAL(handle(&c), PG_H_AGAIN);
    CHECK_EQUAL(handle(&c), PG_H_AGAIN);
    pg_published(a, a->header->replay_tail, 0, 0);
    CHECK_EQUAL(handle(&c), PG_H_REPLY);
    CHECK_EQUAL(status(0), PG_ST_ADDED);
    CHECK_EQUAL(status(2), PG_ST_DONE);
    arena_close();
}

static void an_account_begins_with_a_full_quota(void)
{
    arena_open(1, 3);
    struct client c = greeted(5);
    advances(&c, 3);
    one(&c, PG_OP_FORGET, 0);     /* otherwise the client's watch key would keep the account in
                                     use */
    leaves(&c);
    c = greeted(6);
    advances(&c, 3);
    CHECK_EQUAL(status(2), PG_ST_DONE);
    arena_close();
}

static bool has_account(uint32_t uid)
{
    bool found = false;
    for (uint32_t i = 0; i < a->account_rows; i++)
        found |= a->accounts[i].in_use && a->accounts[i].uid == uid;
    return found;
}

static void the_account_that_was_idle_longest_goes(void)
{
    for (uint32_t older = 5; older <= 6; older++) {
        const uint32_t younger = 11 - older;
        arena_open(2, 3);
        struct client first = greeted(younger), second = greeted(older);
        advances(&first, 1);
        now_s++;
        advances(&second, 1);
        now_s++;
        advances(&first, 1);
        one(&first, PG_OP_FORGET, 0);
        leaves(&first);
        leaves(&second);
        struct client third = greeted(7);
        advances(&third, 1);
        CHECK(has_account(7) && has_account(younger) && !has_account(older));
        arena_close();
    }
}

/* ---- a uid's share of the tables ----------------------------------------------------------- */

static struct pg_result advanced(struct client *c, char key)
{
    const struct pg_record r = {.op = PG_OP_ADVANCE_KEY, .key_len = 1, .value = 1};
    struct pg_result result;
    frame_begin(c, PG_M_BATCH, 1);
    append(&r, sizeof r);
    append(&key, 1);
    CHECK_EQUAL(handle(c), PG_H_REPLY);
    c->sequence++;
    memcpy(&result, reply + sizeof(struct pg_frame), sizeof result);
    return result;
}

static const struct pg_account *account_with(uint32_t uid)
{
    for (uint32_t i = 0; i < a->account_rows; i++)
        if (a->accounts[i].in_use && a->accounts[i].uid == uid)
            return &a->accounts[i];
    CHECK(false);
    return NULL;
}

static void refused_with(struct pg_result r, uint32_t uid, uint32_t held, uint32_t limit)
{
    CHECK_EQUAL(r.ticket, ((uint64_t)limit << 8 | PG_Q_UID_WATCH_KEYS) << 8 | PG_ST_QUOTA);
    CHECK_EQUAL((uint64_t)r.deadline_ns, (uint64_t)uid << 32 | held);
}

static void a_uid_that_holds_its_share_of_the_watch_keys_is_refused_alone(void)
{
    arena_open(3, 0);
    pg_set_uid_share(a, 50, 9);
    struct client c = greeted(5), other = greeted(6);
    for (char key = 'a'; key <= 'b'; key++)
        CHECK_EQUAL(advanced(&c, key).ticket, PG_ST_DONE);
    CHECK_EQUAL(account_with(5)->watch_keys, 2);
    refused_with(advanced(&c, 'c'), 5, 2, 2);
    CHECK_EQUAL(advanced(&c, 'a').ticket, PG_ST_DONE);
    CHECK_EQUAL(advanced(&other, 'd').ticket, PG_ST_DONE);
    CHECK_EQUAL(account_with(6)->watch_keys, 1);
    arena_close();
}

static void a_migration_keeps_when_an_account_was_used(void)
{
    struct pg_fault why;
    arena_open(2, 0);
    struct client c = greeted(5);
    one(&c, PG_OP_WATCH, 'o');
    const int64_t used_s = now_s;
    struct pg_arena *from = a;
    void *const parts[] = {arena, secret};
    arena_open(2, 0);
    CHECK(pg_migrate(a, from, &why));
    CHECK_EQUAL(account_with(5)->used_boot_ns, used_s * SECOND);
    arena_close();
    free(from);
    free(parts[0]);
    free(parts[1]);
}

static void a_rebuild_counts_what_each_uid_holds(void)
{
    struct pg_fault why;
    arena_open(3, 0);
    pg_set_uid_share(a, 50, 9);
    struct client c = greeted(5);
    advanced(&c, 'a');
    advanced(&c, 'k');
    one(&c, PG_OP_WATCH, 'o');
    struct pg_account *account = &a->accounts[account_with(5) - a->accounts];
    account->watch_keys = account->watches = account->sessions = 77;
    CHECK(pg_rebuild(a, 0, &why));
    CHECK_EQUAL(account->watch_keys, 2);
    CHECK_EQUAL(account->watches, 1);
    CHECK_EQUAL(account->sessions, 1);
    refused_with(advanced(&c, 'c'), 5, 2, 2);
    one(&c, PG_OP_CANCEL, 'o');
    CHECK_EQUAL(account->watches, 0);
    leaves(&c);
    CHECK_EQUAL(account->sessions, 0);
    arena_close();
}

/* ---- time to live -------------------------------------------------------------------------- */

static bool key_is_there(void) { return a->purgatory->free_watermarks < a->watermark_rows; }

static void sweep_at(int64_t at_s)
{
    uint32_t cursor = 0;
    now_s = at_s;
    pg_sweep(a, at_s * SECOND, &cursor, a->watermark_rows);
}

static void a_watch_key_lives_from_its_last_change_and_its_last_watcher(void)
{
    arena_open(1, 0);
    struct client c = greeted(5);
    advances(&c, 1);
    now_s = 109;
    advances(&c, 1);
    sweep_at(115);
    CHECK(key_is_there());
    one(&c, PG_OP_WATCH, 'o');
    sweep_at(130);
    CHECK(key_is_there());
    one(&c, PG_OP_CANCEL, 'o');
    sweep_at(139);
    CHECK(key_is_there());
    sweep_at(141);
    CHECK(!key_is_there());
    arena_close();
}

static void a_forgotten_watch_key_goes_with_its_last_watcher(void)
{
    arena_open(1, 0);
    struct client c = greeted(5);
    for (uint32_t revived = 0; revived < 3; revived++) {
        advances(&c, 1);
        one(&c, PG_OP_WATCH, 'o');
        one(&c, PG_OP_FORGET, 0);
        if (revived == 1)
            advances(&c, 1);
        if (revived == 2)
            one(&c, PG_OP_WATCH, 'p');
        one(&c, PG_OP_CANCEL, 'o');
        if (revived == 2)
            one(&c, PG_OP_CANCEL, 'p');
        CHECK_EQUAL(key_is_there(), revived == 1); /* a change revives the forgotten key; a new
                                                      watcher does not */
        one(&c, PG_OP_FORGET, 0);
        CHECK(!key_is_there());
    }
    arena_close();
}

static void a_watch_key_is_born_without_an_error(void)
{
    arena_open(1, 0);
    struct client c = greeted(5);
    advances(&c, 1);
    const uint32_t row = a->purgatory->free_watermark == 0 ? 1 : 0;
    CHECK(a->watermarks[row].key_len != 0);
    watermark_set(a, row, 1, 7);
    one(&c, PG_OP_FORGET, 0);
    advances(&c, 1);
    CHECK(a->watermarks[row].key_len != 0);
    CHECK_EQUAL(a->watermarks[row].error, 0);
    arena_close();
}

/* A kill may come after the creation of a watch key, but before the creation of the watch that
 * needs the key. */
static void a_watch_key_that_nobody_came_to_watch_is_gone(void)
{
    for (uint32_t watched = 0; watched < 2; watched++) {
        struct key k = {.bytes = (const uint8_t *)"key", .row_guess = PG_NIL, .len = 3};
        struct pg_fault why;
        struct pg_result refused;
        arena_open(1, 0);
        publish('t');             /* creates the namespace */
        k.hash = key_hash(a, 0, k.type, k.bytes, k.len);
        CHECK(watermark_born(a, &k, watched, &refused) != PG_NIL);
        CHECK(pg_rebuild(a, 0, &why));
        CHECK_EQUAL(key_is_there(), !watched);
        arena_close();
    }
}

static void a_bulk_load_lives_from_when_it_was_last_claimed(void)
{
    const struct pg_bulk_load wanted = {.id = {1}, .fencing_token = 1, .uid = 5,
                                        .state = PG_BULK_LOAD_OPEN};
    unsigned refused;
    arena_open(1, 0);
    struct client c = greeted(5);
    advances(&c, 1);              /* creates the namespace */
    CHECK_EQUAL(bulk_load_claim(a, &wanted, &refused), 0);
    pg_bulk_loads_sweep(a, 105ll * SECOND, (int64_t)TTL_S * SECOND);
    CHECK_EQUAL(bulk_load_find(a, wanted.id), 0);
    time_set(a, a->state.now_ns, 109ll * SECOND);
    CHECK_EQUAL(bulk_load_claim(a, &wanted, &refused), 0);
    pg_bulk_loads_sweep(a, 115ll * SECOND, (int64_t)TTL_S * SECOND);
    CHECK_EQUAL(bulk_load_find(a, wanted.id), 0);
    pg_bulk_loads_sweep(a, 120ll * SECOND, (int64_t)TTL_S * SECOND);
    CHECK_EQUAL(bulk_load_find(a, wanted.id), PG_NIL);
    arena_close();
}

/* ---- reports ------------------------------------------------------------------------------- */

static void a_topic_that_changed_lately_is_reported(void)
{
    struct pg_part part;
    uint32_t cursor = 0;
    arena_open(1, 0);
    publish('t');
    CHECK_EQUAL(pg_tail_heartbeats(a, now_s * SECOND, &cursor, reply, sizeof reply, &part, 1), 1);
    cursor = 0;
    CHECK_EQUAL(pg_tail_heartbeats(a, now_s * SECOND + 1, &cursor, reply, sizeof reply, &part, 1),
                0);
    arena_close();
}

static void a_session_tells_whose_it_is_and_since_when(void)
{
    arena_open(1, 0);
    const struct client c = named(5, "mill", 7);
    const struct pg_session *s = session_find(a, c.session);
    CHECK(s != NULL);
    CHECK_EQUAL(s->uid, 5);
    CHECK_EQUAL(s->pid, 1);
    CHECK_EQUAL(s->grace_ns, 7);
    CHECK_EQUAL(s->worker_len, 4);
    CHECK(memcmp(s->worker, "mill", 4) == 0);
    CHECK_EQUAL(s->opened_boot_ns, now_s * SECOND);
    arena_close();
}

static void a_session_that_is_found_again_has_its_new_process_and_grace(void)
{
    arena_open(1, 0);
    const struct client first = named(5, "", 7);
    pid = 2;
    const struct client again = named(5, "", 8);
    pid = 1;
    CHECK_EQUAL(again.session, first.session);
    CHECK_EQUAL(session_find(a, first.session)->pid, 2);
    CHECK_EQUAL(session_find(a, first.session)->grace_ns, 8);
    arena_close();
}

static uint32_t busy_bits(const struct pg_session *s)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < PG_BUSY_KEYS / 64; i++)
        count += (uint32_t)__builtin_popcountll(s->busy_keys[i]);
    return count;
}

static void keys_of_a_busy_record_are_busy_until_its_answer_was_seen(void)
{
    arena_open(1, 0);
    struct client c = greeted(5);
    const struct pg_session *s = session_find(a, c.session);
    for (char o = 'a'; o < 'a' + INBOX_MAX; o++)
        one(&c, PG_OP_WATCH, o);
    for (uint32_t set = 0; set < 2; set++) {
        c.unanswered = 0;
        one(&c, PG_OP_WATCH, 'y');
        CHECK_EQUAL(status(0), PG_ST_BUSY);
        CHECK_EQUAL(s->busy_first, c.sequence - 1);
        CHECK_EQUAL(s->busy_last, c.sequence - 1);
        CHECK_EQUAL(busy_bits(s), 2);         /* one bit for the operation, one for its watch key */
        c.unanswered = 1;
        one(&c, PG_OP_CANCEL, 'y');
        CHECK_EQUAL(status(0), PG_ST_BUSY);
        CHECK_EQUAL(s->busy_last, c.sequence - 1);
        one(&c, PG_OP_CANCEL, 'z');
        CHECK_EQUAL(status(0), PG_ST_UNKNOWN);
        c.unanswered = 0;
        one(&c, PG_OP_CANCEL, 'y');
        CHECK_EQUAL(status(0), PG_ST_UNKNOWN);
        CHECK_EQUAL(s->busy_last, 0);
    }
    arena_close();
}

static void a_busy_record_of_an_unknown_namespace_makes_every_key_busy(void)
{
    arena_open(1, 0);
    struct client c = greeted(5);
    for (char o = 'a'; o <= 'a' + INBOX_MAX; o++)
        one(&c, PG_OP_WATCH, o);
    CHECK_EQUAL(status(0), PG_ST_BUSY);
    c.unanswered = 1;
    in_namespace = 'm';
    one(&c, PG_OP_CANCEL, 'z');
    CHECK_EQUAL(status(0), PG_ST_BUSY);
    in_namespace = 'n';
    one(&c, PG_OP_CANCEL, 'z');
    CHECK_EQUAL(status(0), PG_ST_BUSY);
    arena_close();
}

/* After the results, the reply has the index of the record in its batch, the size of the list of
 * keys, and the type, length and bytes of each key. */
static void keys_that_are_cancelled_for_a_key_are_reported(void)
{
    static const uint8_t expected[] = {0, 0, 0, 0, 3, 0, 0, 0, PG_KEY_STR, 1, 'o'};
    arena_open(1, 0);
    struct client c = greeted(5);
    one(&c, PG_OP_WATCH, 'o');
    one(&c, PG_OP_CANCEL_FOR_KEY, 'k');
    CHECK_EQUAL(status(0), PG_ST_DONE);
    CHECK(memcmp(reply + sizeof(struct pg_frame) + sizeof(struct pg_result), expected,
                 sizeof expected) == 0);
    arena_close();
}

/* ---- names --------------------------------------------------------------------------------- */

static void a_namespace_is_of_the_shard_where_it_was_born(void)
{
    arena_open(1, 0);
    publish('t');
    CHECK_EQUAL(a->namespaces[0].shard, a->header->shard);
    CHECK_EQUAL(a->namespaces[0].shard, 1);
    arena_close();
}

static void a_name_is_of_the_uid_that_used_it_first(void)
{
    arena_open(2, 0);
    struct client first = greeted(5), second = greeted(6);
    one(&first, PG_OP_WATCH, 'o');
    one(&second, PG_OP_WATCH, 'p');
    CHECK_EQUAL(a->namespaces[0].created_uid, 5);
    CHECK_EQUAL(a->topics[0].created_uid, 5);
    arena_close();
}

/* A kill may come after the first of two refusals was stored. The second one must not depend on the
 * first, because the batch goes on without it. */
static void a_daemon_that_stops_refuses_an_add_for_no_other_reason(void)
{
    static const struct pg_record records[] = {
        {.op = PG_OP_ADVANCE_KEY, .key_len = 1, .value = 1},
        {.op = PG_OP_PUT, .key_len = 1, .time_kind = PG_T_BOOT, .time_ns = INT64_MAX / 2}};
    arena_open(1, 0);
    struct client c = greeted(5);
    publish('t');
    pg_drain(a, 1);
    in_namespace = 'm';
    frame_begin(&c, PG_M_BATCH, 2);
    append(records, sizeof records);
    append("kp", 2);
    CHECK_EQUAL(handle(&c), PG_H_REPLY);
    in_namespace = 'n';
    CHECK_EQUAL(status(0), PG_ST_FULL_NAMESPACES);
    CHECK_EQUAL(status(1), PG_ST_STOPPING);
    arena_close();
}

static void a_topic_begins_anew_in_the_row_of_another(void)
{
    arena_open(1, 0);
    publish('t');
    for (uint32_t i = 0; i < REPLAY_CAPACITY; i++) {
        pg_published(a, a->header->replay_tail, 0, 0);
        publish('u');
    }
    pg_published(a, a->header->replay_tail, 0, 0);
    const uint64_t tail = a->header->replay_tail;
    publish('v');
    CHECK_EQUAL(a->topics[0].name[0], 'v');
    CHECK_EQUAL(a->topics[0].sequence, 1);
    CHECK_EQUAL(replay_at(a, tail)->sequence, 1);
    CHECK_EQUAL(replay_at(a, tail)->back, 0);
    arena_close();
}

int main(void)
{
    RUN(each_record_counts_in_a_quota_of_operations);
    RUN(a_record_that_has_to_wait_counts_once);
    RUN(an_account_begins_with_a_full_quota);
    RUN(the_account_that_was_idle_longest_goes);
    RUN(a_uid_that_holds_its_share_of_the_watch_keys_is_refused_alone);
    RUN(a_migration_keeps_when_an_account_was_used);
    RUN(a_rebuild_counts_what_each_uid_holds);
    RUN(a_watch_key_lives_from_its_last_change_and_its_last_watcher);
    RUN(a_forgotten_watch_key_goes_with_its_last_watcher);
    RUN(a_watch_key_is_born_without_an_error);
    RUN(a_watch_key_that_nobody_came_to_watch_is_gone);
    RUN(a_bulk_load_lives_from_when_it_was_last_claimed);
    RUN(a_topic_that_changed_lately_is_reported);
    RUN(a_session_tells_whose_it_is_and_since_when);
    RUN(a_session_that_is_found_again_has_its_new_process_and_grace);
    RUN(keys_of_a_busy_record_are_busy_until_its_answer_was_seen);
    RUN(a_busy_record_of_an_unknown_namespace_makes_every_key_busy);
    RUN(keys_that_are_cancelled_for_a_key_are_reported);
    RUN(a_namespace_is_of_the_shard_where_it_was_born);
    RUN(a_name_is_of_the_uid_that_used_it_first);
    RUN(a_daemon_that_stops_refuses_an_add_for_no_other_reason);
    RUN(a_topic_begins_anew_in_the_row_of_another);
    return 0;
}

/* Test the purgatory against a model that evaluates every condition again at each step, and with
 * hostile bytes. Every message is in an allocation of exactly its size, so the sanitizers report
 * reads beyond it. */
#include "check.h"
#include "core/core.h"

enum {
    OPERATIONS = 40, WATCHED = 12, FEW_KEYS = 4, MOST_KEYS = 9, SESSIONS = 2, COMMANDS = 6, LAYOUT = 4711,
    MESSAGE = 1 << 17, MS = 1000000
};

struct command {
    uint8_t op, condition, count;
    bool notice;
    uint32_t key;                 /* index of an operation or of a watch key */
    uint32_t keys[MOST_KEYS];
    uint32_t own;                 /* bit n: when the operation ends, it forgets key n */
    uint64_t targets[MOST_KEYS], caps[MOST_KEYS];
    uint64_t value;
    int64_t delay_ns;
    uint32_t payload_len;
};

struct operation {
    struct command watch;
    uint64_t ticket;              /* ticket of the armed operation; 0 = not armed */
    int64_t deadline_ns;
    uint32_t session;             /* index of the owner's session; SESSIONS = that session has
                                     ended */
};

struct outcome {
    uint64_t ticket;
    uint32_t session, cause, error;
    uint64_t watermarks[MOST_KEYS];
    uint32_t missing, failed;     /* bit n is set if key n is missing or has failed */
};

struct watermark {
    uint64_t watermark;
    uint32_t error;
    bool there, forgotten;
};

struct world {
    struct rng rng;
    struct pg_config config;
    struct pg_arena *a;
    void *arena, *secret;
    uint8_t *reply;
    uint64_t sessions[SESSIONS], sequences[SESSIONS];
    uint8_t greeted;
    int64_t now_ns;
    struct operation operations[OPERATIONS];
    struct outcome *outcomes;     /* unacknowledged outcomes; space for capacity + 1 */
    uint32_t outcome_count;
    struct watermark watermarks[WATCHED];
    uint64_t satisfied;
    bool hostile;                 /* the input may be damaged, so payloads may contain any bytes */
};

/* ---- set-up ------------------------------------------------------------------------------ */

static struct pg_config config_random(struct rng *r)
{
    return (struct pg_config){
        .layout_id = LAYOUT, .payload_bytes = 4096u << rng_below(r, 7),
        .replay_bytes_max = 256u << rng_below(r, 8), .tick_ns = MS, .stream_id = 1,
        .secret = {rng_next(r), rng_next(r)}, .capacity = 1 + (uint32_t)rng_below(r, OPERATIONS),
        .replay_capacity = 16, .fanout = 2 + (uint32_t)rng_below(r, 255), .namespaces = 1,
        .topics = 1, .sessions = SESSIONS, .clock_kind = PG_CLOCK_VIRTUAL,
        .watches = 1 + (uint32_t)rng_below(r, OPERATIONS * MOST_KEYS),
        .watermarks = 1 + (uint32_t)rng_below(r, WATCHED), .watermark_ttl_ns = 1000000000000,
        .inbox_max = 1 + rng_below(r, OPERATIONS), .accounts = 2};
}

static void arena_open(struct world *w)
{
    w->arena = zeroed(pg_arena_bytes(&w->config));
    w->secret = zeroed(pg_private_bytes(&w->config));
    w->a = malloc(pg_handle_bytes());
    CHECK(w->a != NULL && pg_create(w->a, w->arena, w->secret, &w->config));
    /* The quotas are too large to refuse anything. With them the arena counts usage, and each
     * pg_check verifies these counts. */
    pg_set_quotas(w->a, PG_QUOTA_MAX, PG_QUOTA_MAX, PG_QUOTA_OPS_MAX);
}

static void arena_close(struct world *w)
{
    free(w->arena);
    free(w->secret);
    free(w->a);
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

/* Check the operation's payload in its notice. It follows the struct pg_verdict and the bitmap of
 * missing keys; all its bytes are 7. */
static void notice_found(const struct world *w, const struct pg_entry *e)
{
    const uint8_t *at = blob_at(&w->a->blobs, e->blob) + e->key_len;
    struct pg_verdict verdict;
    memcpy(&verdict, at, sizeof verdict);
    for (uint32_t i = (uint32_t)sizeof verdict + verdict.bitmap_bytes; i < e->payload_len; i++)
        CHECK_EQUAL(at[i], 7);
}

static void publish(struct world *w)
{
    const struct pg_header *h = w->a->header;
    for (uint64_t p = h->published; p < h->replay_tail && !w->hostile; p++)
        notice_found(w, replay_at(w->a, p));
    pg_published(w->a, w->a->header->replay_tail, 0, 0);
}

/* ---- messages ------------------------------------------------------------------------------ */

/* Copy the message into an allocation of exactly its size, and handle the copy; return the size of
 * the reply. */
static uint64_t send(struct world *w, const void *bytes, uint64_t len)
{
    uint8_t *message = malloc(len + (len == 0));
    uint64_t used = 0;
    int64_t wait_ns;
    int state;
    CHECK(message != NULL);
    memcpy(message, bytes, len);
    while ((state = pg_handle(w->a, message, len, 1, 1, w->now_ns, w->now_ns, w->reply, &used,
                              &wait_ns)) ==
           PG_H_AGAIN) {
        whole(w);
        publish(w);
    }
    free(message);
    return state == PG_H_REPLY ? used : 0;
}

static struct pg_frame frame_of(const struct world *w, uint32_t session, unsigned message)
{
    return (struct pg_frame){.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                             .message = (uint16_t)message, .session = w->sessions[session]};
}

static void greet(struct world *w, uint32_t session)
{
    struct {
        struct pg_frame frame;
        struct pg_hello hello;
    } message = {.frame = frame_of(w, session, PG_M_HELLO)};
    message.frame.session = 0;
    message.hello.nonce[0] = ++w->greeted;
    send(w, &message, sizeof message);
    memcpy(&w->sessions[session], w->reply + offsetof(struct pg_frame, session), 8);
    w->sequences[session] = 0;
}

static uint32_t key_len(uint32_t n) { return 2 + n * 37 % 254; }

static uint8_t *key_write(uint8_t *at, char kind, uint32_t n)
{
    memset(at, kind, key_len(n));
    at[1] = (uint8_t)n;
    return at + key_len(n);
}

static bool of_operation(unsigned op)
{
    return op == PG_OP_WATCH || op == PG_OP_CANCEL || op == PG_OP_COMPLETE;
}

static uint8_t *keys_write(uint8_t *at, const struct command *c)
{
    for (uint32_t i = 0; i < c->count; i++) {
        const struct pg_watch_key k = {.target = c->targets[i], .cap = c->caps[i],
                                       .key_len = (uint8_t)key_len(c->keys[i]),
                                       .key_type = PG_KEY_BYTES,
                                       .flags = c->own >> i & 1 ? PG_WK_OWN : 0};
        memcpy(at, &k, sizeof k);
        at = key_write(at + sizeof k, 'w', c->keys[i]);
    }
    return at;
}

static struct pg_record record_of(const struct command *c)
{
    const bool watch = c->op == PG_OP_WATCH;
    return (struct pg_record){.op = c->op, .mode = c->condition, .key_type = PG_KEY_BYTES,
                              .key_len = (uint8_t)key_len(c->key),
                              .time_kind = watch ? PG_T_DELAY : 0, .flags = c->notice,
                              .payload_len = c->payload_len, .time_ns = c->delay_ns,
                              .value = c->value};
}

static uint64_t batch_write(struct world *w, uint32_t session, const struct command *commands,
                            uint32_t count, uint8_t *out)
{
    static const uint8_t names[8] = {1, 1, 'n', 't'};
    struct pg_frame f = frame_of(w, session, PG_M_BATCH);
    uint8_t *records = out + sizeof f + sizeof names;
    uint8_t *at = records + count * sizeof(struct pg_record);
    f.sequence = ++w->sequences[session];
    f.count = count;
    f.names = 1;
    f.names_bytes = sizeof names;
    memcpy(out, &f, sizeof f);
    memcpy(out + sizeof f, names, sizeof names);
    for (uint32_t i = 0; i < count; i++) {
        struct pg_record r = record_of(&commands[i]);
        at = key_write(at, of_operation(r.op) ? 'o' : 'w', commands[i].key);
        memset(at, 7, r.payload_len);
        at += r.payload_len;
        r.ext_len = (uint32_t)(keys_write(at, &commands[i]) - at);
        at += r.ext_len;
        memcpy(records + i * sizeof r, &r, sizeof r);
    }
    return (uint64_t)(at - out);
}

/* ---- random commands ------------------------------------------------------------------------ */

static uint64_t watermark_random(struct rng *r)
{
    static const uint64_t extremes[] = {0, PG_WATERMARK_MAX, 1ull << 63, UINT64_MAX - 1,
                                        UINT64_MAX};
    return rng_below(r, 16) == 0 ? extremes[rng_below(r, 5)] : rng_below(r, 12);
}

static struct command watch_random(struct rng *r)
{
    struct command c = {.op = PG_OP_WATCH, .condition = (uint8_t)rng_below(r, PG_CONDITIONS),
                        .count = (uint8_t)(1 + rng_below(r, FEW_KEYS)),
                        .notice = rng_below(r, 2), .key = (uint32_t)rng_below(r, OPERATIONS),
                        .delay_ns = (int64_t)rng_below(r, 60) * MS,
                        .payload_len = (uint32_t)(rng_below(r, 3) == 0 ? rng_below(r, 3000) : 0)};
    if (rng_below(r, 16) == 0)
        c.count = MOST_KEYS;
    if (rng_below(r, 3) == 0)
        c.own = (uint32_t)rng_below(r, 1u << c.count);
    for (uint32_t i = 0; i < c.count; i++) {
        c.keys[i] = c.count == MOST_KEYS ? (c.key + i) % WATCHED : (uint32_t)rng_below(r, WATCHED);
        c.targets[i] = watermark_random(r);
        if (has_targets(c.condition) && c.targets[i] > PG_TARGET_MAX)
            c.targets[i] = PG_TARGET_MAX;
        c.caps[i] = c.condition == PG_C_SUM ? watermark_random(r) : 0;
    }
    c.value = c.condition == PG_C_SUM ? rng_below(r, 20) : 0;
    if (c.condition == PG_C_QUORUM)
        c.value = 1 + rng_below(r, c.count);
    return c;
}

static struct command command_random(struct rng *r)
{
    static const uint8_t ops[] = {PG_OP_ADVANCE_KEY, PG_OP_ADVANCE_KEY, PG_OP_BUMP, PG_OP_FAIL,
                                  PG_OP_CLEAR, PG_OP_CLEAR, PG_OP_FORGET, PG_OP_CANCEL,
                                  PG_OP_CANCEL_FOR_KEY, PG_OP_COMPLETE};
    if (rng_below(r, 2))
        return watch_random(r);
    struct command c = {.op = ops[rng_below(r, sizeof ops)]};
    c.key = (uint32_t)rng_below(r, of_operation(c.op) ? OPERATIONS : WATCHED);
    if (c.op == PG_OP_ADVANCE_KEY || c.op == PG_OP_BUMP)
        c.value = watermark_random(r) & PG_WATERMARK_MAX;
    if (c.op == PG_OP_FAIL || c.op == PG_OP_COMPLETE)
        c.value = 1 + rng_below(r, 3);
    return c;
}

/* ---- the model ------------------------------------------------------------------------------- */

static uint64_t gain(const struct world *w, const struct command *c, uint32_t i)
{
    const uint64_t watermark = w->watermarks[c->keys[i]].watermark;
    const uint64_t gained = watermark > c->targets[i] ? watermark - c->targets[i] : 0;
    return gained < c->caps[i] ? gained : c->caps[i];
}

static bool key_reached(const struct world *w, const struct command *c, uint32_t i)
{
    return w->watermarks[c->keys[i]].watermark >= c->targets[i];
}

static bool holds(const struct world *w, const struct command *c)
{
    unsigned __int128 sum = 0;
    uint32_t met = 0;
    for (uint32_t i = 0; i < c->count; i++) {
        sum += gain(w, c, i);
        met += key_reached(w, c, i);
    }
    switch (c->condition) {
    case PG_C_ALL: return met == c->count;
    case PG_C_ANY: return met != 0;
    case PG_C_QUORUM: return met >= c->value;
    case PG_C_SUM: return sum >= c->value;
    default: return false;
    }
}

/* If the failed keys make the operation fail, return the error of the first of them; otherwise
 * return 0. */
static uint32_t failed(const struct world *w, const struct command *c)
{
    uint32_t count = 0, error = 0, spare = 0;
    if (c->condition == PG_C_ANY)
        spare = c->count - 1u;
    if (c->condition == PG_C_QUORUM)
        spare = c->count - (uint32_t)c->value;
    for (uint32_t i = 0; i < c->count; i++) {
        const uint32_t code = w->watermarks[c->keys[i]].error;
        if (code == 0 || (has_targets(c->condition) && key_reached(w, c, i)))
            continue;
        count++;
        error = error != 0 ? error : code;
    }
    return count > spare ? error : 0;
}

static bool watches(const struct operation *op, uint32_t key)
{
    for (uint32_t i = 0; i < op->watch.count; i++)
        if (op->ticket != 0 && op->watch.keys[i] == key)
            return true;
    return false;
}

static void watermark_left_model(struct world *w, uint32_t key)
{
    for (uint32_t i = 0; i < OPERATIONS; i++)
        if (watches(&w->operations[i], key))
            return;
    if (w->watermarks[key].forgotten)
        w->watermarks[key] = (struct watermark){0};
}

static bool key_missing(const struct world *w, const struct command *c, uint32_t i)
{
    if (has_targets(c->condition))
        return !key_reached(w, c, i);
    return c->condition == PG_C_SUM && gain(w, c, i) == 0;
}

static struct outcome outcome_now(const struct world *w, const struct operation *op,
                                  uint32_t cause)
{
    const struct command *c = &op->watch;
    struct outcome o = {.ticket = op->ticket, .session = op->session, .cause = cause,
                        .error = cause == PG_CAUSE_FAILED ? failed(w, c) : 0};
    for (uint32_t i = 0; i < c->count; i++) {
        o.watermarks[i] = w->watermarks[c->keys[i]].watermark;
        o.missing |= (uint32_t)key_missing(w, c, i) << i;
        o.failed |= (uint32_t)(w->watermarks[c->keys[i]].error != 0) << i;
    }
    return o;
}

static int64_t end(struct world *w, struct operation *op, uint32_t cause)
{
    CHECK(op->ticket != 0);
    if (op->session < SESSIONS)
        w->outcomes[w->outcome_count++] = outcome_now(w, op, cause);
    op->ticket = 0;
    w->satisfied += cause == PG_CAUSE_SATISFIED;
    for (uint32_t i = 0; i < op->watch.count; i++)
        w->watermarks[op->watch.keys[i]].forgotten |= op->watch.own >> i & 1;
    for (uint32_t i = 0; i < op->watch.count; i++)
        watermark_left_model(w, op->watch.keys[i]);
    return 1;
}

/* End the operations that wait for this key and whose condition holds or has failed; return the
 * number of ended operations. */
static int64_t look(struct world *w, uint32_t key)
{
    int64_t ended = 0;
    for (uint32_t i = 0; i < OPERATIONS; i++) {
        struct operation *op = &w->operations[i];
        if (!watches(op, key))
            continue;
        if (holds(w, &op->watch))
            ended += end(w, op, PG_CAUSE_SATISFIED);
        else if (failed(w, &op->watch))
            ended += end(w, op, PG_CAUSE_FAILED);
    }
    return ended;
}

static void model_watch(struct world *w, uint32_t session, const struct command *c,
                        const struct pg_result *r)
{
    struct operation *op = &w->operations[c->key];
    CHECK_EQUAL((r->ticket & 0xff) == PG_ST_EXISTS, op->ticket != 0);
    if ((r->ticket & 0xff) != PG_ST_ADDED)
        return;
    *op = (struct operation){*c, r->ticket >> 8, r->deadline_ns, session};
    CHECK_EQUAL(op->deadline_ns, w->now_ns + c->delay_ns);
    for (uint32_t i = 0; i < c->count; i++) {
        struct watermark *l = &w->watermarks[c->keys[i]];
        l->forgotten = l->forgotten && l->there;
        l->there = true;
        if (c->condition == PG_C_SUM && c->targets[i] == UINT64_MAX)
            op->watch.targets[i] = l->watermark;
    }
    if (holds(w, &op->watch))
        end(w, op, PG_CAUSE_SATISFIED);
    else if (failed(w, &op->watch))
        end(w, op, PG_CAUSE_FAILED);
}

static void model_move(struct world *w, const struct command *c, const struct pg_result *r)
{
    struct watermark *l = &w->watermarks[c->key];
    const uint64_t to = c->op == PG_OP_BUMP ? l->watermark + c->value : c->value;
    CHECK_EQUAL((r->ticket & 0xff) == PG_ST_OVERFLOW, to > PG_WATERMARK_MAX);
    if (r->ticket != PG_ST_DONE) {
        CHECK((r->ticket & 0xff) == PG_ST_OVERFLOW || !l->there);
        return;
    }
    l->there = true;
    l->forgotten = l->forgotten && to <= l->watermark;
    l->watermark = to > l->watermark ? to : l->watermark;
    CHECK_EQUAL(r->deadline_ns, look(w, c->key));
}

static void model_fail(struct world *w, const struct command *c, const struct pg_result *r)
{
    struct watermark *l = &w->watermarks[c->key];
    if (r->ticket != PG_ST_DONE) {
        CHECK(!l->there);
        return;
    }
    *l = (struct watermark){l->watermark, (uint32_t)c->value, true, false};
    CHECK_EQUAL(r->deadline_ns, look(w, c->key));
}

static void model_forget(struct world *w, const struct command *c)
{
    if (!w->watermarks[c->key].there)
        return;
    w->watermarks[c->key].forgotten = true;
    watermark_left_model(w, c->key);
}

/* COMPLETE works only for the owner of an operation with the CLIENT condition. */
static void model_end_named(struct world *w, uint32_t session, const struct command *c,
                            const struct pg_result *r)
{
    struct operation *op = &w->operations[c->key];
    const bool cancel = c->op == PG_OP_CANCEL;
    const bool known = op->ticket != 0 && (cancel || (op->session == session &&
                                                      op->watch.condition == PG_C_CLIENT));
    CHECK_EQUAL((r->ticket & 0xff) != PG_ST_UNKNOWN, known);
    if (known)
        CHECK_EQUAL(r->ticket >> 8, op->ticket);
    if (known && (cancel || r->deadline_ns == 1))
        end(w, op, cancel ? PG_CAUSE_CANCELLED : PG_CAUSE_SATISFIED);
}

/* Check a CANCEL_FOR_KEY, whose reply names the keys of the operations that it ended. */
static const uint8_t *model_cancel_for_key(struct world *w, const struct command *c,
                                           const struct pg_result *r, uint32_t n,
                                           const uint8_t *extra)
{
    uint32_t head[2], left = 0;
    int64_t ended = 0;
    const uint64_t status = r->ticket;
    if (status == PG_ST_UNKNOWN)
        CHECK_EQUAL(r->deadline_ns, 0);
    if (status == PG_ST_FULL_PAYLOAD || status == PG_ST_UNKNOWN)
        return extra;
    memcpy(head, extra, sizeof head);
    CHECK_EQUAL(head[0], n);
    extra += sizeof head;
    for (const uint8_t *to = extra + head[1]; extra != to; extra += 2 + extra[1]) {
        CHECK(watches(&w->operations[extra[3]], c->key));
        ended += end(w, &w->operations[extra[3]], PG_CAUSE_CANCELLED);
    }
    for (uint32_t i = 0; i < OPERATIONS; i++)
        left += watches(&w->operations[i], c->key);
    CHECK_EQUAL(r->deadline_ns, ended);
    CHECK_EQUAL(status == PG_ST_MORE, left != 0);
    return extra;
}

static const uint8_t *model_apply(struct world *w, uint32_t session, const struct command *c,
                                  const struct pg_result *r, uint32_t n, const uint8_t *extra)
{
    switch (c->op) {
    case PG_OP_WATCH: model_watch(w, session, c, r); break;
    case PG_OP_ADVANCE_KEY:
    case PG_OP_BUMP: model_move(w, c, r); break;
    case PG_OP_FAIL: model_fail(w, c, r); break;
    case PG_OP_CLEAR: w->watermarks[c->key].error = 0; break;
    case PG_OP_FORGET: model_forget(w, c); break;
    case PG_OP_CANCEL_FOR_KEY: return model_cancel_for_key(w, c, r, n, extra);
    default: model_end_named(w, session, c, r);
    }
    return extra;
}

/* ---- busy keys ------------------------------------------------------------------------------ */

/* Operations and watch keys of those records of a batch that were answered BUSY, as bit sets. */
struct busy {
    uint64_t operations, watched;
};

static struct busy touched(const struct command *c)
{
    struct busy b = {0, 0};
    const bool named = c->op == PG_OP_WATCH || c->op == PG_OP_CANCEL || c->op == PG_OP_COMPLETE;
    *(named ? &b.operations : &b.watched) |= 1ull << c->key;
    for (uint32_t i = 0; c->op == PG_OP_WATCH && i < c->count; i++)
        b.watched |= 1ull << c->keys[i];
    return b;
}

/* Return whether a record may need payload memory, and so may have to wait for a compaction. */
static bool takes_memory(const struct command *c)
{
    return c->op == PG_OP_WATCH || c->op == PG_OP_ADVANCE_KEY || c->op == PG_OP_BUMP ||
           c->op == PG_OP_FAIL || c->op == PG_OP_CANCEL_FOR_KEY;
}

/* Return whether a record was answered BUSY, and track its keys. Only a record that takes memory may
 * be the first BUSY record of a batch. A later record that uses a key of a BUSY record must be BUSY.
 * Other later records may be BUSY, because the daemon hashes keys, so different keys may share bits.
 */
static bool is_busy(struct busy *all, const struct command *c, const struct pg_result *r)
{
    const struct busy mine = touched(c);
    const bool busy = r->ticket == PG_ST_BUSY;
    const bool begun = (all->operations | all->watched) != 0;
    if ((all->operations & mine.operations) != 0 || (all->watched & mine.watched) != 0)
        CHECK(busy);
    if (!busy)
        return false;
    CHECK(begun || takes_memory(c));
    all->operations |= mine.operations;
    all->watched |= mine.watched;
    return true;
}

/* ---- steps --------------------------------------------------------------------------------- */

static void step_batch(struct world *w)
{
    static uint8_t bytes[MESSAGE], replied[MESSAGE];
    struct command commands[COMMANDS];
    struct pg_result r;
    struct busy busy = {0, 0};
    const uint32_t session = (uint32_t)rng_below(&w->rng, SESSIONS);
    const uint32_t count = 1 + (uint32_t)rng_below(&w->rng, COMMANDS);
    for (uint32_t i = 0; i < count; i++)
        commands[i] = command_random(&w->rng);
    const uint64_t len = batch_write(w, session, commands, count, bytes);
    const uint64_t used = send(w, bytes, len);
    const uint8_t *results = w->reply + sizeof(struct pg_frame);
    const uint8_t *extra = results + count * sizeof r;
    CHECK(used <= sizeof replied);
    for (uint32_t i = 0; i < count; i++) {
        memcpy(&r, results + i * sizeof r, sizeof r);
        if (!is_busy(&busy, &commands[i], &r))
            extra = model_apply(w, session, &commands[i], &r, i, extra);
    }
    CHECK_EQUAL(extra - w->reply, used);
    memcpy(replied, w->reply, used);
    CHECK_EQUAL(send(w, bytes, len), used);
    CHECK(memcmp(replied, w->reply, used) == 0);
}

static void step_time(struct world *w)
{
    int more;
    w->now_ns += (int64_t)rng_below(&w->rng, 30) * MS;
    while (pg_advance(w->a, w->now_ns, 0, w->now_ns, 1 + (uint32_t)rng_below(&w->rng, 99), &more),
           more)
        publish(w);
    for (uint32_t i = 0; i < OPERATIONS; i++)
        if (w->operations[i].ticket != 0 && w->operations[i].deadline_ns <= w->now_ns)
            end(w, &w->operations[i], PG_CAUSE_EXPIRED);
}

static void acknowledge(struct world *w, uint32_t session, const struct pg_ack *ack)
{
    struct {
        struct pg_frame frame;
        struct pg_ack ack;
    } message = {frame_of(w, session, PG_M_ACK), *ack};
    message.frame.count = 1;
    CHECK_EQUAL(send(w, &message, sizeof message), 0);
}

static uint32_t outcome_at(const struct world *w, uint64_t ticket)
{
    uint32_t i = 0;
    while (i < w->outcome_count && w->outcomes[i].ticket != ticket)
        i++;
    CHECK(i < w->outcome_count);
    return i;
}

static void outcome_found(struct world *w, uint32_t session, const struct pg_outcome *o)
{
    const struct pg_ack ack = {.ticket = o->ticket >> 8, .version = o->version, .slot = o->slot};
    uint32_t i = 0;
    if ((o->ticket & 0xff) != 0) {
        i = outcome_at(w, ack.ticket);
        CHECK_EQUAL(w->outcomes[i].session, session);
        CHECK_EQUAL(w->outcomes[i].cause, o->ticket & 0xff);
        CHECK_EQUAL(w->outcomes[i].error, o->error);
    } else {
        CHECK((uint32_t)o->version != 0);        /* the number of CHECK requests sent so far */
    }
    if (rng_below(&w->rng, 2))
        return;
    acknowledge(w, (session + 1) % SESSIONS, &ack);
    acknowledge(w, session, &ack);
    if ((o->ticket & 0xff) != 0)
        w->outcomes[i] = w->outcomes[--w->outcome_count];
}

/* Check the watermarks of an outcome's keys, and the bitmaps of missing and of failed keys. */
static void keys_found(const struct world *w, const struct pg_outcome *o, const uint8_t *at)
{
    const struct outcome *expected = &w->outcomes[outcome_at(w, o->ticket >> 8)];
    const uint8_t *missing = at + o->keys * sizeof(uint64_t), *failing = missing + o->bitmap_bytes;
    CHECK(memcmp(at, expected->watermarks, o->keys * sizeof(uint64_t)) == 0);
    for (uint32_t n = 0; n < o->keys; n++) {
        CHECK_EQUAL(missing[n / 8] >> n % 8 & 1, expected->missing >> n & 1);
        CHECK_EQUAL(failing[n / 8] >> n % 8 & 1, expected->failed >> n & 1);
    }
}

/* Check key, payload and result of one outcome; return the address of the next outcome's key. */
static const uint8_t *outcome_bytes_found(const struct world *w, const struct pg_outcome *o,
                                          const uint8_t *at)
{
    for (uint32_t i = 0; i < o->key_len; i++)
        CHECK(at[i] == 'o' || i == 1);
    at += o->key_len;
    for (uint32_t i = 0; i < o->payload_len; i++)
        CHECK_EQUAL(at[i], 7);
    at += o->payload_len;
    const uint32_t end = (o->ticket & 0xff) != 0 ? operation_end_bytes(o->keys) : 0;
    CHECK_EQUAL(o->bitmap_bytes, end != 0 ? (o->keys + 7u) / 8 : 0);
    CHECK(memcmp(at, operation_at(w->a, o->slot) + 1, end) == 0);
    if (end != 0)
        keys_found(w, o, at);
    return at + end;
}

static void step_mail(struct world *w)
{
    static uint8_t bytes[MESSAGE];
    struct pg_frame f;
    uint64_t id, used;
    if (rng_below(&w->rng, 2))
        pg_inbox_again(w->a, INT64_MAX);
    memset(bytes, 0xa5, sizeof bytes);
    while ((used = pg_inbox(w->a, &id, bytes, MESSAGE)) != 0) {
        const uint32_t session = id == w->sessions[0] ? 0 : 1;
        CHECK(id == w->sessions[session] && used <= MESSAGE);
        memcpy(&f, bytes, sizeof f);
        const uint8_t *at = bytes + sizeof f + f.count * sizeof(struct pg_outcome);
        for (uint32_t i = 0; i < f.count; i++) {
            struct pg_outcome o;
            memcpy(&o, bytes + sizeof f + i * sizeof o, sizeof o);
            at = outcome_bytes_found(w, &o, at);
            outcome_found(w, session, &o);
        }
    }
}

static void step_bye(struct world *w)
{
    const uint32_t session = (uint32_t)rng_below(&w->rng, SESSIONS);
    const struct pg_frame f = frame_of(w, session, PG_M_BYE);
    uint32_t retained = 0;
    send(w, &f, sizeof f);
    for (uint32_t i = 0; i < w->outcome_count; i++)
        if (w->outcomes[i].session != session)
            w->outcomes[retained++] = w->outcomes[i];
    w->outcome_count = retained;
    for (uint32_t i = 0; i < OPERATIONS; i++)
        if (w->operations[i].session == session)
            w->operations[i].session = SESSIONS;
    greet(w, session);
}

/* Bring all armed operations into the state in which a kill leaves an operation that is about to
 * end. */
static void ends_begin(struct world *w)
{
    for (uint32_t slot = 0; slot < w->config.capacity; slot++) {
        if (ctl_state(w->a->slots.hot[slot].ctl) != PG_S_ARMED)
            continue;
        struct pg_operation *op = operation_at(w->a, slot);
        memset(op + 1, 0xff, operation_end_bytes(op->keys));
        op->error = 9;
        op->ended_ns = w->now_ns;
        op->cause = PG_CAUSE_FAILED;
    }
}

static void step_restart(struct world *w)
{
    struct pg_fault why;
    if (rng_below(&w->rng, 2))
        ends_begin(w);
    if (rng_below(&w->rng, 2))
        CHECK(pg_attach(w->a, w->arena, pg_arena_bytes(&w->config), w->secret,
                        pg_private_bytes(&w->config), LAYOUT, &why));
    CHECK(pg_rebuild(w->a, w->now_ns, &why));
}

/* Migrate into an arena of random sizes. If these are too small, the old arena must be
 * unchanged. */
static void step_migrate(struct world *w)
{
    struct world to = *w;
    struct pg_fault why;
    to.config = config_random(&w->rng);
    arena_open(&to);
    if (!pg_migrate(to.a, w->a, &why)) {
        CHECK(why.expected > why.found);
        arena_close(&to);
        return;
    }
    arena_close(w);
    *w = to;
}

static void same_counts(struct world *w)
{
    uint32_t armed = 0, records = 0, watermarks = 0;
    for (uint32_t i = 0; i < OPERATIONS; i++) {
        armed += w->operations[i].ticket != 0;
        records += w->operations[i].ticket != 0 ? w->operations[i].watch.count : 0;
    }
    for (uint32_t i = 0; i < WATCHED; i++)
        watermarks += w->watermarks[i].there;
    CHECK_EQUAL(w->a->metrics->operations, armed);
    CHECK_EQUAL(w->a->metrics->outcomes, w->outcome_count);
    CHECK_EQUAL(w->a->purgatory->free_watches, w->config.watches - records);
    CHECK_EQUAL(w->a->purgatory->free_watermarks, w->config.watermarks - watermarks);
    CHECK_EQUAL(slots_live(&w->a->slots), armed + w->outcome_count);
    CHECK_EQUAL(w->a->metrics->blob_bytes, blobs_used(&w->a->blobs) * PG_GRANULE);
    CHECK_EQUAL(w->a->metrics->already_true, 0);
}

static void step(struct world *w)
{
    const uint64_t dice = rng_below(&w->rng, 100);
    if (dice < 70)
        step_batch(w);
    else if (dice < 80)
        step_time(w);
    else if (dice < 92)
        step_mail(w);
    else if (dice < 94)
        step_bye(w);
    else if (dice < 97)
        step_restart(w);
    else
        step_migrate(w);
    whole(w);
    same_counts(w);
}

static struct world *world_open(uint64_t seed)
{
    struct world *w = calloc(1, sizeof *w);
    CHECK(w != NULL);
    w->rng.state = seed * 0x9e3779b97f4a7c15u + 1;
    w->config = config_random(&w->rng);
    w->outcomes = calloc(OPERATIONS + 2, sizeof *w->outcomes);
    w->reply = malloc(PG_MESSAGE_MAX);
    CHECK(w->outcomes != NULL && w->reply != NULL);
    arena_open(w);
    for (uint32_t i = 0; i < SESSIONS; i++)
        greet(w, i);
    return w;
}

static void world_close(struct world *w)
{
    arena_close(w);
    free(w->outcomes);
    free(w->reply);
    free(w);
}

static void test_random_steps(void)
{
    uint64_t satisfied = 0;
    for (uint64_t seed = 1; seed <= 150; seed++) {
        struct world *w = world_open(seed);
        for (int i = 0; i < 200; i++)
            step(w);
        satisfied += w->satisfied;
        world_close(w);
    }
    CHECK(satisfied > 1000);
}

/* ---- hostile bytes ------------------------------------------------------------------------- */

static void test_hostile_bytes(void)
{
    static uint8_t bytes[MESSAGE];
    struct command commands[COMMANDS];
    struct pg_fault why;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct world *w = world_open(seed);
        w->hostile = true;
        for (int i = 0; i < 300; i++) {
            const uint64_t before = w->sequences[0];
            for (uint32_t n = 0; n < COMMANDS; n++)
                commands[n] = command_random(&w->rng);
            uint64_t len = batch_write(w, 0, commands, COMMANDS, bytes);
            for (uint64_t n = rng_below(&w->rng, 3); n > 0; n--)
                bytes[rng_below(&w->rng, len)] = (uint8_t)(rng_next(&w->rng) >> 56);
            if (rng_below(&w->rng, 8) == 0)
                len = rng_below(&w->rng, len);
            send(w, bytes, len);
            w->sequences[0] = session_find(w->a, w->sessions[0])->last;
            CHECK(w->sequences[0] - before <= 1);
            whole(w);
        }
        CHECK(pg_rebuild(w->a, 0, &why));
        whole(w);
        world_close(w);
    }
}

int main(void)
{
    RUN(test_random_steps);
    RUN(test_hostile_bytes);
    return 0;
}

/* keyed_kind.c - the structure `keyed`: timers with keys and payloads, through the entry points
 * that the daemon calls. A batch is one BATCH message for pg_handle, and expired timers are read
 * with pg_notices. Settings are the daemon's defaults; the replay buffer is full. */
#include "timers.h"

#include "layout.h"
#include "api.h"

enum {
    BATCH = 1024, PAYLOAD = 48, TICK_NS = 65536, FANOUT = 256, REPLAY = 131072,
    MS_NS = 1000000, BUDGET = 4096, PARTS = 1024, OUT_BYTES = 1 << 22
};

/* Key of a timer: `serial` makes it unique, and `id` returns the timer's id in a notice. */
struct bench_key {
    uint64_t serial, id;
};

struct timers {
    struct pg_arena *a;
    uint64_t arena_bytes, private_bytes;
    void *arena, *private;
    uint8_t *message, *reply, *out;
    struct pg_part *parts;
    uint32_t *free_ids, free_count;
    uint64_t *serials;            /* per id: serial number of its key */
    uint64_t serial, session, sequence;
    int64_t now_ns;
};

static const uint8_t names[8] = {1, 1, 'n', 't'};

static struct pg_config config_of(uint32_t capacity)
{
    const uint64_t blobs = (uint64_t)(capacity + REPLAY) * 80 + (1 << 20);
    return (struct pg_config){
        .layout_id = 1, .payload_bytes = blobs, .replay_bytes_max = (uint64_t)REPLAY * 64 * 2,
        .tick_ns = TICK_NS, .stream_id = 1, .secret = {1, 2}, .capacity = capacity,
        .replay_capacity = REPLAY, .fanout = FANOUT, .namespaces = 64, .topics = 1024,
        .sessions = 16, .watches = 1024, .watermarks = 1024, .accounts = 16,
        .watermark_ttl_ns = 600000000000, .inbox_max = 1024, .page_size = 4096,
        .clock_kind = PG_CLOCK_BOOT, .shards = 1};
}

static void expect(bool true_or_stop)
{
    if (!true_or_stop)
        abort();
}

/* Begin work of the benchmark itself: its time does not count. */
static int64_t outside_begin(void) { return clock_ns(measured_clock); }
static void outside_end(int64_t begun_ns) { outside_ns += clock_ns(measured_clock) - begun_ns; }

static struct pg_frame *frame_begin(struct timers *t, uint16_t message, uint32_t count)
{
    struct pg_frame *f = (struct pg_frame *)(void *)t->message;
    *f = (struct pg_frame){.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION, .message = message,
                           .session = t->session, .sequence = t->sequence, .count = count};
    return f;
}

static void ask(struct timers *t, uint64_t bytes)
{
    uint64_t reply_bytes;
    int64_t wait_ns;
    while (pg_handle(t->a, t->message, bytes, 1000, 1, t->now_ns, t->now_ns, t->reply,
                     &reply_bytes, &wait_ns) == PG_H_AGAIN)
        ;
    expect(((struct pg_frame *)(void *)t->reply)->error == 0);
}

static uint8_t *batch_begin(struct timers *t, uint32_t count)
{
    t->sequence++;
    struct pg_frame *f = frame_begin(t, PG_M_BATCH, count);
    f->names = 1;
    f->names_bytes = sizeof names;
    memcpy(f + 1, names, sizeof names);
    return (uint8_t *)(f + 1) + sizeof names;
}

/* Move a deadline to the first part of its millisecond. The workloads expect that a timer has fired
 * at the end of the millisecond, but the wheel may fire it one tick after its deadline. */
static int64_t within_ms(int64_t deadline_ns)
{
    const int64_t begin_ns = (deadline_ns - 1) / MS_NS * MS_NS;
    return begin_ns + 1 + (deadline_ns - 1 - begin_ns) * (MS_NS - 2 * TICK_NS) / MS_NS;
}

/* Send a batch of records of one kind. `deadlines_ns` is NULL if the records have no deadline. */
static void batch(struct timers *t, struct pg_record record, const int64_t *deadlines_ns,
                  const uint32_t *ids, uint32_t count, unsigned status)
{
    const int64_t begun_ns = outside_begin();
    struct pg_record *records = (struct pg_record *)(void *)batch_begin(t, count);
    uint8_t *at = (uint8_t *)(records + count);
    record.key_type = PG_KEY_BYTES;
    record.key_len = sizeof(struct bench_key);
    for (uint32_t i = 0; i < count; i++) {
        const struct bench_key key = {t->serials[ids[i]], ids[i]};
        record.time_ns = deadlines_ns != NULL ? within_ms(deadlines_ns[i]) : 0;
        records[i] = record;
        memcpy(at, &key, sizeof key);
        memset(at + sizeof key, 'p', record.payload_len);
        at += sizeof key + record.payload_len;
    }
    outside_end(begun_ns);
    ask(t, (uint64_t)(at - t->message));
    const struct pg_result *results = (const struct pg_result *)(void *)(t->reply +
                                                                         sizeof(struct pg_frame));
    for (uint32_t i = 0; i < count; i++)
        expect((results[i].ticket & 0xff) == status);
}

static void add(struct timers *t, const int64_t *deadlines_ns, uint32_t *ids, uint32_t count)
{
    const int64_t begun_ns = outside_begin();
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = t->free_ids[--t->free_count];
        t->serials[ids[i]] = t->serial++;
    }
    outside_end(begun_ns);
    batch(t, (struct pg_record){.op = PG_OP_PUT, .payload_len = PAYLOAD}, deadlines_ns, ids, count,
          PG_ST_ADDED);
}

static void cancel(struct timers *t, const uint32_t *ids, uint32_t count)
{
    batch(t, (struct pg_record){.op = PG_OP_CANCEL}, NULL, ids, count, PG_ST_CANCELLED);
    const int64_t begun_ns = outside_begin();
    for (uint32_t i = 0; i < count; i++)
        t->free_ids[t->free_count++] = ids[i];
    outside_end(begun_ns);
}

static void replace(struct timers *t, const int64_t *deadlines_ns, const uint32_t *ids,
                    uint32_t count)
{
    batch(t, (struct pg_record){.op = PG_OP_PUT, .mode = PG_MODE_REPLACE, .payload_len = PAYLOAD},
          deadlines_ns, ids, count, PG_ST_REPLACED);
}

/* The deadlines must be later than the present deadlines. */
static void extend(struct timers *t, const int64_t *deadlines_ns, const uint32_t *ids,
                   uint32_t count)
{
    batch(t, (struct pg_record){.op = PG_OP_PUT, .mode = PG_MODE_EXTEND, .payload_len = PAYLOAD},
          deadlines_ns, ids, count, PG_ST_EXTENDED);
}

/* Free the ids of the timers in the message. */
static uint32_t fired_free(struct timers *t, const struct pg_part *part)
{
    const struct pg_notices *head = (const struct pg_notices *)(void *)(t->out + part->body);
    const struct pg_notice *notices = (const struct pg_notice *)(head + 1);
    const uint8_t *at = (const uint8_t *)(notices + head->count);
    for (uint32_t i = 0; i < head->count; i++) {
        struct bench_key key;
        memcpy(&key, at, sizeof key);
        t->free_ids[t->free_count++] = (uint32_t)key.id;
        at += sizeof key + notices[i].payload_len;
    }
    return head->count;
}

/* Read the notices, as the daemon does to send them. */
static uint64_t notices_take(struct timers *t)
{
    uint64_t fired = 0, upto;
    uint32_t messages;
    while ((messages = pg_notices(t->a, t->out, OUT_BYTES, t->parts, PARTS, &upto)) != 0) {
        pg_published(t->a, upto, t->now_ns, t->now_ns);
        const int64_t begun_ns = outside_begin();
        for (uint32_t i = 0; i < messages; i++)
            fired += fired_free(t, &t->parts[i]);
        outside_end(begun_ns);
    }
    return fired;
}

static uint64_t expire(struct timers *t, int64_t now_ns)
{
    uint64_t fired = 0;
    int more;
    t->now_ns = now_ns > t->now_ns ? now_ns : t->now_ns;
    do {
        pg_advance(t->a, t->now_ns, 0, t->now_ns, BUDGET, &more);
        fired += notices_take(t);
    } while (more);
    return fired;
}

static int64_t next_ns(const struct timers *t) { return pg_next_ns(t->a); }

static uint64_t bytes(const struct timers *t) { return t->arena_bytes + t->private_bytes; }

static void session_open(struct timers *t)
{
    struct pg_frame *f = frame_begin(t, PG_M_HELLO, 0);
    *(struct pg_hello *)(f + 1) = (struct pg_hello){.nonce = {1}};
    ask(t, sizeof *f + sizeof(struct pg_hello));
    t->session = ((struct pg_welcome *)(void *)(t->reply + sizeof *f))->session;
}

static void replay_buffer_fill(struct timers *t)
{
    int64_t deadlines_ns[BATCH];
    uint32_t ids[BATCH];
    for (int i = 0; i < BATCH; i++)
        deadlines_ns[i] = 1;
    for (uint32_t fired = 0; fired < REPLAY + BATCH; fired += BATCH) {
        add(t, deadlines_ns, ids, BATCH);
        expect(expire(t, TICK_NS) == BATCH);
    }
}

static struct timers *create(uint32_t capacity, int64_t tick_ns)
{
    (void)tick_ns;
    struct timers *t = memory(sizeof *t);
    const struct pg_config config = config_of(capacity);
    t->arena_bytes = pg_arena_bytes(&config);
    t->private_bytes = pg_private_bytes(&config);
    t->a = memory(pg_handle_bytes());
    t->arena = memory(t->arena_bytes);
    t->private = memory(t->private_bytes);
    t->message = memory(PG_MESSAGE_MAX);
    t->reply = memory(PG_MESSAGE_MAX);
    t->out = memory(OUT_BYTES);
    t->parts = memory(PARTS * sizeof *t->parts);
    t->serials = memory(capacity * sizeof *t->serials);
    t->free_ids = free_ids(t->free_count = capacity);
    expect(pg_create(t->a, t->arena, t->private, &config));
    session_open(t);
    replay_buffer_fill(t);
    return t;
}

static void destroy(struct timers *t)
{
    free(t->a);
    free(t->arena);
    free(t->private);
    free(t->message);
    free(t->reply);
    free(t->out);
    free(t->parts);
    free(t->serials);
    free(t->free_ids);
    free(t);
}

const struct kind keyed_kind = {"keyed", create,  destroy, add,     cancel,
                                expire,  next_ns, bytes,   replace, extend};

/*
 * arena.c - run a fixed load on a whole arena, without a daemon, and print a JSON object.
 *
 *   arena ROUNDS
 *
 * A round adds 65,536 timers in batches of 1024, due within a second. It then advances the wheel
 * every millisecond until all timers have fired, and publishes their notices. The result is the
 * processor time per timer in nanoseconds, from its batch to its notice, without building the
 * messages.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "core/core.h"

#define MS 1000000LL
enum { BATCHES = 64, KEY_BYTES = 8, NAMES_BYTES = 8, BUDGET = 4096, OUT_BYTES = 1 << 22,
       PARTS = 64 };

struct bench {
    struct pg_arena *a;
    uint8_t *message, *reply, *out;
    uint64_t session, sequence, key;
    int64_t now_ns;
};

static void expect(int true_or_stop, const char *subject)
{
    if (!true_or_stop) {
        fprintf(stderr, "bench: %s\n", subject);
        exit(1);
    }
}

static void *memory(uint64_t bytes)
{
    void *found = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    expect(found != NULL, "no memory");
    return memset(found, 0, bytes);
}

static int64_t processor_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void bench_open(struct bench *b)
{
    const struct pg_config config = {
        .layout_id = 1, .payload_bytes = 1 << 24, .replay_bytes_max = 1 << 23, .tick_ns = MS,
        .stream_id = 1, .secret = {1, 2}, .capacity = 1 << 17, .replay_capacity = 1 << 17,
        .fanout = 64, .namespaces = 4, .topics = 4, .sessions = 1, .watches = 8, .watermarks = 8,
        .inbox_max = 8, .clock_kind = PG_CLOCK_BOOT};
    *b = (struct bench){.a = memory(pg_handle_bytes()), .message = memory(PG_MESSAGE_MAX),
                        .reply = memory(PG_MESSAGE_MAX), .out = memory(OUT_BYTES)};
    expect(pg_create(b->a, memory(pg_arena_bytes(&config)), memory(pg_private_bytes(&config)),
                     &config), "no arena");
}

/* Handle a message; return the processor time that it took, in nanoseconds. */
static int64_t ask(struct bench *b, uint64_t bytes)
{
    uint64_t used;
    int64_t wait_ns;
    const int64_t begin_ns = processor_ns();
    const int done = pg_handle(b->a, b->message, bytes, 1000, 1, b->now_ns, b->now_ns, b->reply,
                               &used, &wait_ns);
    pg_served(b->a, b->now_ns + 1000);
    const int64_t end_ns = processor_ns();
    expect(done == PG_H_REPLY && ((struct pg_frame *)b->reply)->error == 0, "a refusal");
    return end_ns - begin_ns;
}

static struct pg_frame frame_of(enum pg_message message)
{
    return (struct pg_frame){.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                             .message = (uint16_t)message};
}

static void hello(struct bench *b)
{
    *(struct pg_frame *)b->message = frame_of(PG_M_HELLO);
    ask(b, sizeof(struct pg_frame) + sizeof(struct pg_hello));
    b->session = ((struct pg_frame *)b->reply)->session;
}

static int64_t batch(struct bench *b)
{
    static const uint8_t names[NAMES_BYTES] = {5, 1, 'b', 'e', 'n', 'c', 'h', 't'};
    struct pg_frame *f = (struct pg_frame *)b->message;
    struct pg_record *records = (struct pg_record *)(b->message + sizeof *f + NAMES_BYTES);
    uint8_t *key = (uint8_t *)(records + PG_BATCH_RECORDS);
    *f = frame_of(PG_M_BATCH);
    f->session = b->session;
    f->sequence = ++b->sequence;
    f->count = PG_BATCH_RECORDS;
    f->names = 1;
    f->names_bytes = NAMES_BYTES;
    memcpy(b->message + sizeof *f, names, NAMES_BYTES);
    for (uint32_t i = 0; i < PG_BATCH_RECORDS; i++, key += KEY_BYTES) {
        const uint64_t number = b->key++;
        const int64_t due_ns = (int64_t)(number * 0x9e3779b97f4a7c15u >> 32) % (1000 * MS);
        records[i] = (struct pg_record){.op = PG_OP_PUT, .key_type = PG_KEY_BYTES,
                                        .key_len = KEY_BYTES, .time_kind = PG_T_BOOT,
                                        .time_ns = b->now_ns + MS + due_ns};
        memcpy(key, &number, KEY_BYTES);
    }
    return ask(b, (uint64_t)(key - b->message));
}

static void hand_over(struct bench *b)
{
    struct pg_part parts[PARTS];
    uint64_t upto;
    while (pg_notices(b->a, b->out, OUT_BYTES, parts, PARTS, &upto) != 0)
        pg_published(b->a, upto, b->now_ns + 1000, b->now_ns + 2000);
}

static int64_t tick(struct bench *b)
{
    int more = 1;
    b->now_ns += MS;
    const int64_t begin_ns = processor_ns();
    while (more)
        pg_advance(b->a, b->now_ns, 0, b->now_ns, BUDGET, &more);
    hand_over(b);
    return processor_ns() - begin_ns;
}

static int64_t round_run(struct bench *b)
{
    int64_t spent_ns = 0;
    for (int i = 0; i < BATCHES; i++)
        spent_ns += batch(b);
    while (pg_next_ns(b->a) != INT64_MAX)
        spent_ns += tick(b);
    return spent_ns;
}

int main(int argc, char **argv)
{
    struct bench b;
    int64_t spent_ns = 0;
    expect(argc == 2, "usage: arena ROUNDS");
    const uint64_t rounds = strtoull(argv[1], NULL, 10);
    expect(rounds >= 1 && rounds <= 1000000, "ROUNDS is 1 to 1000000");
    bench_open(&b);
    hello(&b);
    round_run(&b);                /* a first round, which is not measured, touches all memory */
    for (uint64_t i = 0; i < rounds; i++)
        spent_ns += round_run(&b);
    const double timers = (double)rounds * BATCHES * PG_BATCH_RECORDS;
    expect(pg_metrics_of(b.a)->expiries == (rounds + 1) * BATCHES * PG_BATCH_RECORDS,
           "a timer was lost or fired twice");
    printf("{\"ns_per_timer\": %.3f}\n", (double)spent_ns / timers);
    return 0;
}

/* Test bulk load rows against a model of the finished rows, and with hostile bytes. Every message
 * is in an allocation of exactly its size, so the sanitizers report reads beyond it. */
#include "check.h"
#include "core/core.h"

enum { IDS = 4, BULK_LOADS = 3, BLOCKS = 4, FIRSTS = 5, RECORDS = 6, LAYOUT = 4711,
      SECOND = 1000000000,
       MESSAGE = 4096, DONE_MAX = 256 };

static const uint64_t firsts[FIRSTS] = {0, 7, PG_BULK_LOAD_BLOCK_ROWS - 3,
                                        9 * PG_BULK_LOAD_BLOCK_ROWS,
                                        PG_BULK_LOAD_ROW_MAX - RECORDS};

struct done {
    uint32_t id;
    uint64_t row;
};

struct world {
    struct rng rng;
    struct pg_config config;
    struct pg_arena *a;
    void *arena, *secret;
    uint8_t *reply;
    uint64_t session, sequence;
    int64_t now_ns;
    struct done done[DONE_MAX];
    uint32_t done_count;
    _Alignas(8) uint8_t message[MESSAGE];
    uint32_t bytes;
};

/* ---- set-up ------------------------------------------------------------------------------ */

static void append(struct world *w, const void *bytes, uint64_t len)
{
    CHECK(w->bytes + len <= sizeof w->message);
    memcpy(w->message + w->bytes, bytes, len);
    w->bytes += (uint32_t)len;
}

static void frame_begin(struct world *w, unsigned message, uint64_t sequence)
{
    const struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                               .message = (uint16_t)message, .session = w->session,
                               .sequence = sequence};
    w->bytes = 0;
    append(w, &f, sizeof f);
}

static struct pg_frame *head(struct world *w) { return (struct pg_frame *)w->message; }

/* Handle the message; return the size of the reply in bytes. */
static uint64_t handle(struct world *w)
{
    uint8_t *exact = malloc(w->bytes);
    uint64_t used = 0;
    int64_t wait_ns;
    CHECK(exact != NULL);
    memcpy(exact, w->message, w->bytes);
    pg_handle(w->a, exact, w->bytes, 7, 1, w->now_ns, w->now_ns, w->reply, &used, &wait_ns);
    free(exact);
    return used;
}

static void hello(struct world *w)
{
    const struct pg_hello body = {.nonce = {1}};
    frame_begin(w, PG_M_HELLO, 0);
    append(w, &body, sizeof body);
    CHECK_EQUAL(handle(w), sizeof(struct pg_frame) + sizeof(struct pg_welcome));
    const struct pg_welcome *welcome = (const void *)(w->reply + sizeof(struct pg_frame));
    w->session = welcome->session;
    w->sequence = welcome->last;
}

static void open_world(struct world *w, uint64_t seed)
{
    *w = (struct world){.rng = {seed * 2 + 1}, .now_ns = SECOND};
    w->config = (struct pg_config){
        .layout_id = LAYOUT, .payload_bytes = 65536, .replay_bytes_max = 16384, .tick_ns = 1000000,
        .stream_id = 1, .secret = {seed, 2}, .capacity = 300, .replay_capacity = 512, .fanout = 8,
        .namespaces = 2, .topics = 2, .sessions = 2, .watches = 1, .watermarks = 1,
        .watermark_ttl_ns = SECOND, .inbox_max = 1, .bulk_loads = BULK_LOADS,
        .bulk_load_blocks = BLOCKS, .clock_kind = PG_CLOCK_VIRTUAL, .now_ns = SECOND,
        .wal_buffer_bytes = seed % 2 ? PG_WAL_BUFFER_MIN : 0};
    w->arena = zeroed(pg_arena_bytes(&w->config));
    w->secret = zeroed(pg_private_bytes(&w->config));
    w->a = malloc(pg_handle_bytes());
    w->reply = malloc(PG_MESSAGE_MAX);
    CHECK(w->a != NULL && w->reply != NULL);
    CHECK(pg_create(w->a, w->arena, w->secret, &w->config));
    hello(w);
}

static void close_world(struct world *w)
{
    free(w->arena);
    free(w->secret);
    free(w->a);
    free(w->reply);
}

/* ---- messages ------------------------------------------------------------------------------ */

static void batch_begin(struct world *w, uint32_t id, uint64_t first, uint32_t records)
{
    static const uint8_t names[8] = "\1\1nt";
    struct pg_rows rows = {.first_row = first};
    memset(rows.bulk_load, (int)id, sizeof rows.bulk_load);
    frame_begin(w, PG_M_BATCH, w->sequence + 1);
    head(w)->flags = PG_W_BULK_LOAD;
    head(w)->count = records;
    head(w)->names = 1;
    head(w)->names_bytes = sizeof names;
    append(w, &rows, sizeof rows);
    append(w, names, sizeof names);
}

/* Make a batch whose keys are unique per row, so that only the bulk load can refuse a row. */
static void batch_make(struct world *w, uint32_t id, uint64_t first, uint32_t records)
{
    batch_begin(w, id, first, records);
    for (uint32_t i = 0; i < records; i++) {
        const struct pg_record r = {.op = PG_OP_PUT, .key_type = PG_KEY_BYTES, .key_len = 12,
                                    .mode = PG_MODE_KEEP, .time_ns = w->now_ns + SECOND};
        append(w, &r, sizeof r);
    }
    for (uint32_t i = 0; i < records; i++) {
        const uint64_t row = first + i;
        append(w, &id, sizeof id);
        append(w, &row, sizeof row);
    }
}

static void ask_make(struct world *w, uint32_t id, uint32_t action)
{
    const bool named = action == PG_LA_OPEN || action == PG_LA_CLOSE;
    struct pg_bulk_load_ask ask = {.action = action, .name_len = named};
    memset(ask.bulk_load, (int)id, sizeof ask.bulk_load);
    frame_begin(w, PG_M_BULK_LOAD, 5);
    append(w, &ask, sizeof ask);
    append(w, "n", named);
}

/* ---- the model ------------------------------------------------------------------------------- */

static bool is_done(const struct world *w, uint32_t id, uint64_t row)
{
    for (uint32_t i = 0; i < w->done_count; i++)
        if (w->done[i].id == id && w->done[i].row == row)
            return true;
    return false;
}

static void forget(struct world *w, uint32_t id)
{
    uint32_t retained = 0;
    for (uint32_t i = 0; i < w->done_count; i++)
        if (w->done[i].id != id)
            w->done[retained++] = w->done[i];
    w->done_count = retained;
}

static void answer_check(struct world *w, uint32_t id, uint64_t row, unsigned status)
{
    if (status == PG_ST_FULL_BULK_LOADS || status == PG_ST_FULL)
        return;
    CHECK_EQUAL(status == PG_ST_BULK_LOADED, is_done(w, id, row));
    if (status == PG_ST_BULK_LOADED)
        return;
    CHECK(status == PG_ST_ADDED || status == PG_ST_KEPT);   /* KEPT: the row's timer is left from a
                                                               bulk load that was removed */
    CHECK(w->done_count < DONE_MAX);
    w->done[w->done_count++] = (struct done){id, row};
}

static void rows_step(struct world *w)
{
    const uint32_t id = 1 + (uint32_t)rng_below(&w->rng, IDS);
    const uint32_t records = 1 + (uint32_t)rng_below(&w->rng, RECORDS);
    const uint64_t first = firsts[rng_below(&w->rng, FIRSTS)];
    batch_make(w, id, first, records);
    CHECK_EQUAL(handle(w), sizeof(struct pg_frame) + records * sizeof(struct pg_result));
    w->sequence++;
    const struct pg_result *r = (const void *)(w->reply + sizeof(struct pg_frame));
    for (uint32_t i = 0; i < records; i++)
        answer_check(w, id, first + i, r[i].ticket & 0xff);
}

static void ask_step(struct world *w)
{
    const uint32_t id = 1 + (uint32_t)rng_below(&w->rng, IDS);
    const bool forgets = rng_below(&w->rng, 4) == 0;
    ask_make(w, id, forgets ? PG_LA_FORGET : PG_LA_STATUS);
    const uint64_t used = handle(w);
    const struct pg_bulk_load_info *info = (const void *)(w->reply + sizeof(struct pg_frame));
    if (forgets)
        forget(w, id);
    uint64_t rows = 0;
    for (uint32_t i = 0; i < w->done_count; i++)
        rows += w->done[i].id == id;
    CHECK_EQUAL(info->rows, rows);
    if (rows != 0)
        CHECK(memcmp(info->bulk_load, ((const struct pg_bulk_load_ask *)(head(w) + 1))->bulk_load,
                     sizeof info->bulk_load) == 0);
    const uint32_t parts = ((const struct pg_frame *)w->reply)->count;
    CHECK_EQUAL(used, sizeof(struct pg_frame) + sizeof *info +
                parts * sizeof(struct pg_bulk_load_part));
}

/* ---- restarts and hostile bytes ------------------------------------------------------------ */

static void restart(struct world *w)
{
    struct pg_fault why;
    CHECK(pg_attach(w->a, w->arena, pg_arena_bytes(&w->config), w->secret,
                    pg_private_bytes(&w->config), LAYOUT, &why));
    CHECK(pg_rebuild(w->a, w->now_ns, &why));
}

static void pass_time(struct world *w)
{
    int more = 1;
    w->now_ns += (int64_t)rng_below(&w->rng, SECOND);
    while (more) {
        pg_advance(w->a, w->now_ns, 0, w->now_ns, 64, &more);
        pg_published(w->a, w->a->header->replay_tail, 0, 0);
    }
}

static void commit(struct world *w)
{
    struct pg_wal_buffer *s = pg_wal_buffer_of(w->a);
    if (s != NULL)
        s->committed = s->tail;
}

static void whole(struct world *w)
{
    struct pg_fault fault;
    CHECK(pg_check(w->a, &fault));
    CHECK(pg_check_live(w->a, &fault));
}

static void against_a_table(void)
{
    static struct world w;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        open_world(&w, seed);
        for (uint32_t step = 0; step < 400; step++) {
            switch (rng_below(&w.rng, 8)) {
            case 0: pass_time(&w); break;
            case 1: ask_step(&w); break;
            case 2: restart(&w); break;
            default: rows_step(&w); break;
            }
            commit(&w);
            whole(&w);
        }
        close_world(&w);
    }
}

static const struct pg_result *batch_done(struct world *w, uint32_t id, uint32_t records)
{
    batch_make(w, id, 0, records);
    CHECK_EQUAL(handle(w), sizeof(struct pg_frame) + records * sizeof(struct pg_result));
    w->sequence++;
    return (const void *)(w->reply + sizeof(struct pg_frame));
}

static void a_row_that_comes_again_names_its_timer(void)
{
    static struct world w;
    struct pg_result first[2];
    open_world(&w, 2);
    memcpy(first, batch_done(&w, 1, 2), sizeof first);
    const struct pg_result *again = batch_done(&w, 1, 2);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQUAL(first[i].ticket & 0xff, PG_ST_ADDED);
        CHECK_EQUAL(again[i].ticket, (first[i].ticket & ~0xffull) | PG_ST_BULK_LOADED);
        CHECK_EQUAL(again[i].deadline_ns, first[i].deadline_ns);
    }
    close_world(&w);
}

static void a_bulk_load_that_is_closed_takes_no_more_rows(void)
{
    static struct world w;
    open_world(&w, 2);
    CHECK_EQUAL(batch_done(&w, 1, 1)[0].ticket & 0xff, PG_ST_ADDED);
    ask_make(&w, 1, PG_LA_CLOSE);
    handle(&w);
    const struct pg_bulk_load_info *info = (const void *)(w.reply + sizeof(struct pg_frame));
    CHECK_EQUAL(info->state, PG_BULK_LOAD_CLOSED);
    CHECK_EQUAL(batch_done(&w, 1, 2)[1].ticket & 0xff, PG_ST_CLOSED);
    whole(&w);
    close_world(&w);
}

static void spoil(struct world *w)
{
    if (rng_below(&w->rng, 3) == 0)
        w->bytes = (uint32_t)rng_below(&w->rng, w->bytes + 1);
    for (uint64_t n = rng_below(&w->rng, 4); n > 0 && w->bytes != 0; n--)
        w->message[rng_below(&w->rng, w->bytes)] = (uint8_t)rng_next(&w->rng);
}

/* Damaged messages leave the arena sound, and every reply begins with a frame. */
static void hostile_bytes(void)
{
    static struct world w;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        open_world(&w, seed);
        for (uint32_t step = 0; step < 1500; step++) {
            const uint32_t id = 1 + (uint32_t)rng_below(&w.rng, IDS);
            if (rng_below(&w.rng, 2))
                batch_make(&w, id, firsts[rng_below(&w.rng, FIRSTS)], 3);
            else
                ask_make(&w, id, (uint32_t)rng_below(&w.rng, PG_BULK_LOAD_ACTIONS));
            spoil(&w);
            const uint64_t used = handle(&w);
            CHECK(used == 0 || used >= sizeof(struct pg_frame));
            commit(&w);
            if (step % 16 == 0) {
                hello(&w);        /* a damaged batch may have used the next sequence number or ended
                                     the session */
                pass_time(&w);
                restart(&w);
                whole(&w);
            }
        }
        close_world(&w);
    }
}

static void what_an_administrator_sends_is_hostile_too(void)
{
    static struct world w;
    uint64_t used, detail[2];
    open_world(&w, 3);
    rows_step(&w);
    for (uint32_t step = 0; step < 3000; step++) {
        ask_make(&w, 1 + (uint32_t)rng_below(&w.rng, IDS),
                 (uint32_t)rng_below(&w.rng, PG_BULK_LOAD_ACTIONS));
        spoil(&w);
        const uint32_t skip = w.bytes < sizeof(struct pg_frame) ? w.bytes : sizeof(struct pg_frame);
        uint8_t *exact = malloc(w.bytes - skip + 1);
        CHECK(exact != NULL);
        memcpy(exact + 1, w.message + skip, w.bytes - skip);
        pg_bulk_load_admin(w.a, exact + 1, w.bytes - skip, w.reply, &used, detail);
        free(exact);
    }
    whole(&w);
    close_world(&w);
}

int main(void)
{
    RUN(against_a_table);
    RUN(a_row_that_comes_again_names_its_timer);
    RUN(a_bulk_load_that_is_closed_takes_no_more_rows);
    RUN(hostile_bytes);
    RUN(what_an_administrator_sends_is_hostile_too);
    return 0;
}

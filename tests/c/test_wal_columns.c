/* Convert WAL records into columns whose memory has exactly the size that api.h demands for struct
 * pg_columns. The records have every type and random fields, with and without timestamps, and some
 * are malformed. */
#include "check.h"
#include "core/core.h"

enum { RECORDS = 300, BYTES = 1 << 20, ROUNDS = 200 };

static _Alignas(8) uint8_t file[BYTES];

/* ---- making records ----------------------------------------------------------------------- */

static void fill(struct rng *r, void *at, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        ((uint8_t *)at)[i] = (uint8_t)rng_next(r);
}

/* Set the length fields in a record's body; return the number of bytes that follow the body. */
static uint64_t lengths_set(struct rng *r, unsigned type, void *body)
{
    const uint8_t key_len = (uint8_t)rng_next(r);
    const uint32_t len = (uint32_t)rng_below(r, 400), keys = (uint32_t)rng_below(r, 9);
    const uint32_t items = 16 * (uint32_t)rng_below(r, 4), jobs = (uint32_t)rng_below(r, 3);
    switch (type) {
    case PG_WAL_NAMESPACE: return ((struct pg_wal_namespace *)body)->name_len = len;
    case PG_WAL_TOPIC: return ((struct pg_wal_topic *)body)->name_len = len;
    case PG_WAL_OPENED: return ((struct pg_wal_opened *)body)->name_len = len;
    case PG_WAL_OUTCOME:
        ((struct pg_wal_outcome *)body)->keys = (uint16_t)len;
        return wal_outcome_extra(len, ((struct pg_wal_outcome *)body)->jobs = jobs);
    case PG_WAL_FIRE:
        return (((struct pg_wal_fire *)body)->jobs = jobs) * sizeof(struct pg_wal_born);
    case PG_WAL_MOVE: return wal_row_bytes(((struct pg_wal_move *)body)->in_bulk_load = keys & 1);
    case PG_WAL_ARM:
        ((struct pg_wal_arm *)body)->key_len = key_len;
        ((struct pg_wal_arm *)body)->in_bulk_load = keys & 1;
        ((struct pg_wal_arm *)body)->payload_len = len;
        ((struct pg_wal_arm *)body)->replaced &= keys & 2;
        ((struct pg_wal_arm *)body)->ext_len = items;
        return wal_row_bytes(keys & 1) + items + len + key_len;
    case PG_WAL_UNPARK:
        ((struct pg_wal_unpark *)body)->key_len = key_len;
        ((struct pg_wal_unpark *)body)->in_bulk_load = keys & 1;
        ((struct pg_wal_unpark *)body)->payload_len = len;
        ((struct pg_wal_unpark *)body)->ext_len = items;
        return wal_row_bytes(keys & 1) + items + len + key_len;
    case PG_WAL_ENTRY:
        ((struct pg_wal_entry *)body)->key_len = key_len;
        ((struct pg_wal_entry *)body)->payload_len = len;
        ((struct pg_wal_entry *)body)->jobs = jobs;
        return jobs * sizeof(struct pg_wal_born) + len + key_len;
    case PG_WAL_WATCH:
        ((struct pg_wal_watch *)body)->key_len = key_len;
        ((struct pg_wal_watch *)body)->keys = (uint16_t)keys;
        return wal_watch_extra(keys, (((struct pg_wal_watch *)body)->payload_len = len) + key_len);
    case PG_WAL_WATERMARK:
        ((struct pg_wal_watermark *)body)->flags |= PG_WM_BORN;
        return ((struct pg_wal_watermark *)body)->key_len = key_len;
    case PG_WAL_CONSUMER_GROUP:
        ((struct pg_wal_consumer_group *)body)->topics = keys;
        return 4 * keys + (((struct pg_wal_consumer_group *)body)->name_len = key_len);
    case PG_WAL_JOB:
        ((struct pg_wal_job *)body)->error_len = items;
        ((struct pg_wal_job *)body)->key_len = key_len;
        return items + key_len + (((struct pg_wal_job *)body)->payload_len = len);
    default: return 0;
    }
}

/* Write a record of a known type. One record in eight gets a random length, and one in
 * eight a random type. */
static uint64_t record_write(struct rng *r, uint8_t *at, uint64_t lsn)
{
    struct pg_frame_head *f = (struct pg_frame_head *)at;
    const unsigned type = PG_WAL_SEAL + 1 + (unsigned)rng_below(r, PG_WAL_TYPES - PG_WAL_SEAL - 1);
    fill(r, at, 2048);
    *f = (struct pg_frame_head){.lsn = lsn, .type = (uint16_t)type};
    f->bytes = (uint32_t)frame_bytes(type, lengths_set(r, type, f + 1));
    if (rng_below(r, 4) == 0)
        f->bytes += (uint32_t)(rng_below(r, 3) * sizeof(struct pg_timestamps) +
                               rng_below(r, 2) * sizeof(struct pg_asked));
    if (rng_below(r, 8) == 0)
        f->bytes = (uint32_t)(sizeof *f + 8 * rng_below(r, 100));
    if (rng_below(r, 8) == 0)
        f->type = (uint16_t)(PG_WAL_SEAL + 1 + rng_below(r, PG_WAL_TYPES - PG_WAL_SEAL - 1));
    return f->bytes;
}

static uint64_t segment_write(struct rng *r)
{
    struct pg_wal_segment header = {.magic = PG_WAL_SEGMENT_MAGIC, .first_lsn = 1, .first_group = 1,
                                    .salt = 7, .clock_kind = (uint32_t)rng_below(r, 2)};
    struct pg_wal_group group = {.number = 1, .boot_ns = (int64_t)rng_next(r),
                                 .wall_ns = (int64_t)rng_next(r)};
    uint64_t end = PG_WAL_SEGMENT_HEAD + PG_GROUP_HEAD;
    memset(file, 0, sizeof file);
    pg_wal_segment_begin(file, &header);
    for (uint64_t lsn = 1; lsn <= RECORDS; lsn++)
        end += record_write(r, file + end, lsn);
    pg_group_seal(file + PG_WAL_SEGMENT_HEAD, end - PG_WAL_SEGMENT_HEAD, 7, &group);
    pg_wal_segment_end((struct pg_frame_head *)(file + end), 7, 1, RECORDS);
    return end + sizeof(struct pg_frame_head);
}

/* ---- columns in exactly the promised memory ----------------------------------------------- */

static void *take(uint64_t bytes)
{
    void *memory = calloc(1, bytes);
    CHECK(memory != NULL);
    return memory;
}

static struct pg_columns *columns_make(uint32_t capacity, uint32_t bytes_max)
{
    struct pg_columns *c = take(sizeof *c);
    const uint64_t bits = capacity / 8 + 1, keys = bytes_max / sizeof(struct pg_wal_watch_key);
    struct pg_watch_lists *w = &c->watch;
    *c = (struct pg_columns){.capacity = capacity, .bytes_max = bytes_max, .payloads = 1};
    for (unsigned n = 0; n < PG_LONG_COLUMNS; n++)
        c->longs[n] = (struct pg_longs){take(8ull * capacity), take(bits), 0};
    for (unsigned n = 0; n < PG_INT_COLUMNS; n++)
        c->ints[n] = (struct pg_ints){take(4ull * capacity), take(bits), 0};
    for (unsigned n = 0; n < PG_BYTES_COLUMNS; n++)
        c->bytes[n] = (struct pg_bytes){take(4ull * capacity + 4), take(bytes_max), take(bits), 0, 0};
    *w = (struct pg_watch_lists){take(4ull * capacity + 4), take(4 * keys), take(4 * keys),
                                 take(8 * keys), take(8 * keys), take(8 * keys), take(bits), 0, 0};
    return c;
}

static void columns_free(struct pg_columns *c)
{
    struct pg_watch_lists *w = &c->watch;
    void *lists[] = {w->offsets, w->row, w->flags, w->target, w->base, w->cap, w->valid};
    for (unsigned n = 0; n < PG_LONG_COLUMNS; n++) {
        free(c->longs[n].values);
        free(c->longs[n].valid);
    }
    for (unsigned n = 0; n < PG_INT_COLUMNS; n++) {
        free(c->ints[n].values);
        free(c->ints[n].valid);
    }
    for (unsigned n = 0; n < PG_BYTES_COLUMNS; n++) {
        free(c->bytes[n].offsets);
        free(c->bytes[n].bytes);
        free(c->bytes[n].valid);
    }
    for (unsigned n = 0; n < sizeof lists / sizeof *lists; n++)
        free(lists[n]);
    free(c);
}

/* ---- content of the columns ---------------------------------------------------------------- */

static uint32_t bits_set(const uint8_t *valid, uint32_t rows)
{
    uint32_t count = 0;
    for (uint32_t row = 0; row < rows; row++)
        count += valid[row / 8] >> row % 8 & 1;
    return count;
}

static void columns_check(const struct pg_columns *c, uint64_t first_lsn)
{
    for (unsigned n = 0; n < PG_LONG_COLUMNS; n++)
        CHECK_EQUAL(c->longs[n].count, bits_set(c->longs[n].valid, c->rows));
    for (unsigned n = 0; n < PG_INT_COLUMNS; n++)
        CHECK_EQUAL(c->ints[n].count, bits_set(c->ints[n].valid, c->rows));
    for (unsigned n = 0; n < PG_BYTES_COLUMNS; n++) {
        CHECK_EQUAL(c->bytes[n].count, bits_set(c->bytes[n].valid, c->rows));
        CHECK_EQUAL(c->bytes[n].offsets[c->rows], c->bytes[n].used);
        for (uint32_t row = 0; row < c->rows; row++)
            CHECK(c->bytes[n].offsets[row] <= c->bytes[n].offsets[row + 1]);
    }
    for (uint32_t row = 0; row < c->rows; row++)
        CHECK_EQUAL(c->longs[PG_LC_LSN].values[row], first_lsn + row);
}

static void test_any_records(void)
{
    static struct pg_births births;
    struct rng r = {9};
    uint64_t known = 0;

    for (unsigned round = 0; round < ROUNDS; round++) {
        const uint64_t size = segment_write(&r);
        struct pg_walk w = {0};
        struct pg_fault why;
        uint64_t rows = 0;
        int more = 1;
        memset(&births, 0xff, sizeof births);
        CHECK(pg_walk_segment(&w, file, size, &why));
        while (more) {
            struct pg_columns *c = columns_make(1 + (uint32_t)rng_below(&r, 200),
                                                PG_WAL_FRAME_MAX + (uint32_t)rng_below(&r, 4096));
            more = pg_columns_fill(c, &births, &w);
            columns_check(c, rows + 1);
            rows += c->rows;
            known += c->rows - c->kinds[0];
            columns_free(c);
        }
        CHECK_EQUAL(rows, RECORDS);
        CHECK_EQUAL(w.state, PG_WALK_SEALED);
    }
    CHECK(known > ROUNDS * RECORDS / 2);
}

int main(void)
{
    RUN(test_any_records);
    return 0;
}

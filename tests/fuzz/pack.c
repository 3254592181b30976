/* pack.c - fuzz target: names and records of any size go into batches of a client. The body must
 * contain them in order, and the limits of a batch must hold. */

#include "fuzz.h"

#include "../../clients/pack/batch.h"

enum { TEXT_MAX = 300 };

static uint8_t letters[TEXT_MAX];

static struct pack_text text(struct input *in, uint64_t limit)
{
    return (struct pack_text){letters, take_short(in) % limit};
}

/* Add an entry and a record that names it. Return the bytes of the record's key and payload. */
static uint64_t add(struct pack_batch *b, struct input *in)
{
    uint8_t entry[4] = {1, 1, 'n', take_byte(in)};
    const struct pack_text name = {entry, sizeof entry};
    const bool space = pack_has_space(b, name);
    const int index = pack_name(b, name);
    if (space != (index >= 0) || pack_name(b, name) != index)
        abort();
    if (index < 0 || memcmp(b->names.at + b->names_at[index], entry, sizeof entry) != 0)
        abort();                  /* 256 entries at most are possible here */
    const struct pg_record head = {.op = PG_OP_PUT, .name = (uint16_t)index};
    const struct pack_text key = text(in, PG_KEY_MAX + 1), payload = text(in, TEXT_MAX);
    if (!pack_record(b, head, key, payload, text(in, 1)))
        abort();
    return key.bytes + payload.bytes;
}

static void check(const struct pack_batch *b, uint64_t area)
{
    const uint64_t bytes = pack_body_bytes(b), names = pack_names_bytes(b);
    uint8_t *body = malloc(bytes + 1);
    struct pg_record record;
    if (body == NULL || b->names_count > PG_BATCH_NAMES || names % 8 != 0)
        abort();
    pack_write(b, body);
    for (uint32_t i = 0; i < b->count; i++) {
        memcpy(&record, body + names + i * sizeof record, sizeof record);
        if (record.name >= b->names_count)
            abort();
        area -= record.key_len + record.payload_len;
    }
    if (area != 0 || (b->count != 0 && memcmp(body, "\1\1n", 3) != 0))
        abort();
    free(body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    struct pack_batch b = {0};
    uint64_t area = 0;
    memset(letters, 'x', sizeof letters);
    while (in.at != in.end && pack_takes(&b, 1 << 16))
        area += add(&b, &in);
    check(&b, area);
    pack_free(&b);
    return 0;
}

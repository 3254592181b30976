/* batch.c - the body of a batch under construction. */

#include "batch.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_BYTES = 4096 };

/* ---- memory ----------------------------------------------------------------------------- */

static bool reserve(struct pack_bytes *m, uint64_t bytes)
{
    if (m->size - m->used >= bytes)
        return true;
    uint64_t size = m->size < FIRST_BYTES ? FIRST_BYTES : 2 * m->size;
    while (size - m->used < bytes)
        size *= 2;
    uint8_t *at = realloc(m->at, size);
    if (at == NULL)
        return false;
    m->at = at;
    m->size = size;
    return true;
}

/* Append to memory that reserve() has provided. */
static void append(struct pack_bytes *m, const void *from, uint64_t bytes)
{
    if (bytes == 0)
        return;
    memcpy(m->at + m->used, from, bytes);
    m->used += bytes;
}

void pack_free(struct pack_batch *b)
{
    free(b->names.at);
    free(b->records.at);
    free(b->area.at);
    memset(b, 0, sizeof *b);
}

/* ---- the name table --------------------------------------------------------------------- */

/* FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/ */
static uint32_t hash(struct pack_text entry)
{
    uint32_t h = 2166136261u;
    for (uint64_t i = 0; i < entry.bytes; i++)
        h = (h ^ entry.at[i]) * 16777619u;
    return h;
}

static bool is_entry(const struct pack_batch *b, uint32_t index, struct pack_text entry)
{
    const uint32_t at = b->names_at[index];
    const uint64_t end = index + 1 < b->names_count ? b->names_at[index + 1] : b->names.used;
    return end - at == entry.bytes && memcmp(b->names.at + at, entry.at, entry.bytes) == 0;
}

/* Return the slot that has the entry, or the free slot where it belongs. Half of the slots at least
 * are free, so the search ends. */
static uint32_t slot_of(const struct pack_batch *b, struct pack_text entry)
{
    uint32_t slot = hash(entry) % PACK_SLOTS;
    while (b->slots[slot] != 0 && !is_entry(b, b->slots[slot] - 1u, entry))
        slot = (slot + 1) % PACK_SLOTS;
    return slot;
}

bool pack_has_space(const struct pack_batch *b, struct pack_text entry)
{
    return b->names_count < PG_BATCH_NAMES || b->slots[slot_of(b, entry)] != 0;
}

int pack_name(struct pack_batch *b, struct pack_text entry)
{
    const uint32_t slot = slot_of(b, entry);
    if (b->slots[slot] != 0)
        return b->slots[slot] - 1;
    if (b->names_count == PG_BATCH_NAMES)
        return PACK_NO_NAME;
    if (!reserve(&b->names, entry.bytes))
        return PACK_NO_MEMORY;
    b->names_at[b->names_count] = (uint32_t)b->names.used;
    append(&b->names, entry.at, entry.bytes);
    b->slots[slot] = (uint16_t)++b->names_count;
    return (int)b->names_count - 1;
}

/* ---- records ---------------------------------------------------------------------------- */

bool pack_takes(const struct pack_batch *b, uint64_t bytes)
{
    return b->count < PG_BATCH_RECORDS && b->records.used + b->area.used <= bytes;
}

static void lengths_set(struct pg_record *head, struct pack_text key, struct pack_text payload,
                        struct pack_text extension)
{
    head->key_len = (uint8_t)key.bytes;
    head->payload_len = (uint32_t)payload.bytes;
    head->ext_len = (uint32_t)extension.bytes;
}

bool pack_record(struct pack_batch *b, struct pg_record head, struct pack_text key,
                 struct pack_text payload, struct pack_text extension)
{
    lengths_set(&head, key, payload, extension);
    if (!reserve(&b->records, sizeof head) ||
        !reserve(&b->area, key.bytes + payload.bytes + extension.bytes))
        return false;
    append(&b->records, &head, sizeof head);
    append(&b->area, key.at, key.bytes);
    append(&b->area, payload.at, payload.bytes);
    append(&b->area, extension.at, extension.bytes);
    b->count++;
    return true;
}

/* ---- the body --------------------------------------------------------------------------- */

static uint64_t padded_names(uint64_t bytes) { return (bytes + 7) / 8 * 8; }

uint64_t pack_names_bytes(const struct pack_batch *b) { return padded_names(b->names.used); }

uint64_t pack_body_bytes(const struct pack_batch *b)
{
    return pack_names_bytes(b) + b->records.used + b->area.used;
}

static uint8_t *written(uint8_t *out, const struct pack_bytes *m)
{
    if (m->used != 0)
        memcpy(out, m->at, m->used);
    return out + m->used;
}

void pack_write(const struct pack_batch *b, uint8_t *out)
{
    const uint64_t padding = pack_names_bytes(b) - b->names.used;
    out = written(out, &b->names);
    memset(out, 0, padding);
    out = written(out + padding, &b->records);
    written(out, &b->area);
}

/* ---- a message with one record ---------------------------------------------------------- */

uint64_t pack_single_bytes(const struct pack_single *s)
{
    return sizeof(struct pg_frame) + padded_names(s->entry.bytes) + sizeof s->record +
           s->key.bytes + s->payload.bytes + s->extension.bytes;
}

static uint8_t *text_written(uint8_t *out, struct pack_text text)
{
    if (text.bytes != 0)
        memcpy(out, text.at, text.bytes);
    return out + text.bytes;
}

void pack_single_write(const struct pack_single *s, struct pg_frame frame, uint8_t *out)
{
    struct pg_record record = s->record;
    const uint64_t names_bytes = padded_names(s->entry.bytes);
    lengths_set(&record, s->key, s->payload, s->extension);
    frame.count = frame.names = 1;
    frame.names_bytes = (uint32_t)names_bytes;
    memcpy(out, &frame, sizeof frame);
    out += sizeof frame;
    memset(text_written(out, s->entry), 0, names_bytes - s->entry.bytes);
    memcpy(out + names_bytes, &record, sizeof record);
    out = text_written(out + names_bytes + sizeof record, s->key);
    text_written(text_written(out, s->payload), s->extension);
}

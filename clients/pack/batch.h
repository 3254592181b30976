/* batch.h - the body of a batch under construction: name table, records, byte area.
 *
 * This part knows neither Python nor sockets nor clocks. The caller checks the limits of keys and
 * payloads; the functions here keep the limits of a batch. */
#ifndef PURGATORYD_PACK_BATCH_H
#define PURGATORYD_PACK_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#ifndef PG_WIRE_MAGIC             /* layout.h has no include guard */
#include "layout.h"
#endif

enum { PACK_SLOTS = 2 * PG_BATCH_NAMES, PACK_NO_NAME = -1, PACK_NO_MEMORY = -2 };

struct pack_bytes {               /* memory that grows */
    uint8_t *at;
    uint64_t used, size;          /* bytes */
};

struct pack_batch {               /* all zero = empty */
    struct pack_bytes names;      /* entries of the name table, without padding */
    struct pack_bytes records;    /* struct pg_record of each record */
    struct pack_bytes area;       /* key, payload and extension of each record */
    uint32_t count;               /* number of records */
    uint32_t names_count;         /* number of entries of the name table */
    uint32_t names_at[PG_BATCH_NAMES]; /* offset of each entry in `names` */
    uint16_t slots[PACK_SLOTS];   /* hash table: 1 + index of an entry; 0 = free */
};

struct pack_text {
    const uint8_t *at;
    uint64_t bytes;
};

/* Return the index of an entry of the name table (two lengths, namespace, topic), and add the entry
 * if it is new. Returns PACK_NO_NAME if the table is full, PACK_NO_MEMORY without memory. */
int pack_name(struct pack_batch *b, struct pack_text entry);

/* Return whether the name table has the entry, or space for it. */
bool pack_has_space(const struct pack_batch *b, struct pack_text entry);

/* Return whether the batch has space for a record of any size: fewer than PG_BATCH_RECORDS
 * records, and at most `bytes` bytes of records and byte area. */
bool pack_takes(const struct pack_batch *b, uint64_t bytes);

/* Add a record with its key, payload and extension. The lengths in `head` are set from these texts.
 * Returns false without memory; the batch has not changed then. */
bool pack_record(struct pack_batch *b, struct pg_record head, struct pack_text key,
                 struct pack_text payload, struct pack_text extension);

/* Return the length of the name table in bytes, padded to a multiple of 8. */
uint64_t pack_names_bytes(const struct pack_batch *b);
/* Return the length of the body in bytes. */
uint64_t pack_body_bytes(const struct pack_batch *b);
/* Write the body to `out`, which has pack_body_bytes() bytes. */
void pack_write(const struct pack_batch *b, uint8_t *out);

/* Free all memory; the batch is empty afterwards. */
void pack_free(struct pack_batch *b);

/* ---- a message with one record ---------------------------------------------------------- */

struct pack_single {
    struct pg_record record;      /* its lengths are set from the texts */
    struct pack_text entry;       /* entry of the name table */
    struct pack_text key, payload, extension;
};

/* Return the length of the message in bytes. */
uint64_t pack_single_bytes(const struct pack_single *s);
/* Write the message to `out`, which has pack_single_bytes() bytes. `frame` has all fields except
 * count, names and names_bytes. */
void pack_single_write(const struct pack_single *s, struct pg_frame frame, uint8_t *out);

#endif

/* request.h - a message of the command socket while it is handled: decode.c proves it whole,
 * batch.c applies its records, messages.c says what each kind of message does. */
#ifndef PURGATORYD_REQUEST_H
#define PURGATORYD_REQUEST_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/names.h"

/* The caller owns the bytes; nobody writes them while they are read. */
struct request {
    const uint8_t *bytes;
    uint64_t len;
    struct pg_frame frame;        /* copied: the bytes may be unaligned */
    struct pg_rows rows;          /* which rows of a bulk load the records are, where
                                     in_bulk_load */
    bool in_bulk_load;
    const uint8_t *names, *records, *area;
    uint32_t uid, pid;
    int64_t received_boot_ns;     /* real clock: it was taken from the socket */
};

struct refusal {
    enum pg_error error;
    uint64_t detail[2];
};

static inline bool refused(struct refusal *why, enum pg_error error, uint64_t first,
                           uint64_t second)
{
    *why = (struct refusal){error, {first, second}};
    return false;
}

static inline const wire_record *record_at(const struct request *q, uint32_t i)
{
    return (const wire_record *)q->records + i;
}
/* Bytes of its key, payload and watch keys. */
static inline uint64_t record_bytes(const wire_record *r)
{
    return (uint64_t)r->key_len + r->payload_len + r->ext_len;
}

/* One entry of the name table; returns where the next one begins. */
static inline const uint8_t *names_next(const uint8_t *at, struct name *ns, struct name *topic)
{
    *ns = (struct name){(const char *)at + 2, at[0]};
    *topic = (struct name){(const char *)at + 2 + at[0], at[1]};
    return at + 2 + at[0] + at[1];
}

/* ---- decode.c ------------------------------------------------------------------------- */

/* What each op may carry, and what of its name has to exist or is born; a field that an op
 * does not use is 0. */
enum { USES_TIME = 1, USES_VALUE = 2, USES_KEYS = 4, IN_QUERY = 8, NEEDS_TOPIC = 16,
       NEEDS_NAMESPACE = 32, USES_PAYLOAD = 64 };
struct op_rule {
    uint8_t uses, modes, time_kinds;
    uint64_t value_max;
};
extern const struct op_rule op_rules[];

bool frame_read(struct request *q, struct refusal *why);
bool name_sound(struct name name);                   /* UTF-8 without NUL */
bool key_sound(unsigned type, unsigned len);
/* Of a BATCH or QUERY: where its tables are, and that every byte of them is sound. */
bool tables_read(struct request *q, struct refusal *why);
/* Of the whole message: what a batch that is sent again under its sequence is compared by. The
 * session's id, which is in it, counts as its first one. */
uint32_t fingerprint(const uint8_t *bytes, uint64_t len, const struct pg_session *s);

/* ---- batch.c -------------------------------------------------------------------------- */

/* Begins a batch whose fingerprint is `sum`, or goes on with it. False: there is no space for its
 * results, and nothing changed. */
bool batch_begin(struct pg_arena *a, struct pg_session *s, const struct request *q, uint32_t sum);
/* Applies the batch that was begun. False: the bounded work of this call is used up. */
bool batch_apply(struct pg_arena *a, const struct request *q, struct pg_session *s);

#endif

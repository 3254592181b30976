/* request.h - a message of the command socket while it is handled. decode.c checks it, batch.c
 * applies its records, messages.c handles each kind of message. */
#ifndef PURGATORYD_REQUEST_H
#define PURGATORYD_REQUEST_H

#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/base/sink.h"
#include "core/state/names.h"

/* The caller owns the bytes of the message. Nobody may write to them during the call. */
struct request {
    const uint8_t *bytes;
    uint64_t len;
    struct pg_frame frame;        /* a copy, because the bytes may be unaligned */
    struct pg_rows rows;          /* the records' rows in the bulk load, if in_bulk_load */
    bool in_bulk_load;
    const uint8_t *names, *records, *area;
    uint32_t uid, pid;
    int64_t received_boot_ns;     /* real boot clock: when the socket delivered the message */
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
/* Return the size in bytes of the record's key, payload and extension together. */
static inline uint64_t record_bytes(const wire_record *r)
{
    return (uint64_t)r->key_len + r->payload_len + r->ext_len;
}

/* Read one entry of the name table. Return the address of the next entry. */
static inline const uint8_t *names_next(const uint8_t *at, struct name *ns, struct name *topic)
{
    *ns = (struct name){(const char *)at + 2, at[0]};
    *topic = (struct name){(const char *)at + 2 + at[0], at[1]};
    return at + 2 + at[0] + at[1];
}

/* ---- decode.c ------------------------------------------------------------------------- */

/* The needs of an op: the fields that it uses, and the names that it creates if they do not exist
 * (NEEDS_). Fields that an op does not use have to be 0. */
enum { USES_TIME = 1, USES_VALUE = 2, USES_KEYS = 4, IN_QUERY = 8, NEEDS_TOPIC = 16,
       NEEDS_NAMESPACE = 32, USES_PAYLOAD = 64, USES_ITEMS = 128,
       OF_LEASE = 256 /* the key is a struct pg_lease */ };
struct op_rule {
    uint16_t uses;
    uint8_t modes, time_kinds;
    uint64_t value_max;
};
extern const struct op_rule op_rules[];

bool frame_read(struct request *q, struct refusal *why);
bool name_sound(struct name name);                   /* UTF-8 without NUL */
bool key_sound(unsigned type, unsigned len);
/* Find the tables of a BATCH or QUERY, and check every byte of them. */
bool tables_read(struct request *q, struct refusal *why);
/* Return a fingerprint of the whole message, to recognize a batch that is sent again under the same
 * sequence. If resharding gave the session another id, the session's first id is used instead of
 * the id in the message. */
uint32_t fingerprint(const uint8_t *bytes, uint64_t len, const struct pg_session *s);

/* ---- request.c ------------------------------------------------------------------------- */

/* Begin the reply to a request. */
void reply_head(const struct request *q, struct sink *out, uint32_t count);
/* Find the session of a request. Return false if the request is refused. */
bool session_of(struct pg_arena *a, const struct request *q, struct pg_session **s,
                struct refusal *why);
bool wrong_shard(const struct pg_arena *a, struct refusal *why);

/* ---- pending.c ------------------------------------------------------------------------- */

bool handle_list(struct pg_arena *a, struct request *q, struct sink *out, struct refusal *why);
bool handle_sweep(struct pg_arena *a, struct request *q, struct sink *out, struct refusal *why);

/* ---- schedule_messages.c --------------------------------------------------------------- */

/* Handle the body of a SCHEDULE message after its session has been found. The reply goes to `out`,
 * and *count is the number of items after struct pg_schedule_reply. No reply: the daemon has to
 * answer a question first, and then the message has to be handled again. */
bool schedule_handle(struct pg_arena *a, const struct request *q, struct sink *out,
                     uint32_t *count, struct refusal *why);

/* ---- batch.c -------------------------------------------------------------------------- */

/* Begin the batch with fingerprint `sum`, or continue it. If there is no space for its results,
 * change nothing and return false. */
bool batch_begin(struct pg_arena *a, struct pg_session *s, const struct request *q, uint32_t sum);
/* Apply the batch that was begun. Return false if the work limit of this call is reached; the
 * caller then has to call again. */
bool batch_apply(struct pg_arena *a, const struct request *q, struct pg_session *s);

#endif

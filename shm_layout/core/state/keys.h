/* keys.h - a name, a key, and the parameters of a PUT. */
#ifndef PURGATORYD_STATE_KEYS_H
#define PURGATORYD_STATE_KEYS_H

#include "core/base/common.h"

struct name {
    const char *bytes;
    uint32_t len;
};

struct key {
    const uint8_t *bytes;
    uint32_t hash;
    uint32_t namespace_row;
    uint32_t row_guess;           /* row of the watch key to try first; PG_NIL = none */
    uint8_t len, type;
};

/* Properties of the jobs that begin with a notice. */
struct job_traits {
    uint64_t order;               /* hash of the order key */
    uint8_t priority;
    bool own_order;               /* the timer gives an order key; otherwise its key is the order
                                     key */
};

struct put {
    struct key key;
    const uint8_t *payload;
    uint32_t payload_len;
    uint32_t topic;
    uint8_t mode, time_kind;
    uint8_t slack;                /* 1 + log2 of the slack in ns; 0 = the topic's slack */
    int64_t time_ns;
    uint64_t ticket;              /* EXTEND: required ticket; 0 = any timer, but no operation */
    uint16_t account;             /* account in which the timer is counted; 0 = none */
    bool limited;                 /* quotas apply to this record */
    bool occurrence;              /* the timer is an occurrence of a schedule */
    const uint8_t *items;         /* extension items of the timer */
    uint16_t items_len;           /* length of `items` in bytes */
    bool parks;                   /* set by timers_put: only the WAL keeps the payload */
};

/* key_scope: the scope in which a key is hashed. key_hash_of: the bits of the hash that are
 * stored. */
static inline uint64_t key_scope(uint32_t namespace_row, unsigned type)
{
    return (uint64_t)type << 32 | namespace_row;
}
static inline uint32_t key_hash_of(uint64_t hash) { return (uint32_t)(hash ^ hash >> 32); }

#endif

/* keys.h - a key, and a timer to be put under it. */
#ifndef PURGATORYD_STATE_KEYS_H
#define PURGATORYD_STATE_KEYS_H

#include "core/base/common.h"

struct key {
    const uint8_t *bytes;
    uint32_t hash;
    uint32_t namespace_row;
    uint32_t row_guess;           /* of a watch key; PG_NIL = none */
    uint8_t len, type;
};

struct put {
    struct key key;
    const uint8_t *payload;
    uint32_t payload_len;
    uint32_t topic;
    uint8_t mode, time_kind;
    int64_t time_ns;
    uint64_t ticket;              /* EXTEND: only this one; 0 = any timer, and no operation */
    uint16_t account;             /* of whose quota it is; 0 = nobody's */
    bool limited;                 /* quotas have to be asked */
};

#endif

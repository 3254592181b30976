/* Decode the final states of timers and operations, for consumer.c and listener.c. */
#ifndef END_H
#define END_H

#include "purgatoryd.h"

struct pg_raw_end {
    int cause;
    uint8_t flags; /* enum pg_entry_flag */
    const char *key;
    size_t key_len;
};

/* Return how a timer or an operation ended. Cut the verdict from the front of the payload. */
struct pg_end pg_end_of(struct pg_raw_end raw, const char **payload, size_t *length);

#endif

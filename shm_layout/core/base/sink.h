/* sink.h - append to a buffer of limited size. */
#ifndef PURGATORYD_BASE_SINK_H
#define PURGATORYD_BASE_SINK_H

#include "core/base/common.h"

/* A bounded output buffer. After `full` is set, nothing more is written. */
struct sink {
    uint8_t *bytes;
    uint64_t used, size;
    bool full;
};

/* Reserve bytes. If the buffer has no space for them, set `full` and return NULL. */
void *sink_take(struct sink *s, uint64_t bytes);
/* Append bytes. If the buffer has no space for them, set `full` and write nothing. */
void sink_put(struct sink *s, const void *bytes, uint64_t len);

#endif

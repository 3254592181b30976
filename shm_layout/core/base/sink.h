/* sink.h - output into a buffer of a bounded size. */
#ifndef PURGATORYD_BASE_SINK_H
#define PURGATORYD_BASE_SINK_H

#include "core/base/common.h"

/* A bounded output buffer: once `full` is set nothing more is written. */
struct sink {
    uint8_t *bytes;
    uint64_t used, size;
    bool full;
};

void *sink_take(struct sink *s, uint64_t bytes);     /* NULL and full when it does not fit */
void sink_put(struct sink *s, const void *bytes, uint64_t len);

#endif

/* sink.c - append to a buffer of limited size. */

#include "core/base/sink.h"
#include "core/base/common.h"

void *sink_take(struct sink *s, uint64_t bytes)
{
    if (s->full || bytes > s->size - s->used) {
        s->full = true;
        return NULL;
    }
    s->used += bytes;
    return s->bytes + s->used - bytes;
}

void sink_put(struct sink *s, const void *bytes, uint64_t len)
{
    void *at = sink_take(s, len);
    if (at != NULL && len != 0)
        memcpy(at, bytes, len);
}

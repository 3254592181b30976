/* select.h - the timers of a selection. */
#ifndef PURGATORYD_STATE_SELECT_H
#define PURGATORYD_STATE_SELECT_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/prefetch.h"

/* A selection whose names were looked up. */
struct selection {
    struct pg_select about;       /* `tickets` is not 0 */
    const uint8_t *text;          /* namespace, prefix, topic and tag */
    uint32_t namespace_row;
    uint32_t topic;               /* row of the topic; PG_NIL = all topics */
};

/* Work of one call: PG_SELECT_SLOTS slots, or fewer if their blobs have to be read. */
enum { PG_SELECT_SLOTS = 32768, PG_SELECT_BLOB = 12 };

/* Find at most PG_PREFETCH_MAX timers in the slots from *slot on, in ascending order. *slot becomes
 * the first slot that was not looked at, and *work is reduced. Return their number. */
uint32_t select_some(const struct pg_arena *a, const struct selection *s, uint32_t *slot,
                     uint32_t *work, uint32_t found[PG_PREFETCH_MAX]);
/* Number of bytes after a struct pg_select. */
static inline uint32_t select_text_len(const struct pg_select *s)
{
    return (uint32_t)s->namespace_len + s->prefix_len + s->topic_len + s->tag_len;
}

#endif

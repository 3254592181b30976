/* notices.h - writes replay buffer entries as messages: in order, one message per topic and
 * call. */
#ifndef PURGATORYD_FRONT_NOTICES_H
#define PURGATORYD_FRONT_NOTICES_H

#include "core/base/common.h"
#include "core/arena.h"

/* Return the head of a message body that has `count` notices, the first with sequence `first`. */
struct pg_notices notices_head(const struct pg_arena *a, uint32_t topic, uint64_t first,
                               uint32_t count);
/* Return the record of an entry in a message body. */
struct pg_notice notice_of(const struct pg_entry *e);

#endif

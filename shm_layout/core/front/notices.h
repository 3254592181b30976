/* notices.h - writes replay buffer entries as messages, one per topic and call, in order. */
#ifndef PURGATORYD_FRONT_NOTICES_H
#define PURGATORYD_FRONT_NOTICES_H

#include "core/base/common.h"
#include "core/arena.h"

/* Return the head of a body with `count` notices from sequence `first` on. */
struct pg_notices notices_head(const struct pg_arena *a, uint32_t topic, uint64_t first,
                               uint32_t count);
/* Return one record of a body. */
struct pg_notice notice_of(const struct pg_entry *e);

#endif

/* answer.h - the answer to a record. */
#ifndef PURGATORYD_BASE_ANSWER_H
#define PURGATORYD_BASE_ANSWER_H

#include "core/base/common.h"

/* An answer with a ticket is stored before the effect that it tells of: if a kill cuts the record
 * off, the rebuild sees by the ticket whether it holds (session.c). */
static inline void answer(struct pg_result *r, uint64_t ticket, unsigned status,
                          int64_t deadline_ns)
{
    r->deadline_ns = deadline_ns;
    STORE_RELEASE(&r->ticket, ticket << 8 | status); /* with it the answer is whole */
}

#endif

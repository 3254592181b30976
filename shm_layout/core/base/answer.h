/* answer.h - store the answer to one record. */
#ifndef PURGATORYD_BASE_ANSWER_H
#define PURGATORYD_BASE_ANSWER_H

#include "core/base/common.h"

/* Write a result. An answer with a ticket is stored before the effect that it reports. If the
 * process is killed between the two, the rebuild compares tickets to find out whether the effect
 * exists (session.c). */
static inline void answer(struct pg_result *r, uint64_t ticket, unsigned status,
                          int64_t deadline_ns)
{
    r->deadline_ns = deadline_ns;
    STORE_RELEASE(&r->ticket, ticket << 8 | status); /* release: a reader that sees the ticket sees
                                                        the deadline */
}

#endif

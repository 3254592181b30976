/* tickets.h - tickets, the identity of timers and operations. */
#ifndef PURGATORYD_BASE_TICKETS_H
#define PURGATORYD_BASE_TICKETS_H

#include "core/base/common.h"

/* A ticket consists of the shard that issued it and a number within that shard. A timer that moves
 * to another shard keeps its ticket. After a resharding, new numbers start above all issued
 * numbers. Within one arena the smaller number is therefore the older ticket. */
static inline uint64_t ticket_shard(uint64_t ticket) { return ticket / PG_TICKET_SHARD; }
static inline uint64_t ticket_number(uint64_t ticket) { return ticket % PG_TICKET_SHARD; }
static inline bool ticket_older(uint64_t ticket, uint64_t than)
{
    return ticket_number(ticket) < ticket_number(than);
}
/* Number of the next ticket; PG_TICKET_SHARD when all numbers are used up. */
static inline uint64_t next_number(const struct pg_header *h)
{
    return LOAD_ACQUIRE(&h->next_ticket) - h->shard * PG_TICKET_SHARD;
}
/* True if this arena issued the ticket or may have received it from another shard, together with
 * the timer. */
static inline bool ticket_known(const struct pg_header *h, uint64_t ticket)
{
    return ticket_number(ticket) != 0 && ticket_number(ticket) < next_number(h) &&
           ticket_shard(ticket) < PG_SHARDS_MAX;
}

#endif

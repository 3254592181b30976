/* tickets.h - the identity of timers and operations. */
#ifndef PURGATORYD_BASE_TICKETS_H
#define PURGATORYD_BASE_TICKETS_H

#include "core/base/common.h"

/* The shard that gave it, and which one of that shard's it is. What was moved to another shard
 * keeps its ticket, and that shard's own begin behind all numbers that were given anywhere. So in
 * one arena the numbers tell which ticket is older. */
static inline uint64_t ticket_shard(uint64_t ticket) { return ticket / PG_TICKET_SHARD; }
static inline uint64_t ticket_number(uint64_t ticket) { return ticket % PG_TICKET_SHARD; }
static inline bool ticket_older(uint64_t ticket, uint64_t than)
{
    return ticket_number(ticket) < ticket_number(than);
}
/* The next ticket's number; when all are given, PG_TICKET_SHARD. */
static inline uint64_t next_number(const struct pg_header *h)
{
    return LOAD_ACQUIRE(&h->next_ticket) - h->shard * PG_TICKET_SHARD;
}
/* The arena gave it, or it came with a timer from another one. */
static inline bool ticket_known(const struct pg_header *h, uint64_t ticket)
{
    return ticket_number(ticket) != 0 && ticket_number(ticket) < next_number(h) &&
           ticket_shard(ticket) < PG_SHARDS_MAX;
}

#endif

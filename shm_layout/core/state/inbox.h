/* inbox.h - what a session's owner has to be notified of: outcomes, and CHECKs of CLIENT
 * conditions. */
#ifndef PURGATORYD_STATE_INBOX_H
#define PURGATORYD_STATE_INBOX_H

#include "core/base/common.h"
#include "core/arena.h"

void inbox_add(struct pg_arena *a, uint32_t slot); /* the owner's; frees an ownerless outcome */
void inbox_remove(struct pg_arena *a, uint32_t slot);
/* How many operations a session may own. */
static inline uint64_t inbox_max(const struct pg_arena *a) { return a->purgatory->inbox_max; }
static inline bool inbox_full(const struct pg_arena *a, const struct pg_session *s)
{
    return s->owned >= inbox_max(a);
}
/* Of a session that ends: what is in it is freed, some now, the rest by orphans_free. */
void inbox_drop(struct pg_arena *a, struct pg_session *s);
bool orphans_free(struct pg_arena *a);                   /* a bounded number; true: some are left */
void inboxes_init(struct pg_arena *a, uint64_t inbox_max);
void inboxes_reset(struct pg_arena *a);
/* ACK of an outcome (version 0) or of a CHECK. True: the owner found the condition false. */
bool inbox_acknowledge(struct pg_arena *a, struct pg_session *s, const struct pg_ack *ack);

/* Bytes that an operation's notice has before its own payload, at most. */
#define PG_VERDICT_MAX (sizeof(struct pg_verdict) + PG_WATCH_KEYS_MAX / 8)

#endif

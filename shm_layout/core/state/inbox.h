/* inbox.h - the inbox of a session: outcomes, and CHECKs of CLIENT conditions, that the owner of
 * the operations should receive. */
#ifndef PURGATORYD_STATE_INBOX_H
#define PURGATORYD_STATE_INBOX_H

#include "core/base/common.h"
#include "core/arena.h"

void inbox_add(struct pg_arena *a, uint32_t slot); /* an outcome without an owner is freed */
void inbox_remove(struct pg_arena *a, uint32_t slot);
/* Maximum number of operations that a session may own. */
static inline uint64_t inbox_max(const struct pg_arena *a) { return a->purgatory->inbox_max; }
static inline bool inbox_full(const struct pg_arena *a, const struct pg_session *s)
{
    return s->owned >= inbox_max(a);
}
/* Empty the inbox of a session that ends. Some of its outcomes are freed immediately, the others by
 * later calls of orphans_free. */
void inbox_drop(struct pg_arena *a, struct pg_session *s);
bool orphans_free(struct pg_arena *a);              /* frees some orphans; true: orphans are left */
void inboxes_init(struct pg_arena *a, uint64_t inbox_max);
void inboxes_reset(struct pg_arena *a);
/* Apply an ACK of an outcome (version 0) or of a CHECK. Return true if the owner has answered
 * "false" to the current CHECK. */
bool inbox_acknowledge(struct pg_arena *a, struct pg_session *s, const struct pg_ack *ack);

#endif

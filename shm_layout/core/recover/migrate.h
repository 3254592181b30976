/* migrate.h - an arena's whole authoritative state into a fresh one, of other sizes or of a later
 * ABI. */
#ifndef PURGATORYD_RECOVER_MIGRATE_H
#define PURGATORYD_RECOVER_MIGRATE_H

#include "core/base/common.h"
#include "core/arena.h"

uint32_t blob_copy(struct pg_arena *to, const struct pg_arena *from, uint32_t blob,
                   uint32_t granules);               /* PG_NIL: no space */
/* Copies what the replies of a session hold; `to` has a copy of the rows. */
bool replies_migrate(struct pg_arena *to, const struct pg_arena *from, uint32_t session,
                     struct pg_fault *why);

#endif

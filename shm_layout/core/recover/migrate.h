/* migrate.h - copy the complete authoritative state of an arena into a new one that has other
 * sizes or a later ABI. */
#ifndef PURGATORYD_RECOVER_MIGRATE_H
#define PURGATORYD_RECOVER_MIGRATE_H

#include "core/base/common.h"
#include "core/arena.h"

/* Copy a blob into `to`. Return PG_NIL if no free block is large enough. */
uint32_t blob_copy(struct pg_arena *to, const struct pg_arena *from, uint32_t blob,
                   uint32_t granules);
/* Copy the answers and blobs of a session's replies. The caller must have copied the reply rows
 * into `to` before. */
bool replies_migrate(struct pg_arena *to, const struct pg_arena *from, uint32_t session,
                     struct pg_fault *why);
/* Check that the budgets of all consumer groups fit into the table of jobs. */
bool budgets_fit(const struct pg_arena *to, struct pg_fault *why);

#endif

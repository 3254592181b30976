/* bulk_loads.h - bulk loads. A bulk load remembers which of its rows are done, even after the
 * timers of these rows are gone. */
#ifndef PURGATORYD_STATE_BULK_LOADS_H
#define PURGATORYD_STATE_BULK_LOADS_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"

uint32_t bulk_load_find(const struct pg_arena *a, const uint8_t id[16]);     /* PG_NIL = none */
uint32_t bulk_load_row_for_new(const struct pg_arena *a);               /* PG_NIL = no free row */
/* Write a new bulk load into a free row. `fields` contains its id, fencing token, uid, namespace
 * and state. */
void bulk_load_write(struct pg_arena *a, uint32_t bulk_load, const struct pg_bulk_load *fields);
/* Find the bulk load that has the id of `wanted`, or begin it. If `wanted` has a higher fencing
 * token or a higher state than the bulk load, raise that of the bulk load to the same value. Return
 * the row of the bulk load, or PG_NIL if it is refused. *status = NONE, or the reason for the
 * refusal: DENIED, FENCED, QUOTA (the sender holds its share of the bulk loads), FULL_BULK_LOADS,
 * BUSY or WAL. */
uint32_t bulk_load_claim(struct pg_arena *a, const struct pg_bulk_load *wanted, unsigned *status);
/* Write a refusal to *r, because the sender already holds its share of the bulk loads. */
void bulk_load_over_share(const struct pg_arena *a, struct pg_result *r);
/* Forget a bulk load and its rows, and write a WAL record. */
void bulk_load_forget(struct pg_arena *a, uint32_t bulk_load);
void bulk_load_drop(struct pg_arena *a, uint32_t bulk_load); /* as above, without a WAL record */
/* Store the state that redo found in a frame. It may be older than the state in a snapshot, whose
 * parts are from different moments. */
void bulk_load_restore(struct pg_arena *a, uint32_t bulk_load, uint32_t state);
/* Set the bit of a row. Return false if the bit needs a block and no block is free. */
bool bulk_load_mark(struct pg_arena *a, uint32_t bulk_load, uint64_t row);
/* Return whether a row is done. This uses only authoritative state. */
bool bulk_load_row_visible(const struct pg_arena *a, const struct pg_wal_row *row);
/* Prepare a batch whose records are rows of a bulk load, before its first record is applied. The
 * function begins the bulk load if it does not exist; with namespace_row PG_NIL it only looks for
 * the bulk load. */
void bulk_load_begin(struct pg_arena *a, struct pg_session *s, const struct pg_rows *rows,
                     uint32_t namespace_row);
/* Return true if a PUT may be applied as row `row` of the batch's bulk load. Call this before the
 * PUT is applied. False: *r contains the answer to the PUT. */
bool bulk_load_admits(struct pg_arena *a, const struct key *key, uint64_t row, struct pg_result *r);
/* Return true if this status of a PUT or UNPARK means that the row is done, and that a WAL frame
 * contains the number of the row: the frame of the PUT or UNPARK, or for KEPT a DONE frame. */
static inline bool bulk_load_counts(unsigned status)
{
    return (status != PG_ST_NONE && status <= PG_ST_EXTENDED) || status == PG_ST_PARKED ||
           status == PG_ST_UNPARKED;
}
/* Mark the current row as done if `r`, the answer to its PUT or UNPARK, means that the row is
 * done. */
void bulk_load_settle(struct pg_arena *a, const struct pg_result *r);
/* The current record is a CANCEL, and belongs to row `row` of the bulk load. Mark the row as done
 * before the CANCEL is applied, so that no later PUT of the row is applied. Return false if the
 * CANCEL must not be applied; *r then contains its answer. */
bool bulk_load_void(struct pg_arena *a, const struct key *key, uint64_t row, struct pg_result *r);
/* Return whether the current row of a session is marked as done. */
bool bulk_load_has_row(const struct pg_arena *a, const struct pg_session *s);
/* Mark the current row of a session as done. */
void bulk_load_recover(struct pg_arena *a, const struct pg_session *s);
#define BULK_LOAD_PARTS 64        /* maximum number of blocks in one reply to STATUS */
/* Pick the blocks whose number is `from` or higher, at most BULK_LOAD_PARTS, in ascending order.
 * Return how many were picked. Set *next to the number of the block to continue from; UINT64_MAX =
 * no blocks are left. */
uint32_t bulk_load_pick(const struct pg_arena *a, uint32_t bulk_load, uint64_t from,
                        uint32_t picked[BULK_LOAD_PARTS], uint64_t *next);
struct pg_bulk_load_info bulk_load_info(const struct pg_arena *a, uint32_t bulk_load);
struct pg_bulk_load_part bulk_load_part(const struct pg_arena *a, uint32_t block);
void bulk_load_block_copy(struct pg_arena *to, uint32_t block, const struct pg_arena *from,
                          uint32_t from_block);
void bulk_loads_init(struct pg_arena *a);
bool bulk_loads_rebuild(struct pg_arena *a, struct pg_fault *why);
bool bulk_loads_check(const struct pg_arena *a, struct pg_fault *fault);

#endif

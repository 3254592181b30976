/* bulk_loads.h - bulk loads: which of their rows were done, past the end of the rows' timers. */
#ifndef PURGATORYD_STATE_BULK_LOADS_H
#define PURGATORYD_STATE_BULK_LOADS_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"

uint32_t bulk_load_find(const struct pg_arena *a, const uint8_t id[16]);     /* PG_NIL: none */
uint32_t bulk_load_row_for_new(const struct pg_arena *a);               /* PG_NIL: all in use */
/* A new bulk load in that row, as its fields say. */
void bulk_load_write(struct pg_arena *a, uint32_t bulk_load, const struct pg_bulk_load *fields);
/* The bulk load of this id, begun if need be, for a run with this fencing token; a state above its
 * own takes its place. *status = NONE, or why not: DENIED, FENCED, QUOTA (the sender holds its share
 * of the bulk loads), FULL_BULK_LOADS, BUSY, WAL. */
uint32_t bulk_load_claim(struct pg_arena *a, const struct pg_bulk_load *wanted, unsigned *status);
/* The answer to a sender that holds its share of the bulk loads. */
void bulk_load_over_share(const struct pg_arena *a, struct pg_result *r);
void bulk_load_forget(struct pg_arena *a, uint32_t bulk_load);
void bulk_load_drop(struct pg_arena *a, uint32_t bulk_load); /* the same, not appended */
/* Sets a row's bit. False: there is no block for it. */
bool bulk_load_mark(struct pg_arena *a, uint32_t bulk_load, uint64_t row);
/* Whether a row is done; needs authoritative state only. */
bool bulk_load_row_visible(const struct pg_arena *a, const struct pg_wal_row *row);
/* Before the records of a batch, of that namespace. */
void bulk_load_begin(struct pg_arena *a, struct pg_session *s, const struct pg_rows *rows,
                     uint32_t namespace_row);
/* Of a PUT, before it is applied: whether this row may be done. False: answered. */
bool bulk_load_admits(struct pg_arena *a, const struct key *key, uint64_t row, struct pg_result *r);
/* Whether a PUT or UNPARK with this status has done the row, by what it said in its frame. */
static inline bool bulk_load_counts(unsigned status)
{
    return (status != PG_ST_NONE && status <= PG_ST_EXTENDED) || status == PG_ST_PARKED ||
           status == PG_ST_UNPARKED;
}
/* After it: what is done is marked so. */
void bulk_load_settle(struct pg_arena *a, const struct pg_result *r);
/* Of a CANCEL, before it is applied: the row will not be done any more. False: answered. */
bool bulk_load_void(struct pg_arena *a, const struct key *key, uint64_t row, struct pg_result *r);
/* Of the record that a session was about: whether its row is marked; marks it. */
bool bulk_load_has_row(const struct pg_arena *a, const struct pg_session *s);
void bulk_load_recover(struct pg_arena *a, const struct pg_session *s);
#define BULK_LOAD_PARTS 64        /* blocks in one answer to STATUS */
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

/* watermarks.h - watch keys: a bounded table of monotone watermarks that outlive their watchers. */
#ifndef PURGATORYD_STATE_WATERMARKS_H
#define PURGATORYD_STATE_WATERMARKS_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/keys.h"

/* Short keys are stored in the row, longer keys in a blob. */
static inline uint32_t watermark_granules(const struct pg_watermark *l)
{
    return l->key_len <= sizeof l->key ? 0 : blob_granules(l->key_len);
}
static inline uint32_t watermark_blob(const struct pg_watermark *l)
{
    uint32_t blob;
    memcpy(&blob, l->key, sizeof blob);
    return blob;
}
static inline uint32_t row_of_watermark(const struct pg_arena *a, const struct pg_watermark *l)
{
    return (uint32_t)(l - a->watermarks);
}
uint32_t watermark_find(const struct pg_arena *a, const struct key *key); /* PG_NIL = none */
/* Prefetch what watermark_find accesses first for a key with this hash. */
static inline void watermark_fetch(const struct pg_arena *a, uint32_t hash)
{
    index_prefetch(&a->watermark_index, hash);
}
/* Return the first row whose key may have this hash; PG_NIL = none. */
static inline uint32_t watermark_first(const struct pg_arena *a, uint32_t hash, struct probe *at)
{
    return index_first(&a->watermark_index, hash, at);
}
/* Fill *watch from the row of a watch key, and write the key behind it. Return false if the row or
 * the blob is out of bounds: a reader of a changing arena may see such values. */
bool watermark_info(const struct pg_arena *a, uint32_t row, struct pg_info_watch *watch,
                    struct sink *out);
bool watermark_has_key(const struct pg_arena *a, uint32_t row, const struct key *key);
/* Create a row with watermark 0 in the account of the running batch. PG_NIL: *why contains the
 * answer. With `to_join`, the row is marked as forgotten until an operation joins it, so that the
 * row does not survive a kill before the operation joins. */
uint32_t watermark_born(struct pg_arena *a, const struct key *key, bool to_join,
                        struct pg_result *why);
void watermark_free(struct pg_arena *a, uint32_t row);                      /* the key must have no
                                                                               watcher */
/* Mark the row as forgotten: from this call on, the row is freed with its last watcher. */
static inline void watermark_forget(struct pg_arena *a, uint32_t row)
{
    watermark_at(a, row)->touched_s = PG_NIL;
}
/* Set the watermark and the error of a row. The caller visits the row's watchers afterwards. */
void watermark_set(struct pg_arena *a, uint32_t row, uint64_t watermark, uint32_t error);
void watermark_clear(struct pg_arena *a, uint32_t row);                 /* clears the key's error */
void watermark_drop(struct pg_arena *a, uint32_t row);  /* frees it now, or with its last watcher */
/* Call watermark_left when a watcher has left. It frees a forgotten row, or starts the time to live
 * of the row. */
void watermark_left_by_last(struct pg_arena *a, uint32_t row);
void watermark_left_by_one(struct pg_arena *a, uint32_t row);
static inline void watermark_left(struct pg_arena *a, uint32_t row)
{
    if (watermark_at(a, row)->root == PG_NIL)
        watermark_left_by_last(a, row);
    else if (has_wal(a))
        watermark_left_by_one(a, row);
}
void watermarks_init(struct pg_arena *a, uint64_t ttl_ns);
uint64_t watermark_ttl_ns(const struct pg_arena *a);
/* Mark the blobs of keys as used, and fill the index and the free list. */
bool watermarks_rebuild(struct pg_arena *a, struct pg_fault *why);
/* Free forgotten rows without a watcher, which a crash may leave. */
void watermarks_drop_forgotten(struct pg_arena *a);
/* Check the table. Add the number of granules of long keys to *granules. */
bool watermarks_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

#endif

/* watermarks.h - watch keys: a bounded table of monotone watermarks that outlive their watchers. */
#ifndef PURGATORYD_STATE_WATERMARKS_H
#define PURGATORYD_STATE_WATERMARKS_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/keys.h"

/* Short keys stand in the row, longer ones in a blob. */
static inline uint32_t watermark_granules(const struct pg_watched *l)
{
    return l->key_len <= sizeof l->key ? 0 : blob_granules(l->key_len);
}
static inline uint32_t watermark_blob(const struct pg_watched *l)
{
    uint32_t blob;
    memcpy(&blob, l->key, sizeof blob);
    return blob;
}
static inline uint32_t row_of_watermark(const struct pg_arena *a, const struct pg_watched *l)
{
    return (uint32_t)(l - a->watermarks);
}
uint32_t watermark_find(const struct pg_arena *a, const struct key *key); /* PG_NIL: watermark 0 */
/* Writes `watch` with a watch key's watermark, and the key behind it; false: the row or its blob is
 * not inside, as where a reader followed what changed underneath. */
bool watermark_info(const struct pg_arena *a, uint32_t row, struct pg_info_watch *watch,
                    struct sink *out);
bool watermark_has_key(const struct pg_arena *a, uint32_t row, const struct key *key);
/* A new row at watermark 0 in the running batch's account; PG_NIL: *why is the answer. With
 * `to_join` it is forgotten until an operation joins it: if a kill comes before, it goes. */
uint32_t watermark_born(struct pg_arena *a, const struct key *key, bool to_join,
                        struct pg_result *why);
void watermark_free(struct pg_arena *a, uint32_t row);                      /* nobody watches it */
/* From now on it goes with its last watcher. */
static inline void watermark_forget(struct pg_arena *a, uint32_t row)
{
    watermark_at(a, row)->touched_s = PG_NIL;
}
/* Changes of a row by a command. Its watchers are visited afterwards. */
void watermark_set(struct pg_arena *a, uint32_t row, uint64_t watermark, uint32_t error);
void watermark_clear(struct pg_arena *a, uint32_t row);                     /* of its error */
void watermark_drop(struct pg_arena *a, uint32_t row);      /* now, or with its last watcher */
/* To be called when a watcher left: frees a forgotten row, or begins its time to live. */
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
bool watermarks_rebuild(struct pg_arena *a, struct pg_fault *why); /* blobs, index, free list */
void watermarks_drop_forgotten(struct pg_arena *a); /* which a crash left without a watcher */
bool watermarks_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

#endif

/* records.h - the records of the WAL: one for each change of the arena, and the frame bodies of
 * snapshots. */
#ifndef PURGATORYD_STATE_RECORDS_H
#define PURGATORYD_STATE_RECORDS_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"

/* Each of these functions returns the fixed part of a frame's body. */
struct pg_wal_namespace wal_namespace_of(uint32_t row, const struct pg_namespace *n,
                                         uint32_t name_len);
struct pg_wal_topic wal_topic_of(uint32_t row, const struct pg_topic *t, uint32_t name_len);
struct pg_wal_arm wal_arm_of(const struct pg_arena *a, uint32_t slot, const struct pg_hot *h,
                             const struct pg_cold *c, uint64_t ticket);
struct pg_wal_watch wal_watch_of(uint32_t slot, const struct pg_hot *h, const struct pg_cold *c,
                                 const struct pg_operation *op, uint64_t ticket);
struct pg_wal_watermark wal_watermark_of(const struct pg_arena *a, uint32_t row,
                                         const struct pg_watermark *l, bool born);
struct pg_wal_entry wal_entry_of(uint64_t position, const struct pg_entry *e);
struct pg_wal_bulk_load wal_bulk_load_of(const struct pg_bulk_load *l);
/* For a cursor, `row` is the cursor itself; for a position, it is the position. */
struct pg_wal_cursor wal_cursor_of(const struct pg_cursor *cursor, const struct pg_cursor *row);

/* Each wal_append_* writes one frame, immediately before the store that makes its effect visible,
 * and only if there is a WAL buffer: `if (has_wal(a)) wal_append_...`. That store must come before
 * the next frame begins and before the call ends. The start of the next frame or the end of the
 * call settles the frame, and only then does the group-commit thread see the frame. */
void wal_append_namespace(struct pg_arena *a, uint32_t row, const struct pg_namespace *fields,
                          struct name name);
void wal_append_topic(struct pg_arena *a, uint32_t row, const struct pg_topic *fields,
                      struct name name);
/* The caller must have written all fields of the timer except its control word. replaced: slot of
 * the old timer, PG_NIL = none. */
void wal_append_arm(struct pg_arena *a, uint32_t slot, const struct put *put, uint64_t ticket,
                    uint32_t replaced);
void wal_append_unpark(struct pg_arena *a, uint32_t slot);
void wal_append_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns, int64_t wall_ns);
void wal_append_end(struct pg_arena *a, uint32_t slot, enum pg_end_cause cause);
void wal_append_fire(struct pg_arena *a, uint32_t slot, const struct pg_entry *e,
                     const struct job_traits *traits);
void wal_append_sent(struct pg_arena *a, uint64_t upto, int64_t built_boot_ns,
                     int64_t handed_boot_ns);
void wal_append_watch(struct pg_arena *a, uint32_t slot, uint64_t ticket);
/* `fields` are the fields that the row will have. `key` is the key of a new row, otherwise NULL. */
void wal_append_watermark(struct pg_arena *a, uint32_t row, const struct pg_watermark *fields,
                          const struct key *key);
/* Append that the key of an ended timer may be used again. */
void wal_append_freed(struct pg_arena *a, uint32_t slot);
void wal_append_gone(struct pg_arena *a, uint32_t row);
/* The caller must have written the operation's cause, error, time of its end and missing keys. */
void wal_append_outcome(struct pg_arena *a, uint32_t slot, const struct job_traits *traits);
void wal_append_session(struct pg_arena *a, const struct pg_session *s);
/* The caller must have written all fields of the session except its id. */
void wal_append_opened(struct pg_arena *a, const struct pg_session *s, uint64_t id,
                       struct name name);
/* The caller appends the entry as the newest entry after this call. */
void wal_append_entry(struct pg_arena *a, const struct pg_entry *e,
                      const struct job_traits *traits);
/* `fields` are those that the group will have. count = 0: the group is deleted. */
void wal_append_group(struct pg_arena *a, uint32_t row, const struct pg_consumer_group *fields,
                      struct name name, const uint32_t *topics, uint32_t count);
struct pg_wal_consumer_group wal_group_of(uint32_t row, const struct pg_consumer_group *g);
/* `fields` are those that the job will have. `acked`: it ends because it was acknowledged. `whole`:
 * the record contains its key and payload. */
void wal_append_job(struct pg_arena *a, uint32_t row, const struct pg_job *fields, bool acked,
                    bool whole);
struct pg_wal_job wal_job_of(const struct pg_arena *a, uint32_t row, const struct pg_job *j);
void wal_append_bulk_load(struct pg_arena *a, const struct pg_bulk_load *fields);
/* `f` are the fields that the row will have with this version. */
void wal_append_schedule(struct pg_arena *a, uint32_t row, uint64_t version,
                         const struct pg_schedule_fields *f, bool has_blob);
void wal_append_done(struct pg_arena *a, uint32_t bulk_load, uint64_t row);
/* `row` is the cursor itself, or the fields that one of its positions will have. */
void wal_append_cursor(struct pg_arena *a, const struct pg_cursor *cursor,
                       const struct pg_cursor *row);
/* Copy an operation's watch keys to `out`. `op` may be a copy of the head of the operation's
 * blob. */
void operation_keys_copy(const struct pg_arena *a, const struct pg_operation *op,
                         const uint8_t *blob, struct pg_wal_watch_key *out);

#endif

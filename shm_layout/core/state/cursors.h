/* cursors.h - cursors of subscribers. A cursor remembers, per topic, up to which notice its
 * subscriber has handled the notices. */
#ifndef PURGATORYD_STATE_CURSORS_H
#define PURGATORYD_STATE_CURSORS_H

#include "core/base/check.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"

/* Find a cursor of a namespace; PG_NIL = it does not exist. */
uint32_t cursor_find(const struct pg_arena *a, uint32_t ns, struct name name);
/* Find the position of a cursor in a topic; PG_NIL = no notice of the topic is committed. */
uint32_t cursor_position(const struct pg_arena *a, uint32_t cursor, uint32_t topic);
/* Return the session that holds the cursor; NULL = none. */
struct pg_session *cursor_holder(const struct pg_arena *a, uint32_t cursor);
/* Return a free row at or after `from`; PG_NIL = none. */
uint32_t cursor_free_row(const struct pg_arena *a, uint32_t from);
/* Return the number of rows that the cursors of a uid use. */
uint32_t cursors_of(const struct pg_arena *a, uint32_t uid);
/* Create a cursor in a free row, for the uid of the running call. */
void cursor_create(struct pg_arena *a, uint32_t row, uint32_t ns, struct name name);
/* Record that the cursor has a position in every older topic of its namespace. */
void cursor_complete(struct pg_arena *a, uint32_t cursor);
/* Add the position of a cursor in a topic, in the free row `row`. */
void cursor_add(struct pg_arena *a, uint32_t row, uint32_t cursor, uint32_t topic,
                uint64_t sequence);
/* Move a position forward. A lower sequence changes nothing. */
void cursor_move(struct pg_arena *a, uint32_t position, uint64_t sequence);
/* Delete a cursor and its positions. */
void cursor_delete(struct pg_arena *a, uint32_t cursor);
/* Return the sequence up to which all cursors have committed the notices of a topic; UINT64_MAX = no
 * cursor covers the topic. */
uint64_t cursors_committed(const struct pg_arena *a, uint32_t topic);
/* Return whether some cursor has not committed all notices of a topic. */
static inline bool cursors_await(const struct pg_arena *a, uint32_t topic)
{
    return cursors_committed(a, topic) < topic_at(a, topic)->sequence;
}
/* Return whether a topic keeps its row for a cursor: a listed topic until the cursor is deleted, and
 * another topic of the namespace while notices are not committed. Without the row, the next topic of
 * the same name would have no position, and its notices could be lost unreported. */
bool cursors_hold_topic(const struct pg_arena *a, uint32_t topic);
/* Drop the positions in a topic whose row is about to be reused. */
void cursors_forget_topic(struct pg_arena *a, uint32_t topic);
/* Return whether the arena has the state that a WAL frame describes. */
bool cursor_agrees(const struct pg_arena *a, const struct pg_wal_cursor *j, struct name name);
/* Store the state that a WAL frame describes. Return false if no row is free. */
bool cursor_restore(struct pg_arena *a, const struct pg_wal_cursor *j, struct name name);
/* Drop positions without a cursor, and positions in topics whose rows were reused. */
bool cursors_rebuild(struct pg_arena *a, struct pg_fault *why);
bool cursors_check(const struct pg_arena *a, struct pg_fault *fault);

#endif

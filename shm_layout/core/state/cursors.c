/* cursors.c - cursors of subscribers.
 *
 * A cursor is a row, and its position in each topic is another row. The store of `state` decides
 * whether a row exists, and the store of `sequence` decides a commit. A deleted cursor loses its row
 * first; a rebuild frees positions that a kill left without their cursor. The holder of a cursor is
 * a session: when the session has ended, nobody holds the cursor, without any further store. */

#include "core/state/cursors.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/records.h"
#include "core/state/replay_buffer.h"
#include "core/state/rows.h"

/* ---- look-ups ------------------------------------------------------------------------------ */

static bool is_head(const struct pg_arena *a, uint32_t row)
{
    return row < a->cursor_rows && cursor_at(a, row)->state == PG_CURSOR_HEAD;
}

static struct name cursor_name(const struct pg_arena *a, uint32_t cursor)
{
    return (struct name){cursor_at(a, cursor)->name, cursor_at(a, cursor)->name_len};
}

uint32_t cursor_find(const struct pg_arena *a, uint32_t ns, struct name name)
{
    for (uint32_t i = 0; i < a->cursor_rows; i++)
        if (is_head(a, i) && cursor_at(a, i)->namespace_row == ns &&
            cursor_at(a, i)->name_len == name.len &&
            memcmp(cursor_at(a, i)->name, name.bytes, name.len) == 0)
            return i;
    return PG_NIL;
}

uint32_t cursor_position(const struct pg_arena *a, uint32_t cursor, uint32_t topic)
{
    for (uint32_t i = 0; i < a->cursor_rows; i++)
        if (cursor_at(a, i)->state == PG_CURSOR_POSITION && cursor_at(a, i)->topic == topic &&
            cursor_at(a, i)->cursor == cursor)
            return i;
    return PG_NIL;
}

struct pg_session *cursor_holder(const struct pg_arena *a, uint32_t cursor)
{
    return session_find(a, cursor_at(a, cursor)->session);
}

uint32_t cursor_free_row(const struct pg_arena *a, uint32_t from)
{
    for (uint32_t i = from; i < a->cursor_rows; i++)
        if (cursor_at(a, i)->state == PG_CURSOR_FREE)
            return i;
    return PG_NIL;
}

/* Row of the cursor to which a row belongs. */
static uint32_t head_of(const struct pg_arena *a, uint32_t row)
{
    return cursor_at(a, row)->state == PG_CURSOR_HEAD ? row : cursor_at(a, row)->cursor;
}

uint32_t cursors_of(const struct pg_arena *a, uint32_t uid)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->cursor_rows; i++)
        count += cursor_at(a, i)->state != PG_CURSOR_FREE &&
                 cursor_at(a, head_of(a, i))->uid == uid;
    return count;
}

/* ---- changes ------------------------------------------------------------------------------- */

static void row_born(struct pg_arena *a, uint32_t row, const struct pg_cursor *fields)
{
    struct pg_cursor *c = cursor_at(a, row), next = *fields;
    PG_ASSERT(c->state == PG_CURSOR_FREE, "cursors", "a row for a cursor is free");
    next.state = PG_CURSOR_FREE;
    *c = next;
    STORE_RELEASE(&c->state, fields->state);
    a->metrics->cursors += fields->state == PG_CURSOR_HEAD;
    a->metrics->cursor_rows++;
}

static void row_free(struct pg_arena *a, uint32_t row)
{
    a->metrics->cursors -= cursor_at(a, row)->state == PG_CURSOR_HEAD;
    a->metrics->cursor_rows--;
    STORE_RELEASE(&cursor_at(a, row)->state, (uint32_t)PG_CURSOR_FREE);
}

void cursor_create(struct pg_arena *a, uint32_t row, uint32_t ns, struct name name)
{
    struct pg_cursor c = {.incarnation = a->header->next_incarnation,
                          .used_boot_ns = a->call.real_boot_ns, .state = PG_CURSOR_HEAD,
                          .namespace_row = ns, .uid = a->call.uid, .name_len = name.len};
    memcpy(c.name, name.bytes, name.len);
    if (has_wal(a))
        wal_append_cursor(a, &c, &c);
    row_born(a, row, &c);
}

void cursor_complete(struct pg_arena *a, uint32_t cursor)
{
    struct pg_cursor c = *cursor_at(a, cursor);
    c.every_topic = 1;
    if (has_wal(a))
        wal_append_cursor(a, &c, &c);
    STORE_RELEASE(&cursor_at(a, cursor)->every_topic, 1u);
}

void cursor_add(struct pg_arena *a, uint32_t row, uint32_t cursor, uint32_t topic,
                uint64_t sequence)
{
    const struct pg_cursor p = {.sequence = sequence,
                                .incarnation = topic_at(a, topic)->incarnation,
                                .used_boot_ns = a->call.real_boot_ns,
                                .state = PG_CURSOR_POSITION, .cursor = cursor, .topic = topic};
    if (has_wal(a))
        wal_append_cursor(a, cursor_at(a, cursor), &p);
    row_born(a, row, &p);
    a->metrics->cursor_commits++;
}

void cursor_move(struct pg_arena *a, uint32_t position, uint64_t sequence)
{
    struct pg_cursor p = *cursor_at(a, position);
    if (sequence <= p.sequence)
        return;
    p.sequence = sequence;
    if (has_wal(a))
        wal_append_cursor(a, cursor_at(a, p.cursor), &p);
    cursor_at(a, position)->used_boot_ns = a->call.real_boot_ns;
    STORE_RELEASE(&cursor_at(a, position)->sequence, sequence);
    a->metrics->cursor_commits++;
}

static void positions_free(struct pg_arena *a, uint32_t cursor)
{
    for (uint32_t i = 0; i < a->cursor_rows; i++)
        if (cursor_at(a, i)->state == PG_CURSOR_POSITION && cursor_at(a, i)->cursor == cursor)
            row_free(a, i);
}

/* Free the row of the cursor first: it decides whether the cursor exists. */
static void cursor_drop(struct pg_arena *a, uint32_t cursor)
{
    row_free(a, cursor);
    positions_free(a, cursor);
}

void cursor_delete(struct pg_arena *a, uint32_t cursor)
{
    struct pg_cursor gone = *cursor_at(a, cursor);
    gone.state = PG_CURSOR_FREE;
    if (has_wal(a))
        wal_append_cursor(a, &gone, &gone);
    cursor_drop(a, cursor);
    a->metrics->cursor_commits++;             /* topics may be reusable, as after a commit */
}

/* ---- topics -------------------------------------------------------------------------------- */

/* Return whether a cursor needs the notices of a topic in which it has no position. */
static bool needs_all(const struct pg_arena *a, uint32_t cursor, uint32_t topic)
{
    const struct pg_cursor *c = cursor_at(a, cursor);
    const struct pg_topic *t = topic_at(a, topic);
    return c->every_topic != 0 && c->namespace_row == t->namespace_row &&
           t->incarnation >= c->incarnation && cursor_position(a, cursor, topic) == PG_NIL;
}

uint64_t cursors_committed(const struct pg_arena *a, uint32_t topic)
{
    uint64_t committed = UINT64_MAX;
    for (uint32_t i = 0; i < a->cursor_rows; i++) {
        const struct pg_cursor *c = cursor_at(a, i);
        if (c->state == PG_CURSOR_POSITION && c->topic == topic && c->sequence < committed)
            committed = c->sequence;
        if (c->state == PG_CURSOR_HEAD && needs_all(a, i, topic))
            committed = 0;
    }
    return committed;
}

bool cursors_hold_topic(const struct pg_arena *a, uint32_t topic)
{
    for (uint32_t i = 0; a->metrics->cursors != 0 && i < a->cursor_rows; i++) {
        const struct pg_cursor *c = cursor_at(a, i);
        if (c->state == PG_CURSOR_POSITION && c->topic == topic &&
            cursor_at(a, c->cursor)->every_topic == 0)
            return true;
    }
    return a->metrics->cursors != 0 && cursors_await(a, topic);
}

/* Follow the notices of a topic from the newest one back to the last committed one. */
static uint64_t oldest_of(const struct pg_arena *a, uint32_t topic, uint64_t upto)
{
    const uint64_t committed = cursors_committed(a, topic);
    uint64_t at = LOAD_ACQUIRE(&topic_at(a, topic)->last_position);
    struct pg_entry e;
    while (at != 0 && replay_copy(a, at - 1, &e) && e.topic == topic && e.sequence > committed) {
        upto = at - 1 < upto ? at - 1 : upto;
        at = entry_previous(&e, at - 1);
    }
    return upto;
}

uint64_t pg_cursors_oldest(const struct pg_arena *a, uint64_t upto)
{
    for (uint32_t i = 0; a->metrics->cursors != 0 && i < a->topic_rows; i++)
        if (topic_at(a, i)->name_len != 0 && cursors_await(a, i))
            upto = oldest_of(a, i, upto);
    return upto;
}

/* The TOPIC frame of the next topic in this row has the same effect in redo. */
void cursors_forget_topic(struct pg_arena *a, uint32_t topic)
{
    for (uint32_t i = 0; i < a->cursor_rows; i++)
        if (cursor_at(a, i)->state == PG_CURSOR_POSITION && cursor_at(a, i)->topic == topic)
            row_free(a, i);
}

/* ---- recovery ------------------------------------------------------------------------------ */

bool cursor_agrees(const struct pg_arena *a, const struct pg_wal_cursor *j, struct name name)
{
    const uint32_t cursor = cursor_find(a, j->namespace_row, name);
    if (cursor == PG_NIL || j->state == PG_CURSOR_FREE)
        return cursor == PG_NIL && j->state == PG_CURSOR_FREE;
    if (j->state == PG_CURSOR_HEAD)
        return cursor_at(a, cursor)->every_topic == j->every_topic;
    const uint32_t position = cursor_position(a, cursor, j->topic);
    return position != PG_NIL && cursor_at(a, position)->sequence == j->sequence &&
           cursor_at(a, position)->incarnation == j->incarnation;
}

static bool is_stale(const struct pg_arena *a, uint32_t row)
{
    const struct pg_cursor *c = cursor_at(a, row);
    return c->state == PG_CURSOR_POSITION &&
           (!is_head(a, c->cursor) || c->topic >= a->topic_rows ||
            topic_at(a, c->topic)->name_len == 0 ||
            topic_at(a, c->topic)->incarnation != c->incarnation);
}

/* Return a row for `row`, or a free row if `row` is PG_NIL; PG_NIL = none. Redo keeps positions in
 * topics whose rows were reused, until their rows are needed. */
static uint32_t row_for(struct pg_arena *a, uint32_t row)
{
    if (row == PG_NIL)
        row = cursor_free_row(a, 0);
    for (uint32_t i = 0; row == PG_NIL && i < a->cursor_rows; i++)
        row = is_stale(a, i) ? i : PG_NIL;
    if (row != PG_NIL && cursor_at(a, row)->state != PG_CURSOR_FREE)
        row_free(a, row);
    return row;
}

static bool row_restore(struct pg_arena *a, uint32_t found, const struct pg_cursor *fields)
{
    const uint32_t row = row_for(a, found);
    if (row != PG_NIL)
        row_born(a, row, fields);
    return row != PG_NIL;
}

static bool head_restore(struct pg_arena *a, uint32_t found, const struct pg_wal_cursor *j,
                         struct name name)
{
    struct pg_cursor c = {.incarnation = j->incarnation, .state = PG_CURSOR_HEAD,
                          .namespace_row = j->namespace_row, .uid = j->uid,
                          .every_topic = j->every_topic, .name_len = name.len};
    memcpy(c.name, name.bytes, name.len);
    return row_restore(a, found, &c);
}

/* The frames of a snapshot are in the order of the rows, so a position may come before its
 * cursor. */
bool cursor_restore(struct pg_arena *a, const struct pg_wal_cursor *j, struct name name)
{
    uint32_t cursor = cursor_find(a, j->namespace_row, name);
    if (j->state == PG_CURSOR_FREE) {
        if (cursor != PG_NIL)
            cursor_drop(a, cursor);
        return true;
    }
    if (j->state == PG_CURSOR_HEAD)
        return head_restore(a, cursor, j, name);
    if (cursor == PG_NIL && !head_restore(a, PG_NIL, j, name))
        return false;
    cursor = cursor_find(a, j->namespace_row, name);
    return row_restore(a, cursor_position(a, cursor, j->topic),
                       &(struct pg_cursor){.sequence = j->sequence, .incarnation = j->incarnation,
                                           .state = PG_CURSOR_POSITION, .cursor = cursor,
                                           .topic = j->topic});
}

/* ---- rebuild and check --------------------------------------------------------------------- */

static bool head_sound(const struct pg_arena *a, uint32_t row, struct pg_fault *why)
{
    const struct pg_cursor *c = cursor_at(a, row);
    return (c->namespace_row < a->namespace_rows &&
            namespace_at(a, c->namespace_row)->name_len != 0 && c->name_len != 0 &&
            c->name_len <= PG_CURSOR_MAX) ||
           fault_set(why, "cursors", "the name or the namespace of a cursor is invalid", row,
                     PG_CURSOR_MAX, c->name_len);
}

static bool row_sound(const struct pg_arena *a, uint32_t row, struct pg_fault *why)
{
    const struct pg_cursor *c = cursor_at(a, row);
    if (c->state > PG_CURSOR_POSITION)
        return fault_set(why, "cursors", "state of a row", row, PG_CURSOR_POSITION, c->state);
    if (c->state == PG_CURSOR_HEAD)
        return head_sound(a, row, why);
    return c->state == PG_CURSOR_FREE || is_stale(a, row) ||
           c->sequence <= topic_at(a, c->topic)->sequence ||
           fault_set(why, "cursors", "a committed notice that does not exist", row,
                     topic_at(a, c->topic)->sequence, c->sequence);
}

bool cursors_rebuild(struct pg_arena *a, struct pg_fault *why)
{
    a->metrics->cursors = a->metrics->cursor_rows = 0;
    for (uint32_t i = 0; i < a->cursor_rows; i++) {
        if (!row_sound(a, i, why))
            return false;
        a->metrics->cursors += cursor_at(a, i)->state == PG_CURSOR_HEAD;
        a->metrics->cursor_rows += cursor_at(a, i)->state != PG_CURSOR_FREE;
    }
    for (uint32_t i = 0; i < a->cursor_rows; i++)
        if (is_stale(a, i))
            row_free(a, i);
    return true;
}

static bool row_unique(const struct pg_arena *a, uint32_t row, struct pg_fault *fault)
{
    const struct pg_cursor *c = cursor_at(a, row);
    if (c->state == PG_CURSOR_FREE)
        return true;
    if (is_stale(a, row))
        return fault_set(fault, "cursors", "a position without its cursor or topic", row,
                         c->incarnation, c->cursor);
    const uint32_t found = c->state == PG_CURSOR_HEAD
                               ? cursor_find(a, c->namespace_row, cursor_name(a, row))
                               : cursor_position(a, c->cursor, c->topic);
    return found == row || fault_set(fault, "cursors", "two rows of the same cursor or position",
                                     row, found, row);
}

bool cursors_check(const struct pg_arena *a, struct pg_fault *fault)
{
    uint64_t cursors = 0, rows = 0;
    for (uint32_t i = 0; i < a->cursor_rows; i++) {
        if (!row_sound(a, i, fault) || !row_unique(a, i, fault))
            return false;
        cursors += cursor_at(a, i)->state == PG_CURSOR_HEAD;
        rows += cursor_at(a, i)->state != PG_CURSOR_FREE;
    }
    return (cursors == a->metrics->cursors ||
            fault_set(fault, "cursors", "count of cursors", 0, cursors, a->metrics->cursors)) &&
           (rows == a->metrics->cursor_rows ||
            fault_set(fault, "cursors", "count of rows", 0, rows, a->metrics->cursor_rows));
}

/* cursor_requests.c - the CURSOR message: open, commit, close or delete a cursor. */

#include "core/front/cursor_requests.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/cursors.h"
#include "core/state/names.h"
#include "core/state/quotas.h"
#include "core/state/replay_buffer.h"
#include "core/state/rows.h"

/* ---- reading ------------------------------------------------------------------------------- */

static bool ask_sound(const struct pg_cursor_ask *ask, uint32_t count)
{
    const bool open = ask->action == PG_CA_OPEN, commit = ask->action == PG_CA_COMMIT;
    return ask->action < PG_CURSOR_ACTIONS && ask->namespace_len != 0 &&
           ask->namespace_len <= PG_NAMESPACE_MAX && ask->name_len != 0 &&
           ask->name_len <= PG_CURSOR_MAX && ask->every_topic <= open &&
           (commit || ask->stream_id == 0) &&
           (count == 0 || commit || (open && ask->every_topic == 0));
}

/* Read the next topic of the message. Return the address of the part after it. */
static const uint8_t *topic_next(const uint8_t *at, struct pg_tail *tail, struct name *topic)
{
    memcpy(tail, at, sizeof *tail);
    *topic = (struct name){(const char *)at + sizeof *tail, tail->topic_len};
    return at + sizeof *tail + tail->topic_len;
}

static bool topics_sound(const struct request *q, const struct cursor_request *c,
                         struct refusal *why)
{
    const uint8_t *at = c->topics, *end = q->bytes + q->len;
    struct pg_tail tail;
    struct name topic;
    for (uint32_t i = 0; i < c->count; i++) {
        if ((uint64_t)(end - at) < sizeof tail)
            return refused(why, PG_ERR_MALFORMED, i, (uint64_t)(end - at));
        const uint8_t *next = topic_next(at, &tail, &topic);
        if (next > end || tail.namespace_len != 0 || topic.len > PG_TOPIC_MAX ||
            !name_sound(topic))
            return refused(why, PG_ERR_MALFORMED, i, topic.len);
        at = next;
    }
    return at == end || refused(why, PG_ERR_MALFORMED, q->len, (uint64_t)(at - q->bytes));
}

bool cursor_read(const struct request *q, struct cursor_request *c, struct refusal *why)
{
    const uint64_t fixed = sizeof q->frame + sizeof c->ask;
    *c = (struct cursor_request){.count = q->frame.count, .cursor = PG_NIL};
    if (q->len < fixed)
        return refused(why, PG_ERR_MALFORMED, q->len, fixed);
    memcpy(&c->ask, q->bytes + sizeof q->frame, sizeof c->ask);
    if (c->count > PG_CURSOR_TOPICS)
        return refused(why, PG_ERR_TOO_LARGE, PG_CURSOR_TOPICS, c->count);
    if (!ask_sound(&c->ask, c->count) || q->len < fixed + c->ask.namespace_len + c->ask.name_len)
        return refused(why, PG_ERR_MALFORMED, sizeof q->frame, c->ask.action);
    c->ns = (struct name){(const char *)q->bytes + fixed, c->ask.namespace_len};
    c->name = (struct name){c->ns.bytes + c->ns.len, c->ask.name_len};
    c->topics = (const uint8_t *)c->name.bytes + c->name.len;
    if (!name_sound(c->ns) || !name_sound(c->name))
        return refused(why, PG_ERR_MALFORMED, fixed, c->ask.name_len);
    return topics_sound(q, c, why);
}

/* ---- refusals ------------------------------------------------------------------------------ */

static bool cursor_refused(struct pg_arena *a, struct refusal *why, enum pg_cursor_refusal reason,
                           uint64_t figure)
{
    a->metrics->refused_cursors +=
        reason == PG_CR_HELD || reason == PG_CR_FULL || reason == PG_CR_TOPICS;
    return refused(why, PG_ERR_CURSOR, reason, figure);
}

static bool is_free_for(struct pg_arena *a, const struct cursor_request *c,
                        const struct pg_session *s, struct refusal *why)
{
    const struct pg_session *holder = cursor_holder(a, c->cursor);
    return holder == NULL || holder->id == s->id ||
           cursor_refused(a, why, PG_CR_HELD, holder->pid);
}

/* Find a free row at or after *row for the sender. */
static bool row_admitted(struct pg_arena *a, uint32_t *row, struct pg_result *share,
                         struct refusal *why)
{
    if (!share_admits(a, PG_Q_UID_CURSORS, a->cursor_rows, cursors_of(a, a->call.uid), share))
        return false;
    if (wal_buffer_full(a))
        return refused(why, PG_ERR_BUSY, PG_ST_BUSY, 0);
    *row = cursor_free_row(a, *row);
    return *row != PG_NIL || cursor_refused(a, why, PG_CR_FULL, a->cursor_rows);
}

/* ---- open ---------------------------------------------------------------------------------- */

static bool is_younger(const struct pg_arena *a, const struct cursor_request *c, uint32_t topic)
{
    return topic_at(a, topic)->incarnation >= cursor_at(a, c->cursor)->incarnation;
}

/* Give the cursor a position in a topic: before the first notice of a younger topic, and at the
 * newest notice of an older topic. */
static bool position_open(struct pg_arena *a, const struct cursor_request *c, uint32_t topic,
                          uint32_t *row, struct pg_result *share, struct refusal *why)
{
    if (cursor_position(a, c->cursor, topic) != PG_NIL)
        return true;
    if (!row_admitted(a, row, share, why))
        return false;
    cursor_add(a, *row, c->cursor, topic, is_younger(a, c, topic) ? 0 : replay_newest(a, topic));
    return true;
}

static bool every_topic_open(struct pg_arena *a, const struct cursor_request *c,
                             struct pg_result *share, struct refusal *why)
{
    uint32_t row = 0;
    if (cursor_at(a, c->cursor)->every_topic)
        return true;
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if (topic_at(a, i)->name_len != 0 && topic_at(a, i)->namespace_row == c->namespace_row &&
            !is_younger(a, c, i) && !position_open(a, c, i, &row, share, why))
            return false;
    cursor_complete(a, c->cursor);
    return true;
}

/* Find or create a topic of the message: only a topic with a position keeps its row until its
 * notices are committed. */
static bool topic_open(struct pg_arena *a, const struct cursor_request *c, struct name name,
                       uint32_t *topic, struct pg_result *share, struct refusal *why)
{
    struct pg_result lacking = {0, 0};
    *topic = names_find_topic(a, c->namespace_row, name);
    if (*topic == PG_NIL && name_reserved(name))
        return refused(why, PG_ERR_DENIED, a->call.uid, 0);
    *topic = names_topic(a, c->ns, name, &lacking);
    const unsigned status = lacking.ticket & 0xff;
    if (*topic != PG_NIL)
        return true;
    if (status == PG_ST_FULL_TOPICS)
        return cursor_refused(a, why, PG_CR_TOPICS, a->topic_rows);
    if (status != PG_ST_QUOTA)
        return refused(why, PG_ERR_BUSY, status, 0);
    *share = lacking;
    return false;
}

static bool topics_open(struct pg_arena *a, const struct cursor_request *c,
                        struct pg_result *share, struct refusal *why)
{
    const uint8_t *at = c->topics;
    struct pg_tail tail;
    struct name name;
    for (uint32_t i = 0; i < c->count; i++) {
        uint32_t row = 0, topic;
        at = topic_next(at, &tail, &name);
        if (!topic_open(a, c, name, &topic, share, why) ||
            !position_open(a, c, topic, &row, share, why))
            return false;
    }
    return true;
}

static bool cursor_open(struct pg_arena *a, struct cursor_request *c, const struct pg_session *s,
                        struct pg_result *share, struct refusal *why)
{
    uint32_t row = 0;
    if (c->cursor == PG_NIL) {
        if (!row_admitted(a, &row, share, why))
            return false;
        cursor_create(a, row, c->namespace_row, c->name);
        c->cursor = row;
    }
    if (!is_free_for(a, c, s, why))
        return false;
    cursor_at(a, c->cursor)->session = s->id;
    cursor_at(a, c->cursor)->used_boot_ns = a->call.real_boot_ns;
    return c->ask.every_topic ? every_topic_open(a, c, share, why)
                              : topics_open(a, c, share, why);
}

/* ---- commit -------------------------------------------------------------------------------- */

/* Commit the notices of a topic up to the sequence of the message. */
static bool topic_commit(struct pg_arena *a, const struct cursor_request *c,
                         const struct pg_tail *tail, struct name name, struct pg_result *share,
                         struct refusal *why)
{
    const uint32_t topic = pg_find_topic(a, c->namespace_row, name.bytes, name.len);
    if (topic == PG_NIL || topic_at(a, topic)->incarnation != tail->incarnation ||
        topic_at(a, topic)->sequence < tail->sequence)
        return cursor_refused(a, why, PG_CR_STALE, a->header->stream_id);
    const uint32_t position = cursor_position(a, c->cursor, topic);
    uint32_t row = 0;
    if (position == PG_NIL && !row_admitted(a, &row, share, why))
        return false;
    if (position == PG_NIL)
        cursor_add(a, row, c->cursor, topic, tail->sequence);
    else
        cursor_move(a, position, tail->sequence);
    return true;
}

static bool cursor_commit(struct pg_arena *a, const struct cursor_request *c,
                          const struct pg_session *s, struct pg_result *share, struct refusal *why)
{
    const uint8_t *at = c->topics;
    struct pg_tail tail;
    struct name name;
    if (c->ask.stream_id != a->header->stream_id)
        return cursor_refused(a, why, PG_CR_STALE, a->header->stream_id);
    cursor_at(a, c->cursor)->session = s->id;
    cursor_at(a, c->cursor)->used_boot_ns = a->call.real_boot_ns;
    for (uint32_t i = 0; i < c->count; i++) {
        at = topic_next(at, &tail, &name);
        if (!topic_commit(a, c, &tail, name, share, why))
            return false;
    }
    return true;
}

/* ---- all actions --------------------------------------------------------------------------- */

static bool cursor_end(struct pg_arena *a, struct cursor_request *c, const struct pg_session *s)
{
    if (c->ask.action == PG_CA_DELETE) {
        cursor_delete(a, c->cursor);
        c->cursor = PG_NIL;
    } else if (cursor_at(a, c->cursor)->session == s->id) {
        cursor_at(a, c->cursor)->session = 0;
    }
    return true;
}

bool cursor_apply(struct pg_arena *a, struct cursor_request *c, const struct pg_session *s,
                  struct pg_result *share, struct refusal *why)
{
    c->cursor = c->namespace_row == PG_NIL ? PG_NIL : cursor_find(a, c->namespace_row, c->name);
    if (c->ask.action == PG_CA_OPEN)
        return cursor_open(a, c, s, share, why);
    if (c->cursor == PG_NIL)
        return c->ask.action != PG_CA_COMMIT || cursor_refused(a, why, PG_CR_UNKNOWN, 0);
    if (c->ask.action == PG_CA_CLOSE)
        return cursor_end(a, c, s);
    if (!is_free_for(a, c, s, why))
        return false;
    return c->ask.action == PG_CA_COMMIT ? cursor_commit(a, c, s, share, why)
                                         : cursor_end(a, c, s);
}

/* ---- the reply to OPEN --------------------------------------------------------------------- */

static bool is_position(const struct pg_arena *a, const struct cursor_request *c, uint32_t row)
{
    return c->ask.action == PG_CA_OPEN && cursor_at(a, row)->state == PG_CURSOR_POSITION &&
           cursor_at(a, row)->cursor == c->cursor;
}

uint32_t cursor_positions(const struct pg_arena *a, const struct cursor_request *c)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->cursor_rows; i++)
        count += is_position(a, c, i);
    return count;
}

void cursor_positions_write(const struct pg_arena *a, const struct cursor_request *c,
                            struct sink *out)
{
    for (uint32_t i = 0; i < a->cursor_rows; i++) {
        const struct pg_cursor *p = cursor_at(a, i);
        if (!is_position(a, c, i))
            continue;
        const struct name topic = topic_name(a, p->topic);
        const struct pg_tail tail = {.sequence = p->sequence, .incarnation = p->incarnation,
                                     .topic_len = (uint8_t)topic.len};
        sink_put(out, &tail, sizeof tail);
        sink_put(out, topic.bytes, topic.len);
    }
}

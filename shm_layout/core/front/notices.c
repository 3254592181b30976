/* notices.c - writes replay buffer entries as messages: in order, one message per topic and
 * call. */

#include "core/front/notices.h"
#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/names.h"
#include "core/state/replay_buffer.h"

#define BODY_MAX 1048576          /* maximum number of bytes of all message bodies in a window
                                     together */
#define NO_ENTRY 65535

struct pg_notices notices_head(const struct pg_arena *a, uint32_t topic, uint64_t first,
                               uint32_t count)
{
    const struct pg_topic *t = topic_at(a, topic);
    return (struct pg_notices){.magic = PG_NOTICE_MAGIC, .version = PG_WIRE_VERSION,
                               .stream_id = a->header->stream_id,
                               .incarnation = LOAD_RELAXED(&t->incarnation), .first = first,
                               .tail = replay_newest(a, topic),
                               .built_ns = LOAD_RELAXED(&a->header->now_ns),
                               .wall_offset_ns = LOAD_RELAXED(&a->header->wall_offset_ns),
                               .count = count};
}

struct pg_notice notice_of(const struct pg_entry *e)
{
    return (struct pg_notice){e->ticket >> 8, e->deadline_ns, e->fired_ns, e->payload_len,
                              e->key_len, (uint8_t)entry_key_type(e),
                              (uint8_t)(e->ticket & 0xff), (uint8_t)entry_flags(e), e->missed,
                              {0}};
}

/* Write frame 1: namespace 0x00 topic 0x00. The zero bytes make a prefix subscription match
 * exactly. */
static void subject_write(const struct pg_arena *a, uint32_t topic, struct sink *out)
{
    const struct name ns = namespace_name(a, topic_at(a, topic)->namespace_row);
    const struct name name = topic_name(a, topic);
    sink_put(out, ns.bytes, ns.len);
    sink_put(out, "", 1);
    sink_put(out, name.bytes, name.len);
    sink_put(out, "", 1);
}

/* ---- wake-ups ------------------------------------------------------------------------ */

/* This function alone decides which sleepers are woken. Each word is woken at most once: an entry
 * whose predecessor in the topic was visible before is the first of its topic. */
static void sleepers_wake(struct pg_arena *a)
{
    const uint64_t from = a->state.woken, visible = a->header->visible;
    for (uint64_t p = from; p < visible; p++) {
        const struct pg_entry *e = replay_at(a, p);
        if (entry_previous(e, p) <= from)
            names_wake(a, e->topic, (uint32_t)visible);
    }
    a->state.woken = visible;
}

void pg_show(struct pg_arena *a)
{
    replay_show(a);
    sleepers_wake(a);
}

uint64_t pg_sendable(const struct pg_arena *a)
{
    return wal_buffer_full(a) ? a->header->published : a->header->visible;
}

/* ---- grouping ------------------------------------------------------------------------ */

static uint64_t entry_bytes(const struct pg_entry *e)
{
    return sizeof(struct pg_notice) + e->key_len + e->payload_len;
}

/* Return the entry group of a topic. Few topics fire within one window, so the search, which begins
 * at the newest entry group, is short. In the worst case, a window with a thousand topics, the
 * searches take less than a millisecond. */
static struct pg_group *group_of(struct pg_arena *a, uint32_t topic, uint32_t *groups)
{
    for (uint32_t i = *groups; i-- > 0;)
        if (a->call.groups[i].topic == topic)
            return &a->call.groups[i];
    a->call.groups[*groups] = (struct pg_group){topic, 0, NO_ENTRY, NO_ENTRY, 0};
    return &a->call.groups[(*groups)++];
}

static void group_add(struct pg_arena *a, struct pg_group *g, uint16_t offset, uint64_t bytes)
{
    a->call.group_next[offset] = NO_ENTRY;
    if (g->count++ == 0)
        g->first = offset;
    else
        a->call.group_next[g->last] = offset;
    g->last = offset;
    g->bytes += bytes;
}

/* Collect entries into one entry group per topic, starting at `published`. Return the number of
 * entries collected. */
static uint32_t window_group(struct pg_arena *a, uint64_t bytes_max, uint32_t parts_max,
                             uint32_t *groups)
{
    const uint64_t from = a->header->published, visible = a->header->visible;
    uint64_t used = 0;
    uint32_t n = 0;
    for (*groups = 0; n < PG_NOTICE_WINDOW && from + n < visible && *groups < parts_max; n++) {
        const struct pg_entry *e = replay_at(a, from + n);
        /* Reserve space for a message head and a subject, in case this entry begins a new
         * message. */
        used += entry_bytes(e) + sizeof(struct pg_notices) + PG_NAMESPACE_MAX + PG_TOPIC_MAX + 16;
        if (used > bytes_max)
            break;
        group_add(a, group_of(a, e->topic, groups), (uint16_t)n, entry_bytes(e));
    }
    return n;
}

/* ---- writing --------------------------------------------------------------------------- */

static void group_records(const struct pg_arena *a, const struct pg_group *g, struct sink *out)
{
    const uint64_t from = a->header->published;
    for (uint32_t n = g->first; n != NO_ENTRY; n = a->call.group_next[n]) {
        const struct pg_notice record = notice_of(replay_at(a, from + n));
        sink_put(out, &record, sizeof record);
    }
    for (uint32_t n = g->first; n != NO_ENTRY; n = a->call.group_next[n]) {
        const struct pg_entry *e = replay_at(a, from + n);
        sink_put(out, blob_at(&a->blobs, e->blob), (uint64_t)e->key_len + e->payload_len);
    }
}

/* Write the subject, and pad it so that the body begins at a multiple of 8. */
static struct pg_part part_begin(const struct pg_arena *a, uint32_t topic, struct sink *out)
{
    struct pg_part part = {.subject = out->used};
    subject_write(a, topic, out);
    part.subject_bytes = (uint32_t)(out->used - part.subject);
    sink_take(out, -out->used & 7);
    part.body = out->used;
    return part;
}

static struct pg_part group_write(const struct pg_arena *a, const struct pg_group *g,
                                  struct sink *out)
{
    struct pg_part part = part_begin(a, g->topic, out);
    const uint64_t first = replay_at(a, a->header->published + g->first)->sequence;
    const struct pg_notices head = notices_head(a, g->topic, first, g->count);
    sink_put(out, &head, sizeof head);
    group_records(a, g, out);
    part.body_bytes = (uint32_t)(out->used - part.body);
    sink_take(out, -out->used & 7);
    return part;
}

uint32_t pg_notices(struct pg_arena *a, void *bytes, uint64_t size, struct pg_part *parts,
                    uint32_t parts_max, uint64_t *upto)
{
    struct sink out = {bytes, 0, size, false};
    uint32_t groups;
    *upto = a->header->published;
    if (wal_buffer_full(a))
        return 0;                 /* notices need WAL buffer space for a SENT record */
    const uint32_t taken = window_group(a, size < BODY_MAX ? size : BODY_MAX,
                                        parts_max < PG_NOTICE_WINDOW ? parts_max
                                                                     : PG_NOTICE_WINDOW,
                                        &groups);
    for (uint32_t i = 0; i < groups; i++)
        parts[i] = group_write(a, &a->call.groups[i], &out);
    *upto += taken;
    return groups;
}

/* ---- tail heartbeats ---------------------------------------------------------------------- */

uint32_t pg_tail_heartbeats(struct pg_arena *a, int64_t since_boot_ns, uint32_t *cursor,
                            void *bytes, uint64_t size, struct pg_part *parts, uint32_t parts_max)
{
    struct sink out = {bytes, 0, size, false};
    uint32_t count = 0;
    for (; *cursor < a->topic_rows && count < parts_max; ++*cursor) {
        const struct pg_topic *t = topic_at(a, *cursor);
        if (t->name_len == 0 || t->sequence == 0 || t->changed_boot_ns < since_boot_ns)
            continue;
        if (out.size - out.used < sizeof(struct pg_notices) + 256)
            break;
        struct pg_part part = part_begin(a, *cursor, &out);
        const struct pg_notices head = notices_head(a, *cursor, replay_newest(a, *cursor) + 1, 0);
        sink_put(&out, &head, sizeof head);
        part.body_bytes = sizeof head;
        parts[count++] = part;
    }
    return count;
}

/* past_notices.c - find notices in the frames of WAL files, after the replay buffer has dropped them.
 *
 * A FIRE or OUTCOME frame has no key and no payload. They are in an earlier frame, the origin: the
 * ARM, UNPARK or WATCH frame of the timer or operation. An ENTRY frame is its own origin. The
 * caller finds the files; it has checked their frames with pg_walk_next. */

#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/wal/frames.h"

static const struct pg_frame_head *frame_after(const struct pg_frame_head *f)
{
    return (const void *)((const uint8_t *)f + f->bytes);
}

static bool is_inside(const struct pg_frame_head *f, const void *end)
{
    const uint64_t left = (uint64_t)((const uint8_t *)end - (const uint8_t *)f);
    return (const void *)f < end && left >= sizeof *f && f->bytes >= sizeof *f && f->bytes <= left;
}

/* ---- notices ------------------------------------------------------------------------------- */

static bool past_of(const struct pg_frame_head *f, uint32_t topic, struct pg_past *p)
{
    const void *body = f + 1;
    const struct pg_wal_fire *fire = body;
    const struct pg_wal_outcome *outcome = body;
    const struct pg_wal_entry *entry = body;
    const struct pg_timestamps *replaced, *t = pg_frame_timestamps(f, &replaced);
    const uint64_t origin = t == NULL ? 0 : t->add_lsn;
    *p = (struct pg_past){.notice = f, .origin_lsn = origin};
    if (f->type == PG_WAL_FIRE && fire->topic == topic) {
        p->sequence = fire->sequence;
        p->ticket = fire->ticket;
    } else if (f->type == PG_WAL_OUTCOME && outcome->topic == topic && outcome->position != 0) {
        p->sequence = outcome->sequence;
        p->ticket = outcome->ticket;
    } else if (f->type == PG_WAL_ENTRY && entry->topic == topic) {
        p->sequence = entry->sequence;
        p->origin = f;
    } else {
        return false;
    }
    return true;
}

/* A later frame with the same sequence replaces an earlier one: the earlier notice was lost in a
 * recovery. */
static void past_add(struct pg_past_search *s, const struct pg_past *p)
{
    while (s->count != 0 && s->found[s->count - 1].sequence >= p->sequence)
        s->count--;
    if (s->count < s->capacity)
        s->found[s->count++] = *p;
}

/* The row of a topic may be used by several topics, one after another. */
static void topic_seen(struct pg_past_search *s, const struct pg_wal_topic *j)
{
    if (j->row != s->topic || j->sequence != 0)
        return;
    if (j->incarnation > s->incarnation)
        s->over = 1;
    else
        s->count = 0;
    s->born |= j->incarnation == s->incarnation;
}

int pg_past_find(struct pg_past_search *s, const void *frames, uint64_t bytes)
{
    const void *end = (const uint8_t *)frames + bytes;
    struct pg_past p;
    for (const struct pg_frame_head *f = frames; is_inside(f, end) && !s->over; f = frame_after(f)) {
        if (!frame_fits(f))
            continue;
        if (f->type == PG_WAL_TOPIC)
            topic_seen(s, (const void *)(f + 1));
        else if (past_of(f, s->topic, &p) && p.sequence >= s->first && p.sequence <= s->last)
            past_add(s, &p);
    }
    return s->over || s->count == s->capacity;
}

/* ---- keys and payloads ------------------------------------------------------------------------------- */

static uint64_t origin_ticket(const struct pg_frame_head *f)
{
    const void *body = f + 1;
    const struct pg_wal_arm *arm = body;
    switch (f->type) {
    case PG_WAL_ARM:               /* an ended timer that keeps its key unique has no payload */
        return arm->unique || (arm->parked && arm->payload_len == 0) ? 0 : arm->ticket;
    case PG_WAL_UNPARK: return ((const struct pg_wal_unpark *)body)->ticket;
    case PG_WAL_WATCH: return ((const struct pg_wal_watch *)body)->ticket;
    default: return 0;
    }
}

const void *pg_past_origin(const void *frames, uint64_t bytes, uint64_t lsn, uint64_t ticket)
{
    const void *end = (const uint8_t *)frames + bytes;
    for (const struct pg_frame_head *f = frames; is_inside(f, end); f = frame_after(f))
        if (f->lsn == lsn && frame_fits(f) && origin_ticket(f) == ticket)
            return f;
    return NULL;
}

/* Return the first of `count` elements, in the order of their tickets, that is not below
 * `ticket`. */
static uint32_t lower_bound(const struct pg_past *found, const uint32_t *order, uint32_t count,
                            uint64_t ticket)
{
    uint32_t low = 0;
    while (count != 0) {
        const uint32_t half = count / 2;
        const bool right = found[order[low + half]].ticket < ticket;
        low += right ? half + 1 : 0;
        count = right ? count - half - 1 : half;
    }
    return low;
}

void pg_past_match(struct pg_past *found, const uint32_t *order, uint32_t count,
                     const void *frames, uint64_t bytes, int64_t shift_ns)
{
    const void *end = (const uint8_t *)frames + bytes;
    for (const struct pg_frame_head *f = frames; is_inside(f, end); f = frame_after(f)) {
        const uint64_t ticket = frame_fits(f) ? origin_ticket(f) : 0;
        if (ticket == 0)
            continue;
        for (uint32_t i = lower_bound(found, order, count, ticket);
             i < count && found[order[i]].ticket == ticket; i++)
            if (found[order[i]].origin == NULL) {
                found[order[i]].origin = f;
                found[order[i]].origin_shift_ns = shift_ns;
            }
    }
}

/* ---- writing ------------------------------------------------------------------------------- */

struct origin {
    const uint8_t *bytes;         /* key, then payload */
    uint32_t payload_len;
    uint8_t key_len, key_type;
    int64_t armed_ns;
};

static bool origin_read(const struct pg_past *p, struct origin *o)
{
    const struct pg_frame_head *f = p->origin;
    if (f == NULL || (f->type != PG_WAL_ENTRY && origin_ticket(f) != p->ticket))
        return false;
    const void *body = f + 1;
    const struct pg_wal_arm *arm = body;
    const struct pg_wal_unpark *unpark = body;
    const struct pg_wal_watch *watch = body;
    const struct pg_wal_entry *e = body;
    if (f->type == PG_WAL_ARM)
        *o = (struct origin){(const uint8_t *)(arm + 1) + wal_row_bytes(arm->in_bulk_load) +
                                 arm->ext_len,
                             arm->payload_len, arm->key_len, arm->key_type, 0};
    else if (f->type == PG_WAL_UNPARK)
        *o = (struct origin){(const uint8_t *)(unpark + 1) +
                                 wal_row_bytes(unpark->in_bulk_load) + unpark->ext_len,
                             unpark->payload_len, unpark->key_len, unpark->key_type, 0};
    else if (f->type == PG_WAL_WATCH)
        *o = (struct origin){(const uint8_t *)(watch + 1) +
                                 watch->keys * sizeof(struct pg_wal_watch_key),
                             watch->payload_len, watch->key_len, watch->key_type,
                             watch->armed_ns + p->origin_shift_ns};
    else
        *o = (struct origin){(const uint8_t *)(e + 1) + e->jobs * sizeof(struct pg_wal_born),
                             e->payload_len, e->key_len, e->meta & 7, 0};
    return true;
}

/* Write the record of a notice. Return the number of bytes that its verdict takes; 0 = none. */
static uint32_t record_of(const struct pg_past *p, const struct origin *o, struct pg_notice *n)
{
    const struct pg_frame_head *f = p->notice;
    const void *body = f + 1;
    const struct pg_wal_fire *fire = body;
    const struct pg_wal_outcome *outcome = body;
    const struct pg_wal_entry *e = body;
    uint32_t verdict = 0;
    *n = (struct pg_notice){.ticket = p->ticket, .key_len = o->key_len, .key_type = o->key_type};
    if (f->type == PG_WAL_FIRE) {
        n->deadline_ns = fire->deadline_ns;
        n->fired_ns = fire->fired_ns;
        n->cause = PG_CAUSE_EXPIRED;
        n->flags = (uint8_t)fire->flags;
        n->missed = fire->missed;
    } else if (f->type == PG_WAL_OUTCOME) {
        n->deadline_ns = outcome->deadline_ns;
        n->fired_ns = outcome->ended_ns;
        n->cause = outcome->cause;
        n->flags = outcome->flags;
        verdict = (uint32_t)sizeof(struct pg_verdict) + (outcome->keys + 7u) / 8;
    } else {
        n->ticket = e->ticket >> 8;
        n->deadline_ns = e->deadline_ns;
        n->fired_ns = e->fired_ns;
        n->cause = (uint8_t)(e->ticket & 0xff);
        n->flags = e->meta >> 4;
        n->missed = e->missed;
    }
    n->deadline_ns += p->shift_ns;
    n->fired_ns += p->shift_ns;
    n->payload_len = verdict + o->payload_len;
    return verdict;
}

static void bytes_write(const struct pg_past *p, const struct origin *o, uint32_t verdict,
                        struct sink *out)
{
    const struct pg_frame_head *f = p->notice;
    const struct pg_wal_outcome *j = (const void *)(f + 1);
    sink_put(out, o->bytes, o->key_len);
    if (verdict != 0) {
        const struct pg_verdict v = {j->ended_ns + p->shift_ns - o->armed_ns, j->error,
                                     j->keys, (uint16_t)((j->keys + 7u) / 8)};
        sink_put(out, &v, sizeof v);
        sink_put(out, j + 1, v.bitmap_bytes);
    }
    sink_put(out, o->bytes + o->key_len, o->payload_len);
}

/* Return how many of the first notices have successive sequences, have an origin, and fit into `size`
 * bytes. */
static uint32_t run_length(const struct pg_past *found, uint32_t count, uint64_t size)
{
    uint64_t bytes = sizeof(struct pg_notices);
    struct pg_notice n;
    struct origin o;
    uint32_t i = 0;
    for (; i < count && found[i].sequence == found[0].sequence + i; i++) {
        if (!origin_read(&found[i], &o))
            break;
        record_of(&found[i], &o, &n);
        bytes += sizeof n + n.key_len + (uint64_t)n.payload_len;
        if (bytes > size)
            break;
    }
    return i;
}

uint64_t pg_past_write(const struct pg_past *found, uint32_t count, struct pg_notices *head,
                       void *bytes, uint64_t size)
{
    struct sink out = {bytes, 0, size, false};
    struct pg_notice n;
    struct origin o;
    head->count = run_length(found, count, size);
    sink_put(&out, head, sizeof *head);
    for (uint32_t i = 0; i < head->count; i++) {
        origin_read(&found[i], &o);
        record_of(&found[i], &o, &n);
        sink_put(&out, &n, sizeof n);
    }
    for (uint32_t i = 0; i < head->count; i++) {
        origin_read(&found[i], &o);
        bytes_write(&found[i], &o, record_of(&found[i], &o, &n), &out);
    }
    return out.used;
}

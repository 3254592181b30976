/* wal_buffer.c - the WAL's ring: every effect is written down here before it happens.
 *
 * A frame stands complete behind `appended` before `appended` moves over it; then comes the store
 * that makes its effect so; then `tail` moves, with the next frame or at the end of the call.
 * So a crash at any instruction leaves one frame in doubt at most, and whether its effect is
 * there can be seen. What is on disk is never ahead of the arena, and the arena at most by
 * what stands in the ring. */

#include "core/core.h"

struct pg_wal_buffer *pg_wal_buffer_of(const struct pg_arena *a) { return a->wal_buffer; }

uint64_t pg_durable_lsn(const struct pg_arena *a) { return a->durable_lsn; }

/* ---- the ring ------------------------------------------------------------------------------ */

static struct pg_frame_head *frame_at(const struct pg_arena *a, uint64_t position)
{
    return (struct pg_frame_head *)(a->ring + (position & (a->wal_buffer->size - 1)));
}

static uint64_t before_end(const struct pg_wal_buffer *s, uint64_t position)
{
    return s->size - (position & (s->size - 1));
}

/* Where the frame stands that comes at a position: no frame wraps. What is left before the
 * ring's end is a PAD, or too short even for that. */
static uint64_t past_padding(const struct pg_arena *a, uint64_t position)
{
    const uint64_t left = before_end(a->wal_buffer, position);
    if (left < sizeof(struct pg_frame_head) || frame_at(a, position)->type == PG_WAL_PAD)
        return position + left;
    return position;
}

/* For a frame of `whole` bytes; pads what is left before the ring's end when it is too short. */
static uint64_t place_for(const struct pg_arena *a, uint64_t whole)
{
    const uint64_t position = a->wal_buffer->appended, left = before_end(a->wal_buffer, position);
    if (LIKELY(whole <= left))
        return position;
    if (left >= sizeof(struct pg_frame_head))
        *frame_at(a, position) = (struct pg_frame_head){
            .bytes = (uint32_t)left, .lsn = a->wal_buffer->next_lsn - 1, .type = PG_WAL_PAD};
    return position + left;
}

bool wal_buffer_over(const struct pg_arena *a, uint64_t percent)
{
    const struct pg_wal_buffer *s = a->wal_buffer;
    return s->appended - LOAD_ACQUIRE(&s->committed) > s->size / 100 * percent;
}

bool wal_stopped(const struct pg_arena *a)
{
    return LOAD_ACQUIRE(&a->wal_buffer->state) == PG_WAL_STOPPED;
}

unsigned wal_buffer_refuses(const struct pg_arena *a)
{
    return wal_stopped(a) ? PG_ST_WAL : wal_buffer_over(a, 75) ? PG_ST_BUSY : PG_ST_NONE;
}

bool wal_buffer_admits(struct pg_arena *a, struct pg_result *r)
{
    const unsigned refusal = wal_buffer_refuses(a);
    if (refusal == PG_ST_NONE)
        return true;
    answer(r, 0, refusal, 0);
    return false;
}

bool wal_buffer_gives_up(const struct pg_arena *a, struct pg_result *r)
{
    if (wal_stopped(a))
        answer(r, 0, PG_ST_WAL, 0);
    return wal_stopped(a);
}

int pg_wal_buffer_full(const struct pg_arena *a) { return wal_buffer_full(a); }

void wal_buffer_settle(struct pg_arena *a)
{
    if (a->wal_buffer != NULL && a->wal_buffer->tail != a->wal_buffer->appended)
        STORE_RELEASE(&a->wal_buffer->tail, a->wal_buffer->appended);
}

/* The body of a frame, with `extra` bytes behind it that the caller fills, and `tail` at its end
 * for what is recorded of beginning and end. */
static void *frame_begin_with(struct pg_arena *a, enum pg_wal_type type, uint64_t extra,
                              uint64_t tail)
{
    const uint64_t bytes = frame_bytes(type, extra), whole = bytes + tail;
    wal_buffer_settle(a);
    const uint64_t position = place_for(a, whole);
    struct pg_frame_head *f = frame_at(a, position);
    memset((uint8_t *)f + bytes - 8, 0, 8);
    *f = (struct pg_frame_head){.bytes = (uint32_t)whole, .lsn = a->wal_buffer->next_lsn,
                                .type = (uint16_t)type};
    a->wal_buffer_end = position + whole;
    return f + 1;
}

static void *frame_begin(struct pg_arena *a, enum pg_wal_type type, uint64_t extra)
{
    return frame_begin_with(a, type, extra, 0);
}

static void frame_end(struct pg_arena *a)
{
    STORE_RELEASE(&a->wal_buffer->appended, a->wal_buffer_end);
    STORE_RELEASE(&a->wal_buffer->next_lsn, a->wal_buffer->next_lsn + 1);
}

/* ---- timestamps ------------------------------------------------------------------------- */

enum {
    BEGUN = sizeof(struct pg_timestamps),
    ENDED = sizeof(struct pg_asked) + sizeof(struct pg_timestamps)
};

/* The last but `n` of the frame with this body. */
static struct pg_timestamps *frame_timestamps(void *body, uint32_t n)
{
    const struct pg_frame_head *f = (const struct pg_frame_head *)body - 1;
    return (struct pg_timestamps *)((uint8_t *)body + f->bytes - sizeof *f) - 1 - n;
}

/* Of what the frame with this body arms; the row is written before the control word, too. */
static void timestamps_begin(struct pg_arena *a, uint32_t slot, void *body)
{
    struct pg_timestamps timestamps = a->batch_timestamps;
    timestamps.add_lsn = a->wal_buffer->next_lsn;
    timestamps.armed_ns = a->moment_ns;
    a->timestamps[slot] = timestamps;
    *frame_timestamps(body, 0) = timestamps;
    if (a->sequence != 0 && a->armed_count < PG_BATCH_RECORDS)
        a->armed[a->armed_count++] = slot;
}

static void timestamps_write(const struct pg_arena *a, uint32_t slot, void *body)
{
    *frame_timestamps(body, 0) = a->timestamps[slot];
}

/* Before the `count` timestamps of the frame with this body. */
static void asked_write(const struct pg_arena *a, uint32_t slot, void *body, uint32_t count,
                        bool asked)
{
    const struct pg_hot *h = &a->slots.hot[slot];
    struct pg_asked *at = (struct pg_asked *)(frame_timestamps(body, 0) + 1 - count) - 1;
    *at = (struct pg_asked){.session = asked ? a->batch_timestamps.session : 0,
                            .sequence = asked ? a->sequence : 0,
                            .deadline_ns = h->deadline_ns, .bulk_loaded = is_bulk_loaded(h)};
}

/* ---- what happens ---------------------------------------------------------------------------- */

void wal_append_namespace(struct pg_arena *a, uint32_t row, const struct pg_namespace *fields,
                          struct name name)
{
    struct pg_wal_namespace *body = frame_begin(a, PG_WAL_NAMESPACE, name.len);
    *body = wal_namespace_of(row, fields, name.len);
    memcpy(body + 1, name.bytes, name.len);
    frame_end(a);
}

void wal_append_topic(struct pg_arena *a, uint32_t row, struct name name)
{
    struct pg_wal_topic *body = frame_begin(a, PG_WAL_TOPIC, name.len);
    *body = wal_topic_of(row, &a->topics[row], name.len);
    memcpy(body + 1, name.bytes, name.len);
    frame_end(a);
}

static struct pg_wal_row row_of(const struct pg_arena *a, uint32_t bulk_load, uint64_t row)
{
    struct pg_wal_row j = {.row = row};
    memcpy(j.bulk_load, a->bulk_loads[bulk_load].id, sizeof j.bulk_load);
    return j;
}

/* Which row the record under way is, if it is one. Returns the byte behind it. */
static void *row_write(const struct pg_arena *a, void *at)
{
    if (LIKELY(!a->in_bulk_load))
        return at;
    *(struct pg_wal_row *)at = row_of(a, a->bulk_load, a->bulk_load_row);
    return (struct pg_wal_row *)at + 1;
}

/* A parked one, whose payload is there again. It lives on. */
void wal_append_unpark(struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = &a->slots.hot[slot];
    const struct pg_cold *c = &a->slots.cold[slot];
    const struct pg_wal_arm j = wal_arm_of(a, slot, h, c, ctl_ticket(h->ctl));
    const uint32_t bytes = c->key_len + c->payload_len;
    struct pg_wal_unpark *body =
        frame_begin_with(a, PG_WAL_UNPARK, wal_row_bytes(a->in_bulk_load) + bytes, BEGUN);
    *body = (struct pg_wal_unpark){.ticket = j.ticket, .deadline_ns = j.deadline_ns,
                                   .wall_ns = j.wall_ns, .at_ns = a->moment_ns, .slot = slot,
                                   .topic = j.topic, .uid = j.uid, .payload_len = j.payload_len,
                                   .counted = j.counted, .in_bulk_load = a->in_bulk_load,
                                   .key_len = j.key_len, .key_type = j.key_type,
                                   .bulk_loaded = j.bulk_loaded};
    memcpy(row_write(a, body + 1), blob_at(&a->blobs, c->blob) + c->ext_len, bytes);
    timestamps_write(a, slot, body);
    frame_end(a);
}

/* Key and payload, as they stand in the blob; or the payload that is being parked. */
static void arm_bytes(const struct pg_arena *a, const struct pg_cold *c, struct pg_wal_arm *body)
{
    const uint32_t retained = c->key_len + c->payload_len;
    uint8_t *at = row_write(a, body + 1);
    memcpy(at, blob_at(&a->blobs, c->blob) + c->ext_len, retained);
    if (UNLIKELY(a->parking != NULL) && body->payload_len != 0)
        memcpy(at + retained, a->parking->payload, body->payload_len);
}

void wal_append_arm(struct pg_arena *a, uint32_t slot, uint64_t ticket, uint32_t replaced)
{
    const struct pg_cold *c = &a->slots.cold[slot];
    const uint32_t payload = a->parking != NULL ? a->parking->payload_len : c->payload_len;
    const uint64_t extra = wal_row_bytes(a->in_bulk_load) + c->key_len + payload;
    struct pg_wal_arm *body =
        frame_begin_with(a, PG_WAL_ARM, extra, replaced == PG_NIL ? BEGUN : ENDED + BEGUN);
    *body = wal_arm_of(a, slot, &a->slots.hot[slot], c, ticket);
    body->payload_len = payload;
    body->parked = a->parking != NULL;
    body->armed_ns = a->moment_ns;
    body->armed_boot_ns = a->real_boot_ns;
    body->uid = a->uid;
    if (replaced != PG_NIL) {
        body->replaced = ctl_ticket(a->slots.hot[replaced].ctl);
        body->replaced_slot = replaced;
        *frame_timestamps(body, 1) = a->timestamps[replaced];
        asked_write(a, replaced, body, 2, true);
    }
    body->in_bulk_load = a->in_bulk_load;
    arm_bytes(a, c, body);
    timestamps_begin(a, slot, body);
    frame_end(a);
}

void wal_append_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns, int64_t wall_ns)
{
    struct pg_wal_move *body = frame_begin(a, PG_WAL_MOVE, wal_row_bytes(a->in_bulk_load));
    *body = (struct pg_wal_move){.ticket = ctl_ticket(a->slots.hot[slot].ctl),
                                 .deadline_ns = deadline_ns, .wall_ns = wall_ns,
                                 .at_ns = a->moment_ns, .slot = slot, .uid = a->uid,
                                 .in_bulk_load = a->in_bulk_load};
    row_write(a, body + 1);
    frame_end(a);
}

void wal_append_end(struct pg_arena *a, uint32_t slot, enum pg_end_cause cause)
{
    const struct pg_hot *h = &a->slots.hot[slot];
    const bool asked = cause != PG_END_DROPPED;      /* that may go on after a restart */
    struct pg_wal_end *body = frame_begin_with(a, PG_WAL_END, 0, ENDED);
    *body = (struct pg_wal_end){.ticket = ctl_ticket(h->ctl), .at_ns = a->moment_ns, .slot = slot,
                                .cause = cause, .uid = asked ? a->uid : PG_NIL,
                                .topic = h->topic, .ended_boot_ns = a->real_boot_ns};
    timestamps_write(a, slot, body);
    asked_write(a, slot, body, 1, asked);
    frame_end(a);
}

void wal_append_fire(struct pg_arena *a, uint32_t slot, const struct pg_entry *e)
{
    const struct pg_topic *t = &a->topics[e->topic];
    struct pg_wal_fire *body = frame_begin_with(a, PG_WAL_FIRE, 0, BEGUN);
    *body = (struct pg_wal_fire){.ticket = e->ticket >> 8, .deadline_ns = e->deadline_ns,
                                 .fired_ns = e->fired_ns, .position = a->header->replay_tail,
                                 .sequence = t->sequence + 1, .previous = t->last_position,
                                 .slot = slot, .topic = e->topic, .flags = entry_flags(e),
                                 .bulk_loaded = is_bulk_loaded(&a->slots.hot[slot]),
                                 .ended_boot_ns = a->real_boot_ns};
    timestamps_write(a, slot, body);
    frame_end(a);
}

void wal_append_entry(struct pg_arena *a, const struct pg_entry *e)
{
    const struct pg_topic *t = &a->topics[e->topic];
    const uint32_t bytes = e->key_len + e->payload_len;
    struct pg_wal_entry *body = frame_begin(a, PG_WAL_ENTRY, bytes);
    *body = wal_entry_of(a->header->replay_tail, e);
    body->sequence = t->sequence + 1;
    body->previous = t->last_position;
    body->uid = a->uid;
    body->ended_boot_ns = a->real_boot_ns;
    memcpy(body + 1, blob_at(&a->blobs, e->blob), bytes);
    frame_end(a);
}

void wal_append_sent(struct pg_arena *a, uint64_t upto, int64_t built_boot_ns,
                     int64_t handed_boot_ns)
{
    struct pg_wal_sent *body = frame_begin(a, PG_WAL_SENT, 0);
    *body = (struct pg_wal_sent){.from = a->header->published, .upto = upto, .built_ns = a->now_ns,
                                 .built_boot_ns = built_boot_ns, .handed_boot_ns = handed_boot_ns};
    frame_end(a);
}

void wal_append_watch(struct pg_arena *a, uint32_t slot, uint64_t ticket)
{
    const struct pg_cold *c = &a->slots.cold[slot];
    const struct pg_operation *op = operation_at(a, slot);
    const uint32_t bytes = c->key_len + c->payload_len;
    struct pg_wal_watch *body =
        frame_begin_with(a, PG_WAL_WATCH, wal_watch_extra(op->keys, bytes), BEGUN);
    struct pg_wal_watch_key *keys = (struct pg_wal_watch_key *)(body + 1);
    *body = wal_watch_of(slot, &a->slots.hot[slot], c, op, ticket);
    operation_keys_copy(a, op, (const uint8_t *)op, keys);
    memcpy(keys + op->keys, (const uint8_t *)op + c->ext_len, bytes);
    timestamps_begin(a, slot, body);
    frame_end(a);
}

void wal_append_watermark(struct pg_arena *a, uint32_t row, const struct pg_watched *fields,
                          const struct key *key)
{
    struct pg_wal_watermark *body = frame_begin(a, PG_WAL_WATERMARK, key == NULL ? 0 : key->len);
    *body = wal_watermark_of(a, row, fields, key != NULL);
    if (key != NULL) {
        body->key_len = key->len;
        memcpy(body + 1, key->bytes, key->len);
    }
    frame_end(a);
}

void wal_append_gone(struct pg_arena *a, uint32_t row)
{
    struct pg_wal_gone *body = frame_begin(a, PG_WAL_GONE, 0);
    *body = (struct pg_wal_gone){.row = row};
    frame_end(a);
}

void wal_append_outcome(struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = &a->slots.hot[slot];
    struct pg_operation *op = operation_at(a, slot);
    const struct pg_topic *t = &a->topics[h->topic];
    const uint32_t bitmap = (op->keys + 7u) / 8;
    struct pg_wal_outcome *body = frame_begin_with(a, PG_WAL_OUTCOME, bitmap, BEGUN);
    *body = (struct pg_wal_outcome){.ticket = ctl_ticket(h->ctl), .deadline_ns = h->deadline_ns,
                                    .ended_ns = op->ended_ns, .slot = slot, .topic = h->topic,
                                    .error = op->error, .keys = op->keys, .cause = op->cause,
                                    .flags = (uint8_t)(PG_E_OPERATION | late_flag(a, h)),
                                    .ended_boot_ns = a->real_boot_ns};
    if (op->notice_blob != PG_NIL) {
        body->position = a->header->replay_tail + 1;
        body->sequence = t->sequence + 1;
        body->previous = t->last_position;
    }
    memcpy(body + 1, operation_missing(op), bitmap);
    timestamps_write(a, slot, body);
    frame_end(a);
}

void wal_append_session(struct pg_arena *a, const struct pg_session *s)
{
    struct pg_wal_session *body = frame_begin(a, PG_WAL_SESSION, 0);
    *body = (struct pg_wal_session){.session = s->id, .at_boot_ns = a->real_boot_ns, .uid = s->uid,
                                    .pid = s->pid, .dropped = s->inbox_count};
    frame_end(a);
}

void wal_append_opened(struct pg_arena *a, const struct pg_session *s, uint64_t id,
                       struct name name)
{
    struct pg_wal_opened *body = frame_begin(a, PG_WAL_OPENED, name.len);
    *body = (struct pg_wal_opened){.session = id, .at_boot_ns = a->real_boot_ns, .uid = s->uid,
                                   .pid = s->pid, .name_len = name.len};
    if (name.len != 0)
        memcpy(body + 1, name.bytes, name.len);
    frame_end(a);
}

void pg_replied(struct pg_arena *a, uint64_t session, uint64_t sequence, uint32_t count,
                int64_t built_boot_ns, int64_t handed_boot_ns)
{
    if (!has_wal(a) || wal_buffer_full(a))         /* nothing that is kept depends on it */
        return;
    struct pg_wal_replied *body = frame_begin(a, PG_WAL_REPLIED, 0);
    *body = (struct pg_wal_replied){.session = session, .sequence = sequence, .count = count,
                                    .built_boot_ns = built_boot_ns,
                                    .handed_boot_ns = handed_boot_ns};
    frame_end(a);
    wal_buffer_settle(a);
}

/* Nothing depends on it, so it leaves the space to what does. */
void pg_wal_append_metrics(struct pg_arena *a, int64_t real_boot_ns)
{
    if (wal_buffer_refusal(a) != PG_ST_NONE || !has_wal(a))
        return;
    const uint32_t buckets = histograms_used(a);
    const uint64_t extra = PG_HISTOGRAMS * sizeof(struct pg_wal_histogram) +
                           buckets * sizeof(struct pg_wal_bucket);
    struct pg_wal_metrics *body = frame_begin(a, PG_WAL_METRICS, extra);
    *body = (struct pg_wal_metrics){.at_boot_ns = real_boot_ns, .histogram_count = PG_HISTOGRAMS,
                                    .bucket_count = buckets};
    histograms_write(a, (struct pg_wal_histogram *)(body + 1));
    frame_end(a);
    wal_buffer_settle(a);
}

void wal_append_bulk_load(struct pg_arena *a, const struct pg_bulk_load *fields)
{
    struct pg_wal_bulk_load *body = frame_begin(a, PG_WAL_BULK_LOAD, 0);
    *body = wal_bulk_load_of(fields);
    body->at_ns = a->moment_ns;
    frame_end(a);
}

void wal_append_done(struct pg_arena *a, uint32_t bulk_load, uint64_t row)
{
    struct pg_wal_done *body = frame_begin(a, PG_WAL_DONE, 0);
    *body = (struct pg_wal_done){.row = row_of(a, bulk_load, row), .at_ns = a->moment_ns};
    frame_end(a);
}

/* ---- the group-commit thread's side -------------------------------------------------------- */

uint64_t pg_wal_buffer_copy(const struct pg_arena *a, uint64_t from, void *out, uint64_t out_bytes,
                            uint64_t *upto, uint64_t *lsn)
{
    struct sink to = {out, 0, out_bytes, false};
    const uint64_t tail = LOAD_ACQUIRE(&a->wal_buffer->tail);
    *upto = from;
    while (*upto != tail) {
        const uint64_t at = past_padding(a, *upto);
        const struct pg_frame_head *f = frame_at(a, at);
        sink_put(&to, f, f->bytes);
        if (to.full)
            break;
        *upto = at + f->bytes;
        *lsn = f->lsn;
    }
    return to.used;
}

/* ---- the frame in doubt ------------------------------------------------------------------- */

/* Whether the effect that a frame describes is there. One function per type; each first looks
 * whether what the frame names can be there at all. */
typedef bool (*visible_fn)(const struct pg_arena *a, const void *body);

static bool slot_is(const struct pg_arena *a, uint32_t slot, uint64_t ticket, unsigned state)
{
    return slot < a->slots.capacity && a->slots.hot[slot].ctl == ctl_of(ticket, state);
}

static bool entry_is(const struct pg_arena *a, uint64_t position, uint64_t ticket)
{
    const struct pg_entry *e = replay_at(a, position);
    return e->commit == position + 1 && e->ticket >> 8 == ticket;
}

static bool namespace_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_namespace *j = body;
    if (j->row >= a->namespace_rows || a->namespaces[j->row].name_len == 0)
        return false;
    const struct pg_wal_namespace found = wal_namespace_of(j->row, &a->namespaces[j->row],
                                                           j->name_len);
    return memcmp(&found, j, sizeof found) == 0;
}

static bool topic_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_topic *j = body;
    return j->row < a->topic_rows && a->topics[j->row].name_len != 0 &&
           a->topics[j->row].incarnation == j->incarnation;
}

static bool arm_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_arm *j = body;
    return slot_is(a, j->slot, j->ticket, j->parked ? PG_S_PARKED : PG_S_ARMED);
}

static bool unpark_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_unpark *j = body;
    return slot_is(a, j->slot, j->ticket, PG_S_ARMED);
}

static bool watch_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_watch *j = body;
    return slot_is(a, j->slot, j->ticket, PG_S_ARMED);
}

/* Of a wall timer the deadline by the wall clock decides; the other follows from it. */
static bool move_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_move *j = body;
    if (!slot_is(a, j->slot, j->ticket, PG_S_ARMED) &&
        !slot_is(a, j->slot, j->ticket, PG_S_PARKED))
        return false;
    if (j->wall_ns == NO_WALL)
        return a->slots.hot[j->slot].deadline_ns == j->deadline_ns;
    return ((const struct pg_ext *)blob_at(&a->blobs, a->slots.cold[j->slot].blob))->value ==
           j->wall_ns;
}

static bool end_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_end *j = body;
    return slot_is(a, j->slot, j->ticket, PG_S_FREE);
}

static bool fire_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_fire *j = body;
    return entry_is(a, j->position, j->ticket);
}

static bool sent_visible(const struct pg_arena *a, const void *body)
{
    return a->header->published >= ((const struct pg_wal_sent *)body)->upto;
}

static bool watermark_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_watermark *j = body;
    if (j->row >= a->watermark_rows || a->watermarks[j->row].key_len == 0)
        return false;
    const struct pg_watched *l = &a->watermarks[j->row];
    return l->watermark == j->watermark && l->error == j->error &&
           (!(j->flags & PG_WM_FORGOTTEN) || l->touched_s == PG_NIL);
}

static bool gone_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_gone *j = body;
    return j->row < a->watermark_rows && a->watermarks[j->row].key_len == 0;
}

/* With a notice its entry decides; an outcome without an owner is free at once. */
static bool outcome_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_outcome *j = body;
    return (j->position != 0 && entry_is(a, j->position - 1, j->ticket)) ||
           slot_is(a, j->slot, j->ticket, PG_S_OUTCOME) ||
           slot_is(a, j->slot, j->ticket, PG_S_FREE);
}

static bool session_visible(const struct pg_arena *a, const void *body)
{
    return session_find(a, ((const struct pg_wal_session *)body)->session) == NULL;
}

static bool opened_visible(const struct pg_arena *a, const void *body)
{
    return session_find(a, ((const struct pg_wal_opened *)body)->session) != NULL;
}

static bool published_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_entry *j = body;
    return entry_is(a, j->position, j->ticket >> 8);
}

/* It has no effect, so it may always be seen. */
static bool always_visible(const struct pg_arena *a, const void *body)
{
    (void)a, (void)body;
    return true;
}

static bool bulk_load_visible(const struct pg_arena *a, const void *body)
{
    const struct pg_wal_bulk_load *j = body;
    const uint32_t bulk_load = bulk_load_find(a, j->bulk_load);
    if (bulk_load == PG_NIL || j->state == PG_BULK_LOAD_NONE)
        return bulk_load == PG_NIL && j->state == PG_BULK_LOAD_NONE;
    return a->bulk_loads[bulk_load].fencing_token == j->fencing_token &&
           a->bulk_loads[bulk_load].state == j->state;
}

static bool done_visible(const struct pg_arena *a, const void *body)
{
    return bulk_load_row_visible(a, &((const struct pg_wal_done *)body)->row);
}

static const visible_fn visible[PG_WAL_TYPES] = {
    [PG_WAL_NAMESPACE] = namespace_visible, [PG_WAL_TOPIC] = topic_visible,
    [PG_WAL_ARM] = arm_visible, [PG_WAL_MOVE] = move_visible, [PG_WAL_END] = end_visible,
    [PG_WAL_FIRE] = fire_visible, [PG_WAL_SENT] = sent_visible, [PG_WAL_WATCH] = watch_visible,
    [PG_WAL_WATERMARK] = watermark_visible, [PG_WAL_GONE] = gone_visible,
    [PG_WAL_OUTCOME] = outcome_visible,
    [PG_WAL_SESSION] = session_visible, [PG_WAL_ENTRY] = published_visible,
    [PG_WAL_OPENED] = opened_visible, [PG_WAL_REPLIED] = always_visible,
    [PG_WAL_BULK_LOAD] = bulk_load_visible, [PG_WAL_DONE] = done_visible,
    [PG_WAL_UNPARK] = unpark_visible, [PG_WAL_METRICS] = always_visible,
};

/* ---- init, recovery, check ---------------------------------------------------------------- */

void wal_buffer_init(struct pg_arena *a)
{
    if (a->wal_buffer == NULL)
        return;
    a->wal_buffer->size = a->header->regions[PG_R_WAL_BUFFER].length - PG_WAL_BUFFER_HEAD;
    a->wal_buffer->next_lsn = 1;
}

static bool positions_sound(const struct pg_arena *a, struct pg_fault *fault)
{
    const struct pg_wal_buffer *s = a->wal_buffer;
    const uint64_t committed = LOAD_ACQUIRE(&s->committed);
    if (s->size != a->header->regions[PG_R_WAL_BUFFER].length - PG_WAL_BUFFER_HEAD)
        return fault_set(fault, "wal_buffer", "bytes of the ring", 0,
                         a->header->regions[PG_R_WAL_BUFFER].length - PG_WAL_BUFFER_HEAD, s->size);
    if (committed > s->tail || s->tail > s->appended || s->appended - committed > s->size ||
        (committed | s->tail | s->appended) % 8 != 0)
        return fault_set(fault, "wal_buffer", "committed, tail and appended are out of order",
                         committed, s->tail, s->appended);
    return true;
}

/* The frame at a position that is not the end. */
static bool frame_sound(const struct pg_arena *a, uint64_t at, uint64_t end, struct pg_fault *fault)
{
    const struct pg_frame_head *f = frame_at(a, at);
    if (at >= end || end - at < sizeof *f || f->bytes > end - at ||
        f->bytes > before_end(a->wal_buffer, at) || !frame_fits(f))
        return fault_set(fault, "wal_buffer", "bytes that are no frame", at, end, f->bytes);
    return true;
}

/* Walks from `committed` to `end`; *lsn = number of the last frame, 0 = there is none. */
static bool frames_sound(const struct pg_arena *a, uint64_t end, uint64_t *lsn,
                         struct pg_fault *fault)
{
    uint64_t position = a->wal_buffer->committed;
    *lsn = 0;
    while (position != end) {
        const uint64_t at = past_padding(a, position);
        if (!frame_sound(a, at, end, fault))
            return false;
        const struct pg_frame_head *f = frame_at(a, at);
        if (*lsn != 0 && f->lsn != *lsn + 1)
            return fault_set(fault, "wal_buffer", "a hole in the numbers of frames", at, *lsn + 1,
                             f->lsn);
        *lsn = f->lsn;
        position = at + f->bytes;
    }
    return true;
}

/* Settings are stored one by one: those that the kill has cut off are in the frame. */
static void settings_finish(struct pg_arena *a, const struct pg_wal_namespace *j)
{
    if (j->row >= a->namespace_rows || a->namespaces[j->row].name_len == 0)
        return;
    struct pg_namespace *n = &a->namespaces[j->row];
    n->owner_uid = j->owner_uid;
    n->durability = j->durability;
    n->quota_timers = j->quota_timers;
    n->quota_bytes = j->quota_bytes;
    n->quota_ops = j->quota_ops;
    n->park_beyond_ns = j->park_beyond_ns;
}

/* next_lsn first: if this too is interrupted, it is decided again in the same way. `tail` follows
 * a frame that is kept with the next one, or at the end of the rebuild. */
bool wal_buffer_recover(struct pg_arena *a, struct pg_fault *why)
{
    struct pg_wal_buffer *s = a->wal_buffer;
    uint64_t lsn;
    if (s == NULL)
        return true;
    if (!positions_sound(a, why) || !frames_sound(a, s->appended, &lsn, why))
        return false;
    if (s->tail == s->appended)
        return lsn == 0 || lsn + 1 == s->next_lsn ||
               fault_set(why, "wal_buffer", "number of the next frame", s->tail, lsn + 1,
                         s->next_lsn);
    const uint64_t at = past_padding(a, s->tail);
    const struct pg_frame_head *f = frame_at(a, at);
    if (at + f->bytes != s->appended)
        return fault_set(why, "wal_buffer", "more than one frame in doubt", s->tail, at + f->bytes,
                         s->appended);
    if (f->type == PG_WAL_NAMESPACE)
        settings_finish(a, (const void *)(f + 1));
    const bool done = visible[f->type](a, f + 1);
    s->next_lsn = lsn + done;
    if (!done)
        s->appended = s->tail;
    return true;
}

static bool timestamps_sound(const struct pg_arena *a, struct pg_fault *fault)
{
    for (uint32_t i = 0; i < a->slots.capacity; i++)
        if (ctl_live(a->slots.hot[i].ctl) && a->timestamps[i].add_lsn >= a->wal_buffer->next_lsn)
            return fault_set(fault, "wal_buffer", "a timer of a record that is still to come", i,
                             a->wal_buffer->next_lsn, a->timestamps[i].add_lsn);
    return true;
}

bool wal_buffer_check(const struct pg_arena *a, struct pg_fault *fault)
{
    uint64_t lsn;
    if (a->wal_buffer == NULL)
        return true;
    if (!timestamps_sound(a, fault) || !positions_sound(a, fault) ||
        !frames_sound(a, a->wal_buffer->appended, &lsn, fault))
        return false;
    return lsn == 0 || lsn + 1 == a->wal_buffer->next_lsn ||
           fault_set(fault, "wal_buffer", "number of the next frame", a->wal_buffer->appended,
                     lsn + 1, a->wal_buffer->next_lsn);
}

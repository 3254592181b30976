/* redo.c - apply the frames of a snapshot and of the WAL to a new arena.
 *
 * A frame describes the state after a change, with the slot numbers, row numbers and positions of
 * the arena that wrote the frame. The parts of a snapshot may be from different moments. Therefore
 * all changes since its start are applied again, and after the last frame of an object the state of
 * this object is right. The tickets in a slot only rise, so an older timer never replaces a younger
 * timer. Derived state, including key hashes, is built at the end. Frames are untrusted: everything
 * that a frame refers to is checked first. */

#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/base/late_policy.h"
#include "core/arena.h"
#include "core/wal/frames.h"
#include "core/wal/wal_buffer.h"
#include "core/state/bulk_loads.h"
#include "core/state/groups.h"
#include "core/state/jobs.h"
#include "core/state/compaction.h"
#include "core/state/cursors.h"
#include "core/state/fired_spans.h"
#include "core/state/inbox.h"
#include "core/state/items.h"
#include "core/state/lateness.h"
#include "core/state/operations.h"
#include "core/state/quotas.h"
#include "core/state/replay_buffer.h"
#include "core/state/schedules.h"
#include "core/state/timers.h"
#include "core/state/watches.h"
#include "core/state/watermarks.h"

struct redo {
    struct pg_arena *a;
    const struct pg_frame_head *frame;
    const void *body;
    struct pg_redo *state;
    struct pg_fault *why;
};

static bool refuse(const struct redo *r, const char *detail, uint64_t expected, uint64_t found)
{
    return fault_set(r->why, "redo", detail, r->frame->lsn, expected, found);
}

/* True while redo is in the snapshot; false in the WAL, which is redone after the snapshot. */
static bool in_snapshot(const struct redo *r) { return r->state->next_lsn == 0; }

static bool below(const struct redo *r, const char *detail, uint64_t limit, uint64_t found)
{
    return found < limit || refuse(r, detail, limit, found);
}

/* ---- slots ------------------------------------------------------------------------------- */

static bool ticket_seen(const struct redo *r, uint64_t ticket)
{
    struct pg_header *h = r->a->header;
    if (ticket_number(ticket) == 0 || ticket_shard(ticket) >= PG_SHARDS_MAX)
        return refuse(r, "a ticket out of bounds", PG_TICKET_MAX, ticket);
    if (ticket_number(ticket) >= next_number(h))
        h->next_ticket = h->shard * PG_TICKET_SHARD + ticket_number(ticket) + 1;
    return true;
}

static bool slot_named(const struct redo *r, uint32_t slot, uint64_t ticket)
{
    return below(r, "a slot that does not exist", r->a->slots.capacity, slot) &&
           ticket_seen(r, ticket);
}

static bool key_sound(const struct redo *r, unsigned type, unsigned len, uint32_t payload_len)
{
    return below(r, "type of a key", PG_KEY_TYPES, type) &&
           (len != 0 || refuse(r, "length of a key", 1, 0)) &&
           below(r, "length of a payload", PG_PAYLOAD_MAX + 1, payload_len);
}

/* `at`: the body's end, where the items lie after the row of a bulk load, and before the key. */
static bool ext_sound(const struct redo *r, const void *at, uint32_t in_bulk_load, uint32_t ext_len,
                      uint32_t key_len)
{
    const struct items items = {(const uint8_t *)at + wal_row_bytes(in_bulk_load), ext_len};
    const struct item_text key = {items.at + ext_len, key_len};
    return LIKELY(ext_len == 0) ||
           (below(r, "length of a timer's extension items", PG_ITEMS_MAX + 1, ext_len) &&
            ((items_sound(items) && items_unique_sound(items, &key)) ||
             refuse(r, "a malformed extension item", 0, ext_len)));
}

static bool slack_sound(const struct redo *r, uint32_t log2)
{
    return below(r, "slack of a timer", PG_SLACK_LOG2_MAX + 1, log2);
}

static bool time_sound(const struct redo *r, int64_t t)
{
    return t >= 0 || refuse(r, "a time is negative", 0, (uint64_t)t);
}

static bool no_space(const struct redo *r, uint32_t granules)
{
    return refuse(r, "no space for a blob of this size",
                  (uint64_t)r->a->blobs.granules * PG_GRANULE, (uint64_t)granules * PG_GRANULE);
}

/* Account in which a slot is counted; 0 = none. */
static uint16_t account_named(const struct redo *r, uint32_t uid, unsigned counted)
{
    return counted ? account_of(r->a, uid) : 0;
}

/* Count the slot in its account. An account with timers does not look idle and is not reused. */
static void slot_count(struct pg_arena *a, uint32_t slot, int64_t sign)
{
    if (slot_cold(a, slot)->account != 0)
        account_counted(a, slot_cold(a, slot)->account, sign, 0);
}

static bool slot_holds(const struct pg_arena *a, uint32_t slot, uint64_t ticket)
{
    return ctl_live(slot_hot(a, slot)->ctl) && ctl_ticket(slot_hot(a, slot)->ctl) == ticket;
}

/* Free a slot and what it holds, if anything. `ticket`: the last ticket of the slot; 0 = the next
 * step writes the slot. */
static void slot_drop(struct pg_arena *a, uint32_t slot, uint64_t ticket)
{
    const struct pg_cold *c = slot_cold(a, slot);
    if (ctl_state(slot_hot(a, slot)->ctl) != PG_S_FREE) {
        slot_count(a, slot, -1);
        if (is_operation(a, slot))
            operation_release(a, slot);
        blobs_give(&a->blobs, c->blob, slot_granules(c));
    }
    slot_restore_free(slot_hot(a, slot), ticket);
}

static bool slot_keeps_key(const struct pg_arena *a, uint32_t slot, uint64_t ticket)
{
    return slot_hot(a, slot)->ctl == ctl_of(ticket, PG_S_UNIQUE);
}

/* Free the slot, unless a younger timer occupies it or it keeps its key unique. */
static void slot_ended(struct pg_arena *a, uint32_t slot, uint64_t ticket)
{
    if (ticket_older(ticket, ctl_ticket(slot_hot(a, slot)->ctl)) || slot_keeps_key(a, slot, ticket))
        return;
    slot_drop(a, slot, ticket);
}

/* Let the slot of an ended timer keep its key unique. The timer's entry takes over the last `entry`
 * granules of the blob. */
static void slot_end_unique(struct pg_arena *a, uint32_t slot, uint32_t entry)
{
    slot_restore_unique(slot_hot(a, slot));
    (void)unique_shrink(a, slot, entry);
}

/* End a timer at the time `at_ns` without an entry. */
static void timer_ended(struct pg_arena *a, uint32_t slot, uint64_t ticket, int64_t at_ns)
{
    if (slot_holds(a, slot, ticket) && unique_until_ns(a, slot) > at_ns)
        slot_end_unique(a, slot, 0);
    else
        slot_ended(a, slot, ticket);
}

/* Store the frame's timestamps, or `known` if the frame has none. Frames of an export of an arena
 * without a WAL have no timestamps. */
static void timestamps_write(const struct redo *r, uint32_t slot, const struct pg_timestamps *known)
{
    const struct pg_timestamps *replaced, *timestamps = pg_frame_timestamps(r->frame, &replaced);
    if (has_wal(r->a))
        *timestamps_at(r->a, slot) = timestamps != NULL ? *timestamps : *known;
}

/* Arm time of the timer in an ARM frame. */
static int64_t armed_ns_in(const struct redo *r, const struct pg_wal_arm *j)
{
    const struct pg_timestamps *replaced, *timestamps = pg_frame_timestamps(r->frame, &replaced);
    return timestamps != NULL ? timestamps->armed_ns : j->armed_ns;
}

/* LSN of the record that added the timer, for a frame without timestamps. The result is 0 in a
 * snapshot, because the frame numbers of a snapshot are not LSNs. */
static uint64_t add_lsn_of(const struct redo *r) { return in_snapshot(r) ? 0 : r->frame->lsn; }
/* ---- bulk loads ---------------------------------------------------------------------------- */

/* Set the bit of a bulk load row. If the bulk load does not exist, ignore the row, because a later
 * frame removes the bulk load. */
static bool row_done(const struct redo *r, const struct pg_wal_row *row)
{
    const uint32_t bulk_load = bulk_load_find(r->a, row->bulk_load);
    return below(r, "row of a bulk load", PG_BULK_LOAD_ROW_MAX, row->row) &&
           (bulk_load == PG_NIL || bulk_load_mark(r->a, bulk_load, row->row) ||
            refuse(r, "no space for the rows of a bulk load", r->a->bulk_load_block_rows,
                   row->row));
}

static bool redo_done(const struct redo *r)
{
    return row_done(r, &((const struct pg_wal_done *)r->body)->row);
}

static bool redo_block(const struct redo *r)
{
    const struct pg_wal_block *j = r->body;
    struct pg_wal_row row;
    memcpy(row.bulk_load, j->bulk_load, sizeof row.bulk_load);
    if (!below(r, "number of a block of rows", PG_BULK_LOAD_ROW_MAX / PG_BULK_LOAD_BLOCK_ROWS + 1,
               j->number))
        return false;
    for (uint32_t i = 0; i < PG_BULK_LOAD_BLOCK_ROWS; i++) {
        row.row = j->number * PG_BULK_LOAD_BLOCK_ROWS + i;
        if ((j->bits[i / 64] >> i % 64 & 1) != 0 && !row_done(r, &row))
            return false;
    }
    return true;
}

static bool redo_bulk_load(const struct redo *r)
{
    const struct pg_wal_bulk_load *j = r->body;
    struct pg_bulk_load l = {.fencing_token = j->fencing_token, .uid = j->uid,
                             .namespace_row = j->namespace_row,
                             .state = j->state};
    uint32_t bulk_load = bulk_load_find(r->a, j->bulk_load);
    if (!below(r, "state of a bulk load", PG_BULK_LOAD_CLOSED + 1, j->state) ||
        !below(r, "a namespace that does not exist", r->a->namespace_rows, j->namespace_row))
        return false;
    if (bulk_load != PG_NIL && j->state == PG_BULK_LOAD_NONE)
        bulk_load_drop(r->a, bulk_load);
    if (j->state == PG_BULK_LOAD_NONE)
        return true;
    if (bulk_load != PG_NIL) {
        bulk_load_at(r->a, bulk_load)->fencing_token = j->fencing_token;
        bulk_load_restore(r->a, bulk_load, j->state);
        return true;
    }
    memcpy(l.id, j->bulk_load, sizeof l.id);
    bulk_load = bulk_load_row_for_new(r->a);
    if (bulk_load == PG_NIL)
        return refuse(r, "no space for another bulk load", r->a->bulk_load_rows,
                      r->a->metrics->bulk_loads);
    bulk_load_write(r->a, bulk_load, &l);
    return true;
}

/* ---- timers --------------------------------------------------------------------------------- */

/* Store a timer in its slot. `bytes` are its items, followed by its key and its payload. */
static bool timer_write(const struct redo *r, const struct pg_wal_arm *j, const uint8_t *bytes)
{
    struct pg_arena *a = r->a;
    struct pg_hot *h = slot_hot(a, j->slot);
    const bool wall = j->wall_ns != NO_WALL;
    const uint32_t wall_bytes = wall ? sizeof(struct pg_ext) : 0;
    const struct pg_cold c = {.payload_len = j->parked ? 0 : j->payload_len, .key_len = j->key_len,
                              .key_type = j->key_type,
                              .ext_len = (uint16_t)(wall_bytes + j->ext_len)};
    const uint32_t blob = blobs_take(&a->blobs, slot_granules(&c));
    if (blob == PG_NIL)
        return no_space(r, slot_granules(&c));
    uint8_t *at = blob_at(&a->blobs, blob);
    if (wall)
        *(struct pg_ext *)at = (struct pg_ext){PG_EXT_WALL, 0, j->wall_ns};
    memcpy(at + wall_bytes, bytes, (size_t)j->ext_len + c.key_len + c.payload_len);
    *slot_cold(a, j->slot) = c;
    slot_cold(a, j->slot)->blob = blob;
    slot_cold(a, j->slot)->account = account_named(r, j->uid, j->counted);
    slot_count(a, j->slot, 1);
    slot_restore(h, &(struct pg_hot){
        .ctl = ctl_of(j->ticket, j->parked ? PG_S_PARKED : PG_S_ARMED),
        .deadline_ns = j->deadline_ns,
        .flags = (wall ? PG_F_WALL : 0) | (c.ext_len != 0 ? PG_F_EXT : 0) |
                 (items_have(bytes, j->ext_len, PG_EXT_SCHEDULE) ? PG_F_SCHEDULE : 0) |
                 (j->bulk_loaded | j->in_bulk_load ? PG_F_BULK_LOADED : 0) |
                 (uint16_t)(j->slack_log2 << PG_SLACK_SHIFT),
        .topic = (uint16_t)j->topic});
    timestamps_write(r, j->slot,
                     &(struct pg_timestamps){.add_lsn = add_lsn_of(r), .armed_ns = j->armed_ns});
    armed_note(h, slot_cold(a, j->slot), armed_ns_in(r, j));
    if (j->unique)
        slot_end_unique(a, j->slot, 0);
    return true;
}

/* Only the timer of a frame with the item UNIQUE can leave a unique key. */
static bool unique_frame_sound(const struct redo *r, const struct pg_wal_arm *j)
{
    const struct items items = {(const uint8_t *)(j + 1) + wal_row_bytes(j->in_bulk_load),
                                j->ext_len};
    return !j->unique || (!j->parked && items_unique_ns(items) != 0) ||
           refuse(r, "a unique key without its time", 1, 0);
}

static bool redo_arm(const struct redo *r)
{
    const struct pg_wal_arm *j = r->body;
    if (!slot_named(r, j->slot, j->ticket) || !time_sound(r, j->deadline_ns) ||
        !below(r, "a topic that does not exist", r->a->topic_rows, j->topic) ||
        !key_sound(r, j->key_type, j->key_len, j->payload_len) ||
        !ext_sound(r, j + 1, j->in_bulk_load, j->ext_len, j->key_len) ||
        !slack_sound(r, j->slack_log2) || !unique_frame_sound(r, j) ||
        (j->in_bulk_load && !row_done(r, (const struct pg_wal_row *)(j + 1))))
        return false;
    if (j->replaced != 0) {
        if (!slot_named(r, j->replaced_slot, j->replaced))
            return false;
        slot_ended(r->a, j->replaced_slot, j->replaced);
    }
    if (!ticket_older(ctl_ticket(slot_hot(r->a, j->slot)->ctl), j->ticket))
        return true;
    slot_drop(r->a, j->slot, 0);
    return timer_write(r, j, (const uint8_t *)(j + 1) + wal_row_bytes(j->in_bulk_load));
}

/* Arm a parked timer. The frame has the whole timer, because the slot may be missing in the
 * snapshot. */
static bool redo_unpark(const struct redo *r)
{
    const struct pg_wal_unpark *j = r->body;
    const struct pg_wal_arm arm = {.ticket = j->ticket, .deadline_ns = j->deadline_ns,
                                   .wall_ns = j->wall_ns, .armed_ns = j->at_ns, .slot = j->slot,
                                   .topic = j->topic, .uid = j->uid, .payload_len = j->payload_len,
                                   .counted = j->counted, .key_len = j->key_len,
                                   .key_type = j->key_type, .bulk_loaded = j->bulk_loaded,
                                   .ext_len = j->ext_len, .slack_log2 = j->slack_log2};
    if (!slot_named(r, j->slot, j->ticket) || !time_sound(r, j->deadline_ns) ||
        !below(r, "a topic that does not exist", r->a->topic_rows, j->topic) ||
        !key_sound(r, j->key_type, j->key_len, j->payload_len) ||
        !ext_sound(r, j + 1, j->in_bulk_load, j->ext_len, j->key_len) ||
        !slack_sound(r, j->slack_log2) ||
        (j->in_bulk_load && !row_done(r, (const struct pg_wal_row *)(j + 1))))
        return false;
    const struct pg_hot *h = slot_hot(r->a, j->slot);
    if (!ticket_older(ctl_ticket(h->ctl), j->ticket) && h->ctl != ctl_of(j->ticket, PG_S_PARKED))
        return true;
    slot_drop(r->a, j->slot, 0);
    return timer_write(r, &arm, (const uint8_t *)(j + 1) + wal_row_bytes(j->in_bulk_load));
}

static bool redo_move(const struct redo *r)
{
    const struct pg_wal_move *j = r->body;
    if (!slot_named(r, j->slot, j->ticket) || !time_sound(r, j->deadline_ns) ||
        (j->in_bulk_load && !row_done(r, (const struct pg_wal_row *)(j + 1))))
        return false;
    if (!slot_holds(r->a, j->slot, j->ticket))
        return true;
    const struct pg_hot *h = slot_hot(r->a, j->slot);
    const bool wall = j->wall_ns != NO_WALL;
    if (wall != ((h->flags & PG_F_WALL) != 0))
        return refuse(r, "the frame moves a timer of another kind", wall, h->flags);
    deadline_move(r->a, j->slot, j->deadline_ns);
    struct pg_ext *ext = (struct pg_ext *)blob_at(&r->a->blobs, slot_cold(r->a, j->slot)->blob);
    if (wall)
        ext->value = j->wall_ns;
    return true;
}

static bool redo_end(const struct redo *r)
{
    const struct pg_wal_end *j = r->body;
    if (!slot_named(r, j->slot, j->ticket))
        return false;
    if (j->cause == PG_END_COALESCED) {
        if (!below(r, "a topic that does not exist", r->a->topic_rows, j->topic))
            return false;
        topic_at(r->a, j->topic)->missed = j->missed;
    }
    const bool late = j->cause == PG_END_SKIPPED || j->cause == PG_END_COALESCED;
    if (late)
        timer_ended(r->a, j->slot, j->ticket, j->at_ns);
    else
        slot_ended(r->a, j->slot, j->ticket);
    return true;
}

static bool redo_freed(const struct redo *r)
{
    const struct pg_wal_freed *j = r->body;
    if (!slot_named(r, j->slot, j->ticket))
        return false;
    if (slot_keeps_key(r->a, j->slot, j->ticket))
        slot_drop(r->a, j->slot, j->ticket);
    return true;
}

/* ---- schedules ----------------------------------------------------------------------------- */

static void schedule_blob_drop(struct pg_arena *a, const struct pg_schedule_fields *f)
{
    if (f->state != PG_SCHEDULE_NONE)
        blobs_give(&a->blobs, f->blob, blob_granules(schedule_bytes(f)));
}

/* Give the row of a frame its blob: a new one with the bytes of the frame, or the one that it has.
 * Return false if there is no space. */
static bool schedule_blob_set(const struct redo *r, const struct pg_wal_schedule *j,
                              struct pg_schedule_fields *f)
{
    const struct pg_schedule_fields *old = schedule_fields(r->a, j->row);
    if (!j->has_blob) {
        f->blob = old->blob;
        return true;
    }
    f->blob = blobs_take(&r->a->blobs, blob_granules(schedule_bytes(f)));
    if (f->blob == PG_NIL)
        return no_space(r, blob_granules(schedule_bytes(f)));
    schedule_blob_drop(r->a, old);
    memcpy(blob_at(&r->a->blobs, f->blob), j + 1, schedule_bytes(f));
    return true;
}

static bool schedule_fields_sound(const struct redo *r, const struct pg_schedule_fields *f)
{
    return below(r, "state of a schedule", PG_SCHEDULE_PAUSED + 1, f->state) &&
           below(r, "overlap of a schedule", PG_OVERLAPS, f->overlap) &&
           (spans_sound(f) || refuse(r, "spans of a schedule", PG_FIRED_SPANS, f->spans)) &&
           below(r, "a topic that does not exist", r->a->topic_rows, f->topic) &&
           (f->state == PG_SCHEDULE_NONE ||
            key_sound(r, PG_KEY_STR, f->key_len, f->payload_len)) &&
           below(r, "length of a schedule's key", PG_SCHEDULE_KEY_MAX + 1, f->key_len) &&
           below(r, "length of a zone", PG_ZONE_MAX + 1, f->zone_len) &&
           below(r, "length of a schedule's tag", PG_TAG_MAX + 1, f->tag_len) &&
           below(r, "priority of a schedule", PG_PRIORITY_MAX + 1, f->priority) &&
           time_sound(r, f->every_ns) && time_sound(r, f->jitter_ns);
}

/* The versions of a row only rise. A frame without a blob may belong to a schedule that is not in
 * the snapshot; then a later frame removes this schedule. */
static bool redo_schedule(const struct redo *r)
{
    const struct pg_wal_schedule *j = r->body;
    struct pg_schedule_fields f = j->fields;
    if (!below(r, "a schedule that does not exist", r->a->schedule_rows, j->row) ||
        !schedule_fields_sound(r, &f))
        return false;
    const struct pg_schedule_fields *old = schedule_fields(r->a, j->row);
    const bool none = f.state == PG_SCHEDULE_NONE;
    if (j->version <= schedule_at(r->a, j->row)->version ||
        (!none && !j->has_blob && (old->state == PG_SCHEDULE_NONE ||
                                   old->put_version != f.put_version)))
        return true;
    if (none)
        schedule_blob_drop(r->a, old);
    else if (!schedule_blob_set(r, j, &f))
        return false;
    schedule_restore(r->a, j->row, j->version, &f);
    return true;
}

/* ---- the replay buffer --------------------------------------------------------------------- */

#define POSITION_MAX (1ull << 62)  /* larger positions occur only in damaged frames */

/* Drop the sent entries below position `upto`. Only subscribers with cursors ask for them, because
 * other subscribers see a new stream id. */
static void entries_drop(struct pg_arena *a, uint64_t upto)
{
    struct pg_header *h = a->header;
    const uint64_t cells_end = h->replay_head + h->replay_capacity;
    for (; h->replay_head < upto && h->replay_head < cells_end; h->replay_head++) {
        struct pg_entry *e = replay_at(a, h->replay_head);
        if (e->commit != h->replay_head + 1)
            continue;
        if (!entry_has_jobs(e))
            blobs_give(&a->blobs, e->blob, entry_granules(e));
        h->replay_bytes -= (uint64_t)entry_granules(e) * PG_GRANULE;
        e->commit = 0;
    }
    if (h->replay_head < upto)
        h->replay_head = upto;
}

/* Note that the entries below position `upto` were sent. They stay for cursors, as long as the
 * replay buffer has space for them. */
static void entries_sent(struct pg_arena *a, uint64_t upto)
{
    struct pg_header *h = a->header;
    if (h->published < upto)
        h->published = upto;
}

/* Make space for the entry at `position`, as the daemon did. */
static void entries_make_space(struct pg_arena *a, uint64_t position)
{
    struct pg_header *h = a->header;
    if (position >= h->replay_capacity)
        entries_drop(a, position - h->replay_capacity + 1);
    while (h->replay_bytes > h->replay_bytes_max && h->replay_head < h->published)
        entries_drop(a, h->replay_head + 1);
}

/* Return whether a notice may have this position. While a snapshot is taken, more notices may be
 * written than the replay buffer holds. An entry of the snapshot then shows that all notices that
 * it displaced were sent, and the notices of the frames that follow must not displace the entry. */
static bool position_sound(const struct redo *r, uint64_t position)
{
    struct pg_header *h = r->a->header;
    const uint64_t capacity = h->replay_capacity;
    if (!in_snapshot(r))
        return below(r, "the position is past the end of the replay buffer",
                     h->published + capacity, position);
    if (!below(r, "the position of a notice is too large", POSITION_MAX, position))
        return false;
    if (position >= capacity)
        entries_sent(r->a, position - capacity + 1);
    if (position < h->replay_head)
        h->replay_head = position;
    return true;
}

/* Record that a notice was written. Set *wanted to true if redo has to write the entry of the
 * notice, that is, if the entry does not exist and no frame so far says that the notice was sent.
 * In a snapshot, topics may be newer than entries, so the entries of a snapshot do not change
 * topics. */
static bool notice_seen(const struct redo *r, uint32_t topic, uint64_t position,
                        uint64_t sequence, bool *wanted)
{
    struct pg_header *h = r->a->header;
    if (!below(r, "a topic that does not exist", r->a->topic_rows, topic) ||
        !position_sound(r, position))
        return false;
    if (!in_snapshot(r)) {
        topic_at(r->a, topic)->sequence = sequence;
        topic_at(r->a, topic)->last_position = position + 1;
    }
    if (position >= h->replay_tail)
        h->replay_tail = position + 1;
    *wanted = (position >= h->published || in_snapshot(r)) &&
              replay_at(r->a, position)->commit != position + 1;
    if (*wanted)
        entries_make_space(r->a, position);
    return true;
}

static void entry_put(struct pg_arena *a, uint64_t position, const struct pg_entry *e,
                      uint64_t sequence, uint64_t previous)
{
    struct pg_header *h = a->header;
    struct pg_entry *at = replay_at(a, position);
    *at = *e;
    at->sequence = sequence;
    at->back = entry_back(position, previous);
    at->commit = position + 1;
    h->replay_bytes += (uint64_t)entry_granules(at) * PG_GRANULE;
}

/* Check the jobs that began with a notice. */
static bool births_sound(const struct redo *r, const struct pg_wal_born *born, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (!below(r, "a job that does not exist", r->a->job_slots.capacity, born[i].row) ||
            !below(r, "a consumer group that does not exist", r->a->group_rows, born[i].group) ||
            !below(r, "priority of a job", PG_PRIORITY_MAX + 1, born[i].priority))
            return false;
    return true;
}

/* Begin the jobs of a notice whose entry was written. */
static bool births_redo(const struct redo *r, const struct pg_wal_born *born, uint32_t count,
                        uint64_t position)
{
    if (count == 0 || !births_sound(r, born, count))
        return count == 0;
    return jobs_restore_born(r->a, born, count, position, r->frame->lsn) ||
           refuse(r, "a job and its notice differ", position, count);
}

/* Fire a timer. The entry takes over the timer's blob, except for the extension at the blob's
 * start. */
static void timer_fire(struct pg_arena *a, const struct pg_wal_fire *j)
{
    const struct pg_cold *c = slot_cold(a, j->slot);
    const struct pg_entry e = {.ticket = j->ticket << 8 | PG_CAUSE_EXPIRED,
                               .deadline_ns = j->deadline_ns, .fired_ns = j->fired_ns,
                               .blob = c->blob + c->ext_len / PG_GRANULE,
                               .payload_len = c->payload_len, .topic = (uint16_t)j->topic,
                               .key_len = c->key_len,
                               .meta = (uint8_t)(c->key_type | j->flags << 4),
                               .missed = j->missed};
    if (unique_until_ns(a, j->slot) > j->fired_ns) {
        slot_end_unique(a, j->slot, entry_granules(&e));
    } else {
        if (c->ext_len != 0)
            blobs_give(&a->blobs, c->blob, c->ext_len / PG_GRANULE);
        slot_count(a, j->slot, -1);
        slot_restore_free(slot_hot(a, j->slot), j->ticket);
    }
    entry_put(a, j->position, &e, j->sequence, j->previous);
}

static bool redo_fire(const struct redo *r)
{
    const struct pg_wal_fire *j = r->body;
    bool wanted;
    if (!slot_named(r, j->slot, j->ticket) || !below(r, "flags of a notice", 16, j->flags) ||
        !slack_sound(r, j->slack_log2) ||
        !notice_seen(r, j->topic, j->position, j->sequence, &wanted))
        return false;
    topic_at(r->a, j->topic)->missed = 0;
    if (!slot_holds(r->a, j->slot, j->ticket) || !wanted) {
        timer_ended(r->a, j->slot, j->ticket, j->fired_ns);
        return true;
    }
    if (is_operation(r->a, j->slot))
        return refuse(r, "the frame fires an operation as a timer", 0, j->slot);
    timer_fire(r->a, j);
    return births_redo(r, (const struct pg_wal_born *)(j + 1), j->jobs, j->position);
}

static bool redo_entry(const struct redo *r)
{
    const struct pg_wal_entry *j = r->body;
    const struct pg_entry e = {.ticket = j->ticket, .deadline_ns = j->deadline_ns,
                               .fired_ns = j->fired_ns, .payload_len = j->payload_len,
                               .topic = (uint16_t)j->topic, .key_len = j->key_len,
                               .meta = j->meta, .missed = j->missed};
    bool wanted;
    if (!ticket_seen(r, j->ticket >> 8) ||
        !notice_seen(r, j->topic, j->position, j->sequence, &wanted))
        return false;
    if (!wanted)
        return true;
    const uint32_t blob = blobs_take(&r->a->blobs, entry_granules(&e));
    if (blob == PG_NIL)
        return no_space(r, entry_granules(&e));
    const struct pg_wal_born *born = (const struct pg_wal_born *)(j + 1);
    memcpy(blob_at(&r->a->blobs, blob), born + j->jobs, (size_t)j->key_len + j->payload_len);
    entry_put(r->a, j->position, &e, j->sequence, j->previous);
    replay_at(r->a, j->position)->blob = blob;
    return births_redo(r, born, j->jobs, j->position);
}

static bool redo_sent(const struct redo *r)
{
    const struct pg_wal_sent *j = r->body;
    struct pg_header *h = r->a->header;
    if (!below(r, "the frame marks notices as sent that do not exist", h->replay_tail + 1, j->upto))
        return false;
    entries_sent(r->a, j->upto);
    return true;
}

/* ---- operations --------------------------------------------------------------------------- */

static bool redo_watch(const struct redo *r)
{
    const struct pg_wal_watch *j = r->body;
    const struct pg_wal_watch_key *keys = (const struct pg_wal_watch_key *)(j + 1);
    if (!slot_named(r, j->slot, j->ticket) || !time_sound(r, j->deadline_ns) ||
        !time_sound(r, j->armed_ns) ||
        !below(r, "a topic that does not exist", r->a->topic_rows, j->topic) ||
        !key_sound(r, j->key_type, j->key_len, j->payload_len) ||
        !below(r, "kind of a condition", PG_CONDITIONS, j->condition) ||
        !below(r, "watch keys of an operation", PG_WATCH_KEYS_MAX, j->keys - 1ull) ||
        (j->condition == PG_C_QUORUM &&
         !below(r, "quorum of an operation", j->keys, j->threshold - 1)))
        return false;
    for (uint32_t n = 0; n < j->keys; n++)
        if (!below(r, "a watch key that does not exist", r->a->watermark_rows, keys[n].row))
            return false;
    if (!ticket_older(ctl_ticket(slot_hot(r->a, j->slot)->ctl), j->ticket))
        return true;
    slot_drop(r->a, j->slot, 0);
    if (!operation_restore(r->a, j, keys, account_named(r, j->uid, j->counted)))
        return refuse(r, "no space for an operation with so many watch keys",
                      watches_free(r->a), j->keys);
    slot_count(r->a, j->slot, 1);
    timestamps_write(r, j->slot,
                     &(struct pg_timestamps){.add_lsn = add_lsn_of(r), .session = j->session,
                                             .armed_ns = j->armed_ns});
    return true;
}

static const struct pg_wal_born *outcome_births(const struct pg_wal_outcome *j)
{
    const size_t bitmap = (j->keys + 7u) / 8;
    return (const struct pg_wal_born *)((const uint8_t *)(j + 1) + (bitmap + 7) / 8 * 8);
}

/* End an operation. The result is kept only in its notice, because redo restores no session that
 * could ask for it. */
static bool redo_outcome(const struct redo *r)
{
    const struct pg_wal_outcome *j = r->body;
    bool wanted = false;
    if (!slot_named(r, j->slot, j->ticket) || !time_sound(r, j->ended_ns) ||
        !below(r, "flags of a notice", 16, j->flags) ||
        (j->position != 0 &&
         !notice_seen(r, j->topic, j->position - 1, j->sequence, &wanted)))
        return false;
    if (slot_holds(r->a, j->slot, j->ticket)) {
        if (!is_operation(r->a, j->slot) || operation_at(r->a, j->slot)->keys != j->keys)
            return refuse(r, "the outcome belongs to another operation", j->keys, j->slot);
        operation_end_restore(r->a, j, (const uint8_t *)(j + 1));
        if (wanted && operation_at(r->a, j->slot)->notice_blob != PG_NIL) {
            const struct pg_entry e = operation_notice(r->a, j->slot, j->flags);
            entry_put(r->a, j->position - 1, &e, j->sequence, j->previous);
            operation_at(r->a, j->slot)->notice_blob = PG_NIL;
            if (!births_redo(r, outcome_births(j), j->jobs, j->position - 1))
                return false;
        }
    }
    slot_ended(r->a, j->slot, j->ticket);
    return true;
}

static void watermark_give(struct pg_arena *a, struct pg_watermark *l)
{
    if (l->key_len == 0)
        return;
    if (watermark_granules(l) != 0)
        blobs_give(&a->blobs, watermark_blob(l), watermark_granules(l));
    account_watch_key_counted(a, l->account, -1);
    l->key_len = 0;
}

static bool watermark_key_write(const struct redo *r, const struct pg_wal_watermark *j)
{
    struct pg_watermark *l = watermark_at(r->a, j->row);
    if (!key_sound(r, j->key_type, j->key_len, 0) ||
        !below(r, "a namespace that does not exist", r->a->namespace_rows, j->namespace_row))
        return false;
    watermark_give(r->a, l);
    *l = (struct pg_watermark){.root = PG_NIL, .first = PG_NIL, .latest = PG_NIL,
                             .namespace_row = (uint16_t)j->namespace_row,
                             .key_type = j->key_type,
                             .account = account_named(r, j->uid, j->uid != PG_NIL)};
    uint8_t *at = l->key;
    if (j->key_len > sizeof l->key) {
        const uint32_t blob = blobs_take(&r->a->blobs, blob_granules(j->key_len));
        if (blob == PG_NIL)
            return no_space(r, blob_granules(j->key_len));
        memcpy(l->key, &blob, sizeof blob);
        at = blob_at(&r->a->blobs, blob);
    }
    memcpy(at, j + 1, j->key_len);
    l->key_len = j->key_len;
    /* Count the key in its account, so that the account does not look idle and is not reused. */
    account_watch_key_counted(r->a, l->account, 1);
    return true;
}

static bool redo_watermark(const struct redo *r)
{
    const struct pg_wal_watermark *j = r->body;
    if (!below(r, "a watch key that does not exist", r->a->watermark_rows, j->row) ||
        !below(r, "value of a watermark", PG_WATERMARK_MAX + 1ull, j->watermark) ||
        ((j->flags & PG_WM_BORN) && !watermark_key_write(r, j)))
        return false;
    struct pg_watermark *l = watermark_at(r->a, j->row);
    if (l->key_len == 0)
        return true;              /* the row was freed before the snapshot reached it */
    l->watermark = j->watermark;
    l->error = j->error;
    l->touched_s = j->flags & PG_WM_FORGOTTEN ? PG_NIL : 0;
    return true;
}

static bool redo_gone(const struct redo *r)
{
    const struct pg_wal_gone *j = r->body;
    if (!below(r, "a watch key that does not exist", r->a->watermark_rows, j->row))
        return false;
    watermark_give(r->a, watermark_at(r->a, j->row));
    return true;
}

static bool redo_nothing(const struct redo *r)
{
    (void)r;
    return true;
}

/* ---- consumer groups ------------------------------------------------------------------------- */

static bool redo_group(const struct redo *r)
{
    const struct pg_wal_consumer_group *j = r->body;
    const uint32_t *topics = (const uint32_t *)(j + 1);
    if (!below(r, "a consumer group that does not exist", r->a->group_rows, j->row) ||
        !below(r, "a namespace that does not exist", r->a->namespace_rows, j->namespace_row) ||
        !below(r, "length of a consumer group's name", PG_GROUP_NAME_MAX, j->name_len - 1ull) ||
        !below(r, "topics of a consumer group", PG_GROUP_TOPICS_MAX + 1, j->topics))
        return false;
    for (uint32_t i = 0; i < j->topics; i++)
        if (!below(r, "a topic that does not exist", r->a->topic_rows, topics[i]))
            return false;
    struct pg_consumer_group fields = {.name_len = j->name_len, .namespace_row = j->namespace_row,
                                       .incarnation = j->incarnation, .settings = j->settings,
                                       .created_uid = j->created_uid, .created_ns = j->at_ns};
    memcpy(fields.name, topics + j->topics, j->name_len);
    if (j->topics == 0) {
        jobs_restore_end_of_group(r->a, j->row, j->incarnation);
        group_restore_end(r->a, j->row);
        return true;
    }
    return group_restore(r->a, j->row, &fields, topics, j->topics) ||
           refuse(r, "no space for another consumer group", r->a->group_topic_rows, j->topics);
}

static bool redo_job(const struct redo *r)
{
    const struct pg_wal_job *j = r->body;
    if (!below(r, "a job that does not exist", r->a->job_slots.capacity, j->row) ||
        !below(r, "a consumer group that does not exist", r->a->group_rows, j->group) ||
        !below(r, "a topic that does not exist", r->a->topic_rows, j->topic) ||
        !ticket_seen(r, j->ticket >> 8) ||
        !below(r, "type of a key", PG_KEY_TYPES, j->meta & 15) ||
        !below(r, "state of a job", PG_JOB_STATES, j->control & 0xff) ||
        !below(r, "priority of a job", PG_PRIORITY_MAX + 1, j->priority) ||
        !below(r, "length of an error text", PG_JOB_ERROR_MAX + 1, j->error_len) ||
        !below(r, "length of a payload", PG_PAYLOAD_MAX + PG_VERDICT_MAX + 1, j->payload_len))
        return false;
    if (j->key_len != 0 && !job_matches(r->a, j))
        return refuse(r, "a job and its notice differ", j->ticket >> 8, j->payload_len);
    return job_restore(r->a, j, (const uint8_t *)(j + 1), r->frame->lsn) || no_space(r, j->payload_len);
}

/* ---- names -------------------------------------------------------------------------------- */

static bool redo_namespace(const struct redo *r)
{
    const struct pg_wal_namespace *j = r->body;
    if (!below(r, "a namespace that does not exist", r->a->namespace_rows, j->row) ||
        !below(r, "length of a namespace's name", PG_NAMESPACE_MAX, j->name_len - 1ull))
        return false;
    struct pg_namespace *n = namespace_at(r->a, j->row);
    if (n->name_len != 0 && (n->name_len != j->name_len || memcmp(n->name, j + 1, j->name_len)))
        return refuse(r, "a namespace has two names", n->name_len, j->name_len);
    *n = (struct pg_namespace){.name_len = j->name_len, .shard = j->shard,
                               .owner_uid = j->owner_uid, .durability = j->durability,
                               .quota_timers = j->quota_timers, .quota_bytes = j->quota_bytes,
                               .quota_ops = j->quota_ops, .park_beyond_ns = j->park_beyond_ns,
                               .late_per_s = j->late_per_s, .paused = j->paused,
                               .created_uid = j->created_uid};
    memcpy(n->name, j + 1, j->name_len);
    return true;
}

static bool late_setting_sound(const struct redo *r, uint64_t late)
{
    return late_sound(late_policy(late), late_grace_ns(late)) ||
           refuse(r, "late policy of a topic", PG_LATE_POLICIES, late);
}

static bool redo_topic(const struct redo *r)
{
    const struct pg_wal_topic *j = r->body;
    if (!below(r, "a topic that does not exist", r->a->topic_rows, j->row) ||
        !below(r, "a namespace that does not exist", r->a->namespace_rows, j->namespace_row) ||
        !below(r, "length of a topic's name", PG_TOPIC_MAX + 1, j->name_len) ||
        !below(r, "slack of a topic", PG_SLACK_MAX_NS + 1ull, (uint64_t)j->slack_ns) ||
        !late_setting_sound(r, j->late) ||
        !below(r, "an incarnation out of bounds", UINT64_MAX - 1, j->incarnation - 1))
        return false;
    struct pg_topic *t = topic_at(r->a, j->row);
    if (j->incarnation >= r->a->header->next_incarnation)
        r->a->header->next_incarnation = j->incarnation + 1;
    if (t->incarnation > j->incarnation)
        return true;
    if (t->incarnation != j->incarnation)
        /* The daemon reuses a row only if the replay buffer has no notice of its topic. */
        entries_drop(r->a, t->last_position < r->a->header->published
                               ? t->last_position
                               : r->a->header->published);
    *t = (struct pg_topic){.name_len = j->name_len + 1, .namespace_row = j->namespace_row,
                           .incarnation = j->incarnation, .sequence = j->sequence,
                           .last_position = j->last_position, .slack_ns = j->slack_ns,
                           .late = j->late, .missed = j->missed, .paused = j->paused,
                           .priority = j->priority,
                           .created_uid = j->created_uid, .groups = t->groups};
    memcpy(t->name, j + 1, j->name_len);
    return true;
}

/* ---- cursors ------------------------------------------------------------------------------- */

static bool redo_cursor(const struct redo *r)
{
    const struct pg_wal_cursor *j = r->body;
    const struct name name = {(const char *)(j + 1), j->name_len};
    if (!below(r, "state of a cursor", PG_CURSOR_POSITION + 1, j->state) ||
        !below(r, "a namespace that does not exist", r->a->namespace_rows, j->namespace_row) ||
        !below(r, "a topic that does not exist", r->a->topic_rows, j->topic) ||
        !below(r, "length of a cursor's name", PG_CURSOR_MAX, j->name_len - 1ull))
        return false;
    return cursor_restore(r->a, j, name) ||
           refuse(r, "no space for the rows of cursors", r->a->cursor_rows, j->state);
}

/* ---- a snapshot's first and last frame ----------------------------------------------------- */

static bool redo_head(const struct redo *r)
{
    const struct pg_wal_head *j = r->body;
    struct pg_header *h = r->a->header;
    const uint64_t number = j->next_ticket - j->shard * PG_TICKET_SHARD;
    if (!below(r, "replay buffer entries of the new arena",
               h->replay_capacity + 1ull, j->replay_capacity) ||
        !below(r, "the published position is past the tail of the replay buffer",
               j->replay_tail + 1, j->published) ||
        !below(r, "the position of a notice is too large", POSITION_MAX, j->replay_tail) ||
        !below(r, "notices not sent yet", j->replay_capacity + 1ull,
               j->replay_tail - j->published) ||
        !below(r, "the next ticket", PG_TICKET_SHARD, number - 1))
        return false;
    h->epoch = j->epoch;
    h->next_ticket = h->shard * PG_TICKET_SHARD + number;
    h->next_incarnation = j->next_incarnation;
    h->replay_head = h->published = j->published;
    h->replay_tail = j->replay_tail;
    h->wall_offset_ns = j->wall_offset_ns;
    return true;
}

static bool redo_last(const struct redo *r)
{
    const struct pg_wal_last *j = r->body;
    if (j->frames + 1 != r->frame->lsn)
        return refuse(r, "number of frames of the snapshot", j->frames + 1, r->frame->lsn);
    r->state->next_lsn = j->start_lsn == 0 ? 1 : j->start_lsn;
    r->state->end_lsn = j->end_lsn;
    return true;
}

int pg_redo_config(const void *frame, uint64_t bytes, struct pg_config *c, struct pg_fault *why)
{
    const struct pg_frame_head *f = frame;
    const struct pg_wal_head *j = (const void *)(f + 1);
    memset(why, 0, sizeof *why);
    if (bytes < frame_bytes(PG_WAL_HEAD, 0) || f->type != PG_WAL_HEAD || f->lsn != 1 ||
        !frame_fits(f))
        return fault_set(why, "redo", "a snapshot without its first frame", 0, PG_WAL_HEAD,
                         bytes < sizeof *f ? 0 : f->type);
    c->payload_bytes = j->payload_bytes;
    c->replay_bytes_max = j->replay_bytes_max;
    c->wal_buffer_bytes = j->wal_buffer_bytes;
    c->watermark_ttl_ns = j->watermark_ttl_ns;
    c->inbox_max = j->inbox_max;
    c->tick_ns = j->tick_ns;
    c->now_ns = j->now_ns;
    c->wall_offset_ns = j->wall_offset_ns;
    c->created_wall_ns = j->created_wall_ns;
    c->wall_origin_ns = j->wall_origin_ns;
    memcpy(c->uuid, j->uuid, sizeof c->uuid);
    c->capacity = j->capacity;
    c->replay_capacity = j->replay_capacity;
    c->fanout = j->fanout;
    c->namespaces = j->namespaces;
    c->topics = j->topics;
    c->watches = j->watches;
    c->watermarks = j->watermarks;
    c->accounts = j->accounts;
    c->bulk_loads = j->bulk_loads;
    c->bulk_load_blocks = j->bulk_load_blocks;
    c->groups = j->groups;
    c->jobs = j->jobs;
    c->schedules = j->schedules;
    c->cursors = j->cursors;
    c->clock_kind = j->clock_kind;
    c->shard = j->shard;
    c->shards = j->shards;
    return 1;
}

/* ---- frames in order ---------------------------------------------------------------------- */

enum { IN_SNAPSHOT = 1, IN_WAL = 2 };
static const struct rule {
    bool (*redo)(const struct redo *r);
    uint8_t where;
} rules[PG_WAL_TYPES] = {
    [PG_WAL_NAMESPACE] = {redo_namespace, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_TOPIC] = {redo_topic, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_ARM] = {redo_arm, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_MOVE] = {redo_move, IN_WAL},
    [PG_WAL_END] = {redo_end, IN_WAL},
    [PG_WAL_FIRE] = {redo_fire, IN_WAL},
    [PG_WAL_SENT] = {redo_sent, IN_WAL},
    [PG_WAL_WATCH] = {redo_watch, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_WATERMARK] = {redo_watermark, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_GONE] = {redo_gone, IN_WAL},
    [PG_WAL_OUTCOME] = {redo_outcome, IN_WAL},
    [PG_WAL_SESSION] = {redo_nothing, IN_WAL},
    [PG_WAL_HEAD] = {redo_head, IN_SNAPSHOT},
    [PG_WAL_ENTRY] = {redo_entry, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_LAST] = {redo_last, IN_SNAPSHOT},
    [PG_WAL_OPENED] = {redo_nothing, IN_WAL},
    [PG_WAL_REPLIED] = {redo_nothing, IN_WAL},
    [PG_WAL_BULK_LOAD] = {redo_bulk_load, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_DONE] = {redo_done, IN_WAL},
    [PG_WAL_UNPARK] = {redo_unpark, IN_WAL},
    [PG_WAL_BLOCK] = {redo_block, IN_SNAPSHOT},
    [PG_WAL_METRICS] = {redo_nothing, IN_WAL},
    [PG_WAL_CONSUMER_GROUP] = {redo_group, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_JOB] = {redo_job, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_SCHEDULE] = {redo_schedule, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_CURSOR] = {redo_cursor, IN_SNAPSHOT | IN_WAL},
    [PG_WAL_FREED] = {redo_freed, IN_WAL},
};

static bool lacks_space(const struct redo *r)
{
    return strncmp(r->why->detail, "no space", strlen("no space")) == 0;
}

/* Apply a frame. If there is no space for its effect, apply it again without the sent entries: the
 * daemon may have dropped some of them earlier. A rule that finds no space can be repeated. */
static bool rule_apply(const struct redo *r)
{
    struct pg_header *h = r->a->header;
    if (rules[r->frame->type].redo(r))
        return true;
    if (!lacks_space(r) || h->replay_head >= h->published)
        return false;
    entries_drop(r->a, h->published);
    memset(r->why, 0, sizeof *r->why);
    return rules[r->frame->type].redo(r);
}

static bool snapshot_redo(const struct redo *r)
{
    const uint64_t number = r->state->frames + 1;
    if (r->frame->lsn != number)
        return refuse(r, "the snapshot has a gap", number, r->frame->lsn);
    if ((number == 1) != (r->frame->type == PG_WAL_HEAD))
        return refuse(r, "a snapshot without its first frame", PG_WAL_HEAD, r->frame->type);
    r->state->frames++;
    return rule_apply(r);
}

static bool wal_redo(const struct redo *r)
{
    if (r->frame->lsn < r->state->next_lsn)
        return true;
    if (r->frame->lsn != r->state->next_lsn)
        return refuse(r, "the WAL has a gap", r->state->next_lsn, r->frame->lsn);
    r->state->next_lsn++;
    r->a->metrics->records_redone++;
    return rule_apply(r);
}

static bool frame_redo(const struct redo *r)
{
    const bool snapshot = in_snapshot(r);
    if (!frame_fits(r->frame))
        return refuse(r, "bytes that do not form a frame", PG_WAL_TYPES, r->frame->type);
    if (!(rules[r->frame->type].where & (snapshot ? IN_SNAPSHOT : IN_WAL)))
        return refuse(r, "a frame is in the wrong kind of file", snapshot, r->frame->type);
    if (!(snapshot ? snapshot_redo(r) : wal_redo(r)))
        return false;
    while (compaction_step(r->a)) /* as between two calls of the loop */
        continue;
    return true;
}

int pg_redo(struct pg_arena *a, struct pg_redo *state, const void *frames, uint64_t bytes,
            struct pg_fault *why)
{
    const uint8_t *at = frames, *end = at + bytes;
    memset(why, 0, sizeof *why);
    while (at != end) {
        const struct pg_frame_head *f = (const void *)at;
        const struct redo r = {a, f, f + 1, state, why};
        if ((uint64_t)(end - at) < sizeof *f || f->bytes < sizeof *f || f->bytes % 8 != 0 ||
            f->bytes > (uint64_t)(end - at))
            return fault_set(why, "redo", "bytes that do not form a frame",
                             (uint64_t)(at - (const uint8_t *)frames), sizeof *f, bytes);
        if (!frame_redo(&r))
            return 0;
        at += f->bytes;
    }
    return 1;
}

int pg_redo_file(struct pg_arena *a, struct pg_redo *state, struct pg_walk *walk,
                 struct pg_fault *why)
{
    const struct pg_frame_head *f;
    memset(why, 0, sizeof *why);
    while ((f = pg_walk_next(walk)) != NULL) {
        const struct redo r = {a, f, f + 1, state, why};
        if (!frame_redo(&r))
            return 0;
    }
    return 1;
}

/* ---- the end ------------------------------------------------------------------------------- */

/* Number of tickets to skip after a recovery. A power cut may have lost frames that issued tickets.
 * The WAL buffer holds fewer frames than this number. */
#define TICKETS_LOST (PG_WAL_BUFFER_MAX / 64)

static bool is_whole(const struct pg_arena *a, const struct pg_redo *state, struct pg_fault *why)
{
    const struct pg_header *h = a->header;
    if (state->next_lsn == 0)
        return fault_set(why, "redo", "a snapshot without its last frame", state->frames,
                         PG_WAL_LAST, 0);
    if (state->next_lsn <= state->end_lsn)
        return fault_set(why, "redo", "the WAL ends before the snapshot", state->next_lsn,
                         state->end_lsn, state->next_lsn - 1);
    for (uint64_t p = h->published; p < h->replay_tail; p++)
        if (replay_at(a, p)->commit != p + 1)
            return fault_set(why, "redo", "a notice that was not sent is missing", p, p + 1,
                             replay_at(a, p)->commit);
    return true;
}

static int64_t shifted(int64_t t, int64_t by)
{
    int64_t sum;
    if (__builtin_add_overflow(t, by, &sum))
        return by > 0 ? INT64_MAX : 0;
    return sum < 0 ? 0 : sum;
}

static uint32_t hash_in_topic(const struct pg_arena *a, uint32_t topic, unsigned type,
                              const uint8_t *key, unsigned len)
{
    return key_hash(a, topic_at(a, topic)->namespace_row, type, key, len);
}

/* Shift a time by `by`. The result may be negative, which is a time before the boot. 0 means
 * unknown and stays 0. */
static int64_t moved(int64_t t, int64_t by)
{
    return t == 0 || __builtin_add_overflow(t, by, &t) ? 0 : t;
}

/* Shift the timestamps of a slot. With a virtual clock the real times are cleared, because it is
 * unknown which boot they belong to. */
static void timestamps_finish(struct pg_arena *a, uint32_t slot, int64_t shift_ns)
{
    struct pg_timestamps *timestamps = timestamps_at(a, slot);
    const bool real = a->header->clock_kind == PG_CLOCK_BOOT;
    timestamps->armed_ns = moved(timestamps->armed_ns, shift_ns);
    timestamps->sent_boot_ns = real ? moved(timestamps->sent_boot_ns, shift_ns) : 0;
    timestamps->received_boot_ns = real ? moved(timestamps->received_boot_ns, shift_ns) : 0;
    timestamps->applied_boot_ns = real ? moved(timestamps->applied_boot_ns, shift_ns) : 0;
    timestamps->done_boot_ns = real ? moved(timestamps->done_boot_ns, shift_ns) : 0;
}

static void unique_shift(struct pg_arena *a, uint32_t slot, int64_t shift_ns)
{
    struct pg_ext *item = slot_unique(a, slot);
    if (item == NULL)
        return;
    const int64_t until_ns = shifted(item->value, shift_ns);
    item->value = until_ns > 0 ? until_ns : 1;    /* the item has no time 0 */
    if (ctl_unique(slot_hot(a, slot)->ctl))
        slot_hot(a, slot)->deadline_ns = item->value;
}

static void slots_finish(struct pg_arena *a, int64_t shift_ns)
{
    for (uint32_t i = 0; i < a->slots.capacity; i++) {
        struct pg_hot *h = slot_hot(a, i);
        const struct pg_cold *c = slot_cold(a, i);
        if (ctl_state(h->ctl) == PG_S_FREE)
            continue;
        h->hash = hash_in_topic(a, h->topic, c->key_type, blob_at(&a->blobs, c->blob) + c->ext_len,
                                c->key_len);
        h->deadline_ns = shifted(h->deadline_ns, shift_ns);
        unique_shift(a, i, shift_ns);
        if (is_operation(a, i))
            operation_at(a, i)->armed_ns = shifted(operation_at(a, i)->armed_ns, shift_ns);
        if (has_wal(a))
            timestamps_finish(a, i, shift_ns);
    }
}

/* Keep the sent entries that have no gap behind them. A snapshot leaves out entries that were
 * dropped while it was taken. */
static void replay_head_set(struct pg_arena *a)
{
    const struct pg_header *h = a->header;
    uint64_t head = h->published;
    while (head > h->replay_head && h->replay_tail - head < h->replay_capacity &&
           replay_at(a, head - 1)->commit == head)
        head--;
    a->header->replay_head = head;
}

static void replay_finish(struct pg_arena *a, int64_t shift_ns)
{
    replay_head_set(a);
    for (uint64_t p = a->header->replay_head; p < a->header->replay_tail; p++) {
        struct pg_entry *e = replay_at(a, p);
        e->hash = hash_in_topic(a, e->topic, entry_key_type(e), blob_at(&a->blobs, e->blob),
                                e->key_len);
        e->deadline_ns = shifted(e->deadline_ns, shift_ns);
        e->fired_ns = shifted(e->fired_ns, shift_ns);
    }
}

static void watermarks_finish(struct pg_arena *a)
{
    for (uint32_t row = 0; row < a->watermark_rows; row++) {
        struct pg_watermark *l = watermark_at(a, row);
        const uint8_t *key = watermark_granules(l) == 0 ? l->key
                                                        : blob_at(&a->blobs, watermark_blob(l));
        if (l->key_len == 0)
            continue;
        l->hash = key_hash(a, l->namespace_row, l->key_type, key, l->key_len);
        if (l->touched_s != PG_NIL)
            l->touched_s = (uint32_t)(a->call.real_boot_ns / 1000000000);
    }
}

static void bulk_loads_finish(struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->bulk_load_rows; i++)
        bulk_load_at(a, i)->used_boot_ns = a->call.real_boot_ns;
}

/* A schedule may have begun before the boot, so its time may become negative. */
static void schedules_finish(struct pg_arena *a, int64_t shift_ns)
{
    for (uint32_t row = 0; row < a->schedule_rows; row++) {
        struct pg_schedule_fields *f = schedule_fields(a, row);
        if (f->due_ns == PG_NOMINAL_UNKNOWN)
            continue;
        if (__builtin_add_overflow(f->due_ns, shift_ns, &f->due_ns))
            f->due_ns = shift_ns > 0 ? INT64_MAX : INT64_MIN;
    }
}

/* Let subscribers without cursors begin after the notices that were sent. */
static void topics_finish(struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if (topic_at(a, i)->name_len != 0)
            topic_at(a, i)->carried = replay_newest_sent(a, i);
}

int pg_redo_end(struct pg_arena *a, const struct pg_redo *state, int64_t now_ns,
                int64_t real_boot_ns, int64_t shift_ns, int64_t wall_offset_ns,
                struct pg_fault *why)
{
    memset(why, 0, sizeof *why);
    if (!is_whole(a, state, why))
        return 0;
    time_set(a, now_ns, real_boot_ns);
    a->header->wall_offset_ns = wall_offset_ns;
    a->header->next_ticket += TICKETS_LOST;
    slots_finish(a, shift_ns);
    replay_finish(a, shift_ns);
    topics_finish(a);
    watermarks_finish(a);
    jobs_restored(a, shift_ns);
    bulk_loads_finish(a);
    schedules_finish(a, shift_ns);
    wal_buffer_number(a, state->next_lsn);
    return 1;
}

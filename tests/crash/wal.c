#include "wal.h"

void frames_open(struct frames *f)
{
    f->words = malloc(WAL_MAX);
    f->bytes = 0;
    CHECK(f->words != NULL);
}

void frames_close(struct frames *f) { free(f->words); }

static void *space(const struct frames *f)
{
    CHECK(WAL_MAX - f->bytes >= PG_WAL_FRAME_MAX);
    return (uint8_t *)f->words + f->bytes;
}

void frames_snapshot(struct frames *f, const struct fixture *fx)
{
    struct pg_snapshot s = {.quiet = 1};
    for (f->bytes = 0; !s.done;)
        f->bytes += pg_snapshot(fx->a, &s, space(f), PG_WAL_FRAME_MAX);
}

void frames_appended(struct frames *f, const struct fixture *fx)
{
    uint64_t at = pg_wal_buffer_of(fx->a)->committed, lsn, bytes;
    f->bytes = 0;
    do {
        bytes = pg_wal_buffer_copy(fx->a, at, space(f), PG_WAL_FRAME_MAX, &at, &lsn);
        f->bytes += bytes;
    } while (bytes != 0);
}

uint64_t frames_next_lsn(const struct frames *appended, const struct fixture *fx)
{
    const uint8_t *at = (const uint8_t *)appended->words, *end = at + appended->bytes;
    uint64_t lsn = pg_wal_buffer_of(fx->a)->committed_lsn;
    for (; at != end; at += ((const struct pg_frame_head *)at)->bytes)
        lsn = ((const struct pg_frame_head *)at)->lsn;
    return lsn + 1;
}

bool frames_redo(const struct frames *snapshot, const struct frames *appended,
                 const struct fixture *from, struct fixture *to, struct pg_fault *why)
{
    struct pg_redo redo = {0};
    fixture_blank(to);
    return pg_redo(to->a, &redo, snapshot->words, snapshot->bytes, why) &&
           pg_redo(to->a, &redo, appended->words, appended->bytes, why) &&
           pg_redo_end(to->a, &redo, from->a->state.now_ns, from->real_ns, 0,
                       from->a->header->wall_offset_ns, why) &&
           pg_rebuild(to->a, from->a->state.now_ns, why);
}

/* Return false if the timer of an ARM or WATCH frame is armed or parked and has other timestamps
 * than the frame. */
static bool timestamps_recorded(const struct pg_frame_head *f, const struct fixture *fx, uint32_t slot,
                                uint64_t ticket)
{
    const struct pg_timestamps *replaced, *timestamps = pg_frame_timestamps(f, &replaced);
    const uint64_t ctl = fx->a->slots.hot[slot].ctl;
    return ctl_ticket(ctl) != ticket || !ctl_live(ctl) ||
           (timestamps != NULL && timestamps->add_lsn == f->lsn &&
            memcmp(timestamps, &fx->a->timestamps[slot], sizeof *timestamps) == 0);
}

/* Return true if a frame names, for each of its timers, the earlier record that armed the timer.
 * All timers of a fixture were armed with a WAL. */
static bool timestamps_known(const struct pg_frame_head *f)
{
    const struct pg_timestamps *replaced, *timestamps = pg_frame_timestamps(f, &replaced);
    return (timestamps == NULL || timestamps->add_lsn - 1 < f->lsn) &&
           (replaced == NULL || replaced->add_lsn - 1 < f->lsn);
}

/* Return the item of an ARM frame that makes its timer an occurrence; NULL = it is none. */
static const struct pg_ext *occurrence_of(const struct pg_wal_arm *j)
{
    const uint8_t *at = (const uint8_t *)(j + 1) + wal_row_bytes(j->in_bulk_load);
    struct items rest = {at, j->ext_len};
    struct pg_ext item;
    struct item_text text;
    for (; item_next(&rest, &item, &text); at = rest.at)
        if (item.kind == PG_EXT_SCHEDULE)
            return (const struct pg_ext *)at;
    return NULL;
}

/* Return the uid of the schedule that an occurrence belongs to. Its key ends at '@'. */
static uint32_t schedule_uid(const struct pg_wal_arm *j, const struct fixture *fx)
{
    const uint32_t ns = topic_at(fx->a, j->topic)->namespace_row;
    const char *key = (const char *)(j + 1) + wal_row_bytes(j->in_bulk_load) + j->ext_len;
    const char *end = memchr(key, '@', j->key_len);
    const struct name name = {key, end == NULL ? 0 : (uint32_t)(end - key)};
    const uint32_t row = schedule_find(fx->a, ns, name);
    return row == PG_NIL ? PG_NIL : schedule_fields(fx->a, row)->uid;
}

/* Return true if an ARM frame has the uid that requested it. An occurrence has the uid of its
 * schedule. */
static bool arm_uid_recorded(const struct pg_wal_arm *j, const struct fixture *fx, uint32_t uid)
{
    return j->uid != PG_NIL &&
           j->uid == (occurrence_of(j) != NULL ? schedule_uid(j, fx) : uid);
}

/* Return true if an END frame has the uid that requested the end. The end of a dropped outcome or a
 * late timer has no requester, nor has that of an occurrence which the daemon takes back without a
 * message. The frame with daemon_lsn may be the last one of the message. */
static bool end_uid_recorded(const struct pg_frame_head *f, const struct fixture *fx, uint32_t uid,
                             uint64_t daemon_lsn)
{
    const struct pg_wal_end *j = (const struct pg_wal_end *)(f + 1);
    const bool asked = j->cause == PG_END_CANCELLED || j->cause == PG_END_ACKNOWLEDGED;
    const bool taken_back = f->lsn >= daemon_lsn && j->cause == PG_END_CANCELLED &&
                            (fx->a->slots.hot[j->slot].flags & PG_F_SCHEDULE) != 0;
    if (!asked || (taken_back && f->lsn > daemon_lsn))
        return j->uid == PG_NIL;
    return j->uid == uid || (taken_back && j->uid == PG_NIL);
}

static bool uid_recorded(const struct pg_frame_head *f, const struct fixture *fx, uint32_t uid,
                         uint64_t daemon_lsn)
{
    const void *body = f + 1;
    switch (f->type) {
    case PG_WAL_ARM: return arm_uid_recorded(body, fx, uid);
    case PG_WAL_MOVE: return ((const struct pg_wal_move *)body)->uid == uid;
    case PG_WAL_END: return end_uid_recorded(f, fx, uid, daemon_lsn);
    case PG_WAL_WATCH: return ((const struct pg_wal_watch *)body)->uid == uid;
    case PG_WAL_ENTRY: return ((const struct pg_wal_entry *)body)->uid == uid;
    case PG_WAL_OPENED: return ((const struct pg_wal_opened *)body)->uid == uid;
    default: return true;         /* other frames have no requester or do not name it */
    }
}

bool frames_tell(const struct frames *appended, const struct fixture *fx, uint32_t uid,
                 uint64_t daemon_lsn, struct pg_fault *why)
{
    const uint8_t *at = (const uint8_t *)appended->words, *end = at + appended->bytes;
    for (; at != end; at += ((const struct pg_frame_head *)at)->bytes) {
        const struct pg_frame_head *f = (const struct pg_frame_head *)at;
        const struct pg_wal_arm *arm = (const struct pg_wal_arm *)(f + 1);
        const struct pg_wal_watch *watch = (const struct pg_wal_watch *)(f + 1);
        if ((f->type == PG_WAL_ARM && !timestamps_recorded(f, fx, arm->slot, arm->ticket)) ||
            (f->type == PG_WAL_WATCH && !timestamps_recorded(f, fx, watch->slot, watch->ticket)))
            return fault_set(why, "timestamps", "timestamps differ from the frame", f->lsn, 0,
                             f->type);
        if (!timestamps_known(f))
            return fault_set(why, "timestamps", "a timer without the record that armed it",
                             f->lsn, 0, f->type);
        if (!uid_recorded(f, fx, uid, daemon_lsn))
            return fault_set(why, "timestamps", "a frame with another uid", f->lsn, uid, f->type);
    }
    return true;
}

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

bool frames_redo(const struct frames *snapshot, const struct frames *appended,
                 const struct fixture *from, struct fixture *to, struct pg_fault *why)
{
    struct pg_redo redo = {0};
    fixture_blank(to);
    return pg_redo(to->a, &redo, snapshot->words, snapshot->bytes, why) &&
           pg_redo(to->a, &redo, appended->words, appended->bytes, why) &&
           pg_redo_end(to->a, &redo, from->real_ns, 0, from->a->header->wall_offset_ns, why) &&
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

/* Return true if an END frame has the uid that requested the end. The end of a dropped outcome or a
 * late timer has no requester, nor has that of an occurrence that a recovery or a recheck takes
 * back. */
static bool end_uid_recorded(const struct pg_wal_end *j, uint32_t uid)
{
    const bool asked = j->cause == PG_END_CANCELLED || j->cause == PG_END_ACKNOWLEDGED;
    return j->uid == (asked ? uid : PG_NIL) || j->uid == PG_NIL;
}

static bool uid_recorded(const struct pg_frame_head *f, uint32_t uid)
{
    const void *body = f + 1;
    switch (f->type) {
    case PG_WAL_ARM:              /* an occurrence has the uid of its schedule */
        return ((const struct pg_wal_arm *)body)->ext_len != 0 ||
               ((const struct pg_wal_arm *)body)->uid == uid;
    case PG_WAL_MOVE: return ((const struct pg_wal_move *)body)->uid == uid;
    case PG_WAL_END: return end_uid_recorded(body, uid);
    case PG_WAL_WATCH: return ((const struct pg_wal_watch *)body)->uid == uid;
    case PG_WAL_ENTRY: return ((const struct pg_wal_entry *)body)->uid == uid;
    case PG_WAL_OPENED: return ((const struct pg_wal_opened *)body)->uid == uid;
    default: return true;         /* other frames have no requester or do not name it */
    }
}

bool frames_tell(const struct frames *appended, const struct fixture *fx, uint32_t uid,
                 struct pg_fault *why)
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
        if (!uid_recorded(f, uid))
            return fault_set(why, "timestamps", "a frame with another uid", f->lsn, uid, f->type);
    }
    return true;
}

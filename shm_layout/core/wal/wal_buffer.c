/* wal_buffer.c - the WAL buffer, a ring in the arena. The frame of each change is in the WAL buffer
 * before the change takes effect.
 *
 * The order of stores is: the complete frame, then `appended`, then the store that commits the
 * effect, then `tail` (when the next frame begins or the call ends). A crash at any instruction
 * therefore leaves at most one frame in doubt, and the arena shows whether its effect happened. The
 * disk never has an effect that the arena lacks, and the arena is ahead of the disk by at most the
 * content of the ring. */

#include "core/wal/wal_buffer.h"
#include "core/base/answer.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/wal/frames.h"

struct pg_wal_buffer *pg_wal_buffer_of(const struct pg_arena *a) { return a->wal_buffer; }

uint64_t pg_durable_lsn(const struct pg_arena *a) { return a->call.durable_lsn; }

/* ---- the ring ------------------------------------------------------------------------------ */

static struct pg_frame_head *frame_at(const struct pg_arena *a, uint64_t position)
{
    return (struct pg_frame_head *)(a->ring + (position & (a->wal_buffer->size - 1)));
}

static uint64_t before_end(const struct pg_wal_buffer *s, uint64_t position)
{
    return s->size - (position & (s->size - 1));
}

/* Return the position at which the next frame at or after `position` begins. No frame wraps around:
 * the bytes left before the ring's end are a PAD frame or fewer than a frame head needs. */
static uint64_t past_padding(const struct pg_arena *a, uint64_t position)
{
    const uint64_t left = before_end(a->wal_buffer, position);
    if (left < sizeof(struct pg_frame_head) || frame_at(a, position)->type == PG_WAL_PAD)
        return position + left;
    return position;
}

/* Return the position for a frame of `whole` bytes. If the frame does not fit before the ring's
 * end, fill the rest of the ring with padding. */
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

void *wal_frame_begin_with(struct pg_arena *a, enum pg_wal_type type, uint64_t extra,
                           uint64_t tail)
{
    const uint64_t bytes = frame_bytes(type, extra), whole = bytes + tail;
    wal_buffer_settle(a);
    const uint64_t position = place_for(a, whole);
    PG_ASSERT(position + whole - LOAD_RELAXED(&a->wal_buffer->committed) <= a->wal_buffer->size,
              "WAL buffer", "a frame has space");
    struct pg_frame_head *f = frame_at(a, position);
    memset((uint8_t *)f + bytes - 8, 0, 8);
    *f = (struct pg_frame_head){.bytes = (uint32_t)whole, .lsn = a->wal_buffer->next_lsn,
                                .type = (uint16_t)type};
    a->state.wal_buffer_end = position + whole;
    return f + 1;
}

void *wal_frame_begin(struct pg_arena *a, enum pg_wal_type type, uint64_t extra)
{
    return wal_frame_begin_with(a, type, extra, 0);
}

void wal_frame_end(struct pg_arena *a)
{
    STORE_RELEASE(&a->wal_buffer->appended, a->state.wal_buffer_end);
    STORE_RELEASE(&a->wal_buffer->next_lsn, a->wal_buffer->next_lsn + 1);
    /* This release fence comes before the effect. A snapshot that contains the effect therefore
     * reads this next_lsn or a later one. */
    atomic_thread_fence(memory_order_release);
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

/* ---- init, check ---------------------------------------------------------------- */

void wal_buffer_init(struct pg_arena *a)
{
    if (a->wal_buffer == NULL)
        return;
    memset(a->wal_buffer, 0, sizeof *a->wal_buffer);
    a->wal_buffer->size = a->header->regions[PG_R_WAL_BUFFER].length - PG_WAL_BUFFER_HEAD;
    a->wal_buffer->next_lsn = 1;
}

void wal_buffer_number(struct pg_arena *a, uint64_t next_lsn)
{
    if (a->wal_buffer == NULL)
        return;
    a->wal_buffer->next_lsn = next_lsn;
    a->wal_buffer->committed_lsn = next_lsn - 1;
}

void wal_buffer_migrate(struct pg_arena *to, const struct pg_arena *from)
{
    if (to->wal_buffer == NULL || from->wal_buffer == NULL)
        return;
    to->wal_buffer->next_lsn = from->wal_buffer->next_lsn;
    to->wal_buffer->committed_lsn = from->wal_buffer->committed_lsn;
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

/* Check the frame at `at`, which must lie before `end`. */
static bool frame_sound(const struct pg_arena *a, uint64_t at, uint64_t end, struct pg_fault *fault)
{
    const struct pg_frame_head *f = frame_at(a, at);
    if (at >= end || end - at < sizeof *f || f->bytes > end - at ||
        f->bytes > before_end(a->wal_buffer, at) || !frame_fits(f))
        return fault_set(fault, "wal_buffer", "bytes that do not form a frame", at, end, f->bytes);
    return true;
}

/* Check all frames from `committed` to `end`. Set *lsn to the LSN of the last frame; 0 = no
 * frames. */
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
            return fault_set(fault, "wal_buffer", "the numbers of frames have a gap", at, *lsn + 1,
                             f->lsn);
        *lsn = f->lsn;
        position = at + f->bytes;
    }
    return true;
}

bool wal_buffer_in_doubt(const struct pg_arena *a, const struct pg_frame_head **frame,
                         struct pg_fault *why)
{
    const struct pg_wal_buffer *s = a->wal_buffer;
    uint64_t lsn;
    *frame = NULL;
    if (!positions_sound(a, why) || !frames_sound(a, s->appended, &lsn, why))
        return false;
    if (s->tail == s->appended)
        return lsn == 0 || lsn + 1 == s->next_lsn ||
               fault_set(why, "wal_buffer", "number of the next frame", s->tail, lsn + 1,
                         s->next_lsn);
    const uint64_t at = past_padding(a, s->tail);
    *frame = frame_at(a, at);
    return at + (*frame)->bytes == s->appended ||
           fault_set(why, "wal_buffer", "more than one frame is in doubt", s->tail,
                     at + (*frame)->bytes, s->appended);
}

/* Store next_lsn first, so that after a kill inside this function the next start makes the same
 * decision. If the frame is kept, `tail` moves over it when the next frame begins, or at the end of
 * the rebuild. */
void wal_buffer_decide(struct pg_arena *a, const struct pg_frame_head *frame, bool made)
{
    struct pg_wal_buffer *s = a->wal_buffer;
    s->next_lsn = frame->lsn + made;
    if (!made)
        s->appended = s->tail;
}

bool wal_buffer_doubts(const struct pg_arena *a)
{
    return a->wal_buffer->tail != a->wal_buffer->appended;
}

/* Store next_lsn first, for the same reason as in wal_buffer_decide. */
void wal_buffer_decide_as(struct pg_arena *a, const struct pg_arena *decided)
{
    const struct pg_wal_buffer *as = decided->wal_buffer;
    STORE_RELEASE(&a->wal_buffer->next_lsn, as->next_lsn);
    STORE_RELEASE(&a->wal_buffer->appended, as->appended);
    STORE_RELEASE(&a->wal_buffer->tail, as->appended);
}

static bool timestamps_sound(const struct pg_arena *a, struct pg_fault *fault)
{
    for (uint32_t i = 0; i < a->slots.capacity; i++)
        if (ctl_live(slot_hot(a, i)->ctl) &&
            timestamps_at(a, i)->add_lsn >= a->wal_buffer->next_lsn)
            return fault_set(fault, "wal_buffer",
                             "a timer's LSN is later than the LSN of the last frame",
                             i, a->wal_buffer->next_lsn, timestamps_at(a, i)->add_lsn);
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

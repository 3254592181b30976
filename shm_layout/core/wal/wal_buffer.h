/* wal_buffer.h - the WAL buffer, a ring in the arena. Every effect is recorded in it first. */
#ifndef PURGATORYD_WAL_WAL_BUFFER_H
#define PURGATORYD_WAL_WAL_BUFFER_H

#include "core/base/common.h"
#include "core/arena.h"

static inline bool has_wal(const struct pg_arena *a) { return UNLIKELY(a->wal_buffer != NULL); }
/* LSN of the next frame. The arena must have a WAL buffer. */
static inline uint64_t wal_next_lsn(const struct pg_arena *a)
{
    return LOAD_ACQUIRE(&a->wal_buffer->next_lsn);
}

/* Begin a frame and return its body. The caller fills the body, `extra` bytes after it, and `tail`
 * bytes of optional fields at the end (frames.h). wal_frame_end completes the frame. */
void *wal_frame_begin_with(struct pg_arena *a, enum pg_wal_type type, uint64_t extra,
                           uint64_t tail);
void *wal_frame_begin(struct pg_arena *a, enum pg_wal_type type, uint64_t extra);
/* Complete the frame: store `appended` with release, then the next LSN. */
void wal_frame_end(struct pg_arena *a);
/* Make the WAL buffer empty. Its ring must be zeroed. */
void wal_buffer_init(struct pg_arena *a);
/* Give the first frame of an empty WAL buffer the LSN `next_lsn`. Does nothing
 * without a WAL buffer. */
void wal_buffer_number(struct pg_arena *a, uint64_t next_lsn);
/* Continue the LSNs of `from` in `to`, if both have a WAL buffer. The frames are not copied. */
void wal_buffer_migrate(struct pg_arena *to, const struct pg_arena *from);
/* Decide the frame in doubt of `a` in the way its copy `decided` was decided. */
void wal_buffer_decide_as(struct pg_arena *a, const struct pg_arena *decided);
/* True if a frame is in doubt. */
bool wal_buffer_doubts(const struct pg_arena *a);
/* Move `tail` over the last frame. Every call that may append a frame ends with this. */
void wal_buffer_settle(struct pg_arena *a);
/* Find the frame of which the WAL buffer alone cannot tell whether its effect happened; *frame =
 * NULL if there is none. Return false and fill *why if the ring is damaged. */
bool wal_buffer_in_doubt(const struct pg_arena *a, const struct pg_frame_head **frame,
                         struct pg_fault *why);
/* Decide the frame in doubt: keep it if its effect was `made`, else drop it. */
void wal_buffer_decide(struct pg_arena *a, const struct pg_frame_head *frame, bool made);
/* Check positions, frames and the LSNs of timers. True without a WAL buffer. */
bool wal_buffer_check(const struct pg_arena *a, struct pg_fault *fault);

/* True if uncommitted frames fill more than `percent` of the ring. */
bool wal_buffer_over(const struct pg_arena *a, uint64_t percent);
unsigned wal_buffer_refuses(const struct pg_arena *a);
/* The reason to refuse new timers and watermarks: PG_ST_BUSY above 75 % of the ring, PG_ST_WAL
 * after the group-commit thread has stopped, else PG_ST_NONE. */
static inline unsigned wal_buffer_refusal(const struct pg_arena *a)
{
    return has_wal(a) ? wal_buffer_refuses(a) : (unsigned)PG_ST_NONE;
}
/* True if the ring is too full for changes to timers and watermarks. They wait until frames are
 * committed. The limit leaves space for any one of them and everything that follows from it. */
static inline bool wal_buffer_full(const struct pg_arena *a)
{
    return has_wal(a) && wal_buffer_over(a, 94);
}
/* Return false, with the refusal in *r, if wal_buffer_refusal forbids to arm. */
bool wal_buffer_admits(struct pg_arena *a, struct pg_result *r);
/* For a caller that found the WAL buffer full. wal_buffer_gives_up returns false if it should
 * wait. It returns true, with the answer in *r, if the group-commit thread has stopped and no
 * space will ever be free. */
bool wal_stopped(const struct pg_arena *a);
bool wal_buffer_gives_up(const struct pg_arena *a, struct pg_result *r);

#endif

/* wal_buffer.h - the WAL buffer, a ring in the arena. The frame of each change is in the WAL buffer
 * before the change takes effect. */
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

/* Begin a frame and return the address of its body. The caller fills the body, `extra` bytes after
 * it, and `tail` bytes of optional fields at the end (frames.h). wal_frame_end completes the
 * frame. */
void *wal_frame_begin_with(struct pg_arena *a, enum pg_wal_type type, uint64_t extra,
                           uint64_t tail);
void *wal_frame_begin(struct pg_arena *a, enum pg_wal_type type, uint64_t extra);
/* Complete the frame: store `appended` with release, then the next LSN. */
void wal_frame_end(struct pg_arena *a);
/* Make the WAL buffer empty. The caller must have filled the ring with zeros. */
void wal_buffer_init(struct pg_arena *a);
/* Set the LSN of the first frame of an empty WAL buffer. Do nothing without a WAL buffer. */
void wal_buffer_number(struct pg_arena *a, uint64_t next_lsn);
/* Let `to` continue the LSNs of `from`, if both arenas have a WAL buffer. The frames are not
 * copied. */
void wal_buffer_migrate(struct pg_arena *to, const struct pg_arena *from);
/* `decided` is a copy of arena `a`, in which the frame in doubt was kept or dropped. Keep or drop
 * the frame in doubt of `a` in the same way. */
void wal_buffer_decide_as(struct pg_arena *a, const struct pg_arena *decided);
/* True if a frame is in doubt, that is, if it is unknown whether its effect happened. */
bool wal_buffer_doubts(const struct pg_arena *a);
/* Move `tail` over the last frame. Every call that may append a frame calls this at its end. */
void wal_buffer_settle(struct pg_arena *a);
/* Find the frame in doubt. The WAL buffer alone does not show whether the effect of this frame
 * happened. Set *frame to NULL if there is none. Return false and fill *why if the ring is
 * damaged. */
bool wal_buffer_in_doubt(const struct pg_arena *a, const struct pg_frame_head **frame,
                         struct pg_fault *why);
/* Decide the frame in doubt: keep it if its effect happened (`made`), else drop it. */
void wal_buffer_decide(struct pg_arena *a, const struct pg_frame_head *frame, bool made);
/* Check the positions, the frames and the LSNs of timers. Return true without a WAL buffer. */
bool wal_buffer_check(const struct pg_arena *a, struct pg_fault *fault);

/* True if uncommitted frames fill more than `percent` of the ring. */
bool wal_buffer_over(const struct pg_arena *a, uint64_t percent);
unsigned wal_buffer_refuses(const struct pg_arena *a);
/* The reason to refuse new timers and watermarks: PG_ST_BUSY while uncommitted frames fill more
 * than 75 % of the ring, PG_ST_WAL after the group-commit thread has stopped, else PG_ST_NONE. */
static inline unsigned wal_buffer_refusal(const struct pg_arena *a)
{
    return has_wal(a) ? wal_buffer_refuses(a) : (unsigned)PG_ST_NONE;
}
/* True if the ring is too full for changes to timers and watermarks. These changes wait until
 * frames are committed. The limit leaves space for any one change and everything that follows from
 * it. */
static inline bool wal_buffer_full(const struct pg_arena *a)
{
    return has_wal(a) && wal_buffer_over(a, 94);
}
/* If wal_buffer_refusal has a reason to refuse timers, store the reason in *r and return false. */
bool wal_buffer_admits(struct pg_arena *a, struct pg_result *r);
/* For a caller that found the WAL buffer full: return false if the caller should wait for space. If
 * the group-commit thread has stopped, no space will ever be free: store the answer in *r and
 * return true. */
bool wal_stopped(const struct pg_arena *a);
bool wal_buffer_gives_up(const struct pg_arena *a, struct pg_result *r);

#endif

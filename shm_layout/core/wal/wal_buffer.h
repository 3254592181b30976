/* wal_buffer.h - the WAL's ring: every effect is written down here before it happens. */
#ifndef PURGATORYD_WAL_WAL_BUFFER_H
#define PURGATORYD_WAL_WAL_BUFFER_H

#include "core/base/common.h"
#include "core/arena.h"

static inline bool has_wal(const struct pg_arena *a) { return UNLIKELY(a->wal_buffer != NULL); }
/* The number of the next frame; there is a WAL buffer. */
static inline uint64_t wal_next_lsn(const struct pg_arena *a)
{
    return LOAD_ACQUIRE(&a->wal_buffer->next_lsn);
}

/* The body of a frame, with `extra` bytes behind it that the caller fills, and `tail` at its end
 * for what is recorded of beginning and end; then the frame is complete. */
void *wal_frame_begin_with(struct pg_arena *a, enum pg_wal_type type, uint64_t extra,
                           uint64_t tail);
void *wal_frame_begin(struct pg_arena *a, enum pg_wal_type type, uint64_t extra);
void wal_frame_end(struct pg_arena *a);
void wal_buffer_init(struct pg_arena *a);                     /* empty; its ring is zeroed */
/* Numbers the frames of an empty WAL buffer, if there is one, from `next_lsn` on. */
void wal_buffer_number(struct pg_arena *a, uint64_t next_lsn);
/* The numbers of `from` go on in `to`, where both have a WAL buffer; its frames stay behind. */
void wal_buffer_migrate(struct pg_arena *to, const struct pg_arena *from);
/* Decides about the frame in doubt of `a` as its copy `decided` has. */
void wal_buffer_decide_as(struct pg_arena *a, const struct pg_arena *decided);
/* A frame in doubt is there. */
bool wal_buffer_doubts(const struct pg_arena *a);
void wal_buffer_settle(struct pg_arena *a);                   /* ends every call that may append */
/* The frame of which nobody knows whether its change was made; *frame = NULL: there is none. */
bool wal_buffer_in_doubt(const struct pg_arena *a, const struct pg_frame_head **frame,
                         struct pg_fault *why);
void wal_buffer_decide(struct pg_arena *a, const struct pg_frame_head *frame, bool made);
bool wal_buffer_check(const struct pg_arena *a, struct pg_fault *fault);

bool wal_buffer_over(const struct pg_arena *a, uint64_t percent);
unsigned wal_buffer_refuses(const struct pg_arena *a);
/* Why nothing may be armed or born now: BUSY over 75 %, WAL when it has stopped; else NONE. */
static inline unsigned wal_buffer_refusal(const struct pg_arena *a)
{
    return has_wal(a) ? wal_buffer_refuses(a) : (unsigned)PG_ST_NONE;
}
/* What ends, moves or advances waits then. Below that, any one of them fits with all that
 * follows from it. */
static inline bool wal_buffer_full(const struct pg_arena *a)
{
    return has_wal(a) && wal_buffer_over(a, 94);
}
/* The same with the answer, for what arms. False: it is refused. */
bool wal_buffer_admits(struct pg_arena *a, struct pg_result *r);
/* Of a full WAL buffer: false = wait; true = there will be no space again, and this is the
 * answer. */
bool wal_stopped(const struct pg_arena *a);
bool wal_buffer_gives_up(const struct pg_arena *a, struct pg_result *r);

#endif

/* frames.h - the sizes of WAL frames, and the optional fields at their ends. */
#ifndef PURGATORYD_WAL_FRAMES_H
#define PURGATORYD_WAL_FRAMES_H

#include "core/base/common.h"

/* Size of a frame with `extra` bytes after its body, rounded up to a multiple of 8. The size does
 * not include the optional pg_asked and pg_timestamps, which follow at the end of the frame. */
uint64_t frame_bytes(enum pg_wal_type type, uint64_t extra);
/* True if the type of the frame is one that has an LSN, and the size of the frame matches its body.
 * The head of the frame, and as many bytes as the head declares, must be readable. */
bool frame_fits(const struct pg_frame_head *f);
/* Size of the pg_wal_row between the body and the key of a frame; 0 if the frame has none. */
static inline uint64_t wal_row_bytes(uint32_t in_bulk_load)
{
    return in_bulk_load != 0 ? sizeof(struct pg_wal_row) : 0;
}
/* Number of bytes after the body of a WATCH frame; `bytes` is the size of its key and payload. */
static inline uint64_t wal_watch_extra(uint32_t keys, uint64_t bytes)
{
    return keys * sizeof(struct pg_wal_watch_key) + bytes;
}
/* Number of bytes after the body of an OUTCOME frame: a bitmap of `keys` bits, then the jobs. */
static inline uint64_t wal_outcome_extra(uint32_t keys, uint32_t jobs)
{
    const uint64_t bitmap = (keys + 7u) / 8;
    return jobs == 0 ? bitmap : (bitmap + 7) / 8 * 8 + jobs * sizeof(struct pg_wal_born);
}

#endif

/* frames.h - how many bytes a frame of the WAL has, and where they are. */
#ifndef PURGATORYD_WAL_FRAMES_H
#define PURGATORYD_WAL_FRAMES_H

#include "core/base/common.h"

/* Bytes of a frame with so many behind its body, a multiple of 8; a pg_timestamps comes behind
 * that. */
uint64_t frame_bytes(enum pg_wal_type type, uint64_t extra);
/* Its type takes an LSN and its bytes are those that its body asks for. The head must be
 * readable, and as many bytes as the head says. */
bool frame_fits(const struct pg_frame_head *f);
/* What stands between body and key. */
static inline uint64_t wal_row_bytes(uint32_t in_bulk_load)
{
    return in_bulk_load != 0 ? sizeof(struct pg_wal_row) : 0;
}
static inline uint64_t wal_watch_extra(uint32_t keys, uint64_t bytes)
{
    return keys * sizeof(struct pg_wal_watch_key) + bytes;
}

#endif

/* wal.h - frames in the WAL buffer of a fixture, redone over a snapshot into a new arena. */
#ifndef PURGATORYD_WAL_H
#define PURGATORYD_WAL_H

#include "fixture.h"

#define WAL_MAX (1u << 19)

struct frames {
    uint64_t bytes;
    uint64_t *words;              /* WAL_MAX bytes, which hold whole frames */
};

void frames_open(struct frames *f);
void frames_close(struct frames *f);
/* Write a snapshot of a fixture that does not change meanwhile. */
void frames_snapshot(struct frames *f, const struct fixture *fx);
/* Copy the uncommitted frames of the ring. */
void frames_appended(struct frames *f, const struct fixture *fx);
/* Check that armed timers have the timestamps of their appended records, that final states belong
 * to timers that were armed, and that all records name their request. */
bool frames_tell(const struct frames *appended, const struct fixture *fx, uint32_t uid,
                 struct pg_fault *why);
/* As a start without an arena does it: `to` is of the same sizes, without a WAL buffer. */
bool frames_redo(const struct frames *snapshot, const struct frames *appended,
                 const struct fixture *from, struct fixture *to, struct pg_fault *why);

#endif

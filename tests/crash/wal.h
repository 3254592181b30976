/* wal.h - redo the WAL buffer of a fixture over a snapshot, into a new arena. */
#ifndef PURGATORYD_WAL_H
#define PURGATORYD_WAL_H

#include "fixture.h"

#define WAL_MAX (1u << 19)

struct frames {
    uint64_t bytes;
    uint64_t *words;              /* WAL_MAX bytes; the first `bytes` of them are whole frames */
};

void frames_open(struct frames *f);
void frames_close(struct frames *f);
/* Take a snapshot of a fixture. Nothing may change the fixture during this call. */
void frames_snapshot(struct frames *f, const struct fixture *fx);
/* Copy all uncommitted frames of the WAL buffer. */
void frames_appended(struct frames *f, const struct fixture *fx);
/* Return the LSN after that of the newest frame whose effect is complete. */
uint64_t frames_next_lsn(const struct frames *appended, const struct fixture *fx);
/* Check that timers have the timestamps that their frames record, that frames about the end of a
 * timer name the record that armed it, and that all frames name the requesting uid. Frames from
 * daemon_lsn on have no requester, because no message caused them. */
bool frames_tell(const struct frames *appended, const struct fixture *fx, uint32_t uid,
                 uint64_t daemon_lsn, struct pg_fault *why);
/* Redo the snapshot and the frames, as a daemon without an arena does when it starts. `to` must
 * have the same sizes, and no WAL buffer. */
bool frames_redo(const struct frames *snapshot, const struct frames *appended,
                 const struct fixture *from, struct fixture *to, struct pg_fault *why);

#endif

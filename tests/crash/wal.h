/* wal.h - what the WAL buffer of a fixture says, redone over a snapshot into a fresh arena. */
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
/* All authoritative state of a fixture that nobody changes meanwhile. */
void frames_snapshot(struct frames *f, const struct fixture *fx);
/* All that stands in the ring and is not committed. */
void frames_appended(struct frames *f, const struct fixture *fx);
/* Whether what lives has the timestamps that its appended record tells, final states are of timers
 * that began, and all say who asked for it. */
bool frames_tell(const struct frames *appended, const struct fixture *fx, uint32_t uid,
                 struct pg_fault *why);
/* As a start without an arena does it: `to` is of the same sizes, without a WAL buffer. */
bool frames_redo(const struct frames *snapshot, const struct frames *appended,
                 const struct fixture *from, struct fixture *to, struct pg_fault *why);

#endif

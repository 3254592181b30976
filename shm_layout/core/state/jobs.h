/* jobs.h - the jobs of consumer groups: their states, queues and payloads. */
#ifndef PURGATORYD_STATE_JOBS_H
#define PURGATORYD_STATE_JOBS_H

#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/groups.h"
#include "core/state/keys.h"

static inline unsigned job_state(const struct pg_job *j) { return j->control & 0xff; }
static inline unsigned job_reason(const struct pg_job *j)
{
    return j->control >> PG_JOB_REASON_SHIFT & 0xff;
}
static inline uint32_t job_failures(const struct pg_job *j)
{
    return j->control >> PG_JOB_FAILURES_SHIFT & 0xffff;
}
static inline uint32_t job_leases(const struct pg_job *j)
{
    return (uint32_t)(j->control >> PG_JOB_LEASES_SHIFT);
}
static inline uint64_t job_control(unsigned state, unsigned reason, uint32_t failures,
                                   uint32_t leases)
{
    return state | (uint64_t)reason << PG_JOB_REASON_SHIFT |
           (uint64_t)failures << PG_JOB_FAILURES_SHIFT | (uint64_t)leases << PG_JOB_LEASES_SHIFT;
}
static inline uint32_t job_granules(const struct pg_job *j)
{
    return blob_granules((uint64_t)j->key_len + j->payload_len);
}
static inline uint32_t job_error_len(const struct pg_job *j) { return (uint32_t)(j->error >> 32); }
static inline const uint8_t *job_error(const struct pg_arena *a, const struct pg_job *j)
{
    return blob_at(&a->blobs, (uint32_t)j->error);
}
/* Id of a job in the wheel. */
static inline uint32_t wheel_id_of_job(const struct pg_arena *a, uint32_t row)
{
    return a->slots.capacity + row;
}

/* Return the traits of the jobs of an entry. `slot`: the timer that fires; PG_NIL = an operation
 * ended, or a notice was published. */
struct job_traits job_traits_of(const struct pg_arena *a, const struct pg_entry *e, uint32_t slot);
/* Begin a job of each group of the entry's topic. The entry is committed afterwards; until then a
 * rebuild removes the jobs. Return whether there are any. */
bool jobs_born(struct pg_arena *a, const struct pg_entry *e, uint64_t position,
               const struct job_traits *traits);
/* Begin a job for a group that starts with the notices of the replay buffer. */
void job_born_of_entry(struct pg_arena *a, uint32_t group, uint64_t position);
/* Return whether jobs use the blob of a withdrawn entry, so that it must not be freed. */
static inline bool entry_has_jobs(const struct pg_entry *e)
{
    return (e->meta & PG_ENTRY_JOBS) != 0;
}
/* Handle a job that the wheel found due. False: the WAL buffer is full, so the wheel keeps it. */
bool job_due(struct pg_arena *a, uint32_t row);

/* The next waiting job of a group; PG_NIL = none. */
uint32_t job_next(const struct pg_arena *a, uint32_t group);
/* Lease a waiting job to a member, until now + lease_ns. */
void job_lease(struct pg_arena *a, uint32_t row, uint32_t member, int64_t lease_ns);
/* An error text of a failed attempt. */
struct job_failure {
    const uint8_t *text;
    uint32_t len;
    int64_t delay_ns;             /* delay until the next attempt; -1 = as the group's settings say */
};
/* Change a leased job. */
void job_ack(struct pg_arena *a, uint32_t row);
void job_failed(struct pg_arena *a, uint32_t row, const struct job_failure *f);
void job_expired(struct pg_arena *a, uint32_t row);
void job_extend(struct pg_arena *a, uint32_t row, int64_t until_ns);
/* Return the end of a lease that is extended until `until_ns`. An extension never shortens a lease,
 * and max_lease limits it. */
int64_t job_extended_ns(const struct pg_arena *a, uint32_t row, int64_t until_ns);
void job_release(struct pg_arena *a, uint32_t row);
void job_reject(struct pg_arena *a, uint32_t row, const struct job_failure *f);
/* Place the waiting jobs of a group again, after a change of its retention. */
void jobs_place_again(struct pg_arena *a, uint32_t group);
/* Let the dead letters of an ordered group block their order keys, or let the next jobs follow, after
 * a change of PG_G_BLOCK. */
void jobs_order_dead(struct pg_arena *a, uint32_t group);
/* Drop the oldest dead letters of a group, at most `most`, as long as there are too many. */
void jobs_drop_dead(struct pg_arena *a, uint32_t group, uint32_t most);
/* Change a job that nobody holds. */
void job_drop(struct pg_arena *a, uint32_t row);
void job_requeue(struct pg_arena *a, uint32_t row);
/* Return whether all groups of the topic have space in their budgets for so many more jobs and
 * granules. Groups with the flag DROP_OLDEST make space. False: *r contains the answer; BUSY = they
 * need more calls. */
bool jobs_admit(struct pg_arena *a, uint32_t topic, uint32_t jobs, uint64_t granules,
                struct pg_result *r);

/* Return a job of the key that is not a dead letter, a leased one first; PG_NIL = none. `ticket`: the
 * ticket of the job, 0 = any. */
uint32_t job_of_key(const struct pg_arena *a, const struct key *k, uint64_t ticket);
/* Return the blob that the jobs with this ticket use; PG_NIL = there are none. */
uint32_t job_blob(const struct pg_arena *a, uint32_t hash, uint64_t ticket);

/* For redo, which names rows, and leaves queues, counts and the wheel to the rebuild: begin the jobs
 * of the entry at `position`. False: another job of the ticket has a payload of another length. */
bool jobs_restore_born(struct pg_arena *a, const struct pg_wal_born *born, uint32_t count,
                       uint64_t position, uint64_t lsn);
/* Write the state that the frame `lsn` describes. `bytes` are its error text, key and payload. False:
 * there is no memory for them. */
bool job_restore(struct pg_arena *a, const struct pg_wal_job *from, const uint8_t *bytes,
                 uint64_t lsn);
/* Return whether the jobs and the notice with the frame's ticket have its position and lengths. */
bool job_matches(const struct pg_arena *a, const struct pg_wal_job *from);
void jobs_restore_end_of_group(struct pg_arena *a, uint32_t group, uint64_t incarnation);
/* Shift the times of all jobs, and end all leases, because redo restores no session. */
void jobs_restored(struct pg_arena *a, int64_t shift_ns);
void jobs_init(struct pg_arena *a);
/* Free the rows of jobs that do not exist: their notice was not committed, or their group is gone. */
bool jobs_void(struct pg_arena *a, struct pg_fault *why);
/* Mark the payloads of jobs, and link the jobs to their entries and queues. */
bool jobs_rebuild(struct pg_arena *a, struct pg_fault *why);
/* Return the earliest time of a job in the wheel; INT64_MAX = there is none. */
int64_t jobs_earliest_ns(const struct pg_arena *a);
void jobs_place(struct pg_arena *a);                  /* put jobs into the wheel */
/* Give back the leases of sessions that have ended, and drop the dead letters that are too many: a
 * kill may have come before that. */
void jobs_settle(struct pg_arena *a);
/* Check all jobs. Add the number of granules of their payloads to *granules, and count those in the
 * wheel. */
bool jobs_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules,
                uint32_t *in_wheel);
/* Move the payload of a job out of a zone. Return the number of granules that were moved. */
uint32_t job_evacuate(struct pg_arena *a, uint32_t row);

#endif

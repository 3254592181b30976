/* A client of purgatoryd in C over ZeroMQ, written from docs/protocol.md.
 *
 * A client packs records into batches, sends unanswered batches again after a reconnect and after
 * silence, and so applies each record once, while the daemon is killed and started again. A
 * listener receives the notices of one topic in order, and reports each range that it lost. A
 * consumer takes the jobs of a consumer group.
 *
 * None of them is thread-safe. The daemon must have the real clock and no shards. Link with libzmq. */
#ifndef PURGATORYD_H
#define PURGATORYD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum pg_mode { PG_MODE_ERROR, PG_MODE_REPLACE, PG_MODE_KEEP, PG_MODE_EXTEND };

enum pg_status { /* those of docs/protocol.md; from 16 on refusals */
    PG_IN_DOUBT = -1, /* the session expired, and the record was applied once or not at all */
    PG_NO_ANSWER = 0,
    PG_ADDED = 1,
    PG_REPLACED = 2,
    PG_KEPT = 3,
    PG_EXTENDED = 4,
    PG_EXISTS = 5,
    PG_CANCELLED = 6,
    PG_FIRED = 7,
    PG_UNKNOWN = 8,
    PG_DONE = 10,
    PG_LEASED = 15,
    PG_BUSY = 26, /* the client sends such records again itself */
    PG_STOPPING = 32,
    PG_LEASE_LOST = 38,
    PG_NO_GROUP = 39,
};

struct pg_answer {
    uint64_t ticket;
    int64_t deadline_ns; /* CLOCK_BOOTTIME; 0 = there is no timer */
    int status;
};

struct pg_topic {
    const char *namespace;
    const char *topic;
};

enum pg_late_policy { PG_LATE_FIRE, PG_LATE_SKIP, PG_LATE_COALESCE };

/* A timer. A field that is 0 or NULL has its default. */
struct pg_timer {
    const char *key;
    const void *payload;
    size_t payload_len;
    int64_t deadline_ns; /* CLOCK_BOOTTIME */
    enum pg_mode mode;
    const char *tag;           /* a text for selections */
    const char *order_key;     /* orders the jobs of consumer groups */
    bool has_priority;         /* false = the jobs have the priority of the topic */
    uint8_t priority;          /* 0 to 9, the most urgent one */
    bool has_late;             /* false = the timer has the late policy of the topic */
    enum pg_late_policy late;  /* SKIP and COALESCE need a grace of at least 1 ms, FIRE has none */
    int64_t late_grace_ns;
    int64_t unique_ns;         /* time for which no other timer gets the key */
};

struct pg_client;

/* Return a client of the command socket, such as "ipc:///run/purgatoryd/demo.cmd". `worker` names
 * this client in the WAL. Return NULL if memory or descriptors are exhausted. */
struct pg_client *pg_open(const char *endpoint, const char *worker);

/* Pack a record: arm a timer. `answer` is filled before pg_flush() returns. Return false after an
 * error. */
bool pg_put(struct pg_client *client, struct pg_topic topic, const struct pg_timer *timer,
            struct pg_answer *answer);

/* Pack a record: cancel the timer of `key`, if it has this ticket or `ticket` is 0. */
bool pg_cancel(struct pg_client *client, struct pg_topic topic, const char *key, uint64_t ticket,
               struct pg_answer *answer);

/* Send all packed records and wait for their answers. Return false after an error. */
bool pg_flush(struct pg_client *client);

/* Return the error that ended the client's work, or NULL. */
const char *pg_error(const struct pg_client *client);

/* End the session and free the client. Records without an answer may still be applied. */
void pg_close(struct pg_client *client);

enum pg_cause { /* those of docs/protocol.md */
    PG_CAUSE_EXPIRED = 1, /* a deadline passed */
    PG_CAUSE_SATISFIED,
    PG_CAUSE_FAILED,
    PG_CAUSE_CANCELLED,
    PG_CAUSE_PUBLISHED,
};

/* The verdict on an operation that ended. */
struct pg_verdict {
    int64_t elapsed_ns;
    uint32_t error; /* code of the key that failed; 0 = none failed */
    uint16_t keys;  /* number of watch keys */
    uint16_t bitmap_bytes;
};

/* The final state of a timer or an operation. */
struct pg_end {
    int cause;        /* enum pg_cause */
    bool has_verdict; /* an operation ended */
    struct pg_verdict verdict;
    const uint8_t *missing; /* bit n % 8 of byte n / 8: watch key n was below its target */
    bool is_occurrence;     /* a schedule armed the timer; schedule and time are an idempotency key */
    size_t schedule_len;    /* length of the schedule's key, with which the timer's key begins */
    int64_t nominal_ns;     /* nominal time, ns since 1970 */
};

enum pg_event { PG_FAILED = -1, PG_SILENCE = 0, PG_NOTICE, PG_LOST, PG_NEW_STREAM };

struct pg_notice {
    uint64_t sequence; /* PG_LOST: the first lost notice */
    uint64_t lost_to;  /* PG_LOST: the last lost notice */
    uint64_t ticket;
    int64_t deadline_ns;
    int64_t fired_ns;
    const char *key; /* valid until the next call; not terminated by a zero byte */
    size_t key_len;
    const void *payload;
    size_t payload_len;
    struct pg_end end;
    uint32_t missed; /* timers that ended without a notice before this one */
};

struct pg_listener;

/* Return a listener at the notice socket, such as "ipc:///run/purgatoryd/demo.pub". It becomes
 * active a moment later. Return NULL if memory or descriptors are exhausted. */
struct pg_listener *pg_listen(const char *endpoint, struct pg_topic topic);

/* Wait up to `timeout_ms` for the next event. PG_LOST: notices were lost. PG_NEW_STREAM: the
 * sequence starts again, and the loss is unknown. */
enum pg_event pg_next(struct pg_listener *listener, struct pg_notice *notice, long timeout_ms);

void pg_unlisten(struct pg_listener *listener);

struct pg_group {
    const char *namespace;
    const char *name;
    const char *const *topics; /* ended by NULL */
    int64_t lease_ns;          /* length of a lease; the consumer extends it */
    uint32_t max_in_flight;    /* number of jobs that the consumer may hold */
};

struct pg_job {
    uint64_t ticket; /* the same in all attempts: make handlers idempotent by it */
    struct pg_end end;
    uint32_t attempt;
    uint32_t missed; /* timers that this one stands for, by a late policy */
    int64_t deadline_ns;
    int64_t fired_ns;
    const char *topic; /* topic, key and payload are valid until the answer */
    size_t topic_len;
    const char *key;
    size_t key_len;
    const void *payload;
    size_t payload_len;
};

struct pg_consumer;

/* Join a consumer group, which is created if it is missing. One that exists stays as it is.
 * `endpoint` is the command socket. Check pg_consumer_error(). Return NULL if memory or descriptors
 * are exhausted. */
struct pg_consumer *pg_consume(const char *endpoint, const char *worker,
                               const struct pg_group *group);

/* Wait up to `timeout_ms` for a job. Return NULL if none came, and after an error. */
const struct pg_job *pg_take(struct pg_consumer *consumer, long timeout_ms);

/* Answer a job, and wait for the daemon: PG_DONE; PG_LEASE_LOST, because the lease has ended and
 * another member may have the job; PG_NO_ANSWER after an error. The job must not be used
 * afterwards.
 *
 * ack: the job ends. nack: the attempt failed; the next one comes after `delay_ns`, -1 = the backoff
 * of the group. reject: the job becomes a dead letter. release: the job goes to another member, and
 * no attempt failed. */
int pg_ack(struct pg_consumer *consumer, const struct pg_job *job);
int pg_nack(struct pg_consumer *consumer, const struct pg_job *job, int64_t delay_ns,
            const char *error);
int pg_reject(struct pg_consumer *consumer, const struct pg_job *job, const char *error);
int pg_release(struct pg_consumer *consumer, const struct pg_job *job);

/* Extend the leases that end soon. pg_take() and the answers do so as well: a handler that runs
 * longer than a third of a lease calls this in between. Return false after an error. */
bool pg_keep(struct pg_consumer *consumer);

/* Return true if the lease of the job has ended. */
bool pg_is_lost(const struct pg_job *job);

const char *pg_consumer_error(const struct pg_consumer *consumer);

/* Give back the jobs without an answer, which counts as no failed attempt, and end the session. */
void pg_leave(struct pg_consumer *consumer);

#endif

/* fixture.h - tiny arenas on which random calls have run, and the calls that the tests interrupt
 * with a kill. */
#ifndef PURGATORYD_FIXTURE_H
#define PURGATORYD_FIXTURE_H

#include "check.h"
#include "core/core.h"
#include "core/state/compaction.h"
#include "core/state/delivery.h"
#include "core/state/groups.h"
#include "core/state/jobs.h"
#include "core/state/members.h"
#include "core/wal/wal_buffer.h"

#define CLIENTS 2
#define SESSIONS 3
/* These fixtures use at most this number of results in the answer pool. */
#define ANSWERS_MAX 1024

enum shape { EMPTY, FULL, SHARED_BUCKET, SHARED_KEY, SHAPES };

struct client {
    uint64_t session, sequence;   /* session id, and sequence of the next batch */
    uint32_t uid;
};

struct fixture {
    struct rng rng;
    enum shape shape;
    uint32_t lengths;             /* varies the lengths of keys and payloads between fixtures */
    struct pg_config config;
    struct pg_arena *a;
    uint8_t *arena, *secret;
    uint64_t arena_bytes, secret_bytes;
    int64_t now_ns, offset_ns, real_ns;
    struct client clients[CLIENTS];
    bool places_first;            /* a rebuild runs rebuild_places before rebuild_keys */
};

/* Memory areas of the authoritative state, in both arena files. */
struct piece {
    uint8_t *at;
    uint64_t bytes;
};
struct authoritative {
    uint32_t count;
    uint64_t bytes;
    struct piece pieces[32];
};

enum call_kind { BY_MESSAGE, BY_ADVANCE, BY_PUBLISHED, BY_PUBLISH, BY_SWEEP, BY_SWEEP_BULK_LOADS,
                 BY_INBOX, BY_INBOX_AGAIN, BY_SETTINGS, BY_TOPIC, BY_MIGRATE,
                 BY_COMPACTION, BY_SERVE, BY_AWAY, BY_RECHECK };

#define RECORDS_MAX 12
/* Large enough for a payload that does not fit into any arena of these fixtures. */
#define MESSAGE_MAX 49152

struct call {
    enum call_kind kind;
    bool draining;                /* the daemon is draining */
    uint32_t uid;
    uint32_t records;
    uint32_t bytes;
    uint8_t message[MESSAGE_MAX];
    int64_t now_ns, offset_ns, real_ns;
    uint64_t tail;                /* BY_PUBLISH: tail of the replay buffer before the call */
    uint64_t session;             /* BY_SERVE, BY_AWAY: session of the member */
};

struct reply {
    uint64_t bytes;
    uint8_t body[4096];
};

/* Make an arena and run random calls on it; shape and seed determine the calls. */
void fixture_open(struct fixture *fx, enum shape shape, uint64_t seed);
void fixture_close(struct fixture *fx);
/* Make a second fixture of the same sizes, for recoveries. */
void fixture_twin(struct fixture *twin, const struct fixture *fx);
/* Make a fixture of the same sizes without a WAL buffer, for redo. */
void fixture_for_redo(struct fixture *redo, const struct fixture *fx);
/* Make the arena empty again. */
void fixture_blank(struct fixture *fx);
/* Commit everything in the WAL buffer, as the group-commit thread does. */
void fixture_commit(struct fixture *fx);
/* List the pieces of authoritative state. */
void fixture_authoritative(const struct fixture *fx, struct authoritative *authoritative);
/* Attach and rebuild as a starting daemon does, but run the two passes of the rebuild one after the
 * other. */
bool fixture_recover(struct fixture *fx, int64_t now_ns, struct pg_fault *why);

/* Return the name of an operation under test by its number; NULL if the number is too large. */
const char *call_name(uint32_t operation);
/* Make a random call of this operation. */
void call_make(struct fixture *fx, uint32_t operation, struct call *call);
/* Copy a batch, but only its first `records` records. */
void call_prefix(const struct call *whole, uint32_t records, struct call *prefix);
/* Return true if the call's effect depends on the time, because the call has delays, or puts that
 * may be parked. */
bool call_minds_when(const struct fixture *fx, const struct call *call);
/* Answer all questions of schedules: their occurrences are at the even milliseconds. */
void fixture_answer(struct fixture *fx);
/* Run a call to its end. Return true if notices had to be published during the call to free
 * space, or if the call has states between its records. */
bool call_run(struct fixture *fx, const struct call *call, struct reply *reply);

#endif

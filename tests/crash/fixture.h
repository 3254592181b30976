/* fixture.h - tiny arenas with a history, and the calls that a kill may interrupt. */
#ifndef PURGATORYD_FIXTURE_H
#define PURGATORYD_FIXTURE_H

#include "check.h"
#include "core/core.h"

#define CLIENTS 2
#define SESSIONS 3
#define ANSWERS_MAX 1024          /* most results of the answer pool in these fixtures */

enum shape { EMPTY, FULL, SHARED_BUCKET, SHARED_KEY, SHAPES };

struct client {
    uint64_t session, sequence;   /* sequence of its next batch */
    uint32_t uid;
};

struct fixture {
    struct rng rng;
    enum shape shape;
    uint32_t lengths;             /* position of the bytes of keys and payloads */
    struct pg_config config;
    struct pg_arena *a;
    uint8_t *arena, *secret;
    uint64_t arena_bytes, secret_bytes;
    int64_t now_ns, offset_ns, real_ns;
    struct client clients[CLIENTS];
    bool places_first;            /* order of the halves of a recovery */
};

/* Pieces of both arena files that hold authoritative state. */
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
                 BY_INBOX, BY_INBOX_AGAIN, BY_SETTINGS, BY_MIGRATE };

#define RECORDS_MAX 12
#define MESSAGE_MAX 49152         /* with a payload that is too large for these arenas */

struct call {
    enum call_kind kind;
    bool draining;                /* the daemon was asked earlier */
    uint32_t uid;
    uint32_t records;
    uint32_t bytes;
    uint8_t message[MESSAGE_MAX];
    int64_t now_ns, offset_ns, real_ns;
    uint64_t tail;                /* BY_PUBLISH: tail of the replay buffer before the call */
};

struct reply {
    uint64_t bytes;
    uint8_t body[4096];
};

void fixture_open(struct fixture *fx, enum shape shape, uint64_t seed);
void fixture_close(struct fixture *fx);
/* Create a second fixture of the same sizes, for recoveries. */
void fixture_twin(struct fixture *twin, const struct fixture *fx);
/* Create a fixture for redone frames: of the same sizes, without a WAL buffer. */
void fixture_for_redo(struct fixture *redo, const struct fixture *fx);
void fixture_blank(struct fixture *fx);
/* Commit, as the group-commit thread does once all appended records are on disk. */
void fixture_commit(struct fixture *fx);
void fixture_authoritative(const struct fixture *fx, struct authoritative *authoritative);
/* Start as a daemon does, with the work of its two threads in sequence. */
bool fixture_recover(struct fixture *fx, int64_t now_ns, struct pg_fault *why);

/* The operations under test, by number; NULL behind the last. */
const char *call_name(uint32_t operation);
void call_make(struct fixture *fx, uint32_t operation, struct call *call);
/* Return the same batch, with only its first records. */
void call_prefix(const struct call *whole, uint32_t records, struct call *prefix);
/* Return whether the effect depends on the time: it has delays, or adds that may be parked. */
bool call_minds_when(const struct fixture *fx, const struct call *call);
/* Run the call to its end. True: notices were taken meanwhile, to make space. */
bool call_run(struct fixture *fx, const struct call *call, struct reply *reply);

#endif

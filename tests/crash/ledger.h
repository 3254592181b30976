/* ledger.h - facts about timers, operations, notices and watermarks of an arena, in a form in which
 * two arenas can be compared in, whatever slots, chunks and rows they use. */
#ifndef PURGATORYD_LEDGER_H
#define PURGATORYD_LEDGER_H

#include "core/state/operation_bytes.h"

#define FACTS_MAX 240
#define TOPICS_MAX 8

/* A fact is the sum of hashes of all state of one ticket, or of one key. States that a crash may
 * separate but a recovery may not - a timer and its notice, the old and the new timer of a key -
 * are in one fact. */
enum subject_kind { OF_TICKET, OF_KEY, OF_WATERMARK, OF_NAME, OF_SESSION, OF_BULK_LOAD, OF_ROW };
struct fact {
    uint64_t subject, state;      /* enum subject_kind in the low 3 bits of the subject */
};

struct ledger {
    uint32_t count;
    struct fact facts[FACTS_MAX];
    uint64_t sequences[TOPICS_MAX];  /* by row of the topic */
    uint64_t forgotten;           /* sum of hashes of watermarks that go with their last watcher */
};

/* Tickets from `fresh` on were given by the call under test: a repeated call may give others,
 * so they count by their keys and not by their numbers. */
void ledger_take(struct ledger *l, const struct pg_arena *a, uint64_t fresh);
/* Only what the WAL brings back: no sessions, so no outcomes; notices that nobody has yet.
 * It does not say that a topic without timers and notices has lost its row, so those count that
 * have one in the `live` arena. */
void ledger_take_durable(struct ledger *l, const struct pg_arena *a, const struct pg_arena *live);
/* False: *fault says what differs. */
bool ledger_same(const struct ledger *found, const struct ledger *expected,
                 struct pg_fault *fault);
/* Check that every fact equals that of one of the stages, and that facts of all stages exist. */
bool ledger_between(const struct ledger *found, const struct ledger *stages, uint32_t count,
                    struct pg_fault *fault);
/* Sums up entries [from, tail) independently of their order. */
uint64_t ledger_fired(const struct pg_arena *a, uint64_t from, uint64_t fresh);
/* Every topic's entries follow one another, and the topic knows the newest. */
bool ledger_gapless(const struct pg_arena *a);

uint64_t ledger_mix(uint64_t hash, uint64_t value);
uint64_t ledger_bytes(uint64_t hash, const void *bytes, uint64_t len);

#endif

/* ledger.h - the state of an arena's timers, operations, notices and watermarks in a form that does
 * not depend on slots, chunks and rows, so that two arenas can be compared. */
#ifndef PURGATORYD_LEDGER_H
#define PURGATORYD_LEDGER_H

#include "core/core.h"

#define FACTS_MAX 400
#define TOPICS_MAX 8

/* A fact is the sum of hashes over everything that concerns one ticket or one key. A kill may come
 * between the end of a timer and its notice, or between the old and the new timer of a key, but
 * after a recovery such a pair must be either untouched or complete. Each pair is therefore in one
 * fact. */
enum subject_kind { OF_TICKET, OF_KEY, OF_WATERMARK, OF_NAME, OF_SESSION, OF_BULK_LOAD, OF_ROW,
                    OF_JOB, OF_GROUP, OF_SCHEDULE };
struct fact {
    uint64_t subject, state;      /* the low 4 bits of `subject` are its enum subject_kind */
};

struct ledger {
    uint32_t count;
    struct fact facts[FACTS_MAX];
    uint64_t sequences[TOPICS_MAX];  /* newest sequence of each topic row */
    /* Sum of the hashes of forgotten watch keys, which are deleted with their last watcher. */
    uint64_t forgotten;
};

/* Collect all facts. The call under test issued the tickets from `fresh` on. A repeated call may
 * get other tickets. Facts about these tickets are therefore stored by key and do not include the
 * ticket. */
void ledger_take(struct ledger *l, const struct pg_arena *a, uint64_t fresh);
/* Collect only the facts that the WAL restores: no sessions, hence no outcomes, and only unsent
 * notices. The WAL does not record that an unused topic has lost its row, so include only topics
 * that have a row in the arena `live`. */
void ledger_take_durable(struct ledger *l, const struct pg_arena *a, const struct pg_arena *live);
/* Return true if the two ledgers are equal; otherwise describe the difference in *fault. */
bool ledger_same(const struct ledger *found, const struct ledger *expected,
                 struct pg_fault *fault);
/* Return true if each fact in `found` has the same state in at least one of the ledgers `stages`,
 * and each fact that all `stages` contain is in `found`. `jobs`: include the states of jobs. A single
 * call that moves the clock may change a job several times. */
bool ledger_between(const struct ledger *found, const struct ledger *stages, uint32_t count,
                    bool jobs, struct pg_fault *fault);
/* Return the sum of the hashes of the replay buffer entries from position `from` to the tail. */
uint64_t ledger_fired(const struct pg_arena *a, uint64_t from, uint64_t fresh);
/* Return true if the sequences of every topic's entries have no gap and end at the topic's
 * sequence. */
bool ledger_gapless(const struct pg_arena *a);

/* Mix a word, or bytes, into a hash; return the new hash. */
uint64_t ledger_mix(uint64_t hash, uint64_t value);
uint64_t ledger_bytes(uint64_t hash, const void *bytes, uint64_t len);

#endif

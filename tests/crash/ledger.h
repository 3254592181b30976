/* ledger.h - the state of an arena's timers, operations, notices and watermarks in a form that does
 * not depend on slots, chunks and rows, so that two arenas can be compared. */
#ifndef PURGATORYD_LEDGER_H
#define PURGATORYD_LEDGER_H

#include "core/core.h"

#define FACTS_MAX 240
#define TOPICS_MAX 8

/* A fact is the sum of hashes over everything that concerns one ticket or one key. A kill may
 * separate a timer from its notice, or the old timer of a key from the new one, but a recovery may
 * not. Both are therefore in one fact. */
enum subject_kind { OF_TICKET, OF_KEY, OF_WATERMARK, OF_NAME, OF_SESSION, OF_BULK_LOAD, OF_ROW };
struct fact {
    uint64_t subject, state;      /* the low 3 bits of a subject are its enum subject_kind */
};

struct ledger {
    uint32_t count;
    struct fact facts[FACTS_MAX];
    uint64_t sequences[TOPICS_MAX];  /* by topic row */
    /* Sum of hashes of the watermarks that go with their last watcher. */
    uint64_t forgotten;
};

/* Collect all facts. Tickets from `fresh` on were issued by the call under test. A repeated call
 * may get others, so these count by key and not by number. */
void ledger_take(struct ledger *l, const struct pg_arena *a, uint64_t fresh);
/* Collect the facts that the WAL restores: no sessions, hence no outcomes, and only unsent
 * notices. The WAL does not record that an unused topic has lost its row, so only topics with a
 * row in `live` count. */
void ledger_take_durable(struct ledger *l, const struct pg_arena *a, const struct pg_arena *live);
/* True if both ledgers are equal; otherwise *fault describes the difference. */
bool ledger_same(const struct ledger *found, const struct ledger *expected,
                 struct pg_fault *fault);
/* True if every fact has its state from one of the stages, and no fact that all stages
 * share is missing. */
bool ledger_between(const struct ledger *found, const struct ledger *stages, uint32_t count,
                    struct pg_fault *fault);
/* Sum over the entries from `from` to the tail, independent of their order. */
uint64_t ledger_fired(const struct pg_arena *a, uint64_t from, uint64_t fresh);
/* True if the sequences of every topic's entries are contiguous and end at the topic's sequence. */
bool ledger_gapless(const struct pg_arena *a);

/* Hash functions: mix in a word, or bytes. */
uint64_t ledger_mix(uint64_t hash, uint64_t value);
uint64_t ledger_bytes(uint64_t hash, const void *bytes, uint64_t len);

#endif

/* model.h - runs product code in all executions that the memory model of C11 allows.
 *
 * The core is compiled with -fsanitize=thread, and model.c stands in for the sanitizer's runtime:
 * it sees each load, store and fence with its order, decides which store a load reads from, and
 * puts that value into memory before the load. So the search explores the compiled core itself.
 *
 * The model is the view machine of Kang, Hur, Lahav, Vafeiadis, Dreyer: "A promising semantics for
 * relaxed-memory concurrency" (POPL 2017), without promises. Each store is a message; each thread
 * has views that say which messages it has to know. Like RC11 (Lahav and others, PLDI 2017), the
 * model leaves out C11 executions in which a load reads from a store that depends on the load. A
 * seq_cst fence is an acq_rel exchange of one word that all such fences share, so each of them knows
 * what the earlier ones knew. The model allows more executions than C11 in two cases: a seq_cst
 * access counts as acq_rel, and relaxed stores do not continue a release sequence. It finds races of plain accesses with vector clocks of the
 * threads (FastTrack, Flanagan and Freund, PLDI 2009).
 */
#ifndef PURGATORYD_MODEL_H
#define PURGATORYD_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#define MODEL_THREADS 2

struct scenario {
    const char *name;
    /* Makes the arena, and calls model_watch for the memory that the threads share. Runs once. */
    void (*setup)(void);
    /* Restores the memory that a run changes and that is not watched. */
    void (*again)(void);
    /* The functions of the threads. `first_alone` is true if the first thread reads nothing that
     * the second writes; the first thread then runs only once, before the second. */
    void (*threads[MODEL_THREADS])(void);
    bool first_alone;
    /* If true, readers check afterwards whether their copies are consistent, so plain accesses
     * count as relaxed accesses. If false, plain accesses that race are a fault. */
    bool copies_are_checked;
    /* Called when no thread can continue; checks the result. */
    void (*end)(void);
};

enum weakening {
    INTACT,
    NO_RELEASE,                   /* a store, or the store of an exchange, becomes relaxed */
    NO_ACQUIRE,                   /* a load, or the load of an exchange, becomes relaxed */
    NO_FENCE,
    NO_LOOK                       /* a load after a fence repeats the value that was loaded before
                                     the fence */
};

/* One place in the code, and how its memory order is weakened. */
struct mutation {
    enum weakening kind;
    uintptr_t place;              /* return address of the call that the compiler inserted there */
};

struct outcome {
    const char *fault;            /* NULL = no execution has a fault */
    uint64_t executions;
};

void model_watch(const void *from, uint64_t bytes);
/* Reports a fault of this execution. The threads and `end` call it. */
void model_fault(const char *found);
/* Explores all executions of a scenario, up to the first fault. */
struct outcome model_explore(const struct scenario *s, struct mutation m);
/* Writes to `out` all mutations that are possible in the last explored scenario; returns their
 * number. */
uint32_t model_mutations(struct mutation *out, uint32_t most);

#endif

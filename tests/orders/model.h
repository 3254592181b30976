/* model.h - runs product code under the memory model of C11, in every way that the model allows.
 *
 * The core is compiled with -fsanitize=thread, and model.c stands in for the sanitizer's runtime: it
 * sees each load, store and fence with its order, decides which store a load reads from, and puts
 * that value into memory before the load. So what is explored is the compiled core itself.
 *
 * The model is the view machine of Kang, Hur, Lahav, Vafeiadis, Dreyer: "A promising semantics for
 * relaxed-memory concurrency" (POPL 2017), without promises. Each store is a message; each thread has
 * views that say which messages it has to know of. C11 executions in which a load reads from a store
 * that depends on it are left out, as in RC11 (Lahav and others, PLDI 2017). seq_cst counts as
 * acq_rel, and relaxed stores do not continue a release sequence, so the model allows more than C11
 * there. Races of plain accesses are found by the threads' clocks (FastTrack, Flanagan and Freund,
 * PLDI 2009).
 */
#ifndef PURGATORYD_MODEL_H
#define PURGATORYD_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#define MODEL_THREADS 2

struct scenario {
    const char *name;
    /* Makes the arena, and tells model_watch which memory the threads share. Runs once. */
    void (*setup)(void);
    /* Undoes what a run did to memory that is not watched. */
    void (*again)(void);
    /* The first one runs once, before the second, if it reads nothing that the second writes. */
    void (*threads[MODEL_THREADS])(void);
    bool first_alone;
    /* Readers check afterwards whether their copies are whole, so plain accesses count as relaxed
     * ones. Else two that are not ordered are a fault. */
    bool copies_are_checked;
    /* Called once no thread can go on. */
    void (*end)(void);
};

enum weakening {
    INTACT,
    NO_RELEASE,                   /* a store or the store of an exchange becomes relaxed */
    NO_ACQUIRE,                   /* the same for a load */
    NO_FENCE,
    NO_LOOK                       /* a load behind a fence gives what the one before the fence gave */
};

/* One place in the code, and what is made of it. */
struct mutation {
    enum weakening kind;
    uintptr_t place;              /* return address of the call that the compiler put there */
};

struct outcome {
    const char *fault;            /* NULL: none in any execution */
    uint64_t executions;
};

void model_watch(const void *from, uint64_t bytes);
/* To be called by the threads, or by `end`: this execution must not be. */
void model_fault(const char *found);
/* Explores all executions, up to the first fault. */
struct outcome model_explore(const struct scenario *s, struct mutation m);
/* Writes to `out` what may be weakened in the scenario that was explored last; returns how many. */
uint32_t model_mutations(struct mutation *out, uint32_t most);

#endif

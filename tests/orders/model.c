/* model.c - the view machine that model.h describes, and the search through its executions. */
#define _GNU_SOURCE
#include "model.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <ucontext.h>

#include "check.h"
#include "tsan.h"

enum {
    CELLS_MAX = 1 << 15,          /* a power of two; number of cells (units of memory) that the
                                     threads may access */
    SHARED_MAX = 256,             /* cells that one thread writes and another thread accesses */
    MESSAGES_MAX = 64,            /* stores to one shared cell in an execution */
    RANGES_MAX = 8,
    SITES_MAX = 512,
    DEPTH_MAX = 4096,
    EXECUTIONS_MAX = 100000,      /* a scenario without mutation needs fewer executions */
    STATES_MAX = 1 << 22,         /* a power of two; size of the hash set of visited states */
    STACK = 1 << 18,
    EVENTS = 4096                 /* the counter of eventfd n is modelled as a word at address 8 *
                                     n, for n < EVENTS */
};

/* The knowledge of a thread: the newest message of each shared cell, and the steps of each thread.
 * A message carries a view for the threads that read it. */
struct view {
    uint16_t seen[SHARED_MAX];
    uint32_t clock[MODEL_THREADS];
};

struct message {
    uint64_t value;
    struct view view;             /* an acquire load of the message joins this view */
};

/* A unit of memory: 8 bytes if they are a word with atomic accesses, 1 byte if its 4-byte word has
 * an atomic byte, otherwise 4 bytes. */
struct cell {
    uintptr_t at;                 /* 0: not used */
    uint8_t bytes;
    uint8_t writers, users;       /* one bit for each thread */
    int16_t shared;               /* index in shared[]; -1 = not shared */
    uint64_t initial;
};

struct shared {
    struct cell *cell;
    uint32_t plain_read[MODEL_THREADS], plain_write[MODEL_THREADS];
    uint32_t atomic_read[MODEL_THREADS], atomic_write[MODEL_THREADS];
    uint64_t last_value[MODEL_THREADS];      /* value of each thread's last load */
    uint32_t loaded[MODEL_THREADS];          /* 1 + number of the thread's fences before its last
                                                load; 0 = no load yet */
    uint16_t count;
    struct message messages[MESSAGES_MAX];
};

enum kind { LOAD, EXCHANGE, ADD, WAIT };

struct thread {
    ucontext_t context;
    uint8_t *stack;
    struct view now, acquired, released;     /* acquired: joins `now` at the next acquire fence;
                                                released: view at the last release fence */
    uint32_t fences;              /* number of fences that the thread has passed */
    uint64_t log;                 /* digest of all that the thread has read, which determines its
                                     state */
    bool waits, finished;
    enum kind kind;               /* kind of the access that the thread waits for */
    struct shared *word;
    int order;
    uint64_t operand, result;
};

struct site {
    uintptr_t place;
    bool releases, acquires, fence, look;
};

static struct { uintptr_t from, upto; } ranges[RANGES_MAX];
static uint32_t range_count;
static struct cell cells[CELLS_MAX];
/* Hash sets that survive restarts of the search. `atomics` has an atomic word of 8 bytes by its
 * address, and an atomic byte by the address of its 4-byte word + 1. */
static uintptr_t atomics[CELLS_MAX], known_shared[CELLS_MAX];
static uint8_t known_writers[CELLS_MAX];     /* writers of known_shared[i] */
static struct shared shared[SHARED_MAX];
static uint32_t shared_count;
static struct site sites[SITES_MAX];
static uint32_t site_count;
static uint64_t states[STATES_MAX];
static uint64_t state_count;
static struct { uint16_t index, count; } path[DEPTH_MAX];
static uint32_t depth, path_length;

static const struct scenario *scenario;
static struct mutation mutation;
static struct thread threads[MODEL_THREADS];
static uint32_t running;
static bool watching;             /* product code runs, so its accesses are modelled */
static bool restart;              /* the search must restart, because a further cell turned out to
                                     be shared */
static const char *fault;
static ucontext_t search;
static uintptr_t stored_at;       /* address of an announced plain store, whose value is not in
                                     memory yet */
static uint64_t stored_bytes;
static uint64_t fence_word;       /* the word of all seq_cst fences */

/* The C library's functions. The linker redirects the product's calls of memcpy and so on to the
 * __wrap_ functions below (ld --wrap). */
void *__real_memcpy(void *to, const void *from, size_t bytes);
void *__real_memmove(void *to, const void *from, size_t bytes);
void *__real_memset(void *at, int value, size_t bytes);
int __real_memcmp(const void *a, const void *b, size_t bytes);

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

/* ---- cells --------------------------------------------------------------------------------- */

/* Returns the index of an address in a hash set, or of the empty entry where it belongs. */
static uint32_t set_place(const uintptr_t *set, uintptr_t at)
{
    uint64_t i = mix(at);
    while (set[i % CELLS_MAX] != at && set[i % CELLS_MAX] != 0)
        i++;
    return (uint32_t)(i % CELLS_MAX);
}

static bool in_set(const uintptr_t *set, uintptr_t at) { return set[set_place(set, at)] == at; }
static void set_add(uintptr_t *set, uintptr_t at) { set[set_place(set, at)] = at; }

static bool watched(uintptr_t at)
{
    for (uint32_t i = 0; i < range_count; i++)
        if (at >= ranges[i].from && at < ranges[i].upto)
            return true;
    return false;
}

static bool is_event(uintptr_t at) { return at < 8 * EVENTS; }

static uint64_t memory_get(const struct cell *c)
{
    uint64_t value = 0;
    if (!is_event(c->at))
        __real_memcpy(&value, (const void *)c->at, c->bytes);
    return value;
}

static void memory_put(const struct cell *c, uint64_t value)
{
    if (!is_event(c->at))
        __real_memcpy((void *)c->at, &value, c->bytes);
}

/* Resets a shared cell, so that its initial value is its only message. */
static void shared_reset(struct shared *w, struct cell *c)
{
    memset(w, 0, offsetof(struct shared, messages) + sizeof w->messages[0]);
    w->cell = c;
    w->count = 1;
    w->messages[0].value = c->initial;
}

static void shared_add(struct cell *c)
{
    CHECK(shared_count < SHARED_MAX);
    c->shared = (int16_t)shared_count;
    shared_reset(&shared[shared_count++], c);
}

static struct cell *cell_of(uintptr_t at)
{
    const uintptr_t eight = at & ~(uintptr_t)7;
    const bool whole = in_set(atomics, eight), split = in_set(atomics, (at & ~(uintptr_t)3) + 1);
    const uintptr_t base = whole ? eight : split ? at : at & ~(uintptr_t)3;
    uint64_t i = mix(base);
    while (cells[i % CELLS_MAX].at != 0 && cells[i % CELLS_MAX].at != base)
        i++;
    struct cell *c = &cells[i % CELLS_MAX];
    if (c->at == 0) {
        *c = (struct cell){.at = base, .bytes = whole ? 8 : split ? 1 : 4, .shared = -1};
        c->initial = memory_get(c);
        if (in_set(known_shared, base)) {
            c->writers = known_writers[set_place(known_shared, base)];
            shared_add(c);
        }
    }
    return c;
}

/* Records an access of the running thread. If one thread writes a cell and another thread accesses
 * it, the cell is shared: all its accesses have to be modelled, so the search restarts. The search
 * also restarts if a further thread writes the cell. */
static struct shared *use(struct cell *c, bool write)
{
    const uint8_t before = c->writers;
    c->users |= (uint8_t)(1u << running);
    c->writers |= (uint8_t)(write << running);
    const bool is_shared = c->writers != 0 && (c->users & (c->users - 1)) != 0;
    if (is_shared && (c->shared < 0 || c->writers != before)) {
        set_add(known_shared, c->at);
        known_writers[set_place(known_shared, c->at)] = c->writers;
        restart = true;
    }
    return c->shared >= 0 ? &shared[c->shared] : NULL;
}

/* ---- views --------------------------------------------------------------------------------- */

static void view_join(struct view *v, const struct view *with)
{
    for (uint32_t i = 0; i < shared_count; i++)
        if (v->seen[i] < with->seen[i])
            v->seen[i] = with->seen[i];
    for (uint32_t i = 0; i < MODEL_THREADS; i++)
        if (v->clock[i] < with->clock[i])
            v->clock[i] = with->clock[i];
}

static bool acquires(int order) { return order != __ATOMIC_RELAXED && order != __ATOMIC_RELEASE; }
static bool releases(int order)
{
    return order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL || order == __ATOMIC_SEQ_CST;
}

static void ordered(const uint32_t *clocks, const char *found)
{
    for (uint32_t i = 0; i < MODEL_THREADS; i++)
        if (clocks[i] > threads[running].now.clock[i])
            model_fault(found);
}

/* Reports a race: two accesses must be ordered if one is a plain access and one is a store. */
static void race_check(struct shared *w, bool write, bool atomic)
{
    struct thread *t = &threads[running];
    t->now.clock[running]++;
    if (!scenario->copies_are_checked) {
        ordered(w->plain_write, "a race with a plain store");
        if (write)
            ordered(w->plain_read, "a store races with a plain load");
        if (!atomic)
            ordered(w->atomic_write, "a plain access races with an atomic store");
        if (write && !atomic)
            ordered(w->atomic_read, "a plain store races with an atomic load");
    }
    uint32_t *clocks = write ? atomic ? w->atomic_write : w->plain_write
                             : atomic ? w->atomic_read : w->plain_read;
    clocks[running] = t->now.clock[running];
}

static uint16_t number_of(const struct shared *w) { return (uint16_t)(w - shared); }

static void message_add(struct shared *w, uint64_t value, bool release, const struct view *carried)
{
    struct thread *t = &threads[running];
    CHECK(w->count < MESSAGES_MAX);
    const uint16_t number = number_of(w), index = w->count++;
    struct message *m = &w->messages[index];
    t->now.seen[number] = t->acquired.seen[number] = index;
    m->value = value;
    m->view = release ? t->now : t->released;
    if (carried != NULL)
        view_join(&m->view, carried);
    if (m->view.seen[number] < index)
        m->view.seen[number] = index;
    memory_put(w->cell, value);
}

static uint64_t message_read(struct shared *w, uint16_t index, bool acquire)
{
    struct thread *t = &threads[running];
    const struct message *m = &w->messages[index];
    t->now.seen[number_of(w)] = index;
    view_join(&t->acquired, &m->view);
    if (acquire)
        view_join(&t->now, &m->view);
    t->log = mix(t->log ^ mix(w->cell->at ^ (uint64_t)index << 48));
    memory_put(w->cell, m->value);
    w->last_value[running] = m->value;
    w->loaded[running] = 1 + t->fences;
    return m->value;
}

/* ---- the search ---------------------------------------------------------------------------- */

static uint16_t pick(uint16_t count)
{
    CHECK(count > 0 && depth < DEPTH_MAX);
    if (depth == path_length) {
        path[path_length].index = 0;
        path[path_length++].count = count;
    }
    CHECK(path[depth].count == count);
    return path[depth++].index;
}

static bool path_next(void)
{
    while (path_length > 0 && path[path_length - 1].index + 1 == path[path_length - 1].count)
        path_length--;
    if (path_length == 0)
        return false;
    path[path_length - 1].index++;
    return true;
}

/* Lists the messages that a load may read. If several messages have the same value, lists only the
 * oldest, because it leaves the most possibilities for later loads. */
static uint16_t readable(const struct shared *w, const struct thread *t, uint16_t *out)
{
    uint16_t count = 0;
    for (uint16_t i = t->now.seen[number_of(w)]; i < w->count; i++) {
        bool again = false;
        for (uint16_t k = 0; k < count; k++)
            again |= w->messages[out[k]].value == w->messages[i].value;
        if (!again)
            out[count++] = i;
    }
    return count;
}

static void leave(void)
{
    watching = false;
    swapcontext(&threads[running].context, &search);
    watching = true;
}

void model_fault(const char *found)
{
    if (fault == NULL && !restart)
        fault = found;
    if (watching)
        leave();                  /* the thread never continues */
}

/* Waits until the search has decided which message is read; returns its value. */
static uint64_t wait_for(struct shared *w, enum kind kind, int order, uint64_t operand)
{
    struct thread *t = &threads[running];
    if (restart)
        leave();
    if (scenario->first_alone && kind == LOAD) {
        uint16_t may[MESSAGES_MAX];
        const uint16_t count = readable(w, t, may);
        return message_read(w, may[count == 1 ? 0 : pick(count)], acquires(order));
    }
    t->waits = true;
    t->word = w;
    t->kind = kind;
    t->order = order;
    t->operand = operand;
    leave();
    return t->result;
}

/* Lists the messages that a waiting thread may read next; returns their number. */
static uint16_t alternatives(const struct thread *t, uint16_t *out)
{
    const uint16_t newest = (uint16_t)(t->word->count - 1);
    if (t->kind == LOAD)
        return readable(t->word, t, out);
    out[0] = newest;
    return t->kind != WAIT || t->word->messages[newest].value != 0;
}

static void go_on(uint16_t index)
{
    struct thread *t = &threads[running];
    struct shared *w = t->word;
    t->waits = false;
    t->result = message_read(w, index, acquires(t->order));
    if (t->kind == LOAD)
        return;
    const struct view carried = w->messages[index].view;
    message_add(w, t->kind == ADD ? t->result + t->operand : t->operand, releases(t->order),
                &carried);
}

static bool seen_before(void)
{
    uint64_t state = 0;
    for (uint32_t i = 0; i < MODEL_THREADS; i++)
        state = mix(state ^ threads[i].log) + i;
    for (uint64_t i = state;; i++) {
        uint64_t *at = &states[i % STATES_MAX];
        if (*at == state)
            return true;
        if (*at == 0) {
            CHECK(++state_count < STATES_MAX / 2);
            *at = state;
            return false;
        }
    }
}

static void body(void)
{
    watching = true;
    scenario->threads[running]();
    watching = false;
    threads[running].finished = true;
    swapcontext(&threads[running].context, &search);
}

static void flush(void);

static void resume(uint32_t thread)
{
    running = thread;
    watching = true;
    swapcontext(&search, &threads[thread].context);
    watching = false;
    flush();
}

static void thread_reset(uint32_t thread)
{
    struct thread *t = &threads[thread];
    uint8_t *stack = t->stack != NULL ? t->stack : malloc(STACK);
    CHECK(stack != NULL);
    memset(t, 0, sizeof *t);
    t->stack = stack;
    t->log = thread + 1;
    getcontext(&t->context);
    t->context.uc_stack.ss_sp = stack;
    t->context.uc_stack.ss_size = STACK;
    makecontext(&t->context, body, 0);
}

/* Runs each thread until it has to read a shared cell. A store that comes before the reads of other
 * threads only gives them more messages to choose from. */
static void all_to_their_reads(void)
{
    for (uint32_t i = 0; i < MODEL_THREADS; i++)
        while (fault == NULL && !restart && !threads[i].finished && !threads[i].waits)
            resume(i);
}

/* Runs one execution: first along the recorded path, then with new choices. */
static void run_both(void)
{
    for (;;) {
        uint16_t may[MODEL_THREADS][MESSAGES_MAX], count[MODEL_THREADS], sum = 0;
        all_to_their_reads();
        if (fault != NULL || restart || (depth == path_length && seen_before()))
            return;
        for (uint32_t i = 0; i < MODEL_THREADS; i++)
            sum += count[i] = threads[i].waits ? alternatives(&threads[i], may[i]) : 0;
        if (sum == 0)
            break;
        uint16_t index = pick(sum), thread = 0;
        for (; index >= count[thread]; thread++)
            index -= count[thread];
        running = thread;
        go_on(may[thread][index]);
    }
    if (scenario->end != NULL)
        scenario->end();
}

static void memory_reset(void)
{
    stored_bytes = 0;
    for (uint32_t i = 0; i < CELLS_MAX; i++)
        if (cells[i].writers != 0)
            memory_put(&cells[i], cells[i].initial);
    if (scenario->again != NULL)
        scenario->again();
}

static void forget_cells(void)
{
    memset(cells, 0, sizeof cells);
    shared_count = 0;
    restart = false;
}

/* Starts from the beginning, with the initial messages only. */
static void execution_begin(void)
{
    memory_reset();
    for (uint32_t i = 0; i < shared_count; i++)
        shared_reset(&shared[i], shared[i].cell);
    for (uint32_t i = 0; i < MODEL_THREADS; i++)
        thread_reset(i);
}

static void first_run(void)
{
    execution_begin();
    while (!threads[0].finished && fault == NULL && !restart)
        resume(0);
}

/* Runs only the second thread, with the messages that the first thread left. */
static void run_second(void)
{
    thread_reset(1);
    for (uint32_t i = 0; i < shared_count; i++)
        shared[i].loaded[1] = 0;
    while (!threads[1].finished && fault == NULL && !restart)
        resume(1);
    if (fault == NULL && !restart && scenario->end != NULL)
        scenario->end();
}

static void search_begin(void)
{
    if (restart) {
        memory_reset();
        forget_cells();
    }
    if (state_count != 0)
        memset(states, 0, sizeof states);
    state_count = path_length = 0;
    if (scenario->first_alone)
        first_run();
}

static void execute(void)
{
    depth = 0;
    if (restart)
        return;
    if (scenario->first_alone) {
        run_second();
    } else {
        execution_begin();
        run_both();
    }
}

struct outcome model_explore(const struct scenario *s, struct mutation m)
{
    struct outcome o = {0};
    if (scenario != s) {
        site_count = range_count = 0;
        forget_cells();
        memset(atomics, 0, sizeof atomics);
        memset(known_shared, 0, sizeof known_shared);
        memset(known_writers, 0, sizeof known_writers);
        model_watch(&fence_word, sizeof fence_word);
        s->setup();
    }
    scenario = s;
    mutation = m;
    fault = NULL;
    search_begin();
    do {
        execute();
        o.executions++;
        while (restart) {         /* start again, because more cells turned out to be shared */
            search_begin();
            execute();
            o.executions = 1;
        }
    } while (fault == NULL && o.executions < EXECUTIONS_MAX && path_next());
    memory_reset();
    o.fault = fault;
    return o;
}

void model_watch(const void *from, uint64_t bytes)
{
    CHECK(range_count < RANGES_MAX);
    ranges[range_count].from = (uintptr_t)from;
    ranges[range_count++].upto = (uintptr_t)from + bytes;
}

/* ---- sites --------------------------------------------------------------------------------- */

static struct site *site_of(uintptr_t place)
{
    for (uint32_t i = 0; i < site_count; i++)
        if (sites[i].place == place)
            return &sites[i];
    CHECK(site_count < SITES_MAX);
    sites[site_count] = (struct site){.place = place};
    return &sites[site_count++];
}

static bool weakened(uintptr_t place, enum weakening kind)
{
    return mutation.kind == kind && mutation.place == place;
}

/* Returns the memory order of an access to a shared cell, weakened if the mutation says so. */
static int order_at(uintptr_t place, bool load, bool store, int order)
{
    struct site *s = site_of(place);
    bool acquire = load && acquires(order), release = store && releases(order);
    s->acquires |= acquire;
    s->releases |= release;
    acquire &= !weakened(place, NO_ACQUIRE);
    release &= !weakened(place, NO_RELEASE);
    return acquire && release ? __ATOMIC_ACQ_REL
           : acquire          ? __ATOMIC_ACQUIRE
           : release          ? __ATOMIC_RELEASE
                              : __ATOMIC_RELAXED;
}

uint32_t model_mutations(struct mutation *out, uint32_t most)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < site_count; i++) {
        const struct site *s = &sites[i];
        const bool may[] = {[NO_RELEASE] = s->releases, [NO_ACQUIRE] = s->acquires,
                            [NO_FENCE] = s->fence, [NO_LOOK] = s->look};
        for (enum weakening k = NO_RELEASE; k <= NO_LOOK; k++)
            if (may[k] && count < most)
                out[count++] = (struct mutation){k, s->place};
    }
    return count;
}

/* ---- plain accesses ------------------------------------------------------------------------ */

static bool skipped(const void *at) { return !watching || !watched((uintptr_t)at); }

/* Adds a message to each shared cell that the announced plain store changed. The caller runs after
 * the store, so memory contains the stored value. */
static void flush(void)
{
    if (stored_bytes == 0)
        return;
    const uintptr_t end = stored_at + stored_bytes;
    stored_bytes = 0;
    for (uintptr_t at = stored_at; at < end;) {
        const struct cell *c = cell_of(at);
        if (c->shared >= 0) {
            struct shared *w = &shared[c->shared];
            const uint64_t value = memory_get(c);
            if (value != w->messages[w->count - 1].value)
                message_add(w, value, false, NULL);
        }
        at = c->at + c->bytes;
    }
}

static void plain_store(const void *to, uint64_t bytes)
{
    if (skipped(to))
        return;
    flush();
    for (uintptr_t at = (uintptr_t)to; at < (uintptr_t)to + bytes;) {
        struct cell *c = cell_of(at);
        struct shared *w = use(c, true);
        if (w != NULL) {
            race_check(w, true, false);
            memory_put(c, w->messages[w->count - 1].value);  /* memory may have an older value that
                                                                another thread has read */
        }
        at = c->at + c->bytes;
    }
    stored_at = (uintptr_t)to;
    stored_bytes = bytes;
}

static void plain_load(const void *from, uint64_t bytes)
{
    if (skipped(from))
        return;
    flush();
    for (uintptr_t at = (uintptr_t)from; at < (uintptr_t)from + bytes;) {
        struct cell *c = cell_of(at);
        struct shared *w = use(c, false);
        if (w != NULL) {
            race_check(w, false, false);
            if (scenario->copies_are_checked && running != 0)
                wait_for(w, LOAD, __ATOMIC_RELAXED, 0);
            else
                memory_put(c, w->messages[w->count - 1].value);
        }
        at = c->at + c->bytes;
    }
}

/* ---- atomic accesses ----------------------------------------------------------------------- */

/* Returns the cell of an atomic word. It has exactly the bytes of the word. */
static struct cell *word_of(uintptr_t at, uint32_t bytes)
{
    const uintptr_t known = bytes == 1 ? (at & ~(uintptr_t)3) + 1 : at;
    if (bytes != 4 && !in_set(atomics, known)) {
        set_add(atomics, known);
        restart = true;
        leave();
    }
    CHECK(cell_of(at)->bytes == bytes);
    return cell_of(at);
}

static bool atomic_load(uintptr_t at, uint32_t bytes, int order, uintptr_t place, uint64_t *value)
{
    if (skipped((const void *)at))
        return false;
    flush();
    struct cell *c = word_of(at, bytes);
    struct shared *w = use(c, false);
    if (w == NULL)
        return false;
    order = order_at(place, true, false, order);
    race_check(w, false, true);
    if (w->loaded[running] != 0 && w->loaded[running] <= threads[running].fences) {
        site_of(place)->look = true;
        if (weakened(place, NO_LOOK)) {
            *value = w->last_value[running];
            return true;
        }
    }
    if (c->writers == 1u << running) {       /* its own */
        *value = w->messages[w->count - 1].value;
        return true;
    }
    *value = wait_for(w, LOAD, order, 0);
    return true;
}

static bool atomic_store(uintptr_t at, uint32_t bytes, uint64_t value, int order, uintptr_t place)
{
    if (skipped((const void *)at))
        return false;
    flush();
    struct cell *c = word_of(at, bytes);
    struct shared *w = use(c, true);
    if (w == NULL)
        return false;
    CHECK(c->writers == 1u << running);      /* plain stores have one writer; words with two writers
                                                use exchanges */
    order = order_at(place, false, true, order);
    race_check(w, true, true);
    message_add(w, value, releases(order), NULL);
    return true;
}

static bool atomic_change(uintptr_t at, uint32_t bytes, enum kind kind, uint64_t operand, int order,
                          uintptr_t place, uint64_t *value)
{
    if (skipped((const void *)at))
        return false;
    flush();
    struct cell *c = word_of(at, bytes);
    struct shared *w = use(c, true);
    if (w == NULL)
        return false;
    order = order_at(place, true, true, order);
    race_check(w, true, true);
    *value = wait_for(w, kind, order, operand);
    return true;
}

/* ---- what the compilers call --------------------------------------------------------------- */

#define PLACE (uintptr_t)__builtin_return_address(0)

void __tsan_init(void) {}
void __tsan_func_entry(void *caller) { (void)caller; }
void __tsan_func_exit(void *caller) { (void)caller; }
void __tsan_read_range(void *at, unsigned long bytes) { plain_load(at, bytes); }
void __tsan_write_range(void *at, unsigned long bytes) { plain_store(at, bytes); }

static void full_fence(void)
{
    struct shared *w = use(word_of((uintptr_t)&fence_word, sizeof fence_word), true);
    if (w != NULL)
        wait_for(w, ADD, __ATOMIC_ACQ_REL, 0);
}

void __tsan_atomic_thread_fence(int order)
{
    struct thread *t = &threads[running];
    if (!watching)
        return;
    flush();
    t->fences++;
    site_of(PLACE)->fence = true;
    if (weakened(PLACE, NO_FENCE))
        return;
    if (acquires(order))
        view_join(&t->now, &t->acquired);
    if (order == __ATOMIC_SEQ_CST)
        full_fence();
    if (releases(order))
        t->released = t->now;
}

#define PLAIN(kind, bytes)                                                                        \
    void __tsan_##kind##read##bytes(void *at) { plain_load(at, bytes); }                          \
    void __tsan_##kind##write##bytes(void *at) { plain_store(at, bytes); }

TSAN_EACH_PLAIN(PLAIN)

#define ATOMIC(bits)                                                                              \
    uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t *at, int order)                \
    {                                                                                             \
        uint64_t value;                                                                           \
        return atomic_load((uintptr_t)at, bits / 8, order, PLACE, &value) ? (uint##bits##_t)value \
                                                                          : *at;                  \
    }                                                                                             \
    void __tsan_atomic##bits##_store(uint##bits##_t *at, uint##bits##_t value, int order)         \
    {                                                                                             \
        if (!atomic_store((uintptr_t)at, bits / 8, value, order, PLACE))                          \
            *at = value;                                                                          \
    }                                                                                             \
    uint##bits##_t __tsan_atomic##bits##_exchange(uint##bits##_t *at, uint##bits##_t value,       \
                                                  int order)                                      \
    {                                                                                             \
        uint64_t old;                                                                             \
        if (atomic_change((uintptr_t)at, bits / 8, EXCHANGE, value, order, PLACE, &old))          \
            return (uint##bits##_t)old;                                                           \
        return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);                                  \
    }                                                                                             \
    uint##bits##_t __tsan_atomic##bits##_fetch_add(uint##bits##_t *at, uint##bits##_t value,      \
                                                   int order)                                     \
    {                                                                                             \
        uint64_t old;                                                                             \
        if (atomic_change((uintptr_t)at, bits / 8, ADD, value, order, PLACE, &old))               \
            return (uint##bits##_t)old;                                                           \
        return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                                   \
    }

TSAN_EACH_ATOMIC(ATOMIC)

/* ---- library calls that the linker redirects (ld --wrap) --------------------------------------- */

void *__wrap_memcpy(void *to, const void *from, size_t bytes);
void *__wrap_memmove(void *to, const void *from, size_t bytes);
void *__wrap_memset(void *at, int value, size_t bytes);
int __wrap_memcmp(const void *a, const void *b, size_t bytes);

void *__wrap_memcpy(void *to, const void *from, size_t bytes)
{
    plain_load(from, bytes);
    plain_store(to, bytes);
    return __real_memcpy(to, from, bytes);
}

void *__wrap_memmove(void *to, const void *from, size_t bytes)
{
    plain_load(from, bytes);
    plain_store(to, bytes);
    return __real_memmove(to, from, bytes);
}

void *__wrap_memset(void *at, int value, size_t bytes)
{
    plain_store(at, bytes);
    return __real_memset(at, value, bytes);
}

int __wrap_memcmp(const void *a, const void *b, size_t bytes)
{
    plain_load(a, bytes);
    plain_load(b, bytes);
    return __real_memcmp(a, b, bytes);
}

/* Clang calls these functions instead of memcpy, memmove and memset. */
void *__tsan_memcpy(void *to, const void *from, size_t bytes)
{
    return __wrap_memcpy(to, from, bytes);
}
void *__tsan_memmove(void *to, const void *from, size_t bytes)
{
    return __wrap_memmove(to, from, bytes);
}
void *__tsan_memset(void *at, int value, size_t bytes) { return __wrap_memset(at, value, bytes); }

/* Reports a broken assertion of the core as a fault of the execution; the thread does not
 * continue. */
_Noreturn void __wrap_assertion_failed(const char *part, const char *invariant);
_Noreturn void __wrap_assertion_failed(const char *part, const char *invariant)
{
    (void)part;
    model_fault(invariant);
    abort();
}

/* Calls on the same eventfd are ordered, because the kernel locks the eventfd. */
int __wrap_eventfd_write(int fd, eventfd_t value);
int __wrap_eventfd_read(int fd, eventfd_t *value);

static struct shared *event_word(int fd)
{
    const uintptr_t at = 8 * (uintptr_t)fd;
    CHECK(fd > 0 && fd < EVENTS);
    flush();
    struct cell *c = word_of(at, 8);
    if (c->shared < 0) {
        set_add(known_shared, c->at);
        known_writers[set_place(known_shared, c->at)] = (1u << MODEL_THREADS) - 1;
        restart = true;
        leave();
    }
    return &shared[c->shared];
}

int __wrap_eventfd_write(int fd, eventfd_t value)
{
    if (watching)
        wait_for(event_word(fd), ADD, __ATOMIC_ACQ_REL, value);
    return 0;
}

int __wrap_eventfd_read(int fd, eventfd_t *value)
{
    *value = 0;
    if (watching)
        *value = wait_for(event_word(fd), WAIT, __ATOMIC_ACQ_REL, 0);
    return 0;
}

/* crash.c - kill a daemon's call at any instruction, as kill -9 does.
 *
 * Each trial runs one call in a tiny arena, one instruction at a time. Whenever authoritative state
 * has changed, the trial recovers a copy as a new daemon would: it attaches to the copy, rebuilds
 * and checks it. Then it repeats the call, as a client sends its batch again. The result must equal
 * the result without a kill:
 *
 * - The recovered arena is sound. The state of each ticket and key in it is the state before the
 *   call or after one of the call's records, never between two records and never missing.
 * - Committed notices keep their position, sequence and ticket; no topic has a gap.
 * - If a control word or commit word has not changed, the data that readers trust because of it has
 *   not changed.
 * - If there is a WAL, redo of a snapshot and the WAL's frames gives the recovered arena.
 * - The repeated call returns the same statuses.
 * - The state afterwards and all notices that are fired later equal those without a kill.
 *
 * Some of the recoveries are themselves killed, at any instruction. A daemon runs the two passes of
 * a rebuild in two threads; here they run one after the other, in either order. */
#define _GNU_SOURCE                /* for setenv */
#include <stdio.h>
#include <unistd.h>

#include "wal.h"
#include "ledger.h"
#include "step.h"
#include "fixture.h"

#define VIOLATIONS_SHOWN 20
#define STATES_MAX (1u << 23)

/* ---- counting ------------------------------------------------------------------------------ */

struct counts {
    uint64_t trials, instructions, states, recoveries, violations;
};

/* Set of state hashes, with open addressing. */
struct seen {
    uint64_t *cells;
    uint32_t mask, count;
};

static void seen_open(struct seen *s, uint32_t cells)
{
    s->cells = calloc(cells, sizeof *s->cells);
    s->mask = cells - 1;
    s->count = 0;
    CHECK(s->cells != NULL);
}

static void seen_clear(struct seen *s)
{
    memset(s->cells, 0, ((uint64_t)s->mask + 1) * sizeof *s->cells);
    s->count = 0;
}

static bool seen_add(struct seen *s, uint64_t hash)
{
    uint64_t cell = hash & s->mask;
    hash |= 1;
    while (s->cells[cell] != 0) {
        if (s->cells[cell] == hash)
            return false;
        cell = (cell + 1) & s->mask;
    }
    CHECK(++s->count < s->mask);
    s->cells[cell] = hash;
    return true;
}

/* ---- trials ------------------------------------------------------------------------------- */

#define DOUBLES_MAX 8
#define WORDS_MAX 64              /* maximum number of control and commit words of a fixture */

/* A control or commit word, and the hash of the data that it protects, as a reader last saw
 * them. */
struct trusted {
    uint64_t word, hash;
};

struct trial {
    const char *operation;
    uint32_t shape;
    uint64_t seed;
    struct fixture fx, twin, redo;   /* fx runs the call, twin recovers, redo applies the WAL */
    struct frames snapshot, appended;
    struct call call;
    uint64_t fresh;               /* first ticket that the call may issue */
    int64_t recover_ns;
    uint32_t stage_count;
    struct ledger stages[RECORDS_MAX + 1];  /* state before the call and after each record */
    /* The call published notices to free space, so recovered arenas are not compared with
     * `stages`. */
    bool whole_only;
    struct ledger after, drained;
    uint64_t fired;
    struct reply reply;
    uint64_t statuses;            /* bit n: status n (enum pg_status) was returned */
    struct authoritative authoritative;
    uint8_t *shadow;              /* copy of the authoritative state after the last change */
    struct trusted trusted[WORDS_MAX];
    uint8_t *doubles[DOUBLES_MAX];
    uint64_t double_lsn[DOUBLES_MAX];
    uint64_t recovery_lsn;        /* first LSN that a recovery under test may write; 0 = the call is
                                     under test */
    uint32_t double_count, double_every;
    uint64_t changes;
    struct counts *counts;
};

static struct seen all_states, own_states;
static uint64_t violations;
static bool first_only;

static void violated(struct trial *t, const char *detail, const struct pg_fault *why)
{
    t->counts->violations++;
    if (violations++ < VIOLATIONS_SHOWN) {
        fprintf(stderr, "%s, shape %u, seed %" PRIu64 ", change %" PRIu64 ": %s\n", t->operation,
                t->shape, t->seed, t->changes, detail);
        if (why != NULL && why->part[0] != 0)
            fprintf(stderr, "    %s: %s at %" PRIu64 ": expected %" PRIu64 ", found %" PRIu64 "\n",
                    why->part, why->detail, why->where, why->expected, why->found);
    }
    if (first_only)
        exit(1);
}

/* ---- authoritative state ------------------------------------------------------------------ */

static void authoritative_save(const struct authoritative *t, uint8_t *to)
{
    for (uint32_t i = 0; i < t->count; i++) {
        memcpy(to, t->pieces[i].at, t->pieces[i].bytes);
        to += t->pieces[i].bytes;
    }
}

static void authoritative_restore(const struct authoritative *t, const uint8_t *from)
{
    for (uint32_t i = 0; i < t->count; i++) {
        memcpy(t->pieces[i].at, from, t->pieces[i].bytes);
        from += t->pieces[i].bytes;
    }
}

static bool authoritative_same(const struct authoritative *t, const uint8_t *saved)
{
    for (uint32_t i = 0; i < t->count; i++) {
        if (memcmp(saved, t->pieces[i].at, t->pieces[i].bytes) != 0)
            return false;
        saved += t->pieces[i].bytes;
    }
    return true;
}

/* Hash the authoritative state. Leave out fields that layout.h calls derived. */
static uint64_t authoritative_hash(const struct fixture *fx, const struct authoritative *t)
{
    const struct pg_header *h = fx->a->header;
    uint64_t hash = ledger_mix(h->next_ticket, h->next_incarnation);
    hash = ledger_mix(ledger_mix(hash, h->replay_head), h->replay_tail);
    hash = ledger_mix(ledger_mix(hash, h->published), (uint64_t)h->wall_offset_ns);
    for (uint32_t i = 0; i < fx->a->slots.capacity; i++) {
        const struct pg_hot *s = &fx->a->slots.hot[i];
        hash = ledger_mix(ledger_mix(hash, s->ctl), (uint64_t)s->deadline_ns);
        hash = ledger_mix(ledger_mix(hash, s->flags), (uint64_t)s->hash << 32 | s->topic);
    }
    for (uint32_t i = 0; i < fx->a->watch_rows; i++) {
        const struct pg_watch *x = &fx->a->watches[i];
        hash = ledger_mix(ledger_mix(hash, x->target), (uint64_t)x->key_row << 32 | x->slot);
        hash = ledger_mix(hash, x->slot == PG_NIL ? 0 : x->sibling);
    }
    for (uint32_t i = 0; i < fx->a->watermark_rows; i++) {
        const struct pg_watermark *l = &fx->a->watermarks[i];
        hash = ledger_bytes(ledger_mix(hash, l->watermark), l->key, sizeof l->key);
        hash = ledger_mix(hash, (uint64_t)l->error << 32 | l->touched_s);
        hash = ledger_mix(hash, (uint64_t)l->key_len << 32 | l->namespace_row);
    }
    for (uint32_t i = 2; i < t->count; i++)       /* all pieces after the header and the hot
                                                     slots */
        if (t->pieces[i].at != (uint8_t *)fx->a->watches &&
            t->pieces[i].at != (uint8_t *)fx->a->watermarks)
            hash = ledger_bytes(hash, t->pieces[i].at, t->pieces[i].bytes);
    return hash;
}

/* ---- invariants --------------------------------------------------------------------------- */

static bool whole(struct trial *t, const char *when)
{
    struct pg_fault fault;
    if (pg_check(t->twin.a, &fault) && pg_check_live(t->twin.a, &fault))
        return true;
    violated(t, when, &fault);
    return false;
}

/* Return true if all notices that were committed before the kill kept position, ticket, sequence
 * and topic. */
static bool committed_stay(const struct trial *t)
{
    const struct pg_header *h = t->twin.a->header;
    const uint64_t published = ((const struct pg_header *)t->fx.arena)->published;
    for (uint64_t p = h->replay_head; p < h->replay_head + h->replay_capacity; p++) {
        const struct pg_entry *was = replay_at(t->fx.a, p), *is = replay_at(t->twin.a, p);
        if (was->commit == p + 1 &&
            (p >= h->replay_tail || is->commit != was->commit || is->ticket != was->ticket ||
             is->sequence != was->sequence || is->topic != was->topic))
            return false;
    }
    return h->published <= (published > h->replay_head ? published : h->replay_head);
}

static uint64_t answer_ticket(uint64_t ticket, uint64_t fresh)
{
    return ticket >> 8 < fresh ? ticket : ctl_of(PG_TICKET_MAX, ticket & 0xff);
}

/* Return a hash of the keys of the operations that each CANCEL_FOR_KEY record ended. The hash does
 * not depend on the order of the keys, because the watchers of one watermark have no fixed
 * order. */
static uint64_t ended_keys(const struct reply *r, uint64_t at)
{
    uint64_t sum = 0;
    while (at < r->bytes) {
        uint32_t head[2];
        memcpy(head, r->body + at, sizeof head);
        at += sizeof head;
        sum += ledger_mix(head[0], head[1]);
        for (const uint64_t end = at + head[1]; at < end; at += 2u + r->body[at + 1])
            sum += ledger_bytes(head[0], r->body + at, 2u + r->body[at + 1]);
    }
    return sum;
}

static bool same_results(const struct trial *t, const struct reply *found, uint32_t count)
{
    const struct pg_result *a = (const void *)(t->reply.body + sizeof(struct pg_frame));
    const struct pg_result *b = (const void *)(found->body + sizeof(struct pg_frame));
    for (uint32_t i = 0; i < count; i++)
        if (answer_ticket(a[i].ticket, t->fresh) != answer_ticket(b[i].ticket, t->fresh) ||
            a[i].deadline_ns != b[i].deadline_ns)
            return false;
    const uint64_t rest = sizeof(struct pg_frame) + count * sizeof *a;
    return ended_keys(&t->reply, rest) == ended_keys(found, rest);
}

/* Return true if the repeated call got the same reply as the call without a kill. A HELLO may get
 * another session id, and a repeated BYE finds no session. */
static bool same_reply(const struct trial *t, const struct reply *found)
{
    const struct pg_frame *f = (const struct pg_frame *)found->body;
    const struct pg_frame *expected = (const struct pg_frame *)t->reply.body;
    if (t->call.kind != BY_MESSAGE || (found->bytes == 0 && t->reply.bytes == 0))
        return true;
    const unsigned message = ((const struct pg_frame *)t->call.message)->message;
    if (message == PG_M_SCHEDULE)  /* status and items depend on what this message did */
        return f->error == expected->error;
    if (message == PG_M_BYE)
        return f->error == 0 || f->error == PG_ERR_SESSION_EXPIRED;
    if (message == PG_M_GROUP || message == PG_M_DEAD)
        return f->error == expected->error ||
               (f->error == PG_ERR_GROUP && f->detail[0] == PG_GR_MISSING);
    if (found->bytes != t->reply.bytes)
        return false;
    if (message == PG_M_HELLO)
        return f->error == expected->error;
    if (message == PG_M_QUERY || message == PG_M_BULK_LOAD)
        return memcmp(found->body, t->reply.body, found->bytes) == 0;
    return f->error == expected->error && same_results(t, found, f->count);
}

/* Fire all armed timers and operations. Return the sum of the hashes of all notices. */
static uint64_t drain(struct fixture *fx, uint64_t fresh)
{
    uint64_t fired = 0;
    int more = 1;
    for (uint32_t tries = 0; tries < 1000 && more; tries++) {
        const uint64_t tail = fx->a->header->replay_tail;
        pg_advance(fx->a, INT64_MAX / 4, fx->offset_ns, fx->real_ns, 4, &more);
        fixture_answer(fx);
        more |= pg_next_ns(fx->a) <= INT64_MAX / 4;
        fired += ledger_fired(fx->a, tail, fresh);
        pg_published(fx->a, fx->a->header->replay_tail, 0, 0);
    }
    CHECK(!more);
    return fired;
}

static void ledger_check(struct trial *t, const struct ledger *expected, const char *detail)
{
    struct ledger found;
    struct pg_fault fault = {0};
    ledger_take(&found, t->twin.a, t->fresh);
    if (!ledger_same(&found, expected, &fault))
        violated(t, detail, &fault);
}

/* Return the first LSN that the message under test did not write. 0 = the call is no message. */
static uint64_t daemon_lsn(struct trial *t)
{
    if (t->call.kind != BY_MESSAGE || pg_wal_buffer_of(t->fx.a) == NULL)
        return 0;
    if (t->recovery_lsn != 0)
        return t->recovery_lsn;
    frames_appended(&t->appended, &t->fx);
    return frames_next_lsn(&t->appended, &t->fx);
}

static void wal_check(struct trial *t)
{
    struct ledger found, expected;
    struct pg_fault fault = {0};
    if (pg_wal_buffer_of(t->twin.a) == NULL)
        return;
    const uint64_t from_lsn = daemon_lsn(t);
    frames_appended(&t->appended, &t->twin);
    if (!frames_tell(&t->appended, &t->twin, t->call.uid, from_lsn, &fault))
        violated(t, "a record disagrees with the arena", &fault);
    if (!frames_redo(&t->snapshot, &t->appended, &t->twin, &t->redo, &fault)) {
        violated(t, "the WAL cannot be redone", &fault);
        return;
    }
    if (!pg_check(t->redo.a, &fault))
        violated(t, "not sound after redo", &fault);
    ledger_take_durable(&expected, t->twin.a, t->twin.a);
    ledger_take_durable(&found, t->redo.a, t->twin.a);
    if (!ledger_same(&found, &expected, &fault))
        violated(t, "redo of the WAL gives another state", &fault);
}

static void recovered_check(struct trial *t)
{
    struct ledger found;
    struct pg_fault fault = {0};
    ledger_take(&found, t->twin.a, t->fresh);
    if (!t->whole_only && 
        !ledger_between(&found, t->stages, t->stage_count, t->call.kind != BY_ADVANCE, &fault))
        violated(t, "recovered to a state that never existed", &fault);
    if (!committed_stay(t))
        violated(t, "a committed notice has moved", NULL);
}

static void recovery_check(struct trial *t)
{
    struct pg_fault why;
    struct reply reply;

    t->counts->recoveries++;
    if (!fixture_recover(&t->twin, t->recover_ns, &why)) {
        violated(t, "refused", &why);
        return;
    }
    if (!whole(t, "not sound after recovery"))
        return;
    recovered_check(t);
    wal_check(t);
    call_run(&t->twin, &t->call, &reply);
    if (!whole(t, "not sound after the repeated call"))
        return;
    if (!same_reply(t, &reply))
        violated(t, "the repeated call has another answer", NULL);
    if (!ledger_gapless(t->twin.a))
        violated(t, "a gap in a topic", NULL);
    ledger_check(t, &t->after, "state differs after the repeated call");
    if (drain(&t->twin, t->fresh) != t->fired)
        violated(t, "other notices fired", NULL);
    ledger_check(t, &t->drained, "state differs after all timers have fired");
}

/* ---- readers ------------------------------------------------------------------------------ */

static void trust(struct trial *t, uint32_t place, uint64_t word, uint64_t hash)
{
    struct trusted *known = &t->trusted[place];
    CHECK(place < WORDS_MAX);
    if (word != 0 && known->word == word && known->hash != hash)
        violated(t, "a reader would trust changed data", NULL);
    *known = (struct trusted){word, hash};
}

/* Return true if a timer's payload has the bytes that all payloads have in these trials. A parked
 * timer has no payload. */
static bool payload_sound(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = &a->slots.cold[slot];
    const uint8_t *at = blob_at(&a->blobs, c->blob) + c->ext_len + c->key_len;
    return c->payload_len == 0 || (at[0] == 'p' && memcmp(at, at + 1, c->payload_len - 1) == 0);
}

/* Return true if a reader that has read a topic's sequence finds the notice with this sequence, or
 * a newer notice, at the topic's last position. */
static bool newest_found(const struct pg_arena *a, uint32_t topic)
{
    const struct pg_topic *t = &a->topics[topic];
    return t->name_len == 0 || t->last_position <= a->header->replay_head ||
           replay_at(a, t->last_position - 1)->sequence >= t->sequence;
}

/* Check the arena as readers see it in the middle of the call. */
static void readers_check(struct trial *t)
{
    const struct pg_arena *a = t->fx.a;
    for (uint32_t i = 0; i < a->slots.capacity; i++)
        if (ctl_live(a->slots.hot[i].ctl) && !payload_sound(a, i))
            violated(t, "a reader would read other bytes as a payload", NULL);
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if (!newest_found(a, i))
            violated(t, "a reader would miss the newest notice", NULL);
    const uint32_t slots = a->slots.capacity;
    for (uint32_t i = 0; i < slots; i++) {
        const struct pg_cold *c = &a->slots.cold[i];
        const bool armed = ctl_state(a->slots.hot[i].ctl) == PG_S_ARMED;
        trust(t, i, armed ? a->slots.hot[i].ctl : 0,
              armed ? ledger_bytes(c->ext_len, blob_at(&a->blobs, c->blob) + c->ext_len,
                                   c->key_len + c->payload_len)
                    : 0);
    }
    for (uint32_t i = 0; i < a->header->replay_capacity; i++) {
        const struct pg_entry *e = &a->replay_buffer[i];
        trust(t, slots + i, e->commit,
              e->commit == 0 ? 0
                             : ledger_bytes(ledger_mix(e->ticket, e->sequence),
                                            blob_at(&a->blobs, e->blob),
                                            e->key_len + e->payload_len));
    }
}

/* ---- stepping ------------------------------------------------------------------------------ */

static void double_keep(struct trial *t)
{
    if (t->double_every == 0 || (t->changes + t->seed) % t->double_every != 0 ||
        t->double_count == DOUBLES_MAX)
        return;
    t->double_lsn[t->double_count] = daemon_lsn(t);
    memcpy(t->doubles[t->double_count++], t->shadow, t->authoritative.bytes);
}

/* Test a kill at this point. step_run() calls this after every instruction or before every
 * store. */
static void kill_here(void *context)
{
    struct trial *t = context;
    struct authoritative twin_authoritative = t->authoritative;
    if (authoritative_same(&t->authoritative, t->shadow))
        return;
    authoritative_save(&t->authoritative, t->shadow);
    readers_check(t);
    const uint64_t hash = authoritative_hash(&t->fx, &t->authoritative);
    t->counts->states += seen_add(&all_states, hash);
    if (!seen_add(&own_states, hash))
        return;
    t->changes++;
    for (uint32_t i = 0; i < twin_authoritative.count; i++) {
        const bool in_arena = twin_authoritative.pieces[i].at >= t->fx.arena &&
                              twin_authoritative.pieces[i].at < t->fx.arena + t->fx.arena_bytes;
        twin_authoritative.pieces[i].at += in_arena ? t->twin.arena - t->fx.arena
                                                    : t->twin.secret - t->fx.secret;
    }
    authoritative_restore(&twin_authoritative, t->shadow);
    double_keep(t);
    t->twin.offset_ns = t->fx.offset_ns;
    t->twin.places_first = t->changes % 2 == 0;
    recovery_check(t);
}

static void run_call(void *context)
{
    struct trial *t = context;
    struct reply reply;
    call_run(&t->fx, &t->call, &reply);
}

static void run_recovery(void *context)
{
    struct trial *t = context;
    struct pg_fault why;
    fixture_recover(&t->fx, t->recover_ns, &why);
}

/* ---- one trial ----------------------------------------------------------------------------- */

struct image {
    uint8_t *arena, *secret, *handle;
    struct fixture fx;
};

static void image_take(struct image *i, const struct fixture *fx)
{
    i->arena = malloc(fx->arena_bytes);
    i->secret = malloc(fx->secret_bytes);
    i->handle = malloc(pg_handle_bytes());
    CHECK(i->arena != NULL && i->secret != NULL && i->handle != NULL);
    memcpy(i->arena, fx->arena, fx->arena_bytes);
    memcpy(i->secret, fx->secret, fx->secret_bytes);
    memcpy(i->handle, fx->a, pg_handle_bytes());
    i->fx = *fx;
}

static void image_put(const struct image *i, struct fixture *fx)
{
    *fx = i->fx;
    memcpy(fx->arena, i->arena, fx->arena_bytes);
    memcpy(fx->secret, i->secret, fx->secret_bytes);
    memcpy(fx->a, i->handle, pg_handle_bytes());
}

static void image_drop(struct image *i)
{
    free(i->arena);
    free(i->secret);
    free(i->handle);
}

/* Record the expected results without a kill: after each record, after the call, and after all
 * timers have fired. */
static void reference(struct trial *t, const struct image *start)
{
    static struct call prefix;
    struct reply reply;
    const bool batch = t->call.kind == BY_MESSAGE && t->call.records > 1;
    ledger_take(&t->stages[0], t->fx.a, t->fresh);
    t->stage_count = 1;
    for (uint32_t n = 1; batch && n < t->call.records; n++) {
        call_prefix(&t->call, n, &prefix);
        call_run(&t->fx, &prefix, &reply);
        ledger_take(&t->stages[t->stage_count++], t->fx.a, t->fresh);
        image_put(start, &t->fx);
    }
    t->whole_only = call_run(&t->fx, &t->call, &t->reply);
    ledger_take(&t->after, t->fx.a, t->fresh);
    t->stages[t->stage_count++] = t->after;
    t->fired = drain(&t->fx, t->fresh);
    ledger_take(&t->drained, t->fx.a, t->fresh);
    image_put(start, &t->fx);
}

static void statuses_note(struct trial *t)
{
    const struct pg_frame *f = (const struct pg_frame *)t->reply.body;
    const struct pg_result *r = (const void *)(f + 1);
    if (t->reply.bytes == 0 || f->message != PG_M_BATCH || f->error != 0)
        return;
    for (uint32_t i = 0; i < f->count; i++)
        t->statuses |= 1ull << (r[i].ticket & 63);
}

static void stepped(struct trial *t, void (*run)(void *))
{
    authoritative_save(&t->authoritative, t->shadow);
    memset(t->trusted, 0, sizeof t->trusted);
    readers_check(t);
    t->counts->instructions += step_run(run, kill_here, t);
}

static void trial_run(struct trial *t, struct counts *recoveries)
{
    struct image start;
    image_take(&start, &t->fx);
    reference(t, &start);
    statuses_note(t);
    seen_clear(&own_states);
    t->counts->trials++;
    stepped(t, run_call);
    t->counts = recoveries;
    t->double_every = 0;
    for (uint32_t i = 0; i < t->double_count; i++) {
        image_put(&start, &t->fx);
        authoritative_restore(&t->authoritative, t->doubles[i]);
        seen_clear(&own_states);
        t->fx.places_first = (t->seed + i) % 2 == 0;
        t->recovery_lsn = t->double_lsn[i];
        recoveries->trials++;
        stepped(t, run_recovery);
    }
    image_put(&start, &t->fx);
    image_drop(&start);
}

/* Return the time of the recovery. In every other trial it is 1 ms after the kill, unless the
 * result of the call depends on the time. Otherwise it is the time of the kill. */
static int64_t recovered_at(const struct trial *t)
{
    if (t->call.kind == BY_ADVANCE)
        return t->call.now_ns;
    const bool later = t->seed % 2 == 0 && !call_minds_when(&t->fx, &t->call);
    return t->fx.a->header->now_ns + (later ? 1000000 : 0);
}

/* Run one trial. In one of `every` states, also kill the recovery at each instruction; if `every`
 * is 0, kill no recovery. Return the set of statuses that the call returned. */
static uint64_t trial(uint32_t operation, enum shape shape, uint64_t seed, uint32_t every,
                      struct counts *counts, struct counts *recoveries)
{
    static struct trial t;
    uint64_t statuses;
    t = (struct trial){.operation = call_name(operation), .shape = shape, .seed = seed,
                       .counts = counts, .double_every = every};
    fixture_open(&t.fx, shape, seed * 64 + operation);
    call_make(&t.fx, operation, &t.call);
    t.fresh = t.fx.a->header->next_ticket;
    t.recover_ns = recovered_at(&t);
    fixture_commit(&t.fx);
    fixture_twin(&t.twin, &t.fx);
    fixture_for_redo(&t.redo, &t.fx);
    fixture_authoritative(&t.fx, &t.authoritative);
    frames_open(&t.snapshot);
    frames_open(&t.appended);
    frames_snapshot(&t.snapshot, &t.fx);
    t.shadow = malloc(t.authoritative.bytes);
    CHECK(t.shadow != NULL);
    for (uint32_t i = 0; i < DOUBLES_MAX; i++)
        CHECK((t.doubles[i] = malloc(t.authoritative.bytes)) != NULL);
    trial_run(&t, recoveries);
    statuses = t.statuses;
    for (uint32_t i = 0; i < DOUBLES_MAX; i++)
        free(t.doubles[i]);
    free(t.shadow);
    fixture_close(&t.fx);
    fixture_close(&t.twin);
    fixture_close(&t.redo);
    frames_close(&t.snapshot);
    frames_close(&t.appended);
    return statuses;
}

/* ---- the summary --------------------------------------------------------------------------- */

/* Disable string instructions in libc. They raise a trap for each repetition, and filling pages is
 * not under test. */
static void step_without_repeats(char **argv)
{
    if (getenv("GLIBC_TUNABLES") != NULL)
        return;
    setenv("GLIBC_TUNABLES", "glibc.cpu.x86_rep_stosb_threshold=1073741824:"
                             "glibc.cpu.x86_rep_movsb_threshold=1073741824", 1);
    execv("/proc/self/exe", argv);
}

static void counts_add(struct counts *sum, const struct counts *c)
{
    sum->trials += c->trials;
    sum->instructions += c->instructions;
    sum->states += c->states;
    sum->recoveries += c->recoveries;
    sum->violations += c->violations;
}

static void counts_print(const char *name, const struct counts *c, uint64_t statuses)
{
    printf("  \"%s\": {\"trials\": %" PRIu64 ", \"instructions\": %" PRIu64
           ", \"states\": %" PRIu64 ", \"recoveries\": %" PRIu64 ", \"violations\": %" PRIu64,
           name, c->trials, c->instructions, c->states, c->recoveries, c->violations);
    const char *separator = ", \"statuses\": [";
    for (uint32_t i = 1; i < 64; i++)
        if (statuses >> i & 1) {
            printf("%s%u", separator, i);
            separator = ", ";
        }
    printf(statuses != 0 ? "]}" : "}");
}

/* Return whether to run this trial. A migration runs for only one seed of 16, because it does not
 * change the source arena and takes as long as all other operations together. */
static bool worth_it(uint32_t operation, uint64_t seed)
{
    return strncmp(call_name(operation), "migrate", 7) != 0 || seed % 16 == 0;
}

static bool named(uint32_t operation, char **names)
{
    bool found = *names == NULL;
    for (; *names != NULL; names++)
        found |= strcmp(call_name(operation), *names) == 0;
    return found;
}

/* crash ROUNDS [FIRST_SEED [DOUBLE_EVERY [first [OPERATION...]]]]
 *
 * A round runs every operation, or the named operations, in every shape. With "first" the program
 * exits at the first violation. It prints counts as JSON. Exit code 1 = violations, 2 = this
 * machine cannot execute single steps. */
int main(int argc, char **argv)
{
    step_without_repeats(argv);
    const uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    const uint64_t first_seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    const uint32_t every = argc > 3 ? (uint32_t)strtoull(argv[3], NULL, 10) : 0;
    struct counts all = {0}, recoveries = {0}, counts[96] = {0};
    uint64_t statuses[96] = {0};
    first_only = argc > 4;
    seen_open(&all_states, STATES_MAX);
    seen_open(&own_states, 1 << 14);
    for (uint64_t seed = first_seed; seed < first_seed + rounds; seed++)
        for (uint32_t op = 0; call_name(op) != NULL; op++)
            for (uint32_t shape = 0;
                 shape < SHAPES && worth_it(op, seed) && named(op, argv + (argc > 5 ? 5 : argc));
                 shape++)
                statuses[op] |= trial(op, (enum shape)shape, seed,
                                      (seed + op + shape) % 4 == 0 ? every : 0, &counts[op],
                                      &recoveries);
    printf("{\n");
    for (uint32_t op = 0; call_name(op) != NULL; op++) {
        counts_add(&all, &counts[op]);
        counts_print(call_name(op), &counts[op], statuses[op]);
        printf(",\n");
    }
    counts_add(&all, &recoveries);
    counts_print("recovery", &recoveries, 0);
    printf(",\n");
    counts_print("all", &all, 0);
    printf("\n}\n");
    return all.instructions == 0 ? 2 : violations != 0;
}

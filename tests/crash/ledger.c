#include "ledger.h"

#include "check.h"
#include "core/state/groups.h"
#include "core/state/items.h"
#include "core/state/jobs.h"

uint64_t ledger_mix(uint64_t hash, uint64_t value)
{
    uint64_t x = (hash ^ value) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 29;
}

uint64_t ledger_bytes(uint64_t hash, const void *bytes, uint64_t len)
{
    const uint8_t *at = bytes;
    hash = ledger_mix(hash, len);
    for (; len >= 8; len -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        hash = ledger_mix(hash, word);
    }
    for (; len > 0; len--)
        hash = ledger_mix(hash, *at++);
    return hash;
}

/* ---- facts ----------------------------------------------------------------------------- */

static const char *const kinds[] = {"a ticket", "a key", "a watermark", "a name", "a session",
                                    "a bulk load", "a row of a bulk load", "a job", "a consumer group",
                                    "a schedule"};

static void note(struct ledger *l, enum subject_kind kind, uint64_t subject, uint64_t state)
{
    subject = ledger_mix(0, subject) << 4 | kind;
    for (uint32_t i = 0; i < l->count; i++)
        if (l->facts[i].subject == subject) {
            l->facts[i].state += state;
            return;
        }
    CHECK(l->count < FACTS_MAX);
    l->facts[l->count++] = (struct fact){subject, state};
}

/* Return the state of a subject; 0 = unknown. */
static uint64_t ledger_state(const struct ledger *l, uint64_t subject)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (l->facts[i].subject == subject)
            return l->facts[i].state;
    return 0;
}

static bool known(const struct ledger *stages, uint32_t count, uint64_t subject, uint64_t state)
{
    for (uint32_t i = 0; i < count; i++)
        if (ledger_state(&stages[i], subject) == state)
            return true;
    return false;
}

bool ledger_same(const struct ledger *found, const struct ledger *expected,
                 struct pg_fault *fault)
{
    for (uint32_t i = 0; i < found->count; i++) {
        const struct fact *f = &found->facts[i];
        if (ledger_state(expected, f->subject) != f->state)
            return fault_set(fault, "ledger", kinds[f->subject & 15], f->subject,
                             ledger_state(expected, f->subject), f->state);
    }
    for (uint32_t i = 0; i < expected->count; i++) {
        const struct fact *f = &expected->facts[i];
        if (ledger_state(found, f->subject) != f->state)
            return fault_set(fault, "ledger", kinds[f->subject & 15], f->subject, f->state, 0);
    }
    for (uint32_t i = 0; i < TOPICS_MAX; i++)
        if (found->sequences[i] != expected->sequences[i])
            return fault_set(fault, "ledger", "a topic's sequence", i, expected->sequences[i],
                             found->sequences[i]);
    return found->forgotten == expected->forgotten ||
           fault_set(fault, "ledger", "watermarks that are forgotten", 0, expected->forgotten,
                     found->forgotten);
}

bool ledger_between(const struct ledger *found, const struct ledger *stages, uint32_t count,
                    bool jobs, struct pg_fault *fault)
{
    for (uint32_t i = 0; i < found->count; i++)
        if ((jobs || (found->facts[i].subject & 15) != OF_JOB) &&
            !known(stages, count, found->facts[i].subject, found->facts[i].state))
            return fault_set(fault, "ledger", kinds[found->facts[i].subject & 15],
                             found->facts[i].subject, 0, found->facts[i].state);
    for (uint32_t i = 0; i < stages[0].count; i++) {
        const struct fact *f = &stages[0].facts[i];
        if ((jobs || (f->subject & 15) != OF_JOB) && ledger_state(found, f->subject) == 0 &&
            !known(stages, count, f->subject, 0))
            return fault_set(fault, "ledger", kinds[f->subject & 15], f->subject, f->state, 0);
    }
    return true;
}

/* ---- hashes ---------------------------------------------------------------------------- */

static uint64_t watermark_hash(const struct pg_arena *a, uint32_t row)
{
    const struct pg_watermark *l = &a->watermarks[row];
    const void *key = watermark_granules(l) == 0 ? l->key : blob_at(&a->blobs, watermark_blob(l));
    return ledger_bytes(l->namespace_row, key, l->key_len);
}

static uint64_t watches_hash(const struct pg_arena *a, const struct pg_operation *op,
                             uint64_t hash)
{
    for (uint32_t x = op->first_watch; x != PG_NIL; x = a->watches[x].sibling) {
        const struct pg_watermark *l = &a->watermarks[a->watches[x].key_row];
        const uint64_t target = watch_target(a->watches[x].target);
        hash = ledger_mix(hash, watermark_hash(a, a->watches[x].key_row));
        if (has_targets(op->condition))
            hash = ledger_mix(hash, l->watermark >= target ? UINT64_MAX : target);
    }
    return hash;
}

static uint64_t operation_hash(const struct pg_arena *a, uint32_t slot, uint64_t hash)
{
    const struct pg_operation *op = operation_at(a, slot);
    const bool armed = ctl_state(a->slots.hot[slot].ctl) == PG_S_ARMED;
    const uint32_t end = operation_end_bytes(op->keys);
    const uint32_t rest = a->slots.cold[slot].ext_len - (uint32_t)sizeof *op - end;
    hash = ledger_mix(ledger_mix(ledger_mix(hash, op->session), op->threshold), op->uid);
    hash = ledger_mix(hash, (uint64_t)op->cause << 32 | op->error);
    hash = ledger_mix(hash, (uint64_t)op->condition << 16 | op->keys);
    hash = ledger_bytes(hash, (const uint8_t *)(op + 1) + end, rest);
    return armed ? watches_hash(a, op, hash) : ledger_bytes(hash, op + 1, end);
}

static uint64_t topic_hash(const struct pg_arena *a, uint32_t row)
{
    const struct pg_topic *t = &a->topics[row];
    return ledger_bytes(t->namespace_row, t->name, t->name_len);
}

static uint64_t slot_hash(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = &a->slots.hot[slot];
    const struct pg_cold *c = &a->slots.cold[slot];
    const uint8_t *blob = blob_at(&a->blobs, c->blob);
    const unsigned state = ctl_state(h->ctl);
    const bool wall = (h->flags & PG_F_WALL) && state != PG_S_UNIQUE;
    uint64_t hash = ledger_mix(state, h->flags);
    if (state != PG_S_OUTCOME)      /* an outcome's topic row may already belong to another topic */
        hash = ledger_mix(hash, topic_hash(a, h->topic));
    hash = ledger_mix(hash, (uint64_t)(wall ? ((const struct pg_ext *)blob)->value
                                            : h->deadline_ns));
    hash = ledger_bytes(hash, blob + c->ext_len, c->key_len + c->payload_len);
    if (!is_operation(a, slot))
        hash = ledger_bytes(hash, blob + c->ext_len - put_item_bytes(h, c), put_item_bytes(h, c));
    return is_operation(a, slot) ? operation_hash(a, slot, hash) : hash;
}

/* Hash a replay buffer entry. Leave out the elapsed time in the payload of an operation's notice,
 * and the time of a publish, because both times change if a recovery runs later. */
static uint64_t entry_hash(const struct pg_arena *a, const struct pg_entry *e)
{
    const uint8_t *blob = blob_at(&a->blobs, e->blob);
    const uint32_t skip = entry_flags(e) & PG_E_OPERATION ? sizeof(int64_t) : 0;
    uint64_t hash = ledger_mix(e->ticket & 0xff, entry_key_type(e));
    hash = ledger_mix(ledger_mix(hash, topic_hash(a, e->topic)), e->missed);
    if ((e->ticket & 0xff) != PG_CAUSE_PUBLISHED)
        hash = ledger_mix(hash, (uint64_t)e->deadline_ns);
    hash = ledger_bytes(hash, blob, e->key_len);
    return ledger_bytes(hash, blob + e->key_len + skip, e->payload_len - skip);
}

static uint64_t slot_key_hash(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = &a->slots.cold[slot];
    const bool named = ctl_state(a->slots.hot[slot].ctl) == PG_S_ARMED ||
                       ctl_unique(a->slots.hot[slot].ctl);
    return ledger_bytes(named ? slot_namespace(a, slot) : PG_NIL,
                        blob_at(&a->blobs, c->blob) + c->ext_len, c->key_len);
}

static uint64_t entry_key_hash(const struct pg_arena *a, const struct pg_entry *e)
{
    return ledger_bytes(a->topics[e->topic].namespace_row, blob_at(&a->blobs, e->blob),
                        e->key_len);
}

/* ---- collecting facts ------------------------------------------------------------------ */

static void slots_note(struct ledger *l, const struct pg_arena *a, uint64_t fresh, bool outcomes)
{
    for (uint32_t i = 0; i < a->slots.capacity; i++) {
        const uint64_t ticket = ctl_ticket(a->slots.hot[i].ctl);
        const unsigned state = ctl_state(a->slots.hot[i].ctl);
        if (state == PG_S_FREE || (state == PG_S_OUTCOME && !outcomes))
            continue;
        const uint64_t hash = slot_hash(a, i);
        if (ticket >= fresh || state == PG_S_ARMED || state == PG_S_PARKED)
            note(l, OF_KEY, slot_key_hash(a, i), ledger_mix(hash, ticket < fresh ? ticket : 0));
        if (ticket < fresh)
            note(l, OF_TICKET, ticket, hash);
    }
}

static bool speaks(const struct pg_arena *a, uint64_t position, const struct pg_entry *e)
{
    struct probe at;
    return index_find_id(&a->index, e->hash, replay_id(a, position), &at);
}

static void entries_note(struct ledger *l, const struct pg_arena *a, uint64_t fresh)
{
    for (uint64_t p = a->header->replay_head; p < a->header->replay_tail; p++) {
        const struct pg_entry *e = replay_at(a, p);
        const uint64_t hash = ledger_mix(entry_hash(a, e), speaks(a, p, e));
        if (e->ticket >> 8 < fresh)
            note(l, OF_TICKET, e->ticket >> 8, hash);
        else
            note(l, OF_KEY, entry_key_hash(a, e), hash);
    }
}

/* Record the watermarks. Leave out watermarks of 0: an operation forgets its own watch keys before
 * it has ended, so after a kill such a key may or may not exist. */
static void watermarks_note(struct ledger *l, const struct pg_arena *a)
{
    for (uint32_t row = 0; row < a->watermark_rows; row++) {
        const struct pg_watermark *fx = &a->watermarks[row];
        if (fx->key_len == 0 || (fx->watermark == 0 && fx->error == 0))
            continue;
        note(l, OF_WATERMARK, watermark_hash(a, row),
             ledger_mix(ledger_mix(fx->watermark, fx->error), account_uid(a, fx->account)));
        if (fx->touched_s == PG_NIL)
            l->forgotten += ledger_mix(1, watermark_hash(a, row));
    }
}

/* Record each setting separately, because a kill may come between two settings. Leave out settings
 * with their initial value. */
static void settings_note(struct ledger *l, const struct pg_namespace *n)
{
    const uint64_t settings[] = {(uint32_t)(n->owner_uid + 1), n->durability, n->quota_timers,
                                 n->quota_bytes, n->quota_ops, n->park_beyond_ns, n->shard,
                                 n->late_per_s, n->paused};
    for (uint32_t i = 0; i < sizeof settings / sizeof settings[0]; i++)
        if (settings[i] != 0)
            note(l, OF_NAME, ledger_bytes(i, n->name, n->name_len), ledger_mix(1, settings[i]));
}

static void topic_settings_note(struct ledger *l, const struct pg_arena *a, uint32_t row)
{
    const struct pg_topic *t = &a->topics[row];
    const uint64_t settings[] = {(uint64_t)t->slack_ns, t->late, t->paused};
    for (uint32_t i = 0; i < sizeof settings / sizeof settings[0]; i++)
        if (settings[i] != 0)
            note(l, OF_NAME, ledger_mix(topic_hash(a, row), i + 1), ledger_mix(1, settings[i]));
}

/* Record names and settings. Include a topic only if its row is also in use in the arena `rows`. */
static void names_note(struct ledger *l, const struct pg_arena *a, const struct pg_arena *rows)
{
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        if (a->namespaces[i].name_len != 0)
            settings_note(l, &a->namespaces[i]);
    for (uint32_t i = 0; i < a->topic_rows; i++) {
        if (a->topics[i].name_len == 0 || rows->topics[i].name_len == 0)
            continue;
        l->sequences[i] = a->topics[i].sequence;
        note(l, OF_NAME, topic_hash(a, i), a->topics[i].created_uid + 1ull);
        topic_settings_note(l, a, i);
    }
}

static void sessions_note(struct ledger *l, const struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->secret->sessions; i++)
        if (a->sessions[i].id != 0)
            note(l, OF_SESSION, a->sessions[i].nonce[0], a->sessions[i].uid + 1);
}

/* Record fencing token and state separately, because a kill may come between them. */
static void bulk_loads_note(struct ledger *l, const struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->bulk_load_rows; i++) {
        const struct pg_bulk_load *bulk_load = &a->bulk_loads[i];
        const uint64_t subject = ledger_bytes(0, bulk_load->id, sizeof bulk_load->id);
        const uint64_t whose = (uint64_t)bulk_load->uid << 32 | bulk_load->namespace_row;
        if (bulk_load->state == PG_BULK_LOAD_NONE)
            continue;
        note(l, OF_BULK_LOAD, subject, ledger_mix(whose, bulk_load->state));
        note(l, OF_BULK_LOAD, subject + 1, ledger_mix(whose, bulk_load->fencing_token));
    }
    for (uint32_t i = 0; i < a->bulk_load_block_rows * PG_BULK_LOAD_BLOCK_ROWS; i++) {
        const struct pg_bulk_load_block *b = &a->bulk_load_blocks[i / PG_BULK_LOAD_BLOCK_ROWS];
        const uint64_t row = b->number * PG_BULK_LOAD_BLOCK_ROWS + i % PG_BULK_LOAD_BLOCK_ROWS;
        if (b->bulk_load != 0 && (a->bulk_load_bits[i / 64] >> i % 64 & 1) != 0)
            note(l, OF_ROW, ledger_bytes(row, a->bulk_loads[b->bulk_load - 1].id, 16), 1);
    }
}

/* Record the groups. */
static void groups_note(struct ledger *l, const struct pg_arena *a)
{
    uint32_t topics[PG_GROUP_TOPICS_MAX];
    for (uint32_t i = 0; i < a->group_rows; i++) {
        const struct pg_consumer_group *g = &a->groups[i];
        if (!group_exists(a, i) || g->incarnation == 0)
            continue;
        uint64_t hash = ledger_bytes(g->namespace_row, &g->settings, sizeof g->settings);
        for (uint32_t n = group_topics(a, i, topics); n-- > 0;)
            hash = ledger_mix(hash, topic_hash(a, topics[n]));
        note(l, OF_GROUP, ledger_bytes(0, g->name, g->name_len), hash);
    }
}

/* Return the control word that a job has after a reboot, which ends all leases. */
static uint64_t control_durable(const struct pg_arena *a, const struct pg_job *j)
{
    const uint32_t failures = job_failures(j) + 1;
    if (job_state(j) != PG_JOB_LEASED)
        return j->control;
    return failures >= group_at(a, j->group)->settings.max_attempts
               ? job_control(PG_JOB_DEAD, PG_JR_MAX_ATTEMPTS, failures, job_leases(j))
               : job_control(PG_JOB_WAITING, PG_JR_NONE, failures, job_leases(j));
}

/* Hash a job. A job with an error has had a failure. */
static uint64_t job_hash(const struct pg_arena *a, const struct pg_job *j, bool durable)
{
    const bool cut = durable && job_state(j) == PG_JOB_LEASED;
    uint64_t hash = ledger_mix(durable ? control_durable(a, j) : j->control, j->ticket & 0xff);
    if ((j->ticket & 0xff) != PG_CAUSE_PUBLISHED)
        hash = ledger_mix(hash, (uint64_t)j->deadline_ns);
    hash = ledger_mix(hash, (uint64_t)(j->meta & ~(PG_E_LATE << 4)) << 8 | j->priority);
    hash = ledger_mix(hash, topic_hash(a, j->topic));
    if (job_state(j) == PG_JOB_DELAYED || (job_state(j) == PG_JOB_LEASED && !cut))
        hash = ledger_mix(ledger_mix(hash, (uint64_t)j->due_ns),
                          job_state(j) == PG_JOB_LEASED ? j->session : 0);
    if (!durable)
        hash = ledger_mix(hash, (j->first_failed_ns != 0) + 2u * (j->last_failed_ns != 0));
    if (job_error_len(j) != 0 && !durable)
        hash = ledger_bytes(hash, job_error(a, j), job_error_len(j));
    if (durable && job_reason(j) == PG_JR_REJECTED)
        hash = ledger_bytes(hash, job_error(a, j), job_error_len(j));
    const uint8_t *blob = blob_at(&a->blobs, j->blob);
    const uint32_t skip = (j->meta >> 4) & PG_E_OPERATION ? sizeof(int64_t) : 0;
    hash = ledger_bytes(hash, blob, j->key_len);
    return ledger_bytes(hash, blob + j->key_len + skip, j->payload_len - skip);
}

/* Return whether the group has more dead letters than it keeps after a reboot, which ends leases. */
static bool drops_dead(const struct pg_arena *a, uint32_t group)
{
    uint64_t dead = 0;
    for (uint32_t row = 0; row < a->job_slots.capacity; row++)
        dead += job_state(&a->jobs[row]) != PG_JOB_FREE && a->jobs[row].group == group &&
                (control_durable(a, &a->jobs[row]) & 0xff) == PG_JOB_DEAD;
    return dead > group_at(a, group)->settings.max_dead;
}

static bool left_out(const struct pg_arena *a, const struct pg_job *j, const struct pg_arena *live)
{
    return live != NULL && (control_durable(a, j) & 0xff) == PG_JOB_DEAD && drops_dead(live, j->group);
}

/* `live`: the arena whose WAL was redone; NULL = note all facts. */
static void jobs_note(struct ledger *l, const struct pg_arena *a, uint64_t fresh,
                      const struct pg_arena *live)
{
    for (uint32_t row = 0; row < a->job_slots.capacity; row++) {
        const struct pg_job *j = &a->jobs[row];
        if (job_state(j) == PG_JOB_FREE || group_at(a, j->group)->incarnation == 0 ||
            left_out(a, j, live))
            continue;
        const uint64_t ticket = j->ticket >> 8;
        const uint64_t subject =
            ticket < fresh ? ticket
                           : ledger_bytes(1, blob_at(&a->blobs, j->blob), j->key_len);
        note(l, OF_JOB, ledger_mix(ledger_mix(1, j->group), subject), job_hash(a, j, live != NULL));
    }
}

/* Return the time from which a schedule counts. While jobs are open, a delay has not begun. */
static int64_t counts_from_ns(const struct pg_arena *a, const struct pg_arena *live, uint32_t row)
{
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    if (f->overlap == PG_OVERLAP_DELAY && schedule_at(live, row)->open != 0)
        return PG_NOMINAL_UNKNOWN;
    return f->due_ns == PG_NOMINAL_UNKNOWN ? live->state.started_ns : f->due_ns;
}

/* Leave out the times of later occurrences, which are asked for again if they are missing. */
static void schedules_note(struct ledger *l, const struct pg_arena *a, const struct pg_arena *live)
{
    for (uint32_t row = 0; row < a->schedule_rows; row++) {
        const struct pg_schedule_fields *f = schedule_fields(a, row);
        if (f->state == PG_SCHEDULE_NONE)
            continue;
        const uint8_t *blob = blob_at(&a->blobs, f->blob);
        const uint64_t words[] = {f->revision, f->count, f->armed, (uint64_t)f->base_ns,
                                  (uint64_t)f->nominal_ns, (uint64_t)f->every_ns,
                                  (uint64_t)counts_from_ns(a, live, row), (uint64_t)f->until_ns,
                                  (uint64_t)f->jitter_ns, (uint64_t)f->put_ns, f->state, f->overlap,
                                  topic_hash(a, f->topic), f->uid, f->tag_len, f->has_priority,
                                  f->priority};
        uint64_t state = ledger_bytes(f->spec_len, blob, schedule_bytes(f));
        state = ledger_bytes(state, words, sizeof words);
        note(l, OF_SCHEDULE, ledger_bytes(0, blob, f->key_len), state);
    }
}

void ledger_take(struct ledger *l, const struct pg_arena *a, uint64_t fresh)
{
    *l = (struct ledger){.count = 0};
    CHECK(a->topic_rows <= TOPICS_MAX);
    slots_note(l, a, fresh, true);
    entries_note(l, a, fresh);
    watermarks_note(l, a);
    names_note(l, a, a);
    sessions_note(l, a);
    bulk_loads_note(l, a);
    groups_note(l, a);
    jobs_note(l, a, fresh, NULL);
    schedules_note(l, a, a);
}

void ledger_take_durable(struct ledger *l, const struct pg_arena *a, const struct pg_arena *live)
{
    *l = (struct ledger){.count = 0};
    slots_note(l, a, UINT64_MAX, false);
    for (uint64_t p = a->header->published; p < a->header->replay_tail; p++)
        note(l, OF_TICKET, replay_at(a, p)->ticket >> 8, entry_hash(a, replay_at(a, p)));
    watermarks_note(l, a);
    l->forgotten = 0;
    names_note(l, a, live);
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if (a->topics[i].name_len != 0 && a->topics[i].missed != 0)
            note(l, OF_NAME, ledger_mix(topic_hash(a, i), 0), a->topics[i].missed);
    bulk_loads_note(l, a);
    groups_note(l, a);
    jobs_note(l, a, UINT64_MAX, live);
    schedules_note(l, a, live);
}

uint64_t ledger_fired(const struct pg_arena *a, uint64_t from, uint64_t fresh)
{
    uint64_t sum = 0;
    for (uint64_t p = from; p < a->header->replay_tail; p++) {
        const struct pg_entry *e = replay_at(a, p);
        const uint64_t ticket = e->ticket >> 8;
        sum += ledger_mix(entry_hash(a, e), ticket < fresh ? ticket : 0);
    }
    return sum;
}

bool ledger_gapless(const struct pg_arena *a)
{
    uint64_t newest[TOPICS_MAX] = {0};
    for (uint64_t p = a->header->replay_head; p < a->header->replay_tail; p++) {
        const struct pg_entry *e = replay_at(a, p);
        if (newest[e->topic] != 0 && e->sequence != newest[e->topic] + 1)
            return false;
        newest[e->topic] = e->sequence;
    }
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if (newest[i] != 0 && newest[i] != a->topics[i].sequence)
            return false;
    return true;
}

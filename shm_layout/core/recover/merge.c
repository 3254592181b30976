/* merge.c - merge the part of several source arenas that belongs to one shard into a new arena.
 *
 * Tickets, times and payloads are preserved; so are topic sequences, unless the namespace is split.
 * Slots, rows, positions and hashes are assigned again. The sources are not changed. If a table is
 * full, the merge continues to count rows, so that the error can report the required size. */

#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/bulk_loads.h"
#include "core/state/catch_up.h"
#include "core/state/groups.h"
#include "core/state/items.h"
#include "core/state/jobs.h"
#include "core/state/cursors.h"
#include "core/state/operations.h"
#include "core/state/quotas.h"
#include "core/state/replay_buffer.h"
#include "core/state/rows.h"
#include "core/state/schedule_rows.h"
#include "core/state/schedules.h"
#include "core/state/session.h"
#include "core/state/timers.h"
#include "core/state/watermarks.h"
#include "core/recover/migrate.h"

/* First replay buffer position in use. Position 0 stays empty, so that a topic can refer to it if
 * its newest notice is no longer in the replay buffer. */
#define FIRST_POSITION 1
/* A session that has sent nothing for longer than this is not merged, unless it owns an operation:
 * a new session could take its row anyway. */
#define RECENT_NS 60000000000
/* Placeholder for a row number: the session owns a wanted operation, but has no row yet. */
#define OWNS (PG_NIL - 1)

struct merge {
    struct pg_arena *to;
    const struct pg_arena *from;
    struct pg_source *source;
    struct pg_fault *why;
    /* Number of rows in use, per table. */
    uint32_t namespaces, topics, watermarks, bulk_loads, schedules, cursors, sessions, watches,
             slots;
    uint32_t groups, jobs;
    uint64_t wanted_slots, wanted_granules;
};

static bool fits(const struct merge *g, const char *detail, uint64_t needed, uint64_t available)
{
    return needed <= available || fault_set(g->why, "merge", detail, 0, needed, available);
}

static bool no_memory(const struct merge *g, uint32_t granules)
{
    const struct blob_pool *p = &g->to->blobs;
    return fits(g, "payload memory in use", ((uint64_t)p->heap->used + granules) * PG_GRANULE,
                (uint64_t)p->granules * PG_GRANULE);
}

/* ---- what belongs to this shard ------------------------------------------------------------ */

uint32_t pg_partition(const void *key, uint64_t bytes, uint32_t partitions)
{
    return partitions == 1 ? 0 : pg_crc32c(0, key, bytes) % partitions;
}

static bool route_leads(const struct merge *g, const struct pg_route *r)
{
    for (uint32_t i = 0; i < r->partitions; i++)
        if (r->shards[i] == g->to->header->shard)
            return true;
    return false;
}

/* True if a key in a namespace of the source belongs to this shard. */
static bool belongs(const struct merge *g, uint32_t ns, const uint8_t *key, uint32_t len)
{
    const struct pg_route *r = &g->source->routes[ns];
    return g->source->namespaces[ns] != PG_NIL &&
           r->shards[pg_partition(key, len, r->partitions)] == g->to->header->shard;
}

/* Return the source namespace of a schedule that belongs to this shard; PG_NIL = it is not
 * merged. */
static uint32_t schedule_wanted(const struct merge *g, uint32_t row)
{
    const struct pg_schedule_fields *f = schedule_fields(g->from, row);
    if (f->state == PG_SCHEDULE_NONE)
        return PG_NIL;
    const uint32_t ns = topic_at(g->from, f->topic)->namespace_row;
    return belongs(g, ns, blob_at(&g->from->blobs, f->blob), f->key_len) ? ns : PG_NIL;
}

/* Return the source namespace of a slot whose key belongs to this shard; PG_NIL = the slot is not
 * merged. */
static uint32_t slot_wanted(const struct merge *g, uint32_t slot)
{
    if (ctl_state(slot_hot(g->from, slot)->ctl) == PG_S_FREE)
        return PG_NIL;
    const uint32_t schedule = schedule_of_slot(g->from, slot);
    if (schedule != PG_NIL)
        return schedule_wanted(g, schedule);
    if (schedule_stale(g->from, slot))
        return PG_NIL;
    const uint32_t ns = slot_home(g->from, slot);
    const uint32_t len = slot_cold(g->from, slot)->key_len;
    return ns != PG_NIL && belongs(g, ns, slot_key(g->from, slot), len) ? ns : PG_NIL;
}

/* ---- counters and names ---------------------------------------------------------------------- */

static void raise_to(uint64_t *counter, uint64_t value)
{
    if (*counter < value)
        *counter = value;
}

/* Raise the counters of the new arena, so that no ticket and no incarnation is issued twice. */
static bool counters_merge(struct merge *g)
{
    struct pg_header *h = g->to->header;
    const struct pg_header *f = g->from->header;
    raise_to(&h->next_ticket, h->shard * PG_TICKET_SHARD + next_number(f));
    raise_to(&h->next_incarnation, f->next_incarnation);
    raise_to(&h->epoch, f->epoch);
    return true;
}

/* Return the new arena's row for a namespace of the source. All partitions of a namespace share one
 * row. */
static uint32_t namespace_merge(struct merge *g, uint32_t i)
{
    const struct pg_namespace *n = namespace_at(g->from, i);
    uint32_t row = pg_find_namespace(g->to, n->name, n->name_len);
    if (row != PG_NIL)
        return row;
    row = g->namespaces++;
    if (row < g->to->namespace_rows) {
        *namespace_at(g->to, row) = *n;
        namespace_at(g->to, row)->shard = g->to->header->shard;
    }
    return row;
}

/* Return the new arena's row for a topic of the source. The topic's newest notice counts as gone,
 * unless entry_merge later finds it in the replay buffer. */
static uint32_t topic_merge(struct merge *g, uint32_t i)
{
    const struct pg_topic *t = topic_at(g->from, i);
    const uint32_t ns = g->source->namespaces[t->namespace_row];
    const bool fresh_topics = g->source->routes[t->namespace_row].fresh_topics != 0;
    uint32_t row = fresh_topics ? pg_find_topic(g->to, ns, t->name, t->name_len - 1) : PG_NIL;
    if (row != PG_NIL) {
        topic_at(g->to, row)->missed += late_missed(g->from, t);
        return row;
    }
    row = g->topics++;
    if (row >= g->to->topic_rows)
        return row;
    struct pg_topic *n = topic_at(g->to, row);
    *n = *t;
    n->missed = late_missed(g->from, t);
    n->coalescing = 0;
    n->namespace_row = ns;
    n->last_position = t->sequence == 0 || fresh_topics ? 0 : FIRST_POSITION;
    n->carried = 0;
    if (fresh_topics) {
        n->sequence = 0;
        n->incarnation = g->to->header->next_incarnation++;
    }
    return row;
}

static bool namespaces_merge(struct merge *g)
{
    for (uint32_t i = 0; i < g->from->namespace_rows; i++) {
        const bool here = namespace_at(g->from, i)->name_len != 0 &&
                          route_leads(g, &g->source->routes[i]);
        g->source->namespaces[i] = here ? namespace_merge(g, i) : PG_NIL;
    }
    return fits(g, "namespaces in use", g->namespaces, g->to->namespace_rows);
}

static bool topics_merge(struct merge *g)
{
    for (uint32_t i = 0; i < g->from->topic_rows; i++) {
        const struct pg_topic *t = topic_at(g->from, i);
        const bool here = t->name_len != 0 && g->source->namespaces[t->namespace_row] != PG_NIL;
        g->source->topics[i] = here ? topic_merge(g, i) : PG_NIL;
    }
    return fits(g, "topics in use", g->topics, g->to->topic_rows);
}

/* ---- required space ----------------------------------------------------------------------- */

static void owner_note(struct merge *g, uint32_t slot)
{
    const struct pg_session *s = session_find(g->from, operation_at(g->from, slot)->session);
    if (s != NULL)
        g->source->sessions[row_of_session(s->id)] = OWNS;
}

static bool slots_count(struct merge *g)
{
    for (uint32_t i = 0; i < g->from->secret->sessions; i++)
        g->source->sessions[i] = PG_NIL;
    for (uint32_t i = 0; i < g->from->slots.capacity; i++) {
        if (slot_wanted(g, i) == PG_NIL)
            continue;
        g->wanted_slots++;
        g->wanted_granules += slot_granules(slot_cold(g->from, i));
        if (!is_operation(g->from, i))
            continue;
        g->wanted_granules += operation_granules(g->from, i);
        owner_note(g, i);
    }
    return true;
}

static bool slots_fit(const struct merge *g)
{
    return fits(g, "timers armed", g->wanted_slots, g->to->slots.capacity - 1) &&
           fits(g, "payload memory in use", g->wanted_granules * PG_GRANULE,
                (uint64_t)g->to->blobs.granules * PG_GRANULE);
}

static bool account_merge(const struct merge *g, uint16_t *account)
{
    return account_carry(g->to, g->from, account) ||
           fits(g, "accounts in use", g->to->account_rows + 1ull, g->to->account_rows);
}

/* ---- watermarks and bulk loads ------------------------------------------------------------- */

static bool watermark_merge(struct merge *g, uint32_t i, uint32_t row)
{
    const struct pg_watermark *f = watermark_at(g->from, i);
    struct pg_watermark *l = watermark_at(g->to, row);
    const uint32_t granules = watermark_granules(f);
    const uint8_t *key = granules == 0 ? f->key : blob_at(&g->from->blobs, watermark_blob(f));
    *l = *f;
    l->namespace_row = (uint16_t)g->source->namespaces[f->namespace_row];
    l->hash = key_hash(g->to, l->namespace_row, f->key_type, key, f->key_len);
    if (!account_merge(g, &l->account))
        return false;
    /* Count the key in its account, so that the account does not look idle and is not reused. */
    account_watch_key_counted(g->to, l->account, 1);
    if (granules == 0)
        return true;
    const uint32_t blob = blob_copy(g->to, g->from, watermark_blob(f), granules);
    memcpy(l->key, &blob, sizeof blob);
    return blob != PG_NIL || no_memory(g, granules);
}

static bool watermarks_merge(struct merge *g)
{
    for (uint32_t i = 0; i < g->from->watermark_rows; i++) {
        const struct pg_watermark *l = watermark_at(g->from, i);
        const bool here = l->key_len != 0 && g->source->namespaces[l->namespace_row] != PG_NIL;
        g->source->watermarks[i] = here ? g->watermarks++ : PG_NIL;
        if (here && g->source->watermarks[i] < g->to->watermark_rows &&
            !watermark_merge(g, i, g->source->watermarks[i]))
            return false;
    }
    return fits(g, "watch keys in use", g->watermarks, g->to->watermark_rows);
}

/* Return the new arena's row for a bulk load of the source; PG_NIL = a different bulk load has the
 * same id. Each partition of a namespace knows only some rows of the bulk load; the new arena
 * receives all of them. */
static uint32_t bulk_load_merge(struct merge *g, uint32_t i)
{
    struct pg_bulk_load l = *bulk_load_at(g->from, i);
    uint32_t row = bulk_load_find(g->to, l.id);
    l.namespace_row = g->source->namespaces[l.namespace_row];
    if (row == PG_NIL) {
        row = g->bulk_loads++;
        if (row < g->to->bulk_load_rows)
            bulk_load_write(g->to, row, &l);
    }
    if (row >= g->to->bulk_load_rows)
        return row;
    struct pg_bulk_load *to = bulk_load_at(g->to, row);
    if (to->namespace_row != l.namespace_row || to->uid != l.uid)
        return PG_NIL;
    to->fencing_token = l.fencing_token > to->fencing_token ? l.fencing_token : to->fencing_token;
    to->state = l.state > to->state ? l.state : to->state;
    to->used_boot_ns = l.used_boot_ns > to->used_boot_ns ? l.used_boot_ns : to->used_boot_ns;
    return row;
}

static bool bulk_load_block_merge(struct merge *g, uint32_t block, uint32_t bulk_load)
{
    const struct pg_bulk_load_part part = bulk_load_part(g->from, block);
    for (uint32_t i = 0; i < PG_BULK_LOAD_BLOCK_ROWS; i++)
        if ((part.bits[i / 64] >> i % 64 & 1) != 0 &&
            !bulk_load_mark(g->to, bulk_load, part.number * PG_BULK_LOAD_BLOCK_ROWS + i))
            return fits(g, "rows of bulk loads in use", g->to->bulk_load_block_rows + 1ull,
                        g->to->bulk_load_block_rows);
    return true;
}

static bool bulk_loads_merge(struct merge *g)
{
    for (uint32_t i = 0; i < g->from->bulk_load_rows; i++) {
        const struct pg_bulk_load *l = bulk_load_at(g->from, i);
        const bool here = l->state != PG_BULK_LOAD_NONE &&
                          g->source->namespaces[l->namespace_row] != PG_NIL;
        g->source->bulk_loads[i] = here ? bulk_load_merge(g, i) : PG_NIL;
        if (here && g->source->bulk_loads[i] == PG_NIL)
            return fault_set(g->why, "merge", "two bulk loads have the same id", i, 0, 0);
    }
    if (!fits(g, "bulk loads in use", g->bulk_loads, g->to->bulk_load_rows))
        return false;
    for (uint32_t i = 0; i < g->from->bulk_load_block_rows; i++) {
        const uint32_t bulk_load = bulk_load_block_at(g->from, i)->bulk_load;
        if (bulk_load != 0 && g->source->bulk_loads[bulk_load - 1] != PG_NIL &&
            !bulk_load_block_merge(g, i, g->source->bulk_loads[bulk_load - 1]))
            return false;
    }
    return true;
}

/* ---- schedules ----------------------------------------------------------------------------- */

static bool schedule_merge(struct merge *g, uint32_t i, uint32_t row)
{
    struct pg_schedule_fields f = *schedule_fields(g->from, i);
    const uint32_t granules = blob_granules(schedule_bytes(&f));
    f.topic = g->source->topics[f.topic];
    f.blob = blob_copy(g->to, g->from, f.blob, granules);
    if (f.blob == PG_NIL)
        return no_memory(g, granules);
    schedule_restore(g->to, row, schedule_at(g->from, i)->version, &f);
    return true;
}

/* Merge the schedules. The armed occurrence of a schedule follows it to its shard, whatever the
 * occurrence's own key is. */
static bool schedules_merge(struct merge *g)
{
    for (uint32_t i = 0; i < g->from->schedule_rows; i++) {
        const uint32_t row = schedule_wanted(g, i) != PG_NIL ? g->schedules++ : PG_NIL;
        g->source->schedules[i] = row;
        if (row < g->to->schedule_rows && !schedule_merge(g, i, row))
            return false;
    }
    return fits(g, "schedules in use", g->schedules, g->to->schedule_rows);
}

/* Let a merged occurrence refer to the merged row of its schedule. */
static void occurrence_merge(const struct merge *g, uint32_t i, uint32_t slot)
{
    const uint32_t row = schedule_of_slot(g->from, i);
    const uint8_t *at = blob_at(&g->to->blobs, slot_cold(g->to, slot)->blob);
    if (row == PG_NIL)
        return;
    const size_t place = (size_t)((const uint8_t *)slot_item(g->from, i, PG_EXT_SCHEDULE) -
                                  blob_at(&g->from->blobs, slot_cold(g->from, i)->blob));
    ((struct pg_ext *)(at + place))->extra = g->source->schedules[row];
}

/* ---- cursors ------------------------------------------------------------------------------- */

/* Return the new arena's row for a cursor of the source. All partitions of a namespace share one
 * row. Nobody holds the cursor until its subscriber opens it in the new arena. */
static uint32_t cursor_merge(struct merge *g, uint32_t i)
{
    struct pg_cursor c = *cursor_at(g->from, i);
    c.namespace_row = g->source->namespaces[c.namespace_row];
    c.session = 0;
    uint32_t row = cursor_find(g->to, c.namespace_row, (struct name){c.name, c.name_len});
    if (row == PG_NIL) {
        row = g->cursors++;
        if (row < g->to->cursor_rows)
            *cursor_at(g->to, row) = c;
    }
    if (row < g->to->cursor_rows && c.every_topic)
        cursor_at(g->to, row)->every_topic = 1;
    return row;
}

/* Merge a position. If its topic starts a new sequence, it begins before the first notice, and
 * cursors_carry moves it. */
static void position_merge(struct merge *g, uint32_t i)
{
    struct pg_cursor p = *cursor_at(g->from, i);
    const bool fresh = g->source->routes[topic_at(g->from, p.topic)->namespace_row].fresh_topics;
    p.cursor = g->source->cursors[p.cursor];
    p.topic = g->source->topics[p.topic];
    if (p.cursor == PG_NIL || (fresh && cursor_position(g->to, p.cursor, p.topic) != PG_NIL))
        return;
    if (fresh) {
        p.sequence = 0;
        p.incarnation = topic_at(g->to, p.topic)->incarnation;
    }
    const uint32_t row = g->cursors++;
    if (row < g->to->cursor_rows)
        *cursor_at(g->to, row) = p;
}

static bool cursors_merge(struct merge *g)
{
    for (uint32_t i = 0; i < g->from->cursor_rows; i++) {
        const struct pg_cursor *c = cursor_at(g->from, i);
        const bool here = c->state == PG_CURSOR_HEAD &&
                          g->source->namespaces[c->namespace_row] != PG_NIL;
        g->source->cursors[i] = here ? cursor_merge(g, i) : PG_NIL;
    }
    for (uint32_t i = 0; i < g->from->cursor_rows; i++)
        if (cursor_at(g->from, i)->state == PG_CURSOR_POSITION)
            position_merge(g, i);
    return fits(g, "rows of cursors in use", g->cursors, g->to->cursor_rows);
}

/* Return whether a cursor of the source has committed a notice. */
static bool is_committed(const struct merge *g, uint32_t cursor, const struct pg_entry *e)
{
    const uint32_t row = cursor_position(g->from, cursor, e->topic);
    return row != PG_NIL && cursor_at(g->from, row)->sequence >= e->sequence;
}

/* Let the new position of a cursor include notice `sequence`, the newest one of the topic. */
static void position_carry(struct merge *g, uint32_t cursor, uint32_t topic, uint64_t sequence)
{
    const uint32_t found = cursor_position(g->to, cursor, topic);
    const uint32_t row = found != PG_NIL ? found : g->cursors++;
    if (row >= g->to->cursor_rows)
        return;
    *cursor_at(g->to, row) = (struct pg_cursor){.sequence = sequence,
                                                .incarnation = topic_at(g->to, topic)->incarnation,
                                                .used_boot_ns = g->from->call.real_boot_ns,
                                                .state = PG_CURSOR_POSITION, .cursor = cursor,
                                                .topic = topic};
}

/* A notice of the source has become notice `sequence` of a topic with a new sequence. Each cursor
 * that has committed it, and every notice before it, has committed it in the new topic as well. A
 * cursor that has committed a later notice only gets that notice again. */
static void cursors_carry(struct merge *g, const struct pg_entry *e, uint32_t topic,
                          uint64_t sequence)
{
    for (uint32_t i = 0; i < g->from->cursor_rows; i++) {
        const uint32_t cursor = g->source->cursors[i];
        if (cursor_at(g->from, i)->state != PG_CURSOR_HEAD || cursor >= g->to->cursor_rows)
            continue;
        const uint32_t row = cursor_position(g->to, cursor, topic);
        const uint64_t before = row == PG_NIL ? 0 : cursor_at(g->to, row)->sequence;
        if (before + 1 == sequence && is_committed(g, i, e))
            position_carry(g, cursor, topic, sequence);
    }
}

/* ---- sessions ------------------------------------------------------------------------------ */

/* Translate the row numbers of the source in the interrupted record of a session. If the watch key
 * of this record is not merged, no part of the record will be applied in this arena, so the
 * reference to the key is cleared. */
static void session_rename(struct merge *g, struct pg_session *s)
{
    const bool in_bulk_load = s->bulk_load != 0 && s->bulk_load <= g->from->bulk_load_rows;
    const uint32_t bulk_load = in_bulk_load ? g->source->bulk_loads[s->bulk_load - 1] : PG_NIL;
    s->bulk_load = bulk_load == PG_NIL ? 0 : bulk_load + 1ull;
    if (s->intent[0] == 0)
        return;
    if (s->intent[2] == PG_OP_CANCEL || s->intent[2] > PG_OP_JOIN) {
        s->intent[0] = 0;         /* a merged job has no lease, so its record is answered again */
        return;
    }
    const uint32_t watermark = s->intent[3] < g->from->watermark_rows
                                   ? g->source->watermarks[s->intent[3]]
                                   : PG_NIL;
    s->intent[3] = watermark;
    if (watermark == PG_NIL)
        s->intent[0] = 0;
}

static struct pg_reply_memory *reply_begun(const struct pg_arena *a, const struct pg_session *s)
{
    return session_reply(a, s, s->current);
}

/* Return the row of a session that was already merged from another source; PG_NIL = none. Several
 * sources may have the same session, because a client opens its session on each shard with which it
 * communicates. */
static uint32_t session_known(const struct merge *g, const struct pg_session *f)
{
    for (uint32_t row = 0; row < g->sessions && row < g->to->secret->sessions; row++) {
        const struct pg_session *s = session_at(g->to, row);
        if (s->uid == f->uid && memcmp(s->nonce, f->nonce, sizeof s->nonce) == 0)
            return row;
    }
    return PG_NIL;
}

static bool is_further(const struct pg_session *f, const struct pg_session *than)
{
    if (f->last != than->last)
        return f->last > than->last;
    return (f->current != 0 ? f->applied + 1 : 0) > (than->current != 0 ? than->applied + 1 : 0);
}

/* True if two shards began different batches with the same sequence. No answer would be right for
 * both batches. A client that sends one of them again learns that the result of the batch is in
 * doubt. */
static bool are_at_odds(const struct merge *g, const struct pg_session *f,
                        const struct pg_session *s)
{
    return f->last == s->last && f->current != 0 && s->current != 0 &&
           reply_begun(g->from, f)->checksum != reply_begun(g->to, s)->checksum;
}

static void session_void(struct pg_arena *a, struct pg_session *s)
{
    struct pg_reply_memory *m = reply_begun(a, s);
    m->checksum = ~m->checksum;
    m->sequence = s->last = s->current;
    s->current = 0;
}

static bool session_merge(struct merge *g, uint32_t i, uint32_t row)
{
    const struct pg_session *f = session_at(g->from, i);
    struct pg_session *s = session_at(g->to, row);
    *s = *f;
    s->id = (f->id & ~0xffffull) | row;
    s->first_id = f->first_id != 0 ? f->first_id : f->id;
    session_rename(g, s);
    /* The set of busy keys is made of key hashes, and a key has another hash in the new arena. The
     * new set therefore contains every key, until the client has seen the answer to batch
     * busy_last. */
    if (s->busy_last != 0)
        memset(s->busy_keys, 0xff, sizeof s->busy_keys);
    memcpy(session_reply(g->to, s, 0), session_reply(g->from, f, 0),
           PG_WINDOW * sizeof(struct pg_reply_memory));
    return replies_migrate(g->to, g->from, row, g->why);
}

/* Merge a session. If several sources have it, the copy that progressed furthest is used. */
static bool session_place(struct merge *g, uint32_t i)
{
    const struct pg_session *f = session_at(g->from, i);
    const uint32_t known = session_known(g, f), row = known != PG_NIL ? known : g->sessions++;
    g->source->sessions[i] = row;
    if (row >= g->to->secret->sessions)
        return true;
    struct pg_session *s = session_at(g->to, row);
    if (known != PG_NIL && are_at_odds(g, f, s)) {
        session_void(g->to, s);
        return true;
    }
    return (known != PG_NIL && !is_further(f, s)) || session_merge(g, i, row);
}

static bool session_wanted(const struct merge *g, uint32_t i)
{
    const struct pg_session *s = session_at(g->from, i);
    return s->id != 0 && (g->source->sessions[i] == OWNS ||
                          s->used_boot_ns > g->from->header->heartbeat_boot_ns - RECENT_NS);
}

static bool gives(const struct merge *g)
{
    for (uint32_t i = 0; i < g->from->namespace_rows; i++)
        if (g->source->namespaces[i] != PG_NIL)
            return true;
    return false;
}

/* Merge the sessions of each source from which this arena receives a namespace. A client then finds
 * its answers in every shard that received one of its namespaces. If a shard keeps a session
 * without need, this does no harm. */
static bool sessions_merge(struct merge *g)
{
    const bool wanted = gives(g);
    for (uint32_t i = 0; i < g->from->secret->sessions; i++) {
        if (!wanted || !session_wanted(g, i)) {
            g->source->sessions[i] = PG_NIL;
            continue;
        }
        if (!session_place(g, i))
            return false;
    }
    return fits(g, "sessions open", g->sessions, g->to->secret->sessions);
}

/* ---- slots --------------------------------------------------------------------------------- */

static bool slot_account_merge(struct merge *g, uint32_t slot)
{
    struct pg_cold *c = slot_cold(g->to, slot);
    if (!ctl_counted(slot_hot(g->to, slot)->ctl))
        c->account = 0;
    if (!account_merge(g, &c->account))
        return false;
    if (c->account != 0)
        /* Count the slot in its account, so that the account does not look idle and is not
         * reused. */
        account_counted(g->to, c->account, 1, 0);
    return true;
}

static void watches_merge(struct merge *g, uint32_t slot)
{
    uint32_t *link = &operation_at(g->to, slot)->first_watch;
    for (uint32_t x = *link; x != PG_NIL; x = watch_at(g->from, x)->sibling) {
        const uint32_t row = g->watches++;
        if (row >= g->to->watch_rows)
            continue;
        struct pg_watch *w = watch_at(g->to, row);
        *w = *watch_at(g->from, x);
        w->slot = slot;
        w->key_row = g->source->watermarks[w->key_row];
        *link = row;
        link = &w->sibling;
    }
}

static bool operation_merge(struct merge *g, uint32_t i, uint32_t slot)
{
    struct pg_operation *op = operation_at(g->to, slot);
    const struct pg_session *s = session_find(g->from, op->session);
    if (s != NULL)
        op->session = session_at(g->to, g->source->sessions[row_of_session(s->id)])->id;
    if (ctl_live(slot_hot(g->to, slot)->ctl))
        watches_merge(g, slot);
    else
        op->first_watch = PG_NIL;
    if (op->notice_blob == PG_NIL)
        return true;
    const uint32_t granules = (uint32_t)operation_granules(g->from, i);
    op->notice_blob = blob_copy(g->to, g->from, op->notice_blob, granules);
    return op->notice_blob != PG_NIL || no_memory(g, granules);
}

static bool slot_merge(struct merge *g, uint32_t i, uint32_t ns, uint32_t slot)
{
    struct pg_arena *to = g->to;
    struct pg_hot *h = slot_hot(to, slot);
    struct pg_cold *c = slot_cold(to, slot);
    *h = *slot_hot(g->from, i);
    *c = *slot_cold(g->from, i);
    c->blob = blob_copy(to, g->from, c->blob, slot_granules(c));
    if (c->blob == PG_NIL)
        return no_memory(g, slot_granules(c));
    h->hash = key_hash(to, g->source->namespaces[ns], c->key_type, slot_key(to, slot), c->key_len);
    occurrence_merge(g, i, slot);
    const uint32_t topic = g->source->topics[h->topic];
    h->topic = topic == PG_NIL ? 0 : (uint16_t)topic;         /* an outcome uses no topic */
    if (has_wal(to) && has_wal(g->from)) {
        *timestamps_at(to, slot) = *timestamps_at(g->from, i);
        /* This LSN refers to the WAL of the source, so clear it. */
        timestamps_at(to, slot)->add_lsn = 0;
    }
    return slot_account_merge(g, slot) && (!is_operation(to, slot) || operation_merge(g, i, slot));
}

static bool slots_merge(struct merge *g)
{
    for (uint32_t i = 0; i < g->from->slots.capacity; i++) {
        const uint32_t ns = slot_wanted(g, i);
        if (ns != PG_NIL && !slot_merge(g, i, ns, g->slots++))
            return false;
    }
    return fits(g, "watches in use", g->watches, g->to->watch_rows);
}

/* ---- consumer groups ------------------------------------------------------------------------- */

static struct name group_name(const struct pg_consumer_group *f)
{
    return (struct name){f->name, f->name_len};
}

/* Return the new arena's row for a group of the source; PG_NIL = the group is not merged. */
static uint32_t group_merged(const struct merge *g, uint32_t i)
{
    const struct pg_consumer_group *f = group_at(g->from, i);
    const bool here = group_exists(g->from, i) && f->incarnation != 0 &&
                      g->source->namespaces[f->namespace_row] != PG_NIL;
    return here ? group_find(g->to, g->source->namespaces[f->namespace_row], group_name(f)) : PG_NIL;
}

/* Merge a group and its topics. All partitions of a namespace have the same groups. */
static bool group_merge(struct merge *g, uint32_t i)
{
    struct pg_consumer_group fields = *group_at(g->from, i);
    uint32_t topics[PG_GROUP_TOPICS_MAX];
    const uint32_t count = group_topics(g->from, i, topics);
    for (uint32_t n = 0; n < count; n++)
        topics[n] = g->source->topics[topics[n]];
    fields.namespace_row = g->source->namespaces[fields.namespace_row];
    const uint32_t row = g->groups++;
    return row >= g->to->group_rows || group_restore(g->to, row, &fields, topics, count) ||
           fits(g, "topics of consumer groups", g->to->group_topic_rows + 1ull,
                g->to->group_topic_rows);
}

static bool groups_merge(struct merge *g)
{
    for (uint32_t i = 0; i < g->from->group_rows; i++) {
        const struct pg_consumer_group *f = group_at(g->from, i);
        const bool here = group_exists(g->from, i) && f->incarnation != 0 &&
                          g->source->namespaces[f->namespace_row] != PG_NIL;
        if (here && group_merged(g, i) == PG_NIL && !group_merge(g, i))
            return false;
    }
    return fits(g, "consumer groups in use", g->groups, g->to->group_rows);
}

static bool error_merge(struct merge *g, struct pg_job *j)
{
    const uint32_t len = job_error_len(j), granules = blob_granules(len);
    if (len == 0)
        return true;
    const uint32_t blob = blob_copy(g->to, g->from, (uint32_t)j->error, granules);
    j->error = (uint64_t)len << 32 | blob;
    return blob != PG_NIL || no_memory(g, granules);
}

/* Merge a job. A leased job waits again, because its lease names a row of the source. All jobs with
 * one ticket use one copy of their blob. */
static bool job_merge(struct merge *g, const struct pg_job *f, uint32_t group, uint32_t row)
{
    const uint32_t ns = group_at(g->to, group)->namespace_row;
    struct pg_job j = *f;
    j.group = (uint16_t)group;
    j.topic = (uint16_t)g->source->topics[f->topic];
    j.position = 0;
    j.session = 0;
    j.hash = key_hash(g->to, ns, j.meta & 7, blob_at(&g->from->blobs, f->blob), j.key_len);
    if (job_state(&j) == PG_JOB_LEASED)
        j.control = job_control(PG_JOB_WAITING, PG_JR_NONE, job_failures(&j), job_leases(&j));
    j.blob = job_blob(g->to, j.hash, j.ticket >> 8);
    if (j.blob == PG_NIL)
        j.blob = blob_copy(g->to, g->from, f->blob, job_granules(f));
    if (j.blob == PG_NIL)
        return no_memory(g, job_granules(f));
    if (!error_merge(g, &j))
        return false;
    *job_at(g->to, row) = j;
    index_insert(&g->to->job_index, j.hash, row);
    return true;
}

/* Return whether a job belongs to this shard. The jobs of a schedule follow it to its shard, whatever
 * their own keys are, so that it counts them. */
static bool job_belongs(const struct merge *g, const struct pg_job *f)
{
    const uint8_t *key = blob_at(&g->from->blobs, f->blob);
    const bool occurrence = (f->meta >> 4 & PG_E_SCHEDULE) != 0;
    return belongs(g, group_at(g->from, f->group)->namespace_row, key,
                   occurrence ? occurrence_prefix(key, f->key_len) : f->key_len);
}

static bool jobs_merge(struct merge *g)
{
    for (uint32_t i = 0; i < g->from->job_slots.capacity; i++) {
        const struct pg_job *f = job_at(g->from, i);
        const uint32_t group =
            job_state(f) == PG_JOB_FREE ? PG_NIL : group_merged(g, f->group);
        if (group == PG_NIL || !job_belongs(g, f))
            continue;
        const uint32_t row = g->jobs++;
        if (row < g->to->job_slots.capacity && !job_merge(g, f, group, row))
            return false;
    }
    return fits(g, "jobs in use", g->jobs, g->to->job_slots.capacity);
}

/* ---- the replay buffer --------------------------------------------------------------------- */

/* Number and size of some entries. Sent entries are merged before unsent entries, each kind in
 * firing order. */
struct tally {
    uint64_t entries, bytes;
};

static const struct pg_entry *entry_next(const struct pg_source *s)
{
    return replay_at(s->arena, s->next);
}

/* True if an entry has to be merged. If a topic restarts its sequences, only those sent entries are
 * merged that a cursor has not committed: it is unknown which of them other subscribers have
 * received. */
static bool entry_wanted(const struct merge *g, const struct pg_entry *e, bool sent)
{
    const uint32_t ns = topic_at(g->from, e->topic)->namespace_row;
    return belongs(g, ns, blob_at(&g->from->blobs, e->blob), e->key_len) &&
           !(sent && g->source->routes[ns].fresh_topics &&
             cursors_committed(g->from, e->topic) >= e->sequence);
}

/* Move to the next entry of a source that has to be merged. Return false if there is none. */
static bool entry_seek(struct merge *g, struct pg_source *s, bool sent)
{
    const struct pg_header *h = s->arena->header;
    const uint64_t end = sent ? h->published : h->replay_tail;
    g->source = s;
    g->from = s->arena;
    while (s->next < end && !entry_wanted(g, entry_next(s), sent))
        s->next++;
    return s->next < end;
}

static struct tally entries_count(struct merge *g, struct pg_source *sources, uint32_t count,
                                  bool sent)
{
    struct tally all = {0, 0};
    for (uint32_t i = 0; i < count; i++) {
        struct pg_source *s = &sources[i];
        s->next = sent ? s->arena->header->replay_head : s->arena->header->published;
        for (; entry_seek(g, s, sent); s->next++) {
            all.entries++;
            all.bytes += (uint64_t)entry_granules(entry_next(s)) * PG_GRANULE;
        }
    }
    return all;
}

static struct pg_source *oldest_of(struct merge *g, struct pg_source *sources, uint32_t count,
                                   bool sent)
{
    struct pg_source *oldest = NULL;
    for (uint32_t i = 0; i < count; i++)
        if (entry_seek(g, &sources[i], sent) &&
            (oldest == NULL || entry_next(&sources[i])->fired_ns < entry_next(oldest)->fired_ns))
            oldest = &sources[i];
    return oldest;
}

static bool is_fresh(const struct merge *g, const struct pg_entry *e)
{
    return g->source->routes[topic_at(g->from, e->topic)->namespace_row].fresh_topics != 0;
}

/* Give the next notice of a topic with a new sequence its number. */
static uint64_t entry_number(struct merge *g, const struct pg_entry *e, bool sent)
{
    const uint32_t row = g->source->topics[e->topic];
    struct pg_topic *t = topic_at(g->to, row);
    t->sequence++;
    if (sent) {
        t->carried = t->sequence;
        cursors_carry(g, e, row, t->sequence);
    }
    return t->sequence;
}

/* Drop a sent entry for which the replay buffer has no space. */
static void entry_drop(struct merge *g, const struct pg_entry *e)
{
    if (!is_fresh(g, e))
        return;
    entry_number(g, e, true);
    topic_at(g->to, g->source->topics[e->topic])->last_position = FIRST_POSITION;
}

static bool entry_merge(struct merge *g, const struct pg_entry *e, bool sent)
{
    struct pg_header *h = g->to->header;
    const uint32_t row = g->source->topics[e->topic];
    const uint32_t blob = blob_copy(g->to, g->from, e->blob, entry_granules(e));
    struct pg_topic *t = topic_at(g->to, row);
    struct pg_entry *n = replay_at(g->to, h->replay_tail);
    if (blob == PG_NIL)
        return no_memory(g, entry_granules(e));
    *n = *e;
    n->meta = (uint8_t)(e->meta & ~PG_ENTRY_JOBS);
    n->blob = blob;
    n->topic = (uint16_t)row;
    n->hash = key_hash(g->to, t->namespace_row, entry_key_type(e), blob_at(&g->to->blobs, blob),
                       e->key_len);
    if (is_fresh(g, e))
        n->sequence = entry_number(g, e, sent);
    n->back = entry_back(h->replay_tail, n->sequence == 1 ? 0 : t->last_position);
    n->commit = t->last_position = ++h->replay_tail;
    return true;
}

/* Merge the newest of the wanted entries, as many as fit into `space`. `all` is the tally of all
 * wanted entries. */
static bool entries_merge(struct merge *g, struct pg_source *sources, uint32_t count, bool sent,
                          struct tally all, struct tally space)
{
    struct pg_source *s;
    for (; (s = oldest_of(g, sources, count, sent)) != NULL; s->next++) {
        const struct pg_entry *e = entry_next(s);
        g->source = s;
        g->from = s->arena;
        const bool fits_in = all.entries <= space.entries && all.bytes <= space.bytes;
        if (fits_in && !entry_merge(g, e, sent))
            return false;
        if (!fits_in)
            entry_drop(g, e);
        all.entries--;
        all.bytes -= (uint64_t)entry_granules(e) * PG_GRANULE;
    }
    return true;
}

static uint64_t minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

static bool replay_merge(struct merge *g, struct pg_source *sources, uint32_t count)
{
    struct pg_header *h = g->to->header;
    const struct tally sent = entries_count(g, sources, count, true);
    const struct tally unsent = entries_count(g, sources, count, false);
    const uint64_t free = (g->to->blobs.granules - blobs_used(&g->to->blobs)) * PG_GRANULE;
    const uint64_t most = h->replay_bytes_max < free ? h->replay_bytes_max : free;
    const struct tally space = {minus(h->replay_capacity, unsent.entries),
                                minus(most, unsent.bytes)};
    if (!fits(g, "notices not sent yet", unsent.entries, h->replay_capacity))
        return false;
    for (uint32_t i = 0; i < count; i++)
        sources[i].next = sources[i].arena->header->replay_head;
    h->replay_head = h->replay_tail = FIRST_POSITION;
    if (!entries_merge(g, sources, count, true, sent, space))
        return false;
    h->published = h->replay_tail;
    return entries_merge(g, sources, count, false, unsent, unsent) &&
           fits(g, "rows of cursors in use", g->cursors, g->to->cursor_rows);
}

/* ---- the whole merge ----------------------------------------------------------------------- */

static bool each(struct merge *g, struct pg_source *sources, uint32_t count,
                 bool (*step)(struct merge *g))
{
    for (uint32_t i = 0; i < count; i++) {
        g->source = &sources[i];
        g->from = sources[i].arena;
        if (!step(g))
            return false;
    }
    return true;
}

int pg_merge(struct pg_arena *to, struct pg_source *sources, uint32_t count,
             struct pg_fault *why)
{
    struct merge g = {.to = to, .why = why};
    memset(why, 0, sizeof *why);
    return each(&g, sources, count, counters_merge) &&
           each(&g, sources, count, namespaces_merge) &&
           each(&g, sources, count, topics_merge) && each(&g, sources, count, slots_count) &&
           slots_fit(&g) && each(&g, sources, count, watermarks_merge) &&
           each(&g, sources, count, bulk_loads_merge) && each(&g, sources, count, cursors_merge) &&
           each(&g, sources, count, schedules_merge) && each(&g, sources, count, sessions_merge) &&
           each(&g, sources, count, slots_merge) && each(&g, sources, count, groups_merge) &&
           budgets_fit(to, why) && each(&g, sources, count, jobs_merge) &&
           replay_merge(&g, sources, count);
}

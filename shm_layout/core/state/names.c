/* names.c - the tables of namespaces and topics, and the index from name to row.
 *
 * The index uses open addressing with linear probing. A cell holds a row number + 1. The row
 * numbers of topics follow those of namespaces. No name is ever erased from the index. When a
 * topic's row is reused for another name, which is rare, the whole index is built again. */

#include "core/state/names.h"
#include "core/state/cursors.h"
#include "core/base/answer.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/futex.h"
#include "core/base/hash.h"
#include "core/base/late_policy.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/lateness.h"
#include "core/state/quotas.h"
#include "core/state/records.h"
#include "core/state/replay_buffer.h"
#include "core/state/rows.h"

#define TOPIC_SCOPE (1ull << 32)  /* hash scope of topics in namespace n: this bit | n */

static uint64_t scope_of(uint32_t namespace_row)
{
    return namespace_row == PG_NIL ? 0 : TOPIC_SCOPE | namespace_row;
}

static bool row_is(const struct pg_arena *a, uint32_t row, uint32_t ns, struct name name)
{
    struct name found;
    if (row < a->namespace_rows) {
        if (ns != PG_NIL)
            return false;
        found = namespace_name(a, row);
    } else {
        const uint32_t topic = row - a->namespace_rows;
        if (ns != topic_at(a, topic)->namespace_row)
            return false;
        found = topic_name(a, topic);
    }
    return found.len == name.len && memcmp(found.bytes, name.bytes, name.len) == 0;
}

static uint32_t cell_of(const struct pg_arena *a, uint32_t ns, struct name name)
{
    const uint64_t hash = keyed_hash(a->secret->secret, scope_of(ns), name.bytes, name.len);
    return (uint32_t)hash & (a->name_cells - 1);
}

static uint32_t *name_cell(const struct pg_arena *a, uint32_t cell)
{
    PG_ASSERT_IN_TESTS(cell < a->name_cells, "names", "a cell is inside the index");
    return &a->name_index[cell];
}

/* Find a topic of namespace row `ns`, or a namespace if ns = PG_NIL. Return its row number; the row
 * numbers of topics follow those of namespaces. If the name does not exist, return PG_NIL, and set
 * *free_cell to the cell in which to store it. */
static uint32_t name_find(const struct pg_arena *a, uint32_t ns, struct name name,
                          uint32_t *free_cell)
{
    uint32_t cell = cell_of(a, ns, name);
    while (*name_cell(a, cell) != 0) {
        if (row_is(a, *name_cell(a, cell) - 1, ns, name))
            return *name_cell(a, cell) - 1;
        cell = (cell + 1) & (a->name_cells - 1);
    }
    *free_cell = cell;
    return PG_NIL;
}

static void name_link(struct pg_arena *a, uint32_t row, uint32_t ns, struct name name)
{
    uint32_t cell = 0;
    if (name_find(a, ns, name, &cell) == PG_NIL)
        *name_cell(a, cell) = row + 1;
}

static bool topic_placed(const struct pg_arena *a, uint32_t i, struct pg_fault *why)
{
    const struct pg_topic *t = topic_at(a, i);
    if (t->name_len > PG_TOPIC_MAX + 1)
        return fault_set(why, "names", "length of a topic's name", i, PG_TOPIC_MAX + 1,
                         t->name_len);
    if (t->namespace_row >= a->namespace_rows || namespace_at(a, t->namespace_row)->name_len == 0)
        return fault_set(why, "names", "a topic without a namespace", i, a->namespace_rows,
                         t->namespace_row);
    return true;
}

bool names_sound(const struct pg_arena *a, struct pg_fault *why)
{
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        if (namespace_at(a, i)->name_len > PG_NAMESPACE_MAX)
            return fault_set(why, "names", "length of a namespace's name", i, PG_NAMESPACE_MAX,
                             namespace_at(a, i)->name_len);
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if (topic_at(a, i)->name_len != 0 && !topic_placed(a, i, why))
            return false;
    return true;
}

void names_rebuild(struct pg_arena *a)
{
    memset(a->name_index, 0, sizeof(uint32_t) * a->name_cells);
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        if (namespace_at(a, i)->name_len != 0)
            name_link(a, i, PG_NIL, namespace_name(a, i));
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if (topic_at(a, i)->name_len != 0)
            name_link(a, a->namespace_rows + i, topic_at(a, i)->namespace_row, topic_name(a, i));
}

uint32_t names_find_namespace(const struct pg_arena *a, struct name ns)
{
    uint32_t cell;
    return name_find(a, PG_NIL, ns, &cell);
}

bool name_reserved(struct name name)
{
    return name.len != 0 && name.bytes[0] == PG_RESERVED;
}

bool names_elsewhere(const struct pg_arena *a, struct name ns)
{
    return a->state.confined && !name_reserved(ns) && names_find_namespace(a, ns) == PG_NIL;
}

/* ---- births ----------------------------------------------------------------------------- */

static uint32_t namespace_free_row(const struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        if (namespace_at(a, i)->name_len == 0)
            return i;
    return PG_NIL;
}

static uint32_t namespace_born(struct pg_arena *a, struct name name, uint32_t cell)
{
    const uint32_t i = namespace_free_row(a);
    struct pg_namespace *row = namespace_at(a, i);
    row->shard = a->header->shard;
    row->owner_uid = PG_NIL;
    row->created_uid = a->call.uid;
    memcpy(row->name, name.bytes, name.len);
    if (has_wal(a))
        wal_append_namespace(a, i, row, name);
    STORE_RELEASE(&row->name_len, name.len);
    pg_wake_all(&a->header->wake);
    *name_cell(a, cell) = i + 1;
    return i;
}

static bool has_schedule(const struct pg_arena *a, uint32_t topic)
{
    for (uint32_t row = 0; a->metrics->schedules != 0 && row < a->schedule_rows; row++)
        if (schedule_used(a, row) && schedule_fields(a, row)->topic == topic)
            return true;
    return false;
}

static bool topic_reusable(const struct pg_arena *a, uint32_t row)
{
    const struct pg_topic *t = topic_at(a, row);
    return t->live == 0 && t->slack_ns == 0 && t->late == 0 && t->paused == 0 && t->missed == 0 &&
           t->groups == 0 && t->priority == 0 && t->unique_keys == 0 &&
           t->last_position <= a->header->replay_head && !has_schedule(a, row) && !cursors_hold_topic(a, row);
}

/* Return a sum that rises whenever a topic may have become reusable. */
static uint64_t ends_so_far(const struct pg_arena *a)
{
    const struct pg_metrics *m = a->metrics;
    /* Number of operations that have ended, plus a constant. Recovery restores `operations`, but
     * not the counter `watches`, so their difference may be negative. The constant makes it
     * positive. The sum then stays below UINT64_MAX, which means "never". */
    const uint64_t operations = m->watches + UINT32_MAX - m->operations;
    return m->cancels + m->replaces + operations + a->header->replay_head + m->cursor_commits +
           m->unique_freed;
}

static bool is_own(const struct pg_arena *a, const struct pg_topic *t)
{
    return t->name_len != 0 && t->created_uid == a->call.uid;
}

static uint32_t topics_held(const struct pg_arena *a)
{
    uint32_t held = 0;
    for (uint32_t i = 0; i < a->topic_rows; i++)
        held += is_own(a, topic_at(a, i));
    return held;
}

/* Return whether the uid holds its share of the topics. If so, a new topic can only reuse the row
 * of one of the uid's own topics. */
static bool holds_its_share(const struct pg_arena *a)
{
    const uint32_t share = share_of(a, a->topic_rows);
    return share < a->topic_rows && topics_held(a) >= share;
}

static uint32_t topic_reusable_row(const struct pg_arena *a, bool own)
{
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if ((!own || is_own(a, topic_at(a, i))) && topic_reusable(a, i))
            return i;
    return PG_NIL;
}

/* Return whether the uid may have another topic. As in topic_row_for, a failed search is repeated
 * only after some timer, operation or notice has ended. */
static bool topic_admitted(struct pg_arena *a, struct pg_result *why)
{
    const uint64_t ends = ends_so_far(a);
    const bool known =
        a->state.topics_refused_at == ends && a->state.topics_refused_uid == a->call.uid;
    if (!known && (!holds_its_share(a) || topic_reusable_row(a, true) != PG_NIL))
        return true;
    if (!known)
        a->state.topics_refused_held = topics_held(a);
    a->state.topics_refused_at = ends;
    a->state.topics_refused_uid = a->call.uid;
    share_refuse(a, PG_Q_UID_TOPICS, a->topic_rows, a->state.topics_refused_held, why);
    return false;
}

static uint32_t topic_free_row(const struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if (topic_at(a, i)->name_len == 0)
            return i;
    return PG_NIL;
}

/* Return a free row. If there is none, return the row of a topic without timers, notices, settings
 * and cursors that need it; that topic loses its name. A failed search is repeated only after some
 * timer, operation or notice has ended, so that requests with hostile names are cheap. */
static uint32_t topic_row_for(struct pg_arena *a)
{
    const uint64_t ends = ends_so_far(a);
    if (a->state.topics_stuck_at == ends)
        return PG_NIL;
    const bool own = holds_its_share(a);
    uint32_t row = own ? PG_NIL : topic_free_row(a);
    if (row != PG_NIL)
        return row;
    row = topic_reusable_row(a, own);
    if (row == PG_NIL) {
        /* A uid that holds its share of the topics does not reach this line, because topic_admitted
         * has found one of the uid's topics to reuse. */
        a->state.topics_stuck_at = ends;
        return PG_NIL;
    }
    STORE_RELEASE(&topic_at(a, row)->name_len, 0u);
    cursors_forget_topic(a, row);
    atomic_thread_fence(memory_order_release);   /* comes before the stores of the next name */
    names_rebuild(a);
    return row;
}

void names_look_again(struct pg_arena *a)
{
    a->state.topics_stuck_at = a->state.topics_refused_at = UINT64_MAX;
}

static void topic_wake(struct pg_topic *t)
{
    STORE_RELEASE(&t->wake, t->wake + 1);
    futex_wake(&t->wake);
}

static uint32_t topic_born(struct pg_arena *a, uint32_t ns, struct name name)
{
    const uint32_t row = topic_row_for(a);
    if (row == PG_NIL)
        return PG_NIL;
    struct pg_topic *t = topic_at(a, row);
    /* Readers of the row's previous topic may sleep on `wake`. */
    memset(t, 0, offsetof(struct pg_topic, wake));
    memset(t->name, 0, sizeof t->name);
    t->namespace_row = ns;
    t->created_uid = a->call.uid;
    STORE_RELAXED(&t->incarnation, a->header->next_incarnation++);
    memcpy(t->name, name.bytes, name.len);
    if (has_wal(a))
        wal_append_topic(a, row, t, name);
    STORE_RELEASE(&t->name_len, name.len + 1);
    topic_wake(t);
    name_link(a, a->namespace_rows + row, ns, name);
    return row;
}

void namespace_settings_store(struct pg_namespace *to, const struct pg_wal_namespace *from)
{
    STORE_RELAXED(&to->owner_uid, from->owner_uid);
    STORE_RELAXED(&to->durability, from->durability);
    STORE_RELAXED(&to->quota_timers, from->quota_timers);
    STORE_RELAXED(&to->quota_bytes, from->quota_bytes);
    STORE_RELAXED(&to->quota_ops, from->quota_ops);
    STORE_RELAXED(&to->park_beyond_ns, from->park_beyond_ns);
    STORE_RELAXED(&to->late_per_s, from->late_per_s);
    STORE_RELAXED(&to->paused, from->paused);
}

void names_configure(struct pg_arena *a, uint32_t row, const struct pg_namespace_set *set)
{
    struct pg_namespace n = *namespace_at(a, row);
    if (set->fields & PG_N_OWNER)
        n.owner_uid = set->owner_uid;
    if (set->fields & PG_N_DURABILITY)
        n.durability = set->durability;
    if (set->fields & PG_N_TIMERS)
        n.quota_timers = set->quota_timers;
    if (set->fields & PG_N_BYTES)
        n.quota_bytes = set->quota_bytes;
    if (set->fields & PG_N_OPS)
        n.quota_ops = set->quota_ops;
    if (set->fields & PG_N_PARK)
        n.park_beyond_ns = set->park_beyond_ns;
    if (set->fields & PG_N_LATE)
        n.late_per_s = set->late_per_s;
    if (set->fields & PG_N_PAUSED)
        n.paused = set->paused != 0;
    if (has_wal(a))
        wal_append_namespace(a, row, &n, namespace_name(a, row));
    const struct pg_wal_namespace settings = wal_namespace_of(row, &n, n.name_len);
    namespace_settings_store(namespace_at(a, row), &settings);
    restrictions_note(a);
    late_changed(a);
    wal_buffer_settle(a);
}

void topic_settings_store(struct pg_topic *to, const struct pg_wal_topic *from)
{
    STORE_RELAXED(&to->slack_ns, from->slack_ns);
    STORE_RELAXED(&to->late, from->late);
    STORE_RELAXED(&to->paused, from->paused);
    STORE_RELAXED(&to->priority, from->priority);
}

void topic_configure(struct pg_arena *a, uint32_t row, const struct pg_topic_set *set)
{
    struct pg_topic t = *topic_at(a, row);
    if (set->fields & PG_TF_SLACK)
        t.slack_ns = set->slack_ns;
    if (set->fields & PG_TF_LATE)
        t.late = late_setting(set->policy, set->grace_ns);
    if (set->fields & PG_TF_PAUSED)
        t.paused = set->paused;
    if (set->fields & PG_TF_PRIORITY)
        t.priority = set->priority;
    if (has_wal(a))
        wal_append_topic(a, row, &t, topic_name(a, row));
    const struct pg_wal_topic settings = wal_topic_of(row, &t, 0);
    topic_settings_store(topic_at(a, row), &settings);
    late_changed(a);
    a->state.topics_stuck_at = a->state.topics_refused_at = UINT64_MAX;   /* the row may be free */
    wal_buffer_settle(a);
}

static uint32_t namespaces_held(const struct pg_arena *a)
{
    uint32_t held = 0;
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        held += namespace_at(a, i)->name_len != 0 && namespace_at(a, i)->created_uid == a->call.uid;
    return held;
}

/* Return whether the uid may have another namespace. */
static bool namespace_admitted(const struct pg_arena *a, struct pg_result *why)
{
    if (!share_admits(a, PG_Q_UID_NAMESPACES, a->namespace_rows, namespaces_held(a), why))
        return false;
    if (namespace_free_row(a) != PG_NIL)
        return true;
    answer(why, 0, PG_ST_FULL_NAMESPACES, 0);
    return false;
}

uint32_t names_namespace(struct pg_arena *a, struct name ns, struct pg_result *why)
{
    uint32_t cell = 0;
    const uint32_t row = name_find(a, PG_NIL, ns, &cell);
    if (row != PG_NIL)
        return row;
    if ((has_wal(a) && !wal_buffer_admits(a, why)) || !namespace_admitted(a, why))
        return PG_NIL;
    return namespace_born(a, ns, cell);
}

uint32_t names_find_topic(const struct pg_arena *a, uint32_t namespace_row, struct name topic)
{
    uint32_t cell;
    const uint32_t row = name_find(a, namespace_row, topic, &cell);
    return row == PG_NIL ? PG_NIL : row - a->namespace_rows;
}

/* Return the topic's row number; the row numbers of topics follow those of namespaces. */
static uint32_t topic_find(const struct pg_arena *a, struct name ns, struct name topic)
{
    const uint32_t row = names_find_namespace(a, ns);
    uint32_t cell;
    return row == PG_NIL ? PG_NIL : name_find(a, row, topic, &cell);
}

uint32_t names_topic(struct pg_arena *a, struct name ns, struct name topic, struct pg_result *why)
{
    uint32_t row = topic_find(a, ns, topic);
    if (row != PG_NIL)
        return row - a->namespace_rows;
    /* The namespace comes first. Its refusal stays the same when the message is repeated after a
     * kill, but that of the topic depends on topics that other records of the message have got. */
    if ((has_wal(a) && !wal_buffer_admits(a, why)) ||
        (names_find_namespace(a, ns) == PG_NIL && !namespace_admitted(a, why)) ||
        !topic_admitted(a, why))
        return PG_NIL;
    const uint32_t ns_row = names_namespace(a, ns, why);
    if (ns_row == PG_NIL)
        return PG_NIL;
    row = topic_born(a, ns_row, topic);
    if (row == PG_NIL)
        answer(why, 0, PG_ST_FULL_TOPICS, 0);
    return row;
}

void names_hold(struct pg_arena *a, uint32_t topic) { topic_at(a, topic)->live++; }

void names_release(struct pg_arena *a, uint32_t topic)
{
    if (--topic_at(a, topic)->live == 0)
        a->state.topics_stuck_at = a->state.topics_refused_at = UINT64_MAX;
}

/* ---- words of sleepers -------------------------------------------------------------------- */

void names_wake(struct pg_arena *a, uint32_t topic, uint32_t visible)
{
    struct pg_topic *t = topic_at(a, topic);
    struct pg_namespace *n = namespace_at(a, t->namespace_row);
    topic_wake(t);
    if (n->wake == visible)
        return;                   /* woken for another topic of the namespace */
    STORE_RELEASE(&n->wake, visible);
    futex_wake(&n->wake);
}

/* ---- readers ------------------------------------------------------------------------------ */

/* Count a used row of namespace `ns`. If the namespace is reserved, do not count the row as used,
 * and subtract it from the number of rows. */
static void row_counted(const struct pg_arena *a, struct pg_fill *fill, uint32_t ns)
{
    if (ns < a->namespace_rows && name_reserved(namespace_name(a, ns)))
        fill->rows--;
    else
        fill->used++;
}

struct pg_fill pg_namespace_fill(const struct pg_arena *a)
{
    struct pg_fill fill = {0, a->namespace_rows};
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        if (LOAD_ACQUIRE(&namespace_at(a, i)->name_len) != 0)
            row_counted(a, &fill, i);
    return fill;
}

struct pg_fill pg_topic_fill(const struct pg_arena *a)
{
    struct pg_fill fill = {0, a->topic_rows};
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if (LOAD_ACQUIRE(&topic_at(a, i)->name_len) != 0)
            row_counted(a, &fill, topic_at(a, i)->namespace_row);
    return fill;
}

uint32_t pg_find_namespace(const struct pg_arena *a, const char *name, uint32_t len)
{
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        if (LOAD_ACQUIRE(&namespace_at(a, i)->name_len) == len &&
            memcmp(namespace_at(a, i)->name, name, len) == 0)
            return i;
    return PG_NIL;
}

/* The row may be reused for another name while this function runs. The row then has another
 * incarnation. */
static bool topic_named(const struct pg_topic *t, uint32_t namespace_row, const char *name,
                        uint32_t len)
{
    const uint64_t incarnation = LOAD_ACQUIRE(&t->incarnation);
    if (LOAD_ACQUIRE(&t->name_len) != len + 1)
        return false;
    if (t->namespace_row != namespace_row || memcmp(t->name, name, len) != 0)
        return false;
    atomic_thread_fence(memory_order_acquire);
    return LOAD_ACQUIRE(&t->name_len) == len + 1 && LOAD_RELAXED(&t->incarnation) == incarnation;
}

uint32_t pg_find_topic(const struct pg_arena *a, uint32_t namespace_row, const char *name,
                       uint32_t len)
{
    for (uint32_t i = 0; i < a->topic_rows; i++)
        if (topic_named(topic_at(a, i), namespace_row, name, len))
            return i;
    return PG_NIL;
}

/* ---- check -------------------------------------------------------------------------------- */

/* If the newest notice of a topic is still in the replay buffer, the notice must name the topic and
 * have the topic's sequence. */
static bool newest_sound(const struct pg_arena *a, uint32_t i)
{
    const struct pg_topic *t = topic_at(a, i);
    if (t->last_position <= a->header->replay_head)
        return (t->last_position == 0) == (t->sequence == 0);
    const struct pg_entry *e = replay_at(a, t->last_position - 1);
    return e->topic == i && e->sequence == t->sequence;
}

static bool topic_sound(const struct pg_arena *a, uint32_t i, struct pg_fault *fault)
{
    const struct pg_topic *t = topic_at(a, i);
    uint32_t cell;
    if (t->last_position > a->header->replay_tail)
        return fault_set(fault, "names",
                         "a topic's newest notice is past the tail of the replay buffer",
                         i, a->header->replay_tail, t->last_position);
    if (t->incarnation == 0 || t->incarnation >= a->header->next_incarnation)
        return fault_set(fault, "names", "an incarnation that was never assigned", i,
                         a->header->next_incarnation, t->incarnation);
    if (!newest_sound(a, i))
        return fault_set(fault, "names", "a topic's newest notice belongs to another topic", i,
                         t->sequence, t->last_position);
    const uint32_t row = name_find(a, t->namespace_row, topic_name(a, i), &cell);
    return row == a->namespace_rows + i ||
           fault_set(fault, "names", "a topic that the index does not find", i,
                     a->namespace_rows + i, row);
}

static bool namespace_found(const struct pg_arena *a, uint32_t i, struct pg_fault *fault)
{
    return names_find_namespace(a, namespace_name(a, i)) == i ||
           fault_set(fault, "names", "a namespace that the index does not find", i, i, 0);
}

/* The index finds each name. If it also has exactly as many used cells as there are names, no cell
 * is wrong. */
static bool cells_used(const struct pg_arena *a, uint32_t names, struct pg_fault *fault)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < a->name_cells; i++)
        used += *name_cell(a, i) != 0;
    return used == names || fault_set(fault, "names", "cells of the index", 0, names, used);
}

bool names_check(const struct pg_arena *a, struct pg_fault *fault)
{
    uint32_t names = 0;
    if (!names_sound(a, fault))
        return false;
    if (a->secret == NULL)
        return true;
    for (uint32_t i = 0; i < a->namespace_rows; i++) {
        if (namespace_at(a, i)->name_len != 0 && !namespace_found(a, i, fault))
            return false;
        names += namespace_at(a, i)->name_len != 0;
    }
    for (uint32_t i = 0; i < a->topic_rows; i++) {
        if (topic_at(a, i)->name_len != 0 && !topic_sound(a, i, fault))
            return false;
        names += topic_at(a, i)->name_len != 0;
    }
    return cells_used(a, names, fault);
}

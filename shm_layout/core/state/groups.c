/* groups.c - consumer groups: their rows, topics and budgets.
 *
 * A group counts the pending timers of its topics and its jobs against its budget when a timer is
 * added. All budgets together fit into the table of jobs. So a timer that was added always finds a
 * row when it fires, and a group without members fills only its own budget. */

#include "core/state/groups.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/records.h"

/* ---- topics ---------------------------------------------------------------------------------- */

bool group_has_topic(const struct pg_arena *a, uint32_t group, uint32_t topic)
{
    EACH_LINK_OF_TOPIC(link, a, topic)
        if (link->group == group + 1)
            return true;
    return false;
}

uint32_t group_topics(const struct pg_arena *a, uint32_t group, uint32_t rows[PG_GROUP_TOPICS_MAX])
{
    uint32_t count = 0;
    for (uint32_t topic = 0; topic < a->topic_rows && count < PG_GROUP_TOPICS_MAX; topic++)
        if (group_has_topic(a, group, topic))
            rows[count++] = topic;
    return count;
}

static uint32_t links_free(const struct pg_arena *a)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->group_topic_rows; i++)
        count += group_topic_at(a, i)->group == 0;
    return count;
}

static void link_in(struct pg_arena *a, uint32_t row)
{
    struct pg_group_topic *link = group_topic_at(a, row);
    struct pg_topic *t = topic_at(a, link->topic);
    link->next = t->groups;
    t->groups = row + 1;
}

/* Build the chains of all topics from the rows. */
static void links_rebuild(struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->topic_rows; i++)
        topic_at(a, i)->groups = 0;
    for (uint32_t i = a->group_topic_rows; i-- > 0;)
        if (group_topic_at(a, i)->group != 0)
            link_in(a, i);
}

static void topics_join(struct pg_arena *a, uint32_t group, const uint32_t *topics, uint32_t count)
{
    uint32_t row = 0;
    for (uint32_t i = 0; i < count; i++) {
        while (group_topic_at(a, row)->group != 0)
            row++;
        group_topic_at(a, row)->topic = topics[i];
        STORE_RELEASE(&group_topic_at(a, row)->group, group + 1);
    }
    links_rebuild(a);
}

static void topics_leave(struct pg_arena *a, uint32_t group)
{
    for (uint32_t i = 0; i < a->group_topic_rows; i++)
        if (group_topic_at(a, i)->group == group + 1)
            STORE_RELEASE(&group_topic_at(a, i)->group, 0u);
    links_rebuild(a);
}

/* ---- budgets --------------------------------------------------------------------------------- */

static bool budget_has(const struct pg_group_settings *s, uint64_t jobs, uint64_t bytes)
{
    return jobs <= s->max_jobs && (s->max_bytes == 0 || bytes <= s->max_bytes);
}

bool group_admits(const struct pg_arena *a, uint32_t group, uint32_t jobs, uint64_t granules)
{
    const struct pg_consumer_group *g = group_at(a, group);
    return budget_has(&g->settings, g->jobs + g->pending + jobs,
                      g->bytes + g->pending_bytes + granules * PG_GRANULE);
}

/* Return whether a group may have space after it has dropped all waiting jobs. */
static bool group_may_admit(const struct pg_arena *a, uint32_t group, uint32_t jobs,
                            uint64_t granules)
{
    const struct pg_consumer_group *g = group_at(a, group);
    if ((g->settings.flags & PG_G_DROP_OLDEST) == 0)
        return group_admits(a, group, jobs, granules);
    return budget_has(&g->settings, g->jobs - g->waiting + g->pending + jobs,
                      g->pending_bytes + granules * PG_GRANULE);
}

bool groups_admit(const struct pg_arena *a, uint32_t topic, uint32_t jobs, uint64_t granules,
                  bool after_drops, uint32_t *full)
{
    EACH_LINK_OF_TOPIC(link, a, topic) {
        *full = link->group - 1;
        if (!(after_drops ? group_may_admit : group_admits)(a, *full, jobs, granules))
            return false;
    }
    return true;
}

/* Number of rows of jobs that no budget of another group uses. */
static uint64_t rows_left(const struct pg_arena *a, uint32_t but)
{
    uint64_t left = a->job_slots.capacity;
    for (uint32_t i = 0; i < a->group_rows; i++)
        if (i != but && (group_exists(a, i) || i == a->state.draft.group))
            left -= group_at(a, i)->settings.max_jobs;
    return left;
}

/* ---- settings -------------------------------------------------------------------------------- */

static bool time_outside(int64_t ns, int64_t least_ns)
{
    return ns < least_ns || ns > PG_GROUP_TIME_MAX_NS;
}

/* Return 1 + the offset of a setting that is out of bounds; 0 = all are sound. */
static uint64_t setting_outside(const struct pg_group_settings *s)
{
    const struct {
        bool outside;
        uint64_t offset;
    } settings[] = {
        {s->max_jobs == 0, offsetof(struct pg_group_settings, max_jobs)},
        {s->max_bytes > PG_QUOTA_MAX, offsetof(struct pg_group_settings, max_bytes)},
        {time_outside(s->retention_ns, 0), offsetof(struct pg_group_settings, retention_ns)},
        {time_outside(s->max_lease_ns, 1), offsetof(struct pg_group_settings, max_lease_ns)},
        {time_outside(s->backoff_base_ns, 0), offsetof(struct pg_group_settings, backoff_base_ns)},
        {time_outside(s->backoff_cap_ns, 0), offsetof(struct pg_group_settings, backoff_cap_ns)},
        {s->rate > PG_QUOTA_OPS_MAX, offsetof(struct pg_group_settings, rate)},
        {s->max_attempts - 1 >= PG_ATTEMPTS_MAX, offsetof(struct pg_group_settings, max_attempts)},
        {s->flags >= PG_G_FLAGS || ((s->flags & PG_G_BLOCK) && !(s->flags & PG_G_ORDERED)),
         offsetof(struct pg_group_settings, flags)},
    };
    for (uint32_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (settings[i].outside)
            return settings[i].offset + 1;
    return 0;
}

unsigned group_settings_refused(const struct pg_arena *a, uint32_t group,
                                const struct pg_group_settings *s, uint64_t *detail)
{
    *detail = setting_outside(s);
    if (*detail != 0) {
        --*detail;
        return PG_GR_SETTINGS;
    }
    *detail = rows_left(a, group);
    return s->max_jobs > *detail ? PG_GR_JOBS : 0;
}

/* ---- rows ------------------------------------------------------------------------------------ */

uint32_t group_find(const struct pg_arena *a, uint32_t namespace_row, struct name name)
{
    for (uint32_t i = 0; i < a->group_rows; i++) {
        const struct pg_consumer_group *g = group_at(a, i);
        if (g->name_len == name.len && name.len != 0 && g->namespace_row == namespace_row &&
            memcmp(g->name, name.bytes, name.len) == 0)
            return i;
    }
    return PG_NIL;
}

static uint32_t row_for_new(const struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->group_rows; i++)
        if (group_at(a, i)->name_len == 0)
            return i;
    return PG_NIL;
}

static void derived_reset(struct pg_consumer_group *g)
{
    g->pending = g->pending_bytes = 0;
    g->jobs = g->bytes = g->waiting = g->leased = g->delayed = g->dead = 0;
    g->tokens = (struct pg_tokens){0, 0};
    for (uint32_t i = 0; i <= PG_PRIORITY_MAX; i++)
        g->ready_first[i] = g->ready_last[i] = PG_NIL;
    g->dead_first = g->dead_last = g->oldest = g->newest = PG_NIL;
    g->first_member = g->last_member = PG_NIL;
}

static struct pg_consumer_group fields_of(const struct pg_arena *a, const struct group_wanted *g)
{
    return (struct pg_consumer_group){.namespace_row = g->namespace_row,
                                      .incarnation = a->header->next_incarnation,
                                      .settings = g->settings, .created_uid = a->call.uid,
                                      .created_ns = a->call.moment_ns};
}

/* Write the fields and topics of a row, but not the length of its name, which decides. A rebuild
 * removes topics and jobs of a group without a name. */
static void row_write(struct pg_arena *a, uint32_t row, const struct pg_consumer_group *fields,
                      struct name name, const uint32_t *topics, uint32_t count)
{
    struct pg_consumer_group *g = group_at(a, row);
    struct pg_consumer_group copy = *fields;
    copy.name_len = 0;
    derived_reset(&copy);
    memset(copy.name, 0, sizeof copy.name);
    memcpy(copy.name, name.bytes, name.len);
    *g = copy;
    topics_join(a, row, topics, count);
    for (uint32_t i = 0; i < count; i++) {
        g->pending += topic_at(a, topics[i])->live;
        g->pending_bytes += topic_at(a, topics[i])->bytes;
    }
}

static unsigned creation_refused(const struct pg_arena *a, const struct group_wanted *g,
                                 uint64_t *detail)
{
    uint64_t pending = 0, bytes = 0;
    for (uint32_t i = 0; i < g->topic_count; i++) {
        pending += topic_at(a, g->topics[i])->live;
        bytes += topic_at(a, g->topics[i])->bytes;
    }
    const unsigned why = group_settings_refused(a, PG_NIL, &g->settings, detail);
    if (why != 0)
        return why;
    *detail = pending;
    if (pending > g->settings.max_jobs ||
        (g->settings.max_bytes != 0 && bytes > g->settings.max_bytes))
        return PG_GR_PENDING;
    *detail = a->group_rows;
    return row_for_new(a) == PG_NIL || links_free(a) < g->topic_count ? PG_GR_ROWS : 0;
}

uint32_t group_draft(struct pg_arena *a, const struct group_wanted *g, unsigned *refusal,
                     uint64_t *detail)
{
    *refusal = creation_refused(a, g, detail);
    if (*refusal != 0)
        return PG_NIL;
    const uint32_t row = row_for_new(a);
    const struct pg_consumer_group fields = fields_of(a, g);
    a->header->next_incarnation++;
    row_write(a, row, &fields, g->name, g->topics, g->topic_count);
    a->state.draft = (struct group_draft){.group = row, .name_len = g->name.len};
    return row;
}

void group_commit(struct pg_arena *a)
{
    const struct group_draft *d = &a->state.draft;
    struct pg_consumer_group *g = group_at(a, d->group);
    uint32_t rows[PG_GROUP_TOPICS_MAX];
    const uint32_t count = group_topics(a, d->group, rows);
    if (has_wal(a))
        wal_append_group(a, d->group, g, (struct name){g->name, d->name_len}, rows, count);
    STORE_RELEASE(&g->name_len, d->name_len);
    a->state.draft.group = PG_NIL;
}

unsigned group_differs(const struct pg_arena *a, uint32_t group, const struct group_wanted *g)
{
    uint32_t rows[PG_GROUP_TOPICS_MAX];
    const uint32_t count = group_topics(a, group, rows);
    struct pg_group_settings settings = group_at(a, group)->settings;
    settings.flags &= ~(uint32_t)PG_G_PAUSED;
    return count == g->topic_count && memcmp(rows, g->topics, count * sizeof *rows) == 0 &&
                   memcmp(&settings, &g->settings, sizeof settings) == 0
               ? 0
               : PG_GR_MISMATCH;
}

static struct name name_of(const struct pg_consumer_group *g)
{
    return (struct name){g->name, g->name_len};
}

void group_change(struct pg_arena *a, uint32_t group, const struct pg_group_settings *s)
{
    struct pg_consumer_group *g = group_at(a, group);
    struct pg_consumer_group fields = *g;
    uint32_t rows[PG_GROUP_TOPICS_MAX];
    const uint32_t count = group_topics(a, group, rows);
    fields.settings = *s;
    if (has_wal(a))
        wal_append_group(a, group, &fields, name_of(g), rows, count);
    a->group_change->settings = *s;
    STORE_RELEASE(&a->group_change->group, group + 1);
    atomic_thread_fence(memory_order_release);   /* the settings change after the store above */
    g->settings = *s;
    STORE_RELEASE(&a->group_change->group, 0u);
}

void group_retire(struct pg_arena *a, uint32_t group)
{
    struct pg_consumer_group *g = group_at(a, group);
    if (g->incarnation == 0)
        return;
    if (has_wal(a))
        wal_append_group(a, group, g, name_of(g), NULL, 0);
    STORE_RELEASE(&g->incarnation, 0ull);
    topics_leave(a, group);
    g->pending = g->pending_bytes = 0;
}

void group_free(struct pg_arena *a, uint32_t group)
{
    PG_ASSERT(group_at(a, group)->jobs == 0, "groups", "a group that is freed has no jobs");
    STORE_RELEASE(&group_at(a, group)->name_len, 0u);
}

bool group_restore(struct pg_arena *a, uint32_t row, const struct pg_consumer_group *fields,
                   const uint32_t *topics, uint32_t count)
{
    topics_leave(a, row);
    if (links_free(a) < count)
        return false;
    row_write(a, row, fields, name_of(fields), topics, count);
    group_at(a, row)->name_len = fields->name_len;
    if (fields->incarnation >= a->header->next_incarnation)
        a->header->next_incarnation = fields->incarnation + 1;
    return true;
}

void group_restore_end(struct pg_arena *a, uint32_t row)
{
    topics_leave(a, row);
    group_at(a, row)->name_len = 0;
}

void group_restored(struct pg_arena *a, uint32_t row, int64_t shift_ns)
{
    group_at(a, row)->created_ns += shift_ns;
}

/* ---- rebuild and check ------------------------------------------------------------------------ */

void groups_init(struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->group_rows; i++)
        derived_reset(group_at(a, i));
}

bool group_change_finish(struct pg_arena *a, struct pg_fault *why)
{
    struct pg_group_change *c = a->group_change;
    if (a->group_rows == 0)
        return true;
    if (c->job > a->job_slots.capacity || c->group > a->group_rows)
        return fault_set(why, "groups", "a change of a row that does not exist", c->group,
                         a->job_slots.capacity, c->job);
    if (c->job != 0)
        *job_at(a, c->job - 1) = c->to;
    if (c->group != 0)
        group_at(a, c->group - 1)->settings = c->settings;
    STORE_RELEASE(&c->job, 0u);
    STORE_RELEASE(&c->group, 0u);
    return true;
}

static bool group_sound(const struct pg_arena *a, uint32_t row, struct pg_fault *why)
{
    const struct pg_consumer_group *g = group_at(a, row);
    return (g->name_len <= PG_GROUP_NAME_MAX && g->namespace_row < a->namespace_rows &&
            namespace_at(a, g->namespace_row)->name_len != 0 &&
            setting_outside(&g->settings) == 0) ||
           fault_set(why, "groups", "a group's name, namespace or setting is invalid", row,
                     a->namespace_rows, g->namespace_row);
}

/* Free a row whose group has no name, or is being deleted. */
static void link_rebuild(struct pg_arena *a, uint32_t row)
{
    struct pg_group_topic *link = group_topic_at(a, row);
    if (link->group != 0 &&
        (!group_exists(a, link->group - 1) || group_at(a, link->group - 1)->incarnation == 0))
        STORE_RELEASE(&link->group, 0u);
}

static bool link_sound(const struct pg_arena *a, uint32_t row, struct pg_fault *why)
{
    const struct pg_group_topic *link = group_topic_at(a, row);
    return link->group == 0 ||
           (link->topic < a->topic_rows && topic_at(a, link->topic)->name_len != 0) ||
           fault_set(why, "groups", "a topic that does not exist", row, a->topic_rows, link->topic);
}

bool groups_rebuild(struct pg_arena *a, struct pg_fault *why)
{
    for (uint32_t i = 0; i < a->group_rows; i++) {
        if (group_exists(a, i) && !group_sound(a, i, why))
            return false;
        derived_reset(group_at(a, i));
    }
    for (uint32_t i = 0; i < a->group_topic_rows; i++) {
        link_rebuild(a, i);
        if (!link_sound(a, i, why))
            return false;
    }
    links_rebuild(a);
    return true;
}

bool groups_check(const struct pg_arena *a, struct pg_fault *fault)
{
    uint64_t budgets = 0;
    for (uint32_t i = 0; i < a->group_rows; i++) {
        if (!group_exists(a, i))
            continue;
        if (!group_sound(a, i, fault))
            return false;
        budgets += group_at(a, i)->settings.max_jobs;
        const struct pg_consumer_group *g = group_at(a, i);
        if (g->jobs + g->pending > g->settings.max_jobs)
            return fault_set(fault, "groups", "jobs and timers of a group exceed its budget", i,
                             g->settings.max_jobs, g->jobs + g->pending);
    }
    return budgets <= a->job_slots.capacity ||
           fault_set(fault, "groups", "the budgets exceed the rows of jobs", 0,
                     a->job_slots.capacity, budgets);
}

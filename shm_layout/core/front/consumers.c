/* consumers.c - the messages of consumer groups: GROUP, DEAD and JOBS. */

#include "core/front/consumers.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/delivery.h"
#include "core/state/groups.h"
#include "core/state/jobs.h"
#include "core/state/members.h"
#include "core/state/names.h"
#include "core/state/quotas.h"
#include "core/state/schedule_rows.h"

/* ---- GROUP: reading -------------------------------------------------------------------------- */

struct group_request {
    struct pg_group_ask ask;
    struct name namespace_name, name;
    const uint8_t *topics, *end;
};

static bool group_ask_read(const struct request *q, struct group_request *g, struct refusal *why)
{
    const uint8_t *at = q->bytes + sizeof q->frame;
    const uint64_t bytes = q->len - sizeof q->frame;
    if (bytes < sizeof g->ask)
        return refused(why, PG_ERR_MALFORMED, bytes, sizeof g->ask);
    memcpy(&g->ask, at, sizeof g->ask);
    const uint64_t fixed = sizeof g->ask + g->ask.namespace_len + g->ask.name_len;
    if (g->ask.action >= PG_GROUP_ACTIONS || g->ask.namespace_len > PG_NAMESPACE_MAX ||
        g->ask.name_len > PG_GROUP_NAME_MAX || g->ask.topics > PG_GROUP_TOPICS_MAX ||
        g->ask.earliest > 1 || bytes < fixed)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_group_ask, action), g->ask.action);
    g->namespace_name = (struct name){(const char *)at + sizeof g->ask, g->ask.namespace_len};
    g->name = (struct name){g->namespace_name.bytes + g->ask.namespace_len, g->ask.name_len};
    g->topics = (const uint8_t *)g->name.bytes + g->ask.name_len;
    g->end = at + bytes;
    return (name_sound(g->namespace_name) && name_sound(g->name) &&
            (g->ask.action == PG_GA_DESCRIBE ||
             (g->ask.namespace_len != 0 && g->ask.name_len != 0))) ||
           refused(why, PG_ERR_MALFORMED, sizeof g->ask, g->ask.name_len);
}

/* Check the names of the topics, which end the message. */
static bool topics_sound(const struct group_request *g, struct refusal *why)
{
    const uint8_t *at = g->topics;
    for (uint32_t i = 0; i < g->ask.topics; i++) {
        if (at == g->end || g->end - at < 1 + at[0] || at[0] > PG_TOPIC_MAX ||
            !name_sound((struct name){(const char *)at + 1, at[0]}))
            return refused(why, PG_ERR_MALFORMED, (uint64_t)(at - g->topics), i);
        at += 1 + at[0];
    }
    return (at == g->end && (g->ask.action == PG_GA_CREATE) == (g->ask.topics != 0)) ||
           refused(why, PG_ERR_MALFORMED, (uint64_t)(at - g->topics), g->ask.topics);
}

/* ---- GROUP: actions -------------------------------------------------------------------------- */

static bool group_refused(struct refusal *why, unsigned reason, uint64_t detail)
{
    return refused(why, PG_ERR_GROUP, reason, detail);
}

static bool topic_refused(struct pg_arena *a, const struct pg_result *r, struct refusal *why)
{
    const unsigned status = r->ticket & 0xff;
    pg_refused(a, status);
    return status == PG_ST_QUOTA ? refused(why, PG_ERR_QUOTA, r->ticket >> 8, (uint64_t)r->deadline_ns)
                                 : refused(why, PG_ERR_BUSY, status, 0);
}

/* Insert a row into the ascending list; a repeated topic counts once. */
static void topic_insert(struct group_wanted *w, uint32_t row)
{
    uint32_t i = w->topic_count;
    for (uint32_t k = 0; k < w->topic_count; k++)
        if (w->topics[k] == row)
            return;
    for (; i > 0 && w->topics[i - 1] > row; i--)
        w->topics[i] = w->topics[i - 1];
    w->topics[i] = row;
    w->topic_count++;
}

/* Find or create the topics of a new group. Each keeps its row until all are found. */
static bool topics_find(struct pg_arena *a, const struct group_request *g, struct group_wanted *w,
                        struct refusal *why)
{
    const uint8_t *at = g->topics;
    struct pg_result lacking = {0, 0};
    for (uint32_t i = 0; i < g->ask.topics; i++, at += 1 + at[0]) {
        const struct name topic = {(const char *)at + 1, at[0]};
        const uint32_t row = names_topic(a, g->namespace_name, topic, &lacking);
        if (row == PG_NIL)
            return topic_refused(a, &lacking, why);
        topic_insert(w, row);
        names_hold(a, row);
    }
    w->namespace_row = names_find_namespace(a, g->namespace_name);
    return true;
}

static void topics_release(struct pg_arena *a, const struct group_wanted *w)
{
    for (uint32_t i = 0; i < w->topic_count; i++)
        names_release(a, w->topics[i]);
}

#define BIRTHS_PER_STEP 1024      /* about 0.5 ms */
#define VISITS_PER_STEP 16384
/* A draft leaves half of the WAL buffer to messages and due timers, in percent. */
#define WAL_SHARE 50
#define WAIT_NS 1000000           /* time between two looks at the WAL buffer */

/* Let the draft take a notice. A notice that does not fit into the budget, and all later ones, count
 * as dropped jobs. Return whether a job began. */
static bool draft_takes(struct pg_arena *a, struct group_draft *d)
{
    const struct pg_entry *e = replay_at(a, d->position);
    if (e->commit != d->position + 1 || !group_has_topic(a, d->group, e->topic))
        return false;
    d->full |= !group_admits(a, d->group, 1, entry_granules(e));
    if (!d->full) {
        job_born_of_entry(a, d->group, d->position);
        return true;
    }
    group_at(a, d->group)->dropped++;
    a->metrics->jobs_born++;
    a->metrics->jobs_dropped++;
    return false;
}

bool consumers_draft_step(struct pg_arena *a)
{
    struct group_draft *d = &a->state.draft;
    uint32_t births = 0;
    if (LIKELY(d->group == PG_NIL))
        return false;
    if (d->position < a->header->replay_head)
        d->position = a->header->replay_head;
    for (uint32_t n = 0; n < VISITS_PER_STEP && births < BIRTHS_PER_STEP; n++) {
        d->waits = has_wal(a) && wal_buffer_over(a, WAL_SHARE);
        if (d->waits || d->position == a->header->replay_tail)
            break;
        births += draft_takes(a, d);
        d->position++;
    }
    if (!d->waits && d->position == a->header->replay_tail)
        group_commit(a);
    return d->group != PG_NIL && !d->waits;
}

int64_t consumers_draft_next_ns(const struct pg_arena *a)
{
    const struct group_draft *d = &a->state.draft;
    const bool waits = d->waits && a->header->clock_kind == PG_CLOCK_BOOT;
    return d->group == PG_NIL ? INT64_MAX : a->state.now_ns + (waits ? WAIT_NS : 0);
}

static bool group_create_wanted(struct pg_arena *a, const struct group_request *g,
                                struct group_wanted *w, struct refusal *why)
{
    unsigned reason;
    uint64_t detail;
    const uint32_t found = group_find(a, w->namespace_row, g->name);
    if (found != PG_NIL) {
        if (group_at(a, found)->incarnation == 0)
            return refused(why, PG_ERR_BUSY, PG_ST_BUSY, 0);
        return group_differs(a, found, w) == 0 || group_refused(why, PG_GR_MISMATCH, found);
    }
    const uint32_t group = group_draft(a, w, &reason, &detail);
    if (group == PG_NIL)
        return group_refused(why, reason, detail);
    a->state.draft.position = g->ask.earliest ? a->header->replay_head : a->header->replay_tail;
    consumers_draft_step(a);
    return true;
}

/* *again: a group, this one or another, is a draft. */
static bool create(struct pg_arena *a, const struct group_request *g, bool *again,
                   struct refusal *why)
{
    struct group_wanted w = {.name = g->name, .settings = g->ask.settings};
    if (names_elsewhere(a, g->namespace_name))
        return refused(why, PG_ERR_WRONG_SHARD, a->header->shard, a->header->shards);
    consumers_draft_step(a);
    *again = a->state.draft.group != PG_NIL;
    if (*again)
        return true;
    const bool found = topics_find(a, g, &w, why);
    topics_release(a, &w);        /* a held topic counts as one with a pending timer */
    if (!found || !group_create_wanted(a, g, &w, why))
        return false;
    *again = a->state.draft.group != PG_NIL;
    return true;
}

#define DROPS_PER_CALL 1024

/* Drop jobs of a group that is being deleted, and free its row at the end. Return whether it is
 * free. */
static bool group_empty(struct pg_arena *a, uint32_t group)
{
    uint32_t left = DROPS_PER_CALL;
    for (uint32_t row = 0; row < a->job_slots.capacity && group_at(a, group)->jobs != 0; row++) {
        if (job_state(job_at(a, row)) == PG_JOB_FREE || job_at(a, row)->group != group)
            continue;
        if (left-- == 0 || wal_buffer_full(a))
            return false;
        job_drop(a, row);
    }
    group_free(a, group);
    return true;
}

static bool change(struct pg_arena *a, const struct group_request *g, uint32_t group,
                   struct refusal *why)
{
    struct pg_group_settings s = group_at(a, group)->settings;
    uint64_t detail;
    if (g->ask.action == PG_GA_CHANGE) {
        const uint32_t fixed = PG_G_PAUSED | PG_G_ORDERED, flags = s.flags & fixed;
        s = g->ask.settings;
        s.flags = (s.flags & ~fixed) | flags;
    } else {
        s.flags &= ~(uint32_t)PG_G_PAUSED;
        s.flags |= g->ask.action == PG_GA_PAUSE ? PG_G_PAUSED : 0;
    }
    const unsigned reason = group_settings_refused(a, group, &s, &detail);
    if (reason != 0)
        return group_refused(why, reason, detail);
    if (s.max_jobs < group_at(a, group)->jobs + group_at(a, group)->pending)
        return group_refused(why, PG_GR_PENDING,
                             group_at(a, group)->jobs + group_at(a, group)->pending);
    const struct pg_group_settings before = group_at(a, group)->settings;
    group_change(a, group, &s);
    if (s.retention_ns != before.retention_ns)
        jobs_place_again(a, group);
    if ((s.flags ^ before.flags) & PG_G_BLOCK)
        jobs_order_dead(a, group);
    jobs_drop_dead(a, group, DROPS_PER_CALL);
    a->state.jobs_wait = true;
    return true;
}

static bool group_allowed(const struct pg_arena *a, const struct request *q, uint32_t namespace_row,
                          struct refusal *why)
{
    return access_of(a, namespace_row, q->uid) != ACCESS_DENIED ||
           refused(why, PG_ERR_DENIED, q->uid, 0);
}

/* ---- GROUP: replies -------------------------------------------------------------------------- */

static void group_info_write(const struct pg_arena *a, uint32_t group, struct sink *out)
{
    const struct pg_consumer_group *g = group_at(a, group);
    const struct name ns = namespace_name(a, g->namespace_row);
    uint32_t topics[PG_GROUP_TOPICS_MAX];
    const uint32_t count = group_topics(a, group, topics);
    const int64_t oldest_ns = g->oldest == PG_NIL ? INT64_MAX : job_at(a, g->oldest)->fired_ns;
    const struct pg_group_info info = {
        .settings = g->settings, .pending = g->pending, .waiting = g->waiting, .leased = g->leased,
        .delayed = g->delayed, .dead = g->dead, .bytes = g->bytes, .acked = g->acked,
        .retried = g->retried, .dropped = g->dropped, .oldest_ns = oldest_ns,
        .created_ns = g->created_ns, .row = group, .members = group_members(a, group),
        .topics = count, .namespace_len = (uint8_t)ns.len, .name_len = (uint8_t)g->name_len};
    sink_put(out, &info, sizeof info);
    sink_put(out, ns.bytes, ns.len);
    sink_put(out, g->name, g->name_len);
    for (uint32_t i = 0; i < count; i++) {
        const struct name topic = topic_name(a, topics[i]);
        const uint8_t len = (uint8_t)topic.len;
        sink_put(out, &len, 1);
        sink_put(out, topic.bytes, topic.len);
    }
}

/* Return whether a DESCRIBE reports the group. */
static bool group_chosen(const struct pg_arena *a, const struct request *q,
                         const struct group_request *g, uint32_t namespace_row, uint32_t group)
{
    const struct pg_consumer_group *found = group_at(a, group);
    if (!group_exists(a, group) || found->incarnation == 0 ||
        access_of(a, found->namespace_row, q->uid) == ACCESS_DENIED)
        return false;
    if (g->ask.namespace_len != 0 && found->namespace_row != namespace_row)
        return false;
    return g->ask.name_len == 0 || (found->name_len == g->name.len &&
                                    memcmp(found->name, g->name.bytes, g->name.len) == 0);
}

static uint32_t groups_describe(const struct pg_arena *a, const struct request *q,
                                const struct group_request *g, struct sink *out)
{
    const uint32_t namespace_row = names_find_namespace(a, g->namespace_name);
    uint32_t count = 0;
    for (uint32_t group = 0; group < a->group_rows; group++) {
        if (!group_chosen(a, q, g, namespace_row, group))
            continue;
        group_info_write(a, group, out);
        count++;
    }
    return count;
}

/* Apply an action other than CREATE and DESCRIBE. *gone: the group is deleted. Return false if the
 * message is refused; *again: it has to be handled again. */
static bool group_act(struct pg_arena *a, const struct request *q, const struct group_request *g,
                      bool *again, struct refusal *why)
{
    const uint32_t namespace_row = names_find_namespace(a, g->namespace_name);
    const uint32_t group =
        namespace_row == PG_NIL ? PG_NIL : group_find(a, namespace_row, g->name);
    if (!group_allowed(a, q, namespace_row, why))
        return false;
    if (group == PG_NIL || (group_at(a, group)->incarnation == 0 && g->ask.action != PG_GA_DELETE))
        return group_refused(why, PG_GR_MISSING, 0);
    if (g->ask.action != PG_GA_DELETE)
        return change(a, g, group, why);
    *again = group_at(a, group)->incarnation != 0 && !schedules_group_ending(a);
    if (*again)
        return true;
    group_retire(a, group);
    members_forget_group(a, group);
    *again = !group_empty(a, group);
    return true;
}

bool consumers_group(struct pg_arena *a, const struct request *q, struct sink *out, uint32_t *count,
                     bool *again, struct refusal *why)
{
    struct group_request g;
    *again = false;
    *count = 0;
    if (!group_ask_read(q, &g, why) || !topics_sound(&g, why))
        return false;
    if (wal_buffer_refusal(a) != PG_ST_NONE && g.ask.action != PG_GA_DESCRIBE)
        return refused(why, PG_ERR_BUSY, wal_buffer_refusal(a), 0);
    if (g.ask.action == PG_GA_CREATE &&
        (!group_allowed(a, q, names_find_namespace(a, g.namespace_name), why) ||
         !create(a, &g, again, why)))
        return false;
    if (g.ask.action != PG_GA_CREATE && g.ask.action != PG_GA_DESCRIBE &&
        !group_act(a, q, &g, again, why))
        return false;
    if (g.ask.action != PG_GA_DELETE && !*again)
        *count = groups_describe(a, q, &g, out);
    return !out->full || refused(why, PG_ERR_TOO_LARGE, PG_MESSAGE_MAX, *count);
}

/* ---- DEAD ------------------------------------------------------------------------------------ */

#define DEAD_PER_MESSAGE 256

static bool dead_ask_read(const struct request *q, struct pg_dead_ask *ask, struct name *ns,
                          struct name *name, struct refusal *why)
{
    const uint8_t *at = q->bytes + sizeof q->frame;
    const uint64_t bytes = q->len - sizeof q->frame;
    if (bytes < sizeof *ask)
        return refused(why, PG_ERR_MALFORMED, bytes, sizeof *ask);
    memcpy(ask, at, sizeof *ask);
    *ns = (struct name){(const char *)at + sizeof *ask, ask->namespace_len};
    *name = (struct name){ns->bytes + ask->namespace_len, ask->name_len};
    return (bytes == sizeof *ask + ask->namespace_len + ask->name_len &&
            ask->action < PG_DEAD_ACTIONS && ask->namespace_len != 0 &&
            ask->namespace_len <= PG_NAMESPACE_MAX && ask->name_len != 0 &&
            ask->name_len <= PG_GROUP_NAME_MAX && name_sound(*ns) && name_sound(*name)) ||
           refused(why, PG_ERR_MALFORMED, offsetof(struct pg_dead_ask, action), ask->action);
}

static void dead_head_write(const struct pg_arena *a, uint32_t row, struct pg_dead_info *to)
{
    const struct pg_job *j = job_at(a, row);
    *to = (struct pg_dead_info){
        .ticket = j->ticket, .deadline_ns = j->deadline_ns, .fired_ns = j->fired_ns,
        .first_failed_ns = j->first_failed_ns, .last_failed_ns = j->last_failed_ns,
        .wall_offset_ns = a->header->wall_offset_ns, .attempts = job_failures(j),
        .reason = job_reason(j), .payload_len = j->payload_len, .error_len = job_error_len(j),
        .key_len = j->key_len, .key_type = j->meta & 7, .flags = j->meta >> 4,
        .topic_len = (uint8_t)topic_name(a, j->topic).len, .priority = j->priority};
}

static uint64_t job_bytes(const struct pg_arena *a, const struct pg_job *j)
{
    return topic_name(a, j->topic).len + (uint64_t)j->key_len + j->payload_len;
}

static void job_bytes_write(const struct pg_arena *a, const struct pg_job *j, struct sink *out)
{
    const struct name topic = topic_name(a, j->topic);
    sink_put(out, topic.bytes, topic.len);
    sink_put(out, blob_at(&a->blobs, j->blob), (uint64_t)j->key_len + j->payload_len);
}

/* List dead letters from the one after `after` on. Return the ticket of the last one if more are
 * left, else 0. */
static uint64_t dead_list(const struct pg_arena *a, uint32_t group, const struct pg_dead_ask *ask,
                          struct sink *out, uint32_t *count)
{
    uint32_t rows[DEAD_PER_MESSAGE], row = group_at(a, group)->dead_first;
    const uint32_t most = ask->most < DEAD_PER_MESSAGE ? ask->most : DEAD_PER_MESSAGE;
    uint64_t used = sizeof(struct pg_frame);
    while (ask->after != 0 && row != PG_NIL && job_at(a, row)->ticket >> 8 != ask->after)
        row = job_at(a, row)->next;
    if (ask->after != 0 && row != PG_NIL)
        row = job_at(a, row)->next;
    for (*count = 0; row != PG_NIL && *count < most; row = job_at(a, row)->next) {
        const struct pg_job *j = job_at(a, row);
        used += sizeof(struct pg_dead_info) + job_bytes(a, j) + job_error_len(j);
        if (used > out->size)
            break;
        rows[(*count)++] = row;
    }
    struct pg_dead_info *heads = sink_take(out, *count * sizeof *heads);
    for (uint32_t i = 0; i < *count; i++) {
        dead_head_write(a, rows[i], &heads[i]);
        job_bytes_write(a, job_at(a, rows[i]), out);
        if (job_error_len(job_at(a, rows[i])) != 0)
            sink_put(out, job_error(a, job_at(a, rows[i])), job_error_len(job_at(a, rows[i])));
    }
    return row == PG_NIL || *count == 0 ? 0 : job_at(a, rows[*count - 1])->ticket >> 8;
}

/* Requeue or drop dead letters. Return how many; the caller repeats the request until it is 0. */
static uint64_t dead_change(struct pg_arena *a, uint32_t group, const struct pg_dead_ask *ask)
{
    uint64_t done = 0;
    uint32_t next = group_at(a, group)->dead_first;
    while (next != PG_NIL && done < DROPS_PER_CALL && !wal_buffer_full(a)) {
        const uint32_t row = next;
        next = job_at(a, row)->next;
        if (ask->ticket != 0 && job_at(a, row)->ticket >> 8 != ask->ticket)
            continue;
        if (ask->action == PG_DA_REQUEUE)
            job_requeue(a, row);
        else
            job_drop(a, row);
        done++;
    }
    return done;
}

bool consumers_dead(struct pg_arena *a, const struct request *q, struct sink *out, uint32_t *count,
                    uint64_t detail[2], struct refusal *why)
{
    struct pg_dead_ask ask;
    struct name ns, name;
    *count = 0;
    detail[0] = detail[1] = 0;
    if (!dead_ask_read(q, &ask, &ns, &name, why))
        return false;
    const uint32_t namespace_row = names_find_namespace(a, ns);
    const uint32_t group = namespace_row == PG_NIL ? PG_NIL : group_find(a, namespace_row, name);
    if (!group_allowed(a, q, namespace_row, why))
        return false;
    if (group == PG_NIL || group_at(a, group)->incarnation == 0)
        return group_refused(why, PG_GR_MISSING, 0);
    if (ask.action == PG_DA_LIST)
        detail[1] = dead_list(a, group, &ask, out, count);
    else
        detail[0] = dead_change(a, group, &ask);
    return true;
}

/* ---- JOBS ------------------------------------------------------------------------------------ */

#define JOBS_PER_MESSAGE 512

static void job_head_write(const struct pg_arena *a, uint32_t row, struct pg_job_info *to)
{
    const struct pg_job *j = job_at(a, row);
    *to = (struct pg_job_info){
        .ticket = j->ticket, .deadline_ns = j->deadline_ns, .fired_ns = j->fired_ns,
        .lease_ends_ns = j->due_ns, .now_ns = a->state.now_ns,
        .wall_offset_ns = a->header->wall_offset_ns, .row = row, .lease = job_leases(j),
        .attempt = job_failures(j) + 1, .group = j->group, .payload_len = j->payload_len,
        .key_len = j->key_len, .key_type = j->meta & 7, .flags = j->meta >> 4,
        .topic_len = (uint8_t)topic_name(a, j->topic).len, .priority = j->priority,
        .missed = j->missed};
}

static struct pg_frame jobs_frame(uint64_t session, uint32_t count)
{
    return (struct pg_frame){.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                             .message = PG_M_JOBS, .session = session, .count = count};
}

/* Write a message without jobs, which lets a former member of a deleted group join again. */
static void eviction_write(struct pg_arena *a, struct pg_session *s, struct sink *out)
{
    const struct pg_frame f = jobs_frame(s->id, 0);
    s->evicted = 0;
    a->call.sent_session = s->id;
    sink_put(out, &f, sizeof f);
}

/* Write unsent jobs of a member. */
static void member_write(struct pg_arena *a, uint32_t member, struct sink *out)
{
    uint32_t rows[JOBS_PER_MESSAGE], count = 0;
    uint64_t used = sizeof(struct pg_frame);
    struct pg_member *m = member_at(a, member);
    a->call.sent_member = member;
    a->call.sent_session = m->session;
    a->call.sent_job = m->unsent;
    for (uint32_t row = m->unsent; row != PG_NIL && count < JOBS_PER_MESSAGE;
         row = job_at(a, row)->next) {
        used += sizeof(struct pg_job_info) + job_bytes(a, job_at(a, row));
        if (used > out->size)
            break;
        rows[count++] = row;
    }
    const struct pg_frame f = jobs_frame(m->session, count);
    sink_put(out, &f, sizeof f);
    struct pg_job_info *heads = sink_take(out, count * sizeof *heads);
    for (uint32_t i = 0; i < count; i++) {
        job_head_write(a, rows[i], &heads[i]);
        job_bytes_write(a, job_at(a, rows[i]), out);
    }
    m->unsent = count == 0 ? PG_NIL : job_at(a, rows[count - 1])->next;
}

uint64_t pg_jobs(struct pg_arena *a, uint64_t *session, void *bytes, uint64_t size)
{
    struct sink out = {bytes, 0, size, false};
    struct pg_session *evicted = session_evicted(a);
    const uint32_t member = evicted != NULL ? PG_NIL : member_unsent(a);
    a->call.sent_member = PG_NIL;
    a->call.sent_session = 0;
    if (evicted != NULL)
        eviction_write(a, evicted, &out);
    else if (member != PG_NIL)
        member_write(a, member, &out);
    else
        a->state.jobs_unsent = false;
    *session = a->call.sent_session;
    return out.used;
}

static bool eviction_again(struct pg_arena *a)
{
    struct pg_session *s =
        a->call.sent_session == 0 ? NULL : session_find(a, a->call.sent_session);
    if (s == NULL)
        return false;
    session_evict(a, s);
    return true;
}

bool consumers_jobs_again(struct pg_arena *a)
{
    if (a->call.sent_member == PG_NIL)
        return eviction_again(a);
    if (member_at(a, a->call.sent_member)->session == 0)
        return false;
    member_at(a, a->call.sent_member)->unsent = a->call.sent_job;
    a->state.jobs_unsent = true;
    return true;
}

void pg_jobs_untaken(struct pg_arena *a)
{
    if (consumers_jobs_again(a))
        a->state.jobs_unsent = false;
}

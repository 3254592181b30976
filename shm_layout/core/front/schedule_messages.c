/* schedule_messages.c - handles the SCHEDULE message. */

#include "core/base/answer.h"
#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/fired_spans.h"
#include "core/state/names.h"
#include "core/state/quotas.h"
#include "core/state/rows.h"
#include "core/state/schedule_rows.h"
#include "core/state/schedules.h"
#include "core/state/timers.h"
#include "core/front/request.h"

#define EVERY_MIN_NS 1000000      /* shortest time between the occurrences of a schedule */
#define ARMS_PER_MESSAGE 128      /* maximum number of occurrences that one BACKFILL arms */
#define ARMED_AT_ONCE 64          /* maximum number of waiting occurrences that a message arms */
#define REPLY_BYTES_MAX 1048576   /* a reply to LIST gets no further schedule above this */
#define ANSWER_VALID_NS 60000000000 /* an answer for the current time is used for this long */

/* A message while it is handled. */
struct ask {
    struct pg_schedule_ask head;
    struct name namespace_name, topic_name, key, spec, zone, tag;
    const uint8_t *bytes;         /* key, spec, zone, tag and payload */
    uint32_t namespace_row;       /* PG_NIL = the namespace does not exist */
    uint32_t row;                 /* row of the schedule; PG_NIL = it does not exist */
    uint32_t uid;
    bool limited;                 /* quotas apply */
    struct sink *out;
    struct refusal *why;
    uint32_t *count;              /* number of items in the reply */
};

/* ---- reading ------------------------------------------------------------------------------ */

/* The fields that an action uses. Fields that it does not use have to be 0. */
enum { SETTINGS = 1, TEMPLATE = 2, KEY = 4, COUNT = 8, FROM = 16, UNTIL = 32, REPEAT = 64 };
static const uint8_t uses[PG_SCHEDULE_ACTIONS] = {
    [PG_SA_PUT] = SETTINGS | TEMPLATE | KEY | COUNT | UNTIL, [PG_SA_GET] = KEY, [PG_SA_LIST] = FROM,
    [PG_SA_DELETE] = KEY, [PG_SA_PAUSE] = KEY, [PG_SA_RESUME] = KEY,
    [PG_SA_TRIGGER] = KEY | FROM, [PG_SA_BACKFILL] = KEY | FROM | UNTIL | REPEAT,
    [PG_SA_NEXT] = SETTINGS | KEY | COUNT | FROM | UNTIL,
};

static bool fields_sound(const struct pg_schedule_ask *h)
{
    const unsigned in_use = uses[h->action];
    return (in_use & SETTINGS || (h->spec_len == 0 && h->zone_len == 0 && h->every_ns == 0)) &&
           (in_use & TEMPLATE || (h->topic_len == 0 && h->payload_len == 0 && h->jitter_ns == 0 &&
                                  h->overlap == 0 && h->tag_len == 0 && h->has_priority == 0)) &&
           (in_use & COUNT || h->count == 0) && (in_use & FROM || h->from == 0) &&
           (in_use & UNTIL || h->until == 0) && (in_use & REPEAT || h->repeat == 0) &&
           h->repeat <= 1 &&
           (in_use & KEY ? h->key_len != 0 || h->action == PG_SA_NEXT : h->key_len == 0) &&
           h->key_len <= PG_SCHEDULE_KEY_MAX && h->tag_len <= PG_TAG_MAX &&
           h->has_priority <= 1 && h->priority <= h->has_priority * PG_PRIORITY_MAX;
}

/* A NEXT with a key names a schedule, and has no settings. */
static bool settings_sound(const struct pg_schedule_ask *h)
{
    if (h->action == PG_SA_NEXT && (h->count == 0 || h->count > PG_NOMINAL_MAX))
        return false;
    if (h->action == PG_SA_NEXT && h->key_len != 0)
        return h->spec_len == 0 && h->zone_len == 0 && h->every_ns == 0;
    if ((uses[h->action] & SETTINGS) == 0)
        return true;
    return (h->every_ns == 0 ? h->spec_len != 0
                             : h->every_ns >= EVERY_MIN_NS && h->spec_len + h->zone_len == 0) &&
           h->jitter_ns >= 0 && h->zone_len <= PG_ZONE_MAX && h->overlap < PG_OVERLAPS &&
           (h->overlap != PG_OVERLAP_DELAY || h->every_ns != 0);
}

static bool head_sound(const struct pg_schedule_ask *h, uint64_t bytes, struct refusal *why)
{
    const uint64_t whole = sizeof *h + h->namespace_len + h->topic_len + h->key_len + h->spec_len +
                           h->zone_len + h->tag_len + (uint64_t)h->payload_len;
    if (h->action >= PG_SCHEDULE_ACTIONS)
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_schedule_ask, action), h->action);
    if (h->payload_len > PG_PAYLOAD_MAX)
        return refused(why, PG_ERR_TOO_LARGE, PG_PAYLOAD_MAX, h->payload_len);
    if (h->namespace_len == 0 || h->namespace_len > PG_NAMESPACE_MAX ||
        h->topic_len > PG_TOPIC_MAX || !fields_sound(h) || !settings_sound(h))
        return refused(why, PG_ERR_MALFORMED, 0, h->action);
    return bytes == whole || refused(why, PG_ERR_MALFORMED, bytes, whole);
}

static struct name name_take(const uint8_t **at, uint32_t len)
{
    const struct name name = {(const char *)*at, len};
    *at += len;
    return name;
}

static bool ask_read(const struct request *q, struct ask *k)
{
    const uint8_t *at = q->bytes + sizeof q->frame;
    const uint64_t bytes = q->len - sizeof q->frame;
    struct pg_schedule_ask *h = &k->head;
    if (bytes < sizeof *h)
        return refused(k->why, PG_ERR_MALFORMED, bytes, sizeof *h);
    memcpy(h, at, sizeof *h);
    if (!head_sound(h, bytes, k->why))
        return false;
    at += sizeof *h;
    k->namespace_name = name_take(&at, h->namespace_len);
    k->topic_name = name_take(&at, h->topic_len);
    k->bytes = at;
    k->key = name_take(&at, h->key_len);
    k->spec = name_take(&at, h->spec_len);
    k->zone = name_take(&at, h->zone_len);
    k->tag = name_take(&at, h->tag_len);
    return (name_sound(k->namespace_name) && name_sound(k->topic_name) && name_sound(k->key) &&
            name_sound(k->spec) && name_sound(k->zone) && name_sound(k->tag)) ||
           refused(k->why, PG_ERR_MALFORMED, sizeof *h, h->action);
}

/* Return whether the action may arm a timer. */
static bool arms(const struct ask *k)
{
    return k->head.action == PG_SA_PUT || k->head.action == PG_SA_RESUME ||
           k->head.action == PG_SA_TRIGGER || k->head.action == PG_SA_BACKFILL;
}

static bool changes(const struct ask *k)
{
    return arms(k) || k->head.action == PG_SA_DELETE || k->head.action == PG_SA_PAUSE;
}

static bool refuse(struct pg_arena *a, const struct ask *k, unsigned status)
{
    pg_refused(a, status);
    switch (status) {
    case PG_ST_DENIED: return refused(k->why, PG_ERR_DENIED, k->uid, 0);
    case PG_ST_BUSY:
    case PG_ST_WAL: return refused(k->why, PG_ERR_BUSY, status, 0);
    case PG_ST_STOPPING: return refused(k->why, PG_ERR_STOPPING, 0, 0);
    default:
        return refused(k->why, PG_ERR_SCHEDULE, status,
                       status == PG_ST_FULL_SCHEDULES ? a->schedule_rows : 0);
    }
}

/* Refuse the message with the answer that a record would get. */
static bool refuse_as(struct pg_arena *a, const struct ask *k, const struct pg_result *r)
{
    const unsigned status = r->ticket & 0xff;
    if (status != PG_ST_QUOTA)
        return refuse(a, k, status);
    pg_refused(a, status);
    return refused(k->why, PG_ERR_QUOTA, r->ticket >> 8, (uint64_t)r->deadline_ns);
}

/* Find the namespace and the schedule, and check that the sender may do this. */
static bool ask_allowed(struct pg_arena *a, struct ask *k)
{
    if (names_elsewhere(a, k->namespace_name))
        return refused(k->why, PG_ERR_WRONG_SHARD, a->header->shard, a->header->shards);
    k->namespace_row = names_find_namespace(a, k->namespace_name);
    const unsigned access = access_of(a, k->namespace_row, k->uid);
    k->limited = access == ACCESS_QUOTA;
    if (access == ACCESS_DENIED || name_reserved(k->namespace_name) || name_reserved(k->topic_name))
        return refuse(a, k, PG_ST_DENIED);
    if (arms(k) && (a->state.draining || a->state.nameless))
        return refuse(a, k, a->state.draining ? PG_ST_STOPPING : PG_ST_ARENA);
    if (changes(k) && wal_buffer_refusal(a) != PG_ST_NONE)
        return refuse(a, k, wal_buffer_refusal(a));
    k->row = schedule_find(a, k->namespace_row, k->key);
    return true;
}

/* ---- nominal times ------------------------------------------------------------------------- */

static bool is_answer(const struct calendar *c, const struct pg_question *q, int64_t oldest_ns)
{
    const struct pg_question *asked = &c->question;
    return c->state == CALENDAR_ANSWERED && asked->spec_len == q->spec_len &&
           asked->zone_len == q->zone_len && asked->count == q->count &&
           asked->until_ns == q->until_ns &&
           asked->after_ns >= oldest_ns && asked->after_ns <= q->after_ns &&
           memcmp(c->texts, q->spec, q->spec_len) == 0 &&
           memcmp(c->texts + q->spec_len, q->zone, q->zone_len) == 0;
}

/* Return the first `count` times of a cron expression after `after_ns`; NULL = the daemon has to
 * answer first. An answer for an earlier time will do, but not for one before `oldest_ns`. */
static const struct calendar *times_of(struct pg_arena *a, struct name spec, struct name zone,
                                       int64_t after_ns, int64_t until_ns, uint32_t count,
                                       int64_t oldest_ns)
{
    struct calendar *c = &a->state.calendar;
    struct pg_question q = {.spec = (const uint8_t *)spec.bytes,
                            .zone = (const uint8_t *)zone.bytes, .spec_len = spec.len,
                            .zone_len = zone.len, .count = count, .row = PG_NIL,
                            .after_ns = after_ns, .until_ns = until_ns};
    if (is_answer(c, &q, oldest_ns)) {
        c->state = CALENDAR_IDLE;
        return c;
    }
    memcpy(c->texts, spec.bytes, spec.len);
    memcpy(c->texts + spec.len, zone.bytes, zone.len);
    q.spec = c->texts;
    q.zone = c->texts + spec.len;
    c->question = q;
    c->state = CALENDAR_ASKED;
    return NULL;
}

/* Return the times at which a cron schedule begins. An answer from before its newest occurrence would
 * repeat it. */
static const struct calendar *begin_of(struct pg_arena *a, uint32_t row, struct name spec,
                                       struct name zone, int64_t until_ns)
{
    const int64_t begin_ns = schedule_begin_ns(a, row), fired_ns = schedule_fired_ns(a, row);
    const int64_t valid_ns = begin_ns - ANSWER_VALID_NS;
    return times_of(a, spec, zone, begin_ns, until_ns, 2, fired_ns > valid_ns ? fired_ns : valid_ns);
}

static int64_t time_at(const struct calendar *c, uint32_t n)
{
    return n < c->count ? c->times[n] : PG_NOMINAL_NONE;
}

static struct name spec_of(const struct pg_arena *a, const struct pg_schedule_fields *f)
{
    return (struct name){(const char *)blob_at(&a->blobs, f->blob) + f->key_len, f->spec_len};
}

static struct name zone_of(const struct pg_arena *a, const struct pg_schedule_fields *f)
{
    return (struct name){spec_of(a, f).bytes + f->spec_len, f->zone_len};
}

/* ---- replies ------------------------------------------------------------------------------- */

static bool reply(const struct ask *k, unsigned status, uint64_t ticket, int64_t next)
{
    const struct pg_schedule_reply head = {.status = status, .ticket = ticket, .next = next};
    sink_put(k->out, &head, sizeof head);
    return true;
}

/* Return the nominal time of the next occurrence: the armed one, or the one that follows. */
static int64_t next_of(const struct pg_arena *a, uint32_t row)
{
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    if (schedule_at(a, row)->slot != PG_NIL)
        return f->nominal_ns;
    if (f->overlap == PG_OVERLAP_DELAY && schedule_holds(a, row) && f->after_ns != PG_NOMINAL_NONE)
        return PG_NOMINAL_UNKNOWN;
    return f->count != 0 && f->armed >= f->count ? PG_NOMINAL_NONE : f->after_ns;
}

static void info_put(const struct pg_arena *a, uint32_t row, struct sink *out)
{
    const struct pg_schedule *s = schedule_at(a, row);
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    const struct name topic = topic_name(a, f->topic);
    const bool armed = s->slot != PG_NIL;
    const int64_t offset_ns = a->header->wall_offset_ns;
    const struct pg_schedule_info info = {
        .revision = f->revision, .count = f->count, .every_ns = f->every_ns,
        .until_ns = f->until_ns, .jitter_ns = f->jitter_ns, .armed = f->armed,
        .last_ns = armed ? f->base_ns : f->nominal_ns, .next_ns = next_of(a, row),
        .deadline_ns = armed ? timers_deadline_ns(a, s->slot) + offset_ns : PG_NOMINAL_NONE,
        .put_ns = f->put_ns, .ticket = armed ? ctl_ticket(slot_hot(a, s->slot)->ctl) : 0,
        .row = row, .uid = f->uid, .payload_len = f->payload_len, .state = f->state,
        .topic_len = (uint8_t)topic.len, .key_len = f->key_len, .spec_len = f->spec_len,
        .zone_len = f->zone_len, .overlap = f->overlap, .tag_len = f->tag_len,
        .has_priority = f->has_priority, .open = s->open, .priority = f->priority};
    sink_put(out, &info, sizeof info);
    sink_put(out, topic.bytes, topic.len);
    sink_put(out, blob_at(&a->blobs, f->blob), schedule_bytes(f));
}

static bool reply_info(struct pg_arena *a, const struct ask *k, unsigned status)
{
    if (arms(k))
        schedules_step(a, ARMED_AT_ONCE);
    reply(k, status, 0, PG_NOMINAL_NONE);
    info_put(a, k->row, k->out);
    *k->count = 1;
    a->call.durable |= changes(k) && namespace_at(a, k->namespace_row)->durability != 0;
    return true;
}

static bool reply_times(const struct ask *k, const int64_t *times, uint32_t count)
{
    sink_put(k->out, times, count * sizeof *times);
    *k->count = count;
    return true;
}

/* ---- actions ------------------------------------------------------------------------------- */

static struct pg_schedule_fields fields_of(const struct ask *k, uint32_t topic)
{
    const struct pg_schedule_ask *h = &k->head;
    return (struct pg_schedule_fields){
        .count = h->count, .every_ns = h->every_ns, .until_ns = h->until,
        .jitter_ns = h->jitter_ns, .payload_len = h->payload_len, .topic = topic, .uid = k->uid,
        .key_len = h->key_len, .spec_len = h->spec_len, .zone_len = h->zone_len,
        .overlap = h->overlap, .tag_len = h->tag_len, .has_priority = h->has_priority,
        .priority = h->priority};
}

/* Return whether owner, quotas and the uid's share of the table allow the schedule. */
static bool put_admitted(struct pg_arena *a, const struct ask *k, uint32_t topic)
{
    struct pg_result r;
    const uint32_t ns = topic_at(a, topic)->namespace_row;
    const struct put p = {.key = {.namespace_row = ns}, .account = account_of(a, k->uid)};
    if (k->row == PG_NIL && !share_admits(a, PG_Q_UID_SCHEDULES, a->schedule_rows,
                                          schedules_of(a, k->uid), &r))
        return refuse_as(a, k, &r);
    if (k->limited && (!quota_charge(a, ns, p.account, &r) ||
                       !quota_admits(a, &p, blob_granules((uint64_t)k->head.key_len +
                                                          k->head.tag_len + k->head.payload_len),
                                     PG_NIL, &r)))
        return refuse_as(a, k, &r);
    return true;
}

/* Return whether the schedule exists with the settings of the message. */
static bool put_repeats(const struct pg_arena *a, const struct ask *k)
{
    if (k->row == PG_NIL)
        return false;
    const uint32_t topic = pg_find_topic(a, k->namespace_row, k->topic_name.bytes,
                                         k->topic_name.len);
    const struct pg_schedule_fields wanted = fields_of(k, topic);
    return topic != PG_NIL && schedule_same(a, k->row, &wanted, k->bytes);
}

/* Compute the first times of a cron expression. Return false if the message is refused, or has to be
 * handled again. */
static bool put_begin(struct pg_arena *a, const struct ask *k, struct pg_schedule_fields *f)
{
    if (f->every_ns != 0)
        return true;
    const struct calendar *c = begin_of(a, k->row, k->spec, k->zone, f->until_ns);
    if (c == NULL)
        return false;
    if (c->status != PG_ST_DONE || c->count == 0)
        return refuse(a, k, c->status != PG_ST_DONE ? c->status : PG_ST_NO_OCCURRENCE);
    f->base_ns = c->question.after_ns;
    f->after_ns = time_at(c, 0);
    f->then_ns = time_at(c, 1);
    return true;
}

static bool put_apply(struct pg_arena *a, struct ask *k)
{
    struct pg_result lacking;
    struct pg_schedule_fields f = fields_of(k, 0);
    if (put_repeats(a, k))
        return reply_info(a, k, PG_ST_KEPT);
    if (!put_begin(a, k, &f))
        return k->why->error == PG_ERR_NONE;
    f.topic = names_topic(a, k->namespace_name, k->topic_name, &lacking);
    if (f.topic == PG_NIL)
        return refuse_as(a, k, &lacking);
    k->namespace_row = topic_at(a, f.topic)->namespace_row;
    if (!put_admitted(a, k, f.topic))
        return false;
    const unsigned status = schedule_put(a, &f, k->bytes, &k->row);
    if (status != PG_ST_ADDED && status != PG_ST_REPLACED)
        return refuse(a, k, status);
    return reply_info(a, k, status);
}

static bool resume_apply(struct pg_arena *a, const struct ask *k)
{
    const struct pg_schedule_fields *f = schedule_fields(a, k->row);
    if (f->state == PG_SCHEDULE_ACTIVE)
        return reply_info(a, k, PG_ST_DONE);
    if (f->every_ns != 0) {
        schedule_resume(a, k->row, 0, 0, 0);
        return reply_info(a, k, PG_ST_DONE);
    }
    const struct calendar *c = begin_of(a, k->row, spec_of(a, f), zone_of(a, f), f->until_ns);
    if (c == NULL)
        return true;
    if (c->status != PG_ST_DONE)
        return refuse(a, k, c->status);
    schedule_resume(a, k->row, c->question.after_ns, time_at(c, 0), time_at(c, 1));
    return reply_info(a, k, PG_ST_DONE);
}

static bool trigger_apply(struct pg_arena *a, const struct ask *k)
{
    struct pg_result r;
    schedule_extra(a, k->row, k->head.from, k->limited, false, &r);
    const unsigned status = r.ticket & 0xff;
    if (status != PG_ST_ADDED && status != PG_ST_KEPT)
        return refuse_as(a, k, &r);
    if (schedule_has_nominal(schedule_fields(a, k->row), k->head.from))
        schedule_fired(a, k->row, k->head.from, k->head.from);
    reply(k, status, r.ticket >> 8, PG_NOMINAL_NONE);
    info_put(a, k->row, k->out);
    *k->count = 1;
    a->call.durable |= namespace_at(a, k->namespace_row)->durability != 0;
    return true;
}

/* Arm the occurrence with a nominal time, unless it has fired. *r receives the answer. Return false
 * after a refusal. */
static bool backfill_one(struct pg_arena *a, const struct ask *k, int64_t nominal_ns,
                         struct pg_result *r)
{
    if (!k->head.repeat && spans_have(schedule_fields(a, k->row), nominal_ns))
        answer(r, 0, PG_ST_KEPT, 0);
    else if (wal_buffer_refusal(a) != PG_ST_NONE)
        answer(r, 0, wal_buffer_refusal(a), 0);
    else
        schedule_extra(a, k->row, nominal_ns, k->limited, k->head.repeat, r);
    const unsigned status = r->ticket & 0xff;
    return status == PG_ST_ADDED || status == PG_ST_KEPT || status == PG_ST_EXISTS;
}

/* Arm the occurrences at these times. If one is refused, the reply says where to continue. */
static bool backfill(struct pg_arena *a, const struct ask *k, const int64_t *times, uint32_t count,
                     bool more)
{
    uint32_t armed = 0, done = 0;
    struct pg_result r = {0, 0};
    for (; done < count && backfill_one(a, k, times[done], &r); done++)
        armed += (r.ticket & 0xff) == PG_ST_ADDED;
    if (done < count && done == 0)
        return refuse_as(a, k, &r);
    const int64_t next = done < count ? times[done] : more ? times[count - 1] + 1 : PG_NOMINAL_NONE;
    if (armed != 0)
        schedule_fired(a, k->row, k->head.from,
                       next == PG_NOMINAL_NONE ? k->head.until : next - 1);
    reply(k, PG_ST_DONE, armed, next);
    a->call.durable |= namespace_at(a, k->namespace_row)->durability != 0;
    return reply_times(k, times, done);
}

static bool backfill_apply(struct pg_arena *a, const struct ask *k)
{
    const struct pg_schedule_fields *f = schedule_fields(a, k->row);
    const int64_t now_ns = schedule_wall_ns(a), until_ns = k->head.until;
    int64_t times[ARMS_PER_MESSAGE];
    if (k->head.from <= PG_NOMINAL_UNKNOWN)
        return refused(k->why, PG_ERR_MALFORMED, offsetof(struct pg_schedule_ask, from),
                       (uint64_t)k->head.from);
    if (until_ns > now_ns)
        return refuse(a, k, PG_ST_TOO_FAR);
    if (f->overlap == PG_OVERLAP_DELAY)
        return backfill(a, k, times, 0, false);
    if (f->every_ns != 0) {
        const uint32_t count = schedule_steps(f, k->head.from, until_ns, ARMS_PER_MESSAGE, times);
        return backfill(a, k, times, count, count == ARMS_PER_MESSAGE);
    }
    const struct calendar *c = times_of(a, spec_of(a, f), zone_of(a, f), k->head.from - 1, until_ns,
                                        ARMS_PER_MESSAGE, k->head.from - 1);
    if (c == NULL)
        return true;
    if (c->status != PG_ST_DONE)
        return refuse(a, k, c->status);
    return backfill(a, k, c->times, c->count, c->count == ARMS_PER_MESSAGE);
}

/* Report the next times of a cron expression. */
static bool next_of_cron(struct pg_arena *a, const struct ask *k, struct name spec,
                         struct name zone, int64_t until_ns, uint32_t count)
{
    const bool from_now = k->head.from == PG_NOMINAL_UNKNOWN;
    const int64_t after_ns = from_now ? schedule_wall_ns(a) : k->head.from;
    const struct calendar *c = times_of(a, spec, zone, after_ns, until_ns, count,
                                        from_now ? after_ns - ANSWER_VALID_NS : after_ns);
    if (c == NULL)
        return true;
    if (c->status != PG_ST_DONE)
        return refuse(a, k, c->status);
    reply(k, PG_ST_DONE, 0, PG_NOMINAL_NONE);
    return reply_times(k, c->times, c->count);
}

static bool next_of_every(const struct pg_arena *a, const struct ask *k,
                          const struct pg_schedule_fields *f, uint32_t count)
{
    const int64_t now_ns = schedule_wall_ns(a);
    const int64_t after_ns = k->head.from == PG_NOMINAL_UNKNOWN ? now_ns : k->head.from;
    int64_t times[PG_NOMINAL_MAX];
    reply(k, PG_ST_DONE, 0, PG_NOMINAL_NONE);
    const uint32_t most = after_ns == INT64_MAX ? 0 : count;
    return reply_times(k, times, schedule_steps(f, after_ns + 1, f->until_ns, most, times));
}

/* Report the time of the armed occurrence: those after it are not known. */
static bool next_of_delay(const struct pg_arena *a, const struct ask *k)
{
    const struct pg_schedule_fields *f = schedule_fields(a, k->row);
    const int64_t after_ns =
        k->head.from == PG_NOMINAL_UNKNOWN ? schedule_wall_ns(a) : k->head.from;
    const bool has_time = schedule_at(a, k->row)->slot != PG_NIL && f->nominal_ns > after_ns &&
                          f->nominal_ns <= k->head.until;
    reply(k, PG_ST_DONE, 0, PG_NOMINAL_NONE);
    return reply_times(k, &f->nominal_ns, has_time);
}

/* Number of times to report: at most as many as the schedule has left. */
static uint32_t times_left(const struct pg_arena *a, const struct ask *k,
                           const struct pg_schedule_fields *f)
{
    const uint64_t armed = schedule_at(a, k->row)->slot != PG_NIL;
    const uint64_t left = f->count == 0 ? UINT64_MAX : f->count - f->armed + armed;
    return (uint32_t)(left < k->head.count ? left : k->head.count);
}

static bool next_apply(struct pg_arena *a, const struct ask *k)
{
    const struct pg_schedule_ask *h = &k->head;
    if (h->key_len == 0 && h->every_ns == 0)
        return next_of_cron(a, k, k->spec, k->zone, h->until, (uint32_t)h->count);
    if (h->key_len == 0) {
        const struct pg_schedule_fields f = {.every_ns = h->every_ns, .until_ns = h->until,
                                             .nominal_ns = schedule_wall_ns(a)};
        return next_of_every(a, k, &f, (uint32_t)h->count);
    }
    const struct pg_schedule_fields *f = schedule_fields(a, k->row);
    const int64_t until_ns = h->until < f->until_ns ? h->until : f->until_ns;
    const uint32_t count = times_left(a, k, f);
    if (f->overlap == PG_OVERLAP_DELAY)
        return next_of_delay(a, k);
    if (f->every_ns == 0 && count != 0)
        return next_of_cron(a, k, spec_of(a, f), zone_of(a, f), until_ns, count);
    if (f->every_ns != 0)
        return next_of_every(a, k, f, count);
    return reply(k, PG_ST_DONE, 0, PG_NOMINAL_NONE);
}

static bool list_apply(struct pg_arena *a, const struct ask *k)
{
    const uint64_t head = k->out->used;
    uint64_t row = k->head.from < 0 ? a->schedule_rows : (uint64_t)k->head.from;
    reply(k, PG_ST_DONE, 0, PG_NOMINAL_NONE);
    for (; row < a->schedule_rows && k->out->used < REPLY_BYTES_MAX; row++) {
        const struct pg_schedule_fields *f = schedule_fields(a, row);
        if (f->state == PG_SCHEDULE_NONE ||
            topic_at(a, f->topic)->namespace_row != k->namespace_row)
            continue;
        info_put(a, (uint32_t)row, k->out);
        ++*k->count;
    }
    const int64_t next = row < a->schedule_rows ? (int64_t)row : PG_NOMINAL_NONE;
    memcpy(k->out->bytes + head + offsetof(struct pg_schedule_reply, next), &next, sizeof next);
    return true;
}

static bool ask_apply(struct pg_arena *a, struct ask *k)
{
    if (k->head.action == PG_SA_PUT)
        return put_apply(a, k);
    if (k->head.action == PG_SA_LIST)
        return list_apply(a, k);
    if (k->row == PG_NIL && k->head.key_len != 0)
        return reply(k, PG_ST_UNKNOWN, 0, PG_NOMINAL_NONE);
    switch (k->head.action) {
    case PG_SA_DELETE:
        reply_info(a, k, PG_ST_DONE);
        schedule_delete(a, k->row);
        return true;
    case PG_SA_PAUSE: schedule_pause(a, k->row); return reply_info(a, k, PG_ST_DONE);
    case PG_SA_RESUME: return resume_apply(a, k);
    case PG_SA_TRIGGER: return trigger_apply(a, k);
    case PG_SA_BACKFILL: return backfill_apply(a, k);
    case PG_SA_NEXT: return next_apply(a, k);
    default: return reply_info(a, k, PG_ST_DONE);
    }
}

bool schedule_handle(struct pg_arena *a, const struct request *q, struct sink *out,
                     uint32_t *count, struct refusal *why)
{
    struct ask k = {.uid = q->uid, .out = out, .why = why, .count = count};
    *why = (struct refusal){PG_ERR_NONE, {0, 0}};
    return ask_read(q, &k) && ask_allowed(a, &k) && ask_apply(a, &k);
}

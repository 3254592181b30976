/* A member of a consumer group; see purgatoryd.h, and "Consumer groups" in docs/protocol.md. */
#include "end.h"
#include "session.h"

#include <stdlib.h>
#include <string.h>

enum { GROUP = 12 };
enum { CREATE = 0, DESCRIBE = 1 };
enum { JOIN = 13, JOB_ACK, JOB_NACK, JOB_EXTEND, JOB_RELEASE, JOB_REJECT };
enum { KEY_STR = 0, KEY_BYTES = 1 };
#define S INT64_C(1000000000)
#define PING_NS (15 * S)
#define JOIN_AGAIN_NS (1 * S)
#define ERROR_MAX 1024u
#define GRANTED_PARTS 120 /* granted_ns is at least 1 / GRANTED_PARTS of the requested lease */

struct settings {
    uint64_t max_jobs, max_bytes;
    int64_t retention_ns, max_lease_ns, backoff_base_ns, backoff_cap_ns;
    uint64_t rate;
    uint32_t max_attempts, max_dead, flags, pad;
};

struct group_ask {
    struct settings settings;
    uint32_t action, topics;
    uint8_t earliest, namespace_len, name_len, pad[5];
};

struct job_info {
    uint64_t ticket;
    int64_t deadline_ns, fired_ns, lease_ends_ns, now_ns, wall_offset_ns;
    uint32_t row, lease, attempt, group, payload_len;
    uint8_t key_len, key_type, flags, topic_len, priority, pad[3];
    uint32_t missed;
};

struct lease {
    uint64_t ticket;
    uint32_t row, lease;
};

_Static_assert(sizeof(struct settings) == 72, "pg_group_settings");
_Static_assert(sizeof(struct group_ask) == 88, "pg_group_ask");
_Static_assert(sizeof(struct job_info) == 80, "pg_job_info");
_Static_assert(sizeof(struct lease) == 16, "pg_lease");

/* A job that the daemon leased to this session. */
struct held {
    struct pg_job job; /* the first field, so that a job leads to its struct held */
    struct held *next;
    struct lease lease;
    int64_t ends_ns;   /* end of the lease */
    int64_t look_ns;   /* time of the next extension or release by this consumer */
    int64_t sent_ns;   /* time at which the record in flight was packed */
    bool in_flight;    /* an extension, or a release without a caller, has no answer so far */
    bool limited;      /* the longest lease of the group limited the last extension */
    bool taken, lost, over;
    struct pg_answer sent;
    char bytes[]; /* topic, key and payload */
};

struct pg_consumer {
    struct pg_client *client;
    struct pg_group group;
    struct held *held; /* the oldest first */
    bool stale;        /* the daemon may have forgotten this member */
    bool joining;
    struct pg_answer joined;
    int64_t join_ns, ping_ns;
    int64_t granted_ns; /* length of the leases that the daemon grants: the group may limit it */
    const char *error;
};

/* ---- the group ---- */

/* Write the GROUP request into `to`, which has 8 KiB, and return its length; 0 = too long. */
static size_t encode_ask(const struct pg_group *group, uint32_t action, char *to)
{
    struct group_ask ask = {.action = action};
    const size_t ns = strlen(group->namespace), name = strlen(group->name);
    char *at = to + sizeof ask;
    if (ns == 0 || ns > 63 || name == 0 || name > 63)
        return 0;
    ask.namespace_len = (uint8_t)ns;
    ask.name_len = (uint8_t)name;
    memcpy(at, group->namespace, ns);
    memcpy(at + ns, group->name, name);
    at += ns + name;
    for (; action == CREATE && group->topics[ask.topics] != NULL; ask.topics++) {
        const size_t length = strlen(group->topics[ask.topics]);
        if (length > 127 || ask.topics == 64)
            return 0;
        *at++ = (char)length;
        memcpy(at, group->topics[ask.topics], length);
        at += length;
    }
    if (action == CREATE)
        ask.settings = (struct settings){.max_jobs = 4096, .max_bytes = 2097152, .max_lease_ns = 3600 * S,
                                         .backoff_base_ns = S, .backoff_cap_ns = 600 * S,
                                         .max_attempts = 20, .max_dead = 1000};
    memcpy(to, &ask, sizeof ask);
    return (size_t)(at - to);
}

/* Ask about the group. Return the number of groups in the reply. */
static uint32_t ask_group(struct pg_consumer *c, uint32_t action)
{
    char message[sizeof(struct group_ask) + 128 + 64 * 128];
    struct pg_reply reply = {.body = NULL};
    const size_t length = encode_ask(&c->group, action, message);
    if (length == 0)
        c->error = "a name of the consumer group has an invalid length";
    else if (!pg_ask(c->client, GROUP, (struct bytes){message, length}, &reply))
        c->error = pg_error(c->client);
    else if (reply.error != 0)
        c->error = "the daemon refused the consumer group";
    free(reply.body);
    return c->error == NULL ? reply.count : 0;
}

/* ---- jobs of the daemon ---- */

static void on_open(void *context)
{
    struct pg_consumer *c = context;
    c->stale = true;
}

static void lose_all(void *context)
{
    struct pg_consumer *c = context;
    for (struct held *h = c->held; h != NULL; h = h->next) {
        h->lost = true;
        h->over |= !h->taken;
    }
}

static struct held *find(struct pg_consumer *c, const struct lease *lease)
{
    struct held *h = c->held;
    while (h != NULL && memcmp(&h->lease, lease, sizeof *lease) != 0)
        h = h->next;
    return h;
}

static void append(struct pg_consumer *c, struct held *held)
{
    struct held **end = &c->held;
    while (*end != NULL)
        end = &(*end)->next;
    *end = held;
}

/* Note the length of a new lease. */
static void note_lease(struct pg_consumer *c, int64_t length_ns)
{
    const int64_t least_ns = c->group.lease_ns / GRANTED_PARTS;
    const int64_t most_ns = length_ns < c->group.lease_ns ? length_ns : c->group.lease_ns;
    c->granted_ns = most_ns > least_ns ? most_ns : least_ns;
}

/* Note the length of an extended lease: the longest lease of the group may have been raised. */
static void note_extension(struct pg_consumer *c, int64_t length_ns)
{
    const int64_t most_ns = length_ns < c->group.lease_ns ? length_ns : c->group.lease_ns;
    c->granted_ns = most_ns > c->granted_ns ? most_ns : c->granted_ns;
}

static struct held *make(struct pg_consumer *c, const struct job_info *info, const char *bytes)
{
    const size_t length = (size_t)info->topic_len + info->key_len + info->payload_len;
    struct held *h = calloc(1, sizeof *h + length);
    if (h == NULL) {
        c->error = "out of memory";
        return NULL;
    }
    memcpy(h->bytes, bytes, length);
    const char *key = h->bytes + info->topic_len, *payload = key + info->key_len;
    size_t payload_len = info->payload_len;
    const struct pg_raw_end raw = {(int)(info->ticket & 0xff), info->flags, key, info->key_len};
    const struct pg_end end = pg_end_of(raw, &payload, &payload_len);
    h->job = (struct pg_job){
        .ticket = info->ticket >> 8,
        .end = end,
        .attempt = info->attempt,
        .missed = info->missed,
        .deadline_ns = info->deadline_ns,
        .fired_ns = info->fired_ns,
        .topic = h->bytes,
        .topic_len = info->topic_len,
        .key = key,
        .key_len = info->key_len,
        .payload = payload,
        .payload_len = payload_len,
    };
    h->lease = (struct lease){info->ticket >> 8, info->row, info->lease};
    note_lease(c, info->lease_ends_ns - info->now_ns);
    return h;
}

/* Take leased jobs. After a JOIN the daemon repeats those that this consumer has. A message without
 * jobs reports that the group was deleted. */
static void on_jobs(void *context, struct bytes body, uint32_t count)
{
    struct pg_consumer *c = context;
    size_t at = count * sizeof(struct job_info);
    if (count == 0) {
        lose_all(c);
        c->stale = true;
    }
    for (uint32_t n = 0; n < count && c->error == NULL; n++) {
        struct job_info info;
        if (at > body.length) {
            c->error = "a message with jobs is cut off";
            return;
        }
        memcpy(&info, (const char *)body.at + n * sizeof info, sizeof info);
        const size_t length = (size_t)info.topic_len + info.key_len + info.payload_len;
        const struct lease lease = {info.ticket >> 8, info.row, info.lease};
        struct held *h = find(c, &lease);
        if (length > body.length - at)
            c->error = "a message with jobs is cut off";
        else if (h == NULL && (h = make(c, &info, (const char *)body.at + at)) != NULL)
            append(c, h);
        if (h != NULL && h->ends_ns < info.lease_ends_ns)
            h->ends_ns = info.lease_ends_ns;
        at += length;
    }
}

/* ---- what is due ---- */

static bool pack(struct pg_consumer *c, struct bytes key, struct record record, struct bytes text,
                 struct pg_answer *answer)
{
    const struct pg_topic topic = {c->group.namespace, ""};
    const struct pg_content content = {.key = key, .payload = text};
    if (!pg_pack(c->client, topic, content, record, answer))
        c->error = pg_error(c->client);
    return c->error == NULL;
}

/* Join, and again after each reconnect. */
static void keep_joined(struct pg_consumer *c, int64_t now_ns)
{
    if (c->joining && c->joined.status != PG_NO_ANSWER) {
        c->joining = false;
        if (c->joined.status == PG_IN_DOUBT || c->joined.status == PG_STOPPING) {
            c->stale = true;
            c->join_ns = c->joined.status == PG_STOPPING ? now_ns + JOIN_AGAIN_NS : 0;
        } else if (c->joined.status != PG_DONE) {
            c->error = c->joined.status == PG_NO_GROUP ? "there is no such consumer group"
                                                       : "the daemon refused to admit a member";
        }
    }
    if (!c->stale || c->joining || now_ns < c->join_ns)
        return;
    c->stale = false;
    c->joining = true;
    pack(c, (struct bytes){c->group.name, strlen(c->group.name)},
         (struct record){.op = JOIN, .key_type = KEY_STR, .time_ns = c->group.lease_ns,
                         .value = c->group.max_in_flight},
         (struct bytes){NULL, 0}, &c->joined);
}

/* Take the answer to an extension: the time until the end of the lease. */
static void take_answer(struct pg_consumer *c, struct held *h)
{
    if (!h->in_flight || h->sent.status == PG_NO_ANSWER)
        return;
    h->in_flight = false;
    if (h->over)
        return;
    if (h->sent.status != PG_DONE) {
        h->lost = true;
        return;
    }
    const int64_t left_ns = h->sent.deadline_ns, ends_ns = h->sent_ns + left_ns;
    h->limited = left_ns < c->group.lease_ns;
    h->ends_ns = ends_ns > h->ends_ns ? ends_ns : h->ends_ns;
    note_extension(c, left_ns);
}

/* Pack an extension, or a release, for which no caller waits. */
static void send_own(struct pg_consumer *c, struct held *h, struct record record, int64_t now_ns)
{
    record.key_type = KEY_BYTES;
    h->in_flight = true;
    h->sent_ns = now_ns;
    h->look_ns = now_ns + c->granted_ns / 12;
    pack(c, (struct bytes){&h->lease, sizeof h->lease}, record, (struct bytes){NULL, 0}, &h->sent);
}

/* Return whether the lease has ended. An extension in flight may still move its end. */
static bool has_ended(const struct held *h, int64_t now_ns)
{
    return h->lost || (now_ns >= h->ends_ns && (h->limited || !h->in_flight));
}

/* Extend a lease that ends in less than two thirds of its length. Give back a job without a caller
 * whose lease cannot be extended, because a release is no failed attempt. */
static void keep_lease(struct pg_consumer *c, struct held *h, int64_t now_ns)
{
    take_answer(c, h);
    const int64_t left_ns = h->ends_ns - now_ns;
    if (h->over)
        return;
    if (has_ended(h, now_ns)) {
        h->lost = true;
        h->over |= !h->taken;
    } else if (h->in_flight || now_ns < h->look_ns) {
        return;
    } else if (!h->taken && h->limited && left_ns < c->granted_ns / 2) {
        h->over = true;
        send_own(c, h, (struct record){.op = JOB_RELEASE}, now_ns);
    } else if (left_ns < c->granted_ns * 2 / 3) {
        send_own(c, h, (struct record){.op = JOB_EXTEND, .time_ns = c->group.lease_ns}, now_ns);
    }
}

/* Free the jobs that are over. A job with a record in flight stays until the answer. */
static void sweep(struct pg_consumer *c)
{
    struct held **place = &c->held;
    while (*place != NULL) {
        struct held *h = *place;
        if (h->over && !h->in_flight) {
            *place = h->next;
            free(h);
        } else {
            place = &h->next;
        }
    }
}

/* Pack what is due, and send it. Messages are received until `until_ns`. */
static bool step(struct pg_consumer *c, int64_t until_ns)
{
    const int64_t now_ns = pg_boot_ns(), wake_ns = now_ns + c->granted_ns / 12;
    keep_joined(c, now_ns);
    for (struct held *h = c->held; h != NULL && c->error == NULL; h = h->next)
        keep_lease(c, h, now_ns);
    sweep(c);
    if (now_ns >= c->ping_ns) {
        c->ping_ns = now_ns + PING_NS;
        pg_ping(c->client);
    }
    if (c->error == NULL && !pg_step(c->client, until_ns < wake_ns ? until_ns : wake_ns))
        c->error = pg_error(c->client);
    return c->error == NULL;
}

/* ---- calls ---- */

const struct pg_job *pg_take(struct pg_consumer *c, long timeout_ms)
{
    const int64_t until_ns = pg_boot_ns() + timeout_ms * INT64_C(1000000);
    do {
        for (struct held *h = c->held; h != NULL; h = h->next)
            if (!h->taken && !h->over && !h->lost && pg_boot_ns() < h->ends_ns) {
                h->taken = true;
                return &h->job;
            }
    } while (step(c, until_ns) && pg_boot_ns() < until_ns);
    return NULL;
}

bool pg_keep(struct pg_consumer *c)
{
    return step(c, 0);
}

bool pg_is_lost(const struct pg_job *job)
{
    return has_ended((const struct held *)(const void *)job, pg_boot_ns());
}

/* Answer a job, and wait for the daemon. A lost job changes nothing there. */
static int answer(struct pg_consumer *c, const struct pg_job *job, struct record record,
                  const char *text)
{
    struct held *h = c->held;
    struct pg_answer answer = {.status = PG_NO_ANSWER};
    const size_t length = text == NULL ? 0 : strlen(text);
    while (h != NULL && &h->job != job)
        h = h->next;
    if (h == NULL || h->over)
        return PG_NO_ANSWER;
    const struct bytes error = {text, length < ERROR_MAX ? length : ERROR_MAX};
    record.key_type = KEY_BYTES;
    if (h->lost)
        answer.status = PG_LEASE_LOST;
    else if (!pack(c, (struct bytes){&h->lease, sizeof h->lease}, record, error, &answer))
        return PG_NO_ANSWER;
    while (answer.status == PG_NO_ANSWER)
        if (!step(c, INT64_MAX))
            return PG_NO_ANSWER;
    h->over = true;
    return answer.status == PG_IN_DOUBT ? PG_LEASE_LOST : answer.status;
}

int pg_ack(struct pg_consumer *c, const struct pg_job *job)
{
    return answer(c, job, (struct record){.op = JOB_ACK}, NULL);
}

int pg_nack(struct pg_consumer *c, const struct pg_job *job, int64_t delay_ns, const char *error)
{
    return answer(c, job, (struct record){.op = JOB_NACK, .time_ns = delay_ns}, error);
}

int pg_reject(struct pg_consumer *c, const struct pg_job *job, const char *error)
{
    return answer(c, job, (struct record){.op = JOB_REJECT}, error);
}

int pg_release(struct pg_consumer *c, const struct pg_job *job)
{
    return answer(c, job, (struct record){.op = JOB_RELEASE}, NULL);
}

const char *pg_consumer_error(const struct pg_consumer *c)
{
    return c->error;
}

struct pg_consumer *pg_consume(const char *endpoint, const char *worker,
                               const struct pg_group *group)
{
    struct pg_consumer *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->group = *group;
    c->granted_ns = group->lease_ns;
    c->client = pg_open(endpoint, worker);
    if (c->client == NULL) {
        free(c);
        return NULL;
    }
    c->ping_ns = pg_boot_ns() + PING_NS;
    if (ask_group(c, DESCRIBE) == 0 && c->error == NULL)
        ask_group(c, CREATE);
    pg_hook(c->client, (struct pg_hooks){c, on_open, lose_all, on_jobs});
    c->stale = true;
    while (c->error == NULL && (c->stale || c->joining))
        step(c, INT64_MAX);
    return c;
}

void pg_leave(struct pg_consumer *c)
{
    pg_close(c->client); /* BYE gives the jobs back */
    while (c->held != NULL) {
        struct held *h = c->held;
        c->held = h->next;
        free(h);
    }
    free(c);
}

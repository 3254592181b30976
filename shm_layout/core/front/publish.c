/* publish.c - writes a notice that has no timer into the replay buffer. */

#include "core/base/answer.h"
#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/tickets.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/compaction.h"
#include "core/state/groups.h"
#include "core/state/jobs.h"
#include "core/state/names.h"
#include "core/state/records.h"
#include "core/state/replay_buffer.h"
#include "core/state/timers.h"
#include "core/front/request.h"

struct publish {
    struct pg_publish head;
    struct name namespace_name, topic_name;
    const uint8_t *key;           /* followed by the payload */
};

static bool sizes_sound(const struct pg_publish *p, uint64_t bytes, struct refusal *why)
{
    const uint64_t whole = sizeof *p + p->namespace_len + p->topic_len + p->key_len + p->payload_len;
    if (p->payload_len > PG_PAYLOAD_MAX)
        return refused(why, PG_ERR_TOO_LARGE, PG_PAYLOAD_MAX, p->payload_len);
    if (p->namespace_len == 0 || p->namespace_len > PG_NAMESPACE_MAX ||
        p->topic_len > PG_TOPIC_MAX || !key_sound(p->key_type, p->key_len))
        return refused(why, PG_ERR_MALFORMED, offsetof(struct pg_publish, key_len), p->key_len);
    return bytes == whole || refused(why, PG_ERR_MALFORMED, bytes, whole);
}

static bool publish_read(const uint8_t *body, uint64_t bytes, struct publish *p,
                         struct refusal *why)
{
    if (bytes < sizeof p->head)
        return refused(why, PG_ERR_MALFORMED, bytes, sizeof p->head);
    memcpy(&p->head, body, sizeof p->head);
    if (!sizes_sound(&p->head, bytes, why))
        return false;
    const char *at = (const char *)body + sizeof p->head;
    p->namespace_name = (struct name){at, p->head.namespace_len};
    p->topic_name = (struct name){at + p->head.namespace_len, p->head.topic_len};
    p->key = (const uint8_t *)p->topic_name.bytes + p->head.topic_len;
    return (name_sound(p->namespace_name) && name_sound(p->topic_name)) ||
           refused(why, PG_ERR_MALFORMED, sizeof p->head, p->head.namespace_len);
}

static struct pg_entry entry_of(const struct pg_arena *a, const struct publish *p, uint32_t topic,
                                uint64_t ticket, uint32_t blob)
{
    const uint32_t ns = topic_at(a, topic)->namespace_row;
    const int64_t now_ns = a->call.moment_ns;
    return (struct pg_entry){
        .ticket = ticket << 8 | PG_CAUSE_PUBLISHED, .deadline_ns = now_ns, .fired_ns = now_ns,
        .blob = blob, .payload_len = p->head.payload_len, .topic = (uint16_t)topic,
        .hash = key_hash(a, ns, p->head.key_type, p->key, p->head.key_len),
        .key_len = p->head.key_len, .meta = p->head.key_type};
}

/* Append the entry to the replay buffer, but not to the key index. CANCEL therefore does not find
 * it. */
static void entry_publish(struct pg_arena *a, const struct publish *p, uint32_t topic,
                          uint32_t blob, struct pg_result *r)
{
    const uint64_t ticket = a->header->next_ticket;
    STORE_RELEASE(&a->header->next_ticket, ticket + 1);
    memcpy(blob_at(&a->blobs, blob), p->key, (size_t)p->head.key_len + p->head.payload_len);
    const struct pg_entry e = entry_of(a, p, topic, ticket, blob);
    const struct job_traits traits = job_traits_of(a, &e, PG_NIL);
    if (has_wal(a))
        wal_append_entry(a, &e, &traits);
    replay_append(a, &e, &traits);
    a->metrics->blob_bytes += (uint64_t)entry_granules(&e) * PG_GRANULE;
    answer(r, ticket, PG_ST_DONE, e.fired_ns);
}

/* Write the notice. If this creates the topic, the topic stays even if there is no space for the
 * notice. If the topic cannot be created, *r contains the answer. */
static unsigned publish(struct pg_arena *a, const struct publish *p, struct pg_result *r)
{
    const uint32_t granules = blob_granules((uint64_t)p->head.key_len + p->head.payload_len);
    const unsigned status = wal_buffer_refusal(a);
    if (status != PG_ST_NONE)
        return status;
    if (names_elsewhere(a, p->namespace_name))
        return PG_ST_WRONG_SHARD;
    const uint32_t topic = names_topic(a, p->namespace_name, p->topic_name, r);
    if (topic == PG_NIL)
        return r->ticket & 0xff;
    if (next_number(a->header) == PG_TICKET_SHARD)
        return PG_ST_FULL_TICKETS;
    if (has_groups(a, topic) && !jobs_admit(a, topic, 1, granules, r))
        return r->ticket & 0xff;
    if (!replay_make_space(a, (uint64_t)granules * PG_GRANULE))
        return PG_ST_BUSY;
    const uint32_t blob = blobs_take(&a->blobs, granules);
    if (blob == PG_NIL)
        return payload_refusal(a);
    entry_publish(a, p, topic, blob, r);
    return PG_ST_DONE;
}

/* Answer a PUBLISH with a refusal, unless *r already contains the answer, and count the refusal.
 * BUSY means that the WAL buffer is full, or that the replay buffer is full of unsent notices. */
static void refuse(struct pg_arena *a, unsigned status, struct pg_result *r)
{
    if (r->ticket == 0)
        answer(r, 0, status, 0);
    pg_refused(a, wal_buffer_refusal(a) != PG_ST_NONE ? PG_ST_WAL : status);
}

int pg_publish(struct pg_arena *a, const void *body, uint64_t bytes, uint32_t uid,
               int64_t real_boot_ns, struct pg_result *result, uint64_t detail[2])
{
    struct refusal why = {PG_ERR_NONE, {0, 0}};
    struct publish p;
    *result = (struct pg_result){0, 0};
    if (publish_read(body, bytes, &p, &why)) {
        time_set(a, a->state.now_ns, real_boot_ns);
        a->call.uid = uid;
        const unsigned status = publish(a, &p, result);
        if (status != PG_ST_DONE)
            refuse(a, status, result);
        replay_show(a);
        wal_buffer_settle(a);
        a->call.uid = PG_NIL;
    }
    memcpy(detail, why.detail, sizeof why.detail);
    return (int)why.error;
}

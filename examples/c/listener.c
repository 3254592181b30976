/* Notices of a topic; see purgatoryd.h. The numbers in brackets are the rules of "Notices" in
 * docs/protocol.md. */
#include "end.h"

#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#define NOTICE_MAGIC 0x4e434750u

struct head {
    uint32_t magic;
    uint16_t version, pad0;
    uint64_t stream_id, incarnation, first, tail;
    int64_t built_ns, wall_offset_ns;
    uint32_t count, pad1;
};

struct entry {
    uint64_t ticket;
    int64_t deadline_ns, fired_ns;
    uint32_t payload_len;
    uint8_t key_len, key_type, cause, flags;
    uint32_t missed, pad;
};

_Static_assert(sizeof(struct head) == 64, "pg_notices");
_Static_assert(sizeof(struct entry) == 40, "pg_notice");

struct pg_listener {
    void *context, *socket;
    zmq_msg_t message;
    struct head head;
    uint32_t record;   /* number of the next record of the message */
    size_t at;         /* offset of its key */
    uint64_t expected; /* sequence of the next notice; 0 = any */
};

struct pg_listener *pg_listen(const char *endpoint, struct pg_topic topic)
{
    const int reconnect_ms = 10, linger_ms = 0;
    char subject[64 + 128];
    const size_t ns = strlen(topic.namespace) + 1, tp = strlen(topic.topic) + 1;
    struct pg_listener *l = calloc(1, sizeof *l);
    if (l == NULL)
        return NULL;
    zmq_msg_init(&l->message);
    l->context = zmq_ctx_new();
    l->socket = zmq_socket(l->context, ZMQ_SUB);
    if (l->socket == NULL || ns > 64 || tp > 128) {
        pg_unlisten(l);
        return NULL;
    }
    memcpy(subject, topic.namespace, ns); /* each name ends with a zero byte */
    memcpy(subject + ns, topic.topic, tp);
    if (zmq_setsockopt(l->socket, ZMQ_RECONNECT_IVL, &reconnect_ms, sizeof reconnect_ms) != 0 ||
        zmq_setsockopt(l->socket, ZMQ_LINGER, &linger_ms, sizeof linger_ms) != 0 ||
        zmq_setsockopt(l->socket, ZMQ_SUBSCRIBE, subject, ns + tp) != 0 ||
        zmq_connect(l->socket, endpoint) != 0) {
        pg_unlisten(l);
        return NULL;
    }
    return l;
}

void pg_unlisten(struct pg_listener *l)
{
    zmq_msg_close(&l->message);
    if (l->socket != NULL)
        zmq_close(l->socket);
    if (l->context != NULL)
        zmq_ctx_term(l->context);
    free(l);
}

/* Receive the two frames of a message, and keep the second. Return false if none came in time. */
static bool receive(struct pg_listener *l, long timeout_ms)
{
    zmq_pollitem_t item = {l->socket, 0, ZMQ_POLLIN, 0};
    if (zmq_poll(&item, 1, timeout_ms) <= 0)
        return false;
    return zmq_msg_recv(&l->message, l->socket, 0) >= 0 &&
           zmq_msg_recv(&l->message, l->socket, 0) >= 0;
}

/* Begin with a new message. Return what it reveals before its first record. */
static enum pg_event begin(struct pg_listener *l, struct pg_notice *notice)
{
    const struct head before = l->head;
    if (zmq_msg_size(&l->message) < sizeof l->head)
        return PG_FAILED;
    memcpy(&l->head, zmq_msg_data(&l->message), sizeof l->head);
    if (l->head.magic != NOTICE_MAGIC || l->head.version != 1)
        return PG_FAILED;
    l->record = 0;
    l->at = sizeof l->head + l->head.count * sizeof(struct entry);
    /* [3] A heartbeat has no records: all notices up to `tail` should be here. */
    const uint64_t next = l->head.count == 0 ? l->head.tail + 1 : l->head.first;
    if (l->head.stream_id != before.stream_id || l->head.incarnation != before.incarnation) { /* [6] */
        l->expected = next;
        return before.magic == 0 ? PG_SILENCE : PG_NEW_STREAM;
    }
    if (next <= l->expected)
        return PG_SILENCE;
    *notice = (struct pg_notice){.sequence = l->expected, .lost_to = next - 1}; /* [2] */
    l->expected = next;
    return PG_LOST;
}

/* Read the next record. Return false if it is a repeated notice [2], or is damaged. */
static bool step(struct pg_listener *l, struct pg_notice *notice)
{
    const char *bytes = zmq_msg_data(&l->message);
    const uint64_t sequence = l->head.first + l->record;
    struct entry entry;
    memcpy(&entry, bytes + sizeof l->head + l->record++ * sizeof entry, sizeof entry);
    const char *key = bytes + l->at;
    l->at += entry.key_len + (size_t)entry.payload_len;
    if (sequence < l->expected || l->at > zmq_msg_size(&l->message))
        return false;
    l->expected = sequence + 1;
    const char *payload = key + entry.key_len;
    size_t payload_len = entry.payload_len;
    const struct pg_raw_end raw = {entry.cause, entry.flags, key, entry.key_len};
    const struct pg_end end = pg_end_of(raw, &payload, &payload_len);
    *notice = (struct pg_notice){
        .sequence = sequence,
        .ticket = entry.ticket,
        .deadline_ns = entry.deadline_ns,
        .fired_ns = entry.fired_ns,
        .key = key,
        .key_len = entry.key_len,
        .payload = payload,
        .payload_len = payload_len,
        .end = end,
        .missed = entry.missed,
    };
    return true;
}

enum pg_event pg_next(struct pg_listener *l, struct pg_notice *notice, long timeout_ms)
{
    for (;;) {
        while (l->record < l->head.count)
            if (step(l, notice))
                return PG_NOTICE;
        if (!receive(l, timeout_ms))
            return PG_SILENCE;
        const enum pg_event event = begin(l, notice);
        if (event != PG_SILENCE)
            return event;
    }
}

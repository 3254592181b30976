/* Sessions and batches; see purgatoryd.h. The numbers in brackets are the rules of "Sessions" in
 * docs/protocol.md. */
#include "session.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <zmq.h>

enum { HELLO = 1, BATCH = 2, BYE = 4, PING = 5, JOBS = 13 };
enum {
    ERR_SESSION_EXPIRED = 5,
    ERR_OUT_OF_ORDER = 6,
    ERR_SESSIONS_FULL = 9,
    ERR_STOPPING = 11,
    ERR_BUSY = 17,
    ERR_GROUP = 23,
};
#define MAGIC 0x51434750u
#define RECORDS_MAX 1024u
#define NAMES_MAX 256u
#define BODY_GOAL (1u << 20) /* a batch of this size is sent; a message may have 8 MiB */
#define MS INT64_C(1000000)
#define RESEND_FIRST_NS (100 * MS)
#define RESEND_MOST_NS (2000 * MS)
#define BUSY_FIRST_NS (1 * MS)
#define BUSY_MOST_NS (100 * MS)

struct frame {
    uint32_t magic;
    uint16_t version, message;
    uint64_t session, sequence;
    uint32_t count;
    uint16_t names, error;
    uint32_t names_bytes, flags;
    int64_t at_ns;
    uint64_t detail[2];
};

struct hello {
    uint8_t nonce[16];
    uint32_t name_len, pad;
    int64_t grace_ns;
};

struct welcome {
    uint64_t session, stream_id;
    uint8_t uuid[16];
    uint64_t layout_id, epoch;
    int64_t now_ns, wall_offset_ns;
    uint64_t last, tick_ns;
    uint32_t clock_kind, window, batch_records, message_bytes;
    int64_t real_boot_ns;
    uint32_t node, reaper_cpu;
    uint64_t first_id;
    uint32_t wal, pad;
    uint64_t term;
};

struct result {
    uint64_t ticket;
    int64_t deadline_ns;
};

_Static_assert(sizeof(struct frame) == 64, "pg_frame");
_Static_assert(sizeof(struct hello) == 32, "pg_hello");
_Static_assert(sizeof(struct welcome) == 136, "pg_welcome");
_Static_assert(sizeof(struct record) == 32, "pg_record");
_Static_assert(sizeof(struct result) == 16, "pg_result");

/* A record of the caller, until it has an answer. */
struct item {
    struct item *next;
    struct pg_answer *answer;
    char names[64 + 128]; /* lengths of namespace and topic, then both: an entry of the name table */
    size_t names_len;
    struct record record;
    char bytes[]; /* key, payload and extension */
};

struct items {
    struct item *first;
    struct item **end;
    size_t count, bytes;
};

/* A message without an answer. The items stay with it. */
struct batch {
    struct batch *next;
    struct items items;
    unsigned sends;
    size_t length;
    char bytes[]; /* begins with a struct frame */
};

struct pg_client {
    void *context, *socket, *monitor;
    bool connected;
    const char *error;
    char worker[64];
    uint8_t nonce[16];
    uint64_t nonces;            /* number of this nonce, so that a late welcome is recognized */
    uint64_t session, sequence; /* sequence of the next batch */
    uint32_t window, unanswered;
    struct batch *sent, **sent_end; /* in the order of their sequences */
    struct items waiting;           /* not in a batch yet */
    struct items busy;              /* answered BUSY; they go before those that wait */
    int64_t resend_ns, resend_wait_ns, busy_wait_ns;
    char *question; /* the message of pg_ask(); NULL = it has its reply */
    size_t question_len;
    struct pg_reply *reply;
    struct pg_hooks hooks;
};

int64_t pg_boot_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void clear(struct items *items)
{
    *items = (struct items){0};
    items->end = &items->first;
}

static size_t size_of(const struct item *item)
{
    return item->record.key_len + (size_t)item->record.payload_len + item->record.ext_len;
}

static void append(struct items *items, struct item *item)
{
    item->next = NULL;
    *items->end = item;
    items->end = &item->next;
    items->count++;
    items->bytes += size_of(item);
}

static struct item *take(struct items *items)
{
    struct item *item = items->first;
    items->first = item->next;
    if (items->first == NULL)
        items->end = &items->first;
    items->count--;
    items->bytes -= size_of(item);
    return item;
}

static void move_all(struct items *to, struct items *from)
{
    while (from->count > 0)
        append(to, take(from));
}

/* ---- sending ---- */

static struct frame *frame_of(struct batch *batch)
{
    return (struct frame *)(void *)batch->bytes;
}

/* Send a message. A message that the socket cannot take is lost, and sent again later. */
static void put_message(struct pg_client *c, const void *bytes, size_t length)
{
    zmq_send(c->socket, bytes, length, ZMQ_DONTWAIT);
}

static void send_hello(struct pg_client *c)
{
    struct {
        struct frame frame;
        struct hello hello;
        char worker[64];
    } m = {.frame = {.magic = MAGIC, .version = 1, .message = HELLO, .sequence = c->nonces}};
    const size_t length = strlen(c->worker);
    memcpy(m.hello.nonce, c->nonce, sizeof c->nonce);
    m.hello.name_len = (uint32_t)length;
    memcpy(m.worker, c->worker, length);
    put_message(c, &m, sizeof m.frame + sizeof m.hello + length);
}

static void send_question(struct pg_client *c)
{
    if (c->question == NULL)
        return;
    memcpy(c->question + offsetof(struct frame, session), &c->session, sizeof c->session);
    put_message(c, c->question, c->question_len);
}

/* [3] Send everything that has no answer, in order. Without a session, that is the HELLO. */
static void send_again(struct pg_client *c)
{
    c->resend_ns = pg_boot_ns() + c->resend_wait_ns;
    if (!c->connected)
        return;
    if (c->session == 0) {
        send_hello(c);
        return;
    }
    for (struct batch *batch = c->sent; batch != NULL; batch = batch->next) {
        batch->sends++;
        put_message(c, batch->bytes, batch->length);
    }
    send_question(c);
}

/* Give a batch the next number of the session. */
static void number(struct pg_client *c, struct batch *batch, uint64_t oldest)
{
    struct frame *frame = frame_of(batch);
    frame->session = c->session;
    frame->sequence = c->sequence++;
    frame->detail[1] = oldest == 0 ? 0 : frame->sequence - oldest;
}

/* ---- receiving ---- */

/* Fill the answers of a batch, and keep its BUSY records. [9] */
static void settle(struct pg_client *c, struct batch *batch, const char *body)
{
    while (batch->items.count > 0) {
        struct item *item = take(&batch->items);
        struct result result;
        memcpy(&result, body, sizeof result);
        body += sizeof result;
        const int status = (int)(result.ticket & 255);
        if (status == PG_BUSY) {
            append(&c->busy, item);
            continue;
        }
        *item->answer = (struct pg_answer){result.ticket >> 8, result.deadline_ns, status};
        free(item);
    }
    free(batch);
}

/* Remove a batch from the list of those without an answer. */
static void unlink_batch(struct pg_client *c, struct batch **place)
{
    struct batch *batch = *place;
    *place = batch->next;
    if (batch->next == NULL)
        c->sent_end = place;
    c->unanswered--;
}

/* [5] Open another session. A batch that was sent only once was not applied, so it is sent there. */
static void renew(struct pg_client *c)
{
    struct batch **place = &c->sent;
    while (*place != NULL) {
        struct batch *batch = *place;
        if (batch->sends <= 1) {
            batch->sends = 0;
            place = &batch->next;
            continue;
        }
        unlink_batch(c, place);
        while (batch->items.count > 0) {
            struct item *item = take(&batch->items);
            *item->answer = (struct pg_answer){.status = PG_IN_DOUBT};
            free(item);
        }
        free(batch);
    }
    c->session = 0;
    c->nonces++;
    if (c->hooks.on_expired != NULL)
        c->hooks.on_expired(c->hooks.context);
    if (getrandom(c->nonce, sizeof c->nonce, 0) != (ssize_t)sizeof c->nonce)
        c->error = "no random bytes for the nonce";
    send_again(c);
}

static void on_welcome(struct pg_client *c, const char *body)
{
    struct welcome welcome;
    memcpy(&welcome, body, sizeof welcome);
    if (welcome.clock_kind != 0) {
        c->error = "the daemon has a virtual clock";
        return;
    }
    c->session = welcome.session;
    c->sequence = welcome.last + 1;
    c->window = welcome.window;
    uint64_t oldest = 0;
    for (struct batch *batch = c->sent; batch != NULL; batch = batch->next) {
        number(c, batch, oldest);
        oldest = oldest == 0 ? frame_of(batch)->sequence : oldest;
    }
    send_again(c);
    if (c->hooks.on_open != NULL)
        c->hooks.on_open(c->hooks.context);
}

/* Take the reply to pg_ask(). */
static void on_reply(struct pg_client *c, const struct frame *frame, struct bytes body)
{
    struct frame asked;
    if (c->question == NULL)
        return;
    memcpy(&asked, c->question, sizeof asked);
    if (frame->message != asked.message || frame->sequence != asked.sequence)
        return;
    *c->reply = (struct pg_reply){.error = frame->error, .count = frame->count};
    memcpy(c->reply->detail, frame->detail, sizeof frame->detail);
    c->reply->body = malloc(body.length + 1);
    if (c->reply->body == NULL)
        c->error = "out of memory";
    else
        memcpy(c->reply->body, body.at, body.length);
    c->reply->length = body.length;
    free(c->question);
    c->question = NULL;
}

static void on_error(struct pg_client *c, const struct frame *frame)
{
    switch (frame->error) {
    case ERR_SESSION_EXPIRED:
        renew(c);
        break;
    case ERR_OUT_OF_ORDER: /* [4] an earlier message was lost */
        c->resend_ns = pg_boot_ns();
        break;
    case ERR_SESSIONS_FULL:
    case ERR_STOPPING:
    case ERR_BUSY: /* [6] */
        break;
    case ERR_GROUP:
        on_reply(c, frame, (struct bytes){"", 0});
        break;
    default: /* [7] */
        c->error = "the daemon refused a message";
    }
}

static void on_results(struct pg_client *c, const struct frame *frame, struct bytes body)
{
    for (struct batch **place = &c->sent; *place != NULL; place = &(*place)->next) {
        struct batch *batch = *place;
        if (frame_of(batch)->sequence != frame->sequence)
            continue;
        if (body.length < batch->items.count * sizeof(struct result)) {
            c->error = "an answer is too short";
            return;
        }
        unlink_batch(c, place);
        settle(c, batch, body.at);
        return;
    }
}

static void on_message(struct pg_client *c, const char *bytes, size_t length)
{
    struct frame frame;
    if (length < sizeof frame)
        return;
    memcpy(&frame, bytes, sizeof frame);
    const struct bytes body = {bytes + sizeof frame, length - sizeof frame};
    const bool mine = frame.message == HELLO ? c->session == 0 && frame.sequence == c->nonces
                                             : c->session != 0 && frame.session == c->session;
    if (frame.magic != MAGIC || !mine)
        return;
    if (frame.message == JOBS) {
        if (c->hooks.on_jobs != NULL)
            c->hooks.on_jobs(c->hooks.context, body, frame.count);
        return;
    }
    if (frame.error != 0) {
        on_error(c, &frame);
        return;
    }
    c->resend_wait_ns = RESEND_FIRST_NS;
    if (frame.message == HELLO && body.length >= sizeof(struct welcome))
        on_welcome(c, body.at);
    else if (frame.message == BATCH)
        on_results(c, &frame, body);
    else
        on_reply(c, &frame, body);
}

static void receive(struct pg_client *c)
{
    zmq_msg_t message;
    for (;;) {
        zmq_msg_init(&message);
        if (zmq_msg_recv(&message, c->socket, ZMQ_DONTWAIT) < 0)
            return;
        on_message(c, zmq_msg_data(&message), zmq_msg_size(&message));
        zmq_msg_close(&message);
    }
}

/* Read the events of the connection: two frames each, the first begins with a uint16. */
static void watch_connection(struct pg_client *c)
{
    uint16_t event;
    char bytes[256];
    while (zmq_recv(c->monitor, bytes, sizeof bytes, ZMQ_DONTWAIT) >= (int)sizeof event) {
        memcpy(&event, bytes, sizeof event);
        zmq_recv(c->monitor, bytes, sizeof bytes, 0);
        if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
            c->connected = true;
            c->resend_wait_ns = RESEND_FIRST_NS;
            send_again(c);
            if (c->session != 0 && c->hooks.on_open != NULL)
                c->hooks.on_open(c->hooks.context);
        } else {
            c->connected = false;
        }
    }
}

/* Wait for a message or an event, at most until `until_ns`, or messages have to be sent again. */
static void pump_until(struct pg_client *c, int64_t until_ns)
{
    zmq_pollitem_t items[] = {{c->socket, 0, ZMQ_POLLIN, 0}, {c->monitor, 0, ZMQ_POLLIN, 0}};
    const int64_t left_ns = (until_ns < c->resend_ns ? until_ns : c->resend_ns) - pg_boot_ns();
    zmq_poll(items, 2, left_ns > 0 ? (long)(left_ns / MS) + 1 : 0);
    watch_connection(c);
    receive(c);
    if (pg_boot_ns() >= c->resend_ns) {
        const int64_t next_ns = 2 * c->resend_wait_ns;
        c->resend_wait_ns = next_ns < RESEND_MOST_NS ? next_ns : RESEND_MOST_NS;
        send_again(c);
    }
}

static void pump(struct pg_client *c)
{
    pump_until(c, INT64_MAX);
}

/* ---- batches ---- */

/* Names of a batch, without duplicates. */
struct names {
    const char *entry[NAMES_MAX];
    size_t length[NAMES_MAX];
    size_t count, bytes;
};

/* Return the index of an item's names, which are added if they are new; NAMES_MAX = no space. */
static size_t name_index(struct names *names, const struct item *item)
{
    for (size_t n = 0; n < names->count; n++)
        if (names->length[n] == item->names_len &&
            memcmp(names->entry[n], item->names, item->names_len) == 0)
            return n;
    if (names->count == NAMES_MAX)
        return NAMES_MAX;
    names->entry[names->count] = item->names;
    names->length[names->count] = item->names_len;
    names->bytes += item->names_len;
    return names->count++;
}

/* Write the message of a batch: frame, names, records, then keys, payloads and extensions. */
static void encode(struct batch *batch, const struct names *names, size_t table_bytes)
{
    struct frame *frame = frame_of(batch);
    *frame = (struct frame){.magic = MAGIC, .version = 1, .message = BATCH};
    frame->count = (uint32_t)batch->items.count;
    frame->names = (uint16_t)names->count;
    frame->names_bytes = (uint32_t)table_bytes;
    frame->detail[0] = (uint64_t)pg_boot_ns();
    char *at = batch->bytes + sizeof *frame;
    for (size_t n = 0; n < names->count; n++) {
        memcpy(at, names->entry[n], names->length[n]);
        at += names->length[n];
    }
    memset(at, 0, table_bytes - names->bytes);
    at += table_bytes - names->bytes;
    char *bytes = at + batch->items.count * sizeof(struct record);
    for (struct item *item = batch->items.first; item != NULL; item = item->next) {
        const size_t length = size_of(item);
        memcpy(at, &item->record, sizeof item->record);
        memcpy(bytes, item->bytes, length);
        at += sizeof item->record;
        bytes += length;
    }
}

/* Make a batch of the records that wait, as many as it may have, and send it. */
static void send_batch(struct pg_client *c)
{
    struct names names = {.count = 0};
    struct items items;
    clear(&items);
    while (c->waiting.count > 0 && items.count < RECORDS_MAX && items.bytes < BODY_GOAL) {
        const size_t name = name_index(&names, c->waiting.first);
        if (name == NAMES_MAX)
            break;
        c->waiting.first->record.name = (uint16_t)name;
        append(&items, take(&c->waiting));
    }
    const size_t table_bytes = (names.bytes + 7) / 8 * 8;
    const size_t length =
        sizeof(struct frame) + table_bytes + items.count * sizeof(struct record) + items.bytes;
    struct batch *batch = malloc(sizeof *batch + length);
    if (batch == NULL) {
        move_all(&c->waiting, &items);
        c->error = "out of memory";
        return;
    }
    *batch = (struct batch){.length = length, .sends = c->connected};
    clear(&batch->items);
    move_all(&batch->items, &items);
    encode(batch, &names, table_bytes);
    number(c, batch, c->sent == NULL ? 0 : frame_of(c->sent)->sequence);
    *c->sent_end = batch;
    c->sent_end = &batch->next;
    c->unanswered++;
    if (c->connected)
        put_message(c, batch->bytes, batch->length);
}

/* [9] Put BUSY records before all others, after a pause, once all batches are answered. */
static void retry_busy(struct pg_client *c)
{
    while (c->unanswered > 0 && c->error == NULL)
        pump(c);
    const struct timespec pause = {.tv_nsec = (long)c->busy_wait_ns};
    nanosleep(&pause, NULL);
    c->busy_wait_ns = 2 * c->busy_wait_ns < BUSY_MOST_NS ? 2 * c->busy_wait_ns : BUSY_MOST_NS;
    move_all(&c->busy, &c->waiting);
    move_all(&c->waiting, &c->busy);
}

/* [2] Send the records that wait, with at most `window` batches without an answer. */
static bool send_waiting(struct pg_client *c)
{
    while (c->waiting.count > 0 && c->error == NULL) {
        if (c->busy.count > 0)
            retry_busy(c);
        while ((c->session == 0 || c->unanswered >= c->window) && c->error == NULL)
            pump(c);
        if (c->busy.count == 0 && c->error == NULL)
            send_batch(c);
    }
    return c->error == NULL;
}

/* ---- calls ---- */

bool pg_fail(struct pg_client *c, const char *error)
{
    c->error = error;
    return false;
}

/* Append bytes, and return the end. */
static char *copy(char *to, struct bytes from)
{
    if (from.length > 0)
        memcpy(to, from.at, from.length);
    return to + from.length;
}

/* Return the item of a record; NULL if memory is exhausted. */
static struct item *make_item(struct pg_topic topic, const struct pg_content *content,
                              struct record record)
{
    const size_t ns = strlen(topic.namespace), tp = strlen(topic.topic);
    const size_t length = content->key.length + content->payload.length + content->extension.length;
    struct item *item = malloc(sizeof *item + length);
    if (item == NULL)
        return NULL;
    record.key_len = (uint8_t)content->key.length;
    record.payload_len = (uint32_t)content->payload.length;
    record.ext_len = (uint32_t)content->extension.length;
    *item = (struct item){.record = record, .names_len = 2 + ns + tp};
    item->names[0] = (char)ns;
    item->names[1] = (char)tp;
    copy(copy(item->names + 2, (struct bytes){topic.namespace, ns}),
         (struct bytes){topic.topic, tp});
    copy(copy(copy(item->bytes, content->key), content->payload), content->extension);
    return item;
}

bool pg_pack(struct pg_client *c, struct pg_topic topic, struct pg_content content,
             struct record record, struct pg_answer *answer)
{
    const size_t ns = strlen(topic.namespace), tp = strlen(topic.topic);
    answer->status = PG_NO_ANSWER;
    if (content.key.length == 0 || content.key.length > 255 || ns == 0 || ns > 63 || tp > 127)
        return pg_fail(c, "a name or a key has an invalid length");
    if (c->error != NULL)
        return false;
    struct item *item = make_item(topic, &content, record);
    if (item == NULL)
        return pg_fail(c, "out of memory");
    item->answer = answer;
    append(&c->waiting, item);
    return c->waiting.count < RECORDS_MAX || send_waiting(c);
}

bool pg_flush(struct pg_client *c)
{
    c->busy_wait_ns = BUSY_FIRST_NS;
    for (;;) {
        send_waiting(c);
        while (c->unanswered > 0 && c->error == NULL)
            pump(c);
        if (c->busy.count == 0 || c->error != NULL)
            return c->error == NULL;
        retry_busy(c);
    }
}

void pg_hook(struct pg_client *c, struct pg_hooks hooks)
{
    c->hooks = hooks;
}

bool pg_step(struct pg_client *c, int64_t until_ns)
{
    if (c->busy.count > 0 && c->unanswered == 0)
        retry_busy(c);
    while (c->waiting.count > 0 && c->session != 0 && c->unanswered < c->window &&
           c->busy.count == 0 && c->error == NULL)
        send_batch(c);
    if (c->error == NULL)
        pump_until(c, until_ns);
    return c->error == NULL;
}

bool pg_ask(struct pg_client *c, uint16_t message, struct bytes body, struct pg_reply *reply)
{
    static uint64_t questions;
    const struct frame frame = {
        .magic = MAGIC, .version = 1, .message = message, .sequence = ++questions};
    c->question = malloc(sizeof frame + body.length);
    if (c->question == NULL) {
        c->error = "out of memory";
        return false;
    }
    memcpy(c->question, &frame, sizeof frame);
    memcpy(c->question + sizeof frame, body.at, body.length);
    c->question_len = sizeof frame + body.length;
    c->reply = reply;
    c->resend_wait_ns = RESEND_FIRST_NS;
    if (c->session != 0)
        send_again(c);
    while (c->question != NULL && c->error == NULL)
        pump(c);
    return c->error == NULL;
}

void pg_ping(struct pg_client *c)
{
    const struct frame ping = {.magic = MAGIC, .version = 1, .message = PING, .session = c->session};
    if (c->session != 0 && c->connected)
        put_message(c, &ping, sizeof ping);
}

const char *pg_error(const struct pg_client *c)
{
    return c->error;
}

struct pg_client *pg_open(const char *endpoint, const char *worker)
{
    static int monitors;
    const int events = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_CLOSED;
    const int reconnect_ms = 10, linger_ms = 0;
    char address[] = "inproc://purgatoryd-000000";
    struct pg_client *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    for (int n = monitors++, digit = (int)sizeof address - 2; n > 0 && digit > 20; n /= 10)
        address[digit--] = (char)('0' + n % 10);
    strncpy(c->worker, worker, sizeof c->worker - 1);
    clear(&c->waiting);
    clear(&c->busy);
    c->sent_end = &c->sent;
    c->resend_wait_ns = RESEND_FIRST_NS;
    c->busy_wait_ns = BUSY_FIRST_NS;
    c->context = zmq_ctx_new();
    c->socket = zmq_socket(c->context, ZMQ_DEALER);
    c->monitor = zmq_socket(c->context, ZMQ_PAIR);
    if (c->socket == NULL || c->monitor == NULL ||
        getrandom(c->nonce, sizeof c->nonce, 0) != (ssize_t)sizeof c->nonce ||
        zmq_setsockopt(c->socket, ZMQ_RECONNECT_IVL, &reconnect_ms, sizeof reconnect_ms) != 0 ||
        zmq_setsockopt(c->socket, ZMQ_LINGER, &linger_ms, sizeof linger_ms) != 0 ||
        zmq_socket_monitor(c->socket, address, events) != 0 ||
        zmq_connect(c->monitor, address) != 0 || zmq_connect(c->socket, endpoint) != 0) {
        pg_close(c);
        return NULL;
    }
    return c;
}

static void free_items(struct items *items)
{
    while (items->count > 0)
        free(take(items));
}

void pg_close(struct pg_client *c)
{
    const struct frame bye = {.magic = MAGIC, .version = 1, .message = BYE, .session = c->session};
    struct frame reply = {.message = 0};
    if (c->session != 0 && c->connected) {
        const int patience_ms = 1000; /* a lost BYE is harmless: this process ends the session */
        zmq_setsockopt(c->socket, ZMQ_RCVTIMEO, &patience_ms, sizeof patience_ms);
        put_message(c, &bye, sizeof bye);
        while (reply.message != BYE && zmq_recv(c->socket, &reply, sizeof reply, 0) > 0)
            ; /* answers and jobs that came before */
    }
    while (c->sent != NULL) {
        struct batch *batch = c->sent;
        c->sent = batch->next;
        free_items(&batch->items);
        free(batch);
    }
    free_items(&c->waiting);
    free_items(&c->busy);
    free(c->question);
    if (c->socket != NULL)
        zmq_socket_monitor(c->socket, NULL, 0);
    if (c->monitor != NULL)
        zmq_close(c->monitor);
    if (c->socket != NULL)
        zmq_close(c->socket);
    if (c->context != NULL)
        zmq_ctx_term(c->context);
    free(c);
}

/* direct.c - direct calls: the caller's thread sends a record or a batch through the channel of a
 * connection, sleeps until the answer comes, and takes it. The engine's thread takes no part.
 *
 * A direct call begins only while the engine is idle, so nothing else of the client is in flight.
 * It ends with a plain answer, or it leaves its message to the engine: when the answer is unusual or
 * late, when a signal arrives, or when the engine needs the channel. Then the message is in flight
 * as if the engine had sent it, so only the session decides what is sent again.
 *
 * The GIL protects all fields. A call releases it only while it waits, and then uses only the
 * channel. Python runs no signal handler within a call of C. So an exception of a handler never
 * separates a message that was sent from the note of it here.
 *
 * A stream of lots (lot.c) begins when the request of a lot is the only one since the engine was
 * idle. The engine then waits with the channel lent while callers send full lots. It takes back the
 * lots without an answer, in order, and the open one. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <linux/futex.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <structmember.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/common.h"

#include "arguments.h"
#include "batch.h"
#include "channel.h"
#include "direct.h"
#include "lot.h"
#include "plain.h"
#include "types.h"

static uint32_t forks;            /* number of forks between the first process and this one; the
                                     channels of an earlier process must not be used */

/* ---- Answer: a call and its outcome -------------------------------------------------------------- */

struct answer {
    PyObject_HEAD
    PyObject *key, *on_done, *namespace, *topic, *payload, *connection, *error, *ended;
    char packed;                  /* the record is in a batch, or was sent */
    char done;
    unsigned long long word;      /* ticket << 8 | enum pg_status */
    long long deadline_ns;
};

static PyMemberDef answer_members[] = {
    {"packed", T_BOOL, offsetof(struct answer, packed), 0, NULL},
    {"done", T_BOOL, offsetof(struct answer, done), 0, NULL},
    {"word", T_ULONGLONG, offsetof(struct answer, word), 0, NULL},
    {"deadline_ns", T_LONGLONG, offsetof(struct answer, deadline_ns), 0, NULL},
    {"key", T_OBJECT, offsetof(struct answer, key), 0, NULL},
    {"on_done", T_OBJECT, offsetof(struct answer, on_done), 0, NULL},
    {"namespace", T_OBJECT, offsetof(struct answer, namespace), 0, NULL},
    {"topic", T_OBJECT, offsetof(struct answer, topic), 0, NULL},
    {"payload", T_OBJECT, offsetof(struct answer, payload), 0, NULL},
    {"connection", T_OBJECT_EX, offsetof(struct answer, connection), 0, NULL},
    {"error", T_OBJECT, offsetof(struct answer, error), 0, NULL},
    {"ended", T_OBJECT, offsetof(struct answer, ended), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static int answer_init(struct answer *a, PyObject *args, PyObject *named UNUSED)
{
    PyObject *key = NULL, *on_done = NULL, *namespace = NULL, *topic = NULL, *payload = NULL;
    if (!PyArg_ParseTuple(args, "|OOOOO", &key, &on_done, &namespace, &topic, &payload))
        return -1;
    renew(&a->key, key);
    renew(&a->on_done, on_done);
    renew(&a->namespace, namespace);
    renew(&a->topic, topic);
    renew(&a->payload, payload);
    return 0;
}

static int answer_traverse(struct answer *a, visitproc visit, void *arg)
{
    PyObject *const objects[] = {a->key, a->on_done, a->namespace, a->topic, a->payload,
                                 a->connection, a->error, a->ended};
    Py_VISIT(Py_TYPE((PyObject *)a));
    for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++)
        Py_VISIT(objects[i]);
    return 0;
}

static int answer_clear(struct answer *a)
{
    PyObject **const places[] = {&a->key, &a->on_done, &a->namespace, &a->topic, &a->payload,
                                 &a->connection, &a->error, &a->ended};
    for (unsigned i = 0; i < sizeof places / sizeof *places; i++)
        renew(places[i], NULL);
    return 0;
}

static void answer_dealloc(struct answer *a)
{
    PyObject_GC_UnTrack((PyObject *)a);
    answer_clear(a);
    freed((PyObject *)a);
}

/* ---- Requests: the queue of the engine --------------------------------------------------------- */

struct requests {
    PyObject_HEAD
    PyObject *put, *empty;        /* methods of the queue */
    PyObject *nothing;            /* a request that only wakes the engine */
    int kicked;                   /* eventfd that ends the wait for a message; -1 = none */
    bool idle;                    /* the engine waits for a request: direct calls may begin */
    bool streams;                 /* since then only one request came, that of a lot: callers may send
                                     full lots themselves */
    uint64_t ends;                /* number of requests that ended the open lots (lot.c) */
};

static int requests_init(struct requests *r, PyObject *args, PyObject *named UNUSED)
{
    PyObject *queue, *nothing;
    if (!PyArg_ParseTuple(args, "OOi", &queue, &nothing, &r->kicked))
        return -1;
    r->nothing = Py_NewRef(nothing);
    r->put = PyObject_GetAttrString(queue, "put");
    r->empty = PyObject_GetAttrString(queue, "empty");
    return r->put != NULL && r->empty != NULL ? 0 : -1;
}

static int requests_traverse(struct requests *r, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)r));
    Py_VISIT(r->put);
    Py_VISIT(r->empty);
    Py_VISIT(r->nothing);
    return 0;
}

static int requests_clear(struct requests *r)
{
    Py_CLEAR(r->put);
    Py_CLEAR(r->empty);
    Py_CLEAR(r->nothing);
    return 0;
}

static void requests_dealloc(struct requests *r)
{
    PyObject_GC_UnTrack((PyObject *)r);
    requests_clear(r);
    freed((PyObject *)r);
}

/* One step for the interpreter, so a later call of the same thread stays behind the request. */
static PyObject *requests_put(struct requests *r, PyObject *request)
{
    r->idle = r->streams = false;
    r->ends++;
    return PyObject_CallFunctionObjArgs(r->put, request, NULL);
}

static PyObject *requests_open(struct requests *r, PyObject *request)
{
    r->streams = r->idle;
    r->idle = false;
    return PyObject_CallFunctionObjArgs(r->put, request, NULL);
}

uint64_t requests_ends(PyObject *requests)
{
    return ((const struct requests *)requests)->ends;
}

static PyMemberDef requests_members[] = {
    {"streams", T_BOOL, offsetof(struct requests, streams), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

uint32_t fork_count(void) { return forks; }

static PyObject *requests_admit(struct requests *r, PyObject *none UNUSED)
{
    PyObject *empty = PyObject_CallNoArgs(r->empty);
    if (empty == NULL)
        return NULL;
    r->idle = PyObject_IsTrue(empty) == 1;
    Py_DECREF(empty);
    Py_RETURN_NONE;
}

/* ---- Direct: the direct calls of a connection ---------------------------------------------------- */

struct direct {
    PyObject_HEAD
    struct requests *requests;
    struct channel channel;
    struct pg_frame head;         /* head of the next message, except what the record determines */
    bool same_clock;              /* messages have their time of packing */
    int virtual_clock;            /* as in struct times */
    uint64_t questions;           /* number of questions that were sent */
    int64_t begun_ns;             /* CLOCK_BOOTTIME: start of the last call */
    int64_t answered_ns;          /* start of the last answered call */
    bool runs;                    /* a direct call runs */
    bool recalled;                /* the engine waits for the end of a direct call */
    uint32_t ended;               /* number of direct calls that have ended; a futex */
    uint32_t forks;               /* `forks` in the process that has the channel */
    PyObject *connection, *namespace; /* values for each Answer */
    PyObject *topics;             /* dict: entry of the name table by topic */
    PyObject *entry;              /* entry of calls that name no topic */
    PyObject *modes;              /* dict: enum pg_put_mode by name */
    int64_t wait_ns;              /* longest time until a call leaves its message to the engine; 0 =
                                     calls of an event loop do not wait */
    PyObject *call, *message;     /* the Answer or Batch and the message that were left to the
                                     engine, or NULL */
    PyObject *lot;                /* the open lot, which callers send once it is full; NULL = none */
    struct { PyObject *lot, *message; } flights[PG_WINDOW]; /* lots that were sent and have no
                                     answer, in order */
    unsigned flying;              /* number of these lots */
    unsigned window;              /* largest number of batches without an answer */
    unsigned long long lots;      /* number of lots that callers have sent */
};

enum end { ANSWERED, LEFT };

static PyTypeObject *answer_type, *requests_type;

bool is_requests(PyObject *object) { return PyObject_TypeCheck(object, requests_type); }

static PyTypeObject *direct_type;

bool is_direct(PyObject *object) { return PyObject_TypeCheck(object, direct_type); }

static int direct_init(struct direct *d, PyObject *args, PyObject *named UNUSED)
{
    PyObject *requests, *connection, *namespace, *topics, *entry, *modes;
    long long wait_ns, spin_ns;
    int adapts;
    if (!PyArg_ParseTuple(args, "O!OOO!SO!LLp", requests_type, &requests, &connection, &namespace,
                          &PyDict_Type, &topics, &entry, &PyDict_Type, &modes, &wait_ns, &spin_ns,
                          &adapts))
        return -1;
    d->requests = (struct requests *)Py_NewRef(requests);
    d->connection = Py_NewRef(connection);
    d->namespace = Py_NewRef(namespace);
    d->topics = Py_NewRef(topics);
    d->entry = Py_NewRef(entry);
    d->modes = Py_NewRef(modes);
    d->wait_ns = wait_ns;
    d->channel.spin = (struct spin){.longest_ns = spin_ns, .adapts = adapts};
    d->channel.kicked_fd = d->requests->kicked;
    d->forks = forks;
    return 0;
}

static int direct_traverse(struct direct *d, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)d));
    Py_VISIT((PyObject *)d->requests);
    Py_VISIT(d->connection);
    Py_VISIT(d->topics);
    Py_VISIT(d->modes);
    Py_VISIT(d->call);
    Py_VISIT(d->lot);
    for (unsigned i = 0; i < d->flying; i++)
        Py_VISIT(d->flights[i].lot);
    return 0;
}

static void flight_drop(struct direct *d)
{
    PyObject *lot = d->flights[0].lot, *message = d->flights[0].message;
    memmove(d->flights, d->flights + 1, --d->flying * sizeof *d->flights);
    Py_DECREF(lot);
    Py_DECREF(message);
}

static int direct_clear(struct direct *d)
{
    Py_CLEAR(d->requests);
    Py_CLEAR(d->connection);
    Py_CLEAR(d->namespace);
    Py_CLEAR(d->topics);
    Py_CLEAR(d->entry);
    Py_CLEAR(d->modes);
    Py_CLEAR(d->call);
    Py_CLEAR(d->message);
    Py_CLEAR(d->lot);
    while (d->flying > 0)
        flight_drop(d);
    return 0;
}

static void direct_dealloc(struct direct *d)
{
    PyObject_GC_UnTrack((PyObject *)d);
    direct_clear(d);
    freed((PyObject *)d);
}

/* Note the descriptors and addresses of a channel. */
static void channel_set(struct channel *c, const char *kind, const uintptr_t address[2],
                        const int fd[2])
{
    c->kind = strcmp(kind, "zmq") == 0 ? &zmq_channel : &ring_channel;
    if (c->kind == &zmq_channel) {
        c->zmq = (void *)address[0];
        c->monitor = (void *)address[1];
        c->zmq_fd = fd[0];
        c->monitor_fd = fd[1];
    } else {
        c->out = (struct pg_ring_end *)address[0];
        c->in = (struct pg_ring_end *)address[1];
        c->bell = fd[0];
        c->socket = fd[1];
    }
    c->kind->open(c);
}

static PyObject *direct_lend(struct direct *d, PyObject *args)
{
    const char *kind;
    unsigned long long first, second, session, sequence;
    int fd[2], same_clock;
    unsigned flags;
    if (!PyArg_ParseTuple(args, "sKKiiKKIIpp", &kind, &first, &second, &fd[0], &fd[1], &session,
                          &sequence, &flags, &d->window, &same_clock, &d->virtual_clock))
        return NULL;
    const uintptr_t address[] = {(uintptr_t)first, (uintptr_t)second};
    channel_set(&d->channel, kind, address, fd);
    d->recalled = false;
    d->same_clock = same_clock;
    d->head = (struct pg_frame){.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                                .message = PG_M_BATCH, .session = session, .sequence = sequence,
                                .flags = flags};
    Py_RETURN_NONE;
}

/* Wait until no direct call runs. A call that sleeps wakes up and leaves its message. */
static void interrupt_call(struct direct *d)
{
    if (d->runs) {
        d->recalled = true;
        d->channel.kind->recall(&d->channel);
    }
    while (d->runs) {
        const uint32_t ended = d->ended;
        Py_BEGIN_ALLOW_THREADS
        syscall(SYS_futex, &d->ended, FUTEX_WAIT_PRIVATE, ended, NULL, NULL, 0);
        Py_END_ALLOW_THREADS
    }
}

/* Return the message that a call received and did not take; None = there is none. Messages in a ring
 * stay there. */
static PyObject *unread(struct channel *c)
{
    if (!c->holds)
        Py_RETURN_NONE;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)c->kind->next(c));
    if (bytes != NULL)
        c->kind->take(c, PyBytes_AsString(bytes));
    return bytes;
}

/* Return the calls and lots that were sent and have no answer, each with its message, in order. */
static PyObject *unanswered(struct direct *d)
{
    PyObject *found = PyTuple_New(d->flying + (d->call != NULL));
    for (unsigned i = 0; found != NULL && i < d->flying; i++)
        PyTuple_SetItem(found, i, Py_BuildValue("OO", d->flights[i].lot, d->flights[i].message));
    if (found != NULL && d->call != NULL)
        PyTuple_SetItem(found, d->flying, Py_BuildValue("OO", d->call, d->message));
    return found;
}

static PyObject *direct_take_back(struct direct *d, PyObject *none UNUSED)
{
    d->requests->idle = d->requests->streams = false;
    if (d->channel.kind == NULL)
        Py_RETURN_NONE;
    interrupt_call(d);
    PyObject *taken = unanswered(d), *rest = unread(&d->channel);
    PyObject *lot = d->lot != NULL ? d->lot : Py_NewRef(Py_None);
    d->channel.kind = NULL;
    d->lot = NULL;
    Py_CLEAR(d->call);
    Py_CLEAR(d->message);
    while (d->flying > 0)
        flight_drop(d);
    return Py_BuildValue("KNNN", (unsigned long long)d->head.sequence, taken, lot, rest);
}

/* ---- a direct call, without the GIL -------------------------------------------------------------- */

/* Return whether a message is the answer to the batch with this sequence. */
static bool answers(const struct direct *d, const struct pg_frame *reply, uint64_t sequence)
{
    return reply->magic == PG_WIRE_MAGIC && reply->version == PG_WIRE_VERSION &&
           reply->message == PG_M_BATCH && reply->session == d->head.session &&
           reply->sequence == sequence && reply->error == 0;
}

static bool is_plain(const struct direct *d, const struct pg_frame *reply,
                     const struct pg_result *result)
{
    const uint8_t status = (uint8_t)result->ticket;
    return answers(d, reply, d->head.sequence - 1) && status != PG_ST_BUSY;
}

/* Take the next message if it is the plain answer. The engine takes any other message. */
static enum end take_plain(struct direct *d, struct pg_result *result)
{
    struct { struct pg_frame head; struct pg_result result; } reply;
    struct channel *c = &d->channel;
    if (c->kind->next(c) != sizeof reply)
        return LEFT;
    c->kind->peek(c, &reply, sizeof reply);
    if (!is_plain(d, &reply.head, &reply.result))
        return LEFT;
    c->kind->take(c, &reply);
    *result = reply.result;
    return ANSWERED;
}

/* Wait until a message comes. Returns false if the call has to leave its message. */
static bool waited(struct direct *d, int64_t limit_ns)
{
    d->channel.kind->rouse(&d->channel);
    return d->channel.kind->wait(&d->channel, limit_ns);
}

/* ---- a direct call ------------------------------------------------------------------------------- */

/* Send a message. Returns false, without an effect, if the message does not fit or the daemon has
 * ended. Checking the connection is a system call; it is left out if the daemon answered a moment
 * ago. */
static bool sent(struct direct *d, const void *message, uint64_t bytes, int64_t now_ns)
{
    enum { MOMENT_NS = 1000000 };
    struct channel *c = &d->channel;
    return (now_ns - d->answered_ns < MOMENT_NS || !c->kind->ended(c)) &&
           c->kind->put(c, message, bytes);
}

static PyObject *answered(struct direct *d, struct answer *call, const struct pg_result *result)
{
    d->answered_ns = d->begun_ns;
    call->word = result->ticket;
    call->deadline_ns = result->deadline_ns;
    call->done = 1;
    Py_RETURN_TRUE;
}

static void note_end(struct direct *d)
{
    d->runs = false;
    d->ended++;
    if (d->recalled)
        syscall(SYS_futex, &d->ended, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void retain(struct direct *d, PyObject *call, PyObject *message)
{
    d->call = Py_NewRef(call);
    d->message = Py_NewRef(message);
}

/* Leave a message to the engine, and wake it. */
static PyObject *leave(struct direct *d, PyObject *call, PyObject *message)
{
    retain(d, call, message);
    PyObject *none = requests_put(d->requests, d->requests->nothing);
    if (none == NULL)
        return NULL;
    Py_DECREF(none);
    Py_RETURN_NONE;
}

static PyObject *exchanged(struct direct *d, struct answer *call, PyObject *message,
                           int64_t limit_ns)
{
    struct pg_result result;
    enum end end;
    d->runs = true;
    Py_BEGIN_ALLOW_THREADS
    end = waited(d, limit_ns) ? take_plain(d, &result) : LEFT;
    Py_END_ALLOW_THREADS
    PyObject *outcome = end == ANSWERED ? answered(d, call, &result)
                                        : leave(d, (PyObject *)call, message);
    note_end(d);
    return outcome;
}

/* ---- a direct call of an event loop --------------------------------------------------------------- */

/* Return True if the call has its plain answer; False if it has another one; None if it has none and
 * a descriptor of the channel will become readable. */
static PyObject *looked_for(struct direct *d)
{
    struct pg_result result;
    struct channel *c = &d->channel;
    if (c->kind->next(c) == 0 && c->kind->announce(c))
        Py_RETURN_NONE;
    if (take_plain(d, &result) != ANSWERED)
        Py_RETURN_FALSE;
    PyObject *outcome = answered(d, (struct answer *)d->call, &result);
    Py_CLEAR(d->call);
    Py_CLEAR(d->message);
    d->requests->idle = true;
    return outcome;
}

static PyObject *posted(struct direct *d, struct answer *call, PyObject *message)
{
    retain(d, (PyObject *)call, message);
    d->requests->idle = false;
    d->channel.kind->rouse(&d->channel);
    d->runs = true;
    Py_BEGIN_ALLOW_THREADS
    d->channel.kind->spin(&d->channel);
    Py_END_ALLOW_THREADS
    note_end(d);
    return looked_for(d);
}

/* Look for the answer after a descriptor of the channel became readable. */
static PyObject *direct_collect(struct direct *d, PyObject *none UNUSED)
{
    if (d->call == NULL || !d->channel.kind->drain(&d->channel))
        Py_RETURN_FALSE;
    return looked_for(d);
}

/* ---- the message of a direct call ------------------------------------------------------------------ */

/* Return the message of a direct call that is made at `now_ns`. */
static PyObject *message_of(struct direct *d, const struct pack_single *s, int64_t now_ns)
{
    PyObject *message = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)pack_single_bytes(s));
    if (message == NULL)
        return NULL;
    d->begun_ns = now_ns;
    d->head.detail[0] = d->same_clock ? (uint64_t)now_ns : 0;
    pack_single_write(s, d->head, (uint8_t *)PyBytes_AsString(message));
    return message;
}

static int64_t limit_ns_of(const struct direct *d, double limit_s)
{
    return limit_s * 1e9 < (double)d->wait_ns ? (int64_t)(limit_s * 1e9) : d->wait_ns;
}

static bool may_begin(const struct direct *d)
{
    return d->requests->idle && d->channel.kind != NULL && !d->runs && d->forks == forks;
}

static PyObject *called(struct direct *d, struct answer *call, double limit_s,
                        const struct pack_single *s, int64_t now_ns)
{
    PyObject *message = message_of(d, s, now_ns);
    if (message == NULL)
        return NULL;
    PyObject *outcome;
    if (!sent(d, PyBytes_AsString(message), pack_single_bytes(s), now_ns)) {
        Py_DECREF(message);
        Py_RETURN_FALSE;
    }
    call->packed = 1;
    d->head.sequence++;
    if (d->wait_ns == 0)
        outcome = posted(d, call, message);
    else
        outcome = exchanged(d, call, message, limit_ns_of(d, limit_s));
    Py_DECREF(message);
    return outcome;
}

static PyObject *direct_record(struct direct *d, PyObject *args)
{
    struct pack_single s = {.entry = {NULL, 0}};
    struct pg_record *r = &s.record;
    struct answer *call;
    double limit_s;
    Py_ssize_t entry, key, payload, extension;
    if (!PyArg_ParseTuple(args, "O!dy#bbby#bby#y#LK", answer_type, &call, &limit_s, &s.entry.at,
                          &entry, &r->op, &r->mode, &r->key_type, &s.key.at, &key, &r->time_kind,
                          &r->flags, &s.payload.at, &payload, &s.extension.at, &extension,
                          &r->time_ns, &r->value))
        return NULL;
    if (key > PG_KEY_MAX)
        return PyErr_Format(PyExc_ValueError, "the key is too long");
    if (!may_begin(d))
        Py_RETURN_FALSE;
    s.entry.bytes = (uint64_t)entry;
    s.key.bytes = (uint64_t)key;
    s.payload.bytes = (uint64_t)payload;
    s.extension.bytes = (uint64_t)extension;
    return called(d, call, limit_s, &s, clock_ns(CLOCK_BOOTTIME));
}

/* ---- calls with plain arguments --------------------------------------------------------------- */

/* Get the arguments of a call: (Answer, limit in s, tuple of `count` arguments). */
static bool arguments_of(PyObject *a[], Py_ssize_t count, struct answer **call, double *limit_s,
                         PyObject *args)
{
    PyObject *given;
    if (!PyArg_ParseTuple(args, "O!dO!", answer_type, call, limit_s, &PyTuple_Type, &given))
        return false;
    for (Py_ssize_t i = 0; i < count; i++)
        if ((a[i] = PyTuple_GetItem(given, i)) == NULL)
            return false;
    return true;
}

static PyObject *plain_call(struct direct *d, struct answer *call, double limit_s,
                            enum outcome found, const struct item *item, struct pack_text entry,
                            int64_t now_ns)
{
    if (found == FAILED)
        return NULL;
    if (found == ODD)
        Py_RETURN_FALSE;
    renew(&call->connection, d->connection);
    const struct pack_single s = {.record = item->head, .entry = entry, .key = item->key,
                                  .payload = item->payload, .extension = item->extension};
    return called(d, call, limit_s, &s, now_ns);
}

static PyObject *direct_add(struct direct *d, PyObject *args)
{
    PyObject *a[ADD_ARGUMENTS] = {NULL};
    struct item item = {.payload = {NULL, 0}};
    struct pack_text entry;
    struct answer *call;
    double limit_s;
    if (!arguments_of(a, ADD_ARGUMENTS, &call, &limit_s, args))
        return NULL;
    if (!may_begin(d))
        Py_RETURN_FALSE;
    const struct times times = {d->virtual_clock, clock_ns(CLOCK_BOOTTIME)};
    renew(&call->key, a[ADD_KEY]);
    renew(&call->namespace, d->namespace);
    renew(&call->topic, a[ADD_TOPIC]);
    renew(&call->payload, a[ADD_PAYLOAD]);
    enum outcome found = add_of(&item, &times, a);
    if (found == PLAIN)
        found = mode_of(&item, d->modes, a[ADD_MODE]);
    if (found == PLAIN)
        found = topic_of(&entry, d->topics, a[ADD_TOPIC]);
    return plain_call(d, call, limit_s, found, &item, entry, times.now_ns);
}

static PyObject *direct_cancel(struct direct *d, PyObject *args)
{
    PyObject *a[CANCEL_ARGUMENTS] = {NULL};
    struct item item = {.payload = {NULL, 0}};
    struct pack_text entry;
    struct answer *call;
    double limit_s;
    if (!arguments_of(a, CANCEL_ARGUMENTS, &call, &limit_s, args))
        return NULL;
    if (!may_begin(d))
        Py_RETURN_FALSE;
    renew(&call->key, a[CANCEL_KEY]);
    enum outcome found = cancel_of(&item, a);
    if (found == PLAIN)
        found = bytes_of(&entry, d->entry, UINT64_MAX);
    return plain_call(d, call, limit_s, found, &item, entry, clock_ns(CLOCK_BOOTTIME));
}

/* ---- a question ----------------------------------------------------------------------------------- */

/* The numbers of questions differ from those of the session. */
static const uint64_t FIRST_QUESTION = UINT64_C(1) << 63;

/* Return the next message if it is the plain answer to a question; None = the engine takes it. */
static PyObject *reply_taken(struct direct *d, uint64_t question)
{
    struct pg_frame head;
    struct channel *c = &d->channel;
    const uint64_t bytes = c->kind->next(c);
    if (bytes < sizeof head)
        Py_RETURN_NONE;
    c->kind->peek(c, &head, sizeof head);
    if (head.message != PG_M_QUERY || head.sequence != question || head.error != 0 ||
        head.session != d->head.session)
        Py_RETURN_NONE;
    PyObject *reply = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (reply == NULL)
        return NULL;
    c->kind->take(c, PyBytes_AsString(reply));
    return reply;
}

static PyObject *asked(struct direct *d, const struct item *item, struct pack_text entry,
                       double limit_s)
{
    uint8_t message[sizeof(struct pg_frame) + sizeof(struct pg_record) + 3 * PG_KEY_MAX];
    struct pg_frame head = d->head;
    bool came;
    const struct pack_single s = {.record = item->head, .entry = entry, .key = item->key};
    head.message = PG_M_QUERY;
    head.sequence = FIRST_QUESTION + d->questions++;
    head.flags = 0;
    head.detail[0] = 0;
    if (pack_single_bytes(&s) > sizeof message)
        Py_RETURN_NONE;
    pack_single_write(&s, head, message);
    if (!sent(d, message, pack_single_bytes(&s), clock_ns(CLOCK_BOOTTIME)))
        Py_RETURN_NONE;
    d->runs = true;
    Py_BEGIN_ALLOW_THREADS
    came = waited(d, limit_ns_of(d, limit_s));
    Py_END_ALLOW_THREADS
    PyObject *reply = came ? reply_taken(d, head.sequence) : Py_NewRef(Py_None);
    note_end(d);
    return reply;
}

static PyObject *direct_get(struct direct *d, PyObject *args)
{
    struct item item = {.payload = {NULL, 0}};
    struct pack_text entry;
    PyObject *key;
    double limit_s;
    if (!PyArg_ParseTuple(args, "dO", &limit_s, &key))
        return NULL;
    if (!may_begin(d) || d->wait_ns == 0 || key_of(&item, key) != PLAIN ||
        bytes_of(&entry, d->entry, UINT64_MAX) != PLAIN)
        Py_RETURN_NONE;
    item.head.op = PG_OP_GET;
    return asked(d, &item, entry, limit_s);
}

static PyObject *direct_find_zmq(PyObject *none UNUSED, PyObject *path)
{
    const char *text = PyUnicode_AsUTF8AndSize(path, NULL);
    return text == NULL ? NULL : PyBool_FromLong(zmq_find(text));
}

/* ---- lots ----------------------------------------------------------------------------------------- */

void answer_settle(PyObject *call, const struct pg_result *result)
{
    struct answer *a = (struct answer *)call;
    a->word = result->ticket;
    a->deadline_ns = result->deadline_ns;
    a->packed = a->done = 1;
}

bool is_answer(PyObject *object) { return PyObject_TypeCheck(object, answer_type); }

/* The answer to a batch. The GIL protects it. */
static struct { struct pg_frame head; struct pg_result results[PG_BATCH_RECORDS]; } reply;

/* Copy the next message to `reply` if it is an answer to the batch with this sequence, and has
 * nothing but results. Returns their number; 0 = another message, or none. */
static uint64_t results_come(struct direct *d, uint64_t sequence)
{
    struct channel *c = &d->channel;
    const uint64_t bytes = c->kind->next(c);
    if (bytes <= sizeof reply.head || bytes > sizeof reply)
        return 0;
    c->kind->peek(c, &reply, bytes);
    const uint64_t count = (bytes - sizeof reply.head) / sizeof *reply.results;
    return answers(d, &reply.head, sequence) &&
                   bytes == sizeof reply.head + count * sizeof *reply.results
               ? count
               : 0;
}

/* Take the next message if it is the plain answer to the first lot in flight. */
static bool take_results(struct direct *d)
{
    const uint64_t count = d->flying != 0 ? results_come(d, d->head.sequence - d->flying) : 0;
    if (count == 0 || !lot_answered(d->flights[0].lot, reply.results, count))
        return false;
    d->channel.kind->take(&d->channel, &reply);
    d->answered_ns = d->begun_ns;
    flight_drop(d);
    return true;
}

/* Sleep until the first lot in flight has its plain answer. Returns false if it has not. A call that
 * does not wait sleeps at most as long as another thread of Python may delay it. */
static bool results_awaited(struct direct *d)
{
    enum { SWITCH_INTERVAL_NS = 5000000 };
    bool came;
    if (d->flying == 0)
        return false;
    d->runs = true;
    Py_BEGIN_ALLOW_THREADS
    came = waited(d, SWITCH_INTERVAL_NS);
    Py_END_ALLOW_THREADS
    note_end(d);
    return came && take_results(d);
}

/* Send the message of a lot. */
static bool lot_sent(struct direct *d, PyObject *lot, PyObject *message)
{
    const int64_t now_ns = clock_ns(CLOCK_BOOTTIME);
    struct pg_frame frame = d->head;
    frame.detail[0] = d->same_clock ? (uint64_t)now_ns : 0;
    frame.detail[1] = d->flying;
    if (d->flying == PG_WINDOW || d->flying == d->window)
        return false;
    lot_frame(lot, frame, (uint8_t *)PyBytes_AsString(message));
    if (!sent(d, PyBytes_AsString(message), (uint64_t)PyBytes_Size(message), now_ns))
        return false;
    d->begun_ns = now_ns;
    d->head.sequence++;
    d->lots++;
    lot_sent_note(lot);
    d->flights[d->flying].lot = Py_NewRef(lot);
    d->flights[d->flying++].message = Py_NewRef(message);
    d->channel.kind->rouse(&d->channel);
    return true;
}

bool direct_streams(PyObject *direct, PyObject *lot)
{
    const struct direct *d = (const struct direct *)direct;
    return d->lot == lot && d->channel.kind != NULL && !d->runs && d->forks == forks &&
           d->requests->streams;
}

bool direct_send(PyObject *direct, PyObject *lot, PyObject *next)
{
    struct direct *d = (struct direct *)direct;
    PyObject *message = lot_message(lot);
    if (message == NULL)
        return false;
    while (take_results(d))
        continue;
    bool done = lot_sent(d, lot, message);
    while (!done && results_awaited(d))
        done = lot_sent(d, lot, message);
    Py_DECREF(message);
    if (!done)
        return false;
    d->lot = d->requests->streams ? Py_NewRef(next) : NULL;
    Py_DECREF(lot);
    return d->lot != NULL;
}

/* Let callers send a lot themselves, if its request is the only one since the engine became idle. */
static PyObject *direct_stream(struct direct *d, PyObject *lot)
{
    if (d->requests->streams && d->channel.kind != NULL && d->lot == NULL && !d->runs &&
        d->wait_ns != 0)
        d->lot = Py_NewRef(lot);
    Py_RETURN_NONE;
}

/* ---- a batch ------------------------------------------------------------------------------------------ */

struct bulk {                     /* a direct call with a batch */
    PyObject *batch;              /* the Batch */
    double limit_s;
    struct pg_frame frame;        /* count, names and names_bytes are set */
    PyObject *body;
    PyObject *parts, *open;       /* list of results; set of indexes without results */
    Py_ssize_t index;
};

static bool none_busy(uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        if ((reply.results[i].ticket & 0xff) == PG_ST_BUSY)
            return false;
    return true;
}

/* Take the next message if it is the plain answer to a batch, and store its results. */
static bool take_bulk(struct direct *d, const struct bulk *b)
{
    const uint64_t count = results_come(d, d->head.sequence - 1);
    PyObject *index = PyLong_FromSsize_t(b->index), *results = NULL;
    if (index != NULL && count == b->frame.count && none_busy(count))
        results = PyBytes_FromStringAndSize((const char *)reply.results,
                                            (Py_ssize_t)(count * sizeof *reply.results));
    const bool taken = results != NULL && PyList_SetItem(b->parts, b->index, results) == 0 &&
                       PySet_Discard(b->open, index) >= 0;
    Py_XDECREF(index);
    if (taken)
        d->channel.kind->take(&d->channel, &reply);
    PyErr_Clear();                /* without memory the engine takes the message */
    return taken;
}

static PyObject *bulk_message(struct direct *d, const struct bulk *b, int64_t now_ns)
{
    const Py_ssize_t bytes = PyBytes_Size(b->body);
    PyObject *message = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)sizeof b->frame + bytes);
    struct pg_frame frame = d->head;
    if (message == NULL)
        return NULL;
    frame.count = b->frame.count;
    frame.names = b->frame.names;
    frame.names_bytes = b->frame.names_bytes;
    frame.detail[0] = d->same_clock ? (uint64_t)now_ns : 0;
    memcpy(PyBytes_AsString(message), &frame, sizeof frame);
    memcpy(PyBytes_AsString(message) + sizeof frame, PyBytes_AsString(b->body), (size_t)bytes);
    return message;
}

/* Wait for the answer to a batch that was sent. */
static PyObject *bulk_awaited(struct direct *d, const struct bulk *b, PyObject *message)
{
    bool came;
    d->runs = true;
    Py_BEGIN_ALLOW_THREADS
    came = waited(d, limit_ns_of(d, b->limit_s));
    Py_END_ALLOW_THREADS
    PyObject *outcome;
    if (came && take_bulk(d, b)) {
        d->answered_ns = d->begun_ns;
        outcome = Py_NewRef(Py_None);
    } else {
        outcome = leave(d, b->batch, message);
    }
    note_end(d);
    return outcome;
}

static PyObject *direct_batch(struct direct *d, PyObject *args)
{
    struct bulk b = {.batch = NULL};
    unsigned count, names, names_bytes;
    if (!PyArg_ParseTuple(args, "OdIIISO!O!n", &b.batch, &b.limit_s, &count, &names, &names_bytes,
                          &b.body, &PyList_Type, &b.parts, &PySet_Type, &b.open, &b.index))
        return NULL;
    if (!may_begin(d) || d->wait_ns == 0)
        Py_RETURN_NONE;
    b.frame.count = count;
    b.frame.names = names;
    b.frame.names_bytes = names_bytes;
    const int64_t now_ns = clock_ns(CLOCK_BOOTTIME);
    PyObject *message = bulk_message(d, &b, now_ns);
    if (message == NULL)
        return NULL;
    PyObject *outcome = Py_NewRef(Py_None);
    if (sent(d, PyBytes_AsString(message), (uint64_t)PyBytes_Size(message), now_ns)) {
        d->begun_ns = now_ns;
        d->head.sequence++;
        Py_DECREF(outcome);
        PyObject_SetAttrString(b.batch, "sent", Py_True);
        outcome = bulk_awaited(d, &b, message);
    }
    Py_DECREF(message);
    return outcome;
}

/* ---- the types ------------------------------------------------------------------------------------ */

static PyMethodDef requests_methods[] = {
    {"put", (PyCFunction)requests_put, METH_O,
     "Put a request into the queue; no direct call begins before the engine has taken it."},
    {"open", (PyCFunction)requests_open, METH_O,
     "Put the request of a lot into the queue. The lot stays open until the next put()."},
    {"admit", (PyCFunction)requests_admit, METH_NOARGS,
     "Let direct calls begin, if the queue is empty."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef direct_methods[] = {
    {"lend", (PyCFunction)direct_lend, METH_VARARGS, "Let direct calls use a channel."},
    {"find_zmq", direct_find_zmq, METH_O | METH_STATIC, "Find the functions of libzmq."},
    {"take_back", (PyCFunction)direct_take_back, METH_NOARGS,
     "Wait until no direct call runs, and let none begin."},
    {"stream", (PyCFunction)direct_stream, METH_O, "Let callers send a lot once it is full."},
    {"collect", (PyCFunction)direct_collect, METH_NOARGS,
     "Look for the answer of a call of an event loop."},
    {"record", (PyCFunction)direct_record, METH_VARARGS, "Make a direct call with one record."},
    {"add", (PyCFunction)direct_add, METH_VARARGS, "Make a direct call of add()."},
    {"cancel", (PyCFunction)direct_cancel, METH_VARARGS, "Make a direct call of cancel()."},
    {"batch", (PyCFunction)direct_batch, METH_VARARGS, "Make a direct call with a batch."},
    {"get", (PyCFunction)direct_get, METH_VARARGS, "Make a direct call of get()."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot answer_slots[] = {
    DOC("A call and its outcome."),
    {Py_tp_init, answer_init},
    {Py_tp_dealloc, answer_dealloc},
    {Py_tp_traverse, answer_traverse},
    {Py_tp_clear, answer_clear},
    {Py_tp_members, answer_members},
    {0, NULL},
};
static PyType_Slot requests_slots[] = {
    DOC("The queue of a client's engine."),
    {Py_tp_init, requests_init},
    {Py_tp_dealloc, requests_dealloc},
    {Py_tp_traverse, requests_traverse},
    {Py_tp_clear, requests_clear},
    {Py_tp_members, requests_members},
    {Py_tp_methods, requests_methods},
    {0, NULL},
};
static PyMemberDef direct_members[] = {
    {"lots", T_ULONGLONG, offsetof(struct direct, lots), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot direct_slots[] = {
    DOC("The direct calls of a connection."),
    {Py_tp_init, direct_init},
    {Py_tp_dealloc, direct_dealloc},
    {Py_tp_traverse, direct_traverse},
    {Py_tp_clear, direct_clear},
    {Py_tp_members, direct_members},
    {Py_tp_methods, direct_methods},
    {0, NULL},
};
static PyType_Spec specs[] = {
    {"purgatoryd.clients._pack.Answer", sizeof(struct answer), 0,
     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, answer_slots},
    {"purgatoryd.clients._pack.Requests", sizeof(struct requests), 0,
     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, requests_slots},
    {"purgatoryd.clients._pack.Direct", sizeof(struct direct), 0,
     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, direct_slots},
};

static void forked(void) { forks++; }

bool direct_types_add(PyObject *module)
{
    static const char *const names[] = {"Answer", "Requests", "Direct"};
    PyTypeObject *types[3];
    for (int i = 0; i < 3; i++) {
        types[i] = (PyTypeObject *)PyType_FromSpec(&specs[i]);
        if (types[i] == NULL || PyModule_AddObjectRef(module, names[i], (PyObject *)types[i]) != 0)
            return false;
    }
    answer_type = types[0];
    requests_type = types[1];
    direct_type = types[2];
    return pthread_atfork(NULL, NULL, forked) == 0 || PyErr_NoMemory() != NULL;
}

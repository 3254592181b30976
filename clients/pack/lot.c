/* lot.c - lots: calls that do not wait, which their callers pack into one batch (clients/lots.py).
 *
 * A lot has its place among the requests to the engine. Callers add records to it until another
 * request follows, until the engine takes the lot, or until the lot is full. Packing a call is one
 * step in C under the GIL, so neither a signal handler nor another thread sees half of it. Such a
 * call makes one object, its Receipt; an Answer is made when somebody asks for the outcome. */

#include "lot.h"

#include <string.h>
#include <structmember.h>
#include <time.h>

#include "arguments.h"
#include "batch.h"
#include "direct.h"
#include "plain.h"
#include "types.h"

/* ---- Lot --------------------------------------------------------------------------------------- */

struct lot {
    PyObject_HEAD
    struct pack_batch batch;
    PyObject *requests;           /* the requests to the engine */
    uint64_t ends;                /* requests_ends() when the lot was made */
    uint32_t forks;               /* fork_count() when the lot was made */
    char shut;                    /* the lot takes no further record */
    char collected;               /* the engine has the batch, or it was sent */
    PyObject *direct;             /* the Direct that may send the lot; NULL = only the engine sends */
    int virtual_clock;            /* as in struct times */
    unsigned records_max;
    unsigned long long bytes_max;
    PyObject *topics, *modes;     /* dicts: entry of the name table by topic, number by mode */
    PyObject *entry;              /* entry of calls that name no topic */
    PyObject *topic, *mode;       /* those of the last add; NULL = none */
    int topic_index;              /* index of the entry of `topic` */
    uint8_t mode_number;          /* enum pg_put_mode of `mode` */
    PyTypeObject *kind;           /* class of the receipts */
    allocfunc alloc;              /* makes a receipt */
    PyObject *calls;              /* dict: Answer by index of its record, of the calls that have one */
    PyObject *results;            /* bytes: struct pg_result of each record; NULL = not answered */
};

static PyMemberDef lot_members[] = {
    {"calls", T_OBJECT_EX, offsetof(struct lot, calls), READONLY, NULL},
    {"results", T_OBJECT, offsetof(struct lot, results), 0, NULL},
    {"collected", T_BOOL, offsetof(struct lot, collected), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static int lot_init(struct lot *lot, PyObject *args, PyObject *named UNUSED)
{
    PyObject *requests, *direct, *topics, *entry, *modes, *kind;
    if (!PyArg_ParseTuple(args, "OOIKpO!SO!O!", &requests, &direct, &lot->records_max,
                          &lot->bytes_max, &lot->virtual_clock, &PyDict_Type, &topics, &entry,
                          &PyDict_Type, &modes, &PyType_Type, &kind))
        return -1;
    if (!is_requests(requests) || !(direct == Py_None || is_direct(direct))) {
        PyErr_SetString(PyExc_TypeError, "Requests, and Direct or None, are expected");
        return -1;
    }
    if ((lot->calls = PyDict_New()) == NULL)
        return -1;
    lot->requests = Py_NewRef(requests);
    lot->direct = direct != Py_None ? Py_NewRef(direct) : NULL;
    lot->topics = Py_NewRef(topics);
    lot->entry = Py_NewRef(entry);
    lot->modes = Py_NewRef(modes);
    lot->kind = (PyTypeObject *)Py_NewRef(kind);
    lot->alloc = (allocfunc)PyType_GetSlot(lot->kind, Py_tp_alloc);
    lot->ends = requests_ends(requests);
    lot->forks = fork_count();
    return 0;
}

static int lot_traverse(struct lot *lot, visitproc visit, void *arg)
{
    PyObject *const objects[] = {lot->requests, lot->direct, lot->topics, lot->modes, lot->topic, lot->mode,
                                 (PyObject *)lot->kind, lot->calls, lot->results};
    Py_VISIT(Py_TYPE((PyObject *)lot));
    for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++)
        Py_VISIT(objects[i]);
    return 0;
}

static int lot_clear(struct lot *lot)
{
    lot->shut = true;
    Py_CLEAR(lot->requests);
    Py_CLEAR(lot->direct);
    Py_CLEAR(lot->topics);
    Py_CLEAR(lot->modes);
    Py_CLEAR(lot->entry);
    Py_CLEAR(lot->topic);
    Py_CLEAR(lot->mode);
    Py_CLEAR(lot->kind);
    Py_CLEAR(lot->calls);
    Py_CLEAR(lot->results);
    return 0;
}

static void lot_dealloc(struct lot *lot)
{
    PyObject_GC_UnTrack((PyObject *)lot);
    lot_clear(lot);
    pack_free(&lot->batch);
    freed((PyObject *)lot);
}

static Py_ssize_t lot_length(struct lot *lot)
{
    return lot->batch.count;
}

static bool is_full(const struct lot *lot)
{
    return lot->batch.count >= lot->records_max || !pack_takes(&lot->batch, lot->bytes_max);
}

/* Return whether the lot takes a further record. */
static bool is_open(const struct lot *lot)
{
    return !lot->shut && requests_ends(lot->requests) == lot->ends && fork_count() == lot->forks &&
           !is_full(lot);
}

/* Add a record whose entry of the name table has this index. Returns false with an exception. */
static bool packed(struct lot *lot, const struct pg_record *head, int index, struct pack_text key,
                   struct pack_text payload, struct pack_text extension)
{
    struct pg_record record = *head;
    record.name = (uint16_t)index;
    if (index != PACK_NO_MEMORY && pack_record(&lot->batch, record, key, payload, extension))
        return true;
    PyErr_NoMemory();
    return false;
}

/* Add a record of any kind, and note its call: (Answer, as fields_of()). Returns whether the lot was
 * open. */
static PyObject *lot_record(struct lot *lot, PyObject *args)
{
    PyObject *call, *fields;
    struct pack_single s;
    if (!PyArg_ParseTuple(args, "OO!", &call, &PyTuple_Type, &fields) || !fields_of(&s, fields))
        return NULL;
    if (!is_answer(call))
        return PyErr_Format(PyExc_TypeError, "the call must be an Answer");
    if (!is_open(lot) || !pack_has_space(&lot->batch, s.entry))
        Py_RETURN_FALSE;
    PyObject *number = PyLong_FromUnsignedLong(lot->batch.count);
    if (number == NULL || PyDict_SetItem(lot->calls, number, call) != 0) {
        Py_XDECREF(number);
        return NULL;
    }
    const bool done = packed(lot, &s.record, pack_name(&lot->batch, s.entry), s.key, s.payload,
                             s.extension);
    if (!done)
        PyDict_DelItem(lot->calls, number);
    Py_DECREF(number);
    return done ? Py_NewRef(Py_True) : NULL;
}

static PyObject *lot_shut(struct lot *lot, PyObject *none UNUSED)
{
    lot->shut = true;
    Py_RETURN_NONE;
}

/* Return (number of records, entries of the name table, its bytes, body). */
static PyObject *lot_body(struct lot *lot, PyObject *none UNUSED)
{
    lot->shut = true;
    PyObject *body = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)pack_body_bytes(&lot->batch));
    if (body == NULL)
        return NULL;
    pack_write(&lot->batch, (uint8_t *)PyBytes_AsString(body));
    return Py_BuildValue("IIKN", lot->batch.count, lot->batch.names_count,
                         (unsigned long long)pack_names_bytes(&lot->batch), body);
}

PyObject *lot_message(PyObject *lot)
{
    const struct pack_batch *b = &((const struct lot *)lot)->batch;
    const uint64_t bytes = sizeof(struct pg_frame) + pack_body_bytes(b);
    PyObject *message = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    ((struct lot *)lot)->shut = true;
    if (message != NULL)
        pack_write(b, (uint8_t *)PyBytes_AsString(message) + sizeof(struct pg_frame));
    return message;
}

void lot_frame(PyObject *lot, struct pg_frame frame, uint8_t *message)
{
    const struct pack_batch *b = &((const struct lot *)lot)->batch;
    frame.count = b->count;
    frame.names = b->names_count;
    frame.names_bytes = (uint32_t)pack_names_bytes(b);
    memcpy(message, &frame, sizeof frame);
}

void lot_sent_note(PyObject *lot) { ((struct lot *)lot)->collected = true; }

static bool all_taken(const struct pg_result *results, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t status = results[i].ticket & 0xff;
        if (status == PG_ST_NONE || status == PG_ST_EXISTS || status >= PG_ST_FULL)
            return false;
    }
    return true;
}

bool lot_answered(PyObject *object, const struct pg_result *results, uint64_t count)
{
    struct lot *lot = (struct lot *)object;
    PyObject *number, *call;
    Py_ssize_t at = 0;
    if (count != lot->batch.count || !all_taken(results, count))
        return false;
    lot->results = PyBytes_FromStringAndSize((const char *)results,
                                             (Py_ssize_t)(count * sizeof *results));
    if (lot->results == NULL) {
        PyErr_Clear();
        return false;
    }
    while (PyDict_Next(lot->calls, &at, &number, &call))
        answer_settle(call, results + PyLong_AsUnsignedLong(number));
    return true;
}

/* Return (operation, key type, key, entry of the name table, payload) of a record. */
static PyObject *lot_row(struct lot *lot, PyObject *number)
{
    const struct pack_batch *b = &lot->batch;
    const unsigned long row = PyLong_AsUnsignedLong(number);
    struct pg_record r;
    uint64_t at = 0;
    if (PyErr_Occurred())
        return NULL;
    if (row >= b->count)
        return PyErr_Format(PyExc_IndexError, "no such record");
    for (unsigned long i = 0; i <= row; i++) {
        memcpy(&r, b->records.at + i * sizeof r, sizeof r);
        at += (uint64_t)r.key_len + r.payload_len + r.ext_len;
    }
    const uint8_t *key = b->area.at + at - r.ext_len - r.payload_len - r.key_len;
    const uint32_t name = b->names_at[r.name];
    const uint64_t end = r.name + 1u < b->names_count ? b->names_at[r.name + 1] : b->names.used;
    return Py_BuildValue("BBy#y#y#", r.op, r.key_type, (const char *)key, (Py_ssize_t)r.key_len,
                         (const char *)b->names.at + name, (Py_ssize_t)(end - name),
                         (const char *)key + r.key_len, (Py_ssize_t)r.payload_len);
}

/* ---- Receipt ------------------------------------------------------------------------------------- */

struct receipt {
    PyObject_HEAD
    PyObject *client;
    PyObject *call;               /* the Answer; NULL = nobody has asked for it */
    struct lot *lot;              /* the lot that has the record; NULL = `call` is set */
    unsigned number;              /* index of the record */
};

static PyMemberDef receipt_members[] = {
    {"_client", T_OBJECT_EX, offsetof(struct receipt, client), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static int receipt_init(struct receipt *r, PyObject *args, PyObject *named UNUSED)
{
    PyObject *client, *call;
    if (!PyArg_ParseTuple(args, "OO", &client, &call))
        return -1;
    Py_CLEAR(r->client);
    Py_CLEAR(r->call);
    r->client = Py_NewRef(client);
    r->call = Py_NewRef(call);
    return 0;
}

static int receipt_traverse(struct receipt *r, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)r));
    Py_VISIT(r->client);
    Py_VISIT(r->call);
    Py_VISIT((PyObject *)r->lot);
    return 0;
}

static int receipt_clear(struct receipt *r)
{
    Py_CLEAR(r->client);
    Py_CLEAR(r->call);
    Py_CLEAR(r->lot);
    return 0;
}

static void receipt_dealloc(struct receipt *r)
{
    PyObject_GC_UnTrack((PyObject *)r);
    receipt_clear(r);
    freed((PyObject *)r);
}

static PyObject *receipt_call(struct receipt *r, void *none UNUSED)
{
    if (r->call == NULL && r->lot == NULL)
        return PyErr_Format(PyExc_AttributeError, "the handle has no call");
    if (r->call == NULL) {        /* another thread may ask at the same time */
        PyObject *lot = Py_NewRef((PyObject *)r->lot);
        PyObject *call = PyObject_CallMethod(lot, "of", "I", r->number);
        Py_DECREF(lot);
        if (call == NULL)
            return NULL;
        renew(&r->call, call);
        Py_DECREF(call);
        Py_CLEAR(r->lot);
    }
    return Py_NewRef(r->call);
}

/* Return a receipt without a record. The caller's reference to the lot goes to the receipt. */
static struct receipt *receipt_new(struct lot *lot, PyObject *client)
{
    struct receipt *r = (struct receipt *)lot->alloc(lot->kind, 0);
    if (r == NULL) {
        Py_DECREF((PyObject *)lot);
        return NULL;
    }
    r->client = Py_NewRef(client);
    r->lot = lot;
    return r;
}

/* ---- Caller -------------------------------------------------------------------------------------- */

struct caller {
    PyObject_HEAD
    PyObject *lot;                /* the lot that takes records; NULL = none */
};

enum { ADD_WAIT = ADD_ARGUMENTS, ADD_TIMEOUT, ADD_ALL };
enum { CANCEL_WAIT = CANCEL_ARGUMENTS, CANCEL_TIMEOUT, CANCEL_ALL };

struct method {                   /* add() or cancel() of a client */
    const char *name;
    Py_ssize_t count;             /* number of arguments */
    Py_ssize_t unnamed;           /* number of arguments that may have no name */
    Py_ssize_t wait;              /* index of `wait`; `timeout` follows */
    PyObject *names[ADD_ALL];     /* interned */
    PyObject *defaults[ADD_ALL];  /* the first has none */
    PyObject *checked;            /* the method in Python, which takes all other calls */
};

static struct method add = {"add", ADD_ALL, 2, ADD_WAIT, {NULL}, {NULL}, NULL};
static struct method cancel = {"cancel", CANCEL_ALL, 1, CANCEL_WAIT, {NULL}, {NULL}, NULL};
static PyTypeObject *lot_type;

static int caller_traverse(struct caller *c, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)c));
    Py_VISIT(c->lot);
    return 0;
}

static int caller_clear(struct caller *c)
{
    Py_CLEAR(c->lot);
    return 0;
}

static void caller_dealloc(struct caller *c)
{
    PyObject_GC_UnTrack((PyObject *)c);
    caller_clear(c);
    freed((PyObject *)c);
}

static PyObject *caller_lot(struct caller *c, void *none UNUSED)
{
    return Py_NewRef(c->lot != NULL ? c->lot : Py_None);
}

static int caller_set_lot(struct caller *c, PyObject *lot, void *none UNUSED)
{
    PyObject *before = c->lot;
    if (lot != NULL && lot != Py_None && !PyObject_TypeCheck(lot, lot_type)) {
        PyErr_SetString(PyExc_TypeError, "a lot is expected");
        return -1;
    }
    c->lot = lot == NULL || lot == Py_None ? NULL : Py_NewRef(lot);
    Py_XDECREF(before);
    return 0;
}

/* Place an argument that has a name. Returns false if no argument from `first` on has this name. */
static bool place_named(PyObject *a[], const struct method *m, Py_ssize_t first, PyObject *name,
                        PyObject *value)
{
    for (Py_ssize_t i = first; i < m->count; i++)
        if (m->names[i] == name) {
            a[i] = value;
            return true;
        }
    return false;
}

/* Sort the arguments of a call that does not wait. Returns false if Python has to do it. */
static bool sorted(PyObject *a[], const struct method *m, PyObject *const *args, Py_ssize_t count,
                   PyObject *names)
{
    const Py_ssize_t named = names != NULL ? PyTuple_Size(names) : 0;
    if (named == 0 || count > m->unnamed)
        return false;
    memcpy(a, m->defaults, (size_t)m->count * sizeof *a);
    for (Py_ssize_t i = 0; i < count; i++)
        a[i] = args[i];
    for (Py_ssize_t i = 0; i < named; i++)
        if (!place_named(a, m, count, PyTuple_GetItem(names, i), args[count + i]))
            return false;
    return a[0] != NULL && a[m->wait] == Py_False && a[m->wait + 1] == Py_None;
}

static int64_t boot_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static enum outcome entry_index(struct lot *lot, struct pack_text entry, int *index)
{
    *index = pack_name(&lot->batch, entry);
    if (*index == PACK_NO_MEMORY)
        PyErr_NoMemory();
    return *index >= 0 ? PLAIN : *index == PACK_NO_NAME ? ODD : FAILED;
}

/* Take the topic and the mode of an add. Most adds have those of the one before. */
static enum outcome names_of(struct item *item, struct lot *lot, PyObject *const a[], int *index)
{
    struct pack_text entry;
    enum outcome found = PLAIN;
    if (a[ADD_MODE] != lot->mode && (found = mode_of(item, lot->modes, a[ADD_MODE])) == PLAIN) {
        renew(&lot->mode, a[ADD_MODE]);
        lot->mode_number = item->head.mode;
    }
    item->head.mode = lot->mode_number;
    if (found == PLAIN && a[ADD_TOPIC] != lot->topic) {
        if ((found = topic_of(&entry, lot->topics, a[ADD_TOPIC])) == PLAIN)
            found = entry_index(lot, entry, &lot->topic_index);
        if (found == PLAIN)
            renew(&lot->topic, a[ADD_TOPIC]);
    }
    *index = lot->topic_index;
    return found;
}

static enum outcome add_item(struct item *item, struct lot *lot, PyObject *const a[], int *index)
{
    const struct times times = {lot->virtual_clock, lot->virtual_clock ? 0 : boot_ns()};
    const enum outcome found = add_of(item, &times, a);
    return found == PLAIN ? names_of(item, lot, a, index) : found;
}

static enum outcome cancel_item(struct item *item, struct lot *lot, PyObject *const a[],
                                int *index)
{
    struct pack_text entry;
    const enum outcome found = cancel_of(item, a);
    return found == PLAIN && bytes_of(&entry, lot->entry, UINT64_MAX) == PLAIN
               ? entry_index(lot, entry, index)
               : found;
}

/* Pack a call and return its receipt; NULL without an exception = Python has to make the call. The
 * receipt is made first: that may run a garbage collection, and so code that replaces the lot. */
static PyObject *later(struct caller *c, const struct method *m, PyObject *const a[])
{
    struct lot *lot = (struct lot *)Py_NewRef(c->lot);
    struct receipt *receipt = receipt_new(lot, (PyObject *)c);
    struct item item;
    int index = 0;
    if (receipt == NULL || !is_open(lot)) {
        Py_XDECREF((PyObject *)receipt);
        return NULL;
    }
    item.head = (struct pg_record){0};
    const enum outcome found = m == &add ? add_item(&item, lot, a, &index)
                                         : cancel_item(&item, lot, a, &index);
    receipt->number = lot->batch.count;
    if (found != PLAIN || !packed(lot, &item.head, index, item.key, item.payload, item.extension))
        Py_CLEAR(receipt);
    return (PyObject *)receipt;
}

/* Call the method in Python. */
static PyObject *checked(const struct method *m, PyObject *self, PyObject *const *args,
                         Py_ssize_t count, PyObject *names)
{
    const Py_ssize_t named = names != NULL ? PyTuple_Size(names) : 0;
    PyObject *given = PyTuple_New(count + 1), *by_name = named > 0 ? PyDict_New() : NULL;
    PyObject *outcome = NULL;
    bool sound = given != NULL && (named == 0 || by_name != NULL);
    if (sound)
        PyTuple_SetItem(given, 0, Py_NewRef(self));
    for (Py_ssize_t i = 0; sound && i < count; i++)
        PyTuple_SetItem(given, i + 1, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; sound && i < named; i++)
        sound = PyDict_SetItem(by_name, PyTuple_GetItem(names, i), args[count + i]) == 0;
    if (sound)
        outcome = PyObject_Call(m->checked, given, by_name);
    Py_XDECREF(given);
    Py_XDECREF(by_name);
    return outcome;
}

/* Send a full lot, and open the next one. Returns false if the engine has to do so, perhaps with an
 * exception. */
static bool renewed(struct caller *c, struct lot *lot)
{
    if (lot->direct == NULL || !is_full(lot) || !direct_streams(lot->direct, (PyObject *)lot))
        return false;
    Py_INCREF((PyObject *)lot);
    PyObject *next = PyObject_CallMethod((PyObject *)lot, "next", NULL);
    const bool sent = next != NULL && PyObject_TypeCheck(next, lot_type) &&
                      direct_streams(lot->direct, (PyObject *)lot) &&
                      direct_send(lot->direct, (PyObject *)lot, next) &&
                      c->lot == (PyObject *)lot;
    if (sent)
        renew(&c->lot, next);
    Py_DECREF((PyObject *)lot);
    Py_XDECREF(next);
    return sent;
}

static bool opened(struct method *m);

static PyObject *made(struct method *m, struct caller *c, PyObject *const *args, Py_ssize_t count,
                      PyObject *names)
{
    PyObject *a[ADD_ALL];
    struct lot *lot = (struct lot *)c->lot;
    if (lot != NULL && sorted(a, m, args, count, names) && (is_open(lot) || renewed(c, lot))) {
        PyObject *receipt = later(c, m, a);
        if (receipt != NULL)
            return receipt;
    }
    if (PyErr_Occurred())
        return NULL;
    return m->checked != NULL || opened(m) ? checked(m, (PyObject *)c, args, count, names) : NULL;
}

static PyObject *caller_add(struct caller *c, PyObject *const *args, Py_ssize_t count,
                            PyObject *names)
{
    return made(&add, c, args, count, names);
}

static PyObject *caller_cancel(struct caller *c, PyObject *const *args, Py_ssize_t count,
                               PyObject *names)
{
    return made(&cancel, c, args, count, names);
}

/* ---- the types ------------------------------------------------------------------------------------ */

/* Find the method in Python. */
static bool opened(struct method *m)
{
    PyObject *module = PyImport_ImportModule("purgatoryd.clients.calls");
    PyObject *type = module != NULL ? PyObject_GetAttrString(module, "TimerCalls") : NULL;
    m->checked = type != NULL ? PyObject_GetAttrString(type, m->name) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(type);
    return m->checked != NULL;
}

static bool arguments_named(struct method *m, const char *const *names, PyObject *const *defaults)
{
    for (Py_ssize_t i = 0; i < m->count; i++) {
        if ((m->names[i] = PyUnicode_InternFromString(names[i])) == NULL)
            return false;
        m->defaults[i] = defaults[i];
    }
    return true;
}

static bool methods_open(void)
{
    static const char *const of_add[] = {"key", "delay", "delay_ns", "deadline",
                                         "deadline_boot_ns", "topic", "payload", "mode", "within",
                                         "tag", "priority", "order_key", "late",
                                         "unique_for", "wait", "timeout"};
    static const char *const of_cancel[] = {"key", "ticket", "wait", "timeout"};
    PyObject *none = Py_None, *topic = PyUnicode_InternFromString("default");
    PyObject *mode = PyUnicode_InternFromString("error"), *zero = PyLong_FromLong(0);
    PyObject *payload = PyBytes_FromStringAndSize(NULL, 0);
    if (topic == NULL || mode == NULL || zero == NULL || payload == NULL)
        return false;
    return arguments_named(&add, of_add, (PyObject *const[]){
               NULL, none, none, none, none, topic, payload, mode, none, none, none,
               none, none, none, Py_True, none}) &&
           arguments_named(&cancel, of_cancel, (PyObject *const[]){NULL, zero, Py_True, none});
}

static PyMethodDef lot_methods[] = {
    {"record", (PyCFunction)lot_record, METH_VARARGS, "Add a record of any kind, and its call."},
    {"shut", (PyCFunction)lot_shut, METH_NOARGS, "Take no further record."},
    {"body", (PyCFunction)lot_body, METH_NOARGS, "Shut the lot, and return the batch's body."},
    {"row", (PyCFunction)lot_row, METH_O, "Return the content of a record."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot lot_slots[] = {
    DOC("Calls that do not wait, in one batch."),
    {Py_tp_init, lot_init},
    {Py_tp_dealloc, lot_dealloc},
    {Py_tp_traverse, lot_traverse},
    {Py_tp_clear, lot_clear},
    {Py_sq_length, lot_length},
    {Py_tp_members, lot_members},
    {Py_tp_methods, lot_methods},
    {0, NULL},
};
static PyGetSetDef receipt_getset[] = {
    {"_pending", (getter)receipt_call, NULL, "The call.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot receipt_slots[] = {
    DOC("A client, and a call that it made."),
    {Py_tp_init, receipt_init},
    {Py_tp_dealloc, receipt_dealloc},
    {Py_tp_traverse, receipt_traverse},
    {Py_tp_clear, receipt_clear},
    {Py_tp_members, receipt_members},
    {Py_tp_getset, receipt_getset},
    {0, NULL},
};
static PyGetSetDef caller_getset[] = {
    {"_lot", (getter)caller_lot, (setter)caller_set_lot, "The lot that takes records.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef caller_methods[] = {
    {"add", (PyCFunction)(void (*)(void))caller_add, METH_FASTCALL | METH_KEYWORDS,
     "add($self, key, delay=None, *, delay_ns=None, deadline=None, deadline_boot_ns=None, "
     "topic='default', payload=b'', mode='error', within=None, tag=None, "
     "priority=None, order_key=None, late=None, unique_for=None, wait=True, timeout=None)\n--\n\n"
     "Arm a timer."},
    {"cancel", (PyCFunction)(void (*)(void))caller_cancel, METH_FASTCALL | METH_KEYWORDS,
     "cancel($self, key, *, ticket=0, wait=True, timeout=None)\n--\n\nDisarm the key's timer."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot caller_slots[] = {
    DOC("A client that packs calls which do not wait."),
    {Py_tp_dealloc, caller_dealloc},
    {Py_tp_traverse, caller_traverse},
    {Py_tp_clear, caller_clear},
    {Py_tp_getset, caller_getset},
    {Py_tp_methods, caller_methods},
    {0, NULL},
};
static const unsigned FLAGS = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC;

bool lot_types_add(PyObject *module)
{
    PyType_Spec specs[] = {
        {"purgatoryd.clients._pack.Lot", sizeof(struct lot), 0, FLAGS, lot_slots},
        {"purgatoryd.clients._pack.Receipt", sizeof(struct receipt), 0, FLAGS, receipt_slots},
        {"purgatoryd.clients._pack.Caller", sizeof(struct caller), 0, FLAGS, caller_slots},
    };
    static const char *const names[] = {"Lot", "Receipt", "Caller"};
    for (int i = 0; i < 3; i++) {
        PyObject *type = PyType_FromSpec(&specs[i]);
        if (type == NULL || PyModule_AddObjectRef(module, names[i], type) != 0)
            return false;
        if (i == 0)
            lot_type = (PyTypeObject *)type;
    }
    return methods_open();
}

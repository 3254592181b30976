/* leases.c - jobs of consumer groups: their leases, JOBS messages, and answers to many jobs.
 *
 * Each function is a single step for Python: no signal handler and no other thread sees it half
 * done. */

#include "leases.h"

#include <string.h>
#include <structmember.h>

#include "batch.h"
#include "plain.h"
#include "types.h"

/* ---- Lease ---------------------------------------------------------------------------------- */

struct lease {
    PyObject_HEAD
    PyObject *member, *id, *key, *pending;
    unsigned long long ticket;
    unsigned attempt;
    double ends_s;                /* time on the host's monotonic clock */
    unsigned char op;             /* enum pg_op of the answer; 0 = none */
    char handed, extending, limited, lost;
};

static PyTypeObject *lease_type;

static PyMemberDef lease_members[] = {
    {"member", T_OBJECT, offsetof(struct lease, member), 0, NULL},
    {"id", T_OBJECT, offsetof(struct lease, id), 0, NULL},
    {"key", T_OBJECT, offsetof(struct lease, key), 0, NULL},
    {"pending", T_OBJECT, offsetof(struct lease, pending), 0, NULL},
    {"ticket", T_ULONGLONG, offsetof(struct lease, ticket), 0, NULL},
    {"attempt", T_UINT, offsetof(struct lease, attempt), 0, NULL},
    {"ends_s", T_DOUBLE, offsetof(struct lease, ends_s), 0, NULL},
    {"op", T_UBYTE, offsetof(struct lease, op), 0, NULL},
    {"handed", T_BOOL, offsetof(struct lease, handed), 0, NULL},
    {"extending", T_BOOL, offsetof(struct lease, extending), 0, NULL},
    {"limited", T_BOOL, offsetof(struct lease, limited), 0, NULL},
    {"lost", T_BOOL, offsetof(struct lease, lost), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static int lease_traverse(struct lease *l, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)l));
    Py_VISIT(l->member);
    Py_VISIT(l->key);
    Py_VISIT(l->pending);
    return 0;
}

static int lease_clear(struct lease *l)
{
    renew(&l->member, NULL);
    renew(&l->pending, NULL);
    return 0;
}

static void lease_dealloc(struct lease *l)
{
    PyObject_GC_UnTrack((PyObject *)l);
    lease_clear(l);
    renew(&l->id, NULL);
    renew(&l->key, NULL);
    freed((PyObject *)l);
}

static struct lease *lease_of(PyObject *object)
{
    if (PyObject_TypeCheck(object, lease_type))
        return (struct lease *)object;
    PyErr_SetString(PyExc_TypeError, "an object is no lease");
    return NULL;
}

/* ---- Job ------------------------------------------------------------------------------------ */

struct job {
    PyObject_HEAD
    struct lease *lease;
    PyObject *desk;               /* takes the lease if the job is collected without an answer */
    PyObject *key, *payload, *topic, *group, *received_ns;
    PyObject *verdict;            /* result of the operation that ended; None for a timer */
    unsigned long long ticket;
    long long deadline_boot_ns, fired_boot_ns, wall_offset_ns;
    unsigned attempt, missed;
    unsigned char priority, cause, flags; /* enum pg_cause, enum pg_entry_flag */
};

static PyTypeObject *job_type;

static PyMemberDef job_members[] = {
    {"_desk", T_OBJECT, offsetof(struct job, desk), 0, NULL},
    {"key", T_OBJECT, offsetof(struct job, key), 0, NULL},
    {"payload", T_OBJECT, offsetof(struct job, payload), 0, NULL},
    {"topic", T_OBJECT, offsetof(struct job, topic), 0, NULL},
    {"group", T_OBJECT, offsetof(struct job, group), 0, NULL},
    {"_received_ns", T_OBJECT, offsetof(struct job, received_ns), 0, NULL},
    {"ticket", T_ULONGLONG, offsetof(struct job, ticket), 0, NULL},
    {"deadline_boot_ns", T_LONGLONG, offsetof(struct job, deadline_boot_ns), 0, NULL},
    {"fired_boot_ns", T_LONGLONG, offsetof(struct job, fired_boot_ns), 0, NULL},
    {"wall_offset_ns", T_LONGLONG, offsetof(struct job, wall_offset_ns), 0, NULL},
    {"attempt", T_UINT, offsetof(struct job, attempt), 0, NULL},
    {"missed", T_UINT, offsetof(struct job, missed), 0, NULL},
    {"priority", T_UBYTE, offsetof(struct job, priority), 0, NULL},
    {"verdict", T_OBJECT, offsetof(struct job, verdict), 0, NULL},
    {"_cause", T_UBYTE, offsetof(struct job, cause), 0, NULL},
    {"_flags", T_UBYTE, offsetof(struct job, flags), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *job_lease(struct job *j, void *none UNUSED)
{
    return Py_NewRef(j->lease != NULL ? (PyObject *)j->lease : Py_None);
}

static int job_lease_set(struct job *j, PyObject *lease, void *none UNUSED)
{
    if (lease == NULL || lease_of(lease) == NULL)
        return -1;
    PyObject *before = (PyObject *)j->lease;
    j->lease = (struct lease *)Py_NewRef(lease);
    Py_XDECREF(before);
    return 0;
}

static PyGetSetDef job_getset[] = {
    {"_lease", (getter)job_lease, (setter)job_lease_set, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static int job_traverse(struct job *j, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)j));
    Py_VISIT((PyObject *)j->lease);
    Py_VISIT(j->desk);
    Py_VISIT(j->key);
    return 0;
}

static int job_clear(struct job *j)
{
    PyObject *lease = (PyObject *)j->lease;
    j->lease = NULL;
    Py_XDECREF(lease);
    renew(&j->desk, NULL);
    return 0;
}

static void job_dealloc(struct job *j)
{
    PyObject **const places[] = {&j->key,   &j->payload,     &j->topic,
                                 &j->group, &j->received_ns, &j->verdict};
    PyObject_GC_UnTrack((PyObject *)j);
    job_clear(j);
    for (unsigned i = 0; i < sizeof places / sizeof *places; i++)
        renew(places[i], NULL);
    freed((PyObject *)j);
}

/* Give back a job that is collected without an answer. */
static void job_finalize(struct job *j)
{
    PyObject *type, *error, *trace;
    if (j->lease == NULL || j->desk == NULL || j->lease->op != 0 || j->lease->lost)
        return;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *none = PyObject_CallMethod(j->desk, "drop", "O", (PyObject *)j->lease);
    if (none == NULL)
        PyErr_WriteUnraisable((PyObject *)j);
    Py_XDECREF(none);
    PyErr_Restore(type, error, trace);
}

/* ---- JOBS messages -------------------------------------------------------------------------- */

struct intake {                   /* arguments of receive() */
    const uint8_t *body;
    Py_ssize_t bytes;
    unsigned count;               /* number of jobs */
    PyObject *jobs;               /* dict: Lease by struct pg_lease */
    PyObject *ended, *older;      /* sets: struct pg_lease of leases that have ended */
    PyObject *member, *desk, *group, *received_ns;
    PyObject *decode_key;         /* decode_key(enum pg_key_type, bytes) */
    PyObject *decode_verdict;     /* decode_verdict(bytes) returns the verdict and the rest */
    PyTypeObject *lease_type, *job_type;
    double now_s;                 /* host time */
    long long since_ns;           /* the daemon's time of `now_s`; -1 = that of sending */
    int endless;                  /* 1 = the end of a lease is unknown */
    struct pack_text topic_bytes; /* bytes of the last topic */
    PyObject *topic;              /* the last topic; NULL = none */
};

static void head_read(const struct intake *in, unsigned i, struct pg_job_info *head)
{
    memcpy(head, in->body + i * sizeof *head, sizeof *head);
}

static uint64_t bytes_after(const struct pg_job_info *head)
{
    return (uint64_t)head->topic_len + head->key_len + head->payload_len;
}

/* Return whether the message has all bytes of its jobs. */
static bool is_whole(const struct intake *in)
{
    struct pg_job_info head;
    uint64_t used = in->count * (uint64_t)sizeof head;
    if (used > (uint64_t)in->bytes)
        return false;
    for (unsigned i = 0; i < in->count; i++) {
        head_read(in, i, &head);
        used += bytes_after(&head);
    }
    return used <= (uint64_t)in->bytes;
}

static PyObject *topic_made(struct intake *in, struct pack_text text)
{
    if (in->topic == NULL || text.bytes != in->topic_bytes.bytes ||
        memcmp(text.at, in->topic_bytes.at, text.bytes) != 0) {
        PyObject *topic = PyUnicode_DecodeUTF8((const char *)text.at, (Py_ssize_t)text.bytes,
                                               "surrogateescape");
        if (topic == NULL)
            return NULL;
        Py_XDECREF(in->topic);
        in->topic = topic;
        in->topic_bytes = text;
    }
    return Py_NewRef(in->topic);
}

static PyObject *bytes_made(struct pack_text text)
{
    return PyBytes_FromStringAndSize((const char *)text.at, (Py_ssize_t)text.bytes);
}

static PyObject *key_made(const struct intake *in, unsigned type, struct pack_text text)
{
    if (type == PG_KEY_BYTES)
        return bytes_made(text);
    if (type == PG_KEY_STR) {
        PyObject *key = PyUnicode_DecodeUTF8((const char *)text.at, (Py_ssize_t)text.bytes, NULL);
        if (key != NULL || !PyErr_ExceptionMatches(PyExc_ValueError))
            return key;
        PyErr_Clear();
    }
    return PyObject_CallFunction(in->decode_key, "Iy#", type, text.at, (Py_ssize_t)text.bytes);
}

static double ends_s(const struct intake *in, const struct pg_job_info *head)
{
    const int64_t since_ns = in->since_ns < 0 ? head->now_ns : in->since_ns;
    const uint64_t left_ns = (uint64_t)head->lease_ends_ns - (uint64_t)since_ns;
    return in->endless ? Py_HUGE_VAL : in->now_s + (double)(int64_t)left_ns / 1e9;
}

static void *made(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

static struct lease *lease_made(const struct intake *in, const struct pg_job_info *head,
                                PyObject *id, PyObject *key)
{
    struct lease *l = made(in->lease_type);
    if (l == NULL)
        return NULL;
    l->member = Py_NewRef(in->member);
    l->id = Py_NewRef(id);
    l->key = Py_NewRef(key);
    l->ticket = head->ticket >> 8;
    l->attempt = head->attempt;
    l->ends_s = ends_s(in, head);
    return l;
}

static void job_fill(struct job *j, const struct intake *in, const struct pg_job_info *head)
{
    j->group = Py_NewRef(in->group);
    j->received_ns = Py_NewRef(in->received_ns);
    j->ticket = head->ticket >> 8;
    j->deadline_boot_ns = head->deadline_ns;
    j->fired_boot_ns = head->fired_ns;
    j->wall_offset_ns = head->wall_offset_ns;
    j->attempt = head->attempt;
    j->missed = head->missed;
    j->priority = head->priority;
    j->cause = (unsigned char)head->ticket;
    j->flags = head->flags;
}

/* The daemon puts the verdict of an operation before the payload. */
static bool payload_fill(struct job *j, const struct intake *in, struct pack_text text)
{
    if (!(j->flags & PG_E_OPERATION))
        return (j->payload = bytes_made(text)) != NULL;
    PyObject *both =
        PyObject_CallFunction(in->decode_verdict, "y#", text.at, (Py_ssize_t)text.bytes);
    const bool done = both != NULL && PyArg_ParseTuple(both, "OO", &j->verdict, &j->payload);
    if (done) {
        Py_INCREF(j->verdict);
        Py_INCREF(j->payload);
    }
    Py_XDECREF(both);
    return done;
}

/* Make a job and its lease. The job gets its desk last, so that an unfinished job that an error
 * drops is not given back. */
static PyObject *job_made(struct intake *in, const struct pg_job_info *head, PyObject *id,
                          const uint8_t *at)
{
    struct job *j = made(in->job_type);
    if (j == NULL)
        return NULL;
    job_fill(j, in, head);
    j->topic = topic_made(in, (struct pack_text){at, head->topic_len});
    at += head->topic_len;
    j->key = key_made(in, head->key_type, (struct pack_text){at, head->key_len});
    if (j->topic != NULL && j->key != NULL &&
        payload_fill(j, in, (struct pack_text){at + head->key_len, head->payload_len}))
        j->lease = lease_made(in, head, id, j->key);
    if (j->lease == NULL || PyDict_SetItem(in->jobs, id, (PyObject *)j->lease) != 0) {
        Py_DECREF((PyObject *)j);
        return NULL;
    }
    j->desk = Py_NewRef(in->desk);
    return (PyObject *)j;
}

/* Take a lease that the member has already: the daemon repeats jobs after a JOIN. Returns 1 if it is
 * such a lease, 0 if not, -1 with an exception. */
static int repeated(const struct intake *in, const struct pg_job_info *head, PyObject *id)
{
    PyObject *known = PyDict_GetItemWithError(in->jobs, id);
    if (known == NULL) {
        if (PyErr_Occurred())
            return -1;
        const int ended = PySet_Contains(in->ended, id);
        return ended != 0 ? ended : PySet_Contains(in->older, id);
    }
    struct lease *l = lease_of(known);
    if (l == NULL)
        return -1;
    const double end_s = ends_s(in, head);
    l->ends_s = end_s > l->ends_s ? end_s : l->ends_s;
    return 1;
}

static bool job_receive(struct intake *in, const struct pg_job_info *head, const uint8_t *at,
                        PyObject *list)
{
    const struct pg_lease lease = {head->ticket >> 8, head->row, head->lease};
    PyObject *id = bytes_made((struct pack_text){(const uint8_t *)&lease, sizeof lease});
    const int known = id == NULL ? -1 : repeated(in, head, id);
    bool done = known == 1;
    if (known == 0) {
        PyObject *job = job_made(in, head, id, at);
        done = job != NULL && PyList_Append(list, job) == 0;
        Py_XDECREF(job);
    }
    Py_XDECREF(id);
    return done;
}

static bool intake_read(struct intake *in, PyObject *args)
{
    return PyArg_ParseTuple(args, "y#IO!O!O!OO!O!OOOLdpOO", &in->body, &in->bytes, &in->count,
                            &PyDict_Type, &in->jobs, &PySet_Type, &in->ended, &PySet_Type,
                            &in->older, &in->member, &PyType_Type, &in->lease_type, &PyType_Type,
                            &in->job_type, &in->desk, &in->group, &in->received_ns, &in->since_ns,
                            &in->now_s, &in->endless, &in->decode_key, &in->decode_verdict) &&
           (PyType_IsSubtype(in->lease_type, lease_type) &&
                    PyType_IsSubtype(in->job_type, job_type)
                ? true
                : (PyErr_SetString(PyExc_TypeError, "a type is none of jobs"), false));
}

/* Take a JOBS message. Returns a list of the jobs that are new; None if bytes are missing. */
static PyObject *receive(PyObject *module UNUSED, PyObject *args)
{
    struct intake in = {.topic = NULL};
    struct pg_job_info head;
    if (!intake_read(&in, args))
        return NULL;
    if (!is_whole(&in))
        Py_RETURN_NONE;
    PyObject *list = PyList_New(0);
    const uint8_t *at = in.body + in.count * sizeof head;
    for (unsigned i = 0; list != NULL && i < in.count; i++) {
        head_read(&in, i, &head);
        if (!job_receive(&in, &head, at, list))
            Py_CLEAR(list);
        at += bytes_after(&head);
    }
    Py_XDECREF(in.topic);
    return list;
}

/* ---- jobs for callers ----------------------------------------------------------------------- */

/* Return whether a caller may still have the job, and note that it has the job. */
static bool hand_over(struct job *j, double now_s)
{
    struct lease *l = j->lease;
    if (l == NULL || l->op != 0)
        return false;
    if (now_s >= l->ends_s && (!l->extending || l->limited))
        l->lost = 1;
    if (l->lost)
        return false;
    l->handed = 1;
    return true;
}

/* Take jobs from a queue until the list has `most`. Returns whether the queue had a None. */
static PyObject *take(PyObject *module UNUSED, PyObject *args)
{
    PyObject *get, *empty, *list;
    Py_ssize_t most;
    double now_s;
    if (!PyArg_ParseTuple(args, "OOO!nd", &get, &empty, &PyList_Type, &list, &most, &now_s))
        return NULL;
    while (PyList_Size(list) < most) {
        PyObject *job = PyObject_CallNoArgs(get);
        if (job == NULL) {
            if (!PyErr_ExceptionMatches(empty))
                return NULL;
            PyErr_Clear();
            break;
        }
        const bool is_job = PyObject_TypeCheck(job, job_type);
        const int failed = is_job && hand_over((struct job *)job, now_s)
                               ? PyList_Append(list, job)
                               : 0;
        Py_DECREF(job);
        if (failed != 0)
            return NULL;
        if (!is_job)
            Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

/* ---- answers to many jobs ------------------------------------------------------------------- */

static bool record_add(struct pack_batch *b, unsigned op, struct lease *l)
{
    struct pack_text id;
    const struct pg_record head = {.op = (uint8_t)op, .key_type = PG_KEY_BYTES};
    if (l->id == NULL || bytes_of(&id, l->id, PG_KEY_MAX) != PLAIN) {
        PyErr_SetString(PyExc_TypeError, "a lease has no id");
        return false;
    }
    if (pack_record(b, head, id, NOTHING, NOTHING))
        return true;
    PyErr_NoMemory();
    return false;
}

/* Add a record for the lease, unless it has an answer or has ended. */
static bool answer_add(struct pack_batch *b, unsigned op, PyObject *object, PyObject *call,
                       PyObject *taken, PyObject *left)
{
    struct lease *l = lease_of(object);
    if (l == NULL)
        return false;
    if (l->op != 0 || l->lost)
        return PyList_Append(left, object) == 0;
    if (PyList_Append(taken, object) != 0)
        return false;
    l->op = (unsigned char)op;
    renew(&l->pending, call);
    return record_add(b, op, l);
}

static void answers_undo(PyObject *taken)
{
    for (Py_ssize_t i = 0; i < PyList_Size(taken); i++) {
        struct lease *l = (struct lease *)PyList_GetItem(taken, i);
        l->op = 0;
        renew(&l->pending, NULL);
    }
}

static bool answers_add(struct pack_batch *b, struct pack_text entry, unsigned op,
                        PyObject *leases, PyObject *call, PyObject *taken, PyObject *left)
{
    const Py_ssize_t count = PyList_Size(leases);
    if (pack_name(b, entry) != 0)
        return PyErr_NoMemory() != NULL;
    for (Py_ssize_t i = 0; i < count && i < PyList_Size(leases); i++)
        if (!answer_add(b, op, PyList_GetItem(leases, i), call, taken, left))
            return false;
    return true;
}

static PyObject *answers_body(const struct pack_batch *b, PyObject *taken, PyObject *left)
{
    PyObject *body = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)pack_body_bytes(b));
    if (body == NULL)
        return NULL;
    pack_write(b, (uint8_t *)PyBytes_AsString(body));
    return Py_BuildValue("OO(IIKN)", taken, left, b->count, b->names_count,
                         (unsigned long long)pack_names_bytes(b), body);
}

/* Pack the same answer to many leases. Returns the leases that are in the batch, those that have an
 * answer already or have ended, and what Builder.body returns. */
static PyObject *answers(PyObject *module UNUSED, PyObject *args)
{
    struct pack_batch b = {0};
    struct pack_text entry;
    Py_ssize_t bytes;
    unsigned char op;
    PyObject *leases, *call, *result = NULL;
    if (!PyArg_ParseTuple(args, "y#bO!O", &entry.at, &bytes, &op, &PyList_Type, &leases, &call))
        return NULL;
    entry.bytes = (uint64_t)bytes;
    PyObject *taken = PyList_New(0), *left = PyList_New(0);
    if (taken != NULL && left != NULL &&
        answers_add(&b, entry, op, leases, call, taken, left))
        result = answers_body(&b, taken, left);
    if (result == NULL && taken != NULL)
        answers_undo(taken);
    Py_XDECREF(taken);
    Py_XDECREF(left);
    pack_free(&b);
    return result;
}

/* Note that the daemon has taken the answer to a lease. */
static bool lease_end(struct lease *l, PyObject *jobs, PyObject *ended)
{
    renew(&l->pending, NULL);
    if (PyDict_GetItemWithError(jobs, l->id) == NULL)
        return !PyErr_Occurred();
    return PySet_Add(ended, l->id) == 0 && PyDict_DelItem(jobs, l->id) == 0;
}

/* Note the results of answers. Returns the indexes of the leases whose answers the daemon has not
 * taken; nothing has happened to these. */
static PyObject *end(PyObject *module UNUSED, PyObject *args)
{
    PyObject *leases, *jobs, *ended;
    const uint8_t *results;
    Py_ssize_t bytes;
    struct pg_result result;
    if (!PyArg_ParseTuple(args, "O!y#O!O!", &PyList_Type, &leases, &results, &bytes, &PyDict_Type,
                          &jobs, &PySet_Type, &ended))
        return NULL;
    if (bytes < PyList_Size(leases) * (Py_ssize_t)sizeof result)
        return PyErr_Format(PyExc_ValueError, "results are missing");
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left != NULL && i < PyList_Size(leases); i++) {
        struct lease *l = lease_of(PyList_GetItem(leases, i));
        memcpy(&result, results + i * (Py_ssize_t)sizeof result, sizeof result);
        PyObject *place = NULL;
        const bool done = l != NULL && ((result.ticket & 0xff) == PG_ST_DONE
                                            ? lease_end(l, jobs, ended)
                                            : (place = PyLong_FromSsize_t(i)) != NULL &&
                                                  PyList_Append(left, place) == 0);
        Py_XDECREF(place);
        if (!done)
            Py_CLEAR(left);
    }
    return left;
}

/* ---- module --------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"jobs_receive", receive, METH_VARARGS, "Take a JOBS message."},
    {"jobs_take", take, METH_VARARGS, "Take jobs from a queue."},
    {"leases_answer", answers, METH_VARARGS, "Pack the same answer to many leases."},
    {"leases_end", end, METH_VARARGS, "Note the results of answers."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot lease_slots[] = {
    DOC("A lease of one job."),
    {Py_tp_members, lease_members},
    {Py_tp_traverse, lease_traverse},
    {Py_tp_clear, lease_clear},
    {Py_tp_dealloc, lease_dealloc},
    {0, NULL},
};
static PyType_Slot job_slots[] = {
    DOC("The fields of a job."),
    {Py_tp_members, job_members},
    {Py_tp_getset, job_getset},
    {Py_tp_traverse, job_traverse},
    {Py_tp_clear, job_clear},
    {Py_tp_finalize, job_finalize},
    {Py_tp_dealloc, job_dealloc},
    {0, NULL},
};
enum { FLAGS = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC };
static PyType_Spec lease_spec = {"purgatoryd.clients._pack.Lease", sizeof(struct lease), 0, FLAGS,
                                 lease_slots};
static PyType_Spec job_spec = {"purgatoryd.clients._pack.Job", sizeof(struct job), 0, FLAGS,
                               job_slots};

bool leases_open(PyObject *module)
{
    lease_type = (PyTypeObject *)PyType_FromSpec(&lease_spec);
    job_type = (PyTypeObject *)PyType_FromSpec(&job_spec);
    return lease_type != NULL && job_type != NULL &&
           PyModule_AddObjectRef(module, "Lease", (PyObject *)lease_type) == 0 &&
           PyModule_AddObjectRef(module, "Job", (PyObject *)job_type) == 0 &&
           PyModule_AddFunctions(module, functions) == 0;
}

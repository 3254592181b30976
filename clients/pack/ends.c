/* ends.c - outcomes of operations that were watched by columns.
 *
 * A Table has the answers and the outcomes of one watch_many(), a row for each operation. Tickets
 * finds the row of an outcome. Each method is a single step for Python: no signal handler and no
 * other thread sees it half done. */

#include "ends.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#include "batch.h"
#include "types.h"

enum { TICKETS_LEAST = 4096 };    /* smallest table of tickets, so that small tables never shrink */

struct end {                      /* outcome of a row; operation_columns.py has the same fields */
    uint64_t ticket;              /* ticket << 8 | enum pg_cause; 0 = the operation has not ended */
    int64_t armed_ns, ended_ns;   /* times on the daemon's clock */
    uint64_t watermark;           /* watermark of the watch key at the end */
    uint32_t error;               /* error code of the watch key; 0 = it had not failed */
    uint8_t missing, failed;      /* 1 = the watch key was missing, had failed */
    uint8_t pad[2];
};

/* ---- Table: answers and outcomes of a watch_many() ---------------------------------------- */

struct table {
    PyObject_HEAD
    Py_ssize_t rows;              /* number of rows */
    Py_ssize_t open;              /* number of rows that have no outcome and were not refused */
    Py_ssize_t ended;             /* number of rows that have an outcome */
    struct pg_result *results;
    struct end *ends;
    int64_t *order;               /* rows in the order in which their outcomes arrived */
};

static PyTypeObject *table_type;

static int table_init(struct table *t, PyObject *args, PyObject *named UNUSED)
{
    Py_ssize_t rows;
    if (!PyArg_ParseTuple(args, "n", &rows))
        return -1;
    const size_t size = rows > 0 ? (size_t)rows : 1;
    t->results = calloc(size, sizeof *t->results);
    t->ends = calloc(size, sizeof *t->ends);
    t->order = calloc(size, sizeof *t->order);
    if (t->results == NULL || t->ends == NULL || t->order == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    t->rows = t->open = rows;
    return 0;
}

static void table_dealloc(struct table *t)
{
    free(t->results);
    free(t->ends);
    free(t->order);
    freed((PyObject *)t);
}

static PyObject *copied(const void *from, Py_ssize_t count, size_t size)
{
    return PyBytes_FromStringAndSize(from, count * (Py_ssize_t)size);
}

static PyObject *table_results(struct table *t, PyObject *none UNUSED)
{
    return copied(t->results, t->rows, sizeof *t->results);
}

static PyObject *table_ends(struct table *t, PyObject *none UNUSED)
{
    return copied(t->ends, t->rows, sizeof *t->ends);
}

static PyObject *table_order(struct table *t, PyObject *first)
{
    const Py_ssize_t start = PyLong_AsSsize_t(first);
    if (PyErr_Occurred())
        return NULL;
    if (start < 0 || start > t->ended)
        return PyErr_Format(PyExc_ValueError, "no such outcome");
    return copied(t->order + start, t->ended - start, sizeof *t->order);
}

/* ---- Tickets: rows by ticket -------------------------------------------------------------- */

struct place {                    /* the row of an operation */
    uint64_t ticket;
    struct table *table;          /* a counted reference; NULL = the operation has ended */
    int64_t row;
};

struct tickets {
    PyObject_HEAD
    struct place *places;         /* sorted by ticket */
    size_t count;                 /* places in use */
    size_t size;                  /* places that have memory */
    Py_ssize_t open;              /* operations that have not ended */
    PyObject *touched;            /* list of tables that have outcomes the caller has not seen */
};

static int tickets_init(struct tickets *t, PyObject *args, PyObject *named UNUSED)
{
    if (!PyArg_ParseTuple(args, ""))
        return -1;
    t->touched = PyList_New(0);
    return t->touched == NULL ? -1 : 0;
}

static int tickets_traverse(struct tickets *t, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)t));
    Py_VISIT(t->touched);
    for (size_t i = 0; i < t->count; i++)
        Py_VISIT((PyObject *)t->places[i].table);
    return 0;
}

/* Forget all operations. The end of a table may run Python code, so the places are detached
 * first. */
static void forget_all(struct tickets *t)
{
    struct place *places = t->places;
    const size_t count = t->count;
    t->places = NULL;
    t->count = t->size = 0;
    t->open = 0;
    for (size_t i = 0; i < count; i++)
        Py_XDECREF((PyObject *)places[i].table);
    free(places);
}

static int tickets_clear_refs(struct tickets *t)
{
    forget_all(t);
    Py_CLEAR(t->touched);
    return 0;
}

static void tickets_dealloc(struct tickets *t)
{
    PyObject_GC_UnTrack(t);
    tickets_clear_refs(t);
    freed((PyObject *)t);
}

/* Make space for `more` places, at first by dropping operations that have ended. */
static bool reserve(struct tickets *t, size_t more)
{
    if (t->size - t->count >= more)
        return true;
    size_t alive = 0;
    for (size_t i = 0; i < t->count; i++)
        if (t->places[i].table != NULL)
            t->places[alive++] = t->places[i];
    t->count = alive;
    const size_t least = 2 * (alive + more), size = least > TICKETS_LEAST ? least : TICKETS_LEAST;
    struct place *places = realloc(t->places, size * sizeof *places);
    if (places == NULL)
        return false;
    t->places = places;
    t->size = size;
    return true;
}

static int by_ticket(const void *a, const void *b)
{
    const uint64_t left = ((const struct place *)a)->ticket;
    const uint64_t right = ((const struct place *)b)->ticket;
    return (left > right) - (left < right);
}

static struct place *place_of(const struct tickets *t, uint64_t ticket)
{
    size_t low = 0, high = t->count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (t->places[middle].ticket < ticket)
            low = middle + 1;
        else
            high = middle;
    }
    return low < t->count && t->places[low].ticket == ticket ? &t->places[low] : NULL;
}

static bool refused(uint64_t status)
{
    return status == PG_ST_EXISTS || status >= PG_ST_FULL;
}

/* Store the answer to one row. A row that has an answer keeps it: an interrupted caller may repeat
 * the call. Returns whether the row was armed. */
static bool answer(struct tickets *t, struct table *table, int64_t row, struct pg_result result)
{
    const uint64_t status = result.ticket & 0xff;
    if ((table->results[row].ticket & 0xff) != 0)
        return false;
    table->results[row] = result;
    if (status == 0 || refused(status)) {
        table->open--;
        return false;
    }
    t->places[t->count++] = (struct place){result.ticket >> 8,
                                           (struct table *)Py_NewRef((PyObject *)table), row};
    t->open++;
    return true;
}

/* Sort the places again if those from `first` on are out of order: rows were sent again. */
static void sort(struct tickets *t, size_t first)
{
    for (size_t i = first > 0 ? first : 1; i < t->count; i++)
        if (t->places[i].ticket < t->places[i - 1].ticket) {
            qsort(t->places, t->count, sizeof *t->places, by_ticket);
            return;
        }
}

/* Store answers: (table, struct pg_result of each row, int64 row of each answer) -> ticket of the
 * first row that was armed, 0 = none. */
static PyObject *tickets_add(struct tickets *t, PyObject *args)
{
    struct table *table;
    const char *results, *rows;
    Py_ssize_t results_bytes, rows_bytes;
    if (!PyArg_ParseTuple(args, "O!y#y#", table_type, &table, &results, &results_bytes, &rows,
                          &rows_bytes))
        return NULL;
    const Py_ssize_t count = rows_bytes / (Py_ssize_t)sizeof(int64_t);
    if (results_bytes / (Py_ssize_t)sizeof(struct pg_result) != count)
        return PyErr_Format(PyExc_ValueError, "the answers do not match the rows");
    if (!reserve(t, (size_t)count))
        return PyErr_NoMemory();
    const size_t first = t->count;
    uint64_t ticket = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row;
        struct pg_result result;
        memcpy(&row, rows + i * (Py_ssize_t)sizeof row, sizeof row);
        memcpy(&result, results + i * (Py_ssize_t)sizeof result, sizeof result);
        if (row < 0 || row >= table->rows)
            return PyErr_Format(PyExc_ValueError, "no such row");
        if (answer(t, table, row, result) && ticket == 0)
            ticket = result.ticket >> 8;
    }
    sort(t, first);
    return PyLong_FromUnsignedLongLong(ticket);
}

/* Take an open operation out of its table, and note the table in `touched`. */
static bool leave(struct tickets *t, struct place *place)
{
    struct table *table = place->table;
    const Py_ssize_t touched = PyList_Size(t->touched);
    if (touched == 0 || PyList_GetItem(t->touched, touched - 1) != (PyObject *)table)
        if (PyList_Append(t->touched, (PyObject *)table) != 0)
            return false;
    table->open--;
    t->open--;
    place->table = NULL;
    Py_DECREF(table);             /* `touched` has a reference */
    return true;
}

/* Store the outcome of an operation. Returns 1 = stored, 0 = it had ended, -1 = exception. */
static int store(struct tickets *t, struct place *place, const struct end *end)
{
    struct table *table = place->table;
    if (table == NULL)
        return 0;
    if (!leave(t, place))
        return -1;
    table->ends[place->row] = *end;
    table->order[table->ended++] = place->row;
    return 1;
}

/* Read one outcome: its head, and its area, which begins with the key. */
static struct end end_of(const struct pg_outcome *head, const uint8_t *area)
{
    struct end end = {head->ticket, head->armed_ns, head->ended_ns, 0, head->error, 0, 0, {0, 0}};
    area += head->key_len + (size_t)head->payload_len;
    memcpy(&end.watermark, area, sizeof end.watermark);
    end.missing = area[8] & 1;
    end.failed = area[9] & 1;
    return end;
}

static uint64_t area_bytes(const struct pg_outcome *head)
{
    const uint64_t watermarks = head->bitmap_bytes != 0 ? 8 * (uint64_t)head->keys : 0;
    return head->key_len + (uint64_t)head->payload_len + watermarks +
           2 * (uint64_t)head->bitmap_bytes;
}

struct message {                  /* the body of an OUTCOMES message */
    const uint8_t *body;
    uint64_t bytes, count;
};

static struct pg_outcome head_at(const struct message *m, uint64_t i)
{
    struct pg_outcome head;
    memcpy(&head, m->body + i * sizeof head, sizeof head);
    return head;
}

/* Return the length that the body must have. */
static uint64_t needed(const struct message *m)
{
    uint64_t bytes = m->count * sizeof(struct pg_outcome);
    if (bytes > m->bytes)
        return bytes;
    for (uint64_t i = 0; i < m->count; i++) {
        const struct pg_outcome head = head_at(m, i);
        bytes += area_bytes(&head);
    }
    return bytes;
}

/* Take outcome i. Returns 1 = its operation is in a table, 0 = it is not, -1 = exception. */
static int take(struct tickets *t, const struct pg_outcome *head, const uint8_t *area)
{
    if (head->keys != 1 || head->bitmap_bytes != 1)
        return 0;
    struct place *place = place_of(t, head->ticket >> 8);
    if (place == NULL)
        return 0;
    const struct end end = end_of(head, area);
    return store(t, place, &end) < 0 ? -1 : 1;
}

static int append_number(PyObject *list, uint64_t number)
{
    PyObject *value = PyLong_FromUnsignedLongLong(number);
    const int failed = value == NULL ? -1 : PyList_Append(list, value);
    Py_XDECREF(value);
    return failed;
}

/* Take all outcomes of a message; write the ACKs of those in tables. Returns the number of ACKs,
 * -1 = exception. */
static Py_ssize_t take_all(struct tickets *t, const struct message *m, struct pg_ack *acks,
                           PyObject *others)
{
    const uint8_t *area = m->body + m->count * sizeof(struct pg_outcome);
    Py_ssize_t taken = 0;
    for (uint64_t i = 0; i < m->count; i++) {
        const struct pg_outcome head = head_at(m, i);
        const int found = take(t, &head, area);
        area += area_bytes(&head);
        if (found < 0 || (found == 0 && append_number(others, i) != 0))
            return -1;
        if (found > 0)
            acks[taken++] = (struct pg_ack){head.ticket >> 8, 0, head.slot, 0};
    }
    return taken;
}

/* Take the body of an OUTCOMES message: (body, count) -> (ACKs of the outcomes that belong to
 * tables, indexes of all other outcomes and CHECKs). A body that is too short changes nothing; the
 * result is the length that it must have. */
static PyObject *tickets_receive(struct tickets *t, PyObject *args)
{
    const char *body;
    Py_ssize_t bytes, count;
    if (!PyArg_ParseTuple(args, "y#n", &body, &bytes, &count))
        return NULL;
    if (count < 0)
        return PyErr_Format(PyExc_ValueError, "a message cannot have %zd outcomes", count);
    const struct message m = {(const uint8_t *)body, (uint64_t)bytes, (uint64_t)count};
    const uint64_t least = needed(&m);
    if (least > m.bytes)
        return PyLong_FromUnsignedLongLong(least);
    PyObject *others = PyList_New(0);
    struct pg_ack *acks = malloc((m.count + 1) * sizeof *acks);
    const Py_ssize_t taken = others == NULL || acks == NULL ? -1 : take_all(t, &m, acks, others);
    PyObject *found = NULL;
    if (taken >= 0)
        found = Py_BuildValue("y#O", (const char *)acks, taken * (Py_ssize_t)sizeof *acks, others);
    else if (!PyErr_Occurred())
        PyErr_NoMemory();
    free(acks);
    Py_XDECREF(others);
    return found;
}

/* Take one outcome: (ticket, cause, armed_ns, ended_ns, watermark, error, missing, failed). Returns
 * whether it belongs to an operation that had not ended. */
static PyObject *tickets_end(struct tickets *t, PyObject *args)
{
    struct end end = {0};
    unsigned long long ticket, watermark;
    long long armed_ns, ended_ns;
    unsigned char cause;
    if (!PyArg_ParseTuple(args, "KbLLKIbb", &ticket, &cause, &armed_ns, &ended_ns, &watermark,
                          &end.error, &end.missing, &end.failed))
        return NULL;
    end.ticket = ticket << 8 | cause;
    end.armed_ns = armed_ns;
    end.ended_ns = ended_ns;
    end.watermark = watermark;
    struct place *place = place_of(t, ticket);
    const int stored = place == NULL ? 0 : store(t, place, &end);
    return stored < 0 ? NULL : PyBool_FromLong(stored);
}

static PyObject *tickets_has(struct tickets *t, PyObject *ticket)
{
    const uint64_t number = PyLong_AsUnsignedLongLong(ticket);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(place_of(t, number) != NULL);
}

/* Forget all operations. `touched` then has the table of each operation that had not ended. */
static PyObject *tickets_clear(struct tickets *t, PyObject *none UNUSED)
{
    for (size_t i = 0; i < t->count; i++)
        if (t->places[i].table != NULL && !leave(t, &t->places[i]))
            return NULL;
    t->count = 0;
    Py_RETURN_NONE;
}

/* ---- the types ------------------------------------------------------------------------------- */

static PyMemberDef table_members[] = {
    {"_rows", T_PYSSIZET, offsetof(struct table, rows), READONLY, NULL},
    {"open", T_PYSSIZET, offsetof(struct table, open), READONLY, NULL},
    {"_ended", T_PYSSIZET, offsetof(struct table, ended), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef table_methods[] = {
    {"_answers", (PyCFunction)table_results, METH_NOARGS, "Return the struct pg_result of rows."},
    {"_outcomes", (PyCFunction)table_ends, METH_NOARGS, "Return the struct end of all rows."},
    {"_order", (PyCFunction)table_order, METH_O, "Return the rows that ended, from an index on."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot table_slots[] = {
    DOC("Answers and outcomes of a watch_many()."),
    {Py_tp_members, table_members},
    {Py_tp_init, table_init},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {0, NULL},
};
static PyMemberDef tickets_members[] = {
    {"open", T_PYSSIZET, offsetof(struct tickets, open), READONLY, NULL},
    {"places", T_PYSSIZET, offsetof(struct tickets, size), READONLY, NULL},
    {"touched", T_OBJECT, offsetof(struct tickets, touched), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef tickets_methods[] = {
    {"add", (PyCFunction)tickets_add, METH_VARARGS, "Store the answers to rows of a table."},
    {"receive", (PyCFunction)tickets_receive, METH_VARARGS, "Take an OUTCOMES message."},
    {"end", (PyCFunction)tickets_end, METH_VARARGS, "Take one outcome."},
    {"has", (PyCFunction)tickets_has, METH_O, "Return whether a ticket is known."},
    {"clear", (PyCFunction)tickets_clear, METH_NOARGS, "Forget all operations."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot tickets_slots[] = {
    DOC("Rows of operations by ticket."),
    {Py_tp_members, tickets_members},
    {Py_tp_init, tickets_init},
    {Py_tp_dealloc, tickets_dealloc},
    {Py_tp_traverse, tickets_traverse},
    {Py_tp_clear, tickets_clear_refs},
    {Py_tp_methods, tickets_methods},
    {0, NULL},
};
static PyType_Spec table_spec = {"purgatoryd.clients._pack.Table", sizeof(struct table), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, table_slots};
static PyType_Spec tickets_spec = {"purgatoryd.clients._pack.Tickets", sizeof(struct tickets), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tickets_slots};

bool ends_open(PyObject *module)
{
    table_type = (PyTypeObject *)PyType_FromSpec(&table_spec);
    PyObject *tickets = PyType_FromSpec(&tickets_spec);
    const bool added = table_type != NULL && tickets != NULL &&
                       PyModule_AddObjectRef(module, "Table", (PyObject *)table_type) == 0 &&
                       PyModule_AddObjectRef(module, "Tickets", tickets) == 0;
    Py_XDECREF(tickets);          /* the module has a reference */
    return added;
}

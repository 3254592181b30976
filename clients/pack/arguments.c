/* arguments.c - take the arguments of add() and cancel() (arguments.h). */

#include "arguments.h"

bool whole_of(int64_t *n, PyObject *number)
{
    int overflow;
    if (!PyLong_CheckExact(number))
        return false;
    *n = PyLong_AsLongLongAndOverflow(number, &overflow);
    return overflow == 0;
}

static enum outcome time_of(struct item *item, const struct times *times, PyObject *const a[])
{
    const bool delay = a[ADD_DELAY] != Py_None, delay_ns = a[ADD_DELAY_NS] != Py_None;
    const bool boot = a[ADD_DEADLINE_BOOT_NS] != Py_None;
    int64_t n;
    if (delay + delay_ns + boot != 1 || a[ADD_DEADLINE] != Py_None)
        return ODD;
    if (delay)
        return delay_of(item, times, a[ADD_DELAY]);
    if (!whole_of(&n, delay_ns ? a[ADD_DELAY_NS] : a[ADD_DEADLINE_BOOT_NS]))
        return ODD;
    if (delay_ns)
        return whole(item, times, n, 1);
    item->head.time_kind = PG_T_BOOT;
    item->head.time_ns = n > 0 ? n : 0;
    return PLAIN;
}

/* Return whether Python has to convert a property that few timers have. */
static bool has_rare(PyObject *const a[])
{
    return a[ADD_WITHIN] != Py_None || a[ADD_PRIORITY] != Py_None ||
           a[ADD_ORDER_KEY] != Py_None || a[ADD_LATE] != Py_None ||
           a[ADD_UNIQUE_FOR] != Py_None;
}

enum outcome add_of(struct item *item, const struct times *times, PyObject *const a[])
{
    enum outcome found = has_rare(a) ? ODD : key_of(item, a[ADD_KEY]);
    if (found == PLAIN)
        found = time_of(item, times, a);
    if (found == PLAIN)
        found = tag_of(item, a[ADD_TAG]);
    item->head.op = PG_OP_PUT;
    return found == PLAIN ? bytes_of(&item->payload, a[ADD_PAYLOAD], PG_PAYLOAD_MAX) : found;
}

static enum outcome found_in(PyObject **found, PyObject *dict, PyObject *name)
{
    if (!PyUnicode_CheckExact(name))
        return ODD;
    *found = PyDict_GetItemWithError(dict, name);
    if (*found != NULL)
        return PLAIN;
    return PyErr_Occurred() ? FAILED : ODD;
}

enum outcome mode_of(struct item *item, PyObject *modes, PyObject *mode)
{
    PyObject *number;
    int64_t n;
    const enum outcome found = found_in(&number, modes, mode);
    if (found != PLAIN)
        return found;
    if (!whole_of(&n, number))
        return ODD;
    item->head.mode = (uint8_t)n;
    return PLAIN;
}

enum outcome topic_of(struct pack_text *entry, PyObject *topics, PyObject *topic)
{
    PyObject *name;
    const enum outcome found = found_in(&name, topics, topic);
    return found == PLAIN ? bytes_of(entry, name, UINT64_MAX) : found;
}

enum outcome cancel_of(struct item *item, PyObject *const a[])
{
    int64_t ticket;
    if (!whole_of(&ticket, a[CANCEL_TICKET]) || ticket < 0 || (uint64_t)ticket > PG_TICKET_MAX)
        return ODD;
    item->head.op = PG_OP_CANCEL;
    item->head.value = (uint64_t)ticket;
    item->payload = item->extension = NOTHING;
    return key_of(item, a[CANCEL_KEY]);
}

bool fields_of(struct pack_single *s, PyObject *tuple)
{
    struct pg_record *r = &s->record;
    Py_ssize_t entry, key, payload, extension;
    *s = (struct pack_single){.entry = NOTHING};
    if (!PyArg_ParseTuple(tuple, "y#bbby#bby#y#LK", &s->entry.at, &entry, &r->op, &r->mode,
                          &r->key_type, &s->key.at, &key, &r->time_kind, &r->flags, &s->payload.at,
                          &payload, &s->extension.at, &extension, &r->time_ns, &r->value))
        return false;
    s->entry.bytes = (uint64_t)entry;
    s->key.bytes = (uint64_t)key;
    s->payload.bytes = (uint64_t)payload;
    s->extension.bytes = (uint64_t)extension;
    if (key <= PG_KEY_MAX)
        return true;
    PyErr_SetString(PyExc_ValueError, "the key is too long");
    return false;
}

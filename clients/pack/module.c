/* module.c - purgatoryd.clients._pack: batches packed from Python objects and from columns.
 *
 * This file packs what is plain (plain.h), and buffers of numpy and Arrow. For anything else it
 * calls Python (`slow`), which converts the row or raises the error, so each rule and each error
 * text has one place. Limited API: one binary for Python 3.11
 * and later. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <string.h>

#include "arguments.h"
#include "batch.h"
#include "direct.h"
#include "ends.h"
#include "leases.h"
#include "lot.h"
#include "maker.h"
#include "plain.h"
#include "types.h"

static PyObject *fields[4];       /* interned names of the fields of a dict: enum field */
enum field { F_KEY, F_DELAY, F_TOPIC, F_PAYLOAD, F_WATCHED, F_COUNT };

/* ---- Builder: a batch under construction -------------------------------------------------- */

struct builder {
    PyObject_HEAD
    struct pack_batch batch;
    uint64_t bytes_max;           /* a batch with more bytes takes no further record */
    PyObject *topic;              /* topic of the last record; NULL = none */
    int topic_index;              /* index of its entry of the name table */
};

static int builder_init(struct builder *b, PyObject *args, PyObject *named UNUSED)
{
    unsigned long long bytes_max;
    if (!PyArg_ParseTuple(args, "K", &bytes_max))
        return -1;
    b->bytes_max = bytes_max;
    return 0;
}

static void builder_dealloc(struct builder *b)
{
    pack_free(&b->batch);
    Py_CLEAR(b->topic);
    freed((PyObject *)b);
}

static bool takes(const struct builder *b)
{
    return pack_takes(&b->batch, b->bytes_max);
}

static Py_ssize_t builder_length(struct builder *b)
{
    return b->batch.count;
}

static PyObject *builder_fits(struct builder *b, PyObject *name)
{
    struct pack_text entry;
    if (bytes_of(&entry, name, UINT64_MAX) != PLAIN)
        return PyErr_Format(PyExc_TypeError, "an entry of the name table must be bytes");
    return PyBool_FromLong(takes(b) &&
                           pack_has_space(&b->batch, entry));
}

static int named(struct builder *b, struct pack_text entry)
{
    const int index = pack_name(&b->batch, entry);
    if (index == PACK_NO_MEMORY)
        PyErr_NoMemory();
    return index;
}

/* Add a record of any kind; the arguments have been checked (see fields_of). */
static PyObject *builder_record(struct builder *b, PyObject *args)
{
    struct pack_single s;
    if (!fields_of(&s, args))
        return NULL;
    const int index = named(b, s.entry);
    if (index < 0)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "the batch is full");
    s.record.name = (uint16_t)index;
    if (!pack_record(&b->batch, s.record, s.key, s.payload, s.extension))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* Return (number of records, entries of the name table, its bytes, body). */
static PyObject *builder_body(struct builder *b, PyObject *none UNUSED)
{
    PyObject *body = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)pack_body_bytes(&b->batch));
    if (body == NULL)
        return NULL;
    pack_write(&b->batch, (uint8_t *)PyBytes_AsString(body));
    return Py_BuildValue("IIKN", b->batch.count, b->batch.names_count,
                         (unsigned long long)pack_names_bytes(&b->batch), body);
}

/* ---- Source: the rows of a bulk call ------------------------------------------------------- */

enum form { ABSENT, OBJECTS, FIXED, UCS4, OFFSETS_32, OFFSETS_64, SECONDS, WHOLE, READY, CODES,
            BYTE };

struct column {
    enum form form;
    PyObject *objects;            /* OBJECTS: a list; CODES: list of entries of the name table */
    Py_buffer data, offsets;
    Py_ssize_t first;             /* OFFSETS: index of the first offset */
    long long detail;             /* WHOLE: unit in ns; READY: enum pg_time_kind; OFFSETS: enum
                                     pg_key_type */
};

struct source {
    PyObject_HEAD
    Py_ssize_t count;             /* number of rows */
    struct pg_record head;        /* op and mode of each record, flags of most; name = 0 */
    struct times times;
    PyObject *entry;              /* entry of the name table for rows without a topic */
    PyObject *topics;             /* dict: entry of the name table by topic */
    PyObject *slow;               /* slow(index) -> (kind, ns, key type, key, entry, payload,
                                     flags, value, extension) */
    PyObject *rows;               /* list of rows; NULL = the rows are given as columns */
    struct column key, time, topic, payload;
    struct column flags;          /* BYTE; ABSENT = all rows have the flags of `head`. WATCH: enum
                                     pg_watch_key_flag */
    struct column watched;        /* WATCH: the watch key. PUT: CODES of the extension items */
    struct column value;          /* WHOLE. WATCH: the target; ABSENT = 1. Else the record's value */
};

static void column_close(struct column *c)
{
    Py_CLEAR(c->objects);
    PyBuffer_Release(&c->data);
    PyBuffer_Release(&c->offsets);
}

/* Open a buffer of `count` items of `item` bytes each; item = 0: of any size. */
static bool buffer_open(Py_buffer *view, PyObject *from, Py_ssize_t count, Py_ssize_t item)
{
    if (PyObject_GetBuffer(from, view, PyBUF_STRIDED_RO) != 0)
        return false;
    const bool sound = view->ndim == 1 && (item == 0 || view->itemsize == item) &&
                       view->len / (view->itemsize != 0 ? view->itemsize : 1) >= count;
    if (!sound)
        PyErr_SetString(PyExc_ValueError, "a buffer has another shape");
    return sound;
}

static const uint8_t *cell(const Py_buffer *view, Py_ssize_t i)
{
    return (const uint8_t *)view->buf + i * view->strides[0];
}

/* Forms of a column that is a tuple (letter, buffer, offsets or entries, first offset, detail). */
static const struct { char letter; enum form form; Py_ssize_t item, offset; } forms[] = {
    {'S', FIXED, 0, 0}, {'U', UCS4, 0, 0}, {'i', OFFSETS_32, 1, 4}, {'l', OFFSETS_64, 1, 8},
    {'d', SECONDS, 8, 0}, {'q', WHOLE, 8, 0}, {'t', READY, 8, 0}, {'c', CODES, 8, 0},
    {'B', BYTE, 1, 0},
};

static bool buffers_open(struct column *c, PyObject *from, Py_ssize_t count)
{
    int letter;
    PyObject *data, *other;
    if (!PyArg_ParseTuple(from, "COOnL", &letter, &data, &other, &c->first, &c->detail))
        return false;
    for (unsigned i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (forms[i].letter != letter)
            continue;
        c->form = forms[i].form;
        if (forms[i].offset != 0)
            return c->first >= 0 && buffer_open(&c->data, data, 0, forms[i].item) &&
                   buffer_open(&c->offsets, other, c->first + count + 1, forms[i].offset);
        c->objects = Py_NewRef(other);
        return buffer_open(&c->data, data, count, forms[i].item);
    }
    PyErr_SetString(PyExc_ValueError, "a column has an unknown form");
    return false;
}

/* Open a column: None, a list, or a tuple as in `forms`. */
static bool column_open(struct column *c, PyObject *from, Py_ssize_t count)
{
    if (from == Py_None)
        return true;
    if (!PyList_Check(from))
        return buffers_open(c, from, count);
    c->form = OBJECTS;
    c->objects = Py_NewRef(from);
    return true;
}

static int source_init(struct source *s, PyObject *args, PyObject *named UNUSED)
{
    PyObject *entry, *topics, *slow, *rows, *key, *time, *topic, *payload, *flags, *watched, *value;
    if (!PyArg_ParseTuple(args, "nbbbpLSO!OOOOOOOOO", &s->count, &s->head.op, &s->head.mode,
                          &s->head.flags, &s->times.virtual_clock, &s->times.now_ns, &entry,
                          &PyDict_Type, &topics, &slow, &rows, &key, &time, &topic, &payload,
                          &flags, &watched, &value))
        return -1;
    s->entry = Py_NewRef(entry);
    s->topics = Py_NewRef(topics);
    s->slow = Py_NewRef(slow);
    if (rows != Py_None)
        s->rows = Py_NewRef(rows);
    return column_open(&s->key, key, s->count) && column_open(&s->time, time, s->count) &&
                   column_open(&s->topic, topic, s->count) &&
                   column_open(&s->payload, payload, s->count) &&
                   column_open(&s->flags, flags, s->count) &&
                   column_open(&s->watched, watched, s->count) &&
                   column_open(&s->value, value, s->count)
               ? 0
               : -1;
}

static PyMemberDef source_members[] = {
    {"count", T_PYSSIZET, offsetof(struct source, count), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static void source_dealloc(struct source *s)
{
    Py_CLEAR(s->entry);
    Py_CLEAR(s->topics);
    Py_CLEAR(s->slow);
    Py_CLEAR(s->rows);
    column_close(&s->key);
    column_close(&s->time);
    column_close(&s->topic);
    column_close(&s->payload);
    column_close(&s->flags);
    column_close(&s->watched);
    column_close(&s->value);
    freed((PyObject *)s);
}

/* ---- columns ------------------------------------------------------------------------------ */

/* Write a code point as UTF-8; returns its length, 0 = it is a surrogate or no code point. */
static unsigned utf8(uint8_t *out, uint32_t c)
{
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    const unsigned len = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    if ((c >= 0xd800 && c < 0xe000) || c > 0x10ffff)
        return 0;
    for (unsigned i = len; --i != 0; c >>= 6)
        out[i] = 0x80 | (c & 0x3f);
    out[0] = (uint8_t)((len == 2 ? 0xc0 : len == 3 ? 0xe0 : 0xf0) | c);
    return len;
}

/* Take a cell of a numpy column of str. numpy pads the cells with NULs. */
static enum outcome ucs4_of(struct item *item, const struct column *c, Py_ssize_t i)
{
    Py_ssize_t left = c->data.itemsize / 4;
    const uint8_t *at = cell(&c->data, i);
    uint32_t point = 0;
    uint64_t used = 0;
    for (; left > 0; left--) {
        memcpy(&point, at + 4 * (left - 1), sizeof point);
        if (point != 0)
            break;
    }
    for (; left > 0; left--, at += 4) {
        memcpy(&point, at, sizeof point);
        const unsigned len = utf8(item->encoded + used, point);
        used += len;
        if (len == 0 || used > PG_KEY_MAX)
            return ODD;
    }
    item->key = (struct pack_text){item->encoded, used};
    return PLAIN;
}

static void fixed_of(struct pack_text *text, const struct column *c, Py_ssize_t i)
{
    const uint8_t *at = cell(&c->data, i);
    uint64_t left = (uint64_t)c->data.itemsize;
    while (left > 0 && at[left - 1] == 0)
        left--;
    *text = (struct pack_text){at, left};
}

static int64_t offset_at(const struct column *c, Py_ssize_t i)
{
    const uint8_t *at = cell(&c->offsets, c->first + i);
    int32_t narrow;
    int64_t wide;
    if (c->form == OFFSETS_32) {
        memcpy(&narrow, at, sizeof narrow);
        return narrow;
    }
    memcpy(&wide, at, sizeof wide);
    return wide;
}

static enum outcome between(struct pack_text *text, const struct column *c, Py_ssize_t i)
{
    const int64_t start = offset_at(c, i), end = offset_at(c, i + 1);
    if (start < 0 || end < start || end > c->data.len) {
        PyErr_SetString(PyExc_ValueError, "the offsets of a column are out of order");
        return FAILED;
    }
    *text = (struct pack_text){(const uint8_t *)c->data.buf + start, (uint64_t)(end - start)};
    return PLAIN;
}

static enum outcome text_of(struct pack_text *text, const struct column *c, Py_ssize_t i)
{
    if (c->form != FIXED)
        return between(text, c, i);
    fixed_of(text, c, i);
    return PLAIN;
}

static enum outcome key_in(struct item *item, const struct column *c, Py_ssize_t i)
{
    enum outcome found = PLAIN;
    item->head.key_type = c->detail == PG_KEY_STR ? PG_KEY_STR : PG_KEY_BYTES;
    if (c->form == UCS4) {
        item->head.key_type = PG_KEY_STR;
        found = ucs4_of(item, c, i);
    } else {
        found = text_of(&item->key, c, i);
    }
    return found != PLAIN || item->key.bytes - 1 < PG_KEY_MAX ? found : ODD;
}

static enum outcome time_in(struct item *item, const struct source *s, Py_ssize_t i)
{
    const struct column *c = &s->time;
    double seconds;
    int64_t n;
    if (c->form == SECONDS) {
        memcpy(&seconds, cell(&c->data, i), sizeof seconds);
        return wait_s(item, &s->times, seconds);
    }
    memcpy(&n, cell(&c->data, i), sizeof n);
    if (c->form == WHOLE)
        return whole(item, &s->times, n, c->detail);
    item->head.time_kind = (uint8_t)c->detail;
    item->head.time_ns = n;
    return PLAIN;
}

static enum outcome payload_in(struct item *item, const struct column *c, Py_ssize_t i)
{
    const enum outcome found = text_of(&item->payload, c, i);
    return found != PLAIN || item->payload.bytes <= PG_PAYLOAD_MAX ? found : ODD;
}

/* Write the extension of a WATCH with one watch key. `flags`: enum pg_watch_key_flag. */
static void watch_key(struct item *item, const struct item *watched, uint64_t target, uint8_t flags)
{
    const struct pg_watch_key head = {.target = target, .key_len = (uint8_t)watched->key.bytes,
                                      .key_type = watched->head.key_type, .flags = flags};
    memcpy(item->ext, &head, sizeof head);
    memcpy(item->ext + sizeof head, watched->key.at, watched->key.bytes);
    item->extension = (struct pack_text){item->ext, sizeof head + watched->key.bytes};
}

static enum outcome watch_of(struct item *item, const struct source *s, Py_ssize_t i,
                             PyObject *object)
{
    struct item watched;
    uint64_t target = 1;
    const enum outcome found = object != NULL ? key_of(&watched, object)
                                              : key_in(&watched, &s->watched, i);
    if (found != PLAIN)
        return found;
    if (s->value.form != ABSENT)
        memcpy(&target, cell(&s->value.data, i), sizeof target);
    watch_key(item, &watched, target, s->flags.form == BYTE ? *cell(&s->flags.data, i) : 0);
    return PLAIN;
}

/* ---- rows ---------------------------------------------------------------------------------- */

static PyObject *listed(PyObject *list, Py_ssize_t i)
{
    PyObject *object = PyList_GetItem(list, i); /* raises if the list became shorter */
    return Py_XNewRef(object);
}

static enum outcome of_tuple(PyObject *object[F_COUNT], PyObject *row)
{
    const Py_ssize_t size = PyTuple_Size(row);
    if (size < 2 || size > 4)
        return ODD;
    for (Py_ssize_t i = 0; i < size; i++)
        object[i] = Py_NewRef(PyTuple_GetItem(row, i));
    return PLAIN;
}

static enum outcome of_dict(PyObject *object[F_COUNT], PyObject *row)
{
    Py_ssize_t found = 0;
    for (int i = 0; i < 4; i++) {
        object[i] = Py_XNewRef(PyDict_GetItemWithError(row, fields[i]));
        if (object[i] == NULL && PyErr_Occurred())
            return FAILED;
        found += object[i] != NULL;
    }
    return object[F_KEY] != NULL && object[F_DELAY] != NULL && found == PyDict_Size(row) ? PLAIN
                                                                                        : ODD;
}

/* Get the objects of a row: a tuple (key, delay[, topic[, payload]]) or a dict. */
static enum outcome objects_of(PyObject *object[F_COUNT], const struct source *s, Py_ssize_t i)
{
    PyObject *row = listed(s->rows, i);
    if (row == NULL)
        return FAILED;
    const enum outcome found = PyTuple_CheckExact(row)  ? of_tuple(object, row)
                               : PyDict_CheckExact(row) ? of_dict(object, row)
                                                        : ODD;
    Py_DECREF(row);
    return found;
}

static enum outcome cells_of(PyObject *object[F_COUNT], const struct source *s, Py_ssize_t i)
{
    const struct column *columns[F_COUNT] = {&s->key, &s->time, &s->topic, &s->payload,
                                             &s->watched};
    for (int k = 0; k < F_COUNT; k++)
        if (columns[k]->form == OBJECTS && (object[k] = listed(columns[k]->objects, i)) == NULL)
            return FAILED;
    return PLAIN;
}

static enum outcome convert(struct item *item, PyObject *object[F_COUNT], const struct source *s,
                            Py_ssize_t i)
{
    const bool rows = s->rows != NULL;
    enum outcome found = object[F_KEY] != NULL ? key_of(item, object[F_KEY])
                                               : key_in(item, &s->key, i);
    if (found == PLAIN && object[F_DELAY] != NULL)
        found = delay_of(item, &s->times, object[F_DELAY]);
    else if (found == PLAIN && s->time.form != ABSENT)
        found = time_in(item, s, i);
    if (found != PLAIN)
        return found;
    return rows || s->payload.form == OBJECTS || s->payload.form == ABSENT
               ? payload_of(item, object[F_PAYLOAD])
               : payload_in(item, &s->payload, i);
}

/* Take the extension items of a PUT. */
static enum outcome items_of(struct item *item, const struct column *c, Py_ssize_t i)
{
    int64_t code;
    memcpy(&code, cell(&c->data, i), sizeof code);
    PyObject *items = PyList_GetItem(c->objects, code < 0 ? -1 : (Py_ssize_t)code);
    if (items == NULL)
        return FAILED;
    return bytes_of(&item->extension, items, PG_ITEMS_MAX);
}

/* Set what depends on the operation: flags, value and extension. */
static enum outcome complete(struct item *item, PyObject *object[F_COUNT], const struct source *s,
                             Py_ssize_t i)
{
    if (item->head.op == PG_OP_WATCH) {
        if (object[F_TOPIC] == Py_None)
            item->head.flags = 0; /* the operation publishes no notice */
        return watch_of(item, s, i, object[F_WATCHED]);
    }
    if (s->flags.form == BYTE)
        item->head.flags = *cell(&s->flags.data, i);
    if (s->value.form != ABSENT)
        memcpy(&item->head.value, cell(&s->value.data, i), sizeof item->head.value);
    return s->watched.form == CODES ? items_of(item, &s->watched, i) : PLAIN;
}

/* ---- filling a batch ------------------------------------------------------------------------ */

/* Get the index of a topic's entry of the name table; PACK_NO_NAME = the batch is full. */
static enum outcome topic_index(struct builder *b, const struct source *s, PyObject *topic,
                                int *index)
{
    struct pack_text entry;
    if (topic == b->topic) {
        *index = b->topic_index;
        return PLAIN;
    }
    PyObject *name = s->entry;
    if (topic != Py_None) {
        if (!PyUnicode_CheckExact(topic))
            return ODD;
        name = PyDict_GetItemWithError(s->topics, topic);
        if (name == NULL)
            return PyErr_Occurred() ? FAILED : ODD;
    }
    if (bytes_of(&entry, name, UINT64_MAX) != PLAIN)
        return ODD;
    *index = named(b, entry);
    if (*index == PACK_NO_MEMORY)
        return FAILED;
    if (*index != PACK_NO_NAME) {
        Py_XDECREF(b->topic);
        b->topic = Py_NewRef(topic);
        b->topic_index = *index;
    }
    return PLAIN;
}

static enum outcome code_index(struct builder *b, const struct source *s, Py_ssize_t i, int *index)
{
    int64_t code;
    struct pack_text entry;
    memcpy(&code, cell(&s->topic.data, i), sizeof code);
    PyObject *name = PyList_GetItem(s->topic.objects, code < 0 ? -1 : (Py_ssize_t)code);
    if (name == NULL || bytes_of(&entry, name, UINT64_MAX) != PLAIN)
        return FAILED;
    *index = named(b, entry);
    return *index == PACK_NO_MEMORY ? FAILED : PLAIN;
}

/* Let Python convert row i, or raise. The result stays in *taken while its bytes are used. */
static enum outcome slowly(struct builder *b, const struct source *s, struct item *item,
                           Py_ssize_t i, int *index, PyObject **taken)
{
    const char *key, *entry, *payload, *extension;
    Py_ssize_t key_len, entry_len, payload_len, extension_len;
    *taken = PyObject_CallFunction(s->slow, "n", i);
    if (*taken == NULL ||
        !PyArg_ParseTuple(*taken, "bLby#y#y#bKy#", &item->head.time_kind, &item->head.time_ns,
                          &item->head.key_type, &key, &key_len, &entry, &entry_len, &payload,
                          &payload_len, &item->head.flags, &item->head.value, &extension,
                          &extension_len))
        return FAILED;
    item->extension = (struct pack_text){(const uint8_t *)extension, (uint64_t)extension_len};
    item->key = (struct pack_text){(const uint8_t *)key, (uint64_t)key_len};
    item->payload = (struct pack_text){(const uint8_t *)payload, (uint64_t)payload_len};
    *index = named(b, (struct pack_text){(const uint8_t *)entry, (uint64_t)entry_len});
    return *index == PACK_NO_MEMORY ? FAILED : PLAIN;
}

static enum outcome quickly(struct builder *b, const struct source *s, struct item *item,
                            PyObject *object[F_COUNT], Py_ssize_t i, int *index)
{
    enum outcome found = convert(item, object, s, i);
    if (found == PLAIN)
        found = complete(item, object, s, i);
    if (found != PLAIN)
        return found;
    if (s->topic.form == CODES)
        return code_index(b, s, i, index);
    return topic_index(b, s, object[F_TOPIC] != NULL ? object[F_TOPIC] : Py_None, index);
}

/* Pack row i. Returns 1 = packed, 0 = the name table is full, -1 = exception. */
static int pack_row(struct builder *b, const struct source *s, Py_ssize_t i)
{
    PyObject *object[F_COUNT] = {NULL}, *taken = NULL;
    struct item item;
    int index = PACK_NO_NAME, packed = -1;
    item.head = s->head;
    item.payload = item.extension = NOTHING;
    enum outcome found = s->rows != NULL ? objects_of(object, s, i) : cells_of(object, s, i);
    if (found == PLAIN)
        found = quickly(b, s, &item, object, i, &index);
    if (found == ODD)
        found = slowly(b, s, &item, i, &index, &taken);
    if (found == PLAIN && index == PACK_NO_NAME) {
        packed = 0;
    } else if (found == PLAIN) {
        item.head.name = (uint16_t)index;
        packed = pack_record(&b->batch, item.head, item.key, item.payload,
                             item.extension)
                     ? 1
                     : -1;
        if (packed < 0)
            PyErr_NoMemory();
    }
    for (int k = 0; k < F_COUNT; k++)
        Py_XDECREF(object[k]);
    Py_XDECREF(taken);
    return packed;
}

static PyTypeObject *source_type;

/* Pack rows from `start` on until the batch is full. Returns the index of the first row that was
 * not packed. */
static PyObject *builder_fill(struct builder *b, PyObject *args)
{
    struct source *s;
    Py_ssize_t i;
    if (!PyArg_ParseTuple(args, "O!n", source_type, &s, &i))
        return NULL;
    int packed = 1;
    for (; packed == 1 && i < s->count && takes(b); i += packed)
        if ((packed = pack_row(b, s, i)) < 0)
            return NULL;
    return PyLong_FromSsize_t(i);
}

/* ---- the module ------------------------------------------------------------------------------ */

static PyMethodDef builder_methods[] = {
    {"fits", (PyCFunction)builder_fits, METH_O, "Return whether one more record fits."},
    {"record", (PyCFunction)builder_record, METH_VARARGS, "Add a record of any kind."},
    {"fill", (PyCFunction)builder_fill, METH_VARARGS, "Pack rows of a Source."},
    {"body", (PyCFunction)builder_body, METH_NOARGS, "Return the body of the batch."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot builder_slots[] = {
    DOC("A batch under construction."),
    {Py_tp_init, builder_init},
    {Py_tp_dealloc, builder_dealloc},
    {Py_sq_length, builder_length},
    {Py_tp_methods, builder_methods},
    {0, NULL},
};
static PyType_Slot source_slots[] = {
    DOC("The rows of a bulk call."),
    {Py_tp_members, source_members},
    {Py_tp_init, source_init},
    {Py_tp_dealloc, source_dealloc},
    {0, NULL},
};
static PyType_Spec builder_spec = {"purgatoryd.clients._pack.Builder", sizeof(struct builder), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, builder_slots};
static PyType_Spec source_spec = {"purgatoryd.clients._pack.Source", sizeof(struct source), 0,
                                  Py_TPFLAGS_DEFAULT, source_slots};
static PyType_Spec *const specs[] = {&builder_spec, &source_spec, &maker_spec};
static const char *const names[] = {"Builder", "Source", "Maker"};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "purgatoryd.clients._pack",
                                    "Batches packed from Python objects and from columns.", -1,
                                    NULL, NULL, NULL, NULL, NULL};

static bool fields_open(void)
{
    static const char *const text[] = {"key", "delay", "topic", "payload"};
    for (int i = 0; i < 4; i++)
        if ((fields[i] = PyUnicode_InternFromString(text[i])) == NULL)
            return false;
    return true;
}

PyMODINIT_FUNC PyInit__pack(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || !fields_open())
        return NULL;
    for (unsigned i = 0; i < sizeof specs / sizeof *specs; i++) {
        PyObject *type = PyType_FromSpec(specs[i]);
        if (type == NULL || PyModule_AddObjectRef(made, names[i], type) != 0)
            return NULL;
        if (i == 1)
            source_type = (PyTypeObject *)type;
    }
    return direct_types_add(made) && lot_types_add(made) && ends_open(made) && leases_open(made)
               ? made
               : NULL;
}

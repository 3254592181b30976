/* maker.c - objects of frozen dataclasses with slots, made without their slow __init__. */

#include "maker.h"

#include <stdbool.h>

#include "types.h"

enum { SLOTS_MAX = 16 };

struct maker {
    PyObject_HEAD
    PyTypeObject *made;           /* the class */
    Py_ssize_t count;             /* number of slots */
    PyObject *slots[SLOTS_MAX];   /* descriptors of the slots, in the order of the values */
    descrsetfunc set;             /* sets the value of any of these slots */
};

static int maker_init(struct maker *m, PyObject *args, PyObject *named UNUSED)
{
    PyTypeObject *made;
    PyObject *names;
    if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &made, &PyTuple_Type, &names))
        return -1;
    m->made = (PyTypeObject *)Py_NewRef((PyObject *)made);
    for (; m->count < PyTuple_Size(names) && m->count < SLOTS_MAX; m->count++) {
        PyObject *slot = PyObject_GetAttr((PyObject *)made, PyTuple_GetItem(names, m->count));
        if (slot == NULL)
            return -1;
        m->slots[m->count] = slot;
        m->set = (descrsetfunc)PyType_GetSlot(Py_TYPE(slot), Py_tp_descr_set);
    }
    return m->set != NULL ? 0 : -1;
}

static void maker_dealloc(struct maker *m)
{
    Py_CLEAR(m->made);
    while (m->count > 0)
        Py_CLEAR(m->slots[--m->count]);
    freed((PyObject *)m);
}

static PyObject *maker_make(struct maker *m, PyObject *const *values, Py_ssize_t count)
{
    if (count != m->count)
        return PyErr_Format(PyExc_TypeError, "%zd values for %zd slots", count, m->count);
    PyObject *made = ((allocfunc)PyType_GetSlot(m->made, Py_tp_alloc))(m->made, 0);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++)
        if (m->set(m->slots[i], made, values[i]) != 0)
            Py_CLEAR(made);
    return made;
}

static PyMethodDef methods[] = {
    {"make", (PyCFunction)(void (*)(void))maker_make, METH_FASTCALL,
     "Return a new object with a value for each slot."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    DOC("Makes objects of a class from the values of its slots."),
    {Py_tp_init, maker_init},
    {Py_tp_dealloc, maker_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};
PyType_Spec maker_spec = {"purgatoryd.clients._pack.Maker", sizeof(struct maker), 0,
                          Py_TPFLAGS_DEFAULT, slots};

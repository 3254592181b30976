/* types.h - the common part of the module's types. */
#ifndef PURGATORYD_PACK_TYPES_H
#define PURGATORYD_PACK_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define UNUSED __attribute__((unused))
#define DOC(text) {Py_tp_doc, (void *)(text)}

/* Let a member refer to another object, or to none. */
static inline void renew(PyObject **place, PyObject *value)
{
    PyObject *before = *place;
    *place = Py_XNewRef(value);
    Py_XDECREF(before);
}

/* Free an object after its members were released. */
static inline void freed(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

#endif

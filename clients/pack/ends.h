/* ends.h - the Python types Table and Tickets: outcomes of operations, found by ticket. */
#ifndef PURGATORYD_PACK_ENDS_H
#define PURGATORYD_PACK_ENDS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* Add the types to a module. Returns false with an exception. */
bool ends_open(PyObject *module);

#endif

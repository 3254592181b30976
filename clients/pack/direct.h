/* direct.h - direct calls: calls that the caller's thread sends, and whose answer it receives. */
#ifndef PURGATORYD_PACK_DIRECT_H
#define PURGATORYD_PACK_DIRECT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* Add the types Answer, Requests and Direct to the module. Returns false with an exception. */
bool direct_types_add(PyObject *module);

#endif

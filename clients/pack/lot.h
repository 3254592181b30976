/* lot.h - lots: calls that do not wait, which their callers pack into one batch. */
#ifndef PURGATORYD_PACK_LOT_H
#define PURGATORYD_PACK_LOT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* Add the types Lot, Receipt and Caller to the module. Returns false with an exception. */
bool lot_types_add(PyObject *module);

#endif

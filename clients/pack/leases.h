/* leases.h - jobs of consumer groups: the Python types Lease and Job, and functions that handle many
 * of them at once. */
#ifndef PURGATORYD_PACK_LEASES_H
#define PURGATORYD_PACK_LEASES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* Add the types and functions to a module. Returns false with an exception. */
bool leases_open(PyObject *module);

#endif

/* direct.h - direct calls: calls that the caller's thread sends, and whose answer it receives. */
#ifndef PURGATORYD_PACK_DIRECT_H
#define PURGATORYD_PACK_DIRECT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

/* Return how many requests have ended the open lots. `requests`: an object of type Requests. */
uint64_t requests_ends(PyObject *requests);
bool is_requests(PyObject *object);
/* Return the number of forks between the first process and this one. */
uint32_t fork_count(void);

/* Add the types Answer, Requests and Direct to the module. Returns false with an exception. */
bool direct_types_add(PyObject *module);

#endif

/* direct.h - direct calls: calls that the caller's thread sends, and whose answer it receives. */
#ifndef PURGATORYD_PACK_DIRECT_H
#define PURGATORYD_PACK_DIRECT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "batch.h"

/* Return how many requests have ended the open lots. `requests`: an object of type Requests. */
uint64_t requests_ends(PyObject *requests);
bool is_requests(PyObject *object);
bool is_answer(PyObject *object);
bool is_direct(PyObject *object);
/* Store the result of a call, an object of type Answer. */
void answer_settle(PyObject *call, const struct pg_result *result);

/* Return whether a caller may send this lot itself. */
bool direct_streams(PyObject *direct, PyObject *lot);
/* Send a full lot, and let callers send `next` afterwards. Returns false if the engine has to collect
 * the lot or `next`, perhaps with an exception. */
bool direct_send(PyObject *direct, PyObject *lot, PyObject *next);

/* Return the number of forks between the first process and this one. */
uint32_t fork_count(void);

/* Add the types Answer, Requests and Direct to the module. Returns false with an exception. */
bool direct_types_add(PyObject *module);

#endif

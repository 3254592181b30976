/* lot.h - lots: calls that do not wait, which their callers pack into one batch. */
#ifndef PURGATORYD_PACK_LOT_H
#define PURGATORYD_PACK_LOT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "batch.h"

/* Shut a lot, and return its message with space for the frame; NULL = exception. */
PyObject *lot_message(PyObject *lot);
/* Write the frame of the message. `frame` has all fields except count, names and names_bytes. */
void lot_frame(PyObject *lot, struct pg_frame frame, uint8_t *message);
/* Note that the message was sent, so that the engine does not collect the lot. */
void lot_sent_note(PyObject *lot);
/* Store the results of a lot. Returns false if their number is wrong, or if a call was refused:
 * nothing has happened then. */
bool lot_answered(PyObject *lot, const struct pg_result *results, uint64_t count);

/* Add the types Lot, Receipt and Caller to the module. Returns false with an exception. */
bool lot_types_add(PyObject *module);

#endif

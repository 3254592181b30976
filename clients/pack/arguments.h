/* arguments.h - the arguments of add() and cancel() as a record, if they need no conversion by
 * Python. */
#ifndef PURGATORYD_PACK_ARGUMENTS_H
#define PURGATORYD_PACK_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "plain.h"

enum { ADD_KEY, ADD_DELAY, ADD_DELAY_NS, ADD_DEADLINE, ADD_DEADLINE_BOOT_NS, ADD_TOPIC,
       ADD_PAYLOAD, ADD_MODE, ADD_WITHIN, ADD_TAG, ADD_PRIORITY, ADD_ORDER_KEY, ADD_LATE,
       ADD_UNIQUE_FOR, ADD_ARGUMENTS };
enum { CANCEL_KEY, CANCEL_TICKET, CANCEL_ARGUMENTS };

/* Take an int that fits into 64 bits. */
bool whole_of(int64_t *n, PyObject *number);
/* Take the arguments of an add, except topic and mode. */
enum outcome add_of(struct item *item, const struct times *times, PyObject *const a[]);
/* Take a mode. `modes`: dict, enum pg_put_mode by name. */
enum outcome mode_of(struct item *item, PyObject *modes, PyObject *mode);
/* Take the entry of the name table of a topic. `topics`: dict, entry by topic. */
enum outcome topic_of(struct pack_text *entry, PyObject *topics, PyObject *topic);
/* Take the arguments of a cancel. */
enum outcome cancel_of(struct item *item, PyObject *const a[]);

/* Take a tuple: an entry of the name table, and the fields of struct pg_record with bytes in place
 * of their lengths. Returns false with an exception. */
bool fields_of(struct pack_single *s, PyObject *tuple);

#endif

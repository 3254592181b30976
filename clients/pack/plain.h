/* plain.h - values that need no conversion by Python: exact str and bytes, ints and floats in range. */
#ifndef PURGATORYD_PACK_PLAIN_H
#define PURGATORYD_PACK_PLAIN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "batch.h"

enum { UTF8_MAX = 4 };
enum outcome { PLAIN, ODD, FAILED };   /* ODD = only Python can convert it; FAILED = exception */

static const struct pack_text NOTHING = {NULL, 0};

struct item {                     /* a record that is about to be packed */
    struct pg_record head;
    struct pack_text key, payload, extension;
    uint8_t encoded[PG_KEY_MAX + UTF8_MAX]; /* bytes of a key that was UCS-4 */
    uint8_t ext[sizeof(struct pg_watch_key) + PG_KEY_MAX]; /* extension of a WATCH or a PUT */
};

struct times {                    /* clock that converts delays into times */
    int virtual_clock;            /* 1 = delays stay delays, and the daemon computes the deadlines */
    long long now_ns;             /* time of the call, for the real clock */
};

/* Take a wait in nanoseconds. */
enum outcome wait_ns(struct item *item, const struct times *times, int64_t wait);
/* Take a wait in seconds. Halves of a nanosecond are rounded as round() of Python does. */
enum outcome wait_s(struct item *item, const struct times *times, double seconds);
/* Take a wait of `n` units. */
enum outcome whole(struct item *item, const struct times *times, int64_t n, int64_t unit_ns);
/* Take an int or a float as a wait in seconds. */
enum outcome delay_of(struct item *item, const struct times *times, PyObject *delay);
enum outcome bytes_of(struct pack_text *text, PyObject *bytes, uint64_t limit);
enum outcome key_of(struct item *item, PyObject *key);
/* Take a tag, as the extension of a PUT; None = no tag. */
enum outcome tag_of(struct item *item, PyObject *tag);
/* Take a payload; NULL and None are an empty one. */
enum outcome payload_of(struct item *item, PyObject *payload);

#endif

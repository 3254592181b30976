/* plain.c - take values that need no conversion by Python (plain.h). */

#include "plain.h"

#include <math.h>
#include <string.h>

static const double TOO_FAR_NS = 9223372036854775808.0; /* 2^63: one more than the latest time */

enum outcome wait_ns(struct item *item, const struct times *times, int64_t wait)
{
    const int64_t start_ns = times->virtual_clock ? 0 : times->now_ns;
    if (wait < 0)
        wait = 0;
    if (wait > INT64_MAX - start_ns)
        return ODD;
    item->head.time_kind = times->virtual_clock ? PG_T_DELAY : PG_T_BOOT;
    item->head.time_ns = wait + start_ns;
    return PLAIN;
}

enum outcome wait_s(struct item *item, const struct times *times, double seconds)
{
    const double ns = rint(seconds * 1e9);
    if (!isfinite(seconds) || ns >= TOO_FAR_NS)
        return ODD;
    return wait_ns(item, times, ns > 0 ? (int64_t)ns : 0);
}

enum outcome whole(struct item *item, const struct times *times, int64_t n, int64_t unit_ns)
{
    if (n > INT64_MAX / unit_ns)
        return ODD;
    return wait_ns(item, times, n > 0 ? n * unit_ns : 0);
}

enum outcome delay_of(struct item *item, const struct times *times, PyObject *delay)
{
    if (PyFloat_CheckExact(delay))
        return wait_s(item, times, PyFloat_AsDouble(delay));
    if (!PyLong_CheckExact(delay))
        return ODD;
    int overflow;
    const int64_t seconds = PyLong_AsLongLongAndOverflow(delay, &overflow);
    return overflow != 0 ? ODD : whole(item, times, seconds, 1000000000);
}

enum outcome bytes_of(struct pack_text *text, PyObject *bytes, uint64_t limit)
{
    char *at;
    Py_ssize_t length;
    if (!PyBytes_CheckExact(bytes) || PyBytes_AsStringAndSize(bytes, &at, &length) != 0)
        return ODD;
    *text = (struct pack_text){(const uint8_t *)at, (uint64_t)length};
    return text->bytes <= limit ? PLAIN : ODD;
}

enum outcome key_of(struct item *item, PyObject *key)
{
    if (PyUnicode_CheckExact(key)) {
        Py_ssize_t length;
        const char *at = PyUnicode_AsUTF8AndSize(key, &length);
        if (at == NULL) {
            PyErr_Clear();        /* a surrogate; Python raises the error with a better text */
            return ODD;
        }
        item->head.key_type = PG_KEY_STR;
        item->key = (struct pack_text){(const uint8_t *)at, (uint64_t)length};
    } else if (bytes_of(&item->key, key, PG_KEY_MAX) == PLAIN) {
        item->head.key_type = PG_KEY_BYTES;
    } else {
        return ODD;
    }
    return item->key.bytes - 1 < PG_KEY_MAX ? PLAIN : ODD;
}

enum outcome tag_of(struct item *item, PyObject *tag)
{
    Py_ssize_t length;
    item->extension = NOTHING;
    if (tag == Py_None)
        return PLAIN;
    const char *at = PyUnicode_CheckExact(tag) ? PyUnicode_AsUTF8AndSize(tag, &length) : NULL;
    if (at == NULL) {
        PyErr_Clear();            /* Python raises the error with a better text */
        return ODD;
    }
    if (length == 0 || length > PG_TAG_MAX || memchr(at, 0, (size_t)length) != NULL)
        return ODD;
    const struct pg_ext head = {.kind = PG_EXT_TAG, .extra = (uint32_t)length};
    const size_t space = ((size_t)length + PG_GRANULE - 1) / PG_GRANULE * PG_GRANULE;
    memcpy(item->ext, &head, sizeof head);
    memset(item->ext + sizeof head, 0, space);
    memcpy(item->ext + sizeof head, at, (size_t)length);
    item->extension = (struct pack_text){item->ext, sizeof head + space};
    return PLAIN;
}

enum outcome payload_of(struct item *item, PyObject *payload)
{
    item->payload = (struct pack_text){NULL, 0};
    return payload == NULL || payload == Py_None ? PLAIN
                                                 : bytes_of(&item->payload, payload,
                                                            PG_PAYLOAD_MAX);
}

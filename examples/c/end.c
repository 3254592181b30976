/* Decode how timers and operations ended; see purgatoryd.h, and "Notices" in docs/protocol.md. */
#include "end.h"

#include <string.h>

enum { E_OPERATION = 4, E_SCHEDULE = 8 };

_Static_assert(sizeof(struct pg_verdict) == 16, "pg_verdict");

/* Cut the verdict and the bitmap of missing keys from the front of the payload. */
static bool take_verdict(struct pg_end *end, const char **payload, size_t *length)
{
    if (*length < sizeof end->verdict)
        return false;
    memcpy(&end->verdict, *payload, sizeof end->verdict);
    const size_t size = sizeof end->verdict + end->verdict.bitmap_bytes;
    if (*length < size)
        return false;
    end->missing = (const uint8_t *)*payload + sizeof end->verdict;
    *payload += size;
    *length -= size;
    return true;
}

/* Split the key of an occurrence: the key of its schedule, '@', and its nominal time in ns. */
static bool take_occurrence(struct pg_end *end, const char *key, size_t length)
{
    size_t at = length;
    int64_t nominal_ns = 0;
    while (at > 0 && key[at - 1] != '@')
        at--;
    const bool negative = at < length && key[at] == '-';
    for (size_t n = at + negative; n < length; n++)
        nominal_ns = nominal_ns * 10 + (key[n] - '0');
    end->schedule_len = at == 0 ? 0 : at - 1;
    end->nominal_ns = negative ? -nominal_ns : nominal_ns;
    return at > 0;
}

struct pg_end pg_end_of(struct pg_raw_end raw, const char **payload, size_t *length)
{
    struct pg_end end = {.cause = raw.cause};
    if ((raw.flags & E_OPERATION) != 0)
        end.has_verdict = take_verdict(&end, payload, length);
    if ((raw.flags & E_SCHEDULE) != 0)
        end.is_occurrence = take_occurrence(&end, raw.key, raw.key_len);
    return end;
}

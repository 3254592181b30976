/* Encode timers; see purgatoryd.h, and "BATCH and QUERY" in docs/protocol.md. */
#include "session.h"
#include "sha256.h"

#include <string.h>

enum { PUT = 1, CANCEL = 2 };
enum { EXT_TAG = 2, EXT_PRIORITY = 4, EXT_ORDER = 5, EXT_LATE = 6, EXT_UNIQUE = 7 };
enum { PAYLOAD_MAX = 65536, TAG_MAX = 63 };

struct ext {
    uint32_t kind, extra;
    int64_t value;
};

_Static_assert(sizeof(struct ext) == 16, "pg_ext");

/* The extension of a PUT: its items in the order of their kinds. */
struct items {
    char bytes[5 * sizeof(struct ext) + TAG_MAX + 1];
    size_t length;
};

static void add(struct items *items, uint32_t kind, uint32_t extra, int64_t value)
{
    const struct ext item = {kind, extra, value};
    memcpy(items->bytes + items->length, &item, sizeof item);
    items->length += sizeof item;
}

/* Add a tag, padded with zeros to a multiple of 16. */
static void add_tag(struct items *items, const char *tag)
{
    const size_t length = strlen(tag);
    add(items, EXT_TAG, (uint32_t)length, 0);
    memcpy(items->bytes + items->length, tag, length);
    items->length += (length + 15) / 16 * 16;
}

/* Add the hash of an order key: the first 8 bytes of its SHA-256, little endian. */
static void add_order(struct items *items, const char *key)
{
    uint8_t digest[32];
    int64_t hash;
    sha256(key, strlen(key), digest);
    memcpy(&hash, digest, sizeof hash);
    add(items, EXT_ORDER, 0, hash);
}

static struct items encode(const struct pg_timer *timer)
{
    struct items items = {.length = 0};
    if (timer->tag != NULL)
        add_tag(&items, timer->tag);
    if (timer->has_priority)
        add(&items, EXT_PRIORITY, timer->priority, 0);
    if (timer->order_key != NULL)
        add_order(&items, timer->order_key);
    if (timer->has_late)
        add(&items, EXT_LATE, timer->late, timer->late_grace_ns);
    if (timer->unique_ns != 0)
        add(&items, EXT_UNIQUE, 0, timer->unique_ns);
    return items;
}

/* Return the first error of a timer's options; NULL = there is none. */
static const char *bad_option(const struct pg_timer *timer)
{
    const size_t tag = timer->tag == NULL ? 1 : strlen(timer->tag);
    const size_t order = timer->order_key == NULL ? 1 : strlen(timer->order_key);
    if (timer->payload_len > PAYLOAD_MAX)
        return "a payload has at most 65536 bytes";
    if (tag == 0 || tag > TAG_MAX)
        return "a tag has 1 to 63 bytes";
    if (order == 0 || order > 255)
        return "an order key has 1 to 255 bytes";
    if (timer->has_priority && timer->priority > 9)
        return "a priority is 0 to 9";
    if (timer->has_late && (timer->late_grace_ns < 0 || (unsigned)timer->late > PG_LATE_COALESCE))
        return "a late policy is unknown, or its grace is negative";
    if (timer->unique_ns < 0)
        return "the time for which a key is unique is negative";
    return NULL;
}

bool pg_put(struct pg_client *client, struct pg_topic topic, const struct pg_timer *timer,
            struct pg_answer *answer)
{
    const char *error = bad_option(timer);
    if (error != NULL)
        return pg_fail(client, error);
    const struct items items = encode(timer);
    const struct pg_content content = {.key = {timer->key, strlen(timer->key)},
                                       .payload = {timer->payload, timer->payload_len},
                                       .extension = {items.bytes, items.length}};
    const struct record record = {
        .op = PUT, .mode = (uint8_t)timer->mode, .time_ns = timer->deadline_ns};
    return pg_pack(client, topic, content, record, answer);
}

bool pg_cancel(struct pg_client *client, struct pg_topic topic, const char *key, uint64_t ticket,
               struct pg_answer *answer)
{
    const struct pg_content content = {.key = {key, strlen(key)}};
    return pg_pack(client, topic, content, (struct record){.op = CANCEL, .value = ticket}, answer);
}

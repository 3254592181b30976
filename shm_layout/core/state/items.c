/* items.c - the extension items of a timer: properties that few timers have. */

#include "core/state/items.h"
#include "core/base/blobs.h"
#include "core/base/late_policy.h"
#include "core/base/slots.h"

/* The rules of a kind. An all-zero row is a kind that is not in use. */
struct item_rule {
    uint32_t extra_min, extra_max;
    bool has_text;                /* `extra` is the length of a text that follows the item */
    int64_t value_min, value_max;
    bool known;
};

static const struct item_rule item_rules[PG_EXT_KINDS] = {
    [PG_EXT_WALL] = {0, 0, false, INT64_MIN, INT64_MAX, true},
    [PG_EXT_TAG] = {1, PG_TAG_MAX, true, 0, 0, true},
    [PG_EXT_SCHEDULE] = {0, UINT32_MAX, false, INT64_MIN, INT64_MAX, true},
    [PG_EXT_PRIORITY] = {0, PG_PRIORITY_MAX, false, 0, 0, true},
    [PG_EXT_ORDER] = {0, 0, false, INT64_MIN, INT64_MAX, true},
    [PG_EXT_LATE] = {0, PG_LATE_POLICIES - 1, false, 0, PG_LATE_GRACE_MAX_NS, true},
    [PG_EXT_UNIQUE] = {0, PG_KEY_MAX, true, 1, INT64_MAX, true},
};

static bool item_sound(const struct pg_ext *item)
{
    const struct item_rule *rule = item->kind < PG_EXT_KINDS ? &item_rules[item->kind] : item_rules;
    return rule->known && item->extra >= rule->extra_min && item->extra <= rule->extra_max &&
           item->value >= rule->value_min && item->value <= rule->value_max &&
           (item->kind != PG_EXT_LATE || late_sound(item->extra, item->value));
}

static uint32_t text_space(uint32_t len) { return (len + PG_GRANULE - 1) / PG_GRANULE * PG_GRANULE; }

static bool padding_zero(const struct item_text *text)
{
    for (uint32_t i = text->len; i < text_space(text->len); i++)
        if (text->bytes[i] != 0)
            return false;
    return true;
}

bool item_next(struct items *rest, struct pg_ext *item, struct item_text *text)
{
    if (rest->bytes < sizeof *item)
        return false;
    memcpy(item, rest->at, sizeof *item);
    if (!item_sound(item))
        return false;
    *text = (struct item_text){rest->at + sizeof *item,
                               item_rules[item->kind].has_text ? item->extra : 0};
    const uint32_t bytes = (uint32_t)sizeof *item + text_space(text->len);
    if (rest->bytes < bytes || !padding_zero(text))
        return false;
    *rest = (struct items){rest->at + bytes, rest->bytes - bytes};
    return true;
}

bool items_sound(struct items items)
{
    struct pg_ext item;
    struct item_text text;
    uint32_t above = PG_EXT_WALL;
    while (item_next(&items, &item, &text)) {
        if (item.kind <= above)
            return false;
        above = item.kind;
    }
    return items.bytes == 0;
}

/* Find the item of a kind in sound items. `text` receives its text. */
static bool items_find(struct items rest, uint32_t kind, struct pg_ext *item, struct item_text *text)
{
    while (item_next(&rest, item, text))
        if (item->kind == kind)
            return true;
    return false;
}

bool items_have(const uint8_t *at, uint32_t bytes, enum pg_ext_kind kind)
{
    struct pg_ext item;
    struct item_text text;
    return items_find((struct items){at, bytes}, kind, &item, &text);
}

/* ---- unique keys ------------------------------------------------------------------------------ */

int64_t items_unique_ns(struct items items)
{
    struct pg_ext item;
    struct item_text text;
    return items_find(items, PG_EXT_UNIQUE, &item, &text) ? item.value : 0;
}

bool items_unique_put(struct items items, uint32_t key_len)
{
    struct pg_ext item;
    struct item_text text;
    return !items_find(items, PG_EXT_UNIQUE, &item, &text) ||
           (item.extra == 0 && item.value <= PG_UNIQUE_MAX_NS &&
            items.bytes + text_space(key_len) <= PG_ITEMS_MAX);
}

/* The item has the highest kind, so it is the last one. */
uint32_t items_unique_write(struct items items, const struct item_text *key, int64_t until_ns,
                            uint8_t *to)
{
    const uint32_t last = items.bytes - (uint32_t)sizeof(struct pg_ext);
    const struct pg_ext item = {PG_EXT_UNIQUE, key->len, until_ns};
    _Static_assert(PG_EXT_UNIQUE == PG_EXT_KINDS - 1, "the item is the last one");
    memcpy(to, items.at, last);
    memcpy(to + last, &item, sizeof item);
    memset(to + items.bytes, 0, text_space(key->len));
    memcpy(to + items.bytes, key->bytes, key->len);
    return items.bytes + text_space(key->len);
}

bool items_unique_sound(struct items items, const struct item_text *key)
{
    struct pg_ext item;
    struct item_text text;
    return !items_find(items, PG_EXT_UNIQUE, &item, &text) ||
           (text.len == key->len && memcmp(text.bytes, key->bytes, key->len) == 0);
}

struct pg_ext *ext_unique(uint8_t *at, uint32_t bytes)
{
    struct items rest = {at, bytes};
    struct pg_ext item;
    struct item_text text;
    while (rest.bytes >= sizeof item) {
        memcpy(&item, rest.at, sizeof item);
        if (item.kind == PG_EXT_UNIQUE)
            return (struct pg_ext *)(at + (bytes - rest.bytes));
        if (!item_next(&rest, &item, &text))
            break;
    }
    return NULL;
}

uint32_t unique_space(uint32_t key_len) { return text_space(key_len); }

/* ---- items of a slot --------------------------------------------------------------------------- */

bool slot_items_sound(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    const struct pg_cold *c = slot_cold(a, slot);
    const uint32_t bytes = put_item_bytes(h, c);
    const struct items items = {blob_at(&a->blobs, c->blob) + c->ext_len - bytes, bytes};
    const struct item_text key = {slot_key(a, slot), c->key_len};
    return (h->flags & PG_F_OPERATION) != 0 ||
           (((h->flags & PG_F_SCHEDULE) != 0) ==
                items_have(items.at, items.bytes, PG_EXT_SCHEDULE) &&
            ((h->flags & PG_F_EXT) != 0) == (c->ext_len != 0) && items_sound(items) &&
            items_unique_sound(items, &key));
}

/* Find an item of a timer. `text` receives its text. */
static const struct pg_ext *item_find(const struct pg_arena *a, uint32_t slot, uint32_t kind,
                                      struct item_text *text)
{
    const struct pg_cold *c = slot_cold(a, slot);
    struct items rest = {blob_at(&a->blobs, c->blob), c->ext_len};
    const uint8_t *at = rest.at;
    struct pg_ext item;
    if (LIKELY((slot_hot(a, slot)->flags & (PG_F_EXT | PG_F_OPERATION)) != PG_F_EXT))
        return NULL;
    for (; item_next(&rest, &item, text); at = rest.at)
        if (item.kind == kind)
            return (const struct pg_ext *)at;
    return NULL;
}

const struct pg_ext *slot_item(const struct pg_arena *a, uint32_t slot, enum pg_ext_kind kind)
{
    struct item_text text;
    return item_find(a, slot, kind, &text);
}

struct item_text slot_tag(const struct pg_arena *a, uint32_t slot)
{
    struct item_text text;
    return item_find(a, slot, PG_EXT_TAG, &text) != NULL ? text : (struct item_text){NULL, 0};
}

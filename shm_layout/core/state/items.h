/* items.h - the extension items of a timer: properties that few timers have. */
#ifndef PURGATORYD_STATE_ITEMS_H
#define PURGATORYD_STATE_ITEMS_H

#include "core/base/common.h"
#include "core/arena.h"

/* Items that lie one after another. */
struct items {
    const uint8_t *at;
    uint32_t bytes;
};

/* Read one item and move past it. `text` receives the text of the item; its length is 0 if the
 * item has none. Return false at the end of the items, or if the next item is malformed. */
struct item_text {
    const uint8_t *bytes;
    uint32_t len;
};
bool item_next(struct items *rest, struct pg_ext *item, struct item_text *text);
/* Return whether a PUT may carry these items: known kinds in ascending order, no kind twice, values
 * within their bounds, nothing left over. */
bool items_sound(struct items items);
/* Return whether sound items have one of this kind. */
bool items_have(const uint8_t *at, uint32_t bytes, enum pg_ext_kind kind);
/* Return the value of the item UNIQUE of sound items; 0 = they have none. */
int64_t items_unique_ns(struct items items);
/* Return whether a PUT may carry the item UNIQUE of sound items, if they have one. */
bool items_unique_put(struct items items, uint32_t key_len);
/* Copy items whose last one is UNIQUE to `to`, with the key behind this item. Return the length of
 * the copy in bytes. */
uint32_t items_unique_write(struct items items, const struct item_text *key, int64_t until_ns,
                            uint8_t *to);
/* Return whether stored items have no item UNIQUE, or one with this key. */
bool items_unique_sound(struct items items, const struct item_text *key);
/* Return the item UNIQUE of an extension of `bytes` bytes, even if the key behind it is not part of
 * the extension; NULL = none. */
struct pg_ext *ext_unique(uint8_t *at, uint32_t bytes);
/* Return the length in bytes of the key behind the item UNIQUE, with its padding. */
uint32_t unique_space(uint32_t key_len);
/* Return whether flags, length and items of a timer's extension match. The blob must be inside its
 * region. */
bool slot_items_sound(const struct pg_arena *a, uint32_t slot);
/* Return the item of a timer with this kind; NULL = the timer has none. */
const struct pg_ext *slot_item(const struct pg_arena *a, uint32_t slot, enum pg_ext_kind kind);
/* Return the tag of a timer; its length is 0 if the timer has no tag. */
struct item_text slot_tag(const struct pg_arena *a, uint32_t slot);

/* Length in bytes of the item with the wall deadline at the start of the blob. */
static inline uint32_t wall_item_bytes(const struct pg_hot *h)
{
    return h->flags & PG_F_WALL ? sizeof(struct pg_ext) : 0;
}
/* Length in bytes of the items that a PUT carried. A reader's copy may mix two timers. */
static inline uint32_t put_item_bytes(const struct pg_hot *h, const struct pg_cold *c)
{
    const uint32_t wall = wall_item_bytes(h);
    return LIKELY(c->ext_len <= wall) ? 0 : c->ext_len - wall;
}

#endif

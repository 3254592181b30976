/* select.c - the timers of a selection, found by a walk over all slots.
 *
 * A timer stays in its slot until it ends or is replaced, so a walk sees each timer that is armed
 * during the whole walk once. The bound on tickets leaves out timers that are armed later. */

#include "core/state/select.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/state/items.h"
#include "core/state/rows.h"
#include "core/state/timers.h"

static bool due_matches(const struct pg_select *s, int64_t deadline_ns)
{
    return deadline_ns >= s->from_ns && (deadline_ns < s->upto_ns || s->upto_ns == INT64_MAX);
}

/* Compare what the first half of a slot shows. */
static bool hot_matches(const struct pg_arena *a, const struct selection *s, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    return ctl_live(h->ctl) && (h->flags & PG_F_OPERATION) == 0 &&
           ticket_number(ctl_ticket(h->ctl)) < s->about.tickets &&
           (s->topic == PG_NIL ? slot_namespace(a, slot) == s->namespace_row
                               : h->topic == s->topic) &&
           ((h->flags & PG_F_WALL) != 0 || due_matches(&s->about, h->deadline_ns));
}

static bool blob_matches(const struct pg_arena *a, const struct selection *s, uint32_t slot)
{
    const struct pg_select *about = &s->about;
    const struct pg_cold *c = slot_cold(a, slot);
    const uint8_t *prefix = s->text + about->namespace_len;
    const uint8_t *tag = prefix + about->prefix_len + about->topic_len;
    if ((about->fields & PG_SEL_PREFIX) &&
        (c->key_type != about->key_type || c->key_len < about->prefix_len ||
         memcmp(slot_key(a, slot), prefix, about->prefix_len) != 0))
        return false;
    if (about->fields & PG_SEL_TAG) {
        const struct item_text found = slot_tag(a, slot);
        if (found.len != about->tag_len || memcmp(found.bytes, tag, found.len) != 0)
            return false;
    }
    return !(slot_hot(a, slot)->flags & PG_F_WALL) ||
           due_matches(about, timers_deadline_ns(a, slot));
}

static bool reads_blob(const struct pg_arena *a, const struct selection *s, uint32_t slot)
{
    return (s->about.fields & (PG_SEL_PREFIX | PG_SEL_TAG)) != 0 ||
           (slot_hot(a, slot)->flags & PG_F_WALL) != 0;
}

uint32_t select_some(const struct pg_arena *a, const struct selection *s, uint32_t *slot,
                     uint32_t *work, uint32_t found[PG_PREFETCH_MAX])
{
    uint32_t likely[PG_PREFETCH_MAX], count = 0, taken = 0, cost = 0;
    while (count < PG_PREFETCH_MAX && *slot < a->slots.capacity && *work != 0) {
        --*work;
        if (hot_matches(a, s, *slot)) {
            likely[count++] = *slot;
            cost += reads_blob(a, s, *slot) ? PG_SELECT_BLOB : 0;
        }
        ++*slot;
    }
    if (cost != 0)
        prefetch_blobs(a, likely, count);
    for (uint32_t i = 0; i < count; i++)
        if (!reads_blob(a, s, likely[i]) || blob_matches(a, s, likely[i]))
            found[taken++] = likely[i];
    *work -= cost < *work ? cost : *work;
    return taken;
}

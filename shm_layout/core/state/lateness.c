/* lateness.c - which due timers do not fire at once: pauses, outages and late policies.
 *
 * A due timer goes to the backlog of its topic if the topic or its namespace is paused, if it came
 * due before the end of an outage, or if it is later than its policy allows. There it stays armed,
 * so a CANCEL is answered with CANCELLED. Timers that come due later do not wait behind the
 * backlog. */

#include "core/state/lateness.h"
#include "core/base/backlog.h"
#include "core/base/common.h"
#include "core/base/late_policy.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/state/items.h"
#include "core/state/schedule_rows.h"

bool late_paused(const struct pg_arena *a, uint32_t topic)
{
    const struct pg_topic *t = topic_at(a, topic);
    return (t->paused | namespace_at(a, t->namespace_row)->paused) != 0;
}

/* Return the stored policy of a timer: its own, or that of its topic. */
static uint64_t late_of(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    const struct pg_ext *own =
        UNLIKELY(h->flags & PG_F_EXT) ? slot_item(a, slot, PG_EXT_LATE) : NULL;
    return own != NULL ? late_setting(own->extra, own->value) : topic_at(a, h->topic)->late;
}

/* Return the policy `late` for a timer that may fire at fires_ns. */
static inline unsigned policy_at(const struct pg_arena *a, uint64_t late, int64_t fires_ns)
{
    if (LIKELY(late == 0) || a->state.now_ns - fires_ns <= late_grace_ns(late))
        return PG_LATE_FIRE;
    return late_policy(late);
}

unsigned late_policy_now(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    if (UNLIKELY((h->flags & PG_F_SCHEDULE) != 0) && schedule_skips(a, slot))
        return PG_LATE_SKIP;
    return policy_at(a, late_of(a, slot), slot_fires_ns(h));
}

unsigned late_policy_at(const struct pg_arena *a, uint32_t slot, int64_t deadline_ns)
{
    const struct pg_hot moved = {.deadline_ns = deadline_ns, .flags = slot_hot(a, slot)->flags};
    return policy_at(a, late_of(a, slot), slot_fires_ns(&moved));
}

bool late_waits(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    return late_paused(a, h->topic) || slot_fires_ns(h) <= a->state.outage_end_ns ||
           late_policy_now(a, slot) != PG_LATE_FIRE;
}

void late_hold(struct pg_arena *a, uint32_t slot)
{
    const uint32_t topic = slot_hot(a, slot)->topic;
    backlog_push(&a->wheel, slot);
    a->state.backlogs[topic / 64] |= 1ull << topic % 64;
    if (!late_paused(a, topic))
        a->state.catch_up_ns = a->state.now_ns;
}

void late_changed(struct pg_arena *a)
{
    a->state.catch_up_ns = backlogs_count(&a->wheel) != 0 ? a->state.now_ns : INT64_MAX;
}

/* Under a virtual clock there are no outages, because virtual time waits for the daemon. */
void late_outage(struct pg_arena *a, int64_t now_ns)
{
    if (a->header->clock_kind == PG_CLOCK_BOOT)
        a->state.outage_end_ns = now_ns;
}

/* timers.c - put, cancel, get and expire: keeps slot, key, blob, wheel and replay buffer
 * consistent.
 *
 * A release store of its control word arms a timer. Another store of the control word, or the
 * commit of its replay buffer entry, ends the timer. A rebuild derives everything else from these
 * stores. The slot of a timer whose key is unique for a time stays in use until this time is over,
 * and refuses other PUTs of the key. */

#include "core/state/timers.h"
#include "core/base/answer.h"
#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/hash.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/base/wheel.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/compaction.h"
#include "core/state/groups.h"
#include "core/state/jobs.h"
#include "core/state/items.h"
#include "core/state/keys.h"
#include "core/state/lateness.h"
#include "core/state/quotas.h"
#include "core/state/records.h"
#include "core/state/replay_buffer.h"
#include "core/state/rows.h"
#include "core/state/schedule_rows.h"

/* ---- keys ------------------------------------------------------------------------------ */

uint32_t key_hash(const struct pg_arena *a, uint32_t namespace_row, unsigned type,
                  const void *bytes, size_t len)
{
    const uint64_t scope = key_scope(namespace_row, type);
    return key_hash_of(keyed_hash(a->secret->secret, scope, bytes, len));
}

static bool slot_has_key(const struct pg_arena *a, uint32_t slot, const struct key *k)
{
    const struct pg_cold *c = slot_cold(a, slot);
    return slot_hot(a, slot)->hash == k->hash && c->key_len == k->len &&
           c->key_type == k->type && slot_namespace(a, slot) == k->namespace_row &&
           memcmp(slot_key(a, slot), k->bytes, k->len) == 0;
}

/* Return whether a live slot has the key. A slot whose timer has ended may keep the same key unique;
 * only unique_find() returns it. */
static bool live_slot_has_key(const struct pg_arena *a, uint32_t slot, const struct key *k)
{
    return LIKELY(!ctl_unique(slot_hot(a, slot)->ctl)) && slot_has_key(a, slot, k);
}

static bool entry_has_key(const struct pg_arena *a, const struct pg_entry *e,
                          const struct key *k)
{
    return e->hash == k->hash && e->key_len == k->len && entry_key_type(e) == k->type &&
           topic_at(a, e->topic)->namespace_row == k->namespace_row &&
           memcmp(blob_at(&a->blobs, e->blob), k->bytes, k->len) == 0;
}

uint32_t key_find(const struct pg_arena *a, const struct key *k, struct probe *at)
{
    uint32_t id;
    for (id = index_first(&a->index, k->hash, at); id != PG_NIL;
         id = index_next(&a->index, k->hash, at)) {
        if (id < a->slots.capacity ? live_slot_has_key(a, id, k)
                                   : entry_has_key(a, replay_of_id(a, id), k))
            return id;
    }
    return PG_NIL;
}

uint32_t unique_find(const struct pg_arena *a, const struct key *k)
{
    struct probe at;
    uint32_t id;
    if (LIKELY(a->metrics->unique_keys == 0))
        return PG_NIL;
    for (id = index_first(&a->index, k->hash, &at); id != PG_NIL;
         id = index_next(&a->index, k->hash, &at))
        if (id < a->slots.capacity && ctl_unique(slot_hot(a, id)->ctl) && slot_has_key(a, id, k))
            return id;
    return PG_NIL;
}

uint32_t timers_find(const struct pg_arena *a, const struct key *k)
{
    struct probe at;
    const uint32_t id = key_find(a, k, &at);
    return id < a->slots.capacity ? id : PG_NIL;
}

uint32_t slot_of_ticket(const struct pg_arena *a, uint64_t ticket)
{
    for (uint32_t slot = 0; slot < a->slots.capacity; slot++)
        if (ctl_ticket(slot_hot(a, slot)->ctl) == ticket &&
            ctl_state(slot_hot(a, slot)->ctl) != PG_S_FREE)
            return slot;
    return PG_NIL;
}

static struct key key_of_slot(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = slot_cold(a, slot);
    return (struct key){slot_key(a, slot), slot_hot(a, slot)->hash, slot_namespace(a, slot), PG_NIL,
                        c->key_len, c->key_type};
}

/* ---- time ------------------------------------------------------------------------------- */

/* Return whether the slot's stored hash is the hash of its key in namespace row `ns`. */
static bool hashed_in(const struct pg_arena *a, uint32_t slot, uint32_t ns)
{
    const struct pg_cold *c = slot_cold(a, slot);
    return ns < a->namespace_rows && namespace_at(a, ns)->name_len != 0 &&
           key_hash(a, ns, c->key_type, slot_key(a, slot), c->key_len) == slot_hot(a, slot)->hash;
}

/* The topic of an outcome may have been reused by another namespace. In this case, the hash of the
 * key shows to which namespace the outcome belongs. */
uint32_t slot_home(const struct pg_arena *a, uint32_t slot)
{
    uint32_t ns = slot_namespace(a, slot);
    if (ctl_live(slot_hot(a, slot)->ctl) || hashed_in(a, slot, ns))
        return ns;
    for (ns = 0; ns < a->namespace_rows && !hashed_in(a, slot, ns); ns++)
        continue;
    return ns < a->namespace_rows ? ns : PG_NIL;
}

/* Return a + b, limited to the range of int64. */
int64_t add_clamped(int64_t a, int64_t b)
{
    int64_t sum;
    if (!__builtin_add_overflow(a, b, &sum))
        return sum;
    return b > 0 ? INT64_MAX : INT64_MIN;
}

bool time_resolve(const struct pg_arena *a, const struct put *p, int64_t *deadline_ns)
{
    int64_t t = p->time_ns;
    if (p->time_kind == PG_T_DELAY && t > 0 && __builtin_add_overflow(a->call.moment_ns, t, &t))
        return false;
    if (p->time_kind == PG_T_DELAY && p->time_ns <= 0)
        t = a->state.now_ns;
    if (p->time_kind == PG_T_WALL)
        t = add_clamped(t, -a->header->wall_offset_ns);
    /* A negative time on the arena's clock is long past and counts as 0. */
    *deadline_ns = t < 0 ? 0 : t;
    return true;
}

static struct pg_ext *slot_ext(const struct pg_arena *a, uint32_t slot)
{
    return (struct pg_ext *)blob_at(&a->blobs, slot_cold(a, slot)->blob);
}

int64_t wall_deadline(const struct pg_arena *a, int64_t wall_ns)
{
    const int64_t t = add_clamped(wall_ns, -a->header->wall_offset_ns);
    return t < 0 ? 0 : t;
}

/* Use the current wall offset. The slot's place in the wheel may be based on an older wall
 * offset. */
int64_t timers_deadline_ns(const struct pg_arena *a, uint32_t slot)
{
    if (slot_hot(a, slot)->flags & PG_F_WALL)
        return wall_deadline(a, slot_ext(a, slot)->value);
    const int64_t t = slot_hot(a, slot)->deadline_ns;
    return t < 0 ? 0 : t;
}

/* Set the deadline. The stored arm time stays the same. */
void deadline_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns)
{
    struct pg_hot *h = slot_hot(a, slot);
    const int64_t armed_ns = armed_ns_of(h, slot_cold(a, slot));
    STORE_RELEASE(&h->deadline_ns, deadline_ns);
    armed_note(h, slot_cold(a, slot), armed_ns);
}

/* ---- ending a slot ------------------------------------------------------------------------ */

void slot_counted(struct pg_arena *a, uint32_t slot, int64_t sign)
{
    const struct pg_hot *h = slot_hot(a, slot);
    const struct pg_cold *c = slot_cold(a, slot);
    struct pg_namespace *ns = namespace_at(a, topic_at(a, h->topic)->namespace_row);
    const uint64_t bytes = slot_bytes(a, slot);
    *(UNLIKELY(is_parked(a, slot)) ? &a->metrics->parked : &a->metrics->live) += (uint64_t)sign;
    topic_at(a, h->topic)->live += (uint64_t)sign;
    topic_at(a, h->topic)->bytes += (uint64_t)sign * bytes;
    if (has_groups(a, h->topic))
        groups_count(a, h->topic, sign, bytes);
    ns->live += (uint64_t)sign;
    ns->bytes += (uint64_t)sign * bytes;
    if (UNLIKELY((h->flags & PG_F_WALL) != 0))
        a->metrics->live_wall += (uint64_t)sign;
    if (UNLIKELY(c->account == 0))
        return;
    account_counted(a, c->account, sign, bytes);
    if (is_operation(a, slot))
        account_at(a, c->account - 1)->watches += (uint32_t)sign * operation_at(a, slot)->keys;
}

/* The store of FREE ends the timer. A rebuild can repeat everything after this store. */
void slot_free(struct pg_arena *a, uint32_t slot, uint32_t give)
{
    struct pg_hot *h = slot_hot(a, slot);
    slot_state_set(h, ctl_ticket(h->ctl), PG_S_FREE);
    atomic_thread_fence(memory_order_release);   /* the fence precedes reuse of slot and blob */
    if (give != 0)
        blobs_give(&a->blobs, slot_cold(a, slot)->blob, give);
    a->metrics->blob_bytes -= (uint64_t)give * PG_GRANULE;
    slots_give(&a->slots, slot);
    a->state.schedules_stuck = false;    /* a schedule may have waited for this space */
}

/* Prepare the end of an armed timer, before its frame is appended. */
static inline void occurrence_ending(struct pg_arena *a, uint32_t slot)
{
    if (UNLIKELY((slot_hot(a, slot)->flags & PG_F_SCHEDULE) != 0))
        schedule_slot_ending(a, slot);
}

/* End an armed timer. Its entry in the replay buffer takes over the last `keep` granules of the
 * blob. This function is inline, because it is called once for every timer. */
static inline void slot_end(struct pg_arena *a, uint32_t slot, uint32_t keep)
{
    const int64_t armed_ns = armed_ns_of(slot_hot(a, slot), slot_cold(a, slot));
    measure(a, PG_HG_REMOTE, a->call.moment_ns - armed_ns, 1);
    if (UNLIKELY((slot_hot(a, slot)->flags & PG_F_SCHEDULE) != 0))
        schedule_unarmed(a, slot);
    slot_counted(a, slot, -1);
    slot_free(a, slot, slot_granules(slot_cold(a, slot)) - keep);
}

/* A timer that is already due must not wait for the end of its tick, which a virtual clock may
 * never reach. A wall timer waits for its tick, because the wall clock is checked when the timer
 * fires. */
void slot_place(struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    if (slot_fires_ns(h) <= a->state.now_ns && !(h->flags & PG_F_WALL))
        wheel_place_due(&a->wheel, slot);
    else
        wheel_place(&a->wheel, slot);
}

static void slot_unplace(struct pg_arena *a, uint32_t slot)
{
    if (LIKELY(!is_parked(a, slot)))
        wheel_remove(&a->wheel, slot);
}

/* Remove a slot from the index, if the index leads to it. */
static void slot_unindex(struct pg_arena *a, uint32_t slot)
{
    struct probe at;
    if (index_find_id(&a->index, slot_hot(a, slot)->hash, slot, &at))
        index_erase(&a->index, &at);
}

/* ---- unique keys ---------------------------------------------------------------------------- */

/* The slot of a timer with PG_EXT_UNIQUE outlives the timer: it keeps the first part of the blob, up
 * to the copy of the key behind this item. The copy is then the slot's key. The replay buffer's
 * entry owns the rest of the blob. The store of UNIQUE decides; unique_settle() can be repeated. */

struct pg_ext *slot_unique(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    if (LIKELY((h->flags & (PG_F_EXT | PG_F_OPERATION)) != PG_F_EXT))
        return NULL;
    return ext_unique((uint8_t *)slot_ext(a, slot), slot_cold(a, slot)->ext_len);
}

int64_t unique_until_ns(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_ext *item = slot_unique(a, slot);
    return LIKELY(item == NULL) ? INT64_MIN : item->value;
}

/* Length of the extension of a slot that keeps its key unique: the item is its last. */
static uint16_t unique_ext_bytes(const struct pg_arena *a, uint32_t slot)
{
    return (uint16_t)((uint8_t *)(slot_unique(a, slot) + 1) - (uint8_t *)slot_ext(a, slot));
}

uint32_t unique_granules(const struct pg_arena *a, uint32_t slot)
{
    return blob_granules((uint64_t)unique_ext_bytes(a, slot) + slot_cold(a, slot)->key_len);
}

bool unique_settled(const struct pg_arena *a, uint32_t slot)
{
    return slot_hot(a, slot)->flags >> PG_SLACK_SHIFT == 0 && slot_cold(a, slot)->payload_len == 0 &&
           slot_cold(a, slot)->ext_len == unique_ext_bytes(a, slot);
}

void unique_settle(struct pg_arena *a, uint32_t slot)
{
    struct pg_cold *c = slot_cold(a, slot);
    atomic_thread_fence(memory_order_release);   /* the fence follows the store of UNIQUE, and
                                                    precedes reuse of the blob's end */
    slot_hot(a, slot)->deadline_ns = unique_until_ns(a, slot);
    slot_hot(a, slot)->flags &= (1u << PG_SLACK_SHIFT) - 1;   /* the time has no slack */
    c->payload_len = 0;
    c->ext_len = unique_ext_bytes(a, slot);
}

uint32_t unique_shrink(struct pg_arena *a, uint32_t slot, uint32_t keep)
{
    const struct pg_cold *c = slot_cold(a, slot);
    const uint32_t all = slot_granules(c), head = unique_granules(a, slot);
    unique_settle(a, slot);
    if (all - head != keep)
        blobs_give(&a->blobs, c->blob + head, all - head - keep);
    return all - head - keep;
}

void unique_counted(struct pg_arena *a, uint32_t slot, int64_t sign)
{
    const struct pg_cold *c = slot_cold(a, slot);
    struct pg_topic *t = topic_at(a, slot_hot(a, slot)->topic);
    struct pg_namespace *ns = namespace_at(a, t->namespace_row);
    const uint64_t bytes = (uint64_t)unique_granules(a, slot) * PG_GRANULE;
    a->metrics->unique_keys += (uint64_t)sign;
    t->unique_keys += (uint32_t)sign;
    ns->live += (uint64_t)sign;
    ns->bytes += (uint64_t)sign * bytes;
    if (c->account != 0)
        account_counted(a, c->account, sign, bytes);
}

/* End an armed timer, and let its slot keep the key unique. Its entry in the replay buffer takes over
 * the last `keep` granules of the blob. */
RARE static void slot_keeps_key(struct pg_arena *a, uint32_t slot, uint32_t keep)
{
    struct pg_hot *h = slot_hot(a, slot);
    measure(a, PG_HG_REMOTE, a->call.moment_ns - armed_ns_of(h, slot_cold(a, slot)), 1);
    slot_counted(a, slot, -1);
    slot_state_set(h, ctl_ticket(h->ctl), PG_S_UNIQUE);
    a->metrics->blob_bytes -= (uint64_t)unique_shrink(a, slot, keep) * PG_GRANULE;
    unique_counted(a, slot, 1);
    wheel_place(&a->wheel, slot);
}

/* Free a slot at the time until which it kept its key unique. It is not in the wheel. */
RARE static bool unique_free(struct pg_arena *a, uint32_t slot)
{
    if (wal_buffer_full(a))
        return false;
    slot_unindex(a, slot);
    if (has_wal(a))
        wal_append_freed(a, slot);
    unique_counted(a, slot, -1);
    slot_free(a, slot, slot_granules(slot_cold(a, slot)));
    a->metrics->unique_freed++;
    return true;
}

/* Store in the items of a PUT until when the key is unique, and the key. */
static void put_unique(struct pg_arena *a, struct put *p)
{
    const struct items items = {p->items, p->items_len};
    const int64_t for_ns = p->items_len == 0 ? 0 : items_unique_ns(items);
    const struct item_text key = {p->key.bytes, p->key.len};
    if (LIKELY(for_ns == 0))
        return;
    p->items_len = (uint16_t)items_unique_write(items, &key, add_clamped(a->call.moment_ns, for_ns),
                                                a->call.items);
    p->items = a->call.items;
}

/* ---- put ----------------------------------------------------------------------------------- */

void answer_slot(const struct pg_arena *a, struct pg_result *r, uint32_t slot,
                        unsigned status)
{
    const struct pg_hot *h = slot_hot(a, slot);
    answer(r, ctl_ticket(h->ctl), status, h->deadline_ns);
}

void answer_unique(const struct pg_arena *a, struct pg_result *r, uint32_t slot)
{
    answer(r, ctl_ticket(slot_hot(a, slot)->ctl), PG_ST_EXISTS, -unique_until_ns(a, slot));
}

/* Return whether the namespace parks a timer with this deadline. Parking needs a WAL. */
static bool parks(const struct pg_arena *a, const struct put *p, int64_t deadline_ns)
{
    const uint64_t beyond_ns = namespace_at(a, p->key.namespace_row)->park_beyond_ns;
    return UNLIKELY(beyond_ns != 0) && !p->occurrence && has_wal(a) && deadline_ns > a->state.now_ns &&
           (uint64_t)deadline_ns - (uint64_t)a->state.now_ns > beyond_ns;
}

/* Return how many bytes of the payload the arena stores. */
static uint32_t payload_retained(const struct put *p)
{
    return UNLIKELY(p->parks) ? 0 : p->payload_len;
}

static void blob_write(struct pg_arena *a, uint32_t blob, const struct put *p)
{
    uint8_t *at = blob_at(&a->blobs, blob);
    if (p->time_kind == PG_T_WALL) {
        *(struct pg_ext *)at = (struct pg_ext){PG_EXT_WALL, 0, p->time_ns};
        at += sizeof(struct pg_ext);
    }
    if (UNLIKELY(p->items_len != 0)) {
        memcpy(at, p->items, p->items_len);
        at += p->items_len;
    }
    memcpy(at, p->key.bytes, p->key.len);
    if (payload_retained(p) != 0)
        memcpy(at + p->key.len, p->payload, p->payload_len);
}

/* Length in bytes of the extension at the start of the new timer's blob. */
static uint16_t put_ext_bytes(const struct put *p)
{
    return (uint16_t)((p->time_kind == PG_T_WALL ? sizeof(struct pg_ext) : 0) + p->items_len);
}

/* Return log2 of the new timer's slack in ns. A slack that is no power of two is rounded down. */
static unsigned slack_log2(const struct pg_arena *a, const struct put *p)
{
    if (p->slack != 0)
        return p->slack - 1u;
    return 63 - (unsigned)__builtin_clzll((uint64_t)topic_at(a, p->topic)->slack_ns | 1);
}

static uint16_t slot_flags(const struct pg_arena *a, const struct put *p)
{
    return (uint16_t)((p->time_kind == PG_T_WALL ? PG_F_WALL : 0) |
                      (put_ext_bytes(p) != 0 ? PG_F_EXT : 0) |
                      (a->call.in_bulk_load ? PG_F_BULK_LOADED : 0) |
                      (p->occurrence ? PG_F_SCHEDULE : 0) |
                      slack_log2(a, p) << PG_SLACK_SHIFT);
}

/* Write the fields first and the control word last. Until the control word is stored, the slot is
 * free. */
static void slot_write(struct pg_arena *a, uint32_t slot, uint32_t blob, const struct put *p,
                       int64_t deadline_ns, uint64_t ticket, uint32_t replaced)
{
    struct pg_hot *h = slot_hot(a, slot);
    blob_write(a, blob, p);
    *slot_cold(a, slot) = (struct pg_cold){
        .blob = blob, .payload_len = payload_retained(p), .key_len = p->key.len,
        .key_type = p->key.type, .ext_len = put_ext_bytes(p),
        .account = p->account};
    h->deadline_ns = deadline_ns;
    h->flags = slot_flags(a, p);
    h->hash = p->key.hash;
    h->topic = (uint16_t)p->topic;
    armed_note(h, slot_cold(a, slot), a->call.moment_ns);
    if (has_wal(a))
        wal_append_arm(a, slot, p, ticket, replaced);
    slot_state_set(h, ticket, p->parks ? PG_S_PARKED : PG_S_ARMED);
}

static uint32_t put_granules(const struct put *p)
{
    return blob_granules((uint64_t)put_ext_bytes(p) + p->key.len + payload_retained(p));
}

/* Allocate the blob of a new slot. PG_NIL: the record has been refused and answered. */
static uint32_t arm_blob(struct pg_arena *a, uint32_t granules, bool replacing,
                         struct pg_result *r)
{
    unsigned status = slots_status(a, replacing);
    const uint32_t blob = status == PG_ST_ADDED ? blobs_take(&a->blobs, granules) : PG_NIL;
    if (status == PG_ST_ADDED)
        status = payload_refusal(a);
    if (blob == PG_NIL)
        answer(r, 0, status, 0);
    return blob;
}

/* Arm a new slot in place of slot `replaced` (PG_NIL = none), and answer the record. The caller
 * then binds the key to the new slot. PG_NIL: refused. */
static uint32_t arm(struct pg_arena *a, const struct put *p, int64_t deadline_ns,
                    uint32_t replaced, struct pg_result *r)
{
    const uint32_t granules = put_granules(p);
    const uint32_t blob = arm_blob(a, granules, replaced != PG_NIL, r);
    if (blob == PG_NIL)
        return PG_NIL;
    const uint32_t slot = slots_take(&a->slots);
    const uint64_t ticket = a->header->next_ticket;
    STORE_RELEASE(&a->header->next_ticket, ticket + 1);
    const unsigned added = p->parks ? PG_ST_PARKED : PG_ST_ADDED;
    answer(r, ticket, replaced == PG_NIL ? added : PG_ST_REPLACED, deadline_ns);
    slot_write(a, slot, blob, p, deadline_ns, ticket, replaced);
    if (LIKELY(!p->parks))
        slot_place(a, slot);
    else
        a->metrics->parks++;
    slot_counted(a, slot, 1);
    a->metrics->blob_bytes += (uint64_t)granules * PG_GRANULE;
    a->metrics->adds++;
    return slot;
}

/* Let the key lead to `slot`. `id` is the id that key_find found for the key (PG_NIL = none), and
 * `at` is the place of that id in the index. */
static void key_bind(struct pg_arena *a, uint32_t hash, uint32_t id, const struct probe *at,
                     uint32_t slot)
{
    if (id == PG_NIL) {
        index_insert(&a->index, hash, slot);
    } else {
        replay_supersede(a, id);
        index_replace(&a->index, hash, at, slot);
    }
}

static void put_fresh(struct pg_arena *a, const struct put *p, int64_t deadline_ns, uint32_t id,
                      const struct probe *at, struct pg_result *r)
{
    if (UNLIKELY(p->limited) && !quota_admits(a, p, put_granules(p), PG_NIL, r))
        return;
    if (has_groups(a, p->topic) && !jobs_admit(a, p->topic, 1, put_granules(p), r))
        return;
    const uint32_t slot = arm(a, p, deadline_ns, PG_NIL, r);
    if (slot != PG_NIL)
        key_bind(a, p->key.hash, id, at, slot);
}

/* Return whether the groups of its topic have space for a timer whose blob grows from `held` to
 * `granules`. */
static bool growth_admitted(struct pg_arena *a, uint32_t topic, uint32_t granules, uint32_t held,
                            struct pg_result *r)
{
    return granules <= held || !has_groups(a, topic) ||
           jobs_admit(a, topic, 0, granules - held, r);
}

/* Return whether the groups of the topic have space for a timer that replaces `old`. A timer of the
 * same topic gives up its own space. */
static bool replacing_admitted(struct pg_arena *a, const struct put *p, uint32_t old,
                               struct pg_result *r)
{
    if (slot_hot(a, old)->topic != p->topic)
        return jobs_admit(a, p->topic, 1, put_granules(p), r);
    return growth_admitted(a, p->topic, put_granules(p), slot_granules(slot_cold(a, old)), r);
}

static void put_replace(struct pg_arena *a, const struct put *p, int64_t deadline_ns,
                        uint32_t old, const struct probe *at, struct pg_result *r)
{
    if (UNLIKELY(p->limited) && !quota_admits(a, p, put_granules(p), old, r))
        return;
    if (has_groups(a, p->topic) && !replacing_admitted(a, p, old, r))
        return;
    occurrence_ending(a, old);
    const uint32_t slot = arm(a, p, deadline_ns, old, r);
    if (slot == PG_NIL)
        return;
    index_replace(&a->index, p->key.hash, at, slot);
    slot_unplace(a, old);
    slot_end(a, old, 0);
    a->metrics->replaces++;
}

/* The store of the wall deadline, or else of the deadline, is the change. */
void timer_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns, int64_t wall_ns)
{
    const struct pg_hot *h = slot_hot(a, slot);
    if (has_wal(a))
        wal_append_move(a, slot, deadline_ns, h->flags & PG_F_WALL ? wall_ns : NO_WALL);
    if (h->flags & PG_F_WALL)
        STORE_RELEASE(&slot_ext(a, slot)->value, wall_ns);
    slot_unplace(a, slot);
    deadline_move(a, slot, deadline_ns);
    if (LIKELY(!is_parked(a, slot)))
        slot_place(a, slot);
}

/* EXTEND changes only the deadline, and only to a later time. The clock, the slack, the topic, the
 * items and the payload stay. */
static void put_extend(struct pg_arena *a, const struct put *p, int64_t deadline_ns,
                       uint32_t slot, struct pg_result *r)
{
    struct pg_hot *h = slot_hot(a, slot);
    if (deadline_ns <= timers_deadline_ns(a, slot)) {
        answer_slot(a, r, slot, PG_ST_KEPT);
        return;
    }
    const int64_t wall_ns = p->time_kind == PG_T_WALL
                                ? p->time_ns
                                : add_clamped(deadline_ns, a->header->wall_offset_ns);
    if (h->flags & PG_F_WALL)
        deadline_ns = wall_deadline(a, wall_ns);
    answer(r, ctl_ticket(h->ctl), PG_ST_EXTENDED, deadline_ns);
    timer_move(a, slot, deadline_ns, wall_ns);
    a->metrics->extends++;
}

/* Return the slot because of which the PUT may not arm or move a timer: that of a timer with the same
 * key that is to be the only one for a time. `id`: the armed slot of the key, if below the capacity;
 * PG_NIL = none. */
static uint32_t put_excluded(const struct pg_arena *a, const struct put *p, uint32_t id)
{
    if (id >= a->slots.capacity)
        return unique_find(a, &p->key);
    const bool keeps = p->mode == PG_MODE_KEEP;
    return LIKELY(unique_until_ns(a, id) <= a->call.moment_ns) || keeps ? PG_NIL : id;
}

/* Return whether the PUT may move an operation. An EXTEND moves an operation only if it contains
 * the operation's ticket. Otherwise an EXTEND of an operation that has ended would arm a timer. */
static bool moves_operation(const struct put *p)
{
    return p->mode == PG_MODE_KEEP || (p->mode == PG_MODE_EXTEND && p->ticket != 0);
}

void timers_put(struct pg_arena *a, struct put *p, struct pg_result *r)
{
    struct probe at;
    int64_t deadline_ns;
    if (!time_resolve(a, p, &deadline_ns)) {
        answer(r, 0, PG_ST_TOO_FAR, 0);
        return;
    }
    put_unique(a, p);
    const uint32_t id = key_find(a, &p->key, &at), excluded = put_excluded(a, p, id);
    p->parks = parks(a, p, deadline_ns);
    const bool armed = id < a->slots.capacity;
    if (UNLIKELY(p->ticket != 0) && !(armed && ctl_ticket(slot_hot(a, id)->ctl) == p->ticket))
        answer(r, 0, PG_ST_UNKNOWN, 0);
    else if (UNLIKELY(excluded != PG_NIL))
        answer_unique(a, r, excluded);
    else if (!armed)
        put_fresh(a, p, deadline_ns, id, &at, r);
    else if (p->mode == PG_MODE_ERROR || (is_operation(a, id) && !moves_operation(p)))
        answer_slot(a, r, id, PG_ST_EXISTS);
    else if (p->mode == PG_MODE_KEEP)
        answer_slot(a, r, id, PG_ST_KEPT);
    else if (p->mode == PG_MODE_EXTEND)
        put_extend(a, p, deadline_ns, id, r);
    else
        put_replace(a, p, deadline_ns, id, &at, r);
}

/* ---- unpark --------------------------------------------------------------------------------- */

/* Arm the parked timer in its own slot. The new blob begins with the same bytes as the old blob
 * of the parked timer, so it may replace that blob at any moment. If a rebuild finds the slot still
 * parked, it drops the payload again. */
static void unpark(struct pg_arena *a, const struct put *p, uint32_t slot, uint32_t blob)
{
    struct pg_hot *h = slot_hot(a, slot);
    struct pg_cold *c = slot_cold(a, slot);
    const uint32_t old = c->blob, old_granules = slot_granules(c);
    memcpy(blob_at(&a->blobs, blob), blob_at(&a->blobs, old), (size_t)c->ext_len + c->key_len);
    if (p->payload_len != 0)
        memcpy(blob_at(&a->blobs, blob) + c->ext_len + c->key_len, p->payload, p->payload_len);
    slot_counted(a, slot, -1);
    STORE_RELEASE(&c->blob, blob);
    STORE_RELEASE(&c->payload_len, p->payload_len);
    if (has_wal(a))
        wal_append_unpark(a, slot);
    slot_state_set(h, ctl_ticket(h->ctl), PG_S_ARMED);
    atomic_thread_fence(memory_order_release);   /* the fence precedes reuse of the old blob's bytes */
    slot_counted(a, slot, 1);
    blobs_give(&a->blobs, old, old_granules);
    a->metrics->blob_bytes += (uint64_t)(slot_granules(c) - old_granules) * PG_GRANULE;
    slot_place(a, slot);
    a->metrics->unparks++;
}

void timers_unpark(struct pg_arena *a, const struct put *p, uint64_t ticket, struct pg_result *r)
{
    const uint32_t slot = timers_find(a, &p->key);
    if (slot == PG_NIL || slot_hot(a, slot)->ctl != ctl_of(ticket, PG_S_PARKED)) {
        answer(r, 0, PG_ST_UNKNOWN, 0);
        return;
    }
    const uint64_t ext = slot_cold(a, slot)->ext_len;
    const uint32_t granules = blob_granules(ext + p->key.len + p->payload_len);
    if (UNLIKELY(p->limited) && !quota_admits(a, p, granules, slot, r))
        return;
    if (!growth_admitted(a, slot_hot(a, slot)->topic, granules, slot_granules(slot_cold(a, slot)), r))
        return;
    const uint32_t blob = blobs_take(&a->blobs, granules);
    if (blob == PG_NIL) {
        answer(r, 0, payload_refusal(a), 0);
        return;
    }
    answer_slot(a, r, slot, PG_ST_UNPARKED);
    unpark(a, p, slot, blob);
}

/* ---- cancel ---------------------------------------------------------------------------------- */

void cancel_fired(struct pg_arena *a, uint32_t id, uint64_t ticket, struct pg_result *r)
{
    const struct pg_entry *e = replay_of_id(a, id);
    if (ticket != 0 && ticket != e->ticket >> 8) {
        a->metrics->cancels_unknown++;
        answer(r, 0, PG_ST_UNKNOWN, 0);
        return;
    }
    if (e->commit > a->header->visible) {        /* a firing that no reader may know of yet */
        answer(r, 0, PG_ST_BUSY, 0);
        return;
    }
    a->metrics->cancels_fired++;
    answer(r, e->ticket >> 8, PG_ST_FIRED, e->deadline_ns);
}

void timer_end(struct pg_arena *a, uint32_t slot, const struct probe *at, enum pg_end_cause cause)
{
    const bool keeps = cause != PG_END_CANCELLED && unique_until_ns(a, slot) > a->call.moment_ns;
    occurrence_ending(a, slot);
    if (LIKELY(!keeps))
        index_erase(&a->index, at);
    slot_unplace(a, slot);
    if (has_wal(a))
        wal_append_end(a, slot, cause);
    if (UNLIKELY(keeps))
        slot_keeps_key(a, slot, 0);
    else
        slot_end(a, slot, 0);
}

void cancel_timer(struct pg_arena *a, uint32_t slot, const struct probe *at)
{
    timer_end(a, slot, at, PG_END_CANCELLED);
    a->metrics->cancels++;
}

void timer_drop(struct pg_arena *a, uint32_t slot)
{
    slot_unindex(a, slot);
    slot_unplace(a, slot);
    if (has_wal(a))
        wal_append_end(a, slot, PG_END_CANCELLED);
    slot_end(a, slot, 0);
}

/* ---- expire ------------------------------------------------------------------------------- */

bool wall_is_reached(const struct pg_arena *a, uint32_t slot)
{
    return LIKELY(!(slot_hot(a, slot)->flags & PG_F_WALL)) ||
           timers_deadline_ns(a, slot) <= a->state.now_ns;
}

void wall_postpone(struct pg_arena *a, uint32_t slot)
{
    deadline_move(a, slot, timers_deadline_ns(a, slot));
    wheel_place(&a->wheel, slot);
}

static uint32_t missed_before(const struct pg_arena *a, uint32_t topic)
{
    const uint64_t missed = topic_at(a, topic)->missed;
    return LIKELY(missed < UINT32_MAX) ? (uint32_t)missed : UINT32_MAX;
}

static struct pg_entry entry_of(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_hot *h = slot_hot(a, slot);
    const struct pg_cold *c = slot_cold(a, slot);
    return (struct pg_entry){.ticket = ctl_ticket(h->ctl) << 8 | PG_CAUSE_EXPIRED,
                             .deadline_ns = h->deadline_ns,
                             .fired_ns = a->state.now_ns,
                             .missed = missed_before(a, h->topic),
                             .blob = c->blob + c->ext_len / PG_GRANULE,
                             .payload_len = c->payload_len,
                             .hash = h->hash,
                             .topic = h->topic,
                             .key_len = c->key_len,
                             .meta = (uint8_t)(c->key_type |
                                               (late_flag(a, h) | schedule_flag(h)) << 4)};
}

/* Return whether a due occurrence must not fire: its schedule does not have it any more, or has to
 * arm it again once no job is open. */
static bool occurrence_void(const struct pg_arena *a, uint32_t slot)
{
    const uint32_t row = schedule_of_slot(a, slot);
    return row == PG_NIL ? schedule_stale(a, slot) : schedule_holds(a, row);
}

/* End a due occurrence that must not fire. It is not in the wheel. */
RARE static bool occurrence_drop(struct pg_arena *a, uint32_t slot)
{
    if (wal_buffer_full(a))
        return false;
    schedule_take_back(a, slot);
    slot_unindex(a, slot);
    if (has_wal(a))
        wal_append_end(a, slot, PG_END_CANCELLED);
    slot_end(a, slot, 0);
    return true;
}

bool timer_expire(struct pg_arena *a, uint32_t slot)
{
    if (UNLIKELY(ctl_unique(slot_hot(a, slot)->ctl)))
        return unique_free(a, slot);
    if (UNLIKELY(!wall_is_reached(a, slot)))
        wall_postpone(a, slot);
    else if (UNLIKELY(late_waits(a, slot)))
        late_hold(a, slot);
    else
        return timer_fire_due(a, slot);
    return true;
}

bool timer_fire_due(struct pg_arena *a, uint32_t slot)
{
    struct probe at;
    if (UNLIKELY((slot_hot(a, slot)->flags & PG_F_SCHEDULE) != 0) && occurrence_void(a, slot))
        return occurrence_drop(a, slot);
    const struct pg_entry e = entry_of(a, slot);
    const uint32_t granules = entry_granules(&e);
    if (wal_buffer_full(a) || !replay_make_space(a, (uint64_t)granules * PG_GRANULE))
        return false;
    const struct job_traits traits = job_traits_of(a, &e, slot);
    occurrence_ending(a, slot);
    if (has_wal(a))
        wal_append_fire(a, slot, &e, &traits);
    const uint64_t position = replay_append(a, &e, &traits);
    measure(a, PG_HG_STRUCTURAL_LATENESS, a->state.now_ns - slot_fires_ns(slot_hot(a, slot)), 1);
    if (UNLIKELY(unique_until_ns(a, slot) > a->state.now_ns)) {
        index_insert(&a->index, e.hash, replay_id(a, position));
        slot_keeps_key(a, slot, granules);
    } else {
        if (index_find_id(&a->index, e.hash, slot, &at))
            index_replace(&a->index, e.hash, &at, replay_id(a, position));
        slot_end(a, slot, granules);
    }
    a->metrics->expiries++;
    return true;
}

/* ---- steps of the wall clock --------------------------------------------------------------- */

#define STEP_NS 1000000           /* a smaller step counts as drift, checked when a timer is due */
#define LONG_STEP_NS 1000000000   /* after a longer step, timers may be late as after an outage */

static void wall_replace(struct pg_arena *a, uint32_t slot)
{
    struct pg_hot *h = slot_hot(a, slot);
    if (!ctl_live(h->ctl) || !(h->flags & PG_F_WALL))
        return;
    slot_unplace(a, slot);
    deadline_move(a, slot, timers_deadline_ns(a, slot));
    if (!is_parked(a, slot))
        wheel_place(&a->wheel, slot);
}

bool wall_iteration(struct pg_arena *a, uint32_t budget)
{
    const uint64_t end = (uint64_t)a->state.wall_cursor + (uint64_t)budget * 8;
    if (a->state.wall_cursor == PG_NIL)
        return false;
    while (a->state.wall_cursor < a->slots.capacity && a->state.wall_cursor < end)
        wall_replace(a, a->state.wall_cursor++);
    if (a->state.wall_cursor == a->slots.capacity)
        a->state.wall_cursor = PG_NIL;
    return a->state.wall_cursor != PG_NIL;
}

void wall_note(struct pg_arena *a, int64_t offset_ns)
{
    const int64_t step = offset_ns - a->state.wall_placed_by_ns;
    STORE_RELAXED(&a->header->wall_offset_ns, offset_ns);
    if (step > -STEP_NS && step < STEP_NS)
        return;
    a->state.wall_placed_by_ns = offset_ns;
    if (a->metrics->live_wall != 0)
        a->state.wall_cursor = 0;
    if (step > LONG_STEP_NS)
        late_outage(a, a->state.now_ns);
}

/* ---- linking, for a rebuild ---------------------------------------------------------------- */

/* The item UNIQUE of a blob that is not trusted. */
bool unique_sound(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = slot_cold(a, slot);
    const struct pg_ext *item = slot_unique(a, slot);
    if (item == NULL)
        return false;
    const uint64_t from = (uint64_t)((const uint8_t *)(item + 1) - (const uint8_t *)slot_ext(a, slot));
    return item->extra == c->key_len && item->value > 0 &&
           (from == c->ext_len || from + unique_space(c->key_len) == c->ext_len);
}

void unique_link(struct pg_arena *a, uint32_t slot)
{
    index_insert(&a->index, slot_hot(a, slot)->hash, slot);
    unique_counted(a, slot, 1);
}

void timers_link_own(struct pg_arena *a, uint32_t slot)
{
    const struct key k = key_of_slot(a, slot);
    struct probe at;
    uint32_t id = index_first(&a->index, k.hash, &at);
    while (id != PG_NIL && (id < a->slots.capacity ||
                            !entry_has_key(a, replay_of_id(a, id), &k)))
        id = index_next(&a->index, k.hash, &at);
    key_bind(a, k.hash, id, &at, slot);
    slot_counted(a, slot, 1);
}

bool timers_link_newest(struct pg_arena *a, uint32_t slot, struct pg_fault *why)
{
    const struct key k = key_of_slot(a, slot);
    struct probe at;
    const uint32_t id = key_find(a, &k, &at);
    if (id < a->slots.capacity && is_operation(a, id))
        return fault_set(why, "slots", "a timer and an operation have the same key", slot, id,
                         slot);
    slot_counted(a, slot, 1);
    if (id >= a->slots.capacity) {
        key_bind(a, k.hash, id, &at, slot);
        return true;
    }
    index_replace(&a->index, k.hash, &at, slot);
    slot_unplace(a, id);
    slot_end(a, id, 0);
    return true;
}

/* ---- check --------------------------------------------------------------------------------- */

/* The place of a wall timer in the wheel may differ from its wall deadline by drift. While a step
 * of the wall clock is being applied, it may differ by more. */
static bool wall_placed(const struct pg_arena *a, uint32_t slot)
{
    const int64_t away_ns = timers_deadline_ns(a, slot) - slot_hot(a, slot)->deadline_ns;
    return a->state.wall_cursor != PG_NIL || (away_ns < 2 * STEP_NS && away_ns > -2 * STEP_NS);
}

static bool slot_check(const struct pg_arena *a, uint32_t slot, struct pg_fault *fault)
{
    const struct pg_hot *h = slot_hot(a, slot);
    if (!ticket_known(a->header, ctl_ticket(h->ctl)))
        return fault_set(fault, "timers", "a ticket that was never assigned", slot,
                         a->header->next_ticket, ctl_ticket(h->ctl));
    if (h->topic >= a->topic_rows || topic_at(a, h->topic)->name_len == 0)
        return fault_set(fault, "timers", "a topic that does not exist", slot, a->topic_rows,
                         h->topic);
    if (h->flags >> PG_SLACK_SHIFT > PG_SLACK_LOG2_MAX)
        return fault_set(fault, "timers", "a slack out of bounds", slot, PG_SLACK_LOG2_MAX,
                         h->flags >> PG_SLACK_SHIFT);
    if (is_parked(a, slot) && slot_cold(a, slot)->payload_len != 0)
        return fault_set(fault, "timers", "a parked timer has a payload", slot, 0,
                         slot_cold(a, slot)->payload_len);
    if (!slot_items_sound(a, slot))
        return fault_set(fault, "timers", "malformed extension items", slot, 0,
                         slot_cold(a, slot)->ext_len);
    if (a->secret == NULL)
        return true;
    const struct key k = key_of_slot(a, slot);
    if (k.hash != key_hash(a, k.namespace_row, k.type, k.bytes, k.len))
        return fault_set(fault, "timers", "hash of the key", slot,
                         key_hash(a, k.namespace_row, k.type, k.bytes, k.len), k.hash);
    if (!wall_placed(a, slot))
        return fault_set(fault, "timers", "a wall deadline was converted with another offset", slot,
                         (uint64_t)timers_deadline_ns(a, slot), (uint64_t)h->deadline_ns);
    if (timers_find(a, &k) != slot)
        return fault_set(fault, "timers", "a key that the index does not lead to", slot, slot,
                         timers_find(a, &k));
    return true;
}

static bool entries_indexed(const struct pg_arena *a, uint64_t *ids, struct pg_fault *fault)
{
    struct probe at;
    for (uint64_t p = a->header->replay_head; p < a->header->replay_tail; p++) {
        const struct pg_entry *e = replay_at(a, p);
        const bool found = index_find_id(&a->index, e->hash, replay_id(a, p), &at);
        if (found && (entry_flags(e) & PG_E_SUPERSEDED))
            return fault_set(fault, "index", "the index leads to a superseded entry", p, 0, 1);
        *ids += found;
    }
    return true;
}

/* Check a slot that keeps its key unique. */
static bool unique_check(const struct pg_arena *a, uint32_t slot, struct pg_fault *fault)
{
    const struct pg_hot *h = slot_hot(a, slot);
    struct probe at;
    if (!ticket_known(a->header, ctl_ticket(h->ctl)))
        return fault_set(fault, "timers", "a ticket that was never assigned", slot,
                         a->header->next_ticket, ctl_ticket(h->ctl));
    if (!unique_sound(a, slot) || !unique_settled(a, slot))
        return fault_set(fault, "timers", "a unique key is malformed", slot, 0,
                         slot_cold(a, slot)->ext_len);
    if (h->deadline_ns != unique_until_ns(a, slot))
        return fault_set(fault, "timers", "time until which a key is unique", slot,
                         (uint64_t)unique_until_ns(a, slot), (uint64_t)h->deadline_ns);
    return index_find_id(&a->index, h->hash, slot, &at) ||
           fault_set(fault, "timers", "a key that the index does not lead to", slot, slot, PG_NIL);
}

bool timers_check(struct pg_arena *a, struct pg_fault *fault, uint64_t *granules)
{
    uint64_t live = 0, parked = 0, unique = 0, ids = 0;
    for (uint32_t i = 0; i < a->slots.capacity; i++) {
        if (ctl_state(slot_hot(a, i)->ctl) == PG_S_FREE)
            continue;
        if (!slot_blob_inside(a, slot_cold(a, i)))
            return fault_set(fault, "slots", "a blob lies outside its region", i,
                             a->blobs.granules, slot_cold(a, i)->blob);
        *granules += slot_granules(slot_cold(a, i));
        if (is_operation(a, i))
            *granules += operation_granules(a, i);
        if (!ctl_counted(slot_hot(a, i)->ctl))
            continue;
        if (ctl_unique(slot_hot(a, i)->ctl) ? !unique_check(a, i, fault) : !slot_check(a, i, fault))
            return false;
        ++*(ctl_unique(slot_hot(a, i)->ctl) ? &unique : is_parked(a, i) ? &parked : &live);
    }
    if (unique != a->metrics->unique_keys)
        return fault_set(fault, "timers", "count of unique keys", 0, unique,
                         a->metrics->unique_keys);
    if (parked != a->metrics->parked)
        return fault_set(fault, "timers", "count of parked timers", 0, parked, a->metrics->parked);
    if (live != a->metrics->live)
        return fault_set(fault, "timers", "count of live timers", 0, live, a->metrics->live);
    return entries_indexed(a, &ids, fault) && index_check(&a->index, live + parked + unique + ids, fault);
}

/* ---- for readers --------------------------------------------------------------------------- */

/* unpark() stores a blob with the payload in a parked slot before the slot counts as armed. Key and
 * extension are the same in the old and the new blob. The reader therefore takes the key from
 * either blob, and no payload. A compaction stores a blob with the same bytes. */
struct pg_cold slot_cold_copy(const struct pg_arena *a, uint32_t slot, uint64_t ctl)
{
    struct pg_cold c = *slot_cold(a, slot);
    atomic_thread_fence(memory_order_acquire);   /* the fence precedes reads of a new blob */
    if (UNLIKELY(ctl_state(ctl) == PG_S_PARKED))
        c.payload_len = 0;
    return c;
}

bool slot_copy_bounded(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c)
{
    if (h->topic >= a->topic_rows || c->payload_len > PG_PAYLOAD_MAX ||
        !blob_inside(&a->blobs, c->blob, (uint64_t)c->ext_len + c->key_len + c->payload_len))
        return false;
    const struct pg_topic *t = topic_at(a, h->topic);
    const uint32_t len = LOAD_RELAXED(&t->name_len), ns = t->namespace_row;
    return len != 0 && len <= sizeof t->name && ns < a->namespace_rows &&
           LOAD_RELAXED(&namespace_at(a, ns)->name_len) <= PG_NAMESPACE_MAX;
}

/* rows.h - what the rows of slots, sessions and replay buffer entries say. These functions call no
 * other part of the state, so every part may call them. */
#ifndef PURGATORYD_STATE_ROWS_H
#define PURGATORYD_STATE_ROWS_H

#include "core/base/blobs.h"
#include "core/base/common.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/arena.h"
#include "core/state/operation_bytes.h"

#define NO_WALL INT64_MIN         /* wall time of a timer that has none */

/* PG_E_LATE if the timer was armed and became due before this start of the daemon, else 0. */
static inline unsigned late_flag(const struct pg_arena *a, const struct pg_hot *h)
{
    const bool before = ticket_number(ctl_ticket(h->ctl)) < a->state.first_number;
    return before && slot_fires_ns(h) < a->state.started_ns ? PG_E_LATE : 0;
}
/* PG_E_SCHEDULE if the timer is an occurrence of a schedule, else 0. */
static inline unsigned schedule_flag(const struct pg_hot *h)
{
    return h->flags & PG_F_SCHEDULE ? PG_E_SCHEDULE : 0;
}
static inline struct pg_operation *operation_at(const struct pg_arena *a, uint32_t slot)
{
    return (struct pg_operation *)blob_at(&a->blobs, slot_cold(a, slot)->blob);
}
static inline bool is_operation(const struct pg_arena *a, uint32_t slot)
{
    return (slot_hot(a, slot)->flags & PG_F_OPERATION) != 0;
}
static inline bool is_bulk_loaded(const struct pg_hot *h)
{
    return (h->flags & PG_F_BULK_LOADED) != 0;
}
static inline uint32_t slot_granules(const struct pg_cold *c)
{
    return blob_granules((uint64_t)c->ext_len + c->key_len + c->payload_len);
}
static inline bool slot_blob_inside(const struct pg_arena *a, const struct pg_cold *c)
{
    return (uint64_t)c->blob + slot_granules(c) <= a->blobs.granules;
}
/* Number of granules of a notice. The slot must have a notice. */
static inline uint64_t notice_granules(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = slot_cold(a, slot);
    return granules_of_notice(c->key_len, operation_at(a, slot)->keys, c->payload_len);
}
/* Number of granules of an operation's notice if the notice is not in the replay buffer yet, else
 * 0. */
static inline uint64_t operation_granules(const struct pg_arena *a, uint32_t slot)
{
    return LIKELY(operation_at(a, slot)->notice_blob == PG_NIL) ? 0 : notice_granules(a, slot);
}
/* Number of bytes in all blobs of an armed slot. */
static inline uint64_t slot_bytes(const struct pg_arena *a, uint32_t slot)
{
    const uint64_t notice = is_operation(a, slot) ? operation_granules(a, slot) : 0;
    return (slot_granules(slot_cold(a, slot)) + notice) * PG_GRANULE;
}
static inline uint32_t slot_namespace(const struct pg_arena *a, uint32_t slot)
{
    return topic_at(a, slot_hot(a, slot)->topic)->namespace_row;
}
/* 1 + position of the topic's previous notice; 0 = none, or no longer in the buffer. `position` is
 * that of the entry. */
static inline uint64_t entry_previous(const struct pg_entry *e, uint64_t position)
{
    return e->back == 0 || e->back > position ? 0 : position + 1 - e->back;
}
/* Value of pg_entry.back for an entry at `position`. */
static inline uint32_t entry_back(uint64_t position, uint64_t previous)
{
    const uint64_t back = position + 1 - previous;
    return previous == 0 || back > UINT32_MAX ? 0 : (uint32_t)back;
}
static inline struct pg_entry *replay_at(const struct pg_arena *a, uint64_t position)
{
    return &a->replay_buffer[position & (a->header->replay_capacity - 1)];
}
static inline uint32_t entry_granules(const struct pg_entry *e)
{
    return blob_granules((uint64_t)e->key_len + e->payload_len);
}
static inline unsigned entry_flags(const struct pg_entry *e) { return e->meta >> 4; }
static inline unsigned entry_key_type(const struct pg_entry *e) { return e->meta & 7; }
/* Return the fields of a schedule that are in use. */
static inline struct pg_schedule_fields *schedule_fields(const struct pg_arena *a, uint32_t row)
{
    struct pg_schedule *s = schedule_at(a, row);
    return &s->fields[s->version % 2];
}
static inline bool schedule_used(const struct pg_arena *a, uint32_t row)
{
    return schedule_fields(a, row)->state != PG_SCHEDULE_NONE;
}
/* Return the number of bytes of key, spec, zone, tag and payload together. */
static inline uint64_t schedule_bytes(const struct pg_schedule_fields *f)
{
    return (uint64_t)f->key_len + f->spec_len + f->zone_len + f->tag_len + f->payload_len;
}
static inline uint32_t row_of_session(uint64_t id) { return (uint32_t)(id & 0xffff); }
static inline struct pg_session *session_find(const struct pg_arena *a, uint64_t id)
{
    if (id == 0 || row_of_session(id) >= a->secret->sessions)
        return NULL;
    struct pg_session *s = session_at(a, row_of_session(id));
    return s->id == id ? s : NULL;
}

/* ---- the groups of a topic ------------------------------------------------------------------- */

/* All groups that count the pending timers of the topic: also a draft. */
#define EACH_LINK_OF_TOPIC(link, a, topic)                                                      \
    for (const struct pg_group_topic *link = topic_link((a), (topic)); link != NULL;            \
         link = link_next((a), link))
/* The groups that exist, so that a notice of the topic becomes their job. */
#define EACH_GROUP_OF_TOPIC(link, a, topic)                                                     \
    EACH_LINK_OF_TOPIC(link, a, topic)                                                          \
    if (group_at((a), link->group - 1)->name_len != 0)

static inline const struct pg_group_topic *link_numbered(const struct pg_arena *a, uint32_t number)
{
    return number == 0 ? NULL : group_topic_at(a, number - 1);
}
static inline const struct pg_group_topic *topic_link(const struct pg_arena *a, uint32_t topic)
{
    return link_numbered(a, topic_at(a, topic)->groups);
}
static inline const struct pg_group_topic *link_next(const struct pg_arena *a,
                                                     const struct pg_group_topic *link)
{
    return link_numbered(a, link->next);
}
static inline uint32_t topic_group_count(const struct pg_arena *a, uint32_t topic)
{
    uint32_t count = 0;
    EACH_GROUP_OF_TOPIC(link, a, topic)
        count++;
    return count;
}
/* The row that the n-th job (from 0) that begins after this call will take. */
static inline uint32_t job_row_born(const struct pg_arena *a, uint32_t n)
{
    return a->job_slots.free[a->job_slots.free[0] - n];
}

#endif

/* names.h - the tables of namespaces and topics, and the index from name to row. */
#ifndef PURGATORYD_STATE_NAMES_H
#define PURGATORYD_STATE_NAMES_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"

/* Check authoritative state: lengths within bounds, each topic in a namespace. */
bool names_sound(const struct pg_arena *a, struct pg_fault *why);
void names_rebuild(struct pg_arena *a);              /* builds the index from the rows */
/* Return the row of a namespace, or of a topic. If needed, create the namespace and the topic for
 * the uid of the running call. PG_NIL: *why contains the answer. */
uint32_t names_namespace(struct pg_arena *a, struct name ns, struct pg_result *why);
uint32_t names_topic(struct pg_arena *a, struct name ns, struct name topic,
                     struct pg_result *why);
/* Return the row of an existing namespace; PG_NIL = it does not exist. */
uint32_t names_find_namespace(const struct pg_arena *a, struct name ns);
/* Return the row of an existing topic; PG_NIL = it does not exist. */
uint32_t names_find_topic(const struct pg_arena *a, uint32_t namespace_row, struct name topic);
/* Return whether the namespace may be in another shard: this arena does not have the namespace and
 * may not create it. */
bool names_elsewhere(const struct pg_arena *a, struct name ns);
bool name_reserved(struct name name);
/* Let a failed search for a topic row be repeated, because a schedule may have left its topic. */
void names_look_again(struct pg_arena *a);
/* Until names_release is called, the topic's row is not reused, as if the topic had a timer. */
void names_hold(struct pg_arena *a, uint32_t topic);
void names_release(struct pg_arena *a, uint32_t topic);
/* Wake the readers that sleep until notices of the topic, or of its namespace, become visible.
 * `visible` is the low half of that word; with the same value the namespace is woken once. */
void names_wake(struct pg_arena *a, uint32_t topic, uint32_t visible);
/* Set those settings of a namespace that set->fields selects. */
void names_configure(struct pg_arena *a, uint32_t row, const struct pg_namespace_set *set);
/* Set the slack of new timers of a topic. */
void topic_configure(struct pg_arena *a, uint32_t row, const struct pg_topic_set *set);
/* Store the settings of a topic from its WAL record. */
void topic_settings_store(struct pg_topic *to, const struct pg_wal_topic *from);
/* Store all settings that the frame contains, each with one store, because other processes may read
 * them at the same time. */
void namespace_settings_store(struct pg_namespace *to, const struct pg_wal_namespace *from);
bool names_check(const struct pg_arena *a, struct pg_fault *fault);
static inline struct name namespace_name(const struct pg_arena *a, uint32_t row)
{
    return (struct name){namespace_at(a, row)->name, namespace_at(a, row)->name_len};
}
static inline struct name topic_name(const struct pg_arena *a, uint32_t row)
{
    return (struct name){topic_at(a, row)->name, topic_at(a, row)->name_len - 1};
}

#endif

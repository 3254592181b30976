/* names.h - the tables of namespaces and topics, and the index from name to row. */
#ifndef PURGATORYD_STATE_NAMES_H
#define PURGATORYD_STATE_NAMES_H

#include "core/base/common.h"
#include "core/arena.h"

struct name {
    const char *bytes;
    uint32_t len;
};

/* Authoritative state: lengths within bounds, each topic in a namespace. */
bool names_sound(const struct pg_arena *a, struct pg_fault *why);
void names_rebuild(struct pg_arena *a);              /* the index from the rows */
/* Row of a namespace, or of a topic and its namespace, created if need be for the running call's
 * uid; PG_NIL: *why is the answer. */
uint32_t names_namespace(struct pg_arena *a, struct name ns, struct pg_result *why);
uint32_t names_topic(struct pg_arena *a, struct name ns, struct name topic,
                     struct pg_result *why);
/* Row of an existing pair's topic or namespace; PG_NIL = none. */
uint32_t names_find_namespace(const struct pg_arena *a, struct name ns);
/* It is not here, and for all that this arena knows it is in another shard. */
bool names_elsewhere(const struct pg_arena *a, struct name ns);
bool name_reserved(struct name name);
/* A held topic keeps its row, as if it had a timer. */
void names_hold(struct pg_arena *a, uint32_t topic);
void names_release(struct pg_arena *a, uint32_t topic);
/* Sets what `set` names of a namespace's settings. */
void names_configure(struct pg_arena *a, uint32_t row, const struct pg_namespace_set *set);
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

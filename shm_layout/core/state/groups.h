/* groups.h - consumer groups: their rows, topics and budgets. */
#ifndef PURGATORYD_STATE_GROUPS_H
#define PURGATORYD_STATE_GROUPS_H

#include "core/base/check.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"
#include "core/state/rows.h"

/* A group that a message wants: its name, its settings and its topics. */
struct group_wanted {
    struct name name;
    uint32_t namespace_row;
    struct pg_group_settings settings;
    uint32_t topic_count;
    uint32_t topics[PG_GROUP_TOPICS_MAX];   /* rows, in ascending order */
};

/* Return whether a timer of the topic becomes a job. */
static inline bool has_groups(const struct pg_arena *a, uint32_t topic)
{
    return UNLIKELY(topic_at(a, topic)->groups != 0);
}
static inline bool group_exists(const struct pg_arena *a, uint32_t group)
{
    return group < a->group_rows && group_at(a, group)->name_len != 0;
}
/* Count a pending timer of the topic in its groups. */
static inline void groups_count(struct pg_arena *a, uint32_t topic, int64_t sign, uint64_t bytes)
{
    EACH_LINK_OF_TOPIC(link, a, topic) {
        group_at(a, link->group - 1)->pending += (uint64_t)sign;
        group_at(a, link->group - 1)->pending_bytes += (uint64_t)sign * bytes;
    }
}
/* Return whether a group has space in its budget for so many more jobs, and so many more granules. */
bool group_admits(const struct pg_arena *a, uint32_t group, uint32_t jobs, uint64_t granules);
/* Return whether each group of the topic has that space, or with `after_drops` may have it after it
 * has dropped waiting jobs. False: *full is the row of a group without space. */
bool groups_admit(const struct pg_arena *a, uint32_t topic, uint32_t jobs, uint64_t granules,
                  bool after_drops, uint32_t *full);
/* Return the row of a group; PG_NIL = there is none. */
uint32_t group_find(const struct pg_arena *a, uint32_t namespace_row, struct name name);
/* Return whether a group, or a draft, has the topic. */
bool group_has_topic(const struct pg_arena *a, uint32_t group, uint32_t topic);
/* Write the row of a new group, the only draft, which does not exist before group_commit(). In
 * between, the caller may begin jobs of the group. The draft counts the pending timers of its
 * topics, but notices do not become its jobs. PG_NIL: *refusal is enum pg_group_refusal, and *detail
 * its figure. */
uint32_t group_draft(struct pg_arena *a, const struct group_wanted *g, unsigned *refusal,
                     uint64_t *detail);
void group_commit(struct pg_arena *a);
/* Return 0, or the reason why an existing group is not the one that is wanted. */
unsigned group_differs(const struct pg_arena *a, uint32_t group, const struct group_wanted *g);
/* Return 0, or the reason why these settings are refused. `group` is the row that will have them,
 * PG_NIL = a new row. */
unsigned group_settings_refused(const struct pg_arena *a, uint32_t group,
                                const struct pg_group_settings *s, uint64_t *detail);
void group_change(struct pg_arena *a, uint32_t group, const struct pg_group_settings *s);
/* Begin to delete a group: no timer becomes a job of it any more. */
void group_retire(struct pg_arena *a, uint32_t group);
/* Free the row of a group that has no topics and no jobs. */
void group_free(struct pg_arena *a, uint32_t group);
/* Return the topics of a group, in ascending order of their rows, and their number. */
uint32_t group_topics(const struct pg_arena *a, uint32_t group, uint32_t rows[PG_GROUP_TOPICS_MAX]);
/* Write a group that redo or a migration found. */
bool group_restore(struct pg_arena *a, uint32_t row, const struct pg_consumer_group *fields,
                   const uint32_t *topics, uint32_t count);
void group_restore_end(struct pg_arena *a, uint32_t row);
void group_restored(struct pg_arena *a, uint32_t row, int64_t shift_ns);   /* shift its times */
void groups_init(struct pg_arena *a);
/* Finish the change of a job or of settings that a kill interrupted. */
bool group_change_finish(struct pg_arena *a, struct pg_fault *why);
/* Check the rows, and link the topics. */
bool groups_rebuild(struct pg_arena *a, struct pg_fault *why);
bool groups_check(const struct pg_arena *a, struct pg_fault *fault);

#endif

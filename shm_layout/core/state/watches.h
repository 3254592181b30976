/* watches.h - the watchers of a key, in the order of the watermarks for which they wait. */
#ifndef PURGATORYD_STATE_WATCHES_H
#define PURGATORYD_STATE_WATCHES_H

#include "core/base/common.h"
#include "core/arena.h"

/* Places of watchers that the next advance of their key does not have to visit, in ascending
 * order. */
#define PARKED (PG_WATERMARK_MAX + 1ull)  /* SUM, CLIENT: this key cannot change the outcome */
#define FAILED_FROM PARKED                /* ANY, QUORUM: the key failed; place = this + target */
#define MET UINT64_MAX                    /* ALL, QUORUM: the watcher's target is reached */

/* Return the target of a watcher of ALL, ANY or QUORUM whose place is `place`. MET stays MET. */
static inline uint64_t watch_target(uint64_t place)
{
    return place > FAILED_FROM && place != MET ? place - FAILED_FROM : place;
}

void watches_init(struct pg_arena *a);
static inline uint32_t watches_free(const struct pg_arena *a)            /* number of free
                                                                            records */
{
    return a->purgatory->free_watches;
}
/* Take a chain of `count` siblings from the free records. At least `count` records must be free. */
uint32_t watches_take(struct pg_arena *a, uint32_t count);
void watches_give(struct pg_arena *a, uint32_t first);                  /* frees a whole chain */
void watch_link_among(struct pg_arena *a, uint32_t watch);    /* its key must have other watchers */
void watch_unlink_among(struct pg_arena *a, uint32_t watch);
static inline void watch_link(struct pg_arena *a, uint32_t watch, uint64_t target)
{
    struct pg_watch *w = watch_at(a, watch);
    struct pg_watermark *l = watermark_at(a, w->key_row);
    w->target = target;
    w->left = w->right = w->parent = PG_NIL;
    if (l->root == PG_NIL)
        l->root = l->first = l->latest = watch;
    else
        watch_link_among(a, watch);
}
static inline void watch_unlink(struct pg_arena *a, uint32_t watch)
{
    struct pg_watermark *l = watermark_at(a, watch_at(a, watch)->key_row);
    if (l->first == l->latest)    /* the watcher is the only one of its key */
        l->root = l->first = l->latest = PG_NIL;
    else
        watch_unlink_among(a, watch);
}
/* Return the watcher with the lowest place above `target`, among the watchers of the key in a row;
 * PG_NIL = no place is above `target`. */
uint32_t watch_above(const struct pg_arena *a, uint32_t row, uint64_t target);
/* For a rebuild. watches_unclaim marks all records as unclaimed, watch_claim claims one record for
 * an armed operation, and watches_free_unclaimed frees the records that are still unclaimed. */
void watches_unclaim(struct pg_arena *a);
static inline void watch_claim(struct pg_arena *a, uint32_t watch)
{
    watch_at(a, watch)->left = PG_NIL;
}
bool watch_claimed(const struct pg_arena *a, uint32_t watch);
void watches_free_unclaimed(struct pg_arena *a);
bool watches_check(const struct pg_arena *a, struct pg_fault *fault);

#endif

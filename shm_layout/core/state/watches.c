/* watches.c - the watchers of a key, in the order of the watermarks for which they wait.
 *
 * The watchers form a treap (Seidel, Aragon 1996). Its nodes are watch records; the priority of a
 * node is a hash of its record number. Insertion with a rising target and removal of a known record
 * take O(1) expected time, other changes O(log watchers). The watcher with the lowest target is
 * found immediately. No function here ends an operation. */

#include "core/state/watches.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/arena.h"

static struct pg_watch *at(const struct pg_arena *a, uint32_t watch) { return watch_at(a, watch); }

static uint32_t priority(uint32_t watch)
{
    uint32_t x = watch * 0x9e3779b1u;
    x = (x ^ x >> 15) * 0x85ebca77u;
    return x ^ x >> 13;
}

/* ---- records ----------------------------------------------------------------------------- */

/* Put a chain of free records at the front of the free list. Prefetching along the list would be
 * too slow, because each record only leads to the next record. Therefore the first record of a
 * chain also contains guesses of where the next three chains start. */
static inline void chain_push(struct pg_arena *a, uint32_t first, uint32_t last, uint32_t count)
{
    PG_ASSERT(count <= a->watch_rows - watches_free(a), "watches",
              "no record is given back twice");
    const uint32_t next = a->purgatory->free_watch;
    const struct pg_watch *behind = at(a, next == PG_NIL ? first : next);
    struct pg_watch *w = at(a, first);
    w->parent = behind->right;
    w->right = behind->left;
    w->left = next;
    at(a, last)->sibling = next;
    a->purgatory->free_watch = first;
    a->purgatory->free_watches += count;
}

#define CHAIN_BYTES 96            /* bytes of three adjacent records */

static inline void chain_fetch(const struct pg_arena *a, uint32_t first)
{
    const char *chain = (const char *)(a->watches + first);   /* `first` may be PG_NIL */
    __builtin_prefetch(chain, 1);
    __builtin_prefetch(chain + CHAIN_BYTES - 1, 1);
}

static void watch_free(struct pg_arena *a, uint32_t watch)
{
    at(a, watch)->slot = PG_NIL;
    chain_push(a, watch, watch, 1);
}

/* Value of `left` in a record that no operation has claimed. It is not the number of any record. */
#define UNCLAIMED (PG_NIL - 1)

void watches_unclaim(struct pg_arena *a)
{
    touch(a->watches, (uint64_t)a->watch_rows * sizeof *a->watches);
    for (uint32_t x = 0; x < a->watch_rows; x++)
        at(a, x)->left = UNCLAIMED;
}

bool watch_claimed(const struct pg_arena *a, uint32_t watch)
{
    return at(a, watch)->left != UNCLAIMED;
}

static void free_list_empty(struct pg_arena *a)
{
    a->purgatory->free_watch = PG_NIL;
    a->purgatory->free_watches = 0;
}

void watches_free_unclaimed(struct pg_arena *a)
{
    free_list_empty(a);
    for (uint32_t x = a->watch_rows; x-- > 0;)
        if (!watch_claimed(a, x))
            watch_free(a, x);
}

void watches_init(struct pg_arena *a)
{
    free_list_empty(a);
    for (uint32_t i = a->watch_rows; i-- > 0;)
        watch_free(a, i);
}

/* The free list is itself a chain of siblings, so its first `count` records form the chain to
 * return. */
uint32_t watches_take(struct pg_arena *a, uint32_t count)
{
    PG_ASSERT(count != 0 && count <= watches_free(a), "watches", "so many records are free");
    const uint32_t first = a->purgatory->free_watch;
    uint32_t last = first;
    for (uint32_t n = 1; n < count; n++)
        last = at(a, last)->sibling;
    a->purgatory->free_watch = at(a, last)->sibling;
    a->purgatory->free_watches -= count;
    at(a, last)->sibling = PG_NIL;
    chain_fetch(a, at(a, first)->parent);            /* this chain is taken after two other
                                                        chains */
    return first;
}

void watches_give(struct pg_arena *a, uint32_t first)
{
    uint32_t last = first, count = 1;
    for (; at(a, last)->sibling != PG_NIL; last = at(a, last)->sibling, count++)
        at(a, last)->slot = PG_NIL;
    at(a, last)->slot = PG_NIL;
    chain_push(a, first, last, count);
}

/* ---- the treap ---------------------------------------------------------------------------- */

/* Return the link that leads to x: a child field of its parent, or the root. */
static uint32_t *link_to(const struct pg_arena *a, struct pg_watermark *l, uint32_t x)
{
    const uint32_t parent = at(a, x)->parent;
    if (parent == PG_NIL)
        return &l->root;
    return at(a, parent)->left == x ? &at(a, parent)->left : &at(a, parent)->right;
}

static void rotate_up(struct pg_arena *a, struct pg_watermark *l, uint32_t x)
{
    const uint32_t p = at(a, x)->parent;
    const bool left = at(a, p)->left == x;
    uint32_t *inner = left ? &at(a, x)->right : &at(a, x)->left;
    uint32_t *outer = left ? &at(a, p)->left : &at(a, p)->right;

    *link_to(a, l, p) = x;
    at(a, x)->parent = at(a, p)->parent;
    at(a, p)->parent = x;
    *outer = *inner;
    if (*inner != PG_NIL)
        at(a, *inner)->parent = p;
    *inner = p;
}

/* Insert x after all other watchers. Those nodes at the lower end of the right spine that have a
 * lower priority become its left subtree. */
static void hang_last(struct pg_arena *a, struct pg_watermark *l, uint32_t x)
{
    uint32_t parent = l->latest, below = PG_NIL;
    for (; parent != PG_NIL && priority(parent) < priority(x); parent = at(a, parent)->parent)
        below = parent;
    at(a, x)->left = below;
    at(a, x)->parent = parent;
    if (below != PG_NIL)
        at(a, below)->parent = x;
    *(parent == PG_NIL ? &l->root : &at(a, parent)->right) = x;
    l->latest = x;
}

/* Insert x as a leaf, then rotate it up until its parent's priority is not lower. */
static void hang_between(struct pg_arena *a, struct pg_watermark *l, uint32_t x)
{
    const uint64_t target = at(a, x)->target;
    uint32_t parent, *side = &l->root;
    do {
        parent = *side;
        side = target < at(a, parent)->target ? &at(a, parent)->left : &at(a, parent)->right;
    } while (*side != PG_NIL);
    *side = x;
    at(a, x)->parent = parent;
    if (target < at(a, l->first)->target)
        l->first = x;
    while (at(a, x)->parent != PG_NIL && priority(x) > priority(at(a, x)->parent))
        rotate_up(a, l, x);
}

/* Usually targets rise, so x comes last. Watchers with equal targets are in the order in which they
 * arrived. */
void watch_link_among(struct pg_arena *a, uint32_t x)
{
    struct pg_watermark *l = watermark_at(a, at(a, x)->key_row);
    if (at(a, x)->target >= at(a, l->latest)->target)
        hang_last(a, l, x);
    else
        hang_between(a, l, x);
}

/* Return the watcher after the first watcher. The first watcher has no left child, so the next
 * watcher is in its right subtree or is its parent. */
static uint32_t after_first(const struct pg_arena *a, uint32_t x)
{
    uint32_t next = at(a, x)->right;
    if (next == PG_NIL)
        return at(a, x)->parent;
    while (at(a, next)->left != PG_NIL)
        next = at(a, next)->left;
    return next;
}

/* Return the watcher before the latest watcher. It is in the left subtree of the latest watcher or
 * is its parent. */
static uint32_t before_latest(const struct pg_arena *a, uint32_t x)
{
    uint32_t next = at(a, x)->left;
    if (next == PG_NIL)
        return at(a, x)->parent;
    while (at(a, next)->right != PG_NIL)
        next = at(a, next)->right;
    return next;
}

uint32_t watch_above(const struct pg_arena *a, uint32_t row, uint64_t target)
{
    uint32_t found = PG_NIL, x = watermark_at(a, row)->root;
    while (x != PG_NIL) {
        const bool above = at(a, x)->target > target;
        found = above ? x : found;
        x = above ? at(a, x)->left : at(a, x)->right;
    }
    return found;
}

/* Replace x by the join of its two subtrees. */
static void join_below(struct pg_arena *a, struct pg_watermark *l, uint32_t x)
{
    uint32_t left = at(a, x)->left, right = at(a, x)->right, parent = at(a, x)->parent;
    uint32_t *hook = link_to(a, l, x);
    while (left != PG_NIL && right != PG_NIL) {
        const bool from_left = priority(left) > priority(right);
        uint32_t *top = from_left ? &left : &right;
        *hook = *top;
        at(a, *top)->parent = parent;
        parent = *top;
        hook = from_left ? &at(a, parent)->right : &at(a, parent)->left;
        *top = *hook;
    }
    *hook = left != PG_NIL ? left : right;
    if (*hook != PG_NIL)
        at(a, *hook)->parent = parent;
}

void watch_unlink_among(struct pg_arena *a, uint32_t x)
{
    struct pg_watermark *l = watermark_at(a, at(a, x)->key_row);
    if (l->first == x)
        l->first = after_first(a, x);
    if (l->latest == x)
        l->latest = before_latest(a, x);
    join_below(a, l, x);
}

/* ---- check ---------------------------------------------------------------------------------- */

static bool watch_sound(const struct pg_arena *a, uint32_t x, struct pg_fault *fault)
{
    const struct pg_watch *w = at(a, x);
    for (int side = 0; side < 2; side++) {
        const uint32_t child = side ? w->right : w->left;
        if (child == PG_NIL)
            continue;
        if (at(a, child)->parent != x || at(a, child)->key_row != w->key_row)
            return fault_set(fault, "watches", "a child names another parent", x, x,
                             at(a, child)->parent);
        if (priority(child) > priority(x))
            return fault_set(fault, "watches", "priority of a child", x, priority(x),
                             priority(child));
        if (side ? at(a, child)->target < w->target : at(a, child)->target > w->target)
            return fault_set(fault, "watches", "target of a child", x, w->target,
                             at(a, child)->target);
    }
    return true;
}

/* Return the number of nodes in the tree at `root`. If the links form a loop, the result is larger
 * than a->watch_rows. The function is iterative, because the depth is only expected to be
 * logarithmic. */
static uint64_t tree_size(const struct pg_arena *a, uint32_t root)
{
    uint64_t count = 0;
    uint32_t x = root, from = root == PG_NIL ? PG_NIL : at(a, root)->parent;
    while (x != PG_NIL && count <= a->watch_rows) {
        const struct pg_watch *w = at(a, x);
        uint32_t next;
        if (from == w->parent) {
            count++;
            next = w->left != PG_NIL ? w->left : w->right != PG_NIL ? w->right : w->parent;
        } else if (from == w->left && w->right != PG_NIL && w->right != from) {
            next = w->right;
        } else {
            next = w->parent;
        }
        from = x;
        x = next;
    }
    return count;
}

static bool row_watches_sound(const struct pg_arena *a, uint32_t row, uint64_t *linked,
                              struct pg_fault *fault)
{
    const struct pg_watermark *l = watermark_at(a, row);
    if ((l->root == PG_NIL) != (l->first == PG_NIL) || (l->root == PG_NIL) != (l->latest == PG_NIL))
        return fault_set(fault, "watches", "first and last record of a watch key", row, l->root,
                         l->first);
    if (l->root == PG_NIL)
        return true;
    if (at(a, l->first)->left != PG_NIL || at(a, l->latest)->right != PG_NIL)
        return fault_set(fault, "watches",
                         "the first or last record of a watch key has a neighbour",
                         row, l->first, l->latest);
    *linked += tree_size(a, l->root);
    return true;
}

bool watches_check(const struct pg_arena *a, struct pg_fault *fault)
{
    uint64_t linked = 0, attached = 0, used = 0;
    for (uint32_t row = 0; row < a->watermark_rows; row++)
        if (watermark_at(a, row)->key_len != 0 && !row_watches_sound(a, row, &linked, fault))
            return false;
    for (uint32_t x = 0; x < a->watch_rows; x++) {
        if (at(a, x)->slot == PG_NIL)
            continue;
        used++;
        if (at(a, x)->key_row == PG_NIL)
            continue;
        attached++;
        if (at(a, x)->key_row >= a->watermark_rows ||
            watermark_at(a, at(a, x)->key_row)->key_len == 0)
            return fault_set(fault, "watches", "a record watches a key that does not exist", x,
                             a->watermark_rows, at(a, x)->key_row);
        if (!watch_sound(a, x, fault))
            return false;
    }
    if (linked != attached)
        return fault_set(fault, "watches", "records that a watch key leads to", 0, attached,
                         linked);
    return used + a->purgatory->free_watches == a->watch_rows ||
           fault_set(fault, "watches", "records used and free", used, a->watch_rows,
                     used + a->purgatory->free_watches);
}

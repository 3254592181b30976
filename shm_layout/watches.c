/* watches.c - the watchers of a key, ordered by the level that each of them waits for.
 *
 * A treap (Seidel, Aragon 1996) over record numbers, with the priority a hash of the number:
 * insertion with a rising target and removal of a known record take O(1) expected, the rest
 * O(log watchers); the lowest target is always at hand. Nothing in here ends an operation. */

#include "core.h"

static struct pg_watch *at(const struct pg_arena *a, uint32_t watch) { return &a->watches[watch]; }

static uint32_t priority(uint32_t watch)
{
    uint32_t x = watch * 0x9e3779b1u;
    x = (x ^ x >> 15) * 0x85ebca77u;
    return x ^ x >> 13;
}

/* ---- records ----------------------------------------------------------------------------- */

void watch_free(struct pg_arena *a, uint32_t watch)
{
    at(a, watch)->slot = PG_NIL;
    at(a, watch)->sibling = a->purgatory->free_watch;
    a->purgatory->free_watch = watch;
    a->purgatory->free_watches++;
}

void watches_init(struct pg_arena *a)
{
    a->purgatory->free_watch = PG_NIL;
    a->purgatory->free_watches = 0;
    for (uint32_t i = a->watch_rows; i-- > 0;)
        watch_free(a, i);
}

/* The free list is a chain of siblings: its first records are one already. */
uint32_t watches_take(struct pg_arena *a, uint32_t count)
{
    const uint32_t first = a->purgatory->free_watch;
    uint32_t last = first;
    for (uint32_t n = 1; n < count; n++)
        last = at(a, last)->sibling;
    a->purgatory->free_watch = at(a, last)->sibling;
    a->purgatory->free_watches -= count;
    at(a, last)->sibling = PG_NIL;
    __builtin_prefetch(&a->watches[a->purgatory->free_watch], 1);   /* the next to be taken */
    return first;
}

void watches_give(struct pg_arena *a, uint32_t first)
{
    uint32_t last = first, count = 1;
    for (; at(a, last)->sibling != PG_NIL; last = at(a, last)->sibling, count++)
        at(a, last)->slot = PG_NIL;
    at(a, last)->slot = PG_NIL;
    at(a, last)->sibling = a->purgatory->free_watch;
    a->purgatory->free_watch = first;
    a->purgatory->free_watches += count;
}

/* ---- the treap ---------------------------------------------------------------------------- */

static void replace_child(struct pg_arena *a, struct pg_watched *l, uint32_t parent, uint32_t old,
                          uint32_t child)
{
    if (parent == PG_NIL)
        l->root = child;
    else if (at(a, parent)->left == old)
        at(a, parent)->left = child;
    else
        at(a, parent)->right = child;
    if (child != PG_NIL)
        at(a, child)->parent = parent;
}

static void rotate_up(struct pg_arena *a, struct pg_watched *l, uint32_t x)
{
    const uint32_t p = at(a, x)->parent;
    const uint32_t g = at(a, p)->parent;
    const bool left = at(a, p)->left == x;
    uint32_t *inner = left ? &at(a, x)->right : &at(a, x)->left;
    uint32_t *outer = left ? &at(a, p)->left : &at(a, p)->right;

    *outer = *inner;
    if (*inner != PG_NIL)
        at(a, *inner)->parent = p;
    *inner = p;
    replace_child(a, l, g, p, x);
    at(a, p)->parent = x;
}

/* Where a new record goes: below the latest if targets rise, else by descent; equal targets
 * stand in the order of their arrival. */
static void hang(struct pg_arena *a, struct pg_watched *l, uint32_t x)
{
    const uint64_t target = at(a, x)->target;
    uint32_t parent = l->root, *side;
    if (target >= at(a, l->latest)->target) {
        parent = l->latest;
        side = &at(a, parent)->right;
        l->latest = x;
    } else {
        for (;;) {
            side = target < at(a, parent)->target ? &at(a, parent)->left : &at(a, parent)->right;
            if (*side == PG_NIL)
                break;
            parent = *side;
        }
    }
    *side = x;
    at(a, x)->parent = parent;
    if (target < at(a, l->first)->target)
        l->first = x;
}

void watch_link(struct pg_arena *a, uint32_t x, uint64_t target)
{
    struct pg_watch *w = at(a, x);
    struct pg_watched *l = &a->levels[w->level];
    w->target = target;
    w->left = w->right = w->parent = PG_NIL;
    if (l->root == PG_NIL) {
        l->root = l->first = l->latest = x;
        return;
    }
    hang(a, l, x);
    while (w->parent != PG_NIL && priority(x) > priority(w->parent))
        rotate_up(a, l, x);
}

/* The record before (side left) or after (side right) one that is at that end of its row:
 * it has no child on that end's side, so the neighbour is below or its parent. */
static uint32_t after_first(const struct pg_arena *a, uint32_t x)
{
    uint32_t next = at(a, x)->right;
    if (next == PG_NIL)
        return at(a, x)->parent;
    while (at(a, next)->left != PG_NIL)
        next = at(a, next)->left;
    return next;
}

static uint32_t before_latest(const struct pg_arena *a, uint32_t x)
{
    uint32_t next = at(a, x)->left;
    if (next == PG_NIL)
        return at(a, x)->parent;
    while (at(a, next)->right != PG_NIL)
        next = at(a, next)->right;
    return next;
}

static uint32_t stronger_child(const struct pg_arena *a, uint32_t x)
{
    const uint32_t l = at(a, x)->left, r = at(a, x)->right;
    if (l == PG_NIL || r == PG_NIL)
        return l == PG_NIL ? r : l;
    return priority(l) > priority(r) ? l : r;
}

void watch_unlink(struct pg_arena *a, uint32_t x)
{
    struct pg_watched *l = &a->levels[at(a, x)->level];
    if (l->first == l->latest) {  /* x is the only one */
        l->root = l->first = l->latest = PG_NIL;
        return;
    }
    if (l->first == x)
        l->first = after_first(a, x);
    if (l->latest == x)
        l->latest = before_latest(a, x);
    while (at(a, x)->left != PG_NIL && at(a, x)->right != PG_NIL)
        rotate_up(a, l, stronger_child(a, x));
    replace_child(a, l, at(a, x)->parent, x, stronger_child(a, x));
}

/* ---- check ---------------------------------------------------------------------------------- */

static bool watch_sound(const struct pg_arena *a, uint32_t x, struct pg_fault *fault)
{
    const struct pg_watch *w = at(a, x);
    for (int side = 0; side < 2; side++) {
        const uint32_t child = side ? w->right : w->left;
        if (child == PG_NIL)
            continue;
        if (at(a, child)->parent != x || at(a, child)->level != w->level)
            return fault_set(fault, "watches", "a child of another parent", x, x,
                             at(a, child)->parent);
        if (priority(child) > priority(x))
            return fault_set(fault, "watches", "heap order", x, priority(x), priority(child));
        if (side ? at(a, child)->target < w->target : at(a, child)->target > w->target)
            return fault_set(fault, "watches", "order of targets", x, w->target,
                             at(a, child)->target);
    }
    return true;
}

/* Nodes below and with x; UINT64_MAX if there are more than records. Iterative: depth is
 * only expected to be logarithmic. */
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
    const struct pg_watched *l = &a->levels[row];
    if ((l->root == PG_NIL) != (l->first == PG_NIL) || (l->root == PG_NIL) != (l->latest == PG_NIL))
        return fault_set(fault, "watches", "ends of a row", row, l->root, l->first);
    if (l->root == PG_NIL)
        return true;
    if (at(a, l->first)->left != PG_NIL || at(a, l->latest)->right != PG_NIL)
        return fault_set(fault, "watches", "an end that is none", row, l->first, l->latest);
    *linked += tree_size(a, l->root);
    return true;
}

bool watches_check(const struct pg_arena *a, struct pg_fault *fault)
{
    uint64_t linked = 0, standing = 0, used = 0;
    for (uint32_t row = 0; row < a->level_rows; row++)
        if (a->levels[row].key_len != 0 && !row_watches_sound(a, row, &linked, fault))
            return false;
    for (uint32_t x = 0; x < a->watch_rows; x++) {
        if (at(a, x)->slot == PG_NIL)
            continue;
        used++;
        if (at(a, x)->level == PG_NIL)
            continue;
        standing++;
        if (at(a, x)->level >= a->level_rows || a->levels[at(a, x)->level].key_len == 0)
            return fault_set(fault, "watches", "watches a key that is not there", x,
                             a->level_rows, at(a, x)->level);
        if (!watch_sound(a, x, fault))
            return false;
    }
    if (linked != standing)
        return fault_set(fault, "watches", "records that no row leads to", 0, standing, linked);
    return used + a->purgatory->free_watches == a->watch_rows ||
           fault_set(fault, "watches", "records lost", used, a->watch_rows,
                     used + a->purgatory->free_watches);
}

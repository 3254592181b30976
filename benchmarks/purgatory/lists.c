/* lists.c - the hash map of watch keys and the lists of their watchers. */
#include "baseline.h"

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static struct row **cell_of(const struct baseline *b, uint64_t key)
{
    return &b->cells[mix(key) & (b->cell_count - 1)];
}

static void map_grow(struct baseline *b)
{
    struct row **old = b->cells;
    const uint64_t old_count = b->cell_count;
    b->cell_count = old_count ? 2 * old_count : 1024;
    b->cells = allocate(b, b->cell_count * sizeof *b->cells);
    memset(b->cells, 0, b->cell_count * sizeof *b->cells);
    for (uint64_t i = 0; i < old_count; i++)
        for (struct row *row = old[i], *next; row != NULL; row = next) {
            struct row **cell = cell_of(b, row->key);
            next = row->next;
            row->next = *cell;
            *cell = row;
        }
    if (old != NULL)
        release(b, old);
}

static struct row *row_find(const struct baseline *b, uint64_t key)
{
    struct row *row = b->cell_count ? *cell_of(b, key) : NULL;
    while (row != NULL && row->key != key)
        row = row->next;
    return row;
}

struct row *row_of(struct baseline *b, uint64_t key)
{
    struct row *row = row_find(b, key);
    if (row != NULL)
        return row;
    if (b->rows == b->cell_count)
        map_grow(b);
    row = allocate(b, sizeof *row);
    *row = (struct row){.next = *cell_of(b, key), .key = key};
    *cell_of(b, key) = row;
    b->rows++;
    return row;
}

static void row_free(struct baseline *b, struct row **link)
{
    struct row *row = *link;
    *link = row->next;
    b->rows--;
    release(b, row);
}

static unsigned place_in(const struct request *r, const struct row *row)
{
    unsigned n = 0;
    while (r->watch[n].row != row)
        n++;
    return n;
}

void row_watch(struct request *r, unsigned n)
{
    struct row *row = r->watch[n].row;
    r->watch[n].next = row->head;
    row->head = r;
    row->forgotten = false;
    r->holders++;
}

/* End the satisfied requests on a list, and remove all ended requests from the list. */
static void row_check(struct baseline *b, struct row *row)
{
    struct request **link = &row->head;
    while (*link != NULL) {
        struct request *r = *link;
        struct watcher *w = &r->watch[place_in(r, row)];
        if (r->cause == 0 && row->watermark >= w->target)
            request_end(b, r, PG_CAUSE_SATISFIED);
        if (r->cause == 0) {
            link = &w->next;
        } else {
            *link = w->next;
            request_drop(b, r);
        }
    }
}

static struct row **link_of(const struct baseline *b, uint64_t key)
{
    struct row **link = cell_of(b, key);
    while (*link != NULL && (*link)->key != key)
        link = &(*link)->next;
    return link;
}

/* Forget a row: it is deleted with its last watcher, or at once if it has no watcher. */
static void forget(struct baseline *b, struct row **link)
{
    (*link)->forgotten = true;
    if ((*link)->head == NULL)
        row_free(b, link);
}

void row_advance(struct baseline *b, uint64_t key, uint64_t watermark)
{
    struct row *row = row_of(b, key);
    if (watermark > row->watermark)
        row->watermark = watermark;
    row_check(b, row);
    if (row->forgotten)
        forget(b, link_of(b, key));
}

void row_forget(struct baseline *b, uint64_t key)
{
    struct row **link = b->cell_count ? link_of(b, key) : NULL;
    if (link != NULL && *link != NULL)
        forget(b, link);
}

/* Forget the own rows of a request that has ended. If a row's list is empty, delete the row here;
 * else a later advance or purge deletes the row once its list is empty. */
void rows_leave(struct baseline *b, const struct request *r)
{
    for (unsigned n = 0; n < r->keys; n++) {
        struct row *row = r->watch[n].row;
        if (!r->watch[n].own)
            continue;
        row->forgotten = true;
        if (row->head == NULL)
            row_free(b, link_of(b, row->key));
    }
}

/* Prefetch the cells and rows that the loop of rows_purge reaches some steps later. */
static void prefetch_cells(const struct baseline *b, uint64_t cell)
{
    if (cell + 16 < b->cell_count)
        __builtin_prefetch(b->cells[cell + 16]);
    if (cell + 8 < b->cell_count && b->cells[cell + 8] != NULL)
        __builtin_prefetch(b->cells[cell + 8]->head);
    __asm__ volatile("");         /* without this statement, compilers remove the call */
}

/* Check every list, and delete forgotten rows without watchers. */
void rows_purge(struct baseline *b)
{
    for (uint64_t i = 0; i < b->cell_count; i++) {
        prefetch_cells(b, i);
        for (struct row **link = &b->cells[i]; *link != NULL;) {
            row_check(b, *link);
            if ((*link)->forgotten && (*link)->head == NULL)
                row_free(b, link);
            else
                link = &(*link)->next;
        }
    }
}

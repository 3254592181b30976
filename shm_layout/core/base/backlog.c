/* backlog.c - the backlogs of the wheel: one queue of due timers per topic.
 *
 * Timers are appended at the tail and taken at the head. Only the first and the last chunk of a
 * queue have empty cells, so wheel_chunks can bound the number of chunks. */
#include "core/base/backlog.h"
#include "core/base/check.h"
#include "core/base/chunks.h"
#include "core/base/common.h"
#include "core/base/slots.h"

static struct pg_backlog *backlog_at(const struct wheel *w, uint32_t topic)
{
    PG_ASSERT_IN_TESTS(topic < w->topics, "wheel", "a backlog belongs to a topic");
    return &w->backlogs[topic];
}

static uint32_t *cell_of(const struct wheel *w, uint32_t cell)
{
    return (uint32_t *)(void *)w->chunks + cell;
}

void backlogs_init(struct wheel *w)
{
    for (uint32_t topic = 0; topic < w->topics; topic++)
        w->backlogs[topic] = (struct pg_backlog){.head = PG_NIL, .tail = PG_NIL};
    w->state->backlog = 0;
}

/* Add a chunk at the tail. Return its first cell. */
static uint32_t backlog_grow(struct wheel *w, struct pg_backlog *q)
{
    const uint32_t chunk = chunk_take(w);
    w->chunks[chunk].previous = PG_NIL;
    if (q->count != 0)
        w->chunks[q->tail / CHUNK_WORDS].previous = chunk;
    else
        q->head = chunk * CHUNK_WORDS + 1;
    return chunk * CHUNK_WORDS + 1;
}

void backlog_push(struct wheel *w, uint32_t slot)
{
    struct pg_hot *h = &w->hot[slot];
    struct pg_backlog *q = backlog_at(w, h->topic);
    const bool grow = q->count == 0 || q->tail % CHUNK_WORDS == PG_CHUNK_CELLS;
    q->tail = grow ? backlog_grow(w, q) : q->tail + 1;
    *cell_of(w, q->tail) = slot;
    h->where = q->tail;
    h->bucket = PG_BACKLOG_BUCKET;
    q->count++;
    w->state->backlog++;
}

/* Take the oldest member. The backlog must have one. */
static uint32_t backlog_pop(struct wheel *w, struct pg_backlog *q)
{
    PG_ASSERT(q->count != 0, "wheel", "a backlog that a slot leaves has members");
    const uint32_t slot = *cell_of(w, q->head), chunk = q->head / CHUNK_WORDS;
    q->count--;
    w->state->backlog--;
    if (q->count != 0 && q->head % CHUNK_WORDS != PG_CHUNK_CELLS) {
        q->head++;
        return slot;
    }
    q->head = q->count != 0 ? w->chunks[chunk].previous * CHUNK_WORDS + 1 : PG_NIL;
    if (q->count == 0)
        q->tail = PG_NIL;
    chunk_give(w, chunk);
    return slot;
}

void backlog_remove(struct wheel *w, uint32_t slot)
{
    const uint32_t hole = w->hot[slot].where;
    const uint32_t oldest = backlog_pop(w, backlog_at(w, w->hot[slot].topic));
    if (oldest == slot)
        return;
    *cell_of(w, hole) = oldest;
    w->hot[oldest].where = hole;
}

/* Return the cell after `cell` in a queue. */
static uint32_t cell_after(const struct wheel *w, uint32_t cell)
{
    return cell % CHUNK_WORDS != PG_CHUNK_CELLS
               ? cell + 1
               : w->chunks[cell / CHUNK_WORDS].previous * CHUNK_WORDS + 1;
}

uint32_t backlog_peek(const struct wheel *w, uint32_t topic, uint32_t n)
{
    const struct pg_backlog *q = backlog_at(w, topic);
    if (q->count <= n)
        return PG_NIL;
    return *cell_of(w, n == 0 ? q->head : cell_after(w, q->head));
}

const uint32_t *backlog_soon(const struct wheel *w, uint32_t topic, uint32_t *count)
{
    const struct pg_backlog *q = backlog_at(w, topic);
    const uint32_t left = PG_CHUNK_CELLS + 1 - q->head % CHUNK_WORDS;
    *count = q->count < left ? q->count : left;
    return cell_of(w, q->head);
}

/* ---- check --------------------------------------------------------------------------- */

static bool broken(struct pg_fault *fault, const char *detail, uint64_t where, uint64_t expected,
                   uint64_t found)
{
    return fault_set(fault, "wheel", detail, where, expected, found);
}

static bool check_member(const struct wheel *w, uint32_t topic, uint32_t cell,
                         struct pg_fault *fault)
{
    const uint32_t slot = *cell_of(w, cell);
    if (slot >= w->capacity)
        return broken(fault, "a cell holds an id out of bounds", cell, w->capacity, slot);
    const struct pg_hot *h = &w->hot[slot];
    if (h->where != cell || !in_backlog(h) || h->topic != topic)
        return broken(fault, "slot's cell in a backlog", slot, cell, h->where);
    return ctl_state(h->ctl) == PG_S_ARMED ||
           broken(fault, "state of a linked slot", slot, PG_S_ARMED, ctl_state(h->ctl));
}

static bool check_backlog(const struct wheel *w, uint32_t topic, uint32_t *chunks,
                          uint64_t *chunk_sum, struct pg_fault *fault)
{
    const struct pg_backlog *q = backlog_at(w, topic);
    uint32_t cell = q->head, count = 0;
    for (; count < q->count; count++) {
        if (cell / CHUNK_WORDS >= w->state->chunk_count || cell % CHUNK_WORDS == 0)
            return broken(fault, "a cell lies outside the chunks", topic, w->state->chunk_count,
                          cell);
        if (!check_member(w, topic, cell, fault))
            return false;
        const bool last = count + 1 == q->count;
        if (last || cell % CHUNK_WORDS == PG_CHUNK_CELLS) {
            ++*chunks;
            *chunk_sum += id_mix(cell / CHUNK_WORDS);
        }
        if (last && cell != q->tail)
            return broken(fault, "tail of a backlog", topic, q->tail, cell);
        cell = last ? PG_NIL : cell_after(w, cell);
    }
    return true;
}

bool backlogs_check(const struct wheel *w, uint32_t *linked, uint32_t *chunks, uint64_t *chunk_sum,
                    struct pg_fault *fault)
{
    uint32_t members = 0;
    for (uint32_t topic = 0; topic < w->topics; topic++) {
        if (!check_backlog(w, topic, chunks, chunk_sum, fault))
            return false;
        members += backlog_at(w, topic)->count;
    }
    *linked += members;
    return members == w->state->backlog ||
           broken(fault, "members of all backlogs", 0, members, w->state->backlog);
}

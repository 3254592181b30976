/* bulk_loads.c - bulk loads. A bulk load remembers which of its rows are done, even after the
 * timers of these rows are gone.
 *
 * A row's bit is set right after the row's effect. If a kill comes between the two, the session
 * still contains the number of the current row, and recovery sets the bit if it finds the effect of
 * this row (recover/in_doubt.c). The bits are stored in blocks. A block is found by its bulk load
 * and number, and is allocated when its first bit is set. */

#include "core/state/bulk_loads.h"
#include "core/base/answer.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/hash.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/keys.h"
#include "core/state/quotas.h"
#include "core/state/records.h"
#include "core/state/timers.h"

#define BLOCK_WORDS (PG_BULK_LOAD_BLOCK_ROWS / 64)

/* ---- blocks ------------------------------------------------------------------------------ */

static uint64_t *block_bits(const struct pg_arena *a, uint32_t block)
{
    PG_ASSERT_IN_TESTS(block < a->bulk_load_block_rows, "bulk loads", "bits belong to a block");
    return a->bulk_load_bits + (uint64_t)block * BLOCK_WORDS;
}

static uint64_t bit_of(uint64_t row) { return 1ull << row % 64; }

static uint64_t *word_of(const struct pg_arena *a, uint32_t block, uint64_t row)
{
    return block_bits(a, block) + row % PG_BULK_LOAD_BLOCK_ROWS / 64;
}

static uint64_t block_rows(const struct pg_arena *a, uint32_t block)
{
    uint64_t rows = 0;
    for (uint32_t i = 0; i < BLOCK_WORDS; i++)
        rows += (uint64_t)__builtin_popcountll(block_bits(a, block)[i]);
    return rows;
}

/* Return 1 + the number of the highest row that is done in a block. At least one row of the block
 * must be done. */
static uint64_t block_upto(const struct pg_arena *a, uint32_t block)
{
    uint32_t i = BLOCK_WORDS;
    while (i > 1 && block_bits(a, block)[i - 1] == 0)
        i--;
    const uint64_t word = block_bits(a, block)[i - 1];
    return bulk_load_block_at(a, block)->number * PG_BULK_LOAD_BLOCK_ROWS + i * 64ull -
           (word == 0 ? 64 : (uint64_t)__builtin_clzll(word));
}

static uint32_t block_hash(const struct pg_arena *a, uint32_t bulk_load, uint64_t number)
{
    return key_hash_of(keyed_hash(a->secret->secret, bulk_load, &number, sizeof number));
}

static bool block_is(const struct pg_arena *a, uint32_t block, uint32_t bulk_load, uint64_t number)
{
    return bulk_load_block_at(a, block)->bulk_load == bulk_load + 1 &&
           bulk_load_block_at(a, block)->number == number;
}

/* Find a block of a bulk load by its number. Return PG_NIL if none of its rows is done. */
static uint32_t block_find(const struct pg_arena *a, uint32_t bulk_load, uint64_t number)
{
    const uint32_t hash = block_hash(a, bulk_load, number);
    struct probe at;
    uint32_t block;
    if (a->bulk_load_block_rows == 0)
        return PG_NIL;
    for (block = index_first(&a->bulk_load_index, hash, &at); block != PG_NIL;
         block = index_next(&a->bulk_load_index, hash, &at))
        if (block_is(a, block, bulk_load, number))
            return block;
    return PG_NIL;
}

/* Do the same as block_find, but look first at the block that was found last. This is faster,
 * because rows come in order. */
static uint32_t block_near(struct pg_arena *a, uint32_t bulk_load, uint64_t number)
{
    const uint32_t near = a->state.bulk_load_block;
    if (near < a->bulk_load_block_rows && block_is(a, near, bulk_load, number))
        return near;
    return a->state.bulk_load_block = block_find(a, bulk_load, number);
}

static void block_push_free(struct pg_arena *a, uint32_t block)
{
    PG_ASSERT(bulk_load_block_at(a, block)->bulk_load == 0, "bulk loads",
              "a block given back belongs to no bulk load");
    bulk_load_block_at(a, block)->number = a->state.free_bulk_load_block;
    a->state.free_bulk_load_block = block;
}

/* Take a free block. At least one block must be free. */
static uint32_t block_born(struct pg_arena *a, uint32_t bulk_load, uint64_t number)
{
    const uint32_t block = a->state.free_bulk_load_block;
    struct pg_bulk_load_block *b = bulk_load_block_at(a, block);
    PG_ASSERT(b->bulk_load == 0, "bulk loads", "a taken block is free");
    a->state.free_bulk_load_block = (uint32_t)b->number;
    memset(block_bits(a, block), 0, BLOCK_WORDS * sizeof(uint64_t));
    b->number = number;
    STORE_RELEASE(&b->bulk_load, bulk_load + 1);
    index_insert(&a->bulk_load_index, block_hash(a, bulk_load, number), block);
    a->metrics->bulk_load_blocks++;
    bulk_load_at(a, bulk_load)->blocks++;
    a->call.blocks_held++;
    return block;
}

static void block_free(struct pg_arena *a, uint32_t block)
{
    const struct pg_bulk_load_block *b = bulk_load_block_at(a, block);
    const uint32_t hash = block_hash(a, b->bulk_load - 1, b->number);
    struct probe at;
    if (index_find_id(&a->bulk_load_index, hash, block, &at))
        index_erase(&a->bulk_load_index, &at);
    STORE_RELEASE(&bulk_load_block_at(a, block)->bulk_load, 0u);
    block_push_free(a, block);
    a->metrics->bulk_load_blocks--;
}

/* ---- rows --------------------------------------------------------------------------------- */

static bool row_is_done(const struct pg_arena *a, uint32_t block, uint64_t row)
{
    return block != PG_NIL && (*word_of(a, block, row) & bit_of(row)) != 0;
}

bool bulk_load_mark(struct pg_arena *a, uint32_t bulk_load, uint64_t row)
{
    struct pg_bulk_load *l = bulk_load_at(a, bulk_load);
    uint32_t block = block_near(a, bulk_load, row / PG_BULK_LOAD_BLOCK_ROWS);
    if (row_is_done(a, block, row))
        return true;
    if (block == PG_NIL && a->state.free_bulk_load_block == PG_NIL)
        return false;
    if (block == PG_NIL)
        block = a->state.bulk_load_block = block_born(a, bulk_load, row / PG_BULK_LOAD_BLOCK_ROWS);
    uint64_t *word = word_of(a, block, row);
    STORE_RELEASE(word, *word | bit_of(row));
    l->rows++;
    l->upto = row >= l->upto ? row + 1 : l->upto;
    a->metrics->bulk_load_rows++;
    return true;
}

/* This search uses only authoritative state, because redo calls it before the rebuild. */
bool bulk_load_row_visible(const struct pg_arena *a, const struct pg_wal_row *row)
{
    const uint32_t bulk_load = bulk_load_find(a, row->bulk_load);
    for (uint32_t i = 0; bulk_load != PG_NIL && i < a->bulk_load_block_rows; i++)
        if (block_is(a, i, bulk_load, row->row / PG_BULK_LOAD_BLOCK_ROWS))
            return row_is_done(a, i, row->row);
    return false;
}

/* ---- bulk loads --------------------------------------------------------------------------- */

uint32_t bulk_load_find(const struct pg_arena *a, const uint8_t id[16])
{
    for (uint32_t i = 0; i < a->bulk_load_rows; i++)
        if (bulk_load_at(a, i)->state != PG_BULK_LOAD_NONE &&
            memcmp(bulk_load_at(a, i)->id, id, 16) == 0)
            return i;
    return PG_NIL;
}

uint32_t bulk_load_row_for_new(const struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->bulk_load_rows; i++)
        if (bulk_load_at(a, i)->state == PG_BULK_LOAD_NONE)
            return i;
    return PG_NIL;
}

static uint32_t bulk_loads_of(const struct pg_arena *a, uint32_t uid)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->bulk_load_rows; i++)
        count += bulk_load_at(a, i)->state != PG_BULK_LOAD_NONE && bulk_load_at(a, i)->uid == uid;
    return count;
}

static uint32_t blocks_of(const struct pg_arena *a, uint32_t uid)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->bulk_load_rows; i++)
        count += bulk_load_at(a, i)->state != PG_BULK_LOAD_NONE && bulk_load_at(a, i)->uid == uid
                     ? bulk_load_at(a, i)->blocks : 0;
    return count;
}

void bulk_load_over_share(const struct pg_arena *a, struct pg_result *r)
{
    share_refuse(a, PG_Q_UID_BULK_LOADS, a->bulk_load_rows, bulk_loads_of(a, a->call.uid), r);
}

static uint32_t bulk_load_born(struct pg_arena *a, const struct pg_bulk_load *fields,
                               unsigned *status)
{
    const uint32_t bulk_load = bulk_load_row_for_new(a);
    *status = wal_buffer_refusal(a);
    if (*status == PG_ST_NONE && bulk_loads_of(a, fields->uid) >= share_of(a, a->bulk_load_rows))
        *status = PG_ST_QUOTA;
    if (*status == PG_ST_NONE && bulk_load == PG_NIL)
        *status = PG_ST_FULL_BULK_LOADS;
    if (*status != PG_ST_NONE)
        return PG_NIL;
    if (has_wal(a))
        wal_append_bulk_load(a, fields);
    bulk_load_write(a, bulk_load, fields);
    return bulk_load;
}

/* Bit mask of the states from which a bulk load may enter `state`. */
static uint32_t bulk_load_states_before(uint32_t state)
{
    enum { NONE = 1u << PG_BULK_LOAD_NONE, OPEN = 1u << PG_BULK_LOAD_OPEN,
           CLOSED = 1u << PG_BULK_LOAD_CLOSED };
    return state == PG_BULK_LOAD_NONE ? OPEN | CLOSED : state == PG_BULK_LOAD_OPEN ? NONE
         : state == PG_BULK_LOAD_CLOSED ? NONE | OPEN : 0;
}

static void state_follows(const struct pg_bulk_load *l, uint32_t state)
{
    PG_ASSERT((1ull << (l->state & 63) & bulk_load_states_before(state)) != 0, "bulk loads",
              "a bulk load's new state may follow its old state");
}

static void bulk_load_state_set(struct pg_bulk_load *l, uint32_t state)
{
    state_follows(l, state);
    STORE_RELEASE(&l->state, state);
}

void bulk_load_restore(struct pg_arena *a, uint32_t bulk_load, uint32_t state)
{
    STORE_RELEASE(&bulk_load_at(a, bulk_load)->state, state);
}

void bulk_load_write(struct pg_arena *a, uint32_t bulk_load, const struct pg_bulk_load *fields)
{
    struct pg_bulk_load *l = bulk_load_at(a, bulk_load), next = *fields;
    state_follows(l, fields->state);
    next.state = PG_BULK_LOAD_NONE;
    next.used_boot_ns = a->call.real_boot_ns;
    next.rows = next.upto = next.blocks = 0;
    *l = next;
    STORE_RELEASE(&l->state, fields->state);
    a->metrics->bulk_loads++;
}

/* Raise the fencing token and the state. Neither of them ever falls. Each change has its own frame,
 * so that after a crash each change is either complete or absent. */
static void bulk_load_raise(struct pg_arena *a, struct pg_bulk_load *l, uint64_t fencing_token,
                            uint32_t state)
{
    struct pg_bulk_load after = *l;
    if (fencing_token > l->fencing_token) {
        after.fencing_token = fencing_token;
        if (has_wal(a))
            wal_append_bulk_load(a, &after);
        STORE_RELEASE(&l->fencing_token, fencing_token);
    }
    if (state > l->state) {
        state_follows(l, state);
        after.state = state;
        if (has_wal(a))
            wal_append_bulk_load(a, &after);
        bulk_load_state_set(l, state);
    }
}

uint32_t bulk_load_claim(struct pg_arena *a, const struct pg_bulk_load *wanted, unsigned *status)
{
    const uint32_t bulk_load = bulk_load_find(a, wanted->id);
    *status = PG_ST_NONE;
    if (bulk_load == PG_NIL)
        return bulk_load_born(a, wanted, status);
    struct pg_bulk_load *l = bulk_load_at(a, bulk_load);
    if (l->uid != wanted->uid || l->namespace_row != wanted->namespace_row) {
        *status = PG_ST_DENIED;
        return bulk_load;
    }
    l->used_boot_ns = a->call.real_boot_ns;
    if (wanted->fencing_token < l->fencing_token)
        *status = PG_ST_FENCED;
    else if (wanted->fencing_token > l->fencing_token || wanted->state > l->state)
        *status = wal_buffer_refusal(a);
    if (*status == PG_ST_NONE)
        bulk_load_raise(a, l, wanted->fencing_token, wanted->state);
    return bulk_load;
}

static uint32_t bulk_load_seek(const struct pg_arena *a, const struct pg_bulk_load *wanted,
                               unsigned *status)
{
    const uint32_t bulk_load = bulk_load_find(a, wanted->id);
    const bool denied = bulk_load != PG_NIL && bulk_load_at(a, bulk_load)->uid != wanted->uid;
    *status = denied ? PG_ST_DENIED : PG_ST_NONE;
    return bulk_load;
}

void bulk_load_drop(struct pg_arena *a, uint32_t bulk_load)
{
    bulk_load_state_set(bulk_load_at(a, bulk_load), PG_BULK_LOAD_NONE);
    a->metrics->bulk_loads--;
    for (uint32_t i = 0; i < a->bulk_load_block_rows; i++)
        if (bulk_load_block_at(a, i)->bulk_load == bulk_load + 1)
            block_free(a, i);
}

void bulk_load_forget(struct pg_arena *a, uint32_t bulk_load)
{
    struct pg_bulk_load gone = *bulk_load_at(a, bulk_load);
    gone.state = PG_BULK_LOAD_NONE;
    if (has_wal(a))
        wal_append_bulk_load(a, &gone);
    bulk_load_drop(a, bulk_load);
}

void pg_bulk_loads_sweep(struct pg_arena *a, int64_t real_boot_ns, int64_t ttl_ns)
{
    time_set(a, a->state.now_ns, real_boot_ns);
    for (uint32_t i = 0; i < a->bulk_load_rows && !wal_buffer_full(a); i++) {
        const struct pg_bulk_load *l = bulk_load_at(a, i);
        if (l->state == PG_BULK_LOAD_NONE || real_boot_ns - l->used_boot_ns <= ttl_ns)
            continue;
        bulk_load_forget(a, i);
        break;
    }
    wal_buffer_settle(a);
}

/* ---- the rows of a batch -------------------------------------------------------------------- */

void bulk_load_begin(struct pg_arena *a, struct pg_session *s, const struct pg_rows *rows,
                     uint32_t namespace_row)
{
    struct pg_bulk_load wanted = {.fencing_token = rows->fencing_token, .uid = s->uid,
                                  .state = PG_BULK_LOAD_OPEN,
                                  .namespace_row = namespace_row};
    memcpy(wanted.id, rows->bulk_load, sizeof wanted.id);
    a->call.blocks_held = a->call.block_share != UINT32_MAX ? blocks_of(a, s->uid) : 0;
    unsigned *status = &a->call.bulk_load_status;
    a->call.bulk_load = namespace_row != PG_NIL ? bulk_load_claim(a, &wanted, status)
                                                : bulk_load_seek(a, &wanted, status);
    s->bulk_load_first = rows->first_row;
    STORE_RELEASE(&s->bulk_load, a->call.bulk_load == PG_NIL ? 0ull : a->call.bulk_load + 1ull);
}

static unsigned row_status(struct pg_arena *a, const struct key *key, uint64_t row)
{
    const struct pg_bulk_load *l = bulk_load_at(a, a->call.bulk_load);
    const uint32_t block = block_near(a, a->call.bulk_load, row / PG_BULK_LOAD_BLOCK_ROWS);
    if (key->namespace_row != l->namespace_row)
        return PG_ST_DENIED;
    if (row_is_done(a, block, row))
        return PG_ST_BULK_LOADED;
    if (l->state == PG_BULK_LOAD_CLOSED)
        return PG_ST_CLOSED;
    if (block == PG_NIL && a->call.blocks_held >= a->call.block_share)
        return PG_ST_QUOTA;
    return block == PG_NIL && a->state.free_bulk_load_block == PG_NIL ? PG_ST_FULL_BULK_LOADS
                                                                : PG_ST_NONE;
}

static void row_refuse(struct pg_arena *a, const struct key *key, unsigned status,
                       struct pg_result *r)
{
    const uint32_t slot = status == PG_ST_BULK_LOADED ? timers_find(a, key) : PG_NIL;
    a->metrics->bulk_load_rows_repeated += status == PG_ST_BULK_LOADED;
    answer(r, 0, status, 0);
    if (status == PG_ST_QUOTA && a->call.bulk_load_status == PG_ST_QUOTA)
        bulk_load_over_share(a, r);
    else if (status == PG_ST_QUOTA)
        share_refuse(a, PG_Q_UID_BULK_LOAD_BLOCKS, a->bulk_load_block_rows, a->call.blocks_held, r);
    if (slot != PG_NIL)
        answer(r, ctl_ticket(slot_hot(a, slot)->ctl), status, slot_hot(a, slot)->deadline_ns);
}

bool bulk_load_admits(struct pg_arena *a, const struct key *key, uint64_t row, struct pg_result *r)
{
    const unsigned status = a->call.bulk_load_status != PG_ST_NONE ? a->call.bulk_load_status
                                                              : row_status(a, key, row);
    a->call.bulk_load_row = row;
    a->call.in_bulk_load = status == PG_ST_NONE;
    if (!a->call.in_bulk_load)
        row_refuse(a, key, status, r);
    return a->call.in_bulk_load;
}

/* A frame that armed or moved a timer contains the number of its row. This function writes a DONE
 * frame if the row has no such frame. */
void bulk_load_settle(struct pg_arena *a, const struct pg_result *r)
{
    const unsigned status = r->ticket & 0xff;
    a->call.in_bulk_load = false;
    /* UNKNOWN is the answer to an UNPARK of a timer that no longer exists. */
    if (!bulk_load_counts(status) && status != PG_ST_UNKNOWN)
        return;
    if (has_wal(a) && (status == PG_ST_KEPT || status == PG_ST_UNKNOWN))
        wal_append_done(a, a->call.bulk_load, a->call.bulk_load_row);
    bulk_load_mark(a, a->call.bulk_load, a->call.bulk_load_row);
}

/* A CANCEL applies to every run of the bulk load, so it is not refused because of a fencing token.
 * A CANCEL does not begin a bulk load that does not exist. */
bool bulk_load_void(struct pg_arena *a, const struct key *key, uint64_t row, struct pg_result *r)
{
    unsigned status = a->call.bulk_load_status;
    status = status == PG_ST_FENCED ? PG_ST_NONE : status;
    if (status == PG_ST_NONE && a->call.bulk_load == PG_NIL)
        return true;
    if (status == PG_ST_NONE)
        status = row_status(a, key, row);
    if (status == PG_ST_BULK_LOADED || status == PG_ST_CLOSED)
        return true;
    if (status != PG_ST_NONE) {
        row_refuse(a, key, status, r);
        return false;
    }
    if (has_wal(a))
        wal_append_done(a, a->call.bulk_load, row);
    return bulk_load_mark(a, a->call.bulk_load, row);
}

/* ---- recovery of the current row --------------------------------------------------------- */

static bool under_way(const struct pg_arena *a, const struct pg_session *s)
{
    return s->bulk_load != 0 && s->bulk_load <= a->bulk_load_rows &&
           bulk_load_at(a, s->bulk_load - 1)->state != PG_BULK_LOAD_NONE;
}

bool bulk_load_has_row(const struct pg_arena *a, const struct pg_session *s)
{
    const uint64_t row = s->bulk_load_first + s->applied;
    if (!under_way(a, s))
        return false;
    return row_is_done(a, block_find(a, (uint32_t)s->bulk_load - 1, row / PG_BULK_LOAD_BLOCK_ROWS),
                       row);
}

void bulk_load_recover(struct pg_arena *a, const struct pg_session *s)
{
    if (under_way(a, s))
        bulk_load_mark(a, (uint32_t)s->bulk_load - 1, s->bulk_load_first + s->applied);
}

/* ---- what is done -------------------------------------------------------------------------- */

/* Pick the blocks with the lowest numbers at or above `from`, in order. */
uint32_t bulk_load_pick(const struct pg_arena *a, uint32_t bulk_load, uint64_t from,
                        uint32_t picked[BULK_LOAD_PARTS], uint64_t *next)
{
    uint32_t count = 0;
    *next = UINT64_MAX;
    for (uint32_t i = 0; i < a->bulk_load_block_rows; i++) {
        const struct pg_bulk_load_block *b = bulk_load_block_at(a, i);
        uint32_t place = count;
        if (b->bulk_load != bulk_load + 1 || b->number < from)
            continue;
        while (place > 0 && bulk_load_block_at(a, picked[place - 1])->number > b->number)
            place--;
        if (count == BULK_LOAD_PARTS)
            *next = 0;
        if (place == BULK_LOAD_PARTS)
            continue;
        count += count < BULK_LOAD_PARTS;
        memmove(&picked[place + 1], &picked[place], (count - place - 1) * sizeof picked[0]);
        picked[place] = i;
    }
    if (*next == 0)
        *next = bulk_load_block_at(a, picked[BULK_LOAD_PARTS - 1])->number + 1;
    return count;
}

struct pg_bulk_load_info bulk_load_info(const struct pg_arena *a, uint32_t bulk_load)
{
    const struct pg_bulk_load *l = bulk_load_at(a, bulk_load);
    struct pg_bulk_load_info info = {.fencing_token = l->fencing_token, .rows = l->rows,
                                     .upto = l->upto,
                                     .next = UINT64_MAX, .uid = l->uid, .state = l->state};
    memcpy(info.bulk_load, l->id, sizeof info.bulk_load);
    return info;
}

struct pg_bulk_load_part bulk_load_part(const struct pg_arena *a, uint32_t block)
{
    struct pg_bulk_load_part part = {.number = bulk_load_block_at(a, block)->number};
    memcpy(part.bits, block_bits(a, block), sizeof part.bits);
    return part;
}

void bulk_load_block_copy(struct pg_arena *to, uint32_t block, const struct pg_arena *from,
                          uint32_t from_block)
{
    memcpy(block_bits(to, block), block_bits(from, from_block),
           sizeof ((struct pg_bulk_load_part *)0)->bits);
    *bulk_load_block_at(to, block) = *bulk_load_block_at(from, from_block);
}

/* ---- init, rebuild, check ------------------------------------------------------------------ */

void bulk_loads_init(struct pg_arena *a)
{
    a->state.free_bulk_load_block = PG_NIL;
    if (a->bulk_load_block_rows != 0)
        index_init(&a->bulk_load_index);
    for (uint32_t i = a->bulk_load_block_rows; i-- > 0;)
        block_push_free(a, i);
}

static bool bulk_load_sound(const struct pg_arena *a, uint32_t bulk_load, struct pg_fault *why)
{
    const struct pg_bulk_load *l = bulk_load_at(a, bulk_load);
    if (l->state > PG_BULK_LOAD_CLOSED)
        return fault_set(why, "bulk loads", "state of a bulk load", bulk_load, PG_BULK_LOAD_CLOSED,
                         l->state);
    return l->state == PG_BULK_LOAD_NONE ||
           (l->namespace_row < a->namespace_rows &&
            namespace_at(a, l->namespace_row)->name_len != 0) ||
           fault_set(why, "bulk loads", "a namespace that does not exist", bulk_load,
                     a->namespace_rows, l->namespace_row);
}

static bool block_live(const struct pg_arena *a, uint32_t block)
{
    const uint32_t bulk_load = bulk_load_block_at(a, block)->bulk_load;
    return bulk_load != 0 && bulk_load <= a->bulk_load_rows &&
           bulk_load_at(a, bulk_load - 1)->state != PG_BULK_LOAD_NONE;
}

static void block_link(struct pg_arena *a, uint32_t block)
{
    const struct pg_bulk_load_block *b = bulk_load_block_at(a, block);
    struct pg_bulk_load *l = bulk_load_at(a, b->bulk_load - 1);
    index_insert(&a->bulk_load_index, block_hash(a, b->bulk_load - 1, b->number), block);
    a->metrics->bulk_load_blocks++;
    l->blocks++;
    l->rows += block_rows(a, block);
    l->upto = block_upto(a, block) > l->upto ? block_upto(a, block) : l->upto;
}

/* If a kill comes between the allocation of a block and the store of its first bit, no row of the
 * block is done. Such a block is freed here. */
bool bulk_loads_rebuild(struct pg_arena *a, struct pg_fault *why)
{
    a->metrics->bulk_loads = a->metrics->bulk_load_blocks = 0;
    for (uint32_t i = 0; i < a->bulk_load_rows; i++) {
        if (!bulk_load_sound(a, i, why))
            return false;
        bulk_load_at(a, i)->rows = bulk_load_at(a, i)->upto = bulk_load_at(a, i)->blocks = 0;
        a->metrics->bulk_loads += bulk_load_at(a, i)->state != PG_BULK_LOAD_NONE;
    }
    a->state.free_bulk_load_block = PG_NIL;
    if (a->bulk_load_block_rows != 0)
        index_init(&a->bulk_load_index);
    for (uint32_t i = a->bulk_load_block_rows; i-- > 0;) {
        if (block_live(a, i) && block_rows(a, i) != 0) {
            block_link(a, i);
        } else {
            STORE_RELEASE(&bulk_load_block_at(a, i)->bulk_load, 0u);
            block_push_free(a, i);
        }
    }
    return true;
}

/* Compare the rows in blocks with the counts of the bulk loads. Each count is multiplied with a
 * hash of its bulk load and added to `mixed`, so that errors in two bulk loads do not cancel
 * out. */
static bool blocks_check(const struct pg_arena *a, uint64_t *used, uint64_t *mixed,
                         struct pg_fault *fault)
{
    for (uint32_t i = 0; i < a->bulk_load_block_rows; i++) {
        const struct pg_bulk_load_block *b = bulk_load_block_at(a, i);
        if (b->bulk_load == 0)
            continue;
        if (!block_live(a, i))
            return fault_set(fault, "bulk loads", "a block belongs to no bulk load", i,
                             a->bulk_load_rows, b->bulk_load);
        if (a->secret != NULL && block_find(a, b->bulk_load - 1, b->number) != i)
            return fault_set(fault, "bulk loads", "a block that the index does not lead to", i, i,
                             block_find(a, b->bulk_load - 1, b->number));
        *mixed += id_mix(b->bulk_load) * block_rows(a, i);
        ++*used;
    }
    return *used == a->metrics->bulk_load_blocks ||
           fault_set(fault, "bulk loads", "count of blocks", 0, *used,
                     a->metrics->bulk_load_blocks);
}

static bool free_check(const struct pg_arena *a, uint64_t used, struct pg_fault *fault)
{
    uint64_t free = 0;
    for (uint32_t i = a->state.free_bulk_load_block;
         i != PG_NIL && free <= a->bulk_load_block_rows; free++) {
        if (i >= a->bulk_load_block_rows || bulk_load_block_at(a, i)->bulk_load != 0)
            return fault_set(fault, "bulk loads", "a free block that is in use", i, 0, i);
        i = (uint32_t)bulk_load_block_at(a, i)->number;
    }
    return free + used == a->bulk_load_block_rows ||
           fault_set(fault, "bulk loads", "blocks in use and free", 0, a->bulk_load_block_rows,
                     free + used);
}

bool bulk_loads_check(const struct pg_arena *a, struct pg_fault *fault)
{
    uint64_t bulk_loads = 0, blocks = 0, used = 0, found = 0, expected = 0;
    for (uint32_t i = 0; i < a->bulk_load_rows; i++) {
        if (!bulk_load_sound(a, i, fault))
            return false;
        if (bulk_load_at(a, i)->state == PG_BULK_LOAD_NONE)
            continue;
        if (bulk_load_find(a, bulk_load_at(a, i)->id) != i)
            return fault_set(fault, "bulk loads", "two bulk loads have the same id", i, i,
                             bulk_load_find(a, bulk_load_at(a, i)->id));
        expected += id_mix(i + 1) * bulk_load_at(a, i)->rows;
        blocks += bulk_load_at(a, i)->blocks;
        bulk_loads++;
    }
    if (bulk_loads != a->metrics->bulk_loads)
        return fault_set(fault, "bulk loads", "count of bulk loads", 0, bulk_loads,
                         a->metrics->bulk_loads);
    if (!blocks_check(a, &used, &found, fault) ||
        (a->secret != NULL && !free_check(a, used, fault)))
        return false;
    if (blocks != used)
        return fault_set(fault, "bulk loads", "blocks counted for bulk loads", 0, used, blocks);
    return found == expected ||
           fault_set(fault, "bulk loads", "rows counted for bulk loads", 0, found, expected);
}

/* loads.c - bulk loads: which of their rows were done, past the end of the rows' timers.
 *
 * A row's bit is set right after its effect. A kill may come in between: then the session knows
 * the row under way, and recovery sets the bit if the effect is there (session.c). Bits stand in
 * blocks, found by load and number; a block is taken with its first bit. */

#include "core.h"

#define BLOCK_WORDS (PG_LOAD_BLOCK_ROWS / 64)

/* ---- blocks ------------------------------------------------------------------------------ */

static uint64_t *block_bits(const struct pg_arena *a, uint32_t block)
{
    return a->load_bits + (uint64_t)block * BLOCK_WORDS;
}

static uint64_t bit_of(uint64_t row) { return 1ull << row % 64; }

static uint64_t *word_of(const struct pg_arena *a, uint32_t block, uint64_t row)
{
    return block_bits(a, block) + row % PG_LOAD_BLOCK_ROWS / 64;
}

static uint64_t block_rows(const struct pg_arena *a, uint32_t block)
{
    uint64_t rows = 0;
    for (uint32_t i = 0; i < BLOCK_WORDS; i++)
        rows += (uint64_t)__builtin_popcountll(block_bits(a, block)[i]);
    return rows;
}

/* Behind the highest row; of a block that has one. */
static uint64_t block_upto(const struct pg_arena *a, uint32_t block)
{
    uint32_t i = BLOCK_WORDS;
    while (i > 1 && block_bits(a, block)[i - 1] == 0)
        i--;
    const uint64_t word = block_bits(a, block)[i - 1];
    return a->load_blocks[block].number * PG_LOAD_BLOCK_ROWS + i * 64ull -
           (word == 0 ? 64 : (uint64_t)__builtin_clzll(word));
}

static uint32_t block_hash(const struct pg_arena *a, uint32_t load, uint64_t number)
{
    return key_hash_of(keyed_hash(a->secret->secret, load, &number, sizeof number));
}

static bool block_is(const struct pg_arena *a, uint32_t block, uint32_t load, uint64_t number)
{
    return a->load_blocks[block].load == load + 1 && a->load_blocks[block].number == number;
}

/* PG_NIL: no row of it was done. */
static uint32_t block_find(const struct pg_arena *a, uint32_t load, uint64_t number)
{
    const uint32_t hash = block_hash(a, load, number);
    struct probe at;
    uint32_t block;
    if (a->load_block_rows == 0)
        return PG_NIL;
    for (block = index_first(&a->load_index, hash, &at); block != PG_NIL;
         block = index_next(&a->load_index, hash, &at))
        if (block_is(a, block, load, number))
            return block;
    return PG_NIL;
}

/* The same for the row that comes after one of the same block, as rows do. */
static uint32_t block_near(struct pg_arena *a, uint32_t load, uint64_t number)
{
    const uint32_t near = a->load_block;
    if (near < a->load_block_rows && block_is(a, near, load, number))
        return near;
    return a->load_block = block_find(a, load, number);
}

static void block_push_free(struct pg_arena *a, uint32_t block)
{
    a->load_blocks[block].number = a->free_load_block;
    a->free_load_block = block;
}

/* Takes a free one, of which there is one. */
static uint32_t block_born(struct pg_arena *a, uint32_t load, uint64_t number)
{
    const uint32_t block = a->free_load_block;
    struct pg_load_block *b = &a->load_blocks[block];
    a->free_load_block = (uint32_t)b->number;
    memset(block_bits(a, block), 0, BLOCK_WORDS * sizeof(uint64_t));
    b->number = number;
    STORE_RELEASE(&b->load, load + 1);
    index_insert(&a->load_index, block_hash(a, load, number), block);
    a->metrics->load_blocks++;
    return block;
}

static void block_free(struct pg_arena *a, uint32_t block)
{
    const struct pg_load_block *b = &a->load_blocks[block];
    const uint32_t hash = block_hash(a, b->load - 1, b->number);
    struct probe at;
    if (index_find_id(&a->load_index, hash, block, &at))
        index_erase(&a->load_index, &at);
    STORE_RELEASE(&a->load_blocks[block].load, 0u);
    block_push_free(a, block);
    a->metrics->load_blocks--;
}

/* ---- rows --------------------------------------------------------------------------------- */

static bool row_is_done(const struct pg_arena *a, uint32_t block, uint64_t row)
{
    return block != PG_NIL && (*word_of(a, block, row) & bit_of(row)) != 0;
}

bool load_mark(struct pg_arena *a, uint32_t load, uint64_t row)
{
    struct pg_load *l = &a->loads[load];
    uint32_t block = block_near(a, load, row / PG_LOAD_BLOCK_ROWS);
    if (row_is_done(a, block, row))
        return true;
    if (block == PG_NIL && a->free_load_block == PG_NIL)
        return false;
    if (block == PG_NIL)
        block = a->load_block = block_born(a, load, row / PG_LOAD_BLOCK_ROWS);
    uint64_t *word = word_of(a, block, row);
    STORE_RELEASE(word, *word | bit_of(row));
    l->rows++;
    l->upto = row >= l->upto ? row + 1 : l->upto;
    a->metrics->load_rows++;
    return true;
}

/* In authoritative state alone, for while no derived state is there. */
bool load_row_visible(const struct pg_arena *a, const struct pg_wal_row *row)
{
    const uint32_t load = load_find(a, row->load);
    for (uint32_t i = 0; load != PG_NIL && i < a->load_block_rows; i++)
        if (block_is(a, i, load, row->row / PG_LOAD_BLOCK_ROWS))
            return row_is_done(a, i, row->row);
    return false;
}

/* ---- loads -------------------------------------------------------------------------------- */

uint32_t load_find(const struct pg_arena *a, const uint8_t id[16])
{
    for (uint32_t i = 0; i < a->load_rows; i++)
        if (a->loads[i].state != PG_LOAD_NONE && memcmp(a->loads[i].id, id, 16) == 0)
            return i;
    return PG_NIL;
}

uint32_t load_row_for_new(const struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->load_rows; i++)
        if (a->loads[i].state == PG_LOAD_NONE)
            return i;
    return PG_NIL;
}

static uint32_t load_born(struct pg_arena *a, const struct pg_load *fields, unsigned *status)
{
    const uint32_t load = load_row_for_new(a);
    *status = wal_buffer_refusal(a);
    if (*status == PG_ST_NONE && load == PG_NIL)
        *status = PG_ST_FULL_LOADS;
    if (*status != PG_ST_NONE)
        return PG_NIL;
    if (has_wal(a))
        wal_append_load(a, fields);
    load_write(a, load, fields);
    return load;
}

void load_write(struct pg_arena *a, uint32_t load, const struct pg_load *fields)
{
    struct pg_load *l = &a->loads[load], next = *fields;
    next.state = PG_LOAD_NONE;
    next.used_boot_ns = a->real_boot_ns;
    next.rows = next.upto = 0;
    *l = next;
    STORE_RELEASE(&l->state, fields->state);
    a->metrics->loads++;
}

/* Both only rise; each has a frame of its own, so that each is there or not. */
static void load_raise(struct pg_arena *a, struct pg_load *l, uint64_t fencing_token, uint32_t state)
{
    struct pg_load after = *l;
    if (fencing_token > l->fencing_token) {
        after.fencing_token = fencing_token;
        if (has_wal(a))
            wal_append_load(a, &after);
        STORE_RELEASE(&l->fencing_token, fencing_token);
    }
    if (state > l->state) {
        after.state = state;
        if (has_wal(a))
            wal_append_load(a, &after);
        STORE_RELEASE(&l->state, state);
    }
}

uint32_t load_claim(struct pg_arena *a, const struct pg_load *wanted, unsigned *status)
{
    const uint32_t load = load_find(a, wanted->id);
    *status = PG_ST_NONE;
    if (load == PG_NIL)
        return load_born(a, wanted, status);
    struct pg_load *l = &a->loads[load];
    if (l->uid != wanted->uid || l->namespace_row != wanted->namespace_row) {
        *status = PG_ST_DENIED;
        return load;
    }
    l->used_boot_ns = a->real_boot_ns;
    if (wanted->fencing_token < l->fencing_token)
        *status = PG_ST_FENCED;
    else if (wanted->fencing_token > l->fencing_token || wanted->state > l->state)
        *status = wal_buffer_refusal(a);
    if (*status == PG_ST_NONE)
        load_raise(a, l, wanted->fencing_token, wanted->state);
    return load;
}

static uint32_t load_seek(const struct pg_arena *a, const struct pg_load *wanted,
                          unsigned *status)
{
    const uint32_t load = load_find(a, wanted->id);
    const bool denied = load != PG_NIL && a->loads[load].uid != wanted->uid;
    *status = denied ? PG_ST_DENIED : PG_ST_NONE;
    return load;
}

void load_drop(struct pg_arena *a, uint32_t load)
{
    STORE_RELEASE(&a->loads[load].state, (uint32_t)PG_LOAD_NONE);
    a->metrics->loads--;
    for (uint32_t i = 0; i < a->load_block_rows; i++)
        if (a->load_blocks[i].load == load + 1)
            block_free(a, i);
}

void load_forget(struct pg_arena *a, uint32_t load)
{
    struct pg_load gone = a->loads[load];
    gone.state = PG_LOAD_NONE;
    if (has_wal(a))
        wal_append_load(a, &gone);
    load_drop(a, load);
}

void pg_loads_sweep(struct pg_arena *a, int64_t real_boot_ns, int64_t ttl_ns)
{
    time_set(a, a->now_ns, real_boot_ns);
    for (uint32_t i = 0; i < a->load_rows && !wal_buffer_full(a); i++) {
        const struct pg_load *l = &a->loads[i];
        if (l->state == PG_LOAD_NONE || real_boot_ns - l->used_boot_ns <= ttl_ns)
            continue;
        load_forget(a, i);
        break;
    }
    wal_buffer_settle(a);
}

/* ---- the rows of a batch -------------------------------------------------------------------- */

void load_begin(struct pg_arena *a, struct pg_session *s, const struct pg_rows *rows,
                uint32_t namespace_row)
{
    struct pg_load wanted = {.fencing_token = rows->fencing_token, .uid = s->uid, .state = PG_LOAD_OPEN,
                             .namespace_row = namespace_row};
    memcpy(wanted.id, rows->load, sizeof wanted.id);
    a->load = namespace_row != PG_NIL ? load_claim(a, &wanted, &a->load_status)
                                      : load_seek(a, &wanted, &a->load_status);
    s->load_first = rows->first_row;
    STORE_RELEASE(&s->load, a->load == PG_NIL ? 0ull : a->load + 1ull);
}

static unsigned row_status(struct pg_arena *a, const struct key *key, uint64_t row)
{
    const struct pg_load *l = &a->loads[a->load];
    const uint32_t block = block_near(a, a->load, row / PG_LOAD_BLOCK_ROWS);
    if (key->namespace_row != l->namespace_row)
        return PG_ST_DENIED;
    if (row_is_done(a, block, row))
        return PG_ST_LOADED;
    if (l->state == PG_LOAD_CLOSED)
        return PG_ST_CLOSED;
    return block == PG_NIL && a->free_load_block == PG_NIL ? PG_ST_FULL_LOADS : PG_ST_NONE;
}

static void row_refuse(struct pg_arena *a, const struct key *key, unsigned status,
                       struct pg_result *r)
{
    const uint32_t slot = status == PG_ST_LOADED ? timers_find(a, key) : PG_NIL;
    a->metrics->load_rows_repeated += status == PG_ST_LOADED;
    answer(r, 0, status, 0);
    if (slot != PG_NIL)
        answer(r, ctl_ticket(a->slots.hot[slot].ctl), status, a->slots.hot[slot].deadline_ns);
}

bool load_admits(struct pg_arena *a, const struct key *key, uint64_t row, struct pg_result *r)
{
    const unsigned status = a->load_status != PG_ST_NONE ? a->load_status : row_status(a, key, row);
    a->load_row = row;
    a->in_load = status == PG_ST_NONE;
    if (!a->in_load)
        row_refuse(a, key, status, r);
    return a->in_load;
}

/* What armed or moved a timer said in its own frame of which row it is. */
void load_settle(struct pg_arena *a, const struct pg_result *r)
{
    const unsigned status = r->ticket & 0xff;
    a->in_load = false;
    if (!load_counts(status) && status != PG_ST_UNKNOWN)      /* to be unparked, and gone */
        return;
    if (has_wal(a) && (status == PG_ST_KEPT || status == PG_ST_UNKNOWN))
        wal_append_done(a, a->load, a->load_row);
    load_mark(a, a->load, a->load_row);
}

/* A cancel is for whichever run comes: no fencing token keeps it out. Of a load that has not begun
 * it leaves nothing behind. */
bool load_void(struct pg_arena *a, const struct key *key, uint64_t row, struct pg_result *r)
{
    unsigned status = a->load_status == PG_ST_FENCED ? PG_ST_NONE : a->load_status;
    if (status == PG_ST_NONE && a->load == PG_NIL)
        return true;
    if (status == PG_ST_NONE)
        status = row_status(a, key, row);
    if (status == PG_ST_LOADED || status == PG_ST_CLOSED)
        return true;
    if (status != PG_ST_NONE) {
        row_refuse(a, key, status, r);
        return false;
    }
    if (has_wal(a))
        wal_append_done(a, a->load, row);
    return load_mark(a, a->load, row);
}

/* ---- recovery of the row under way ------------------------------------------------------------
 * */

static bool under_way(const struct pg_arena *a, const struct pg_session *s)
{
    return s->load != 0 && s->load <= a->load_rows &&
           a->loads[s->load - 1].state != PG_LOAD_NONE;
}

bool load_has_row(const struct pg_arena *a, const struct pg_session *s)
{
    const uint64_t row = s->load_first + s->applied;
    if (!under_way(a, s))
        return false;
    return row_is_done(a, block_find(a, (uint32_t)s->load - 1, row / PG_LOAD_BLOCK_ROWS), row);
}

void load_recover(struct pg_arena *a, const struct pg_session *s)
{
    if (under_way(a, s))
        load_mark(a, (uint32_t)s->load - 1, s->load_first + s->applied);
}

/* ---- what is done
 * -------------------------------------------------------------------------------- */

/* The lowest block numbers from `from` on, in order. */
uint32_t load_pick(const struct pg_arena *a, uint32_t load, uint64_t from,
                   uint32_t picked[LOAD_PARTS], uint64_t *next)
{
    uint32_t count = 0;
    *next = UINT64_MAX;
    for (uint32_t i = 0; i < a->load_block_rows; i++) {
        const struct pg_load_block *b = &a->load_blocks[i];
        uint32_t place = count;
        if (b->load != load + 1 || b->number < from)
            continue;
        while (place > 0 && a->load_blocks[picked[place - 1]].number > b->number)
            place--;
        if (count == LOAD_PARTS)
            *next = 0;
        if (place == LOAD_PARTS)
            continue;
        count += count < LOAD_PARTS;
        memmove(&picked[place + 1], &picked[place], (count - place - 1) * sizeof picked[0]);
        picked[place] = i;
    }
    if (*next == 0)
        *next = a->load_blocks[picked[LOAD_PARTS - 1]].number + 1;
    return count;
}

struct pg_load_info load_info(const struct pg_arena *a, uint32_t load)
{
    const struct pg_load *l = &a->loads[load];
    struct pg_load_info info = {.fencing_token = l->fencing_token, .rows = l->rows, .upto = l->upto,
                                .next = UINT64_MAX, .uid = l->uid, .state = l->state};
    memcpy(info.load, l->id, sizeof info.load);
    return info;
}

struct pg_load_part load_part(const struct pg_arena *a, uint32_t block)
{
    struct pg_load_part part = {.number = a->load_blocks[block].number};
    memcpy(part.bits, block_bits(a, block), sizeof part.bits);
    return part;
}

/* ---- init, rebuild, check
 * ------------------------------------------------------------------------- */

void loads_init(struct pg_arena *a)
{
    a->free_load_block = PG_NIL;
    if (a->load_block_rows != 0)
        index_init(&a->load_index);
    for (uint32_t i = a->load_block_rows; i-- > 0;)
        block_push_free(a, i);
}

static bool load_sound(const struct pg_arena *a, uint32_t load, struct pg_fault *why)
{
    const struct pg_load *l = &a->loads[load];
    if (l->state > PG_LOAD_CLOSED)
        return fault_set(why, "loads", "state of a load", load, PG_LOAD_CLOSED, l->state);
    return l->state == PG_LOAD_NONE ||
           (l->namespace_row < a->namespace_rows && a->namespaces[l->namespace_row].name_len != 0) ||
           fault_set(why, "loads", "a namespace that is not there", load, a->namespace_rows,
                     l->namespace_row);
}

static bool block_live(const struct pg_arena *a, uint32_t block)
{
    const uint32_t load = a->load_blocks[block].load;
    return load != 0 && load <= a->load_rows && a->loads[load - 1].state != PG_LOAD_NONE;
}

static void block_link(struct pg_arena *a, uint32_t block)
{
    const struct pg_load_block *b = &a->load_blocks[block];
    struct pg_load *l = &a->loads[b->load - 1];
    index_insert(&a->load_index, block_hash(a, b->load - 1, b->number), block);
    a->metrics->load_blocks++;
    l->rows += block_rows(a, block);
    l->upto = block_upto(a, block) > l->upto ? block_upto(a, block) : l->upto;
}

/* A block without a row is what a kill left that came before its first bit. */
bool loads_rebuild(struct pg_arena *a, struct pg_fault *why)
{
    a->metrics->loads = a->metrics->load_blocks = 0;
    for (uint32_t i = 0; i < a->load_rows; i++) {
        if (!load_sound(a, i, why))
            return false;
        a->loads[i].rows = a->loads[i].upto = 0;
        a->metrics->loads += a->loads[i].state != PG_LOAD_NONE;
    }
    a->free_load_block = PG_NIL;
    if (a->load_block_rows != 0)
        index_init(&a->load_index);
    for (uint32_t i = a->load_block_rows; i-- > 0;) {
        if (block_live(a, i) && block_rows(a, i) != 0) {
            block_link(a, i);
        } else {
            STORE_RELEASE(&a->load_blocks[i].load, 0u);
            block_push_free(a, i);
        }
    }
    return true;
}

/* Rows counted in blocks against those of the loads, mixed by load. */
static bool blocks_check(const struct pg_arena *a, uint64_t *used, uint64_t *mixed,
                         struct pg_fault *fault)
{
    for (uint32_t i = 0; i < a->load_block_rows; i++) {
        const struct pg_load_block *b = &a->load_blocks[i];
        if (b->load == 0)
            continue;
        if (!block_live(a, i))
            return fault_set(fault, "loads", "a block of no load", i, a->load_rows, b->load);
        if (a->secret != NULL && block_find(a, b->load - 1, b->number) != i)
            return fault_set(fault, "loads", "a block that the index does not lead to", i, i,
                             block_find(a, b->load - 1, b->number));
        *mixed += id_mix(b->load) * block_rows(a, i);
        ++*used;
    }
    return *used == a->metrics->load_blocks ||
           fault_set(fault, "loads", "count of blocks", 0, *used, a->metrics->load_blocks);
}

static bool free_check(const struct pg_arena *a, uint64_t used, struct pg_fault *fault)
{
    uint64_t free = 0;
    for (uint32_t i = a->free_load_block; i != PG_NIL && free <= a->load_block_rows; free++) {
        if (i >= a->load_block_rows || a->load_blocks[i].load != 0)
            return fault_set(fault, "loads", "a free block that is in use", i, 0, i);
        i = (uint32_t)a->load_blocks[i].number;
    }
    return free + used == a->load_block_rows ||
           fault_set(fault, "loads", "blocks in use and free", 0, a->load_block_rows, free + used);
}

bool loads_check(const struct pg_arena *a, struct pg_fault *fault)
{
    uint64_t loads = 0, used = 0, found = 0, expected = 0;
    for (uint32_t i = 0; i < a->load_rows; i++) {
        if (!load_sound(a, i, fault))
            return false;
        if (a->loads[i].state == PG_LOAD_NONE)
            continue;
        if (load_find(a, a->loads[i].id) != i)
            return fault_set(fault, "loads", "two loads of one id", i, i,
                             load_find(a, a->loads[i].id));
        expected += id_mix(i + 1) * a->loads[i].rows;
        loads++;
    }
    if (loads != a->metrics->loads)
        return fault_set(fault, "loads", "count of loads", 0, loads, a->metrics->loads);
    if (!blocks_check(a, &used, &found, fault) ||
        (a->secret != NULL && !free_check(a, used, fault)))
        return false;
    return found == expected ||
           fault_set(fault, "loads", "rows counted for loads", 0, found, expected);
}

/* watermarks.c - watch keys: a bounded table of monotone watermarks that outlive their watchers.
 *
 * A row exists until it is forgotten, or until its time to live has passed since its last change or
 * the end of its last watcher. The row of a failed key exists until the failure is cleared or the
 * key is forgotten. No row is evicted to make space, so the advance of a key that is not watched
 * yet is not lost. */

#include "core/state/watermarks.h"
#include "core/base/answer.h"
#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/compaction.h"
#include "core/state/keys.h"
#include "core/state/quotas.h"
#include "core/state/records.h"
#include "core/state/timers.h"

static const uint8_t *watermark_key(const struct pg_arena *a, uint32_t row)
{
    const struct pg_watermark *l = watermark_at(a, row);
    return watermark_granules(l) == 0 ? l->key : blob_at(&a->blobs, watermark_blob(l));
}

static inline uint64_t word_of(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* Compare two keys. Most keys are short, so a call of memcmp would cost more than this
 * comparison. */
static inline bool same_bytes(const uint8_t *x, const uint8_t *y, uint32_t len)
{
    if (LIKELY(len >= 8 && len <= 16))
        return word_of(x) == word_of(y) && word_of(x + len - 8) == word_of(y + len - 8);
    return memcmp(x, y, len) == 0;
}

static inline bool has_key(const struct pg_arena *a, uint32_t row, const struct key *k)
{
    const struct pg_watermark *l = watermark_at(a, row);
    return l->hash == k->hash && l->key_len == k->len && l->key_type == k->type &&
           l->namespace_row == k->namespace_row && same_bytes(watermark_key(a, row), k->bytes,
                                                              k->len);
}

bool watermark_has_key(const struct pg_arena *a, uint32_t row, const struct key *k)
{
    return has_key(a, row, k);
}

uint32_t watermark_find(const struct pg_arena *a, const struct key *k)
{
    struct probe at;
    uint32_t row = k->row_guess;
    if (row != PG_NIL && has_key(a, row, k))
        return row;
    row = index_first(&a->watermark_index, k->hash, &at);
    while (UNLIKELY(row != PG_NIL && !has_key(a, row, k)))
        row = index_next(&a->watermark_index, k->hash, &at);
    return row;
}

/* ---- birth and end --------------------------------------------------------------------- */

/* Copy in two parts, which may overlap. Most keys are short, so a call of memcpy would cost
 * more. */
static void short_copy(uint8_t *to, const uint8_t *from, uint32_t len)
{
    if (len >= 8) {
        memcpy(to, from, 8);
        memcpy(to + len - 8, from + len - 8, 8);
    } else if (len >= 4) {
        memcpy(to, from, 4);
        memcpy(to + len - 4, from + len - 4, 4);
    } else {
        to[0] = from[0];
        to[len / 2] = from[len / 2];
        to[len - 1] = from[len - 1];
    }
}

/* Store the key in its row. Return false if a long key needs a blob and there is no space for
 * it. */
static bool key_write(struct pg_arena *a, struct pg_watermark *l, const struct key *k)
{
    if (k->len <= sizeof l->key) {
        short_copy(l->key, k->bytes, k->len);
        return true;
    }
    const uint32_t blob = blobs_take(&a->blobs, blob_granules(k->len));
    if (blob == PG_NIL)
        return false;
    a->metrics->blob_bytes += (uint64_t)blob_granules(k->len) * PG_GRANULE;
    memcpy(l->key, &blob, sizeof blob);
    memcpy(blob_at(&a->blobs, blob), k->bytes, k->len);
    return true;
}

/* Prefetch a row that a later watermark_born will use. Each free row only leads to the next free
 * row. Therefore the key field of a free row also contains guesses of which free rows follow the
 * next one. */
static inline void free_row_fetch(const struct pg_arena *a, const struct pg_watermark *l)
{
    uint32_t row;
    memcpy(&row, l->key + sizeof l->key - sizeof row, sizeof row);
    const struct pg_watermark *guess = a->watermarks + row;
    __builtin_prefetch(guess, 1);
    __builtin_prefetch(&guess->place, 1);
}

/* Return a free row. PG_NIL = the uid may not have another row, or no row is free; *why contains
 * the answer. */
static uint32_t row_for_new(const struct pg_arena *a, struct pg_result *why)
{
    if (!share_admits_watch_key(a, why))
        return PG_NIL;
    if (a->purgatory->free_watermark == PG_NIL)
        answer(why, 0, PG_ST_FULL_KEYS, 0);
    return a->purgatory->free_watermark;
}

uint32_t watermark_born(struct pg_arena *a, const struct key *k, bool to_join,
                        struct pg_result *why)
{
    const uint32_t row = row_for_new(a, why);
    if (row == PG_NIL)
        return PG_NIL;
    struct pg_watermark *l = watermark_at(a, row);
    PG_ASSERT(a->purgatory->free_watermarks != 0 && l->key_len == 0, "watermarks",
              "a taken row is free");
    free_row_fetch(a, l);
    if (!key_write(a, l, k)) {
        answer(why, 0, payload_refusal(a), 0);
        return PG_NIL;
    }
    a->purgatory->free_watermark = l->root;
    a->purgatory->free_watermarks--;
    l->watermark = 0;
    l->hash = k->hash;
    l->error = 0;
    l->root = l->first = l->latest = PG_NIL;
    l->touched_s = a->call.real_s;
    l->namespace_row = (uint16_t)k->namespace_row;
    l->key_type = k->type;
    l->account = a->call.account;
    if (has_wal(a))
        wal_append_watermark(a, row, l, k);
    if (to_join)
        l->touched_s = PG_NIL;
    STORE_RELEASE(&l->key_len, k->len);
    account_watch_key_counted(a, l->account, 1);
    l->place = index_insert(&a->watermark_index, k->hash, row);
    return row;
}

static inline void watermark_push_free(struct pg_arena *a, uint32_t row)
{
    PG_ASSERT(a->purgatory->free_watermarks < a->watermark_rows, "watermarks",
              "no row is given back twice");
    const uint32_t next = a->purgatory->free_watermark;
    struct pg_watermark *l = watermark_at(a, row);
    if (UNLIKELY(next == PG_NIL)) {
        memset(l->key, 0, sizeof l->key);
    } else {
        memcpy(l->key, &watermark_at(a, next)->root, sizeof next);
        memcpy(l->key + sizeof next, watermark_at(a, next)->key, sizeof l->key - sizeof next);
    }
    l->root = next;
    l->first = PG_NIL;
    a->purgatory->free_watermark = row;
    a->purgatory->free_watermarks++;
}

void watermark_free(struct pg_arena *a, uint32_t row)
{
    struct pg_watermark *l = watermark_at(a, row);
    const uint32_t granules = watermark_granules(l);
    index_erase_at(&a->watermark_index, l->hash, l->place);
    if (has_wal(a))
        wal_append_gone(a, row);
    STORE_RELEASE(&l->key_len, (uint8_t)0);
    if (granules != 0) {
        blobs_give(&a->blobs, watermark_blob(l), granules);
        a->metrics->blob_bytes -= (uint64_t)granules * PG_GRANULE;
    }
    account_watch_key_counted(a, l->account, -1);
    watermark_push_free(a, row);
}

static void watermark_append(struct pg_arena *a, uint32_t row, uint64_t watermark, uint32_t error,
                             uint32_t touched_s)
{
    struct pg_watermark next = *watermark_at(a, row);
    next.watermark = watermark;
    next.error = error;
    next.touched_s = touched_s;
    wal_append_watermark(a, row, &next, NULL);
}

RARE void watermark_left_by_one(struct pg_arena *a, uint32_t row)
{
    const struct pg_watermark *l = watermark_at(a, row);
    if (l->touched_s == PG_NIL)
        /* The operation that left may have forgotten its own key. */
        watermark_append(a, row, l->watermark, l->error, PG_NIL);
}

void watermark_left_by_last(struct pg_arena *a, uint32_t row)
{
    struct pg_watermark *l = watermark_at(a, row);
    if (l->touched_s == PG_NIL)
        watermark_free(a, row);
    else
        l->touched_s = a->call.real_s;
}

/* ---- changes ------------------------------------------------------------------------------- */

/* Set the watermark and the error. The time of the change is stored first, because a rebuild that
 * finds the new watermark or error must not drop the row, even if the row was forgotten before the
 * change. */
void watermark_set(struct pg_arena *a, uint32_t row, uint64_t watermark, uint32_t error)
{
    struct pg_watermark *l = watermark_at(a, row);
    if (has_wal(a))
        watermark_append(a, row, watermark, error, a->call.real_s);
    l->touched_s = a->call.real_s;
    STORE_RELEASE(&l->error, error);
    STORE_RELEASE(&l->watermark, watermark);
}

void watermark_clear(struct pg_arena *a, uint32_t row)
{
    struct pg_watermark *l = watermark_at(a, row);
    const uint32_t touched_s = l->touched_s == PG_NIL ? PG_NIL : a->call.real_s;
    if (has_wal(a))
        watermark_append(a, row, l->watermark, 0, touched_s);
    l->touched_s = touched_s;
    STORE_RELEASE(&l->error, 0u);
}

void watermark_drop(struct pg_arena *a, uint32_t row)
{
    if (has_wal(a))
        watermark_append(a, row, watermark_at(a, row)->watermark, watermark_at(a, row)->error,
                         PG_NIL);
    watermark_forget(a, row);
    if (watermark_at(a, row)->root == PG_NIL)
        watermark_free(a, row);
}

/* ---- time to live ------------------------------------------------------------------------ */

void pg_sweep(struct pg_arena *a, int64_t real_boot_ns, uint32_t *cursor, uint32_t budget)
{
    const uint32_t ttl_s = (uint32_t)(a->purgatory->watermark_ttl_ns / 1000000000);
    time_set(a, a->state.now_ns, real_boot_ns);
    for (uint32_t n = 0; n < budget && n < a->watermark_rows; n++) {
        if (*cursor >= a->watermark_rows)
            *cursor = 0;
        const struct pg_watermark *l = watermark_at(a, *cursor);
        const bool over = l->touched_s == PG_NIL || a->call.real_s - l->touched_s > ttl_s;
        const bool failed = l->error != 0 && l->touched_s != PG_NIL;
        if (l->key_len != 0 && l->root == PG_NIL && over && !failed && !wal_buffer_full(a))
            watermark_free(a, *cursor);
        ++*cursor;
    }
    wal_buffer_settle(a);
}

/* ---- init, rebuild, check ------------------------------------------------------------------ */

uint64_t watermark_ttl_ns(const struct pg_arena *a) { return a->purgatory->watermark_ttl_ns; }

void watermarks_init(struct pg_arena *a, uint64_t ttl_ns)
{
    a->purgatory->watermark_ttl_ns = ttl_ns;
    index_init(&a->watermark_index);
    a->purgatory->free_watermark = PG_NIL;
    a->purgatory->free_watermarks = 0;
    for (uint32_t row = a->watermark_rows; row-- > 0;)
        watermark_push_free(a, row);
}

static bool watermark_rebuild(struct pg_arena *a, uint32_t row, struct pg_fault *why)
{
    struct pg_watermark *l = watermark_at(a, row);
    if (l->namespace_row >= a->namespace_rows ||
        (watermark_granules(l) != 0 &&
         !blobs_rebuild_mark(&a->blobs, watermark_blob(l), watermark_granules(l))))
        return fault_set(why, "watermarks",
                         "a watch key's blob overlaps another or lies outside the pool",
                         row, 0, watermark_blob(l));
    if (l->account > a->account_rows)
        return fault_set(why, "watermarks", "an account that does not exist", row, a->account_rows,
                         l->account);
    account_watch_key_counted(a, l->account, 1);
    l->root = l->first = l->latest = PG_NIL;
    l->place = index_insert(&a->watermark_index, l->hash, row);
    return true;
}

bool watermarks_rebuild(struct pg_arena *a, struct pg_fault *why)
{
    index_init(&a->watermark_index);
    a->purgatory->free_watermark = PG_NIL;
    a->purgatory->free_watermarks = 0;
    for (uint32_t row = a->watermark_rows; row-- > 0;) {
        if (watermark_at(a, row)->key_len == 0)
            watermark_push_free(a, row);
        else if (!watermark_rebuild(a, row, why))
            return false;
    }
    return true;
}

void watermarks_drop_forgotten(struct pg_arena *a)
{
    for (uint32_t row = 0; row < a->watermark_rows; row++)
        if (watermark_at(a, row)->key_len != 0 && watermark_at(a, row)->root == PG_NIL &&
            watermark_at(a, row)->touched_s == PG_NIL && !wal_buffer_full(a))
            watermark_free(a, row);   /* otherwise the next sweep frees it */
}

bool watermarks_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules)
{
    uint64_t used = 0, free = 0;
    struct probe at;
    for (uint32_t row = 0; row < a->watermark_rows; row++) {
        const struct pg_watermark *l = watermark_at(a, row);
        if (l->key_len == 0)
            continue;
        if (watermark_granules(l) != 0 && !blob_inside(&a->blobs, watermark_blob(l), l->key_len))
            return fault_set(fault, "watermarks", "a blob lies outside its region", row,
                             a->blobs.granules, watermark_blob(l));
        const struct key k = {watermark_key(a, row), l->hash, l->namespace_row, PG_NIL, l->key_len,
                              l->key_type};
        if (a->secret != NULL && k.hash != key_hash(a, k.namespace_row, k.type, k.bytes, k.len))
            return fault_set(fault, "watermarks", "hash of a watch key", row,
                             key_hash(a, k.namespace_row, k.type, k.bytes, k.len), k.hash);
        if (a->secret != NULL && watermark_find(a, &k) != row)
            return fault_set(fault, "watermarks", "a watch key that the index does not lead to",
                             row, row, watermark_find(a, &k));
        if (!index_find_id(&a->watermark_index, l->hash, row, &at) ||
            at.bucket * (PG_INDEX_CELLS + 1) + at.cell != l->place)
            return fault_set(fault, "watermarks", "place in the index", row, l->place, at.cell);
        if (l->root == PG_NIL && l->touched_s == PG_NIL && !has_wal(a))
            return fault_set(fault, "watermarks", "a forgotten watch key without watchers", row,
                             0, l->touched_s);
        *granules += watermark_granules(l);
        used++;
    }
    for (uint32_t row = a->purgatory->free_watermark; row != PG_NIL && free <= a->watermark_rows;
         row = watermark_at(a, row)->root)
        free++;
    if (free != a->purgatory->free_watermarks || used + free != a->watermark_rows)
        return fault_set(fault, "watermarks", "rows used and free", used, a->watermark_rows,
                         used + free);
    return index_check(&a->watermark_index, used, fault);
}

/* ---- readers ----------------------------------------------------------------------------- */

bool watermark_info(const struct pg_arena *a, uint32_t row, struct pg_info_watch *watch,
                    struct sink *out)
{
    if (row >= a->watermark_rows)
        return false;
    const struct pg_watermark l = *watermark_at(a, row);
    const bool is_short = watermark_granules(&l) == 0;
    if (!is_short && !blob_inside(&a->blobs, watermark_blob(&l), l.key_len))
        return false;
    watch->watermark = l.watermark;
    watch->error = l.error;
    watch->key_len = l.key_len;
    watch->key_type = l.key_type;
    sink_put(out, watch, sizeof *watch);
    sink_put(out, is_short ? l.key : blob_at(&a->blobs, watermark_blob(&l)), l.key_len);
    return true;
}

/* quotas.c - access to namespaces: owners, quotas, accounts and shares.
 *
 * A namespace counts what it contains; an account counts what a uid has in all namespaces. Each
 * slot and each watch key stores the number of its account, so a rebuild can count again. No quota
 * applies to a record that frees something (CANCEL, the end of an operation, an acknowledgement).
 *
 * A uid's share of a table limits the number of rows that one uid may hold. Topics, namespaces and
 * bulk loads store the uid that created them, and sessions store the uid of their peer. The rows of
 * a uid are counted when the uid needs another row. In the table of slots, the share limits the
 * number of operations that a uid's sessions own, because an unacknowledged outcome occupies its
 * slot. */

#include "core/state/quotas.h"
#include "core/base/answer.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"
#include "core/state/rows.h"

/* ---- access ---------------------------------------------------------------------------- */

static bool uids_limited(const struct pg_header *h)
{
    return (h->quota_timers | h->quota_bytes | h->quota_ops) != 0;
}

static bool namespace_limited(const struct pg_namespace *n)
{
    return (n->quota_timers | n->quota_bytes | n->quota_ops) != 0;
}

void restrictions_note(struct pg_arena *a)
{
    a->state.restricted = uids_limited(a->header);
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        a->state.restricted |= namespace_at(a, i)->name_len != 0 &&
                         (namespace_at(a, i)->owner_uid != PG_NIL ||
                          namespace_limited(namespace_at(a, i)));
}

unsigned access_of(const struct pg_arena *a, uint32_t row, uint32_t uid)
{
    unsigned access = uids_limited(a->header) ? ACCESS_QUOTA : 0;
    if (!a->state.restricted || row == PG_NIL)
        return access;
    const struct pg_namespace *n = namespace_at(a, row);
    if (n->owner_uid != PG_NIL && n->owner_uid != uid)
        return ACCESS_DENIED;
    return namespace_limited(n) ? ACCESS_QUOTA : access;
}

void pg_set_quotas(struct pg_arena *a, uint64_t timers, uint64_t bytes, uint64_t ops)
{
    a->header->quota_timers = timers;
    a->header->quota_bytes = bytes;
    a->header->quota_ops = ops;
    restrictions_note(a);
}

void pg_set_uid_share(struct pg_arena *a, uint32_t percent, uint32_t own_uid)
{
    a->header->uid_share = percent;
    a->header->own_uid = own_uid;
    a->state.topics_refused_at = UINT64_MAX;
}

/* ---- accounts --------------------------------------------------------------------------- */

uint32_t sessions_of(const struct pg_arena *a, uint32_t uid)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->state.session_rows; i++)
        count += session_at(a, i)->id != 0 && session_at(a, i)->uid == uid;
    return count;
}

static uint32_t operations_of(const struct pg_arena *a, uint32_t uid)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->state.session_rows; i++)
        if (session_at(a, i)->id != 0 && session_at(a, i)->uid == uid)
            count += session_at(a, i)->owned;
    return count;
}

static bool is_idle(const struct pg_account *c)
{
    return c->live == 0 && c->sessions == 0 && c->watch_keys == 0;
}

/* Return a row that was never used. If there is none, return the idle row whose last use is longest
 * ago; PG_NIL = no row is idle. */
static uint32_t row_for_new(const struct pg_arena *a, uint32_t home)
{
    uint32_t oldest = PG_NIL;
    for (uint32_t i = 0; i < a->account_rows; i++) {
        const uint32_t row = (home + i) % a->account_rows;
        const struct pg_account *c = account_at(a, row);
        if (c->in_use == 0)
            return row;
        if (is_idle(c) &&
            (oldest == PG_NIL || c->used_boot_ns < account_at(a, oldest)->used_boot_ns))
            oldest = row;
    }
    return oldest;
}

static uint32_t account_born(struct pg_arena *a, uint32_t uid, uint32_t home)
{
    const uint32_t row = row_for_new(a, home);
    if (row == PG_NIL)
        return PG_NIL;
    struct pg_account *c = account_at(a, row);
    memset(c, 0, sizeof *c);
    c->uid = uid;
    c->sessions = sessions_of(a, uid);
    c->operations = operations_of(a, uid);
    STORE_RELEASE(&c->in_use, 1u);
    return row;
}

static uint32_t account_home(const struct pg_arena *a, uint32_t uid)
{
    return (uint32_t)(id_mix(uid) % a->account_rows);
}

/* Return a uid's row; PG_NIL = the uid has no row. A new uid gets the first free row at or after
 * its home row, so the search is short. */
static uint32_t account_find(const struct pg_arena *a, uint32_t uid)
{
    uint32_t left = a->account_rows;
    for (uint32_t row = left == 0 ? 0 : account_home(a, uid); left != 0; left--) {
        if (account_at(a, row)->in_use != 0 && account_at(a, row)->uid == uid)
            return row;
        row = row + 1 == a->account_rows ? 0 : row + 1;
    }
    return PG_NIL;
}

uint16_t account_of(struct pg_arena *a, uint32_t uid)
{
    uint32_t row = account_find(a, uid);
    if (row == PG_NIL && a->account_rows != 0)
        row = account_born(a, uid, account_home(a, uid));
    if (row == PG_NIL)
        return 0;
    account_at(a, row)->used_boot_ns = a->call.real_boot_ns;
    return (uint16_t)(row + 1);
}

bool account_carry(struct pg_arena *to, const struct pg_arena *from, uint16_t *account)
{
    if (*account == 0)
        return true;
    const struct pg_account *c = account_at(from, *account - 1);
    *account = account_of(to, c->uid);
    if (*account != 0)
        account_at(to, *account - 1)->used_boot_ns = c->used_boot_ns;
    return *account != 0;
}

void account_session_opened(struct pg_arena *a, uint32_t uid)
{
    const uint32_t row = account_find(a, uid);
    if (row != PG_NIL)
        account_at(a, row)->sessions++;
    account_of(a, uid);           /* a new account counts the uid's open sessions */
}

void account_session_ended(struct pg_arena *a, const struct pg_session *s)
{
    const uint32_t row = account_find(a, s->uid);
    if (row == PG_NIL)
        return;
    PG_ASSERT(account_at(a, row)->sessions != 0, "quotas", "a session that ends was counted");
    account_at(a, row)->sessions--;
    account_at(a, row)->operations -= s->owned;
}

void account_operation_counted(struct pg_arena *a, struct pg_session *s, int32_t sign)
{
    const uint32_t row = account_find(a, s->uid);
    s->owned += (uint32_t)sign;
    if (row != PG_NIL)
        account_at(a, row)->operations += (uint32_t)sign;
}

/* ---- quotas ------------------------------------------------------------------------------ */

#define OPERATION 1000000000u     /* one operation in struct pg_tokens; each nanosecond adds `ops`
                                     tokens */
#define SECOND_NS 1000000000

/* A namespace or a uid, with its quotas and how much of them is used. */
struct payer {
    uint64_t timers, bytes, ops;  /* quotas; 0 = none */
    uint64_t live, used_bytes;
    struct pg_tokens *tokens;
    unsigned first;               /* enum pg_quota of the quota `timers`; bytes and ops follow */
};

static struct payer payer_namespace(const struct pg_arena *a, uint32_t row)
{
    struct pg_namespace *n = namespace_at(a, row);
    return (struct payer){n->quota_timers, n->quota_bytes, n->quota_ops, n->live, n->bytes,
                          &n->tokens, PG_Q_NAMESPACE_TIMERS};
}

static struct payer payer_uid(const struct pg_arena *a, uint16_t account)
{
    struct pg_account *c = account_at(a, account - 1);
    const struct pg_header *h = a->header;
    return (struct payer){h->quota_timers, h->quota_bytes, h->quota_ops, c->live, c->bytes,
                          &c->tokens, PG_Q_UID_TIMERS};
}

/* Set payers[0] to the namespace and, if the uid has an account, payers[1] to the uid. Return the
 * number of payers. */
static uint32_t payers_of(const struct pg_arena *a, uint32_t namespace_row, uint16_t account,
                          struct payer payers[2])
{
    payers[0] = payer_namespace(a, namespace_row);
    if (account == 0)
        return 1;
    payers[1] = payer_uid(a, account);
    return 2;
}

static bool over(struct pg_result *r, unsigned quota, uint64_t limit, int64_t used)
{
    answer(r, limit << 8 | quota, PG_ST_QUOTA, used);
    return false;
}

static uint64_t tokens_now(const struct pg_tokens *t, uint64_t ops, int64_t now_boot_ns)
{
    const int64_t elapsed_ns = now_boot_ns - t->refilled_boot_ns;
    if (t->refilled_boot_ns == 0 || elapsed_ns >= SECOND_NS)
        return ops * OPERATION;
    const uint64_t left = t->left + (elapsed_ns > 0 ? (uint64_t)elapsed_ns * ops : 0);
    return left < ops * OPERATION ? left : ops * OPERATION;
}

bool tokens_take(struct pg_tokens *t, uint64_t ops, int64_t now_ns, int64_t *again_ns)
{
    const uint64_t now = tokens_now(t, ops, now_ns);
    if (now < OPERATION) {
        *again_ns = now_ns + (int64_t)((OPERATION - now + ops - 1) / ops);
        return false;
    }
    /* 0 stands for a full bucket, and a virtual clock begins at 0 */
    *t = (struct pg_tokens){now - OPERATION, now_ns != 0 ? now_ns : 1};
    return true;
}

static bool token_there(struct pg_arena *a, const struct payer *p, struct pg_result *r)
{
    if (p->ops == 0)
        return true;
    const uint64_t now = tokens_now(p->tokens, p->ops, a->call.real_boot_ns);
    if (now >= OPERATION)
        return true;
    const uint64_t wait_ns = (OPERATION - now + p->ops - 1) / p->ops;
    return over(r, p->first + 2, p->ops, a->call.real_boot_ns + (int64_t)wait_ns);
}

static void token_take(const struct pg_arena *a, const struct payer *p)
{
    if (p->ops == 0)
        return;
    p->tokens->left = tokens_now(p->tokens, p->ops, a->call.real_boot_ns) - OPERATION;
    p->tokens->refilled_boot_ns = a->call.real_boot_ns;
}

bool quota_charge(struct pg_arena *a, uint32_t namespace_row, uint16_t account,
                  struct pg_result *r)
{
    struct payer payers[2];
    if (account == 0 && uids_limited(a->header)) {
        answer(r, 0, PG_ST_FULL_ACCOUNTS, a->account_rows);
        return false;
    }
    const uint32_t count = payers_of(a, namespace_row, account, payers);
    for (uint32_t i = 0; i < count; i++)
        if (!token_there(a, &payers[i], r))
            return false;
    for (uint32_t i = 0; i < count; i++)
        token_take(a, &payers[i]);
    return true;
}

/* Return whether a change exceeds a quota. A change that does not increase the use is always
 * allowed, even if the quota was lowered below the current use. */
static bool grows_over(uint64_t used, uint64_t less, uint64_t more, uint64_t quota)
{
    return quota != 0 && more > less && used - less + more > quota;
}

bool quota_admits(struct pg_arena *a, const struct put *p, uint64_t granules, uint32_t old,
                  struct pg_result *r)
{
    const uint64_t bytes = granules * PG_GRANULE;
    struct payer payers[2];
    const uint32_t count = payers_of(a, p->key.namespace_row, p->account, payers);
    for (uint32_t i = 0; i < count; i++) {
        const struct payer *y = &payers[i];
        const bool same = old != PG_NIL && (i == 0 || slot_cold(a, old)->account == p->account);
        if (grows_over(y->live, same, 1, y->timers))
            return over(r, y->first, y->timers, (int64_t)y->live);
        if (grows_over(y->used_bytes, same ? slot_bytes(a, old) : 0, bytes, y->bytes))
            return over(r, y->first + 1, y->bytes, (int64_t)y->used_bytes);
    }
    return true;
}

/* ---- shares of the tables ------------------------------------------------------------------ */

static bool has_limit(const struct pg_arena *a)
{
    const struct pg_header *h = a->header;
    return h->uid_share != 0 && h->uid_share < 100 && a->call.uid != 0 &&
           a->call.uid != h->own_uid && a->call.uid != PG_NIL;
}

uint32_t share_of(const struct pg_arena *a, uint32_t rows)
{
    if (!has_limit(a))
        return UINT32_MAX;
    const uint32_t share = (uint32_t)((uint64_t)rows * a->header->uid_share / 100);
    return share != 0 ? share : 1;
}

void share_refuse(const struct pg_arena *a, enum pg_quota quota, uint32_t rows, uint32_t held,
                  struct pg_result *r)
{
    over(r, quota, share_of(a, rows), (int64_t)((uint64_t)a->call.uid << 32 | held));
}

bool share_admits(const struct pg_arena *a, enum pg_quota quota, uint32_t rows, uint32_t held,
                  struct pg_result *r)
{
    if (held < share_of(a, rows))
        return true;
    share_refuse(a, quota, rows, held, r);
    return false;
}

void account_begin(struct pg_arena *a)
{
    a->call.account = account_of(a, a->call.uid);
    a->call.watch_key_share = share_of(a, a->watermark_rows);
    a->call.watch_share = share_of(a, a->watch_rows);
    a->call.operation_share = share_of(a, a->slots.capacity);
    a->call.block_share = share_of(a, a->bulk_load_block_rows);
}

RARE bool share_refuse_watch_key(const struct pg_arena *a, struct pg_result *r)
{
    if (a->call.account == 0)
        answer(r, 0, PG_ST_FULL_ACCOUNTS, a->account_rows);
    else
        share_refuse(a, PG_Q_UID_WATCH_KEYS, a->watermark_rows,
                     account_at(a, a->call.account - 1)->watch_keys, r);
    return false;
}

RARE bool share_refuse_watches(const struct pg_arena *a, struct pg_result *r)
{
    if (a->call.account == 0)
        answer(r, 0, PG_ST_FULL_ACCOUNTS, a->account_rows);
    else
        share_refuse(a, PG_Q_UID_WATCHES, a->watch_rows,
                     account_at(a, a->call.account - 1)->watches, r);
    return false;
}

RARE bool share_refuse_operation(const struct pg_arena *a, struct pg_result *r)
{
    if (a->call.account == 0)
        answer(r, 0, PG_ST_FULL_ACCOUNTS, a->account_rows);
    else
        share_refuse(a, PG_Q_UID_OPERATIONS, a->slots.capacity,
                     account_at(a, a->call.account - 1)->operations, r);
    return false;
}

/* ---- rebuild and check --------------------------------------------------------------------- */

void quotas_rebuild(struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->account_rows; i++) {
        struct pg_account *c = account_at(a, i);
        c->live = c->bytes = 0;
        c->watch_keys = c->watches = 0;
        c->tokens = (struct pg_tokens){0, 0};
    }
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        namespace_at(a, i)->tokens = (struct pg_tokens){0, 0};
    restrictions_note(a);
}

void quotas_rebuild_sessions(struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->account_rows; i++) {
        struct pg_account *c = account_at(a, i);
        c->sessions = c->in_use != 0 ? sessions_of(a, c->uid) : 0;
    }
}

void quotas_rebuild_operations(struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->account_rows; i++)
        account_at(a, i)->operations = 0;
    for (uint32_t i = 0; i < a->state.session_rows; i++) {
        const struct pg_session *s = session_at(a, i);
        const uint32_t row = s->id != 0 && s->owned != 0 ? account_find(a, s->uid) : PG_NIL;
        if (row != PG_NIL)
            account_at(a, row)->operations += s->owned;
    }
}

/* Sums of two counts, `first` and `second`, over all rows of a table. Each count is multiplied with
 * a hash of its row before it is added. If two tallies are equal, each row has the same counts in
 * both. The order of the rows has no effect. */
struct tally {
    uint64_t first, second;
};

static void tally_add(struct tally *t, uint32_t row, uint64_t first, uint64_t second)
{
    t->first += id_mix(row) * first;
    t->second += id_mix(row) * second;
}

static bool tally_same(const struct tally *found, const struct tally *rows, const char *first,
                       const char *second, struct pg_fault *fault)
{
    return (found->first == rows->first ||
            fault_set(fault, "quotas", first, 0, found->first, rows->first)) &&
           (found->second == rows->second ||
            fault_set(fault, "quotas", second, 0, found->second, rows->second));
}

/* Sums over the counts of rows. names: timers and bytes per namespace; accounts: timers and bytes
 * per account; tables: watch keys and watch records per account. */
struct tallies {
    struct tally names, accounts, tables;
};

static bool account_sound(const struct pg_arena *a, uint16_t account, uint32_t row,
                          struct pg_fault *fault)
{
    return account == 0 ||
           (account <= a->account_rows && account_at(a, account - 1)->in_use != 0) ||
           fault_set(fault, "quotas", "an account that does not exist", row, a->account_rows,
                     account);
}

static bool slots_tally(const struct pg_arena *a, struct tallies *t, struct pg_fault *fault)
{
    for (uint32_t i = 0; i < a->slots.capacity; i++) {
        const uint16_t account = slot_cold(a, i)->account;
        if (!ctl_counted(slot_hot(a, i)->ctl))
            continue;
        tally_add(&t->names, slot_namespace(a, i), 1, slot_bytes(a, i));
        if (!account_sound(a, account, i, fault))
            return false;
        if (account == 0)
            continue;
        tally_add(&t->accounts, account, 1, slot_bytes(a, i));
        tally_add(&t->tables, account, 0, is_operation(a, i) ? operation_at(a, i)->keys : 0);
    }
    return true;
}

static bool watch_keys_tally(const struct pg_arena *a, struct tallies *t, struct pg_fault *fault)
{
    for (uint32_t i = 0; i < a->watermark_rows; i++) {
        const struct pg_watermark *l = watermark_at(a, i);
        if (l->key_len == 0 || l->account == 0)
            continue;
        if (!account_sound(a, l->account, i, fault))
            return false;
        tally_add(&t->tables, l->account, 1, 0);
    }
    return true;
}

static struct tallies rows_tally(const struct pg_arena *a)
{
    struct tallies t = {0};
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        tally_add(&t.names, i, namespace_at(a, i)->live, namespace_at(a, i)->bytes);
    for (uint32_t i = 0; i < a->account_rows; i++) {
        const struct pg_account *c = account_at(a, i);
        tally_add(&t.accounts, i + 1, c->live, c->bytes);
        tally_add(&t.tables, i + 1, c->watch_keys, c->watches);
    }
    return t;
}

static bool sessions_counted(const struct pg_arena *a, struct pg_fault *fault)
{
    for (uint32_t i = 0; a->secret != NULL && i < a->account_rows; i++) {
        const struct pg_account *c = account_at(a, i);
        if (c->in_use != 0 && c->sessions != sessions_of(a, c->uid))
            return fault_set(fault, "quotas", "sessions counted for an account", i,
                             sessions_of(a, c->uid), c->sessions);
        if (c->in_use != 0 && c->operations != operations_of(a, c->uid))
            return fault_set(fault, "quotas", "operations counted for an account", i,
                             operations_of(a, c->uid), c->operations);
    }
    return true;
}

bool quotas_check(const struct pg_arena *a, struct pg_fault *fault)
{
    struct tallies found = {0};
    if (!slots_tally(a, &found, fault) || !watch_keys_tally(a, &found, fault))
        return false;
    const struct tallies rows = rows_tally(a);
    return tally_same(&found.names, &rows.names, "timers counted for namespaces",
                      "bytes counted for namespaces", fault) &&
           tally_same(&found.accounts, &rows.accounts, "timers counted for accounts",
                      "bytes counted for accounts", fault) &&
           tally_same(&found.tables, &rows.tables, "watch keys counted for accounts",
                      "watch records counted for accounts", fault) &&
           sessions_counted(a, fault);
}

/* quotas.c - who may do what in a namespace, and how much: owners, quotas, accounts.
 *
 * A namespace keeps its own counts; an account keeps those of a uid, over all namespaces.
 * A slot names its account, so both are recounted from the slots. What gives something back
 * (cancels, ends, acknowledgements) asks no quota. */

#include "core.h"

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
    a->restricted = uids_limited(a->header);
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        a->restricted |= a->namespaces[i].name_len != 0 &&
                         (a->namespaces[i].owner_uid != PG_NIL ||
                          namespace_limited(&a->namespaces[i]));
}

unsigned access_of(const struct pg_arena *a, uint32_t row, uint32_t uid)
{
    unsigned access = uids_limited(a->header) ? ACCESS_QUOTA : 0;
    if (!a->restricted || row == PG_NIL)
        return access;
    const struct pg_namespace *n = &a->namespaces[row];
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

/* ---- accounts --------------------------------------------------------------------------- */

static bool has_session(const struct pg_arena *a, uint32_t uid)
{
    for (uint32_t i = 0; i < a->session_rows; i++)
        if (a->sessions[i].id != 0 && a->sessions[i].uid == uid)
            return true;
    return false;
}

/* A row that was never used, else the idle one that was used longest ago; PG_NIL: none. */
static uint32_t row_for_new(const struct pg_arena *a, uint32_t home)
{
    uint32_t oldest = PG_NIL;
    for (uint32_t i = 0; i < a->account_rows; i++) {
        const uint32_t row = (home + i) % a->account_rows;
        const struct pg_account *c = &a->accounts[row];
        if (c->in_use == 0)
            return row;
        if (c->live == 0 && !has_session(a, c->uid) &&
            (oldest == PG_NIL || c->used_boot_ns < a->accounts[oldest].used_boot_ns))
            oldest = row;
    }
    return oldest;
}

static uint32_t account_born(struct pg_arena *a, uint32_t uid, uint32_t home)
{
    const uint32_t row = row_for_new(a, home);
    if (row == PG_NIL)
        return PG_NIL;
    struct pg_account *c = &a->accounts[row];
    memset(c, 0, sizeof *c);
    c->uid = uid;
    STORE_RELEASE(&c->in_use, 1u);
    return row;
}

/* A uid's row is the first from its home on that was free when it came, so it is near. */
uint16_t account_of(struct pg_arena *a, uint32_t uid)
{
    if (a->account_rows == 0)
        return 0;
    const uint32_t home = (uint32_t)(id_mix(uid) % a->account_rows);
    uint32_t row = home, left = a->account_rows;
    while (left != 0 && (a->accounts[row].in_use == 0 || a->accounts[row].uid != uid)) {
        row = (row + 1) % a->account_rows;
        left--;
    }
    if (left == 0)
        row = account_born(a, uid, home);
    if (row == PG_NIL)
        return 0;
    a->accounts[row].used_boot_ns = a->real_boot_ns;
    return (uint16_t)(row + 1);
}

uint16_t account_for(struct pg_arena *a, uint32_t uid)
{
    return uids_limited(a->header) ? account_of(a, uid) : 0;
}

void account_counted(struct pg_arena *a, uint16_t account, int64_t sign, uint64_t bytes)
{
    struct pg_account *c = &a->accounts[account - 1];
    c->live += (uint64_t)sign;
    c->bytes += (uint64_t)sign * bytes;
}

/* ---- quotas ------------------------------------------------------------------------------ */

#define OPERATION 1000000000u     /* in struct pg_tokens: what a nanosecond adds is the quota */
#define SECOND_NS 1000000000

/* A namespace or a uid: what it may have, what it has. */
struct payer {
    uint64_t timers, bytes, ops;  /* quotas; 0 = none */
    uint64_t live, used_bytes;
    struct pg_tokens *tokens;
    unsigned first;               /* number of its quota of timers in enum pg_quota */
};

static struct payer payer_namespace(const struct pg_arena *a, uint32_t row)
{
    struct pg_namespace *n = &a->namespaces[row];
    return (struct payer){n->quota_timers, n->quota_bytes, n->quota_ops, n->live, n->bytes,
                          &n->tokens, PG_Q_NAMESPACE_TIMERS};
}

static struct payer payer_uid(const struct pg_arena *a, uint16_t account)
{
    struct pg_account *c = &a->accounts[account - 1];
    const struct pg_header *h = a->header;
    return (struct payer){h->quota_timers, h->quota_bytes, h->quota_ops, c->live, c->bytes,
                          &c->tokens, PG_Q_UID_TIMERS};
}

/* The namespace, then the uid if it has an account. Returns how many. */
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

static bool token_there(struct pg_arena *a, const struct payer *p, struct pg_result *r)
{
    if (p->ops == 0)
        return true;
    const uint64_t now = tokens_now(p->tokens, p->ops, a->real_boot_ns);
    if (now >= OPERATION)
        return true;
    const uint64_t wait_ns = (OPERATION - now + p->ops - 1) / p->ops;
    return over(r, p->first + 2, p->ops, a->real_boot_ns + (int64_t)wait_ns);
}

static void token_take(const struct pg_arena *a, const struct payer *p)
{
    if (p->ops == 0)
        return;
    p->tokens->left = tokens_now(p->tokens, p->ops, a->real_boot_ns) - OPERATION;
    p->tokens->refilled_boot_ns = a->real_boot_ns;
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

/* What does not grow is not refused, even where a quota was lowered below what is used. */
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
        const bool same = old != PG_NIL && (i == 0 || a->slots.cold[old].account == p->account);
        if (grows_over(y->live, same, 1, y->timers))
            return over(r, y->first, y->timers, (int64_t)y->live);
        if (grows_over(y->used_bytes, same ? slot_bytes(a, old) : 0, bytes, y->bytes))
            return over(r, y->first + 1, y->bytes, (int64_t)y->used_bytes);
    }
    return true;
}

/* ---- rebuild and check --------------------------------------------------------------------- */

void quotas_rebuild(struct pg_arena *a)
{
    for (uint32_t i = 0; i < a->account_rows; i++) {
        a->accounts[i].live = a->accounts[i].bytes = 0;
        a->accounts[i].tokens = (struct pg_tokens){0, 0};
    }
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        a->namespaces[i].tokens = (struct pg_tokens){0, 0};
    restrictions_note(a);
}

/* Rows and what they count, mixed: equal sums mean equal rows, whatever their order. */
struct tally {
    uint64_t live, bytes;
};

static void tally_add(struct tally *t, uint32_t row, uint64_t live, uint64_t bytes)
{
    t->live += id_mix(row) * live;
    t->bytes += id_mix(row) * bytes;
}

static bool tally_same(const struct tally *slots, const struct tally *rows, const char *live,
                       const char *bytes, struct pg_fault *fault)
{
    return (slots->live == rows->live ||
            fault_set(fault, "quotas", live, 0, slots->live, rows->live)) &&
           (slots->bytes == rows->bytes ||
            fault_set(fault, "quotas", bytes, 0, slots->bytes, rows->bytes));
}

static bool slots_tally(const struct pg_arena *a, struct tally *names, struct tally *accounts,
                        struct pg_fault *fault)
{
    for (uint32_t i = 0; i < a->slots.capacity; i++) {
        const uint16_t account = a->slots.cold[i].account;
        if (!ctl_live(a->slots.hot[i].ctl))
            continue;
        tally_add(names, slot_namespace(a, i), 1, slot_bytes(a, i));
        if (account == 0)
            continue;
        if (account > a->account_rows || a->accounts[account - 1].in_use == 0)
            return fault_set(fault, "quotas", "an account that is not there", i, a->account_rows,
                             account);
        tally_add(accounts, account, 1, slot_bytes(a, i));
    }
    return true;
}

bool quotas_check(const struct pg_arena *a, struct pg_fault *fault)
{
    struct tally slots_names = {0, 0}, slots_accounts = {0, 0}, names = {0, 0}, accounts = {0, 0};
    if (!slots_tally(a, &slots_names, &slots_accounts, fault))
        return false;
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        tally_add(&names, i, a->namespaces[i].live, a->namespaces[i].bytes);
    for (uint32_t i = 0; i < a->account_rows; i++)
        tally_add(&accounts, i + 1, a->accounts[i].live, a->accounts[i].bytes);
    return tally_same(&slots_names, &names, "timers counted for namespaces",
                      "bytes counted for namespaces", fault) &&
           tally_same(&slots_accounts, &accounts, "timers counted for accounts",
                      "bytes counted for accounts", fault);
}

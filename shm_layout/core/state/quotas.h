/* quotas.h - access to namespaces: owners, quotas, accounts and shares. */
#ifndef PURGATORYD_STATE_QUOTAS_H
#define PURGATORYD_STATE_QUOTAS_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"

enum { ACCESS_DENIED = 1, ACCESS_QUOTA = 2, ACCESS_RESERVED = 3 };
/* Return the restrictions for a uid in a namespace; 0 = none. namespace_row PG_NIL = the namespace
 * does not exist. */
unsigned access_of(const struct pg_arena *a, uint32_t namespace_row, uint32_t uid);
/* Call this when an owner or a quota has changed. */
void restrictions_note(struct pg_arena *a);
/* Return the number of a uid's account, which is created if needed; 0 = all rows are in use. */
uint16_t account_of(struct pg_arena *a, uint32_t uid);
/* Replace *account, an account number of `from`, by the account number of the same uid in `to`.
 * Return false if all rows of `to` are in use. */
bool account_carry(struct pg_arena *to, const struct pg_arena *from, uint16_t *account);
static inline uint32_t account_uid(const struct pg_arena *a, uint16_t account)
{
    return account == 0 || account > a->account_rows ? PG_NIL : account_at(a, account - 1)->uid;
}
static inline void account_counted(struct pg_arena *a, uint16_t account, int64_t sign,
                                   uint64_t bytes)
{
    struct pg_account *c = account_at(a, account - 1);
    c->live += (uint64_t)sign;
    c->bytes += (uint64_t)sign * bytes;
}
static inline void account_watch_key_counted(struct pg_arena *a, uint16_t account, int32_t sign)
{
    if (LIKELY(account != 0))
        account_at(a, account - 1)->watch_keys += (uint32_t)sign;
}
uint32_t sessions_of(const struct pg_arena *a, uint32_t uid);          /* number of open sessions */
/* Call these after a session of a uid has been opened, and after a session has ended. */
void account_session_opened(struct pg_arena *a, uint32_t uid);
void account_session_ended(struct pg_arena *a, const struct pg_session *s);
/* Count an operation: a session begins to own it (+1) or no longer owns it (-1). */
void account_operation_counted(struct pg_arena *a, struct pg_session *s, int32_t sign);
/* Return how many rows of a table with `rows` rows the uid of the running call may hold; UINT32_MAX
 * = no limit. */
uint32_t share_of(const struct pg_arena *a, uint32_t rows);
/* Write a refusal to *r, because the uid of the running call already holds its share of a table.
 * The table has `rows` rows, and the uid holds `held` of them. */
void share_refuse(const struct pg_arena *a, enum pg_quota quota, uint32_t rows, uint32_t held,
                  struct pg_result *r);
/* Return whether the uid of the running call, which holds `held` rows of a table with `rows` rows,
 * may have another row of this table. False: *r contains the answer. */
bool share_admits(const struct pg_arena *a, enum pg_quota quota, uint32_t rows, uint32_t held,
                  struct pg_result *r);
/* Store the account and the shares of the batch's uid in a->call. Call this before the first record
 * is applied. */
void account_begin(struct pg_arena *a);
bool share_refuse_watch_key(const struct pg_arena *a, struct pg_result *r);          /* returns
                                                                                        false */
bool share_refuse_watches(const struct pg_arena *a, struct pg_result *r);            /* returns
                                                                                        false */
bool share_refuse_operation(const struct pg_arena *a, struct pg_result *r);          /* returns
                                                                                        false */
/* Return whether the uid of the running batch may have another watch key, another operation, or
 * `count` more watch records. A uid to which a limit applies needs an account. */
static inline bool share_admits_watch_key(const struct pg_arena *a, struct pg_result *r)
{
    if (a->call.watch_key_share == UINT32_MAX ||
        (LIKELY(a->call.account != 0) &&
         LIKELY(account_at(a, a->call.account - 1)->watch_keys < a->call.watch_key_share)))
        return true;
    return share_refuse_watch_key(a, r);
}
static inline bool share_admits_watches(const struct pg_arena *a, uint32_t count,
                                        struct pg_result *r)
{
    if (a->call.watch_share == UINT32_MAX ||
        (LIKELY(a->call.account != 0) &&
         LIKELY((uint64_t)account_at(a, a->call.account - 1)->watches + count <=
                a->call.watch_share)))
        return true;
    return share_refuse_watches(a, r);
}
static inline bool share_admits_operation(const struct pg_arena *a, struct pg_result *r)
{
    if (a->call.operation_share == UINT32_MAX ||
        (LIKELY(a->call.account != 0) &&
         LIKELY(account_at(a, a->call.account - 1)->operations < a->call.operation_share)))
        return true;
    return share_refuse_operation(a, r);
}
/* Charge one record to the quotas of operations per second. If one of these quotas is used up, or
 * if the quotas of uids need an account and there is none, store the answer in *r and return
 * false. */
bool quota_charge(struct pg_arena *a, uint32_t namespace_row, uint16_t account,
                  struct pg_result *r);
/* Return whether a timer with that many granules may be armed in place of slot `old` (PG_NIL =
 * none). False: a quota is used up, and *r contains the answer. */
bool quota_admits(struct pg_arena *a, const struct put *put, uint64_t granules, uint32_t old,
                  struct pg_result *r);
/* Set all counts to 0. They are counted again when slots and watch keys are linked. */
void quotas_rebuild(struct pg_arena *a);
/* Count the sessions of each account. Call this after all session rows have been checked. */
void quotas_rebuild_sessions(struct pg_arena *a);
/* Set the number of operations of each account to the sum over its uid's sessions. Call this after
 * the operations of all sessions have been counted. */
void quotas_rebuild_operations(struct pg_arena *a);
bool quotas_check(const struct pg_arena *a, struct pg_fault *fault);

/* Take a token from a bucket that `ops` tokens a second fill. False: there is none before
 * *again_ns. */
bool tokens_take(struct pg_tokens *t, uint64_t ops, int64_t now_ns, int64_t *again_ns);

#endif

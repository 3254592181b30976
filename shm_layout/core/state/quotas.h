/* quotas.h - who may do what in a namespace, and how much: owners, quotas, accounts. */
#ifndef PURGATORYD_STATE_QUOTAS_H
#define PURGATORYD_STATE_QUOTAS_H

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/keys.h"

enum { ACCESS_DENIED = 1, ACCESS_QUOTA = 2, ACCESS_RESERVED = 3 };
/* What stands between a uid and a namespace (PG_NIL: one that is not there yet); 0 = nothing. */
unsigned access_of(const struct pg_arena *a, uint32_t namespace_row, uint32_t uid);
/* To be called when an owner or a quota has changed. */
void restrictions_note(struct pg_arena *a);
/* Number of a uid's account, opened if need be; 0: all rows are in use. */
uint16_t account_of(struct pg_arena *a, uint32_t uid);
/* Makes *account, one of `from`, the account that its uid has in `to`. False: all rows of `to` are
 * in use. */
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
uint32_t sessions_of(const struct pg_arena *a, uint32_t uid);           /* that are open */
/* To be called when a session of a uid is open, and when it has ended. */
void account_session_opened(struct pg_arena *a, uint32_t uid);
void account_session_ended(struct pg_arena *a, const struct pg_session *s);
/* Counts an operation that a session begins or ceases to own. */
void account_operation_counted(struct pg_arena *a, struct pg_session *s, int32_t sign);
/* Rows of a table with so many that the running call's uid may hold; UINT32_MAX = no limit. */
uint32_t share_of(const struct pg_arena *a, uint32_t rows);
/* The answer to a uid that holds its share of a table. */
void share_refuse(const struct pg_arena *a, enum pg_quota quota, uint32_t rows, uint32_t held,
                  struct pg_result *r);
/* Whether the running call's uid, which holds so many rows, may have one more. False: *r says
 * what it holds. */
bool share_admits(const struct pg_arena *a, enum pg_quota quota, uint32_t rows, uint32_t held,
                  struct pg_result *r);
/* Before the records of a batch: the account of its uid, and that one's shares. */
void account_begin(struct pg_arena *a);
bool share_refuse_watch_key(const struct pg_arena *a, struct pg_result *r);          /* false */
bool share_refuse_watches(const struct pg_arena *a, struct pg_result *r);            /* false */
bool share_refuse_operation(const struct pg_arena *a, struct pg_result *r);          /* false */
/* Whether the running batch's uid may have one more watch key or operation, or so many more watch
 * records. A uid with a limit needs an account. */
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
/* Counts one operation. False: no account, or a quota of operations is used up: *r says which. */
bool quota_charge(struct pg_arena *a, uint32_t namespace_row, uint16_t account,
                  struct pg_result *r);
/* Whether a timer with so many granules may be armed in place of `old` (PG_NIL: none). False:
 * *r says which quota is used up. */
bool quota_admits(struct pg_arena *a, const struct put *put, uint64_t granules, uint32_t old,
                  struct pg_result *r);
/* Counts at 0: linking slots and watch keys counts. */
void quotas_rebuild(struct pg_arena *a);
void quotas_rebuild_sessions(struct pg_arena *a);    /* once all rows of sessions are sound */
void quotas_rebuild_operations(struct pg_arena *a);  /* once sessions know what they own */
bool quotas_check(const struct pg_arena *a, struct pg_fault *fault);

#endif

/* metrics.c - durations that only the caller of the core knows, and counters of refusals.
 *
 * Where the core itself knows a duration, it calls measure(). */

#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/operations.h"

const struct pg_histogram *pg_histograms_of(const struct pg_arena *a) { return a->histograms; }

void pg_measure(struct pg_arena *a, uint32_t histogram, int64_t ns)
{
    measure(a, histogram, ns, 1);
}

/* Store the time at which the call that armed these slots returned. No WAL record is needed: after
 * a kill the stored time is either this time or 0, and both values are valid. */
static void armed_finish(struct pg_arena *a, int64_t ended_boot_ns)
{
    for (uint32_t i = 0; i < a->call.armed_count; i++)
        timestamps_at(a, a->call.armed[i])->done_boot_ns = ended_boot_ns;
    a->call.armed_count = 0;
}

void pg_served(struct pg_arena *a, int64_t ended_boot_ns)
{
    if (a->call.worked == NULL)
        return;
    armed_finish(a, ended_boot_ns);
    a->call.worked->worked_ns += ended_boot_ns - a->call.real_boot_ns;
    if (a->call.begun_boot_ns == 0)
        return;                   /* the batch will continue in another call */
    measure(a, PG_HG_LOCAL, a->call.worked->worked_ns, 1);
    measure(a, PG_HG_BATCH_SERVICE, ended_boot_ns - a->call.begun_boot_ns, 1);
}

/* Return the next outcome of the last OUTCOMES message; NULL = none. Outcomes that an earlier
 * message contained are left out, because they waited for their owner, not for the daemon. */
static struct pg_operation *notified_next(struct pg_arena *a)
{
    while (a->call.notified_count > 0) {
        struct pg_operation *op = operation_at(a, a->call.notified_first);
        a->call.notified_first = op->inbox_next;
        a->call.notified_count--;
        if (op->cause != 0 && !op->notified) {
            op->notified = 1;
            return op;
        }
    }
    return NULL;
}

/* Under a virtual clock the real time at which an operation ended is unknown, so the wait of its
 * outcome is not counted. */
void pg_notified(struct pg_arena *a, int64_t built_boot_ns, int64_t handed_boot_ns)
{
    const bool real = a->header->clock_kind == PG_CLOCK_BOOT;
    for (const struct pg_operation *op; (op = notified_next(a)) != NULL;) {
        measure(a, PG_HG_SEND, handed_boot_ns - built_boot_ns, 1);
        if (real)
            measure(a, PG_HG_RESPONSE_QUEUE, built_boot_ns - op->ended_ns, 1);
    }
}

void pg_untaken(struct pg_arena *a)
{
    while (notified_next(a) != NULL)
        continue;
}

/* ---- refusals -------------------------------------------------------------------------------- */

#define COUNTER(name) offsetof(struct pg_metrics, name)

/* Offset of the counter for each status; 0 = the status is not a refusal. */
static const uint16_t refusals[] = {
    [PG_ST_EXISTS] = COUNTER(refused_exists),
    [PG_ST_FULL] = COUNTER(refused_full),
    [PG_ST_FULL_PAYLOAD] = COUNTER(refused_payload),
    [PG_ST_FULL_NAMESPACES] = COUNTER(refused_names),
    [PG_ST_FULL_TOPICS] = COUNTER(refused_names),
    [PG_ST_FULL_TICKETS] = COUNTER(refused_other),
    [PG_ST_FULL_KEYS] = COUNTER(refused_keys),
    [PG_ST_FULL_WATCHES] = COUNTER(refused_keys),
    [PG_ST_FULL_ACCOUNTS] = COUNTER(refused_quota),
    [PG_ST_TOO_FAR] = COUNTER(refused_other),
    [PG_ST_DENIED] = COUNTER(refused_denied),
    [PG_ST_BUSY] = COUNTER(refused_busy),
    [PG_ST_QUOTA] = COUNTER(refused_quota),
    [PG_ST_WRONG_SHARD] = COUNTER(refused_other),
    [PG_ST_DUPLICATE] = COUNTER(refused_other),
    [PG_ST_OVERFLOW] = COUNTER(refused_other),
    [PG_ST_WAL] = COUNTER(refused_wal),
    [PG_ST_STOPPING] = COUNTER(refused_stopping),
    [PG_ST_FULL_BULK_LOADS] = COUNTER(refused_bulk_loads),
    [PG_ST_FENCED] = COUNTER(refused_fenced),
    [PG_ST_CLOSED] = COUNTER(refused_fenced),
    [PG_ST_ARENA] = COUNTER(refused_other),
    [PG_ST_FULL_GROUP] = COUNTER(refused_group),
    [PG_ST_LEASE_LOST] = COUNTER(refused_other),
    [PG_ST_NO_GROUP] = COUNTER(refused_other),
    [PG_ST_FULL_MEMBERS] = COUNTER(refused_other),
    [PG_ST_FULL_SCHEDULES] = COUNTER(refused_schedules),
    [PG_ST_BAD_SPEC] = COUNTER(refused_schedules),
    [PG_ST_NO_OCCURRENCE] = COUNTER(refused_schedules),
};

int pg_refused(struct pg_arena *a, uint32_t status)
{
    const bool refusal = status < sizeof refusals / sizeof *refusals && refusals[status] != 0;
    if (refusal)
        ++*(uint64_t *)((uint8_t *)a->metrics + refusals[status]);
    return refusal;
}

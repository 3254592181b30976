/* commit_requests.c - when the loop requests the next commit, so that callers share syncs. */

#include "core/base/common.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"

#define WAIT_NS_MAX 1000000       /* longest time that a commit waits for more callers */

void pg_commit_requests_init(struct pg_commit_requests *r, const struct pg_arena *a,
                             struct pg_group_commit *c)
{
    const struct pg_wal_buffer *s = a->wal_buffer;
    *r = (struct pg_commit_requests){.commit = c, .until_boot_ns = INT64_MAX, .syncs = s->syncs,
                                     .sync_ns = s->sync_ns};
}

uint64_t pg_confirmed_lsn(const struct pg_arena *a, const struct pg_commit_requests *r)
{
    return r->confirmed ? LOAD_ACQUIRE(&a->wal_buffer->committed_lsn) : 0;
}

int pg_commit_is_due(const struct pg_arena *a, struct pg_commit_requests *r, uint64_t callers,
                     int64_t now_boot_ns)
{
    if (a->wal_buffer->tail == r->requested)
        return false;
    if (callers == 0 || callers >= r->callers || wal_buffer_full(a) || wal_stopped(a))
        return true;
    if (LOAD_ACQUIRE(&a->wal_buffer->committed) < r->requested)
        return false;
    if (r->until_boot_ns == INT64_MAX)
        r->until_boot_ns = now_boot_ns + r->wait_ns;
    return now_boot_ns >= r->until_boot_ns;
}

void pg_commit_request(const struct pg_arena *a, struct pg_commit_requests *r)
{
    r->requested = a->wal_buffer->tail;
    r->until_boot_ns = INT64_MAX;
    pg_group_commit_kick(r->commit);
}

void pg_commit_allowed(const struct pg_arena *a, struct pg_commit_requests *r, uint64_t callers)
{
    const uint64_t syncs = a->wal_buffer->syncs, sync_ns = a->wal_buffer->sync_ns;
    r->callers = callers;
    if (syncs > r->syncs) {
        const uint64_t half_ns = (sync_ns - r->sync_ns) / (syncs - r->syncs) / 2;
        r->wait_ns = half_ns < WAIT_NS_MAX ? (int64_t)half_ns : WAIT_NS_MAX;
    }
    r->syncs = syncs;
    r->sync_ns = sync_ns;
}

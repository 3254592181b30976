/* request.c - what the handlers of several messages need. */

#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/state/delivery.h"
#include "core/state/session.h"
#include "core/front/request.h"

void reply_head(const struct request *q, struct sink *out, uint32_t count)
{
    struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                         .message = q->frame.message, .session = q->frame.session,
                         .sequence = q->frame.sequence, .count = count};
    sink_put(out, &f, sizeof f);
}

bool session_of(struct pg_arena *a, const struct request *q, struct pg_session **s,
                struct refusal *why)
{
    *s = session_find(a, q->frame.session);
    if (*s == NULL)
        return refused(why, PG_ERR_SESSION_EXPIRED, q->frame.session, 0);
    if ((*s)->uid != q->uid)
        return refused(why, PG_ERR_DENIED, q->uid, 0);
    (*s)->used_boot_ns = a->call.real_boot_ns;
    session_returns(a, *s);
    return true;
}

bool wrong_shard(const struct pg_arena *a, struct refusal *why)
{
    return refused(why, PG_ERR_WRONG_SHARD, a->header->shard, a->header->shards);
}

/* rows.c - the size of an operation's notice. */

#include "core/state/rows.h"
#include "core/base/common.h"
#include "core/arena.h"
#include "core/state/operation_bytes.h"

uint64_t notice_granules(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = slot_cold(a, slot);
    return granules_of_notice(c->key_len, operation_at(a, slot)->keys, c->payload_len);
}

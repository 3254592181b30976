/* cursor_requests.h - the CURSOR message: read it, apply it, and write the positions of its
 * reply. */
#ifndef PURGATORYD_FRONT_CURSOR_REQUESTS_H
#define PURGATORYD_FRONT_CURSOR_REQUESTS_H

#include "core/base/common.h"
#include "core/base/sink.h"
#include "core/arena.h"
#include "core/front/request.h"
#include "core/state/names.h"

struct cursor_request {
    struct pg_cursor_ask ask;
    struct name ns, name;
    const uint8_t *topics;        /* the parts of the message, one per topic */
    uint32_t count;               /* topics */
    uint32_t namespace_row;       /* PG_NIL = the namespace does not exist */
    uint32_t cursor;              /* row of the cursor; PG_NIL = it does not exist */
};

/* Read and check every byte of a CURSOR message. */
bool cursor_read(const struct request *q, struct cursor_request *c, struct refusal *why);
/* Apply the message for session `s`. False: *why contains the error, or *share the refusal because
 * the uid holds its share of the rows. */
bool cursor_apply(struct pg_arena *a, struct cursor_request *c, const struct pg_session *s,
                  struct pg_result *share, struct refusal *why);
/* Return the number of positions in the reply. */
uint32_t cursor_positions(const struct pg_arena *a, const struct cursor_request *c);
void cursor_positions_write(const struct pg_arena *a, const struct cursor_request *c,
                            struct sink *out);

#endif

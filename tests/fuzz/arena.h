/* arena.h - shared by the fuzz targets that call pg_handle: a small arena, and messages for it. */
#ifndef PURGATORYD_FUZZ_ARENA_H
#define PURGATORYD_FUZZ_ARENA_H

#include "fuzz.h"

enum { FUZZ_MESSAGE = 1 << 11, FUZZ_RECORD_KEY = 2 };

/* An arena and the memory for replies. All of it is allocated once and cleared for each input. */
struct fuzz_arena {
    struct pg_arena *a;
    void *arena, *secret;
    uint64_t arena_bytes, secret_bytes;
    uint8_t *reply;
};

static inline void fuzz_arena_open(struct fuzz_arena *f, const struct pg_config *config)
{
    if (f->a == NULL) {
        f->arena_bytes = pg_arena_bytes(config);
        f->secret_bytes = pg_private_bytes(config);
        f->arena = fuzz_memory(f->arena_bytes);
        f->secret = fuzz_memory(f->secret_bytes);
        f->a = fuzz_memory(pg_handle_bytes());
        f->reply = fuzz_memory(PG_MESSAGE_MAX);
    }
    memset(f->arena, 0, f->arena_bytes);
    memset(f->secret, 0, f->secret_bytes);
    if (!pg_create(f->a, f->arena, f->secret, config))
        abort();
}

/* Abort unless the arena is sound. */
static inline void fuzz_whole(const struct fuzz_arena *f)
{
    struct pg_fault fault;
    fuzz_expect(pg_check(f->a, &fault), &fault);
    fuzz_expect(pg_check_live(f->a, &fault), &fault);
}

/* Apply a message to its end. Returns the bytes of the reply; 0 = there is none. */
static inline uint64_t fuzz_handle(struct fuzz_arena *f, uint32_t uid, int64_t now_ns,
                                   const void *message, uint64_t bytes)
{
    uint64_t used = 0;
    int64_t wait_ns;
    int state = PG_H_AGAIN;
    while (state == PG_H_AGAIN)
        state = pg_handle(f->a, message, bytes, uid, 1, now_ns, now_ns, f->reply, &used, &wait_ns);
    return state == PG_H_REPLY ? used : 0;
}

/* Make a message of a session: a PUT, or a frame with random bytes after it. *sequence: that of the
 * session's last batch. Returns the number of bytes. */
static inline uint64_t fuzz_message(struct input *in, uint8_t kind, uint64_t session,
                                    uint64_t *sequence, uint8_t bytes[FUZZ_MESSAGE])
{
    const uint64_t length = take_short(in) % (FUZZ_MESSAGE - sizeof(struct pg_frame));
    struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                         .message = kind % (PG_M_ACK + 2), .session = session,
                         .sequence = *sequence + 1, .count = kind / 64};
    struct pg_record r = {.op = PG_OP_PUT, .key_len = FUZZ_RECORD_KEY,
                          .time_ns = (int64_t)kind << 20};
    static const uint8_t names[8] = {1, 1, 'n', 't'};
    uint64_t used = sizeof f;
    take(in, bytes + used, length);
    if (f.message == PG_M_BATCH && kind & 0x20) {
        f.count = f.names = 1;
        f.names_bytes = sizeof names;
        memcpy(bytes + used, names, sizeof names);
        memcpy(bytes + used + sizeof names, &r, sizeof r);
        used += sizeof names + sizeof r + FUZZ_RECORD_KEY;
        ++*sequence;
    } else {
        used += length;
    }
    memcpy(bytes, &f, sizeof f);
    return used;
}

#endif

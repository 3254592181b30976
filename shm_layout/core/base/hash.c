/* hash.c - the keyed hash of the key index and of the name index. */
#include "core/base/hash.h"
#include "core/base/common.h"

static inline uint64_t rotate(uint64_t x, unsigned bits) { return x << bits | x >> (64 - bits); }

static inline void sip_rounds(struct hash_scope *s, int rounds)
{
    while (rounds-- > 0) {
        s->v0 += s->v1;
        s->v2 += s->v3;
        s->v1 = rotate(s->v1, 13) ^ s->v0;
        s->v3 = rotate(s->v3, 16) ^ s->v2;
        s->v0 = rotate(s->v0, 32);
        s->v2 += s->v1;
        s->v0 += s->v3;
        s->v1 = rotate(s->v1, 17) ^ s->v2;
        s->v3 = rotate(s->v3, 21) ^ s->v0;
        s->v2 = rotate(s->v2, 32);
    }
}

static inline void sip_word(struct hash_scope *s, uint64_t word, int rounds)
{
    s->v3 ^= word;
    sip_rounds(s, rounds);
    s->v0 ^= word;
}

/* The last 1 to 7 bytes of the input, as a little-endian number. */
static inline uint64_t rest_of(const uint8_t *at, size_t len)
{
    uint64_t rest = 0;
    uint32_t four;
    uint16_t two;
    if (len & 1)
        rest = at[len & 6];
    if (len & 2) {
        memcpy(&two, at + (len & 4), sizeof two);
        rest = rest << 16 | two;
    }
    if (len & 4) {
        memcpy(&four, at, sizeof four);
        rest = rest << 32 | four;
    }
    return rest;
}

static inline struct hash_scope sip_begin(const uint64_t secret[2], uint64_t scope, int c)
{
    struct hash_scope s = {secret[0] ^ 0x736f6d6570736575u, secret[1] ^ 0x646f72616e646f6du,
                           secret[0] ^ 0x6c7967656e657261u, secret[1] ^ 0x7465646279746573u};
    sip_word(&s, scope, c);
    return s;
}

/* SipHash-c-d of a message that consists of the 8 bytes of scope, followed by `bytes`. */
static inline uint64_t sip_end(struct hash_scope s, const void *bytes, size_t len, int c, int d)
{
    const uint8_t *at = bytes, *whole_end = at + (len & ~(size_t)7);
    for (; at != whole_end; at += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        sip_word(&s, word, c);
    }
    uint64_t last = (uint64_t)(sizeof(uint64_t) + len) << 56;
    if (UNLIKELY(len % 8 != 0))
        last |= rest_of(at, len);
    sip_word(&s, last, c);
    s.v2 ^= 0xff;
    sip_rounds(&s, d);
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
}

struct hash_scope hash_begin(const uint64_t secret[2], uint64_t scope)
{
    return sip_begin(secret, scope, 1);
}

uint64_t hash_in(const struct hash_scope *scope, const void *bytes, size_t len)
{
    return sip_end(*scope, bytes, len, 1, 3);
}

uint64_t keyed_hash(const uint64_t secret[2], uint64_t scope, const void *bytes, size_t len)
{
    return sip_end(sip_begin(secret, scope, 1), bytes, len, 1, 3);
}

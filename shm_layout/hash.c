/* The keyed hash of the key index and of the name index. */
#include "core.h"

struct sip {
    uint64_t v0, v1, v2, v3;
};

static inline uint64_t rotate(uint64_t x, unsigned bits) { return x << bits | x >> (64 - bits); }

static inline void sip_rounds(struct sip *s, int rounds)
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

static inline void sip_word(struct sip *s, uint64_t word, int rounds)
{
    s->v3 ^= word;
    sip_rounds(s, rounds);
    s->v0 ^= word;
}

/* SipHash-c-d of the message that consists of the 8 bytes of scope and of bytes. */
static inline uint64_t sip_hash(const uint64_t secret[2], uint64_t scope, const void *bytes,
                                size_t len, int c, int d)
{
    struct sip s = {secret[0] ^ 0x736f6d6570736575u, secret[1] ^ 0x646f72616e646f6du,
                    secret[0] ^ 0x6c7967656e657261u, secret[1] ^ 0x7465646279746573u};
    const uint8_t *at = bytes, *whole_end = at + (len & ~(size_t)7);
    uint64_t word, last = (uint64_t)(sizeof scope + len) << 56;

    sip_word(&s, scope, c);
    for (; at != whole_end; at += sizeof word) {
        memcpy(&word, at, sizeof word);
        sip_word(&s, word, c);
    }
    for (unsigned i = 0; i < (len & 7); i++)
        last |= (uint64_t)at[i] << (8 * i);
    sip_word(&s, last, c);
    s.v2 ^= 0xff;
    sip_rounds(&s, d);
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
}

uint64_t keyed_hash(const uint64_t secret[2], uint64_t scope, const void *bytes, size_t len)
{
    return sip_hash(secret, scope, bytes, len, 1, 3);
}

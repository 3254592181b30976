/* Test the keyed hash against published values. hash.c is included here, so that the test can
 * choose the numbers of rounds that the reference vectors use. */
#define keyed_hash keyed_hash_here
#include "../../shm_layout/core/base/hash.c"

#include "check.h"

#define KEY_BYTES 72

static uint8_t rising[KEY_BYTES];   /* bytes 0, 1, 2, ... */

static uint64_t scope_of_rising(void)
{
    uint64_t scope;
    memcpy(&scope, rising, sizeof scope);
    return scope;
}

/* SipHash-2-4 of 00 01 02 ... with the key 00 .. 0f gives the values of the paper and its reference
 * code. */
static void test_reference_vectors(void)
{
    const uint64_t secret[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
    struct hash_scope begin = sip_begin(secret, scope_of_rising(), 2);
    CHECK(sip_end(begin, rising + 8, 0, 2, 4) == 0x93f5f5799a932462u);
    CHECK(sip_end(begin, rising + 8, 7, 2, 4) == 0xa129ca6149be45e5u);
}

/* SipHash-1-3 of 00 01 02 ... gives the values of hash(bytes) in CPython 3.11. PYTHONHASHSEED=0
 * sets CPython's secret to zero; from the seeds 1 and 42, CPython's documented generator makes the
 * secret. */
static void test_cpython_vectors(void)
{
    static const size_t lengths[7] = {8, 9, 15, 16, 24, 31, 71};
    static const struct {
        uint64_t secret[2], hashes[7];
    } seeds[3] = {
        {{0, 0},
         {0xead411e67ebe2eeau, 0x75927f9d95124362u, 0xf30eb725bb91c9eau, 0x8972188433a5c5b7u,
          0x31185a47af932f3au, 0x169739443111d49bu, 0xbc682db144a5bf0eu}},
        {{0xaed66ce184be2329u, 0xebe9bbf1f1499052u},
         {0xc0b5739e7e28dd01u, 0x208a1a5a0cbbf778u, 0xfa87985f39e97a53u, 0x12e9d283f9f37002u,
          0x19b4e5f288f874ceu, 0xb8c17103f21d8810u, 0x671df83026558382u}},
        {{0xdc504fd368cd90afu, 0xb920bb9ffe99e9c1u},
         {0x60866c3c108c6afbu, 0x68814005f7469e03u, 0x94ace24d68c18cf8u, 0x339176f3ac59ce05u,
          0xae431c6fb201ce8bu, 0x06f3af51bda71c61u, 0x9d2f6a92bf1bd799u}},
    };
    for (size_t s = 0; s < 3; s++)
        for (size_t i = 0; i < 7; i++)
            CHECK(keyed_hash(seeds[s].secret, scope_of_rising(), rising + 8, lengths[i] - 8)
                  == seeds[s].hashes[i]);
}

/* The hash depends on secret, scope, every byte and the length, but not on the address. */
static void test_every_input_counts(void)
{
    const uint64_t secret[2] = {1, 2}, other[2] = {1, 3};
    uint8_t moved[KEY_BYTES + 1];
    uint64_t hash = keyed_hash(secret, 5, rising, 21);

    CHECK(keyed_hash(other, 5, rising, 21) != hash);
    CHECK(keyed_hash(secret, 6, rising, 21) != hash);
    CHECK(keyed_hash(secret, 5, rising, 20) != hash);
    memcpy(moved + 1, rising, KEY_BYTES);
    CHECK(keyed_hash(secret, 5, moved + 1, 21) == hash);
    for (size_t i = 0; i < 21; i++) {
        moved[1 + i] ^= 0x80;
        CHECK(keyed_hash(secret, 5, moved + 1, 21) != hash);
        moved[1 + i] ^= 0x80;
    }
}

static void test_two_steps_are_one(void)
{
    const uint64_t secret[2] = {1, 2};
    const struct hash_scope begin = hash_begin(secret, 5);
    for (size_t len = 0; len <= KEY_BYTES; len++)
        CHECK(hash_in(&begin, rising, len) == keyed_hash(secret, 5, rising, len));
}

int main(void)
{
    for (size_t i = 0; i < KEY_BYTES; i++)
        rising[i] = (uint8_t)i;
    RUN(test_reference_vectors);
    RUN(test_cpython_vectors);
    RUN(test_every_input_counts);
    RUN(test_two_steps_are_one);
    return 0;
}

/* SHA-256 after FIPS 180-4. */
#include "sha256.h"

#include <string.h>

#define BLOCK 64u

static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotated(uint32_t x, unsigned n)
{
    return x >> n | x << (32 - n);
}

static uint32_t big_endian(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void schedule(const uint8_t *block, uint32_t words[64])
{
    for (unsigned n = 0; n < 16; n++)
        words[n] = big_endian(block + 4 * n);
    for (unsigned n = 16; n < 64; n++) {
        const uint32_t a = words[n - 15], b = words[n - 2];
        words[n] = words[n - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + words[n - 7] +
                   (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
    }
}

static void compress(uint32_t state[8], const uint8_t *block)
{
    uint32_t words[64], s[8];
    schedule(block, words);
    memcpy(s, state, sizeof s);
    for (unsigned n = 0; n < 64; n++) {
        const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
        const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
        const uint32_t first = s[7] + (rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25)) +
                               choice + constants[n] + words[n];
        const uint32_t second = (rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22)) + majority;
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += first;
        s[0] = first + second;
    }
    for (unsigned n = 0; n < 8; n++)
        state[n] += s[n];
}

void sha256(const void *bytes, size_t length, uint8_t digest[32])
{
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t last[2 * BLOCK] = {0};
    const uint8_t *at = bytes;
    size_t left = length;
    for (; left >= BLOCK; left -= BLOCK, at += BLOCK)
        compress(state, at);
    const size_t end = left + 9 <= BLOCK ? BLOCK : 2 * BLOCK; /* a 1 bit, zeros, the length in bits */
    memcpy(last, at, left);
    last[left] = 0x80;
    for (unsigned n = 0; n < 8; n++)
        last[end - 1 - n] = (uint8_t)((uint64_t)length * 8 >> 8 * n);
    for (size_t done = 0; done < end; done += BLOCK)
        compress(state, last + done);
    for (unsigned n = 0; n < 32; n++)
        digest[n] = (uint8_t)(state[n / 4] >> (24 - 8 * (n % 4)));
}

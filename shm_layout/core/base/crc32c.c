/* crc32c.c - the Castagnoli CRC (RFC 3720, appendix B.4) that protects the frames of the WAL. */
#include "core/base/crc32c.h"
#include "core/base/common.h"

/* CRCs of each low half and of each high half of a byte. The CRC of a byte is the XOR of the CRCs
 * of its halves. */
static const uint32_t low[16] = {
    0x00000000, 0xf26b8303, 0xe13b70f7, 0x1350f3f4, 0xc79a971f, 0x35f1141c, 0x26a1e7e8, 0xd4ca64eb,
    0x8ad958cf, 0x78b2dbcc, 0x6be22838, 0x9989ab3b, 0x4d43cfd0, 0xbf284cd3, 0xac78bf27, 0x5e133c24};
static const uint32_t high[16] = {
    0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
    0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75};

uint32_t crc32c_by_table(uint32_t crc, const void *bytes, size_t count)
{
    const uint8_t *at = bytes;
    crc = ~crc;
    for (; count > 0; count--) {
        uint32_t x = crc ^ *at++;
        crc = crc >> 8 ^ low[x & 15] ^ high[x >> 4 & 15];
    }
    return ~crc;
}

#ifdef __x86_64__
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const void *bytes,
                                                                 size_t count)
{
    const uint8_t *at = bytes;
    uint64_t wide = ~crc, word;
    for (; count >= sizeof word; count -= sizeof word, at += sizeof word) {
        memcpy(&word, at, sizeof word);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = (uint32_t)wide;
    for (; count > 0; count--)
        crc = __builtin_ia32_crc32qi(crc, *at++);
    return ~crc;
}
#endif

uint32_t pg_crc32c(uint32_t crc, const void *bytes, uint64_t count)
{
#ifdef __x86_64__
    if (LIKELY(__builtin_cpu_supports("sse4.2")))
        return by_instruction(crc, bytes, count);
#endif
    return crc32c_by_table(crc, bytes, count);
}

/* crc32c.h - the Castagnoli CRC (RFC 3720, appendix B.4) that protects the frames of the WAL. */
#ifndef PURGATORYD_BASE_CRC32C_H
#define PURGATORYD_BASE_CRC32C_H

#include "core/base/common.h"

/* Return the same value as pg_crc32c. This function does not use the CRC instruction of the CPU. */
uint32_t crc32c_by_table(uint32_t crc, const void *bytes, size_t count);

#endif

/* crc32c.h - the Castagnoli CRC (RFC 3720, appendix B.4) that guards the WAL's frames. */
#ifndef PURGATORYD_BASE_CRC32C_H
#define PURGATORYD_BASE_CRC32C_H

#include "core/base/common.h"

/* What pg_crc32c gives, on any machine. */
uint32_t crc32c_by_table(uint32_t crc, const void *bytes, size_t count);

#endif

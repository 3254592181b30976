/* operation_bytes.h - the layout of an operation's blob: struct pg_operation, the last watermark of
 * each key, the bitmaps of missing and failed keys, the bitmap of own keys, the shares of a SUM,
 * key, payload. */
#ifndef PURGATORYD_OPERATION_BYTES_H
#define PURGATORYD_OPERATION_BYTES_H

#include "core/base/blobs.h"
#include "core/base/common.h"

static inline uint32_t bitmap_bytes(uint32_t keys) { return (keys + 7) / 8; }

static inline uint32_t operation_end_bytes(uint32_t keys)
{
    return keys * (uint32_t)sizeof(uint64_t) + 2 * bitmap_bytes(keys);
}

static inline uint32_t bitmaps_space(uint32_t keys, bool has_own)
{
    return (operation_end_bytes(keys) + has_own * bitmap_bytes(keys) + 15) / 16 * 16;
}

static inline uint32_t ext_bytes(unsigned condition, uint32_t keys, bool has_own)
{
    return (uint32_t)sizeof(struct pg_operation) + bitmaps_space(keys, has_own) +
           (condition == PG_C_SUM ? keys * (uint32_t)sizeof(struct pg_share) : 0);
}

static inline uint64_t *last_watermarks_of(struct pg_operation *op) { return (uint64_t *)(op + 1); }

static inline uint8_t *operation_missing(struct pg_operation *op)
{
    return (uint8_t *)(last_watermarks_of(op) + op->keys);
}

static inline uint8_t *failed_of(struct pg_operation *op)
{
    return operation_missing(op) + bitmap_bytes(op->keys);
}

static inline uint8_t *own_of(struct pg_operation *op)
{
    return (uint8_t *)(op + 1) + operation_end_bytes(op->keys);
}

static inline struct pg_share *shares_of(struct pg_operation *op)
{
    return (struct pg_share *)((uint8_t *)(op + 1) + bitmaps_space(op->keys, op->has_own));
}

/* Number of bytes before the key in the blob. */
static inline uint32_t operation_ext_bytes(const struct pg_operation *op)
{
    return ext_bytes(op->condition, op->keys, op->has_own);
}

/* Maximum number of bytes before an operation's own payload in its notice. */
#define PG_VERDICT_MAX (sizeof(struct pg_verdict) + PG_WATCH_KEYS_MAX / 8)

/* Number of bytes after the key in an operation's notice, whose own payload has `payload_len`
 * bytes. */
static inline uint32_t notice_payload(uint32_t keys, uint32_t payload_len)
{
    return (uint32_t)sizeof(struct pg_verdict) + bitmap_bytes(keys) + payload_len;
}

static inline uint32_t granules_of_notice(uint32_t key_len, uint32_t keys, uint32_t payload_len)
{
    return blob_granules((uint64_t)key_len + notice_payload(keys, payload_len));
}

#endif

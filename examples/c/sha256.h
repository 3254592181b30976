/* SHA-256, for the hash of an order key. */
#ifndef SHA256_H
#define SHA256_H

#include <stddef.h>
#include <stdint.h>

/* Write the SHA-256 of the bytes to `digest`. */
void sha256(const void *bytes, size_t length, uint8_t digest[32]);

#endif

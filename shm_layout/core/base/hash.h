/* hash.h - the keyed hash. */
#ifndef PURGATORYD_BASE_HASH_H
#define PURGATORYD_BASE_HASH_H

#include "core/base/common.h"

/* SipHash-1-3 (Aumasson, Bernstein 2012) of scope and key. Keys may come from untrusted clients.
 * Without the secret, an attacker cannot choose keys that collide in one bucket. */
uint64_t keyed_hash(const uint64_t secret[2], uint64_t scope, const void *bytes, size_t len);

/* The same hash in two steps, for many keys of one scope: hash_begin absorbs the scope, hash_in
 * hashes one key. */
struct hash_scope {
    uint64_t v0, v1, v2, v3;
};
struct hash_scope hash_begin(const uint64_t secret[2], uint64_t scope);
uint64_t hash_in(const struct hash_scope *scope, const void *bytes, size_t len);

#endif

"""Digests that clients rarely need.

The import of hashlib takes 2 ms, because it opens OpenSSL. So only the first digest imports it.
"""

from __future__ import annotations


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 digest of `data`, 32 bytes."""
    import hashlib

    return hashlib.sha256(data).digest()


def blake2b(data: bytes, size: int) -> bytes:
    """Return the BLAKE2b digest of `data`. `size`: bytes of the digest, 1 to 64."""
    import hashlib

    return hashlib.blake2b(data, digest_size=size).digest()

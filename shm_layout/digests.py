"""Digests that clients rarely need.

The import of hashlib takes 2 ms, because it opens OpenSSL. So it happens at the first digest.
"""

from __future__ import annotations


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 digest of `data`, 32 bytes."""
    import hashlib

    return hashlib.sha256(data).digest()


def blake2b(data: bytes, size: int) -> bytes:
    """Return the BLAKE2b digest of `data` of `size` bytes, 1 to 64."""
    import hashlib

    return hashlib.blake2b(data, digest_size=size).digest()

"""On which NUMA node memory is: memory.c in Python. An OSError says what the kernel refused."""

from __future__ import annotations

import mmap
import os

from purgatoryd.shm_layout._core import ffi, lib

SAMPLES: int = lib.PG_MEMORY_SAMPLES
_COLLAPSE = 25
"""MADV_COLLAPSE, Linux 6.1."""


def prefer(node: int) -> None:
    """This thread, and those that it starts, get memory from `node` while it has any."""
    _check(lib.pg_memory_prefer(node))


def bind(mapping: mmap.mmap, node: int, *, move: bool) -> None:
    """The same for a mapping, whoever touches it; `move` brings over what is elsewhere."""
    with ffi.from_buffer(mapping) as base:
        _check(lib.pg_memory_bind(base, len(mapping), node, move))


def elsewhere(mapping: mmap.mmap, node: int) -> int:
    """How many of SAMPLES pages, evenly spread, are not on `node`."""
    found = ffi.new("uint32_t *")
    with ffi.from_buffer(mapping) as base:
        _check(lib.pg_memory_elsewhere(base, len(mapping), node, found))
    return int(found[0])


def collapse(mapping: mmap.mmap) -> None:
    """Has the mapping's pages made into huge ones, now."""
    mapping.madvise(_COLLAPSE)


def lock() -> None:
    """All that is mapped now stays in RAM."""
    _check(lib.pg_memory_lock())


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))

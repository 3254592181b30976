"""NUMA placement of memory, through memory.c. The functions raise OSError if the kernel refuses."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.shm import Moved, portions

SAMPLES: int = lib.PG_MEMORY_SAMPLES
_COLLAPSE, _POPULATE = 25, 22
"""MADV_COLLAPSE, Linux 6.1; MADV_POPULATE_READ, Linux 5.14."""


def prefer(node: int) -> None:
    """Let this thread and the threads that it starts allocate memory on `node`, while that node has
    free memory."""
    _check(lib.pg_memory_prefer(node))


def bind(mapping: mmap.mmap, node: int, *, move: bool, moved: Moved = lambda: None) -> None:
    """Prefer a node for a mapping's pages, whichever thread touches them. With `move`, move
    pages from other nodes, and call `moved` after each portion."""
    with ffi.from_buffer(mapping) as base:
        for at, length in portions(len(mapping)) if move else [(0, len(mapping))]:
            _check(lib.pg_memory_bind(base + at, length, node, move))
            moved()


def elsewhere(mapping: mmap.mmap, node: int) -> int:
    """Return the number of pages that are not on `node`, among SAMPLES evenly spread pages."""
    found = ffi.new("uint32_t *")
    with ffi.from_buffer(mapping) as base:
        _check(lib.pg_memory_elsewhere(base, len(mapping), node, found))
    return int(found[0])


def collapse(mapping: mmap.mmap, moved: Moved) -> None:
    """Make the mapping's pages huge, and call `moved` after each portion.

    Raises OSError: at once if there are no more huge pages, at the end for any other refusal.
    """
    refused: OSError | None = None
    for portion in portions(len(mapping)):
        try:
            mapping.madvise(_COLLAPSE, *portion)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.EBUSY):  # the kernel has no more huge pages
                raise
            refused = error
        moved()
    if refused is not None:
        raise refused


def populate(mapping: mmap.mmap, moved: Moved) -> None:
    """Map all pages of a mapping in advance, and call `moved` after each portion.

    This makes a later `lock` fast.
    """
    for portion in portions(len(mapping)):
        with suppress(OSError):  # a failure only makes `lock` slower
            mapping.madvise(_POPULATE, *portion)
        moved()


def lock() -> None:
    """Lock all memory that is currently mapped, so that it stays in RAM."""
    _check(lib.pg_memory_lock())


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))

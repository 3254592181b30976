"""Files read and written with the page cache left as it was: it belongs to the daemon's host.

What a reader brings into the cache pushes something else out. So a file is read in pieces, and
pages that were not resident before are given back at once; those that were, stay.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from purgatoryd.shm_layout._core import ffi
from purgatoryd.shm_layout.errors import BadPath, WalDamaged
from purgatoryd.shm_layout.page_cache import PAGE, resident

PIECE = 1 << 20
"""Bytes read at once: no more of a file is in the cache that was not there before."""


def read(path: Path, paced: Callable[[int], object] = int, upto: int | None = None) -> Any:
    """A file's first `upto` bytes, or all, in memory of their own.

    `paced` is given the number of bytes that are about to be read. Raises BadPath, WalDamaged.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return ffi.from_buffer(_read(file, size if upto is None else min(size, upto), paced))
    except FileNotFoundError as error:
        raise BadPath(str(path), f"cannot be read: {error.strerror}") from error
    except OSError as error:
        detail = f"cannot be read: {error.strerror}"
        raise WalDamaged(str(path), detail, 0, 0, 0, 0) from error


def pages(size: int) -> mmap.mmap:
    """Memory of its own, in huge pages where there are some: each page costs a fault."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _read(file: FileIO, size: int, paced: Callable[[int], object]) -> mmap.mmap:
    before = resident(file)
    memory = pages(max(size, 1))
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    with memoryview(memory)[:size] as view:
        at, count = 0, 1
        while at < size and count:
            paced(min(PIECE, size - at))
            count = file.readinto(view[at : at + PIECE])
            _give_back(file.fileno(), before, at, count)
            at += count
    return memory


def _give_back(fd: int, before: bytes, at: int, count: int) -> None:
    for start, end in _absent(before, at // PAGE, -(-(at + count) // PAGE)):
        os.posix_fadvise(fd, start * PAGE, (end - start) * PAGE, os.POSIX_FADV_DONTNEED)


def _absent(before: bytes, page: int, end: int) -> Iterator[tuple[int, int]]:
    """Runs of pages that were not resident."""
    while page < end:
        start = page
        while page < end and not before[page] & 1:
            page += 1
        if page > start:
            yield start, page
        while page < end and before[page] & 1:
            page += 1


def drop(file: BinaryIO) -> None:
    """Gives back the pages of a file that was written and is on disk."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

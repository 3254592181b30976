"""Read files from the disk, not from the page cache.

After a failed write or sync the page cache keeps bytes that are not on disk, and treats them as
clean. O_DIRECT bypasses the cache. On a file system without O_DIRECT, the file's pages are first
evicted from the cache, and mincore(2) confirms that they are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from purgatoryd.shm_layout._core import ffi
from purgatoryd.shm_layout.errors import BadPath
from purgatoryd.shm_layout.filesystems import is_in_memory

PAGE = mmap.PAGESIZE
"""Alignment of sizes and memory addresses of O_DIRECT reads, in bytes."""
EVICTIONS, PAUSE_S = 100, 0.01
"""Number of attempts to evict a file, and the pause between two attempts. Several attempts may be
needed, because pages under I/O cannot be evicted."""
_libc = ctypes.CDLL(None, use_errno=True)


def resident(file: FileIO | BinaryIO) -> bytes:
    """Return a byte per page of the file; its lowest bit is 1 if the page is in the cache."""
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        return b""
    pages = -(-size // PAGE)
    found = ctypes.create_string_buffer(pages)
    with mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        address = int(ffi.cast("uintptr_t", ffi.from_buffer(mapped)))
        if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    return found.raw


@contextlib.contextmanager
def from_disk(path: Path) -> Iterator[FileIO]:
    """Open a file for reads of whole pages from the disk.

    Raises BadPath if pages stay in the cache, and OSError.
    """
    with _direct(path) or _evicted(path) as file:
        yield file


def _direct(path: Path) -> FileIO | None:
    """Open a file with O_DIRECT; None if its file system does not support it."""
    try:
        file = FileIO(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    try:
        _give_up(file)  # some file systems accept O_DIRECT, but read through the cache
        with mmap.mmap(-1, PAGE) as memory:
            os.preadv(file.fileno(), [memory], 0)
    except OSError as error:
        file.close()
        if error.errno == errno.EINVAL:
            return None
        raise
    return file


def _evicted(path: Path) -> FileIO:
    """Open a file after evicting its pages. On a file system in memory nothing is evicted."""
    file = path.open("rb", buffering=0)
    try:
        if not is_in_memory(path):
            _evict(file, path)
    except BaseException:
        file.close()
        raise
    return file


def _evict(file: FileIO, path: Path) -> None:
    for _ in range(EVICTIONS):
        with contextlib.suppress(OSError):  # the error of an earlier write; its pages are clean
            os.fdatasync(file.fileno())
        _give_up(file)
        pages = resident(file)
        left = sum(page & 1 for page in pages)
        if not left:
            return
        time.sleep(PAUSE_S)
    detail = (
        f"cannot be read from the disk: {left} of {len(pages)} pages stay in the page cache; "
        "end the programs that write or map the file"
    )
    raise BadPath(str(path), detail)


def _give_up(file: FileIO) -> None:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

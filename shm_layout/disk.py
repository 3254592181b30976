"""File system calls of the WAL.

All data that has to survive a power cut is written through a Disk, which callers pass as an
argument. Tests pass a simulated disk that fails, tears writes and forgets unsynced data. The
algorithms on top of these calls are in files.py. The group-commit thread makes its own calls,
through `storage`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MODE = 0o600
"""Mode of WAL files, which contain keys and payloads."""


class About(NamedTuple):
    """Size of a file in bytes, and time of its last write."""

    bytes: int
    written_wall_ns: int


class Disk:
    """The file systems of this host. Every call raises OSError."""

    storage: Any = None
    """The struct pg_storage that the group-commit thread uses; None = system calls."""

    # ---- folders -------------------------------------------------------------------------------

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder; an empty list if the folder does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(folder)
        return []

    def about(self, path: Path) -> About:
        """Return size and modification time of a file."""
        found = path.stat()
        return About(found.st_size, found.st_mtime_ns)

    def exists(self, path: Path) -> bool:
        """Return whether the file exists."""
        return path.exists()

    def rename(self, path: Path, name: str) -> None:
        """Rename a file within its folder. Replace a file that already has the new name."""
        path.rename(path.with_name(name))

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)

    def sync_directory(self, folder: Path) -> None:
        """Make created, renamed and removed names of a folder durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        """Hold a lock on a folder; first wait while another process holds it."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    # ---- files ---------------------------------------------------------------------------------

    def read_bytes(self, path: Path) -> bytes:
        """Return the content of a small file."""
        return path.read_bytes()

    def open(self, path: Path, *, direct: bool) -> AbstractContextManager[FileIO]:
        """Open a file to read whole pages, from the disk if `direct`, else from the page cache.

        Raises BadPath if `direct` and pages cannot be evicted from the cache.
        """
        if not direct:
            return path.open("rb", buffering=0)
        # imported here because it imports the C core
        from purgatoryd.shm_layout.page_cache import from_disk

        return from_disk(path)

    def create(self, path: Path) -> BinaryIO:
        """Create a file for writing. Raises FileExistsError."""
        return open(path, "wb", opener=_new)

    def sync(self, file: BinaryIO) -> None:
        """Write a file's data to disk."""
        file.flush()
        os.fsync(file.fileno())

    def begin_writing(self, file: BinaryIO, size: int) -> None:
        """Tell the kernel to begin to write the last `size` bytes of a file to disk.

        This is a hint, for bytes that no process reads before a reboot.
        """
        with contextlib.suppress(OSError):
            file.flush()
            os.posix_fadvise(file.fileno(), file.tell() - size, size, os.POSIX_FADV_DONTNEED)


DISK = Disk()


def private(path: str, flags: int) -> int:
    """Open a file with a mode that gives other users no access."""
    return os.open(path, flags, MODE)


def _new(path: str, flags: int) -> int:
    return private(path, flags | os.O_EXCL | os.O_NOFOLLOW)

"""The calls on files with which the WAL reaches its disk.

Whatever has to survive a power cut goes through a Disk, which is an argument. Tests replace it by a
simulated disk that fails, tears and forgets what was not synced. The algorithms on top of these
calls are in files.py. The group-commit thread makes its own calls, through `storage`.
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
"""Keys and payloads are in the files."""


class About(NamedTuple):
    """Size of a file in bytes, and when it was last written."""

    bytes: int
    written_wall_ns: int


class Disk:
    """The file systems of this host. Every call raises OSError."""

    storage: Any = None
    """struct pg_storage of the group-commit thread; None = the system's calls."""

    # ---- folders -------------------------------------------------------------------------------

    def names(self, folder: Path) -> list[str]:
        """The names in a folder; none if there is no folder."""
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(folder)
        return []

    def about(self, path: Path) -> About:
        """Describe a file."""
        found = path.stat()
        return About(found.st_size, found.st_mtime_ns)

    def exists(self, path: Path) -> bool:
        """True if there is a file of that name."""
        return path.exists()

    def rename(self, path: Path, name: str) -> None:
        """Give a file another name in its folder; a file that had it loses it."""
        path.rename(path.with_name(name))

    def remove(self, path: Path) -> None:
        """Remove a name, if it is there."""
        path.unlink(missing_ok=True)

    def sync_directory(self, folder: Path) -> None:
        """Make names that were given or removed in a folder durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        """Hold a lock on a folder; wait while another process has it."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    # ---- files ---------------------------------------------------------------------------------

    def read_bytes(self, path: Path) -> bytes:
        """A small file, whole."""
        return path.read_bytes()

    def open(self, path: Path, *, direct: bool) -> AbstractContextManager[FileIO]:
        """Open a file for reads of whole pages, from the page cache, or `direct` from the disk.

        Raises BadPath if pages cannot be evicted from the cache.
        """
        if not direct:
            return path.open("rb", buffering=0)
        from purgatoryd.shm_layout.page_cache import from_disk  # it imports the C core

        return from_disk(path)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing, so that nobody else has it open. Raises FileExistsError."""
        return open(path, "wb", opener=_new)

    def sync(self, file: BinaryIO) -> None:
        """Bring what was written to a file to disk."""
        file.flush()
        os.fsync(file.fileno())

    def begin_writing(self, file: BinaryIO, size: int) -> None:
        """Have the disk begin with the last `size` bytes that were written. It is a hint: nobody
        reads them until a reboot."""
        with contextlib.suppress(OSError):
            file.flush()
            os.posix_fadvise(file.fileno(), file.tell() - size, size, os.POSIX_FADV_DONTNEED)


DISK = Disk()


def private(path: str, flags: int) -> int:
    """An opener of files that are nobody else's."""
    return os.open(path, flags, MODE)


def _new(path: str, flags: int) -> int:
    return private(path, flags | os.O_EXCL | os.O_NOFOLLOW)

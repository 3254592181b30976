"""Arena files in /dev/shm and their lock. A file is created in full size and never resized."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import posix_ipc

from purgatoryd.shm_layout.errors import (
    AlreadyRunning,
    ArenaMissing,
    ArenaTooLarge,
    BadPath,
    PermissionDenied,
)

# Linux keeps POSIX shared memory objects as files in this tmpfs. Files can be renamed atomically.
MOUNT = Path("/dev/shm")
PREFIX = "purgatoryd."
"""Prefix of the names of all arena files."""
PORTION = 32 << 20
"""Number of bytes that one system call allocates, copies or moves, a multiple of a huge page. A
watchdog is notified after each portion. So a portion must take only a small part of a second, even
on a busy machine."""
Moved = Callable[[], object]
"""A function that is called after each portion of a long task."""
_DONTNEED_LOCKED = 24
"""MADV_DONTNEED_LOCKED, Linux 5.18."""


FreeMemory = Callable[[], Sequence[tuple[str, int]]]
"""Returns (name, free bytes) of each limit of memory, as Host.free_memory does."""


def refuse_too_large(size: int, free_memory: FreeMemory) -> None:
    """Raise ArenaTooLarge if there is no space for arena files of `size` bytes.

    The check comes before the first page is allocated. Otherwise files that do not fit would use up
    all space for a moment, and the kernel would kill processes if /dev/shm is larger than the free
    memory.
    """
    found = os.statvfs(MOUNT)
    limits = [(str(MOUNT), found.f_bavail * found.f_frsize)] if found.f_blocks else []
    for where, available in [*limits, *free_memory()]:
        if available < size:
            raise ArenaTooLarge(where, size, available)


def portions(size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of each portion of `size` bytes."""
    return ((at, min(PORTION, size - at)) for at in range(0, size, PORTION))


class ArenaFile:
    """A mapped arena file. `bytes`: size of the mapping. `fd`: file descriptor; -1 if the file is
    open for reading only."""

    def __init__(self, name: str, memory: mmap.mmap, fd: int = -1) -> None:
        self.name = name
        self.memory = memory
        self.bytes = len(memory)
        self.fd = fd
        self._opened: os.stat_result | None = None
        """Identity of a file that was opened for reading; its descriptor is closed."""

    @property
    def has_name(self) -> bool:
        """Return whether the name leads to this file. Raises BadPath if it leads to another
        file."""
        path = MOUNT / self.name[1:]
        try:
            found = path.lstat()
        except FileNotFoundError:
            return False
        if not os.path.samestat(found, self._opened or os.fstat(self.fd)):
            raise BadPath(str(path), "is not the daemon's arena file, but has its name: remove it")
        return True

    @classmethod
    def create(cls, name: str, size: int, mode: int, moved: Moved = lambda: None) -> ArenaFile:
        """Create a zeroed arena file of `size` bytes with allocated memory and exactly this `mode`.

        The file has no name until link() is called, so a killed process leaves no file behind.
        Raises ArenaTooLarge with the needed and the available bytes.
        """
        fd = os.open(MOUNT, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
        try:
            os.fchmod(fd, mode)  # because the umask has cleared bits of the mode
            _commit(fd, size, moved)
            return cls(name, mmap.mmap(fd, size), fd)
        except BaseException:
            os.close(fd)
            raise

    def copy(self, mode: int, moved: Moved) -> ArenaFile:
        """Copy the bytes to a new file without a name. Raises ArenaTooLarge."""
        new = ArenaFile.create(self.name, self.bytes, mode, moved)
        try:
            with memoryview(self.memory) as view:
                for at, length in portions(self.bytes):
                    os.pwrite(new.fd, view[at : at + length], at)
                    moved()
        except BaseException:
            new.give_up(moved)
            raise
        return new

    def lock(self) -> None:
        """Lock a new file, as ArenaLock does. No other process can have opened it."""
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def link(self, name: str) -> None:
        """Give a new file this name. Raises FileExistsError if another file has this name."""
        # With a dir_fd CPython calls linkat(), which follows the link in /proc.
        os.link(f"/proc/self/fd/{self.fd}", MOUNT / name[1:], src_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove this name if it leads to this file. The file must be open for writing."""
        path = MOUNT / name[1:]
        with suppress(FileNotFoundError):
            if os.path.samestat(path.lstat(), os.fstat(self.fd)):
                path.unlink()

    @classmethod
    def open(cls, name: str, *, read_only: bool) -> ArenaFile:
        """Map the arena file of this name.

        Raises ArenaMissing, PermissionDenied if this user may not read the file, and BadPath if it
        is not writable or not a regular file: any user can create any name in the tmpfs.
        """
        refuse_other_kind(name)
        try:
            shm = posix_ipc.SharedMemory(name, read_only=read_only)
        except posix_ipc.ExistentialError:
            raise ArenaMissing(name) from None
        except posix_ipc.PermissionsError:
            path = str(MOUNT / name[1:])
            if read_only:
                raise PermissionDenied(path) from None
            raise BadPath(path, "cannot be written by this user") from None
        try:
            if shm.size == 0:
                raise ArenaMissing(name)
            opened = os.fstat(shm.fd)
            owner = opened.st_uid
            if not read_only and owner != os.geteuid():
                raise BadPath(str(MOUNT / name[1:]), f"is foreign: it belongs to uid {owner}")
            access_kind = mmap.ACCESS_READ if read_only else mmap.ACCESS_WRITE
            memory = mmap.mmap(shm.fd, 0, access=access_kind)
            self = cls(name, memory, -1 if read_only else os.dup(shm.fd))
            self._opened = opened if read_only else None
            return self
        finally:
            shm.close_fd()

    def close(self) -> None:
        """Unmap and close the file. A file with a name stays in /dev/shm."""
        self.memory.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def give_up(self, moved: Moved) -> None:
        """Close a writable file that has no name. The close runs in a thread, because the kernel
        needs up to half a second to free each GiB of pages."""
        for portion in portions(self.bytes):
            with suppress(OSError):  # fails before Linux 5.18; then close() frees the pages
                self.memory.madvise(_DONTNEED_LOCKED, *portion)
            moved()
        fd, self.fd = self.fd, -1
        self.close()
        try:
            threading.Thread(target=os.close, args=[fd]).start()
        except RuntimeError:  # the system cannot start a thread
            os.close(fd)


class ArenaLock:
    """The lock on a daemon's private arena file: one process at a time opens or replaces an arena.

    Daemons that share /dev/shm share the arena, even if their run directories differ or were
    emptied. The lock belongs to the open file description, so the kernel releases it when the
    process ends. The descriptor is closed on exec, so no child process keeps the lock.
    """

    def __init__(self, daemon: str, names: Sequence[str]) -> None:
        """Lock the first of these private arena files that exists, if any exists.

        Raises AlreadyRunning if another process has locked it.
        """
        self._daemon = daemon
        self._fds: list[int] = []
        self.lock(names)

    def lock(self, names: Sequence[str]) -> None:
        """Lock the first of these files that exists, in addition to the files locked before."""
        while (found := _first(names)) and not self._has(found):
            if (fd := _open_first(names)) is None:
                continue
            _flock(fd, self._daemon, MOUNT / names[0][1:])
            # If another file has taken the name in the meantime, the loop locks that file as well.
            self._fds.append(fd)

    def adopt(self, fd: int) -> None:
        """Add the descriptor of a file that this process has locked."""
        self._fds.append(os.dup(fd))

    def release(self, fd: int) -> None:
        """Release the lock on the file of `fd`, if the file was adopted."""
        file, fds, self._fds = os.fstat(fd), self._fds, []
        for own in fds:
            if os.path.samestat(os.fstat(own), file):
                os.close(own)
            else:
                self._fds.append(own)

    def holds(self, name: str) -> bool:
        """Return whether this object holds the lock on the arena file of this name."""
        found = _first([name])
        return found is not None and self._has(found)

    def settle(self, name: str) -> None:
        """Release all locks, except for the lock on the arena file of this name."""
        found = _first([name])
        fds, self._fds = self._fds, []
        for fd in fds:
            if found and os.path.samestat(os.fstat(fd), found):
                self._fds.append(fd)
            else:
                os.close(fd)

    def _has(self, found: os.stat_result) -> bool:
        return any(os.path.samestat(os.fstat(fd), found) for fd in self._fds)

    def close(self) -> None:
        """Release all locks."""
        while self._fds:
            os.close(self._fds.pop())


def _first(names: Sequence[str]) -> os.stat_result | None:
    for name in names:
        with suppress(FileNotFoundError):
            return (MOUNT / name[1:]).lstat()
    return None


def _open_first(names: Sequence[str]) -> int | None:
    for name in names:
        with suppress(FileNotFoundError):
            return os.open(MOUNT / name[1:], os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    return None


def _flock(fd: int, daemon: str, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(os.fstat(fd))
        os.close(fd)
        raise AlreadyRunning(daemon, holder, str(path)) from None


def _holder(found: os.stat_result) -> int:
    """Return the pid of the process that has locked a file; 0 if this process cannot see it."""
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError), open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if fields[1] == "FLOCK" and device in fields:
                return int(fields[4])
    return 0


def _commit(fd: int, size: int, moved: Moved) -> None:
    """Allocate all pages. So a full tmpfs causes an error at once, instead of a SIGBUS later."""
    try:
        for portion in portions(size):
            os.posix_fallocate(fd, *portion)
            moved()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        os.ftruncate(fd, 0)
        free = os.fstatvfs(fd)
        raise ArenaTooLarge(str(MOUNT), size, free.f_bavail * free.f_frsize) from error


def exists(name: str) -> bool:
    """Return whether there is an arena file of this name."""
    return (MOUNT / name[1:]).exists()


def ours(name: str) -> bool:
    """Return whether there is an arena file of this name that belongs to this user."""
    try:
        return (MOUNT / name[1:]).lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def refuse_other_kind(name: str) -> None:
    """Raise BadPath if the name belongs to an object that is not a regular file, such as a
    directory."""
    path = MOUNT / name[1:]
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise BadPath(str(path), "has the name of an arena file but is not a file: remove it")


def refuse_foreign(name: str) -> None:
    """Raise BadPath if there is an arena file of this name that belongs to another user."""
    if exists(name) and not ours(name):
        path = MOUNT / name[1:]
        raise BadPath(str(path), f"is foreign: it belongs to uid {path.lstat().st_uid}")


def unlink(name: str) -> None:
    """Remove the arena file of this name if it exists. Mappings of the file stay valid."""
    (MOUNT / name[1:]).unlink(missing_ok=True)


def replace(old: str, new: str) -> None:
    """Rename arena file `old` to `new` atomically. An existing file `new` is replaced."""
    os.replace(MOUNT / old[1:], MOUNT / new[1:])

"""Arena files in /dev/shm: created whole, opened as they are, never resized."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import posix_ipc

from purgatoryd.shm_layout.errors import ArenaMissing, ArenaTooLarge, BadPath, PermissionDenied

# Linux keeps POSIX shared memory in this tmpfs; that is what makes an atomic rename possible.
MOUNT = Path("/dev/shm")
PREFIX = "purgatoryd."
"""Of all that is ours there."""


class ArenaFile:
    """A mapped arena file. `bytes` and `view` are those of the mapping; the fd is closed."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self.memory = memory
        self.bytes = len(memory)

    @classmethod
    def create(cls, name: str, size: int, mode: int) -> ArenaFile:
        """A new zeroed arena file of `size` bytes, its memory committed, its `mode` exact.

        Raises ArenaTooLarge with the needed and the available bytes, FileExistsError if
        there is one of that name.
        """
        try:
            shm = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=mode)
        except posix_ipc.ExistentialError as error:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error
        try:
            os.fchmod(shm.fd, mode)  # the umask took bits away
            _commit(shm.fd, size)
            return cls(name, mmap.mmap(shm.fd, size))
        except BaseException:
            unlink(name)
            raise
        finally:
            shm.close_fd()

    @classmethod
    def open(cls, name: str, *, read_only: bool) -> ArenaFile:
        """The arena file as it is. Raises ArenaMissing, PermissionDenied where it may not be read,
        and BadPath where it may not be written: names in the tmpfs are open to all."""
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
            owner = os.fstat(shm.fd).st_uid
            if not read_only and owner != os.geteuid():
                raise BadPath(str(MOUNT / name[1:]), f"is foreign: it belongs to uid {owner}")
            access_kind = mmap.ACCESS_READ if read_only else mmap.ACCESS_WRITE
            return cls(name, mmap.mmap(shm.fd, 0, access=access_kind))
        finally:
            shm.close_fd()

    def close(self) -> None:
        """Unmaps; the arena file stays."""
        self.memory.close()


def _commit(fd: int, size: int) -> None:
    """Allocates all pages, so that a full tmpfs is an error now and not a SIGBUS later."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        os.ftruncate(fd, 0)
        free = os.fstatvfs(fd)
        raise ArenaTooLarge(str(MOUNT), size, free.f_bavail * free.f_frsize) from error


def exists(name: str) -> bool:
    """True if there is an arena file of that name."""
    return (MOUNT / name[1:]).exists()


def ours(name: str) -> bool:
    """True if there is an arena file of that name, and it is this user's."""
    try:
        return (MOUNT / name[1:]).lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def refuse_foreign(name: str) -> None:
    """Raises BadPath if there is an arena file of that name, and it is another user's."""
    if exists(name) and not ours(name):
        path = MOUNT / name[1:]
        raise BadPath(str(path), f"is foreign: it belongs to uid {path.lstat().st_uid}")


def unlink(name: str) -> None:
    """Removes the name, if it is there; mappings stay valid."""
    (MOUNT / name[1:]).unlink(missing_ok=True)


def replace(old: str, new: str) -> None:
    """Gives arena file `old` the name `new`, atomically; one that had it loses its name."""
    os.replace(MOUNT / old[1:], MOUNT / new[1:])

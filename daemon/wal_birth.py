"""Tells a WAL from a copy of it, which must not fire the same timers a second time.

A file made at the WAL's birth names its own inode and birth time, which no copy of it has. A
reboot, another container on the same volume and a disk in another host change neither. A clone of
the whole file system has both: nothing tells it from the original.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from purgatoryd.daemon.log import log
from purgatoryd.shm_layout.errors import BadPath, WalCopied
from purgatoryd.shm_layout.files import filesystems, write_durably
from purgatoryd.shm_layout.wal import segments, snapshots

NAME = "birth"

_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_STATX = struct.Struct("=I76xqI164x")
"""struct statx: stx_mask, and seconds and nanoseconds of stx_btime."""
_S = 1_000_000_000
_BYTES_MAX = 4096
"""Of the file; it has fewer."""


@dataclass(frozen=True, slots=True)
class Birth:
    """What a file knows of its birth; None: its file system does not tell it."""

    inode: int | None
    """None on FUSE, which may number its files again at each mount."""
    born_wall_ns: int | None

    def __str__(self) -> str:
        born = "unknown" if self.born_wall_ns is None else f"{self.born_wall_ns} ns"
        return f"inode {self.inode}, birth time {born}"

    def differs(self, other: Birth) -> bool:
        """True if both know the inode, or both the birth time, and not the same one."""
        pairs = ((self.inode, other.inode), (self.born_wall_ns, other.born_wall_ns))
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def refuse_copy(directory: Path, *, as_restored: bool) -> None:
    """Raises WalCopied if a WAL is a copy of another one, unless it is `as_restored`.

    One without the file is taken for an original and gets it: removing it locks nobody out.
    """
    path = directory / NAME
    try:
        with open(path, "rb", opener=_open_file) as file:
            written, found = _read(file), _birth_of(file, path)
    except FileNotFoundError:
        if segments(directory) or snapshots(directory):
            log.warning(f"{path} is missing: the WAL is taken for an original, not for a copy")
        record_birth(directory)
        return
    if written.differs(found) and not as_restored:
        raise WalCopied(str(directory), str(written), str(found))


def record_birth(directory: Path) -> None:
    """Makes the file, or makes it again: from then on the WAL in this folder is the original."""

    def write(file: BinaryIO) -> str:
        birth = _birth_of(file, directory)
        file.write(json.dumps(asdict(birth)).encode() + b"\n")
        return NAME

    write_durably(directory / f"{NAME}.new", write)


def _open_file(name: str, flags: int) -> int:
    """Raises BadPath for what is no file; nobody may ever write into a FIFO."""
    fd = os.open(name, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise BadPath(name, "is in the place of a file and is none: remove it")


def _read(file: BinaryIO) -> Birth:
    """What was written. What cannot be parsed was not written here: nobody has inode 0."""
    try:
        fields = json.loads(file.read(_BYTES_MAX))
        return Birth(fields["inode"], fields["born_wall_ns"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return Birth(0, None)


def _birth_of(file: BinaryIO, path: Path) -> Birth:
    stable = not any(kind.split(".")[0] == "fuse" for kind in filesystems(path))
    fd = file.fileno()
    return Birth(os.fstat(fd).st_ino if stable else None, _born_wall_ns(fd))


def _born_wall_ns(fd: int) -> int | None:
    """statx(2), which Python does not have. None: the kernel or the file system does not tell."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    buffer = ctypes.create_string_buffer(_STATX.size)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, buffer) != 0:
        return None
    mask, seconds, ns = _STATX.unpack(buffer)
    return int(seconds * _S + ns) if mask & _STATX_BTIME else None

"""Recognise copies of a WAL, which must not fire the original's timers a second time.

A file made together with the WAL contains its own inode number and birth time. A copy
of the file has others. A reboot, another container on the same volume, or moving the disk to
another host changes neither. A clone of the whole file system has the same values and cannot be
recognised.
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
from purgatoryd.shm_layout.files import write_durably
from purgatoryd.shm_layout.filesystems import filesystems
from purgatoryd.shm_layout.wal import segments, snapshots

NAME = "birth"

_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_STATX = struct.Struct("=I76xqI164x")
"""struct statx: stx_mask, and seconds and nanoseconds of stx_btime."""
_S = 1_000_000_000
_BYTES_MAX = 4096
"""Limit for reading the birth file, which is shorter."""


@dataclass(frozen=True, slots=True)
class Birth:
    """Inode number and birth time of a file; None = the file system does not provide it."""

    inode: int | None
    """None on FUSE, which may number its files again at each mount."""
    born_wall_ns: int | None

    def __str__(self) -> str:
        born = "unknown" if self.born_wall_ns is None else f"{self.born_wall_ns} ns"
        return f"inode {self.inode}, birth time {born}"

    def differs(self, other: Birth) -> bool:
        """True if both inode numbers are known and differ, or if both birth times are known
        and differ."""
        pairs = ((self.inode, other.inode), (self.born_wall_ns, other.born_wall_ns))
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def refuse_copy(directory: Path, *, as_restored: bool) -> None:
    """Raise WalCopied if a WAL is a copy, unless `as_restored`.

    A WAL without a birth file counts as an original and gets one. So a user who has removed the
    file can still start the daemon.
    """
    path = directory / NAME
    try:
        with open(path, "rb", opener=_open_file) as file:
            written, found = _read(file), _birth_of(file, path)
    except FileNotFoundError:
        if segments(directory) or snapshots(directory):
            log.warning(f"{path} is missing: the WAL counts as an original; writing a new file")
        record_birth(directory)
        return
    if written.differs(found) and not as_restored:
        raise WalCopied(str(directory), str(written), str(found))


def record_birth(directory: Path) -> None:
    """Write the birth file, which makes the WAL in this folder an original."""

    def write(file: BinaryIO) -> str:
        birth = _birth_of(file, directory)
        file.write(json.dumps(asdict(birth)).encode() + b"\n")
        return NAME

    write_durably(directory / f"{NAME}.new", write)


def _open_file(name: str, flags: int) -> int:
    """Open a regular file. Raises BadPath for anything else. O_NONBLOCK keeps the call from waiting
    if `name` is a FIFO."""
    fd = os.open(name, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise BadPath(name, "is not a regular file: remove it")


def _read(file: BinaryIO) -> Birth:
    """Read the birth file. Content that cannot be parsed gives inode 0, which no file has."""
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
    """Return the birth time from statx(2), which Python lacks; None if it is not available."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    buffer = ctypes.create_string_buffer(_STATX.size)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, buffer) != 0:
        return None
    mask, seconds, ns = _STATX.unpack(buffer)
    return int(seconds * _S + ns) if mask & _STATX_BTIME else None

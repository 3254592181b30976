"""The status file of a deployment, or of a daemon that starts: a small file next to the sockets.

A daemon that serves publishes its state in the header of its arena. The supervisor of shards has no
arena, and a daemon in recovery has none yet. A status file has the same fields as the header, so
that readers can use either.
"""

from __future__ import annotations

import enum
import errno
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from purgatoryd.shm_layout.arena import NONE_NS, Reader
from purgatoryd.shm_layout.errors import PermissionDenied, TableBroken
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import ClockKind, DaemonState, Degraded
from purgatoryd.shm_layout.paths import Paths
from purgatoryd.shm_layout.shm import ArenaFile

MODE = 0o640
"""Mode of the file. The daemon's Unix group can read it, as it can read the arenas."""


class Cause(enum.StrEnum):
    """The reason why a deployment is degraded: the condition of a shard."""

    RESTARTING = "shard_restarting"
    CRASH_LOOPING = "shard_crash_looping"
    SILENT = "shard_silent"
    DEGRADED = "shard_degraded"


class Trouble(NamedTuple):
    """The problem of a shard: a code for programs and a text for people."""

    cause: Cause
    text: str


@dataclass(frozen=True)
class StatusRecord:
    """State of a deployment, or of a daemon that starts. Times are CLOCK_BOOTTIME."""

    daemon_state: int
    daemon_pid: int
    """Pid of the daemon; 0 if it has stopped."""
    daemon_since_boot_ns: int
    """Time at which the daemon entered its state."""
    heartbeat_boot_ns: int
    """Time of the last heartbeat, sent by the loop or during the start."""
    causes: Sequence[str] = ()
    """Values of Cause that apply to at least one shard, each value once."""
    reasons: Sequence[str] = ()
    """Reasons as text, one for each shard with a problem."""
    shards: int = 0
    serving: int = 0
    """Number of shards that are ready and answer."""
    restarts: int = 0
    """Number of restarts of shards since the deployment started."""
    log_dropped: int = 0
    """Number of log messages that the process of the deployment dropped."""

    epoch: ClassVar[int] = 0
    next_deadline_ns: ClassVar[int] = NONE_NS
    """Next deadline: always none, because only shards have deadlines."""
    clock_kind: ClassVar[int] = ClockKind.BOOT
    daemon_why: ClassVar[Degraded] = Degraded(0)


class StatusFile:
    """The status file of the deployment or daemon `name`. Only that deployment or daemon
    writes it."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.status"
        self._new = directory / f"{name}.status.new"

    @property
    def header(self) -> StatusRecord:
        """The current content.

        Raises TableBroken, PermissionDenied, OSError, and FileNotFoundError if the file was not
        written since the host booted.
        """
        try:
            with self._path.open("rb") as file:
                text, written_ns = file.read(), os.fstat(file.fileno()).st_mtime_ns
            found = StatusRecord(**json.loads(text))
            DaemonState(found.daemon_state)
        except PermissionError as error:
            raise PermissionDenied(str(self._path)) from error
        except (ValueError, TypeError) as error:
            raise TableBroken(str(self._path), f"is not a status file: {error!r}") from error
        if written_ns < HOST.wall_ns() - HOST.boot_ns():
            raise FileNotFoundError(errno.ENOENT, "was written before this boot", str(self._path))
        return found

    def write(self, record: StatusRecord) -> None:
        """Replace the content atomically. Raises OSError."""
        with open(self._new, "wb", opener=_readable) as file:
            file.write(json.dumps(asdict(record)).encode())
        self._new.rename(self._path)

    def remove(self) -> None:
        """Remove the file. Raises OSError."""
        for path in (self._path, self._new):
            path.unlink(missing_ok=True)


class DaemonStatus:
    """The header of a daemon: from its status file until it serves, then from its arena."""

    def __init__(self, paths: Paths, arena: Reader | None = None) -> None:
        """`arena`: the arena, if the caller has already opened it."""
        self._file = StatusFile(paths.directory, paths.name)
        self._name = paths.arena
        self._arena = arena

    @property
    def header(self) -> Any:
        """The current header. Raises TableBroken, and the errors of Reader if there is neither a
        status file nor an arena."""
        with suppress(OSError):
            return self._file.header
        if self._arena is None:
            self._arena = Reader(ArenaFile.open(self._name, read_only=True))
        return self._arena.header

    def close(self) -> None:
        """Unmap the arena."""
        if self._arena is not None:
            self._arena.close()


def _readable(path: str, flags: int) -> int:
    fd = os.open(path, flags, MODE)
    os.fchmod(fd, MODE)  # because the umask has cleared bits of the mode
    return fd

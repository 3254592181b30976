"""How a deployment of shards stands, and a daemon while it starts: a small file next to the
sockets.

A daemon that serves tells that in the header of its arena. Who runs the shards has no arena, and
who recovers has none yet, or one that may not become its own. A status file has the header's
fields, under their names, for who looks at either.
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
"""The group reads it, as it reads the arenas."""


class Cause(enum.StrEnum):
    """Why a deployment does not serve as it should: what one of its shards is or does."""

    RESTARTING = "shard_restarting"
    CRASH_LOOPING = "shard_crash_looping"
    SILENT = "shard_silent"
    DEGRADED = "shard_degraded"


class Trouble(NamedTuple):
    """What is wrong with a shard, for programs and in words."""

    cause: Cause
    text: str


@dataclass(frozen=True)
class StatusRecord:
    """A deployment, or a daemon that starts, at one moment. Times are CLOCK_BOOTTIME."""

    daemon_state: int
    daemon_pid: int
    """0 = it has stopped."""
    daemon_since_boot_ns: int
    """When it entered its state."""
    heartbeat_boot_ns: int
    """When its loop moved last, or its start."""
    causes: Sequence[str] = ()
    """Why a deployment does not serve as it should: each value of Cause that holds, once."""
    reasons: Sequence[str] = ()
    """The same in words, for each shard."""
    shards: int = 0
    serving: int = 0
    """Of its shards, those that are ready and answer."""
    restarts: int = 0
    """Starts of shards that had ended, since its own."""
    log_dropped: int = 0
    """Log messages that its process dropped."""

    epoch: ClassVar[int] = 0
    next_deadline_ns: ClassVar[int] = NONE_NS
    """Deadlines are the shards' own."""
    clock_kind: ClassVar[int] = ClockKind.BOOT
    daemon_why: ClassVar[Degraded] = Degraded(0)


class StatusFile:
    """The file of the deployment or daemon `name`, which is the only writer."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.status"
        self._new = directory / f"{name}.status.new"

    @property
    def header(self) -> StatusRecord:
        """What stands there now. Raises TableBroken, PermissionDenied, OSError, and
        FileNotFoundError if nothing does that was written since the host began."""
        try:
            with self._path.open("rb") as file:
                text, written_ns = file.read(), os.fstat(file.fileno()).st_mtime_ns
            found = StatusRecord(**json.loads(text))
            DaemonState(found.daemon_state)
        except PermissionError as error:
            raise PermissionDenied(str(self._path)) from error
        except (ValueError, TypeError) as error:
            raise TableBroken(str(self._path), f"says no state: {error!r}") from error
        if written_ns < HOST.wall_ns() - HOST.boot_ns():
            raise FileNotFoundError(errno.ENOENT, "is of an earlier boot", str(self._path))
        return found

    def write(self, record: StatusRecord) -> None:
        """Replaces what stands there, at once. Raises OSError."""
        with open(self._new, "wb", opener=_readable) as file:
            file.write(json.dumps(asdict(record)).encode())
        self._new.rename(self._path)

    def remove(self) -> None:
        """From now on nothing stands there. Raises OSError."""
        for path in (self._path, self._new):
            path.unlink(missing_ok=True)


class DaemonStatus:
    """How a daemon stands: in its file from the start until it serves, and then in its arena."""

    def __init__(self, paths: Paths, arena: Reader | None = None) -> None:
        """`arena`: if the caller has it open."""
        self._file = StatusFile(paths.directory, paths.name)
        self._name = paths.arena
        self._arena = arena

    @property
    def header(self) -> Any:
        """As it is now. Raises TableBroken, and what Reader does if there is neither."""
        with suppress(OSError):
            return self._file.header
        if self._arena is None:
            self._arena = Reader(ArenaFile.open(self._name, read_only=True))
        return self._arena.header

    def close(self) -> None:
        """Unmaps the arena."""
        if self._arena is not None:
            self._arena.close()


def _readable(path: str, flags: int) -> int:
    fd = os.open(path, flags, MODE)
    os.fchmod(fd, MODE)  # the umask took bits away
    return fd

"""How a deployment of shards stands, as it tells itself: a small file beside its sockets.

Each shard tells that in the header of its arena. Who runs the shards has no arena, so a standing
has the header's fields, under their names, for who looks at either.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from purgatoryd.shm_layout.arena import NONE_NS
from purgatoryd.shm_layout.errors import TableBroken
from purgatoryd.shm_layout.layout import ClockKind, DaemonState, Degraded

MODE = 0o640
"""The group reads it, as it reads the arenas."""


class Cause(enum.StrEnum):
    """Why a deployment does not serve as it should: what one of its shards is or does."""

    RESTARTING = "shard_restarting"
    GIVEN_UP = "shard_given_up"
    SILENT = "shard_silent"
    DEGRADED = "shard_degraded"


class Trouble(NamedTuple):
    """What is wrong with a shard, for programs and in words."""

    cause: Cause
    text: str


@dataclass(frozen=True)
class Standing:
    """A deployment at one moment. Times are CLOCK_BOOTTIME."""

    daemon_state: int
    causes: Sequence[str]
    """Why it does not serve as it should: each value of Cause that holds, once."""
    reasons: Sequence[str]
    """The same in words, for each shard."""
    daemon_pid: int
    """0 = it has stopped."""
    daemon_since_boot_ns: int
    """When it entered its state."""
    heartbeat_boot_ns: int
    """When its loop moved last."""
    shards: int
    serving: int
    """Of its shards, those that are ready and answer."""
    restarts: int
    """Starts of shards that had ended, since its own."""

    epoch: ClassVar[int] = 0
    next_deadline_ns: ClassVar[int] = NONE_NS
    """Deadlines are the shards' own."""
    clock_kind: ClassVar[int] = ClockKind.BOOT
    daemon_why: ClassVar[Degraded] = Degraded(0)


class StandingFile:
    """The file of the deployment `name`; who runs it is the only writer."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.state"

    @property
    def header(self) -> Standing:
        """What stands there now. Raises TableBroken, OSError, and FileNotFoundError if nothing
        does that was written since the host began."""
        with self._path.open("rb") as file:
            text, written_ns = file.read(), os.fstat(file.fileno()).st_mtime_ns
        try:
            found = Standing(**json.loads(text))
            DaemonState(found.daemon_state)
        except (ValueError, TypeError) as error:
            raise TableBroken(str(self._path), f"says no state: {error!r}") from error
        if written_ns < time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME):
            raise FileNotFoundError(errno.ENOENT, "is of an earlier boot", str(self._path))
        return found

    def write(self, standing: Standing) -> None:
        """Replaces what stands there, at once. Raises OSError."""
        new = self._path.with_name(f"{self._path.name}.new")
        with open(new, "wb", opener=_readable) as file:
            file.write(json.dumps(asdict(standing)).encode())
        new.rename(self._path)


def _readable(path: str, flags: int) -> int:
    fd = os.open(path, flags, MODE)
    os.fchmod(fd, MODE)  # the umask took bits away
    return fd

"""Sessions of a daemon, read from its private arena file. They show the daemon's user and root
which clients are slow.

The result contains no secret with which another process could act for a session, and no key or
answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Handle
from purgatoryd.shm_layout.errors import ArenaMismatch
from purgatoryd.shm_layout.layout import LAYOUT_ID, size_of
from purgatoryd.shm_layout.shm import ArenaFile

_NOTHING_ENDED_NS = -(2**63)


@dataclass(frozen=True, slots=True)
class Session:
    """A client as the daemon sees it."""

    uid: int
    pid: int
    """Pid of the client; 0 if it is on another host."""
    in_flight: int
    """Number of records of the current batch that are not applied yet."""
    unacknowledged: int
    """Number of outcomes and CHECK requests in the client's inbox."""
    oldest_ns: int
    """Waiting time of the oldest outcome in the client's inbox; 0 if the inbox is empty."""
    silent_ns: int
    """Time since the client's last batch."""
    worker: str = ""
    """Name that the client gave itself; empty = none."""


class Sessions:
    """The session table of the daemon whose arena is `arena`, read-only.

    Raises ArenaMissing, PermissionDenied, and ArenaMismatch if the file belongs to another arena.
    """

    def __init__(self, name: str, arena: Handle) -> None:
        self._arena = arena
        self._file = ArenaFile.open(name, read_only=True)
        self._base = ffi.from_buffer(self._file.memory)
        if not self._whole() or bytes(self._head.uuid) != arena.uuid:
            self.close()
            raise ArenaMismatch(name, "identity", arena.uuid.hex(), "another")

    def _whole(self) -> bool:
        """Return whether the file is a complete private arena file. This is checked because another
        user may have replaced the file."""
        if self._file.bytes < size_of("pg_private") or self._head.layout_id != LAYOUT_ID:
            return False
        rows = int(self._head.sessions) * size_of("pg_session")
        return int(self._head.rows_offset) + rows <= self._file.bytes

    @property
    def _head(self) -> Any:
        return ffi.cast("struct pg_private *", self._base)

    @property
    def capacity(self) -> int:
        """Number of session slots."""
        return int(self._head.sessions)

    def read(self, now_ns: int, boot_ns: int) -> list[Session]:
        """Return all sessions, the slowest first. `now_ns` is on the arena's clock, `boot_ns` on
        CLOCK_BOOTTIME."""
        rows = ffi.cast("struct pg_session *", self._base + self._head.rows_offset)
        found = [
            self._session(rows[i], now_ns, boot_ns) for i in range(self.capacity) if rows[i].id
        ]
        return sorted(found, key=lambda s: (s.oldest_ns, s.unacknowledged, s.in_flight))[::-1]

    def _session(self, row: Any, now_ns: int, boot_ns: int) -> Session:
        ended_ns = int(lib.pg_outcome_ended_ns(self._arena.struct, row.inbox_head))
        return Session(
            int(row.uid),
            int(row.pid),
            max(0, int(row.count) - int(row.applied)) if row.current else 0,
            int(row.inbox_count),
            max(0, now_ns - ended_ns) if ended_ns != _NOTHING_ENDED_NS else 0,
            max(0, boot_ns - int(row.used_boot_ns)),
            bytes(ffi.buffer(row.worker))[: int(row.worker_len)].decode(errors="replace"),
        )

    def close(self) -> None:
        """Unmap the file."""
        ffi.release(self._base)
        self._file.close()

"""What is reported to the WAL about answers to batches: when they were there, and with the
socket."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.layout import Message

_HEAD = struct.Struct("<6xHQQ6xH")  # message, session, sequence, error of a struct pg_frame


@dataclass(slots=True)
class _Run:
    """Answers to batches of one session that follow one another."""

    first: int
    count: int
    built_boot_ns: int
    handed_boot_ns: int


class Replies:
    """Answers that no record tells of yet; those of a session share one."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._runs: dict[int, _Run] = {}
        self._ended: deque[tuple[int, _Run]] = deque()  # the session got others since

    def __bool__(self) -> bool:
        return bool(self._runs or self._ended)

    def add(self, reply: Any, built_boot_ns: int, handed_boot_ns: int) -> None:
        """Takes note of an answer that the socket has; of reads and refusals none is taken."""
        message, session, sequence, error = _HEAD.unpack_from(reply)
        if message != Message.BATCH or error:
            return
        run = self._runs.get(session)
        if run is not None and sequence == run.first + run.count:
            run.count += 1
            run.handed_boot_ns = handed_boot_ns
            return
        if run is not None:
            self._ended.append((session, run))
        self._runs[session] = _Run(sequence, 1, built_boot_ns, handed_boot_ns)

    def append(self) -> None:
        """Appends the records, as far as there is space; the others wait for the next time."""
        self._ended += self._runs.items()
        self._runs.clear()
        while self._ended and not self._arena.wal_buffer_full:
            session, run = self._ended.popleft()
            self._arena.replied(
                session, run.first, run.count, run.built_boot_ns, run.handed_boot_ns
            )

    def forget(self) -> None:
        """No record will tell of them: the WAL has stopped."""
        self._runs.clear()
        self._ended.clear()

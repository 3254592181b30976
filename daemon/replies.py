"""REPLIED records of the WAL: when answers to batches were complete, and when they were sent."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

from purgatoryd.daemon.listeners.transport import Answered
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.layout import Message

_HEAD = struct.Struct("<6xHQQ6xH")  # message, session, sequence, error of a struct pg_frame


@dataclass(slots=True)
class _Run:
    """Answers to successive batches of one session."""

    first: int
    count: int
    built_boot_ns: int
    handed_boot_ns: int


class Replies:
    """Answers that have no REPLIED record yet. Successive answers of a session share a record."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._runs: dict[int, _Run] = {}
        self._ended: deque[tuple[int, _Run]] = deque()
        """Runs of answers that are complete, because the session's next answer did not continue the
        run."""

    def __bool__(self) -> bool:
        return bool(self._runs or self._ended)

    def add(self, reply: Any, built_boot_ns: int, handed_boot_ns: int) -> None:
        """Note an answer that was handed to the socket. Refusals, and answers to reads, are
        ignored."""
        message, session, sequence, error = _HEAD.unpack_from(reply)
        if message != Message.BATCH or error:
            return
        self.extend(Answered(session, sequence, 1, built_boot_ns, handed_boot_ns))

    def extend(self, answers: Answered) -> None:
        """Note successive answers of a session."""
        run = self._runs.get(answers.session)
        if run is not None and answers.first == run.first + run.count:
            run.count += answers.batches
            run.handed_boot_ns = answers.handed_boot_ns
            return
        if run is not None:
            self._ended.append((answers.session, run))
        self._runs[answers.session] = _Run(*answers[1:])

    def append(self) -> None:
        """Append as many records as the WAL buffer has space for; the other records wait."""
        self._ended += self._runs.items()
        self._runs.clear()
        while self._ended and not self._arena.wal_buffer_full:
            session, run = self._ended.popleft()
            self._arena.replied(
                session, run.first, run.count, run.built_boot_ns, run.handed_boot_ns
            )

    def forget(self) -> None:
        """Drop all answers, because the WAL has stopped."""
        self._runs.clear()
        self._ended.clear()

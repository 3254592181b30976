"""WAL segments on disk for the C core in private memory: group commit writes them, and `Walk` reads
them."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from core_driver import Core, Fault

from purgatoryd.shm_layout._core import ffi, lib

WAL_SEGMENT_BYTES: int = lib.PG_WAL_SEGMENT_MIN
WAL_BUFFER_BYTES: int = lib.PG_WAL_BUFFER_MIN


class Walked(NamedTuple):
    """Result of reading segments."""

    refused: bool  # the reader refused the last file
    damaged: bool  # records are missing
    torn: bool
    lsn: int
    lost: tuple[int, int]  # first and last lost LSN
    bad: tuple[int, int]  # first and last damaged byte
    groups: list[memoryview]  # frames of each complete group


class Walk:
    """A reader of segments that are given one after another."""

    def __init__(self) -> None:
        self.w = ffi.new("struct pg_walk *")
        self._why = ffi.new("struct pg_fault *")

    def read(self, segments: Iterable[Any]) -> Walked:
        """Read whole files, given as writable buffers. Stop at the first file that the reader
        refuses."""
        refused, groups = False, []
        for segment in segments:
            view = memoryview(segment)
            refused = not lib.pg_walk_segment(
                self.w, ffi.from_buffer(segment), len(view), self._why
            )
            if refused:
                break
            while (frame := lib.pg_walk_next(self.w)) != ffi.NULL:
                groups.append(view[self.w.next - frame.bytes : self.w.at])
                self.w.next = self.w.at
        w = self.w
        return Walked(
            refused, w.state == lib.PG_WALK_DAMAGED, w.state == lib.PG_WALK_TORN, w.lsn,
            (w.lost_from, w.lost_to), (w.bad_from, w.bad_to), groups,
        )  # fmt: skip


def segment_files(directory: Path) -> list[Path]:
    """Return the segment files of a folder, oldest first."""
    return sorted(directory.glob("*.wal"))


class GroupCommit:
    """Group commit of a core with a WAL. It continues the segments in the directory."""

    def __init__(self, core: Core, directory: Path) -> None:
        self.wal_buffer = lib.pg_wal_buffer_of(core.a)
        self.core = core
        self._memory = ffi.new("uint64_t[]", lib.pg_group_commit_bytes() // 8 + 1)
        self.c = ffi.cast("struct pg_group_commit *", self._memory)
        self._why = ffi.new("struct pg_fault *")
        walk, files = Walk(), [bytearray(path.read_bytes()) for path in segment_files(directory)]
        walk.read(files)
        self._need(
            lib.pg_group_commit_open(
                self.c,
                core.a,
                os.fsencode(directory),
                WAL_SEGMENT_BYTES,
                walk.w,
                ffi.NULL,
                self._why,
            )
        )

    def _need(self, done: int) -> None:
        if not done:
            raise Fault(self._why)

    def commit(self) -> int:
        """Commit all appended records as one group. Return the newest LSN on disk."""
        while lib.pg_group_commit_iterate(self.c):
            pass
        assert self.wal_buffer.state == lib.PG_WAL_RUNNING
        return int(self.wal_buffer.committed_lsn)

    def start(self) -> None:
        """Start the group-commit thread."""
        self._need(lib.pg_group_commit_start(self.c, self._why))

    def kick(self) -> None:
        lib.pg_group_commit_kick(self.c)

    def wait(self, lsn: int) -> None:
        """Wait until a record is on disk."""
        descriptor = lib.pg_group_commit_fd(self.c)
        while self.wal_buffer.committed_lsn < lsn:
            select.select([descriptor], [], [])
            os.eventfd_read(descriptor)

    def close(self) -> None:
        lib.pg_group_commit_stop(self.c)
        lib.pg_group_commit_close(self.c)

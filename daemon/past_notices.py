"""Read notices that the replay buffer has dropped from the files of a WAL.

The files are mapped, and each is read once, by whole commit groups, with all checks. After that the
C core searches the groups for the notices of a topic, and for the records with their keys and
payloads (see past_notices.c). A mapped file keeps its space on the disk, so the maps of deleted
files are dropped at each look.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import WalError
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import ClockKind, WalkState
from purgatoryd.shm_layout.wal import File, Walk, segments, snapshots

MOST = 8192
"""Largest number of notices of one page."""
EVERY = 2**64 - 1
LOOK_S = 0.5
"""Time between two looks at the files, in seconds."""


class Group(NamedTuple):
    """Records of one commit group in a mapped file."""

    lsn: int
    """LSN of the first record."""
    frames: Any
    bytes: int


class PastFile:
    """A mapped segment or snapshot."""

    def __init__(self, file: File) -> None:
        self.path = file.path
        self.lsn = file.lsn
        with file.path.open("rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._memory = ffi.from_buffer(self._map)
        self._firsts: dict[tuple[int, int], tuple[int | None, bool]] = {}
        self.read()

    def read(self) -> None:
        """Find the commit groups that are in the file. Raises WalError."""
        walk = Walk()
        walk.enter(self.path, self._memory)
        self.groups = [Group(int(_frame(at).lsn), at, size) for at, size in walk.groups()]
        self.is_whole = walk.state == WalkState.SEALED
        header = walk.struct.header
        self.boot_id = bytes(header.boot_id)
        self.offset_ns = int(header.wall_ns - header.boot_ns)
        """Wall time minus the arena's clock at the start of the file."""
        self._firsts.clear()

    def first(self, row: int, incarnation: int) -> tuple[int | None, bool]:
        """Return (sequence of the first notice of a topic in this file, whether the file contains
        the creation of the topic)."""
        if (row, incarnation) not in self._firsts:
            search = Search(row, incarnation, 1, EVERY, 1)
            search.look(self.groups)
            first = int(search.found[0].sequence) if search.struct.count else None
            self._firsts[row, incarnation] = first, bool(search.struct.born)
        return self._firsts[row, incarnation]

    def group_of(self, lsn: int) -> Group | None:
        """Return the group with a record; None if it is not in this file."""
        number = bisect.bisect_right(self.groups, lsn, key=lambda group: group.lsn)
        return self.groups[number - 1] if number else None

    def close(self) -> None:
        """Unmap the file."""
        self.groups.clear()
        ffi.release(self._memory)
        self._map.close()


def _frame(at: Any) -> Any:
    return ffi.cast("struct pg_frame_head *", at)


class Search:
    """A search for notices of a topic in successive groups."""

    def __init__(self, row: int, incarnation: int, first: int, last: int, capacity: int) -> None:
        self.found = ffi.new("struct pg_past[]", capacity)
        self.struct = ffi.new(
            "struct pg_past_search *",
            {
                "topic": row, "capacity": capacity, "incarnation": incarnation, "first": first,
                "last": last, "found": self.found,
            },
        )  # fmt: skip

    def look(self, groups: list[Group]) -> bool:
        """Search groups. Returns True once the search is complete."""
        struct = self.struct
        return any(lib.pg_past_find(struct, group.frames, group.bytes) for group in groups)


class PastNotices:
    """The notices in the WAL of one daemon."""

    def __init__(self, directory: Path, host: Host = HOST) -> None:
        self._directory = directory
        self._host = host
        self._files: dict[Path, PastFile] = {}
        self._look_at_s = 0.0

    def look(self) -> None:
        """Map new files, drop deleted files, and read what was appended. A damaged file counts as
        missing."""
        self._look_at_s = self._host.monotonic_s() + LOOK_S
        there = [*segments(self._directory), *snapshots(self._directory)]
        for path in self._files.keys() - {file.path for file in there}:
            self._files.pop(path).close()
        for file in there:
            with suppress(WalError, OSError, ValueError):
                self._map(file)

    def _map(self, file: File) -> None:
        known = self._files.get(file.path)
        if known is None:
            self._files[file.path] = PastFile(file)
        elif not known.is_whole:
            known.read()

    def _of(self, suffix: str) -> list[PastFile]:
        found = (file for path, file in self._files.items() if path.suffix == suffix)
        return sorted(found, key=lambda file: file.lsn)

    def page(
        self, reader: Reader, row: int, incarnation: int, first: int, last: int, head: Any, out: Any
    ) -> int:
        """Write notices of a topic from `first` on, or from the first one that is left, as many as
        fit into `out`. Returns the number of bytes. `head`: struct pg_notices; the call sets
        `first` and `count`."""
        if self._host.monotonic_s() >= self._look_at_s:
            self.look()
        search = Search(row, incarnation, first, last, MOST)
        shifts = _Shifts(reader)
        for file in self._from(row, incarnation, first):
            before = int(search.struct.count)
            done = search.look(file.groups)
            for number in range(min(before, search.struct.count), search.struct.count):
                search.found[number].shift_ns = shifts.of(file)
            if done:
                break
        self._match(search, shifts)
        return _written(search, first, head, out)

    def _from(self, row: int, incarnation: int, first: int) -> list[PastFile]:
        """Return the segments from the one with notice `first` on. Without it, the snapshots come
        first: they contain notices that were not sent when they were written."""
        files = self._of(".wal")
        for number in range(len(files) - 1, -1, -1):
            sequence, born = files[number].first(row, incarnation)
            if born or (sequence is not None and sequence <= first):
                return files[number:]
        return [*self._of(".snapshot"), *files]

    def _match(self, search: Search, shifts: _Shifts) -> None:
        files, found = self._of(".wal"), search.found
        starts = [file.lsn for file in files]
        missing = []
        for number in range(search.struct.count):
            past = found[number]
            if past.origin == ffi.NULL and not self._by_lsn(past, files, starts, shifts):
                missing.append(number)
        missing.sort(key=lambda number: int(found[number].ticket))
        if missing:
            order = ffi.new("uint32_t[]", missing)
            for file in [*self._of(".snapshot")[::-1], *files]:
                for group in file.groups:
                    lib.pg_past_match(
                        found, order, len(missing), group.frames, group.bytes, shifts.of(file)
                    )

    def _by_lsn(self, past: Any, files: list[PastFile], starts: list[int], shifts: _Shifts) -> bool:
        number = bisect.bisect_right(starts, past.origin_lsn) - 1
        if not past.origin_lsn or number < 0:
            return False
        file = files[number]
        group = file.group_of(past.origin_lsn)
        if group is None:
            return False
        past.origin = lib.pg_past_origin(group.frames, group.bytes, past.origin_lsn, past.ticket)
        past.origin_shift_ns = shifts.of(file)
        return bool(past.origin != ffi.NULL)

    def close(self) -> None:
        """Unmap all files."""
        while self._files:
            self._files.popitem()[1].close()


class _Shifts:
    """The difference between the clock of a file and the present clock of the arena, in ns. The
    clock is another one after each boot of the host."""

    def __init__(self, reader: Reader) -> None:
        header = reader.header
        self._virtual = int(header.clock_kind) == ClockKind.VIRTUAL
        self._boot_id = bytes(header.boot_id)
        self._offset_ns = int(header.wall_offset_ns)

    def of(self, file: PastFile) -> int:
        """Return the number of ns to add to the times in a file."""
        same = self._virtual or file.boot_id == self._boot_id
        return 0 if same else file.offset_ns - self._offset_ns


def _written(search: Search, first: int, head: Any, out: Any) -> int:
    """Write the first notices that follow each other and have an origin."""
    count = int(search.struct.count)
    for start in _starts(search, count):
        head.first = search.found[start].sequence
        used = lib.pg_past_write(search.found + start, count - start, head, out, len(out))
        if head.count:
            return int(used)
    head.first, head.count = first, 0
    return 0


def _starts(search: Search, count: int) -> Iterator[int]:
    return (n for n in range(count) if search.found[n].origin != ffi.NULL)

"""Recover an arena from files: a snapshot, and the records of the WAL after it.

The files are read from the disk, not from the page cache: after a failed sync the cache may contain
groups that are not on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from purgatoryd.daemon.log import log
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena, broken
from purgatoryd.shm_layout.disk import Disk
from purgatoryd.shm_layout.errors import ArenaBroken, BadPath, WalDamaged, WalError
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.wal import (
    FIRST_BYTES,
    Buffer,
    File,
    Walk,
    around,
    has_header,
    is_other_version,
    refuse_lost_segments,
    segments,
    snapshots,
    uuid_of,
)

Make = Callable[[Mapping[str, Any]], Arena]
"""Makes a new arena with at least the given sizes, which are fields of struct pg_config."""
Clock = Callable[[Walk], tuple[int, int, int]]
"""Returns (now_ns, shift_ns, wall_offset_ns) for the end of a walk: the arena's time, the shift to
add to all times, and wall time minus the arena's time."""
Step = Callable[[str], None]
"""Called with a text at each step of a long task. A step takes bounded time."""


@dataclass(frozen=True, slots=True)
class Way:
    """Parameters of a recovery. With `force`, a damaged WAL is recovered up to the damage."""

    make: Make
    clock: Clock
    step: Step
    host: Host
    force: bool


_OF_BLOBS = (
    "payload_bytes", "watches", "bulk_loads", "bulk_load_blocks", "schedules", "cursors",
)  # fmt: skip
_MISSING = "confirmed records are missing"


def recover(directory: Path, way: Way) -> Arena:
    """Return the arena of a WAL, recovered from its newest undamaged snapshot and the records after
    it.

    Raises WalDamaged or WalMismatch with the first reason, or ArenaTooLarge.
    """
    found = snapshots(directory, way.host.disk)
    if not found:
        raise WalDamaged(str(directory), "no snapshot is left", 0, 0, 0, 0)
    if not way.force:
        refuse_lost_segments(directory, way.host.disk)
    *older, newest = found if way.force else _of_one_arena(found, way.host.disk)
    confirmed = 0 if way.force else newest.lsn - 1

    def restored(snapshot: File) -> Arena:
        return _restore(snapshot.path, _behind(directory, snapshot, way), way, confirmed)

    try:
        return restored(newest)
    except WalError as error:
        lost = isinstance(error, WalDamaged) and error.detail == _MISSING
        if not older or (lost and not way.force) or is_other_version(error):
            raise
        first = error
    log.warning(f"{first}; recovering from the older snapshot {older[-1].path.name}")
    try:
        return restored(older[-1])
    except WalError:
        raise first from None


def _of_one_arena(found: Sequence[File], disk: Disk) -> list[File]:
    """Return the snapshots of one arena: the arena of the newest snapshot with an undamaged header.
    Snapshots with a damaged header are included, because they may belong to this arena."""
    sound = [file for file in found if has_header(file.path, disk)]
    uuid = uuid_of(sound[-1].path, disk) if sound else b""
    return [file for file in found if file not in sound or uuid_of(file.path, disk) == uuid]


def import_file(path: Path, way: Way) -> Arena:
    """Return the arena of an export file. Raises the errors of recover()."""
    return _restore(path, [], replace(way, force=False), 0)


def _behind(directory: Path, snapshot: File, way: Way) -> list[Path]:
    """Return the segments with the records after a snapshot; with `force`, only the segments before
    the first damaged one.

    Raises WalDamaged if a segment after the snapshot belongs to another arena, because that arena's
    snapshot is missing. Damage to older segments is only logged.
    """
    disk = way.host.disk
    uuid = uuid_of(snapshot.path, disk)
    paths: list[Path] = []
    older, rest = around(segments(directory, disk), snapshot.lsn)
    _warn_of_headers(older, snapshot, disk)
    for file in rest:
        try:
            own = _is_own(file, uuid, snapshot.lsn, disk)
        except WalError as error:
            if not way.force:
                raise
            log.warning(f"{error}; recovering only the records before {file.path.name}")
            break
        if own and file.lsn <= snapshot.lsn:
            paths.clear()
        if own:
            paths.append(file.path)
    return paths


def _warn_of_headers(older: Sequence[File], snapshot: File, disk: Disk) -> None:
    """Warn of damaged headers of segments that are older than the snapshot. A segment of another
    version is not damaged."""
    buffer = Buffer(disk)
    for file in older:
        try:
            Walk().enter(file.path, buffer.read(file.path, FIRST_BYTES, direct=True))
        except WalDamaged as damage:
            log.warning(f"{damage.place}; nothing is lost, {snapshot.path.name} is newer")
        except (WalError, BadPath):
            pass


def _is_own(file: File, uuid: bytes, snapshot_lsn: int, disk: Disk) -> bool:
    """Return whether a segment belongs to the snapshot's arena. Raises WalDamaged for a later
    segment of another arena."""
    own = uuid_of(file.path, disk) == uuid
    if not own and file.lsn > snapshot_lsn:
        detail = "continues under another uuid, whose snapshot is missing"
        raise WalDamaged(str(file.path), detail, 0, file.bytes, file.lsn, 0)
    return own


class _NoSpace(Exception):
    """The parts of a snapshot need more space than the arena has. They were written at different
    times, so together they may hold more than the arena ever held."""


def _restore(snapshot: Path, behind: Sequence[Path], way: Way, confirmed: int) -> Arena:
    """Return the rebuilt arena of a snapshot and of the segments `behind` it.

    `confirmed`: LSN of the newest record that is known to have been on disk.
    """
    try:
        return _Restore(snapshot, way, 1).run(behind, confirmed)
    except _NoSpace:
        return _Restore(snapshot, way, 2).run(behind, confirmed)


class _Restore:
    """One attempt at a recovery. The new arena has `times` times the space of the old arena."""

    def __init__(self, snapshot: Path, way: Way, times: int) -> None:
        self._snapshot = snapshot
        self._way = way
        self._buffer = Buffer(way.host.disk)
        self._redo = ffi.new("struct pg_redo *")
        sizes = _sizes(snapshot, self._buffer)
        self._arena = way.make(sizes | {name: sizes[name] * times for name in _OF_BLOBS})

    def run(self, behind: Sequence[Path], confirmed: int) -> Arena:
        """Return the rebuilt arena. After an error the arena is closed."""
        try:
            walk = self._read([self._snapshot], Walk())
            if behind:
                walk = self._read_segments(behind, walk)
            self._refuse_part([self._snapshot, *behind][-1], confirmed)
            now_ns, shift_ns, wall_offset_ns = self._way.clock(walk)
            self._way.step("rebuilding")
            real_boot_ns = self._way.host.boot_ns()
            self._arena.redo_end(self._redo, now_ns, real_boot_ns, shift_ns, wall_offset_ns)
            return self._arena
        except BaseException:
            self._arena.close()
            raise

    def _read_segments(self, paths: Sequence[Path], before: Walk) -> Walk:
        """Redo segments, and return the walk at the end of the last one. Return `before`, the
        snapshot's walk, if not even the first header can be read, because a walk that has read no
        file has no time."""
        walk = Walk()
        try:
            return self._read(paths, walk)
        except WalError as error:
            if not self._way.force or is_other_version(error):
                raise
            last = self._redo.next_lsn - 1
            log.warning(f"{error}; recovering only the records up to {last}")
            return walk if walk.struct.bytes else before

    def _read(self, paths: Sequence[Path], walk: Walk) -> Walk:
        for path in paths:
            step = partial(self._way.step, f"redoing {path.name}")
            step()
            walk.enter(path, self._buffer.read(path, moved=step, direct=True))
            self._redo_file(path, walk)
            while damage := walk.skip(int(self._redo.next_lsn)):
                log.warning(f"{damage.place}; nothing is lost, {self._snapshot.name} is newer")
                self._redo_file(path, walk)
            walk.check()
        return walk

    def _redo_file(self, path: Path, walk: Walk) -> None:
        """Redo the records of a file up to its end or to damage."""
        try:
            self._arena.redo_file(self._redo, walk.struct)
        except ArenaBroken as error:
            if error.detail.startswith("no space"):
                raise _NoSpace from error
            detail = f"a record that cannot be redone: {error}"
            raise WalDamaged(str(path), detail, 0, 0, error.where, walk.lsn) from error

    def _refuse_part(self, last: Path, confirmed: int) -> None:
        """Raise WalDamaged if confirmed records are missing. The snapshot confirms all records up
        to its end, because it gets its name only once they are on disk."""
        redo = self._redo
        confirmed = max(confirmed, int(redo.end_lsn))
        if redo.next_lsn == 0 or redo.next_lsn <= confirmed:
            raise WalDamaged(str(last), _MISSING, 0, 0, redo.next_lsn, confirmed)


def _sizes(snapshot: Path, buffer: Buffer) -> dict[str, Any]:
    """Return the sizes of a snapshot's arena from its first record, as fields of struct
    pg_config."""
    config, fault, walk = ffi.new("struct pg_config *"), ffi.new("struct pg_fault *"), Walk()
    walk.enter(snapshot, buffer.read(snapshot, FIRST_BYTES, direct=True))
    for frames, size in walk.groups():
        if not lib.pg_redo_config(frames, size, config, fault):
            raise broken(fault)
        fields = ffi.typeof(config).item.fields
        return {n: int(getattr(config, n)) for n, f in fields if f.type.kind == "primitive"}
    raise WalDamaged(str(snapshot), "has no record", 0, 0, 0, 0)

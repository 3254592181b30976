"""The cold tier on disk: timers that are due far from now, as Parquet files in the lake.

    LAKE/cold/due_hour=2026-11-21-17/<version>-<n>.parquet   rows, sorted by deadline
    LAKE/cold_tombstones/<version>.parquet                   keys whose older rows are dead
    LAKE/cold/versions/<version>.json                        what counts; written last, by rename
    LAKE/cold/lock, LAKE/cold/writer, LAKE/windows/promoter  see below
    LAKE/windows/<window>.json, <window>/                    what was promoted, see promote.py

A *version* names every file that counts; the newest one is the tier. Each row and tombstone has
the number of the version that brought it: a tombstone ends the rows of its key that have a
smaller one. So a change is a tombstone and a new row in one version.

Locks, which the kernel takes back when their process ends: the *lock* is held for moments, around
a new version and around a few thousand timers on their way to the daemon; so a cancel stands
wholly before or wholly after these. Whoever writes rows holds the *writer*'s, whoever promotes
the *promoter*'s, all the time.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from purgatoryd.pipeline.continuity import newest_successor
from purgatoryd.pipeline.lake import checked, fields_of, intact, record
from purgatoryd.pipeline.locks import alone, in_turn
from purgatoryd.pipeline.schemas import TOMBSTONES
from purgatoryd.shm_layout.errors import BadPath, LakeBroken, WindowElsewhere, WindowTaken
from purgatoryd.shm_layout.files import (
    listed,
    make_private,
    private_folder,
    replace_durably,
    sync_directory,
    sync_file,
    write_durably,
)

HOUR_NS = 3600 * 10**9
ROWS = "cold"
TOMBS = "cold_tombstones"
WINDOWS = "windows"
TOMBSTONE_ROWS = 1 << 16
"""In a row group: what is read by several tasks has several."""
VERSIONS_KEPT = 16
WINDOWS_KEPT = 1000


class Frontier(NamedTuple):
    """Every row that is due before `end_ns` and came with a version up to `version` was
    promoted. It only ever moves forward."""

    end_ns: int
    version: int


NOTHING = Frontier(-(2**63), 0)


@dataclass(frozen=True, slots=True)
class ColdFile:
    """A file. `first_ns`, `last_ns`: its deadlines; `version`: the newest of its rows;
    `clean`: tombstones up to that version have been applied to it; `crc`: CRC-32 of its bytes."""

    path: str
    rows: int
    first_ns: int
    last_ns: int
    version: int
    clean: int
    bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Version:
    """All that counts. `tier`: names this tier alone. `bulk_loads`: which version each bulk load
    became, so that it is not loaded twice; `bulk_load_rows`: how many rows it had; `reserved`: the
    version of the bulk load under way, whose rows are not there yet. `undelivered`: tombstones of
    which the daemon was not notified. `replaced`: files of the version before a compaction, which
    may still have readers. `daemon`: whose parked timers it has; `wals`: by uuid of the arena, up
    to which LSN its records were read; `successors`: by uuid, the arena that took its place, and
    its parked timers."""

    number: int = 0
    tier: str = ""
    rows: tuple[ColdFile, ...] = ()
    tombstones: tuple[ColdFile, ...] = ()
    bulk_loads: dict[str, int] = field(default_factory=dict)
    bulk_load_rows: dict[str, int] = field(default_factory=dict)
    reserved: int = 0
    undelivered: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    daemon: str = ""
    wals: dict[str, int] = field(default_factory=dict)
    successors: dict[str, str] = field(default_factory=dict)

    def holder(self, arena: str) -> str:
        """The arena that has the parked timers of this one by now."""
        return newest_successor(self.successors, arena)

    @property
    def whole(self) -> int:
        """Up to here no row will ever come any more."""
        return self.reserved - 1 if self.reserved else self.number

    @property
    def paths(self) -> set[str]:
        """Of all files that must not be removed."""
        return {part.path for part in (*self.rows, *self.tombstones)} | set(self.replaced)

    def newer_tombstones(self, version: int) -> list[ColdFile]:
        """Those that came after a version."""
        return [part for part in self.tombstones if part.version > version]


@dataclass(frozen=True, slots=True)
class Window:
    """Rows on their way to a daemon, or there.

    It takes what `until` covers and `since` does not. `state`: "promoting" until the daemon
    has acknowledged every row, then "hot". `fencing_token`: of its newest run. `rows`: of its
    slice; `results`: how many of them the daemon answered how; `cancelled`: left out, for they were
    cancelled meanwhile.
    """

    id: str
    daemon: str
    since: Frontier
    until: Frontier
    state: str = "promoting"
    rows: int = 0
    cancelled: int = 0
    results: dict[str, int] = field(default_factory=dict)
    namespaces: tuple[str, ...] = ()
    fencing_token: int = 0


class Tier:
    """The cold tier of the lake in a folder; empty until something is loaded. Raises BadPath."""

    def __init__(self, lake: Path) -> None:
        if not lake.is_dir():
            raise BadPath(str(lake), "is not a directory")
        self.lake = lake.resolve()
        self._newest = (Path(), Version())

    @staticmethod
    def there(lake: Path) -> bool:
        """True if something was loaded into a lake's tier."""
        return bool(listed(lake / ROWS / "versions", "*.json"))

    @property
    def _versions(self) -> Path:
        return self.lake / ROWS / "versions"

    # ---- versions ------------------------------------------------------------------------

    def version(self) -> Version:
        """The newest. Raises LakeBroken, LakeMismatch."""
        there = listed(self._versions, "*.json")
        if not there:
            return Version()
        newest = there[-1]
        if self._newest[0] != newest:
            self._newest = newest, read_version(newest)
        return self._newest[1]

    def commit(self, version: Version) -> Version:
        """`version` under the next number, durably; call it under the lock."""
        tier = version.tier or uuid4().hex
        version = replace(version, number=version.number + 1, tier=tier)
        replace_durably(self._file_of_version(version.number), record(version, None))
        self._file_of_version(version.number - VERSIONS_KEPT).unlink(missing_ok=True)
        return version

    def _file_of_version(self, number: int) -> Path:
        return self._versions / f"{number:012d}.json"

    def lock(self) -> AbstractContextManager[None]:
        """Nobody else makes a version, or adds to the daemon, inside."""
        return in_turn(self._place(ROWS) / "lock")

    def writing(self) -> AbstractContextManager[None]:
        """Nobody else writes rows inside. Raises LakeInUse."""
        return alone(self._place(ROWS) / "writer")

    def promoting(self) -> AbstractContextManager[None]:
        """Nobody else promotes inside. Raises LakeInUse."""
        return alone(self._place(WINDOWS) / "promoter")

    def _place(self, name: str) -> Path:
        """One of the folders of the tier, which whoever writes makes."""
        for folder in (self._versions, self.lake / TOMBS, self.lake / WINDOWS):
            private_folder(folder)
        return self.lake / name

    # ---- files ---------------------------------------------------------------------------

    def staging(self, name: str) -> Path:
        """Where a writer puts rows before they get their names; one writer, one folder."""
        return self.lake / ROWS / f"{name}.new"

    def take_rows(self, staged: Path, number: int, clean: int) -> tuple[ColdFile, ...]:
        """Moves hour=N/*.parquet of `staged` to their places: durable, and not counting yet."""
        parts = []
        make_private(staged)
        for count, path in enumerate(sorted(staged.glob("hour=*/*.parquet"))):
            folder = self.lake / ROWS / f"due_hour={hour_text(int(path.parent.name[5:]))}"
            private_folder(folder)
            target = folder / f"{number:012d}-{count:05d}.parquet"
            sync_file(path)
            path.rename(target)
            parts.append(self._part(target, clean))
        for folder in {(self.lake / part.path).parent for part in parts}:
            sync_directory(folder)
        sync_directory(self.lake / ROWS)
        return tuple(parts)

    def take_tombstones(self, staged: Path, number: int) -> tuple[ColdFile, ...]:
        """The same with tombstones, *.parquet of `staged`."""
        parts = []
        make_private(staged)
        for count, path in enumerate(sorted(staged.glob("*.parquet"))):
            if pq.read_metadata(path).num_rows:
                target = self.lake / TOMBS / f"{number:012d}-{count:05d}.parquet"
                sync_file(path)
                path.rename(target)
                parts.append(self._part(target, number))
        sync_directory(self.lake / TOMBS)
        return tuple(parts)

    def file(self, part: ColdFile) -> Path:
        """A file, to be read. Raises LakeBroken."""
        return intact(self.lake / part.path, part.bytes)

    def add_tombstones(self, keys: pa.Table, number: int) -> tuple[ColdFile, ...]:
        """A durable file of tombstones for namespace, key_type, key; not counting yet."""
        if not keys.num_rows:
            return ()
        path = self.lake / TOMBS / f"{number:012d}.parquet"
        rows = keys.append_column("version", pa.repeat(pa.scalar(number), keys.num_rows))
        for name in ("daemon", "ticket"):
            rows = rows.append_column(name, pa.nulls(keys.num_rows))

        def write(file: object) -> str:
            pq.write_table(
                rows.cast(TOMBSTONES.arrow()), file, TOMBSTONE_ROWS, compression="lz4",
                use_dictionary=[name for name in TOMBSTONES.names if name != "key"],
            )  # fmt: skip
            return path.name

        write_durably(path.with_suffix(".new"), write)
        return (self._part(path, number),)

    def _part(self, path: Path, clean: int) -> ColdFile:
        about = pq.read_metadata(path)
        first, last = _bounds(about, "deadline_ns")
        _, version = _bounds(about, "version")
        name = str(path.relative_to(self.lake))
        return ColdFile(
            name, about.num_rows, first, last, version, clean, path.stat().st_size, crc_of(path)
        )

    def orphans(self, version: Version) -> list[Path]:
        """Files that no version names: what killed writers and compactions left behind."""
        counting = version.paths
        files = (
            *(self.lake / ROWS).glob("due_hour=*/*"),
            *(self.lake / ROWS).glob("*.new/**/*"),
            *(self.lake / TOMBS).glob("*"),
        )
        return sorted(
            path for path in files
            if path.is_file() and str(path.relative_to(self.lake)) not in counting
        )  # fmt: skip

    # ---- windows -------------------------------------------------------------------------

    def windows(self, last: int = WINDOWS_KEPT) -> list[Window]:
        """The newest, in the order in which they were promoted. Raises LakeBroken, LakeMismatch."""
        return [read_window(path) for path in self._window_files()[-last:]]

    def _window_files(self) -> list[Path]:
        return listed(self.lake / WINDOWS, "*.json")

    def forget_windows(self) -> None:
        """Removes all but the newest."""
        for path in self._window_files()[:-WINDOWS_KEPT]:
            path.unlink()

    def frontier(self, *states: str) -> Frontier:
        """How far windows in one of these states reach: the newest may be promoting, and the one
        before it is hot."""
        return max((w.until for w in self.windows(2) if w.state in states), default=NOTHING)

    def check_daemon(self, name: str) -> None:
        """All is of one daemon, so that a cancel knows where its timer may be. Raises
        WindowElsewhere if that is not the daemon `name`."""
        for daemon in self._daemons():
            if daemon != name:
                raise WindowElsewhere(daemon, name)

    @property
    def bound(self) -> bool:
        """True if all is of one daemon already."""
        return any(self._daemons())

    def _daemons(self) -> list[str]:
        daemons = (self.version().daemon, *(window.daemon for window in self.windows(1)))
        return [daemon for daemon in daemons if daemon]

    def unfinished(self) -> Window | None:
        """The window that is being promoted; there is one at most, the newest."""
        return next((w for w in self.windows(1) if w.state == "promoting"), None)

    def save_window(self, window: Window) -> None:
        """Durably, at once."""
        replace_durably(self._file_of(window), record(window))

    def check_fencing_token(self, window: Window) -> None:
        """Raises WindowTaken if a newer run has the window; under the lock."""
        if read_window(self._file_of(window)).fencing_token != window.fencing_token:
            raise WindowTaken(window.id, window.fencing_token)

    def _file_of(self, window: Window) -> Path:
        return self.lake / WINDOWS / f"{window.id}.json"

    def slice_of(self, window: Window) -> Path:
        """The folder of its rows while it is being promoted; it is there whole or not at all."""
        return self.lake / WINDOWS / window.id

    def drop_slices(self) -> None:
        """Removes those of windows that are not being promoted any more."""
        window = self.unfinished()
        for folder in (self.lake / WINDOWS).glob("*/"):
            if window is None or folder.name != window.id:
                shutil.rmtree(folder)


# ---- reading and writing -------------------------------------------------------------------


def read_version(path: Path) -> Version:
    """The version in a file. Raises LakeBroken, LakeMismatch."""
    try:
        fields = fields_of(path, Version)
        for name in ("rows", "tombstones"):
            fields[name] = tuple(ColdFile(**checked(part, ColdFile)) for part in fields[name])
        fields |= {name: tuple(fields[name]) for name in ("undelivered", "replaced")}
        found = Version(**fields)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LakeBroken(str(path), f"is not a version of the cold tier: {error!r}") from error
    if path.stem != f"{found.number:012d}":
        raise LakeBroken(
            str(path), f"contains version {found.number}, which does not match its name"
        )
    return found


def read_window(path: Path) -> Window:
    """The window in a file. Raises LakeBroken, LakeMismatch."""
    try:
        fields = fields_of(path, Window)
        fields |= {name: Frontier(*fields[name]) for name in ("since", "until")}
        fields["namespaces"] = tuple(fields["namespaces"])
        found = Window(**fields)
        known_here = all(isinstance(n, int) for n in (*found.since, *found.until))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LakeBroken(str(path), f"is not a window: {error!r}") from error
    if not known_here or found.state not in ("promoting", "hot") or path.stem != found.id:
        raise LakeBroken(str(path), "contains a window with an invalid state, time or name")
    return found


def hour_text(hour: int) -> str:
    """The name of an hour, counted from 1970, UTC."""
    return datetime.fromtimestamp(hour * 3600, UTC).strftime("%Y-%m-%d-%H")


def crc_of(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def newer_keys(tier: Tier, parts: Iterable[ColdFile]) -> pa.Table:
    """The tombstones of these files in one table. Raises LakeBroken."""
    files = [pq.read_table(tier.file(part), schema=TOMBSTONES.arrow()) for part in parts]
    return pa.concat_tables(files or [TOMBSTONES.arrow().empty_table()])


def _bounds(about: pq.FileMetaData, column: str) -> tuple[int, int]:
    """The least and the greatest value of a column; (0, 0) where the file has no such column."""
    names = about.schema.names
    if column not in names:
        return 0, 0
    index = names.index(column)
    groups = [about.row_group(i).column(index).statistics for i in range(about.num_row_groups)]
    return min(g.min for g in groups), max(g.max for g in groups)

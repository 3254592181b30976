"""A simulated daemon that keeps its timers in a dict, and a simulated process that dies after its
n-th effect."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import StructType

from purgatoryd.pipeline import cold, parked, promote, tier
from purgatoryd.pipeline.bulk_loading import Answers
from purgatoryd.pipeline.cold import KEY
from purgatoryd.pipeline.parked import Records
from purgatoryd.pipeline.schemas import COLD, TOMBSTONES
from purgatoryd.pipeline.tier import HOUR_NS, ColdFile, Tier, Window
from purgatoryd.pipeline.writer import FilesWriter, writer_of

Key = tuple[str, str, bytes]


def keys_in(rows: pa.Table) -> list[Key]:
    """Return (namespace, key_type, key) of each row."""
    return list(zip(*rows.select(KEY).to_pydict().values(), strict=True))


class TableDaemon:
    """A simulated daemon that keeps only the promises about bulk loads. `added`: all timers ever
    armed."""

    def __init__(self, name: str = "demo") -> None:
        self.name = name
        self.armed: dict[Key, int] = {}
        self.added: list[tuple[Key, int]] = []
        self.done: set[tuple[UUID, int]] = set()
        self.closed: set[UUID] = set()

    def open_bulk_load(
        self, bulk_load: UUID, namespaces: Iterable[str], fencing_token: int
    ) -> None:
        """Do nothing: the tests run only one bulk load at a time."""

    def add(self, bulk_load: UUID, rows: pa.Table, fencing_token: int) -> Answers:
        """Arm the timers that were not armed before."""
        counts: Counter[str] = Counter()
        for key, due, row in zip(
            keys_in(rows), rows["deadline_ns"].to_pylist(), rows["row"].to_pylist(), strict=True
        ):
            counts[self._add(bulk_load, key, due, row)] += 1
        return Answers(counts)

    def _add(self, bulk_load: UUID, key: Key, due: int, row: int) -> str:
        if bulk_load in self.closed or (bulk_load, row) in self.done:
            return "BULK_LOADED" if (bulk_load, row) in self.done else "CLOSED"
        self.done.add((bulk_load, row))
        if key in self.armed:
            return "KEPT"
        self.armed[key] = due
        self.added.append((key, due))
        return "ADDED"

    def uuids(self) -> list[str]:
        """Return a list with the uuid of the daemon's arena."""
        return ["0" * 32]

    def fire(self) -> None:
        """Fire all armed timers."""
        self.armed.clear()

    def close_bulk_load(
        self, bulk_load: UUID, namespaces: Iterable[str], fencing_token: int
    ) -> None:
        """Close a bulk load, so that none of its rows is armed from now on."""
        self.closed.add(bulk_load)

    def forget_bulk_load(self, bulk_load: UUID, namespaces: Iterable[str]) -> None:
        """Forget a bulk load and all its rows."""
        self.closed.discard(bulk_load)
        self.done = {(one, row) for one, row in self.done if one != bulk_load}

    def cancel(self, keys: pa.Table) -> dict[str, int]:
        """Cancel timers."""
        found = [self.armed.pop(key, None) is not None for key in keys_in(keys)]
        return dict(Counter("CANCELLED" if one else "UNKNOWN" for one in found))


class Killed(BaseException):
    """The simulated process has ended at this effect."""


class Mortal:
    """A simulated process that can die after each effect on disk or on the daemon.

    The n-th effect happens, but no later effect, not even in a `finally` block.
    """

    def __init__(self, patch: pytest.MonkeyPatch, daemon: object) -> None:
        self.effects = 0
        self.last = 0  # number of the last effect; 0: the process does not die
        self._patch = patch
        for where, name in (
            (tier, "replace_durably"), (tier, "write_durably"), (Path, "rename"),
            (Path, "unlink"), (shutil, "rmtree"),
            (daemon, "open_bulk_load"), (daemon, "add"), (daemon, "cancel"),
            (daemon, "close_bulk_load"), (daemon, "forget_bulk_load"),
        ):  # fmt: skip
            patch.setattr(where, name, self._counted(getattr(where, name)))

    def _counted(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            if self.last and self.effects >= self.last:
                raise Killed
            found = effect(*args, **named)
            self.effects += 1
            if self.effects == self.last:
                raise Killed
            return found

        return counted

    def run(self, action: Callable[[], object], last: int) -> bool:
        """Run an action until it has had `last` effects. Return True if it was killed."""
        self.effects, self.last = 0, last
        try:
            action()
        except Killed:
            return True
        finally:
            self.last = 0
        return False


# ---- replacements for Spark --------------------------------------------------------------------


def spark_of_python(patch: pytest.MonkeyPatch) -> None:
    """Replace Spark by functions that write the rows in Python. The rows of a bulk load are then a
    table with the columns of the tier."""
    patch.setattr(cold, "stage_bulk_load", _stage_bulk_load)
    patch.setattr(cold, "stage_keys", _stage_keys)
    patch.setattr(cold, "check_again", lambda *_: None)
    patch.setattr(cold, "check_keys", lambda *_, **__: None)
    patch.setattr(cold, "stage_left", _stage_left)
    patch.setattr(promote, "stage_slice", _stage_slice)
    patch.setattr(parked, "records", _records)
    patch.setattr(parked, "stage_parked", _stage_parked)


def _stage_bulk_load(rows: pa.Table, number: int, staged: Path) -> None:
    versions = pa.array([number] * rows.num_rows, pa.int64())
    _write_hours(rows.append_column("version", versions).to_pylist(), staged)


@dataclass
class Wal:
    """A simulated lake: rows of timers that were parked, and rows of parked timers that ended."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    ended: list[dict[str, Any]] = field(default_factory=list)


def _records(_: object, lake: Any, now: list[str], *__: object) -> Records:
    nothing: Any = None
    return Records(frozenset(now), {}, dict.fromkeys(now, 1), lake, nothing)


def _stage_parked(_: object, tier: Tier, found: Any, number: int, staged: Path) -> None:
    wal, known = found.shipped, {(row["key"], row["ticket"]) for row in all_rows(tier)}
    (daemon,) = found.arenas
    fresh = [row | {"version": number, "daemon": daemon} for row in wal.rows]
    _write_hours([row for row in fresh if (row["key"], row["ticket"]) not in known], staged)
    ended = [row | {"version": number, "daemon": daemon} for row in wal.ended]
    (staged / "stones").mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist(ended, TOMBSTONES.arrow()), staged / "stones" / "part.parquet"
    )


def _stage_keys(
    _: object, tier: Tier, parts: Iterable[ColdFile], number: int, staged: Path
) -> None:
    paths = [part.path for part in parts]
    keys = [{name: row[name] for name in KEY} for row in all_rows(tier, paths)]
    staged.mkdir(parents=True)
    rows = pa.Table.from_pylist([key | {"version": number} for key in keys], TOMBSTONES.arrow())
    pq.write_table(rows, staged / "part.parquet")


def _stage_left(_: object, tier: Tier, old: list[ColdFile], staged: Path) -> None:
    end_ns, version = tier.frontier("hot")
    rows = [
        row for row in living(tier, [part.path for part in old])
        if row["deadline_ns"] >= end_ns or row["version"] > version
    ]  # fmt: skip
    _write_hours(rows, staged)


def _stage_slice(_: object, tier: Tier, window: Window, staged: Path) -> None:
    (since_ns, before), (until_ns, upto) = window.since, window.until
    rows = [
        row for row in living(tier, [part.path for part in tier.version().rows])
        if row["deadline_ns"] < until_ns and row["version"] <= upto
        and (row["deadline_ns"] >= since_ns or row["version"] > before)
    ]  # fmt: skip
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, COLD.arrow()), staged / "part.parquet")


def _write_hours(rows: list[dict[str, Any]], staged: Path) -> None:
    for hour in {row["deadline_ns"] // HOUR_NS for row in rows}:
        some = [row for row in rows if row["deadline_ns"] // HOUR_NS == hour]
        table = pa.Table.from_pylist(some, COLD.arrow()).sort_by("deadline_ns")
        (staged / f"hour={hour}").mkdir(parents=True)
        pq.write_table(table, staged / f"hour={hour}" / "part.parquet")


def living(tier: Tier, paths: list[str]) -> list[dict[str, Any]]:
    """Return the rows of these files that no tombstone has ended."""
    ended: dict[tuple[Any, ...], int] = {}
    for part in tier.version().tombstones:
        for row in pq.read_table(tier.lake / part.path, partitioning=None).to_pylist():
            of = (*(row[name] for name in KEY), row["ticket"])
            ended[of] = max(row["version"], ended.get(of, 0))

    def is_live(row: dict[str, Any]) -> bool:
        key = tuple(row[name] for name in KEY)
        return all(ended.get((*key, of), 0) <= row["version"] for of in {None, row["ticket"]})

    return [row for row in all_rows(tier, paths) if is_live(row)]


def all_rows(tier: Tier, paths: list[str] | None = None) -> list[dict[str, Any]]:
    """Return all rows of these files, including rows that a tombstone has ended. None: all files of
    the tier."""
    paths = [part.path for part in tier.version().rows] if paths is None else paths
    tables = (pq.read_table(tier.lake / path, partitioning=None) for path in paths)
    return [row for table in tables for row in table.to_pylist()]


def waiting(tier: Tier) -> dict[Key, int]:
    """Return the timers that the tier still has to promote."""
    end_ns, version = tier.frontier("hot")
    rows = [
        row for row in living(tier, [part.path for part in tier.version().rows])
        if row["deadline_ns"] >= end_ns or row["version"] > version
    ]  # fmt: skip
    found = {(row["namespace"], row["key_type"], row["key"]): row["deadline_ns"] for row in rows}
    assert len(found) == len(rows)
    return found


def small_pieces(patch: pytest.MonkeyPatch, rows: int) -> None:
    """Send at most `rows` rows to the daemon at a time."""
    patch.setattr(promote, "ROWS_AT_ONCE", rows)


DUE_S = 1893456000  # 2030-01-01T00:00:00Z


def reminders(path: Path) -> None:
    """Write 20 timers, a minute apart."""
    keys = [f"order:{i}" for i in range(20)]
    times = pa.array([(DUE_S + 60 * i) * 10**6 for i in range(20)], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"key": keys, "namespace": ["shop"] * 20, "deadline": times}), path)


FILED = StructType().add("key", "string").add("deadline", "timestamp").add("daemon", "string")


def filed(first: int, last: int, *daemons: str) -> pa.RecordBatch:
    """Return rows with the columns of FILED. The deadlines are long past, and the daemons
    alternate."""
    numbers = range(first, last)
    return pa.RecordBatch.from_pydict({
        "key": [f"k{i}" for i in numbers],
        "deadline": pa.array(list(numbers), pa.timestamp("us", "UTC")),
        "daemon": [daemons[i % len(daemons)] for i in numbers],
    })  # fmt: skip


def files_writer(spool: Path) -> FilesWriter:
    writer = writer_of({"to": "files", "path": str(spool)}, FILED)
    assert isinstance(writer, FilesWriter)
    return writer

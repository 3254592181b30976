"""Windows of the cold tier on their way to the daemon: cold, promoting, hot.

A window takes every row that is due before its end and was not taken by the window before.
Its steps, each of them durable before the next begins:

1. the window's file says "promoting": from now on a cancel also goes to the daemon;
2. its rows are written to a slice of their own, without those that tombstones end;
3. the daemon opens the window for this run: earlier ones are shut out;
4. the slice goes to the daemon, in parts; a row is known there by the window and its number in the
   slice, also after it fired. Before each part, cancels that came meanwhile take effect;
5. the daemon closes the window: a late copy of step 4 adds nothing;
6. the window's file says "hot". The daemon forgets the one that was promoted long before.

Whoever finds a window that is promoting goes on with it, first of all, under the next *fencing
token*: the number of the run. What he repeats, the daemon knows. So nothing is lost or doubled,
wherever a process ends; and one that was only believed dead, because its lock was lost, adds
nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID, uuid5

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from purgatoryd.pipeline.bulk_loading import Answers
from purgatoryd.pipeline.cold import (
    KEY,
    alive,
    beyond,
    compact,
    reached,
    rows_of,
    settle,
    tombstones_of,
)
from purgatoryd.pipeline.tier import ColdFile, Frontier, Tier, Version, Window, newer_keys
from purgatoryd.shm_layout.errors import LakeInUse, WindowTaken
from purgatoryd.shm_layout.files import make_private, sync_directory, sync_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ORDER = ("namespace", "key_type", "daemon", "deadline_ns")
"""Of a slice: rows that go in one message to the daemon stand next to each other."""
REMEMBERED = 16
"""So many windows are known to the daemon after they became hot."""
ROWS_AT_ONCE = 8192
"""So many go to the daemon under one hold of the lock."""
SURPLUS_MAX = 512
"""So many files more than hours, and the tier is compacted."""
SMALL_ROWS = 1_000_000
"""Up to so many rows of a window are sent to every task."""


Pacing = Callable[[int], object]
"""Is given the number of rows that go next, and may wait."""


def at_once(rows: int) -> None:
    """Return at once; a limiter that limits nothing."""


class Hot(Protocol):
    """The daemon that windows go to."""

    name: str

    def uuids(self) -> list[str]:
        """Of its arenas; raises DaemonError if there is no such daemon."""

    def open_bulk_load(
        self, bulk_load: UUID, namespaces: Iterable[str], fencing_token: int
    ) -> None:
        """From now on runs of lower fencing tokens add nothing."""

    def add(self, bulk_load: UUID, rows: pa.Table, fencing_token: int) -> Answers:
        """Arms rows, parked ones by their tickets; one that is known by (bulk_load, row) adds
        nothing."""

    def close_bulk_load(
        self, bulk_load: UUID, namespaces: Iterable[str], fencing_token: int
    ) -> None:
        """From now on no row of `bulk_load` adds anything."""

    def forget_bulk_load(self, bulk_load: UUID, namespaces: Iterable[str]) -> None:
        """Let the daemon forget `bulk_load`."""

    def cancel(self, keys: pa.Table) -> dict[str, int]:
        """Ends the timers of namespace, key_type, key; how many cancels found what."""


def promote(
    spark: SparkSession, tier: Tier, until_ns: int, hot: Hot, pace: Pacing = at_once
) -> list[Window]:
    """Brings all that is due before `until_ns` (since 1970) to the daemon; the windows that
    became hot by this call.

    Raises BulkLoadRefused if the daemon had no space, and the like: the next call goes on. Raises
    DaemonUnreachable before a window is begun if there is no such daemon. Raises
    LakeInUse while another process promotes, WindowElsewhere if earlier windows went to another
    daemon, WindowTaken if another run took the window over, ParkedElsewhere if nothing says that
    the daemon has the timers of an arena that parked some.
    """
    with tier.promoting():
        tier.check_daemon(hot.name)
        tier.drop_slices()
        begun = tier.unfinished()
        done = [finish(spark, tier, begun, hot, pace)] if begun else []
        if not tier.bound:
            hot.uuids()  # a name that no daemon has does not bind it
        if window := begin(tier, until_ns, hot.name):
            done.append(finish(spark, tier, window, hot, pace))
    if surplus(tier) > SURPLUS_MAX:
        with suppress(LakeInUse):  # somebody loads; a later window finds it
            compact(spark, tier)
    return done


def surplus(tier: Tier) -> int:
    """Files of the tier that a compaction would do without."""
    version, frontier = tier.version(), tier.frontier("hot")
    hours = {Path(part.path).parent for part in reached(version.rows, frontier)}
    return len(version.rows) - len(hours) + len(version.tombstones)


def begin(tier: Tier, until_ns: int, daemon: str) -> Window | None:
    """A new window, promoting; None if nothing can be in it."""
    with tier.lock():
        version, since = tier.version(), tier.frontier("promoting", "hot")
        if not version.number:
            return None
        until = Frontier(max(until_ns, since.end_ns), version.whole)
        late = any(part.version > since.version for part in taken(version, since, until))
        if until.end_ns == since.end_ns and not late:
            return None
        window = Window(window_id(until), daemon, since, until)
        tier.save_window(window)
        return window


def taken(version: Version, since: Frontier, until: Frontier) -> list[ColdFile]:
    """Files that may have rows of a window."""
    due = (part for part in version.rows if part.first_ns < until.end_ns)
    return [p for p in due if p.last_ns >= since.end_ns or p.version > since.version]


def window_id(until: Frontier) -> str:
    """Its end, and up to which version it takes rows: as text they sort as they were promoted."""
    end = datetime.fromtimestamp(until.end_ns // 10**9, UTC)
    return f"{end:%Y%m%dT%H%M%SZ}-{until.end_ns % 10**9:09d}-{until.version:012d}"


# ---- the steps -----------------------------------------------------------------------------


def finish(spark: SparkSession, tier: Tier, window: Window, hot: Hot, pace: Pacing) -> Window:
    """Steps 2 to 6 of a window, as far as they are not done."""
    window = claimed(tier, window)
    if not tier.slice_of(window).is_dir():
        write_slice(spark, tier, window)
    window = _deliver(tier, window, hot, pace)
    window = replace(window, state="hot")
    with tier.lock():
        tier.check_fencing_token(window)
        tier.save_window(window)
    tier.drop_slices()
    for old in tier.windows(1 + REMEMBERED)[:-REMEMBERED]:
        hot.forget_bulk_load(bulk_load_of(tier, old), old.namespaces)
    tier.forget_windows()
    return window


def claimed(tier: Tier, window: Window) -> Window:
    """The window under the next fencing token."""
    with tier.lock():
        tier.check_fencing_token(window)
        window = replace(window, fencing_token=window.fencing_token + 1)
        tier.save_window(window)
    return window


def bulk_load_of(tier: Tier, window: Window) -> UUID:
    """What the daemon knows a window by."""
    return uuid5(UUID(tier.version().tier), window.id)


def write_slice(spark: SparkSession, tier: Tier, window: Window) -> None:
    """The window's rows in files of their own, in the order of their numbers."""
    place = tier.slice_of(window)
    staged = place.with_name(f"{place.name}-{window.fencing_token}.new")
    stage_slice(spark, tier, window, staged)
    make_private(staged)
    for path in staged.iterdir():
        sync_file(path)
    sync_directory(staged)
    with tier.lock():
        tier.check_fencing_token(window)
        staged.rename(place)
    sync_directory(place.parent)


def stage_slice(spark: SparkSession, tier: Tier, window: Window, staged: Path) -> None:
    """Writes the window's rows that no tombstone ends."""
    rows = selected(spark, tier, window)
    rows.write.options(compression="lz4_raw").parquet(str(staged), mode="overwrite")


def selected(spark: SparkSession, tier: Tier, window: Window) -> DataFrame:
    """The window's rows that no tombstone ends, as ORDER says."""
    from pyspark.sql.functions import broadcast

    version = tier.version()
    parts = taken(version, window.since, window.until)
    rows = rows_of(spark, tier, parts).filter(
        f"deadline_ns < {window.until.end_ns} and version <= {window.until.version}"
    )
    rows = beyond(rows, window.since)
    tombstones = tombstones_of(spark, tier, version.tombstones)
    if (count := estimated(parts, window)) > SMALL_ROWS:
        pieces = 1 + count // SMALL_ROWS
        return (
            alive(rows, tombstones).repartitionByRange(pieces, *ORDER).sortWithinPartitions(*ORDER)
        )
    if version.tombstones:  # few of them are of these keys
        of_these = tombstones.join(broadcast(rows.select(KEY)), KEY, "left_semi")
        rows = alive(rows, broadcast(of_these))
    return rows.coalesce(1).sortWithinPartitions(*ORDER)


def estimated(parts: list[ColdFile], window: Window) -> int:
    """About how many rows files have for a window, if their deadlines are spread evenly."""
    return sum(int(part.rows * _share(part, window.until.end_ns)) + 1 for part in parts)


def _share(part: ColdFile, end_ns: int) -> float:
    span = part.last_ns - part.first_ns + 1
    return min(1.0, (end_ns - part.first_ns) / span)


def _deliver(tier: Tier, window: Window, hot: Hot, pace: Pacing) -> Window:
    bulk_load, place = bulk_load_of(tier, window), tier.slice_of(window)
    namespaces = namespaces_in(place)
    hot.open_bulk_load(bulk_load, namespaces, window.fencing_token)
    total, answers, cancelled, ended = 0, Answers(), 0, Ended(tier, window.until.version)
    for rows in numbered(place):
        pace(rows.num_rows)
        with tier.lock():
            settle(tier, hot)
            left = ended.without(rows)
            answers.add(hot.add(bulk_load, by_holder(left, tier.version()), window.fencing_token))
        if "FENCED" in answers.counts:
            raise WindowTaken(window.id, window.fencing_token)
        answers.check(f"window {window.id}")
        total += rows.num_rows
        cancelled += rows.num_rows - left.num_rows
    hot.close_bulk_load(bulk_load, namespaces, window.fencing_token)
    return replace(
        window, rows=total, cancelled=cancelled, results=dict(answers.counts),
        namespaces=namespaces,
    )  # fmt: skip


def namespaces_in(folder: Path) -> tuple[str, ...]:
    """Those of the rows of a slice."""
    tables = (pq.read_table(path, columns=["namespace"]) for path in folder.glob("*.parquet"))
    return tuple(sorted({name for one in tables for name in one["namespace"].unique().to_pylist()}))


def numbered(folder: Path) -> Iterator[pa.Table]:
    """A slice, piece by piece, with the numbers of its rows."""
    first = 0
    for path in sorted(folder.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(ROWS_AT_ONCE):
            numbers = pa.array(np.arange(first, first + batch.num_rows))
            yield pa.Table.from_batches([batch]).append_column("row", numbers)
            first += batch.num_rows


def by_holder(rows: pa.Table, version: Version) -> pa.Table:
    """Parked rows under the arena that has their timers by now."""
    words = rows["daemon"].combine_chunks().dictionary_encode()
    holders = [version.holder(arena) for arena in words.dictionary.to_pylist()]
    daemons = pa.DictionaryArray.from_arrays(words.indices, pa.array(holders, pa.string()))
    at = rows.column_names.index("daemon")
    return rows.set_column(at, "daemon", daemons.cast(pa.string()))


class Ended:
    """What tombstones after `version` end, up to now."""

    def __init__(self, tier: Tier, version: int) -> None:
        self._tier = tier
        self._since = self._seen = version
        self._newest: dict[tuple[Any, ...], int] = {}

    def without(self, rows: pa.Table) -> pa.Table:
        """The rows that are not ended; under the lock."""
        version = self._tier.version()
        parts = version.newer_tombstones(self._seen)
        for number, *of in _tuples(newer_keys(self._tier, parts)):
            self._newest[tuple(of)] = max(number, self._newest.get(tuple(of), 0))
        self._seen = max([self._seen, *(part.version for part in parts)])
        if not self._newest:
            return rows
        return rows.filter(pa.array([self._is_live(*row) for row in _tuples(rows)]))

    def _is_live(self, version: int, daemon: str | None, ticket: int | None, *key: Any) -> bool:
        ended = self._newest.get((daemon, ticket, *key), 0), self._newest.get((None, None, *key), 0)
        return max(ended) <= version


def _tuples(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    names = ["version", "daemon", "ticket", *KEY]
    return zip(*table.select(names).to_pydict().values(), strict=True)


# ---- time ----------------------------------------------------------------------------------


def window_end_ns(now_ns: int, every_ns: int) -> int:
    """The end of the window after the one that holds `now_ns`: a window is hot before it begins."""
    return (now_ns // every_ns + 2) * every_ns

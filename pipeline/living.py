"""What lives in each daemon by the newest record in the lake: a snapshot, and the records from its
start on.

After a change of the number of shards those before count until all that took their place are in the
lake: with some of these alone, timers would be missing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import silver
from purgatoryd.pipeline.continuity import excluded
from purgatoryd.pipeline.lake import OPENINGS, Lake, Manifest
from purgatoryd.pipeline.tiers import read_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from purgatoryd.pipeline.parts import Segment


class InPlace(NamedTuple):
    """What the lake has of the daemons that count. `openings`: the newest snapshot of each."""

    segments: list[Manifest]
    openings: dict[str, Manifest]


def in_place(lake: Lake) -> InPlace:
    """Return the segments and snapshots of the daemons that count. Raises LakeBroken."""
    segments, snapshots = lake.manifests(), lake.manifests(OPENINGS)
    absent = excluded([*segments, *snapshots]).absent
    openings = {one.daemon: one for one in snapshots if one.daemon not in absent}
    return InPlace([one for one in segments if one.daemon not in absent], openings)


def living(spark: SparkSession, lake: Lake, found: InPlace | None = None) -> DataFrame:
    """Return the add of each live timer and operation, once, as rows of bronze. With `found`, of
    those that were live in its files. Raises LakeBroken.

    For a daemon without a snapshot, only timers armed since its first record in the lake.
    """
    segments, openings = found or in_place(lake)
    starts = {daemon: opening.first_lsn for daemon, opening in openings.items()}
    later = [m for m in segments if m.last_lsn >= starts.get(m.daemon, 0)]
    since = from_starts(_rows(spark, lake, later), starts)
    return silver.open_adds(since.unionByName(_rows(spark, lake, openings.values())))


class Reach(NamedTuple):
    """The newest range of a daemon's records that a table has without a hole."""

    from_lsn: int
    upto: int
    wall_to_us: int


def reached(lake: Lake, made: Container[Segment]) -> dict[str, Reach]:
    """Return, by daemon, the newest range of records that a table made of these segments has.
    Raises LakeBroken."""
    found: dict[str, Reach] = {}
    waiting: set[str] = set()
    for one in sorted(in_place(lake).segments, key=lambda one: one.identity):
        if one.segment not in made or one.daemon in waiting:
            waiting.add(one.daemon)
            continue
        before = found.get(one.daemon)
        follows = before is not None and before.upto + 1 == one.first_lsn
        begun = before.from_lsn if before and follows else one.first_lsn
        found[one.daemon] = Reach(begun, one.last_lsn, one.wall_to_us)
    return found


def as_of(lake: Lake, reaches: Mapping[str, Reach]) -> InPlace:
    """Return the files with the state at the last record of each reach: a snapshot that is not
    newer and the records after it, or all records. Daemons without either are left out."""
    segments, _ = in_place(lake)
    openings: dict[str, Manifest] = {}
    for one in lake.manifests(OPENINGS):
        reach = reaches.get(one.daemon)
        if reach and one.first_lsn >= reach.from_lsn and _end(one) <= reach.upto:
            openings[one.daemon] = one
    known = {m.daemon for m in segments if m.began_empty and m.daemon in reaches}
    known = {name for name in known if reaches[name].from_lsn == 1} | openings.keys()
    return InPlace(
        [m for m in segments if m.daemon in known and m.last_lsn <= reaches[m.daemon].upto],
        openings,
    )


def _end(snapshot: Manifest) -> int:
    """Return the last record whose effect a snapshot may contain."""
    return max(snapshot.first_lsn - 1, snapshot.last_lsn)


def stopped(lake: Lake) -> set[str]:
    """Return daemons that wrote a snapshot when they stopped and nothing later. Raises
    LakeBroken."""
    segments, openings = in_place(lake)
    ends = {m.daemon: m.last_lsn for m in sorted(segments, key=lambda m: m.last_lsn)}
    return {
        name for name, one in openings.items()
        if ends.get(name, 0) < one.first_lsn and one.last_lsn < one.first_lsn and one.first_lsn > 1
    }  # fmt: skip


def from_starts(bronze: DataFrame, starts: Mapping[str, int]) -> DataFrame:
    """Without the records before the start of their daemon's snapshot: it has what they did."""
    begin = bronze.sparkSession.createDataFrame([*starts.items()], "daemon string, start long")
    known = bronze.join(F.broadcast(begin), "daemon", "left")
    return known.where("start IS NULL OR lsn >= start").select(bronze.columns)


def _rows(spark: SparkSession, lake: Lake, manifests: Iterable[Manifest]) -> DataFrame:
    return read_files(spark, lake.files(manifests))

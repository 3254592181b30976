"""What lives in each daemon by the newest record in the lake: a snapshot, and the records from its
start on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import silver
from purgatoryd.pipeline.continuity import befores
from purgatoryd.pipeline.lake import OPENINGS, Lake, Manifest
from purgatoryd.pipeline.tiers import read_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def newest_openings(lake: Lake) -> dict[str, Manifest]:
    """The newest snapshot of each daemon that has one. Raises LakeBroken."""
    return {opening.daemon: opening for opening in lake.manifests(OPENINGS)}


def in_place(lake: Lake) -> list[Manifest]:
    """The segments of all daemons but those whose place others took. Raises LakeBroken."""
    segments = lake.manifests()
    gone = gone_in([*segments, *lake.manifests(OPENINGS)])
    return [segment for segment in segments if segment.daemon not in gone]


def gone_in(manifests: Iterable[Manifest]) -> set[str]:
    """The daemons whose place others took. `manifests`: as befores() has them."""
    return set().union(*befores(manifests).values())


def living(spark: SparkSession, lake: Lake) -> DataFrame:
    """The add of each timer and operation that lives, once: rows of bronze. Raises LakeBroken.

    Of a daemon without a snapshot, only what was armed since its first record in the lake.
    """
    segments, snapshots = lake.manifests(), lake.manifests(OPENINGS)
    gone = gone_in([*segments, *snapshots])
    openings = {one.daemon: one for one in snapshots if one.daemon not in gone}  # the newest last
    starts = {daemon: opening.first_lsn for daemon, opening in openings.items()}
    there = (m for m in segments if m.daemon not in gone)
    later = [m for m in there if m.last_lsn >= starts.get(m.daemon, 0)]
    since = from_starts(_rows(spark, lake, later), starts)
    return silver.open_adds(since.unionByName(_rows(spark, lake, openings.values())))


def from_starts(bronze: DataFrame, starts: Mapping[str, int]) -> DataFrame:
    """Without the records before the start of their daemon's snapshot: it has what they did."""
    begin = bronze.sparkSession.createDataFrame([*starts.items()], "daemon string, start long")
    known = bronze.join(F.broadcast(begin), "daemon", "left")
    return known.where("start IS NULL OR lsn >= start").select(bronze.columns)


def _rows(spark: SparkSession, lake: Lake, manifests: Iterable[Manifest]) -> DataFrame:
    return read_files(spark, lake.files(manifests))

"""What lives in each daemon by the newest record in the lake: a snapshot, and the records from its
start on.

After a change of the number of shards those before count until all that took their place are in the
lake: with some of these alone, timers would be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import silver
from purgatoryd.pipeline.continuity import excluded
from purgatoryd.pipeline.lake import OPENINGS, Lake, Manifest
from purgatoryd.pipeline.tiers import read_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class InPlace(NamedTuple):
    """What the lake has of the daemons that count. `openings`: the newest snapshot of each."""

    segments: list[Manifest]
    openings: dict[str, Manifest]


def in_place(lake: Lake) -> InPlace:
    """Of the daemons that count. Raises LakeBroken."""
    segments, snapshots = lake.manifests(), lake.manifests(OPENINGS)
    absent = excluded([*segments, *snapshots]).absent
    openings = {one.daemon: one for one in snapshots if one.daemon not in absent}
    return InPlace([one for one in segments if one.daemon not in absent], openings)


def living(spark: SparkSession, lake: Lake) -> DataFrame:
    """The add of each timer and operation that lives, once: rows of bronze. Raises LakeBroken.

    Of a daemon without a snapshot, only what was armed since its first record in the lake.
    """
    segments, openings = in_place(lake)
    starts = {daemon: opening.first_lsn for daemon, opening in openings.items()}
    later = [m for m in segments if m.last_lsn >= starts.get(m.daemon, 0)]
    since = from_starts(_rows(spark, lake, later), starts)
    return silver.open_adds(since.unionByName(_rows(spark, lake, openings.values())))


def from_starts(bronze: DataFrame, starts: Mapping[str, int]) -> DataFrame:
    """Without the records before the start of their daemon's snapshot: it has what they did."""
    begin = bronze.sparkSession.createDataFrame([*starts.items()], "daemon string, start long")
    known = bronze.join(F.broadcast(begin), "daemon", "left")
    return known.where("start IS NULL OR lsn >= start").select(bronze.columns)


def _rows(spark: SparkSession, lake: Lake, manifests: Iterable[Manifest]) -> DataFrame:
    return read_files(spark, lake.files(manifests))

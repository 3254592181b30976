"""Where each segment is, and one reader over all of it that counts none twice."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Identity, Lake, Manifest
from purgatoryd.pipeline.schemas import BRONZE as BRONZE_TABLE
from purgatoryd.pipeline.session import rows_in
from purgatoryd.pipeline.sources import Source, openings, present
from purgatoryd.shm_layout.wal import segments

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Place(StrEnum):
    """HOT: in the WAL alone. LAKE: the WAL has let it go."""

    HOT = "hot"
    BOTH = "both"
    LAKE = "lake"


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment, or a snapshot, with what each tier has of it."""

    identity: Identity
    source: Source | None
    manifest: Manifest | None

    @property
    def tier(self) -> Place:
        """Tier that has the segment: the WAL, the lake, or both."""
        if self.manifest is None:
            return Place.HOT
        return Place.LAKE if self.source is None else Place.BOTH


def tiers(lake: Lake | None, wals: Iterable[Path] = (), table: str = BRONZE) -> list[Segment]:
    """All segments, or snapshots, by daemon, epoch and LSN; `wals`: folders WAL_DIR/NAME.

    The one that a daemon still writes is among the hot ones. Raises LakeBroken, WalMismatch.
    """
    # in this order: what is shipped and removed meanwhile was in the WAL then
    there = {one.identity: one for folder in wals for one in _sources(folder, table)}
    shipped = {m.identity: m for m in (lake.manifests(table) if lake else ())}
    return [
        Segment(identity, there.get(identity), shipped.get(identity))
        for identity in sorted({*shipped, *there})
    ]


def _sources(folder: Path, table: str) -> list[Source]:
    if table == OPENINGS:
        return openings(folder)
    return [*present(segments(folder))]


def node_of(lake: Lake | None, folder: Path) -> str:
    """What the host of a WAL is called: as the newest shipment from it says, else by its own
    name. One name for all arenas of a WAL, so that a recovery is known as one."""
    tables = (BRONZE, OPENINGS)
    here = {one.identity.daemon for table in tables for one in _sources(folder, table)}
    shipped = [m for table in tables for m in (lake.manifests(table) if lake else ())]
    own = [m for m in shipped if m.daemon in here]
    return max(own, key=lambda m: m.last_lsn).node if own else socket.gethostname()


# ---- reading ---------------------------------------------------------------------------------


def read_events(spark: SparkSession, lake: Lake | None, wals: Sequence[Path] = ()) -> DataFrame:
    """BRONZE: every record of both tiers, each segment once.

    What is in the lake is read there, by Spark's own Parquet reader; the rest from the WAL.
    A segment that its daemon still writes is read up to what was on disk then.
    """
    return _read(spark, lake, wals, BRONZE)


def read_openings(spark: SparkSession, lake: Lake | None, wals: Sequence[Path] = ()) -> DataFrame:
    """The records of every snapshot of both tiers; `segment` is its first LSN to be redone."""
    return _read(spark, lake, wals, OPENINGS)


def _read(spark: SparkSession, lake: Lake | None, wals: Sequence[Path], table: str) -> DataFrame:
    wals = [folder.absolute() for folder in wals]
    found = tiers(lake, wals, table)
    paths = lake.files(one.manifest for one in found if one.manifest) if lake else []
    hot = {str(one.source.path) for one in found if one.source and not one.manifest}
    parts = [read_files(spark, paths)]
    for folder in wals:
        names = [Path(path).name for path in sorted(hot) if Path(path).parent == folder]
        if names:
            reader = spark.read.format("purgatoryd").option("files", json.dumps(names))
            parts.append(reader.option("node", node_of(lake, folder)).load(str(folder)))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionByName(part)
    return whole


def read_files(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """BRONZE from files of the lake; none is an empty table."""
    return rows_in(spark, BRONZE_TABLE, paths)

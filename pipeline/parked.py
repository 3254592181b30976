"""Timers that a daemon parked, on their way from its WAL into the cold tier.

The daemon has their keys, and it alone decides what lives; here are the payloads, to be brought
back in time. A record that parks a timer becomes a row of the tier. One that ends it - a cancel, a
replacement, a return - becomes a tombstone of its ticket, and one that extends it a tombstone and
a new row.

What the newest segment says may yet be lost in a power cut. So only what was parked is taken from
it: a row too many is answered UNKNOWN when its window comes, and a ticket is never used again. Ends
and moves wait until their segment is in the lake.

After a reboot, or with other sizes, the daemon has another arena: the *successor* of the one
before. Tickets go on, and so do LSNs; by those and the WAL's name, and by the order of its files,
successors are known. A row keeps the arena that parked it, for there its record is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import silver
from purgatoryd.pipeline.cold import (
    STONES,
    alive,
    beyond,
    reserve,
    rows_of,
    staging,
    tombstones_of,
    write_rows,
    write_tombstones,
)
from purgatoryd.pipeline.continuity import newest_successor, successors
from purgatoryd.pipeline.lake import OPENINGS, Lake
from purgatoryd.pipeline.schemas import COLD
from purgatoryd.pipeline.sources import successors_in
from purgatoryd.pipeline.tier import Tier, Version
from purgatoryd.pipeline.tiers import Place, node_of, read_files, tiers

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

END_OF_TIME_NS = 2**63 - 1


class Hot(Protocol):
    """The daemon that parked them."""

    name: str

    def uuids(self) -> list[str]:
        """Of its arena, or of those of its shards, in hex."""


@dataclass(frozen=True, slots=True)
class Collected:
    """`rows` came with `version`, and so many tombstones."""

    version: int
    rows: int
    ended: int


@dataclass(frozen=True, slots=True)
class Records:
    """Rows of BRONZE of a daemon that were not looked at: those of the lake, and those that are in
    the WAL alone. `arenas`: those that it has, and whose successors they are; `successors`: among
    these. `wals`: by arena, up to which LSN what is in the lake has been looked at then."""

    arenas: frozenset[str]
    successors: dict[str, str]
    wals: dict[str, int]
    shipped: DataFrame
    newest: DataFrame


def collect(
    spark: SparkSession, tier: Tier, lake: Lake, hot: Hot, wals: Sequence[Path] = ()
) -> Collected:
    """Takes what `hot` parked into the tier, and what became of it.

    `wals`: its folder WAL_DIR/NAME, or those of its shards, for what was not shipped yet.
    Raises LakeInUse while somebody else writes rows, WindowElsewhere, LakeBroken, WalMismatch,
    DaemonError.
    """
    now = hot.uuids()
    with tier.writing():
        tier.check_daemon(hot.name)
        found = records(spark, lake, now, tier.version(), wals)
        number = reserve(tier)
        with staging(tier, f"parked-{number}") as staged:
            stage_parked(spark, tier, found, number, staged)
            rows = tier.take_rows(staged, number, clean=number)
            stones = tier.take_tombstones(staged / STONES, number)
        with tier.lock():
            version = tier.version()
            tier.commit(replace(
                version, reserved=0, daemon=hot.name, rows=(*version.rows, *rows),
                tombstones=(*version.tombstones, *stones),
                wals=version.wals | found.wals, successors=version.successors | found.successors,
            ))  # fmt: skip
    return Collected(number, sum(part.rows for part in rows), sum(part.rows for part in stones))


def records(
    spark: SparkSession, lake: Lake, now: Sequence[str], version: Version, wals: Sequence[Path]
) -> Records:
    """What the WALs of the arenas `now` have, and of those whose successors they are, that
    `version` has not. Segments are shipped in their order."""
    segments = lake.manifests()
    successor_of = version.successors | successors([*segments, *lake.manifests(OPENINGS)])
    for folder in wals:
        successor_of |= successors_in(folder)
    own = {
        arena: successor
        for arena, successor in successor_of.items()
        if newest_successor(successor_of, arena) in now
    }
    arenas = frozenset((*now, *own))
    seen = {arena: version.wals.get(arena, 0) for arena in arenas}
    new = [m for m in segments if m.daemon in arenas and m.last_lsn > seen[m.daemon]]
    seen |= {m.daemon: m.last_lsn for m in new}  # by LSN
    shipped = read_files(spark, lake.files(m for m in new if m.rows))
    return Records(arenas, own, seen, shipped, _newest(spark, lake, arenas, wals))


def _newest(
    spark: SparkSession, lake: Lake, arenas: Collection[str], wals: Sequence[Path]
) -> DataFrame:
    """The records of segments that were not shipped. What has no names, since a snapshot went
    meanwhile, waits for the next time."""
    found = read_files(spark, [])
    for folder in wals:
        names = [
            one.source.path.name for one in tiers(lake, [folder])
            if one.source and one.tier is Place.HOT and one.identity.daemon in arenas
        ]  # fmt: skip
        reader = spark.read.format("purgatoryd").options(
            files=json.dumps(names), node=node_of(lake, folder)
        )
        found = found.unionByName(reader.load(str(folder.absolute())))
    return found.where("coalesce(parked, 0) = 0 OR namespace IS NOT NULL AND topic IS NOT NULL")


# ---- what they mean for the tier -------------------------------------------------------------


def stage_parked(
    spark: SparkSession, tier: Tier, found: Records, number: int, staged: Path
) -> None:
    """Writes the rows and the tombstones of a version."""
    version = tier.version()
    parked = rows_of(spark, tier, version.rows).where(F.col("daemon").isin(*found.arenas))
    stones = tombstones_of(spark, tier, version.tombstones)
    waiting = alive(beyond(parked, tier.frontier("hot")), stones)
    gone, moves = ended(found.shipped), newest_moves(found.shipped)
    ended_ = waiting.join(gone, "ticket", "left_semi")
    moved = waiting.join(gone, "ticket", "left_anti").join(moves, "ticket").where(
        "moved_ns > deadline_ns"
    )  # fmt: skip
    fresh = adds(found).join(parked, "ticket", "left_anti").join(moves, "ticket", "left")
    rows = fresh.unionByName(moved.select(fresh.columns))
    due_ns = F.coalesce("moved_ns", "deadline_ns")
    made = rows.withColumns({"deadline_ns": due_ns, "version": F.lit(number).cast("long")})
    write_rows(made.select(COLD.names), staged)
    write_tombstones(ended_.unionByName(moved.select(ended_.columns)), number, staged / STONES)


def adds(found: Records) -> DataFrame:
    """What was parked and, as far as the records go, still is; as rows of COLD but for their
    version."""
    every = found.shipped.unionByName(found.newest)
    names = [name for name in COLD.names if name not in ("deadline_ns", "version")]
    parked = every.where("parked = 1").select(*names, _due_ns().alias("deadline_ns"))
    return parked.join(ended(every), "ticket", "left_anti")


def ended(bronze: DataFrame) -> DataFrame:
    """The tickets of what is not parked any more."""
    back = F.col("kind") == "unpark"
    return bronze.where(silver.is_end() | back).select(silver.ended_ticket().alias("ticket"))


def newest_moves(bronze: DataFrame) -> DataFrame:
    """`ticket` and `moved_ns` of what was extended."""
    moves = bronze.where(F.col("kind") == "move").groupBy("ticket")
    return moves.agg(F.max_by(_due_ns(), F.col("lsn")).alias("moved_ns"))


def _due_ns() -> Column:
    """A deadline since 1970. One on the arena's clock is converted by the map of its record."""
    wall_ns = F.unix_micros("at") * 1000 - F.col("at_ns")
    due_ns = F.try_add(F.col("deadline_ns"), wall_ns)
    return F.coalesce("wall_deadline_ns", due_ns, F.lit(END_OF_TIME_NS))

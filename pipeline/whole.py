"""All that there is of some WALs: what is in the lake, and what is still hot.

What the lake does not have is copied into a folder of it for the time being, since all of Spark's
workers see that; the newest segment as far as it is on disk. So everything has a manifest, and
Spark reads it once for all as Parquet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from purgatoryd.pipeline.continuity import Continuity, continuity
from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Lake, Manifest
from purgatoryd.pipeline.ship import Shipper
from purgatoryd.pipeline.sources import Source
from purgatoryd.pipeline.tiers import Place, node_of, read_files, tiers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Whole(NamedTuple):
    """Rows of segments and of snapshots, and how they hang together."""

    bronze: DataFrame
    openings: DataFrame
    found: Continuity


@contextmanager
def whole(spark: SparkSession, lake: Lake, wals: Sequence[Path] = ()) -> Iterator[Whole]:
    """Of a lake, and of the folders WAL_DIR/NAME. Raises LakeBroken, WalDamaged, BadPath."""
    with ExitStack() as stack:
        lakes = [lake]
        if wals:
            lakes.append(stack.enter_context(lake.overlay()))
        for folder in wals:
            _copy(folder, *lakes)
        segments, snapshots = _manifests(lakes, BRONZE), _manifests(lakes, OPENINGS)
        yield Whole(
            _rows(spark, lakes, segments), _rows(spark, lakes, snapshots),
            continuity([m for _, m in segments], [m for _, m in snapshots]),
        )  # fmt: skip


def _manifests(lakes: Sequence[Lake], table: str) -> list[tuple[Lake, Manifest]]:
    """All with records, each once: a segment may have been begun and nothing more, and one that was
    copied may have been shipped since, with more of them."""
    found = {
        manifest.identity: (lake, manifest)
        for lake in reversed(lakes) for manifest in lake.manifests(table) if manifest.rows
    }  # fmt: skip
    return [*found.values()]


def _rows(
    spark: SparkSession, lakes: Sequence[Lake], found: Sequence[tuple[Lake, Manifest]]
) -> DataFrame:
    return read_files(spark, [file for lake, manifest in found for file in lake.files([manifest])])


def _copy(folder: Path, lake: Lake, overlay: Lake) -> None:
    for daemon in lake.daemons():
        overlay.save_names(daemon, lake.names(daemon))
    copy = _Copy(folder, lake, overlay)
    try:
        list(copy.poll())
    finally:
        copy.close()


class _Copy(Shipper):
    """Takes what a lake has not, and holds nothing of the WAL."""

    def __init__(self, directory: Path, lake: Lake, overlay: Lake) -> None:
        super().__init__(directory, overlay, node_of(lake, directory))
        self._shipped = lake

    def _sources(self) -> list[Source]:
        found = [
            one.source
            for table in (OPENINGS, BRONZE)
            for one in tiers(self._shipped, [self._directory], table)
            if one.tier is Place.HOT and one.source is not None
        ]
        return [replace(source, complete=True) for source in found]

    def _before(self, daemon: str) -> list[Manifest]:
        return self._shipped.manifests(BRONZE, daemon)

    def _hold(self) -> None:
        return

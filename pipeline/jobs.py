"""The jobs: which segments are new, and which tables they become.

A segment's rows are a function of its own file and of those in which its notices and answers were
handed over, however much later. A job compares these files with those that a table was made of, and
makes again what differs. So it may be killed anywhere and run again, and segments may come in any
order, twice, or years late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from purgatoryd.pipeline import gold, silver
from purgatoryd.pipeline.advice import open_spans
from purgatoryd.pipeline.continuity import excluded
from purgatoryd.pipeline.lake import OPENINGS, Lake, Manifest
from purgatoryd.pipeline.parts import Layer, Part, Segment
from purgatoryd.pipeline.reach import Reach, reaches
from purgatoryd.pipeline.schemas import FLOW, LIFECYCLES, TOPICS, WORKERS
from purgatoryd.pipeline.tiers import read_files

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

CHUNK_ROWS = 16_000_000
"""Rows of bronze that become one part."""
SMALL_BYTES = 64 << 20
"""Parts below this size are put together."""
NEVER = (1 << 63) - 1


def bronze_of(spark: SparkSession, lake: Lake, manifests: Iterable[Manifest]) -> DataFrame:
    """The rows of these files. Raises LakeBroken."""
    return read_files(spark, lake.files(manifests))


# ---- jobs ------------------------------------------------------------------------------------


def chunks(wanted: Iterable[Reach]) -> Iterator[list[Reach]]:
    """Runs of bounded cost."""
    run: list[Reach] = []
    for reach in wanted:
        if run and sum(r.cost for r in run) + reach.cost > CHUNK_ROWS:
            yield run
            run = []
        run.append(reach)
    if run:
        yield run


def make_silver(
    spark: SparkSession, lake: Lake, since_us: int = NEVER, ledgers: Path | None = None
) -> int:
    """Lifecycles of all WAL segments that are new, or have records of `since_us`, UTC, or later.

    `ledgers`: a folder in which subscribers noted what they received. Returns how many segments.
    Raises LakeBroken, LakeInUse.
    """
    received = silver.received(spark, ledgers) if ledgers else None

    def tables(run: Sequence[Reach]) -> dict[str, DataFrame]:
        files = {m.segment: m for reach in run for m in reach.manifests}
        bronze = bronze_of(spark, lake, (reach.own for reach in run))
        batches = bronze_of(spark, lake, files.values())
        return {LIFECYCLES.name: silver.lifecycles(bronze, batches, received)}

    return _make(Layer(lake.root, "silver"), reaches(lake.manifests()), since_us, tables)


def make_gold(spark: SparkSession, lake: Lake, since_us: int = NEVER) -> int:
    """Partials of all segments whose lifecycles are new; otherwise as make_silver."""
    lifecycles_of = Layer(lake.root, "silver")
    made, all_ = lifecycles_of.sources(), reaches(lake.manifests())
    there = {segment: reach for segment, reach in all_.items() if made.get(segment) == reach.names}

    def tables(run: Sequence[Reach]) -> dict[str, DataFrame]:
        lifecycles = lifecycles_of.read(spark, LIFECYCLES, [reach.own.segment for reach in run])
        return {
            TOPICS.name: gold.topics(lifecycles),
            WORKERS.name: gold.workers(lifecycles),
            FLOW.name: gold.flow(bronze_of(spark, lake, (reach.own for reach in run))),
        }

    return _make(Layer(lake.root, "gold"), there, since_us, tables)


def observed(spark: SparkSession, lake: Lake) -> tuple[DataFrame, DataFrame]:
    """Return all lifecycles, and how long the open ones of the same segments were observed, for
    advice.timeouts(). Raises LakeBroken.

    A timer that was carried over to a successor is open only there.
    """
    layer, segments = Layer(lake.root, "silver"), lake.manifests()
    gone = excluded([*segments, *lake.manifests(OPENINGS)]).gone
    made = layer.sources()
    here = (m for m in segments if m.segment in made and m.daemon not in gone)
    return layer.read(spark, LIFECYCLES), open_spans(bronze_of(spark, lake, here))


def _make(
    layer: Layer, reached: dict[Segment, Reach], since_us: int,
    tables: Callable[[Sequence[Reach]], dict[str, DataFrame]],
) -> int:  # fmt: skip
    with layer.writing():
        made = layer.sources()
        wanted = [
            reach for segment, reach in reached.items()
            if made.get(segment) != reach.names or reach.own.wall_to_us >= since_us
        ]  # fmt: skip
        for run in chunks(wanted):
            layer.commit(tables(run), {reach.own.segment: reach.names for reach in run})
    return len(wanted)


def bring_up(
    spark: SparkSession, lake: Lake, since_us: int = NEVER, ledgers: Path | None = None
) -> dict[str, int]:
    """Silver and gold of all that is new, or of `since_us` or later; how many segments of each."""
    return {
        "silver": make_silver(spark, lake, since_us, ledgers),
        "gold": make_gold(spark, lake, since_us),
    }


def compact(spark: SparkSession, lake: Lake) -> dict[str, int]:
    """Puts small parts together, and drops rows that were replaced; per layer, parts less."""
    return {name: _compact(spark, Layer(lake.root, name)) for name in ("silver", "gold")}


def _compact(spark: SparkSession, layer: Layer) -> int:
    with layer.writing():
        counting = layer.counting()
        alive = {part.number: part for part in counting.values()}
        chosen = _worth_it(alive.values(), counting)
        if not chosen:
            return 0
        retained = {s: part.sources[s] for s, part in counting.items() if part.number in chosen}
        frames = {t.name: layer.read(spark, t, retained).coalesce(1) for t in layer.tables}
        layer.commit(frames, retained)
    return len(chosen) - 1


def _worth_it(parts: Collection[Part], counting: Mapping[Segment, Part]) -> set[int]:
    """Small ones, if there are several, and those with rows that do not count."""
    small = {part.number for part in parts if part.bytes < SMALL_BYTES}
    partly = {
        part.number
        for part in parts
        if any(counting[segment].number != part.number for segment in part.sources)
    }
    return partly | (small if len(small) > 1 else set())

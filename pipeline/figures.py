"""The figures of the report: small tables, one set for each clock of a daemon, from bronze and its
lifecycles; clocks and lateness are those of silver and gold."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import gold, silver
from purgatoryd.pipeline.advice import open_spans, timeouts
from purgatoryd.pipeline.findings import Finding, slow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import DataFrame

BUCKETS = 120
"""Of time, in what is drawn over time."""
RANKS = (0.0, *(n / 100 for n in range(1, 100)), 0.995, 0.999, 0.9999, 1.0)
ACCURACY = 10_000
"""Of quantiles: a rank is off by at most its reciprocal."""
WANTED = 0.01
"""The rate of expiries that time-outs are proposed for."""
STAGES = (*silver.SERVICE, "receive")
HOUR_S, DAY_S = 3600, 86_400


@dataclass(frozen=True, slots=True)
class Flow:
    """What began and ended from `at_us` on, UTC."""

    at_us: int
    added: int = 0
    cancelled: int = 0
    replaced: int = 0
    expired: int = 0
    satisfied: int = 0
    failed: int = 0
    skipped: int = 0
    coalesced: int = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles, ns, at RANKS, of `n` values."""

    n: int
    quantiles: tuple[int, ...]

    def at(self, rank: float) -> int:
        """The quantile of one of RANKS."""
        return self.quantiles[RANKS.index(rank)]


@dataclass(frozen=True, slots=True)
class Advice:
    """A topic, as advice.timeouts has it."""

    namespace: str
    topic: str
    settled: int
    expired: int
    rate: float
    settled_p50_ns: int
    settled_p99_ns: int
    timeout_ns: int | None
    timeout_low_ns: int | None
    timeout_high_ns: int | None


@dataclass
class Profile:
    """What one daemon did live, in virtual time, or of bulk loads (`clock`).

    `due`: (begin of a column, row within it) to how many deadlines; `column_s` and `row_s` are
    their lengths.
    """

    daemon: str
    node: str
    clock: str
    begun_us: int
    ended_us: int
    flow: list[Flow] = field(default_factory=list)
    lateness: Spread | None = None
    stages: dict[str, Spread] = field(default_factory=dict)
    due: dict[tuple[int, int], int] = field(default_factory=dict)
    column_s: int = DAY_S
    row_s: int = HOUR_S
    advice: list[Advice] = field(default_factory=list)


class Figures(NamedTuple):
    """`slow`: as `pipeline slow` finds it, over all daemons of a node."""

    parts: list[Profile]
    slow: list[Finding]


def figures(bronze: DataFrame, received: DataFrame | None = None) -> Figures:
    """All of them; `received` as silver.received gives it. One pass over bronze for each table."""
    spans = bronze.groupBy("daemon", silver.clock().alias("clock")).agg(
        F.max_by("node", "at").alias("node"),
        F.min(F.unix_micros("at")).alias("begun_us"), F.max(F.unix_micros("at")).alias("ended_us"),
    )  # fmt: skip
    parts = [Profile(**row.asDict()) for row in spans.orderBy("clock", "begun_us").collect()]
    partials = [_filled_in(part, bronze, received) for part in parts]
    if not partials:
        return Figures([], [])
    topics, workers = (_together(tables) for tables in zip(*partials, strict=True))
    found = slow(topics, workers)
    for retained, _ in partials:
        retained.unpersist()
    return Figures(parts, found)


def _filled_in(
    part: Profile, bronze: DataFrame, received: DataFrame | None
) -> tuple[DataFrame, DataFrame]:
    """Fills in a part; its TOPICS, which stay in memory, and its WORKERS."""
    whole = bronze.where(F.col("daemon") == part.daemon)
    own = whole.where(silver.clock() == part.clock)
    part.flow = flow(own, silver.final_states(whole).where(F.col("clock") == part.clock), part)
    lived = silver.lifecycles(whole, whole, received).where(F.col("clock") == part.clock)
    _spread(part, lived)
    part.due = due(own, part)
    part.advice = _advice(lived, open_spans(whole).where(F.col("clock") == part.clock))
    topics = gold.topics(lived).persist()
    return topics, gold.workers(lived)


def _together(tables: Iterable[DataFrame]) -> DataFrame:
    return reduce(lambda some, more: some.unionByName(more), tables)


def flow(own: DataFrame, ended: DataFrame, part: Profile) -> list[Flow]:
    """What began and ended, over time. What was replaced ends on its own clock: a live timer may
    take the place of one that a bulk load brought."""
    step_us = max(1, (part.ended_us - part.begun_us) // BUCKETS + 1)
    began = own.where(silver.is_add()).select("at", F.lit("added").alias("kind"))
    final_states = ended.select(F.col("ended_at").alias("at"), F.col("final_state").alias("kind"))
    bucket = F.floor((F.unix_micros("at") - part.begun_us) / step_us) * step_us + part.begun_us
    counts = (F.count_if(F.col("kind") == one.name).alias(one.name) for one in fields(Flow)[1:])
    counted = began.unionByName(final_states).groupBy(bucket.alias("at_us")).agg(*counts)
    found = {row.at_us: Flow(**row.asDict()) for row in counted.collect()}
    last_us = max(part.ended_us, *found)
    return [found.get(at, Flow(at)) for at in range(part.begun_us, last_us + 1, step_us)]


# ---- lateness and stages ---------------------------------------------------------------------


def _spread(part: Profile, lived: DataFrame) -> None:
    """Fills in lateness and stages."""
    names = ("lateness", *STAGES)
    on_time = F.when(~gold.overdue(), F.col("lateness_ns"))
    row = lived.withColumn("lateness_ns", on_time).agg(
        *(F.count(f"{name}_ns").alias(f"{name}_n") for name in names),
        *(F.percentile_approx(f"{name}_ns", list(RANKS), ACCURACY).alias(name) for name in names),
    ).first()  # fmt: skip
    assert row is not None
    spreads = {n: Spread(row[f"{n}_n"], tuple(row[n])) for n in names if row[f"{n}_n"]}
    part.lateness = spreads.pop("lateness", None)
    part.stages = spreads


# ---- when it is due --------------------------------------------------------------------------


def due(own: DataFrame, part: Profile) -> dict[tuple[int, int], int]:
    """How many deadlines fall where; sets the sizes of the map's cells."""
    wall_ns = F.expr("unix_micros(at) * 1000 - at_ns + deadline_ns")
    seconds = F.floor(wall_ns / 1_000_000_000)
    armed = own.where("kind IN ('arm', 'watch', 'move') AND deadline_ns < 4000000000000000000")
    ends = armed.agg(F.min(seconds), F.percentile_approx(seconds, 0.999)).first()
    if ends is None or ends[0] is None:
        return {}
    part.column_s, part.row_s = _cells(ends[1] - ends[0])
    column = (F.floor(seconds / part.column_s) * part.column_s).alias("column_s")
    row = F.floor((seconds % part.column_s) / part.row_s).alias("row")
    counted = armed.where(seconds <= ends[1]).groupBy(column, row).count()
    return {(r.column_s, r.row): r["count"] for r in counted.collect()}


def _cells(span_s: int) -> tuple[int, int]:
    """Lengths of a column and of a row of the map."""
    if span_s > 3 * DAY_S:
        return DAY_S, HOUR_S
    return (HOUR_S, 300) if span_s > 3 * HOUR_S else (60, 5) if span_s > 600 else (10, 1)


# ---- time-outs -------------------------------------------------------------------------------


def _advice(lived: DataFrame, still_open: DataFrame) -> list[Advice]:
    """Of each topic in which something was cancelled or satisfied in time."""
    names = [one.name for one in fields(Advice)]
    rows = (
        timeouts(lived, WANTED, still_open)
        .where("settled > 0 AND topic IS NOT NULL")
        .orderBy("namespace", "topic")
    )
    return [Advice(**row.asDict()) for row in rows.select(names).collect()]

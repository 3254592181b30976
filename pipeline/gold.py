"""Gold: small tables of partials, one set per segment, that are merged when they are read.

So a segment that comes late, or again, replaces its own rows and moves no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import silver, sketches
from purgatoryd.pipeline.schemas import FINAL_STATES, FLOW, TOPICS, WORKERS, Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

WINDOW_S = 300
HOUR_S = 3600
LATENCIES = (*silver.SERVICE, "service", "lateness")
_LATE = 2  # PG_E_LATE: was due before a restart of the daemon
_FILE = ("daemon", "node", "epoch", "segment")
_SEGMENT = (*_FILE, "clock")


def window(at: str, seconds: int) -> Column:
    """The begin of the window of wall time in which `at` is."""
    whole = F.unix_micros(at) - F.pmod(F.unix_micros(at), F.lit(seconds * 10**6))
    return F.timestamp_micros(whole).alias("window_start")


# ---- partials --------------------------------------------------------------------------------


def topics(lifecycles: DataFrame) -> DataFrame:
    """TOPICS of lifecycles."""
    settled = F.col("final_state").isin("cancelled", "satisfied")
    times = {
        "settled": F.when(settled, F.col("remote_ns")),
        "asked": F.col("deadline_ns") - F.col("armed_ns"),
    }
    by = {name: F.col(name) for name in ("namespace", "topic")}
    return _partials(lifecycles, TOPICS, by | {"window_start": window("ended_at", WINDOW_S)}, times)


def workers(lifecycles: DataFrame) -> DataFrame:
    """WORKERS of lifecycles."""
    by = {"worker": F.col("worker"), "window_start": window("ended_at", HOUR_S)}
    return _partials(lifecycles, WORKERS, by, {})


def _partials(
    lifecycles: DataFrame, table: Table, by: dict[str, Column], times: dict[str, Column]
) -> DataFrame:
    """What is summed and sketched becomes plain columns first: a projection is compiled, and what
    stands inside the aggregate of a sketch is interpreted row by row."""
    values = {**{name: F.col(f"{name}_ns") for name in silver.SERVICE}, **times}
    values |= {
        "service": silver.service_ns(),
        "lateness": F.when(~overdue(), F.col("lateness_ns")),
    }
    counts = {
        "ended": F.lit(1),
        **{name: _one(F.col("final_state") == name) for name in FINAL_STATES},
        "overdue": _one(overdue()),
    }
    columns = by | {name: count.cast("long") for name, count in counts.items()} | values
    rows = lifecycles.select(*_SEGMENT, *(column.alias(name) for name, column in columns.items()))
    sums = [_sum(F.col(name), name) for name in counts]
    made = [sketches.sketch(F.col(name), name) for name in values]
    return rows.groupBy(*_SEGMENT, *by).agg(*sums, *made).select(table.names)


def overdue() -> Column:
    """Of a lifecycle: it expired late because of a restart, which no figure of lateness counts."""
    late = F.coalesce(F.col("flags").bitwiseAND(_LATE) != 0, F.lit(False))
    return late & (F.col("final_state") == "expired")


def _one(condition: Column) -> Column:
    return F.when(condition, 1).otherwise(0)


def _sum(value: Column, name: str) -> Column:
    return F.sum(value).cast("long").alias(name)


def _final_states(final_state: Column) -> list[Column]:
    return [_sum(_one(final_state == name), name) for name in FINAL_STATES]


def flow(bronze: DataFrame) -> DataFrame:
    """FLOW of rows of a WAL. An add that replaces is an end and an add in one row; the end is
    on the clock of what it ended."""
    kind = F.col("kind")
    added, replaced = kind.isin("arm", "watch"), silver.is_replacing()
    bytes_ = F.octet_length("key") + payload_len()
    final_state = F.when(replaced, "replaced").when(silver.is_end(), F.col("cause"))
    own = silver.clock()
    counted = bronze.groupBy(
        *_FILE, "namespace", window("at", WINDOW_S), own.alias("clock"),
        F.when(replaced, silver.replaced_clock()).otherwise(own).alias("ended_on"),
    ).agg(
        _sum(_one(added), "added"), _sum(F.when(added, bytes_).otherwise(0), "bytes"),
        *_final_states(F.coalesce(final_state, F.lit(""))),
        _sum(_one(kind == "move"), "extended"), _sum(_one(kind == "unknown"), "unknown"),
    )  # fmt: skip
    return _each_on_its_clock(counted)


def _each_on_its_clock(counted: DataFrame) -> DataFrame:
    """FLOW of its counts by `clock` and by `ended_on`, the clock of what was replaced."""
    by = (*_FILE, "namespace", "window_start")
    counts = [name for name in FLOW.names if name not in (*by, "clock")]

    def on(clock: str, *, replaced: bool) -> Column:
        retained = (F.col(n) if (n == "replaced") == replaced else F.lit(0) for n in counts)
        values = (value.cast("long").alias(n) for n, value in zip(counts, retained, strict=True))
        return F.struct(F.col(clock).alias("clock"), *values)

    both = F.array(on("clock", replaced=False), on("ended_on", replaced=True))
    each = counted.select(*by, F.inline(both))
    sums = (_sum(F.col(name), name) for name in counts)
    return each.groupBy(*by, "clock").agg(*sums).select(FLOW.names)


def payload_len() -> Column:
    """Of an add: what the daemon keeps of its payload, which of a parked one is nothing."""
    return F.when(F.col("parked") == 1, 0).otherwise(F.coalesce("payload_len", F.lit(0)))


# ---- merged ----------------------------------------------------------------------------------


def merge(partials: DataFrame, table: Table, by: Sequence[str | Column]) -> DataFrame:
    """Partials of TOPICS or WORKERS in one row per group; `by`: columns of theirs."""
    counts = [c.name for c in table.columns if c.type == "long" and c.name not in _SEGMENT]
    binaries = [c.name for c in table.columns if c.type == "binary"]
    return partials.groupBy(*by).agg(
        *(_sum(F.col(name), name) for name in counts), *(sketches.merged(n) for n in binaries)
    )


def latency(merged: DataFrame, by: Sequence[str]) -> DataFrame:
    """Per group and measure: n, p50_ns, p90_ns, p99_ns and max_ns, from a merged table."""
    ranks = {"p50_ns": 0.5, "p90_ns": 0.9, "p99_ns": 0.99, "max_ns": 1.0}
    return unpivot(merged, by, LATENCIES).select(
        *by, "measure", sketches.count("sketch").alias("n"),
        *(sketches.quantile("sketch", rank).alias(name) for name, rank in ranks.items()),
    ).where("n > 0")  # fmt: skip


def unpivot(merged: DataFrame, by: Sequence[str], measures: Sequence[str]) -> DataFrame:
    """Columns of sketches as rows: `measure` and `sketch`."""
    return merged.unpivot([*by], [*measures], "measure", "sketch")

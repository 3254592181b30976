"""Advice: which time-out gives the wanted rate of expiries, and when an arena will be full."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import gold, silver
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.living import as_of, in_place, living, reached, stopped
from purgatoryd.pipeline.schemas import FINAL_STATES
from purgatoryd.shm_layout._core import lib

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from purgatoryd.pipeline.parts import Segment

DAY_S = 86_400
GRANULE: int = lib.PG_GRANULE
FAR_S = 3650 * DAY_S
"""Who is full in ten years is never full."""


def timeouts(
    lifecycles: DataFrame, wanted: float, still_open: DataFrame | None = None
) -> DataFrame:
    """Per clock, namespace and topic, the time-out with which a share `wanted` would expire.

    Uses the product-limit estimator (Kaplan and Meier 1958). Timers that expired, were replaced or
    failed, and those of `still_open` (see open_spans()), had not settled and count as censored.
    Columns: clock, namespace, topic, settled (how many were cancelled or satisfied in time),
    expired, rate, settled_p50_ns, settled_p99_ns, asked_p50_ns, timeout_ns, and its interval of
    95 %, timeout_low_ns and timeout_high_ns: where the bounds of the estimate, by Greenwood's
    variance of log(-log S), reach the share (Brookmeyer and Crowley 1982). Null is unknown: no
    timer was observed for that long. Times are rounded up, by less than 1 %.
    """
    rows = lifecycles.where("remote_ns >= 0").select(
        *BY, _span(F.col("remote_ns")), _asked_ns(),
        _one(F.col("final_state").isin(*SETTLED)).alias("settled"),
        _one(F.col("final_state") == "expired").alias("expired"),
    )  # fmt: skip
    if still_open is not None:
        rows = rows.unionByName(still_open, allowMissingColumns=True)
    counted = rows.groupBy(*BY, "span_ns").agg(
        F.count("*").alias("ended"), F.sum("settled").alias("settled"),
        F.sum("expired").alias("expired"),
    ).fillna(0, ["settled", "expired"])  # fmt: skip
    asked = rows.groupBy(*BY).agg(F.percentile_approx("asked_ns", 0.5).alias("asked_p50_ns"))
    found = survival(counted, BY).groupBy(*BY).agg(
        F.sum("settled").alias("settled"), F.sum("expired").alias("expired"),
        _first(F.col("settled_share") >= 0.5, "settled_p50_ns"),
        _first(F.col("settled_share") >= 0.99, "settled_p99_ns"),
        *(_first(F.col(bound) <= wanted + ROUNDING, name) for name, bound in _REACHED.items()),
    )  # fmt: skip
    same = [found[name].eqNullSafe(asked[name]) for name in BY]
    ends = F.col("settled") + F.col("expired")
    return found.join(asked, same).select(
        *(found[name] for name in BY), "settled", "expired",
        (F.col("expired") / F.when(ends > 0, ends)).alias("rate"),
        "settled_p50_ns", "settled_p99_ns", "asked_p50_ns", *_REACHED,
    )  # fmt: skip


BY = ("clock", "namespace", "topic")
SETTLED = ("cancelled", "satisfied")
BINS_BITS = 7
"""Significant bits of a time after its first; times are rounded up, and exact up to 255 ns."""
Z = 1.959963984540054
"""Standard normal quantile of a 95 % interval."""
ROUNDING = 1e-12
"""Rounding error of a product of floats."""
_REACHED = {
    "timeout_ns": "survival", "timeout_low_ns": "survival_low",
    "timeout_high_ns": "survival_high",
}  # fmt: skip


def survival(counted: DataFrame, by: Sequence[str]) -> DataFrame:
    """The product-limit estimate at each `span_ns`: columns survival, survival_low and
    survival_high (95 %), and settled_share, of all that settled.

    `counted`: by group and `span_ns`, how many `ended` there in any way, and how many of these
    `settled`; the others are censored there. The share that has not settled is the product of
    1 - settled / at_risk. Timers that are censored at the same span count as at risk (Kaplan and
    Meier 1958). The bounds are null where the variance is unknown.
    """
    in_order = Window.partitionBy(*by).orderBy("span_ns")
    upto, onwards = (
        in_order.rowsBetween(Window.unboundedPreceding, 0),
        in_order.rowsBetween(0, Window.unboundedFollowing),
    )
    risk = counted.withColumn("at_risk", F.sum("ended").over(onwards).cast("double"))
    left = F.col("at_risk") - F.col("settled")
    variance = F.when(left > 0, F.col("settled") / (F.col("at_risk") * left))
    steps = risk.select(
        *counted.columns, F.product(left / F.col("at_risk")).over(upto).alias("survival"),
        F.sum(variance).over(upto).alias("greenwood"),
        F.try_divide(F.sum("settled").over(upto), F.sum("settled").over(Window.partitionBy(*by)))
        .alias("settled_share"),
    )  # fmt: skip
    inside = (F.col("survival") > 0) & (F.col("survival") < 1)
    width = F.exp(F.try_divide(Z * F.sqrt("greenwood"), F.abs(F.log("survival"))))
    return steps.select(
        *counted.columns, "survival", "settled_share",
        F.when(inside, F.pow("survival", width)).when(F.col("survival") >= 1, 1.0)
        .otherwise(0.0).alias("survival_low"),
        F.when(inside, F.pow("survival", 1 / width)).when(F.col("survival") >= 1, 1.0)
        .alias("survival_high"),
    )  # fmt: skip


def open_spans(bronze: DataFrame) -> DataFrame:
    """Return how long each open timer and operation in `bronze` was observed, up to its daemon's
    newest record, for timeouts()."""
    newest = bronze.groupBy("daemon").agg(F.max("at_ns").alias("newest_ns"))
    adds = silver.open_adds(bronze).join(F.broadcast(newest), "daemon")
    spans = adds.withColumn("open_ns", F.col("newest_ns") - F.col("armed_ns"))
    return spans.where("open_ns >= 0").select(
        silver.clock().alias("clock"), "namespace", "topic", _span(F.col("open_ns")), _asked_ns()
    )


def _span(ns: Column) -> Column:
    """Round up to BINS_BITS significant bits."""
    bits = F.floor(F.log2(F.greatest(ns, F.lit(1)))) - BINS_BITS
    step = F.pow(F.lit(2.0), F.greatest(bits, F.lit(0)))
    return (F.ceil(ns / step) * step).cast("long").alias("span_ns")


def _asked_ns() -> Column:
    return (F.col("deadline_ns") - F.col("armed_ns")).alias("asked_ns")


def _one(condition: Column) -> Column:
    return F.when(condition, 1).otherwise(0).cast("long")


def _first(holds: Column, name: str) -> Column:
    """Aggregate: the shortest span at which `holds` is true; null if it never is."""
    return F.min(F.when(holds, F.col("span_ns"))).alias(name)


def live(flow: DataFrame, anchors: DataFrame) -> DataFrame:
    """How many timers and operations lived at the end of each window of each daemon, and how many
    bytes their keys and payloads took: columns daemon, at, living, living_bytes.

    `anchors`: from anchors(); other daemons are left out. Each figure is that of the anchor minus
    the later changes in `flow`. The record of a final state has no size; the average size of an add
    is used.
    """
    final_states = sum((F.col(name) for name in FINAL_STATES), F.lit(0))
    of_daemon = Window.partitionBy("daemon")
    after = of_daemon.orderBy("window_start").rowsBetween(1, Window.unboundedFollowing)
    average = F.try_divide(F.sum("came").over(of_daemon), F.sum("added").over(of_daemon))
    inside = flow.join(F.broadcast(anchors), "daemon").where("segment BETWEEN from_lsn AND upto")
    by = ("daemon", "window_start", "anchor_at", "then_living", "then_bytes")
    windows = inside.groupBy(*by).agg(
        F.sum("added").alias("added"), F.sum("bytes").alias("came"),
        F.sum(final_states).alias("ended"),
    )  # fmt: skip
    net = {"living": F.col("added") - F.col("ended")}
    net["living_bytes"] = F.col("came") - F.col("ended") * F.col("average")
    anchor = {"living": "then_living", "living_bytes": "then_bytes"}
    then = [
        (F.col(anchor[name]) - F.coalesce(F.sum(change).over(after), F.lit(0))).alias(name)
        for name, change in net.items()
    ]
    end = F.col("window_start") + F.make_dt_interval(secs=F.lit(gold.WINDOW_S))
    counted = windows.withColumn("average", F.coalesce(average, F.lit(0.0)))
    return counted.select("daemon", F.least(end, "anchor_at").alias("at"), *then)


def capacity(
    flow: DataFrame, sizes: DataFrame, anchors: DataFrame, past_s: int = DAY_S
) -> DataFrame:
    """Per daemon what lives, and when its slots or its memory for keys and payloads are used up if
    it goes on as in the last `past_s`. `sizes`, `anchors`: as sizes() and anchors() have them.

    Columns: daemon, node, as_of, live, slots, live_bytes, bytes, per_hour and bytes_per_hour (the
    slopes of straight lines through the live figures, including that at `as_of`), full_at and
    full_by: the resource that is exhausted first. These are null if nothing grows, if it takes more
    than ten years, and for a stopped daemon. Slopes are null if `flow` has nothing of the daemon.
    """
    now = sizes.select("daemon", F.col("as_of").alias("at"), "living", "living_bytes")
    known = now.where("living IS NOT NULL").join(anchors.select("daemon"), "daemon", "left_semi")
    points = live(flow, anchors).unionByName(known)
    last = F.max("at").over(Window.partitionBy("daemon"))
    near = F.col("at") >= F.col("last") - F.make_dt_interval(secs=F.lit(past_s))
    slopes = [_slope(used).alias(f"{name}_slope") for name, used in _USED.items()]
    found = points.withColumn("last", last).where(near).groupBy("daemon").agg(*slopes)
    found = found.join(sizes, "daemon", "right")
    left_s = {name: _left_s(name, used) for name, used in _USED.items()}
    first_s = F.when(~F.col("stopped"), F.least(*left_s.values()))
    soon = F.when(first_s < FAR_S, (F.unix_seconds("as_of") + first_s).cast("long"))
    by = F.when(left_s["bytes"] <= F.coalesce(left_s["slots"], F.lit(FAR_S)), "bytes")
    return found.select(
        "daemon", "node", "as_of",
        F.col("living").alias("live"), "slots", F.col("living_bytes").alias("live_bytes"), "bytes",
        (F.col("slots_slope") * gold.HOUR_S).alias("per_hour"),
        (F.col("bytes_slope") * gold.HOUR_S).alias("bytes_per_hour"),
        F.timestamp_seconds(soon).alias("full_at"),
        F.when(soon.isNotNull(), F.coalesce(by, F.lit("slots"))).alias("full_by"),
    )  # fmt: skip


_USED = {"slots": "living", "bytes": "living_bytes"}


def _slope(used: str) -> Column:
    return F.regr_slope(used, F.unix_seconds("at"))


def _left_s(capacity: str, used: str) -> Column:
    """Seconds until a capacity is used up; null if it never is."""
    slope = F.col(f"{capacity}_slope")
    left_s = (F.col(capacity) - F.col(used)) / F.when(slope > 0, slope)
    return F.when(left_s < 0, 0).otherwise(left_s)


def sizes(spark: SparkSession, lake: Lake) -> DataFrame:
    """daemon, node, as_of (its newest record), living, living_bytes, slots, bytes and stopped (it
    has ended, by that record) of each daemon that counts. Raises LakeBroken.

    Without a snapshot nobody knows the capacities, nor what lives unless the first record is there.
    """
    segments, openings = in_place(lake)
    manifests = sorted((*openings.values(), *segments), key=lambda m: m.wall_to_us)
    newest = {m.daemon: m for m in manifests}
    capacities = {
        daemon: _capacities(*lake.files([opening])) for daemon, opening in openings.items()
    }
    counts, ended = _counted(living(spark, lake)), stopped(lake)
    whole = {*capacities, *(m.daemon for m in segments if m.began_empty)}
    rows = [
        (
            name, m.node, _moment(m.wall_to_us),
            *(counts.get(name, (0, 0)) if name in whole else (None, None)),
            *capacities.get(name, (None, None)), name in ended,
        )
        for name, m in newest.items()
    ]  # fmt: skip
    return spark.createDataFrame(rows, SIZES)


SIZES = (
    "daemon string, node string, as_of timestamp, living long, living_bytes long, slots long, "
    "bytes long, stopped boolean"
)


def _counted(adds: DataFrame) -> dict[str, tuple[int, int]]:
    """Return, by daemon, the number of adds and the memory that they take."""
    counted = adds.groupBy("daemon").agg(
        F.count("*").alias("living"), F.sum(_memory()).alias("living_bytes")
    )  # fmt: skip
    return {row.daemon: (row.living, row.living_bytes) for row in counted.collect()}


def anchors(spark: SparkSession, lake: Lake, made: Container[Segment]) -> DataFrame:
    """daemon, from_lsn and upto (the newest records that all are in the tables made of these
    segments), anchor_at (time of the last), then_living and then_bytes: the live figures at exactly
    that record. Daemons for which these are unknown are left out. Raises LakeBroken.

    A snapshot may be newer than the tables, so its figures must not be compared with theirs.
    """
    reaches = reached(lake, made)
    found = as_of(lake, reaches)
    counts = _counted(living(spark, lake, found))
    rows = [
        (name, reach.from_lsn, reach.upto, _moment(reach.wall_to_us), *counts.get(name, (0, 0)))
        for name, reach in reaches.items() if name in {m.daemon for m in found.segments}
    ]  # fmt: skip
    return spark.createDataFrame(rows, ANCHORS)


ANCHORS = (
    "daemon string, from_lsn long, upto long, anchor_at timestamp, then_living long, "
    "then_bytes long"
)


def _moment(wall_us: int) -> datetime:
    return datetime.fromtimestamp(wall_us / 1e6, UTC)


def _memory() -> Column:
    """What the key of an add takes, and its payload, if it has that."""
    size = F.octet_length("key") + gold.payload_len()
    return F.ceil(size / GRANULE) * GRANULE


def _capacities(snapshot: str) -> tuple[int | None, int | None]:
    """The slots of an arena and its memory for keys and payloads; of a shipped snapshot."""
    known = [name for name in ("count", "payload_bytes") if name in pq.read_schema(snapshot).names]
    heads = pq.read_table(snapshot, columns=known, filters=[("kind", "=", "head")]).to_pylist()
    head: dict[str, int | None] = next(iter(heads), {})
    return head.get("count"), head.get("payload_bytes")

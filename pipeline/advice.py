"""Advice: which time-out gives the wanted rate of expiries, and when an arena will be full."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import gold, sketches
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.living import in_place, living
from purgatoryd.pipeline.schemas import TOPICS
from purgatoryd.shm_layout._core import lib

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

DAY_S = 86_400
GRANULE: int = lib.PG_GRANULE
FAR_S = 3650 * DAY_S
"""Who is full in ten years is never full."""


def timeouts(topics: DataFrame, wanted: float) -> DataFrame:
    """Per clock, namespace and topic, the time-out with which a share `wanted` would expire.

    Columns: clock, namespace, topic, settled (how many were cancelled or satisfied in time),
    expired, rate, settled_p50_ns, settled_p99_ns, asked_p50_ns, timeout_ns. What expired would
    have settled later than its time-out, nobody knows when: so `timeout_ns` is null where more
    than was ever asked for is needed, and too long rather than too short where time-outs differ.
    """
    by = ["clock", "namespace", "topic"]
    settled, total = sketches.count("settled"), sketches.count("settled") + F.col("expired")
    rank = (1 - F.lit(wanted)) * total / F.when(settled > 0, settled)
    return gold.merge(topics, TOPICS, by).select(
        *by, settled.alias("settled"), "expired",
        (F.col("expired") / F.when(total > 0, total)).alias("rate"),
        sketches.quantile("settled", 0.5).alias("settled_p50_ns"),
        sketches.quantile("settled", 0.99).alias("settled_p99_ns"),
        sketches.quantile("asked", 0.5).alias("asked_p50_ns"),
        sketches.quantile_at("settled", F.when(rank <= 1, rank)).alias("timeout_ns"),
    )  # fmt: skip


def live(flow: DataFrame, sizes: DataFrame) -> DataFrame:
    """How many timers and operations lived at the end of each window of each daemon, and how many
    bytes their keys and payloads took.

    `sizes`: daemon, living and living_bytes (at the end of the newest one; null if not known);
    others are left out. The record of a final state has no size: each is taken for that of the
    average add.
    """
    final_states = sum((F.col(name) for name in gold.FINAL_STATES), F.lit(0))
    of_daemon = Window.partitionBy("daemon")
    after = of_daemon.orderBy("window_start").rowsBetween(1, Window.unboundedFollowing)
    average = F.try_divide(F.sum("came").over(of_daemon), F.sum("added").over(of_daemon))
    windows = flow.groupBy("daemon", "window_start").agg(
        F.sum("added").alias("added"),
        F.sum("bytes").alias("came"),
        F.sum(final_states).alias("ended"),
    )
    net = {"living": F.col("added") - F.col("ended")}
    net["living_bytes"] = F.col("came") - F.col("ended") * F.col("average")
    then = [
        (F.col(now) - F.coalesce(F.sum(change).over(after), F.lit(0))).alias(now)
        for now, change in net.items()
    ]
    counted = windows.withColumn("average", F.coalesce(average, F.lit(0.0))).join(
        F.broadcast(sizes), "daemon"
    )
    return counted.select("daemon", "window_start", *then)


def capacity(flow: DataFrame, sizes: DataFrame, past_s: int = DAY_S) -> DataFrame:
    """Per daemon what lives, and when its slots or its memory for keys and payloads are used up if
    it goes on as in the last `past_s`. `sizes`: as sizes() has them.

    Columns: daemon, node, as_of, live, slots, live_bytes, bytes, per_hour and bytes_per_hour (the
    slopes of straight lines through what lived), full_at and full_by: what is used up first, null
    if nothing grows, or not within ten years. What is not known is null: so are the slopes of a
    daemon of whom `flow` has nothing yet.
    """
    windows = live(flow, sizes)
    last = F.max("window_start").over(Window.partitionBy("daemon"))
    near = F.col("window_start") >= F.col("last") - F.make_dt_interval(secs=F.lit(past_s))
    slopes = [_slope(used).alias(f"{name}_slope") for name, used in _USED.items()]
    found = windows.withColumn("last", last).where(near).groupBy("daemon").agg(*slopes)
    found = found.join(sizes, "daemon", "right")
    left_s = {name: _left_s(name, used) for name, used in _USED.items()}
    first_s = F.least(*left_s.values())
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
    return F.regr_slope(used, F.unix_seconds("window_start"))


def _left_s(capacity: str, used: str) -> Column:
    """Seconds until a capacity is used up; null if it never is."""
    slope = F.col(f"{capacity}_slope")
    left_s = (F.col(capacity) - F.col(used)) / F.when(slope > 0, slope)
    return F.when(left_s < 0, 0).otherwise(left_s)


def sizes(spark: SparkSession, lake: Lake) -> DataFrame:
    """daemon, node, as_of (its newest record), living, living_bytes, slots and bytes of each daemon
    that counts. Raises LakeBroken.

    Without a snapshot nobody knows the capacities, nor what lives unless the first record is there.
    """
    segments, openings = in_place(lake)
    manifests = sorted((*openings.values(), *segments), key=lambda m: m.wall_to_us)
    newest = {m.daemon: m for m in manifests}
    capacities = {
        daemon: _capacities(*lake.files([opening])) for daemon, opening in openings.items()
    }
    counted = living(spark, lake).groupBy("daemon").agg(
        F.count("*").alias("living"), F.sum(_memory()).alias("living_bytes")
    )  # fmt: skip
    counts = {row.daemon: (row.living, row.living_bytes) for row in counted.collect()}
    whole = {*capacities, *(m.daemon for m in segments if m.first_lsn == 1)}
    rows = [
        (
            name, m.node, _moment(m.wall_to_us),
            *(counts.get(name, (0, 0)) if name in whole else (None, None)),
            *capacities.get(name, (None, None)),
        )
        for name, m in newest.items()
    ]  # fmt: skip
    return spark.createDataFrame(rows, SIZES)


SIZES = (
    "daemon string, node string, as_of timestamp, living long, living_bytes long, slots long, "
    "bytes long"
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

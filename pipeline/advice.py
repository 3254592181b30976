"""Advice: which time-out gives the wanted rate of expiries, and when an arena will be full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import gold, sketches
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.living import living, newest_openings
from purgatoryd.pipeline.schemas import TOPICS

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

DAY_S = 86_400
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
    """How many timers and operations lived at the end of each window of each daemon.

    `sizes`: daemon, living (at the end of the newest one; null if not known) and slots.
    """
    ends = sum((F.col(name) for name in gold.OUTCOMES), F.lit(0))
    net = F.sum(F.col("added") - ends).alias("net")
    ordered = Window.partitionBy("daemon").orderBy("window_start")
    after = ordered.rowsBetween(1, Window.unboundedFollowing)
    then = F.col("living") - F.coalesce(F.sum("net").over(after), F.lit(0))
    windows = flow.groupBy("daemon", "node", "window_start").agg(net)
    return windows.join(F.broadcast(sizes), "daemon", "left").select(
        "daemon", "node", "window_start", "slots", then.alias("live")
    )


def capacity(flow: DataFrame, sizes: DataFrame, past_s: int = DAY_S) -> DataFrame:
    """Per daemon what lives, and when its slots are used up if it goes on as in the last `past_s`.

    Columns: daemon, node, as_of, live, slots, per_hour (the slope of a straight line through what
    lived), full_at: null if it does not grow, or not within ten years. What is not known is null.
    """
    windows = live(flow, sizes)
    last = F.max("window_start").over(Window.partitionBy("daemon"))
    near = F.col("window_start") >= F.col("last") - F.make_dt_interval(secs=F.lit(past_s))
    slope = F.regr_slope("live", F.unix_seconds("window_start"))
    found = windows.withColumn("last", last).where(near).groupBy("daemon").agg(
        F.max_by("node", "window_start").alias("node"), F.max("window_start").alias("last"),
        F.max_by("live", "window_start").alias("live"), F.max("slots").alias("slots"),
        slope.alias("slope"),
    )  # fmt: skip
    as_of = F.unix_seconds("last") + gold.WINDOW_S
    left_s = (F.col("slots") - F.col("live")) / F.when(F.col("slope") > 0, F.col("slope"))
    soon = F.when(left_s < FAR_S, (as_of + F.greatest(left_s, F.lit(0))).cast("long"))
    return found.select(
        "daemon", "node", F.timestamp_seconds(as_of).alias("as_of"), "live", "slots",
        (F.col("slope") * gold.HOUR_S).alias("per_hour"),
        F.timestamp_seconds(soon).alias("full_at"),
    )  # fmt: skip


def sizes(spark: SparkSession, lake: Lake) -> DataFrame:
    """daemon, living and slots of each daemon that has segments. Raises LakeBroken.

    Without a snapshot nobody knows the slots, nor what lives unless the first record is there.
    """
    openings = newest_openings(lake)
    slots = {daemon: _slots(lake.data(opening)) for daemon, opening in openings.items()}
    counts = {r.daemon: r["count"] for r in living(spark, lake).groupBy("daemon").count().collect()}
    first = {m.daemon: m.first_lsn for m in reversed(lake.manifests())}
    rows = [
        (name, counts.get(name, 0) if name in slots or lsn == 1 else None, slots.get(name))
        for name, lsn in first.items()
    ]
    return spark.createDataFrame(rows, "daemon string, living long, slots long")


def _slots(snapshot: Path) -> int | None:
    """Those that the arena had; of a shipped snapshot."""
    heads = pq.read_table(snapshot, columns=["count"], filters=[("kind", "=", "head")])
    return next(iter(heads["count"].to_pylist()), None)

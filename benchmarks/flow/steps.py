"""The steps of the pipeline benchmark. Each step yields its name and its figures, rates per second
first."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from flow import baseline, jvm, wal
from purgatoryd.pipeline import cold
from purgatoryd.pipeline.bulk_loading import BulkLoader
from purgatoryd.pipeline.jobs import make_gold, make_silver
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.promote import promote, selected, window_id
from purgatoryd.pipeline.sketches import sketch
from purgatoryd.pipeline.tier import Frontier, Tier, Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DAY_NS = 86_400 * 10**9
WINDOW_NS = 300 * 10**9
BASE_S = 1_893_456_000  # 2030-01-01, midnight
CANCELLED = 10  # one timer in CANCELLED is cancelled, in the cold tier
WARM_ADDS = 3  # number of warm bulk adds, after the cold one; their median is reported
STAGES = ("request_queue_ns", "remote_ns", "response_queue_ns", "send_ns")

Figures = dict[str, float]
Steps = Iterator[tuple[str, Figures]]


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def tables_and_tier(
    arguments: argparse.Namespace, folder: Path, session: Callable[[], SparkSession]
) -> Steps:
    """Run the steps from the WAL to gold, and the steps of the cold tier."""
    events = wal.events(arguments.wal_dir)
    lake = folder / "lake"
    yield "ship", shipped(arguments, folder, lake, events)
    spark = session()
    yield from tables(spark, lake, folder, events)
    yield from cold_tier(spark, folder / "tier", arguments.cold_rows)


def adds(arguments: argparse.Namespace, folder: Path, session: Callable[[], SparkSession]) -> Steps:
    """Run the bulk-add step, which turns rows into timers in a separate job."""
    yield "bulk add", bulk_add(session(), folder / "bulk", arguments.bulk_rows)


JOBS = {job.__name__: job for job in (tables_and_tier, adds)}
"""The jobs of one run, each in its own process. A job yields the figures of a step at once or in
parts."""


def noop(rows: DataFrame) -> None:
    """Compute all rows without storing them."""
    rows.write.format("noop").mode("overwrite").save()


# ---- ship --------------------------------------------------------------------------------------

_SHIP = """
import json, sys, time
from pathlib import Path
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.ship import Shipper
wal, lake = map(Path, sys.argv[1:])
lake.mkdir(parents=True)
began_s = time.perf_counter()
shipper = Shipper(wal, Lake(lake), "bench")
rows = sum(manifest.rows for manifest in shipper.poll())
shipper.close()
print(json.dumps([rows, time.perf_counter() - began_s]))
"""


def shipped(arguments: argparse.Namespace, folder: Path, lake: Path, events: int) -> Figures:
    """Ship the WAL twice, each time in a new process. The first time, the WAL is not in the page
    cache."""
    found: Figures = {}
    for name, place in (("cold", folder / "first"), ("warm", lake)):
        if name == "cold":
            baseline.forget(arguments.wal_dir)
        command = [sys.executable, "-c", _SHIP, str(arguments.wal_dir / wal.NAME), str(place)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows, seconds = json.loads(done.stdout)
        found[name] = rows / seconds
        (Path(arguments.wal_dir) / wal.NAME / "retention_holds").unlink(missing_ok=True)
    shutil.rmtree(folder / "first")
    found["baseline"] = baseline.written(arguments.wal_dir / wal.NAME, folder)
    found["to_pyarrow"] = found["baseline"] / found["warm"]
    return found


# ---- tables ------------------------------------------------------------------------------------


def tables(spark: SparkSession, lake: Path, folder: Path, events: int) -> Steps:
    """Build the tables bronze, silver and gold, and compute sketches from silver."""
    bronze = str(lake / "bronze" / "*" / "*.parquet")
    for name in ("cold", "warm"):
        place = folder / name
        place.mkdir()
        for part in ("bronze", "openings", "manifests"):
            (place / part).symlink_to(lake / part)
        one = Lake(place)
        for step, make in (("silver", make_silver), ("gold", make_gold)):
            with jvm.spending() as processor_s:
                seconds = timed(partial(make, spark, one))
            yield step, {name: events / seconds}
            yield f"{step}, {name}", processor_s
    yield "silver", {"baseline": events / baseline.silver(bronze, folder / "silver.parquet")}
    yield "gold", {"baseline": events / baseline.gold(bronze, folder / "silver.parquet")}
    files = str(folder / "warm" / "silver" / "lifecycles")
    lifecycles = spark.read.option("recursiveFileLookup", "true").parquet(files)
    count = lifecycles.count()
    for groups in (8, 8000):
        yield f"sketches of {groups} groups", sketched(lifecycles, files, groups, count)


def sketched(lifecycles: DataFrame, files: str, groups: int, count: int) -> Figures:
    """Compute sketches of four stages for each of `groups` groups."""
    from pyspark.sql import functions as f

    by = f.pmod(f.col("add_lsn"), f.lit(groups)).alias("by")
    made = [sketch(f.col(stage), stage) for stage in STAGES]
    rates = [
        count / timed(lambda: noop(lifecycles.groupBy(by).agg(*made))) for _ in ("cold", "warm")
    ]
    other = baseline.quantiles(f"{files}/**/*.parquet", STAGES, groups)
    return {"cold": rates[0], "warm": rates[1], "baseline": count / other}


# ---- the cold tier -----------------------------------------------------------------------------


def day(spark: SparkSession, rows: int) -> DataFrame:
    """Return timers spread over a day, in random order."""
    step = DAY_NS // rows
    return spark.range(rows).selectExpr(
        "'shop' as namespace", "'reminders' as topic", "concat('order:2030:', id) as key",
        'cast(concat(\'{"order": \', id, \', "remind": true}\') as binary) as payload',
        f"{BASE_S * 10**9} + pmod(xxhash64(id), {rows}) * {step} as deadline_ns",
    )  # fmt: skip


def cold_tier(spark: SparkSession, folder: Path, rows: int) -> Steps:
    """Bulk-load a day into a cold tier, cancel a tenth of its timers, and promote five minutes of
    it."""
    found: Figures = {}
    nobody = BulkLoader("nobody")  # no such daemon: cancels of this day must not reach a daemon
    for name in ("cold", "warm"):
        place = folder / name
        place.mkdir(parents=True)
        tier = Tier(place)
        seconds = timed(partial(cold.bulk_load, tier, day(spark, rows), "day", nobody))
        found[name] = rows / seconds
        if name == "cold":
            found["baseline"] = rows / baseline.cold_bulk_load(place, folder / "baseline")
            shutil.rmtree(place)
    yield "cold bulk load", found
    cold.cancel(tier, cancelled(rows), nobody)
    version = tier.version()
    ended = cold.tombstones_of(spark, tier, version.tombstones)
    times = [
        timed(lambda: noop(cold.alive(cold.rows_of(spark, tier, version.rows), ended)))
        for _ in ("cold", "warm")
    ]
    other = rows / baseline.anti_join(folder / "warm")
    yield "anti-join", {"cold": rows / times[0], "warm": rows / times[1], "baseline": other}
    yield "window", window(spark, tier, rows)


def cancelled(rows: int) -> pa.Table:
    """Return the keys of a tenth of the day's timers, as an Arrow table: Python objects would be
    measured as memory of the pipeline."""
    numbers = pa.array(np.arange(0, rows, CANCELLED)).cast(pa.string())
    count = len(numbers)
    keys = pa.compute.binary_join_element_wise("order:2030:", numbers, "").cast(pa.binary())
    return pa.table({
        "namespace": pa.repeat("shop", count), "key_type": pa.repeat("str", count), "key": keys,
    })  # fmt: skip


def select(spark: SparkSession, tier: Tier, one: Window) -> None:
    """Read the rows of a window without storing them."""
    noop(selected(spark, tier, one))


def window(spark: SparkSession, tier: Tier, rows: int) -> Figures:
    """Promote three windows of five minutes, one after another; return the figures of the
    last window."""
    noon_ns = BASE_S * 10**9 + DAY_NS // 2
    with wal.daemon("--capacity", str(max(1000, rows // 50)), "--payload-memory", "64M"):
        hot = BulkLoader(wal.NAME, timeout=wal.PATIENCE_S)
        taken = Frontier(noon_ns, tier.version().number)
        tier.save_window(Window(window_id(taken), hot.name, Frontier(0, 0), taken, "hot"))
        for iteration in range(3):  # the first two windows are warm-up
            until = Frontier(noon_ns + (iteration + 1) * WINDOW_NS, tier.version().number)
            one = Window(window_id(until), hot.name, tier.frontier("hot"), until)
            select_s = timed(partial(select, spark, tier, one))
            began_s = time.perf_counter()
            (done,) = promote(spark, tier, until.end_ns, hot)
            promote_s = time.perf_counter() - began_s
        hot.close()
    other = baseline.window(tier.lake, one)
    return {"rows": done.rows, "select_s": select_s, "promote_s": promote_s, "baseline_s": other}


# ---- bulk adds ---------------------------------------------------------------------------------


def bulk_add(spark: SparkSession, folder: Path, rows: int) -> Figures:
    """Add rows with Spark, first cold and then warm; as a baseline, add them with add_many in one
    process."""
    frame = day(spark, rows).selectExpr("namespace", "topic", "key", "payload", "3600.0D as delay")
    tasks = spark.sparkContext.defaultParallelism
    frame.repartition(tasks).write.parquet(str(folder))
    frame = spark.read.parquet(str(folder)).coalesce(tasks)
    size = ("--capacity", str(rows), "--payload-memory", "512M", "--bulk-load-rows", str(4 * rows))
    rates = []
    for _ in range(1 + WARM_ADDS):
        with wal.daemon(*size) as place:
            options = {"name": wal.NAME, "directory": str(place)}
            write = frame.write.format("purgatoryd").options(**options).mode("append")
            rates.append(rows / timed(write.save))
    with wal.daemon(*size):
        other = rows / baseline.added(folder)
    warm = statistics.median(rates[1:])
    return {"cold": rates[0], "warm": warm, "baseline": other, "to_add_many": warm / other}

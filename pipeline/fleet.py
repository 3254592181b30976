"""The daemons of a lake: what they hold and do by the journals, what they can by a file of theirs.

[hosts.alpha]
daemon = "0f3c..."        # its uuid, as in the lake
capacity = 1_000_000      # timers
speed = 200_000           # operations per second
labels = { rack = "a" }

[groups]
copies = ["orders-1", "orders-2"]   # namespaces that are to be apart
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Lake, Manifest
from purgatoryd.pipeline.plan import Host, Space
from purgatoryd.pipeline.schemas import BRONZE as BRONZE_TABLE
from purgatoryd.shm_layout.errors import BadPath, InvalidSetting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BEGINS = ("arm", "watch")
ENDS = ("fire", "end", "outcome")


def read_fleet(path: Path) -> tuple[dict[str, Host], dict[str, str]]:
    """({daemon's uuid: host}, {namespace: group}) of a file. Raises BadPath, InvalidSetting."""
    try:
        told = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadPath(str(path), f"cannot be read: {error}") from error
    hosts = {}
    for name, about in told.get("hosts", {}).items():
        host, daemon = _host(path, name, about)
        hosts[daemon] = host
    groups = {space: name for name, some in told.get("groups", {}).items() for space in some}
    return hosts, groups


def _host(path: Path, name: str, about: dict[str, Any]) -> tuple[Host, str]:
    known = {"daemon", "capacity", "speed", "labels"}
    if not {"daemon", "capacity", "speed"} <= about.keys() <= known:
        raise InvalidSetting(name, sorted(about), "daemon, capacity, speed, labels", str(path))
    labels = {str(key): str(value) for key, value in about.get("labels", {}).items()}
    return Host(name, int(about["capacity"]), float(about["speed"]), labels), about["daemon"]


def measured(bronze: DataFrame, openings: DataFrame) -> DataFrame:
    """daemon, namespace, live (timers and operations), rate (begins and ends per second of the
    time that the journals cover). `openings`: what was armed before the first record."""
    from pyspark.sql import functions as f

    begun = f.col("kind").isin(*BEGINS) & f.coalesce(f.col("replaced"), f.lit(0)).eqNullSafe(0)
    ended = f.col("kind").isin(*ENDS)
    change = f.when(begun, 1).when(ended, -1).otherwise(0)
    span_s = f.greatest(f.lit(1.0), (f.unix_micros(f.max("at")) - f.unix_micros(f.min("at"))) / 1e6)
    spans = bronze.groupBy("daemon").agg(span_s.alias("span_s"))
    flow = (
        bronze.filter("namespace is not null")
        .groupBy("daemon", "namespace")
        .agg(f.sum(change).alias("change"), f.count_if(begun | ended).alias("events"))
    )
    first = openings.filter(f.col("kind").isin(*BEGINS)).groupBy("daemon", "namespace")
    both = flow.join(first.count(), ["daemon", "namespace"], "full").join(spans, "daemon")
    live = f.coalesce("change", f.lit(0)) + f.coalesce("count", f.lit(0))
    rate = f.coalesce("events", f.lit(0)) / f.col("span_s")
    return both.select("daemon", "namespace", live.alias("live"), rate.alias("rate"))


def spaces(rows: Iterable[Any], hosts: dict[str, Host], groups: dict[str, str]) -> list[Space]:
    """The namespaces of measured(). Raises InvalidSetting for a daemon that the file lacks."""
    found = []
    for row in rows:
        if row.daemon not in hosts:
            raise InvalidSetting("hosts", row.daemon, "complete: this daemon is missing", "fleet")
        group = groups.get(row.namespace, "")
        host = hosts[row.daemon].name
        found.append(Space(row.namespace, host, max(0, row.live), row.rate, group))
    return found


def measured_in(spark: SparkSession, place: Path) -> DataFrame:
    """measured() of the journals in a lake. Raises BadPath, LakeBroken."""
    lake = Lake(place)
    opened: dict[str, Manifest] = {}
    for manifest in lake.manifests(OPENINGS):  # the first one of each daemon
        opened.setdefault(manifest.daemon, manifest)
    return measured(_rows(spark, lake, lake.manifests(BRONZE)), _rows(spark, lake, opened.values()))


def _rows(spark: SparkSession, lake: Lake, manifests: Iterable[Manifest]) -> DataFrame:
    paths = [str(lake.data(manifest).resolve()) for manifest in manifests]
    schema = BRONZE_TABLE.spark()
    return spark.read.schema(schema).parquet(*paths) if paths else spark.createDataFrame([], schema)

"""The daemons of a lake: what they hold and do by the WALs, what they can by a file of theirs.

[hosts.alpha]
daemon = "0f3c..."        # its uuid, as in the lake; or that of an arena whose place it took
capacity = 1_000_000      # timers
speed = 200_000           # operations per second
labels = { rack = "a" }

[groups]
copies = ["orders-1", "orders-2"]   # namespaces that are to be apart
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import silver
from purgatoryd.pipeline.continuity import newest_successor
from purgatoryd.pipeline.jobs import bronze_of
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.living import in_place, living
from purgatoryd.pipeline.rebalance_plan import Host, Space
from purgatoryd.shm_layout.errors import BadPath, InvalidSetting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_fleet(path: Path) -> tuple[dict[str, Host], dict[str, str]]:
    """({daemon's uuid: host}, {namespace: group}) of a file. Raises BadPath, InvalidSetting."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadPath(str(path), f"cannot be read: {error}") from error
    hosts: dict[str, Host] = {}
    for name, about in _table(path, "hosts", document.get("hosts", {})).items():
        host, daemon = _host(path, name, about)
        if daemon in hosts:
            raise InvalidSetting(f"{name}.daemon", daemon, "the daemon of only one host", str(path))
        hosts[daemon] = host
    return hosts, _groups(path, _table(path, "groups", document.get("groups", {})))


def _table(path: Path, name: str, value: Any) -> dict[str, Any]:
    table: dict[str, Any] = _of(path, name, value, dict, "a table")
    return table


def _of(path: Path, name: str, value: Any, kinds: Any, bound: str) -> Any:
    """The value, if it is of one of the types."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise InvalidSetting(name, value, bound, str(path))
    return value


def _groups(path: Path, groups: dict[str, Any]) -> dict[str, str]:
    bound = "a list of namespaces"
    return {
        _of(path, f"groups.{name}", space, str, bound): name
        for name, some in groups.items()
        for space in _of(path, f"groups.{name}", some, list, bound)
    }


def _host(path: Path, name: str, about: Any) -> tuple[Host, str]:
    known = {"daemon", "capacity", "speed", "labels"}
    if not {"daemon", "capacity", "speed"} <= _table(path, name, about).keys() <= known:
        raise InvalidSetting(
            name, sorted(about), "daemon, capacity, speed, and labels if needed", str(path)
        )
    labels = _table(path, f"{name}.labels", about.get("labels", {}))
    capacity = _of(path, f"{name}.capacity", about["capacity"], int, "a whole number above 0")
    speed = _of(path, f"{name}.speed", about["speed"], (int, float), "a number above 0")
    for subject, value in (("capacity", capacity), ("speed", speed)):
        if not 0 < value < math.inf:
            raise InvalidSetting(f"{name}.{subject}", value, "a number above 0", str(path))
    daemon: str = _of(path, f"{name}.daemon", about["daemon"], str, "the uuid of a daemon")
    words = {str(key): str(value) for key, value in labels.items()}
    return Host(name, capacity, float(speed), words), daemon


def of_today(
    hosts: Mapping[str, Host], successors: Mapping[str, str], absent: Set[str]
) -> dict[str, Host]:
    """{daemon's uuid: host}, with the uuid that each has now: another one after each recovery from
    the WAL. `successors`: of continuity; `absent`: who does not count, by excluded(). Raises
    InvalidSetting for two that are one by now, and for a shard in whose place there are others."""
    found: dict[str, Host] = {}
    for daemon, host in hosts.items():
        today = newest_successor(successors, daemon)
        if today in absent:
            bound = "a daemon that is in use: not replaced, and not still being resharded"
            raise InvalidSetting(f"{host.name}.daemon", today, bound, "fleet")
        if today in found:
            raise InvalidSetting(
                f"{host.name}.daemon", today, "the daemon of only one host", "fleet"
            )
        found[today] = host
    return found


def measured(bronze: DataFrame, living: DataFrame) -> DataFrame:
    """daemon, namespace, live (timers and operations), rate (adds and final states per second of
    the time that the WALs cover). `living`: the adds of what lives."""
    by = ["daemon", "namespace"]
    span_s = F.greatest(F.lit(1.0), (F.unix_micros(F.max("at")) - F.unix_micros(F.min("at"))) / 1e6)
    spans = bronze.groupBy("daemon").agg(span_s.alias("span_s"))
    counted = (silver.is_add() | silver.is_end()) & F.col("namespace").isNotNull()
    flow = bronze.where(counted).groupBy(*by).agg(F.count("*").alias("events"))
    live = living.groupBy(*by).agg(F.count("*").alias("live"))
    rate = F.coalesce(F.col("events") / F.col("span_s"), F.lit(0.0))
    return (
        flow.join(live, by, "full")
        .join(spans, "daemon", "left")  # a new arena may have filled no segment yet
        .select(*by, F.coalesce("live", F.lit(0)).alias("live"), rate.alias("rate"))
    )


def spaces(rows: Iterable[Any], hosts: Mapping[str, Host], groups: dict[str, str]) -> list[Space]:
    """The namespaces of measured(). Raises InvalidSetting for a daemon that the file lacks."""
    found = []
    for row in rows:
        if row.daemon not in hosts:
            raise InvalidSetting("hosts", row.daemon, "a table that includes this daemon", "fleet")
        group = groups.get(row.namespace, "")
        host = hosts[row.daemon].name
        found.append(Space(row.namespace, host, row.live, row.rate, group))
    return found


def measured_in(spark: SparkSession, place: Path) -> DataFrame:
    """Return measured() of the WALs in a lake. The timers of a replaced daemon count for the daemon
    that replaced it.

    Raises BadPath, LakeBroken.
    """
    lake = Lake(place)
    return measured(bronze_of(spark, lake, in_place(lake).segments), living(spark, lake))

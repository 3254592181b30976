"""Bulk loads of Spark and the cold tier into a daemon that is reached over tcp."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from cold_driver import reminders
from command_line import reported
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from real_daemon import StartDaemon, stats
from remote_place import Place, remote_place

from purgatoryd.clients import Client

pytestmark = pytest.mark.tier("test")


@pytest.fixture
def place(daemon: StartDaemon, tmp_path: Path) -> Place:
    return remote_place(daemon, tmp_path)


def test_rows_of_spark(spark: SparkSession, place: Place) -> None:
    remote, demo = place.remote, place.daemon
    rows = spark.range(0, 3000, 1, 2).selectExpr(
        "concat('k', id) as key", "3600.0D as delay", "cast(id as string) as payload", "id as row"
    )
    options = {
        "name": "demo", "tcp": remote.tcp, "server_key": place.server_key,
        "key_file": str(remote.key), "bulk_load": str(uuid4()),
    }  # fmt: skip
    for _ in range(2):
        rows.write.format("purgatoryd").mode("append").options(**options).save()
    assert (stats(demo)["adds"], stats(demo)["live"]) == (3000, 3000)
    with Client("demo", remote=remote) as timers:
        found = timers.get("k1234")
    assert found is not None
    assert found.payload == b"1234"
    without = {name: value for name, value in options.items() if name != "key_file"}
    with pytest.raises(PySparkException, match="key_file"):
        rows.write.format("purgatoryd").mode("append").options(**without).save()


@pytest.mark.tier("all")
@pytest.mark.usefixtures("spark")
def test_the_cold_tier(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, demo, lake, file = place.remote, place.daemon, tmp_path / "lake", tmp_path / "timers"
    where = ("--name", "demo", "--tcp", remote.tcp, "--server-key", place.server_key)
    monkeypatch.setenv("PURGATORYD_DIR", str(tmp_path))  # no daemon of that name is in this folder
    lake.mkdir()
    reminders(file)

    def cold(*arguments: str) -> dict[str, Any]:
        common = ("--lake", str(lake), *where, "--key-file", str(remote.key))
        return reported("pipeline", "cold", *arguments, *common)

    assert cold("bulk-load", str(file))["rows"] == 20
    window = cold("promote", "--window", "2030-01-01T00:10:00Z")
    assert (window["state"], window["results"]) == ("hot", {"ADDED": 10})
    assert stats(demo)["live"] == 10
    assert cold("cancel", "order:7", "order:17", "--namespace", "shop")["daemon"] == {
        "CANCELLED": 1, "UNKNOWN": 1,
    }  # fmt: skip
    assert cold("bulk-load", str(file), "--bulk-load-id", "again", "--replace")["rows"] == 20
    assert stats(demo)["live"] == 0
    assert cold("collect")["rows"] == 0

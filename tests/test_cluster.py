"""A Spark cluster of several processes: a master and two workers, each in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pyspark
from cluster_driver import ROWS, WORKERS
from conftest import StartDaemon
from machine import needs
from made_bronze import put, segments_of
from pyspark.sql import SparkSession
from real_daemon import eventually, stats
from test_pipeline_tables import SMALL, contents
from test_remote import free_port

from purgatoryd.pipeline import agent
from purgatoryd.pipeline.jobs import bring_up
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.loading import Loader
from purgatoryd.pipeline.session import java_home

SPARK = Path(pyspark.__file__).parent
DRIVER = Path(__file__).with_name("cluster_driver.py")
LIMIT_S = 600
"""A machine that is busy takes minutes for six JVMs; more is a hang."""


@contextmanager
def process(log: Path, cwd: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with children of its own, all of which end with it."""
    env = os.environ | {
        "JAVA_HOME": str(java_home()), "SPARK_HOME": str(SPARK), "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable, "SPARK_DAEMON_MEMORY": "256m",
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # they live for seconds
    }  # fmt: skip
    cwd.mkdir()
    with log.open("wb") as out:
        started = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def spark_class(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments)


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """The address of its master, once all workers are there."""
    port, log = free_port(), folder / "master.log"
    address = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        place = ("-h", "127.0.0.1", "--webui-port", "0")
        command = spark_class("master.Master", "-p", str(port), *place)
        stack.enter_context(process(log, folder / "master", *command))
        for n in range(WORKERS):
            own = folder / f"worker{n}"
            command = spark_class(
                "worker.Worker", "-c", "1", "-m", "512m", "-d", str(own), *place, address
            )
            stack.enter_context(process(folder / f"worker{n}.log", own, *command))
        eventually(lambda: log.read_text().count("Registering worker") == WORKERS, LIMIT_S)
        yield address


def test_a_cluster_makes_the_same_tables(
    spark: SparkSession, daemon: StartDaemon, tmp_path: Path
) -> None:
    needs("java")
    here, there = (tmp_path / name for name in ("here", "there"))
    for root in (here, there):
        root.mkdir()
        for segment in segments_of(SMALL):
            put(Lake(root), segment)
    spool, log = tmp_path / "spool", tmp_path / "driver.log"
    spool.mkdir()
    with cluster(tmp_path) as master:
        command = (sys.executable, str(DRIVER), master, str(there), str(spool))
        with process(log, tmp_path / "driver", *command) as driver:
            assert driver.wait(LIMIT_S) == 0, log.read_text()
    folders = json.loads(log.read_text().splitlines()[-1])
    assert {Path(cwd).relative_to(tmp_path).parts[0] for cwd in folders} == {"worker0", "worker1"}
    bring_up(spark, Lake(here))
    assert contents(spark, Lake(there)) == contents(spark, Lake(here))
    demo = daemon()
    with Loader(demo.name) as loader:
        delivered = list(agent.deliver(spool, loader))
    assert len(delivered) == WORKERS
    assert stats(demo)["live"] == ROWS

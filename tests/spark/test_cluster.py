"""A Spark cluster of several processes: a master and two workers, each in its own folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyspark
import pytest
from audit_stories import IN_PARTS, call, noted, ship, write_ledger
from cluster_driver import COMMANDS, ROWS, WORKERS
from cold_driver import reminders
from machine import needs
from pyspark.sql import SparkSession
from real_daemon import StartDaemon, eventually, free_port, stats
from stored_arena import WALS, StoredWal
from tables_oracle import contents
from wal_writer import S

from purgatoryd.cli.exits import Exit
from purgatoryd.pipeline import agent
from purgatoryd.pipeline.bulk_loading import BulkLoader
from purgatoryd.pipeline.jobs import bring_up
from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Lake
from purgatoryd.pipeline.session import java_home
from purgatoryd.shm_layout.wal import Walk, segments

pytestmark = pytest.mark.tier("all")

Reported = dict[str, tuple[int, list[dict[str, Any]]]]
SPARK = Path(pyspark.__file__).parent
DRIVER = Path(__file__).parents[1] / "support" / "cluster_driver.py"
LIMIT_S = 600
"""Seconds after which a test counts as hanging. A busy machine needs minutes for six JVMs."""


@contextmanager
def process(log: Path, cwd: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in its own process group, and kill the whole group at the end."""
    env = os.environ | {
        "JAVA_HOME": str(java_home()), "SPARK_HOME": str(SPARK), "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable, "SPARK_DAEMON_MEMORY": "256m",
        # for JVMs that run only for seconds
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }  # fmt: skip
    cwd.mkdir(exist_ok=True)
    with log.open("wb") as out:
        started = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):  # all processes of the group may have ended
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def spark_class(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments)


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Run a cluster in the block; yield the master's address when all workers have registered."""
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


def laid_out(root: Path) -> list[Path]:
    """Create the files for the driver in its folder: WALs, a ledger with a false line, and timers.
    Return the folders of the WALs."""
    folders = [root / "wal" / name for name in ("parts", "stored")]
    IN_PARTS.write(folders[0])
    StoredWal(WALS[-1], folders[1])
    false = call("add", 50, "z", "added", 5 * S)
    write_ledger(root / "ledgers", IN_PARTS.wal.uuid, noted(more=false))
    reminders(root / "reminders.parquet")
    return folders


def records_in(wal: Path) -> int:
    """Count the records of a WAL without the pipeline's decoder."""
    walk, count = Walk(), 0
    for file in segments(wal):
        walk.enter(file.path)
        count += sum(1 for _ in walk.frames())
    return count


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_cluster_does_what_one_box_does(
    spark: SparkSession, daemon: StartDaemon, tmp_path: Path
) -> None:
    """The driver gets relative paths, and the workers run in other folders than the driver."""
    needs("java")
    demo, root, log = daemon(), tmp_path / "driver", tmp_path / "driver.log"
    wals = laid_out(root)
    with cluster(tmp_path) as master:
        command = (sys.executable, str(DRIVER), master)
        with process(log, root, *command) as driver:
            assert driver.wait(LIMIT_S) == 0, log.read_text()
    reported = json.loads(log.read_text().splitlines()[-1])
    tasks = {Path(cwd).relative_to(tmp_path).parts[0] for cwd in reported["cwds"]}
    assert tasks == {"worker0", "worker1"}
    assert reported["records"] == records_in(wals[1])
    tables_agree(spark, root, wals, reported["commands"])
    verdict_holds(root, sum(map(records_in, wals)), reported["commands"])
    cold = [reported["commands"][name] for name in COMMANDS if name.startswith("cold")]
    assert [code for code, _ in cold] == [Exit.DONE] * len(cold)
    assert reported["commands"]["cold promote"][1][0]["results"] == {"ADDED": 9}
    assert reported["commands"]["cold verify"][1][0]["pending"] == 10
    with BulkLoader(demo.name) as loader:
        delivered = list(agent.deliver(root / "spool", loader))
    assert len(delivered) == WORKERS
    assert stats(demo)["live"] == 2 * ROWS + 9


def tables_agree(spark: SparkSession, root: Path, wals: list[Path], reported: Reported) -> None:
    """Check that the cluster's tables equal those that one machine makes of shipped segments."""
    (root / "here").mkdir()
    here, there = Lake(root / "here"), Lake(root / "lake")
    for wal in wals:
        ship(wal, here, socket.gethostname())
    made = bring_up(spark, here)
    count = sum(len(here.manifests(table)) for table in (BRONZE, OPENINGS))
    code, lines = reported["ingest"]
    assert (code, lines) == (Exit.DONE, [{"raw": count, **made}])
    assert contents(spark, there) == contents(spark, here)


def verdict_holds(root: Path, records: int, reported: Reported) -> None:
    """Check that the report has judged ingested and hot segments."""
    code, rows = reported["report"]
    assert code == Exit.BROKEN
    verdict = next(row for row in rows if "records" in row)
    assert (verdict["records"], verdict["violations"]) == (records, {"ack_lost": 1})
    assert "ack_lost" in (root / "page.html").read_text()
    assert not [*root.glob("*/hot/*/")]

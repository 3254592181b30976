"""Driver program of an application on a Spark cluster: it runs commands of the pipeline, and writes
timers both to files and to a daemon.

python cluster_driver.py MASTER

It uses paths relative to its working directory, as users do; the Spark workers have other working
directories. It prints a line of JSON: the folders in which tasks ran, and the report of each
command.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from small_plans import INTERPRETED

from purgatoryd.cli.app import app
from purgatoryd.pipeline.session import session

WORKERS = 2
ROWS = 1000
CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.sql.shuffle.partitions": str(WORKERS),
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
}
DEMO = "--lake lake --name demo"
COMMANDS = {
    "ingest": "--wal-dir wal --lake lake",
    "report": "--wal-dir wal --ledger ledgers --lake lake --out page.html",
    "cold bulk-load": f"reminders.parquet {DEMO}",
    "cold cancel": f"order:3 --namespace shop {DEMO}",
    "cold promote": f"--window 2030-01-01T00:10Z {DEMO}",
    "cold compact": "--lake lake",
    "cold verify": "--lake lake",
}
WITHOUT_SPARK = ("cold cancel",)


def reported(master: str, name: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a command. Return (exit code, lines of JSON that it printed)."""
    arguments = [*f"pipeline {name} {COMMANDS[name]} --json".split()]
    arguments += () if name in WITHOUT_SPARK else ("--master", master)
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    print(name, done.stderr)  # output for the log of the test
    return done.exit_code, [json.loads(line) for line in done.stdout.splitlines()]


def folder(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the folder in which this task runs. The task waits a moment, so that no worker takes
    all tasks."""
    for batch in batches:
        time.sleep(0.5)
        yield pa.RecordBatch.from_pydict({"cwd": [os.getcwd()] * batch.num_rows})


def timers(spark: SparkSession, prefix: str) -> DataFrame:
    """Return timers in one Spark partition for each worker."""
    return spark.range(0, ROWS, 1, WORKERS).selectExpr(
        f"concat('{prefix}', id) as key", "timestamp_seconds(4000000000) as deadline"
    )


def main(master: str) -> None:
    """Run all steps."""
    spark = session(master, CONF, "cluster")
    places = spark.range(0, 2 * WORKERS, 1, 2 * WORKERS).mapInArrow(folder, "cwd string")
    cwds = {row.cwd for row in places.collect()}
    records = spark.read.format("purgatoryd").load("wal/stored").count()
    writer = timers(spark, "filed").write.format("purgatoryd").mode("append")
    writer.options(name="demo", to="files").save("spool")
    writer = timers(spark, "added").write.format("purgatoryd").mode("append")
    writer.options(name="demo", directory=os.environ["PURGATORYD_DIR"]).save()
    # Up to this point Spark compiles all plans, which is its default.
    for setting, value in INTERPRETED.items():
        spark.conf.set(setting, value)
    commands = {name: reported(master, name) for name in COMMANDS}
    print(json.dumps({"cwds": sorted(cwds), "records": records, "commands": commands}))


if __name__ == "__main__":
    main(*sys.argv[1:])

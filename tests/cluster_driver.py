"""The driver of an application on a Spark cluster: makes silver and gold, writes timers to files.

    python cluster_driver.py MASTER LAKE SPOOL

Prints in which folders tasks ran.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from purgatoryd.pipeline.jobs import bring_up
from purgatoryd.pipeline.lake import Lake
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


def folder(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Where this task runs; it stays a moment, so that no worker takes all of them."""
    for batch in batches:
        time.sleep(0.5)
        yield pa.RecordBatch.from_pydict({"cwd": [os.getcwd()] * batch.num_rows})


def main(master: str, lake: str, spool: str) -> None:
    """All that is to be done."""
    spark = session(master, CONF, "cluster")
    places = spark.range(0, 2 * WORKERS, 1, 2 * WORKERS).mapInArrow(folder, "cwd string")
    cwds = {row.cwd for row in places.collect()}
    bring_up(spark, Lake(Path(lake)))
    timers = spark.range(0, ROWS, 1, WORKERS).selectExpr(
        "concat('k', id) as key", "timestamp_seconds(4000000000) as deadline", "'demo' as daemon"
    )
    timers.write.format("purgatoryd").mode("append").option("to", "files").save(spool)
    print(json.dumps(sorted(cwds)))


if __name__ == "__main__":
    main(*sys.argv[1:])

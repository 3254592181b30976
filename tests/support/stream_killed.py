"""A Spark stream that kills itself after it has stored a batch, before Spark logs the batch.

python stream_killed.py WAL CHECKPOINT KEPT

The kill also ends all processes that Spark runs for the stream.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from small_plans import SMALL_PLANS

from purgatoryd.pipeline.session import session

KILLED_AT = 1
"""Number of the batch after which the stream is killed."""


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Return the rows of a batch, sorted by segment and LSN."""
    return sorted((tuple(row) for row in frame.collect()), key=lambda row: row[3:5])


def keep(frame: DataFrame, number: int, retained: Path) -> None:
    """Store a batch in the folder `retained`. If Spark repeats a batch, its rows have to be the
    same."""
    found, path = rows(frame), retained / str(number)
    if path.exists():
        assert pickle.loads(path.read_bytes()) == found
    path.write_bytes(pickle.dumps(found))


def run(spark: SparkSession, wal: Path, checkpoint: Path, each: Any) -> None:
    """Stream all sealed segments, then end. `each` is called with each batch."""
    reader = spark.readStream.format("purgatoryd").options(node="node", max_rows="2000")
    query = (
        reader.option("retention_hold", "stream")
        .load(str(wal))
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main(wal: Path, checkpoint: Path, retained: Path) -> None:
    """Stream until the process is killed."""

    def each(frame: DataFrame, number: int) -> None:
        keep(frame, number, retained)
        if number == KILLED_AT:
            os.killpg(0, signal.SIGKILL)

    spark = session("local[1]", SMALL_PLANS | {"spark.driver.memory": "512m"})
    run(spark, wal, checkpoint, each)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

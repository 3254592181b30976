"""Baselines that do the work of the pipeline's steps with pyarrow, DuckDB or a client, on the same
files. Each baseline runs in a process of its own, whose memory is not counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow.parquet as pq

from flow import wal
from purgatoryd.clients import Client
from purgatoryd.pipeline.decode import Decoder
from purgatoryd.pipeline.lake import parquet_writer
from purgatoryd.pipeline.schemas import BRONZE
from purgatoryd.pipeline.sources import names_of
from purgatoryd.pipeline.tier import Window
from purgatoryd.shm_layout.wal import Walk, segments

MODULE = "flow.baseline"
NAMES = {
    "ship": "pyarrow writes the same batches",
    "silver": "DuckDB, a projection of the same rows",
    "gold": "DuckDB, exact quantiles",
    "sketches of 8 groups": "DuckDB, exact quantiles",
    "sketches of 8000 groups": "DuckDB, exact quantiles",
    "cold bulk load": "DuckDB, sorted, by hour",
    "anti-join": "DuckDB",
    "bulk add": "add_many in one process",
}


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def apart(subject: str, *arguments: object) -> float:
    """Run a function of WORK in a new process; return the function's result."""
    command = [sys.executable, "-m", MODULE, subject, *map(str, arguments)]
    folder = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def seconds(sql: str) -> float:
    """Return the seconds that DuckDB takes for a statement, with as many threads as there are
    CPUs."""
    return apart("statement", sql)


def _statement(sql: str) -> float:
    with duckdb.connect() as database:
        database.execute(f"SET threads = {len(os.sched_getaffinity(0))}")
        began_s = time.perf_counter()
        database.execute(sql)
        return time.perf_counter() - began_s


def written(directory: Path, folder: Path) -> float:
    """Return the rows per second with which pyarrow writes batches from memory to Parquet on
    disk."""
    return apart("written", directory, folder)


def _written(directory: str, folder: str) -> float:
    rows, spent_s = 0, 0.0
    decoder = Decoder("bench", names_of(Path(directory)))
    for file in segments(Path(directory))[:-1]:
        walk = Walk()
        walk.enter(file.path)
        batches = list(decoder.batches(walk))
        began_s = time.perf_counter()
        with open(Path(folder) / "baseline.parquet", "wb") as out:
            with parquet_writer(out, BRONZE) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            out.flush()
            os.fsync(out.fileno())
        spent_s += time.perf_counter() - began_s
        rows += sum(batch.num_rows for batch in batches)
    return rows / spent_s


def added(folder: Path) -> float:
    """Return the seconds that add_many takes for the rows in a folder; $PURGATORYD_DIR selects the
    daemon."""
    return apart("added", folder)


def _added(folder: str) -> float:
    table = pq.read_table(folder).drop_columns("namespace")
    with Client(wal.NAME, namespace="shop", timeout=60.0) as client:
        began_s = time.perf_counter()
        if not client.add_many(table).ok:
            raise SystemExit("timers were refused")
        return time.perf_counter() - began_s


def silver(bronze: str, out: Path) -> float:
    """Return the seconds to write one row for each final state, with the durations of its
    stages."""
    return seconds(f"""
        COPY (
            SELECT daemon, segment, lsn, kind, clock, cause, namespace, topic, ticket, key, add_lsn,
                session, worker, deadline_ns, sent_ns, received_ns, armed_ns, at_ns AS ended_ns,
                "at", armed_ns - received_ns AS request_queue_ns, at_ns - armed_ns AS remote_ns,
                at_ns - deadline_ns AS lateness_ns, sequence
            FROM read_parquet('{bronze}') WHERE kind IN ('fire', 'end', 'outcome')
        ) TO '{out}' (FORMAT parquet, COMPRESSION zstd)
    """)


def gold(bronze: str, silver: Path) -> float:
    """Return the seconds to compute quantiles for each topic and worker, and counts for each kind
    of event."""
    of = _quantiles(("request_queue_ns", "remote_ns", "lateness_ns"))
    window = 'time_bucket(INTERVAL {} MINUTES, "at")'
    return sum((
        seconds(f"CREATE TABLE a AS SELECT namespace, topic, {window.format(5)} AS w, {of} "
                f"FROM read_parquet('{silver}') GROUP BY ALL"),
        seconds(f"CREATE TABLE b AS SELECT worker, {window.format(60)} AS w, {of} "
                f"FROM read_parquet('{silver}') GROUP BY ALL"),
        seconds(f"CREATE TABLE c AS SELECT kind, {window.format(5)} AS w, count(*) "
                f"FROM read_parquet('{bronze}') GROUP BY ALL"),
    ))  # fmt: skip


def quantiles(files: str, stages: tuple[str, ...], groups: int) -> float:
    """Return the seconds to compute exact quantiles of stages for each group."""
    return seconds(
        f"CREATE TABLE t AS SELECT add_lsn % {groups} AS g, {_quantiles(stages)} "
        f"FROM read_parquet('{files}') GROUP BY g"
    )


def _quantiles(columns: tuple[str, ...]) -> str:
    return ", ".join(f"quantile_cont({name}, [0.5, 0.99])" for name in columns)


def cold_bulk_load(tier: Path, out: Path) -> float:
    """Return the seconds to sort the rows of a cold tier and to write one partition for each
    hour."""
    return seconds(f"""
        COPY (SELECT *, deadline_ns // 3600000000000 AS hour
              FROM read_parquet('{tier}/cold/due_hour=*/*.parquet', hive_partitioning = false)
              ORDER BY deadline_ns)
        TO '{out}' (FORMAT parquet, COMPRESSION lz4_raw, PARTITION_BY (hour))
    """)


_ENDED = """NOT EXISTS (
    SELECT 1 FROM read_parquet('{tier}/cold_tombstones/*.parquet') t
    WHERE t.key = r.key AND t.namespace = r.namespace AND t.key_type = r.key_type
      AND t.version > r.version)"""
_ROWS = "read_parquet('{tier}/cold/due_hour=*/*.parquet', hive_partitioning = false) r"


def anti_join(tier: Path) -> float:
    """Return the seconds to count the rows that have no tombstone, and to read all payload bytes
    of these rows."""
    return seconds(
        "SELECT count(*), sum(octet_length(payload)), sum(deadline_ns // 1000) FROM "
        f"{_ROWS.format(tier=tier)} WHERE {_ENDED.format(tier=tier)}"
    )


def window(tier: Path, one: Window) -> float:
    """Return the seconds to read those rows of a window that have no tombstone."""
    bounds = f"deadline_ns >= {one.since.end_ns} AND deadline_ns < {one.until.end_ns}"
    return seconds(
        f"CREATE TABLE w AS SELECT * FROM {_ROWS.format(tier=tier)} "
        f"WHERE {bounds} AND {_ENDED.format(tier=tier)}"
    )


WORK: dict[str, Callable[..., float]] = {
    "statement": _statement,
    "written": _written,
    "added": _added,
}

if __name__ == "__main__":
    print(WORK[sys.argv[1]](*sys.argv[2:]))

"""An independent computation of the silver and gold tables in DuckDB.

It joins each final state with its add. The product instead uses the add's fields that the record of
the final state repeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from purgatoryd.pipeline import sketches
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.parts import Layer
from purgatoryd.pipeline.schemas import FLOW, LIFECYCLES, TOPICS, WORKERS, Table

TABLES = {LIFECYCLES: "silver", TOPICS: "gold", WORKERS: "gold", FLOW: "gold"}

LIFECYCLES_SQL = """
WITH adds AS (SELECT * FROM bronze WHERE kind IN ('arm', 'watch')),
final_states AS (
    SELECT *, ticket AS ended, cause AS final_state FROM bronze
    WHERE (kind = 'fire' AND cause = 'expired')
       OR (kind = 'end' AND cause IN ('cancelled', 'skipped', 'coalesced'))
       OR kind = 'outcome'
    UNION ALL BY NAME
    SELECT *, replaced AS ended, 'replaced' AS final_state FROM bronze WHERE replaced IS NOT NULL
),
sent AS (SELECT * FROM bronze WHERE kind = 'sent'),
replied AS (
    SELECT daemon, session, built_ns, handed_ns,
        unnest(generate_series(sequence, sequence + count - 1)) AS batch
    FROM bronze WHERE kind = 'replied'
),
answers AS (
    SELECT DISTINCT ON (daemon, session, batch) * FROM replied ORDER BY built_ns, handed_ns
)
SELECT e.daemon, e.node, e.epoch, e.segment, e.lsn, e.ended AS ticket, e.final_state,
    if(e.kind = 'outcome', 'operation', 'timer') AS kind,
    if(a.bulk_load IS NOT NULL, 'bulk_load', if(e.clock = 'boot', 'live', e.clock)) AS clock,
    e.namespace, e.topic, e.key, e.key_type,
    if(e.final_state = 'replaced', e.ticket, NULL) AS replaced_by,
    e.at AS ended_at, e.at_ns AS ended_ns, e.flags,
    a.lsn AS add_lsn, a.session, a.worker, a.sent_ns, a.received_ns, a.armed_ns,
    CASE WHEN e.final_state = 'replaced' AND e.replaced_deadline_ns IS NULL THEN NULL
         WHEN e.final_state != 'replaced' AND e.deadline_ns IS NULL THEN NULL
         ELSE coalesce((SELECT arg_max(m.deadline_ns, m.lsn) FROM bronze m
                        WHERE m.kind = 'move' AND m.daemon = e.daemon AND m.ticket = e.ended
                            AND m.lsn < e.lsn),
                       a.deadline_ns) END AS deadline_ns,
    a.applied_ns - a.received_ns AS request_queue_ns,
    if(e.final_state = 'replaced', e.replaced_done_ns, e.done_ns) - a.applied_ns AS local_ns,
    e.at_ns - a.armed_ns AS remote_ns,
    coalesce(s.built_ns, if(r.built_ns < e.ended_boot_ns, e.ended_boot_ns, r.built_ns))
        - e.ended_boot_ns AS response_queue_ns,
    coalesce(s.handed_ns - s.built_ns, r.handed_ns - greatest(r.built_ns, e.ended_boot_ns))
        AS send_ns,
    if(e.kind = 'fire', a.slack_ns, NULL) AS slack_ns,
    if(e.final_state = 'expired',
       e.at_ns - greatest(e.deadline_ns + coalesce(-e.deadline_ns % a.slack_ns + a.slack_ns, 0)
                          % coalesce(a.slack_ns, 1), a.armed_ns), NULL) AS lateness_ns
FROM final_states e
LEFT JOIN adds a ON a.daemon = e.daemon AND a.ticket = e.ended
LEFT JOIN sent s ON s.daemon = e.daemon
    AND e.position >= s.positions_from AND e.position < s.positions_upto
LEFT JOIN answers r ON r.daemon = e.daemon AND r.session = e.ended_by AND r.batch = e.ended_batch
"""
OPEN_SQL = """
SELECT a.daemon, a.ticket, a.lsn, a.key, a.topic, a.worker, a.armed_ns,
    coalesce((SELECT arg_max(m.deadline_ns, m.lsn) FROM bronze m
              WHERE m.kind = 'move' AND m.daemon = a.daemon AND m.ticket = a.ticket),
             a.deadline_ns) AS deadline_ns
FROM bronze a WHERE a.kind IN ('arm', 'watch')
    AND NOT EXISTS (FROM lifecycles e WHERE e.daemon = a.daemon AND e.ticket = a.ticket)
"""
WINDOW_SQL = "time_bucket(INTERVAL '5 minutes', {0}::TIMESTAMP)"


class Oracle:
    """A DuckDB database with the table `bronze` of a lake, and the table `lifecycles` that is
    computed from it."""

    def __init__(self, files: list[Path]) -> None:
        self.db = duckdb.connect()
        self.db.execute("SET TimeZone = 'UTC'")
        names = [str(path) for path in files]
        self.db.execute(
            "CREATE TABLE bronze AS SELECT * FROM read_parquet(?, hive_partitioning = false)",
            [names],
        )
        self.db.execute(f"CREATE TABLE lifecycles AS {LIFECYCLES_SQL}")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self.db.execute(sql).fetchall()

    def take(self, name: str, frame: DataFrame) -> list[str]:
        """Store a Spark DataFrame as the table `name`. Return the names of its columns."""
        found: pa.Table = frame.toArrow()
        self.db.register("taken", found)
        self.db.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM taken")
        self.db.unregister("taken")
        return list(found.column_names)

    def differing(self, name: str, sql: str) -> list[tuple[Any, ...]]:
        """Return some rows that only the table `name` or only the query `sql` has. Compare the
        columns of `sql`."""
        names = ", ".join(column[0] for column in self.db.execute(sql).description or ())
        ours, theirs = f"SELECT {names} FROM {name}", f"SELECT {names} FROM ({sql})"
        return [
            *self.rows(f"{ours} EXCEPT ALL {theirs} LIMIT 5"),
            *self.rows(f"{theirs} EXCEPT ALL {ours} LIMIT 5"),
        ]


def same_schema(frame: DataFrame, table: Table) -> bool:
    """Return whether a DataFrame has the column names and types of `table`, in the same order."""
    ours = [(field.name, field.dataType) for field in frame.schema]
    return ours == [(field.name, field.dataType) for field in table.spark()]


def table(spark: SparkSession, lake: Lake, which: Table) -> DataFrame:
    return Layer(lake.root, TABLES[which]).read(spark, which)


def contents(
    spark: SparkSession, lake: Lake, tables: Iterable[Table] = TABLES
) -> dict[str, list[str]]:
    """Return the values that do not depend on chance, by table: rows, counts, and the minima and
    maxima of sketches."""
    found = {}
    for which in tables:
        rows = table(spark, lake, which)
        for name in sketch_columns(which) if which is not LIFECYCLES else ():
            ends = [sketches.quantile(name, rank).alias(f"{name}_{rank}") for rank in (0.0, 1.0)]
            rows = rows.select("*", *ends).drop(name)
        found[which.name] = sorted(map(repr, rows.collect()))
    return found


def sketch_columns(of: Table) -> list[str]:
    return [column.name for column in of.columns if column.type == "binary"]

"""Ledgers: what workers and subscribers noted, held against what the WAL says.

docs/reference/tables.md has the format of the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.window import Window

from purgatoryd.pipeline.checks import Check, judge, rows_of_bulk_loads
from purgatoryd.pipeline.continuity import Continuity, Run, is_complete
from purgatoryd.pipeline.lifecycles import KEYS
from purgatoryd.pipeline.session import literal
from purgatoryd.shm_layout.errors import BadPath

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = (
    "op string, ticket long, namespace string, key string, key_type string, found string, "
    "acked_boot_ns long, stream string, subscriber int, topic string, sequence long, upto long, "
    "received_boot_ns long, bulk_load string, row long, daemon string"
)
_NEVER = (1 << 63) - 1
_PLACE = ("daemon", "file", "subscriber", "stream", "namespace", "topic")


def read_ledgers(spark: SparkSession, directory: Path) -> DataFrame:
    """All lines of all ledgers in a folder, with the `file` of each; torn ones are left out.

    Raises BadPath if there is none.
    """
    lines = lines_in(spark, directory, SCHEMA)
    return lines.withColumn("file", F.col("_metadata.file_name")).where("op IS NOT NULL")


def lines_in(spark: SparkSession, directory: Path, schema: str) -> DataFrame:
    """Return these columns of all ledgers in a folder. Raises BadPath if there is no ledger."""
    if not any(directory.glob("daemon=*/*.jsonl")):
        raise BadPath(str(directory), "contains no ledger")
    reader = spark.read.schema(schema).option("basePath", str(directory))
    return reader.json(f"{literal(directory)}/daemon=*")


# ---- against the WAL ---------------------------------------------------------------------

CALLS = (
    Check("ack_lost", "op IN ('add', 'watch') AND NOT known AND covered", "lsn", "op, found, file"),
    Check("ack_differs", "known AND ledger_key <> key_hash", "arm_lsn", "op, namespace, key, file"),
    Check(
        "cancel_undone",
        "op = 'cancel' AND found = 'cancelled' AND known AND settled "
        "AND coalesce(final_state, '') NOT IN ('end', 'cancelled')",
        "end_lsn", "final_state, acked_boot_ns, file",
    ),
    Check(
        "fired_unfounded",
        "op = 'cancel' AND found = 'fired' AND known AND settled "
        "AND coalesce(final_state, 'end') IN ('end', 'replaced')",
        "end_lsn", "final_state, acked_boot_ns, file",
    ),
    Check(
        "unpark_lost", "op = 'unpark' AND known AND settled AND parked AND unparks = 0", "arm_lsn",
        "acked_boot_ns, file",
    ),
    Check(
        "outcome_differs",
        "op = 'outcome' AND known AND settled AND coalesce(final_state, '') <> found",
        "end_lsn", "final_state, found, file",
    ),
)  # fmt: skip
ROWS = (
    Check("row_lost", "NOT known AND covered AND settled", "lsn", "bulk_load, row, file"),
)  # fmt: skip
NOTICES = (
    Check(
        "notice_unfounded", "NOT known AND covered AND settled", "lsn", "topic, sequence, file",
    ),
    Check(
        "notice_differs",
        "sequence <> made_sequence OR topic <> made_topic OR namespace <> made_namespace", "lsn",
        "namespace, topic, sequence, made_namespace, made_topic, made_sequence, file",
    ),
    Check(
        "received_early",
        "clock = 'boot' AND made_cause = 'expired' AND received_boot_ns < deadline_ns", "lsn",
        "received_boot_ns, deadline_ns, file",
    ),
)  # fmt: skip
ORDER = (
    Check("notice_doubled", "op = 'notice' AND sequence <= before", "NULL",
          "namespace, topic, sequence, before, file"),
    Check("notice_missed", "op = 'notice' AND sequence > before + 1", "NULL",
          "namespace, topic, sequence, before, file"),
)  # fmt: skip


class Compared(NamedTuple):
    """All lines of ledgers, and those of calls, of rows of bulk loads and of notices with what
    the WAL says of them."""

    lines: DataFrame
    calls: DataFrame
    rows: DataFrame
    notices: DataFrame


class Unjudged(NamedTuple):
    """Lines of a daemon's ledgers that nothing is known about. `cause`: absent, nothing of the
    daemon is in the lake; beyond, they tell of what is missing there or is still to come."""

    daemon: str
    lines: int
    cause: str


@contextmanager
def compared(
    lines: DataFrame, known: DataFrame, events: DataFrame, found: Continuity
) -> Iterator[Compared]:
    """Ledgers compared with the WAL; `known`: lifecycles().

    Only what the lake must have is judged: `covered` tickets, and what was `settled`, that is
    recorded before the daemon was last active.
    """
    bounds = F.broadcast(_bounds(events, found))
    calls = _at_run(_calls(lines, known), bounds, "acked_boot_ns").persist()
    rows = _at_run(_rows(lines, events), bounds, "acked_boot_ns", "r.whole").persist()
    notices = _at_run(_notices(lines, events), bounds, "received_boot_ns").persist()
    try:
        yield Compared(lines, calls, rows, notices)
    finally:
        for one in (calls, rows, notices):
            one.unpersist()


def reconcile(compared: Compared) -> Iterator[DataFrame]:
    """The violations that show between ledgers and WAL."""
    yield judge(compared.calls, CALLS)
    yield judge(compared.rows, ROWS)
    yield judge(compared.notices, NOTICES)
    yield judge(_in_order(compared.lines), ORDER)


def unjudged(compared: Compared) -> list[Unjudged]:
    """How much of each daemon's ledgers could not be judged, and why."""
    add = "op IN ('add', 'watch') AND (known OR covered)"
    call = compared.calls.select(
        "daemon", "has_runs", F.expr(f"{add} OR known AND settled").alias("done")
    )
    done = F.expr("known OR covered AND settled").alias("done")
    others = (one.select("daemon", "has_runs", done) for one in (compared.rows, compared.notices))
    each = reduce(DataFrame.unionByName, others, call).where("NOT done")
    rows = each.groupBy("daemon", "has_runs").count().orderBy("daemon").collect()
    return [Unjudged(r.daemon, r["count"], "beyond" if r.has_runs else "absent") for r in rows]


def totals(ledger: DataFrame, events: DataFrame) -> dict[str, int]:
    """How much of each there is on both sides."""
    counts = {row.op: row["count"] for row in ledger.groupBy("op").count().collect()}
    acknowledged = ledger.where(F.col("op").isin("add", "watch")).select("daemon", "ticket")
    armed = events.where("kind IN ('arm', 'watch')").select("daemon", "ticket")
    silent = armed.join(acknowledged.distinct(), ["daemon", "ticket"], "leftanti").count()
    return {**dict(sorted(counts.items())), "armed_without_ledger": silent}


def _bounds(events: DataFrame, found: Continuity) -> DataFrame:
    """Return the `runs` of each daemon: the range of tickets that each run must contain, and the
    time of its last activity.

    The range reaches from the first to the last ticket that the records assign. Tickets outside of
    it may be in records that were lost or are still to come. `complete`: no more records will come.
    `whole`: no row of a bulk load was applied before the records.
    """
    armed = F.expr("IF(kind IN ('arm', 'watch'), ticket, NULL)")
    bounds = events.groupBy(*KEYS).agg(
        F.min(armed).alias("first_ticket"), F.max(armed).alias("last_ticket"),
        F.max("at_ns").alias("last_ns"), F.max_by("clock", "lsn").alias("clock"),
    )  # fmt: skip
    newest = {run.daemon: run for run in found.runs}
    done = [daemon for daemon, run in newest.items() if is_complete(run, found.snapshots)]
    number = F.create_map(*(F.lit(x) for d in newest for x in (d, newest[d].number)))
    whole = F.col("daemon").isin([d for d, run in newest.items() if _is_whole(run, found)])
    complete = F.col("daemon").isin(done) & (F.col("run") == number[F.col("daemon")])
    last = F.when(complete, F.lit(_NEVER)).otherwise(F.col("last_ticket"))
    bounds = bounds.withColumns({"complete": complete, "whole": whole, "last_ticket": last})
    run = F.struct("run", "first_ticket", "last_ticket", "last_ns", "clock", "complete", "whole")
    return bounds.groupBy("daemon").agg(F.collect_list(run).alias("runs"))


def _is_whole(run: Run, found: Continuity) -> bool:
    """True if the records of a newest run tell of every row of a bulk load that was done."""
    begun = any((s.daemon, s.first_lsn) == (run.daemon, run.opening) and "block" in s.kinds
                for s in found.snapshots)  # fmt: skip
    return run.number == 0 and run.from_lsn == 1 and not begun


GIVEN = "ticket BETWEEN r.first_ticket AND r.last_ticket"


def _at_run(rows: DataFrame, bounds: DataFrame, ledger_ns: str, given: str = GIVEN) -> DataFrame:
    """Each line with what is known of the run `r` that must have it: the newest that has, or else
    the one in which its ticket must have been `given`."""
    at = f"get(filter(runs, r -> IF(known, r.run = run, {given})), 0)"
    placed = rows.join(bounds, "daemon", "left").withColumn("at", F.expr(at))
    before = f"at.clock = 'boot' AND {ledger_ns} < at.last_ns"
    return placed.select(
        *(name for name in rows.columns if name != "run"),
        F.expr("coalesce(at.run, 0)").alias("run"), F.col("at.clock").alias("clock"),
        F.expr("at IS NOT NULL").alias("covered"),
        F.expr(f"coalesce(at.complete OR {before}, false)").alias("settled"),
        F.expr("runs IS NOT NULL").alias("has_runs"),
    )  # fmt: skip


def _calls(ledger: DataFrame, known: DataFrame) -> DataFrame:
    """What was acknowledged, with what the WAL says of the ticket."""
    bytes_ = F.expr("IF(key_type = 'str', CAST(key AS binary), unhex(key))")
    acknowledged = ledger.where("op IN ('add', 'watch', 'cancel', 'unpark', 'outcome')").select(
        "daemon", "op", "ticket", "namespace", "key", "found", "acked_boot_ns", "file",
        F.when(F.col("key").isNotNull(), F.xxhash64("namespace", "key_type", bytes_)).alias(
            "ledger_key"
        ),
    )  # fmt: skip
    fields = ("run", "key_hash", "final_state", "arm_lsn", "end_lsn", "parked", "unparks")
    lived = known.where("adds + carried_over > 0").groupBy("daemon", "ticket")
    newest = lived.agg(F.max_by(F.struct(*fields), "run").alias("lifecycle"))
    both = acknowledged.join(newest, ["daemon", "ticket"], "left")
    known_ = F.col("lifecycle").isNotNull().alias("known")
    return both.select(
        *acknowledged.columns, "lifecycle.*", known_, F.lit(None).cast("long").alias("lsn")
    )


def _rows(ledger: DataFrame, events: DataFrame) -> DataFrame:
    """Rows of bulk loads that were done before, with the newest record of each."""
    place = F.lower(F.hex("bulk_load")).alias("bulk_load"), F.col("bulk_load_row").alias("row")
    made = rows_of_bulk_loads(events).groupBy("daemon", *place).agg(
        F.max("run").alias("run"), F.max("lsn").alias("lsn")
    )  # fmt: skip
    acknowledged = ledger.where("op = 'row'").select(
        "daemon", "bulk_load", "row", "ticket", "acked_boot_ns", "file"
    )
    rows = acknowledged.join(made, ["daemon", "bulk_load", "row"], "left")
    return rows.withColumn("known", F.col("lsn").isNotNull())


def _notices(ledger: DataFrame, events: DataFrame) -> DataFrame:
    """What was received, with the record of the notice."""
    made = events.where("kind IN ('fire', 'outcome', 'entry') AND sequence IS NOT NULL").select(
        *KEYS, "ticket", "lsn", "deadline_ns", F.col("sequence").alias("made_sequence"),
        F.col("topic").alias("made_topic"), F.col("namespace").alias("made_namespace"),
        F.col("cause").alias("made_cause"),
    )  # fmt: skip
    notices = ledger.where("op = 'notice'").join(made, ["daemon", "ticket"], "left")
    return notices.withColumn("known", F.col("lsn").isNotNull())


def _in_order(ledger: DataFrame) -> DataFrame:
    """What one subscriber had of one topic, by sequence; what was reported to it as lost counts."""
    rows = ledger.where("op = 'notice' OR (op = 'lost' AND upto > 0)")
    by_sequence = Window.partitionBy(*_PLACE).orderBy("sequence", "ticket")
    upto = F.greatest(F.col("sequence"), F.coalesce("upto", "sequence"))
    before = F.max(upto).over(by_sequence.rowsBetween(Window.unboundedPreceding, -1))
    return rows.withColumns({"before": before, "run": F.lit(0)})

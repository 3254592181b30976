"""Ledgers: what workers and subscribers noted, held against what the journal says.

docs/audit.md has the format of the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.window import Window

from purgatoryd.pipeline.checks import Check, judge
from purgatoryd.pipeline.continuity import Continuity, is_complete
from purgatoryd.pipeline.lives import KEYS
from purgatoryd.shm_layout.errors import BadPath

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = (
    "op string, ticket long, namespace string, key string, key_type string, found string, "
    "acked_boot_ns long, stream string, subscriber int, topic string, sequence long, upto long, "
    "received_boot_ns long, daemon string"
)
_NEVER = (1 << 63) - 1
_PLACE = ("daemon", "file", "subscriber", "stream", "namespace", "topic")


def read_ledgers(spark: SparkSession, directory: Path) -> DataFrame:
    """All lines of all ledgers in a folder, with the `file` of each; torn ones are left out.

    Raises BadPath if there is none.
    """
    if not any(directory.glob("daemon=*/*.jsonl")):
        raise BadPath(str(directory), "holds no ledger")
    lines = spark.read.schema(SCHEMA).option("basePath", str(directory))
    found = lines.json(f"{directory}/daemon=*").withColumn("file", F.col("_metadata.file_name"))
    return found.where("op IS NOT NULL")


# ---- against the journal ---------------------------------------------------------------------

CALLS = (
    Check("ack_lost", "op IN ('add', 'watch') AND NOT known AND covered", "lsn", "op, found, file"),
    Check("ack_differs", "known AND told_key <> key_hash", "arm_lsn", "op, namespace, key, file"),
    Check(
        "cancel_undone",
        "op = 'cancel' AND found = 'cancelled' AND known AND settled "
        "AND coalesce(end, '') NOT IN ('end', 'cancelled')",
        "end_lsn", "end, acked_boot_ns, file",
    ),
    Check(
        "fired_unfounded",
        "op = 'cancel' AND found = 'fired' AND known AND settled "
        "AND coalesce(end, 'end') IN ('end', 'replaced')",
        "end_lsn", "end, acked_boot_ns, file",
    ),
    Check(
        "outcome_differs",
        "op = 'outcome' AND known AND settled AND coalesce(end, '') <> found",
        "end_lsn", "end, found, file",
    ),
)  # fmt: skip
NOTICES = (
    Check(
        "notice_unfounded", "lsn IS NULL AND covered AND settled", "lsn",
        "topic, sequence, file",
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


def reconcile(
    ledger: DataFrame, known: DataFrame, events: DataFrame, found: Continuity
) -> Iterator[DataFrame]:
    """The violations that show between ledgers and journal; `known`: lives().

    Only what the lake must have is judged: `covered` tickets, and what was `settled`, that is
    told before the daemon was last heard of.
    """
    bounds = F.broadcast(_bounds(events, found))
    calls = _calls(ledger, known).join(bounds, "daemon")
    notices = _notices(ledger, events).join(bounds, "daemon")
    yield judge(_judged_at(calls, "acked_boot_ns"), CALLS)
    yield judge(_judged_at(notices, "received_boot_ns"), NOTICES)
    yield judge(_in_order(ledger), ORDER)


def totals(ledger: DataFrame, events: DataFrame) -> dict[str, int]:
    """How much of each there is on both sides; daemons that are not in the lake are `strangers`."""
    ours = [row.daemon for row in events.select("daemon").distinct().collect()]
    known = F.col("daemon").isin(ours)
    counts = {row.op: row["count"] for row in ledger.where(known).groupBy("op").count().collect()}
    acknowledged = ledger.where(known & F.col("op").isin("add", "watch")).select("daemon", "ticket")
    armed = events.where("kind IN ('arm', 'watch')").select("daemon", "ticket")
    silent = armed.join(acknowledged.distinct(), ["daemon", "ticket"], "leftanti").count()
    return {
        **dict(sorted(counts.items())), "strangers": ledger.where(~known).count(),
        "armed_without_ledger": silent,
    }  # fmt: skip


def _bounds(events: DataFrame, found: Continuity) -> DataFrame:
    """Per daemon: the tickets that the lake must have, and when it was last heard of.

    `covered` up to the last ticket that was given, from the first one that was; the rest may be in
    records that were lost, or are still to come. `complete`: nothing comes any more.
    """
    armed = F.expr("IF(kind IN ('arm', 'watch'), ticket, NULL)")
    bounds = events.groupBy("daemon", "clock").agg(
        F.min(armed).alias("first_ticket"), F.max(armed).alias("last_ticket"),
        F.max("at_ns").alias("last_ns"),
    )  # fmt: skip
    runs = {run.daemon: run for run in found.runs}
    whole = [d for d, run in runs.items() if run.number == 0 and run.from_lsn == run.first_lsn]
    done = [d for d in whole if is_complete(runs[d], found.snapshots)]
    last = F.when(F.col("daemon").isin(done), F.lit(_NEVER)).otherwise(F.col("last_ticket"))
    return bounds.where(F.col("daemon").isin(whole)).withColumns(
        {"last_ticket": last, "complete": F.col("daemon").isin(done)}
    )


def _judged_at(rows: DataFrame, told_ns: str) -> DataFrame:
    heard = f"clock = 'boot' AND {told_ns} < last_ns"
    return rows.withColumns({
        "covered": F.expr("ticket BETWEEN first_ticket AND last_ticket"),
        "settled": F.expr(f"complete OR coalesce({heard}, false)"),
    })  # fmt: skip


def _calls(ledger: DataFrame, known: DataFrame) -> DataFrame:
    """What was acknowledged, with what the journal says of the ticket."""
    bytes_ = F.expr("IF(key_type = 'str', CAST(key AS binary), unhex(key))")
    told = ledger.where("op IN ('add', 'watch', 'cancel', 'outcome')").select(
        "daemon", "op", "ticket", "namespace", "key", "found", "acked_boot_ns", "file",
        F.when(F.col("key").isNotNull(), F.xxhash64("namespace", "key_type", bytes_)).alias(
            "told_key"
        ),
    )  # fmt: skip
    lived = known.select(*KEYS, "ticket", "key_hash", "end", "arm_lsn", "end_lsn",
                         F.expr("adds + opened > 0").alias("known"))  # fmt: skip
    return told.join(lived, ["daemon", "ticket"], "left").withColumns({
        "run": F.coalesce("run", F.lit(0)), "known": F.coalesce("known", F.lit(False)),
        "lsn": F.lit(None).cast("long"),
    })  # fmt: skip


def _notices(ledger: DataFrame, events: DataFrame) -> DataFrame:
    """What was received, with the record of the notice."""
    made = events.where("kind IN ('fire', 'outcome', 'entry') AND sequence IS NOT NULL").select(
        *KEYS, "ticket", "lsn", "deadline_ns", F.col("sequence").alias("made_sequence"),
        F.col("topic").alias("made_topic"), F.col("namespace").alias("made_namespace"),
        F.col("cause").alias("made_cause"),
    )  # fmt: skip
    notices = ledger.where("op = 'notice'").join(made, ["daemon", "ticket"], "left")
    return notices.withColumn("run", F.coalesce("run", F.lit(0)))


def _in_order(ledger: DataFrame) -> DataFrame:
    """What one subscriber had of one topic, by sequence; what it was told to be lost counts."""
    rows = ledger.where("op = 'notice' OR (op = 'lost' AND upto > 0)")
    by_sequence = Window.partitionBy(*_PLACE).orderBy("sequence", "ticket")
    upto = F.greatest(F.col("sequence"), F.coalesce("upto", "sequence"))
    before = F.max(upto).over(by_sequence.rowsBetween(Window.unboundedPreceding, -1))
    return rows.withColumns({"before": before, "run": F.lit(0)})

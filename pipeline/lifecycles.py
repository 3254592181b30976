"""What the records say of each ticket, for the audit: one shuffle over bronze.

Names and keys are hashes and final states are codes, so that nothing but fixed-width numbers is
shuffled; what the audit finds is looked up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline.continuity import Run

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEYS = ("daemon", "run")

# ---- what is audited -------------------------------------------------------------------------


def in_runs(bronze: DataFrame, runs: Sequence[Run]) -> DataFrame:
    """The rows that are audited, each with its run."""
    rows = [
        (run.daemon, segment.first_lsn, segment.epoch, run.number, run.from_lsn,
         run.unsure_lsn if run.is_judged else run.last_lsn)
        for run in runs for segment in run.segments
    ]  # fmt: skip
    form = "daemon string, segment long, epoch long, run int, from_lsn long, unsure_lsn long"
    segments = F.broadcast(bronze.sparkSession.createDataFrame(rows, form))
    joined = bronze.join(segments, ["daemon", "segment", "epoch"])
    return joined.where("lsn >= from_lsn").drop("from_lsn")


def opening_rows(openings: DataFrame, runs: Sequence[Run]) -> DataFrame:
    """Return the rows of the snapshots with which the runs begin, before all records. A run that
    begins with an empty arena has one row, as its snapshot would have."""
    rows = [(run.daemon, run.opening, run.number, run.unsure_lsn) for run in runs if run.opening]
    form = "daemon string, segment long, run int, unsure_lsn long"
    first = openings.sparkSession.createDataFrame(rows, form)
    found = openings.join(F.broadcast(first), ["daemon", "segment"]).withColumn("lsn", F.lit(0))
    empty = [(run.daemon, run.number, 0, 0, "head", 0) for run in runs if run.began_empty]
    form = "daemon string, run int, unsure_lsn long, lsn int, kind string, positions_upto long"
    heads = openings.sparkSession.createDataFrame(empty, form)
    return found.unionByName(heads, allowMissingColumns=True)


# ---- one row for each ticket -----------------------------------------------------------------
ARMED, MOVED = "kind IN ('arm', 'watch')", "kind = 'move'"
RELEASED = "cause IN ('acknowledged', 'dropped')"
"""An outcome has left its inbox: the owner acknowledged it, or the owner's session ended."""
ENDED = f"kind IN ('fire', 'outcome', 'replaced') OR (kind = 'end' AND NOT {RELEASED})"
FINAL_STATE_CODES = {"replaced": 1, "fire": 2, "end": 3, "satisfied": 4, "expired": 5, "failed": 6,
             "cancelled": 7, "skipped": 8, "coalesced": 9}  # fmt: skip
_LIFECYCLE = (
    "daemon", "run", "lsn", "kind", "cause", "ticket", "deadline_ns", "wall_deadline_ns", "at_ns",
    "armed_ns", "add_lsn", "unsure_lsn", "parked", "slack_ns",
)  # fmt: skip


def lifecycles(events: DataFrame, carried_over: DataFrame) -> DataFrame:
    """One row for each ticket: all that the records say of it, as numbers.

    Names and keys are hashes and final states are codes, so that nothing but fixed-width numbers is
    shuffled; what is found is looked up again.
    """
    facts = _facts(events).withColumn("opening", F.lit(False))
    facts = facts.unionByName(_facts(carried_over).withColumn("opening", F.lit(True)))
    known = facts.groupBy(*KEYS, "ticket").agg(*_of_lifecycle())
    return known.select(
        "*",
        _final_state_name(F.col("final_state_code")).alias("final_state"),
        F.expr("CASE WHEN final_state_code BETWEEN 4 AND 7 THEN 'outcome' ELSE 'timer' END").alias(
            "final_state_kind"
        ),
        F.expr("final_state_code IN (2, 5)").alias("fires"),
        F.expr("end_lsn > unsure_lsn").alias("sure"),
    )


def _facts(rows: DataFrame) -> DataFrame:
    """What is said of tickets; an arm that replaces a timer is a fact of that one, too."""
    key = F.when(F.expr(ARMED), F.xxhash64("namespace", "key_type", "key")).alias("key_hash")
    space = F.xxhash64("namespace").alias("namespace_hash")
    wall = F.unix_micros("at") * 1000
    recorded = rows.where(
        f"ticket IS NOT NULL AND ({ARMED} OR {MOVED} OR "
        "kind IN ('unpark', 'fire', 'outcome', 'end'))"
    )
    own = recorded.select(*_LIFECYCLE, wall.alias("wall_ns"), key, space, _final_state_code())
    its = {name: f"replaced_{name}" for name in ("add_lsn", "armed_ns")} | {"ticket": "replaced"}
    replaced = rows.where("replaced IS NOT NULL").select(
        *(F.col(its.get(name, name)).alias(name) for name in _LIFECYCLE),
        wall.alias("wall_ns"), F.lit(None).cast("long").alias("key_hash"), space,
        F.lit(FINAL_STATE_CODES["replaced"]).alias("final_state_code"),
    ).withColumn("kind", F.lit("replaced"))  # fmt: skip
    return own.unionByName(replaced)


def _final_state_code() -> Column:
    return F.expr(
        "CASE WHEN kind = 'fire' THEN 2 WHEN kind = 'end' THEN CASE cause "
        "WHEN 'cancelled' THEN 3 WHEN 'skipped' THEN 8 WHEN 'coalesced' THEN 9 END "
        "WHEN kind = 'outcome' THEN CASE cause WHEN 'satisfied' THEN 4 WHEN 'expired' THEN 5 "
        "WHEN 'failed' THEN 6 ELSE 7 END END"
    ).alias("final_state_code")


def _final_state_name(code: Column) -> Column:
    names = F.create_map(*(F.lit(x) for pair in FINAL_STATE_CODES.items() for x in reversed(pair)))
    return names[code]


def _of_lifecycle() -> list[Column]:
    """The aggregates. A record of the WAL outranks the opening, which has LSN 0."""
    released = F.expr(RELEASED)
    return [
        *_begin(),
        *_deadline(),
        *_end(),
        *_parked(),
        F.count_if(F.col("kind") == "outcome").alias("outcomes"),
        F.count_if(released).alias("acks"),
        F.min(F.when(released, F.col("lsn"))).alias("ack_lsn"),
        F.max("unsure_lsn").alias("unsure_lsn"),
    ]


def _begin() -> list[Column]:
    armed = F.expr(ARMED)
    begins = armed & F.expr("NOT opening")
    return [
        F.count_if(begins).alias("adds"),
        F.count_if(armed & F.col("opening")).alias("carried_over"),
        F.min(F.when(begins, F.col("lsn"))).alias("arm_lsn"),
        F.max(F.when(begins, F.col("at_ns"))).alias("armed_ns"),
        F.coalesce(F.bool_or(F.col("kind") == "watch"), F.lit(False)).alias("operation"),
        F.max("key_hash").alias("key_hash"),
        F.max(F.when(armed, F.col("namespace_hash"))).alias("namespace_hash"),
    ]


def _parked() -> list[Column]:
    unpark = F.col("kind") == "unpark"
    return [
        F.coalesce(F.bool_or(F.expr(f"{ARMED} AND parked = 1")), F.lit(False)).alias("parked"),
        F.count_if(unpark).alias("unparks"),
        F.min(F.when(unpark, F.col("lsn"))).alias("unpark_lsn"),
    ]


def _deadline() -> list[Column]:
    """As the last record says that set it."""
    lsn = F.when(F.expr(f"{ARMED} OR {MOVED}"), F.col("lsn"))
    return [
        *(F.max_by(name, lsn).alias(name) for name in ("deadline_ns", "wall_deadline_ns")),
        F.max(F.when(F.expr(ARMED), F.col("slack_ns"))).alias("slack_ns"),
        F.max(F.when(F.expr(MOVED), F.col("lsn"))).alias("last_move_lsn"),
    ]


def fires_ns() -> Column:
    """Return when a timer has to fire: at its deadline, rounded up to a multiple of its slack,
    which is a power of two. A deadline at the end of time stays as it is. slot_fires_ns() computes
    the same."""
    slack_ns = F.coalesce("slack_ns", F.lit(1))
    rounded = F.try_add("deadline_ns", slack_ns - 1).bitwiseAND(-slack_ns)
    return F.coalesce(rounded, "deadline_ns")


def _end() -> list[Column]:
    """As the first record says that ended it."""
    ended, fired = F.expr(ENDED), F.col("kind").isin("fire", "outcome")
    lsn = F.when(ended, F.col("lsn"))
    first = {"final_state_code": "final_state_code", "ended_ns": "at_ns",
             "ended_wall_ns": "wall_ns", "recorded_add_lsn": "add_lsn"}  # fmt: skip
    recorded = fired | (F.col("kind") == "end")
    return [
        F.count_if(ended).alias("final_states"),
        F.min(lsn).alias("end_lsn"),
        F.max(lsn).alias("last_end_lsn"),
        *(F.min_by(source, lsn).alias(name) for name, source in first.items()),
        F.min(F.when(fired, F.col("deadline_ns"))).alias("end_deadline_ns"),
        F.min(F.when(recorded, F.col("armed_ns"))).alias("recorded_armed_ns"),
    ]

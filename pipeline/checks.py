"""The audit's checks: each gives violations, all of one form.

A check is SQL over the rows of its family; docs/reference/tables.md says what each one means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.window import Window

from purgatoryd.pipeline.continuity import Continuity, Resharding, Run, run_before
from purgatoryd.pipeline.lifecycles import ARMED, KEYS, fires_ns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from purgatoryd.pipeline.lake import Manifest

FORGOTTEN = 0
"""PG_BULK_LOAD_NONE, in the `flags` of a bulk load's record: from here on the daemon knows nothing
of it."""
GRACE_NS = 60_000_000_000
"""Time after deadline and slack from which a timer that is still armed counts as forgotten."""


class Check(NamedTuple):
    """A violation of one ticket, in SQL over lifecycles(): where it `holds`, it is one."""

    kind: str
    holds: str
    lsn: str
    evidence: str


TICKETS = (
    Check("armed_twice", "adds > 1", "arm_lsn", "adds"),
    Check(
        "never_armed", "adds + carried_over = 0 AND final_states > 0 AND sure", "end_lsn",
        "final_states, final_state",
    ),
    Check(
        "ended_twice", "final_states > 1", "last_end_lsn",
        "final_states, end_lsn, last_end_lsn, final_state",
    ),
    Check(
        "ended_before_armed", "carried_over = 0 AND end_lsn < arm_lsn", "end_lsn",
        "arm_lsn, final_state",
    ),
    Check(
        "wrong_final_state",
        "adds + carried_over > 0 AND final_state <> 'replaced' "
        "AND operation <> (final_state_kind = 'outcome')",
        "end_lsn", "operation, final_state",
    ),
    Check("early", "fires AND ended_ns < end_deadline_ns", "end_lsn", "ended_ns, end_deadline_ns"),
    Check(
        "wrong_deadline",
        "fires AND wall_deadline_ns IS NULL AND end_deadline_ns <> deadline_ns",
        "end_lsn", "end_deadline_ns, deadline_ns",
    ),
    Check(
        "early_by_wall", "fires AND ended_wall_ns + 1000000 < wall_deadline_ns", "end_lsn",
        "ended_wall_ns, wall_deadline_ns",
    ),
    Check(
        "fired_parked", "parked AND final_state = 'fire' AND coalesce(unpark_lsn > end_lsn, true)",
        "end_lsn", "unpark_lsn",
    ),
    Check(
        "unpark_unfounded",
        "unpark_lsn > end_lsn "
        "OR (NOT parked AND unpark_lsn > unsure_lsn AND adds + carried_over > 0)",
        "unpark_lsn", "parked, end_lsn, final_state",
    ),
    Check("unparked_twice", "unparks > 1", "unpark_lsn", "unparks"),
    Check("moved_after_end", "last_move_lsn > end_lsn", "last_move_lsn", "end_lsn, final_state"),
    Check(
        "ack_unfounded",
        # The opening lacks operations that had already ended; their outcomes are released later.
        "acks > 0 AND (outcomes = 0 AND adds + carried_over > 0 AND ack_lsn > unsure_lsn "
        "OR ack_lsn < end_lsn)",
        "ack_lsn", "final_state",
    ),
    Check("acked_twice", "acks > 1", "ack_lsn", "acks"),
    Check(
        "wrong_timestamps",
        "adds = 1 AND recorded_add_lsn > 0 "
        "AND (recorded_add_lsn <> arm_lsn OR recorded_armed_ns <> armed_ns)",
        "end_lsn", "recorded_add_lsn, arm_lsn, recorded_armed_ns, armed_ns",
    ),
    Check(
        "forgotten", "final_states = 0 AND adds + carried_over > 0 AND overdue_ns > fires_ns",
        "arm_lsn",
        "deadline_ns, slack_ns, last_ns",
    ),
)  # fmt: skip

WATERMARKS = tuple(
    Check(kind, wrong, "lsn", "cause")
    for kind, wrong in (
        ("condition_unmet", "cause = 'satisfied' AND NOT holds"),
        ("condition_overlooked", "cause = 'expired' AND holds"),
        ("failure_unfounded", "cause = 'failed' AND NOT failed"),
    )
)
REACHED = "(target = -1 OR (target >= 0 AND watermark >= target))"
"""-1 stands for 2^64 - 1: it was reached before the record was written."""
GAIN = (
    "CAST(CASE WHEN base < 0 OR watermark <= base THEN 0 WHEN cap < 0 THEN watermark - base "
    "ELSE least(cap, watermark - base) END AS decimal(20, 0))"
)
HOLDS = (
    "CASE condition WHEN 'all' THEN all_reached WHEN 'any' THEN any_reached "
    "WHEN 'quorum' THEN reached >= threshold ELSE threshold >= 0 AND gained >= threshold END"
)

NUMBERS = (
    Check("sequence_gap", "topic IS NOT NULL AND number > before + 1", "lsn", "before"),
    Check("sequence_repeated", "topic IS NOT NULL AND times > 1", "lsn", "times"),
    Check("position_gap", "topic IS NULL AND number > before + 1", "lsn", "before"),
    Check("position_repeated", "topic IS NULL AND times > 1", "lsn", "times"),
)

CLOCK = Check("clock_back", "at_ns < before_ns", "lsn", "at_ns, before_ns")
TIMED = "kind IN ('arm', 'watch', 'move', 'fire', 'outcome', 'end')"
RECORDS = (
    Check("lsn_gap", "lsn > before + 1", "lsn", "before"),
    Check("lsn_repeated", "lsn = before", "lsn", "before"),
    CLOCK,
    Check("sent_before_made", "positions_upto > made", "lsn", "positions_upto, made"),
)

INVENTS = Check(
    "snapshot_invents",
    "coalesce(adds + carried_over, 0) = 0 OR end_lsn < segment OR arm_lsn > upto",
    "segment", "arm_lsn, end_lsn",
)  # fmt: skip
LACKS = Check("snapshot_lacks", "true", "segment", "arm_lsn, end_lsn, segment")


# ---- the form of all violations --------------------------------------------------------------


def judge(rows: DataFrame, found: Iterable[Check], *more: str) -> DataFrame:
    """The violations among rows; `more` columns belong to the evidence of each."""
    cases = [
        F.expr(
            f"CASE WHEN {check.holds} THEN struct('{check.kind}' AS kind, "
            f"CAST({check.lsn} AS long) AS lsn, "
            f"to_json(struct({', '.join((*more, check.evidence))})) AS evidence) END"
        )
        for check in found
    ]
    ticket = "ticket" if "ticket" in rows.columns else "CAST(NULL AS long) AS ticket"
    each = rows.select(
        *KEYS, F.expr(ticket), F.explode(F.array_compact(F.array(*cases))).alias("found")
    )
    return each.select("found.kind", *KEYS, "ticket", "found.lsn", "found.evidence")


def all_checks(
    known: DataFrame,
    events: DataFrame,
    carried_over: DataFrame,
    openings: DataFrame,
    found: Continuity,
) -> Iterator[DataFrame]:
    """The violations that each family of checks finds; families without any records are left out.

    `known`: lifecycles(); `events`, `carried_over`: what is audited; `openings`: rows of all
    snapshots.
    """
    kinds = {kind for run in found.runs for segment in run.segments for kind in segment.kinds}
    if not found.runs:
        return
    yield of_tickets(known, events, found.runs)
    yield of_keys(known)
    yield of_records(events)
    yield of_clocks(events)
    yield of_bulk_loads(events)
    if "move" in kinds:
        yield of_moves(events)
    if "outcome" in kinds:
        yield of_watermarks(events, carried_over)
    if kinds & {"fire", "outcome", "entry"}:
        yield of_numbers(events, carried_over)
    if "sent" in kinds:
        yield of_sent(events)
    if judged := list(_judged(found)):
        yield from of_snapshots(known, openings, judged)
    numbered = enumerate(found.reshardings)
    if states := [state for number, one in numbered for state in _states(found, number, one)]:
        yield of_reshardings(known, openings, states)


# ---- tickets and keys ------------------------------------------------------------------------


def of_tickets(known: DataFrame, events: DataFrame, runs: Sequence[Run]) -> DataFrame:
    """What one ticket's records say against each other."""
    timed = known.join(F.broadcast(_clocks(events, runs)), list(KEYS), "left")
    return judge(timed.withColumn("fires_ns", fires_ns()), TICKETS)


def _clocks(events: DataFrame, runs: Sequence[Run]) -> DataFrame:
    """Of each last run: when it was last active, and which deadlines were long past by then.

    A virtual clock stands still between two steps, so nothing is overdue by it.
    """
    last = [F.expr(f"daemon = '{run.daemon}' AND run = {run.number}") for run in _newest(runs)]
    starts = events.where("at_ns IS NOT NULL").groupBy(*KEYS, "clock", "epoch").agg(
        F.min("at_ns").alias("begun_ns"), F.max("at_ns").alias("last_ns")
    )  # fmt: skip
    latest = starts.groupBy(*KEYS, "clock").agg(
        F.max_by("begun_ns", "epoch").alias("begun_ns"), F.max("last_ns").alias("last_ns")
    )
    long = f"clock = 'boot' AND last_ns - begun_ns > {GRACE_NS}"
    overdue = F.expr(f"IF({long}, last_ns - {GRACE_NS}, NULL)").alias("overdue_ns")
    return latest.where(reduce(or_, last)).select(*KEYS, "last_ns", overdue)


def _newest(runs: Iterable[Run]) -> Iterable[Run]:
    return {run.daemon: run for run in runs}.values()


def of_keys(known: DataFrame) -> DataFrame:
    """A key names one armed timer or operation at a time."""
    by_key = Window.partitionBy(*KEYS, "key_hash").orderBy("begun_lsn", "ticket")
    held = known.where("key_hash IS NOT NULL").select(
        *KEYS, "key_hash", "ticket", "end_lsn", F.expr("coalesce(arm_lsn, 0)").alias("begun_lsn")
    )
    next_lsn, other = F.lead("begun_lsn").over(by_key), F.lead("ticket").over(by_key)
    twice = held.select(
        *KEYS, "ticket", "end_lsn", next_lsn.alias("next_lsn"), other.alias("other")
    )
    clash = "next_lsn < coalesce(end_lsn, next_lsn + 1)"
    return judge(twice, [Check("key_armed_twice", clash, "next_lsn", "other, end_lsn")])


def of_moves(events: DataFrame) -> DataFrame:
    """A timer is only moved to later; by the wall clock if it follows that."""
    moved = events.where("kind = 'move'").select(*KEYS, "ticket").distinct()
    due = F.coalesce("wall_deadline_ns", "deadline_ns")
    steps = events.where("kind IN ('arm', 'move')").join(moved, [*KEYS, "ticket"], "leftsemi")
    before = F.lag(due).over(Window.partitionBy(*KEYS, "ticket").orderBy("lsn"))
    steps = steps.select(*KEYS, "ticket", "lsn", due.alias("due_ns"), before.alias("before_ns"))
    return judge(steps, [Check("moved_back", "due_ns <= before_ns", "lsn", "due_ns, before_ns")])


# ---- watermarks ----------------------------------------------------------------------------------


def of_watermarks(events: DataFrame, carried_over: DataFrame) -> DataFrame:
    """Conditions, computed once more from the watermarks as they stood when the operation ended."""
    rows = events.where("kind IN ('watch', 'watermark', 'gone')").unionByName(carried_over)
    watched = rows.where("kind = 'watch'").dropDuplicates([*KEYS, "ticket"]).select(
        *KEYS, "ticket", "condition", "threshold", F.explode("watch").alias("of")
    )  # fmt: skip
    outcomes = events.where("kind = 'outcome' AND cause <> 'cancelled' AND lsn > unsure_lsn")
    asked = outcomes.select(*KEYS, "ticket", "lsn", "cause").join(watched, [*KEYS, "ticket"])
    asked = asked.where("condition <> 'client'").select("*", "of.*").drop("of", "flags")
    judged = _at_watermarks(asked, rows).groupBy(
        *KEYS, "ticket", "lsn", "cause", "condition", "threshold"
    ).agg(
        F.expr(f"min({REACHED})").alias("all_reached"),
        F.expr(f"max({REACHED})").alias("any_reached"),
        F.expr(f"count_if({REACHED})").alias("reached"),
        F.expr(f"sum({GAIN})").alias("gained"),
        F.expr("max(failed)").alias("failed"),
        F.expr("collect_list(struct(row, target, base, cap, watermark))").alias("keys"),
    ).withColumn("holds", F.expr(HOLDS))  # fmt: skip
    return judge(judged, WATERMARKS, "condition", "threshold", "keys")


def _at_watermarks(asked: DataFrame, rows: DataFrame) -> DataFrame:
    """Each watch key that is asked for, with its watermark and whether it ever failed by then."""
    watermarks = rows.where("kind IN ('watermark', 'gone')").select(
        *KEYS, "row", "lsn", F.coalesce("watermark", F.lit(0)).alias("watermark"),
        F.expr("coalesce(error, 0) <> 0").alias("failed"), F.lit(False).alias("asked"),
    )  # fmt: skip
    both = asked.withColumn("asked", F.lit(True)).unionByName(watermarks, allowMissingColumns=True)
    until = Window.partitionBy(*KEYS, "row").orderBy("lsn")
    until = until.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return both.select(
        *(name for name in both.columns if name not in ("watermark", "failed")),
        F.coalesce(F.last("watermark", ignorenulls=True).over(until), F.lit(0)).alias("watermark"),
        F.coalesce(F.max("failed").over(until), F.lit(False)).alias("failed"),
    ).where("asked")


# ---- notices ---------------------------------------------------------------------------------


def of_numbers(events: DataFrame, carried_over: DataFrame) -> DataFrame:
    """Notices are numbered without a hole: per topic from 1, and over all in the replay buffer."""
    notices = events.where("position IS NOT NULL AND kind IN ('fire', 'outcome', 'entry')")
    births = (
        events.where("kind = 'topic'").unionByName(carried_over).where("kind IN ('topic', 'head')")
    )
    given = _numbers(notices, "false").unionByName(_numbers(births, "true"))
    scope = (*KEYS, "namespace", "topic")
    counted = given.groupBy(*scope, "number").agg(
        F.count_if(F.expr("NOT birth")).alias("times"), F.max("lsn").alias("lsn"),
        F.max_by("ticket", "lsn").alias("ticket"),
    )  # fmt: skip
    before = F.lag("number").over(Window.partitionBy(*scope).orderBy("number"))
    return judge(counted.withColumn("before", before), NUMBERS, "namespace", "topic", "number")


def _numbers(rows: DataFrame, birth: str) -> DataFrame:
    """The number in the topic, and the position in the replay buffer, which is of no topic.

    A birth is the last number that was given before.
    """
    shared = (*KEYS, "lsn", "ticket", F.expr(birth).alias("birth"))
    none = F.lit(None).cast("string")
    in_topic = rows.where("kind <> 'head'").select(
        *shared, "namespace", "topic", F.col("sequence").alias("number")
    )
    position = (
        "CASE kind WHEN 'head' THEN positions_upto - 1 WHEN 'topic' THEN NULL ELSE position END"
    )
    in_replay_buffer = rows.select(
        *shared, none.alias("namespace"), none.alias("topic"), F.expr(position).alias("number")
    )
    return in_topic.unionByName(in_replay_buffer.where("number IS NOT NULL"))


def of_sent(events: DataFrame) -> DataFrame:
    """Notices are handed to the socket in order, each once."""
    in_order = Window.partitionBy(*KEYS).orderBy("lsn")
    before = F.lag("positions_upto").over(in_order).alias("before")
    sent = events.where("kind = 'sent'").select(*KEYS, "lsn", "positions_from", before)
    order = Check("sent_out_of_order", "positions_from <> before", "lsn", "positions_from, before")
    return judge(sent, [order])


# ---- the records themselves ------------------------------------------------------------------


def of_records(events: DataFrame) -> DataFrame:
    """Return what breaks these rules: LSNs rise by one within a segment; the clock and the
    position in the replay buffer never go back."""
    in_order = Window.partitionBy(*KEYS, "segment").orderBy("lsn")
    before = in_order.rowsBetween(Window.unboundedPreceding, -1)
    at_ns = F.expr(f"IF({TIMED}, at_ns, NULL)")
    made = F.expr("IF(kind IN ('fire', 'outcome', 'entry'), position + 1, NULL)")
    steps = events.select(
        *KEYS, "lsn", "ticket", "positions_upto", at_ns.alias("at_ns"),
        F.lag("lsn").over(in_order).alias("before"), F.max(at_ns).over(before).alias("before_ns"),
        F.max(made).over(before).alias("made"),
    )  # fmt: skip
    return judge(steps, RECORDS)


def of_clocks(events: DataFrame) -> DataFrame:
    """The clock goes on from one segment to the next of the same start of the daemon."""
    first = [F.min_by(name, "lsn").alias(name) for name in ("at_ns", "ticket")]
    segments = events.where(TIMED).groupBy(*KEYS, "epoch", "segment").agg(
        *first, F.min("lsn").alias("lsn"), F.max("at_ns").alias("last_ns")
    )  # fmt: skip
    earlier = Window.partitionBy(*KEYS, "epoch").orderBy("segment")
    before = F.max("last_ns").over(earlier.rowsBetween(Window.unboundedPreceding, -1))
    return judge(segments.withColumn("before_ns", before), [CLOCK])


# ---- bulk loads ------------------------------------------------------------------------------


def rows_of_bulk_loads(events: DataFrame) -> DataFrame:
    """The records by which a row of a bulk load was done."""
    return events.where("bulk_load_row IS NOT NULL AND kind IN ('arm', 'move', 'unpark', 'done')")


def of_bulk_loads(events: DataFrame) -> DataFrame:
    """Each row of a bulk load is done once, unless the daemon was asked to forget the bulk load
    between."""
    rows = rows_of_bulk_loads(events).groupBy(*KEYS, "bulk_load", "bulk_load_row").agg(
        F.count("*").alias("times"), F.min("lsn").alias("first_lsn"), F.max("lsn").alias("lsn"),
        F.max_by("ticket", "lsn").alias("ticket"),
    )  # fmt: skip
    forgotten = events.where(f"kind = 'bulk_load' AND flags = {FORGOTTEN}").select(
        *KEYS, "bulk_load", F.col("lsn").alias("forgot_lsn")
    )
    twice = (
        rows.where("times > 1").join(forgotten, [*KEYS, "bulk_load"], "left").groupBy(*rows.columns)
    )
    retained = twice.agg(
        F.count_if(F.expr("forgot_lsn BETWEEN first_lsn AND lsn")).alias("forgotten")
    ).withColumn("bulk_load", F.lower(F.hex("bulk_load")))
    return judge(retained, [Check("bulk_load_row_twice", "forgotten = 0", "lsn", "first_lsn")],
                 "bulk_load", "bulk_load_row", "times")  # fmt: skip


# ---- snapshots -------------------------------------------------------------------------------


def of_snapshots(
    known: DataFrame, openings: DataFrame, judged: Sequence[Judged]
) -> Iterator[DataFrame]:
    """What a snapshot says is armed is what the records before it have left armed.

    Also the first snapshot of an arena that took another one's place: nothing was lost on the
    way, nor came back.
    """
    asked = F.broadcast(openings.sparkSession.createDataFrame(judged, JUDGED))
    armed = openings.where(ARMED).select(F.col("daemon").alias("of"), "segment", "ticket")
    armed = armed.distinct().join(asked, ["of", "segment"])
    lived = known.select(*KEYS, "ticket", "arm_lsn", "end_lsn", "adds", "carried_over")
    left = lived.where("adds + carried_over > 0").join(asked, list(KEYS))
    left = left.where("coalesce(arm_lsn, 0) < segment AND coalesce(end_lsn, upto + 1) > upto")
    risen = armed.join(lived, [*KEYS, "ticket"], "left")
    yield judge(risen, [INVENTS], "of", "segment")
    yield judge(left.join(armed, [*KEYS, "ticket", "of", "segment"], "leftanti"), [LACKS], "of")


class Judged(NamedTuple):
    """A snapshot, and the run of the records before it."""

    of: str
    segment: int
    upto: int
    daemon: str
    run: int


JUDGED = "of string, segment long, upto long, daemon string, run int"


def _judged(found: Continuity) -> Iterator[Judged]:
    """Snapshots that can be judged: the records before them are known, from an opening on."""
    for snapshot in found.snapshots:
        upto = max(snapshot.last_lsn, snapshot.first_lsn - 1)
        for run in found.runs:
            if run.is_judged and (_within(run, snapshot, upto) or _took_over(found, run, snapshot)):
                yield Judged(snapshot.daemon, snapshot.first_lsn, upto, run.daemon, run.number)


def _within(run: Run, snapshot: Manifest, upto: int) -> bool:
    """Whether all records up to it are the run's."""
    later = run.opening < snapshot.first_lsn <= run.last_lsn + 1
    return run.daemon == snapshot.daemon and later and upto <= run.last_lsn


def _took_over(found: Continuity, run: Run, snapshot: Manifest) -> bool:
    """Whether it is the first snapshot of the arena that came after the run's."""
    return any(
        run_before(found.runs, other) is run
        for other in found.runs
        if (other.daemon, other.first_lsn) == (snapshot.daemon, snapshot.first_lsn)
    )


# ---- another number of shards ----------------------------------------------------------------


class State(NamedTuple):
    """What was armed in a daemon before (`old` 1) or after a resharding: as a snapshot of it says,
    or as its run left it, where there is no such snapshot."""

    resharding: int
    old: int
    daemon: str
    segment: int | None
    run: int | None


STATE = "resharding int, old int, daemon string, segment long, run int"
RESHARDED = (
    Check("snapshot_lacks", "has = 0", "NULL", "had, has"),
    Check("snapshot_invents", "has > had", "NULL", "had, has"),
)


def of_reshardings(known: DataFrame, openings: DataFrame, states: Sequence[State]) -> DataFrame:
    """What the shards of one number left armed is what those of the next began with, each once."""
    asked = F.broadcast(openings.sparkSession.createDataFrame(states, STATE))
    listed = openings.where(ARMED).select("daemon", "segment", "ticket").distinct()
    left = known.where("adds + carried_over > 0 AND final_states = 0").select(*KEYS, "ticket")
    columns = ("resharding", "old", "daemon", "ticket")
    armed = listed.join(asked, ["daemon", "segment"]).select(*columns).unionByName(
        left.join(asked, list(KEYS)).select(*columns)
    )  # fmt: skip
    both = armed.groupBy("resharding", "ticket").agg(
        F.max_by("daemon", "old").alias("daemon"), F.lit(0).alias("run"),
        F.sum("old").alias("had"), F.sum(1 - F.col("old")).alias("has"),
    )  # fmt: skip
    return judge(both, RESHARDED)


def _states(found: Continuity, number: int, resharding: Resharding) -> list[State]:
    """Of all daemons on both sides; none if some are not known."""
    before = [_left(found, number, *one) for one in resharding.upto.items()]
    after = [State(number, 0, one.daemon, one.first_lsn, None) for one in resharding.openings]
    if len(after) < resharding.shards:
        return []
    known = [state for state in before if state is not None]
    return known + after if len(known) == len(before) else []


def _left(found: Continuity, number: int, daemon: str, upto: int) -> State | None:
    """What a daemon left armed with its record `upto`."""
    if any((one.daemon, one.first_lsn) == (daemon, upto + 1) for one in found.snapshots):
        return State(number, 1, daemon, upto + 1, None)
    for run in found.runs:
        if run.is_judged and (run.daemon, run.last_lsn) == (daemon, upto):
            return State(number, 1, daemon, None, run.number)
    return None

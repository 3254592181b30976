"""Silver: what became of each timer and operation, from rows of bronze.

The record of an end carries the lifecycle up to it, so a lifecycle is a projection of one row:
nothing is sorted or grouped, and segments may come in any order. When a notice or an answer was
built and handed to the socket stands in the few records of batches, which are broadcast.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline.ledger import lines_in
from purgatoryd.pipeline.lifecycles import fires_ns
from purgatoryd.pipeline.schemas import LIFECYCLES, OPEN_TIMERS

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, SparkSession

BLOCK_BITS = 6
"""Notices find their batch by blocks of so many positions: a hash join instead of a search."""
NOTICES = 0
"""Their stream, for that join; those of answers are sessions, which are never 0."""
SERVICE = ("request_queue", "local", "response_queue", "send")
"""The stages that the service answers for; `remote` is waiting that was asked for."""
_TIMESTAMPS = (
    "add_lsn", "session", "worker", "sent_ns", "received_ns", "applied_ns", "done_ns", "armed_ns",
)  # fmt: skip


UNFIRED = ("cancelled", "skipped", "coalesced")
"""Causes of the end of a timer without a notice."""

# ---- which rows are final states -------------------------------------------------------------


def is_add() -> Column:
    """A timer or an operation was armed."""
    return F.col("kind").isin("arm", "watch")


def is_fire() -> Column:
    """A timer ended because its time came; notices that were published are no final states."""
    return (F.col("kind") == "fire") & (F.col("cause") == "expired")


def is_unfired() -> Column:
    """A timer ended without a notice; the acknowledgement of an outcome is no final state."""
    return (F.col("kind") == "end") & F.col("cause").isin(*UNFIRED)


def is_replacing() -> Column:
    """An add that ended the timer which its key had."""
    return (F.col("kind") == "arm") & F.col("replaced").isNotNull()


def is_end() -> Column:
    """A timer or an operation ended."""
    return is_fire() | is_unfired() | is_replacing() | (F.col("kind") == "outcome")


def ended_ticket() -> Column:
    """Of what the row of an end ended."""
    return F.when(F.col("kind") == "arm", F.col("replaced")).otherwise(F.col("ticket"))


def clock() -> Column:
    """Keeps live, virtual and bulk load runs apart."""
    return _clock(F.col("bulk_load").isNotNull() | (F.col("bulk_loaded") == 1))


def replaced_clock() -> Column:
    """Of the timer that an add ended."""
    return _clock(F.col("replaced_bulk_loaded") == 1)


def _clock(bulk_loaded: Column) -> Column:
    arena = F.when(F.col("clock") == "boot", "live").otherwise(F.col("clock"))
    return F.when(bulk_loaded, "bulk_load").otherwise(arena)


# ---- lifecycles ------------------------------------------------------------------------------


def lifecycles(
    bronze: DataFrame, batches: DataFrame, received: DataFrame | None = None
) -> DataFrame:
    """LIFECYCLES of the final states in `bronze`.

    `batches`: rows of bronze that have their batches, so those of later segments too.
    `received`: daemon, ticket and notified_ns, once each, as subscribers noted them; joining it
    costs a shuffle.
    """
    ended = _with_batches(final_states(bronze), batches)
    if received is None:
        ended = ended.withColumn("notified_ns", F.lit(None).cast("long"))
    else:
        ended = ended.join(received, ["daemon", "ticket"], "left")
    return ended.withColumns(_stages()).select(LIFECYCLES.names)


def received(spark: SparkSession, ledgers: Path) -> DataFrame:
    """When each notice first came to a subscriber, from the ledgers in a folder: daemon, ticket
    and notified_ns. docs/reference/tables.md has their form. Raises BadPath if there is none."""
    columns = "daemon string, op string, ticket long, received_boot_ns long"
    noted = lines_in(spark, ledgers, columns)
    first = F.min("received_boot_ns").alias("notified_ns")
    return noted.where(F.col("op") == "notice").groupBy("daemon", "ticket").agg(first)


def final_states(bronze: DataFrame) -> DataFrame:
    """One row per final state. An add that replaces has both lifecycles: that of the older one ends
    here."""
    own = F.col("kind") != "arm"
    timestamps = (
        F.when(own, F.col(n)).otherwise(F.col(f"replaced_{n}")).alias(n) for n in _TIMESTAMPS
    )
    return bronze.where(is_end()).select(
        "daemon", "node", "epoch", "segment", "lsn",
        F.when(F.col("kind") == "outcome", "operation").otherwise("timer").alias("kind"),
        F.when(own, clock()).otherwise(replaced_clock()).alias("clock"),
        F.when(own, F.col("cause")).otherwise("replaced").alias("final_state"),
        "namespace", "topic", "key", "key_type",
        ended_ticket().alias("ticket"),
        F.col("at").alias("ended_at"), F.col("at_ns").alias("ended_ns"), "ended_boot_ns",
        F.when(own, F.col("deadline_ns")).otherwise(F.col("replaced_deadline_ns"))
        .alias("deadline_ns"),
        *timestamps, "error", "flags", "sequence", *_place(),
        F.when(~own, F.col("ticket")).alias("replaced_by"),
        F.when(is_fire(), F.col("slack_ns")).alias("slack_ns"),
    )  # fmt: skip


def _with_batches(ended: DataFrame, batches: DataFrame) -> DataFrame:
    """Each end with `built_ns` and `handed_ns` of the batch that reported it.

    Where several batches were answered together, the first answer was there at `built_ns`, and each
    of the others as soon as its batch was applied.
    """
    found = F.broadcast(_handed(batches))
    inside = (ended.number >= found.begin) & (ended.number < found.upto)
    same = (ended.place == found.place) & (ended.stream == found.of_stream)
    joined = ended.join(found, same & inside & ended.daemon.startswith(found.of_daemon), "left")
    earlier = (F.col("stream") != NOTICES) & (F.col("built_ns") < F.col("ended_boot_ns"))
    built = F.when(earlier, F.col("ended_boot_ns")).otherwise(F.col("built_ns"))
    return joined.withColumn("built_ns", built)


def _place() -> list[Column]:
    """What tells of an end: a notice, by its position in the replay buffer, or the answer to a
    batch, by its session, the `stream`.

    The one key of the join is a long, which Spark looks up the fastest; so daemon and stream are no
    more keys, but compared where it was found.
    """
    asked = F.col("position").isNull()
    stream = F.when(asked, F.col("ended_by")).otherwise(NOTICES)
    number = F.when(asked, F.col("ended_batch")).otherwise(F.col("position"))
    block = F.when(asked, number).otherwise(F.shiftright(number, BLOCK_BITS))
    known = stream.isNotNull() & number.isNotNull()
    place = F.when(known, F.xxhash64("daemon", stream, block))
    return [stream.alias("stream"), number.alias("number"), place.alias("place")]


def _handed(bronze: DataFrame) -> DataFrame:
    """What was handed to sockets, by places: of notices a row for each block of positions that
    their batch reaches; of answers one for each batch of a session, the first that it got: one that
    came again was answered again. All in one scan, since few rows of many are these."""
    batches = F.sequence("sequence", F.col("sequence") + F.col("count") - 1)
    stream = F.when(_is_sent(), F.lit(NOTICES).cast("long")).otherwise(F.col("session"))
    rows = bronze.where(_is_sent() | _is_replied()).select(
        F.col("daemon").alias("of_daemon"), stream.alias("of_stream"),
        "positions_from", "positions_upto", F.struct("built_ns", "handed_ns").alias("handover"),
        F.explode(F.when(_is_sent(), _blocks()).otherwise(batches)).alias("number"),
    )  # fmt: skip
    by = ["of_daemon", "of_stream", "number"]
    first = F.min("handover").alias("handover")
    return rows.groupBy(*by, "positions_from", "positions_upto").agg(first).select(
        F.xxhash64(*by).alias("place"), "of_daemon", "of_stream",
        F.coalesce("positions_from", "number").alias("begin"),
        F.coalesce("positions_upto", F.col("number") + 1).alias("upto"),
        "handover.built_ns", "handover.handed_ns",
    )  # fmt: skip


def _is_sent() -> Column:
    """A batch of notices was handed over."""
    return (F.col("kind") == "sent") & (F.col("positions_upto") > F.col("positions_from"))


def _is_replied() -> Column:
    """Batches of a session were answered; their records have no positions."""
    return (F.col("kind") == "replied") & (F.col("count") > 0)


def _blocks() -> Column:
    """The blocks of positions that a batch of notices reaches."""
    last = F.shiftright(F.col("positions_upto") - 1, BLOCK_BITS)
    return F.sequence(F.shiftright("positions_from", BLOCK_BITS), last)


def batches_of(bronze: DataFrame, final_states: DataFrame) -> DataFrame:
    """The batches in `bronze` that may have reported `final_states`: rows of bronze, few of
    them."""
    wanted = final_states.select("daemon", F.shiftright("position", BLOCK_BITS).alias("block"))
    blocks = bronze.where(_is_sent()).withColumn("block", F.explode(_blocks()))
    sent = blocks.join(F.broadcast(wanted), ["daemon", "block"], "left_semi")
    askers = final_states.select("daemon", F.col("ended_by").alias("session"))
    answers = bronze.where(F.col("kind") == "replied")
    replied = answers.join(F.broadcast(askers), ["daemon", "session"], "left_semi")
    return sent.drop("block").dropDuplicates(["daemon", "lsn"]).unionByName(replied)


def _stages() -> dict[str, Column]:
    """Durations, ns, each on one clock: the arena's for armed, ended and deadline, else the real
    one, which the export of an arena without a WAL does not have."""
    expired = F.col("final_state") == "expired"
    recorded = F.col("ended_boot_ns").isNotNull()
    return {
        "request_queue_ns": F.col("applied_ns") - F.col("received_ns"),
        "local_ns": F.col("done_ns") - F.col("applied_ns"),
        "remote_ns": F.col("ended_ns") - F.col("armed_ns"),
        "response_queue_ns": F.col("built_ns") - F.col("ended_boot_ns"),
        "send_ns": F.when(recorded, F.col("handed_ns") - F.col("built_ns")),
        "receive_ns": F.col("notified_ns") - F.col("handed_ns"),
        "lateness_ns": F.when(expired, F.col("ended_ns") - F.greatest(fires_ns(), "armed_ns")),
    }


def service_ns() -> Column:
    """What is known of the stages that the service answers for; null if nothing is."""
    known = [F.col(f"{name}_ns") for name in SERVICE]
    total = reduce(lambda a, b: a + b, (F.coalesce(span, F.lit(0)) for span in known))
    return F.when(F.coalesce(*known).isNotNull(), total)


# ---- what has not ended ----------------------------------------------------------------------


def open_timers(bronze: DataFrame) -> DataFrame:
    """OPEN_TIMERS: adds without an end, with the deadline that they have now.

    `bronze`: all rows of a daemon from a snapshot on, the rows of that snapshot included; what
    stands in both is taken once. Two shuffles by ticket.
    """
    return _moved(open_adds(bronze), bronze).select(OPEN_TIMERS.names)


def open_adds(bronze: DataFrame) -> DataFrame:
    """The adds without an end as they stand in `bronze`, each ticket once."""
    final_states = bronze.where(is_end()).select("daemon", ended_ticket().alias("ticket"))
    adds = bronze.where(is_add()).dropDuplicates(["daemon", "ticket"])
    return adds.join(final_states, ["daemon", "ticket"], "left_anti")


def _moved(still: DataFrame, bronze: DataFrame) -> DataFrame:
    """The newest deadline of what was extended."""
    newest = F.max_by(F.struct("deadline_ns", "wall_deadline_ns"), "lsn").alias("newest")
    moves = bronze.where(F.col("kind") == "move").groupBy("daemon", "ticket").agg(newest)
    deadlines = {
        name: F.when(F.col("newest").isNull(), F.col(name)).otherwise(F.col(f"newest.{name}"))
        for name in ("deadline_ns", "wall_deadline_ns")
    }
    joined = still.join(moves, ["daemon", "ticket"], "left").withColumns(deadlines)
    kind = F.when(F.col("kind") == "watch", "operation").otherwise("timer")
    return joined.withColumns({"kind": kind, "clock": clock()})

"""One key's history: what the journals of all hosts say, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import silver
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.tiers import read_events, read_openings

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, Row, SparkSession

ADDS = ("arm", "watch")
STAGES = ("request_queue", "local", "remote", "response_queue", "send", "receive")


@dataclass(frozen=True, slots=True)
class Life:
    """A timer or operation of the key. `events`: its records in order, as rows of BRONZE; `end`:
    its row of LIVES, None while it is open."""

    daemon: str
    ticket: int
    events: tuple[Row, ...]
    end: Row | None

    @property
    def node(self) -> str:
        """The host."""
        return str(self.events[0]["node"])

    @property
    def stages(self) -> dict[str, int]:
        """Where the time went, ns, as far as it is known."""
        spans = {name: self.end[f"{name}_ns"] for name in STAGES} if self.end else {}
        return {name: span for name, span in spans.items() if span is not None}


def history(
    spark: SparkSession, lake: Lake, journals: Sequence[Path],
    key: bytes, key_type: str, namespace: str,
) -> list[Life]:  # fmt: skip
    """Every life of the key in the lake and in `journals`, folders JOURNAL/NAME; oldest first.

    Raises LakeBroken, JournalMismatch.
    """
    rows = read_events(spark, lake, journals).unionByName(read_openings(spark, lake, journals))
    return trace(rows, key, key_type, namespace)


def trace(bronze: DataFrame, key: bytes, key_type: str, namespace: str) -> list[Life]:
    """Every life that the key had, in all rows of BRONZE that are given; oldest first."""
    mine = (F.col("key") == key) & (F.col("key_type") == key_type) & F.col("kind").isin(*ADDS)
    adds = bronze.where(mine & (F.col("namespace") == namespace))
    tickets = {(row["daemon"], row["ticket"]) for row in adds.select("daemon", "ticket").collect()}
    if not tickets:
        return []
    events = bronze.where(_any(_about(daemon, ticket) for daemon, ticket in tickets)).collect()
    ends = _ends(bronze, events)
    found = [
        Life(daemon, ticket, tuple(_of(events, daemon, ticket)), ends.get((daemon, ticket)))
        for daemon, ticket in tickets
    ]
    return sorted(found, key=lambda life: (life.events[0]["at"], life.ticket))


def _any(conditions: Iterable[Column]) -> Column:
    return reduce(lambda a, b: a | b, conditions)


def _about(daemon: str, ticket: int) -> Column:
    ours = (F.col("ticket") == ticket) | (F.col("replaced") == ticket)
    return (F.col("daemon") == daemon) & ours


def _of(events: Sequence[Row], daemon: str, ticket: int) -> Iterator[Row]:
    """Its records, in order. What a snapshot repeats is left out."""
    mine = (e for e in events if e["daemon"] == daemon and ticket in (e["ticket"], e["replaced"]))
    armed = False
    for event in sorted(mine, key=lambda event: event["lsn"]):
        add = event["ticket"] == ticket and event["kind"] in ADDS
        if not (add and armed):
            yield event
        armed = armed or add


def _ends(bronze: DataFrame, events: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Rows of LIVES by daemon and ticket."""
    spark, notices = bronze.sparkSession, [e for e in events if e["position"] is not None]
    covers = [
        (F.col("daemon") == e["daemon"]) & (F.col("positions_from") <= e["position"])
        & (F.col("positions_upto") > e["position"])
        for e in notices
    ]  # fmt: skip
    batches = bronze.where((F.col("kind") == "sent") & _any(covers)) if covers else bronze.limit(0)
    lives = silver.lives(spark.createDataFrame(list(events), bronze.schema), batches)
    return {(row["daemon"], row["ticket"]): row for row in lives.collect()}


# ---- telling it ------------------------------------------------------------------------------


def event_text(event: Row, life: Life) -> str:
    """What a record did to the life."""
    if event["replaced"] == life.ticket:
        return f"replaced by ticket {event['ticket']}"
    known = {
        "arm": "armed", "watch": "armed, an operation", "move": "extended", "unpark": "unparked",
    }  # fmt: skip
    cause = event["cause"] or event["kind"]
    return known.get(event["kind"], str(cause))


def record(life: Life) -> dict[str, Any]:
    """A life in JSON."""
    events = [
        {
            "at": f"{e['at'].astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
            "lsn": e["lsn"],
            "what": event_text(e, life),
        }
        for e in life.events
    ]
    return {
        "node": life.node, "daemon": life.daemon, "ticket": life.ticket,
        "outcome": life.end["outcome"] if life.end else None,
        "lateness_ns": life.end["lateness_ns"] if life.end else None,
        "stages_ns": life.stages, "events": events,
    }  # fmt: skip

"""One key's history: what the WALs of all hosts and the cold tier say, and where the time
went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import silver
from purgatoryd.pipeline.cold import rows_of, tombstones_of
from purgatoryd.pipeline.continuity import in_turn, predecessors
from purgatoryd.pipeline.lake import OPENINGS, Lake
from purgatoryd.pipeline.promote import bulk_load_of
from purgatoryd.pipeline.sources import successors_in
from purgatoryd.pipeline.tier import Tier, Window
from purgatoryd.pipeline.tiers import read_events, read_openings, tiers
from purgatoryd.shm_layout.predecessors import read_predecessors

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, Row, SparkSession

ADDS = ("arm", "watch")
STAGES = ("request_queue", "local", "remote", "response_queue", "send", "receive")


@dataclass(frozen=True, slots=True)
class Cold:
    """A timer in the cold tier. `version`: the one that brought it; `due_ns`: since 1970; `window`:
    the one that took it. `state`: "cold", "ended" there, or that of its window."""

    version: int
    due_ns: int
    state: str
    window: str | None


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """A timer or operation of the key. `events`: its records in order, as rows of BRONZE; `end`:
    its row of LIFECYCLES, None while it is open. `window`: of the cold tier, that armed it; `cold`:
    what it was there, if the tier still has it. One that is in the tier alone has neither daemon
    nor events."""

    daemon: str = ""
    ticket: int = 0
    events: tuple[Row, ...] = ()
    end: Row | None = None
    window: str | None = None
    cold: Cold | None = None

    @property
    def node(self) -> str:
        """The host."""
        return str(self.events[0]["node"]) if self.events else "cold tier"

    @property
    def final_state(self) -> str | None:
        """How it ended; None while it is open."""
        if self.end is not None:
            return str(self.end["final_state"])
        return "ended" if not self.events and self.cold and self.cold.state == "ended" else None

    @property
    def stages(self) -> dict[str, int]:
        """Where the time went, ns, as far as it is known."""
        spans = {name: self.end[f"{name}_ns"] for name in STAGES} if self.end else {}
        return {name: span for name, span in spans.items() if span is not None}


@dataclass(frozen=True, slots=True)
class Key:
    """`data`, `type`: as BRONZE has them."""

    namespace: str
    type: str
    data: bytes

    def of(self) -> Column:
        """True for rows of the key."""
        return (
            (F.col("key") == self.data) & (F.col("key_type") == self.type)
            & (F.col("namespace") == self.namespace)
        )  # fmt: skip


def history(spark: SparkSession, lake: Lake, wals: Sequence[Path], key: Key) -> list[Lifecycle]:
    """Every lifecycle of the key in the lake, its cold tier, and `wals`, folders WAL_DIR/NAME.

    Oldest first; last of all what is in the cold tier alone.

    Raises LakeBroken, WalMismatch.
    """
    rows = read_events(spark, lake, wals).unionByName(read_openings(spark, lake, wals))
    lifecycles = trace(rows, key, _predecessors(lake, wals))
    if not Tier.there(lake.root):
        return lifecycles
    tier = Tier(lake.root)
    windows = {bulk_load_of(tier, window).bytes: window for window in tier.windows()}
    return list(_with_cold(lifecycles, cold_rows(spark, tier, key), windows))


def _predecessors(lake: Lake, wals: Sequence[Path]) -> dict[str, set[str]]:
    """As continuity.predecessors(), also of what is not in the lake yet."""
    found = predecessors([*lake.manifests(), *lake.manifests(OPENINGS)])
    for folder in wals:
        upto = read_predecessors(folder).upto
        for before, after in successors_in(folder).items():
            found.setdefault(after, set()).add(before)
        for one in tiers(None, [folder], OPENINGS):
            found.setdefault(one.identity.daemon, set()).update(upto)
    return found


# ---- the WALs ----------------------------------------------------------------------------


def trace(
    bronze: DataFrame, key: Key, before: Mapping[str, Set[str]] = MappingProxyType({})
) -> list[Lifecycle]:
    """Every lifecycle that the key had, in all rows of BRONZE that are given; oldest first. One
    that went on in a daemon that took the place of others, by `before`, is one."""
    adds = bronze.where(key.of() & F.col("kind").isin(*ADDS))
    tickets = adds.select("daemon", "ticket").distinct()
    # What replaces a timer has its key, and so a ticket among these.
    mine = bronze.join(F.broadcast(tickets), ["daemon", "ticket"], "left_semi")
    events = mine.select(bronze.columns).collect()
    final_states, lines = _final_states(bronze, events), _lines(before)
    order = {name: at for at, name in enumerate(in_turn(before))}
    own: defaultdict[str, list[Row]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (order.get(e["daemon"], 0), e["lsn"])):
        own[lines.get(event["daemon"], event["daemon"])].append(event)
    found = [
        _lifecycle(ticket, line, final_states)
        for line in own.values() for ticket in {event["ticket"] for event in line}
    ]  # fmt: skip
    return sorted(found, key=lambda lifecycle: (lifecycle.events[0]["at"], lifecycle.ticket))


def _lines(before: Mapping[str, Set[str]]) -> dict[str, str]:
    """By daemon, one name for all that took the place of each other."""
    lines: dict[str, set[str]] = {}
    for name, others in before.items():
        line = {name}.union(others)
        line = line.union(*(lines.get(one, ()) for one in line))
        lines |= dict.fromkeys(line, line)
    return {name: min(line) for name, line in lines.items()}


def _lifecycle(
    ticket: int, line: Sequence[Row], final_states: Mapping[tuple[str, int], Row]
) -> Lifecycle:
    """`line`: the records of its daemons, in order."""
    daemons = [event["daemon"] for event in line if event["ticket"] == ticket]
    end = next(
        (final_states[name, ticket] for name in daemons if (name, ticket) in final_states), None
    )
    return Lifecycle(daemons[-1], ticket, tuple(_of(line, ticket)), end)


def _of(events: Sequence[Row], ticket: int) -> Iterator[Row]:
    """Its records, in order. What a snapshot repeats is left out."""
    armed = False
    for event in (e for e in events if ticket in (e["ticket"], e["replaced"])):
        add = event["ticket"] == ticket and event["kind"] in ADDS
        if not (add and armed):
            yield event
        armed = armed or add


def _final_states(bronze: DataFrame, events: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Rows of LIFECYCLES by daemon and ticket."""
    if not events:
        return {}
    found = bronze.sparkSession.createDataFrame(list(events), bronze.schema)
    lifecycles = silver.lifecycles(found, silver.batches_of(bronze, found))
    return {(row["daemon"], row["ticket"]): row for row in lifecycles.collect()}


# ---- the cold tier ---------------------------------------------------------------------------


def cold_rows(spark: SparkSession, tier: Tier, key: Key) -> list[Cold]:
    """The key's timers in the tier, oldest first."""
    version, windows = tier.version(), tier.windows()
    rows = rows_of(spark, tier, version.rows).where(key.of()).select("version", "deadline_ns")
    tombs = tombstones_of(spark, tier, version.tombstones).where(key.of()).select("version")
    ended = sorted(row["version"] for row in tombs.collect())
    return [
        _cold(row["version"], row["deadline_ns"], ended, windows)
        for row in sorted(rows.collect(), key=lambda row: row["version"])
    ]


def _cold(version: int, due_ns: int, ended: Sequence[int], windows: Sequence[Window]) -> Cold:
    """The first window that covers it took it, unless it was ended before."""
    end = min((one for one in ended if one > version), default=None)
    taken = (w for w in windows if due_ns < w.until.end_ns and version <= w.until.version)
    window = next(taken, None)
    if window is not None and (end is None or end > window.until.version):
        return Cold(version, due_ns, window.state, window.id)
    return Cold(version, due_ns, "cold" if end is None else "ended", None)


def _with_cold(
    lifecycles: Sequence[Lifecycle], rows: Sequence[Cold], windows: dict[bytes, Window]
) -> Iterator[Lifecycle]:
    by_window = {row.window: row for row in rows if row.window}
    for lifecycle in lifecycles:
        bulk_loads = (event["bulk_load"] for event in lifecycle.events if event["bulk_load"])
        ours = next(
            (
                windows[bytes(bulk_load)].id
                for bulk_load in bulk_loads
                if bytes(bulk_load) in windows
            ),
            None,
        )
        yield replace(lifecycle, window=ours, cold=by_window.pop(ours, None) if ours else None)
    alone = [row for row in rows if not row.window or row.window in by_window]
    yield from (Lifecycle(window=row.window, cold=row) for row in alone)


# ---- telling it ------------------------------------------------------------------------------


def event_text(event: Row, lifecycle: Lifecycle) -> str:
    """What a record did to the lifecycle."""
    if event["replaced"] == lifecycle.ticket:
        return f"replaced by ticket {event['ticket']}"
    known = {
        "arm": "armed", "watch": "armed, an operation", "move": "extended", "unpark": "unparked",
    }  # fmt: skip
    if event["kind"] == "job":
        return job_text(event)
    cause = event["cause"] or event["kind"]
    text = known.get(event["kind"], str(cause))
    return (
        f"{text} by window {lifecycle.window}" if event["bulk_load"] and lifecycle.window else text
    )


def job_text(event: Row) -> str:
    """Effect of a record on a job of the timer."""
    state = event["cause"] or event["job_state"]
    reason = f", {event['dead_reason']}" if event["dead_reason"] else ""
    counts = f", leases {event['leases']}, failures {event['failures']}"
    return f"job {state}{reason}{'' if event['job_state'] == 'ended' else counts}"


def cold_text(cold: Cold) -> str:
    """What the tier has of it."""
    due = datetime.fromtimestamp(cold.due_ns // 10**9, UTC)
    text = f"in the cold tier since version {cold.version}, due {due:%Y-%m-%dT%H:%M:%SZ}"
    return f"{text}; ended there" if cold.state == "ended" else text


def record(lifecycle: Lifecycle) -> dict[str, Any]:
    """A lifecycle in JSON."""
    before = lifecycle.cold
    events = [{"at": None, "lsn": None, "event": cold_text(before)}] if before else []
    if before and before.window and not lifecycle.events:
        events.append({"at": None, "lsn": None, "event": f"{before.state}: window {before.window}"})
    events += [
        {
            "at": f"{e['at'].astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
            "lsn": e["lsn"],
            "event": event_text(e, lifecycle),
        }
        for e in lifecycle.events
    ]
    return {
        "node": lifecycle.node, "daemon": lifecycle.daemon, "ticket": lifecycle.ticket,
        "final_state": lifecycle.final_state,
        "lateness_ns": lifecycle.end["lateness_ns"] if lifecycle.end else None,
        "stages_ns": lifecycle.stages, "events": events,
    }  # fmt: skip

"""Views of a daemon at one moment, which `top` and `web` show.

Views are read from shared memory, so they work even if the daemon hangs. They never contain keys or
payloads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from purgatoryd.cli.status import record as health_record
from purgatoryd.shm_layout import occupancy
from purgatoryd.shm_layout.arena import NONE_NS, Reader
from purgatoryd.shm_layout.errors import (
    ArenaError,
    ArenaMissing,
    ArenaNotReady,
    PermissionDenied,
    TableBroken,
)
from purgatoryd.shm_layout.health import FROZEN_NS, Health, HealthCondition, Watch, is_alive
from purgatoryd.shm_layout.layout import ClockKind, is_reserved
from purgatoryd.shm_layout.metrics import SINCE_START, Histogram, Metrics, read_metrics
from purgatoryd.shm_layout.occupancy import Fill, Level
from purgatoryd.shm_layout.paths import Paths, arena_paths
from purgatoryd.shm_layout.sessions import Session, Sessions
from purgatoryd.shm_layout.shm import ArenaFile
from purgatoryd.shm_layout.status_file import DaemonStatus, StatusFile

INTERVAL_S = 0.5
"""Time between two views."""
WINDOW_NS = 10_000_000_000
"""Histograms, and rates of counters that are stored once a second, cover this time before now."""
SLOW_CLIENTS = 8
"""Maximum number of clients in a view. The view shows the slowest ones."""
SLOW_NS = 1_000_000_000
"""A client is slow if one of its outcomes has been unacknowledged, or one of its batches
unfinished, for this long."""
TOPICS = 20
"""Maximum number of topics in a view. The view shows those with the most timers."""
NAMESPACES = 20
"""Maximum number of namespaces in a view. The view shows those with the most timers."""

GONE = (HealthCondition.KILLED, HealthCondition.STOPPED)

# Tables that can fill up: (name, gauge of the used part, gauge of the total, unit).
FILLS = (
    ("timers", "slots_used", "capacity", ""),
    ("payload memory", "blob_bytes", "payload_bytes", "bytes"),
    ("replay memory", "replay_bytes", "replay_bytes_max", "bytes"),
    ("watch records", "watch_records", "watch_records_max", ""),
    ("watch keys", "watch_keys", "watch_keys_max", ""),
    ("WAL buffer", "wal_buffer_used_bytes", "wal_buffer_bytes", "bytes"),
)
RECYCLED = ("replay memory",)
"""Tables of FILLS in which new entries replace the oldest entries."""
# The counters that each rate adds up.
RATES = {
    "armed": ("adds", "watches"),
    "fired": ("expiries",),
    "cancelled": ("cancels", "cancelled"),
    "satisfied": ("satisfied",),
    "expired": ("expired",),
    "advances": ("advances",),
    "batches": ("batches",),
    "full iterations": ("iterations_full",),
    "messages": ("messages_sent",),
    "moved": ("moved",),
    "wake-ups": ("wakeups",),
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a duration over the last WINDOW_NS."""

    count: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    bins: list[tuple[int, int]]
    """(upper edge in ns, count) of each bin, in rising order. An edge is a power of two."""


@dataclass(frozen=True, slots=True)
class Share:
    """Timers, bytes and quota of a namespace."""

    name: str
    timers: int
    bytes: int
    quota_timers: int
    """0 = no quota."""


@dataclass(frozen=True, slots=True)
class TopicShare:
    """Figures of a topic. `notices`: number of notices since the topic was created."""

    namespace: str
    name: str
    timers: int
    notices: int


@dataclass(frozen=True, slots=True)
class Operations:
    """Number of armed operations, and number of unacknowledged outcomes."""

    armed: int
    outcomes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Figures of one shard of a deployment."""

    shard: int
    name: str
    condition: str | None
    """None = the arena cannot be read; `error` has the reason."""
    armed: int
    armed_per_s: float
    fired_per_s: float
    late_p99_ns: int
    fullest: Fill | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Runner:
    """The supervisor process of a deployment."""

    condition: str
    pid: int
    """0 = the supervisor has stopped."""
    reasons: Sequence[str]
    """The reasons why the deployment is degraded, as text."""
    serving: int
    """Number of shards that are ready and answer the supervisor."""
    restarts: int
    """Number of restarts of shards since the supervisor started."""


@dataclass(frozen=True, slots=True)
class View:
    """A daemon at one moment, or the sum of all shards of a deployment.

    Rates are per second since the previous view. Rates of messages and wake-ups cover the last
    WINDOW_NS, because the daemon stores these counters only once a second.
    """

    name: str
    health: Health
    clock: str
    tick_ns: int
    state_ns: int
    """Time since the daemon entered its state."""
    armed: int
    due: int
    next_in_ns: int | None
    """Time until the next timer is due; None = no timer is armed."""
    rates: Mapping[str, float]
    refused: Mapping[str, float]
    """Rate of refusals by reason, without reasons whose rate is 0."""
    spans: Mapping[str, Histogram]
    """Histogram of each duration over the last WINDOW_NS, by name of the duration."""
    fills: list[Fill]
    levels: list[Level]
    namespaces: list[Share]
    """Namespaces, those with the most timers first."""
    slowest: list[Session] | None
    """Clients with old unacknowledged outcomes or batches, the slowest first.

    None = this user may not see them; only the daemon's user and root may do so. Subscribers have
    no sessions; the histogram `send` shows whether they are slow.
    """
    topics: list[TopicShare] = field(default_factory=list)
    """Topics, those with the most timers first."""
    operations: Operations = Operations(0, 0)
    shards: list[Shard] = field(default_factory=list)
    """All shards of a deployment; empty for one daemon."""
    runner: Runner | None = None
    """Supervisor of a deployment; None = its report cannot be read, or does not exist."""

    @property
    def times(self) -> dict[str, Spread]:
        """Return the distribution of each histogram."""
        return {name: _spread(one) for name, one in self.spans.items()}

    def record(self) -> dict[str, Any]:
        """Return the view for JSON."""
        plain = asdict(replace(self, spans={}))
        del plain["health"], plain["spans"]
        times = {name: asdict(one) for name, one in self.times.items()}
        return {**health_record(self.name, self.health), **plain, "times": times}


@dataclass(frozen=True, slots=True)
class _Moment:
    """Metrics at one moment, from which the next view computes rates."""

    at_ns: int
    heartbeat_ns: int
    """Boot time of the last heartbeat, which stores the counters of SINCE_START."""
    epoch: int
    metrics: Metrics


class Sampler:
    """Takes views of one daemon, also across its restarts."""

    def __init__(self, name: str, frozen_ns: int = FROZEN_NS) -> None:
        """Attach to the arena of the daemon `name`.

        `frozen_ns`: a loop that has stood still for longer is frozen. Raises the errors of
        arena_paths() and Reader if there is no arena, and ArenaNotReady if its recovery is not
        complete.
        """
        self._name = name
        self._frozen_ns = frozen_ns
        self._switch_to(arena_paths(name))

    def _switch_to(self, paths: Paths) -> None:
        self._reader = _opened(paths)
        self._sessions = _sessions(paths, self._reader)
        self._watch = Watch(DaemonStatus(paths, self._reader), self._frozen_ns)
        self._moments: deque[_Moment] = deque()

    def take(self) -> View:
        """Return a view of this moment. Raises the errors of the constructor if the arena has
        disappeared."""
        health = self._watch.look()
        if self._reader.retired or (health and health.condition in GONE):
            self._follow()
            health = self._watch.look()
        now = self._moment()
        before = self._moments[-1] if self._moments else now
        if before.epoch != now.epoch:
            before = now
            self._moments.clear()
        self._moments.append(now)
        while now.at_ns - self._moments[0].at_ns > WINDOW_NS:
            self._moments.popleft()
        return self._view(health or self._watch.unsure(), before, now)

    @property
    def settled(self) -> bool:
        """False while the daemon may be frozen but has not been watched long enough to report
        this."""
        return self._watch.look() is not None

    @property
    def beaten(self) -> bool:
        """True once the daemon has had a heartbeat since the first moment of the window."""
        first = self._moments[0].heartbeat_ns if self._moments else 0
        return int(self._reader.header.heartbeat_boot_ns) != first

    def _follow(self) -> None:
        """Switch to the arena that replaced this one, if any."""
        paths = arena_paths(self._name)
        found = _opened(paths)
        other = self._reader.retired or found.uuid != self._reader.uuid
        found.close()
        if other:
            left = self._reader, self._sessions
            self._switch_to(paths)
            _close(*left)

    def _moment(self) -> _Moment:
        heartbeat_ns = int(self._reader.header.heartbeat_boot_ns)
        metrics = read_metrics(self._reader)
        return _Moment(time.monotonic_ns(), heartbeat_ns, self._reader.epoch, metrics)

    def _view(self, health: Health, before: _Moment, now: _Moment) -> View:
        header = self._reader.header
        boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        virtual = header.clock_kind == ClockKind.VIRTUAL
        arena_ns = int(header.now_ns) if virtual else boot_ns
        table = self._sessions
        clients = None if table is None else table.read(arena_ns, boot_ns)
        return View(
            name=self._name,
            health=health,
            clock="virtual" if virtual else "real",
            tick_ns=int(header.tick_ns),
            state_ns=boot_ns - health.since_boot_ns if health.since_boot_ns else 0,
            armed=int(now.metrics.gauges["live"]),
            due=occupancy.due(self._reader),
            next_in_ns=_until(int(header.next_deadline_ns), arena_ns),
            rates={name: self._rate(of, before, now) for name, of in RATES.items()},
            refused=_refused(before, now),
            spans=self._spans(now),
            fills=[
                *_fills(now.metrics),
                *self._budget(now),
                *occupancy.tables(self._reader),
                *([] if table is None else [Fill("sessions", len(clients or ()), table.capacity)]),
            ],
            levels=occupancy.levels(self._reader),
            namespaces=_shares(now.metrics),
            slowest=None if clients is None else slow(clients),
            topics=_topics(self._reader),
            operations=Operations(
                int(now.metrics.gauges["operations"]), int(now.metrics.gauges["outcomes"])
            ),
        )

    def _rate(self, counters: tuple[str, ...], before: _Moment, now: _Moment) -> float:
        """Return the rate of counters since the previous view.

        Counters that the daemon stores at its heartbeats jump between views. Their rate is the rate
        between the first and the last heartbeat of the window.
        """
        if SINCE_START.isdisjoint(counters):
            return _rate(counters, before, now)
        first = self._moments[0]
        return _rate(counters, first, now, now.heartbeat_ns - first.heartbeat_ns)

    def _budget(self, now: _Moment) -> list[Fill]:
        """Return how much of their budget the loop iterations with work have used in the window."""
        older, newer = self._moments[0].metrics.counters, now.metrics.counters
        done, allowed = (
            newer[name] - older[name] for name in ("iteration_work", "iteration_budget")
        )
        return [Fill("iteration budget, 10 s", done, allowed)] if allowed > 0 else []

    def _spans(self, now: _Moment) -> dict[str, Histogram]:
        older = self._moments[0].metrics.histograms
        newer = now.metrics.histograms
        return {name: one.since(older[name]) for name, one in newer.items()}

    def close(self) -> None:
        """Unmap the arena files."""
        _close(self._reader, self._sessions)


def _opened(paths: Paths) -> Reader:
    try:
        return Reader(ArenaFile.open(paths.arena, read_only=True))
    except ArenaMissing:
        with suppress(OSError, TableBroken, PermissionDenied):
            alive = is_alive(StatusFile(paths.directory, paths.name).header)
            why = "its daemon is recovering" if alive else "its daemon was killed during recovery"
            raise ArenaNotReady(paths.arena, f"not created yet: {why}") from None
        raise


def _close(reader: Reader, sessions: Sessions | None) -> None:
    reader.close()
    if sessions is not None:
        sessions.close()


def _sessions(paths: Paths, reader: Reader) -> Sessions | None:
    try:
        return Sessions(paths.private, reader)
    except (ArenaError, PermissionDenied):
        return None


def _until(due_ns: int, now_ns: int) -> int | None:
    return None if due_ns == NONE_NS else due_ns - now_ns


def _rate(counters: tuple[str, ...], before: _Moment, now: _Moment, ns: int | None = None) -> float:
    """Return a rate per second; 0 if the counters fell, because a restart resets them. `ns`: the
    time in which they rose, default that between the two moments."""
    seconds = (now.at_ns - before.at_ns if ns is None else ns) / 1e9
    more = sum(now.metrics.counters[one] - before.metrics.counters[one] for one in counters)
    return max(0.0, more / seconds) if seconds else 0.0


def _refused(before: _Moment, now: _Moment) -> dict[str, float]:
    reasons = [name for name in now.metrics.counters if name.startswith("refused_")]
    rates = {name: _rate((name,), before, now) for name in reasons}
    return {name.removeprefix("refused_"): rate for name, rate in rates.items() if rate}


def _spread(found: Histogram) -> Spread:
    bins: dict[int, int] = {}
    for edge_ns, count in found.buckets():
        upper_ns = 1 << max(0, edge_ns - 1).bit_length()
        bins[upper_ns] = bins.get(upper_ns, 0) + count
    p50_ns, p99_ns, max_ns = map(found.quantile, (0.5, 0.99, 1.0))
    return Spread(found.count, p50_ns, p99_ns, max_ns, list(bins.items()))


def _fills(metrics: Metrics) -> list[Fill]:
    sizes = ((name, metrics.gauges[used], metrics.gauges[capacity], unit)
             for name, used, capacity, unit in FILLS)  # fmt: skip
    return [
        Fill(name, int(used), int(capacity), unit, recycles=name in RECYCLED)
        for name, used, capacity, unit in sizes
        if capacity
    ]


def slow(clients: list[Session]) -> list[Session]:
    """Return the slow clients, slowest first."""
    found = (
        one for one in clients
        if one.oldest_ns >= SLOW_NS or (one.in_flight and one.silent_ns >= SLOW_NS)
    )  # fmt: skip
    return list(found)[:SLOW_CLIENTS]


def _topics(reader: Reader) -> list[TopicShare]:
    names = {row: one.name for row, one in reader.namespaces().items()}
    found = [
        TopicShare(names.get(one.namespace_row, "?"), one.name, one.live, one.sequence)
        for one in reader.topics() if not is_reserved(names.get(one.namespace_row, ""))
    ]  # fmt: skip
    return sorted(found, key=lambda t: (-t.timers, -t.notices, t.namespace, t.name))[:TOPICS]


def _shares(metrics: Metrics) -> list[Share]:
    return [
        Share(n.name, n.live, n.bytes, n.settings.quota_timers)
        for n in metrics.namespaces[:NAMESPACES]
    ]

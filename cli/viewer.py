"""Views of a daemon, or of each shard of a deployment and the sum of the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TypeVar

from purgatoryd.cli.shards import directory_of, table_of
from purgatoryd.cli.view import (
    NAMESPACES,
    SLOW_CLIENTS,
    TOPICS,
    Operations,
    Runner,
    Sampler,
    Shard,
    Share,
    TopicShare,
    View,
)
from purgatoryd.shm_layout.errors import (
    ArenaNotReady,
    InvalidSetting,
    PermissionDenied,
    PurgatorydError,
    TableBroken,
)
from purgatoryd.shm_layout.health import FROZEN_NS, Health, HealthCondition, Watch
from purgatoryd.shm_layout.layout import Degraded
from purgatoryd.shm_layout.metrics import Histogram
from purgatoryd.shm_layout.occupancy import Fill, Level
from purgatoryd.shm_layout.sessions import Session
from purgatoryd.shm_layout.status_file import StatusFile

Value = TypeVar("Value")

WORST = (
    HealthCondition.KILLED, HealthCondition.FROZEN, HealthCondition.STOPPED,
    HealthCondition.RECOVERING,
    HealthCondition.DRAINING, HealthCondition.DEGRADED, HealthCondition.READY,
)  # fmt: skip
"""Conditions from worst to best. A deployment has the worst condition of its shards."""


@dataclass(frozen=True, slots=True)
class Views:
    """The views of a daemon, or of a deployment and its shards, at one moment."""

    whole: View
    shards: Sequence[View | PurgatorydError]
    """View of each shard, or the error if the shard cannot be read; empty for a daemon without
    shards."""

    def all(self) -> list[View]:
        """Return the sum and the views of all shards that can be read."""
        return [self.whole, *(one for one in self.shards if isinstance(one, View))]

    def of(self, shard: int | None) -> View:
        """Return the view of a shard; None = the sum. Raises InvalidSetting, or the shard's
        error."""
        if shard is None:
            return self.whole
        if not 0 <= shard < len(self.shards):
            last = len(self.shards) - 1
            bound = f"0 to {last}" if self.shards else "left out, because the daemon has no shards"
            raise InvalidSetting("--shard", shard, bound, f"of {self.whole.name!r}")
        found = self.shards[shard]
        if not isinstance(found, View):
            raise found
        return found


class Viewer:
    """Takes views of a daemon, or of a deployment and its shards, also across restarts and
    resharding."""

    def __init__(self, name: str, frozen_ns: int = FROZEN_NS) -> None:
        """Raise the errors of take() if there is no arena, and no daemon that is recovering an
        arena."""
        self._name = name
        self._frozen_ns = frozen_ns
        self._samplers: dict[str, Sampler] = {}
        self._watch: Watch | None = None
        """Watch of the supervisor process."""
        self._suspect = False
        """True if the supervisor may be frozen but has not been watched long enough to report
        this."""
        try:
            with suppress(ArenaNotReady):
                self.take()
        except BaseException:
            self.close()
            raise

    def take(self) -> Views:
        """Return views of this moment. Raises the errors of Sampler if no arena can be read, and
        TableBroken."""
        table = table_of(self._name)
        names = [self._name] if table is None else table.daemons
        self._forget(set(self._samplers) - set(names))
        taken = [self._view(name) for name in names]
        views = [one for one in taken if isinstance(one, View)]
        if not views:
            raise next(one for one in taken if isinstance(one, PurgatorydError))
        if table is None:
            return Views(views[0], [])
        rows = [_row(*row) for row in zip(range(len(names)), names, taken, strict=True)]
        whole = together(self._name, views, rows)
        return Views(
            whole if (reported := self._reported()) is None else run_by(whole, *reported), taken
        )

    def _reported(self) -> tuple[Health, Runner] | None:
        """Return (health, report) of the supervisor; None if there is no readable report."""
        self._suspect = False
        directory = directory_of(self._name)
        if directory is None:
            return None
        file = StatusFile(directory, self._name)
        try:
            self._watch = self._watch or Watch(file, self._frozen_ns)
            seen, found = self._watch.look(), file.header
            health = seen or self._watch.unsure()
        except (OSError, TableBroken, PermissionDenied):
            self._watch = None
            return None
        self._suspect = seen is None
        figures = found.reasons, found.serving, found.restarts
        return health, Runner(str(health.condition), health.pid, *figures)

    def _view(self, name: str) -> View | PurgatorydError:
        """Return the view of a daemon, or the error if there is no view."""
        try:
            if name not in self._samplers:
                self._samplers[name] = Sampler(name, self._frozen_ns)
            return self._samplers[name].take()
        except PurgatorydError as error:
            return error

    @property
    def settled(self) -> bool:
        """False while a daemon may be frozen but has not been watched long enough to report
        this."""
        self._reported()
        return not self._suspect and all(sampler.settled for sampler in self._samplers.values())

    @property
    def beaten(self) -> bool:
        """True once each daemon has had a heartbeat since its first view."""
        return all(sampler.beaten for sampler in self._samplers.values())

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._samplers.pop(name).close()

    def close(self) -> None:
        """Unmap all arena files."""
        self._forget(list(self._samplers))


def _row(number: int, name: str, found: View | PurgatorydError) -> Shard:
    if not isinstance(found, View):
        return Shard(number, name, None, 0, 0, 0, 0, None, str(found))
    filling = (fill for fill in found.fills if not fill.recycles)
    fullest = max(filling, key=lambda fill: fill.share, default=None)
    late_ns = found.spans["structural_lateness"].quantile(0.99)
    rates = (found.rates["armed"], found.rates["fired"])
    condition = str(found.health.condition)
    return Shard(number, name, condition, found.armed, *rates, late_ns, fullest, None)


# ---- together ------------------------------------------------------------------------------------


def together(name: str, views: list[View], rows: list[Shard]) -> View:
    """Return the sum of one or more views, with the worst health and the nearest deadline."""
    first = views[0]
    soonest = [one.next_in_ns for one in views if one.next_in_ns is not None]
    clients = [one.slowest for one in views if one.slowest is not None]
    return View(
        name=name,
        health=_health([one.health for one in views]),
        clock=first.clock,
        tick_ns=first.tick_ns,
        state_ns=min(one.state_ns for one in views),
        armed=sum(one.armed for one in views),
        due=sum(one.due for one in views),
        next_in_ns=min(soonest, default=None),
        rates=_sums(one.rates for one in views),
        refused=_sums(one.refused for one in views),
        spans=_merged((one.spans for one in views), Histogram.plus),
        fills=list(_grouped((fill for one in views for fill in one.fills), _table, _fill)),
        levels=list(_grouped((level for one in views for level in one.levels), _ring, _level)),
        namespaces=_shares(one.namespaces for one in views),
        slowest=_slowest(clients) if clients else None,
        topics=_topics(one.topics for one in views),
        operations=Operations(
            sum(one.operations.armed for one in views),
            sum(one.operations.outcomes for one in views),
        ),
        shards=rows,
    )


def run_by(whole: View, health: Health, runner: Runner) -> View:
    """Return `whole` with the supervisor added. The health is the worse of `whole` and
    supervisor."""
    return replace(whole, health=_health([whole.health, health]), runner=runner)


def _health(all_of: list[Health]) -> Health:
    """Return the worst condition, with all reasons and the longest times. The pid is 0, because
    each shard has its own process."""
    return Health(
        min((one.condition for one in all_of), key=WORST.index),
        reduce(or_, (one.why for one in all_of), Degraded(0)),
        0,
        max(one.since_boot_ns for one in all_of),
        max(one.still_ns for one in all_of),
        max(one.overdue_ns for one in all_of),
    )


def _merged(
    maps: Iterable[Mapping[str, Value]], plus: Callable[[Value, Value], Value]
) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for one in maps:
        for name, value in one.items():
            found[name] = plus(found[name], value) if name in found else value
    return found


def _sums(maps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    return _merged(maps, lambda one, other: one + other)


def _grouped(
    items: Iterable[Value], key: Callable[[Value], object], plus: Callable[[Value, Value], Value]
) -> Iterable[Value]:
    """Return the items with equal keys merged, in the order of the first item of each key."""
    found: dict[object, Value] = {}
    for one in items:
        same = key(one)
        found[same] = plus(found[same], one) if same in found else one
    return found.values()


def _table(fill: Fill) -> object:
    return fill.name


def _fill(one: Fill, other: Fill) -> Fill:
    capacity = one.capacity + other.capacity
    return Fill(one.name, one.used + other.used, capacity, one.unit, one.recycles)


def _ring(level: Level) -> object:
    """Return the key for merging levels: only levels with the same tick are merged."""
    return level.number, level.bucket_ns, len(level.counts)


def _level(one: Level, other: Level) -> Level:
    counts = tuple(map(sum, zip(one.counts, other.counts, strict=True)))
    return Level(one.number, one.bucket_ns, one.cell_ns, counts)


def _shares(of_each: Iterable[list[Share]]) -> list[Share]:
    """Return the shares of all shards. The shares of a partitioned namespace are merged."""
    every = _grouped((one for shares in of_each for one in shares), lambda one: one.name, _share)
    return sorted(every, key=lambda one: (-one.timers, one.name))[:NAMESPACES]


def _share(one: Share, other: Share) -> Share:
    quota = one.quota_timers + other.quota_timers
    return Share(one.name, one.timers + other.timers, one.bytes + other.bytes, quota)


def _topics(of_each: Iterable[list[TopicShare]]) -> list[TopicShare]:
    every = _grouped(
        (one for topics in of_each for one in topics),
        lambda one: (one.namespace, one.name),
        lambda one, other: TopicShare(
            one.namespace, one.name, one.timers + other.timers, one.notices + other.notices
        ),
    )
    return sorted(every, key=lambda t: (-t.timers, -t.notices, t.namespace, t.name))[:TOPICS]


def _slowest(of_each: list[list[Session]]) -> list[Session]:
    every = (one for sessions in of_each for one in sessions)
    ranked = sorted(every, key=lambda s: (s.oldest_ns, s.unacknowledged, s.in_flight))
    return ranked[::-1][:SLOW_CLIENTS]

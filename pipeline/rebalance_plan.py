"""Which namespaces should live on which daemon: a rebalance plan of few and small moves.

A daemon may have labels, such as its rack or its node. Namespaces of one group, such as the copies
of one service, are kept apart by a label: no two of them on one rack, as far as there are racks.
That comes first; then the moves that even out what daemons hold and do, until they differ by
no more than the tolerance. The same input gives the same plan.

A namespace of one name may be on several daemons: each is moved by itself, and never to where
there is another one, or was one before the plan. Reserved ones stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from purgatoryd.shm_layout.errors import InvalidSetting
from purgatoryd.shm_layout.layout import is_reserved

TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Host:
    """A daemon. `capacity`: timers that it can hold; `speed`: operations per second that it
    can do; `labels`: rack, node, ..."""

    name: str
    capacity: int
    speed: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace. `live`: timers armed; `rate`: adds, cancels and final states per second;
    `group`: namespaces that are to be apart, if it has any."""

    name: str
    host: str
    live: int
    rate: float
    group: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """A proposed move of one namespace. `live`: timers that it had when the plan was made.

    The planner sets every `state` to "planned". A tool that carries out the plan sets `state`,
    `error` and `begun_s` (seconds since 1970) in the file.
    """

    namespace: str
    source: str
    target: str
    live: int
    reason: str
    state: str = "planned"
    error: str = ""
    begun_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """Moves, in their order. `before`, `after`: the fullest daemon's share of what it can do."""

    moves: tuple[Move, ...]
    before: float
    after: float

    def record(self) -> dict[str, Any]:
        """Return the plan as a dict for JSON."""
        return asdict(self)


def rebalance_plan_of(record: Mapping[str, Any]) -> RebalancePlan:
    """The inverse of RebalancePlan.record(). Raises TypeError, ValueError, KeyError for what is
    none."""
    moves = tuple(Move(**move) for move in record["moves"])
    return RebalancePlan(moves, float(record["before"]), float(record["after"]))


# ---- planning --------------------------------------------------------------------------------


class _Layout:
    """Which namespace is where, and what that means for every daemon."""

    def __init__(self, hosts: Sequence[Host], spaces: Sequence[Space], label: str) -> None:
        self.hosts = {host.name: host for host in sorted(hosts, key=lambda host: host.name)}
        self.label = label
        self.at = {
            space: space.host for space in sorted(spaces, key=lambda one: (one.name, one.host))
        }
        self.live = dict.fromkeys(self.hosts, 0)
        self.rate = dict.fromkeys(self.hosts, 0.0)
        for space, host in self.at.items():
            self._count(space, host, 1)

    def _count(self, space: Space, host: str, sign: int) -> None:
        self.live[host] += sign * space.live
        self.rate[host] += sign * space.rate

    def share(self, host: str, but: Space | None = None, plus: Space | None = None) -> float:
        """How much of a daemon is used: of its capacity or of its speed, whichever is more."""
        about = self.hosts[host]
        live = self.live[host] - (but.live if but else 0) + (plus.live if plus else 0)
        rate = self.rate[host] - (but.rate if but else 0) + (plus.rate if plus else 0)
        return max(live / about.capacity, rate / about.speed)

    def domain(self, host: str) -> str:
        """What a daemon shares with others of its label; its own name if it has no such label."""
        return self.hosts[host].labels.get(self.label, host)

    def crowd(self, space: Space, host: str) -> int:
        """How many others of its group would share a domain with a namespace there."""
        if not space.group:
            return 0
        return sum(
            one.group == space.group and one is not space and self.domain(at) == self.domain(host)
            for one, at in self.at.items()
        )

    def movable(self) -> list[Space]:
        """The namespaces that a plan may move."""
        return [space for space in self.at if not is_reserved(space.name)]

    def targets(self, space: Space) -> list[str]:
        """The daemons without a namespace of that name, now and before all moves: which of them
        ends first is not known."""
        taken = {
            host
            for one, at in self.at.items() if one.name == space.name
            for host in (at, one.host)
        }  # fmt: skip
        return [host for host in self.hosts if host not in taken]

    def fullest(self) -> float:
        """The share of the fullest daemon."""
        return max((self.share(host) for host in self.hosts), default=0.0)

    def move(self, space: Space, target: str) -> None:
        """Puts a namespace elsewhere."""
        self._count(space, self.at[space], -1)
        self._count(space, target, 1)
        self.at[space] = target


class _Step(NamedTuple):
    """One namespace's next place."""

    space: Space
    target: str
    reason: str


def plan_rebalance(
    hosts: Sequence[Host], spaces: Sequence[Space], label: str = "rack",
    tolerance: float = TOLERANCE, moves_max: int = 100,
) -> RebalancePlan:  # fmt: skip
    """Moves after which groups are apart and daemons even. Raises InvalidSetting."""
    check(hosts, spaces)
    layout = _Layout(hosts, spaces, label)
    before, steps = layout.fullest(), list[_Step]()
    for find in (_apart, _even):
        while len(steps) < moves_max and (found := find(layout, tolerance)) is not None:
            layout.move(found.space, found.target)
            steps.append(found)
    return RebalancePlan(tuple(_joined(steps)), before, layout.fullest())


def check(hosts: Iterable[Host], spaces: Iterable[Space]) -> None:
    """Raises InvalidSetting for a namespace of an unknown daemon, or that a daemon has twice, and
    for daemons without free capacity."""
    known = {host.name: host for host in hosts}
    for host in known.values():
        if host.capacity <= 0 or host.speed <= 0:
            raise InvalidSetting(
                host.name, host.capacity, "above 0, and so must its speed", "rebalance-plan"
            )
    seen = set[tuple[str, str]]()
    for space in spaces:
        if space.host not in known:
            raise InvalidSetting(space.name, space.host, "on a known daemon", "rebalance-plan")
        if (space.name, space.host) in seen:
            raise InvalidSetting(space.name, space.host, "listed once per daemon", "rebalance-plan")
        seen.add((space.name, space.host))


def _apart(layout: _Layout, _: float) -> _Step | None:
    """The smallest move that takes a namespace out of a domain that it shares with its group."""
    found = []
    for at, space in enumerate(layout.movable()):
        crowd = layout.crowd(space, layout.at[space])
        for target in layout.targets(space) if crowd else ():
            share, fewer = layout.share(target, plus=space), layout.crowd(space, target)
            if fewer < crowd and share <= 1.0:
                found.append((fewer, space.live, share, at, target, space))
    if not found:
        return None
    target, space = min(found)[4:]
    shared = layout.domain(layout.at[space])
    return _Step(space, target, f"group {space.group} shares {layout.label} {shared}")


def _even(layout: _Layout, tolerance: float) -> _Step | None:
    """The move from the fullest daemon that gains most for each timer that it moves."""
    shares = {host: layout.share(host) for host in layout.hosts}
    if len(shares) < 2 or max(shares.values()) - min(shares.values()) <= tolerance:
        return None
    source = max(shares, key=lambda host: (shares[host], host))
    found = []
    for at, space in enumerate(layout.movable()):
        for target in layout.targets(space) if layout.at[space] == source else ():
            gain = shares[source] - max(
                layout.share(source, but=space), layout.share(target, plus=space)
            )
            apart = layout.crowd(space, target) <= layout.crowd(space, source)
            if apart and gain > tolerance / 10:
                found.append((-gain / (1 + space.live), space.live, at, target, space))
    if not found:
        return None
    target, space = min(found)[3:]
    reason = f"{source} is {shares[source]:.0%} full, {target} {shares[target]:.0%}"
    return _Step(space, target, reason)


def _joined(steps: Iterable[_Step]) -> list[Move]:
    """One move for each namespace, from where it was first to where it came last."""
    last = {step.space: step for step in steps}
    return [
        Move(space.name, space.host, step.target, space.live, step.reason)
        for space, step in last.items()
    ]

"""Which namespaces should live on which daemon: a plan of few and small moves.

A daemon may have labels, such as its rack or its node. Namespaces of one group, such as the copies
of one service, are kept apart by a label: no two of them on one rack, as far as there are racks.
That comes first; then the moves that even out what daemons hold and do, until they differ by
no more than the tolerance. The same input gives the same plan.

A plan is applied a few moves at a time: a move that is stuck keeps its place, and holds nobody
else back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from purgatoryd.shm_layout.errors import InvalidSetting, MoveMissing

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
    """A namespace. `live`: timers armed; `rate`: adds, cancels and ends per second; `group`:
    namespaces that are to be apart, if it has any."""

    name: str
    host: str
    live: int
    rate: float
    group: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """A namespace's way. `state`: planned, moving, done, failed, cancelled; `live`: its timers when
    it was planned."""

    namespace: str
    source: str
    target: str
    live: int
    reason: str
    state: str = "planned"
    error: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves, in their order. `before`, `after`: the fullest daemon's share of what it can do."""

    moves: tuple[Move, ...]
    before: float
    after: float

    def record(self) -> dict[str, Any]:
        """In JSON."""
        return asdict(self)


def plan_of(record: Mapping[str, Any]) -> Plan:
    """The inverse of Plan.record()."""
    moves = tuple(Move(**move) for move in record["moves"])
    return Plan(moves, record["before"], record["after"])


# ---- planning --------------------------------------------------------------------------------


class _Layout:
    """Which namespace is where, and what that means for every daemon."""

    def __init__(self, hosts: Sequence[Host], spaces: Sequence[Space], label: str) -> None:
        self.hosts = {host.name: host for host in sorted(hosts, key=lambda host: host.name)}
        self.label = label
        self.at = {space.name: space.host for space in spaces}
        self.spaces = {space.name: space for space in sorted(spaces, key=lambda one: one.name)}
        self.live = dict.fromkeys(self.hosts, 0)
        self.rate = dict.fromkeys(self.hosts, 0.0)
        for space in self.spaces.values():
            self._count(space, space.host, 1)

    def _count(self, space: Space, host: str, sign: int) -> None:
        self.live[host] += sign * space.live
        self.rate[host] += sign * space.rate

    def share(self, host: str, but: Space | None = None, plus: Space | None = None) -> float:
        """How much of a daemon is used: of its room or of its speed, whichever is more."""
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
        others = (
            one for one in self.spaces.values()
            if one.group == space.group and one.name != space.name
        )  # fmt: skip
        return sum(self.domain(self.at[one.name]) == self.domain(host) for one in others)

    def fullest(self) -> float:
        """The share of the fullest daemon."""
        return max((self.share(host) for host in self.hosts), default=0.0)

    def move(self, space: Space, target: str) -> None:
        """Puts a namespace elsewhere."""
        self._count(space, self.at[space.name], -1)
        self._count(space, target, 1)
        self.at[space.name] = target


def plan(
    hosts: Sequence[Host], spaces: Sequence[Space], label: str = "rack",
    tolerance: float = TOLERANCE, moves_max: int = 100,
) -> Plan:  # fmt: skip
    """Moves after which groups are apart and daemons even. Raises InvalidSetting."""
    check(hosts, spaces)
    layout = _Layout(hosts, spaces, label)
    before, moves = layout.fullest(), list[Move]()
    for step in (_apart, _even):
        while len(moves) < moves_max and (move := step(layout, tolerance)) is not None:
            layout.move(layout.spaces[move.namespace], move.target)
            moves.append(move)
    return Plan(tuple(joined(moves)), before, layout.fullest())


def check(hosts: Iterable[Host], spaces: Iterable[Space]) -> None:
    """Raises InvalidSetting for a namespace of an unknown daemon, and for daemons without room."""
    known = {host.name: host for host in hosts}
    for host in known.values():
        if host.capacity <= 0 or host.speed <= 0:
            raise InvalidSetting(host.name, host.capacity, "more than 0, and its speed", "plan")
    for space in spaces:
        if space.host not in known:
            raise InvalidSetting(space.name, space.host, "on a daemon that is known", "plan")


def _apart(layout: _Layout, _: float) -> Move | None:
    """The smallest move that takes a namespace out of a domain that it shares with its group."""
    found = []
    for space in layout.spaces.values():
        source = layout.at[space.name]
        crowd = layout.crowd(space, source)
        for target in layout.hosts if crowd else ():
            share = layout.share(target, plus=space)
            if layout.crowd(space, target) < crowd and share <= 1.0:
                found.append((layout.crowd(space, target), space.live, share, space.name, target))
    if not found:
        return None
    name, target = min(found)[3:]
    space, source = layout.spaces[name], layout.at[name]
    reason = f"group {space.group} shares {layout.label} {layout.domain(source)}"
    return Move(name, source, target, space.live, reason)


def _even(layout: _Layout, tolerance: float) -> Move | None:
    """The move from the fullest daemon that gains most for each timer that it moves."""
    shares = {host: layout.share(host) for host in layout.hosts}
    if len(shares) < 2 or max(shares.values()) - min(shares.values()) <= tolerance:
        return None
    source = max(shares, key=lambda host: (shares[host], host))
    found = []
    for space in (one for one in layout.spaces.values() if layout.at[one.name] == source):
        for target in layout.hosts:
            gain = shares[source] - max(
                layout.share(source, but=space), layout.share(target, plus=space)
            )
            apart = layout.crowd(space, target) <= layout.crowd(space, source)
            if target != source and apart and gain > tolerance / 10:
                found.append((-gain / (1 + space.live), space.live, space.name, target))
    if not found:
        return None
    name, target = min(found)[2:]
    reason = f"{source} is {shares[source]:.0%} full, {target} {shares[target]:.0%}"
    return Move(name, source, target, layout.spaces[name].live, reason)


def joined(moves: Iterable[Move]) -> list[Move]:
    """One move for each namespace, from where it was first to where it came last."""
    found: dict[str, Move] = {}
    for move in moves:
        first = found.get(move.namespace)
        found[move.namespace] = replace(move, source=first.source) if first else move
    return [move for move in found.values() if move.source != move.target]


# ---- applying --------------------------------------------------------------------------------


class Mover(Protocol):
    """Who moves namespaces."""

    def begin(self, move: Move) -> None:
        """Starts a move, or goes on with one that was started."""

    def state(self, move: Move) -> tuple[str, str]:
        """moving, done or failed, and why it failed."""


class NoMover:
    """Daemons of this version cannot move a namespace."""

    def begin(self, move: Move) -> None:
        """Raises MoveMissing."""
        raise MoveMissing(move.namespace, move.source, move.target)

    def state(self, move: Move) -> tuple[str, str]:
        """Raises MoveMissing."""
        raise MoveMissing(move.namespace, move.source, move.target)


def step(plan: Plan, mover: Mover, in_flight: int = 2) -> Plan:
    """The plan a moment later: looks after the moves under way, and begins others until
    `in_flight` move. One that fails is left, and the others go on."""
    moves = [_looked_after(move, mover) for move in plan.moves]
    room = in_flight - sum(move.state == "moving" for move in moves)
    for i, move in enumerate(moves):
        if room > 0 and move.state == "planned":
            mover.begin(move)
            moves[i] = replace(move, state="moving")
            room -= 1
    return replace(plan, moves=tuple(moves))


def _looked_after(move: Move, mover: Mover) -> Move:
    if move.state != "moving":
        return move
    state, error = mover.state(move)
    return replace(move, state=state, error=error)


def cancelled(plan: Plan) -> Plan:
    """The plan without the moves that have not begun."""
    moves = (
        replace(move, state="cancelled") if move.state == "planned" else move for move in plan.moves
    )
    return replace(plan, moves=tuple(moves))

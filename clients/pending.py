"""Pending timers: list, count, cancel and move those of a selection.

The daemon looks at a part of its slots for each LIST message, so a page is collected with several
messages; the best timers so far bound those of the next message. A sweep changes timers in the
daemon, without its client. A job of this module runs for the blocking and for the asyncio client.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypedDict

from purgatoryd.clients import times
from purgatoryd.clients.arguments import check_type, check_whole
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import Asked, Core, timer_info
from purgatoryd.clients.jobs import Job, asked
from purgatoryd.clients.model import TimerInfo
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import InvalidArgument, InvalidTime
from purgatoryd.shm_layout.layout import TIME_MAX_NS, SweepAction, SweepChange, SweepState
from purgatoryd.shm_layout.wire import Key

LIMIT_MAX = 100_000
"""Largest number of timers of a page."""
ID_BYTES = 16
_MESSAGE_TIMERS = 4096
"""Largest number of timers that one message asks for."""
_POLL_S = 0.005
_LONGEST_POLL_S = 0.25


class Selection(TypedDict, total=False):
    """Arguments that select pending timers of the client's namespace; all of them are combined.

    `prefix`: the first bytes of the key, a str for keys of text and bytes for keys of bytes.
    `topic`, `tag`: as in add(). `due_from`, `due_before`: the range of deadlines; an aware
    datetime, or nanoseconds on the daemon's clock. Timers are selected, not operations.
    """

    prefix: str | bytes | None
    topic: str | None
    tag: str | None
    due_from: datetime | int | None
    due_before: datetime | int | None


@dataclass(frozen=True, slots=True)
class TimerPage(Sequence[TimerInfo]):
    """Timers in the order of their deadlines. `cursor`: for the next page; None = this is the
    last. `now_boot_ns`: time on the daemon's clock at which it read the timers."""

    timers: tuple[TimerInfo, ...]
    cursor: str | None
    now_boot_ns: int

    def __len__(self) -> int:
        return len(self.timers)

    def __getitem__(self, index: Any) -> Any:
        return self.timers[index]

    def __iter__(self) -> Iterator[TimerInfo]:
        return iter(self.timers)


@dataclass(frozen=True, slots=True)
class SweepStatus:
    """Progress of a sweep, in all partitions of the namespace.

    `id`: 16 bytes. `done`: number of timers that were cancelled or moved. `fraction`: part of the
    daemon's slots that the sweep has looked at, 0 to 1. In state NONE the daemon does not remember
    the sweep; after a dry run, `done` is then the number of timers that it would change. `uid`: uid
    that began it. `change`: cancel or move. `namespace`, `prefix`, `topic`, `tag`: those of the
    selection.
    """

    id: bytes
    state: SweepState
    done: int
    fraction: float = 1.0
    uid: int | None = None
    change: SweepChange | None = None
    namespace: str = ""
    prefix: Key | None = None
    topic: str | None = None
    tag: str | None = None


# ---- arguments ---------------------------------------------------------------------------------


def admit(core: Core) -> Connection:
    """Return a connection of an open client. Raises Closed, ShardUnavailable."""
    core.check()
    for connection in core.connections:
        connection.admit()
    return core.connections[0]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checked selection. A datetime becomes a time on the daemon's clock once the daemon has
    reported its wall clock."""

    select: wire.Select
    due_from: datetime | int | None
    due_before: datetime | int | None

    @property
    def needs_wall(self) -> bool:
        """True if the selection has a datetime."""
        return isinstance(self.due_from, datetime) or isinstance(self.due_before, datetime)

    def resolved(self, wall_offset_ns: int) -> wire.Select:
        """Return the selection with times on the daemon's clock."""
        from_ns = _at_ns(self.due_from, wall_offset_ns)
        upto_ns = _at_ns(self.due_before, wall_offset_ns)
        return self.select._replace(
            from_ns=0 if from_ns is None else from_ns,
            upto_ns=wire.NO_END_NS if upto_ns is None else upto_ns,
        )


def _at_ns(at: datetime | int | None, wall_offset_ns: int) -> int | None:
    if isinstance(at, datetime):
        return max(min(times.wall_ns(at) - wall_offset_ns, TIME_MAX_NS), 0)
    return at


def check_selection(
    core: Core, *, prefix: Any = None, topic: Any = None, tag: Any = None, due_from: Any = None,
    due_before: Any = None,
) -> Chosen:  # fmt: skip
    """Check a selection. Raises InvalidArgument."""
    if prefix is not None and (not isinstance(prefix, str | bytes) or not prefix):
        raise InvalidArgument(f"prefix must be a str or bytes of at least one byte, not {prefix!r}")
    if prefix is not None:
        wire.encode_key(prefix)
    for name, at in (("due_from", due_from), ("due_before", due_before)):
        if isinstance(at, datetime):
            times.wall_ns(at)
        elif at is not None:
            check_whole(name, at, 0, TIME_MAX_NS)
    select = wire.Select(
        core.names.namespace, prefix, None if topic is None else wire.encode_topic(topic),
        None if tag is None else wire.tag_bytes(tag),
    )  # fmt: skip
    return Chosen(select, due_from, due_before)


def check_id(sweep_id: Any) -> bytes:
    """Return the id of a sweep. Raises InvalidArgument."""
    if not isinstance(sweep_id, bytes) or len(sweep_id) != ID_BYTES or not any(sweep_id):
        raise InvalidArgument(
            f"the id of a sweep must be {ID_BYTES} bytes, not all zero, not {sweep_id!r}"
        )
    return sweep_id


@dataclass(frozen=True, slots=True)
class Change:
    """Change that a sweep makes to each timer."""

    change: SweepChange
    time_kind: int = 0
    time_ns: int = 0


CANCEL = Change(SweepChange.CANCEL)


def move(
    core: Core, shift: float | timedelta | None, delay: float | timedelta | None,
    deadline: datetime | None, deadline_boot_ns: int | None,
) -> Change:  # fmt: skip
    """Return the change of a reschedule. Raises InvalidArgument."""
    given = (delay, deadline, deadline_boot_ns)
    if shift is None:
        kind, time_ns = times.due(
            core.clock, core.host.boot_ns(), delay, None, deadline, deadline_boot_ns
        )
        return Change(SweepChange.MOVE, kind, time_ns)
    if any(other is not None for other in given):
        raise InvalidArgument("give either shift, or one of delay, deadline and deadline_boot_ns")
    earlier = isinstance(shift, float) and shift < 0
    shift_ns = -times.seconds_ns(-shift) if earlier else times.seconds_ns(shift)
    if shift_ns == 0 or abs(shift_ns) > TIME_MAX_NS:
        raise InvalidTime("shifts no deadline, or too far", shift, TIME_MAX_NS)
    return Change(SweepChange.SHIFT, 0, shift_ns)


# ---- cursors -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next page begins: behind (deadline, ticket), with the bound of each arena."""

    after: tuple[int, int]
    tickets: tuple[int, ...]

    def text(self) -> str:
        """Return the cursor as text."""
        fields = json.dumps([*self.after, *self.tickets], separators=(",", ":"))
        return fields.encode().hex()

    @classmethod
    def of(cls, text: str) -> Cursor:
        """Return the cursor of a text. Raises InvalidArgument."""
        check_type("cursor", text, str, optional=False)
        try:
            fields = json.loads(bytes.fromhex(text))
            after_ns, ticket, *tickets = (int(field) for field in fields)
        except (ValueError, TypeError):
            raise InvalidArgument(f"{text!r} is no cursor of a page of timers") from None
        return cls((after_ns, ticket), tuple(tickets))

    def check(self, arenas: int) -> None:
        """Raise InvalidArgument unless the cursor is of so many arenas."""
        if len(self.tickets) != arenas:
            raise InvalidArgument(
                f"the cursor is of {len(self.tickets)} shards, but the namespace is in {arenas}"
            )


# ---- questions ---------------------------------------------------------------------------------


class ListQuestion(Asked[wire.Listed]):
    """A LIST message."""

    def __init__(self, part: wire.Part, select: wire.Select) -> None:
        super().__init__(lambda number, session: wire.encode_list(number, session, part, select))

    def outcome(self) -> wire.Listed:
        """Return the answer. Raises MessageRefused, DaemonError."""
        reply = self._answer()
        return wire.decode_listed(reply.body, reply.records)


class SweepQuestion(Asked[list[wire.SweepInfo]]):
    """A SWEEP message."""

    def __init__(
        self, sweep_id: bytes, action: SweepAction, select: wire.Select | None = None,
        change: Change | None = None,
    ) -> None:  # fmt: skip
        fields = {} if change is None else {
            "change": change.change, "time_kind": change.time_kind, "time_ns": change.time_ns
        }  # fmt: skip
        super().__init__(
            lambda number, session: wire.encode_sweep(
                number, session, sweep_id, action, select, **fields
            )
        )

    def outcome(self) -> list[wire.SweepInfo]:
        """Return the answer. Raises MessageRefused, DaemonError."""
        reply = self._answer()
        return wire.decode_sweeps(reply.body, reply.records)


def _ask_list(
    connection: Connection, part: wire.Part, select: wire.Select, limit_s: float
) -> Job[wire.Listed]:
    def ask() -> ListQuestion:
        question = ListQuestion(part, select)
        connection.session.ask(question.query)
        return question

    return (yield from asked(connection, ask, "list", limit_s))


def _ask_sweep(
    connection: Connection, limit_s: float, *arguments: Any
) -> Job[list[wire.SweepInfo]]:
    def ask() -> SweepQuestion:
        question = SweepQuestion(*arguments)
        connection.session.ask(question.query)
        return question

    return (yield from asked(connection, ask, "sweep", limit_s))


def _arenas(
    core: Core, limit_s: float, chosen: Chosen | None = None
) -> Job[list[tuple[Connection, wire.Select]]]:
    """Return a connection to each arena that has partitions of the namespace, and the selection
    with times on the clock of that arena. Several partitions may be in one arena."""
    found: dict[bytes, tuple[Connection, wire.Select]] = {}
    chosen = chosen or Chosen(wire.Select(core.names.namespace), None, None)
    nothing = wire.Part(slot=2**32 - 1)
    for connection in core.connections:
        wall_offset_ns = 0
        if chosen.needs_wall or len(core.connections) > 1:
            first = yield from _ask_list(connection, nothing, chosen.select, limit_s)
            wall_offset_ns = first.wall_offset_ns
        found.setdefault(connection.daemon, (connection, chosen.resolved(wall_offset_ns)))
    return list(found.values())


# ---- list and count ----------------------------------------------------------------------------


def counted(core: Core, limit_s: float, chosen: Chosen) -> Job[int]:
    """Return the number of timers of a selection."""
    total = 0
    for connection, select in (yield from _arenas(core, limit_s, chosen)):
        slot: int | None = 0
        while slot is not None:
            part = wire.Part(slot=slot)
            found = yield from _ask_list(connection, part, select, limit_s)
            select, slot = select._replace(tickets=found.tickets), found.slot
            total += found.matched
    return total


_Row = tuple[int, int, wire.Info]


def _place(row: _Row) -> tuple[int, int]:
    return row[:2]


def _first(
    connection: Connection, select: wire.Select, part: wire.Part, limit: int, limit_s: float
) -> Job[tuple[list[_Row], int, int]]:
    """Return the first `limit` timers of a partition, unordered, the bound on tickets, and the time
    of the daemon's clock."""
    best: list[_Row] = []
    now_ns = 0
    slot: int | None = 0
    while slot is not None:
        part = part._replace(slot=slot, most=min(limit, _MESSAGE_TIMERS))
        found = yield from _ask_list(connection, part, select, limit_s)
        select, slot = select._replace(tickets=found.tickets), found.slot
        now_ns = found.now_ns
        best += [(info.deadline_ns, info.ticket, info) for info in found.timers]
        if len(best) > 2 * limit:
            best = heapq.nsmallest(limit, best, key=_place)
            deadline_ns, ticket, _ = best[-1]
            part = part._replace(before=(deadline_ns, ticket + 1))
    return best, select.tickets, now_ns


def listed(
    core: Core, limit_s: float, chosen: Chosen, limit: int, cursor: Cursor | None, *,
    payloads: bool,
) -> Job[TimerPage]:  # fmt: skip
    """Return a page of timers. `cursor`: None = the first page."""
    rows: list[_Row] = []
    tickets, now_ns = [], 0
    arenas = yield from _arenas(core, limit_s, chosen)
    start = cursor or Cursor(wire.Part().after, (0,) * len(arenas))
    start.check(len(arenas))
    part = wire.Part(after=start.after, payloads=payloads)
    for (connection, select), before in zip(arenas, start.tickets, strict=True):
        some, bound, now_ns = yield from _first(
            connection, select._replace(tickets=before), part, limit + 1, limit_s
        )
        rows += some
        tickets.append(bound)
    rows = heapq.nsmallest(limit + 1, rows, key=_place)
    page, more = rows[:limit], len(rows) > limit
    behind = Cursor(_place(page[-1]), tuple(tickets)).text() if more else None
    return TimerPage(tuple(timer_info(info) for *_, info in page), behind, now_ns)


# ---- sweeps ------------------------------------------------------------------------------------


def _combined(sweep_id: bytes, found: Sequence[wire.SweepInfo]) -> SweepStatus:
    """Return the status of a sweep from the answers of the partitions that know it."""
    if not found:
        return SweepStatus(sweep_id, SweepState.NONE, 0)
    states = {SweepState(info.state) for info in found}
    order = (SweepState.RUNNING, SweepState.CUT, SweepState.STOPPED, SweepState.DONE)
    first = found[0]
    slots = sum(info.slots for info in found)
    topic, tag = first.select.topic, first.select.tag
    return SweepStatus(
        sweep_id, next(state for state in order if state in states),
        sum(info.done for info in found),
        sum(info.slot for info in found) / slots if slots else 1.0,
        first.uid, SweepChange(first.change), first.select.namespace.decode(errors="replace"),
        first.select.prefix, None if topic is None else topic.decode(errors="replace"),
        None if tag is None else tag.decode(errors="replace"),
    )  # fmt: skip


def asked_all(core: Core, limit_s: float, sweep_id: bytes, action: SweepAction) -> Job[SweepStatus]:
    """Ask all partitions about a sweep, or stop it there."""
    found: list[wire.SweepInfo] = []
    for connection, _ in (yield from _arenas(core, limit_s)):
        found += yield from _ask_sweep(connection, limit_s, sweep_id, action)
    return _combined(sweep_id, found)


def remembered(core: Core, limit_s: float) -> Job[list[SweepStatus]]:
    """Return all sweeps that the daemon remembers, the newest first."""
    found: dict[bytes, list[wire.SweepInfo]] = {}
    for connection, _ in (yield from _arenas(core, limit_s)):
        for info in (
            yield from _ask_sweep(connection, limit_s, bytes(ID_BYTES), SweepAction.STATUS)
        ):
            found.setdefault(info.id, []).append(info)
    order = sorted(found.items(), key=lambda row: row[1][0].begun_ns, reverse=True)
    return [_combined(sweep_id, infos) for sweep_id, infos in order]


def swept(
    core: Core, limit_s: float, chosen: Chosen, change: Change, sweep_id: bytes, *, wait: bool,
    dry_run: bool,
) -> Job[SweepStatus]:  # fmt: skip
    """Begin a sweep in all partitions. With `wait` return once it has ended."""
    if dry_run:
        total = yield from counted(core, limit_s, chosen)
        return SweepStatus(sweep_id, SweepState.NONE, total, change=change.change)
    found: list[wire.SweepInfo] = []
    for connection, select in (yield from _arenas(core, limit_s, chosen)):
        found += yield from _ask_sweep(
            connection, limit_s, sweep_id, SweepAction.BEGIN, select, change
        )
    status = _combined(sweep_id, found)
    return (yield from _ended(core, limit_s, status)) if wait else status


def _ended(core: Core, limit_s: float, status: SweepStatus) -> Job[SweepStatus]:
    """Wait until a sweep has ended. If the daemon has forgotten it, the last status counts."""
    poll_s = _POLL_S
    while status.state is SweepState.RUNNING:
        due_s = core.host.monotonic_s() + poll_s
        while core.host.monotonic_s() < due_s:
            yield due_s
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        before = status
        status = yield from asked_all(core, limit_s, status.id, SweepAction.STATUS)
        if status.state is SweepState.NONE:
            return SweepStatus(before.id, SweepState.CUT, before.done, before.fraction)
    return status

"""Schedules: named objects in the daemon that arm one timer after another."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from purgatoryd.clients import jobs, times
from purgatoryd.clients.arguments import check_choice, check_flag, check_type, check_whole
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import Asked, Core
from purgatoryd.clients.items import check_priority
from purgatoryd.clients.jobs import Job
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import InvalidArgument, InvalidKey, ScheduleRefused
from purgatoryd.shm_layout.layout import (
    NOMINAL_MAX,
    NOMINAL_NONE,
    NOMINAL_UNKNOWN,
    SCHEDULE_KEY_MAX,
    SPEC_MAX,
    ZONE_MAX,
    Overlap,
    ScheduleAction,
    ScheduleState,
    Status,
    WireError,
)
from purgatoryd.shm_layout.wire import ScheduleAnswer, ScheduleAsk, ScheduleInfo

T = TypeVar("T")
One = TypeVar("One", covariant=True)
Found = TypeVar("Found", covariant=True)
Several = TypeVar("Several", covariant=True)
Existed = TypeVar("Existed", covariant=True)
Ticket = TypeVar("Ticket", covariant=True)
Filled = TypeVar("Filled", covariant=True)
Times = TypeVar("Times", covariant=True)
Span = float | timedelta
OverlapRule = Literal["allow", "skip", "queue", "delay"]
EVERY_MIN_NS = 1_000_000
_COUNT_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as the daemon knows it.

    `revision` is 1 after the first put, and rises with each put that changes the schedule.
    `occurrences` counts those that have fired or are armed. Nominal times and deadlines are aware
    UTC datetimes.
    """

    key: str
    namespace: str
    topic: str
    payload: bytes
    tag: str | None
    """Tag of its occurrences; None = they have none."""
    priority: int | None
    """Priority of the jobs of its occurrences; None = that of the topic."""
    every: timedelta | None
    """Time between occurrences; None if the schedule has a cron expression."""
    cron: str | None
    tz: str
    count: int | None
    until: datetime | None
    jitter: timedelta
    overlap: OverlapRule
    revision: int
    occurrences: int
    open_jobs: int
    """Jobs of its occurrences that are neither acknowledged, dropped nor dead."""
    paused: bool
    next: datetime | None
    """Nominal time of the next occurrence. None = no occurrence follows, or the daemon has not
    computed it yet, or the schedule is paused, or its delay has not begun."""
    deadline: datetime | None
    """Deadline of the armed occurrence, with its jitter; None = none is armed."""
    previous: datetime
    """Nominal time of the occurrence before `next`; before the first one, the time of the put."""
    put_at: datetime
    owner_uid: int
    ticket: int
    """Ticket of the armed occurrence; 0 = none is armed."""


class Backfilled(NamedTuple):
    """Result of a backfill."""

    armed: int
    """Number of occurrences that were armed."""
    nominal: list[datetime]
    """Nominal times of all occurrences in the range, including those that had fired before."""


# ---- arguments -------------------------------------------------------------------------------


def _key(key: Any) -> bytes:
    if not isinstance(key, str):
        reason = f"must be str for a schedule, not {type(key).__name__}"
        raise InvalidKey(reason=reason, length=0, limit=SCHEDULE_KEY_MAX)
    data = wire.encode_key(key)[1]
    if len(data) > SCHEDULE_KEY_MAX:
        raise InvalidKey("is too long for a schedule", len(data), SCHEDULE_KEY_MAX)
    return data


def _span_ns(name: str, value: Any, least_ns: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidArgument(f"{name} {value!r} must be a number of seconds or a timedelta")
    if (span_ns := times.seconds_ns(value)) < least_ns:
        raise InvalidArgument(f"{name} {value!r} must be at least {least_ns / 1e9:g} s")
    if span_ns >= 1 << 63:
        raise InvalidArgument(f"{name} {value!r} must be less than 292 years")
    return span_ns


def _spec(every: Any, cron: Any, tz: Any) -> tuple[int, bytes, bytes]:
    """Return (every_ns, bytes of the expression, bytes of the zone's name)."""
    if (every is None) == (cron is None):
        raise InvalidArgument("a schedule needs exactly one of every and cron")
    if every is not None:
        if tz is not None:
            raise InvalidArgument("tz needs cron: every counts elapsed time")
        return _span_ns("every", every, EVERY_MIN_NS), b"", b""
    check_type("cron", cron, str, optional=False)
    zone = "" if tz is None else getattr(tz, "key", tz)
    check_type("tz", zone, str, optional=False)
    from purgatoryd.shm_layout import cron as expressions  # few clients need it

    try:
        expressions.check(cron, "")
    except expressions.BadSpec as error:
        raise InvalidArgument(str(error)) from error
    return 0, _text("cron", cron, SPEC_MAX), _text("tz", zone, ZONE_MAX)


_RULES: tuple[OverlapRule, ...] = get_args(OverlapRule)
"""The names of enum Overlap, in the order of their numbers."""


def _overlap(overlap: Any, every_ns: int) -> Overlap:
    rule = Overlap(_RULES.index(check_choice("overlap", overlap, _RULES)))
    if rule == Overlap.DELAY and every_ns == 0:
        raise InvalidArgument("overlap 'delay' needs every: cron names the times themselves")
    return rule


def _text(name: str, text: str, most: int) -> bytes:
    data = text.encode(errors="surrogatepass")
    if len(data) > most:
        raise InvalidArgument(f"{name} has {len(data)} bytes, allowed are at most {most}")
    return data


def _until_ns(until: datetime | None) -> int:
    return NOMINAL_NONE if until is None else times.wall_ns(until)


# ---- requests --------------------------------------------------------------------------------


class ScheduleQuestion(Asked[ScheduleAnswer]):
    """A SCHEDULE message and its answer."""

    def __init__(self, connection: Connection, ask: ScheduleAsk) -> None:
        self._action = ask.action
        super().__init__(
            lambda number, session: wire.encode_schedule(
                number, session, ask, durable=connection.session.durable
            )
        )

    def outcome(self) -> ScheduleAnswer:
        """Return the answer. Raises DaemonError."""
        reply = self._answer()
        return wire.decode_schedule(reply.body, reply.records, self._action)


def _asked(connection: Connection, ask: ScheduleAsk, limit_s: float) -> Job[ScheduleAnswer]:
    """Send a message once all earlier calls are answered, and return its answer."""

    def queue() -> ScheduleQuestion:
        question = ScheduleQuestion(connection, ask)
        connection.session.ask(question.query)
        return question

    return (yield from jobs.asked(connection, queue, "schedule", limit_s))


_CLOCKS_NS = 1_000_000
"""By less than this, a deadline differs from its nominal time because of the clocks alone."""


def _deadline(info: ScheduleInfo) -> datetime | None:
    """Return the deadline of the armed occurrence. The daemon converts a deadline on the boot clock
    with the current offset of the wall clock, which varies by microseconds."""
    if info.deadline_ns == NOMINAL_NONE:
        return None
    early = 0 < info.next_ns - info.deadline_ns < _CLOCKS_NS
    return times.wall_time(info.next_ns if early else info.deadline_ns)


def _schedule(namespace: str, info: ScheduleInfo) -> Schedule:
    known = info.next_ns not in (NOMINAL_NONE, NOMINAL_UNKNOWN)
    paused = info.state == ScheduleState.PAUSED
    return Schedule(
        info.key, namespace, info.topic, info.payload, info.tag or None, info.priority,
        timedelta(microseconds=info.every_ns / 1000) if info.every_ns else None,
        None if info.every_ns else info.spec, info.zone or "UTC", info.most or None,
        None if info.until_ns == NOMINAL_NONE else times.wall_time(info.until_ns),
        timedelta(microseconds=info.jitter_ns / 1000), _RULES[info.overlap], info.revision,
        info.armed, info.open_jobs, paused,
        times.wall_time(info.next_ns) if known and not paused else None,
        _deadline(info),
        times.wall_time(info.last_ns), times.wall_time(info.put_ns), info.uid, info.ticket,
    )  # fmt: skip


Plan = Callable[[Core, float], tuple[Connection, Job[T]]]
"""A call whose arguments have been checked. It gets the client's core and the seconds to wait, and
returns the connection and the job of the call."""


def _single(key: bytes, ask: dict[str, Any], take: Callable[[str, ScheduleAnswer], T]) -> Plan[T]:
    """Return the plan of a call with one message. `take` gets the namespace and the answer."""

    def plan(core: Core, limit_s: float) -> tuple[Connection, Job[T]]:
        connection = core.at(key)
        message = ScheduleAsk(namespace=core.names.namespace, key=key, **ask)

        def job() -> Job[T]:
            return take(core.namespace, (yield from _asked(connection, message, limit_s)))

        return connection, job()

    return plan


def _unknown() -> ScheduleRefused:
    detail = (int(Status.UNKNOWN), 0)
    return ScheduleRefused(WireError.SCHEDULE, "SCHEDULE", detail, Status.UNKNOWN.name)


def _found(namespace: str, answer: ScheduleAnswer) -> Schedule | None:
    return _schedule(namespace, answer.infos[0]) if answer.infos else None


def _must_exist(namespace: str, answer: ScheduleAnswer) -> Schedule:
    found = _found(namespace, answer)
    if found is None:
        raise _unknown()
    return found


def _ticket(_: str, answer: ScheduleAnswer) -> int:
    if answer.status == Status.UNKNOWN:
        raise _unknown()
    return answer.ticket


def _nominal(_: str, answer: ScheduleAnswer) -> list[datetime]:
    if answer.status == Status.UNKNOWN:
        raise _unknown()
    return [times.wall_time(time_ns) for time_ns in answer.times]


def _existed(_: str, answer: ScheduleAnswer) -> bool:
    return answer.status != Status.UNKNOWN


def _list(core: Core, limit_s: float) -> tuple[Connection, Job[list[Schedule]]]:
    def job() -> Job[list[Schedule]]:
        found: dict[str, Schedule] = {}  # a shard may have several partitions
        for connection in core.connections:
            start = 0
            while start != NOMINAL_NONE:
                ask = ScheduleAsk(ScheduleAction.LIST, core.names.namespace, start=start)
                answer = yield from _asked(connection, ask, limit_s)
                found |= {info.key: _schedule(core.namespace, info) for info in answer.infos}
                start = answer.next
        return [found[key] for key in sorted(found)]

    return core.connections[0], job()


def _backfill(key: str, first_ns: int, last_ns: int, *, repeat: bool) -> Plan[Backfilled]:
    data = _key(key)

    def plan(core: Core, limit_s: float) -> tuple[Connection, Job[Backfilled]]:
        connection = core.at(data)

        def job() -> Job[Backfilled]:
            armed, nominal, start = 0, [], first_ns
            while start != NOMINAL_NONE:
                ask = ScheduleAsk(
                    ScheduleAction.BACKFILL, core.names.namespace, key=data, start=start,
                    until=last_ns, repeat=repeat,
                )  # fmt: skip
                answer = yield from _asked(connection, ask, limit_s)
                nominal += _nominal("", answer)
                armed, start = armed + answer.ticket, answer.next
            return Backfilled(armed, nominal)

        return connection, job()

    return plan


# ---- calls -----------------------------------------------------------------------------------


class ScheduleCalls(ABC, Generic[One, Found, Several, Existed, Ticket, Filled, Times]):
    """The calls about schedules of Client and AsyncClient.

    The type parameters are the return types of the calls. For AsyncClient they are coroutines.
    """

    @abstractmethod
    def _planned(self, plan: Plan[Any], timeout: float | timedelta | None) -> Any:
        """Make a call."""

    def put_schedule(
        self, key: str, *, every: Span | None = None, cron: str | None = None,
        tz: str | tzinfo | None = None, topic: str = "default", payload: bytes = b"",
        count: int | None = None, until: datetime | None = None, jitter: Span = 0,
        overlap: OverlapRule = "allow", tag: str | None = None, priority: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> One:  # fmt: skip
        """Add a schedule, or change it if it exists with other settings; return it as Schedule.

        Each occurrence is a timer of `topic` with `payload`. Its key is `key`, "@" and its nominal
        time in ns since 1970, and `Notice.occurrence` has both parts.

        `every`: seconds or a timedelta, at least 1 ms; the first occurrence is that long after the
        put, and a step of the wall clock changes nothing. `cron`: five fields or a word such as
        "@daily", in the zone `tz`, default UTC. `count`: number of occurrences; `until`: latest
        nominal time. `jitter`: an occurrence is up to this much after its nominal time, and before
        the next nominal time.

        `overlap`: what happens to an occurrence while jobs of earlier occurrences are open, which
        means that a consumer group has neither finished them nor made them dead letters. "allow":
        it fires. "skip": it ends as skipped when it is due. "queue": it fires once no job is open,
        and those after it follow one by one; none is lost. "delay", only with `every`: it is due
        `every` after the last open job ended, or after the last firing without a job.

        `tag`, `priority`: those of the occurrences, as in add().

        With the same settings nothing changes, so every start of a program may put its schedules.
        Other settings raise `revision`, take the armed occurrence back and begin to count again. A
        cron schedule fires no nominal time twice, even if the wall clock was set back.
        Raises InvalidArgument, InvalidName, ScheduleRefused, UidShareExceeded, MessageRefused,
        DaemonError.
        """
        every_ns, spec, zone = _spec(every, cron, tz)
        ask = {
            "action": ScheduleAction.PUT, "topic": wire.encode_topic(topic), "spec": spec,
            "zone": zone, "payload": wire.encode_payload(payload), "every_ns": every_ns,
            "until": _until_ns(until), "jitter_ns": _span_ns("jitter", jitter, 0),
            "most": 0 if count is None else check_whole("count", count, 1, _COUNT_MAX),
            "overlap": _overlap(overlap, every_ns),
            "tag": b"" if tag is None else wire.tag_bytes(tag),
            "priority": check_priority(priority),
        }  # fmt: skip
        return self._planned(_single(_key(key), ask, _must_exist), timeout)  # type: ignore[no-any-return]

    def get_schedule(self, key: str, *, timeout: float | timedelta | None = None) -> Found:
        """Return a schedule, or None if there is none with this key. Raises MessageRefused,
        DaemonError."""
        return self._planned(_single(_key(key), {"action": ScheduleAction.GET}, _found), timeout)  # type: ignore[no-any-return]

    def schedules(self, *, timeout: float | timedelta | None = None) -> Several:
        """Return all schedules of the namespace, in order of their keys. Raises MessageRefused,
        DaemonError."""
        return self._planned(_list, timeout)  # type: ignore[no-any-return]

    def delete_schedule(self, key: str, *, timeout: float | timedelta | None = None) -> Existed:
        """Remove a schedule and its armed occurrence. Return whether it existed. Raises
        MessageRefused, DaemonError."""
        ask = {"action": ScheduleAction.DELETE}
        return self._planned(_single(_key(key), ask, _existed), timeout)  # type: ignore[no-any-return]

    def pause_schedule(self, key: str, *, timeout: float | timedelta | None = None) -> One:
        """Take the armed occurrence back and arm no other; return the schedule.

        Occurrences during the pause do not happen; backfill_schedule() makes up for them. Raises
        ScheduleRefused (UNKNOWN), MessageRefused, DaemonError.
        """
        return self._changed(key, ScheduleAction.PAUSE, timeout)  # type: ignore[no-any-return]

    def resume_schedule(self, key: str, *, timeout: float | timedelta | None = None) -> One:
        """Go on with the first occurrence after the current time; return the schedule. Raises the
        same errors as pause_schedule()."""
        return self._changed(key, ScheduleAction.RESUME, timeout)  # type: ignore[no-any-return]

    def _changed(self, key: str, action: ScheduleAction, timeout: float | timedelta | None) -> Any:
        ask = {"action": action}
        return self._planned(_single(_key(key), ask, _must_exist), timeout)

    def trigger_schedule(
        self, key: str, nominal: datetime | None = None, *, timeout: float | timedelta | None = None
    ) -> Ticket:
        """Fire an additional occurrence at once; return its ticket.

        `nominal`: its nominal time, default the current time. An occurrence that is armed, or whose
        notice is in the replay buffer, is not fired again. The schedule does not count it, and it
        fires whatever `overlap` is. Raises ScheduleRefused (UNKNOWN, FULL, ...), MessageRefused,
        DaemonError.
        """
        start = time.time_ns() if nominal is None else times.wall_ns(nominal)
        ask = {"action": ScheduleAction.TRIGGER, "start": start}
        return self._planned(_single(_key(key), ask, _ticket), timeout)  # type: ignore[no-any-return]

    def backfill_schedule(
        self, key: str, start: datetime, end: datetime, *, repeat: bool = False,
        timeout: float | timedelta | None = None,
    ) -> Filled:  # fmt: skip
        """Fire at once the occurrences with nominal times from `start` to `end` that have not
        fired. Return the times as Backfilled. `end` must not be in the future.

        A backfill fires occurrences from before the put of the schedule, occurrences during a
        pause, and occurrences that `overlap` or a late policy skipped. It leaves out occurrences
        that are armed, that the schedule, a trigger or another backfill has fired, and that a
        client cancelled or moved. The daemon remembers them while the schedule exists, in up to 8
        ranges of times. If there are more ranges, the two closest are joined, and occurrences
        between them count as fired. `repeat`: fire all these occurrences, except armed ones.

        A backfill ignores `overlap`. With overlap "delay" it fires nothing, because such schedules
        have no fixed times. Raises the same errors as trigger_schedule(). If a table is full, the
        occurrences before the error have been armed.
        """
        first_ns, last_ns = times.wall_ns(start), times.wall_ns(end)
        if last_ns < first_ns:
            raise InvalidArgument(f"the end {end} must not be before the start {start}")
        plan = _backfill(key, first_ns, last_ns, repeat=check_flag("repeat", repeat))
        return self._planned(plan, timeout)  # type: ignore[no-any-return]

    def preview_schedule(
        self, key: str | None = None, n: int = 5, *, every: Span | None = None,
        cron: str | None = None, tz: str | tzinfo | None = None, start: datetime | None = None,
        until: datetime | None = None, timeout: float | timedelta | None = None,
    ) -> Times:  # fmt: skip
        """Return the next `n` nominal times, at most 256, as the daemon computes them.

        The times are those of the schedule `key`, or of `every` or `cron` without a schedule.
        `start`: the times are after this, default the current time. With overlap="delay" a schedule
        has one time at most, that of the armed occurrence. Raises InvalidArgument,
        ScheduleRefused, MessageRefused, DaemonError.
        """
        every_ns, spec, zone = (0, b"", b"") if key is not None else _spec(every, cron, tz)
        if key is not None and any(one is not None for one in (every, cron, tz)):
            raise InvalidArgument("a preview has a key, or every or cron, not both")
        ask = {
            "action": ScheduleAction.NEXT, "spec": spec, "zone": zone, "every_ns": every_ns,
            "start": NOMINAL_UNKNOWN if start is None else times.wall_ns(start),
            "until": _until_ns(until), "most": check_whole("n", n, 1, NOMINAL_MAX),
        }  # fmt: skip
        data = b"" if key is None else _key(key)
        return self._planned(_single(data, ask, _nominal), timeout)  # type: ignore[no-any-return]

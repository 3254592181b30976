"""The steps of a script about schedules, and their end."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from purgatoryd.clients import schedules, times
from purgatoryd.clients.schedules import Plan, ScheduleCalls
from purgatoryd.shm_layout.errors import (
    MessageRefused,
    PurgatorydError,
    ScheduleRefused,
)
from world import delivery
from world.cell import Cell
from world.clients import LIMIT_S
from world.jobs import Group
from world.occurrences import Answered, Put, Schedule, Settings
from world.oracle import FOREVER_NS, Violation
from world.script import S

MOST = 20
"""Largest number of occurrences of a backfill."""
SETTLE_S = 150
"""Time in which each schedule fires all occurrences that are due, and one more."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Report = Callable[[Any], None]


class _Planner(ScheduleCalls[Any, Any, Any, Any, Any, Any, Any]):
    """The calls of a client, as plans that the manager of a cell runs."""

    def _planned(self, plan: Plan[Any], timeout: float | timedelta | None) -> Any:
        return plan


CALLS = _Planner()


def _wall_ns(cell: Cell) -> int:
    return cell.wall_ns()


def _answer(one: schedules.Schedule) -> Answered:
    return Answered(
        one.payload, one.revision, one.occurrences, one.paused, times.wall_ns(one.put_at),
        None if one.next is None else times.wall_ns(one.next),
    )  # fmt: skip


def _connection(cell: Cell) -> Any:
    assert cell.manager is not None
    return cell.manager.ends[-1].connection


def _usable(cell: Cell) -> bool:
    return cell.manager is not None and cell.manager.usable


def _ask(cell: Cell, schedule: Schedule, plan: Plan[Any], report: Report) -> None:
    """Let the manager make a call about a schedule. `report` receives the result of a call that
    has found a schedule whose state is known."""
    assert cell.manager is not None
    cuts, connection = cell.schedules.asking(schedule), _connection(cell)

    def answered(result: Any, error: PurgatorydError | None) -> None:
        cell.world.note("schedule", schedule.key, type(error).__name__)
        unknown = isinstance(error, ScheduleRefused) and error.reason == "UNKNOWN"
        if error is not None and not unknown:
            # a message that was sent again may be refused although its first copy was not
            refused = isinstance(error, MessageRefused) and connection is _connection(cell)
            (cell.schedules.denied if refused else cell.schedules.failed)(schedule)
        elif cell.schedules.answered(schedule, cuts):
            if unknown or result is None:
                cell.schedules.missing(schedule)
            else:
                report(result)

    _, job = plan(cell.manager.core, LIMIT_S)
    cell.manager.ask(job, _judged(cell, answered))


def _judged(cell: Cell, report: Callable[..., None]) -> Callable[..., None]:
    """Let a violation in a report end the world."""

    def reported(*arguments: Any) -> None:
        try:
            report(*arguments)
        except Violation as violation:
            cell.violated(violation)

    return reported


def _known(cell: Cell, slot: int) -> Schedule | None:
    """Return the schedule of a slot if it exists, and its state is known."""
    found = cell.schedules.schedules.get(cell.schedule_key(slot))
    known = found is not None and _usable(cell) and found.exists and not found.doubtful
    return found if known else None


# ---- steps -------------------------------------------------------------------------------------


def put_schedule(cell: Cell, slot: int, span_ns: int, **given: Any) -> None:
    """Put a schedule with new settings. If the state of the slot's schedule is in doubt, delete
    it, and give the slot another key. `span_ns`: time until the end of the schedule, or 0."""
    if not _usable(cell):
        return
    found = cell.schedules.schedules.get(cell.schedule_key(slot))
    if found is not None and found.open:
        return
    if found is not None and found.lost:
        delete_schedule(cell, slot)
    until_ns = (_wall_ns(cell) + span_ns) // 1000 * 1000 if span_ns else FOREVER_NS
    key = cell.schedule_key(slot)
    settings = Settings(**given, until_ns=until_ns, base_ns=_wall_ns(cell))
    payload = f"{cell.number}:{cell.world.number()}:".encode()
    put = cell.schedules.putting(key, payload, settings, cell.now_ns())
    cell.oracle.arming_other(key, payload)
    _put(cell, put)


def _put(cell: Cell, put: Put) -> None:
    one, until_ns = put.settings, put.settings.until_ns
    minutes = f"*/{one.minutes} * * * *" if one.minutes > 1 else "* * * * *"
    spec: dict[str, Any] = (
        {"every": timedelta(microseconds=one.every_ns // 1000)}
        if one.every_ns
        else {"cron": one.cron or minutes, "tz": one.zone}
    )
    plan = CALLS.put_schedule(
        put.schedule.key, **spec, topic=one.topic, payload=put.payload, count=one.limit or None,
        until=None if until_ns == FOREVER_NS else EPOCH + timedelta(microseconds=until_ns // 1000),
        jitter=one.jitter_ns / 1e9, overlap=one.overlap,
    )  # fmt: skip

    def report(info: schedules.Schedule) -> None:
        now_ns = cell.now_ns()
        cell.schedules.put_answered(put, _answer(info), now_ns, _wall_ns(cell))

    _ask(cell, put.schedule, plan, report)


def repeat_put(cell: Cell, slot: int) -> None:
    """Put a schedule with the settings that it has."""
    found = _known(cell, slot)
    if found is not None:
        _put(cell, found.puts[-1])


def delete_schedule(cell: Cell, slot: int) -> None:
    """Delete a schedule. The slot's next schedule has another key."""
    found = cell.schedules.schedules.get(cell.schedule_key(slot))
    if found is None or not _usable(cell) or found.open:
        return
    cell.deleted_schedules[slot] += 1
    _delete(cell, found)


def _delete(cell: Cell, found: Schedule) -> None:
    connection = _connection(cell)

    def report(existed: bool) -> None:
        if not existed and connection is _connection(cell):  # the request was not sent again
            cell.schedules.missing(found)
        cell.schedules.deleted(found, cell.now_ns())

    _ask(cell, found, CALLS.delete_schedule(found.key), report)


def pause_schedule(cell: Cell, slot: int, span_ns: int) -> None:
    """Pause a schedule for a while."""
    found = _known(cell, slot)
    if found is None:
        return

    def report(_: Any) -> None:
        cell.schedules.paused(found, cell.now_ns(), _wall_ns(cell))

    _ask(cell, found, CALLS.pause_schedule(found.key), report)
    cell.world.schedule.after(span_ns, partial(_resume_later, cell, slot))


def _resume_later(cell: Cell, slot: int) -> None:
    found = _known(cell, slot)
    if found is not None and not cell.finishing:
        _resume(cell, found)


def _resume(cell: Cell, found: Schedule) -> None:
    def report(info: schedules.Schedule) -> None:
        cell.schedules.resumed(found, cell.now_ns(), _wall_ns(cell))
        cell.schedules.described(found, _answer(info))

    cell.schedules.resuming(found, _wall_ns(cell))
    _ask(cell, found, CALLS.resume_schedule(found.key), report)


def trigger_schedule(cell: Cell, slot: int, again: bool) -> None:
    """Let an additional occurrence fire at once. `again`: repeat the newest trigger."""
    found = _known(cell, slot)
    if found is None:
        return
    put = found.puts[-1]
    nominal_ns = _wall_ns(cell) // 1000 * 1000 + 7000
    if again and put.extras:
        nominal_ns = max(put.extras)
    cell.schedules.triggering(put, nominal_ns)
    cell.oracle.arming_other(found.key, put.payload)

    def report(_: Any) -> None:
        cell.schedules.triggered(put, nominal_ns)

    moment = EPOCH + timedelta(microseconds=nominal_ns // 1000)
    _ask(cell, found, CALLS.trigger_schedule(found.key, moment), report)


def backfill_schedule(cell: Cell, slot: int, back_ns: int, span_ns: int) -> None:
    """Fire the occurrences of a range again that begins `back_ns` ago. A schedule that waits for
    jobs is left out: it may still fire the occurrences of the range itself. Jobs have only the key
    of their occurrence, so a world with consumer groups repeats none."""
    found = _known(cell, slot)
    if found is None or found.puts[-1].settings.overlap in ("queue", "delay"):
        return
    if cell.world.script.setting.groups:
        return
    put, step_ns = found.puts[-1], found.puts[-1].settings.step_ns
    if put.settings.every_ns and not put.fired:
        return  # an answer has its times in microseconds only
    end_ns = _wall_ns(cell) // 1000 * 1000
    begin_ns = max(end_ns - back_ns, end_ns - MOST * step_ns) // 1000 * 1000
    end_ns = min(end_ns, begin_ns + span_ns // 1000 * 1000)
    expected = cell.schedules.backfilling(put, begin_ns, end_ns)
    for _ in expected:
        cell.oracle.arming_other(found.key, put.payload)

    def report(answer: schedules.Backfilled) -> None:
        nominal = [times.wall_ns(one) for one in answer.nominal]
        cell.schedules.backfilled(put, expected, nominal, answer.armed)

    moments = [EPOCH + timedelta(microseconds=one // 1000) for one in (begin_ns, end_ns)]
    _ask(cell, found, CALLS.backfill_schedule(found.key, *moments), report)


def describe_schedule(cell: Cell, slot: int) -> None:
    """Query a schedule, and judge the answer."""
    found = _known(cell, slot)
    if found is not None:
        _describe(cell, found, lambda _: None)


def _describe(cell: Cell, found: Schedule, report: Callable[[Answered], None]) -> None:
    def described(info: schedules.Schedule) -> None:
        cell.schedules.described(found, _answer(info))
        report(_answer(info))

    _ask(cell, found, CALLS.get_schedule(found.key), described)


# ---- the end -----------------------------------------------------------------------------------


def finish(cell: Cell) -> None:
    """Judge the schedules at the end: each one that exists fires all occurrences that are due, and
    the next one. Then delete all schedules."""
    if cell.manager is None:
        return
    cell.world.until(lambda: _usable(cell), "the manager has a session")
    for found in cell.schedules.schedules.values():
        if found.exists and not found.doubtful:
            _resume(cell, found)
    cell.world.pass_time(S)
    for found in cell.schedules.schedules.values():
        if found.exists and not found.doubtful:
            _until_ended(cell, found)
    cell.world.until(partial(_deleted, cell, []), "all schedules are deleted")


def _until_ended(cell: Cell, found: Schedule) -> None:
    """Wait until a schedule whose state is known has fired an occurrence after the present time, or
    has ended."""
    put, ended = found.puts[-1], [False]
    target_ns = cell.schedules.target_ns(put)

    def report(info: Answered) -> None:
        ended[0] = cell.schedules.ended(put, info, target_ns)

    if put.settings.cron and cell.schedules.is_far(target_ns):
        return
    behind_s = cell.schedules.behind_ns(_wall_ns(cell)) // S
    for _ in range(SETTLE_S + behind_s):
        if found.doubtful or ended[0]:
            return
        _describe(cell, found, report)
        if cell.virtual:
            cell.advance_far(cell.now_ns() + S)
        cell.world.pass_time(S)
    if any(_is_full(cell, group) for group in delivery.living(cell) if _has_topic(group, put)):
        return
    raise Violation(f"{put}: {target_ns} never fired, the last one was {put.last_ns}")


def _has_topic(group: Group, put: Put) -> bool:
    return put.settings.topic in group.settings.topics


def _is_full(cell: Cell, group: Group) -> bool:
    """Return whether the budget of a group refuses new timers."""
    info = delivery.described(cell, group)
    used = info.pending + info.waiting + info.leased + info.delayed + info.dead
    return bool(used >= group.settings.max_backlog)


def _deleted(cell: Cell, counts: list[int]) -> bool:
    """Delete all schedules of the namespace. `counts` receives their number each time."""
    assert cell.manager is not None

    def report(found: Any, _: PurgatorydError | None) -> None:
        for one in found or ():
            _delete(cell, cell.schedules.schedules[one.key])
        counts.append(-1 if found is None else len(found))

    if not counts or counts[-1]:
        cell.manager.ask(CALLS.schedules()(cell.manager.core, LIMIT_S)[1], report)
        cell.world.pass_time(S)
    return counts[-1:] == [0]


STEPS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        put_schedule, repeat_put, delete_schedule, pause_schedule, trigger_schedule,
        backfill_schedule, describe_schedule,
    )
}  # fmt: skip

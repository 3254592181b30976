"""The steps of a script about consumer groups, and their end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from purgatoryd.clients import groups
from purgatoryd.shm_layout.errors import GroupMissing, PurgatorydError
from purgatoryd.shm_layout.layout import DeadAction, GroupAction, Op
from world.cell import Cell
from world.clients import LIMIT_S
from world.jobs import Group, Settings
from world.network import Disturbance
from world.oracle import Violation
from world.script import MS, S

DRAIN_S = 60
"""Time in which healthy consumers handle all jobs."""
JOIN_NS = 100 * S
"""Time in which a consumer joins its group."""
TRY_NS = 5 * S
"""Time from a process that could not join its group to the next one."""
Report = Callable[[Any, PurgatorydError | None], None]


def _ask(cell: Cell, job: groups.GroupJob[Any], report: Report = lambda *_: None) -> bool:
    """Let the manager ask the daemon about a group. Return False if the manager has no session."""
    one = cell.manager
    if one is None or not one.usable:
        return False
    one.ask(job(one.core, LIMIT_S), report)
    return True


# ---- groups ------------------------------------------------------------------------------------


def create_group(
    cell: Cell, slot: int, start: str, backoff_ns: int, rate: int, **given: Any
) -> None:  # fmt: skip
    """Create a group. A group of a slot that may be lost is created again with the settings that it
    had."""
    if cell.manager is None or not cell.manager.usable:
        return
    name = cell.group_name(slot)
    asked = Settings(**{**given, "topics": tuple(given["topics"])})
    group = cell.jobs.creating(name, asked)
    cell.group_options.setdefault(name, _options(group.settings, backoff_ns, rate))
    job = groups.create_job(name, group.settings.topics, start, cell.group_options[name])
    cuts = group.cuts

    def report(_: Any, error: PurgatorydError | None) -> None:
        cell.world.note("create", name, type(error).__name__)
        if error is None:
            cell.jobs.created(group, cell.world.schedule.now_ns, cuts)

    _ask(cell, job, report)


def _options(one: Settings, backoff_ns: int, rate: int) -> dict[str, Any]:
    """Return the arguments that create a group with these settings."""
    return {
        "max_backlog": one.max_backlog, "max_bytes": 0, "max_lease": one.max_lease_ns / 1e9,
        "max_attempts": one.max_attempts, "max_dead": one.max_dead,
        "retention": one.retention_ns / 1e9, "ordered": one.ordered,
        "on_dead": "block" if one.ordered and one.blocks else "skip",
        "full": "drop_oldest" if one.drops else "refuse", "rate": rate,
        "backoff": backoff_ns / 1e9, "backoff_cap": 0.2,
    }  # fmt: skip


def delete_group(cell: Cell, slot: int) -> None:
    """Delete a group with its jobs. The slot's next group has another name."""
    group = cell.jobs.groups.get(cell.group_name(slot))
    if group is None or cell.manager is None or not cell.manager.usable:
        return
    cell.jobs.retiring(group)
    cell.deleted_groups[slot] += 1
    _ask(cell, groups.action_job(GroupAction.DELETE, group.name))


def pause_group(cell: Cell, slot: int, span_ns: int) -> None:
    """Pause a group for a while."""
    group = cell.jobs.groups.get(cell.group_name(slot))
    if group is None:
        return
    number = cell.jobs.pausing(group)

    def report(_: Any, error: PurgatorydError | None) -> None:
        if error is None:
            cell.jobs.paused(group, number, cell.world.schedule.now_ns)

    _ask(cell, groups.action_job(GroupAction.PAUSE, group.name), report)
    cell.world.schedule.after(span_ns, partial(_resume, cell, group))


def _resume(cell: Cell, group: Group) -> None:
    cell.jobs.pausing(group)
    _ask(cell, groups.action_job(GroupAction.RESUME, group.name))


def change_group(cell: Cell, slot: int, backoff_ns: int) -> None:
    """Change the backoff of a group."""
    _ask(cell, groups.change_job(cell.group_name(slot), {"backoff": backoff_ns / 1e9}))


def describe_group(cell: Cell, slot: int) -> None:
    """Query a group, and judge its counts."""
    group = cell.jobs.groups.get(cell.group_name(slot))
    if group is None:
        return
    confirmed, cuts = group.acked, group.cuts

    def report(info: Any, _: PurgatorydError | None) -> None:
        if info is not None and group.cuts == cuts:
            _judge_counts(cell, group, info, confirmed)

    _ask(cell, groups.describe_job(group.name), report)


def _judge_counts(cell: Cell, group: Group, info: Any, confirmed: int) -> None:
    sizes = (info.pending, info.waiting, info.leased, info.delayed, info.dead)
    cell.jobs.counts(group.name, info.acked, sizes, confirmed)


def dead_letters(cell: Cell, slot: int, requeue: bool) -> None:
    """Requeue or drop the dead letters of a group."""
    group = cell.jobs.groups.get(cell.group_name(slot))
    if group is None or cell.manager is None or not cell.manager.usable:
        return
    cell.jobs.changing_dead(group, requeue=requeue)
    action = DeadAction.REQUEUE if requeue else DeadAction.DROP
    _ask(cell, groups.dead_job(action, group.name, None))


# ---- consumers ---------------------------------------------------------------------------------


def consume(cell: Cell, consumer: int, slot: int, lease_ns: int, credits: int) -> None:
    """Start a consumer, unless one runs in its place."""
    group = cell.jobs.groups.get(cell.group_name(slot))
    one = cell.consumers[consumer]
    if group is None or (one is not None and one.works and not one.group.retired):
        return
    cell.end_consumer(consumer)
    cell.begin_consumer(consumer, group, lease_ns, credits)


def stale_answer(cell: Cell, consumer: int, of: int, number: int, op: str, span_ns: int) -> None:
    """Let a consumer answer a lease that it or another consumer has, or had."""
    one, other = cell.consumers[consumer], cell.consumers[of]
    if one is None or other is None or not one.usable or not one.works or not other.seen:
        return
    identity, lease = other.seen[number % len(other.seen)]
    one.stale_answer(identity, lease, Op[f"JOB_{op.upper()}"], span_ns)


def kill_consumer(cell: Cell, consumer: int, span_ns: int) -> None:
    """Kill a consumer. Its next process starts later."""
    one = cell.consumers[consumer]
    if one is not None and one.alive:
        cell.world.faults["client"] += 1
        cell.end_consumer(consumer)
        again = partial(_begin_again, cell, consumer, one.group, one.lease_ns, one.credits)
        cell.world.schedule.after(span_ns, again)


def _begin_again(cell: Cell, consumer: int, group: Group, lease_ns: int, credits: int) -> None:
    one = cell.consumers[consumer]
    if (one is None or not one.alive) and not cell.finishing:
        cell.begin_consumer(consumer, group, lease_ns, credits)


def freeze_consumer(cell: Cell, consumer: int, span_ns: int) -> None:
    """Stop a consumer for a while, perhaps for longer than its leases last."""
    one = cell.consumers[consumer]
    if one is not None and one.alive:
        cell.world.faults["client"] += 1
        one.freeze()
        cell.world.schedule.after(span_ns, one.thaw)


def close_consumer(cell: Cell, consumer: int) -> None:
    """Let a consumer end as on SIGTERM."""
    one = cell.consumers[consumer]
    if one is not None and one.usable and one.works:
        cell.world.faults["stop"] += 1
        one.close()


def break_consumer(cell: Cell, consumer: int) -> None:
    """Break the connection of a consumer."""
    one = cell.consumers[consumer]
    for end in one.ends if one is not None else ():
        cell.world.faults["message"] += 1
        cell.world.network.break_connection(end)


def disturb_consumer(cell: Cell, consumer: int, kind: str, frames: int, delay_ns: int) -> None:
    """Disturb the next frames of a consumer's connection."""
    one = cell.consumers[consumer]
    for end in one.ends if one is not None else ():
        end.disturbances.append(Disturbance(kind, frames, delay_ns))


# ---- the end -----------------------------------------------------------------------------------


def _until_asked(cell: Cell, job: groups.GroupJob[Any], subject: str) -> Any:
    """Ask the manager's daemon until an answer comes. Return None if the group is missing."""
    found: list[Any] = []

    def again() -> None:
        if found:
            return
        asked = _ask(cell, job, report)
        if not asked:
            cell.world.schedule.after(100 * MS, again)

    def report(result: Any, error: PurgatorydError | None) -> None:
        if error is None or isinstance(error, GroupMissing):
            found.append(result)
        else:
            cell.world.schedule.after(100 * MS, again)

    again()
    cell.world.until(lambda: found, subject)
    return found[0]


def heal(cell: Cell) -> None:
    """Delete the groups that no slot has, resume the others, and start a consumer for each."""
    for number in range(len(cell.consumers)):
        cell.end_consumer(number)
    if cell.manager is None:
        return
    cell.begin_manager()
    for group in cell.jobs.groups.values():
        if group.retired:
            job: Any = groups.action_job(GroupAction.DELETE, group.name)
            _until_asked(cell, job, f"{group.name} is deleted")
    found = living(cell)
    for group in found:
        cell.jobs.pausing(group)
        _until_asked(cell, groups.action_job(GroupAction.RESUME, group.name), "resumed")
        _until_asked(cell, groups.change_job(group.name, {"rate": 0}), "changed")
    _employ(cell, found)


def _employ(cell: Cell, found: list[Group]) -> None:
    """Let each group have a consumer that has joined it."""
    for number, group in enumerate(found):
        tries: list[object] = []
        if not cell.world.comes_true(partial(_employed, cell, number, group, tries), JOIN_NS):
            raise Violation(f"no consumer joins {group}: {tries}")


def _employed(cell: Cell, number: int, group: Group, tries: list[object]) -> bool:
    """Return whether the consumer `number` has joined a group. Start another process if it does not
    work. `tries` receives the errors of the processes that do not."""
    one = cell.consumers[number]
    if one is not None and one.works and one.group is group:
        return one.joined
    if one is not None and one.group is group:
        tries.append(one.failed or one.leases.error)
        cell.world.pass_time(TRY_NS)
    cell.end_consumer(number)
    cell.begin_consumer(number, group, S, 8)
    return False


def described(cell: Cell, group: Group) -> Any:
    """Return the daemon's description of a group. None: the group is missing."""
    return _until_asked(cell, groups.describe_job(group.name), f"{group.name} is described")


def living(cell: Cell) -> list[Group]:
    """Return the groups that exist. A group that surely exists must not be missing."""
    found = []
    for group in cell.jobs.groups.values():
        info = described(cell, group)
        cell.jobs.exists(group, info is not None)
        if info is not None:
            found.append(group)
    return found


def finish(cell: Cell) -> None:
    """Judge the groups at the end: let consumers handle all jobs, requeue all dead letters, and
    delete the groups."""
    if cell.manager is None:
        return
    found = living(cell)
    _employ(cell, found)
    for group in found:
        drained = _drain(cell, group)
        for letter in _letters(cell, group):
            cell.judge_letter(group, letter)
        if drained:
            cell.jobs.finish(group.name, described(cell, group).dropped)
        cell.jobs.changing_dead(group, requeue=True)
        _until_asked(cell, groups.dead_job(DeadAction.REQUEUE, group.name, None), "requeued")
        if not _drain(cell, group):
            raise Violation(f"no dead letter of {group} blocks its jobs, but they still wait")
        if not drained:
            cell.jobs.finish(group.name, described(cell, group).dropped)
        _until_asked(cell, groups.action_job(GroupAction.DELETE, group.name), "deleted")
        cell.jobs.retiring(group)
    cell.close_consumers()


def _drain(cell: Cell, group: Group) -> bool:
    """Wait until consumers have handled all jobs of a group. Return False if jobs still wait, which
    dead letters may block."""
    for _ in range(DRAIN_S):
        confirmed = group.acked
        info = described(cell, group)
        _judge_counts(cell, group, info, confirmed)
        if not (info.pending or info.waiting or info.leased or info.delayed):
            return True
        cell.world.pass_time(S)
    blocks = group.settings.ordered and group.settings.blocks and info.dead
    if not blocks or info.pending or info.leased or info.delayed:
        raise Violation(f"not all jobs of {group} were handled: {info}")
    return False


def _letters(cell: Cell, group: Group) -> list[Any]:
    letters: list[Any] = []
    after = 0
    while True:

        def job(core: Any, limit_s: float, after: int = after) -> Any:
            return groups.dead_page(core, group.name, 0, after, limit_s)

        page = _until_asked(cell, job, "dead letters")
        letters += page.letters
        after = page.after
        if not after:
            return letters


STEPS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        create_group, delete_group, pause_group, change_group, describe_group, dead_letters,
        consume, stale_answer, kill_consumer, freeze_consumer, close_consumer, break_consumer,
        disturb_consumer,
    )
}  # fmt: skip

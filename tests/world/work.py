"""The steps of a script that clients and operators execute, each on one cell."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any

from purgatoryd.clients import times
from purgatoryd.clients.bulk_loads import BulkLoad
from purgatoryd.clients.conditions import AllOf, AnyOf, Quorum, SumOf, When
from purgatoryd.clients.purgatory import Watch
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import (
    CallTimeout,
    InvalidTime,
    PurgatorydError,
)
from purgatoryd.shm_layout.layout import (
    TIME_MAX_NS,
    BulkLoadAction,
    ClockKind,
    Message,
    Op,
    Status,
    WireError,
)
from world.cell import ANYBODY, NAMESPACE, Cell
from world.clients import HASTY_S
from world.options import LateKind, Policy, Possible
from world.oracle import ARMED, FOREVER_NS, IN_DOUBT, Call, Operation, Timer, Violation
from world.script import CLIENTS, KEYS, MS, NAMESPACE_SCOPE, RESUMER, WATCH_KEYS, S
from world.strangers import ADMIN_UID, UNKNOWN_UID, Stranger

WADE_OPERATIONS, WADE_ADVANCES, WADE_NEED = 60, 81, 10**7
CROWD, PADDING = 25, "-" * 235
"""Number of operations of each client, and a text that makes their keys long."""
OVERFULL, CANCELS = 80, 4
"""A number of operations that exceeds the space of an inbox, and the number of these operations to
cancel."""
FAR = 10**9
"""A watermark that is never reached."""
LATE_TOPIC = "b"
"""The topic that has a late policy. It has no rows of bulk loads."""
PARK_BEYOND_NS = 60 * S
SETTLE_NS = 5 * S
"""Time after which a subscriber has noticed missing notices."""


def free(cell: Cell, client: int, key: object) -> str | None:
    """Return the name of a client's key; None if the key has an unanswered call, or the client
    cannot make calls."""
    name = f"k{client}.{key}"
    usable = cell.clients[client].usable and not cell.oracle.key(name).calls
    return name if usable else None


def _payload(cell: Cell, size: int) -> bytes:
    """Return a payload that no other add has."""
    return f"{cell.number}:{cell.world.number()}:".encode() + bytes(size)


def _call(
    cell: Cell, client: int, kind: str, name: str, delay_ns: int, topic: str, size: int
) -> Call:
    """Create an add, and record it in the oracle."""
    deadline_ns = 0 if cell.virtual else cell.now_ns() + delay_ns
    timer = Timer(name, topic, _payload(cell, size), deadline_ns, delay_ns)
    timer.asked_ns, timer.unique_ns = cell.now_ns(), cell.options(name).unique_ns or 0
    return cell.oracle.issue(Call(kind, name, cell.durable(client), timer))


# ---- timers ------------------------------------------------------------------------------------


def add(
    cell: Cell, client: int, key: int, mode: str, delay_ns: int, topic: str, size: int, wait: bool,
    wall: bool,
) -> None:  # fmt: skip
    """Add a timer. `wall`: if possible, give it a deadline on the wall clock."""
    name = free(cell, client, key)
    if name is None:
        return
    call = _call(cell, client, mode, name, delay_ns, topic, size)
    timer = call.timer
    assert timer is not None
    arguments: dict[str, Any] = {"delay_ns": delay_ns}
    if wall and not cell.virtual and mode in ("error", "replace"):
        wall_ns = cell.world.machine.wall_ns(cell.world.schedule.now_ns) + delay_ns
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=wall_ns // 1000)
        arguments = {"deadline": moment}
        timer.wall_ns = wall_ns // 1000 * 1000
    cell.clients[client].add(
        name, partial(cell.answered, call), topic=topic, payload=timer.payload, mode=mode,
        wait=wait, **arguments,
    )  # fmt: skip


def add_at(cell: Cell, client: int, key: int, by_ns: int, delay_ns: int) -> None:
    """Add a timer at a later virtual time, and a second timer at the same time or later."""
    core = cell.clients[client].core

    for number in range(2):
        if (name := free(cell, client, (key + number) % KEYS)) is not None:
            core.set_time(core.check_time(cell.now_ns() + by_ns))
            call = _call(cell, client, "replace", name, delay_ns, "a", 8)
            assert call.timer is not None
            cell.clients[client].add(
                name, partial(cell.answered, call), topic="a", payload=call.timer.payload,
                mode="replace", wait=True, delay_ns=delay_ns,
            )  # fmt: skip
            core.set_time(core.check_time(None))


def rush(cell: Cell, client: int, key: int, calls: int, delay_ns: int, size: int) -> None:
    """Replace a timer several times, and perhaps cancel it, without waiting for an answer: the last
    call decides. Later calls are small, so that they may find space even if the first call finds
    none."""
    name = free(cell, client, key)
    if name is None:
        return
    for number in range(calls):
        bytes_ = size if number == 0 else 8
        call = _call(cell, client, "replace", name, delay_ns // (number + 1), "a", bytes_)
        assert call.timer is not None
        cell.clients[client].add(
            name, partial(cell.answered, call), topic="a", payload=call.timer.payload,
            mode="replace", wait=True, delay_ns=call.timer.delay_ns,
        )  # fmt: skip
    if calls % 2:
        call = cell.oracle.issue(Call("cancel", name, cell.durable(client)))
        cell.clients[client].cancel(name, 0, partial(cell.answered, call))


def cancel(cell: Cell, client: int, key: int, by_ticket: bool) -> None:
    """Cancel the timer of a key."""
    name = free(cell, client, key)
    if name is None:
        return
    armed = cell.oracle.key(name).armed
    ticket = armed[0].ticket if by_ticket and armed else 0
    call = Call("cancel", name, cell.durable(client), ticket=ticket)
    cell.oracle.issue(call)
    cell.clients[client].cancel(name, ticket, partial(cell.answered, call))


def get(cell: Cell, client: int, key: int) -> None:
    """Query a key."""
    if (name := free(cell, client, key)) is not None:
        cell.ask(client, name)


def add_many(
    cell: Cell, client: int, keys: list[Any], mode: str, delay_ns: int, topic: str, size: int = 8,
    wait: bool = True,
) -> None:  # fmt: skip
    """Add many timers in one call, which may end before the answers have arrived."""
    names = [name for key in keys if (name := free(cell, client, key))]
    if not names:
        return
    calls = [_call(cell, client, mode, name, delay_ns, topic, size) for name in names]
    rows = [
        (call.key, delay_ns / 1e9, topic, call.timer.payload)
        for call in calls
        if call.timer is not None
    ]
    report = partial(_all_answered, cell, calls)
    cell.clients[client].add_many(rows, topic, mode, None, report, wait=wait)


def burst(cell: Cell, client: int, count: int, rows: int) -> None:
    """Fill the WAL buffer with large timers while the disk is slow, and add rows of a bulk load
    after them."""
    keys = [f"burst{number}" for number in range(count)]
    add_many(cell, client, keys, "replace", 50 * MS, "a", 50_000)
    if rows:
        bulk_load(cell, client, 0, 0, rows, 0, 50 * MS)


def cancel_many(cell: Cell, client: int, keys: list[int]) -> None:
    """Cancel many timers in one call."""
    names = [name for key in keys if (name := free(cell, client, key))]
    if not names:
        return
    durable = cell.durable(client)
    calls = [cell.oracle.issue(Call("cancel", n, durable)) for n in names]
    cell.clients[client].cancel_many(names, partial(_all_answered, cell, calls))


def _all_answered(cell: Cell, calls: list[Call], result: Any) -> None:
    rows = zip(calls, result.statuses, result.tickets, result.deadlines_boot_ns, strict=True)
    for call, status, ticket, deadline_boot_ns in rows:
        known = IN_DOUBT if status == Status.NONE else int(status)
        cell.judge(call, known, ticket, deadline_boot_ns)


def flush(cell: Cell, client: int, raises: bool) -> None:
    """Wait for the answers to all calls. Without `raises` the next flush raises the refusals."""
    if cell.clients[client].usable:
        cell.clients[client].flush(raises=raises)


def add_far(cell: Cell, client: int, key: int) -> None:
    """Add a timer with a deadline that no real clock reaches.

    The client refuses the timer if it knows the daemon's time; otherwise the daemon refuses it. A
    call that has to wait for a time of a real clock is refused as well.
    """
    name = free(cell, client, key)
    if name is None or cell.virtual:
        return
    _check_time(cell, client)
    add = partial(
        cell.clients[client].add, name, topic="a", payload=b"", mode="replace", wait=True,
        delay_ns=TIME_MAX_NS,
    )  # fmt: skip
    if cell.clients[client].connection.delay_clock == ClockKind.VIRTUAL:
        call = _call(cell, client, "replace", name, 0, "a", 0)
        assert call.timer is not None
        call.timer.delay_ns = TIME_MAX_NS
        add(report=lambda pending: _refused(cell, call, pending))
        return
    try:
        add(report=lambda _: None)
    except InvalidTime:
        return
    raise Violation("a timer with a deadline beyond TIME_MAX_NS was not refused")


def _check_time(cell: Cell, client: int) -> None:
    with suppress(InvalidTime):
        cell.clients[client].core.check_time(cell.now_ns())
        raise Violation("a call that waits for a time of a real clock was not refused")


def _refused(cell: Cell, call: Call, pending: Any) -> None:
    if pending.error is None and pending.status in ARMED:
        raise Violation("a timer with a deadline beyond TIME_MAX_NS was armed")
    cell.answered(call, pending)


# ---- operations --------------------------------------------------------------------------------


def watch(
    cell: Cell, client: int, kind: str, targets: dict[int, int], need: int, timeout_ns: int,
    topic: str | None, ahead: bool,
) -> None:  # fmt: skip
    """Arm an operation. `ahead`: its targets are above the present watermarks."""
    one = cell.clients[client]
    if not one.usable:
        return
    now = {key: cell.oracle.watch_key(f"w{key}").possible if ahead else 0 for key in targets}
    named = {f"w{key}": now[key] + target for key, target in targets.items()}
    need += sum(now.values()) if kind == "sum" else 0
    key = f"o{client}.{cell.world.number()}"
    deadline_ns = 0 if cell.virtual else cell.now_ns() + timeout_ns
    operation = Operation(key, kind, named, need, deadline_ns, awaits_notice=topic is not None)
    conditions: dict[str, Callable[[], Any]] = {
        "all": lambda: AllOf(named),
        "any": lambda: AnyOf(named),
        "sum": lambda: SumOf(dict.fromkeys(named, 0), need),
        "quorum": lambda: Quorum(named, need),
        "client": lambda: When(lambda: cell.oracle.lets_hold(operation), list(named)),
    }
    cell.oracle.watching(operation)

    report = partial(_armed, cell, operation)
    real = one.watch(key, conditions[kind](), timeout_ns / 1e9, topic, report)
    real.add_done_callback(partial(cell.operation_ended, operation))
    cell.operations[client].append((operation, real))


def _armed(cell: Cell, operation: Operation, pending: Any) -> None:
    """Judge the answer to a watch."""
    word = int(pending.word)
    cell.world.note("watch", operation.key, word)
    _judge_status(cell, "watch", pending, operation)
    if pending.error is None and word & 0xFF == Status.ADDED:
        operation.ticket, operation.armed = word >> 8, cell.oracle.moment()
        operation.deadline_ns = int(pending.deadline_ns) + cell.begun_ns


def _judge_status(cell: Cell, kind: str, pending: Any, subject: object) -> None:
    """Judge the status of an answered call."""
    if pending.error is None and (status := int(pending.word) & 0xFF):
        cell.oracle.judge_status(kind, status, subject)


def _trigger(
    cell: Cell, client: int, op: Op, key: int, value: int,
    done: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    def report(pending: Any) -> None:
        word = int(pending.word)
        cell.world.note(op, key, value, word)
        _judge_status(cell, op.name, pending, f"w{key}")
        if pending.error is None and word & 0xFF == Status.DONE:
            done()

    if cell.clients[client].usable:
        cell.clients[client].trigger(op, f"w{key}", value, report)


def watch_many(
    cell: Cell, client: int, targets: dict[int, int], need: int, count: int, timeout_ns: int,
    padding: str = "",
) -> None:  # fmt: skip
    """Arm many operations on the sum of the same watch keys. `padding`: text to insert into the
    operation keys."""
    one = cell.clients[client]
    if not one.usable:
        return
    named = {f"w{key}": target for key, target in targets.items()}
    deadline_ns = 0 if cell.virtual else cell.now_ns() + timeout_ns
    operations = [
        Operation(f"o{client}{padding}.{cell.world.number()}", "sum", named, need + n, deadline_ns)
        for n in range(count)
    ]
    for operation in operations:
        cell.oracle.watching(operation)
    rows = [
        Watch(one.key, SumOf(dict.fromkeys(named, 0), one.need), timeout_ns / 1e9)
        for one in operations
    ]
    real = one.watch_many(rows, lambda number, pending: _armed(cell, operations[number], pending))
    for operation, found in zip(operations, real, strict=True):
        found.add_done_callback(partial(cell.operation_ended, operation))
        cell.operations[client].append((operation, found))


def advance_many(cell: Cell, client: int, keys: list[int], count: int) -> None:
    """Raise several watermarks by one, many times, in one call."""
    if cell.clients[client].usable:
        names = [f"w{keys[n % len(keys)]}" for n in range(count)]
        _advance_rows(cell, client, [(name, 1) for name in names])


def _sent_ns(cell: Cell) -> int:
    """Return the time by which a trigger has been sent: now, or FOREVER_NS if it may wait for
    earlier answers."""
    return FOREVER_NS if cell.world.script.setting.short_queue else cell.now_ns()


def _advance_rows(cell: Cell, client: int, steps: list[tuple[str, int]]) -> None:
    """Raise watermarks, in order. `steps`: (watch key, amount)."""
    rows: list[tuple[str, int]] = []
    issued: list[int] = []
    for name, by in steps:
        watermark = cell.oracle.watch_key(name).possible + by
        issued.append(cell.oracle.advancing(name, watermark))
        rows.append((name, watermark))
    durable, sent_ns = cell.durable(client), _sent_ns(cell)

    def report(number: int, pending: Any) -> None:
        word = int(pending.word)
        cell.world.note(*rows[number], word)
        _judge_status(cell, "ADVANCE_KEY", pending, rows[number])
        if pending.error is None and word & 0xFF == Status.DONE:
            cell.oracle.advanced(
                *rows[number], issued[number], sent_ns, cell.now_ns(), durable=durable
            )

    cell.clients[client].advance_many(rows, report)


def advance(cell: Cell, client: int, key: int, by: int) -> None:
    """Raise a watermark."""
    name = f"w{key}"
    watermark = cell.oracle.watch_key(name).possible + by
    issued, sent_ns = cell.oracle.advancing(name, watermark), _sent_ns(cell)

    def done() -> None:
        durable = cell.durable(client)
        cell.oracle.advanced(name, watermark, issued, sent_ns, cell.now_ns(), durable=durable)

    _trigger(cell, client, Op.ADVANCE_KEY, key, watermark, done)


def bump(cell: Cell, client: int, key: int, by: int) -> None:
    """Add an amount to a watermark."""
    cell.oracle.watch_key(f"w{key}").bumps += by
    _trigger(cell, client, Op.BUMP, key, by)


def fail(cell: Cell, client: int, key: int) -> None:
    """Fail a watch key."""
    cell.oracle.watch_key(f"w{key}").may_fail = True
    _trigger(cell, client, Op.FAIL, key, 7)


def clear(cell: Cell, client: int, key: int) -> None:
    """Clear the failure of a watch key."""
    _trigger(cell, client, Op.CLEAR, key, 0)


def forget(cell: Cell, client: int, key: int) -> None:
    """Forget a watch key and its watermark."""
    if cell.clients[client].usable:
        forgotten = cell.oracle.forgetting(f"w{key}")
        _trigger(cell, client, Op.FORGET, key, 0, forgotten)


def cancel_for_key(cell: Cell, client: int, key: int) -> None:
    """Cancel all operations that watch a key."""
    if cell.clients[client].usable:
        end = cell.oracle.cancelling(f"w{key}")
        _trigger(cell, client, Op.CANCEL_FOR_KEY, key, 0, end)


def let_hold(cell: Cell, client: int, key: int) -> None:
    """Let the client's own conditions on a key be true from now on, and notify the client."""
    cell.oracle.watch_key(f"w{key}").may_hold = True
    bump(cell, client, key, 1)


def _own(cell: Cell, client: int, number: int) -> tuple[Operation, Any] | None:
    mine = [found for found in cell.operations[client] if found[0].ticket]
    return mine[number % len(mine)] if mine and cell.clients[client].usable else None


def end_operation(cell: Cell, client: int, number: int) -> None:
    """Cancel an operation."""
    if (found := _own(cell, client, number)) is not None:
        operation, real = found
        operation.cancelled = True
        if not real.done:
            cell.clients[client].end(real)


def extend_operation(cell: Cell, client: int, number: int, span_ns: int) -> None:
    """Move the deadline of an operation."""
    if (found := _own(cell, client, number)) is not None:
        operation, real = found
        if not real.done:
            operation.moved = True
            cell.clients[client].extend(real, span_ns / 1e9)


def look(cell: Cell, client: int, number: int) -> None:
    """Query the outcome of an operation without waiting, and request a callback for its end."""
    found = _own(cell, client, number)
    if found is None:
        return
    operation, real = found
    called: list[object] = []
    real.add_done_callback(called.append)
    if bool(called) != real.done:
        raise Violation(f"{operation}: ended, but the callback was not called")
    try:
        real.result(0)
    except CallTimeout:
        if real.done:
            raise Violation(f"{operation}: ended, but has no outcome") from None
    except PurgatorydError:
        pass


def wade(cell: Cell, client: int, key: int, timeout_ns: int) -> None:
    """Arm many operations on the sum of all keys, and raise one key many times in one batch.

    Each raise exceeds a sixth of the missing amount, so the daemon checks all operations each time,
    and continues in the next iteration. A second batch waits while the first one is handled.
    """
    if not cell.clients[client].usable:
        return
    total = sum(cell.oracle.watch_key(f"w{n}").possible for n in range(WATCH_KEYS))
    watch_many(
        cell, client, dict.fromkeys(range(WATCH_KEYS), 0), total + WADE_NEED, WADE_OPERATIONS,
        timeout_ns,
    )  # fmt: skip
    left = [int(WADE_NEED * 0.82**n) for n in range(WADE_ADVANCES)]
    steps = [(f"w{key}", more - less) for more, less in pairwise(left)]
    for some in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
        cell.clients[client].connection.packer.seal()  # each part in a message of its own
        _advance_rows(cell, client, some)


def overfill(cell: Cell, client: int, key: int) -> None:
    """Arm more operations than the inbox of a session has space for, and cancel some soon after.

    A call that the daemon refuses at every attempt ends with a timeout. The other operations
    expire.
    """
    one = cell.clients[client]
    if not one.usable or cell.virtual:
        return
    usual_s, one.limit_s = one.limit_s, HASTY_S
    need = FAR + cell.oracle.watch_key(f"w{key}").possible
    watch_many(cell, client, {key: 0}, need, OVERFULL, 2 * S)
    last = [operation for operation, _ in cell.operations[client][-CANCELS:]]
    for operation in last:
        operation.cancelled = True
    one.connection.packer.seal()
    one.cancel_many([operation.key for operation in last], lambda _: None)
    one.limit_s = usual_s


def cancel_crowd(cell: Cell, key: int) -> None:
    """Arm many operations with long keys, and cancel all of them by one watch key: the keys do not
    fit into one answer."""
    need = FAR + cell.oracle.watch_key(f"w{key}").possible
    for client in range(CLIENTS):
        watch_many(cell, client, {key: 0}, need, CROWD, 600 * S, PADDING)
    cell.world.schedule.after(20 * MS, partial(cancel_for_key, cell, CLIENTS - 1, key))


def late_check(cell: Cell, client: int, key: int, span_ns: int) -> None:
    """Let the daemon ask a frozen client for its own condition. The client's operation expires
    before the client continues."""
    watch(cell, client, "client", {key: 1}, 1, 10 * MS, None, ahead=True)
    cell.world.schedule.after(5 * MS, cell.clients[client].freeze)
    cell.world.schedule.after(6 * MS, partial(let_hold, cell, (client + 1) % CLIENTS, key))
    cell.world.schedule.after(12 * MS + span_ns, cell.clients[client].thaw)


def succeed(cell: Cell, key: int) -> None:
    """Kill a client that owns an operation with a client condition. The daemon asks the client's
    next process for that condition while the new process waits for the answer to its first
    watch."""
    watch(cell, RESUMER, "client", {key: 1}, 1, 600 * S, None, ahead=True)

    def again() -> None:
        if cell.clients[RESUMER].alive:
            cell.end_client(RESUMER)
            cell.begin_client(RESUMER)
        cell.world.schedule.after(MS, first_watch)

    def first_watch() -> None:
        watch(cell, RESUMER, "all", {key: 5}, 1, S, None, ahead=True)
        bump(cell, RESUMER + 1, key, 1)

    cell.world.schedule.after(20 * MS, again)


# ---- bulk loads --------------------------------------------------------------------------------


def _id(number: int) -> bytes:
    return bytes([number + 1]) * 16


def bulk_load(
    cell: Cell, client: int, number: int, first: int, count: int, token: int, delay_ns: int
) -> None:
    """Add rows of a bulk load. The daemon must add each row only once."""
    one = cell.clients[client]
    if not one.usable:
        return
    numbers = range(first, first + count)
    rows = [(f"r{number}.{row}", delay_ns / 1e9, "a", _payload(cell, 8)) for row in numbers]
    issued = cell.oracle.moment()
    for name, _, _, payload in rows:
        cell.oracle.adding_row(number, name, payload, token)

    def report(result: Any) -> None:
        for (_, _, _, payload), status in zip(rows, result.statuses, strict=True):
            cell.world.note("row", payload, int(status))
            if status != Status.NONE:
                cell.oracle.judge_row(payload, token, int(status))
            if status in (Status.ADDED, Status.PARKED):
                cell.oracle.added_row(payload, issued, durable=cell.durable(client))

    one.add_many(rows, "a", "error", BulkLoad(_id(number), first, token), report)


def manage_bulk_load(
    cell: Cell, client: int, number: int, token: int, action: str, **_: object
) -> None:
    """Open, close or forget a bulk load, or query its progress."""
    if cell.clients[client].usable:
        answered = cell.oracle.managing_bulk_load(number, token, action)
        cell.clients[client].bulk_load(_id(number), BulkLoadAction[action.upper()], token, answered)


# ---- the operator ------------------------------------------------------------------------------


def publish(cell: Cell, topic: str) -> None:
    """Publish a notice without a timer."""
    payload, issued = _payload(cell, 4), cell.oracle.moment()
    cell.oracle.publishing(payload)

    def report(reply: wire.Reply) -> None:
        if reply.error == WireError.NONE and _is_done(reply):
            cell.oracle.was_published(payload, issued)

    cell.operator.ask(
        lambda n: wire.encode_publish(n, NAMESPACE.encode(), topic.encode(), "p", payload), report
    )


def settle(cell: Cell) -> None:
    """Leave subscribers undisturbed for a while. Check that they have received all notices that
    were sent."""
    for subscriber in cell.subscribers:
        subscriber.thaw()
        for end in subscriber.ends:
            end.disturbances.clear()
    steady = cell.steadiness()
    cell.world.pass_time(SETTLE_NS)
    sent = len(cell.oracle.sent)
    cell.world.pass_time(100 * MS)
    if cell.daemon.alive and steady == cell.steadiness() and sent == len(cell.oracle.sent):
        for one in cell.deliveries:
            one.finish()


def ping(cell: Cell) -> None:
    """Ask the daemon whether its loop runs."""
    cell.operator.ask(lambda n: wire.encode_frame(Message.PING, 0, n))


def list_sessions(cell: Cell) -> None:
    """List the sessions."""
    cell.operator.ask(lambda n: wire.encode_frame(Message.SESSIONS, 0, n))


def stranger(cell: Cell, kind: str, uid: int, admin: bool) -> None:
    """Send a message that the daemon has to refuse."""
    if uid != UNKNOWN_UID and kind == "hello" and not admin:
        return
    if uid == ADMIN_UID and kind in ("stop", "drop"):
        return
    if uid != ADMIN_UID or kind != "advance" or cell.now_ns() > 0:  # a clock at 0 cannot go back
        Stranger(cell, kind, uid, admin=admin, session=cell.clients[0].session_id)


def quota(cell: Cell, timers: int, ops: int, owner: int) -> None:
    """Set the quotas and the owner of the namespace, and the delay beyond which timers are
    parked."""
    changes = {"quota_timers": timers, "quota_ops": ops}
    if timers or ops:
        cell.oracle.causes.add(Status.QUOTA)
    if cell.world.script.setting.uids:
        changes["owner_uid"] = owner
        if owner != ANYBODY:
            cell.oracle.causes.add(Status.DENIED)
    if cell.world.script.setting.parks:
        changes["park_beyond_ns"] = PARK_BEYOND_NS
    cell.operator.ask(lambda n: wire.encode_namespace_set(n, NAMESPACE.encode(), changes))


def set_topic(cell: Cell, topic: str, priority: int) -> None:
    """Set the priority of a topic."""
    changes = wire.TopicChanges(priority=priority)
    _set_topic(cell, topic, changes, cell.jobs.priorities[topic], priority)


def _set_topic(
    cell: Cell, topic: str, changes: wire.TopicChanges, possible: Possible[Any], value: object
) -> None:
    possible.changing(value)

    def report(reply: wire.Reply) -> None:
        cell.world.note("topic", topic, reply.error)
        if reply.error == WireError.NONE and _is_done(reply):
            possible.changed(value, cell.world.schedule.now_ns)

    cell.operator.ask(
        lambda n: wire.encode_topic_set(n, NAMESPACE.encode(), topic.encode(), changes), report
    )


def set_late(cell: Cell, kind: LateKind, grace_ns: int) -> None:
    """Set the late policy of LATE_TOPIC."""
    policy = Policy(kind, grace_ns)
    changes = wire.TopicChanges(late=times.late_policy(policy.argument))
    _set_topic(cell, LATE_TOPIC, changes, cell.late.policies[LATE_TOPIC], policy)


def set_pace(cell: Cell, late_per_s: int) -> None:
    """Set how many late timers the namespace may fire in a second."""
    cell.late.pace.changing(late_per_s)

    def report(reply: wire.Reply) -> None:
        if reply.error == WireError.NONE:
            cell.late.pace.changed(late_per_s, cell.world.schedule.now_ns)

    changes = {"late_per_s": late_per_s}
    cell.operator.ask(lambda n: wire.encode_namespace_set(n, NAMESPACE.encode(), changes), report)


def pause_topic(cell: Cell, topic: str, span_ns: int) -> None:
    """Let the timers of a topic, or of all topics, fall due without firing for a while."""
    _pause(cell, topic, paused=True)
    cell.world.schedule.after(span_ns, partial(_resume_later, cell, topic))


def _resume_later(cell: Cell, topic: str) -> None:
    if not cell.finishing:
        _pause(cell, topic, paused=False)


def _pause(
    cell: Cell, topic: str, *, paused: bool, done: Callable[[], object] = lambda: None
) -> None:  # fmt: skip
    """Pause or resume a topic, or the namespace. `done` runs when the daemon has confirmed it."""
    cell.late.pausing(topic, paused=paused, now_ns=_handled_ns(cell))

    def report(reply: wire.Reply) -> None:
        cell.world.note("pause", topic, reply.error)
        namespace = topic == NAMESPACE_SCOPE  # the reply has settings, no status
        if reply.error == WireError.NONE and (namespace or _is_done(reply)):
            cell.late.pauses[topic].changed(paused, cell.world.schedule.now_ns)
            done()

    if topic == NAMESPACE_SCOPE:
        given = {"paused": int(paused)}
        cell.operator.ask(lambda n: wire.encode_namespace_set(n, NAMESPACE.encode(), given), report)
    else:
        changes = wire.TopicChanges(paused=paused)
        cell.operator.ask(
            lambda n: wire.encode_topic_set(n, NAMESPACE.encode(), topic.encode(), changes), report
        )


def _handled_ns(cell: Cell) -> int:
    """Return the time until which the daemon has surely handled all due timers; 0: unknown."""
    setting = cell.world.script.setting
    if not cell.daemon.alive or setting.heavy or "iteration" in setting.small_limits:
        return 0
    now_ns: int = cell.world.seam.run(None, lambda: int(cell._arena.header.now_ns))
    return now_ns + cell.begun_ns


def _is_done(reply: wire.Reply) -> bool:
    ((word, _),) = wire.decode_results(reply.body[: wire.RESULT.size])
    return word & 0xFF == Status.DONE


def resume_topics(cell: Cell) -> None:
    """Ask the daemon to resume all topics and the namespace, until it has confirmed each."""
    paused = set(cell.late.pauses) if cell.world.script.setting.pauses else set()

    def again() -> None:
        for topic in sorted(paused):
            _pause(cell, topic, paused=False, done=partial(paused.discard, topic))
        if paused:
            cell.world.schedule.after(500 * MS, again)

    again()
    cell.world.until(lambda: not paused, "all topics are resumed")


def move_clock(cell: Cell, by_ns: int) -> None:
    """Move the virtual clock."""
    to_ns = cell.now_ns() + by_ns
    cell.operator.ask(lambda n: wire.encode_frame(Message.ADVANCE, 0, n, at_ns=to_ns))


STEPS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        add, add_at, rush, cancel, get, add_many, burst, cancel_many, flush, watch, watch_many,
        advance, advance_many, bump, fail, clear, forget, cancel_for_key, let_hold, end_operation,
        extend_operation, bulk_load, manage_bulk_load, publish, settle, ping, list_sessions,
        stranger, quota, set_topic, set_late, set_pace, pause_topic, move_clock, add_far, look,
        wade, cancel_crowd, overfill, late_check, succeed,
    )
}  # fmt: skip

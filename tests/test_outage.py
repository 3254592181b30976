"""Outages of the daemon: triggers that were sent in time are applied before operations expire,
timers fire at once, and no expiry is delayed beyond the grace period."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import purgatory_driver as pd
import pytest
from purgatory_driver import Owner
from raw_owner import DELAY_NS, RawUnbuffered, put
from raw_owner import trigger as record
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, stats
from tiers import wide

from purgatoryd.clients import AllOf, Client, Operation, Purgatory, SessionExpired, connection
from purgatoryd.daemon.commands import Commands
from purgatoryd.daemon.grace import GRACE_NS, LATE_NS, LONG_NS, LONG_OUTAGES_MAX, Grace
from purgatoryd.daemon.listeners.ring_server import RingServer
from purgatoryd.daemon.listeners.transport import REQUEST_HWM, Request
from purgatoryd.daemon.reaper import Reaper
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.arena import NONE_NS
from purgatoryd.shm_layout.layout import Cause, Op, Status
from purgatoryd.shm_layout.wire import RESEND_MAX_NS

pytestmark = pytest.mark.tier("all")

OPERATIONS = 50
TIMEOUT_S = 4.0
MS = 1_000_000
ROWS = range(1024)
advance = partial(record, Op.ADVANCE_KEY, value=1)


# ---- real daemons ----------------------------------------------------------------------------


def frozen(real: Daemon) -> Callable[[], None]:
    os.kill(real.pid, signal.SIGSTOP)
    return lambda: os.kill(real.pid, signal.SIGCONT)


def killed(real: Daemon) -> Callable[[], None]:
    real.kill()
    return real.start


def stopped(real: Daemon) -> Callable[[], None]:
    real.stop()
    return real.start


def rebuilt(real: Daemon) -> Callable[[], None]:
    """Kill the daemon and remove its arena, as a reboot does; return the method that starts it."""
    real.kill()
    for path in (real.paths.arena, real.paths.private):
        Path(f"/dev/shm{path}").unlink()
    return real.start


def trigger(sender: Purgatory, key: str) -> None:
    """Send a trigger. If its session is lost, send it again; the client does not do this itself."""
    try:
        sender.advance(key, 1)
    except SessionExpired:
        sender.advance(key, 1)


@pytest.mark.tier("test")
@pytest.mark.parametrize("outage", [wide(frozen), killed, wide(stopped), wide(rebuilt)])
def test_operations_completed_in_time_do_not_expire(
    outage: Callable[[Daemon], Callable[[], None]], daemon: StartDaemon, daemon_dir: Path
) -> None:
    """All triggers are sent during the outage, before the deadlines. The deadlines pass before the
    outage ends."""
    wal = ("--wal-dir", str(daemon_dir / "wal")) if outage is rebuilt else ()
    real = daemon("demo", *wal)
    durable = outage is rebuilt
    with (
        Purgatory("demo", durable=durable) as owner,
        Purgatory("demo", timeout=PATIENCE_S) as other,
        Client("demo", durable=durable) as client,
    ):
        keys = [f"k{n}" for n in range(OPERATIONS)]
        client.add("timer", delay=TIMEOUT_S)
        found = owner.watch_many([(key, AllOf({key: 1}), TIMEOUT_S) for key in keys])
        lost = owner.watch("nobody", AllOf({"nobody": 1}), timeout=TIMEOUT_S)
        operations = [op for op in found if isinstance(op, Operation)]
        end_outage = outage(real)
        senders = [threading.Thread(target=trigger, args=(other, key)) for key in keys]
        for sender in senders:
            sender.start()
        time.sleep(TIMEOUT_S + 0.3)  # all deadlines pass
        end_outage()
        for sender in senders:
            sender.join(PATIENCE_S)
        eventually(lambda: stats(real)["operations"] == 0)
        assert (stats(real)["satisfied"], stats(real)["expired"]) == (OPERATIONS, 1)
        assert stats(real)["expiries"] == 1  # only the timer has fired
        if outage is not rebuilt:  # a reboot loses the sessions
            assert {op.result(PATIENCE_S).cause for op in operations} == {"satisfied"}
            assert lost.result(PATIENCE_S).cause == "expired"


def test_a_flood_of_triggers_delays_no_expiry_for_ever(daemon: StartDaemon) -> None:
    real = daemon("demo")
    over = threading.Event()

    def flood() -> None:
        with Purgatory("demo") as sender:
            while not over.is_set():
                sender.bump("others")

    with Purgatory("demo") as owner:
        operation = owner.watch("op", AllOf({"k": 1}), timeout=0.5)
        senders = [threading.Thread(target=flood) for _ in range(4)]
        go_on = frozen(real)
        for sender in senders:
            sender.start()
        time.sleep(0.6)
        go_on()
        try:
            assert operation.result(PATIENCE_S).cause == "expired"
            assert not over.is_set()
        finally:
            over.set()
            for sender in senders:
                sender.join(PATIENCE_S)


def lose_all(client: Purgatory, patch: pytest.MonkeyPatch) -> None:
    """Lose all messages of `client`: its socket accepts them, but they never arrive."""
    channel = client._core.connections[0].channel
    assert channel is not None
    patch.setattr(channel, "send", lambda frame: True)


def test_a_trigger_that_an_outage_lost_counts_when_it_is_sent_again(daemon: StartDaemon) -> None:
    """The client's pause before it sends again has its maximum length, which is longer than the
    outage."""
    real = daemon("demo")
    with Purgatory("demo") as owner, Purgatory("demo", timeout=PATIENCE_S) as other:
        other.advance("seen", 1)
        time.sleep(GRACE_NS / 1e9)  # the grace period after the start ends
        operation = owner.watch("op", AllOf({"k": 1}), timeout=0.8)
        go_on = frozen(real)
        other._core.connections[0]._resend_s = connection.RESEND_MAX_S
        with pytest.MonkeyPatch.context() as patch:
            lose_all(other, patch)
            sender = threading.Thread(target=trigger, args=(other, "k"))
            begun_s = time.monotonic()
            sender.start()
            time.sleep(0.9)  # the deadline of the operation passes
            assert other._core.connections[0].session.in_doubt()
        go_on()
        sender.join(PATIENCE_S)
        assert time.monotonic() - begun_s > 1.9
        assert operation.result(PATIENCE_S).cause == "satisfied"


def test_messages_waiting_at_a_wakeup_are_applied_before_operations_expire(
    daemon: StartDaemon,
) -> None:
    """The daemon needs more time for the waiting messages than the outage took. Each trigger is
    behind three batches of its session, and libzmq takes messages of the sessions in turn. All
    messages are in the kernel before the outage ends."""
    real = daemon("demo", "--capacity", "500000")
    with ExitStack() as stack:
        peers = [stack.enter_context(RawUnbuffered(real)) for _ in range(80)]
        frames = [
            (
                peer,
                peer.encode_batch(*(put(b"%d.%d.%d" % (n, i, k), DELAY_NS) for k in range(1024))),
            )
            for i in range(3)
            for n, peer in enumerate(peers)
        ]
        frames += [(peer, peer.encode_batch(advance(b"k%d" % n))) for n, peer in enumerate(peers)]
        owner = stack.enter_context(Purgatory("demo", namespace="broker"))
        time.sleep(GRACE_NS / 1e9)  # the grace period after the start ends
        operations = owner.watch_many(
            [(f"op{n}", AllOf({f"k{n}": 1}), 1.0) for n in range(len(peers))]
        )
        armed_s = time.monotonic()
        time.sleep(0.1)
        go_on = frozen(real)
        stack.callback(go_on)  # a failed test leaves no daemon that stands still
        for peer, frame in frames:
            peer.send(frame)
        time.sleep(max(0.0, armed_s + 1.035 - time.monotonic()))
        go_on()
        causes = [operation.result(PATIENCE_S).cause for operation in operations]
        assert causes == ["satisfied"] * len(peers)


def test_an_outage_during_the_grace_of_another_expires_nothing(daemon: StartDaemon) -> None:
    """The operation `nobody` waits for the end of the first grace period, which comes during the
    second outage. Each trigger has its own thread, because a message that still waits inside the
    client does not count as sent."""
    real = daemon("demo")
    with Purgatory("demo") as owner, Purgatory("demo", timeout=PATIENCE_S) as other:
        keys = [f"k{n}" for n in range(5)]
        owner.watch("nobody", AllOf({"nobody": 1}), timeout=0.1)
        found = owner.watch_many([(key, AllOf({key: 1}), TIMEOUT_S) for key in keys])
        begun_s = time.monotonic()
        go_on = frozen(real)
        time.sleep(1)
        go_on()
        other.advance("seen", 1)  # the answer shows that the first grace period has begun
        go_on = frozen(real)
        senders = [threading.Thread(target=trigger, args=(other, key)) for key in keys]
        for sender in senders:
            sender.start()
        time.sleep(0.2)
        assert time.monotonic() - begun_s < TIMEOUT_S, "the triggers were not sent in time"
        time.sleep(TIMEOUT_S)
        go_on()
        for sender in senders:
            sender.join(PATIENCE_S)
        causes = {op.result(PATIENCE_S).cause for op in found if isinstance(op, Operation)}
        assert causes == {"satisfied"}


# ---- when operations may expire --------------------------------------------------------------


def test_the_grace_is_longer_than_any_pause_of_a_client() -> None:
    assert GRACE_NS > RESEND_MAX_NS == connection.RESEND_MAX_S * 1e9


class Asked:
    """Stand-in for an arena and for the clients' messages. It stores the calls that it receives."""

    def __init__(self) -> None:
        self.accepts = self.caught = True
        self.calls: list[tuple[int, ...] | str] = []

    def hold_operations(self, after_ns: int, upto_ns: int, *, again: bool) -> bool:
        if self.accepts or again:
            self.calls.append((after_ns, upto_ns))
        return self.accepts

    def release_operations(self) -> None:
        self.calls.append("release")

    def note_wakeup(self) -> None:
        """Do nothing: the tests set `caught` themselves."""

    def caught_up(self) -> bool:
        return self.caught


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def grace(asked: Asked) -> Grace:
    """The Grace of a daemon that started at 1000 s. The grace period after the start is over."""
    made = Grace(as_arena(asked), asked)
    made.begin_iteration(1000 * 1000 * MS)
    assert made.ends_ns == 1000 * 1000 * MS + GRACE_NS
    made.sleep(made.ends_ns)
    made.begin_iteration(made.ends_ns)
    assert asked.calls == [(-1, 1000 * 1000 * MS), "release"]
    assert made.ends_ns == NONE_NS
    asked.calls.clear()
    return made


def as_arena(asked: Asked) -> Any:
    return asked


def test_an_iteration_in_time_delays_nothing(grace: Grace, asked: Asked) -> None:
    now_ns = 2000 * 1000 * MS
    grace.sleep(now_ns)
    grace.begin_iteration(now_ns + LATE_NS - 1)
    grace.sleep(now_ns + 100 * MS)
    grace.begin_iteration(now_ns + 50 * MS)  # earlier than planned: a message woke the loop
    assert asked.calls == []


@pytest.mark.parametrize(
    ("late_ns", "wait_ns"),
    [(LONG_NS - 1, LONG_NS - 1), (LONG_NS, GRACE_NS), (3_600_000 * MS, GRACE_NS)],
)
def test_a_late_iteration_delays_for_its_lateness_and_an_outage_for_the_longest_pause(
    late_ns: int, wait_ns: int, grace: Grace, asked: Asked
) -> None:
    served_ns = 1000 * 1000 * MS + GRACE_NS
    grace.sleep(served_ns + 70 * MS)
    now_ns = served_ns + 70 * MS + late_ns
    grace.begin_iteration(now_ns)
    assert asked.calls == [(served_ns, now_ns)]
    assert grace.ends_ns == now_ns + wait_ns
    grace.sleep(grace.ends_ns)
    grace.begin_iteration(grace.ends_ns)
    assert asked.calls == [(served_ns, now_ns), "release"]


@pytest.mark.parametrize("catches_up", [True, False])
def test_a_delay_lasts_until_the_messages_that_waited_are_applied(
    *, catches_up: bool, grace: Grace, asked: Asked
) -> None:
    began_ns = 2000 * 1000 * MS
    asked.caught = False
    grace.sleep(began_ns - 20 * MS)
    grace.begin_iteration(began_ns)
    now_ns = grace.ends_ns
    assert now_ns == began_ns + 20 * MS
    while grace.ends_ns != NONE_NS:
        now_ns = grace.ends_ns
        asked.caught = catches_up and now_ns >= began_ns + 200 * MS
        grace.sleep(now_ns)
        grace.begin_iteration(now_ns)
    assert now_ns == began_ns + (200 * MS if catches_up else GRACE_NS)
    assert asked.calls[1:] == ["release"]


class Peers:
    """Stand-in for the connections of a socket. Connection 8 has unread bytes."""

    def __init__(self) -> None:
        self.connected = {7, 8}
        self.waiting = {8}

    def unread(self, fds: set[int]) -> set[int]:
        return fds & self.waiting


def test_messages_have_waited_until_libzmq_and_the_loop_have_taken_them() -> None:
    peers = Peers()
    commands: Any = object.__new__(Commands)
    commands._peers, commands._waiting_bytes = peers, 0
    commands.note_wakeup()
    assert not commands.caught_up()
    peers.waiting.clear()
    assert not commands.caught_up()
    for route in (b"a", b"b"):
        commands._count_taken(route)
    assert not commands.caught_up()
    for _ in range(REQUEST_HWM):
        commands._count_taken(b"a")
    assert commands._taken_of is None
    commands._waiting_bytes = 5
    assert not commands.caught_up()
    commands._waiting_bytes = 0
    assert commands.caught_up()
    commands._dropped = True
    assert not commands.caught_up()
    commands.note_wakeup()
    assert not commands.caught_up()


@pytest.mark.tier("check")
def test_messages_behind_a_deferred_one_wait_in_their_order() -> None:
    messages = [Request(b"a", b"%d" % number, 0, 0, 0, 0, 7) for number in range(4)]
    applied: list[bytes] = []
    commands: Any = object.__new__(Commands)

    def apply(message: Request) -> bool:
        applied.append(message.body)
        if applied.count(b"1") == 1 and message.body == b"1":
            commands._deferred = message
        return True

    commands._apply, commands._had_its_share = apply, lambda uid: False
    commands._deferred, commands._unfinished, commands._waiting_bytes = None, deque(), 0
    commands._behind, commands._rings = {b"a": deque()}, RingServer(0)
    for message in messages[1:]:
        commands._wait_behind(message)
    commands._go_on(messages[0])
    assert applied == [b"0", b"1"]
    assert [*commands._behind[b"a"]] == messages[2:]
    commands.arrived()
    assert applied == [b"0", b"1", b"1", b"2", b"3"]
    assert (commands._behind, [*commands._unfinished], commands._waiting_bytes) == ({}, [], 0)


def test_an_outage_during_a_grace_makes_it_longer_only_if_nobody_waits(
    grace: Grace, asked: Asked
) -> None:
    now_ns = 2000 * 1000 * MS
    grace.begin_iteration(now_ns)
    assert grace.ends_ns == now_ns + GRACE_NS
    grace.begin_iteration(now_ns + 1000 * MS)
    assert grace.ends_ns == now_ns + 1000 * MS + GRACE_NS
    grace.sleep(now_ns + 3400 * MS)
    grace.begin_iteration(now_ns + 3460 * MS)
    assert grace.ends_ns == now_ns + 3520 * MS
    asked.accepts = False
    grace.sleep(now_ns + 3450 * MS)
    grace.begin_iteration(now_ns + 3510 * MS)
    assert grace.ends_ns == now_ns + 3520 * MS
    grace.sleep(grace.ends_ns)
    grace.begin_iteration(now_ns + 3520 * MS)
    assert grace.ends_ns == NONE_NS


def test_no_new_grace_begins_before_all_have_expired(grace: Grace, asked: Asked) -> None:
    """Each iteration is late while operations still have to expire. If each iteration began a new
    grace period, no operation would ever expire."""
    asked.accepts = False
    now_ns = 3000 * 1000 * MS
    grace.sleep(now_ns)
    for late in range(1, 1000):
        grace.begin_iteration(now_ns + late * (LONG_NS - 1))
        assert grace.ends_ns == NONE_NS


def test_long_outages_prolong_the_delay_a_bounded_number_of_times(
    grace: Grace, asked: Asked
) -> None:
    now_ns = 3000 * 1000 * MS
    grace.begin_iteration(now_ns)
    asked.accepts = False
    for outage in range(1, LONG_OUTAGES_MAX + 1):
        # the previous grace period has passed during this outage
        at_ns = now_ns + outage * 5000 * MS
        grace.begin_iteration(at_ns)
        assert grace.ends_ns == at_ns + GRACE_NS
    assert "release" not in asked.calls
    grace.begin_iteration(now_ns + 100_000 * MS)
    assert asked.calls[-1] == "release"
    assert grace.ends_ns == NONE_NS


def test_a_loop_that_waits_for_the_wal_sleeps_though_the_grace_is_over() -> None:
    reaper: Any = object.__new__(Reaper)
    reaper.wal = SimpleNamespace(full=True, fds=[])
    reaper._grace = SimpleNamespace(ends_ns=0)
    assert reaper.sleeps_until(NONE_NS - 1) == NONE_NS - 1


# ---- the core --------------------------------------------------------------------------------

ALL = lib.PG_C_ALL
COUNT = 20


@pytest.fixture
def late() -> Iterator[tuple[pd.Purgatory, Owner]]:
    """Yield (core, owner): an operation comes due every 10 ms, and a timer at 60 ms."""
    made = pd.Purgatory(replay_capacity=64)
    owner = Owner(made)
    owner.send(
        *(
            pd.watch(b"op%d" % n, ALL, [pd.Key(b"k%d" % n, 1)], (n + 1) * 10 * MS, notice=True)
            for n in range(COUNT)
        )
    )
    owner.send(pd.put(b"timer", 60 * MS))
    yield made, owner
    made.check()


def ended(made: pd.Purgatory) -> list[tuple[bytes, int]]:
    """Return (key, cause) of each operation's notice, in order."""
    return [(one.key, one.cause) for one in made.verdicts(0)]


def test_operations_wait_and_timers_do_not(late: tuple[pd.Purgatory, Owner]) -> None:
    made, owner = late
    made.advance(15 * MS)
    assert lib.pg_hold_operations(made.a, 15 * MS, 400 * MS, 0)
    assert not made.advance(400 * MS)  # held operations do not count as due
    assert made.next_ns > 400 * MS
    assert (made.metrics.expired, made.metrics.expiries) == (1, 1)
    made.check()
    owner.send(*(pd.advance(b"k%d" % n, 1) for n in range(1, COUNT, 2)))
    made.check()
    lib.pg_release_operations(made.a)
    assert made.next_ns <= 400 * MS
    assert not made.advance(401 * MS)
    causes = dict(ended(made))
    assert [causes[b"op%d" % n] for n in range(COUNT)] == [
        Cause.SATISFIED if n % 2 else Cause.EXPIRED for n in range(COUNT)
    ]


@pytest.mark.parametrize("budget", [1, 7])
def test_operations_are_released_a_budget_at_a_time(
    late: tuple[pd.Purgatory, Owner], budget: int
) -> None:
    made, _ = late
    assert lib.pg_hold_operations(made.a, -1, 400 * MS, 0)
    while made.advance(400 * MS, budget=budget):
        made.check()
    assert made.metrics.expired == 0
    lib.pg_release_operations(made.a)
    assert made.advance(400 * MS, budget=budget)
    assert not lib.pg_hold_operations(
        made.a, 400 * MS, 500 * MS, 0
    )  # refused until all released operations have ended
    assert made.metrics.expired > 0
    left = COUNT - made.metrics.expired
    # with again=1, as after a long outage, the remaining operations are held again
    assert not lib.pg_hold_operations(made.a, 400 * MS, 500 * MS, 1)
    assert not made.advance(400 * MS, budget=budget)
    assert COUNT - made.metrics.expired == left
    lib.pg_release_operations(made.a)
    while made.advance(400 * MS, budget=budget):
        made.check()
    assert sorted(key for key, _ in ended(made)) == sorted(b"op%d" % n for n in range(COUNT))
    assert lib.pg_hold_operations(made.a, 400 * MS, 500 * MS, 0)


def test_a_second_outage_before_the_release_covers_operations_armed_since(
    late: tuple[pd.Purgatory, Owner],
) -> None:
    made, owner = late
    assert lib.pg_hold_operations(made.a, -1, 5 * MS, 0)
    made.advance(6 * MS)
    owner.send(pd.watch(b"since", ALL, [pd.Key(b"none", 1)], 10 * MS, notice=True))
    assert lib.pg_hold_operations(made.a, 6 * MS, 30 * MS, 0)  # returns 1: no operation waits yet
    made.advance(30 * MS)
    assert made.metrics.expired == 0
    assert not lib.pg_hold_operations(made.a, 30 * MS, 40 * MS, 0)  # returns 0: operations wait
    lib.pg_release_operations(made.a)
    made.advance(30 * MS)
    assert sorted(key for key, _ in ended(made)) == [b"op0", b"op1", b"op2", b"since"]


def test_operations_outside_the_outage_expire_in_time(
    late: tuple[pd.Purgatory, Owner],
) -> None:
    made, owner = late
    assert lib.pg_hold_operations(made.a, 15 * MS, 400 * MS, 0)
    made.advance(400 * MS)
    assert made.metrics.expired == 1  # op0, which was due before the outage
    owner.send(pd.watch(b"after", ALL, [pd.Key(b"none", 1)], 10 * MS, notice=True))
    owner.send(pd.watch(b"before", ALL, [pd.Key(b"none", 1)], 0, notice=True))
    made.advance(420 * MS)
    assert [key for key, _ in ended(made)] == [b"op0", b"after"]
    lib.pg_release_operations(made.a)
    made.advance(421 * MS)
    assert dict(ended(made))[b"before"] == Cause.EXPIRED


def test_an_operation_that_waits_is_cancelled_extended_and_rebuilt(
    late: tuple[pd.Purgatory, Owner],
) -> None:
    made, owner = late
    assert lib.pg_hold_operations(made.a, -1, 400 * MS, 0)
    made.advance(400 * MS)
    assert owner.send(pd.cancel(b"op3"))[0].status == Status.CANCELLED
    # the put is refused, but its answer has the ticket of the operation
    ticket = owner.send(pd.put(b"op4", 1))[0].ticket
    assert owner.send(pd.extend(b"op4", 100 * MS, ticket))[0].status == Status.EXTENDED
    made.check()
    made.rebuild(410 * MS)  # a rebuild ends the delay; the daemon has to request the delay again
    made.check()
    lib.pg_release_operations(made.a)
    made.advance(420 * MS)
    causes = dict(ended(made))
    assert (causes[b"op3"], b"op4" in causes, len(causes)) == (Cause.CANCELLED, False, COUNT - 1)
    made.advance(600 * MS)
    assert dict(ended(made))[b"op4"] == Cause.EXPIRED

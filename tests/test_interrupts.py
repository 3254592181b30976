"""Ctrl-C and exceptions of signal handlers in every call of a client.

An interrupted call completes, or raises before anything was sent, or raises with a handle that
reports the outcome later. Afterwards the client works, and each call returns its own result.
"""

from __future__ import annotations

import enum
import inspect
import itertools
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from interrupts import (
    ADDS,
    EFFECTS,
    HOUR_S,
    OURS,
    Effect,
    Interrupt,
    Interrupted,
    Step,
    id_of,
    interrupted,
    is_none,
    never,
    run,
    some_group,
    state_is,
    status,
    swallowed,
)
from partitioned import start_partitioned
from public_names import public
from real_daemon import PATIENCE_S, StartDaemon, eventually
from tiers import sample, wide

from purgatoryd import clients
from purgatoryd.clients import (
    Admin,
    AllOf,
    BulkLoadState,
    BulkResult,
    CallTimeout,
    CancelResult,
    Client,
    Closed,
    Handle,
    Notice,
    Operation,
    Purgatory,
    Status,
    Stopping,
    Subscriber,
)
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import client_paths

pytestmark = pytest.mark.tier("all")


def works(client: Any, number: int) -> None:
    """Check that each call returns its own result."""
    key = f"probe{number}"
    assert client.cancel(key) is CancelResult.UNKNOWN
    assert client.add(key, HOUR_S).key == key
    assert client.get(key).key == key
    assert client.cancel(key) is CancelResult.CANCELLED


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", sample(ADDS, {"add", "add_many"}))
def test_an_interrupted_add_is_known_or_in_doubt(daemon: StartDaemon, name: str) -> None:
    daemon("demo")
    doubts = 0
    with Client("demo", timeout=PATIENCE_S) as client:
        for number, found, error in interrupted(partial(ADDS[name], client)):
            handle = getattr(error, "handle", None)
            doubts += handle is not None
            works(client, number)
            client.flush()
            armed = client.get(f"k{number}") is not None
            if error is None:
                assert armed
                continue
            assert found is None
            if handle is None:
                assert not armed, "the add was sent, and its caller has no handle"
            elif hasattr(handle, "result"):
                assert armed
                assert handle.result().key == f"k{number}"
            else:
                client.settle(handle)
                assert armed
                assert handle.ok
    assert doubts > 1


CALLS: dict[str, Step] = {
    "cancel later": lambda c, n: c.cancel("none", wait=False),
    "unpark_many": lambda c, n: c.unpark_many([("none", 1, b"")]),
    "at": lambda c, n: c.at(None),
    "list_timers": lambda c, n: c.list_timers(limit=5),
    "count_timers": lambda c, n: c.count_timers(prefix="none"),
    "cancel_where": lambda c, n: c.cancel_where(prefix="none"),
    "reschedule_where": lambda c, n: c.reschedule_where(shift=1, prefix="none"),
    "sweep_status": lambda c, n: c.sweep_status(bytes(15) + b"x"),
    "stop_sweep": lambda c, n: c.stop_sweep(bytes(15) + b"x"),
    "sweeps": lambda c, n: c.sweeps(),
    "flush": lambda c, n: c.flush(),
    "settle": lambda c, n: c.settle(c.add_many([("s", 0)], mode="replace", wait=False)),
    "Handle.result": lambda c, n: c.cancel("none", wait=False).result(),
    "dead_letters": lambda c, n: (some_group(c, n), list(c.dead_letters("g"))),
    "Operation.result": lambda c, n: c.watch(f"o{n}", AllOf({"w": 0}), HOUR_S).result(),
}


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", sample(CALLS, {"flush", "Handle.result"}))
def test_a_client_works_after_an_interrupt(daemon: StartDaemon, name: str) -> None:
    daemon("demo")
    with Purgatory("demo", timeout=PATIENCE_S) as client:
        for number, _, _ in interrupted(lambda n: CALLS[name](client, n)):
            works(client, number)


PARTITIONED = ("add", "cancel", "cancel_many", "get", "forget")
"""Calls with keys. They are tested for a namespace with partitions."""


def outcome_of(client: Any, handle: Any) -> Any:
    """Return the result of the call to which the handle belongs."""
    if isinstance(handle, list):
        return [one.result() for one in handle]
    if isinstance(handle, BulkResult):
        client.settle(handle)
        return handle
    return handle.result()


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("partitions", "name"),
    sample(
        [(1, name) for name in EFFECTS] + [(4, name) for name in PARTITIONED],
        {(1, "cancel"), (1, "advance_many")},
    ),
)
def test_an_interrupted_call_has_a_handle_or_no_effect(
    daemon: StartDaemon, partitions: int, name: str
) -> None:
    start_partitioned(
        daemon, partitions, "--bulk-loads", "4096", "--schedules", "4096", "--cursors", "4096"
    )
    effect, doubts = EFFECTS[name], 0
    with Purgatory("demo", timeout=PATIENCE_S) as client:
        prepare = [partial(step, client) for step in effect.before]
        for number, found, error in interrupted(partial(effect.call, client), prepare):
            handle = getattr(error, "handle", None)
            doubts += handle is not None
            if error is None or handle is not None:
                assert effect.returns(found if handle is None else outcome_of(client, handle))
            if seen := [look(client, number) for look in effect.look]:
                assert effect.seen(seen[-1]) == (error is None or handle is not None)
            works(client, number)
    assert doubts > 3


def test_an_interrupted_cancel_for_key_reports_more_keys_than_one_message_has(
    daemon: StartDaemon,
) -> None:
    daemon("demo")
    keys = [f"{n:0>200}" for n in range(300)]
    with Purgatory("demo", timeout=PATIENCE_S) as client:
        client.watch_many([(key, AllOf({"w": 1}), HOUR_S) for key in keys])
        for number in itertools.count(start=20):
            try:
                with Interrupt(number):
                    ended = client.cancel_for_key("w")
            except Interrupted as error:
                handle: Any = getattr(error, "handle", None)
                if handle is None:
                    continue
                ended = handle.result()
            break
        assert sorted(ended) == keys
        assert client.cancel_for_key("w") == []


WATCHES: dict[str, Step] = {
    "watch": lambda c, n: c.watch(f"o{n}", AllOf({f"w{n}": 1}), HOUR_S),
    "watch_many": lambda c, n: c.watch_many(
        [(f"o{n}.{i}", AllOf({f"w{n}": 1}), HOUR_S) for i in (1, 2)]
    ),
}


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", sample(WATCHES, {"watch"}))
def test_an_interrupted_watch_is_armed_with_a_handle_or_not_at_all(
    daemon: StartDaemon, name: str
) -> None:
    daemon("demo")
    with Purgatory("demo", timeout=PATIENCE_S) as client:
        armed = 0
        for number, found, error in interrupted(partial(WATCHES[name], client)):
            found = found or getattr(error, "handle", [])
            operations = found if isinstance(found, list) else [found]
            client.flush()
            assert client.advance(f"w{number}", 1) == len(operations)
            for operation in operations:
                assert operation.result(PATIENCE_S).cause == "satisfied"
            armed += len(operations)
        assert armed > 3
        assert client.operations == 0


CALLBACKS: dict[str, Callable[[Operation], object]] = {
    "future": Operation.future,
    "add_done_callback": lambda operation: operation.add_done_callback(print),
}


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("ended", [False, True])
def test_an_interrupted_callback_leaves_the_operation_usable(
    daemon: StartDaemon, name: str, ended: bool
) -> None:
    daemon("demo")
    with Purgatory("demo", timeout=PATIENCE_S) as client:
        for number in itertools.count():
            operation = client.watch(f"o{number}", AllOf({f"w{number}": 1}), HOUR_S)
            if ended:
                client.advance(f"w{number}", 1)
                operation.result(PATIENCE_S)
            with Interrupt(number) as interrupt, suppress(Interrupted):
                CALLBACKS[name](operation)
            client.advance(f"w{number}", 1)
            assert operation.result(PATIENCE_S).cause == "satisfied"
            assert operation.future().result(PATIENCE_S).cause == "satisfied"
            if not interrupt.raised:
                break


def many(client: Any, n: int) -> Any:
    return client.add_many([(f"k{n}.{i}", HOUR_S) for i in range(6)])


PARTS: dict[str, Step] = {
    "add_many": many,
    "cancel_many": lambda c, n: c.cancel_many([f"k{n}.{i}" for i in range(6)]),
}


@pytest.mark.parametrize("name", PARTS)
def test_one_handle_reports_all_parts_of_a_bulk_call(daemon: StartDaemon, name: str) -> None:
    daemon("demo", "--shards", "2", "--capacity", "10000")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("clicks", 4)
    adds, doubts = name == "add_many", 0
    expected = Status.ADDED if adds else Status.CANCELLED
    with Client("demo", namespace="clicks", timeout=PATIENCE_S) as client:
        prepare = [] if adds else [partial(many, client)]
        for number, _, error in interrupted(partial(PARTS[name], client), prepare):
            handle = getattr(error, "handle", None)
            doubts += handle is not None
            if handle is not None:
                client.settle(handle)
                assert handle.statuses == [expected] * 6
            client.flush()
            there = [client.get(f"k{number}.{i}") is not None for i in range(6)]
            assert there == [(error is None or handle is not None) == adds] * 6
    assert doubts > 3


WAITS: dict[str, Step] = {
    "flush": lambda c, n: c.flush(),
    "settle": lambda c, n: c.settle(c.add_many([(f"s{n}", 0)], mode="replace")),
}
"""Calls that only wait. They are tested for a namespace with partitions."""


@pytest.mark.parametrize("name", WAITS)
def test_an_interrupted_wait_for_partitions_is_repeated(daemon: StartDaemon, name: str) -> None:
    daemon("demo", "--shards", "2", "--capacity", "10000")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("clicks", 4)
    with Client("demo", namespace="clicks", timeout=PATIENCE_S) as client:
        for number, _, _ in interrupted(partial(WAITS[name], client)):
            WAITS[name](client, number)
            works(client, number)


CLOSED = (Client, Purgatory, Subscriber, Admin)
CLOSED_TOO = [*((cls, 1) for cls in CLOSED), (Client, 4), (Purgatory, 4)]
"""Pairs (class, number of partitions of the namespace)."""


@pytest.mark.parametrize(("cls", "partitions"), CLOSED_TOO)
def test_an_interrupted_close_ends(daemon: StartDaemon, cls: type[Any], partitions: int) -> None:
    start_partitioned(daemon, partitions)
    opened: list[Any] = []

    def use(number: int) -> None:
        opened.append(cls("demo", timeout=PATIENCE_S))
        if hasattr(opened[-1], "add"):
            opened[-1].add(f"k{number}", HOUR_S, wait=False)
        elif cls is Admin:
            opened[-1].ping()

    threads = threading.active_count()
    for _ in interrupted(lambda _: opened[-1].close(), [use]):
        opened[-1].close()
    eventually(lambda: threading.active_count() == threads)
    if hasattr(cls, "add"):
        with Client("demo", timeout=PATIENCE_S) as client:
            keys = [f"k{n}" for n in range(len(opened))]
            assert client.cancel_many(keys) == [CancelResult.CANCELLED] * len(keys)


@pytest.mark.parametrize(("cls", "partitions"), CLOSED_TOO)
def test_an_interrupted_constructor_leaves_nothing(
    daemon: StartDaemon, cls: type[Any], partitions: int
) -> None:
    start_partitioned(daemon, partitions, "--sessions", "4096")
    for _, made, _ in interrupted(lambda _: cls("demo", timeout=PATIENCE_S)):
        if made is not None:
            made.close()


# The garbage collection of half-closed ZeroMQ objects may hang, so another thread runs it.
LEFT = """
import gc, os, sys, threading, time
sys.path.insert(0, sys.argv[2])
from interrupts import Interrupt, Interrupted
from purgatoryd import clients

cls = getattr(clients, sys.argv[1])
gc.disable()

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def attempt(number):
    \"\"\"Interrupts constructor or close() at a line; leaves what it has as a cycle.\"\"\"
    with Interrupt(number) as interrupt:
        gc.disable()
        try:
            cycle = [cls("demo", timeout=30)]
            cycle.append(cycle)
            cycle[0].close()
        except Interrupted as raised:
            error = raised
            cycle = [error]
    gc.disable()
    return interrupt.raised

def collect():
    collection = threading.Thread(target=gc.collect, daemon=True)
    collection.start()
    collection.join(30)
    assert not collection.is_alive(), "the collection hangs"

attempt(10**6)
collect()
before = descriptors()
number = 0
while attempt(number):
    number += 1
    collect()
collect()
deadline_s = time.monotonic() + 30
while descriptors() > before and time.monotonic() < deadline_s:
    time.sleep(0.01)
print(number > 10, descriptors() - before)
"""


@pytest.mark.parametrize(("cls", "partitions"), CLOSED_TOO)
def test_an_interrupt_leaves_no_descriptor(
    daemon: StartDaemon, cls: type[Any], partitions: int
) -> None:
    start_partitioned(daemon, partitions, "--sessions", "4096")
    support = str(Path(inspect.getfile(Interrupt)).parent)
    assert run(LEFT, cls.__name__, support) == "True 0\n"


# ---- administration ----------------------------------------------------------------------------


class Looks:
    """Looks up the effects of an Admin's calls in the arena and through clients."""

    def __init__(self) -> None:
        self.client = Client("demo", timeout=PATIENCE_S)
        self.sessions: list[Client] = []

    def close(self) -> None:
        for client in (self.client, *self.sessions):
            client.close()

    def header(self, see: Callable[[Reader], Any]) -> Any:
        with closing(Reader.attach(client_paths("demo"))) as reader:
            return see(reader)

    def begin_session(self) -> None:
        self.sessions.append(Client("demo", timeout=PATIENCE_S))

    @property
    def session(self) -> int:
        return self.sessions[-1]._core.connections[0].session.id

    def drains(self, admin: Admin) -> bool:
        """Return whether the daemon drains. If so, end the drain."""
        try:
            self.client.add("look", HOUR_S, mode="replace")
        except Stopping:
            admin.resume()
            return True
        return False


def admin_effects(looks: Looks) -> dict[str, Effect]:
    """Return the expected effect of each call of an Admin. The daemon has a virtual clock."""

    def published(_: Any, n: int) -> Any:
        return looks.header(lambda reader: reader.newest_sequences("default").get(f"t{n}"))

    def known(_: Any, n: int) -> Any:
        return looks.header(lambda reader: [one.name for one in reader.namespaces().values()])

    def slack_of(_: Any, n: int) -> int | None:
        looks.client.add(f"in:{n}", HOUR_S, topic=f"t{n}", mode="replace")
        info = looks.client.get(f"in:{n}")
        assert info is not None
        return info.within_ns

    return {
        "ping": Effect([], lambda a, n: a.ping(), is_none, [], never),
        "sessions": Effect([], lambda a, n: a.sessions(), bool, [], never),
        "bulk_load_status": Effect([], status, state_is(BulkLoadState.NONE), [], never),
        "advance": Effect(
            [lambda a, n: looks.client.add("k", 1, topic="a", mode="replace")],
            lambda a, n: a.advance((n + 1) * 10**9), lambda newest: isinstance(newest, dict),
            [lambda a, n: looks.header(lambda reader: reader.header.now_ns) >= (n + 1) * 10**9],
            bool,
        ),
        "create_namespace": Effect(
            [], lambda a, n: a.create_namespace(f"n{n}"), is_none,
            [lambda a, n: f"n{n}" in known(a, n)], bool,
        ),
        "set_namespace": Effect(
            [], lambda a, n: a.set_namespace(f"n{n}", quota_timers=5),
            lambda settings: bool(settings.quota_timers == 5),
            [lambda a, n: a.set_namespace(f"n{n}").quota_timers == 5], bool,
        ),
        "set_topic": Effect(
            [], lambda a, n: a.set_topic(f"t{n}", within=0.005), is_none,
            [slack_of], bool,
        ),
        "forget_bulk_load": Effect(
            [lambda a, n: looks.client.open_bulk_load(id_of(n))],
            lambda a, n: a.forget_bulk_load(id_of(n)), is_none, [status],
            state_is(BulkLoadState.NONE),
        ),
        "publish": Effect(
            [], lambda a, n: a.publish(f"t{n}", "k"), lambda ticket: isinstance(ticket, int),
            [lambda a, n: published(a, n) is not None and published(a, n)[1] == 1], bool,
        ),
        "drop_session": Effect(
            [lambda a, n: looks.begin_session()], lambda a, n: a.drop_session(looks.session),
            is_none,
            [lambda a, n: looks.session not in [one.session for one in a.sessions()]], bool,
        ),
        "stop": Effect(
            [], lambda a, n: a.stop(drain=True), is_none, [lambda a, n: looks.drains(a)], bool
        ),
        "resume": Effect(
            [lambda a, n: a.stop(drain=True)], lambda a, n: a.resume(), is_none,
            [lambda a, n: not looks.drains(a)], bool,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(public(Admin) - {"close"}))
def test_an_interrupted_call_of_an_admin_has_a_handle_or_no_effect(
    daemon: StartDaemon, name: str
) -> None:
    daemon("demo", "--clock", "virtual", "--namespaces", "1024", "--bulk-loads", "4096")
    doubts = 0
    with Admin("demo", timeout=PATIENCE_S) as admin, closing(Looks()) as looks:
        looks.client.add("stays", HOUR_S)  # keeps the daemon running during a drain
        effect = admin_effects(looks)[name]
        prepare = [partial(step, admin) for step in effect.before]
        for number, found, error in interrupted(partial(effect.call, admin), prepare):
            handle = getattr(error, "handle", None)
            doubts += handle is not None
            if error is None or handle is not None:
                assert effect.returns(found if handle is None else handle.result())
            if seen := [look(admin, number) for look in effect.look]:
                assert effect.seen(seen[-1]) == (error is None or handle is not None)
            assert admin.set_namespace("m", quota_timers=7).quota_timers == 7
            assert admin.set_namespace("m", quota_timers=0).quota_timers == 0
    assert doubts > 1


def test_an_interrupted_publish_on_shards_reports_its_ticket(daemon: StartDaemon) -> None:
    daemon("demo", "--shards", "2")
    with Admin("demo", timeout=PATIENCE_S) as admin, Subscriber("demo") as subscriber:
        tickets = []
        for _, ticket, error in interrupted(lambda n: admin.publish("t", f"k{n}")):
            handle = getattr(error, "handle", None)
            if error is None or handle is not None:
                tickets.append(ticket if handle is None else handle.result())
        assert len(tickets) > 3
        published = [subscriber.get(PATIENCE_S) for _ in tickets]
        assert [notice.ticket for notice in published if notice] == tickets
        assert subscriber.get(0) is None


def test_an_interrupted_call_of_an_admin_outlasts_neither_close_nor_its_timeout(
    daemon: StartDaemon,
) -> None:
    real = daemon("demo")
    admin = Admin("demo", timeout=PATIENCE_S)
    admin.ping()
    os.kill(real.pid, signal.SIGSTOP)
    try:
        alarm = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        alarm.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            admin.publish("t", "k")
        handle: Any = vars(caught.value)["handle"]
        with pytest.raises(CallTimeout):
            handle.result(0.05)
        began_s = time.monotonic()
        admin.close()
        assert time.monotonic() - began_s < PATIENCE_S / 3
        with pytest.raises(Closed):
            handle.result()
        with pytest.raises(Closed):
            admin.ping()
    finally:
        os.kill(real.pid, signal.SIGCONT)


# ---- notices -----------------------------------------------------------------------------------


TAKES: dict[str, Callable[[Subscriber], Iterable[Notice | None]]] = {
    "get": lambda subscriber: [subscriber.get(PATIENCE_S)],
    "get_many": lambda subscriber: subscriber.get_many(2, PATIENCE_S) or (),
    "next": lambda subscriber: [next(subscriber)],
}


@pytest.mark.tier("test")
@pytest.mark.parametrize("call", ["get", "get_many", "next"])
@pytest.mark.parametrize("topics", [wide(None), ["t"]])
@pytest.mark.usefixtures("way")
def test_an_interrupted_subscriber_returns_each_notice_once(
    daemon: StartDaemon, topics: list[str] | None, call: str
) -> None:
    daemon("demo")
    seen: list[Notice] = []
    sent = 0
    with (
        Client("demo", timeout=PATIENCE_S) as client,
        Subscriber("demo", topics=topics) as subscriber,
    ):

        def send() -> None:
            nonlocal sent
            client.add_many([(f"k{sent + i}", 0, "t") for i in range(5)])
            sent += 5

        send()
        for number in itertools.count():
            if len(seen) + 3 > sent or number % 7 == 0:
                send()
            with Interrupt(number) as interrupt:
                found: Iterable[Notice | None] = ()
                with suppress(Interrupted):
                    found = TAKES[call](subscriber)
            seen += (notice for notice in found if notice is not None)
            if not interrupt.raised:
                break
        while len(seen) < sent and (notice := subscriber.get(PATIENCE_S)) is not None:
            seen.append(notice)
    assert [notice.seq for notice in seen] == list(range(1, sent + 1))


@pytest.mark.tier("test")
def test_an_interrupted_commit_loses_no_notice(daemon: StartDaemon) -> None:
    daemon("demo")
    with (
        Client("demo", timeout=PATIENCE_S) as client,
        Subscriber("demo", timeout=PATIENCE_S, cursor="c") as subscriber,
    ):

        def take(n: int) -> None:
            client.add(f"k{n}", 0, topic="t")
            notice = subscriber.get(PATIENCE_S)
            assert notice is not None
            assert notice.key == f"k{n}"

        for _, found, _ in interrupted(lambda _: subscriber.commit(), [take]):
            assert found is None
        subscriber.commit()
    with Subscriber("demo", timeout=PATIENCE_S, cursor="c") as later:
        assert later.get(0.3) is None


# ---- completeness ------------------------------------------------------------------------------

TRIED: dict[type, set[str]] = {
    Client: {*ADDS, *CALLS, *EFFECTS, "close"},
    Purgatory: {*ADDS, *CALLS, *EFFECTS, *WATCHES, "close"},
    Handle: {name.removeprefix("Handle.") for name in CALLS},
    Operation: {name.removeprefix("Operation.") for name in (*CALLS, *EFFECTS, *CALLBACKS)},
    Subscriber: {"get", "get_many", "commit", "close"},
    Admin: public(Admin),
}
"""Calls that the tests of this file interrupt, by class."""
ELSEWHERE = {
    "DelayedOperation", "DelayedOperationPurgatory",  # tested in test_local.py
    "Consumer", "Job",  # tested in test_consumer_daemon.py
    "FakeConsumer",  # sends nothing
    "BulkLoad", "BulkLoadStatus", "BulkResult", "Remote", "Resume", "Selection",
    "TimerPage",  # neither send nor wait
    "Ledger",  # only called by clients
    "LocalPurgatory",  # tested in test_local_purgatory.py
    "Notices",  # neither sends nor waits
    "Operations",  # tested in test_operation_columns.py
}  # fmt: skip


def exported() -> Iterator[type]:
    """Yield the exported classes with public methods; no exceptions, enums, tuples, numbers."""
    for name in clients.__all__:
        cls = getattr(clients, name)
        plain = (BaseException, enum.Enum, tuple, int)
        if isinstance(cls, type) and not issubclass(cls, plain) and public(cls):
            yield cls


@pytest.mark.tier("test")
def test_every_public_call_is_interrupted() -> None:
    blocking = [cls for cls in exported() if not cls.__name__.startswith("Async")]
    assert {cls.__name__ for cls in blocking} == {cls.__name__ for cls in TRIED} | ELSEWHERE
    for cls, calls in TRIED.items():
        assert public(cls) <= {name.split()[0] for name in calls}, cls
        assert cls in CLOSED or "close" not in calls


# ---- real signals ------------------------------------------------------------------------------

CTRL_C = """
import os, random, signal, sys, threading
from purgatoryd.clients import Client

def press(after_s):
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()

def again(unraisable):  # Python has swallowed an exception: in a weakref callback, in __del__
    if unraisable.exc_type is KeyboardInterrupt:
        press(0.0002)
    else:
        sys.__unraisablehook__(unraisable)

sys.unraisablehook = again
random.seed(int(sys.argv[1]))
try:
    press(random.random() * 0.02)
    for n in range(100):
        with Client("demo") as client:
            client.add_many([(f"{sys.argv[1]}.{n}.{i}", 3600) for i in range(300)])
            client.add(f"{sys.argv[1]}.{n}", 3600, wait=False)
except KeyboardInterrupt:
    print("interrupted")
"""

STORM = """
import random, signal, sys, time
from purgatoryd.clients import CancelResult, Client, Subscriber

class Alarm(Exception): pass

def ring(*_):
    if armed:  # another thread may have got the signal, and be late
        armed.clear()
        raise Alarm

def again(unraisable):  # Python has swallowed an exception: in a weakref callback, in __del__
    if unraisable.exc_type is Alarm:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
        armed.append(True)
    else:
        sys.__unraisablehook__(unraisable)

def first():
    for notice in subscriber:
        return notice

signal.signal(signal.SIGALRM, ring)
sys.unraisablehook = again
interrupts, seen, sent, armed = 0, [], 0, []
client, subscriber = Client("demo", timeout=30), Subscriber("demo", topics=["t"])
calls = [
    lambda n: client.add(f"k{n}", 3600, mode="replace"),
    lambda n: client.add(f"p{n}", 3600, mode="replace", wait=False).result(),
    lambda n: client.add_many([(f"k{n}", 3600), (f"m{n}", 3600)], mode="replace"),
    lambda n: client.get(f"k{n}"),
    lambda n: client.cancel_many([f"k{n}", f"m{n}"]),
    lambda n: client.flush(),
    lambda n: subscriber.get(0.01),
    lambda n: first() if len(seen) < sent else None,
]
for n in range(1500):
    if n % 4 == 0:
        assert client.add_many([(f"t{n}.{i}", 0, "t") for i in range(5)]).ok
        sent += 5
    call, notice = calls[n % len(calls)], None
    try:
        armed.append(True)
        signal.setitimer(signal.ITIMER_REAL, random.random() * 0.0006 + 1e-6)
        notice = call(n)
        signal.setitimer(signal.ITIMER_REAL, 0)
        armed.clear()
    except Alarm as error:
        interrupts += 1
        handle = getattr(error, "handle", None)
        if handle is not None and hasattr(handle, "result"):
            found = handle.result()
            assert found is None or found.key[1:] == str(n)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if hasattr(notice, "seq"):
        seen.append(notice.seq)
    if n % 20 == 0:
        assert client.cancel("none") is CancelResult.UNKNOWN
        assert client.add(f"q{n}", 3600).key == f"q{n}"
while len(seen) < sent and (notice := subscriber.get(30)) is not None:
    seen.append(notice.seq)
assert len(set(seen)) == len(seen), "a notice came twice"
subscriber.close()
client.close()
print(interrupts, sent, sorted(set(range(1, sent + 1)) - set(seen)))
"""


AGAIN_S = 0.0002
"""Time from a swallowed exception of a signal handler to the next signal."""


def shaken(call: Callable[[int], Any], number: int) -> tuple[Any, Interrupted | None]:
    """Make a call, and let a signal arrive during it or soon after it. If Python swallows the
    exception of the signal handler, another signal follows.

    Returns (result, exception that the signal handler raised, or None).
    """

    def ring(*_: object) -> None:
        if armed:
            raise armed.pop()

    def again() -> None:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        armed.append(Interrupted())

    found, error = None, None
    armed = [Interrupted()]
    before = signal.signal(signal.SIGALRM, ring)
    with swallowed(again):
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + random.random() ** 3 * 0.003)
            found = call(number)
            armed.clear()
        except Interrupted as raised:
            error = raised
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    return found, error


class Thing:
    """An object to which a weak reference is possible."""


def dropped(callback: Callable[[object], object]) -> None:
    """Drop an object, so that Python calls `callback` for its weak reference."""
    thing = Thing()
    reference = weakref.ref(thing, callback)
    del thing
    assert reference() is None


def test_a_signal_in_a_weakref_callback_is_followed_by_another() -> None:
    reached = []

    def callback(_: object) -> None:
        reached.append(True)
        signal.raise_signal(signal.SIGALRM)

    def call(_: int) -> None:
        dropped(callback)
        time.sleep(PATIENCE_S)

    error = None
    while not reached:  # an early signal of shaken() may come before the callback
        _, error = shaken(call, 0)
    assert error is not None


def test_an_interrupt_in_a_weakref_callback_does_not_count() -> None:
    begun: list[object] = []

    def callback(reference: object) -> None:
        begun.append(reference)

    for number in itertools.count():
        error = None
        with Interrupt(number, where=(__file__,)) as interrupt:
            try:
                dropped(callback)
            except Interrupted as raised:
                error = raised
        assert interrupt.raised == (error is not None)
        if not interrupt.raised:
            break
    assert begun


def within(error: Interrupted) -> bool:
    """Return whether an exception was raised inside of a call of the package."""
    trace, files = error.__traceback__, []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return any(file.startswith(OURS) for file in files)


@pytest.mark.parametrize("cls", [Purgatory, Admin])
def test_a_storm_of_signals_over_every_call(daemon: StartDaemon, cls: type[Any]) -> None:
    daemon("demo", "--clock", "virtual" if cls is Admin else "real", "--namespaces", "4000",
           "--topics", "10000", "--bulk-loads", "30000", "--watch-keys", "60000",
           "--schedules", "4000")  # fmt: skip
    handles = interrupts = 0
    numbers = itertools.count()
    with cls("demo", timeout=PATIENCE_S) as client, closing(Looks()) as looks:
        if cls is Admin:
            # keeps the daemon running during a drain
            looks.client.add("stays", HOUR_S)
        for name, effect in (admin_effects(looks) if cls is Admin else EFFECTS).items():
            for number in itertools.islice(numbers, 80):
                for step in effect.before:
                    step(client, number)
                found, error = shaken(partial(effect.call, client), number)
                if error is not None and not within(error):
                    for look in effect.look:  # a query that finds a drain ends the drain
                        look(client, number)
                    continue
                handle = getattr(error, "handle", None)
                interrupts, handles = interrupts + (error is not None), handles + bool(handle)
                if error is None or handle is not None:
                    assert effect.returns(found if handle is None else outcome_of(client, handle))
                if seen := [look(client, number) for look in effect.look]:
                    assert effect.seen(seen[-1]) == (error is None or handle is not None), name
        assert handles > 100
        assert interrupts > handles


def test_programs_end_after_ctrl_c(daemon: StartDaemon) -> None:
    daemon("demo", "--capacity", "1000000")
    assert {run(CTRL_C, str(seed)) for seed in range(20)} == {"interrupted\n"}


def test_a_storm_of_signals_breaks_nothing(daemon: StartDaemon) -> None:
    daemon("demo")
    interrupts, sent, lost = run(STORM).strip().split(maxsplit=2)
    assert lost == "[]"
    assert int(interrupts) > 100
    assert int(sent) > 1000

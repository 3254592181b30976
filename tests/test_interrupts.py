"""Ctrl-C and exceptions of signal handlers in every call of a client.

A call completes, or raises before anything was sent, or raises with a handle that reports its
outcome later. Afterwards the client works, and every result belongs to its call.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from interrupts import Interrupt, Interrupted, run
from real_daemon import PATIENCE_S, StartDaemon

from purgatoryd.clients import (
    Admin,
    AllOf,
    CancelResult,
    Client,
    Notice,
    Operation,
    PartitionedClient,
    Purgatory,
    Status,
    Subscriber,
)

HOUR_S = 3600.0


def interrupted(call: Callable[[int], Any]) -> Iterator[tuple[int, Any, Interrupted | None]]:
    """Makes the call once for each line that it begins, and raises there; ends with a call that no
    exception interrupted. Yields the number, what it returned, and the exception."""
    for number in itertools.count():
        found, error = None, None
        with Interrupt(number) as interrupt:
            try:
                found = call(number)
            except Interrupted as raised:
                error = raised
        yield number, found, error
        if not interrupt.raised:
            assert number > 3, "the call has hardly a line"
            return


def works(client: Any, number: int) -> None:
    """Every result belongs to its call."""
    key = f"probe{number}"
    assert client.cancel(key) is CancelResult.UNKNOWN
    assert client.add(key, HOUR_S).key == key
    assert client.get(key).key == key
    assert client.cancel(key) is CancelResult.CANCELLED


def add(client: Any, n: int) -> Any:
    return client.add(f"k{n}", HOUR_S)


def add_later(client: Any, n: int) -> Any:
    return client.add(f"k{n}", HOUR_S, wait=False)


def add_many(client: Any, n: int) -> Any:
    return client.add_many([(f"k{n}", HOUR_S), (f"l{n}", HOUR_S)])


def add_many_later(client: Any, n: int) -> Any:
    return client.add_many([(f"k{n}", HOUR_S)], wait=False)


@pytest.mark.parametrize("call", [add, add_later, add_many, add_many_later])
def test_an_interrupted_add_is_known_or_in_doubt(daemon: StartDaemon, call: Any) -> None:
    daemon("demo")
    doubts = 0
    with Client("demo", timeout=PATIENCE_S) as client:
        for number, found, error in interrupted(lambda n: call(client, n)):
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


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "cancel": lambda c, n: c.cancel("none"),
    "cancel later": lambda c, n: c.cancel("none", wait=False),
    "get": lambda c, n: c.get("none"),
    "cancel_many": lambda c, n: c.cancel_many(["none", "none"]),
    "unpark_many": lambda c, n: c.unpark_many([("none", 1, b"")]),
    "open_bulk_load": lambda c, n: c.open_bulk_load(b"sixteen bytes id"),
    "bulk_load_status": lambda c, n: c.bulk_load_status(b"sixteen bytes id"),
    "forget_bulk_load": lambda c, n: c.forget_bulk_load(b"sixteen bytes id"),
    "at": lambda c, n: c.at(None),
    "flush": lambda c, n: c.flush(),
    "settle": lambda c, n: c.settle(c.add_many([("s", 0)], mode="replace", wait=False)),
    "result": lambda c, n: c.cancel("none", wait=False).result(),
    "advance": lambda c, n: c.advance("w", 1),
    "advance_many": lambda c, n: c.advance_many({"w": 1, "v": 2}),
    "bump": lambda c, n: c.bump("w", 0),
    "clear": lambda c, n: c.clear("w"),
    "forget": lambda c, n: c.forget("x"),
    "cancel_for_key": lambda c, n: c.cancel_for_key("x"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_client_works_after_an_interrupt(daemon: StartDaemon, name: str) -> None:
    daemon("demo")
    with Purgatory("demo", timeout=PATIENCE_S) as client:
        for number, _, _ in interrupted(lambda n: CALLS[name](client, n)):
            works(client, number)


def test_an_interrupted_watch_is_armed_with_a_handle_or_not_at_all(daemon: StartDaemon) -> None:
    daemon("demo")
    with Purgatory("demo", timeout=PATIENCE_S) as client:
        ended: list[str] = []
        for number, operation, error in interrupted(
            lambda n: client.watch(f"o{n}", AllOf({f"w{n}": 1}), HOUR_S)
        ):
            operation = operation or getattr(error, "handle", None)
            client.flush()
            woken = client.advance(f"w{number}", 1)
            assert woken == (operation is not None)
            if operation is not None:
                assert operation.result(PATIENCE_S).cause == "satisfied"
                ended.append(operation.key)
        assert len(ended) > 3
        assert client.operations == 0


def test_an_interrupted_watch_many_has_all_handles(daemon: StartDaemon) -> None:
    daemon("demo")
    with Purgatory("demo", timeout=PATIENCE_S) as client:
        for number, operations, error in interrupted(
            lambda n: client.watch_many(
                [(f"o{n}.{i}", AllOf({f"w{n}": 1}), HOUR_S) for i in (1, 2)]
            )
        ):
            operations = operations or getattr(error, "handle", [])
            client.flush()
            assert client.advance(f"w{number}", 1) == len(operations)
            for operation in operations:
                assert operation.result(PATIENCE_S).cause == "satisfied"


@pytest.mark.parametrize("add", [Operation.future, lambda o: o.add_done_callback(print)])
@pytest.mark.parametrize("ended", [False, True])
def test_an_interrupted_callback_leaves_the_operation_usable(
    daemon: StartDaemon, add: Callable[[Operation], object], ended: bool
) -> None:
    daemon("demo")
    with Purgatory("demo", timeout=PATIENCE_S) as client:
        for number in itertools.count():
            operation = client.watch(f"o{number}", AllOf({f"w{number}": 1}), HOUR_S)
            if ended:
                client.advance(f"w{number}", 1)
                operation.result(PATIENCE_S)
            with Interrupt(number) as interrupt, suppress(Interrupted):
                add(operation)
            client.advance(f"w{number}", 1)
            assert operation.result(PATIENCE_S).cause == "satisfied"
            assert operation.future().result(PATIENCE_S).cause == "satisfied"
            if not interrupt.raised:
                break


def many(client: Any, n: int) -> Any:
    return client.add_many([(f"k{n}.{i}", HOUR_S) for i in range(6)])


def cancel_many(client: Any, n: int) -> Any:
    return client.cancel_many([f"k{n}.{i}" for i in range(6)])


@pytest.mark.parametrize("call", [many, cancel_many])
def test_one_handle_reports_all_parts_of_a_bulk_call(daemon: StartDaemon, call: Any) -> None:
    daemon("demo", "--shards", "2", "--capacity", "10000")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("clicks", 4)
    doubts = 0
    expected = Status.ADDED if call is many else Status.CANCELLED
    with PartitionedClient("demo", namespace="clicks", timeout=PATIENCE_S) as client:

        def prepared(n: int) -> Any:
            sys.settrace(None)
            if call is cancel_many:
                assert many(client, n).ok
            sys.settrace(interrupt_of[-1]._trace)
            return call(client, n)

        interrupt_of: list[Interrupt] = []
        for number in itertools.count():
            handle, error = None, None
            with Interrupt(number) as interrupt:
                interrupt_of.append(interrupt)
                try:
                    handle = prepared(number)
                except Interrupted as raised:
                    error, handle = raised, getattr(raised, "handle", None)
            doubts += error is not None and handle is not None
            if error is not None and handle is not None:
                client.settle(handle)
                assert handle.statuses == [expected] * 6
            client.flush()
            there = [client.get(f"k{number}.{i}") is not None for i in range(6)]
            assert there == [(handle is not None) == (call is many)] * 6
            if not interrupt.raised:
                break
    assert doubts > 3


@pytest.mark.parametrize("cls", [Client, Purgatory, PartitionedClient])
def test_an_interrupted_close_ends(daemon: StartDaemon, cls: type[Any]) -> None:
    real = daemon("demo")
    opened: list[Any] = []

    def close(number: int) -> None:
        sys.settrace(None)
        opened.append(cls("demo", timeout=PATIENCE_S))
        opened[-1].add(f"k{number}", HOUR_S, wait=False)
        sys.settrace(interrupt_of[-1]._trace)
        opened[-1].close()

    interrupt_of: list[Interrupt] = []
    for number in itertools.count():
        with Interrupt(number) as interrupt, suppress(Interrupted):
            interrupt_of.append(interrupt)
            close(number)
        opened[-1].close()
        if not interrupt.raised:
            break
    with Client("demo", timeout=PATIENCE_S) as client:
        for n in range(number + 1):
            assert client.cancel(f"k{n}") is CancelResult.CANCELLED
    assert real.running


@pytest.mark.parametrize("cls", [Client, Purgatory, Subscriber, PartitionedClient])
def test_an_interrupted_constructor_leaves_nothing(daemon: StartDaemon, cls: type[Any]) -> None:
    daemon("demo")
    for _, made, _ in interrupted(lambda _: cls("demo", timeout=PATIENCE_S)):
        if made is not None:
            made.close()


def test_an_admin_works_after_an_interrupt(daemon: StartDaemon) -> None:
    daemon("demo")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        for call in (
            admin.ping,
            lambda: admin.set_namespace("n", quota_timers=5),
            lambda: admin.publish("t", "k"),
            lambda: admin.bulk_load_status(b"sixteen bytes id"),
        ):
            for _ in interrupted(lambda _: call()):  # noqa: B023
                assert admin.set_namespace("m").quota_timers == 0
                assert admin.set_namespace("m", quota_timers=7).quota_timers == 7
                assert admin.set_namespace("m", quota_timers=0).quota_timers == 0


@pytest.mark.parametrize("iterate", [False, True])
@pytest.mark.parametrize("topics", [None, ["t"]])
def test_an_interrupted_subscriber_returns_each_notice_once(
    daemon: StartDaemon, topics: list[str] | None, iterate: bool
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
                try:
                    notice = next(subscriber) if iterate else subscriber.get(PATIENCE_S)
                except Interrupted:
                    notice = None
            if notice is not None:
                seen.append(notice)
            if not interrupt.raised:
                break
        while len(seen) < sent and (notice := subscriber.get(PATIENCE_S)) is not None:
            seen.append(notice)
    assert [notice.seq for notice in seen] == list(range(1, sent + 1))


# ---- real signals ------------------------------------------------------------------------------

CTRL_C = """
import os, random, signal, sys, threading
from purgatoryd.clients import Client

random.seed(int(sys.argv[1]))
timer = threading.Timer(random.random() * 0.02, os.kill, (os.getpid(), signal.SIGINT))
try:
    timer.start()
    for n in range(100):
        with Client("demo") as client:
            client.add_many([(f"{sys.argv[1]}.{n}.{i}", 3600) for i in range(300)])
            client.add(f"{sys.argv[1]}.{n}", 3600, wait=False)
except KeyboardInterrupt:
    print("interrupted")
"""

STORM = """
import random, signal, time
from purgatoryd.clients import CancelResult, Client, Subscriber

class Alarm(Exception): pass

def ring(*_):
    raise Alarm

def first():
    for notice in subscriber:
        return notice

signal.signal(signal.SIGALRM, ring)
interrupts, seen, sent = 0, [], 0
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
        signal.setitimer(signal.ITIMER_REAL, random.random() * 0.0006 + 1e-6)
        notice = call(n)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Alarm as error:
        interrupts += 1
        handle = getattr(error, "handle", None)
        if handle is not None and hasattr(handle, "result"):
            assert handle.result().key[1:] == str(n)
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


def test_programs_end_after_ctrl_c(daemon: StartDaemon) -> None:
    daemon("demo", "--capacity", "1000000")
    assert {run(CTRL_C, str(seed)) for seed in range(20)} == {"interrupted\n"}


def test_a_storm_of_signals_breaks_nothing(daemon: StartDaemon) -> None:
    daemon("demo")
    interrupts, sent, lost = run(STORM).strip().split(maxsplit=2)
    assert lost == "[]"
    assert int(interrupts) > 100
    assert int(sent) > 1000

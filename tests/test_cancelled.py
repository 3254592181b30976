"""Cancelled tasks in every call of an asyncio client.

A cancelled call was never sent, or it goes on and has a handle that reports its outcome. Afterwards
the client works, and every result belongs to its call.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

import pytest
from interrupts import Interrupt, Interrupted, run
from real_daemon import PATIENCE_S, StartDaemon

from purgatoryd.clients import (
    Admin,
    AllOf,
    CancelResult,
    Client,
    Notice,
    PurgatorydError,
    Status,
    operations,
)
from purgatoryd.clients.aio import AsyncClient, AsyncSubscriber
from purgatoryd.clients.aio_partitioned import AsyncPartitionedClient
from purgatoryd.clients.aio_purgatory import AsyncPurgatory

HOUR_S = 3600.0
T = TypeVar("T")
Call = Callable[[int], Coroutine[Any, Any, Any]]


class Cancelling:
    """Runs a coroutine and cancels it once, where it suspends for the nth time.

    `late`: cancel it after the awaited result is there.
    """

    def __init__(self, call: Coroutine[Any, Any, T], number: int, *, late: bool) -> None:
        self._call, self._number, self._late = call, number, late
        self.cancelled = False

    @types.coroutine
    def run(self) -> Generator[Any, Any, Any]:
        """Run the coroutine and return its result."""
        error: BaseException | None = None
        for number in itertools.count():
            try:
                future = self._call.send(None) if error is None else self._call.throw(error)
            except StopIteration as stop:
                return stop.value
            error = None
            mine = number == self._number
            if mine and future is not None and not self._late:
                future.cancel()
            try:
                yield future
            except BaseException as raised:
                error = raised
            if mine:
                self.cancelled, error = True, asyncio.CancelledError()


async def cancelled(
    call: Call,
) -> AsyncIterator[tuple[int, Any, asyncio.CancelledError | None]]:
    """Makes the call once for each of its suspensions, early and late, and cancels it there; ends
    with a call that was not cancelled. Yields a number, what it returned, and the exception."""
    numbers = itertools.count()
    for late in (False, True):
        for suspension in itertools.count():
            number, found, error = next(numbers), None, None
            cancelling = Cancelling(call(number), suspension, late=late)
            try:
                found = await cancelling.run()
            except asyncio.CancelledError as raised:
                error = raised
            yield number, found, error
            if not cancelling.cancelled:
                assert suspension > 0, "the call never suspends"
                break


async def works(client: Any, number: int) -> None:
    """Every result belongs to its call."""
    key = f"probe{number}"
    assert await client.cancel(key) is CancelResult.UNKNOWN
    assert (await client.add(key, HOUR_S)).key == key
    assert (await client.get(key)).key == key
    assert await client.cancel(key) is CancelResult.CANCELLED


def some_rows(n: int) -> list[tuple[str, float]]:
    return [(f"k{n}", HOUR_S), *((f"l{n}.{i}", HOUR_S) for i in range(3000))]


ADDS: dict[str, Callable[[Any, int], Any]] = {
    "add": lambda c, n: c.add(f"k{n}", HOUR_S),
    "add later": lambda c, n: c.add(f"k{n}", HOUR_S, wait=False),
    "add_many": lambda c, n: c.add_many(some_rows(n)),
    "add_many later": lambda c, n: c.add_many(some_rows(n), wait=False),
}


@pytest.mark.parametrize("name", ADDS)
def test_a_cancelled_add_is_complete_or_was_never_sent(daemon: StartDaemon, name: str) -> None:
    daemon("demo", "--capacity", "100000")

    async def scenario() -> None:
        async with AsyncClient("demo", timeout=PATIENCE_S, queue_limit=1) as client:

            async def call(n: int) -> Any:
                await client.add(f"before{n}", HOUR_S, wait=False)  # the queue is full
                return await ADDS[name](client, n)

            doubts = 0
            async for number, _, error in cancelled(call):
                await client.flush()
                handle: Any = getattr(error, "handle", None)
                doubts += handle is not None
                armed = await client.get(f"k{number}") is not None
                assert armed == (error is None or handle is not None)
                if hasattr(handle, "result"):
                    assert (await handle.result()).key == f"k{number}"
                elif handle is not None:
                    await client.settle(handle)
                    assert handle.ok
                await works(client, number)
            assert doubts > 1 or name == "add later"

    asyncio.run(scenario())


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "cancel": lambda c, n: c.cancel("none"),
    "cancel later": lambda c, n: c.cancel("none", wait=False),
    "get": lambda c, n: c.get("none"),
    "cancel_many": lambda c, n: c.cancel_many(["none", "none"]),
    "unpark_many": lambda c, n: c.unpark_many([("none", 1, b"")]),
    "open_bulk_load": lambda c, n: c.open_bulk_load(b"sixteen bytes id"),
    "close_bulk_load": lambda c, n: c.close_bulk_load(b"sixteen bytes id"),
    "bulk_load_status": lambda c, n: c.bulk_load_status(b"sixteen bytes id"),
    "forget_bulk_load": lambda c, n: c.forget_bulk_load(b"sixteen bytes id"),
    "flush": lambda c, n: c.flush(),
    "advance": lambda c, n: c.advance("w", 1),
    "advance_many": lambda c, n: c.advance_many({"w": 1, "v": 2}),
    "bump": lambda c, n: c.bump("w", 0),
    "fail": lambda c, n: c.fail("f", 1),
    "clear": lambda c, n: c.clear("w"),
    "forget": lambda c, n: c.forget("x"),
    "cancel_for_key": lambda c, n: c.cancel_for_key("x"),
    "extend": lambda c, n: c.watched.extend(HOUR_S),
    "cancel of an operation": lambda c, n: c.watched.cancel(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_client_works_after_a_cancelled_call(daemon: StartDaemon, name: str) -> None:
    daemon("demo")

    async def scenario() -> None:
        async with AsyncPurgatory("demo", timeout=PATIENCE_S, queue_limit=1) as client:

            async def call(n: int) -> Any:
                client.watched = await client.watch(f"op{n}", AllOf({f"v{n}": 1}), HOUR_S)  # type: ignore[attr-defined]
                await client.add(f"before{n}", HOUR_S, wait=False)
                return await CALLS[name](client, n)

            async for number, _, _ in cancelled(call):
                await works(client, number)
            assert await client.cancel("none") is CancelResult.UNKNOWN

    asyncio.run(scenario())


def test_a_timeout_carries_the_handle_of_its_call(daemon: StartDaemon) -> None:
    daemon("demo")

    async def scenario() -> None:
        async with AsyncClient("demo", timeout=PATIENCE_S) as client:
            with pytest.raises(TimeoutError) as late:
                async with asyncio.timeout(0):
                    await client.add("k", HOUR_S)
            cause: Any = late.value.__cause__
            assert (await cause.handle.result()).key == "k"

    asyncio.run(scenario())


@pytest.mark.parametrize("many", [False, True])
def test_a_cancelled_watch_is_armed_with_a_handle_or_not_at_all(
    daemon: StartDaemon, many: bool
) -> None:
    daemon("demo")

    async def scenario() -> None:
        async with AsyncPurgatory("demo", timeout=PATIENCE_S) as client:

            async def call(n: int) -> Any:
                condition = AllOf({f"w{n}": 1})
                if not many:
                    return [await client.watch(f"o{n}", condition, HOUR_S)]
                return await client.watch_many([(f"o{n}.{i}", condition, HOUR_S) for i in (1, 2)])

            doubts = 0
            async for number, operations, error in cancelled(call):
                handle: Any = getattr(error, "handle", None)
                doubts += handle is not None
                await client.flush()
                ended = operations or (handle if isinstance(handle, list) else [handle])
                assert await client.advance(f"w{number}", 1) == len(ended)
                for operation in ended:
                    assert (await operation.result(PATIENCE_S)).cause == "satisfied"
            assert doubts > 1
            assert client.operations == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("late", [False, True], ids=["before the answer", "after the answer"])
def test_a_watch_that_was_cancelled_is_repeated_and_returns_its_operation(
    *, late: bool, daemon: StartDaemon
) -> None:
    daemon("demo")

    async def scenario() -> None:
        async with AsyncPurgatory("demo", timeout=PATIENCE_S) as client:
            condition = AllOf({"w": 1})
            with pytest.raises(asyncio.CancelledError):
                await Cancelling(client.watch("o", condition, HOUR_S), 0, late=late).run()
            operation = await client.watch("o", condition, HOUR_S)
            assert await client.advance("w", 1) == 1
            assert (await operation).cause == "satisfied"

    asyncio.run(scenario())


@pytest.mark.parametrize("lapsed", [False, True])
def test_a_repeated_watch_returns_an_ended_operation_for_a_limited_time(
    *, lapsed: bool, daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon("demo")
    if lapsed:
        monkeypatch.setattr(operations, "DOUBT_S", 0.0)

    async def scenario() -> None:
        async with AsyncPurgatory("demo", timeout=PATIENCE_S) as client:
            condition = AllOf({"w": 1})
            with pytest.raises(asyncio.CancelledError) as caught:
                await Cancelling(client.watch("o", condition, 0.0), 0, late=True).run()
            first: Any = getattr(caught.value, "handle", None)
            await first
            again = await client.watch("o", condition, HOUR_S)
            assert (again.ticket == first.ticket) is not lapsed

    asyncio.run(scenario())


def test_one_handle_reports_all_parts_of_a_bulk_call(daemon: StartDaemon) -> None:
    daemon("demo", "--shards", "2", "--capacity", "10000")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("clicks", 4)

    async def scenario() -> None:
        async with AsyncPartitionedClient("demo", namespace="clicks", timeout=PATIENCE_S) as client:

            async def call(n: int) -> Any:
                return await client.add_many([(f"k{n}.{i}", HOUR_S) for i in range(6)])

            async for number, result, error in cancelled(call):
                handle: Any = result or getattr(error, "handle", None)
                await client.settle(handle)
                assert handle.statuses == [Status.ADDED] * 6
                assert await client.cancel_many([f"k{number}.{i}" for i in range(6)])

            async def cancel(_: int) -> Any:
                assert (await client.add_many([("k", HOUR_S)])).ok
                return await client.cancel_many(["k"])

            async for _, result, error in cancelled(cancel):
                await client.flush()
                handle = getattr(error, "handle", None)
                if result is None and handle is not None:
                    await client.settle(handle)
                await client.cancel("k")

    asyncio.run(scenario())


@pytest.mark.parametrize("cls", [AsyncClient, AsyncPurgatory, AsyncPartitionedClient])
def test_a_cancelled_close_ends_and_sends_what_was_packed(
    daemon: StartDaemon, cls: type[Any]
) -> None:
    daemon("demo")
    keys: list[str] = []

    async def scenario() -> None:
        opened: list[Any] = []

        async def close(n: int) -> None:
            opened.append(await cls("demo", timeout=PATIENCE_S).connect())
            await opened[-1].add(f"k{n}", HOUR_S, wait=False)
            keys.append(f"k{n}")
            await opened[-1].close()

        async for _ in cancelled(close):
            if opened:
                await opened[-1].close()

    asyncio.run(scenario())
    with Client("demo", timeout=PATIENCE_S) as client:
        assert client.cancel_many(keys) == [CancelResult.CANCELLED] * len(keys)


def test_a_cancelled_close_does_not_wait_for_a_frozen_daemon(daemon: StartDaemon) -> None:
    real = daemon("demo")

    async def scenario() -> float:
        client = await AsyncClient("demo", timeout=PATIENCE_S).connect()
        os.kill(real.pid, signal.SIGSTOP)
        await client.add("k", HOUR_S, wait=False)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0.05)
        began_s = time.monotonic()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        return time.monotonic() - began_s

    try:
        assert asyncio.run(scenario()) < PATIENCE_S / 3
    finally:
        os.kill(real.pid, signal.SIGCONT)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("cls", [AsyncClient, AsyncPurgatory, AsyncPartitionedClient])
def test_a_cancelled_connect_leaves_nothing(daemon: StartDaemon, cls: type[Any]) -> None:
    daemon("demo")

    async def connect(_: int) -> None:
        client = await cls("demo", timeout=PATIENCE_S).connect()
        await client.close()

    async def scenario() -> None:
        await connect(0)
        before = descriptors()
        async for _ in cancelled(connect):
            deadline_s = time.monotonic() + PATIENCE_S
            while descriptors() > before and time.monotonic() < deadline_s:
                await asyncio.sleep(0.01)
            assert descriptors() <= before

    asyncio.run(scenario())


def test_a_client_without_connect_works_after_a_cancelled_first_call(daemon: StartDaemon) -> None:
    daemon("demo")

    async def scenario() -> None:
        for suspension in range(3):
            client = AsyncClient("demo", timeout=PATIENCE_S)
            cancelling = Cancelling(client.add("k", HOUR_S), suspension, late=False)
            with suppress(asyncio.CancelledError):
                await cancelling.run()
            await works(client, suspension)
            await client.cancel("k")
            await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("iterate", [False, True])
@pytest.mark.parametrize("topics", [None, ["t"]])
def test_a_cancelled_subscriber_returns_each_notice_once(
    daemon: StartDaemon, topics: list[str] | None, iterate: bool
) -> None:
    daemon("demo")
    seen: list[int] = []

    async def take(subscriber: AsyncSubscriber) -> None:
        notice = await (anext(subscriber) if iterate else subscriber.get(PATIENCE_S))
        assert isinstance(notice, Notice)
        seen.append(notice.seq)

    async def scenario() -> int:
        sent = 0
        async with (
            AsyncClient("demo", timeout=PATIENCE_S) as client,
            AsyncSubscriber("demo", topics=topics) as subscriber,
        ):
            for late, number in itertools.product((False, True), range(200)):
                if number % 5 == 0:
                    await client.add_many([(f"k{sent + i}", 0.001, "t") for i in range(3)])
                    sent += 3
                if len(seen) == sent:
                    continue
                with suppress(asyncio.CancelledError, TimeoutError):
                    if number % 2:
                        await Cancelling(take(subscriber), number % 3, late=late).run()
                    else:
                        await asyncio.wait_for(take(subscriber), random.random() * 0.003)
            while len(seen) < sent:
                await take(subscriber)
        return sent

    sent = asyncio.run(scenario())
    assert seen == list(range(1, sent + 1))


# ---- exceptions inside the loop's callbacks ---------------------------------------------------


class InCallback(Interrupt):
    """Raises at the nth line of a client's callback of the loop."""

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        outer: FrameType | None = frame
        while outer is not None and outer.f_code.co_name != "_exchange":
            outer = outer.f_back
        return self._trace if outer is None else super()._trace(frame, event, argument)


def test_calls_end_after_an_exception_in_a_callback_of_the_loop(daemon: StartDaemon) -> None:
    daemon("demo")
    for number in itertools.count(step=2):
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            client = runner.run(AsyncClient("demo", timeout=0.2).connect())
            call = loop.create_task(client.add(f"k{number}", HOUR_S))
            with InCallback(number) as interrupt, suppress(Interrupted, PurgatorydError):
                loop.run_until_complete(call)
            ending = asyncio.gather(call, client.get("none"), return_exceptions=True)
            began_s = time.monotonic()
            loop.run_until_complete(asyncio.wait((ending,), timeout=PATIENCE_S / 3))
            assert ending.done(), interrupt.raised
            with suppress(PurgatorydError):
                runner.run(client.close())
            assert time.monotonic() - began_s < PATIENCE_S
        if not interrupt.raised:
            assert number > 50
            return


# ---- real signals ------------------------------------------------------------------------------

CTRL_C = """
import asyncio, os, random, signal, sys, threading
from purgatoryd.clients.aio import AsyncClient

random.seed(int(sys.argv[1]))
timer = threading.Timer(random.random() * 0.02, os.kill, (os.getpid(), signal.SIGINT))

async def main():
    timer.start()
    for n in range(100):
        async with AsyncClient("demo") as client:
            await client.add_many([(f"{sys.argv[1]}.{n}.{i}", 3600) for i in range(300)])
            await client.add(f"{sys.argv[1]}.{n}", 3600, wait=False)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_asyncio_programs_end_after_ctrl_c(daemon: StartDaemon) -> None:
    daemon("demo", "--capacity", "1000000")
    assert {run(CTRL_C, str(seed)) for seed in range(10)} == {"interrupted\n"}

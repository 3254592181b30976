"""Cancelled tasks in every call of an asyncio client.

A cancelled call either was never sent, or continues and has a handle that reports its outcome.
Afterwards the client works, and each call returns its own result.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import signal
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import pytest
from interrupts import EFFECTS, HOUR_S, Interrupt, Interrupted, run, some_group
from partitioned import start_partitioned
from public_names import public
from real_daemon import PATIENCE_S, StartDaemon
from tiers import sample, wide

from purgatoryd import clients
from purgatoryd.clients import (
    Admin,
    AllOf,
    BulkResult,
    CancelResult,
    Client,
    Notice,
    PurgatorydError,
    Status,
    operations,
)
from purgatoryd.clients.aio import AsyncClient, AsyncHandle, AsyncSubscriber
from purgatoryd.clients.aio_consumer import AsyncConsumer, AsyncJob
from purgatoryd.clients.aio_purgatory import AsyncOperation, AsyncPurgatory
from purgatoryd.clients.operation_columns import AsyncOperations
from purgatoryd.shm_layout.errors import LeaseLost

pytestmark = pytest.mark.tier("all")

T = TypeVar("T")
Call = Callable[[int], Coroutine[Any, Any, Any]]


class Cancelling:
    """Runs a coroutine and cancels it once, at its nth suspension.

    `late`: cancel it after the awaited result is available.
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
    call: Call, prepare: Iterable[Call] = ()
) -> AsyncIterator[tuple[int, Any, asyncio.CancelledError | None]]:
    """Make the call once for each of its suspensions and cancel it there, before or after the
    awaited result is available.

    Yields (number of the call, its result, its exception). The last call is not cancelled.
    """
    numbers = itertools.count()
    for late in (False, True):
        for suspension in itertools.count():
            number, found, error = next(numbers), None, None
            for step in prepare:
                await step(number)
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
    """Check that the client works, and that each call returns its own result."""
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


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", ADDS)
def test_a_cancelled_add_is_complete_or_was_never_sent(daemon: StartDaemon, name: str) -> None:
    daemon("demo", "--capacity", "100000")

    async def scenario() -> None:
        async with AsyncClient("demo", timeout=PATIENCE_S, queue_limit=1) as client:

            async def call(n: int) -> Any:
                # after many calls the queue is full
                await client.add(f"before{n}", HOUR_S, wait=False)
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
            assert doubts or name == "add later"

    asyncio.run(scenario())


async def settle(client: Any, n: int) -> None:
    await client.settle(await client.add_many([(f"s{n}", 0)], mode="replace"))


async def result(client: Any, _: int) -> None:
    await (await client.cancel("none", wait=False)).result()


async def ended(client: Any, n: int) -> None:
    await (await client.watch(f"e{n}", AllOf({"w": 0}), HOUR_S)).result()


async def listed(client: Any, number: int) -> None:
    """List the dead letters of a consumer group."""
    await some_group(client, number)
    assert [letter async for letter in client.dead_letters("g")] == []


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "cancel later": lambda c, n: c.cancel("none", wait=False),
    "unpark_many": lambda c, n: c.unpark_many([("none", 1, b"")]),
    "list_timers": lambda c, n: c.list_timers(limit=5),
    "count_timers": lambda c, n: c.count_timers(prefix="none"),
    "cancel_where": lambda c, n: c.cancel_where(prefix="none"),
    "reschedule_where": lambda c, n: c.reschedule_where(shift=1, prefix="none"),
    "sweep_status": lambda c, n: c.sweep_status(bytes(15) + b"x"),
    "stop_sweep": lambda c, n: c.stop_sweep(bytes(15) + b"x"),
    "sweeps": lambda c, n: c.sweeps(),
    "flush": lambda c, n: c.flush(),
    "settle": settle,
    "AsyncHandle.result": result,
    "dead_letters": listed,
    "AsyncOperation.result": ended,
}
WAITS = ("flush", "settle")
"""Calls that only wait. They are tested for a namespace with partitions."""


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("partitions", "name"),
    sample(
        [(1, name) for name in CALLS] + [(4, name) for name in WAITS],
        {(1, "flush"), (1, "AsyncHandle.result")},
    ),
)
def test_a_client_works_after_a_cancelled_call(
    daemon: StartDaemon, partitions: int, name: str
) -> None:
    start_partitioned(daemon, partitions)

    async def scenario() -> None:
        async with AsyncPurgatory("demo", timeout=PATIENCE_S, queue_limit=1) as client:

            async def call(n: int) -> Any:
                await client.add(f"before{n}", HOUR_S, wait=False)
                return await CALLS[name](client, n)

            async for number, _, _ in cancelled(call):
                await works(client, number)
            assert await client.cancel("none") is CancelResult.UNKNOWN

    asyncio.run(scenario())


PARTITIONED = ("add", "cancel", "cancel_many", "get", "forget")
"""Calls with keys. They are tested for a namespace with partitions."""


async def outcome_of(client: Any, handle: Any) -> Any:
    """Return the result of the call to which the handle belongs."""
    if isinstance(handle, list):
        return [await one for one in handle]
    if isinstance(handle, BulkResult):
        await client.settle(handle)
        return handle
    return await handle


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("partitions", "name"),
    sample(
        [(1, name) for name in EFFECTS] + [(4, name) for name in PARTITIONED],
        {(1, "cancel"), (1, "advance_many")},
    ),
)
def test_a_cancelled_call_has_a_handle_or_no_effect(
    daemon: StartDaemon, partitions: int, name: str
) -> None:
    start_partitioned(
        daemon, partitions, "--bulk-loads", "4096", "--schedules", "4096", "--cursors", "4096"
    )
    effect = EFFECTS[name]

    async def scenario() -> None:
        async with AsyncPurgatory("demo", timeout=PATIENCE_S, queue_limit=1) as client:

            async def call(n: int) -> Any:
                # after many calls the queue is full
                await client.add(f"before{n}", HOUR_S, wait=False)
                return await effect.call(client, n)

            doubts = 0
            prepare = [partial(step, client) for step in effect.before]
            async for number, found, error in cancelled(call, prepare):
                handle: Any = getattr(error, "handle", None)
                doubts += handle is not None
                if error is None or handle is not None:
                    assert effect.returns(
                        found if handle is None else await outcome_of(client, handle)
                    )
                if seen := [await look(client, number) for look in effect.look]:
                    assert effect.seen(seen[-1]) == (error is None or handle is not None)
                await works(client, number)
            assert doubts

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


WATCHES: dict[str, Callable[[Any, int], Any]] = {
    "watch": lambda c, n: c.watch(f"o{n}", AllOf({f"w{n}": 1}), HOUR_S),
    "watch_many": lambda c, n: c.watch_many(
        [(f"o{n}.{i}", AllOf({f"w{n}": 1}), HOUR_S) for i in (1, 2)]
    ),
}


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", sample(WATCHES, {"watch"}))
def test_a_cancelled_watch_is_armed_with_a_handle_or_not_at_all(
    daemon: StartDaemon, name: str
) -> None:
    daemon("demo")

    async def scenario() -> None:
        async with AsyncPurgatory("demo", timeout=PATIENCE_S) as client:
            doubts = 0
            async for number, found, error in cancelled(partial(WATCHES[name], client)):
                handle: Any = getattr(error, "handle", None)
                doubts += handle is not None
                await client.flush()
                ended = found or handle
                ended = ended if isinstance(ended, list) else [ended]
                assert await client.advance(f"w{number}", 1) == len(ended)
                for operation in ended:
                    assert (await operation.result(PATIENCE_S)).cause == "satisfied"
            assert doubts
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


PARTS: dict[str, Callable[[Any, int], Any]] = {
    "add_many": lambda c, n: c.add_many([(f"k{n}.{i}", HOUR_S) for i in range(6)]),
    "cancel_many": lambda c, n: c.cancel_many([f"k{n}.{i}" for i in range(6)]),
}


@pytest.mark.parametrize("name", PARTS)
def test_one_handle_reports_all_parts_of_a_bulk_call(daemon: StartDaemon, name: str) -> None:
    daemon("demo", "--shards", "2", "--capacity", "10000")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("clicks", 4)
    adds = name == "add_many"
    expected = Status.ADDED if adds else Status.CANCELLED

    async def scenario() -> None:
        async with AsyncClient("demo", namespace="clicks", timeout=PATIENCE_S) as client:
            doubts = 0
            prepare = [] if adds else [partial(PARTS["add_many"], client)]
            async for number, _, error in cancelled(partial(PARTS[name], client), prepare):
                handle: Any = getattr(error, "handle", None)
                doubts += handle is not None
                if handle is not None:
                    await client.settle(handle)
                    assert handle.statuses == [expected] * 6
                await client.flush()
                there = [await client.get(f"k{number}.{i}") is not None for i in range(6)]
                assert there == [(error is None or handle is not None) == adds] * 6
            assert doubts

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("cls", "partitions"), [(AsyncClient, 1), (AsyncPurgatory, 1), (AsyncClient, 4)]
)
def test_a_cancelled_close_ends_and_sends_what_was_packed(
    daemon: StartDaemon, cls: type[Any], partitions: int
) -> None:
    start_partitioned(daemon, partitions)
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


async def few_descriptors(most: int) -> None:
    """Wait until at most `most` descriptors are open. libzmq may close one after close()."""
    deadline_s = time.monotonic() + PATIENCE_S
    while descriptors() > most and time.monotonic() < deadline_s:
        await asyncio.sleep(0.01)
    assert descriptors() <= most


@pytest.mark.parametrize(
    ("cls", "partitions"), [(AsyncClient, 1), (AsyncPurgatory, 1), (AsyncClient, 4)]
)
def test_a_cancelled_connect_leaves_nothing(
    daemon: StartDaemon, cls: type[Any], partitions: int
) -> None:
    start_partitioned(daemon, partitions)

    async def connect(_: int) -> None:
        client = await cls("demo", timeout=PATIENCE_S).connect()
        await client.close()

    async def scenario() -> None:
        gc.collect()  # else garbage of earlier tests may close descriptors between two counts
        await connect(0)
        before = descriptors()
        async for _ in cancelled(connect):
            await few_descriptors(before)

    asyncio.run(scenario())


def test_a_cancelled_connect_of_a_subscriber_leaves_nothing(daemon: StartDaemon) -> None:
    daemon("demo")

    async def scenario() -> None:
        gc.collect()  # else garbage of earlier tests may close descriptors between two counts
        await (await AsyncSubscriber("demo").connect()).close()
        before = descriptors()
        for suspension in range(5):
            connect = AsyncSubscriber("absent", timeout=PATIENCE_S).connect()
            cancelling = Cancelling(connect, suspension, late=bool(suspension % 2))
            with pytest.raises(asyncio.CancelledError):
                await cancelling.run()
            await few_descriptors(before)

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


@pytest.mark.tier("test")
@pytest.mark.parametrize("call", ["get", "get_many", "next"])
@pytest.mark.parametrize("topics", [wide(None), ["t"]])
@pytest.mark.usefixtures("way")
def test_a_cancelled_subscriber_returns_each_notice_once(
    daemon: StartDaemon, topics: list[str] | None, call: str
) -> None:
    daemon("demo")
    seen: list[int] = []

    async def take(subscriber: AsyncSubscriber) -> None:
        if call == "get_many":
            seen.extend(notice.seq for notice in await subscriber.get_many(2, PATIENCE_S) or ())
            return
        notice = await (anext(subscriber) if call == "next" else subscriber.get(PATIENCE_S))
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
    """Raises an exception at the nth line that runs inside of `_exchange`, the callback of the
    client that the event loop calls."""

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        outer: FrameType | None = frame
        while outer is not None and outer.f_code.co_name != "_exchange":
            outer = outer.f_back
        return self._trace if outer is None else super()._trace(frame, event, argument)


@pytest.mark.tier("test")
def test_calls_end_after_an_exception_in_a_callback_of_the_loop(daemon: StartDaemon) -> None:
    daemon("demo")
    for number in itertools.count(step=2):
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            client = runner.run(AsyncClient("demo", timeout=PATIENCE_S).connect())
            client.timeout = 0.2
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


# ---- completeness ------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_cancelled_commit_loses_no_notice(daemon: StartDaemon) -> None:
    daemon("demo")

    async def scenario() -> None:
        async with (
            AsyncClient("demo", timeout=PATIENCE_S) as client,
            AsyncSubscriber("demo", timeout=PATIENCE_S, cursor="c") as subscriber,
        ):

            async def take(n: int) -> None:
                await client.add(f"k{n}", 0, topic="t")
                notice = await subscriber.get(PATIENCE_S)
                assert notice is not None
                assert notice.key == f"k{n}"

            async for _, found, _ in cancelled(lambda _: subscriber.commit(), [take]):
                assert found is None
            await subscriber.commit()
        async with AsyncSubscriber("demo", timeout=PATIENCE_S, cursor="c") as later:
            assert await later.get(0.3) is None

    asyncio.run(scenario())


@pytest.mark.tier("test")
def test_a_cancelled_ack_many_loses_no_job(daemon: StartDaemon) -> None:
    daemon("demo")

    async def scenario() -> None:
        jobs = AsyncConsumer("demo", group="g", topics=["t"], timeout=PATIENCE_S, lease=300)
        async with AsyncClient("demo", timeout=PATIENCE_S) as client, jobs:
            held: list[AsyncJob] = []

            async def take(n: int) -> None:
                await client.add(f"k{n}", 0, topic="t")
                job = await jobs.get(PATIENCE_S)
                assert job is not None
                held.append(job)

            async for number, _, error in cancelled(lambda n: jobs.ack_many([held[n]]), [take]):
                if error is not None:
                    with suppress(LeaseLost):  # the cancelled call may have taken effect
                        await held[number].ack()
                assert held[number].key == f"k{number}"
                assert (await client.group("g")).acked == number + 1

    asyncio.run(scenario())


@pytest.mark.tier("test")
def test_a_cancelled_task_has_sent_the_acks_that_it_does_not_wait_for(daemon: StartDaemon) -> None:
    daemon("demo")

    async def scenario() -> None:
        jobs = AsyncConsumer("demo", group="g", topics=["t"], timeout=PATIENCE_S, lease=300)
        async with AsyncClient("demo", timeout=PATIENCE_S) as client:
            async with jobs:
                for n in range(3):
                    await client.add(f"k{n}", 0, topic="t")
                    job = await jobs.get(PATIENCE_S)
                    assert job is not None
                    task = asyncio.ensure_future(jobs.ack_many([job], wait=False))
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            assert (await client.group("g")).acked == 3

    asyncio.run(scenario())


TRIED: dict[type, set[str]] = {
    AsyncClient: {*ADDS, *CALLS, *EFFECTS, "close", "connect"},
    AsyncPurgatory: {*ADDS, *CALLS, *EFFECTS, *WATCHES, "close", "connect"},
    AsyncHandle: {name.removeprefix("AsyncHandle.") for name in CALLS},
    AsyncOperation: {
        *(name.removeprefix("AsyncOperation.") for name in CALLS),
        *(name.removeprefix("Operation.") for name in EFFECTS),
    },
    # `wait` is tested in test_operation_columns.py; only AsyncPurgatory calls the others.
    AsyncOperations: {"wait", "failed", "wake", "call_back"},
    AsyncSubscriber: {"get", "get_many", "commit", "close", "connect"},
    # Both are tested in test_consumer.py.
    AsyncConsumer: public(AsyncConsumer),
    AsyncJob: public(AsyncJob),
}
"""Calls that the tests cancel, by class."""
DO_NOT_WAIT = {"at", "add_done_callback", "future"}


@pytest.mark.tier("test")
def test_every_public_call_that_waits_is_cancelled() -> None:
    exported = [name for name in clients.__all__ if name.startswith("Async")]
    assert {getattr(clients, name) for name in exported} == TRIED.keys()
    for cls, calls in TRIED.items():
        waits = public(cls) - DO_NOT_WAIT
        assert waits <= {name.split()[0] for name in calls}, cls


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

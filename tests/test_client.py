"""Clients and subscribers against a real daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from partitioned import start_partitioned
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, remove_arena_files
from tiers import wide

from purgatoryd.clients import (
    Admin,
    AsyncClient,
    AsyncPurgatory,
    AsyncSubscriber,
    BatchError,
    CallTimeout,
    CancelResult,
    Client,
    Closed,
    DaemonError,
    DaemonUnreachable,
    Exists,
    ForkedProcess,
    Full,
    InvalidArgument,
    InvalidKey,
    InvalidName,
    InvalidPayload,
    InvalidTime,
    Lagged,
    MessageRefused,
    Notice,
    PurgatorydError,
    QueueFull,
    Status,
    Subscriber,
    subscriber,
)
from purgatoryd.clients.local_channel import LocalChannel
from purgatoryd.clients.subscriber import Inbox
from purgatoryd.shm_layout.arena import Reader

pytestmark = pytest.mark.tier("all")

HOUR_S = 3600.0
MAX_NS = 2**63 - 1


@pytest.fixture
def real(daemon: StartDaemon) -> Daemon:
    return daemon("demo")


@pytest.fixture
def client(real: Daemon) -> Iterator[Client]:
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def virtual(daemon: StartDaemon) -> Iterator[Client]:
    daemon("demo", "--clock", "virtual")
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def admin(virtual: Client) -> Iterator[Admin]:
    with Admin("demo", timeout=PATIENCE_S) as admin:
        yield admin


def listen(*topics: str, **options: Any) -> Subscriber:
    return Subscriber("demo", namespace="shop", topics=topics or None, **options)


def take(subscriber: Subscriber, count: int) -> list[Notice]:
    notices = [subscriber.get(PATIENCE_S) for _ in range(count)]
    assert None not in notices
    return [notice for notice in notices if notice is not None]


def connected_to(path: Path) -> bool:
    """Return whether a socket of this process is connected to the socket at `path`. libzmq's thread
    reports the end of a connection before it closes the socket. Until then, libzmq accepts messages
    for the connection."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # not connected, or closed meanwhile
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as one:
                    if one.getpeername() == str(path):
                        return True
    return False


# ---- single calls ----------------------------------------------------------------------------


def test_a_client_uses_the_transport_for_which_the_test_runs(
    client: Client, request: pytest.FixtureRequest
) -> None:
    """The parameter `transport` takes effect in a test that does not request the fixture itself."""
    transport = request.node.callspec.params["transport"]
    channel = client._core.connections[0].channel
    assert isinstance(channel, LocalChannel)
    assert channel.transport == ("ring" if transport == "ring" else "zmq")


def test_add_get_cancel(client: Client) -> None:
    added = client.add("order:42", delay=HOUR_S, topic="orders", payload=b"four")
    assert (added.key, added.topic, added.namespace, added.payload) == (
        "order:42", "orders", "shop", b"four",
    )  # fmt: skip
    assert added.status is Status.ADDED
    found = client.get("order:42")
    assert found is not None
    assert (found.ticket, found.deadline_boot_ns, found.payload, found.topic) == (
        added.ticket, added.deadline_boot_ns, b"four", "orders",
    )  # fmt: skip
    assert client.cancel("order:42") is CancelResult.CANCELLED
    assert client.cancel("order:42") is CancelResult.UNKNOWN
    assert client.get("order:42") is None


def test_a_fired_timer_gives_one_notice(client: Client) -> None:
    with listen("orders") as subscriber:
        added = client.add("k", delay_ns=1, topic="orders", payload=b"p")
        (notice,) = take(subscriber, 1)
    assert (notice.key, notice.payload, notice.topic, notice.namespace, notice.seq) == (
        "k", b"p", "orders", "shop", 1,
    )  # fmt: skip
    assert notice.ticket == added.ticket
    assert notice.deadline_boot_ns == added.deadline_boot_ns <= notice.fired_boot_ns
    assert notice.lateness_ns >= notice.structural_lateness_ns >= 0
    assert abs(notice.fired_at - datetime.now(UTC)) < timedelta(minutes=5)
    assert client.cancel("k") is CancelResult.FIRED


def test_modes(client: Client) -> None:
    first = client.add("k", delay=HOUR_S)
    with pytest.raises(Exists) as caught:
        client.add("k", delay=HOUR_S)
    assert (caught.value.key, caught.value.ticket) == ("k", first.ticket)
    assert caught.value.deadline_boot_ns == first.deadline_boot_ns
    retained = client.add("k", delay=2 * HOUR_S, mode="keep")
    assert (retained.status, retained.ticket) == (Status.KEPT, first.ticket)
    earlier = client.add("k", delay=1, mode="extend")
    assert (earlier.status, earlier.deadline_boot_ns) == (Status.KEPT, first.deadline_boot_ns)
    later = client.add("k", delay=2 * HOUR_S, mode="extend")
    assert (later.status, later.ticket) == (Status.EXTENDED, first.ticket)
    replaced = client.add("k", delay=HOUR_S, mode="replace")
    assert replaced.status is Status.REPLACED
    assert replaced.ticket > first.ticket
    with pytest.raises(InvalidArgument, match="replace"):
        client.add("k", delay=1, mode="overwrite")  # type: ignore[call-overload]


def test_keys_of_different_types_are_different_timers(client: Client) -> None:
    number = uuid.UUID(bytes=b"sixteen bytes!!!")
    for key in ("a", b"a", number, number.bytes):
        client.add(key, delay=HOUR_S)
    for key in ("a", b"a", number, number.bytes):
        found = client.get(key)
        assert found is not None
        assert found.key == key


@pytest.mark.tier("test")
def test_a_ticket_guards_a_cancel(client: Client) -> None:
    first = client.add("k", delay=HOUR_S)
    second = client.add("k", delay=HOUR_S, mode="replace")
    assert client.cancel("k", ticket=first.ticket) is CancelResult.UNKNOWN
    assert client.cancel("k", ticket=second.ticket) is CancelResult.CANCELLED


def test_namespaces_are_apart(client: Client) -> None:
    with Client("demo", namespace="bank") as other:
        client.add("k", delay=HOUR_S)
        assert other.get("k") is None
        assert other.cancel("k") is CancelResult.UNKNOWN


# ---- times -----------------------------------------------------------------------------------


def test_delays_may_be_seconds_timedelta_or_nanoseconds(virtual: Client) -> None:
    assert virtual.virtual
    deadlines = [
        virtual.add("a", delay=1.5).deadline_boot_ns,
        virtual.add("b", delay=timedelta(seconds=1, milliseconds=500)).deadline_boot_ns,
        virtual.add("c", delay_ns=1_500_000_000).deadline_boot_ns,
        virtual.add("d", deadline_boot_ns=1_500_000_000).deadline_boot_ns,
        virtual.add("e", deadline=datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC)).deadline_boot_ns,
    ]
    assert deadlines == [1_500_000_000] * 5
    found = virtual.get("e")
    assert found is not None
    assert found.deadline_at == datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC)


def test_a_negative_delay_is_due_at_once(client: Client) -> None:
    with listen() as subscriber:
        client.add("a", delay=-1)
        client.add("b", delay=-1e300)
        client.add("c", delay=timedelta(days=-1))
        # Timers that are due in the same tick fire in any order.
        assert {notice.key for notice in take(subscriber, 3)} == {"a", "b", "c"}


def test_the_largest_deadline_is_accepted(client: Client) -> None:
    assert client.add("k", deadline_boot_ns=MAX_NS).deadline_boot_ns == MAX_NS


def test_bad_arguments_change_nothing(client: Client) -> None:
    with pytest.raises(InvalidKey):
        client.add("", delay=1)
    with pytest.raises(InvalidPayload):
        client.add("k", delay=1, payload=bytes(65537))
    with pytest.raises(InvalidName):
        client.add("k", delay=1, topic="x" * 128)
    with pytest.raises(InvalidName):
        Client("demo", namespace="")
    with pytest.raises(InvalidName):
        Client("No Such Name")
    client.flush()


# ---- packed calls ------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_packed_calls_resolve_through_their_handles(client: Client) -> None:
    handles = [client.add(f"k{i}", delay=HOUR_S, wait=False) for i in range(3000)]
    tickets = [handle.result().ticket for handle in handles]
    assert tickets == sorted(tickets)
    assert client.cancel("k1", wait=False).result() is CancelResult.CANCELLED


def test_packed_calls_leave_by_themselves(client: Client) -> None:
    with listen() as subscriber:
        client.add("k", delay=0, wait=False)
        assert take(subscriber, 1)[0].key == "k"


def test_a_call_sees_the_packed_ones_before_it(client: Client) -> None:
    client.add("k", delay=HOUR_S, wait=False)
    assert client.cancel("k") is CancelResult.CANCELLED


def test_a_get_sees_the_packed_calls_before_it(client: Client) -> None:
    client.add("k", delay=HOUR_S, wait=False)
    assert client.get("k") is not None


def test_flush_raises_for_refusals_that_nobody_collected(client: Client) -> None:
    client.add("k", delay=HOUR_S)
    seen = client.add("k", delay=HOUR_S, wait=False)
    with pytest.raises(Exists):
        seen.result()
    client.flush()
    client.add("k", delay=HOUR_S, wait=False)
    with pytest.raises(BatchError) as caught:
        client.flush()
    assert caught.value.refusals == (("k", Status.EXISTS),)
    assert caught.value.count == 1
    client.flush()


@pytest.mark.tier("test")
def test_threads_share_a_client(client: Client) -> None:
    def work(number: int) -> None:
        for i in range(100):
            if i % 3:
                client.add(f"{number}.{i}", delay=HOUR_S, wait=False)
            else:
                client.add(f"{number}.{i}", delay=HOUR_S)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.flush()
    keys = [f"{number}.{i}" for number in range(4) for i in range(100)]
    assert set(client.cancel_many(keys)) == {CancelResult.CANCELLED}


# ---- bulk --------------------------------------------------------------------------------------


def test_rows_of_tuples_and_dicts(client: Client) -> None:
    client.add("b", delay=HOUR_S)
    result = client.add_many(
        [
            ("a", HOUR_S),
            ("b", HOUR_S, "orders"),
            ("c", HOUR_S, "orders", b"pay"),
            {"key": uuid.UUID(int=1), "delay_ns": 10**12, "payload": b"x", "topic": "t"},
        ]
    )
    assert result.statuses == [Status.ADDED, Status.EXISTS, Status.ADDED, Status.ADDED]
    assert result.refused == [(1, Status.EXISTS)]
    assert not result.ok
    assert repr(result) == f"<BulkResult of {len(result)} rows, {len(result.refused)} refused>"
    found = client.get("c")
    assert found is not None
    assert (found.topic, found.payload, found.ticket) == ("orders", b"pay", result.tickets[2])
    keys = ["a", "b", "c", uuid.UUID(int=1), "d"]
    assert client.cancel_many(keys) == [CancelResult.CANCELLED] * 4 + [CancelResult.UNKNOWN]


def test_columns(virtual: Client) -> None:
    count = 2500
    result = virtual.add_many(
        pa.table(
            {
                "key": [f"k{i}" for i in range(count)],
                "delay": 3600 + np.arange(count),
                "topic": pa.array([f"t{i % 300}" for i in range(count)]).dictionary_encode(),
                "payload": pa.array([b"p" * (i % 40) for i in range(count)], pa.binary()),
            }
        )
    )
    assert isinstance(result.statuses, np.ndarray)
    assert result.ok
    assert (result.deadlines_boot_ns == (np.int64(3600) + np.arange(count)) * 10**9).all()
    for i in (0, 1, 39, 1023, 1024, 2499):
        found = virtual.get(f"k{i}")
        assert found is not None
        assert (found.topic, found.payload) == (f"t{i % 300}", b"p" * (i % 40))
        assert found.ticket == result.tickets[i]


def test_bytes_columns_are_bytes_keys(virtual: Client) -> None:
    keys = np.array([b"one", b"three", b"fourteen"])
    assert virtual.add_many({"key": keys, "delay_ns": np.array([5, 6, 7])}).ok
    found = virtual.get(b"three")
    assert found is not None
    assert found.deadline_boot_ns == 6
    assert virtual.cancel_many(keys) == [CancelResult.CANCELLED] * 3
    assert virtual.cancel_many(pa.array([b"one", b"three"])) == [CancelResult.UNKNOWN] * 2


def test_large_payloads_make_several_batches(client: Client) -> None:
    payload = os.urandom(65536)
    with listen("big") as subscriber:
        assert client.add_many([(f"k{i}", 0, "big", payload) for i in range(60)]).ok
        notices = take(subscriber, 60)
    assert {notice.key for notice in notices} == {f"k{i}" for i in range(60)}
    assert {notice.payload for notice in notices} == {payload}


def test_full(daemon: StartDaemon) -> None:
    daemon("demo", "--capacity", "1000")
    with Client("demo") as client, listen() as subscriber:
        result = client.add_many([(f"k{i}", HOUR_S) for i in range(1100)])
        assert len(result.refused) == 100
        assert {status for _, status in result.refused} == {Status.FULL}
        with pytest.raises(Full) as caught:
            client.add("one more", delay=1)
        assert caught.value.resource == "slots"
        assert client.cancel("k5") is CancelResult.CANCELLED
        client.add("one more", delay=HOUR_S)
        assert subscriber.get(0) is None


# ---- the virtual clock ---------------------------------------------------------------------------


def test_nothing_fires_before_the_clock_moves(virtual: Client, admin: Admin) -> None:
    with listen("t") as subscriber:
        virtual.add("a", delay=10, topic="t")
        virtual.add("b", delay=20, topic="t")
        assert admin.advance(9_999_999_999)["shop", "t"][1] == 0
        assert admin.advance(10_000_200_000)["shop", "t"][1] == 1
        (notice,) = take(subscriber, 1)
        assert (notice.key, notice.received_boot_ns) == ("a", None)
        assert 0 <= notice.lateness_ns < 200_000
    with pytest.raises(MessageRefused, match="CLOCK"):
        admin.advance(5)


def test_at_applies_calls_at_their_time(virtual: Client, admin: Admin) -> None:
    with listen("t") as subscriber:
        for second in range(1, 500):
            virtual.at(second * 10**9)
            virtual.add(f"k{second}", delay=10, topic="t", wait=False)
            if second % 2:
                virtual.cancel(f"k{second - 5}", wait=False)
        virtual.at(None)
        virtual.flush()
        newest = admin.advance(600 * 10**9)
        notices = take(subscriber, newest["shop", "t"][1])
    late = [n.key for n in notices]
    assert late == [f"k{s}" for s in range(1, 500) if s % 2 or s > 494]


def test_at_needs_a_virtual_clock(client: Client) -> None:
    with pytest.raises(InvalidTime):
        client.at(5)


def test_ping_and_stop(real: Daemon) -> None:
    with Admin("demo") as admin:
        admin.ping()
        with pytest.raises(MessageRefused, match="CLOCK"):
            admin.advance(5)
        admin.stop()
    assert real.process.wait(PATIENCE_S) == 0


# ---- restarts ------------------------------------------------------------------------------------


@pytest.mark.tier("test")
@pytest.mark.parametrize("end", [wide("stop"), "kill"])
def test_calls_go_on_after_a_restart(client: Client, real: Daemon, end: str) -> None:
    for i in range(500):
        client.add(f"before{i}", delay=HOUR_S, wait=False)
    getattr(real, end)()
    for i in range(500):
        client.add(f"during{i}", delay=HOUR_S, wait=False)
    real.start()
    client.add("after", delay=HOUR_S)
    client.flush()
    keys = [f"{when}{i}" for when in ("before", "during") for i in range(500)]
    assert set(client.cancel_many([*keys, "after"])) == {CancelResult.CANCELLED}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_subscriber_goes_on_after_a_restart(client: Client, real: Daemon, end: str) -> None:
    with listen("t") as subscriber:
        client.add_many([(f"a{i}", 0, "t") for i in range(100)])
        assert [n.seq for n in take(subscriber, 50)] == list(range(1, 51))
        client.add("late", delay_ns=1, topic="t")
        getattr(real, end)()
        real.start()
        client.add_many([(f"b{i}", 0, "t") for i in range(100)])
        assert [n.seq for n in take(subscriber, 151)] == list(range(51, 202))


def test_an_arena_that_grows_is_followed(client: Client, real: Daemon) -> None:
    with listen("t") as subscriber:
        client.add("a", delay=0, topic="t")
        assert take(subscriber, 1)[0].seq == 1
        real.restart("--capacity", "200000", "--payload-memory", "32M")
        client.add_many([(f"b{i}", 0, "t") for i in range(100)])
        assert [n.seq for n in take(subscriber, 100)] == list(range(2, 102))


def test_without_a_daemon(daemon_dir: object) -> None:
    with pytest.raises(DaemonUnreachable) as caught:
        Client("demo", timeout=0.05)
    assert (caught.value.name, caught.value.waited_s) == ("demo", 0.05)
    with pytest.raises(DaemonUnreachable):
        Subscriber("demo", timeout=0.05)
    with pytest.raises(DaemonUnreachable):
        Admin("demo", timeout=0.05).ping()


def test_a_call_that_never_left_is_taken_back(client: Client, real: Daemon) -> None:
    client.add("first", delay=HOUR_S)
    real.stop()
    eventually(lambda: not connected_to(real.paths.cmd))
    with pytest.raises(DaemonError):
        client.add("second", delay=HOUR_S, timeout=0.05)
    real.start()
    client.add("third", delay=HOUR_S)
    assert client.get("second") is None


def test_a_full_queue_blocks_and_then_refuses(real: Daemon) -> None:
    client = Client("demo", queue_limit=10, timeout=PATIENCE_S)
    for i in range(100):
        client.add(f"k{i}", delay=HOUR_S, wait=False)
    client.flush()
    real.kill()
    for i in range(10):
        client.add(f"more{i}", delay=HOUR_S, wait=False)
    with pytest.raises(QueueFull) as caught:
        client.add("one too many", delay=HOUR_S, wait=False, timeout=0.05)
    assert (caught.value.queued, caught.value.limit) == (10, 10)
    real.start()
    client.close()


# ---- subscribers ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_only_the_chosen_topics_and_namespace(client: Client) -> None:
    with listen("orders") as some, listen() as every, Client("demo", namespace="bank") as bank:
        bank.add("x", delay=0, topic="orders")
        client.add_many([("a", 0, "orders2"), ("b", 0, "orders"), ("c", 0, ""), ("d", 0, "orders")])
        assert {n.key for n in take(some, 2)} == {"b", "d"}
        assert {n.key for n in take(every, 4)} == {"a", "b", "c", "d"}


@pytest.mark.tier("test")
def test_high_water_mark_of_ten_loses_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[tuple[int, int]] = []
    replay = Reader.replay

    def spy(self: Reader, namespace: str, topic: str, first: int, last: int) -> Any:
        replays.append((first, last))
        return replay(self, namespace, topic, first, last)

    monkeypatch.setattr(Reader, "replay", spy)
    with listen("t", high_water_mark=10, transport="zmq") as subscriber:
        for i in range(3000):
            client.add(f"k{i}", delay=0, topic="t", payload=bytes(1000))
        notices = take(subscriber, 3000)
    assert [n.seq for n in notices] == list(range(1, 3001))
    assert {n.key for n in notices} == {f"k{i}" for i in range(3000)}
    assert replays, "no notice was dropped, so the test did not test the replay"


@pytest.mark.tier("test")
def test_notices_missed_while_disconnected_are_recovered(client: Client, real: Daemon) -> None:
    with listen("t", transport="zmq") as subscriber:
        client.add_many([(f"a{i}", 0, "t") for i in range(10)])
        take(subscriber, 10)
        disconnected(subscriber, real, lambda: client.add_many([("b", 0, "t"), ("c", 0, "t")]))
        assert [n.seq for n in take(subscriber, 2)] == [11, 12]


@pytest.mark.tier("test")
def test_a_subscriber_that_was_overtaken_receives_the_range(daemon: StartDaemon) -> None:
    real = daemon("demo", "--replay-buffer", "1024")
    rows = [(f"k{i}", 0, "t") for i in range(5000)]
    with (
        Client("demo", namespace="shop") as client,
        listen("t", transport="zmq") as subscriber,
    ):
        disconnected(subscriber, real, lambda: client.add_many(rows))
        with pytest.raises(Lagged) as caught:
            subscriber.get(PATIENCE_S)
        assert (caught.value.namespace, caught.value.topic) == ("shop", "t")
        assert caught.value.first_lost == 1
        left = take(subscriber, 5000 - caught.value.last_lost)
        assert [n.seq for n in left] == list(range(caught.value.last_lost + 1, 5001))


def inbox_of(subscriber: Subscriber) -> Inbox:
    assert isinstance(subscriber._inbox, Inbox)
    return subscriber._inbox


def disconnected(subscriber: Subscriber, real: Daemon, act: Callable[[], object]) -> None:
    """Disconnect the subscriber, call `act`, wait until all timers have fired, and connect
    again."""
    socket, _ = inbox_of(subscriber).sockets
    socket.disconnect(real.paths.pub_endpoint)
    act()
    reader = Reader.attach(real.paths)
    with Admin("demo") as admin:
        while reader.metrics.live:
            admin.ping()
    reader.close()
    socket.connect(real.paths.pub_endpoint)


@pytest.mark.usefixtures("way")
def test_a_subscriber_reports_a_new_arena(client: Client, real: Daemon) -> None:
    with listen("t") as subscriber:
        client.add_many([(f"k{i}", 0, "t") for i in range(5)])
        take(subscriber, 5)
        real.stop()
        remove_arena_files(real.paths)
        real.start()
        # a query may be repeated in a new session, so the client replaces its lost session without
        # an error
        client.get("new")
        client.add("new", delay=0, topic="t")
        with pytest.raises(Lagged) as caught:
            subscriber.get(PATIENCE_S)
        assert (caught.value.first_lost, caught.value.last_lost) == (6, 0)
        (notice,) = take(subscriber, 1)
        assert (notice.key, notice.seq) == ("new", 1)


@pytest.mark.usefixtures("way")
def test_a_subscriber_outlives_the_daemon(client: Client, real: Daemon) -> None:
    with listen("t") as subscriber:
        client.add("a", delay=0, topic="t")
        take(subscriber, 1)
        real.stop()
        inbox_of(subscriber)._stream.reconnected()
        assert subscriber.get(0) is None
        real.start()
        client.add("b", delay=0, topic="t")
        assert take(subscriber, 1)[0].seq == 2


@pytest.mark.usefixtures("way")
def test_two_subscribers_and_iteration(client: Client) -> None:
    with listen("t") as one, listen("t") as two:
        client.add_many([(f"k{i}", 0, "t") for i in range(10)])
        for subscriber in (one, two):
            seen = []
            for notice in subscriber:
                seen.append(notice.seq)
                if notice.seq == 10:
                    break
            assert seen == list(range(1, 11))


# ---- asyncio -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.tier("test")
def test_async_client_and_subscriber(real: Daemon) -> None:
    async def scenario() -> list[object]:
        async with (
            AsyncClient("demo", namespace="shop", timeout=PATIENCE_S) as client,
            AsyncSubscriber("demo", namespace="shop", topics=["t"]) as subscriber,
        ):
            infos = await asyncio.gather(
                *(client.add(f"k{i}", delay=0, topic="t") for i in range(1000))
            )
            assert len({info.ticket for info in infos}) == 1000
            keys = []
            async for notice in subscriber:
                keys.append(notice.key)
                if len(keys) == 1000:
                    break
            handle = await client.add("later", delay=HOUR_S, wait=False)
            assert (await handle).key == "later"
            await client.add("packed", delay=HOUR_S, wait=False)
            assert await client.get("packed") is not None
            assert await client.cancel("later") is CancelResult.CANCELLED
            assert (await client.add_many([("x", HOUR_S), ("y", HOUR_S)])).ok
            assert await client.cancel_many(["x", "z"]) == [
                CancelResult.CANCELLED, CancelResult.UNKNOWN,
            ]  # fmt: skip
            assert (await client.add_many([("v", HOUR_S)])).ok
            later = await client.cancel_many(["v"], wait=False)
            await client.settle(later)
            assert later.cancels() == [CancelResult.CANCELLED]
            await client.add("y", delay=1, wait=False)
            with pytest.raises(BatchError):
                await client.flush()
            with pytest.raises(Exists):
                await client.add("y", delay=1)
            assert await subscriber.get(0) is None
            return list(keys)

    assert set(asyncio.run(scenario())) == {f"k{i}" for i in range(1000)}


def test_async_client_survives_a_restart(real: Daemon) -> None:
    async def scenario() -> None:
        async with AsyncClient("demo", namespace="shop", timeout=PATIENCE_S) as client:
            await client.add("before", delay=HOUR_S)
            real.kill()
            waiting = asyncio.create_task(client.add("during", delay=HOUR_S))
            await asyncio.to_thread(real.start)
            assert (await waiting).key == "during"
            with pytest.raises(InvalidTime):
                client.at(5)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("cls", "partitions"), [(AsyncClient, 1), (AsyncPurgatory, 1), (AsyncClient, 4)]
)
def test_an_async_client_without_connect_connects_with_its_first_call(
    daemon: StartDaemon, cls: type[Any], partitions: int
) -> None:
    start_partitioned(daemon, partitions)

    async def scenario() -> None:
        await cls("demo").close()
        for call, arguments in (("add", ["k", HOUR_S]), ("get", ["k"]), ("cancel", ["k"]),
                                ("add_many", [[("k", HOUR_S)]]), ("cancel_many", [["k"]]),
                                ("flush", [])):  # fmt: skip
            client = cls("demo", timeout=PATIENCE_S)
            await getattr(client, call)(*arguments)
            await client.close()
        client = cls("demo", timeout=PATIENCE_S)
        await asyncio.gather(*(client.add(f"k{n}", HOUR_S) for n in range(3)))
        await client.close()

    asyncio.run(scenario())
    with Admin("demo") as admin:
        assert admin.sessions() == []


def test_async_without_a_daemon(daemon_dir: object) -> None:
    async def scenario() -> None:
        with pytest.raises(DaemonUnreachable):
            await AsyncClient("demo", timeout=0.05).connect()
        with pytest.raises(DaemonUnreachable):
            await AsyncSubscriber("demo", timeout=0.05).connect()

    asyncio.run(scenario())


# ---- open and close --------------------------------------------------------------------------


def test_a_closed_client_raises(real: Daemon) -> None:
    client, subscriber = Client("demo"), listen()
    for one in (client, subscriber):
        one.close()
        one.close()
    for use in (client.flush, lambda: client.add("k", 1), subscriber.get):
        with pytest.raises(Closed):
            use()


def test_a_closed_async_client_raises(real: Daemon) -> None:
    async def scenario() -> None:
        async with AsyncClient("demo") as client, AsyncSubscriber("demo") as subscriber:
            await client.close()
            await subscriber.close()
        with pytest.raises(Closed):
            await client.add("k", 1)
        with pytest.raises(Closed):
            await subscriber.get()

    asyncio.run(scenario())


GARBAGE = """
import asyncio, gc, os, time
from purgatoryd.clients import Admin, AsyncClient, Client, Subscriber

async def use():
    client = AsyncClient("demo")
    await client.add("b", 3600)
    return client

ring = [Client("demo"), Subscriber("demo"), Admin("demo"), asyncio.run(use())]
ring[0].add("a", 3600)
ring[2].ping()
ring.append(ring)
del ring
gc.collect()
until_s = time.monotonic() + 30
while len(threads := os.listdir("/proc/self/task")) > 1 and time.monotonic() < until_s:
    time.sleep(0.01)  # a thread that has been joined leaves /proc a moment later
print(len(threads), "thread")
"""


def test_clients_that_nobody_closed_are_closed_as_garbage(real: Daemon) -> None:
    command = (sys.executable, "-c", GARBAGE)
    run = subprocess.run(
        command, env=real.env, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "1 thread\n", "")


def in_child(use: Callable[[], object]) -> str:
    """Return the name of the error that `use` raises in a forked child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            use()
            name = "nothing"
        except PurgatorydError as error:
            name = type(error).__name__
        os.write(writing, name.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        name = pipe.read()
    os.waitpid(pid, 0)
    return name


def test_a_client_used_after_fork_raises(client: Client) -> None:
    with listen() as subscriber:
        for use in (lambda: client.add("k", 1), client.flush, subscriber.get):
            assert in_child(use) == ForkedProcess.__name__
        client.add("still works here", delay=0)
        assert take(subscriber, 1)


def test_a_timeout_keeps_its_figures(client: Client, real: Daemon) -> None:
    os.kill(real.pid, signal.SIGSTOP)
    try:
        with pytest.raises(CallTimeout) as caught:
            client.add("k", delay=HOUR_S, timeout=0.05)
        assert (caught.value.waited_s, caught.value.in_doubt) == (0.05, 1)
    finally:
        os.kill(real.pid, signal.SIGCONT)
    client.flush()
    assert client.cancel("k") is CancelResult.CANCELLED


@pytest.mark.tier("test")
def test_only_a_numa_local_subscriber_moves_its_thread(
    real: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[tuple[int, ...]] = []
    monkeypatch.setattr(subscriber, "pin_numa_local", lambda *where: moves.append(where))
    with Subscriber("demo"):
        assert not moves
    with Subscriber("demo", numa_local=True):
        assert len(moves) == 1

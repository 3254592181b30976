"""Calls with wait=False: their callers pack them into lots, and send full lots themselves."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID

import pytest
from real_daemon import PATIENCE_S, Daemon, eventually
from unconnected import connection_of

from purgatoryd.clients import Admin, CancelResult, Client, Handle
from purgatoryd.clients._pack import Direct, Requests
from purgatoryd.clients.core import MODES
from purgatoryd.clients.lots import Lot
from purgatoryd.clients.packing import PUT, Entry, PendingAdd, PendingCancel
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import BatchError, Closed, Exists, ForkedProcess, QueueFull
from purgatoryd.shm_layout.layout import Status

pytestmark = pytest.mark.tier("test")

StartDaemon = Callable[..., Daemon]
HOUR_S = 3600.0
MANY = 5 * layout.BATCH_RECORDS + 7
"""Number of calls that fill more lots than the window has batches."""


@pytest.fixture
def client(daemon: StartDaemon) -> Iterator[Client]:
    daemon("demo", "--capacity", "100000")
    with Client("demo", timeout=PATIENCE_S) as client:
        yield client


def later(client: Client, count: int, prefix: str = "k") -> list[Handle[Any]]:
    return [
        client.add(f"{prefix}{n}", HOUR_S, topic="t", payload=b"p%d" % n, wait=False)
        for n in range(count)
    ]


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["before the answer", "after the answer"])
def test_each_handle_has_its_own_result(client: Client, asked: str) -> None:
    handles = later(client, MANY)
    if asked == "after the answer":
        client.flush()
        assert all(handle.done for handle in handles)
    found = [handle.result() for handle in handles]
    assert [info.key for info in found] == [f"k{n}" for n in range(MANY)]
    assert [info.payload for info in found] == [b"p%d" % n for n in range(MANY)]
    assert {(info.namespace, info.topic, info.status) for info in found} == {
        ("default", "t", Status.ADDED)
    }
    tickets = [info.ticket for info in found]
    assert tickets == sorted(set(tickets))
    for n in (0, layout.BATCH_RECORDS, MANY - 1):
        armed = client.get(f"k{n}")
        assert armed is not None
        assert (armed.ticket, armed.deadline_boot_ns) == (tickets[n], found[n].deadline_boot_ns)


def test_handles_that_nobody_asks_are_forgotten(client: Client) -> None:
    for n in range(MANY):
        client.add(f"k{n}", HOUR_S, wait=False)
    client.flush()
    gc.collect()
    left = [one for one in gc.get_objects() if isinstance(one, (PendingAdd, Handle))]
    assert len(left) <= 1, "only the call that opened the last lot is known"


def test_a_handle_keeps_the_same_call(client: Client) -> None:
    handle = client.add("k", HOUR_S, wait=False)
    other = client.add("k", HOUR_S, wait=False)
    assert not handle.done
    assert handle.result() == handle.result()
    assert handle.done
    with pytest.raises(Exists):
        other.result()
    client.flush()


def test_plain_and_converted_arguments_share_a_lot(client: Client) -> None:
    keys: list[Any] = ["text", b"bytes", UUID(int=7)]
    delays: list[Any] = [HOUR_S, 3600, timedelta(hours=1)]
    handles: list[Handle[Any]] = [
        client.add(key, delay, wait=False) for key in keys for delay in delays
    ]
    handles += [client.cancel(key, wait=False) for key in keys]
    assert [handle.result().key for handle in handles[::3][:3]] == keys
    for handle in [handles[n] for n in (1, 2, 4, 5, 7, 8)]:
        with pytest.raises(Exists):
            handle.result()
    assert [handle.result() for handle in handles[9:]] == [CancelResult.CANCELLED] * 3
    client.flush()


@pytest.mark.parametrize("place", [0, 1500, MANY - 1])
def test_flush_reports_a_refusal_that_nobody_has_read(client: Client, place: int) -> None:
    client.add(f"k{place}", HOUR_S)
    handles = later(client, MANY)
    with pytest.raises(BatchError) as caught:
        client.flush()
    assert caught.value.refusals == ((f"k{place}", Status.EXISTS),)
    with pytest.raises(Exists):
        handles[place].result()
    client.flush()
    others = [handle.result().status for n, handle in enumerate(handles) if n != place]
    assert others == [Status.ADDED] * (MANY - 1)


def test_flush_does_not_report_a_refusal_that_was_read(client: Client) -> None:
    client.add("k7", HOUR_S)
    handle = later(client, MANY)[7]
    with pytest.raises(Exists):
        handle.result()
    client.flush()


# ---- order -------------------------------------------------------------------------------------


def test_calls_of_a_thread_keep_their_order(client: Client) -> None:
    for n in range(600):
        key = f"k{n % 7}"
        client.cancel(key, wait=False)
        client.add(key, HOUR_S, payload=b"%d" % n, wait=False)
        if n % 50 == 20:
            client.add_many([(key, HOUR_S, "t", b"row")], mode="replace", wait=False)
            client.cancel(key, wait=False)
            client.add(key, HOUR_S, payload=b"again", wait=False)
            armed = client.get(key)
            assert armed is not None
            assert armed.payload == b"again"
        elif n % 50 == 40:
            assert client.add(key, HOUR_S, mode="replace").status == Status.REPLACED
    client.flush()


def test_a_new_time_divides_calls(daemon: StartDaemon) -> None:
    daemon("demo", "--clock", "virtual")
    with Client("demo", timeout=PATIENCE_S) as client:
        handles = []
        for second in range(1, 40):
            client.at(second * 10**9)
            handles.append(client.add(f"k{second}", 5, wait=False))
        found = [handle.result().deadline_boot_ns for handle in handles]
        assert found == [(second + 5) * 10**9 for second in range(1, 40)]


def test_calls_of_threads_get_their_own_results(client: Client) -> None:
    failures: list[str] = []

    def work(name: str) -> None:
        handles = []
        for n in range(3 * layout.BATCH_RECORDS):
            key = f"{name}{n % 100}"
            handles.append((key, client.add(key, HOUR_S, mode="replace", wait=False)))
            if n % 700 == 0:
                armed = client.get(key)
                if armed is None or armed.ticket != handles[-1][1].result().ticket:
                    failures.append(key)
        failures.extend(key for key, handle in handles if handle.result().key != key)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.flush()
    assert failures == []


# ---- the engine ----------------------------------------------------------------------------------


def test_a_lone_call_is_sent(client: Client) -> None:
    handle = client.add("k", HOUR_S, wait=False)
    with Client("demo", timeout=PATIENCE_S) as other:
        eventually(lambda: other.get("k") is not None)
    eventually(lambda: handle.done)


def test_callers_send_full_lots(client: Client) -> None:
    later(client, MANY)
    client.flush()
    client.cancel("none")
    direct = client._core.direct
    assert direct is not None
    # A caller sends a lot only while no other thread uses the connection.
    before, names = direct.lots, count()
    eventually(lambda: later(client, MANY, f"again{next(names)}:") and direct.lots > before)


def test_the_limit_of_the_queue_holds(daemon: StartDaemon) -> None:
    real = daemon("demo", "--capacity", "100000")
    limit = 3 * layout.BATCH_RECORDS + 5
    client = Client("demo", queue_limit=limit, timeout=PATIENCE_S)
    later(client, MANY)
    client.flush()
    real.kill()
    later(client, limit, "more")
    with pytest.raises(QueueFull) as caught:
        client.add("one too many", HOUR_S, wait=False, timeout=0.05)
    assert (caught.value.queued, caught.value.limit) == (limit, limit)
    real.start()
    client.close()


def test_no_call_is_lost_or_made_twice_when_the_daemon_is_killed(daemon: StartDaemon) -> None:
    real = daemon("demo", "--capacity", "100000")
    with Client("demo", timeout=PATIENCE_S) as client:
        killed = threading.Timer(0.02, real.kill)
        killed.start()
        handles = later(client, 5 * MANY)
        killed.join()
        real.start()
        found = [handle.result().ticket for handle in handles]
        assert len(set(found)) == len(handles)
        client.flush()
        assert client.cancel_many([f"k{n}" for n in range(5 * MANY)]) == [
            CancelResult.CANCELLED
        ] * (5 * MANY)


@pytest.mark.parametrize("name", ["key", "delay"])
def test_an_argument_that_is_given_twice_is_refused(client: Client, name: str) -> None:
    untyped: Any = client
    client.add("first", HOUR_S, wait=False)
    named = {"key": "b", "delay": HOUR_S}
    with pytest.raises(TypeError, match=f"multiple values for argument '{name}'"):
        untyped.add("a", *([1.0] if name == "delay" else []), wait=False, **{name: named[name]})
    with pytest.raises(TypeError, match="multiple values for argument 'key'"):
        untyped.cancel("first", key="b", wait=False)
    client.flush()
    assert client.cancel_many(["first", "a", "b"]) == [
        CancelResult.CANCELLED, CancelResult.UNKNOWN, CancelResult.UNKNOWN
    ]  # fmt: skip


def test_a_closed_client_refuses_calls(client: Client) -> None:
    client.add("first", HOUR_S, wait=False)
    client.close()
    for _ in range(3):
        with pytest.raises(Closed):
            client.add("second", HOUR_S, wait=False)
        with pytest.raises(Closed):
            client.cancel("first", wait=False)


def test_a_child_does_not_use_the_lot_of_its_parent(client: Client) -> None:
    client.add("first", HOUR_S, wait=False)
    child = os.fork()
    if child == 0:
        try:
            client.add("second", HOUR_S, wait=False)
        except ForkedProcess:
            os._exit(7)
        finally:
            os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    client.flush()
    assert client.get("second") is None


def test_partitions_have_lots_of_their_own(daemon: StartDaemon) -> None:
    daemon("demo", "--shards", "2", "--capacity", "10000")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("clicks", 4)
    with Client("demo", namespace="clicks", timeout=PATIENCE_S) as client:
        handles = later(client, 2000)
        assert [handle.result().key for handle in handles] == [f"k{n}" for n in range(2000)]
        assert all(len(one.packer.lots) >= 1 for one in client._core.connections)


# ---- a lot ---------------------------------------------------------------------------------------


class Queue(list[Any]):
    """The queue of an engine that does not run."""

    def put(self, request: object) -> None:
        self.append(request)

    def empty(self) -> bool:
        return not self


def lot_of(limit: int = 3) -> tuple[Lot, Requests, list[Any]]:
    connection, noted = connection_of("demo", "shop"), list[Any]()
    requests = Requests(Queue(), None, -1)
    return Lot(requests, connection, noted.append, limit, Handle), requests, noted


def entry(lot: Lot, key: str) -> Entry[PendingAdd]:
    pending = PendingAdd(key, None, "shop", "t", b"p")
    fields = (PUT, MODES["error"], wire.encode_key(key)[0], key.encode(), 2, 0, b"p", b"", 5, 0)
    return lot._connection.entry(pending, lot._connection.names.of_topic("t"), lambda: None, fields)


class Appended(deque[Lot]):
    """Lots to which another thread appends a lot while they are read for the first time."""

    other: Lot | None = None

    def __iter__(self) -> Iterator[Lot]:
        lots = super().__iter__()
        if self.other is not None:
            self.append(self.other)
            self.other = None
        return lots


def test_lots_are_counted_while_a_caller_opens_another() -> None:
    lot, other = lot_of()[0], lot_of()[0]
    for one in (lot, other):
        one.add(entry(one, "a"))
    packer = lot._connection.packer
    packer.lots = lots = Appended([lot])
    lots.other = other
    assert packer.collecting == 2


def test_a_lot_is_open_until_it_is_full() -> None:
    lot, _, _ = lot_of(2)
    assert [lot.add(entry(lot, key)) for key in "abc"] == [True, True, False]
    assert len(lot) == 2
    assert lot.row(1) == (PUT, wire.encode_key("b")[0], b"b", b"\x04\x01shopt", b"p")
    with pytest.raises(IndexError):
        lot.row(2)


@pytest.mark.parametrize("end", ["request", "shut", "collected"])
def test_a_lot_ends(end: str) -> None:
    lot, requests, _ = lot_of()
    requests.open("the lot")
    assert lot.add(entry(lot, "a"))
    if end == "request":
        requests.put("another request")
    elif end == "shut":
        lot.shut()
    else:
        assert lot.batch().count == 1
    assert not lot.add(entry(lot, "b"))
    assert len(lot) == 1


def test_the_request_of_another_lot_does_not_end_a_lot() -> None:
    lot, requests, _ = lot_of()
    requests.open("the lot")
    requests.open("a lot of another partition")
    assert lot.add(entry(lot, "a"))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collections begin between bytecodes")
def test_a_collection_within_a_call_may_end_its_lot() -> None:
    client: Any = object.__new__(Client)
    client._lot = lot_of()[0]
    client._lot._connection.names.of_topic("default")
    connection = weakref.ref(client._lot._connection)
    alive = list[bool]()

    def without_lot(phase: str, _: dict[str, int]) -> None:
        client._lot = None
        alive.append(connection() is not None)

    before = gc.get_threshold()
    gc.callbacks.append(without_lot)
    gc.set_threshold(1)
    try:
        handle = client.add("k", HOUR_S, wait=False)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(without_lot)
    assert alive
    assert all(alive)
    assert handle._pending.key == "k"


def test_some_results_come_before_the_others() -> None:
    lot, _, noted = lot_of()
    waiters = [entry(lot, key) for key in "abc"]
    assert all(lot.add(one) for one in waiters)
    batch = lot.batch()
    assert batch.settle_some is not None
    exists, added = (wire.RESULT.pack(9 << 8 | status, 5) for status in (Status.EXISTS, 1))
    batch.settle_some([0, 2], exists + added)
    assert [one.pending.done for one in waiters] == [True, False, True]
    batch.settle(exists + added + added)
    assert noted == [waiters[0].pending]
    assert [one.pending.failed for one in waiters] == [True, False, False]
    assert [lot.of(n) for n in range(3)] == [one.pending for one in waiters]


def test_wrong_calls_raise() -> None:
    lot, requests, _ = lot_of()
    one = entry(lot, "a")
    fields: Any = (one.name, *one.fields)
    with pytest.raises(TypeError):
        lot.record("no call", fields)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        lot.record(one.pending, fields[:4])
    with pytest.raises(ValueError, match="too long"):
        lot.record(one.pending, (*fields[:4], bytes(256), *fields[5:]))
    assert len(lot) == 0
    assert lot.calls == {}
    client: Any = object.__new__(Client)
    with pytest.raises(TypeError):
        client._lot = "no lot"
    client._lot = None
    direct = Direct(requests, lot._connection, "shop", {}, b"", MODES, 10**9, 0, False)
    direct.stream(lot)
    assert direct.take_back() is None
    assert isinstance(PendingCancel("k", None), PendingCancel)

"""Operations by columns: checks of the columns, outcomes, and the exchange with a daemon."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from partitioned import start_partitioned
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually

from purgatoryd.clients import (
    AllOf,
    AsyncPurgatory,
    CallTimeout,
    Cause,
    Closed,
    Exists,
    InvalidArgument,
    InvalidCondition,
    InvalidKey,
    InvalidPayload,
    InvalidRows,
    InvalidTime,
    Operations,
    Partitioned,
    ProtocolError,
    Purgatory,
    Status,
    Subscriber,
)
from purgatoryd.clients._pack import Tickets
from purgatoryd.clients.operations import Book
from purgatoryd.clients.packing import Builder, Names
from purgatoryd.clients.watch_columns import (
    Watches,
    advance_columns,
    builders,
    watch_columns,
)
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.layout import ClockKind, Condition, KeyType, Op, TimeKind
from purgatoryd.shm_layout.wire import Key, RawOutcome

pytestmark = pytest.mark.tier("all")

HOUR_S = 3600.0
NAMES = Names(b"broker")


def columns(rows: int, first: int = 0, **others: Any) -> dict[str, Any]:
    numbers = np.arange(first, first + rows).astype("U")
    given = {
        "key": np.char.add("op:", numbers), "watch_key": np.char.add("key:", numbers),
        "timeout": np.full(rows, HOUR_S),
    }  # fmt: skip
    return given | others


def table(rows: int) -> Operations:
    return Operations(watch_columns(NAMES, columns(rows), ClockKind.BOOT, 0))


def packed(watches: Watches) -> list[bytes]:
    return [builder.body()[3] for builder in builders(watches.source)]


def answers(*tickets: int, status: int = Status.ADDED) -> bytes:
    """Return the answers to watches that were armed."""
    return b"".join(wire.RESULT.pack(ticket << 8 | status, 0) for ticket in tickets)


def places(*rows: int) -> bytes:
    return np.array(rows, "i8").tobytes()


def outcomes(*tickets: int, cause: int = Cause.SATISFIED, keys: int = 1) -> bytes:
    """Return the body of an OUTCOMES message."""
    heads = [
        wire.OUTCOME.pack(ticket << 8 | cause, 9, 4, 5, 0, 0, 2, keys, 1, 3, 0, ticket + 100)
        for ticket in tickets
    ]
    area = [b"key" + b"pp" + b"".join(t.to_bytes(8, "little") for _ in range(keys)) + b"\1\0"
            for t in tickets]  # fmt: skip
    return b"".join(heads + area)


# ---- checks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "error"),
    [
        ({"timeout": np.ones(2)}, InvalidRows),
        ({"key": "abc"}, InvalidRows),
        ({"watch_key": b"abc"}, InvalidRows),
        ({"timeout": np.array([1.0, np.nan, 1.0])}, InvalidTime),
        ({"timeout": np.array([1.0, np.inf, 1.0])}, InvalidTime),
        ({"timeout": ["1", "2", "3"]}, InvalidArgument),
        ({"timeout": [1.0, None, 2.0]}, InvalidArgument),
        ({"target": np.array([1, -1, 1])}, InvalidCondition),
        ({"target": np.array([1, 2**63 - 1, 1])}, InvalidCondition),
        ({"target": np.array([1, 2**64 - 1, 1], "u8")}, InvalidCondition),
        ({"target": np.array([1.0, 2.0, 3.0])}, InvalidCondition),
        ({"target": [1, 2**70, 1]}, InvalidCondition),
        ({"target": [True, False, True]}, InvalidCondition),
        ({"target": np.ones((3, 2), "i8")}, InvalidRows),
        ({"own": np.ones(3)}, InvalidRows),
        ({"watch_key": ["a", "", "c"]}, InvalidKey),
        ({"key": np.array(["a", "b" * 256, "c"])}, InvalidKey),
        ({"key": [1, 2, 3]}, InvalidKey),
        ({"payload": np.array([b"a", b"b" * 65_537, b"c"])}, InvalidPayload),
        ({"payload": ["a", "b", "c"]}, InvalidPayload),
        ({"topic": ["a", "b" * 128, "c"]}, InvalidArgument),
        ({"delay": np.ones(3)}, InvalidRows),
    ],
)  # fmt: skip
def test_bad_columns_raise_a_clear_error(others: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        packed(watch_columns(NAMES, columns(3, **others), ClockKind.BOOT, 0))
    assert str(caught.value)


@pytest.mark.parametrize("exotic", [False, True])
def test_columns_pack_the_same_bytes_as_rows(*, exotic: bool) -> None:
    """`exotic`: no row is plain, so Python converts each."""
    topics = ["t", None, "t"]
    waits = [timedelta(seconds=1), 2, 3.5]
    given = columns(
        3, target=[4, 5, 6], payload=[b"", b"p", b"pq"], topic=topics, own=[True, False, False],
        timeout=waits if exotic else [1.0, 2, 3.5],
    )  # fmt: skip
    if exotic:
        given["payload"] = [bytearray(payload) for payload in given["payload"]]
    builder = Builder()
    for row, wait_ns in enumerate((10**9, 2 * 10**9, 35 * 10**8)):
        name = NAMES.of_key if topics[row] is None else NAMES.of_topic("t")
        watched = wire.encode_watch_key(
            given["watch_key"][row], given["target"][row], own=given["own"][row]
        )
        builder.watch(
            name, Condition.ALL, KeyType.STR, given["key"][row].encode(), TimeKind.BOOT,
            1000 + wait_ns, bytes(given["payload"][row]), 0, watched, topics[row] is not None,
        )  # fmt: skip
    assert packed(watch_columns(NAMES, given, ClockKind.BOOT, 1000)) == [builder.body()[3]]


def test_advances_pack_the_same_bytes_as_rows() -> None:
    keys: list[Key] = ["a", b"b", "c" * 255]
    builder = Builder()
    for value, key in enumerate(keys):
        builder.trigger(NAMES.of_key, Op.ADVANCE_KEY, *wire.encode_key(key), value)
    source = advance_columns(NAMES, {"key": keys, "watermark": np.arange(3)}).source
    assert [one.body()[3] for one in builders(source)] == [builder.body()[3]]


def test_columns_may_change_after_the_call() -> None:
    given = columns(2)
    watches = watch_columns(NAMES, given, ClockKind.BOOT, 0)
    given["key"][:], given["watch_key"][:] = "x", "y"
    assert (watches.key(1), watches.watch_key(1)) == ("op:1", "key:1")


# ---- outcomes ------------------------------------------------------------------------------


def test_outcomes_are_found_by_ticket_once() -> None:
    tickets, one, two = Tickets(), table(3), table(2)
    assert tickets.add(one, answers(20, 21, 22), places(0, 1, 2)) == 20
    tickets.add(two, answers(10, 11), places(1, 0))  # resent rows, with lower tickets
    found = tickets.receive(outcomes(22, 10, 99, 22), 4)
    assert isinstance(found, tuple)
    assert (found[1], tickets.open, tickets.touched) == ([2], 3, [one, two])
    acks = list(wire.ACK.iter_unpack(found[0]))
    assert acks == [(22, 0, 122), (10, 0, 110), (22, 0, 122)]
    assert (one._order(0), two._order(0)) == (places(2), places(1))
    tickets.touched.clear()
    assert tickets.receive(outcomes(22), 1) == (wire.ACK.pack(22, 0, 122), [])
    assert (tickets.touched, one.open, one._ended) == ([], 2, 1)


def test_answers_that_come_twice_count_once() -> None:
    tickets, one = Tickets(), table(3)
    refused = wire.RESULT.pack(Status.FULL, 0)
    for first in (20, 0):
        assert tickets.add(one, answers(20, 21) + refused, places(0, 1, 2)) == first
    assert (tickets.open, one.open, one.refused) == (2, 2, [(2, Status.FULL)])
    with pytest.raises(ValueError, match="no such row"):
        tickets.add(one, answers(23), places(3))
    with pytest.raises(ValueError, match="do not match"):
        tickets.add(one, answers(23), places(0, 1))


def test_forgetting_all_operations_leaves_none_open() -> None:
    tickets, one = Tickets(), table(3)
    tickets.add(one, answers(20, 21, 22), places(0, 1, 2))
    tickets.receive(outcomes(21), 1)
    tickets.clear()
    assert (tickets.open, one.open, one._ended, tickets.has(20)) == (0, 0, 1, False)
    assert tickets.touched == [one]


def test_the_table_of_tickets_keeps_only_open_operations() -> None:
    tickets, tables = Tickets(), []
    for first in range(1, 100_001, 1000):
        many = table(1000)
        numbers = range(first, first + 1000)
        tickets.add(many, answers(*numbers), np.arange(1000).tobytes())
        for start in range(0, 999, 500):
            some = numbers[start : min(start + 500, 999)]
            tickets.receive(outcomes(*some), len(some))
        tables.append(many)
    assert (tickets.open, {one.open for one in tables}) == (100, {1})
    assert tickets.places < 10_000
    tickets.touched.clear()
    tickets.receive(outcomes(1000), 1)
    assert (tickets.touched, tables[0]._order(999)) == ([tables[0]], places(999))


def test_malformed_outcomes_are_refused() -> None:
    body = outcomes(1, 2)
    for broken in (body[:-1], body[:127], b""):
        with pytest.raises(ProtocolError):
            Book(lambda: None).receive(broken, 2)
    found = Tickets().receive(outcomes(1, keys=2), 1)
    assert found == (b"", [0])


@pytest.mark.parametrize("seed", range(20))
def test_damaged_outcomes_are_read_as_python_reads_them(seed: int) -> None:
    """Both decoders read the same outcomes from any bytes, or both refuse the message."""
    rng = random.Random(seed)
    for _ in range(200):
        count = rng.randint(0, 4)
        body = bytearray(outcomes(*range(1, count + 1), keys=rng.randint(1, 2)))
        for _ in range(rng.randint(0, 3)):
            if body:
                body[rng.randrange(len(body))] = rng.choice([0, 1, 2, 255, rng.randrange(256)])
        data = bytes(body[: rng.choice([len(body), rng.randint(0, len(body))])])
        tickets = Tickets()
        tickets.add(table(4), answers(1, 2, 3, 4), places(0, 1, 2, 3))
        found = tickets.receive(data, count)
        if isinstance(found, int):
            assert found > len(data)
            with pytest.raises(ProtocolError):
                wire.decode_outcomes(data, count)
            continue
        with suppress(ProtocolError):  # a key that is no key
            raws = wire.decode_outcomes(data, count)
            known = [n for n, raw in enumerate(raws) if n not in found[1]]
            assert [raws[n].ticket for n in known] == [
                ticket for ticket, _, _ in wire.ACK.iter_unpack(found[0])
            ]
            assert all(len(raws[n].watermarks) == 1 for n in known)
    with pytest.raises(ValueError, match="cannot have -1 outcomes"):
        Tickets().receive(b"", -1)


def test_an_outcome_before_the_answer_is_kept_for_its_row() -> None:
    book, many = Book(lambda: None), table(2)
    book.expect("batch")
    book.receive(outcomes(7), 1)
    book.armed_rows("batch", many, answers(7, 8), places(0, 1))
    book.work()
    assert (many.causes.tolist(), many.open, book.open) == ([Cause.SATISFIED, 0], 1, 1)
    book.take([RawOutcome(8, Cause.EXPIRED, 9, 4, 5, 0, 0, 3, "w", b"", (0,), (0,), ())])
    book.work()
    assert (many.done, many[1] and many[1].missing) == (True, ["key:1"])


def test_a_table_and_its_tickets_are_collected() -> None:
    tickets, one = Tickets(), table(1)
    tickets.add(one, answers(20), places(0))
    one.add_done_callback(lambda *_, cycle=tickets: cycle)  # a cycle
    gone = weakref.ref(one)
    del tickets, one
    gc.collect()
    assert gone() is None


# ---- with a daemon -------------------------------------------------------------------------


@pytest.fixture
def demo(daemon: StartDaemon) -> Daemon:
    return daemon("demo")


@pytest.fixture
def p(demo: Daemon) -> Iterator[Purgatory]:
    with Purgatory("demo", namespace="broker", timeout=PATIENCE_S) as purgatory:
        yield purgatory


def test_columns_end_once_and_callbacks_get_each_row_once(p: Purgatory) -> None:
    rows, seen, lock = 3000, [], threading.Lock()

    def note(operations: Operations, ended: Any) -> None:
        with lock:
            seen.extend(ended.tolist())

    operations = p.watch_many(columns(rows, target=np.arange(rows) % 5 + 1, topic=["t"] * rows))
    operations.add_done_callback(note)
    assert (operations.refused, operations.open, p.operations) == ([], rows, rows)
    assert len(set(operations.tickets.tolist())) == rows
    keys = columns(rows)["watch_key"]
    assert p.advance_many({"key": keys, "watermark": np.full(rows, 3)}).sum() == rows * 3 // 5
    with pytest.raises(CallTimeout):
        operations.wait(0.01)
    p.advance_many({"key": keys.tolist(), "watermark": np.full(rows, 5)})
    operations.wait(PATIENCE_S)
    p.flush()
    operations.add_done_callback(note)
    eventually(lambda: len(seen) == 2 * rows)  # the purgatory's thread runs the first callback
    assert sorted(seen) == sorted([*range(rows)] * 2)
    assert set(operations.causes.tolist()) == {Cause.SATISFIED}
    assert (operations.ended_boot_ns >= operations.armed_boot_ns).all()
    assert operations.watermarks.tolist() == [3 if n % 5 < 3 else 5 for n in range(rows)]
    outcome = operations[7]
    assert outcome is not None
    assert (outcome.cause, outcome.condition) == ("satisfied", AllOf({"key:7": 3}, own=[]))
    assert p.operations == 0


def test_every_cause_reaches_its_row(p: Purgatory) -> None:
    times = np.array([HOUR_S, HOUR_S, HOUR_S, -1.0, HOUR_S])
    operations = p.watch_many(columns(5, timeout=times, own=[True] * 5))
    p.fail("key:0", 6)
    p.cancel("op:1")
    p.advance("key:2", 1)
    p.advance("key:4", 1)
    operations.wait(PATIENCE_S)
    wanted = [Cause.FAILED, Cause.CANCELLED, Cause.SATISFIED, Cause.EXPIRED, Cause.SATISFIED]
    assert operations.causes.tolist() == wanted
    assert operations.errors.tolist() == [6, 0, 0, 0, 0]
    failed, expired = operations[0], operations[-2]
    assert failed is not None
    assert expired is not None
    assert (failed.failed, expired.missing) == (["key:0"], ["key:3"])
    with pytest.raises(InvalidArgument):
        operations[5]


def test_rows_are_refused_one_by_one(p: Purgatory) -> None:
    p.watch("op:1", AllOf({"other": 1}), HOUR_S)
    operations = p.watch_many(columns(3))
    assert operations.refused == [(1, Status.EXISTS)]
    assert (operations.open, operations.tickets[1]) == (2, 0)
    with pytest.raises(Exists):
        operations[1]
    assert p.advance_many({"key": ["key:0", "key:2"], "watermark": [1, 1]}).tolist() == [1, 1]
    operations.wait(PATIENCE_S)


def test_bad_columns_change_nothing(p: Purgatory) -> None:
    for bad in ({"target": [1, -1]}, {"timeout": [1.0, float("nan")]}, {"key": ["a", "b" * 256]}):
        with pytest.raises(InvalidArgument):
            p.watch_many(columns(2, **bad))
    mapping: dict[str, int] = {"key": 5, "watermark": 7}  # keys of these names
    assert p.advance_many(mapping) == [0, 0]
    p.forget("key")
    marks: tuple[dict[str, list[Any]], ...]
    marks = ({"key": ["a"], "watermark": [1, 2]}, {"key": ["a"], "watermark": [-1]},
             {"key": ["a"], "watermark": [0.5]}, {"key": ["a"], "mark": [1]})  # fmt: skip
    for broken in marks:
        with pytest.raises(InvalidArgument):
            p.advance_many(broken)
    assert (p.operations, p.get("op:0"), p.get("a")) == (0, None, None)
    assert len(p.watch_many(columns(0))) == 0
    assert p.advance_many({"key": [], "watermark": []}).tolist() == []


def test_an_inbox_that_is_full_refuses_rows(daemon: StartDaemon) -> None:
    daemon("demo", "--inbox", "64")
    with Purgatory("demo", timeout=2) as p:
        operations = p.watch_many(columns(100))
        assert (operations.open, len(operations.refused)) == (64, 36)
        assert {status for _, status in operations.refused} == {Status.BUSY}


def test_closing_ends_the_wait(demo: Daemon) -> None:
    p = Purgatory("demo", timeout=PATIENCE_S)
    operations = p.watch_many(columns(10))
    p.close()
    with pytest.raises(Closed):
        operations.wait(PATIENCE_S)


def test_asyncio_columns(demo: Daemon) -> None:
    async def main() -> None:
        async with AsyncPurgatory("demo", timeout=PATIENCE_S) as p:
            seen: list[int] = []
            operations = await p.watch_many(columns(2000))
            operations.add_done_callback(lambda _, rows: seen.extend(rows.tolist()))
            with pytest.raises(CallTimeout):
                await operations.wait(0.01)
            keys = columns(2000)["watch_key"]
            ended = await p.advance_many({"key": keys, "watermark": np.ones(2000, "i8")})
            await operations
            assert (ended.sum(), sorted(seen)) == (2000, [*range(2000)])

    asyncio.run(main())


def test_columns_over_a_restart(demo: Daemon) -> None:
    with Purgatory("demo", timeout=PATIENCE_S) as p:
        operations = p.watch_many(columns(500))
        demo.kill()
        demo.start()
        keys = columns(500)["watch_key"]
        assert p.advance_many({"key": keys, "watermark": np.ones(500, "i8")}).sum() == 500
        operations.wait(PATIENCE_S)
        assert set(operations.causes.tolist()) == {Cause.SATISFIED}


def test_columns_reach_several_partitions(daemon: StartDaemon) -> None:
    start_partitioned(daemon, 4)
    with Purgatory("demo", timeout=PATIENCE_S) as p:
        rows = columns(200)
        same = rows["key"]  # a key and an equal watch key are in one partition
        operations = p.watch_many(rows | {"watch_key": same, "target": np.arange(200) + 1})
        assert (operations.refused, operations.open) == ([], 200)
        ended = p.advance_many({"key": same, "watermark": np.arange(200) + np.arange(200) % 2})
        assert ended.tolist() == [n % 2 for n in range(200)]
        p.advance_many({"key": same[::2], "watermark": np.full(100, 999)})
        operations.wait(PATIENCE_S)
        assert operations.watermarks.tolist() == [n + 1 if n % 2 else 999 for n in range(200)]
        outcome = operations[6]
        assert outcome is not None
        assert outcome.watermarks == {"op:6": 999}
        with pytest.raises(Partitioned):
            p.watch_many(columns(200, first=1000))
        assert p.operations == 0


def test_columns_publish_notices(p: Purgatory) -> None:
    with Subscriber("demo", namespace="broker", topics=["ends"]) as notices:
        p.watch_many(columns(2, topic=["ends", None], timeout=[-1.0, -1.0]))
        notice = notices.get(timeout=PATIENCE_S)
        assert notice is not None
        assert notice.key == "op:0"


class Interrupted(Exception):
    """Raised by a signal handler."""


@pytest.mark.tier("test")
def test_an_interrupted_wait_can_be_repeated(p: Purgatory) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    operations = p.watch_many(columns(10))
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Interrupted):
            operations.wait(PATIENCE_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    p.advance_many([(f"key:{n}", 1) for n in range(10)])
    operations.wait(PATIENCE_S)
    assert (operations.causes == Cause.SATISFIED).all()


@pytest.mark.tier("test")
def test_a_cancelled_wait_can_be_repeated(demo: Daemon) -> None:
    async def run() -> None:
        async with AsyncPurgatory("demo", namespace="broker", timeout=PATIENCE_S) as p:
            operations = await p.watch_many(columns(10))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(operations.wait(PATIENCE_S), 0.05)
            await p.advance_many([(f"key:{n}", 1) for n in range(10)])
            await operations
            assert (operations.causes == Cause.SATISFIED).all()

    asyncio.run(run())

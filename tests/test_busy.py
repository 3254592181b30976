"""BUSY: clients repeat refused records in their order, or raise Busy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import random
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast
from uuid import UUID

import numpy as np
import purgatory_driver as pd
import pytest
from fault_driver import Gate, build_library
from purgatory_driver import ALL, Answer, Key, Owner, Purgatory
from real_daemon import PATIENCE_S, StartDaemon, eventually

from purgatoryd.clients import (
    AllOf,
    AsyncClient,
    BulkLoad,
    Busy,
    CallTimeout,
    CancelResult,
    Client,
)
from purgatoryd.clients.batch import Batch, Outcome, Partial
from purgatoryd.clients.conditions import encode
from purgatoryd.clients.packing import Builder, Entry, Packer, Pending, PendingCount
from purgatoryd.clients.retries import Retries, rows_of
from purgatoryd.clients.session import Session
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import DaemonError, MessageRefused, SessionExpired
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import KeyType, Message, Op, PutMode, Status, WireError

pytestmark = pytest.mark.tier("check")

HOUR_NS, HOUR_S = 3_600 * 10**9, 3600.0
SMALL = ("--wal-buffer-bytes", "4M")


# ---- the daemon ------------------------------------------------------------------------------


@pytest.fixture
def core() -> Iterator[Purgatory]:
    core = Purgatory(inbox_max=2)
    yield core
    core.check()


def full(core: Purgatory) -> Owner:
    """Return an owner with the maximum number of unacknowledged outcomes."""
    owner = Owner(core)
    owner.send(*(pd.watch(b"%d" % n, ALL, [Key(b"full", 0)]) for n in range(2)))
    return owner


def found(answers: list[Answer]) -> list[Status]:
    return [Status(one.status) for one in answers]


def refused_watch() -> pd.Command:
    return pd.watch(b"op", ALL, [Key(b"w1", 1), Key(b"w2", 1)])


def test_later_records_on_a_key_of_a_busy_record_are_busy(core: Purgatory) -> None:
    owner = full(core)
    touching = [
        pd.cancel(b"op"), pd.put(b"op", HOUR_NS), pd.complete(b"op", 1), pd.advance(b"w1", 1),
        pd.bump(b"w2", 1), pd.cancel_for_key(b"w1"), pd.watch(b"op2", ALL, [Key(b"w2", 9)]),
        pd.cancel(b"op2"),
    ]  # fmt: skip
    others = [pd.put(b"w1", HOUR_NS), pd.put(b"other", HOUR_NS), pd.advance(b"w3", 1)]
    answers = owner.send(refused_watch(), *touching, *others)
    assert found(answers) == [Status.BUSY] * 9 + [Status.ADDED] * 2 + [Status.DONE]
    assert found(owner.again().answers) == found(answers), "a repeated batch gets the same answer"


def test_batches_in_flight_do_not_overtake_a_busy_record(core: Purgatory) -> None:
    owner = full(core)
    owner.send(refused_watch())
    for owner.behind in (1, 2, 3):
        answers = owner.send(pd.advance(b"w1", 1), pd.put(b"%d!" % owner.behind, HOUR_NS))
        assert found(answers) == [Status.BUSY, Status.ADDED]
    core.rebuild(0)
    owner.behind = 3
    assert found(owner.send(pd.cancel(b"op"))) == [Status.BUSY], "a restart keeps the answer"
    owner.behind = 0
    assert found(owner.send(pd.advance(b"w1", 1), pd.cancel(b"op"))) == [
        Status.DONE, Status.UNKNOWN,
    ]  # fmt: skip


def test_a_busy_record_of_a_later_batch_keeps_the_keys_busy(core: Purgatory) -> None:
    owner = full(core)
    owner.send(refused_watch())
    owner.behind = 1
    owner.send(pd.watch(b"second", ALL, [Key(b"w9", 1)]))
    assert found(owner.send(pd.cancel(b"op"), pd.cancel(b"second"))) == [Status.BUSY] * 2


def test_a_namespace_that_is_not_there_is_busy_while_a_key_is(core: Purgatory) -> None:
    """Before the client repeats the busy record, the missing namespace could be created, in any row
    of the table."""
    owner = full(core)
    unborn = pd.cancel(b"x", name=1)
    assert found(owner.send(unborn, refused_watch(), unborn)) == [
        Status.UNKNOWN, Status.BUSY, Status.BUSY,
    ]  # fmt: skip


@pytest.mark.parametrize("behind", [layout.WINDOW, 2, 2**64 - 1])
def test_an_impossible_distance_of_a_batch_is_malformed(core: Purgatory, behind: int) -> None:
    owner = Owner(core)
    owner.send(pd.put(b"a", HOUR_NS))
    owner.behind = behind
    with pytest.raises(MessageRefused) as refusal:
        owner.send(pd.put(b"b", HOUR_NS))
    assert refusal.value.error == WireError.MALFORMED


# ---- the client ------------------------------------------------------------------------------


class Model:
    """A daemon that refuses records at random, by the rules of docs/protocol.md for refusals."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sessions: dict[int, Model.Known] = {}
        self.applied: dict[bytes, list[bytes]] = defaultdict(list)
        self.refusing = 0.3

    class Known:
        """The model's state of one session."""

        def __init__(self) -> None:
            self.last = self.busy_last = 0
            self.busy: set[bytes] = set()
            self.replies: dict[int, bytes] = {}

    def handle(self, request: bytes) -> bytes:
        head = wire.FRAME.unpack_from(request)
        message, session, sequence, count, names = head[2:7]
        if message == Message.HELLO:
            number = len(self.sessions) + 1
            self.sessions[number] = Model.Known()
            welcome = wire.WELCOME.pack(
                number, 7, bytes(16), 0, 1, 0, 0, 0, 1, 0, 4, 1024, 1 << 23, 0, 0, 0, 0, 0, 0
            )
            return wire.encode_frame(Message.HELLO, number, sequence) + welcome
        known = self.sessions.get(session)
        if known is None:
            return wire.encode_frame(message, session, sequence, error=WireError.SESSION_EXPIRED)
        if sequence > known.last + 1:
            return wire.encode_frame(
                message, session, sequence, error=WireError.OUT_OF_ORDER,
                detail=(known.last + 1, sequence),
            )  # fmt: skip
        if sequence not in known.replies:
            body = request[wire.FRAME.size :]
            rows = b""
            if head[9] & layout.FLAG_BULK_LOAD:
                rows, body = body[: wire.ROWS.size], body[wire.ROWS.size :]
            batch = Batch(count, names, head[8], body, lambda outcome: None)
            batch.rows = rows
            results = self._apply(known, batch, sequence, sequence - head[12])
            reply = wire.encode_frame(message, session, sequence, count=count)
            known.replies[sequence] = reply + results
            known.last = sequence
        return known.replies[sequence]

    def _apply(self, known: Known, batch: Batch, sequence: int, oldest: int) -> bytes:
        if oldest > known.busy_last:
            known.busy.clear()
        results = b""
        for n, row in enumerate(rows_of(batch)):
            (key,) = row.keys
            if batch.rows:
                first = wire.ROWS.unpack(batch.rows)[1]
                assert first + n == int.from_bytes(row.area[-8:], "little"), (
                    "each row has its own number"
                )
            if key in known.busy or self.rng.random() < self.refusing:
                known.busy.add(key)
                known.busy_last = sequence
                results += wire.RESULT.pack(Status.BUSY, 0)
            else:
                self.applied[key].append(row.area[-8:])
                results += wire.RESULT.pack(1 << 8 | Status.ADDED, 0)
        return results

    def forget_sessions(self) -> None:
        for number in self.sessions:
            self.sessions[number] = None  # type: ignore[assignment]


def test_a_watch_touches_its_own_key_and_each_key_that_it_watches() -> None:
    targets: dict[str | bytes | UUID, int] = {"r-1": 1, b"r-22": 2}
    watched = encode(AllOf(targets))
    builder, name = Builder(), b"\x04\x06shoporders"
    builder.watch(
        name, watched.kind, KeyType.STR, b"w", 0, 5, b"payload", 0, watched.watched, False
    )  # fmt: skip
    on_watched = (
        Op.ADVANCE_KEY, Op.BUMP, Op.FAIL, Op.CLEAR, Op.FORGET, Op.CANCEL_FOR_KEY
    )  # fmt: skip
    for op in (*on_watched, Op.COMPLETE):
        builder.trigger(name, op, KeyType.BYTES, b"r-22", 7)
    watch, *triggers, complete = rows_of(builder.batch(lambda outcome: None))
    assert [key[3:] for key in watch.keys] == [b"shopw", b"shopr-1", b"shopr-22"]
    assert [trigger.keys for trigger in triggers] == [watch.keys[2:]] * len(on_watched)
    assert complete.keys[0][3:] == b"shopr-22"
    assert complete.keys != watch.keys[2:], "operation keys are no watch keys"


def test_keys_that_a_record_ended_come_with_the_answer_to_all_parts() -> None:
    outcomes: list[Outcome] = []
    builder = Builder()
    for key in (b"a", b"b"):
        builder.trigger(b"\x01\x00n", Op.CANCEL_FOR_KEY, KeyType.BYTES, key, 0)
    retries, batch = Retries(), builder.batch(outcomes.append)
    busy, done = wire.RESULT.pack(Status.BUSY, 0), wire.RESULT.pack(Status.DONE, 1)
    ended = (struct.pack("<II", 0, 3) + b"one", struct.pack("<II", 1, 5) + b"other")
    retries.refused(batch, busy + done + ended[1])
    retries.begin_round()
    again = retries.again(in_flight=False)
    assert again is not None
    again.settle(done + ended[0])
    assert outcomes == [2 * done + ended[0] + ended[1]]


def test_a_key_is_free_once_its_busy_record_is_taken() -> None:
    retries, number = Retries(), itertools.count(1)

    def puts(*keys: bytes) -> Batch:
        builder = Builder()
        for key in keys:
            builder.put(b"\x01\x01nt", PutMode.REPLACE, KeyType.BYTES, key, 0, 5, b"")
        batch = builder.batch(lambda outcome: None)
        batch.order = next(number)
        return batch

    busy, added = wire.RESULT.pack(Status.BUSY, 0), wire.RESULT.pack(1 << 8 | Status.ADDED, 0)
    retries.refused(puts(b"a", b"b"), 2 * busy)
    retries.begin_round()
    again = retries.again(in_flight=False)
    assert again is not None
    again.settle(added + busy)
    assert (retries.waiting, retries.settled) == (1, 1)
    later = puts(b"a")
    assert retries.free(later) is later
    assert retries.free(puts(b"b")) is None


def test_a_call_has_its_answer_while_another_one_of_its_batch_is_busy() -> None:
    packer, ends = Packer(HOST), list[int]()
    for number, key in enumerate((b"first", b"busy", b"last")):
        pending = PendingCount(key, lambda _, number=number: ends.append(number))  # type: ignore[misc]
        fields = (PutMode.REPLACE, KeyType.BYTES, key, 0, 5, b"")
        packer.add(Entry(pending, b"\x01\x01nt", Builder.put, fields))
    batch, retries = packer.seal(), Retries()
    assert batch is not None
    words = (77 << 8 | Status.ADDED, Status.BUSY, 78 << 8 | Status.ADDED)
    retries.refused(batch, b"".join(wire.RESULT.pack(word, 0) for word in words))
    assert ends == [0, 2]
    assert [one.word for one in cast(list[Pending], batch.calls)] == [words[0], 0, words[2]]
    retries.begin_round()
    again = retries.again(in_flight=False)
    assert again is not None
    again.settle(wire.RESULT.pack(79 << 8 | Status.ADDED, 0))
    assert ends == [0, 2, 1]
    assert not packer.queued


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_record_that_stays_busy_ends_with_its_client(in_flight: bool) -> None:
    builder, outcomes, retries = Builder(), list[Outcome](), Retries()
    builder.put(b"\x01\x01nt", PutMode.REPLACE, KeyType.STR, b"timer", 0, 5, b"")
    retries.refused(builder.batch(outcomes.append), wire.RESULT.pack(Status.BUSY, 0))
    error = SessionExpired(session=1, in_doubt=0)
    if in_flight:
        retries.begin_round()
        part = retries.again(in_flight=False)
        assert part is not None
        part.settle(error)
    else:
        retries.fail(error)
    (outcome,) = outcomes
    assert isinstance(outcome, Partial)
    assert outcome.error is error
    assert not retries


class Caller:
    """Packs batches and stores the outcome of each of their records."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.session, self.rng = session, rng
        self.made: dict[bytes, list[bytes]] = defaultdict(list)
        self.answers: dict[bytes, int] = {}
        self._number = 0

    def call(self, in_bulk_load: bool) -> list[object]:
        builder, values, name = Builder(), list[bytes](), b"\x01\x01nt"
        for _ in range(self.rng.randint(1, 6)):
            self._number += 1
            key, value = b"%d" % self.rng.randint(0, 7), self._number.to_bytes(8, "little")
            builder.put(name, PutMode.REPLACE, layout.KeyType.BYTES, key, 0, 5, value)
            self.made[b"\x00" + bytes((layout.KeyType.BYTES, 1)) + b"n" + key].append(value)
            values.append(value)
        first = int.from_bytes(values[0], "little")
        rows = BulkLoad(b"b" * 16, first).rows_from(0) if in_bulk_load else b""
        calls: list[object] = [object() for _ in values]
        batch = builder.batch(self._settle(values), rows=rows)
        batch.calls = calls
        self.session.submit(batch)
        return calls

    def _settle(self, values: list[bytes]) -> Callable[[Outcome], None]:
        def settle(outcome: Outcome) -> None:
            assert not set(values) & self.answers.keys(), "a record was settled twice"
            if isinstance(outcome, DaemonError):
                assert isinstance(outcome, SessionExpired)
                outcome = bytes(len(values) * wire.RESULT.size)
            elif isinstance(outcome, Partial):
                outcome = outcome.results
            words = [word for word, _ in wire.decode_results(outcome)]
            self.answers |= {v: w & 0xFF for v, w in zip(values, words, strict=True)}

        return settle


@pytest.mark.parametrize("seed", range(40))
def test_order_per_key_with_a_daemon_that_refuses_at_random(seed: int) -> None:
    """Connections break, sessions end, and calls time out. No record overtakes an earlier record on
    the same key."""
    rng = random.Random(seed)
    model, session = Model(rng), Session(lambda n: rng.randbytes(n))
    caller, wire_out, wire_in = Caller(session, rng), deque[bytes](), deque[bytes]()
    breaks = seed % 4 == 3
    for step in range(600):
        action = rng.random()
        if step == 500:
            model.refusing = 0.0
        if action < 0.2 and step < 500:
            calls = caller.call(in_bulk_load=seed % 4 == 2 and rng.random() < 0.5)
            if rng.random() < 0.05:
                session.abandon({rng.choice(calls)})
        elif action < 0.3 and not session.retries.in_round and session.retries.waiting:
            session.retries.begin_round()
        elif breaks and action < 0.32 and step < 500:
            wire_out.clear()
            wire_in.clear()
            if rng.random() < 0.3:
                model.forget_sessions()
            session.resend()
        elif action < 0.55 and (frame := session.frame()) is not None:
            session.sent()
            wire_out.append(frame)
        elif action < 0.8 and wire_out:
            wire_in.append(model.handle(wire_out.popleft()))
        elif wire_in:
            session.receive(wire_in.popleft())
    _finish(model, session, wire_out, wire_in)
    assert not session.busy
    for key, made in caller.made.items():
        done = [value for value in made if caller.answers[value] == Status.ADDED]
        applied = model.applied[key]
        assert [value for value in made if value in applied] == applied, "out of order, or repeated"
        assert set(done) <= set(applied)
        refused = {value for value in made if caller.answers[value] == Status.BUSY}
        assert not refused & set(applied)
        assert breaks or done == applied


def _finish(model: Model, session: Session, wire_out: deque[bytes], wire_in: deque[bytes]) -> None:
    for _ in range(10_000):
        while (frame := session.frame()) is not None:
            session.sent()
            wire_out.append(frame)
        while wire_out:
            wire_in.append(model.handle(wire_out.popleft()))
        if not wire_in and not session.busy:
            return
        while wire_in:
            session.receive(wire_in.popleft())
        if session.retries.waiting and not session.retries.in_round:
            session.retries.begin_round()


# ---- with real daemons -------------------------------------------------------------------------


class TimeFlies(Host):
    """The clock of a client's timeouts. It jumps while exactly `count` records wait to be repeated.

    So no timeout expires before the daemon has answered or while records are in flight.
    """

    def __init__(self, client: Client | AsyncClient, count: int = 0) -> None:
        self._retries = client._core.connections[0].session.retries
        self._leapt_s = 0.0
        self.count = count

    def monotonic_s(self) -> float:
        if self.count and self._retries.waiting == self.count:
            self._leapt_s += PATIENCE_S
        return super().monotonic_s() + self._leapt_s


class Stalled:
    """A daemon whose WAL waits for the disk between stall() and go_on()."""

    def __init__(self, start: StartDaemon, directory: Path) -> None:
        self._after, self._gate = (
            directory / "stalls",
            Gate("fdatasync", build_library("shim", directory), directory / "gate"),
        )
        environment = self._gate.environment | {"FAULT_AFTER": str(self._after)}
        wal = ("--wal-dir", str(directory / "wal"), *SMALL)
        self.daemon = start("demo", *wal, env=environment)
        self._stack = contextlib.ExitStack()

    def stall(self) -> None:
        """Fill the WAL buffer up to the limit for adds."""
        self._after.touch()
        with Client("demo", namespace="filler", timeout=PATIENCE_S) as client:
            client.add("gate", HOUR_S)
            client._core.host = client._core.connections[0].host = TimeFlies(client, count=1)
            self._stack.enter_context(self._gate.closed())
            with pytest.raises(Busy) as refused:
                self._fill(client)
            assert (refused.value.status, refused.value.rows) == (Status.BUSY, ())

    def _fill(self, client: Client) -> None:
        for n in range(1000):
            client.add(f"fill:{n}", HOUR_S, payload=bytes(60_000))

    def go_on(self) -> None:
        self._stack.close()


@pytest.fixture
def stalled(daemon: StartDaemon, tmp_path: Path) -> Iterator[Stalled]:
    one = Stalled(daemon, tmp_path)
    yield one
    one.go_on()


@pytest.mark.tier("test")
def test_packed_calls_of_several_threads_keep_their_order(stalled: Stalled) -> None:
    """Each add succeeds only if its key is free. Each cancel succeeds only after its add."""
    adds, cancels = list[object](), list[object]()
    with Client("demo", timeout=PATIENCE_S) as client:
        stalled.stall()

        def calls(thread: int) -> None:
            for n in range(300):
                key = f"{thread}:{n % 7}"
                adds.append(client.add(key, HOUR_S, payload=bytes(9000), wait=False))
                cancels.append(client.cancel(key, wait=False))

        threads = [threading.Thread(target=calls, args=(n,)) for n in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        eventually(lambda: client._core.connections[0].session.retries.waiting)
        assert client.add("x", HOUR_S, wait=False).done is False
        stalled.go_on()
        assert {h.result().status for h in adds} == {Status.ADDED}  # type: ignore[attr-defined]
        assert {h.result() for h in cancels} == {CancelResult.CANCELLED}  # type: ignore[attr-defined]
        client.flush()


@pytest.mark.tier("all")
def test_bulk_calls_wait_until_the_daemon_is_not_busy(stalled: Stalled) -> None:
    rows = [(f"k{n % 500}", HOUR_S, "t", n.to_bytes(4, "little") * 1000) for n in range(2000)]
    with Client("demo", timeout=PATIENCE_S) as client:
        stalled.stall()
        lists = client.add_many(rows, mode="replace", wait=False)
        table = {"key": np.arange(900).astype("S"), "delay": np.full(900, HOUR_S)}
        columns = client.add_many(table, wait=False)
        eventually(lambda: client._core.connections[0].session.retries.waiting)
        stalled.go_on()
        client.settle(lists)
        client.settle(columns)
        assert lists.statuses[:500] == [Status.ADDED] * 500
        assert lists.statuses[500:] == [Status.REPLACED] * 1500
        assert set(columns.statuses.tolist()) == {Status.ADDED}
        last = {key: payload for key, _, _, payload in rows}
        for key in ("k0", "k250", "k499"):
            timer = client.get(key)
            assert timer is not None
            assert timer.payload == last[key], "the last add of the key decides"


@pytest.mark.tier("test")
def test_a_call_that_stays_busy_reports_the_rows_that_are_not_done(stalled: Stalled) -> None:
    with Client("demo", timeout=PATIENCE_S) as client:
        stalled.stall()
        clock = TimeFlies(client)
        client._core.host = client._core.connections[0].host = clock
        clock.count = 300
        rows = [(f"new:{n}", HOUR_S, "t", bytes(9000)) for n in range(300)]
        with pytest.raises(Busy, match=r"'row \d+' was refused because the daemon is busy") as many:
            client.add_many(rows)
        error = many.value
        assert (error.rows, error.in_doubt) == (tuple(range(300)), 0)
        assert error.result.refused == [(row, Status.BUSY) for row in range(300)]
        assert (copy := pickle.loads(pickle.dumps(error))).rows == error.rows
        assert str(copy) == str(error)
        clock.count = 1
        with pytest.raises(Busy):
            client.add("single", HOUR_S)
        handle = client.add("later", HOUR_S, wait=False)
        with pytest.raises(CallTimeout, match="the daemon is busy") as late:
            handle.result()
        assert late.value.busy == 1
        with pytest.raises(CallTimeout):
            client.flush()
        clock.count = 0
        stalled.go_on()
        assert handle.result().key == "later"
        assert client.get("single") is None
        assert [client.get(key) for key, *_ in rows] == [None] * 300


@pytest.mark.tier("all")
def test_the_asyncio_client_sends_busy_calls_again(stalled: Stalled) -> None:
    async def run() -> None:
        async with AsyncClient("demo", timeout=PATIENCE_S) as client:
            await asyncio.to_thread(stalled.stall)
            clock = TimeFlies(client, count=1)
            client._core.host = client._core.connections[0].host = clock
            with pytest.raises(Busy):
                await client.add("single", HOUR_S)
            clock.count = 2
            with pytest.raises(Busy) as many:
                await client.add_many([("a", HOUR_S), ("b", HOUR_S)])
            assert many.value.rows == (0, 1)
            clock.count = 0
            handles = [
                (
                    await client.add("k", HOUR_S, payload=bytes(9000), wait=False),
                    await client.cancel("k", wait=False),
                )
                for _ in range(500)
            ]
            result = await client.add_many([("k", HOUR_S)] * 2, mode="replace", wait=False)
            await asyncio.to_thread(
                eventually, lambda: client._core.connections[0].session.retries.waiting
            )
            stalled.go_on()
            for add, cancel in handles:
                assert (await add).status == Status.ADDED
                assert await cancel == CancelResult.CANCELLED
            await client.flush()
            assert result.statuses == [Status.ADDED, Status.REPLACED]
            assert await client.get("single") is None

    asyncio.run(run())

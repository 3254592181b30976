"""The daemon as a process: many clients, restarts, hostile bytes, and refused starts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import resource
import shlex
import signal
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import pytest
import raw_wire as raw
import zmq
from machine import needs, private_memory, python_in
from raw_wire import Raw
from real_daemon import (
    PATIENCE_S,
    Daemon,
    DaemonFailed,
    StartDaemon,
    boot_ns,
    eventually,
    refused,
    sent,
    stats,
    thread_status,
)
from tiers import sample

from purgatoryd.clients import (
    Admin,
    AllOf,
    CancelResult,
    Client,
    Full,
    InvalidPayload,
    Lagged,
    MessageRefused,
    Notice,
    Purgatory,
    Status,
    Stopping,
    Subscriber,
)
from purgatoryd.shm_layout.arena import Arena, Reader
from purgatoryd.shm_layout.layout import WireError

pytestmark = pytest.mark.tier("all")

HOUR_S = 3600.0
SHM = Path("/dev/shm")
Value = TypeVar("Value")


def authoritative_state(daemon: Daemon) -> tuple[object, ...]:
    """Return the state and the counters that a refused message must not change."""
    reader = Reader.attach(daemon.paths)
    try:
        reader.check()
        counted = reader.stats()
        names = ("live", "adds", "cancels", "next_ticket", "replay_tail", "batches", "now_ns")
        virtual = counted["clock"] == "virtual"
        figures = [counted[name] for name in names if name != "now_ns" or virtual]
        topics = [(t.name, t.incarnation, t.sequence) for t in reader.topics()]
        return b"".join(reader.scan()), figures, topics, sorted(reader.namespaces())
    finally:
        reader.close()


def take(subscriber: Subscriber, count: int) -> list[Notice]:
    notices: list[Notice] = []
    for _ in range(count):
        notice = subscriber.get(PATIENCE_S)
        assert notice is not None, f"{len(notices)} of {count} came"
        notices.append(notice)
    return notices


def listen(*topics: str, namespace: str = "shop") -> Subscriber:
    return Subscriber("demo", namespace=namespace, topics=topics or None, timeout=PATIENCE_S)


def shop(namespace: str = "shop") -> Client:
    return Client("demo", namespace=namespace, timeout=PATIENCE_S)


# ---- work in child processes ---------------------------------------------------------------------


class Collected(NamedTuple):
    keys: list[str]
    seqs: list[tuple[str, int]]
    lost: list[tuple[str, int, int]]


def work(directory: str, seed: int, adds: int) -> tuple[set[str], set[str]]:
    """Add and cancel at random; return (keys of acknowledged timers, keys of cancelled timers)."""
    os.environ["PURGATORYD_DIR"] = directory
    rng = random.Random(seed)
    added: set[str] = set()
    cancelled: set[str] = set()
    with shop() as client:
        for base in range(0, adds, 100):
            rows = [
                (f"{seed}:{base + i}", rng.random() * 0.3, f"t{i % 3}", rng.randbytes(i))
                for i in range(100)
            ]
            result = client.add_many(rows)
            added.update(r[0] for r, s in zip(rows, result.statuses, strict=True) if s == 1)
            victims = [row[0] for row in rng.sample(rows, 30)]
            found = client.cancel_many(victims)
            pairs = zip(victims, found, strict=True)
            cancelled.update(key for key, detail in pairs if detail is CancelResult.CANCELLED)
    return added, cancelled


def collect(directory: str, name: str, high_water_mark: int) -> Collected:
    """Collect all notices of the namespace, up to the last notice of each topic (see finish)."""
    os.environ["PURGATORYD_DIR"] = directory
    keys: list[str] = []
    seqs: list[tuple[str, int]] = []
    lost: list[tuple[str, int, int]] = []
    with Subscriber(
        "demo", namespace="shop", high_water_mark=high_water_mark, timeout=PATIENCE_S
    ) as subscriber:
        Path(directory, f"{name}.collector").write_text(str(os.getpid()))
        left: int | None = None
        while left != 0:
            try:
                notice = subscriber.get(PATIENCE_S)
            except Lagged as error:
                lost.append((error.topic, error.first_lost, error.last_lost))
                continue
            assert notice is not None, f"no notice came after {len(keys)} notices"
            if notice.key == f"the last of {notice.topic}":
                left = int(notice.payload) if left is None else left
                left -= 1
            else:
                keys.append(str(notice.key))
                seqs.append((notice.topic, notice.seq))
    return Collected(keys, seqs, lost)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(6, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


class Collector:
    """Runs collect() in another process. After construction it is subscribed."""

    def __init__(
        self, pool: ProcessPoolExecutor, daemon: Daemon, name: str = "one", hwm: int = 1000
    ) -> None:
        self._future: Future[Collected] = pool.submit(collect, str(daemon.dir), name, hwm)
        path = daemon.dir / f"{name}.collector"
        self._pid = int(eventually(lambda: path.exists() and path.read_text()) or "0")

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        eventually(lambda: psutil.Process(self._pid).status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def result(self) -> Collected:
        return self._future.result(PATIENCE_S)


def finish(client: Client, topics: int) -> None:
    """End the collectors: add the last timer of each topic t0, t1, ..."""
    payload = str(topics).encode()
    names = [f"t{i}" for i in range(topics)]
    client.add_many([(f"the last of {name}", 0.4, name, payload) for name in names])


# ---- several clients at once -----------------------------------------------------------------


@pytest.mark.tier("test")
def test_the_ledger_of_workers_and_subscribers(
    daemon: StartDaemon, pool: ProcessPoolExecutor
) -> None:
    real = daemon()
    collectors = [Collector(pool, real, name) for name in ("one", "two")]
    workers = [pool.submit(work, str(real.dir), seed, 3000) for seed in range(3)]
    ledgers = [worker.result(PATIENCE_S * 2) for worker in workers]
    expected = set().union(*(added - cancelled for added, cancelled in ledgers))
    assert sum(len(added) for added, _ in ledgers) == 9000
    with shop() as client:
        eventually(lambda: stats(real)["live"] == 0)
        finish(client, 3)
    for collector in collectors:
        collected = collector.result()
        assert not collected.lost
        assert Counter(collected.keys) == Counter(expected)
    authoritative_state(real)


def flood(topics: int, rounds: int) -> list[str]:
    """Add one timer per topic and round. Each notice has its own message, because a loop iteration
    sends one message per topic."""
    keys = []
    with shop() as client:
        for i in range(rounds):
            rows = [(f"{i}/{topic}", 0.0, f"t{topic}") for topic in range(topics)]
            client.add_many(rows)
            keys += [row[0] for row in rows]
    return keys


def test_a_stopped_subscriber_with_a_low_mark_recovers_all(
    daemon: StartDaemon, pool: ProcessPoolExecutor
) -> None:
    real = daemon()
    collector = Collector(pool, real, hwm=10)
    collector.stop()
    try:
        keys = flood(topics=100, rounds=60)
        eventually(lambda: sent(real, "shop") == len(keys))
    finally:
        collector.go_on()
    with shop() as client:
        finish(client, 100)
    collected = collector.result()
    assert not collected.lost
    assert Counter(collected.keys) == Counter(keys)


@pytest.mark.tier("test")
def test_an_overtaken_subscriber_knows_exactly_what_it_lost(
    daemon: StartDaemon, pool: ProcessPoolExecutor
) -> None:
    real = daemon("demo", "--replay-buffer", "64")
    collector = Collector(pool, real, hwm=10)
    collector.stop()
    try:
        keys = flood(topics=3, rounds=900)
        eventually(lambda: sent(real, "shop") == len(keys))
    finally:
        collector.go_on()
    with shop() as client:
        finish(client, 3)
    collected = collector.result()
    lost = [(t, i) for t, first, last in collected.lost for i in range(first, last + 1)]
    assert lost
    there = [(f"t{topic}", seq) for topic in range(3) for seq in range(1, 901)]
    assert sorted(lost + collected.seqs) == sorted(there)


@pytest.mark.tier("test")
def test_a_subscriber_is_live_once_it_is_made(daemon: StartDaemon) -> None:
    daemon()
    stop = threading.Event()

    def noise() -> None:
        with shop() as client:
            while not stop.is_set():
                client.add("noise", delay=0, topic="orders", mode="replace")

    thread = threading.Thread(target=noise)
    thread.start()
    try:
        with shop() as client:
            for i in range(40):
                with listen("orders") as subscriber:
                    client.add(f"k{i}", delay=0, topic="orders")
                    while (key := take(subscriber, 1)[0].key) != f"k{i}":
                        assert key == "noise"
    finally:
        stop.set()
        thread.join()


def test_namespaces_and_topics_with_the_same_beginning_are_apart(daemon: StartDaemon) -> None:
    daemon()
    with shop() as ours, shop("shop2") as theirs, listen("orders") as subscriber:
        theirs.add("same", delay=0, topic="orders")
        ours.add("other", delay=0, topic="orders2")
        ours.add("none", delay=0, topic="")
        far = theirs.add("key", delay=HOUR_S)
        assert ours.cancel("key") is CancelResult.UNKNOWN
        found = theirs.get("key")
        assert found is not None
        assert found.ticket == far.ticket
        ours.add("same", delay=0, topic="orders")
        (notice,) = take(subscriber, 1)
        assert (notice.namespace, notice.topic, notice.key, notice.seq) == (
            "shop", "orders", "same", 1,
        )  # fmt: skip
        assert ours.cancel("same") is CancelResult.FIRED
        assert subscriber.get(0) is None


# ---- many timers, and times ------------------------------------------------------------------


def test_100k_timers_at_one_instant(daemon: StartDaemon) -> None:
    real = daemon()
    with shop() as client, listen("t") as subscriber:
        deadline_ns = boot_ns() + 1_500_000_000
        keys = [f"k{i}" for i in range(100_000)]
        result = client.add_many(
            {"key": keys, "deadline_boot_ns": [deadline_ns] * len(keys)}, topic="t"
        )
        assert set(result.statuses) == {Status.ADDED}
        notices = take(subscriber, len(keys))
        assert Counter(n.key for n in notices) == Counter(keys)
        assert all(n.fired_boot_ns >= n.deadline_boot_ns == deadline_ns for n in notices)
        assert [n.seq for n in notices] == list(range(1, len(keys) + 1))
        client.add("after", delay=0, topic="t")
        assert take(subscriber, 1)[0].key == "after"
    assert stats(real)["live"] == 0


def test_a_delay_counts_from_when_it_was_sent_at_the_earliest(daemon: StartDaemon) -> None:
    """A delay is never shortened, even if batches of other clients delay the loop."""
    real = daemon()
    stop = threading.Event()

    def load(number: int) -> None:
        keys = [b"%d/%d" % (number, i) for i in range(1000)]
        with Raw(real.paths.cmd) as client:
            client.hello()
            while not stop.is_set():
                client.batch(*(raw.put(key) for key in keys))
                client.batch(*(raw.cancel(key) for key in keys))

    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        with Raw(real.paths.cmd) as client:
            client.hello()
            for i in range(200):
                sent_ns = boot_ns()
                ((_, _, deadline_ns),) = client.batch(raw.put(b"k%d" % i, 1_000_000)).results
                assert deadline_ns >= sent_ns + 1_000_000
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("size", [0, 1, 4096, 65535, 65536])
def test_payloads_arrive_whole(size: int, daemon: StartDaemon) -> None:
    daemon()
    payload = random.Random(size).randbytes(size)
    with shop() as client, listen("t") as subscriber:
        client.add("k" * 255, delay=0.01, topic="t", payload=payload)
        found = client.get("k" * 255)
        assert found is None or found.payload == payload
        (notice,) = take(subscriber, 1)
        assert notice.payload == payload


def test_payloads_past_the_bound_are_refused_on_both_sides(daemon: StartDaemon) -> None:
    real = daemon()
    with shop() as client, pytest.raises(InvalidPayload) as caught:
        client.add("k", delay=1, payload=bytes(65537))
    assert (caught.value.length, caught.value.limit) == (65537, 65536)
    before = authoritative_state(real)
    with Raw(real.paths.cmd) as client:
        client.hello()
        assert client.batch(raw.put(b"k", payload=bytes(65537))).error == raw.MALFORMED
    assert authoritative_state(real) == before


def test_many_of_the_largest_payloads_in_one_batch(daemon: StartDaemon) -> None:
    real = daemon("demo", "--payload-memory", "32M")
    with Raw(real.paths.cmd) as client, listen(namespace="raw") as subscriber:
        client.hello()
        body = random.Random(7).randbytes(65536)
        records = [raw.put(b"%03d" % i, 10_000_000, body) for i in range(120)]
        assert set(client.batch(*records).statuses) == {raw.ADDED}
        assert [n.payload for n in take(subscriber, 120)] == [body] * 120


@pytest.mark.parametrize("delay_ns", [0, -1, -(2**63)])
def test_a_delay_that_is_over_fires_at_once(delay_ns: int, daemon: StartDaemon) -> None:
    real = daemon()
    with Raw(real.paths.cmd) as client, listen(namespace="raw") as subscriber:
        client.hello()
        before_ns = boot_ns()
        assert client.batch(raw.put(b"k", delay_ns)).statuses == [raw.ADDED]
        (notice,) = take(subscriber, 1)
        assert notice.deadline_boot_ns <= notice.fired_boot_ns
        assert before_ns <= notice.fired_boot_ns <= boot_ns()
        assert client.batch(raw.cancel(b"k")).statuses == [raw.FIRED]


@pytest.mark.tier("test")
def test_a_wall_deadline_is_met_on_the_wall_clock(daemon: StartDaemon) -> None:
    daemon()
    with shop() as client, listen("t") as subscriber:
        at = datetime.now(UTC) + timedelta(seconds=0.2)
        client.add("k", deadline=at, topic="t")
        client.add("over", deadline=at - timedelta(days=40_000), topic="t")
        in_time = datetime.now(UTC) < at  # False if a busy machine delayed the adds
        found = {notice.key: notice for notice in take(subscriber, 2)}
        assert found.keys() == {"k", "over"}
        assert [*found] == ["over", "k"] or not in_time
        assert found["k"].fired_at >= at
        assert at <= datetime.now(UTC)


@pytest.mark.tier("test")
def test_a_topic_is_ordered_by_deadline_from_tick_to_tick(daemon: StartDaemon) -> None:
    real = daemon()
    tick_ns = stats(real)["tick_ns"]
    with shop() as client, listen("t") as subscriber:
        start_ns = boot_ns() + 500_000_000
        rng = random.Random(1)
        times = [start_ns + rng.randrange(300_000_000) for _ in range(5000)]
        client.add_many(
            {"key": [str(i) for i in range(5000)], "deadline_boot_ns": times}, topic="t"
        )
        added_ns = boot_ns()  # on a busy machine, some timers were due before this time
        deadlines_ns = [n.deadline_boot_ns for n in take(subscriber, 5000)]
    ticks = [-(-due_ns // tick_ns) for due_ns in deadlines_ns if due_ns > added_ns]
    assert ticks == sorted(ticks)


# ---- restarts --------------------------------------------------------------------------------

ENDS = {"a stop": Daemon.stop, "a kill": Daemon.kill}


@pytest.mark.tier("test")
@pytest.mark.parametrize("end", sample(ENDS, {"a kill"}))
def test_a_restart_keeps_what_was_acknowledged(end: str, daemon: StartDaemon) -> None:
    real = daemon()
    with Raw(real.paths.cmd) as client:
        nonce = bytes(range(16))
        client.hello(nonce)
        session = client.session
        first = raw.batch(session, 1, [raw.put(b"far"), raw.put(b"soon", 1_000_000, b"x")])
        answers = [client.ask(first)]
        eventually(lambda: sent(real, "raw") == 1)
        answers.append(client.ask(raw.batch(session, 2, [raw.put(b"due", 300_000_000)])))
        before = stats(real)
        arena_file = (SHM / real.paths.arena[1:]).stat().st_ino
        ENDS[end](real)
        eventually(lambda: boot_ns() > answers[1].results[0][2])
        real.start()
    assert (SHM / real.paths.arena[1:]).stat().st_ino == arena_file
    after = stats(real)
    assert after["stream_id"] == before["stream_id"]
    assert after["epoch"] == before["epoch"] + 1
    eventually(lambda: sent(real, "raw") == 2)
    with Raw(real.paths.cmd) as client, listen(namespace="raw") as subscriber:
        client.hello(nonce)
        assert (client.session, client.sequence) == (session, 2)
        assert client.ask(first) == answers[0]
        assert client.batch(raw.put(b"new", 0)).results[0][1] > answers[1].results[0][1]
        (notice,) = take(subscriber, 1)
        assert (notice.key, notice.seq) == ("new", 3)
        assert client.query(b"far").first_info == (raw.FOUND, b"rawtopicfar")
        assert client.batch(raw.cancel(b"due"), raw.cancel(b"soon")).statuses == [raw.FIRED] * 2


@pytest.mark.parametrize("end", ENDS)
def test_notices_that_a_subscriber_has_not_read_survive_a_restart(
    end: str, daemon: StartDaemon, pool: ProcessPoolExecutor
) -> None:
    real = daemon()
    collector = Collector(pool, real)
    collector.stop()
    keys = flood(topics=3, rounds=20)
    ENDS[end](real)
    collector.go_on()
    real.start()
    with shop() as client:
        finish(client, 3)
    collected = collector.result()
    assert not collected.lost
    assert Counter(collected.keys) == Counter(keys)


def work_goes_on(daemon: Daemon, batches: int, workers: Sequence[Future[Any]]) -> bool:
    return stats(daemon)["batches"] >= batches or all(w.done() for w in workers)


def test_kills_in_the_midst_of_load(daemon: StartDaemon, pool: ProcessPoolExecutor) -> None:
    real = daemon()
    collector = Collector(pool, real)
    workers = [pool.submit(work, str(real.dir), seed, 2000) for seed in range(2)]
    for _ in range(4):
        goal = stats(real)["batches"] + 1
        eventually(partial(work_goes_on, real, goal, workers))
        real.kill()
        real.start()
    ledgers = [worker.result(PATIENCE_S * 2) for worker in workers]
    with shop() as client:
        eventually(lambda: stats(real)["live"] == 0)
        finish(client, 3)
    collected = collector.result()
    assert not collected.lost
    expected = set().union(*(added - cancelled for added, cancelled in ledgers))
    assert Counter(collected.keys) == Counter(expected)
    real.stop()
    arena = Arena.attach(real.paths.arena, real.paths.private)
    arena.rebuild(boot_ns())
    arena.check()
    arena.close()


def test_a_stop_under_load_loses_nothing_acknowledged(daemon: StartDaemon) -> None:
    real = daemon()
    acknowledged: list[set[bytes]] = [set(), set(), set()]

    def load(number: int) -> None:
        with Raw(real.paths.cmd, patience_s=1.0) as client:
            client.hello()
            for i in range(10**6):
                key = b"%d/%d" % (number, i)
                try:
                    assert client.batch(raw.put(key)).statuses == [raw.ADDED]
                except zmq.Again:
                    return
                acknowledged[number].add(key)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: all(len(keys) > 100 for keys in acknowledged))
    real.stop()
    for thread in threads:
        thread.join()
    reader = Reader.attach(real.paths)
    there = b"".join(reader.scan())
    reader.close()
    assert set().union(*acknowledged) <= set(re.findall(rb"rawtopic(\d/\d+)", there))


# ---- sessions on the wire --------------------------------------------------------------------


@pytest.fixture
def real(daemon: StartDaemon) -> Daemon:
    return daemon()


@pytest.mark.tier("test")
def test_a_batch_is_applied_once(real: Daemon) -> None:
    with Raw(real.paths.cmd) as client:
        client.hello()
        batches = [
            raw.batch(client.session, i, [raw.put(b"k%d" % i), raw.put(b"x")]) for i in range(1, 8)
        ]
        early = client.ask(batches[1])
        assert (early.error, early.detail) == (raw.OUT_OF_ORDER, (1, 2))
        answers = [client.ask(batch) for batch in batches[:6]]
        assert [a.statuses for a in answers[:2]] == [
            [raw.ADDED, raw.ADDED], [raw.ADDED, raw.EXISTS],
        ]  # fmt: skip
        assert [a.sequence for a in answers] == [1, 2, 3, 4, 5, 6]
        before = authoritative_state(real)
        assert [client.ask(batch) for batch in batches[2:6]] == answers[2:]
        stale = client.ask(batches[1])
        assert (stale.error, stale.detail) == (raw.STALE, (3, 2))
        other = client.ask(raw.batch(client.session, 6, [raw.put(b"k6"), raw.put(b"y")]))
        assert other.error == raw.CHANGED
        ahead = client.ask(raw.batch(client.session, 9, [raw.put(b"k9")]))
        assert (ahead.error, ahead.detail) == (raw.OUT_OF_ORDER, (7, 9))
        assert authoritative_state(real) == before
        assert client.ask(batches[6]).statuses == [raw.ADDED, raw.EXISTS]


def test_every_changed_byte_of_a_resent_batch_is_seen(real: Daemon) -> None:
    with Raw(real.paths.cmd) as client:
        client.hello()
        first = raw.batch(client.session, 1, [raw.put(b"key", payload=bytes(100))])
        client.ask(first)
        before = authoritative_state(real)
        for at in range(len(first) - 103, len(first)):
            for bit in range(8):
                changed = bytearray(first)
                changed[at] ^= 1 << bit
                assert client.ask(bytes(changed)).error == raw.CHANGED
        assert authoritative_state(real) == before


def test_sessions_end_and_are_limited(daemon: StartDaemon) -> None:
    real = daemon("demo", "--sessions", "3")
    with Raw(real.paths.cmd) as client:
        nonces = [bytes([i]) * 16 for i in range(4)]
        opened = [client.hello(nonce) for nonce in nonces]
        assert [a.error for a in opened] == [0, 0, 0, raw.SESSIONS_FULL]
        assert opened[3].detail[0] == 3
        assert client.hello(nonces[1]).session == opened[1].session
        assert client.ask(raw.frame(raw.BYE, opened[1].session)).error == 0
        for message in (
            raw.batch(opened[1].session, 1, [raw.put(b"k")]),
            raw.batch(opened[1].session, 1, [(raw.record(raw.GET, 1), b"k")], message=raw.QUERY),
            raw.frame(raw.BYE, opened[1].session),
            raw.batch(0, 1, [raw.put(b"k")]),
            raw.batch(2**64 - 1, 1, [raw.put(b"k")]),
        ):
            assert client.ask(message).error == raw.SESSION_EXPIRED
        assert client.hello(nonces[3]).error == 0
        assert client.session != opened[1].session


# ---- hostile bytes ---------------------------------------------------------------------------


def bad_messages(session: int) -> dict[str, tuple[bytes, int]]:
    """Return the messages to send, each with the error that it must cause."""
    good = raw.batch(session, 1, [raw.put(b"key", payload=b"payload")])
    table = raw.name_table(raw.NAMES)

    def batch_of(record: bytes, area: bytes = b"key", **changes: int) -> bytes:
        fields = {"count": 1, "names": 1, "names_bytes": len(table)} | changes
        return raw.frame(raw.BATCH, session, 1, **fields) + table + record + area

    def named(pairs: bytes, names: int = 1) -> bytes:
        head = raw.frame(raw.BATCH, session, 1, count=1, names=names, names_bytes=len(pairs))
        return head + pairs + b"".join(raw.put(b"key"))

    plain, _ = raw.put(b"key")
    malformed = {
        "nothing": b"",
        "a short frame": good[:63],
        "a wrong magic": b"\0" + good[1:],
        "the other byte order": good[3::-1] + good[4:],
        "an error in a request": raw.frame(raw.PING, error=1),
        "an unknown flag": raw.frame(raw.PING, flags=4),
        "hello without a nonce": raw.frame(raw.HELLO),
        "hello and more": raw.frame(raw.HELLO) + bytes(33),
        "one byte less": good[:-1],
        "one byte more": good + b"x",
        "no records": good[: 64 + len(table)],
        "half a name table": good[:70],
        "no key": batch_of(raw.record(raw.PUT, 0), b""),
        "an op that is not there": batch_of(raw.record(77, 3)),
        "op 0": batch_of(raw.record(0, 3)),
        "a reserved op": batch_of(raw.record(4, 3)),
        "get in a batch": batch_of(raw.record(raw.GET, 3)),
        "an unknown mode": batch_of(raw.record(raw.PUT, 3, mode=4)),
        "an unknown key type": batch_of(raw.record(raw.PUT, 3, key_type=3)),
        "a uuid of 3 bytes": batch_of(raw.record(raw.PUT, 3, key_type=2)),
        "an unknown time": batch_of(raw.record(raw.PUT, 3, time_kind=3)),
        "a name that is not there": batch_of(raw.record(raw.PUT, 3, name=1)),
        "reserved bytes": batch_of(raw.record(raw.PUT, 3, reserved=1)),
        "a ticket in a put": batch_of(raw.record(raw.PUT, 3, value=1)),
        "a payload in a cancel": batch_of(raw.record(raw.CANCEL, 3, payload_len=1), b"key1"),
        "a time in a cancel": batch_of(raw.record(raw.CANCEL, 3, time_ns=1)),
        "a payload past the end": batch_of(raw.record(raw.PUT, 3, payload_len=2**32 - 1)),
        "more records than sent": batch_of(plain, count=2),
        "names of 7 bytes": batch_of(plain, names_bytes=7),
        "names past the end": batch_of(plain, names_bytes=2**32 - 8),
        "more names than sent": batch_of(plain, names=2),
        "a namespace of no bytes": named(b"\0\1t" + bytes(5)),
        "a namespace of 64": named(b"\x40\0" + b"n" * 64 + bytes(6)),
        "a topic of 128": named(b"\1\x80n" + b"t" * 128 + bytes(5)),
        "NUL in a namespace": named(b"\2\0n\0" + bytes(4)),
        "NUL in a topic": named(b"\1\3nt\0t" + bytes(2)),
        "a table that is too long": named(b"\1\1nt" + bytes(12)),
        "no UTF-8": named(b"\1\1n\xff" + bytes(4)),
        "half a character": named(b"\1\1n\xc3" + bytes(4)),
        "a character on the border": named(b"\1\1\xc3\xa9" + bytes(4)),
        "a surrogate": named(b"\1\3n\xed\xa0\x80" + bytes(2)),
        "an overlong slash": named(b"\1\2n\xc0\xaf" + bytes(3)),
        "past U+10FFFF": named(b"\1\4n\xf4\x90\x80\x80" + bytes(1)),
        "sequence 0": raw.batch(session, 0, [raw.put(b"key")]),
    }
    return {name: (data, raw.MALFORMED) for name, data in malformed.items()} | {
        "version 2": (raw.frame(raw.PING, version=2), raw.WRONG_VERSION),
        "message 0": (raw.frame(0), raw.UNKNOWN_MESSAGE),
        "message 65535": (raw.frame(65535), raw.UNKNOWN_MESSAGE),
        "an admin's message": (raw.frame(raw.STOP), raw.UNKNOWN_MESSAGE),
        "1025 records": (batch_of(plain, count=1025), raw.TOO_LARGE),
        "no record": (batch_of(plain, count=0), raw.TOO_LARGE),
        "257 names": (batch_of(plain, names=257), raw.TOO_LARGE),
        "no name": (batch_of(plain, names=0), raw.TOO_LARGE),
        "a time on a real clock": (
            raw.batch(session, 1, [raw.put(b"key")], at_ns=2**62), raw.CLOCK,
        ),
    }  # fmt: skip


@pytest.mark.tier("test")
def test_every_bad_message_gets_its_error_and_changes_nothing(real: Daemon) -> None:
    with Raw(real.paths.cmd) as client, shop() as other:
        other.add("mine", delay=HOUR_S)
        client.hello()
        before = authoritative_state(real)
        for name, (data, error) in bad_messages(client.session).items():
            assert client.ask(data).error == error, name
            assert authoritative_state(real) == before, name
        assert client.batch(raw.put(b"key")).statuses == [raw.ADDED]
        assert other.get("mine") is not None


def test_bad_messages_on_the_admin_socket(real: Daemon) -> None:
    expected = {
        b"": raw.MALFORMED,
        raw.frame(raw.PING)[:-1]: raw.MALFORMED,
        raw.frame(raw.PING) + b"x": raw.MALFORMED,
        raw.frame(raw.PING, magic=7): raw.MALFORMED,
        raw.frame(raw.PING, version=9): raw.WRONG_VERSION,
        raw.frame(raw.BATCH): raw.UNKNOWN_MESSAGE,
        raw.frame(raw.ADVANCE, at_ns=2**62): raw.CLOCK,
        raw.frame(raw.PING, 5, 6): 0,
    }
    before = authoritative_state(real)
    with Raw(real.paths.admin) as admin:
        for data, error in expected.items():
            assert admin.ask(data).error == error, data
        assert admin.ask(raw.frame(raw.PING), b"").error == raw.MALFORMED
        assert admin.ask(raw.frame(raw.PING, 5, 6))[:3] == (raw.PING, 5, 6)
    assert authoritative_state(real) == before


def test_parts_that_do_not_belong(real: Daemon) -> None:
    before = authoritative_state(real)
    with Raw(real.paths.cmd) as client:
        ping = raw.frame(raw.PING)
        for parts in ([b""], [b"", ping], [ping, b""], [ping] * 3, [b""] * 50):
            assert client.ask(*parts).error == raw.MALFORMED, parts
        assert client.ask(ping).error == 0
    assert authoritative_state(real) == before


@pytest.mark.parametrize("socket_name", ["cmd", "admin", "pub"])
def test_a_message_past_8_mib_costs_its_sender_the_connection(
    socket_name: str, real: Daemon
) -> None:
    path: Path = getattr(real.paths, socket_name)
    kind = zmq.XSUB if socket_name == "pub" else zmq.DEALER
    with Raw(path, patience_s=0.3, kind=kind) as client, shop() as other:
        client.send(bytes(9 << 20))
        with pytest.raises(zmq.Again):
            client.receive()
        other.add("k", delay=HOUR_S)
    with Raw(real.paths.cmd) as client:
        assert client.ask(raw.frame(raw.PING) + bytes((8 << 20) - 64)).error == 0
        assert client.ask(bytes(8 << 20)).error == raw.MALFORMED


def garbage(rng: random.Random, good: bytes) -> bytes:
    """Return random bytes, or a valid batch with a few wrong bytes."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.choice([0, 1, 63, 64, 65, 96, 500]))
    data = bytearray(good)
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(16, len(data))] = rng.choice([0, 1, 2, 0x7F, 0x80, 0xFF])
    return bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])


def test_garbage_is_survived_while_others_are_served(real: Daemon) -> None:
    rng = random.Random(20)
    done = threading.Event()

    def attack() -> None:
        with Raw(real.paths.cmd) as client:
            client.hello()
            good = raw.batch(client.session, 1, [raw.put(b"k%d" % i, 0) for i in range(5)])
            for _ in range(2000):
                error = client.ask(garbage(rng, good)).error
                assert error in {*range(13), WireError.NO_WAL}
        done.set()

    thread = threading.Thread(target=attack)
    thread.start()
    with shop() as client, listen("t") as subscriber:
        while not done.is_set() and thread.is_alive():
            client.add("k", delay=0, topic="t", mode="replace")
            take(subscriber, 1)
    thread.join()
    assert done.is_set()
    authoritative_state(real)


def test_noise_on_the_plain_sockets(real: Daemon) -> None:
    """The clients send random bytes instead of ZeroMQ's greeting."""
    for path in (real.paths.cmd, real.paths.pub, real.paths.admin):
        for noise in (b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 300):
            with socket.socket(socket.AF_UNIX) as plain:
                plain.connect(str(path))
                plain.sendall(noise)
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.ping()


def test_more_connections_than_the_soft_limit_of_descriptors(daemon: StartDaemon) -> None:
    needs("descriptors")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        real = daemon()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 800), hard))
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            plain = stack.enter_context(socket.socket(socket.AF_UNIX))
            plain.connect(str(real.paths.cmd))
        stack.enter_context(shop()).add("k", delay=HOUR_S)
        assert psutil.Process(real.pid).num_fds() > 256


def test_messages_on_the_notice_socket_do_not_hold_up_the_loop(real: Daemon) -> None:
    context = zmq.Context()
    flooder = context.socket(zmq.XSUB)
    flooder.set(zmq.LINGER, 0)
    flooder.connect(real.paths.pub_endpoint)
    try:
        with shop() as client, listen("t") as subscriber:
            for _ in range(20):
                for i in range(500):
                    flooder.send(b"\1" + struct.pack("<I", i) + b"noise" * 10)
                    flooder.send(b"no subscription", zmq.SNDMORE)
                    flooder.send(b"")
                client.add("k", delay=0, topic="t", mode="replace")
                take(subscriber, 1)
    finally:
        flooder.close(0)
        context.term()


# ---- stop with a drain -------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_draining_daemon_arms_nothing_and_ends_when_nothing_is_armed(real: Daemon) -> None:
    with shop() as client, Admin("demo", timeout=PATIENCE_S) as admin:
        client.add("never", delay=HOUR_S, topic="t")
        with listen("t") as subscriber:
            client.add("soon", delay=0.5, topic="t")
            admin.stop(drain=True)
            for mode in ("error", "replace", "extend"):
                with pytest.raises(Stopping):
                    client.add("never", delay=1, topic="unborn", mode=mode)
            pending = [client.add(f"p{i}", delay=1, wait=False) for i in range(3)]
            assert client.get("never") is not None
            (notice,) = take(subscriber, 1)
            assert notice.key == "soon"
            for one in pending:
                with pytest.raises(Stopping):
                    one.result(PATIENCE_S)
            # the daemon answers once more, then it ends
            assert client.cancel("never") is CancelResult.CANCELLED
    assert real.process.wait(PATIENCE_S) == 0
    real.start()
    topics = Reader.attach(real.paths)
    assert set(topics.newest_sequences("shop")) == {"t"}
    topics.close()
    with shop() as client:
        client.add("again", delay=HOUR_S)  # the new process does not drain


def test_a_draining_daemon_waits_for_owners_to_take_their_outcomes(real: Daemon) -> None:
    with Purgatory("demo", namespace="shop", timeout=PATIENCE_S) as owner:
        operation = owner.watch("op", AllOf({"k": 1}), timeout=HOUR_S)
        with Admin("demo", timeout=PATIENCE_S) as admin:
            admin.stop(drain=True)
        with pytest.raises(Stopping):
            owner.watch("late", AllOf({"k": 1}), timeout=HOUR_S)
        owner.advance("k", 1)
        assert operation.result(PATIENCE_S).cause == "satisfied"
        assert real.process.wait(PATIENCE_S) == 0


def test_a_draining_daemon_can_be_stopped_at_once(real: Daemon) -> None:
    with shop() as client, Admin("demo", timeout=PATIENCE_S) as admin:
        client.add("k", delay=HOUR_S)
        admin.stop(drain=True)
        admin.stop()
    assert real.process.wait(PATIENCE_S) == 0
    real.start()
    assert stats(real)["live"] == 1


# ---- names of namespaces and topics ----------------------------------------------------------


def test_odd_names_go_through(real: Daemon) -> None:
    topics = ["", " ", "é" * 63 + "x", "t" * 127, "\U0001f570", "a/b#+*", "\x01\x7f", "\uffff"]
    with shop("\U0001f570" * 15) as client, listen(namespace="\U0001f570" * 15) as subscriber:
        for topic in topics:
            client.add(topic or "none", delay=0, topic=topic)
        assert sorted(n.topic for n in take(subscriber, len(topics))) == sorted(topics)


def test_topics_run_out_and_are_used_again(daemon: StartDaemon) -> None:
    real = daemon("demo", "--topics", "300", "--replay-buffer", "16")
    with Raw(real.paths.cmd) as client:
        client.hello()
        for base in range(0, 300, 100):
            names = [(b"n", b"t%d" % i) for i in range(base, base + 100)]
            puts = [raw.put(b"k%d" % (base + i), name=i) for i in range(100)]
            assert set(client.batch(*puts, names=names).statuses) == {raw.ADDED}
        late = [(b"n", b"late"), (b"n", b"later")]
        both = [raw.put(b"a", name=0), raw.put(b"b", name=1)]
        assert client.batch(*both, names=late).statuses == [raw.FULL_TOPICS] * 2
        gone = [(b"n", b"nobody"), (b"nowhere", b"")]
        cancels = [raw.cancel(b"k7"), raw.cancel(b"k7", name=1)]
        assert client.batch(*cancels, names=gone).statuses == [raw.CANCELLED, raw.UNKNOWN]
        assert client.batch(*both, names=late).statuses == [raw.ADDED, raw.FULL_TOPICS]
        assert client.query(b"a", [(b"n", b"")]).first_info == (raw.FOUND, b"nlatea")
        again = [(b"n", b"t7"), (b"n", b"t9")]
        puts = [raw.put(b"k8", name=0), raw.put(b"k8", name=1)]
        assert client.batch(*puts, names=again).statuses == [raw.FULL_TOPICS, raw.EXISTS]
    authoritative_state(real)
    said = refused(lambda: real.restart("--topics", "299"))
    assert "topics 299 is below 300, which the arena holds" in said
    real.start("--topics", "300")


# ---- a virtual clock -------------------------------------------------------------------------


def test_advance_answers_after_all_that_is_due_was_sent(daemon: StartDaemon) -> None:
    daemon("demo", "--clock", "virtual")
    with shop() as client, Admin("demo", timeout=PATIENCE_S) as admin, listen() as subscriber:
        times = [i * 1_000_000 for i in range(1, 3001)]
        client.add_many(
            {"key": [str(t) for t in times], "deadline_boot_ns": times,
             "topic": [f"t{t // 1_000_000 % 3}" for t in times]}
        )  # fmt: skip
        assert subscriber.get(0) is None
        newest = admin.advance(1_500_500_000)
        assert {t: s for (_, t), (_, s) in newest.items()} == {"t0": 500, "t1": 500, "t2": 500}
        first = take(subscriber, 1500)
        assert sorted(n.deadline_boot_ns for n in first) == times[:1500]
        assert all(0 <= n.structural_lateness_ns < 65_536 for n in first)
        newest = admin.advance(10**12)
        assert {s for _, s in newest.values()} == {1000}
        assert len(take(subscriber, 1500)) == 1500
        assert subscriber.get(0) is None


def test_a_virtual_clock_does_not_go_back(daemon: StartDaemon) -> None:
    real = daemon("demo", "--clock", "virtual")
    with Raw(real.paths.cmd) as client, Raw(real.paths.admin) as admin:
        client.hello()
        assert client.batch(raw.put(b"k", 1000), at_ns=5_000_000).results[0][2] == 5_001_000
        assert stats(real)["now_ns"] == 5_000_000
        before = authoritative_state(real)
        for at_ns in (4_999_999, 0, -1, -(2**63)):
            found = admin.ask(raw.frame(raw.ADVANCE, at_ns=at_ns))
            assert (found.error, found.detail) == (raw.CLOCK, (5_000_000, at_ns % 2**64))
            refused = client.ask(raw.batch(client.session, 2, [raw.put(b"x")], at_ns=at_ns))
            assert (refused.error, refused.detail) == (raw.CLOCK, (5_000_000, at_ns % 2**64))
        assert authoritative_state(real) == before
        assert admin.ask(raw.frame(raw.ADVANCE, at_ns=6_000_000)).newest_sequences == {
            (b"raw", b"topic"): 1
        }
        with pytest.raises(MessageRefused) as caught, Admin("demo") as other:
            other.advance(1)
        assert caught.value.name == "CLOCK"


def watch(key: bytes, watch_key: bytes) -> tuple[bytes, bytes]:
    """Return (record, bytes) of an operation that waits until one watch key reaches watermark 1."""
    extension = struct.pack("<QQBBB5x", 1, 0, len(watch_key), 0, 0) + watch_key
    head = raw._RECORD.pack(4, 0, 0, len(key), 0, raw.DELAY, 0, len(extension), raw.HOUR_NS, 0)
    return head, key + extension


def trigger(watch_key: bytes) -> tuple[bytes, bytes]:
    """Return (record, bytes) of an advance to watermark 1."""
    return raw.record(5, len(watch_key), value=1), watch_key


@pytest.mark.tier("test")
def test_a_message_for_a_later_virtual_time_keeps_its_place(daemon: StartDaemon) -> None:
    """A message that visits over 1024 watches continues in the next iteration. Messages behind it
    wait."""
    real = daemon("demo", "--clock", "virtual", "--inbox", "10000")
    with Raw(real.paths.cmd) as client:
        client.hello()
        for watch_key in (b"a", b"b"):
            for part in range(2):
                keys = (b"%s-%d-%d" % (watch_key, part, n) for n in range(1000))
                assert client.batch(*[watch(key, watch_key) for key in keys]).error == 0
        session, sequence = client.session, client.sequence
        client.send(raw.batch(session, sequence + 1, [trigger(b"a")]))
        client.send(raw.batch(session, sequence + 2, [trigger(b"b")], at_ns=5_000_000))
        client.send(raw.batch(session, sequence + 3, [raw.put(b"last")]))
        answers: list[tuple[int, int]] = []
        while len(answers) < 3:
            found = client.receive()
            answers += [(found.sequence - sequence, found.error)] * (found.message == raw.BATCH)
    assert answers == [(1, 0), (2, 0), (3, 0)]
    assert stats(real)["now_ns"] == 5_000_000


def test_a_virtual_clock_reaches_its_end(daemon: StartDaemon) -> None:
    real = daemon("demo", "--clock", "virtual")
    with Raw(real.paths.cmd) as client, Raw(real.paths.admin) as admin:
        client.hello()
        client.batch(raw.put(b"k", 2**62), raw.put(b"end", 2**63 - 1))
        assert (
            admin.ask(raw.frame(raw.ADVANCE, at_ns=2**63 - 1)).newest_sequences[b"raw", b"topic"]
            >= 1
        )
        assert client.batch(raw.put(b"x", 0), at_ns=2**63 - 1).statuses == [raw.ADDED]
        assert client.batch(raw.put(b"y", 1)).statuses == [24]


def test_a_virtual_clock_stands_while_the_daemon_is_down(daemon: StartDaemon) -> None:
    real = daemon("demo", "--clock", "virtual")
    with shop() as client, Admin("demo", timeout=PATIENCE_S) as admin:
        admin.advance(7_000_000)
        client.add("k", delay_ns=1_000_000)
    real.kill()
    real.start()
    with shop() as client, Admin("demo", timeout=PATIENCE_S) as admin:
        assert stats(real)["now_ns"] == 7_000_000
        assert client.get("k") is not None
        assert [sequence for _, sequence in admin.advance(8_100_000).values()] == [1]
    with pytest.raises(DaemonFailed, match="clock is VIRTUAL, expected BOOT"):
        real.restart("--clock", "real")


# ---- refused starts --------------------------------------------------------------------------


def test_a_second_daemon_of_a_name_is_refused(real: Daemon, daemon: StartDaemon) -> None:
    assert f"process {real.pid}" in refused(lambda: daemon("demo"))
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.ping()
    daemon("other")


def test_an_arena_file_of_another_size_is_refused(real: Daemon) -> None:
    real.stop()
    arena_file = SHM / real.paths.arena[1:]
    size = arena_file.stat().st_size
    for wrong in (size - 4096, size + 4096, 100):
        os.truncate(arena_file, wrong)
        said = refused(real.start)
        assert str(wrong) in said, said
    os.truncate(arena_file, size)


def test_a_foreign_arena_file_is_refused(real: Daemon) -> None:
    real.stop()
    for arena_file in (real.paths.arena, real.paths.private):
        path = SHM / arena_file[1:]
        saved = path.read_bytes()
        path.write_bytes(b"\x07" * len(saved))
        said = refused(real.start)
        assert real.paths.arena in said
        assert str(0x0707070707070707) in said, said
        assert path.read_bytes() == b"\x07" * len(saved)
        path.write_bytes(saved)
    real.start()


def test_an_empty_arena_file_is_refused(daemon_dir: Path, daemon: StartDaemon) -> None:
    real = daemon()
    real.stop()
    arena_file = SHM / real.paths.arena[1:]
    arena_file.write_bytes(b"")
    assert real.paths.arena in refused(real.start)


def test_a_stale_socket_is_taken_over_and_other_files_are_not(
    daemon_dir: Path, daemon: StartDaemon
) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(daemon_dir / "demo.cmd"))
    real = daemon()
    real.kill()
    assert real.paths.pub.is_socket()
    real.start()
    real.stop()
    for path in (real.paths.cmd, real.paths.pub, real.paths.admin):
        path.write_text("precious")
        assert f"{path}: is not a socket: remove it" in refused(real.start)
        assert path.read_text() == "precious"
        path.unlink()
    real.start()


def in_small_memory(directory: Path, size: str) -> str:
    """Return the path of a Python that runs with a private /dev/shm of `size`."""
    needs("mountns", "a small /dev/shm")
    script = directory / "python"
    inner = (
        f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec {shlex.quote(sys.executable)} "$@"'
    )
    script.write_text(f'#!/bin/sh\nexec unshare -m sh -c {shlex.quote(inner)} sh "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("size", "args"),
    [
        ("8m", ()),
        ("64m", ("--capacity", "10000000")),
        ("64m", ("--payload-memory", "60G")),
        # only the private arena file does not fit into /dev/shm
        ("24m", ("--capacity", "1000", "--payload-memory", "16M")),
    ],
)
def test_an_arena_that_does_not_fit_reports_needed_and_available(
    size: str, args: tuple[str, ...], daemon_dir: Path
) -> None:
    python = in_small_memory(daemon_dir, size)
    said = refused(lambda: Daemon("demo", daemon_dir, args, python=python))
    needed, available = (
        int(n) for n in re.findall(r"needs (\d+) bytes in /dev/shm, available are (\d+)", said)[0]
    )
    assert needed > available == int(size[:-1]) << 20


@pytest.fixture
def small_memory(daemon_dir: Path) -> Iterator[Daemon]:
    """Start a daemon with a private /dev/shm of 8 MiB, which its later starts use again."""
    with private_memory("8m", "a small /dev/shm") as enter:
        python = python_in(enter, daemon_dir / "python")
        real = Daemon("demo", daemon_dir, (*SMALL, "--capacity", "1000"), python=python)
        yield real
        real.close()


SMALL = (
    "--payload-memory", "1M", "--replay-buffer", "1024", "--sessions", "4", "--watches", "1000",
    "--watch-keys", "1000",
)  # fmt: skip


@pytest.mark.tier("test")
def test_a_resize_that_does_not_fit_says_so_and_changes_nothing(small_memory: Daemon) -> None:
    """During a resize, the old and the new arena exist at the same time."""
    with shop() as client:
        client.add("k", delay=HOUR_S, payload=b"p")
    small_memory.stop()
    said = refused(lambda: small_memory.start(*SMALL, "--capacity", "80000"))
    needed, available = (
        int(n) for n in re.findall(r"needs (\d+) bytes in /dev/shm, available are (\d+)", said)[0]
    )
    assert available < needed < 16 << 20
    small_memory.start(*SMALL, "--capacity", "1000")
    with shop() as client:
        assert client.get("k") is not None


def test_a_full_shared_memory_does_not_touch_a_running_daemon(small_memory: Daemon) -> None:
    """The daemon allocates all pages at its start. So it answers "full" and gets no SIGBUS."""
    shm = Path(f"/proc/{small_memory.pid}/root/dev/shm")
    # write until /dev/shm is full
    with (shm / "filler").open("wb") as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
    assert os.statvfs(shm).f_bavail == 0
    with shop() as client:
        for i in range(1000):
            client.add(str(i), delay=HOUR_S, payload=bytes(500), wait=False)
        client.flush()
        with pytest.raises(Full):
            client.add("one more", delay=HOUR_S)
        assert client.cancel("7") is CancelResult.CANCELLED
    small_memory.kill()
    small_memory.start()
    with shop() as client:
        assert client.get("8") is not None
    (shm / "filler").unlink(missing_ok=True)


@pytest.mark.parametrize("args", [(), ("--wal-dir", "wal")], ids=["without a WAL", "with a WAL"])
def test_the_defaults_fit_64_mib(args: tuple[str, ...], daemon_dir: Path) -> None:
    real = Daemon("demo", daemon_dir, args, python=in_small_memory(daemon_dir, "64m"))
    real.close()


# ---- sizes and settings ----------------------------------------------------------------------


def test_a_restart_may_enlarge(daemon: StartDaemon) -> None:
    sizes = (
        "--capacity",
        "1000",
        "--payload-memory",
        "1M",
        "--replay-buffer",
        "64",
        "--sessions",
        "4",
    )
    real = daemon("demo", *sizes)
    with Raw(real.paths.cmd) as client:
        client.hello(bytes(16))
        session = client.session
        batch = raw.batch(session, 1, [raw.put(b"%d" % i) for i in range(1000)])
        first = client.ask(batch)
        assert client.ask(raw.batch(session, 2, [raw.put(b"full")])).statuses == [16]
        cancels = [raw.cancel(b"%d" % i) for i in range(10)]
        client.ask(raw.batch(session, 3, cancels))
        client.ask(raw.batch(session, 4, [raw.put(b"now%d" % i, 0) for i in range(10)]))
        eventually(lambda: sent(real, "raw") == 10)
    before = stats(real)
    with listen(namespace="raw") as subscriber:
        real.restart("--capacity", "5000", "--payload-memory", "4M", "--replay-buffer", "256")
        after = stats(real)
        retained = ("stream_id", "live", "adds", "cancels")
        assert [after[name] for name in retained] == [before[name] for name in retained]
        # these counters have grown, because the daemon published notices about its stop and start
        on = ("next_ticket", "replay_tail", "published")
        assert all(after[name] > before[name] for name in on)
        assert (after["capacity"], after["replay_capacity"]) == (5000, 256)
        with Raw(real.paths.cmd) as client:
            client.hello(bytes(16))
            assert (client.session, client.sequence) == (session, 4)
            assert client.ask(batch) == first
            assert client.batch(raw.cancel(b"now3")).statuses == [raw.FIRED]
            more = [raw.put(b"more%d" % i) for i in range(1000)]
            assert set(client.batch(*more).statuses) == {raw.ADDED}
            client.batch(raw.put(b"next", 0))
            (notice,) = take(subscriber, 1)
            assert (notice.key, notice.seq) == ("next", 11)
    said = refused(lambda: real.restart("--capacity", "1989"))
    assert "capacity 1989 is below 1990, which the arena holds" in said
    real.start("--capacity", "1990")
    assert stats(real)["live"] == 1990
    assert not list(SHM.glob(f"{real.paths.arena[1:]}*.new"))


def test_flags_win_over_the_environment_and_that_over_the_file(
    daemon_dir: Path, daemon: StartDaemon
) -> None:
    toml = daemon_dir / "settings.toml"
    toml.write_text("capacity = 100\nfanout = 16\ntick = '1ms'\n")
    environment = {"PURGATORYD_CAPACITY": "200", "PURGATORYD_FANOUT": "32"}
    real = daemon("demo", "--config", str(toml), "--capacity", "300", env=environment)
    found = stats(real)
    assert (found["capacity"], found["fanout"], found["tick_ns"]) == (300, 32, 1_000_000)


# ---- idle daemon, and permissions ------------------------------------------------------------


def switches(pid: int) -> int:
    """Return how often the threads of a process went to sleep. Preemptions do not count."""
    texts = thread_status(pid).values()
    found = (re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.M) for text in texts)
    return sum(int(n) for (n,) in found)


@pytest.mark.tier("test")
def test_an_idle_daemon_sleeps(real: Daemon) -> None:
    with shop() as client:
        client.add_many([(f"k{i}", HOUR_S + i) for i in range(5000)])
    heartbeat_ns = stats(real)["heartbeat_boot_ns"]
    eventually(lambda: stats(real)["heartbeat_boot_ns"] > heartbeat_ns)
    start_ns, before = boot_ns(), switches(real.pid)
    eventually(lambda: stats(real)["heartbeat_boot_ns"] > start_ns + 3_000_000_000)
    seconds = (boot_ns() - start_ns) / 1e9
    assert switches(real.pid) - before <= 2 * seconds + 3


def test_memory_does_not_grow_with_use(real: Daemon) -> None:
    with Raw(real.paths.cmd) as client:
        client.hello()
        keys = [b"key-%d" % i for i in range(1000)]
        adds = [raw.put(key, payload=b"x" * 48) for key in keys]
        cancels = [raw.cancel(key) for key in keys]

        def cycle(rounds: int) -> int:
            for _ in range(rounds):
                assert set(client.batch(*adds).statuses) == {raw.ADDED}
                assert set(client.batch(*cancels).statuses) == {raw.CANCELLED}
            memory = psutil.Process(real.pid).memory_full_info()
            return int(memory.uss)

        before = stats(real)["blob_bytes"]
        warm = cycle(20)
        assert cycle(200) - warm < 2 << 20
    assert stats(real)["blob_bytes"] == before


def test_administration_is_denied_to_other_users(real: Daemon) -> None:
    needs("root", "another user's process")
    nobody = 65534
    real.dir.chmod(0o777)
    for path in (real.paths.admin, real.paths.cmd):
        path.chmod(0o666)
    with Raw(real.paths.cmd) as client:
        client.hello()
        session = client.session

    def as_nobody() -> list[tuple[int, int]]:
        with Raw(real.paths.admin) as admin, Raw(real.paths.cmd) as client:
            found = [admin.ask(raw.frame(m)) for m in (raw.PING, raw.STOP, raw.ADVANCE)]
            found.append(client.ask(raw.batch(session, 1, [raw.put(b"k")])))
            return [(answer.error, answer.detail[0]) for answer in found]

    assert in_child(as_nobody, nobody) == repr([(raw.DENIED, nobody)] * 4)
    assert real.running


def in_child(call: Callable[[], object], uid: int) -> str:
    """Run `call` in a forked process as another user; return repr() of the call's result."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(write_fd, repr(call()).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with open(read_fd) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said

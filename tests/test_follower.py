"""Subscribers that read notices straight from the arena, and sleep on its words."""

from __future__ import annotations

import asyncio
import errno
import itertools
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import pytest
import zmq
from partitioned import start_partitioned
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually
from requeue import key_after_requeue

from purgatoryd.clients import AsyncSubscriber, Client, Closed, ForkedProcess, Notice, Subscriber
from purgatoryd.clients.arena_requests import ArenaRequests
from purgatoryd.clients.subscriber import Inbox, Merged, Opener
from purgatoryd.shm_layout import follower, wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import ArenaMissing, Lagged
from purgatoryd.shm_layout.follower import Follower
from purgatoryd.shm_layout.paths import Paths, client_paths

pytestmark = pytest.mark.tier("test")


@pytest.fixture
def real(daemon: StartDaemon) -> Daemon:
    return daemon("demo", "--replay-buffer", "1024")


@pytest.fixture
def client(real: Daemon) -> Iterator[Client]:
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def sleeps_end_by_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sleeps of subscribers last so long that a test fails if a notice ends none."""
    monkeypatch.setattr(Inbox, "patience_s", property(lambda _: 10 * PATIENCE_S))


def listen(*topics: str) -> Subscriber:
    return Subscriber("demo", namespace="shop", topics=topics or None)


def followed(subscriber: Subscriber) -> Follower:
    assert isinstance(subscriber._inbox, Inbox)
    found = subscriber._inbox.follower
    assert found is not None
    return found


# ---- columns -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_columns_have_the_fields_of_the_notices(client: Client) -> None:
    with listen() as subscriber:
        client.add_many([(f"k{i}", 0, f"t{i % 3}", bytes([i]) * i) for i in range(100)])
        found: dict[str, list[int]] = {}
        count = 0
        while count < 100:
            some = subscriber.get_many(7, PATIENCE_S)
            assert some is not None
            assert 1 <= len(some) <= 7
            count += len(some)
            data = some.data.tobytes()
            topics = [topic for topic, number in some.topics for _ in range(number)]
            for i, notice in enumerate(some):
                key = data[some.key_offsets[i] :][: some.key_lengths[i]]
                payload = data[some.payload_offsets[i] :][: some.payload_lengths[i]]
                assert (key.decode(), payload, topics[i]) == (
                    notice.key, notice.payload, notice.topic,
                )  # fmt: skip
                assert some.tickets[i] == notice.ticket
                assert some.deadlines_boot_ns[i] == notice.deadline_boot_ns
                assert some.fired_boot_ns[i] == notice.fired_boot_ns
                assert some.sequences[i] == notice.seq
                assert some[i] is notice
                found.setdefault(notice.topic, []).append(notice.seq)
        assert subscriber.get_many(7, 0) is None
    assert sorted(len(numbers) for numbers in found.values()) == [33, 33, 34]
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in found.values())


@pytest.mark.usefixtures("way")
def test_single_notices_columns_and_iteration_can_be_mixed(client: Client) -> None:
    with listen() as subscriber:
        client.add_many([(f"k{i}", 0, f"t{i % 3}") for i in range(300)])
        seen: list[Notice | None] = []
        while len(seen) < 300:
            seen.append(next(subscriber))
            if len(seen) < 300:
                seen += itertools.islice(subscriber, random.randrange(min(5, 300 - len(seen)) + 1))
            if len(seen) < 300 and random.random() < 0.5:
                seen.append(subscriber.get(PATIENCE_S))
            if len(seen) < 300 and random.random() < 0.5:
                seen += subscriber.get_many(2, PATIENCE_S) or ()
        assert subscriber.get(0) is None
    for topic in ("t0", "t1", "t2"):
        assert [n.seq for n in seen if n and n.topic == topic] == list(range(1, 101))


@pytest.mark.usefixtures("way")
def test_an_iteration_takes_batches(client: Client) -> None:
    with listen("t") as subscriber:
        client.add_many([(f"k{i}", 0, "t") for i in range(100)])
        client.add("last", delay=0.05, topic="t")
        peeks = 0
        peek_many = subscriber._inbox.peek_many

        def counted(most: int) -> Any:
            nonlocal peeks
            found = peek_many(most)
            peeks += found is not None
            return found

        subscriber._inbox.peek_many = counted  # type: ignore[method-assign]
        assert [notice.seq for notice in itertools.islice(subscriber, 101)] == list(range(1, 102))
    assert peeks < 50


def next_range(subscriber: Subscriber) -> tuple[int, int]:
    """Return the sequences of the next notices, or of the next loss."""
    try:
        some = subscriber.get_many(timeout=PATIENCE_S)
    except Lagged as lagged:
        return lagged.first_lost, lagged.last_lost
    assert some is not None
    return int(some.sequences[0]), int(some.sequences[-1])


@pytest.mark.usefixtures("way")
def test_an_overtaken_subscriber_receives_the_lost_range_once(client: Client, real: Daemon) -> None:
    with listen("t") as subscriber:
        client.add_many([(f"k{i}", 0, "t") for i in range(5000)])
        with closing(Reader.attach(real.paths)) as reader:
            eventually(lambda: reader.metrics.live == 0)
        next_one = 1
        while next_one <= 5000:
            first, last = next_range(subscriber)
            assert first == next_one
            next_one = last + 1
        assert subscriber.get(0) is None


@pytest.mark.usefixtures("way")
def test_an_async_subscriber_does_not_block_its_loop(client: Client) -> None:
    async def use() -> list[int]:
        async with AsyncSubscriber("demo", namespace="shop", topics=["t"]) as subscriber:
            waiting = asyncio.create_task(subscriber.get_many(timeout=PATIENCE_S))
            await asyncio.sleep(0.05)  # runs only if the loop is free
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            client.add_many([(f"k{i}", 0, "t") for i in range(10)])
            sequences: list[int] = []
            while len(sequences) < 10:
                some = await subscriber.get_many(4, PATIENCE_S)
                assert some is not None
                sequences += some.sequences.tolist()
            return sequences

    assert asyncio.run(use()) == list(range(1, 11))


@pytest.mark.usefixtures("sleeps_end_by_notices")
def test_tasks_that_wait_for_notices_do_not_delay_each_other(client: Client) -> None:
    """The sleep of the first task begins only after the second task has looked for notices."""

    async def use(subscriber: AsyncSubscriber, other: Subscriber) -> list[int]:
        begins = threading.Event()
        subscriber._sleeper = ThreadPoolExecutor(1)
        subscriber._sleeper.submit(begins.wait)
        tasks = [asyncio.create_task(subscriber.get())]
        while subscriber._sleeping is None:
            await asyncio.sleep(0)
        client.add_many([("a", 0, "t"), ("b", 0, "t")])
        assert [other.get(PATIENCE_S) is not None for _ in "ab"] == [True, True]
        tasks.append(asyncio.create_task(subscriber.get()))
        for _ in range(10):
            await asyncio.sleep(0)
        begins.set()
        found = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        return [notice.seq for notice in found if notice is not None]

    async def opened() -> list[int]:
        with listen("t") as other:
            async with AsyncSubscriber("demo", namespace="shop", topics=["t"]) as subscriber:
                return await use(subscriber, other)

    assert sorted(asyncio.run(opened())) == [1, 2]


@pytest.mark.usefixtures("real", "sleeps_end_by_notices")
def test_a_timeout_ends_while_another_task_waits() -> None:
    async def use() -> bool:
        async with AsyncSubscriber("demo", namespace="shop", topics=["t"]) as subscriber:
            waiting = asyncio.create_task(subscriber.get())
            while subscriber._sleeping is None:
                await asyncio.sleep(0)
            for limit_s in (0, 0.01):
                got = subscriber.get(timeout=limit_s)
                assert await asyncio.wait_for(got, PATIENCE_S) is None
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return waiting.cancelled()

    assert asyncio.run(use())


def test_an_iteration_ends_with_the_subscriber_and_in_a_forked_process(client: Client) -> None:
    with listen("t") as subscriber:
        client.add_many([(f"k{i}", 0, "t") for i in range(100)])
        with closing(Reader.attach(client_paths("demo"))) as reader:
            eventually(lambda: reader.metrics.live == 0)
        assert next(subscriber).seq == 1
        child = os.fork()
        if child == 0:
            with suppress(ForkedProcess):
                next(subscriber)
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert next(subscriber).seq == 2
    with pytest.raises(Closed):
        next(subscriber)


def test_a_late_opener_reads_an_arena_that_is_there(client: Client) -> None:
    inbox = Opener("demo", "shop", ["t"], 1000, None, None, False, "auto")(late=True)
    assert isinstance(inbox, Inbox)
    assert inbox.follower is not None
    assert inbox.let_in()
    inbox.close()


def test_a_signal_ends_a_sleep(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    with listen("t") as subscriber:
        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Alarm):
                subscriber.get(PATIENCE_S)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        client.add("k", delay=0, topic="t")
        notice = subscriber.get(PATIENCE_S)
        assert notice is not None


@pytest.mark.usefixtures("real")
def test_a_close_ends_the_sleep_of_another_task() -> None:
    async def use() -> BaseException | Notice | None:
        subscriber = await AsyncSubscriber("demo", namespace="shop", topics=["t"]).connect()
        waiting = asyncio.create_task(subscriber.get(PATIENCE_S))
        await asyncio.sleep(0.05)
        await subscriber.close()
        return (await asyncio.gather(waiting, return_exceptions=True))[0]

    assert isinstance(asyncio.run(use()), Closed)


def test_a_subscriber_without_the_hosts_shared_memory_uses_the_socket(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon does not pass its arena either."""

    def missing(paths: Paths) -> Reader:
        raise ArenaMissing(paths.arena)

    with monkeypatch.context() as container:
        container.setattr("purgatoryd.clients.subscriber.Reader.attach", missing)
        container.setattr(ArenaRequests, "take", lambda *_: None)
        with pytest.raises(ArenaMissing):
            Subscriber("demo", namespace="shop", topics=["t"], timeout=0)
        subscriber = Subscriber("demo", namespace="shop", topics=["t"], timeout=4)
        assert not subscriber._inbox._stream.mapped  # type: ignore[union-attr]
        received: list[Notice] = []

        def arrived() -> bool:
            client.add("probe", delay=0, topic="t")
            received.extend(subscriber.get_many(timeout=0.02) or ())
            return bool(received)

        eventually(arrived)
        client.add_many([(f"k{i}", 0, "t") for i in range(100)])
        while sum(notice.key != "probe" for notice in received) < 100:
            received.extend(subscriber.get_many(timeout=PATIENCE_S) or ())
        first = received[0].seq
        assert [notice.seq for notice in received] == [*range(first, first + len(received))]
    subscriber._inbox._stream.reconnected()  # type: ignore[union-attr]
    assert subscriber._inbox._stream.mapped  # type: ignore[union-attr]
    client.add("more", delay=0, topic="t")
    notice = subscriber.get(PATIENCE_S)
    assert notice is not None
    assert notice.seq == received[-1].seq + 1
    subscriber.close()


# ---- the daemon's ends ---------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_kills_of_the_daemon_lose_and_repeat_nothing(client: Client, real: Daemon) -> None:
    with listen("t") as subscriber:
        for start in range(5):
            client.add_many([(f"k{start}-{i}", 0.002 * (i % 5), "t") for i in range(100)])
            real.kill()
            real.start()
        sequences: list[int] = []
        while len(sequences) < 500:
            some = subscriber.get_many(timeout=PATIENCE_S)
            assert some is not None
            sequences += some.sequences.tolist()
        assert subscriber.get(0.05) is None
    assert sequences == list(range(1, 501))


def test_a_subscriber_of_the_arena_uses_no_socket(client: Client, real: Daemon) -> None:
    with listen("t") as subscriber:
        assert subscriber._inbox.sockets == ()
        client.add("k", delay=0, topic="t")
        notice = subscriber.get(PATIENCE_S)
        assert notice is not None
    with closing(Reader.attach(real.paths)) as reader:
        assert reader.header.published == reader.header.visible == reader.header.replay_tail


# ---- sleep ---------------------------------------------------------------------------------------


def wakes_of(reader: Reader) -> dict[str, int]:
    """Return the words of all topics of the namespace shop."""
    rows = reader.rows(lib.PG_R_TOPICS, "pg_topic")
    wanted = reader.namespace_row("shop")
    topics = ((row, reader.topic_at(row)) for row in range(reader.topic_rows))
    return {t.name: int(rows[row].wake) for row, t in topics if t and t.namespace_row == wanted}


def test_sixty_four_sleepers_of_other_topics_are_not_woken(client: Client, real: Daemon) -> None:
    others = [f"other{i}" for i in range(64)]
    client.add_many([(f"o{i}", 3600, topic) for i, topic in enumerate(others)])
    ended: list[bool] = []

    def sleep(one: Follower) -> None:
        ended.append(one.sleep.wait(PATIENCE_S))

    with ExitStack() as stack:
        busy = stack.enter_context(listen("busy"))
        client.add("first", delay=0, topic="busy")  # its firing wakes who waits for new names
        assert busy.get(PATIENCE_S) is not None
        sleepers = [stack.enter_context(listen(topic)) for topic in others]
        for sleeper in sleepers:
            assert sleeper.get(0) is None
        reader = stack.enter_context(closing(Reader.attach(real.paths)))
        before = wakes_of(reader)
        threads = [threading.Thread(target=sleep, args=(followed(one),)) for one in sleepers]
        for thread in threads:
            thread.start()
        for i in range(50):
            client.add(f"k{i}", delay=0, topic="busy")
        for _ in range(50):
            assert busy.get(PATIENCE_S) is not None
        assert not ended
        after = wakes_of(reader)
        assert [after[topic] for topic in others] == [before[topic] for topic in others]
        assert after["busy"] != before["busy"]
        for one in sleepers:
            followed(one).sleep.end()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert ended == [True] * 64


def test_hostile_requeues_delay_a_reader_by_the_limit_of_its_sleep(
    client: Client, real: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of the group moves the sleeper to a word that nobody wakes, again and again. The
    sleep then ends at its limit, and the following sleeps are short."""
    limits: list[float] = []
    missed: list[bool] = []
    wait = follower.Sleep.wait

    def counted(sleep: follower.Sleep, limit_s: float) -> bool:
        limits.append(limit_s)
        woken = wait(sleep, limit_s)
        missed.append(not woken and sleep.missed)
        return woken

    with listen("t") as subscriber, closing(Reader.attach(real.paths)) as reader:
        client.add("first", delay=0, topic="t")
        assert subscriber.get(PATIENCE_S) is not None
        monkeypatch.setattr(follower.Sleep, "wait", counted)
        rows = reader.rows(lib.PG_R_TOPICS, "pg_topic")
        row = reader.topic_row("shop", "t")
        word, other = (ffi.addressof(rows[n], "wake") for n in (row, row + 1))

        def misses_a_wake_up() -> bool:
            arm = partial(client.add, "k", delay=0, topic="t")
            assert key_after_requeue(subscriber, word, other, arm) == "k"
            return missed[-1]

        for _ in range(3):
            eventually(misses_a_wake_up)
    assert max(limits) <= follower.IDLE_S
    assert all(
        limit_s <= follower.MISSED_S
        for limit_s, after in zip(limits[1:], missed, strict=False)
        if after
    )


def received(socket: zmq.Socket[bytes]) -> list[tuple[int, str]]:
    """Return (sequence, key) of the notices of the next message."""
    assert socket.poll(round(PATIENCE_S * 1000))
    _, body = socket.recv_multipart()
    head = wire.decode_notice_head(body)
    notices = wire.decode_notices(body, head.records)
    return [(head.first + i, str(notice[5])) for i, notice in enumerate(notices)]


def test_a_plain_socket_receives_all_that_a_reader_of_the_arena_does(
    client: Client, real: Daemon
) -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
        listen("t") as subscriber,
    ):
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.SUBSCRIBE, wire.topic_frame(b"shop", b"t"))
        socket.connect(real.paths.pub_endpoint)

        def subscribed() -> bool:
            client.add("probe", delay=0, topic="t")
            return bool(socket.poll(20))

        eventually(subscribed)
        client.add_many([(f"k{i}", 0.0005 * (i % 50), "t") for i in range(500)])
        client.add("last", delay=0.1, topic="t")
        sent: list[tuple[int, str]] = []
        while not sent or sent[-1][1] != "last":
            sent += received(socket)
        read: list[tuple[int, str]] = []
        while not read or read[-1][1] != "last":
            some = subscriber.get_many(timeout=PATIENCE_S)
            assert some is not None
            read += [(notice.seq, str(notice.key)) for notice in some]
    first = sent[0][0]
    assert [number for number, _ in sent] == [*range(first, first + len(sent))]
    assert len(sent) > 500
    assert read[first - 1 :] == sent


def test_a_socket_that_subscribes_while_the_core_fires_receives_all_later_notices(
    client: Client, real: Daemon
) -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
        listen("t") as subscriber,
    ):
        client.add_many([(f"k{i}", 0.5 + i / 500, "t") for i in range(1000)])
        first = subscriber.get(PATIENCE_S)
        assert first is not None
        assert first.seq == 1
        socket.linger = 0
        socket.connect(real.paths.pub_endpoint)
        socket.set(zmq.SUBSCRIBE, wire.topic_frame(b"shop", b"t"))
        found: list[tuple[int, str]] = []
        while not found or found[-1][0] < 1000:
            found += received(socket)
        assert [sequence for sequence, _ in found] == list(range(found[0][0], 1001))
        assert [n.seq for n in itertools.islice(subscriber, 999)] == list(range(2, 1001))


def test_a_missed_wake_up_shortens_the_next_sleeps() -> None:
    one = Follower.__new__(Follower)
    one.limit_s = follower.IDLE_S
    word = ffi.new("uint32_t *")
    one.sleep = follower.Sleep([word])
    one.sleep.look()
    one.slept(woken=False)
    assert one.limit_s == follower.IDLE_S
    word[0] = 1
    one.slept(woken=False)
    assert one.limit_s == follower.MISSED_S
    one.sleep.look()
    one.slept(woken=False)
    assert one.limit_s == 2 * follower.MISSED_S


def test_a_sleep_works_on_a_read_only_mapping_of_another_process(tmp_path: Any) -> None:
    file = tmp_path / "words"
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("r+b") as opened:
        writable = mmap.mmap(opened.fileno(), 0)
        word = ffi.cast("uint32_t *", ffi.from_buffer(writable, require_writable=True))
        child = os.fork()
        if child == 0:
            if os.geteuid() == 0:
                os.setuid(65534)
            view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            sleep = follower.Sleep([ffi.cast("uint32_t *", ffi.from_buffer(view))])
            sleep.look()
            writable[8] = 1  # the parent changes the word after this
            os._exit(0 if sleep.wait(PATIENCE_S) else 1)
        while not writable[8]:
            time.sleep(0.001)
        lib.pg_wake_all(word)
        assert os.waitpid(child, 0)[1] == 0


def test_a_sleep_ends_at_once_if_the_word_changed_before_it() -> None:
    word = ffi.new("uint32_t *")
    sleep = follower.Sleep([word])
    sleep.look()
    word[0] = 1
    assert sleep.wait(PATIENCE_S)
    sleep.look()
    assert not sleep.wait(0)


@pytest.mark.parametrize(("partitions", "joins"), [(1, False), (4, False), (4, True)])
def test_a_notice_between_the_look_and_the_sleep_ends_the_sleep(
    daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, partitions: int, joins: bool
) -> None:
    """`joins`: the notice comes before the words of several arenas are joined to one sleep."""
    start_partitioned(daemon, partitions, "--capacity", "4096", "--payload-memory", "1MiB")
    join = Merged._settle_sleep
    due: list[Callable[[], object]] = []

    def settle(self: Merged) -> None:
        while due:
            due.pop()()
        join(self)

    monkeypatch.setattr(Merged, "_settle_sleep", settle)
    with (
        Client("demo", timeout=PATIENCE_S) as client,
        Subscriber("demo", topics=["t"]) as subscriber,
        Subscriber("demo", topics=["t"]) as other,
    ):

        def fire(key: str) -> None:
            client.add(key, 0, topic="t")
            notice = other.get(PATIENCE_S)  # the notice is visible
            assert notice is not None

        for key in map(str, range(24)):
            inbox = subscriber._inbox
            if joins:
                due.append(partial(fire, key))
            assert inbox.peek() is None
            if not joins:
                fire(key)
            assert not due
            sleep = inbox.sleep
            assert sleep is not None
            assert sleep.wait(PATIENCE_S), key
            notice = subscriber.get(0)
            assert notice is not None
            assert notice.key == key


def test_a_sleep_on_too_many_words_is_refused() -> None:
    words = ffi.new("uint32_t *[]", lib.PG_SLEEP_WORDS + 1)
    values = ffi.new("uint32_t[]", lib.PG_SLEEP_WORDS + 1)
    assert lib.pg_sleep(words, values, lib.PG_SLEEP_WORDS + 1, 0) == errno.EINVAL


@pytest.mark.usefixtures("way")
def test_topics_that_do_not_exist_yet_are_awaited(client: Client) -> None:
    with listen("later") as subscriber:
        assert subscriber.get(0) is None
        client.add("k", delay=0, topic="later")
        notice = subscriber.get(PATIENCE_S)
        assert notice is not None
        assert notice.key == "k"

"""Subscribers of a partitioned namespace that read notices straight from the arenas of its
shards."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from deployment import Deployment, deployments
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually
from requeue import key_after_requeue

from purgatoryd.clients import Admin, AsyncSubscriber, Client, Closed, Notice, Subscriber
from purgatoryd.clients.route import Route
from purgatoryd.clients.subscriber import Merged, Opener
from purgatoryd.shm_layout import follower
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import Lagged, OtherAbi
from purgatoryd.shm_layout.layout import ArenaState
from purgatoryd.shm_layout.paths import Paths, paths_in
from purgatoryd.shm_layout.shards import read_table
from purgatoryd.shm_layout.shm import ArenaFile

pytestmark = pytest.mark.tier("test")

SMALL = "--capacity", "2000", "--payload-memory", "1M", "--replay-buffer", "1024"
SHARDS = 0, 1


@pytest.fixture
def clicks(daemon: StartDaemon) -> Daemon:
    demo = daemon("demo", "--shards", "2", *SMALL)
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("clicks", 4)
    return demo


@pytest.fixture
def client(clicks: Daemon) -> Iterator[Client]:
    with Client("demo", namespace="clicks", timeout=PATIENCE_S) as client:
        yield client


def listen(*topics: str) -> Subscriber:
    return Subscriber("demo", namespace="clicks", topics=topics or None, timeout=PATIENCE_S)


def merged(subscriber: Subscriber) -> Merged:
    assert isinstance(subscriber._inbox, Merged)
    return subscriber._inbox


def paths_of(demo: Daemon, shard: int) -> Paths:
    table = read_table(demo.dir, "demo")
    assert table is not None
    return paths_in(demo.dir, table.daemon(shard))


@contextmanager
def mapped(demo: Daemon, shard: int) -> Iterator[Reader]:
    with closing(Reader.attach(paths_of(demo, shard))) as reader:
        yield reader


def pid_of(demo: Daemon, shard: int) -> int:
    with mapped(demo, shard) as reader:
        return int(reader.header.daemon_pid)


def key_in(client: Client, shard: int, word: str = "k") -> str:
    """Return a key whose partition is in this shard."""
    keys = (f"{word}{i}" for i in range(1000))
    return next(key for key in keys if client.add(key, 3600, mode="replace").ticket >> 48 == shard)


def _shard(ticket: int) -> int:
    return ticket >> 48


def fire(client: Client, word: str, count: int = 40) -> set[str]:
    """Let timers of all partitions fire. Return their keys."""
    keys = {f"{word}{i}" for i in range(count)}
    assert client.add_many([(key, 0.0, "t") for key in keys]).ok
    return keys


def take(subscriber: Subscriber, count: int) -> tuple[list[Notice], list[Lagged]]:
    """Return the next `count` notices, and the losses that are reported before the last one."""
    found: list[Notice] = []
    lost: list[Lagged] = []
    while len(found) < count:
        try:
            some = subscriber.get_many(count - len(found), PATIENCE_S)
        except Lagged as reported:
            lost.append(reported)
            continue
        assert some is not None, f"{len(found)} of {count} notices came"
        found += some
    return found, lost


def fired(demo: Daemon, *shards: int) -> bool:
    """Return whether these shards have sent the notices of all timers."""
    for shard in shards:
        with mapped(demo, shard) as reader:
            header = reader.header
            if reader.metrics.live or header.published != header.replay_tail:
                return False
    return True


def assert_in_order(notices: list[Notice]) -> None:
    """Check that each shard's notices came once and in order."""
    for shard in {_shard(notice.ticket) for notice in notices}:
        sequences = [n.seq for n in notices if _shard(n.ticket) == shard]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


Slept = tuple[int, float, bool]
"""(number of arenas, limit in seconds, ended by a word)."""


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[Slept]:
    """Record the sleeps on several arenas."""
    found: list[Slept] = []
    wait = follower.JoinedSleep.wait

    def recorded(sleep: follower.JoinedSleep, limit_s: float) -> bool:
        woken = wait(sleep, limit_s)
        found.append((len(sleep.parts), limit_s, woken))
        return woken

    monkeypatch.setattr(follower.JoinedSleep, "wait", recorded)
    return found


# ---- the source of notices -----------------------------------------------------------------------


def test_the_notices_of_partitions_come_from_the_arenas(
    client: Client, clicks: Daemon, sleeps: list[Slept]
) -> None:
    with listen("t") as subscriber:
        assert merged(subscriber).sockets == ()
        assert all(inbox.follower is not None for inbox in merged(subscriber)._inboxes)
        keys = fire(client, "k")
        found, lost = take(subscriber, 40)
        assert subscriber.get(0.05) is None
        assert merged(subscriber).sockets == ()
    assert lost == []
    assert {str(notice.key) for notice in found} == keys
    assert {_shard(notice.ticket) for notice in found} == {*SHARDS}
    assert_in_order(found)
    assert sleeps
    assert {count for count, _, _ in sleeps} == {2}


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("topics", [(), ("t",), tuple(f"t{i}" for i in range(100))])
def test_a_notice_of_any_shard_ends_the_sleep(
    client: Client, clicks: Daemon, sleeps: list[Slept], shard: int, topics: tuple[str, ...]
) -> None:
    key, topic = key_in(client, shard), (topics or ("t",))[0]
    with listen(*topics) as subscriber:
        client.add("first", delay=0, topic=topic)  # its firing ends a sleep for the names
        take(subscriber, 1)
        found: list[Notice | None] = []
        thread = threading.Thread(target=lambda: found.append(subscriber.get(PATIENCE_S)))
        sleeps.clear()
        client.add(key, delay=0.2, topic=topic, mode="replace")
        thread.start()
        thread.join(PATIENCE_S)
    assert [notice and notice.key for notice in found] == [key]
    assert sleeps[-1][2]


def hide(monkeypatch: pytest.MonkeyPatch, hidden: Paths) -> None:
    """Let the arena of one daemon have another ABI."""
    attach = Reader.attach

    def attached(paths: Paths) -> Reader:
        if paths.arena == hidden.arena:
            raise OtherAbi(paths.arena, "abi_major", 1, 2)
        return attach(paths)

    monkeypatch.setattr("purgatoryd.clients.subscriber.Reader.attach", attached)


def subscribed(client: Client, subscriber: Subscriber) -> None:
    """Wait until notices of shard 1 come through the socket. Without a readable arena, earlier
    notices are lost."""
    key = key_in(client, 1, "probe")
    sent: list[int] = []
    received: list[int] = []

    def next_probe(timeout_s: float) -> bool:
        with suppress(Lagged):
            if (notice := subscriber.get(timeout_s)) is not None:
                received.append(notice.ticket)
        return bool(received)

    def arrived() -> bool:
        sent.append(client.add(key, delay=0, topic="t", mode="replace").ticket)
        return next_probe(0.05)

    eventually(arrived)
    while received[-1] != sent[-1]:
        next_probe(PATIENCE_S)


def test_one_shard_without_a_readable_arena_makes_all_use_sockets(
    client: Client, clicks: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, paths_of(clicks, 1))
    with listen("t") as subscriber:
        assert subscriber.get(0) is None
        assert all(inbox.sockets for inbox in merged(subscriber)._inboxes)
        assert merged(subscriber).sleep is None
        subscribed(client, subscriber)
        found, lost = take_all(subscriber, fire(client, "k"))
    assert lost == []
    assert_in_order(found)


def test_an_arena_that_becomes_unreadable_makes_all_use_sockets(
    client: Client, clicks: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen("t") as subscriber:
        take_all(subscriber, fire(client, "k"))
        hide(monkeypatch, paths_of(clicks, 1))
        for inbox in merged(subscriber)._inboxes:
            inbox._stream._follow()
            inbox._check_s = 0.0
        assert subscriber.get(0) is None
        assert all(inbox.sockets for inbox in merged(subscriber)._inboxes)
        subscribed(client, subscriber)
        found, lost = take_all(subscriber, fire(client, "more"))
    assert lost == []
    assert_in_order(found)


def take_all(subscriber: Subscriber, keys: set[str]) -> tuple[list[Notice], list[Lagged]]:
    found, lost = take(subscriber, len(keys))
    assert {str(notice.key) for notice in found} == keys
    return found, lost


@pytest.mark.usefixtures("client")
def test_more_shards_than_a_sleep_has_words_for_use_sockets() -> None:
    opener = Opener("demo", "clicks", ["t", "u"], 1000, None, None, False, "auto")
    wanted = {1: None, 2: 2, 3: 2, 4: 2}  # neither topic has a row yet
    for words, count in wanted.items():
        with closing(opener._one(Route("demo-1-0", "clicks"), whole=False, words=words)) as inbox:
            sleep = inbox.sleep
            assert (sleep and len(sleep.words)) == count
    opener.close()


def test_the_topics_of_all_shards_share_the_words_of_a_sleep(
    client: Client, clicks: Daemon
) -> None:
    for topic in ("t", "u"):
        keys = [key_in(client, shard, topic) for shard in SHARDS]  # before a timer is due
        for key in keys:
            client.add(key, delay=0, topic=topic, mode="replace")
    eventually(lambda: newest(clicks) == [{"t": 1, "u": 1}] * 2)
    opener = Opener("demo", "clicks", ["t", "u"], 1000, None, None, False, "auto")
    for words, count in {2: 2, 3: 3}.items():
        with closing(opener._one(Route("demo-1-0", "clicks"), whole=False, words=words)) as inbox:
            assert inbox.sleep is not None
            assert len(inbox.sleep.words) == count
    opener.close()


def newest(demo: Daemon) -> list[dict[str, int]]:
    """Return the newest sequences of the topics t and u in each shard."""
    found: list[dict[str, int]] = []
    for shard in SHARDS:
        with mapped(demo, shard) as reader:
            topics = reader.newest_sequences("clicks")
            found.append({name: topics[name][1] for name in ("t", "u") if name in topics})
    return found


# ---- sleep ---------------------------------------------------------------------------------------


def test_hostile_requeues_delay_a_reader_of_partitions_by_the_limit_of_its_sleep(
    client: Client, clicks: Daemon, sleeps: list[Slept]
) -> None:
    """A member of the group moves the sleeper away from the word of one shard."""
    key = key_in(client, 1)
    with listen("t") as subscriber, mapped(clicks, 1) as reader:
        client.add(key, delay=0, topic="t", mode="replace")
        take(subscriber, 1)
        rows = reader.rows(lib.PG_R_TOPICS, "pg_topic")
        row = reader.topic_row("clicks", "t")
        word, other = (ffi.addressof(rows[n], "wake") for n in (row, row + 1))

        def misses_a_wake_up() -> bool:
            arm = partial(client.add, key, delay=0, topic="t")
            assert key_after_requeue(subscriber, word, other, arm) == key
            return not sleeps[-1][2]

        eventually(misses_a_wake_up)
        missed = len(sleeps)
        assert subscriber.get(0.01) is None
    assert all(limit_s <= follower.IDLE_S for _, limit_s, _ in sleeps)
    limits = [inbox.follower.limit_s for inbox in merged(subscriber)._inboxes if inbox.follower]
    assert follower.MISSED_S <= min(limits) <= 2 * follower.MISSED_S
    assert all(limit_s <= follower.MISSED_S for _, limit_s, _ in sleeps[missed:])


def test_a_joined_sleep_waits_for_the_words_of_all_parts() -> None:
    words = [ffi.new("uint32_t *") for _ in range(3)]
    parts = [follower.Sleep(words[:1]), follower.Sleep(words[1:])]
    for part in parts:
        part.look()
    joined = follower.JoinedSleep(parts)
    for word in words:
        joined.look()
        assert not joined.wait(0)
        word[0] += 1  # after its part has looked
        assert joined.wait(PATIENCE_S)
        joined.look()
        assert joined.wait(PATIENCE_S)
        for part in parts:
            part.look()
    joined.look()
    joined.end()
    assert joined.wait(PATIENCE_S)
    joined.look()
    assert not joined.wait(0)


@contextmanager
def rebuilding(demo: Daemon, shard: int) -> Iterator[None]:
    """Give the arena of a shard the state that it has during a rebuild. The shard is stopped."""
    pid = pid_of(demo, shard)
    os.kill(pid, signal.SIGSTOP)
    try:
        with edited(paths_of(demo, shard)) as header:
            header.state = ArenaState.REBUILDING
        yield
        with edited(paths_of(demo, shard)) as header:
            header.state = ArenaState.READY
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def edited(paths: Paths) -> Iterator[Any]:
    with closing(ArenaFile.open(paths.arena, read_only=False)) as arena:
        base = ffi.from_buffer(arena.memory, require_writable=True)
        yield ffi.cast("struct pg_header *", base)
        ffi.release(base)


def test_an_arena_in_recovery_ends_no_sleep_and_delays_no_other(
    client: Client, clicks: Daemon, sleeps: list[Slept]
) -> None:
    key, later = key_in(client, 1), key_in(client, 0)
    with listen("t") as subscriber:
        assert subscriber.get(0) is None
        with rebuilding(clicks, 0):
            client.add(key, delay=0.3, topic="t", mode="replace")
            sleeps.clear()
            [notice], _ = take(subscriber, 1)
        assert notice.key == key
        during = sleeps.copy()
        client.add(later, delay=0, topic="t", mode="replace")
        [notice], _ = take(subscriber, 1)
        assert notice.key == later
    assert {count for count, _, _ in during} == {1}
    assert sum(woken for _, _, woken in during) <= 3  # the topic is born, and its notice comes


def test_an_async_subscriber_of_partitions_sleeps_on_the_arenas(
    client: Client, sleeps: list[Slept]
) -> None:
    async def use() -> list[Notice]:
        async with AsyncSubscriber("demo", namespace="clicks", topics=["t"]) as subscriber:
            waiting = asyncio.create_task(subscriber.get(PATIENCE_S))
            await asyncio.sleep(0.05)  # runs only if the loop is free
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            fire(client, "k")
            found: list[Notice] = []
            while len(found) < 40:
                some = await subscriber.get_many(timeout=PATIENCE_S)
                assert some is not None
                found += some
            assert subscriber._watched == ()
            return found

    assert_in_order(asyncio.run(use()))
    assert {count for count, _, _ in sleeps} == {2}


@pytest.mark.usefixtures("client")
def test_a_close_ends_the_sleep_of_another_task_on_partitions() -> None:
    async def use() -> BaseException | Notice | None:
        subscriber = await AsyncSubscriber("demo", namespace="clicks").connect()
        waiting = asyncio.create_task(subscriber.get(PATIENCE_S))
        await asyncio.sleep(0.05)
        await subscriber.close()
        return (await asyncio.gather(waiting, return_exceptions=True))[0]

    assert isinstance(asyncio.run(use()), Closed)


# ---- ends of daemons -----------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_kills_of_one_shard_lose_and_repeat_nothing(client: Client, clicks: Daemon) -> None:
    with listen("t") as subscriber:
        found: list[Notice] = []
        keys: set[str] = set()
        for round_ in range(3):
            keys |= fire(client, f"{round_}-before-")
            before = pid_of(clicks, 0)
            os.kill(before, signal.SIGKILL)
            eventually(partial(restarted, clicks, before))
            keys |= fire(client, f"{round_}-after-")
        while len(found) < len(keys):
            some = subscriber.get_many(timeout=PATIENCE_S)
            assert some is not None
            found += some
        assert subscriber.get(0.05) is None
    assert Counter(str(notice.key) for notice in found) == Counter(keys)
    assert_in_order(found)


def restarted(demo: Daemon, before: int) -> bool:
    with suppress(Exception):
        return pid_of(demo, 0) not in (0, before)
    return False


def test_a_killed_shard_does_not_delay_the_notices_of_the_other(
    client: Client, clicks: Daemon
) -> None:
    key = key_in(client, 1)
    with listen("t") as subscriber:
        os.kill(clicks.pid, signal.SIGSTOP)  # the supervisor, which would restart the shard
        try:
            os.kill(pid_of(clicks, 0), signal.SIGKILL)
            client.add(key, delay=0.05, topic="t", mode="replace")
            [notice], lost = take(subscriber, 1)
        finally:
            os.kill(clicks.pid, signal.SIGCONT)
        assert (notice.key, lost) == (key, [])
        assert merged(subscriber).sockets == ()


@pytest.mark.usefixtures("way")
def test_another_number_of_shards_loses_no_notice_that_was_not_read_yet(
    client: Client, clicks: Daemon
) -> None:
    with listen("t") as subscriber:
        keys = fire(client, "before")
        eventually(lambda: fired(clicks, *SHARDS))
        clicks.restart("--shards", "3", *SMALL)
        more = fire(client, "after")
        found, lost = take(subscriber, 80)
        assert subscriber.get(0.05) is None
    assert Counter(str(notice.key) for notice in found) == Counter(keys | more)
    assert {str(notice.key) for notice in found[:40]} == keys
    assert [(one.topic, one.last_lost) for one in lost] == [("t", 0)] * 2


def test_notices_that_a_kill_left_unsent_come_from_the_next_shards_alone(
    client: Client, clicks: Daemon
) -> None:
    with listen("t") as subscriber:
        keys = fire(client, "k")
        eventually(lambda: fired(clicks, *SHARDS))
        paths = [paths_of(clicks, shard) for shard in SHARDS]
        pids = [pid_of(clicks, shard) for shard in SHARDS]
        os.kill(clicks.pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        clicks.kill()
        for one in paths:
            with edited(one) as header:
                header.published -= 3
        clicks.start("--shards", "3", *SMALL)
        found, lost = take(subscriber, 40)
        assert subscriber.get(0.05) is None
    assert Counter(str(notice.key) for notice in found) == Counter(keys)
    assert len(lost) == 2


@pytest.fixture
def begin(daemon_dir: Any, tmp_path: Any) -> Iterator[Callable[..., Deployment]]:
    with deployments(daemon_dir, tmp_path) as begin:
        yield begin


def test_the_previous_arenas_stay_closed_to_readers_once_the_table_has_changed(
    begin: Callable[..., Deployment],
) -> None:
    one = begin()
    with one.opened():
        pass
    before = [paths_in(one.directory, name) for name in one.table.daemons]
    with closing(Reader.attach(before[0])) as first, closing(Reader.attach(before[1])) as second:
        states: dict[str, set[ArenaState]] = {}

        def step(text: str) -> None:
            states.setdefault(text, set()).update({first.state, second.state})

        one.reshard(3, step)
        removed = [states[f"removing {name}"] for name in ("demo-1-0", "demo-1-1")]
        assert removed == [{ArenaState.RETIRED}] * 2
        assert {first.state, second.state} == {ArenaState.RETIRED}


def test_arenas_stay_readable_after_a_resharding_that_failed(
    begin: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = begin()
    with one.opened():
        pass

    def fails(_: object, table: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Deployment, "write", fails)
    with pytest.raises(OSError, match="No space"):
        one.reshard(3)
    for name in one.table.daemons:
        Reader.attach(paths_in(one.directory, name)).close()

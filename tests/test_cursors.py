"""Cursors with real daemons: kills, restarts, a lost arena, shards, resharding, two holders."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from partitioned import start_partitioned
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, remove_arena_files, stats

from purgatoryd.clients import (
    Admin,
    AsyncClient,
    AsyncSubscriber,
    Client,
    CursorHeld,
    CursorRefused,
    Full,
    InvalidArgument,
    Lagged,
    Notice,
    Status,
    Subscriber,
)
from purgatoryd.clients.cursors import CursorHold
from purgatoryd.shm_layout.arena import Reader

pytestmark = pytest.mark.tier("all")

QUIET_S = 0.5
"""Time without a notice after which a test takes a subscriber to have received everything."""
REFUSED_S = 2.0
"""Timeout of a subscriber whose cursor another process holds. On a busy machine, the daemon needs
part of this time for its answer."""


def client(**options: object) -> Client:
    return Client("demo", timeout=PATIENCE_S, **options)  # type: ignore[arg-type]


def subscriber(**options: object) -> Subscriber:
    return Subscriber("demo", **{"timeout": PATIENCE_S, "cursor": "billing"} | options)  # type: ignore[arg-type]


def fire(keys: range, topics: int = 2, **options: object) -> None:
    """Add timers that are due at once, with the key as payload."""
    with client(**options) as adding:
        rows = [(f"k{n}", 0.0, f"t{n % topics}", b"%d" % n) for n in keys]
        assert all(status == Status.ADDED for status in adding.add_many(rows).statuses)


def take(source: Subscriber, count: int) -> list[Notice]:
    """Return the next `count` notices. None may be lost."""
    taken: list[Notice] = []
    while len(taken) < count:
        found = source.get_many(count - len(taken), PATIENCE_S)
        assert found is not None, f"{len(taken)} of {count} notices came"
        taken += found
    return taken


def keys_of(notices: list[Notice]) -> Counter[object]:
    for notice in notices:
        assert notice.payload == str(notice.key)[1:].encode()
    return Counter(notice.key for notice in notices)


def expected(keys: range) -> Counter[object]:
    return Counter(f"k{n}" for n in keys)


def lose_arena(daemon: Daemon) -> None:
    """Kill the daemon and remove its arena files, as a reboot of the host does."""
    daemon.kill()
    remove_arena_files(daemon.paths)


# ---- one process after another -----------------------------------------------------------------


@pytest.mark.tier("test")
@pytest.mark.parametrize("transport", ["auto", "zmq"])
@pytest.mark.parametrize("partitions", [1, 4])
def test_a_cursor_continues_after_the_committed_notices(
    daemon: StartDaemon, partitions: int, transport: str
) -> None:
    start_partitioned(daemon, partitions)
    subscriber(transport=transport).close()
    fire(range(200))
    with subscriber(transport=transport) as first:
        committed = take(first, 120)
        first.commit()
        take(first, 30)  # handed out, not committed
    with subscriber(transport=transport) as second:
        rest = take(second, 80)
        assert second.get(QUIET_S) is None
    assert keys_of(committed) + keys_of(rest) == expected(range(200))


@pytest.mark.tier("test")
def test_auto_commit_commits_what_earlier_calls_returned(daemon: StartDaemon) -> None:
    daemon()
    subscriber().close()
    fire(range(10), topics=1)
    with subscriber(auto_commit=True) as first:
        handled = first.get_many(4, PATIENCE_S)
        assert handled is not None
        open_ones = first.get_many(4, PATIENCE_S)  # commits the first four
    with subscriber(auto_commit=True) as second:
        again = take(second, 6)
        assert [n.key for n in again[:4]] == [n.key for n in open_ones or ()]
        assert second.get(QUIET_S) is None  # commits all ten
    with subscriber() as third:
        assert third.get(QUIET_S) is None


def test_a_committed_iteration_continues_after_the_last_handled_notice(daemon: StartDaemon) -> None:
    daemon()
    subscriber().close()
    fire(range(10), topics=1)
    with subscriber() as first:
        handled = [next(first) for _ in range(3)]
        first.commit()
    with subscriber() as second:
        assert keys_of(handled) + keys_of(take(second, 7)) == expected(range(10))


def test_a_new_cursor_begins_with_the_notices_from_now_on(daemon: StartDaemon) -> None:
    daemon()
    fire(range(5))
    with Subscriber("demo", timeout=PATIENCE_S) as plain, subscriber() as fresh:
        fire(range(5, 8))
        assert keys_of(take(plain, 3)) == keys_of(take(fresh, 3)) == expected(range(5, 8))


def test_a_topic_that_is_younger_than_its_cursor_begins_with_its_first_notice(
    daemon: StartDaemon,
) -> None:
    daemon()
    subscriber(topics=["t0", "late"]).close()
    fire(range(4), topics=1)
    with client() as adding:
        adding.add("k9", 0.0, topic="late", payload=b"9")
        adding.add("k8", 0.0, topic="other", payload=b"8")
    with subscriber(topics=["t0", "late"]) as first:
        assert keys_of(take(first, 5)) == Counter(["k0", "k1", "k2", "k3", "k9"])
        assert first.get(QUIET_S) is None


def test_an_older_topic_that_is_added_to_a_cursor_begins_with_the_notices_from_now_on(
    daemon: StartDaemon,
) -> None:
    daemon()
    fire(range(4))
    subscriber(topics=["t0"]).close()
    with subscriber(topics=["t0", "t1"]) as both:
        fire(range(4, 8))
        assert keys_of(take(both, 4)) == expected(range(4, 8))
        assert both.get(QUIET_S) is None


@pytest.mark.tier("test")
def test_an_asyncio_subscriber_continues_at_its_cursor(daemon: StartDaemon) -> None:
    daemon()

    def made(**options: object) -> AsyncSubscriber:
        return AsyncSubscriber("demo", timeout=PATIENCE_S, cursor="billing", **options)  # type: ignore[arg-type]

    async def scenario() -> None:
        async with made():
            pass
        await asyncio.to_thread(fire, range(20))
        async with made() as first:
            got = [await first.get(PATIENCE_S) for _ in range(12)]
            await first.commit()
            await first.get(PATIENCE_S)
        async with made(auto_commit=True) as second:
            while len(got) < 20:
                got += await second.get_many(timeout=PATIENCE_S) or ()
            assert await second.get(QUIET_S) is None
        async with made() as third:
            assert await third.get(QUIET_S) is None
        assert keys_of([n for n in got if n is not None]) == expected(range(20))

    asyncio.run(scenario())


# ---- holders -----------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_second_subscriber_of_a_cursor_is_refused_until_the_first_one_ends(
    daemon: StartDaemon,
) -> None:
    daemon()
    with subscriber() as first:
        with pytest.raises(CursorHeld, match=f"process {os.getpid()}"):
            subscriber(timeout=REFUSED_S)
        with pytest.raises(CursorHeld), client() as deleting:
            deleting.delete_cursor("billing")
        with subscriber(cursor="another"):
            pass
        first.commit()
    subscriber().close()


HOLDER = """
import sys
from purgatoryd.clients import Subscriber
with Subscriber("demo", cursor="billing", timeout=20) as held:
    for notice in held:
        print(notice.key, flush=True)
        if int(notice.payload) % 7 == 0:
            held.commit()
            print("committed", flush=True)
"""


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def hold(daemon: Daemon, holders: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    holders.append(
        subprocess.Popen(
            [sys.executable, "-c", HOLDER], env=daemon.env, stdout=subprocess.PIPE, text=True
        )
    )
    return holders[-1]


@pytest.mark.tier("test")
def test_subscribers_and_daemons_that_are_killed_lose_no_notice(
    daemon: StartDaemon, holders: list[subprocess.Popen[str]]
) -> None:
    """Every notice arrives; again arrive only those that a killed process had not committed."""
    running = daemon()
    subscriber().close()
    handled: Counter[str] = Counter()
    committed: set[str] = set()
    for number in range(6):
        fire(range(number * 40, number * 40 + 40))
        process = hold(running, holders)
        assert process.stdout is not None
        waiting: list[str] = []
        for _ in range(25):
            line = process.stdout.readline().strip()
            assert line, "the subscriber ended"
            if line == "committed":
                committed |= {*waiting}
                waiting = []
            else:
                assert line not in committed, f"{line} was committed and came again"
                waiting.append(line)
                handled[line] += 1
        if number % 2:
            running.kill()
            process.kill()
            running.start()
        else:
            process.kill()
        process.wait()
        for line in process.stdout.read().splitlines():
            if line == "committed":
                committed |= {*waiting}
                waiting = []
            else:
                waiting.append(line)
                handled[line] += 1
    with subscriber() as last:
        while len(handled) < 240:
            notice = last.get(PATIENCE_S)
            assert notice is not None
            assert str(notice.key) not in committed
            handled[str(notice.key)] += 1
    assert set(handled) == {f"k{n}" for n in range(240)}


def test_a_cursor_of_a_stopped_process_is_held_until_that_process_is_killed(
    daemon: StartDaemon, holders: list[subprocess.Popen[str]]
) -> None:
    running = daemon()
    process = hold(running, holders)
    eventually(lambda: stats(running)["cursors"])
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(CursorHeld, match=f"process {process.pid}"):
        subscriber(timeout=REFUSED_S)
    process.kill()
    subscriber().close()


def test_a_live_subscriber_keeps_its_cursor_when_the_daemon_is_killed(
    daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("purgatoryd.clients.cursors.RENEW_S", 0.05)
    running = daemon("demo", "--session-grace", "1s")
    with subscriber() as held:
        running.kill()
        running.start()
        for _ in range(30):
            assert held.get(0.1) is None
        with pytest.raises(CursorHeld):
            subscriber(timeout=REFUSED_S)
        fire(range(3))
        assert keys_of(take(held, 3)) == expected(range(3))
        held.commit()


def test_a_subscriber_that_lost_its_cursor_may_not_commit(
    daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon()
    with subscriber() as loser:
        fire(range(4))
        take(loser, 4)
        hold: CursorHold = loser._inbox._hold  # type: ignore[union-attr, assignment]
        with Admin("demo", timeout=PATIENCE_S) as admin:
            admin.drop_session(hold._client._core.connections[0].session.id)
        with subscriber() as winner:
            with pytest.raises(CursorHeld):
                loser.commit()
            assert keys_of(take(winner, 4)) == expected(range(4))


# ---- what the replay buffer has dropped --------------------------------------------------------


@pytest.mark.tier("test")
def test_dropped_notices_come_from_the_wal(daemon: StartDaemon, tmp_path: Path) -> None:
    daemon("demo", "--replay-buffer", "32", "--wal-dir", str(tmp_path))
    subscriber().close()
    fire(range(3000))
    with subscriber() as late:
        assert keys_of(take(late, 3000)) == expected(range(3000))
        late.commit()
    with subscriber() as later:
        assert later.get(QUIET_S) is None


def test_dropped_notices_without_a_wal_are_lagged_with_their_range(daemon: StartDaemon) -> None:
    running = daemon("demo", "--replay-buffer", "32")
    subscriber(topics=["t0"]).close()
    fire(range(100), topics=1)
    with subscriber(topics=["t0"]) as late:
        with pytest.raises(Lagged) as lost:
            late.get(PATIENCE_S)
        first = lost.value.last_lost + 1
        assert (lost.value.first_lost, lost.value.topic) == (1, "t0")
        rest = take(late, 100 - lost.value.last_lost)
        assert [notice.seq for notice in rest] == [*range(first, 101)]
        late.commit()
    with subscriber(topics=["t0"]) as later:
        assert later.get(QUIET_S) is None
    assert stats(running)["cursors"] == 1


@pytest.mark.tier("test")
@pytest.mark.parametrize("partitions", [1, 4])
def test_a_lost_arena_loses_no_notice_of_a_cursor(
    daemon: StartDaemon, tmp_path: Path, partitions: int
) -> None:
    """After a reboot, the notices that were sent and not committed come from the WAL."""
    running = start_partitioned(daemon, partitions, "--wal-dir", str(tmp_path))
    subscriber().close()
    fire(range(300))
    with subscriber(durable=True) as first:
        handled = take(first, 100)
        first.commit()
        take(first, 50)
    running.kill()
    for lock in running.dir.glob("*.lock"):
        eventually(lambda lock=lock: _free(lock))  # type: ignore[misc]
        remove_arena_files(running.paths._replace(name=lock.stem))
    running.start()
    with subscriber() as second:
        handled += take(second, 200)
        assert second.get(QUIET_S) is None
    assert keys_of(handled) == expected(range(300))


def _free(lock: Path) -> bool:
    from real_daemon import released

    return released(lock)


def test_a_lost_arena_and_dropped_notices_come_from_retained_segments(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    options = ("--replay-buffer", "32", "--retain-age", "1h", "--wal-dir", str(tmp_path))
    running = daemon("demo", *options)
    subscriber().close()
    fire(range(1000))
    with subscriber(durable=True) as first:
        handled = take(first, 300)
        first.commit()
    lose_arena(running)
    running.start()
    with subscriber() as second:
        handled += take(second, 700)
        assert second.get(QUIET_S) is None
    assert keys_of(handled) == expected(range(1000))


def test_a_live_subscriber_continues_at_its_cursor_in_a_new_arena(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    running = daemon("demo", "--wal-dir", str(tmp_path))
    with subscriber(durable=True) as live:
        fire(range(40))
        handled = take(live, 40)
        live.commit()
        fire(range(40, 60), durable=True)
        take(live, 20)  # not committed, so they come again
        lose_arena(running)
        running.start()
        fire(range(60, 80))
        handled += take(live, 40)
        live.commit()
    assert keys_of(handled) == expected(range(80))


# ---- resharding --------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("wal", [False, True])
def test_a_cursor_continues_after_resharding_without_loss_and_repeats(
    daemon: StartDaemon, tmp_path: Path, partitions: int, wal: bool
) -> None:
    options = ("--wal-dir", str(tmp_path)) if wal else ()
    running = daemon("demo", "--shards", "2", *options)
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("default", partitions)
    subscriber().close()
    fire(range(400))
    with subscriber() as first:
        handled = take(first, 150)
        first.commit()
        take(first, 20)
    for shards in ("3", "2"):
        running.restart("--shards", shards, *options)
        with subscriber() as next_one:
            handled += take(next_one, 100)
            next_one.commit()
    with subscriber() as last:
        handled += take(last, 50)
        assert last.get(QUIET_S) is None
    assert keys_of(handled) == expected(range(400))


def test_a_resharding_gives_plain_subscribers_no_carried_notices(daemon: StartDaemon) -> None:
    running = daemon("demo", "--shards", "2")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("default", 4)
    with Subscriber("demo", timeout=PATIENCE_S) as plain:
        subscriber().close()
        fire(range(100))
        seen = keys_of(take(plain, 100))
        running.restart("--shards", "3")
        fire(range(100, 120))
        while len(seen) < 120:
            with suppress(Lagged):
                seen += keys_of(list(plain.get_many(100, PATIENCE_S) or ()))
    assert seen == expected(range(120))


# ---- deletion and limits -----------------------------------------------------------------------


def test_a_deleted_cursor_begins_again_with_the_notices_from_now_on(daemon: StartDaemon) -> None:
    running = daemon()
    subscriber().close()
    fire(range(4))
    with client() as deleting:
        deleting.delete_cursor("billing")
        deleting.delete_cursor("billing")

    async def again() -> None:
        async with AsyncClient("demo", timeout=PATIENCE_S) as other:
            await other.delete_cursor("billing")

    asyncio.run(again())
    assert (stats(running)["cursors"], stats(running)["cursor_rows"]) == (0, 0)
    with subscriber() as fresh:
        assert fresh.get(QUIET_S) is None


def test_a_full_table_of_cursors_is_reported(daemon: StartDaemon) -> None:
    running = daemon("demo", "--cursors", "2")
    subscriber(cursor="a").close()
    subscriber(cursor="b").close()
    with pytest.raises(CursorRefused, match="2 of 2 rows"):
        subscriber(cursor="c")
    assert stats(running)["refused_cursors"] == 1


def fill_topics(running: Daemon, adding: Client) -> None:
    """Use up the table of topics, and let the replay buffer drop the notice of topic t0."""
    for number in range(40):
        adding.add(f"x{number}", 0.0, topic="second")
    eventually(lambda: stats(running)["live"] == 0)
    adding.add("y", 0.0, topic="third")  # takes the row of the daemon's events
    with pytest.raises(Full):
        adding.add("z", 0.0, topic="fourth")


def test_a_cursor_of_all_topics_keeps_their_rows_until_their_notices_are_committed(
    daemon: StartDaemon,
) -> None:
    running = daemon("demo", "--topics", "2", "--replay-buffer", "16")
    subscriber().close()
    fire(range(1), topics=1)
    with client() as adding:
        fill_topics(running, adding)
        with subscriber() as held:
            lost: list[Lagged] = []
            while not any(one.topic == "t0" for one in lost):
                try:
                    held.get(PATIENCE_S)
                except Lagged as one:
                    lost.append(one)
            assert (lost[-1].first_lost, lost[-1].last_lost) == (1, 1)
            held.commit()
        adding.add("z", 0.0, topic="fourth")


def test_a_cursor_of_listed_topics_keeps_their_rows_until_it_is_deleted(
    daemon: StartDaemon,
) -> None:
    """The topic need not exist when the cursor is opened."""
    running = daemon("demo", "--topics", "2", "--replay-buffer", "16")
    subscriber(topics=["t0"]).close()
    fire(range(1), topics=1)
    with client() as adding:
        fill_topics(running, adding)
        with subscriber(topics=["t0"]) as held:
            with pytest.raises(Lagged) as lost:
                held.get(PATIENCE_S)
            assert (lost.value.first_lost, lost.value.last_lost) == (1, 1)
            held.commit()
        with pytest.raises(Full):
            adding.add("z", 0.0, topic="fourth")
        with pytest.raises(CursorRefused, match="topic table full: 3 of 3 rows"):
            subscriber(topics=["fourth"])
        adding.delete_cursor("billing")
        adding.add("z", 0.0, topic="fourth")


@pytest.mark.tier("test")
def test_commands_list_and_delete_cursors(daemon: StartDaemon) -> None:
    running = daemon()
    subscriber().close()
    fire(range(5), topics=1)
    (line,) = command(running, "cursor", "ls", "--json")
    found = json.loads(line)
    assert (found["cursor"], found["namespace"], found["lag"]) == ("billing", "default", 5)
    assert 'purgatoryd_cursor_lag{cursor="billing",daemon="demo",namespace="default"} 5.0' in (
        command(running, "metrics")
    )
    listened = command(running, "listen", "--cursor", "billing", "--count", "3", "--json")
    assert [json.loads(line)["seq"] for line in listened] == [1, 2, 3]
    (line,) = command(running, "cursor", "ls", "--json")
    assert json.loads(line)["lag"] == 2
    assert command(running, "cursor", "delete", "billing") == ["deleted billing"]
    assert command(running, "cursor", "ls", "--json") == []


def command(daemon: Daemon, *args: str) -> list[str]:
    """Run a command, and return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "purgatoryd.cli", *args, "--name", "demo"],
        env=daemon.env, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_lag_of_a_cursor_is_the_number_of_uncommitted_notices(daemon: StartDaemon) -> None:
    running = daemon()
    subscriber().close()
    fire(range(30))
    with subscriber() as first:
        take(first, 12)
        first.commit()
    reader = Reader.attach(running.paths)
    (cursor,) = reader.cursors()
    assert (cursor.name, cursor.lag(reader.topics_by_row())) == ("billing", 18)
    reader.close()


def test_arguments_that_need_a_cursor_are_refused_without_one(daemon: StartDaemon) -> None:
    daemon()
    with pytest.raises(InvalidArgument, match="need a cursor"):
        subscriber(cursor=None, auto_commit=True)
    with (
        subscriber(cursor=None) as plain,
        pytest.raises(InvalidArgument, match="with a cursor"),
    ):
        plain.commit()

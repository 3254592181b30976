"""Pauses, late policies and catch-up with real daemons: killed, rebooted, drained, and by the
command line."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import cli
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    eventually,
    notices,
    remove_arena_files,
    stats,
    wal_frames,
)

from purgatoryd.clients import Admin, CancelResult, Client, InvalidArgument, Subscriber
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.retention_holds import RetentionHold, set_hold

pytestmark = pytest.mark.tier("all")

COUNT = 20_000
KILLS = 4


@contextlib.contextmanager
def paused_topic(
    daemon: StartDaemon, *args: str, count: int, gap_s: float = 1e-6, holds: Path | None = None
) -> Iterator[tuple[Daemon, Client]]:
    """Start a daemon with `count` late timers of a paused topic, and yield it with a client.

    `holds`: folder of the WAL, which then keeps all its records.
    """
    running = daemon("demo", *args)
    if holds is not None:
        set_hold(holds, RetentionHold("all", 1))
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.set_topic("t", paused=True)
    with Client("demo", timeout=PATIENCE_S) as client:
        client.add_many([(f"k{n}", n * gap_s, "t") for n in range(count)])
        eventually(lambda: stats(running)["backlog"] == count)
        time.sleep(0.01)  # all timers are later than a grace of 1 ms
        yield running, client


def resume(**changes: object) -> None:
    """Resume the topic, and change other settings with it."""
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.set_topic("t", paused=False, **changes)  # type: ignore[arg-type]


def fired(running: Daemon, topic: str = "t") -> list[wire.RawNotice]:
    """Return the notices of a topic so far."""
    with contextlib.closing(Reader.attach(running.paths)) as reader:
        if topic not in reader.newest_sequences("default"):
            return []
        return notices(reader, "default", topic)


def finish(running: Daemon) -> None:
    """Wait until nothing is armed."""
    eventually(lambda: stats(running)["live"] == 0)


# ---- pauses ----


@pytest.mark.tier("test")
@pytest.mark.parametrize("way", ["arena", "wal"])
def test_a_pause_survives_kills_and_its_timers_fire_in_order(
    daemon: StartDaemon, daemon_dir: Path, way: str
) -> None:
    args = ("--wal-dir", str(daemon_dir / "wal"), "--durable-namespace", "default")
    with paused_topic(daemon, *(args if way == "wal" else ()), count=100, gap_s=1e-3) as (
        running,
        client,
    ):
        assert client.cancel("k7") is CancelResult.CANCELLED
        running.kill()
        if way == "wal":
            remove_arena_files(running.paths)
        running.start()
        eventually(lambda: stats(running)["backlog"] == 99)
        assert fired(running) == []
        resume()
        finish(running)
        assert [n.key for n in fired(running)] == [f"k{n}" for n in range(100) if n != 7]


@pytest.mark.tier("test")
def test_other_topics_fire_while_many_paused_timers_are_due(daemon: StartDaemon) -> None:
    with paused_topic(daemon, count=COUNT) as (running, client):
        before = stats(running)["iterations"]
        for n in range(20):
            client.add(f"live{n}", 0, topic="live")
            eventually(lambda n=n: len(fired(running, "live")) == n + 1)  # type: ignore[misc]
        assert fired(running) == []
        assert stats(running)["iterations"] - before < COUNT  # the loop sleeps


@pytest.mark.tier("test")
def test_a_drain_says_that_it_waits_for_paused_topics(daemon: StartDaemon) -> None:
    with paused_topic(daemon, count=3) as (running, _):
        with Admin("demo", timeout=PATIENCE_S) as admin:
            admin.stop(drain=True)
        line = "draining (paused)"
        eventually(lambda: line in cli(running, "status").stdout)
        assert "the drain waits for due timers of paused topics" in running.stderr
        resume()
        eventually(lambda: not running.running)


def test_a_drain_that_ends_unfinished_names_paused_topics(daemon: StartDaemon) -> None:
    with paused_topic(daemon, count=3) as (running, _):
        stopped = cli(running, "stop", "--drain", "--timeout", "3s")
        assert "3 armed; the drain waited for due timers of paused topics" in stopped.stdout
        assert stopped.returncode == 1


# ---- late policies ----


@pytest.mark.parametrize("policy", ["skip", "coalesce", "fire"])
@pytest.mark.parametrize("wal", [False, True], ids=["arena", "wal"])
def test_each_late_timer_ends_once_whenever_the_daemon_is_killed(
    daemon: StartDaemon, daemon_dir: Path, policy: str, wal: bool
) -> None:
    rng = random.Random(policy)
    folder = daemon_dir / "wal" / "demo" if wal else None
    args = ("--wal-dir", str(daemon_dir / "wal")) if wal else ()
    with paused_topic(daemon, *args, count=COUNT, holds=folder) as (running, client):
        late = {} if policy == "fire" else {"late": (policy, 0.001)}
        resume(**late)
        for _ in range(KILLS):
            time.sleep(rng.random() / 20)
            running.kill()
            running.start()
        finish(running)
        resume(late="fire")
        client.add("last", 0, topic="t")
        finish(running)
        found = fired(running)
        skipped, coalesced = stats(running)["skipped"], stats(running)["coalesced"]
    keys = [n.key for n in found]
    assert len(keys) == len({*keys})
    missed = sum(n.missed for n in found)
    # the counters of a killed daemon may lack the timer that the kill interrupted
    assert missed - KILLS <= coalesced <= missed
    if policy == "skip":
        assert COUNT - KILLS <= skipped <= COUNT
    else:
        assert len(keys) + missed == COUNT + 1
    if policy == "coalesce":
        assert f"k{COUNT - 1}" in keys
    if folder is not None:
        ends_are_whole(folder, keys)


def ends_are_whole(folder: Path, keys: list[wire.Key]) -> None:
    """Check in the WAL that each timer ended once."""
    frames = wal_frames(folder)
    ended = [f.fields["ticket"] for f in frames if f.kind in ("end", "fire")]
    armed = [f.fields["ticket"] for f in frames if f.kind == "arm"]
    assert sorted(ended) == sorted(armed)
    assert len(keys) == sum(f.kind == "fire" for f in frames)


@pytest.mark.tier("test")
def test_a_skipped_timer_is_unknown_to_a_cancel(daemon: StartDaemon) -> None:
    with paused_topic(daemon, count=3) as (running, client):
        resume(late=("skip", 0.001))
        finish(running)
        assert fired(running) == []
        assert client.cancel("k0") is CancelResult.UNKNOWN
        assert stats(running)["skipped"] == 3


@pytest.mark.tier("test")
def test_subscribers_see_how_many_timers_a_notice_stands_for(daemon: StartDaemon) -> None:
    with paused_topic(daemon, count=10, gap_s=1e-3), Subscriber("demo", topics=["t"]) as subscriber:
        resume(late=("coalesce", 0.001))
        notice = subscriber.get(PATIENCE_S)
        assert notice is not None
        assert (notice.key, notice.missed) == ("k9", 9)


@pytest.mark.tier("test")
def test_the_policy_of_a_timer_overrides_that_of_its_topic(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    args = ("--wal-dir", str(daemon_dir / "wal"), "--durable-namespace", "default")
    with paused_topic(daemon, *args, count=3) as (running, client):
        client.add("fires", 0, topic="t", late="fire", tag="red")
        client.add_many([("skipped", 0, "t")], late=("skip", 0.5))
        info = client.get("skipped")
        assert info is not None
        assert info.late == ("skip", 0.5)
        assert client.get("fires").late == "fire"  # type: ignore[union-attr]
        assert client.get("k0").late is None  # type: ignore[union-attr]
        running.kill()
        remove_arena_files(running.paths)
        running.start()
        eventually(lambda: stats(running)["backlog"] == 5)
        time.sleep(0.5)
        resume(late=("coalesce", 0.001))
        finish(running)
        assert {n.key: n.missed for n in fired(running)} == {"k2": 2, "fires": 0}
        assert stats(running)["skipped"] == 1


@pytest.mark.parametrize("late", ["skip", ("fire", 1), ("skip", 0)])
@pytest.mark.tier("test")
def test_a_bad_policy_of_a_timer_is_refused(daemon: StartDaemon, late: object) -> None:
    daemon("demo")
    with Client("demo", timeout=PATIENCE_S) as client:
        with pytest.raises(InvalidArgument):
            client.add("k", 1, late=late)  # type: ignore[call-overload]
        with pytest.raises(InvalidArgument):
            client.add_many([("k", 1)], late=late)  # type: ignore[arg-type]


# ---- catch-up ----


@pytest.mark.tier("test")
def test_a_timer_fires_before_the_backlog_of_an_outage(daemon: StartDaemon) -> None:
    running = daemon("demo")
    with Admin("demo", timeout=PATIENCE_S) as admin, Client("demo", timeout=PATIENCE_S) as client:
        admin.set_namespace("default", late_per_s=1)
        admin.set_topic("t", paused=True)
        client.add_many([(f"k{n}", 0, "t") for n in range(50)])
        running.kill()
        running.start()
        admin.set_topic("t", paused=False)
        eventually(lambda: len(fired(running)) >= 1)
        client.add("live", 0, topic="t")
        eventually(lambda: "live" in [n.key for n in fired(running)])
        assert 0 < stats(running)["backlog"] < 50
        admin.set_namespace("default", late_per_s=0)
        finish(running)
    keys = [n.key for n in fired(running)]
    assert sorted(keys) == sorted(["live", *(f"k{n}" for n in range(50))])


# ---- arguments and commands ----


BAD: list[dict[str, object]] = [
    {"late": "later"}, {"late": "skip"}, {"late": ("fire", 1)}, {"late": ("skip",)},
    {"late": ("skip", 0)}, {"late": ("skip", float("nan"))}, {"late": ("skip", "1s")},
    {"late": ("skip", 1e300)}, {"late": ("skip", True)}, {"late": ("skip", 1, 2)}, {"paused": 1},
]  # fmt: skip


@pytest.mark.parametrize("changes", BAD)
@pytest.mark.tier("test")
def test_a_bad_setting_of_a_topic_is_refused_before_it_is_sent(changes: dict[str, object]) -> None:
    with Admin("nobody") as admin, pytest.raises(InvalidArgument):
        admin.set_topic("t", **changes)  # type: ignore[arg-type]


@pytest.mark.tier("test")
def test_the_commands_pause_resume_and_topic_set(daemon: StartDaemon) -> None:
    running = daemon("demo")
    assert cli(running, "pause", "a", "b").stdout == "paused default/a\npaused default/b\n"
    assert cli(running, "resume", "a").stdout == "resumed default/a\n"
    assert cli(running, "pause", "--all", "-n", "shop").stdout == "paused all topics of shop\n"
    late = cli(running, "topic", "set", "b", "--late", "skip", "--grace", "10m")
    assert late.stdout == "b: late skip, grace 10m\n"
    assert cli(running, "pause").returncode == 2
    assert cli(running, "pause", "a", "--all").returncode == 2
    rows = [
        json.loads(line) for line in cli(running, "stats", "--topics", "--json").stdout.splitlines()
    ]
    found = {row["topic"]: row for row in rows if row["namespace"] == "default"}
    assert (found["a"]["paused"], found["b"]["paused"]) == (False, True)
    assert (found["b"]["late"], found["b"]["grace_ns"]) == ("skip", 600 * 10**9)
    spaces = [json.loads(x) for x in cli(running, "namespace", "ls", "--json").stdout.splitlines()]
    assert {row["namespace"]: row["paused"] for row in spaces}["shop"] is True

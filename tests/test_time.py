"""Clocks that jump: a stepped wall clock, a suspend, another boot. No timer fires early."""

from __future__ import annotations

import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fault_driver import build_library
from machine import needs
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    boot_ns,
    eventually,
    notices,
    refused,
    sent,
    stats,
)
from stepped_wall import Wall
from stored_arena import ARENAS, Stored

from purgatoryd.cli.arena import infos
from purgatoryd.clients import AllOf, Client, Purgatory, Subscriber
from purgatoryd.clients.times import wall_time
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import paths_in

pytestmark = pytest.mark.tier("test")

HOUR_S, DAY_S, NS = 3600, 86_400, 10**9
LATE = 2


# ---- a wall clock that is stepped ------------------------------------------------------------


@pytest.fixture
def wall(tmp_path: Path) -> Wall:
    needs("cc", "to compile tests/fault/wall.c")
    return Wall(tmp_path, build_library("wall", tmp_path))


@pytest.fixture
def stepped(wall: Wall, daemon: StartDaemon) -> Daemon:
    return daemon("demo", env=wall.environment)


def at(wall: Wall, after_s: float) -> datetime:
    return wall_time(wall.now_ns) + timedelta(seconds=after_s)


def due(subscriber: Subscriber, wall: Wall, deadline: datetime) -> str:
    """Return the key of the next notice. Both the time in the notice and the clock must have
    reached the deadline."""
    notice = subscriber.get(PATIENCE_S)
    assert notice is not None
    assert notice.fired_at >= deadline
    assert wall_time(wall.highest_ns) >= deadline
    return str(notice.key)


@pytest.mark.tier("all")
def test_a_step_forwards_makes_timers_due(stepped: Daemon, wall: Wall) -> None:
    with Client("demo") as client, Subscriber("demo") as subscriber:
        deadline = at(wall, HOUR_S)
        client.add("wall", deadline=deadline)
        client.add("delay", delay=HOUR_S)
        wall.step(HOUR_S)
        assert due(subscriber, wall, deadline) == "wall"
        assert client.get("delay") is not None


@pytest.mark.tier("test")
def test_a_step_backwards_delays_timers(stepped: Daemon, wall: Wall) -> None:
    with Client("demo") as client, Subscriber("demo") as subscriber:
        deadline = at(wall, 1)
        client.add("wall", deadline=deadline)
        wall.step(-HOUR_S)
        client.add("delay", delay=2.5)  # a step does not affect a delay
        assert due(subscriber, wall, datetime.fromtimestamp(0, UTC)) == "delay"
        assert client.get("wall") is not None
        wall.step(0)
        assert due(subscriber, wall, deadline) == "wall"


@pytest.mark.tier("all")
def test_a_step_before_the_start(wall: Wall, daemon: StartDaemon) -> None:
    """The clock steps back while no daemon runs, and forward while a daemon runs."""
    real = daemon("demo", env=wall.environment)
    with Client("demo") as client:
        deadline = at(wall, 1)
        client.add("wall", deadline=deadline)
        real.stop()
        wall.step(-HOUR_S)
        eventually(lambda: time.time_ns() > deadline.timestamp() * NS)
        real.start()
        with Subscriber("demo") as subscriber:
            client.add("mark", delay=0.1)
            assert due(subscriber, wall, datetime.fromtimestamp(0, UTC)) == "mark"
            assert client.get("wall") is not None
            wall.step(0)
            assert due(subscriber, wall, deadline) == "wall"


@pytest.mark.tier("test")
def test_many_steps_fire_each_once_and_none_early(stepped: Daemon, wall: Wall) -> None:
    rng = random.Random(7)
    with Client("demo") as client, Subscriber("demo") as subscriber:
        deadlines = {str(i): at(wall, rng.uniform(0, 4)) for i in range(300)}
        for key, deadline in deadlines.items():
            client.add(key, deadline=deadline, wait=False)
        client.flush()
        fired: list[str] = []
        for _ in range(40):
            wall.step(rng.uniform(-3, 3))
            fired += take_due(subscriber, wall, deadlines, 0.05)
        wall.step(10)
        while len(fired) < len(deadlines):
            fired += take_due(subscriber, wall, deadlines, PATIENCE_S)
    assert sorted(fired) == sorted(deadlines)
    assert stats(stepped)["expiries"] == len(deadlines)


def take_due(
    subscriber: Subscriber, wall: Wall, deadlines: dict[str, datetime], wait_s: float
) -> list[str]:
    """Return the keys of all available notices. Wait at most `wait_s` for the first one."""
    keys: list[str] = []
    while (notice := subscriber.get(0 if keys else wait_s)) is not None:
        # `fired_at` is the wall time at which the notice was built. Between the firing of the timer
        # and that moment, the wall clock may have been stepped once.
        assert wall_time(wall.highest_ns) >= deadlines[str(notice.key)]
        keys.append(str(notice.key))
    return keys


# ---- suspend: a boot clock that is ahead ------------------------------------------------------


def ahead(directory: Path, seconds: int) -> str:
    """Return the path of a Python whose CLOCK_BOOTTIME is `seconds` ahead of the machine's."""
    needs("timens", "a boot clock of its own")
    script = directory / f"ahead-{seconds}"
    python = shlex.quote(sys.executable)
    script.write_text(f'#!/bin/sh\nexec unshare -T --boottime {seconds} {python} "$@"\n')
    script.chmod(0o755)
    return str(script)


IN_THE_NAMESPACE = """
import sys, time
from purgatoryd.clients import AllOf, Client, Purgatory, Subscriber
with Client("demo") as client, Subscriber("demo") as subscriber:
    begun_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    for i in range(100):
        client.add(i.to_bytes(1, "little"), delay=i / 200, wait=False)
    client.flush()
    for i in range(100):
        notice = subscriber.get(30)
        assert begun_ns <= notice.deadline_boot_ns <= notice.fired_boot_ns
        assert notice.fired_boot_ns <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    print(notice.deadline_boot_ns)
"""


@pytest.mark.tier("all")
def test_a_daemon_and_clients_in_a_time_namespace(daemon_dir: Path) -> None:
    real = Daemon("demo", daemon_dir, python=ahead(daemon_dir, DAY_S))
    try:
        inside = ["nsenter", f"--time=/proc/{real.pid}/ns/time", sys.executable, "-c"]
        done = subprocess.run(
            [*inside, IN_THE_NAMESPACE], env=real.env, capture_output=True, text=True, check=False
        )
    finally:
        real.close()
    assert done.returncode == 0, done.stderr
    # a boot time on the clock of the time namespace
    assert int(done.stdout) > boot_ns() + (DAY_S - HOUR_S) * NS


@pytest.mark.tier("all")
@pytest.mark.parametrize("seconds", [DAY_S, -120])
def test_a_client_outside_of_the_daemons_time_namespace(seconds: int, daemon_dir: Path) -> None:
    """The daemon counts a delay from the arrival of the request. The test measures with the
    monotonic clock."""
    real = Daemon("demo", daemon_dir, python=ahead(daemon_dir, seconds))
    try:
        with (
            Client("demo") as client, Purgatory("demo") as owner, Subscriber("demo") as subscriber,
        ):  # fmt: skip
            begun_s = time.monotonic()
            client.add("one", delay=0.2)
            client.add_many([("row", 0.2)])
            client.add_many({"key": ["column"], "delay": [0.2]})
            operation = owner.watch("op", AllOf({"k": 1}), timeout=0.2)
            for _ in range(3):
                assert subscriber.get(PATIENCE_S) is not None
                assert time.monotonic() - begun_s >= 0.2
            assert operation.result(PATIENCE_S).cause == "expired"
            assert time.monotonic() - begun_s >= 0.2
    finally:
        real.close()


@pytest.fixture
def sleeper(daemon_dir: Path) -> Iterator[Daemon]:
    """A daemon that a test stops, and starts again as after a day of suspend."""
    real = Daemon("demo", daemon_dir)
    try:
        yield real
    finally:
        real.close()


def all_notices(real: Daemon) -> list[wire.RawNotice]:
    reader = Reader.attach(real.paths)
    try:
        return notices(reader, "default", "t")
    finally:
        reader.close()


def armed(real: Daemon) -> set[wire.Key]:
    reader = Reader.attach(real.paths)
    try:
        return {info.key for info in infos(reader)}
    finally:
        reader.close()


@pytest.mark.parametrize("end", [Daemon.stop, Daemon.kill])
def test_a_day_of_suspend(sleeper: Daemon, daemon_dir: Path, end: object) -> None:
    """Due timers fire once, flagged LATE, in the order of their deadlines. The other timers wait
    for their deadlines."""
    hours = {"23": 23, "1": 1, "25": 25, "12": 12}
    with Client("demo") as client:
        for key, after in hours.items():
            client.add(key, delay=after * HOUR_S, topic="t")
        client.add("wall", deadline=datetime.now(UTC) + timedelta(hours=1), topic="t")
    assert callable(end)
    end(sleeper)
    sleeper.python = ahead(daemon_dir, DAY_S)
    sleeper.start()
    eventually(lambda: sent(sleeper, "default") == 3)
    found = all_notices(sleeper)
    assert [n.key for n in found] == ["1", "12", "23"]
    assert all(n.flags & LATE and n.fired_ns >= n.deadline_ns for n in found)
    assert armed(sleeper) == {"25", "wall"}  # the wall clock has not moved
    sleeper.restart()
    assert sent(sleeper, "default") == 3
    assert armed(sleeper) == {"25", "wall"}


def test_a_boot_clock_that_went_back_is_refused(sleeper: Daemon, daemon_dir: Path) -> None:
    """Moving a container can set the clock back. The arena's deadlines would then mean nothing."""
    with Client("demo") as client:
        client.add("k", delay=HOUR_S)
    sleeper.stop()
    here, sleeper.python = sleeper.python, ahead(daemon_dir, DAY_S)
    sleeper.start()
    sleeper.stop()
    sleeper.python = here
    said = refused(sleeper.start)
    assert "boot clock is" in said
    sleeper.python = ahead(daemon_dir, DAY_S)
    sleeper.start()
    eventually(lambda: stats(sleeper)["expiries"] == 1)


# ---- another boot --------------------------------------------------------------------------------


@pytest.mark.tier("all")
def test_an_arena_of_another_boot_is_refused_and_untouched(
    daemon_dir: Path, daemon: StartDaemon
) -> None:
    (daemon_dir / "demo.lock").touch()
    stored, paths = Stored(ARENAS[-1]), paths_in(daemon_dir, "demo")
    stored.of_boot(b"another boot ...")
    stored.lay_out(paths)
    assert f"boot id is {b'another boot ...'.hex()}, expected " in refused(lambda: daemon("demo"))
    assert stored.untouched(paths)

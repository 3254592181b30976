"""unique_for with real daemons: jobs, kills, a reboot, other sizes, and the command line."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import answer, cli
from real_daemon import PATIENCE_S, StartDaemon, boot_ns, eventually, remove_arena_files, stats

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import (
    AllOf,
    AsyncClient,
    Client,
    Consumer,
    Exists,
    InvalidArgument,
    Purgatory,
    Status,
)

pytestmark = pytest.mark.tier("test")

GIVEN: dict[str, Any] = {"namespace": "shop", "timeout": PATIENCE_S}
KEYS, KILLS = 400, 12


def client(**settings: Any) -> Client:
    return Client("demo", **GIVEN | settings)


def consumer() -> Consumer:
    return Consumer("demo", group="mailers", topics=["mails"], **GIVEN)


def refused(c: Client, key: str, **more: Any) -> int:
    """Add a key that is not free, and return the ticket of the timer that keeps it."""
    with pytest.raises(Exists) as caught:
        c.add(key, 0, topic="mails", **more)
    return caught.value.ticket


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_a_key_is_unique_until_its_time_is_over_also_after_the_ack(
    daemon: StartDaemon, transport: str
) -> None:
    running = daemon("demo")
    with client(transport=transport) as c, consumer() as jobs:
        first = c.add("k", 0, topic="mails", unique_for=1.5)
        job = jobs.get(PATIENCE_S)
        assert job is not None
        assert job.ticket == first.ticket
        assert refused(c, "k") == refused(c, "k", mode="replace") == first.ticket
        job.ack()
        eventually(lambda: stats(running)["jobs"] == 0)
        assert refused(c, "k", mode="keep") == first.ticket
        assert (stats(running)["live"], stats(running)["unique_keys"]) == (0, 1)
        eventually(lambda: stats(running)["unique_freed"] == 1)
        assert c.add("k", 0, topic="mails").status == Status.ADDED


@pytest.mark.parametrize("pending", [True, False])
def test_the_error_names_the_time_at_which_a_unique_key_is_free(
    daemon: StartDaemon, pending: bool
) -> None:
    daemon("demo")
    with client() as c, Purgatory("demo", **GIVEN) as operations:
        begun_ns = boot_ns()
        first = c.add("k", 3600 if pending else 0, unique_for=7200)
        ended_ns = boot_ns()
        eventually(lambda: pending or c.get("k") is None)
        attempts: list[Any] = [
            partial(c.add, "k", 0, mode=mode) for mode in ("error", "replace", "extend")
        ]
        attempts += [] if pending else [partial(operations.watch, "k", AllOf({"w": 1}), 60)]
        for attempt in attempts:
            with pytest.raises(Exists, match="'k' is unique by unique_for= of ticket") as caught:
                attempt()
            error = caught.value
            assert (error.ticket, error.unique) == (first.ticket, True)
            assert 0 <= error.deadline_boot_ns - begun_ns - 7200 * 10**9 <= ended_ns - begun_ns
        c.add("plain", 3600)
        with pytest.raises(Exists, match="'plain' is armed already") as caught:
            c.add("plain", 3600)
        assert not caught.value.unique


def test_all_ways_to_add_take_the_time(daemon: StartDaemon) -> None:
    daemon("demo")

    async def add() -> None:
        async with AsyncClient("demo", **GIVEN) as c:
            await c.add("async", 0, topic="mails", unique_for=timedelta(hours=1))
            await c.add_many([("async many", 0.0, "mails")], unique_for=3600)

    asyncio.run(add())
    with client() as c:
        c.add("later", 0, topic="mails", unique_for=3600, wait=False)
        c.add_many([("many", 0.0, "mails")], unique_for=3600)
        c.flush()
        for key in ("async", "async many", "later", "many"):
            refused(c, key)
        result = c.add_many([("many", 0.0, "mails"), ("new", 0.0, "mails")])
        assert list(result.statuses) == [Status.EXISTS, Status.ADDED]


@pytest.mark.parametrize("unique_for", [0, -1, 366 * 86400, float("nan"), True, "1h"])
def test_times_out_of_bounds_are_refused_and_change_nothing(
    daemon: StartDaemon, unique_for: Any
) -> None:
    running = daemon("demo")
    with client() as c:
        with pytest.raises(InvalidArgument, match="unique_for"):
            c.add("k", 0, unique_for=unique_for)
        assert c.get("k") is None
    assert stats(running)["adds"] == 0


@pytest.mark.parametrize("end", ["kill", "resize", "reboot"])
def test_a_restart_keeps_keys_unique(daemon: StartDaemon, tmp_path: Path, end: str) -> None:
    options = ("--wal-dir", str(tmp_path / "wal"))
    one = daemon("demo", *options)
    with client(durable=True) as c, consumer() as jobs:
        first = c.add("k", 0, topic="mails", payload=b"p" * 5000, unique_for=3600)
        job = jobs.get(PATIENCE_S)
        assert job is not None
        job.ack()
        eventually(lambda: stats(one)["jobs"] == 0)
        refused(c, "k")
    if end == "resize":
        one.stop()
        one.restart("--capacity", "1000", *options)
    else:
        one.kill()
        if end == "reboot":
            remove_arena_files(one.paths)
        one.start()
    with client() as c:
        ticket = refused(c, "k")
        assert end == "reboot" or ticket == first.ticket
        assert c.get("k") is None


def wait_for_adds(added: dict[str, int], count: int) -> None:
    eventually(lambda: len(added) > count)


@pytest.mark.tier("all")
@pytest.mark.parametrize("wal", [False, True])
def test_many_kills_let_no_key_be_added_twice(
    daemon: StartDaemon, tmp_path: Path, wal: bool
) -> None:
    """Every key is added again and again while the daemon is killed. Each add may succeed once."""
    one = daemon("demo", *(("--wal-dir", str(tmp_path / "wal")) if wal else ()))
    rng = random.Random(7)
    added: dict[str, int] = {}
    ended = threading.Event()

    def kill() -> None:
        for n in range(KILLS):
            wait_for_adds(added, KEYS * (n + 1) // (3 * KILLS))
            one.kill()
            one.start()
        ended.set()

    killer = threading.Thread(target=kill)
    killer.start()
    with client(durable=wal) as c:
        while not ended.is_set():
            key = f"k{rng.randrange(KEYS)}"
            with suppress(Exists):
                info = c.add(key, rng.choice([0, 0.002]), topic="mails", unique_for=3600)
                assert key not in added, "one timer per key"
                added[key] = info.ticket
        killer.join()
        assert len(added) > KEYS // 4
        eventually(lambda: stats(one)["unique_keys"] == len(added))
        for key, ticket in added.items():
            assert refused(c, key) == ticket


def test_the_command_line(daemon: StartDaemon) -> None:
    running = daemon("demo")
    first = answer(running, "add", "k", "--delay", "0s", "--unique-for", "1h")
    again = cli(running, "add", "k", "--delay", "0s", "--mode", "replace")
    assert again.returncode != Exit.DONE
    assert f"ticket {first['ticket']}" in again.stderr

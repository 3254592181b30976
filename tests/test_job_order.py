"""Priorities and order keys of jobs, through the Python API and the command line, with real
daemons."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from command_line import answer, cli
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, remove_arena_files
from tiers import wide

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import (
    Admin,
    AsyncClient,
    Client,
    Consumer,
    FakeConsumer,
    InvalidArgument,
    InvalidKey,
    InvalidRows,
    Job,
    Partitioned,
)
from purgatoryd.clients.items import order_hash
from purgatoryd.shm_layout._core import lib

pytestmark = pytest.mark.tier("test")

GIVEN: dict[str, Any] = {"namespace": "shop", "timeout": PATIENCE_S}
SECOND_NS = 10**9
HASH = 7464137743347806138
"""First 8 bytes of the SHA-256 of "customer:7", as a little-endian signed number."""


def client() -> Client:
    return Client("demo", **GIVEN)


def consumer(**settings: Any) -> Consumer:
    return Consumer("demo", group="mailers", topics=["orders"], **GIVEN | settings)


def taken(jobs: Consumer) -> Job:
    job = jobs.get(PATIENCE_S)
    assert job is not None
    return job


def wait_for_jobs(c: Client, count: int) -> None:
    eventually(lambda: c.group("mailers").waiting == count)


def keys_in_order(c: Client, count: int) -> list[Any]:
    """Wait for `count` jobs, take them one by one, and return their keys."""
    wait_for_jobs(c, count)
    with Consumer("demo", group="mailers", create=False, max_in_flight=1, **GIVEN) as jobs:
        found = []
        for _ in range(count):
            job = taken(jobs)
            found.append(job.key)
            job.ack()
    return found


def lines(demo: Daemon, *args: str) -> list[dict[str, Any]]:
    """Return the records that a command prints."""
    return [json.loads(line) for line in cli(demo, *args, "--json").stdout.splitlines()]


# ---- priorities ----------------------------------------------------------------------------------


def add_one_by_one(c: Client, rows: list[tuple[str, int | None]]) -> None:
    for key, priority in rows:
        c.add(key, 0, topic="orders", priority=priority)


def add_in_a_lot(c: Client, rows: list[tuple[str, int | None]]) -> None:
    handles = [
        c.add(key, 0, topic="orders", priority=priority, wait=False) for key, priority in rows
    ]
    for handle in handles:
        handle.result()


def add_rows(c: Client, rows: list[tuple[str, int | None]]) -> None:
    given = [{"key": key, "delay": 0, "priority": priority} for key, priority in rows]
    assert c.add_many(given, topic="orders").ok


def add_columns(c: Client, rows: list[tuple[str, int | None]]) -> None:
    keys, priorities = zip(*rows, strict=True)
    columns = {"key": list(keys), "delay": np.zeros(len(rows)), "priority": list(priorities)}
    assert c.add_many(columns, topic="orders").ok


def add_arrow(c: Client, rows: list[tuple[str, int | None]]) -> None:
    keys, priorities = zip(*rows, strict=True)
    columns = [pa.array(keys), pa.array([0.0] * len(rows)), pa.array(priorities, pa.int8())]
    assert c.add_many(pa.table(columns, ["key", "delay", "priority"]), topic="orders").ok


def add_with_asyncio(_: Client, rows: list[tuple[str, int | None]]) -> None:
    async def add() -> None:
        async with AsyncClient("demo", **GIVEN) as c:
            for key, priority in rows[:2]:
                await c.add(key, 0, topic="orders", priority=priority)
            await c.add_many([(key, 0) for key, _ in rows[2:3]], topic="orders", priority=9)
            for key, priority in rows[3:]:
                handle = await c.add(key, 0, topic="orders", priority=priority, wait=False)
                await handle.result()

    asyncio.run(add())


@pytest.mark.parametrize(
    "add", [add_one_by_one, add_in_a_lot, add_rows, add_columns, add_arrow, add_with_asyncio]
)
def test_the_most_urgent_job_comes_first(
    daemon: StartDaemon, add: Callable[[Client, list[tuple[str, int | None]]], None]
) -> None:
    daemon("demo")
    with client() as c:
        c.create_group("mailers", ["orders"])
        add(c, [("plain", None), ("low", 1), ("high", 9), ("middle", 5)])
        assert keys_in_order(c, 4) == ["high", "middle", "low", "plain"]


def test_a_topic_gives_its_priority_to_timers_that_have_none(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, Admin("demo", timeout=PATIENCE_S) as admin:
        admin.set_topic("bills", priority=7, namespace="shop")
        admin.set_topic("bills", within=0, namespace="shop")
        c.create_group("mailers", ["orders", "bills"])
        c.add("low", 0, topic="orders")
        c.add("topic", 0, topic="bills")
        c.add("own", 0, topic="bills", priority=2)
        c.add("high", 0, topic="orders", priority=8)
        wait_for_jobs(c, 4)
        assert keys_in_order(c, 4) == ["high", "topic", "own", "low"]


def test_the_commands_set_priorities_and_order_keys(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    at = ("-n", "shop", "--json")
    changed = answer(demo, "topic", "set", "orders", "--priority", "4", *at)
    assert (changed["topic"], changed["priority"]) == ("orders", 4)
    given = ("--topic", "orders", "--delay", "0s", *at)
    with client() as c:
        c.create_group("mailers", ["orders"], ordered=True)
        answer(demo, "add", "a", "--order-key", "ann", *given)
        answer(demo, "add", "b", "--order-key", "ann", "--priority", "9", *given)
        answer(demo, "add", "c", "--priority", "5", *given)
        assert keys_in_order(c, 3) == ["c", "a", "b"]
        answer(demo, "add", "k", "--priority", "9", "--delay", "1h", *at)
        assert answer(demo, "get", "k", *at)["priority"] == 9
    [topic] = [row for row in lines(demo, "stats", "--topics") if row["topic"] == "orders"]
    assert topic["priority"] == 4
    for command in (("add", "k", "--delay", "1h"), ("topic", "set", "orders")):
        assert cli(demo, *command, "--priority", "10").returncode == Exit.USAGE


def test_a_waiting_job_becomes_more_urgent(daemon: StartDaemon) -> None:
    daemon("demo", "--clock", "virtual")
    with client() as c, Admin("demo", timeout=PATIENCE_S) as admin:
        c.create_group("mailers", ["orders"])
        for key, at_s in (("old", 0), ("young", 60), ("late", 120)):
            c.add(key, deadline_boot_ns=at_s * SECOND_NS, topic="orders", priority=0)
        c.add("urgent", deadline_boot_ns=75 * SECOND_NS, topic="orders", priority=7)
        admin.advance(121 * SECOND_NS)
        assert keys_in_order(c, 4) == ["old", "urgent", "young", "late"]


def test_get_shows_the_priority_and_a_kept_timer_keeps_it(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c:
        c.add("k", 3600, priority=3, order_key="o")
        c.add("plain", 3600)
        c.add("k", 7200, priority=8, mode="extend")
        found = c.get("k")
        assert found is not None
        assert found.priority == 3
        c.add("k", 3600, priority=8, mode="replace")
        assert [c.get(key).priority for key in ("k", "plain")] == [8, None]  # type: ignore[union-attr]


@pytest.mark.parametrize("priority", [-1, 10, 1.0, "1", True, 2**70])
def test_a_bad_priority_is_refused(daemon: StartDaemon, priority: Any) -> None:
    daemon("demo")
    with client() as c, Admin("demo", timeout=PATIENCE_S) as admin:
        for call in (
            lambda: c.add("k", 1, priority=priority),
            lambda: c.add("k", 1, priority=priority, wait=False),
            lambda: c.add_many([("k", 1)], priority=priority),
            lambda: c.add_many([{"key": "k", "delay": 1, "priority": priority}]),
            lambda: c.add_many({"key": ["k", "l"], "delay": [1, 1], "priority": [1, priority]}),
            lambda: admin.set_topic("orders", priority=priority, namespace="shop"),
            lambda: FakeConsumer().add("k", priority=priority),
        ):
            with pytest.raises(InvalidArgument, match=r"priority .* must be an int from 0 to 9"):
                call()
        assert c.count_timers() == 0


# ---- order keys ----------------------------------------------------------------------------------


def test_the_hash_of_an_order_key_is_that_of_the_protocol() -> None:
    assert order_hash("customer:7") == HASH
    assert order_hash(b"customer:7") == order_hash("customer:7")


def test_an_order_key_has_one_lease_and_the_order_of_deadlines(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c:
        c.create_group("mailers", ["orders"], ordered=True)
        c.pause_group("mailers")
        given: dict[str, Any] = {"topic": "orders", "order_key": "ann"}
        first = c.add("a1", 0, **given)
        for name, later_ns in (("a3", 3), ("a2", 2)):
            c.add(name, deadline_boot_ns=first.deadline_boot_ns + later_ns, priority=9, **given)
        c.add("b1", 0, topic="orders", order_key=b"bob")
        c.add("c", 0, topic="orders")
        wait_for_jobs(c, 5)
        with consumer(ordered=True) as jobs:
            c.resume_group("mailers")
            held = {job.key: job for job in (taken(jobs) for _ in range(3))}
            assert sorted(held) == ["a1", "b1", "c"]
            held["a1"].nack(delay=0.05)
            again = taken(jobs)
            assert (again.key, again.attempt) == ("a1", 2)
            info = c.group("mailers")
            assert (info.leased, info.waiting) == (3, 2)
            again.ack()
            second = taken(jobs)
            assert second.key == "a2"
            second.release()
            second = taken(jobs)
            assert (second.key, second.attempt) == ("a2", 1)
            second.ack()
            taken(jobs).ack()
            assert c.group("mailers").waiting == 0
            jobs.close(drain=0)  # two jobs stay open


def test_a_job_that_waits_for_its_order_key_is_not_overtaken(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c:
        c.create_group("mailers", ["orders"], ordered=True)
        first = c.add("low", 0, topic="orders", order_key="ann", priority=0)
        due_ns = first.deadline_boot_ns
        c.add("high", deadline_boot_ns=due_ns + 1, topic="orders", order_key="ann", priority=9)
        c.add("other", deadline_boot_ns=due_ns + 2, topic="orders", priority=5)
        assert keys_in_order(c, 3) == ["other", "low", "high"]


def test_priorities_and_order_keys_survive_a_reboot(daemon: StartDaemon, daemon_dir: Path) -> None:
    demo = daemon("demo", "--wal-dir", str(daemon_dir / "wal"))
    with Client("demo", durable=True, **GIVEN) as c, Admin("demo", timeout=PATIENCE_S) as admin:
        admin.set_topic("orders", priority=4, namespace="shop")
        c.create_group("mailers", ["orders"], ordered=True)
        due_ns = c.add("a1", 0, topic="orders", order_key="ann", priority=0).deadline_boot_ns
        c.add("a2", deadline_boot_ns=due_ns + 1, topic="orders", order_key="ann", priority=9)
        c.add("topic", deadline_boot_ns=due_ns + 2, topic="orders")
        c.add("high", deadline_boot_ns=due_ns + 3, topic="orders", priority=5)
        c.add("pending", 3600, topic="orders", priority=3, order_key="ann")
        wait_for_jobs(c, 4)
    demo.kill()
    remove_arena_files(demo.paths)
    demo.start()
    with client() as c:
        assert keys_in_order(c, 4) == ["high", "topic", "a1", "a2"]
        found = c.get("pending")
        assert found is not None
        assert found.priority == 3


@pytest.mark.parametrize("on_dead", ["skip", "block"])
def test_a_dead_letter_skips_or_blocks_its_order_key(daemon: StartDaemon, on_dead: str) -> None:
    daemon("demo")
    with client() as c:
        c.create_group("mailers", ["orders"], ordered=True, on_dead=on_dead)  # type: ignore[arg-type]
        first = c.add("a1", 0, topic="orders", order_key="ann")
        c.add("a2", deadline_boot_ns=first.deadline_boot_ns + 1, topic="orders", order_key="ann")
        wait_for_jobs(c, 2)
        with consumer(ordered=True, on_dead=on_dead) as jobs:
            taken(jobs).reject("broken")
            if on_dead == "skip":
                assert taken(jobs).key == "a2"
                return
            info = c.group("mailers")
            assert (info.dead, info.waiting, info.leased) == (1, 1, 0)
            c.requeue_dead("mailers")
            again = taken(jobs)
            assert again.key == "a1"
            again.ack()
            taken(jobs).reject("broken")
            c.add("a3", 0, topic="orders", order_key="ann")
            eventually(lambda: c.group("mailers").waiting == 1)
            assert c.group("mailers").leased == 0
            c.drop_dead("mailers")
            assert taken(jobs).key == "a3"


@pytest.mark.parametrize("kills", [2, wide(12)])
def test_jobs_of_order_keys_never_overlap_and_end_in_order(
    daemon: StartDaemon, daemon_dir: Path, kills: int
) -> None:
    """Let three consumers fail at random, and kill the daemon meanwhile."""
    demo, rng = daemon("demo", "--wal-dir", str(daemon_dir / "wal")), random.Random(kills)
    rows = [
        {
            "key": f"k{n}",
            "delay": n * 1e-4,
            "order_key": f"o{n % 12}",
            "priority": rng.randrange(10),
        }
        for n in range(240 * kills)
    ]
    busy: set[str] = set()
    done: dict[str, list[int]] = defaultdict(list)
    both, faults = threading.Lock(), []

    def work(jobs: Consumer, chance: random.Random) -> None:
        for job in jobs:
            number = int(str(job.key)[1:])
            order = f"o{number % 12}"
            with both:
                if order in busy:
                    faults.append(f"{order} was leased twice")
                busy.add(order)
            fails = chance.random() < 0.2
            with both:
                busy.discard(order)
                if not fails and number not in done[order]:
                    done[order].append(number)
            if fails:
                job.nack(delay=0.001)
            else:
                job.ack()

    with client() as c, ExitStack() as stack:
        settings = {"ordered": True, "max_attempts": 1000, "backoff": 0}
        c.create_group("mailers", ["orders"], **settings)  # type: ignore[arg-type]
        many = [stack.enter_context(consumer(create=False)) for _ in range(3)]
        threads = [
            threading.Thread(target=work, args=(jobs, random.Random(n)))
            for n, jobs in enumerate(many)
        ]
        for thread in threads:
            thread.start()
        assert c.add_many(rows, topic="orders").ok
        for number in range(1, kills + 1):
            eventually(lambda: c.group("mailers").acked > 120 * number, 4 * PATIENCE_S)  # noqa: B023
            demo.kill()
            demo.start()
        eventually(lambda: c.group("mailers").acked >= len(rows), 4 * PATIENCE_S)
        for jobs in many:
            jobs.stop()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert faults == []
    assert sorted(n for numbers in done.values() for n in numbers) == list(range(len(rows)))
    assert all(numbers == sorted(numbers) for numbers in done.values())


def test_a_key_and_its_order_key_need_one_partition(daemon: StartDaemon) -> None:
    daemon("demo", "--shards", "2", "--capacity", "4096", "--payload-memory", "1MiB")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("shop", 2)
    with client() as c:
        number = {f"k{n}": lib.pg_partition(b"k%d" % n, len(b"k%d" % n), 2) for n in range(9)}
        same = [key for key in number if number[key] == number["k0"]]
        apart = next(key for key in number if number[key] != number["k0"])
        c.create_group("mailers", ["orders"], ordered=True)
        given: dict[str, Any] = {"topic": "orders", "order_key": "k0"}
        rows = [{"key": key, "delay": 0} for key in same]
        c.add(same[0], 0, **given)
        assert c.add_many(rows[1:], **given).ok
        wait_for_jobs(c, len(same))
        mixed = [*rows, {"key": apart, "delay": 0, "order_key": "k0"}]
        columns = {"key": ["x", apart], "delay": [0.0, 0.0], "order_key": ["x", "k0"]}
        for call in (
            lambda: c.add(apart, 0, **given),
            lambda: c.add_many(mixed, topic="orders"),
            lambda: c.add_many(columns, topic="orders"),
            lambda: c.add_many(pa.table(columns), topic="orders"),
            lambda: c.add_many([(apart, 0)], **given),
        ):
            with pytest.raises(Partitioned, match=f"timer '{apart}' and its order key 'k0' are in"):
                call()
        assert c.group("mailers").waiting == len(same)


@pytest.mark.parametrize("order_key", [7, "", "k" * 65_536, 1.5])
def test_a_bad_order_key_is_refused(daemon: StartDaemon, order_key: Any) -> None:
    daemon("demo")
    with client() as c:
        for call in (
            lambda: c.add("k", 1, order_key=order_key),
            lambda: c.add("k", 1, order_key=order_key, wait=False),
            lambda: c.add_many([("k", 1)], order_key=order_key),
            lambda: c.add_many([{"key": "k", "delay": 1, "order_key": order_key}]),
            lambda: c.add_many({"key": ["k"], "delay": [1], "order_key": [order_key]}),
        ):
            with pytest.raises((InvalidKey, InvalidRows)):
                call()
        assert c.count_timers() == 0

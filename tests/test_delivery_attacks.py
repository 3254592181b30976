"""Attacks on consumer groups and schedules: deletions, pauses, deaths and limits that meet leases,
and a wall clock that is stepped."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import later_build
import pytest
from fault_driver import build_library
from jobs_driver import JobsCore, Session
from jobs_world import MS, SECOND, fire, restart, step
from machine import needs
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, refused
from stepped_wall import Wall

from purgatoryd.clients import (
    Client,
    Consumer,
    GroupMissing,
    LeaseLost,
    Subscriber,
)
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import Status

pytestmark = pytest.mark.tier("test")

HOLDER = """
import sys, time
from purgatoryd.clients import Consumer
jobs = Consumer("demo", namespace="shop", group="g", create=False, timeout=60,
                max_in_flight=int(sys.argv[1]))
held = [jobs.get(60) for _ in range(int(sys.argv[1]))]
print("holds", flush=True)
time.sleep(600)
"""
"""A member that takes jobs and never answers."""


def client() -> Client:
    return Client("demo", namespace="shop", timeout=PATIENCE_S)


def consumer(**settings: Any) -> Consumer:
    given = {"group": "g", "topics": ["t"], "timeout": PATIENCE_S}
    return Consumer("demo", namespace="shop", **{**given, **settings})


# ---- the core ------------------------------------------------------------------------------------


def test_a_lease_outlives_the_retention_of_its_job() -> None:
    core = JobsCore()
    core.create_group(retention_ns=50 * MS)
    session = Session(core)
    session.join()
    fire(core, "acked", "nacked", "released")
    held = {h.key: h for h in core.jobs_of(session)}
    step(core, SECOND)
    info = core.info()
    assert (info.leased, info.dead) == (3, 0)
    session.join(credits_=0)
    assert session.ack(held[b"acked"]) == Status.DONE
    assert session.nack(held[b"nacked"], MS) == Status.DONE
    assert session.release(held[b"released"]) == Status.DONE
    for _ in range(3):
        step(core, 5 * MS)
    assert {(d.key, d.reason) for d in core.dead()} == {
        (b"nacked", lib.PG_JR_TOO_OLD), (b"released", lib.PG_JR_TOO_OLD),
    }  # fmt: skip
    assert core.info().acked == 1


@pytest.mark.parametrize("kills", [False, True])
def test_a_job_whose_retention_ends_while_it_is_delayed_is_a_dead_letter(kills: bool) -> None:
    core = JobsCore()
    core.create_group(retention_ns=50 * MS)
    session = Session(core)
    session.join()
    fire(core, "k")
    (held,) = core.jobs_of(session)
    assert session.nack(held, 200 * MS) == Status.DONE
    step(core, 100 * MS)
    assert core.info().delayed == 1
    if kills:
        restart(core)
        session = Session(core)
    session.join()
    step(core, 150 * MS)
    assert core.jobs_of(session) == []
    assert [(d.key, d.attempts, d.reason) for d in core.dead()] == [(b"k", 1, lib.PG_JR_TOO_OLD)]


@pytest.mark.parametrize("kills", [False, True])
def test_a_group_that_is_deleted_while_its_jobs_are_leased_takes_them_along(kills: bool) -> None:
    core = JobsCore()
    core.create_group()
    core.create_group(b"other")
    session = Session(core)
    session.join()
    fire(core, "leased", "delayed", "waits")
    held = {h.key: h for h in core.jobs_of(session)}
    session.nack(held[b"delayed"], SECOND)
    session.release(held[b"waits"])
    core.ask_group(lib.PG_GA_DELETE, b"g")
    if kills:
        restart(core)
    core.create_group()
    assert (core.info().waiting, core.info().leased, core.info(b"other").waiting) == (0, 0, 3)
    fire(core, "new")
    session.join()
    step(core)
    (new,) = core.jobs_of(session)
    for old in held.values():
        assert session.ack(old) == Status.LEASE_LOST
    assert (new.key, session.ack(new)) == (b"new", Status.DONE)
    step(core, 2 * SECOND)
    assert core.jobs_of(session) == []
    assert core.info(b"other").waiting == 4


# ---- daemons -------------------------------------------------------------------------------------


def test_a_deletion_while_a_job_is_leased_ends_the_lease(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    with client() as c, consumer() as jobs:
        c.add("old", 0, topic="t")
        job = jobs.get(PATIENCE_S)
        assert job is not None
        c.delete_group("g")
        demo.kill()
        demo.start()
        with pytest.raises((LeaseLost, GroupMissing)):
            job.ack()
        with pytest.raises(GroupMissing):
            c.group("g")
        with consumer() as others:
            c.add("new", 0, topic="t")
            new = others.get(PATIENCE_S)
            assert new is not None
            new.ack()
            assert (new.key, c.group("g").acked) == ("new", 1)


@pytest.mark.parametrize("crashes", [False, True])
def test_members_that_die_in_a_pause_give_their_jobs_back_once_it_ends(
    daemon: StartDaemon, crashes: bool
) -> None:
    demo = daemon("demo")
    with client() as c:
        c.create_group("g", ["t"], backoff=0)
        c.add_many([(f"k{n}", 0.0) for n in range(20)], topic="t")
        members = [
            subprocess.Popen(
                [sys.executable, "-c", HOLDER, "10"], env=demo.env, stdout=subprocess.PIPE
            )
            for _ in range(2)
        ]
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == b"holds\n"
        c.pause_group("g")
        for member in members:
            member.kill()
            member.communicate()
        if crashes:
            demo.kill()
            demo.start()
        eventually(lambda: c.group("g").leased == 0)
        with consumer() as jobs:
            assert jobs.get(0.2) is None
            assert c.group("g").waiting == 20
            c.resume_group("g")
            attempts = Counter[Any]()
            for _ in range(20):
                job = jobs.get(PATIENCE_S)
                assert job is not None
                attempts[job.key] = job.attempt
                job.ack()
        assert attempts == {f"k{n}": 2 for n in range(20)}
        assert c.group("g").acked == 20


@pytest.mark.tier("all")
def test_a_later_build_takes_over_in_the_middle_of_deliveries(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    """The binary changes between two kills; its members see every job, and truthful attempts."""
    later = later_build.make(tmp_path / "later")
    demo = daemon("demo", "--wal-dir", str(tmp_path / "wal"))
    before = demo.env
    seen: dict[Any, list[int]] = {f"k{n}": [] for n in range(600)}
    acked: Counter[Any] = Counter()
    stop = threading.Event()

    def work(jobs: Consumer, rng: random.Random) -> None:
        while not stop.is_set():
            job = jobs.get(0.05)
            if job is None:
                continue
            seen[job.key].append(job.attempt)
            if rng.random() < 0.2:
                job.nack(delay=0)
                continue
            try:
                job.ack()
            except LeaseLost:
                continue
            acked[job.key] += 1

    with client() as c, consumer() as one, consumer() as two:
        c.add_many([(key, 0.001 * n) for n, key in enumerate(seen)], topic="t")
        threads = [
            threading.Thread(target=work, args=(jobs, random.Random(n)))
            for n, jobs in enumerate((one, two))
        ]
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: len(acked) > 100)
            demo.kill()
            demo.env = {**before, **later}
            demo.start()
            eventually(lambda: len(acked) == len(seen), 2 * PATIENCE_S)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        info = c.group("g")
        assert (info.waiting, info.leased, info.delayed, info.dead) == (0, 0, 0, 0)
        assert info.acked == len(seen)
    assert set(acked.values()) == {1}
    for key, attempts in seen.items():
        assert attempts == sorted(set(attempts)), (key, attempts)
    demo.kill()
    demo.env = before  # the later build has written its own formats
    assert "ABI is" in refused(demo.start)


def test_puts_and_deletions_race_with_the_firing_of_a_schedule(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    rng = random.Random(4)
    existed: list[tuple[float, float]] = []
    with client() as c, Subscriber("demo", namespace="shop", topics=["t"]) as source:
        for round_ in range(60):
            begun_s = time.time()
            c.put_schedule("s", every=0.004, topic="t")
            time.sleep(rng.random() * 0.02)
            if round_ % 20 == 10:
                demo.kill()
                demo.start()
            assert c.delete_schedule("s")
            existed.append((begun_s, time.time()))
        assert c.get_schedule("s") is None
        c.add("end", 0.05, topic="t")
        found = []
        while (notice := source.get(PATIENCE_S)) is not None and notice.key != "end":
            assert notice.occurrence is not None
            found.append(notice.occurrence.nominal_ns)
        assert notice is not None
        assert c.count_timers() == 0
    assert len(found) > 60
    assert len(found) == len(set(found))
    for nominal_ns in found:
        assert any(begun_s <= nominal_ns / 1e9 <= ended_s for begun_s, ended_s in existed)


@pytest.fixture
def wall(tmp_path: Path) -> Wall:
    needs("cc", "to compile tests/fault/wall.c")
    return Wall(tmp_path, build_library("wall", tmp_path))


@pytest.mark.parametrize("kills", [False, True])
def test_a_cron_schedule_fires_each_time_once_over_steps_of_the_wall_clock(
    daemon: StartDaemon, wall: Wall, kills: bool
) -> None:
    """The clock only shows an hour again after a step backwards, but never fires it again."""
    minute = timedelta(minutes=1)
    demo: Daemon = daemon("demo", env=wall.environment)
    with client() as c, Subscriber("demo", namespace="shop", topics=["t"]) as source:
        put = c.put_schedule("s", cron="0 * * * *", topic="t")
        assert put.next is not None
        first: datetime = put.next

        def show(moment: datetime) -> None:
            """Let the clock show a moment."""
            wall.step(moment.timestamp() - time.time())
            if kills:
                demo.kill()
                demo.start()

        def taken() -> datetime:
            notice = source.get(PATIENCE_S)
            assert notice is not None
            assert notice.occurrence is not None
            assert wall.highest_ns >= notice.occurrence.nominal_ns
            return notice.occurrence.nominal

        hour = timedelta(hours=1)
        show(first + minute)
        assert taken() == first
        show(first - minute)  # the clock shows the first hour a second time
        show(first + minute)
        show(first + hour + minute)
        assert taken() == first + hour
        show(first + minute)
        show(first + 2 * hour + minute)
        assert taken() == first + 2 * hour
        after = c.get_schedule("s")
        assert after is not None
        assert after.next == first + 3 * hour
        assert source.get(0) is None

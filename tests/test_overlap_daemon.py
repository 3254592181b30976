"""Schedules whose next occurrence depends on open jobs: overlap "skip", "queue" and "delay"."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import job_worker
import pytest
from partitioned import start_partitioned
from real_daemon import PATIENCE_S, StartDaemon, eventually, remove_arena_files, stats

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import (
    Admin,
    Client,
    Consumer,
    DaemonError,
    InvalidArgument,
    Job,
    LeaseLost,
    Schedule,
)
from purgatoryd.clients.schedules import OverlapRule

pytestmark = pytest.mark.tier("all")

HOUR_NS = 3600 * 10**9
ORIGIN = datetime(2027, 1, 15, 8, tzinfo=UTC)
VIRTUAL = ("--clock", "virtual", "--wall-origin", "2027-01-15T08:00:00Z")
HOURLY: list[Any] = [{"every": 3600}, {"cron": "0 * * * *"}]


def client(**options: Any) -> Client:
    return Client("demo", namespace="shop", timeout=PATIENCE_S, **options)


def consumer(**settings: Any) -> Consumer:
    given = {"namespace": "shop", "group": "g", "topics": ["ticks"], "timeout": PATIENCE_S,
             "lease": 10**6, "max_lease": 10**6, "backoff": 0}  # fmt: skip
    return Consumer("demo", **{**given, **settings})


def advance(hours: float) -> None:
    """Move the virtual clock to so many hours, and a bit more, because timers fire at a tick's
    end."""
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.advance(round(hours * HOUR_NS) + 1_000_000)


def at(hours: float) -> datetime:
    return ORIGIN + timedelta(hours=hours)


def hours(job: Job) -> float:
    """Return the nominal time of a job in hours."""
    nominal_ns = int(str(job.key).rpartition("@")[2])
    return round((nominal_ns / 1e9 - ORIGIN.timestamp()) / 3600, 3)


def taken(jobs: Consumer) -> Job:
    job = jobs.get(PATIENCE_S)
    assert job is not None
    return job


def seen(caller: Client, key: str = "tide") -> Schedule:
    found = caller.get_schedule(key)
    assert found is not None
    return found


def opened(caller: Client, count: int, key: str = "tide") -> Schedule:
    """Wait until so many jobs are open: acks travel on other connections."""
    found = eventually(lambda: one if (one := seen(caller, key)).open_jobs == count else None)
    assert found is not None
    return found


def nothing(jobs: Consumer) -> None:
    assert jobs.get(0.05) is None


# ---- the four rules --------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_allow_fires_while_jobs_are_open(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as caller, consumer() as jobs:
        assert caller.put_schedule("tide", every=3600, topic="ticks").overlap == "allow"
        advance(3)
        found = [taken(jobs) for _ in range(3)]
        assert [hours(job) for job in found] == [1, 2, 3]
        assert seen(caller).open_jobs == 3
        for job in found:
            job.ack()
        opened(caller, 0)


@pytest.mark.tier("test")
@pytest.mark.parametrize("spec", HOURLY, ids=["every", "cron"])
def test_skip_ends_an_occurrence_that_is_due_while_a_job_is_open(
    daemon: StartDaemon, spec: dict[str, Any]
) -> None:
    one = daemon("demo", *VIRTUAL)
    with client() as caller, consumer() as jobs:
        caller.put_schedule("tide", topic="ticks", overlap="skip", count=5, **spec)
        advance(1)
        first = taken(jobs)
        advance(3)
        nothing(jobs)
        assert stats(one)["skipped"] == 2
        assert seen(caller).next == at(4)
        first.ack()
        opened(caller, 0)
        advance(4)
        second = taken(jobs)
        assert (hours(first), hours(second)) == (1, 4)
        second.nack(delay=7200)
        advance(5)
        assert stats(one)["skipped"] == 3, "a job that waits for its next attempt is open"
        assert (seen(caller).occurrences, seen(caller).next) == (5, None)


@pytest.mark.tier("test")
@pytest.mark.parametrize("spec", HOURLY, ids=["every", "cron"])
def test_queue_fires_the_waiting_occurrences_one_by_one(
    daemon: StartDaemon, spec: dict[str, Any]
) -> None:
    one = daemon("demo", *VIRTUAL)
    with client() as caller, consumer() as jobs:
        caller.put_schedule("tide", topic="ticks", overlap="queue", count=5, **spec)
        advance(4.5)
        for expected in (1, 2, 3, 4):
            job = taken(jobs)
            assert hours(job) == expected
            nothing(jobs)
            assert seen(caller).next == at(expected + 1)
            job.ack()
        opened(caller, 0)
        nothing(jobs)
        assert seen(caller).next == at(5)
        advance(5)
        taken(jobs).ack()
        assert (opened(caller, 0).occurrences, seen(caller).next) == (5, None)
        assert stats(one)["skipped"] == 0
        advance(9)
        nothing(jobs)


@pytest.mark.tier("test")
def test_delay_counts_from_the_end_of_the_last_job(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as caller, consumer() as jobs, consumer(group="other") as others:
        put = caller.put_schedule("tide", every=3600, topic="ticks", overlap="delay", count=3)
        assert (put.next, put.overlap) == (at(1), "delay")
        advance(1)
        job, other = taken(jobs), taken(others)
        advance(2)
        job.ack()
        assert opened(caller, 1).next is None, "the other group has not finished"
        assert caller.preview_schedule("tide") == []
        advance(2.5)
        other.ack()
        assert hours_of(opened(caller, 0).next) == 3.5
        assert [hours_of(one) for one in caller.preview_schedule("tide", 9)] == [3.5]
        advance(3.4)
        nothing(jobs)
        advance(3.51)
        job = taken(jobs)
        assert hours(job) == 3.5
        job.reject("broken")
        taken(others).ack()
        assert hours_of(opened(caller, 0).next) == 4.51, "a dead letter is not open"
        advance(4.52)
        taken(jobs).ack()
        taken(others).ack()
        assert (opened(caller, 0).occurrences, seen(caller).next) == (3, None)


def hours_of(moment: datetime | None) -> float:
    assert moment is not None
    return round((moment - ORIGIN).total_seconds() / 3600, 3)


@pytest.mark.tier("test")
def test_delay_without_a_group_counts_from_the_firing(daemon: StartDaemon) -> None:
    one = daemon("demo", *VIRTUAL)
    with client() as caller:
        caller.put_schedule("tide", every=3600, topic="ticks", overlap="delay")
        caller.put_schedule("once", every=60, topic="ticks", overlap="delay", until=at(0.51))
        advance(5.5)
        assert hours_of(seen(caller).next) == 6
        assert stats(one)["expiries"] == 5 + 30
        assert seen(caller, "once").next is None


@pytest.mark.tier("test")
def test_delay_passes_a_timer_with_the_key_of_an_occurrence(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as caller:
        caller.add(f"tide@{int(at(1).timestamp()) * 10**9}", 9 * 3600)
        put = caller.put_schedule("tide", every=3600, topic="ticks", overlap="delay")
        assert (put.next, put.occurrences) == (at(2), 2)


@pytest.mark.tier("test")
@pytest.mark.parametrize("overlap", ["queue", "delay"])
def test_a_due_occurrence_waits_for_the_job_of_a_trigger(daemon: StartDaemon, overlap: Any) -> None:
    daemon("demo", *VIRTUAL)
    with client() as caller, consumer() as jobs:
        caller.put_schedule("tide", every=3600, topic="ticks", overlap=overlap)
        caller.trigger_schedule("tide", at(-9))
        extra = taken(jobs)
        advance(1.5)
        nothing(jobs)
        found = opened(caller, 1)
        assert (found.occurrences, found.deadline) == (0, None), (
            "the schedule took its occurrence back"
        )
        extra.ack()
        if overlap == "delay":
            assert hours_of(opened(caller, 0).next) == 2.5
            advance(2.51)
        job = taken(jobs)
        assert hours(job) == (1 if overlap == "queue" else 2.5)
        job.ack()


# ---- changes ---------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_put_compares_overlap_and_counts_the_jobs_that_exist(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as caller, consumer() as jobs:
        spec: dict[str, Any] = {"every": 3600, "topic": "ticks"}
        assert caller.put_schedule("tide", overlap="skip", **spec).revision == 1
        assert caller.put_schedule("tide", overlap="skip", **spec).revision == 1
        advance(1)
        job = taken(jobs)
        changed = caller.put_schedule("tide", overlap="delay", **spec)
        assert (changed.revision, changed.open_jobs, changed.next) == (2, 1, None)
        caller.pause_schedule("tide")
        job.ack()
        opened(caller, 0)
        advance(2)
        assert hours_of(caller.resume_schedule("tide").next) == 3
        advance(3.01)
        job = taken(jobs)
        caller.delete_schedule("tide")
        again = caller.put_schedule("tide", overlap="queue", **spec)
        assert again.open_jobs == 0, "the job is that of an earlier schedule"
        advance(4.02)
        later = taken(jobs)
        assert 4 <= hours(later) <= 4.02
        for bad in ({"overlap": "never"}, {"overlap": None}):
            with pytest.raises(InvalidArgument, match="overlap"):
                caller.put_schedule("bad", every=60, **bad)
        with pytest.raises(InvalidArgument, match="delay"):
            caller.put_schedule("bad", cron="@daily", overlap="delay")
        filled = caller.backfill_schedule("tide", at(-2), at(0))
        assert filled.armed == 2
        job.ack()
        later.ack()


@pytest.mark.tier("test")
def test_jobs_that_are_dropped_or_dead_are_not_open(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as caller:
        with consumer(max_attempts=1) as jobs:
            caller.put_schedule("tide", every=3600, topic="ticks", overlap="queue")
            advance(1)
            job = taken(jobs)
            job.reject("no")
            opened(caller, 0)
            assert caller.requeue_dead("g", job.ticket) == 1
            assert opened(caller, 1).next == at(2)
            job = taken(jobs)
            job.nack()
            opened(caller, 0)
            advance(2)
            opened(caller, 1)
        caller.delete_group("g")
        assert opened(caller, 0).next == at(3)


@pytest.mark.tier("test")
def test_the_commands_set_and_show_overlap(daemon: StartDaemon) -> None:
    one = daemon("demo", *VIRTUAL)

    def command(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "purgatoryd.cli", "schedules", *args, "--name", "demo",
             "--namespace", "shop"],
            env=one.env, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip

    put = command("put", "a", "--every", "1h", "--topic", "ticks", "--overlap", "delay", "--json")
    record = json.loads(put.stdout)
    assert (record["overlap"], record["open_jobs"]) == ("delay", 0)
    with consumer() as jobs:
        advance(1)
        taken(jobs)
        assert "waits for 1 jobs" in command("ls").stdout
    assert command("put", "b", "--every", "1h", "--overlap", "never").returncode == Exit.USAGE
    assert command("put", "b", "--cron", "@daily", "--overlap", "delay").returncode != Exit.DONE


# ---- kills and restarts ----------------------------------------------------------------------


@pytest.mark.tier("test")
@pytest.mark.parametrize("ends", ["kill", "resize", "reboot"])
def test_open_jobs_are_counted_again_after_a_restart(
    daemon: StartDaemon, tmp_path: Path, ends: str
) -> None:
    options = ("--wal-dir", str(tmp_path / "wal"), *VIRTUAL) if ends == "reboot" else VIRTUAL
    one = daemon("demo", *options)
    rules: tuple[OverlapRule, ...] = ("skip", "queue", "delay")
    durable = ends == "reboot"

    def restart() -> None:
        if ends == "resize":
            one.stop()
            one.restart("--capacity", "1000", "--schedules", "7", *options)
            return
        one.kill()
        if ends == "reboot":
            remove_arena_files(one.paths)
        one.start()

    with client(durable=durable) as caller, consumer() as jobs:
        for rule in rules:
            caller.put_schedule(rule, every=3600, topic="ticks", overlap=rule)
        advance(1)
        first = [taken(jobs) for _ in rules]
        for rule in rules:
            opened(caller, 1, rule)
        assert len(first) == 3
        jobs.close(drain=0)
    restart()
    with client(durable=durable) as caller, consumer() as jobs:
        assert {s.key: s.open_jobs for s in caller.schedules()} == dict.fromkeys(rules, 1)
        assert {s.key: s.overlap for s in caller.schedules()} == {rule: rule for rule in rules}
        found = {str(job.key).partition("@")[0]: job for job in (taken(jobs) for _ in rules)}
        advance(2.5)
        nothing(jobs)
        found["queue"].ack()
        job = taken(jobs)
        assert (str(job.key)[:5], hours(job)) == ("queue", 2)
        found["delay"].ack()
        assert hours_of(opened(caller, 0, "delay").next) == 3.5
        found["skip"].ack()
        opened(caller, 0, "skip")
        jobs.close(drain=0)
    restart()
    with client() as caller, consumer() as jobs:
        assert hours_of(seen(caller, "delay").next) == 3.5
        advance(3.51)
        last = {str(job.key).partition("@")[0]: hours(job) for job in (taken(jobs) for _ in rules)}
        assert last == {"queue": 2, "skip": 3, "delay": 3.5}


@pytest.mark.tier("test")
@pytest.mark.parametrize("ends", ["kill", "reboot"])
def test_a_delay_counts_from_the_ack_if_a_kill_comes_before_the_arming(
    daemon: StartDaemon, tmp_path: Path, ends: str
) -> None:
    wal = ("--wal-dir", str(tmp_path / "wal")) if ends == "reboot" else ()
    one = daemon("demo", *VIRTUAL, *wal, "--capacity", "8")
    durable = ends == "reboot"
    with client(durable=durable) as caller, consumer() as jobs:
        caller.put_schedule("tide", every=3600, topic="ticks", overlap="delay")
        advance(1)
        job = taken(jobs)
        for n in range(8):
            caller.add(f"filler {n}", 9 * 3600)
        advance(2)
        job.ack()
        assert opened(caller, 0).deadline is None, "the next occurrence waits for space"
        advance(2.5)
        caller.put_schedule("barrier", every=9 * 3600)  # durable=True: the ack is on disk as well
    one.kill()
    if ends == "reboot":
        remove_arena_files(one.paths)
    one.start()
    with client() as caller:
        assert seen(caller).deadline is None
        caller.cancel("filler 0")
        eventually(lambda: seen(caller).deadline is not None)
        assert hours_of(seen(caller).next) == 3


@pytest.mark.tier("test")
def test_open_jobs_follow_their_schedule_to_other_shards(daemon: StartDaemon) -> None:
    one = start_partitioned(daemon, 4)
    names = [f"s{n}" for n in range(8)]
    with Client("demo", timeout=PATIENCE_S) as caller:
        with consumer(namespace="default") as jobs:
            for name in names:
                caller.put_schedule(name, every=0.02, topic="ticks", overlap="queue")
            found = [taken(jobs) for _ in names]
            assert {str(job.key).partition("@")[0] for job in found} == set(names)
            jobs.close(drain=0)
        for moved in ("3", "1", "2"):
            one.restart("--shards", moved)
            assert {s.key: s.open_jobs for s in caller.schedules()} == dict.fromkeys(names, 1)


@pytest.mark.tier("test")
def test_a_consumer_that_is_killed_holds_the_next_occurrence_until_another_acks(
    daemon: StartDaemon,
) -> None:
    daemon("demo")
    environment = os.environ | {"PYTHONPATH": str(Path(job_worker.__file__).parent)}
    script = (
        "import sys, time; from purgatoryd.clients import Consumer\n"
        "with Consumer('demo', namespace='shop', group='g', create=False, timeout=60) as jobs:\n"
        "    print(next(iter(jobs)).key, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with client() as caller:
        with consumer():
            pass
        caller.put_schedule("tide", every=0.02, topic="ticks", overlap="queue")
        holder = subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        key = holder.stdout.readline().strip()
        holder.kill()
        holder.wait(PATIENCE_S)
        with consumer() as jobs:
            job = taken(jobs)
            assert (job.key, job.attempt > 1) == (key, True)
            assert seen(caller).open_jobs == 1
            job.ack()
            later = taken(jobs)
            assert int(str(later.key)[5:]) - int(key[5:]) == 20_000_000
            later.ack()
        holder.stdout.close()


@pytest.mark.costly("a daemon is killed thirty times")
@pytest.mark.parametrize("durable", [False, True], ids=["arena", "wal"])
def test_many_kills_overlap_and_lose_nothing(
    daemon: StartDaemon, tmp_path: Path, durable: bool
) -> None:
    args = ("--wal-dir", str(tmp_path / "wal")) if durable else ()
    one = daemon("demo", *args)
    step_s, chance = 0.01, random.Random(7)
    begun: dict[OverlapRule, list[tuple[int, int]]] = {"skip": [], "queue": [], "delay": []}
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            try:
                with consumer() as jobs:
                    while not ended.is_set():
                        if (job := jobs.get(0.05)) is not None:
                            handle(job)
            except DaemonError:
                time.sleep(0.01)

    def handle(job: Job) -> None:
        name, _, nominal = str(job.key).partition("@")
        begun[cast("OverlapRule", name)].append((int(nominal), time.time_ns()))
        time.sleep(step_s / 2)
        with suppress(LeaseLost):
            job.ack()

    with client(durable=durable) as caller, consumer():
        for rule in begun:
            caller.put_schedule(rule, every=step_s, topic="ticks", overlap=rule)
    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(30):
        time.sleep(0.05 + chance.random() * 0.1)
        one.kill()
        one.start()
    eventually(lambda: all(len(times) > 20 for times in begun.values()))
    with client() as caller:
        for rule in begun:
            caller.pause_schedule(rule)
        for rule in begun:
            opened(caller, 0, rule)
    ended.set()
    worker.join(PATIENCE_S)
    step_ns = round(step_s * 1e9)
    for jobs in begun.values():
        order = [nominal for nominal, _ in jobs]
        assert order == sorted(order), "one after another"
    queued = sorted({nominal for nominal, _ in begun["queue"]})
    assert all(b - a == step_ns for a, b in itertools.pairwise(queued)), "none is lost"
    ends = dict(begun["delay"])
    assert all(b - ends[a] > step_ns for a, b in itertools.pairwise(ends)), "none is early"
    print({rule: len(jobs) for rule, jobs in begun.items()})

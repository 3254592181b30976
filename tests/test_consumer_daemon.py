"""Consumers of a real daemon: answers, kills of consumers and daemon, partitions, asyncio."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import job_worker
import numpy as np
import pyarrow as pa
import pytest
from interrupts import interrupted
from real_daemon import PATIENCE_S, StartDaemon, boot_ns, eventually
from tiers import wide

from purgatoryd.clients import (
    Admin,
    AllOf,
    AsyncClient,
    AsyncConsumer,
    AsyncPurgatory,
    CancelResult,
    Cause,
    Client,
    Consumer,
    ForkedProcess,
    Full,
    FullGroup,
    GroupMissing,
    GroupRefused,
    InvalidArgument,
    Job,
    JobReason,
    LeaseLost,
    Partitioned,
    Purgatory,
)
from purgatoryd.shm_layout.layout import Status

pytestmark = pytest.mark.tier("test")


def client(**settings: Any) -> Client:
    return Client("demo", namespace="shop", timeout=PATIENCE_S, **settings)


def consumer(**settings: Any) -> Consumer:
    given = {"namespace": "shop", "group": "mailers", "topics": ["orders"], "timeout": PATIENCE_S}
    return Consumer("demo", **{**given, **settings})


def taken(jobs: Consumer) -> Job:
    job = jobs.get(PATIENCE_S)
    assert job is not None
    return job


# ---- answers -----------------------------------------------------------------------------------


def test_each_job_goes_to_one_member(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer() as one, consumer() as other:
        c.add_many([(f"k{n}", 0.0) for n in range(400)], topic="orders")
        counts, both = {one: 0, other: 0}, threading.Lock()
        keys: list[Any] = []

        def work(jobs: Consumer) -> None:
            for job in jobs:
                job.ack()
                with both:
                    counts[jobs] += 1
                    keys.append(job.key)
                    if len(keys) == 400:
                        one.stop()
                        other.stop()

        threads = [threading.Thread(target=work, args=(jobs,)) for jobs in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(keys) == sorted(f"k{n}" for n in range(400))
        assert min(counts.values()) > 50
        assert c.group("mailers").acked == 400


def test_a_job_has_the_times_of_its_timer(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer() as jobs:
        timer = c.add("k", 0.05, topic="orders", payload=b"p")
        job = taken(jobs)
        assert (job.key, job.payload, job.topic, job.group) == ("k", b"p", "orders", "mailers")
        assert (job.ticket, job.attempt) == (timer.ticket, 1)
        assert job.deadline_boot_ns == timer.deadline_boot_ns
        assert 0 <= (job.fired - job.deadline).total_seconds() <= job.lateness_ns / 1e9
        job.ack()


def finish_operations(c: Purgatory) -> None:
    """Let one operation of each kind end."""
    keys = AllOf({"w": 1, "v": 1})
    c.watch("met", keys, 3600, topic="orders", payload=b"met")
    c.watch("failed", AllOf({"x": 1}), 3600, topic="orders", payload=b"failed")
    c.watch("gone", keys, 3600, topic="orders", payload=b"gone").cancel()
    c.watch("late", keys, 0, topic="orders")
    c.advance("w", 1)
    c.fail("x", 7)
    c.advance("v", 1)


def test_the_end_of_an_operation_is_a_job(daemon: StartDaemon) -> None:
    daemon("demo")
    with (
        Purgatory("demo", namespace="shop", timeout=PATIENCE_S) as operations,
        client() as c,
        consumer() as jobs,
    ):
        finish_operations(operations)
        c.add("timer", 0, topic="orders", payload=b"timer")
        ended: dict[Any, Any] = {}
        while len(ended) < 5:
            with taken(jobs) as job:
                missing = None if job.verdict is None else job.verdict.missing
                ended[job.key] = (job.cause, missing, job.payload)
                assert job.verdict is None or job.verdict.elapsed_ns > 0
                assert job.verdict is None or job.verdict.error == 7 * (job.key == "failed")
    assert ended == {
        "met": (Cause.SATISFIED, (), b"met"),
        "failed": (Cause.FAILED, (0,), b"failed"),
        "gone": (Cause.CANCELLED, (0, 1), b"gone"),
        "late": (Cause.EXPIRED, (0, 1), b""),
        "timer": (Cause.EXPIRED, None, b"timer"),
    }


def test_a_dead_letter_of_an_operation_has_its_verdict(daemon: StartDaemon) -> None:
    daemon("demo")
    with (
        Purgatory("demo", namespace="shop", timeout=PATIENCE_S) as operations,
        client() as c,
        consumer() as jobs,
    ):
        operations.watch("op", AllOf({"w": 1}), 3600, topic="orders", payload=b"p").cancel()
        c.add("timer", 0, topic="orders", payload=b"timer")
        for job in (taken(jobs), taken(jobs)):
            job.reject("no")
        letters = {letter.key: letter for letter in c.dead_letters("mailers")}
    operation, timer = letters["op"], letters["timer"]
    assert (operation.cause, operation.payload) == (Cause.CANCELLED, b"p")
    assert operation.verdict is not None
    assert operation.verdict.missing == (0,)
    assert (timer.cause, timer.verdict, timer.payload) == (Cause.EXPIRED, None, b"timer")


def test_a_job_names_the_occurrence_of_its_schedule(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer() as jobs:
        schedule = c.put_schedule("tide@sea", every=0.05, topic="orders", count=1)
        c.add("order@5", 0, topic="orders")
        found = {job.key: job.occurrence for job in (taken(jobs), taken(jobs))}
    assert found.pop("order@5") is None
    [occurrence] = found.values()
    assert occurrence is not None
    assert occurrence.schedule == "tide@sea"
    assert list(found) == [f"tide@sea@{occurrence.nominal_ns}"]
    assert schedule.next == occurrence.nominal


def test_tasks_get_the_cause_of_a_job(daemon: StartDaemon) -> None:
    daemon("demo")

    async def scenario() -> None:
        settings: dict[str, Any] = {"namespace": "shop", "timeout": PATIENCE_S}
        async with (
            AsyncPurgatory("demo", **settings) as operations,
            AsyncConsumer("demo", group="mailers", topics=["orders"], **settings) as jobs,
        ):
            await operations.watch("op", AllOf({"w": 1}), 0, topic="orders", payload=b"p")
            job = await jobs.get(PATIENCE_S)
            assert job is not None
            async with job:
                assert (job.cause, job.payload) == (Cause.EXPIRED, b"p")
                assert job.verdict is not None
                assert job.verdict.missing == (0,)
                assert job.occurrence is None

    asyncio.run(scenario())


def test_a_failed_attempt_is_followed_by_another_and_then_by_a_dead_letter(
    daemon: StartDaemon,
) -> None:
    daemon("demo")
    with client() as c, consumer(max_attempts=3, backoff=0) as jobs:
        c.add("k", 0, topic="orders", payload=b"p")
        for attempt in (1, 2, 3):
            with taken(jobs) as job:
                assert job.attempt == attempt
                raise ValueError(f"no {attempt}")
        eventually(lambda: c.group("mailers").dead == 1)
        [letter] = c.dead_letters("mailers")
        assert (letter.key, letter.payload, letter.topic) == ("k", b"p", "orders")
        assert (letter.attempts, letter.reason) == (3, JobReason.MAX_ATTEMPTS)
        assert letter.error == "ValueError: no 3"
        assert letter.first_failed_boot_ns is not None
        assert letter.last_failed_boot_ns is not None
        assert letter.first_failed_boot_ns <= letter.last_failed_boot_ns
        assert c.requeue_dead("mailers", letter.ticket) == 1
        with taken(jobs) as job:
            assert (job.key, job.attempt) == ("k", 1)
            job.reject("bad")
        assert [one.reason for one in c.dead_letters("mailers")] == [JobReason.REJECTED]
        assert c.drop_dead("mailers") == 1
        assert list(c.dead_letters("mailers")) == []


def test_a_delayed_attempt_waits(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer() as jobs:
        c.add("k", 0, topic="orders")
        job = taken(jobs)
        job.nack("later", delay=0.3)
        answered_s = time.monotonic()
        assert c.group("mailers").delayed == 1
        with taken(jobs) as job:
            assert job.attempt == 2
        assert time.monotonic() - answered_s >= 0.29


def test_a_lease_outlasts_its_length_while_the_process_lives(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer(lease=0.3) as jobs:
        c.add("k", 0, topic="orders")
        job = taken(jobs)
        assert jobs.get(1.0) is None
        assert not job.lost
        job.ack()
        assert c.group("mailers").acked == 1


def test_a_lease_ends_at_max_lease(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer(lease=0.2, max_lease=0.5, backoff=0) as jobs:
        c.add("k", 0, topic="orders")
        job, again = taken(jobs), taken(jobs)
        assert (again.key, again.attempt) == ("k", 2)
        assert job.lost
        with pytest.raises(LeaseLost):
            job.ack()
        again.ack()


def test_a_used_budget_refuses_timers(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c:
        c.create_group("mailers", ["orders"], max_backlog=3)
        for n in range(3):
            c.add(f"k{n}", 3600, topic="orders")
        with pytest.raises(FullGroup, match="consumer group 'mailers'") as raised:
            c.add("one", 3600, topic="orders")
        assert isinstance(raised.value, Full)
        assert (raised.value.group, raised.value.jobs) == ("mailers", 3)
        c.add("one", 3600, topic="other")
        with pytest.raises(GroupRefused, match="3 pending timers"):
            c.create_group("printers", ["orders"], max_backlog=2)


def test_the_end_of_an_operation_is_a_job_for_groups_and_an_outcome(
    daemon: StartDaemon,
) -> None:
    daemon("demo")
    with consumer() as jobs, Purgatory("demo", namespace="shop", timeout=PATIENCE_S) as owner:
        operation = owner.watch("req", AllOf({"a": 1}), 3600, payload=b"p", topic="orders")
        owner.advance("a", 1)
        job = taken(jobs)
        assert (job.key, job.ticket) == ("req", operation.ticket)
        assert job.verdict is not None
        assert (job.verdict.error, job.verdict.missing, job.payload) == (0, (), b"p")
        job.ack()
        assert operation.result(PATIENCE_S).cause == "satisfied"
        with client() as c:
            assert (c.group("mailers").acked, c.group("mailers").waiting) == (1, 0)


def test_a_group_without_consumers_fills_only_its_own_budget(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, Client("demo", namespace="other", timeout=PATIENCE_S) as other:
        c.create_group("dead", ["orders"])
        late = [(f"k{n}", 0.0, "orders", b"x" * 6000) for n in range(2000)]
        statuses = list(c.add_many(late).statuses)
        assert 1000 < statuses.count(Status.FULL_GROUP) < 2000
        rows = [(f"k{n}", 3600.0, "t", b"x" * 6000) for n in range(1000)]
        assert other.add_many(rows).ok


DROPPED = "a consumer group dropped unfinished jobs"


def test_a_group_drops_nothing_for_a_timer_that_never_fits(daemon: StartDaemon) -> None:
    one = daemon("demo")
    with client() as c:
        c.create_group("mailers", ["orders"], max_backlog=4, max_bytes=1024, full="drop_oldest")
        c.add("far", 3600, topic="orders", payload=b"x" * 400)
        for n in range(3):
            c.add(f"k{n}", 0, topic="orders")
        eventually(lambda: c.group("mailers").waiting == 3)
        for size in (2000, 700):
            with pytest.raises(FullGroup):
                c.add("big", 3600, topic="orders", payload=b"x" * size)
        assert (c.group("mailers").waiting, c.group("mailers").dropped) == (3, 0)
        assert DROPPED not in one.stderr
        c.add("fits", 3600, topic="orders", payload=b"x" * 550)
        assert (c.group("mailers").waiting, c.group("mailers").dropped) == (2, 1)
    eventually(lambda: DROPPED in one.stderr)
    (line,) = (line for line in one.stderr.splitlines() if DROPPED in line)
    assert line.endswith("[name=demo namespace=shop group=mailers jobs=1]")


def test_a_large_timer_that_drops_many_jobs_does_not_overflow_the_wal_buffer(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    one = daemon(
        "demo", "--wal-dir", str(daemon_dir / "wal"), "--wal-buffer-bytes", "4MiB",
        "--jobs", "80000", "--capacity", "8192",
    )  # fmt: skip
    groups = [f"g{n}" for n in range(16)]
    with client() as c:
        for group in groups:
            c.create_group(
                group, ["orders"], max_backlog=4200, max_bytes=65_600, full="drop_oldest"
            )
        for start in range(0, 4096, 256):
            c.add_many([(f"k{n}", 0.0, "orders", b"") for n in range(start, start + 256)])
        eventually(lambda: all(c.group(group).waiting >= 4000 for group in groups))
        c.add("big", 3600, topic="orders", payload=b"x" * 65_000)
        found = [c.group(group) for group in groups]
        assert {(g.waiting, g.pending) for g in found} == {(37, 1)}
        c.put_schedule("tide", every=3600, topic="orders", payload=b"x" * 540)
        assert {c.group(group).waiting for group in groups} == {0}
    one.kill()
    one.start()
    with client() as c:
        assert {(c.group(group).waiting, c.group(group).pending) for group in groups} == {(0, 2)}


def test_a_leased_job_is_not_cancelled(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer() as jobs:
        c.add("k", 0, topic="orders")
        job = taken(jobs)
        assert c.cancel("k") is CancelResult.LEASED
        assert c.cancel_many(["k", "none"]) == [CancelResult.LEASED, CancelResult.UNKNOWN]
        job.release()


@pytest.mark.parametrize("kind", [list, np.array, pa.array])
def test_many_jobs_that_nobody_holds_are_cancelled_on_request(
    daemon: StartDaemon, kind: Callable[[list[str]], Any]
) -> None:
    daemon("demo")
    keys = ["a", "b", "pending", "none"]
    with client() as c:
        c.create_group("mailers", ["orders"])
        c.add_many([("a", 0), ("b", 0), ("pending", 3600)], topic="orders")
        eventually(lambda: c.group("mailers").waiting == 2)
        fired = [CancelResult.FIRED] * 2
        assert c.cancel_many(kind(keys[:2])) == fired
        assert c.group("mailers").waiting == 2
        with pytest.raises(InvalidArgument):
            c.cancel_many(kind(keys), delivered=1)  # type: ignore[call-overload]
        found = c.cancel_many(kind(keys), delivered=True)
        assert found == [CancelResult.CANCELLED] * 3 + [CancelResult.UNKNOWN]
        assert c.group("mailers").waiting == 0


def test_tasks_cancel_many_jobs_that_nobody_holds(daemon: StartDaemon) -> None:
    daemon("demo")

    async def cancelled() -> list[CancelResult]:
        async with AsyncClient("demo", namespace="shop", timeout=PATIENCE_S) as c:
            return list(await c.cancel_many(["k"], delivered=True))

    with client() as c:
        c.create_group("mailers", ["orders"])
        c.add("k", 0, topic="orders")
        eventually(lambda: c.group("mailers").waiting == 1)
        assert asyncio.run(cancelled()) == [CancelResult.CANCELLED]
        assert c.group("mailers").waiting == 0


def test_a_job_that_nobody_holds_is_cancelled_on_request(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c:
        c.create_group("mailers", ["orders"])
        c.add("k", 0, topic="orders")
        eventually(lambda: c.group("mailers").waiting == 1)
        assert c.cancel("k") is CancelResult.FIRED
        assert c.group("mailers").waiting == 1
        assert c.cancel("k", delivered=True) is CancelResult.CANCELLED
        assert c.group("mailers").waiting == 0
        with consumer() as jobs:
            c.add("k", 0, topic="orders")
            job = taken(jobs)
            assert c.cancel("k", delivered=True) is CancelResult.LEASED
            job.ack()


def test_a_change_of_on_dead_releases_blocked_keys(daemon: StartDaemon, daemon_dir: Path) -> None:
    one = daemon("demo", "--wal-dir", str(daemon_dir / "wal"))
    with client() as c, consumer(ordered=True, on_dead="block") as jobs:
        c.create_group("plain", ["others"])
        with pytest.raises(InvalidArgument, match="ordered=True"):
            c.change_group("plain", on_dead="block")
        for n in range(2):
            c.add(f"k{n}", 0, topic="orders", order_key="ann")
            eventually(lambda key=f"k{n}": c.get(key) is None)  # type: ignore[misc]
        taken(jobs).reject("bad")
        eventually(lambda: c.group("mailers").dead == 1)
        assert jobs.get(0) is None
        assert c.change_group("mailers", on_dead="skip").settings.on_dead == "skip"
        job = taken(jobs)
        assert job.key == "k1"
        job.ack()
    one.kill()
    one.start()
    with client() as c:
        assert c.group("mailers").settings.on_dead == "skip"


def test_a_paused_consumer_group_leases_nothing(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer() as jobs:
        c.pause_group("mailers")
        c.add("k", 0, topic="orders")
        eventually(lambda: c.group("mailers").waiting == 1)
        assert jobs.get(0) is None
        c.resume_group("mailers")
        taken(jobs).ack()


def test_a_deleted_consumer_group_is_missing(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c:
        c.create_group("mailers", ["orders"])
        assert [one.name for one in c.groups()] == ["mailers"]
        c.delete_group("mailers")
        assert c.groups() == []
        with pytest.raises(GroupMissing):
            c.group("mailers")
        with pytest.raises(GroupMissing):
            consumer(create=False)


def test_a_deleted_consumer_group_ends_its_consumers(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer() as jobs:
        c.add("k", 0, topic="orders")
        held = taken(jobs)
        c.delete_group("mailers")
        with pytest.raises(GroupMissing, match="'mailers' in namespace 'shop'"):
            jobs.get(PATIENCE_S)
        assert held.lost
        with pytest.raises(LeaseLost):
            held.ack()


@contextmanager
def reading_nothing(jobs: Consumer) -> Iterator[None]:
    """Stop the thread of a consumer, which then reads no message."""
    stopped, over = threading.Event(), threading.Event()

    def wait() -> None:
        stopped.set()
        over.wait()

    jobs._line._engine.put(wait)
    assert stopped.wait(PATIENCE_S)
    try:
        yield
    finally:
        over.set()


def test_a_consumer_joins_the_group_that_replaces_a_deleted_one(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer() as jobs:
        c.add("old", 0, topic="orders")
        held = taken(jobs)
        with reading_nothing(jobs):
            c.delete_group("mailers")
            c.create_group("mailers", ["orders"])
            c.add("new", 0, topic="orders")
            eventually(lambda: c.group("mailers").waiting == 1)
        job = taken(jobs)
        assert (job.key, job.attempt) == ("new", 1)
        job.ack()
        assert held.lost
        info = c.group("mailers")
        assert (info.members, info.waiting, info.acked) == (1, 0, 1)


def test_a_group_can_begin_with_the_replay_buffer(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c:
        c.add("k", 0, topic="orders")
        eventually(lambda: c.get("k") is None)
        with consumer(group="late") as late, consumer(group="early", start="earliest") as early:
            taken(early).ack()
            assert late.get(0) is None


# ---- asyncio -----------------------------------------------------------------------------------


def test_tasks_share_the_jobs_of_a_consumer(daemon: StartDaemon) -> None:
    daemon("demo")

    async def main() -> list[Any]:
        keys = []
        async with AsyncConsumer(
            "demo", namespace="shop", group="mailers", topics=["orders"], timeout=PATIENCE_S
        ) as jobs:

            async def handle(job: Any) -> None:
                await asyncio.sleep(0)
                keys.append(job.key)
                if len(keys) == 300:
                    jobs.stop()

            with client() as c:
                c.add_many([(n, 0.0) for n in map(str, range(300))], topic="orders")
            await asyncio.wait_for(jobs.run(handle, concurrency=16), PATIENCE_S)
        return keys

    assert sorted(asyncio.run(main())) == sorted(map(str, range(300)))
    with client() as c:
        assert c.group("mailers").acked == 300


# ---- partitions --------------------------------------------------------------------------------

SMALL = ("--capacity", "4096", "--payload-memory", "1MiB")


def test_a_consumer_takes_jobs_of_all_partitions(daemon: StartDaemon) -> None:
    daemon("demo", "--shards", "2", *SMALL)
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("shop", 4)
    with client() as c, consumer(max_in_flight=8) as jobs:
        c.add_many([(f"k{n}", 0.0) for n in range(200)], topic="orders")
        keys: list[Any] = []
        while len(keys) < 200:
            job = taken(jobs)
            assert jobs.in_flight <= 8
            keys.append(job.key)
            job.ack()
        assert sorted(keys) == sorted(f"k{n}" for n in range(200))
        info = c.group("mailers")
        assert (info.acked, info.members) == (200, 4)
    with pytest.raises(Partitioned, match="max_in_flight of at least 4"):
        consumer(max_in_flight=3)


def test_a_refused_group_exists_in_no_partition(daemon: StartDaemon) -> None:
    daemon("demo", "--shards", "2", *SMALL, "--jobs", "1000")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("shop", 4)
    refused = set()
    for number in range(20):
        with Client("demo", namespace=f"n{number}", timeout=PATIENCE_S) as other, client() as c:
            other.create_group("large", ["orders"], max_backlog=1000)
            with pytest.raises(GroupRefused, match="no consumer group has reserved"):
                c.create_group("mailers", ["orders"], max_backlog=500)
            assert c.groups() == []
            refused.add(other._core.connections[0].daemon)
            other.delete_group("large")
        if len(refused) == 2:
            break
    assert len(refused) == 2
    with client() as c:
        assert c.create_group("mailers", ["orders"], max_backlog=500).name == "mailers"


def test_a_rate_counts_the_jobs_of_all_members(daemon: StartDaemon) -> None:
    daemon("demo", "--clock", "virtual")
    settings = {"rate": 4, "lease": 10**6, "max_lease": 10**6}
    with (
        client() as c, consumer(**settings) as one, consumer(**settings) as other,
        Admin("demo", timeout=PATIENCE_S) as admin,
    ):  # fmt: skip
        c.add_many([(f"k{n}", 0, "orders") for n in range(30)])
        found: list[Job] = []
        for second in range(6):
            admin.advance(1 + second * 10**9)
            eventually(lambda: c.group("mailers").waiting == 30 - 4 * (second + 1))  # noqa: B023
            while len(found) < 4 * (second + 1):
                found += [job for jobs in (one, other) if (job := jobs.get(0)) is not None]
            admin.ping()
            assert c.group("mailers").waiting == 30 - len(found), "no time has passed"
        assert sorted(Counter(job.key for job in found).values()) == [1] * 24
        c.change_group("mailers", rate=0)
        eventually(lambda: c.group("mailers").waiting == 0)
        for jobs in (one, other):
            jobs.close(drain=0)  # the jobs stay open


# ---- interrupts, fork, the end -----------------------------------------------------------------


@pytest.mark.parametrize(
    "ack",
    [
        lambda _, job: job.ack(),
        lambda jobs, job: jobs.ack_many([job]),
        lambda jobs, job: jobs.ack_many([job], wait=False),
    ],
    ids=["ack", "ack_many", "ack_many without wait"],
)
def test_an_interrupt_loses_no_job(
    daemon: StartDaemon, ack: Callable[[Consumer, Job], None]
) -> None:
    daemon("demo")
    with client() as c, consumer(backoff=0) as jobs:

        def call(number: int) -> str:
            job = taken(jobs)
            ack(jobs, job)
            return str(job.key)

        for number, _, error in interrupted(call, [lambda n: c.add(f"k{n}", 0, topic="orders")]):
            if error is not None:
                error.__traceback__ = None  # the traceback refers to the job
            while c.group("mailers").acked <= number:
                if (job := jobs.get(0.01)) is not None:
                    job.ack()
        assert jobs.in_flight == 0


def test_a_child_process_may_not_use_a_consumer(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as c, consumer() as jobs:
        c.add("k", 0, topic="orders")
        job = taken(jobs)
        if (child := os.fork()) == 0:
            refused = 0
            for call in (jobs.get, job.ack, jobs.close):
                try:
                    call()
                except ForkedProcess:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        job.ack()
        assert c.group("mailers").acked == 1


class Worker:
    """A process that takes jobs."""

    def __init__(self, directory: Path, lease_s: float) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(job_worker.__file__).parent)}
        self.path = directory / f"worker{time.monotonic_ns()}"
        with self.path.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, job_worker.__file__, "demo", "mailers", str(lease_s)],
                stdin=subprocess.DEVNULL, stdout=out, env=environment,
            )  # fmt: skip
        self.killed_ns = 2**63

    def ready(self) -> bool:
        return self.lines()[:1] == ["ready"]

    def lines(self) -> list[str]:
        """Return the lines that the process has written completely."""
        return self.path.read_text().split("\n")[:-1]

    def kill(self) -> None:
        self.killed_ns = boot_ns()
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()


@pytest.fixture
def workers(daemon_dir: Path) -> Iterator[list[Worker]]:
    found: list[Worker] = []
    yield found
    for one in found:
        one.close()


def begin(workers: list[Worker], directory: Path, lease_s: float = 5.0) -> Worker:
    workers.append(Worker(directory, lease_s))
    eventually(workers[-1].ready)
    return workers[-1]


def test_a_process_ends_after_sigterm_without_failed_attempts(
    daemon: StartDaemon, daemon_dir: Path, workers: list[Worker]
) -> None:
    daemon("demo")
    with client() as c:
        c.create_group("mailers", ["orders"])
        worker = begin(workers, daemon_dir)
        c.add_many([(f"k{n}", 0.0) for n in range(500)], topic="orders")
        eventually(lambda: c.group("mailers").acked > 50)
        worker.stop()
        info = c.group("mailers")
        assert (info.leased, info.retried, info.delayed) == (0, 0, 0)
        assert handled(c) + info.waiting == 500


def test_a_killed_process_loses_no_job(
    daemon: StartDaemon, daemon_dir: Path, workers: list[Worker]
) -> None:
    """Repeat the trial of 2,000 jobs with one kill: no job is lost, and only those run twice that
    the killed process held."""
    daemon("demo")
    with client() as c:
        c.create_group("mailers", ["orders"], backoff=0)
        first, _ = begin(workers, daemon_dir), begin(workers, daemon_dir)
        c.add_many([(f"k{n}", 0.0005 * n) for n in range(2000)], topic="orders")
        eventually(lambda: len(first.lines()) > 100)
        first.kill()
        begin(workers, daemon_dir)
        eventually(lambda: handled(c) == 2000)
        check_runs(workers, 2000, c)


@pytest.mark.costly("processes begin and are killed for seconds")
@pytest.mark.parametrize("kills", [12, wide(int(os.environ.get("JOB_KILLS", "150")))])
def test_kills_of_consumers_and_daemon_lose_no_job(
    daemon: StartDaemon, daemon_dir: Path, workers: list[Worker], kills: int
) -> None:
    demo, rng = daemon("demo", "--wal-dir", str(daemon_dir / "wal")), random.Random(kills)
    count = 0
    with client() as c, ExitStack() as stack:
        c.create_group("mailers", ["orders"], backoff=0, max_attempts=1000, max_backlog=16_000,
                       max_dead=8_000)  # fmt: skip
        adder = stack.enter_context(closing(client()))
        for _ in range(3):
            begin(workers, daemon_dir)
        alive = list(workers)
        for number in range(kills):
            rows = [(f"k{count + n}", rng.random() * 0.2) for n in range(200)]
            assert adder.add_many(rows, topic="orders").ok
            count += 200
            time.sleep(rng.random() * 0.1)
            if number % 4 == 3:
                demo.kill()
                demo.start()
            else:
                victim = alive.pop(rng.randrange(3))
                victim.kill()
                alive.append(begin(workers, daemon_dir))
        eventually(lambda: handled(c) >= count, 4 * PATIENCE_S)
        info = c.group("mailers")
        assert (info.acked + info.dead, info.waiting, info.leased) == (count, 0, 0)
        check_runs(workers, count, c)


def handled(client: Client) -> int:
    """Return the number of jobs that were acknowledged or rejected."""
    info = client.group("mailers")
    return info.acked + info.dead


def check_runs(workers: list[Worker], count: int, client: Client) -> None:
    """Check that each job ran, that no two live processes had it, that an acknowledged job did not
    run again, that only the end of a process is followed by another attempt, and that the rejected
    jobs are the dead letters, with the error of their last attempt."""
    dead = {letter.ticket: letter for letter in client.dead_letters("mailers")}
    runs: dict[int, list[tuple[int, int, Worker]]] = defaultdict(list)
    acked: dict[int, int] = {}
    for worker in workers:
        for what, ticket, attempt, at in (line.split() for line in worker.lines()[1:]):
            if what == "start":
                runs[int(ticket)].append((int(attempt), int(at), worker))
            elif what == "acked":
                assert int(ticket) not in acked, f"job {ticket} was acknowledged twice"
                acked[int(ticket)] = int(attempt)
    assert len(runs) == count
    assert dead.keys() == {job for job in runs if job_worker.is_rejected(job)}
    for job, letter in dead.items():
        last = max(attempt for attempt, _, _ in runs[job])
        assert (letter.reason, letter.error) == (JobReason.REJECTED, f"attempt {last}")
    for job, found in runs.items():
        found.sort(key=lambda run: run[1])
        assert acked.get(job, found[-1][0]) == found[-1][0], f"job {job} ran after its ack"
        for (first, _, worker), (later, at_ns, _) in itertools.pairwise(found):
            assert later > first, f"job {job} ran twice in attempt {first}"
            assert worker.killed_ns < at_ns, f"job {job} ran in two live processes"
        if job not in acked and job not in dead:  # the answer came after the kill
            assert found[-1][2].killed_ns < 2**63

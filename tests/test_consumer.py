"""Consumers with a model of the daemon: what happens when leases end, and when answers are lost."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from group_daemon import GroupDaemon, group_daemon
from real_daemon import boot_ns, eventually

from purgatoryd.clients import (
    AsyncConsumer,
    AsyncJob,
    Busy,
    CallTimeout,
    Cause,
    Client,
    Closed,
    Consumer,
    Denied,
    FakeConsumer,
    GroupMismatch,
    GroupMissing,
    InvalidArgument,
    InvalidName,
    Job,
    JobReason,
    LeaseLost,
    Occurrence,
    Verdict,
    leases,
)
from purgatoryd.clients.leases import Member, error_text, share_credits
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.group_wire import JOB_INFO
from purgatoryd.shm_layout.layout import KeyType, Message, Op, Status

pytestmark = pytest.mark.tier("check")

ACKED, LOST = int(Status.DONE), int(Status.LEASE_LOST)


@pytest.fixture
def model(daemon_dir: Path) -> Iterator[GroupDaemon]:
    with group_daemon("demo") as daemon:
        yield daemon


def consumer(**settings: Any) -> Consumer:
    given = {"namespace": "shop", "group": "mailers", "topics": ["orders"], "transport": "zmq"}
    return Consumer("demo", **{**given, **settings})


def async_consumer(**settings: Any) -> AsyncConsumer:
    given = {"namespace": "shop", "group": "mailers", "topics": ["orders"], "transport": "zmq"}
    return AsyncConsumer("demo", **{**given, **settings})


def taken(jobs: Consumer) -> Job:
    job = jobs.get(30)
    assert job is not None
    return job


async def next_of(jobs: AsyncConsumer) -> AsyncJob:
    job = await jobs.get(30)
    assert job is not None
    return job


def ops(model: GroupDaemon) -> list[tuple[str, int]]:
    """Return op and ticket of each answer except extensions."""
    return [(op, ticket) for op, ticket, *_ in model.answers if op != "JOB_EXTEND"]


# ---- answers -----------------------------------------------------------------------------------


def test_each_answer_reaches_the_daemon(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b", "c", "d", payload=b"p")
        ack, nack, release, reject = (taken(jobs) for _ in range(4))
        assert (ack.key, ack.payload, ack.topic, ack.group) == ("a", b"p", "orders", "mailers")
        assert (ack.ticket, ack.attempt) == (1, 1)
        ack.ack()
        nack.nack("full", delay=5)
        reject.reject(ValueError("bad"))
        release.release()
        again = taken(jobs)
        assert (again.key, again.attempt) == ("c", 1)
        assert model.delays == [5_000_000_000, 0]
        assert model.errors == [b"full", b"ValueError: bad"]
        again.nack()
        assert model.delays[-1] == -1
        assert model.states() == ["acked", "delayed", "delayed", "dead"]


def test_a_with_block_answers_by_its_end(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b", "c", "d")
        with taken(jobs):
            pass
        with taken(jobs):
            raise ValueError("no space")
        for error in (KeyboardInterrupt, SystemExit):
            with pytest.raises(error), taken(jobs):
                raise error
        assert model.errors == [b"ValueError: no space"]
        assert ops(model)[:2] == [("JOB_ACK", 1), ("JOB_NACK", 2)]
        assert [op for op, _ in ops(model)[2:]] == ["JOB_RELEASE", "JOB_RELEASE"]


def test_a_with_block_keeps_an_answer_of_its_body(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b")
        with taken(jobs) as job:
            job.reject("bad")
        with taken(jobs) as job:
            job.ack()
            raise ValueError("too late")
        assert ops(model) == [("JOB_REJECT", 1), ("JOB_ACK", 2)]


def test_an_answer_can_be_repeated_but_not_changed(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a")
        job = taken(jobs)
        job.ack()
        job.ack()
        with pytest.raises(InvalidArgument, match="already has the answer 'ack'"):
            job.nack()
        assert ops(model) == [("JOB_ACK", 1)]


def test_a_refused_answer_can_be_given_again(model: GroupDaemon) -> None:
    model.refuse_with[Op.JOB_ACK] = Status.BUSY
    with consumer() as jobs:
        model.fire("a")
        job = taken(jobs)
        with pytest.raises(Busy):
            job.ack(timeout=1)
        model.refuse_with.clear()
        job.ack()
        assert model.states() == ["acked"]


def test_many_jobs_are_acknowledged_at_once(model: GroupDaemon) -> None:
    with consumer(max_in_flight=500) as jobs:
        model.fire(*map(str, range(500)))
        got: list[Job] = []
        while len(got) < 500:
            got += jobs.get_many(500 - len(got), 30)
        assert jobs.get_many(5, 0) == []
        jobs.ack_many(got)
        assert set(model.states()) == {"acked"}
        assert jobs.in_flight == 0


def test_one_lost_lease_does_not_stop_the_answers_of_others(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b", "c")
        got = [taken(jobs) for _ in range(3)]
        model.do(lambda: model._fail(model.groups["mailers"], model.groups["mailers"].jobs[2]))
        with pytest.raises(LeaseLost) as raised:
            jobs.ack_many(got)
        assert (raised.value.key, raised.value.ticket, raised.value.attempt) == ("b", 2, 1)
        assert [job.lost for job in got] == [False, True, False]
        assert model.states()[::2] == ["acked", "acked"]


def test_each_of_many_jobs_gets_one_answer(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b", "c", "d")
        a, b, c, d = (taken(jobs) for _ in range(4))
        b.ack()
        jobs.ack_many([a, b, a, c])
        d.nack()
        with pytest.raises(InvalidArgument, match="already has the answer 'nack'"):
            jobs.ack_many([a, d, c])
        answers = [("JOB_ACK", 2), ("JOB_ACK", 1), ("JOB_ACK", 3), ("JOB_NACK", 4)]
        assert ops(model) == answers
        assert jobs.in_flight == 0


def test_many_refused_answers_can_be_given_again(model: GroupDaemon) -> None:
    model.refuse_with[Op.JOB_ACK] = Status.BUSY
    with consumer() as jobs:
        model.fire("a", "b", "c")
        got = [taken(jobs) for _ in range(3)]
        with pytest.raises(Busy):
            jobs.ack_many(got, timeout=1)
        assert not any(job.answered for job in got)
        model.refuse_with.clear()
        jobs.ack_many(got)
        assert model.states() == ["acked"] * 3


def test_many_answers_of_which_the_daemon_refuses_all_raise_the_first(model: GroupDaemon) -> None:
    model.refuse_with[Op.JOB_ACK] = Status.DENIED
    with consumer() as jobs:
        model.fire("a", "b")
        got = [taken(jobs) for _ in range(2)]
        with pytest.raises(Denied) as raised:
            jobs.ack_many(got)
        assert raised.value.key == "a"
        assert jobs.in_flight == 2
        jobs.close(drain=0)


def test_many_answers_without_reply_are_sent_again(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b", "c")
        got = [taken(jobs) for _ in range(3)]
        model.mute = True
        with pytest.raises(CallTimeout):
            jobs.ack_many(got, timeout=0.1)
        assert all(job.answered for job in got)
        model.mute = False
        model.restart()
        got[1].ack()  # waits for the batch that is in flight
        jobs.ack_many(got)
        assert ops(model) == [("JOB_ACK", 1), ("JOB_ACK", 2), ("JOB_ACK", 3)]


def test_many_answers_are_lost_with_the_session(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b")
        got = [taken(jobs) for _ in range(2)]
        model.mute = True
        errors: list[LeaseLost] = []

        def acknowledge() -> None:
            try:
                jobs.ack_many(got)
            except LeaseLost as error:
                errors.append(error)

        done = threading.Thread(target=acknowledge)
        done.start()
        eventually(lambda: got[0].answered)
        model.restart(sessions=False)
        model.mute = False
        done.join(30)
        assert not done.is_alive()
        assert [error.key for error in errors] == ["a"]
        assert [job.lost for job in got] == [True, True]
        again = [taken(jobs), taken(jobs)]
        jobs.ack_many(again)
        assert set(model.states()) == {"acked"}


def test_many_acknowledgements_need_no_wait(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b", "c")
        got = [taken(jobs) for _ in range(3)]
        model.mute = True
        jobs.ack_many(got, wait=False)
        assert model.states() == ["leased"] * 3
        model.mute = False
        model.restart()
    assert model.states() == ["acked"] * 3  # close() has waited
    assert [op for op, _ in ops(model)] == ["JOB_ACK"] * 3


def test_errors_of_acknowledgements_without_a_wait(
    model: GroupDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = consumer()
    model.fire("a", "b")
    got = [taken(jobs), taken(jobs)]
    model.do(lambda: model._fail(model.groups["mailers"], model.groups["mailers"].jobs[1]))
    jobs.ack_many(got[:1], wait=False)
    eventually(lambda: got[0].lost)
    assert "the lease of job 'a'" in caplog.text
    model.refuse_with[Op.JOB_ACK] = Status.DENIED
    jobs.ack_many(got[1:], wait=False)
    with pytest.raises(Denied):
        jobs.close()
    assert ("JOB_NACK", 2) in ops(model)


def test_ack_many_without_a_wait_refuses_bad_arguments(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b")
        a, b = taken(jobs), taken(jobs)
        b.nack()
        for wrong, arguments, match in [
            ([a, b], {}, "job 'b' already has another answer"),
            ([a], {"timeout": 1.0}, "timeout needs wait=True"),
            ([a, *FakeConsumer(["c"])], {}, "must come from this consumer"),
        ]:
            with pytest.raises(InvalidArgument, match=match):
                jobs.ack_many(wrong, wait=False, **arguments)
        with pytest.raises(InvalidArgument, match="wait must be bool"):
            jobs.ack_many([a], wait=None)  # type: ignore[arg-type]
        a.ack()
        assert ops(model) == [("JOB_NACK", 2), ("JOB_ACK", 1)]


def test_only_jobs_of_the_consumer_are_acknowledged(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a")
        job = taken(jobs)
        with pytest.raises(InvalidArgument, match="a job must be Job, not str"):
            jobs.ack_many([job, "b"])  # type: ignore[list-item]
        with pytest.raises(InvalidArgument, match="must come from this consumer"):
            jobs.ack_many([job, *FakeConsumer(["b"])])
        assert not job.answered
        jobs.ack_many([])
        job.ack()
        assert ops(model) == [("JOB_ACK", 1)]


# ---- leases ------------------------------------------------------------------------------------


def test_a_durable_consumer_joins_once_although_the_wal_has_stopped(model: GroupDaemon) -> None:
    model.wal_stopped = True
    with consumer(durable=True) as jobs:
        model.fire("a")
        assert taken(jobs).key == "a"
        assert len(model.joins) == 1


def test_a_lease_is_extended_while_the_process_lives(model: GroupDaemon) -> None:
    with consumer(lease=0.2) as jobs:
        model.fire("a", "b")
        job = taken(jobs)
        eventually(lambda: model.extensions.count(1) >= 4 and model.extensions.count(2) >= 4)
        assert not job.lost
        job.ack()
        job.ack()
        assert {op for op, *_ in model.answers} == {"JOB_EXTEND", "JOB_ACK"}


def test_a_lease_ends_at_max_lease(model: GroupDaemon) -> None:
    with consumer(lease=0.1, max_lease=0.3) as jobs:
        model.fire("a")
        job = taken(jobs)
        eventually(lambda: job.lost)
        with pytest.raises(LeaseLost):
            job.ack()
        with pytest.raises(LeaseLost):
            job.extend(5)
        assert ("JOB_ACK", 1) not in ops(model)


def change_max_lease(model: GroupDaemon, max_lease_ns: int) -> None:
    group = model.groups["mailers"]
    group.settings = group.settings._replace(max_lease_ns=max_lease_ns)


def test_a_raised_max_lease_holds_for_leased_jobs(model: GroupDaemon) -> None:
    with consumer(lease=60, max_lease=1.5) as jobs:
        model.fire("a")
        job = taken(jobs)
        ends_ns = model.groups["mailers"].jobs[1].ends_ns
        change_max_lease(model, 60_000_000_000)
        eventually(lambda: boot_ns() > ends_ns)
        assert not job.lost
        job.ack()


def test_a_lowered_max_lease_ends_leased_jobs(model: GroupDaemon) -> None:
    with consumer(lease=1.5) as jobs:
        model.fire("a")
        job, held = taken(jobs), model.groups["mailers"].jobs[1]
        change_max_lease(model, 1)
        ends_ns = held.ends_ns
        eventually(lambda: boot_ns() > ends_ns)
        assert held.ends_ns == ends_ns
        assert job.lost
        assert 1 in model.extensions


def test_an_unanswered_extension_does_not_hide_the_end_of_a_limited_lease(
    model: GroupDaemon,
) -> None:
    with consumer(lease=60, max_lease=2) as jobs:
        model.fire("a")
        job = taken(jobs)
        eventually(lambda: bool(model.extensions))
        eventually(lambda: job._lease.limited)
        model.mute = True
        ends_ns = model.groups["mailers"].jobs[1].ends_ns
        eventually(lambda: boot_ns() > ends_ns)
        assert job.lost
        model.mute = False


def test_a_job_that_waits_too_long_for_a_caller_is_released(model: GroupDaemon) -> None:
    with consumer(lease=0.1, max_lease=0.6):
        model.fire("a")
        eventually(lambda: ("JOB_RELEASE", 1) in ops(model))
        assert model.groups["mailers"].jobs[1].failed == 0


def test_an_answer_after_the_lease_is_lost(
    model: GroupDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    with consumer() as jobs:
        model.fire("a", "b")
        job, other = taken(jobs), taken(jobs)
        model.expire()
        with job:
            pass
        eventually(lambda: job.lost)
        assert "the lease of job 'a'" in caplog.text
        with pytest.raises(LeaseLost):
            job.ack()
        with other:
            raise ValueError("the error of the body is logged, not the lost lease")
        assert [(op, status) for op, _, _, status in model.answers] == [
            ("JOB_ACK", LOST), ("JOB_NACK", LOST),
        ]  # fmt: skip


def test_an_extension_after_the_lease_is_lost(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a")
        job = taken(jobs)
        job.extend(60)
        assert model.extensions == [1]
        model.expire()
        with pytest.raises(LeaseLost):
            job.extend(60)
        assert job.lost


def test_a_collected_job_is_given_back(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a")
        job = taken(jobs)
        del job
        gc.collect()
        eventually(lambda: ops(model) == [("JOB_NACK", 1)])
        assert model.errors == [b"the job was dropped without an answer"]


def test_a_job_that_no_caller_got_is_released_when_it_is_collected(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a")
        job = taken(jobs)
        job._lease.handed = False  # an interrupt came before get() returned
        del job
        gc.collect()
        again = taken(jobs)
        assert again.attempt == 1
        assert ops(model) == [("JOB_RELEASE", 1)]
        again.ack()


# ---- restarts ----------------------------------------------------------------------------------


def test_a_member_joins_again_after_a_restart_and_keeps_its_jobs(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b")
        first = taken(jobs)
        model.restart()
        eventually(lambda: len(model.joins) >= 2)
        second = taken(jobs)
        assert (first.key, second.key) == ("a", "b")
        first.ack()
        second.ack()
        model.fire("c")
        taken(jobs).ack()
        assert jobs.get(0) is None
        assert [status for *_, status in model.answers] == [ACKED] * 3


def test_a_job_that_comes_twice_is_handed_out_once(model: GroupDaemon) -> None:
    model.doubled = True
    with consumer() as jobs:
        for key in "abc":
            model.fire(key)
            job = taken(jobs)
            job.ack()
            assert job.key == key
        assert jobs.get(0) is None
        assert ops(model) == [("JOB_ACK", 1), ("JOB_ACK", 2), ("JOB_ACK", 3)]


def test_a_member_remembers_the_jobs_that_it_has_answered(
    model: GroupDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "ENDED_LEAST", 2)
    model.doubled = True
    with consumer(max_in_flight=3) as jobs:
        for first in range(0, 24, 3):
            model.fire(*(str(n) for n in range(first, first + 3)))
            got = [taken(jobs) for _ in range(3)]
            jobs.ack_many(got)
            assert jobs.get(0) is None
        assert len(ops(model)) == 24
        (member,) = jobs._line.leases.members
        assert 6 <= len(member._ended) + len(member._older) <= 18


def test_all_leases_are_lost_with_the_session(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b")
        job = taken(jobs)
        model.restart(sessions=False)
        eventually(lambda: job.lost)
        with pytest.raises(LeaseLost):
            job.ack()
        again = [taken(jobs), taken(jobs)]
        assert sorted((one.key, one.attempt) for one in again) == [("a", 2), ("b", 2)]
        jobs.ack_many(again)
        assert set(model.states()) == {"acked"}


def test_an_answer_without_reply_is_sent_again(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a")
        job = taken(jobs)
        model.mute = True
        done = threading.Thread(target=job.ack)
        done.start()
        eventually(lambda: job.answered)
        model.mute = False
        model.restart()
        done.join(30)
        assert not done.is_alive()
        assert ops(model) == [("JOB_ACK", 1)]


def test_a_deleted_consumer_group_ends_its_consumers(model: GroupDaemon) -> None:
    with consumer() as jobs, Client("demo", namespace="shop", transport="zmq") as client:
        client.delete_group("mailers")
        with pytest.raises(GroupMissing, match="'mailers' in namespace 'shop'"):
            jobs.get(30)


# ---- the end -----------------------------------------------------------------------------------


def test_a_closed_consumer_gives_its_jobs_back(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b")
        job = taken(jobs)
        jobs.close(drain=0.0)
        with pytest.raises(Closed):
            job.ack()
        with pytest.raises(Closed):
            jobs.get(0)
    assert model.states() == ["waiting", "waiting"]
    assert [one.failed for one in model.groups["mailers"].jobs.values()] == [0, 0]
    assert model.joins[-1][1] == 0


def test_close_waits_for_running_handlers(model: GroupDaemon) -> None:
    jobs, running, goes_on = consumer(), threading.Event(), threading.Event()

    def handle(job: Job) -> None:
        running.set()
        assert goes_on.wait(30)

    worker = threading.Thread(target=jobs.run, args=(handle,))
    worker.start()
    model.fire("a", "b", "c")
    assert running.wait(30)
    closer = threading.Thread(target=jobs.close)
    closer.start()
    eventually(lambda: model.states() == ["leased", "waiting", "waiting"])
    assert closer.is_alive()
    goes_on.set()
    closer.join(30)
    worker.join(30)
    assert not closer.is_alive()
    assert not worker.is_alive()
    assert model.states() == ["acked", "waiting", "waiting"]


def test_stop_ends_a_loop(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b", "c")
        keys = []
        for job in jobs:
            with job:
                keys.append(job.key)
                jobs.stop()
        assert keys == ["a"]
        eventually(lambda: model.states() == ["acked", "waiting", "waiting"])
        assert jobs.get() is None


def test_handlers_run_in_threads(model: GroupDaemon) -> None:
    barrier = threading.Barrier(4, timeout=30)
    failed: list[Any] = []
    with consumer() as jobs:

        def handle(job: Job) -> None:
            if job.attempt == 1:
                barrier.wait()
            if job.key == "b" and not failed:
                failed.append(job.key)
                raise ValueError("once")
            if job.attempt == 2:
                jobs.stop()

        worker = threading.Thread(target=jobs.run, args=(handle,), kwargs={"concurrency": 4})
        worker.start()
        model.fire("a", "b", "c", "d")
        eventually(lambda: model.states().count("acked") == 3)
        model.retry()
        worker.join(30)
        assert not worker.is_alive()
        assert set(model.states()) == {"acked"}


def test_the_next_handler_does_not_wait_for_an_acknowledgement(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a", "b", "c")
        eventually(lambda: jobs.in_flight == 3)
        model.mute = True
        seen: list[Any] = []
        worker = threading.Thread(target=jobs.run, args=(lambda job: seen.append(job.key),))
        worker.start()
        eventually(lambda: seen == ["a", "b", "c"])
        jobs.stop()
        worker.join(0.1)
        assert worker.is_alive()
        model.mute = False  # first, because the restart makes the client send its batches again
        model.restart()
        worker.join(30)
        assert not worker.is_alive()
        assert jobs.in_flight == 0
        assert sorted(ops(model)) == [("JOB_ACK", 1), ("JOB_ACK", 2), ("JOB_ACK", 3)]


def test_handlers_continue_after_a_lost_lease(
    model: GroupDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    with consumer() as jobs:

        def handle(job: Job) -> None:
            if job.attempt == 1 and job.key == "b":
                model.expire()
            if job.key == "c":
                jobs.stop()

        model.fire("b", "c")
        jobs.run(handle)
        assert "lease" in caplog.text
        assert ("JOB_ACK", 2) in ops(model)


def test_a_refused_acknowledgement_ends_the_handlers(model: GroupDaemon) -> None:
    model.refuse_with[Op.JOB_ACK] = Status.DENIED
    with consumer() as jobs:
        model.fire("a", "b", "c")
        with pytest.raises(Denied):
            jobs.run(lambda _: None, concurrency=2)
        with pytest.raises(Denied):
            jobs.get(30)
        eventually(lambda: jobs.in_flight == 0)
        assert set(model.states()) <= {"delayed", "waiting"}


def test_close_raises_the_refusal_of_the_last_block(model: GroupDaemon) -> None:
    model.refuse_with[Op.JOB_ACK] = Status.DENIED
    jobs = consumer()
    model.fire("a")
    with taken(jobs):
        pass
    with pytest.raises(Denied):
        jobs.close()
    jobs.close()
    assert ops(model) == [("JOB_NACK", 1)]


def test_close_waits_for_the_acknowledgements_of_blocks(model: GroupDaemon) -> None:
    with consumer(max_in_flight=200) as jobs:
        model.fire(*map(str, range(100)))
        for _ in range(100):
            with taken(jobs):
                pass
        jobs.close(drain=0.0)
    assert model.states() == ["acked"] * 100
    assert len(ops(model)) == 100


def test_an_interrupted_block_is_acknowledged_by_close(model: GroupDaemon) -> None:
    with consumer() as jobs:
        model.fire("a")
        jobs._line.desk._jobs.append(taken(jobs))  # the interrupt came before the request
        jobs.close()
    assert model.states() == ["acked"]


# ---- consumer groups ---------------------------------------------------------------------------


def test_another_setting_is_named(model: GroupDaemon) -> None:
    consumer(max_attempts=3, max_lease=60).close()
    consumer().close()
    consumer(max_attempts=3).close()
    with pytest.raises(GroupMismatch) as raised:
        consumer(max_attempts=4, max_lease=90, topics=["orders", "mail"])
    assert raised.value.differs == (
        ("max_attempts", 3, 4), ("max_lease", 60.0, 90.0),
        ("topics", ("orders",), ("mail", "orders")),
    )  # fmt: skip
    assert "max_attempts is 3, not 4" in str(raised.value)


def test_a_missing_consumer_group_is_not_created(model: GroupDaemon) -> None:
    with pytest.raises(GroupMissing):
        consumer(create=False)
    consumer().close()
    consumer(create=False, topics=()).close()
    assert list(model.groups) == ["mailers"]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"group": ""}, InvalidName), ({"group": "g" * 64}, InvalidName),
        ({"topics": ()}, InvalidArgument), ({"topics": "orders"}, InvalidArgument),
        ({"lease": 0}, InvalidArgument), ({"lease": 1e9}, InvalidArgument),
        ({"max_in_flight": 0}, InvalidArgument), ({"start": "now"}, InvalidArgument),
        ({"full": "drop"}, InvalidArgument), ({"on_dead": 1}, InvalidArgument),
        ({"ordered": 1}, InvalidArgument), ({"on_dead": "block"}, InvalidArgument),
        ({"max_attempts": 0}, InvalidArgument),
        ({"backoff": -1}, InvalidArgument), ({"create": None}, InvalidArgument),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_before_anything_is_sent(
    model: GroupDaemon, settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        consumer(**settings)
    assert not model.sessions


def test_a_client_manages_consumer_groups(model: GroupDaemon) -> None:
    with Client("demo", namespace="shop", transport="zmq") as client:
        assert client.groups() == []
        made = client.create_group("mailers", ["orders", "mail"], backoff=2, ordered=True)
        assert made.settings.backoff_ns == 2_000_000_000
        assert made.topics == ("mail", "orders")
        assert client.change_group("mailers", max_dead=5).settings.max_dead == 5
        assert client.group("mailers").settings == made.settings._replace(max_dead=5)
        client.pause_group("mailers")
        assert client.group("mailers").paused
        client.resume_group("mailers")
        assert [info.name for info in client.groups()] == ["mailers"]
        client.delete_group("mailers")
        for call in (client.group, client.delete_group, client.drop_dead, client.pause_group):
            with pytest.raises(GroupMissing):
                call("mailers")


def test_dead_letters_come_in_pages(model: GroupDaemon) -> None:
    with consumer(max_in_flight=600) as jobs:
        model.fire(*map(str, range(600)), payload=b"p")
        for _ in range(600):
            taken(jobs).reject("bad")
        with Client("demo", namespace="shop", transport="zmq") as client:
            letters = list(client.dead_letters("mailers"))
            assert [one.key for one in letters] == [str(n) for n in range(600)]
            first = letters[0]
            assert (first.payload, first.topic, first.error) == (b"p", "orders", "bad")
            assert (first.attempts, first.reason) == (1, JobReason.REJECTED)
            assert client.drop_dead("mailers", first.ticket) == 1
            assert client.requeue_dead("mailers", letters[1].ticket) == 1
            assert taken(jobs).key == "1"
            assert client.drop_dead("mailers") == 598
            assert list(client.dead_letters("mailers")) == []


# ---- asyncio -----------------------------------------------------------------------------------


def test_tasks_take_and_answer_jobs(model: GroupDaemon) -> None:
    async def main() -> None:
        async with async_consumer() as jobs:
            model.fire("a", "b", "c", "d")
            async with await next_of(jobs) as job:
                assert job.attempt == 1
            async with await next_of(jobs):
                raise ValueError("bad")
            with pytest.raises(asyncio.CancelledError):
                async with await next_of(jobs):
                    raise asyncio.CancelledError
            got = await jobs.get_many(9, 30)
            await jobs.ack_many(got)
            model.expire()
            for job in got:
                await job.ack()

    asyncio.run(main())
    assert model.states()[:2] == ["acked", "delayed"]
    assert ops(model)[2][0] == "JOB_RELEASE"


def test_tasks_acknowledge_many_jobs_without_a_wait(model: GroupDaemon) -> None:
    async def main() -> None:
        async with async_consumer() as jobs:
            model.fire("a", "b")
            got = await jobs.get_many(2, 30)
            while len(got) < 2:
                got += await jobs.get_many(1, 30)
            await jobs.ack_many(got, wait=False)
            assert model.states() == ["leased"] * 2

    asyncio.run(main())
    assert model.states() == ["acked"] * 2


def test_a_cancelled_get_loses_no_job(model: GroupDaemon) -> None:
    async def main() -> None:
        async with async_consumer(max_in_flight=1) as jobs:
            for number in range(40):
                getting = asyncio.ensure_future(jobs.get())
                await asyncio.sleep(0.001 * (number % 4))
                model.fire(str(number))
                await asyncio.sleep(0.0005 * (number % 8))
                getting.cancel()
                await asyncio.gather(getting, return_exceptions=True)
                if not getting.cancelled() and (job := getting.result()) is not None:
                    await job.ack()
                del getting
                job = None
            while "leased" in model.states() or "waiting" in model.states():
                if (job := await jobs.get(1)) is not None:
                    await job.ack()

    asyncio.run(main())
    assert set(model.states()) == {"acked"}


def test_cancelled_handlers_release_their_jobs(model: GroupDaemon) -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def handle(job: Any) -> None:
            started.set()
            await asyncio.sleep(3600)

        async with async_consumer() as jobs:
            running = asyncio.ensure_future(jobs.run(handle, concurrency=2))
            model.fire("a", "b", "c")
            await asyncio.wait_for(started.wait(), 30)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(main())
    assert model.states() == ["waiting"] * 3
    assert [one.failed for one in model.groups["mailers"].jobs.values()] == [0] * 3


def test_tasks_do_not_wait_for_acknowledgements(model: GroupDaemon) -> None:
    async def main() -> None:
        seen: list[Any] = []

        async def handle(job: Any) -> None:
            seen.append(job.key)
            if job.key == "b":
                raise ValueError("once")
            if len(seen) == 4:
                jobs.stop()

        async with async_consumer() as jobs:
            model.fire("a", "b", "c", "d")
            await jobs.run(handle, concurrency=2)
            assert sorted(seen) == ["a", "b", "c", "d"]
            assert sorted(ops(model)) == [
                ("JOB_ACK", 1), ("JOB_ACK", 3), ("JOB_ACK", 4), ("JOB_NACK", 2),
            ]  # fmt: skip

    asyncio.run(main())
    assert model.states() == ["acked", "delayed", "acked", "acked"]


def test_a_refused_acknowledgement_ends_the_tasks(model: GroupDaemon) -> None:
    model.refuse_with[Op.JOB_ACK] = Status.DENIED

    async def handle(_: Any) -> None: ...

    async def main() -> None:
        async with async_consumer() as jobs:
            model.fire("a", "b")
            with pytest.raises(Denied):
                await asyncio.wait_for(jobs.run(handle, concurrency=2), 30)
            await jobs.close(drain=0.0)

    asyncio.run(main())


def test_a_cancelled_answer_can_be_repeated(model: GroupDaemon) -> None:
    async def main() -> None:
        async with async_consumer() as jobs:
            model.fire("a")
            job = await jobs.get(30)
            assert job is not None
            model.mute = True
            acking = asyncio.ensure_future(job.ack())
            await asyncio.sleep(0.01)
            acking.cancel()
            await asyncio.gather(acking, return_exceptions=True)
            model.restart()
            model.mute = False
            await job.ack()

    asyncio.run(main())
    assert [(op, ticket) for op, ticket in ops(model)] == [("JOB_ACK", 1)]


# ---- credits -----------------------------------------------------------------------------------


class _Partition(Member):
    """A member of a partition that confirms each JOIN at once. If it is busy, it holds as many jobs
    as it may."""

    def __init__(self, wanted: int, *, busy: bool) -> None:
        self.wanted = wanted
        self._begun, self._stale, self._joins = True, False, False
        self._busy = busy
        self.confirm()

    def confirm(self) -> None:
        self._sent = self._granted = self.wanted
        count = self.wanted if self._busy else 0
        self.jobs = dict.fromkeys(b"%d" % n for n in range(count))  # type: ignore[assignment]


def rebalanced(members: list[_Partition], most: int) -> list[int]:
    """Move credits until nothing changes, and return those of each member."""
    for _ in range(40):
        share_credits(members, most)
        assert sum(max(one.wanted, one._granted) for one in members) <= most
        for one in members:
            one.confirm()
    return [one.wanted for one in members]


def test_idle_credits_move_to_busy_partitions() -> None:
    idle = [_Partition(16, busy=False) for _ in range(3)]
    assert rebalanced([_Partition(16, busy=True), *idle], 64) == [61, 1, 1, 1]


def test_busy_partitions_share_credits_fairly() -> None:
    poor = [_Partition(1, busy=True) for _ in range(3)]
    assert rebalanced([_Partition(61, busy=True), *poor], 64) == [16] * 4


def test_credits_stay_where_they_are_if_no_partition_is_busy() -> None:
    assert rebalanced([_Partition(32, busy=False), _Partition(32, busy=False)], 64) == [32, 32]


# ---- texts -------------------------------------------------------------------------------------


def test_an_error_text_is_cut_between_characters() -> None:
    assert error_text("a" + "ü" * 600) == ("a" + "ü" * 511).encode()
    assert error_text(KeyError("k")) == b"KeyError: 'k'"
    assert error_text("\ud800") == b"\\ud800"


# ---- the fake ----------------------------------------------------------------------------------


def test_a_fake_consumer_records_answers() -> None:
    jobs = FakeConsumer(["a", ("b", b"pay"), {"key": "c", "attempt": 3, "topic": "t"}, "d", "e"])
    for job in jobs:
        with job:
            if job.key == "b":
                assert job.payload == b"pay"
                raise ValueError("bad")
            if job.key == "c":
                assert (job.attempt, job.topic) == (3, "t")
                job.nack("later", delay=5)
            if job.key == "d":
                job.extend(9)
                jobs.stop()
    assert [job.key for job in jobs.acked] == ["a", "d"]
    assert [(one.job.key, one.error, one.delay) for one in jobs.nacked] == [
        ("b", "ValueError: bad", None), ("c", "later", 5.0),
    ]  # fmt: skip
    assert [job.key for job in jobs.released] == ["e"]
    assert [(job.key, seconds) for job, seconds in jobs.extended] == [("d", 9.0)]


def test_a_fake_job_has_the_fields_of_a_job() -> None:
    verdict, occurrence = Verdict(5, 0, (1,)), Occurrence("tide", 7)
    jobs = FakeConsumer(
        [
            {"key": "op", "cause": Cause.CANCELLED, "verdict": verdict},
            {"key": "tide@7", "occurrence": occurrence, "missed": 3},
        ]
    )
    operation, scheduled = jobs
    assert (operation.cause, operation.verdict) == (Cause.CANCELLED, verdict)
    assert (operation.occurrence, operation.missed) == (None, 0)
    assert (scheduled.cause, scheduled.verdict) == (Cause.EXPIRED, None)
    assert (scheduled.occurrence, scheduled.missed) == (occurrence, 3)
    with pytest.raises(InvalidArgument, match="tide@8"):
        jobs.add("tide@8", occurrence=occurrence)
    with pytest.raises(InvalidArgument, match="missed"):
        jobs.add("a", missed=-1)


def test_a_fake_lease_can_be_lost() -> None:
    jobs = FakeConsumer(["a"])
    job = jobs.get()
    assert job is not None
    jobs.lose(job)
    with pytest.raises(LeaseLost):
        jobs.ack_many([job])
    jobs.ack_many([job], wait=False)  # only logs that
    assert jobs.acked == []
    jobs.close()
    with pytest.raises(Closed):
        jobs.get()


def test_a_fake_consumer_runs_handlers() -> None:
    jobs, seen = FakeConsumer(map(str, range(100))), []
    jobs.run(lambda job: seen.append(job.key), concurrency=4)
    assert sorted(seen) == sorted(map(str, range(100)))
    assert len(jobs.acked) == 100


def test_a_fake_consumer_has_the_methods_of_a_consumer() -> None:
    public = {name for name in dir(Consumer) if not name.startswith("_")}
    assert public - {"name", "namespace"} <= set(dir(FakeConsumer))


def test_each_kind_of_key_arrives(model: GroupDaemon) -> None:
    keys = {
        (int(KeyType.STR), "ö".encode()): "ö", (int(KeyType.BYTES), b"\xff"): b"\xff",
        (int(KeyType.UUID), bytes(range(16))): UUID(bytes=bytes(range(16))),
        (int(KeyType.STR), b"\xff"): b"\xff", (int(KeyType.UUID), b"short"): b"short",
    }  # fmt: skip
    with consumer(max_in_flight=8) as jobs:
        session = next(iter(model.sessions.values()))
        heads = [
            JOB_INFO.pack(n << 8, n, n, 2**62, n, 0, n, 1, 1, 0, 2, len(data), kind, 0, n, n, n)
            for n, (kind, data) in enumerate(keys, 1)
        ]
        texts = [b"t" * n + data + b"pp" for n, (_, data) in enumerate(keys, 1)]
        frame = wire.encode_frame(Message.JOBS, session.id, count=len(keys))
        model.do(lambda: model._send(session.route, frame + b"".join([*heads, *texts])))
        got = jobs.get_many(5, 30)
        while len(got) < len(keys):
            got += jobs.get_many(5, 30)
        assert [job.key for job in got] == list(keys.values())
        assert [job.topic for job in got] == ["t" * n for n in range(1, 6)]
        assert [(job.ticket, job.priority, job.missed) for job in got] == [
            (n, n, n) for n in range(1, 6)
        ]
        assert {job.payload for job in got} == {b"pp"}
        with pytest.raises(LeaseLost):
            jobs.ack_many(got)


def test_a_short_message_of_jobs_is_refused(model: GroupDaemon) -> None:
    with consumer() as jobs:
        session = next(iter(model.sessions.values()))
        head = wire.encode_frame(Message.JOBS, session.id, count=3)
        model.do(lambda: model._send(session.route, head + b"short"))
        model.fire("a")
        eventually(lambda: jobs.in_flight == 1)
        taken(jobs).ack()

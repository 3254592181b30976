"""The judge of consumer groups in simulated worlds (tests/world/jobs.py), and their seeds."""

from __future__ import annotations

from enum import EnumType
from typing import Any

import pytest
from product_imports import product_imports
from world import jobs
from world.jobs import AGING_NS, Delivered, Group, Holder, JobOracle, Lease, Settings
from world.options import NONE, Options, Possible, options_of
from world.oracle import Violation
from world.runs import run
from world.script import CONSUMERS, DELIVERY, GROUPS, MS, script

from purgatoryd.shm_layout.layout import JobReason, Op

pytestmark = pytest.mark.tier("check")

SETTINGS = Settings(("a",), 64, 1000 * MS, 20, 1000, 0, ordered=False, blocks=False, drops=False)
ME, OTHER = Holder(1, 11, 111), Holder(2, 22, 222)
LENGTH_NS = 100 * MS


OPTIONS = {
    "low": Options(1), "high": Options(5), "x": Options(None, "same"), "y": Options(None, "same"),
}  # fmt: skip
"""Options of the timers of some keys."""


def judge_of(**settings: Any) -> tuple[JobOracle, Group]:
    """Return a judge with a group that exists since time 0."""
    judge = JobOracle(lambda key: OPTIONS.get(key, NONE))
    group = judge.creating("g", SETTINGS._replace(**settings))
    judge.created(group, 0, 0)
    return judge, group


def born(judge: JobOracle, number: int, key: str = "k") -> None:
    """Let the timer `number` fire at time `number` ms."""
    place, at_ns = (7, "a", number), number * MS
    judge.published(place, b"%d" % number, key, at_ns, at_ns)


def lease(
    judge: JobOracle, number: int, at_ms: int, *, job: int = 1, attempt: int | None = None,
    holder: Holder = ME, key: str = "k", priority: int = 0,
) -> Lease:  # fmt: skip
    """Let a member receive a lease of a job that begins at `at_ms`."""
    begins_ns = at_ms * MS
    return judge.received("g", b"%d" % job, holder, Delivered(
        job, key, b"%d" % job, job * MS, 3, number, attempt or number, begins_ns,
        begins_ns + LENGTH_NS, begins_ns, priority,
    ))  # fmt: skip


def taken(judge: JobOracle, one: Lease, op: Op, at_ms: int, span_ms: int = 0) -> None:
    """Let the daemon take an answer of the holder of a lease, that was sent at `at_ms`."""
    judge.answering(one, op, mine=True)
    judge.answered(one, op, at_ms * MS, span_ms * MS, "no", mine=True, durable=True, now_ns=0)


def test_two_leases_of_a_job_must_not_overlap() -> None:
    judge, _ = judge_of()
    lease(judge, 1, 10)
    with pytest.raises(Violation, match="began during lease 1"):
        lease(judge, 2, 109, holder=OTHER)
    judge, _ = judge_of()
    lease(judge, 1, 10)
    lease(judge, 2, 110, holder=OTHER)


@pytest.mark.parametrize("event", ["process", "connection", "answer"])
def test_a_lease_may_follow_the_end_of_its_holder_at_once(event: str) -> None:
    judge, _ = judge_of()
    first = lease(judge, 1, 10)
    if event == "process":
        judge.process_ended(ME.process)
    elif event == "connection":
        judge.connection_ended(ME.process, ME.connection)
    else:
        judge.answering(first, Op.JOB_NACK, mine=True)
    lease(judge, 2, 20, holder=OTHER)


def test_a_lease_ends_with_a_later_connection_of_its_holder() -> None:
    judge, _ = judge_of()
    lease(judge, 1, 10)
    judge.connection_ended(ME.process, ME.connection - 1)
    with pytest.raises(Violation, match="began during lease 1"):
        lease(judge, 2, 20, holder=OTHER)
    judge, _ = judge_of()
    lease(judge, 1, 10)
    judge.connection_ended(ME.process, ME.connection + 1)
    lease(judge, 2, 20, holder=OTHER)


def test_a_lease_of_a_closing_member_may_end_before_its_message_arrives() -> None:
    for closed in (False, True):
        judge, _ = judge_of()
        lease(judge, 2, 20, attempt=1, holder=OTHER)
        begins_ns = 10 * MS
        late = Delivered(
            1, "k", b"1", MS, 3, 1, 1, begins_ns, begins_ns + LENGTH_NS, begins_ns, 0
        )  # fmt: skip
        if closed:
            assert judge.received("g", b"1", ME, late, closed=True).closed
        else:
            with pytest.raises(Violation, match="began during lease 1"):
                judge.received("g", b"1", ME, late)


def test_an_occurrence_that_fires_twice_is_not_judged() -> None:
    judge, _ = judge_of()
    born(judge, 1, "s0@1")
    taken(judge, lease(judge, 1, 10, key="s0@1"), Op.JOB_ACK, 20)
    judge.published((7, "a", 2), b"1", "s0@1", 30 * MS, 30 * MS)
    lease(judge, 1, 40, key="s0@1")
    judge.dead("g", b"1", 1, 20, JobReason.MAX_ATTEMPTS, "no")


def test_an_extension_that_the_daemon_took_keeps_the_lease() -> None:
    judge, _ = judge_of()
    first = lease(judge, 1, 10)
    taken(judge, first, Op.JOB_EXTEND, 50, 200)
    with pytest.raises(Violation, match="began during lease 1"):
        lease(judge, 2, 249)
    judge, _ = judge_of()
    first = lease(judge, 1, 10)
    lease(judge, 2, 111)
    judge.answering(first, Op.JOB_EXTEND, mine=True)
    with pytest.raises(Violation, match="began during lease 1"):
        judge.answered(
            first, Op.JOB_EXTEND, 50 * MS, 200 * MS, "", mine=True, durable=True, now_ns=0
        )


def test_attempts_count_each_failure_and_nothing_else() -> None:
    judge, _ = judge_of()
    first = lease(judge, 1, 10)
    taken(judge, first, Op.JOB_RELEASE, 20)
    with pytest.raises(Violation, match="expected an attempt from 1 to 1"):
        lease(judge, 2, 30)
    judge, _ = judge_of()
    lease(judge, 1, 10)
    judge.process_ended(ME.process)
    with pytest.raises(Violation, match="expected an attempt from 2 to 2"):
        lease(judge, 2, 30, attempt=1)
    judge, _ = judge_of()
    lease(judge, 1, 10)
    judge.process_closes(ME.process)
    lease(judge, 2, 30, attempt=1)


def test_an_attempt_is_at_most_the_number_of_leases_and_of_attempts() -> None:
    judge, _ = judge_of(max_attempts=2)
    with pytest.raises(Violation, match="more attempts than leases"):
        lease(judge, 1, 10, attempt=2)
    with pytest.raises(Violation, match="more than 2 attempts"):
        lease(judge, 3, 10)


def test_a_requeue_may_reset_attempts() -> None:
    judge, group = judge_of()
    lease(judge, 4, 10)
    judge.changing_dead(group, requeue=True)
    lease(judge, 5, 200, attempt=1)


def test_answers_of_old_leases_and_foreign_sessions_are_refused() -> None:
    judge, _ = judge_of()
    first = lease(judge, 1, 10)
    lease(judge, 2, 120)
    with pytest.raises(Violation, match="took JOB_ACK although lease 2"):
        taken(judge, first, Op.JOB_ACK, 130)
    judge, _ = judge_of()
    first = lease(judge, 1, 10)
    with pytest.raises(Violation, match="a foreign session answered it"):
        judge.answered(first, Op.JOB_ACK, 20 * MS, 0, "", mine=False, durable=True, now_ns=0)
    taken(judge, first, Op.JOB_ACK, 30)
    with pytest.raises(Violation, match="taken with another answer"):
        taken(judge, first, Op.JOB_NACK, 40)


def test_a_job_is_not_leased_after_its_ack_unless_a_power_cut_undid_the_ack() -> None:
    judge, _ = judge_of()
    taken(judge, lease(judge, 1, 10), Op.JOB_ACK, 20)
    with pytest.raises(Violation, match="leased after its ack"):
        lease(judge, 2, 200)
    judge.arena_lost(300 * MS, wal=True)
    with pytest.raises(Violation, match="leased after its ack"):
        lease(judge, 2, 400)
    judge, _ = judge_of()
    first = lease(judge, 1, 10)
    judge.answering(first, Op.JOB_ACK, mine=True)
    judge.answered(first, Op.JOB_ACK, 20 * MS, 0, "", mine=True, durable=False, now_ns=0)
    judge.arena_lost(300 * MS, wal=True)
    lease(judge, 2, 400)


def test_a_nack_delays_the_next_lease() -> None:
    judge, _ = judge_of()
    taken(judge, lease(judge, 1, 10), Op.JOB_NACK, 20, 50)
    with pytest.raises(Violation, match="began before 70000000"):
        lease(judge, 2, 69)


def test_an_ordered_group_leases_one_job_of_a_key_in_order() -> None:
    judge, _ = judge_of(ordered=True)
    lease(judge, 1, 10, job=1)
    with pytest.raises(Violation, match="of the same key"):
        lease(judge, 1, 20, job=2)
    lease(judge, 1, 20, job=3, key="other")
    judge, _ = judge_of(ordered=True)
    born(judge, 1)
    with pytest.raises(Violation, match="which is due earlier"):
        lease(judge, 1, 20, job=2)


def test_timers_with_an_order_key_of_their_own_wait_for_each_other() -> None:
    judge, _ = judge_of(ordered=True)
    born(judge, 1, "x")
    born(judge, 2, "y")
    with pytest.raises(Violation, match="which is due earlier"):
        lease(judge, 1, 20, job=2, key="y")
    judge, _ = judge_of(ordered=True)
    born(judge, 1, "x")
    born(judge, 2, "k")
    lease(judge, 1, 20, job=2, key="k")


def test_a_dead_letter_blocks_its_order_key_only_if_the_group_says_so() -> None:
    for blocks in (True, False):
        judge, _ = judge_of(ordered=True, blocks=blocks)
        born(judge, 1)
        born(judge, 2)
        taken(judge, lease(judge, 1, 10), Op.JOB_REJECT, 20)
        if blocks:
            with pytest.raises(Violation, match="which is due earlier"):
                lease(judge, 1, 30, job=2)
        else:
            lease(judge, 1, 30, job=2)


def test_a_dropped_dead_letter_blocks_nothing() -> None:
    judge, group = judge_of(ordered=True, blocks=True)
    born(judge, 1)
    born(judge, 2)
    taken(judge, lease(judge, 1, 10), Op.JOB_REJECT, 20)
    judge.changing_dead(group, requeue=False)
    lease(judge, 1, 30, job=2)


@pytest.mark.parametrize("late_message", [False, True])
def test_a_job_with_a_lower_priority_does_not_pass_a_waiting_one(late_message: bool) -> None:
    judge, _ = judge_of()
    born(judge, 1, "low")
    born(judge, 2, "high")
    numbers = [(2, 20, "high", 5), (1, 10, "low", 1)]
    first, second = numbers if late_message else reversed(numbers)
    lease(judge, 1, first[1], job=first[0], key=first[2], priority=first[3])
    with pytest.raises(Violation, match="with priority 1 passed"):
        lease(judge, 1, second[1], job=second[0], key=second[2], priority=second[3])


def test_a_job_may_pass_one_that_was_born_later_or_waited_less() -> None:
    judge, _ = judge_of()
    born(judge, 1, "low")
    born(judge, 20, "high")
    lease(judge, 1, 10, key="low", priority=1)
    lease(judge, 1, 30, job=20, key="high", priority=5)
    judge, _ = judge_of()
    later = 4 * AGING_NS // MS + 2
    born(judge, 1, "low")
    born(judge, later, "high")
    lease(judge, 1, later + 1, key="low", priority=1)
    lease(judge, 1, later + 2, job=later, key="high", priority=5)


def test_a_job_with_a_lower_priority_may_pass_one_behind_its_order_key() -> None:
    judge, _ = judge_of(ordered=True)
    born(judge, 1, "high")
    born(judge, 2, "low")
    born(judge, 3, "high")
    first = lease(judge, 1, 10, job=1, key="high", priority=5)
    lease(judge, 1, 20, job=2, key="low", priority=1)
    taken(judge, first, Op.JOB_ACK, 30)
    lease(judge, 1, 40, job=3, key="high", priority=5)


def test_a_job_has_the_priority_of_its_timer_or_its_topic() -> None:
    judge, _ = judge_of()
    born(judge, 1, "high")
    born(judge, 2)
    with pytest.raises(Violation, match="has priority 4"):
        lease(judge, 1, 10, key="high", priority=4)
    with pytest.raises(Violation, match="has priority 4"):
        lease(judge, 1, 10, job=2, priority=4)
    judge.priorities["a"].changing(4)
    born(judge, 3)
    lease(judge, 1, 10, job=3, priority=4)


def test_a_confirmed_setting_of_a_topic_replaces_the_others_unless_an_arena_was_lost() -> None:
    setting = Possible(0)
    setting.changing(3)
    assert setting.since(0) == {0, 3}
    setting.changed(3, 100)
    assert setting.since(100) == {0, 3}
    assert setting.since(101) == {3}
    setting.lost()
    assert setting.since(101) == {0, 3}


def test_options_belong_to_keys_of_clients_in_worlds_with_ranks() -> None:
    keys = [f"k0.{number}" for number in range(60)]
    found = [options_of(key, ranks=True) for key in keys]
    assert {one.priority for one in found} == {None, *range(10)}
    assert {one.order_key for one in found} == {None, "order 0", "order 1", "order 2"}
    assert {options_of(key, ranks=False) for key in keys} == {NONE}
    assert {options_of(key, ranks=True) for key in ("o0.1", "r0.1", "s0.1")} == {NONE}


def test_a_paused_group_leases_nothing() -> None:
    judge, group = judge_of()
    judge.paused(group, judge.pausing(group), 50 * MS)
    lease(judge, 1, 50, job=1)
    with pytest.raises(Violation, match="the group is paused"):
        lease(judge, 1, 51, job=2)
    judge.pausing(group)
    lease(judge, 1, 60, job=3)


def test_each_notice_after_the_creation_needs_a_job() -> None:
    judge, _ = judge_of()
    born(judge, 1)
    with pytest.raises(Violation, match="1 jobs were lost"):
        judge.finish("g", 0)
    judge.dead("g", b"1", 1, 20, JobReason.MAX_ATTEMPTS, "no")
    judge.finish("g", 0)


def test_an_ack_that_was_refused_ends_no_job() -> None:
    judge, _ = judge_of()
    born(judge, 1)
    one = lease(judge, 1, 10)
    judge.answering(one, Op.JOB_ACK, mine=True)
    judge.finish("g", 0)
    judge.refused(one, Op.JOB_ACK, mine=True)
    with pytest.raises(Violation, match="1 jobs were lost"):
        judge.finish("g", 0)


def test_dropped_jobs_are_counted() -> None:
    judge, _ = judge_of(drops=True)
    born(judge, 1)
    born(judge, 2)
    judge.finish("g", 2)
    with pytest.raises(Violation, match="2 jobs were lost, 1 were dropped"):
        judge.finish("g", 1)


@pytest.mark.parametrize(
    ("reason", "attempts", "match"),
    [
        (JobReason.REJECTED, 1, "nobody rejected it"),
        (JobReason.TOO_OLD, 1, "no retention"),
        (JobReason.MAX_ATTEMPTS, 19, "20 attempts are allowed"),
    ],
)
def test_a_dead_letter_needs_a_reason(reason: JobReason, attempts: int, match: str) -> None:
    judge, _ = judge_of()
    with pytest.raises(Violation, match=match):
        judge.dead("g", b"1", 1, attempts, reason, "no")


def test_counts_stay_within_the_budget_and_agree_with_the_answers() -> None:
    judge, _ = judge_of()
    taken(judge, lease(judge, 1, 10), Op.JOB_ACK, 20)
    judge.counts("g", 1, (60, 1, 1, 1, 1), 1)
    for acked, sizes, match in (
        (1, (60, 2, 1, 1, 1), "exceed the budget 64"),
        (0, (0,), "0 acks are counted, 1 were confirmed"),
        (2, (0,), "2 acks are counted, 1 were sent"),
    ):
        with pytest.raises(Violation, match=match):
            judge.counts("g", acked, sizes, 1)
    judge.full(64)
    with pytest.raises(Violation, match="no budget is below 64"):
        judge.full(63)


def test_a_group_that_was_confirmed_must_not_be_missing() -> None:
    judge, group = judge_of()
    with pytest.raises(Violation, match="was lost"):
        judge.exists(group, there=False)
    judge.arena_lost(MS, wal=True)
    judge.exists(group, there=False)


def test_the_judge_imports_only_constants() -> None:
    assert all(isinstance(value, EnumType) for value in product_imports(jobs).values())


def test_steps_of_groups_leave_the_other_steps_as_they_are() -> None:
    whole = script(79)
    setting = whole.setting
    assert setting.groups
    assert {setting.late, setting.readers, setting.schedules, setting.virtual} == {False}
    assert {step.kind for step in whole.steps} > set(DELIVERY) - {"delete_group"}
    others = [step for step in whole.steps if not step.kind.startswith("set_")]
    first = others[: GROUPS + CONSUMERS]
    assert {step.kind for step in first} == {"create_group", "consume"}


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", [8, 61, 99])  # each of these worlds has consumer groups
def test_no_job_is_lost_or_held_twice_in_a_world(seed: int) -> None:
    chosen = script(seed)
    assert chosen.setting.groups
    assert chosen.setting.ranks == (seed != 61)
    assert run(chosen).failure is None

"""The judge of late policies in simulated worlds (tests/world/lateness.py), and their seeds."""

from __future__ import annotations

from enum import EnumType

import pytest
from product_imports import product_imports
from world import lateness
from world.lateness import BURST_NS, SLACK_NS, Counts, Fired, LateOracle
from world.options import FIRE, LATE_KINDS, NONE, Options, Policy, options_of
from world.oracle import FOREVER_NS, IN_DOUBT, Call, Oracle, Timer, Violation
from world.runs import run
from world.script import (
    GRACES_NS,
    LATE_STEPS,
    MS,
    NAMESPACE_SCOPE,
    PAUSE_STEPS,
    UNIQUE_NS,
    S,
    script,
)

from purgatoryd.shm_layout.layout import Status

pytestmark = pytest.mark.tier("check")

STREAM = 7
GRACE_NS = 100 * MS
LATE_NS = GRACE_NS + SLACK_NS
POLICIES = {
    "skip": Policy("skip", GRACE_NS), "coalesce": Policy("coalesce", GRACE_NS),
    "fire": FIRE, "topic": None,
}  # fmt: skip


def judges() -> tuple[Oracle, LateOracle]:
    """Return the judges of a daemon that begins at time 0. A key begins with its policy."""
    oracle = Oracle()
    judge = LateOracle(oracle, lambda key: Options(late=POLICIES[key.rstrip("0123456789")]))
    oracle.may_end = judge.may_end
    oracle.stream_id = STREAM
    judge.started(STREAM, Counts(0, 0, 0), 0)
    return oracle, judge


def armed(oracle: Oracle, key: str, due_ms: int, ticket: int = 1) -> Timer:
    """Let a client add a timer that is due at `due_ms`. Its payload is its key."""
    timer = Timer(key, "b", key.encode(), 0, due_ms * MS)
    call = oracle.issue(Call("error", key, durable=True, timer=timer))
    oracle.answer(call, Status.ADDED, ticket, due_ms * MS, 0)
    return timer


def ask(oracle: Oracle, key: str, at_ns: int) -> None:
    """Let a client learn at a time that a key has no timer."""
    call = oracle.issue(Call("get", key, durable=True))
    oracle.answer(call, Status.UNKNOWN, 0, 0, at_ns)


def fire(judge: LateOracle, timer: Timer, late_ns: int, missed: int = 0, sequence: int = 1) -> None:
    """Let a timer fire this long after its deadline."""
    timer.fired.add(STREAM)
    at_ns = timer.deadline_ns + late_ns
    judge.fired(timer, Fired((STREAM, "b", sequence), timer.deadline_ns, at_ns, missed))


def test_a_timer_within_its_grace_must_fire() -> None:
    for key, lost in (("skip", False), ("coalesce", False), ("fire", True)):
        oracle, _ = judges()
        armed(oracle, key, 10)
        ask(oracle, key, 11 * MS + GRACE_NS)
        if lost:
            with pytest.raises(Violation, match="was lost"):
                oracle.finish(S)
        else:
            oracle.finish(S)
        oracle, _ = judges()
        armed(oracle, key, 10)
        ask(oracle, key, 9 * MS + GRACE_NS)
        with pytest.raises(Violation, match="was lost"):
            oracle.finish(S)


def test_a_timer_that_is_late_at_the_end_may_have_been_skipped() -> None:
    oracle, _ = judges()
    armed(oracle, "skip", 10)
    with pytest.raises(Violation, match="never fired"):
        oracle.finish(10 * MS + GRACE_NS)
    oracle, _ = judges()
    armed(oracle, "skip", 10)
    oracle.finish(11 * MS + GRACE_NS)


def test_a_timer_is_gone_without_a_notice_only_after_its_grace() -> None:
    oracle, judge = judges()
    armed(oracle, "skip", 10, ticket=5)
    judge.counted(Counts(1, 0, 0), 11 * MS + GRACE_NS, lambda: {6})
    oracle, judge = judges()
    armed(oracle, "skip", 10, ticket=5)
    armed(oracle, "skip2", 0, ticket=7)
    with pytest.raises(Violation, match="without a notice"):
        judge.counted(Counts(1, 0, 0), 9 * MS + GRACE_NS, lambda: {6})


@pytest.mark.parametrize("event", ["cancel in doubt", "open cancel", "loss"])
def test_another_reason_may_have_ended_a_timer(event: str) -> None:
    oracle, judge = judges()
    armed(oracle, "skip", 10, ticket=5)
    armed(oracle, "skip2", 0, ticket=7)
    if event == "loss":
        judge.lost()
    else:
        call = oracle.issue(Call("cancel", "skip", durable=True))
        if event == "cancel in doubt":
            oracle.answer(call, IN_DOUBT, 0, 0, 0)
    judge.counted(Counts(1, 0, 0), 9 * MS + GRACE_NS, lambda: {6})


def test_no_more_timers_are_counted_than_were_late() -> None:
    oracle, judge = judges()
    armed(oracle, "skip", 10)
    armed(oracle, "skip2", 500, ticket=2)
    judge.counted(Counts(1, 0, 0), 200 * MS)
    with pytest.raises(Violation, match="2 timers ended by skip, at most 1 may have"):
        judge.counted(Counts(2, 0, 0), 201 * MS)


def test_each_skipped_timer_is_counted() -> None:
    oracle, judge = judges()
    armed(oracle, "skip", 10)
    ask(oracle, "skip", 200 * MS)
    with pytest.raises(Violation, match="1 timers ended by skip, but 0 are counted"):
        judge.finish(Counts(0, 0, 0), S)
    judge.finish(Counts(1, 0, 0), S)


def test_a_timer_beyond_its_grace_is_skipped() -> None:
    oracle, judge = judges()
    fire(judge, armed(oracle, "skip", 10), LATE_NS)
    with pytest.raises(Violation, match="ns late, but"):
        fire(judge, armed(oracle, "skip2", 10), LATE_NS + 1, sequence=2)
    fire(judge, armed(oracle, "fire", 10), LATE_NS + 1, sequence=3)


def test_a_timer_without_a_policy_has_that_of_its_topic() -> None:
    oracle, judge = judges()
    possible = judge.policies["b"]
    possible.changing(Policy("skip", GRACE_NS))
    fire(judge, armed(oracle, "topic", 10), LATE_NS + 1)
    possible.changed(Policy("skip", GRACE_NS), 20 * MS)
    with pytest.raises(Violation, match="ns late, but"):
        fire(judge, armed(oracle, "topic2", 10), LATE_NS + 1, sequence=2)


def test_only_timers_that_were_due_before_coalesce_with_the_last_one() -> None:
    oracle, judge = judges()
    armed(oracle, "coalesce", 10)
    last = armed(oracle, "coalesce2", 20)
    fire(judge, last, LATE_NS + 1, missed=1)
    judge.finish(Counts(0, 1, 0), S)
    oracle, judge = judges()
    first = armed(oracle, "coalesce", 10)
    armed(oracle, "coalesce2", 20)
    with pytest.raises(Violation, match="stands for 1, but 0 were due before it"):
        fire(judge, first, LATE_NS + 20 * MS, missed=1)


def test_a_cancelled_timer_leaves_its_count_to_the_next_notice() -> None:
    oracle, judge = judges()
    first = armed(oracle, "coalesce", 10)
    armed(oracle, "coalesce2", 20)
    armed(oracle, "coalesce3", 20)
    call = oracle.issue(Call("cancel", "coalesce3", durable=True))
    oracle.answer(call, Status.CANCELLED, 1, 0, 300 * MS)
    fire(judge, first, S, missed=1)


def test_notices_name_as_many_missed_timers_as_have_ended() -> None:
    oracle, judge = judges()
    armed(oracle, "coalesce", 10)
    last = armed(oracle, "coalesce2", 20)
    armed(oracle, "coalesce3", 500)
    fire(judge, last, LATE_NS + 1, missed=1)
    with pytest.raises(Violation, match="name 1 missed timers, but 0 are counted"):
        judge.finish(Counts(0, 0, 0), S)
    judge.finish(Counts(0, 2, 1), S)
    with pytest.raises(Violation, match="2 timers of b were missed, at most 0 ended"):
        fire(judge, armed(oracle, "fire", 30), 0, missed=1, sequence=2)


def test_a_timer_coalesces_only_with_a_later_one() -> None:
    oracle, judge = judges()
    armed(oracle, "coalesce", 10)
    ask(oracle, "coalesce", 200 * MS)
    with pytest.raises(Violation, match="without a later timer"):
        judge.finish(Counts(0, 1, 1), S)


def test_late_timers_of_an_earlier_process_keep_the_pace_of_the_namespace() -> None:
    oracle, judge = judges()
    judge.pace.changing(10)
    judge.pace.changed(10, 0)
    judge.started(STREAM, Counts(0, 0, 0), S)
    for number, after_ns in ((1, 0), (2, S // 10 - BURST_NS), (3, 2 * S // 10 - BURST_NS)):
        fire(judge, armed(oracle, f"fire{number}", 10), 990 * MS + after_ns, sequence=number)
    with pytest.raises(Violation, match="fired before"):
        fire(judge, armed(oracle, "fire4", 10), 1190 * MS, sequence=4)


@pytest.mark.parametrize("scope", ["b", NAMESPACE_SCOPE])
def test_no_timer_of_a_paused_topic_fires(scope: str) -> None:
    _, judge = judges()
    judge.pausing(scope, paused=True, now_ns=0)
    one = Fired((STREAM, "b", 1), MS, 10 * MS, 0)
    judge.fired_timer(one)
    judge.pauses[scope].changed(True, 10 * MS)
    judge.fired_timer(one)
    late = one._replace(fired_ns=10 * MS + 1)
    with pytest.raises(Violation, match="is paused"):
        judge.fired_timer(late)
    judge.pausing(scope, paused=False, now_ns=20 * MS)
    judge.fired_timer(late)


def test_timers_that_came_due_in_a_pause_keep_the_pace_of_the_namespace() -> None:
    oracle, judge = judges()
    judge.pace.changing(10)
    judge.pace.changed(10, 0)
    judge.pausing("b", paused=True, now_ns=0)
    judge.pauses["b"].changed(True, 5 * MS)
    timers = [armed(oracle, f"fire{number}", 10) for number in range(3)]
    early, later = armed(oracle, "fire3", 4), armed(oracle, "fire4", 990)
    judge.pausing("b", paused=False, now_ns=S)
    fire(judge, timers[0], S)
    for number, free in enumerate((early, later)):  # these may have fired without the pause
        fire(judge, free, S, sequence=7 + number)
    fire(judge, timers[1], S + S // 10 - BURST_NS, sequence=2)
    with pytest.raises(Violation, match="fired before"):
        fire(judge, timers[2], S + 2 * S // 10 - BURST_NS - 1, sequence=3)


def test_a_late_occurrence_is_skipped() -> None:
    _, judge = judges()
    policy = Policy("skip", GRACE_NS)
    one = Fired((STREAM, "b", 1), 10 * MS, 10 * MS + LATE_NS, 0)
    late = one._replace(fired_ns=one.fired_ns + 1)
    judge.fired_occurrence(late)
    judge.policies["b"].changing(policy)
    judge.policies["b"].changed(policy, 0)
    judge.fired_occurrence(one)
    with pytest.raises(Violation, match="ns late, but"):
        judge.fired_occurrence(late)


def test_a_new_arena_begins_with_its_own_counts() -> None:
    oracle, judge = judges()
    armed(oracle, "skip", 10)
    ask(oracle, "skip", 200 * MS)
    oracle.arena_lost(wal=True)
    judge.lost()
    judge.started(STREAM + 1, Counts(5, 3, 2), S)
    judge.finish(Counts(5, 3, 2), FOREVER_NS)


def test_options_belong_to_keys_of_clients_in_worlds_with_late_policies() -> None:
    found = {options_of(f"k0.{number}", late=True).late for number in range(200)}
    assert found == {None, FIRE, *(Policy(kind, ns) for kind in LATE_KINDS for ns in GRACES_NS)}
    spans_ns = {options_of(f"k0.{number}", unique=True).unique_ns for number in range(200)}
    assert spans_ns == {None, *UNIQUE_NS}
    assert options_of("r0.1", late=True) == options_of("k0.1") == NONE


def test_the_judge_imports_only_constants() -> None:
    assert all(isinstance(value, EnumType) for value in product_imports(lateness).values())


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", [13, 15])  # each of these worlds has pauses and unique keys
def test_pauses_and_unique_keys_last_in_a_world(seed: int) -> None:
    chosen = script(seed)
    assert chosen.setting.pauses
    assert chosen.setting.unique
    assert {step.kind for step in chosen.steps} >= {*PAUSE_STEPS}
    assert run(chosen).failure is None


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", [21, 27])  # each of these worlds has late policies
def test_a_late_timer_ends_as_its_policy_says_in_a_world(seed: int) -> None:
    chosen = script(seed)
    assert chosen.setting.late
    assert {step.kind for step in chosen.steps} >= {*LATE_STEPS}
    assert run(chosen).failure is None

"""Simulated worlds of daemons, clients, disks and clocks, checked by an oracle (tests/world)."""

from __future__ import annotations

import ast
import gc
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from enum import EnumType
from pathlib import Path

import pytest
from product_imports import product_imports
from world import __main__ as command
from world import oracle
from world.answers import ANSWERS, REFUSALS
from world.deliveries import Deliveries
from world.oracle import Call, Oracle, Sent, Timer, Violation
from world.runs import part, run, run_seed, smallest
from world.script import (
    DELIVERY,
    FAULTS,
    HEAVY,
    KEYS,
    LATE_STEPS,
    MORE_SCHEDULES,
    MS,
    PAUSE_STEPS,
    READING,
    SCHEDULES,
    SUBSCRIBERS,
    SWINGS,
    TOPIC_STEPS,
    WORK,
    S,
    Script,
    Step,
    script,
)
from world.world import World, world_of

from purgatoryd.shm_layout.layout import Cause, Status

pytestmark = pytest.mark.tier("check")

TESTS = Path(__file__).resolve().parent
SEEDS = (*range(1, 13), 123, 175)
"""Seeds of the simulated worlds. The worlds of the last two seeds have shards."""
OF_FOUND_FAULTS = (
    359, 389, 1022, 2216, 13230, 200, 10000030, 41000144, 42000053, 42000057,
)  # fmt: skip
"""Seeds of worlds that found a fault. The faults were: outcomes without space in a ring that slept
stayed there until the client sent a message; a daemon whose WAL stopped ended at a pending reply
of a client that had ended; new topics were refused after a recovery;
the refusal of an ended session overtook the answer to its batch; a subscriber did not report a loss
after it had reported a new stream; a consumer group counted fewer acks than it had confirmed; a
full consumer group stopped the schedules of all topics; after a reboot with a wall clock that was
set back, jobs of older notices of a new consumer group had fired in the future; past notices of
unique keys had no payload; the put of a schedule that was applied, but not on disk, was reported as
refused."""
BUGS = json.loads((TESTS.parent / "benchmarks" / "results" / "world_bugs.json").read_text())


def of_known_bugs() -> Iterator[int]:
    """Yield, for each bug of world/bugs, the seed that found the bug in the shortest hunt."""
    for bug in BUGS.values():
        if isinstance(bug, dict) and "hunts" in bug:
            hunt = min(bug["hunts"], key=lambda hunt: int(hunt["seeds"]))
            yield hunt["start_seed"] + hunt["seeds"] - 1


def seeds() -> Iterator[object]:
    """Yield all seeds. `make check` runs only the first four of them."""
    for seed in dict.fromkeys((*SEEDS, *OF_FOUND_FAULTS, *of_known_bugs())):
        yield seed if seed < 5 else pytest.param(seed, marks=pytest.mark.tier("test"))


def _digest(seed: int, folder: Path, hash_seed: int) -> str:
    code = f"from world.runs import run_seed; print(run_seed({seed}).digest)"
    folder.mkdir()
    environment = {
        **os.environ, "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": str(hash_seed),
        "TMPDIR": str(folder),
    }  # fmt: skip
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.mark.parametrize("seed", list(seeds()))
def test_nothing_is_lost_doubled_or_early_in_a_world(seed: int) -> None:
    assert run(script(seed)).failure is None


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", [2, 5, 175])  # the world of seed 175 has a recovery and shards
def test_a_seed_leads_to_the_same_bytes_everywhere(seed: int, tmp_path: Path) -> None:
    digests = {_digest(seed, tmp_path / f"folder{number}", number) for number in (1, 2)}
    assert len(digests) == 1
    assert digests != {_digest(seed + 1, tmp_path / "other", 1)}


def test_every_fault_and_every_call_occurs() -> None:
    steps = {step.kind for seed in range(1, 60) for step in script(seed).steps}
    more = {"add_at", "move_clock", "succeed", *TOPIC_STEPS, *LATE_STEPS}
    more |= {*SWINGS, *PAUSE_STEPS}
    kinds = {*FAULTS, *WORK, *HEAVY, *DELIVERY, *SCHEDULES, *MORE_SCHEDULES, *READING, *more}
    assert kinds == steps


def _functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{above}{node.name}"
            yield name, node
            yield from _functions(node, f"{name}.")


def _names() -> Iterator[str]:
    document = tomllib.loads((TESTS / "world" / "not_covered.toml").read_text())
    for table in document["shell"]:
        yield from table["functions"]
    for table in document["missed"]:
        yield from table["branches"]
    yield from document["other_group"]


@pytest.mark.parametrize("name", list(_names()))
def test_entries_of_not_covered_exist(name: str) -> None:
    where, _, line = name.partition(": ")
    file, function = where.split()
    source = (TESTS.parent / file).read_text()
    body = ast.get_source_segment(source, dict(_functions(ast.parse(source)))[function]) or ""
    assert line.partition(" -> ")[0] in [text.strip() for text in ["", *body.splitlines()]]


def _named_tests() -> Iterator[str]:
    document = tomllib.loads((TESTS / "world" / "not_covered.toml").read_text())
    for table in document["missed"]:
        yield from table.get("tests", ())


@pytest.mark.parametrize("name", sorted({*_named_tests()}))
def test_tests_named_in_not_covered_exist(name: str) -> None:
    file, test = name.split()
    assert f"def {test}(" in (TESTS / file).read_text()


def test_the_smallest_script_that_fails_is_found() -> None:
    whole = script(1)
    culprits = [whole.steps[number].arguments for number in (17, 203)]
    times_ns = [sum(step.wait_ns for step in whole.steps[: n + 1]) for n in (17, 203)]

    def failed(some: Script) -> bool:
        return all(any(step.arguments is one for step in some.steps) for one in culprits)

    numbers = smallest(whole, failed)
    assert numbers == [17, 203]
    waits = [step.wait_ns for step in part(whole, numbers).steps]
    assert waits == [times_ns[0], times_ns[1] - times_ns[0]]


def test_a_failing_seed_is_printed_as_steps_that_fail_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = script(1)._replace(steps=script(1).steps[:25])
    culprit = whole.steps[17].arguments
    do = World.do

    def fails(self: World, step: Step) -> None:
        if step.arguments == culprit:
            raise Violation("planted")
        do(self, step)

    monkeypatch.setattr(World, "do", fails)
    monkeypatch.setattr(command, "script", lambda _: whole)
    command.minimise(run(whole))
    printed = capsys.readouterr().err
    assert "Violation: planted\nAgain: make world SEED=1 STEPS=17\n" in printed
    with pytest.raises(SystemExit) as ended:
        command.main(["1", "--steps", "17"], standalone_mode=False)
    assert ended.value.code == 1
    assert capsys.readouterr().err in printed


A_TIMER = {
    "mode": "error", "delay_ns": 3600 * S, "topic": "a", "size": 8, "wait": True, "wall": False,
}  # fmt: skip


def test_a_signal_to_stop_ends_a_drain_wherever_it_arrives() -> None:
    with world_of(Script(script(1).setting, [])) as world:
        cell = world.cells[0]
        cell.begin()
        world.pass_time(S)
        world.do(Step(0, "add", 0, {"client": 0, "key": 0, **A_TIMER}))
        world.until(lambda: all(cell.oracle.key("k0.0").states), "the timer is armed")
        for calls in range(150):
            world.until(lambda: cell.daemon.alive, "the daemon serves")
            world.do(Step(0, "drain", 0, {"span_ns": S, "calls": calls}))
            starts = cell.daemon.starts
            world.until(lambda starts=starts: cell.daemon.starts > starts, "the daemon has ended")  # type: ignore[misc]


def core_firing(local_subscribers: int) -> tuple[int, int, int, int]:
    """Let 12 timers fire one after another. Return the number of iterations of the loop meanwhile,
    how many of them were Python's, and the number of notices of each subscriber."""
    setting = replace(
        script(1).setting, wal=False, virtual=False, shards=1, local_subscribers=local_subscribers
    )
    with world_of(Script(setting, [])) as world:
        cell = world.cells[0]
        cell.begin()
        world.pass_time(S)
        for key in range(KEYS):
            timer = {**A_TIMER, "delay_ns": (1000 + 10 * key) * MS}
            world.do(Step(0, "add", 0, {"client": 0, "key": key, **timer}))
        world.pass_time(S // 2)
        reaper = cell.daemon.reaper
        assert reaper is not None
        served, serve = [], reaper.serve

        def count(now_ns: int) -> bool:
            served.append(now_ns)
            return serve(now_ns)

        reaper.serve = count  # type: ignore[method-assign]
        before = reaper.loop.iterations
        world.pass_time(S)
        first, second = cell.deliveries
        return reaper.loop.iterations - before, len(served), first.notices, second.notices


def test_the_core_fires_timers_while_no_socket_has_subscribed() -> None:
    iterations, in_python, *notices = core_firing(SUBSCRIBERS)
    assert iterations >= KEYS
    assert in_python <= 3
    assert notices == [KEYS, KEYS]


def test_python_sends_notices_if_a_socket_has_subscribed() -> None:
    _, in_python, *notices = core_firing(SUBSCRIBERS - 1)
    assert in_python >= KEYS
    assert notices == [KEYS, KEYS]


# Both worlds kill daemons. In one world, tracebacks keep the mappings of the killed daemon. In the
# other world, the kill comes during a group commit.
@pytest.mark.parametrize("seed", [29, 113])
def test_a_world_leaves_no_descriptor_open(seed: int) -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    assert run_seed(seed).failure is None
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_oracle_refuses_statuses_of_another_kind_and_refusals_without_a_cause(
    kind: str,
) -> None:
    judge = Oracle()
    judge.served_with(oracle.Sizes(64, 1 << 20, 64, 256))
    for status in set(Status) - {Status.NONE}:
        if status in ANSWERS[kind]:
            judge.judge_status(kind, status, kind)
        else:
            with pytest.raises(Violation, match=status.name):
                judge.judge_status(kind, status, kind)
    caused = REFUSALS[kind] - {Status.FULL, Status.FULL_PAYLOAD}
    judge.causes |= caused
    for status in caused:
        judge.judge_status(kind, status, kind)


def test_the_oracle_refuses_a_loss_that_the_replay_buffer_does_not_explain() -> None:
    judge = Oracle()
    judge.served_with(oracle.Sizes(64, 1 << 20, 64, 4))
    judge.stream_id = 7
    replayable, fired = {("a", 3)}, 4
    deliveries = Deliveries(judge, lambda: 7, lambda *notice: (notice in replayable, fired))
    for sequence in (1, 2, 3):
        judge.sent[7, "a", sequence] = Sent(sequence, "k", b"", 0, 0, Cause.PUBLISHED)
    deliveries.received("a", 1, judge.sent[7, "a", 1])
    with pytest.raises(Violation, match="but the replay buffer has this notice"):
        deliveries.lagged("a", 2, 3)
    replayable.clear()
    with pytest.raises(Violation, match="were lost after 4"):
        deliveries.lagged("a", 2, 3)
    fired = 5
    deliveries.lagged("a", 2, 3)
    deliveries.received("a", 4, Sent(9, "k", b"", 0, 0, Cause.PUBLISHED))
    with pytest.raises(Violation, match="which was not sent"):
        deliveries.finish()


class UniqueKey:
    """A key that the first timer keeps unique for one second."""

    def __init__(self) -> None:
        self.judge = Oracle()
        self.add(0, Status.ADDED, unique_ns=S)
        self.judge.key("k").become([None])  # the timer has fired

    def add(
        self, at_ns: int, status: int, *, unique_ns: int = 0, until_ns: int = 0,
    ) -> None:  # fmt: skip
        """Let a client add a timer, and receive the answer one millisecond later."""
        number = len(self.judge.timers) + 1
        timer = Timer("k", "a", b"%d" % number, 0, 5 * MS, unique_ns=unique_ns, asked_ns=at_ns)
        call = self.judge.issue(Call("replace", "k", durable=True, timer=timer))
        excluded = until_ns > 0
        deadline_ns = -until_ns if excluded else at_ns + 5 * MS
        self.judge.answer(call, status, 1 if excluded else number, deadline_ns, at_ns + MS)


def test_the_oracle_refuses_a_second_add_of_a_unique_key() -> None:
    with pytest.raises(Violation, match="but the key is unique"):
        UniqueKey().add(S - 2 * MS, Status.ADDED)
    UniqueKey().add(S - MS, Status.ADDED)
    for wal in (True, False):
        one = UniqueKey()
        one.judge.arena_lost(wal=wal)
        with pytest.raises(Violation) if wal else nullcontext():
            one.add(S // 2, Status.ADDED)


def test_the_oracle_refuses_an_exclusion_without_a_unique_key() -> None:
    one = UniqueKey()
    for at_ns in (0, S // 2, S + MS):
        one.add(at_ns, Status.EXISTS, until_ns=S + MS)
    for at_ns, until_ns in ((S // 2, S - 1), (S // 2, S + MS + 1), (S + MS + 1, S + MS)):
        with pytest.raises(Violation, match="excluded until"):
            one.add(at_ns, Status.EXISTS, until_ns=until_ns)


def test_a_cancel_makes_a_unique_key_free() -> None:
    one = UniqueKey()
    one.judge.key("k").become([one.judge.timers[b"1"]])
    cancel = one.judge.issue(Call("cancel", "k", durable=True))
    one.judge.answer(cancel, Status.CANCELLED, 1, 0, 2 * MS)
    one.add(3 * MS, Status.ADDED)


def test_the_oracle_imports_only_constants() -> None:
    imported = {name: value for name, value in vars(oracle).items() if is_of_the_product(value)}
    assert imported == {"Cause": Cause, "Status": Status}
    assert all(isinstance(value, int | EnumType) for value in product_imports(oracle).values())


def is_of_the_product(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("purgatoryd")

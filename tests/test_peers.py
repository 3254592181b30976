"""The arithmetic of the comparison with other servers, and of the gate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.tier("check")

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


@pytest.fixture
def verdicts(module: Any) -> ModuleType:
    found: ModuleType = module("peers.verdicts")
    return found


def rates(*per_s: float) -> list[dict[str, float]]:
    return [{"per_s": value, "server_us": 1e6 / value} for value in per_s]


def test_a_ratio_divides_our_median_by_the_peers_best_repetition(verdicts: ModuleType) -> None:
    ours, peer = rates(1000, 3000, 2000), rates(4000, 1000, 500)
    row = verdicts.row("add", "per_s", ("purgatoryd", ours), ("redis", peer), (">=", 0.5))
    assert (row["ours"], row["peer"], row["ratio"], row["met"]) == (2.0, 4.0, 0.5, True)
    assert row["ours_spread"] == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert row["target"] == ">= 0.5"


def test_the_best_cost_of_a_peer_is_the_lowest(verdicts: ModuleType) -> None:
    ours, peer = rates(1000, 1000), rates(2000, 500)
    row = verdicts.row("add", "server_us", ("purgatoryd", ours), ("redis", peer), ("<=", 1.9))
    assert (row["peer"], row["ratio"], row["met"]) == (500.0, 2.0, False)
    assert row["peer_cpu_us"] == {"server_us": 1250.0}
    assert verdicts.advantage(row) == 0.5


def test_a_bound_without_a_peer_is_compared_in_the_unit_of_the_sample(verdicts: ModuleType) -> None:
    row = verdicts.row("add", "per_s", ("purgatoryd", rates(2000)), ("", ()), (">=", 1500.0))
    assert (row["ours"], row["ratio"], row["met"]) == (2.0, None, True)
    assert verdicts.advantage(row) is None


def test_a_side_that_delivers_nothing_has_no_ratio(verdicts: ModuleType) -> None:
    lost = [{"delivered": 0.0}]
    row = verdicts.row("due", "per_s", ("purgatoryd", rates(1)), ("keyspace", lost), ("<=", 1.0))
    assert (row["peer"], row["ratio"], row["met"]) == (None, None, None)
    row = verdicts.row("due", "per_s", ("purgatoryd", lost), ("redis", rates(1)), ("<=", 1.0))
    assert (row["ours"], row["ratio"], row["met"]) == (None, None, None)


def test_each_of_our_ways_is_compared_with_each_peer(verdicts: ModuleType) -> None:
    names = ("purgatoryd rows", "purgatoryd columns", "redis", "beanstalkd")
    samples = {name: rates(1000) for name in names}
    targets = {("purgatoryd rows", "", "per_s"): (">=", 1.0)}
    found = verdicts.rows("add", ("per_s",), samples, targets, "purgatoryd")
    pairs = [(row["ours_name"], row["peer_name"]) for row in found]
    assert pairs == [
        ("purgatoryd rows", "redis"), ("purgatoryd rows", "beanstalkd"), ("purgatoryd rows", ""),
        ("purgatoryd columns", "redis"), ("purgatoryd columns", "beanstalkd"),
    ]  # fmt: skip


def test_a_target_names_contestants_and_figures_of_its_scene(module: Any) -> None:
    scenes = module("peers.scenes")
    for scene in scenes.scenes():
        for ours, peer, figure in scene.targets:
            assert ours in scene.contestants, scene.name
            assert not peer or peer in scene.contestants or scenes.skipped(), scene.name
            assert figure in scene.figures, scene.name


def test_targets_of_single_adds_judge_calls_that_never_spin(module: Any) -> None:
    scenes = module("peers.scenes")
    (scene,) = [one for one in scenes.scenes() if one.name == "add, one a call, 1 client"]
    asleep = scenes.our_name("", scenes.ASLEEP)
    assert scene.targets[asleep, scenes.RAW, "per_s"] == (">=", 1.3)
    assert scene.targets[asleep, scenes.PY, "per_s"] == (">=", 2.0)


def test_a_timed_job_has_a_time_for_each_call(module: Any) -> None:
    side = module("peers.side")
    job, other = side.Job(3, timed=True), side.Job(3, timed=True)
    assert list(job.paced("abc")) == ["a", "b", "c"]
    assert len(job.call_us()) == 3
    assert min(job.call_us()) > 0
    assert other.call_us() == []


def test_an_early_timer_ends_the_comparison(module: Any) -> None:
    firing = module("peers.firing")
    assert firing.figures([(3_000_000, 1_000_000)], 1.0, 0.5)["max_ms"] == 2.0
    with pytest.raises(SystemExit, match="early"):
        firing.figures([(1, 2)], 1.0, 0.5)


def test_each_contestant_is_the_first_of_a_repetition(module: Any) -> None:
    bench = module("bench_peers")
    order: list[str] = []
    contestants = {
        name: lambda name=name: order.append(name) or {"per_s": 1.0}  # type: ignore[func-returns-value]
        for name in ("ours", "peer")
    }
    assert {name: len(found) for name, found in bench.samples(contestants, 3).items()} == {
        "ours": 3, "peer": 3,
    }  # fmt: skip
    assert order == ["ours", "peer", "peer", "ours", "ours", "peer"]


def test_absent_peers_are_named_and_left_out() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_peers.py"), "--dry", "--repeats", "1"]
    run = subprocess.run(
        [*command, "--scale", "0.001", "--only", "operations inside one process"],
        env=os.environ | {"PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "LEFT OUT: redis: no program redis-server" in run.stderr
    assert "LEFT OUT: beanstalkd: no program beanstalkd" in run.stderr
    assert "operations inside one process" in run.stdout


def test_a_scene_without_its_peer_has_only_our_contestants(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    scenes, ours = module("peers.scenes"), module("peers.ours")
    (scene,) = [one for one in scenes.scenes() if one.name == "cancel, one a call"]
    assert list(scene.contestants) == [scenes.our_name(transport=t) for t in ours.TRANSPORTS]


def test_the_page_of_peers_has_the_results(module: Any) -> None:
    bench, report = module("bench_peers"), module("peers.report")
    document = json.loads(bench.RESULTS.read_text())
    assert report.text(document) in report.PAGE.read_text()
    wanted = {"measure", "unit", "ours", "peer", "peer_name", "ratio", "target", "met"}
    assert all(wanted <= set(row) for row in document["rows"])
    missed = {row["measure"] for row in document["rows"] if row["met"] is False}
    assert missed <= report.REASONS.keys(), "a missed target has no reason"


# ---- the gate ------------------------------------------------------------------------------------


def test_the_gate_compares_medians_with_the_baseline(module: Any) -> None:
    gate = module("bench_gate")
    found = {"add": [1.0, 1.29, 9.0], "cancel": [1.0, 1.4, 1.4]}
    assert gate.dearer(found, {"add": 1.0, "cancel": 1.0}) == {"cancel": 1.4}
    with pytest.raises(KeyError):
        gate.dearer({"new": [1.0]}, {"add": 1.0})


@pytest.mark.parametrize(("second", "failed"), [(1.0, []), (2.0, ["add"])])
def test_the_gate_fails_what_is_dearer_in_two_runs(
    module: Any, second: float, failed: list[str]
) -> None:
    runs = iter([{"add": [2.0], "cancel": [1.0]}, {"add": [second]}])
    asked: list[list[str]] = []

    def again(names: Iterable[str]) -> dict[str, list[float]]:
        asked.append(list(names))
        return next(runs)

    assert module("bench_gate").failures(again, {"add": 1.0, "cancel": 1.0}) == failed
    assert asked == [["add", "cancel"], ["add"]]


def test_the_gate_passes_after_one_good_run(module: Any) -> None:
    runs = iter([{"add": [1.2]}])
    assert module("bench_gate").failures(lambda names: next(runs), {"add": 1.0}) == []


def test_the_baseline_of_the_gate_has_every_measure(module: Any) -> None:
    gate = module("bench_gate")
    assert set(json.loads(gate.BASELINE.read_text())["ratios"]) == set(gate.trials())

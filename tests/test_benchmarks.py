"""Each benchmark runs; its figures are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).resolve().parent.parent


def test_the_core_benchmark_runs_and_writes_nothing() -> None:
    results = ROOT / "benchmarks" / "results" / "core.json"
    before = results.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_core.py"), "--quick"]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False,
        env=os.environ | {"CFLAGS": "-O0", "COLUMNS": "160"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert all(name in run.stdout for name in ("wheel", "heap", "linked", "asyncio", "sched"))
    assert results.stat().st_mtime_ns == before


def test_the_benchmark_of_watchers_runs_and_writes_nothing() -> None:
    results = ROOT / "benchmarks" / "results" / "watchers.json"
    before = results.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_watchers.py"), "--dry"]
    small = ["--watchers", "500", "--seconds", "0.1", "--repeats", "1"]
    run = subprocess.run([*command, *small], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert set(json.loads(run.stdout)) == {"all", "sum"}
    assert results.stat().st_mtime_ns == before


def test_the_benchmark_of_attacks_runs_and_writes_nothing() -> None:
    results = ROOT / "benchmarks" / "results" / "hostile.json"
    before = results.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_hostile.py"), "--dry", "flood"]
    small = ["--seconds", "0.2", "--rounds", "1"]
    run = subprocess.run([*command, *small], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert set(json.loads(run.stdout)) == {"flood"}
    assert results.stat().st_mtime_ns == before


def test_the_benchmark_of_placement_runs_and_writes_nothing() -> None:
    results = ROOT / "benchmarks" / "results" / "placement.json"
    before = results.exists() and results.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_placement.py"), "--dry"]
    small = ["--pairs", "1", "--notices", "10"]
    run = subprocess.run([*command, *small], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert {"none", "pinned"} <= set(json.loads(run.stdout))
    assert (results.exists() and results.stat().st_mtime_ns) == before


def test_the_benchmark_of_figures_runs_and_writes_nothing() -> None:
    results = ROOT / "benchmarks" / "results" / "metrics.json"
    before = results.exists() and results.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_metrics.py"), "--dry"]
    small = ["--pairs", "1", "--rounds", "1", "--notices", "10", "--no-instructions"]
    run = subprocess.run(
        [*command, *small], capture_output=True, text=True, check=False,
        env=os.environ | {"CFLAGS": "-O0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert set(json.loads(run.stdout)) == {"counting", "being read"}
    assert (results.exists() and results.stat().st_mtime_ns) == before


def test_the_benchmark_at_rest_runs_and_writes_nothing() -> None:
    results = ROOT / "benchmarks" / "results" / "idle.json"
    before = results.exists() and results.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_idle.py"), "--dry"]
    small = ["--timers", "1000", "--settle", "0", "--windows", "2", "--seconds", "0.1"]
    work = ["--rounds", "1", "--work", "0.1", "--rate", "2000", "--operations", "200"]
    run = subprocess.run([*command, *small, *work], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found["at_rest"]) == 6
    assert len(found["at_work"]) == 4
    for ways in found["at_work"].values():
        assert all(way["cpu_ms_per_100k"]["median"] > 0 for way in ways.values())
    assert (results.exists() and results.stat().st_mtime_ns) == before


def test_the_benchmark_of_waits_runs_and_writes_nothing() -> None:
    results = ROOT / "benchmarks" / "results" / "waiting.json"
    before = results.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_waiting.py"), "--dry"]
    small = ["--rounds", "2", "--deadlines", "20"]
    run = subprocess.run([*command, *small], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert set(found) <= {"normal", "real-time"}
    for ways in found.values():
        assert set(ways) == {"timerfd", "select", "ratio"}
        assert all({*of} == {"p50_us", "p99_us", "cpu_us"} for of in ways.values())
    assert results.stat().st_mtime_ns == before


def test_the_benchmark_of_commands_runs_and_writes_nothing() -> None:
    results = ROOT / "benchmarks" / "results" / "commands.json"
    before = results.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_commands.py"), "--dry"]
    run = subprocess.run([*command, "--rounds", "2"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert {"add", "get", "cancel", "python -c pass"} <= set(found)
    assert all(of["cpu_ms"]["low"] > 0 for of in found.values())
    assert results.stat().st_mtime_ns == before


def test_the_page_has_the_time_of_an_add_from_the_shell() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "commands.json").read_text())
    wall_ms = found["commands"]["add"]["wall_ms"]
    text = "`purgatoryd add` takes {median:.0f} ms [{low:.0f} - {high:.0f}]".format(**wall_ms)
    assert text in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_benchmark_of_removed_arenas_runs_and_its_page_has_the_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = import_module("bench_place_again")
    found = json.loads(bench.RESULTS.read_text())
    assert [size["timers"] for size in found["sizes"]] == [1_000_000, 10_000_000]
    assert bench.table(found) in (ROOT / "docs" / "benchmarks.md").read_text()
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_place_again.py"), "--dry"]
    small = ["--timers", "1000", "--repeats", "1"]
    run = subprocess.run([*command, *small], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["sizes"][0]["pause_s"]["low"] > 0
    assert json.loads(bench.RESULTS.read_text()) == found


def test_the_benchmark_of_the_wal_runs_and_writes_nothing(tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results" / "wal.json"
    before = results.exists() and results.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_wal.py"), "--dry"]
    small = ["--adds", "2000", "--repeats", "1", "--pending", "2000", "--recoveries", "1"]
    where = ["--sessions", "2", "--directory", str(tmp_path)]
    run = subprocess.run([*command, *small, *where], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert set(json.loads(run.stdout)) == {"ratios", "targets"}
    assert (results.exists() and results.stat().st_mtime_ns) == before


def test_the_comparison_with_peers_runs_and_writes_nothing() -> None:
    results = ROOT / "benchmarks" / "results" / "peers.json"
    before = results.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_peers.py"), "--dry"]
    small = ["--repeats", "1", "--scale", "0.01", "--only", "100 a call", "instant", "memory"]
    run = subprocess.run([*command, *small], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for scene in ("add, 100 a call", "100,000 due at one instant", "memory of a timer"):
        assert scene in run.stdout
    assert results.stat().st_mtime_ns == before


def test_the_gate_runs_each_of_its_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gate = import_module("bench_gate")
    found = gate.run(gate.trials(), 1)
    assert set(found) == set(gate.trials())
    assert all(ratio > 0 for ratios in found.values() for ratio in ratios)

"""kill -9: short runs of the single-step harness, of its mutants, and of the soak (tests/crash)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import needs

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, FIRST_SEED, DOUBLE_EVERY = 1, 2, 60


def test_a_kill_at_any_instruction_loses_and_doubles_nothing() -> None:
    needs("trapflag")
    subprocess.run(["make", "--silent", "build/crash/crash"], cwd=ROOT, check=True)
    run = subprocess.run(
        [ROOT / "build/crash/crash", str(ROUNDS), str(FIRST_SEED), str(DOUBLE_EVERY)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout)
    print(json.dumps(counts["all"]))
    assert counts["all"]["violations"] == 0
    assert counts["all"]["states"] > 2000
    assert counts["recovery"]["trials"] > 0, "some recoveries are killed as well"
    silent = {"get", "repeated batch", "inbox", "inbox again", "migrate", "migrate with jobs"}
    assert {name for name, c in counts.items() if c["recoveries"] == 0} <= silent


@pytest.mark.costly("eight thousand recoveries")
@pytest.mark.tier("test")
def test_a_kill_before_any_store_loses_and_doubles_nothing() -> None:
    needs("cc")
    subprocess.run(["make", "--silent", "build/crash/stores"], cwd=ROOT, check=True)
    run = subprocess.run(
        [ROOT / "build/crash/stores", "4", "15", str(DOUBLE_EVERY)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout)
    assert counts["all"]["violations"] == 0
    assert counts["all"]["states"] > 8000


def test_mutants_are_caught() -> None:
    """The test tries a few mutants; `make crash-test` tries all."""
    script = str(ROOT / "tests" / "crash" / "mutate.py")
    sample = ["--file", "replay_buffer.c", "--every", "7", "--rounds", "4"]
    run = subprocess.run([sys.executable, script, *sample], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " replay_buffer.c:" in run.stdout


@pytest.mark.tier("test")
@pytest.mark.costly("a daemon and its workers are busy for seconds")
def test_kills_at_random_under_load_lose_and_double_nothing() -> None:
    script = str(ROOT / "tests" / "crash" / "soak.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support")}
    run = subprocess.run(
        [sys.executable, script, "4"], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(run.stdout)
    assert result["daemon_kills"] > 0
    assert result["added"] > 0
    assert result["outcomes_received"] > 0

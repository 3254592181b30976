"""Benchmarks run, and their programs get the results that they predict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("all")

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPT = BENCHMARKS / "bench_purgatory.py"
JOB_SIDES = 8


def quick(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a benchmark with --quick, and require that it ends well."""
    done = subprocess.run(
        [sys.executable, str(script), "--quick"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.tier("all")
def test_all_designs_agree_with_the_prediction() -> None:
    done = quick(SCRIPT)
    assert "every outcome as predicted" in done.stdout


def test_a_reader_of_past_notices_gets_all_of_them() -> None:
    done = quick(BENCHMARKS / "bench_replay.py")
    assert "'complete': True" in done.stdout


def test_all_sides_hand_over_all_jobs() -> None:
    done = quick(BENCHMARKS / "bench_jobs.py")
    cases = [line for line in done.stdout.splitlines() if "jobs/s" in line]
    left_out = [line for line in done.stderr.splitlines() if line.startswith("LEFT OUT")]
    assert len(cases) == 2 * (JOB_SIDES - len(left_out))

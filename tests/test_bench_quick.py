"""The purgatory's benchmark runs, and every design ends every request as predicted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("all")

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "bench_purgatory.py"


@pytest.mark.tier("all")
def test_all_designs_agree_with_the_prediction() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "every outcome as predicted" in done.stdout

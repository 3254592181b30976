"""kill -9 at any instruction: the short run of the single-step harness (tests/crash)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from machine import needs

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, FIRST_SEED, DOUBLE_EVERY = 1, 1, 30


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
    assert counts["recovery"]["trials"] > 0, "some recoveries are killed, too"
    silent = {"get", "repeated batch", "inbox", "inbox again", "migrate"}
    assert {name for name, c in counts.items() if c["recoveries"] == 0} <= silent

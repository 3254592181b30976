"""The examples of the purgatory print the expected output, repeatedly on the same daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from real_daemon import PATIENCE_S, StartDaemon, clean_environment

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).resolve().parent.parent

STORIES = {
    "delayed_produce": """\
produce-1: satisfied, all replicas have it
produce-2: satisfied, all replicas have it
produce-3: expired, not all replicas have it, orders-1
leadership of orders-1 lost: 1 request ends
produce-4: failed, error 6, orders-1
produce-5: failed, error 6, orders-1
leadership of orders-1 won, its slow follower is back
produce-6: satisfied, all replicas have it
""",
    "delayed_fetch": """\
700 bytes to clicks-0: 0 fetch ends
300 bytes to clicks-1: 0 fetch ends
100 bytes to clicks-1: 1 fetch ends
fetch-1: satisfied, 1000 bytes: clicks-0 600, clicks-1 400
fetch-2: expired, 100 bytes: clicks-0 100, clicks-1 0
fetch-3: satisfied, 1100 bytes: clicks-0 600, clicks-1 500
disk of clicks-1 broken: 1 fetch ends
fetch-4: failed with error 56, 0 bytes: clicks-0 0, clicks-1 0
""",
    "group_join": """\
join-1: satisfied, 3 members have arrived
member-1 hears: in
member-2 hears: in
member-3 hears: in
join-2: expired, missing: joined/member-2
member-1 hears: in
member-3 hears: in
member-2 joins too late
member-2 hears: failed with error 25
""",
    "heartbeats": """\
three sessions begin
declared dead: killed, stalled
the next heartbeat of stalled answers: declared dead
stalled leaves, its session was CANCELLED
living leaves, its session was CANCELLED
the end of the session of killed was FIRED
deaths besides: 0
""",
}


def story(example: str, daemon_dir: Path) -> str:
    """Run the example, which must succeed and write nothing to stderr; return its output."""
    run = subprocess.run(
        [sys.executable, "-m", f"examples.purgatory.{example}", "demo"],
        cwd=ROOT, env=clean_environment(daemon_dir), capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
    return run.stdout


@pytest.mark.parametrize("example", STORIES)
def test_an_example_can_run_repeatedly(example: str, daemon: StartDaemon, daemon_dir: Path) -> None:
    daemon("demo", "--capacity", "1000")
    assert [story(example, daemon_dir) for _ in range(2)] == [STORIES[example]] * 2


def test_every_example_is_tested() -> None:
    modules = (ROOT / "examples" / "purgatory").glob("[a-z]*.py")
    assert {module.stem for module in modules} == set(STORIES)

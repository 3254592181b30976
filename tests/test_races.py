"""The two threads of a rebuild in the C core: ThreadSanitizer finds no race."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from machine import needs

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).resolve().parent.parent
WORLDS = 40
"""Number of arenas. Each arena is rebuilt four times; every third rebuild uses two threads."""


@pytest.mark.costly("the core under ThreadSanitizer")
def test_the_halves_of_a_rebuild_write_nothing_in_common() -> None:
    needs("tsan")
    subprocess.run(["make", "--silent", "build/thread/test_arena"], cwd=ROOT, check=True)
    command = [str(ROOT / "build/thread/test_arena"), str(WORLDS)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

"""The C tests pass on aarch64, under QEMU's user mode: types, alignment, signs and atomics."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from machine import needs

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).resolve().parents[1]
MOST_S = 1800
"""Build and run take 40 s of CPU time, but other tests run at the same time."""


@pytest.mark.costly("all C tests, under QEMU")
@pytest.mark.timeout(MOST_S)
def test_the_c_tests_pass_on_aarch64() -> None:
    needs("aarch64")
    needs("qemuuser")
    command = ["make", "--silent", "test-aarch64"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    programs = sorted((ROOT / "tests/c").glob("*.c"))
    assert [name for name in programs if f"tests/{name.stem}\n" not in run.stdout] == []

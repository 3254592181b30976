"""The core under the memory model of C11: readers and the group-commit thread see no torn state.

`build/orders/explore` runs the compiled core in all executions that the model allows, first as it
is, then with each order weakened (tests/orders/model.h).
"""

from __future__ import annotations

import subprocess
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytestmark = [pytest.mark.tier("test"), pytest.mark.xdist_group("orders")]

ROOT = Path(__file__).resolve().parents[1]
EXPLORE = ROOT / "build/orders/explore"
REDUNDANT = ROOT / "tests/orders/redundant.toml"
HAS_FAULT = {"unasked"}
"""Scenarios that must have a fault, because they leave out a check that the product's callers
make."""
EXECUTIONS_MAX = 100_000
"""Number of executions of a scenario after which the program stops."""


@dataclass(frozen=True)
class Place:
    """A load, store or fence in the source."""

    file: str
    """The path, relative to shm_layout/ or tests/."""
    line: int
    function: str

    @property
    def code(self) -> str:
        """The text of the source line."""
        folder = ROOT / ("shm_layout" if self.file.startswith("core/") else "tests")
        return (folder / self.file).read_text().splitlines()[self.line - 1].strip()


@dataclass(frozen=True)
class Exploration:
    """The executions of one scenario with one weakening, as a line of the program's output."""

    scenario: str
    weakening: str
    place: Place | None
    executions: int
    fault: str | None


def places(addresses: list[str]) -> dict[str, Place]:
    """Return the source line of the call before each return address."""
    calls = [hex(int(address, 16) - 1) for address in addresses]
    command = ["addr2line", "-f", "-e", str(EXPLORE), *calls]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for address, function, where in zip(addresses, lines[::2], lines[1::2], strict=True):
        path, _, line = where.partition(" ")[0].rpartition(":")
        name = path.partition("/shm_layout/")[2] or path.partition("tests/")[2]
        found[address] = Place(name, int(line), function)
    return found


@cache
def explorations() -> tuple[Exploration, ...]:
    run = subprocess.run([str(EXPLORE)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = [line.split("\t") for line in run.stdout.splitlines()]
    where = places(sorted({row[2] for row in rows if row[1] != "intact"}))
    return tuple(
        Exploration(scenario, weakening, where.get(at), int(executions), fault.strip("-") or None)
        for scenario, weakening, at, executions, fault in rows
    )


@pytest.mark.costly("all executions of 29 scenarios, and of each with one order weakened")
def test_no_execution_of_the_core_has_a_fault() -> None:
    intact = {e.scenario: e for e in explorations() if e.weakening == "intact"}
    assert len(intact) >= 29
    assert {name: e.fault for name, e in intact.items() if e.fault and name not in HAS_FAULT} == {}
    assert all(intact[name].fault for name in HAS_FAULT)
    assert all(e.executions < EXECUTIONS_MAX for e in intact.values()), (
        "the program stopped too early"
    )


def test_a_reader_oversleeps_without_the_barriers_of_the_kernel() -> None:
    barriers = {
        (e.scenario, e.place.function): e.fault
        for e in explorations()
        if e.place and e.place.file == "orders/futex.c" and e.weakening == "no fence"
    }
    sleeps = {scenario for scenario, function in barriers if function == "enter"}
    assert sleeps == {"sleep-topic", "sleep-namespace", "sleep-name"}
    assert all(barriers[scenario, "enter"] and barriers[scenario, "wake"] for scenario in sleeps)


def test_each_weakened_order_is_found_or_redundant_for_a_reason() -> None:
    faults: dict[tuple[Place, str], set[str | None]] = defaultdict(set)
    for e in explorations():
        if e.place and e.place.file.startswith("core/"):
            faults[e.place, e.weakening].add(e.fault)
    listed = tomllib.loads(REDUNDANT.read_text())["order"]
    harmless = {key for key, found in faults.items() if found == {None}}
    assert len(faults) - len(harmless) > 40
    unlisted = {
        (place.file, place.code, place.function, weakening)
        for place, weakening in harmless
        if not any(is_meant(row, place, weakening) for row in listed)
    }
    assert unlisted == set(), "these weakenings cause no fault, and redundant.toml does not say why"
    stale = [row for row in listed if not any(is_meant(row, *key) for key in harmless)]
    assert stale == [], "in these rows, the weakening causes a fault, or the code is gone"
    assert all(row["reason"].endswith(".") for row in listed)


def is_meant(row: dict[str, str], place: Place, weakening: str) -> bool:
    """Return whether a row of redundant.toml means this weakening at this place."""
    return (
        row["weakening"] == weakening
        and row["file"] == place.file
        and row["code"] in place.code
        and row.get("function", place.function) == place.function
    )

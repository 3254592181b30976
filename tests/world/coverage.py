"""Measure which code of the product simulated worlds reach: see `make world-coverage`.

Three groups of code are measured: the lines of the daemon's loop path, the lines of the client
core, and the branches of recovery. `not_covered.toml` lists the code that worlds leave to other
tests: functions of the shell (the code around the simulated parts), which are not counted, and
branches that no world takes. Entries name functions and source text, so that they survive edits of
other lines.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from coverage import Coverage

from world.find_bugs import ROOT
from world.runs import Seeds, run_seeds

LIST = Path(__file__).with_name("not_covered.toml")
EXIT = "end of the function"
GROUPS: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "loop path": ("lines", 0.90, (
        "daemon/admin.py", "daemon/client_watch.py", "daemon/clock.py", "daemon/commands.py",
        "daemon/grace.py", "daemon/loop.py", "daemon/pending_acks.py", "daemon/reaper.py",
        "daemon/replies.py", "daemon/retention.py", "daemon/snapshot.py", "daemon/wal.py",
    )),
    "client core": ("lines", 0.90, (
        "clients/batch.py", "clients/core.py", "clients/jobs.py", "clients/operations.py",
        "clients/packing.py", "clients/retries.py", "clients/session.py", "clients/stream.py",
        "clients/subscriber.py",
    )),
    "recovery": ("branches", 0.95, (
        "daemon/recovery.py", "daemon/replacement.py", "daemon/store.py", "daemon/wal_birth.py",
    )),
}  # fmt: skip
"""For each group: (unit to count, fraction that worlds have to reach, files).

`other_group` in `not_covered.toml` moves single functions to another group.
"""


class Branch(NamedTuple):
    """A branch that no world took."""

    file: str
    function: str
    at: str
    """Text of the line that branches."""
    to: str
    """Text of the line that was not reached from line `at`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The possible list entries for this branch, from the least to the most exact entry."""
        where = f"{self.file} {self.function}"
        return where, f"{where}: {self.at}", f"{where}: {self.at} -> {self.to}"


class Listed:
    """Contents of `not_covered.toml`, and a record of the entries that have been used."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.shell = _reasons(document["shell"], "functions")
        self.missed = _reasons(document["missed"], "branches")
        self.moved: dict[str, str] = document["other_group"]
        self._unused = {*self.shell, *self.missed, *self.moved}

    def is_shell(self, name: str) -> bool:
        """Return whether a function belongs to the shell. `name`: the file and the function,
        separated by a space."""
        self._unused.discard(name)
        return name in self.shell

    def group(self, name: str, usual: str) -> str:
        """Return the group of a function. `usual`: the group of its file, to which most functions
        belong."""
        self._unused.discard(name if name in self.moved else "")
        return self.moved.get(name, usual)

    def reason(self, branch: Branch) -> str | None:
        """Return the reason why no world takes a branch; None if the list has none."""
        found = [name for name in branch.names if name in self.missed]
        self._unused.difference_update(found)
        return self.missed[found[-1]] if found else None

    @property
    def unused(self) -> list[str]:
        """Entries that match nothing: the code has changed, or a world takes the branch."""
        return sorted(self._unused)


def _reasons(tables: list[dict[str, Any]], names: str) -> dict[str, str]:
    return {name: table["reason"] for table in tables for name in table[names]}


class Figures:
    """The sums of a group: how many lines and branches it has, and how many of them worlds
    reached."""

    def __init__(self) -> None:
        self.lines = self.lines_reached = self.branches = self.branches_taken = 0

    def add(self, summary: dict[str, int]) -> None:
        """Add the line and branch counts of a function."""
        self.lines += summary["num_statements"]
        self.lines_reached += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_taken += summary["covered_branches"]

    def share(self, unit: str) -> float:
        """Return the fraction of lines reached, or of branches taken. `unit`: "lines" or
        "branches"."""
        if unit == "lines":
            return self.lines_reached / self.lines
        return self.branches_taken / self.branches


def _branches(file: str, function: str, found: dict[str, Any]) -> Iterator[Branch]:
    texts = (ROOT / file).read_text().splitlines()
    for at, to in found["missing_branches"]:
        reached = texts[to - 1].strip() if to > 0 else EXIT
        yield Branch(file, function, texts[at - 1].strip(), reached)


def measure(seeds: range) -> tuple[dict[str, Any], dict[int, str]]:
    """Run worlds under coverage. Return (coverage report by file, failures by seed)."""
    files = sorted({file for _, _, files in GROUPS.values() for file in files})
    coverage = Coverage(data_file=None, branch=True, include=[str(ROOT / file) for file in files])
    with tempfile.TemporaryDirectory() as folder:
        with coverage.collect():
            runs = list(run_seeds(seeds, 1))
        out = Path(folder) / "coverage.json"
        coverage.json_report(outfile=str(out))
        found = json.loads(out.read_text())["files"]
    failures = {one.seed: one.failure for one in runs if one.failure is not None}
    return {str((ROOT / file).resolve().relative_to(ROOT)): found[file] for file in found}, failures


class Result:
    """The line and branch counts of each group, and the branches that no world took."""

    def __init__(self, listed: Listed, report: dict[str, Any]) -> None:
        self.figures = {group: Figures() for group in GROUPS}
        self.missed: dict[str, list[Branch]] = {group: [] for group in GROUPS}
        for group, (_, _, files) in GROUPS.items():
            for file in files:
                self._add(listed, group, file, report[file]["functions"])

    def _add(self, listed: Listed, group: str, file: str, functions: dict[str, Any]) -> None:
        """Add the functions of a file. Statements outside of functions run at import and are not
        counted."""
        for function, found in functions.items():
            name = f"{file} {function}"
            if function and not listed.is_shell(name.partition("@")[0]):
                own = listed.group(name, group)
                self.figures[own].add(found["summary"])
                self.missed[own] += _branches(file, function, found)


def _document(listed: Listed, result: Result) -> dict[str, Any]:
    """Return the figures as JSON."""
    groups: dict[str, Any] = {}
    for group, (unit, least, _) in GROUPS.items():
        figures, missed = result.figures[group], result.missed[group]
        groups[group] = {
            "lines": figures.lines, "lines_reached": figures.lines_reached,
            "branches": figures.branches, "branches_taken": figures.branches_taken,
            "demanded": {unit: least}, "reached": {unit: round(figures.share(unit), 4)},
            "missed_with_a_reason": sum(listed.reason(one) is not None for one in missed),
            "missed_without_a_reason": sum(listed.reason(one) is None for one in missed),
        }  # fmt: skip
    return {"groups": groups, "functions_of_the_shell": len(listed.shell)}


def _errors(listed: Listed, failures: dict[int, str]) -> list[str]:
    """Describe why the figures are invalid."""
    found = [f"seed {seed} failed: {failure}" for seed, failure in failures.items()]
    return found + [
        f"{LIST.name}: nothing missed matches the entry {name}" for name in listed.unused
    ]


def _gaps(listed: Listed, result: Result) -> Iterator[str]:
    """Describe each group below its demanded fraction, and each missed branch without a reason."""
    for group, (unit, least, _) in GROUPS.items():
        if (share := result.figures[group].share(unit)) < least:
            yield f"{group}: {share:.1%} of the {unit} were reached, {least:.0%} are demanded"
    missed = {branch: None for group in GROUPS for branch in result.missed[group]}
    yield from (f"no reason: {one.names[-1]}" for one in missed if listed.reason(one) is None)


@click.command()
@click.argument("seeds", type=Seeds())
def main(seeds: tuple[int, int | None]) -> None:
    """Run the worlds of SEEDS under coverage. Print the figures as JSON, and each missed branch
    that has no reason. Exit with 1 if a world failed, a group is below its demanded fraction, a
    missed branch has no reason, or the list is out of date."""
    first, last = seeds
    if last is None:
        raise click.BadParameter("the range of seeds needs an end")
    listed = Listed(tomllib.loads(LIST.read_text()))
    report, failures = measure(range(first, last + 1))
    result = Result(listed, report)
    document = _document(listed, result)
    click.echo(json.dumps({"seeds": last + 1 - first, **document}, indent=1))
    errors = [*_gaps(listed, result), *_errors(listed, failures)]
    for text in errors:
        click.echo(text, err=True)
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()

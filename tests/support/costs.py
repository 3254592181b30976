"""The cost of each test: CPU and wall-clock time, including all processes that the test starts.

A pytest plugin. At the end of a run it prints the ten slowest tests. It also prints each test of
`make test` that uses more than `BUDGET_S` of CPU without a stated reason:
`@pytest.mark.costly("reason")`. The limit is on CPU time because other work on the machine hardly
affects it. Fixtures that several tests share have rows of their own.

With `--cpu-limit SECONDS`, the run fails if a test without a reason uses more CPU time. `.ci/run`
sets this limit to six times the budget, because machines differ. With `--costs FILE`, the rows are
written to the file as lines of JSON instead of printed. `python tests/support/costs.py FILE...`
then prints the slowest tests of several runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiers import tier_of

BUDGET_S = 5.0
"""Maximum CPU time of a test in `make test` that states no reason."""
SLOWEST = 10
_TICKS = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """Resources that one test, or one shared fixture, used."""

    name: str
    tier: str
    wall_s: float
    cpu_s: float
    reason: str


def cpu_s() -> float:
    """Return the CPU time of this process and its descendants, including ended children that were
    waited for."""
    times = os.times()
    spent = times.user + times.system + times.children_user + times.children_system
    return spent + sum(map(_ticks, _children(os.getpid()))) / _TICKS


def _children(pid: int) -> Iterator[int]:
    """Yield all descendants of a process."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # the thread or the process has ended
            continue
        for child in map(int, found):
            yield child
            yield from _children(child)


def _ticks(pid: int) -> int:
    """Return the user and system time, in clock ticks, of a process and of the children that it has
    waited for."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return sum(map(int, line.rpartition(")")[2].split()[11:15]))


class Meter:
    """Measurement of the tests in one process."""

    def __init__(self) -> None:
        self.shared: list[tuple[str, float, float]] = []
        """Shared fixtures that the running test has created, as (name, wall-clock time, CPU
        time)."""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.shared.clear()
        self.started = time.monotonic(), cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope not in ("session", "module"):
            return (yield)
        before, earlier = (time.monotonic(), cpu_s()), len(self.shared)
        made = yield
        used = time.monotonic() - before[0], cpu_s() - before[1]
        inner = self.shared[earlier:]  # fixtures that this fixture requested have their own rows
        own = [used[n] - sum(row[n + 1] for row in inner) for n in (0, 1)]  # type: ignore[misc]
        self.shared.append((f"fixture {fixturedef.argname}", own[0], own[1]))
        return made

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown":
            wall, cpu = time.monotonic() - self.started[0], cpu_s() - self.started[1]
            wall -= sum(row[1] for row in self.shared)
            cpu -= sum(row[2] for row in self.shared)
            costly = item.get_closest_marker("costly")
            report.user_properties += [
                ("tier", tier_of(item)), ("cost", [wall, cpu]), ("shared", list(self.shared)),
                ("reason", costly.args[0] if costly else ""),
            ]  # fmt: skip
        return report


class Report:
    """The costs of a run, from all its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.limit_s: float | None = config.getoption("--cpu-limit")
        self.file: str | None = config.getoption("--costs")
        self.rows: list[Cost] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        if report.when != "teardown" or "cost" not in properties:
            return
        wall, cpu = properties["cost"]
        self.rows.append(Cost(report.nodeid, properties["tier"], wall, cpu, properties["reason"]))
        self.rows += (
            Cost(name, "", wall, cpu, "shared") for name, wall, cpu in properties["shared"]
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.file:
            Path(self.file).write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        if self.limit_s is not None and any(overruns(self.rows, self.limit_s)):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.file:
            for line in summary(self.rows):
                terminalreporter.write_line(line)
        for row in overruns(self.rows, self.limit_s or BUDGET_S):
            terminalreporter.write_line(
                f"{row.name}: {row.cpu_s:.1f} s of CPU without a reason; "
                f"{BUDGET_S:.0f} s are the budget"
            )


def overruns(rows: Iterable[Cost], limit_s: float) -> Iterator[Cost]:
    """Yield the tests of `make test` that used more than `limit_s` of CPU and state no reason."""
    return (row for row in rows if row.tier in ("check", "test") and row.cpu_s > limit_s
            and not row.reason)  # fmt: skip


def summary(rows: Iterable[Cost]) -> Iterator[str]:
    """Yield lines of text: the slowest tests, and the sums of all tests."""
    rows = sorted(rows, key=lambda row: row.wall_s, reverse=True)
    if len(rows) > 1:
        yield f"{'wall s':>8} {'CPU s':>8}  slowest tests"
        for row in rows[:SLOWEST]:
            yield f"{row.wall_s:8.1f} {row.cpu_s:8.1f}  {row.name}"
        wall, cpu = sum(row.wall_s for row in rows), sum(row.cpu_s for row in rows)
        yield f"{wall:8.1f} {cpu:8.1f}  all {len(rows)}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit", type=float, metavar="SECONDS", help="fail if a test uses more CPU seconds"
    )
    parser.addoption("--costs", metavar="FILE", help="write the cost of each test, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"costly(reason): uses more than {BUDGET_S:.0f} s of CPU")
    config.pluginmanager.register(Meter())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config))


def main(files: list[str]) -> None:
    rows = [
        Cost(*json.loads(line)) for file in files for line in Path(file).read_text().splitlines()
    ]
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

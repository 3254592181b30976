"""The order and grouping of tests that run in parallel.

A pytest plugin, for runs with `-n` and for several runs at the same time. A test with the mark
`alone` runs while no other test of this checkout runs. Such tests come last. Tests that share a
fixture of their module run in one worker, so that the fixture is created once. These tests come
first, because such a fixture may take minutes: a guest machine, containers, packages.

Tests in tests/spark share one JVM. They run in a process of their own, because each worker of
pytest-xdist imports all files that it collects. So no other process imports PySpark.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

SPARK = Path(__file__).resolve().parents[1] / "spark"
IMPORTER = pytest.StashKey[str]()
"""The first test or test file after which PySpark was imported in this process."""
FOREIGN = pytest.StashKey[list[str]]()
"""The IMPORTER of each process that imported PySpark but ran no Spark tests."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: runs while no other test runs")
    config.stash[FOREIGN] = []


def of_spark(item: pytest.Item) -> bool:
    return SPARK in item.path.parents


def _shares(item: pytest.Item) -> bool:
    """Return whether a test uses a fixture that its file shares between tests."""
    known: dict[str, Sequence[pytest.FixtureDef[Any]]]
    known = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    fixtures = (definitions[-1] for definitions in known.values())
    return any(
        one.scope in ("session", "module") and one.baseid.endswith(".py") for one in fixtures
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Group tests before pytest-xdist reads the groups. Put groups first, and tests that run alone
    last."""
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group("alone"))
        elif of_spark(item):
            item.add_marker(pytest.mark.xdist_group("spark"))
        elif _shares(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=_place)
    yield


def _place(item: pytest.Item) -> int:
    if item.get_closest_marker("alone"):
        return 2
    return 0 if item.get_closest_marker("xdist_group") else 1


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if pytest-xdist ignores the groups, because each worker would then create the shared
    fixtures."""
    if getattr(session.config.option, "loadgroup", False):
        grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
        assert all("@" in item.nodeid for item in grouped), "pytest-xdist does not know this pytest"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the lock that the test needs. The time limit of the test begins after that."""
    folder = item.config.rootpath / "build"
    folder.mkdir(exist_ok=True)
    with (folder / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            _note_pyspark(item)
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may still have the file open


# ---- PySpark in one process --------------------------------------------------------------------


def _note_pyspark(node: pytest.Collector | pytest.Item) -> None:
    if "pyspark" in sys.modules:
        node.config.stash.setdefault(IMPORTER, node.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _note_pyspark(collector)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a process that ran no Spark tests imported PySpark. A worker only reports
    this to the main process, because pytest-xdist ignores the exit code of a worker."""
    config = session.config
    importer = config.stash.get(IMPORTER, None)
    if importer is not None and not any(map(of_spark, session.items)):
        if hasattr(config, "workeroutput"):
            config.workeroutput["importer"] = importer
        else:
            config.stash[FOREIGN].append(importer)
    if config.stash[FOREIGN]:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Store the report of a worker that has finished."""
    output = getattr(node, "workeroutput", {})  # a crashed worker has no output
    if "importer" in output:
        node.config.stash[FOREIGN].append(output["importer"])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for importer in config.stash[FOREIGN]:
        terminalreporter.write_line(f"{importer} imported PySpark outside of tests/spark")

"""Which tests may run at once.

A pytest plugin, for runs with `-n` and for runs next to each other. A test that is marked `alone`
runs while no other test of this checkout does; such tests come last. Tests that share a fixture of
their module go to one worker, so that it is made once.

Tests in tests/spark share one JVM. They run in a process of their own, because each worker of
pytest-xdist imports all files that it collects: no other process imports PySpark.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

SPARK = Path(__file__).resolve().parents[1] / "spark"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: runs while no other test does")


def of_spark(item: pytest.Item) -> bool:
    return SPARK in item.path.parents


def _shares(item: pytest.Item) -> bool:
    """Whether it uses a fixture that the tests of its file share."""
    known: dict[str, Sequence[pytest.FixtureDef[Any]]]
    known = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    fixtures = (definitions[-1] for definitions in known.values())
    return any(
        one.scope in ("session", "module") and one.baseid.endswith(".py") for one in fixtures
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Groups tests before pytest-xdist looks, and puts those that run alone behind all others."""
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group("alone"))
        elif of_spark(item):
            item.add_marker(pytest.mark.xdist_group("spark"))
        elif _shares(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fails if pytest-xdist does not group: fixtures of modules would be made by each worker."""
    if getattr(session.config.option, "loadgroup", False):
        grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
        assert all("@" in item.nodeid for item in grouped), "pytest-xdist does not know this pytest"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Waits for its lock; the time limit of the test begins after that."""
    folder = item.config.rootpath / "build"
    folder.mkdir(exist_ok=True)
    with (folder / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may have the file open still


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a process without tests of Spark that imported PySpark."""
    if "pyspark" in sys.modules and not any(map(of_spark, session.items)):
        raise pytest.UsageError("a test outside of tests/spark imported PySpark")

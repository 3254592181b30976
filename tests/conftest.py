"""Fixtures that several test files share.

A test that needs a feature of the machine calls needs() of machine.py. If the feature is missing,
the test is skipped, or fails if $PURGATORYD_REQUIRE names it.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from flight_runs import FlightRuns, run_flights
from real_daemon import Daemon, StartDaemon, eventually, released, remove_arena_files
from small_plans import MANY_PLANS, SMALL_PLANS

from purgatoryd.pipeline.session import ON_ONE_BOX, session
from purgatoryd.shm_layout.paths import paths_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytest_plugins = "tiers", "costs", "scheduling", "transports", "node_client"

DAEMONS = pytest.StashKey[list[Daemon]]()
"""The daemons that a test started."""

# A shell starts background jobs with SIGINT ignored. The processes that the tests start would
# inherit this setting.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state and the messages of its daemons to the report of a failed test."""
    report = yield
    if report.when == "call" and report.failed:
        for one in item.stash.get(DAEMONS, []):
            state = "running" if one.running else f"ended with {one.process.returncode}"
            report.sections.append((f"daemon {one.name}, {state}", one.stderr))
    return report


@pytest.fixture
def daemon_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a private $PURGATORYD_DIR; its path is short because socket paths are limited to 107
    bytes.

    At the end of the test, remove the directory and the arena files of every daemon that has locked
    a name in it. Wait for its lock first: the shards of a killed supervisor stop by themselves, and
    they remove their files.
    """
    directory = Path(tempfile.mkdtemp(prefix="purgatoryd-test-"))
    monkeypatch.setenv("PURGATORYD_DIR", str(directory))
    yield directory
    for lock in directory.glob("*.lock"):
        eventually(partial(released, lock))
        remove_arena_files(paths_in(directory, lock.stem))
    shutil.rmtree(directory)


@pytest.fixture(params=["arena", "socket"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test twice: subscribers read the arena, or their notices come through a socket, as on a
    kernel without futex_waitv()."""
    if request.param == "socket":
        monkeypatch.setattr("purgatoryd.clients.subscriber.can_sleep", lambda: False)
    return str(request.param)


@pytest.fixture
def daemon(
    request: pytest.FixtureRequest, daemon_dir: Path, transport: str
) -> Iterator[StartDaemon]:
    """Start daemons in the test's own directory, and stop them cleanly at the end.

    Clients that the test creates in its own process find them by name.
    """
    started: list[Daemon] = []
    request.node.stash[DAEMONS] = started

    def start(name: str = "demo", *args: str, env: Mapping[str, str] | None = None) -> Daemon:
        started.append(Daemon(name, daemon_dir, args, env))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="session")
def flight_runs(tmp_path_factory: pytest.TempPathFactory) -> FlightRuns:
    """WALs of two days of flight data, written once for the whole run."""
    return run_flights(tmp_path_factory.mktemp("flights"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one Spark session of the whole run, started when the first test asks for it.

    A command that finds this session applies the default settings again. So the fixture changes the
    defaults themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SMALL_PLANS | MANY_PLANS).items():
            patch.setitem(ON_ONE_BOX, name, value)
        made = session("local[2,2]", name="tests")
        yield made
        made.stop()

"""Commands with --follow: only a signal and permanent errors end them, not temporary errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import wal_segment_writer as sw
from click.testing import CliRunner
from made_bronze import Plan, put, segments_of
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from purgatoryd.cli import following
from purgatoryd.cli.app import app
from purgatoryd.cli.following import follow
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.parts import Layer
from purgatoryd.shm_layout.errors import DaemonUnreachable, LakeBroken, LakeInUse

pytestmark = pytest.mark.tier("test")

FULL = "No space left on device"
PASSING = [
    (LakeInUse("lock"), "LakeInUse"),
    (DaemonUnreachable("demo", "nowhere", 0.0), "DaemonUnreachable"),
    (OSError(28, FULL), "BadPath"),
    (PySparkException("a task was lost\nand the JVM's stack"), "PySparkException"),
    (
        Py4JError(f"An error occurred while calling o7.parquet.\njava.io.IOException: {FULL}"),
        "BadPath",
    ),
]
"""Temporary errors, each with the name under which it is reported."""


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Skip the pauses between iterations; return the list of their lengths in seconds."""
    pauses: list[float] = []
    monkeypatch.setattr(following, "sleep", pauses.append)
    return pauses


def iterations(*steps: BaseException | None) -> Callable[[], None]:
    """Return a function that takes one step per call: it raises the step's exception, or returns if
    the step is None."""
    left = list(steps)

    def iteration() -> None:
        step = left.pop(0)
        if step is not None:
            raise step

    return iteration


@pytest.mark.parametrize(("error", "name"), PASSING, ids=lambda one: type(one).__name__)
def test_a_temporary_error_is_reported_and_retried(
    error: Exception, name: str, slept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    follow(iterations(error, error, error, None, error, KeyboardInterrupt()), lambda: 7.0, True)
    assert slept == [1, 2, 4, 7, 1]
    reported = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [one["again_in_s"] for one in reported] == [1, 2, 4, 1]
    assert {one["error"] for one in reported} == {name}


def test_the_pause_grows_up_to_a_minute(slept: list[float]) -> None:
    follow(iterations(*[PASSING[0][0]] * 2000, KeyboardInterrupt()), lambda: 1.0, False)
    assert max(slept) == following.MOST_S == slept[-1]


@pytest.mark.parametrize("error", [LakeBroken("file", "is gone"), AssertionError()])
def test_a_permanent_error_ends_the_command(error: Exception, slept: list[float]) -> None:
    with pytest.raises(type(error)):
        follow(iterations(None, error), lambda: 1.0, False)
    assert slept == [1]


def test_sigterm_ends_an_iteration_at_once(slept: list[float]) -> None:
    ended: list[str] = []

    def iteration() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            ended.append("cleanly")

    before = signal.getsignal(signal.SIGTERM)
    follow(iteration, lambda: 1.0, False)
    assert (ended, slept) == (["cleanly"], [])
    assert signal.getsignal(signal.SIGTERM) == before


def test_ship_waits_for_the_lock_and_ends_on_sigterm(tmp_path: Path) -> None:
    wal, root = tmp_path / "wal" / "demo", tmp_path / "lake"
    sw.write(wal, sw.segment([*sw.names(), sw.arm(3)]))
    sw.write(wal, sw.segment([sw.arm(4)], 4, first_group=2, seal=False), 4)
    root.mkdir()
    command = (sys.executable, "-m", "purgatoryd.cli", "pipeline", "ship", "--follow", "--name",
               "demo", "--wal-dir", wal.parent, "--lake", root)  # fmt: skip
    with ExitStack() as held:
        held.enter_context(Lake(root).writing(sw.DAEMON.hex()))
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        assert process.stdout is not None
        assert "retrying in 1 s" in process.stderr.readline()
    assert process.stdout.readline().startswith("bronze")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0


def test_ingest_goes_on_when_the_tables_are_free(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spark  # the command uses this Spark session
    for segment in segments_of(Plan(20)):
        put(Lake(tmp_path), segment)
    held = ExitStack()
    held.enter_context(Layer(tmp_path, "silver").writing())
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 2:
            raise KeyboardInterrupt
        held.close()

    monkeypatch.setattr(following, "sleep", sleep)
    options = ("--lake", str(tmp_path), "--follow", "--every", "5s", "--json")
    done = CliRunner().invoke(app, ["pipeline", "ingest", *options])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"silver": 1, "gold": 1}
    assert json.loads(done.stderr)["error"] == "LakeInUse"
    assert pauses == [1, 5]

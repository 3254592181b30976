"""The commands of the cold tier and of the agent, as shown on their pages."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import wal_segment_writer as sw
from cold_driver import reminders, spark_of_python
from command_line import command, reported
from pyspark.sql import SparkSession
from real_daemon import Daemon, StartDaemon, stats

from purgatoryd.cli import pipeline_cold
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Client
from purgatoryd.shm_layout.errors import LakeInUse

pytestmark = pytest.mark.tier("test")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipeline.md"


def consoles() -> list[str]:
    """Return the console blocks of docs/pipeline.md that use the cold tier's commands."""
    shown = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in shown if "pipeline cold" in block]


@pytest.mark.tier("all")
def test_the_page_on_parked_timers(
    spark: SparkSession, daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("wal", "lake"):
        Path(name).mkdir()
    demo = daemon("demo", "--wal-dir", str(tmp_path / "wal"))
    setting, *others = consoles()[1].splitlines()
    assert command(*shlex.split(setting)[1:]).exit_code == Exit.DONE
    with Client("demo", namespace="shop") as client:
        ticket = client.add("far", 8 * 3600, payload=b"its payload").ticket
    due = datetime.now(UTC) + timedelta(hours=8, minutes=1)
    once = {"--follow ": "", "--every 5m": f"--window {due:%Y-%m-%dT%H:%M:%SZ}"}
    for line in others:
        for shown, run in once.items():
            line = line.replace(shown, run)
        assert command(*shlex.split(line)[1:]).exit_code == Exit.DONE
    assert (stats(demo)["parked"], stats(demo)["live"]) == (0, 1)
    with Client("demo", namespace="shop") as client:
        found = client.get("far")
    assert found is not None
    assert (found.ticket, found.payload) == (ticket, b"its payload")
    collect = ("pipeline", "cold", "collect", "--lake", "lake", "--wal-dir", "wal")
    assert reported(*collect, "--name", "demo")["rows"] == 0


def for_this_session(block: str, demo: Daemon) -> str:
    """Return a code block with absolute paths, because the JVM has another working directory."""
    block = block.replace('"reminders.csv"', repr(str(Path("reminders.csv").resolve())))
    return block.replace(
        '.option("bulk_load"', f'.option("directory", {str(demo.dir)!r}).option("bulk_load"'
    )


@pytest.mark.tier("all")
def test_the_page_from_bulk_load_to_verify(
    spark: SparkSession, daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = daemon()
    monkeypatch.chdir(tmp_path)
    Path("lake").mkdir()
    reminders(Path("reminders.parquet"))
    shown, _ = consoles()
    for line in shown.splitlines():
        result = command(*shlex.split(line)[1:])
        assert result.exit_code == Exit.DONE, (line, result.output)
    assert stats(demo)["live"] == 9  # the timers of ten minutes, except the cancelled timer
    figures = reported("pipeline", "cold", "status", "--lake", "lake")
    assert (figures["rows"], figures["promoted"], figures["promoting"]) == (10, 9, None)
    again = command(*shlex.split(shown.splitlines()[2])[1:])
    assert (again.exit_code, again.output) == (Exit.DONE, "")
    Path("reminders.csv").write_text("key,deadline\na,2031-01-01T00:00:00Z\n")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if "import gold" not in block:
            exec(for_this_session(block, demo), names)
    assert stats(demo)["live"] == 10
    bulk_load = (
        "pipeline",
        "cold",
        "bulk-load",
        "reminders.csv",
        "--format",
        "csv",
        "--lake",
        "lake",
    )
    refused = command(*bulk_load)
    assert (refused.exit_code, "1 keys have a timer in the tier" in refused.stderr) == (
        Exit.USAGE, True,
    )  # fmt: skip
    replacing = (*bulk_load, "--replace", "--name", "demo")
    assert command(*replacing).output.startswith("1 timers, version")
    assert reported(*replacing)["rows"] == 0
    assert reported("pipeline", "cold", "verify", "--lake", "lake")["pending"] == 11


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    spark_of_python(monkeypatch)
    return tmp_path


def test_reading_commands_create_nothing(lake: Path) -> None:
    assert reported("pipeline", "cold", "status", "--lake", str(lake))["version"] == 0
    assert list(lake.iterdir()) == []


def test_cancels_from_the_command_line_and_from_files(lake: Path) -> None:
    base = ("pipeline", "cold", "cancel", "--lake", str(lake))
    assert reported(*base, "a", "b") == {"keys": 2, "daemon": {}}
    assert "not asked" in command(*base, "c0ffee", "--key-type", "hex").output
    file = lake / "keys.parquet"
    pq.write_table(pa.table({"key": ["a", "b", "c"]}), file)
    assert reported(*base, "--file", str(file))["keys"] == 3
    pq.write_table(pa.table({"other": ["a"]}), file)
    assert command(*base, "--file", str(file)).exit_code == Exit.USAGE
    for bad in ((), ("a", "--file", str(file)), ("a", "--tcp", "h:1")):
        assert command(*base, *bad).exit_code == Exit.USAGE
    figures = reported("pipeline", "cold", "status", "--lake", str(lake))
    assert (figures["tombstones"], figures["version"]) == (6, 3)


def test_bad_places_are_refused(lake: Path) -> None:
    nowhere = str(lake / "nowhere")
    assert command("pipeline", "cold", "status", "--lake", nowhere).exit_code == Exit.UNUSABLE
    (lake / "cold" / "versions").mkdir(parents=True)
    (lake / "cold" / "versions" / "000000000001.json").write_text("[]")
    assert command("pipeline", "cold", "status", "--lake", str(lake)).exit_code == Exit.BROKEN
    promote = ("pipeline", "cold", "promote", "--lake", str(lake))
    assert command(*promote).exit_code == Exit.USAGE


@pytest.mark.parametrize(
    "arguments",
    [
        ("cold", "promote", "--every", "0s"), ("cold", "promote", "--every", "-1m"),
        ("ingest", "--follow", "--every", "-5s"), ("ingest", "--follow", "--every", "0s"),
        ("bulk-load-agent", ".", "--follow", "0s"), ("slow", "--limit", "-1s"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_invalid_spans_are_refused(arguments: tuple[str, ...], lake: Path) -> None:
    where = () if "bulk-load-agent" in arguments else ("--lake", str(lake))
    done = command("pipeline", *arguments, *where)
    assert done.exit_code == Exit.USAGE
    negative = arguments[-1].startswith("-")
    assert ("is not a duration" if negative else "is shorter than") in done.stderr


def test_a_promotion_keeps_to_its_rate(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []

    class Pace:
        def __init__(self, limit: float) -> None:
            reported.append(limit)

        def wait(self, rows: int) -> None:
            reported.append(rows)

    def promote(_spark: Any, _tier: Any, _until: int, _hot: Any, pace: Any) -> list[Any]:
        pace(7)
        return []

    monkeypatch.setattr("purgatoryd.pipeline.pace.Pace", Pace)
    monkeypatch.setattr("purgatoryd.pipeline.promote.promote", promote)
    monkeypatch.setattr("purgatoryd.pipeline.session.session", lambda *_: None)
    window = ("--window", "2030-01-01T00:00Z", "--rate", "5")
    done = command("pipeline", "cold", "promote", "--lake", str(lake), *window)
    assert done.exit_code == Exit.DONE, done.output
    assert reported == [5.0, 7]


def test_windows_go_to_the_daemon_one_ahead(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command repeats a promotion that failed because another process has the promoter's lock.

    A signal ends the command.
    """
    minute_ns, noon_ns = 60 * 10**9, 1_893_499_200 * 10**9
    now_ns = [noon_ns + 7 * minute_ns]
    asked: list[int] = []
    slept: list[float] = []
    began: list[Any] = []

    def promote(_spark: Any, _tier: Any, until_ns: int, *_: Any) -> list[Any]:
        asked.append(until_ns - noon_ns)
        if len(asked) == 1:
            raise LakeInUse("promoter")
        return []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt
        now_ns[0] += round(seconds * 1e9)

    monkeypatch.setattr("purgatoryd.pipeline.promote.promote", promote)
    monkeypatch.setattr("purgatoryd.pipeline.session.session", lambda *of: began.append(of))
    monkeypatch.setattr("purgatoryd.cli.following.sleep", sleep)
    monkeypatch.setattr(pipeline_cold, "time", SimpleNamespace(time_ns=lambda: now_ns[0]))
    conf = ("--conf", "spark.ui.enabled=true", "--conf", "a=b=c", "--master", "local[1]")
    done = command("pipeline", "cold", "promote", "--lake", str(lake), "--every", "5m", *conf)
    assert done.exit_code == Exit.DONE, done.output
    assert asked == [15 * minute_ns, 15 * minute_ns, 20 * minute_ns]
    assert slept == [1, 2 * 60 + 59, 300]
    assert began == [("local[1]", {"spark.ui.enabled": "true", "a": "b=c"})]
    wrong = command("pipeline", "cold", "compact", "--lake", str(lake), "--conf", "a")
    assert wrong.exit_code == Exit.USAGE
    assert "'a' is not KEY=VALUE" in wrong.stderr


def test_an_invalid_hour_is_refused(lake: Path) -> None:
    compact = ("pipeline", "cold", "compact", "--lake", str(lake), "--hour")
    assert command(*compact, "noon").exit_code == Exit.USAGE


@pytest.mark.usefixtures("spark")
def test_wals_of_another_level_are_refused(lake: Path, tmp_path: Path) -> None:
    """A WAL is in WAL_DIR/NAME. `ingest` takes WAL_DIR and refuses WAL_DIR/NAME; `trace` takes
    WAL_DIR/NAME and refuses WAL_DIR."""
    wal = tmp_path / "wal" / "demo"
    sw.write(wal, sw.segment(sw.names(), seal=False))
    below = command("pipeline", "ingest", "--lake", str(lake), "--wal-dir", str(wal))
    assert (below.exit_code, "is a WAL" in below.stderr) == (Exit.UNUSABLE, True)
    above = command("pipeline", "trace", "a", "--lake", str(lake), "--wal-dir", str(wal.parent))
    assert (above.exit_code, "has no WAL segments" in above.stderr) == (Exit.UNUSABLE, True)


@pytest.mark.usefixtures("spark")
def test_a_file_of_another_format_is_named(lake: Path, tmp_path: Path) -> None:
    file = tmp_path / "reminders.csv"
    file.write_text("key,deadline\norder:1,2030-01-01T00:00:00Z\n")
    done = command("pipeline", "cold", "bulk-load", str(file), "--lake", str(lake))
    assert done.exit_code == Exit.USAGE
    assert "reminders.csv cannot be read as parquet; see --format" in done.stderr


def test_the_agent_adds_and_reports(daemon: StartDaemon, tmp_path: Path) -> None:
    from cold_driver import filed, files_writer

    demo = daemon()
    agent = ("pipeline", "bulk-load-agent", str(tmp_path), "--name", "demo")
    assert command(*agent).output == ""
    writer = files_writer(tmp_path)
    writer.commit([writer.write(iter([filed(0, 5, "demo")]))])
    assert reported(*agent)["counts"] == {"ADDED": 5}
    with Client("demo") as client:
        client.add("k1", 3600)
    writer = files_writer(tmp_path)
    writer.commit([writer.write(iter([filed(1, 3, "demo")]))])
    assert reported(*agent, code=Exit.REFUSED)["counts"] == {"ADDED": 1, "EXISTS": 1}
    (tmp_path / "demo" / "bad.parquet").write_bytes(b"nothing")
    writer = files_writer(tmp_path)
    writer.commit([writer.write(iter([filed(1, 3, "demo")]))])
    result = command(*agent)
    assert result.exit_code == Exit.BROKEN
    assert "bad.parquet: moved to refused" in result.output
    assert "1 added, 1 exists" in result.output
    assert command(*agent).output == ""
    assert stats(demo)["live"] == 1

"""Text output of commands: names cannot forge lines, and each figure is labelled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually

from purgatoryd.cli import units
from purgatoryd.cli.arena import human
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Admin, Client

pytestmark = pytest.mark.tier("all")

BASE = [sys.executable, "-m", "purgatoryd.cli"]
HOSTILE = "a\x1b[2Jb\nc\u202ed[red]e"
SHOWN = r"a\x1b[2Jb\nc\u202ed[red]e"


def cli(daemon: Daemon, *args: str) -> subprocess.CompletedProcess[str]:
    command = [*BASE, *args, "--name", daemon.name]
    return subprocess.run(
        command, env=daemon.env | {"COLUMNS": "300"}, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.fixture
def demo(daemon: StartDaemon) -> Daemon:
    return daemon("demo", "--capacity", "20000")


@pytest.mark.parametrize(
    "command",
    [
        ("list",), ("stats",), ("stats", "--topics"), ("namespace", "ls"),
        ("get", HOSTILE, "--namespace", HOSTILE), ("cancel", HOSTILE, "--namespace", HOSTILE),
        ("get", f"un{HOSTILE}", "--namespace", HOSTILE),
        ("namespace", "set", HOSTILE, "--quota-timers", "9"),
        ("add", HOSTILE, "--delay", "1h", "--mode", "replace", "--namespace", HOSTILE),
    ],
)  # fmt: skip
def test_control_characters_of_names_are_spelt_out(demo: Daemon, command: tuple[str, ...]) -> None:
    with Client("demo", namespace=HOSTILE) as client:
        client.add(HOSTILE, 3600, topic=HOSTILE, payload=HOSTILE.encode())
    out = cli(demo, *command).stdout
    assert SHOWN in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_json_has_names_as_they_are(demo: Daemon) -> None:
    with Client("demo", namespace=HOSTILE) as client:
        client.add(HOSTILE, 3600, topic=HOSTILE)
    record = json.loads(cli(demo, "list", "--json").stdout)
    assert (record["key"], record["namespace"], record["topic"]) == (HOSTILE,) * 3


@pytest.mark.tier("test")
def test_a_parked_timer_is_listed_as_parked(daemon: StartDaemon, tmp_path: Path) -> None:
    demo = daemon("demo", "--wal-dir", str(tmp_path))
    with Admin("demo") as admin:
        admin.set_namespace("shop", park_beyond_ns=3600 * 10**9)
    with Client("demo", namespace="shop") as client:
        client.add("near", 60)
        client.add("far", 7200)
    lines = cli(demo, "list").stdout.splitlines()
    (far,) = [line for line in lines if " far " in line]
    (near,) = [line for line in lines if " near " in line]
    assert ", parked, at 20" in far
    assert "parked" not in near
    lines = cli(demo, "list", "--json").stdout.splitlines()
    records = {record["key"]: record for record in map(json.loads, lines)}
    assert {key: r["status"] for key, r in records.items()} == {"near": "FOUND", "far": "PARKED"}
    shown_at, due_at = far.rpartition(" ")[2], records["far"]["due_at"]
    apart = datetime.fromisoformat(shown_at) - datetime.fromisoformat(due_at)
    assert abs(apart.total_seconds()) < 60  # each command reads two clocks
    assert far.startswith(("in 1h 59m ", "in 2h "))


def test_get_says_when_a_timer_is_due(demo: Daemon) -> None:
    with Client("demo") as client:
        client.add("k", 7200)
    (line,) = [x for x in cli(demo, "get", "k").stdout.splitlines() if x.startswith("due ")]
    assert line.split(maxsplit=1)[1].startswith(("in 2h, at ", "in 1h 59m, at "))
    at = line.split()[-1]
    left_s = datetime.fromisoformat(at).timestamp() - datetime.now().timestamp()
    assert 7000 < left_s < 7201
    record = json.loads(cli(demo, "get", "k", "--json").stdout)
    assert "due" not in record
    apart = datetime.fromisoformat(record["due_at"]) - datetime.fromisoformat(at)
    assert abs(apart.total_seconds()) < 60


def test_settings_and_slacks_have_units(demo: Daemon) -> None:
    lines = cli(demo, "namespace", "set", "shop", "--park-beyond", "0s").stdout.splitlines()
    assert ["park_beyond_ns", "0ns"] in map(str.split, lines)
    far = datetime.now(UTC) + timedelta(days=3, minutes=1)
    with Client("demo") as client:
        client.add("k", deadline=far, within=0.005)
    lines = cli(demo, "get", "k").stdout.splitlines()
    shown = dict(line.split(maxsplit=1) for line in lines if len(line.split()) > 1)
    assert shown["within_ns"] == "4.194ms"
    assert shown["deadline_at"].startswith(f"in 3d, {far.isoformat()[:19]}")
    assert shown["due"].startswith("in 3d, at ")
    assert "deadline_boot_ns" not in shown


@pytest.mark.parametrize("command", [["add", "k", "--delay", "1h"], ["stop"]])
def test_an_error_names_a_frozen_daemon(demo: Daemon, command: list[str]) -> None:
    os.kill(demo.pid, signal.SIGSTOP)
    try:

        def frozen() -> subprocess.CompletedProcess[str] | None:
            done = cli(demo, *command, "--timeout", "6s")
            return done if done.returncode == Exit.TIMEOUT else None

        done = eventually(frozen)
        assert done is not None
        assert f"daemon 'demo' is frozen: process {demo.pid} has not moved" in done.stderr
    finally:
        os.kill(demo.pid, signal.SIGCONT)


def test_a_reader_that_ends_early_is_no_error(demo: Daemon) -> None:
    with Client("demo") as client:
        client.add_many([(f"k{n}", 3600) for n in range(10_000)])
    process = subprocess.Popen(
        [*BASE, "list", "--name", demo.name], env=demo.env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(PATIENCE_S) == Exit.DONE
    process.stderr.close()


@pytest.mark.parametrize(("terminal", "columns", "exact"), [(True, 80, False), (True, 120, True),
                                                            (False, 80, True)])  # fmt: skip
def test_exact_times_need_a_wide_output(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, columns: int, exact: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    at = units.wall_in(-200 * units.NS_PER["s"])
    assert human("used_at", at) == "3m 20s ago" + f", {at}" * exact


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [("used_at", None, "-"), ("used_at", "never", "never"), ("again_in_s", 90.5, "1m 30s"),
     ("grace_ns", 60 * 10**9, "1m"), ("at", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z")],
)  # fmt: skip
def test_a_figure_is_shown_by_the_unit_in_its_name(field: str, value: object, text: str) -> None:
    assert human(field, value) == text

"""The daemon's states: their table, who is told of a move, and what can be seen from outside."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import StartDaemon
from real_daemon import PATIENCE_S, Daemon, boot_ns, eventually, stats
from test_cli import answer, cli

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Admin, Client, Subscriber
from purgatoryd.daemon import lifecycle
from purgatoryd.daemon.lifecycle import MEANING, MOVES, LifeCycle
from purgatoryd.daemon.supervisor import Supervisor
from purgatoryd.shm_layout import health
from purgatoryd.shm_layout.arena import NONE_NS, Reader
from purgatoryd.shm_layout.layout import (
    EVENTS_NAMESPACE,
    EVENTS_TOPIC,
    ClockKind,
    DaemonState,
    Degraded,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
FULL = "--capacity", "10"


class Manager:
    """A service manager's end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.settimeout(PATIENCE_S)

    def hears(self, line: str) -> list[str]:
        """All lines up to the first that begins so."""
        heard: list[str] = []
        while not any(one.startswith(line) for one in heard):
            heard += self.socket.recv(4096).decode().splitlines()
        return heard


@pytest.fixture
def manager(daemon_dir: Path) -> Iterator[Manager]:
    made = Manager(str(daemon_dir / "notify"))
    yield made
    made.socket.close()


# ---- the table -------------------------------------------------------------------------------


def test_every_state_has_its_moves_and_the_page_has_them_all() -> None:
    assert set(MOVES) == set(DaemonState)
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", page(), re.MULTILINE))
    for state, moves in MOVES.items():
        assert set(re.findall(r"`(\w+)`", rows[state.name.lower()])) == {
            move.name.lower() for move in moves if move != state
        }


def test_every_reason_has_a_sentence_and_a_place_on_the_page() -> None:
    assert set(MEANING) == set(Degraded)
    for reason in Degraded:
        assert f"| `{reason.names[0]}` |" in page()


def test_every_alarm_has_a_place_on_the_page() -> None:
    rules = DOCS.joinpath("monitoring", "purgatoryd.rules.yml").read_text()
    alarms = re.findall(r"alert: (\w+)", rules)
    assert re.findall(r"^\| `(Purgatoryd\w+)` \|", page(), re.MULTILINE) == alarms != []


def page() -> str:
    return DOCS.joinpath("operations.md").read_text()


def test_only_the_moves_of_the_table_are_made() -> None:
    for state, to in itertools.product(DaemonState, DaemonState):
        life = LifeCycle(Supervisor())
        life.state = state
        if to in MOVES[state]:
            life.enter(to)
            assert life.state == to
        else:
            with pytest.raises(AssertionError, match=f"no move from {state.name} to {to.name}"):
                life.enter(to)
            assert life.state == state


def test_who_is_crowded_stays_so_until_there_is_room_again() -> None:
    crowded = lifecycle._crowded
    assert [crowded(used, 100, before=False) for used in (89, 90)] == [False, True]
    assert [crowded(used, 100, before=True) for used in (79, 80)] == [False, True]


# ---- from outside ----------------------------------------------------------------------------


def status(real: Daemon, *args: str) -> tuple[dict[str, Any], int]:
    """What `purgatoryd status` prints, and its exit code."""
    done = CliRunner().invoke(app, ["status", "--name", real.name, "--json", *args])
    return json.loads(done.stdout), done.exit_code


def condition(real: Daemon, *args: str) -> tuple[str, int]:
    told, code = status(real, *args)
    return told["condition"], code


def test_a_daemon_from_ready_to_stopped(daemon: StartDaemon) -> None:
    real = daemon("demo")
    eventually(lambda: condition(real) == ("ready", Exit.DONE))
    assert status(real)[0]["pid"] == real.pid
    assert f", process {real.pid}, moved " in cli(real, "status").stdout
    with Client("demo") as client, Admin("demo") as admin:
        client.add("k", delay=3600)
        admin.stop(drain=True)
        eventually(lambda: condition(real) == ("draining", Exit.NEGATIVE))
        admin.resume()
        eventually(lambda: condition(real) == ("ready", Exit.DONE))
    real.stop()
    assert condition(real) == ("stopped", Exit.NO_DAEMON)
    assert answer(real, "stats")["daemon_state"] == "stopped"


def test_a_frozen_daemon_is_told_from_a_killed_one(daemon: StartDaemon) -> None:
    real = daemon("demo")
    os.kill(real.pid, signal.SIGSTOP)
    eventually(lambda: condition(real, "--frozen-after", "10ms") == ("frozen", Exit.TIMEOUT))
    os.kill(real.pid, signal.SIGCONT)
    eventually(lambda: condition(real) == ("ready", Exit.DONE))
    real.kill()
    assert condition(real) == ("killed", Exit.NO_DAEMON)


def test_how_far_a_deadline_is_past() -> None:
    header = SimpleNamespace(next_deadline_ns=NONE_NS, clock_kind=ClockKind.BOOT)
    assert health.overdue_ns(header) == 0
    header.next_deadline_ns = boot_ns() - 5
    assert health.overdue_ns(header) >= 5
    header.clock_kind = ClockKind.VIRTUAL
    assert health.overdue_ns(header) == 0


def test_no_daemon_at_all(daemon_dir: Path) -> None:
    done = CliRunner().invoke(app, ["status", "--name", "nobody"])
    assert done.exit_code == Exit.NO_DAEMON


# ---- degraded --------------------------------------------------------------------------------


def test_a_daemon_that_is_nearly_full_says_so_until_there_is_room(daemon: StartDaemon) -> None:
    real = daemon("demo", *FULL)
    listener = Subscriber("demo", namespace=EVENTS_NAMESPACE, topics=[EVENTS_TOPIC])
    with listener, Client("demo") as client:
        for i in range(9):
            client.add(f"k{i}", delay=3600)
        eventually(lambda: condition(real) == ("degraded", Exit.NEGATIVE))
        assert status(real)[0]["degraded_by"] == ["timers"]
        assert answer(real, "stats")["degraded_by"] == ["timers"]
        for i in range(2):
            client.cancel(f"k{i}")
        eventually(lambda: condition(real) == ("ready", Exit.DONE))
        events = [listener.get(timeout=PATIENCE_S) for _ in range(2)]
    assert [(event.key, json.loads(event.payload)) for event in events if event] == [
        ("state", {"state": "degraded", "was": "ready", "why": ["timers"]}),
        ("state", {"state": "ready", "was": "degraded", "why": []}),
    ]
    assert "purgatoryd: degraded: nearly all slots are taken" in real.stderr


def test_without_a_listener_no_event_takes_room(daemon: StartDaemon) -> None:
    real = daemon("demo", *FULL)
    with Client("demo") as client:
        for i in range(9):
            client.add(f"k{i}", delay=3600)
    eventually(lambda: condition(real)[0] == "degraded")
    reader = Reader.attach(real.paths)
    assert [space.name for space in reader.namespaces().values()] == ["default"]
    reader.close()


def test_payloads_that_fill_the_memory_are_a_reason(daemon: StartDaemon) -> None:
    real = daemon("demo", "--payload-memory", "64K")
    with Client("demo") as client:
        client.add("k", delay=3600, payload=bytes(60_000))
    eventually(lambda: status(real)[0]["degraded_by"] == ["payloads"])


# ---- the service manager ---------------------------------------------------------------------


def test_a_manager_is_told_when_the_daemon_is_ready_alive_and_at_its_end(
    manager: Manager, daemon: StartDaemon
) -> None:
    real = daemon("demo", env={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "5000000"})
    heard = manager.hears("READY=1")
    assert heard.index("STATUS=starting") < heard.index("STATUS=recovering")
    assert "STATUS=ready" in heard
    assert manager.hears("WATCHDOG=1")
    os.kill(real.pid, signal.SIGHUP)
    heard = manager.hears("READY=1")
    at = heard.index("RELOADING=1")
    assert re.fullmatch(r"MONOTONIC_USEC=\d+", heard[at + 1])
    with Admin("demo") as admin, Client("demo") as client:
        client.add("k", delay=3600)
        admin.stop(drain=True)
        manager.hears("STATUS=draining")
    real.stop()
    manager.hears("STOPPING=1")


def test_a_daemon_sleeps_again_after_it_read_its_settings(
    manager: Manager, daemon: StartDaemon
) -> None:
    real = daemon("demo", env={"NOTIFY_SOCKET": manager.address})
    manager.hears("READY=1")
    os.kill(real.pid, signal.SIGHUP)
    manager.hears("READY=1")
    first = stats(real)
    eventually(lambda: stats(real)["heartbeat_boot_ns"] > first["heartbeat_boot_ns"])
    assert stats(real)["wakeups"] - first["wakeups"] < 100


def test_the_next_start_asks_for_time_while_it_recovers(
    manager: Manager, daemon: StartDaemon
) -> None:
    real = daemon("demo", env={"NOTIFY_SOCKET": manager.address})
    manager.hears("READY=1")
    real.kill()
    real.start()
    heard = manager.hears("READY=1")
    at = heard.index("STATUS=rebuilding")
    assert re.fullmatch(r"EXTEND_TIMEOUT_USEC=\d+", heard[at - 1])


def test_a_manager_may_have_an_abstract_address(tmp_path: Path) -> None:
    manager = Manager(f"@{tmp_path}")
    Supervisor.of({"NOTIFY_SOCKET": manager.address}).status("well")
    assert manager.hears("STATUS=") == ["STATUS=well"]
    manager.socket.close()


def test_the_watchdog_of_another_process_is_not_fed() -> None:
    settings = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1000"}
    assert Supervisor.of(settings).watchdog_ns == 1_000_000
    assert Supervisor.of(settings | {"WATCHDOG_PID": str(os.getpid())}).watchdog_ns == 1_000_000
    assert Supervisor.of(settings | {"WATCHDOG_PID": "1"}).watchdog_ns == 0
    assert Supervisor.of({"WATCHDOG_USEC": "1000"}).watchdog_ns == 0


def test_a_manager_that_does_not_listen_stops_nobody(daemon: StartDaemon, daemon_dir: Path) -> None:
    real = daemon("demo", env={"NOTIFY_SOCKET": str(daemon_dir / "gone"), "WATCHDOG_USEC": "1000"})
    with Admin("demo") as admin:
        admin.ping()
    real.stop()

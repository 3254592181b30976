"""The daemon's states: allowed moves from state to state, notices about these moves, and what other
processes see."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from command_line import answer, cli
from fault_driver import Gate, build_library
from machine import needs
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    boot_ns,
    eventually,
    notices,
    refused,
    remove_arena_files,
    stats,
    wal_entries,
)
from service_manager import Manager, fill, readable
from tiers import wide

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.cli.exposition import exported
from purgatoryd.cli.viewer import Viewer
from purgatoryd.clients import Admin, Client, DaemonUnreachable, Subscriber
from purgatoryd.daemon import lifecycle
from purgatoryd.daemon.lifecycle import MEANING, MOVES, DaemonLifecycle
from purgatoryd.daemon.reaper import Reaper
from purgatoryd.daemon.service_manager import ServiceManager
from purgatoryd.shm_layout import health, wire
from purgatoryd.shm_layout.arena import NONE_NS, Reader
from purgatoryd.shm_layout.layout import (
    EVENTS_NAMESPACE,
    EVENTS_TOPIC,
    ClockKind,
    DaemonState,
    Degraded,
)
from purgatoryd.shm_layout.status_file import Cause, StatusFile, StatusRecord
from purgatoryd.shm_layout.wal import Contents

pytestmark = pytest.mark.tier("check")

DOCS = Path(__file__).resolve().parent.parent / "docs"
FULL = "--capacity", "10"


@pytest.fixture
def manager(daemon_dir: Path) -> Iterator[Manager]:
    made = Manager(str(daemon_dir / "notify"))
    yield made
    made.socket.close()


# ---- the table of moves ----------------------------------------------------------------------


def test_every_state_has_its_moves_and_the_page_has_them_all() -> None:
    assert set(MOVES) == set(DaemonState)
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", page(), re.MULTILINE))
    for state, moves in MOVES.items():
        assert set(re.findall(r"`(\w+)`", rows[state.name.lower()])) == {
            move.name.lower() for move in moves if move != state
        }


def test_every_reason_has_a_sentence_and_a_place_on_the_page() -> None:
    assert set(MEANING) == set(Degraded)
    for name in [*(reason.names[0] for reason in Degraded), *Cause]:
        assert f"| `{name}` |" in page()


def page() -> str:
    return DOCS.joinpath("operations.md").read_text()


def test_only_the_moves_of_the_table_are_made() -> None:
    for state, to in itertools.product(DaemonState, DaemonState):
        lifecycle = DaemonLifecycle(ServiceManager())
        lifecycle.state = state
        if to in MOVES[state]:
            lifecycle.enter(to)
            assert lifecycle.state == to
        else:
            with pytest.raises(AssertionError, match=f"no move from {state.name} to {to.name}"):
                lifecycle.enter(to)
            assert lifecycle.state == state


def test_a_crowded_resource_stays_so_until_there_is_space_again() -> None:
    crowded = lifecycle._crowded
    assert [crowded(used, 100, before=False) for used in (89, 90)] == [False, True]
    assert [crowded(used, 100, before=True) for used in (79, 80)] == [False, True]


# ---- the state that other processes see ------------------------------------------------------


def status(real: Daemon, *args: str) -> tuple[dict[str, Any], int]:
    """Run `purgatoryd status --json`; return (output, exit code)."""
    done = CliRunner().invoke(app, ["status", "--name", real.name, "--json", *args])
    return json.loads(done.stdout), done.exit_code


def condition(real: Daemon, *args: str) -> tuple[str, int]:
    reported, code = status(real, *args)
    return reported["condition"], code


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("first", "refusal"),
    [
        (("--wal-dir", "wal"), ("--capacity", "131072")),
        (("--wal-dir", "wal"), ("--shards", "2")),
        (("--payload-memory", "1M"), ("--payload-memory", "4096")),
        (("--shards", "1", "--wal-dir", "wal"), ("--shards", "2")),
    ],
    ids=["no WAL", "no WAL for shards", "too small", "a deployment without its WAL"],
)
def test_a_stopped_daemon_stays_so_when_a_start_is_refused(
    first: tuple[str, ...], refusal: tuple[str, ...], daemon: StartDaemon, daemon_dir: Path
) -> None:
    first = tuple(str(daemon_dir / word) if word == "wal" else word for word in first)
    real = daemon("demo", *first)
    with Client("demo") as client:
        client.add("k", delay=3600, payload=bytes(20_000))
    real.stop()
    was = cli(real, "status").stdout.count(": stopped, ")
    refused(lambda: real.start(*refusal))
    now = cli(real, "status").stdout
    assert now.count(": stopped, ") == was == len(now.splitlines()), now


@pytest.mark.tier("test")
def test_a_daemon_from_ready_to_stopped(daemon: StartDaemon) -> None:
    real = daemon("demo")
    eventually(lambda: condition(real) == ("ready", Exit.DONE))
    assert status(real)[0]["pid"] == real.pid
    assert f", process {real.pid}, last loop iteration " in cli(real, "status").stdout
    with Client("demo") as client, Admin("demo") as admin:
        client.add("k", delay=3600)
        admin.stop(drain=True)
        eventually(lambda: condition(real) == ("draining", Exit.NEGATIVE))
        admin.resume()
        eventually(lambda: condition(real) == ("ready", Exit.DONE))
    real.stop()
    assert condition(real) == ("stopped", Exit.NO_DAEMON)
    assert cli(real, "status").stdout.startswith("demo: stopped, last loop iteration ")
    found = answer(real, "stats")
    assert (found["daemon_state"], found["arena_state"], "state" in found) == (
        "stopped",
        "ready",
        False,
    )
    start = StatusFile(real.dir, "demo")
    start.write(StatusRecord(DaemonState.RECOVERING, real.pid, boot_ns(), boot_ns()))
    assert condition(real) == ("killed", Exit.NO_DAEMON)


@pytest.mark.tier("test")
@pytest.mark.parametrize("args", [(), wide(("--shards", "2"))], ids=["alone", "shards"])
def test_repeated_signals_do_not_kill_a_daemon_that_ends_cleanly(
    daemon: StartDaemon, args: tuple[str, ...]
) -> None:
    real = daemon("demo", *args)
    while real.running:
        real.process.send_signal(signal.SIGTERM)
    assert real.process.returncode == 0, real.stderr


@pytest.mark.tier("all")
def test_a_frozen_daemon_is_distinguished_from_a_killed_one(daemon: StartDaemon) -> None:
    real = daemon("demo")
    os.kill(real.pid, signal.SIGSTOP)
    eventually(lambda: condition(real, "--frozen-after", "10ms") == ("frozen", Exit.TIMEOUT))
    os.kill(real.pid, signal.SIGCONT)
    eventually(lambda: condition(real) == ("ready", Exit.DONE))
    real.kill()
    assert condition(real) == ("killed", Exit.NO_DAEMON)


@pytest.mark.parametrize("state", DaemonState)
def test_a_start_moves_with_its_steps_and_a_loop_each_second(
    state: DaemonState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WATCHED_NS", 0)
    starts = state in (DaemonState.STARTING, DaemonState.RECOVERING)

    def frozen(still_ns: int, frozen_ns: int = health.FROZEN_NS) -> bool:
        now_ns = boot_ns() - still_ns
        source = SimpleNamespace(header=StatusRecord(state, os.getpid(), now_ns, now_ns))
        with monkeypatch.context() as patch:
            # the recorded times are older than this process, so is_alive() would return False
            patch.setattr(health, "is_alive", lambda _: True)
            return health.look(source, frozen_ns).condition == "frozen"

    assert not frozen(health.FROZEN_NS // 2)
    assert frozen(2 * health.FROZEN_NS) is (not starts and state is not DaemonState.STOPPED)
    assert frozen(2 * health.STEP_NS) is (state is not DaemonState.STOPPED)
    assert not frozen(2 * health.STEP_NS, 3 * health.STEP_NS)


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


@pytest.mark.tier("all")
def test_a_daemon_that_is_nearly_full_says_so_until_there_is_space(daemon: StartDaemon) -> None:
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
    assert "purgatoryd: degraded: nearly all timer slots are in use" in real.stderr


@pytest.mark.tier("all")
def test_a_late_reader_finds_each_move_since_the_first_start(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    """The notices about moves from state to state are in the replay buffer and in the WAL, even if
    no client reads them and the only namespace for users is taken."""
    wal = daemon_dir / "wal"
    space = "--namespaces", "1", "--topics", "1", "--wal-dir", str(wal), "--retain-age", "1h"
    real = daemon("demo", *FULL, *space)
    with Client("demo") as client:
        for i in range(9):
            client.add(f"k{i}", delay=3600, topic="t")
    eventually(lambda: condition(real)[0] == "degraded")
    real.restart()
    eventually(lambda: condition(real)[0] == "degraded")
    moves = [
        ("recovering", "ready"), ("ready", "degraded"), ("degraded", "stopped"),
        ("recovering", "ready"), ("ready", "degraded"),
    ]  # fmt: skip
    with contextlib.closing(Reader.attach(real.paths)) as reader:
        # The header shows a new state a moment before the daemon publishes the notice about it.
        eventually(lambda: len(notices(reader, EVENTS_NAMESPACE, EVENTS_TOPIC)) >= len(moves))
        found = notices(reader, EVENTS_NAMESPACE, EVENTS_TOPIC)
    assert [(one["was"], one["state"]) for one in map(said, found)] == moves
    assert {notice.key for notice in found} == {"state"}
    real.stop()
    written = map(said, wal_entries(wal / "demo"))
    assert [(one["was"], one["state"]) for one in written] == [*moves, ("degraded", "stopped")]


def said(notice: wire.RawNotice | Contents) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(notice.payload or b"")
    return record


@pytest.mark.tier("all")
def test_payloads_that_fill_the_memory_are_a_reason(daemon: StartDaemon) -> None:
    real = daemon("demo", "--payload-memory", "64K")
    with Client("demo") as client:
        client.add("k", delay=3600, payload=bytes(60_000))
    eventually(lambda: status(real)[0]["degraded_by"] == ["payloads"])


# ---- the service manager ---------------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_manager_is_notified_when_the_daemon_is_ready_alive_and_at_its_end(
    manager: Manager, daemon: StartDaemon, daemon_dir: Path
) -> None:
    heartbeats = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "5000000"}
    real = daemon("demo", "--wal-dir", str(daemon_dir / "wal"), env=heartbeats)
    received = manager.hears("READY=1")
    assert received.index("STATUS=starting") < received.index("STATUS=recovering")
    assert "STATUS=ready" in received
    assert manager.hears("WATCHDOG=1")
    os.kill(real.pid, signal.SIGHUP)
    received = manager.hears("READY=1")
    at = received.index("RELOADING=1")
    assert re.fullmatch(r"MONOTONIC_USEC=\d+", received[at + 1])
    with Admin("demo") as admin, Client("demo") as client:
        client.add("k", delay=3600)
        admin.stop(drain=True)
        manager.hears("STATUS=draining")
    real.stop()
    received = manager.hears("STATUS=writing a snapshot")
    assert "STOPPING=1" in received
    assert received[-2].startswith("EXTEND_TIMEOUT_USEC=")
    with contextlib.closing(Reader.attach(real.paths)) as reader:
        assert reader.header.heartbeat_boot_ns > reader.header.daemon_since_boot_ns


@pytest.mark.tier("all")
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


@pytest.mark.tier("all")
def test_an_answer_comes_after_the_reload_that_was_asked_for_before(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    settings = tmp_path / "demo.toml"
    settings.touch()
    real = daemon("demo", "--config", str(settings))
    with Admin("demo") as admin, ThreadPoolExecutor(1) as other:
        admin.ping()
        for quota in range(1, 6):
            settings.write_text(f"quota-timers = {quota}\n")
            os.kill(real.pid, signal.SIGSTOP)
            os.kill(real.pid, signal.SIGHUP)
            ping = other.submit(admin.ping)
            time.sleep(0.02)  # so that the request arrives before the signal is handled
            os.kill(real.pid, signal.SIGCONT)
            ping.result()
            reader = Reader.attach(real.paths)
            assert reader.header.quota_timers == quota
            reader.close()


@pytest.mark.tier("all")
def test_the_next_start_asks_for_time_while_it_recovers(
    manager: Manager, daemon: StartDaemon
) -> None:
    real = daemon("demo", env={"NOTIFY_SOCKET": manager.address})
    manager.hears("READY=1")
    real.kill()
    real.start()
    received = manager.hears("READY=1")
    at = received.index("STATUS=rebuilding")
    assert re.fullmatch(r"EXTEND_TIMEOUT_USEC=\d+", received[at - 1])


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("call", "doing"),
    [
        ("posix_fallocate64", "making an arena"),
        ("fsync", "writing a snapshot"),
        ("fdatasync", "opening the WAL"),
    ],
)
def test_a_recovery_that_hangs_on_the_disk_is_not_ready_before_it_can_serve(
    call: str, doing: str, manager: Manager, daemon: StartDaemon, daemon_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    needs("cc", "to compile tests/fault/shim.c")
    gate = Gate(call, build_library("shim", tmp_path), tmp_path / "gate")
    real = daemon("demo", "--wal-dir", str(daemon_dir / "wal"))
    with Client("demo", durable=True) as client:
        ticket = client.add("k", delay=3600).ticket
    real.kill()
    remove_arena_files(real.paths)
    real.env |= {"NOTIFY_SOCKET": manager.address, **gate.environment}
    real.begin()
    with gate.closed():
        received = manager.received()
        assert received[-1] == f"STATUS={doing}"
        assert received[-2].startswith("EXTEND_TIMEOUT_USEC=")
        assert "READY=1" not in received
        assert not readable(real.process.stdout)
        with pytest.raises(DaemonUnreachable):
            Client("demo", timeout=0.1)
        assert condition(real) == ("recovering", Exit.NEGATIVE)
        assert "recovering" in CliRunner().invoke(app, ["top", "--name", "demo", "--once"]).output
        viewer = Viewer("demo")
        seen = {s.name: s.value for family in exported("demo") for s in family.samples if s.value}
        assert seen.keys() >= {"purgatoryd_up", "purgatoryd_still_seconds", "purgatoryd_state"}
        with monkeypatch.context() as patch:
            patch.setattr(health, "STEP_NS", 1)
            patch.setattr(health, "WATCHED_NS", 1)
            assert condition(real, "--frozen-after", "1ms") == ("frozen", Exit.TIMEOUT)
    manager.hears("READY=1")
    with contextlib.closing(viewer):
        assert viewer.take().whole.health.condition == "ready"
    with Client("demo", timeout=PATIENCE_S) as client:
        timer = client.get("k")
    assert timer is not None
    assert timer.ticket == ticket
    real.await_ready()
    assert status(real)[0]["pid"] == real.pid
    assert not (daemon_dir / "demo.status").exists()


@pytest.mark.parametrize(
    ("say", "line"), [(ServiceManager.ready, "READY=1"), (ServiceManager.stopping, "STOPPING=1")]
)
def test_a_busy_manager_is_notified_later_and_once(
    manager: Manager, say: Callable[[ServiceManager], None], line: str
) -> None:
    service_manager = ServiceManager.of({"NOTIFY_SOCKET": manager.address})
    fill(manager)
    say(service_manager)
    assert line not in manager.received()
    service_manager.alive()
    service_manager.alive()
    assert manager.received().count(line) == 1


@pytest.mark.parametrize("then", [ServiceManager.reloading, ServiceManager.stopping])
def test_a_manager_gets_no_outdated_state(
    manager: Manager, then: Callable[[ServiceManager], None]
) -> None:
    service_manager = ServiceManager.of({"NOTIFY_SOCKET": manager.address})
    fill(manager)
    service_manager.ready()
    manager.received()
    then(service_manager)
    service_manager.alive()
    assert "READY=1" not in manager.received()


def test_a_busy_manager_is_notified_of_the_end_before_the_wait_for_the_disk(
    manager: Manager,
) -> None:
    service_manager = ServiceManager.of({"NOTIFY_SOCKET": manager.address})
    fill(manager)
    received: list[str] = []
    loop: Any = SimpleNamespace(
        _lifecycle=SimpleNamespace(
            enter=lambda _: service_manager.stopping(), service_manager=service_manager
        ),
        _publish=lambda: "STOPPING=1" in manager.received(),
        wal=SimpleNamespace(commit=lambda: received.extend(manager.received())),
        _commands=SimpleNamespace(release=lambda: None),
    )
    Reaper.finish(loop)
    assert "STOPPING=1" in received


@pytest.mark.tier("all")
def test_a_daemon_repeats_messages_to_a_busy_manager(manager: Manager, daemon: StartDaemon) -> None:
    fill(manager)
    daemon("demo", env={"NOTIFY_SOCKET": manager.address})
    manager.hears("READY=1")


def test_a_manager_may_have_an_abstract_address(tmp_path: Path) -> None:
    manager = Manager(f"@{tmp_path}")
    ServiceManager.of({"NOTIFY_SOCKET": manager.address}).status("well")
    assert manager.hears("STATUS=") == ["STATUS=well"]
    manager.socket.close()


def test_the_watchdog_of_another_process_is_not_fed() -> None:
    settings = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1000"}
    assert ServiceManager.of(settings).watchdog_ns == 1_000_000
    assert ServiceManager.of(settings | {"WATCHDOG_PID": str(os.getpid())}).watchdog_ns == 1_000_000
    assert ServiceManager.of(settings | {"WATCHDOG_PID": "1"}).watchdog_ns == 0
    assert ServiceManager.of({"WATCHDOG_USEC": "1000"}).watchdog_ns == 0


@pytest.mark.tier("all")
def test_a_manager_that_does_not_listen_stops_nobody(daemon: StartDaemon, daemon_dir: Path) -> None:
    real = daemon("demo", env={"NOTIFY_SOCKET": str(daemon_dir / "gone"), "WATCHDOG_USEC": "1000"})
    with Admin("demo") as admin:
        admin.ping()
    real.stop()

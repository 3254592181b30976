"""Parked timers with real daemons: killed, rebooted, unparked from the WAL."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, remove_arena_files, stats

from purgatoryd.clients import Admin, BulkLoad, CancelResult, Client, Exists, NoWal, Status
from purgatoryd.shm_layout.retention_holds import RetentionHold, set_hold
from purgatoryd.shm_layout.wal import Walk, contents, segments, uuid_of
from purgatoryd.shm_layout.wire import Key

pytestmark = pytest.mark.tier("all")

HOUR_S, FAR_S = 3600.0, 7200.0


def parking(daemon: StartDaemon, daemon_dir: Path) -> Daemon:
    wal = ("--wal-dir", str(daemon_dir / "wal"), "--durable-namespace", "shop")
    running = daemon("demo", *wal)
    set_hold(daemon_dir / "wal" / "demo", RetentionHold("parked", 1))
    with Admin("demo", timeout=PATIENCE_S) as admin:
        settings = admin.set_namespace("shop", park_beyond_ns=round(HOUR_S * 10**9))
    assert settings.park_beyond_ns == HOUR_S * 10**9
    return running


def client() -> Client:
    return Client("demo", namespace="shop", timeout=PATIENCE_S)


def payloads_of(daemon: Daemon, wal: Path) -> dict[tuple[Key, int], bytes]:
    """Read the WAL; return the payloads of parked timers by (key, ticket)."""
    found, walk = {}, Walk()
    for file in segments(wal / daemon.name):
        if uuid_of(file.path) != walk.uuid:
            walk = Walk()
        walk.enter(file.path)
        for frame in walk.frames():
            if frame.kind == "arm" and frame.fields["parked"]:
                key, payload = contents(frame).key, contents(frame).payload
                assert key is not None
                assert payload is not None
                found[key, frame.fields["ticket"]] = payload
    return found


@pytest.mark.tier("test")
@pytest.mark.parametrize("reboot", [False, True])
def test_parked_timers_come_back_from_the_wal(
    daemon: StartDaemon, daemon_dir: Path, reboot: bool
) -> None:
    running = parking(daemon, daemon_dir)
    with client() as some:
        rows = [(f"k{n}", FAR_S, "t", b"payload %d" % n) for n in range(300)]
        added = some.add_many(rows)
        assert set(added.statuses) == {Status.PARKED}
        assert some.add("near", 60).status == Status.ADDED
        assert some.cancel("k0") is CancelResult.CANCELLED
        moved = some.add("k1", 2 * FAR_S, mode="extend")
        assert moved.ticket == added.tickets[1]
        replaced = some.add("k2", FAR_S, payload=b"another", mode="replace")
        with pytest.raises(Exists):
            some.add("k3", 1)
    running.kill()
    if reboot:
        remove_arena_files(running.paths)
    running.start()
    assert (stats(running)["parked"], stats(running)["live"]) == (299, 1)
    retained = payloads_of(running, daemon_dir / "wal")
    assert retained["k0", added.tickets[0]] == b"payload 0"
    with client() as some:
        found = some.get("k2")
        assert found is not None
        assert (found.status, found.ticket, found.payload) == (Status.PARKED, replaced.ticket, b"")
        back = [(key, ticket, payload) for (key, ticket), payload in retained.items()]
        bulk_load = BulkLoad(b"window of 2 hour")
        statuses = some.unpark_many(back, bulk_load=bulk_load).statuses
        assert statuses.count(Status.UNKNOWN) == 2  # one was cancelled, one was replaced
        assert statuses.count(Status.UNPARKED) == 299
        assert set(some.unpark_many(back, bulk_load=bulk_load).statuses) == {Status.BULK_LOADED}
        assert [(info := some.get(f"k{n}")) and info.payload for n in range(4)] == [
            None, b"payload 1", b"another", b"payload 3",
        ]  # fmt: skip
    assert (stats(running)["parked"], stats(running)["live"]) == (0, 300)
    assert stats(running)["expiries"] == 0


@pytest.mark.tier("test")
@pytest.mark.parametrize("full", ["refuse", "drop_oldest"])
def test_unparking_obeys_the_budget_of_a_group(
    daemon: StartDaemon, daemon_dir: Path, full: Literal["refuse", "drop_oldest"]
) -> None:
    parking(daemon, daemon_dir)
    with client() as some:
        some.create_group("g", topics=["t"], max_bytes=1024, full=full)
        ticket = some.add("far", FAR_S, topic="t", payload=b"x" * 900).ticket
        some.add("near", 0, topic="t", payload=b"y" * 200)
        eventually(lambda: some.group("g").waiting == 1)
        row = [("far", ticket, b"x" * 900)]
        if full == "refuse":
            assert some.unpark_many(row).statuses == [Status.FULL_GROUP]
            assert some.unpark_many([("far", ticket, b"x")]).statuses == [Status.UNPARKED]
            assert some.group("g").waiting == 1
        else:
            assert some.unpark_many(row).statuses == [Status.UNPARKED]
            assert some.group("g").waiting == 0
            assert some.group("g").dropped == 1


def test_overdue_parked_timers_wait_and_are_counted(daemon: StartDaemon, daemon_dir: Path) -> None:
    running = parking(daemon, daemon_dir)
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.set_namespace("shop", park_beyond_ns=1)
    with client() as some:
        ticket = some.add("soon", 0.05, payload=b"soon").ticket
        eventually(lambda: stats(running)["overdue"] == 1)
        assert stats(running)["expiries"] == 0
        assert some.unpark_many([("soon", ticket, b"soon")]).statuses == [Status.UNPARKED]
        eventually(lambda: stats(running)["expiries"] == 1)
        assert stats(running)["overdue"] == 0


def test_parking_is_refused_without_a_wal(daemon: StartDaemon) -> None:
    daemon()
    with (
        Admin("demo", timeout=PATIENCE_S) as admin,
        pytest.raises(NoWal, match="durability and parking"),
    ):
        admin.set_namespace("shop", park_beyond_ns=1)

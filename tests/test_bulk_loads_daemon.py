"""Bulk loads with real daemons and clients: killed, rebooted, resumed, fenced."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, remove_arena_files, stats

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import (
    Admin,
    AsyncClient,
    BulkLoad,
    BulkLoadClosed,
    BulkLoadState,
    Client,
    Fenced,
    Full,
    InvalidArgument,
    MessageRefused,
    Status,
    Subscriber,
)

pytestmark = pytest.mark.tier("all")

FAR_S = 3600.0
Rows = list[tuple[str, float]]


def client(namespace: str = "shop") -> Client:
    return Client("demo", namespace=namespace, timeout=PATIENCE_S)


def far(count: int, first: int = 0) -> Rows:
    return [(f"key {n}", FAR_S) for n in range(first, first + count)]


def counted(result: Any) -> dict[Status, int]:
    statuses = [Status(s) for s in result.statuses]
    return {status: statuses.count(status) for status in set(statuses)}


def command(daemon: Daemon, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "purgatoryd.cli", *args, "--name", "demo"],
        env=daemon.env, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.mark.tier("test")
def test_a_bulk_load_that_is_repeated_after_its_timers_fired_and_a_kill(
    daemon: StartDaemon,
) -> None:
    """A task that is killed after its rows were acknowledged adds the same rows again."""
    running, bulk_load, rows = (
        daemon(),
        BulkLoad(uuid4().bytes, 5),
        [(f"k{n}", 0.0) for n in range(3000)],
    )
    with Subscriber("demo", namespace="shop", timeout=PATIENCE_S) as subscriber:
        with client() as first:
            assert counted(first.add_many(rows, bulk_load=bulk_load)) == {Status.ADDED: 3000}
        seen = {eventually(lambda: subscriber.get(PATIENCE_S)).key for _ in rows}  # type: ignore[union-attr]
        assert len(seen) == 3000
    running.kill()
    running.start()
    with client() as second:
        assert counted(second.add_many(rows, bulk_load=bulk_load)) == {Status.BULK_LOADED: 3000}
        assert second.bulk_load_status(bulk_load.id).done == (range(5, 3005),)
    assert stats(running)["expiries"] == 3000
    assert stats(running)["live"] == 0


def test_a_bulk_load_in_a_durable_namespace_survives_a_reboot(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    wal = ("--wal-dir", str(daemon_dir / "wal"), "--durable-namespace", "shop")
    running, bulk_load = daemon("demo", *wal), BulkLoad(uuid4().bytes, fencing_token=3)
    with client() as first:
        first.open_bulk_load(bulk_load.id, 3)
        assert counted(first.add_many(far(5000), bulk_load=bulk_load)) == {Status.ADDED: 5000}
        assert set(first.cancel_many([f"key {n}" for n in range(100)])) != set()
        first.cancel_many(["later"], bulk_load=BulkLoad(bulk_load.id, 9000))
    running.kill()
    remove_arena_files(running.paths)
    running.start()
    with client() as second:
        status = second.bulk_load_status(bulk_load.id)
        assert (status.state, status.fencing_token, status.rows) == (BulkLoadState.OPEN, 3, 5001)
        assert status.missing(0, 10_000) == [range(5000, 9000), range(9001, 10_000)]
        again = second.add_many(far(5010), bulk_load=bulk_load)
        assert counted(again) == {Status.BULK_LOADED: 5000, Status.ADDED: 10}
        assert list(again.tickets[:100]) == [0] * 100
        assert all(again.tickets[100:])
        later = second.add_many([("later", FAR_S)], bulk_load=BulkLoad(bulk_load.id, 9000, 3))
        assert counted(later) == {Status.BULK_LOADED: 1}
    assert stats(running)["live"] == 4910


@pytest.mark.tier("test")
def test_a_bulk_load_goes_on_where_it_was_cut_off(daemon: StartDaemon) -> None:
    running, bulk_load = daemon(), uuid4().bytes
    with client() as first:
        first.add_many(far(1500), bulk_load=BulkLoad(bulk_load))
        first.add_many(far(700, 2000), bulk_load=BulkLoad(bulk_load, 2000))
    running.kill()
    running.start()
    with client() as second:
        for hole in second.bulk_load_status(bulk_load).missing(0, 3000):
            result = second.add_many(
                far(len(hole), hole.start), bulk_load=BulkLoad(bulk_load, hole.start)
            )
            assert counted(result) == {Status.ADDED: len(hole)}
        assert second.bulk_load_status(bulk_load).missing(0, 3000) == []
        columns = {"key": [f"key {n}" for n in range(3000)], "delay": [FAR_S] * 3000}
        assert counted(second.add_many(columns, bulk_load=BulkLoad(bulk_load))) == {
            Status.BULK_LOADED: 3000
        }
    assert stats(running)["live"] == 3000


def test_an_older_run_is_shut_out_and_a_closed_bulk_load_stays_closed(daemon: StartDaemon) -> None:
    running, bulk_load = daemon(), uuid4().bytes
    with client() as old, client() as new:
        old.open_bulk_load(bulk_load, 1)
        assert old.add_many(far(2), bulk_load=BulkLoad(bulk_load, 0, 1)).ok
        assert new.open_bulk_load(bulk_load, 2).done == (range(2),)
        refused = old.add_many(far(4), bulk_load=BulkLoad(bulk_load, 0, 1))
        assert {status for _, status in refused.refused} == {Status.FENCED}
        with pytest.raises(MessageRefused, match="FENCED"):
            old.close_bulk_load(bulk_load, 1)
        with pytest.raises(Fenced):
            raise refusal_of(refused)
        new.close_bulk_load(bulk_load, 2)
        running.kill()
        running.start()
        closed = new.add_many(far(3), bulk_load=BulkLoad(bulk_load, 0, 2))
        assert list(closed.statuses) == [Status.BULK_LOADED, Status.BULK_LOADED, Status.CLOSED]
        with pytest.raises(BulkLoadClosed):
            raise refusal_of(closed)
        assert new.bulk_load_status(bulk_load).state == BulkLoadState.CLOSED
        new.forget_bulk_load(bulk_load)
        assert new.bulk_load_status(bulk_load).state == BulkLoadState.NONE


def refusal_of(result: Any) -> Exception:
    """Return the error that a single call raises for the status of the first refused row."""
    from purgatoryd.clients.packing import refusal

    row, status = result.refused[0]
    return refusal(f"row {row}", int(status), 0)


def test_a_bulk_load_without_space_is_refused(daemon: StartDaemon) -> None:
    running = daemon("demo", "--bulk-loads", "1", "--bulk-load-rows", "4096")
    with client() as some:
        some.add_many(far(1), bulk_load=BulkLoad(b"1" * 16))
        for bulk_load in (BulkLoad(b"2" * 16), BulkLoad(b"1" * 16, 4096)):
            refused = some.add_many([("new", FAR_S)], bulk_load=bulk_load)
            assert refused.refused == [(0, Status.FULL_BULK_LOADS)]
            assert isinstance(refusal_of(refused), Full)
        assert some.get("new") is None
        with pytest.raises(MessageRefused, match="BULK_LOADS_FULL"):
            some.open_bulk_load(b"2" * 16)
        with pytest.raises(InvalidArgument):
            some.bulk_load_status(b"short")
    assert stats(running)["refused_bulk_loads"] == 2
    running.restart("--bulk-loads", "2", "--bulk-load-rows", "8192")
    with client() as some:
        assert some.add_many([("new", FAR_S)], bulk_load=BulkLoad(b"2" * 16)).ok
        assert counted(some.add_many(far(1), bulk_load=BulkLoad(b"1" * 16))) == {
            Status.BULK_LOADED: 1
        }


def test_a_bulk_load_is_forgotten_some_time_after_its_last_use(daemon: StartDaemon) -> None:
    running = daemon("demo", "--bulk-load-ttl", "1s")
    with client() as some:
        some.add_many(far(1), bulk_load=BulkLoad(b"1" * 16))
        eventually(lambda: stats(running)["bulk_loads"] == 0)
        assert some.add_many([("key 1", FAR_S)], bulk_load=BulkLoad(b"1" * 16)).ok


def test_bulk_loads_with_asyncio(daemon: StartDaemon) -> None:
    daemon()

    async def run() -> None:
        bulk_load = uuid4().bytes
        async with AsyncClient("demo", namespace="shop", timeout=PATIENCE_S) as some:
            await some.open_bulk_load(bulk_load, 1)
            assert (await some.add_many(far(10), bulk_load=BulkLoad(bulk_load, 0, 1))).ok
            await some.cancel_many(["key 10"], bulk_load=BulkLoad(bulk_load, 10))
            again = await some.add_many(far(11), bulk_load=BulkLoad(bulk_load, 0, 1))
            assert counted(again) == {Status.BULK_LOADED: 11}
            assert (await some.bulk_load_status(bulk_load)).rows == 11
            await some.close_bulk_load(bulk_load, 1)
            assert (await some.bulk_load_status(bulk_load)).state == BulkLoadState.CLOSED
            await some.forget_bulk_load(bulk_load)
            assert (await some.bulk_load_status(bulk_load)).state == BulkLoadState.NONE

    asyncio.run(run())


def test_the_command_lists_and_forgets_bulk_loads(daemon: StartDaemon) -> None:
    running = daemon()
    bulk_load = uuid4()
    with client() as some:
        some.add_many(far(3), bulk_load=BulkLoad(bulk_load.bytes, 4, 7))
    (row,) = [
        json.loads(line)
        for line in command(running, "bulk-load", "ls", "--json").stdout.split("\n")
        if line
    ]
    shown = ("bulk_load", "namespace", "state", "fencing_token", "rows", "upto")
    assert {k: row[k] for k in shown} == {
        "bulk_load": bulk_load.hex, "namespace": "shop", "state": "open",
        "fencing_token": 7, "rows": 3, "upto": 7,
    }  # fmt: skip
    status = json.loads(command(running, "bulk-load", "status", str(bulk_load), "--json").stdout)
    assert (status["state"], status["done"]) == ("open", [[4, 7]])
    assert command(running, "bulk-load", "forget", bulk_load.hex).returncode == Exit.DONE
    with Admin("demo", timeout=PATIENCE_S) as admin:
        assert admin.bulk_load_status(bulk_load.bytes).state == BulkLoadState.NONE
    assert command(running, "bulk-load", "ls", "--json").stdout == ""
    assert command(running, "bulk-load", "status", "nonsense").returncode == Exit.USAGE
    assert "bulk_load_rows" in json.loads(command(running, "stats", "--json").stdout)

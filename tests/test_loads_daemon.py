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
from conftest import StartDaemon
from real_daemon import PATIENCE_S, Daemon, eventually, remove_arena_files, stats

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import (
    Admin,
    AsyncClient,
    Client,
    Fenced,
    Full,
    InvalidArgument,
    Load,
    LoadClosed,
    LoadState,
    MessageRefused,
    Status,
    Subscriber,
)

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


def test_a_load_that_is_repeated_after_its_timers_fired_and_a_kill(daemon: StartDaemon) -> None:
    """What a task does that is killed after its rows were acknowledged."""
    running, load, rows = daemon(), Load(uuid4().bytes, 5), [(f"k{n}", 0.0) for n in range(3000)]
    with Subscriber("demo", namespace="shop", timeout=PATIENCE_S) as subscriber:
        with client() as first:
            assert counted(first.add_many(rows, load=load)) == {Status.ADDED: 3000}
        seen = {eventually(lambda: subscriber.get(PATIENCE_S)).key for _ in rows}  # type: ignore[union-attr]
        assert len(seen) == 3000
    running.kill()
    running.start()
    with client() as second:
        assert counted(second.add_many(rows, load=load)) == {Status.LOADED: 3000}
        assert second.load_status(load.id).done == (range(5, 3005),)
    assert stats(running)["expiries"] == 3000
    assert stats(running)["live"] == 0


def test_a_load_in_a_durable_namespace_survives_a_reboot(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    wal = ("--wal-dir", str(daemon_dir / "wal"), "--durable-namespace", "shop")
    running, load = daemon("demo", *wal), Load(uuid4().bytes, fencing_token=3)
    with client() as first:
        first.open_load(load.id, 3)
        assert counted(first.add_many(far(5000), load=load)) == {Status.ADDED: 5000}
        assert set(first.cancel_many([f"key {n}" for n in range(100)])) != set()
        first.cancel_many(["later"], load=Load(load.id, 9000))
    running.kill()
    remove_arena_files(running.paths)
    running.start()
    with client() as second:
        status = second.load_status(load.id)
        assert (status.state, status.fencing_token, status.rows) == (LoadState.OPEN, 3, 5001)
        assert status.missing(0, 10_000) == [range(5000, 9000), range(9001, 10_000)]
        again = second.add_many(far(5010), load=load)
        assert counted(again) == {Status.LOADED: 5000, Status.ADDED: 10}
        assert list(again.tickets[:100]) == [0] * 100
        assert all(again.tickets[100:])
        later = second.add_many([("later", FAR_S)], load=Load(load.id, 9000, 3))
        assert counted(later) == {Status.LOADED: 1}
    assert stats(running)["live"] == 4910


def test_a_load_goes_on_where_it_was_cut_off(daemon: StartDaemon) -> None:
    running, load = daemon(), uuid4().bytes
    with client() as first:
        first.add_many(far(1500), load=Load(load))
        first.add_many(far(700, 2000), load=Load(load, 2000))
    running.kill()
    running.start()
    with client() as second:
        for hole in second.load_status(load).missing(0, 3000):
            result = second.add_many(far(len(hole), hole.start), load=Load(load, hole.start))
            assert counted(result) == {Status.ADDED: len(hole)}
        assert second.load_status(load).missing(0, 3000) == []
        columns = {"key": [f"key {n}" for n in range(3000)], "delay": [FAR_S] * 3000}
        assert counted(second.add_many(columns, load=Load(load))) == {Status.LOADED: 3000}
    assert stats(running)["live"] == 3000


def test_an_older_run_is_shut_out_and_a_closed_load_stays_closed(daemon: StartDaemon) -> None:
    running, load = daemon(), uuid4().bytes
    with client() as old, client() as new:
        old.open_load(load, 1)
        assert old.add_many(far(2), load=Load(load, 0, 1)).ok
        assert new.open_load(load, 2).done == (range(2),)
        refused = old.add_many(far(4), load=Load(load, 0, 1))
        assert {status for _, status in refused.refused} == {Status.FENCED}
        with pytest.raises(MessageRefused, match="FENCED"):
            old.close_load(load, 1)
        with pytest.raises(Fenced):
            raise refusal_of(refused)
        new.close_load(load, 2)
        running.kill()
        running.start()
        closed = new.add_many(far(3), load=Load(load, 0, 2))
        assert list(closed.statuses) == [Status.LOADED, Status.LOADED, Status.CLOSED]
        with pytest.raises(LoadClosed):
            raise refusal_of(closed)
        assert new.load_status(load).state == LoadState.CLOSED
        new.forget_load(load)
        assert new.load_status(load).state == LoadState.NONE


def refusal_of(result: Any) -> Exception:
    """The error that a single call with such a status would raise."""
    from purgatoryd.clients.packing import refusal

    row, status = result.refused[0]
    return refusal(f"row {row}", int(status), 0)


def test_no_space_for_a_load_is_said(daemon: StartDaemon) -> None:
    running = daemon("demo", "--loads", "1", "--load-rows", "4096")
    with client() as some:
        some.add_many(far(1), load=Load(b"1" * 16))
        for load in (Load(b"2" * 16), Load(b"1" * 16, 4096)):
            refused = some.add_many([("new", FAR_S)], load=load)
            assert refused.refused == [(0, Status.FULL_LOADS)]
            assert isinstance(refusal_of(refused), Full)
        assert some.get("new") is None
        with pytest.raises(MessageRefused, match="LOADS_FULL"):
            some.open_load(b"2" * 16)
        with pytest.raises(InvalidArgument):
            some.load_status(b"short")
    assert stats(running)["refused_loads"] == 2
    running.restart("--loads", "2", "--load-rows", "8192")
    with client() as some:
        assert some.add_many([("new", FAR_S)], load=Load(b"2" * 16)).ok
        assert counted(some.add_many(far(1), load=Load(b"1" * 16))) == {Status.LOADED: 1}


def test_a_load_is_forgotten_some_time_after_its_last_use(daemon: StartDaemon) -> None:
    running = daemon("demo", "--load-ttl", "1s")
    with client() as some:
        some.add_many(far(1), load=Load(b"1" * 16))
        eventually(lambda: stats(running)["loads"] == 0)
        assert some.add_many([("key 1", FAR_S)], load=Load(b"1" * 16)).ok


def test_loads_with_asyncio(daemon: StartDaemon) -> None:
    daemon()

    async def run() -> None:
        load = uuid4().bytes
        async with AsyncClient("demo", namespace="shop", timeout=PATIENCE_S) as some:
            await some.open_load(load, 1)
            assert (await some.add_many(far(10), load=Load(load, 0, 1))).ok
            await some.cancel_many(["key 10"], load=Load(load, 10))
            again = await some.add_many(far(11), load=Load(load, 0, 1))
            assert counted(again) == {Status.LOADED: 11}
            assert (await some.load_status(load)).rows == 11
            await some.close_load(load, 1)
            assert (await some.load_status(load)).state == LoadState.CLOSED
            await some.forget_load(load)
            assert (await some.load_status(load)).state == LoadState.NONE

    asyncio.run(run())


def test_the_command_lists_and_forgets_loads(daemon: StartDaemon) -> None:
    running = daemon()
    load = uuid4()
    with client() as some:
        some.add_many(far(3), load=Load(load.bytes, 4, 7))
    (row,) = [
        json.loads(line)
        for line in command(running, "load", "ls", "--json").stdout.split("\n")
        if line
    ]
    assert {k: row[k] for k in ("load", "namespace", "state", "fencing_token", "rows", "upto")} == {
        "load": load.hex, "namespace": "shop", "state": "open", "fencing_token": 7, "rows": 3, "upto": 7,
    }  # fmt: skip
    status = json.loads(command(running, "load", "status", str(load), "--json").stdout)
    assert (status["state"], status["done"]) == ("open", [[4, 7]])
    assert command(running, "load", "forget", load.hex).returncode == Exit.DONE
    with Admin("demo", timeout=PATIENCE_S) as admin:
        assert admin.load_status(load.bytes).state == LoadState.NONE
    assert command(running, "load", "ls", "--json").stdout == ""
    assert command(running, "load", "status", "nonsense").returncode == Exit.USAGE
    assert "load_rows" in json.loads(command(running, "stats", "--json").stdout)

"""Ledgers: the lines that clients and subscribers write about received answers."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from real_daemon import PATIENCE_S, StartDaemon

from purgatoryd.clients import (
    Admin,
    AllOf,
    AsyncClient,
    AsyncSubscriber,
    BulkLoad,
    Client,
    Exists,
    Lagged,
    Ledger,
    Purgatory,
    Subscriber,
)
from purgatoryd.clients.ledger import Source
from purgatoryd.clients.subscriber import Inbox
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import BadPath
from purgatoryd.shm_layout.paths import client_paths

pytestmark = pytest.mark.tier("all")

HOUR_S = 3600.0
SOME_UUID = UUID(int=7)


def lines(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(directory.glob("daemon=*/*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def uuid_of(name: str) -> str:
    reader = Reader.attach(client_paths(name))
    try:
        return reader.uuid.hex()
    finally:
        reader.close()


@pytest.mark.tier("test")
def test_calls_are_noted_with_what_they_found(daemon: StartDaemon, tmp_path: Path) -> None:
    daemon("demo")
    with (
        Ledger(tmp_path) as ledger,
        Client("demo", namespace="shop", timeout=PATIENCE_S, ledger=ledger) as client,
    ):
        added = client.add("a", HOUR_S, payload=b"x" * 99)
        with pytest.raises(Exists):
            client.add("a", HOUR_S)
        replaced = client.add(SOME_UUID, HOUR_S, wait=False)
        rows = [(b"\xff\x00", HOUR_S), ("c", HOUR_S, "topic", b"payload")]
        bulk = client.add_many(rows)
        client.flush()
        client.cancel("a")
        client.cancel("nobody")
        client.cancel_many(["c"])
    noted = lines(tmp_path)
    assert [(n["op"], n["found"], n["key"], n["key_type"]) for n in noted] == [
        ("add", "added", "a", "str"),
        ("add", "added", SOME_UUID.hex, "uuid"),
        ("add", "added", "ff00", "bytes"),
        ("add", "added", "c", "str"),
        ("cancel", "cancelled", "a", "str"),
        ("cancel", "cancelled", "c", "str"),
    ]
    assert [n["ticket"] for n in noted[:5]] == [
        added.ticket, replaced.result().ticket, *bulk.tickets, added.ticket
    ]  # fmt: skip
    assert {n["namespace"] for n in noted} == {"shop"}
    acked = [n["acked_boot_ns"] for n in noted]
    assert acked == sorted(acked)
    assert [path.name for path in tmp_path.iterdir()] == [f"daemon={uuid_of('demo')}"]


@pytest.mark.tier("check")
def test_ledgers_make_their_directory_and_share_it(tmp_path: Path) -> None:
    directory = tmp_path / "parent" / "ledger"
    for sequence in (1, 2):
        with Ledger(directory) as ledger:
            ledger.lost(Source(b"", 7, 1), Lagged("shop", "orders", sequence, sequence))
    assert sorted(noted["sequence"] for noted in lines(directory)) == [1, 2]


@pytest.mark.tier("check")
def test_a_full_buffer_is_written_without_a_flush(tmp_path: Path) -> None:
    with Ledger(tmp_path, buffer_bytes=200) as ledger:
        for first in (1, 2):
            assert lines(tmp_path) == []
            ledger.lost(Source(b"", 7, 1), Lagged("shop", "orders", first, first))
        assert [noted["sequence"] for noted in lines(tmp_path)] == [1, 2]


@pytest.mark.tier("check")
def test_an_inbox_that_ends_notes_its_losses_and_is_closed(tmp_path: Path) -> None:
    closed: list[bool] = []
    lost = Lagged("shop", "orders", 5, 0)
    with Ledger(tmp_path) as ledger:
        inbox: Any = SimpleNamespace(
            _stream=SimpleNamespace(broken=lambda: [lost]), close=lambda: closed.append(True),
            _ledger=ledger, _source=Source(b"", 7, 1), _hold=None,
        )  # fmt: skip
        assert Inbox.end(inbox) == [lost]
    assert closed == [True]
    assert [(noted["op"], noted["sequence"]) for noted in lines(tmp_path)] == [("lost", 5)]


def test_parked_unparked_and_repeated_rows_are_noted(daemon: StartDaemon, tmp_path: Path) -> None:
    daemon("demo", "--wal-dir", str(tmp_path / "wal"))
    with Admin("demo") as admin:
        admin.set_namespace("shop", park_beyond_ns=1)
    bulk_load = BulkLoad(b"sixteen bytes id", 5)
    with (
        Ledger(tmp_path / "ledgers") as ledger,
        Client("demo", namespace="shop", timeout=PATIENCE_S, ledger=ledger) as client,
    ):
        ticket = client.add("a", HOUR_S).ticket
        for _ in range(2):
            client.unpark_many([("a", ticket, b""), ("b", ticket, b"")], bulk_load=bulk_load)
    parked, back, *again = lines(tmp_path / "ledgers")
    assert (parked["op"], parked["found"], parked["ticket"]) == ("add", "parked", ticket)
    assert (back["op"], back["found"], back["ticket"]) == ("unpark", "unparked", ticket)
    reported = [
        (n["op"], n["found"], n["bulk_load"], n["row"], n["key"], n["ticket"]) for n in again
    ]
    assert reported == [
        ("row", "bulk_loaded", bulk_load.id.hex(), 5, "a", ticket),
        ("row", "bulk_loaded", bulk_load.id.hex(), 6, "b", 0),
    ]


def test_outcomes_and_notices_are_noted(daemon: StartDaemon, tmp_path: Path) -> None:
    daemon("demo")
    with (
        Ledger(tmp_path, buffer_bytes=0) as ledger,
        Subscriber("demo", topics=["ends"], timeout=PATIENCE_S, ledger=ledger) as subscriber,
        Purgatory("demo", timeout=PATIENCE_S, ledger=ledger) as purgatory,
    ):
        operation = purgatory.watch("wait", AllOf({"watermark": 1}), HOUR_S, topic="ends")
        purgatory.advance("watermark", 1)
        assert operation.result(PATIENCE_S).cause == "satisfied"
        notice = subscriber.get(PATIENCE_S)
        assert notice is not None
        # read before the ledger is closed: each line is written at once
        noted = {n["op"]: n for n in lines(tmp_path)}
    assert noted["watch"]["ticket"] == noted["outcome"]["ticket"] == operation.ticket
    assert noted["outcome"]["found"] == "satisfied"
    reported = {n: noted["notice"][n] for n in ("ticket", "topic", "sequence", "received_boot_ns")}
    assert reported == {
        "ticket": notice.ticket, "topic": "ends", "sequence": 1,
        "received_boot_ns": notice.received_boot_ns,
    }  # fmt: skip


def test_asyncio_notes_the_same(daemon: StartDaemon, tmp_path: Path) -> None:
    daemon("demo")

    async def use(ledger: Ledger) -> None:
        async with (
            AsyncSubscriber("demo", timeout=PATIENCE_S, ledger=ledger) as subscriber,
            AsyncClient("demo", timeout=PATIENCE_S, ledger=ledger) as client,
        ):
            await client.add("now", 0.0)
            assert await subscriber.get(PATIENCE_S) is not None

    with Ledger(tmp_path) as ledger:
        asyncio.run(use(ledger))
    add, notice = sorted(lines(tmp_path), key=lambda line: line["op"])
    assert (add["op"], notice["op"]) == ("add", "notice")
    assert (add["ticket"], add["key"]) == (notice["ticket"], notice["key"])


def test_a_forked_child_writes_nothing_of_its_parents_lines(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon("demo")
    ledger = Ledger(tmp_path)
    with Client("demo", timeout=PATIENCE_S, ledger=ledger) as client:
        client.add("a", HOUR_S)
        if (child := os.fork()) == 0:
            ledger.close()
            os._exit(0)
        os.waitpid(child, 0)
    assert lines(tmp_path) == []
    ledger.close()
    assert [n["key"] for n in lines(tmp_path)] == ["a"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadPath, match="cannot be created"):
        Ledger(tmp_path / "file" / "ledgers")

"""Pending timers with tags, by clients of a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from command_line import cli
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import (
    Admin,
    AsyncClient,
    Client,
    Consumer,
    Exists,
    InvalidArgument,
    MessageRefused,
    OrderHash,
    Partitioned,
    Subscriber,
    SweepChange,
    SweepState,
)
from purgatoryd.clients.items import order_hash
from purgatoryd.clients.local_channel import Transport
from purgatoryd.clients.pending import Cursor
from purgatoryd.shm_layout.layout import Status

pytestmark = pytest.mark.tier("test")

SECOND_NS = 10**9
BAD: list[Any] = ["", "t" * 64, "ä" * 32, "a\0b", "\ud800", 7, b"t"]


@pytest.fixture(params=["ring", "zmq"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def client(daemon: StartDaemon, transport: Transport) -> Iterator[Client]:
    daemon("demo", "--clock", "virtual")
    with Client("demo", timeout=PATIENCE_S, transport=transport) as client:
        yield client


def tag_of(client: Client, key: str) -> str | None:
    found = client.get(key)
    assert found is not None
    return found.tag


@pytest.mark.parametrize("tag", BAD, ids=range(len(BAD)))
def test_a_bad_tag_changes_nothing(client: Client, tag: Any) -> None:
    with pytest.raises(InvalidArgument, match="tag"):
        client.add("a", 1, tag=tag)
    with pytest.raises(InvalidArgument, match="tag"):
        client.add("a", 1, tag=tag, wait=False)
    columns = {"key": ["a"], "delay": [1], "tag": [tag]}
    for many in ([{"key": "a", "delay": 1, "tag": tag}], columns):
        with pytest.raises(InvalidArgument, match="tag"):
            client.add_many(many)
    with pytest.raises(InvalidArgument, match="tag"):
        client.add_many([("a", 1)], tag=tag)
    assert client.get("a") is None


def test_every_kind_of_add_takes_a_tag(client: Client, transport: Transport) -> None:
    client.add("single", 1, tag="one")
    client.add("slow", 1, within=0.5, tag="ü" * 31)
    for n in range(3):
        client.add(f"later{n}", 1, tag=f"later{n}", wait=False)
    client.flush()
    client.add_many([{"key": "row", "delay": 1, "tag": "own"}, ("tuple", 1)], tag="common")
    client.add_many({"key": ["c0", "c1", "c2"], "delay": [1, 1, 1], "tag": ["x", None, "y"]})
    client.add_many({"key": np.array(["n0", "n1"]), "delay": np.ones(2)}, tag="all")
    arrow = pa.table({"key": ["a0", "a1"], "delay": [1, 1], "tag": pa.array([None, "z"])})
    client.add_many(arrow, tag="rest")

    async def run() -> None:
        async with AsyncClient("demo", transport=transport) as other:
            await other.add("async", 1, tag="async")
            await other.add_many([("async-row", 1)], tag="rows")

    asyncio.run(run())
    expected = {
        "single": "one", "slow": "ü" * 31, "later0": "later0", "later2": "later2", "row": "own",
        "tuple": "common", "c0": "x", "c1": None, "c2": "y", "n0": "all", "n1": "all", "a0": "rest",
        "a1": "z", "async": "async", "async-row": "rows",
    }  # fmt: skip
    assert {key: tag_of(client, key) for key in expected} == expected


def test_an_add_of_an_armed_key_follows_its_mode(client: Client) -> None:
    client.add("k", 10, tag="first")
    assert client.add("k", 20, mode="extend", tag="second").status is Status.EXTENDED
    assert client.add("k", 30, mode="keep", tag="second").status is Status.KEPT
    assert tag_of(client, "k") == "first"
    client.add("k", 5, mode="replace", tag="second")
    assert tag_of(client, "k") == "second"
    client.add("k", 5, mode="replace")
    assert tag_of(client, "k") is None


# ---- list and count ----------------------------------------------------------------------------


def fill(client: Client) -> None:
    """Add timers of two topics, two tags and both types of keys."""
    client.add_many([(f"a{n}", 10 + n) for n in range(20)], topic="x", tag="red")
    client.add_many([(f"b{n}", 5 + n) for n in range(20)], topic="y", tag="blue")
    client.add_many([(b"a%d" % n, 100 + n) for n in range(5)], topic="x")
    client.add_many([(f"c{n}", 50) for n in range(5)])


def keys(page: Any) -> list[Any]:
    return [timer.key for timer in page]


def test_a_selection_combines_its_arguments(client: Client) -> None:
    fill(client)
    now_ns = client.get("a0").deadline_boot_ns - 10 * SECOND_NS  # type: ignore[union-attr]
    selections: list[tuple[dict[str, Any], int]] = [
        ({}, 50), ({"prefix": "a"}, 20), ({"prefix": b"a"}, 5), ({"prefix": "a1"}, 11),
        ({"topic": "x"}, 25), ({"topic": "z"}, 0), ({"tag": "red"}, 20), ({"tag": "re"}, 0),
        ({"topic": "x", "tag": "red", "prefix": "a1"}, 11), ({"topic": "y", "tag": "red"}, 0),
        ({"due_before": now_ns + 10 * SECOND_NS}, 5),
        ({"due_from": now_ns + 100 * SECOND_NS}, 5),
        ({"due_from": now_ns + 10 * SECOND_NS, "due_before": now_ns + 12 * SECOND_NS}, 4),
        ({"due_from": datetime(2200, 1, 1, tzinfo=UTC)}, 0),
        ({"due_before": datetime(2200, 1, 1, tzinfo=UTC), "tag": "blue"}, 20),
    ]  # fmt: skip
    for selection, count in selections:
        assert client.count_timers(**selection) == count, selection
        page = client.list_timers(**selection)
        assert (len(page), page.cursor) == (count, None)
        assert page.timers == tuple(sorted(page, key=lambda t: (t.deadline_boot_ns, t.ticket)))
    assert client.list_timers(tag="red")[0].tag == "red"


def test_pages_have_all_timers_in_order_and_none_that_came_later(client: Client) -> None:
    fill(client)
    whole = keys(client.list_timers())
    found: list[Any] = []
    cursor: str | None = None
    while True:
        page = client.list_timers(limit=7, cursor=cursor)
        found += keys(page)
        cursor = page.cursor
        if cursor is None:
            break
        client.add(f"late{len(found)}", 60)
    assert found == whole
    assert client.count_timers(prefix="late") == 7


def test_a_list_has_payloads_only_on_request(client: Client) -> None:
    client.add("k", 5, payload=b"the payload")
    assert client.list_timers()[0].payload == b""
    assert client.list_timers(payloads=True)[0].payload == b"the payload"


@pytest.mark.parametrize(
    "selection",
    [{"prefix": ""}, {"prefix": 1}, {"tag": ""}, {"topic": 5}, {"due_from": -1}, {"due_from": 1.5},
     {"due_before": datetime(2030, 1, 1)}, {"limit": 0}, {"cursor": "nonsense"}, {"cursor": 1}],
    ids=repr,
)  # fmt: skip
def test_a_bad_selection_is_refused(client: Client, selection: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        client.list_timers(**selection)


# ---- sweeps ------------------------------------------------------------------------------------


def test_a_sweep_cancels_the_selected_timers(client: Client) -> None:
    fill(client)
    dry = client.cancel_where(tag="red", dry_run=True)
    assert (dry.state, dry.done, client.count_timers()) == (SweepState.NONE, 20, 50)
    done = client.cancel_where(tag="red")
    assert (done.state, done.done, done.fraction) == (SweepState.DONE, 20, 1.0)
    assert (client.count_timers(), client.count_timers(tag="red")) == (30, 0)
    assert client.get("a0") is None
    again = client.cancel_where(prefix="b", sweep_id=done.id)
    assert (again.done, again.tag, client.count_timers()) == (20, "red", 30)
    assert client.cancel_where(topic="nowhere").done == 0
    assert client.sweeps()[0].id == done.id


def test_a_sweep_shifts_deadlines_and_keeps_the_rest(client: Client) -> None:
    client.add_many([(f"k{n}", 10 + n, "x", b"p%d" % n) for n in range(50)], tag="t")
    client.add("wall", deadline=datetime(2100, 1, 1, tzinfo=UTC), topic="x")
    before = {t.key: t for t in client.list_timers(payloads=True)}
    moved = client.reschedule_where(topic="x", shift=-4.5)
    assert (moved.state, moved.done, moved.change) == (SweepState.DONE, 51, SweepChange.SHIFT)
    for timer in client.list_timers(payloads=True):
        then = before[timer.key]
        assert timer.deadline_boot_ns == then.deadline_boot_ns - 4_500_000_000
        assert timer.ticket == then.ticket
        assert (timer.payload, timer.tag, timer.topic) == (then.payload, then.tag, "x")
    assert client.get("wall").deadline_at == datetime(  # type: ignore[union-attr]
        2099, 12, 31, 23, 59, 55, 500_000, tzinfo=UTC
    )


def test_a_sweep_moves_timers_to_one_deadline(client: Client) -> None:
    client.add_many([(f"k{n}", 10 + n) for n in range(50)])
    client.add("wall", deadline=datetime(2100, 1, 1, tzinfo=UTC))
    assert client.reschedule_where(deadline_boot_ns=7 * SECOND_NS, prefix="k").done == 50
    assert {t.deadline_boot_ns for t in client.list_timers(prefix="k")} == {7 * SECOND_NS}
    later = datetime(2050, 6, 1, tzinfo=UTC)
    assert client.reschedule_where(deadline=later).done == 51
    assert client.get("wall").deadline_at == later  # type: ignore[union-attr]
    assert len({t.deadline_boot_ns for t in client.list_timers()}) == 1
    assert client.reschedule_where(delay=3).done == 51
    with Admin("demo") as admin:
        admin.advance(3 * SECOND_NS + 10**8)
        assert client.count_timers() == 0


def test_a_reschedule_needs_one_new_time(client: Client) -> None:
    for bad in ({}, {"shift": 0}, {"shift": 1, "delay": 1}, {"shift": float("nan")}):
        with pytest.raises(InvalidArgument):
            client.reschedule_where(**bad)


def test_a_timer_that_a_sweep_moved_fires_at_its_new_deadline(client: Client) -> None:
    client.add_many([(f"k{n}", 100 + n) for n in range(10)])
    with Subscriber("demo", topics=["default"]) as subscriber, Admin("demo") as admin:
        client.reschedule_where(shift=-95, prefix="k1")
        client.cancel_where(prefix="k2")
        admin.advance(7 * SECOND_NS)
        assert subscriber.get(PATIENCE_S).key == "k1"  # type: ignore[union-attr]
        admin.advance(200 * SECOND_NS)
        rest = [subscriber.get(PATIENCE_S) for _ in range(8)]
    assert {n.key for n in rest if n} == {f"k{n}" for n in range(10)} - {"k1", "k2"}


def test_an_asyncio_client_lists_and_sweeps(client: Client, transport: Transport) -> None:
    fill(client)

    async def run() -> None:
        async with AsyncClient("demo", transport=transport) as other:
            page = await other.list_timers(tag="red", limit=3)
            assert (keys(page), bool(page.cursor)) == (["a0", "a1", "a2"], True)
            assert await other.count_timers(topic="y") == 20
            assert (await other.reschedule_where(topic="y", shift=1)).done == 20
            swept = await other.cancel_where(topic="y")
            assert (swept.state, swept.done) == (SweepState.DONE, 20)
            assert (await other.sweep_status(swept.id)).done == 20
            assert (await other.stop_sweep(swept.id)).state is SweepState.DONE
            assert len(await other.sweeps()) == 2

    asyncio.run(run())


def test_the_owner_of_a_namespace_alone_lists_and_sweeps(client: Client) -> None:
    client.add("k", 5)
    with Admin("demo") as admin:
        admin.set_namespace("default", owner_uid=54321)
    for call in (client.list_timers, client.count_timers, client.cancel_where):
        with pytest.raises(MessageRefused, match="may not do that"):
            call()
    with pytest.raises(MessageRefused):
        client.reschedule_where(shift=1)


@pytest.mark.parametrize("wal", [False, True], ids=["no WAL", "WAL"])
def test_a_sweep_goes_on_after_a_kill_and_changes_each_timer_once(
    daemon: StartDaemon, daemon_dir: Path, wal: bool
) -> None:
    args = ("--wal-dir", str(daemon_dir / "wal")) if wal else ()
    running = daemon("demo", "--payload-memory", "32M", *args)
    count, shift_ns = 60_000, 77 * SECOND_NS
    with Client("demo", timeout=PATIENCE_S) as client:
        added = client.add_many([(f"k{n}", 3600.0) for n in range(count)])
        before = dict(zip(added.tickets, added.deadlines_boot_ns, strict=True))
        begun = client.reschedule_where(shift=77, wait=False)
        running.kill()
    running.start()
    with Client("demo", timeout=PATIENCE_S) as client:
        status = client.reschedule_where(shift=77, sweep_id=begun.id)
        assert (status.state, status.done) == (SweepState.DONE, count)
        after = {t.ticket: t.deadline_boot_ns for t in client.list_timers(limit=count)}
        assert after == {ticket: at + shift_ns for ticket, at in before.items()}
        assert client.cancel_where(prefix="k1").done == 11_111
        assert client.count_timers() == count - 11_111


def test_all_partitions_are_listed_and_swept(daemon: StartDaemon) -> None:
    running = daemon("demo", "--shards", "2", "--capacity", "2000", "--payload-memory", "1M")
    done = cli(running, "namespace", "create", "clicks", "--partitions", "4")
    assert done.returncode == 0, done.stderr
    with Client("demo", namespace="clicks", timeout=PATIENCE_S) as client:
        client.add_many([(f"k{n}", 60 + n, "t") for n in range(200)], tag="red")
        assert client.count_timers(tag="red") == 200
        found: list[Any] = []
        cursor: str | None = None
        while True:
            page = client.list_timers(limit=30, cursor=cursor)
            found += keys(page)
            cursor = page.cursor
            if cursor is None:
                break
        assert found == [f"k{n}" for n in range(200)]
        moved = client.reschedule_where(prefix="k1", shift=600)
        assert (moved.state, moved.done) == (SweepState.DONE, 111)
        assert client.cancel_where(tag="red").done == 200
        assert client.count_timers() == 0
        assert [status.done for status in client.sweeps()] == [200, 111]
    with Client("demo", namespace="clicks") as client, pytest.raises(InvalidArgument):
        client.list_timers(cursor=cursor_of_one_partition())


def cursor_of_one_partition() -> str:
    return Cursor((5, 1), (7,)).text()


# ---- the command line --------------------------------------------------------------------------


@pytest.fixture
def filled(daemon: StartDaemon) -> Daemon:
    running = daemon("demo", "--log-level", "info")
    with Client("demo", timeout=PATIENCE_S) as client:
        client.add_many([(f"a{n}", 600 + n, "x", b"p%d" % n) for n in range(20)], tag="red")
        client.add_many(
            [(f"b{n}", 900 + n, "y", b"\xff") for n in range(10)], within=0.5, priority=0
        )
        client.add(b"\x01", deadline=datetime(2100, 1, 1, tzinfo=UTC), topic="z", tag="ü")
        client.add(UUID(int=7), 5000)
    return running


def lines(running: Daemon, *words: str, code: int = 0) -> list[Any]:
    done = cli(running, "timers", *words, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_command_line_lists_and_counts(filled: Daemon) -> None:
    assert lines(filled, "count") == [{"timers": 32}]
    assert lines(filled, "count", "--tag", "red", "--prefix", "a1") == [{"timers": 11}]
    assert lines(filled, "count", "--prefix", "01", "--key-type", "hex") == [{"timers": 1}]
    assert lines(filled, "count", "--due-from", "2099-01-01T00:00:00Z") == [{"timers": 1}]
    *page, last = lines(filled, "ls", "--limit", "30")
    assert [row["key"] for row in page[:2]] == ["a0", "a1"]
    assert page[0]["tag"] == "red"
    assert 0 < (datetime.fromisoformat(page[0]["due_at"]) - datetime.now(UTC)).total_seconds() < 600
    rest = lines(filled, "ls", "--limit", "30", "--cursor", last["cursor"])
    assert [row["key"] for row in rest] == [str(UUID(int=7)), "01"]
    text = cli(filled, "timers", "ls", "--tag", "ü").stdout
    assert "2100-01-01" in text
    assert "tag ü" in text


def test_the_command_line_cancels_moves_and_purges(filled: Daemon) -> None:
    assert cli(filled, "timers", "cancel").returncode == Exit.USAGE
    assert cli(filled, "timers", "reschedule", "--topic", "x").returncode == Exit.USAGE
    assert lines(filled, "cancel", "--topic", "y", "--dry-run")[0]["timers"] == 10
    (done,) = lines(filled, "cancel", "--topic", "y", "--id", "0" * 31 + "1")
    assert (done["state"], done["done"], done["topic"]) == ("done", 10, "y")
    (moved,) = lines(filled, "reschedule", "--tag", "red", "--shift", "-5m")
    assert (moved["change"], moved["done"]) == ("shift", 20)
    assert lines(filled, "stop", moved["sweep"])[0]["state"] == "done"
    assert lines(filled, "stop", "0" * 31 + "9", code=Exit.NEGATIVE)[0]["state"] == "none"
    refused = cli(filled, "timers", "purge")
    assert (refused.returncode, "--yes" in refused.stderr) == (Exit.USAGE, True)
    assert lines(filled, "count") == [{"timers": 22}]
    (purged,) = lines(filled, "purge", "--yes")
    assert (purged["done"], purged["uid"]) == (22, os.getuid())
    assert lines(filled, "count") == [{"timers": 0}]
    assert [row["done"] for row in lines(filled, "sweeps")] == [22, 20, 10]
    eventually(lambda: filled.stderr.count("a sweep over timers began") == 3)
    assert f"uid={os.getuid()}" in filled.stderr


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_import_restores_an_export_once(filled: Daemon, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"timers.{suffix}"
    with Client("demo", timeout=PATIENCE_S) as client:
        before = {t.key: t for t in client.list_timers(payloads=True)}
        assert lines(filled, "export", str(path)) == [{"timers": 32, "parked": 0}]
        assert (
            lines(filled, "import", str(path), "--bulk-load", "0" * 31 + "5", code=1)[0]["exists"]
            == 32
        )
        assert client.cancel_where().done == 32
        (done,) = lines(filled, "import", str(path))
        assert done["added"] == 32
        after = {t.key: t for t in client.list_timers(payloads=True)}
        assert after.keys() == before.keys()
        for key, timer in after.items():
            then = before[key]
            same = ("topic", "payload", "tag", "priority", "within_ns", "deadline_at")
            assert [getattr(timer, n) for n in same] == [getattr(then, n) for n in same]
            assert abs(timer.deadline_boot_ns - then.deadline_boot_ns) < SECOND_NS
        assert client.cancel_where(tag="red").done == 20
        (again,) = lines(filled, "import", str(path))
        assert (again["bulk_loaded"], client.count_timers()) == (32, 12)
    part = lines(filled, "export", str(path), "--topic", "y")
    assert part == [{"timers": 10, "parked": 0}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_import_restores_order_keys_and_late_policies(
    daemon: StartDaemon, tmp_path: Path, suffix: str
) -> None:
    demo, path = daemon("demo"), tmp_path / f"timers.{suffix}"
    with Client("demo", timeout=PATIENCE_S) as client:
        rows = [
            {"key": "plain", "delay": 3600}, {"key": "fires", "delay": 3600, "late": "fire"},
            {"key": "skips", "delay": 3600, "late": ("skip", 0.25), "order_key": "ann"},
            {"key": "joins", "delay": 3600, "late": ("coalesce", 90), "order_key": b"ann"},
        ]  # fmt: skip
        columns = {name: [row.get(name) for row in rows] for name in ("key", "delay", "order_key")}
        columns["late"] = [row.get("late") for row in rows]
        assert client.add_many(rows).ok
        before = {t.key: (t.late, t.order_key, t.priority) for t in client.list_timers()}
        assert before["plain"] == (None, None, None)
        assert (before["fires"][0], before["skips"][0]) == ("fire", ("skip", 0.25))
        assert before["skips"][1] == before["joins"][1] == OrderHash(order_hash("ann") or 0)
        lines(demo, "export", str(path))
        for again in (lambda: lines(demo, "import", str(path)), lambda: client.add_many(columns)):
            client.cancel_where()
            again()
            after = {t.key: (t.late, t.order_key, t.priority) for t in client.list_timers()}
            assert after == before
        lines(demo, "import", str(path), "--bulk-load", "0" * 31 + "7", "--mode", "replace")
        client.create_group("shippers", ["default"], ordered=True)
        client.reschedule_where(prefix="skips", delay=0)
        client.reschedule_where(prefix="joins", delay=0)
        with Consumer("demo", group="shippers", create=False, timeout=PATIENCE_S) as jobs:
            (first,) = jobs.get_many(2, timeout=PATIENCE_S)
            assert jobs.get(timeout=0.2) is None  # the other one has the same order key
            first.ack()
            assert jobs.get_many(2, timeout=PATIENCE_S)[0].key != first.key


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_import_keeps_keys_unique_for_the_rest_of_their_time(
    daemon: StartDaemon, tmp_path: Path, suffix: str
) -> None:
    demo, path = daemon("demo"), tmp_path / f"timers.{suffix}"
    with Client("demo", timeout=PATIENCE_S) as client:
        client.add("plain", 3600)
        client.add("soon", 3600, unique_for=0.001)
        client.add("once", 3600, unique_for=7200)
        before = {t.key: t.unique_until_boot_ns for t in client.list_timers()}
        assert before["plain"] is None
        assert (before["once"] or 0) - (before["soon"] or 0) > 7000 * SECOND_NS
        lines(demo, "export", str(path))
        assert client.cancel_where().done == 3
        assert lines(demo, "import", str(path))[0]["added"] == 3
        after = {t.key: t.unique_until_boot_ns for t in client.list_timers()}
        assert (after["plain"], after["soon"]) == (None, None)
        assert abs((after["once"] or 0) - (before["once"] or 0)) < SECOND_NS
        client.reschedule_where(prefix="once", delay=0)
        eventually(lambda: client.count_timers() == 2)
        with pytest.raises(Exists):
            client.add("once", 1)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_import_under_the_virtual_clock_keeps_keys_unique(
    daemon: StartDaemon, tmp_path: Path, suffix: str
) -> None:
    demo, path = daemon("demo", "--clock", "virtual"), tmp_path / f"timers.{suffix}"
    with Client("demo", timeout=PATIENCE_S) as client, Admin("demo", timeout=PATIENCE_S) as admin:
        admin.advance(500 * SECOND_NS)
        for seconds in (50, 300):
            client.add(f"for {seconds}", 1000, unique_for=seconds)
        before = {t.key: t.unique_until_boot_ns for t in client.list_timers()}
        lines(demo, "export", str(path))
        assert client.cancel_where().done == 2
        admin.advance(600 * SECOND_NS)
        assert client.list_timers().now_boot_ns == 600 * SECOND_NS
        assert lines(demo, "import", str(path))[0]["added"] == 2
        after = {t.key: t.unique_until_boot_ns for t in client.list_timers()}
        assert after == {"for 50": None, "for 300": before["for 300"]}


@pytest.mark.parametrize("field", ["deadline_ns", "unique_until_ns", "within_ns"])
def test_an_import_refuses_numbers_that_are_not_finite(
    daemon: StartDaemon, tmp_path: Path, field: str
) -> None:
    demo, path = daemon("demo"), tmp_path / "timers.jsonl"
    row = {"key": "k", "topic": "t", "payload": "", "within_ns": 0, "deadline_ns": 5}
    path.write_text(json.dumps({**row, field: float("inf")}))
    done = cli(demo, "timers", "import", str(path))
    assert done.returncode == Exit.USAGE, done.stderr
    assert "row 0" in done.stderr
    with Client("demo", timeout=PATIENCE_S) as client:
        assert client.count_timers() == 0


def test_rows_of_one_call_have_their_own_unique_times(daemon: StartDaemon) -> None:
    daemon("demo")
    with Client("demo", timeout=PATIENCE_S) as client:
        rows = [
            {"key": "a", "delay": 0.0, "unique_for": 3600.0}, {"key": "b", "delay": 0.0},
            {"key": "c", "delay": 0.0, "unique_for": timedelta(hours=1)},
        ]  # fmt: skip
        columns = {
            "key": ["d", "e"], "delay": [0.0, 0.0], "unique_for": [3600.0, None],
        }  # fmt: skip
        for given, keys, refused in ((rows, "abc", "ac"), (columns, "de", "d")):
            assert client.add_many(given).ok
            eventually(lambda: client.count_timers() == 0)
            again = client.add_many(given)
            exists = [i for i, s in enumerate(again.statuses) if s == Status.EXISTS]
            assert "".join(keys[i] for i in exists) == refused
        with pytest.raises(InvalidArgument, match="unique_for"):
            client.add_many([{"key": "f", "delay": 0.0, "unique_for": -1}])


def test_an_import_needs_one_partition(daemon: StartDaemon, tmp_path: Path) -> None:
    demo = daemon("demo", "--shards", "2", "--capacity", "4096", "--payload-memory", "1MiB")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("shop", 2)
    path = tmp_path / "timers.jsonl"
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        client.add("k", 3600)
        lines(demo, "export", str(path), "--namespace", "shop")
        done = cli(demo, "timers", "import", str(path), "--namespace", "shop")
        assert (done.returncode, "one partition" in done.stderr) == (Exit.USAGE, True)
        assert client.count_timers() == 1


def test_an_order_key_of_an_export_needs_one_partition(daemon: StartDaemon) -> None:
    daemon("demo", "--shards", "2", "--capacity", "4096", "--payload-memory", "1MiB")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("shop", 2)
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        with pytest.raises(Partitioned, match="hash"):
            client.add("k", 1, order_key=OrderHash(7))
        with pytest.raises(Partitioned, match="hash"):
            client.add_many([{"key": "k", "delay": 1, "order_key": OrderHash(7)}])


def test_a_file_that_is_no_export_adds_nothing(filled: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "timers.jsonl"
    for text in ("nonsense\n", "{}\n", '{"key": "k"}\n', "[1]\n"):
        path.write_text(text)
        done = cli(filled, "timers", "import", str(path))
        assert done.returncode == Exit.USAGE, done.stderr
    assert lines(filled, "count") == [{"timers": 32}]


def test_an_add_takes_a_tag_from_the_command_line(filled: Daemon) -> None:
    assert cli(filled, "add", "tagged", "--delay", "1h", "--tag", "blue").returncode == 0
    assert lines(filled, "ls", "--tag", "blue")[0]["key"] == "tagged"
    shown = json.loads(cli(filled, "get", "tagged", "--json").stdout)
    assert shown["tag"] == "blue"

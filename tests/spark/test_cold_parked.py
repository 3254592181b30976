"""Parked timers go through WAL, lake and cold tier, and are unparked in time."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from click.testing import CliRunner
from cold_driver import Mortal, TableDaemon, Wal, small_pieces, spark_of_python, waiting
from pyspark.sql import SparkSession
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    eventually,
    notices,
    remove_arena_files,
    stats,
)

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Admin, CancelResult, Client, Status
from purgatoryd.pipeline import cold
from purgatoryd.pipeline.bulk_loading import BulkLoader
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.parked import collect
from purgatoryd.pipeline.promote import promote
from purgatoryd.pipeline.ship import Shipper
from purgatoryd.pipeline.sources import successors_in
from purgatoryd.pipeline.tier import HOUR_NS, Tier
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import ParkedElsewhere, WindowElsewhere
from purgatoryd.shm_layout.shards import read_table
from purgatoryd.shm_layout.wal import segments

pytestmark = pytest.mark.tier("test")

MINUTE_NS = 60 * 10**9
ORIGIN_NS = 1_893_456_000 * 10**9  # 2030-01-01T00:00:00Z
NO_SPARK: Any = None


def client(namespace: str = "shop") -> Client:
    return Client("demo", namespace=namespace, timeout=PATIENCE_S)


@dataclass
class World:
    """A daemon under the virtual clock with its WAL, a lake and a cold tier. The daemon parks
    timers that are due in more than an hour."""

    daemon: Daemon
    wal: Path
    lake: Lake
    tier: Tier

    def seal(self) -> None:
        """Fill the newest segment, so that all records are in sealed segments, and ship these."""
        before = segments(self.wal)[-1].lsn
        with client("other") as some:
            some.add_many([(f"fill {before} {n}", 1e6, "t", b"x" * 200) for n in range(1500)])
        eventually(lambda: segments(self.wal)[-1].lsn > before)
        self.ship()

    def ship(self) -> None:
        """Ship all sealed segments to the lake."""
        shipper = Shipper(self.wal, self.lake, "node")
        list(shipper.poll())
        shipper.close()

    def reboot(self) -> None:
        """Kill the daemon and remove its arena; start it again from its WAL, with a new arena."""
        self.daemon.kill()
        remove_arena_files(self.daemon.paths)
        self.daemon.start()

    def fired(self) -> list[tuple[Any, bytes]]:
        """Return (key, payload) of all notices, sorted by key."""
        reader = Reader.attach(self.daemon.paths)
        try:
            return sorted((one.key, one.payload) for one in notices(reader, "shop", "t"))
        finally:
            reader.close()


def advance(hours: float) -> None:
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.advance(int(hours * HOUR_NS))


@pytest.fixture
def world(daemon: StartDaemon, tmp_path: Path) -> World:
    wals, root = tmp_path / "wal", tmp_path / "lake"
    wals.mkdir()
    root.mkdir()
    demo = daemon(
        "demo", "--wal-dir", str(wals), "--wal-segment-bytes", "256K", "--clock", "virtual",
        "--wall-origin", "2030-01-01T00:00:00Z", "--durable-namespace", "shop",
    )  # fmt: skip
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.set_namespace("shop", park_beyond_ns=HOUR_NS)
    return World(demo, wals / "demo", Lake(root), Tier(root))


def minutes(n: int) -> float:
    """Return the delay of k<n> in seconds."""
    return 7200.0 + 60 * n


@pytest.mark.tier("all")
def test_parked_timers_come_back_in_time_unless_they_ended(
    spark: SparkSession, world: World
) -> None:
    tier, lake = world.tier, world.lake
    with client() as some, BulkLoader("demo") as hot:
        rows = [(f"k{n}", minutes(n), "t", b"p%d" % n) for n in range(40)]
        assert set(some.add_many(rows).statuses) == {Status.PARKED}
        assert some.cancel("k0") is CancelResult.CANCELLED
        some.add("k1", 10 * 3600, mode="extend")
        some.add("k2", 1800, topic="t", payload=b"near", mode="replace")
        some.add("k3", minutes(60), topic="t", payload=b"other", mode="replace")
        world.seal()
        assert collect(spark, tier, lake, hot).rows == 38  # all except k0 and k2
        due = {key[2].decode(): ns for key, ns in waiting(tier).items()}
        assert due.keys() == {f"k{n}" for n in range(40)} - {"k0", "k2"}
        assert (due["k1"], due["k3"]) == (ORIGIN_NS + 10 * HOUR_NS, ORIGIN_NS + 3 * HOUR_NS)
        assert due["k30"] == ORIGIN_NS + 2 * HOUR_NS + 30 * MINUTE_NS

        some.cancel("k4")
        some.add("k5", 11 * 3600, mode="extend")
        some.add("k6", 60, topic="t", payload=b"soon", mode="replace")
        world.seal()
        some.add("new", minutes(5), topic="t", payload=b"not sealed")
        found = collect(spark, tier, lake, hot, [world.wal])
        # rows: the extended k5, and `new`; ended: k4, the old k5, and the old k6
        assert (found.rows, found.ended) == (2, 3)
        again = collect(spark, tier, lake, hot, [world.wal])
        assert (again.rows, again.ended) == (0, 0)
        with BulkLoader("other") as other, pytest.raises(WindowElsewhere):
            promote(NO_SPARK, tier, ORIGIN_NS, other)

        some.cancel("k7")  # the tier does not know this cancel yet
        (window,) = promote(spark, tier, ORIGIN_NS + 2 * HOUR_NS + 20 * MINUTE_NS, hot)
        assert window.results == {"UNPARKED": 13, "UNKNOWN": 1}
        assert (cold.status(tier)["promoted"], cold.status(tier)["unknown"]) == (13, 1)
        back = some.get("k8")
        assert back is not None
        assert (back.status, back.payload) == (Status.FOUND, b"p8")
        still = some.get("k30")
        assert still is not None
        assert (still.status, still.payload) == (Status.PARKED, b"")
        gone = pa.table({"namespace": ["shop"], "key_type": ["str"], "key": [b"k31"]})
        assert cold.cancel(tier, gone, hot) == {"CANCELLED": 1}
        assert some.cancel("k32") is CancelResult.CANCELLED
        advance(2 + 20 / 60)
        early = {f"k{n}": b"p%d" % n for n in range(8, 20)}
        early |= {"k2": b"near", "k6": b"soon", "new": b"not sealed", "k20": b"p20"}
        assert set(world.fired()) <= set(early.items())
        assert len(world.fired()) == 15  # without k20: it is due, but in the next window
        world.seal()
        assert collect(spark, tier, lake, hot).ended == 1  # k32 was cancelled
        promote(spark, tier, ORIGIN_NS + 12 * HOUR_NS, hot)
        advance(12)
    live = {f"k{n}": b"p%d" % n for n in range(8, 40) if n not in (31, 32)}
    live |= {"k1": b"p1", "k3": b"other", "k5": b"p5"} | early
    assert world.fired() == sorted(live.items())
    assert (stats(world.daemon)["parked"], stats(world.daemon)["overdue"]) == (0, 0)
    assert cold.verify(spark, tier)[1] == []


@pytest.mark.tier("all")
def test_parked_timers_come_back_after_reboots(spark: SparkSession, world: World) -> None:
    """Two arenas park timers; the second one fills no segment. A third arena arms the timers."""
    tier, lake = world.tier, world.lake
    timers = [(f"k{n}", minutes(n), "t", b"p%d" % n) for n in range(40)]
    until_ns = ORIGIN_NS + 3 * HOUR_NS
    with client() as some, BulkLoader("demo") as hot:
        some.add_many(timers[:20])
        world.seal()
        assert collect(spark, tier, lake, hot).rows == 20
        some.add_many(timers[20:30])
        assert some.cancel("k0") is CancelResult.CANCELLED
    world.reboot()
    with BulkLoader("demo") as hot, pytest.raises(ParkedElsewhere):
        promote(spark, tier, until_ns, hot)
    assert stats(world.daemon)["parked"] == 29
    world.ship()  # all segments of the first arena, and the first snapshot of the second arena
    with client() as some, BulkLoader("demo") as hot:
        assert list(successors_in(world.wal).values()) == hot.uuids()
        found = collect(spark, tier, lake, hot)
        assert (found.rows, found.ended) == (10, 1)
        begun, late = promote(spark, tier, until_ns, hot)
        assert (begun.results, begun.cancelled) == ({"UNPARKED": 19}, 1)
        assert late.results == {"UNPARKED": 10}
        some.add_many(timers[30:])
    world.reboot()
    world.ship()
    with BulkLoader("demo") as hot:
        assert collect(spark, tier, lake, hot, [world.wal]).rows == 10
        (late,) = promote(spark, tier, until_ns, hot)
        assert late.results == {"UNPARKED": 10}
    advance(3)
    assert world.fired() == sorted((key, payload) for key, _, _, payload in timers[1:])
    assert (stats(world.daemon)["parked"], stats(world.daemon)["overdue"]) == (0, 0)
    figures = cold.status(tier)
    assert (figures["promoted"], figures["unknown"]) == (39, 0)


@pytest.mark.tier("all")
def test_each_shard_has_its_parked_timers_back(
    spark: SparkSession, daemon: StartDaemon, tmp_path: Path
) -> None:
    assert spark  # the command uses this Spark session
    for name in ("wal", "lake"):
        (tmp_path / name).mkdir()
    demo = daemon("demo", "--wal-dir", str(tmp_path / "wal"), "--shards", "2")
    names = [f"n{n}" for n in range(8)]
    with Admin("demo", timeout=PATIENCE_S) as admin:
        for name in names:
            admin.set_namespace(name, park_beyond_ns=HOUR_NS)
    for name in names:
        with client(name) as some:
            added = [some.add(key, 7200.0, payload=name.encode()) for key in ("k", "gone")]
            assert {one.status for one in added} == {Status.PARKED}
            some.cancel("gone")
    found = read_table(demo.dir, "demo")
    assert found is not None
    assert {shard for name in names for shard in found.place(name).shards} == {0, 1}
    done = CliRunner().invoke(app, [
        "pipeline", "cold", "promote", "--name", "demo", "--lake", str(tmp_path / "lake"),
        "--wal-dir", str(tmp_path / "wal"), "--json",
        "--window", datetime.fromtimestamp(time.time() + 3 * 3600, UTC).isoformat(),
    ])  # fmt: skip
    assert done.exit_code == Exit.DONE, done.output
    assert json.loads(done.stdout)["results"] == {"UNPARKED": len(names)}
    for name in names:
        with client(name) as some:
            back = some.get("k")
            assert back is not None
            assert (back.status, back.payload) == (Status.FOUND, name.encode())


# ---- kills between any two steps -------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    spark_of_python(monkeypatch)


def row(n: int, ticket: int, due_ns: int = ORIGIN_NS) -> dict[str, Any]:
    """Return the row of a parked timer k<n>, as read from the WAL."""
    key = {"namespace": "shop", "key_type": "str", "key": b"k%d" % n}
    return key | {"topic": "t", "payload": b"p%d" % n, "deadline_ns": due_ns, "ticket": ticket}


@pytest.mark.usefixtures("quick")
def test_a_collection_that_is_killed_counts_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, tier, last, killed = TableDaemon(), Tier(tmp_path), 0, True
    mortal, seen = Mortal(monkeypatch, daemon), set[int]()

    def step() -> object:
        """Collect ten parked timers, and a cancel of the last timer of the previous step."""
        found: Any = Wal([row(last * 10 + n, last * 10 + n + 1) for n in range(10)])
        found.ended = [row(last * 10 - 1, last * 10)] if last else []
        return collect(NO_SPARK, tier, found, daemon)

    step()
    while killed:
        last += 1
        before = len(waiting(tier))
        killed = mortal.run(step, last)
        seen.add(len(waiting(tier)) - before)
        step()
        assert len(waiting(tier)) == before + 9
    assert last > 5
    assert seen == {0, 9}


@pytest.mark.usefixtures("quick")
def test_returns_that_are_killed_are_whole_in_the_end(
    daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch, 7)
    demo = daemon("demo", "--wal-dir", str(tmp_path), "--durable-namespace", "shop")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.set_namespace("shop", park_beyond_ns=HOUR_NS)
    (tmp_path / "lake").mkdir()
    tier, due_ns = Tier(tmp_path / "lake"), time.time_ns() + 2 * HOUR_NS
    cancelled = set[str]()
    with client() as some, BulkLoader("demo") as hot:
        mortal, deaths, killed = Mortal(monkeypatch, hot), 0, True
        while killed:
            numbers = range(deaths * 20, deaths * 20 + 20)
            added = some.add_many([(f"k{n}", 7200.0, "t", b"p%d" % n) for n in numbers])
            tickets = zip(numbers, added.tickets, strict=True)
            wal: Any = Wal([row(n, ticket, due_ns) for n, ticket in tickets])
            collect(NO_SPARK, tier, wal, hot)
            deaths += 1

            def bring() -> object:
                return promote(NO_SPARK, tier, due_ns + MINUTE_NS, hot)

            killed = mortal.run(bring, deaths)
            cancelled.add(f"k{numbers[deaths % 20]}")
            assert some.cancel(f"k{numbers[deaths % 20]}") is CancelResult.CANCELLED
            bring()
        assert deaths >= 7
        names = [f"k{n}" for n in range(deaths * 20)]
        found = {name: some.get(name) for name in names}
    for name, timer in found.items():
        assert (timer is None) == (name in cancelled)
        assert timer is None or (timer.status, timer.payload) == (
            Status.FOUND,
            b"p" + name[1:].encode(),
        )
    figures = stats(demo)
    assert (figures["parked"], figures["live"]) == (0, len(names) - len(cancelled))
    assert figures["expiries"] == 0


@pytest.mark.usefixtures("quick")
def test_timers_of_another_arena_do_not_come_back(daemon: StartDaemon, tmp_path: Path) -> None:
    demo = daemon("demo", "--wal-dir", str(tmp_path), "--durable-namespace", "shop")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.set_namespace("shop", park_beyond_ns=1)
    with client() as some, BulkLoader("demo") as hot:
        (uuid,) = hot.uuids()
        parked = row(1, some.add("k1", 7200.0).ticket) | {"row": 0}
        other, own = (pa.Table.from_pylist([parked | {"daemon": of}]) for of in ("0" * 32, uuid))
        with pytest.raises(ParkedElsewhere, match=f"{'0' * 32}; .* {uuid} took its place"):
            hot.add(uuid4(), other)
        assert stats(demo)["live"] == 0
        assert hot.add(uuid4(), own).counts == {"UNPARKED": 1}
    assert stats(demo)["live"] == 1

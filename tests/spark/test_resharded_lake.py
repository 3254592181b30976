"""The lake of a deployment whose number of shards changed has each timer once and is auditable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from deployment import Deployment, deployments
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from shards_driver import FAR_NS, Ledger

from purgatoryd.cli.wal import folders
from purgatoryd.pipeline import fleet, trace
from purgatoryd.pipeline.advice import sizes
from purgatoryd.pipeline.audit import audit
from purgatoryd.pipeline.continuity import excluded
from purgatoryd.pipeline.lake import OPENINGS, Lake
from purgatoryd.pipeline.living import in_place, living
from purgatoryd.pipeline.progress import State, progress
from purgatoryd.pipeline.rebalance_plan import Host
from purgatoryd.pipeline.ship import Convoy
from purgatoryd.pipeline.whole import whole
from purgatoryd.shm_layout.errors import InvalidSetting
from purgatoryd.shm_layout.wal import segments, uuid_of

pytestmark = pytest.mark.tier("test")


UNKNOWN_TICKET = 2**47
"""A ticket that no timer has."""


class Shipped(NamedTuple):
    """A daemon that was resharded from no shards to two, to three and to one, and the lake of this
    daemon."""

    one: Deployment
    lake: Lake
    tickets: set[int]
    """Tickets of all armed timers."""


@pytest.fixture
def begin(daemon_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    with deployments(daemon_dir, tmp_path) as begin:
        yield begin


@pytest.fixture
def twice_resharded(begin: Callable[..., Deployment], tmp_path: Path) -> Shipped:
    one, ledger = begin(wal=True, lone=True), Ledger(9)
    (tmp_path / "lake").mkdir()
    with one.opened(commit=True) as shards:
        ledger.fill(shards)
        ledger.operate(shards)
        ledger.arm(shards, b"a", b"far", FAR_NS)
    for count in (2, 3, 1):
        if count == 1:
            # after a reboot, the arenas that are merged into one shard have written no records
            one.reboot()
        one.start(count)
        with one.opened(commit=True) as shards:
            ledger.take(shards)
            shards.of(b"a", b"far").cancel(b"far", b"a")
            ledger.arm(shards, b"a", b"far", FAR_NS)
            tickets = {info.ticket for core in shards.cores for info in core.scan()}
    lake = Lake(tmp_path / "lake")
    with contextlib.closing(Convoy(partial(folders, tmp_path, "demo"), lake, "node")) as convoy:
        list(convoy.poll())
    return Shipped(one, lake, tickets)


@pytest.mark.costly("its lake is of four deployments")
def test_the_lake_has_each_timer_once_though_the_number_of_shards_changed(
    spark: SparkSession, twice_resharded: Shipped
) -> None:
    one, lake, _ = twice_resharded
    [wal] = Path(one.config.wal_dir).glob("demo-3-*")
    [newest] = {uuid_of(file.path).hex() for file in segments(wal)}
    alive = living(spark, lake).collect()
    assert {row.daemon for row in alive} == {newest}
    assert len({row.ticket for row in alive}) == len(alive) > 10
    segments_, openings_ = in_place(lake)
    assert {m.daemon for m in segments_} <= {newest} == {*openings_}
    bulk_loads = fleet.measured_in(spark, lake.root).collect()
    assert {row.daemon for row in bulk_loads} == {newest}
    assert sum(row.live for row in bulk_loads) == len(alive)
    gone = excluded([*lake.manifests(), *lake.manifests(OPENINGS)]).absent
    assert len(gone) == 1 + 2 + 3
    for daemon in gone:
        with pytest.raises(InvalidSetting, match="a daemon that is in use"):
            fleet.of_today({daemon: Host("a", 1, 1.0)}, {}, gone)
    lifecycles = trace.history(spark, lake, [wal], trace.Key("a", "bytes", b"far"))
    assert [lifecycle.final_state for lifecycle in lifecycles] == [*["cancelled"] * 3, None]
    kinds = [[event.kind for event in lifecycle.events] for lifecycle in lifecycles]
    assert kinds == [*[["arm", "end"]] * 3, ["arm"]]
    assert lifecycles[-1].daemon == newest
    # sizes() lists the newest daemon, although the lake has no segment of this daemon yet
    (size,) = sizes(spark, lake).collect()
    assert (size.daemon, size.living) == (newest, len(alive))


def test_until_all_shards_of_the_new_number_are_shipped_those_before_count(
    spark: SparkSession, twice_resharded: Shipped
) -> None:
    _, lake, _ = twice_resharded
    for last, counted in (("demo-3-0", 3), ("demo-2-1", 2)):
        unship(lake, last)
        states = {one.daemon: one.state for one in progress(lake)}
        alive = living(spark, lake).collect()
        assert {states[row.daemon] for row in alive} == {State.COUNTS}
        assert len({row.daemon for row in alive}) == counted
        assert len({row.ticket for row in alive}) == len(alive) > 10
    assert [*states.values()].count(State.INCOMPLETE) == 2


def unship(lake: Lake, wal: str) -> None:
    """Remove all files of this WAL from the lake."""
    for manifest in (*lake.manifests(), *lake.manifests(OPENINGS)):
        if manifest.wal == wal:
            (lake.folder("manifests", manifest.daemon) / f"{manifest.name}.json").unlink()


@pytest.mark.tier("all")
def test_an_audit_holds_shard_generations_against_each_other(
    spark: SparkSession, twice_resharded: Shipped
) -> None:
    one, lake, _ = twice_resharded
    with whole(spark, lake, folders(Path(one.config.wal_dir), "demo")) as read:
        assert sorted(len(resharding.upto) for resharding in read.found.reshardings) == [1, 2, 3]
        verdict = audit(*read)
        assert (verdict.counts, verdict.lost) == ({}, [])
        [last] = [d.openings[0].daemon for d in read.found.reshardings if d.shards == 1]
        row = read.openings.where((F.col("daemon") == last) & (F.col("kind") == "arm")).first()
        assert row is not None
        is_it = (F.col("daemon") == last) & F.col("ticket").eqNullSafe(row.ticket)
        other = F.when(is_it, UNKNOWN_TICKET).otherwise(F.col("ticket"))
        planted = audit(read.bronze, read.openings.withColumn("ticket", other), read.found)
    reported = {(one.kind, one.ticket) for one in planted.samples}
    assert {("snapshot_lacks", row.ticket), ("snapshot_invents", UNKNOWN_TICKET)} <= reported

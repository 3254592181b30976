from __future__ import annotations

import datetime as dt
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit_stories import CLEAN, OPEN, by, restarted, ship, uuid
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row, SparkSession

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.cli.pipeline_rebalance_plan import read, save
from purgatoryd.pipeline import fleet, silver
from purgatoryd.pipeline.advice import sizes
from purgatoryd.pipeline.continuity import excluded, successors
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.rebalance_plan import (
    Host,
    Move,
    RebalancePlan,
    Space,
    plan_rebalance,
    rebalance_plan_of,
)
from purgatoryd.shm_layout.errors import BadPath, InvalidSetting

pytestmark = pytest.mark.tier("test")

RACKS = {"a1": "a", "a2": "a", "b1": "b", "c1": "c"}
HOSTS = [Host(name, 1000, 100.0, {"rack": rack}) for name, rack in RACKS.items()]


def after(spaces: list[Space], found: RebalancePlan) -> dict[str, str]:
    """Apply a plan; return the daemon of every namespace."""
    where = {space.name: space.host for space in spaces}
    for move in found.moves:
        assert where[move.namespace] == move.source
        where[move.namespace] = move.target
    return where


def shares(spaces: list[Space], where: dict[str, str]) -> dict[str, float]:
    used = dict.fromkeys(RACKS, 0.0)
    for host in HOSTS:
        mine = [space for space in spaces if where[space.name] == host.name]
        live, rate = sum(one.live for one in mine), sum(one.rate for one in mine)
        used[host.name] = max(live / host.capacity, rate / host.speed)
    return used


def test_a_balanced_fleet_stays() -> None:
    spaces = [Space(f"n{name}", name, 500, 10.0) for name in RACKS]
    assert plan_rebalance(HOSTS, spaces).moves == ()


def test_two_of_three_on_one_rack_are_parted_by_the_smallest_move() -> None:
    spaces = [
        Space("x", "a1", 300, 1.0, group="copies"),
        Space("y", "a2", 290, 1.0, group="copies"),
        Space("z", "b1", 300, 1.0, group="copies"),
        Space("other", "c1", 300, 1.0),
    ]
    found = plan_rebalance(HOSTS, spaces, tolerance=1.0)
    assert [(move.namespace, move.target) for move in found.moves] == [("y", "c1")]
    assert "shares rack a" in found.moves[0].reason


def test_four_copies_on_three_racks_move_as_little_as_they_can() -> None:
    spaces = [Space(f"s{i}", "a1", 100, 1.0, group="copies") for i in range(4)]
    where = after(spaces, plan_rebalance(HOSTS, spaces, tolerance=1.0))
    racks = [RACKS[host] for host in where.values()]
    assert sorted(racks.count(rack) for rack in "abc") == [1, 1, 2]


def test_apart_by_node_where_there_is_no_rack() -> None:
    hosts = [Host("h1", 100, 1.0), Host("h2", 100, 1.0)]
    spaces = [Space("x", "h1", 1, 0.0, group="g"), Space("y", "h1", 1, 0.0, group="g")]
    assert len(plan_rebalance(hosts, spaces).moves) == 1


def test_a_full_daemon_gives_to_the_empty_ones() -> None:
    spaces = [Space(f"n{i}", "a1", 100, 1.0) for i in range(8)]
    found = plan_rebalance(HOSTS, spaces, tolerance=0.15)
    used = shares(spaces, after(spaces, found))
    assert max(used.values()) - min(used.values()) <= 0.15
    assert len(found.moves) == 6
    assert (found.before, found.after) == (0.8, 0.2)


def test_the_bulk_load_counts_as_the_capacity_does() -> None:
    spaces = [Space("busy", "a1", 1, 60.0), Space("also", "a1", 1, 30.0)]
    assert [move.namespace for move in plan_rebalance(HOSTS, spaces).moves] == ["also"]


def test_evening_out_brings_no_copies_together() -> None:
    spaces = [
        Space("x", "a1", 500, 1.0, group="copies"),
        Space("y", "b1", 400, 1.0, group="copies"),
        Space("z", "c1", 400, 1.0, group="copies"),
        Space("big", "a1", 300, 1.0),
    ]
    where = after(spaces, plan_rebalance(HOSTS, spaces))
    assert len({RACKS[where[name]] for name in "xyz"}) == 3


def test_nothing_goes_where_there_is_no_free_capacity() -> None:
    hosts = [Host("h1", 1000, 9.0), Host("h2", 10, 9.0)]
    spaces = [Space("x", "h1", 400, 0.0, group="g"), Space("y", "h1", 400, 0.0, group="g")]
    assert plan_rebalance(hosts, spaces).moves == ()


def test_namespaces_of_one_name_are_moved_by_themselves() -> None:
    """Two daemons can have namespaces of the same name. The plan counts each for its own daemon,
    whatever the order of the rows. It moves none to a daemon that has a namespace of that name."""
    spaces = [
        Space("default", "a1", 900, 1.0), Space("default", "a2", 10, 1.0),
        Space("x", "a1", 50, 1.0), Space("_purgatoryd", "a1", 40, 1.0),
    ]  # fmt: skip
    found = plan_rebalance(HOSTS, spaces)
    assert found == plan_rebalance(HOSTS, spaces[::-1])
    assert found.before == 0.99
    assert [(m.namespace, m.source, m.target) for m in found.moves] == [
        ("x", "a1", "a2"), ("default", "a1", "b1"),
    ]  # fmt: skip
    full = [*spaces, Space("default", "b1", 0, 0.0), Space("default", "c1", 0, 0.0)]
    assert "default" not in {
        move.namespace for move in plan_rebalance(HOSTS, full, tolerance=0.01).moves
    }


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="once per daemon"):
        plan_rebalance(HOSTS, [Space("x", "a1", 1, 1.0), Space("x", "a1", 2, 1.0)])
    with pytest.raises(InvalidSetting):
        plan_rebalance(HOSTS, [Space("x", "nowhere", 1, 1.0)])
    with pytest.raises(InvalidSetting):
        plan_rebalance([Host("h", 0, 1.0)], [])


SPACES = st.lists(
    st.builds(
        Space,
        st.uuids().map(str),
        st.sampled_from(sorted(RACKS)),
        st.integers(0, 400),
        st.floats(0, 40),
        st.sampled_from(["", "g", "h"]),
    ),
    max_size=12,
    unique_by=lambda space: space.name,
)


@settings(deadline=None, max_examples=50)
@given(spaces=SPACES)
def test_a_plan_never_increases_the_imbalance_and_is_deterministic(spaces: list[Space]) -> None:
    found = plan_rebalance(HOSTS, spaces)
    assert plan_rebalance(HOSTS[::-1], spaces[::-1]) == found
    assert rebalance_plan_of(found.record()) == found
    assert len({move.namespace for move in found.moves}) == len(found.moves)
    where = after(spaces, found)
    assert max(shares(spaces, where).values()) == pytest.approx(found.after)
    moved = [replace(space, host=where[space.name]) for space in spaces]
    assert together(moved) <= together(spaces)


def together(spaces: list[Space]) -> int:
    """Return the number of pairs of namespaces of the same group that are on the same rack."""
    return sum(
        one.group == other.group != "" and RACKS[one.host] == RACKS[other.host]
        for i, one in enumerate(spaces)
        for other in spaces[:i]
    )


# ---- figures from the lake -------------------------------------------------------------------


FLEET = """
[hosts.alpha]
daemon = "aa"
capacity = 100
speed = 10
labels = { rack = "a" }
[hosts.beta]
daemon = "bb"
capacity = 100
speed = 10
[groups]
copies = ["x", "y"]
"""


def record(
    kind: str, namespace: str | None, second: int, ticket: int | None = None,
    cause: str | None = None, replaced: int | None = None,
) -> tuple[object, ...]:  # fmt: skip
    at = dt.datetime(2030, 1, 1, second=second, tzinfo=dt.UTC)
    return "aa", kind, namespace, at, ticket, cause, replaced


def test_a_plan_is_made_of_wals(spark: SparkSession, tmp_path: Path) -> None:
    columns = (
        "daemon string, kind string, namespace string, at timestamp, ticket long, cause string, "
        "replaced long"
    )
    bronze = spark.createDataFrame(
        [
            *(record("arm", "x", i, 10 + i) for i in range(20)),
            record("arm", "x", 20, 30, replaced=7),
            record("fire", "x", 21, 10, "expired"), record("end", "x", 22, 11, "cancelled"),
            record("watch", "y", 23, 40), record("watch", "y", 24, 41),
            record("outcome", "y", 25, 40, "satisfied"), record("end", "y", 26, 40, "acknowledged"),
            record("fire", "y", 27, 50, "published"), record("group", None, 50),
        ],
        columns,
    )  # fmt: skip
    opened = [record("arm", "x", 0, 7), record("arm", "x", 0, 12), record("watermark", "x", 0)]
    both = bronze.unionByName(spark.createDataFrame(opened, columns))
    found = fleet.measured(bronze, silver.open_adds(both)).collect()
    assert {(r.daemon, r.namespace): (r.live, r.rate) for r in found} == {
        ("aa", "x"): (19, 23 / 50), ("aa", "y"): (1, 3 / 50),
    }  # fmt: skip
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    hosts, groups = fleet.read_fleet(path)
    made = plan_rebalance(list(hosts.values()), fleet.spaces(found, hosts, groups))
    assert [(move.namespace, move.target) for move in made.moves] == [("y", "beta")]


def test_a_daemon_that_was_recovered_from_the_wal_counts_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The arena before the recovery has no timers, and is not part of the fleet."""
    by(1, CLEAN.having(closing=OPEN)).write(tmp_path / "first" / "demo")
    restarted(2, OPEN).write(tmp_path / "second" / "demo")
    (tmp_path / "lake").mkdir()
    lake = Lake(tmp_path / "lake")
    for folder in ("first", "second"):
        ship(tmp_path / folder / "demo", lake, "eagle")
    found = fleet.measured_in(spark, lake.root).collect()
    (size,) = sizes(spark, lake).collect()
    assert {row.daemon for row in found} == {uuid(2).hex()}
    assert sum(row.live for row in found) == 1  # one of the two armed timers has fired
    assert (size.daemon, size.living) == (uuid(2).hex(), 1)
    named = {uuid(1).hex(): HOSTS[0]}
    reported = lake.manifests()
    known = successors(reported), excluded(reported).absent
    assert fleet.of_today(named, *known) == {uuid(2).hex(): HOSTS[0]}
    with pytest.raises(InvalidSetting, match="of only one host"):
        fleet.of_today(named | {uuid(2).hex(): HOSTS[1]}, *known)


def test_a_fleet_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    with pytest.raises(BadPath):
        fleet.read_fleet(path)
    path.write_text("[hosts.alpha]\ncapacity = 1")
    with pytest.raises(InvalidSetting):
        fleet.read_fleet(path)
    with pytest.raises(InvalidSetting, match="includes this daemon"):
        fleet.spaces([Row(daemon="cc", namespace="x", live=1, rate=1.0)], {}, {})


ONE = {"daemon": "'aa'", "capacity": "1", "speed": "1"}


def host(name: str = "a", **fields: str) -> str:
    reported = [f"{field} = {value}" for field, value in (ONE | fields).items()]
    return "\n".join([f"[hosts.{name}]", *reported, ""])


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("hosts = 'x'", "hosts"), ("[hosts]\na = 5", "a"), (host(capacity="'many'"), "a.capacity"),
        (host(capacity="0"), "a.capacity"), (host(capacity="true"), "a.capacity"),
        (host(speed="nan"), "a.speed"), (host(labels="'r'"), "a.labels"),
        (host(daemon="['aa']"), "a.daemon"), (host() + host("b"), "b.daemon"),
        (host() + "[groups]\ng = 5", "groups.g"), (host() + "[groups]\ng = 'abc'", "groups.g"),
        (host() + "[groups]\ng = [1]", "groups.g"),
    ],
)  # fmt: skip
def test_errors_of_a_fleet_are_named(tmp_path: Path, text: str, setting: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(InvalidSetting) as wrong:
        fleet.read_fleet(path)
    assert wrong.value.setting == setting


def moves(*names: str) -> RebalancePlan:
    return RebalancePlan(tuple(Move(name, "a1", "b1", 1, "") for name in names), 0.9, 0.5)


def test_two_plans_at_once_are_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second plan is saved before the first plan is on disk."""
    real, others = os.fsync, [moves("2")]

    def interrupted(fd: int) -> None:
        if others:
            save(tmp_path, others.pop())
        real(fd)

    monkeypatch.setattr(os, "fsync", interrupted)
    save(tmp_path, moves("1"))
    assert read(tmp_path) == moves("1")
    assert [path.name for path in tmp_path.iterdir()] == ["rebalance_plan.json"]


def test_a_plan_is_made_by_the_command(spark: SparkSession, tmp_path: Path) -> None:
    """The command works for an empty lake. Later, its plan moves timers from a full daemon to the
    other one."""
    assert spark  # the command uses this Spark session
    fleet_file, lake = tmp_path / "fleet.toml", tmp_path / "lake"
    lake.mkdir()

    def make() -> Any:
        options = ["--lake", str(lake), "--fleet", str(fleet_file), "--json"]
        done = CliRunner().invoke(app, ["pipeline", "rebalance-plan", "make", *options])
        assert done.exit_code == Exit.DONE, done.output
        return json.loads(done.stdout)["moves"]

    names = {"aa": uuid(1).hex(), "bb": uuid(2).hex()}
    small = FLEET.replace("capacity = 100", "capacity = 2", 1)
    fleet_file.write_text(re.sub("aa|bb", lambda found: names[found[0]], small))
    assert make() == []
    by(1, CLEAN.having(closing=OPEN)).write(tmp_path / "first" / "demo")
    ship(tmp_path / "first" / "demo", Lake(lake), "eagle")
    (move,) = make()
    assert (move["namespace"], move["source"], move["target"]) == ("shop", "alpha", "beta")
    assert read(lake) is not None


def test_plan_show_prints_the_moves_of_the_file(tmp_path: Path) -> None:
    def show() -> tuple[int, str]:
        done = CliRunner().invoke(
            app, ["pipeline", "rebalance-plan", "show", "--lake", str(tmp_path)]
        )
        return done.exit_code, done.output

    assert show() == (Exit.NEGATIVE, "")
    save(tmp_path, moves("1"))
    assert show()[1].startswith("planned   1: a1 -> b1, 1 timers")
    for damaged in ("{}", '{"moves": [], "before": "x", "after": null}'):
        (tmp_path / "rebalance_plan.json").write_text(damaged)
        assert show()[0] == Exit.BROKEN

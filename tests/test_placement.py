"""The placement plan on simulated machines, and how commands print it."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_system import Machine, smt

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.cli.placement import (
    Planned,
    advised,
    lines,
    loops_of,
    plans_of,
    record,
    settled,
)
from purgatoryd.cli.shards import Named
from purgatoryd.clients import numa_local
from purgatoryd.daemon import placement
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.placement_plan import PlacementPlan, plan_placement
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.arena import Placed
from purgatoryd.shm_layout.errors import InvalidSetting
from purgatoryd.shm_layout.layout import PlacementMode, PlacementPart

pytestmark = pytest.mark.tier("check")

TWO_BY_TWO = Machine({0: (0, 1), 1: (2, 3)}, memory={0: 4, 1: 4})
TWO_BY_FOUR_SMT = Machine(
    {0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)}, cores=smt(8)
)
NOTHING = PlacementPart(0)
ALONE = Named("demo", {})


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    """Return a function planned(machine, taken=(), before=None, **settings), which makes the
    placement plan of a daemon on that machine. `taken`: CPUs with loops of other daemons. `before`:
    the daemon's previous plan."""

    def make(
        machine: Machine,
        taken: tuple[int, ...] = (),
        before: PlacementPlan | None = None,
        **settings: Any,
    ) -> PlacementPlan:
        return plan_placement(machine.read(tmp_path), Config("demo", **settings), taken, before)

    return make


@pytest.fixture
def no_daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the daemons that run on this host."""
    monkeypatch.setattr(shm, "MOUNT", tmp_path / "shm")


# ---- auto ----------------------------------------------------------------------------------------


def test_one_node_gives_the_loop_a_core_and_binds_no_memory(planned: Any) -> None:
    found = planned(Machine({0: range(4)}))
    assert (found.mode, found.node, found.memory_node) == (PlacementMode.AUTO, 0, None)
    assert (found.reaper, found.others) == ({3}, {0, 1, 2})
    assert found.clamped == NOTHING
    assert "a core of its own" in " ".join(found.reasons)


@pytest.mark.parametrize("cpus", [1, 2])
def test_a_small_machine_is_left_alone(planned: Any, cpus: int) -> None:
    found = planned(Machine({0: range(cpus)}))
    assert (found.reaper, found.others, found.memory_node) == (frozenset(), frozenset(), None)
    assert found.clamped == NOTHING


def test_two_cpus_that_a_cgroup_leaves_are_left_alone(planned: Any) -> None:
    found = planned(replace(TWO_BY_FOUR_SMT, cgroup=(4, 5)))
    assert (found.reaper, found.memory_node) == (frozenset(), 1)


def test_a_machine_of_one_core_is_left_alone(planned: Any) -> None:
    found = planned(Machine({0: range(4)}, cores=[range(4)]))
    assert (found.reaper, found.others) == (frozenset(), frozenset())


def test_the_sibling_of_the_loop_stays_free(planned: Any) -> None:
    found = planned(Machine({0: range(8)}, cores=smt(4)))
    assert found.reaper == {3}
    assert found.others == {0, 1, 2, 4, 5, 6}
    assert "its sibling 7 stays free" in " ".join(found.reasons)


def test_threads_and_arena_are_on_one_node(planned: Any) -> None:
    found = planned(TWO_BY_FOUR_SMT)
    assert (found.node, found.memory_node) == (0, 0)
    assert found.reaper == {3}
    assert found.others == {0, 1, 2, 8, 9, 10}


def test_two_by_two(planned: Any) -> None:
    found = planned(TWO_BY_TWO)
    assert (found.node, found.memory_node, found.reaper, found.others) == (0, 0, {1}, {0})


def test_the_node_with_most_cores_is_chosen_then_that_with_most_memory(planned: Any) -> None:
    assert planned(Machine({0: (0, 1), 1: (2, 3, 4)})).node == 1
    assert planned(Machine({0: (0, 1), 1: (2, 3)}, memory={0: 4, 1: 8})).node == 1


def test_nodes_of_one_core_each_hold_all_threads(planned: Any) -> None:
    found = planned(Machine({0: (0, 2), 1: (1, 3)}, cores=[(0, 2), (1, 3)]))
    assert (found.node, found.memory_node) == (0, 0)
    assert found.reaper == found.others == {0, 2}
    assert found.reaper_cpu is None


def test_two_cpus_are_left_to_the_scheduler_whatever_their_nodes(planned: Any) -> None:
    machine = Machine({0: (0,), 1: (1,)})
    found = planned(machine)
    assert (found.node, found.memory_node, found.reaper, found.others) == (None, None, set(), set())
    assert planned(machine, node=1).reaper == {1}


def test_loops_of_other_daemons_have_their_cores(planned: Any) -> None:
    machine = Machine({0: range(8)}, cores=smt(4))
    assert planned(machine, taken=(3,)).reaper == {2}
    assert planned(machine, taken=(3, 6)).reaper == {1}
    assert planned(TWO_BY_FOUR_SMT, taken=(0, 1)).node == 1


@pytest.mark.parametrize("taken", [(3,), (7,), (3, 7)])
def test_other_threads_keep_off_the_cores_of_other_loops(
    planned: Any, taken: tuple[int, ...]
) -> None:
    found = planned(Machine({0: range(8)}, cores=smt(4)), taken=taken)
    assert (found.reaper, found.others, found.clamped) == ({2}, {0, 1, 4, 5}, NOTHING)
    assert "its sibling 6 stays free" in found.reasons[0]


def test_with_a_loop_on_each_core_others_get_what_is_left_and_that_is_reported(
    planned: Any,
) -> None:
    machine = Machine({0: range(8)}, cores=smt(4))
    last = planned(machine, taken=(1, 2, 3))
    assert (last.reaper, last.others, last.clamped) == ({0}, {4, 5, 6, 7}, PlacementPart.CPUS)
    assert "its sibling 4 has other threads" in last.reasons[0]
    assert "siblings of loops" in last.clamps[0]
    crowded = planned(machine, taken=(0, 1, 2, 3))
    # the daemon's loop shares a core, but not a CPU, with another loop
    assert (crowded.reaper, crowded.others) == ({7}, {4, 5, 6})
    assert "every core has loops of other daemons, this one 1" in crowded.reasons[0]
    full = planned(machine, taken=tuple(range(8)))
    assert (full.reaper, full.others) == ({3}, {0, 1, 2, 4, 5, 6})
    assert full.clamped == PlacementPart.CPUS
    assert "no CPU without a loop" in full.clamps[0]


def test_cpus_that_are_given_are_taken_though_another_loop_is_there(planned: Any) -> None:
    found = planned(TWO_BY_FOUR_SMT, taken=(6,), cpus="6,5")
    assert (found.reaper, found.others) == ({6}, {5})
    assert found.reasons[0].endswith("shared with the loop of another daemon")


# ---- while the daemon runs -----------------------------------------------------------------------


def test_a_loop_stays_and_others_make_way_for_a_new_one(planned: Any) -> None:
    first = planned(TWO_BY_FOUR_SMT)
    later = planned(TWO_BY_FOUR_SMT, taken=(1, 2, 6), before=first)
    assert (later.reaper, later.others) == ({3}, {0, 8})
    alone = planned(TWO_BY_FOUR_SMT, before=later)
    assert (alone.reaper, alone.others, alone.reasons) == (
        first.reaper, first.others, first.reasons,
    )  # fmt: skip


def test_a_loop_that_shares_its_core_leaves_it_but_not_the_arena(planned: Any) -> None:
    first = planned(TWO_BY_FOUR_SMT)
    alone = planned(TWO_BY_FOUR_SMT, taken=(3,), before=first)
    assert (alone.node, alone.memory_node, alone.reaper) == (0, 0, {2})
    assert alone.reasons[0] == "node 0 is the daemon's current node"
    assert planned(TWO_BY_FOUR_SMT, before=alone).reaper == {2}  # no other core is better
    both = planned(TWO_BY_FOUR_SMT, taken=(0, 1, 2, 3), before=first)
    assert (both.node, both.reaper) == (0, {11})


def test_a_loop_keeps_the_core_that_another_loop_leaves_to_it(tmp_path: Path) -> None:
    topology, config = TWO_BY_FOUR_SMT.read(tmp_path), Config("demo")
    first = plan_placement(topology, config)
    assert plan_placement(topology, config, (3,), first, leave=(3,)).reaper <= {3, 11}
    assert plan_placement(topology, config, (3,), first).reaper == {2}


def test_cpus_of_each_thread_are_seen() -> None:
    assert placement._affinities()[threading.get_native_id()] == os.sched_getaffinity(0)


def test_an_arena_in_use_is_moved_at_the_next_start(planned: Any) -> None:
    first = planned(TWO_BY_FOUR_SMT, node=0)
    moved = planned(TWO_BY_FOUR_SMT, before=first, node=1)
    assert (moved.node, moved.memory_node, moved.reaper) == (1, 0, {7})
    assert moved.clamped == PlacementPart.MEMORY
    assert moved.clamps == ("the arena moves to node 1 at the next start",)
    assert moved.reasons[-1] == "the arena is on node 0"
    none = planned(TWO_BY_FOUR_SMT, before=moved, placement="none")
    assert (none.reaper, none.memory_node, none.clamps) == (frozenset(), 0, ())
    back = planned(TWO_BY_FOUR_SMT, before=none)
    assert (back.node, back.memory_node, back.reaper) == (0, 0, {3})


def test_a_daemon_whose_node_is_taken_comes_back_to_its_arena(planned: Any) -> None:
    first = planned(TWO_BY_FOUR_SMT)
    away = planned(replace(TWO_BY_FOUR_SMT, cgroup=(4, 5, 6, 7)), before=first)
    assert (away.node, away.memory_node, away.clamped) == (1, 0, NOTHING)
    back = planned(replace(TWO_BY_FOUR_SMT, cgroup=range(16)), before=away, taken=(1, 2))
    assert (back.node, back.memory_node) == (0, 0)


# ---- shards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "machine", [TWO_BY_TWO, TWO_BY_FOUR_SMT, Machine({0: range(6)}), Machine({0: range(8)}, smt(4))]
)
@pytest.mark.parametrize("count", [2, 3, 5, 6, 9, 17])
def test_shards_leave_each_others_cores_alone(machine: Machine, count: int, tmp_path: Path) -> None:
    topology = machine.read(tmp_path)
    plans = settled(topology, Config("demo", shards=count), count, [])
    loops = Counter(loops_of(plans))
    crowd = Counter(min(topology.siblings[cpu]) for cpu in loops.elements())
    assert len(crowd) == min(count, len(topology.cores(topology.online)))
    assert max(crowd.values()) - min(crowd.values()) <= 1
    for one in plans:
        (node,) = (node for node in topology.nodes if node.id == one.node)
        cores = [core for core in topology.cores(node.cpus) if loops.keys().isdisjoint(core)]
        assert one.reaper <= node.cpus
        assert one.others == {cpu for core in cores for cpu in core} or not cores
        assert one.others
        assert one.clamped == (NOTHING if cores else PlacementPart.CPUS)


def test_shards_that_start_one_after_the_other_spread(planned: Any) -> None:
    taken: list[int] = []
    for shard in range(5):
        found = planned(TWO_BY_TWO, tuple(taken), shards=5, shard=shard)
        assert (found.node, found.memory_node) == (found.reaper_cpu // 2,) * 2
        taken.append(found.reaper_cpu)
    assert {*taken[:4]} == {0, 1, 2, 3}
    assert {cpu // 2 for cpu in taken[:2]} == {0, 1}
    assert taken[4] in taken[:4]


def test_the_loop_likes_an_isolated_core_and_others_do_not(planned: Any) -> None:
    found = planned(Machine({0: range(6)}, isolated=(2, 3)))
    assert (found.reaper, found.others) == ({3}, {0, 1, 4, 5})
    everywhere = planned(Machine({0: range(4)}, isolated=range(4)))
    assert (everywhere.reaper, everywhere.others) == ({3}, {0, 1, 2})


def test_isolated_cpus_that_we_were_not_started_on_are_not_ours(planned: Any) -> None:
    found = planned(Machine({0: range(6)}, isolated=(4, 5), given=range(4)))
    assert found.reaper == {3}


def test_a_node_without_memory_is_not_chosen(planned: Any) -> None:
    machine = Machine({0: range(6), 1: (6, 7, 8)}, memory={0: 0, 1: 2})
    assert (planned(machine).node, planned(machine).memory_node) == (1, 1)


def test_a_node_without_cpus_is_not_chosen(planned: Any) -> None:
    machine = Machine({0: range(4), 1: ()}, memory={0: 1, 1: 64})
    assert (planned(machine).node, planned(machine).memory_node) == (0, 0)


def test_memory_is_near_where_none_is_at_home(planned: Any) -> None:
    rows = {0: (10, 30, 20), 1: (30, 10, 20), 2: (20, 20, 10)}
    machine = Machine({0: (0, 1, 2), 1: (), 2: ()}, memory={0: 0, 1: 4, 2: 4}, distances=rows)
    found = planned(machine)
    assert (found.node, found.memory_node, found.clamped) == (0, 2, NOTHING)
    assert found.clamps == ("node 0 has no memory: the arena is on node 2",)


def test_offline_cpus_are_not_chosen(planned: Any) -> None:
    found = planned(Machine({0: range(4)}, offline=(3,)))
    assert (found.reaper, found.others) == ({2}, {0, 1})


def test_a_container_that_shows_nothing(planned: Any, tmp_path: Path) -> None:
    from purgatoryd.shm_layout.topology import read

    found = plan_placement(read({0, 1, 2}, tmp_path), Config("demo"))
    assert (found.node, found.memory_node) == (0, None)
    assert (sorted(found.reaper), sorted(found.others)) == ([2], [0, 1])


# ---- placement "none", and settings of the operator ------------------------------------------


def test_placement_none_changes_nothing(planned: Any) -> None:
    found = planned(TWO_BY_FOUR_SMT, placement="none")
    assert (found.mode, found.node, found.memory_node) == (PlacementMode.NONE, None, None)
    assert found.reaper == found.others == frozenset()


def test_cpus_as_they_are_given(planned: Any) -> None:
    found = planned(TWO_BY_FOUR_SMT, cpus="6,12-13")
    assert found.mode == PlacementMode.EXPLICIT
    assert (found.reaper, found.others) == ({6}, {12, 13})
    assert (found.node, found.memory_node, found.clamped) == (1, 1, NOTHING)
    assert planned(TWO_BY_FOUR_SMT, cpus="6").others == {6}


def test_a_small_machine_obeys(planned: Any) -> None:
    found = planned(Machine({0: (0, 1)}), cpus="1,0")
    assert (found.reaper, found.others) == ({1}, {0})


def test_an_isolated_cpu_may_be_named_though_we_were_not_started_on_it(planned: Any) -> None:
    machine = Machine({0: range(4)}, isolated=(3,), given=(0, 1, 2))
    assert planned(machine, cpus="3,0").reaper == {3}


def test_cpus_that_are_not_ours_are_left_out_and_reported(planned: Any) -> None:
    machine = Machine({0: range(8)}, offline=(5,), cgroup=range(6))
    found = planned(machine, cpus="7,5,9,2,1")
    assert (found.reaper, found.others, found.clamped) == ({2}, {1}, PlacementPart.CPUS)
    assert found.clamps == (
        "CPUs 5,9 of --cpus are not online", "CPUs 7 of --cpus are outside the daemon's cgroup",
    )  # fmt: skip


def test_no_cpu_left_is_as_if_none_had_been_given(planned: Any) -> None:
    found = planned(Machine({0: range(4)}), cpus="8-9")
    assert (found.reaper, found.others, found.clamped) == ({3}, {0, 1, 2}, PlacementPart.CPUS)


def test_a_node_is_given(planned: Any) -> None:
    found = planned(TWO_BY_FOUR_SMT, node=1)
    assert found.mode == PlacementMode.EXPLICIT
    assert (found.node, found.memory_node, found.reaper) == (1, 1, {7})
    assert found.others == {4, 5, 6, 12, 13, 14}


def test_a_node_that_is_not_there(planned: Any) -> None:
    found = planned(TWO_BY_TWO, node=7)
    assert (found.node, found.memory_node, found.clamped) == (0, 0, PlacementPart.MEMORY)
    assert found.clamps == ("there is no node 7; there are: 0, 1",)
    both = planned(TWO_BY_TWO, node=7, cpus="2,3")
    assert (both.node, both.memory_node, both.clamped) == (1, 1, PlacementPart.MEMORY)


def test_a_node_of_memory_alone_has_its_threads_nearby(planned: Any) -> None:
    rows = {0: (10, 20, 30), 1: (20, 10, 15), 2: (30, 15, 10)}
    machine = Machine({0: range(3), 1: range(3, 6), 2: ()}, distances=rows)
    found = planned(machine, node=2)
    assert (found.node, found.memory_node, found.reaper) == (1, 2, {5})
    assert found.clamped == PlacementPart.CPUS


def test_a_node_without_memory_has_its_arena_nearby(planned: Any) -> None:
    found = planned(Machine({0: range(3), 1: range(3, 6)}, memory={1: 0}), node=1)
    assert (found.node, found.memory_node, found.clamped) == (1, 0, PlacementPart.MEMORY)


def test_a_node_whose_cpus_are_not_ours(planned: Any) -> None:
    found = planned(replace(TWO_BY_FOUR_SMT, cgroup=(0, 1, 2, 3)), node=1)
    assert (found.node, found.memory_node, found.clamped) == (0, 1, PlacementPart.CPUS)


def test_memory_that_the_cgroup_withholds(planned: Any) -> None:
    found = planned(replace(TWO_BY_FOUR_SMT, memory_nodes=(0,)), node=1)
    assert (found.node, found.memory_node, found.clamped) == (1, 0, PlacementPart.MEMORY)


def test_cpus_of_one_node_and_memory_of_another(planned: Any) -> None:
    found = planned(TWO_BY_FOUR_SMT, cpus="0,1", node=1)
    assert (found.node, found.memory_node, found.reaper) == (0, 1, {0})


# ---- other settings ----------------------------------------------------------------------------


def test_settings_other_than_cpus_are_planned(planned: Any) -> None:
    wanted = {"realtime": 7, "lock_memory": True, "huge_pages": True, "busy_poll_ns": 50_000}
    machine = Machine({0: range(4)}, shm_options="rw,huge=within_size")
    found = planned(machine, **wanted)
    assert (found.realtime, found.lock, found.huge, found.spin_ns) == (7, True, True, 50_000)
    assert found.clamped == NOTHING


def test_huge_pages_that_shared_memory_cannot_have(planned: Any) -> None:
    found = planned(Machine({0: range(4)}), huge_pages=True)
    assert (found.huge, found.clamped) == (False, PlacementPart.HUGE)
    assert "huge=advise" in found.clamps[0]


def test_the_loop_sleeps_on_the_only_cpu(planned: Any) -> None:
    found = planned(Machine({0: (0,)}), busy_poll_ns=1000)
    assert (found.spin_ns, found.clamped) == (0, PlacementPart.SPIN)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("placement", "best"), ("cpus", "a"), ("cpus", "3-1"), ("node", -2), ("realtime", 100),
        ("busy_poll_ns", 10_000_001),
    ],
)  # fmt: skip
def test_settings_out_of_bounds(setting: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=setting):
        Config("demo", **{setting: value})


@pytest.mark.parametrize(("setting", "value"), [("cpus", "1"), ("node", 0)])
def test_no_placement_has_no_cpus(setting: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match="left out with placement none"):
        Config("demo", placement="none", **{setting: value})


# ---- output of the commands ----------------------------------------------------------------------


def test_the_picture(tmp_path: Path) -> None:
    machine = replace(TWO_BY_FOUR_SMT, isolated=(14,), cgroup=range(15))
    topology = machine.read(tmp_path)
    found = plan_placement(topology, Config("demo", node=0, realtime=5))
    assert list(lines(topology, [Planned(ALONE, found, None)])) == [
        "node 0: 2.0 GiB free of 4.0 GiB, the arena; distance 20 to node 1",
        "  [0o 8o] [1o 9o] [2o 10o] [3R 11.]",
        "node 1: 2.0 GiB free of 4.0 GiB; distance 20 to node 0",
        "  [4. 12.] [5. 13.] [6. 14i] [7. 15x]",
        "R loop   o other threads   . free   i isolated   x not allowed",
        "",
        "placement plan (explicit):",
        "  the loop is on CPU 3 of node 0: its sibling 11 stays free",
        "  libzmq and the group-commit thread are on 0-2,8-10 of the same node",
        "  the arena is on node 0",
        "  loop and libzmq run under SCHED_FIFO, priority 5, if permitted",
    ]


def test_shards_take_what_others_leave_and_each_is_shown(
    tmp_path: Path, daemon_dir: Path, no_daemons: None
) -> None:
    topology = replace(TWO_BY_FOUR_SMT, isolated=()).read(tmp_path)
    found, taken = plans_of(topology, Config("demo", shards=3))
    assert taken == []
    assert [one.plan.reaper_cpu for one in found] == [3, 7, 2]
    shown = list(lines(topology, found))
    assert shown[:5] == [
        "node 0: 2.0 GiB free of 4.0 GiB, 2 arenas; distance 20 to node 1",
        "  [0o 8o] [1o 9o] [2R 10.] [3R 11.]",
        "node 1: 2.0 GiB free of 4.0 GiB, the arena; distance 20 to node 0",
        "  [4o 12o] [5o 13o] [6o 14o] [7R 15.]",
        "R loop   o other threads   . free   i isolated   x not allowed",
    ]
    plans = [line for line in shown if "placement plan" in line]
    assert plans == [f"demo-1-{shard}, placement plan (auto):" for shard in range(3)]
    near = [(one.record["shard"], cpu) for one, cpu in advised(topology, found, taken, 6)]
    assert near == [(0, 0), (1, 4), (2, 1), (0, 8), (1, 5), (2, 9)]
    near = [(one.record["shard"], cpu) for one, cpu in advised(topology, found, [4, 9], 6)]
    assert near == [(0, 0), (1, 5), (2, 8), (0, 0), (1, 6), (2, 8)]


def test_workers_are_near_the_arena_and_evenly_spread(planned: Any, tmp_path: Path) -> None:
    topology = TWO_BY_FOUR_SMT.read(tmp_path)
    apart = planned(TWO_BY_FOUR_SMT, cpus="0,1", node=1)
    used = Counter(
        cpu for _, cpu in advised(topology, [Planned(ALONE, apart, None)], [0, 7], 60_000)
    )
    assert used == dict.fromkeys((4, 5, 6, 12, 13, 14), 10_000)
    ran = Placed(apart.mode, 1, 0, 7, NOTHING, NOTHING)
    used = Counter(cpu for _, cpu in advised(topology, [Planned(ALONE, apart, ran)], [], 8))
    assert set(used) == {0, 1, 2, 3, 8, 9, 10, 11}


def test_a_record_is_json(tmp_path: Path) -> None:
    topology = TWO_BY_TWO.read(tmp_path)
    reported = json.loads(
        json.dumps(record(topology, plan_placement(topology, Config("demo", node=9)), None))
    )
    assert reported["topology"]["cores"] == [[0], [1], [2], [3]]
    assert reported["topology"]["nodes"][1]["distances"] == {"0": 20, "1": 10}
    assert reported["placement_plan"]["reaper"] == [1]
    assert reported["placement_plan"]["clamped"] == "memory"
    assert reported["daemon"] is None


def command(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["placement", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_shows_this_machine(daemon_dir: Path) -> None:
    code, out, _ = command()
    assert code == Exit.DONE
    assert "node 0" in out
    assert "placement plan (auto):" in out
    code, out, _ = command("--json", "--placement", "none")
    reported = json.loads(out)
    assert set(reported["topology"]["allowed"]) == os.sched_getaffinity(0)
    assert reported["placement_plan"]["mode"] == "none"


def test_the_command_shows_shards(daemon_dir: Path) -> None:
    code, out, _ = command("--name", "demo", "--shards", "2", "--json")
    assert code == Exit.DONE
    reported = [json.loads(line) for line in out.splitlines()]
    assert [(one["name"], one["shard"], one["daemon"]) for one in reported] == [
        ("demo-1-0", 0, None), ("demo-1-1", 1, None),
    ]  # fmt: skip
    code, out, _ = command("--name", "demo", "--shards", "2", "--advise", "2", "--json")
    assert [json.loads(line)["shard"] for line in out.splitlines()] == [0, 1]


@pytest.mark.alone  # the advice avoids the loop CPUs of all daemons, also of those of other tests
def test_the_command_advises(daemon_dir: Path) -> None:
    ours = os.sched_getaffinity(0)
    code, out, _ = command("--advise", "5", "--json", "--placement", "none")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == Exit.DONE
    assert [row["worker"] for row in rows] == [0, 1, 2, 3, 4]
    assert {row["cpu"] for row in rows} <= ours
    assert len({row["cpu"] for row in rows}) == min(5, len(ours))


def test_the_command_refuses_what_run_refuses(daemon_dir: Path) -> None:
    code, _, err = command("--cpus", "x")
    assert code == Exit.USAGE
    assert "cpus = 'x' (flag): must be a list" in err


@pytest.mark.parametrize("priority", [3, 0])
def test_children_are_scheduled_as_usual(priority: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int, Any]] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda *arguments: set_to.append(arguments))
    placement._schedule(priority)
    policy = os.SCHED_FIFO if priority else os.SCHED_OTHER
    assert set_to[0] == (0, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    assert {row[1] for row in set_to} == {policy | os.SCHED_RESET_ON_FORK}


def test_a_client_of_a_daemon_without_a_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[object] = []
    monkeypatch.setattr("purgatoryd.shm_layout.topology.worker_cpus", lambda *_: {0})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *arguments: moved.append(arguments))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    numa_local.pin_numa_local(None, None)
    assert moved == []
    numa_local.pin_numa_local(0, None)
    assert moved

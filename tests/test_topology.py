"""The topology of a machine, read from simulated sysfs and procfs trees and from this machine's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from fake_system import GIB, Machine, smt, write

from purgatoryd.shm_layout.topology import (
    Topology,
    cpu_list,
    cpu_order,
    cpu_text,
    free_memory,
    read,
    worker_cpus,
)

pytestmark = pytest.mark.tier("check")

TWO_BY_TWO = {0: (0, 1), 1: (2, 3)}


# ---- lists of CPUs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", set()), ("\n", set()), ("0\n", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("5,1-2", {1, 2, 5})],
)
def test_a_list_of_the_kernel(text: str, cpus: set[int]) -> None:
    assert cpu_list(text) == cpus


@pytest.mark.parametrize(
    "text", ["x", "(null)", "3-1", "0-", "-1", "1-99999999999", "1.5", "0-3:1"]
)
def test_invalid_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        cpu_list(text)


def test_an_order_is_kept_and_each_cpu_stands_once() -> None:
    assert cpu_order("7,2-3,2,0") == [7, 2, 3, 0]
    assert cpu_order("") == []


@pytest.mark.parametrize(
    ("cpus", "text"), [((), "none"), ((4,), "4"), ((3, 0, 1), "0-1,3"), (range(5), "0-4")]
)
def test_the_text_of_a_list(cpus: tuple[int, ...], text: str) -> None:
    assert cpu_text(cpus) == text
    assert cpus == () or cpu_list(text) == set(cpus)


# ---- sysfs and procfs trees ---------------------------------------------------------------------


def test_one_node(tmp_path: Path) -> None:
    found = Machine({0: range(4)}, memory={0: 8}).read(tmp_path)
    assert found.online == found.confined == found.allowed == {0, 1, 2, 3}
    assert found.cores(found.online) == [(0,), (1,), (2,), (3,)]
    (node,) = found.nodes
    assert (node.id, sorted(node.cpus), node.memory_bytes) == (0, [0, 1, 2, 3], 8 * GIB)
    assert node.free_bytes == 4 * GIB
    assert found.memory_nodes == {0}
    assert found.huge_pages == "never"


def test_two_nodes_and_their_distances(tmp_path: Path) -> None:
    found = Machine(TWO_BY_TWO, distances={0: (10, 21), 1: (21, 10)}).read(tmp_path)
    assert [node.cpus for node in found.nodes] == [{0, 1}, {2, 3}]
    assert found.nodes[0].distances == {0: 10, 1: 21}
    assert found.node_of(3) == found.node(1) == found.nodes[1]
    assert found.node_of(9) is found.node(9) is None


def test_threads_of_a_core_stand_together(tmp_path: Path) -> None:
    found = Machine({0: range(8)}, cores=smt(4)).read(tmp_path)
    assert found.cores(found.online) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert found.cores({1, 5, 6}) == [(1, 5), (6,)]
    assert found.siblings[6] == {2, 6}


def test_numbers_with_holes(tmp_path: Path) -> None:
    rows = {0: (10, 20, 40), 4: (20, 10, 30), 9: (40, 30, 10)}
    found = Machine({0: (0, 1), 4: (64, 65), 9: (128,)}, distances=rows).read(tmp_path)
    assert [node.id for node in found.nodes] == [0, 4, 9]
    assert found.nodes[2].distances == {0: 40, 4: 30, 9: 10}
    assert found.nearest(found.nodes[2], found.nodes[:2]) == found.nodes[1]
    assert found.nearest(found.nodes[2], found.nodes) == found.nodes[2]
    assert found.nearest(found.nodes[2], ()) is None


def test_a_node_without_memory_and_one_without_cpus(tmp_path: Path) -> None:
    found = Machine({0: (0, 1), 1: (2, 3), 2: ()}, memory={0: 4, 1: 0, 2: 16}).read(tmp_path)
    assert [bool(node.cpus) for node in found.nodes] == [True, True, False]
    assert found.memory_nodes == {0, 2}


def test_offline_cpus_count_nowhere(tmp_path: Path) -> None:
    found = Machine({0: range(8)}, cores=smt(4), offline=(1, 6)).read(tmp_path)
    assert found.online == {0, 2, 3, 4, 5, 7}
    assert found.siblings[2] == {2}
    assert found.nodes[0].cpus == found.online


def test_isolated_cpus(tmp_path: Path) -> None:
    assert Machine({0: range(4)}, isolated=(2, 3)).read(tmp_path).isolated == {2, 3}


def test_the_cgroup_and_the_affinity_leave_less(tmp_path: Path) -> None:
    found = Machine({0: range(8)}, cgroup=range(2, 6), given=(0, 2, 3)).read(tmp_path)
    assert found.confined == {2, 3, 4, 5}
    assert found.allowed == {2, 3}


def test_an_affinity_outside_of_the_cgroup_is_ignored(tmp_path: Path) -> None:
    found = Machine({0: range(4)}, cgroup=(2, 3), given=(0, 1)).read(tmp_path)
    assert found.allowed == {2, 3}


def test_the_nearest_ancestor_group_with_a_cpuset_counts(tmp_path: Path) -> None:
    machine = Machine({0: range(8)}, cgroup=range(1, 7))
    write(tmp_path, "sys/fs/cgroup/cpuset.cpus.effective", "0-7\n")
    write(tmp_path, "sys/fs/cgroup/system.slice/purgatoryd.service/cpuset.cpus.effective", "\n")
    assert machine.read(tmp_path).confined == set(range(1, 7))


def test_cgroups_of_version_1(tmp_path: Path) -> None:
    machine = Machine({0: range(8)})
    machine.lay_out(tmp_path)
    write(tmp_path, "proc/self/cgroup", "5:cpuset,cpu:/a/b\n3:memory:/c\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpuset/a/cpuset.effective_cpus", "4-5\n")
    assert read(None, tmp_path).confined == {4, 5}


def test_a_group_outside_of_the_container_is_its_root(tmp_path: Path) -> None:
    machine = Machine({0: range(4)})
    machine.lay_out(tmp_path)
    write(tmp_path, "proc/self/cgroup", "0::/../../docker/x\n")
    write(tmp_path, "sys/fs/cgroup/cpuset.cpus.effective", "0-1\n")
    assert read(None, tmp_path).confined == {0, 1}


def test_memory_that_the_cgroup_withholds(tmp_path: Path) -> None:
    assert Machine(TWO_BY_TWO, memory_nodes=(1,)).read(tmp_path).memory_nodes == {1}


@pytest.mark.parametrize("option", ["always", "within_size", "advise", "never"])
def test_huge_pages_of_shared_memory(option: str, tmp_path: Path) -> None:
    machine = Machine({0: (0,)}, shm_options=f"rw,nosuid,huge={option}")
    assert machine.read(tmp_path).huge_pages == option


def test_a_container_without_sysfs(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 1024 kB\nMemFree: 512 kB\nHugePages_Total: 0\n")
    found = read({3, 5}, tmp_path)
    assert found.online == found.allowed == {3, 5}
    assert found.cores(found.allowed) == [(3,), (5,)]
    (node,) = found.nodes
    assert (sorted(node.cpus), node.memory_bytes, node.free_bytes) == ([3, 5], 1 << 20, 1 << 19)
    assert found.memory_nodes == {0}


def test_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    found = read(None, tmp_path)
    assert found.online == found.allowed == {0}
    assert found.memory_nodes == frozenset()


def test_files_with_unexpected_contents(tmp_path: Path) -> None:
    machine = Machine({0: range(4)})
    machine.lay_out(tmp_path)
    write(tmp_path, "sys/devices/system/cpu/isolated", "(null)\n")
    write(tmp_path, "sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "?\n")
    found = read(None, tmp_path)
    assert found.isolated == frozenset()
    assert found.siblings[1] == {1}


def test_names_of_mounts_are_any_bytes(tmp_path: Path) -> None:
    machine = Machine({0: (0, 1)})
    before = machine.read(tmp_path)
    mounts = tmp_path / "proc/self/mounts"
    mounts.write_bytes(mounts.read_bytes() + b"tmpfs /media/caf\xe9 tmpfs rw 0 0\n")
    assert read(None, tmp_path) == before


def test_this_machine() -> None:
    found = read(os.sched_getaffinity(0))
    assert found.allowed == os.sched_getaffinity(0)
    assert found.allowed <= found.confined <= found.online
    assert len(found.online) <= (psutil.cpu_count() or 0)
    assert {cpu for node in found.nodes for cpu in node.cpus} == found.online
    assert found.memory_nodes


# ---- CPUs for workers --------------------------------------------------------------------------


@pytest.fixture
def two_nodes(tmp_path: Path) -> Topology:
    """Node 0 has the cores (0, 8) .. (3, 11), node 1 has (4, 12) .. (7, 15): two CPUs per core."""
    nodes = {0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)}
    return Machine(nodes, cores=smt(8)).read(tmp_path)


def test_workers_get_whole_cores_first_and_not_the_loops(two_nodes: Topology) -> None:
    assert worker_cpus(two_nodes, 1, 7) == [4, 5, 6, 12, 13, 14]
    assert worker_cpus(two_nodes, 1, None) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert worker_cpus(two_nodes, None, 7) == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("others", "cpus"),
    [
        ((7, 4, 0), [5, 6, 13, 14]),
        ((4, 5, 6), [12, 13, 14, 15]),  # each core has the loop of a daemon
        # each CPU has a loop: workers avoid only the core of their own daemon's loop, CPU 7
        (range(4, 16), [4, 5, 6, 12, 13, 14]),
    ],
)
def test_workers_leave_other_loops_alone(
    two_nodes: Topology, others: Iterable[int], cpus: list[int]
) -> None:
    assert worker_cpus(two_nodes, 1, 7, tuple(others)) == cpus


@pytest.mark.parametrize(
    ("given", "cpus"),
    [
        ((0, 1, 4), [4]),
        ((0, 1), [0, 1]),  # none of the given CPUs is on the daemon's node
        ((7, 15), [15]),  # only the sibling of the loop's CPU is left
        ((7,), [7]),
    ],
)
def test_workers_get_what_is_left(given: tuple[int, ...], cpus: list[int], tmp_path: Path) -> None:
    nodes = {0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)}
    topology = Machine(nodes, cores=smt(8), given=given).read(tmp_path)
    assert worker_cpus(topology, 1, 7) == cpus


def test_workers_of_a_node_without_cpus_are_on_the_nearest(tmp_path: Path) -> None:
    rows = {0: (10, 20, 30), 1: (20, 10, 15), 2: (30, 15, 10)}
    topology = Machine({0: (0, 1), 1: (2, 3), 2: ()}, distances=rows).read(tmp_path)
    assert worker_cpus(topology, 2, 3) == [2]


def test_a_node_that_is_not_there_leaves_all(two_nodes: Topology) -> None:
    assert set(worker_cpus(two_nodes, 5, None)) == two_nodes.allowed


# ---- free memory -------------------------------------------------------------------------------


def cgroup(root: Path, folder: str, limit: str, used: int, cached: int = 0) -> None:
    folder = f"sys/fs/cgroup/{folder}"
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.current", str(used))
    write(root, f"{folder}/memory.stat", f"anon 5\ninactive_file {cached}\nactive_file 1")


def test_the_free_memory_of_the_host_and_of_each_cgroup_with_a_limit(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemFree: 1 kB\nMemAvailable:    8 kB\nShmem: 3 kB")
    write(tmp_path, "proc/self/cgroup", "0::/a/b/c\n")
    cgroup(tmp_path, "a/b/c", "max", 100)
    cgroup(tmp_path, "a/b", "1000", 900, cached=50)
    cgroup(tmp_path, "a", "1000", 2000)
    assert free_memory(tmp_path) == [
        ("memory", 8192), ("the memory of cgroup /a/b", 151), ("the memory of cgroup /a", 0),
    ]  # fmt: skip


def test_the_free_memory_of_a_cgroup_v1(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/a\n0::/\n")
    folder = "sys/fs/cgroup/memory/a"
    write(tmp_path, f"{folder}/memory.limit_in_bytes", "1000")
    write(tmp_path, f"{folder}/memory.usage_in_bytes", "400")
    write(tmp_path, f"{folder}/memory.stat", "inactive_file 7\ntotal_inactive_file 9")
    assert free_memory(tmp_path) == [("the memory of cgroup /a", 609)]


def test_free_memory_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert free_memory(tmp_path) == []


def test_the_free_memory_of_this_machine() -> None:
    available = dict(free_memory())["memory"]
    assert 0 < available < psutil.virtual_memory().total

"""A simulated machine: the files of sysfs and procfs that describe its topology."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from purgatoryd.shm_layout.topology import Topology, cpu_text, read

GIB = 2**30


@dataclass
class Machine:
    """A description of a machine.

    `nodes`: CPUs of each node. `cores`: groups of CPUs that share a core. `memory`: GiB of each
    node. `distances`: a row of distances for each node. `cgroup`: CPUs that the cgroup of this
    process may use. `given`: CPU affinity of this process.
    """

    nodes: Mapping[int, Iterable[int]]
    cores: Iterable[Iterable[int]] = ()
    memory: Mapping[int, int] = field(default_factory=dict)
    distances: Mapping[int, Iterable[int]] = field(default_factory=dict)
    offline: Iterable[int] = ()
    isolated: Iterable[int] = ()
    cgroup: Iterable[int] = ()
    given: Iterable[int] | None = None
    memory_nodes: Iterable[int] = ()
    shm_options: str = "rw,size=1024k"

    @property
    def online(self) -> set[int]:
        return {cpu for cpus in self.nodes.values() for cpu in cpus} - set(self.offline)

    def read(self, root: Path) -> Topology:
        """Write the files of the machine below `root`, and return the topology that is read from
        them."""
        self.lay_out(root)
        return read(self.given, root)

    def lay_out(self, root: Path) -> None:
        cpus = "sys/devices/system/cpu"
        write(root, f"{cpus}/online", cpu_text(self.online))
        write(root, f"{cpus}/isolated", listed(self.isolated))
        for core in self.cores:
            for cpu in set(core) & self.online:
                write(root, f"{cpus}/cpu{cpu}/topology/thread_siblings_list", listed(core))
        for node in self.nodes:
            self._lay_out_node(root, node)
        write(root, "proc/self/cgroup", "0::/system.slice/purgatoryd.service\n")
        if self.cgroup:
            write(root, "sys/fs/cgroup/system.slice/cpuset.cpus.effective", listed(self.cgroup))
        mems = self.memory_nodes or self.nodes
        write(root, "proc/self/status", f"Name:\tx\nMems_allowed_list:\t{cpu_text(mems)}\n")
        mount = f"tmpfs /dev/shm tmpfs {self.shm_options} 0 0\n"
        write(root, "proc/self/mounts", "proc /proc proc rw 0 0\n" + mount)

    def _lay_out_node(self, root: Path, node: int) -> None:
        folder = f"sys/devices/system/node/node{node}"
        row = self.distances.get(node) or [10 if other == node else 20 for other in self.nodes]
        kilobytes = self.memory.get(node, 4) * GIB // 1024
        write(root, f"{folder}/cpulist", listed(self.nodes[node]))
        write(root, f"{folder}/distance", " ".join(map(str, row)) + "\n")
        write(
            root, f"{folder}/meminfo",
            f"Node {node} MemTotal: {kilobytes} kB\nNode {node} MemFree: {kilobytes // 2} kB\n"
            f"Node {node} HugePages_Total: 0\n",
        )  # fmt: skip


def listed(cpus: Iterable[int]) -> str:
    """Return a line with a list of CPUs in the kernel's notation; an empty line if the list is
    empty."""
    found = sorted(cpus)
    return (cpu_text(found) if found else "") + "\n"


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def smt(count: int, first: int = 0, apart: int = 0) -> list[tuple[int, int]]:
    """Return `count` cores of two CPUs each. The ids of a core's two CPUs differ by `apart`; if
    `apart` is 0, by `count`."""
    return [(cpu, cpu + (apart or count)) for cpu in range(first, first + count)]

"""CPUs, cores and NUMA nodes of the machine, and which of them this process may use.

The data come from sysfs; the limits of the process and its cgroup come from procfs. If data are
missing, as in some containers, the simplest machine that agrees with the other data is assumed:
each CPU is a core, and all CPUs are on one node.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath

SYSTEM = Path("/")
NUMBER_MAX = 65_535
"""Upper bound for the number of a CPU or node."""
LOCAL_DISTANCE = 10
"""Distance of a node to itself in the ACPI tables."""

_CPUSETS = (  # (controller, mount point, file): cgroup v2 alone, cgroup v2 with v1, cgroup v1
    ("", "sys/fs/cgroup", "cpuset.cpus.effective"),
    ("", "sys/fs/cgroup/unified", "cpuset.cpus.effective"),
    ("cpuset", "sys/fs/cgroup/cpuset", "cpuset.effective_cpus"),
)
_MEMORIES = (  # (controller, mount point, limit, use, prefix of fields in memory.stat): v2, v1
    ("", "sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("", "sys/fs/cgroup/unified", "memory.max", "memory.current", ""),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
_CACHES = "inactive_file", "active_file"
"""Fields of memory.stat that count as used, but which the kernel frees on demand."""


@dataclass(frozen=True)
class Node:
    """A NUMA node. `cpus`: its online CPUs; empty if the node has only memory."""

    id: int
    cpus: frozenset[int]
    memory_bytes: int
    free_bytes: int
    distances: Mapping[int, int]
    """Distance to each node: 10 to the node itself, more to other nodes."""


@dataclass(frozen=True)
class Topology:
    """The machine, and the part of it that this process may use."""

    online: frozenset[int]
    confined: frozenset[int]
    """Online CPUs that the cgroup allows. An affinity may contain any of them."""
    allowed: frozenset[int]
    """CPUs of `confined` that are in the affinity with which this process was started."""
    isolated: frozenset[int]
    """CPUs on which the kernel runs only threads that are bound to them."""
    siblings: Mapping[int, frozenset[int]]
    """For each CPU: the online CPUs of its physical core, including itself."""
    nodes: tuple[Node, ...]
    memory_nodes: frozenset[int]
    """Nodes from which this process may get memory."""
    huge_pages: str
    """Mount option `huge` of the tmpfs that has shared memory: never, advise, within_size,
    always."""

    def node(self, number: int) -> Node | None:
        """Return the node with this number, or None."""
        return next((node for node in self.nodes if node.id == number), None)

    def node_of(self, cpu: int) -> Node | None:
        """Return the node of a CPU, or None."""
        return next((node for node in self.nodes if cpu in node.cpus), None)

    def cores(self, cpus: Iterable[int]) -> list[tuple[int, ...]]:
        """Return `cpus` grouped by physical core, ordered by the first CPU of each group."""
        left, found = sorted(cpus), []
        while left:
            core = self.siblings.get(left[0], frozenset(left[:1]))
            found.append(tuple(cpu for cpu in left if cpu in core))
            left = [cpu for cpu in left if cpu not in core]
        return found

    def whole_cores(self, cpus: Iterable[int]) -> frozenset[int]:
        """Return `cpus` and all other CPUs of their physical cores."""
        return frozenset().union(*(self.siblings.get(cpu, {cpu}) for cpu in cpus))

    def off_loops(self, cpus: frozenset[int], loops: Collection[int]) -> frozenset[int]:
        """Return the CPUs whose core runs no loop; if there are none, the CPUs that run no loop
        themselves."""
        return cpus - self.whole_cores(loops) or cpus.difference(loops)

    def nearest(self, node: Node, among: Iterable[Node]) -> Node | None:
        """Return the node of `among` that is nearest to `node`. It may be `node` itself."""
        far = 2**31
        return min(among, key=lambda n: (node.distances.get(n.id, far), n.id), default=None)


def worker_cpus(
    topology: Topology, node: int | None, loop: int | None, others: Collection[int] = ()
) -> list[int]:
    """Return CPUs for processes that work with a daemon.

    The CPUs are on `node`, the node of the daemon's arena, or on the nearest node with CPUs for
    this process. The list begins with the first CPU of each core, then the second CPU of each core,
    and so on. `loop`: CPU of the daemon's loop. `others`: CPUs of the loops of other daemons. The
    cores of all loops are avoided if other CPUs are left; otherwise only the CPUs of the loops are
    avoided.
    """
    usable = [found for found in topology.nodes if found.cpus & topology.allowed]
    home = None if node is None else topology.node(node)
    nearest = topology.nearest(home, usable) if home else None
    here = topology.allowed & nearest.cpus if nearest else topology.allowed
    own = () if loop is None else (loop,)
    here = topology.off_loops(here, (*own, *others)) or topology.off_loops(here, own) or here
    ranks = zip_longest(*topology.cores(here))
    return [cpu for rank in ranks for cpu in rank if cpu is not None]


# ---- reading -----------------------------------------------------------------------------------


def read(affinity: Iterable[int] | None, root: Path = SYSTEM) -> Topology:
    """Read the machine from the files under `root`. `affinity`: the CPUs on which this process was
    started; None = all CPUs."""
    online = _online(root) or frozenset(affinity or {0})
    confined = confined_cpus(root) or online
    allowed = confined if affinity is None else confined.intersection(affinity) or confined
    nodes = _nodes(root, online)
    memory = {node.id for node in nodes if node.memory_bytes}
    return Topology(
        online=online,
        confined=confined,
        allowed=allowed,
        isolated=_listed(root, "sys/devices/system/cpu/isolated") & online,
        siblings={cpu: _siblings(root, cpu) & online for cpu in online},
        nodes=nodes,
        memory_nodes=frozenset(memory & (_memory_nodes(root) or memory)),
        huge_pages=_huge_pages(root),
    )


def confined_cpus(root: Path = SYSTEM) -> frozenset[int]:
    """Return the online CPUs that the cgroup allows; empty if the online CPUs cannot be read."""
    online = _online(root)
    return online.intersection(*_cpusets(root)) or online


def free_memory(root: Path = SYSTEM) -> list[tuple[str, int]]:
    """Return (name, free bytes) of the host's memory and of each limit of a cgroup that applies.

    Page cache counts as free, because the kernel frees it on demand. The list is empty if the
    figures cannot be read.
    """
    host = _kilobytes(_text(root, "proc/meminfo")).get("MemAvailable")
    return [*([] if host is None else [("memory", host)]), *_cgroup_memory(root)]


def cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a list in the notation of the kernel, such as "0-2,8". Raises
    ValueError."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        run = range(int(first), int(last if dash else first) + 1)
        if not run or not 0 <= run[0] <= run[-1] <= NUMBER_MAX:
            raise ValueError(f"{part!r} is not a range of numbers up to {NUMBER_MAX}")
        found.update(run)
    return frozenset(found)


def cpu_order(text: str) -> list[int]:
    """Return the numbers of a list such as "8,0-2" in the written order, without repetitions.
    Raises ValueError."""
    parts = (sorted(cpu_list(part)) for part in text.split(","))
    return list(dict.fromkeys(cpu for part in parts for cpu in part))


def cpu_text(cpus: Iterable[int]) -> str:
    """Return numbers as a list in the notation of cpu_list(); "none" if there are no numbers."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs) or "none"


def _text(root: Path, path: str) -> str:
    """Return the content of a file, with undecodable bytes escaped; "" if it does not exist.

    The read is unbuffered. A daemon calls this every second, and if memory is short, the creation
    of a buffer fails in CPython with another error than MemoryError.
    """
    try:
        with (root / path).open("rb", buffering=0) as file:
            return os.fsdecode(file.readall())
    except OSError:
        return ""


def _listed(root: Path, path: str) -> frozenset[int]:
    """Return the numbers in a file of the kernel; empty if the file is missing or not a list, such
    as "(null)"."""
    try:
        return cpu_list(_text(root, path))
    except ValueError:
        return frozenset()


def _online(root: Path) -> frozenset[int]:
    return _listed(root, "sys/devices/system/cpu/online")


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    return _listed(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") | {cpu}


def _cpusets(root: Path) -> Iterator[frozenset[int]]:
    """Yield the CPUs that each cgroup hierarchy allows this process."""
    for mount, group, (file,) in _hierarchies(root, _CPUSETS):
        if cpus := _nearest(mount, group, file):
            yield cpus


def _hierarchies(
    root: Path, hierarchies: Iterable[tuple[str, ...]]
) -> Iterator[tuple[Path, str, list[str]]]:
    """Yield (mount point, path of this process's cgroup, other fields) for each of the given
    hierarchies (controller, mount point, other fields) that contains the process."""
    for line in _text(root, "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        for controller, mount, *fields in hierarchies:
            if controller in controllers.split(","):
                yield root / mount, group, fields


def _nearest(mount: Path, group: str, file: str) -> frozenset[int]:
    """Return the numbers in the file of the cgroup, or of its nearest ancestor that has the file.
    The cgroup itself may lack the file, because its controller may be off."""
    for folder in _upward(group):
        if cpus := _listed(mount, f"{folder}/{file}".lstrip("/")):
            return cpus
    return frozenset()


def _upward(group: str) -> Iterator[str]:
    """Yield the path of the cgroup and of each of its ancestors, relative to the mount point."""
    steps = [step for step in PurePosixPath(group).parts if step not in ("/", "..")]
    return ("/".join(steps[:depth]) for depth in range(len(steps), -1, -1))


def _cgroup_memory(root: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, free bytes) of each cgroup with a limit that contains this process."""
    for mount, group, (limit, use, prefix) in _hierarchies(root, _MEMORIES):
        for folder in _upward(group):
            texts = [_text(mount / folder, file).strip() for file in (limit, use)]
            if not all(map(str.isdecimal, texts)):  # the limit may be "max"
                continue
            stat = _text(mount / folder, "memory.stat").split()
            fields = dict(zip(stat[::2], stat[1::2], strict=False))
            cached = sum(int(fields.get(prefix + field, 0)) for field in _CACHES)
            free = int(texts[0]) - int(texts[1]) + cached
            yield f"the memory of cgroup /{folder}", max(0, free)


def _nodes(root: Path, online: frozenset[int]) -> tuple[Node, ...]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    ids = sorted(int(folder.name.removeprefix("node")) for folder in folders)
    if ids:
        return tuple(_node(root, number, ids, online) for number in ids)
    memory = _kilobytes(_text(root, "proc/meminfo"))
    total, free = memory.get("MemTotal", 0), memory.get("MemFree", 0)
    return (Node(0, online, total, free, {0: LOCAL_DISTANCE}),)


def _node(root: Path, number: int, ids: list[int], online: frozenset[int]) -> Node:
    folder = f"sys/devices/system/node/node{number}"
    cpus = _listed(root, f"{folder}/cpulist") & online
    distances = map(int, _text(root, f"{folder}/distance").split())
    memory = _kilobytes(_text(root, f"{folder}/meminfo"))
    return Node(
        number, cpus, memory.get("MemTotal", 0), memory.get("MemFree", 0),
        dict(zip(ids, distances, strict=False)) or {number: LOCAL_DISTANCE},
    )  # fmt: skip


def _kilobytes(meminfo: str) -> dict[str, int]:
    """Return {field: bytes} from lines such as "Node 0 MemTotal: 1024 kB"."""
    rows = (line.split() for line in meminfo.splitlines() if line.endswith("kB"))
    return {row[-3].removesuffix(":"): int(row[-2]) * 1024 for row in rows}


def _memory_nodes(root: Path) -> frozenset[int]:
    for line in _text(root, "proc/self/status").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return cpu_list(line.partition(":")[2])
    return frozenset()


def _huge_pages(root: Path) -> str:
    found = "never"
    for line in _text(root, "proc/self/mounts").splitlines():
        _, place, _, options, *_ = line.split()
        if place == "/dev/shm":  # a later mount hides an earlier one
            chosen = [o.removeprefix("huge=") for o in options.split(",") if o.startswith("huge=")]
            found = chosen[0] if chosen else "never"
    return found

"""Decide where a daemon runs, and give the reasons. Only the topology and the settings count.

The loop gets a physical core of its own, if one is free, on the node with the most free capacity.
All other threads (of libzmq and of group commit) run on other cores of that node. The arena is on
that node too. A setting that cannot be met is ignored and reported; making a plan never fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from purgatoryd.daemon.config import Config
from purgatoryd.shm_layout.layout import PlacementMode, PlacementPart
from purgatoryd.shm_layout.topology import Node, Topology, cpu_order, cpu_text

NOTHING = PlacementPart(0)
FEW_CPUS = 2
"""With at most this many CPUs nothing is pinned, because pinning would only restrict the
scheduler."""


@dataclass(frozen=True)
class PlacementPlan:
    """A placement. Empty sets and None leave the choice to the kernel."""

    mode: PlacementMode
    node: int | None = None
    """Node of the threads, if one was chosen."""
    memory_node: int | None = None
    """Node of the arena; None if there is no choice."""
    reaper: frozenset[int] = frozenset()
    """CPUs of the loop."""
    core_chosen: bool = False
    """The loop's core was chosen by the plan, so a later plan may choose a better one."""
    others: frozenset[int] = frozenset()
    """CPUs of all other threads."""
    realtime: int = 0
    """SCHED_FIFO priority of the loop; 0 = the usual scheduling."""
    lock: bool = False
    huge: bool = False
    spin_ns: int = 0
    clamped: PlacementPart = NOTHING
    """Parts of the settings that cannot be met completely."""
    clamps: tuple[str, ...] = ()
    """The reasons why parts of the settings cannot be met, as text."""
    reasons: tuple[str, ...] = ()
    """The reasons for the plan, as text."""

    @property
    def reaper_cpu(self) -> int | None:
        """The CPU of the loop, if it has exactly one."""
        return min(self.reaper) if len(self.reaper) == 1 else None

    @property
    def home(self) -> int | None:
        """The node for clients: the node of the arena, or else the node of the threads."""
        return self.node if self.memory_node is None else self.memory_node


@dataclass
class _Draft:
    """A placement plan that is not complete."""

    topology: Topology
    config: Config
    taken: Counter[int]
    before: PlacementPlan | None
    leave: Counter[int]
    clamped: PlacementPart = NOTHING
    clamps: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def why(self, text: str) -> None:
        self.reasons.append(text)

    def clamp(self, part: PlacementPart, text: str) -> None:
        self.clamped |= part
        self.clamps.append(text)

    def loops(self, cpus: Iterable[int]) -> int:
        """Return how many loops of other daemons are on the cores of these CPUs."""
        return sum(self.taken[cpu] for cpu in self.topology.whole_cores(cpus))

    def leaving(self, cpus: Iterable[int]) -> int:
        """Return how many loops on the cores of these CPUs would leave their core if this daemon's
        loop shared it."""
        return sum(self.leave[cpu] for cpu in self.topology.whole_cores(cpus))

    @property
    def home(self) -> Node | None:
        """The node where a running daemon is and should stay."""
        number = None if self.before is None else self.before.home
        return None if number is None else self.topology.node(number)


def plan_placement(
    topology: Topology,
    config: Config,
    taken: Iterable[int] = (),
    before: PlacementPlan | None = None,
    leave: Iterable[int] = (),
) -> PlacementPlan:
    """Return the placement plan for this machine.

    `taken`: CPUs of the loops of other daemons, one CPU for each loop. `before`: the plan in
    effect; the arena stays on its node, and the loop stays unless another core is better. `leave`:
    CPUs in `taken` whose daemons will leave a core that they share with this daemon.
    """
    draft = _Draft(topology, config, Counter(taken), before, Counter(leave))
    chosen, wanted = PlacementPlan(_mode(config)), _wanted_node(draft)
    if chosen.mode == PlacementMode.NONE:
        draft.why("placement is none: the kernel chooses CPUs and memory")
    elif cpus := _wanted_cpus(draft):
        chosen = _on_cpus(draft, chosen, cpus)
    else:
        chosen = _on_cores(draft, chosen, wanted)
    return replace(
        chosen, memory_node=_memory_node(draft, wanted, chosen.node), realtime=config.realtime,
        lock=config.lock_memory, huge=_huge(draft), spin_ns=_spin_ns(draft),
        clamped=draft.clamped, clamps=tuple(draft.clamps), reasons=tuple(draft.reasons),
    )  # fmt: skip


def _mode(config: Config) -> PlacementMode:
    if config.cpus or config.node >= 0:
        return PlacementMode.EXPLICIT
    return PlacementMode[config.placement.upper()]


# ---- settings ---------------------------------------------------------------------------------


def _wanted_node(draft: _Draft) -> Node | None:
    """Return the node of --node; None if it does not exist."""
    number = draft.config.node
    found = draft.topology.node(number)
    if found is None and number >= 0:
        ids = ", ".join(str(node.id) for node in draft.topology.nodes)
        draft.clamp(PlacementPart.MEMORY, f"there is no node {number}; there are: {ids}")
    return found


def _wanted_cpus(draft: _Draft) -> list[int]:
    """Return the usable CPUs of --cpus, in the given order."""
    wanted, topology = cpu_order(draft.config.cpus), draft.topology
    for some, reason in (
        (set(wanted) - topology.online, "not online"),
        (topology.online.intersection(wanted) - topology.confined, "outside the daemon's cgroup"),
    ):
        if some:
            draft.clamp(PlacementPart.CPUS, f"CPUs {cpu_text(some)} of --cpus are {reason}")
    found = [cpu for cpu in wanted if cpu in topology.confined]
    if wanted and not found:
        draft.why("no CPU of --cpus is usable: --cpus is ignored")
    return found


def _on_cpus(draft: _Draft, chosen: PlacementPlan, cpus: list[int]) -> PlacementPlan:
    """Place the loop on the first of these CPUs, and the other threads on the rest."""
    first, rest = cpus[0], frozenset(cpus[1:])
    shared = ", shared with the loop of another daemon" if draft.taken[first] else ""
    draft.why(f"the loop is on CPU {first}, the first of --cpus{shared}")
    place = cpu_text(rest) if rest else "the same CPU"
    draft.why(f"libzmq and the group-commit thread are on {place}")
    node = draft.topology.node_of(first)
    return replace(
        chosen, node=node.id if node else None, reaper=frozenset({first}),
        others=rest or frozenset({first}),
    )  # fmt: skip


# ---- choice of a core -------------------------------------------------------------------------


def _on_cores(draft: _Draft, chosen: PlacementPlan, wanted: Node | None) -> PlacementPlan:
    """Place the loop on a core of its own, and the other threads on other cores of the node."""
    topology = draft.topology
    node = _near_node(draft, wanted) if wanted else _best_node(draft)
    here = topology.allowed & node.cpus or topology.allowed
    cores = topology.cores(here)
    chosen = replace(chosen, node=node.id)
    if len(topology.allowed) <= FEW_CPUS or len(cores) == 1:
        return _without_a_core(draft, chosen, here)
    core = max(cores, key=lambda core: _worth(draft, core))
    loop = min(core, key=lambda cpu: draft.taken[cpu])
    others = _other_cpus(draft, here, loop)
    draft.why(f"the loop is on CPU {loop} of node {node.id}: {_why_core(draft, loop, others)}")
    draft.why(f"libzmq and the group-commit thread are on {cpu_text(others)} of the same node")
    return replace(chosen, reaper=frozenset({loop}), core_chosen=True, others=others)


def _without_a_core(draft: _Draft, chosen: PlacementPlan, here: frozenset[int]) -> PlacementPlan:
    usable = draft.topology.allowed
    if len(usable) <= FEW_CPUS:
        draft.why(f"only CPUs {cpu_text(usable)} are usable: too few to pin threads")
    else:
        draft.why(f"node {chosen.node} has only one core: the loop has no core of its own")
    if here == usable:
        return chosen
    if len(usable) <= FEW_CPUS and chosen.mode is PlacementMode.AUTO:
        return replace(chosen, node=None)
    draft.why(f"all threads are on {cpu_text(here)} of node {chosen.node}")
    return replace(chosen, reaper=here, others=here)


def _worth(draft: _Draft, core: tuple[int, ...]) -> tuple[int, bool, bool, bool, int]:
    """Rate a core for the loop; a higher value is better. The kernel does most of its own work on
    CPU 0."""
    stays = draft.before is not None and draft.before.reaper_cpu in core
    loops = draft.loops(core) - (draft.leaving(core) if stays else 0)
    return -loops, core[0] in draft.topology.isolated, 0 not in core, stays, core[0]


def _other_cpus(draft: _Draft, here: frozenset[int], loop: int) -> frozenset[int]:
    """Return the CPUs of `here` for all other threads: CPUs on cores without a loop, if
    possible."""
    topology, loops = draft.topology, {loop, *draft.taken}
    spared = topology.off_loops(here, loops)
    if not spared:
        text = (
            "no CPU without a loop: libzmq and the group-commit thread share CPUs with other loops"
        )
        draft.clamp(PlacementPart.CPUS, text)
    elif spared & topology.whole_cores(loops):
        text = "no core without a loop: libzmq and the group-commit thread are on siblings of loops"
        draft.clamp(PlacementPart.CPUS, text)
    found = spared or topology.off_loops(here, {loop})
    return found - topology.isolated or found


def _why_core(draft: _Draft, loop: int, others: frozenset[int]) -> str:
    siblings = draft.topology.siblings[loop] - {loop}
    if crowd := draft.loops({loop}):
        return f"every core has loops of other daemons, this one {crowd}"
    if siblings & others:
        reason = f"its sibling {cpu_text(siblings & others)} has other threads"
    else:
        reason = f"its sibling {cpu_text(siblings)} stays free" if siblings else "a core of its own"
    return f"isolated, {reason}" if loop in draft.topology.isolated else reason


def _near_node(draft: _Draft, wanted: Node) -> Node:
    """Return the node of --node, or the nearest node with usable CPUs."""
    usable = [node for node in draft.topology.nodes if node.cpus & draft.topology.allowed]
    nearest = draft.topology.nearest(wanted, usable) or wanted
    if nearest != wanted:
        kind = "usable CPUs" if wanted.cpus else "CPUs"
        text = f"node {wanted.id} has no {kind}: the threads are on node {nearest.id}"
        draft.clamp(PlacementPart.CPUS, text)
    return nearest


def _best_node(draft: _Draft) -> Node:
    """Return the node with the most free capacity, or the current node of a running daemon while
    this node has usable CPUs."""
    best = max(draft.topology.nodes, key=lambda node: _free_capacity(draft, node))
    home, why = draft.home, "has the most free capacity: cores, then memory"
    if home is not None and home != best and home.cpus & draft.topology.allowed:
        best, why = home, "is the daemon's current node"
    if len(draft.topology.nodes) > 1:
        draft.why(f"node {best.id} {why}")
    return best


def _free_capacity(draft: _Draft, node: Node) -> tuple[bool, bool, int, int, int, int]:
    """Rate a node; a higher value is better."""
    ours = node.cpus & draft.topology.allowed
    free = sum(not draft.loops(core) for core in draft.topology.cores(ours))
    has_memory = node.id in draft.topology.memory_nodes
    return bool(ours), has_memory, free, -draft.loops(ours), node.memory_bytes, -node.id


def _memory_node(draft: _Draft, wanted: Node | None, number: int | None) -> int | None:
    """Return the node of the arena; None if there is no choice. An arena in use is not moved,
    because that would delay the loop."""
    found = _nearest_memory(draft, wanted, number)
    if draft.before is not None and found != draft.before.memory_node:
        if found is not None:
            part = PlacementPart.MEMORY if wanted else NOTHING
            draft.clamp(part, f"the arena moves to node {found} at the next start")
        found = draft.before.memory_node
    if found is not None:
        draft.why(f"the arena is on node {found}")
    return found


def _nearest_memory(draft: _Draft, wanted: Node | None, number: int | None) -> int | None:
    """Return the node with memory that is nearest to --node or, without --node, to the threads."""
    topology = draft.topology
    home = wanted or (topology.node(number) if number is not None else None)
    usable = [node for node in topology.nodes if node.id in topology.memory_nodes]
    nearest = topology.nearest(home, usable) if home else None
    if len(topology.nodes) == 1 or home is None or nearest is None:
        return None
    if nearest != home:
        kind = "usable memory" if home.memory_bytes else "memory"
        draft.clamp(
            PlacementPart.MEMORY if wanted else NOTHING,
            f"node {home.id} has no {kind}: the arena is on node {nearest.id}",
        )
    return nearest.id


# ---- memory and scheduling --------------------------------------------------------------------


def _huge(draft: _Draft) -> bool:
    if not draft.config.huge_pages or draft.topology.huge_pages != "never":
        return draft.config.huge_pages
    text = "huge pages need /dev/shm to be mounted with huge=advise, within_size or always"
    draft.clamp(PlacementPart.HUGE, text)
    return False


def _spin_ns(draft: _Draft) -> int:
    if not draft.config.busy_poll_ns or len(draft.topology.allowed) > 1:
        return draft.config.busy_poll_ns
    draft.clamp(PlacementPart.SPIN, "no busy polling on the only CPU: other threads need it")
    return 0

"""The command placement: CPUs and NUMA nodes of a daemon and its workers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from purgatoryd.cli import settings, units
from purgatoryd.cli.exits import Command
from purgatoryd.cli.options import emit, json_option, name_option
from purgatoryd.cli.shards import Named, daemons

if TYPE_CHECKING:
    from purgatoryd.daemon.config import Config
    from purgatoryd.daemon.placement_plan import PlacementPlan
    from purgatoryd.shm_layout.arena import Placed
    from purgatoryd.shm_layout.topology import Node, Topology

LEGEND = "R loop   o other threads   . free   i isolated   x not allowed"
PER_LINE = 8
"""Cores per line of the picture."""


class Planned(NamedTuple):
    """A daemon with its placement plan and its actual placement."""

    named: Named
    plan: PlacementPlan
    placed: Placed | None
    """Actual placement of the daemon in its current or last run; None = the daemon has no arena."""


@click.command("placement", cls=Command)
@name_option
@settings.options(
    "placement", "cpus", "node", "realtime", "lock-memory", "huge-pages", "busy-poll", "shards"
)
@click.option(
    "--advise",
    type=units.Whole(1, 65_536),
    metavar="WORKERS",
    help="Propose CPUs for this number of worker processes instead.",
)
@json_option
@click.pass_context
def placement_command(
    ctx: click.Context, /, name: str, advise: int | None, as_json: bool, **values: Any
) -> None:
    """Show the CPUs and the NUMA node that a daemon would use.

    The output also gives the reasons. `purgatoryd run` would make this placement plan with these
    settings and the CPUs that this process may use. If the daemon has an arena, the command also
    shows its actual placement, which --advise then uses. For a deployment, or with --shards, the
    command shows a plan for each shard, and --advise assigns workers to the shards in turn.
    """
    from purgatoryd.shm_layout.topology import read

    config = settings.config_from(ctx, name, values)
    topology = read(os.sched_getaffinity(0))
    found, taken = plans_of(topology, config)
    if advise is not None:
        for worker, (one, cpu) in enumerate(advised(topology, found, taken, advise)):
            to = f", for {one.name}" if one.record else ""
            shown = {"worker": worker} | one.record | {"cpu": cpu}
            emit(shown, f"worker {worker}: CPU {cpu}{to}", as_json)
    elif as_json:
        for each in found:
            own = {"name": each.named.name} | each.named.record if each.named.record else {}
            emit(own | record(topology, each.plan, each.placed), "", as_json)
    else:
        click.echo("\n".join(lines(topology, found)))


def plans_of(topology: Topology, config: Config) -> tuple[list[Planned], list[int]]:
    """Return (plans, taken): the plan of the daemon or of each shard, and the loop CPUs of other
    daemons."""
    from purgatoryd.shm_layout.loops import loop_cpus

    named = list(daemons(config.name, config.shards))
    if named[0].record:
        config = replace(config, shards=len(named))
    arena_files, placed = zip(*(placement_of(one.name) for one in named), strict=True)
    taken = loop_cpus(*arena_files)
    plans = settled(topology, config, len(named), taken)
    return list(map(Planned, named, plans, placed)), taken


def settled(
    topology: Topology, config: Config, count: int, taken: Sequence[int]
) -> list[PlacementPlan]:
    """Return the plans of `count` shards.

    As in a real start, each shard first takes CPUs that earlier shards left free. Afterwards each
    shard adapts its plan to the later shards. `taken`: loop CPUs of other daemons.
    """
    from purgatoryd.daemon.placement_plan import plan_placement

    plans: list[PlacementPlan] = []
    for _ in range(count):
        plans.append(plan_placement(topology, config, [*taken, *loops_of(plans)]))
    for shard, one in enumerate(plans):
        others = loops_of([*plans[:shard], *plans[shard + 1 :]])
        plans[shard] = plan_placement(topology, config, [*taken, *others], one)
    return plans


def loops_of(plans: Iterable[PlacementPlan | Placed]) -> list[int]:
    """Return the CPU of the loop, for each plan in which the loop has exactly one CPU."""
    return [one.reaper_cpu for one in plans if one.reaper_cpu is not None]


def advised(
    topology: Topology, found: Sequence[Planned], taken: Sequence[int], workers: int
) -> Iterator[tuple[Named, int]]:
    """Yield (daemon, CPU near it) for each worker. Workers are assigned to the daemons in turn.

    `taken`: loop CPUs of other daemons.
    """
    from purgatoryd.shm_layout.topology import worker_cpus

    places = [one.placed or one.plan for one in found]
    loops = [*taken, *loops_of(places)]
    near = [worker_cpus(topology, at.home, at.reaper_cpu, loops) for at in places]
    used: Counter[int] = Counter()
    for worker in range(workers):
        shard = worker % len(found)
        cpu = min(near[shard], key=lambda cpu: used[cpu])
        used[cpu] += 1
        yield found[shard].named, cpu


def placement_of(name: str) -> tuple[str, Placed | None]:
    """Return (name of the arena file, actual placement). The placement is None without an arena,
    and the name is empty without a daemon.

    Raises PermissionDenied.
    """
    from purgatoryd.shm_layout.arena import Reader
    from purgatoryd.shm_layout.errors import ArenaError, DaemonUnreachable
    from purgatoryd.shm_layout.paths import arena_paths

    try:
        paths = arena_paths(name)
    except DaemonUnreachable:
        return "", None
    try:
        reader = Reader.attach(paths)
    except ArenaError:
        return paths.arena, None
    placed = reader.placement
    reader.close()
    return paths.arena, placed


# ---- for programs ------------------------------------------------------------------------------


def record(topology: Topology, plan: PlacementPlan, placed: Placed | None) -> dict[str, Any]:
    """Return machine, plan and actual placement for JSON."""
    from purgatoryd.shm_layout.arena import parts_text

    return {
        "topology": {
            "online": sorted(topology.online),
            "allowed": sorted(topology.allowed),
            "isolated": sorted(topology.isolated),
            "cores": topology.cores(topology.online),
            "huge_pages": topology.huge_pages,
            "nodes": [
                {
                    "node": node.id, "cpus": sorted(node.cpus), "bytes": node.memory_bytes,
                    "free_bytes": node.free_bytes, "distances": dict(node.distances),
                    "allowed": node.id in topology.memory_nodes,
                }
                for node in topology.nodes
            ],
        },
        "placement_plan": {
            "mode": plan.mode.name.lower(), "node": plan.node, "memory_node": plan.memory_node,
            "reaper": sorted(plan.reaper), "others": sorted(plan.others),
            "realtime": plan.realtime, "lock_memory": plan.lock, "huge_pages": plan.huge,
            "busy_poll_ns": plan.spin_ns, "clamped": parts_text(plan.clamped),
            "clamps": plan.clamps, "reasons": plan.reasons,
        },
        "daemon": None if placed is None else {
            "mode": placed.mode.name.lower(), "node": placed.node,
            "memory_node": placed.memory_node, "reaper_cpu": placed.reaper_cpu,
            "placed": parts_text(placed.applied), "clamped": parts_text(placed.clamped),
            "pages_sampled": placed.pages_sampled, "pages_elsewhere": placed.pages_elsewhere,
        },
    }  # fmt: skip


# ---- for people ----------------------------------------------------------------------------------


def lines(topology: Topology, found: Sequence[Planned]) -> Iterator[str]:
    """Yield the lines of a picture of the cores, and for each daemon its plan, the reasons and the
    actual placement."""
    plans = [one.plan for one in found]
    for node in topology.nodes:
        yield from picture(topology, node, plans)
    yield LEGEND
    for one in found:
        yield ""
        yield from of_one(*one)


def of_one(named: Named, plan: PlacementPlan, placed: Placed | None) -> Iterator[str]:
    """Yield the plan of a daemon and its actual placement as lines of text."""
    yield (
        f"{named.name}, " if named.record else ""
    ) + f"placement plan ({plan.mode.name.lower()}):"
    yield from (f"  {reason}" for reason in plan.reasons)
    yield from (f"  not possible: {clamp}" for clamp in plan.clamps)
    yield from (f"  {extra}" for extra in extras(plan))
    if placed is not None:
        yield ""
        subject = named.name if named.record else "the daemon"
        yield f"{subject} ({placed.mode.name.lower()}): {now(placed)}"


def picture(topology: Topology, node: Node, plans: Sequence[PlacementPlan]) -> Iterator[str]:
    """Yield the lines for a node and its cores. A core is in brackets and has a mark after each
    CPU."""
    far = ", ".join(f"{d} to node {n}" for n, d in node.distances.items() if n != node.id)
    memory = "no memory"
    if node.memory_bytes:
        sizes = map(units.format_size, (node.free_bytes, node.memory_bytes))
        memory = "{} free of {}".format(*sizes)
    arenas = sum(node.id == plan.memory_node for plan in plans)
    arena = f", {arenas} arenas" if arenas > 1 else ", the arena" if arenas else ""
    yield f"node {node.id}: {memory}{arena}" + (f"; distance {far}" if far else "")
    cores = [
        "[" + " ".join(f"{cpu}{mark(topology, plans, cpu)}" for cpu in core) + "]"
        for core in topology.cores(node.cpus)
    ]
    for first in range(0, len(cores), PER_LINE):
        yield "  " + " ".join(cores[first : first + PER_LINE])


def mark(topology: Topology, plans: Sequence[PlacementPlan], cpu: int) -> str:
    """Return the mark of a CPU, as in LEGEND."""
    if any(cpu in plan.reaper for plan in plans):
        return "R"
    if any(cpu in plan.others for plan in plans):
        return "o"
    if cpu not in topology.allowed:
        return "i" if cpu in topology.isolated else "x"
    return "i" if cpu in topology.isolated else "."


def extras(plan: PlacementPlan) -> Iterator[str]:
    """Yield a line for each request to the kernel other than CPUs and NUMA node."""
    if plan.realtime:
        yield f"loop and libzmq run under SCHED_FIFO, priority {plan.realtime}, if permitted"
    if plan.lock:
        yield "memory that is mapped at startup is locked into RAM, up to RLIMIT_MEMLOCK"
    if plan.huge:
        yield "the arena gets huge pages, as far as available"
    if plan.spin_ns:
        spin = units.format_duration(plan.spin_ns)
        yield f"the loop polls in the last {spin} before a deadline"


def now(placed: Placed) -> str:
    """Return the actual placement of a daemon as a line of text."""
    from purgatoryd.shm_layout.arena import parts_text

    where = "its threads run anywhere" if placed.node is None else f"node {placed.node}"
    if placed.reaper_cpu is not None:
        where += f", the loop on CPU {placed.reaper_cpu}"
    if placed.memory_node is not None:
        there = placed.pages_sampled - placed.pages_elsewhere
        where += f", arena on node {placed.memory_node} ({there} of {placed.pages_sampled} pages)"
    applied, clamped = (parts_text(p) or "nothing" for p in (placed.applied, placed.clamped))
    return f"{where}; in effect: {applied}; refused: {clamped}"

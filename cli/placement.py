"""placement: where the daemon runs on this machine, and why; where its workers should."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli import settings, units
from purgatoryd.cli.exits import Command
from purgatoryd.cli.options import emit, json_option, name_option

if TYPE_CHECKING:
    from purgatoryd.daemon.plan import Plan
    from purgatoryd.shm_layout.arena import Placed
    from purgatoryd.shm_layout.topology import Node, Topology

LEGEND = "R loop   o other threads   . free   i isolated   x not ours"
PER_LINE = 8
"""Cores in a line of the picture."""


@click.command("placement", cls=Command)
@name_option
@settings.options("placement", "cpus", "node", "realtime", "lock-memory", "huge-pages", "busy-poll")
@click.option(
    "--advise",
    type=click.IntRange(1, 65_536),
    metavar="WORKERS",
    help="Propose CPUs for so many worker processes instead.",
)
@json_option
@click.pass_context
def placement_command(
    ctx: click.Context, /, name: str, advise: int | None, as_json: bool, **values: Any
) -> None:
    """Show the machine, where a daemon would run on it, and why.

    The plan is made for the settings given here as `purgatoryd run` would make it, for a process
    that is started as this one was. If the daemon of that name has an arena, it is also shown where
    that daemon runs, or ran last, and --advise goes by that.
    """
    from purgatoryd.daemon.placement import taken_cpus
    from purgatoryd.daemon.plan import plan
    from purgatoryd.shm_layout.topology import read, worker_cpus

    config = settings.config_from(ctx, name, values)
    topology = read(os.sched_getaffinity(0))
    segment, placed = placement_of(name)
    made = plan(topology, config, taken_cpus(segment))
    if advise is None:
        emit(record(topology, made, placed), "\n".join(lines(topology, made, placed)), as_json)
        return
    node, cpu = (placed.node, placed.reaper_cpu) if placed else (made.node, made.reaper_cpu)
    cpus = worker_cpus(topology, node, cpu)
    for worker in range(advise):
        own = cpus[worker % len(cpus)]
        emit({"worker": worker, "cpu": own}, f"worker {worker}: CPU {own}", as_json)


def placement_of(name: str) -> tuple[str, Placed | None]:
    """The arena's segment, empty if there is none, and where its daemon runs or ran last."""
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


def record(topology: Topology, plan: Plan, placed: Placed | None) -> dict[str, Any]:
    """All of it in JSON."""
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
        "plan": {
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


def lines(topology: Topology, plan: Plan, placed: Placed | None) -> Iterator[str]:
    """The picture, the plan, and why."""
    for node in topology.nodes:
        yield from picture(topology, node, plan)
    yield LEGEND
    yield ""
    yield f"plan ({plan.mode.name.lower()}):"
    yield from (f"  {reason}" for reason in plan.reasons)
    yield from (f"  not possible: {clamp}" for clamp in plan.clamps)
    yield from (f"  {extra}" for extra in extras(plan))
    if placed is not None:
        yield ""
        yield f"the daemon ({placed.mode.name.lower()}): {now(placed)}"


def picture(topology: Topology, node: Node, plan: Plan) -> Iterator[str]:
    """A node and its cores, each in brackets, a mark behind each CPU."""
    far = ", ".join(f"{d} to node {n}" for n, d in node.distances.items() if n != node.id)
    memory = "no memory"
    if node.memory_bytes:
        sizes = map(units.format_size, (node.free_bytes, node.memory_bytes))
        memory = "{} free of {}".format(*sizes)
    arena = ", the arena" if node.id == plan.memory_node else ""
    yield f"node {node.id}: {memory}{arena}" + (f"; distance {far}" if far else "")
    cores = [
        "[" + " ".join(f"{cpu}{mark(topology, plan, cpu)}" for cpu in core) + "]"
        for core in topology.cores(node.cpus)
    ]
    for first in range(0, len(cores), PER_LINE):
        yield "  " + " ".join(cores[first : first + PER_LINE])


def mark(topology: Topology, plan: Plan, cpu: int) -> str:
    """What a CPU is to the daemon."""
    if cpu in plan.reaper:
        return "R"
    if cpu in plan.others:
        return "o"
    if cpu not in topology.allowed:
        return "i" if cpu in topology.isolated else "x"
    return "i" if cpu in topology.isolated else "."


def extras(plan: Plan) -> Iterator[str]:
    """What is asked of the kernel besides CPUs and memory."""
    if plan.realtime:
        yield f"loop and libzmq run under SCHED_FIFO, priority {plan.realtime}, if permitted"
    if plan.lock:
        yield "memory that is mapped at the start stays in RAM, as far as the limit allows"
    if plan.huge:
        yield "the arena gets huge pages, as far as there are any"
    if plan.spin_ns:
        spin = units.format_duration(plan.spin_ns)
        yield f"the loop does not sleep in the last {spin} before a deadline"


def now(placed: Placed) -> str:
    """Where a daemon runs, in one line."""
    from purgatoryd.shm_layout.arena import parts_text

    where = "its threads run anywhere" if placed.node is None else f"node {placed.node}"
    if placed.reaper_cpu is not None:
        where += f", the loop on CPU {placed.reaper_cpu}"
    if placed.memory_node is not None:
        there = placed.pages_sampled - placed.pages_elsewhere
        where += f", arena on node {placed.memory_node} ({there} of {placed.pages_sampled} pages)"
    return f"{where}; in force: {parts_text(placed.applied)}; refused: {parts_text(placed.clamped)}"

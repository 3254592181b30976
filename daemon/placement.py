"""Put the placement plan of the daemon into effect, and keep it up to date.

The memory policy is set before memory is touched. After all threads exist, they are pinned to their
CPUs; memory is moved if sampled pages are on another node. Every heartbeat checks the threads'
affinities and the CPUs of the cgroup. The loops of other daemons are checked less often, the more
loops there are. A change leads to a new plan. If two daemons choose the same core at the same time,
the one with the smaller pid keeps it. A refusal of the kernel is reported, and the daemon runs
without that part of the plan.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.log import log
from purgatoryd.daemon.placement_plan import FEW_CPUS, PlacementPlan, plan_placement
from purgatoryd.shm_layout import memory
from purgatoryd.shm_layout.arena import Arena, Placed
from purgatoryd.shm_layout.layout import PlacementPart
from purgatoryd.shm_layout.loops import Loop, loops
from purgatoryd.shm_layout.shm import Moved
from purgatoryd.shm_layout.topology import SYSTEM, confined_cpus, read

LOOPS_PER_HEARTBEAT = 8
"""Average number of other daemons' loops that a heartbeat checks. The limit keeps N daemons from
making N * N checks a second."""
_IO_THREADS = "ZMQbg/IO"
"""Beginning of the names of libzmq's I/O threads."""


class Placement:
    """Placement of this process, whose main thread is the loop. Refusals are logged, not raised."""

    def __init__(self, config: Config, arena: str, root: Path = SYSTEM) -> None:
        """`arena`: name of our arena file, which distinguishes our loop from the loops of other
        daemons."""
        self._config = config
        self._name = arena
        self._root = root
        given = os.sched_getaffinity(0)
        self._given = None if given >= read(None, root).confined else given
        """CPUs that the process was allowed to use at its start; None = all CPUs that the cgroup
        has at the moment."""
        self._seen = self._look()
        """CPUs of the cgroup and of the threads when these CPUs were last set or seen."""
        self._loops: Sequence[Loop] = ()
        """Loops of other daemons at the last decision."""
        self._heartbeats = 0
        """Number of heartbeats since the loops of other daemons were checked."""
        self._pinned = False
        self._applied = self._refused = PlacementPart(0)
        self._pages_elsewhere = self._pages_sampled = 0
        self.plan = self._decide(None)

    @property
    def placed(self) -> Placed:
        """The placement in effect, for the arena header."""
        plan, parts = self.plan, self._applied
        if plan.spin_ns:
            parts |= PlacementPart.SPIN
        if plan.core_chosen and PlacementPart.CPUS in parts:
            parts |= PlacementPart.CORE
        return Placed(
            plan.mode, plan.node, plan.memory_node, plan.reaper_cpu, parts,
            plan.clamped | self._refused, self._pages_sampled, self._pages_elsewhere,
        )  # fmt: skip

    def begin(self) -> None:
        """Set the memory policy: memory touched from now on comes from the plan's node."""
        for reason in self.plan.clamps:
            log.warning(f"placement: {reason}")
        if self.plan.memory_node is not None:
            with self._part(PlacementPart.MEMORY, "memory of one node"):
                memory.prefer(self.plan.memory_node)

    def settle(self, arena: Arena, moved: Moved = lambda: None) -> None:
        """Move memory and threads to the node and CPUs of the plan, once all threads exist. Calls
        `moved` after each portion of memory."""
        if self.plan.memory_node is not None and PlacementPart.MEMORY in self._applied:
            with self._part(PlacementPart.MEMORY, "memory of one node"):
                self._bring_home(arena, self.plan.memory_node, moved)
        if self.plan.huge:
            with self._part(PlacementPart.HUGE, "huge pages"):
                for mapping in arena.mappings:
                    memory.collapse(mapping, moved)
        if self.plan.lock:
            with self._part(PlacementPart.LOCK, "locked memory"):
                for mapping in arena.mappings:
                    memory.populate(mapping, moved)
                _lock()
        if self.plan.realtime:
            self._schedule()
        self._pin()
        arena.set_placement(self.placed)

    def look(self, arena: Arena) -> None:
        """Make a new plan if the CPUs of a thread, the cgroup or another daemon's loop changed.

        The cgroup is checked as well, because it can regain CPUs without a change of any affinity.
        """
        self._heartbeats += 1
        try:
            seen = self._look()
        except OSError:  # no descriptor is left
            return
        if seen != self._seen or self._loops_changed(seen[0]):
            self.again(arena, self._config)

    def again(self, arena: Arena, config: Config) -> None:
        """Decide again where the threads run and how they are scheduled, by these settings.

        If the topology cannot be read, the next call of look() decides.
        """
        self._config = config
        try:
            self._decide_again(arena)
        except OSError as error:
            self._seen = frozenset(), {}
            log.warning(f"placement: unchanged, because the topology cannot be read: {error}")

    def _decide_again(self, arena: Arena) -> None:
        before = self.plan
        self.plan = self._decide(before)
        if self.plan.realtime != before.realtime:
            self._schedule()
        self._pin()
        self._report(before)
        arena.set_placement(self.placed)

    def _report(self, before: PlacementPlan) -> None:
        """Log changes of the plan. Only a move of the loop is a warning: other threads often move
        when other daemons start or end."""
        for reason in self.plan.clamps:
            if reason not in before.clamps:
                log.warning(f"placement: {reason}")
        if (self.plan.reaper, self.plan.others) != (before.reaper, before.others):
            tell = log.info if self.plan.reaper == before.reaper else log.warning
            tell(f"placement: {'; '.join(self.plan.reasons)}")

    def _look(self) -> tuple[Set[int], Mapping[int, Set[int]]]:
        return confined_cpus(self._root), _affinities()

    def _loops_changed(self, cpus: Set[int]) -> bool:
        """True if other daemons' loops changed. False if the next check of them is not due yet,
        see LOOPS_PER_HEARTBEAT."""
        if self._heartbeats * LOOPS_PER_HEARTBEAT < len(self._loops):
            return False
        self._heartbeats = 0
        return self._other_loops(cpus) != self._loops

    def _other_loops(self, cpus: Set[int]) -> Sequence[Loop]:
        """Return the loops of other daemons; empty if so few CPUs are usable that no loop is
        pinned."""
        return loops(self._name) if len(cpus) > FEW_CPUS else ()

    def _decide(self, before: PlacementPlan | None) -> PlacementPlan:
        topology = read(self._given, self._root)
        self._loops = self._other_loops(topology.confined)
        taken = [loop.cpu for loop in self._loops]
        leave = [loop.cpu for loop in self._loops if loop.chosen and loop.pid > os.getpid()]
        return plan_placement(topology, self._config, taken, before, leave)

    @contextmanager
    def _part(self, part: PlacementPart, detail: str) -> Iterator[None]:
        """Request `part` from the kernel inside this context. A refusal is noted and logged."""
        self._applied |= part
        try:
            yield
        except (OSError, ValueError) as error:
            self._applied &= ~part
            self._refused |= part
            log.warning(f"placement: no {detail}: {error}")

    def _bring_home(self, arena: Arena, node: int, moved: Moved) -> None:
        for mapping in arena.mappings:
            memory.bind(mapping, node, move=False)
            if memory.elsewhere(mapping, node):
                memory.bind(mapping, node, move=True, moved=moved)
            self._pages_sampled += memory.SAMPLES
            self._pages_elsewhere += memory.elsewhere(mapping, node)
        if self._pages_elsewhere:
            self._refused |= PlacementPart.MEMORY
            log.warning(
                f"placement: {self._pages_elsewhere} of {self._pages_sampled} sampled pages of the "
                f"arena are not on node {node}"
            )

    def _schedule(self) -> None:
        """Switch the loop to SCHED_FIFO, or back to the usual scheduling."""
        self._refused &= ~PlacementPart.REALTIME
        with self._part(PlacementPart.REALTIME, "SCHED_FIFO"):
            _schedule(self.plan.realtime)
        if not self.plan.realtime:
            self._applied &= ~PlacementPart.REALTIME

    def _pin(self) -> None:
        """Pin the loop and the other threads to their CPUs, or undo an earlier pinning."""
        self._refused &= ~PlacementPart.CPUS
        pinned: Mapping[int, Set[int]] | None = None
        if self.plan.reaper or self._pinned:
            everywhere = read(self._given, self._root).allowed
            with self._part(PlacementPart.CPUS, "pinning of threads"):
                pinned = _set_cpus(self.plan.reaper or everywhere, self.plan.others or everywhere)
        self._pinned = bool(self.plan.reaper)
        if not self._pinned:
            self._applied &= ~PlacementPart.CPUS
        confined, affinities = self._look()
        # If somebody has moved a thread since it was pinned, the next look() finds a difference
        # from `pinned`.
        self._seen = confined, affinities if pinned is None else pinned


def _affinities() -> dict[int, Set[int]]:
    """Return the CPUs of each of our threads."""
    found: dict[int, Set[int]] = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):
            found[thread] = os.sched_getaffinity(thread)
    return found


def _set_cpus(loop: Set[int], others: Set[int]) -> dict[int, Set[int]]:
    """Pin all threads to CPUs, and return the CPUs by thread id. Raises OSError, and ValueError for
    CPUs that no longer exist."""
    import psutil  # this import takes half the time of a start, and only pinning needs it

    try:
        process = psutil.Process()
        process.cpu_affinity(sorted(loop))  # sets only the main thread's CPUs
        pinned = {process.pid: loop}
        for thread in process.threads():
            if thread.id != process.pid:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, others)
                    pinned[thread.id] = others
    except psutil.Error as error:
        raise OSError(str(error)) from error
    return pinned


def _lock() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))
    memory.lock()


def _schedule(priority: int) -> None:
    """Give the loop a SCHED_FIFO priority, and libzmq's I/O threads the next lower one. Threads and
    processes that they start have the usual scheduling. Priority 0 = the usual scheduling for
    all."""
    policy = (os.SCHED_FIFO if priority else os.SCHED_OTHER) | os.SCHED_RESET_ON_FORK
    os.sched_setscheduler(0, policy, os.sched_param(priority))
    next_to_it = os.sched_param(min(priority, max(1, priority - 1)))
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text().startswith(_IO_THREADS):
            os.sched_setscheduler(int(thread.name), policy, next_to_it)

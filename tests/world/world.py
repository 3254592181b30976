"""A world: a machine, its daemons and the events of a script, judged by an oracle."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from purgatoryd.clients import route
from purgatoryd.daemon import recovery
from purgatoryd.daemon.log import log
from purgatoryd.shm_layout import arena, paths, shm, wal
from purgatoryd.shm_layout.shards import Placement, ShardTable, write_table
from purgatoryd.shm_layout.shm import ArenaFile
from world.cell import NAMESPACE, Cell
from world.daemons import bind
from world.disk import SimulatedDisk
from world.hosts import Machine, SimulatedHost
from world.limits import limited
from world.network import Network
from world.oracle import Violation
from world.schedule import Schedule
from world.script import MS, S, Script, Step
from world.seam import CrossedLibrary, Seam

BEGIN_NS = 10**13
CHECK_STEPS = 50
"""Number of steps between two checks of the arenas."""
FAR_NS = 4000 * S
"""A delay beyond every deadline."""
PATCHED: tuple[Any, ...] = (arena, wal, recovery)
NAMING: tuple[tuple[Any, str], ...] = (
    (shm, "replace"), (shm, "unlink"), (ArenaFile, "link"), (ArenaFile, "unlink"),
)  # fmt: skip


@contextmanager
def crossed(seam: Seam) -> Iterator[None]:
    """Let calls into the core, and calls that change names of arena files, cross the seam.

    Record the arena files that a process opens, and its group commits.
    """
    open_file, begin_commit = ArenaFile.__init__, wal.GroupCommit.__init__

    def opened(file: ArenaFile, *arguments: Any) -> None:
        open_file(file, *arguments)
        if seam.running is not None:
            seam.running.files.append(file)

    def begun(commit: wal.GroupCommit, *arguments: Any, **options: Any) -> None:
        assert options.get("threaded") is False, "a thread would not be killed with its process"
        if seam.running is not None:
            seam.running.commits.append(commit)
        begin_commit(commit, *arguments, **options)

    with ExitStack() as patched:
        for module in PATCHED:
            _patch(patched, module, "lib", CrossedLibrary(module.lib, seam))
        for owner, name in NAMING:
            _patch(patched, owner, name, seam.crossed(getattr(owner, name)))
        _patch(patched, ArenaFile, "__init__", opened)
        _patch(patched, wal.GroupCommit, "__init__", begun)
        yield


def _patch(patched: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Replace an attribute until `patched` is closed."""
    patched.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, new)


class World:
    """One world. Create it with world_of()."""

    def __init__(self, script: Script, directory: Path) -> None:
        self.script = script
        self.directory = directory
        seed, shards = script.setting.seed, script.setting.shards
        self.schedule = Schedule(BEGIN_NS)
        self.seam = Seam()
        self.disk = SimulatedDisk(self.schedule, random.Random(f"disk {seed}"), self.seam)
        self.machine = Machine(
            self.schedule, random.Random(f"machine {seed}"), self.disk,
            script.setting.begin_wall_ns,
        )  # fmt: skip
        self.network = Network(self.schedule, self.seam, self.note)
        self.faults: Counter[str] = Counter()
        self.messages: list[str] = []
        """Log messages of the daemons."""
        self._digest = hashlib.sha256()
        self._numbers = 0
        self._wrong_ns: dict[int, int] = {}
        self._steps = _steps()
        table = self._place(shards)
        names = [table.daemon(n) for n in range(shards)] if table else ["w"]
        self.cells = [Cell(self, number, name, shards) for number, name in enumerate(names)]

    def _place(self, shards: int) -> ShardTable | None:
        """Write the routing table of a deployment, with one partition for each shard."""
        if shards == 1:
            return None
        born = Placement(NAMESPACE, tuple(range(shards)))
        table = ShardTable("w", 1, 1, shards).with_birth(born)
        write_table(self.directory, table)
        bind(self.directory / "w.cmd")
        return table

    def host(self) -> SimulatedHost:
        """Return the host of a new process."""
        return SimulatedHost(self.machine, self.machine.next_pid())

    def number(self) -> int:
        """Return a number that was not used before."""
        self._numbers += 1
        return self._numbers

    # ---- running -------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the script, then let all calls, timers and operations end. Raises Violation."""
        for cell in self.cells:
            cell.begin()
        for number, step in enumerate(self.script.steps):
            self.pass_time(step.wait_ns)
            self.do(step)
            if number % CHECK_STEPS == 0:
                self._check()
        self.finish()

    def _check(self) -> None:
        for cell in self.cells:
            if cell.daemon.reaper is not None:
                cell.check()

    def do(self, step: Step) -> None:
        """Do one step."""
        self._steps[step.kind](self.cells[step.cell], **step.arguments)

    def pass_time(self, span_ns: int) -> None:
        """Run the events of a time span."""
        self.schedule.run(self.schedule.now_ns + span_ns)

    def until(self, fact: Callable[[], object], name: str, limit_ns: int = 300 * S) -> None:
        """Let time pass until a fact is true. Raises Violation if it does not become true."""
        if not self.comes_true(fact, limit_ns):
            raise Violation(f"did not come true: {name}")

    def comes_true(self, fact: Callable[[], object], limit_ns: int) -> bool:
        """Let time pass until a fact is true. Return False if it does not become true."""
        end_ns = self.schedule.now_ns + limit_ns
        while not fact():
            if self.schedule.now_ns > end_ns:
                return False
            self.pass_time(50 * MS)
        return True

    def finish(self) -> None:
        """Heal everything, and wait until all cells have finished."""
        from world import delivery, scheduling, work  # these modules import this one

        self.disk.heal()
        for cell in self.cells:
            cell.heal()
        for cell in self.cells:
            cell.finish()
            work.resume_topics(cell)
            delivery.heal(cell)
            scheduling.finish(cell)
        self.schedule.skip(FAR_NS)
        if self.script.setting.virtual:
            for cell in self.cells:
                cell.advance_far(10 * FAR_NS)
        self.pass_time(20 * S)
        for cell in self.cells:
            delivery.finish(cell)
            cell.readers.finish()
        for cell in self.cells:
            cell.close()
        self._note_end()
        for cell in self.cells:
            cell.restarts = False
            cell.daemon.stop()

    def close(self) -> None:
        """Release the real resources that the world uses outside of the simulation."""
        for cell in self.cells:
            cell.die()

    # ---- the wall clock ------------------------------------------------------------------------

    def wall_is_wrong(self, by_ns: int) -> None:
        """Record that the wall clock was set or drifts, and is wrong by up to `by_ns`."""
        for cell in self.cells:
            self._wrong_ns[cell.number] = self._wrong_ns.get(cell.number, 0) + by_ns
            cell.oracle.wall_moved = True

    def wrong_ns(self, cell: Cell) -> int:
        """Return by how much the wall clock may have become wrong since the last call for this
        cell."""
        drifts_ns = FAR_NS // 1000 if self.machine.drift_ppm else 0
        return self._wrong_ns.pop(cell.number, 0) + drifts_ns

    # ---- the digest ----------------------------------------------------------------------------

    def note(self, *parts: object) -> None:
        """Record values that the same seed has to reproduce."""
        for part in parts:
            self._digest.update(part if isinstance(part, bytes) else str(part).encode())

    @property
    def digest(self) -> str:
        """Return a hash of all messages, answers, bytes on the disk, and arenas."""
        return self._digest.hexdigest()

    def _note_end(self) -> None:
        self.note(self.schedule.now_ns, *self.disk.digest_parts())
        for cell in self.cells:
            assert cell.daemon.reaper is not None
            for memory in cell.daemon.reaper.arena.mappings:
                self.note(hashlib.sha256(memory).digest())

    def log(self, kind: str, message: str, fields: object) -> None:
        """Record a message that a daemon logs."""
        self.messages.append(f"{kind}: {message}")

    def counts(self) -> Counter[str]:
        """Return the number of faults by kind."""
        counts = Counter(self.faults)
        counts["message"] += sum(self.network.disturbed.values())
        counts["disk"] += self.disk.failed
        counts["kill with recovery"] += sum(cell.daemon.recoveries for cell in self.cells)
        return counts


def _steps() -> dict[str, Callable[..., None]]:
    # imported here because these modules import this one
    from world import delivery, faults, readers, scheduling, work

    return work.STEPS | faults.STEPS | delivery.STEPS | scheduling.STEPS | readers.STEPS


@contextmanager
def remembered_paths() -> Iterator[None]:
    """Compute the paths of a daemon only once, because clients look them up many times."""
    remembered = cache(paths.paths_in)
    with ExitStack() as patched:
        for module in (paths, route):
            _patch(patched, module, "paths_in", remembered)
        yield


@contextmanager
def world_of(script: Script) -> Iterator[World]:
    """Yield a world in a folder of its own, which is removed afterwards. The folder is in memory:
    on a disk each rename would take a millisecond."""
    directory = Path(tempfile.mkdtemp(prefix="pw", dir=shm.MOUNT))
    before = os.environ.get("PURGATORYD_DIR")
    os.environ["PURGATORYD_DIR"] = str(directory)
    world = World(script, directory)
    put, log._put = log._put, world.log  # type: ignore[method-assign, assignment]
    limits = limited(script.setting.small_limits)
    try:
        with limits, crossed(world.seam), remembered_paths():
            try:
                yield world
            finally:
                world.close()
    finally:
        log._put = put  # type: ignore[method-assign]
        shutil.rmtree(directory)
        if before is None:
            del os.environ["PURGATORYD_DIR"]
        else:
            os.environ["PURGATORYD_DIR"] = before

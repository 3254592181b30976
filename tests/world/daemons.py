"""A daemon of the world: the real loop, arena, WAL and recovery, as one process that can die."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.lifecycle import STARTING, DaemonLifecycle
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.main import loop_of
from purgatoryd.daemon.reaper import Reaper
from purgatoryd.daemon.retention import Keep
from purgatoryd.daemon.service_manager import ServiceManager
from purgatoryd.daemon.snapshot import saving, tidy_and_tell
from purgatoryd.daemon.store import Opening, open_arena, owned
from purgatoryd.daemon.wal import Wal, locked
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena, Reader
from purgatoryd.shm_layout.errors import AlreadyRunning, PurgatorydError
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.shm import ArenaFile
from purgatoryd.shm_layout.wal import GroupCommit, has_stopped
from world.hosts import Machine, SimulatedHost
from world.network import Network, SimulatedProcesses, SimulatedTransport
from world.oracle import Violation
from world.rings import FD, SimulatedRings
from world.script import CLIENTS
from world.seam import Fuse, Killed, Seam

if TYPE_CHECKING:
    from world.schedule import Schedule

WAKE_NS = 5_000
"""Time from an event to the first instruction of the loop."""
SNAPSHOT_NS = 2_000_000
"""Normal time between two steps of the snapshot process."""
SIGNALS = 5
"""Descriptor that is readable after a signal."""
EVERY_UID = frozenset(range(CLIENTS))
"""The uids of all clients."""
_UNPLACED: Any = SimpleNamespace(
    look=lambda arena: None, settle=lambda *_: None, plan=SimpleNamespace(spin_ns=0)
)


def bind(path: Path) -> None:
    """Create the socket file that clients look for; nobody listens to it."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.fspath(path))


def _let_go(file: ArenaFile) -> None:
    """Release a dead process's lock on an arena file, and close the file's descriptor.

    A traceback may still refer to the mapping. The mapping then stays until the traceback is gone.
    """
    if file.fd >= 0:
        with suppress(OSError):
            fcntl.flock(file.fd, fcntl.LOCK_UN)
            os.close(file.fd)
        file.fd = -1
    with suppress(BufferError):
        file.memory.close()


def _close_commit(commit: GroupCommit) -> None:
    """Close the descriptors of a dead process's group commit.

    If pg_group_commit_fd returns 0, the group commit has opened no descriptor, because its memory
    was zeroed at the start.
    """
    state = vars(commit).get("_c")
    if state is not None and lib.pg_group_commit_fd(state) > 0:
        lib.pg_group_commit_close(state)


def _nothing() -> Generator[None, None, None]:
    yield from ()


class SnapshotProcess:
    """The process that writes a snapshot. It works in steps, between the events of the world."""

    def __init__(
        self, daemon: SimulatedDaemon, arena: str, directory: Path, keep: Keep, *, snapshot: bool
    ) -> None:
        self.returncode: int | None = None
        self.fuse = Fuse()
        self._daemon = daemon
        self._parent = daemon.fuse
        self._directory, self._keep = directory, keep
        self._host = SimulatedHost(daemon.machine, daemon.machine.next_pid())
        self._steps = self._write(arena) if snapshot else _nothing()
        self._doomed = snapshot and daemon.dooms_snapshot()
        self._later()

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.fuse.dead = True
        self._end(-9)

    def wait(self) -> int:
        assert self.returncode is not None
        return self.returncode

    def _later(self) -> None:
        self._daemon.schedule.after(self._daemon.snapshot_ns, self._step)

    def _step(self) -> None:
        if self.returncode is not None:
            return
        if self._parent.dead or self._doomed:
            self.kill()
            return
        try:
            self._daemon.seam.run(self.fuse, self._advance)
        except Killed:
            self._end(-9)
        except (OSError, PurgatorydError):
            self._end(1)

    def _advance(self) -> None:
        if next(self._steps, self) is None:
            self._later()
            return
        with suppress(OSError, PurgatorydError):
            tidy_and_tell(self._directory, self._keep, self._host)
        self._end(0)

    def _write(self, arena: str) -> Generator[None, None, None]:
        with ExitStack() as stack:
            reader = stack.enter_context(closing(Reader(ArenaFile.open(arena, read_only=True))))
            waits: Any = saving(reader, self._directory, self._host, quiet=False)
            for lsn in stack.enter_context(closing(waits)):
                while int(reader.wal_buffer.committed_lsn) < lsn:
                    if has_stopped(reader.wal_buffer):
                        raise OSError(5, "the WAL has stopped")
                    yield

    def _end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            with suppress(Killed, ValueError, OSError, PurgatorydError):
                self._daemon.seam.run(self.fuse, self._steps.close)


class _SimulatedWaiter:
    """An implementation of Waiter that does not wait. The returned descriptors ended the sleep if
    `until_ns` is None."""

    def __init__(self, rings: SimulatedRings, came: Callable[[], bool]) -> None:
        """`came`: returns whether messages wait that the loop takes."""
        self._rings = rings
        self._came = came
        self.until_ns: int | None = None
        """Boot time until which the loop sleeps; None = it does not sleep."""

    def wait(self, until_ns: int) -> frozenset[int]:
        woken = self._came() or self._rings.committed
        self.until_ns, self._rings.committed = None if woken else until_ns, False
        return frozenset({FD})

    def poll(self) -> frozenset[int]:
        return frozenset({FD})

    def wait_and_serve(self, arena: Arena, loop: Any, until_ns: int) -> frozenset[int]:
        self._rings.sleeps_until_ns = None
        found = loop.waiter = ffi.new("struct pg_waiter *", {"bells": FD})
        arena.wait(loop, until_ns)
        if self._rings.error is not None:
            raise self._rings.error
        self.until_ns = self._rings.sleeps_until_ns
        return frozenset(found.ready[0 : found.count]) | self._rings.transport.ready()


class SimulatedDaemon:
    """A daemon name, and the processes that run under this name one after another."""

    def __init__(
        self,
        machine: Machine,
        network: Network,
        seam: Seam,
        directory: Path,
        config: Config,
        observe: Any,
        commit_ns: int,
        *,
        only_rings: bool,
    ) -> None:
        """Create the daemon.

        `observe`: a Cell, which is notified of all events that the oracle needs. `commit_ns`:
        duration of a group commit. `only_rings`: as for SimulatedTransport.
        """
        self.machine = machine
        self.schedule: Schedule = machine.schedule
        self.network = network
        self.seam = seam
        self.config = config
        self.paths = paths_in(directory, config.name)
        self.observe = observe
        self.fuse = Fuse()
        self.fuse.dead = True
        self.reaper: Reaper | None = None
        self.transport: SimulatedTransport | None = None
        self.processes: SimulatedProcesses | None = None
        self.pids: set[int] = set()
        """Pids of the running client processes."""
        self.frozen = False
        self.outages: list[tuple[int, int]] = []
        """Outages, each as the world times (begin, end) between which no loop ran."""
        self._out_since_ns: int | None = None
        self.starts = self.freezes = 0
        self.recoveries = 0
        """Number of starts after a kill."""
        self._recovers = False
        self.force = False
        """True if the next start accepts the part of a damaged WAL that precedes the damage."""
        self.as_restored = False
        """True if the next start accepts a copy of a WAL."""
        self.rivalled = False
        """True if the signal that arrives during the next start makes a rival process start."""
        self.import_path: Path | None = None
        """Export that the next start imports; None: no import."""
        self.next_config = config
        """Configuration of the next start."""
        self.commit_ns = self._usual_commit_ns = commit_ns
        self._only_rings = only_rings
        self.snapshot_ns = SNAPSHOT_NS
        """Time between two steps of the snapshot process."""
        self.doomed_snapshots = 0
        """Number of coming snapshot processes that will be killed before they finish."""
        self.next_uids = EVERY_UID
        """Uids that may connect to the next process."""
        self._stack = ExitStack()
        self._asleep = self._committing = self._terminated = False
        self._wake_number = 0
        self.snapshot: SnapshotProcess | None = None

    @property
    def alive(self) -> bool:
        """True while a started process of this name has not ended."""
        return self.reaper is not None and not self.fuse.dead

    # ---- start and end -------------------------------------------------------------------------

    def start(self) -> bool:
        """Start a process. Return False if the process refused to start, or was killed."""
        assert not self.alive
        self.config = self.next_config
        self.observe.starting()
        fuse, self.fuse = self.fuse, Fuse()
        self.fuse.left = fuse.left  # keep the planned kill for the new process
        self.fuse.signal_left, self.fuse.on_signal = fuse.signal_left, self._on_signal
        self.frozen = False
        self.starts += 1
        try:
            self.seam.run(self.fuse, self._start)
        except Killed:
            self._killed()
            return False
        except (PurgatorydError, OSError) as error:
            if self.fuse.dead:  # the error is a consequence of the kill
                self._killed()
                return False
            self.observe.refused(error)
            self._unwind(type(error), error)
            return False
        self.recoveries += self._recovers
        self._recovers = False
        self._runs_again()
        self._iterate_soon()
        return True

    def _start(self) -> None:
        host = SimulatedHost(self.machine, self.machine.next_pid())
        self._watch_table()
        lifecycle = DaemonLifecycle(ServiceManager(), host)
        lifecycle.enter(STARTING)
        opening = Opening(
            self.config, self.paths, self.import_path, self.force, self.as_restored,
            host=host, step=lifecycle.step,
            begin_wal=partial(Wal, start_snapshot=self._start_snapshot, threaded=False),
        )  # fmt: skip
        self._stack.enter_context(locked(opening.wal, as_restored=self.as_restored))
        opening = self._stack.enter_context(owned(opening))
        self.transport = SimulatedTransport(
            self.network, host,
            (self.paths.cmd_endpoint, self.paths.pub_endpoint, self.paths.admin_endpoint),
            in_core=self.starts % 3 != 0, only_rings=self._only_rings,
        )  # fmt: skip
        self.processes = SimulatedProcesses(self.transport)
        self.processes.alive = self.pids
        transport: Any = self.transport
        processes: Any = self.processes
        access = Access(frozenset({0}), self.next_uids, frozenset(), everybody=False)
        reaper = self._stack.enter_context(
            loop_of(opening, transport, access, lifecycle, _UNPLACED, processes)
        )
        transport.wake = self.wake
        self.observe.started(reaper.arena)
        self.force = self.as_restored = False
        self.import_path = None
        reaper.begin()
        self.reaper = reaper
        if not self.paths.cmd.is_socket():
            bind(self.paths.cmd)
        transport.listen()

    def stop(self) -> None:
        """Stop the process cleanly."""
        if not self.alive:
            return
        assert self.reaper is not None
        self.frozen = False
        with suppress(Killed):
            self.seam.run(self.fuse, self._stop)
        self._gone()

    def _stop(self) -> None:
        assert self.reaper is not None
        reaper = self.reaper
        if not reaper.loop.over:
            reaper.stop()
            reaper.loop.iterate()
        reaper.finish()
        self.observe.committed(reaper.arena)
        self.observe.ending(reaper.arena)
        self._stack.close()

    def terminate(self, calls: int) -> None:
        """Send the process a signal to stop. It arrives after `calls` more calls of the process."""
        self.fuse.signal_left = calls

    def _on_signal(self) -> None:
        if self.reaper is not None:
            self._terminated = True
            self.reaper.stop()
            self.wake()
        elif self.rivalled:
            self.rivalled = False
            with suppress(AlreadyRunning):
                self.seam.run(Fuse(), self._start_rival)

    def _start_rival(self) -> None:
        """Start another process with the same name, as from another run directory. The process ends
        at once."""
        host = SimulatedHost(self.machine, self.machine.next_pid())
        with owned(Opening(self.config, self.paths, host=host)) as opening:
            open_arena(opening).close()

    def kill(self) -> None:
        """Kill the process at once, between two of its calls."""
        self._killed()

    def _killed(self) -> None:
        if self.reaper is not None:
            self.observe.ending(self.reaper.arena)
        self._recovers = True
        self._gone()

    def _gone(self) -> None:
        """Record that the process has ended."""
        self._stands_still()
        self.fuse.dead = True
        self.fuse.left = None
        if self.snapshot is not None:
            self.snapshot.kill()
            self.snapshot = None
        self._unwind(Killed, Killed())
        if self.transport is not None:
            self.transport.vanish()
        self.paths.cmd.unlink(missing_ok=True)
        self.reaper = None
        self._asleep = self._committing = self._terminated = False
        self._slept = self._committed = False
        self.observe.ended()

    def _unwind(self, kind: type[BaseException], error: BaseException) -> None:
        """Close all that the process had open, as the kernel does.

        The `finally` blocks of the process have no effect, because each call of a dead process
        raises Killed.
        """
        self.fuse.dead = True

        def unwind() -> None:
            self._stack.__exit__(kind, error, None)

        with suppress(Killed, type(error)):
            self.seam.run(self.fuse, unwind)
        self._stack = ExitStack()
        for file in self.fuse.files:
            _let_go(file)
        for commit in self.fuse.commits:
            _close_commit(commit)
        if self.transport is not None and self.reaper is None:
            self.transport.vanish()

    # ---- freeze --------------------------------------------------------------------------------

    @property
    def sleeps_ns(self) -> int:
        """Time that the loop intends to sleep; 0 if the loop is awake."""
        until_ns = self.reaper.loop.until_ns if self.reaper is not None else None
        if until_ns is None:
            return 0
        return max(0, until_ns + self.machine.boot_begun_ns - self.schedule.now_ns)

    def freeze(self) -> None:
        """Stop the process as SIGSTOP does."""
        if self.alive:
            assert self.transport is not None
            self.frozen = self.transport.frozen = True
            self._stands_still(self.sleeps_ns)
            self.freezes += 1

    def thaw(self, read_in_ns: int = 0) -> None:
        """Let the process continue. After `read_in_ns`, its sockets read the messages that arrived
        during the freeze."""
        if self.alive and self.frozen:
            assert self.transport is not None
            self.frozen = False
            self.transport.thaw(read_in_ns)
            self._runs_again()
            self.transport.network.changed()
            self._iterate_soon()

    def _stands_still(self, from_ns: int = 0) -> None:
        """Begin an outage in `from_ns` nanoseconds. A sleeping loop loses only the time after its
        intended wake-up."""
        if self._out_since_ns is None:
            self._out_since_ns = self.schedule.now_ns + from_ns

    def _runs_again(self) -> None:
        if self._out_since_ns is not None:
            self.outages.append((self._out_since_ns, self.schedule.now_ns))
            self._out_since_ns = None

    # ---- the loop ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the loop, because a descriptor has become readable."""
        if self.alive and self._asleep and not self.frozen:
            self._iterate_soon()

    def _iterate_soon(self, delay_ns: int = WAKE_NS) -> None:
        self._asleep = False
        self._wake_number += 1
        number = self._wake_number
        self.schedule.after(delay_ns, lambda: self._iteration(number))

    def _iteration(self, number: int) -> None:
        if number != self._wake_number or not self.alive or self.frozen:
            return
        try:
            until_ns = self.seam.run(self.fuse, self._iterate)
        except Killed:
            self._killed()
            return
        assert self.reaper is not None
        self.machine.wake_sleepers()
        self._commit_later()
        if self._terminated and not self.reaper.loop.stop_requested:
            raise Violation("a signal to stop was lost")
        if self.reaper.loop.over:
            self.stop()
        elif until_ns is None:
            self._iterate_soon()
        else:
            self._sleep(until_ns)

    def _iterate(self) -> int | None:
        assert self.reaper is not None
        assert self.transport is not None
        if self._wake_number > 1 and self._slept:
            news = self._news()
            ready = self.transport.ready() | news | self._ends() | self._signals()
            by_core = {FD, self.transport.commands.fd}
            by_core |= news if self._takes_commits() else frozenset()
            if ready <= by_core and (ready or self.reaper.core_fires):
                self.transport.rings.committed = bool(news)
                return self._wait()
            self.reaper.loop.woke(ready)
        self._slept = False
        self._latest_ns = self.reaper.loop.iterate()
        return None if self._latest_ns is None else self._wait()

    _slept = False
    _latest_ns: int | None = None
    """Boot time until which the loop may sleep; None = it does not sleep."""

    def _wait(self) -> int | None:
        """Let the loop begin or continue its sleep, in which it fires timers and serves clients.
        Return the boot time until which it sleeps; None = another iteration follows."""
        assert self.reaper is not None
        assert self.transport is not None
        loop = self.reaper.loop
        assert self._latest_ns is not None
        simulated = _SimulatedWaiter(self.transport.rings, self._came)
        waiter: Any = simulated
        ready = frozenset({FD})
        if not loop.over:
            ready = self.reaper.wait(waiter, self._latest_ns)
        self._slept = simulated.until_ns is not None
        if not self._slept:
            loop.woke(ready)
        return simulated.until_ns

    def _signals(self) -> frozenset[int]:
        """Return the descriptor that a signal has made readable."""
        assert self.reaper is not None
        return frozenset({SIGNALS} if self.reaper.loop.stop_requested else ())

    def _ends(self) -> frozenset[int]:
        """Return the descriptor of the processes if one has ended."""
        assert self.processes is not None
        return frozenset({self.processes.fd}) if self.processes.ended(1) else frozenset()

    def _news(self) -> frozenset[int]:
        """Return the descriptor of group commit if it is readable, otherwise an empty set."""
        assert self.reaper is not None
        fds = self.reaper.wal.fds
        news, self._committed = self._committed, False
        return frozenset(fds) if news else frozenset()

    _committed = False

    def _takes_commits(self) -> bool:
        """Return whether the core answers after a commit, without Python."""
        assert self.transport is not None
        return not self.transport.rings.server.struct.callers_pending

    def _sleep(self, until_boot_ns: int) -> None:
        self._asleep = True
        if self._missed_wakeup():
            self._iterate_soon()
            return
        wait_ns = until_boot_ns + self.machine.boot_begun_ns - self.schedule.now_ns
        self._wake_number += 1
        number = self._wake_number
        self.schedule.after(max(0, wait_ns) + WAKE_NS, lambda: self._timed_out(number))

    def _missed_wakeup(self) -> bool:
        """Return whether a message or a commit arrived while the loop ran.

        A loop that takes no commands does not wake up for commands.
        """
        assert self.reaper is not None
        assert self.transport is not None
        commands = self.reaper.takes_commands
        return self._came() or self._committed or self.transport.pending(commands=commands)

    def _came(self) -> bool:
        """Return whether messages wait that the loop takes."""
        assert self.reaper is not None
        assert self.transport is not None
        some = self.transport.rings.rung or self.transport.commands.waiting
        return self.reaper.takes_commands and bool(some)

    def _timed_out(self, number: int) -> None:
        if number == self._wake_number and self._asleep and not self.frozen:
            self._asleep = False
            self._iteration(number)

    # ---- group commit and snapshots ------------------------------------------------------------

    def _commit_later(self) -> None:
        assert self.reaper is not None
        if not self._committing and self.config.wal_dir and self._appended():
            self._committing = True
            fuse = self.fuse
            self.schedule.after(self.commit_ns, lambda: self._commit(fuse))

    def _appended(self) -> bool:
        assert self.reaper is not None
        wal_buffer = self.reaper.arena.wal_buffer
        return int(wal_buffer.tail) != int(wal_buffer.committed) and not self.reaper.wal.errno

    def _commit(self, fuse: Fuse) -> None:
        if fuse is not self.fuse or fuse.dead:
            return
        self._committing = False
        if self.frozen:
            self.schedule.after(self.commit_ns, lambda: self._commit(fuse))
            self._committing = True
            return
        assert self.reaper is not None
        reaper, wal = self.reaper, self.reaper.wal
        assert isinstance(wal, Wal)
        self._watch_table()
        with suppress(Killed):
            self.seam.run(self.fuse, wal.commit_group)
        if self.fuse.dead:
            self._restore_state()
            self._killed()
            return
        self.observe.committed(reaper.arena)
        self._committed = True
        self.wake()
        self._commit_later()

    def _watch_table(self) -> None:
        """Prepare to save the state of the WAL buffer when the process is killed. After the kill
        this state is restored, because a killed process could not have recorded why its WAL
        stopped."""
        self._saved: tuple[int, ...] | None = None
        self.machine.disk.table.killed = partial(self.seam.run, None, self._save_state)

    def _save_state(self) -> None:
        if self._saved is None and self.reaper is not None:
            b = self.reaper.arena.wal_buffer
            self._saved = (int(b.state), int(b.error), int(b.error_lsn), int(b.call))

    def _restore_state(self) -> None:
        if self._saved is not None and self.reaper is not None:
            b = self.reaper.arena.wal_buffer
            b.state, b.error, b.error_lsn, b.call = self._saved

    def _start_snapshot(
        self, arena: str, directory: Path, keep: Keep, *, snapshot: bool
    ) -> SnapshotProcess:
        self.snapshot = SnapshotProcess(self, arena, directory, keep, snapshot=snapshot)
        return self.snapshot

    def dooms_snapshot(self) -> bool:
        """Return whether the snapshot process that begins will be killed. If so, reduce
        `doomed_snapshots` by one."""
        self.doomed_snapshots -= (doomed := self.doomed_snapshots > 0)
        return doomed

    def quicken(self) -> None:
        """Restore the normal speed of commits and snapshots."""
        self.commit_ns, self.snapshot_ns = self._usual_commit_ns, SNAPSHOT_NS

    # ---- the machine ---------------------------------------------------------------------------

    def lose_memory(self) -> None:
        """Remove the arena files, because the machine has lost its memory."""
        for name in (self.paths.arena, self.paths.private):
            for suffix in ("", ".new", ".next"):
                shm.unlink(name + suffix)

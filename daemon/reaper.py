"""The reaper: one thread, one loop, one place that sleeps, bounded work in every iteration.

An iteration fires what is due, hands notices to the socket, and serves the request sockets; what is
left over is done in the next iteration, so no burst, cascade or batch holds up the others for long.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Set

from purgatoryd.daemon import admin
from purgatoryd.daemon.clock import Clock, VirtualClock
from purgatoryd.daemon.commands import Commands
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.grace import Grace
from purgatoryd.daemon.lifecycle import READY, STOPPED, DaemonLifecycle, publishing, reasons
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.transport import Message, Transport
from purgatoryd.daemon.log import log
from purgatoryd.daemon.placement import Placement
from purgatoryd.daemon.processes import Processes
from purgatoryd.daemon.waiting import Waiter
from purgatoryd.daemon.wal import Memory
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import NONE_NS, Arena
from purgatoryd.shm_layout.errors import PurgatorydError
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.layout import ArenaState, Measured, WireError

HEARTBEAT_NS = 1_000_000_000
TAIL_HEARTBEATS_FOR_NS = 30 * HEARTBEAT_NS
"""How long after its last notice a topic gets tail heartbeats."""
SWEEP_PER_HEARTBEAT = 65_536
SWEEP_PER_ITERATION = 1024
"""Watch keys that are looked at for their time to live."""
ADMIN_PER_ITERATION = 4
WINDOWS_PER_ITERATION = 8
MOMENTS_PER_ITERATION = 16
"""Moves of a virtual clock that batches ask for."""
STEPS_PER_ITERATION = 256
SIGNALS_AT_ONCE = 64


class Reaper:
    """Owns the arena and the sockets while it runs."""

    def __init__(
        self,
        arena: Arena,
        transport: Transport,
        access: Access,
        clock: Clock,
        wal: Memory,
        placement: Placement,
        config: Config,
        lifecycle: DaemonLifecycle,
        place_again: Callable[[], bool],
        host: Host,
        processes: Processes,
    ) -> None:
        """`place_again`: gives the arena new files if it has lost a name; True if it did."""
        self.arena = arena
        self.access = access
        self._transport = transport
        self._clock = clock
        self._config = config
        self._host = host
        self.wal = wal
        self._placement = placement
        self._commands = Commands(
            arena, transport, access, wal, config.session_grace_ns, host, processes
        )
        self._lifecycle = lifecycle
        lifecycle.publish_by(self._announce)
        self._place_again = place_again
        self._unplaced = self._nameless = False
        self.stopping = self._draining = False
        self._reload: Callable[[], None] | None = None
        """Reads the settings again, once."""
        self._next_heartbeat_ns = 0
        self._heartbeat_ns = min(
            HEARTBEAT_NS, lifecycle.supervisor.watchdog_ns // 2 or HEARTBEAT_NS
        )
        self._unswept = 0
        self._iterations = self._wakeups = self._sent = 0
        self._ready: Set[int] | None = None
        """Descriptors that the loop woke up for; None = it did not sleep, so ask all."""
        self._target_ns: int | None = None
        self._until_ns: int | None = None
        """Until when the loop may sleep."""
        self._slept_until_ns: int | None = None
        """When the loop was to wake up, if nothing else woke it before."""
        self._grace = Grace(arena, self._commands)
        self._advancing: deque[Message] = deque()

    def begin(self) -> None:
        """Let readers and clients in."""
        self.arena.set_state(ArenaState.READY, self._host.pid)
        self._lifecycle.enter(READY)

    def run(self, waiter: Waiter, wake_fd: int) -> None:
        """Iterate until stopped; then send what has fired and return.

        `waiter` watches `wake_fd`, which becomes readable when a signal comes, and the descriptors
        of transport, WAL and processes.
        """
        while not self.stopping:
            until_ns = self.iterate()
            if until_ns is None:
                continue
            ready = waiter.wait(until_ns)
            if wake_fd in ready:
                os.read(wake_fd, SIGNALS_AT_ONCE)
            self.woke(ready)
        self.finish()

    def finish(self) -> None:
        """After the last iteration: send what has fired, and commit it."""
        self._lifecycle.enter(STOPPED)
        while self._publish():
            pass
        self._lifecycle.supervisor.alive()
        self.wal.commit()
        self._commands.release()

    def close(self) -> None:
        """Stop watching clients."""
        self._commands.clients.close()

    def stop(self) -> None:
        """Ends the loop after the current iteration."""
        self.stopping = True

    def reload(self, read_again: Callable[[], None]) -> None:
        """Have `read_again` read the settings in the next iteration."""
        self._reload = read_again

    def _read_again(self) -> None:
        if (read_again := self._reload) is not None:
            self._reload = None
            read_again()

    def drain(self) -> None:
        """Ends the loop once nothing is armed; nothing is armed from now on."""
        self._draining = True
        self.arena.drain(draining=True)
        self._settle()

    def resume(self) -> None:
        """Gives up to drain."""
        self._draining = False
        self.arena.drain(draining=False)
        self._settle()

    def publish(self, body: bytes, uid: int) -> tuple[WireError, tuple[int, int], bytes]:
        """Publish a notice without a timer, as Arena.publish does."""
        return self.arena.publish(body, uid, self._host.boot_ns())

    def drop(self, session: int) -> bool:
        """End a session; False if the WAL has no space for it."""
        ended = self.arena.end_session(session, self._host.boot_ns())
        if ended:
            self._commands.forget(session)
        return ended

    # ---- one iteration ----

    def iterate(self) -> int | None:
        """Do one iteration. Return the boot time until which the loop may sleep; None: it must
        not."""
        busy = self._work() and not self.wal.full
        self._ready = self._slept_until_ns = None
        self._until_ns = None if busy or self.stopping else self._sleeps_until()
        if self._draining and self.arena.drained:
            self.stopping = True  # never "|=": a signal handler may set it meanwhile
        return None if self.stopping else self._until_ns

    def _work(self) -> bool:
        """True = there is more to do at once."""
        self._iterations += 1
        real_ns = self._host.boot_ns()
        if self._slept_until_ns is not None:
            self.arena.measure(Measured.WAKEUP_LATENESS, real_ns - self._slept_until_ns)
        if not (self._clock.virtual or self.wal.full):
            self._grace.begin_iteration(real_ns)
        left = self._fire(real_ns)
        busy = self._woke_for(self._transport.admin.fd) and self._serve_admin()
        busy |= self._commands.clients.serve(real_ns)
        busy |= self._serve_commands() | self._commands.push()
        self._read_again()
        if self._woke_for(self._transport.notices_fd):
            self._transport.take_subscriptions()
        busy |= self._transport.keep_watch(real_ns, self._ready or frozenset())
        if real_ns >= self._next_heartbeat_ns:
            self._heartbeat(real_ns)
        left |= self._sweep(real_ns)
        self.wal.end_iteration()
        self._commands.release()
        self._look_after_names()
        return left or busy

    def _fire(self, real_ns: int) -> bool:
        """Fires what is due and hands it over. True = some is left."""
        due = self._advance(real_ns)
        unsent = self._publish()
        if not due and not unsent:
            self._arrived()
        return due or unsent

    def _advance(self, real_ns: int) -> bool:
        if isinstance(self._clock, VirtualClock):
            return self._advance_virtual(self._clock, real_ns)
        return self._advance_to(self._clock.now_ns(real_ns), real_ns)

    def _advance_to(self, now_ns: int, real_ns: int) -> bool:
        offset_ns = self._clock.wall_offset_ns(real_ns)
        return self.arena.advance(now_ns, offset_ns, real_ns, self._config.budget)

    def _advance_virtual(self, clock: VirtualClock, real_ns: int) -> bool:
        """From event to event, so that every timer fires at its own tick."""
        target_ns = clock.at_ns if self._target_ns is None else self._target_ns
        for _ in range(STEPS_PER_ITERATION):
            clock.at_ns = max(clock.at_ns, min(self.arena.next_ns, target_ns))
            if self._advance_to(clock.at_ns, real_ns):
                return True
            if clock.at_ns == target_ns and not self._due_by(target_ns):
                return False
        return True

    def _due_by(self, time_ns: int) -> bool:
        return self.arena.next_ns <= time_ns and self.arena.next_ns != NONE_NS

    def _publish(self) -> bool:
        for _ in range(WINDOWS_PER_ITERATION):
            messages, upto = self.arena.notices()
            if not messages:
                return False
            built_boot_ns = self._host.boot_ns()
            self._sent += self._transport.publish(messages)
            self.arena.published(upto, built_boot_ns, self._host.boot_ns())
        return True

    def _heartbeat(self, real_ns: int) -> None:
        self._next_heartbeat_ns = real_ns + self._heartbeat_ns
        self._sent += self._transport.publish(
            self.arena.tail_heartbeats(real_ns - TAIL_HEARTBEATS_FOR_NS)
        )
        self.arena.inbox_again(real_ns)
        self._commands.clients.heartbeat()
        self._unswept = min(SWEEP_PER_HEARTBEAT, self.arena.watermarks_to_sweep)
        self.arena.sweep_bulk_loads(real_ns, self._config.bulk_load_ttl_ns)
        self.arena.heartbeat(real_ns, self._iterations, self._wakeups, self._sent, log.dropped)
        self._placement.look(self.arena)
        self.wal.heartbeat()
        self._unplaced |= self._nameless or not self.arena.has_names
        self._transport.bind_again()
        self._settle()
        self._lifecycle.supervisor.alive()

    def _look_after_names(self) -> None:
        """Replace arena files that have lost a name. At the end of an iteration nothing has a
        pointer into the arena.

        A disk that is busy with a commit delays the new files, not the loop.
        """
        if not self._unplaced or not self.wal.pause():
            return
        moved, why = False, ""
        try:
            moved = self._place_again()
        except (PurgatorydError, OSError) as error:
            why = str(error)
        self.wal.unpause(moved=moved)
        self._unplaced = False
        if moved:
            self._placement.settle(self.arena, self._lifecycle.heartbeat)
            log.warning("the arena files had lost a name: the daemon uses copies of them")
        if bool(why) != self._nameless:
            self._set_nameless(why)

    def _set_nameless(self, why: str) -> None:
        self._nameless = bool(why)
        self.arena.set_nameless(nameless=self._nameless)
        if why:
            log.error(f"the arena files have lost a name; new timers are refused: {why}")
        self._settle()

    def _settle(self) -> None:
        stopped, full, nameless = bool(self.wal.errno), self.wal.full, self._nameless
        why = reasons(
            self.arena, self._lifecycle.why, stopped=stopped, full=full, nameless=nameless
        )
        self._lifecycle.settle(why, draining=self._draining)

    def _announce(self, key: str, payload: bytes) -> None:
        """A notice like any other, so who comes later finds it. Where it has no space, or the
        WAL has stopped, the arena's header tells all the same."""
        request = publishing(key, payload)
        self.publish(request[wire.FRAME.size :], self._host.uid)
        self._publish()

    def _sweep(self, real_ns: int) -> bool:
        """A part of the heartbeat's watch keys. True = there are more."""
        if self._unswept == 0:
            return False
        part = min(self._unswept, SWEEP_PER_ITERATION)
        self.arena.sweep(real_ns, part)
        self._unswept -= part
        return self._unswept > 0

    # ---- the sockets --

    def _serve_commands(self) -> bool:
        """Batches for later virtual times follow one another within an iteration."""
        for _ in range(MOMENTS_PER_ITERATION):
            if self._target_ns is not None:
                return True
            busy = self._commands.serve()
            self._target_ns = self._commands.waits_for_ns
            if self._target_ns is None:
                return busy
            self._fire(self._host.boot_ns())
        return True

    def _serve_admin(self) -> bool:
        """True = another iteration follows at once: some may be left, what was published goes
        out."""
        for served in range(ADMIN_PER_ITERATION):
            message = self._transport.admin.receive()
            if message is None:
                return served > 0
            self._read_again()  # who asked for it before it asked this may rely on it
            answer = admin.handle(self, message)
            if answer is not None:
                self._transport.admin.send(message.route, answer)
        return True

    # ---- a virtual clock ----

    def advance_to(self, target_ns: int, message: Message) -> bool:
        """Begins to move a virtual clock; the answer goes out on arrival."""
        if not self._clock.virtual or target_ns < self.arena.header.now_ns:
            return False
        self._advancing.append(message)
        self._target_ns = max(target_ns, self._target_ns or 0)
        return True

    def _arrived(self) -> None:
        """All that is due by the target has fired and was handed to the socket."""
        if self._target_ns is None:
            return
        self._target_ns = None
        self._commands.arrived()
        for message in self._advancing:
            answer = admin.advanced(self.arena, message)
            self._transport.admin.send(message.route, answer)
        self._advancing.clear()

    # ---- sleep ----

    def _woke_for(self, fd: int) -> bool:
        """False: a socket had nothing before the loop slept, and nothing came since."""
        return self._ready is None or fd in self._ready

    def _sleeps_until(self) -> int | None:
        """Until when there is nothing to do; None = there is something."""
        if self._transport.pending(commands=not self._commands.full):
            return None
        full = self.wal.full
        until_ns = min(self._next_heartbeat_ns, self._transport.watch_due_ns)
        if not full:  # else no timer can end before the WAL has space
            due_ns = self._due_ns() - self._placement.plan.spin_ns
            until_ns = min(until_ns, due_ns, self._grace.ends_ns)
            self._grace.sleep(until_ns)
        return until_ns if until_ns > self._host.boot_ns() else None

    def woke(self, ready: frozenset[int]) -> None:
        """Note the end of a sleep: `ready` has the descriptors that ended it, none if its time
        was over."""
        self._ready = ready
        self._wakeups += 1
        self._slept_until_ns = None if ready else self._until_ns
        if not ready.isdisjoint(self.wal.fds):
            self.wal.clear_wakeup()

    def _due_ns(self) -> int:
        """When the wheel has something to do, on the boot clock."""
        if not self._clock.virtual:
            return self.arena.next_ns
        return 0 if self._due_by(int(self.arena.header.now_ns)) else NONE_NS

"""The reaper: the work of a daemon's loop.

An iteration fires due timers, hands notices to the socket, and serves the request sockets. The
constants limit each kind of work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from purgatoryd.daemon import admin
from purgatoryd.daemon.clock import Clock, VirtualClock
from purgatoryd.daemon.commands import Commands
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.grace import Grace
from purgatoryd.daemon.lifecycle import READY, STOPPED, DaemonLifecycle, publishing, reasons
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.transport import Request, Transport
from purgatoryd.daemon.log import log
from purgatoryd.daemon.loop import HEARTBEAT_NS, Loop
from purgatoryd.daemon.placement import Placement
from purgatoryd.daemon.processes import Processes
from purgatoryd.daemon.ring_loop import RingLoop
from purgatoryd.daemon.schedules import Schedules
from purgatoryd.daemon.waiting import Waiter
from purgatoryd.daemon.wal import NullWal
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import NONE_NS, Arena
from purgatoryd.shm_layout.errors import PurgatorydError
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.layout import ArenaState, Degraded, Measured, WireError

TAIL_HEARTBEATS_FOR_NS = 30 * HEARTBEAT_NS
"""Time after a topic's last notice during which tail heartbeats are sent for the topic."""
SWEEP_PER_HEARTBEAT = 65_536
SWEEP_PER_ITERATION = 1024
"""Number of watch keys whose time to live is checked per heartbeat and per iteration."""
ADMIN_PER_ITERATION = 4
WINDOWS_PER_ITERATION = 8
MOMENTS_PER_ITERATION = 16
"""Maximum number of times that batches may move a virtual clock in one iteration."""
STEPS_PER_ITERATION = 256


class Reaper:
    """The work of a daemon: a participant of `Loop` that owns the arena and the sockets."""

    def __init__(
        self,
        arena: Arena,
        transport: Transport,
        access: Access,
        clock: Clock,
        wal: NullWal,
        placement: Placement,
        config: Config,
        lifecycle: DaemonLifecycle,
        place_again: Callable[[], bool],
        host: Host,
        processes: Processes,
    ) -> None:
        """`place_again` copies the arena into new files if an arena file has lost its name, and
        returns whether it made a copy."""
        self.arena = arena
        self.access = access
        self._transport = transport
        self._clock = clock
        self._config = config
        self._host = host
        self.wal = wal
        self._placement = placement
        self._schedules = Schedules(arena)
        self._commands = Commands(
            arena, transport, access, wal, config.session_grace_ns, host, processes,
            self._schedules,
        )  # fmt: skip
        self._processes_fd = processes.fd
        self._lifecycle = lifecycle
        lifecycle.publish_by(self._announce)
        self._place_again = place_again
        self._unplaced = self._nameless = False
        self.loop = Loop(self, transport, lifecycle, host)
        self._draining = False
        self._reload: Callable[[], None] = lambda: None
        self._unswept = self._sent = 0
        self._sweeps = int(arena.metrics.sweeps)
        self._jobs_dropped = int(arena.metrics.jobs_dropped)
        self._dropped_before = self._dropped_by_group()
        self._target_ns: int | None = None
        self._grace = Grace(arena, self._commands)
        self._advancing: deque[Request] = deque()
        self._ring_loop = RingLoop(
            arena, transport.ring_server, self._commands, self._grace, config.budget
        )

    def _log_sweeps(self) -> None:
        """Log the sweeps that began since the last heartbeat, with their uids."""
        count = int(self.arena.metrics.sweeps)
        for sweep in self.arena.newest_sweeps(count - self._sweeps):
            log.info(
                "a sweep over timers began", sweep=sweep.id.hex(), uid=sweep.uid,
                change=sweep.change.name.lower(), namespace=sweep.namespace,
            )  # fmt: skip
        self._sweeps = count

    def _dropped_by_group(self) -> dict[tuple[str, str, int], int]:
        """Return how many jobs each consumer group has dropped, by namespace, name and
        incarnation."""
        groups = self.arena.consumer_groups()
        return {(g.namespace, g.name, g.incarnation): g.dropped for g in groups}

    def _log_drops(self) -> None:
        """Log the consumer groups that dropped jobs since the last heartbeat."""
        count = int(self.arena.metrics.jobs_dropped)
        if count == self._jobs_dropped:
            return
        before, self._dropped_before = self._dropped_before, self._dropped_by_group()
        for group, dropped in self._dropped_before.items():
            if jobs := dropped - before.get(group, 0):
                log.warning(
                    "a consumer group dropped unfinished jobs", namespace=group[0],
                    group=group[1], jobs=jobs,
                )  # fmt: skip
        self._jobs_dropped = count

    def begin(self) -> None:
        """Enter state READY: readers may attach and clients connect."""
        self._schedules.begin()
        self.arena.set_state(ArenaState.READY, self._host.pid)
        self._lifecycle.enter(READY)

    def finish(self) -> None:
        """Send all fired notices and commit the WAL, after the last iteration."""
        self._lifecycle.enter(STOPPED)
        while self._publish():
            pass
        self._lifecycle.service_manager.alive()
        self.wal.commit()
        self._commands.release()

    def close(self) -> None:
        """Stop watching clients."""
        self._commands.clients.close()

    def stop(self) -> None:
        """End the loop after the current iteration."""
        self.loop.stop()

    def reload_by(self, reload: Callable[[], None]) -> None:
        """Set the function that reads the settings again when a reload is requested."""
        self._reload = reload

    def replay_by(self, start: Callable[[], None]) -> None:
        """Set the function that starts the process for past notices."""
        self._commands.start_replay = start

    def reload(self) -> bool:
        """Read the settings again."""
        self._reload()
        return True

    def drain(self) -> None:
        """Refuse new timers, and end the loop once nothing is armed."""
        self._draining = True
        self.arena.drain(draining=True)
        self._settle()

    def resume(self) -> None:
        """End a drain: accept timers again."""
        self._draining = False
        self.arena.drain(draining=False)
        self._settle()

    def publish(self, body: bytes, uid: int) -> tuple[WireError, tuple[int, int], bytes]:
        """Publish a notice without a timer, as Arena.publish does."""
        return self.arena.publish(body, uid, self._host.boot_ns())

    def drop(self, session: int) -> bool:
        """End a session; False if the WAL has no space to record this."""
        ended = self.arena.end_session(session, self._host.boot_ns())
        if ended:
            self._commands.forget(session)
        return ended

    # ---- one iteration ----

    def serve(self, now_ns: int) -> bool:
        """Fire due timers, then serve the request sockets. True = the next iteration has to begin
        at once."""
        loop = self.loop
        if loop.slept_until_ns is not None:
            self.arena.measure(Measured.WAKEUP_LATENESS, now_ns - loop.slept_until_ns)
        if loop.ready and not loop.ready.isdisjoint(self.wal.fds):
            self.wal.clear_wakeup()
            self._commands.release()
        if not (self._clock.virtual or self.wal.full):
            self._grace.begin_iteration(now_ns)
        left = self._fire(now_ns)
        busy = loop.woke_for(self._transport.admin.fd) and self._serve_admin()
        busy |= self._commands.clients.serve(now_ns, look=loop.woke_for(self._processes_fd))
        busy |= self._serve_commands()
        self.wal.end_work(self._commands.pending)
        busy |= self._commands.push()
        return left or busy

    def end_iteration(self, now_ns: int, *, busy: bool) -> bool:
        """Sweep watch keys, wake the group commit, and send answers whose records are on disk.

        While the WAL is full, the remaining work waits until group commit wakes the loop.
        """
        busy |= self._sweep(now_ns)
        self._commands.release()
        self.wal.end_work(self._commands.pending)
        self._look_after_names()
        return busy and not self.wal.full

    def done(self) -> bool:
        """True if the daemon is to stop, or if it is draining and nothing is armed."""
        # `drained` is read first, because a signal handler may request the end between the reads
        return (self._draining and self.arena.drained) or self.loop.stop_requested

    def _fire(self, real_ns: int) -> bool:
        """Fire due timers and hand their notices to the socket. True = timers or notices are
        left."""
        due = self._advance(real_ns)
        unsent = self._publish()
        if not due and not unsent:
            self._arrived()
        return due or unsent

    def _advance(self, real_ns: int) -> bool:
        if isinstance(self._clock, VirtualClock):
            return self._advance_virtual(self._clock, real_ns)
        due = self._advance_to(self._clock.now_ns(real_ns), real_ns)
        return self._schedules.serve() or due

    def _advance_to(self, now_ns: int, real_ns: int) -> bool:
        offset_ns = self._clock.wall_offset_ns(real_ns)
        return self.arena.advance(now_ns, offset_ns, real_ns, self._config.budget)

    def _advance_virtual(self, clock: VirtualClock, real_ns: int) -> bool:
        """Move the virtual clock in steps, from one due time of the wheel to the next, so that
        every timer fires at its own tick. True = the clock has not arrived, or work is left."""
        target_ns = clock.at_ns if self._target_ns is None else self._target_ns
        for _ in range(STEPS_PER_ITERATION):
            clock.at_ns = max(clock.at_ns, min(self.arena.next_ns, target_ns))
            if self._advance_to(clock.at_ns, real_ns) or self._schedules.serve():
                return True
            if clock.at_ns == target_ns and not self._due_by(target_ns):
                return False
        return True

    def _due_by(self, time_ns: int) -> bool:
        return self.arena.next_ns <= time_ns and self.arena.next_ns != NONE_NS

    def _publish(self) -> bool:
        """Show fired timers to readers of the arena, and send their notices if a socket has
        subscribed to any. True = notices are left."""
        self.arena.show()
        if not self._transport.subscribed:
            self.arena.send_none(self._host.boot_ns())
            return False
        for _ in range(WINDOWS_PER_ITERATION):
            messages, upto = self.arena.notices()
            if not messages:
                return False
            built_boot_ns = self._host.boot_ns()
            self._sent += self._transport.publish(messages)
            self.arena.published(upto, built_boot_ns, self._host.boot_ns())
        return True

    def heartbeat(self, now_ns: int) -> None:
        """Send tail heartbeats, repeat unacknowledged outcomes, begin a sweep, and report the state
        of the daemon."""
        self._sent += self._transport.publish(
            self.arena.tail_heartbeats(now_ns - TAIL_HEARTBEATS_FOR_NS)
        )
        self.arena.inbox_again(now_ns)
        self._commands.clients.heartbeat()
        self._unswept = min(SWEEP_PER_HEARTBEAT, self.arena.watermarks_to_sweep)
        self._schedules.heartbeat(now_ns)
        self.arena.sweep_bulk_loads(now_ns, self._config.bulk_load_ttl_ns)
        self._log_sweeps()
        self._log_drops()
        loop = self.loop
        self.arena.heartbeat(now_ns, loop.iterations, loop.wakeups, self._sent, log.dropped)
        self._placement.look(self.arena)
        self.wal.heartbeat()
        self._unplaced |= self._nameless or not self.arena.has_names
        self._settle()

    def _look_after_names(self) -> None:
        """Replace arena files that have lost a name. This is done at the end of an iteration, when
        no code has a pointer into the arena.

        The replacement is postponed while the disk is busy with a commit, so that the loop does not
        wait.
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
            log.warning("arena files had lost a name; the daemon continues with copies of them")
        if bool(why) != self._nameless:
            self._set_nameless(why)

    def _set_nameless(self, why: str) -> None:
        self._nameless = bool(why)
        self.arena.set_nameless(nameless=self._nameless)
        if why:
            log.error(f"arena files have lost a name; new timers are refused: {why}")
        self._settle()

    def _settle(self) -> None:
        stopped, full, nameless = bool(self.wal.errno), self.wal.full, self._nameless
        why = reasons(
            self.arena, self._lifecycle.why, stopped=stopped, full=full, nameless=nameless,
            fragmented=self.arena.fragmented,
        )  # fmt: skip
        if self._draining and self.arena.paused_due:
            why |= Degraded.PAUSED
        self._lifecycle.settle(why, draining=self._draining)

    def _announce(self, key: str, payload: bytes) -> None:
        """Publish a lifecycle event as a notice, which later subscribers find in the replay buffer.
        If there is no space, or the WAL has stopped, only the arena header shows the new state."""
        request = publishing(key, payload)
        self.publish(request[wire.FRAME.size :], self._host.uid)
        self._publish()

    def _sweep(self, real_ns: int) -> bool:
        """Sweep some of the watch keys that are left to sweep in this heartbeat period. True = more
        are left."""
        if self._unswept == 0:
            return False
        part = min(self._unswept, SWEEP_PER_ITERATION)
        self.arena.sweep(real_ns, part)
        self._unswept -= part
        return self._unswept > 0

    # ---- the sockets --

    def _serve_commands(self) -> bool:
        """Serve client messages. Under a virtual clock a batch may request a later time: all timers
        due by that time fire before the next batch is applied. True = the next iteration has to
        begin at once."""
        for _ in range(MOMENTS_PER_ITERATION):
            if self._target_ns is not None:
                return True
            busy = self._commands.serve(self.loop.ready)
            self._target_ns = self._commands.waits_for_ns
            if self._target_ns is None:
                return busy
            self._fire(self._host.boot_ns())
        return True

    def _serve_admin(self) -> bool:
        """Serve admin requests. True = a request was served: further requests may wait, and a
        published notice may have to be sent."""
        for served in range(ADMIN_PER_ITERATION):
            message = self._transport.admin.receive()
            if message is None:
                return served > 0
            self.loop.reload_if_requested()
            answer = admin.handle(self, message)
            if answer is not None:
                self._transport.admin.send(message.route, answer)
        return True

    # ---- a virtual clock ----

    def advance_to(self, target_ns: int, message: Request) -> bool:
        """Begin to move a virtual clock; the request is answered once the clock has arrived. False
        if the clock is real or would go back."""
        if not self._clock.virtual or target_ns < self.arena.header.now_ns:
            return False
        self._advancing.append(message)
        self._target_ns = max(target_ns, self._target_ns or 0)
        return True

    def _arrived(self) -> None:
        """End the move of a virtual clock: the notices of all timers due by the new time have been
        sent."""
        if self._target_ns is None:
            return
        self._target_ns = None
        self._commands.arrived()
        for message in self._advancing:
            answer = admin.advanced(self.arena, message)
            self._transport.admin.send(message.route, answer)
        self._advancing.clear()

    # ---- sleep ----

    def wait(self, waiter: Waiter, until_ns: int) -> frozenset[int]:
        """Sleep until `until_ns`, or until a descriptor is ready. Meanwhile the core fires timers
        and serves clients, if they need nothing else from an iteration."""
        if not self._core_iterates:
            if not self.takes_commands or self._transport.ring_server.may_sleep():
                return waiter.wait(until_ns)
            self._grace.sleep(self._host.boot_ns())
            return waiter.poll()
        spin_ns = self._placement.plan.spin_ns
        ready = self._ring_loop.wait(waiter, until_ns, spin_ns, fires=self.core_fires)
        done = self._ring_loop.struct
        self.loop.iterated(done.iterations, done.wakeups, done.planned_boot_ns)
        return ready

    @property
    def _core_iterates(self) -> bool:
        """True while the core may do iterations that need no Python."""
        return self.takes_commands and not (self._clock.virtual or self.wal.full or self._draining)

    @property
    def core_fires(self) -> bool:
        """True while these iterations fire timers: there is no WAL, and no notice has to be
        sent."""
        return self._core_iterates and not (self.wal.fds or self._transport.subscribed)

    @property
    def takes_commands(self) -> bool:
        """False while too many answers wait for the disk."""
        return not self._commands.full

    def sleeps_until(self, latest_ns: int) -> int:
        """Return the boot time at which the wheel or a grace period needs an iteration in Python,
        at most `latest_ns`.

        No timer can fire while the WAL is full; the result is then `latest_ns`.
        """
        if self.wal.full:
            return latest_ns
        until_ns = min(latest_ns, self._grace.ends_ns, self.wal.commit_at_ns)
        if not self.core_fires:
            until_ns = min(until_ns, self._due_ns() - self._placement.plan.spin_ns)
        self._grace.sleep(until_ns)
        return until_ns

    def _due_ns(self) -> int:
        """Return the boot time at which the wheel has work."""
        if not self._clock.virtual:
            return self.arena.next_ns
        return 0 if self._due_by(int(self.arena.header.now_ns)) else NONE_NS

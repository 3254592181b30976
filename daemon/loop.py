"""The loop of a daemon and of a deployment: one thread, one place that sleeps.

An iteration does a bounded part of its participant's work, then reloads settings, looks after the
sockets and sends heartbeats. The remaining work is done in the next iteration, so no burst, cascade
or batch delays other work for long. If nothing is left, the loop sleeps until the next deadline, a
ready descriptor or a signal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any, Protocol

from purgatoryd.daemon.lifecycle import Lifecycle
from purgatoryd.daemon.listeners.transport import Transport
from purgatoryd.daemon.waiting import Waiter
from purgatoryd.shm_layout.host import Host

HEARTBEAT_NS = 1_000_000_000
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
IGNORED_SIGNALS = (signal.SIGPIPE, signal.SIGTTOU)
"""Signals that writing the log to a closed pipe or a terminal may raise."""
_SIGNALS_AT_ONCE = 64


class Participant(Protocol):
    """The work of a loop. No method blocks; `now_ns` is CLOCK_BOOTTIME."""

    @property
    def takes_commands(self) -> bool:
        """False while messages have to wait in the command socket."""

    def serve(self, now_ns: int) -> bool:
        """Do a bounded part of the work. True = the next iteration has to begin at once."""

    def reload(self) -> bool:
        """Read the settings again. False = not possible yet; the loop tries again."""

    def heartbeat(self, now_ns: int) -> None:
        """Do the work that is due once per heartbeat period."""

    def end_iteration(self, now_ns: int, *, busy: bool) -> bool:
        """Finish an iteration. `busy`: work is left. True = the next iteration has to begin at
        once."""

    def sleeps_until(self, latest_ns: int) -> int:
        """Return the CLOCK_BOOTTIME until which the loop may sleep, at most `latest_ns`."""

    def wait(self, waiter: Waiter, until_ns: int) -> frozenset[int]:
        """Sleep until `until_ns`, or until a descriptor is ready. Return the descriptors that are
        ready; none if the time has come."""

    def done(self) -> bool:
        """True once the loop is to end."""


class Loop:
    """Runs a participant. A caller may also do the iterations and sleeps itself, without `run`."""

    def __init__(
        self,
        participant: Participant,
        transport: Transport,
        lifecycle: Lifecycle[Any],
        host: Host,
    ) -> None:
        self._participant = participant
        self._transport = transport
        self._lifecycle = lifecycle
        self._host = host
        watchdog_ns = lifecycle.service_manager.watchdog_ns
        self._heartbeat_ns = min(HEARTBEAT_NS, watchdog_ns // 2 or HEARTBEAT_NS)
        self._next_heartbeat_ns = 0
        self.stop_requested = self._reload_requested = False
        """True once a signal handler has requested a stop, or a reload."""
        self.over = False
        """True after the last iteration."""
        self.iterations = self.wakeups = 0
        self.until_ns: int | None = None
        """Boot time until which the loop may sleep; None = the next iteration begins at once."""
        self.ready: Set[int] | None = None
        """Descriptors that ended the sleep before this iteration; None = there was no sleep."""
        self.slept_until_ns: int | None = None
        """Boot time until which the last sleep was planned; None if a descriptor ended it, or if
        there was no sleep."""

    # ---- requests of signals -------------------------------------------------------------------

    def stop(self) -> None:
        """Request the end of the loop."""
        self.stop_requested = True

    def request_reload(self) -> None:
        """Request that the participant reads its settings again."""
        self._reload_requested = True

    def reload_if_requested(self) -> None:
        """Reload at once if a reload was requested. Participants call this before they handle a
        request whose sender may rely on the reload."""
        if self._reload_requested:
            self._reload_requested = False
            if not self._participant.reload():
                self._reload_requested = True

    def handle_signals(self) -> None:
        """Let SIGTERM and SIGINT request the end, and SIGHUP a reload."""
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: self.stop())
        signal.signal(signal.SIGHUP, lambda *_: self.request_reload())

    # ---- an iteration --------------------------------------------------------------------------

    def run(self, waiter: Waiter, wake_fd: int) -> None:
        """Iterate until the participant is done. `waiter` watches `wake_fd`, see `signals`, and the
        descriptors of transport and participant."""
        while not self.over:
            until_ns = self.iterate()
            if until_ns is None:
                continue
            ready = self._participant.wait(waiter, until_ns)
            if wake_fd in ready:
                os.read(wake_fd, _SIGNALS_AT_ONCE)
            self.woke(ready)

    def iterate(self) -> int | None:
        """Do one iteration. Return the boot time until which the loop may sleep; None = do not
        sleep."""
        now_ns = self._host.boot_ns()
        self.iterations += 1
        busy = self._participant.serve(now_ns)
        self.reload_if_requested()
        if self.woke_for(self._transport.notices_fd):
            self._transport.take_subscriptions()
        busy |= self._transport.keep_watch(now_ns, self.ready or frozenset())
        if now_ns >= self._next_heartbeat_ns:
            self._heartbeat(now_ns)
        busy = self._participant.end_iteration(now_ns, busy=busy)
        self.ready = self.slept_until_ns = None
        self.until_ns = None if busy else self._sleeps_until()
        self.over = self._participant.done()
        return None if self.over else self.until_ns

    def _heartbeat(self, now_ns: int) -> None:
        self._next_heartbeat_ns = now_ns + self._heartbeat_ns
        self._transport.bind_again()
        self._participant.heartbeat(now_ns)
        self._lifecycle.heartbeat()

    def _sleeps_until(self) -> int | None:
        if self._transport.pending(commands=self._participant.takes_commands):
            return None
        latest_ns = min(self._next_heartbeat_ns, self._transport.watch_due_ns)
        until_ns = self._participant.sleeps_until(latest_ns)
        return until_ns if until_ns > self._host.boot_ns() else None

    # ---- after a sleep -------------------------------------------------------------------------

    def woke(self, ready: Set[int]) -> None:
        """Note the end of a sleep. `ready`: the descriptors that ended it; empty if the planned
        time has come."""
        self.ready = ready
        self.wakeups += 1
        self.slept_until_ns = None if ready else self.until_ns

    def iterated(self, iterations: int, wakeups: int, until_ns: int) -> None:
        """Note iterations that were done within a sleep, which was then planned until
        `until_ns`."""
        self.iterations += iterations
        self.wakeups += wakeups
        self.until_ns = until_ns

    def woke_for(self, fd: int) -> bool:
        """False = the socket of `fd` is empty, because it was empty before the sleep and `fd` did
        not end the sleep."""
        return self.ready is None or fd in self.ready


@contextmanager
def signals() -> Iterator[int]:
    """Yield a descriptor that becomes readable when a signal arrives, so that it ends the sleep.

    The process exits after this context. Later signals are ignored: otherwise a signal that arrives
    after Python has removed its handlers would kill a process that has ended cleanly.
    """
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield read_fd
    finally:
        for number in (*STOP_SIGNALS, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(before)
        os.close(read_fd)
        os.close(write_fd)

"""The process of one shard, and its lifecycle. The process runs an ordinary daemon."""

from __future__ import annotations

import enum
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

import zmq

from purgatoryd.daemon.lifecycle import in_words
from purgatoryd.daemon.log import log
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import HeaderView
from purgatoryd.shm_layout.errors import (
    ArenaError,
    PermissionDenied,
    ProtocolError,
    StartError,
    TableBroken,
)
from purgatoryd.shm_layout.health import STEP_NS
from purgatoryd.shm_layout.layout import Message
from purgatoryd.shm_layout.paths import Paths
from purgatoryd.shm_layout.status_file import Cause, StatusFile, Trouble

PAUSE_NS, PAUSE_MAX_NS = 100_000_000, 10_000_000_000
"""Pause before a shard is restarted. It doubles with every failure, up to the maximum."""
STEADY_NS = 60_000_000_000
"""Time in state READY after which earlier failures of a shard are forgotten."""
ENDS_MAX = 8
"""Failures in a row after which a shard is crash-looping. A crash-looping shard is not restarted
until SIGHUP."""
UNANSWERED_PINGS_MAX = 10
"""Heartbeat periods without a reply to a ping after which a shard is killed. Periods are counted
instead of time, because no process can reply while the machine sleeps."""
SLOW_PINGS = 2
"""Heartbeat periods without a reply to a ping after which a shard counts as not serving."""
STALLED_HEARTBEATS_MAX = STEP_NS // 1_000_000_000
"""Heartbeat periods without progress after which a starting shard is killed."""
_SAID_MAX = 65_536
_OF_THE_MANAGER = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class State(enum.StrEnum):
    """The state of a shard."""

    DOWN = "down"
    """There is no process; it will be restarted."""
    STARTING = "starting"
    READY = "ready"
    CRASH_LOOPING = "crash-looping"
    ENDED = "ended"
    """The process has ended as requested."""


MOVES: Mapping[State, frozenset[State]] = {
    State.DOWN: frozenset({State.STARTING, State.ENDED}),
    State.STARTING: frozenset({State.READY, State.DOWN, State.CRASH_LOOPING, State.ENDED}),
    State.READY: frozenset({State.DOWN, State.CRASH_LOOPING, State.ENDED}),
    State.CRASH_LOOPING: frozenset({State.DOWN, State.ENDED}),
    State.ENDED: frozenset({State.DOWN}),
}
"""The states that may follow each state."""


class Shard:
    """The process of one shard, from the supervisor's side. Times are CLOCK_BOOTTIME."""

    def __init__(
        self,
        number: int,
        paths: Paths,
        command: Sequence[str],
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self.number = number
        self.name = paths.name
        self.state = State.DOWN
        self.code = 0
        """Exit code of the last process."""
        self.restart_at_ns = 0
        """Boot time of the next restart attempt; meaningful only in state DOWN."""
        self.unanswered_pings = 0
        """Heartbeat periods since a ping was sent without a reply."""
        self.stalled_heartbeats = 0
        """Heartbeat periods since startup last made progress."""
        self._progress_boot_ns = 0
        """Time of the last progress that the shard has recorded: in the status file while it
        starts, in the arena header once its loop runs; 0 = none yet."""
        self.starts = 0
        """Number of processes started."""
        self._degraded_reason = ""
        """Reason from the arena header at the last heartbeat; empty if healthy."""
        self._paths = paths
        self._command = command
        self._context = context
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = -1
        self._admin: zmq.Socket[bytes] | None = None
        self._said = b""
        self._ends = 0
        self._ready_ns = 0
        self._arena: HeaderView | None = None
        self._reload = 0
        """Sequence number of the newest reload request."""
        self._reloaded = 0
        """Sequence number of the newest reload request that the shard has completed."""
        self._reload_missed = False
        """True if the shard may have started before the reload request reached it."""

    def enter(self, state: State) -> None:
        """Move to `state`. Raises AssertionError if `MOVES` does not allow it."""
        if state not in MOVES[self.state]:
            raise AssertionError(f"no move from {self.state} to {state}")
        self.state = state

    @property
    def pid(self) -> int:
        """Process id; 0 = there is no process."""
        return self._process.pid if self._process else 0

    @property
    def serves(self) -> bool:
        """True while the shard is ready and answers pings."""
        return self.state is State.READY and self.unanswered_pings <= SLOW_PINGS

    @property
    def hangs(self) -> str:
        """Reason to kill the process, as text; empty = no reason."""
        if self.unanswered_pings >= UNANSWERED_PINGS_MAX:
            return "does not answer"
        return (
            "makes no progress during its start"
            if self.stalled_heartbeats >= STALLED_HEARTBEATS_MAX
            else ""
        )

    @property
    def moves(self) -> bool:
        """True if the last heartbeat found progress in the start, the loop or the end of the
        process."""
        return self._process is not None and not (self.unanswered_pings or self.stalled_heartbeats)

    @property
    def trouble(self) -> Trouble | None:
        """The reason why the shard does not serve; None = it serves, or it has ended as
        requested."""
        if self.state is State.CRASH_LOOPING:
            text = f"{self.name} is crash-looping: {ENDS_MAX} failures in a row; not restarted"
            return Trouble(Cause.CRASH_LOOPING, text)
        if self.state in (State.DOWN, State.STARTING):
            return Trouble(Cause.RESTARTING, f"{self.name} has ended and is being restarted")
        if self.unanswered_pings > SLOW_PINGS:
            return Trouble(Cause.SILENT, f"{self.name} does not answer")
        reason = self._degraded_reason
        return Trouble(Cause.DEGRADED, f"{self.name}: {reason}") if reason else None

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when the process has written to stdout, replied to a
        request, or ended."""
        if self._process is None:
            return []
        news = self._said_fd if self._admin is None else int(self._admin.get(zmq.FD))
        return [self._watch, news]

    def start(self) -> None:
        """Start the process. Raises OSError; no process exists then."""
        self.enter(State.STARTING)
        self.starts += 1
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_MANAGER}
        process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment
        )
        try:
            self._watch = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.communicate()
            raise
        self._process = process
        os.set_blocking(self._said_fd, False)
        self._said = b""

    @property
    def _said_fd(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Request the process to end once it has handled all earlier requests."""
        if self._admin is None:
            self.signal(signal.SIGTERM)
        else:
            self.send(wire.encode_frame(Message.STOP))

    def send(self, request: bytes) -> None:
        """Send a request to the admin socket of a ready shard, without waiting for the reply."""
        if self._admin is not None:
            with suppress(zmq.Again):
                self._admin.send(request, zmq.NOBLOCK)

    def heartbeat(self) -> None:
        """Check the shard's progress. A ready shard receives a ping only if its arena header shows
        no progress, because a ping wakes both processes."""
        if self.state is State.STARTING:
            self.stalled_heartbeats = (
                0 if self._moved(self._written_boot_ns()) else self.stalled_heartbeats + 1
            )
        elif self._admin is not None:
            if self._arena is None or self._arena.retired:
                self._attach()
            self._degraded_reason = in_words(self._arena.why) if self._arena else ""
            self._look_at_loop()

    def _attach(self) -> None:
        """Attach to the shard's arena. If that fails, only pings show whether the shard's loop
        runs."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        with suppress(ArenaError, PermissionDenied, StartError, OSError):
            self._arena = HeaderView(self._paths.arena)

    def _look_at_loop(self) -> None:
        if self._moved(self._arena.heartbeat_boot_ns if self._arena else 0):
            self.unanswered_pings = 0
            return
        if not self.unanswered_pings:
            self._ping()
        self.unanswered_pings += 1

    def _written_boot_ns(self) -> int:
        """Return when the start last made progress, from the status file; 0 = no file yet."""
        with suppress(OSError, TableBroken, PermissionDenied):
            return int(StatusFile(self._paths.directory, self.name).header.heartbeat_boot_ns)
        return 0

    def _moved(self, at_boot_ns: int) -> bool:
        """Return whether there was progress since the previous heartbeat."""
        before, self._progress_boot_ns = self._progress_boot_ns, at_boot_ns
        return at_boot_ns != before

    def _ping(self) -> None:
        self.send(wire.encode_frame(Message.PING, sequence=self._reload))

    def reload(self) -> None:
        """Request the shard to read its settings again. A shard that is still starting receives the
        request once it is ready."""
        self._reload_missed = self.state is State.STARTING
        if self.state is State.READY:
            self._reload += 1
            self.signal(signal.SIGHUP)
            self._ping()  # the shard replies after the reload

    @property
    def reloads(self) -> bool:
        """True until a requested reload is complete; False if the shard hangs or is not ready."""
        waits = self.state is State.READY and not self.hangs
        return waits and self._reloaded < self._reload

    # ---- events of the process -----------------------------------------------------------------

    def said_ready(self, now_ns: int) -> bool:
        """Return True once, when the process reports that clients can reach it."""
        if self.state is not State.STARTING or not self._reads_ready():
            return False
        try:
            self._admin = self._context.socket(zmq.DEALER)
        except zmq.ZMQError:  # no descriptor is free: the next iteration tries again
            return False
        self.enter(State.READY)
        self._ready_ns = now_ns
        self.stalled_heartbeats = 0
        self._admin.set(zmq.LINGER, 0)
        self._admin.set(zmq.SNDHWM, 0)
        self._admin.connect(self._paths.admin_endpoint)
        self._attach()
        if self._reload_missed:
            self.reload()
        return True

    def _reads_ready(self) -> bool:
        with suppress(BlockingIOError):
            self._said += os.read(self._said_fd, _SAID_MAX)
        return self._said.startswith(b"ready") and self._said.endswith(b"\n")

    def receive(self) -> None:
        """Receive all replies that have arrived."""
        while self._admin is not None:
            try:
                reply = wire.decode_reply(self._admin.recv(zmq.NOBLOCK))
            except (zmq.Again, ProtocolError):
                return
            self.unanswered_pings = 0
            if reply.message == Message.PING:
                self._reloaded = reply.sequence
            if reply.error:
                log.error(f"{self.name} refused a request: {reply.refusal()}")

    def ended(self, now_ns: int, *, requested: bool) -> bool:
        """Return True once, when the process has ended, and move to the state that follows.

        `requested`: the end was requested, so exit code 0 is no failure.
        """
        if self._process is None or (code := self._process.poll()) is None:
            return False
        self.code = code
        self._clean_up()
        if requested and code == 0:
            self.enter(State.ENDED)
            return True
        self.failed(now_ns)
        return True

    def failed(self, now_ns: int) -> None:
        """Note that the process ended unexpectedly or could not be started: the shard is down until
        a restart, or crash-looping."""
        steady = self.state is State.READY and now_ns - self._ready_ns >= STEADY_NS
        self._ends = 1 if steady else self._ends + 1
        self.restart_at_ns = now_ns + min(PAUSE_MAX_NS, PAUSE_NS * 2 ** (self._ends - 1))
        self.enter(State.DOWN if self._ends < ENDS_MAX else State.CRASH_LOOPING)

    def try_again(self, now_ns: int) -> None:
        """Forget earlier failures. A shard that has ended or is crash-looping restarts at once."""
        self._ends = 0
        self.restart_at_ns = now_ns
        if self.state in (State.CRASH_LOOPING, State.ENDED):
            self.enter(State.DOWN)

    def wait(self) -> None:
        """Wait until the process, if there is one, has ended."""
        if self._process is not None:
            self._process.wait()
            self._clean_up()

    def _clean_up(self) -> None:
        assert self._process is not None
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None
        self.unanswered_pings = self.stalled_heartbeats = 0
        self._reloaded = self._reload
        os.close(self._watch)
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None

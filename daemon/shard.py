"""One shard of a deployment: an ordinary daemon in a process of its own, and its lifecycle."""

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
"""Before a shard that ended is started again; it doubles with every end."""
STEADY_NS = 60_000_000_000
"""After so long as ready its earlier ends count no more."""
ENDS_MAX = 8
"""After so many ends in a row a shard is crash-looping, and not restarted until SIGHUP."""
UNANSWERED_PINGS_MAX = 10
"""So often, about a second apart, a shard may be found to owe an answer before it is killed.
Heartbeats are counted, not time: while the machine sleeps nobody can answer."""
SLOW_PINGS = 2
"""One that owes an answer for more heartbeats does not serve as it should."""
STALLED_HEARTBEATS_MAX = STEP_NS // 1_000_000_000
"""One whose start gets no further for so many heartbeats is killed."""
_SAID_MAX = 65_536
_OF_THE_MANAGER = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class State(enum.StrEnum):
    """What a shard is doing."""

    DOWN = "down"
    """Its process is not there, and will be started."""
    STARTING = "starting"
    READY = "ready"
    CRASH_LOOPING = "crash-looping"
    ENDED = "ended"
    """Its process is not there, as requested."""


MOVES: Mapping[State, frozenset[State]] = {
    State.DOWN: frozenset({State.STARTING, State.ENDED}),
    State.STARTING: frozenset({State.READY, State.DOWN, State.CRASH_LOOPING, State.ENDED}),
    State.READY: frozenset({State.DOWN, State.CRASH_LOOPING, State.ENDED}),
    State.CRASH_LOOPING: frozenset({State.DOWN, State.ENDED}),
    State.ENDED: frozenset({State.DOWN}),
}
"""Where each state may go."""


class Shard:
    """The process of one shard, as the one that runs it sees it. Times are CLOCK_BOOTTIME."""

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
        """How its process ended last."""
        self.again_ns = 0
        """When it is to be started, while it is down."""
        self.unanswered_pings = 0
        """So many heartbeats ago it was asked for a sign, as it had shown none; it still owes
        it."""
        self.stalled_heartbeats = 0
        """So many heartbeats ago its start got further."""
        self._moved_boot_ns = 0
        """When that was, or its loop's last heartbeat, by what it wrote down; 0 = nothing yet."""
        self.starts = 0
        """How often its process was started."""
        self._why = ""
        """What its arena said at the last heartbeat of how it does; "" = it does well."""
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
        """How often it was asked to read its settings again."""
        self._reloaded = 0
        """Up to which of these it has."""
        self._stale = False
        """It may have read its settings before they were to be read again."""

    def enter(self, state: State) -> None:
        """Moves to `state`; the table must have the move."""
        if state not in MOVES[self.state]:
            raise AssertionError(f"no move from {self.state} to {state}")
        self.state = state

    @property
    def pid(self) -> int:
        """Of its process; 0 = there is none."""
        return self._process.pid if self._process else 0

    @property
    def serves(self) -> bool:
        """True while it is ready and answers."""
        return self.state is State.READY and self.unanswered_pings <= SLOW_PINGS

    @property
    def hangs(self) -> str:
        """Why it is to be killed, in words; "" = it moves, or owes no sign of that."""
        if self.unanswered_pings >= UNANSWERED_PINGS_MAX:
            return "does not answer"
        return (
            "gets no further in its start"
            if self.stalled_heartbeats >= STALLED_HEARTBEATS_MAX
            else ""
        )

    @property
    def moves(self) -> bool:
        """Whether it had got further at the last heartbeat: its start, its loop, or its end."""
        return self._process is not None and not (self.unanswered_pings or self.stalled_heartbeats)

    @property
    def trouble(self) -> Trouble | None:
        """Why it does not serve as it should; None = it does, or has ended as requested."""
        if self.state is State.CRASH_LOOPING:
            text = f"{self.name} is crash-looping, and is not restarted"
            return Trouble(Cause.CRASH_LOOPING, text)
        if self.state in (State.DOWN, State.STARTING):
            return Trouble(Cause.RESTARTING, f"{self.name} ended, and is started again")
        if self.unanswered_pings > SLOW_PINGS:
            return Trouble(Cause.SILENT, f"{self.name} does not answer")
        return Trouble(Cause.DEGRADED, f"{self.name}: {self._why}") if self._why else None

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when it has said something, answered, or ended."""
        if self._process is None:
            return []
        news = self._said_fd if self._admin is None else int(self._admin.get(zmq.FD))
        return [self._watch, news]

    def start(self) -> None:
        """Starts its process. Raises OSError, and then there is none."""
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
        """Sends a signal to its process, if there is one."""
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Has its process end, after what it was asked before."""
        if self._admin is None:
            self.signal(signal.SIGTERM)
        else:
            self.send(wire.encode_frame(Message.STOP))

    def send(self, request: bytes) -> None:
        """Sends a request on its admin socket, if it is ready; nobody waits for the answer."""
        if self._admin is not None:
            with suppress(zmq.Again):
                self._admin.send(request, zmq.NOBLOCK)

    def heartbeat(self) -> None:
        """Looks how it does. One that is ready is asked for a sign of its loop only if its arena
        has none: to ask wakes both."""
        if self.state is State.STARTING:
            self.stalled_heartbeats = (
                0 if self._moved(self._written_boot_ns()) else self.stalled_heartbeats + 1
            )
        elif self._admin is not None:
            if self._arena is None or self._arena.retired:
                self._attach()
            self._why = in_words(self._arena.why) if self._arena else ""
            self._look_at_loop()

    def _attach(self) -> None:
        """Attach to the shard's arena. Without one, only pings show whether its loop runs."""
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
        """When its start got further, by its file; 0 = it has none yet."""
        with suppress(OSError, TableBroken, PermissionDenied):
            return int(StatusFile(self._paths.directory, self.name).header.heartbeat_boot_ns)
        return 0

    def _moved(self, at_boot_ns: int) -> bool:
        """Whether its last move is another one than at the heartbeat before."""
        before, self._moved_boot_ns = self._moved_boot_ns, at_boot_ns
        return at_boot_ns != before

    def _ping(self) -> None:
        self.send(wire.encode_frame(Message.PING, sequence=self._reload))

    def reload(self) -> None:
        """Has it read its settings again; one that starts does so once it is ready."""
        self._stale = self.state is State.STARTING
        if self.state is State.READY:
            self._reload += 1
            self.signal(signal.SIGHUP)
            self._ping()  # the answer comes after the reload

    @property
    def reloads(self) -> bool:
        """True while it has not read its settings again. One that hangs is not waited for."""
        waits = self.state is State.READY and not self.hangs
        return waits and self._reloaded < self._reload

    # ---- what it does by itself ------------------------------------------------------------

    def said_ready(self, now_ns: int) -> bool:
        """True once, when it says that clients can reach it."""
        if self.state is not State.STARTING or not self._reads_ready():
            return False
        try:
            self._admin = self._context.socket(zmq.DEALER)
        except zmq.ZMQError:  # no descriptor is free: the next look tries again
            return False
        self.enter(State.READY)
        self._ready_ns = now_ns
        self.stalled_heartbeats = 0
        self._admin.set(zmq.LINGER, 0)
        self._admin.set(zmq.SNDHWM, 0)
        self._admin.connect(self._paths.admin_endpoint)
        self._attach()
        if self._stale:
            self.reload()
        return True

    def _reads_ready(self) -> bool:
        with suppress(BlockingIOError):
            self._said += os.read(self._said_fd, _SAID_MAX)
        return self._said.startswith(b"ready") and self._said.endswith(b"\n")

    def receive(self) -> None:
        """Takes the answers that have come."""
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
        """True once, when its process has ended; it is down then, or what else became of it."""
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
        """Its process is not there, against all wishes: it is down for a while, or
        crash-looping."""
        steady = self.state is State.READY and now_ns - self._ready_ns >= STEADY_NS
        self._ends = 1 if steady else self._ends + 1
        self.again_ns = now_ns + min(PAUSE_MAX_NS, PAUSE_NS * 2 ** (self._ends - 1))
        self.enter(State.DOWN if self._ends < ENDS_MAX else State.CRASH_LOOPING)

    def try_again(self, now_ns: int) -> None:
        """Forgets its earlier ends; one that ended or was crash-looping is down, to be started
        now."""
        self._ends = 0
        self.again_ns = now_ns
        if self.state in (State.CRASH_LOOPING, State.ENDED):
            self.enter(State.DOWN)

    def wait(self) -> None:
        """Returns when its process, if there is one, has ended."""
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

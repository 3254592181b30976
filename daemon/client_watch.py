"""End the sessions of clients that are gone.

A session belongs to the process and to the connection that sent its last message. The end of the
process ends the session, after the grace period that the session's HELLO requested, which is
usually 0. The daemon has one pidfd for each process, however many sessions the process has.

The end of the connection ends the session after `grace_ns`, or after the session's own grace period
if that is longer. If the client sends a message before this end, the session stays. This rule alone
applies where the kernel does not report the client's process (in another pid namespace and over
tcp). It also applies after a restart of the daemon, because the pid that is stored with a session
may belong to another process by then; but if no process has this pid, the client has ended.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from purgatoryd.daemon.listeners.transport import Peer, Peers
from purgatoryd.daemon.processes import Processes
from purgatoryd.shm_layout.arena import Arena

EVENTS_PER_ITERATION = 64
"""Maximum number of ended processes and closed connections that one iteration handles."""
ENDS_PER_ITERATION = 16
"""Maximum number of sessions that one iteration ends. Each end frees up to 1024 outcomes; later
iterations free the rest."""
FOREVER_NS = 2**63 - 1
WATCHED_PART = 4
"""At most one in this many of the daemon's descriptors watches a client process. The number is
limited because a process may be watched without a connection, and libzmq aborts the daemon if no
descriptor is left."""


@dataclass(eq=False, slots=True)
class _Process:
    """A client's process, watched while it has sessions."""

    pid: int
    pidfd: int
    sessions: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Speaker:
    """The connection and the process that sent a session's last message."""

    pid: int
    connection: int
    """Descriptor of the connection."""
    peer: Peer | None = None
    """None = the connection is not known to admission control yet, or it is closed."""
    process: _Process | None = None
    """None = the process cannot be watched."""


class ClientWatch:
    """The processes and connections of all sessions. Only the loop's thread uses it; no method
    blocks."""

    def __init__(
        self,
        arena: Arena,
        peers: Peers,
        processes: Processes,
        grace_ns: int,
        now_ns: int,
        left: Callable[[int], None],
    ) -> None:
        """`peers` knows the connections. `grace_ns` is Config.session_grace_ns, `now_ns`
        CLOCK_BOOTTIME. `left` is called with each session whose connection has been closed."""
        self._arena = arena
        self._peers = peers
        self._watcher = processes
        self._grace_ns = grace_ns
        self._left = left
        self._speakers: dict[int, _Speaker] = {}
        self._unplaced: set[int] = set()
        """Sessions whose connection is unknown."""
        self._processes: dict[int, _Process] = {}
        self._by_pidfd: dict[int, _Process] = {}
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // WATCHED_PART
        self._ends: dict[int, int] = {}
        """For each session whose client seems to be gone: the boot time at which the session ends,
        unless the client sends a message before that time."""
        self._due_ns = FOREVER_NS
        self._now_ns = now_ns
        self._closed: deque[Peer] = deque()
        peers.on_closed = self._closed.append
        for session, pid in arena.session_pids().items():
            most_ns = 0 if processes.is_gone(pid) else grace_ns
            self._ends_in(session, max(most_ns, arena.session_grace_ns(session) or 0))

    def close(self) -> None:
        """Stop watching processes."""
        for process in self._processes.values():
            self._watcher.unwatch(process.pidfd)

    # ---- sessions ------------------------------------------------------------------------------

    def speaks(self, session: int, pid: int, connection: int) -> None:
        """Note that a session sent a message from process `pid` (0 = unknown) over the descriptor
        `connection`."""
        self.forget(session)
        if self._arena.session_grace_ns(session) is None:
            return
        self._speakers[session] = _Speaker(pid, connection)
        self._place(session)

    def forget(self, session: int) -> None:
        """Forget a session that has ended or sends from another connection."""
        self._ends.pop(session, None)
        self._unplaced.discard(session)
        speaker = self._speakers.pop(session, None)
        if speaker is None:
            return
        if speaker.peer is not None:
            speaker.peer.sessions.discard(session)
        if speaker.process is not None:
            speaker.process.sessions.discard(session)
            if not speaker.process.sessions:
                self._unwatch(speaker.process)

    def _place(self, session: int) -> None:
        """Find the connection and the process of a session that has sent a message."""
        speaker = self._speakers[session]
        peer = self._peers.peer(speaker.connection)
        if peer is None or peer.pid != speaker.pid:
            if session not in self._unplaced:
                self._unplaced.add(session)
                self._ends_in(session, self._grace_of(session))
            return
        self._unplaced.discard(session)
        self._ends.pop(session, None)
        peer.sessions.add(session)
        speaker.peer = peer
        try:
            speaker.process = self._watched(speaker)
        except ProcessLookupError:
            self._ends_in(session, self._arena.session_grace_ns(session) or 0)
            return
        if speaker.process is not None:
            speaker.process.sessions.add(session)

    def _grace_of(self, session: int) -> int:
        """Return how long a session outlives its connection, in ns."""
        return max(self._grace_ns, self._arena.session_grace_ns(session) or 0)

    def _ends_in(self, session: int, grace_ns: int) -> None:
        self._ends[session] = self._now_ns + grace_ns
        self._due_ns = min(self._due_ns, self._ends[session])

    # ---- processes -----------------------------------------------------------------------------

    def _watched(self, speaker: _Speaker) -> _Process | None:
        """Return the process of a connection; None if the process cannot be watched. Raises
        ProcessLookupError if the process has ended."""
        if speaker.pid == 0:
            return None
        process = self._processes.get(speaker.pid)
        if process is not None and self._watcher.has_ended(process.pidfd):
            self._process_ended(process)
            process = None
        if process is None:
            if len(self._processes) >= self._most:
                return None
            pidfd = self._watcher.watch(speaker.connection, speaker.pid)
            if pidfd is None:
                return None
            process = self._processes[speaker.pid] = _Process(speaker.pid, pidfd)
            self._by_pidfd[pidfd] = process
        return process

    def _unwatch(self, process: _Process) -> None:
        self._watcher.unwatch(process.pidfd)
        del self._processes[process.pid], self._by_pidfd[process.pidfd]

    def _process_ended(self, process: _Process) -> None:
        self._unwatch(process)
        for session in process.sessions:
            self._speakers[session].process = None
            self._ends_in(session, self._arena.session_grace_ns(session) or 0)

    # ---- an iteration --------------------------------------------------------------------------

    def serve(self, now_ns: int, *, look: bool = True) -> bool:
        """End the sessions whose clients are gone, at `now_ns`, CLOCK_BOOTTIME.

        `look`: a process may have ended. True = more work is left.
        """
        self._now_ns = now_ns
        for pidfd in self._watcher.ended(EVENTS_PER_ITERATION) if look else ():
            self._process_ended(self._by_pidfd[pidfd])
        for _ in range(min(EVENTS_PER_ITERATION, len(self._closed))):
            self._connection_closed(self._closed.popleft())
        more = now_ns >= self._due_ns and self._end_due()
        return more or bool(self._closed)

    def heartbeat(self) -> None:
        """Look again for the connections of sessions whose connection is unknown."""
        for session in [*self._unplaced]:
            self._place(session)

    def _connection_closed(self, peer: Peer) -> None:
        for session in peer.sessions:
            speaker = self._speakers[session]
            speaker.peer = None
            self._left(session)
            if session not in self._ends:
                self._ends_in(session, self._grace_of(session))
        peer.sessions.clear()

    def _end_due(self) -> bool:
        """End sessions whose end is due. True = more ends are due, and the WAL has space for
        them."""
        due = [session for session, end_ns in self._ends.items() if end_ns <= self._now_ns]
        for session in due[:ENDS_PER_ITERATION]:
            if not self._arena.end_session(session, self._now_ns):
                return False
            self.forget(session)
        self._due_ns = min(self._ends.values(), default=FOREVER_NS)
        return len(due) > ENDS_PER_ITERATION

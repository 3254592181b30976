"""The end of sessions whose clients have died, tested without sockets and processes."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from purgatoryd.daemon.client_watch import ENDS_PER_ITERATION, FOREVER_NS, ClientWatch
from purgatoryd.daemon.commands import Commands
from purgatoryd.daemon.listeners.ring_server import RingServer
from purgatoryd.daemon.listeners.time_shares import TimeShares
from purgatoryd.daemon.listeners.transport import Request
from purgatoryd.shm_layout import layout, wire

pytestmark = pytest.mark.tier("check")

GRACE_NS = 100
PID, PIDFD, CONNECTION = 5, 50, 9


GONE = 77
"""A pid that no process has."""
ORPHAN = 99
"""A session whose client has this pid."""


@dataclass
class FakeArena:
    """Stand-in for an arena with sessions, each with its own grace period."""

    graces: dict[int, int]
    ended: list[int] = field(default_factory=list)
    full: bool = False

    def session_pids(self) -> dict[int, int]:
        return {session: GONE if session == ORPHAN else 0 for session in self.graces}

    def session_grace_ns(self, session: int) -> int | None:
        return self.graces.get(session)

    def end_session(self, session: int, now_ns: int) -> bool:
        if not self.full:
            del self.graces[session]
            self.ended.append(session)
        return not self.full


class Clients:
    """A ClientWatch of one simulated process with one connection. Notes the sessions that the watch
    ends."""

    def __init__(self, graces: dict[int, int], now_ns: int = 0) -> None:
        self.arena = cast("Any", FakeArena(graces))
        self.peer: Any = SimpleNamespace(pid=PID, sessions=set())
        self.watched: list[int] = []
        self.ended_pidfds: list[int] = []
        self.left: list[int] = []
        self.peers: Any = SimpleNamespace(peer=lambda fd: self.peer if fd == CONNECTION else None)
        processes: Any = SimpleNamespace(
            watch=self._watch, unwatch=self.watched.remove, ended=lambda _: self.ended_pidfds,
            has_ended=lambda pidfd: pidfd in self.ended_pidfds,
            is_gone=lambda pid: pid == GONE,
        )  # fmt: skip
        self.watch = ClientWatch(
            self.arena, self.peers, processes, GRACE_NS, now_ns, self.left.append
        )

    def close_connection(self) -> None:
        self.peers.on_closed(self.peer)

    def _watch(self, connection: int, pid: int) -> int:
        self.watched.append(PIDFD)
        return PIDFD

    def ended_at(self, now_ns: int) -> list[int]:
        """Serve the watch at this time; return all sessions that have ended by then."""
        self.watch.serve(now_ns)
        return sorted(self.arena.ended)


def test_a_session_that_sends_over_another_connection_is_watched_there() -> None:
    said: list[tuple[int, int, int]] = []
    commands: Any = object.__new__(Commands)
    commands._owners, commands._arena = {}, SimpleNamespace(inbox_to=lambda session: None)
    commands._rings, commands.shares = RingServer(0), TimeShares()
    commands.clients = SimpleNamespace(speaks=lambda *arguments: said.append(arguments))
    for session, route, connection in (
        (7, b"a", 8), (6, b"a", 8), (7, b"a", 8), (7, b"b", CONNECTION), (6, b"a", 8)
    ):  # fmt: skip
        message = Request(route, b"", 0, 0, PID, 0, connection)
        commands._received(message, wire.encode_frame(layout.Message.PING, session))
    assert said == [(7, PID, 8), (6, PID, 8), (7, PID, CONNECTION)]


def test_a_quarter_of_the_descriptors_watches_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    clients = Clients({1: 0, 2: 0, 3: 0})
    clients.peers.peer = lambda fd: SimpleNamespace(pid=fd, sessions=set())
    for session in (1, 2, 3):
        clients.watch.speaks(session, PID + session, PID + session)
    assert len(clients.watched) == 2


def test_a_session_of_a_process_that_is_gone_ends_after_its_own_grace() -> None:
    clients = Clients({ORPHAN: 0, 8: 0})
    clients.watch.serve(0)
    assert clients.arena.ended == [ORPHAN]
    patient = Clients({ORPHAN: 10, 8: 0})
    patient.watch.serve(9)
    assert patient.arena.ended == []
    patient.watch.serve(10)
    assert patient.arena.ended == [ORPHAN]


def test_sessions_of_the_arena_end_after_their_grace_unless_they_speak() -> None:
    clients = Clients({1: 0, 2: 0, 3: 5 * GRACE_NS}, now_ns=10)
    assert clients.ended_at(9 + GRACE_NS) == []
    clients.watch.speaks(2, PID, CONNECTION)
    assert clients.ended_at(10 + GRACE_NS) == [1]
    assert clients.watch._due_ns == 10 + 5 * GRACE_NS  # session 3 is due next
    assert clients.ended_at(10 + 5 * GRACE_NS) == [1, 3]
    assert clients.watch._due_ns == FOREVER_NS


def test_a_session_ends_after_its_connection_and_once() -> None:
    clients = Clients({})
    clients.arena.graces |= {1: 0}
    clients.watch.speaks(1, PID, CONNECTION)
    clients.close_connection()
    assert clients.ended_at(1000) == []
    assert clients.left == [1]
    assert clients.peer.sessions == set()
    assert clients.ended_at(1000 + GRACE_NS) == [1]
    assert clients.watched == []


def test_a_process_is_watched_once_and_its_end_ends_all_its_sessions() -> None:
    clients = Clients({})
    clients.arena.graces |= {1: 0, 2: 0, 3: 7}
    for session in (1, 2, 3):
        clients.watch.speaks(session, PID, CONNECTION)
    assert clients.watched == [PIDFD]
    clients.ended_pidfds = [PIDFD]
    assert clients.ended_at(1000) == [1, 2]
    clients.ended_pidfds = []
    assert clients.watched == []
    assert clients.ended_at(1007) == [1, 2, 3]


def test_ends_are_spread_over_iterations_and_wait_for_a_full_wal() -> None:
    clients = Clients(dict.fromkeys(range(ENDS_PER_ITERATION + 1), 0))
    clients.arena.full = True
    assert not clients.watch.serve(GRACE_NS)
    clients.arena.full = False
    assert clients.watch.serve(GRACE_NS)
    assert len(clients.arena.ended) == ENDS_PER_ITERATION
    assert not clients.watch.serve(GRACE_NS)
    assert len(clients.arena.ended) == ENDS_PER_ITERATION + 1


def test_a_session_of_an_unknown_connection_ends_unless_the_connection_becomes_known() -> None:
    clients = Clients({})
    clients.arena.graces |= {1: 0, 2: 0}
    clients.watch.serve(1000)
    clients.watch.speaks(1, PID, CONNECTION + 1)
    clients.watch.speaks(2, PID + 1, CONNECTION)
    clients.peer.pid = PID + 1
    clients.watch.heartbeat()
    assert clients.ended_at(999 + GRACE_NS) == []
    assert clients.ended_at(1000 + GRACE_NS) == [1]


def test_a_process_that_ended_unnoticed_is_not_taken_for_the_next_one_with_its_pid() -> None:
    clients = Clients({})
    clients.arena.graces |= {1: 0, 2: 0}
    clients.watch.speaks(1, PID, CONNECTION)
    clients.ended_pidfds = [PIDFD]
    clients.watch.speaks(2, PID, CONNECTION)
    clients.ended_pidfds = []
    assert clients.ended_at(1000) == [1]
    assert clients.watched == [PIDFD]


def test_a_process_whose_connection_has_closed_is_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients = Clients({})
    clients.arena.graces |= {1: 0}
    monkeypatch.setattr(clients.watch._watcher, "watch", lambda *_: None)
    clients.watch.speaks(1, PID, CONNECTION)
    clients.close_connection()
    assert clients.ended_at(1000) == []
    assert clients.ended_at(1000 + GRACE_NS) == [1]


def test_a_session_that_is_not_there_is_not_watched() -> None:
    clients = Clients({})
    clients.watch.speaks(1, PID, CONNECTION)
    assert (clients.watched, clients.ended_at(FOREVER_NS)) == ([], [])

"""The command lane's order: whose message is served next, and where answers go.

A message whose bounded work is used up goes on in the next turn. Meanwhile others are
served, but not the same peer's: his messages stay in order. Outcomes and CHECKs are pushed
to the peer from which a session was heard last.
"""

from __future__ import annotations

from collections import deque

from purgatoryd.daemon import lanes
from purgatoryd.daemon.lanes import Lanes, Message
from purgatoryd.shm_layout.arena import Arena, Handled

PER_TURN = 16
PUSHES_PER_TURN = 64
ROUTES_MAX = 65_536
_SESSION = slice(8, 16)  # of a struct pg_frame
_ERROR = slice(30, 32)
_NO_ERROR = b"\0\0"


class Commands:
    """Feeds the command lane's messages to the arena, bounded in every turn."""

    def __init__(self, arena: Arena, sockets: Lanes) -> None:
        self._arena = arena
        self._lane = sockets.commands
        self._unfinished: deque[Message] = deque()
        self._behind: dict[bytes, deque[Message]] = {}  # route -> what came after it
        self._held: Message | None = None
        self._routes: dict[int, bytes] = {}  # session -> where it was heard last

    def serve(self, real_ns: int) -> bool:
        """One turn. True = there is more to do at once."""
        for _ in range(len(self._unfinished)):
            self._go_on(self._unfinished.popleft(), real_ns)
        for _ in range(PER_TURN):
            if self._held is not None:
                return True
            message = lanes.receive(self._lane)
            if message is None:
                return bool(self._unfinished)
            if message.route in self._behind:
                self._behind[message.route].append(message)
            else:
                self._apply(message, real_ns)
        return True

    @property
    def waits_for_ns(self) -> int | None:
        """The virtual time that the message at the head wants to be applied at."""
        return self._arena.wait_ns if self._held is not None else None

    def arrived(self, real_ns: int) -> None:
        """The virtual clock is where the held message wants it."""
        if self._held is not None:
            message, self._held = self._held, None
            self._apply(message, real_ns)

    def _apply(self, message: Message, real_ns: int) -> bool:
        """True when the message is done with."""
        state, reply = self._arena.handle(message.body, message.uid, message.pid, real_ns)
        if state == Handled.REPLY:
            lanes.reply(self._lane, message, reply)
            self._remember(message.route, reply)
        elif state == Handled.WAIT:
            self._held = message
        elif state == Handled.AGAIN:
            self._unfinished.append(message)
            self._behind.setdefault(message.route, deque())
            return False
        return True

    def _go_on(self, message: Message, real_ns: int) -> None:
        if not self._apply(message, real_ns):
            return
        behind = self._behind[message.route]
        while behind and self._held is None:
            if not self._apply(behind.popleft(), real_ns):
                return
        if behind:
            self._unfinished.append(behind.popleft())
        else:
            del self._behind[message.route]

    # ---- inboxes ----

    def _remember(self, route: bytes, reply: memoryview) -> None:
        """A session that is heard from a new place is told there what it did not take."""
        if reply[_ERROR] != _NO_ERROR:
            return
        session = int.from_bytes(reply[_SESSION], "little")
        if session == 0 or self._routes.get(session) == route:
            return
        if len(self._routes) >= ROUTES_MAX:
            self._routes.clear()  # of sessions long gone, mostly; the living come back
        self._routes[session] = route
        self._arena.inbox_again(session)

    def push(self) -> bool:
        """Hands outcomes and CHECKs to the socket. True = there are more."""
        for _ in range(PUSHES_PER_TURN):
            session, body = self._arena.inbox()
            if session == 0:
                return False
            if route := self._routes.get(session):
                lanes.send(self._lane, route, body)
        return True

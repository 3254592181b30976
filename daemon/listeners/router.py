"""Serve the ROUTER socket from the core (ring/router.c).

The core receives messages, applies those of a session that belongs to their sender, and sends the
replies. It leaves all other messages to the caller. Without the functions of libzmq, the caller
receives each message itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from purgatoryd.daemon.listeners.libzmq import calls_for
from purgatoryd.daemon.listeners.transport import Request
from purgatoryd.daemon.listeners.zap import sender_named
from purgatoryd.shm_layout._core import ffi

ROWS_MIN = 64
ROW = 0xFFFF  # mask of the row number in a session id


class Receiver(Protocol):
    """The socket, for the messages that the core does not receive."""

    def receive(self) -> Request | None:
        """Return the next request; None if there is none."""

    def unlike_a_clients(self, connection: int, address: str) -> bool:
        """Drop the rest of the frames of a message that no client sends. Return whether the sender
        may have an answer; otherwise it is punished. `connection` and `address` are those of the
        sender."""


@dataclass(eq=False, slots=True)
class _Client:
    """A peer of the socket that owns a session. The core keeps no copy of these objects."""

    struct: Any
    memory: tuple[Any, ...]


class Router:
    """The clients of a ROUTER socket, by routing id. `struct` is a struct pg_router."""

    def __init__(self, struct: Any, receiver: Receiver) -> None:
        self.struct = struct
        self._receiver = receiver
        self._clients: dict[Hashable, _Client] = {}
        self._behind: set[Hashable] = set()
        """Peers with an unfinished message."""
        self._rows: Any = ffi.NULL
        self._memory: tuple[Any, ...] = ()
        """Memory that the core uses."""
        self.receive = receiver.receive

    def receive_by(self, socket: zmq.Socket[bytes], messages: Any) -> bool:
        """Let the core receive the messages of `socket`. False = the functions of its libzmq cannot
        be found. `messages`: an array in which the core notes the descriptors of messages."""
        calls = calls_for(socket)
        if calls is None:
            return False
        self._memory = (calls, messages)
        self.struct.calls = calls
        self.struct.socket = ffi.cast("void *", socket.underlying)
        self.struct.completed, self.struct.descriptors = messages, len(messages)
        return True

    # ---- clients -------------------------------------------------------------------------------

    def own(self, message: Request, session: int, share: Any) -> None:
        """Let the core apply the messages of `session` if they have the route and the credentials
        of `message`. The route owns no other session. The time of the messages is charged to
        `share`, a struct pg_time_share."""
        route: Any = message.route
        name = ffi.new("char[]", f"{message.uid}:{message.gid}:{message.pid}".encode())
        memory = (ffi.from_buffer("uint8_t[]", route), name, share)
        fields = {
            "share": share, "session": session, "pid": message.pid, "route": memory[0],
            "route_bytes": len(route), "user_id": name, "behind": route in self._behind,
        }  # fmt: skip
        client = _Client(ffi.new("struct pg_ring_client *", fields), memory)
        self._reserve(session & ROW)
        self.struct.clients[session & ROW] = client.struct
        self._clients[route] = client

    def session_of(self, route: Hashable) -> int:
        """Return the session that a route owns; 0 = none."""
        client = self._clients.get(route)
        return 0 if client is None else int(client.struct.session)

    def disown(self, route: Hashable, session: int) -> Any | None:
        """End own(), unless the route owns another session. Return the client whose ownership
        ended."""
        client = self._clients.get(route)
        if client is None or client.struct.session != session:
            return None
        del self._clients[route]
        if self.struct.clients[session & ROW] == client.struct:
            self.struct.clients[session & ROW] = ffi.NULL
        return client.struct

    def _reserve(self, row: int) -> None:
        """Make space for a row in the table of clients."""
        rows = int(self.struct.rows)
        if row < rows:
            return
        more = max(ROWS_MIN, 2 * rows, row + 1)
        table = ffi.new("struct pg_ring_client *[]", more)
        if rows:
            table[0:rows] = self._rows[0:rows]
        self._rows = self.struct.clients = table
        self.struct.rows = more

    def hold(self, route: Hashable, *, behind: bool) -> None:
        """Leave the messages of `route` to the caller while `behind` is true."""
        (self._behind.add if behind else self._behind.discard)(route)
        client = self._clients.get(route)
        if client is not None:
            client.struct.behind = behind

    def spoke(self, route: Hashable) -> bool:
        """Return whether the core has applied a message from `route` since the last call."""
        client = self._clients.get(route)
        if client is None or not client.struct.spoke:
            return False
        client.struct.spoke = 0
        return True

    # ---- the message that the core has left ----------------------------------------------------

    def request(self, body: bytes, received_boot_ns: int) -> Request:
        """Return the last message that the core received, as a request with `body`."""
        struct = self.struct
        route = bytes(ffi.buffer(struct.route, struct.route_bytes))
        sender = sender_named(ffi.string(struct.user_id).decode())
        return Request(route, body, *sender, received_boot_ns, struct.connection)

    def unlike_a_clients(self, received_boot_ns: int) -> Request | None:
        """Report the message that no client sends. Return a malformed request in place of it, or
        None if the sender gets no answer."""
        address = ffi.string(self.struct.address).decode() if self.struct.address else ""
        if not self._receiver.unlike_a_clients(self.struct.connection, address):
            return None
        return self.request(b"", received_boot_ns)

"""The functions of libzmq for a simulated command socket, so that the core receives its messages.

If a process dies at one of these calls, the call fails, because a C function cannot raise. The core
returns, and the next call of the process raises Killed.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from purgatoryd.daemon.listeners.router import Router
from purgatoryd.daemon.listeners.transport import Request
from purgatoryd.shm_layout._core import ffi
from world.seam import Killed

if TYPE_CHECKING:
    from world.network import SimulatedRequests

SNDMORE = 2
DESCRIPTORS = 64
REPLY_MAX = 4096
"""Larger replies are sent by the daemon's Python."""
_FIELDS = dict(ffi.typeof("struct pg_zmq_calls").fields or ())


class SimulatedRouter:
    """The command socket of a daemon, as the core sees it."""

    def __init__(self, requests: SimulatedRequests, *, in_core: bool) -> None:
        """`in_core`: the core receives the messages; otherwise Python receives each of them."""
        self._requests = requests
        self._in_core = in_core
        self._received: Request | None = None
        self._kept: list[Any] = []
        """Memory of the received message."""
        self._route = b""
        self._reply: Any = None
        functions = {
            name: ffi.callback(field.type, getattr(self, f"_{name}"))
            for name, field in _FIELDS.items()
        }
        self._memory = (
            functions, ffi.new("struct pg_zmq_calls *", functions),
            ffi.new("uint8_t[]", DESCRIPTORS),
        )  # fmt: skip
        self.state = ffi.new("struct pg_router *", {
            "calls": self._memory[1], "fd": requests.fd, "each": not in_core,
            "reply_max": REPLY_MAX, "completed": self._memory[2], "descriptors": DESCRIPTORS,
        })  # fmt: skip
        self.router = Router(self.state, self)

    # ---- Receiver ------------------------------------------------------------------------------

    def receive(self) -> Request | None:
        request = self._requests.receive()
        self.state.quiet = request is None
        return request

    def unlike_a_clients(self, connection: int, address: str) -> bool:
        raise AssertionError("no client of a world sends such a message")

    def look(self, *, each: bool) -> None:
        """Note that the socket may have messages. `each`: Python receives each of them."""
        self.state.each = each or not self._in_core
        self.state.quiet = 0

    # ---- the functions -------------------------------------------------------------------------

    def _recv(self, _: Any, buffer: Any, _size: int, _flags: int) -> int:
        try:
            self._received = self._requests.receive()
        except Killed:
            ffi.errno = errno.EINVAL
            return -1
        if self._received is None:
            ffi.errno = errno.EAGAIN
            return -1
        route: Any = self._received.route
        ffi.memmove(buffer, route, len(route))
        return len(route)

    def _msg_init(self, _: Any) -> int:
        return 0

    def _msg_init_size(self, _: Any, size: int) -> int:
        self._reply = ffi.new("uint8_t[]", size)
        return 0

    def _msg_recv(self, _message: Any, _socket: Any, _flags: int) -> int:
        assert self._received is not None
        one = self._received
        name = f"{one.uid}:{one.gid}:{one.pid}".encode()
        self._kept = [ffi.from_buffer(one.body), ffi.new("char[]", name)]
        return len(one.body)

    def _is_received(self, message: Any) -> bool:
        """Return whether it is the received message; otherwise it is a reply."""
        return bool(message == ffi.addressof(self.state, "message"))

    def _msg_close(self, message: Any) -> int:
        if self._is_received(message):
            self._kept.clear()
        return 0

    def _msg_data(self, message: Any) -> Any:
        memory = self._kept[0] if self._is_received(message) else self._reply
        return ffi.cast("void *", memory)

    def _msg_size(self, _: Any) -> int:
        assert self._received is not None
        return len(self._received.body)

    def _msg_more(self, _: Any) -> int:
        return 0

    def _msg_get(self, _: Any, _property: int) -> int:
        assert self._received is not None
        return self._received.connection

    def _msg_gets(self, _: Any, _property: Any) -> Any:
        return self._kept[1]

    def _send(self, _: Any, buffer: Any, size: int, flags: int) -> int:
        assert flags & SNDMORE
        self._route = bytes(ffi.buffer(buffer, size))
        return size

    def _msg_send(self, _message: Any, _socket: Any, _flags: int) -> int:
        try:
            self._requests.send(self._route, bytes(ffi.buffer(self._reply)))
        except Killed:
            ffi.errno = errno.EINVAL
            return -1
        return len(self._reply)

"""ZeroMQ sockets that report each new connection.

Each socket has a ZeroMQ context of its own. libzmq's I/O thread blocks when it reports an event to
a monitor whose reader has been closed, and a shared context would then stop all clients.
"""

from __future__ import annotations

import math
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import zmq

from purgatoryd.clients._pack import Direct
from purgatoryd.clients.fork_guard import ForkGuard

if TYPE_CHECKING:
    from purgatoryd.clients.poller import Addresses
    from purgatoryd.clients.remote import Remote

SEND_HWM = 1000  # number of messages; the session's window is far smaller
RECONNECT_MS = 10
SOON_MS = 20  # a waiting reader notices a new connection after at most this time
_CONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED
_EVENT = struct.Struct("=hi")


def connection_events(monitor: zmq.Socket[bytes]) -> Iterator[bool]:
    """Yield the events of a monitor socket: True for a new connection, False for a broken one."""
    while int(monitor.get(zmq.EVENTS)) & zmq.POLLIN:
        frame = monitor.recv()
        # The second frame of an event is the endpoint. After an interrupt, a call may begin with
        # this frame.
        if monitor.get(zmq.RCVMORE):
            event, _ = _EVENT.unpack(frame)
            yield event == _CONNECTED


class MonitoredSocket(NamedTuple):
    """A socket, the monitor of its connections, and a function that closes both."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    close: Callable[[], None]
    """Closes both sockets and drops what was not sent. An interrupted call can be repeated."""


def opened(owner: object, kind: int, events: int) -> MonitoredSocket:
    """Open a socket in a context of its own. `events`: the events that its monitor reports.

    Both sockets are also closed when `owner` is collected as garbage. The function that closes them
    holds its own references to the context and the sockets: a context waits for its sockets without
    a time limit, and Python collects garbage in any order. If an interrupt comes at any line here,
    the context is closed.
    """
    context = zmq.Context()
    try:
        socket = context.socket(kind)
        monitor = socket.get_monitor_socket(events)
        close = partial(_close, ForkGuard("connection"), context, socket, monitor)
        weakref.finalize(owner, close).atexit = False  # at exit a thread may still use the sockets
        return MonitoredSocket(socket, monitor, close)
    except BaseException:
        context.destroy(0)
        raise


def _close(
    fork_guard: ForkGuard, context: zmq.Context[zmq.Socket[bytes]], *sockets: zmq.Socket[bytes]
) -> None:
    if fork_guard.mine:
        for socket in sockets:
            socket.close(0)
        context.term()


class Subscription:
    """A SUB socket that reports reconnects. The owner waits on `sockets`."""

    def __init__(
        self,
        endpoint: str,
        subjects: Iterable[bytes],
        high_water_mark: int,
        remote: Remote | None = None,
    ) -> None:
        self._socket, self._monitor, self.close = opened(
            self, zmq.SUB, zmq.Event.HANDSHAKE_SUCCEEDED
        )
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, high_water_mark)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        for subject in subjects:
            self._socket.subscribe(subject)
        if remote is not None:
            remote.equip_reader(self._socket)
        self._endpoint = endpoint
        self._socket.connect(endpoint)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """The sockets that become readable with a message or a new connection."""
        return self._socket, self._monitor

    def receive(self) -> list[bytes] | None:
        """Return the two frames of the next message, or None. After an interrupt between the two
        frames, the next call drops the second frame."""
        topic = None
        with suppress(zmq.Again):
            while True:
                frame = self._socket.recv(zmq.NOBLOCK)
                if self._socket.get(zmq.RCVMORE):
                    topic = frame
                elif topic is not None:
                    return [topic, frame]
        return None

    def reconnected(self) -> bool:
        """True once after each new connection."""
        return any(list(connection_events(self._monitor)))

    def redirect(self, endpoint: str) -> None:
        """Connect to another daemon instead. The socket and its descriptors stay the same."""
        self._socket.disconnect(self._endpoint)
        self._endpoint = endpoint
        self._socket.connect(endpoint)


@cache
def _zmq_found() -> bool:
    """Let direct calls use the libzmq of pyzmq. Returns False if it is not found; then the engine
    makes all calls."""
    backend = sys.modules.get("zmq.backend.cython._zmq")
    path = None if backend is None else backend.__file__
    return path is not None and Direct.find_zmq(path)


Subscribe = Callable[..., Subscription]
"""Opens a Subscription; the arguments are those of its constructor."""


class Channel:
    """One connection to the daemon. Only receive_soon() blocks.

    send() accepts a message only on a connection that reconnected() has reported. So, before it
    sends on a new connection, the owner knows that messages of the previous connection may be lost.
    A message that send() accepted shortly before a connection broke may still arrive on the next
    connection; the protocol tolerates such copies. The option ZMQ_IMMEDIATE would make libzmq
    drop these copies, but is not set: it would also drop answers that were not read when the
    connection broke, such as the last answers of a daemon that stops.
    """

    redial_at_s = math.inf
    """libzmq connects again by itself."""

    def __init__(self, endpoint: str, remote: Remote | None = None) -> None:
        self.connected = False
        self.socket, self.monitor, self._close = opened(
            self, zmq.DEALER, _CONNECTED | zmq.Event.DISCONNECTED
        )
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, SEND_HWM)
        self.socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.set(zmq.RCVTIMEO, SOON_MS)
        if remote is not None:
            remote.equip(self.socket)
        self.fds = int(self.socket.get(zmq.FD)), int(self.monitor.get(zmq.FD))
        """Descriptors that become readable when libzmq has something to do. Only may_sleep() says
        whether it concerns the owner."""
        self._endpoint = endpoint
        self.socket.connect(endpoint)

    @property
    def addresses(self) -> Addresses | None:
        """The numbers that direct calls use; None without a connection, or without libzmq."""
        if not (self.connected and _zmq_found()):
            return None
        return "zmq", int(self.socket.underlying), int(self.monitor.underlying), *self.fds

    def may_sleep(self, *, to_send: bool) -> bool:
        """Return whether there is neither a message nor an event, nor space if `to_send`.

        It also makes libzmq read what its descriptors announced; otherwise they stay readable.
        """
        wanted = zmq.POLLIN | (zmq.POLLOUT if to_send else 0)
        event = int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN
        return not (event or int(self.socket.get(zmq.EVENTS)) & wanted)

    def redirect(self, endpoint: str) -> None:
        """Connect to another daemon instead. The socket and its descriptors stay the same."""
        self.socket.disconnect(self._endpoint)
        self.connected = False
        self._endpoint = endpoint
        self.socket.connect(endpoint)

    def send(self, frame: bytes) -> bool:
        """Send a message. Returns False if reconnected() has reported no connection, or the queue
        of the connection is full."""
        if not self.connected:
            return False
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """Return the next message, or None."""
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def receive_soon(self) -> bytes | None:
        """Wait up to SOON_MS for a message, and return it or None. This is the cheapest wait."""
        try:
            return self.socket.recv()
        except zmq.Again:
            return None

    def reconnected(self) -> bool:
        """Return True once after each new connection. Also updates `connected`."""
        events = list(connection_events(self.monitor))
        if events:
            self.connected = events[-1]
        return any(events)

    def close(self) -> None:
        """Close the sockets and drop what was not sent. Returns at once."""
        self._close()

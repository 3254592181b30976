"""ZeroMQ sockets that report each new connection. Each socket has a ZeroMQ context of its own."""

from __future__ import annotations

import math
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import zmq

from purgatoryd.clients.fork_guard import ForkGuard

if TYPE_CHECKING:
    from purgatoryd.clients.remote import Remote

SEND_HWM = 1000  # number of messages; the session's window is far smaller
RECONNECT_MS = 10
SOON_MS = 20  # a waiting reader notices a new connection after at most this time
_CONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED
_EVENT = struct.Struct("=hi")


OpenChannel = Callable[..., "AnyChannel"]
"""Opens a Channel; the arguments are those of its constructor."""


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
            remote.equip(self._socket)
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
        self._endpoint = endpoint
        self.socket.connect(endpoint)

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """The sockets that become readable with a message, or when the connection is made or
        broken."""
        return self.socket, self.monitor

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors of `sources`."""
        return tuple(int(source.get(zmq.FD)) for source in self.sources)

    def may_sleep(self, *, to_send: bool) -> bool:
        """Return True: a ZeroMQ socket needs no announcement."""
        return True

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


class AnyChannel(Protocol):
    """The interface of a channel. Channel describes the methods that have no comment here."""

    @property
    def connected(self) -> bool: ...  # noqa: D102

    @property
    def redial_at_s(self) -> float:
        """Host time (monotonic) at which reconnected() has to be called; infinite = no time."""

    @property
    def sources(self) -> tuple[Any, ...]:
        """Sockets or descriptors that become readable when there is something to do."""

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors of `sources`."""

    def may_sleep(self, *, to_send: bool) -> bool:
        """Announce that the owner waits for `sources`. `to_send`: also until there is space.
        False = there is something to do."""

    def send(self, frame: bytes) -> bool: ...  # noqa: D102
    def receive(self) -> bytes | None: ...  # noqa: D102
    def reconnected(self) -> bool: ...  # noqa: D102
    def redirect(self, endpoint: str) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class ChannelPoller:
    """Waits for several channels, and for an eventfd."""

    def __init__(self, kicked: int = -1) -> None:
        """`kicked`: an eventfd; a write to it ends a wait. -1 = none."""
        self._poller = zmq.Poller()
        self._kicked = kicked
        self._to_send: dict[AnyChannel, bool] = {}
        self._channels: dict[object, AnyChannel] = {}
        """Channels by source."""
        if kicked >= 0:
            self._poller.register(kicked, zmq.POLLIN)

    def watch(self, channel: AnyChannel, *, to_send: bool = False) -> None:
        """Let wait() return when a message arrives on a channel, and when its connection is made or
        broken. With `to_send`, also when a connected channel has space to send."""
        to_send = to_send and channel.connected
        known = self._to_send.get(channel)
        if known is None:
            for source in channel.sources:
                self._channels[source] = channel
                self._poller.register(source, zmq.POLLIN)
        if known is not to_send:
            self._to_send[channel] = to_send
            if isinstance(channel, Channel):
                events = zmq.POLLIN | (zmq.POLLOUT if to_send else 0)
                self._poller.register(channel.socket, events)

    def wait(self, timeout_s: float) -> list[AnyChannel]:
        """Wait at most `timeout_s` seconds, and return the channels that are ready. A write to the
        eventfd ends the wait, and the eventfd is reset."""
        busy = [
            channel
            for channel, to_send in self._to_send.items()
            if not channel.may_sleep(to_send=to_send)
        ]
        if busy:
            timeout_s = 0.0
        limit_ms = None if timeout_s == math.inf else max(0, round(timeout_s * 1000 + 0.5))
        ready = self._poller.poll(limit_ms)
        if any(source == self._kicked for source, _ in ready):
            os.eventfd_read(self._kicked)
        return busy + [self._channels[source] for source, _ in ready if source != self._kicked]

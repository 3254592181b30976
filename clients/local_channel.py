"""The channel to a daemon on this host: rings in shared memory, or ZeroMQ if it gives none.

See shm_layout/rings.py for the rings, and daemon/listeners/rings.py for their set-up.
"""

from __future__ import annotations

import math
import os
import select
import socket
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

from purgatoryd.clients.poller import Addresses, OpenChannel
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.errors import InvalidArgument, RingsRefused
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import RingRefusal
from purgatoryd.shm_layout.paths import ring_path, without_rings
from purgatoryd.shm_layout.rings import OFFER, RingPair

if TYPE_CHECKING:
    from purgatoryd.clients.channel import Channel
    from purgatoryd.clients.remote import Remote

Transport = Literal["auto", "ring", "zmq"]
"""The transport of a client. `auto`: rings if the daemon gives this client rings, else ZeroMQ;
`ring`: only rings; `zmq`: only ZeroMQ."""

REDIAL_S = 0.01
"""Time between two attempts to connect."""
_BELL_MAX = 64
_REASONS = {
    RingRefusal.MEMORY: "the memory for rings is used up",
    RingRefusal.UID: "this uid holds its share of the memory for rings",
}
_FDS = 2


class LocalChannel:
    """A connection to a daemon on this host, with the methods of Channel. No method blocks.

    Without rings (the daemon has no socket for them, or refuses this client), a Channel takes over
    and stays. If the daemon ends, answers that are in the rings are still received.
    """

    def __init__(
        self, endpoint: str, remote: Remote | None = None, *, only_rings: bool = False,
        host: Host = HOST,
    ) -> None:  # fmt: skip
        """`endpoint`: that of the daemon's command socket. `only_rings`: raise RingsRefused where a
        Channel would take over."""
        assert remote is None
        self._endpoint = endpoint
        self._only_rings = only_rings
        self._host = host
        self._socket: socket.socket | None = None
        self._pair: RingPair | None = None
        self._bell = -1
        self._zmq: Channel | None = None
        self._rest: bytes | None = None
        """A message that is in the ring only in part."""
        self.redial_at_s = 0.0
        """Host time (monotonic) at which reconnected() tries to connect; infinite while there is a
        connection."""
        self._events = select.epoll()
        weakref.finalize(self, self._events.close).atexit = False

    # ---- what a poller waits for ---------------------------------------------------------------

    @property
    def fds(self) -> tuple[int]:
        """Descriptor that becomes readable when there is something to do."""
        return (self._events.fileno(),)

    def may_sleep(self, *, to_send: bool) -> bool:
        """Announce that the owner waits for `fds`. False = there is something to do."""
        if self._zmq is not None:
            return self._zmq.may_sleep(to_send=to_send)
        if self._pair is None:
            return True
        return self._pair.may_sleep(to_put=to_send or self._rest is not None)

    @property
    def addresses(self) -> Addresses | None:
        """The numbers that direct calls use; None while a message is in a ring in part."""
        if self._zmq is not None:
            return self._zmq.addresses
        pair = self._pair
        if pair is None or self._socket is None or self._rest is not None or pair.collects:
            return None
        return "ring", *pair.addresses, self._bell, self._socket.fileno()

    @property
    def transport(self) -> str:
        """The transport in use: "ring", "zmq", or "" while there is no connection."""
        if self._zmq is not None:
            return "zmq"
        return "ring" if self._pair is not None else ""

    # ---- messages ------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """True while messages can be sent."""
        if self._zmq is not None:
            return self._zmq.connected
        return self._pair is not None and self._socket is not None

    def send(self, frame: bytes) -> bool:
        """Send a message. Returns False if there is no connection, or no space."""
        if self._zmq is not None:
            return self._zmq.send(frame)
        if self._socket is None or self._pair is None or not self._flush(self._pair):
            return False
        if self._pair.put(frame):
            return True
        if not self._pair.puts:
            return False
        self._rest = frame
        return True

    def _flush(self, pair: RingPair) -> bool:
        """Put the rest of a message. Returns False if a part of it is left."""
        if self._rest is not None and pair.put(self._rest):
            self._rest = None
        return self._rest is None

    def receive(self) -> bytes | None:
        """Return the next message, or None."""
        if self._zmq is not None:
            return self._zmq.receive()
        if self._pair is None:
            return None
        self._flush(self._pair)
        body = self._pair.take()
        return None if body is None else bytes(body)

    # ---- the connection ------------------------------------------------------------------------

    def reconnected(self) -> bool:
        """Return True once after each new connection. Raises RingsRefused."""
        if self._zmq is not None:
            return self._zmq.reconnected()
        if self._socket is None and self._host.monotonic_s() >= self.redial_at_s:
            self._dial()
        if self._socket is None:
            return False
        if self._pair is None:
            return self._take_offer(self._socket)
        if not _rung(self._socket):
            self._hang_up()
        return False

    def _dial(self) -> None:
        """Connect to the daemon, or let a Channel take over if it has no socket for rings."""
        self._drop_pair()
        self.redial_at_s = self._host.monotonic_s() + REDIAL_S
        path = ring_path(self._endpoint)
        dialed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            dialed.setblocking(False)
            dialed.connect(path)
        except FileNotFoundError:
            dialed.close()
            if without_rings(path):
                self._take_zmq("the daemon has no rings")
            return
        except OSError:  # no daemon serves the socket, or too many clients connect
            dialed.close()
            return
        self._socket, self.redial_at_s = dialed, math.inf
        self._events.register(dialed.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def _take_offer(self, dialed: socket.socket) -> bool:
        """Receive the daemon's offer, and map the rings. Returns True if the rings are there."""
        try:
            offer, fds, _, _ = socket.recv_fds(dialed, OFFER.size, _FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            offer, fds = b"", []
        if len(offer) != OFFER.size:
            self._hang_up()
            self._take_zmq("the daemon closed the connection")
            return False
        magic, version, refusal, ring_bytes = OFFER.unpack(offer)
        if (
            refusal
            or len(fds) != _FDS
            or (magic, version) != (lib.PG_RING_MAGIC, lib.PG_RING_VERSION)
        ):
            for fd in fds:
                os.close(fd)
            self._hang_up()
            self._take_zmq(_REASONS.get(refusal, "the daemon has another version of rings"))
            return False
        memory_fd, self._bell = fds
        try:
            self._pair = RingPair(memory_fd, ring_bytes, daemon=False, wake=self._signal)
        finally:
            os.close(memory_fd)
        return True

    def _signal(self, _how: int, _word: object) -> None:
        lib.pg_ring_signal(self._bell)

    def _hang_up(self) -> None:
        """Close the socket: the daemon has ended, or refuses this client. Answers that are in the
        rings can still be received."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._rest = None
        self.redial_at_s = self._host.monotonic_s() + REDIAL_S

    def _drop_pair(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None
            os.close(self._bell)

    def _take_zmq(self, reason: str) -> None:
        """Let a Channel take over. Raises RingsRefused."""
        if self._only_rings:
            raise RingsRefused(self._endpoint, reason)
        self._zmq, self.redial_at_s = open_zmq(self._endpoint), math.inf
        for fd in self._zmq.fds:
            self._events.register(fd, select.EPOLLIN)

    def redirect(self, endpoint: str) -> None:
        """Connect to another daemon instead. The descriptor stays the same."""
        self._endpoint = endpoint
        if self._zmq is not None:
            self._zmq.redirect(endpoint)
            return
        self._hang_up()
        self._drop_pair()
        self.redial_at_s = 0.0

    def close(self) -> None:
        """Close the connection and drop what was not sent."""
        self._hang_up()
        self._drop_pair()
        self.redial_at_s = math.inf
        if self._zmq is not None:
            self._zmq.close()


def _rung(dialed: socket.socket) -> bool:
    """Read the bytes with which the daemon woke us. Returns False if it has closed the socket."""
    with suppress(BlockingIOError, InterruptedError):
        while data := dialed.recv(_BELL_MAX):
            if len(data) < _BELL_MAX:
                return True
        return False
    return True


def open_zmq(endpoint: str, remote: Remote | None = None) -> Channel:
    """Open a ZeroMQ channel. Most local clients need none, and importing ZeroMQ takes 8 ms."""
    from purgatoryd.clients.channel import Channel

    return Channel(endpoint, remote)


def opener(transport: str, remote: Remote | None) -> OpenChannel:
    """Return the function that opens the channels of a client. Raises InvalidArgument."""
    if not isinstance(transport, str) or transport not in ("auto", "ring", "zmq"):
        raise InvalidArgument(f"transport must be auto, ring or zmq, not {transport!r}")
    if remote is not None and transport == "ring":
        raise InvalidArgument("transport must be auto or zmq for a daemon on another host")
    if transport == "zmq" or remote is not None:
        return open_zmq
    return partial(LocalChannel, only_rings=transport == "ring")

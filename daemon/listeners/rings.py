"""Requests of clients on this host, through rings in memory (see shm_layout/rings.py).

A client connects to the unix socket NAME.ring, and the daemon passes it memory and an eventfd. The
client writes to the eventfd when it has put a message and the daemon sleeps. The daemon waits for
that with an edge-triggered epoll. It never reads or writes the eventfd, because the client could
make such a call block. It sends a byte over the socket when the client sleeps, and receives nothing
from the socket. The end of the connection ends the rings: whole messages that are in them are still
applied. A client can ask for the arena instead of rings, see arena_passing.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import Counter
from collections.abc import Callable, Set
from pathlib import Path

from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.admission_control import (
    AdmissionControl,
    credentials_of,
    take_no_descriptors,
)
from purgatoryd.daemon.listeners.arena_passing import ArenaPassing, asks_for_arena
from purgatoryd.daemon.listeners.ring_server import Ring, RingServer, request_of
from purgatoryd.daemon.listeners.router import Router
from purgatoryd.daemon.listeners.time_shares import TimeShares
from purgatoryd.daemon.listeners.transport import Peer, Request, Served
from purgatoryd.daemon.log import log
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.layout import RingRefusal
from purgatoryd.shm_layout.rings import (
    RingPair,
    create_memory,
    pair_bytes,
    send_offer,
)

RING_BYTES_MIN, RING_BYTES_MAX = 16 * 2**10, 128 * 2**10
CLIENT_SHARE = 64
"""A client gets at most this part of the free memory for rings, but at least RING_BYTES_MIN."""
UID_SHARE = 2
"""A uid gets at most this part of all memory for rings."""
ACCEPTS_PER_ITERATION = 8
EVENTS_PER_ITERATION = 64
BACKLOG = 128
SOCKET_INDEX = 3
"""Peer.socket_index of clients with rings."""
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class LocalRing(Ring):
    """The rings of a client on this host, and its connection."""

    def __init__(
        self, connection: socket.socket, credentials: tuple[int, int, int], ring_bytes: int
    ) -> None:
        """Make the rings and pass them to the client. Raises OSError; nothing is left open.

        `credentials`: uid, gid and pid of the client, from the kernel.
        """
        self.peer = Peer(SOCKET_INDEX, credentials[0], credentials[2])
        self.memory_bytes = pair_bytes(ring_bytes)
        self._connection = connection
        number = connection.fileno()
        with contextlib.ExitStack() as stack:
            memory_fd = create_memory(ring_bytes)
            stack.callback(os.close, memory_fd)
            pair = RingPair(
                memory_fd, ring_bytes, daemon=True,
                wake=lambda how, word: lib.pg_ring_wake(how, word, number),
            )  # fmt: skip
            with contextlib.ExitStack() as on_error:
                on_error.callback(pair.close)
                self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                on_error.callback(os.close, self.bell)
                send_offer(connection, RingRefusal.NONE, ring_bytes, [memory_fd, self.bell])
                on_error.pop_all()
        super().__init__(pair, credentials, number)

    def close(self) -> None:
        """Close the connection and unmap the memory.

        The announced sleep makes a client look at the connection before it puts a message.
        """
        self.pair.may_sleep(to_put=False)
        self.end()
        self._connection.close()
        os.close(self.bell)
        self.pair.close()


class Rings:
    """The rings of all clients. Only the loop's thread uses it; no method blocks.

    Clients wake the daemon by their eventfds.
    """

    def __init__(
        self,
        path: Path,
        memory_bytes: int,
        admission: AdmissionControl,
        access: Access,
        host: Host,
        router: Router | None = None,
    ) -> None:
        """`path` is that of the socket, `memory_bytes` the memory for all rings. `router`: the
        ROUTER socket, which is served together with the rings."""
        self.path = path
        self._memory_bytes = memory_bytes
        self._admission = admission
        self._access = access
        self._host = host
        self.server = RingServer(RING_BYTES_MAX, router=router)
        self._rings: dict[int, LocalRing] = {}
        """Rings by the descriptor of the connection."""
        self._used_bytes: Counter[int] = Counter()
        """Memory of the rings of each uid."""
        self._trusted = {0, os.geteuid()}
        self._overflow_uid = int(_OVERFLOW_UID.read_text())
        """Stands for all users of other user namespaces that have no uid in ours."""
        self.on_closed: Callable[[Peer], object] = lambda _: None
        """Called with each closed connection."""
        self._events = select.epoll()
        self._passing = ArenaPassing(self._events)
        self._bells = select.epoll()
        self.bells = self._bells.fileno()
        """Descriptor that becomes readable when a client rings."""
        self.fds = (self._events.fileno(), self.bells)
        """The same descriptor, and one that becomes readable when a client connects or ends."""
        self._listener: socket.socket | None = None
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def listen(self) -> None:
        """Bind the path, instead of an earlier listener whose path was removed. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(str(self.path))
        listener.listen(BACKLOG)
        take_no_descriptors(listener.fileno())
        self._events.register(listener.fileno(), select.EPOLLIN)
        if self._listener is not None:
            self._listener.close()
        self._listener = listener

    @property
    def listens(self) -> bool:
        """True once the path was bound."""
        return self._listener is not None

    # ---- requests ------------------------------------------------------------------------------

    def serve(self, arena: Arena, shares: TimeShares, most: int, ready: Set[int] | None) -> Served:
        """Apply at most `most` messages, and return the first that is left to the caller.

        `ready`: the descriptors that may have events; None = all.
        """
        if ready is None or not ready.isdisjoint(self.fds):
            self._look(arena)
        return self.server.serve(arena, shares, most, self._request)

    def _request(self, ring: Ring) -> Request | None:
        """Take the next request of a client. None = there is none, or pieces of it are missing."""
        body = self._taken(ring)
        if body is not None:
            return request_of(ring, body, self._host.boot_ns())
        if ring.gone:
            self._forget(self._rings[ring.number])
        return None

    def _taken(self, ring: Ring) -> bytearray | None:
        ring.flush()
        pair = ring.pair
        length = pair.next_bytes
        begins_large = length and pair.is_large(length) and not pair.collects
        if begins_large and self._admission.memory_is_short():
            self._cut_off(ring, "a large message while memory is short")
            return None
        body = pair.take() if length else None
        if pair.broken:
            self._cut_off(ring, "impossible words in a ring")
        return body

    # ---- connections ---------------------------------------------------------------------------

    def _look(self, arena: Arena) -> None:
        """Take note of clients that ring, connect or end."""
        lib.pg_bells_take(self.bells, self.server.struct)
        connects = False
        for fd, events in self._events.poll(0, EVENTS_PER_ITERATION):
            if fd in self._rings and events & _ENDED:
                self._end(self._rings[fd])
            elif self._passing.has(fd):
                self._passing.prune()
            else:
                connects = True
        # New connections get the descriptors of closed ones, so all events are looked at before.
        if connects and self._listener is not None:
            self._accept(self._listener, arena)

    def _accept(self, listener: socket.socket, arena: Arena) -> None:
        for _ in range(ACCEPTS_PER_ITERATION):
            try:
                connection, name = listener.accept()
            except OSError:  # no connection is left, or no descriptor is free
                return
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                self._open(connection, arena if asks_for_arena(name) else None)

    def _open(self, connection: socket.socket, arena: Arena | None) -> None:
        """Give a client its rings, or the arena if that is not None, or let it know why it gets
        none. Raises OSError."""
        with contextlib.ExitStack() as on_error:
            on_error.callback(connection.close)
            pid, uid, gid = credentials_of(connection)
            if not self._admitted(uid, gid):
                return
            if arena is not None:
                if self._passing.answer(connection, uid, gid, arena.file.fd):
                    on_error.pop_all()
                return
            refusal, ring_bytes = self._space(uid)
            if refusal:
                send_offer(connection, refusal)
                return
            take_no_descriptors(connection.fileno())
            ring = LocalRing(connection, (uid, gid, max(0, pid)), ring_bytes)
            on_error.callback(ring.close)
            # EPOLLHUP and EPOLLERR always count
            self._events.register(ring.number, select.EPOLLRDHUP)
            self._watch_bell(ring)
            on_error.pop_all()
        self._rings[ring.number] = ring
        self._used_bytes[uid] += ring.memory_bytes
        self.server.add(ring)

    def _watch_bell(self, ring: LocalRing) -> None:
        if lib.pg_bell_watch(self.bells, ring.bell, ring.struct):
            raise OSError(ffi.errno, os.strerror(ffi.errno))

    def _admitted(self, uid: int, gid: int) -> bool:
        """False for users who may not connect, and for users of other user namespaces that have no
        uid here."""
        if uid == self._overflow_uid:
            return False
        return self._access.may_connect(uid, gid) and self._admission.admits(uid)

    def _space(self, uid: int) -> tuple[RingRefusal, int]:
        """Return why a uid gets no rings, or the size of its rings."""
        free = self._memory_bytes - self._used_bytes.total()
        ring_bytes = RING_BYTES_MAX
        while ring_bytes > RING_BYTES_MIN and pair_bytes(ring_bytes) * CLIENT_SHARE > free:
            ring_bytes //= 2
        needed = pair_bytes(ring_bytes)
        if needed > free:
            return RingRefusal.MEMORY, 0
        share = self._memory_bytes // UID_SHARE
        if uid not in self._trusted and self._used_bytes[uid] + needed > share:
            return RingRefusal.UID, 0
        return RingRefusal.NONE, ring_bytes

    def _end(self, ring: Ring) -> None:
        """Note that the client has closed its connection."""
        if not ring.gone:
            ring.end()
            self._events.unregister(ring.number)
            self.server.rouse(ring)

    def _cut_off(self, ring: Ring, detail: str) -> None:
        """Close the rings of a client that breaks the rules; what is in them is dropped."""
        uid = ring.credentials[0]
        log.warning(f"cut off a connection of uid {uid}: {detail}", peer=uid)
        self._end(ring)

    def _forget(self, ring: LocalRing) -> None:
        self._used_bytes[ring.credentials[0]] -= ring.memory_bytes
        self.server.remove(ring)
        # The client has a descriptor of the eventfd, so closing ours would not end its events.
        self._bells.unregister(ring.bell)
        del self._rings[ring.number]
        self.on_closed(ring.peer)
        ring.close()

    # ---- the connections, as Peers ---------------------------------------------------------------

    @property
    def connected(self) -> set[int]:
        """Descriptors of all connections."""
        return set(self._rings)

    def unread(self, fds: Set[int]) -> set[int]:
        """Return the descriptors in `fds` whose rings have a message."""
        return {fd for fd in fds if fd in self._rings and self._rings[fd].pair.next_bytes}

    def peer(self, fd: int) -> Peer | None:
        """Return the connection of a descriptor; None if it is unknown."""
        ring = self._rings.get(fd)
        return ring.peer if ring is not None else None

    # ---- the socket ------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all connections and the socket."""
        for ring in [*self._rings.values()]:
            self._forget(ring)
        self._passing.close()
        self._events.close()
        self._bells.close()
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):  # the next daemon replaces a path that is left
                self.path.unlink()

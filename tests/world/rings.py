"""Simulated rings: real memory, and wake-ups through a table of functions.

A client of a ring connection puts its frames into the ring when they arrive. It takes answers as
soon as the daemon wakes it, so answers that are in a ring survive the daemon.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

from purgatoryd.daemon.listeners.ring_server import Ring, RingServer, request_of
from purgatoryd.daemon.listeners.time_shares import TimeShares
from purgatoryd.daemon.listeners.transport import Request, Served
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.rings import RingPair, create_memory

if TYPE_CHECKING:
    from world.network import Connection, SimulatedTransport

SMALL_BYTES, LARGE_BYTES = 512, 2**14
"""Sizes of rings. Most batches are larger than a small ring."""
FD = 3
"""Descriptor that is readable when a client has rung."""
POLL_NS = -(2**63)


class ClientRing:
    """The client's side of a ring connection."""

    def __init__(self, connection: Connection, rings: SimulatedRings) -> None:
        self.connection = connection
        ring_bytes = SMALL_BYTES if connection.number % 4 == 0 else LARGE_BYTES
        memory_fd = create_memory(ring_bytes)
        try:
            daemon_side = RingPair(memory_fd, ring_bytes, daemon=True, wake=lambda *_: self.woken())
            self._pair = RingPair(memory_fd, ring_bytes, daemon=False, wake=self._ring)
        finally:
            os.close(memory_fd)
        end = connection.end
        self.ring = Ring(daemon_side, (end.uid, end.uid, end.pid), connection.number)
        self._rings = rings
        self._waiting: deque[bytes] = deque()
        """Frames that have no space yet; the first may be in the ring in part."""

    def _ring(self, *_: object) -> None:
        self._rings.rung.append(self.ring)

    def put(self, frame: bytes) -> None:
        """Put a frame that has arrived."""
        self._waiting.append(frame)
        self.woken()

    def woken(self) -> None:
        """Take all answers, and put the frames that wait."""
        awake = True
        while awake:
            while self._waiting and self._pair.put(self._waiting[0]):
                self._waiting.popleft()
            while (body := self._pair.take()) is not None:
                self._rings.transport.deliver(self.connection, bytes(body))
            awake = not self._pair.may_sleep(to_put=bool(self._waiting))

    def close(self) -> None:
        """Unmap both sides."""
        self._pair.close()
        self.ring.pair.close()


class SimulatedRings:
    """The rings of a daemon."""

    def __init__(self, transport: SimulatedTransport, host: Any) -> None:
        self.transport = transport
        self._host = host
        self._callbacks = {
            "boot_ns": ffi.callback("int64_t(void *)", lambda _: host.boot_ns()),
            "wall_ns": ffi.callback("int64_t(void *)", lambda _: host.wall_ns()),
            "wake": ffi.callback("void(void *, uint32_t, uint32_t *, int)", self._wake),
            "wait": ffi.callback(
                "int(void *, struct pg_ring_server *, int64_t)", self._wait, onerror=self._failed
            ),
        }
        calls = ffi.new("struct pg_loop_calls *", self._callbacks)
        self.server = RingServer(LARGE_BYTES, calls, transport.router.router)
        self._clients: dict[int, ClientRing] = {}
        self.rung: deque[Ring] = deque()
        """Rings whose clients have rung."""
        self.committed = False
        """True if a commit ends the next sleep."""
        self.sleeps_until_ns: int | None = None
        """Boot time until which the loop sleeps after wait(); None = it does not sleep."""
        self.error: BaseException | None = None
        """The exception of a callback, which cannot leave the core."""

    # ---- connections ---------------------------------------------------------------------------

    def open(self, connection: Connection) -> None:
        """Give a client rings."""
        client = self._clients[connection.number] = ClientRing(connection, self)
        self.server.add(client.ring)

    def has(self, number: int) -> bool:
        """Return whether a connection has rings."""
        return number in self._clients

    def put(self, connection: Connection, frame: bytes) -> None:
        """Let a client put a frame."""
        self._clients[connection.number].put(frame)

    def end(self, number: int) -> None:
        """Note that a client has closed its connection. Whole frames in its ring stay."""
        ring = self._clients[number].ring
        ring.end()
        self.rung.append(ring)

    def vanish(self) -> None:
        """Unmap all rings, because the process has ended."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    # ---- requests ------------------------------------------------------------------------------

    def rouse(self) -> bool:
        """Rouse the rings whose clients have rung. Return whether there is one."""
        rung = bool(self.rung)
        while self.rung:
            ring = self.rung.popleft()
            if self.has(ring.number):
                self.server.rouse(ring)
        return rung

    def serve(self, arena: Arena, shares: TimeShares, most: int) -> Served:
        """Apply messages, as Rings.serve does."""
        self.rouse()
        return self.server.serve(arena, shares, most, self._look)

    def _look(self, ring: Ring) -> Request | None:
        ring.flush()
        body = ring.pair.take()
        if body is not None:
            return request_of(ring, body, self._host.boot_ns())
        if ring.gone:
            self.server.remove(ring)
            self._clients.pop(ring.number).close()
            self.transport.forget(ring.number)
        return None

    def unread(self, number: int) -> bool:
        """Return whether a ring has a frame."""
        return self.has(number) and self._clients[number].ring.pair.next_bytes != 0

    # ---- the table of functions ----------------------------------------------------------------

    def _wake(self, _: Any, _how: int, _word: Any, number: int) -> None:
        self._clients[number].woken()

    def _wait(self, _: Any, _server: Any, until_ns: int) -> int:
        transport = self.transport
        transport.look()
        committed, self.committed = self.committed, False
        came = self.rouse() or committed or bool(transport.commands.waiting)
        if transport.commands.waiting:
            transport.router.state.quiet = 0
        if transport.ready() - {transport.commands.fd}:
            return int(lib.PG_WOKEN_FOR_CALLER)
        if came or until_ns == POLL_NS:
            return int(lib.PG_WOKEN_BY_RINGS)
        if until_ns <= self._host.boot_ns():
            return int(lib.PG_WOKEN_BY_TIME)
        self.sleeps_until_ns = until_ns
        return int(lib.PG_WOKEN_FOR_CALLER)

    def _failed(self, _: Any, error: BaseException, __: Any) -> None:
        self.error = error

"""Ask a daemon on this host for its arena, where this process has another /dev/shm.

The daemon passes a read-only descriptor over the socket of its rings, see
daemon/listeners/arena_passing.py.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from contextlib import ExitStack

from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import RingRefusal
from purgatoryd.shm_layout.paths import Paths, without_rings
from purgatoryd.shm_layout.rings import ARENA_NAME, OFFER
from purgatoryd.shm_layout.shm import ArenaFile

ANSWER_S = 0.02
"""Longest wait for the answer to a new request. Later calls look for the answer without a wait."""
_FDS = 2  # a daemon that does not have such requests offers rings, with two descriptors


class PassedArena(ArenaFile):
    """A mapped arena file that the daemon has passed. Its name leads to no file here."""

    def __init__(self, paths: Paths, fd: int, served: os.stat_result) -> None:
        """`served`: identity of the socket over which the file was passed. Raises OSError."""
        super().__init__(paths.arena, mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        self._paths = paths
        self._served = served

    @property
    def has_name(self) -> bool:
        """Return False once another daemon has the place of the one that passed the file: its arena
        may be another file. True while no daemon has this place."""
        try:
            found = self._paths.ring.stat()
        except OSError:
            return not without_rings(str(self._paths.ring))
        same_time = found.st_mtime_ns == self._served.st_mtime_ns  # an inode can be used again
        return same_time and os.path.samestat(found, self._served)


class ArenaRequests:
    """The requests of one client for arenas: at most one to each daemon."""

    def __init__(self) -> None:
        self._pending: dict[Paths, tuple[socket.socket, os.stat_result]] = {}
        """The connection of each request without an answer, and the identity of the socket."""
        self._passed = False
        """True once a daemon has passed its arena."""
        self.refused = False
        """True if the daemon of the last take() passes no arena to this client."""

    def take(self, paths: Paths) -> ArenaFile | None:
        """Return the daemon's arena file; None if the daemon has not passed it so far. Call again
        later, unless `refused` is true."""
        self.refused = False
        try:
            connection, served = self._pending.get(paths) or self._ask(paths)
            offer, fds, _, _ = socket.recv_fds(
                connection, OFFER.size, _FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:  # no daemon serves the socket, or the daemon has ended
            offer, fds = b"", []
        self.drop(paths)
        with ExitStack() as closing:
            for fd in fds:
                closing.callback(os.close, fd)
            if not self._is_arena(offer, fds):
                return None
            self._passed = True
            return PassedArena(paths, fds[0], served)

    def _ask(self, paths: Paths) -> tuple[socket.socket, os.stat_result]:
        """Connect to the daemon, and wait a moment for the answer. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            served = paths.ring.stat()
            connection.setblocking(False)
            connection.bind(ARENA_NAME + os.urandom(8).hex().encode())
            connection.connect(str(paths.ring))
        except OSError:
            connection.close()
            self.refused = self._passed and without_rings(str(paths.ring))
            raise
        self._pending[paths] = connection, served
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        poller.poll(ANSWER_S * 1000)
        return connection, served

    def _is_arena(self, offer: bytes, fds: list[int]) -> bool:
        """Return whether an answer passes an arena. An empty answer is the end of the
        connection."""
        if len(offer) != OFFER.size:
            return False
        magic, version, refusal, ring_bytes = OFFER.unpack(offer)
        # A daemon that does not have such requests offers rings.
        other = (magic, version) != (lib.PG_RING_MAGIC, lib.PG_RING_VERSION) or ring_bytes
        self.refused = bool(other or refusal not in (RingRefusal.NONE, RingRefusal.UNREAD))
        return not self.refused and not refusal and len(fds) == 1

    def drop(self, paths: Paths) -> None:
        """End a request that has no answer."""
        if pending := self._pending.pop(paths, None):
            pending[0].close()

    def close(self) -> None:
        """End all requests."""
        for paths in [*self._pending]:
            self.drop(paths)

"""Pass the arena to clients on this host that have another /dev/shm, such as that of a container.

A client asks with the name of its socket: before it connects, it binds the socket to an abstract
address that begins with ARENA_NAME. So the request is there when the connection is, and the daemon
waits for no bytes. The answer has a descriptor only if the client could open the arena's file
itself. The file is opened for each client, read-only, so that no two processes share an offset or
flags.

Until a client has received its answer, the descriptor counts as one of the daemon's. The number of
such answers is limited. The connection stays open so that the daemon can count them.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import termios
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from purgatoryd.daemon.listeners.admission_control import pending_bytes, take_no_descriptors
from purgatoryd.shm_layout.layout import RingRefusal
from purgatoryd.shm_layout.rings import ARENA_NAME, send_offer

UNREAD_MAX, UNREAD_PER_UID = 256, 16
"""Largest number of answers that clients have not received, in total and of one uid."""
_PEER_GROUPS = 59  # SO_PEERGROUPS, which Python does not name; since Linux 4.13
_GROUPS_BYTES = 1024  # the longest option that Python reads
_GID = struct.Struct("=I")
_LIST = "system.posix_acl_access"
_OVERFLOW_GID = Path("/proc/sys/kernel/overflowgid")


class ArenaPassing:
    """The answers to clients that ask for the arena. Only the loop's thread uses it; no method
    blocks."""

    def __init__(self, events: select.epoll) -> None:
        """`events` reports the end of a connection; then call prune()."""
        self._events = events
        self._unread: dict[int, tuple[int, socket.socket]] = {}
        """(uid, connection) of each client that may not have received its answer, by descriptor."""
        self._overflow_gid = int(_OVERFLOW_GID.read_text())
        """Stands for all Unix groups of other user namespaces that have no gid in ours."""

    def answer(self, connection: socket.socket, uid: int, gid: int, arena_fd: int) -> bool:
        """Pass the arena to a client, or let it know why it gets none. Return whether the
        connection is kept; otherwise the caller closes it. Raises OSError.

        `uid` and `gid` are from the kernel. `arena_fd` is the daemon's own descriptor.
        """
        self.prune()
        gids = {gid, *groups_of(connection)} - {self._overflow_gid}
        refusal = self._refusal(uid, gids, arena_fd)
        if refusal:
            send_offer(connection, refusal)
            return False
        take_no_descriptors(connection.fileno())
        self._events.register(connection.fileno(), select.EPOLLRDHUP | select.EPOLLET)
        passed_fd = os.open(f"/proc/self/fd/{arena_fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            send_offer(connection, RingRefusal.NONE, fds=[passed_fd])
        finally:
            os.close(passed_fd)
        self._unread[connection.fileno()] = uid, connection
        return True

    def _refusal(self, uid: int, gids: Set[int], arena_fd: int) -> RingRefusal:
        if not may_read(arena_fd, uid, gids):
            return RingRefusal.DENIED
        of_uid = sum(other == uid for other, _ in self._unread.values())
        if of_uid >= UNREAD_PER_UID or len(self._unread) >= UNREAD_MAX:
            return RingRefusal.UNREAD
        return RingRefusal.NONE

    def has(self, fd: int) -> bool:
        """Return whether a descriptor is that of a client which may not have received its
        answer."""
        return fd in self._unread

    def prune(self) -> None:
        """Close the connections whose clients have received the answer, or have ended.

        A client can end its side of a connection and still keep the answer, so the end of a
        connection alone is not enough.
        """
        for fd, (_, connection) in [*self._unread.items()]:
            if not pending_bytes(fd, termios.TIOCOUTQ):
                del self._unread[fd]
                connection.close()

    def close(self) -> None:
        """Close all connections."""
        while self._unread:
            self._unread.popitem()[1][1].close()


def asks_for_arena(name: object) -> bool:
    """Return whether a client asks for the arena. `name`: address of the client's socket, as
    accept() returns it."""
    return isinstance(name, bytes) and name.startswith(ARENA_NAME)


def groups_of(connection: socket.socket) -> list[int]:
    """Return the supplementary groups of the process that connected; [] if there are more than an
    option of a socket has space for."""
    with suppress(OSError):
        found = connection.getsockopt(socket.SOL_SOCKET, _PEER_GROUPS, _GROUPS_BYTES)
        return [gid for (gid,) in _GID.iter_unpack(found)]
    return []


def may_read(file_fd: int, uid: int, gids: Set[int]) -> bool:
    """Return whether a user could open a file for reading, by its owner and mode.

    With an access control list, the mode does not show the permissions of the group. Then only the
    owner and root may read the file.
    """
    found = os.fstat(file_fd)
    if uid == 0:
        return True
    if uid == found.st_uid:
        return bool(found.st_mode & stat.S_IRUSR)
    if _has_list(file_fd):
        return False
    needed = stat.S_IRGRP if found.st_gid in gids else stat.S_IROTH
    return bool(found.st_mode & needed)


def _has_list(file_fd: int) -> bool:
    with suppress(OSError):  # the file has no list
        return bool(os.getxattr(file_fd, _LIST))
    return False

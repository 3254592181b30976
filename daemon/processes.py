"""Client processes that the loop watches: a pidfd each, and one epoll for all of them."""

from __future__ import annotations

import errno
import os
import select
import socket
from contextlib import suppress

from purgatoryd.daemon.listeners.admission_control import borrowed, peer_pid

_PEER_PIDFD = 77  # SO_PEERPIDFD, which Python does not name; since Linux 6.5


class Processes:
    """The watched processes, each identified by its pidfd. No method blocks."""

    def __init__(self) -> None:
        self._ended = select.epoll()
        self.fd = self._ended.fileno()
        """Epoll descriptor that is readable when a process has ended."""

    def watch(self, connection: int, pid: int) -> int | None:
        """Watch the process `pid` at the other end of the descriptor `connection`.

        None if the process cannot be watched or the connection is closed. Raises
        ProcessLookupError if the process has ended.
        """
        pidfd = open_pidfd(connection, pid)
        if pidfd is None:
            return None
        try:
            self._ended.register(pidfd, select.EPOLLIN)
        except OSError:  # this user has reached fs.epoll.max_user_watches
            os.close(pidfd)
            return None
        return pidfd

    def unwatch(self, pidfd: int) -> None:
        """Stop watching a process."""
        self._ended.unregister(pidfd)
        os.close(pidfd)

    def has_ended(self, pidfd: int) -> bool:
        """True if a watched process has ended."""
        return _has_ended(pidfd)

    def is_gone(self, pid: int) -> bool:
        """True if no process has this pid, which an earlier daemon has stored."""
        return pid != 0 and _names_nobody(pid)

    def ended(self, limit: int) -> list[int]:
        """Return the pidfds of watched processes that have ended, at most `limit` of them."""
        return [pidfd for pidfd, _ in self._ended.poll(0, limit)]

    def close(self) -> None:
        """Close the epoll descriptor."""
        self._ended.close()


def _has_ended(pidfd: int) -> bool:
    asked = select.poll()
    asked.register(pidfd, select.POLLIN)
    return bool(asked.poll(0))


def open_pidfd(connection: int, pid: int) -> int | None:
    """Return a pidfd of the process `pid` at the other end of the descriptor `connection`.

    None if the process cannot be watched or the connection is closed. Raises ProcessLookupError if
    the process has ended.
    """
    try:
        # A message may outlive its connection; the descriptor may then be closed or reused.
        with borrowed(connection) as peer:
            pidfd = _peer_pidfd(peer, pid)
            if _is_peer(peer, pid):
                return pidfd
            os.close(pidfd)
    except ProcessLookupError:
        raise
    except OSError:
        pass
    if _names_nobody(pid):
        raise ProcessLookupError
    return None


def _names_nobody(pid: int) -> bool:
    """True if no process has this pid, or only a process that has ended and that its parent has not
    reaped yet."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        return _has_ended(pidfd)
    finally:
        os.close(pidfd)


def _is_peer(connection: socket.socket, pid: int) -> bool:
    """True if the kernel has `pid` as the other end, and the connection is open.

    On a kernel without SO_PEERPIDFD the pid can name a new process, if a child kept the connection
    open when its parent ended.
    """
    with suppress(OSError):
        return peer_pid(connection) == pid and _is_open(connection)
    return False


def _peer_pidfd(peer: socket.socket, pid: int) -> int:
    try:
        return peer.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):  # before Linux 6.16
            raise ProcessLookupError from error
        if error.errno != errno.ENOPROTOOPT:
            raise
    return os.pidfd_open(pid)


def _is_open(connection: socket.socket) -> bool:
    asked = select.poll()
    with suppress(OSError):
        asked.register(connection.fileno(), 0)
        return not any(events & (select.POLLHUP | select.POLLERR) for _, events in asked.poll(0))
    return False

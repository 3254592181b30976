"""The daemon's three sockets: commands, notices, administration. No policy is in here."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from purgatoryd.daemon.access import Access
from purgatoryd.shm_layout.arena import Outgoing
from purgatoryd.shm_layout.errors import BadPath
from purgatoryd.shm_layout.layout import MESSAGE_MAX
from purgatoryd.shm_layout.paths import Paths

SOCKET_MODE = 0o660
PROBE_S = 1.0
"""How long a socket at our path may take to refuse a connection, before it counts as live."""
NOTICE_HWM = 1000
REPLY_HWM = 64
"""Messages that wait for one peer. Replies may be large, and a peer that reads has few."""
REPORTS_PER_TURN = 64
LINGER_MS = 1000
"""How long a clean stop waits for peers to take what was sent."""


@dataclass(frozen=True, slots=True)
class Message:
    """One request: who asks, by routing id and as the kernel says, and the bytes."""

    route: bytes
    body: Any
    uid: int
    gid: int
    pid: int


class Lanes:
    """Binds all sockets. They are used from one thread; nothing here ever blocks."""

    def __init__(self, paths: Paths, access: Access) -> None:
        self._paths = (paths.cmd, paths.admin, paths.pub)
        for path in self._paths:
            _refuse_foreign(path)
        self._context = zmq.Context(io_threads=1)
        self.commands = self._bind(zmq.ROUTER, paths.cmd, REPLY_HWM)
        self.admin = self._bind(zmq.ROUTER, paths.admin, REPLY_HWM)
        self.notices = self._bind(zmq.XPUB, paths.pub, NOTICE_HWM, access)
        self._sockets = (self.commands, self.admin, self.notices)

    def _bind(
        self, kind: int, path: Path, send_hwm: int, listeners: Access | None = None
    ) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_MAX)
        socket.setsockopt(zmq.SNDHWM, send_hwm)
        if listeners is not None:
            _accept_only(socket, listeners)
        try:
            with _socket_mode():
                socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise BadPath(str(path), f"cannot be bound: {error.strerror}") from error
        return socket

    def fds(self) -> list[int]:
        """Descriptors that become readable when a socket has news (edge-triggered)."""
        return [int(socket.getsockopt(zmq.FD)) for socket in self._sockets]

    def pending(self) -> bool:
        """True if a message waits. Asking is needed before every sleep: the descriptors
        tell of changes only."""
        return any(int(s.getsockopt(zmq.EVENTS)) & zmq.POLLIN for s in self._sockets)

    def forget_subscriptions(self) -> None:
        """Takes subscriptions that XPUB reports off its queue; the socket keeps them."""
        for _ in range(REPORTS_PER_TURN):
            if not int(self.notices.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            self.notices.recv(zmq.NOBLOCK)

    def publish(self, messages: Iterable[Outgoing]) -> int:
        """Hands notice messages to the socket, which drops them for peers that are behind."""
        sent = 0
        for message in messages:
            self.notices.send(message.subject, zmq.SNDMORE | zmq.NOBLOCK)
            self.notices.send(message.body, zmq.NOBLOCK)
            sent += 1
        return sent

    def close(self) -> None:
        """Closes; what was sent and not taken within LINGER_MS is dropped."""
        for socket in self._sockets:
            socket.close()
        self._context.term()
        for path in self._paths:
            with contextlib.suppress(OSError):  # the next daemon takes over what is left
                path.unlink()


def receive(lane: zmq.Socket[bytes]) -> Message | None:
    """The next request of a ROUTER lane, None if there is none.

    A request has exactly two frames, routing id and body; of one with more, the body is
    empty, which the decoder refuses.
    """
    try:
        route, *rest = lane.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    uid, gid, pid = _peer(rest[0]) if rest else (_NOBODY, _NOBODY, 0)
    body = rest[0].buffer if len(rest) == 1 else b""
    return Message(route.bytes, body, uid, gid, pid)


def reply(lane: zmq.Socket[bytes], message: Message, body: Any) -> None:
    """Answers a request."""
    send(lane, message.route, body)


def send(lane: zmq.Socket[bytes], route: bytes, body: Any) -> None:
    """Sends to a peer. One that is gone, or does not read, loses it and asks again."""
    try:
        lane.send_multipart([route, body], zmq.NOBLOCK)
    except zmq.Again:
        return


def _peer(frame: zmq.Frame) -> tuple[int, int, int]:
    """(uid, gid, pid) of the sender: the kernel's word, as libzmq's ipc transport reports it."""
    try:
        _, uid, gid, pid = str(frame.get("Peer-Address")).rsplit(":", 3)
        return int(uid), int(gid), int(pid)
    except (zmq.ZMQError, ValueError):
        return _NOBODY, _NOBODY, 0


_NOBODY = 0xFFFFFFFF


@contextlib.contextmanager
def _socket_mode() -> Iterator[None]:
    """What is bound inside has SOCKET_MODE from its first moment on."""
    before = os.umask(0o777 & ~SOCKET_MODE)
    try:
        yield
    finally:
        os.umask(before)


def _accept_only(socket: zmq.Socket[bytes], access: Access) -> None:
    """Has libzmq close connections of others at once: a subscriber sends nothing to refuse."""
    if access.everybody:
        return
    for uid in access.uids:
        socket.setsockopt(zmq.IPC_FILTER_UID, uid)
    for gid in access.gids:
        socket.setsockopt(zmq.IPC_FILTER_GID, gid)


def _refuse_foreign(path: Path) -> None:
    """libzmq unlinks whatever is at the path; only our own dead socket may go that way.

    The caller holds the daemon's lock, so a socket that answers is none of this daemon's name.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise BadPath(str(path), "is there and is no socket")
    if found.st_uid != os.geteuid():
        raise BadPath(str(path), f"is there and belongs to uid {found.st_uid}")
    if _answers(path):
        raise BadPath(str(path), "is there and another process serves it")


def _answers(path: Path) -> bool:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True

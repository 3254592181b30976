"""ZAP handler (ZeroMQ RFC 27): decides at the handshake whether a connection is admitted.

The answer contains the sender's credentials, from the kernel or the CURVE key. libzmq attaches
them to every message of the connection.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import zmq

from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.admission_control import AdmissionControl
from purgatoryd.daemon.listeners.whole_messages import send_whole

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"purgatoryd"
REQUESTS_PER_ITERATION = 4
NOBODY = 0xFFFFFFFF

_ADMITTED, _NOT_NOW, _NEVER = b"200", b"300", b"400"


class Sender(NamedTuple):
    """Credentials of a sender."""

    uid: int
    gid: int
    pid: int


class ZapHandler:
    """Handler for all sockets of a context. `keys`: the uids of tcp clients, by public key (32
    bytes)."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        admission: AdmissionControl,
        access: Access,
        keys: Mapping[bytes, int],
    ) -> None:
        self._admission = admission
        self._access = access
        self.keys = keys
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self.fd = int(self._socket.get(zmq.FD))

    def serve(self) -> bool:
        """Answer a bounded number of handshakes. True = there may be more."""
        for _ in range(REQUESTS_PER_ITERATION):
            if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return False
            version, number, _, address, _, mechanism, *credentials = self._socket.recv_multipart()
            sender = self._sender(mechanism, address, credentials)
            status = _NEVER
            if sender is not None:
                status = _ADMITTED if self._admission.admits(sender.uid) else _NOT_NOW
            name = ":".join(map(str, sender or ())).encode()
            send_whole(self._socket, version, number, status, b"", name, b"")
        return True

    def _sender(self, mechanism: bytes, address: bytes, credentials: list[bytes]) -> Sender | None:
        if mechanism == b"CURVE":
            uid = self.keys.get(credentials[0])
            known = uid is not None and self._access.may_connect(uid, NOBODY)
            return Sender(uid, NOBODY, 0) if uid is not None and known else None
        try:
            # the form in which libzmq gives the address of an ipc connection
            _, uid_text, gid_text, pid_text = address.decode().rsplit(":", 3)
            return Sender(int(uid_text), int(gid_text), int(pid_text))
        except ValueError:
            return None

    def close(self) -> None:
        """Close the handler: no further connection is admitted."""
        self._socket.close(0)


def sender_of(frame: zmq.Frame) -> Sender:
    """Return the sender of `frame`, as the handler answered at the handshake of its connection."""
    return sender_named(str(frame.get("User-Id")))


@functools.lru_cache(maxsize=4096)
def sender_named(name: str) -> Sender:
    """Return the sender whose name the handler gave in its answer."""
    uid, gid, pid = map(int, name.split(":"))
    return Sender(uid, gid, pid)

"""Address and keys of a daemon on another host.

A client on another host cannot map the daemon's memory. So the daemon computes the deadline of a
delay when it first applies the call, and a subscriber has only the messages, not the replay buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import zmq

from purgatoryd.shm_layout import curve

HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000


@dataclass(frozen=True)
class Remote:
    """The argument `remote=` of a client.

    `tcp`: "HOST:PORT" of the daemon. `server_key`: its public key, 40 characters. `key`: a file of
    `purgatoryd keygen` whose public key is in the daemon's list.

    Raises InvalidArgument, and BadPath for the file.
    """

    tcp: str
    server_key: str
    key: str | PathLike[str]
    place: curve.Place = field(init=False, repr=False)
    _pair: curve.KeyPair = field(init=False, repr=False)

    def __post_init__(self) -> None:
        curve.check_key(self.server_key)
        object.__setattr__(self, "place", curve.place(self.tcp))
        object.__setattr__(self, "_pair", curve.read_pair(Path(self.key)))

    def equip(self, socket: zmq.Socket[bytes]) -> None:
        """Set these keys on a DEALER socket, and turn on heartbeats that detect a frozen daemon or
        a dead host. Call this before connect().

        The queue has no limit, because libzmq aborts the process if a heartbeat is due on a
        connection that broke while the queue was full. The protocol limits what is under way.
        """
        self.equip_reader(socket)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)

    def equip_reader(self, socket: zmq.Socket[bytes]) -> None:
        """Set these keys on a socket whose queue may be full, and let TCP detect a dead host. Call
        this before connect()."""
        socket.set(zmq.CURVE_SERVERKEY, self.server_key.encode())
        socket.set(zmq.CURVE_PUBLICKEY, self._pair.public)
        socket.set(zmq.CURVE_SECRETKEY, self._pair.secret)
        curve.detect_dead_host(socket)

"""A client that uses the rings of a daemon by hand, and may break every rule."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any, Self

from raw_wire import Answer, Raw, answer

from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import RingRefusal
from purgatoryd.shm_layout.rings import OFFER, RingPair

PATIENCE_S = 30.0


class NoRings(Exception):
    """The daemon refused the connection."""


class RawRing(Raw):
    """One pair of rings. Raises NoRings."""

    def __init__(self, path: Path) -> None:
        self.session = self.sequence = 0
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(PATIENCE_S)
        self.connection.connect(str(path))
        offer, fds, _, _ = socket.recv_fds(self.connection, OFFER.size, 2)
        if len(offer) != OFFER.size:
            raise NoRings("closed")
        _, _, refusal, self.ring_bytes = OFFER.unpack(offer)
        if refusal:
            raise NoRings(RingRefusal(refusal).name)
        self.memory_fd, self.bell = fds
        self.pair = RingPair(self.memory_fd, self.ring_bytes, daemon=False, wake=self._signal)

    def _signal(self, _how: int, _word: Any) -> None:
        lib.pg_ring_signal(self.bell)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        os.close(self.memory_fd)
        os.close(self.bell)
        self.pair.close()

    def send(self, *parts: bytes) -> None:
        (body,) = parts
        while not self.pair.put(body):
            self._sleep(to_put=True)

    def receive(self) -> Answer:
        while (body := self.pair.take()) is None:
            self._sleep(to_put=False)
        return answer(bytes(body))

    def _sleep(self, *, to_put: bool) -> None:
        if self.pair.may_sleep(to_put=to_put):
            self.connection.recv(64)

    def closed_by_daemon(self, patience_s: float = PATIENCE_S) -> bool:
        """Return whether the daemon closes the connection in time."""
        until_s = time.monotonic() + patience_s
        while time.monotonic() < until_s:
            self.connection.settimeout(max(0.01, until_s - time.monotonic()))
            try:
                if not self.connection.recv(64):
                    return True
            except (TimeoutError, ConnectionError):
                return False
        return False

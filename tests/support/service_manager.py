"""A test's service manager, which receives the messages to NOTIFY_SOCKET."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import Any

from real_daemon import PATIENCE_S


def readable(file: Any) -> bool:
    """Return whether data or the end of the file can be read without waiting."""
    return bool(select.select([file], [], [], 0)[0])


class Manager:
    """A service manager that listens on NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.settimeout(PATIENCE_S)

    def received(self) -> list[str]:
        """Return all lines that have arrived since the last call."""
        lines: list[str] = []
        while readable(self.socket):
            lines += self.socket.recv(4096).decode().splitlines()
        return lines

    def hears(self, line: str) -> list[str]:
        """Wait for a line that begins with `line`. Return all lines up to it."""
        received: list[str] = []
        # without a time limit, heartbeats would keep this loop running forever
        end_s = time.monotonic() + 2 * PATIENCE_S
        while not any(one.startswith(line) for one in received):
            assert time.monotonic() < end_s, f"no {line} in {received[-20:]}"
            received += self.socket.recv(4096).decode().splitlines()
        return received


def fill(manager: Manager) -> None:
    """Fill the queue of the manager with datagrams, each from another sender, so that no sender
    reaches its own limit."""
    with contextlib.suppress(BlockingIOError):
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(b"STATUS=of another", manager.address)

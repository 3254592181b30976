"""The service manager's side of NOTIFY_SOCKET."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import Any

from real_daemon import PATIENCE_S


def readable(file: Any) -> bool:
    """Return whether data, or the end of the file, can be read."""
    return bool(select.select([file], [], [], 0)[0])


class Manager:
    """A service manager's end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.settimeout(PATIENCE_S)

    def received(self) -> list[str]:
        """Return all lines received so far."""
        lines: list[str] = []
        while readable(self.socket):
            lines += self.socket.recv(4096).decode().splitlines()
        return lines

    def hears(self, line: str) -> list[str]:
        """Return all lines up to the first one with this beginning."""
        received: list[str] = []
        # without a limit, heartbeats would continue the loop for ever
        end_s = time.monotonic() + 2 * PATIENCE_S
        while not any(one.startswith(line) for one in received):
            assert time.monotonic() < end_s, f"no {line} in {received[-20:]}"
            received += self.socket.recv(4096).decode().splitlines()
        return received


def fill(manager: Manager) -> None:
    """Fill the queue with datagrams, of senders none of which is at its own limit."""
    with contextlib.suppress(BlockingIOError):
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(b"STATUS=of another", manager.address)

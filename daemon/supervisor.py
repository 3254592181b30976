"""Tells a service manager how the daemon does: sd_notify(3), datagrams to $NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from purgatoryd.shm_layout.health import STEP_NS

_MORE_TIME = f"EXTEND_TIMEOUT_USEC={STEP_NS // 1000}"


class Supervisor:
    """A daemon that nobody supervises has one that says nothing."""

    def __init__(self, address: str = "", watchdog_ns: int = 0) -> None:
        """`address`: a path, or "@" and an abstract name; empty = nobody listens.

        `watchdog_ns`: alive() is to be called more often than that; 0 = never.
        """
        self.watchdog_ns = watchdog_ns
        self._unsent: tuple[str, ...] = ()
        """What the manager had no space for, and has to be sent again."""
        self._address = address.replace("@", "\0", 1) if address[:1] == "@" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Supervisor:
        """What the environment of a unit says."""
        address = environ.get("NOTIFY_SOCKET", "")
        if address[:1] not in ("/", "@"):
            return cls()
        mine = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_us = environ.get("WATCHDOG_USEC", "") if mine else ""
        return cls(address, int(watchdog_us) * 1000 if watchdog_us.isdigit() else 0)

    def ready(self) -> None:
        """The daemon serves, for the first time or again after reloading()."""
        self._notify("READY=1")

    def status(self, text: str) -> None:
        """A line for people."""
        self._send(f"STATUS={text}")

    def step(self, text: str) -> None:
        """A start or an end has got so far and may take STEP_NS more."""
        self._send(_MORE_TIME, f"STATUS={text}")

    def alive(self) -> None:
        """There was progress; what the manager had no space for is said again."""
        if self._unsent:
            self._notify(*self._unsent)
        if self.watchdog_ns:
            self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """Settings are about to be read again; ready() says that it is done."""
        self._unsent = ()
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}")

    def stopping(self) -> None:
        """The daemon serves no more, and brings what it has to disk."""
        self._notify("STOPPING=1", _MORE_TIME)

    def _notify(self, *lines: str) -> None:
        """What the manager has to know, if not now then later."""
        self._unsent = () if self._send(*lines) else lines

    def _send(self, *lines: str) -> bool:
        """Never waits: a manager that does not listen is none of the daemon's business.

        False = it listens and its queue is full.
        """
        if self._socket is None:
            return True
        try:
            self._socket.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, self._address)
        except OSError as error:
            return not isinstance(error, BlockingIOError)
        return True

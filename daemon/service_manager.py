"""Notifications for the service manager: sd_notify(3), datagrams to $NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from purgatoryd.shm_layout.health import STEP_NS

_MORE_TIME = f"EXTEND_TIMEOUT_USEC={STEP_NS // 1000}"


class ServiceManager:
    """The service manager of this process. Without a service manager, no method has an effect."""

    def __init__(self, address: str = "", watchdog_ns: int = 0) -> None:
        """`address`: a path, or "@" and an abstract name; empty = no service manager.

        `watchdog_ns`: the longest time between two calls of `alive`; 0 = no watchdog.
        """
        self.watchdog_ns = watchdog_ns
        self._unsent: tuple[str, ...] = ()
        """Lines to send again, because the manager's queue was full."""
        self._address = address.replace("@", "\0", 1) if address[:1] == "@" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ServiceManager:
        """Return the service manager that the environment of a systemd unit describes."""
        address = environ.get("NOTIFY_SOCKET", "")
        if address[:1] not in ("/", "@"):
            return cls()
        mine = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_us = environ.get("WATCHDOG_USEC", "") if mine else ""
        return cls(address, int(watchdog_us) * 1000 if watchdog_us.isdigit() else 0)

    def ready(self) -> None:
        """Report that the daemon serves: at the start, and after `reloading`."""
        self._notify("READY=1")

    def status(self, text: str) -> None:
        """Set the status line of `systemctl status`."""
        self._send(f"STATUS={text}")

    def step(self, text: str) -> None:
        """Report a step of a start or an end, which may take up to STEP_NS."""
        self._send(_MORE_TIME, f"STATUS={text}")

    def alive(self) -> None:
        """Report progress to the watchdog, and send lines again that the full queue refused."""
        if self._unsent:
            self._notify(*self._unsent)
        if self.watchdog_ns:
            self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """Report that a reload begins; `ready` reports its end."""
        self._unsent = ()
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}")

    def stopping(self) -> None:
        """Report that the daemon has stopped serving and is writing its records to disk."""
        self._notify("STOPPING=1", _MORE_TIME)

    def _notify(self, *lines: str) -> None:
        """Send lines that must not be lost: `alive` repeats them if the queue is full."""
        self._unsent = () if self._send(*lines) else lines

    def _send(self, *lines: str) -> bool:
        """Send lines without waiting. False = the manager's queue is full. Other errors are
        ignored."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, self._address)
        except OSError as error:
            return not isinstance(error, BlockingIOError)
        return True

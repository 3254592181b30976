"""The wait of the daemon's loops: epoll, and a timerfd on CLOCK_BOOTTIME.

The timeout of epoll_wait() is in whole milliseconds and stops while the host sleeps; the timerfd
counts the boot clock's nanoseconds. Unlike select(), epoll takes descriptors above 1023.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena

_TFD_CLOEXEC = os.O_CLOEXEC
_AT_ONCE = -(2**63)
_LIBC = ctypes.CDLL(None, use_errno=True)


class Waiter:
    """Sleeps until a time, or until a descriptor is readable. Raises OSError."""

    def __init__(self, fds: Iterable[int] = (), bells: int = -1, commits: int = -1) -> None:
        """`bells`: the descriptor in `fds` that is readable when the client of a ring rings.
        `commits`: that of the group-commit thread."""
        self._fds: frozenset[int] = frozenset()
        self._epoll = select.epoll()
        self._timer = _LIBC.timerfd_create(time.CLOCK_BOOTTIME, _TFD_CLOEXEC)
        if self._timer < 0:
            self._epoll.close()
            raise _error(ctypes.get_errno())
        self._epoll.register(self._timer, select.EPOLLIN)
        self.struct = ffi.new(
            "struct pg_waiter *",
            {
                "epoll": self._epoll.fileno(), "timer": self._timer, "bells": bells,
                "commits": commits,
            },
        )  # fmt: skip
        self.watch(fds)

    def watch(self, fds: Iterable[int]) -> None:
        """Make later waits watch these descriptors and no others.

        Every descriptor is registered again: epoll forgets a closed descriptor, and its number may
        be reused.
        """
        wanted = frozenset(fds)
        for fd in self._fds - wanted:
            with suppress(OSError):  # closed
                self._epoll.unregister(fd)
        self._fds = wanted
        for fd in wanted:
            with suppress(FileExistsError):
                self._epoll.register(fd, select.EPOLLIN)

    def wait(self, until_boot_ns: int) -> frozenset[int]:
        """Return the readable descriptors; none if `until_boot_ns`, which may be past, came
        first."""
        if lib.pg_wait(self.struct, until_boot_ns):
            raise _error(ffi.errno)
        return self.ready()

    def poll(self) -> frozenset[int]:
        """Return the readable descriptors, and that of the rings."""
        return self.wait(_AT_ONCE) | {self.struct.bells}

    def wait_and_serve(self, arena: Arena, loop: Any, until_boot_ns: int) -> frozenset[int]:
        """Do what wait() does, and meanwhile serve the rings of `loop`, a struct pg_loop."""
        loop.waiter = self.struct
        if arena.wait(loop, until_boot_ns):
            raise _error(ffi.errno)
        return self.ready()

    def ready(self) -> frozenset[int]:
        """Return the descriptors that ended the last wait."""
        return frozenset(self.struct.ready[0 : self.struct.count])

    def close(self) -> None:
        """Close the descriptors."""
        self._epoll.close()
        os.close(self._timer)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def allow_descriptors() -> None:
    """Raise the soft limit of descriptors to the hard limit.

    Every connection is a descriptor, and libzmq aborts the process when none is left. Neither the
    daemon nor libzmq nor a child calls select(), which takes no descriptor above 1023.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

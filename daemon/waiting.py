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

_EVENTS_MAX = 64
"""Maximum number of events that one wait returns; later waits return the rest."""
_TFD_TIMER_ABSTIME = 1
_TFD_CLOEXEC = os.O_CLOEXEC
_SECOND_NS = 1_000_000_000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Waiter:
    """Sleeps until a time, or until a descriptor is readable. Raises OSError."""

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds: frozenset[int] = frozenset()
        self._spec = (ctypes.c_long * 4)()
        """A struct itimerspec: the interval, which is always 0, and the time."""
        self._epoll = select.epoll()
        try:
            self._timer = _LIBC.timerfd_create(time.CLOCK_BOOTTIME, _TFD_CLOEXEC)
            _check(self._timer)
        except OSError:
            self._epoll.close()
            raise
        self._epoll.register(self._timer, select.EPOLLIN)
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
        self._spec[2], self._spec[3] = divmod(max(1, until_boot_ns), _SECOND_NS)  # 0 disarms
        _check(_LIBC.timerfd_settime(self._timer, _TFD_TIMER_ABSTIME, self._spec, None))
        events = self._epoll.poll(maxevents=_EVENTS_MAX)
        return frozenset([fd for fd, _ in events if fd != self._timer])

    def close(self) -> None:
        """Close the descriptors."""
        self._epoll.close()
        os.close(self._timer)


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def allow_descriptors() -> None:
    """Raise the soft limit of descriptors to the hard limit.

    Every connection is a descriptor, and libzmq aborts the process when none is left. Neither the
    daemon nor libzmq nor a child calls select(), which takes no descriptor above 1023.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

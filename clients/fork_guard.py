"""Refuse the use of a client or subscriber after close() and in a forked child process.

ZeroMQ sockets and threads do not survive fork. This module stores the process id and updates it
after a fork, because a system call in each check would cost more than the rest of the check.
"""

from __future__ import annotations

import os

from purgatoryd.shm_layout.errors import Closed, ForkedProcess

_process = os.getpid()


def _renew() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_renew)


class ForkGuard:
    """The fork guard of one client or subscriber. `subject`: its name in errors."""

    __slots__ = ("_owner", "_subject", "closed")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._owner = _process
        self.closed = False

    @property
    def mine(self) -> bool:
        """True in the process that created the object."""
        return self._owner == _process

    def check(self) -> None:
        """Raise Closed or ForkedProcess if the object may not be used."""
        if self._owner != _process:
            raise ForkedProcess(self._subject, self._owner, _process)
        if self.closed:
            raise Closed(self._subject)

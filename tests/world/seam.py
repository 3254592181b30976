"""Where a process can die: before and after each call into the core, the disk and the sockets.

A simulated process has a fuse. Each call through the seam burns it; at its end the call raises
Killed, before it or after it, and every later call of the process raises Killed, too. So nothing
that Python does while it unwinds, such as a `finally`, has an effect on the world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """The process has ended at this call."""


class Fuse:
    """How many more calls a process makes. `left` None: it does not end."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.dead = False
        self.calls = 0
        self.signal_left: int | None = None
        """How many calls later a signal arrives. None: none arrives."""
        self.on_signal: Callable[[], None] = lambda: None
        self.files: list[Any] = []
        """Arena files that the process has opened."""
        self.commits: list[Any] = []
        """Group commits that the process has begun."""

    def burn(self) -> None:
        """Count a call. Raises Killed if the process is dead, or ends here."""
        self.calls += 1
        if self.dead:
            raise Killed
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left, self.dead = None, True
                raise Killed
        if self.signal_left is not None:
            self.signal_left -= 1
            if self.signal_left < 0:
                self.signal_left = None
                self.on_signal()


class Seam:
    """The process that runs now, and the calls that it makes."""

    def __init__(self) -> None:
        self.running: Fuse | None = None

    def cross(self) -> None:
        """A call begins or ends. Raises Killed."""
        if self.running is not None:
            self.running.burn()

    def crossed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which crosses the seam when it begins and when it ends."""

        def call(*arguments: Any) -> Any:
            if self.running is None:
                return function(*arguments)
            self.cross()
            result = function(*arguments)
            self.cross()
            return result

        return call

    def run(self, fuse: Fuse | None, work: Callable[[], Any]) -> Any:
        """Run `work` as the process of `fuse`; None: outside of all processes."""
        before, self.running = self.running, fuse
        try:
            return work()
        finally:
            self.running = before


class CrossedLibrary:
    """The C core, whose calls cross the seam. Constants are passed on."""

    def __init__(self, library: Any, seam: Seam) -> None:
        self._library = library
        self._seam = seam

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if callable(found):
            found = self._seam.crossed(found)
        setattr(self, name, found)
        return found

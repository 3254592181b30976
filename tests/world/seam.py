"""Points at which a process can die: before and after each call into the core, the disk and
sockets.

A simulated process has a fuse, which counts down at the beginning and the end of each call through
the seam. When the fuse is used up, the call raises Killed, and so does every later call of the
process. So code that runs while Python unwinds, such as a `finally` block, has no effect on the
world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """The process has ended at this call."""


class Fuse:
    """Number of calls until a process is killed. `left` None: no kill is planned."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.dead = False
        self.calls = 0
        self.signal_left: int | None = None
        """Number of calls until a signal arrives. None: no signal arrives."""
        self.on_signal: Callable[[], None] = lambda: None
        self.files: list[Any] = []
        """Arena files that the process has opened."""
        self.commits: list[Any] = []
        """Group commits that the process has begun."""

    def burn(self) -> None:
        """Count a call. Raises Killed if the process is dead or dies at this call."""
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
    """The process that currently runs, and its calls."""

    def __init__(self) -> None:
        self.running: Fuse | None = None

    def cross(self) -> None:
        """Cross the seam at the beginning or the end of a call. Raises Killed."""
        if self.running is not None:
            self.running.burn()

    def crossed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function, so that its beginning and its end cross the seam."""

        def call(*arguments: Any) -> Any:
            if self.running is None:
                return function(*arguments)
            self.cross()
            result = function(*arguments)
            self.cross()
            return result

        return call

    def run(self, fuse: Fuse | None, work: Callable[[], Any]) -> Any:
        """Run `work` in the process of `fuse`. None: run it outside of all processes."""
        before, self.running = self.running, fuse
        try:
            return work()
        finally:
            self.running = before


class CrossedLibrary:
    """The C core, whose functions cross the seam. Its constants are unchanged."""

    def __init__(self, library: Any, seam: Seam) -> None:
        self._library = library
        self._seam = seam

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if callable(found):
            found = self._seam.crossed(found)
        setattr(self, name, found)
        return found

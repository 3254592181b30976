"""Virtual time: it runs events in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable

READ_NS = 50
"""Time that passes at each read of the clock, so that work takes virtual time."""


class Schedule:
    """All events of a world. Events with the same time run in the order in which they were
    added."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._added = 0

    def after(self, delay_ns: int, event: Callable[[], None]) -> None:
        """Run `event` in `delay_ns` nanoseconds."""
        self._added += 1
        heapq.heappush(self._events, (self.now_ns + max(0, delay_ns), self._added, event))

    def run(self, until_ns: int) -> None:
        """Run all events up to a time, and set the current time to it."""
        while self._events and self._events[0][0] <= until_ns:
            at_ns, _, event = heapq.heappop(self._events)
            self.now_ns = max(self.now_ns, at_ns)
            event()
        self.now_ns = max(self.now_ns, until_ns)

    def read(self) -> int:
        """Return the current time; reading it takes READ_NS."""
        self.now_ns += READ_NS
        return self.now_ns

    def skip(self, span_ns: int) -> None:
        """Let time pass without running events. Events that become due in this time run
        afterwards."""
        self.now_ns += span_ns

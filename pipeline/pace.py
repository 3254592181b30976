"""How fast something may go."""

from __future__ import annotations

import time


class Pace:
    """Sleeps so that no more than `limit` units a second go on average; 0 = as fast as it goes."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._free_s = time.monotonic()  # from when on more may go

    def wait(self, count: int) -> None:
        """Until so many may go."""
        if self._limit:
            now_s = time.monotonic()
            time.sleep(max(0.0, self._free_s - now_s))
            self._free_s = max(self._free_s, now_s) + count / self._limit

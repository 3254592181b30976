"""Decide when the next commit begins, so that durable callers share syncs."""

from __future__ import annotations

from purgatoryd.shm_layout.arena import NONE_NS

SHARE_NS_MAX = 1_000_000
"""Longest time that a commit waits for more calls."""


class SyncSharing:
    """Calls that wait for the next commit.

    Callers whose answers left together usually call again together, and can share the next sync. So
    a commit waits until as many answers are pending again, for at most half the time of a sync.
    """

    def __init__(self, syncs: int, sync_ns: int) -> None:
        """`syncs`, `sync_ns`: number of all syncs so far, and their total time."""
        self._callers = self._most_ns = 0
        self._syncs, self._sync_ns = syncs, sync_ns
        self.until_ns = NONE_NS
        """Boot time at which the next commit begins although calls are missing."""

    def waits(self, pending: int, now_ns: int, *, committing: bool) -> bool:
        """Return whether the next commit waits. `pending`: number of answers that wait for it.
        `committing`: a commit is under way, whose end wakes the loop."""
        if not 0 < pending < self._callers:
            return False
        if committing:
            return True
        if self.until_ns == NONE_NS:
            self.until_ns = now_ns + self._most_ns
        return now_ns < self.until_ns

    def begun(self) -> None:
        """Note that a commit was requested."""
        self.until_ns = NONE_NS

    def answered(self, callers: int, syncs: int, sync_ns: int) -> None:
        """Note the end of a commit. `callers`: number of answers that were pending before it."""
        self._callers = callers
        if syncs > self._syncs:
            mean_ns = (sync_ns - self._sync_ns) // (syncs - self._syncs)
            self._most_ns = min(mean_ns // 2, SHARE_NS_MAX)
        self._syncs, self._sync_ns = syncs, sync_ns

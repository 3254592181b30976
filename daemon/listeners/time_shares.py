"""The CPU time of each uid in an iteration of the loop (ring/time_shares.c)."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from purgatoryd.shm_layout._core import ffi, lib

SHARE_NS = 500_000
"""Time share of each uid in an iteration. A message that has begun is not interrupted."""
SHARED_NS = 60_000_000_000
"""Shares apply for this long after a request whose uid differs from the previous request's uid.
While only one uid sends requests, no share applies."""


class TimeShares:
    """The time shares of all uids. Times are CLOCK_BOOTTIME."""

    def __init__(self) -> None:
        self.struct = ffi.new(
            "struct pg_time_shares *", {"most_ns": SHARE_NS, "lasts_ns": SHARED_NS}
        )
        self._known: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._charged: list[Any] = []
        """Shares of this iteration. Rings keep the shares of their uids."""

    def begin(self, now_ns: int) -> None:
        """Begin an iteration."""
        self._charged.clear()
        lib.pg_time_shares_begin(self.struct, now_ns)

    def of(self, uid: int) -> Any:
        """Return the struct pg_time_share of a uid."""
        share = self._known.get(uid)
        if share is None:
            share = self._known[uid] = ffi.new("struct pg_time_share *", {"uid": uid})
        return share

    def used(self, uid: int) -> bool:
        """Return whether a uid has used up its share."""
        share = self._known.get(uid)
        return share is not None and bool(lib.pg_time_share_used(self.struct, share))

    def charge(self, uid: int, begun_ns: int, ended_ns: int) -> None:
        """Charge a uid for a message."""
        share = self.of(uid)
        self._charged.append(share)
        lib.pg_time_share_charge(self.struct, share, begun_ns, ended_ns)

"""After an outage, apply the triggers that were sent in time before operations expire.

While the daemon is stopped or its loop is late, triggers wait in the sockets, and clients send
again what got no answer. Operations wait for as long as such a trigger may take:

* After a start and after an outage of LONG_NS or more they wait for GRACE_NS. A client asks again
  after 0.1 s of silence, and doubles its pause up to RESEND_MAX_NS. The length of the outage does
  not bound that pause: the client may have waited before, for a disk or through an earlier outage.
  So what was lost is sent again within RESEND_MAX_NS, and the rest of GRACE_NS is the time to
  connect and to greet.
* After an iteration that was late by LATE_NS or more, but less than LONG_NS, they wait as long as
  it was late. That is shorter than a client's first pause. What was sent is in the socket.

Another long outage puts off the release of those that wait, so many times; a loop that is always
late does not. Timers do not wait. What time a message carries decides nothing.
"""

from __future__ import annotations

from purgatoryd.shm_layout.arena import NONE_NS, Arena
from purgatoryd.shm_layout.wire import RESEND_MAX_NS

GRACE_NS = RESEND_MAX_NS + 500_000_000
"""The longest wait: the longest pause of a client, and the time to connect and to greet."""
LATE_NS = 10_000_000
"""An iteration that begins so late follows an outage."""
LONG_NS = 100_000_000
"""A long outage. A flood alone makes no iteration so late, and it is a client's first pause."""
LONG_OUTAGES_MAX = 10
"""That put off the release of an operation."""


class Grace:
    """Decides whether operations may expire. Times are CLOCK_BOOTTIME, which is also the arena's
    clock: a virtual clock has no outages."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._served_ns: int | None = None
        """When operations had their turn last; None = not since the start."""
        self._planned_ns = 0
        """When the next iteration is to begin at the latest."""
        self._put_off = 0
        """Long outages that put off the release."""
        self.ends_ns = NONE_NS
        """When operations may expire again; NONE_NS = they may."""

    def begin_iteration(self, now_ns: int) -> None:
        """Before an iteration expires anything."""
        late_ns = GRACE_NS if self._served_ns is None else now_ns - self._planned_ns
        again = late_ns >= LONG_NS and self._put_off < LONG_OUTAGES_MAX
        if now_ns >= self.ends_ns and not again:
            self.ends_ns = NONE_NS
            self._arena.release_operations()
        if late_ns >= LATE_NS:
            self._hold(now_ns, late_ns, again=again)
        self._served_ns = self._planned_ns = now_ns

    def _hold(self, now_ns: int, late_ns: int, *, again: bool) -> None:
        after_ns = -1 if self._served_ns is None else self._served_ns
        nobody_waits = self._arena.hold_operations(after_ns, now_ns, again=again)
        self._put_off = 0 if nobody_waits else self._put_off + again
        if nobody_waits or again:
            ends_ns = 0 if self.ends_ns == NONE_NS else self.ends_ns
            wait_ns = late_ns if late_ns < LONG_NS else GRACE_NS
            self.ends_ns = max(ends_ns, now_ns + wait_ns)

    def sleep(self, until_ns: int) -> None:
        """The loop has nothing to do before `until_ns`."""
        self._planned_ns = until_ns

"""After an outage, apply triggers that were sent in time before operations expire.

While the daemon is stopped or its loop is late, triggers wait in the sockets, and clients send
unanswered triggers again. The daemon delays the expiry of operations until these triggers have
arrived:

* After a start and after an outage of LONG_NS or more the delay is GRACE_NS. A client sends a
  trigger again after 0.1 s without an answer, and doubles this interval each time, up to
  RESEND_MAX_NS. The interval may be longer than the outage, because the client may have begun to
  wait before the outage: for a slow disk, or in an earlier outage. So a lost trigger is sent again
  within RESEND_MAX_NS. The rest of GRACE_NS is for connecting and sending HELLO.
* An iteration that was late by LATE_NS to LONG_NS breaks no connection and loses no trigger: all
  triggers wait in the sockets. The delay is at least as long as the iteration was late, so that
  libzmq's thread can read all messages from the kernel. The delay then lasts until the waiting
  messages have been applied, at most GRACE_NS. If a waiting message was dropped for lack of memory,
  the delay is GRACE_NS.

Another long outage prolongs the delay, at most LONG_OUTAGES_MAX times, so a loop that is always
late does not delay expiry forever. An operation expires at most GRACE_NS after the end of an
outage, or after the last of up to LONG_OUTAGES_MAX outages that prolonged the delay. Timers are not
delayed. The time in a message has no influence.
"""

from __future__ import annotations

from typing import Protocol

from purgatoryd.shm_layout.arena import NONE_NS, Arena
from purgatoryd.shm_layout.wire import RESEND_MAX_NS

GRACE_NS = RESEND_MAX_NS + 500_000_000
"""The longest delay: a client's longest resend interval, plus the time to connect and send
HELLO."""
LATE_NS = 10_000_000
"""An iteration that begins this much later than planned follows an outage."""
LONG_NS = 100_000_000
"""Shortest length of a long outage: a client's first resend interval. A flood of messages alone
does not delay an iteration this much."""
LONG_OUTAGES_MAX = 10
"""Number of long outages that may prolong a delay."""


class Messages(Protocol):
    """The client messages that wait in the sockets after an outage."""

    def note_wakeup(self) -> None:
        """Note that the loop woke up after an outage."""
        ...

    def caught_up(self) -> bool:
        """Return whether the messages that waited at note_wakeup() have been applied."""
        ...


class Grace:
    """Decides whether operations may expire. Times are CLOCK_BOOTTIME, like the times of the arena.
    Under a virtual clock the loop begins no delay."""

    def __init__(self, arena: Arena, messages: Messages) -> None:
        self._arena = arena
        self._messages = messages
        self._served_ns: int | None = None
        """Time at which the last iteration began; None = there was none since the start."""
        self._planned_ns = 0
        """Latest time at which the next iteration is planned to begin."""
        self._put_off = 0
        """Number of long outages that prolonged the current delay."""
        self._latest_ns = 0
        """Latest end of the current delay."""
        self.ends_ns = NONE_NS
        """Time at which the delay may end; NONE_NS = operations may expire."""

    def begin_iteration(self, now_ns: int) -> None:
        """Begin or end a delay; called before an iteration expires operations."""
        late_ns = GRACE_NS if self._served_ns is None else now_ns - self._planned_ns
        again = late_ns >= LONG_NS and self._put_off < LONG_OUTAGES_MAX
        if now_ns >= self.ends_ns and not again:
            self._end(now_ns)
        if late_ns >= LATE_NS:
            self._hold(now_ns, late_ns, again=again)
        self._served_ns = self._planned_ns = now_ns

    def _end(self, now_ns: int) -> None:
        """End the delay, or check again LATE_NS later if messages still wait."""
        if now_ns >= self._latest_ns or self._messages.caught_up():
            self.ends_ns = NONE_NS
            self._arena.release_operations()
        else:
            self.ends_ns = min(now_ns + LATE_NS, self._latest_ns)

    def _hold(self, now_ns: int, late_ns: int, *, again: bool) -> None:
        after_ns = -1 if self._served_ns is None else self._served_ns
        nobody_waits = self._arena.hold_operations(after_ns, now_ns, again=again)
        self._put_off = 0 if nobody_waits else self._put_off + again
        if nobody_waits or again:
            ends_ns = 0 if self.ends_ns == NONE_NS else self.ends_ns
            wait_ns = late_ns if late_ns < LONG_NS else GRACE_NS
            self.ends_ns = max(ends_ns, now_ns + wait_ns)
            self._latest_ns = now_ns + GRACE_NS
            self._messages.note_wakeup()

    def sleep(self, until_ns: int) -> None:
        """Note that the loop has no work before `until_ns`."""
        self._planned_ns = until_ns

    def iterated(self, begun_ns: int) -> None:
        """Note iterations that were done within a sleep. The last of them began at `begun_ns`."""
        self._served_ns = begun_ns

"""What the clients hand to their callers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime

from purgatoryd.clients.times import wall_time
from purgatoryd.shm_layout.layout import Cause, Status
from purgatoryd.shm_layout.wire import Key, OperationInfo, Verdict


class CancelResult(enum.Enum):
    """What a cancel found."""

    CANCELLED = Status.CANCELLED
    """The timer was armed and is gone; no notice will come."""
    FIRED = Status.FIRED
    """Too late: its notice is in the replay buffer."""
    UNKNOWN = Status.UNKNOWN
    """No such timer, or it fired so long ago that the replay buffer forgot it."""


@dataclass(frozen=True, slots=True)
class TimerInfo:
    """A timer as the daemon knows it.

    `deadline_boot_ns` is on the daemon's clock (CLOCK_BOOTTIME, or virtual time); `status`
    is ADDED, REPLACED, KEPT, EXTENDED or PARKED after an add, FOUND or PARKED after a get. After
    KEPT, topic and payload are those of the call, not those of the timer that stayed. A parked
    timer's payload is not in the daemon: it is empty here.
    """

    key: Key
    namespace: str
    topic: str
    ticket: int
    deadline_boot_ns: int
    status: Status
    payload: bytes = b""
    deadline_at: datetime | None = None
    """The absolute wall deadline, if the timer follows the wall clock (get only)."""
    operation: OperationInfo | None = None
    """Condition, owner and watermarks, if the key is an operation's (get only)."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One timer that fired, or one operation that ended and then has a `verdict`.

    `seq` counts the topic's notices from 1 without a hole. All `_boot_ns` are on the daemon's
    clock; `received_boot_ns` is when this process took the message from its socket, None
    under the virtual clock, with a daemon of a version with another ABI, and from a daemon on
    another host.
    """

    key: Key
    payload: bytes
    topic: str
    namespace: str
    seq: int
    ticket: int
    cause: Cause
    deadline_boot_ns: int
    fired_boot_ns: int
    wall_offset_ns: int
    received_boot_ns: int | None
    flags: int
    verdict: Verdict | None = None

    @property
    def fired_at(self) -> datetime:
        """When it fired, as an aware UTC datetime."""
        return wall_time(self.fired_boot_ns + self.wall_offset_ns)

    @property
    def lateness_ns(self) -> int:
        """Receipt minus deadline; firing minus deadline where the receipt has no time."""
        end_ns = self.received_boot_ns
        return (self.fired_boot_ns if end_ns is None else end_ns) - self.deadline_boot_ns

    @property
    def structural_lateness_ns(self) -> int:
        """Firing minus deadline: the part that the wheel and the daemon's wake-up caused."""
        return self.fired_boot_ns - self.deadline_boot_ns

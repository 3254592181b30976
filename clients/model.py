"""Results that the clients return."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime

from purgatoryd.clients.times import wall_time
from purgatoryd.shm_layout.layout import Cause, Status
from purgatoryd.shm_layout.wire import Key, OperationInfo, Verdict


class CancelResult(enum.Enum):
    """Result of a cancel."""

    CANCELLED = Status.CANCELLED
    """The timer was armed, and no notice will come."""
    FIRED = Status.FIRED
    """Too late: its notice is in the replay buffer."""
    UNKNOWN = Status.UNKNOWN
    """No such timer, or its notice has left the replay buffer."""


@dataclass(frozen=True, slots=True)
class TimerInfo:
    """A timer as the daemon knows it.

    `deadline_boot_ns` is on the daemon's clock (CLOCK_BOOTTIME, or virtual time). `status` is
    ADDED, REPLACED, KEPT, EXTENDED or PARKED after an add, FOUND or PARKED after a get. After KEPT,
    topic and payload are those of the call, not those of the timer that stayed. The payload of a
    parked timer is empty here, because the daemon does not have it.
    """

    key: Key
    namespace: str
    topic: str
    ticket: int
    deadline_boot_ns: int
    status: Status
    payload: bytes = b""
    deadline_at: datetime | None = None
    """The deadline on the wall clock, if the timer follows that clock (get only)."""
    operation: OperationInfo | None = None
    """Condition, owner and watermarks, if the key is an operation's (get only)."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Message about one timer that fired, or one operation that ended and then has a `verdict`.

    `seq` counts the topic's notices from 1 without a gap. All `_boot_ns` are on the daemon's clock.
    `received_boot_ns` is when this process took the message from its socket. It is None under the
    virtual clock, with a daemon of a version with another ABI, and with a daemon on another host.
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
        """Time at which it fired, as an aware UTC datetime."""
        return wall_time(self.fired_boot_ns + self.wall_offset_ns)

    @property
    def lateness_ns(self) -> int:
        """Receipt minus deadline; firing minus deadline if there is no time of receipt."""
        end_ns = self.received_boot_ns
        return (self.fired_boot_ns if end_ns is None else end_ns) - self.deadline_boot_ns

    @property
    def structural_lateness_ns(self) -> int:
        """Firing minus deadline: the lateness that the wheel and the daemon's wake-up caused."""
        return self.fired_boot_ns - self.deadline_boot_ns

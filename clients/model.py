"""Results that the clients return."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeVar, overload

from purgatoryd.clients.items import OrderHash
from purgatoryd.clients.times import Late, wall_time
from purgatoryd.shm_layout.layout import NOTICE_OF_SCHEDULE, Cause, Status
from purgatoryd.shm_layout.wire import Key, OperationInfo, Verdict

Item = TypeVar("Item", covariant=True)


class CancelResult(enum.Enum):
    """Result of a cancel."""

    CANCELLED = Status.CANCELLED
    """The timer was armed, and no notice will come."""
    FIRED = Status.FIRED
    """Too late: the timer has fired, and its notice is in the replay buffer, or a job waits."""
    LEASED = Status.LEASED
    """Too late: the timer has fired, and a member of a consumer group holds its job."""
    UNKNOWN = Status.UNKNOWN
    """There is no such timer, or its notice has left the replay buffer."""


class Codes(Sequence[Item]):
    """Results as an array of codes, one byte each; a result becomes an object on demand. A list of
    the same results is equal to it."""

    __slots__ = ("_kind", "codes")

    def __init__(self, codes: bytes, kind: Callable[[int], Item]) -> None:
        """`kind`: makes the object of a code."""
        self.codes = codes
        self._kind = kind

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Codes[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Codes[Item]:
        if isinstance(index, slice):
            return Codes(self.codes[index], self._kind)
        return self._kind(self.codes[index])

    def __iter__(self) -> Iterator[Item]:
        made = {code: self._kind(code) for code in set(self.codes)}
        return map(made.__getitem__, self.codes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Codes):
            return self._kind is other._kind and self.codes == other.codes
        return list(self) == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(frozen=True, slots=True)
class TimerInfo:
    """A timer as the daemon knows it.

    `deadline_boot_ns` is on the daemon's clock (CLOCK_BOOTTIME, or virtual time). `status` is
    ADDED, REPLACED, KEPT, EXTENDED or PARKED after an add, FOUND or PARKED after a get. After KEPT,
    `topic` and `payload` are the arguments of the call, not the values of the timer that stayed.
    The payload of a parked timer is empty here, because the daemon does not have it.
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
    """Condition, owner and watermarks, if the key belongs to an operation (get only)."""
    within_ns: int | None = None
    """Slack of the timer, rounded down to a power of two, ns; 0 = none (get only)."""
    tag: str | None = None
    """Tag of the timer; None = it has none (get only)."""
    late: Late | None = None
    """Own late policy of the timer; None = that of its topic applies (get only)."""
    priority: int | None = None
    """Own priority of the timer's jobs; None = that of its topic applies (get only)."""
    order_key: OrderHash | None = None
    """Hash of the order key; None = the key of the timer is the order key (get only)."""
    unique_until_boot_ns: int | None = None
    """Time until which every other add of the key is refused; None = `unique_for` was not given
    (get only)."""


class Occurrence(NamedTuple):
    """An occurrence of a schedule."""

    schedule: str
    """Key of the schedule."""
    nominal_ns: int
    """Nominal time on the wall clock, in ns since 1970."""

    @property
    def nominal(self) -> datetime:
        """Nominal time as an aware UTC datetime."""
        return wall_time(self.nominal_ns)


def occurrence_of(key: Key, flags: int) -> Occurrence | None:
    """Return the occurrence of a notice or job; None if it has no schedule."""
    if not flags & NOTICE_OF_SCHEDULE or not isinstance(key, str):
        return None
    schedule, _, nominal = key.rpartition("@")
    return Occurrence(schedule, int(nominal))


@dataclass(frozen=True, slots=True)
class Notice:
    """A message about a timer that fired, or about an operation that ended.

    `seq` counts the topic's notices from 1 without a gap. All fields that end in `_boot_ns` are on
    the daemon's clock. `received_boot_ns` is the time at which this process took the notice from
    its socket or from the arena. It is None under the virtual clock, and if the daemon has another
    ABI or is on another host. `verdict` is set if an operation ended.
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
    missed: int = 0
    """Late timers of the topic that ended without a notice before this one, by policy coalesce."""

    @property
    def fired_at(self) -> datetime:
        """Time of firing, as an aware UTC datetime."""
        return wall_time(self.fired_boot_ns + self.wall_offset_ns)

    @property
    def occurrence(self) -> Occurrence | None:
        """Schedule and nominal time, if the timer was an occurrence of a schedule. Together they
        are the idempotency key: each occurrence has another one."""
        return occurrence_of(self.key, self.flags)

    @property
    def lateness_ns(self) -> int:
        """Time of receipt minus deadline. If the time of receipt is unknown, the time of firing is
        used instead."""
        end_ns = self.received_boot_ns
        return (self.fired_boot_ns if end_ns is None else end_ns) - self.deadline_boot_ns

    @property
    def structural_lateness_ns(self) -> int:
        """Time of firing minus deadline: lateness caused by the wheel and the daemon's wake-up."""
        return self.fired_boot_ns - self.deadline_boot_ns

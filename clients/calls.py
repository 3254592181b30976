"""The signatures that Client and AsyncClient share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

from purgatoryd.clients._pack import Answer, Direct
from purgatoryd.clients.arguments import check_flag
from purgatoryd.clients.core import Core, Mode
from purgatoryd.clients.items import OrderKey
from purgatoryd.clients.packing import Entry, Pending, PendingAdd, PendingCancel
from purgatoryd.clients.times import Late
from purgatoryd.shm_layout.wire import Key

Added = TypeVar("Added", covariant=True)
AddedLater = TypeVar("AddedLater", covariant=True)
Cancelled = TypeVar("Cancelled", covariant=True)
CancelledLater = TypeVar("CancelledLater", covariant=True)


class Kind(NamedTuple):
    """A kind of call."""

    prepare: Callable[..., Entry[Any]]
    """The method of Core that checks the arguments of a call and returns its entry."""
    pending: Callable[[], Pending]
    direct: Callable[[Direct, Answer, float, tuple[Any, ...]], bool | None]
    """The method that makes a direct call with these arguments."""


ADD = Kind(Core.put, PendingAdd, Direct.add)
CANCEL = Kind(Core.cancel, PendingCancel, Direct.cancel)
CANCEL_DELIVERED = Kind(
    partial(Core.cancel, delivered=True),
    PendingCancel,
    lambda *_: None,  # the engine sends it
)


class Options(TypedDict, total=False):
    """Keyword arguments in the overloads of add(). The defaults are in add() itself."""

    delay_ns: int | None
    deadline: datetime | None
    deadline_boot_ns: int | None
    topic: str
    payload: bytes
    mode: Mode
    within: float | timedelta | None
    tag: str | None
    priority: int | None
    order_key: OrderKey | None
    late: Late | None
    unique_for: float | timedelta | None
    timeout: float | timedelta | None


class TimerCalls(ABC, Generic[Added, AddedLater, Cancelled, CancelledLater]):
    """add() and cancel() of a client.

    The type parameters are the return types of the two methods, each with wait=True and with
    wait=False. For AsyncClient the return types are coroutines.
    """

    @overload
    def add(
        self, key: Key, delay: float | timedelta | None = None, *, wait: Literal[True] = True,
        **options: Unpack[Options],
    ) -> Added: ...  # fmt: skip

    @overload
    def add(
        self, key: Key, delay: float | timedelta | None = None, *, wait: Literal[False],
        **options: Unpack[Options],
    ) -> AddedLater: ...  # fmt: skip

    def add(
        self, key: Key, delay: float | timedelta | None = None, *,
        delay_ns: int | None = None, deadline: datetime | None = None,
        deadline_boot_ns: int | None = None, topic: str = "default", payload: bytes = b"",
        mode: Mode = "error", within: float | timedelta | None = None, tag: str | None = None,
        priority: int | None = None, order_key: OrderKey | None = None, late: Late | None = None,
        unique_for: float | timedelta | None = None,
        wait: bool = True, timeout: float | timedelta | None = None,
    ) -> Added | AddedLater:  # fmt: skip
        """Arm a timer. Exactly one of the four times must be given.

        `delay`: seconds or a timedelta; `delay_ns`: nanoseconds; `deadline`: an aware datetime (the
        timer then follows the wall clock); `deadline_boot_ns`: a time on the daemon's clock.
        `payload`: 0 to 65536 bytes. `mode`: the effect if the key is armed: "error" raises Exists,
        "replace" arms it again, "keep" leaves the timer as it is, "extend" moves its deadline, but
        only to a later time. `within`: the slack, in seconds or as a timedelta of at most 19.5
        hours. The timer may fire up to this long after its deadline, to share a wake-up.
        Default: the topic's slack; 0 = none. `tag`: 1 to 63 bytes of UTF-8, by which timers can be
        selected later. `late`: its end if it is late, "fire", ("skip", grace) or ("coalesce",
        grace), as in Admin.set_topic. Default: that of the topic.

        `priority`: 0 to 9; a consumer group leases the most urgent waiting job first, 9 before 0. A
        waiting job gains one priority in 10 s. Default: that of the topic. `order_key`: groups with
        ordered=True lease at most one job of this key at a time, in the order of deadlines.
        Default: the key of the timer. A kept or extended timer keeps slack, tag, late policy,
        priority and order key.

        `unique_for`: seconds or a timedelta of at most 365 days. For this time every other add of
        the key raises Exists, also after the notice and after the ack; mode "keep" keeps the timer
        while it is pending. A cancel of the pending timer ends this time.

        `timeout`: seconds or a timedelta to wait for the answer, default the client's.

        Returns the timer as TimerInfo. With wait=False it returns a handle at once, and the call is
        sent together with others. Raises InvalidArgument, Refused (Exists, Full, ...), DaemonError;
        with wait=False QueueFull if the queue stays full for `timeout`.
        """

        times = delay, delay_ns, deadline, deadline_boot_ns
        given = topic, payload, mode, within, tag, priority, order_key, late, unique_for
        arguments = key, *times, *given
        # The call and the return share a line: an interrupt between them would lose the result.
        return self._made(ADD, arguments, wait, timeout)  # type: ignore[no-any-return]

    @overload
    def cancel(
        self, key: Key, *, ticket: int = 0, delivered: bool = False, wait: Literal[True] = True,
        timeout: float | timedelta | None = None,
    ) -> Cancelled: ...  # fmt: skip

    @overload
    def cancel(
        self, key: Key, *, ticket: int = 0, delivered: bool = False, wait: Literal[False],
        timeout: float | timedelta | None = None,
    ) -> CancelledLater: ...  # fmt: skip

    def cancel(
        self, key: Key, *, ticket: int = 0, delivered: bool = False, wait: bool = True,
        timeout: float | timedelta | None = None,
    ) -> Cancelled | CancelledLater:  # fmt: skip
        """Disarm the key's timer; with `ticket`, only the timer that has this ticket.

        `delivered`: if the timer has fired, end its jobs that no consumer holds. Returns a
        CancelResult, or a handle as add() does. UNKNOWN, FIRED and LEASED are results, not
        errors. Raises the same errors as add().
        """
        plain = delivered is False or not check_flag("delivered", delivered)
        kind = CANCEL if plain else CANCEL_DELIVERED
        return self._made(kind, (key, ticket), wait, timeout)  # type: ignore[no-any-return]

    @abstractmethod
    def _made(
        self, kind: Kind, arguments: tuple[Any, ...], wait: bool, timeout: float | timedelta | None
    ) -> Any:
        """Make a call. With `wait` return its outcome, else a handle."""

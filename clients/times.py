"""The time arguments of a call, checked and turned into (kind, nanoseconds).

Exactly one of four arguments says when a timer is due:

    delay             seconds (int, float) or timedelta, counted from the call
    delay_ns          whole nanoseconds, counted from the call
    deadline          an aware datetime; the timer follows the wall clock
    deadline_boot_ns  a time on the daemon's own clock: CLOCK_BOOTTIME, or virtual time

A timer with a negative delay is due at once. Under the real clock the client computes the deadline
at the call, so that packing, queueing and resending do not extend the delay. Under the virtual
clock the daemon computes the deadline when it applies the call.
"""

from __future__ import annotations

import math
import operator
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from purgatoryd.shm_layout.errors import InvalidArgument, InvalidTime
from purgatoryd.shm_layout.layout import (
    LATE_GRACE_MAX_NS,
    LATE_GRACE_MIN_NS,
    SLACK_MAX_NS,
    TIME_MAX_NS,
    UNIQUE_MAX_NS,
    ClockKind,
    LatePolicy,
    TimeKind,
)

Late = Literal["fire"] | tuple[Literal["skip", "coalesce"], float | timedelta]
"""End of a late timer. The tuple has the grace, in seconds or as a timedelta."""
BOOT, DELAY, WALL = int(TimeKind.BOOT), int(TimeKind.DELAY), int(TimeKind.WALL)
FAR_S = 1e10  # above TIME_MAX_NS, but still finite in nanoseconds
TOO_FAR = f"is too far: the largest deadline is {TIME_MAX_NS} ns on the daemon's clock"
_SECONDS = "must be a number of seconds or a timedelta"
_NANOSECONDS = "must be a whole number of nanoseconds"
_ARGUMENTS = "delay, delay_ns, deadline, deadline_boot_ns"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def due(
    clock: int,
    now_ns: int,
    delay: float | timedelta | None = None,
    delay_ns: int | None = None,
    deadline: datetime | None = None,
    deadline_boot_ns: int | None = None,
) -> tuple[int, int]:
    """Return (enum pg_time_kind, nanoseconds) of the only time argument that is not None.

    `clock` is the daemon's ClockKind. `now_ns` is the time of the call on CLOCK_BOOTTIME; it is
    used only for a delay on that clock. Raises InvalidTime.
    """
    given = (delay is not None) + (delay_ns is not None)
    given += (deadline is not None) + (deadline_boot_ns is not None)
    if given != 1:
        raise _not_one(delay, delay_ns, deadline, deadline_boot_ns)
    if deadline is not None:
        return WALL, wall_ns(deadline)
    if deadline_boot_ns is not None:
        return BOOT, _bounded(_whole(deadline_boot_ns, _NANOSECONDS), deadline_boot_ns)
    wait_ns = seconds_ns(delay) if delay is not None else _whole(delay_ns, _NANOSECONDS)
    if clock == ClockKind.VIRTUAL:
        return DELAY, _bounded(wait_ns, wait_ns)
    return BOOT, _bounded(max(wait_ns, 0) + now_ns, wait_ns)


def slack(within: float | timedelta | None) -> int:
    """Return the slack of a PUT record: 1 + log2 of `within` in ns, or 0 if `within` is None.

    A slack that is no power of two is rounded down. Raises InvalidArgument.
    """
    return 0 if within is None else max(within_ns(within), 1).bit_length()


def within_ns(within: float | timedelta) -> int:
    """Return a slack in nanoseconds. `within`: seconds or a timedelta. Raises InvalidArgument."""
    most_s = SLACK_MAX_NS / 1e9
    real = isinstance(within, int | float) and not isinstance(within, bool)
    seconds = within.total_seconds() if isinstance(within, timedelta) else within
    if not (real or isinstance(within, timedelta)) or not 0 <= seconds <= most_s:
        rule = f"a number of seconds or a timedelta from 0 to {most_s} s"
        raise InvalidArgument(f"within {within!r} must be {rule}")
    return min(seconds_ns(within), SLACK_MAX_NS)


def late_policy(late: Late | None) -> tuple[int, int] | None:
    """Return a late policy as (enum pg_late_policy, grace in ns); None if `late` is None. Raises
    InvalidArgument."""
    if late is None:
        return None
    if isinstance(late, str) and late == "fire":
        return LatePolicy.FIRE, 0
    pair = late if isinstance(late, tuple) and len(late) == 2 else ("", 0)
    if not isinstance(pair[0], str) or pair[0] not in ("skip", "coalesce"):
        rule = '"fire", ("skip", grace) or ("coalesce", grace)'
        raise InvalidArgument(f"late {late!r} must be {rule}")
    grace_ns = _span_ns("grace", pair[1], LATE_GRACE_MIN_NS, LATE_GRACE_MAX_NS)
    return LatePolicy[pair[0].upper()], grace_ns


def unique_ns(unique_for: float | timedelta | None) -> int | None:
    """Return the time for which a key is unique, in nanoseconds; None if `unique_for` is None.
    Raises InvalidArgument."""
    return None if unique_for is None else _span_ns("unique_for", unique_for, 1, UNIQUE_MAX_NS)


def late_named(late: tuple[int, int] | None) -> Late | None:
    """Return a late policy as late_policy() takes it, with the grace in seconds."""
    if late is None or late[0] == LatePolicy.FIRE:
        return None if late is None else "fire"
    return ("skip" if late[0] == LatePolicy.SKIP else "coalesce"), late[1] / 1e9


def _span_ns(name: str, span: float | timedelta, least_ns: int, most_ns: int) -> int:
    """Return a span of time in nanoseconds. Raises InvalidArgument if it is out of bounds."""
    real = isinstance(span, int | float | timedelta) and not isinstance(span, bool)
    span_ns = seconds_ns(span) if real and span == span else 0
    if not least_ns <= span_ns <= most_ns:
        rule = f"from {least_ns / 1e9} s to {most_ns / 1e9:.0f} s"
        raise InvalidArgument(f"{name} {span!r} must be a number of seconds or a timedelta {rule}")
    return span_ns


def seconds_ns(delay: Any) -> int:
    """Return seconds (int, float) or a timedelta in nanoseconds. Raises InvalidTime."""
    if type(delay) is int:
        return delay * 1_000_000_000
    if isinstance(delay, float):
        if not math.isfinite(delay):
            raise _invalid("is not finite", delay)
        return round(min(max(delay, 0.0), FAR_S) * 1e9)
    if isinstance(delay, timedelta):
        return delay // _MICROSECOND * 1000
    return _whole(delay, _SECONDS) * 1_000_000_000


def wall_ns(deadline: Any) -> int:
    """Return an aware datetime as nanoseconds since 1970 UTC. Raises InvalidTime."""
    if not isinstance(deadline, datetime):
        raise _invalid("must be a datetime", deadline)
    if deadline.utcoffset() is None:
        raise _invalid("is naive: give the datetime a time zone", deadline)
    return _bounded((deadline - _EPOCH) // _MICROSECOND * 1000, deadline)


def wall_time(wall_clock_ns: int) -> datetime:
    """Return nanoseconds since 1970 as an aware UTC datetime, truncated to microseconds."""
    return _EPOCH + timedelta(microseconds=wall_clock_ns // 1000)


def _not_one(*times: object) -> InvalidTime:
    given = tuple(time for time in times if time is not None)
    if not given:
        return _invalid(f"is missing: give one of {_ARGUMENTS}", None)
    return _invalid(f"has {len(given)} values: give only one of {_ARGUMENTS}", given)


def _whole(value: Any, rule: str) -> int:
    if isinstance(value, bool):
        raise _invalid(rule, value)
    try:
        return operator.index(value)
    except TypeError:
        raise _invalid(rule, value) from None


def _bounded(time_ns: int, given: object) -> int:
    if time_ns > TIME_MAX_NS:
        raise _invalid(TOO_FAR, given)
    return max(time_ns, 0)


def _invalid(reason: str, value: object) -> InvalidTime:
    return InvalidTime(reason=reason, value=value, limit_ns=TIME_MAX_NS)

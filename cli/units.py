"""Parse and format amounts as people write them, such as 16M, 65.536us or 2026-01-01T00:00Z."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # ParamType is generic only in newer releases of click
    Count = click.ParamType[int]
    Instant = click.ParamType[datetime]
    Share = click.ParamType[float]
else:
    Count = Instant = Share = click.ParamType

NS_PER = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
PAUSE_NS = NS_PER["ms"]
"""The shortest interval at which a command repeats its work."""
BYTES_PER = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}

_DURATION = re.compile(r"([+-]?\d+)(?:\.(\d+))?(ns|us|ms|s|m|h|d)?")
_SIZE = re.compile(r"(\d+)([KMG]?)(?:iB|B)?", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Whole(click.IntRange):
    """An integer within bounds."""

    name = "integer"  # click writes the name into its error, "is not a valid integer"


class Number(click.FloatRange):
    """A number within bounds."""

    name = "number"


class Duration(Count):
    """A time span in nanoseconds; a number without a unit is in seconds.

    `least_ns`: the shortest valid span.
    """

    name = "duration"

    def __init__(self, least_ns: int | None = None) -> None:
        self.least_ns = least_ns

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return `value` in nanoseconds, rounded up. An int is returned unchanged."""
        if isinstance(value, int):
            return value
        match = _DURATION.fullmatch(str(value).strip())
        if not match:
            self.fail(f"{value!r} is not a duration such as 250us, 1.5s, 10m, 2d.", param, ctx)
        whole, fraction, unit = match.groups(default="")
        span_ns: int = -(-int(whole + fraction) * NS_PER[unit or "s"] // 10 ** len(fraction))
        if self.least_ns is not None and span_ns < self.least_ns:
            self.fail(f"{value!r} is shorter than {format_duration(self.least_ns)}.", param, ctx)
        return span_ns


class Size(Count):
    """A number of bytes; K, M and G are powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return `value` in bytes. An int is returned unchanged."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if not match:
            self.fail(f"{value!r} is not a size such as 4096, 512K, 16M, 2G.", param, ctx)
        return int(match[1]) * BYTES_PER[match[2].upper()]


class Percent(Share):
    """A share, written as a percentage."""

    name = "percent"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return `value`, such as 99.5% or 99.5, as a share from 0 to 1."""
        match = _PERCENT.fullmatch(str(value).strip())
        if not match or float(match[1]) > 100:
            self.fail(f"{value!r} is not a percentage from 0% to 100%, such as 99.5%.", param, ctx)
        return float(match[1]) / 100


class PowerOfTwo(Count):
    """A count, rounded up to a power of two."""

    name = "count"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return the smallest power of two that is at least `value`."""
        return power_of_two(int(click.INT.convert(value, param, ctx)))


class PowerOfTwoSize(Size):
    """A number of bytes, rounded up to a power of two."""

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return the smallest power of two that is at least `value`."""
        return power_of_two(super().convert(value, param, ctx))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


class Moment(Instant):
    """A point in time in ISO 8601, with its offset from UTC."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> datetime:
        """Return `value` as an aware datetime."""
        try:
            moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a time such as 2026-01-31T12:00:00Z.", param, ctx)
        if moment.tzinfo is None:
            self.fail(f"{value!r} has no offset from UTC: add Z or +01:00.", param, ctx)
        return moment


def format_moment(moment: datetime) -> str:
    """Return an aware datetime in ISO 8601, in UTC with microseconds."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def format_wall(ns: int) -> str:
    """Return nanoseconds since 1970 in ISO 8601, in UTC with microseconds."""
    return format_moment(_EPOCH + timedelta(microseconds=ns // 1_000))


def format_duration(ns: int) -> str:
    """Return a time span with up to four digits, in the largest unit that makes it at least 1."""
    unit = next((u for u in ("d", "h", "m", "s", "ms", "us") if abs(ns) >= NS_PER[u]), "ns")
    return f"{ns / NS_PER[unit]:.4g}{unit}"


def format_size(count: int) -> str:
    """Return a size with one decimal, in the largest unit that makes it at least 1."""
    unit = next((u for u in "GMK" if abs(count) >= BYTES_PER[u]), "")
    return f"{count / BYTES_PER[unit]:,.1f} {unit}iB" if unit else f"{count} B"


def exact_duration(ns: int) -> str:
    """Return the shortest text that Duration converts to exactly `ns`."""
    unit = next((u for u in ("s", "ms", "us") if ns and ns % NS_PER[u] == 0), "ns")
    return f"{ns // NS_PER[unit]}{unit}"


def exact_size(count: int) -> str:
    """Return the shortest text that Size converts to exactly `count` bytes."""
    unit = next((u for u in "GMK" if count and count % BYTES_PER[u] == 0), "")
    return f"{count // BYTES_PER[unit]}{unit}"

"""Parse and format amounts as people write them, such as 16M, 1h30m or 2026-01-01T00:00Z."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # ParamType is generic only in newer releases of click
    Count = click.ParamType[int]
    Instant = click.ParamType[datetime]
    Limited = click.ParamType[float]
    Share = click.ParamType[float]
else:
    Count = Instant = Limited = Share = click.ParamType

NS_PER = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
    "w": 604_800_000_000_000,
}
PAUSE_NS = NS_PER["ms"]
"""The shortest interval at which a command repeats its work."""
BYTES_PER = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}

_PART = re.compile(r"(\d+)(?:\.(\d+))?(ns|us|ms|s|m|h|d|w)", re.ASCII)
_NUMBER = re.compile(r"\d+(\.\d+)?", re.ASCII)
_ENDLESS = ("inf", "never")
ENDLESS_S = 1e9
"""A wait without limit, 30 years. No clock or system call overflows within this time."""
DURATION_MAX_NS = 2**63 - 1
"""The longest duration: 292 years."""
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
    """A time span in nanoseconds, such as 1h30m.

    `least_ns`: the shortest valid span.
    """

    name = "duration"

    def __init__(self, least_ns: int = 0) -> None:
        self.least_ns = least_ns

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return `value` in nanoseconds. An int is returned unchanged."""
        if isinstance(value, int):
            return value
        try:
            span_ns = parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if span_ns < self.least_ns:
            self.fail(f"{value!r} is shorter than {format_duration(self.least_ns)}.", param, ctx)
        return span_ns


class Shift(Duration):
    """A time span in nanoseconds that may begin with a minus sign: -10m is earlier."""

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return `value` in nanoseconds. An int is returned unchanged."""
        if isinstance(value, str) and value.startswith("-"):
            return -super().convert(value[1:], param, ctx)
        return super().convert(value, param, ctx)


class Limit(Limited):
    """A time span in seconds, as the clients take it. inf and never mean no limit."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return `value` in seconds. A float is returned unchanged."""
        if isinstance(value, float):
            return value
        if value in _ENDLESS:
            return ENDLESS_S
        return min(DURATION.convert(value, param, ctx) / NS_PER["s"], ENDLESS_S)


DURATION = Duration()
"""The type of options that take any duration."""


def parse_duration(text: str) -> int:
    """Return a duration in nanoseconds.

    A duration is one or more numbers with units, from the largest unit to the smallest, each unit
    at most once, without spaces. Only the last number may have a decimal point, and only if the
    duration is a whole number of nanoseconds. Raises ValueError with the reason.
    """
    if _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} has no unit: write {text}s for seconds.")
    parts = list(_PART.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        raise ValueError(f"{text!r} is not a duration such as 250us, 1.5s, 1h30m, 2w.")
    spans_ns = [NS_PER[part[3]] for part in parts]
    if any(larger <= smaller for larger, smaller in pairwise(spans_ns)):
        raise ValueError(f"{text!r} must have each unit once, the largest first, such as 1h30m.")
    if any(part[2] for part in parts[:-1]):
        raise ValueError(f"{text!r} has a decimal point before its last unit.")
    whole_ns = sum(int(part[1]) * unit_ns for part, unit_ns in zip(parts, spans_ns, strict=True))
    fraction = parts[-1][2] or "0"
    scale: int = 10 ** len(fraction)
    more_ns, rest = divmod(int(fraction) * spans_ns[-1], scale)
    if rest:
        raise ValueError(f"{text!r} is not a whole number of nanoseconds.")
    if whole_ns + more_ns > DURATION_MAX_NS:
        raise ValueError(f"{text!r} is longer than the longest duration, 15250w.")
    return whole_ns + more_ns


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
    """A point in time: ISO 8601, or English text such as "tomorrow 9:00".

    `strict`: only ISO 8601 with an offset or a zone, for settings.
    """

    name = "time"

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def convert(self, value: Any, param: Any, ctx: Any) -> datetime:
        """Return `value` as an aware datetime. If the text has no zone or is free text, print on
        stderr how it was understood."""
        if isinstance(value, datetime):
            return value
        from purgatoryd.cli import moments

        try:
            if self.strict:
                return moments.read_strict(str(value))
            moment, understood = moments.read(str(value), now := datetime.now(UTC))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if understood and not (ctx and ctx.resilient_parsing):
            left_ns = (moment - now) // timedelta(microseconds=1) * NS_PER["us"]
            shown = f"{moment.isoformat(timespec='seconds')} ({moment.tzname()})"
            click.echo(f"{value!r} is {shown}, {format_relative(left_ns)}", err=True)
        return moment


def format_moment(moment: datetime) -> str:
    """Return an aware datetime in ISO 8601, in UTC with microseconds."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def format_wall(ns: int) -> str:
    """Return nanoseconds since 1970 in ISO 8601, in UTC with microseconds."""
    return format_moment(_EPOCH + timedelta(microseconds=ns // 1_000))


def format_duration(ns: int) -> str:
    """Return a time span for people: up to four digits below a minute, else two units, truncated,
    such as 65.54us and 2h 5m."""
    if abs(ns) >= NS_PER["m"]:
        return "-" * (ns < 0) + _two_units(abs(ns))
    unit = next((u for u in ("s", "ms", "us") if abs(ns) >= NS_PER[u]), "ns")
    return f"{ns / NS_PER[unit]:.4g}{unit}"


def _two_units(ns: int) -> str:
    names = ("d", "h", "m", "s")
    first = next(n for n, unit in enumerate(names) if ns >= NS_PER[unit])
    large, left_ns = divmod(ns, NS_PER[names[first]])
    small = left_ns // NS_PER[names[first + 1]]
    return f"{large:,}{names[first]}" + f" {small}{names[first + 1]}" * bool(small)


def format_relative(left_ns: int) -> str:
    """Return for people when something is due or has happened; negative times are in the past."""
    span = format_duration(abs(left_ns))
    return f"in {span}" if left_ns >= 0 else f"{span} ago"


def format_size(count: int) -> str:
    """Return a size with one decimal, in the largest unit that makes it at least 1."""
    unit = next((u for u in "GMK" if abs(count) >= BYTES_PER[u]), "")
    return f"{count / BYTES_PER[unit]:,.1f} {unit}iB" if unit else f"{count} B"


def wall_in(left_ns: int) -> str:
    """Return the wall time in `left_ns` from the call, in ISO 8601."""
    return format_wall(time.time_ns() + left_ns)


def exact_duration(ns: int) -> str:
    """Return the shortest text that Duration converts to exactly `ns`: a number with one unit."""
    unit = next((u for u in reversed(NS_PER) if ns and ns % NS_PER[u] == 0), "s")
    return f"{ns // NS_PER[unit]}{unit}"


def exact_size(count: int) -> str:
    """Return the shortest text that Size converts to exactly `count` bytes."""
    unit = next((u for u in "GMK" if count and count % BYTES_PER[u] == 0), "")
    return f"{count // BYTES_PER[unit]}{unit}"

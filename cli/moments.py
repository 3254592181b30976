"""Read points in time from the command line.

ISO 8601 comes first. Free text is read by free_text.py, which is imported only for text that is not
ISO 8601. A time without a zone is in the local zone. A time that this zone's clock skips or shows
twice is refused.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_ZONE = re.compile(r"(.+?)(?:\[([\w+/-]+)\]| ([A-Za-z_]+/[\w+/-]+|UTC|GMT))", re.ASCII)
_NUMERIC_DATE = re.compile(
    r"(?<!\d)(\d{1,2})[/.-](\d{1,2})[/.-](\d{4})(?!\d)|\d{1,4}[/.]\d{1,2}[/.]\d{1,4}", re.ASCII
)
_FIRST = datetime(1970, 1, 1, tzinfo=UTC)
EXAMPLES = "2026-01-31T12:00:00Z, 2026-01-31T12:00[Europe/Berlin], 'tomorrow 9:00' or 'in 2 hours'"


class Reading(NamedTuple):
    """A point in time that was read from text."""

    moment: datetime
    """An aware datetime."""
    understood: bool
    """True if the text has no zone, or is free text, so that it had to be interpreted."""


def read_strict(text: str) -> datetime:
    """Return the aware datetime of a text in ISO 8601 with an offset or a zone.

    Raises ValueError with the reason.
    """
    body, zone = _split(text)
    moment = _iso(body)
    if moment is None:
        raise ValueError(f"{text!r} is not a time such as 2026-01-31T12:00:00Z.")
    if moment.tzinfo is None and zone is None:
        raise ValueError(f"{text!r} has no offset from UTC: add Z or +01:00.")
    return _placed(text, moment, zone)


def read(text: str, now: datetime) -> Reading:
    """Return the point in time that `text` denotes at `now`, an aware datetime.

    Raises ValueError with the reason, and with texts that are unambiguous if there are any.
    """
    body, zone = _split(text.strip())
    _refuse_numeric_date(text)
    moment = _iso(body)
    if moment is not None:
        understood = moment.tzinfo is None and zone is None
        return Reading(_placed(text, moment, zone), understood)
    from purgatoryd.cli.free_text import read_free_text

    try:
        moment = read_free_text(body, now.astimezone(zone))
    except OverflowError:
        raise ValueError(f"{text!r} is after the year 9999.") from None
    if moment is None:
        raise ValueError(f"{text!r} is not a time such as {EXAMPLES}.")
    return Reading(_placed(text, moment, zone).astimezone(zone), True)


def _split(text: str) -> tuple[str, ZoneInfo | None]:
    """Return `text` without its zone, and the zone."""
    found = _ZONE.fullmatch(text)
    if not found:
        return text, None
    name = found[2] or found[3]
    try:
        return found[1], ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"{name!r} is not a time zone of this host, such as Europe/Berlin."
        ) from None


def _iso(text: str) -> datetime | None:
    """Return the datetime of a text in ISO 8601, with or without an offset; None for other text."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _placed(text: str, moment: datetime, zone: ZoneInfo | None) -> datetime:
    """Return `moment` as an aware datetime. If it has no offset, it is in `zone`; None is the local
    zone."""
    if moment.tzinfo is None:
        moment = _only(text, moment, zone)
    elif zone and moment.utcoffset() != moment.astimezone(zone).utcoffset():
        there = moment.astimezone(zone).isoformat()
        raise ValueError(f"{text!r} has an offset that {zone.key} does not have then: {there}.")
    if moment < _FIRST:
        raise ValueError(f"{text!r} is before 1970.")
    return moment


def _only(text: str, wall: datetime, zone: ZoneInfo | None) -> datetime:
    """Return the one moment at which the clock of `zone` shows `wall`, a naive datetime."""
    first, second = (wall.replace(fold=n, tzinfo=zone).astimezone(UTC) for n in (0, 1))
    if first == second:
        return first.astimezone(zone)
    where = zone.key if zone else "the local zone"
    choice = " or ".join(one.astimezone(zone).isoformat() for one in sorted((first, second)))
    twice = first.astimezone(zone).replace(tzinfo=None) == wall
    happens = "happens twice" if twice else "does not exist"
    raise ValueError(f"{text!r} {happens} in {where}, where the clock changes: write {choice}.")


def _refuse_numeric_date(text: str) -> None:
    """Raise ValueError if `text` has a date such as 03/04/2026, whose order depends on the
    country."""
    found = _NUMERIC_DATE.search(text)
    if not found:
        return
    first, second, year = found.groups(default="")
    texts = {f"{year}-{a:0>2}-{b:0>2}" for a, b in ((first, second), (second, first))}
    choice = " or ".join(sorted(filter(_is_date, texts))) or "YYYY-MM-DD"
    raise ValueError(f"{text!r} has an ambiguous date: write {choice}.")


def _is_date(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False

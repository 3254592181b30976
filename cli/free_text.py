"""Read a point in time from English text, such as "tomorrow 9:00" or "in 2 hours".

The module is imported only for text that is not ISO 8601. Text with more than one meaning is
refused: a date library would guess, for example the next May 27 for "may".
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta

from purgatoryd.cli.units import NS_PER, parse_duration

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december",
)  # fmt: skip
_UNITS = {
    "second": "s", "sec": "s", "minute": "m", "min": "m", "hour": "h", "hr": "h", "day": "d",
    "week": "w",
}  # fmt: skip
_NEAR_DAYS = {"yesterday": -1, "today": 0, "tomorrow": 1}
_PART = re.compile(r"(\d+|an?) ?([a-z]+?)s?(?:,? and |, | |$)", re.ASCII)
_CLOCK = r"(?P<hour>\d{1,2})(?::(?P<minute>\d{2})(?::(?P<second>\d{2}))?)? ?(?P<half>am|pm)?|noon"
_TIME_LAST = re.compile(rf"(?P<day>.+?),? (?:at )?(?P<time>{_CLOCK})", re.ASCII)
_TIME_FIRST = re.compile(rf"(?:at )?(?P<time>{_CLOCK}),? (?:on )?(?P<day>.+)", re.ASCII)
_TIME_ONLY = re.compile(rf"(?:at )?(?:{_CLOCK})", re.ASCII)
_DAY_MONTH = re.compile(r"(\d{1,2})(?:st|nd|rd|th)? (?:of )?([a-z]+),? ?(\d{4})?", re.ASCII)
_MONTH_DAY = re.compile(r"([a-z]+) (\d{1,2})(?:st|nd|rd|th)?,? ?(\d{4})?", re.ASCII)


def read_free_text(text: str, now: datetime) -> datetime | None:
    """Return the time that `text` denotes; None if it denotes none.

    `now`: the current time in the zone of the text. The result has the zone of `now` if the text
    counts from `now`, else it is naive, in that zone. Raises ValueError, with the reason, for text
    that has several meanings.
    """
    words = " ".join(text.lower().split())
    if words == "now":
        return now
    if words.startswith("in "):
        return _moved(now, _span(words.removeprefix("in ")))
    if words.endswith(" ago"):
        span = _span(words.removesuffix(" ago"))
        return _moved(now, None if span is None else -span)
    for pattern in (_TIME_LAST, _TIME_FIRST):
        found = pattern.fullmatch(words)
        if found and (day := _day(text, found["day"], now.date())):
            return datetime.combine(day, _time(text, found))
    if _day(text, words, now.date()):
        raise ValueError(f"{text!r} has no time of day: write for example {text} 9:00.")
    if _TIME_ONLY.fullmatch(words) and not words.isdecimal():
        raise ValueError(f"{text!r} has no day: write today {text} or tomorrow {text}.")
    return None


def _moved(now: datetime, span: timedelta | None) -> datetime | None:
    """Return the time after a span of physical time, whatever the clock of the zone does."""
    return None if span is None else (now.astimezone(UTC) + span).astimezone(now.tzinfo)


def _span(words: str) -> timedelta | None:
    """Return the time span of words such as "2 hours 30 minutes", "an hour" or "2h30m"."""
    try:
        return timedelta(microseconds=parse_duration(words) // NS_PER["us"])
    except ValueError:
        pass
    parts = list(_PART.finditer(words))
    known = all(part[2] in _UNITS for part in parts)
    if not parts or not known or "".join(part[0] for part in parts) != words:
        return None
    counts = (1 if part[1].startswith("a") else int(part[1]) for part in parts)
    total_ns = sum(
        count * NS_PER[_UNITS[part[2]]] for count, part in zip(counts, parts, strict=True)
    )
    return timedelta(microseconds=total_ns // NS_PER["us"])


def _time(text: str, found: re.Match[str]) -> time:
    if found["time"] == "noon":
        return time(12)
    hour, half = int(found["hour"]), found["half"]
    if half is None and found["minute"] is None:
        hint = f"{hour}:00 or {hour}am or {hour}pm"
        raise ValueError(f"{text!r} has an ambiguous time: write {hint}.")
    if half is not None:
        if not 1 <= hour <= 12:
            raise ValueError(f"{text!r} has an hour that is not from 1 to 12.")
        hour = hour % 12 + 12 * (half == "pm")
    try:
        return time(hour, int(found["minute"] or 0), int(found["second"] or 0))
    except ValueError:
        raise ValueError(f"{text!r} has no such time of day.") from None


def _day(text: str, words: str, today: date) -> date | None:
    """Return the day that `words` denote, or None. `text`: the whole text, for errors."""
    if words in _NEAR_DAYS:
        return today + timedelta(days=_NEAR_DAYS[words])
    which, _, name = words.rpartition(" ")
    weekday = _index(_DAYS, name)
    if weekday is not None and which in ("", "on", "next", "last"):
        return _weekday(text, which, weekday, today)
    try:
        return date.fromisoformat(words)
    except ValueError:
        return _calendar_day(text, words)


def _weekday(text: str, which: str, weekday: int, today: date) -> date:
    """Return the first such weekday after `today`, for "last" the last one before it."""
    ahead = (weekday - today.weekday() - 1) % 7 + 1
    if which == "last":
        return today - timedelta(days=(today.weekday() - weekday - 1) % 7 + 1)
    if ahead == 7 and which != "next":
        raise ValueError(
            f"{text!r} may be today or in a week: write today or next {_DAYS[weekday]}."
        )
    return today + timedelta(days=ahead)


def _calendar_day(text: str, words: str) -> date | None:
    """Return the day of words such as "3 april 2026" or "april 3, 2026"."""
    found = _DAY_MONTH.fullmatch(words)
    day, name, year = found.groups() if found else ("", "", "")
    if not found and (found := _MONTH_DAY.fullmatch(words)):
        name, day, year = found.groups()
    month = _index(_MONTHS, name)
    if month is None:
        return None
    if not year:
        raise ValueError(f"{text!r} has no year.")
    try:
        return date(int(year), month + 1, int(day))
    except ValueError:
        raise ValueError(f"{text!r} has no such date.") from None


def _index(names: tuple[str, ...], name: str) -> int | None:
    """Return the place of `name` in `names`; the first three letters are enough."""
    return next((n for n, one in enumerate(names) if name in (one, one[:3])), None)

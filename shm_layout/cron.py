"""Nominal times of cron expressions.

An expression has five fields (minute, hour, day of month, month, day of week) or is one of the
words in `WORDS`. It follows the local time of a zone:

* A local time that a zone skips occurs at the end of the gap; several of them are one occurrence.
* A local time that a zone repeats occurs once, the first time.
* If the minute or the hour begins with `*`, the occurrences follow elapsed time instead: a repeated
  hour has its occurrences twice, and a skipped hour has none. If a zone repeats less than an hour,
  a minute that does not begin with `*` occurs once in this hour, the first time.
"""

from __future__ import annotations

import os
import zoneinfo
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo

from cronsim import CronSim, CronSimError

WORDS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
FIELDS = 5
SECOND_NS = 1_000_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_NS = 2**63 - 2 * 366 * 86_400 * SECOND_NS
"""Latest time from which a search begins, two years before the end of the clock."""
_PREVIEW = timedelta(days=50 * 366)
"""A list of many times ends this long after its start."""
_HOUR = timedelta(hours=1)
_MINUTE = 1
"""Place of the minute among the parts of an expression, after the second."""
_ALWAYS = 3
"""Number of times that are searched for without that limit."""


class BadSpec(ValueError):
    """A cron expression or a zone cannot be read."""


def fields_of(spec: str) -> str:
    """Return the five fields of an expression. Raises BadSpec."""
    fields = WORDS.get(spec.strip().lower(), spec).strip()
    if len(fields.split()) != FIELDS:
        words = ", ".join(WORDS)
        raise BadSpec(f"a cron expression has {FIELDS} fields or is one of {words}, not {spec!r}")
    return fields


def zone_of(name: str) -> tzinfo:
    """Return the zone of this name in the tz database; "" = UTC. Raises BadSpec."""
    if name in ("", "UTC"):
        return UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise BadSpec(f"no time zone {name!r} in the tz database of this host") from error


def check(spec: str, zone: str) -> None:
    """Raise BadSpec unless expression and zone can be read."""
    _search(spec, zone, 0)


def times(spec: str, zone: str, after_ns: int, until_ns: int, count: int) -> list[int]:
    """Return the first `count` nominal times after `after_ns` and not after `until_ns`, in ns since
    1970. Fewer = no more follow. A search for more than 3 times ends after 50 years. Raises
    BadSpec."""
    found: list[int] = []
    if after_ns > _LAST_NS:
        check(spec, zone)
        return found
    end_ns = until_ns
    if count > _ALWAYS:
        end_ns = min(until_ns, after_ns + int(_PREVIEW.total_seconds()) * SECOND_NS)
    for time_ns in _search(spec, zone, after_ns):
        if time_ns > end_ns or len(found) == count:
            break
        found.append(time_ns)
    return found


class _Search(CronSim):
    """A search that finds all hours and minutes after a change of the offset by half an hour."""

    def advance_hour(self) -> bool:
        """Go to the begin of the next hour that matches. Return False if this hour matches."""
        if self.dt.hour in self.hours:
            return False
        while self.dt.hour not in self.hours:
            self.tick(seconds=3600 - 60 * self.dt.minute - self.dt.second)
            if self.dt.hour == 0:
                break  # the day may not match
        return True

    def advance_minute(self) -> bool:
        """Go to the next minute that matches or begins an hour; near a change of the offset, to the
        next minute. Return False if this minute matches."""
        if self.dt.minute in self.minutes:
            return False
        start = self.dt = self.dt.replace(second=0)
        after = min(m for m in (*self.minutes, 60) if m > start.minute)
        self.tick(seconds=60 * (after - start.minute))
        if self.dt.utcoffset() != start.utcoffset():
            self.dt = start
            self.tick(seconds=60)
        return True

    def repeats_minute(self, local: datetime) -> bool:
        """Return whether `local` is a minute that occurred before in the same hour."""
        before, after = local.replace(fold=0).utcoffset(), local.utcoffset()
        return (
            local.fold == 1
            and not self.parts[_MINUTE].startswith("*")
            and before is not None
            and after is not None
            and before - after < _HOUR
        )


def _search(spec: str, zone: str, after_ns: int) -> Iterator[int]:
    """Return the ascending nominal times after `after_ns`. Raises BadSpec at once."""
    start = (_EPOCH + timedelta(seconds=after_ns // SECOND_NS)).astimezone(zone_of(zone))
    fields = fields_of(spec)
    try:
        search = _Search(fields, start)
    except (CronSimError, AssertionError, ValueError) as error:
        raise BadSpec(f"not a cron expression: {spec!r} ({error})") from error
    return _ascending(search, after_ns)


def _ascending(search: _Search, after_ns: int) -> Iterator[int]:
    last_ns = after_ns
    try:
        for local in search:
            time_ns = round((local - _EPOCH).total_seconds()) * SECOND_NS
            if time_ns > _LAST_NS:
                return
            if search.repeats_minute(local):
                continue
            if time_ns > last_ns:  # else a repeated local time, or another one of the same gap
                last_ns = time_ns
                yield time_ns
    except (OverflowError, ValueError):  # past the year 9999
        return


def zone_files(zones: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return inode and time of change of each zone's file; they change with an update of the tz
    database."""
    found = {}
    for zone in zones:
        for directory in zoneinfo.TZPATH:
            try:
                state = os.stat(os.path.join(directory, zone))
            except (OSError, ValueError):
                continue
            found[zone] = (state.st_ino, state.st_mtime_ns)
            break
    return found


def forget_zones() -> None:
    """Read the files of all zones again when they are used next."""
    zoneinfo.ZoneInfo.clear_cache()

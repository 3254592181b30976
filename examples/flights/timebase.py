"""Convert local times and delays to instants, in whole seconds since the Unix epoch (UTC).

The table has scheduled times as clock readings, each local to its own airport, on the date of the
departure. It has actual times as delays in minutes after the scheduled time. So:

    scheduled departure = that date and clock at the origin
    scheduled arrival   = the first moment after that departure at which the clock of the
                          destination shows sched_arr_time
    departed            = scheduled departure + dep_delay
    landed              = scheduled arrival + arr_delay

The table has no date of arrival. Every block time (gate to gate) is under 24 h, so the first such
moment is the only candidate, also for red-eyes, for arrivals after midnight and across five time
zones. The columns dep_time and arr_time are not used. They do not show the day after a delay over
24 h, and in the night when summer time begins arr_time shows an hour that does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from examples.flights.data import FlightDataError, FlightRow

# Destinations without a row in airports.csv. All keep Atlantic time (UTC-4) all year.
ATLANTIC_AIRPORTS = {
    "BQN": "America/Puerto_Rico",
    "PSE": "America/Puerto_Rico",
    "SJU": "America/Puerto_Rico",
    "STT": "America/Puerto_Rico",
}


class UnknownZone(FlightDataError):
    """The time zone of `airport` is not usable. `zone` is the name of the zone; None if the airport
    has no zone."""

    def __init__(self, airport: str, zone: str | None) -> None:
        reason = f"zone {zone!r} is not in the tz database (install tzdata)" if zone else "no zone"
        super().__init__(f"airport {airport}: {reason}")
        self.airport = airport
        self.zone = zone


class Instants(NamedTuple):
    """The four moments of a flight, in seconds since the Unix epoch (UTC)."""

    sched_dep_unix_s: int
    sched_arr_unix_s: int
    departed_unix_s: int | None
    landed_unix_s: int | None

    @property
    def block_min(self) -> int:
        """Scheduled gate-to-gate time in minutes."""
        return (self.sched_arr_unix_s - self.sched_dep_unix_s) // 60


class TimeBase:
    """Converts rows to instants with the time zones of all airports.

    `zone_names` maps IATA codes to tz database names; ATLANTIC_AIRPORTS are added to them.
    """

    def __init__(self, zone_names: Mapping[str, str]) -> None:
        self._zone_names = ATLANTIC_AIRPORTS | dict(zone_names)
        self._zones: dict[str, ZoneInfo] = {}

    def zone(self, airport: str) -> ZoneInfo:
        """Return the time zone of an IATA code. Raises UnknownZone."""
        try:
            return self._zones[airport]
        except KeyError:
            return self._zones.setdefault(airport, self._load_zone(airport))

    def instants(self, row: FlightRow) -> Instants:
        """Return the moments of one flight. Raises UnknownZone."""
        date = (row.year, row.month, row.day)
        sched_dep = _local_unix_s(date, row.sched_dep_clock_min, self.zone(row.origin))
        sched_arr = _next_clock_unix_s(sched_dep, row.sched_arr_clock_min, self.zone(row.dest))
        return Instants(
            sched_dep,
            sched_arr,
            _delayed(sched_dep, row.dep_delay_min),
            _delayed(sched_arr, row.arr_delay_min),
        )

    def _load_zone(self, airport: str) -> ZoneInfo:
        name = self._zone_names.get(airport)
        if name is None:
            raise UnknownZone(airport, None)
        try:
            return ZoneInfo(name)
        except ZoneInfoNotFoundError:
            raise UnknownZone(airport, name) from None


@lru_cache(maxsize=2048)  # a day has about a thousand different scheduled minutes
def _local_unix_s(date: tuple[int, int, int], clock_min: int, zone: ZoneInfo) -> int:
    """Return the instant at which the clock in `zone` shows `clock_min` on `date`."""
    return int(datetime(*date, *divmod(clock_min, 60), tzinfo=zone).timestamp())


def _next_clock_unix_s(after_unix_s: int, clock_min: int, zone: ZoneInfo) -> int:
    """Return the first instant after `after_unix_s` at which the clock in `zone` shows `clock_min`.

    Adding a day to an aware datetime keeps the clock reading, so the result is right even if summer
    time begins or ends in between.
    """
    hour, minute = divmod(clock_min, 60)
    there = datetime.fromtimestamp(after_unix_s, zone).replace(hour=hour, minute=minute, fold=0)
    same_day_unix_s = int(there.timestamp())
    if same_day_unix_s > after_unix_s:
        return same_day_unix_s
    return int((there + timedelta(days=1)).timestamp())


def _delayed(sched_unix_s: int, delay_min: int | None) -> int | None:
    return None if delay_min is None else sched_unix_s + delay_min * 60

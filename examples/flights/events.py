"""Flights with their deadlines, and their departures and landings in order of time.

A departure arms a timer for the scheduled arrival + 14.5 minutes; the landing cancels it. Delays
are whole minutes, so a landing is never at the deadline, but at least half a minute before or after
it. A flight may depart after its own deadline (thousands did). Its timer is then due as soon as it
is armed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

from examples.flights.data import FlightDataError, FlightRow, airport_zone_names, flight_rows
from examples.flights.timebase import Instants, TimeBase

NS_PER_S = 1_000_000_000
GRACE_S = 14 * 60 + 30


class ContradictoryFlight(FlightDataError):
    """Two departed flights have the same `key`, or the landing of the flight `key` is not after its
    departure."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"flight {key}: {reason}")
        self.key = key
        self.reason = reason


class Flight(NamedTuple):
    """A flight that departed. Instants are nanoseconds since the Unix epoch (UTC)."""

    key: str  # date/carrier/flight/origin, with the date of the scheduled departure
    carrier: str
    dest: str
    departed_unix_ns: int
    deadline_unix_ns: int
    landed_unix_ns: int | None

    @property
    def date(self) -> str:
        """Local date of the scheduled departure, e.g. "2013-01-01"."""
        return self.key.partition("/")[0]

    @property
    def delay_ns(self) -> int:
        """Time from the departure to the deadline; negative if the flight departed after its
        deadline."""
        return self.deadline_unix_ns - self.departed_unix_ns

    @property
    def expires(self) -> bool:
        """True if the deadline comes before the landing."""
        return self.landed_unix_ns is None or self.landed_unix_ns > self.deadline_unix_ns


class Timetable(NamedTuple):
    """All departed flights in the order of the table, and the number of rows without a
    departure."""

    flights: list[Flight]
    without_departure: int


class Kind(IntEnum):
    """Effect of a moment on its flight's timer."""

    DEPARTURE = 0
    LANDING = 1


class Moment(NamedTuple):
    """One add (DEPARTURE) or cancel (LANDING). Tuples sort by time, then kind, then key."""

    at_unix_ns: int
    kind: Kind
    flight: Flight


def load_timetable() -> Timetable:
    """Read the whole year, which takes a few seconds.

    Raises DatasetMissing, MalformedRow, UnknownZone, ContradictoryFlight.
    """
    return build_timetable(flight_rows(), TimeBase(airport_zone_names()))


def build_timetable(rows: Iterable[FlightRow], base: TimeBase) -> Timetable:
    """Return the flights of `rows`.

    Raises UnknownZone, and ContradictoryFlight for a key that is used twice or a landing before its
    departure. Neither error occurs in the published table. Without these checks, the run would pick
    one of two rows, or send a cancel before its add, and then disagree with the oracle without a
    visible reason.
    """
    flights: dict[str, Flight] = {}
    without_departure = 0
    for row in rows:
        at = base.instants(row)
        if at.departed_unix_s is None:
            without_departure += 1
            continue
        flight = _flight(row, at, at.departed_unix_s)
        if flights.setdefault(flight.key, flight) is not flight:
            raise ContradictoryFlight(flight.key, "departs twice")
    return Timetable(list(flights.values()), without_departure)


def in_order(flights: Iterable[Flight]) -> list[Moment]:
    """Return every departure and landing of `flights`, in time order."""
    moments = []
    for flight in flights:
        moments.append(Moment(flight.departed_unix_ns, Kind.DEPARTURE, flight))
        if flight.landed_unix_ns is not None:
            moments.append(Moment(flight.landed_unix_ns, Kind.LANDING, flight))
    moments.sort(key=attrgetter("at_unix_ns", "kind", "flight.key"))
    return moments


def _flight(row: FlightRow, at: Instants, departed_unix_s: int) -> Flight:
    key = f"{row.year}-{row.month:02}-{row.day:02}/{row.carrier}/{row.flight}/{row.origin}"
    if at.landed_unix_s is not None and at.landed_unix_s <= departed_unix_s:
        raise ContradictoryFlight(key, "lands before it departs")
    landed_unix_ns = None if at.landed_unix_s is None else at.landed_unix_s * NS_PER_S
    return Flight(
        key=key,
        carrier=row.carrier,
        dest=row.dest,
        departed_unix_ns=departed_unix_s * NS_PER_S,
        deadline_unix_ns=(at.sched_arr_unix_s + GRACE_S) * NS_PER_S,
        landed_unix_ns=landed_unix_ns,
    )

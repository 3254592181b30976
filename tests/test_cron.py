"""Nominal times of cron expressions, against an oracle that reads the calendar day by day."""

from __future__ import annotations

import itertools
import zoneinfo
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta

import pytest

from purgatoryd.shm_layout import cron

pytestmark = pytest.mark.tier("check")

SECOND_NS = 10**9
FOREVER_NS = 2**63 - 1
ZONES = (
    "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Havana", "Asia/Kolkata",
    "Africa/Casablanca",
)  # fmt: skip
FIRST, LAST = date(2021, 1, 1), date(2031, 1, 1)
MINUTE = timedelta(minutes=1)


def ns(moment: datetime) -> int:
    return round(moment.timestamp()) * SECOND_NS


def found(spec: str, zone: str, first: datetime, last: datetime) -> list[int]:
    """All times from `first` on and before `last`, each asked for after the one before it."""
    times, after = [], ns(first) - 1
    while True:
        some = cron.times(spec, zone, after, ns(last) - 1, 3)
        times += some
        if len(some) < 3:
            return times
        after = some[-1]


# ---- the oracle ------------------------------------------------------------------------------


def instant(local: datetime, zone: zoneinfo.ZoneInfo) -> datetime:
    """The first instant at which the zone's clocks show `local`, or a later time."""
    for back in range(-60 * 26, 60 * 26):
        moment = local.replace(tzinfo=UTC) + back * MINUTE
        if moment.astimezone(zone).replace(tzinfo=None) >= local:
            return moment
    raise AssertionError(local)


def fast_instant(local: datetime, zone: zoneinfo.ZoneInfo) -> datetime:
    """The same as instant(), with a search only near a change of the zone's offset."""
    offsets = {
        (local + days * timedelta(days=1)).replace(tzinfo=zone).utcoffset() for days in (-1, 0, 1)
    }
    if len(offsets) > 1:
        return instant(local, zone)
    return local.replace(tzinfo=zone).astimezone(UTC)


def at_local_times(
    zone: zoneinfo.ZoneInfo, hours: list[int], minutes: list[int], days: set[date]
) -> list[int]:
    """Occurrences at fixed local times of some days."""
    locals_ = (
        datetime(day.year, day.month, day.day, hour, minute)
        for day in days for hour, minute in itertools.product(hours, minutes)
    )  # fmt: skip
    return sorted({ns(fast_instant(local, zone)) for local in locals_})


def all_days() -> Iterator[date]:
    # A day more at both ends: the first and the last local day of a zone differ from those of UTC.
    for number in range((LAST - FIRST).days + 2):
        yield FIRST + timedelta(days=number - 1)


FIXED: dict[str, tuple[list[int], list[int], Callable[[date], bool]]] = {
    "30 2 * * *": ([2], [30], lambda day: True),
    "0,30 0-3 * * *": ([0, 1, 2, 3], [0, 30], lambda day: True),
    "15 1 * * 0": ([1], [15], lambda day: day.isoweekday() == 7),
    "0 9 1,15 * *": ([9], [0], lambda day: day.day in (1, 15)),
    "5 0 29 2 *": ([0], [5], lambda day: (day.month, day.day) == (2, 29)),
    "@daily": ([0], [0], lambda day: True),
    "0 12 13 * 5": ([12], [0], lambda day: day.day == 13 or day.isoweekday() == 5),
}  # fmt: skip


def repeats_minute(local: datetime) -> bool:
    """Return whether the same hour had this minute before: the zone repeats less than an hour."""
    before, after = local.replace(fold=0).utcoffset(), local.utcoffset()
    assert before is not None
    assert after is not None
    return local.fold == 1 and before - after < timedelta(hours=1)


def once_an_hour(*minutes: int) -> Callable[[datetime], bool]:
    return lambda local: local.minute in minutes and not repeats_minute(local)


ELAPSED: dict[str, Callable[[datetime], bool]] = {
    "30 * * * *": once_an_hour(30),
    "45 * * * *": once_an_hour(45),
    "15,30 * * * *": once_an_hour(15, 30),
    "0 * * * *": once_an_hour(0),
    "*/15 2 * * *": lambda local: local.hour == 2,
    "@hourly": lambda local: local.minute == 0,
    "*/30 1-3 * * *": lambda local: local.minute % 30 == 0 and 1 <= local.hour <= 3,
}


def bounds() -> tuple[datetime, datetime]:
    return (
        datetime(FIRST.year, FIRST.month, FIRST.day, tzinfo=UTC),
        datetime(LAST.year, LAST.month, LAST.day, tzinfo=UTC),
    )


@pytest.mark.tier("all")
@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("spec", FIXED)
def test_ten_years_of_fixed_local_times_agree_with_the_oracle(spec: str, zone: str) -> None:
    hours, minutes, matches = FIXED[spec]
    first, last = bounds()
    days = {day for day in all_days() if matches(day)}
    expected = at_local_times(zoneinfo.ZoneInfo(zone), hours, minutes, days)
    expected = [time_ns for time_ns in expected if ns(first) <= time_ns < ns(last)]
    assert found(spec, zone, first, last) == expected


@pytest.mark.tier("all")
@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("spec", ELAPSED)
def test_ten_years_of_elapsed_times_agree_with_the_oracle(spec: str, zone: str) -> None:
    matches, place = ELAPSED[spec], zoneinfo.ZoneInfo(zone)
    first, last = bounds()
    expected, moment = [], first
    while moment < last:
        if matches(moment.astimezone(place)):
            expected.append(ns(moment))
        moment += 15 * MINUTE
    assert found(spec, zone, first, last) == expected


def local(zone: str, spec: str, day: datetime, count: int) -> list[str]:
    times = cron.times(
        spec, zone, ns(day.replace(tzinfo=zoneinfo.ZoneInfo(zone))), FOREVER_NS, count
    )
    moments = (datetime.fromtimestamp(t / 1e9, zoneinfo.ZoneInfo(zone)) for t in times)
    return [moment.strftime("%d %H:%M%z") for moment in moments]


def test_a_skipped_local_time_occurs_at_the_end_of_the_gap() -> None:
    day = datetime(2027, 3, 27, 12)  # 02:00 to 03:00 of the 28th does not exist
    found = local("Europe/Berlin", "15,45 2 * * *", day, 3)
    assert found == ["28 03:00+0200", "29 02:15+0200", "29 02:45+0200"]


def test_a_half_hour_change_neither_skips_nor_doubles_a_minute_of_each_hour() -> None:
    # 02:00 to 02:30 of the 3rd of October does not exist, 01:30 to 02:00 of the 4th of April
    # exists twice
    gap = local("Australia/Lord_Howe", "30 * * * *", datetime(2027, 10, 3, 0, 40), 3)
    assert gap == ["03 01:30+1030", "03 02:30+1100", "03 03:30+1100"]
    for spec in ("30 * * * *", "30,31 * * * *"):
        again = local("Australia/Lord_Howe", spec, datetime(2027, 4, 4, 1, 35), 1)
        assert again == ["04 02:30+1030"]
    again = local("Australia/Lord_Howe", "30 * * * *", datetime(2027, 4, 4, 0, 40), 2)
    assert again == ["04 01:30+1100", "04 02:30+1030"]
    often = local("Australia/Lord_Howe", "*/30 * * * *", datetime(2027, 4, 4, 1, 10), 3)
    assert often == ["04 01:30+1100", "04 01:30+1030", "04 02:00+1030"]


def test_a_repeated_local_time_occurs_once() -> None:
    day = datetime(2027, 10, 30, 12)  # 02:00 to 03:00 of the 31st exists twice
    found = local("Europe/Berlin", "30 2 * * *", day, 2)
    assert found == ["31 02:30+0200", "01 02:30+0100"]


def test_a_time_within_the_repeated_hour_gives_no_occurrence_of_that_hour() -> None:
    within = ns(datetime(2027, 10, 31, 1, 10, tzinfo=UTC))  # 02:10, the second time
    (found,) = cron.times("30 2 * * *", "Europe/Berlin", within, FOREVER_NS, 1)
    assert datetime.fromtimestamp(found / 1e9, UTC) == datetime(2027, 11, 1, 1, 30, tzinfo=UTC)


def test_the_times_do_not_depend_on_how_many_are_asked_for() -> None:
    start = ns(datetime(2027, 3, 20, tzinfo=UTC))
    together = cron.times("30 2 * * *", "Europe/Berlin", start, FOREVER_NS, 40)
    single, after = [], start
    for _ in together:
        (after,) = cron.times("30 2 * * *", "Europe/Berlin", after, FOREVER_NS, 1)
        single.append(after)
    assert single == together


def test_times_after_the_limit_are_left_out() -> None:
    start = ns(datetime(2027, 1, 1, tzinfo=UTC))
    until = start + 2 * 86_400 * SECOND_NS
    assert cron.times("0 12 * * *", "", start, until, 5) == [
        start + 43_200 * SECOND_NS,
        start + 129_600 * SECOND_NS,
    ]
    assert cron.times("0 12 * * *", "", start, start, 5) == []


def test_the_end_of_the_clock_ends_the_times() -> None:
    assert cron.times("@yearly", "Europe/Berlin", 2**63 - 10, FOREVER_NS, 2) == []
    assert len(cron.times("@yearly", "", ns(datetime(2259, 6, 1, tzinfo=UTC)), FOREVER_NS, 3)) < 3


@pytest.mark.parametrize(
    "spec",
    [
        "", "* * * *", "* * * * * *", "61 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *",
        "*/0 * * * *", "5-1 * * * *", "a * * * *", "@never", "0 0 31 2 *", "L * * * *",
        "1,,2 * * * *",
        "-1 * * * *", "* * * * MON#6", "\u0661 * * * *",
    ],
)  # fmt: skip
def test_an_expression_that_cannot_be_read_is_refused(spec: str) -> None:
    with pytest.raises(cron.BadSpec):
        cron.check(spec, "")


@pytest.mark.parametrize("zone", ["Europe/Nowhere", "../etc/passwd", "/etc/localtime", "Europe"])
def test_an_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(cron.BadSpec):
        cron.check("@daily", zone)


def test_the_words_are_those_of_cron() -> None:
    start = ns(datetime(2027, 1, 1, tzinfo=UTC))
    for word, fields in cron.WORDS.items():
        times = cron.times(word.upper(), "", start, FOREVER_NS, 3)
        assert times == cron.times(fields, "", start, FOREVER_NS, 3)


def test_a_search_without_a_result_ends() -> None:
    # the 29th of February is a fifth Monday only every 28 years, and never with day 30 as well
    assert cron.times("0 0 29 2 MON#1", "", 0, FOREVER_NS, 2) != []
    assert cron.times("0 0 * 2 MON#5", "", 0, 86_400 * 365 * SECOND_NS, 2) == []


def test_a_changed_zone_file_is_noticed() -> None:
    files = cron.zone_files({"Europe/Berlin", "Nowhere/Here", "bad\0name"})
    assert set(files) <= {"Europe/Berlin"}

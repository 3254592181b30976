"""Points in time on the command line: ISO 8601, zones, free text, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from real_daemon import PATIENCE_S, StartDaemon, clean_environment

from purgatoryd.cli import moments, units
from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Client

pytestmark = pytest.mark.tier("check")

NOW = datetime(2026, 11, 27, 19, 50, 30, tzinfo=UTC)
"""A Friday; 20:50:30 in Berlin."""


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


def iso(text: str) -> str:
    return moments.read(text, NOW).moment.isoformat()


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00+00:00"),
        ("2026-01-31T12:00-05:00", "2026-01-31T12:00:00-05:00"),
        ("2026-07-31T12:00[Europe/Berlin]", "2026-07-31T12:00:00+02:00"),
        ("2026-01-31 12:00 America/New_York", "2026-01-31T12:00:00-05:00"),
        ("2026-01-31 12:00 UTC", "2026-01-31T12:00:00+00:00"),
        ("2026-10-25T02:30+02:00[Europe/Berlin]", "2026-10-25T02:30:00+02:00"),
        ("2026-10-25T02:30+01:00[Europe/Berlin]", "2026-10-25T02:30:00+01:00"),
    ],
)
def test_a_time_with_its_zone_is_not_interpreted(text: str, at: str) -> None:
    moment, understood = moments.read(text, NOW)
    assert (moment.isoformat(), understood) == (at, False)
    assert moments.read_strict(text) == moment


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-01-31", "2026-01-31T00:00:00+01:00"),
        ("2026-07-31T12:00", "2026-07-31T12:00:00+02:00"),
        ("2026-07-31 9:00", "2026-07-31T09:00:00+02:00"),
        ("now", "2026-11-27T20:50:30+01:00"),
        ("in 2 hours", "2026-11-27T22:50:30+01:00"),
        ("in 2h30m", "2026-11-27T23:20:30+01:00"),
        ("in an hour and 5 minutes", "2026-11-27T21:55:30+01:00"),
        ("in 20 weeks", "2027-04-16T21:50:30+02:00"),
        ("3 days ago", "2026-11-24T20:50:30+01:00"),
        ("tomorrow 9:00", "2026-11-28T09:00:00+01:00"),
        ("Tomorrow,  at 9:00", "2026-11-28T09:00:00+01:00"),
        ("9am tomorrow", "2026-11-28T09:00:00+01:00"),
        ("yesterday 23:59:59", "2026-11-26T23:59:59+01:00"),
        ("today noon", "2026-11-27T12:00:00+01:00"),
        ("today 12 am", "2026-11-27T00:00:00+01:00"),
        ("monday 18:00", "2026-11-30T18:00:00+01:00"),
        ("6:30 pm on thu", "2026-12-03T18:30:00+01:00"),
        ("next friday 18:00", "2026-12-04T18:00:00+01:00"),
        ("last friday 18:00", "2026-11-20T18:00:00+01:00"),
        ("last monday 18:00", "2026-11-23T18:00:00+01:00"),
        ("3 april 2027 18:00", "2027-04-03T18:00:00+02:00"),
        ("april 3rd, 2027 at 6pm", "2027-04-03T18:00:00+02:00"),
        ("tomorrow 9:00 America/New_York", "2026-11-28T09:00:00-05:00"),
    ],
)
def test_free_text_and_local_times_are_interpreted(text: str, at: str) -> None:
    moment, understood = moments.read(text, NOW)
    assert (moment.isoformat(), understood) == (at, True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("03/04/2026", "ambiguous date: write 2026-03-04 or 2026-04-03."),
        ("3.4.2026 9:00", "ambiguous date: write 2026-03-04 or 2026-04-03."),
        ("03-04-2026", "ambiguous date: write 2026-03-04 or 2026-04-03."),
        ("13/04/2026", "ambiguous date: write 2026-04-13."),
        ("04/04/2026", "ambiguous date: write 2026-04-04."),
        ("03/04/26 9:00", "ambiguous date: write YYYY-MM-DD."),
        ("99/99/2026", "ambiguous date: write YYYY-MM-DD."),
        ("friday 18:00", "write today or next friday"),
        ("tomorrow at 9", "write 9:00 or 9am or 9pm"),
        ("tomorrow", "no time of day"),
        ("18:00", "no day: write today 18:00 or tomorrow 18:00"),
        ("3 april 18:00", "no year"),
        ("tomorrow 25:00", "no such time"),
        ("tomorrow 13pm", "not from 1 to 12"),
        ("31 april 2027 9:00", "no such date"),
        ("in 99999999 weeks", "after the year 9999"),
        ("1969-12-31T00:00Z", "before 1970"),
        ("2026-01-31T12:00[Mars/Base]", "not a time zone"),
        ("2026-01-31T12:00[../../etc]", "is not a time"),
        ("2026-07-31T12:00+01:00[Europe/Berlin]", "does not have then: 2026-07-31T13:00:00+02:00"),
        *((text, "is not a time such as") for text in ("", "may", "10", "2026", "banana", "in 2",
                                                       "next 9:00", "in 5 months", "soon")),
    ],
)  # fmt: skip
def test_ambiguous_and_unknown_texts_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        moments.read(text, NOW)
    assert reason in str(caught.value)


@pytest.mark.parametrize("zone", ["", "[Europe/Berlin]", " Europe/Berlin"])
@pytest.mark.parametrize(
    ("text", "reason", "choice"),
    [
        ("2026-03-29T02:30", "does not exist",
         "2026-03-29T01:30:00+01:00 or 2026-03-29T03:30:00+02:00"),
        ("2026-10-25T02:30", "happens twice",
         "2026-10-25T02:30:00+02:00 or 2026-10-25T02:30:00+01:00"),
    ],
)  # fmt: skip
def test_a_time_at_a_change_of_the_clock_is_refused(
    text: str, zone: str, reason: str, choice: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        moments.read(text + zone, NOW)
    assert choice in str(caught.value)
    assert {moments.read(one, NOW).understood for one in choice.split(" or ")} == {False}
    if zone:
        with pytest.raises(ValueError, match=reason):
            moments.read_strict(text + zone)


def test_free_text_at_a_change_of_the_clock_is_refused() -> None:
    before = datetime(2026, 3, 28, 12, tzinfo=UTC)
    with pytest.raises(ValueError, match="does not exist in the local zone"):
        moments.read("tomorrow 2:30", before)
    moment, _ = moments.read("in 14 hours", before)
    assert moment.isoformat() == "2026-03-29T04:00:00+02:00"


@pytest.mark.parametrize("text", ["2026-01-31T12:00", "tomorrow 9:00", "in 2 hours", "banana"])
def test_a_setting_takes_no_interpretation(text: str) -> None:
    with pytest.raises(click.BadParameter):
        units.Moment(strict=True).convert(text, None, None)


WORDS = st.sampled_from([
    "in", "ago", "at", "on", "and", "next", "last", "friday", "fri", "may", "april", "today",
    "noon", "am", "pm", "9", "9:00", "99:99", "2h", "a", "31", "2026", "0", "999999999999", "hours",
    "weeks", ",", "03/04/2026", "2026-03-29", "UTC", "Europe/Berlin", "[X/Y]",
])  # fmt: skip


@given(st.lists(WORDS, max_size=6).map(" ".join) | st.text(max_size=20))
def test_each_text_is_an_aware_time_or_refused(text: str) -> None:
    with suppress(ValueError):
        assert moments.read(text, NOW).moment.utcoffset() is not None


def test_an_invalid_time_is_a_usage_error_and_sends_nothing(daemon_dir: Path) -> None:
    done = CliRunner().invoke(app, ["add", "k", "--deadline", "03/04/2026", "--json"])
    assert (done.exit_code, done.stdout) == (Exit.USAGE, "")
    assert "2026-03-04 or 2026-04-03" in json.loads(done.stderr)["message"]


@pytest.mark.parametrize(
    ("deadline", "imports"), [("2026-01-31T12:00Z", False), ("tomorrow 9:00", True)]
)
def test_only_free_text_imports_its_reader(deadline: str, imports: bool, daemon_dir: Path) -> None:
    program = (
        "import sys; from purgatoryd.cli import units;"
        "units.Moment().convert(sys.argv[1], None, None);"
        "print('purgatoryd.cli.free_text' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, deadline], env=clean_environment(daemon_dir),
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert run.stdout == f"{imports}\n"
    assert bool(run.stderr) == imports


@pytest.mark.tier("test")
def test_the_understood_time_is_printed_and_is_the_deadline(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    run = subprocess.run(
        [sys.executable, "-m", "purgatoryd.cli", "add", "k", "--deadline", "tomorrow 9:00",
         "--name", "demo"],
        env=demo.env | {"TZ": "America/New_York"}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    shown = run.stderr.removeprefix("'tomorrow 9:00' is ").split()[0]
    with Client("demo") as client:
        timer = client.get("k")
    assert timer is not None
    assert timer.deadline_at == datetime.fromisoformat(shown)
    assert shown.endswith(("T09:00:00-05:00", "T09:00:00-04:00"))

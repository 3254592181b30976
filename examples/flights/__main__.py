"""The main program: it sends the flights of 2013 through real daemons, in three parts.

    python -m examples.flights            a day live, the year, and a million timers under load

Each part starts a new daemon. It compares the notices that a subscriber process received with the
answers that the workers received and with the oracle, and prints its tables. The exit code is 0
only if notices, answers and oracle agree.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from examples.flights import oracle
from examples.flights.data import DatasetMissing, carrier_names, dataset_file
from examples.flights.day import busiest_date, flights_of
from examples.flights.events import Timetable, load_timetable
from examples.flights.processes import ChildFailed
from examples.flights.service import KEEP, DaemonFailed, private_directory
from purgatoryd.cli import units

FAILED, INTERRUPTED = 1, 130
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PIPE_COLUMNS = 100
PROBLEMS_SHOWN = 20
PARTS = ("day", "year", "load")


class Sizes(NamedTuple):
    """Sizes of the parts: duration of the live day in seconds; number of timers and longest delay
    of the part under load."""

    seconds: float
    timers: int
    longest_s: float


class Run:
    """Runs parts one after another, and collects their figures and problems."""

    def __init__(self, console: Console, directory: Path, sizes: Sizes) -> None:
        self._console = console
        self._directory = directory
        self._sizes = sizes
        self.figures: dict[str, Any] = {}
        self.problems: list[str] = []

    def parts(self, chosen: tuple[str, ...]) -> None:
        """Run the parts with these names. Raises DaemonFailed, ChildFailed."""
        if "day" in chosen or "year" in chosen:
            timetable = self._read()
            if "day" in chosen:
                self._day(timetable)
            if "year" in chosen:
                self._year(timetable)
        if "load" in chosen:
            self._load()

    def _read(self) -> Timetable:
        timetable = load_timetable()
        flights, without = len(timetable.flights), timetable.without_departure
        self._console.print(
            f"Flights out of New York in 2013: {flights + without:,}. "
            f"{without:,} had no departure and are left out."
        )
        return timetable

    def _day(self, timetable: Timetable) -> None:
        from examples.flights import live, report

        date = busiest_date(timetable.flights)
        flights, expected = flights_of(date, timetable.flights), oracle.must_expire(date)
        seconds = self._sizes.seconds
        day = live.run(self._directory, self._console, date, flights, expected, seconds)
        report.print_day(self._console, day, carrier_names())
        self._keep("day", report.day_figures(day))

    def _year(self, timetable: Timetable) -> None:
        from examples.flights import report, year

        expected = oracle.must_expire()
        whole = year.run(self._directory, self._console, timetable.flights, expected)
        report.print_year(self._console, whole, carrier_names())
        self._keep("year", report.year_figures(whole))

    def _load(self) -> None:
        from examples.flights import load, report

        timers, longest_s = self._sizes.timers, self._sizes.longest_s
        pressed = load.run(self._directory, self._console, timers, longest_s)
        report.print_load(self._console, pressed)
        self._keep("load", report.load_figures(pressed))

    def _keep(self, part: str, figures: dict[str, Any]) -> None:
        self.figures[part] = figures
        self.problems += [f"{part}: {problem}" for problem in figures["problems"]]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--day",
    is_flag=True,
    help="Run the live day; without any of these three options, all parts run.",
)
@click.option("--year", is_flag=True, help="Run the year.")
@click.option("--load", is_flag=True, help="Run the timers under load.")
@click.option(
    "--length",
    "length_ns",
    type=units.Duration(units.NS_PER["s"]),
    default="65s",
    show_default=True,
    help="Duration of the live day.",
)
@click.option(
    "--timers",
    type=click.IntRange(4),
    default=1_000_000,
    show_default=True,
    help="Number of timers under load; fewer if shared memory is too small.",
)
@click.option(
    "--longest",
    "longest_ns",
    type=units.Duration(100 * units.NS_PER["ms"]),
    default="20s",
    show_default=True,
    help="Longest delay under load; the median delay is a twentieth of it.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures to this file.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep WALs of day and year, and ledgers, in this folder, which is emptied first.",
)
def main(json_file: Path | None, keep: Path | None, **options: Any) -> None:
    """Send the flights of 2013 through real daemons; exit code 0 if every count agrees.

    Three parts: a day live with four worker processes, the whole year under the virtual clock,
    and a million timers under load. Without --day, --year or --load all three run.
    """
    console = _console()
    if keep is not None:
        shutil.rmtree(keep, ignore_errors=True)
        os.environ[KEEP] = str(keep.absolute())
    for number in INTERRUPTS:
        signal.signal(number, _interrupt)
    chosen = tuple(part for part in PARTS if options[part]) or PARTS
    length_s, longest_s = (
        options[name] / units.NS_PER["s"] for name in ("length_ns", "longest_ns")
    )
    sizes = Sizes(length_s, options["timers"], longest_s)
    with _failures(console):
        sys.exit(_run(console, chosen, sizes, json_file))


def _run(console: Console, chosen: tuple[str, ...], sizes: Sizes, json_file: Path | None) -> int:
    began_s = time.monotonic()
    dataset_file("flights.csv.zip")  # fail at once if the data are not installed
    with private_directory() as directory:
        run = Run(console, directory, sizes)
        run.parts(chosen)
    elapsed_s = time.monotonic() - began_s
    if json_file:
        cores = len(os.sched_getaffinity(0))
        whole = {"cores": cores, "elapsed_s": elapsed_s, "problems": run.problems, **run.figures}
        json_file.write_text(json.dumps(whole, indent=2) + "\n")
    return _verdict(console, run.problems, elapsed_s)


def _verdict(console: Console, problems: list[str], elapsed_s: float) -> int:
    console.print()
    for problem in problems[1:PROBLEMS_SHOWN]:
        console.print(problem, soft_wrap=True)
    if problems:
        verdict = f"FAIL: {len(problems)} disagree after {elapsed_s:.0f} s; {problems[0]}"
        console.print(verdict, soft_wrap=True)
        return FAILED
    console.print(f"PASS: everything agrees, after {elapsed_s:.0f} s")
    return 0


@contextmanager
def _failures(console: Console) -> Iterator[None]:
    """Convert any error inside of the block to a last line of output and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("FAIL: interrupted")
        sys.exit(INTERRUPTED)
    except (DatasetMissing, DaemonFailed, ChildFailed) as error:
        console.print(f"FAIL: {error}", soft_wrap=True)
        sys.exit(FAILED)
    except Exception as error:
        traceback.print_exc()
        console.print(f"FAIL: {type(error).__name__}: {error}", soft_wrap=True)
        sys.exit(FAILED)


def _console() -> Console:
    """Return a console. If the output is not a terminal, it writes no control codes, and its lines
    are wide enough for every table."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _interrupt(*_: object) -> None:
    """End the run, and ignore further signals, which must not interrupt the cleanup."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()

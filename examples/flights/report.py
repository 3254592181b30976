"""The output of the run: tables for people, plain values for --json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from examples.flights.events import NS_PER_S, Flight
from examples.flights.figures import Lateness, Rate
from purgatoryd.clients import CancelResult, Status

if TYPE_CHECKING:
    from examples.flights.live import Day
    from examples.flights.load import Load
    from examples.flights.year import Year

WORST = 5
FEW_DEPARTURES = 20
"""Minimum number of departures of a ranked carrier. With fewer departures, one late flight could
make a carrier the worst."""

LATENESS = "Lateness: time since the deadline"

Figures = dict[str, Any]


# ---- a day live ----------------------------------------------------------------------------------


def day_figures(day: Day) -> Figures:
    """Return the figures of a live day as plain values."""
    return {
        "date": day.date,
        "departures": len(day.flights),
        "rates": _plain(day.rates),
        "expired": len(day.receipts),
        "oracle": len(day.expected),
        "overdue_when_armed": len(day.overdue),
        "lateness": _plain(day.lateness),
        "worst_carriers": worst_carriers(day.flights, {r.key for r in day.receipts}),
        "late_workers": day.late_workers,
        "problems": day.problems,
    }


def print_day(console: Console, day: Day, names: dict[str, str]) -> None:
    """Print the tables of a live day."""
    speed = day.pace.span_sim_ns / day.pace.span_real_ns
    span_s = day.pace.span_real_ns / NS_PER_S
    title = f"A day live: {day.date} in {span_s:.0f} s, {speed:,.0f} times as fast"
    received = {receipt.key for receipt in day.receipts}
    rows = {
        **_against_oracle(received, day.expected),
        "landings that a worker sent too late": len(day.late_workers),
        "half a minute of that day": _duration(day.pace.margin_ns),
        "due when they were armed, so not in the lateness": len(day.overdue),
    }
    _show(console, title, _rates_table(day.rates))
    _show(console, LATENESS, _lateness_table(day.lateness))
    _show(console, "The day compared with the oracle", _pairs(rows))
    for key in day.late_workers:
        console.print(f"{key} expired because its worker sent the landing too late.")
    _show(console, "Worst carriers", _carriers_table(day.flights, received, names))


# ---- the year ------------------------------------------------------------------------------------


def year_figures(year: Year) -> Figures:
    """Return the figures of the year as plain values."""
    return {
        "departures": len(year.flights),
        "minutes": year.minutes,
        "acknowledged_adds": len(year.flights),
        "cancels": {found.name: count for found, count in year.found.items()},
        "received": len(year.receipts),
        "oracle": len(year.expected),
        "equal": year.received == year.expected,
        "elapsed_s": year.elapsed_s,
        "calls_per_s": year.calls / year.elapsed_s,
        "latest_virtual_ns": year.latest_ns,
        "worst_carriers": worst_carriers(year.flights, year.received),
        "problems": year.problems,
    }


def print_year(console: Console, year: Year, names: dict[str, str]) -> None:
    """Print the tables of the year."""
    title = "The year: virtual clock, one daemon, one client, one subscriber process"
    _show(console, title, _pairs(_year_rows(year)))
    _show(console, "Worst carriers", _carriers_table(year.flights, year.received, names))


def _year_rows(year: Year) -> dict[str, int | str]:
    speed = year.span_sim_ns / NS_PER_S / year.elapsed_s
    return {
        "departures, each arms a timer": len(year.flights),
        "landings, each cancels": len(year.cancels),
        "   in time: CANCELLED": year.found[CancelResult.CANCELLED],
        "   too late: FIRED": year.found[CancelResult.FIRED],
        "minutes in which something happened": year.minutes,
        **_against_oracle(year.received, year.expected),
        "latest firing after it was due, virtual time": _duration(year.latest_ns),
        "time taken": f"{year.elapsed_s:.1f} s, {speed:,.0f} times as fast",
        "acknowledged calls per second": round(year.calls / year.elapsed_s),
        "minutes per second": round(year.minutes / year.elapsed_s),
    }


# ---- under load ----------------------------------------------------------------------------------


def load_figures(load: Load) -> Figures:
    """Return the figures of the run under load as plain values."""
    return {
        "timers_asked": load.asked,
        "timers": load.timers,
        "arena_bytes": load.arena_bytes,
        "most_armed": load.most_armed,
        "acknowledged_adds": load.adds,
        "cancels": {
            found.name: load.cancels(found)
            for found in (Status.CANCELLED, Status.FIRED, Status.UNKNOWN)
        },
        "received": int((load.received.times > 0).sum()),
        "rates": _plain(load.rates),
        "lateness": _plain(load.lateness),
        "elapsed_s": load.elapsed_s,
        "problems": load.problems,
    }


def print_load(console: Console, load: Load) -> None:
    """Print the tables of the run under load."""
    title = (
        f"Under load: {load.timers:,} timers from four workers at a lower priority, "
        f"{load.elapsed_s:.0f} s"
    )
    _show(console, title, _rates_table(load.rates))
    _show(console, LATENESS, _lateness_table(load.lateness))
    _show(console, "The ledger", _pairs(_ledger_rows(load)))
    mib = load.arena_bytes / 2**20
    console.print(f"The arena has space for all {load.timers:,} at once: {mib:.0f} MiB.")
    if load.timers < load.asked:
        console.print(f"Shared memory holds no more: {load.asked:,} were asked for.")


def _ledger_rows(load: Load) -> dict[str, int | str]:
    cancelled = load.cancels(Status.CANCELLED)
    return {
        "acknowledged adds": load.adds,
        "acknowledged cancels, the timer was armed: CANCELLED": cancelled,
        "adds minus cancels": load.adds - cancelled,
        "keys that the subscriber process received": int((load.received.times > 0).sum()),
        "acknowledged cancels that came too late: FIRED": load.cancels(Status.FIRED),
        "most timers armed at once": load.most_armed,
    }


# ---- parts of tables -----------------------------------------------------------------------------


def worst_carriers(flights: Iterable[Flight], late: set[str]) -> list[tuple[str, int, int]]:
    """Return (carrier, departures, late departures) for each carrier, with the largest share of
    late departures first."""
    departures: Counter[str] = Counter()
    lates: Counter[str] = Counter()
    for flight in flights:
        departures[flight.carrier] += 1
        lates[flight.carrier] += flight.key in late
    enough = [c for c, count in departures.items() if count >= FEW_DEPARTURES]
    enough.sort(key=lambda c: (-lates[c] / departures[c], c))
    return [(c, departures[c], lates[c]) for c in enough[:WORST]]


def _carriers_table(flights: list[Flight], late: set[str], names: dict[str, str]) -> Table:
    table = _table()
    table.add_column("carrier")
    for column in ("departures", "late", "share"):
        table.add_column(column, justify="right")
    for carrier, departures, lates in worst_carriers(flights, late):
        share = f"{100 * lates / departures:.0f} %"
        table.add_row(names.get(carrier, carrier), f"{departures:,}", f"{lates:,}", share)
    return table


def _lateness_table(lateness: Mapping[str, Lateness]) -> Table:
    table = _table()
    table.add_column("")
    for column in ("notices", "p50", "p99", "max"):
        table.add_column(column, justify="right")
    for subject, row in (
        ("when the subscriber process had it", lateness["received"]),
        ("when the daemon had fired it", lateness["fired"]),
    ):
        figures = (row.p50_ns, row.p99_ns, row.max_ns)
        table.add_row(subject, f"{row.notices:,}", *map(_duration, figures))
    return table


def _rates_table(rates: Mapping[str, Rate]) -> Table:
    table = _table()
    table.add_column("")
    for column in ("in all", "per second", "best second"):
        table.add_column(column, justify="right")
    for subject, rate in rates.items():
        per_s = f"{rate.per_s:,.1f}" if rate.per_s < 100 else f"{rate.per_s:,.0f}"
        table.add_row(subject, f"{rate.events:,}", per_s, f"{rate.best_s:,}")
    return table


def _plain(figures: Mapping[str, Rate | Lateness]) -> Figures:
    return {subject: figure._asdict() for subject, figure in figures.items()}


def _against_oracle(received: set[str], expected: set[str]) -> dict[str, int | str]:
    return {
        "expiries received": len(received),
        "expiries that the oracle expects": len(expected),
        "missing / unexpected": f"{len(expected - received):,} / {len(received - expected):,}",
    }


def _pairs(rows: Mapping[str, int | str]) -> Table:
    table = _table()
    table.show_header = False
    table.add_column("")
    table.add_column("", justify="right")
    for subject, value in rows.items():
        table.add_row(subject, f"{value:,}" if isinstance(value, int) else value)
    return table


def _show(console: Console, title: str, table: Table) -> None:
    """Print a table with its title on a separate line, because a title inside of a table is wrapped
    at the width of the table."""
    console.print()
    console.print(title, style="bold")
    console.print(table)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False)


def _duration(ns: int) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 100 * size else f"{ns / size:.0f} {unit}"
    return f"{ns} ns"

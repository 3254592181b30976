"""The report: one HTML page with all results, and the table of its main figures for a terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from dataclasses import fields
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Group
from rich.table import Table

from purgatoryd.pipeline.audit import Balance, Verdict
from purgatoryd.pipeline.continuity import Coverage
from purgatoryd.pipeline.figures import DAY_S, RANKS, STAGES, WANTED, Figures, Profile, Spread
from purgatoryd.pipeline.findings import LIMIT_NS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = (0.5, 0.9, 0.99, 1.0)
INK, PAPER, GRID = "#24303c", "#ffffff", "#e3e8ee"
COLOURS = {
    "added": "#2f6fb0", "cancelled": "#8796a5", "replaced": "#8a6fb0", "expired": "#d9822b",
    "satisfied": "#3a9a6b", "failed": "#b3261e", "skipped": "#5f6b2d", "coalesced": "#2d9aa6",
}  # fmt: skip
"""Colours of beginnings and ends of timers, in the order of the report."""
BALANCED = tuple(one.name for one in fields(Balance))[2:]
"""What is on the two sides of a balance."""
WIDE = 250
"""Columns of the key table at most: a terminal wraps it, and cuts nothing off."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "text.color": INK,
    "axes.edgecolor": GRID, "axes.labelcolor": INK, "axes.grid": True, "grid.color": GRID,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "xtick.color": INK, "ytick.color": INK, "figure.facecolor": PAPER, "legend.frameon": False,
}  # fmt: skip
_UNITS = ((3_600_000_000_000, "h"), (60_000_000_000, "min"), (1_000_000_000, "s"),
          (1_000_000, "ms"), (1_000, "µs"))  # fmt: skip


def page(verdict: Verdict, figures: Figures, made_at: datetime) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("purgatoryd.pipeline", "."),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration, "count": "{:,}".format, "wall": wall, "percent": percent,
    }  # fmt: skip
    template = environment.get_template("report.html.j2")
    return template.render(
        verdict=verdict, parts=[_shown(part) for part in figures.parts], made_at=made_at,
        wanted=WANTED, slow_ns=LIMIT_NS, ranks=SHOWN, balanced=BALANCED, slow=figures.slow,
    )  # fmt: skip


def _shown(part: Profile) -> dict[str, Any]:
    with mpl.rc_context(STYLE):
        charts = {
            "flow": _flow(part), "lateness": _cdf(part), "stages": _stages(part),
            "due": _due(part),
        }  # fmt: skip
    totals = {name: sum(getattr(one, name) for one in part.flow) for name in COLOURS}
    return {"part": part, "charts": charts, "totals": totals}


# ---- words -----------------------------------------------------------------------------------


def duration(ns: int | None) -> str:
    """As people say it; an empty string for None."""
    if ns is None:
        return ""
    for unit_ns, unit in _UNITS:
        if abs(ns) >= unit_ns:
            return f"{ns / unit_ns:.3g} {unit}"
    return f"{ns} ns"


def percent(coverage: Coverage) -> str:
    """The share that was judged, rounded down: 100 % is all."""
    share = f"{math.floor(coverage.share * 10_000) / 100:g} %"
    return share if coverage.is_exact else f"at most {share}"


def wall(at_us: int) -> str:
    """A wall time in UTC."""
    return f"{datetime.fromtimestamp(at_us / 1e6, UTC):%Y-%m-%d %H:%M:%S}"


def key_tables(verdict: Verdict, parts: Iterable[Profile]) -> Group:
    """The most important figures, for a terminal."""
    found = "VIOLATIONS" if verdict.counts else "nothing" if verdict.records else "no record"
    balances = _table("daemon", *BALANCED, title=f"the audit found {found}")
    for daemon, own in groupby(verdict.balance, attrgetter("daemon")):
        sums = map(sum, zip(*map(attrgetter(*BALANCED), own), strict=True))
        balances.add_row(daemon[:8], *(f"{value:,}" for value in sums))
    late = _table("daemon, clock", "late p50", "p99", "max")
    for part in parts:
        spread = part.lateness
        cells = [duration(spread.at(rank)) if spread else "" for rank in (0.5, 0.99, 1.0)]
        late.add_row(f"{part.node} {part.daemon[:8]} {part.clock}", *cells)
    return Group(balances, late)


def _table(first: str, *others: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


# ---- charts ----------------------------------------------------------------------------------


def _chart(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure, about: str) -> Markup:
    """The drawing as an element of the page; `about` is its text for who cannot see it."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawn = out.getvalue()
    body = drawn[drawn.index("<svg") :].replace("<svg ", '<svg role="img" ', 1)
    at = body.index(">") + 1
    return Markup(body[:at]) + Markup("<title>{}</title>").format(about) + Markup(body[at:])


def _time_axis(axes: Axes) -> None:
    axes.xaxis_date()
    locator = AutoDateLocator(minticks=3, maxticks=7)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]


def _flow(part: Profile) -> Markup:
    figure, axes = _chart(2.9)
    at = [one.at_us / 1e6 / DAY_S for one in part.flow]
    for name, colour in COLOURS.items():
        values = [getattr(one, name) for one in part.flow]
        if any(values):
            axes.plot(at, values, color=colour, linewidth=1.6, label=name)
            axes.fill_between(at, values, color=colour, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _time_axis(axes)
    axes.legend(
        ncols=8, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, handlelength=1,
        columnspacing=1,
    )  # fmt: skip
    return _svg(figure, "Adds, cancels and final states over time")


def _cdf(part: Profile) -> Markup | None:
    if part.lateness is None:
        return None
    figure, axes = _chart(2.9)
    spread = part.lateness
    axes.step(
        _log(spread.quantiles), [100 * r for r in RANKS], color=COLOURS["expired"], where="post"
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ns, _: duration(round(ns))))
    axes.set_ylim(0, 101)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.set_xlabel("fired so long after the deadline, or less")
    return _svg(figure, "Share of expiries by lateness")


def _log(values: Iterable[int]) -> list[int]:
    """For a logarithmic axis, which has no 0."""
    return [max(value, 100) for value in values]


def _stages(part: Profile) -> Markup | None:
    if not part.stages:
        return None
    figure, axes = _chart(0.75 + 0.5 * len(part.stages))
    names = [name for name in STAGES if name in part.stages]
    for row, name in enumerate(reversed(names)):
        _bar(axes, row, part.stages[name])
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in reversed(names)])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ns, _: duration(round(ns))))
    axes.grid(axis="y", visible=False)
    return _svg(figure, "Time spent in each stage")


def _bar(axes: Axes, row: int, spread: Spread) -> None:
    """From the median to the 99th percentile; a tick for the greatest."""
    p50, p99, most = _log(spread.at(rank) for rank in (0.5, 0.99, 1.0))
    slow = COLOURS["expired"] if p99 > LIMIT_NS else COLOURS["added"]
    axes.plot([p99, most], [row, row], color=GRID, linewidth=2, zorder=1)
    axes.plot([p50, p99], [row, row], color=slow, linewidth=9, solid_capstyle="butt", zorder=2)
    axes.plot([p50], [row], marker="o", color=INK, markersize=6, zorder=3)
    axes.plot([most], [row], marker="|", color=INK, markersize=10, zorder=3)


def _due(part: Profile) -> Markup | None:
    if not part.due:
        return None
    first, last = min(c for c, _ in part.due), max(c for c, _ in part.due)
    columns = (last - first) // part.column_s + 1
    grid = [[0] * columns for _ in range(part.column_s // part.row_s)]
    for (column, row), count in part.due.items():
        grid[row][(column - first) // part.column_s] = count
    figure, axes = _chart(2.9)
    height = part.column_s / part.row_s
    extent = (first / DAY_S, (last + part.column_s) / DAY_S, 0.0, height)
    image = axes.imshow(
        grid, aspect="auto", origin="lower", extent=extent, cmap="YlGnBu", interpolation="nearest"
    )
    _time_axis(axes)
    axes.grid(visible=False)
    axes.set_ylabel(_of_row(part))
    figure.colorbar(image, ax=axes, pad=0.01).outline.set_visible(False)
    return _svg(figure, "How many timers are due when")


def _of_row(part: Profile) -> str:
    units = {3600: "hour of the day", 300: "5 minutes of the hour", 5: "5 s of the minute"}
    return units.get(part.row_s, "second of ten")

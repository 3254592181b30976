"""Output of the runs: lines for the terminal, tables for docs/purgatory.md, and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .experiment import CASES, SERIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "purgatory.md"
IMAGES = ROOT / "docs" / "img"
MARKS = ("<!-- runs: begin -->", "<!-- runs: end -->")
COLOURS = {"nothing": "#999999", "old": "#c0392b", "new": "#d68910", "ours": "#1f618d",
           "daemon": "#148f77"}  # fmt: skip
SERIES_TITLES = {"shared": "2 shared keys + 1 own", "own": "3 own keys"}

Row = dict[str, Any]

PLOTS: tuple[tuple[str, str, Callable[[Row], float], bool], ...] = (
    ("achieved", "achieved / target rate", lambda row: float(row["achieved"]), False),
    ("cpu", "CPU s per 1M requests", lambda row: float(row["cpu_per_million"]), True),
    ("lateness", "lateness of expiries, p99, ms", lambda row: float(row["late_p99_ms"]), True),
    ("memory", "peak memory of the design, MB", lambda row: row["core_bytes"] / 1e6, True),
)
"""Each plot: (file name, label of the axis, value of a run, whether the axis is logarithmic)."""


def line(row: Row) -> str:
    """Return a line for the terminal that describes one run."""
    return (
        f"{row['design']:8} {row['case']:4} {row['series']:6} {row['rate']:>9,}/s  "
        f"{'keeps up' if row['keeps_up'] else 'FAILS   '}  achieved {row['achieved']:.3f}  "
        f"tail {row['drain_tail_ms']:.1f} ms  late p50 {row['late_p50_ms']:.2f} "
        f"p99 {row['late_p99_ms']:.2f} ms  cpu {row['cpu_per_million']:.2f} s/1M  "
        f"{row['core_bytes'] / 1e6:.0f} MB  purge {row['purge']:.2f} s  "
        f"ambiguous {row['ambiguous']}  wrong {row['wrong']}  lost {row['lost']}"
    )


# ---- tables ------------------------------------------------------------------------------

COMPARED_RATE = 250_000
"""The rate at which the designs are compared: the highest rate with which every design keeps up in
every case."""
HEAD = (
    "time-outs", "watch keys", "design", "keeps up with /s", "CPU s/1M beyond driver",
    "late p99 ms", "memory MB",
)  # fmt: skip


def cells(rows: list[Row]) -> Iterable[str]:
    """Return the cells of one table line: one design in one case and series. `rows` are the
    runs of the design, by rising rate."""
    compared = next(row for row in rows if row["rate"] == COMPARED_RATE)
    return (
        compared["case"], SERIES_TITLES[compared["series"]], compared["design"],
        f"{max(row['rate'] for row in rows if row['keeps_up']):,}",
        f"{compared['cpu_beyond_driver']:.2f}", f"{compared['late_p99_ms']:.1f}",
        f"{compared['core_bytes'] / 1e6:.0f}",
    )  # fmt: skip


def table(designs: list[list[Row]]) -> str:
    lines = [HEAD, tuple("---" for _ in HEAD), *(tuple(cells(rows)) for rows in designs)]
    return "\n".join(f"| {' | '.join(parts)} |" for parts in lines)


def rows_of(document: Row, case: str, series: str) -> list[Row]:
    """Return the runs of a case and series, sorted by design and rate."""
    rows = [r for r in document["runs"] if (r["case"], r["series"]) == (case, series)]
    return sorted(rows, key=lambda row: (list(COLOURS).index(row["design"]), row["rate"]))


def tables(document: Row) -> str:
    """Return the description of the machine and the command, and the table with a line for each
    design in each case and series."""
    machine = document["machine"]
    described = (
        f"{machine['cpu']}, {machine['cpus']} CPUs, Linux {machine['kernel']}, "
        f"Python {machine['python']}. Runs of at least {document['seconds']:g} s and "
        f"{document['requests_least']:,} requests. CPU, lateness and memory at "
        f"{COMPARED_RATE:,} requests a second."
    )
    designs = [
        measured
        for case in CASES
        for series in SERIES
        if (rows := rows_of(document, case, series))
        for design in COLOURS
        if design != "nothing" and (measured := [row for row in rows if row["design"] == design])
    ]
    return f"{described}\n\n{table(designs)}"


def write_page(document: Row) -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{tables(document)}\n\n{MARKS[1]}{after}")


# ---- plots -------------------------------------------------------------------------------


def draw(axes: Any, rows: list[Row], value: Callable[[Row], float]) -> None:
    """Draw a line for each design. A hollow marker shows a rate with which the design did not keep
    up."""
    for design, colour in COLOURS.items():
        points = [(r["rate"], value(r), r["keeps_up"]) for r in rows if r["design"] == design]
        if not points:
            continue
        rates, values, _ = zip(*points, strict=True)
        axes.plot(rates, values, "-", color=colour, label=design, linewidth=1.2)
        for rate, v, keeps_up in points:
            axes.plot(rate, v, "o", color=colour, markersize=4,
                      markerfacecolor=colour if keeps_up else "white")  # fmt: skip


def plot(document: Row, name: str, label: str, value: Callable[[Row], float], log: bool) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": name, "font.size": 8, "axes.grid": True,
                         "grid.alpha": 0.3})  # fmt: skip
    figure, panels = plt.subplots(2, 2, figsize=(8.5, 5.5), sharex=True, sharey=True)
    for i, case in enumerate(CASES):
        for j, series in enumerate(SERIES):
            axes = panels[i][j]
            draw(axes, rows_of(document, case, series), value)
            axes.set_title(f"{case} time-out case, {SERIES_TITLES[series]}", fontsize=8)
            axes.set_xscale("log")
            if log:
                axes.set_yscale("log")
    panels[0][0].legend(frameon=False)
    figure.supxlabel("target rate, requests/s")
    figure.supylabel(label)
    figure.tight_layout()
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"purgatory_{name}.svg", metadata={"Date": None})
    plt.close(figure)


def write(document: Row) -> None:
    """Write the tables of the page and the plots from the results."""
    write_page(document)
    for name, label, value, log in PLOTS:
        plot(document, name, label, value, log)

"""Output of the comparison: the generated part of docs/peers.md, and a plot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recording import write_section

from .side import ROOT
from .verdicts import Row, advantage

PAGE = ROOT / "docs" / "peers.md"
IMAGE = ROOT / "docs" / "img" / "peers_ratio.svg"
HEAD = ("measure", "unit", "ours", "", "peer", "", "ratio", "target", "")
BETTER, WORSE = "#1f618d", "#c0392b"
_WAKE_UPS = (
    "each timer needs a wake-up of its own. `perf record` finds 73 % of the daemon's CPU time in "
    "the kernel's sleeps and wake-ups. A wait without a daemon takes as long: see CPU in the table "
    "of [waits](benchmarks.md#waits). Redis's poller wakes once for ten timers; `within=` does the "
    "same"
)
REASONS = {
    "add, one a call, 1 client": "asleep, client and daemon wake an idle CPU each in every call. "
    "Those two wake-ups are most of its time; a call that looks for its answer saves one",
    "durable add, one a call, 1 client": "Redis syncs in the thread that serves. Here another "
    "thread syncs, so that timers fire meanwhile, and wakes the loop afterwards",
    "add and cancel, 1000 a call, server CPU": "each call wakes an idle CPU, about 20 us for "
    "1,000 records. `perf record` finds 70 % of the daemon's CPU time in the core",
    "operations: watch, advance, outcome, 100 a call": "a call waits for the answers of three "
    "batches, and its wake-ups count for 100 operations only",
    "10,000 due a second, lateness p50": _WAKE_UPS,
    "10,000 due a second, 1,000,000 far, lateness p50": _WAKE_UPS,
    "10,000 due a second, lateness p99": "the repetitions spread more than the ratio is off, from "
    "0.8 to 72 ms",
    "10,000 due a second, server CPU": _WAKE_UPS,
    "100,000 due at one instant, lateness, last": "an iteration makes an object for each notice; "
    "`get_many` returns columns",
}
"""Causes of missed targets, by measure."""


def number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ranged(value: float | None, spread: dict[str, float] | None) -> str:
    if spread is None:
        return "none"
    return f"{number(value)} [{number(spread['low'])} - {number(spread['high'])}]"


def verdict(one: Row) -> str:
    return {True: "met", False: "missed", None: ""}[one["met"]]


def cells(one: Row) -> Iterable[str]:
    return (
        one["measure"], one["unit"], one["ours_name"].removeprefix("purgatoryd "),
        ranged(one["ours"], one["ours_spread"]), one["peer_name"],
        ranged(one["peer"], one["peer_spread"]) if one["peer_name"] else "",
        number(one["ratio"]) if one["peer_name"] else "", one["target"] or "", verdict(one),
    )  # fmt: skip


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    cells = [tuple(head), *map(tuple, lines)]
    cells.insert(1, tuple("---" for _ in cells[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def losses(rows: list[Row]) -> str:
    """Return a list of the measures in which a peer is better, worst first."""
    lost = [(better, one) for one in rows if (better := advantage(one)) is not None and better < 1]
    lines = [
        f"* {one['measure']}: {one['peer_name']} is {1 / better:.1f} times better than "
        f"{one['ours_name']}.\n"
        for better, one in sorted(lost, key=lambda pair: pair[0])
    ]
    return "".join(lines) or "* nowhere in this run\n"


def missed(rows: list[Row]) -> str:
    """Return a list of the measures that miss a target, and why."""
    measures: dict[str, dict[str, None]] = {}
    for one in rows:
        if one["met"] is False:
            reason = REASONS.get(one["measure"], "not explained")
            measures.setdefault(reason, {})[one["measure"]] = None
    lines = [f"* {'; '.join(some)}: {reason}.\n" for reason, some in measures.items()]
    return "".join(lines) or "* none in this run\n"


def text(document: dict[str, Any]) -> str:
    """Return the generated part of the page."""
    machine, rows = document["machine"], document["rows"]
    busiest = max(one["load_average"] for one in rows)
    return (
        f"Measured on: {machine['cpu']}, {machine['cpus']} CPUs, Linux {machine['kernel']}, Python "
        f"{machine['python']}, commit {document['commit']}, {document['repeats']} repetitions. The "
        f"load average was up to {busiest:.1f}.\n\n"
        + "".join(f"* Left out: {reason}.\n" for reason in document["skipped"])
        + "\n### Where a peer is better\n\n" + losses(rows)
        + "\n### Why targets are missed\n\n" + missed(rows)
        + "\n### All rows\n\n" + table(HEAD, map(cells, rows))
    )  # fmt: skip


def plot(rows: list[Row]) -> None:
    """Draw how many times better or worse each row is, on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "peers", "font.size": 7, "axes.grid": True,
                         "grid.alpha": 0.3})  # fmt: skip
    shown = [(better, one) for one in rows if (better := advantage(one)) is not None]
    shown.reverse()
    figure, axes = plt.subplots(figsize=(8.5, 0.17 * len(shown) + 0.8))
    labels = [
        f"{one['measure']}: {one['ours_name'].removeprefix('purgatoryd ')} / {one['peer_name']}"
        for _, one in shown
    ]
    ratios = [better for better, _ in shown]
    colours = [BETTER if better >= 1 else WORSE for better in ratios]
    axes.barh(range(len(shown)), [r - 1 for r in ratios], left=1, color=colours)
    axes.set_yticks(range(len(shown)), labels)
    axes.set_xscale("log")
    axes.set_xlabel("times better than the peer's best repetition (left of 1: worse)")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_ylim(-0.7, len(shown) - 0.3)
    figure.tight_layout()
    figure.savefig(IMAGE, metadata={"Date": None})
    plt.close(figure)


def write(document: dict[str, Any]) -> None:
    """Write the generated part of the page, and the plot."""
    write_section("peers", text(document), PAGE)
    plot(document["rows"])

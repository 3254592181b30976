"""top: a daemon at work, drawn in the terminal."""

from __future__ import annotations

import math
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command
from purgatoryd.cli.options import emit, frozen_option, json_option, name_option, visible
from purgatoryd.shm_layout.errors import PurgatorydError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from purgatoryd.cli.view import Sampler, View
    from purgatoryd.shm_layout.occupancy import Fill, Level

LEAST_NS = 100_000_000
"""The shortest interval."""
BAR = 16
"""Characters of a bar."""
HEIGHTS = " ▁▂▃▄▅▆▇█"
COLOURS = {"ready": "green", "degraded": "yellow", "draining": "yellow", "recovering": "yellow"}
"""Of a condition; any other one is red."""
CROWDED, FULL = 0.8, 0.9
"""Shares from which on a bar is yellow, and red."""


@click.command("top", cls=Command)
@name_option
@click.option(
    "--interval",
    "interval_ns",
    type=units.Duration(),
    default="500ms",
    show_default=True,
    help="Time between two views, 100ms at least.",
)
@click.option("--once", is_flag=True, help="Print one view, of one interval, and end.")
@frozen_option
@json_option
def top_command(name: str, interval_ns: int, once: bool, frozen_ns: int, as_json: bool) -> None:
    """Watch the daemon at work: rates, times, fill, the wheel, namespaces, slow clients.

    Reads the shared memory and does not trouble the daemon, so it also works while that hangs, and
    says so. Keys and payloads are not shown; slow clients only to root and the daemon's user. It
    goes on until it is interrupted; where an arena has gone, its name is looked for again. Of a
    deployment it shows the shard that is named: `purgatoryd status` lists them.
    """
    from purgatoryd.cli.view import Sampler

    interval_s = max(interval_ns, LEAST_NS) / 1e9
    with closing(Sampler(name, frozen_ns)) as sampler, suppress(KeyboardInterrupt):
        if once:
            show(one_interval(sampler, interval_s), as_json)
        elif as_json:
            stream(sampler, interval_s)
        else:
            live(sampler, interval_s)


def one_interval(sampler: Sampler, interval_s: float) -> View:
    """What happens within an interval; a suspect is watched until it is known how it does."""
    sampler.take()
    time.sleep(interval_s)
    while not sampler.settled:
        time.sleep(interval_s)
    return sampler.take()


def stream(sampler: Sampler, interval_s: float) -> None:
    """Prints views in JSON until it is interrupted, or the reason why there is none."""
    while True:
        try:
            show(sampler.take(), as_json=True)
        except PurgatorydError as error:
            emit({"error": str(error)}, "", as_json=True)
        time.sleep(interval_s)


def show(view: View, as_json: bool) -> None:
    """Prints one view."""
    if as_json:
        emit(view.record(), "", as_json)
        return
    from rich.console import Console

    Console().print(frame(view))


def live(sampler: Sampler, interval_s: float) -> None:
    """Draws until it is interrupted; an arena that has gone may come again."""
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as screen:
        while True:
            try:
                screen.update(frame(sampler.take()), refresh=True)
            except PurgatorydError as error:
                screen.update(Text(visible(str(error)), "red"), refresh=True)
            time.sleep(interval_s)


# ---- the picture -------------------------------------------------------------------------------


def frame(view: View) -> RenderableType:
    """The whole picture."""
    from rich.console import Group

    return Group(
        headline(view),
        side_by_side(
            (2, boxed("per second", rates(view))),
            (3, boxed("times, last 10 s", times(view))),
            (3, boxed("fill", fills(view))),
        ),
        boxed("the wheel: timers, by when they are due", wheel(view)),
        side_by_side(
            (1, boxed("namespaces", namespaces(view))),
            (1, boxed("slow clients", clients(view))),
        ),
    )


def headline(view: View) -> Text:
    """How the daemon is."""
    from rich.text import Text

    health = view.health
    colour = COLOURS.get(health.condition, "red")
    line = Text(f" {health.condition} ", f"bold white on {colour}")
    line.append(f" {view.name}", "bold")
    if health.why:
        line.append(f", because of {', '.join(health.why.names)}", colour)
    who = f"process {health.pid}" if health.pid else health.condition
    line.append(f"  {who} for {units.format_duration(view.state_ns)}, loop moved ")
    line.append(f"{units.format_duration(health.still_ns)} ago")
    if health.overdue_ns:
        line.append(f", overdue by {units.format_duration(health.overdue_ns)}", "red")
    return line


def rates(view: View) -> Table:
    """What comes and goes."""
    table = columns("left", "right")
    for name, rate in view.rates.items():
        table.add_row(name, count(rate))
    for reason, rate in view.refused.items():
        table.add_row(f"[red]refused, {reason}", f"[red]{count(rate)}")
    return table


def times(view: View) -> Table:
    """Lateness, and the stages of a batch."""
    table = columns("left", "right", "right", "right")
    table.add_row("", "[dim]p50", "[dim]p99", "[dim]max")
    for name, one in view.times.items():
        figures = (one.p50_ns, one.p99_ns, one.max_ns)
        shown = map(units.format_duration, figures) if one.count else ("-",) * len(figures)
        table.add_row(name.replace("_", " "), *shown)
    return table


def fills(view: View) -> Table:
    """A bar for each table."""
    table = columns("left", "left", "right")
    for one in view.fills:
        table.add_row(one.name, bar(one), f"{amount(one)}")
    return table


def bar(fill: Fill) -> Text:
    """How full it is: a trace shows as soon as there is anything."""
    from rich.text import Text

    full = min(BAR, math.ceil(fill.share * BAR))
    colour = "red" if fill.share >= FULL else "yellow" if fill.share >= CROWDED else "cyan"
    return Text.assemble(("━" * full, colour), ("━" * (BAR - full), "bright_black"))


def amount(fill: Fill) -> str:
    """What is used, of how much."""
    if fill.unit == "bytes":
        return f"{units.format_size(fill.used)} of {units.format_size(fill.room)}"
    return f"{fill.used:,} of {fill.room:,}"


def wheel(view: View) -> Table:
    """A line for each level; its first character is now, its last the level's reach."""
    table = columns("right", "left", "left", "right")
    for level in reversed(view.levels):
        reach = units.format_duration(level.cell_ns * len(level.counts))
        table.add_row(f"level {level.number}", profile(level), reach, count(level.timers))
    next_in = "-" if view.next_in_ns is None else units.format_duration(view.next_in_ns)
    table.add_row("", f"[dim]now {count(view.due)} due, the next one in {next_in}", "", "")
    return table


def profile(level: Level) -> Text:
    """Timers in each cell, as heights on a scale of its own: by their logarithm."""
    from rich.text import Text

    most = math.log1p(max(level.counts))
    steps = (math.ceil(8 * math.log1p(one) / most) if most else 0 for one in level.counts)
    return Text("".join(HEIGHTS[step] for step in steps), "cyan on grey11")


def namespaces(view: View) -> Table:
    """Those with the most timers."""
    from rich.text import Text

    table = columns("left", "right", "right")
    for one in view.namespaces:
        quota = f" of {one.quota_timers:,}" if one.quota_timers else ""
        table.add_row(
            Text(visible(one.name)), f"{one.timers:,}{quota}", units.format_size(one.bytes)
        )
    return table


def clients(view: View) -> RenderableType:
    """Those who have most to acknowledge."""
    if view.slowest is None:
        return "[dim]for root and the daemon's user only"
    table = columns("left", "right", "right", "right", "right")
    table.add_row("", "[dim]under way", "[dim]to acknowledge", "[dim]oldest", "[dim]silent")
    for one in view.slowest:
        oldest = units.format_duration(one.oldest_ns) if one.oldest_ns else "-"
        table.add_row(
            f"process {one.pid}, uid {one.uid}", f"{one.in_flight:,}", f"{one.unacknowledged:,}",
            oldest, units.format_duration(one.silent_ns),
        )  # fmt: skip
    return table


# ---- its parts ---------------------------------------------------------------------------------


def boxed(title: str, content: RenderableType) -> RenderableType:
    """A part of the picture."""
    from rich.panel import Panel

    return Panel(content, title=f"[bold]{title}", title_align="left", border_style="bright_black")


def side_by_side(*parts: tuple[int, RenderableType]) -> Table:
    """Parts beside each other, each with its share of the width."""
    from rich.table import Table

    table = Table.grid(expand=True)
    for ratio, _ in parts:
        table.add_column(ratio=ratio)
    table.add_row(*(part for _, part in parts))
    return table


def columns(*sides: str) -> Table:
    """A table without lines: which side each column keeps to."""
    from rich.table import Table

    table = Table.grid(expand=True, padding=(0, 1))
    for side in sides:
        table.add_column(justify="right" if side == "right" else "left", no_wrap=True)
    return table


def count(number: float) -> str:
    """A number, or a rate, for people."""
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"

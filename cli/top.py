"""The command top: a live view of a daemon in the terminal."""

from __future__ import annotations

import math
import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command
from purgatoryd.cli.options import emit, frozen_option, json_option, name_option, visible
from purgatoryd.shm_layout.errors import ArenaNotReady, PurgatorydError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from purgatoryd.cli.view import Shard, View
    from purgatoryd.cli.viewer import Viewer, Views
    from purgatoryd.shm_layout.occupancy import Fill, Level
    from purgatoryd.shm_layout.sessions import Session

LEAST_NS = 100_000_000
"""The shortest interval between two views."""
LEAST_CELLS = 8
"""Minimum width of a bar and of a level of the wheel, in characters."""
HEIGHTS = " ▁▂▃▄▅▆▇█"
HEARTBEAT_S = 1.2
"""Time within which a daemon that is not frozen has a heartbeat."""
COLOURS = {"ready": "green", "degraded": "yellow", "draining": "yellow", "recovering": "yellow"}
"""Colours of conditions; all other conditions are red."""
CROWDED, FULL = 0.8, 0.9
"""A bar is yellow from the first used fraction on, and red from the second."""


@click.command("top", cls=Command)
@name_option
@click.option(
    "--interval",
    "interval_ns",
    type=units.Duration(),
    default="500ms",
    show_default=True,
    help="Time between two views; at least 100ms.",
)
@click.option("--once", is_flag=True, help="Print one view after one interval, and exit.")
@click.option("--shard", type=units.Whole(0), help="Show only this shard of a deployment.")
@frozen_option
@json_option
def top_command(
    name: str, interval_ns: int, once: bool, shard: int | None, frozen_ns: int, as_json: bool
) -> None:
    """Show a live view of the daemon in the terminal.

    The view shows rates, durations, how full the tables are, the wheel, namespaces and slow
    clients.

    Reads the shared memory without contacting the daemon, so the view also works while the daemon
    hangs, and shows that it hangs. Keys and payloads are never shown. Slow clients are shown only
    to root and the daemon's user. For a deployment, the view shows the sum of all shards and a line
    for each shard.

    A small terminal shows one section at a time: an arrow key or a digit selects it, `a` shows all
    sections, `h` shows help, `q` quits. If the arena disappears, top waits for it.
    """
    from purgatoryd.cli.viewer import Viewer

    interval_s = max(interval_ns, LEAST_NS) / 1e9
    with closing(Viewer(name, frozen_ns)) as viewer, suppress(KeyboardInterrupt):
        with suppress(ArenaNotReady):
            viewer.take().of(shard)
        if once:
            show(one_interval(viewer, interval_s).of(shard), as_json)
        elif as_json or not sys.stdout.isatty():
            stream(viewer, shard, interval_s, as_json)
        else:
            live(viewer, shard, interval_s)


def one_interval(viewer: Viewer, interval_s: float) -> Views:
    """Return a view after one interval. Wait longer if a daemon may be frozen, and for its next
    heartbeat, which stores counters."""
    time.sleep(interval_s)
    until_s = time.monotonic() + HEARTBEAT_S
    while not viewer.settled or (not viewer.beaten and time.monotonic() < until_s):
        time.sleep(min(interval_s, HEARTBEAT_S / 10))
    return viewer.take()


def stream(viewer: Viewer, shard: int | None, interval_s: float, as_json: bool) -> None:
    """Print views until an interrupt. If there is no view, print the reason instead."""
    while True:
        try:
            show(viewer.take().of(shard), as_json)
        except PurgatorydError as error:
            emit({"error": str(error)}, visible(str(error)), as_json)
        time.sleep(interval_s)


def show(view: View, as_json: bool) -> None:
    """Print one view."""
    if as_json:
        emit(view.record(), "", as_json)
        return
    from rich.console import Console

    Console().print(frame(view))


def live(viewer: Viewer, shard: int | None, interval_s: float) -> None:
    """Draw views until `q` or an interrupt. If the arena disappears, wait for it."""
    from rich.live import Live

    from purgatoryd.cli.keyboard import keys

    chosen = Choice()
    with keys() as pressed, Live(screen=True, auto_refresh=False) as screen:
        while not chosen.over:
            try:
                view: View | PurgatorydError = viewer.take().of(shard)
            except PurgatorydError as error:
                view = error
            until_s = time.monotonic() + interval_s
            screen.update(picture(view, chosen, screen.console), refresh=True)
            while not chosen.over and (left_s := until_s - time.monotonic()) > 0:
                if chosen.take(pressed(left_s)):
                    screen.update(picture(view, chosen, screen.console), refresh=True)


# ---- keys and sections -------------------------------------------------------------------------

SECTIONS = ("overview", "times", "fill", "wheel", "names", "clients")
LARGE = (120, 48)
"""Minimum (columns, lines) of a terminal that shows all sections at once."""
HELP = (
    ("left, right, Tab", "previous section, next section"),
    ("1 to 6", "overview, times, fill, wheel, names, clients"),
    ("a", "all sections that fit, or one section"),
    ("h, ?", "this help; any key closes it"),
    ("q", "quit"),
)


class Choice:
    """The sections that the user has chosen with keys. `everything`: show all sections; None = show
    all sections only in a large terminal."""

    def __init__(self) -> None:
        self.section = 0
        self.everything: bool | None = None
        self.helps = False
        self.over = False

    def take(self, key: str) -> bool:
        """Process a key. True if the picture changes."""
        if not key or key == "q":
            self.over = key == "q"
        elif self.helps or key in ("h", "?"):
            self.helps = not self.helps
        elif key in ("left", "right"):
            step = 1 if key == "right" else -1
            self.section, self.everything = (self.section + step) % len(SECTIONS), False
        elif key in "123456":
            self.section, self.everything = int(key) - 1, False
        elif key == "a":
            self.everything = not self.everything
        else:
            return False
        return bool(key)


def picture(view: View | PurgatorydError, chosen: Choice, console: Console) -> RenderableType:
    """Return the picture for a terminal of the console's size."""
    from rich.console import Group
    from rich.text import Text

    if chosen.helps:
        return boxed("keys", help_table())
    if isinstance(view, PurgatorydError):
        return Text(visible(str(view)), "red")
    large = console.width >= LARGE[0] and console.height >= LARGE[1]
    if chosen.everything or (chosen.everything is None and large):
        return frame(view)
    return Group(headline(view), tabs(chosen), section(view, SECTIONS[chosen.section]))


def tabs(chosen: Choice) -> Text:
    """Return a line with the sections and the keys. The chosen section is highlighted."""
    from rich.text import Text

    line = Text(no_wrap=True)
    for number, name in enumerate(SECTIONS, 1):
        style = "bold reverse" if number == chosen.section + 1 else "dim"
        line.append(f" {number} {name} ", style)
    return line.append("  h help  q quit", "dim")


def help_table() -> Table:
    """Return a table of the keys and their effects."""
    table = columns("left", "wide")
    for key, meaning in HELP:
        table.add_row(key, meaning)
    return table


def section(view: View, name: str) -> RenderableType:
    """Return one section of the picture, for a small terminal."""
    shown = {
        "overview": overview, "times": times, "fill": fills, "wheel": wheel, "names": names,
        "clients": clients,
    }  # fmt: skip
    part = shown[name](view)
    return part if name in ("overview", "names") else boxed(name, part)


def overview(view: View) -> RenderableType:
    """Return the most important figures, for a small terminal."""
    from rich.console import Group

    left, right = boxed("per second", rates(view)), boxed("now", now(view))
    parts = one_row([(28, left), (50, right)])
    return Group(parts, boxed("shards", shards(view))) if view.shards else parts


FULLEST = 5


def now(view: View) -> RenderableType:
    """Return the number of timers and operations, the lateness, and the fullest tables."""
    from rich.console import Group

    late, table = view.times["structural_lateness"], columns("left", "right")
    table.add_row("timers and operations armed", count(view.armed))
    table.add_row("due", count(view.due))
    table.add_row("next wheel step in", next_in(view))
    table.add_row("operations armed", count(view.operations.armed))
    table.add_row("unacknowledged outcomes", count(view.operations.outcomes))
    spans = map(units.format_duration, (late.p50_ns, late.p99_ns))
    table.add_row("late, p50 and p99", ", ".join(spans) if late.count else "-")
    slow = "-" if view.slowest is None else count(len(view.slowest))
    table.add_row("slow clients", slow)
    fullest = sorted(view.fills, key=lambda one: (one.recycles, -one.share))[:FULLEST]
    bars = columns("left", "wide", "right")
    for one in fullest:
        bars.add_row(one.name, Bar(one), f"{one.share:.0%}")
    return Group(table, bars)


def next_in(view: View) -> str:
    """Return the time until the wheel fires or moves a timer, as text."""
    return "-" if view.next_in_ns is None else units.format_duration(view.next_in_ns)


def names(view: View) -> RenderableType:
    """Return a table of the namespaces and a table of the topics."""
    from rich.console import Group

    return Group(
        boxed("namespaces with the most timers", namespaces(view)),
        boxed("topics with the most timers", topics(view)),
    )


# ---- the picture -------------------------------------------------------------------------------


def frame(view: View) -> RenderableType:
    """Return the whole picture, for a large terminal."""
    from rich.console import Group

    return Group(
        headline(view),
        *([boxed("shards", Group(runner(view), shards(view)))] if view.shards else []),
        SideBySide(
            (26, boxed("per second", rates(view))),
            (48, boxed("times, last 10 s", times(view))),
            (46, boxed("fill", fills(view))),
        ),
        boxed("the wheel: timers, by when they are due", wheel(view)),
        SideBySide(
            (40, boxed("namespaces with the most timers", namespaces(view))),
            (50, boxed("topics with the most timers", topics(view))),
        ),
        boxed("slow clients", clients(view)),
    )


def headline(view: View) -> Text:
    """Return a line with the condition of the daemon or deployment."""
    from rich.text import Text

    health = view.health
    colour = COLOURS.get(health.condition, "red")
    line = Text(f" {health.condition} ", f"bold white on {colour}")
    line.append(f" {view.name}", "bold")
    if health.why:
        line.append(f" ({', '.join(health.why.names)})", colour)
    subject = f"process {health.pid}" if health.pid else health.condition
    if view.shards:
        ready = sum(one.condition == "ready" for one in view.shards)
        subject = f"{ready} of {len(view.shards)} shards ready"
    line.append(f"  {subject} for {units.format_duration(view.state_ns)}, last loop iteration ")
    line.append(f"{units.format_duration(health.still_ns)} ago")
    if health.overdue_ns:
        line.append(f", next deadline overdue by {units.format_duration(health.overdue_ns)}", "red")
    return line


def runner(view: View) -> Text:
    """Return a line with the condition of the supervisor process."""
    from rich.text import Text

    one = view.runner
    if one is None:
        return Text("the supervisor process has reported nothing", "red")
    text = Text(f"supervisor process {one.pid}, " if one.pid else "no supervisor process, ")
    text.append(one.condition, COLOURS.get(one.condition, "red"))
    text.append(f"; restarts: {one.restarts}")
    return text.append("".join(f"; {visible(reason)}" for reason in one.reasons))


def shards(view: View) -> Table:
    """Return a table with a line for each shard of a deployment."""
    table = columns("left", "left", "right", "right", "right", "right", "wide")
    heads = ("", "", "armed", "armed/s", "fired/s", "late, p99", "fullest")
    table.add_row(*(f"[dim]{head}" for head in heads))
    for one in view.shards:
        table.add_row(*shard_line(one))
    return table


def shard_line(one: Shard) -> list[RenderableType]:
    """Return the cells of a shard's line. If its arena cannot be read, they contain the reason."""
    from rich.text import Text

    name = str(one.shard)
    if one.condition is None or one.fullest is None:
        return [name, Text("unknown", "red"), "", "", "", "", Text(visible(str(one.error)), "red")]
    return [
        name, Text(one.condition, COLOURS.get(one.condition, "red")), count(one.armed),
        count(one.armed_per_s), count(one.fired_per_s),
        units.format_duration(one.late_p99_ns) if one.late_p99_ns else "-",
        f"{one.fullest.name} {one.fullest.share:.0%}",
    ]  # fmt: skip


def rates(view: View) -> Table:
    """Return a table of the rates per second."""
    table = columns("left", "right")
    for name, rate in view.rates.items():
        table.add_row(name, count(rate))
    for reason, rate in view.refused.items():
        table.add_row(f"[red]refused, {reason}", f"[red]{count(rate)}")
    return table


def times(view: View) -> Table:
    """Return a table of the lateness and the duration of each stage."""
    table = columns("left", "right", "right", "right")
    table.add_row("", "[dim]p50", "[dim]p99", "[dim]max")
    for name, one in view.times.items():
        figures = (one.p50_ns, one.p99_ns, one.max_ns)
        shown = map(units.format_duration, figures) if one.count else ("-",) * len(figures)
        table.add_row(name.replace("_", " "), *shown)
    return table


def fills(view: View) -> Table:
    """Return a table with a bar for each table of the arena."""
    table = columns("left", "wide", "right")
    for one in view.fills:
        table.add_row(one.name, Bar(one), amount(one))
    return table


class Bar:
    """A bar whose length is the used share; at least one character long unless the share is 0."""

    def __init__(self, fill: Fill) -> None:
        self._share = fill.share
        self._used = fill.used
        self._recycles = fill.recycles

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[ProgressBar]:
        """Yield the bar in the available width."""
        from rich.progress_bar import ProgressBar

        share = self._share
        colour = "red" if share >= FULL else "yellow" if share >= CROWDED else "cyan"
        if self._recycles:
            colour = "cyan"
        shown = max(share, 1 / options.max_width) if self._used else 0.0
        yield ProgressBar(1.0, shown, style="bright_black", complete_style=colour,
                          finished_style=colour)  # fmt: skip

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        """Return the minimum and maximum width of a bar."""
        from rich.measure import Measurement

        return Measurement(LEAST_CELLS, options.max_width)


def amount(fill: Fill) -> str:
    """Return the used and the total amount as text."""
    if fill.unit == "bytes":
        return f"{units.format_size(fill.used)} of {units.format_size(fill.capacity)}"
    return f"{fill.used:,} of {fill.capacity:,}"


def wheel(view: View) -> RenderableType:
    """Return a line for each level of the wheel. The left end of a line is now, the right end is
    the longest delay of the level."""
    from rich.console import Group

    table = columns("right", "wide", "left", "right")
    for level in reversed(view.levels):
        reach = units.format_duration(level.cell_ns * len(level.counts))
        table.add_row(f"level {level.number}", Profile(level), reach, count(level.timers))
    return Group(table, f"[dim]{count(view.due)} due now, next wheel step in {next_in(view)}")


class Profile:
    """A line of bars that show the number of timers in each cell. Each line has its own logarithmic
    scale.

    If there are more cells than characters, neighbouring cells are added up.
    """

    def __init__(self, level: Level) -> None:
        self._counts = level.counts

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the line in the available width."""
        from rich.text import Text

        together = -(-len(self._counts) // options.max_width)
        cells = range(0, len(self._counts), together)
        counts = [sum(self._counts[at : at + together]) for at in cells]
        most = math.log1p(max(counts))
        steps = (math.ceil(8 * math.log1p(one) / most) if most else 0 for one in counts)
        yield Text("".join(HEIGHTS[step] for step in steps), "cyan on grey11")

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        """Return the minimum and maximum width of the line: at most one character for each cell."""
        from rich.measure import Measurement

        best = min(len(self._counts), options.max_width)
        return Measurement(min(LEAST_CELLS, best), best)


def namespaces(view: View) -> Table:
    """Return a table of the namespaces with the most timers."""
    from rich.text import Text

    table = columns("left", "right", "right")
    for one in view.namespaces:
        quota = f" of {one.quota_timers:,}" if one.quota_timers else ""
        table.add_row(
            Text(visible(one.name)), f"{one.timers:,}{quota}", units.format_size(one.bytes)
        )
    return table


def topics(view: View) -> Table:
    """Return a table of the topics with the most timers."""
    from rich.text import Text

    table = columns("left", "right", "right")
    table.add_row("", "[dim]timers", "[dim]notices")
    for one in view.topics:
        name = Text(f"{visible(one.namespace)} / {visible(one.name)}")
        table.add_row(name, count(one.timers), count(one.notices))
    return table


def client_name(client: Session) -> str:
    """Return the name that the client gave itself, its process and its uid."""
    subject = f"process {client.pid}" if client.pid else "another host"
    own = f"{visible(client.worker)}, " if client.worker else ""
    return f"{own}{subject}, uid {client.uid}"


def clients(view: View) -> RenderableType:
    """Return a table of the clients with unacknowledged outcomes or an unfinished batch."""
    if view.slowest is None:
        return "[dim]for root and the daemon's user only"
    if not view.slowest:
        return "[dim]none: all outcomes are acknowledged within a second"
    from rich.text import Text

    table = columns("left", "right", "right", "right", "right")
    table.add_row("", "[dim]in flight", "[dim]unacknowledged", "[dim]oldest", "[dim]silent")
    for one in view.slowest:
        oldest = units.format_duration(one.oldest_ns) if one.oldest_ns else "-"
        table.add_row(
            Text(client_name(one)), f"{one.in_flight:,}", f"{one.unacknowledged:,}",
            oldest, units.format_duration(one.silent_ns),
        )  # fmt: skip
    return table


# ---- its parts ---------------------------------------------------------------------------------


def boxed(title: str, content: RenderableType) -> RenderableType:
    """Return a part of the picture in a box with a title."""
    from rich.panel import Panel

    return Panel(content, title=f"[bold]{title}", title_align="left", border_style="bright_black")


class SideBySide:
    """Parts of the picture in rows. A row has as many parts as fit, given the width that each part
    needs."""

    def __init__(self, *parts: tuple[int, RenderableType]) -> None:
        self._parts = parts

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield the rows, each as wide as the terminal."""
        row: list[tuple[int, RenderableType]] = []
        for part in self._parts:
            if row and sum(width for width, _ in row) + part[0] > options.max_width:
                yield one_row(row)
                row = []
            row.append(part)
        yield one_row(row)


def one_row(parts: list[tuple[int, RenderableType]]) -> Table:
    """Return parts next to each other, each with a width in proportion to its needs."""
    from rich.table import Table

    table = Table.grid(expand=True)
    for width, _ in parts:
        table.add_column(ratio=width)
    table.add_row(*(part for _, part in parts))
    return table


def columns(*sides: str) -> Table:
    """Return a table without lines. `sides`: alignment by column; a "wide" column fills the
    rest."""
    from rich.table import Table

    table = Table.grid(expand=True, padding=(0, 1))
    for side in sides:
        wide = side == "wide"
        table.add_column(justify="right" if side == "right" else "left", no_wrap=not wide,
                         ratio=1 if wide else None)  # fmt: skip
    return table


def count(number: float) -> str:
    """Return a number or a rate as text."""
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"

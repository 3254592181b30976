"""Display of the progress of a part: a live bar on a terminal, or else a line every ten seconds."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 10.0


class Display:
    """Shows the progress of one part. `total` has the same unit as the `done` values that show()
    gets."""

    def __init__(self, console: Console, title: str, total: float) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
            console=console,
            refresh_per_second=4,  # drawing more often would take CPU time from the run
            transient=True,
        )
        self._task = self._progress.add_task(title, total=total, now="")
        self._next_line_s = time.monotonic() + LINE_EVERY_S

    def show(self, done: float, now: str) -> None:
        """Show `done` of the total, and a short text about the current activity."""
        if self._console.is_terminal:
            self._progress.update(self._task, completed=min(done, self._total), now=now)
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s += LINE_EVERY_S
            percent = min(100.0, 100 * done / self._total)
            self._console.print(f"{self._title}: {percent:.0f} %, {now}")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

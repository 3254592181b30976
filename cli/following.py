"""Commands that repeat their work until a signal, and retry after temporary errors."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import sleep
from typing import Any

import click

from purgatoryd.cli.exits import figures
from purgatoryd.cli.foreign_errors import unwritable
from purgatoryd.shm_layout import errors

MOST_S = 60
"""Longest pause after an error, in seconds."""
LASTING = (
    errors.InvalidArgument, errors.ExtraMissing, errors.LakeBroken, errors.WalDamaged,
    errors.WalMismatch, errors.LakeMismatch, errors.WindowElsewhere,
)  # fmt: skip
"""Errors that are never temporary."""


def follow(iteration: Callable[[], object], pause_s: Callable[[], float], as_json: bool) -> None:
    """Repeat `iteration`, with pauses, until SIGTERM or SIGINT interrupts it.

    A temporary error, such as a lock of another process, a daemon that does not answer or a full
    disk, is reported on stderr, and the iteration is repeated after 1 s, 2 s, 4 s and so on. Other
    errors are raised.
    """
    failed = 0
    with suppress(KeyboardInterrupt), sigterm_interrupts():
        while True:
            try:
                iteration()
                failed, wait_s = 0, pause_s()
            except Exception as error:
                found = unwritable(error) or error
                if not passes(found):
                    raise
                wait_s = min(MOST_S, 2.0 ** min(failed, 16))
                failed += 1
                _tell(found, wait_s, as_json)
            sleep(wait_s)


def passes(error: Exception) -> bool:
    """Return True if the error is temporary, so that a repeated iteration may succeed."""
    if isinstance(error, (errors.PurgatorydError, OSError)):
        return not isinstance(error, LASTING)
    if "pyspark" not in sys.modules:
        return False
    from pyspark.errors import AnalysisException, PySparkException

    return isinstance(error, PySparkException) and not isinstance(error, AnalysisException)


def _tell(error: Exception, wait_s: float, as_json: bool) -> None:
    said = str(error).partition("\n")[0]  # Spark appends the stack trace of its JVM
    reported: dict[str, Any] = {"error": type(error).__name__, "message": said}
    reported |= figures(error) | {"again_in_s": wait_s}
    text = f"purgatoryd: {said}; retrying in {wait_s:g} s"
    click.echo(json.dumps(reported, default=str) if as_json else text, err=True)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Return a context manager in which SIGTERM raises KeyboardInterrupt, as SIGINT does."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

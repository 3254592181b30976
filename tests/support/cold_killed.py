"""Promote windows of timers. Kill each promotion one step later than the previous promotion, then
start the killed promotion again and finish it.

python cold_killed.py LAKE NAME

A step is a change of a file, or the beginning or end of a request to the daemon. A window has
timers that are due and timers that are not due. A timer that is not due is cancelled between the
kill and the next start. The program prints the number of steps. It forks a child for each step,
because a new interpreter for each step would take minutes. Spark would only write rows, so it is
replaced by Python code.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cold_driver import small_pieces, spark_of_python
from ship_killed import killed_at

from purgatoryd.clients import Client
from purgatoryd.pipeline import cold
from purgatoryd.pipeline.bulk_loading import BulkLoader
from purgatoryd.pipeline.promote import promote
from purgatoryd.pipeline.tier import HOUR_NS, Tier

NO_SPARK: Any = None
CALLS = ("open_bulk_load", "add", "cancel", "close_bulk_load", "forget_bulk_load")
DUE, FAR = range(6), range(6, 12)
NOW_NS = time.time_ns()
UNTIL_NS = NOW_NS + 2 * HOUR_NS


def rows_of(window: int) -> pa.Table:
    """Return the rows of a window: some timers have been due for an hour, and some become due in an
    hour."""
    return pa.Table.from_pylist([
        {"namespace": "shop", "key_type": "str", "key": key_of(window, n), "topic": "t",
         "payload": b"", "deadline_ns": NOW_NS + (HOUR_NS if n in FAR else -HOUR_NS)}
        for n in (*DUE, *FAR)
    ])  # fmt: skip


def key_of(window: int, n: int) -> bytes:
    """Return the key of timer n of a window."""
    return f"w{window}:{n}".encode()


def counted(call: Callable[..., Any], count: Callable[[str, tuple[object, ...]], None]) -> Any:
    """Wrap a call, so that its beginning and its end are steps."""

    def called(*args: Any) -> Any:
        count("os.rename", ())
        found = call(*args)
        count("os.rename", ())
        return found

    return called


def forked(
    action: Callable[[Tier, BulkLoader], object], lake: Path, name: str, step: int = 0
) -> bool:
    """Run an action in a child process, which is killed at this step; 0: it is not killed. Return
    True if the action ended."""
    pid = os.fork()
    if pid == 0:
        hot, count = BulkLoader(name), killed_at(step)
        os.fsync = lambda fd: None  # a sync does not change which bytes survive a kill
        for call in CALLS:
            setattr(hot, call, counted(getattr(hot, call), count))
        tier = Tier(lake)
        sys.addaudithook(count)
        action(tier, hot)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0


def bring(tier: Tier, hot: BulkLoader) -> object:
    """Promote all timers that become due before UNTIL_NS."""
    return promote(NO_SPARK, tier, UNTIL_NS, hot)


def finish(window: int) -> Callable[[Tier, BulkLoader], object]:
    """Return a function for the next start: cancel one of the timers, and continue the
    promotion."""

    def after(tier: Tier, hot: BulkLoader) -> object:
        gone = rows_of(window).slice(FAR[window % len(FAR)], 1)
        cold.cancel(tier, gone, hot)
        promote(NO_SPARK, tier, UNTIL_NS, hot)
        with Client(hot.name, namespace="shop") as client:
            live = [client.get(key_of(window, n).decode()) is not None for n in FAR]
        assert live == [n != FAR[window % len(FAR)] for n in FAR], (window, live)
        hot.close()
        return live

    return after


def main(lake: Path, name: str) -> None:
    """Check all steps. Raises AssertionError at the first step after which the result is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        spark_of_python(patch)
        small_pieces(patch, 5)
        window, whole = 0, False
        while not whole:
            window += 1
            cold.bulk_load(Tier(lake), rows_of(window), f"bulk load {window}", BulkLoader(name))
            whole = forked(bring, lake, name, window)
            assert forked(finish(window), lake, name), window
    print(window)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

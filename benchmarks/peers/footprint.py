"""Measure memory of a timer and recovery after a kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

from .crowd import Sample
from .firing import Arm, arm_apart
from .side import ROOT, Server, Start, boot_ns

FAR_NS = 3600 * 10**9
SETTLE_S = 1.5
"""Time in which a log that is synced each second reaches the disk."""

Serve = Callable[[Start], AbstractContextManager[Server]]
Forget = Callable[[Start], None]


def far(count: int) -> list[int]:
    return [boot_ns() + FAR_NS + n for n in range(count)]


def memory(serve: Serve, arm: Arm, memory_bytes: Callable[[Server], int], timers: int) -> Sample:
    """Return the bytes of a timer: memory with all timers, minus memory of an empty server for
    few."""
    found = []
    for count in (timers, 0):
        with (
            TemporaryDirectory() as directory,
            TemporaryDirectory() as files,
            serve(Start(Path(directory), Path(files), count)) as server,
        ):
            arm_apart(arm, server, far(count))
            found.append(memory_bytes(server))
    return {"bytes": (found[0] - found[1]) / timers}


def recovery(serve: Serve, arm: Arm, forget: Forget, timers: int, log: str) -> Sample:
    """Return the seconds from the start of a server until it is ready, after a kill with timers
    pending.

    `serve`: kills the server at the end of its block. `forget`: removes what is left of it.
    """
    with TemporaryDirectory() as directory, TemporaryDirectory(dir=ROOT / "build") as files:
        start = Start(Path(directory), Path(files), timers, log)
        try:
            with serve(start) as server:
                arm_apart(arm, server, far(timers))
                time.sleep(SETTLE_S)
            begun_s = time.monotonic()
            with serve(start):
                return {"ready_s": time.monotonic() - begun_s}
        finally:
            forget(start)

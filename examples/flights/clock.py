"""The boot clock, which the daemon and all processes of a run share."""

from __future__ import annotations

import time

from examples.flights.events import NS_PER_S


def boot_ns() -> int:
    """Return the time of CLOCK_BOOTTIME in ns."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def sleep_until(moment_boot_ns: int) -> None:
    """Sleep until the boot clock has reached the moment."""
    left_ns = moment_boot_ns - boot_ns()
    if left_ns > 0:
        time.sleep(left_ns / NS_PER_S)

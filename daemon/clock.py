"""The two clocks that a daemon can run on. They are the only source of time for the core."""

from __future__ import annotations

from typing import Protocol

from purgatoryd.shm_layout.host import Host

ROUNDING_NS = 1000
"""The offset of the wall clock is rounded down to a multiple of this."""


class Clock(Protocol):
    """The clock of the arena. Times are in ns."""

    virtual: bool

    def now_ns(self, real_boot_ns: int) -> int:
        """Return the arena's time when the boot clock shows `real_boot_ns`."""
        ...

    def wall_offset_ns(self, real_boot_ns: int) -> int:
        """Return wall time minus the arena's time."""
        ...


class RealClock:
    """CLOCK_BOOTTIME, with CLOCK_REALTIME as the wall clock."""

    virtual = False

    def __init__(self, host: Host) -> None:
        self._host = host

    def now_ns(self, real_boot_ns: int) -> int:
        """Return `real_boot_ns`: the arena's clock is the boot clock."""
        return real_boot_ns

    def wall_offset_ns(self, real_boot_ns: int) -> int:
        """Return wall time minus boot time, rounded down to a microsecond.

        Because of the rounding, the pause between reading the two clocks does not look like a step
        of the wall clock. Wall deadlines become late by less than a microsecond, never early.
        """
        return (self._host.wall_ns() - real_boot_ns) // ROUNDING_NS * ROUNDING_NS


class VirtualClock:
    """A clock that moves only on request. Its wall time is its own time plus a configured
    origin."""

    virtual = True

    def __init__(self, now_ns: int, wall_origin_ns: int) -> None:
        self.at_ns = now_ns
        self._wall_origin_ns = wall_origin_ns

    def now_ns(self, real_boot_ns: int) -> int:
        """Return the time to which the clock was last moved."""
        return self.at_ns

    def wall_offset_ns(self, real_boot_ns: int) -> int:
        """Return the configured origin of the wall time."""
        return self._wall_origin_ns

"""The two clocks a daemon can run on. The core gets time from here and nowhere else."""

from __future__ import annotations

from typing import Protocol

from purgatoryd.shm_layout.host import Host

ROUNDING_NS = 1000
"""The wall's offset is rounded down to a multiple of this."""


class Clock(Protocol):
    """What the loop asks of a clock; times in ns on the arena's clock."""

    virtual: bool

    def now_ns(self, real_boot_ns: int) -> int:
        """The arena's time when the boot clock says `real_boot_ns`."""
        ...

    def wall_offset_ns(self, real_boot_ns: int) -> int:
        """Wall time minus the arena's time."""
        ...


class RealClock:
    """CLOCK_BOOTTIME, with CLOCK_REALTIME as its wall."""

    virtual = False

    def __init__(self, host: Host) -> None:
        self._host = host

    def now_ns(self, real_boot_ns: int) -> int:
        """The boot clock itself."""
        return real_boot_ns

    def wall_offset_ns(self, real_boot_ns: int) -> int:
        """Rounded down to a microsecond, so that reading two clocks does not look like a step.

        Rounding down makes wall deadlines late by less than that, never early.
        """
        return (self._host.wall_ns() - real_boot_ns) // ROUNDING_NS * ROUNDING_NS


class VirtualClock:
    """Moves only on request; the wall is a configured origin plus it."""

    virtual = True

    def __init__(self, now_ns: int, wall_origin_ns: int) -> None:
        self.at_ns = now_ns
        self._wall_origin_ns = wall_origin_ns

    def now_ns(self, real_boot_ns: int) -> int:
        """Where it was last moved to."""
        return self.at_ns

    def wall_offset_ns(self, real_boot_ns: int) -> int:
        """The origin."""
        return self._wall_origin_ns

"""A simulated host: clocks that step, drift and suspend, random bytes, and pids."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from purgatoryd.shm_layout.host import Host

if TYPE_CHECKING:
    from world.disk import SimulatedDisk
    from world.schedule import Schedule


class Machine:
    """Resources that all processes of one machine share: boot clock, wall clock, disk."""

    def __init__(
        self, schedule: Schedule, rng: random.Random, disk: SimulatedDisk, begin_wall_ns: int
    ) -> None:
        """`begin_wall_ns`: wall time at the beginning of the world."""
        self.schedule = schedule
        self.rng = rng
        self.disk = disk
        self.boot_id = rng.randbytes(16)
        self.boot_begun_ns = schedule.now_ns - 10**12 - rng.randrange(1000)
        """World time at which the boot clock was 0."""
        self.suspended_ns = 0
        """Time for which this machine has been suspended since it booted."""
        self.wall_offset_ns = begin_wall_ns - schedule.now_ns
        """Wall time minus world time."""
        self.drift_ppm = 0
        """Speed of the wall clock relative to the boot clock, minus 1, in millionths."""
        self._drifts_from_ns = schedule.now_ns
        self.sleepers: list[Callable[[], None]] = []
        """Functions that wake the readers whose words in an arena have changed."""
        self._pid = 1000
        self._reused: int | None = None

    def next_pid(self) -> int:
        """Return the pid that is to be reused, or a pid that no process of this machine has had."""
        pid, self._reused = self._reused, None
        if pid is None:
            self._pid += 1
            return self._pid
        return pid

    def reuse_pid(self, pid: int) -> None:
        """Give this pid to the next process."""
        self._reused = pid

    def reboot(self) -> None:
        """Begin another boot: the boot id changes, and the boot clock starts again."""
        self.boot_id = self.rng.randbytes(16)
        self.boot_begun_ns = self.schedule.now_ns - self.rng.randrange(10**9, 10**11)
        self.suspended_ns = 0

    def wake_sleepers(self) -> None:
        """Wake the readers whose words in an arena have changed."""
        for wake in self.sleepers:
            wake()

    def suspend(self, span_ns: int) -> None:
        """Suspend the machine: time passes only on the boot clock and the wall clock."""
        self.schedule.skip(span_ns)
        self.suspended_ns += span_ns

    def step_wall(self, by_ns: int) -> None:
        """Move the wall clock by `by_ns`."""
        self.wall_offset_ns += by_ns

    def drift(self, ppm: int) -> None:
        """Let the wall clock drift from now on."""
        self.wall_offset_ns = self.wall_ns(self.schedule.now_ns) - self.schedule.now_ns
        self._drifts_from_ns, self.drift_ppm = self.schedule.now_ns, ppm

    def wall_ns(self, now_ns: int) -> int:
        """Return the time that the wall clock shows at a world time."""
        drifted_ns = (now_ns - self._drifts_from_ns) * self.drift_ppm // 10**6
        return now_ns + self.wall_offset_ns + drifted_ns


class SimulatedHost(Host):
    """The host as one simulated process sees it."""

    def __init__(self, machine: Machine, pid: int, boot_offset_ns: int = 0) -> None:
        """Create a host. `boot_offset_ns`: offset of the boot clock in the time namespace of the
        process."""
        self.machine = machine
        self.disk = machine.disk
        self._pid = pid
        self._boot_offset_ns = boot_offset_ns

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def uid(self) -> int:
        return 0

    def boot_ns(self) -> int:
        machine = self.machine
        return machine.schedule.read() - machine.boot_begun_ns + self._boot_offset_ns

    def wall_ns(self) -> int:
        return self.machine.wall_ns(self.machine.schedule.read())

    def monotonic_s(self) -> float:
        machine = self.machine
        return (machine.schedule.now_ns - machine.boot_begun_ns - machine.suspended_ns) / 1e9

    def random_bytes(self, count: int) -> bytes:
        return self.machine.rng.randbytes(count)

    def boot_id(self) -> bytes:
        return self.machine.boot_id

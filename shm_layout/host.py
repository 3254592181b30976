"""Facilities of the host: clocks, random bytes, disk, and the identity of the process.

Code that needs one of them takes a Host as an argument. Tests replace it, so that one seed decides
every time, every random byte and every pid.
"""

from __future__ import annotations

import os
import time

from purgatoryd.shm_layout.disk import DISK, Disk


class Host:
    """This process's host."""

    disk: Disk = DISK
    """Files that survive a power cut."""

    @property
    def pid(self) -> int:
        """Pid of this process."""
        return os.getpid()

    @property
    def uid(self) -> int:
        """The effective uid of this process."""
        return os.geteuid()

    def boot_ns(self) -> int:
        """CLOCK_BOOTTIME in ns: it counts suspend and never steps."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def wall_ns(self) -> int:
        """CLOCK_REALTIME in ns."""
        return time.time_ns()

    def monotonic_s(self) -> float:
        """CLOCK_MONOTONIC in seconds: time-outs do not count suspend."""
        return time.monotonic()

    def random_bytes(self, count: int) -> bytes:
        """Return `count` unpredictable bytes."""
        return os.urandom(count)

    def random_bits(self, count: int) -> int:
        """Return an unpredictable number of `count` bits."""
        return int.from_bytes(self.random_bytes(-(-count // 8))) >> -count % 8

    def boot_id(self) -> bytes:
        """Identity of this boot of the host, 16 bytes."""
        with open("/proc/sys/kernel/random/boot_id", "rb", buffering=0) as file:
            return bytes.fromhex(file.read().decode().strip().replace("-", ""))


HOST = Host()

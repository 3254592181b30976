"""Facilities of the host: clocks, random bytes, disk, and the identity of the process.

Code that needs these facilities takes a Host as an argument. Tests pass a simulated host, on which
one seed decides every time, every random byte and every pid.
"""

from __future__ import annotations

import os
import time

from purgatoryd.shm_layout.disk import DISK, Disk


class Host:
    """The host on which this process runs."""

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
        """CLOCK_BOOTTIME in ns: it also runs while the host is suspended, and it never steps."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def wall_ns(self) -> int:
        """CLOCK_REALTIME in ns."""
        return time.time_ns()

    def monotonic_s(self) -> float:
        """CLOCK_MONOTONIC in seconds: it stops while the host is suspended, as timeouts should."""
        return time.monotonic()

    def random_bytes(self, count: int) -> bytes:
        """Return `count` unpredictable bytes."""
        return os.urandom(count)

    def random_bits(self, count: int) -> int:
        """Return an unpredictable number from 0 to 2**count - 1."""
        return int.from_bytes(self.random_bytes(-(-count // 8))) >> -count % 8

    def free_memory(self) -> list[tuple[str, int]]:
        """Return (name, free bytes) of each limit of memory that applies to this process."""
        from purgatoryd.shm_layout.topology import free_memory  # short commands do not need it

        return free_memory()

    def boot_id(self) -> bytes:
        """Identity of this boot of the host, 16 bytes."""
        with open("/proc/sys/kernel/random/boot_id", "rb", buffering=0) as file:
            return bytes.fromhex(file.read().decode().strip().replace("-", ""))


HOST = Host()

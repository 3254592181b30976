"""A wall clock of daemons that a test steps."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

NS = 10**9


class Wall:
    """A wall clock for daemons that are started with `environment`."""

    def __init__(self, directory: Path, library: Path) -> None:
        file = directory / "shift"
        file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "WALL_SHIFT": str(file)}
        self._highest_ns = 0
        with file.open("r+b") as opened:
            self._shift = mmap.mmap(opened.fileno(), 8)

    @property
    def now_ns(self) -> int:
        return time.time_ns() + int(struct.unpack("<q", self._shift)[0])

    @property
    def highest_ns(self) -> int:
        """Latest time that the clock has shown so far."""
        self._highest_ns = max(self._highest_ns, self.now_ns)
        return self._highest_ns

    def step(self, shift_s: float) -> None:
        """Set the clock `shift_s` ahead of the machine's clock."""
        _ = self.highest_ns
        self._shift[:] = struct.pack("<q", round(shift_s * NS))

"""Types of file systems."""

from __future__ import annotations

import os
from pathlib import Path


def filesystems(path: Path) -> set[str]:
    """Return the possible types of the file system of a path, such as ext4; empty if unknown."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = (line.partition(" - ") for line in lines)
    return {after.split()[0] for before, _, after in mounts if before.split()[2] == number}


def is_in_memory(path: Path) -> bool:
    """Return whether a reboot deletes the files at this path."""
    return bool(filesystems(path) & {"tmpfs", "ramfs"})

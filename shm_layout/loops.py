"""The CPUs of all daemon loops on this host, read from the daemons' arenas."""

from __future__ import annotations

import os
from contextlib import suppress
from glob import glob
from typing import NamedTuple

from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.health import is_alive
from purgatoryd.shm_layout.layout import ABI, PlacementPart, kernel_number, size_of

_HEADER_BYTES = size_of("pg_header")


class Loop(NamedTuple):
    """Placement and owner of a daemon's loop."""

    cpu: int
    pid: int
    chosen: bool
    """True if the daemon chose this CPU itself, and moves to a better CPU if it can."""


def loop_cpus(*ours: str) -> list[int]:
    """Return the CPU of each loop that loops() returns."""
    return [loop.cpu for loop in loops(*ours)]


def loops(*ours: str) -> list[Loop]:
    """Return all loops that have a CPU, sorted, from the arenas that this user may read. `ours`:
    names of arenas to leave out."""
    found = []
    for name in glob(f"{shm.PREFIX}*", root_dir=shm.MOUNT):
        if f"/{name}" not in ours and not name.endswith(".private"):
            with suppress(OSError):
                found += _loops(f"{shm.MOUNT}/{name}")
    return sorted(found)


def _loops(path: str) -> list[Loop]:
    """Return a list with the loop of one arena; empty if its daemon has ended or has no CPU.

    The header is copied, not mapped: any user can create such a file, and truncating a mapped file
    kills the process that maps it.
    """
    header = ffi.from_buffer("struct pg_header *", _beginning(path).ljust(_HEADER_BYTES, b"\0"))
    arena = header.magic == lib.PG_MAGIC and header.abi_major == ABI[0]
    cpu, pid = kernel_number(header.placement.reaper_cpu), int(header.daemon_pid)
    alive = arena and is_alive(header)
    chosen = PlacementPart.CORE in PlacementPart(header.placement.applied)
    return [Loop(cpu, pid, chosen)] if alive and cpu is not None else []


def _beginning(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.pread(fd, _HEADER_BYTES, 0)
    finally:
        os.close(fd)

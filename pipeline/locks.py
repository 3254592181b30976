"""One writer at a time, among processes: a lock on a file goes with the process that holds it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from purgatoryd.shm_layout.disk import private
from purgatoryd.shm_layout.errors import LakeInUse


def take(fd: int, path: Path) -> None:
    """Locks the open file `path` until it is closed. Raises LakeInUse."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LakeInUse(str(path)) from None


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else holds `path` inside. Raises LakeInUse."""
    with open(path, "ab", opener=private) as file:
        take(file.fileno(), path)
        yield


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """The same; waits while somebody else holds it."""
    with open(path, "ab", opener=private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

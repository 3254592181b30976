"""Spoils what a daemon left, so that no start can use it."""

from __future__ import annotations

from purgatoryd.shm_layout.layout import fields
from purgatoryd.shm_layout.paths import Paths
from purgatoryd.shm_layout.shm import MOUNT


def spoil(paths: Paths) -> None:
    """The arena of a daemon that does not run: its replay buffer ends where none can."""
    (offset,) = (at for field, at, _ in fields("pg_header") if field == "replay_tail")
    with (MOUNT / paths.arena[1:]).open("r+b") as arena:
        arena.seek(offset)
        arena.write(b"\xff")

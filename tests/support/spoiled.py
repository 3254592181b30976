"""Damage to a daemon's arena file, so that no start can use the file."""

from __future__ import annotations

from purgatoryd.shm_layout.layout import fields
from purgatoryd.shm_layout.paths import Paths
from purgatoryd.shm_layout.shm import MOUNT


def spoil(paths: Paths) -> None:
    """Damage the arena of a daemon that does not run: write an impossible `replay_tail`."""
    (offset,) = (at for field, at, _ in fields("pg_header") if field == "replay_tail")
    with (MOUNT / paths.arena[1:]).open("r+b") as arena:
        arena.seek(offset)
        arena.write(b"\xff")

"""Open the arena of a daemon that does not run, as a start of the daemon does."""

from __future__ import annotations

from purgatoryd.daemon.store import Opening, open_arena, owned
from purgatoryd.shm_layout.arena import Arena


def opened(opening: Opening) -> Arena:
    """Open the arena under its lock, and release the lock. Raises the same errors as open_arena."""
    with owned(opening) as held:
        return open_arena(held)

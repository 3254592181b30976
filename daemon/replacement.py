"""Replace a daemon's arena files, so that a kill at any moment leaves one complete arena.

New arena files have no names until they are complete. Then they get temporary names, and with these
they replace the old files. `TABLE` lists the states in between. The temporary names that exist show
in which state a kill left the files, and the row of that state says how the next start continues.
So an arena file under the daemon's name is complete and belongs to the private arena file; any
other file is left alone.

Each step needs the lock on the private arena file, see `store.owned`. A new private arena file is
locked before it has a name.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass

from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.arena import retire
from purgatoryd.shm_layout.errors import AlreadyRunning, BadPath
from purgatoryd.shm_layout.paths import Paths
from purgatoryd.shm_layout.shm import ArenaFile, ArenaLock

NEW = ".new"
"""Suffix of a new private arena file."""
NEXT = ".next"
"""Suffix of a new arena file."""


class State(enum.Enum):
    """The progress of a replacement."""

    SETTLED = enum.auto()
    """No replacement is under way."""
    PREPARED = enum.auto()
    """The new private arena file has a temporary name; the old arena is in effect."""
    COMMITTED = enum.auto()
    """Both new files have temporary names; the new arena is in effect."""
    PRIVATE_PLACED = enum.auto()
    """The new private arena file has replaced the old file; the new arena is in effect."""


class Replacement:
    """The arena files of a daemon. The caller holds the lock."""

    def __init__(self, paths: Paths, lock: ArenaLock) -> None:
        self._paths = paths
        self._lock = lock
        self._private_new = f"{paths.private}{NEW}"
        self._arena_next = f"{paths.arena}{NEXT}"

    @property
    def row(self) -> Row:
        """The row of `TABLE` for the temporary names that exist. Files of other users are
        ignored."""
        on_disk = shm.ours(self._private_new), shm.ours(self._arena_next)
        return next(row for row in TABLE if (row.private_new, row.arena_next) == on_disk)

    # ---- all steps -----------------------------------------------------------------------------

    def replace_by(self, arena: ArenaFile, private: ArenaFile) -> None:
        """Replace the daemon's arena files by new files, which have no names yet.

        Raises AlreadyRunning if another daemon of this name has replaced them first. This can
        happen only if there was no file to lock.
        """
        for row in TABLE:
            row.step(self, arena, private)
        self._lock.settle(self._paths.private)

    def recover(self) -> None:
        """Complete or undo the replacement that a killed daemon began.

        Raises AlreadyRunning if another daemon of this name is replacing the arena files, or has
        done so.
        """
        paths, lock = self._paths, self._lock
        if shm.ours(self._private_new):
            lock.lock([self._private_new])
        owned = lock.holds(self._private_new)
        while (recovery := self.row.recovery) is not None:
            if recovery is Replacement._undo and not owned:
                break  # the file belongs to another daemon, which is still starting
            recovery(self)
        leftover = f"{paths.arena}{NEW}"
        if shm.ours(leftover):
            shm.unlink(leftover)
        if shm.ours(paths.private):
            lock.lock([paths.private])
        lock.settle(paths.private)

    def refuse_taken(self) -> None:
        """Raise BadPath if another file has one of the temporary names."""
        for name in (self._private_new, self._arena_next):
            shm.refuse_foreign(name)
            path = shm.MOUNT / name[1:]
            if os.path.lexists(path):
                raise BadPath(str(path), "has the name of the daemon's next arena file: remove it")

    def take_back(self, arena: ArenaFile, private: ArenaFile) -> None:
        """Remove all names of new files that could not replace the old files.

        If NAME.next stayed, the next start would use the copy as its arena and lose all changes
        made since the copy.
        """
        paths = self._paths
        for file, name in (
            (arena, self._arena_next),
            (arena, paths.arena),
            (private, self._private_new),
            (private, paths.private),
        ):
            file.unlink(name)
        self._lock.release(private.fd)

    # ---- single steps --------------------------------------------------------------------------

    def _prepare(self, arena: ArenaFile, private: ArenaFile) -> None:
        try:
            private.link(self._private_new)
        except FileExistsError:
            raise self._other_start() from None

    def _commit(self, arena: ArenaFile, private: ArenaFile) -> None:
        paths, lock = self._paths, self._lock
        try:
            if shm.exists(paths.private) and not lock.holds(paths.private):
                raise self._other_start()
            arena.link(self._arena_next)
        except BaseException:
            self._undo()
            raise
        lock.adopt(private.fd)

    def _undo(self) -> None:
        shm.unlink(self._private_new)

    def _place_private(self, *_: ArenaFile) -> None:
        """Retire the old arena, so that its readers attach again, and then replace the private
        arena file."""
        if shm.ours(self._paths.arena):
            retire(self._paths.arena)
        shm.replace(self._private_new, self._paths.private)

    def _place_arena(self, *_: ArenaFile) -> None:
        shm.replace(self._arena_next, self._paths.arena)

    def _other_start(self) -> AlreadyRunning:
        paths = self._paths
        return AlreadyRunning(paths.name, 0, str(shm.MOUNT / paths.private[1:]))


@dataclass(frozen=True)
class Row:
    """A state, the files by which to recognise it, and the steps that leave it."""

    state: State
    private_new: bool
    """NAME.private.new exists."""
    arena_next: bool
    """NAME.next exists."""
    step: Callable[[Replacement, ArenaFile, ArenaFile], None]
    """The step that a replacement takes in this state, called with the new arena file and the new
    private arena file. It leads to the state of the next row, and from the last row to the
    first."""
    recovery: Callable[[Replacement], None] | None
    """The step that a start takes if it finds this state; None = no step is needed."""
    recovers_to: State
    """The state after that step."""


TABLE = (
    Row(State.SETTLED, False, False, Replacement._prepare, None, State.SETTLED),
    Row(State.PREPARED, True, False, Replacement._commit, Replacement._undo, State.SETTLED),
    Row(
        State.COMMITTED, True, True,
        Replacement._place_private, Replacement._place_private, State.PRIVATE_PLACED,
    ),
    Row(
        State.PRIVATE_PLACED, False, True,
        Replacement._place_arena, Replacement._place_arena, State.SETTLED,
    ),
)  # fmt: skip
"""All states, in the order of a replacement. NAME.next is the commit point: a start undoes a
replacement if this file does not exist, and completes it if the file exists."""

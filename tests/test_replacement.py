"""Replacement of arena files: a kill in any state leaves one complete arena."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_daemon import remove_arena_files

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.replacement import TABLE, Row, State
from purgatoryd.daemon.store import Opening, core_config, create_arena, open_arena, owned
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.layout import ArenaState
from purgatoryd.shm_layout.paths import paths_in

pytestmark = pytest.mark.tier("check")

CONFIG = Config("demo", capacity=100)
COUNTS = {
    State.SETTLED: "old",
    State.PREPARED: "old",
    State.COMMITTED: "new",
    State.PRIVATE_PLACED: "new",
}
"""For each state: the arena that a start uses if a kill came in this state, before the next
step."""


@pytest.fixture
def opening(daemon_dir: Path) -> Iterator[Opening]:
    paths = paths_in(daemon_dir, "demo")
    yield Opening(CONFIG, paths)
    remove_arena_files(paths)


def test_the_temporary_names_tell_each_state() -> None:
    assert [row.state for row in TABLE] == list(State)
    assert len({(row.private_new, row.arena_next) for row in TABLE}) == len(TABLE) == 2**2
    assert COUNTS.keys() == {row.state for row in TABLE}


def take_steps(opening: Opening, new: Arena, upto: State) -> None:
    """Take the steps that replace an arena by a new one, and stop in the state `upto`."""
    replacement = opening.replacement
    for row in TABLE:
        assert replacement.row is row
        if row.state is upto:
            return
        row.step(replacement, new.file, new.private)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.state.name)
@pytest.mark.parametrize("first", [False, True], ids=["replaces another", "first"])
def test_a_start_goes_on_where_a_replacement_was_cut_off(
    row: Row, first: bool, opening: Opening
) -> None:
    uuids = {}
    with contextlib.ExitStack() as killed:
        owner = killed.enter_context(owned(opening))
        if not first:
            old = killed.enter_context(contextlib.closing(open_arena(owner)))
            uuids["old"] = old.uuid
        fields = core_config(CONFIG)
        new = killed.enter_context(contextlib.closing(create_arena(opening.paths, fields)))
        new.set_state(ArenaState.READY)
        uuids["new"] = new.uuid
        take_steps(owner, new, row.state)
    with owned(opening) as owner:
        recovery = owner.replacement
        if row.recovery is not None:
            row.recovery(recovery)
        assert recovery.row.state is row.recovers_to
        recovery.recover()
        assert recovery.row.state is State.SETTLED
        assert owner.lock.holds(opening.paths.private) == (COUNTS[row.state] in uuids)
        with contextlib.closing(open_arena(owner)) as found:
            if COUNTS[row.state] in uuids:
                assert found.uuid == uuids[COUNTS[row.state]]
            else:
                assert found.uuid not in uuids.values()
        assert len(list(shm.MOUNT.glob(f"{opening.paths.arena[1:]}*"))) == 2


def test_a_complete_replacement_retires_the_old_arena(opening: Opening) -> None:
    with owned(opening) as owner, contextlib.closing(open_arena(owner)) as old:
        with contextlib.closing(create_arena(opening.paths, core_config(CONFIG))) as new:
            owner.replacement.replace_by(new.file, new.private)
            assert owner.replacement.row.state is State.SETTLED
            assert new.file.has_name
            assert new.private.has_name
        assert old.header.state == ArenaState.RETIRED

"""Replacement of arena files: a kill in any state leaves one complete arena."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from real_daemon import remove_arena_files

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.replacement import TABLE, Row, State
from purgatoryd.daemon.snapshot import save_snapshot
from purgatoryd.daemon.store import (
    Opening,
    core_config,
    create_arena,
    open_arena,
    owned,
    place_again,
    remove_arena,
)
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.errors import ArenaTooLarge
from purgatoryd.shm_layout.host import Host
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


# ---- memory ------------------------------------------------------------------------------------


class SmallHost(Host):
    """A host whose memory is smaller than its /dev/shm."""

    def free_memory(self) -> list[tuple[str, int]]:
        return [("large", 1 << 62), ("memory", 4096)]


def first(opening: Opening) -> Opening:
    return opening


def with_other_sizes(opening: Opening) -> Opening:
    begin(opening)
    return replace(opening, config=replace(CONFIG, capacity=200))


def from_wal(opening: Opening) -> Opening:
    folder = opening.paths.directory / "wal" / "demo"
    folder.mkdir(0o700, parents=True)
    opening = replace(opening, config=replace(CONFIG, wal_dir=str(folder.parent)))
    begin(opening)
    (snapshot,) = folder.glob("*.snapshot")
    snapshot.rename(folder / f"{2:020}.snapshot")  # no longer the name of a first snapshot
    remove_arena(opening.paths)
    return opening


def from_export(opening: Opening) -> Opening:
    folder = opening.paths.directory
    with owned(opening) as owner, contextlib.closing(open_arena(owner)) as arena:
        save_snapshot(arena, folder, Host(), lambda _: None)
    remove_arena(opening.paths)
    (path,) = folder.glob("*.snapshot")
    return replace(opening, import_path=path)


def begin(opening: Opening) -> None:
    with owned(opening) as owner:
        open_arena(owner).close()


@pytest.mark.parametrize("make", [first, with_other_sizes, from_wal, from_export])
def test_an_arena_that_memory_cannot_hold_is_refused_before_a_page_is_allocated(
    make: Callable[[Opening], Opening], opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = replace(make(opening), host=SmallHost())
    was = files_of(opening)
    with monkeypatch.context() as patch, owned(opening) as owner:
        patch.setattr(os, "posix_fallocate", None)
        with pytest.raises(ArenaTooLarge, match=r"needs \d+ bytes in memory, available are 4096;"):
            open_arena(owner)
    assert files_of(opening) == was


def test_a_copy_of_an_arena_that_memory_cannot_hold_is_refused(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owned(opening) as owner, contextlib.closing(open_arena(owner)) as arena:
        arena.file.unlink(opening.paths.arena)
        monkeypatch.setattr(os, "posix_fallocate", None)
        with pytest.raises(ArenaTooLarge, match="in memory, available are 4096;"):
            place_again(arena, replace(owner, host=SmallHost()), lambda: None)


def files_of(opening: Opening) -> set[tuple[str, int]]:
    found = shm.MOUNT.glob(f"{opening.paths.arena[1:]}*")
    return {(path.name, path.stat().st_ino) for path in found}

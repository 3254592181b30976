"""A deployment whose daemons do not run: its arenas, its WALs, and starts that can be killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opened import opened
from real_daemon import remove_arena_files
from shards_driver import OWNED, PARTS, Shards, as_arena, as_core, release

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.deployment import Registry
from purgatoryd.daemon.main import name_lock
from purgatoryd.daemon.resharding import Resharding, settle
from purgatoryd.daemon.store import wal_end
from purgatoryd.daemon.wal import locked
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.layout import ArenaState
from purgatoryd.shm_layout.merge import NamespaceStats, namespace_stats
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.shards import ShardTable, alone, read_table, write_table
from purgatoryd.shm_layout.wal import GroupCommit

SMALL: dict[str, Any] = {
    "capacity": 128, "payload_bytes": 1 << 18, "replay_capacity": 64, "topics": 32,
    "namespaces": 16, "sessions": 8, "watches": 128, "watch_keys": 32, "accounts": 4,
    "bulk_loads": 2, "bulk_load_rows": 8192, "tick_ns": 10**6, "fanout": 20, "clock": "virtual",
}  # fmt: skip

WAL_SETTINGS: dict[str, Any] = {"wal_segment_bytes": 256 * 1024, "wal_buffer_bytes": 4 << 20}

KILLED = 9

CHANGES = {"os.rename", "os.remove", "os.rmdir"}
"""Audit events that Python raises before it renames or removes a file or folder."""


def killed(act: Callable[[], None]) -> bool:
    """Run `act` in a child process. Return whether the child was killed."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def kill_before(nth: int, counts: Callable[[], bool] = lambda: True) -> None:
    """Kill this process before its nth change of a file. Changes are counted only while `counts()`
    returns True."""
    left = nth

    def hear(event: str, _: object) -> None:
        nonlocal left
        if event in CHANGES and counts():
            left -= 1
            if left == 0:
                os._exit(KILLED)

    sys.addaudithook(hear)


@dataclass
class Deployment:
    """The arenas and the table of a deployment whose daemons do not run."""

    directory: Path
    config: Config
    table: ShardTable

    def write(self, table: ShardTable) -> None:
        write_table(self.directory, table)

    def resharding(self, step: Callable[[str], None] = lambda _: None) -> Resharding:
        return Resharding(self.config, self.directory, self.write, step)

    def reshard(self, count: int, step: Callable[[str], None] = lambda _: None) -> None:
        """Run the resharding of a start with `count` shards, from the stored table."""
        table = read_table(self.directory, "demo")
        assert table is not None
        self.table = settle(self.resharding(step), table, count)

    def killed_at(self, nth: int, count: int) -> bool:
        """Reshard, and kill the process at its nth step. Return False if there are fewer steps."""
        left = [nth]

        def step(_: str) -> None:
            left[0] -= 1
            if left[0] == 0:
                os._exit(KILLED)

        return killed(lambda: self.reshard(count, step))

    def start(self, count: int, step: Callable[[str], None] = lambda _: None) -> None:
        """Run a start with `count` shards, up to the point at which the first shard would start."""
        config, paths = replace(self.config, shards=count), paths_in(self.directory, "demo")
        self.table = Registry.of(config, paths, step).table

    def killed_before(self, nth: int, count: int, first: str, last: str) -> bool:
        """Run a start that is killed before its nth change of a file, counted from step `first` to
        step `last`.

        `first`, `last`: beginnings of the names of the steps. Return False if there are fewer
        changes.
        """
        counts = not first

        def step(text: str) -> None:
            nonlocal counts
            counts = (counts or text.startswith(first)) and not (last and text.startswith(last))

        def start() -> None:
            kill_before(nth, lambda: counts)
            self.start(count, step)

        return killed(start)

    @contextlib.contextmanager
    def opened(self, *, commit: bool = False) -> Iterator[Shards]:
        """Open the arenas as the daemons do. `commit`: write all changes to the WALs at the end."""
        placements = {name.encode(): p.shards for name, p in self.table.placements.items()}
        with contextlib.ExitStack() as held:
            cores = [as_core(held.enter_context(self.shard(k, commit))) for k in self.shards]
            held.callback(release, cores)
            yield Shards(cores, placements)

    @property
    def shards(self) -> range:
        return range(self.table.count)

    @contextlib.contextmanager
    def shard(self, shard: int, commit: bool) -> Iterator[Arena]:
        opening = self.resharding().opening(self.table, shard)
        with name_lock(opening.paths), locked(opening.wal):
            arena = opened(opening)
            yield arena
            if commit and opening.wal is not None:
                end = wal_end(arena, opening)
                GroupCommit(arena, opening.wal, opening.config.wal_segment_bytes, end).close()
            arena.set_state(ArenaState.READY)
            arena.close()

    def arena_files(self) -> set[str]:
        """Return the names of the deployment's files in shared memory."""
        return {path.name for path in shm.MOUNT.glob(f"purgatoryd.demo*{self.suffix}*")}

    def all_there_is(self) -> tuple[set[str], ShardTable | None, list[dict[str, NamespaceStats]]]:
        """Return (names of the arena files, table, statistics of the namespaces in each shard)."""
        with self.opened(commit=True) as shards:
            found = [namespace_stats(as_arena(core)) for core in shards.cores]
        return self.arena_files(), read_table(self.directory, "demo"), found

    @property
    def suffix(self) -> str:
        return paths_in(self.directory, "demo").arena.removeprefix("/purgatoryd.demo")

    @property
    def homes(self) -> list[Path]:
        """Return the folders that contain the table."""
        return [self.directory, *([Path(self.config.wal_dir)] if self.config.wal_dir else [])]

    def tables(self) -> list[ShardTable | None]:
        return [read_table(home, "demo") for home in self.homes]

    def remove(self) -> None:
        """Remove all files of the deployment."""
        for name in self.arena_files():
            (shm.MOUNT / name).unlink()
        for path in (path for home in self.homes for path in home.glob("demo*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def reboot(self) -> None:
        """Remove the deployment's files from shared memory, as a reboot does."""
        for name in self.table.daemons:
            remove_arena_files(paths_in(self.directory, name))


@contextlib.contextmanager
def deployments(directory: Path, wals: Path) -> Iterator[Callable[..., Deployment]]:
    """Yield a function that creates deployments: two shards, or a daemon without shards (`lone`),
    with or without WALs."""
    made: list[Deployment] = []

    def begin(*, wal: bool = False, lone: bool = False, **changes: Any) -> Deployment:
        retained = {"wal_dir": str(wals), **WAL_SETTINGS} if wal else {}
        config = Config("demo", **{**SMALL, **retained, **changes})
        table = alone("demo") if lone else ShardTable("demo", 1, 1, 2)
        parts = table.place(PARTS.decode(), 1 if lone else 5)
        names = (OWNED.decode(), "other", "a", "b", "c", "d")
        for place in (*map(table.place, names), parts):
            table = table.with_birth(place)
        made.append(Deployment(directory, config, table))
        if not lone:  # a single daemon has no table
            made[-1].write(table)
        return made[-1]

    yield begin
    for one in made:
        for name in one.arena_files():
            (shm.MOUNT / name).unlink(missing_ok=True)

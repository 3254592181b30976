"""Durable callers share syncs: the loop requests commits (wal/commit_requests.c) in Python's
iterations as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opened import opened

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.listeners.transport import Answered
from purgatoryd.daemon.store import Opening, wal_end
from purgatoryd.daemon.wal import Wal as DaemonWal
from purgatoryd.daemon.wal import locked
from purgatoryd.shm_layout.arena import NONE_NS, Arena
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.paths import paths_in

pytestmark = pytest.mark.tier("check")

SHARE_NS_MAX = 1_000_000
"""Longest time that a commit waits for more callers (commit_requests.c)."""


class Stopped(Host):
    """A host whose clock stands still."""

    now_ns = 10**12

    def boot_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def host() -> Stopped:
    return Stopped()


@pytest.fixture
def arena_and_wal(daemon_dir: Path, host: Stopped) -> Iterator[tuple[Arena, DaemonWal]]:
    """A WAL without a thread, after a commit that allowed two answers."""
    (daemon_dir / "demo.lock").touch()  # makes the fixture daemon_dir remove the arena files
    paths = paths_in(daemon_dir, "demo")
    opening = Opening(Config("demo", capacity=100, wal_dir=str(daemon_dir / "wal")), paths)
    directory = opening.wal
    assert directory is not None
    with locked(directory):
        arena = opened(opening)
        end = wal_end(arena, opening)
        wal = DaemonWal(
            arena, paths.arena, directory, opening.config, end, host, threaded=False
        )  # fmt: skip
        arena.append_metrics(1)
        wal.end_work(1)
        while wal.commit_group():
            pass
        wal.released(2)
        yield arena, wal
        wal.commit()
        arena.close()


def requested(arena: Arena, wal: DaemonWal) -> bool:
    """Return whether a commit of all records was requested."""
    return bool(wal.requests.requested == arena.wal_buffer.tail)


def test_the_loop_requests_a_commit_once_its_callers_are_complete(
    arena_and_wal: tuple[Arena, DaemonWal],
) -> None:
    arena, wal = arena_and_wal
    arena.append_metrics(2)
    wal.end_work(1)
    assert not requested(arena, wal)
    assert Stopped.now_ns <= wal.commit_at_ns <= Stopped.now_ns + SHARE_NS_MAX
    wal.end_work(2)
    assert requested(arena, wal)
    assert wal.commit_at_ns == NONE_NS


def test_the_loop_requests_a_commit_once_the_time_is_over(
    arena_and_wal: tuple[Arena, DaemonWal], host: Stopped
) -> None:
    arena, wal = arena_and_wal
    arena.append_metrics(2)
    wal.end_work(1)
    host.now_ns = wal.commit_at_ns
    wal.end_work(1)
    assert requested(arena, wal)


def test_a_running_commit_is_awaited(arena_and_wal: tuple[Arena, DaemonWal]) -> None:
    arena, wal = arena_and_wal
    arena.append_metrics(2)
    wal.end_work(2)
    arena.append_metrics(3)
    wal.end_work(1)
    assert not requested(arena, wal)
    assert wal.commit_at_ns == NONE_NS, "the end of the commit wakes the loop"
    assert wal.commit_group()
    wal.end_work(0)
    assert requested(arena, wal)


def test_records_that_describe_answers_are_part_of_the_commit(
    arena_and_wal: tuple[Arena, DaemonWal],
) -> None:
    arena, wal = arena_and_wal
    wal.answered(Answered(7, 1, 1, 10, 20))
    wal.end_work(0)
    assert requested(arena, wal), "a REPLIED record requests no commit"
    arena.append_metrics(2)
    lsn = int(arena.wal_buffer.next_lsn)
    wal.end_work(2)
    assert int(arena.wal_buffer.next_lsn) == lsn + 1
    assert requested(arena, wal)

"""Durable callers share syncs: when the next commit begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opened import opened

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.store import Opening, wal_end
from purgatoryd.daemon.sync_sharing import SHARE_NS_MAX, SyncSharing
from purgatoryd.daemon.wal import Wal as DaemonWal
from purgatoryd.daemon.wal import locked
from purgatoryd.shm_layout.arena import NONE_NS, Arena
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.paths import paths_in

pytestmark = pytest.mark.tier("check")

SYNC_NS = 200_000


def after(callers: int, sync_ns: int = SYNC_NS) -> SyncSharing:
    """Return the state after a commit that allowed answers to so many callers."""
    sharing = SyncSharing(syncs=5, sync_ns=10**12)
    sharing.answered(callers, 7, 10**12 + 2 * sync_ns)
    return sharing


def test_one_caller_does_not_wait() -> None:
    assert not SyncSharing(0, 0).waits(1, 100, committing=False)
    assert not after(1).waits(1, 100, committing=False)
    assert not after(1).waits(1, 100, committing=True)


def test_records_without_a_caller_do_not_wait() -> None:
    assert not after(8).waits(0, 100, committing=True)


def test_a_commit_waits_for_all_callers_of_the_last_commit() -> None:
    sharing = after(3)
    assert sharing.waits(1, 100, committing=False)
    assert sharing.waits(2, 200, committing=False)
    assert sharing.until_ns == 100 + SYNC_NS // 2
    assert not sharing.waits(3, 300, committing=False)


def test_a_commit_waits_for_at_most_half_a_sync() -> None:
    sharing = after(3)
    assert sharing.waits(1, 100, committing=False)
    assert sharing.waits(1, 99 + SYNC_NS // 2, committing=False)
    assert not sharing.waits(1, 100 + SYNC_NS // 2, committing=False)
    sharing.begun()
    assert sharing.until_ns == NONE_NS


def test_a_slow_disk_does_not_make_the_wait_longer() -> None:
    sharing = after(3, sync_ns=10**9)
    assert sharing.waits(1, 100, committing=False)
    assert sharing.until_ns == 100 + SHARE_NS_MAX


def test_the_time_begins_after_the_running_commit() -> None:
    sharing = after(3)
    assert sharing.waits(1, 100, committing=True)
    assert sharing.until_ns == NONE_NS
    assert sharing.waits(1, 10**9, committing=False)
    assert sharing.until_ns == 10**9 + SYNC_NS // 2


def test_a_commit_without_a_sync_keeps_the_time() -> None:
    sharing = after(3)
    sharing.answered(2, 7, 10**12 + 2 * SYNC_NS)
    assert sharing.waits(1, 100, committing=False)
    assert sharing.until_ns == 100 + SYNC_NS // 2


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


@pytest.fixture
def kicks(arena_and_wal: tuple[Arena, DaemonWal], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each requested commit."""
    found: list[int] = []
    group_commit = arena_and_wal[1]._group_commit
    monkeypatch.setattr(group_commit, "kick", lambda: found.append(len(found)))
    return found


def test_the_loop_requests_a_commit_once_its_callers_are_complete(
    arena_and_wal: tuple[Arena, DaemonWal], kicks: list[int]
) -> None:
    arena, wal = arena_and_wal
    arena.append_metrics(2)
    wal.end_work(1)
    assert not kicks
    assert Stopped.now_ns <= wal.commit_at_ns <= Stopped.now_ns + SHARE_NS_MAX
    wal.end_work(2)
    assert len(kicks) == 1
    assert wal.commit_at_ns == NONE_NS
    wal.end_work(2)
    assert len(kicks) == 1, "there are no further records"


def test_the_loop_requests_a_commit_once_the_time_is_over(
    arena_and_wal: tuple[Arena, DaemonWal], kicks: list[int], host: Stopped
) -> None:
    arena, wal = arena_and_wal
    arena.append_metrics(2)
    wal.end_work(1)
    host.now_ns = wal.commit_at_ns
    wal.end_work(1)
    assert len(kicks) == 1


def test_a_running_commit_is_awaited(
    arena_and_wal: tuple[Arena, DaemonWal], kicks: list[int]
) -> None:  # fmt: skip
    arena, wal = arena_and_wal
    arena.append_metrics(2)
    wal.end_work(2)
    arena.append_metrics(3)
    wal.end_work(1)
    assert len(kicks) == 1
    assert wal.commit_at_ns == NONE_NS, "the end of the commit wakes the loop"
    assert wal.commit_group()
    wal.end_work(0)
    assert len(kicks) == 2


@pytest.mark.parametrize("member", ["full", "errno"])
def test_a_full_or_stopped_wal_does_not_wait(
    arena_and_wal: tuple[Arena, DaemonWal], kicks: list[int], monkeypatch: pytest.MonkeyPatch,
    member: str,
) -> None:  # fmt: skip
    arena, wal = arena_and_wal
    arena.append_metrics(2)
    monkeypatch.setattr(DaemonWal, member, 1)
    wal.end_work(1)
    assert len(kicks) == 1

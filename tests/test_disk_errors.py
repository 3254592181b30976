"""A daemon whose disk fails once, for a write, a sync or the name of a new segment.

The disk is a real block device, so that the kernel's page cache takes part. After a failed sync,
this cache contains bytes that the disk lacks, and the next sync succeeds. Timers that were
acknowledged as durable must exist after every kind of restart, including a reboot.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faulty_device import FaultyDevice, faulty_device
from real_daemon import PATIENCE_S, Daemon, StartDaemon, refused, remove_arena_files
from tiers import sample

from purgatoryd.clients import Client, NotDurable, WalStopped
from purgatoryd.daemon.wal import SNAPSHOT_ATTEMPTS, Wal
from purgatoryd.shm_layout import page_cache
from purgatoryd.shm_layout.errors import BadPath
from purgatoryd.shm_layout.files import write_durably
from purgatoryd.shm_layout.wal import has_header, segments, snapshots, uuid_of

pytestmark = pytest.mark.tier("all")

HOUR_S = 3600.0
LARGE = 200_000
"""Number of timers with which a start is ready before it has written the snapshot."""
MARKER = "the write of these bytes fails"
SEGMENT = "0000000000000001.wal"
"""File name of the first segment. A block that contains this name is part of the directory."""
HEADER = "PPGWAL01"
"""First bytes of the header of each segment."""
FAULTS = [("write", MARKER), ("sync", MARKER), ("write", SEGMENT), ("write", HEADER)]
SMALL = ("--wal-segment-bytes", "256K", "--wal-buffer-bytes", "4M", "--snapshot-segments", "1000")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDevice]:
    with faulty_device(tmp_path) as found:
        yield found


@pytest.fixture
def disk_with_has_journal(tmp_path: Path) -> Iterator[FaultyDevice]:
    """A disk with ext4 and has_journal, which becomes read-only if it cannot store a file name."""
    with faulty_device(tmp_path, "has_journal") as found:
        yield found


def durable() -> Client:
    return Client("demo", namespace="shop", timeout=PATIENCE_S, durable=True)


def there(*keys: str) -> list[bool]:
    with durable() as client:
        return [client.get(key) is not None for key in keys]


def add_until_it_fails(disk: FaultyDevice, call: str, marker: str) -> list[str]:
    """Add timers until the disk fails; return the keys that were acknowledged as durable."""
    keys: list[str] = []
    with durable() as client:

        def add(key: str, payload: bytes) -> None:
            client.add(key, delay=HOUR_S, payload=payload)
            keys.append(key)

        def add_more() -> None:
            for number in range(1000):
                add(f"behind-{number}", MARKER.encode() if marker == MARKER else b"x" * 2000)

        for number in range(100):
            add(f"before-{number}", b"x" * 2000)
        disk.fail(call, marker)
        with pytest.raises((NotDurable, WalStopped)):
            add_more()
    assert disk.failed == 1
    return keys


def wal_command(real: Daemon, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a subcommand of `purgatoryd wal`."""
    base = [sys.executable, "-m", "purgatoryd.cli", "wal", command, "--name", "demo"]
    return subprocess.run(
        [*base, "--wal-dir", str(folder), "--json"], env=real.env, text=True, capture_output=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def add_durably(*keys: str) -> None:
    with durable() as client:
        for key in keys:
            client.add(key, delay=HOUR_S)


def reboot(real: Daemon, disk: FaultyDevice) -> None:
    """Remove the arena, and drop the page cache of the disk."""
    real.kill()
    remove_arena_files(real.paths)
    disk.unmount()
    disk.mount()


def start_after_reboot(real: Daemon, disk: FaultyDevice) -> None:
    """Reboot, check that `wal verify` finds no damage, and start the daemon."""
    reboot(real, disk)
    verified = wal_command(real, "verify", disk.folder)
    assert verified.returncode == 0, verified.stderr
    real.start()


@pytest.mark.tier("test")
@pytest.mark.parametrize(("call", "marker"), sample(FAULTS, FAULTS[:1]))
def test_a_restart_and_a_reboot_after_a_failed_call(
    daemon: StartDaemon, disk: FaultyDevice, call: str, marker: str
) -> None:
    real = daemon("demo", "--wal-dir", str(disk.folder), *SMALL)
    keys = add_until_it_fails(disk, call, marker)
    real.kill()
    real.start()
    add_durably("after")
    start_after_reboot(real, disk)
    assert all(there(*keys, "after"))
    add_durably("again")
    reboot(real, disk)
    real.start()
    assert all(there(*keys, "after", "again"))
    real.stop()


@pytest.mark.parametrize(("call", "marker"), FAULTS)
def test_the_arena_is_lost_after_a_failed_call(
    daemon: StartDaemon, disk: FaultyDevice, call: str, marker: str
) -> None:
    """The test simulates a container that loses its /dev/shm: the host keeps its page cache."""
    real = daemon("demo", "--wal-dir", str(disk.folder), *SMALL)
    keys = add_until_it_fails(disk, call, marker)
    real.kill()
    remove_arena_files(real.paths)
    real.start()
    assert all(there(*keys))
    if marker == MARKER:
        assert there("behind-0") == [False], "the record must not be on the disk"
    add_durably("after")
    start_after_reboot(real, disk)
    assert all(there(*keys, "after"))
    real.stop()


@pytest.mark.parametrize("arena_is_lost", [False, True])
@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_file_system_that_became_read_only_is_mounted_again(
    daemon: StartDaemon, disk_with_has_journal: FaultyDevice, call: str, arena_is_lost: bool
) -> None:
    """The failed transaction loses the name of a new segment."""
    disk = disk_with_has_journal
    real = daemon("demo", "--wal-dir", str(disk.folder), *SMALL)
    keys = add_until_it_fails(disk, call, SEGMENT)
    real.kill()
    assert "Read-only file system" in refused(real.start)
    disk.unmount()
    disk.mount()
    if arena_is_lost:
        remove_arena_files(real.paths)
    real.start()
    assert all(there(*keys))
    add_durably("after")
    start_after_reboot(real, disk)
    assert all(there(*keys, "after"))
    real.stop()


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("command", ["verify", "cat"])
def test_commands_read_from_the_disk(
    daemon: StartDaemon, disk: FaultyDevice, command: str, call: str
) -> None:
    real = daemon("demo", "--wal-dir", str(disk.folder), *SMALL)
    add_until_it_fails(disk, call, MARKER)
    real.kill()
    of_disk = json.loads(wal_command(real, command, disk.folder).stdout.splitlines()[-1])
    disk.unmount()
    disk.mount()
    assert json.loads(wal_command(real, command, disk.folder).stdout.splitlines()[-1]) == of_disk


STARTS = [("sync", MARKER), ("write", SEGMENT), ("write", HEADER), ("write", "PPGSNAP1")]


@pytest.mark.parametrize("arena_is_lost", [False, True])
@pytest.mark.parametrize(("call", "marker"), STARTS)
def test_a_start_whose_snapshot_fails_is_refused_and_loses_nothing(
    daemon: StartDaemon, disk: FaultyDevice, call: str, marker: str, arena_is_lost: bool
) -> None:
    real = daemon("demo", "--wal-dir", str(disk.folder), *SMALL)
    with durable() as client:
        client.add("a", delay=HOUR_S, payload=MARKER.encode())
    add_durably("b")
    real.kill()
    before = [file.path for file in snapshots(disk.folder / "demo")]
    disk.fail(call, marker)
    assert "Input/output error" in refused(real.start)
    assert disk.failed == 1
    after = [file.path for file in snapshots(disk.folder / "demo")]
    assert after[:1] == before
    assert len(after) == (2 if marker == HEADER else 1), "a segment must start after the snapshot"
    if arena_is_lost:
        remove_arena_files(real.paths)
    real.start()
    assert there("a", "b") == [True, True]
    reboot(real, disk)
    real.start()
    assert there("a", "b") == [True, True]
    real.stop()


def test_a_start_with_the_arena_begins_a_segment_and_a_snapshot(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    wal = daemon_dir / "wal"
    real = daemon("demo", "--wal-dir", str(wal), *SMALL)
    add_durably("a")
    real.kill()
    real.start()
    (old, new), (first, second) = segments(wal / "demo"), snapshots(wal / "demo")
    assert first.lsn == old.lsn < new.lsn <= second.lsn
    for file in (old, first):  # a reboot must not need these two files
        file.path.unlink()
    add_durably("b")
    real.kill()
    remove_arena_files(real.paths)
    real.start()
    assert there("a", "b") == [True, True]


def large(daemon: StartDaemon, wal: Path) -> Daemon:
    """Start a daemon, add LARGE timers, kill it. Its next start is ready before its snapshot."""
    args = ("--wal-dir", str(wal), "--capacity", str(2 * LARGE), "--wal-buffer-bytes", "64M")
    real = daemon("demo", *args)
    with durable() as client:
        client.add_many({"key": [f"k{i}" for i in range(LARGE)], "delay": [HOUR_S] * LARGE})
    real.kill()
    return real


def test_a_large_snapshot_is_confirmed_before_anything_is_acknowledged(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    wal = daemon_dir / "wal"
    real = large(daemon, wal)
    before = snapshots(wal / "demo")[-1].lsn
    real.start()
    add_durably("a")
    assert snapshots(wal / "demo")[-1].lsn > max(before, LARGE)
    real.kill()
    remove_arena_files(real.paths)
    real.start()
    assert all(there("a", "k0", f"k{LARGE - 1}"))


@pytest.mark.parametrize(("moved", "named"), [(True, True), (False, False)])
def test_a_first_snapshot_that_the_arena_left_is_no_failed_attempt(
    *, moved: bool, named: bool
) -> None:
    wal: Any = object.__new__(Wal)
    wal.requests = SimpleNamespace()
    wal._confirmed, wal._attempts, wal._given_up = False, 0, False
    wal._arena = SimpleNamespace(has_names=named)
    wal._group_commit = SimpleNamespace(unpause=lambda: None)
    for _ in range(SNAPSHOT_ATTEMPTS + 1):
        wal._child = SimpleNamespace(kill=lambda: None)
        wal.unpause(moved=moved)
        wal._ended(-signal.SIGKILL)
    assert wal._attempts == 0
    assert not wal._confirmed


def test_a_large_snapshot_that_fails_stops_the_wal(daemon: StartDaemon, daemon_dir: Path) -> None:
    wal = daemon_dir / "wal"
    real = large(daemon, wal)
    (wal / "demo" / "snapshot.new").mkdir()  # a folder of that name, so that no file can be created
    real.start()
    with pytest.raises((NotDurable, WalStopped)):
        add_durably("a")
    with pytest.raises(WalStopped):
        add_durably("b")
    real.kill()
    (wal / "demo" / "snapshot.new").rmdir()
    real.start()
    add_durably("c")
    assert there("a", "b", "c", "k0") == [True, False, True, True]


# ---- reads that bypass the page cache --------------------------------------------------------


def read_whole(path: Path) -> bytes:
    with page_cache.from_disk(path) as file, mmap.mmap(-1, page_cache.PAGE) as memory:
        return memory[: os.readv(file.fileno(), [memory])]


@pytest.mark.parametrize("direct", [True, False])
def test_a_failed_write_is_not_read_back(
    disk: FaultyDevice, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(page_cache, "_direct", lambda path: None)
    path = disk.folder / "file"
    path.write_bytes(b"before")
    with path.open("r+b", buffering=0) as file:
        os.fsync(file.fileno())
        disk.fail("write", "behind")
        file.write(b"behind")
        with pytest.raises(OSError, match="Input/output"):
            os.fdatasync(file.fileno())
        os.fdatasync(file.fileno())
    assert path.read_bytes() == b"behind", "the page cache has dropped the bytes"
    assert read_whole(path) == b"before"


def test_a_header_whose_write_failed_is_not_trusted(
    daemon: StartDaemon, daemon_dir: Path, disk: FaultyDevice
) -> None:
    daemon("demo", "--wal-dir", str(daemon_dir))
    header = segments(daemon_dir / "demo")[0].path.read_bytes()[: page_cache.PAGE]
    path = disk.folder / "header.wal"
    path.write_bytes(bytes(len(header)))
    with path.open("r+b", buffering=0) as file:
        os.fsync(file.fileno())
        disk.fail("write", HEADER)
        file.write(header)
        with pytest.raises(OSError, match="Input/output"):
            os.fdatasync(file.fileno())
    assert path.read_bytes() == header, "the page cache has dropped the bytes"
    assert not has_header(path)
    assert uuid_of(path) == bytes(16)


def test_pages_that_stay_in_the_cache_are_refused(
    disk: FaultyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "_direct", lambda path: None)
    monkeypatch.setattr(page_cache, "EVICTIONS", 2)
    path = disk.folder / "file"
    path.write_bytes(b"x" * 3 * page_cache.PAGE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[0] == ord("x")
        with pytest.raises(BadPath, match="of 3 pages stay in the page cache"):
            read_whole(path)
    assert read_whole(path) == b"x" * page_cache.PAGE


def test_a_new_name_that_was_not_synced_is_taken_back(disk: FaultyDevice) -> None:
    folder = disk.folder / "folder"
    folder.mkdir()
    os.sync()
    disk.fail("write", "the-new-name")
    with pytest.raises(OSError, match="Input/output"):
        write_durably(folder / "temporary", lambda file: str(file.write(b"x") and "the-new-name"))
    assert disk.failed == 1
    assert list(folder.iterdir()) == []

"""Damaged WAL segments: every bit flipped, every cut, and different bytes after a cut.

A Walk, which reads segments, always returns a prefix of the written groups. If it leaves groups
out, either they were never committed, or it reports which records are missing. A higher $WAL_ROUNDS
tests more groups and more subsets of sectors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from core_driver import Core, Fault
from opened import opened
from tiers import wide
from wal_segment_driver import (
    WAL_BUFFER_BYTES,
    WAL_SEGMENT_BYTES,
    GroupCommit,
    Walk,
    Walked,
    segment_files,
)

from purgatoryd.daemon import recovery, wal
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.log import log
from purgatoryd.daemon.store import Opening, remove_arena, wal_end
from purgatoryd.shm_layout import wal as wal_of_arena
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import BadPath, WalDamaged
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import PutMode
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.wal import Buffer, segments, snapshots, uuid_of

pytestmark = pytest.mark.tier("test")

HEAD: int = lib.PG_WAL_SEGMENT_HEAD
HEADER_BYTES = ffi.sizeof("struct pg_wal_segment")
ROUNDS = int(os.environ.get("WAL_ROUNDS", "1"))
GROUPS = 3 if ROUNDS == 1 else 6
"""Number of groups in each segment."""


def core_with_wal_buffer(**config: object) -> Core:
    sizes = {"capacity": 4096, "replay_capacity": 4096, "payload_bytes": 1 << 22, "topics": 16}
    return Core(**{**sizes, "wal_buffer_bytes": WAL_BUFFER_BYTES, "stream_id": 1, **config})


def work(core: Core, random: Random, steps: int) -> None:
    """Add, extend, replace, cancel and fire timers at random."""
    for _ in range(steps):
        key = b"key-%d" % random.randrange(40)
        topic = b"topic-%d" % random.randrange(4)
        payload = random.randbytes(random.choice((0, 5, 70)))
        match random.randrange(8):
            case 0:
                core.cancel(key)
            case 1:
                core.put(key, 10**10, mode=PutMode.EXTEND, topic=topic)
            case 2:
                core.advance(core.header.now_ns + 10**8)
                core.publish_all()
            case _:
                delay_ns = random.randrange(10**9)
                core.put(key, delay_ns, mode=PutMode.REPLACE, payload=payload, topic=topic)


class Written(NamedTuple):
    """Two segments of one WAL. The first is sealed, because the second is of another boot."""

    files: list[bytearray]
    used: list[int]  # number of written bytes of each segment
    groups: list[bytes]  # frames of each group
    lsns: list[int]  # newest LSN after each group


def used_bytes(file: bytearray) -> int:
    return len(file.rstrip(b"\0"))


def write_two_segments(directory: Path, seed: int) -> Written:
    random, core = Random(seed), core_with_wal_buffer(uuid=bytes([seed] * 16), secret=(seed, 7))
    lsns = [0]
    for boot in range(2):
        lib.pg_start_epoch(core.a, bytes([boot + 1] * 16))
        wal = GroupCommit(core, directory)
        for _ in range(GROUPS):
            work(core, random, 8)
            lsns.append(wal.commit())
        wal.close()
    files = [bytearray(path.read_bytes()) for path in segment_files(directory)]
    whole = Walk().read(files)
    assert (whole.refused, whole.damaged, whole.torn) == (False, False, False)
    assert len(files) == 2
    assert len(whole.groups) == 2 * GROUPS
    groups = [bytes(group) for group in whole.groups]
    return Written(files, [used_bytes(file) for file in files], groups, lsns)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_two_segments(tmp_path_factory.mktemp("wal"), 1)


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Segments of another WAL. A new segment may get disk blocks that still contain them."""
    return write_two_segments(tmp_path_factory.mktemp("stale"), 2)


def test_a_buffer_has_nothing_left_of_the_file_before(tmp_path: Path) -> None:
    long, short, buffer = tmp_path / "long", tmp_path / "short", Buffer()
    long.write_bytes(b"x" * 3 * HEAD)
    short.write_bytes(b"y" * 10)
    assert ffi.buffer(buffer.read(long))[:] == b"x" * 3 * HEAD
    assert ffi.buffer(buffer.read(short))[:] == b"y" * 10 + bytes(HEAD - 10)
    assert ffi.buffer(buffer.read(long, 5))[:] == b"x" * 5


def test_a_damaged_header_is_not_taken_for_another_version(
    tmp_path: Path, written: Written
) -> None:
    file, path = written.files[0], tmp_path / "damaged"
    size = ffi.sizeof("struct pg_wal_segment")
    for at in range(size):
        for damaged in (file[:at] + bytes([file[at] ^ 1]) + file[at + 1 :], file[:at]):
            path.write_bytes(damaged)
            with pytest.raises(WalDamaged):
                wal_of_arena.Walk().enter(path)


def is_prefix(walked: Walked, written: Written) -> None:
    """Check that the walk returned a prefix of the groups. Lost records must follow the prefix
    directly and be whole groups."""
    got = walked.groups
    assert all(found == group for found, group in zip(got, written.groups, strict=False))
    assert walked.lsn in (written.lsns[len(got)], 0)  # 0 = no valid header
    if walked.damaged:
        assert walked.lost[0] == written.lsns[len(got)] + 1
        assert walked.lost[1] in written.lsns


def flips(size: int) -> Iterator[tuple[int, int]]:
    """Yield (byte, bits to flip): each single bit, and whole bytes in the unused zeros."""
    for byte in range(size):
        if HEADER_BYTES <= byte < HEAD:
            yield byte, 0xFF
        else:
            yield from ((byte, 1 << bit) for bit in range(8))


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path: Path) -> None:
    assert segments(tmp_path / "none") == []
    (tmp_path / "file").touch()
    for files in (segments, snapshots):
        with pytest.raises(NotADirectoryError):
            files(tmp_path / "file")


@pytest.mark.parametrize("segment", [wide(0), 1])
def test_every_single_bit(written: Written, segment: int) -> None:
    file, used = written.files[segment], written.used[segment]
    outcomes = {"whole": 0, "torn": 0, "refused": 0}
    for byte, bits in flips(used):
        file[byte] ^= bits
        walked = Walk().read(written.files)
        file[byte] ^= bits
        is_prefix(walked, written)
        if walked.refused or walked.damaged:
            outcomes["refused"] += 1
        elif len(walked.groups) == len(written.groups):
            assert bits == 0xFF
            outcomes["whole"] += 1
        else:
            assert segment == 1
            assert walked.torn
            assert len(walked.groups) == len(written.groups) - 1
            outcomes["torn"] += 1
    print(f"{sum(outcomes.values())} flips in segment {segment + 1}: {outcomes}")
    assert outcomes["refused"] > 8 * (used - HEAD) // 4


def behind_nothing(file: bytearray, cut: int, stale: bytearray) -> bytearray:
    return file[:cut]


def behind_zeros(file: bytearray, cut: int, stale: bytearray) -> bytearray:
    return file[:cut] + bytes(len(file) - cut)


def behind_stale(file: bytearray, cut: int, stale: bytearray) -> bytearray:
    return file[:cut] + stale[cut:]


@pytest.mark.parametrize("behind", [behind_nothing, wide(behind_zeros), wide(behind_stale)])
@pytest.mark.parametrize("segment", [wide(0), 1])
def test_every_cut(
    written: Written,
    stale: Written,
    segment: int,
    behind: Callable[[bytearray, int, bytearray], bytearray],
) -> None:
    files, used = written.files[:], written.used[segment]
    for cut in range(used):
        files[segment] = behind(written.files[segment], cut, stale.files[segment])
        walked = Walk().read(files)
        is_prefix(walked, stale if files[0] == stale.files[0] else written)
        changed = files[segment][:used] != written.files[segment][:used]
        # a cut in a segment that is not the newest is damage, not a torn tail
        assert segment == 1 or walked.refused == changed
        assert segment == 0 or not walked.damaged
    print(f"{used} cuts of segment {segment + 1}, {behind.__name__}")


def test_random_sectors(written: Written) -> None:
    """After a power cut, any subset of the newest group's sectors may be missing."""
    random, rounds = Random(3), 1000 * ROUNDS
    sound = written.files[1]
    start = sound.index(written.groups[-1]) - lib.PG_GROUP_HEAD
    for _ in range(rounds):
        file = bytearray(sound)
        for at in range(start - start % 512, written.used[1], 512):
            if random.random() < 0.5:
                low = max(at, start)
                file[low : at + 512] = bytes(at + 512 - low)
        walked = Walk().read([written.files[0], file])
        assert not walked.refused
        assert not walked.damaged
        assert len(walked.groups) == 2 * GROUPS - (file != sound)
        is_prefix(walked, written)
    print(f"{rounds} subsets of sectors")


# ---- group commit, restarts and new segments ----------------------------------------------


def test_a_killed_process_goes_on(tmp_path: Path) -> None:
    """The next process commits all records that the killed process had appended."""
    core, random = core_with_wal_buffer(), Random(4)
    wal = GroupCommit(core, tmp_path)
    work(core, random, 30)
    first = wal.commit()
    work(core, random, 30)
    lib.pg_group_commit_close(wal.c)  # as after a kill, nothing more is written
    again = GroupCommit(core, tmp_path)
    assert again.wal_buffer.committed_lsn == again.wal_buffer.next_lsn - 1 > first
    work(core, random, 30)
    last = again.commit()
    again.close()
    one, two = segment_files(tmp_path)
    assert Walk().read([bytearray(file.read_bytes()) for file in (one, two)]).lsn == last


def test_a_torn_tail_is_not_read(tmp_path: Path) -> None:
    core, random = core_with_wal_buffer(), Random(5)
    wal = GroupCommit(core, tmp_path)
    for _ in range(3):
        work(core, random, 30)
        wal.commit()
    wal.close()
    (path,) = segment_files(tmp_path)
    file = bytearray(path.read_bytes())
    newest = Walk().read([file]).groups[-1]
    start = file.index(newest) - lib.PG_GROUP_HEAD
    file[start + 100] ^= 1
    path.write_bytes(file)
    torn = Walk().read([file])
    assert torn.torn
    fresh = core_with_wal_buffer()
    lib.pg_wal_buffer_of(fresh.a).next_lsn = torn.lsn + 1
    GroupCommit(fresh, tmp_path).close()
    sealed = bytearray(path.read_bytes())
    assert sealed[:start] == file[:start]
    whole = Walk().read([bytearray(path.read_bytes()) for path in segment_files(tmp_path)])
    assert (whole.lsn, whole.refused) == (torn.lsn, False)


def test_files_that_are_not_this_arenas(tmp_path: Path) -> None:
    core, random = core_with_wal_buffer(), Random(6)
    wal = GroupCommit(core, tmp_path)
    work(core, random, 30)
    wal.commit()
    wal.close()
    with pytest.raises(Fault, match="the WAL belongs to another arena"):
        GroupCommit(core_with_wal_buffer(uuid=b"x" * 16), tmp_path)
    with pytest.raises(Fault, match="the files hold more frames than the arena"):
        GroupCommit(core_with_wal_buffer(), tmp_path)
    segment_files(tmp_path)[0].unlink()
    with pytest.raises(Fault, match="the files end before the last committed frame"):
        GroupCommit(core, tmp_path)
    with pytest.raises(Fault, match="open"):
        GroupCommit(core_with_wal_buffer(), tmp_path / "missing")


def test_the_thread_commits_and_rotates(tmp_path: Path) -> None:
    core, random = core_with_wal_buffer(), Random(7)
    wal = GroupCommit(core, tmp_path)
    wal.start()
    for _ in range(40):
        for _ in range(20):
            core.put(
                b"key-%d" % random.randrange(1000), 10**9, mode=PutMode.REPLACE,
                payload=random.randbytes(2000),
            )  # fmt: skip
        wal.kick()
        wal.wait(wal.wal_buffer.next_lsn - 1)
    core.put(b"last", 10**9)
    wal.close()  # commits all appended records
    assert wal.wal_buffer.committed_lsn == wal.wal_buffer.next_lsn - 1
    files = segment_files(tmp_path)
    assert len(files) > 5
    assert all(path.stat().st_size == WAL_SEGMENT_BYTES for path in files)
    walked = Walk().read([bytearray(path.read_bytes()) for path in files])
    assert (walked.refused, walked.damaged, walked.torn) == (False, False, False)
    assert walked.lsn == wal.wal_buffer.committed_lsn


@pytest.mark.parametrize(
    ("timers", "operations", "payload_bytes", "large"),
    [(80_000, 80_000, 0, False), (90_000, 90_000, 0, True), (10, 10, 1 << 25, True)],
)
def test_a_snapshot_above_32_mib_may_wait_until_the_daemon_is_ready(
    timers: int, operations: int, payload_bytes: int, large: bool
) -> None:
    arena: Any = SimpleNamespace(
        in_use=lambda: (timers, operations), metrics=SimpleNamespace(blob_bytes=payload_bytes)
    )
    assert wal._is_large(arena) is large


def test_a_folder_of_another_user_takes_no_wal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wal._refuse_open_folder(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(BadPath, match="is foreign"):
        wal._refuse_open_folder(tmp_path)


def test_a_damaged_header_before_the_snapshot_is_only_reported(
    daemon_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(log, "warning", warnings.append)
    (daemon_dir / "demo.lock").touch()  # makes the fixture daemon_dir remove the arena files
    folder = daemon_dir / "wal" / "demo"
    opening = Opening(
        Config(name="demo", capacity=100, wal_dir=str(folder.parent)), paths_in(daemon_dir, "demo")
    )
    with wal.locked(folder):
        for nonce in (b"a", b"b"):  # the second start recovers from the WAL and writes a snapshot
            arena, now_ns = opened(opening), HOST.boot_ns()
            asked = os.geteuid(), os.getpid(), now_ns, now_ns
            arena.handle(wire.encode_hello(16 * nonce), *asked)
            end, disk = wal_end(arena, opening), opening.host.disk
            wal_of_arena.GroupCommit(arena, folder, 1 << 20, end, disk).close()
            arena.close()
            remove_arena(opening.paths)
        first, _ = segments(folder)
        damaged = bytearray(first.path.read_bytes())
        damaged[40] ^= 1
        first.path.write_bytes(damaged)
        opened(opening).close()
    (warning,) = warnings
    assert re.search(f"{first.path.name}.*nothing is lost", warning)


def test_a_segment_of_another_arena_after_the_snapshot_is_damage(tmp_path: Path) -> None:
    write_two_segments(tmp_path, 1)
    _, newest = segments(tmp_path)
    own, other = uuid_of(newest.path), bytes(16)
    assert recovery._is_own(newest, own, 0, HOST.disk)
    assert not recovery._is_own(newest, other, newest.lsn, HOST.disk)
    with pytest.raises(WalDamaged, match="another uuid"):
        recovery._is_own(newest, other, newest.lsn - 1, HOST.disk)

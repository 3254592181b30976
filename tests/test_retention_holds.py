"""Retention holds: which files of a WAL may be removed, and which hold keeps each other file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from purgatoryd.daemon.retention import (
    Keep,
    bytes_from,
    is_untidy,
    needed_lsn,
    over_cap,
    removable,
    tidy,
)
from purgatoryd.shm_layout.errors import BadPath, InvalidName, InvalidSetting
from purgatoryd.shm_layout.files import replace_durably, try_write, write_durably
from purgatoryd.shm_layout.retention_holds import (
    FILE,
    RetentionHold,
    read_holds,
    remove_hold,
    set_hold,
)
from purgatoryd.shm_layout.wal import (
    SEGMENT,
    SNAPSHOT,
    File,
    file_name,
    segments,
    snapshots,
)

pytestmark = pytest.mark.tier("check")

NOTHING = Keep(0, 0)


def files(*lsns: int, size: int = 100) -> list[File]:
    """Return WAL files; the modification time of each is its LSN."""
    return [File(Path(f"{lsn:016x}"), lsn, size, lsn) for lsn in lsns]


def lsns(found: list[File]) -> list[int]:
    return [file.lsn for file in found]


# ---- retention holds -------------------------------------------------------------------------


def test_retention_holds_are_set_moved_and_removed(tmp_path: Path) -> None:
    assert read_holds(tmp_path) == {}
    set_hold(tmp_path, RetentionHold("audit", 5))
    set_hold(tmp_path, RetentionHold("backfill", 7, cap_bytes=4096))
    set_hold(tmp_path, RetentionHold("audit", 9))
    assert read_holds(tmp_path) == {
        "audit": RetentionHold("audit", 9),
        "backfill": RetentionHold("backfill", 7, cap_bytes=4096),
    }
    assert remove_hold(tmp_path, "audit")
    assert not remove_hold(tmp_path, "audit")
    assert set(read_holds(tmp_path)) == {"backfill"}


def test_a_dropped_retention_hold_counts_again_once_it_is_set(tmp_path: Path) -> None:
    set_hold(tmp_path, RetentionHold("slow", 1, 10, dropped=True))
    set_hold(tmp_path, RetentionHold("slow", 60, 10))
    assert not read_holds(tmp_path)["slow"].dropped


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 65])
def test_names_of_retention_holds_have_bounds(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidName):
        set_hold(tmp_path, RetentionHold(name, 1))
    assert read_holds(tmp_path) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b'[{"name": "a"}]',
        b"\xff",
        b'[{"name": "a", "lsn": "x"}]',
        b'[{"name": "a", "lsn": true}]',
        b'[{"name": "a", "lsn": 0}]',
        b'[{"name": 1, "lsn": 1}]',
        b'[{"name": "a", "lsn": 18446744073709551616}]',
        b'[{"name": "a", "lsn": 1, "cap_bytes": "1M"}]',
        b'[{"name": "a", "lsn": 1, "cap_bytes": -1}]',
        b'[{"name": "a", "lsn": 1, "dropped": 1}]',
    ],
)
def test_a_foreign_file_of_retention_holds_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(BadPath, match="is not a table of retention holds"):
        set_hold(tmp_path, RetentionHold("audit", 1))
    assert (tmp_path / FILE).read_bytes() == content


def test_a_folder_in_place_of_the_retention_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(BadPath, match="cannot be read"):
        read_holds(tmp_path)


def test_a_retention_hold_that_is_refused_leaves_the_one_before(tmp_path: Path) -> None:
    (tmp_path / file_name(10, SEGMENT)).touch()
    set_hold(tmp_path, RetentionHold("audit", 10), there=True)
    with pytest.raises(InvalidSetting, match="at least 10"):
        set_hold(tmp_path, RetentionHold("audit", 9), there=True)
    assert read_holds(tmp_path) == {"audit": RetentionHold("audit", 10)}


def test_many_set_retention_holds_at_once_and_none_is_lost(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=set_hold, args=(tmp_path, RetentionHold(f"reader-{i}", i + 1)))
        for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {hold.lsn for hold in read_holds(tmp_path).values()} == set(range(1, 17))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "table"
    replace_durably(path, b"first")

    def fail(file: object) -> str:
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        write_durably(tmp_path / "table.new", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["table"]
    assert path.read_bytes() == b"first"


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_another_one_puts_there_is_not_written(
    is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign, temporary = tmp_path / "foreign", tmp_path / "table.new"
    foreign.write_bytes(b"another's")
    temporary.symlink_to(foreign) if is_link else temporary.hardlink_to(foreign)
    # as if somebody created the file again right after its removal
    with monkeypatch.context() as at_once:
        at_once.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(FileExistsError):
            write_durably(temporary, lambda _: "table")
    with pytest.raises(FileExistsError):
        try_write(temporary)
    assert temporary.read_bytes() == b"another's"
    replace_durably(tmp_path / "table", b"ours")
    assert (foreign.read_bytes(), (tmp_path / "table").read_bytes()) == (b"another's", b"ours")


# ---- retention -------------------------------------------------------------------------------


def test_recovery_needs_all_from_the_older_of_two_snapshots() -> None:
    assert needed_lsn(files(10)) == 10
    assert needed_lsn(files(10, 20)) == 10
    assert needed_lsn(files(10, 20, 30)) == 20


def test_older_segments_go_but_never_the_one_with_the_needed_record() -> None:
    found = files(1, 10, 20, 30)
    assert lsns(removable(found, 20, [], NOTHING, 0)) == [1, 10]
    assert lsns(removable(found, 19, [], NOTHING, 0)) == [1]
    assert lsns(removable(found, 9, [], NOTHING, 0)) == []
    assert lsns(removable(found, 10**6, [], NOTHING, 0)) == [1, 10, 20]


def test_a_folder_without_segments_has_nothing_to_remove() -> None:
    assert removable([], 20, [], NOTHING, 0) == []


def test_retention_holds_keep_segments_until_they_are_dropped() -> None:
    found = files(1, 10, 20, 30)
    assert lsns(removable(found, 30, [RetentionHold("m", 15)], NOTHING, 0)) == [1]
    assert lsns(removable(found, 30, [RetentionHold("m", 15, dropped=True)], NOTHING, 0)) == [
        1,
        10,
        20,
    ]


def test_a_retention_hold_over_its_cap_is_named() -> None:
    found = files(1, 10, 20)
    holds = [
        RetentionHold("a", 1, 299),
        RetentionHold("b", 1, 300),
        RetentionHold("c", 15, 200),
        RetentionHold("d", 1),
        RetentionHold("e", 1, 1, True),
    ]
    assert [hold.name for hold in over_cap(found, holds)] == ["a"]
    assert bytes_from(found, 25) == 100


def test_settings_keep_segments_for_an_age_or_a_size() -> None:
    found = files(1, 10, 20, 30)
    assert lsns(removable(found, 30, [], Keep(0, 150), 0)) == [1, 10]
    assert lsns(removable(found, 30, [], Keep(0, 400), 0)) == []
    assert lsns(removable(found, 30, [], Keep(age_ns=91, bytes=0), 100)) == [1]
    assert lsns(removable(found, 30, [], Keep(age_ns=1000, bytes=0), 100)) == []


def test_a_folder_is_tidied(tmp_path: Path) -> None:
    for lsn in (1, 10, 20, 30):
        (tmp_path / file_name(lsn, SEGMENT)).write_bytes(bytes(100))
    for lsn in (5, 15, 25):
        (tmp_path / file_name(lsn, SNAPSHOT)).write_bytes(b"")
    set_hold(tmp_path, RetentionHold("audit", 12))
    set_hold(tmp_path, RetentionHold("slow", 1, cap_bytes=350))
    assert is_untidy(tmp_path, NOTHING)
    assert tidy(tmp_path, NOTHING) == [RetentionHold("slow", 1, 350)]
    assert lsns(segments(tmp_path)) == [10, 20, 30]
    assert lsns(snapshots(tmp_path)) == [15, 25]
    assert read_holds(tmp_path)["slow"].dropped
    assert not is_untidy(tmp_path, NOTHING)
    assert tidy(tmp_path, NOTHING) == []

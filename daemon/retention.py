"""Which files of a WAL may go.

Recovery needs the two newest snapshots and every segment from the older one's start on.
Beyond that, readers hold segments by marks, and settings keep them for an age or a size.
Only the oldest ones go, so what stays has no hole.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from purgatoryd.shm_layout.files import sync_directory
from purgatoryd.shm_layout.marks import Mark, changing_marks, read_marks
from purgatoryd.shm_layout.wal import File, segments, snapshots

SNAPSHOTS_KEPT = 2


@dataclass(frozen=True, slots=True)
class Keep:
    """The settings; 0 = no more than recovery and marks need."""

    age_ns: int
    bytes: int


def needed_lsn(found: Sequence[File]) -> int:
    """The first record that recovery from these snapshots may need."""
    kept = found[-SNAPSHOTS_KEPT:]
    return kept[0].lsn if kept else 0


def bytes_from(files: Sequence[File], lsn: int) -> int:
    """Bytes of the segments that hold record `lsn` or later ones."""
    return sum(file.bytes for file, end in _with_ends(files) if end > lsn)


def over_cap(files: Sequence[File], marks: Iterable[Mark]) -> list[Mark]:
    """Marks that hold back more than they may."""
    return [
        mark
        for mark in marks
        if mark.cap_bytes and not mark.dropped and bytes_from(files, mark.lsn) > mark.cap_bytes
    ]


def removable(
    files: Sequence[File], needed: int, marks: Iterable[Mark], keep: Keep, wall_ns: int
) -> list[File]:
    """The segments that nobody needs, oldest first; the newest one always stays.

    `needed`: the first record for recovery; `wall_ns`: now, to compare with the files' times.
    """
    needed = min([needed, *(mark.lsn for mark in marks if not mark.dropped)])
    gone = []
    for file, end in _with_ends(files):
        young = keep.age_ns > 0 and wall_ns - file.wall_ns < keep.age_ns
        if end > needed or young or bytes_from(files, end) < keep.bytes:
            break
        gone.append(file)
    return gone


def _with_ends(files: Sequence[File]) -> list[tuple[File, int]]:
    """Each segment with the first record behind it; nothing is behind the newest one."""
    ends = [file.lsn for file in files[1:]] + [2**64]
    return list(zip(files, ends, strict=True))


# ---- in the folder ---------------------------------------------------------------------------


def is_untidy(directory: Path, keep: Keep) -> bool:
    """True if tidy() would have something to do."""
    marks = read_marks(directory).values()
    return bool(over_cap(segments(directory), marks) or _gone(directory, marks, keep))


def tidy(directory: Path, keep: Keep) -> list[Mark]:
    """Drops marks over their caps, removes what nobody needs; returns the marks."""
    with changing_marks(directory) as marks:
        dropped = over_cap(segments(directory), marks.values())
        marks |= {mark.name: replace(mark, dropped=True) for mark in dropped}
        gone = _gone(directory, marks.values(), keep)
        for file in gone:
            file.path.unlink()
    if gone:
        sync_directory(directory)
    return dropped


def _gone(directory: Path, marks: Iterable[Mark], keep: Keep) -> list[File]:
    kept = snapshots(directory)
    old = removable(segments(directory), needed_lsn(kept), marks, keep, time.time_ns())
    return old + kept[:-SNAPSHOTS_KEPT]

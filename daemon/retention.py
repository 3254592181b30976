"""Removal of WAL files.

Recovery needs the two newest snapshots, and every segment from the start of the older snapshot on.
Retention holds of readers, and settings for age and size, may keep further segments. Only the
oldest segments are removed, so the remaining segments have no gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.retention_holds import RetentionHold, changing_holds, read_holds
from purgatoryd.shm_layout.wal import File, segments, snapshots

SNAPSHOTS_KEPT = 2


@dataclass(frozen=True, slots=True)
class Keep:
    """Settings of the retention; 0 = keep only what recovery and retention holds need."""

    age_ns: int
    bytes: int


def needed_lsn(found: Sequence[File]) -> int:
    """Return the LSN of the first record that a recovery from these snapshots may need."""
    retained = found[-SNAPSHOTS_KEPT:]
    return retained[0].lsn if retained else 0


def bytes_from(files: Sequence[File], lsn: int) -> int:
    """Return the total size in bytes of the segments that contain record `lsn` or later records."""
    return sum(file.bytes for file, end in _with_ends(files) if end > lsn)


def over_cap(files: Sequence[File], holds: Iterable[RetentionHold]) -> list[RetentionHold]:
    """Return the retention holds that retain more bytes than their caps allow."""
    return [
        hold
        for hold in holds
        if hold.cap_bytes and not hold.dropped and bytes_from(files, hold.lsn) > hold.cap_bytes
    ]


def removable(
    files: Sequence[File], needed: int, holds: Iterable[RetentionHold], keep: Keep, wall_ns: int
) -> list[File]:
    """Return the segments that may be removed, oldest first; the newest segment always stays.

    `needed`: LSN of the first record that recovery needs. `wall_ns`: the current wall time.
    """
    needed = min([needed, *(hold.lsn for hold in holds if not hold.dropped)])
    gone = []
    for file, end in _with_ends(files):
        young = keep.age_ns > 0 and wall_ns - file.wall_ns < keep.age_ns
        if end > needed or young or bytes_from(files, end) < keep.bytes:
            break
        gone.append(file)
    return gone


def _with_ends(files: Sequence[File]) -> list[tuple[File, int]]:
    """Return (segment, LSN of the first record behind it) for each segment; 2**64 for the newest
    segment."""
    ends = [*(file.lsn for file in files), 2**64][1:]  # empty if there is no segment
    return list(zip(files, ends, strict=True))


# ---- in the folder ---------------------------------------------------------------------------


def is_untidy(directory: Path, keep: Keep, host: Host = HOST) -> bool:
    """Return True if tidy() would remove a file or drop a retention hold."""
    holds = read_holds(directory, host.disk).values()
    held = over_cap(segments(directory, host.disk), holds)
    return bool(held or _gone(directory, holds, keep, host))


def tidy(directory: Path, keep: Keep, host: Host = HOST) -> list[RetentionHold]:
    """Drop retention holds that exceed their caps, and remove files that are not needed. Return the
    dropped holds."""
    disk = host.disk
    with changing_holds(directory, disk) as holds:
        dropped = over_cap(segments(directory, disk), holds.values())
        holds |= {hold.name: replace(hold, dropped=True) for hold in dropped}
        gone = _gone(directory, holds.values(), keep, host)
        for file in gone:
            disk.remove(file.path)
    if gone:
        disk.sync_directory(directory)
    return dropped


def _gone(directory: Path, holds: Iterable[RetentionHold], keep: Keep, host: Host) -> list[File]:
    retained, files = snapshots(directory, host.disk), segments(directory, host.disk)
    old = removable(files, needed_lsn(retained), holds, keep, host.wall_ns())
    return old + retained[:-SNAPSHOTS_KEPT]

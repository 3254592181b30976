"""Retention holds: what readers of a WAL still need of it.

A retention hold names the first record (LSN) that somebody still wants to read. Files of the WAL
from there on stay, until the hold moves, is removed, or holds more bytes than its cap. The
holds stand in one small file next to the segments, which is replaced whole; daemon and
command line take turns by a lock on the directory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from purgatoryd.shm_layout.disk import DISK, Disk
from purgatoryd.shm_layout.errors import BadPath, InvalidName, InvalidSetting
from purgatoryd.shm_layout.files import replace_durably
from purgatoryd.shm_layout.wal import following_lsn, segments

FILE = "retention_holds"
NAME_BYTES_MAX = 64
LSN_END = 2**64


@dataclass(frozen=True, slots=True)
class RetentionHold:
    """`cap_bytes`: how much of the WAL it may hold back, 0 = any amount. One that held
    more was dropped: it holds nothing any more, and stands here so that its reader learns it."""

    name: str
    lsn: int
    cap_bytes: int = 0
    dropped: bool = False


def read_holds(directory: Path, disk: Disk = DISK) -> dict[str, RetentionHold]:
    """All retention holds of the WAL in `directory`. Raises BadPath if the file is not one of
    ours."""
    path = directory / FILE
    try:
        rows = json.loads(disk.read_bytes(path))
        return {row["name"]: _hold(**row) for row in rows}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadPath(str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadPath(str(path), f"is no table of retention holds: {error}") from error


def _hold(name: str, lsn: int, cap_bytes: int = 0, dropped: bool = False) -> RetentionHold:
    """Raises TypeError, ValueError."""
    hold = RetentionHold(name, lsn, cap_bytes, dropped)
    for field, kind in (("name", str), ("lsn", int), ("cap_bytes", int), ("dropped", bool)):
        if type(value := getattr(hold, field)) is not kind:
            raise TypeError(f"{field} is {value!r}")
    if not 0 < lsn < LSN_END or cap_bytes < 0:
        raise ValueError(f"lsn is {lsn}, cap_bytes is {cap_bytes}")
    return hold


def set_hold(directory: Path, hold: RetentionHold, *, there: bool = False) -> None:
    """Adds a retention hold or moves it, and lets it hold again if it was dropped.

    Raises InvalidName; with `there` InvalidSetting if its record is not there any more, or is yet
    to come and not the next one, and what following_lsn() raises. What was refused changes nothing.
    """
    length = len(hold.name.encode())
    if not 1 <= length <= NAME_BYTES_MAX or not hold.name.isprintable():
        reason = "is empty, too long or not printable"
        raise InvalidName("retention hold", hold.name, reason, length, NAME_BYTES_MAX)
    with changing_holds(directory) as holds:
        if there:
            _refuse_absent(directory, hold)
        holds[hold.name] = hold


def _refuse_absent(directory: Path, hold: RetentionHold) -> None:
    """Raises InvalidSetting if its record has gone, or is not even the next one to come."""
    files = segments(directory)
    if not files:
        return
    oldest, newest = files[0].lsn, files[-1].lsn
    if hold.lsn < oldest:
        raise InvalidSetting("lsn", hold.lsn, f"at least {oldest}, the oldest record", "argument")
    if hold.lsn > newest and hold.lsn > (following := following_lsn(files[-1])):
        raise InvalidSetting("lsn", hold.lsn, f"at most {following}, the next record", "argument")


def remove_hold(directory: Path, name: str) -> bool:
    """False if there was none of that name."""
    with changing_holds(directory) as holds:
        return holds.pop(name, None) is not None


@contextlib.contextmanager
def changing_holds(directory: Path, disk: Disk = DISK) -> Iterator[dict[str, RetentionHold]]:
    """The retention holds, to be changed in place; written when the block ends without an error.

    Others wait meanwhile, so that what is held and what goes is decided by one at a time.
    """
    with disk.locked(directory):
        holds = read_holds(directory, disk)
        before = dict(holds)
        yield holds
        if holds != before:
            rows = [asdict(hold) for hold in holds.values()]
            replace_durably(directory / FILE, json.dumps(rows, indent=1).encode(), disk=disk)

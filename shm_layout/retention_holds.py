"""Retention holds: the parts of a WAL that its readers still need.

A retention hold contains the LSN of the first record that a reader still needs. The WAL files from
this record on are not deleted until the hold is moved or removed, or holds back more bytes than its
cap. The holds are in one small file next to the segments, which is replaced as a whole. The daemon
and the command line lock the directory for each change.
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
    """A retention hold on the records from `lsn` on.

    `cap_bytes`: largest number of WAL bytes that it may hold back, 0 = any number. A hold that
    exceeded its cap is `dropped`: it has no effect, but stays in the file so that its reader
    notices.
    """

    name: str
    lsn: int
    cap_bytes: int = 0
    dropped: bool = False


def read_holds(directory: Path, disk: Disk = DISK) -> dict[str, RetentionHold]:
    """Return all retention holds of the WAL in `directory`, by name. Raises BadPath if the file is
    invalid."""
    path = directory / FILE
    try:
        rows = json.loads(disk.read_bytes(path))
        return {row["name"]: _hold(**row) for row in rows}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadPath(str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadPath(str(path), f"is not a table of retention holds: {error}") from error


def _hold(name: str, lsn: int, cap_bytes: int = 0, dropped: bool = False) -> RetentionHold:
    """Return a hold from a row of the file. Raises TypeError, ValueError."""
    hold = RetentionHold(name, lsn, cap_bytes, dropped)
    for field, kind in (("name", str), ("lsn", int), ("cap_bytes", int), ("dropped", bool)):
        if type(value := getattr(hold, field)) is not kind:
            raise TypeError(f"{field} has the wrong type: {value!r}")
    if not 0 < lsn < LSN_END or cap_bytes < 0:
        raise ValueError(f"out of bounds: lsn {lsn}, cap_bytes {cap_bytes}")
    return hold


def set_hold(directory: Path, hold: RetentionHold, *, there: bool = False) -> None:
    """Add or move a retention hold; a dropped hold takes effect again.

    Raises InvalidName. With `there`, raises InvalidSetting unless the record of the hold exists or
    is the next record; also raises the errors of following_lsn(). After an error nothing has
    changed.
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
    """Raise InvalidSetting if the hold's record was deleted, or is later than the next record."""
    files = segments(directory)
    if not files:
        return
    oldest, newest = files[0].lsn, files[-1].lsn
    if hold.lsn < oldest:
        raise InvalidSetting("lsn", hold.lsn, f"at least {oldest}, the oldest record", "argument")
    if hold.lsn > newest and hold.lsn > (following := following_lsn(files[-1])):
        raise InvalidSetting("lsn", hold.lsn, f"at most {following}, the next record", "argument")


def remove_hold(directory: Path, name: str) -> bool:
    """Remove the retention hold of this name. Return False if there was none."""
    with changing_holds(directory) as holds:
        return holds.pop(name, None) is not None


@contextlib.contextmanager
def changing_holds(directory: Path, disk: Disk = DISK) -> Iterator[dict[str, RetentionHold]]:
    """Return the retention holds, which the `with` block may change in place. If the block ends
    without an error, write the changes to the file.

    Other processes wait during the block, so only one process at a time decides which files are
    deleted.
    """
    with disk.locked(directory):
        holds = read_holds(directory, disk)
        before = dict(holds)
        yield holds
        if holds != before:
            rows = [asdict(hold) for hold in holds.values()]
            replace_durably(directory / FILE, json.dumps(rows, indent=1).encode(), disk=disk)

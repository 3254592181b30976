"""Files of timers on their way into a daemon that Spark's workers cannot reach.

    SPOOL/<daemon>/<bulk_load>-<partition>.parquet         to be added; its name came by rename
    SPOOL/<daemon>/done/<bulk_load>-<partition>.parquet    added; its .json has the answers
    SPOOL/<daemon>/refused/<name>.parquet                  cannot be added; its .json says why
    SPOOL/<daemon>/agent                                   the lock of the one agent

Rows are known to the daemon by their bulk load and number. So an agent that was killed begins the
file again, and nothing is added twice; nor is a file that was mended and moved back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from purgatoryd.pipeline.bulk_loading import TIMES, Answers, write_report
from purgatoryd.pipeline.locks import alone
from purgatoryd.shm_layout.errors import DaemonError, LakeBroken, MessageRefused, ProtocolError
from purgatoryd.shm_layout.files import sync_directory
from purgatoryd.shm_layout.layout import WireError
from purgatoryd.shm_layout.paths import check_name

BULK_LOAD = b"purgatoryd.bulk_load"
DONE = "done"
REFUSED = "refused"
COLUMNS = frozenset(("namespace", "key_type", "key", "topic", "payload", "row"))
CREDITS = 65_536
FINAL = frozenset(("EXISTS", "TOO_FAR", "DENIED", "FENCED", "CLOSED"))
"""Refusals that will be the same next time."""
PASSING = frozenset((
    WireError.SESSION_EXPIRED, WireError.SESSIONS_FULL, WireError.STOPPING, WireError.BUSY,
    WireError.NAMESPACES_FULL, WireError.BULK_LOADS_FULL, WireError.NOT_DURABLE, WireError.QUOTA,
))  # fmt: skip
"""Refusals of a whole message that may be another next time."""
TRIES = 3
PAUSE_S = 1.0
"""So often, and so far apart, a file is tried if the daemon fails."""


class Target(Protocol):
    """The daemon."""

    name: str

    def add(self, bulk_load: UUID, rows: pa.Table) -> Answers:
        """Arms rows."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A file and what was answered. `left`: it stays for another time, since rows of it were
    refused for a reason that may pass. `bad`: why it was set aside, if it was; rows of it may
    have been added."""

    path: Path
    answers: Answers
    left: bool = False
    bad: str = ""


def folder_of(spool: Path, daemon: str) -> Path:
    """Where the files of a daemon are. Raises InvalidName."""
    return spool / check_name(daemon)


def working(spool: Path, daemon: str) -> AbstractContextManager[None]:
    """No other agent works for this daemon inside. Raises LakeInUse."""
    folder = folder_of(spool, daemon)
    for name in (DONE, REFUSED):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return alone(folder / "agent")


def deliver(spool: Path, target: Target, credits: int = CREDITS) -> Iterator[Delivered]:
    """Adds every file that is there, oldest name first, with at most `credits` rows that have no
    answer; one that cannot be read or added is set aside. Raises InvalidName; LakeInUse if there
    is another agent; DaemonError if the daemon fails again and again: the files stay."""
    with working(spool, target.name):
        for path in sorted(folder_of(spool, target.name).glob("*.parquet")):
            yield _deliver(path, target, credits)


def _deliver(path: Path, target: Target, credits: int) -> Delivered:
    answers = Answers()
    try:
        bulk_load = bulk_load_of(path)
        for rows in pieces(path, credits):
            answers.add(_added(bulk_load, rows, target))
    except (DaemonError, LakeBroken, ValueError, TypeError, pa.ArrowException) as error:
        if passes(error):
            raise
        return _set_aside(path, answers, str(error))
    done = path.parent / DONE / path.name
    write_report(done.with_suffix(".json"), bulk_load, answers)
    if set(answers.refusals) - FINAL:
        return Delivered(path, answers, left=True)
    return Delivered(_moved(path, done), answers)


def _added(bulk_load: UUID, rows: pa.Table, target: Target) -> Answers:
    for left in reversed(range(TRIES)):
        try:
            return target.add(bulk_load, rows)
        except DaemonError as error:
            if not left or not passes(error):
                raise
            time.sleep(PAUSE_S)
    raise AssertionError


def passes(error: Exception) -> bool:
    """True if the daemon failed, and not the file or a row of it."""
    if isinstance(error, MessageRefused):
        return error.error in PASSING
    return isinstance(error, DaemonError) and not isinstance(error, ProtocolError)


def _set_aside(path: Path, answers: Answers, bad: str) -> Delivered:
    refused = path.parent / REFUSED / path.name
    report = json.dumps({"bad": bad, **answers.record()}, indent=1)
    refused.with_suffix(".json").write_text(report + "\n")
    return Delivered(_moved(path, refused), answers, bad=bad)


def _moved(path: Path, place: Path) -> Path:
    path.rename(place)
    sync_directory(path.parent)
    return place


def bulk_load_of(path: Path) -> UUID:
    """The bulk load of a file. Raises LakeBroken."""
    try:
        about = pq.read_schema(path)
        bulk_load = UUID(bytes=(about.metadata or {})[BULK_LOAD])
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise LakeBroken(str(path), f"is not a file of timers: {error!r}") from error
    if not set(about.names) >= COLUMNS or len(set(about.names) & set(TIMES)) != 1:
        raise LakeBroken(str(path), f"is not a file of timers: its columns are {about.names}")
    return bulk_load


def pieces(path: Path, credits: int) -> Iterator[pa.Table]:
    """The rows of a file, so many at a time. Raises LakeBroken."""
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(credits):
                yield pa.Table.from_batches([batch])
    except (OSError, pa.ArrowException) as error:
        raise LakeBroken(str(path), f"cannot be read: {error!r}") from error

"""Files of timers on their way into a daemon that Spark's workers cannot reach.

    SPOOL/<daemon>/<load>-<partition>.parquet         to be added; its name came by rename
    SPOOL/<daemon>/done/<load>-<partition>.parquet    added; .json beside it: what was answered
    SPOOL/<daemon>/agent                              the lock of the one agent

Rows are known to the daemon by their load and number. So an agent that was killed begins the file
again, and nothing is added twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from purgatoryd.pipeline.loading import Answers, write_report
from purgatoryd.pipeline.tier import alone
from purgatoryd.shm_layout.errors import LakeBroken
from purgatoryd.shm_layout.files import sync_directory

LOAD = b"purgatoryd.load"
DONE = "done"
CREDITS = 65_536
FINAL = frozenset(("EXISTS", "TOO_FAR", "DENIED", "FENCED", "CLOSED"))
"""Refusals that will be the same next time."""


class Target(Protocol):
    """The daemon."""

    name: str

    def add(self, load: UUID, rows: pa.Table) -> Answers:
        """Arms rows."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A file and what was answered. `left`: it stays for another time, since rows of it were
    refused for a reason that may pass."""

    path: Path
    answers: Answers
    left: bool


def folder_of(spool: Path, daemon: str) -> Path:
    """Where the files of a daemon are."""
    return spool / daemon


def working(spool: Path, daemon: str) -> AbstractContextManager[None]:
    """No other agent works for this daemon inside. Raises LakeInUse."""
    folder = folder_of(spool, daemon)
    (folder / DONE).mkdir(parents=True, exist_ok=True)
    return alone(folder / "agent")


def deliver(spool: Path, target: Target, credits: int = CREDITS) -> Iterator[Delivered]:
    """Adds every file that is there, oldest name first, with at most `credits` rows that have no
    answer. Raises LakeBroken, DaemonError; LakeInUse if there is another agent."""
    with working(spool, target.name):
        for path in sorted(folder_of(spool, target.name).glob("*.parquet")):
            yield _deliver(path, target, credits)


def _deliver(path: Path, target: Target, credits: int) -> Delivered:
    load, answers = load_of(path), Answers()
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(credits):
            answers.add(target.add(load, pa.Table.from_batches([batch])))
    done = path.parent / DONE / path.name
    write_report(done.with_suffix(".json"), load, answers)
    if set(answers.refusals) - FINAL:
        return Delivered(path, answers, left=True)
    path.rename(done)
    sync_directory(path.parent)
    return Delivered(done, answers, left=False)


def load_of(path: Path) -> UUID:
    """The load of a file. Raises LakeBroken."""
    try:
        about = pq.read_schema(path).metadata or {}
        return UUID(bytes=about[LOAD])
    except (OSError, pa.ArrowInvalid, KeyError, ValueError) as error:
        raise LakeBroken(str(path), f"is no file of timers: {error!r}") from error

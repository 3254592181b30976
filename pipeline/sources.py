"""The files of a WAL as the pipeline reads them: distinguished from those of other arenas, and
without a trace in the page cache."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from purgatoryd.pipeline import cache
from purgatoryd.pipeline.decode import Decoder
from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Identity
from purgatoryd.pipeline.names import Names
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.errors import BadPath, WalDamaged
from purgatoryd.shm_layout.files import listed
from purgatoryd.shm_layout.layout import WalkState
from purgatoryd.shm_layout.retention_holds import LSN_END
from purgatoryd.shm_layout.shards import shard_generations_behind
from purgatoryd.shm_layout.wal import SEGMENT, SNAPSHOT, File, Walk, segments, snapshots

HEAD: int = lib.PG_WAL_SEGMENT_HEAD


@dataclass(frozen=True, slots=True)
class Source:
    """A file of a WAL. `complete`: it may end without a seal: what follows it is of another
    arena, or nothing does."""

    path: Path
    identity: Identity
    complete: bool = False

    def before(self, after: Source | None) -> Source:
        """This segment, if `after` is the following one; None: it is the newest, which is still
        written."""
        complete = after is None or self.identity.daemon != after.identity.daemon
        return replace(self, complete=complete)

    def next_lsn(self, after: Source) -> int:
        """The record behind this segment's last one, if `after` is the following segment; 0 =
        nobody knows: another start of the daemon may have left some out."""
        own, other = self.identity, after.identity
        same = (own.daemon, own.epoch) == (other.daemon, other.epoch)
        return other.first_lsn if same else 0


def source(file: File) -> Source:
    """Reads the file's header. Raises WalMismatch, WalDamaged, BadPath."""
    walk = Walk()
    walk.enter(file.path, cache.read(file.path, upto=HEAD))
    table = OPENINGS if file.path.suffix == SNAPSHOT else BRONZE
    header = walk.struct.header
    return Source(
        file.path, Identity(table, walk.uuid.hex(), int(header.epoch), int(header.first_lsn))
    )


def refuse_open_end(walk: Walk, one: Source) -> None:
    """Raise WalDamaged if a segment that another segment follows has no seal."""
    if one.identity.table == BRONZE and not one.complete and walk.state != WalkState.SEALED:
        detail = "ends before the next segment begins"
        at = int(walk.struct.at)
        raise WalDamaged(str(one.path), detail, at, int(walk.struct.size), walk.lsn + 1, walk.lsn)


def present(files: Iterable[File]) -> Iterator[Source]:
    """Those that are still there: retention takes the oldest at any time. Raises as source()."""
    for file in files:
        with contextlib.suppress(BadPath):
            yield source(file)


def sealed(directory: Path) -> list[Source]:
    """The segments that nobody writes any more, oldest first: all but the newest one, and that one
    too of a shard whose deployment has another number of them by now."""
    # asked first: then nothing more comes
    over = shard_generations_behind(directory.absolute()) > 0
    found = [*present(segments(directory))]
    ended = [one.before(after) for one, after in pairwise(found)]
    return ended + [one.before(None) for one in found[-1:] if over]


def wals_in(directory: Path) -> list[Path]:
    """The folders of a directory of WALs that have segments. Raises BadPath for the folder of
    one WAL, OSError for one that may not be read."""
    if segments(directory):
        raise BadPath(str(directory), "is a WAL; give the folder of WALs that contains it")
    folders = (path for path in listed(directory, "*") if path.is_dir())
    return [folder for folder in folders if listed(folder, f"*{SEGMENT}")]


def openings(directory: Path, names: Container[str] | None = None) -> list[Source]:
    """The snapshots that are there, or those of these names; they may go at any time. None of a
    shard that does not count yet: it may be thrown away."""
    if shard_generations_behind(directory.absolute()) < 0:
        return []
    files = snapshots(directory)
    return [*present(f for f in files if names is None or f.path.name in names)]


def successors_in(directory: Path) -> dict[str, str]:
    """By arena whose place another one took, the other: a WAL's files are of one daemon.
    Raises WalMismatch, WalDamaged."""
    begun: dict[str, tuple[int, int]] = {}  # each arena once: an end and a beginning may be one LSN
    for one in (*openings(directory), *present(segments(directory))):
        own = one.identity
        first = (own.first_lsn, own.epoch)
        begun[own.daemon] = min(begun.get(own.daemon, first), first)
    return dict(pairwise(sorted(begun, key=lambda daemon: begun[daemon])))


# ---- names -----------------------------------------------------------------------------------


class Learnt:
    """The names of a WAL, learnt from its files; each of them is read once. They hold for all
    of its arenas: who takes another one's place has the same rows."""

    def __init__(self) -> None:
        self.names = Names()
        self._read: set[File] = set()

    def take(self, files: Iterable[File]) -> None:
        """Reads those that are new. `files`: all that there are. Raises WalDamaged."""
        there = set(files)
        decoder = Decoder("", self.names)  # not kept: Spark makes copies of this one
        for file in sorted(there - self._read, key=lambda file: file.lsn):
            with contextlib.suppress(BadPath):  # it went: nobody asks for its records any more
                walk = Walk()
                walk.enter(file.path, cache.read(file.path))
                decoder.learn(walk)
        self.names, self._read = decoder.names, there


def naming(directory: Path, before: int) -> list[File]:
    """The files of a WAL that name what its records before this one (LSN) speak of: those up to
    there; and a snapshot in any case, for the names of what was removed."""
    all_ = snapshots(directory)
    found = [file for file in all_ if file.lsn < before] or all_[:1]
    return found + [file for file in segments(directory) if file.lsn < before]


def names_of(directory: Path, before: int = LSN_END) -> Names:
    """All names that these records have. Raises WalDamaged."""
    learnt = Learnt()
    learnt.take(naming(directory, before))
    return learnt.names

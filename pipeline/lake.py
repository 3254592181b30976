"""The lake on disk: a folder of Parquet files, and the manifests that make them count.

A file is written under a temporary name, brought to disk, renamed; its manifest comes last. A
file without a manifest does not exist for readers: they list manifests, never folders. POSIX
file systems only: it rests on rename, fsync and flock.

    bronze/daemon=<uuid>/<name>.parquet      the records of one sealed segment
    openings/daemon=<uuid>/<name>.parquet    those of one snapshot
    manifests/daemon=<uuid>/<name>.json      makes one of them count
    manifests/daemon=<uuid>/names            what rows and sessions are called, see names.py
    hot/<n>/                                 the same again, of one reader: what the lake lacks
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from purgatoryd.pipeline.cache import drop
from purgatoryd.pipeline.locks import alone, in_turn, take
from purgatoryd.pipeline.names import Names
from purgatoryd.pipeline.schemas import FORMAT, Table
from purgatoryd.shm_layout.disk import MODE
from purgatoryd.shm_layout.errors import BadPath, LakeBroken, LakeInUse, LakeMismatch
from purgatoryd.shm_layout.files import (
    listed,
    private_folder,
    replace_durably,
    write_durably,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BRONZE = "bronze"
OPENINGS = "openings"
MANIFESTS = "manifests"
HOT = "hot"
NAMES = "names"
LOCK = "lock"
UNFINISHED = ".new"


class Span(NamedTuple):
    """Positions in a daemon's replay buffer, without `upto`."""

    begin: int
    upto: int


NONE = Span(0, 0)


class Identity(NamedTuple):
    """Tells a segment or a snapshot from all others, in whatever tier it is."""

    table: str
    daemon: str
    epoch: int
    first_lsn: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one file of bronze or openings holds; `table` says of which.

    `first_lsn`, `last_lsn`: of a snapshot, from where the WAL is redone over it and the
    record that makes it valid. `crc`: CRC-32C of the WAL's file. `wall_from_us`,
    `wall_to_us`: UTC, of its rows. `bytes`: of the Parquet file, set when it is committed.
    `kinds`: rows of each kind. `notices`: of a segment, those that it made; `handed`: those that
    its batches handed to the socket. `ended_upto_ns`: when it last
    ended something, real boot clock, 0 = nothing; `built_from_ns`: when the first answer or batch
    of notices was built that it tells of. `gone_from`: records from this one up to it had left the
    WAL, and were not in the lake, when it came; 0 = none.
    `predecessors`: the daemons whose place this one took with others, `shards` together, when the
    number of a deployment's shards changed, each with its last record that counts. `wal`: what
    the WAL's folder is called, which has one arena after the other. `began_empty`: this segment
    begins with record 1, and the arena was empty before it.
    """

    table: str
    daemon: str
    node: str
    epoch: int
    first_lsn: int
    last_lsn: int
    crc: int
    clock: str
    rows: int
    wall_from_us: int
    wall_to_us: int
    bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    notices: Span = NONE
    handed: Span = NONE
    ended_upto_ns: int = 0
    built_from_ns: int = 0
    gone_from: int = 0
    predecessors: Mapping[str, int] = field(default_factory=dict)
    shards: int = 0
    wal: str = ""
    began_empty: bool = False

    @property
    def name(self) -> str:
        """Of the file and of its manifest, without a suffix."""
        return f"{self.epoch}-{self.first_lsn:016x}-{self.last_lsn:016x}-{self.crc:08x}"

    @property
    def segment(self) -> tuple[str, int, int]:
        """Daemon, epoch and first LSN: a segment's name in every tier."""
        return self.daemon, self.epoch, self.first_lsn

    @property
    def identity(self) -> Identity:
        """What it is known by in every tier."""
        return Identity(self.table, self.daemon, self.epoch, self.first_lsn)


class Lake:
    """The lake in a folder."""

    def __init__(self, root: Path) -> None:
        """Raises BadPath unless the folder is there."""
        if not root.is_dir():
            raise BadPath(str(root), "is not a directory")
        self.root = root.absolute()  # Spark's JVM may stand in another folder

    def folder(self, table: str, daemon: str) -> Path:
        """Where a daemon's files of a table are."""
        return self.root / table / f"daemon={daemon}"

    def data(self, manifest: Manifest) -> Path:
        """The Parquet file of a manifest."""
        return self.folder(manifest.table, manifest.daemon) / f"{manifest.name}.parquet"

    def files(self, manifests: Iterable[Manifest]) -> list[str]:
        """The Parquet files of manifests, to be read. Raises LakeBroken."""
        return [str(intact(self.data(manifest), manifest.bytes)) for manifest in manifests]

    def daemons(self) -> list[str]:
        """Those of whom something was shipped, in order."""
        folders = listed(self.root / MANIFESTS, "daemon=*")
        return [folder.name.removeprefix("daemon=") for folder in folders]

    def manifests(self, table: str = BRONZE, daemon: str = "*") -> list[Manifest]:
        """All that count, by daemon, epoch and LSN. Raises LakeBroken."""
        folders = listed(self.root / MANIFESTS, f"daemon={daemon}")
        found = (read_manifest(path) for one in folders for path in listed(one, "*.json"))
        return sorted((m for m in found if m.table == table), key=lambda m: m.identity)

    # ---- writing ----

    @contextlib.contextmanager
    def overlay(self) -> Iterator[Lake]:
        """An empty lake for what this one lacks, of this process alone; it goes at the end, and
        those of processes that were killed go now."""
        hot = self.root / HOT
        private_folder(hot)
        with contextlib.ExitStack() as stack:
            with in_turn(hot / LOCK):  # what is made, but not locked yet, has an owner all the same
                for left in hot.glob("*/"):
                    _remove_unless_held(left)
                made = Path(tempfile.mkdtemp(dir=hot))
                stack.callback(shutil.rmtree, made, ignore_errors=True)
                stack.enter_context(alone(made / LOCK))
            yield Lake(made)

    def commit(self, table: str, daemon: str, write: Callable[[BinaryIO], Manifest]) -> Manifest:
        """`write` fills a file and says what is in it. It counts, also after a power cut, or
        nothing is there."""
        folder, manifests = self.folder(table, daemon), self.folder(MANIFESTS, daemon)
        for one in (folder, manifests):
            private_folder(one)
        made: list[Manifest] = []

        def fill(file: BinaryIO) -> str:
            made.append(write(file))
            return f"{made[0].name}.parquet"

        path = write_durably(folder / f"{os.getpid()}{UNFINISHED}", fill)
        with path.open("rb") as file:
            drop(file)
        manifest = replace(made[0], bytes=path.stat().st_size)
        replace_durably(manifests / f"{manifest.name}.json", record(manifest))
        return manifest

    def names(self, daemon: str) -> Names:
        """What was learnt of a daemon's names so far. Raises LakeBroken."""
        path = self.folder(MANIFESTS, daemon) / NAMES
        try:
            return Names.from_json(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return Names()
        except (ValueError, TypeError, KeyError) as error:
            raise LakeBroken(str(path), f"is not a table of names: {error}") from error

    def save_names(self, daemon: str, names: Names) -> None:
        """To be called before the commit of what was decoded with them."""
        path = self.folder(MANIFESTS, daemon) / NAMES
        private_folder(path.parent)
        replace_durably(path, json.dumps(names.to_json()).encode())

    @contextlib.contextmanager
    def writing(self, daemon: str) -> Iterator[None]:
        """Inside, nobody else writes what is shipped of this daemon; what a killed one left
        behind is gone. Raises LakeInUse."""
        folder = self.folder(MANIFESTS, daemon)
        private_folder(folder)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
        try:
            take(fd, folder / LOCK)
            self._tidy(daemon)
            yield
        finally:
            os.close(fd)

    def _tidy(self, daemon: str) -> None:
        for table in (BRONZE, OPENINGS):
            retained = {self.data(manifest) for manifest in self.manifests(table, daemon)}
            for path in self.folder(table, daemon).glob("*"):
                if path not in retained and path.is_file():
                    path.unlink()
        for path in self.folder(MANIFESTS, daemon).glob(f"*{UNFINISHED}"):
            path.unlink()


def _remove_unless_held(folder: Path) -> None:
    with contextlib.suppress(LakeInUse, FileNotFoundError), alone(folder / LOCK):
        shutil.rmtree(folder)


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises LakeBroken, LakeMismatch."""
    try:
        fields = fields_of(path, Manifest)
        fields |= {name: Span(*fields[name]) for name in ("notices", "handed")}
        made = Manifest(**fields)
        own = f"daemon={made.daemon}", made.name
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LakeBroken(str(path), f"is not a manifest: {error}") from error
    if made.table not in (BRONZE, OPENINGS) or own != (path.parent.name, path.stem):
        raise LakeBroken(str(path), "describes a file with another name")
    return made


def record(one: Any, indent: int | None = 1) -> bytes:
    """Return a dataclass as JSON with the lake's format number; fields_of() reads it."""
    return json.dumps({"format": FORMAT} | asdict(one), indent=indent).encode()


def fields_of(path: Path, kind: type[Any]) -> dict[str, Any]:
    """Return the fields of a dataclass from a JSON file of the lake.

    Raises LakeMismatch if the file has another format number or none, TypeError if its fields are
    not those of `kind`, OSError and ValueError if it cannot be read.
    """
    document = json.loads(path.read_bytes())
    if isinstance(document, dict) and (found := document.pop("format", None)) != FORMAT:
        raise LakeMismatch(str(path), FORMAT, found)
    return checked(document, kind)


def checked(document: Any, kind: type[Any]) -> dict[str, Any]:
    """Return `document` if it is a JSON object with exactly the fields of the dataclass `kind`.

    Raises TypeError otherwise, and if a number or a string has another type.
    """
    if not isinstance(document, dict):
        raise TypeError(f"contains a {type(document).__name__}, not an object")
    types = {one.name: _PLAIN.get(str(one.type)) for one in fields(kind)}
    if wrong := types.keys() ^ document.keys():
        raise TypeError(f"unknown or missing fields: {', '.join(sorted(wrong))}")
    for name, wanted in types.items():
        if wanted is not None and type(document[name]) is not wanted:
            raise TypeError(f"field {name} has the wrong type: {document[name]!r}")
    return document


_PLAIN = {"int": int, "str": str, "bool": bool}


def intact(path: Path, size: int) -> Path:
    """`path`. Raises LakeBroken unless a file of `size` bytes is there: Parquet that was cut off,
    or grew, may well be readable."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise LakeBroken(str(path), "is gone") from None
    if found != size:
        raise LakeBroken(str(path), f"has {found} bytes, not {size}")
    return path


POSITIONS = ("position", "positions_from", "positions_upto")
"""Columns whose bounds tell which notices a segment has to do with."""
BOUNDED = (*POSITIONS, "ended_boot_ns", "built_ns")
"""Columns of whose bounds a manifest tells; and of "at"."""


def spans(bounds: Mapping[str, Sequence[int]]) -> tuple[Span, Span]:
    """`notices` and `handed` of a manifest; `bounds`: the least and the greatest value of each of
    POSITIONS, or of its parts; empty where it has none."""
    made, begins, uptos = (bounds[name] for name in POSITIONS)
    return (
        Span(min(made), max(made) + 1) if made else NONE,
        Span(min(begins), max(uptos)) if begins else NONE,
    )


SAME = {"epoch", "segment"}
"""Numbers that hardly change within a file."""
SOUGHT = ["lsn", "at", "kind", "ticket", "key", *POSITIONS]
"""Columns that are searched: each row group has the least and the greatest value of these."""


def parquet_writer(file: BinaryIO | pa.NativeFile, table: Table) -> pq.ParquetWriter:
    """Writes a file of a table as the lake has them: plain Parquet that every engine reads."""
    import pyarrow.parquet as pq

    words = [c.name for c in table.columns if c.type == "word" or c.name in SAME]
    numbers = {c.name for c in table.columns if c.type in ("long", "int", "timestamp")} - SAME
    return pq.ParquetWriter(
        file,
        table.arrow(),
        compression="lz4",
        use_dictionary=words,
        column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),  # most grow row by row
        write_statistics=SOUGHT,
        data_page_size=1 << 22,  # most columns of a segment fit in one page
        write_batch_size=1 << 16,
    )

"""The lake on disk: a folder of Parquet files, and the manifests that make them count.

A file is written under a temporary name, brought to disk, renamed; its manifest comes last. A
file without a manifest does not exist for readers: they list manifests, never folders. POSIX
file systems only: it rests on rename and fsync.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from purgatoryd.shm_layout.errors import BadPath, LakeBroken
from purgatoryd.shm_layout.files import replace_durably, write_durably

BRONZE = "bronze"
OPENINGS = "openings"
_MANIFESTS = "manifests"
_UNFINISHED = ".new"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one file of bronze or openings holds; `table` says of which.

    `first_lsn`, `last_lsn`: of a snapshot, from where the journal is redone over it and the
    record that makes it valid. `crc`: of the journal's file. `wall_from_us`, `wall_to_us`: UTC, of
    its rows. `bytes`: of the Parquet file, set when it is committed. `kinds`: rows of each kind.
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
    schema: int
    bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the file and of its manifest, without a suffix."""
        return f"{self.epoch}-{self.first_lsn:016x}-{self.last_lsn:016x}-{self.crc:08x}"

    @property
    def segment(self) -> tuple[str, int, int]:
        """What it is known by in every tier."""
        return self.daemon, self.epoch, self.first_lsn


class Lake:
    """The lake in a folder. Raises BadPath unless the folder is there."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise BadPath(str(root), "is no directory")
        self.root = root

    def data(self, manifest: Manifest) -> Path:
        """The Parquet file of a manifest."""
        folder = self.root / manifest.table / f"daemon={manifest.daemon}"
        return folder / f"{manifest.name}.parquet"

    def manifest(self, manifest: Manifest) -> Path:
        """Where the manifest itself stands."""
        return self._manifests(manifest.daemon) / f"{manifest.name}.json"

    def _manifests(self, daemon: str) -> Path:
        return self.root / _MANIFESTS / f"daemon={daemon}"

    def manifests(self, table: str = BRONZE, daemon: str = "*") -> list[Manifest]:
        """All that count, by daemon, epoch and LSN. Raises LakeBroken."""
        paths = (self.root / _MANIFESTS).glob(f"daemon={daemon}/*.json")
        found = (read_manifest(path) for path in paths)
        return sorted((m for m in found if m.table == table), key=lambda m: m.segment)

    def commit(self, manifest: Manifest, write: Callable[[BinaryIO], object]) -> None:
        """`write` fills the file; then it counts, also after a power cut, or nothing is there."""
        path, told = self.data(manifest), self.manifest(manifest)
        for folder in (path.parent, told.parent):
            folder.mkdir(parents=True, exist_ok=True)

        def fill(file: BinaryIO) -> str:
            write(file)
            return path.name

        write_durably(path.with_name(path.name + _UNFINISHED), fill)
        manifest = replace(manifest, bytes=path.stat().st_size)
        replace_durably(told, json.dumps(asdict(manifest), indent=1).encode())


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises LakeBroken."""
    try:
        return Manifest(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise LakeBroken(str(path), f"is no manifest: {error}") from error


def unfinished(folder: Path) -> Iterator[Path]:
    """Files that a killed writer left behind."""
    return folder.rglob(f"*{_UNFINISHED}")

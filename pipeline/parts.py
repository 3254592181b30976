"""Silver and gold on disk: parts, each with the rows of some segments.

    LAKE/silver/lifecycles/<part>/*.parquet    rows
    LAKE/silver/parts/<part>.json              written last; without it the files do not exist
    LAKE/silver/lock                           one writer at a time

Parts are numbered. Of a segment that stands in several, the newest counts, whole. So making a
segment again replaces its rows, and a crash leaves the older ones in place. gold/ is the same
with more tables. Writers remove what does not count any more, a while later.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from purgatoryd.pipeline.lake import fields_of, intact
from purgatoryd.pipeline.locks import alone
from purgatoryd.pipeline.schemas import FLOW, FORMAT, LIFECYCLES, TOPICS, WORKERS, Table
from purgatoryd.pipeline.session import rows_in
from purgatoryd.shm_layout.errors import LakeBroken
from purgatoryd.shm_layout.files import (
    listed,
    make_private,
    private_folder,
    replace_durably,
    sync_directory,
    sync_file,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Segment = tuple[str, int, int]
"""Daemon, epoch and first LSN."""
Sources = Mapping[Segment, tuple[str, ...]]
"""The files of bronze that the rows of each segment were made of."""
KEPT_S = 600
"""For so long a part stays once it counts no more, for those who are reading it."""
VARIED = ("long", "binary", "timestamp")
"""Types of columns that have about as many values as rows: a dictionary is work for nothing."""
LAYERS: dict[str, tuple[Table, ...]] = {"silver": (LIFECYCLES,), "gold": (TOPICS, WORKERS, FLOW)}


@dataclass(frozen=True, slots=True)
class Part:
    """A commit of a job. `files`: bytes of each file, by table and name."""

    number: int
    files: dict[str, dict[str, int]]
    sources: dict[Segment, tuple[str, ...]]

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(sum(sizes.values()) for sizes in self.files.values())


class Layer:
    """The parts of "silver" or "gold" of the lake in a folder."""

    def __init__(self, lake: Path, name: str) -> None:
        self.name = name
        self.tables = LAYERS[name]
        self.root = lake.resolve() / name
        self._parts = self.root / "parts"

    # ---- what counts -----------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """All, oldest first. Raises LakeBroken, LakeMismatch."""
        found = []
        for path in listed(self._parts, "*.json"):
            with suppress(FileNotFoundError):  # it did not count any more, and went meanwhile
                found.append(_read(path))
        return found

    def counting(self) -> dict[Segment, Part]:
        """The part of each segment that is there."""
        return _counting(self.parts())

    def sources(self) -> dict[Segment, tuple[str, ...]]:
        """What each segment's rows were made of."""
        return {segment: part.sources[segment] for segment, part in self.counting().items()}

    def read(
        self, spark: SparkSession, table: Table, segments: Iterable[Segment] | None = None
    ) -> DataFrame:
        """The rows that count; of these segments, if some are given. Raises LakeBroken."""
        parts = self.parts()
        counting = _counting(parts)
        wanted = set(counting if segments is None else segments)
        whole: list[Path] = []
        frames: list[DataFrame] = []
        for part in parts:
            retained = [
                s for s in part.sources if counting[s].number == part.number and s in wanted
            ]
            if len(retained) == len(part.sources):
                whole += self._files(table, part)
            elif retained:
                frames.append(_only(rows_in(spark, table, self._files(table, part)), retained))
        if whole or not frames:
            frames.append(rows_in(spark, table, whole))
        return reduce(lambda some, more: some.unionByName(more), frames)

    def _manifest(self, number: int) -> Path:
        return self._parts / f"{number:012d}.json"

    def _folder(self, table: Table, number: int) -> Path:
        return self.root / table.name / f"{number:012d}"

    def _files(self, table: Table, part: Part) -> list[Path]:
        folder = self._folder(table, part.number)
        return [
            intact(folder / name, size) for name, size in part.files.get(table.name, {}).items()
        ]

    # ---- writing -----------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Nobody else writes here inside; what never counted, or does not any more, is removed.

        Raises LakeInUse.
        """
        private_folder(self._parts)
        with alone(self.root / "lock"):
            self._remove_dead()
            yield

    def _remove_dead(self) -> None:
        for number, ended_s in self._ended_s().items():
            if time.time() - ended_s > KEPT_S:
                self._manifest(number).unlink()
        known = {path.stem for path in self._parts.glob("*.json")}
        for table in self.tables:
            for folder in (self.root / table.name).glob("*"):
                if folder.name not in known:
                    shutil.rmtree(folder)

    def _ended_s(self) -> dict[int, float]:
        """Since when, s of wall time, each part that counts no more does not: since the last of
        its segments stood in a newer one."""
        ended: dict[int, float] = {}
        newer: dict[Segment, float] = {}
        for part in reversed(self.parts()):
            if newer.keys() >= part.sources.keys():
                ended[part.number] = max(newer[segment] for segment in part.sources)
            committed_s = self._manifest(part.number).stat().st_mtime
            newer |= dict.fromkeys(part.sources, committed_s)
        return ended

    def commit(self, frames: Mapping[str, DataFrame], sources: Sources) -> Part:
        """A new part with these tables, by name; call it inside `writing`.

        It counts once all of it is on disk, and takes the place of what these segments had.
        """
        number = max((part.number for part in self.parts()), default=0) + 1
        with ThreadPoolExecutor() as threads:  # one plans and ends while another computes
            written = threads.map(
                lambda table: self._write(table, number, frames[table.name]), self.tables
            )
            files = {table.name: sizes for table, sizes in zip(self.tables, written, strict=True)}
        part = Part(number, files, dict(sources))
        replace_durably(self._manifest(number), _json(part))
        return part

    def _write(self, table: Table, number: int, rows: DataFrame) -> dict[str, int]:
        """Writes a table's rows durably; returns the bytes of each file."""
        folder = self._folder(table, number)
        plain = [column.name for column in table.columns if column.type in VARIED]
        options = {f"parquet.enable.dictionary#{name}": "false" for name in plain}
        options["compression"] = "lz4_raw"  # less work than zstd, for larger files
        private_folder(folder.parent)  # before there is anything in it
        rows.write.options(**options).parquet(str(folder), mode="overwrite")
        make_private(folder)
        for path in folder.iterdir():
            if path.suffix != ".parquet":  # Hadoop's checksums and its mark of success
                path.unlink()
        for path in folder.iterdir():
            sync_file(path)
        for changed in (folder, folder.parent, self.root):
            sync_directory(changed)
        return _sizes(folder)


def _counting(parts: Iterable[Part]) -> dict[Segment, Part]:
    """By segment; of several, oldest first, the newest."""
    return {segment: part for part in parts for segment in part.sources}


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.parquet"))}


def _only(rows: DataFrame, segments: Iterable[Segment]) -> DataFrame:
    from pyspark.sql.functions import concat_ws

    place = concat_ws("/", "daemon", "epoch", "segment")
    return rows.where(place.isin(["/".join(map(str, segment)) for segment in segments]))


# ---- manifests -------------------------------------------------------------------------------


def _json(part: Part) -> bytes:
    document = {
        "format": FORMAT, "number": part.number, "files": part.files,
        "sources": [[*segment, names] for segment, names in part.sources.items()],
    }  # fmt: skip
    return json.dumps(document).encode()


def _read(path: Path) -> Part:
    try:
        fields = fields_of(path, Part)
        sources = {(d, epoch, lsn): tuple(names) for d, epoch, lsn, names in fields["sources"]}
        return Part(**{**fields, "sources": sources})
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LakeBroken(str(path), f"is not a part of a table: {error!r}") from error

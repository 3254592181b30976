"""Raw ingest: Spark brings WALs into a lake for which no `ship` ran.

The rows, the manifests, the retention hold and the files that a kill leaves behind are the same as
with ship.py. This process reads each file once, for names and checksums. Spark tasks, one per file,
decode the files with format("purgatoryd"); their hosts need access to the WAL and the lake.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline.lake import BOUNDED, OPENINGS, Lake, Manifest, parquet_writer
from purgatoryd.pipeline.schemas import BRONZE
from purgatoryd.pipeline.session import rows_in
from purgatoryd.pipeline.ship import Content, Head, Shipper, head_of
from purgatoryd.pipeline.sources import Source, refuse_open_end, wals_in
from purgatoryd.pipeline.tiers import node_of
from purgatoryd.shm_layout.errors import BadPath, WalError
from purgatoryd.shm_layout.files import private_folder
from purgatoryd.shm_layout.wal import Walk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

RAW = "raw"
"""Folder of the lake in which Spark leaves what it decoded, until it counts."""
RUN_FILES = 64
"""In one job of Spark's."""
_NOTHING = Content(0, {}, {name: [] for name in ("at", *BOUNDED)}, None)


def ingest(spark: SparkSession, lake: Lake, wals: Path) -> int:
    """Brings all that is complete in a folder of WALs into the lake; how many files that was.

    Raises WalDamaged, WalMismatch, LakeInUse, and BadPath for the folder of one WAL.
    """
    count = 0
    for folder in wals_in(wals):
        with closing(RawShipper(spark, folder, lake, node_of(lake, folder))) as shipper:
            count += sum(1 for _ in shipper.poll())
    return count


class Decoded(NamedTuple):
    """Spark's file for one of the WAL's; None: that has no rows."""

    path: Path | None = None
    content: Content = _NOTHING


class RawShipper(Shipper):
    """Brings one WAL into a lake; to be closed."""

    def __init__(self, spark: SparkSession, directory: Path, lake: Lake, node: str) -> None:
        """`directory`: WAL_DIR/NAME; `node`: what its host is called."""
        super().__init__(directory.absolute(), lake, node)
        self._spark = spark

    def _each(self, found: list[Source]) -> Iterator[tuple[Source, Manifest | None]]:
        for _, own in groupby(sorted(found, key=lambda one: one.identity.table), _place):
            files = list(own)
            for at in range(0, len(files), RUN_FILES):
                yield from self._ingested(files[at : at + RUN_FILES])

    def _ingested(self, run: Sequence[Source]) -> Iterator[tuple[Source, Manifest | None]]:
        """Up to the first that cannot be read; that is raised then."""
        heads: dict[Source, Head] = {}
        damage: WalError | None = None
        for one in run:
            try:
                if (head := self._walked(one)) is not None:
                    heads[one] = head
            except WalError as error:
                damage = error
                break
        made = self._decoded([*heads])
        for one, head in heads.items():
            place = one.identity.epoch, one.identity.first_lsn
            yield one, self._taken(one, head, made.get(place, Decoded()))
        shutil.rmtree(self._staging(run[0]), ignore_errors=True)
        if damage is not None:
            raise damage

    def _walked(self, one: Source) -> Head | None:
        """Learns the names; None: it is gone."""
        memory, walk = self._read(one), Walk()
        if memory is None:
            return None
        walk.enter(one.path, memory)
        self._decoder.learn(walk)
        refuse_open_end(walk, one)
        return head_of(walk, memory)

    def _staging(self, one: Source) -> Path:
        return self._lake.folder(RAW, one.identity.daemon)

    def _decoded(self, files: Sequence[Source]) -> dict[tuple[int, int], Decoded]:
        """By epoch and first LSN."""
        if not files:
            return {}
        staging, daemon = self._staging(files[0]), files[0].identity.daemon
        self._save_names(daemon)
        names = json.dumps([one.path.name for one in files])
        raw = self._spark.read.format("purgatoryd").options(
            files=names, node=self._node, lake=str(self._lake.root)
        )
        rows = raw.load(str(self._directory))
        private_folder(staging.parent)  # Spark's files follow the umask
        rows.write.options(compression="zstd", maxRecordsPerFile=0).parquet(
            str(staging), mode="overwrite"
        )
        return _in(rows_in(self._spark, BRONZE, [staging]), staging)

    def _taken(self, one: Source, head: Head, made: Decoded) -> Manifest | None:
        if one.identity.table == OPENINGS:
            if made.path is None:
                return None  # it has gone meanwhile
        elif made.content.rows != head.last_lsn - one.identity.first_lsn + 1:
            raise BadPath(str(one.path), "was removed or changed while it was read; read again")

        def write(file: BinaryIO) -> Manifest:
            if made.path is None:
                parquet_writer(file, BRONZE).close()
            else:
                with made.path.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
            return self._manifest(one.identity, head, made.content)

        return self._lake.commit(one.identity.table, one.identity.daemon, write)


def _place(one: Source) -> tuple[str, str]:
    return one.identity.table, one.identity.daemon


def _in(rows: DataFrame, staging: Path) -> dict[tuple[int, int], Decoded]:
    """What Spark's files hold; each is of one file of the WAL."""
    values = {"at": F.unix_micros("at")} | {name: F.col(name) for name in BOUNDED}
    ends = [
        end(value).alias(f"{word}_{name}")
        for name, value in values.items() for word, end in (("least", F.min), ("most", F.max))
    ]  # fmt: skip
    file = F.col("_metadata.file_name").alias("file")
    found = rows.groupBy("epoch", "segment", "kind", file).agg(
        F.count("*").alias("rows"), F.max("add_lsn").alias("add_lsn"), *ends
    ).orderBy("epoch", "segment").collect()  # fmt: skip
    return {
        place: _content(list(own), staging)
        for place, own in groupby(found, lambda row: (row["epoch"], row["segment"]))
    }


def _content(kinds: Sequence[Row], staging: Path) -> Decoded:
    """Of one file, from a row for each kind of record."""
    bounds = {
        name: [row[f"{word}_{name}"] for row in kinds for word in ("least", "most")]
        for name in _NOTHING.bounds
    }
    known = {name: [end for end in found if end is not None] for name, found in bounds.items()}
    counts = {row["kind"]: row["rows"] for row in kinds}
    end_lsn = next((row["add_lsn"] for row in kinds if row["kind"] == "last"), None)
    content = Content(sum(counts.values()), counts, known, end_lsn)
    return Decoded(staging / kinds[0]["file"], content)

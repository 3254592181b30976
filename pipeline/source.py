"""format("purgatoryd"): a WAL's records as a table of Spark, batch and streaming.

    spark.read.format("purgatoryd").load("WAL_DIR/NAME")

Options: `columns` (of BRONZE, comma-separated), `from_us` and `to_us` (UTC microseconds; rows
with from <= at < to), `payloads` (off: without them), `node` (this host's name unless given),
`files` (a JSON list of file names; all segments unless given), of a batch query `lake` (names are
taken from there, which has them all, and not from the WAL's files; and a file is not opened if
its manifest there says that it has no row of the range), and of a stream `max_rows` of a
batch, which has whole segments and one at least, and `retention_hold`, a name under which the WAL
is held for what is not processed yet.

There is no pushFilters: Spark keeps the reader that was pushed to with the relation, and later
queries of it, or other branches of one query, get what the last push left (4.1 to 4.3).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from purgatoryd.pipeline import cache
from purgatoryd.pipeline.decode import Decoder
from purgatoryd.pipeline.lake import Lake, Manifest
from purgatoryd.pipeline.names import Names
from purgatoryd.pipeline.schemas import BRONZE, Table
from purgatoryd.pipeline.sources import (
    Learnt,
    Source,
    names_of,
    naming,
    openings,
    refuse_open_end,
    source,
)
from purgatoryd.shm_layout.errors import (
    BadPath,
    InvalidSetting,
    UnknownSetting,
    WalDamaged,
    WalError,
)
from purgatoryd.shm_layout.retention_holds import LSN_END, RetentionHold, set_hold
from purgatoryd.shm_layout.wal import SEGMENT, File, Walk, segments

_SCHEMA = BRONZE.arrow()
NAMED = {"namespace", "topic", "worker", "replaced_worker"}
"""Columns whose values are in no record: those have rows and sessions, which others name."""


@dataclass
class Range(InputPartition):
    """One file, records lsn_from <= lsn < lsn_to; and the names that its daemon has. `next_lsn`:
    of the record behind it, 0 if nobody can know."""

    source: Source
    names: Names
    lsn_from: int = 0
    lsn_to: int = LSN_END
    next_lsn: int = 0


OPTIONS = (
    "path", "columns", "payloads", "node", "from_us", "to_us", "files", "lake", "max_rows",
    "retention_hold",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The options, read and checked."""

    path: Path
    columns: tuple[str, ...]
    payloads: bool
    node: str
    from_us: int
    to_us: int
    files: frozenset[str] | None
    lake: Path | None
    max_rows: int
    retention_hold: str

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Settings:
        """Raises InvalidSetting, BadPath."""
        for name in options:
            if name.lower() not in OPTIONS:
                raise UnknownSetting(name, "option", OPTIONS)
        path = Path(options.get("path", "")).absolute()  # tasks stand in other folders
        if "path" not in options or not path.is_dir():
            raise BadPath(str(path), "is not a WAL")
        files = options.get("files")
        return cls(
            path,
            _columns(options.get("columns", "")),
            _switch("payloads", options.get("payloads", "on")),
            options.get("node") or socket.gethostname(),
            _number("from_us", options.get("from_us", str(-(1 << 63)))),
            _number("to_us", options.get("to_us", str((1 << 63) - 1))),
            None if files is None else _names(files),
            Path(options["lake"]).absolute() if "lake" in options else None,
            _rows(options.get("max_rows", "0")),
            options.get("retention_hold", ""),
        )

    def misses(self, manifest: Manifest) -> bool:
        """True if no row of it is in the time range. Nothing else tells: a header has the time at
        which the file was begun, and its records may be older, or of a clock that was put back."""
        return manifest.wall_to_us < self.from_us or manifest.wall_from_us >= self.to_us


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in BRONZE.names:
            raise InvalidSetting("columns", name, f"of {', '.join(BRONZE.names)}", "option")
    return names or tuple(BRONZE.names)


def _switch(name: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise InvalidSetting(name, text, "on or off", "option")
    return text == "on"


def _names(text: str) -> frozenset[str]:
    """A list of names in JSON."""
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, list) and all(isinstance(one, str) for one in found):
            return frozenset(found)
    raise InvalidSetting("files", text, "a JSON list of names", "option")


def _rows(text: str) -> int:
    if (rows := _number("max_rows", text)) < 0:
        raise InvalidSetting("max_rows", rows, "0 or more", "option")
    return rows


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidSetting(name, text, "a whole number", "option") from None


class PurgatorydSource(DataSource):
    """A WAL; see the module for its options."""

    @classmethod
    def name(cls) -> str:
        """What format() is given."""
        return "purgatoryd"

    def schema(self) -> StructType:
        """That of BRONZE, or of the columns that are asked for."""
        wanted = _columns(self.options.get("columns", ""))
        chosen = {column.name: column for column in BRONZE.columns}
        return Table(BRONZE.name, tuple(chosen[n] for n in wanted)).spark()

    def reader(self, schema: StructType) -> WalReader:
        """Of a batch query."""
        return WalReader(Settings.of(self.options))

    def streamReader(self, schema: StructType) -> WalStream:  # noqa: N802
        """Of a stream."""
        return WalStream(Settings.of(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Rows become timers; see writer.py for its options."""
        from purgatoryd.pipeline.writer import writer_of

        return writer_of(self.options, schema)


# ---- batch -----------------------------------------------------------------------------------


class WalReader(DataSourceReader):
    """Every record of the files, also of the one that is still written."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def partitions(self) -> Sequence[Range]:
        """One for each file; the names are learnt here, for all of them."""
        wanted = self._in_range(self._wanted())
        names = self._names(wanted)
        return [Range(one, names[one.identity.daemon]) for one in wanted]

    def _wanted(self) -> list[Source]:
        """Those that are asked for; no other is opened. Raises BadPath if a segment was removed
        since. A snapshot may be."""
        path, names = self.settings.path, self.settings.files
        all_ = segments(path)
        found = [
            source(file).before(_behind(after))
            for file, after in zip_longest(all_, all_[1:])
            if names is None or file.path.name in names
        ]
        if names is None:
            return found
        there = {one.path.name for one in found}
        if gone := sorted(n for n in names - there if n.endswith(SEGMENT)):
            raise BadPath(str(path / gone[0]), "was removed before it was read; read again")
        return [*found, *openings(path, names)]

    def _in_range(self, found: list[Source]) -> list[Source]:
        if self.settings.lake is None:
            return found
        lake = Lake(self.settings.lake)
        wanted = {(one.identity.table, one.identity.daemon) for one in found}
        manifests = (m for table, daemon in wanted for m in lake.manifests(table, daemon))
        missed = {one.identity for one in manifests if self.settings.misses(one)}
        return [one for one in found if one.identity not in missed]

    def _names(self, wanted: Sequence[Source]) -> dict[str, Names]:
        """Those that each daemon has."""
        daemons = {one.identity.daemon for one in wanted}
        if not (wanted and NAMED & {*self.settings.columns}):
            return dict.fromkeys(daemons, Names())
        if self.settings.lake is None:
            last_lsn = max(one.identity.first_lsn for one in wanted)
            return dict.fromkeys(daemons, names_of(self.settings.path, last_lsn + 1))
        lake = Lake(self.settings.lake)
        return {daemon: lake.names(daemon) for daemon in daemons}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one file, in Arrow batches."""
        if not isinstance(partition, Range):  # Spark asks even if there is none
            return iter(())
        return read_range(self.settings, partition)


def _behind(after: File | None) -> Source | None:
    """The segment that follows, as far as its header can be read: its damage is of no matter to who
    does not ask for it."""
    if after is not None:
        with suppress(BadPath, WalError):
            return source(after)
    return None


def read_range(settings: Settings, part: Range) -> Iterator[pa.RecordBatch]:
    """The rows of a part, as far as they are asked for. Raises WalDamaged if it ends early."""
    payloads = settings.payloads and "payload" in settings.columns
    decoder = Decoder(settings.node, part.names, payloads=payloads)
    plain = pa.schema([_plain(_SCHEMA.field(name)) for name in settings.columns])
    path, walk = part.source.path, Walk()
    walk.enter(path, cache.read(path))
    for batch in decoder.batches(walk):
        retained = batch.filter(_wanted(batch, settings, part))
        if retained.num_rows:
            yield retained.select(settings.columns).cast(plain)
    refuse_open_end(walk, part.source)
    if part.next_lsn and walk.lsn + 1 != part.next_lsn:
        detail, lost = "the next segment is missing", (walk.lsn + 1, part.next_lsn - 1)
        raise WalDamaged(str(path.parent), f"{path.name}: {detail}", 0, 0, *lost)


def _plain(field: pa.Field) -> pa.Field:
    """Return a dictionary field as a string field, because Spark accepts no dictionaries."""
    return field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field


def _wanted(batch: pa.RecordBatch, settings: Settings, part: Range) -> pa.Array:
    at, lsn = batch["at"].cast(pa.int64()), batch["lsn"]
    bounds = (
        pc.greater_equal(at, settings.from_us), pc.less(at, settings.to_us),
        pc.greater_equal(lsn, part.lsn_from), pc.less(lsn, min(part.lsn_to, (1 << 63) - 1)),
    )  # fmt: skip
    wanted = bounds[0]
    for bound in bounds[1:]:
        wanted = pc.and_(wanted, bound)
    return wanted


# ---- streaming -------------------------------------------------------------------------------


class WalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Sealed segments as they come, each read once for its names and once for its rows. An offset
    is the LSN of the next record, and a record takes one: so how many rows a batch has is known
    without reading them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._learnt = Learnt()
        self._last: int | None = None  # of a stream that ends with what there is

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """The oldest record."""
        return {"lsn": min((file.lsn for file in segments(self.settings.path)), default=1)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The option max_rows."""
        rows = self.settings.max_rows
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What is sealed later is left for the next run."""
        self._last = self._sealed_upto()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Where the next batch ends."""
        upto = self._sealed_upto() if self._last is None else self._last
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else upto
        return {"lsn": self._end_of_batch(start["lsn"], upto, most)}

    def _end_of_batch(self, first: int, upto: int, most: int) -> int:
        """Behind as many whole segments as have `most` rows, or behind the next one."""
        ends = [file.lsn for file in segments(self.settings.path) if first < file.lsn <= upto]
        return max((end for end in ends if end - first <= most), default=min(ends, default=first))

    def _sealed_upto(self) -> int:
        return max((file.lsn for file in segments(self.settings.path)), default=1)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[Range]:
        """The segments between two offsets. Raises WalDamaged if some of it is gone."""
        files = segments(self.settings.path)
        first, upto = start["lsn"], end["lsn"]
        oldest = min((file.lsn for file in files), default=upto)
        if first < upto and oldest > first:
            detail = (
                "records were removed before the stream read them; set the option retention_hold"
            )
            raise WalDamaged(str(self.settings.path), detail, 0, 0, first, oldest - 1)
        wanted = [
            (source(file), source(after))
            for file, after in pairwise(files)
            if after.lsn > first and file.lsn < upto
        ]
        self._learnt.take(naming(self.settings.path, upto))
        return [
            Range(
                one.before(after),
                self._learnt.names,
                first,
                upto,
                one.next_lsn(after),
            )
            for one, after in wanted
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one segment, in Arrow batches."""
        if not isinstance(partition, Range):  # Spark asks even if there is none
            return iter(())
        return read_range(self.settings, partition)

    def commit(self, end: dict[str, int]) -> None:
        """Moves the retention hold: what is before `end` is not needed any more."""
        if self.settings.retention_hold:
            set_hold(self.settings.path, RetentionHold(self.settings.retention_hold, end["lsn"]))

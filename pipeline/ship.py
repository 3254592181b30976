"""The journal's way into the lake: sealed segments and snapshots, each once, oldest first."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from purgatoryd.pipeline import cache
from purgatoryd.pipeline.decode import Decoder
from purgatoryd.pipeline.lake import (
    BRONZE,
    OPENINGS,
    POSITIONS,
    Identity,
    Lake,
    Manifest,
    parquet_writer,
    spans,
)
from purgatoryd.pipeline.names import Names
from purgatoryd.pipeline.pace import Pace
from purgatoryd.pipeline.schemas import BRONZE as BRONZE_TABLE
from purgatoryd.pipeline.sources import Source, openings, sealed
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.errors import BadPath, JournalDamaged
from purgatoryd.shm_layout.journal import Walk, segments
from purgatoryd.shm_layout.layout import WalkState
from purgatoryd.shm_layout.marks import Mark, read_marks, set_mark

# ---- one file --------------------------------------------------------------------------------


class Head(NamedTuple):
    """What a file of the journal is. `crc`: CRC-32C of it; `last_lsn`: of its last record."""

    crc: int
    clock: str
    last_lsn: int


class Content(NamedTuple):
    """What its rows are. `bounds`: least and greatest values of "at", in microseconds, and of
    POSITIONS; `end_lsn`: of a snapshot, the record that makes it valid."""

    rows: int
    kinds: dict[str, int]
    bounds: dict[str, list[int]]
    end_lsn: int | None


def head_of(walk: Walk, memory: Any) -> Head:
    """Of a file that was walked to its end."""
    virtual = walk.struct.header.clock_kind == lib.PG_CLOCK_VIRTUAL
    crc = int(lib.pg_crc32c(0, memory, len(memory)))
    return Head(crc, "virtual" if virtual else "boot", walk.lsn)


class _Tally:
    """Writes batches to a file, and keeps account of what they hold."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._rows = 0
        self._last: pa.RecordBatch | None = None
        self._bounds: dict[str, list[int]] = {name: [] for name in ("at", *POSITIONS)}

    def write(self, batch: pa.RecordBatch) -> None:
        """The next one."""
        self._writer.write_batch(batch)
        self._rows += batch.num_rows
        self._last = batch
        for name, seen in self._bounds.items():
            ends = pc.min_max(batch[name].cast(pa.int64()))
            if ends["min"].is_valid:
                seen += (ends["min"].as_py(), ends["max"].as_py())

    def content(self, kinds: dict[str, int]) -> Content:
        """Of all of them."""
        end_lsn = None if self._last is None else self._last["add_lsn"][-1].as_py()
        return Content(self._rows, dict(kinds), self._bounds, end_lsn)


def write_file(walk: Walk, decoder: Decoder, file: BinaryIO) -> Content:
    """The records of the file that a walk has entered, as Parquet. Raises JournalDamaged."""
    with parquet_writer(file, BRONZE_TABLE) as writer:
        tally = _Tally(writer)
        for batch in decoder.batches(walk):
            tally.write(batch)
    return tally.content(decoder.kinds)


def refuse_open_end(walk: Walk, one: Source) -> None:
    """Raises JournalDamaged if a walk over a whole segment did not come to its seal."""
    if one.identity.table == BRONZE and not one.complete and walk.state != WalkState.SEALED:
        what = "ends before the next segment begins"
        at = int(walk.struct.at)
        raise JournalDamaged(str(one.path), what, at, int(walk.struct.size), walk.lsn + 1, walk.lsn)


# ---- one journal -----------------------------------------------------------------------------


class Shipper:
    """Brings one journal into a lake; to be closed."""

    def __init__(self, directory: Path, lake: Lake, node: str, limit: int = 0) -> None:
        """`directory`: JOURNAL/NAME; `node`: what its host is called; `limit`: bytes a second."""
        self._directory = directory
        self._lake = lake
        self._node = node
        self._pace = Pace(limit).wait
        self._mark = mark_name(lake)
        self._decoders: dict[str, Decoder] = {}
        self._named: dict[str, int] = {}  # what of each daemon's names is in the lake
        self._done: set[Identity] = set()
        self._locks = ExitStack()

    def close(self) -> None:
        """Others may ship now."""
        self._locks.close()

    def turn(self) -> Iterator[Manifest]:
        """Ships what is complete and not there yet; yields each manifest once it counts.

        Names come first: a snapshot has those whose births are gone. Raises JournalDamaged,
        JournalMismatch for a file that cannot be read: nothing of it is in the lake then.
        """
        if self._mark not in read_marks(self._directory):
            self._hold()
        found = self._new(self._sources())
        for one in found:
            if one.identity.table == OPENINGS:
                self._learn(one)
        for one, manifest in self._each(sorted(found, key=lambda one: one.identity.first_lsn)):
            if manifest is not None:
                self._done.add(one.identity)
                self._hold()
                yield manifest
        self._hold()

    def _each(self, found: list[Source]) -> Iterator[tuple[Source, Manifest | None]]:
        """Each with its manifest; None: it was a snapshot, and is gone."""
        for one in found:
            yield one, self._ship(one, self._decoder(one.identity.daemon))

    def _new(self, found: list[Source]) -> list[Source]:
        for one in found:
            self._decoder(one.identity.daemon)
        return [one for one in found if one.identity not in self._done]

    def _sources(self) -> list[Source]:
        return [*openings(self._directory), *sealed(self._directory)]

    def _decoder(self, daemon: str) -> Decoder:
        if daemon not in self._decoders:
            self._locks.enter_context(self._lake.writing(daemon))
            names = self._lake.names(daemon)
            self._named[daemon] = names.learnt
            self._decoders[daemon] = Decoder(self._node, names)
            for table in (BRONZE, OPENINGS):
                self._done |= {m.identity for m in self._lake.manifests(table, daemon)}
        return self._decoders[daemon]

    def _hold(self) -> None:
        """Moves the mark to the first segment that is not in the lake."""
        done = {one.first_lsn for one in self._done if one.table == BRONZE}
        waiting = [file.lsn for file in segments(self._directory) if file.lsn not in done]
        held = read_marks(self._directory).get(self._mark)
        if waiting and (held is None or held.dropped or held.lsn != waiting[0]):
            set_mark(self._directory, Mark(self._mark, waiting[0]))

    def _read(self, one: Source) -> Any:
        """None: it was a snapshot, and is gone."""
        try:
            return cache.read(one.path, self._pace)
        except BadPath:
            if one.identity.table == OPENINGS:
                return None
            raise

    def _learn(self, one: Source) -> None:
        memory, walk = self._read(one), Walk()
        if memory is not None:
            walk.enter(one.path, memory)
            self._decoder(one.identity.daemon).learn(walk)

    def _ship(self, one: Source, decoder: Decoder) -> Manifest | None:
        """None: it was a snapshot, and is gone."""
        memory, walk = self._read(one), Walk()
        if memory is None:
            return None
        walk.enter(one.path, memory)

        def write(file: BinaryIO) -> Manifest:
            content = write_file(walk, decoder, file)
            refuse_open_end(walk, one)
            self._save_names(one.identity.daemon, decoder.names)
            return self._manifest(one.identity, head_of(walk, memory), content)

        return self._lake.commit(one.identity.table, one.identity.daemon, write)

    def _save_names(self, daemon: str, names: Names) -> None:
        if names.learnt != self._named[daemon]:
            self._lake.save_names(daemon, names)
            self._named[daemon] = names.learnt

    def _manifest(self, identity: Identity, head: Head, content: Content) -> Manifest:
        last_lsn = content.end_lsn if identity.table == OPENINGS else None
        notices, handed = spans(content.bounds)
        return Manifest(
            *identity[:2],
            node=self._node,
            epoch=identity.epoch,
            first_lsn=identity.first_lsn,
            last_lsn=head.last_lsn if last_lsn is None else last_lsn,
            crc=head.crc,
            clock=head.clock,
            rows=content.rows,
            wall_from_us=min(content.bounds["at"], default=0),
            wall_to_us=max(content.bounds["at"], default=0),
            schema=BRONZE_TABLE.version,
            kinds=content.kinds,
            notices=notices,
            handed=handed,
        )


def mark_name(lake: Lake) -> str:
    """The mark by which a journal is held for this lake."""
    return f"ship-{zlib.crc32(str(lake.root.resolve()).encode()):08x}"

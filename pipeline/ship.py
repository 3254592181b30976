"""The WAL's way into the lake: sealed segments and snapshots, each once, oldest first.

Files go through it in four steps, each in a thread of its own, so that they overlap: they are read,
decoded, a batch at a time, become Parquet in memory, and that is brought to disk.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from purgatoryd.pipeline import cache
from purgatoryd.pipeline.decode import Decoder
from purgatoryd.pipeline.lake import (
    BOUNDED,
    BRONZE,
    OPENINGS,
    Identity,
    Lake,
    Manifest,
    parquet_writer,
    spans,
)
from purgatoryd.pipeline.pace import Pace
from purgatoryd.pipeline.schemas import BRONZE as BRONZE_TABLE
from purgatoryd.pipeline.sources import Source, openings, present, refuse_open_end, sealed
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.errors import BadPath, PurgatorydError
from purgatoryd.shm_layout.predecessors import read_predecessors
from purgatoryd.shm_layout.retention_holds import RetentionHold, read_holds, set_hold
from purgatoryd.shm_layout.wal import Walk, segments

T = TypeVar("T")

# ---- threads ---------------------------------------------------------------------------------


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """The items, in order; each is made in another thread while the one before it is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


# ---- one file --------------------------------------------------------------------------------


class Head(NamedTuple):
    """Figures of a WAL file. `crc`: CRC-32C of the file; `last_lsn`: LSN of its last record;
    `began_empty`: it begins with record 1, and the arena was empty before it."""

    crc: int
    clock: str
    last_lsn: int
    began_empty: bool


class Content(NamedTuple):
    """What its rows are. `bounds`: least and greatest values of "at", in microseconds, and of
    BOUNDED; `end_lsn`: of a snapshot, the record that makes it valid."""

    rows: int
    kinds: dict[str, int]
    bounds: dict[str, list[int]]
    end_lsn: int | None


def head_of(walk: Walk, memory: Any) -> Head:
    """Of a file that was walked to its end."""
    virtual = walk.struct.header.clock_kind == lib.PG_CLOCK_VIRTUAL
    crc = int(lib.pg_crc32c(0, memory, len(memory)))
    began_empty = bool(walk.struct.header.flags & lib.PG_WAL_BEGAN_EMPTY)
    return Head(crc, "virtual" if virtual else "boot", walk.lsn, began_empty)


class _Tally:
    """Makes a file of batches, and keeps account of what they hold."""

    def __init__(self) -> None:
        self._file = pa.BufferOutputStream()
        self._writer = parquet_writer(self._file, BRONZE_TABLE)
        self._rows = 0
        self._last: pa.RecordBatch | None = None
        self._bounds: dict[str, list[int]] = {name: [] for name in ("at", *BOUNDED)}

    def write(self, batch: pa.RecordBatch) -> None:
        """The next one."""
        self._writer.write_batch(batch)
        self._rows += batch.num_rows
        self._last = batch
        for name, seen in self._bounds.items():
            ends = pc.min_max(batch[name].cast(pa.int64()))
            if ends["min"].is_valid:
                seen += (ends["min"].as_py(), ends["max"].as_py())

    def end(self) -> pa.Buffer:
        """The file's bytes."""
        self._writer.close()
        return self._file.getvalue()

    def content(self, kinds: dict[str, int]) -> Content:
        """Of all of them."""
        end_lsn = None if self._last is None else self._last["add_lsn"][-1].as_py()
        return Content(self._rows, dict(kinds), self._bounds, end_lsn)


class _Decoded(NamedTuple):
    """Stands behind the batches of a file."""

    source: Source
    head: Head
    kinds: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Made:
    """A file of the lake that is not on disk yet."""

    source: Source
    content: pa.Buffer
    manifest: Manifest

    def fill(self, file: BinaryIO) -> Manifest:
        """As Lake.commit wants it."""
        file.write(self.content)
        return self.manifest


# ---- one WAL -----------------------------------------------------------------------------


class Shipper:
    """Brings one WAL into a lake; to be closed."""

    def __init__(self, directory: Path, lake: Lake, node: str, pace: Pace | None = None) -> None:
        """`directory`: WAL_DIR/NAME; `node`: what its host is called; `pace`: of the bytes that are
        read."""
        self._directory = directory
        self._lake = lake
        self._node = node
        self._pace = (pace or Pace(0)).wait
        self._hold_name = hold_name(lake)
        self._decoder = Decoder(node)
        self._named: dict[str, int] = {}  # how many names were learnt when each daemon's were saved
        self._done: set[Identity] = set()
        self._reached: dict[str, int] = {}  # last record of each daemon
        self._predecessors = read_predecessors(directory)
        self._locks = ExitStack()

    def close(self) -> None:
        """Others may ship now."""
        self._locks.close()

    def poll(self) -> Iterator[Manifest]:
        """Ships what is complete and not there yet; yields each manifest once it counts.

        Names come first: a snapshot has those whose births are gone. Raises WalDamaged,
        WalMismatch for a file that cannot be read: nothing of it is in the lake then.
        """
        if self._hold_name not in read_holds(self._directory):
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
        """Each with its manifest, once it counts; a file that is gone has none."""
        for made in prefetch(self._made(found)):
            identity = made.source.identity
            yield made.source, self._lake.commit(identity.table, identity.daemon, made.fill)

    def _new(self, found: list[Source]) -> list[Source]:
        here = {one.identity.daemon for one in found}
        self._done = {one for one in self._done if one.daemon in here}  # numbers start over
        for one in sorted(found, key=lambda one: one.identity.first_lsn):
            if one.identity.daemon not in self._reached:
                self._take_on(one.identity)
        return [one for one in found if one.identity not in self._done]

    def _sources(self) -> list[Source]:
        return [*openings(self._directory), *sealed(self._directory)]

    def _take_on(self, first: Identity) -> None:
        daemon = first.daemon
        with ExitStack() as stack:
            stack.enter_context(self._lake.writing(daemon))
            if first.first_lsn == 1:  # whoever was here before was removed
                self._decoder = Decoder(self._node)
            self._decoder.know(self._lake.names(daemon))
            for table in (BRONZE, OPENINGS):
                self._done |= {m.identity for m in self._lake.manifests(table, daemon)}
            ends = (manifest.last_lsn for manifest in self._before(daemon))
            self._reached[daemon] = max(ends, default=0)
            self._locks.enter_context(stack.pop_all())

    def _before(self, daemon: str) -> list[Manifest]:
        """Segments that are in the lake."""
        return self._lake.manifests(BRONZE, daemon)

    def _hold(self) -> None:
        """Moves the retention hold to the first segment that is not in the lake."""
        done = {one.first_lsn for one in self._done if one.table == BRONZE}
        waiting = [file.lsn for file in segments(self._directory) if file.lsn not in done]
        held = read_holds(self._directory).get(self._hold_name)
        if waiting and (held is None or held.dropped or held.lsn != waiting[0]):
            set_hold(self._directory, RetentionHold(self._hold_name, waiting[0]))

    def _read(self, one: Source) -> Any:
        """None: it is gone; of a segment the next one's manifest tells that."""
        with suppress(BadPath):
            return cache.read(one.path, self._pace)
        return None

    def _learn(self, one: Source) -> None:
        memory, walk = self._read(one), Walk()
        if memory is not None:
            walk.enter(one.path, memory)
            self._decoder.learn(walk)

    def _made(self, found: Sequence[Source]) -> Iterator[_Made]:
        """The files, as Parquet."""
        tally = _Tally()
        for part in prefetch(self._parts(found)):
            if isinstance(part, _Decoded):
                manifest = self._manifest(
                    part.source.identity, part.head, tally.content(part.kinds)
                )
                yield _Made(part.source, tally.end(), manifest)
                tally = _Tally()
            else:
                tally.write(part)

    def _parts(self, found: Sequence[Source]) -> Iterator[pa.RecordBatch | _Decoded]:
        """The files, decoded."""
        for one, memory in prefetch(self._in_memory(found)):
            walk = Walk()
            walk.enter(one.path, memory)
            yield from self._decoder.batches(walk)
            refuse_open_end(walk, one)
            self._save_names(one.identity.daemon)
            yield _Decoded(one, head_of(walk, memory), self._decoder.kinds)

    def _in_memory(self, found: Sequence[Source]) -> Iterator[tuple[Source, Any]]:
        """The files that are not gone."""
        for one in found:
            if (memory := self._read(one)) is not None:
                yield one, memory

    def _save_names(self, daemon: str) -> None:
        names = self._decoder.names
        if self._named.get(daemon) != names.learnt:
            self._lake.save_names(daemon, names)
            self._named[daemon] = names.learnt

    def _manifest(self, identity: Identity, head: Head, content: Content) -> Manifest:
        last_lsn = content.end_lsn if identity.table == OPENINGS else None
        notices, handed = spans(content.bounds)
        gone_from = 0
        if identity.table == BRONZE:
            gone_from = self._gone_from(identity)
            self._reached[identity.daemon] = max(self._reached[identity.daemon], head.last_lsn)
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
            kinds=content.kinds,
            notices=notices,
            handed=handed,
            ended_upto_ns=max(content.bounds["ended_boot_ns"], default=0),
            built_from_ns=min(content.bounds["built_ns"], default=0),
            gone_from=gone_from,
            predecessors=self._predecessors.upto,
            shards=self._predecessors.shards,
            wal=self._directory.name,
            began_empty=head.began_empty,
        )

    def _gone_from(self, identity: Identity) -> int:
        """The first record before a segment that is in neither lake nor WAL; 0 = there is none.

        Retention takes the oldest files: a hole behind one that is still there is none of its.
        """
        first = self._reached[identity.daemon] + 1
        if first >= identity.first_lsn:
            return 0
        files = segments(self._directory)
        older = present(file for file in files if file.lsn < identity.first_lsn)
        return 0 if any(one.identity.daemon == identity.daemon for one in older) else first


def hold_name(lake: Lake) -> str:
    """Name of the retention hold for this lake."""
    return f"ship-{zlib.crc32(str(lake.root.resolve()).encode()):08x}"


# ---- several WALs ------------------------------------------------------------------------


class Convoy:
    """Brings several WALs into a lake, one after the other; to be closed."""

    def __init__(
        self, find: Callable[[], Iterable[Path]], lake: Lake, node: str, limit: int = 0
    ) -> None:
        """`find`: their folders by now, WAL_DIR/NAME; `limit`: bytes a second, of all together."""
        self._find = find
        self._lake = lake
        self._node = node
        self._pace = Pace(limit)
        self._shippers: dict[Path, Shipper] = {}

    def close(self) -> None:
        """Others may ship now."""
        for shipper in self._shippers.values():
            shipper.close()

    def poll(self) -> Iterator[Manifest]:
        """As Shipper.poll(), of each; what one cannot do is raised once the others had their turn.
        Raises what `find` does, too."""
        failed: list[PurgatorydError] = []
        for directory in self._find():
            try:
                yield from self._shipper(directory).poll()
            except PurgatorydError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _shipper(self, directory: Path) -> Shipper:
        if directory not in self._shippers:
            made = Shipper(directory, self._lake, self._node, self._pace)
            self._shippers[directory] = made
        return self._shippers[directory]

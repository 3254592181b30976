"""Segments and snapshots as Arrow batches of BRONZE. The columns are made by wal_columns.c."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from purgatoryd.pipeline.cache import pages
from purgatoryd.pipeline.names import Names
from purgatoryd.pipeline.schemas import BRONZE, Column, arrow_type
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.wal import KINDS, UNKNOWN, Walk

BATCH_ROWS = 1 << 16
BATCH_BYTES = 1 << 24
"""Of keys, or of payloads, in a batch; memory is only taken as far as it is used."""
ALIGNED = 64
"""Bytes: where Arrow's arrays begin."""


def _columns_of(prefix: str, count: str) -> list[str]:
    """The names of an enum's columns, by number."""
    found = {
        value: name.removeprefix(prefix).lower()
        for name, value in vars(lib).items()
        if name.startswith(prefix)
    }
    return [found[n] for n in range(getattr(lib, count))]


def _kind(number: int) -> str:
    return KINDS.get(number, UNKNOWN) if number else UNKNOWN


_LONGS = _columns_of("PG_LC_", "PG_LONG_COLUMNS")
_INTS = _columns_of("PG_IC_", "PG_INT_COLUMNS")
_BYTES = _columns_of("PG_BC_", "PG_BYTES_COLUMNS")
_WORDS: dict[str, Sequence[str]] = {
    "kind": [_kind(n) for n in range(lib.PG_WAL_TYPES)],
    "clock": ("boot", "virtual"),
    "key_type": ("str", "bytes", "uuid"),
    "cause": (
        "",
        "expired",
        "satisfied",
        "failed",
        "cancelled",
        "published",
        "acknowledged",
        "dropped",
        "skipped",
        "coalesced",
    ),
    "condition": ("all", "any", "sum", "client", "quorum"),
    "job_state": ("ended", "waiting", "leased", "delayed", "dead"),
    "dead_reason": ("", "max_attempts", "rejected", "too_old"),
}
_SCHEMA = BRONZE.arrow()


@dataclass(frozen=True, slots=True)
class Origin:
    """What all rows of a file share. `segment`: its first LSN."""

    daemon: str
    node: str
    epoch: int
    segment: int

    @classmethod
    def of(cls, walk: Walk, node: str) -> Origin:
        """Of the file that the walk has entered."""
        header = walk.struct.header
        return cls(walk.uuid.hex(), node, int(header.epoch), int(header.first_lsn))


class Decoder:
    """Reads the files of one WAL, in any order; learns names on the way.

    `kinds`: how many records of each kind the file had that was read last.
    """

    def __init__(self, node: str, names: Names | None = None, *, payloads: bool = True) -> None:
        """`names`: what is known already."""
        self.names = Names()
        self.kinds: dict[str, int] = {}
        self._node = node
        self._payloads = payloads
        self._spare: list[mmap.mmap] = []
        self._births = ffi.new("struct pg_births *")
        ffi.buffer(self._births)[:] = b"\xff" * ffi.sizeof("struct pg_births")
        if names is not None:
            self.know(names)

    def know(self, names: Names) -> None:
        """Takes names that were learnt elsewhere of the same WAL."""
        self.names.add(names)
        for row in names.namespaces:
            self._births.namespaces[row] = row
        for row, (namespace, _) in names.topics.items():
            self._births.topics[row] = namespace

    def batches(self, walk: Walk) -> Iterator[pa.RecordBatch]:
        """The records of the file that the walk has entered.

        Raises WalDamaged at the end if the file is.
        """
        origin, more = Origin.of(walk, self._node), 1
        self.kinds = {}
        while more:
            columns = _Columns(walk, self._spare, self._payloads)
            more = lib.pg_columns_fill(columns.struct, self._births, walk.struct)
            self._learn(columns)
            self._count(columns.struct.kinds)
            if columns.rows:
                yield columns.batch(origin, self.names)
        walk.check()

    def learn(self, walk: Walk) -> None:
        """Takes the names from a file, and nothing else. Raises WalDamaged."""
        more = 1
        while more:
            columns = _Columns(walk, self._spare, payloads=False)
            more = lib.pg_columns_names(columns.struct, self._births, walk.struct)
            self._learn(columns)
        walk.check()

    def _learn(self, columns: _Columns) -> None:
        for born in columns.births():
            self.names.learnt += born["kind"] != lib.PG_WAL_CURSOR
            name = born["name"].decode(errors="replace")
            if born["kind"] == lib.PG_WAL_NAMESPACE:
                self.names.namespaces[born["row"]] = name
            elif born["kind"] == lib.PG_WAL_TOPIC:
                namespace = int(self._births.topics[born["row"]])
                self.names.topics[born["row"]] = (namespace, name)
            elif born["kind"] == lib.PG_WAL_OPENED:  # the field `row` has the pid
                self.names.opened(born["session"], name or f"{born['uid']}:{born['row']}")

    def _count(self, kinds: Any) -> None:
        for number, count in enumerate(kinds):
            if count:
                self.kinds[_kind(number)] = self.kinds.get(_kind(number), 0) + int(count)


# ---- one batch -------------------------------------------------------------------------------


class _Memory:
    """Of one batch. It comes from `spare`, and goes back there when the last array is gone that
    has a part of it: memory that was used before costs no page fault."""

    def __init__(self, spare: list[mmap.mmap], size: int) -> None:
        self._spare = spare
        self._pages = spare.pop() if spare else pages(size)
        self._next = int(ffi.cast("uintptr_t", ffi.from_buffer(self._pages)))

    def __del__(self) -> None:
        self._spare.append(self._pages)

    def take(self, size: int) -> pa.Buffer:
        """The next part, as an array's."""
        found = pa.foreign_buffer(self._next, size, base=self)
        self._next += _aligned(size)
        return found


class _Columns:
    """One batch; Arrow's arrays are made of its memory without a copy."""

    def __init__(self, walk: Walk, spare: list[mmap.mmap], payloads: bool) -> None:
        left = int(walk.struct.size - walk.struct.next)
        rows = min(BATCH_ROWS, left // ffi.sizeof("struct pg_frame_head") + 1)
        size = min(left, BATCH_BYTES) + int(lib.PG_WAL_FRAME_MAX)
        self.struct = ffi.new(
            "struct pg_columns *", {"capacity": rows, "bytes_max": size, "payloads": payloads}
        )
        names = (*_LONGS, *_INTS, *_BYTES, "watch")
        structs = (*self.struct.longs, *self.struct.ints, *self.struct.bytes, self.struct.watch)
        self._columns = dict(zip(names, structs, strict=True))
        memory = _Memory(spare, sum(map(_most, structs)))
        self._buffers = {
            name: _allocated(column, memory, rows, size) for name, column in self._columns.items()
        }

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self.struct.rows)

    def births(self) -> list[dict[str, Any]]:
        """What got a name here, with the columns that tell what it is."""
        if not self._columns["name"].count:
            return []
        kinds = {"name": pa.binary(), "kind": pa.int32(), "row": pa.int32(), "uid": pa.int32(),
                 "session": pa.int64()}  # fmt: skip
        rows = pa.RecordBatch.from_pydict(
            {name: self._array(name, kind) for name, kind in kinds.items()}
        )
        found: list[dict[str, Any]] = rows.filter(rows["name"].is_valid()).to_pylist()
        return found

    def batch(self, origin: Origin, names: Names) -> pa.RecordBatch:
        """All rows, with the names that are known."""
        words = _WORDS | {
            "namespace": _by_row(names.namespaces),
            "topic": _by_row({row: name for row, (_, name) in names.topics.items()}),
        }
        made = {
            **{name: self._same(getattr(origin, name)) for name in ("daemon", "node")},
            **{name: self._same(getattr(origin, name)) for name in ("epoch", "segment")},
            "worker": self._workers("session", names.workers),
            "replaced_worker": self._workers("replaced_session", names.workers),
        }
        arrays = [
            made[column.name] if column.name in made else self._made(column, words)
            for column in BRONZE.columns
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)

    # ---- arrays ----

    def _made(self, column: Column, words: dict[str, Sequence[str]]) -> pa.Array:
        if column.type == "word":
            found = self._array(column.name, pa.int32())
            return pa.DictionaryArray.from_arrays(found, pa.array(words[column.name], pa.string()))
        if column.name == "watch":
            return self._watch(column)
        return self._array(column.name, arrow_type(column.type))

    def _array(self, name: str, kind: pa.DataType) -> pa.Array:
        column, buffers = self._columns[name], self._buffers[name]
        nulls = self.rows - column.count
        if column.count == 0:
            return _nulls(kind, BATCH_ROWS).slice(0, self.rows)
        parts = [buffers[part] for part in ("offsets", "values", "bytes") if part in buffers]
        valid = buffers["valid"] if nulls else None
        return pa.Array.from_buffers(kind, self.rows, [valid, *parts], nulls)

    def _same(self, value: str | int) -> pa.Array:
        if isinstance(value, int):
            return pa.repeat(pa.scalar(value, pa.int64()), self.rows)
        zeros = pa.repeat(pa.scalar(0, pa.int32()), self.rows)
        return pa.DictionaryArray.from_arrays(zeros, pa.array([value]))

    def _workers(self, column: str, workers: dict[int, str]) -> pa.Array:
        found = self._array(column, pa.int64())
        sessions = pa.array(workers, pa.int64())
        indices = pc.index_in(found, sessions, skip_nulls=True)
        return pa.DictionaryArray.from_arrays(indices, pa.array(workers.values(), pa.string()))

    def _watch(self, column: Column) -> pa.Array:
        lists, buffers = self._columns["watch"], self._buffers["watch"]
        kind = arrow_type(column.type)
        if lists.count == 0:
            return _nulls(kind, BATCH_ROWS).slice(0, self.rows)
        fields = [
            pa.Array.from_buffers(field.type, lists.used, [None, buffers[field.name]], 0)
            for field in kind.value_type
        ]
        keys = pa.StructArray.from_arrays(fields, fields=list(kind.value_type))
        nulls = self.rows - lists.count
        parts = [buffers["valid"] if nulls else None, buffers["offsets"]]
        return pa.Array.from_buffers(kind, self.rows, parts, nulls, children=[keys])


def _parts(column: Any, rows: int, size: int) -> Iterator[tuple[str, Any, int]]:
    """What a column points to: its name, its type, its bytes."""
    keys = size // ffi.sizeof("struct pg_wal_watch_key")
    counts = {"valid": rows // 8 + 1, "offsets": rows + 1, "values": rows, "bytes": size}
    for name, field in ffi.typeof(column).fields:
        if field.type.kind == "pointer":
            yield name, field.type, ffi.sizeof(field.type.item) * counts.get(name, keys)


def _most(column: Any) -> int:
    """Bytes of a column of the largest batch."""
    parts = _parts(column, BATCH_ROWS, BATCH_BYTES + int(lib.PG_WAL_FRAME_MAX))
    return sum(_aligned(size) for _, _, size in parts)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _allocated(column: Any, memory: _Memory, rows: int, size: int) -> dict[str, pa.Buffer]:
    """Memory for all that a column points to; what C expects to be zero is."""
    made = {}
    for name, kind, bytes_ in _parts(column, rows, size):
        made[name] = memory.take(bytes_)
        setattr(column, name, ffi.cast(kind, made[name].address))
    ffi.buffer(column.valid, rows // 8 + 1)[:] = bytes(rows // 8 + 1)
    if "offsets" in made:
        column.offsets[0] = 0
    return made


@cache
def _nulls(kind: pa.DataType, rows: int) -> pa.Array:
    """A column of `rows` rows without a value."""
    return pa.nulls(rows, kind)


def _by_row(names: dict[int, str]) -> list[str]:
    """Names by their rows; rows that nobody named are never asked for."""
    return [names.get(row, "") for row in range(max(names, default=-1) + 1)]

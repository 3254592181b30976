"""Watches and advances of whole columns. This module needs numpy.

Each row watches one key and waits for one target. Other conditions need rows of Watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from purgatoryd.clients.batch import Batch
from purgatoryd.clients.columns import check_lengths, columns_of, plain, time_column, topic_column
from purgatoryd.clients.conditions import check_target, check_watermark
from purgatoryd.clients.packing import Names
from purgatoryd.clients.ragged import (
    Ragged,
    cuts,
    empty_column,
    key_column,
    offsets_of,
    payload_column,
)
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import InvalidRows
from purgatoryd.shm_layout.layout import (
    OWN_KEY,
    TARGET_MAX,
    WATERMARK_MAX,
    ClockKind,
    Condition,
    Op,
    struct_dtype,
)
from purgatoryd.shm_layout.wire import Key

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

_RECORD = struct_dtype("pg_record")
_WATCH_KEY = struct_dtype("pg_watch_key")
_WATCH_NEEDS = frozenset(("key", "watch_key", "timeout"))
_WATCH_COLUMNS = _WATCH_NEEDS | {"target", "own", "payload", "topic"}
_ADVANCE_COLUMNS = frozenset(("key", "watermark"))

Expect = Callable[[Callable[..., Batch], int], Batch]
"""A function that builds a batch of a number of rows and expects its results, such as
BulkResult.expect."""


class Strings(NamedTuple):
    """A column of keys: their bytes, and the KeyType of each."""

    data: Ragged
    types: Array

    def key(self, row: int) -> Key:
        """Return the key of one row."""
        start, stop = self.data.offsets[row : row + 2]
        return wire.decode_key(int(self.types[row]), self.data.data[start:stop].tobytes())

    def take(self, rows: Array) -> Strings:
        """Return the keys of these rows."""
        return Strings(taken(self.data, rows), self.types[rows])


class WatchColumns(NamedTuple):
    """The checked columns of watch_many."""

    keys: Strings
    watched: Strings
    targets: Array
    own: Array
    payloads: Ragged
    time_kind: int
    times_ns: Array
    codes: Array
    topics: Sequence[str | None]
    """The topic of row i is topics[codes[i]]; None = it publishes no notice."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.targets)

    def take(self, rows: Array) -> WatchColumns:
        """Return these rows."""
        return WatchColumns(
            self.keys.take(rows), self.watched.take(rows), self.targets[rows], self.own[rows],
            taken(self.payloads, rows), self.time_kind, self.times_ns[rows], self.codes[rows],
            self.topics,
        )  # fmt: skip


class Advances(NamedTuple):
    """The checked columns of advance_many."""

    keys: Strings
    watermarks: Array

    def take(self, rows: Array) -> Advances:
        """Return these rows."""
        return Advances(self.keys.take(rows), self.watermarks[rows])


class Records(NamedTuple):
    """Rows as struct pg_record, followed by the parts of their byte areas."""

    records: Array
    parts: tuple[Ragged, ...]
    codes: Array
    names: list[bytes]
    """Entries of the name table; the entry of row i is names[codes[i]]."""

    def batches(self, expect: Expect) -> Iterator[Batch]:
        """Yield the batches of all rows, in order."""
        sizes = np.full(len(self.records), _RECORD.itemsize, "i8")
        for part in self.parts:
            sizes += part.lengths
        for rows, used, codes in cuts(sizes, self.codes):
            names = [self.names[code] for code in used]
            yield expect(partial(self._batch, rows, names, codes), rows.stop - rows.start)

    def _batch(
        self, rows: slice, names: list[bytes], codes: Array, settle: Callable[..., None]
    ) -> Batch:
        body = self.body(rows, names, codes)
        return Batch(len(codes), len(names), table_bytes(names), body, settle)

    def body(self, rows: slice, names: list[bytes], codes: Array) -> bytes:
        """Return name table, records and byte area of these rows."""
        records = self.records[rows]
        records["name"] = codes
        table = b"".join(names).ljust(table_bytes(names), b"\0")
        area = interleaved([part.cut(rows) for part in self.parts])
        return b"".join((table, records.tobytes(), area))


def table_bytes(names: list[bytes]) -> int:
    """Return the length of a name table, which is padded to 8 bytes."""
    return -(-sum(map(len, names)) // 8) * 8


# ---- checking columns ----------------------------------------------------------------------


def watch_columns(names: Names, table: Any, clock: int, now_ns: int) -> WatchColumns:
    """Check the columns of watch_many. `clock`: the ClockKind of timeouts, which count from
    `now_ns` unless it is VIRTUAL. Raises InvalidArgument."""
    columns = _named(table, _WATCH_NEEDS, _WATCH_COLUMNS)
    rows = len(columns["key"])
    codes, topics = _topics(names, columns.get("topic"), rows)
    virtual = clock == ClockKind.VIRTUAL
    kind, times_ns = time_column("delay", columns["timeout"], None if virtual else now_ns)
    return WatchColumns(
        Strings(*key_column(columns["key"])),
        Strings(*key_column(columns["watch_key"])),
        _wholes(columns.get("target", np.ones(rows, "u8")), TARGET_MAX, check_target),
        _flags(columns.get("own", np.zeros(rows, bool))),
        payload_column(columns["payload"]) if "payload" in columns else empty_column(rows),
        kind, times_ns, codes, topics,
    )  # fmt: skip


def advance_columns(table: Any) -> Advances:
    """Check the columns of advance_many. Raises InvalidArgument."""
    columns = _named(table, _ADVANCE_COLUMNS, _ADVANCE_COLUMNS)
    keys = Strings(*key_column(columns["key"]))
    return Advances(keys, _wholes(columns["watermark"], WATERMARK_MAX, check_watermark))


def _named(table: Any, needed: frozenset[str], known: frozenset[str]) -> dict[str, Any]:
    columns = table if isinstance(table, Mapping) else columns_of(table)
    if not needed <= columns.keys() <= known:
        optional = ", ".join(sorted(known - needed))
        raise InvalidRows(
            f"has the columns {sorted(map(str, columns))}; expected {', '.join(sorted(needed))}"
            + (f", and perhaps {optional}" if optional else ""),
            -1,
        )
    columns = {name: plain(column) for name, column in columns.items()}
    check_lengths(columns)
    return columns


def _wholes(column: Any, most: int, check: Callable[[object], int]) -> Array:
    """Return a column of ints from 0 to `most`. `check` raises the error of a value that is no such
    int."""
    if getattr(column, "null_count", 0):
        raise InvalidRows("a column of numbers holds nulls", -1)
    values = column.to_numpy() if hasattr(column, "to_numpy") else column
    if not hasattr(values, "dtype") or values.dtype.kind not in "iu":
        values = values.tolist() if hasattr(values, "tolist") else values
        return np.array([check(value) for value in values], "u8")
    good = (values >= 0) & (values <= most)
    if not good.all():
        check(values[np.argmin(good)].item())
    wholes: Array = values.astype("u8")
    return wholes


def _flags(column: Any) -> Array:
    values = np.asarray(column.to_pylist() if hasattr(column, "to_pylist") else column)
    if values.dtype.kind != "b" and len(values):
        raise InvalidRows(f"the column own has type {values.dtype}; expected bool", -1)
    return values.astype(bool)


def _topics(names: Names, column: Any, rows: int) -> tuple[Array, Sequence[str | None]]:
    if column is None:
        return np.zeros(rows, "i8"), [None]
    codes, topics = topic_column(column)
    for topic in topics:
        _entry(names, topic)
    return codes, topics


def _entry(names: Names, topic: str | None) -> bytes:
    return names.of_key if topic is None else names.of_topic(topic)


# ---- packing ---------------------------------------------------------------------------------


def watch_records(names: Names, columns: WatchColumns) -> Records:
    """Return the WATCH records of all rows."""
    heads = np.zeros(columns.rows, _WATCH_KEY)
    heads["target"], heads["key_type"] = columns.targets, columns.watched.types
    heads["key_len"], heads["flags"] = columns.watched.data.lengths, columns.own * OWN_KEY
    notices = np.array([topic is not None for topic in columns.topics], bool)
    records = _records(Op.WATCH, columns.keys)
    records["mode"] = Condition.ALL
    records["time_kind"], records["time_ns"] = columns.time_kind, columns.times_ns
    records["flags"] = notices[columns.codes] if columns.rows else 0
    records["payload_len"] = columns.payloads.lengths
    records["ext_len"] = _WATCH_KEY.itemsize + columns.watched.data.lengths
    parts = (columns.keys.data, columns.payloads, _fixed(heads), columns.watched.data)
    return Records(records, parts, columns.codes, [_entry(names, t) for t in columns.topics])


def advance_records(names: Names, columns: Advances) -> Records:
    """Return the ADVANCE_KEY records of all rows."""
    records = _records(Op.ADVANCE_KEY, columns.keys)
    records["value"] = columns.watermarks
    return Records(records, (columns.keys.data,), np.zeros(len(records), "i8"), [names.of_key])


def _records(op: int, keys: Strings) -> Array:
    records = np.zeros(len(keys.types), _RECORD)
    records["op"], records["key_type"], records["key_len"] = op, keys.types, keys.data.lengths
    return records


def _fixed(rows: Array) -> Ragged:
    offsets = np.arange(len(rows) + 1, dtype="i8") * rows.itemsize
    return Ragged(rows.view("u1"), offsets)


def interleaved(parts: Sequence[Ragged]) -> bytes:
    """Return part 0, part 1, ... of row 0, then of row 1, and so on."""
    filled = [part for part in parts if len(part.data)]
    if len(filled) == 1:
        return filled[0].data.tobytes()
    lengths = np.column_stack([part.lengths for part in filled])
    starts = offsets_of(lengths.ravel())[:-1].reshape(lengths.shape)
    area = np.empty(int(lengths.sum()), "u1")
    for number, part in enumerate(filled):
        moves = starts[:, number] - part.offsets[:-1]
        area[np.repeat(moves, part.lengths) + np.arange(len(part.data))] = part.data
    return area.tobytes()


def taken(column: Ragged, rows: Array) -> Ragged:
    """Return the strings of these rows."""
    lengths = column.lengths[rows]
    offsets = offsets_of(lengths)
    moves = np.repeat(column.offsets[:-1][rows] - offsets[:-1], lengths)
    return Ragged(column.data[moves + np.arange(offsets[-1])], offsets)

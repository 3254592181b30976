"""Bulk calls on columns: numpy arrays, Arrow tables, dicts of lists. This module needs numpy.

pack/module.c reads the buffers of a column, or the objects of a list. No Python code runs for each
row, except for objects that the C code does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from purgatoryd.clients import times
from purgatoryd.clients.arguments import check_no_text
from purgatoryd.clients.bulk import FIELDS, OWN, same_items
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.items import Common, check_priority
from purgatoryd.clients.packing import Converted, Names, Source
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import InvalidPayload, InvalidRows, InvalidTime
from purgatoryd.shm_layout.layout import SLACK_MAX_NS, TIME_MAX_NS, ClockKind, KeyType, Op

if TYPE_CHECKING:
    from purgatoryd.clients._pack import Column

    Array = np.ndarray[Any, np.dtype[Any]]

_TIMES = ("delay", "delay_ns", "deadline", "deadline_boot_ns")
_STR, _BYTES = int(KeyType.STR), int(KeyType.BYTES)


def put_sources(
    connection: Connection, table: Any, entry: bytes, mode: int, common: Common
) -> list[Source]:
    """Return the sources for add_many: one for each record batch of an Arrow table, else a single
    one. `entry`: entry of the name table for a table without topics. `common`: for rows that have
    no values of their own."""
    now_ns = connection.host.boot_ns()
    return [_put_source(connection, part, entry, mode, common, now_ns) for part in _parts(table)]


def cancel_sources(names: Names, keys: Any, delivered: bool) -> list[Source]:
    """Return the sources for cancel_many: one for each chunk of an Arrow array, else a single
    one."""
    chunks = keys.chunks if hasattr(keys, "chunks") else [keys]
    return [_cancel_source(names, delivered, plain(chunk)) for chunk in chunks]


def _parts(table: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the table as dicts of columns. An Arrow table gives one dict for each record batch,
    other tables give a single dict."""
    if isinstance(table, Mapping):
        yield table
    elif hasattr(table, "to_batches"):
        yield from (columns_of(batch) for batch in table.to_batches())
    elif hasattr(table, "schema") and hasattr(table, "column"):
        yield columns_of(table)
    else:
        raise InvalidRows(
            f"rows must be a dict of columns, an Arrow table or a record batch, not "
            f"{type(table).__name__}",
            -1,
        )


def columns_of(batch: Any) -> dict[str, Any]:
    """Return an Arrow table or record batch as a dict of columns."""
    return {name: batch.column(i) for i, name in enumerate(batch.schema.names)}


def plain(column: Any) -> Any:
    """Return a numpy column as a plain array, and a chunked Arrow column as one array. Return other
    columns unchanged."""
    check_no_text("a column", column)
    if hasattr(column, "dtype"):
        if np.ndim(column) != 1:
            raise InvalidRows(f"a column must have one dimension, not {np.ndim(column)}", -1)
        return np.asarray(column)
    return column.combine_chunks() if hasattr(column, "combine_chunks") else column


def _put_source(
    connection: Connection, columns: Mapping[str, Any], entry: bytes, mode: int, common: Common,
    now_ns: int,
) -> Source:  # fmt: skip
    columns = {name: plain(column) for name, column in columns.items()}
    given = [name for name in _TIMES if name in columns]
    if "key" not in columns or len(given) != 1 or not columns.keys() <= FIELDS:
        raise InvalidRows(
            f"has the columns {sorted(map(str, columns))}; expected key, one time, topic, payload, "
            "within, tag, priority, order_key, late, unique_for",
            -1,
        )
    check_lengths(columns)
    due = Times(given[0], columns[given[0]], connection.delay_clock, now_ns)
    topics = Topics(connection.names, columns.get("topic"), entry)
    keys, payloads = text_buffers(columns["key"]), payload_buffers(columns.get("payload"))
    slack = common.slack
    slacks = slacks_of(columns["within"], slack) if "within" in columns else None
    extensions = Extensions(columns, common)

    def slow(row: int) -> Converted:
        key_type, key = wire.encode_key(item_of(columns["key"], row))
        payload = None if payloads is None else item_of(columns["payload"], row)
        payload = b"" if payload is None else wire.encode_payload(payload)
        flags = slack if slacks is None else int(slacks[row])
        return *due.of(row), key_type, key, topics.of(row), payload, flags, 0, extensions.of(row)

    return Source(
        len(columns["key"]), Op.PUT, mode, slack, due.virtual, now_ns, entry, topics.entries, slow,
        None, keys, due.column, topics.column, payloads,
        None if slacks is None else ("B", slacks, None, 0, 0), extensions.column, None,
    )  # fmt: skip


def check_lengths(columns: Mapping[str, Any]) -> None:
    """Raise InvalidRows unless all columns have the same length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise InvalidRows(f"columns differ in length: {lengths}", -1)


def slacks_of(column: Any, default: int) -> Array:
    """Return the slack of each row of a column of seconds or timedeltas; None = `default`."""
    kind = getattr(getattr(column, "dtype", None), "kind", "")
    if kind not in ("m", "f", "i", "u"):
        rows = column.tolist() if hasattr(column, "tolist") else column
        return np.array([default if row is None else times.slack(row) for row in rows], "u1")
    none = np.isnat(column) if kind == "m" else np.zeros(len(column), bool)
    given = column.astype("m8[us]").view("i8") / 1e6 if kind == "m" else column.astype("f8")
    seconds = np.where(none, 0, given)
    for bad in np.flatnonzero(~((seconds >= 0) & (seconds <= SLACK_MAX_NS / 1e9)))[:1]:
        times.within_ns(seconds[bad].item())
    # times.slack() for whole arrays: the exponent of a whole number is its bit length
    _, lengths = np.frexp(np.maximum(np.minimum(np.rint(seconds * 1e9), SLACK_MAX_NS), 1))
    return np.where(none, default, lengths).astype("u1")


def _cancel_source(names: Names, delivered: bool, column: Any) -> Source:
    flags = int(delivered)

    def slow(row: int) -> Converted:
        return 0, 0, *wire.encode_key(item_of(column, row)), names.of_key, b"", flags, 0, b""

    return Source(
        len(column), Op.CANCEL, 0, flags, False, 0, names.of_key, {}, slow, None,
        text_buffers(column), None, None, None, None, None, None,
    )  # fmt: skip


def item_of(column: Any, row: int) -> Any:
    """Return an item of a list, a numpy array or an Arrow array as a Python object."""
    item = column[row]
    return item.as_py() if hasattr(item, "as_py") else item


# ---- keys and payloads -------------------------------------------------------------------


def text_buffers(column: Any) -> Column:
    """Return a column of strings as the C code takes it."""
    if getattr(column, "null_count", 0):
        raise InvalidRows("a column holds nulls", -1)
    if hasattr(column, "dtype") and column.dtype.kind in "US":
        letter, kind = ("U", _STR) if column.dtype.kind == "U" else ("S", _BYTES)
        return letter, column.astype(column.dtype.newbyteorder("="), copy=False), None, 0, kind
    return _arrow(column) if hasattr(column, "buffers") else list(column)


def payload_buffers(column: Any) -> Column:
    """Return a column of payloads as the C code takes it; None without a column. Raises
    InvalidPayload."""
    if column is None:
        return None
    texts = text_buffers(column) if not getattr(column, "null_count", 0) else column.to_pylist()
    if isinstance(texts, tuple) and texts[4] == _STR:
        raise InvalidPayload("must be bytes, not str", 0, layout.PAYLOAD_MAX)
    return texts


def _arrow(column: Any) -> Column:
    kind = str(column.type)
    if kind.startswith("dictionary"):
        return text_buffers(column.dictionary_decode())
    wide = kind.startswith("large_")
    kind = kind.removeprefix("large_")
    if kind not in ("string", "binary"):
        return column.to_pylist()  # type: ignore[no-any-return]
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, "i8" if wide else "i4") if len(column) else np.zeros(1, "i4")
    bytes_ = np.frombuffer(data or b"", "u1")
    return (
        "l" if wide and len(column) else "i",
        bytes_,
        ends,
        column.offset if len(column) else 0,
        (_STR if kind == "string" else _BYTES),
    )


# ---- topics ------------------------------------------------------------------------------


class Topics:
    """The topics of all rows, checked: `column` for the C code, `entries` of the name table by
    topic. With `optional`, None in a list is no topic."""

    def __init__(self, names: Names, column: Any, entry: bytes, *, optional: bool = False) -> None:
        self.column: Column = None
        self.entries: dict[str, bytes] = {}
        self._entry = entry
        if hasattr(column, "dictionary_encode"):
            codes, topics = _codes(column)
            self.column = "c", codes, [names.of_topic(topic) for topic in topics], 0, 0
        elif column is not None:
            self.column = column.tolist() if hasattr(column, "tolist") else list(column)
            distinct = set(self.column).difference([None] if optional else [])
            self.entries = {topic: names.of_topic(topic) for topic in distinct}

    def given(self, row: int) -> bool:
        """Return whether a row has a topic."""
        if isinstance(self.column, list):
            return self.column[row] is not None
        return self.column is not None

    def of(self, row: int) -> bytes:
        """Return the entry of the name table of a row."""
        if self.column is None:
            return self._entry
        if isinstance(self.column, list):
            return self.entries.get(self.column[row], self._entry)
        codes, entries = self.column[1:3]
        return entries[codes[row]]  # type: ignore[no-any-return]


class Extensions:
    """The extension items of all rows, checked: `column` for the C code."""

    def __init__(self, columns: Mapping[str, Any], common: Common) -> None:
        rows = len(columns["key"])
        self.column: Column = same_items(common.items(), rows)
        if not columns.keys().isdisjoint(OWN):
            lists = [_listed(name, columns.get(name), rows) for name in OWN]
            listed = list(zip(*lists, strict=True))
            codes = {own: code for code, own in enumerate(dict.fromkeys(listed))}
            items = [common.items(*own) for own in codes]
            self.column = "c", np.array([codes[own] for own in listed], "i8"), items, 0, 0

    def of(self, row: int) -> bytes:
        """Return the items of a row."""
        if self.column is None:
            return b""
        codes, items = self.column[1:3]
        return items[codes[row]]  # type: ignore[no-any-return]


def _listed(name: str, column: Any, rows: int) -> list[Any]:
    """Return the values of a column as a list; None for each row if there is no column. Equal
    priorities have the same type, so that each of them is checked."""
    if column is None:
        return [None] * rows
    values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
    return [check_priority(value) for value in values] if name == "priority" else values


def _codes(column: Any) -> tuple[Array, list[str]]:
    """Return (codes, topics) of an Arrow column: the topic of row i is topics[codes[i]]."""
    if column.null_count:
        raise InvalidRows("the topic column holds nulls", -1)
    encoded = column.dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return codes.astype("i8"), encoded.dictionary.to_pylist()


# ---- times -------------------------------------------------------------------------------


class Times:
    """The times of all rows. The C code takes `column`, and converts plain delays itself."""

    def __init__(self, name: str, column: Any, clock: int, now_ns: int) -> None:
        self.virtual = clock == ClockKind.VIRTUAL
        self._clock, self._now_ns = clock, now_ns
        self._name, self._given = name, column
        self.column = self._plain()

    def _plain(self) -> Column:
        """Return the column. If the C code could not convert it, return times that are ready."""
        name, values = self._name, self._given
        if name == "delay" and not hasattr(values, "dtype") and not hasattr(values, "to_numpy"):
            return list(values)
        values = _values(values)
        if name == "delay" and values.dtype == np.float64:
            return "d", values, None, 0, 0
        if name in ("delay", "delay_ns") and values.dtype == np.int64:
            return "q", values, None, 0, 1_000_000_000 if name == "delay" else 1
        kind, all_ns = self._all
        return "t", all_ns, None, 0, kind

    @cached_property
    def _all(self) -> tuple[int, Array]:
        return time_column(self._name, self._given, None if self.virtual else self._now_ns)

    def of(self, row: int) -> tuple[int, int]:
        """Return (TimeKind, nanoseconds) of a row. Raises InvalidTime."""
        if isinstance(self.column, list):
            return times.due(self._clock, self._now_ns, **{self._name: self.column[row]})
        kind, all_ns = self._all
        return kind, int(all_ns[row])


def time_column(name: str, column: Any, now_ns: int | None) -> tuple[int, Array]:
    """Return (TimeKind, nanoseconds of each row). If `now_ns` is None, delays stay delays, and the
    daemon computes the deadlines."""
    values = _values(column)
    if values.dtype.kind == "O":
        rows = column.to_pylist() if hasattr(column, "to_pylist") else column
        pairs = [times.due(_clock(now_ns), now_ns or 0, **{name: row}) for row in rows]
        kind = pairs[0][0] if pairs else times.BOOT
        return kind, np.array([time_ns for _, time_ns in pairs], "i8")
    if name == "deadline":
        return times.WALL, _deadlines(column, values)
    if name == "deadline_boot_ns":
        return times.BOOT, _bounded(values, _whole(values, 1), 0)
    waits_ns = _seconds(values) if name == "delay" else _whole(values, 1)
    if now_ns is None:
        return times.DELAY, _bounded(values, waits_ns, 0)
    return times.BOOT, _bounded(values, waits_ns, now_ns)


def _clock(now_ns: int | None) -> int:
    return ClockKind.VIRTUAL if now_ns is None else ClockKind.BOOT


def _values(column: Any) -> Array:
    if getattr(column, "null_count", 0):
        raise InvalidRows("the time column holds nulls", -1)
    if hasattr(column, "to_numpy"):
        values: Array = column.to_numpy(zero_copy_only=False)
        return values
    return np.asarray(column)


def _seconds(values: Array) -> Array:
    if values.dtype.kind == "f":
        _require(np.isfinite(values), "is not finite", values)
        _require(values < TIME_MAX_NS / 1e9, times.TOO_FAR, values)
        return np.rint(np.maximum(values, 0.0) * 1e9).astype("i8")
    if values.dtype.kind == "m":
        return _spans(values, "m8[ns]")
    return _whole(values, 1_000_000_000)


def _deadlines(column: Any, values: Array) -> Array:
    if values.dtype.kind != "M" or getattr(getattr(column, "type", None), "tz", None) is None:
        raise InvalidTime("is naive: give the datetimes a time zone", column, TIME_MAX_NS)
    return _bounded(values, _spans(values, "M8[ns]"), 0)


def _spans(values: Array, unit: str) -> Array:
    """Convert timedelta64 or datetime64 values of any unit to nanoseconds. Refuse values that
    overflow, because numpy would let them wrap around."""
    _require(~np.isnat(values), "is not a time", values)
    spans = values.astype(unit)
    _require(spans.astype(values.dtype) == values, times.TOO_FAR, values)
    return spans.astype("i8")


def _whole(values: Array, unit_ns: int) -> Array:
    if values.dtype.kind not in "iu":
        raise InvalidTime(f"has type {values.dtype}", values, TIME_MAX_NS)
    _require(values <= TIME_MAX_NS // unit_ns, times.TOO_FAR, values)
    return np.maximum(values, 0).astype("i8") * unit_ns


def _bounded(values: Array, waits_ns: Array, now_ns: int) -> Array:
    _require(waits_ns <= TIME_MAX_NS - now_ns, times.TOO_FAR, values)
    return np.maximum(waits_ns, 0) + now_ns


def _require(good: Array, reason: str, values: Array) -> None:
    if not good.all():
        row = int(np.argmin(good))
        raise InvalidTime(f"(row {row}) {reason}", values[row], TIME_MAX_NS)

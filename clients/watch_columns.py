"""Watches and advances of whole columns. This module needs numpy.

Each row watches one key and waits for one target. Other conditions need rows of Watch.
pack/module.c has the loop over the rows, as for add_many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from purgatoryd.clients.columns import (
    Times,
    Topics,
    check_lengths,
    columns_of,
    item_of,
    payload_buffers,
    plain,
    text_buffers,
)
from purgatoryd.clients.conditions import check_target, check_watermark
from purgatoryd.clients.packing import Builder, Converted, Names, Source
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import InvalidRows
from purgatoryd.shm_layout.layout import (
    OWN_KEY,
    TARGET_MAX,
    WATERMARK_MAX,
    Condition,
    Op,
)
from purgatoryd.shm_layout.wire import Key

if TYPE_CHECKING:
    from collections.abc import Callable

    from purgatoryd.clients._pack import Column

    Array = np.ndarray[Any, np.dtype[Any]]

_WATCH_NEEDS = frozenset(("key", "watch_key", "timeout"))
_WATCH_COLUMNS = _WATCH_NEEDS | {"target", "own", "payload", "topic"}
_ADVANCE_COLUMNS = frozenset(("key", "watermark"))


class Watches(NamedTuple):
    """The checked columns of watch_many, which the caller may change after the call."""

    source: Source
    keys: Any
    watched: Any
    targets: Array
    own: Array

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.targets)

    def key(self, row: int) -> Key:
        """Return the key of the operation in a row."""
        return _key(self.keys, row)

    def watch_key(self, row: int) -> Key:
        """Return the watch key of a row."""
        return _key(self.watched, row)


class Advances(NamedTuple):
    """The checked columns of advance_many."""

    source: Source
    keys: Any

    def key(self, row: int) -> Key:
        """Return the key of a row."""
        return _key(self.keys, row)


def _key(column: Any, row: int) -> Key:
    return wire.decode_key(*wire.encode_key(item_of(column, row)))


# ---- checking columns ----------------------------------------------------------------------


def watch_columns(names: Names, table: Any, clock: int, now_ns: int) -> Watches:
    """Check the columns of watch_many. `clock`: the ClockKind of timeouts, which count from
    `now_ns` unless it is VIRTUAL. Raises InvalidArgument here, or when a row is packed."""
    columns = _named(table, _WATCH_NEEDS, _WATCH_COLUMNS)
    rows = len(columns["key"])
    targets = _wholes(columns.get("target", np.ones(rows, "u8")), TARGET_MAX, check_target)
    own = _flags(columns.get("own", np.zeros(rows, bool)))
    keys, watched = _kept(columns["key"]), _kept(columns["watch_key"])
    due = Times("delay", columns["timeout"], clock, now_ns)
    topics = Topics(names, columns.get("topic"), names.of_key, optional=True)
    payloads = payload_buffers(columns.get("payload"))

    def slow(row: int) -> Converted:
        key_type, key = wire.encode_key(item_of(keys, row))
        payload = None if payloads is None else item_of(columns["payload"], row)
        payload = b"" if payload is None else wire.encode_payload(payload)
        other = item_of(watched, row)
        extension = wire.encode_watch_key(other, int(targets[row]), own=bool(own[row]))
        notice = int(topics.given(row))
        return *due.of(row), key_type, key, topics.of(row), payload, notice, 0, extension

    source = Source(
        rows, Op.WATCH, Condition.ALL, "topic" in columns, due.virtual, now_ns, names.of_key,
        topics.entries, slow, None, text_buffers(keys), due.column, topics.column, payloads,
        ("B", own * np.uint8(OWN_KEY), None, 0, 0), text_buffers(watched), _numbers(targets),
    )  # fmt: skip
    return Watches(source, keys, watched, targets, own)


def advance_columns(names: Names, table: Any) -> Advances:
    """Check the columns of advance_many. Raises InvalidArgument here, or when a row is packed."""
    columns = _named(table, _ADVANCE_COLUMNS, _ADVANCE_COLUMNS)
    watermarks = _wholes(columns["watermark"], WATERMARK_MAX, check_watermark)
    keys = columns["key"]

    def slow(row: int) -> Converted:
        key_type, key = wire.encode_key(item_of(keys, row))
        return 0, 0, key_type, key, names.of_key, b"", 0, int(watermarks[row]), b""

    source = Source(
        len(watermarks), Op.ADVANCE_KEY, 0, 0, False, 0, names.of_key, {}, slow, None,
        text_buffers(keys), None, None, None, None, None, _numbers(watermarks),
    )  # fmt: skip
    return Advances(source, keys)


def builders(source: Source) -> Iterator[Builder]:
    """Yield builders with all rows of a source, in order."""
    start = 0
    while start < source.count:
        builder = Builder()
        start = builder.fill(source, start)
        yield builder


def _kept(column: Any) -> Any:
    """Return a column that the caller cannot change."""
    if isinstance(column, np.ndarray):
        return column.copy()
    return column if hasattr(column, "buffers") else list(column)


def _numbers(values: Array) -> Column:
    return "q", values, None, 0, 1


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
    """Return a column of ints from 0 to `most` as uint64. `check` raises the error of a value that
    is no such int."""
    if getattr(column, "null_count", 0):
        raise InvalidRows("a column of numbers holds nulls", -1)
    values = column.to_numpy() if hasattr(column, "to_numpy") else column
    if not hasattr(values, "dtype") or values.dtype.kind not in "iu":
        values = values.tolist() if hasattr(values, "tolist") else values
        return np.array([check(value) for value in values], "u8")
    if len(values) and not 0 <= values.min() <= values.max() <= most:
        good = (values >= 0) & (values <= most)
        check(values[np.argmin(good)].item())
    wholes: Array = values.astype("u8")
    return wholes


def _flags(column: Any) -> Array:
    values = np.asarray(column.to_pylist() if hasattr(column, "to_pylist") else column)
    if values.dtype.kind != "b" and len(values):
        raise InvalidRows(f"the column own has type {values.dtype}; expected bool", -1)
    return values.astype("u1")

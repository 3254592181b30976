"""Bulk calls on columns: numpy arrays, Arrow tables, dicts of lists. This module needs numpy.

Keys and payloads become a *ragged* column: one block of bytes and n + 1 offsets. After this
conversion no Python code runs for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from purgatoryd.clients import times
from purgatoryd.clients.batch import Batch
from purgatoryd.clients.bulk_loads import BulkLoad
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.packing import BATCH_BYTES, Names
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import InvalidKey, InvalidPayload, InvalidRows, InvalidTime
from purgatoryd.shm_layout.layout import TIME_MAX_NS, ClockKind, KeyType, Op, struct_dtype

if TYPE_CHECKING:
    from purgatoryd.clients.bulk import BulkResult

    Array = np.ndarray[Any, np.dtype[Any]]

_TIMES = ("delay", "delay_ns", "deadline", "deadline_boot_ns")
_COLUMNS = frozenset(("key", "topic", "payload", *_TIMES))
_RECORD = struct_dtype("pg_record")


class Ragged(NamedTuple):
    """n byte strings. String i is data[offsets[i]:offsets[i + 1]]."""

    data: Array
    offsets: Array

    @property
    def lengths(self) -> Array:
        """Number of bytes of each string."""
        return np.diff(self.offsets)

    def cut(self, rows: slice) -> Ragged:
        """Return the strings of a slice of rows, with offsets that start at 0."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        return Ragged(self.data[offsets[0] : offsets[-1]], offsets - offsets[0])


class Columns(NamedTuple):
    """Rows of one call, ready to be cut into batches; `names` are name table entries."""

    op: int
    mode: int
    time_kind: int
    keys: Ragged
    key_types: Array
    payloads: Ragged
    times_ns: Array
    codes: Array
    names: list[bytes]


def pack_puts(
    connection: Connection, result: BulkResult, table: Any, topic: str, mode: int,
    bulk_load: BulkLoad | None,
) -> list[Batch]:  # fmt: skip
    """Return the batches for add_many. If it raises InvalidArgument, nothing was packed."""
    virtual = connection.delay_clock == ClockKind.VIRTUAL
    now_ns = None if virtual else connection.host.boot_ns()
    parts = [_puts(connection.names, part, topic, mode, now_ns) for part in _parts(table)]
    return [batch for part in parts for batch in _batches(result, part, bulk_load)]


def pack_cancels(
    names: Names, result: BulkResult, keys: Any, bulk_load: BulkLoad | None
) -> list[Batch]:
    """Return the batches for cancel_many. If it raises InvalidArgument, nothing was packed."""
    chunks = keys.chunks if hasattr(keys, "chunks") else [keys]
    return [
        batch for chunk in chunks for batch in _batches(result, _cancels(names, chunk), bulk_load)
    ]


def _parts(table: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the table as dicts of columns. An Arrow table gives one dict for each record batch,
    other tables give a single dict."""
    if isinstance(table, Mapping):
        yield table
    elif hasattr(table, "to_batches"):
        yield from (_parts_of(batch) for batch in table.to_batches())
    elif hasattr(table, "schema") and hasattr(table, "column"):
        yield _parts_of(table)
    else:
        raise InvalidRows(
            f"rows must be a dict of columns, an Arrow table or a record batch, not "
            f"{type(table).__name__}",
            -1,
        )


def _parts_of(batch: Any) -> dict[str, Any]:
    return {name: batch.column(i) for i, name in enumerate(batch.schema.names)}


def _plain(column: Any) -> Any:
    """Return a numpy column as a plain array, and a chunked Arrow column as one array. Return other
    columns unchanged."""
    if hasattr(column, "dtype"):
        if np.ndim(column) != 1:
            raise InvalidRows(f"a column must have one dimension, not {np.ndim(column)}", -1)
        return np.asarray(column)
    return column.combine_chunks() if hasattr(column, "combine_chunks") else column


def _puts(
    names: Names, columns: Mapping[str, Any], topic: str, mode: int, now_ns: int | None
) -> Columns:
    columns = {name: _plain(column) for name, column in columns.items()}
    given = [name for name in _TIMES if name in columns]
    if "key" not in columns or len(given) != 1 or not columns.keys() <= _COLUMNS:
        raise InvalidRows(
            f"has the columns {sorted(map(str, columns))}; expected key, one time, topic, payload",
            -1,
        )
    if len({len(column) for column in columns.values()}) != 1:
        lengths = {name: len(column) for name, column in columns.items()}
        raise InvalidRows(f"columns differ in length: {lengths}", -1)
    keys, key_types = _keys(columns["key"])
    kind, times_ns = _times(given[0], columns[given[0]], now_ns)
    payloads = _payloads(columns["payload"]) if "payload" in columns else _nothing(len(times_ns))
    codes, topics = _topics(columns["topic"]) if "topic" in columns else _one(topic, len(times_ns))
    entries = [names.of_topic(name) for name in topics]
    return Columns(Op.PUT, mode, kind, keys, key_types, payloads, times_ns, codes, entries)


def _cancels(names: Names, column: Any) -> Columns:
    keys, key_types = _keys(_plain(column))
    zeros = np.zeros(len(key_types), "i8")
    nothing = _nothing(len(zeros))
    return Columns(Op.CANCEL, 0, 0, keys, key_types, nothing, zeros, zeros, [names.of_key])


# ---- cutting and packing -----------------------------------------------------------------


def _batches(result: BulkResult, columns: Columns, bulk_load: BulkLoad | None) -> Iterator[Batch]:
    sizes = _RECORD.itemsize + columns.keys.lengths + columns.payloads.lengths
    ends = np.concatenate(([0], np.cumsum(sizes)))
    start, rows = 0, len(sizes)
    while start < rows:
        fits = int(np.searchsorted(ends, ends[start] + BATCH_BYTES, "right")) - 1
        stop = min(rows, start + layout.BATCH_RECORDS, max(fits, start + 1))
        used, codes = np.unique(columns.codes[start:stop], return_inverse=True)
        while len(used) > layout.BATCH_NAMES:
            stop = (start + stop) // 2
            used, codes = np.unique(columns.codes[start:stop], return_inverse=True)
        names = [columns.names[code] for code in used]
        rows_of_bulk_load = bulk_load.rows_from(len(result)) if bulk_load else b""
        build = partial(_batch, columns, slice(start, stop), names, codes, rows_of_bulk_load)
        yield result.expect(build, stop - start)
        start = stop


def _batch(
    columns: Columns,
    rows: slice,
    names: list[bytes],
    codes: Array,
    rows_of_bulk_load: bytes,
    settle: Callable[..., None],
) -> Batch:
    keys, payloads = columns.keys.cut(rows), columns.payloads.cut(rows)
    records = np.zeros(len(codes), _RECORD)
    records["op"] = columns.op
    records["mode"] = columns.mode
    records["time_kind"] = columns.time_kind
    records["key_type"] = columns.key_types[rows]
    records["key_len"] = keys.lengths
    records["payload_len"] = payloads.lengths
    records["name"] = codes
    records["time_ns"] = columns.times_ns[rows]
    table = b"".join(names)
    table += bytes(-len(table) % 8)
    body = b"".join((table, records.tobytes(), _interleave(keys, payloads)))
    batch = Batch(len(codes), len(names), len(table), body, settle)
    batch.rows = rows_of_bulk_load
    return batch


def _interleave(keys: Ragged, payloads: Ragged) -> bytes:
    """Return key 0, payload 0, key 1, payload 1, ... as one block."""
    if not len(payloads.data):
        return keys.data.tobytes()
    lengths = np.column_stack((keys.lengths, payloads.lengths)).ravel()
    of_payload = np.repeat(np.tile((False, True), len(keys.lengths)), lengths)
    area = np.empty(len(of_payload), "u1")
    area[of_payload], area[~of_payload] = payloads.data, keys.data
    return area.tobytes()


# ---- keys and payloads -------------------------------------------------------------------


def _keys(column: Any) -> tuple[Ragged, Array]:
    kind, ragged = _ragged(column)
    if ragged is None:
        pairs = [wire.encode_key(key) for key in _listed(column)]
        ragged = _joined([data for _, data in pairs])
        return ragged, np.array([kind for kind, _ in pairs], "u1")
    lengths = ragged.lengths
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= layout.KEY_MAX:
        worst = int(lengths.max() if lengths.min() else 0)
        raise InvalidKey("is too long" if worst else "is empty", worst, layout.KEY_MAX)
    return ragged, np.full(len(lengths), kind, "u1")


def _payloads(column: Any) -> Ragged:
    kind, ragged = _ragged(column)
    if ragged is None:
        return _joined(
            [b"" if value is None else wire.encode_payload(value) for value in _listed(column)]
        )
    if kind == KeyType.STR:
        raise InvalidPayload("must be bytes, not str", 0, layout.PAYLOAD_MAX)
    longest = int(ragged.lengths.max(initial=0))
    if longest > layout.PAYLOAD_MAX:
        raise InvalidPayload("is too long", longest, layout.PAYLOAD_MAX)
    return ragged


def _ragged(column: Any) -> tuple[int, Ragged | None]:
    """Return (KeyType, ragged) of a numpy or Arrow column of strings. For other columns `ragged` is
    None."""
    if hasattr(column, "dtype"):
        if column.dtype.kind == "U":
            return KeyType.STR, _fixed(np.char.encode(column, "utf-8"))
        return KeyType.BYTES, _fixed(column) if column.dtype.kind == "S" else None
    return _arrow(column) if hasattr(column, "buffers") else (0, None)


def _fixed(column: Array) -> Ragged:
    """Return fixed-width strings without their trailing NULs, which numpy drops as padding."""
    width = column.dtype.itemsize
    lengths = np.char.str_len(column).astype("i8")
    cells = np.ascontiguousarray(column).view("u1").reshape(len(column), width)
    return Ragged(cells[np.arange(width) < lengths[:, None]], _offsets(lengths))


def _arrow(column: Any) -> tuple[int, Ragged | None]:
    kind = str(column.type)
    if kind.startswith("dictionary"):
        return _arrow(column.dictionary_decode())
    wide = kind.startswith("large_")
    kind = kind.removeprefix("large_")
    if kind not in ("string", "binary"):
        return 0, None
    if column.null_count:
        raise InvalidRows("a column holds nulls", -1)
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets or b"", "i8" if wide else "i4") if len(column) else np.zeros(1)
    ends = ends[column.offset :][: len(column) + 1].astype("i8")
    bytes_ = np.frombuffer(data or b"", "u1")
    ragged = Ragged(bytes_[ends[0] : ends[-1]], ends - ends[0])
    return (KeyType.STR if kind == "string" else KeyType.BYTES), ragged


def _listed(column: Any) -> Any:
    return column.to_pylist() if hasattr(column, "to_pylist") else column


def _joined(strings: list[bytes]) -> Ragged:
    lengths = np.fromiter(map(len, strings), "i8", len(strings))
    return Ragged(np.frombuffer(b"".join(strings), "u1"), _offsets(lengths))


def _offsets(lengths: Array) -> Array:
    return np.concatenate((np.zeros(1, "i8"), np.cumsum(lengths)))


def _nothing(rows: int) -> Ragged:
    return Ragged(np.empty(0, "u1"), np.zeros(rows + 1, "i8"))


# ---- topics ------------------------------------------------------------------------------


def _topics(column: Any) -> tuple[Array, list[str]]:
    """Return (codes, topics): the topic of row i is topics[codes[i]]."""
    if hasattr(column, "dictionary_encode"):
        if column.null_count:
            raise InvalidRows("the topic column holds nulls", -1)
        encoded = column.dictionary_encode()
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        return codes.astype("i8"), encoded.dictionary.to_pylist()
    known: dict[str, int] = {}
    values = column.tolist() if hasattr(column, "tolist") else column
    codes = [known.setdefault(value, len(known)) for value in values]
    return np.array(codes, "i8"), list(known)


def _one(topic: str, rows: int) -> tuple[Array, list[str]]:
    return np.zeros(rows, "i8"), [topic]


# ---- times -------------------------------------------------------------------------------


def _times(name: str, column: Any, now_ns: int | None) -> tuple[int, Array]:
    """Return (TimeKind, nanoseconds of each row). If `now_ns` is None, delays stay delays, and the
    daemon computes the deadlines."""
    values = _values(column)
    if values.dtype.kind == "O":
        rows = _listed(column)
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

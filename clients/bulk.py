"""Bulk calls: rows of Python objects packed into batches, and the result of all rows.

pack/module.c has the loop over the rows. Its function `slow` is here: it converts a row that the C
code does not know, or raises the error. columns.py does the same for columns (numpy, Arrow); the
packed bytes are the same.
partitions.py divides the rows by partition if the namespace has several partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from purgatoryd.clients import times
from purgatoryd.clients.arguments import check_class, check_whole, each, unreadable
from purgatoryd.clients.batch import Batch, Outcome, Partial
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import mode_number
from purgatoryd.clients.items import Common
from purgatoryd.clients.model import CancelResult, Codes
from purgatoryd.clients.packing import (
    ACCEPTED,
    Builder,
    Converted,
    Names,
    Source,
    is_refusal,
    refusal,
)
from purgatoryd.clients.retries import all_busy
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import (
    Busy,
    DaemonError,
    InvalidArgument,
    InvalidRows,
    PurgatorydError,
)
from purgatoryd.shm_layout.layout import TICKET_MAX, ClockKind, Op, Status, struct_dtype
from purgatoryd.shm_layout.wire import Key

if TYPE_CHECKING:
    from purgatoryd.clients._pack import Column, Direct
    from purgatoryd.clients.bulk_loads import BulkLoad

_TIMES = ("delay", "delay_ns", "deadline", "deadline_boot_ns")
AnyResult = TypeVar("AnyResult", bound="BulkResult")
OWN = ("tag", "priority", "order_key", "late", "unique_for")
"""Fields of a row that become its extension items."""
FIELDS = frozenset(("key", "topic", "payload", "within", *OWN, *_TIMES))
"""All fields of a row."""
NO_OWN = [None] * len(OWN)
NO_COMMON = Common()


class BulkResult:
    """The results of a bulk call: one result per row, in the order of the rows.

    The properties are numpy arrays if the rows were given as columns, else lists.
    """

    def __init__(self, connection: Connection | None, *, arrays: bool) -> None:
        """`connection`: the connection that sends the rows; None without rows, and for a result
        that merges other results."""
        self._connection = connection
        self._arrays = arrays
        self._parts: list[bytes] = []
        self._open: set[int] = set()
        """Indexes of the batches without an answer."""
        self._error: PurgatorydError | None = None

    def __repr__(self) -> str:
        state = f"{len(self.refused)} refused" if self.done else f"{self._unanswered} batches open"
        return f"<BulkResult of {len(self)} rows, {state}>"

    @property
    def done(self) -> bool:
        """True once every row has its result."""
        return not self._unanswered

    @property
    def _unanswered(self) -> int:
        return len(self._open)

    @property
    def _failure(self) -> PurgatorydError | None:
        """The error that left rows without a result, or None."""
        return self._error

    @property
    def _data(self) -> bytes:
        """The struct pg_result of each row."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def check(self) -> None:
        """Raise the error that left rows without a result, if there is one."""
        if (error := self._failure) is not None:
            raise error

    def begin(self) -> None:
        """Note that the first batch is about to be submitted."""

    def abandon(self, unsent: Iterable[Batch]) -> None:
        """Stop resending rows that the daemon refused as BUSY. Raises Busy if there are such rows.

        If it raises, the rows of `unsent` batches have the status BUSY as well. Rows in flight get
        their results later.
        """
        assert self._connection is not None
        if not self._connection.abandon((self,)):
            return
        for batch in unsent:
            self._connection.packer.packed += batch.count
            batch.settle(all_busy(batch))
        raise self._busy()

    def _busy(self) -> Busy:
        """Return the error for rows that were refused as BUSY."""
        statuses = self._status_bytes()
        rows = tuple(row for row, status in enumerate(statuses) if status == Status.BUSY)
        error = Busy(f"row {rows[0]}", Status.BUSY, rows, statuses.count(Status.NONE))
        error.result = self
        return error

    @property
    def statuses(self) -> Any:
        """The Status of each row, as uint8 array or as Codes; NONE for a row without a result."""
        if self._arrays:
            return (self._table()["ticket"] & 0xFF).astype("u1")
        return Codes(self._status_bytes(), Status)

    @property
    def tickets(self) -> Any:
        """The ticket of each row, as uint64 array or list; 0 for a row without a ticket."""
        if self._arrays:
            return self._table()["ticket"] >> 8
        return [word >> 8 for word, _ in self._rows()]

    @property
    def deadlines_boot_ns(self) -> Any:
        """The deadline of each row on the daemon's clock, as int64 array or list."""
        if self._arrays:
            return self._table()["deadline_ns"]
        return [deadline_ns for _, deadline_ns in self._rows()]

    @property
    def refused(self) -> list[tuple[int, Status]]:
        """The (row, status) of each refused row."""
        statuses = self._status_bytes()
        refusals = set(statuses.translate(None, ACCEPTED))
        if not refusals:
            return []
        return [(row, Status(one)) for row, one in enumerate(statuses) if one in refusals]

    @property
    def ok(self) -> bool:
        """True if every row has a result and none was refused."""
        return self.done and self._failure is None and not self.refused

    def cancels(self) -> Codes[CancelResult]:
        """Return the CancelResult of each row. Raises Refused for the first refused row, with the
        key "row N"."""
        statuses = self._status_bytes()
        if statuses.translate(None, ACCEPTED):
            for row, (word, deadline_ns) in enumerate(self._rows()):
                if is_refusal(word & 0xFF):
                    raise refusal(f"row {row}", word, deadline_ns)
        return Codes(statuses, CancelResult)

    def __len__(self) -> int:
        return sum(map(len, self._parts)) // wire.RESULT.size

    def expect(self, build: Any, count: int) -> Batch:
        """Build a batch of `count` rows with build(settle), and return it. Its results, which
        settle() receives, are stored in this object."""
        index = len(self._parts)
        self._parts.append(bytes(count * wire.RESULT.size))
        self._open.add(index)
        batch = cast(Batch, build(partial(self._settle, index, count)))
        batch.calls = self
        return batch

    def _settle(self, index: int, count: int, outcome: Outcome) -> None:
        assert self._connection is not None
        self._connection.packer.settled += count
        self._open.discard(index)
        if isinstance(outcome, Partial):
            self._parts[index], self._error = outcome
        elif isinstance(outcome, DaemonError):
            self._error = outcome
        else:
            self._parts[index] = outcome

    def _status_bytes(self) -> bytes:
        """The status of each row: the first byte of its result."""
        return self._data[:: wire.RESULT.size]

    def _rows(self) -> Iterable[tuple[int, int]]:
        return wire.decode_results(self._data)

    def _table(self) -> Any:
        import numpy as np

        return np.frombuffer(self._data, struct_dtype("pg_result"))


class MergedResult(BulkResult):
    """The results of several partitions merged into one, in the order of the rows of the call."""

    def __init__(self, rows: int) -> None:
        super().__init__(None, arrays=False)
        self._count = rows
        self.parts: list[tuple[Sequence[int], BulkResult]] = []
        """For each partition: (indexes of its rows in the call, result of these rows)."""

    def add(self, places: Sequence[int], result: BulkResult) -> None:
        """Add the result of one partition. `places`: indexes of its rows in the call."""
        self.parts.append((places, result))
        self._arrays |= result._arrays

    def fail(self, error: PurgatorydError) -> None:
        """Store the error of one partition, unless another error is already stored. A stored Busy
        is replaced, because rows that were refused as BUSY have a result."""
        if self._error is None or isinstance(self._error, Busy):
            self._error = error

    def check(self) -> None:
        """Raise the error that left rows without a result, if there is one."""
        if isinstance(self._failure, Busy):
            raise self._busy()
        super().check()

    @property
    def _unanswered(self) -> int:
        return sum(result._unanswered for _, result in self.parts)

    @property
    def _failure(self) -> PurgatorydError | None:
        errors = (result._error for _, result in self.parts)
        return self._error or next(filter(None, errors), None)

    @property
    def _data(self) -> bytes:
        size = wire.RESULT.size
        cells = [bytes(size)] * self._count
        for places, result in self.parts:
            data = result._data
            for number, place in enumerate(places):
                cells[place] = data[number * size : (number + 1) * size]
        return b"".join(cells)

    def __len__(self) -> int:
        return self._count


class Part(NamedTuple):
    """The packed rows of one partition."""

    connection: Connection
    result: BulkResult
    batches: Sequence[Batch]


class Bulk(NamedTuple):
    """A packed bulk call: its result, and a part for each partition that receives rows."""

    result: BulkResult
    parts: list[Part]

    @property
    def only(self) -> Batch | None:
        """The batch of a call that may be direct: it has no other batch and no bulk load."""
        batches = self.parts[0].batches if len(self.parts) == 1 else ()
        if len(batches) != 1 or type(self.result) is not BulkResult:
            return None
        return None if batches[0].rows else batches[0]

    def without_batches(self) -> Bulk:
        """Return this call, after its batches were sent."""
        return Bulk(self.result, [part._replace(batches=()) for part in self.parts])


def send_direct(direct: Direct, batch: Batch, result: BulkResult, limit_s: float) -> None:
    """Send the only batch of a result as a direct call. Afterwards batch.sent is True if it was
    sent, and the result is done if it was answered."""
    direct.batch(
        batch, limit_s, batch.count, batch.names, batch.names_bytes, batch.body, result._parts,
        result._open, 0,
    )  # fmt: skip


def unchecked(result: BulkResult) -> BulkResult:
    """Return `result`, even if some rows have no result."""
    return result


def checked(result: AnyResult) -> AnyResult:
    """Return `result`, or raise the error that left rows without a result."""
    result.check()
    return result


def checked_cancels(result: BulkResult) -> Codes[CancelResult]:
    """Return the result of each cancel. Raises the same errors as check() and cancels()."""
    result.check()
    return result.cancels()


Packed = tuple[BulkResult, list[Batch]]


def are_columns(rows: Any) -> bool:
    """True if the rows of add_many are given as columns."""
    return isinstance(rows, Mapping) or hasattr(rows, "schema")


def pack_puts(
    connection: Connection, rows: Any, topic: str, mode: str, bulk_load: BulkLoad | None = None,
    common: Common = NO_COMMON,
) -> Packed:  # fmt: skip
    """Pack `rows` for add_many. If it raises InvalidArgument, nothing was packed."""
    number = mode_number(mode)
    check_class("bulk_load", bulk_load, "bulk_loads", "BulkLoad")
    entry = connection.names.of_topic(topic)
    if not are_columns(rows):
        sources = [_put_source(connection, list(each("rows", rows)), entry, number, common)]
        return _packed(connection, sources, bulk_load, arrays=False)
    columns = columns_module()
    try:
        sources = columns.put_sources(connection, rows, entry, number, common)
        return _packed(connection, sources, bulk_load, arrays=True)
    except Exception as error:
        raise unreadable("columns", error) from error


def pack_cancels(
    connection: Connection, keys: Any, bulk_load: BulkLoad | None = None, delivered: bool = False
) -> Packed:  # fmt: skip
    """Pack `keys` for cancel_many. If it raises InvalidArgument, nothing was packed."""
    check_class("bulk_load", bulk_load, "bulk_loads", "BulkLoad")
    if not (hasattr(keys, "dtype") or hasattr(keys, "buffers") or hasattr(keys, "chunks")):
        sources = [cancel_source(connection.names, list(each("keys", keys)), delivered)]
        return _packed(connection, sources, bulk_load, arrays=False)
    columns = columns_module()
    try:
        sources = columns.cancel_sources(connection.names, keys, delivered)
        return _packed(connection, sources, bulk_load, arrays=True)
    except Exception as error:
        raise unreadable("keys", error) from error


def pack_unparks(connection: Connection, rows: Any, bulk_load: BulkLoad | None = None) -> Packed:
    """Pack `rows` for unpark_many. If it raises InvalidArgument, nothing was packed."""
    check_class("bulk_load", bulk_load, "bulk_loads", "BulkLoad")
    result = BulkResult(connection, arrays=False)
    packing = _Packing(result, bulk_load)
    name = connection.names.of_key
    for index, row in enumerate(each("rows", rows)):
        key = unpark_key(row, index)
        try:
            ticket = check_whole("ticket", row[1], 1, TICKET_MAX)
        except InvalidArgument as error:
            raise InvalidRows(str(error), index) from None
        packing.builder(name).unpark(
            name, *wire.encode_key(key), ticket, wire.encode_payload(row[2])
        )
    return _checked(result, packing.finish(), bulk_load)


def unpark_key(row: Any, index: int) -> Key:
    """Return the key of a row of unpark_many. Raises InvalidRows."""
    if not isinstance(row, tuple | list) or len(row) != 3:
        raise InvalidRows("must be (key, ticket, payload)", index)
    return cast(Key, row[0])


def _checked(result: BulkResult, batches: list[Batch], bulk_load: BulkLoad | None) -> Packed:
    if bulk_load is not None:
        bulk_load.check_rows(len(result))
    return result, batches


def columns_module(name: str = "columns") -> Any:
    """Import a module of this package that needs numpy. Raises InvalidRows without numpy."""
    try:
        columns = import_module(f"purgatoryd.clients.{name}")
    except ImportError:
        raise InvalidRows(
            "columns need numpy, which is not installed; install it, or give rows", -1
        ) from None
    return columns


class _Packing:
    """Packs rows into batches, with one builder after the other."""

    def __init__(self, result: BulkResult, bulk_load: BulkLoad | None) -> None:
        self._result = result
        self._bulk_load = bulk_load
        self._batches: list[Batch] = []
        self._builder = Builder()

    def builder(self, name: bytes) -> Builder:
        """Return a builder with space for one more record whose name table entry is `name`."""
        if not self._builder.fits(name):
            self.finish()
        return self._builder

    def finish(self) -> list[Batch]:
        """Close the open builder, and return all batches so far."""
        if len(self._builder):
            rows = self._bulk_load.rows_from(len(self._result)) if self._bulk_load else b""
            build = partial(self._builder.batch, rows=rows)
            batch = self._result.expect(build, len(self._builder))
            self._batches.append(batch)
            self._builder = Builder()
        return self._batches


def _packed(
    connection: Connection, sources: Iterable[Source], bulk_load: BulkLoad | None, *, arrays: bool
) -> Packed:
    """Pack all rows of `sources`, with one builder for each batch."""
    result, batches = BulkResult(connection, arrays=arrays), []
    for source in sources:
        start = 0
        while start < source.count:
            builder = Builder()
            start = builder.fill(source, start)
            rows = bulk_load.rows_from(len(result)) if bulk_load else b""
            batches.append(result.expect(partial(builder.batch, rows=rows), len(builder)))
    return _checked(result, batches, bulk_load)


def same_items(items: bytes, rows: int) -> Column:
    """Return equal items of `rows` rows as the C code takes them; None = no items."""
    codes = memoryview(bytes(8 * rows)).cast("q")
    return ("c", codes, [items], 0, 0) if items else None


def _put_source(
    connection: Connection, rows: list[Any], entry: bytes, mode: int, common: Common
) -> Source:
    names, clock, now_ns = connection.names, connection.delay_clock, connection.host.boot_ns()
    slack, items = common.slack, common.items()

    def slow(index: int) -> Converted:
        row = rows[index]
        key, time, topic, payload = fields_of(row, index)
        kind, time_ns = times.due(clock, now_ns, **time)
        key_type, key_bytes = wire.encode_key(key)
        name = entry if topic is None else names.of_topic(topic)
        payload = b"" if payload is None else wire.encode_payload(payload)
        given = row if isinstance(row, Mapping) else {}
        within, own = given.get("within"), [given.get(name) for name in OWN]
        flags = slack if within is None else times.slack(within)
        extension = items if own == NO_OWN else common.items(*own)
        return kind, time_ns, key_type, key_bytes, name, payload, flags, 0, extension

    return Source(
        len(rows), Op.PUT, mode, slack, clock == ClockKind.VIRTUAL, now_ns, entry,
        names.topics, slow, rows, None, None, None, None, None, same_items(items, len(rows)), None,
    )  # fmt: skip


def cancel_source(names: Names, keys: list[Any], delivered: bool) -> Source:
    """Return the source of cancels; `keys`: their keys."""
    flags = int(delivered)

    def slow(index: int) -> Converted:
        return 0, 0, *wire.encode_key(keys[index]), names.of_key, b"", flags, 0, b""

    return Source(
        len(keys), Op.CANCEL, 0, flags, False, 0, names.of_key, {}, slow, None,
        keys, None, None, None, None, None, None,
    )  # fmt: skip


def fields_of(row: Any, index: int) -> tuple[Any, dict[str, Any], Any, Any]:
    """Return (key, {name of the time argument: time}, topic, payload) of a row. Topic and payload
    are None if the row has none."""
    if isinstance(row, tuple | list) and 2 <= len(row) <= 4:
        topic = row[2] if len(row) > 2 else None
        payload = row[3] if len(row) > 3 else None
        return row[0], {"delay": row[1]}, topic, payload
    if isinstance(row, Mapping):
        return _of_mapping(row, index)
    raise InvalidRows("must be a dict or (key, delay[, topic[, payload]])", index)


def _of_mapping(row: Mapping[str, Any], index: int) -> tuple[Any, dict[str, Any], Any, Any]:
    if "key" not in row or not row.keys() <= FIELDS:
        raise InvalidRows(
            f"has the fields {sorted(map(str, row))}; expected key, a time, topic, payload, "
            "within, tag, priority, order_key, late, unique_for",
            index,
        )
    time = {name: row[name] for name in _TIMES if name in row}
    return row["key"], time, row.get("topic"), row.get("payload")

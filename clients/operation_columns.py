"""Operations of a watch_many() with columns: their outcomes are arrays, with one item per row.

The thread that receives messages finds the row of each outcome by its ticket (Tickets). The thread
that runs callbacks stores the outcomes (OperationTable). This module needs numpy.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from purgatoryd.clients.arguments import check_callable, check_limit_s, check_whole, unreadable
from purgatoryd.clients.batch import Batch, Partial
from purgatoryd.clients.batch import Outcome as BatchOutcome
from purgatoryd.clients.bulk import Bulk, BulkResult, MergedResult, Part
from purgatoryd.clients.conditions import AllOf
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import Core
from purgatoryd.clients.operations import Book, Outcome, cause_name, guarded_call
from purgatoryd.clients.packing import is_refusal, refusal
from purgatoryd.clients.watch_columns import (
    Advances,
    Strings,
    WatchColumns,
    advance_columns,
    advance_records,
    watch_columns,
    watch_records,
)
from purgatoryd.shm_layout.errors import CallTimeout, DaemonError, ProtocolError, PurgatorydError
from purgatoryd.shm_layout.layout import Status, struct_dtype
from purgatoryd.shm_layout.wire import RawOutcome

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

RESULT = struct_dtype("pg_result")
_OUTCOME = struct_dtype("pg_outcome")
_ACK = struct_dtype("pg_ack")
Made = TypeVar("Made", bound="OperationTable")
_NOT_ARMED = np.array([status == 0 or is_refusal(status) for status in range(256)])
_TICKETS_LEAST = 4096  # Below this number of ended operations, the table of tickets is not shrunk.


class Ends(NamedTuple):
    """Outcomes of operations with one watch key each, as parallel arrays."""

    heads: Array
    """struct pg_outcome."""
    watermarks: Array
    missing: Array
    """1 if the key was missing at the end."""
    failed: Array
    """1 if the key had failed."""

    def some(self, chosen: Array) -> Ends:
        """Return the outcomes that a mask or an array of indexes chooses."""
        return Ends(*(column[chosen] for column in self))

    @property
    def tickets(self) -> Array:
        """Ticket of each operation."""
        tickets: Array = self.heads["ticket"] >> np.uint64(8)
        return tickets

    @property
    def acks(self) -> bytes:
        """A struct pg_ack for each outcome."""
        acks = np.zeros(len(self.heads), _ACK)
        acks["ticket"], acks["slot"] = self.tickets, self.heads["slot"]
        return acks.tobytes()


def decode_ends(body: bytes, count: int) -> tuple[Ends, Array]:
    """Decode the body of an OUTCOMES message. Returns the outcomes, and a mask of those that belong
    to operations with one watch key; the others are left undecoded. Raises ProtocolError."""
    area = count * _OUTCOME.itemsize
    if len(body) < area:
        raise ProtocolError("outcomes", 0, area, len(body))
    heads = np.frombuffer(body, _OUTCOME, count)
    bits = heads["bitmap_bytes"].astype("i8")
    starts = heads["key_len"].astype("i8") + heads["payload_len"]  # until the watermarks
    ends = area + np.cumsum(starts + 2 * bits + 8 * np.where(bits, heads["keys"], 0).astype("i8"))
    if count and ends[-1] > len(body):
        raise ProtocolError("outcome's bytes", area, int(ends[-1]), len(body))
    single = (heads["keys"] == 1) & (bits == 1)
    at = np.where(single, ends - 10, 0)[:, None]
    data = np.frombuffer(body, "u1")
    cells = data[at + np.arange(10)] if len(data) >= 10 else np.zeros((count, 10), "u1")
    watermarks = np.ascontiguousarray(cells[:, :8]).view("<u8").ravel()
    return Ends(heads, watermarks, cells[:, 8] & 1, cells[:, 9] & 1), single


def one_end(raw: RawOutcome) -> Ends:
    """Return the outcome of an operation with one watch key as columns."""
    heads = np.zeros(1, _OUTCOME)
    heads["ticket"], heads["slot"] = raw.ticket << 8 | raw.cause, raw.slot
    for name in ("deadline_ns", "armed_ns", "ended_ns", "error"):
        heads[name] = getattr(raw, name)
    bits = np.array([[0 in raw.missing, 0 in raw.failed]], "u1")
    return Ends(heads, np.array(raw.watermarks, "u8"), bits[:, 0], bits[:, 1])


class OperationTable(ABC):
    """The operations that one watch_many() with columns armed or tried to arm. Thread-safe.

    Row i of each array belongs to row i of the columns. An array is a copy of the state at the time
    of the call.
    """

    def __init__(self, columns: WatchColumns) -> None:
        rows = columns.rows
        self._columns = columns
        self._results = np.zeros(rows, RESULT)
        self._ends = Ends(
            np.zeros(rows, _OUTCOME), np.zeros(rows, "u8"), np.zeros(rows, "u1"),
            np.zeros(rows, "u1"),
        )  # fmt: skip
        self._mutex = threading.Lock()  # protects the three fields below; not held in a callback
        self._open = rows
        self._error: PurgatorydError | None = None
        self._batches: list[Array] = []
        """Rows of each batch of outcomes that has arrived, in order."""
        self._callbacks: list[Callable[[Any, Array], object]] = []
        if not rows:
            self._note_done()

    def __len__(self) -> int:
        return self._columns.rows

    # ---- arming ------------------------------------------------------------------------------

    @property
    def statuses(self) -> Array:
        """The Status of each row, as uint8; NONE for a row without an answer."""
        return (self._results["ticket"] & np.uint64(0xFF)).astype("u1")

    @property
    def tickets(self) -> Array:
        """The ticket of each operation, as uint64; 0 for a row that was not armed."""
        tickets: Array = self._results["ticket"] >> np.uint64(8)
        tickets[_NOT_ARMED[self.statuses]] = 0
        return tickets

    @property
    def refused(self) -> list[tuple[int, Status]]:
        """The (row, status) of each row that the daemon refused."""
        statuses = self.statuses
        rows = np.flatnonzero(_NOT_ARMED[statuses] & (statuses != 0))
        return [(int(row), Status(int(statuses[row]))) for row in rows]

    # ---- outcomes ----------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """Number of operations that have not ended."""
        return self._open

    @property
    def done(self) -> bool:
        """True once every operation has ended or was refused, or its outcome can no longer
        arrive."""
        return self._open == 0

    @property
    def causes(self) -> Array:
        """The Cause of each outcome, as uint8; 0 for an operation that has not ended."""
        return (self._ends.heads["ticket"] & np.uint64(0xFF)).astype("u1")

    @property
    def errors(self) -> Array:
        """The code that was given to fail(), as uint32; 0 if the key had not failed."""
        return np.array(self._ends.heads["error"])

    @property
    def armed_boot_ns(self) -> Array:
        """Time of arming on the daemon's clock, as int64; 0 for an operation that has not ended."""
        return np.array(self._ends.heads["armed_ns"])

    @property
    def ended_boot_ns(self) -> Array:
        """Time of the end on the daemon's clock, as int64; 0 for an operation that has not
        ended."""
        return np.array(self._ends.heads["ended_ns"])

    @property
    def watermarks(self) -> Array:
        """The watermark of each watch key when its operation ended, as uint64."""
        return self._ends.watermarks.copy()

    def __getitem__(self, row: int) -> Outcome | None:
        """Return the Outcome of a row; None if its operation has not ended. Raises the refusal if
        the operation was refused, and IndexError."""
        rows = len(self)
        if not -rows <= check_whole("row", row, -rows, max(rows - 1, 0)) < rows:
            raise IndexError(row)
        row %= rows
        word, deadline_ns = self._results[row].item()
        if word & 0xFF and _NOT_ARMED[word & 0xFF]:
            raise refusal(self._columns.keys.key(row), word, deadline_ns)
        cause = int(self.causes[row])
        return self._outcome(row, cause) if cause else None

    def _outcome(self, row: int, cause: int) -> Outcome:
        ends = self._ends
        head, key = ends.heads[row], self._columns.watched.key(row)
        keys = [key]
        return Outcome(
            cause_name(cause), keys * int(ends.missing[row]), int(head["error"]),
            int(head["ended_ns"] - head["armed_ns"]),
            AllOf({key: int(self._columns.targets[row])}, own=keys * int(self._columns.own[row])),
            keys * int(ends.failed[row]), {key: int(ends.watermarks[row])},
        )  # fmt: skip

    # ---- for the owner -----------------------------------------------------------------------

    def answered(self, rows: Array, results: Array, error: PurgatorydError | None) -> Array:
        """Store the results of these rows; `error`: the reason why some have none. Returns a mask
        of the rows that were armed."""
        self._results[rows] = results
        armed: Array = ~_NOT_ARMED[results["ticket"] & np.uint64(0xFF)]
        self._error = self._error or error
        self._close(len(rows) - int(armed.sum()))
        return armed

    def ended(self, rows: Array, ends: Ends) -> None:
        """Store the outcomes of these rows, and run callbacks."""
        for column, values in zip(self._ends, ends, strict=True):
            column[rows] = values
        with self._mutex:
            self._batches.append(rows)
            callbacks = list(self._callbacks)
        self._close(len(rows))
        for callback in callbacks:
            self._call(callback, rows)

    def lost(self, rows: int, error: PurgatorydError) -> None:
        """Note that the outcomes of this number of rows can no longer arrive."""
        self._error = self._error or error
        self._close(rows)

    def _close(self, rows: int) -> None:
        with self._mutex:
            self._open -= rows
            done = self._open == 0 and rows > 0
        if done:
            self._note_done()

    @abstractmethod
    def _note_done(self) -> None:
        """Wake the callers of wait()."""

    def _call(self, callback: Callable[[Any, Array], object], rows: Array) -> None:
        guarded_call("operations", callback, self, rows)

    def _add_callback(self, callback: Callable[[Any, Array], object]) -> None:
        check_callable("callback", callback)
        with self._mutex:
            self._callbacks.append(callback)
            batches = list(self._batches)
        if batches:
            self._call(callback, np.concatenate(batches))

    def _check_ended(self, waited_s: float | None) -> None:
        if not self.done:
            raise CallTimeout(f"{self._open} operations", waited_s or 0.0, armed=True)
        if self._error is not None:
            raise self._error


class Operations(OperationTable):
    """The operations of a watch_many() with columns. Thread-safe."""

    def __init__(self, columns: WatchColumns) -> None:
        self._all_ended = threading.Event()
        super().__init__(columns)

    def _note_done(self) -> None:
        self._all_ended.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds (None = no limit) until every operation has ended.

        Refused rows do not count. Raises CallTimeout if an operation did not end in time, and the
        error of Operation.result() if outcomes can no longer arrive.
        """
        timeout = None if timeout is None else check_limit_s(timeout)
        self._all_ended.wait(timeout)
        self._check_ended(timeout)

    def add_done_callback(self, callback: Callable[[Operations, Array], object]) -> None:
        """Call `callback(operations, rows)` for each batch of operations that has ended; `rows`:
        their row numbers.

        It runs in the purgatory's thread, and at once in this thread for rows that have already
        ended. Each row is passed once. An exception of the callback is logged.
        """
        self._add_callback(callback)


class AsyncOperations(OperationTable):
    """The operations of an AsyncPurgatory.watch_many() with columns. Await it until all have
    ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, columns: WatchColumns) -> None:
        self._all_ended: asyncio.Future[None] = loop.create_future()
        super().__init__(columns)

    def _note_done(self) -> None:
        if not self._all_ended.done():
            self._all_ended.set_result(None)

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until every operation has ended; arguments and errors are those of
        Operations.wait."""
        timeout = None if timeout is None else check_limit_s(timeout)
        await asyncio.wait((self._all_ended,), timeout=timeout)
        self._check_ended(timeout)

    def __await__(self) -> Generator[Any, None, None]:
        return self.wait().__await__()

    def add_done_callback(self, callback: Callable[[AsyncOperations, Array], object]) -> None:
        """Call `callback(operations, rows)` in the loop's thread for each batch of operations that
        has ended, as Operations.add_done_callback does."""
        self._add_callback(callback)


class Found(NamedTuple):
    """The outcomes of one message, by the operations that they belong to."""

    acks: bytes
    """A struct pg_ack for each outcome of an operation in a table."""
    ended: list[tuple[OperationTable, Array, Ends]]
    """Outcomes that had not arrived before, with their rows."""
    others: list[int]
    """Indexes in the message of all other outcomes and CHECKs."""


class Tickets:
    """Rows of operations by ticket. The thread that receives messages is its only user."""

    def __init__(self) -> None:
        self.open = 0
        """Number of operations that have not ended."""
        self._tables: dict[int, OperationTable] = {}
        """By id(): each table that has operations which have not ended."""
        self._left: dict[int, int] = {}
        """Number of operations of each table that have not ended."""
        self._count = 0
        """Number of rows in use."""
        self._rows = np.zeros(_TICKETS_LEAST, [("ticket", "u8"), ("row", "i8"), ("table", "i8")])
        """Sorted by ticket; `table` is 0 once the operation has ended."""

    def add(self, tickets: Array, table: OperationTable, rows: Array) -> None:
        """Add the operations in these rows of `table`."""
        if not len(tickets):
            return
        self._reserve(len(tickets))
        new = self._rows[self._count : self._count + len(tickets)]
        new["ticket"], new["row"], new["table"] = tickets, rows, id(table)
        before = self._rows["ticket"][self._count - 1] if self._count else 0
        self._count += len(tickets)
        if before > tickets[0] or (tickets[1:] < tickets[:-1]).any():  # rows that were sent again
            self._rows[: self._count].sort(order="ticket")
        self._tables[id(table)] = table
        self._left[id(table)] = self._left.get(id(table), 0) + len(tickets)
        self.open += len(tickets)

    def _reserve(self, more: int) -> None:
        """Make space for `more` rows, at first by dropping operations that have ended."""
        if self._count + more <= len(self._rows):
            return
        alive = self._rows[: self._count]
        alive = alive[alive["table"] != 0]
        size = max(_TICKETS_LEAST, 2 * (len(alive) + more))
        self._rows = np.zeros(size, self._rows.dtype)
        self._rows[: len(alive)] = alive
        self._count = len(alive)

    def receive(self, body: bytes, count: int) -> Found:
        """Take the body of an OUTCOMES message. Raises ProtocolError."""
        ends, single = decode_ends(body, count)
        ends = ends if single.all() else ends.some(single)
        ended, known = self._take(ends)
        others = ~single
        others[single] = ~known
        acks = ends.acks if known.all() else ends.some(known).acks
        return Found(acks, ended, np.flatnonzero(others).tolist())

    def end(self, raw: RawOutcome) -> Callable[[], None] | None:
        """Take one outcome. Returns a function that stores it; None if it belongs to no operation
        here, or had arrived before."""
        if len(raw.watermarks) != 1:
            return None
        ended, _ = self._take(one_end(raw))
        return partial(OperationTable.ended, *ended[0]) if ended else None

    def _take(self, ends: Ends) -> tuple[list[tuple[OperationTable, Array, Ends]], Array]:
        """Return the outcomes of operations that had not ended, by table, and a mask of the
        outcomes whose operations are known."""
        known = self._rows[: self._count]
        tickets = ends.tickets
        places = np.searchsorted(known["ticket"], tickets)
        found = places < self._count
        places[~found] = 0
        found = found & (known["ticket"][places] == tickets) if self._count else found
        chosen = np.flatnonzero(found)
        chosen = chosen[known["table"][places[chosen]] != 0]
        chosen = chosen[np.unique(places[chosen], return_index=True)[1]]  # each ticket once
        tables, rows = known["table"][places[chosen]], known["row"][places[chosen]]
        known["table"][places[chosen]] = 0
        taken = []
        for number in np.unique(tables).tolist():
            mine = tables == number
            taken.append((self._tables[number], rows[mine], ends.some(chosen[mine])))
            self._forget(number, int(mine.sum()))
        return taken, found

    def _forget(self, number: int, count: int) -> None:
        self.open -= count
        self._left[number] -= count
        if not self._left[number]:
            del self._tables[number], self._left[number]

    def clear(self) -> list[tuple[OperationTable, int]]:
        """Forget all operations. Returns each table and the number of its operations that had not
        ended."""
        left = [(self._tables[number], count) for number, count in self._left.items()]
        self._tables, self._left = {}, {}
        self._count = self.open = 0
        return left


# ---- packing -----------------------------------------------------------------------------------


class WatchResult(BulkResult):
    """The results of those rows of a watch_many() that belong to one partition."""

    def __init__(
        self, connection: Connection, book: Book, table: OperationTable, places: Array
    ) -> None:
        """`places`: the row in `table` of each row of this partition."""
        super().__init__(connection, arrays=True)
        self._book = book
        self._operations = table
        self._places = places
        self._starts = [0]
        """First row of each batch, in `places`; then the number of rows so far."""

    def expect(self, build: Any, count: int) -> Batch:
        """Build a batch of `count` rows, as BulkResult.expect does."""
        self._starts.append(self._starts[-1] + count)
        return super().expect(build, count)

    def begin(self) -> None:
        """Note in the Book that the answers to all batches follow."""
        for index in range(len(self._parts)):
            self._book.expect((id(self), index))

    def _settle(self, index: int, count: int, outcome: BatchOutcome) -> None:
        super()._settle(index, count, outcome)
        rows = self._places[self._starts[index] : self._starts[index + 1]]
        results = np.frombuffer(self._parts[index], RESULT, count)
        failed = isinstance(outcome, Partial | DaemonError)
        armed = self._operations.answered(rows, results, self._error if failed else None)
        tickets = results["ticket"][armed] >> np.uint64(8)
        self._book.armed_rows((id(self), index), tickets, self._operations, rows[armed])


def pack_watches(
    core: Core, books: Mapping[Connection, Book], table: Any, make: Callable[[WatchColumns], Made]
) -> tuple[Made, list[Part]]:
    """Pack the columns of watch_many; `make` creates the OperationTable. Raises InvalidArgument,
    and Partitioned if a row has keys of different partitions."""
    clock, now_ns = core.connections[0].delay_clock, core.host.boot_ns()
    columns = _read(watch_columns, core.names, table, clock, now_ns)
    _check_partitions(core, columns)
    operations, parts = make(columns), []
    for connection, places in _shares(core, columns.keys):
        result = WatchResult(connection, books[connection], operations, places)
        records = watch_records(core.names, _share(core, columns, places))
        parts.append(Part(connection, result, list(records.batches(result.expect))))
    return operations, parts


class PackedAdvances(NamedTuple):
    """The packed columns of an advance_many()."""

    columns: Advances
    bulk: Bulk

    def counts(self) -> Array:
        """Return the number of operations that each row ended, as int64. Raises Refused for the
        first refused row, and the error that left rows without a result."""
        result = self.bulk.result
        result.check()
        for row, _ in result.refused[:1]:
            word = int(result.statuses[row]) | int(result.tickets[row]) << 8
            raise refusal(self.columns.keys.key(row), word, int(result.deadlines_boot_ns[row]))
        counts: Array = result.deadlines_boot_ns
        return counts


def pack_advances(core: Core, table: Any) -> PackedAdvances:
    """Pack the columns of advance_many. Raises InvalidArgument."""
    columns = _read(advance_columns, table)
    whole, parts = MergedResult(len(columns.watermarks)), []
    for connection, places in _shares(core, columns.keys):
        result = BulkResult(connection, arrays=True)
        records = advance_records(core.names, _share(core, columns, places))
        parts.append(Part(connection, result, list(records.batches(result.expect))))
        whole.add(places.tolist(), result)
    return PackedAdvances(columns, Bulk(whole if len(core.connections) > 1 else result, parts))


def _read(read: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except Exception as error:
        raise unreadable("columns", error) from error


def _check_partitions(core: Core, columns: WatchColumns) -> None:
    if len(core.connections) > 1:
        apart = _partitions(core, columns.keys) != _partitions(core, columns.watched)
        for row in np.flatnonzero(apart)[:1]:
            core.of_all(columns.keys.key(row), (columns.watched.key(row),))  # raises Partitioned


def _shares(core: Core, keys: Strings) -> list[tuple[Connection, Array]]:
    """Return the connection of each partition, and its rows. Without rows, the first connection
    gets an empty share."""
    connections = core.connections
    if len(connections) == 1 or not len(keys.types):
        return [(connections[0], np.arange(len(keys.types)))]
    numbers = _partitions(core, keys)
    used = np.unique(numbers).tolist()
    return [(connections[number], np.flatnonzero(numbers == number)) for number in used]


def _partitions(core: Core, keys: Strings) -> Array:
    """Return the index of each key's connection."""
    index = {connection: number for number, connection in enumerate(core.connections)}
    return np.array([index[core.at(key)] for key in keys.data.strings()], "i8")


def _share(core: Core, columns: Any, places: Array) -> Any:
    return columns if len(core.connections) == 1 else columns.take(places)

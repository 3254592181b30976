"""Operations of a watch_many() with columns: their outcomes are arrays, with one item per row.

pack/ends.c finds the row of each outcome by its ticket and stores the outcome. The Book then calls
wake(), and the thread that runs callbacks calls call_back(). This module needs numpy.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from purgatoryd.clients import _pack
from purgatoryd.clients.arguments import check_callable, check_limit_s, check_whole, unreadable
from purgatoryd.clients.batch import Batch, Partial
from purgatoryd.clients.batch import Outcome as BatchOutcome
from purgatoryd.clients.bulk import Bulk, BulkResult, MergedResult, Part
from purgatoryd.clients.conditions import AllOf
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import Core
from purgatoryd.clients.operations import Book, Outcome, cause_name, guarded_call
from purgatoryd.clients.packing import Source, is_refusal, refusal
from purgatoryd.clients.partitions import split_rows
from purgatoryd.clients.watch_columns import (
    Advances,
    Watches,
    advance_columns,
    builders,
    watch_columns,
)
from purgatoryd.shm_layout.errors import CallTimeout, DaemonError, PurgatorydError
from purgatoryd.shm_layout.layout import Status, struct_dtype

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

RESULT = struct_dtype("pg_result")
Made = TypeVar("Made", bound="OperationTable")
_NOT_ARMED = np.array([status == 0 or is_refusal(status) for status in range(256)])


END = np.dtype([
    ("ticket", "u8"), ("armed_ns", "i8"), ("ended_ns", "i8"), ("watermark", "u8"),
    ("error", "u4"), ("missing", "u1"), ("failed", "u1"), ("pad", "u2"),
])  # fmt: skip
"""struct end of pack/ends.c: the outcome of a row; `ticket` also has the cause."""


class OperationTable(_pack.Table, ABC):
    """The operations that one watch_many() with columns armed or tried to arm. Thread-safe.

    Row i of each array belongs to row i of the columns. An array is a copy of the state at the time
    of the call.
    """

    def __init__(self, columns: Watches) -> None:
        super().__init__(columns.rows)
        self._columns = columns
        self._error: PurgatorydError | None = None
        self._callbacks: list[_Callback] = []
        if not columns.rows:
            self._note_done()

    def __len__(self) -> int:
        return self._rows

    # ---- arming ------------------------------------------------------------------------------

    @property
    def _results(self) -> Array:
        return np.frombuffer(self._answers(), RESULT)

    @property
    def _ends(self) -> Array:
        return np.frombuffer(self._outcomes(), END)

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
    def done(self) -> bool:
        """True once every operation has ended or was refused, or its outcome can no longer
        arrive."""
        return self.open == 0

    @property
    def causes(self) -> Array:
        """The Cause of each outcome, as uint8; 0 for an operation that has not ended."""
        return (self._ends["ticket"] & np.uint64(0xFF)).astype("u1")

    @property
    def errors(self) -> Array:
        """The code that was given to fail(), as uint32; 0 if the key had not failed."""
        return self._ends["error"].copy()

    @property
    def armed_boot_ns(self) -> Array:
        """Time of arming on the daemon's clock, as int64; 0 for an operation that has not ended."""
        return self._ends["armed_ns"].copy()

    @property
    def ended_boot_ns(self) -> Array:
        """Time of the end on the daemon's clock, as int64; 0 for an operation that has not
        ended."""
        return self._ends["ended_ns"].copy()

    @property
    def watermarks(self) -> Array:
        """The watermark of each watch key when its operation ended, as uint64."""
        return self._ends["watermark"].copy()

    def __getitem__(self, row: int) -> Outcome | None:
        """Return the Outcome of a row; None if its operation has not ended. Raises the refusal if
        the operation was refused, and IndexError."""
        rows = len(self)
        if not -rows <= check_whole("row", row, -rows, max(rows - 1, 0)) < rows:
            raise IndexError(row)
        row %= rows
        word, deadline_ns = self._results[row].item()
        if word & 0xFF and _NOT_ARMED[word & 0xFF]:
            raise refusal(self._columns.key(row), word, deadline_ns)
        end = self._ends[row]
        return self._outcome(row, end) if end["ticket"] else None

    def _outcome(self, row: int, end: Any) -> Outcome:
        columns, key = self._columns, self._columns.watch_key(row)
        keys = [key]
        return Outcome(
            cause_name(int(end["ticket"]) & 0xFF), keys * int(end["missing"]), int(end["error"]),
            int(end["ended_ns"] - end["armed_ns"]),
            AllOf({key: int(columns.targets[row])}, own=keys * int(columns.own[row])),
            keys * int(end["failed"]), {key: int(end["watermark"])},
        )  # fmt: skip

    # ---- for the owner -----------------------------------------------------------------------

    def failed(self, error: PurgatorydError) -> None:
        """Store the reason why rows have no answer or no outcome."""
        self._error = self._error or error

    def wake(self) -> None:
        """Wake waiting callers if all operations have ended."""
        if self.open == 0:
            self._note_done()

    def call_back(self) -> None:
        """Run callbacks for rows that ended since the last call."""
        for callback in list(self._callbacks):
            callback(self)

    @property
    def callbacks(self) -> bool:
        """True if call_back() has callbacks to run."""
        return bool(self._callbacks)

    @abstractmethod
    def _note_done(self) -> None:
        """Wake the callers of wait()."""

    def _add_callback(self, callback: Callable[[Any, Array], object]) -> None:
        check_callable("callback", callback)
        added = _Callback(callback)
        self._callbacks.append(added)
        added(self)

    def _check_ended(self, waited_s: float | None) -> None:
        if not self.done:
            raise CallTimeout(f"{self.open} of the operations", waited_s or 0.0, armed=True)
        if self._error is not None:
            raise self._error


class _Callback:
    """A function that gets each row once, after its operation has ended."""

    def __init__(self, function: Callable[[Any, Array], object]) -> None:
        self._function = function
        self._seen = 0
        """Number of rows that were passed to the function."""
        self._mutex = threading.Lock()

    def __call__(self, table: OperationTable) -> None:
        with self._mutex:
            rows = np.frombuffer(table._order(self._seen), "i8")
            self._seen += len(rows)
        if len(rows):
            guarded_call("operations", self._function, table, rows)


class Operations(OperationTable):
    """The operations of a watch_many() with columns. Thread-safe."""

    def __init__(self, columns: Watches) -> None:
        self._all_ended = threading.Event()
        super().__init__(columns)

    def _note_done(self) -> None:
        self._all_ended.set()

    def wait(self, timeout: float | timedelta | None = None) -> None:
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

    def __init__(self, loop: asyncio.AbstractEventLoop, columns: Watches) -> None:
        self._all_ended: asyncio.Future[None] = loop.create_future()
        super().__init__(columns)

    def _note_done(self) -> None:
        if not self._all_ended.done():
            self._all_ended.set_result(None)

    async def wait(self, timeout: float | timedelta | None = None) -> None:
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
        rows = self._places[self._starts[index] : self._starts[index + 1]].tobytes()
        results = self._parts[index][: count * RESULT.itemsize]
        if isinstance(outcome, Partial | DaemonError) and self._error is not None:
            self._operations.failed(self._error)
        self._book.armed_rows((id(self), index), self._operations, results, rows)


def pack_watches(
    core: Core, books: Mapping[Connection, Book], table: Any, make: Callable[[Watches], Made]
) -> tuple[Made, list[Part]]:
    """Pack the columns of watch_many; `make` creates the OperationTable. Raises InvalidArgument,
    and Partitioned if a row has keys of different partitions."""
    clock, now_ns = core.connections[0].delay_clock, core.host.boot_ns()
    read = partial(watch_columns, core.names, clock=clock, now_ns=now_ns)
    columns = _read(read, table)
    operations, parts = make(columns), []
    for connection, places, source in _shares(core, table, columns, read):
        result = WatchResult(connection, books[connection], operations, places)
        parts.append(Part(connection, result, _batches(result, source)))
    _check_partitions(core, columns)
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
            raise refusal(self.columns.key(row), word, int(result.deadlines_boot_ns[row]))
        counts: Array = result.deadlines_boot_ns
        return counts


def pack_advances(core: Core, table: Any) -> PackedAdvances:
    """Pack the columns of advance_many. Raises InvalidArgument."""
    read = partial(advance_columns, core.names)
    columns = _read(read, table)
    whole, parts = MergedResult(columns.source.count), []
    for connection, places, source in _shares(core, table, columns, read):
        result = BulkResult(connection, arrays=True)
        parts.append(Part(connection, result, _batches(result, source)))
        whole.add(places.tolist(), result)
    return PackedAdvances(columns, Bulk(whole if len(core.connections) > 1 else result, parts))


def _batches(result: BulkResult, source: Source) -> list[Batch]:
    try:
        return [result.expect(builder.batch, len(builder)) for builder in builders(source)]
    except Exception as error:
        raise unreadable("columns", error) from error


def _read(read: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except Exception as error:
        raise unreadable("columns", error) from error


def _check_partitions(core: Core, columns: Watches) -> None:
    if len(core.connections) > 1:
        for row in range(columns.rows):
            core.of_all(columns.key(row), (columns.watch_key(row),))  # raises Partitioned


def _shares(
    core: Core, table: Any, columns: Any, read: Callable[..., Any]
) -> list[tuple[Connection, Array, Source]]:
    """Return the connection of each partition, its rows, and the source of these rows. Without
    rows, the first connection gets an empty share."""
    connections, rows = core.connections, columns.source.count
    if len(connections) == 1 or not rows:
        return [(connections[0], np.arange(rows), columns.source)]
    list(builders(columns.source))  # raises the error of a bad row with its number among all rows
    return [
        (share.connection, np.array(share.places), _read(read, share.rows).source)
        for share in split_rows(core, table)
    ]

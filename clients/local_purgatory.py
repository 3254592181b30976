"""The purgatory of one process: the C core in private memory, without a daemon.

The calls, conditions and outcomes are those of Purgatory. A call packs its records as a client
does, and hands them to the core in the calling thread, under a lock. Outcomes are stored before the
call returns. The purgatory's thread expires operations, and runs callbacks and When conditions. So
no code of the caller runs under a lock of this module, and every callback may make calls.

An exception of a signal handler, such as KeyboardInterrupt, may interrupt a call between any two
lines. Each step under the lock may therefore be repeated:

* A batch stays in `_flight` until its results are stored. The core applies a repeated batch once,
  and repeats its reply.
* An outcome that was not acknowledged is taken again. Operations and tables store an outcome once.

The interrupted call finishes these steps before it passes the exception on.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, overload

from purgatoryd.clients import _pack
from purgatoryd.clients.arguments import check_callable, check_limit_s, check_whole, each
from purgatoryd.clients.batch import Batch, Outcome
from purgatoryd.clients.bulk import Part, are_columns, columns_module
from purgatoryd.clients.conditions import AnyCondition, ByKey, check_watermark
from purgatoryd.clients.core import Core
from purgatoryd.clients.destination import Destination
from purgatoryd.clients.fork_guard import ForkGuard
from purgatoryd.clients.locked import locked
from purgatoryd.clients.operations import Book, Operation
from purgatoryd.clients.packing import (
    Builder,
    Entry,
    Found,
    Names,
    Pending,
    PendingCount,
    PendingEnded,
    PendingFound,
    PendingTrigger,
)
from purgatoryd.clients.purgatory import (
    Armed,
    Owner,
    Watch,
    are_watermark_columns,
    check_error,
    each_watermark,
    prepare_cancel,
    prepare_extend,
    prepare_trigger,
    prepare_watch,
    watch_rows,
)
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import Closed, DaemonError, InvalidArgument, PurgatorydError
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import Op
from purgatoryd.shm_layout.private_arena import Limits, PrivateArena
from purgatoryd.shm_layout.wire import Key, RawOutcome

if TYPE_CHECKING:
    import numpy as np

    from purgatoryd.clients.operation_columns import Operations, PackedAdvances

    Array = np.ndarray[Any, np.dtype[Any]]

NAP_MAX_S = 1.0
"""Longest sleep of the thread while a deadline is pending. The clock of a wait stops while the host
is suspended."""
PAYLOAD_BYTES = 256
"""Default payload memory for each operation, in bytes."""
LIMIT_MAX = 2**31
Result = TypeVar("Result")


class LocalPurgatory:
    """A purgatory inside one process, without a daemon. Thread-safe.

    `capacity`: number of operations. `watches`: watch records, one for each watch key of each
    operation; default `capacity`. `watch_keys`: keys with a watermark; default `capacity`.
    `payload_memory`: bytes for keys, payloads and conditions; default 256 for each operation. All
    memory is reserved here, and the kernel provides a page when it is first used. A call that needs
    more raises Full. `watermark_ttl`: seconds or a timedelta after which a watch key that nobody
    watches is forgotten. `clock_ns` returns the time in ns.

    Raises InvalidArgument if a limit is out of bounds or the kernel refuses the memory.

    An interrupt of a call, such as Ctrl-C, leaves the purgatory usable. If the call has reached the
    core, its effect is complete, and the exception has the attribute `handle`: the Operation or the
    Operations of a watch.
    """

    def __init__(
        self,
        *,
        capacity: int = 65_536,
        watches: int | None = None,
        watch_keys: int | None = None,
        payload_memory: int | None = None,
        watermark_ttl: float | timedelta = 600.0,
        clock_ns: Callable[[], int] = HOST.boot_ns,
    ) -> None:
        capacity = check_whole("capacity", capacity, 1, LIMIT_MAX)
        limits = Limits(
            capacity, _limit("watches", watches, capacity),
            _limit("watch_keys", watch_keys, capacity),
            _limit("payload_memory", payload_memory, capacity * PAYLOAD_BYTES),
            round(check_limit_s(watermark_ttl, "watermark_ttl") * 1e9),
        )  # fmt: skip
        check_callable("clock_ns", clock_ns)
        self._core = _Core(clock_ns, limits)
        self._thread = threading.Thread(target=self._core.run, name="purgatoryd-local", daemon=True)
        weakref.finalize(self, self._core.stop).atexit = False
        self._thread.start()

    # ---- watching --------------------------------------------------------------------------

    def watch(
        self, key: Key, condition: AnyCondition, timeout: float | timedelta, *,
        payload: bytes = b"", callback: Callable[[Operation], object] | None = None,
    ) -> Operation:  # fmt: skip
        """Arm an operation that ends once `condition` holds, or after `timeout` seconds.

        `callback(operation)` runs in the purgatory's thread once the operation has ended. Raises
        InvalidArgument, Refused (Exists, Full, ...), Closed, ForkedProcess.
        """
        check_callable("callback", callback)
        core = self._core.checked()
        armed = prepare_watch(core.as_core, core.as_owner, Watch(key, condition, timeout, payload))
        operation = armed.operation
        operation._owner = self
        if callback is not None:
            operation._callbacks.append(callback)
        return core.call([armed.entry], partial(_armed, armed), operation)

    @overload
    def watch_many(self, rows: Mapping[str, Any]) -> Operations: ...

    @overload
    def watch_many(self, rows: Iterable[Watch | tuple[Any, ...]]) -> list[Operation]: ...

    def watch_many(self, rows: Any) -> Operations | list[Operation]:
        """Arm many operations, as Purgatory.watch_many does. No row may have a topic. Raises
        InvalidArgument before anything is armed, Closed, ForkedProcess."""
        core = self._core.checked()
        if are_columns(rows):
            return self._watch_columns(core, rows)
        armed: list[Armed] = watch_rows(core.as_core, core.as_owner, _without_topics(rows))
        operations = [operation for operation, _ in armed]
        for operation in operations:
            operation._owner = self
        entries = [entry for _, entry in armed]
        return core.call(entries, lambda: operations, operations)

    def _watch_columns(self, core: _Core, table: Any) -> Operations:
        if "topic" in (table if isinstance(table, Mapping) else table.schema.names):
            raise _no_topics()
        columns = columns_module("operation_columns")
        packed: tuple[Operations, list[Part]] = columns.pack_watches(
            core.as_core, core.books, table, columns.Operations
        )
        operations, parts = packed
        return core.submit(parts[0].batches, lambda: operations, operations)

    def _extend(self, operation: Operation, timeout: float | timedelta) -> bool:
        core = self._core.checked()
        entry = prepare_extend(core.as_core, operation, timeout)
        return not operation.done and operation.ticket != 0 and core.once(entry)

    def _cancel(self, operation: Operation) -> bool:
        core = self._core.checked()
        entry = prepare_cancel(core.as_core, operation)
        return not operation.done and operation.ticket != 0 and core.once(entry)

    # ---- triggers --------------------------------------------------------------------------

    def advance(self, key: Key, watermark: int) -> int:
        """Raise the key's watermark to at least `watermark`. Returns the number of operations that
        ended."""
        return self._trigger(PendingCount, Op.ADVANCE_KEY, key, check_watermark(watermark))

    @overload
    def advance_many(self, watermarks: Mapping[str, Sequence[Any] | Array]) -> Array: ...

    @overload
    def advance_many(self, watermarks: ByKey[int] | Iterable[tuple[Key, int]]) -> list[int]: ...

    def advance_many(self, watermarks: Any) -> list[int] | Array:
        """Raise the watermarks of many keys, in order, as Purgatory.advance_many does. Returns for
        each key the number of operations that ended.

        Raises InvalidArgument before anything is applied, Closed, ForkedProcess. Raises Refused for
        the first key that was refused; the other keys are advanced nevertheless.
        """
        core = self._core.checked()
        if are_watermark_columns(watermarks):
            return self._advance_columns(core, watermarks)
        entries = [
            prepare_trigger(core.as_core, PendingCount, Op.ADVANCE_KEY, key, watermark)
            for key, watermark in each_watermark(watermarks)
        ]
        return core.call(entries, lambda: [entry.pending.outcome() for entry in entries])

    def _advance_columns(self, core: _Core, table: Any) -> Array:
        columns = columns_module("operation_columns")
        packed: PackedAdvances = columns.pack_advances(core.as_core, table)
        return core.submit(packed.bulk.parts[0].batches, packed.counts)

    def bump(self, key: Key, n: int = 1) -> int:
        """Add `n` to the key's watermark. Returns the number of operations that ended."""
        return self._trigger(PendingCount, Op.BUMP, key, check_watermark(n))

    def fail(self, key: Key, code: int) -> int:
        """Fail the key's operations, and later operations until clear() is called. Returns the
        number of operations that ended."""
        return self._trigger(PendingCount, Op.FAIL, key, check_error(code))

    def clear(self, key: Key) -> bool:
        """End the failed state of the key. Returns False if the key is unknown."""
        return self._trigger(PendingFound, Op.CLEAR, key)

    def forget(self, key: Key) -> bool:
        """Forget the key's watermark once no operation watches the key. Returns False if the key is
        unknown."""
        return self._trigger(PendingFound, Op.FORGET, key)

    def cancel_for_key(self, key: Key) -> list[Key]:
        """End all operations that watch `key`, with the cause "cancelled". Returns the keys of the
        operations."""
        return self._trigger(PendingEnded, Op.CANCEL_FOR_KEY, key)

    def _trigger(
        self, kind: type[PendingTrigger[Found]], op: Op, key: Key, value: int = 0
    ) -> Found:
        core = self._core.checked()
        return core.once(prepare_trigger(core.as_core, kind, op, key, value))

    @property
    def operations(self) -> int:
        """Number of operations that have not ended."""
        return self._core.open

    @property
    def memory(self) -> int:
        """Size of the reserved memory in bytes."""
        return int(self._core.arena.bytes)

    # ---- close -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the purgatory. Returns once running callbacks have ended, unless a callback makes
        this call.

        After that, result() of an operation that has not ended raises Closed, and so does every
        other call. Repeat an interrupted call. In a forked child the call does nothing.
        """
        if not self._core.fork_guard.mine:
            return
        self._core.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def _armed(armed: Armed) -> Operation:
    armed.entry.pending.outcome()
    return armed.operation


def _limit(name: str, value: int | None, default: int) -> int:
    return default if value is None else check_whole(name, value, 1, LIMIT_MAX)


def _no_topics() -> InvalidArgument:
    return InvalidArgument("a LocalPurgatory publishes no notices; use Purgatory for topics")


def _without_topics(rows: Any) -> Iterator[Any]:
    for row in each("rows", rows):
        if isinstance(row, tuple | list) and len(row) > 4 and row[4] is not None:
            raise _no_topics()
        yield row


def _nothing() -> None:
    pass


class _Core:
    """The arena, its lock, and the operations that it holds."""

    def __init__(self, clock_ns: Callable[[], int], limits: Limits) -> None:
        self.fork_guard = ForkGuard("purgatory")
        self.news: SimpleQueue[Callable[[], object]] = SimpleQueue()
        """Callbacks and conditions that the thread has to run."""
        self.arena = PrivateArena(limits, clock_ns(), os.urandom(16))
        self._clock_ns = clock_ns
        self._mutex = threading.Lock()
        """Protects the arena and the fields below; not held in a callback."""
        self._flight: deque[Batch] = deque()
        """Batches without results, in order."""
        self._sequence = 0
        self._taking = False
        """True while outcomes are taken."""
        self._ended = False
        self._wake_ns = 0
        """Time at which the thread wakes up by itself."""
        self._operations: dict[int, Operation] = {}
        self._tickets = _pack.Tickets()
        # The packing of Purgatory needs of its Core, Owner and Connection what is here.
        self.host = _Clock(clock_ns)
        self.names = Names(b"local")
        self.connections = [Destination(self.host, self.names)]
        self.books: dict[Destination, Book] = {self.connections[0]: cast(Book, self)}
        self.as_core, self.as_owner = cast(Core, self), cast(Owner, self)

    def of(self, key: Key) -> Destination:
        """Return the line that takes the key's calls."""
        return self.connections[0]

    def at(self, key: bytes) -> Destination:
        """Return the line that takes the key's calls."""
        return self.connections[0]

    def of_all(self, key: Key, others: Iterable[Key]) -> Destination:
        """Return the line that takes the calls of all keys."""
        return self.connections[0]

    def checked(self) -> _Core:
        """Return this object. Raises Closed, ForkedProcess."""
        self.fork_guard.check()
        return self

    @property
    def open(self) -> int:
        """Number of operations that have not ended."""
        return len(self._operations) + self._tickets.open

    # ---- calls -------------------------------------------------------------------------------

    def once(self, entry: Entry[PendingTrigger[Found]]) -> Found:
        """Make a call with one record, and return its result."""
        if isinstance(entry.pending, PendingEnded):
            self._repeat(entry.pending, entry)
        else:
            self.call([entry], _nothing)
        return entry.pending.outcome()

    def _repeat(self, pending: PendingEnded, entry: Entry[Any]) -> None:
        """Make a call until it leaves no operations. A record ends a limited number of them."""
        pending.repeat = _nothing
        while not pending.done:
            self.call([entry], _nothing)

    def call(
        self, entries: Iterable[Entry[Any]], result: Callable[[], Result], handle: object = None
    ) -> Result:
        """Make a call with these records; their Pendings receive the results. Return result()."""
        return self.submit(_batches(entries), result, handle)

    def submit(
        self, batches: Iterable[Batch], result: Callable[[], Result], handle: object = None
    ) -> Result:
        """Apply batches, store all outcomes, and return result(). `handle`: attached to the
        exception of an interrupt, if a batch was applied."""
        fresh = list(batches)
        try:
            locked(self._mutex, self._exchange, fresh)
            return result()
        except BaseException as error:
            locked(self._mutex, self._land)
            if handle is not None and not isinstance(error, PurgatorydError) and _begun(fresh):
                vars(error)["handle"] = handle
            raise

    def _exchange(self, batches: list[Batch]) -> None:
        self.fork_guard.check()
        self._flight.extend(batches)
        self._land()

    def _land(self) -> None:
        """Expire what is due, apply all batches in flight, and take all outcomes. The caller holds
        the lock."""
        if self._ended:
            return
        now_ns = self._clock_ns()
        if self.arena.next_ns <= now_ns:
            self.arena.advance(now_ns)
        while self._flight:
            self._apply(self._flight[0], now_ns)
            self._flight.popleft()
            self._take(now_ns)
        self._take(now_ns)
        if self.arena.next_ns < self._wake_ns:
            self._wake_ns = 0
            self.news.put(_nothing)

    def _apply(self, batch: Batch, now_ns: int) -> None:
        if not batch.frame:
            batch.address(self.arena.session, self._sequence + 1, durable=False, same_clock=True)
        try:
            batch.settle(self.arena.handle(batch.frame, now_ns))
        except DaemonError as error:
            batch.settle(error)
        self._sequence = batch.sequence
        self.arena.sweep(now_ns, batch.count)

    def _take(self, now_ns: int) -> None:
        if self._taking:  # an exception interrupted the last attempt
            self.arena.repeat()
        self._taking = True
        while message := self.arena.outcomes():
            self._receive(wire.decode_reply(message), now_ns)
        self._taking = False

    def _receive(self, reply: wire.Reply, now_ns: int) -> None:
        """Store the outcomes of one message, and acknowledge them."""
        found = self._tickets.receive(reply.body, reply.records)
        assert not isinstance(found, int)
        acks, others = found
        self._notice_touched()
        if others:
            outcomes = wire.decode_outcomes(reply.body, reply.records)
            acks += b"".join([self._end(outcomes[number]) for number in others])
        if acks:
            self.arena.handle(wire.encode_acks(self.arena.session, acks), now_ns)

    def _notice_touched(self) -> None:
        touched = self._tickets.touched
        while touched:
            self._notice(touched[-1])
            touched.pop()

    def _notice(self, table: Operations) -> None:
        table.wake()
        if table.callbacks:
            self.news.put(table.call_back)

    def _end(self, raw: RawOutcome) -> bytes:
        """Store the outcome of an operation, or let the thread evaluate its condition. Returns the
        acknowledgement of an outcome."""
        operation = self._operations.get(raw.ticket)
        if raw.cause == 0:
            if operation is not None:
                self.news.put(partial(self._evaluate, operation, raw))
            return b""
        if operation is not None:
            self._finish(operation, raw)
        self._operations.pop(raw.ticket, None)
        return wire.ACK.pack(raw.ticket, 0, raw.slot)

    def _finish(self, operation: Operation, raw: RawOutcome) -> None:
        operation._store(operation._outcome_of(raw), None)
        if operation._callbacks:
            self.news.put(operation._call_back)

    # ---- answers to watches, as a Book receives them -----------------------------------------

    def expect(self, watch: object) -> None:
        """Ignore that a watch was packed: its answer comes before its outcome."""

    def armed(self, operation: Operation, pending: PendingCount) -> None:
        """Take the answer to the watch of `operation`."""
        if (error := pending.why()) is not None:
            operation._store(None, error)
        elif not operation.done:
            operation.ticket = pending.word >> 8
            self._operations[operation.ticket] = operation

    def armed_rows(self, batch: object, table: Operations, results: bytes, rows: bytes) -> None:
        """Take the answers to watches by columns."""
        self._tickets.add(table, results, rows)
        if table.open == 0:
            self._notice(table)

    # ---- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Run callbacks and conditions, and expire operations, until the purgatory is closed. Then
        end all operations."""
        while not self.fork_guard.closed:
            limit_s = locked(self._mutex, self._nap_s)
            with suppress(Empty):
                self.news.get(timeout=limit_s)()
            locked(self._mutex, self._expire)
        locked(self._mutex, self._end_all)
        with suppress(Empty):
            while True:
                self.news.get_nowait()()

    def _nap_s(self) -> float | None:
        """Return how long the thread may sleep in seconds; None = until it is woken."""
        self._wake_ns = self.arena.next_ns
        if self._wake_ns == 2**63 - 1:
            return None
        return min(max(self._wake_ns - self._clock_ns(), 0) / 1e9, NAP_MAX_S)

    def _expire(self) -> None:
        if self._flight or self._taking or self.arena.next_ns <= self._clock_ns():
            self._land()

    def _evaluate(self, operation: Operation, raw: RawOutcome) -> None:
        """Evaluate a When condition, and give the answer to the core."""
        if operation.done:
            return
        if operation._holds():
            entry = prepare_trigger(
                self.as_core, PendingCount, Op.COMPLETE, operation.key, raw.version
            )
            with suppress(Closed):
                self.call([entry], _nothing)
        else:
            ack = wire.ACK.pack(raw.ticket, raw.version, raw.slot)
            locked(self._mutex, self._acknowledge, ack)

    def _acknowledge(self, ack: bytes) -> None:
        if self._ended:
            return
        self.arena.handle(wire.encode_acks(self.arena.session, ack), self._clock_ns())
        self._land()

    # ---- the end -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Let the thread end all operations and then end itself."""
        self.fork_guard.closed = True
        self.news.put(_nothing)

    def _end_all(self) -> None:
        """End all operations with Closed, and free the memory."""
        self._land()
        error = Closed("purgatory")
        for operation in self._operations.values():
            operation._store(None, error)
            self.news.put(operation._call_back)
        self._operations.clear()
        self._tickets.clear()
        for table in self._tickets.touched:
            table.failed(error)
        self._notice_touched()
        self._ended = True
        self.arena.close()


def _begun(batches: Sequence[Batch]) -> bool:
    return bool(batches and batches[0].frame)


class _Clock(Host):
    """A host whose boot time is the time of a purgatory's clock."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns

    def boot_ns(self) -> int:
        return self._clock_ns()


def _batches(entries: Iterable[Entry[Any]]) -> Iterator[Batch]:
    """Pack the records of calls."""
    builder = Builder()
    calls: list[Pending] = []
    for entry in entries:
        if not builder.fits(entry.name):
            yield builder.batch(partial(_settle, calls))
            builder, calls = Builder(), []
        entry.method(builder, entry.name, *entry.fields)
        calls.append(entry.pending)
    if calls:
        yield builder.batch(partial(_settle, calls))


def _settle(calls: list[Pending], outcome: Outcome) -> None:
    """Store the results of calls, perhaps for a second time."""
    if isinstance(outcome, DaemonError):
        for pending in calls:
            pending.error, pending.done = outcome, True
        return
    assert isinstance(outcome, bytes)
    end = len(calls) * wire.RESULT.size
    ended = wire.decode_ended(outcome[end:]) if len(outcome) > end else {}
    for number, found in enumerate(wire.decode_results(outcome[:end])):
        pending = calls[number]
        pending.word, pending.deadline_ns = found
        if number in ended:
            pending.ended = [*dict.fromkeys([*(pending.ended or []), *ended[number]])]
        pending.done = True
        if pending.on_done is not None:
            pending.on_done(pending)

"""The purgatory across processes: one process watches operations, any process advances keys, and
the watching process receives the outcomes.

A Purgatory is a Client with operations. Its engine also takes the outcomes that the daemon sends.
Callbacks and CLIENT conditions may block and make calls of their own, so a second thread runs them.
It starts with the first of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from purgatoryd.clients import jobs, times
from purgatoryd.clients.arguments import check_callable, check_whole, each
from purgatoryd.clients.bulk import Part, are_columns, columns_module
from purgatoryd.clients.client import Client, Handle
from purgatoryd.clients.conditions import (
    AllOf,
    AnyCondition,
    ByKey,
    Encoded,
    When,
    check_watermark,
    encode,
)
from purgatoryd.clients.connection import NEVER_S, Connection
from purgatoryd.clients.core import QUEUE_LIMIT, Core
from purgatoryd.clients.engine import Engine
from purgatoryd.clients.jobs import nothing
from purgatoryd.clients.ledger import Ledger
from purgatoryd.clients.local_channel import Transport
from purgatoryd.clients.operations import Book, Operation, Outcome
from purgatoryd.clients.packing import (
    Builder,
    Entry,
    Found,
    Names,
    PendingCancelled,
    PendingCount,
    PendingEnded,
    PendingFound,
    PendingTrigger,
    PendingWatch,
)
from purgatoryd.clients.remote import Remote
from purgatoryd.clients.resume import Resume
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import Closed, InvalidArgument, InvalidRows, PurgatorydError
from purgatoryd.shm_layout.layout import Op, PutMode
from purgatoryd.shm_layout.wire import Key

if TYPE_CHECKING:
    import numpy as np

    from purgatoryd.clients.operation_columns import Operations, PackedAdvances

    Array = np.ndarray[Any, np.dtype[Any]]

ERROR_MAX = 2**32 - 1
KEEP_ALIVE_S = 15.0  # PING interval of an owner with operations: the daemon may end idle sessions


class Watch(NamedTuple):
    """One row of watch_many."""

    key: Key
    condition: AnyCondition
    timeout: float | timedelta
    payload: bytes = b""
    topic: str | None = None


class Armed(NamedTuple):
    """An operation and the call that arms it."""

    operation: Operation
    entry: Entry[PendingCount]

    @property
    def identity(self) -> tuple[Any, ...]:
        """A value that is equal for two watches of the same key, condition, payload and topic."""
        condition = self.operation._asked
        code = None if condition is None else id(condition.condition)
        return (self.entry.name, code, *self.entry.fields[:3], *self.entry.fields[5:])


def _due(connection: Connection, timeout: Any) -> tuple[int, int]:
    if timeout is None:  # due() would ask for one of the arguments of add()
        raise InvalidArgument("timeout None must be a number of seconds or a timedelta")
    return connection.due(timeout)


def _encode_once(operation: Operation, condition: When) -> Encoded:
    """Evaluate the CLIENT condition of a watch with the timeout 0, before the watch is sent. If the
    condition is true, return another condition, which the daemon finds true at once."""
    if not operation._holds():
        return operation._encoded
    return encode(AllOf(dict.fromkeys(operation._encoded.keys, 0), own=condition.own))


def prepare_watch(core: Core, owner: Owner, row: Watch) -> Armed:
    """Check a WATCH and return its entry. Raises InvalidArgument, and Partitioned if the keys are
    in different partitions."""
    encoded = encode(row.condition)
    connection = core.of_all(row.key, encoded.keys)
    book = owner.books[connection]
    kind, time_ns = _due(connection, row.timeout)
    key_type, key_bytes = wire.encode_key(row.key)
    name = core.names.of_key if row.topic is None else core.names.of_topic(row.topic)
    payload = wire.encode_payload(row.payload)
    operation = Operation(row.key, encoded, row.condition)
    if isinstance(row.condition, When) and times.seconds_ns(row.timeout) <= 0:
        encoded = _encode_once(operation, row.condition)
    pending = PendingWatch(row.key, lambda p: book.armed(operation, p), encoded.keys)
    fields = (
        encoded.kind, key_type, key_bytes, kind, time_ns, payload, encoded.threshold,
        encoded.watched, row.topic is not None,
    )  # fmt: skip
    pack = partial(_pack_watch, book, operation)
    return Armed(operation, connection.entry(pending, name, pack, fields))


def _pack_watch(
    book: Book, operation: Operation, builder: Builder, name: bytes, *fields: Any
) -> None:
    builder.watch(name, *fields)
    book.expect(operation)


def watch_rows(core: Core, owner: Owner, rows: Iterable[Watch | tuple[Any, ...]]) -> list[Armed]:
    """Check the rows of watch_many and return their entries. Raises the same errors as
    prepare_watch()."""
    return [
        prepare_watch(core, owner, _watch(row, index))
        for index, row in enumerate(each("rows", rows))
    ]


def _watch(row: Any, index: int) -> Watch:
    if not isinstance(row, tuple | list) or not 3 <= len(row) <= 5:
        raise InvalidRows("must be (key, condition, timeout[, payload[, topic]])", index)
    return Watch(*row)


def prepare_trigger(
    core: Core, kind: type[PendingTrigger[Found]], op: Op, key: Key, value: int = 0
) -> Entry[PendingTrigger[Found]]:
    """Check a record whose `op` is from ADVANCE_KEY to COMPLETE, and return its entry. Raises
    InvalidArgument."""
    connection = core.of(key)
    entry = connection.entry(kind(key, None), *_trigger(core.names, op, key, value))
    if isinstance(entry.pending, PendingEnded):
        entry.pending.repeat = partial(connection.packer.add, entry)
    return entry


def _trigger(
    names: Names, op: Op, key: Key, value: int
) -> tuple[bytes, Callable[..., None], tuple[Any, ...]]:
    key_type, key_bytes = wire.encode_key(key)
    return names.of_key, Builder.trigger, (op, key_type, key_bytes, value)


def prepare_extend(
    core: Core, operation: Operation, timeout: float | timedelta
) -> Entry[PendingTrigger[bool]]:
    """Return the entry of a PUT that only extends `operation`. Raises InvalidArgument."""
    key_type, key_bytes = wire.encode_key(operation.key)
    connection = core.at(key_bytes)
    kind, time_ns = _due(connection, timeout)
    fields = (PutMode.EXTEND, key_type, key_bytes, kind, time_ns, b"", operation.ticket)
    pending = PendingFound(operation.key, None)
    return connection.entry(pending, core.names.of_key, Builder.put, fields)


def prepare_cancel(core: Core, operation: Operation) -> Entry[PendingTrigger[bool]]:
    """Return the entry of a CANCEL that ends only `operation`."""
    key_type, key_bytes = wire.encode_key(operation.key)
    fields = (key_type, key_bytes, operation.ticket)
    pending = PendingCancelled(operation.key, None)
    return core.at(key_bytes).entry(pending, core.names.of_key, Builder.cancel, fields)


def admit_all(entries: Iterable[Entry[Any]]) -> None:
    """Admit a call that has several records. Each shard is checked once. Raises
    ShardUnavailable."""
    for breaker in dict.fromkeys(entry.pending.connection.breaker for entry in entries):
        if breaker is not None:
            breaker.check()


def admit_parts(parts: Iterable[Part]) -> None:
    """Admit a call with columns, as admit_all() does."""
    for part in parts:
        part.connection.admit()


def are_watermark_columns(watermarks: Any) -> bool:
    """True if the watermarks of advance_many are columns: the values of the mapping are sequences,
    not numbers."""
    if not isinstance(watermarks, Mapping):
        return hasattr(watermarks, "schema")
    return hasattr(next(iter(watermarks.values()), 0), "__len__")


def check_error(code: object) -> int:
    """Return the code of fail() as an int. Raises InvalidArgument."""
    return check_whole("error code", code, 1, ERROR_MAX)


def each_watermark(watermarks: ByKey[int] | Iterable[tuple[Key, int]]) -> list[tuple[Key, int]]:
    """Return the (key, watermark) pairs of advance_many(). Raises InvalidArgument."""
    given = watermarks.items() if isinstance(watermarks, Mapping) else watermarks
    rows = list(each("watermarks", given))
    for index, row in enumerate(rows):
        if not isinstance(row, tuple | list) or len(row) != 2:
            raise InvalidRows("must be (key, watermark)", index)
        wire.encode_key(row[0])
        check_watermark(row[1])
    return rows


class Owner:
    """The operations of one client: a Book for each connection, and the messages of the client
    about its operations."""

    def __init__(self, core: Core, kick: Callable[[], None], resume: Resume | None) -> None:
        """`kick` wakes the thread that calls work()."""
        self.books: dict[Connection, Book] = {}
        self._core = core
        self._kick = kick
        self._resume = resume
        self._spoke_s = core.host.monotonic_s()
        core.on_connection = self.own

    def own(self, connection: Connection) -> None:
        """Create the Book of a connection. The Book receives the outcomes that the daemon sends."""
        book, session, resume = Book(self._kick, connection.host), connection.session, self._resume
        if resume is not None:
            book.resume(session, resume.callback, resume.on_lost)
        session.on_outcomes = book.receive
        session.on_lost = book.expired
        self.books[connection] = book

    @property
    def open(self) -> int:
        """Number of operations that have not ended."""
        return sum(book.open for book in [*self.books.values()])

    def book_of(self, entry: Entry[Any]) -> Book:
        """Return the Book that has the operation of an entry."""
        return self.books[entry.pending.connection]

    def speak(self) -> float:
        """Pack completions, queue acknowledgements, and queue a PING every KEEP_ALIVE_S. Return the
        host time at which speak() must be called again."""
        for connection, book in self.books.items():
            for operation, version in book.completions():
                fields = _trigger(self._core.names, Op.COMPLETE, operation.key, version)
                connection.packer.add(Entry(PendingCount(operation.key, None), *fields))
            if acks := book.acks():
                connection.session.acknowledge(acks)
        if not self.open:
            return NEVER_S
        now_s = self._core.host.monotonic_s()
        if now_s >= self._spoke_s + KEEP_ALIVE_S:
            self._spoke_s = now_s
            for connection, book in self.books.items():
                if book.open:
                    connection.session.call()
        return self._spoke_s + KEEP_ALIVE_S

    # ---- for the thread that runs callbacks and conditions -------------------------------------

    def work(self) -> None:
        """Run callbacks and conditions that are due."""
        for book in [*self.books.values()]:
            book.work()

    def release(self) -> None:
        """Acknowledge the outcomes that have arrived."""
        for book in [*self.books.values()]:
            book.release()

    @property
    def works(self) -> bool:
        """True if callbacks or conditions wait for work()."""
        return any(book.works for book in [*self.books.values()])

    @property
    def speaks(self) -> bool:
        """True if acknowledgements or answers wait to be sent to a daemon."""
        return any(book.speaks for book in [*self.books.values()])

    def lost(self, error: PurgatorydError) -> None:
        """End all operations with `error`."""
        for book in [*self.books.values()]:
            book.lost(error)


class Purgatory(Client):
    """A client of the daemon `name` that owns operations.

    Arguments and errors are those of Client, without `spin_us`. The process that watched an
    operation receives its outcome and acknowledges it. With `resume`, a later process receives the
    outcomes of operations that are armed when this process ends; without `resume` these outcomes
    are dropped. In a namespace with several partitions, the key and all watch keys of an operation
    have to be in one partition, or watch() raises Partitioned.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        namespace: str = "default",
        timeout: float | timedelta = 5.0,
        queue_limit: int = QUEUE_LIMIT,
        remote: Remote | None = None,
        durable: bool = False,
        ledger: Ledger | None = None,
        worker: str | None = None,
        numa_local: bool = False,
        transport: Transport = "auto",
        resume: Resume | None = None,
    ) -> None:
        self._resume = resume
        super().__init__(
            name, namespace=namespace, timeout=timeout, queue_limit=queue_limit,
            remote=remote, durable=durable, ledger=ledger, worker=worker, numa_local=numa_local,
            transport=transport,
        )  # fmt: skip

    def _start(self) -> Engine:
        self._callbacks = callbacks = _Callbacks(self._core, self._resume)
        self._owner = owner = callbacks.owner
        callbacks.engine = engine = Engine(
            self._core, after=owner.speak, at_end=callbacks.end, listens=True
        )
        return engine

    # ---- watching --------------------------------------------------------------------------

    def watch(
        self, key: Key, condition: AnyCondition, timeout: float | timedelta, *,
        payload: bytes = b"", topic: str | None = None,
        callback: Callable[[Operation], object] | None = None,
    ) -> Operation:  # fmt: skip
        """Arm an operation that ends once `condition` holds, or after `timeout` seconds.

        `topic`: the end of the operation is published there as a notice. `callback(operation)` runs
        in the purgatory's thread once the operation has ended. Raises InvalidArgument, Partitioned,
        Refused (Exists, Full, Busy, ...), DaemonError. After a CallTimeout repeat the same watch:
        it returns the operation of the first call, unless that operation has ended and the first
        call raised more than DOUBT_S (60 s) ago.
        """
        check_callable("callback", callback)
        self._core.check()
        row = Watch(key, condition, timeout, payload, topic)
        fresh = prepare_watch(self._core, self._owner, row)
        admit_all([fresh.entry])
        book = self._owner.book_of(fresh.entry)
        doubted: Armed | None = book.doubted(fresh.identity)
        armed, limit_s = doubted or fresh, self._limit_s(None)
        armed.operation._owner = self
        pending = armed.entry.pending
        if doubted is None:
            job = jobs.several(self.queue_limit, [armed.entry], limit_s)
        else:
            job = jobs.awaited(pending, limit_s, (pending,))
        try:
            return self._run(job, partial(_armed, armed, callback), armed.operation)
        except BaseException:
            book.doubt(armed.identity, armed, pending)
            raise

    @overload
    def watch_many(self, rows: Mapping[str, Any]) -> Operations: ...

    @overload
    def watch_many(self, rows: Iterable[Watch | tuple[Any, ...]]) -> list[Operation]: ...

    def watch_many(self, rows: Any) -> Operations | list[Operation]:
        """Arm many operations. Each operation is armed or refused independently.

        `rows`: Watch, or tuples (key, condition, timeout[, payload[, topic]]). Then a list of
        operations is returned, and result() of a refused operation raises the refusal.

        Or columns: a dict of lists or numpy arrays, an Arrow table or record batch. The columns are
        key, watch_key, timeout in seconds, and optionally target (1 to 2^63 - 2, by default 1), own
        (bool, as `own` of AllOf), payload and topic. An operation ends once the watermark of its
        watch key is at least its target. Then Operations is returned; its `refused` has the refused
        rows.

        Raises InvalidArgument, Partitioned and ShardUnavailable (all before anything is sent),
        DaemonError.
        """
        self._core.check()
        if are_columns(rows):
            return self._watch_columns(rows)
        armed = watch_rows(self._core, self._owner, rows)
        operations = [operation for operation, _ in armed]
        for operation in operations:
            operation._owner = self
        entries = [entry for _, entry in armed]
        admit_all(entries)
        job = jobs.several(self.queue_limit, entries, self._limit_s(None))
        return self._run(job, lambda: operations, operations)

    def _watch_columns(self, table: Any) -> Operations:
        columns = columns_module("operation_columns")
        books = self._owner.books
        packed: tuple[Operations, list[Part]] = columns.pack_watches(
            self._core, books, table, columns.Operations
        )
        operations, parts = packed
        admit_parts(parts)
        job = jobs.watched(self.queue_limit, parts, self._limit_s(None))
        return self._run(job, lambda: operations, operations)

    def _extend(self, operation: Operation, timeout: float | timedelta) -> bool:
        self._core.check()
        entry = prepare_extend(self._core, operation, timeout)
        if operation.done or operation.ticket == 0:
            return False
        return self._once(entry)

    def _cancel(self, operation: Operation) -> bool:
        if operation.done or operation.ticket == 0:
            return False
        self._core.check()
        return self._once(prepare_cancel(self._core, operation))

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
        """Raise the watermarks of many keys, in order. Returns for each key the number of
        operations that ended.

        `watermarks`: a mapping, or pairs (key, watermark). Or the columns key and watermark: a dict
        of lists or numpy arrays, an Arrow table or record batch; then an int64 array is returned.
        Raises InvalidArgument and ShardUnavailable (both before anything is sent), DaemonError.
        Raises Refused for the first key that was refused; the other keys are advanced nevertheless.
        """
        self._core.check()
        if are_watermark_columns(watermarks):
            return self._advance_columns(watermarks)
        entries = [
            prepare_trigger(self._core, PendingCount, Op.ADVANCE_KEY, key, watermark)
            for key, watermark in each_watermark(watermarks)
        ]
        admit_all(entries)
        handles: list[Handle[int]] = [Handle(self, entry.pending) for entry in entries]
        job = jobs.several(self.queue_limit, entries, self._limit_s(None))
        return self._run(job, lambda: [entry.pending.outcome() for entry in entries], handles)

    def _advance_columns(self, table: Any) -> Array:
        columns = columns_module("operation_columns")
        packed: PackedAdvances = columns.pack_advances(self._core, table)
        admit_parts(packed.bulk.parts)
        return self._bulk(packed.bulk, self._limit_s(None), lambda _: packed.counts())

    def bump(self, key: Key, n: int = 1) -> int:
        """Add `n` to the key's watermark, exactly once. Returns the number of operations that
        ended."""
        return self._trigger(PendingCount, Op.BUMP, key, check_watermark(n))

    def fail(self, key: Key, code: int) -> int:
        """Fail the key's operations, and later operations until clear() is called. Returns the
        number of operations that ended."""
        return self._trigger(PendingCount, Op.FAIL, key, check_error(code))

    def clear(self, key: Key) -> bool:
        """End the failed state of the key. Returns False if the daemon does not know the key."""
        return self._trigger(PendingFound, Op.CLEAR, key)

    def forget(self, key: Key) -> bool:
        """Forget the key's watermark once no operation watches the key. Returns False if the daemon
        does not know the key."""
        return self._trigger(PendingFound, Op.FORGET, key)

    def cancel_for_key(self, key: Key) -> list[Key]:
        """End all operations that watch `key`, with the cause "cancelled". Returns the keys of the
        operations."""
        return self._trigger(PendingEnded, Op.CANCEL_FOR_KEY, key)

    def _trigger(
        self, kind: type[PendingTrigger[Found]], op: Op, key: Key, value: int = 0
    ) -> Found:
        self._core.check()
        return self._once(prepare_trigger(self._core, kind, op, key, value))

    def _once(self, entry: Entry[PendingTrigger[Found]]) -> Found:
        admit_all([entry])
        handle: Handle[Found] = Handle(self, entry.pending)
        job = jobs.single(entry, self._limit_s(None))
        return self._run(job, entry.pending.outcome, handle)

    @property
    def operations(self) -> int:
        """Number of operations of this owner that have not ended."""
        return self._owner.open

    # ---- close -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the client as Client.close does, then wait up to `timeout` for running callbacks.

        After that, result() of an operation that has not ended raises Closed.
        """
        super().close()

    def _left(self, limit_s: float) -> None:
        super()._left(limit_s)
        self._callbacks.join(limit_s)


def _armed(armed: Armed, callback: Callable[[Operation], object] | None) -> Operation:
    armed.entry.pending.outcome()
    if callback is not None:
        armed.operation.add_done_callback(callback)
    return armed.operation


class _Callbacks:
    """The thread that runs callbacks and conditions. It starts with the first of them."""

    engine: Engine

    def __init__(self, core: Core, resume: Resume | None) -> None:
        self.owner = Owner(core, self._kick, resume)
        self._kicks: SimpleQueue[int] = SimpleQueue()
        self._kicked = self._handled = 0
        """Numbers of the last kick, and of the last one that the thread has handled."""
        self._thread: threading.Thread | None = None

    def _kick(self) -> None:
        """Take news in the engine's thread. While the callback thread works, outcomes that arrive
        are acknowledged later, so that the daemon's inbox bounds the memory of this process."""
        if not self.owner.works and self._handled == self._kicked:
            self.owner.release()
            return
        self._kicked += 1
        self._kicks.put(self._kicked)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="purgatoryd-owner", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Run callbacks and conditions until the engine has ended."""
        owner, engine = self.owner, self.engine
        while not engine.ended:
            kick = self._kicks.get()
            for step in (owner.release, owner.work):
                step()
                if owner.speaks:
                    engine.put(nothing, urgent=True)  # wakes the engine, which sends the answers
            self._handled = kick
        self._lose()

    def _lose(self) -> None:
        self.owner.lost(Closed("purgatory"))
        self.owner.work()

    def end(self) -> None:
        """End all operations once the engine has ended. Without a callback thread, the engine's
        thread runs the last callbacks: it has nothing else to do."""
        if self._thread is None:
            self._thread = threading.current_thread()
            self._lose()
        else:
            self._kicks.put(0)

    def join(self, limit_s: float) -> None:
        """Wait at most `limit_s` seconds until the last callback has ended."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(limit_s)


__all__ = ["Operation", "Outcome", "Purgatory", "Watch"]

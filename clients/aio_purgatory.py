"""The purgatory for asyncio: watch an operation, and await its outcome.

Callbacks and CLIENT conditions run in the thread of the event loop, between its other work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from purgatoryd.clients import jobs
from purgatoryd.clients.aio import AsyncClient, AsyncHandle
from purgatoryd.clients.arguments import check_callable, check_limit_s
from purgatoryd.clients.bulk import Part, are_columns, columns_module
from purgatoryd.clients.conditions import AnyCondition, ByKey, check_watermark
from purgatoryd.clients.core import QUEUE_LIMIT, Core
from purgatoryd.clients.jobs import Jobs
from purgatoryd.clients.ledger import Ledger
from purgatoryd.clients.local_channel import Transport
from purgatoryd.clients.operations import Operation, Outcome, still_armed
from purgatoryd.clients.packing import (
    Entry,
    Found,
    PendingCount,
    PendingEnded,
    PendingFound,
    PendingTrigger,
)
from purgatoryd.clients.purgatory import (
    Armed,
    Owner,
    Watch,
    admit_all,
    admit_parts,
    are_watermark_columns,
    check_error,
    each_watermark,
    prepare_cancel,
    prepare_extend,
    prepare_trigger,
    prepare_watch,
    watch_rows,
)
from purgatoryd.clients.remote import Remote
from purgatoryd.clients.resume import Resume
from purgatoryd.shm_layout.errors import Closed
from purgatoryd.shm_layout.layout import Op
from purgatoryd.shm_layout.wire import Key

if TYPE_CHECKING:
    import numpy as np

    from purgatoryd.clients.operation_columns import AsyncOperations, PackedAdvances

    Array = np.ndarray[Any, np.dtype[Any]]


class AsyncOperation:
    """An armed operation. Await it, or result(), for its Outcome."""

    def __init__(
        self, operation: Operation, loop: asyncio.AbstractEventLoop, owner: AsyncPurgatory
    ) -> None:
        self._operation = operation
        self._owner = owner
        self._ended = loop.create_future()
        operation.add_done_callback(self._note)

    def _note(self, _: Operation) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def key(self) -> Key:
        """Key of the operation."""
        return self._operation.key

    @property
    def ticket(self) -> int:
        """Ticket of the operation, never reused; 0 if the operation was refused."""
        return self._operation.ticket

    @property
    def done(self) -> bool:
        """True once the operation has ended, or its outcome can no longer arrive."""
        return self._operation.done

    async def result(self, timeout: float | timedelta | None = None) -> Outcome:
        """Return the Outcome; arguments and errors are those of Operation.result."""
        timeout = None if timeout is None else check_limit_s(timeout)
        await asyncio.wait((self._ended,), timeout=timeout)
        if not self._operation.done:
            raise still_armed(self.key, timeout)
        return self._operation.result()

    def __await__(self) -> Generator[Any, None, Outcome]:
        return self.result().__await__()

    def future(self) -> asyncio.Future[Outcome]:
        """Return a future of the result, for `asyncio.wait`. Cancelling the future does not end
        the operation."""
        return asyncio.ensure_future(self.result())

    async def extend(self, timeout: float | timedelta) -> bool:
        """Move the deadline, as Operation.extend does."""
        return await self._owner._extend(self._operation, timeout)

    async def cancel(self) -> bool:
        """End the operation with the cause "cancelled", as Operation.cancel does."""
        return await self._owner._cancel(self._operation)

    def add_done_callback(self, callback: Callable[[AsyncOperation], object]) -> None:
        """Call `callback(operation)` in the loop's thread once the operation has ended, or at once
        if it has already ended. An exception of the callback is logged."""
        self._operation.add_done_callback(lambda _: callback(self))


class AsyncPurgatory(AsyncClient):
    """The asyncio version of Purgatory, with the same arguments, errors and guarantees.

    `async with AsyncPurgatory("name") as p: op = await p.watch(...); outcome = await op`
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
            name,
            namespace=namespace,
            timeout=timeout,
            queue_limit=queue_limit,
            remote=remote,
            durable=durable,
            ledger=ledger,
            worker=worker,
            numa_local=numa_local,
            transport=transport,
        )

    def _start(self) -> Jobs:
        self._owner = Owner(self._core, self._schedule, self._resume)
        return Jobs(self._core, self._owner.speak, listens=True)

    # ---- watching --------------------------------------------------------------------------

    async def watch(
        self, key: Key, condition: AnyCondition, timeout: float | timedelta, *,
        payload: bytes = b"", topic: str | None = None,
        callback: Callable[[AsyncOperation], object] | None = None,
    ) -> AsyncOperation:  # fmt: skip
        """Arm an operation; arguments and errors are those of Purgatory.watch."""
        check_callable("callback", callback)
        core = await self._ready()
        row = Watch(key, condition, timeout, payload, topic)
        fresh = prepare_watch(core, self._owner, row)
        admit_all([fresh.entry])
        book = self._owner.book_of(fresh.entry)
        doubted: Armed | None = book.doubted(fresh.identity)
        armed, limit_s = doubted or fresh, self._limit_s(None)
        pending, operation = armed.entry.pending, self._operation(armed)
        if doubted is None:
            job = jobs.several(self.queue_limit, [armed.entry], limit_s)
        else:
            job = jobs.awaited(pending, limit_s, (pending,))
        try:
            await self._run(job, operation)
        except BaseException:
            book.doubt(armed.identity, armed, pending)
            raise
        pending.outcome()
        if callback is not None:
            operation.add_done_callback(callback)
        return operation

    @overload
    async def watch_many(self, rows: Mapping[str, Any]) -> AsyncOperations: ...

    @overload
    async def watch_many(self, rows: Iterable[Watch | tuple[Any, ...]]) -> list[AsyncOperation]: ...

    async def watch_many(self, rows: Any) -> AsyncOperations | list[AsyncOperation]:
        """Arm many operations, as Purgatory.watch_many does."""
        core = await self._ready()
        if are_columns(rows):
            return await self._watch_columns(core, rows)
        armed = watch_rows(core, self._owner, rows)
        operations = [self._operation(one) for one in armed]
        await self._several([one.entry for one in armed], operations)
        return operations

    async def _watch_columns(self, core: Core, table: Any) -> AsyncOperations:
        columns = columns_module("operation_columns")
        make = partial(columns.AsyncOperations, self._loop)
        packed: tuple[AsyncOperations, list[Part]]
        packed = columns.pack_watches(core, self._owner.books, table, make)
        operations, parts = packed
        admit_parts(parts)
        await self._run(jobs.watched(self.queue_limit, parts, self._limit_s(None)), operations)
        return operations

    async def _several(self, entries: Sequence[Entry[Any]], handles: object) -> None:
        admit_all(entries)
        job = jobs.several(self.queue_limit, entries, self._limit_s(None))
        await self._run(job, handles)

    def _operation(self, armed: Armed) -> AsyncOperation:
        assert self._loop is not None
        return AsyncOperation(armed.operation, self._loop, self)

    async def _extend(self, operation: Operation, timeout: float | timedelta) -> bool:
        entry = prepare_extend(await self._ready(), operation, timeout)
        if operation.done or operation.ticket == 0:
            return False
        return await self._once(entry)

    async def _cancel(self, operation: Operation) -> bool:
        if operation.done or operation.ticket == 0:
            return False
        return await self._once(prepare_cancel(await self._ready(), operation))

    # ---- triggers --------------------------------------------------------------------------

    async def advance(self, key: Key, watermark: int) -> int:
        """Raise the key's watermark, as Purgatory.advance does."""
        return await self._trigger(PendingCount, Op.ADVANCE_KEY, key, check_watermark(watermark))

    @overload
    async def advance_many(self, watermarks: Mapping[str, Sequence[Any] | Array]) -> Array: ...

    @overload
    async def advance_many(
        self, watermarks: ByKey[int] | Iterable[tuple[Key, int]]
    ) -> list[int]: ...

    async def advance_many(self, watermarks: Any) -> list[int] | Array:
        """Raise the watermarks of many keys, as Purgatory.advance_many does."""
        core = await self._ready()
        if are_watermark_columns(watermarks):
            return await self._advance_columns(core, watermarks)
        rows = each_watermark(watermarks)
        entries = [prepare_trigger(core, PendingCount, Op.ADVANCE_KEY, key, n) for key, n in rows]
        handles: list[AsyncHandle[int]] = [AsyncHandle(self, entry.pending) for entry in entries]
        await self._several(entries, handles)
        return [entry.pending.outcome() for entry in entries]

    async def _advance_columns(self, core: Core, table: Any) -> Array:
        columns = columns_module("operation_columns")
        packed: PackedAdvances = columns.pack_advances(core, table)
        admit_parts(packed.bulk.parts)
        await self._bulk(packed.bulk, True, self._limit_s(None))
        return packed.counts()

    async def bump(self, key: Key, n: int = 1) -> int:
        """Add to the key's watermark, as Purgatory.bump does."""
        return await self._trigger(PendingCount, Op.BUMP, key, check_watermark(n))

    async def fail(self, key: Key, code: int) -> int:
        """Fail the key's operations, as Purgatory.fail does."""
        return await self._trigger(PendingCount, Op.FAIL, key, check_error(code))

    async def clear(self, key: Key) -> bool:
        """End the failed state of the key, as Purgatory.clear does."""
        return await self._trigger(PendingFound, Op.CLEAR, key)

    async def forget(self, key: Key) -> bool:
        """Forget the key's watermark, as Purgatory.forget does."""
        return await self._trigger(PendingFound, Op.FORGET, key)

    async def cancel_for_key(self, key: Key) -> list[Key]:
        """End all operations that watch `key`, as Purgatory.cancel_for_key does."""
        return await self._trigger(PendingEnded, Op.CANCEL_FOR_KEY, key)

    async def _trigger(
        self, kind: type[PendingTrigger[Found]], op: Op, key: Key, value: int = 0
    ) -> Found:
        return await self._once(prepare_trigger(await self._ready(), kind, op, key, value))

    async def _once(self, entry: Entry[PendingTrigger[Found]]) -> Found:
        limit_s = self._limit_s(None)
        admit_all([entry])
        await self._admit(entry, limit_s)
        await self._now(entry, limit_s)
        return entry.pending.outcome()

    @property
    def operations(self) -> int:
        """Number of operations of this owner that have not ended."""
        return self._owner.open

    # ---- the exchange ------------------------------------------------------------------------

    def _exchange(self) -> None:
        if not self._core.closed:
            self._owner.work()
        super()._exchange()

    def _drop(self) -> None:
        super()._drop()
        self._owner.lost(Closed("purgatory"))
        self._owner.work()


__all__ = ["AsyncOperation", "AsyncPurgatory"]

"""The asyncio client and subscriber: no thread, the caller's event loop.

ZeroMQ's descriptor tells of changes only: after every callback, and after every send, the
socket is drained until it has nothing more, or an event would be slept through.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, overload

import zmq

from purgatoryd.clients.arguments import check_limit_s, check_whole
from purgatoryd.clients.batch import Batch
from purgatoryd.clients.bulk import BulkResult, pack_cancels, pack_puts, pack_unparks
from purgatoryd.clients.bulk_loads import BulkLoad, BulkLoadStatus, StatusParts, check_bulk_load
from purgatoryd.clients.core import (
    BYE_S,
    OPEN_RETRY_S,
    QUEUE_LIMIT,
    QUEUE_LIMIT_MAX,
    BulkLoadQuestion,
    Core,
    Mode,
    Question,
)
from purgatoryd.clients.ledger import Ledger
from purgatoryd.clients.model import CancelResult, Notice, TimerInfo
from purgatoryd.clients.packing import AnyPending, Entry, Pending
from purgatoryd.clients.remote import Remote
from purgatoryd.clients.resume import Resume
from purgatoryd.clients.route import Partition
from purgatoryd.clients.session import State
from purgatoryd.clients.subscriber import RECEIVE_HWM, Inbox, Merged, Opener, unreachable
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import (
    ArenaMissing,
    ArenaNotReady,
    DaemonError,
    DaemonUnreachable,
    Lagged,
    PurgatorydError,
    QueueFull,
)
from purgatoryd.shm_layout.layout import BulkLoadAction
from purgatoryd.shm_layout.wire import BulkLoadInfo, Key

Outcome = TypeVar("Outcome", TimerInfo, CancelResult)


class AsyncHandle(Generic[Outcome]):
    """A call made with wait=False; await it or its result()."""

    __slots__ = ("_client", "_pending")

    def __init__(self, client: AsyncClient, pending: Pending) -> None:
        self._client = client
        self._pending = pending

    @property
    def done(self) -> bool:
        """True once the outcome is known."""
        return self._pending.done

    async def result(self, timeout: float | None = None) -> Outcome:
        """The outcome, as the same call with wait=True returns or raises it."""
        await self._client._await(self._pending, self._client._limit_s(timeout))
        outcome: Outcome = self._pending.outcome()  # type: ignore[attr-defined]
        return outcome

    def __await__(self) -> Generator[Any, None, Outcome]:
        return self.result().__await__()


class AsyncClient:
    """Client for asyncio: same arguments, same errors; calls of one loop iteration share a batch.

    Use it as `async with AsyncClient("name") as c`, or await close() at the end.
    """

    _resume: Resume | None = None
    """Of an owner of operations."""

    def __init__(
        self,
        name: str = "default",
        *,
        namespace: str = "default",
        timeout: float = 5.0,
        queue_limit: int = QUEUE_LIMIT,
        remote: Remote | None = None,
        durable: bool | None = False,
        ledger: Ledger | None = None,
        worker: str | None = None,
        numa_local: bool = False,
        partition: Partition | None = None,
    ) -> None:
        self.timeout = check_limit_s(timeout)
        self.queue_limit = check_whole("queue_limit", queue_limit, 1, QUEUE_LIMIT_MAX)
        self._core = Core(
            name, namespace, remote, durable, ledger, worker, numa_local, partition, self._resume
        )
        self._changed: set[asyncio.Future[None]] = set()
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- open and close ----------------------------------------------------------------------

    async def connect(self) -> Self:
        """Opens the session. Raises DaemonUnreachable."""
        self._loop = asyncio.get_running_loop()
        core = self._core
        try:
            await self._open()
            await self._until(lambda: core.session.state is not State.GREETING, "hello", None)
            if core.session.refusal is not None:
                raise core.session.refusal
        except BaseException:
            self._drop()
            raise
        return self

    async def close(self) -> None:
        """Flushes, ends the session and closes the connection; raises as flush does."""
        if self._core.closed:
            return
        self._core.check()
        try:
            await self.flush()
        finally:
            await self._hang_up()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await self.close()
        elif not self._core.closed and self._core.fork_guard.mine:
            with suppress(PurgatorydError):  # the caller's error is the one that counts
                await self.flush(timeout=BYE_S)
            await self._hang_up()

    # ---- calls -----------------------------------------------------------------------------

    @overload
    async def add(
        self, key: Key, delay: float | timedelta | None = None, *,
        delay_ns: int | None = None, deadline: datetime | None = None,
        deadline_boot_ns: int | None = None, topic: str = "default", payload: bytes = b"",
        mode: Mode = "error", wait: Literal[True] = True, timeout: float | None = None,
    ) -> TimerInfo: ...  # fmt: skip

    @overload
    async def add(
        self, key: Key, delay: float | timedelta | None = None, *,
        delay_ns: int | None = None, deadline: datetime | None = None,
        deadline_boot_ns: int | None = None, topic: str = "default", payload: bytes = b"",
        mode: Mode = "error", wait: Literal[False], timeout: float | None = None,
    ) -> AsyncHandle[TimerInfo]: ...  # fmt: skip

    async def add(
        self, key: Key, delay: float | timedelta | None = None, *,
        delay_ns: int | None = None, deadline: datetime | None = None,
        deadline_boot_ns: int | None = None, topic: str = "default", payload: bytes = b"",
        mode: Mode = "error", wait: bool = True, timeout: float | None = None,
    ) -> TimerInfo | AsyncHandle[TimerInfo]:  # fmt: skip
        """Arms a timer; arguments, result and errors are those of Client.add."""
        core, timeout = await self._ready(), self._limit_s(timeout)
        entry = core.put(
            key, delay, delay_ns, deadline, deadline_boot_ns, topic, payload, mode,
            collect=not wait,
        )  # fmt: skip
        pending = await self._pack(entry, timeout)
        if not wait:
            return AsyncHandle(self, pending)
        await self._await(pending, timeout, (pending,))
        return pending.outcome()

    @overload
    async def cancel(
        self, key: Key, *, ticket: int = 0, wait: Literal[True] = True,
        timeout: float | None = None,
    ) -> CancelResult: ...  # fmt: skip

    @overload
    async def cancel(
        self, key: Key, *, ticket: int = 0, wait: Literal[False], timeout: float | None = None
    ) -> AsyncHandle[CancelResult]: ...

    async def cancel(
        self, key: Key, *, ticket: int = 0, wait: bool = True, timeout: float | None = None
    ) -> CancelResult | AsyncHandle[CancelResult]:
        """Disarms the key's timer, as Client.cancel does."""
        core, timeout = await self._ready(), self._limit_s(timeout)
        pending = await self._pack(core.cancel(key, ticket, collect=not wait), timeout)
        if not wait:
            return AsyncHandle(self, pending)
        await self._await(pending, timeout, (pending,))
        return pending.outcome()

    async def get(self, key: Key, *, timeout: float | None = None) -> TimerInfo | None:
        """The armed timer of `key`, or None, as Client.get does."""
        core, timeout = await self._ready(), self._limit_s(timeout)
        wire.encode_key(key)
        await self._settle("get", timeout)
        question = core.question(key)
        await self._answer(question, "get", timeout)
        return question.outcome()

    async def add_many(
        self, rows: Any, *, topic: str = "default", mode: Mode = "error",
        bulk_load: BulkLoad | None = None, wait: bool = True, timeout: float | None = None,
    ) -> BulkResult:  # fmt: skip
        """Arms many timers, as Client.add_many does."""
        core, timeout = await self._ready(), self._limit_s(timeout)
        result, batches = pack_puts(core, rows, topic, mode, bulk_load)
        await self._submit(result, batches, wait, timeout)
        return result

    async def cancel_many(
        self, keys: Any, *, bulk_load: BulkLoad | None = None, timeout: float | None = None
    ) -> list[CancelResult]:
        """Disarms many timers, as Client.cancel_many does."""
        core, timeout = await self._ready(), self._limit_s(timeout)
        result, batches = pack_cancels(core, keys, bulk_load)
        await self._submit(result, batches, True, timeout)
        return result.cancels()

    async def unpark_many(
        self, rows: Iterable[tuple[Key, int, bytes]], *, bulk_load: BulkLoad | None = None,
        timeout: float | None = None,
    ) -> BulkResult:  # fmt: skip
        """Arms parked timers, as Client.unpark_many does."""
        core, timeout = await self._ready(), self._limit_s(timeout)
        result, batches = pack_unparks(core, rows, bulk_load)
        await self._submit(result, batches, True, timeout)
        return result

    # ---- bulk loads ------------------------------------------------------------------------

    async def open_bulk_load(
        self, bulk_load: bytes, fencing_token: int = 0, *, timeout: float | None = None
    ) -> BulkLoadStatus:
        """Begins a bulk load, or a run of it, as Client.open_bulk_load does."""
        await self._ask_bulk_load(bulk_load, BulkLoadAction.OPEN, timeout, fencing_token)
        return await self.bulk_load_status(bulk_load, timeout=timeout)

    async def close_bulk_load(
        self, bulk_load: bytes, fencing_token: int = 0, *, timeout: float | None = None
    ) -> None:
        """Lets no more row of a bulk load be done, as Client.close_bulk_load does."""
        await self._ask_bulk_load(bulk_load, BulkLoadAction.CLOSE, timeout, fencing_token)

    async def forget_bulk_load(self, bulk_load: bytes, *, timeout: float | None = None) -> None:
        """Frees what the daemon remembers of a bulk load, as Client.forget_bulk_load does."""
        await self._ask_bulk_load(bulk_load, BulkLoadAction.FORGET, timeout)

    async def bulk_load_status(
        self, bulk_load: bytes, *, timeout: float | None = None
    ) -> BulkLoadStatus:
        """Which rows of a bulk load are done, as Client.bulk_load_status does."""
        parts = StatusParts()
        while parts.start is not None:
            parts.take(
                await self._ask_bulk_load(
                    bulk_load, BulkLoadAction.STATUS, timeout, start=parts.start
                )
            )
        return parts.status

    async def _ask_bulk_load(
        self,
        bulk_load: bytes,
        action: BulkLoadAction,
        timeout: float | None,
        fencing_token: int = 0,
        start: int = 0,
    ) -> BulkLoadInfo:
        check_bulk_load(bulk_load, 0, fencing_token)
        core, timeout = await self._ready(), self._limit_s(timeout)
        await self._settle("bulk load", timeout)
        question = core.bulk_load_question(bulk_load, action, fencing_token, start)
        await self._answer(question, "bulk load", timeout)
        return question.outcome()

    async def _answer(
        self, question: Question | BulkLoadQuestion, subject: str, timeout: float | None
    ) -> None:
        self._schedule()
        try:
            await self._until(lambda: question.done, subject, timeout)
        finally:
            self._core.session.forget(question.query)

    def at(self, at_ns: int | None) -> None:
        """Under the virtual clock: applies later calls at virtual time `at_ns`."""
        self._core.check()
        self._core.set_time(self._core.check_time(at_ns))

    async def flush(self, *, timeout: float | None = None) -> None:
        """Returns once every call was answered; raises as Client.flush does."""
        core, timeout = await self._ready(), self._limit_s(timeout)
        await self._settle("flush", timeout)
        core.report()
        core.raise_reported()

    # ---- waiting -----------------------------------------------------------------------------

    async def _ready(self) -> Core:
        if self._loop is None:
            await self.connect()
        self._core.admit()
        return self._core

    def _limit_s(self, timeout: float | None) -> float:
        """How long a call waits. Raises InvalidArgument."""
        return check_limit_s(self.timeout if timeout is None else timeout)

    async def _pack(self, entry: Entry[AnyPending], timeout: float | None) -> AnyPending:
        await self._admit(timeout)
        self._core.packer.add(entry)
        self._schedule()
        return entry.pending

    async def _await(
        self, pending: Pending, timeout: float | None, calls: Iterable[Pending] = ()
    ) -> None:
        """As Client._await."""
        try:
            await self._until(lambda: pending.done, "call", timeout, single=True)
        except DaemonError:
            if not (self._core.abandon(calls) and pending.done):
                raise
        self._core.collected(pending)

    async def _settle(self, subject: str, timeout: float | None) -> None:
        """Waits for the answers to all that was packed until now."""
        packer = self._core.packer
        packed = packer.packed
        self._schedule()
        await self._until(lambda: packer.settled >= packed, subject, timeout)

    async def _admit(self, timeout: float | None) -> None:
        packer = self._core.packer
        if packer.queued < self.queue_limit:
            return
        try:
            await self._until(lambda: packer.queued < self.queue_limit, "add", timeout)
        except DaemonError as error:
            limit_s = self._limit_s(timeout)
            raise QueueFull(packer.queued, self.queue_limit, limit_s) from error

    async def _submit(
        self, result: BulkResult, batches: Iterable[Batch], wait: bool, timeout: float | None
    ) -> None:
        packer, unsent = self._core.packer, deque(batches)
        try:
            while unsent:
                await self._until(lambda: packer.queued < self.queue_limit, "bulk call", timeout)
                packer.bulk(unsent.popleft())
                self._schedule()
            if wait:
                await self._until(lambda: result.done, "bulk call", timeout)
                result.check()
        except DaemonError:
            if wait and not result.done:
                result.abandon(unsent)
            raise

    async def _until(
        self, done: Any, subject: str, timeout: float | None, *, single: bool = False
    ) -> None:
        """Waits until `done()`; `timeout` seconds without any answer end it, and of a `single` call
        so many seconds in which the daemon is busy."""
        core, limit_s = self._core, self._limit_s(timeout)
        answers, deadline_s = core.answers, time.monotonic() + limit_s
        while not done():
            core.give_up()
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise core.overdue(subject, limit_s)
            await self._change(remaining_s)
            core.check()
            if core.answers != answers and not (single and core.session.retries):
                answers, deadline_s = core.answers, time.monotonic() + limit_s

    async def _change(self, limit_s: float) -> None:
        """Returns after an exchange, or after `limit_s`."""
        assert self._loop is not None
        change = self._loop.create_future()
        self._changed.add(change)
        try:
            await asyncio.wait((change,), timeout=limit_s)
        finally:
            self._changed.discard(change)

    # ---- the exchange ------------------------------------------------------------------------

    async def _open(self) -> None:
        core = self._core
        deadline_s = time.monotonic() + self.timeout
        while not core.try_open():
            if time.monotonic() >= deadline_s:
                raise core.overdue("hello", self.timeout)
            await asyncio.sleep(OPEN_RETRY_S)
        assert self._loop is not None
        assert core.channel is not None
        for socket in (core.channel.socket, core.channel.monitor):
            self._loop.add_reader(int(socket.get(zmq.FD)), self._exchange)
        self._schedule()

    def _schedule(self) -> None:
        """One exchange at the end of this loop iteration, for all its calls."""
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._exchange)

    def _exchange(self) -> None:
        self._scheduled = False
        core = self._core
        if core.closed or core.channel is None:
            return
        core.packer.seal()
        core.look()
        while not core.push() and core.pull():
            pass
        core.pull()  # the last thing done to the socket is a receive that found nothing
        self._watch()
        for change in self._changed:
            if not change.done():
                change.set_result(None)

    def _watch(self) -> None:
        """While answers are pending, a timer asks for them again."""
        core = self._core
        pending = core.session.busy or core.session.state is State.GREETING
        if self._timer is not None and not pending:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and pending and self._loop is not None:
            patience_s = core.patience_s
            self._timer = self._loop.call_later(patience_s, self._overdue, patience_s, core.answers)
        if self._retry is None and self._loop is not None and core.retry_in_s is not None:
            self._retry = self._loop.call_later(core.retry_in_s, self._send_again)

    def _send_again(self) -> None:
        """The wait of calls that were refused as BUSY is over."""
        self._retry = None
        self._exchange()

    def _overdue(self, waited_s: float, answers: int) -> None:
        self._timer = None
        if self._core.closed:
            return
        if self._core.answers == answers:
            self._core.silence(waited_s)
        self._exchange()

    async def _hang_up(self) -> None:
        core = self._core
        try:
            core.session.bye()
            self._schedule()
            await self._until(lambda: core.session.state is State.CLOSED, "bye", BYE_S)
        except DaemonError:
            pass  # the daemon ends the session once the connection is gone
        finally:
            self._drop()

    def _drop(self) -> None:
        core = self._core
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        if core.channel is not None and self._loop is not None:
            for socket in (core.channel.socket, core.channel.monitor):
                self._loop.remove_reader(int(socket.get(zmq.FD)))
        core.close()


class AsyncSubscriber:
    """Subscriber for asyncio: same arguments, same promises.

    `async with AsyncSubscriber("name") as s: async for n in s: ...`
    """

    def __init__(
        self,
        name: str = "default",
        *,
        namespace: str = "default",
        topics: Collection[str] | None = None,
        high_water_mark: int = RECEIVE_HWM,
        timeout: float = 5.0,
        remote: Remote | None = None,
        ledger: Ledger | None = None,
        numa_local: bool = False,
    ) -> None:
        self._open_inbox = Opener(
            name, namespace, topics, high_water_mark, remote, ledger, numa_local
        )
        self._timeout = check_limit_s(timeout)
        self._inbox: Inbox | Merged | None = None
        self._watched: tuple[zmq.Socket[bytes], ...] = ()
        self._fds: list[int] = []
        self._news = asyncio.Event()

    async def connect(self) -> Self:
        """Returns once live: everything that fires after this arrives."""
        deadline_s = time.monotonic() + self._timeout
        while self._inbox is None:
            try:
                self._inbox = self._open_inbox()
            except (DaemonUnreachable, ArenaMissing, ArenaNotReady) as error:
                if time.monotonic() >= deadline_s:
                    self._open_inbox.close()
                    raise unreachable(self._open_inbox.name, error, self._timeout) from None
                await asyncio.sleep(OPEN_RETRY_S)
        while not self._inbox.let_in():
            if time.monotonic() >= deadline_s:
                self._inbox.close()
                raise DaemonUnreachable(self._inbox.name, self._inbox.endpoint, self._timeout)
            await asyncio.sleep(OPEN_RETRY_S)
        self._loop = asyncio.get_running_loop()
        self._watch(self._inbox.sockets)
        return self

    def _watch(self, sockets: tuple[zmq.Socket[bytes], ...]) -> None:
        """Is woken by these from now on, which are others after shards became more or fewer."""
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._watched, self._fds = sockets, [int(socket.get(zmq.FD)) for socket in sockets]
        for fd in self._fds:
            self._loop.add_reader(fd, self._news.set)

    async def get(self, timeout: float | None = None) -> Notice | None:
        """The next notice; None if none came within `timeout` seconds; as Subscriber.get."""
        timeout = None if timeout is None else check_limit_s(timeout)
        if self._inbox is None:
            await self.connect()
        assert self._inbox is not None
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            self._news.clear()
            if (found := self._inbox.peek()) is not None:
                source, item = found
                source.taken = item
                if isinstance(item, Lagged):
                    raise item
                return item
            if (sockets := self._inbox.sockets) != self._watched:
                self._watch(sockets)
                continue
            wait_s = self._inbox.patience_s
            if deadline_s is not None:
                wait_s = min(wait_s, deadline_s - time.monotonic())
            if wait_s < 0:
                return None
            await self._sleep(wait_s)

    async def _sleep(self, limit_s: float) -> None:
        """Until one of the sockets has news, or `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._news.wait()
        except TimeoutError:
            return

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Notice:
        """The next notice, however long it takes; raises as get() does."""
        while (notice := await self.get()) is None:
            pass
        return notice

    async def close(self) -> None:
        """Ends the subscription."""
        if self._inbox is not None and self._inbox.open:
            self._watch(())
            self._inbox.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

"""The asyncio client and subscriber. They run in the caller's event loop.

A subscriber that reads the arena also has a thread, which only sleeps until there are notices.

The descriptor of a ZeroMQ socket becomes readable only when the state of the socket changes. So the
socket is read until it is empty, after every callback and every send. Otherwise the loop would miss
a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

import zmq

from purgatoryd.clients import jobs, partitions, pending
from purgatoryd.clients._pack import Requests
from purgatoryd.clients.arguments import check_limit_s, check_type, check_whole
from purgatoryd.clients.bulk import Bulk, BulkResult, checked
from purgatoryd.clients.bulk_loads import BulkLoad, BulkLoadStatus, check_bulk_load
from purgatoryd.clients.calls import Kind, TimerCalls
from purgatoryd.clients.closing import AsyncClosing
from purgatoryd.clients.connection import NEVER_S, Connection
from purgatoryd.clients.core import (
    BYE_S,
    DIRECT_S,
    OPEN_RETRY_S,
    QUEUE_LIMIT,
    QUEUE_LIMIT_MAX,
    Core,
    Mode,
    check_spin,
)
from purgatoryd.clients.groups import AsyncGroupCalls, GroupJob, named
from purgatoryd.clients.items import Common, OrderKey
from purgatoryd.clients.jobs import Job, Jobs, Started, in_doubt
from purgatoryd.clients.ledger import Ledger
from purgatoryd.clients.local_channel import Transport
from purgatoryd.clients.model import CancelResult, Notice, TimerInfo
from purgatoryd.clients.notices import Batch, Notices, Taker
from purgatoryd.clients.packing import Entry, Pending
from purgatoryd.clients.pending import Selection, SweepStatus, TimerPage
from purgatoryd.clients.remote import Remote
from purgatoryd.clients.resume import Resume
from purgatoryd.clients.schedules import Backfilled, Plan, Schedule, ScheduleCalls
from purgatoryd.clients.subscriber import (
    GET_MOST,
    HWM_MAX,
    OPENS_LATER,
    RECEIVE_HWM,
    Inbox,
    Item,
    Merged,
    Next,
    Opener,
    cursor_options,
    delivered,
    unreachable,
)
from purgatoryd.clients.times import Late
from purgatoryd.shm_layout.errors import (
    Closed,
    DaemonError,
    DaemonUnreachable,
    FullGroup,
    PurgatorydError,
    QueueFull,
)
from purgatoryd.shm_layout.follower import Sleep
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import BulkLoadAction, SweepAction
from purgatoryd.shm_layout.wire import Key

Outcome = TypeVar("Outcome")
Result = TypeVar("Result")


class _NoQueue:
    """Takes the place of an engine's queue: the loop itself is the engine."""

    def put(self, _: object) -> None:
        """Do nothing."""

    def empty(self) -> bool:
        """Return True."""
        return True


class AsyncCall(Started[Result]):
    """A job, and the future that its caller awaits."""

    __slots__ = ("future",)

    def __init__(self, job: Job[Result], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(job)
        self.future: asyncio.Future[Result] = loop.create_future()

    def finish(self, result: Result | None = None, error: BaseException | None = None) -> None:
        """Note the outcome, and wake the caller unless its wait was cancelled."""
        super().finish(result, error)
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)  # type: ignore[arg-type]
        else:
            self.future.set_exception(error)


class AsyncHandle(Generic[Outcome]):
    """A call made with wait=False, or a call that was cancelled. Await it or its result()."""

    __slots__ = ("_client", "_pending")

    def __init__(self, client: AsyncClient, pending: Pending | AsyncCall[Any]) -> None:
        self._client = client
        self._pending = pending

    @property
    def done(self) -> bool:
        """True once the outcome is known."""
        return self._pending.done

    async def result(self, timeout: float | timedelta | None = None) -> Outcome:
        """Return the result or raise the error, as the same call with wait=True does.

        `timeout`: seconds, default the client's. Cancelling this coroutine cancels only the wait.
        """
        await self._client._await(self._pending, self._client._limit_s(timeout))
        outcome: Outcome = self._pending.outcome()
        return outcome

    def __await__(self) -> Generator[Any, None, Outcome]:
        return self.result().__await__()


class AsyncClient(
    TimerCalls[
        Coroutine[Any, Any, TimerInfo],
        Coroutine[Any, Any, AsyncHandle[TimerInfo]],
        Coroutine[Any, Any, CancelResult],
        Coroutine[Any, Any, AsyncHandle[CancelResult]],
    ],
    AsyncGroupCalls,
    ScheduleCalls[
        Coroutine[Any, Any, Schedule],
        Coroutine[Any, Any, Schedule | None],
        Coroutine[Any, Any, list[Schedule]],
        Coroutine[Any, Any, bool],
        Coroutine[Any, Any, int],
        Coroutine[Any, Any, Backfilled],
        Coroutine[Any, Any, list[datetime]],
    ],
    AsyncClosing,
):
    """The asyncio version of Client, with the same arguments and errors.

    Calls that are made in one iteration of the event loop share a batch. Use the client as `async
    with AsyncClient("name") as c`, or await close() at the end. The event loop waits while a call
    looks for its answer (`spin_us`); of the calls made in one iteration, at most one does.

    If the task that awaits a call is cancelled, the call either is never sent or goes on without
    its caller. If the call goes on, the CancelledError has the attribute `handle`, like the
    exceptions of Client. `asyncio.timeout` and `wait_for` raise a TimeoutError, whose `__cause__`
    is that CancelledError.
    """

    _resume: Resume | None = None
    """Lets a later process take over the session; AsyncPurgatory sets it."""

    def __init__(
        self,
        name: str = "default",
        *,
        namespace: str = "default",
        timeout: float | timedelta = 5.0,
        queue_limit: int = QUEUE_LIMIT,
        remote: Remote | None = None,
        durable: bool | None = False,
        ledger: Ledger | None = None,
        worker: str | None = None,
        numa_local: bool = False,
        transport: Transport = "auto",
        spin_us: int | None = None,
    ) -> None:
        self.timeout = check_limit_s(timeout)
        self._spin = check_spin(spin_us)
        self.queue_limit = check_whole("queue_limit", queue_limit, 1, QUEUE_LIMIT_MAX)
        self._core = Core(
            name, namespace, remote, durable, ledger, worker, numa_local, self._resume,
            transport=transport,
        )  # fmt: skip
        self._jobs = self._start()
        self._scheduled = False
        self._readers: list[int] = []
        self._listening = False
        """True once the loop watches the sockets."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = NEVER_S
        """Host time at which `_timer` wakes the loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests = Requests(_NoQueue(), None, -1)
        self._lent = False
        """True while only direct calls use the channel."""
        self._posted: tuple[Pending, asyncio.Future[None]] | None = None
        """The direct call that waits for its answer, and the future that its caller awaits. The
        calls of other tasks share a batch until this caller runs again."""
        self._watched = False
        """True while a timer of the loop watches for late answers of direct calls."""

    # ---- open and close ----------------------------------------------------------------------

    def _start(self) -> Jobs:
        return Jobs(self._core, listens=True)

    async def connect(self) -> Self:
        """Open the session. Raises DaemonUnreachable. A cancelled connect() closes the client."""
        try:
            await self._greet()
        except BaseException:
            self._drop()
            raise
        return self

    async def _greet(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._run(self._jobs.greeted(self.timeout))

    async def close(self) -> None:
        """Flush, end the session and close the connection. Raises the same errors as flush().

        It waits at most the client's `timeout` for missing answers, and at most BYE_S (0.2 s) for
        the answer to the BYE. After a cancellation it waits at most BYE_S for missing answers, and
        at most BYE_S for the answer to the BYE. A second cancellation drops the connection at once.
        """
        await self._close(self.timeout)

    async def _close(self, limit_s: float) -> None:
        if self._core.closed:
            return
        self._core.check()
        if self._loop is None:  # the client was never connected
            self._drop()
            return
        try:
            await self._run(self._jobs.closing(limit_s))
        except Closed:
            pass  # another task closes the client at the same time
        except asyncio.CancelledError:
            with suppress(PurgatorydError):
                await self._run(self._jobs.closing(BYE_S))
            raise
        finally:
            self._drop()
        self._core.raise_reported()

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
            with suppress(PurgatorydError):  # the caller's own error is raised instead
                await self._close(BYE_S)

    # ---- calls -----------------------------------------------------------------------------

    async def get(self, key: Key, *, timeout: float | timedelta | None = None) -> TimerInfo | None:
        """Return the armed timer of `key`, or None, as Client.get does."""
        core, limit_s = await self._ready(), self._limit_s(timeout)
        connection = core.of(key)
        connection.admit()
        ask = partial(core.question, connection, key)
        return await self._ask(connection, jobs.asked(connection, ask, "get", limit_s))

    async def add_many(
        self, rows: Any, *, topic: str = "default", mode: Mode = "error",
        within: float | timedelta | None = None, tag: str | None = None,
        priority: int | None = None, order_key: OrderKey | None = None, late: Late | None = None,
        unique_for: float | timedelta | None = None,
        bulk_load: BulkLoad | None = None, wait: bool = True,
        timeout: float | timedelta | None = None,
    ) -> BulkResult:  # fmt: skip
        """Arm many timers, as Client.add_many does."""
        core, limit_s = await self._ready(), self._limit_s(timeout)
        common = Common(within, tag, priority, order_key, late, unique_for)
        bulk = partitions.puts(core, rows, topic, mode, bulk_load, common)
        return await self._bulk(bulk, wait, limit_s)

    @overload
    async def cancel_many(
        self, keys: Any, *, bulk_load: BulkLoad | None = None, delivered: bool = False,
        wait: Literal[True] = True, timeout: float | timedelta | None = None,
    ) -> Sequence[CancelResult]: ...  # fmt: skip

    @overload
    async def cancel_many(
        self, keys: Any, *, bulk_load: BulkLoad | None = None, delivered: bool = False,
        wait: Literal[False], timeout: float | timedelta | None = None,
    ) -> BulkResult: ...  # fmt: skip

    async def cancel_many(
        self, keys: Any, *, bulk_load: BulkLoad | None = None, delivered: bool = False,
        wait: bool = True, timeout: float | timedelta | None = None,
    ) -> Sequence[CancelResult] | BulkResult:  # fmt: skip
        """Disarm many timers, as Client.cancel_many does."""
        core, limit_s = await self._ready(), self._limit_s(timeout)
        bulk = partitions.cancels(core, keys, bulk_load, delivered)
        result = await self._bulk(bulk, wait, limit_s)
        return result.cancels() if wait else result

    async def settle(self, result: BulkResult, *, timeout: float | timedelta | None = None) -> None:
        """Wait until every row of a bulk call has its result, as Client.settle does."""
        core, limit_s = await self._ready(), self._limit_s(timeout)
        await self._bulk(partitions.unsettled(core, result), True, limit_s, last=False)

    async def unpark_many(
        self, rows: Iterable[tuple[Key, int, bytes]], *, bulk_load: BulkLoad | None = None,
        timeout: float | timedelta | None = None,
    ) -> BulkResult:  # fmt: skip
        """Arm parked timers, as Client.unpark_many does."""
        core, limit_s = await self._ready(), self._limit_s(timeout)
        return await self._bulk(partitions.unparks(core, rows, bulk_load), True, limit_s)

    # ---- pending timers ----------------------------------------------------------------------

    async def list_timers(
        self, *, limit: int = 1000, cursor: str | None = None, payloads: bool = False,
        timeout: float | timedelta | None = None, **selection: Unpack[Selection],
    ) -> TimerPage:  # fmt: skip
        """Return a page of pending timers, as Client.list_timers does."""
        number = check_whole("limit", limit, 1, pending.LIMIT_MAX)
        check_type("payloads", payloads, bool, optional=False)
        core, limit_s = await self._ready(), self._limit_s(timeout)
        chosen = pending.check_selection(core, **selection)
        start = None if cursor is None else pending.Cursor.of(cursor)
        job = pending.listed(core, limit_s, chosen, number, start, payloads=payloads)
        return await self._ask(pending.admit(core), job)

    async def count_timers(
        self, *, timeout: float | timedelta | None = None, **selection: Unpack[Selection]
    ) -> int:
        """Return the number of pending timers, as Client.count_timers does."""
        core, limit_s = await self._ready(), self._limit_s(timeout)
        chosen = pending.check_selection(core, **selection)
        return await self._ask(pending.admit(core), pending.counted(core, limit_s, chosen))

    async def cancel_where(
        self, *, sweep_id: bytes | None = None, dry_run: bool = False, wait: bool = True,
        timeout: float | timedelta | None = None, **selection: Unpack[Selection],
    ) -> SweepStatus:  # fmt: skip
        """Cancel pending timers, as Client.cancel_where does."""
        await self._ready()
        limit_s = self._limit_s(timeout)
        return await self._sweep(
            pending.CANCEL, selection, sweep_id, dry_run=dry_run, wait=wait, limit_s=limit_s
        )

    async def reschedule_where(
        self, *, shift: float | timedelta | None = None, delay: float | timedelta | None = None,
        deadline: datetime | None = None, deadline_boot_ns: int | None = None,
        sweep_id: bytes | None = None, dry_run: bool = False, wait: bool = True,
        timeout: float | timedelta | None = None, **selection: Unpack[Selection],
    ) -> SweepStatus:  # fmt: skip
        """Move pending timers, as Client.reschedule_where does."""
        core, limit_s = await self._ready(), self._limit_s(timeout)
        change = pending.move(core, shift, delay, deadline, deadline_boot_ns)
        return await self._sweep(
            change, selection, sweep_id, dry_run=dry_run, wait=wait, limit_s=limit_s
        )

    async def sweep_status(
        self, sweep_id: bytes, *, timeout: float | timedelta | None = None
    ) -> SweepStatus:
        """Return the progress of a sweep, as Client.sweep_status does."""
        return await self._about_sweep(sweep_id, SweepAction.STATUS, timeout)

    async def stop_sweep(
        self, sweep_id: bytes, *, timeout: float | timedelta | None = None
    ) -> SweepStatus:
        """Stop a sweep, as Client.stop_sweep does."""
        return await self._about_sweep(sweep_id, SweepAction.STOP, timeout)

    async def sweeps(self, *, timeout: float | timedelta | None = None) -> list[SweepStatus]:
        """Return all sweeps, as Client.sweeps does."""
        core, limit_s = await self._ready(), self._limit_s(timeout)
        return await self._ask(pending.admit(core), pending.remembered(core, limit_s))

    async def _sweep(
        self, change: pending.Change, selection: Selection, sweep_id: bytes | None, *,
        dry_run: bool, wait: bool, limit_s: float,
    ) -> SweepStatus:  # fmt: skip
        check_type("dry_run", dry_run, bool, optional=False)
        core = self._core
        chosen = pending.check_selection(core, **selection)
        chosen_id = core.host.random_bytes(16) if sweep_id is None else pending.check_id(sweep_id)
        job = pending.swept(core, limit_s, chosen, change, chosen_id, wait=wait, dry_run=dry_run)
        return await self._ask(pending.admit(core), job)

    async def _about_sweep(
        self, sweep_id: bytes, action: SweepAction, timeout: float | timedelta | None
    ) -> SweepStatus:
        wanted = pending.check_id(sweep_id)
        core, limit_s = await self._ready(), self._limit_s(timeout)
        return await self._ask(
            pending.admit(core), pending.asked_all(core, limit_s, wanted, action)
        )

    # ---- bulk loads ------------------------------------------------------------------------

    async def open_bulk_load(
        self, bulk_load: bytes, fencing_token: int = 0, *, timeout: float | timedelta | None = None
    ) -> BulkLoadStatus:
        """Begin a bulk load or a new run of it, as Client.open_bulk_load does."""
        return await self._bulk_load(jobs.bulk_load_opened, bulk_load, fencing_token, timeout)

    async def close_bulk_load(
        self, bulk_load: bytes, fencing_token: int = 0, *, timeout: float | timedelta | None = None
    ) -> None:
        """Refuse all further rows of a bulk load, as Client.close_bulk_load does."""
        close = partial(jobs.bulk_load, BulkLoadAction.CLOSE)
        await self._bulk_load(close, bulk_load, fencing_token, timeout)

    async def forget_bulk_load(
        self, bulk_load: bytes, *, timeout: float | timedelta | None = None
    ) -> None:
        """Free the daemon's record of a bulk load, as Client.forget_bulk_load does."""
        forget = partial(jobs.bulk_load, BulkLoadAction.FORGET)
        await self._bulk_load(forget, bulk_load, 0, timeout)

    async def bulk_load_status(
        self, bulk_load: bytes, *, timeout: float | timedelta | None = None
    ) -> BulkLoadStatus:
        """Return which rows of a bulk load are done, as Client.bulk_load_status does."""
        return await self._bulk_load(jobs.bulk_load_status, bulk_load, 0, timeout)

    async def delete_cursor(self, cursor: str, *, timeout: float | timedelta | None = None) -> None:
        """Delete a cursor of this namespace, as Client.delete_cursor does."""
        core, limit_s = await self._ready(), self._limit_s(timeout)
        name = core.cursor_name(cursor)
        await self._ask(core.connections[0], jobs.cursor_deleted(core, name, limit_s))

    async def _bulk_load(
        self, job: jobs.BulkLoadJob[Result], bulk_load: bytes, fencing_token: int,
        timeout: float | timedelta | None,
    ) -> Result:  # fmt: skip
        check_bulk_load(bulk_load, 0, fencing_token)
        core, limit_s = await self._ready(), self._limit_s(timeout)
        connection = core.for_bulk_loads()
        return await self._ask(connection, job(core, bulk_load, fencing_token, limit_s))

    async def _ask_about(self, job: GroupJob[Result], timeout: float | timedelta | None) -> Result:
        limit_s, core = self._limit_s(timeout), await self._ready()
        return await self._ask(core.connections[0], job(core, limit_s))

    async def _planned(self, plan: Plan[Result], timeout: float | timedelta | None) -> Result:
        core, limit_s = await self._ready(), self._limit_s(timeout)
        connection, job = plan(core, limit_s)
        connection.admit()
        return await self._ask(connection, job)

    def at(self, at_ns: int | None) -> None:
        """Apply later calls at virtual time `at_ns`, as Client.at does."""
        self._core.check()
        self._take_back()
        self._core.set_time(self._core.check_time(at_ns))

    async def flush(self, *, timeout: float | timedelta | None = None) -> None:
        """Wait for the answers to all earlier calls, as Client.flush does."""
        core, limit_s = await self._ready(), self._limit_s(timeout)
        await self._run(self._jobs.flushed(limit_s))
        core.raise_reported()

    # ---- waiting -----------------------------------------------------------------------------

    async def _ready(self) -> Core:
        """Return the core, once it knows the partitions of the namespace. Raises Closed."""
        core = self._core
        core.check()
        if not core.connections:
            try:
                await self._greet()
            except PurgatorydError:
                self._drop()
                raise
        return core

    def _limit_s(self, timeout: float | timedelta | None) -> float:
        """Return the seconds that a call waits. Raises InvalidArgument."""
        return check_limit_s(self.timeout if timeout is None else timeout)

    async def _admit(self, entry: Entry[Any], limit_s: float) -> None:
        """Wait for space in the queue of a call's connection. Raises QueueFull."""
        connection = entry.pending.connection
        packer = connection.packer
        if packer.queued < self.queue_limit:
            return
        try:
            await self._run(jobs.space(connection, self.queue_limit, limit_s))
        except DaemonError as error:
            raise QueueFull(packer.queued, self.queue_limit, limit_s) from error

    async def _made(
        self, kind: Kind, arguments: tuple[Any, ...], wait: bool, timeout: float | timedelta | None
    ) -> Any:
        limit_s = self._limit_s(timeout)
        try:
            return await self._made_at_once(kind, arguments, wait, limit_s)
        except FullGroup as error:
            raise await self._run(named(self._core, error, limit_s)) from None

    async def _made_at_once(
        self, kind: Kind, arguments: tuple[Any, ...], wait: bool, limit_s: float
    ) -> Any:
        if wait and self._lent and self._posted is None and limit_s > DIRECT_S:
            pending = kind.pending()
            if await self._direct(kind, pending, arguments, limit_s):
                return pending.outcome()
        core = await self._ready()
        entry = kind.prepare(core, *arguments, collect=not wait)
        entry.pending.connection.admit()
        await self._admit(entry, limit_s)
        return await self._now(entry, limit_s) if wait else self._later(entry)

    async def _direct(
        self, kind: Kind, pending: Pending, arguments: tuple[Any, ...], limit_s: float
    ) -> bool:
        """Make a direct call and wait for its answer. Returns False if it was not sent."""
        core, loop = self._core, self._loop
        assert core.direct is not None
        assert loop is not None
        self._posted = posted = pending, loop.create_future()
        try:
            answered = kind.direct(core.direct, pending, limit_s, arguments)
            if answered:
                await asyncio.sleep(0)  # other tasks run between two calls of this one
            if answered or not pending.packed:
                self._end_direct(posted)
                return pending.packed
            if answered is None:
                self._watch_direct()
            else:
                self._exchange()
            await posted[1]
            if not pending.done:
                await self._run(jobs.awaited(pending, limit_s, (pending,)))
        except BaseException as error:
            if not pending.packed or pending.done:
                self._end_direct(posted)
            if pending.packed and in_doubt(error):
                vars(error)["handle"] = AsyncHandle[Any](self, pending)
            raise
        return True

    def _end_direct(self, posted: object) -> None:
        if self._posted is posted:
            self._posted = None
            self._await_outcomes()

    async def _now(self, entry: Entry[Any], limit_s: float) -> Any:
        """Pack one call, wait for its answer, and return its outcome."""
        handle: AsyncHandle[Any] = AsyncHandle(self, entry.pending)
        await self._run(jobs.single(entry, limit_s), handle)
        return entry.pending.outcome()

    def _later(self, entry: Entry[Any]) -> AsyncHandle[Any]:
        """Pack one call, and return its handle."""
        self._take_back()
        entry.pending.connection.packer.add(entry)
        self._schedule()
        return AsyncHandle(self, entry.pending)

    async def _await(self, pending: Pending | AsyncCall[Any], limit_s: float) -> None:
        if not pending.done:
            self._core.check()
            await self._run(jobs.awaited(pending, limit_s))
        if isinstance(pending, Pending):
            self._core.collected(pending)

    async def _bulk(
        self, bulk: Bulk, wait: bool, limit_s: float, *, last: bool = True
    ) -> BulkResult:
        """Submit all batches of a bulk call, as Client._bulk does."""
        job = jobs.bulk(self.queue_limit, bulk, wait, limit_s, last=last and wait)
        outcome = partial(checked, bulk.result) if wait else None
        await self._run(job, bulk.result, outcome)
        return bulk.result

    async def _run(
        self, job: Job[Result], handle: object = None,
        outcome: Callable[[], object] | None = None,
    ) -> Result:  # fmt: skip
        """Run a job, then call `outcome`, which may raise. If the caller is cancelled, the job goes
        on, and `handle` is attached to the CancelledError."""
        call = self._begin(job)
        try:
            result = await call.future
            if outcome is not None:
                outcome()
            return result
        except BaseException as error:
            if handle is not None and in_doubt(error):
                vars(error)["handle"] = handle
            raise

    async def _ask(self, connection: Connection, job: Job[Result]) -> Result:
        """Run a job that packs no record. If the caller is cancelled, attach a handle of the job to
        the CancelledError."""
        call = self._begin(job)
        call.connection = connection
        try:
            return await call.future
        except BaseException as error:
            if not isinstance(error, PurgatorydError):
                handle: AsyncHandle[Any] = AsyncHandle(self, call)
                vars(error)["handle"] = handle
            raise

    def _begin(self, job: Job[Result]) -> AsyncCall[Result]:
        """Start a job."""
        assert self._loop is not None
        self._take_back()
        call = AsyncCall(job, self._loop)
        self._jobs.begin(call)
        self._schedule()
        self._watch()  # so the call ends at its timeout even if an exception interrupts iterate()
        return call

    # ---- the exchange ------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Schedule one exchange at the end of this loop iteration, for all calls made in it."""
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._exchange)

    def _lend(self) -> None:
        """Let direct calls use the channel until _take_back(), if nothing else is to be done."""
        if not (self._lent or self._jobs.expects):
            lent = self._core.lend(self._requests, 0, self._spin)
            self._lent = lent and self._core.direct is not None
            self._requests.admit()

    def _take_back(self) -> None:
        """Let no direct call use the channel. A call without an answer goes on as a batch."""
        if not self._lent:
            return
        for connection in self._core.connections:
            connection.take_back()
        self._lent = False
        self._end_posted()

    def _end_posted(self) -> None:
        """Wake the caller of the direct call."""
        posted, self._posted = self._posted, None
        if posted is not None and not posted[1].done():
            posted[1].set_result(None)

    def _watch_direct(self) -> None:
        """Set the timer for late answers of direct calls, unless it is set."""
        if not self._watched:
            assert self._loop is not None
            self._watched = True
            self._loop.call_later(DIRECT_S, self._late, self._posted)

    def _late(self, posted: object) -> None:
        """Take back the channel if a direct call has waited since the timer was set."""
        self._watched = False
        if self._posted is not None and self._posted is posted:
            self._exchange()
        elif self._posted is not None:
            self._watch_direct()

    def _readable(self, connection: Connection) -> None:
        if self._posted is not None and connection.direct is not None:
            answered = connection.direct.collect()
            if answered:
                self._end_posted()
                self._await_outcomes()
            if answered is not False:
                return
        connection.news = True
        self._exchange()

    def _exchange(self) -> None:
        self._scheduled = False
        core = self._core
        if core.closed:
            return
        try:
            self._take_back()
            self._open()
            self._jobs.iterate()
        except (PurgatorydError, OSError) as error:
            self._jobs.advance(error)  # an error of the connection fails every call
        except BaseException:
            self._schedule()  # a signal handler raised: the next iteration does the rest
            raise
        self._sleep()
        self._watch()
        self._lend()

    def _sleep(self) -> None:
        """Let the daemon know that we wait for descriptors, unless there is something to do."""
        for connection in self._core.connections:
            channel = connection.channel
            if channel is not None and not channel.may_sleep(to_send=connection.blocked):
                connection.news = True
                self._schedule()

    def _await_outcomes(self) -> None:
        """Let the daemon announce outcomes that follow the answer of a direct call."""
        if self._core.connections[0].session.on_outcomes is not None:
            self._sleep()

    def _open(self) -> None:
        """Open the channels once the daemon is found, and let the loop watch their descriptors."""
        if self._listening or not self._core.try_open():
            return
        assert self._loop is not None
        for connection in self._core.connections:
            assert connection.channel is not None
            for fd in connection.channel.fds:
                self._readers.append(fd)
                self._loop.add_reader(fd, self._readable, connection)
        self._listening = True

    def _watch(self) -> None:
        """Set the timer for the next exchange, unless the timer is set to an earlier time."""
        wake_s = self._jobs.wake_s
        if wake_s >= self._timer_s:
            return
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = wake_s
        wait_s = max(wake_s - self._core.host.monotonic_s(), 0.0)
        self._timer = self._loop.call_later(wait_s, self._due)

    def _due(self) -> None:
        """Run the exchange that the timer was set for, and set the timer for the next exchange."""
        self._timer_s = NEVER_S
        self._exchange()

    def _drop(self) -> None:
        self._take_back()
        if self._timer is not None:
            self._timer.cancel()
        readers, self._readers = self._readers, []
        for fd in readers:
            assert self._loop is not None
            self._loop.remove_reader(fd)
        self._core.close()
        self._jobs.refuse(Closed("client"))


class AsyncSubscriber(AsyncClosing):
    """The asyncio version of Subscriber, with the same arguments and guarantees.

    `async with AsyncSubscriber("name") as s: async for n in s: ...`
    """

    def __init__(
        self,
        name: str = "default",
        *,
        namespace: str = "default",
        topics: Collection[str] | None = None,
        high_water_mark: int = RECEIVE_HWM,
        timeout: float | timedelta = 5.0,
        remote: Remote | None = None,
        ledger: Ledger | None = None,
        numa_local: bool = False,
        transport: str = "auto",
        cursor: str | None = None,
        auto_commit: bool = False,
        durable: bool | None = False,
    ) -> None:
        self._timeout = check_limit_s(timeout)
        self._open_inbox = Opener(
            name, namespace, topics, high_water_mark, remote, ledger, numa_local, transport,
            cursor_options(cursor, auto_commit, durable, self._timeout, transport),
        )  # fmt: skip
        self._cursor, self._auto_commit = cursor, auto_commit
        self._inbox: Inbox | Merged | None = None
        self._watched: tuple[zmq.Socket[bytes], ...] = ()
        self._fds: list[int] = []
        self._news = asyncio.Event()
        self._looking = asyncio.Lock()
        """Lock that lets one task at a time look for notices or sleep. Another task that looks
        would replace the values that the sleep compares with the words in shared memory."""
        self._sleeper: ThreadPoolExecutor | None = None
        self._sleeping: Sleep | None = None
        """The words of the last sleep."""
        self._batch: Batch | None = None

    async def connect(self) -> Self:
        """Subscribe. Once this call has returned, the notice of every timer that fires arrives."""
        if self._inbox is not None:
            return self
        deadline_s = HOST.monotonic_s() + self._timeout
        inbox = await self._opened(deadline_s)
        try:
            while not inbox.let_in():
                if HOST.monotonic_s() >= deadline_s:
                    raise DaemonUnreachable(inbox.name, inbox.endpoint, self._timeout)
                await asyncio.sleep(OPEN_RETRY_S)
        except BaseException:
            inbox.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._watch(inbox.sockets)
        self._inbox = inbox
        return self

    async def _opened(self, deadline_s: float) -> Inbox | Merged:
        try:
            while True:
                left_s = deadline_s - HOST.monotonic_s()
                late = self._timeout > 0 and left_s < self._timeout / 2
                try:
                    if self._cursor is None:
                        return self._open_inbox(late=late)
                    return await asyncio.to_thread(self._open_inbox, late=late)
                except OPENS_LATER as error:
                    if left_s <= 0:
                        raise unreachable(self._open_inbox.name, error, self._timeout) from None
                await asyncio.sleep(OPEN_RETRY_S)
        except BaseException:
            self._open_inbox.close()
            raise

    def _watch(self, sockets: tuple[zmq.Socket[bytes], ...]) -> None:
        """Let the loop watch these sockets. They change when the number of shards changes.

        If an exception interrupts this call, get() repeats it.
        """
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._fds = [int(socket.get(zmq.FD)) for socket in sockets]
        for fd in self._fds:
            self._loop.add_reader(fd, self._news.set)
        self._watched = sockets

    async def get(self, timeout: float | timedelta | None = None) -> Notice | None:
        """Return the next notice, as Subscriber.get does; None if none came within `timeout`
        seconds.

        If get() is cancelled, the next get() returns the notice.
        """
        found = await self._await(lambda inbox: inbox.peek(), timeout)
        if found is None:
            return None
        source, item = found
        # No signal handler runs between the two statements, so an item counts as taken only if it
        # is returned.
        source.taken = item; return item  # noqa: E702  # fmt: skip

    async def get_many(
        self, most: int = GET_MOST, timeout: float | timedelta | None = None
    ) -> Notices | None:
        """Return the next notices as columns, as Subscriber.get_many does.

        If get_many() is cancelled, the next call returns the notices.
        """
        most = check_whole("most", most, 1, HWM_MAX)
        found = await self._await(lambda inbox: inbox.peek_many(most), timeout)
        if found is None:
            return None
        source, item = found
        source.taken = item; return item  # noqa: E702  # fmt: skip

    async def commit(self) -> None:
        """Commit all notices that were handed out to the cursor, as Subscriber.commit does.

        A cancelled commit() may have taken effect.
        """
        if self._inbox is None:
            await self.connect()
        assert self._inbox is not None
        committed = asyncio.ensure_future(asyncio.to_thread(self._inbox.commit))
        try:
            await asyncio.shield(committed)
        except asyncio.CancelledError:
            await asyncio.wait([committed])  # the thread uses the inbox until then
            raise

    async def _await(
        self, look: Callable[[Inbox | Merged], Next[Item] | None], timeout: float | timedelta | None
    ) -> tuple[Taker, Item] | None:
        """Return (source, next item that `look` finds), or raise its Lagged."""
        limit_s = None if timeout is None else check_limit_s(timeout)
        if self._inbox is None:
            await self.connect()
        assert self._inbox is not None
        if self._auto_commit:
            await self.commit()
        deadline_s = None if limit_s is None else HOST.monotonic_s() + limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self._looking.acquire()
        except TimeoutError:
            return None
        try:
            return await self._next(self._inbox, look, deadline_s)
        finally:
            self._looking.release()

    async def _next(
        self, inbox: Inbox | Merged, look: Callable[[Inbox | Merged], Next[Item] | None],
        deadline_s: float | None,
    ) -> tuple[Taker, Item] | None:  # fmt: skip
        """Return (source, next item that `look` finds); None if none came before the deadline."""
        while True:
            self._news.clear()
            if (found := look(inbox)) is not None:
                return delivered(*found)
            if (sockets := inbox.sockets) != self._watched:
                self._watch(sockets)
                continue
            wait_s = inbox.patience_s
            if deadline_s is not None:
                wait_s = min(wait_s, deadline_s - HOST.monotonic_s())
            if wait_s < 0:
                return None
            await self._sleep(wait_s)

    async def _sleep(self, limit_s: float) -> None:
        """Wait until peek() may find something, at most `limit_s` seconds."""
        assert self._inbox is not None
        sleep = self._sleeping = self._inbox.sleep
        if sleep is None:
            await self._sleep_on_sockets(limit_s)
            return
        if self._sleeper is None:
            self._sleeper = ThreadPoolExecutor(1, "purgatoryd-sleeper")
        slept = self._sleeper.submit(self._inbox.wait, limit_s)
        try:
            await asyncio.wrap_future(slept)
        finally:
            sleep.end()
            wait([slept])  # the thread uses the words until then

    async def _sleep_on_sockets(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._news.wait()
        except TimeoutError:
            return

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Notice:
        """Return the next notice, however long it takes. Raises the same errors as get()."""
        batch = self._batch
        if batch is None or not batch.left:
            batch = self._batch = await self._next_batch()
        elif self._inbox is not None:
            self._inbox.check()
        notice = batch.notices[batch.handed]
        batch.handed += 1; return notice  # noqa: E702  # fmt: skip

    async def _next_batch(self) -> Batch:
        most = self._open_inbox.iterated
        while (found := await self._await(lambda inbox: inbox.peek_many(most), None)) is None:
            pass
        source, notices = found
        source.taken = batch = Batch(source, notices)
        return batch

    async def close(self) -> None:
        """End the subscription."""
        if self._inbox is not None and self._inbox.open:
            self._watch(())
            if self._sleeping is not None:
                self._sleeping.end()  # another task may be in get()
            if self._sleeper is not None:
                self._sleeper.shutdown()
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

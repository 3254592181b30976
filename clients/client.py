"""The blocking client: thread-safe, one connection, one session.

Calls check their arguments in the caller's thread; one thread of the client, the engine, packs,
sends and receives. Calls with wait=False are collected in a batch. It is sent when it is full, when
an earlier batch is answered, or after FLUSH_S.

If a signal handler or Ctrl-C interrupts a call, it either never reached the engine or is in doubt.
In doubt, the exception has the attribute `handle`, which gives the outcome later. engine.py says
how to make a new call safe.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, overload

from purgatoryd.clients import jobs, partitions
from purgatoryd.clients.arguments import check_limit_s, check_whole
from purgatoryd.clients.bulk import Bulk, BulkResult, checked, checked_cancels, unchecked
from purgatoryd.clients.bulk_loads import BulkLoad, BulkLoadStatus, check_bulk_load
from purgatoryd.clients.calls import Prepare, TimerCalls
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import (
    BYE_S,
    QUEUE_LIMIT,
    QUEUE_LIMIT_MAX,
    Core,
    Mode,
)
from purgatoryd.clients.engine import Call, Engine
from purgatoryd.clients.jobs import Job, in_doubt
from purgatoryd.clients.ledger import Ledger
from purgatoryd.clients.model import CancelResult, TimerInfo
from purgatoryd.clients.packing import Entry, Pending
from purgatoryd.clients.remote import Remote
from purgatoryd.clients.resume import Resume
from purgatoryd.shm_layout.errors import (
    Closed,
    DaemonError,
    PurgatorydError,
    QueueFull,
)
from purgatoryd.shm_layout.layout import BulkLoadAction
from purgatoryd.shm_layout.wire import Key

Outcome = TypeVar("Outcome")
T = TypeVar("T")


class Waiter(Protocol):
    """A client that waits for its calls."""

    def _limit_s(self, timeout: float | None) -> float: ...

    def _await(self, pending: Pending | Call[Any], limit_s: float) -> None: ...


class Handle(Generic[Outcome]):
    """A call made with wait=False, or one that was interrupted: result() waits for its outcome."""

    __slots__ = ("_client", "_pending")

    def __init__(self, client: Waiter, pending: Pending | Call[Any]) -> None:
        self._client = client
        self._pending = pending

    @property
    def done(self) -> bool:
        """True once the outcome is known."""
        return self._pending.done

    def result(self, timeout: float | None = None) -> Outcome:
        """Waits for the outcome and returns what the same call with wait=True returns.

        `timeout`: seconds, default the client's. Raises Refused or DaemonError.
        """
        self._client._await(self._pending, self._client._limit_s(timeout))
        outcome: Outcome = self._pending.outcome()
        return outcome


class Client(TimerCalls[TimerInfo, Handle[TimerInfo], CancelResult, Handle[CancelResult]]):
    """A connection to the daemon `name`.

    `namespace`: where this client's keys and topics live, 1-63 bytes. `timeout`: seconds that
    a call waits for its answer; for flush and the bulk calls, seconds without any answer.
    `queue_limit`: how many packed calls may wait before add(wait=False) blocks. `remote`: where
    the daemon is, if it is on another host. `durable`: each call is answered once the daemon's
    WAL has it on disk; it raises NoWal if the daemon keeps none, and NotDurable if the
    WAL stopped meanwhile; None = so if the daemon keeps one. `ledger`: notes what is
    acknowledged. `worker`: what the WAL, and with it the pipeline, calls this client, up to 63
    bytes; otherwise that is its uid and pid.
    `numa_local`: moves this process, with all its threads, to CPUs near the daemon's: of its NUMA
    node, without the core of its loop. No thread gets CPUs that it did not have; one that has none
    there stays where it is.

    An interrupt of a call, such as Ctrl-C, leaves the client usable. If the call may have been
    sent, the exception has the attribute `handle`: the Handle, BulkResult or Operation of the call,
    which still gets its outcome. CallTimeout and DaemonUnreachable of a call that packs records
    have `handle` as well. An interrupted flush, settle, at or close has none: repeat it.

    Raises DaemonUnreachable if no daemon answers within `timeout`; InvalidName.
    """

    _resume: Resume | None = None
    """Lets the daemon keep this session for a later process; Purgatory sets it."""

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
    ) -> None:
        self.timeout = check_limit_s(timeout)
        self.queue_limit = check_whole("queue_limit", queue_limit, 1, QUEUE_LIMIT_MAX)
        self._core = Core(
            name, namespace, remote, durable, ledger, worker, numa_local, self._resume
        )
        self._engine = self._start()
        weakref.finalize(self, self._engine.end).atexit = False
        try:
            self._engine.start()
            self._engine.call(self._engine.greeted(self.timeout))
        except BaseException:
            self._engine.end()
            raise

    def _start(self) -> Engine:
        return Engine(self._core)

    @property
    def name(self) -> str:
        """The daemon's name."""
        return self._core.name

    @property
    def namespace(self) -> str:
        """Where this client's keys and topics live."""
        return self._core.namespace

    @property
    def daemon(self) -> bytes:
        """The uuid of the daemon's arena: tickets are of it alone. As the session began."""
        return self._core.daemon

    @property
    def virtual(self) -> bool:
        """True if the daemon runs under the virtual clock."""
        return bool(self._core.clock)

    # ---- calls -----------------------------------------------------------------------------

    def get(self, key: Key, *, timeout: float | None = None) -> TimerInfo | None:
        """The armed timer of `key` with its payload, or None. Raises Denied, DaemonError.

        Sees the effect of every earlier call of this client, packed ones included.
        """
        core, limit_s = self._core, self._limit_s(timeout)
        core.check()
        connection = core.of(key)
        connection.admit()
        ask = partial(core.question, connection, key)
        return self._ask(connection, jobs.asked(connection, ask, "get", limit_s))

    def add_many(
        self, rows: Any, *, topic: str = "default", mode: Mode = "error",
        bulk_load: BulkLoad | None = None, wait: bool = True, timeout: float | None = None,
    ) -> BulkResult:  # fmt: skip
        """Arms many timers; each row succeeds or is refused by itself.

        `rows`: dicts with the arguments of add, tuples (key, delay[, topic[, payload]]), or
        columns: a dict of lists or numpy arrays, an Arrow table or record batch, with columns
        key, one of delay / delay_ns / deadline / deadline_boot_ns, and topic and payload if
        wanted. `topic` is for rows without one. `bulk_load`: these are rows of a bulk load, each of
        which is done once; one that was done before gets the status BULK_LOADED. With wait=False it
        returns as soon as all rows are packed. Rows that the daemon refuses as BUSY are sent again,
        in order, until `timeout`. Raises InvalidArgument before anything is sent, Busy with the
        rows that were not done, DaemonError.
        """
        limit_s = self._limit_s(timeout)
        bulk = partitions.puts(self._core, rows, topic, mode, bulk_load)
        return self._bulk(bulk, limit_s, checked if wait else unchecked, wait=wait)

    @overload
    def cancel_many(
        self, keys: Any, *, bulk_load: BulkLoad | None = None, wait: Literal[True] = True,
        timeout: float | None = None,
    ) -> list[CancelResult]: ...  # fmt: skip

    @overload
    def cancel_many(
        self, keys: Any, *, bulk_load: BulkLoad | None = None, wait: Literal[False],
        timeout: float | None = None,
    ) -> BulkResult: ...  # fmt: skip

    def cancel_many(
        self, keys: Any, *, bulk_load: BulkLoad | None = None, wait: bool = True,
        timeout: float | None = None,
    ) -> list[CancelResult] | BulkResult:  # fmt: skip
        """Disarms many timers; `keys`: a list, a numpy array, an Arrow array.

        `bulk_load`: these keys are of rows of a bulk load that has begun: an add of such a row
        which comes later gets the status BULK_LOADED and adds nothing. Returns what each cancel
        found; with wait=False the BulkResult, once all is packed. Raises Refused, DaemonError.
        """
        limit_s = self._limit_s(timeout)
        bulk = partitions.cancels(self._core, keys, bulk_load)
        outcome: Callable[[BulkResult], list[CancelResult] | BulkResult] = (
            checked_cancels if wait else unchecked
        )
        return self._bulk(bulk, limit_s, outcome, wait=wait)

    def settle(self, result: BulkResult, *, timeout: float | None = None) -> None:
        """Returns once `result`, of a bulk call with wait=False, is done. Raises DaemonError."""
        limit_s = self._limit_s(timeout)
        self._bulk(partitions.unsettled(self._core, result), limit_s, checked, last=False)

    def unpark_many(
        self, rows: Iterable[tuple[Key, int, bytes]], *, bulk_load: BulkLoad | None = None,
        timeout: float | None = None,
    ) -> BulkResult:  # fmt: skip
        """Arms parked timers: (key, ticket, payload) of each, the payload as it was added.

        UNPARKED: the timer is armed, with the ticket, topic and deadline that it had; one that
        was due meanwhile fires at once. UNKNOWN: it is not parked any more under this ticket, and
        nothing was changed. `bulk_load` as in add_many. Raises InvalidArgument before anything is
        sent, DaemonError.
        """
        limit_s = self._limit_s(timeout)
        return self._bulk(partitions.unparks(self._core, rows, bulk_load), limit_s, checked)

    # ---- bulk loads ------------------------------------------------------------------------

    def open_bulk_load(
        self, bulk_load: bytes, fencing_token: int = 0, *, timeout: float | None = None
    ) -> BulkLoadStatus:
        """Begins a bulk load in this namespace, or run `fencing_token` of it, which shuts out lower
        ones.

        add_many begins a bulk load by itself; this claims it before the first row, and says how far
        it is, as bulk_load_status does. A bulk load belongs to the uid that began it. Raises
        InvalidArgument, MessageRefused (FENCED, DENIED, BULK_LOADS_FULL, BUSY), DaemonError.
        """
        return self._bulk_load(jobs.bulk_load_opened, bulk_load, fencing_token, timeout)

    def close_bulk_load(
        self, bulk_load: bytes, fencing_token: int = 0, *, timeout: float | None = None
    ) -> None:
        """From now on no row of the bulk load is done any more: those that were not get CLOSED.

        What was added stays. Raises as open_bulk_load does.
        """
        close = partial(jobs.bulk_load, BulkLoadAction.CLOSE)
        self._bulk_load(close, bulk_load, fencing_token, timeout)

    def forget_bulk_load(self, bulk_load: bytes, *, timeout: float | None = None) -> None:
        """Frees what the daemon remembers of a bulk load; its timers stay.

        A row that is sent again afterwards is added again. Raises as open_bulk_load does.
        """
        forget = partial(jobs.bulk_load, BulkLoadAction.FORGET)
        self._bulk_load(forget, bulk_load, 0, timeout)

    def bulk_load_status(self, bulk_load: bytes, *, timeout: float | None = None) -> BulkLoadStatus:
        """Which rows of a bulk load are done. Raises as open_bulk_load does.

        Sees the effect of every earlier call of this client, packed ones included.
        """
        return self._bulk_load(jobs.bulk_load_status, bulk_load, 0, timeout)

    def _bulk_load(
        self, job: jobs.BulkLoadJob[T], bulk_load: bytes, fencing_token: int, timeout: float | None
    ) -> T:
        check_bulk_load(bulk_load, 0, fencing_token)
        limit_s = self._limit_s(timeout)
        connection = self._core.for_bulk_loads()
        return self._ask(connection, job(self._core, bulk_load, fencing_token, limit_s))

    def at(self, at_ns: int | None) -> None:
        """Under the virtual clock: applies later calls at virtual time `at_ns`.

        The daemon goes to that time first. None ends it. Raises InvalidTime.
        """
        self._core.check()
        self._engine.put(partial(self._core.set_time, self._core.check_time(at_ns)))

    def flush(self, *, timeout: float | None = None) -> None:
        """Returns once every call made before this one was answered.

        Raises BatchError if packed calls were refused and nobody looked at their handles;
        DaemonError if no answer came for `timeout` seconds.
        """
        core, limit_s = self._core, self._limit_s(timeout)
        core.check()
        self._engine.call(self._engine.flushed(limit_s))
        core.raise_reported()

    # ---- open and close ----------------------------------------------------------------------

    def close(self) -> None:
        """Flushes, ends the session and closes the connection; raises as flush does.

        It waits at most the client's `timeout` for missing answers and BYE_S (0.2 s) for the BYE.
        An interrupted close() may not have begun: call it again. Without close(), calls that were
        packed and not sent are lost at the end of the process.
        """
        self._close(self._limit_s(None))

    def _close(self, limit_s: float) -> None:
        self._end_close(self._begin_close(limit_s), limit_s)

    def _begin_close(self, limit_s: float) -> Call[None] | None:
        if self._core.closed:
            return None
        self._core.check()
        call = Call(self._engine.closing(limit_s))
        self._engine.put(call, urgent=True)
        return call

    def _end_close(self, call: Call[None] | None, limit_s: float) -> None:
        if call is None:
            return
        try:
            self._engine.wait(call)
        except Closed:
            pass  # another thread closes it at the same time
        except PurgatorydError:
            self._left(limit_s)
            raise
        self._left(limit_s)
        self._core.raise_reported()

    def _left(self, limit_s: float) -> None:
        """Wait for the threads of a closing client."""
        self._engine.join(BYE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif self._core.fork_guard.mine:
            with suppress(PurgatorydError):  # the caller's error is the one that counts
                self._close(BYE_S)

    # ---- requests ----------------------------------------------------------------------------

    def _limit_s(self, timeout: float | None) -> float:
        """Seconds that a call waits. Raises InvalidArgument."""
        return check_limit_s(self.timeout if timeout is None else timeout)

    def _made(self, prepare: Prepare, wait: bool, timeout: float | None) -> Any:
        limit_s = self._limit_s(timeout)
        entry = prepare(self._core)
        return self._now(entry, limit_s) if wait else self._later(entry, limit_s)

    def _now(self, entry: Entry[Any], limit_s: float) -> Any:
        """Packs one call, waits for its answer, and returns its outcome."""
        handle: Handle[Any] = Handle(self, entry.pending)
        return self._run(jobs.single(entry, limit_s), entry.pending.outcome, handle)

    def _later(self, entry: Entry[Any], limit_s: float) -> Handle[Any]:
        """Packs one call, once there is space for it."""
        connection = entry.pending.connection
        if self._engine.queued(connection) >= self.queue_limit:
            self._await_space(connection, limit_s)
        handle: Handle[Any] = Handle(self, entry.pending)
        try:
            self._engine.put(partial(connection.packer.add, entry))
            return handle
        except BaseException as error:
            packed = partial(self._engine.knows, lambda: entry.pending.packed)
            self._engine.leave_handle(error, handle, packed)
            raise

    def _run(self, job: Job[None], outcome: Callable[[], T], handle: object) -> T:
        """Wait for a job and return its outcome. An exception that interrupts it gets `handle`."""
        call = Call(job)
        try:
            self._engine.run(call)
            return outcome()
        except BaseException as error:
            if in_doubt(error):
                self._engine.leave_handle(error, handle, lambda: self._engine.begun(call))
            raise

    def _ask(self, connection: Connection, job: Job[T]) -> T:
        """Wait for a job that packs no record, and return its outcome. An exception that interrupts
        it gets a handle of the job."""
        call = Call(job)
        call.connection = connection
        handle: Handle[T] = Handle(self, call)
        return self._engine.report(call, handle)

    def _await_space(self, connection: Connection, limit_s: float) -> None:
        try:
            self._engine.call(jobs.space(connection, self.queue_limit, limit_s))
        except DaemonError as error:
            queued = self._engine.queued(connection)
            raise QueueFull(queued, self.queue_limit, limit_s) from error

    def _await(self, pending: Pending | Call[Any], limit_s: float) -> None:
        if not pending.done:
            self._core.check()
            self._engine.call(jobs.awaited(pending, limit_s))
        if isinstance(pending, Pending):
            self._core.collected(pending)

    def _bulk(
        self, bulk: Bulk, limit_s: float, outcome: Callable[[BulkResult], T], *,
        wait: bool = True, last: bool = True,
    ) -> T:  # fmt: skip
        """Submit the batches of a bulk call as the queue has space; return `outcome` of its result.

        `last`: this call alone waits for the result, so at the timeout busy rows are abandoned.
        """
        job = jobs.bulk(self.queue_limit, bulk, wait, limit_s, last=last and wait)
        return self._run(job, partial(outcome, bulk.result), bulk.result)

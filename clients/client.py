"""The blocking client: thread-safe, with one session for each partition of its namespace.

Calls check their arguments in the caller's thread. One thread of the client, the engine, packs,
sends and receives. Callers pack calls with wait=False into a lot. The engine sends the lot when it
is full, when an earlier batch is answered, or after FLUSH_S. Callers also send
messages themselves, while the engine is idle (pack/direct.c).

If a signal handler or Ctrl-C interrupts a call, either the call never reached the engine, or its
outcome is in doubt. In the second case the exception has the attribute `handle`, which gives the
outcome later. engine.py describes how calls are made safe.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar, Unpack, overload

from purgatoryd.clients import _pack, jobs, partitions, pending
from purgatoryd.clients.arguments import check_limit_s, check_type, check_whole
from purgatoryd.clients.bulk import (
    Bulk,
    BulkResult,
    checked,
    checked_cancels,
    send_direct,
    unchecked,
)
from purgatoryd.clients.calls import Kind, TimerCalls
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import (
    BYE_S,
    QUEUE_LIMIT,
    QUEUE_LIMIT_MAX,
    Core,
    Mode,
    check_spin,
)
from purgatoryd.clients.engine import Call, Engine
from purgatoryd.clients.groups import GroupCalls, GroupJob, named
from purgatoryd.clients.items import Common, OrderKey
from purgatoryd.clients.jobs import Job, in_doubt
from purgatoryd.clients.local_channel import Transport
from purgatoryd.clients.lots import Lot
from purgatoryd.clients.model import CancelResult, TimerInfo
from purgatoryd.clients.packing import Entry, Pending
from purgatoryd.clients.pending import Selection, SweepStatus, TimerPage
from purgatoryd.clients.schedules import Backfilled, Plan, Schedule, ScheduleCalls
from purgatoryd.clients.times import Late
from purgatoryd.shm_layout.errors import (
    Closed,
    DaemonError,
    FullGroup,
    PurgatorydError,
    QueueFull,
)
from purgatoryd.shm_layout.layout import BulkLoadAction, SweepAction
from purgatoryd.shm_layout.wire import Key

if TYPE_CHECKING:
    from purgatoryd.clients.bulk_loads import BulkLoad, BulkLoadStatus
    from purgatoryd.clients.ledger import Ledger
    from purgatoryd.clients.remote import Remote
    from purgatoryd.clients.resume import Resume

Outcome = TypeVar("Outcome")
T = TypeVar("T")


class Waiter(Protocol):
    """A client that can wait for the outcome of its calls."""

    def _limit_s(self, timeout: float | timedelta | None) -> float: ...

    def _await(self, pending: Pending | Call[Any], limit_s: float) -> None: ...


class Handle(_pack.Receipt, Generic[Outcome]):
    """A call made with wait=False, or an interrupted call. result() waits for its outcome."""

    __slots__ = ()

    def __init__(self, client: Waiter, pending: Pending | Call[Any]) -> None:
        super().__init__(client, pending)

    @property
    def done(self) -> bool:
        """True once the outcome is known."""
        done: bool = self._pending.done
        return done

    def result(self, timeout: float | timedelta | None = None) -> Outcome:
        """Wait for the outcome. Return the result or raise the error, as with wait=True.

        `timeout`: seconds, default the client's. Raises Refused, DaemonError.
        """
        pending = self._pending
        self._client._await(pending, self._client._limit_s(timeout))
        outcome: Outcome = pending.outcome()
        return outcome


class Client(
    _pack.Caller,
    TimerCalls[TimerInfo, Handle[TimerInfo], CancelResult, Handle[CancelResult]],
    GroupCalls,
    ScheduleCalls[Schedule, Schedule | None, list[Schedule], bool, int, Backfilled, list[datetime]],
):
    """A client of the daemon `name`.

    `namespace`: namespace of this client's keys and topics, 1 to 63 bytes. `timeout`: seconds that
    a call waits for its answer; in flush() and the bulk calls each answer restarts this time.
    `queue_limit`: add(wait=False) blocks once this number of packed calls for a partition have no
    answer. `remote`: address and keys of a daemon on another host.

    `durable`: with True a call is answered once the daemon has written it to its WAL on disk. The
    call raises NoWal if the daemon has no WAL, and NotDurable if the WAL has stopped in the
    meantime. None = durable if the daemon has a WAL. `ledger`: stores the acknowledged calls.
    `worker`: name of this client in the WAL and in the pipeline, up to 63 bytes; default uid and
    pid. `numa_local`: move all threads of this process to CPUs of the daemon's NUMA node, except
    the core of the daemon's loop. A thread never gets additional CPUs. A thread that may use none
    of those CPUs stays where it is. `transport`: "ring" = shared memory, which needs the daemon on
    this host; "zmq" = ZeroMQ; "auto" = shared memory if the daemon grants it, else ZeroMQ.
    `spin_us`: microseconds, up to 1000, that add(), cancel() and get() look for their answer in
    shared memory before they sleep. Spinning occupies a CPU and saves the wake-up of the caller.
    None = 50, but if spins seldom find the answer, most calls sleep at once.

    The namespace may have any number of partitions. A call goes to the shard that has its key, and
    the results of a bulk call are in the order of its rows. While a shard does not answer, calls
    for its keys raise ShardUnavailable. A bulk call first completes in the other shards, and then
    raises that error.

    An interrupt of a call, such as Ctrl-C, leaves the client usable. If the call may have been
    sent, the exception has the attribute `handle`: the Handle, BulkResult or Operation of the call,
    which still receives the outcome. CallTimeout and DaemonUnreachable of a call that packs
    records, and ShardUnavailable of a bulk call that was sent to other shards, have `handle` as
    well. If flush, settle, at or close is interrupted, there is no `handle`, so repeat the call.

    Raises DaemonUnreachable if no daemon answers within `timeout`; InvalidName; Partitioned if the
    number of partitions has changed since the client was opened; RingsRefused with
    transport="ring".
    """

    _resume: Resume | None = None
    """Lets a later process take over the session; Purgatory sets it."""

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
        self.queue_limit = check_whole("queue_limit", queue_limit, 1, QUEUE_LIMIT_MAX)
        self._spin = check_spin(spin_us)
        self._core = Core(
            name, namespace, remote, durable, ledger, worker, numa_local, self._resume,
            transport=transport,
        )  # fmt: skip
        self._engine = self._start()
        weakref.finalize(self, self._engine.end).atexit = False
        try:
            self._engine.start()
            self._engine.call(self._engine.greeted(self.timeout))
        except BaseException:
            self._engine.end()
            raise

    def _start(self) -> Engine:
        return Engine(self._core, spin=self._spin)

    @property
    def name(self) -> str:
        """Name of the daemon."""
        return self._core.name

    @property
    def namespace(self) -> str:
        """Namespace of this client's keys and topics."""
        return self._core.namespace

    @property
    def daemon(self) -> bytes:
        """The uuid of the arena that issues this client's tickets, as the daemon sent it when the
        session began. Raises Partitioned if the namespace has several partitions, because each
        shard has an arena of its own."""
        return self._core.daemon

    @property
    def virtual(self) -> bool:
        """True if the daemon runs under the virtual clock."""
        return bool(self._core.clock)

    # ---- calls -----------------------------------------------------------------------------

    def get(self, key: Key, *, timeout: float | timedelta | None = None) -> TimerInfo | None:
        """Return the armed timer of `key` with its payload, or None. Raises Denied, DaemonError.

        The answer includes the effects of all earlier calls of this client, even of packed calls.
        """
        core, limit_s = self._core, self._limit_s(timeout)
        if core.direct is not None and (reply := core.direct.get(limit_s, key)) is not None:
            return core.found(key, reply)
        core.check()
        connection = core.of(key)
        connection.admit()
        ask = partial(core.question, connection, key)
        return self._ask(connection, jobs.asked(connection, ask, "get", limit_s))

    def add_many(
        self, rows: Any, *, topic: str = "default", mode: Mode = "error",
        within: float | timedelta | None = None, tag: str | None = None,
        priority: int | None = None, order_key: OrderKey | None = None, late: Late | None = None,
        unique_for: float | timedelta | None = None,
        bulk_load: BulkLoad | None = None, wait: bool = True,
        timeout: float | timedelta | None = None,
    ) -> BulkResult:  # fmt: skip
        """Arm many timers. Each row succeeds or is refused independently of the others.

        `rows`: dicts with the arguments of add(), tuples (key, delay[, topic[, payload]]), or
        columns: a dict of lists or numpy arrays, an Arrow table or record batch. The columns are
        key, one of delay / delay_ns / deadline / deadline_boot_ns, and optionally topic, payload,
        within, tag, priority, order_key, late and unique_for. `topic`, `within`, `tag`,
        `priority`, `order_key`, `late`, `unique_for`: those of rows that have none.

        `bulk_load`: the bulk load that the rows belong to. Each row of a bulk load takes effect
        once: a row that is already done gets the status BULK_LOADED.

        Returns the results of all rows; with wait=False it returns as soon as all rows are packed.
        Rows that the daemon refuses as BUSY are sent again, in order, until `timeout`. Raises
        InvalidArgument (before anything is sent), Busy (with the rows that were refused),
        DaemonError.
        """
        limit_s = self._limit_s(timeout)
        common = Common(within, tag, priority, order_key, late, unique_for)
        bulk = partitions.puts(self._core, rows, topic, mode, bulk_load, common)
        return self._bulk(bulk, limit_s, checked if wait else unchecked, wait=wait)

    @overload
    def cancel_many(
        self, keys: Any, *, bulk_load: BulkLoad | None = None, delivered: bool = False,
        wait: Literal[True] = True, timeout: float | timedelta | None = None,
    ) -> Sequence[CancelResult]: ...  # fmt: skip

    @overload
    def cancel_many(
        self, keys: Any, *, bulk_load: BulkLoad | None = None, delivered: bool = False,
        wait: Literal[False], timeout: float | timedelta | None = None,
    ) -> BulkResult: ...  # fmt: skip

    def cancel_many(
        self, keys: Any, *, bulk_load: BulkLoad | None = None, delivered: bool = False,
        wait: bool = True, timeout: float | timedelta | None = None,
    ) -> Sequence[CancelResult] | BulkResult:  # fmt: skip
        """Disarm many timers; `keys`: a list, a numpy array or an Arrow array.

        `bulk_load`: the keys are rows of a bulk load that has begun; a later add of such a row gets
        the status BULK_LOADED and adds nothing. `delivered`: as for cancel(). Returns a
        CancelResult for each key; with wait=False it returns the BulkResult as soon as all keys
        are packed. Raises Refused, DaemonError.
        """
        limit_s = self._limit_s(timeout)
        bulk = partitions.cancels(self._core, keys, bulk_load, delivered)
        outcome: Callable[[BulkResult], Sequence[CancelResult] | BulkResult] = (
            checked_cancels if wait else unchecked
        )
        return self._bulk(bulk, limit_s, outcome, wait=wait)

    def settle(self, result: BulkResult, *, timeout: float | timedelta | None = None) -> None:
        """Wait until all rows of an earlier bulk call have their results. `result`: the BulkResult
        of that call. Raises DaemonError."""
        limit_s = self._limit_s(timeout)
        self._bulk(partitions.unsettled(self._core, result), limit_s, checked, last=False)

    def unpark_many(
        self, rows: Iterable[tuple[Key, int, bytes]], *, bulk_load: BulkLoad | None = None,
        timeout: float | timedelta | None = None,
    ) -> BulkResult:  # fmt: skip
        """Arm parked timers; `rows`: a (key, ticket, payload) for each timer, with the payload that
        was given to add().

        The status UNPARKED means that the timer is armed with its ticket, topic and deadline; if it
        is due, it fires at once. UNKNOWN means that no timer with this ticket is parked, and
        nothing has changed. `bulk_load` as in add_many(). Raises InvalidArgument (before anything
        is sent), DaemonError.
        """
        limit_s = self._limit_s(timeout)
        return self._bulk(partitions.unparks(self._core, rows, bulk_load), limit_s, checked)

    # ---- bulk loads ------------------------------------------------------------------------

    def open_bulk_load(
        self, bulk_load: bytes, fencing_token: int = 0, *, timeout: float | timedelta | None = None
    ) -> BulkLoadStatus:
        """Begin a bulk load in this namespace, or a new run of it, and return its status.

        `fencing_token`: number of the run. add_many() also begins a bulk load; this call claims the
        bulk load before its first row. Later rows with a lower fencing token are refused as FENCED.
        A bulk load belongs to the uid that began it. Raises InvalidArgument, MessageRefused
        (FENCED, DENIED, BULK_LOADS_FULL, BUSY), Partitioned, DaemonError.
        """
        return self._bulk_load(jobs.bulk_load_opened, bulk_load, fencing_token, timeout)

    def close_bulk_load(
        self, bulk_load: bytes, fencing_token: int = 0, *, timeout: float | timedelta | None = None
    ) -> None:
        """Refuse all further rows of a bulk load: rows that are not done get the status CLOSED.

        Timers that were added stay. Raises the same errors as open_bulk_load().
        """
        close = partial(jobs.bulk_load, BulkLoadAction.CLOSE)
        self._bulk_load(close, bulk_load, fencing_token, timeout)

    def forget_bulk_load(
        self, bulk_load: bytes, *, timeout: float | timedelta | None = None
    ) -> None:
        """Free the daemon's record of a bulk load; its timers stay.

        A row that is sent again afterwards is added again. Raises the same errors as
        open_bulk_load().
        """
        forget = partial(jobs.bulk_load, BulkLoadAction.FORGET)
        self._bulk_load(forget, bulk_load, 0, timeout)

    def bulk_load_status(
        self, bulk_load: bytes, *, timeout: float | timedelta | None = None
    ) -> BulkLoadStatus:
        """Return which rows of a bulk load are done. Raises the same errors as open_bulk_load().

        The answer includes the effects of all earlier calls of this client, even of packed calls.
        """
        return self._bulk_load(jobs.bulk_load_status, bulk_load, 0, timeout)

    def _bulk_load(
        self,
        job: jobs.BulkLoadJob[T],
        bulk_load: bytes,
        fencing_token: int,
        timeout: float | timedelta | None,
    ) -> T:
        from purgatoryd.clients.bulk_loads import check_bulk_load

        check_bulk_load(bulk_load, 0, fencing_token)
        limit_s = self._limit_s(timeout)
        connection = self._core.for_bulk_loads()
        return self._ask(connection, job(self._core, bulk_load, fencing_token, limit_s))

    def _ask_about(self, job: GroupJob[T], timeout: float | timedelta | None) -> T:
        limit_s, core = self._limit_s(timeout), self._core
        core.check()
        return self._ask(core.connections[0], job(core, limit_s))

    # ---- pending timers ----------------------------------------------------------------------

    def list_timers(
        self, *, limit: int = 1000, cursor: str | None = None, payloads: bool = False,
        timeout: float | timedelta | None = None, **selection: Unpack[Selection],
    ) -> TimerPage:  # fmt: skip
        """Return pending timers of a selection in the order of their deadlines, at most `limit`.

        `selection`: see Selection; without one, all timers of the namespace. `cursor`: that of the
        page before. Timers that were added after the first page are not listed. `payloads`: also
        read the payloads. Parked timers are listed, operations are not. Raises InvalidArgument,
        MessageRefused (DENIED), DaemonError.
        """
        number = check_whole("limit", limit, 1, pending.LIMIT_MAX)
        check_type("payloads", payloads, bool, optional=False)
        core, limit_s = self._core, self._limit_s(timeout)
        chosen = pending.check_selection(core, **selection)
        start = None if cursor is None else pending.Cursor.of(cursor)
        job = pending.listed(core, limit_s, chosen, number, start, payloads=payloads)
        return self._ask(pending.admit(core), job)

    def count_timers(
        self, *, timeout: float | timedelta | None = None, **selection: Unpack[Selection]
    ) -> int:
        """Return the number of pending timers of a selection. Raises the same errors as
        list_timers()."""
        core, limit_s = self._core, self._limit_s(timeout)
        chosen = pending.check_selection(core, **selection)
        return self._ask(pending.admit(core), pending.counted(core, limit_s, chosen))

    def cancel_where(
        self, *, sweep_id: bytes | None = None, dry_run: bool = False, wait: bool = True,
        timeout: float | timedelta | None = None, **selection: Unpack[Selection],
    ) -> SweepStatus:  # fmt: skip
        """Cancel all pending timers of a selection that are armed at the time of the call.

        The daemon does this in small steps, a *sweep*, which goes on without this client and after
        a restart of the daemon. `sweep_id`: 16 bytes, chosen by the caller; a call with the id of
        an earlier sweep changes nothing and returns its status. `dry_run`: only count. With
        wait=False it returns once the sweep has begun. Raises InvalidArgument, MessageRefused
        (DENIED, BUSY), DaemonError.
        """
        limit_s = self._limit_s(timeout)
        return self._sweep(
            pending.CANCEL, selection, sweep_id, dry_run=dry_run, wait=wait, limit_s=limit_s
        )

    def reschedule_where(
        self, *, shift: float | timedelta | None = None, delay: float | timedelta | None = None,
        deadline: datetime | None = None, deadline_boot_ns: int | None = None,
        sweep_id: bytes | None = None, dry_run: bool = False, wait: bool = True,
        timeout: float | timedelta | None = None, **selection: Unpack[Selection],
    ) -> SweepStatus:  # fmt: skip
        """Move the deadlines of all pending timers of a selection; key, payload and tag stay.

        `shift`: seconds or a timedelta by which each deadline moves, or else one new deadline as in
        add(). A timer keeps its clock. Other arguments, result and errors as of cancel_where().
        """
        core, limit_s = self._core, self._limit_s(timeout)
        change = pending.move(core, shift, delay, deadline, deadline_boot_ns)
        return self._sweep(change, selection, sweep_id, dry_run=dry_run, wait=wait, limit_s=limit_s)

    def sweep_status(
        self, sweep_id: bytes, *, timeout: float | timedelta | None = None
    ) -> SweepStatus:
        """Return the progress of a sweep. The daemon remembers the last 16 sweeps. Raises
        DaemonError."""
        return self._about_sweep(sweep_id, SweepAction.STATUS, timeout)

    def stop_sweep(
        self, sweep_id: bytes, *, timeout: float | timedelta | None = None
    ) -> SweepStatus:
        """Stop a sweep, and return its status. Timers that it has changed stay changed. Raises
        DaemonError."""
        return self._about_sweep(sweep_id, SweepAction.STOP, timeout)

    def sweeps(self, *, timeout: float | timedelta | None = None) -> list[SweepStatus]:
        """Return all sweeps that the daemon remembers, in the namespaces of this uid, the newest
        first. Raises DaemonError."""
        core, limit_s = self._core, self._limit_s(timeout)
        return self._ask(pending.admit(core), pending.remembered(core, limit_s))

    def _sweep(
        self, change: pending.Change, selection: Selection, sweep_id: bytes | None, *,
        dry_run: bool, wait: bool, limit_s: float,
    ) -> SweepStatus:  # fmt: skip
        check_type("dry_run", dry_run, bool, optional=False)
        core = self._core
        chosen = pending.check_selection(core, **selection)
        chosen_id = core.host.random_bytes(16) if sweep_id is None else pending.check_id(sweep_id)
        job = pending.swept(core, limit_s, chosen, change, chosen_id, wait=wait, dry_run=dry_run)
        return self._ask(pending.admit(core), job)

    def _about_sweep(
        self, sweep_id: bytes, action: SweepAction, timeout: float | timedelta | None
    ) -> SweepStatus:
        wanted = pending.check_id(sweep_id)
        core, limit_s = self._core, self._limit_s(timeout)
        return self._ask(pending.admit(core), pending.asked_all(core, limit_s, wanted, action))

    def _planned(self, plan: Plan[T], timeout: float | timedelta | None) -> T:
        limit_s = self._limit_s(timeout)
        self._core.check()
        connection, job = plan(self._core, limit_s)
        connection.admit()
        return self._ask(connection, job)

    # ---- cursors -----------------------------------------------------------------------------

    def delete_cursor(self, cursor: str, *, timeout: float | timedelta | None = None) -> None:
        """Delete a cursor of this namespace. A cursor that does not exist is deleted already.

        Raises InvalidName, CursorHeld if a subscriber has it, DaemonError.
        """
        name, limit_s = self._core.cursor_name(cursor), self._limit_s(timeout)
        self._core.check()
        job = jobs.cursor_deleted(self._core, name, limit_s)
        self._ask(self._core.connections[0], job)

    def at(self, at_ns: int | None) -> None:
        """Apply later calls at virtual time `at_ns`. The daemon first moves its virtual clock
        there.

        With None, the daemon applies later calls at its current time. Raises InvalidTime.
        """
        self._core.check()
        self._engine.put(partial(self._core.set_time, self._core.check_time(at_ns)))

    def flush(self, *, timeout: float | timedelta | None = None) -> None:
        """Wait for the answers to all earlier calls.

        Raises BatchError if packed calls were refused and their handles have not been read;
        DaemonError if no answer came for `timeout` seconds.
        """
        core, limit_s = self._core, self._limit_s(timeout)
        core.check()
        self._engine.call(self._engine.flushed(limit_s))
        core.raise_reported()

    # ---- open and close ----------------------------------------------------------------------

    def close(self) -> None:
        """Flush, end the session and close the connection. Raises the same errors as flush().

        It waits at most the client's `timeout` for missing answers, and at most BYE_S (0.2 s) for
        the answer to the BYE. An interrupted close() may not have begun: call it again. Without
        close(), calls that were packed but not sent are lost when the process ends.
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
            pass  # another thread closes the client at the same time
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
            with suppress(PurgatorydError):  # the caller's own error is raised instead
                self._close(BYE_S)

    # ---- requests ----------------------------------------------------------------------------

    def _limit_s(self, timeout: float | timedelta | None) -> float:
        """Return the seconds that a call waits. Raises InvalidArgument."""
        return check_limit_s(self.timeout if timeout is None else timeout)

    def _made(
        self, kind: Kind, arguments: tuple[Any, ...], wait: bool, timeout: float | timedelta | None
    ) -> Any:
        limit_s = self.timeout if timeout is None else check_limit_s(timeout)
        try:
            return self._made_at_once(kind, arguments, wait, limit_s)
        except FullGroup as error:
            raise self._engine.call(named(self._core, error, limit_s)) from None

    def _made_at_once(
        self, kind: Kind, arguments: tuple[Any, ...], wait: bool, limit_s: float
    ) -> Any:
        if wait and (direct := self._core.direct) is not None:
            pending = kind.pending()
            try:
                kind.direct(direct, pending, limit_s, arguments)
                if pending.packed:
                    return self._outcome(pending, limit_s)
            except BaseException as error:
                self._leave_handle(error, pending)
                raise
        entry = kind.prepare(self._core, *arguments, collect=not wait)
        entry.pending.connection.admit()
        return self._now(entry, limit_s) if wait else self._later(entry, limit_s)

    def _now(self, entry: Entry[Any], limit_s: float) -> Any:
        """Pack one call, wait for its answer, and return its outcome."""
        pending = entry.pending
        try:
            pending.connection.call(entry, limit_s)
            if pending.packed:
                return self._outcome(pending, limit_s)
        except BaseException as error:
            self._leave_handle(error, pending)
            raise
        handle: Handle[Any] = Handle(self, pending)
        return self._run(jobs.single(entry, limit_s), pending.outcome, handle)

    def _outcome(self, pending: Pending, limit_s: float) -> Any:
        """Return the outcome of a direct call. Wait for it if the engine has the call."""
        if not pending.done:
            self._engine.call(jobs.awaited(pending, limit_s, (pending,)))
        return pending.outcome()

    def _leave_handle(self, error: BaseException, pending: Pending) -> None:
        """Attach a handle to the error of a direct call that was sent."""
        if in_doubt(error):
            self._engine.leave_handle(error, Handle[Any](self, pending), lambda: pending.packed)

    def _later(self, entry: Entry[Any], limit_s: float) -> Handle[Any]:
        """Add one call to the open lot, or to a new one once the queue has space, and return its
        handle."""
        handle: Handle[Any] = Handle(self, entry.pending)
        packer = entry.pending.connection.packer
        lot = packer.lots[-1] if packer.lots else None
        try:
            if lot is None or not lot.add(entry):
                self._open_lot(entry, self._space(entry.pending.connection, limit_s))
            return handle
        except BaseException as error:
            if in_doubt(error):
                packed = partial(self._engine.knows, lambda: entry.pending.packed)
                self._engine.leave_handle(error, handle, packed)
            raise

    def _space(self, connection: Connection, limit_s: float) -> int:
        """Return the number of calls that the queue has space for, once it has some. Raises
        QueueFull."""
        while (space := self.queue_limit - self._engine.queued(connection)) <= 0:
            self._await_space(connection, limit_s)
        return space

    def _open_lot(self, entry: Entry[Any], limit: int) -> None:
        """Put a new lot into the queue, with one call that has been checked."""
        connection = entry.pending.connection
        lot = Lot(self._engine.requests, connection, self._core._note, limit, Handle)
        lot.add(entry)
        self._engine.collect(lot, connection.packer)
        if connection.direct is not None:
            connection.direct.stream(lot)
        breaks = connection.breaker is not None and connection.breaker.failures > 0
        self._lot = lot if len(self._core.connections) == 1 and not breaks else None

    def _run(self, job: Job[None], outcome: Callable[[], T], handle: object) -> T:
        """Run a job and return its outcome. Attach `handle` to an exception that interrupts it."""
        call = Call(job)
        try:
            self._engine.run(call)
            return outcome()
        except BaseException as error:
            if in_doubt(error):
                self._engine.leave_handle(error, handle, lambda: self._engine.begun(call))
            raise

    def _ask(self, connection: Connection, job: Job[T]) -> T:
        """Run a job that packs no record, and return its outcome. Attach a handle of the job to an
        exception that interrupts this call."""
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
        """Submit each batch of a bulk call once the queue has space. Return outcome(bulk.result).

        `last`: True if no other call, such as settle(), is to wait for the same result. Then rows
        that were refused as BUSY are abandoned at the timeout.
        """
        direct, batch = self._core.direct, bulk.only if wait else None
        if direct is not None and batch is not None:
            try:
                send_direct(direct, batch, bulk.result, limit_s)
                if batch.sent:
                    return self._sent(bulk, limit_s, outcome)
            except BaseException as error:
                if in_doubt(error):
                    self._engine.leave_handle(error, bulk.result, lambda: batch.sent)
                raise
        job = jobs.bulk(self.queue_limit, bulk, wait, limit_s, last=last and wait)
        return self._run(job, partial(outcome, bulk.result), bulk.result)

    def _sent(self, bulk: Bulk, limit_s: float, outcome: Callable[[BulkResult], T]) -> T:
        """Return the outcome of a direct bulk call. Wait for it if the engine has the call."""
        if not bulk.result.done:
            left = bulk.without_batches()
            self._engine.call(jobs.bulk(self.queue_limit, left, True, limit_s, last=True))
        return outcome(bulk.result)

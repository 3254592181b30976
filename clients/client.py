"""The blocking client: thread-safe, one connection, one session.

There is no I/O thread behind synchronous calls: the calling thread packs, sends and waits
for its answer under a lock. Calls with wait=False are packed; a batch leaves when it is
full, or after FLUSH_S through a thread that exists only once such a call was made and
sleeps while nothing is packed or in flight. Whoever holds the lock takes everybody's
results.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, overload

from purgatoryd.clients.arguments import check_limit_s, check_type, check_whole
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
from purgatoryd.clients.model import CancelResult, TimerInfo
from purgatoryd.clients.packing import AnyPending, Entry, Pending
from purgatoryd.clients.remote import Remote
from purgatoryd.clients.route import Partition
from purgatoryd.clients.session import State
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import CallTimeout, DaemonError, PurgatorydError, QueueFull
from purgatoryd.shm_layout.layout import BulkLoadAction
from purgatoryd.shm_layout.wire import BulkLoadInfo, Key

FLUSH_S = 0.0003  # how long a packed call waits for company
HARVEST_S = 0.002  # how long the flusher may keep the connection while it waits for answers
OUTAGE_S = 0.02  # the same while there is no connection

Outcome = TypeVar("Outcome", TimerInfo, CancelResult)


class _Goal(Protocol):
    @property
    def done(self) -> bool: ...


class _When:
    """A goal that is a condition."""

    def __init__(self, condition: Any) -> None:
        self._condition = condition

    @property
    def done(self) -> bool:
        return bool(self._condition())


class Handle(Generic[Outcome]):
    """A call made with wait=False."""

    __slots__ = ("_client", "_pending")

    def __init__(self, client: Client, pending: Pending) -> None:
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
        timeout = self._client._limit_s(timeout)
        self._client._await(self._pending, timeout)
        outcome: Outcome = self._pending.outcome()  # type: ignore[attr-defined]
        return outcome


class Client:
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
    there stays where it is. `partition`: only this one of a namespace that is divided into several;
    PartitionedClient has them all.

    Raises DaemonUnreachable if no daemon answers within `timeout`; InvalidName.
    """

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
        self._core = Core(name, namespace, remote, durable, ledger, worker, numa_local, partition)
        self._io = threading.Lock()  # session and socket; taken before _packing
        self._packing = threading.Lock()  # the packer's open batch
        self._flusher: threading.Thread | None = None
        self._wake = threading.Event()
        try:
            self._connect()
        except BaseException:
            self._core.close()
            raise

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

    @overload
    def add(
        self, key: Key, delay: float | timedelta | None = None, *,
        delay_ns: int | None = None, deadline: datetime | None = None,
        deadline_boot_ns: int | None = None, topic: str = "default", payload: bytes = b"",
        mode: Mode = "error", wait: Literal[True] = True, timeout: float | None = None,
    ) -> TimerInfo: ...  # fmt: skip

    @overload
    def add(
        self, key: Key, delay: float | timedelta | None = None, *,
        delay_ns: int | None = None, deadline: datetime | None = None,
        deadline_boot_ns: int | None = None, topic: str = "default", payload: bytes = b"",
        mode: Mode = "error", wait: Literal[False], timeout: float | None = None,
    ) -> Handle[TimerInfo]: ...  # fmt: skip

    def add(
        self, key: Key, delay: float | timedelta | None = None, *,
        delay_ns: int | None = None, deadline: datetime | None = None,
        deadline_boot_ns: int | None = None, topic: str = "default", payload: bytes = b"",
        mode: Mode = "error", wait: bool = True, timeout: float | None = None,
    ) -> TimerInfo | Handle[TimerInfo]:  # fmt: skip
        """Arms a timer; exactly one of the four times must be given.

        `delay`: seconds or timedelta; `delay_ns`: nanoseconds; `deadline`: an aware datetime,
        follows the wall clock; `deadline_boot_ns`: a point on the daemon's clock. `payload`:
        0-65536 bytes. `mode`: what happens if the key is armed. Returns the timer, or with
        wait=False a Handle at once. Raises InvalidArgument, Refused (Exists, Full, ...),
        DaemonError; with wait=False QueueFull if the queue stays full for `timeout`.
        """
        core, timeout = self._core, self._limit_s(timeout)
        core.admit()
        entry = core.put(
            key, delay, delay_ns, deadline, deadline_boot_ns, topic, payload, mode,
            collect=not wait,
        )  # fmt: skip
        pending = self._pack(entry, wait, timeout)
        if wait:
            self._await(pending, timeout, (pending,))
            return pending.outcome()
        self._leave()
        return Handle(self, pending)

    @overload
    def cancel(
        self, key: Key, *, ticket: int = 0, wait: Literal[True] = True,
        timeout: float | None = None,
    ) -> CancelResult: ...  # fmt: skip

    @overload
    def cancel(
        self, key: Key, *, ticket: int = 0, wait: Literal[False], timeout: float | None = None
    ) -> Handle[CancelResult]: ...

    def cancel(
        self, key: Key, *, ticket: int = 0, wait: bool = True, timeout: float | None = None
    ) -> CancelResult | Handle[CancelResult]:
        """Disarms the key's timer; with `ticket`, only if it is still that timer.

        Raises as add does. UNKNOWN and FIRED are results, not errors.
        """
        core, timeout = self._core, self._limit_s(timeout)
        core.admit()
        pending = self._pack(core.cancel(key, ticket, collect=not wait), wait, timeout)
        if wait:
            self._await(pending, timeout, (pending,))
            return pending.outcome()
        self._leave()
        return Handle(self, pending)

    def get(self, key: Key, *, timeout: float | None = None) -> TimerInfo | None:
        """The armed timer of `key` with its payload, or None. Raises Denied, DaemonError.

        Sees the effect of every earlier call of this client, packed ones included.
        """
        timeout = self._limit_s(timeout)
        self._core.admit()
        wire.encode_key(key)
        with self._exclusive("get", timeout):
            self._settle("get", timeout)
            question = self._core.question(key)
            self._answer(question, "get", timeout)
        return question.outcome()

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
        returns as soon as all is packed. Rows that the daemon is too busy for are sent again, in
        order, until `timeout`. Raises InvalidArgument before anything is sent, Busy with the rows
        that were not done, DaemonError.
        """
        timeout = self._limit_s(timeout)
        self._core.admit()
        result, batches = pack_puts(self._core, rows, topic, mode, bulk_load)
        return self._bulk(result, batches, wait, timeout)

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
        timeout = self._limit_s(timeout)
        self._core.admit()
        result, batches = pack_cancels(self._core, keys, bulk_load)
        self._bulk(result, batches, wait, timeout)
        return result.cancels() if wait else result

    def settle(self, result: BulkResult, *, timeout: float | None = None) -> None:
        """Returns once `result`, of a bulk call with wait=False, is done. Raises DaemonError."""
        check_type("result", result, BulkResult)
        timeout = self._limit_s(timeout)
        self._core.check()
        self._settled(result, True, timeout)

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
        timeout = self._limit_s(timeout)
        self._core.admit()
        result, batches = pack_unparks(self._core, rows, bulk_load)
        return self._bulk(result, batches, True, timeout)

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
        self._ask_bulk_load(bulk_load, BulkLoadAction.OPEN, timeout, fencing_token)
        return self.bulk_load_status(bulk_load, timeout=timeout)

    def close_bulk_load(
        self, bulk_load: bytes, fencing_token: int = 0, *, timeout: float | None = None
    ) -> None:
        """From now on no row of the bulk load is done any more: those that were not get CLOSED.

        What was added stays. Raises as open_bulk_load does.
        """
        self._ask_bulk_load(bulk_load, BulkLoadAction.CLOSE, timeout, fencing_token)

    def forget_bulk_load(self, bulk_load: bytes, *, timeout: float | None = None) -> None:
        """Frees what the daemon remembers of a bulk load; its timers stay.

        A row that is sent again afterwards is added again. Raises as open_bulk_load does.
        """
        self._ask_bulk_load(bulk_load, BulkLoadAction.FORGET, timeout)

    def bulk_load_status(self, bulk_load: bytes, *, timeout: float | None = None) -> BulkLoadStatus:
        """Which rows of a bulk load are done. Raises as open_bulk_load does.

        Sees the effect of every earlier call of this client, packed ones included.
        """
        parts = StatusParts()
        while parts.start is not None:
            info = self._ask_bulk_load(bulk_load, BulkLoadAction.STATUS, timeout, start=parts.start)
            parts.take(info)
        return parts.status

    def _ask_bulk_load(
        self,
        bulk_load: bytes,
        action: BulkLoadAction,
        timeout: float | None,
        fencing_token: int = 0,
        start: int = 0,
    ) -> BulkLoadInfo:
        check_bulk_load(bulk_load, 0, fencing_token)
        timeout = self._limit_s(timeout)
        self._core.admit()
        with self._exclusive("bulk_load", timeout):
            self._settle("bulk load", timeout)
            question = self._core.bulk_load_question(bulk_load, action, fencing_token, start)
            self._answer(question, "bulk load", timeout)
        return question.outcome()

    def _answer(
        self, question: Question | BulkLoadQuestion, subject: str, timeout: float | None
    ) -> None:
        try:
            self._drive(question, subject, timeout)
        finally:
            self._core.session.forget(question.query)

    def at(self, at_ns: int | None) -> None:
        """Under the virtual clock: applies later calls at virtual time `at_ns`.

        The daemon goes to that time first. None ends it. Raises InvalidTime.
        """
        self._core.check()
        with self._packing:
            self._core.set_time(at_ns)
        self._leave()

    def flush(self, *, timeout: float | None = None) -> None:
        """Returns once every call made before this one was answered.

        Raises BatchError if packed calls were refused and nobody looked at their handles;
        DaemonError if no answer came for `timeout` seconds.
        """
        core, timeout = self._core, self._limit_s(timeout)
        core.check()
        with self._exclusive("flush", timeout):
            self._settle("flush", timeout)
            core.raise_uncollected()

    # ---- open and close ----------------------------------------------------------------------

    def close(self) -> None:
        """Flushes, ends the session and closes the connection; raises as flush does.

        Without it, packed calls that did not leave yet are lost at the end of the process.
        """
        if self._core.closed:
            return
        self._core.check()
        try:
            self.flush()
        finally:
            self._hang_up()

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
        elif not self._core.closed and self._core.fork_guard.mine:
            with suppress(PurgatorydError):  # the caller's error is the one that counts
                self.flush(timeout=BYE_S)
            self._hang_up()

    def _hang_up(self) -> None:
        with self._io:
            core = self._core
            try:
                core.session.bye()
                self._drive(_When(lambda: core.session.state is State.CLOSED), "bye", BYE_S)
            except DaemonError:
                pass  # the daemon ends the session once the connection is gone
            finally:
                core.close()
                self._wake.set()
        if self._flusher is not None:
            self._flusher.join()

    def _connect(self) -> None:
        session = self._core.session
        with self._exclusive("hello", None):
            self._drive(_When(lambda: session.state is not State.GREETING), "hello", None)
        if session.refusal is not None:
            raise session.refusal

    # ---- waiting -----------------------------------------------------------------------------

    def _limit_s(self, timeout: float | None) -> float:
        """How long a call waits. Raises InvalidArgument."""
        return check_limit_s(self.timeout if timeout is None else timeout)

    @contextmanager
    def _exclusive(self, subject: str, timeout: float | None) -> Iterator[None]:
        """Holds the connection."""
        limit_s = self._limit_s(timeout)
        if not self._io.acquire(timeout=min(max(limit_s, 0), threading.TIMEOUT_MAX)):
            raise CallTimeout(subject, limit_s, 0)
        try:
            self._core.check()
            yield
        finally:
            self._io.release()

    def _await(
        self, pending: Pending, timeout: float | None, calls: Iterable[Pending] = ()
    ) -> None:
        """Waits for `pending`. At the timeout `calls`, for which nobody else waits, are not sent
        again if they were refused as BUSY, and have that outcome."""
        if not pending.done:
            self._core.check()
            with self._exclusive("call", timeout):
                batch = self._seal()
                try:
                    self._drive(pending, "call", timeout)
                except DaemonError:
                    if not (self._core.abandon(calls) and pending.done):
                        self._core.withdraw(batch)
                        raise
        self._core.collected(pending)

    def _settle(self, subject: str, timeout: float | None) -> None:
        """Waits for the answers to all that was packed until now."""
        self._seal()
        packer = self._core.packer
        packed = packer.packed
        self._drive(_When(lambda: packer.settled >= packed), subject, timeout)

    def _seal(self) -> Batch | None:
        with self._packing:
            return self._core.packer.seal()

    def _drive(self, goal: _Goal, subject: str, timeout: float | None) -> None:
        """Sends and receives until `goal` is done; `timeout` seconds of silence end it."""
        core, limit_s = self._core, self._limit_s(timeout)
        answers, deadline_s = -1, 0.0
        while not goal.done:
            core.give_up()
            blocked = core.push()
            if not blocked and core.take_soon():
                continue
            waits = isinstance(goal, Pending) and core.session.retries and answers >= 0
            if core.answers != answers and not waits:
                answers, deadline_s = core.answers, time.monotonic() + limit_s
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise core.overdue(subject, limit_s)
            self._listen(remaining_s, blocked)

    def _listen(self, limit_s: float, blocked: bool) -> None:
        """Waits for any sign of the daemon, and asks again when it stays silent."""
        core = self._core
        if not core.try_open() or core.channel is None:
            time.sleep(min(limit_s, OPEN_RETRY_S))
            return
        wait_s = min(limit_s, core.patience_s)
        if core.channel.wait(wait_s, to_send=blocked):
            core.look()
        else:
            core.silence(wait_s)

    # ---- packed calls --------------------------------------------------------------------------

    def _pack(self, entry: Entry[AnyPending], wait: bool, timeout: float | None) -> AnyPending:
        if not wait:
            self._admit(timeout)
        with self._packing:
            self._core.packer.add(entry)
        return entry.pending

    def _admit(self, timeout: float | None) -> None:
        try:
            self._make_space(timeout)
        except DaemonError as error:
            limit_s = self._limit_s(timeout)
            raise QueueFull(self._core.packer.queued, self.queue_limit, limit_s) from error

    def _make_space(self, timeout: float | None) -> None:
        packer = self._core.packer
        if packer.queued < self.queue_limit:
            return
        with self._exclusive("free slots in the queue", timeout):
            self._seal()
            goal = _When(lambda: packer.queued < self.queue_limit)
            self._drive(goal, "free slots in the queue", timeout)

    def _leave(self) -> None:
        """Lets packed calls leave: full batches at once, others through the flusher."""
        core = self._core
        if core.packer.sealed and self._io.acquire(blocking=False):
            try:
                core.check()
                core.push()
                core.pull()
            finally:
                self._io.release()
        if not self._wake.is_set():
            if self._flusher is None:
                self._start_flusher()
            self._wake.set()

    def _bulk(
        self, result: BulkResult, batches: list[Batch], wait: bool, timeout: float | None
    ) -> BulkResult:
        unsent = deque(batches)
        try:
            self._submit(unsent, timeout)
            return self._settled(result, wait, timeout)
        except DaemonError:
            if wait and not result.done:
                with self._io:
                    result.abandon(unsent)
            raise

    def _submit(self, unsent: deque[Batch], timeout: float | None) -> None:
        while unsent:
            self._make_space(timeout)
            with self._packing:
                self._core.packer.bulk(unsent.popleft())
            self._leave()

    def _settled(self, result: BulkResult, wait: bool, timeout: float | None) -> BulkResult:
        if wait:
            with self._exclusive("bulk call", timeout):
                self._drive(result, "bulk call", timeout)
            result.check()
        return result

    def _start_flusher(self) -> None:
        with self._packing:
            if self._flusher is None:
                self._flusher = threading.Thread(
                    target=self._flush_loop, name="purgatoryd-flush", daemon=True
                )
                self._flusher.start()

    def _flush_loop(self) -> None:
        core = self._core
        while not core.closed:
            self._wake.wait()
            time.sleep(FLUSH_S)
            with self._io:
                if core.closed:
                    return
                self._wake.clear()
                self._seal()
                self._harvest()
                if core.session.busy or not core.packer.empty:
                    self._wake.set()

    def _harvest(self) -> None:
        core = self._core
        blocked = core.push()
        core.pull()
        if core.session.busy:
            self._listen(OUTAGE_S if blocked else HARVEST_S, blocked)

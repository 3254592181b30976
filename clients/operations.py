"""Operations of one owner, and the threads that receive their outcomes.

No code here uses a socket. The blocking and the asyncio purgatory share this module.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from purgatoryd.clients import _pack
from purgatoryd.clients.arguments import check_callable, check_limit_s
from purgatoryd.clients.conditions import AnyCondition, Encoded, When
from purgatoryd.clients.locked import locked
from purgatoryd.clients.packing import Pending
from purgatoryd.clients.session import Session
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import (
    CallTimeout,
    ProtocolError,
    PurgatorydError,
    SessionExpired,
)
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import TICKET_SHARD, Cause
from purgatoryd.shm_layout.wire import Key, RawOutcome

if TYPE_CHECKING:
    from purgatoryd.clients.operation_columns import OperationTable

_LOG = logging.getLogger("purgatoryd")
_ORPHANS_MAX = 65_536
DOUBT_S = 60.0
"""Time in seconds after the error of a watch(). Within this time the same watch() returns the
operation of the first call even if the operation has ended."""

CauseName = Literal["satisfied", "expired", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an operation that has ended.

    `missing`: keys that had not reached the watermark that the operation waited for; `error`: the
    code given to fail(), else 0; `elapsed_ns`: time from arming to the end, on the daemon's clock;
    `failed`: keys that had failed; `watermarks`: the watermark of each key at the end.
    """

    cause: CauseName
    missing: list[Key]
    error: int
    elapsed_ns: int
    condition: AnyCondition | None = None
    """The condition that was given to watch(); None if an earlier process gave it."""
    failed: list[Key] = field(default_factory=list)
    watermarks: dict[Key, int] = field(default_factory=dict)


def still_armed(key: Key, waited_s: float | None) -> CallTimeout:
    """Return the error of a result() whose operation did not end in time."""
    return CallTimeout(f"operation {key!r}", waited_s or 0.0, armed=True)


class Owner(Protocol):
    """The blocking purgatory that owns an operation."""

    def _extend(self, operation: Operation, timeout: float | timedelta) -> bool: ...

    def _cancel(self, operation: Operation) -> bool: ...


class Operation:
    """An operation that was armed. Thread-safe."""

    def __init__(self, key: Key, encoded: Encoded, condition: AnyCondition) -> None:
        self.key = key
        self.ticket = 0
        """Ticket of the operation; 0 until the daemon has acknowledged the watch."""
        self._encoded = encoded
        self.condition = condition
        self._asked = condition if isinstance(condition, When) else None
        self._owner: Owner | None = None
        self._ended = threading.Event()
        self._outcome: Outcome | None = None
        self._error: PurgatorydError | None = None
        self._callbacks: list[Callable[[Operation], object]] = []
        self._mutex = threading.Lock()

    @property
    def done(self) -> bool:
        """True once the operation has ended, or its outcome can no longer arrive."""
        return self._ended.is_set()

    def result(self, timeout: float | timedelta | None = None) -> Outcome:
        """Wait up to `timeout` seconds (None = no limit), and return the outcome of the operation.

        Raises CallTimeout if the operation did not end in time, Refused if it was never armed,
        SessionExpired if the daemon forgot the session of its owner, and Closed if its owner was
        closed before the end.
        """
        timeout = None if timeout is None else check_limit_s(timeout)
        if not self._ended.wait(timeout):
            raise still_armed(self.key, timeout)
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def future(self) -> Future[Outcome]:
        """Return a future of the result, for `concurrent.futures.wait`. The future cannot be
        cancelled."""
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()
        self.add_done_callback(lambda _: self._resolve(future))
        return future

    def _resolve(self, future: Future[Outcome]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self.result())

    def extend(self, timeout: float | timedelta) -> bool:
        """Move the deadline to `timeout` seconds from the call, never to an earlier time.

        Returns False if the operation has ended. The call never arms a timer. Raises
        InvalidArgument, Refused, DaemonError.
        """
        return self._owner is not None and self._owner._extend(self, timeout)

    def cancel(self) -> bool:
        """End the operation with the cause "cancelled". Returns False if it had already ended.

        Raises DaemonError.
        """
        return self._owner is not None and self._owner._cancel(self)

    def add_done_callback(self, callback: Callable[[Operation], object]) -> None:
        """Call `callback(operation)` in the purgatory's thread once the operation has ended, or at
        once in this thread if it has already ended. An exception of the callback is logged.

        The callback must not wait for the end of another operation. The thread that runs the
        callback also evaluates CLIENT conditions, and in a LocalPurgatory it notices every end.
        """
        check_callable("callback", callback)
        # No lock: an exception of a signal handler could leave it locked.
        self._callbacks.append(callback)
        if self.done:
            with suppress(ValueError):  # ValueError: _end() has called the callback
                self._callbacks.remove(callback)
                _guarded(callback, self)

    def _store(self, outcome: Outcome | None, error: PurgatorydError | None) -> None:
        """Store the end of the operation, unless it has ended, and wake waiting callers."""
        locked(self._mutex, self._keep, outcome, error)

    def _keep(self, outcome: Outcome | None, error: PurgatorydError | None) -> None:
        if not self.done:
            self._outcome, self._error = outcome, error
            self._ended.set()

    def _call_back(self) -> None:
        """Run the callbacks of an operation that has ended, each once."""
        with suppress(IndexError):
            while True:
                _guarded(self._callbacks.pop(0), self)

    def _outcome_of(self, raw: RawOutcome) -> Outcome:
        keys = self._encoded.keys
        return Outcome(
            cause_name(raw.cause),
            [keys[i] for i in raw.missing],
            raw.error,
            raw.ended_ns - raw.armed_ns,
            self.condition,
            [keys[i] for i in raw.failed],
            dict(zip(keys, raw.watermarks, strict=True)),
        )

    def _holds(self) -> bool:
        """Evaluate the owner's condition. An exception is logged and counts as false."""
        try:
            return self._asked is not None and bool(self._asked.condition())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also sys.exit(), which would end the thread
            _LOG.error("condition of operation %r failed", self.key, exc_info=error)
            return False


def _guarded(callback: Callable[[Operation], object], operation: Operation) -> None:
    try:
        callback(operation)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also sys.exit(): one callback must not stop the others
        _LOG.error("callback of operation %r failed", operation.key, exc_info=error)


def guarded_call(subject: str, callback: Callable[..., object], *arguments: object) -> None:
    """Call `callback(*arguments)`. An exception is logged."""
    try:
        callback(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _LOG.error("callback of %s failed", subject, exc_info=error)


def cause_name(cause: int) -> CauseName:
    """Return the name of a Cause."""
    return Cause(cause).name.lower()  # type: ignore[return-value]


class Book:
    """Matches outcomes and CHECKs of the daemon with the operations of one session's owner.

    The thread that receives messages calls take(). work() runs callbacks and conditions, so its
    caller must hold no lock.
    """

    def __init__(self, kick: Callable[[], None], host: Host = HOST) -> None:
        self._host = host
        self._kick = kick  # wakes the thread that calls work()
        self._armed: dict[int, Operation] = {}
        self._unanswered: set[object] = set()  # Watches, and batches of watches, without answer.
        self._orphans: dict[int, RawOutcome] = {}  # Outcomes that came before the watch's answer.
        self._news: deque[Callable[[], None]] = deque()
        self._acks: deque[bytes] = deque()
        self._true: deque[tuple[Operation, int]] = deque()
        self._doubtful: dict[object, tuple[Any, float]] = {}  # (watch whose call raised, time in s)
        self._mutex = threading.Lock()
        self._released: deque[bytes] = deque()
        self._session: Session | None = None  # a session that an earlier process may have begun
        self._callback: Callable[[Key, Outcome], object] = lambda *_: None
        self._on_lost: Callable[[SessionExpired], object] | None = None
        self._found: set[int] = set()  # Tickets of operations of that earlier process that ended.
        # Tickets rise in the order in which watches were packed. So a ticket that is lower than a
        # ticket of this process belongs to an earlier process, or to an unanswered watch.
        self._a_ticket = 0  # The first ticket that this process received; 0 = none.
        self._early: set[object] = set()  # Unanswered watches packed before it came.
        self._tickets = _pack.Tickets()  # Operations by columns.

    def resume(
        self,
        session: Session,
        callback: Callable[[Key, Outcome], object],
        on_lost: Callable[[SessionExpired], object] | None = None,
    ) -> None:
        """Run `callback` for operations that an earlier process of `session` watched, and `on_lost`
        once the daemon has lost that session."""
        self._session, self._callback, self._on_lost = session, callback, on_lost

    def _add(self, news: Callable[[], None]) -> None:
        self._news.append(news)
        self._kick()

    def _end(
        self, operation: Operation, outcome: Outcome | None, error: PurgatorydError | None
    ) -> None:
        """End an operation; work() runs its callbacks. A callback that is added later runs at once,
        because the operation has ended."""
        operation._store(outcome, error)
        if operation._callbacks:
            self._add(operation._call_back)

    @property
    def open(self) -> int:
        """Number of operations that have not ended."""
        return len(self._armed) + self._tickets.open

    def expect(self, watch: object) -> None:
        """Note that a watch, or a batch of watches, was packed; armed() or armed_rows() follows."""
        with self._mutex:
            self._unanswered.add(watch)
            if not self._a_ticket:
                self._early.add(watch)

    def doubt(self, identity: object, armed: Any, pending: Pending) -> None:
        """Remember a watch whose call raised an error after it was sent, unless the daemon refused
        the watch. Above a limit the oldest watches are forgotten."""
        with self._mutex:
            if not pending.packed or (pending.done and pending.why() is not None):
                return
            if len(self._doubtful) >= _ORPHANS_MAX:
                del self._doubtful[next(iter(self._doubtful))]
            self._doubtful[identity] = (armed, self._host.monotonic_s())

    def doubted(self, identity: object) -> Any:
        """Return and forget an identical watch whose call raised an error. Return None if there is
        none, or if its operation has ended and the error was raised more than DOUBT_S ago."""
        armed, raised_s = self._doubtful.pop(identity, (None, 0.0))
        ago_s = self._host.monotonic_s() - raised_s
        return None if armed is None or (armed.operation.done and ago_s > DOUBT_S) else armed

    def armed(self, operation: Operation, pending: Pending) -> None:
        """Take the daemon's answer to the watch of `operation`."""
        error = pending.why()
        with self._mutex:
            raw = None if error is not None else self._bind(operation, pending.word >> 8)
            self._answered(operation)
        if error is not None:
            self._end(operation, None, error)
        elif raw is not None:
            self._tell(operation, raw)

    def _answered(self, watch: object) -> None:
        """Note that a watch, or a batch of watches, has its answer."""
        self._unanswered.discard(watch)
        self._early.discard(watch)
        for orphan in list(self._orphans.values()):
            if self._earlier(orphan.ticket):
                self._take_earlier(self._orphans.pop(orphan.ticket))
        if not self._unanswered:
            self._orphans.clear()  # only repeated outcomes are left

    def armed_rows(self, batch: object, table: OperationTable, results: bytes, rows: bytes) -> None:
        """Take the daemon's answer to a batch of watches by columns. `batch`: as for expect();
        `results`: a struct pg_result for each row; `rows`: the int64 row in `table` of each."""
        with self._mutex:
            tickets = self._tickets
            first = tickets.add(table, results, rows)
            self._a_ticket = self._a_ticket or first
            early = [raw for raw in self._orphans.values() if tickets.has(raw.ticket)]
            for raw in early:
                del self._orphans[raw.ticket]
            self._answered(batch)
        if table.open == 0 and self._notice(table):
            self._kick()
        for raw in early:
            self._match(raw)

    def _bind(self, operation: Operation, ticket: int) -> RawOutcome | None:
        """Bind an operation to its ticket. Returns the outcome or CHECK that came before the
        ticket, or None."""
        operation.ticket = ticket
        self._a_ticket = self._a_ticket or ticket
        raw = self._orphans.pop(ticket, None)
        if raw is None or raw.cause == 0:
            self._armed[ticket] = operation
        return raw

    def receive(self, body: bytes, count: int) -> None:
        """Take the body of an OUTCOMES message. Raises ProtocolError."""
        with self._mutex:
            found = self._tickets.receive(body, count)
            touched = list(self._tickets.touched)
            self._tickets.touched.clear()
        if isinstance(found, int):
            raise ProtocolError("outcomes", 0, found, len(body))
        acks, others = found
        waits = [self._notice(table) for table in touched]
        if acks:
            (self._acks if any(waits) else self._released).append(acks)
        if others:
            outcomes = wire.decode_outcomes(body, count)
            self.take([outcomes[number] for number in others])
        elif any(waits):
            self._kick()

    def _notice(self, table: OperationTable) -> bool:
        """Wake the callers that wait for a table. Returns True if work() has to run callbacks."""
        table.wake()
        if not table.callbacks:
            return False
        self._news.append(table.call_back)
        return True

    def take(self, outcomes: list[RawOutcome]) -> None:
        """Take outcomes and CHECKs. A repeated outcome is acknowledged again and otherwise
        ignored."""
        for raw in outcomes:
            with self._mutex:
                earlier = self._earlier(raw.ticket)
            if earlier is None and raw.cause != 0:
                continue  # without an acknowledgement, the daemon sends the outcome again
            if raw.cause != 0:
                self._acks.append(wire.ACK.pack(raw.ticket, 0, raw.slot))
            if earlier:
                self._take_earlier(raw)
            else:
                self._match(raw)
        self._kick()

    def _earlier(self, ticket: int) -> bool | None:
        """Return whether an earlier process watched the operation with this ticket. Return None
        while this is unknown, because watches that were packed earlier have no answer."""
        if self._session is None or not self._session.original or ticket in self._armed:
            return False
        same_shard = ticket // TICKET_SHARD == self._a_ticket // TICKET_SHARD
        if self._a_ticket and ticket >= self._a_ticket and same_shard:
            return False
        return None if self._early else True

    def _take_earlier(self, raw: RawOutcome) -> None:
        """Take an outcome or CHECK of an operation that an earlier process watched. The condition
        of a CHECK counts as false."""
        if raw.cause == 0:
            self._released.append(wire.ACK.pack(raw.ticket, raw.version, raw.slot))
        elif raw.ticket not in self._found:
            self._found.add(raw.ticket)
            outcome = Outcome(cause_name(raw.cause), [], raw.error, raw.ended_ns - raw.armed_ns)
            subject = f"operation {raw.key!r}"
            self._add(partial(guarded_call, subject, self._callback, raw.key, outcome))

    def _match(self, raw: RawOutcome) -> None:
        with self._mutex:
            operation = self._armed.get(raw.ticket)
            ended = self._end_row(raw) if operation is None else None
            if operation is None and ended is None and self._unanswered:
                self._remember(raw)
            elif raw.cause != 0:
                self._armed.pop(raw.ticket, None)
        if operation is not None:
            self._tell(operation, raw)
        elif ended is not None and self._notice(ended):
            self._kick()

    def _end_row(self, raw: RawOutcome) -> OperationTable | None:
        """Store the outcome of an operation by columns. Returns its table; None if the outcome
        belongs to no such operation, or had arrived before."""
        if len(raw.watermarks) != 1 or not self._tickets.end(
            raw.ticket, raw.cause, raw.armed_ns, raw.ended_ns, raw.watermarks[0], raw.error,
            0 in raw.missing, 0 in raw.failed,
        ):  # fmt: skip
            return None
        table: OperationTable = self._tickets.touched.pop()
        return table

    def _remember(self, raw: RawOutcome) -> None:
        """Store an outcome or a CHECK that came before the answer to its watch. A CHECK does not
        replace an outcome, because the daemon does not send the outcome again."""
        known = self._orphans.get(raw.ticket)
        if known is not None and known.cause != 0:
            return
        if len(self._orphans) >= _ORPHANS_MAX:
            del self._orphans[next(iter(self._orphans))]
        self._orphans[raw.ticket] = raw._replace(payload=b"")

    def _tell(self, operation: Operation, raw: RawOutcome) -> None:
        if raw.cause == 0:
            self._add(lambda: self._answer(operation, raw))
        else:
            self._end(operation, operation._outcome_of(raw), None)

    def _answer(self, operation: Operation, raw: RawOutcome) -> None:
        if operation.done:
            return
        if operation._holds():
            self._true.append((operation, raw.version))
        else:
            self._released.append(wire.ACK.pack(raw.ticket, raw.version, raw.slot))

    def lost(self, error: PurgatorydError) -> None:
        """End all operations with `error`, because their session is lost."""
        with self._mutex:
            operations, self._armed = self._armed, {}
            self._tickets.clear()
            tables = list(self._tickets.touched)
            self._tickets.touched.clear()
            self._orphans.clear()
        for operation in operations.values():
            self._end(operation, None, error)
        for table in tables:
            table.failed(error)
            if self._notice(table):
                self._kick()

    def expired(self, error: SessionExpired) -> None:
        """End all operations, and call `on_lost`, because the daemon has forgotten the session."""
        self.lost(error)
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            self._add(partial(guarded_call, "a lost session", on_lost, error))

    # ---- for the thread that does the work ---------------------------------------------------

    def work(self) -> None:
        """Run callbacks and conditions that are due."""
        self.release()
        while self._news:
            self._news.popleft()()

    def acks(self) -> bytes:
        """Return the acknowledgements that must be sent, a struct pg_ack each."""
        acks = []
        while self._released:
            acks.append(self._released.popleft())
        return b"".join(acks)

    def release(self) -> None:
        """Queue the acknowledgements of the outcomes that have arrived. Outcomes that arrive while
        a callback runs are acknowledged later, so that the daemon's inbox bounds the memory of this
        process."""
        while self._acks:
            self._released.append(self._acks.popleft())

    def completions(self) -> list[tuple[Operation, int]]:
        """Return (operation, version of the CHECK) for each CLIENT condition that was found true.

        An operation that has ended is left out, because another operation may have its key.
        """
        true = []
        while self._true:
            if not (found := self._true.popleft())[0].done:
                true.append(found)
        return true

    @property
    def works(self) -> bool:
        """True if callbacks or conditions wait for work()."""
        return bool(self._news)

    @property
    def speaks(self) -> bool:
        """True if acknowledgements or answers wait to be sent to the daemon."""
        return bool(self._true or self._released)

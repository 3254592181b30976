"""Jobs: the steps of a call, for the blocking and for the asyncio client.

A job is a generator that packs the records of a call and waits for the answers. It yields the time
until which it waits, and is resumed after every exchange with the daemon. A caller only starts a
job and waits until it has ended. So the interruption or cancellation of a caller does not affect
the job: it goes on, and each answer reaches its call. A call with rows for several partitions has
one job for each partition. These jobs run together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from purgatoryd.clients.bulk import Bulk, MergedResult, Part
from purgatoryd.clients.connection import NEVER_S, Connection
from purgatoryd.clients.core import BYE_S, NO_BULK_LOADS, OPEN_RETRY_S, Asked, Core
from purgatoryd.clients.packing import Entry, Pending
from purgatoryd.clients.session import State
from purgatoryd.shm_layout.errors import (
    Busy,
    CallTimeout,
    DaemonError,
    DaemonUnreachable,
    PurgatorydError,
    ShardUnavailable,
)
from purgatoryd.shm_layout.layout import BulkLoadAction, CursorAction

if TYPE_CHECKING:
    from purgatoryd.clients.bulk_loads import BulkLoadStatus
    from purgatoryd.shm_layout.wire import CursorName

Result = TypeVar("Result")
Job = Generator[float, None, Result]
"""A generator that yields the host time (monotonic, in seconds) until which it waits."""
_NO_ANSWER = (CallTimeout, DaemonUnreachable, ShardUnavailable)


class Started(Generic[Result]):
    """A started job. It stores the outcome of the job, even if the caller was interrupted."""

    __slots__ = ("_error", "_result", "connection", "done", "job", "taken")

    connection: Connection
    """The connection whose answers extend the wait for a handle of this job; not set for a job
    without a handle."""

    def __init__(self, job: Job[Result]) -> None:
        self.job = job
        self.taken = False
        """True once the job has begun."""
        self.done = False
        """True once the job has ended."""
        self._result: Result | None = None
        self._error: BaseException | None = None

    def finish(self, result: Result | None = None, error: BaseException | None = None) -> None:
        """Note the outcome, and wake the caller if it still waits."""
        self._result, self._error, self.done = result, error, True

    def outcome(self) -> Result:
        """Return the result of the ended job, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


def nothing() -> float:
    """Do nothing. This is the `after` of a client that owns no operations."""
    return NEVER_S


def in_doubt(error: BaseException) -> bool:
    """True if a call that raised `error` may still get its outcome."""
    return not isinstance(error, PurgatorydError) or isinstance(error, _NO_ANSWER)


def together(jobs: Iterable[Job[None]]) -> Job[None]:
    """Run several jobs at the same time. Once all have ended, raise the first error."""
    left, first = list(jobs), None
    if len(left) == 1:
        yield from left[0]
        return
    broken: Exception | None = None
    while True:
        steps, left, due_s = left, [], NEVER_S
        for job in steps:
            try:
                due_s = min(due_s, next(job) if broken is None else job.throw(broken))
                left.append(job)
            except StopIteration:
                continue
            except Exception as error:
                first = first or error
        if not left:
            break
        broken = None
        try:
            yield due_s
        except Exception as error:
            broken = error
    if first is not None:
        raise first


class Jobs:
    """The jobs of one client, and its exchange with its daemons.

    The owner does the waiting: it calls iterate() when a message has come, when a job was begun,
    and at the time `wake_s`.
    """

    def __init__(
        self, core: Core, after: Callable[[], float] = nothing, *, listens: bool = False
    ) -> None:
        """`after` runs in every exchange; the exchange then sends the records that `after` packs.
        `after` returns the host time at which it must run again. With `listens`, messages of the
        daemon are received even while no call waits."""
        self.core = core
        self.listens = listens
        self.ended = False
        """True once the client has sent BYE."""
        self.due_s = NEVER_S
        """The earliest time until which a job waits."""
        self._after = after
        self._after_s = self._open_s = NEVER_S
        self._calls: list[Started[Any]] = []

    @property
    def expects(self) -> bool:
        """True while an answer may come or a message must be sent."""
        if self._calls:
            return True
        connections = self.core.connections
        if not connections:
            return self.listens
        return any(one.expects(greets=self.listens) for one in connections)

    @property
    def wake_s(self) -> float:
        """Time on the host's monotonic clock at which iterate() must be called if no message comes
        earlier."""
        wake_s = min(self.due_s, self._after_s, self._open_s)
        for connection in self.core.connections:
            wake_s = min(
                wake_s, connection.resend_at_s, connection.retry_at_s, connection.redial_at_s
            )
        return wake_s

    def begin(self, call: Started[Any]) -> None:
        """Run the first step of a job."""
        call.taken = True
        if self._step(call, None):
            self._calls.append(call)

    def advance(self, broken: Exception | None = None) -> None:
        """Resume every job, or raise `broken` in it."""
        calls, self.due_s = self._calls, NEVER_S
        self._calls = [call for call in calls if self._step(call, broken)]

    def _step(self, call: Started[Any], broken: Exception | None) -> bool:
        """Run one step of a job. Returns False if the job has ended."""
        try:
            due_s = next(call.job) if broken is None else call.job.throw(broken)
            self.due_s = min(self.due_s, due_s)
            return True
        except StopIteration as stop:
            call.finish(stop.value)
        except BaseException as error:
            call.finish(error=error)
        return False

    def iterate(self) -> None:
        """Receive all messages, resend messages whose answers are overdue, and send all messages
        that may be sent. This never waits."""
        core = self.core
        for connection in self._active():
            connection.look()
            connection.ask_again()
        self.exchange()
        greets = self.listens or bool(self._calls)
        for connection in core.connections:
            connection.expect(answer=connection.expects(greets=greets))
        opens = not core.opened and self.expects
        self._open_s = core.host.monotonic_s() + OPEN_RETRY_S if opens else NEVER_S

    def exchange(self) -> None:
        """Send and receive without waiting. The last operation on each socket is a receive that
        finds no message (see Connection.exchange)."""
        came = True
        while came:
            self.advance()
            self._after_s = self._after()
            came = False
            for connection in self._active():
                came |= connection.exchange()

    def _active(self) -> Sequence[Connection]:
        """Return the connections that may have messages to send or to receive. The other
        connections are skipped, because most are idle if there are many partitions."""
        connections = self.core.connections
        if len(connections) == 1:
            return connections
        greets = self.listens or bool(self._calls)
        return [
            one
            for one in connections
            if one.news or one.redial_at_s < NEVER_S or one.expects(greets=greets)
        ]

    def refuse(self, error: BaseException) -> None:
        """End all jobs with `error`."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.finish(error=error)

    # ---- jobs of all connections ---------------------------------------------------------------

    def greeted(self, limit_s: float) -> Job[None]:
        """Find the daemon, and open a session with each partition. Raises DaemonUnreachable, or the
        daemon's refusal."""
        core = self.core
        deadline_s = core.host.monotonic_s() + limit_s
        while not core.connections:
            if core.host.monotonic_s() >= deadline_s:
                raise core.unreachable(limit_s)
            yield deadline_s
        left_s = max(deadline_s - core.host.monotonic_s(), 0.0)
        try:
            yield from together([greeted(one, left_s) for one in core.connections])
        except (PurgatorydError, OSError):
            yield from self._parted()  # else sessions with other partitions would stay open
            raise

    def flushed(self, limit_s: float) -> Job[None]:
        """Wait for all answers and collect the refusals that no caller has seen."""
        yield from together([settled(one, "flush", limit_s) for one in self.core.connections])
        self.core.report()

    def closing(self, limit_s: float) -> Job[None]:
        """Wait at most `limit_s` for all answers, send BYE, and end the client."""
        connections, late = self.core.connections, None
        try:
            yield from together(
                [settled(one, "close", limit_s, extend=False) for one in connections]
            )
        except (PurgatorydError, OSError) as error:
            late = error
        self.core.report()
        for connection in connections:
            connection.session.bye()
        yield from self._parted()
        self.ended = True
        if late is not None:
            raise late

    def _parted(self) -> Job[None]:
        """End all open sessions.

        If no answer comes, the daemon ends a session by itself once it notices that the client is
        gone.
        """
        open_ones = [one for one in self.core.connections if one.session.state is State.OPEN]
        with suppress(PurgatorydError, OSError):
            yield from together([parted(one) for one in open_ones])


# ---- steps of jobs ---------------------------------------------------------------------------


def until(
    connection: Connection, done: Callable[[], bool], subject: str, limit_s: float, *,
    extend: bool = True, single: bool = False,
) -> Job[None]:  # fmt: skip
    """Wait until done() returns True. Raises DaemonError after `limit_s` seconds.

    `extend`: each answer restarts the limit. `single`: answers do not restart the limit while the
    connection has records that were refused as BUSY and will be sent again.
    """
    host = connection.host
    answers, deadline_s = connection.answers, host.monotonic_s() + limit_s
    while not done():
        connection.give_up()
        progress = connection.answers != answers and not (single and connection.session.retries)
        if extend and progress:
            answers, deadline_s = connection.answers, host.monotonic_s() + limit_s
        if host.monotonic_s() >= deadline_s:
            raise connection.overdue(subject, limit_s)
        yield deadline_s


def settled(
    connection: Connection, subject: str, limit_s: float, *, extend: bool = True
) -> Job[None]:
    """Wait for the answers to all records that have been packed so far."""
    packer = connection.packer
    packer.seal()
    packed = packer.packed
    yield from until(connection, lambda: packer.settled >= packed, subject, limit_s, extend=extend)


def space(connection: Connection, queue_limit: int, limit_s: float) -> Job[None]:
    """Wait until fewer than `queue_limit` packed calls have no answer."""
    packer = connection.packer
    packer.seal()
    subject = "free slots in the queue"
    yield from until(connection, lambda: packer.queued < queue_limit, subject, limit_s)


# ---- jobs of one connection ------------------------------------------------------------------


def greeted(connection: Connection, limit_s: float) -> Job[None]:
    """Wait for the daemon's welcome. Raises the daemon's refusal."""
    session = connection.session

    def answered() -> bool:
        return session.state is not State.GREETING or connection.full is not None

    yield from until(connection, answered, "hello", limit_s)
    if session.refusal is not None:
        raise session.refusal


def parted(connection: Connection) -> Job[None]:
    """End the session, and wait at most BYE_S for the daemon's answer."""
    session = connection.session
    if not session.leaving:
        session.bye()
    yield from until(connection, lambda: session.state is State.CLOSED, "bye", BYE_S, extend=False)


def single(entry: Entry[Any], limit_s: float) -> Job[None]:
    """Pack one call, unless a direct call has sent it, and wait for its answer."""
    pending = entry.pending
    if not pending.packed:
        pending.connection.packer.add(entry)
    yield from awaited(pending, limit_s, (pending,))


def several(queue_limit: int, entries: Sequence[Entry[Any]], limit_s: float) -> Job[None]:
    """Pack each call once the queue has space, and wait for all answers."""
    calls = [entry.pending for entry in entries]
    for call in calls:
        call.connection.planned.add(call)
    try:
        for entry in entries:
            connection = entry.pending.connection
            if connection.packer.queued >= queue_limit:
                yield from space(connection, queue_limit, limit_s)
            connection.packer.add(entry)
    finally:
        for call in calls:
            call.connection.planned.discard(call)
    for pending in calls:
        yield from awaited(pending, limit_s, calls)


def awaited(
    pending: Pending | Started[Any], limit_s: float, calls: Iterable[Pending] = ()
) -> Job[None]:
    """Wait until `pending` has ended.

    `calls`: calls for which no other job waits. At the timeout, those that were refused as BUSY
    are not sent again, and BUSY is their outcome; those that were never sent are taken back.
    """
    try:
        yield from until(
            pending.connection, lambda: pending.done or _never_sent(pending), "call", limit_s,
            single=True,
        )  # fmt: skip
    except DaemonError as error:
        abandoned = [one.abandon(calls) for one in {call.connection for call in calls}]
        if not (any(abandoned) and pending.done):
            for call in calls:
                call.connection.withdraw(call, error)
            raise
    if _never_sent(pending):
        raise CallTimeout("a call that was never sent", 0.0, 0)


def _never_sent(pending: Pending | Started[Any]) -> bool:
    planned = pending.connection.planned
    return isinstance(pending, Pending) and not (pending.packed or pending in planned)


def bulk(
    queue_limit: int, packed: Bulk, wait: bool, limit_s: float, *, last: bool
) -> Job[None]:  # fmt: skip
    """Submit the batches of all parts of a bulk call once the queues have space.

    `last`: True if no other call, such as settle(), is to wait for the same result. Then rows that
    were refused as BUSY are abandoned at the timeout. If there are several parts, the error of
    a part becomes the error of its rows.
    """
    whole = packed.result
    jobs = [submitted(queue_limit, part, wait, limit_s, last=last) for part in packed.parts]
    if isinstance(whole, MergedResult):
        yield from together([_noted(whole, job) for job in jobs])
    else:
        yield from together(jobs)


def _noted(whole: MergedResult, job: Job[None]) -> Job[None]:
    try:
        yield from job
    except (Busy, DaemonError) as error:
        whole.fail(error)


def submitted(
    queue_limit: int, part: Part, wait: bool, limit_s: float, *, last: bool, single: bool = False
) -> Job[None]:
    """Submit the batches of one part of a bulk call; `single`: as for until(). Raises Busy,
    DaemonError."""
    connection, result = part.connection, part.result
    packer, unsent = connection.packer, deque(part.batches)
    result.begin()
    try:
        while unsent:
            if packer.queued >= queue_limit:
                yield from space(connection, queue_limit, limit_s)
            packer.bulk(unsent.popleft())
        if wait:
            yield from until(connection, lambda: result.done, "bulk call", limit_s, single=single)
    except DaemonError as error:
        if last and not result.done:
            result.abandon(unsent)
        for batch in unsent:
            packer.packed += batch.count
            batch.settle(error)
        raise


def watched(queue_limit: int, parts: Sequence[Part], limit_s: float) -> Job[None]:
    """Submit the batches of all parts of a watch_many() with columns, and wait for all answers.
    Rows that are still refused as BUSY after `limit_s` seconds keep that status. Raises
    DaemonError."""
    jobs = [submitted(queue_limit, part, True, limit_s, last=True, single=True) for part in parts]
    yield from together([_refusable(job) for job in jobs])


def _refusable(job: Job[None]) -> Job[None]:
    with suppress(Busy):
        yield from job


def asked(
    connection: Connection, ask: Callable[[], Asked[Result]], subject: str, limit_s: float
) -> Job[Result]:
    """Call `ask` once all earlier records are answered, and return the answer to its question."""
    yield from settled(connection, subject, limit_s)
    question = ask()
    try:
        yield from until(connection, lambda: question.done, subject, limit_s)
    finally:
        connection.session.forget(question.query)
    return question.outcome()


def cursor_deleted(core: Core, name: CursorName, limit_s: float) -> Job[None]:
    """Delete a cursor in all shards that hold the namespace."""
    for connection in core.connections:
        ask = partial(core.cursor_question, connection, name, CursorAction.DELETE, {})
        yield from asked(connection, ask, "cursor", limit_s)


BulkLoadJob = Callable[[Core, bytes, int, float], Job[Result]]
"""The arguments are the core, the id of the bulk load, a fencing token and a limit in seconds."""


def bulk_load(
    action: BulkLoadAction, core: Core, bulk_load: bytes, fencing_token: int, limit_s: float
) -> Job[None]:
    """Open, close or forget a bulk load."""
    ask = partial(core.bulk_load_question, bulk_load, action, fencing_token)
    yield from asked(core.whole(NO_BULK_LOADS), ask, "bulk load", limit_s)


def bulk_load_status(core: Core, bulk_load: bytes, _: int, limit_s: float) -> Job[BulkLoadStatus]:
    """Ask the daemon which rows of a bulk load are done, and return the status."""
    from purgatoryd.clients.bulk_loads import StatusParts

    parts, connection = StatusParts(), core.whole(NO_BULK_LOADS)
    while parts.start is not None:
        ask = partial(core.bulk_load_question, bulk_load, BulkLoadAction.STATUS, start=parts.start)
        parts.take((yield from asked(connection, ask, "bulk load", limit_s)))
    return parts.status


def bulk_load_opened(
    core: Core, bulk_load_id: bytes, fencing_token: int, limit_s: float
) -> Job[BulkLoadStatus]:
    """Open a bulk load, and return its status."""
    yield from bulk_load(BulkLoadAction.OPEN, core, bulk_load_id, fencing_token, limit_s)
    return (yield from bulk_load_status(core, bulk_load_id, 0, limit_s))

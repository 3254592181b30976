"""Jobs: the steps of a call, for the blocking and for the asyncio client.

A job is a generator that packs the records of a call and waits for the answers. It yields the time
until which it waits, and is resumed after every exchange with the daemon. A caller only starts a
job and waits for its end. So an interrupted or cancelled caller changes nothing: the job
goes on, and each answer reaches its call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from purgatoryd.clients.batch import Batch
from purgatoryd.clients.bulk import BulkResult
from purgatoryd.clients.bulk_loads import BulkLoadStatus, StatusParts
from purgatoryd.clients.core import BYE_S, NEVER_S, OPEN_RETRY_S, Asked, Core
from purgatoryd.clients.packing import Entry, Pending
from purgatoryd.clients.session import State
from purgatoryd.shm_layout.errors import (
    CallTimeout,
    DaemonError,
    DaemonUnreachable,
    PurgatorydError,
)
from purgatoryd.shm_layout.layout import BulkLoadAction

Result = TypeVar("Result")
Job = Generator[float, None, Result]
"""A generator that yields the host time (monotonic, in seconds) until which it waits."""
_NO_ANSWER = (CallTimeout, DaemonUnreachable)


class Started(Generic[Result]):
    """A started job, and its outcome once it has ended, also if its caller was interrupted."""

    __slots__ = ("_error", "_result", "done", "job", "taken")

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
        """Return what the ended job returned, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


def nothing() -> float:
    """Do nothing: `after` of a client that owns no operations."""
    return NEVER_S


def in_doubt(error: BaseException) -> bool:
    """True if a call that ended with `error` may still have an outcome."""
    return not isinstance(error, PurgatorydError) or isinstance(error, _NO_ANSWER)


class Jobs:
    """The jobs of one client, and its exchange with the daemon.

    A shell waits, and calls iterate() when a message has come or a call was begun, or at `wake_s`.
    """

    def __init__(
        self, core: Core, after: Callable[[], float] = nothing, *, listens: bool = False
    ) -> None:
        """`after` runs with every exchange, which then sends the records that it packs; it returns
        the time at which it has to run again. With `listens` messages of the daemon are received
        also while no call waits."""
        self.core = core
        self.listens = listens
        self.ended = False
        """True once the client has sent BYE."""
        self.blocked = False
        """True if the socket could not take a message."""
        self.due_s = NEVER_S
        """The earliest deadline of the calls."""
        self._after = after
        self._after_s = self._open_s = NEVER_S
        self._calls: list[Started[Any]] = []
        self._planned: set[Pending] = set()
        """Calls that a job packs once the queue has space."""

    @property
    def expects(self) -> bool:
        """True while an answer may come, or something must be sent."""
        core = self.core
        greets = self.listens and core.session.state is State.GREETING
        return bool(
            self._calls or self.blocked or core.packer.sealed or core.session.busy or greets
        )

    @property
    def wake_s(self) -> float:
        """When iterate() is due, on the host's monotonic clock, if no message comes before."""
        core = self.core
        return min(self.due_s, self._after_s, self._open_s, core.resend_at_s, core.retry_at_s)

    def begin(self, call: Started[Any]) -> None:
        """Does the first step of a job."""
        call.taken = True
        if self._step(call, None):
            self._calls.append(call)

    def advance(self, broken: Exception | None = None) -> None:
        """Resumes every job, or raises `broken` in it."""
        calls, self.due_s = self._calls, NEVER_S
        self._calls = [call for call in calls if self._step(call, broken)]

    def _step(self, call: Started[Any], broken: Exception | None) -> bool:
        """Does one step of a job. False = it has ended."""
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
        """Receive what has come, ask again for what is overdue, and send what may be sent. Never
        waits."""
        core = self.core
        core.look()
        core.ask_again()
        self.exchange()
        expects = self.expects
        core.expect(answer=expects and core.channel is not None)
        opens = expects and core.channel is None
        self._open_s = core.host.monotonic_s() + OPEN_RETRY_S if opens else NEVER_S

    def exchange(self) -> None:
        """Send and receive without waiting. The last use of the socket is an empty receive."""
        core = self.core
        while True:
            self.advance()
            self._after_s = self._after()
            core.packer.seal()
            self.blocked = core.push()
            if not core.pull():
                return

    def refuse(self, error: BaseException) -> None:
        """Ends all calls."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.finish(error=error)

    # ---- steps of jobs -------------------------------------------------------------------------

    def until(
        self, done: Callable[[], bool], subject: str, limit_s: float, *, extend: bool = True,
        single: bool = False,
    ) -> Job[None]:  # fmt: skip
        """Wait until `done()`. Raises DaemonError after `limit_s` seconds.

        With `extend` each answer starts `limit_s` again, unless a `single` call is refused as BUSY.
        """
        core = self.core
        answers, deadline_s = core.answers, core.host.monotonic_s() + limit_s
        while not done():
            core.give_up()
            progress = core.answers != answers and not (single and core.session.retries)
            if extend and progress:
                answers, deadline_s = core.answers, core.host.monotonic_s() + limit_s
            if core.host.monotonic_s() >= deadline_s:
                raise core.overdue(subject, limit_s)
            yield deadline_s

    def settled(self, subject: str, limit_s: float, *, extend: bool = True) -> Job[None]:
        """Wait for the answers to all records that are packed."""
        packer = self.core.packer
        packer.seal()
        packed = packer.packed
        yield from self.until(lambda: packer.settled >= packed, subject, limit_s, extend=extend)

    def space(self, queue_limit: int, limit_s: float) -> Job[None]:
        """Waits until fewer than `queue_limit` packed calls have no answer."""
        packer = self.core.packer
        packer.seal()
        subject = "free slots in the queue"
        yield from self.until(lambda: packer.queued < queue_limit, subject, limit_s)

    # ---- jobs ----------------------------------------------------------------------------------

    def greeted(self, limit_s: float) -> Job[None]:
        """Waits for the daemon's welcome, or its refusal."""
        session = self.core.session
        yield from self.until(lambda: session.state is not State.GREETING, "hello", limit_s)

    def single(self, entry: Entry[Any], limit_s: float) -> Job[None]:
        """Packs one call and waits for its answer."""
        self.core.packer.add(entry)
        yield from self.awaited(entry.pending, limit_s, (entry.pending,))

    def several(self, queue_limit: int, entries: Sequence[Entry[Any]], limit_s: float) -> Job[None]:
        """Pack calls as the queue has space, and wait for all answers."""
        packer, calls = self.core.packer, [entry.pending for entry in entries]
        self._planned.update(calls)
        try:
            for entry in entries:
                if packer.queued >= queue_limit:
                    yield from self.space(queue_limit, limit_s)
                packer.add(entry)
        finally:
            self._planned.difference_update(calls)
        for pending in calls:
            yield from self.awaited(pending, limit_s, calls)

    def awaited(
        self, pending: Pending | Started[Any], limit_s: float, calls: Iterable[Pending] = ()
    ) -> Job[None]:
        """Wait for `pending`.

        `calls` have no other waiter. At the timeout, those that were refused as BUSY are not sent
        again and keep that outcome; a call that was never sent is taken back.
        """
        try:
            yield from self.until(
                lambda: pending.done or self._never_sent(pending), "call", limit_s, single=True
            )
        except DaemonError as error:
            if not (self.core.abandon(calls) and pending.done):
                for call in calls:
                    self.core.withdraw(call, error)
                raise
        if self._never_sent(pending):
            raise CallTimeout("a call that was never sent", 0.0, 0)

    def _never_sent(self, pending: Pending | Started[Any]) -> bool:
        return isinstance(pending, Pending) and not (pending.packed or pending in self._planned)

    def submitted(
        self, queue_limit: int, result: BulkResult, batches: Iterable[Batch], wait: bool,
        limit_s: float, *, last: bool,
    ) -> Job[None]:  # fmt: skip
        """Submit all batches of a bulk call as the queue has space. `last`: no other call waits
        for `result`, so at the timeout busy rows are abandoned."""
        packer, unsent = self.core.packer, deque(batches)
        try:
            while unsent:
                if packer.queued >= queue_limit:
                    yield from self.space(queue_limit, limit_s)
                packer.bulk(unsent.popleft())
            if wait:
                yield from self.until(lambda: result.done, "bulk call", limit_s)
        except DaemonError as error:
            if last and not result.done:
                result.abandon(unsent)
            for batch in unsent:
                packer.packed += batch.count
                batch.settle(error)
            raise

    def asked(self, ask: Callable[[], Asked[Result]], subject: str, limit_s: float) -> Job[Result]:
        """Ask once all earlier records are answered, and return the answer."""
        yield from self.settled(subject, limit_s)
        question = ask()
        try:
            yield from self.until(lambda: question.done, subject, limit_s)
        finally:
            self.core.session.forget(question.query)
        return question.outcome()

    def bulk_load(
        self, action: BulkLoadAction, bulk_load: bytes, fencing_token: int, limit_s: float
    ) -> Job[None]:
        """Open, close or forget a bulk load."""
        ask = partial(self.core.bulk_load_question, bulk_load, action, fencing_token)
        yield from self.asked(ask, "bulk load", limit_s)

    def bulk_load_status(self, bulk_load: bytes, _: int, limit_s: float) -> Job[BulkLoadStatus]:
        """Ask which rows of a bulk load are done."""
        parts = StatusParts()
        while parts.start is not None:
            ask = partial(
                self.core.bulk_load_question, bulk_load, BulkLoadAction.STATUS, start=parts.start
            )
            parts.take((yield from self.asked(ask, "bulk load", limit_s)))
        return parts.status

    def bulk_load_opened(
        self, bulk_load: bytes, fencing_token: int, limit_s: float
    ) -> Job[BulkLoadStatus]:
        """Open a bulk load, and ask which of its rows are done."""
        yield from self.bulk_load(BulkLoadAction.OPEN, bulk_load, fencing_token, limit_s)
        return (yield from self.bulk_load_status(bulk_load, 0, limit_s))

    def flushed(self, limit_s: float) -> Job[None]:
        """Wait for all answers and collect the refusals that no caller has seen."""
        yield from self.settled("flush", limit_s)
        self.core.report()

    def closing(self, limit_s: float) -> Job[None]:
        """Wait at most `limit_s` for all answers, send BYE, and end the client."""
        session, late = self.core.session, None
        try:
            yield from self.settled("close", limit_s, extend=False)
        except (PurgatorydError, OSError) as error:
            late = error
        self.core.report()
        session.bye()
        # Without an answer the daemon ends the session once it sees that the client is gone.
        with suppress(PurgatorydError, OSError):
            yield from self.until(lambda: session.state is State.CLOSED, "bye", BYE_S, extend=False)
        self.ended = True
        if late is not None:
            raise late
